"""accelerate: `accelerator.log` writes what was learned, and `load_state` goes on with it."""

import pytest
import torch
from log_files import tensorboard_scalars, watch
from torch.utils.data import DataLoader, TensorDataset

from mechanic.integrations import metrics
from mechanic.torch import mechanize, tuner

# What accelerate and its dependencies warn about among themselves is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(128, 10, generator=GENERATOR)
TARGETS = INPUTS @ torch.randn(10, 1, generator=GENERATOR)


@pytest.mark.parametrize("precision", ["no", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_what_was_learned_is_logged_saved_and_loaded(tmp_path, precision):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state()
    PartialState._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        log_with="tensorboard",
        project_dir=tmp_path,
    )
    accelerator.init_trackers("run")
    net = torch.nn.Linear(10, 1)
    optimizer = mechanize(torch.optim.AdamW(net.parameters(), lr=10.0))
    noted = watch(optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=16)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)

    def epochs(count: int) -> None:
        for _ in range(count):
            for inputs, targets in loader:
                with accelerator.accumulate(net):
                    loss = torch.nn.functional.mse_loss(net(inputs), targets)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    step = int(tuner(optimizer).metrics()["steps"])
                    accelerator.log(metrics(optimizer), step=step)

    epochs(6)
    accelerator.save_state(tmp_path / "saved")
    epochs(6)
    expected = [param.detach().clone() for param in net.parameters()]
    learned = dict(noted)
    accelerator.end_training()
    assert learned[48][0] > 2 * learned[2][0] > 0
    read = tensorboard_scalars(tmp_path / "run")
    scales = {step: scale for step, (scale, _) in learned.items()}
    rates = {step: rate for step, (_, (rate,)) in learned.items()}
    assert read["mechanic/scale"] == pytest.approx(scales, rel=1e-6)
    assert read["mechanic/lr/0"] == pytest.approx(rates, rel=1e-6)

    accelerator.load_state(tmp_path / "saved")
    assert metrics(optimizer)["mechanic/scale"] == pytest.approx(learned[24][0], rel=1e-6)
    epochs(6)
    assert all(map(torch.equal, net.parameters(), expected))
    assert noted == learned
