"""timm: its groups, its layer decay, its schedules, its checkpoints and its optimizers."""

import csv
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from comparing import assert_same, bits
from pages import blocks, sections
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from mechanic.integrations import metrics
from mechanic.torch import mechanize, tuner

# What timm and its dependencies warn about among themselves is not ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.nightly]

EPOCHS, UPDATES, WARM_UP = 10, 6, 1
GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.randint(3, (48,), generator=GENERATOR)
KINDS = torch.randn(3, 3, 8, 8, generator=GENERATOR)
PICTURES = KINDS[LABELS] + torch.randn(48, 3, 8, 8, generator=GENERATOR)


class Named(type):
    """A class for each name that is asked for, as torchvision's interpolation modes."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class EmptyTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a torchvision that has every name, and does nothing."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module: ModuleType) -> None:
        def named(name: str) -> Named:
            if name.startswith("__"):
                raise AttributeError(name)
            return Named(name, (), {})

        module.__getattr__ = named


@contextmanager
def some_torchvision():
    """timm imports torchvision to read pictures, which nobody does here. Where torch is a build
    that no wheel of torchvision is made for, an empty one takes its place."""
    finders = [] if is_usable("torchvision") else [EmptyTorchvision()]
    sys.meta_path[:0] = finders
    try:
        yield
    finally:
        for finder in finders:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]


def is_usable(package: str) -> bool:
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError):  # the second where its operators are of another build
        return False
    return True


if importlib.util.find_spec("timm") is None:
    pytest.skip("timm is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def timm():
    with some_torchvision():
        import timm
        import timm.optim
        import timm.scheduler
        import timm.utils
    return timm


class Training:
    """A small vision transformer, trained as timm's script `train.py` trains one."""

    def __init__(self, timm, folder=None, lr=1.0, opt="adamw"):
        torch.manual_seed(0)
        sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 2}
        self.model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **sizes)
        made = timm.optim.create_optimizer_v2(
            self.model, opt=opt, lr=lr, weight_decay=0.05, layer_decay=0.75
        )
        inner = getattr(made, "_base_optimizer", made)  # of timm's Lookahead
        self.optimizer, self.tuned = made, mechanize(inner)
        self.schedule, _ = timm.scheduler.create_scheduler_v2(
            made,
            sched="cosine",
            num_epochs=EPOCHS,
            warmup_epochs=WARM_UP,
            warmup_lr=0.1 * lr,
            step_on_epochs=False,
            updates_per_epoch=UPDATES,
        )
        self.average = timm.utils.ModelEmaV3(self.model, decay=0.9)
        self.saver = timm.utils.CheckpointSaver(
            self.model, made, model_ema=self.average, checkpoint_dir=str(folder), decreasing=True
        )
        self.rates = []

    def run(self, start, end):
        for epoch in range(start, end):
            for update in range(UPDATES):
                rows = slice(8 * update, 8 * update + 8)
                loss = cross_entropy(self.model(PICTURES[rows]), LABELS[rows])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.average.update(self.model)
                self.schedule.step_update(epoch * UPDATES + update + 1)
                rates = [float(group["effective_lr"]) for group in self.tuned.param_groups]
                self.rates.append(rates)
        return loss.item()

    def loss(self):
        with torch.no_grad():
            return cross_entropy(self.model(PICTURES), LABELS).item()

    def state(self):
        models = {"model": self.model.state_dict(), "average": self.average.state_dict()}
        return bits(models | {"optimizer": self.optimizer.state_dict()})


@pytest.mark.parametrize("opt", ["adamw", "lookahead_adamw"])
def test_interrupted_and_resumed_from_timms_checkpoint(timm, tmp_path, opt):
    from timm.models import load_checkpoint, resume_checkpoint

    training = Training(timm, tmp_path, opt=opt)
    start = training.loss()
    training.run(0, 5)
    middle = tuner(training.tuned).scale
    training.saver.save_checkpoint(4, metric=training.loss())
    training.run(5, EPOCHS)
    assert training.loss() < 0.8 * start

    resumed = Training(timm, tmp_path, opt=opt)
    path = str(tmp_path / "checkpoint-4.pth.tar")
    epoch = resume_checkpoint(resumed.model, path, resumed.optimizer, log_info=False)
    load_checkpoint(resumed.average.module, path, use_ema=True)
    assert epoch == 5
    assert tuner(resumed.tuned).scale == middle
    resumed.schedule.step_update(epoch * UPDATES)
    resumed.run(epoch, EPOCHS)
    assert tuner(training.tuned).scale == tuner(resumed.tuned).scale != middle
    assert_same(training.state(), resumed.state())


def test_a_layer_keeps_its_ratio_and_the_typed_lr_does_not_matter(timm):
    training, other = Training(timm), Training(timm, lr=1e-3)
    losses = [training.run(0, EPOCHS), other.run(0, EPOCHS)]
    ratios = [group["lr_scale"] for group in training.optimizer.param_groups]
    assert len(set(ratios)) == 4
    for rates in training.rates:
        expected = [rates[-1] * ratio / ratios[-1] for ratio in ratios]
        assert rates == pytest.approx(expected, rel=1e-6)
    for rates, others in zip(training.rates, other.rates, strict=True):
        assert rates == pytest.approx(others, rel=1e-3)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert training.rates[EPOCHS * UPDATES // 2][-1] > 10 * training.rates[1][-1] > 0


def test_what_was_learned_is_in_timms_summary(timm, tmp_path):
    training = Training(timm, tmp_path)
    learned = []
    for epoch in range(EPOCHS):
        train = {"loss": training.run(epoch, epoch + 1)} | metrics(training.optimizer)
        rates = [float(group["effective_lr"]) for group in training.optimizer.param_groups]
        timm.utils.update_summary(
            epoch,
            train,
            {"loss": training.loss()},
            str(tmp_path / "summary.csv"),
            lr=sum(rates) / len(rates),
            write_header=epoch == 0,
        )
        learned += [metrics(training.optimizer)["mechanic/scale"], sum(rates) / len(rates)]
    with open(tmp_path / "summary.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    read = [float(row[name]) for row in rows for name in ("train_mechanic/scale", "lr")]
    assert read == pytest.approx(learned)
    assert max(read[::2]) > 2 * read[0] > 0


@pytest.mark.parametrize("opt", ["lion", "adamp", "nadamw", "adopt", "lamb", "rmsproptf", "sgdp"])
def test_an_optimizer_of_timm_as_the_base(timm, opt):
    inputs = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    targets = inputs[:, :1] * inputs[:, 1:2]
    ends = []
    for lr in (1e-3, 1.0, 1e3):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(10, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = mechanize(timm.optim.create_optimizer_v2(net, opt=opt, lr=lr))
        schedule = timm.scheduler.CosineLRScheduler(optimizer, t_initial=60, t_in_epochs=False)
        losses, scales = [], []
        for update in range(60):
            losses.append(mse_loss(net(inputs), targets))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step_update(update + 1)
            scales.append(float(tuner(optimizer).scale))
        assert losses[-1] < 0.9 * losses[0]
        assert max(scales) > 2 * scales[2] > 0
        ends.append(losses[-1].item())
    assert ends == pytest.approx([ends[1]] * 3, rel=2e-3)


def test_the_recipe_of_the_docs(timm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    loader = DataLoader(TensorDataset(PICTURES, LABELS), batch_size=8)
    (recipe,) = blocks(sections("docs/trainers.md")["timm"])
    names = {"torch": torch, "model": Training(timm).model, "loader": loader}
    exec(recipe.code, names)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert printed[-1] == f"3 {metrics(names['optimizer'])}"
    assert len(list(tmp_path.glob("out/checkpoint-*.pth.tar"))) == 4
    assert metrics(names["optimizer"])["mechanic/scale"] > 1e-3
