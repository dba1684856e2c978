"""The library needs torch alone, which itself does without NumPy."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name == "numpy" else find(name, *rest)

import torch
from mechanic.torch import mechanize, tuner


def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    return model, mechanize(torch.optim.AdamW(model.parameters(), lr=1.0))


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


inputs = torch.randn(256, 20, generator=torch.Generator().manual_seed(1))
targets = inputs.sum(1, keepdim=True)
model, optimizer = make()
first = train(model, optimizer, 1) and float(tuner(optimizer).scale)
losses = train(model, optimizer, 29)
assert losses[-1] < 0.5 * losses[0], losses
assert float(tuner(optimizer).scale) > 10 * first
torch.save([model.state_dict(), optimizer.state_dict()], sys.argv[1])

other, resumed = make()
for part, saved in zip((other, resumed), torch.load(sys.argv[1], weights_only=True)):
    part.load_state_dict(saved)
assert train(other, resumed, 5) == train(model, optimizer, 5)
handle = tuner(resumed)
assert handle.metrics() and handle.suggest_lr() and repr(resumed)
handle.diagnose()
handle.detach()
assert "numpy" not in sys.modules
print("trained")
"""


@pytest.mark.nightly  # to import torch takes seconds
def test_trains_saves_and_loads_without_numpy(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "checkpoint.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"
