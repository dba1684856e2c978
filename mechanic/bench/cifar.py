"""CIFAR in the files of the University of Toronto: downloads them, and unpickles them safely."""

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
TIMEOUT = 30  # seconds without any data


class Archive(NamedTuple):
    """An archive to download, and what it contains."""

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
    """The folder for downloads if the user gives none."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mechanic"


def batches(folder: Path) -> list[Path]:
    """The train files of CIFAR-10 that exist in the folder: all five, or some."""
    return sorted((folder / ARCHIVES["cifar10"].folder).glob("data_batch_[1-5]"))


def is_there(name: str, folder: Path) -> bool:
    """Whether the folder has a test file and at least one train file."""
    if name not in ARCHIVES:
        return False
    test, train = _files(name, folder)
    return test.is_file() and bool(train)


def read(name: str, folder: Path, limit: int | None = None) -> list[NDArray[Any]]:
    """x_train, y_train, x_test, y_test. Reads no more train files than `limit` images need."""
    test, files = _files(name, folder)
    train: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for file in files:
        if limit is None or sum(len(y) for _, y in train) < limit:
            train.append(_read(file, ARCHIVES[name].labels))
    x, y = zip(*train, strict=True)
    return [np.concatenate(x), np.concatenate(y), *_read(test, ARCHIVES[name].labels)]


def download(name: str, folder: Path) -> Path:
    """Download and unpack the archive into the folder, completely or not at all."""
    archive = ARCHIVES[name]
    folder.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        path = Path(temporary) / archive.file
        address = SITE + archive.file
        with urllib.request.urlopen(address, timeout=TIMEOUT) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
        md5 = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        if md5 != archive.md5:
            raise OSError(f"{archive.file} has md5 {md5}, not {archive.md5}: download it again")
        with tarfile.open(path) as packed:
            packed.extractall(temporary, filter="data")
        try:
            (Path(temporary) / archive.folder).replace(folder / archive.folder)
        except OSError:
            if not is_there(name, folder):  # otherwise another process was faster
                raise
    return folder


def _files(name: str, folder: Path) -> tuple[Path, list[Path]]:
    """The test file and the train files."""
    if name == "cifar10":
        return folder / ARCHIVES[name].folder / "test_batch", batches(folder)
    test, train = (folder / ARCHIVES[name].folder / split for split in ("test", "train"))
    return test, [train] if train.is_file() else []


def _read(path: Path, labels: bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    with path.open("rb") as file:
        batch = _ArraysOnly(file, encoding="bytes").load()
    pictures = batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pictures), np.asarray(batch[labels], np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Refuses to load anything but arrays, because a pickle can run any code."""

    _ALLOWED: ClassVar = {
        "_reconstruct": np.zeros(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] != "numpy" or name not in self._ALLOWED:
            raise pickle.UnpicklingError(f"refused {module}.{name}: not part of an array")
        return self._ALLOWED[name]
