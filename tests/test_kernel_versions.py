"""Which Triton the kernels take."""

import pytest
import torch

from mechanic.torch.kernels import dispatch

triton = pytest.importorskip("triton")
works_on = dispatch.works_on.__wrapped__  # without its cache


@pytest.mark.parametrize("version", ["3.2.0", "3.5.1+git0"])
def test_an_older_triton_leaves_the_step_to_torchs_operators(version, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.warns(RuntimeWarning, match=f"Triton {version[:5]}.* is older than 3.6"):
        assert not works_on(torch.device("cpu"))


@pytest.mark.parametrize("version", ["3.6.0", "3.10.0"])
def test_a_newer_one_is_tried_out(version, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    assert works_on(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
