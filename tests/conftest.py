"""What several files of tests share."""

import os
from collections.abc import Iterator

import pytest
import torch

from mechanic.bench.data import Data

if not torch.cuda.is_available():  # Triton's interpreter runs the kernels; asked for at its import
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """A folder with something of everything that the bench reads."""
    from bench_data import make_folder

    return make_folder(tmp_path_factory.mktemp("data"))
