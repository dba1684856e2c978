"""diffusers: a U-Net and a text encoder in groups of their own, a constant lr, EMA; LoRA on it."""

import copy
from statistics import fmean

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim import AdamW

from mechanic.integrations import metrics
from mechanic.torch import mechanize, tuner

diffusers = pytest.importorskip("diffusers")
# What diffusers and its dependencies warn about among themselves is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

PIXELS, TOKENS, WIDTH = 8, 6, 8
GENERATOR = torch.Generator().manual_seed(0)
WORDS = torch.randint(50, (4, TOKENS), generator=GENERATOR)
PICTURES = torch.randn(4, 3, PIXELS, PIXELS, generator=GENERATOR).mul(0.3)


class Training:
    """The loop of diffusers' examples `text_to_image`, on four pictures with a text each."""

    def __init__(self, dtype=torch.float32, lora=False, base=AdamW, **options):
        from transformers import CLIPTextConfig, CLIPTextModel

        torch.manual_seed(0)
        self.unet = diffusers.UNet2DConditionModel(
            sample_size=PIXELS,
            in_channels=3,
            out_channels=3,
            layers_per_block=1,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
            cross_attention_dim=WIDTH,
            attention_head_dim=4,
        ).to(dtype)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1}
        self.text = CLIPTextModel(
            CLIPTextConfig(vocab_size=50, num_attention_heads=2, max_position_embeddings=8, **sizes)
        ).to(dtype)
        if lora:
            from peft import LoraConfig

            self.unet.requires_grad_(False)
            self.text.requires_grad_(False)
            self.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]))
        groups = [
            {"params": [p for p in model.parameters() if p.requires_grad], "name": name, "lr": lr}
            for name, model, lr in (("unet", self.unet, 1.0), ("text", self.text, 0.1))
        ]
        self.optimizer = mechanize(base([g for g in groups if g["params"]]), **options)
        self.schedule = diffusers.optimization.get_scheduler(
            "constant_with_warmup", self.optimizer, num_warmup_steps=3
        )
        self.noises = diffusers.DDPMScheduler(num_train_timesteps=100)
        self.average = diffusers.training_utils.EMAModel(self.unet.parameters(), decay=0.9)

    @property
    def parts(self):
        return {
            "unet": self.unet,
            "text": self.text,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "average": self.average,
        }

    def step(self, t):
        draw = torch.Generator().manual_seed(t)
        noise = torch.randn(PICTURES.shape, generator=draw)
        times = torch.randint(100, (len(PICTURES),), generator=draw)
        noisy = self.noises.add_noise(PICTURES, noise, times).to(self.unet.dtype)
        words = self.text(WORDS).last_hidden_state
        loss = mse_loss(self.unet(noisy, times, words).sample.float(), noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.unet.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.average.step(self.unet.parameters())
        return loss.item()

    def run(self, start, end):
        return [self.step(t) for t in range(start, end)]

    def state(self):
        return copy.deepcopy({name: part.state_dict() for name, part in self.parts.items()})


@pytest.mark.nightly
def test_the_loss_falls():
    losses = Training().run(0, 60)
    assert fmean(losses[-10:]) < 0.8 * fmean(losses[:5])


def assert_logged(training):
    """A rate for the U-Net, and one for the text encoder."""
    logged = metrics(training.optimizer)
    assert set(logged) == {"mechanic/scale", "mechanic/lr/unet", "mechanic/lr/text"}
    assert logged["mechanic/lr/unet"] == pytest.approx(10 * logged["mechanic/lr/text"])
    assert 1e-5 < logged["mechanic/lr/unet"] < 1


@pytest.mark.nightly
def test_interrupted_and_resumed_with_its_average(tmp_path):
    training = Training()
    training.run(0, 20)
    torch.save(training.state(), tmp_path / "saved.pt")
    training.run(20, 40)
    assert_logged(training)
    resumed = Training()
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    for name, part in resumed.parts.items():
        part.load_state_dict(saved[name])
    resumed.run(20, 40)
    assert tuner(training.optimizer).scale == tuner(resumed.optimizer).scale > 0
    for name in ("unet", "text"):
        expected, found = training.parts[name].state_dict(), resumed.parts[name].state_dict()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    for one, two in zip(training.average.shadow_params, resumed.average.shadow_params, strict=True):
        assert torch.equal(one, two)


@pytest.mark.nightly
def test_lora_moves_the_adapters_alone():
    pytest.importorskip("peft")
    training = Training(lora=True)
    before = {name: param.detach().clone() for name, param in training.unet.named_parameters()}
    losses = training.run(0, 100)
    moved = {
        name for name, p in training.unet.named_parameters() if not torch.equal(p, before[name])
    }
    assert moved == {name for name in before if "lora" in name}
    assert fmean(losses[-20:]) < fmean(losses[:20])


@pytest.mark.nightly
def test_weights_in_bfloat16_lose_nothing():
    """A small learning rate that bfloat16 alone would round away: as good as in float32."""
    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        displacement = str(dtype).removeprefix("torch.")
        training = Training(dtype=dtype, displacement=displacement)
        ends[dtype] = fmean(training.run(0, 100)[-40:])
    assert ends[torch.bfloat16] < 1.1 * ends[torch.float32]


@pytest.mark.nightly
def test_eight_bit_states_of_torchao():
    optim = pytest.importorskip("torchao.optim")
    ends = {}
    for base in (AdamW, optim.AdamW8bit):
        training = Training(base=lambda groups, base=base: base(groups, lr=1.0))
        with torch.compiler.set_stance("force_eager"):  # it would compile its step for minutes
            ends[base] = fmean(training.run(0, 100)[-40:])
    assert ends[optim.AdamW8bit] < 1.1 * ends[AdamW]
