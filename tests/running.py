"""Scripts for `mechanic run`, written to a folder and run in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

MECHANIC = [sys.executable, "-m", "mechanic"]
SITE = Path(__file__).with_name("site")
PATH = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))

# A regression on data it makes itself; `train` prints every bit of where it ends.
TRAINING = '''
import torch
from torch import nn

torch.manual_seed(0)
inputs = torch.randn(64, 8)
targets = inputs @ torch.randn(8, 1)


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def train(model, *optimizers, steps=30, after=lambda: None):
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        after()
    return loss


def leave_group():
    """End a rank. At a usual end a thread of gloo may wait for an interpreter that is gone, and
    with it the process, for ever (pytorch issue 190489)."""
    import os, sys
    import torch.distributed
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def bits(model):
    return " ".join(value.hex() for p in model.parameters() for value in p.flatten().tolist())
'''


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", "TERM": "xterm", "PYTHONPATH": PATH, **more}


def write(folder: Path, body: str, *, name: str = "train.py", training: bool = True) -> Path:
    """A script; with `training` it can use what TRAINING has."""
    if training:
        (folder / "training.py").write_text(TRAINING, encoding="utf-8")
        body = "from training import *\n" + dedent(body)
    path = folder / name
    path.write_text(dedent(body), encoding="utf-8")
    return path


def call(
    folder: Path, *arguments: str, python: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """`mechanic run` with arguments, or plain python with the same."""
    command = [sys.executable] if python else [*MECHANIC, "run"]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class Logged:
    """A log folder, read."""

    def __init__(self, folder: Path) -> None:
        lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.rows = [line for line in self.lines if "event" not in line]
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text("utf-8"))

    def of(self, optimizer: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["optimizer"] == optimizer]

    def found(self, optimizer: str) -> dict[str, Any]:
        (one,) = (one for one in self.summary["optimizers"] if one["optimizer"] == optimizer)
        return dict(one)
