"""CIFAR as the University of Toronto gives it: fetching it, and reading its pickles safely."""

import hashlib
import os
import pickle
import shutil
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

SITE = "https://www.cs.toronto.edu/~kriz/"
TIMEOUT = 30  # seconds without a byte


class Archive(NamedTuple):
    """What is fetched, and what it unpacks to."""

    file: str
    md5: str
    folder: str
    labels: bytes


ARCHIVES = {
    "cifar10": Archive(
        "cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        "cifar-10-batches-py",
        b"labels",
    ),
    "cifar100": Archive(
        "cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        "cifar-100-python",
        b"fine_labels",
    ),
}


def cache_folder() -> Path:
    """Where downloads go if no folder is given."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mechanic"


def batches(folder: Path) -> list[Path]:
    """The train files of CIFAR-10 that are there: all five, or a part."""
    return sorted((folder / ARCHIVES["cifar10"].folder).glob("data_batch_[1-5]"))


def found(name: str, folder: Path) -> bool:
    """Whether there is enough to train and test on."""
    if name not in ARCHIVES:
        return False
    test, train = _files(name, folder)
    return test.is_file() and bool(train)


def read(name: str, folder: Path, most: int | None = None) -> list[NDArray[Any]]:
    """x_train, y_train, x_test, y_test; of the train files only as many as make `most` images."""
    test, files = _files(name, folder)
    train: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for file in files:
        if most is None or sum(len(y) for _, y in train) < most:
            train.append(_read(file, ARCHIVES[name].labels))
    x, y = zip(*train, strict=True)
    return [np.concatenate(x), np.concatenate(y), *_read(test, ARCHIVES[name].labels)]


def download(name: str, folder: Path) -> Path:
    """Fetch and unpack the archive into the folder, whole or not at all; gives the folder."""
    archive = ARCHIVES[name]
    folder.mkdir(parents=True, exist_ok=True)
    # A sibling of the goal, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        path = Path(temporary) / archive.file
        address = SITE + archive.file
        with urllib.request.urlopen(address, timeout=TIMEOUT) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
        got = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        if got != archive.md5:
            raise OSError(f"{archive.file} has md5 {got}, not {archive.md5}: fetch it again")
        with tarfile.open(path) as packed:
            packed.extractall(temporary, filter="data")
        try:
            (Path(temporary) / archive.folder).replace(folder / archive.folder)
        except OSError:
            if not found(name, folder):  # else another process was faster
                raise
    return folder


def _files(name: str, folder: Path) -> tuple[Path, list[Path]]:
    """The test file and the train files."""
    if name == "cifar10":
        return folder / ARCHIVES[name].folder / "test_batch", batches(folder)
    place = folder / ARCHIVES[name].folder
    return place / "test", [place / "train"] if (place / "train").is_file() else []


def _read(path: Path, labels: bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    with path.open("rb") as file:
        batch = _ArraysOnly(file, encoding="bytes").load()
    pictures = batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pictures), np.asarray(batch[labels], np.int64)


class _ArraysOnly(pickle.Unpickler):
    """A pickle can run any code; these files need only what rebuilds an array."""

    _ADMITTED: ClassVar = {
        "_reconstruct": np.zeros(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] != "numpy" or name not in self._ADMITTED:
            raise pickle.UnpicklingError(f"refused {module}.{name}: not part of an array")
        return self._ADMITTED[name]
