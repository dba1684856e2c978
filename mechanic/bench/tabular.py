"""Tabular data: scikit-learn's, LIBSVM's files, and how both are split and scaled."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BUNDLED = ("iris", "wine", "breast_cancer", "digits8x8")  # data that comes with scikit-learn
TEST_PART = 5  # one row in five is held out if the data has no split


class Split(NamedTuple):
    """Examples to train on and to test on."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array


def bundled(name: str) -> tuple[Array, Array]:
    """Data that comes with scikit-learn: features and labels."""
    from sklearn import datasets

    loaded = getattr(datasets, f"load_{name.removesuffix('8x8')}")()
    return loaded.data, loaded.target


def libsvm_path(folder: Path, name: str) -> Path:
    """The path of a LIBSVM file, whether it exists or not. The scaled file is preferred."""
    scaled = folder / f"{name}.scale"
    return scaled if scaled.is_file() else folder / name


def read_libsvm(path: Path) -> Split:
    """Read a file in LIBSVM's format. A file beside it that ends in `.t` has the test rows."""
    from sklearn.datasets import load_svmlight_files

    test = path.with_name(path.name + ".t")
    files = [str(path), str(test)] if test.is_file() else [str(path)]
    x, y, *rest = load_svmlight_files(files)
    _, labels = np.unique(np.concatenate([y, *rest[1:]]), return_inverse=True)
    if not rest:
        return divide(x.toarray(), labels)
    return Split(x.toarray(), labels[: len(y)], rest[0].toarray(), labels[len(y) :])


def divide(x: Array, y: Array) -> Split:
    """Hold out the same part of every class. The rows are shuffled, in the same order each time."""
    random = np.random.default_rng(0)
    order = random.permutation(len(y))
    by_class = [order[y[order] == label] for label in np.unique(y)]
    test = np.concatenate([rows[: len(rows) // TEST_PART] for rows in by_class])
    train = np.concatenate([rows[len(rows) // TEST_PART :] for rows in by_class])
    test, train = random.permutation(test), random.permutation(train)
    return Split(x[train], y[train], x[test], y[test])


def scaled(split: Split) -> Split:
    """Scale features to [-1, 1] by their range in the train rows, as in LIBSVM's `.scale` files. A
    constant feature becomes 0."""
    low, high = split.x_train.min(0).astype(np.float64), split.x_train.max(0).astype(np.float64)
    span = np.where(high > low, high - low, 1)

    def scale(x: Array) -> Array:
        return np.where(high > low, 2 * (x - low) / span - 1, 0).astype(np.float32)

    y_train, y_test = split.y_train.astype(np.int64), split.y_test.astype(np.int64)
    return Split(scale(split.x_train), y_train, scale(split.x_test), y_test)
