"""Wheel and sdist install into empty environments. `make release-check` also tries the extras."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("build")
pytestmark = pytest.mark.nightly


def test_wheel_and_sdist_install_without_extras_and_the_wheel_with_optax_alone() -> None:
    script = Path(__file__).parent / "release.py"
    command = [sys.executable, script, "no torch", "", "optax"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("took") == 3
