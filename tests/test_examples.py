"""The scripts of examples/ that use the library do what their first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import RANKS, ROOT, is_like

pytestmark = pytest.mark.nightly

EXAMPLES = ROOT / "examples"


def printed(folder: Path, *command: str) -> str:
    words = [sys.executable, *command]
    environment = os.environ | {"PYTHONPATH": str(RANKS)}
    run = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_these_are_the_examples() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"digits.py", "equinox_gpt.py", "flax_gpt.py", "fsdp.py"}


def test_the_demo_ends_as_the_readme_says(tmp_path: Path) -> None:
    said = printed(tmp_path, str(EXAMPLES / "digits.py"))
    (ratio,) = re.findall(r"at the same loss, ([\d.]+) times", (ROOT / "README.md").read_text())
    found = re.search(r"AdamW: one run of Mechanic ends at ([\d.]+) times", said)
    assert found is not None, said
    assert float(found[1]) == pytest.approx(float(ratio), rel=0.2)
    assert (tmp_path / "demo.png").stat().st_size > 50_000


@pytest.mark.parametrize("name", ["flax_gpt.py", "equinox_gpt.py"])
def test_a_gpt_in_jax_learns(name: str, tmp_path: Path) -> None:
    said = printed(tmp_path, str(EXAMPLES / name), "--steps", "100")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]
    last = said.splitlines()[-1]
    assert is_like("the peak to type for adamw alone: 0.004", last)


def test_fsdp_at_two_world_sizes(tmp_path: Path) -> None:
    def run(processes: int, *options: str) -> list[tuple[float, ...]]:
        launcher = "-m", "torch.distributed.run", "--nproc-per-node", str(processes)
        said = printed(
            tmp_path, *launcher, str(EXAMPLES / "fsdp.py"), "--checkpoint", "a", *options
        )
        rows = re.findall(r"step +(\d+)  loss ([\d.]+)  lr ([\d.e-]+)", said)
        return [tuple(map(float, row)) for row in rows]

    first, then = run(2, "--steps", "100"), run(1, "--steps", "50", "--resume")
    assert [step for step, *_ in first + then] == [50, 100, 150]
    assert then[-1][1] < 0.5 * first[0][1]
    assert then[-1][2] > 1e-3
