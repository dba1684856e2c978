"""The kernels compile, for a GPU that need not be there."""

import json
import subprocess
import sys
from pathlib import Path

from running import environment


def test_the_kernels_compile_for_a_gpu_that_is_not_there(tmp_path):
    """And full blocks of what is aligned are read and written 16 bytes at a time."""
    own = environment(TRITON_CACHE_DIR=str(tmp_path))
    own.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compiling.py")
    done = subprocess.run(
        [sys.executable, script],
        env=own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {row["kernel"] for row in found} == {
        *("sum_up", "weigh", "square_proposals", "tune", "update", "copy_params", "move")
    }
    assert all(row["cubin"] for row in found)
    # Two of them for each of the 128 threads, in each tensor of float32; and again in float64.
    wide = {(row["kernel"], row["case"]): (row["wide loads"], row["wide stores"]) for row in found}
    assert wide["sum_up", 0] == (8, 0)
    assert wide["update", 0] == (10, 8)
    assert wide["copy_params", 1] == (2, 2)
    assert wide["move", 1] == (6, 4)
