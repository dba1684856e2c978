"""Wheel and sdist install into a clean environment for each extra, as `make release-check` does.

The extra `timm` is left out: `release.py` says why.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from release import FROM_SDIST, USES, WITHOUT_TORCH

pytest.importorskip("build")
pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).parent / "release.py"


def uses(*words: str) -> list[str]:
    """The extras that were installed and used, as the script tells it."""
    run = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    told = [line for line in run.stdout.splitlines() if "took" in line]
    return [line.partition("[")[2].partition("]")[0] for line in told]


def installed(extras: list[str]) -> list[str]:
    """Extras that the sdist has, too, come twice."""
    return [extra for extra in extras for _ in range(1 + (extra in FROM_SDIST))]


def test_these_are_the_extras_for_users() -> None:
    text = (SCRIPT.parents[1] / "pyproject.toml").read_text("utf-8")
    table = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))
    assert extras - {"timm", "test", "docs", "dev"} == set(USES) - {""}


def test_wheel_and_sdist_install_where_there_is_no_torch() -> None:
    extras = list(WITHOUT_TORCH)
    assert uses("no torch", *extras) == installed(extras)


def test_the_wheel_installs_with_each_extra_that_needs_torch() -> None:
    version = torch.__version__.partition("+")[0]
    extras = [extra for extra in USES if extra not in WITHOUT_TORCH]
    assert uses(f"torch=={version}", *extras) == installed(extras)
