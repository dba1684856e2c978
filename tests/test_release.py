"""Wheel and sdist install into empty environments, as `make release-check` does for each extra."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("build")
pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).parent / "release.py"


def uses(*words: str) -> list[str]:
    """What was installed and used, as the script tells it."""
    run = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return [line for line in run.stdout.splitlines() if "took" in line]


def test_wheel_and_sdist_install_without_extras_and_the_wheel_with_optax_alone() -> None:
    assert len(uses("no torch", "", "optax")) == 3


def test_the_wheel_installs_with_each_extra_that_needs_torch() -> None:
    version = torch.__version__.partition("+")[0]
    told = uses(f"torch=={version}", "--in-turn")
    extras = [line.partition("[")[2].partition("]")[0] for line in told]
    assert extras == ["torch", "run", "demo", "bench", "finetune", "integrations"]
