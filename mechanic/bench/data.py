"""Where the data of the tasks comes from: the user's folder, installed packages, or a download.

The user's folder holds data in its usual formats:

    letter.scale, letter.scale.t         tabular, in LIBSVM's format; or without `.scale`, `.t`
    cifar-10-batches-py/, cifar-100-python/   from the archives of the University of Toronto
    NAME.txt                             a corpus; its last twentieth is for validation
    SST-2/, CoLA/, RTE/                  with train.tsv and dev.tsv, as in GLUE
    multi30k/, iwslt14/                  with train.de, train.en, val.de, val.en
    models/NAME/                         a pretrained encoder, as transformers saves it

or it has a `loader.py` that reads its data. That file is executed: use only your own. It defines

    tabular_scaled(name)                 {"train": (x, y), "test": (x, y)}, or {"all": (x, y)}
    images(name, split, shards=None)     uint8 (count, height, width, channels), and labels
    text(name, split=None)               one str
    pairs(name, split)                   a list of tuples of str

Each raises FileNotFoundError for data that is not there. The names of its files must start with the
name of the data (`cifar10_train_1.npz`), so that the bench can see what exists without loading it.
"""

import hashlib
import importlib.util
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from mechanic.bench import cifar, tabular
from mechanic.bench.tabular import Array, Split

DataKind = Literal["tabular", "images", "text", "pairs"]
SentenceRows = list[tuple[str, ...]]

EMBEDDED: dict[DataKind, tuple[str, ...]] = {  # data that comes with installed packages
    "tabular": tabular.BUNDLED,
    "images": ("digits8x8",),
    "text": ("python-manual",),  # the topics of pydoc, in the standard library
    "pairs": (),
}
CORPORA = ("novels", "wikitext2", "tinyshakespeare")  # without --corpus, the first that exists
VALID_PART = 20  # one part in twenty is held out if a text has no split
GLUE = {  # folder, columns to keep in order, lines of header
    "sst2": ("SST-2", (1, 0), 1),
    "cola": ("CoLA", (1, 3), 0),
    "rte": ("RTE", (0, 1, 2, 3), 1),
}
HOW_TO_GET: dict[DataKind, str] = {
    "tabular": "put LIBSVM's file NAME or NAME.scale into the folder given by --data",
    "images": "unpack the archive from www.cs.toronto.edu/~kriz/cifar.html into the folder given "
    "by --data, or let --download fetch it",
    "text": "put the text into NAME.txt in the folder given by --data",
    "pairs": "put FILES into the folder given by --data",
}


class MissingData(ValueError):  # noqa: N818, its base class says that it is an error
    """Says which data is missing, where it was looked for, and how to get it."""


class Corpus(NamedTuple):
    """A long text, split for training and validation."""

    name: str
    train: str
    valid: str


@dataclass(frozen=True)
class Data:
    """The data that is available here. Each process loads each data set at most once."""

    folder: Path | None = None
    """The user's folder, as described above."""
    corpus: str = ""
    """The name of the text that the language models learn; empty for the default."""
    download: bool = False
    """Whether to download CIFAR if it is missing."""

    def __post_init__(self) -> None:
        if self.folder is not None and not self.folder.is_dir() and not self.download:
            raise MissingData(
                f"There is no data folder {self.folder}: give --data an existing folder."
            )

    def tabular(self, name: str) -> Split:
        """Features as float32, scaled to [-1, 1] by their range in the train rows; and labels."""
        return _tabular(self, name)

    def images(self, name: str, limit: int | None = None) -> Split:
        """Images as uint8 (count, height, width, channels), and labels. With a `limit` on the train
        images, no more files of CIFAR are read than needed."""
        return _images(self, name, limit)

    def text(self) -> Corpus:
        """The corpus of the name that `corpus_name` gives."""
        return _text(self, self.corpus_name())

    def pairs(self, name: str, split: str) -> SentenceRows:
        """The rows of a data set of sentences. They are (label, sentence) in sst2 and cola, (index,
        sentence, sentence, label) in rte, and (..., German, English) in translations, which are
        tokenised and in lower case."""
        return _pairs(self, name, split)

    def corpus_name(self) -> str:
        """The corpus that the user named. By default it is the first of `CORPORA` that exists, else
        the largest text of the folder, else Python's manual."""
        available = [name for name in CORPORA if not self.missing("text", name)]
        if self.folder is not None:
            files = sorted(self.folder.glob("*.txt"), key=lambda file: -file.stat().st_size)
            available += [file.stem for file in files]
        return self.corpus or next(iter(available), EMBEDDED["text"][0])

    def shards(self, name: str) -> int:
        """How many of the five train files of CIFAR-10 exist. Other images have 1 file, or 0."""
        if name != "cifar10":
            return 0 if self.missing("images", name) else 1
        if self.folder is not None and _loader(self.folder) is not None:
            count = sum(bool(_files(self.folder, f"{name}_train_{k}")) for k in range(1, 6))
            if count:
                return count
        return max(len(cifar.batches(folder)) for folder in self.cifar_folders())

    def model(self, name: str) -> Path | None:
        """The folder of a pretrained encoder, from the user's folder or from a package."""
        if self.folder is not None and (self.folder / "models" / name / "config.json").is_file():
            return self.folder / "models" / name
        # A package that contains a sentence encoder is named after it.
        spec = importlib.util.find_spec("gt_" + re.sub(r"\W", "_", name.lower()))
        if spec is None or spec.origin is None:
            return None
        return Path(spec.origin).parent / "model"

    def missing(self, kind: DataKind, name: str) -> str:
        """Why the data is not available and how to get it; empty if it is. Loads nothing."""
        if name in EMBEDDED[kind] or self._files(kind, name):
            return ""
        if kind == "images" and self.download and name in cifar.ARCHIVES:
            return ""
        where = "and no data folder is given" if self.folder is None else f"nor in {self.folder}"
        files = f"{GLUE[name][0]}/train.tsv and dev.tsv" if name in GLUE else f"{name}/train.de, …"
        how = HOW_TO_GET[kind].replace("NAME", name).replace("FILES", files)
        return f"{name} ({kind}) is not in an installed package, {where}: {how}."

    def identity(self, kind: DataKind, name: str) -> str:
        """A hash that tells data of the same name apart, by the names, sizes and first bytes of its
        files; empty for data from packages."""
        digest = hashlib.sha1(usedforsecurity=False)
        files = sorted(self._files(kind, name))
        for path in files:
            with path.open("rb") as file:
                digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(1 << 16))
        return digest.hexdigest()[:12] if files else ""

    def cifar_folders(self) -> list[Path]:
        """The folders in which CIFAR is looked for."""
        folders = self.folder, cifar.cache_folder()
        return [folder for folder in folders if folder is not None]

    def _files(self, kind: DataKind, name: str) -> list[Path]:
        """The files that hold the data. Where each split has its own file, that of the train split
        stands for all."""
        folder = self.folder
        if folder is not None and _loader(folder) is not None and (files := _files(folder, name)):
            return files
        if kind == "images":
            for cifar_folder in self.cifar_folders():
                if cifar.is_there(name, cifar_folder):
                    return list((cifar_folder / cifar.ARCHIVES[name].folder).iterdir())
            return []
        if folder is None:
            return []
        standard = {
            "tabular": tabular.libsvm_path(folder, name),
            "text": folder / f"{name}.txt",
            "pairs": _sentences_path(folder, name, "train"),
        }
        return [standard[kind]] if standard[kind].is_file() else []

    def missing_error(self, kind: DataKind, name: str) -> MissingData:
        """The error to raise if the data cannot be loaded."""
        return MissingData(
            self.missing(kind, name) or f"{name} ({kind}) is in {self.folder} only in part."
        )


@cache
def _loader(folder: Path) -> ModuleType | None:
    """The `loader.py` of a folder as a module; None if there is none."""
    path = folder / "loader.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location("mechanic_bench_data_loader", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _files(folder: Path, name: str) -> list[Path]:
    """The files of this name, with any split and suffix: iris.npz, novels_train.txt.xz."""
    return [path for path in folder.rglob(f"{name}*") if re.match(r"[._]", path.name[len(name) :])]


def _from_loader(data: Data, function: str, *arguments: Any, **options: Any) -> Any:
    """What a function of the folder's loader returns; None if there is no loader or no data."""
    loader = None if data.folder is None else _loader(data.folder)
    if loader is None:
        return None
    try:
        return getattr(loader, function)(*arguments, **options)
    except FileNotFoundError:
        return None


@cache
def _tabular(data: Data, name: str) -> Split:
    loaded = _from_loader(data, "tabular_scaled", name)
    if loaded is not None and "all" in loaded:
        split = tabular.divide(*loaded["all"])
    elif loaded is not None:
        split = Split(*loaded["train"], *loaded["test"])
    elif data.folder is not None and (path := tabular.libsvm_path(data.folder, name)).is_file():
        split = tabular.read_libsvm(path)
    elif name in EMBEDDED["tabular"]:
        split = tabular.divide(*tabular.bundled(name))
    else:
        raise data.missing_error("tabular", name)
    return tabular.scaled(split)


@cache
def _images(data: Data, name: str, limit: int | None) -> Split:
    test = _images_from_loader(data, name, "test", None)
    if test is not None:
        return _limited(Split(*_train_from_loader(data, name, limit), *test), limit)
    for folder in data.cifar_folders():
        if cifar.is_there(name, folder):
            return _limited(Split(*cifar.read(name, folder, limit)), limit)
    if name in EMBEDDED["images"]:
        x, y = tabular.bundled(name)
        pictures = (x * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
        return _limited(tabular.divide(pictures, y.astype(np.int64)), limit)
    if not data.download or name not in cifar.ARCHIVES:
        raise data.missing_error("images", name)
    try:
        folder = cifar.download(name, data.folder or cifar.cache_folder())
    except OSError as error:
        how = HOW_TO_GET["images"]
        raise MissingData(f"{name} could not be downloaded ({error}): {how}.") from error
    return _limited(Split(*cifar.read(name, folder, limit)), limit)


@cache
def _images_from_loader(data: Data, name: str, split: str, shard: int | None) -> Any:
    options = {} if shard is None else {"shards": [shard]}
    return _from_loader(data, "images", name, split, **options)


def _train_from_loader(data: Data, name: str, limit: int | None) -> tuple[Array, Array]:
    """The train images; of CIFAR-10 only some of the five train files may exist."""
    x: list[Array] = []
    y: list[Array] = []
    for shard in range(1, 6) if name == "cifar10" else (None,):
        if limit is not None and sum(map(len, y)) >= limit:
            break
        part = _images_from_loader(data, name, "train", shard)
        if part is not None:
            x.append(part[0])
            y.append(part[1])
    if not x:
        raise data.missing_error("images", name)
    return np.concatenate(x), np.concatenate(y)


def _limited(split: Split, limit: int | None) -> Split:
    return split._replace(x_train=split.x_train[:limit], y_train=split.y_train[:limit])


@lru_cache(maxsize=1)
def _text(data: Data, name: str) -> Corpus:
    train, valid = (_from_loader(data, "text", name, split) for split in ("train", "valid"))
    if train is not None and valid is not None:
        return Corpus(name, train, valid)
    text = _from_loader(data, "text", name)
    if text is None and data.folder is not None and (data.folder / f"{name}.txt").is_file():
        text = (data.folder / f"{name}.txt").read_text(encoding="utf-8")
    if text is None and name in EMBEDDED["text"]:
        from pydoc_data.topics import topics

        text = "\n".join(topics.values())
    if text is None:
        raise data.missing_error("text", name)
    held_out = len(text) // VALID_PART
    return Corpus(name, text[:-held_out], text[-held_out:])


@cache
def _pairs(data: Data, name: str, split: str) -> SentenceRows:
    rows: SentenceRows | None = _from_loader(data, "pairs", name, split)
    if rows is not None:
        return rows
    path = None if data.folder is None else _sentences_path(data.folder, name, split)
    if path is None or not path.is_file():
        raise data.missing_error("pairs", name)
    lines = path.read_text(encoding="utf-8").splitlines()
    if name not in GLUE:
        english = path.with_suffix(".en").read_text(encoding="utf-8").splitlines()
        return [(_tokenized(a), _tokenized(b)) for a, b in zip(lines, english, strict=True)]
    _, columns, header = GLUE[name]
    cells = (line.split("\t") for line in lines[header:])
    return [tuple(row[column] for column in columns) for row in cells]


def _sentences_path(folder: Path, name: str, split: str) -> Path:
    if name in GLUE:
        return folder / GLUE[name][0] / f"{split}.tsv"
    return folder / name / f"{split}.de"


def _tokenized(line: str) -> str:
    return " ".join(re.findall(r"\w+|[^\w\s]", line.lower()))
