"""Where the tasks' data comes from: a folder of the user's, installed packages, or a download.

The folder holds data as people have it:

    letter.scale, letter.scale.t         tabular, as LIBSVM gives it; or without `.scale`, `.t`
    cifar-10-batches-py/, cifar-100-python/   as the University of Toronto's archives unpack
    NAME.txt                             a corpus, whose last twentieth validates
    SST-2/, CoLA/, RTE/                  with train.tsv and dev.tsv, as GLUE has them
    multi30k/, iwslt14/                  with train.de, train.en, val.de, val.en
    models/NAME/                         a pretrained encoder, as transformers saves it

or it has a `loader.py` that reads what it holds. That is imported, so it should be your own:

    tabular_scaled(name)                 {"train": (x, y), "test": (x, y)}, or {"all": (x, y)}
    images(name, split, shards=None)     uint8 (count, height, width, channels), and labels
    text(name, split=None)               one str
    pairs(name, split)                   a list of tuples of str

The four raise FileNotFoundError for what is not there, and read files whose names start with that
of the data (`cifar10_train_1.npz`): what there is can then be told before anything is loaded.
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
from numpy.typing import NDArray

from mechanic.bench import cifar, tables
from mechanic.bench.tables import Split

Kind = Literal["tabular", "images", "text", "pairs"]
Array = NDArray[Any]
Rows = list[tuple[str, ...]]

EMBEDDED: dict[Kind, tuple[str, ...]] = {
    "tabular": tables.BUNDLED,
    "images": ("digits8x8",),
    "text": ("python-manual",),  # the standard library's pydoc does
    "pairs": (),
}
CORPORA = ("novels", "wikitext2", "tinyshakespeare")  # the first that is there, if none is named
VALID_PART = 20  # one part in so many is held out where a text has no split
GLUE = {  # folder, columns to keep in order, lines of header
    "sst2": ("SST-2", (1, 0), 1),
    "cola": ("CoLA", (1, 3), 0),
    "rte": ("RTE", (0, 1, 2, 3), 1),
}
HOW: dict[Kind, str] = {
    "tabular": "put LIBSVM's file NAME or NAME.scale into the folder given by --data",
    "images": "unpack the archive from www.cs.toronto.edu/~kriz/cifar.html into the folder given "
    "by --data, or have it downloaded by --download",
    "text": "put the text into NAME.txt in the folder given by --data",
    "pairs": "put FILES into the folder given by --data",
}


class MissingData(ValueError):  # noqa: N818, its base says that it is an error
    """What was looked for, where, and how to get it."""


class Corpus(NamedTuple):
    """Running text."""

    name: str
    train: str
    valid: str


@dataclass(frozen=True)
class Data:
    """What can be had here. Everything is loaded once a process."""

    folder: Path | None = None
    """The user's own, see above."""
    corpus: str = ""
    """Which text the language models learn; by default the largest there is."""
    download: bool = False
    """Whether to fetch CIFAR where it is not there."""

    def __post_init__(self) -> None:
        if self.folder is not None and not self.folder.is_dir() and not self.download:
            raise MissingData(
                f"There is no data folder {self.folder}: give --data one that exists."
            )

    def tabular(self, name: str) -> Split:
        """Features in [-1, 1], by the range they have in training, as float32; labels from 0."""
        return _tabular(self, name)

    def images(self, name: str, most: int | None = None) -> Split:
        """uint8 (count, height, width, channels); of a part of CIFAR, or if `most` train images
        are enough, only as many of its files as are needed are read."""
        return _images(self, name, most)

    def text(self) -> Corpus:
        """The corpus asked for; without one the largest there is, at the least Python's manual."""
        return _text(self, self.corpus_name())

    def pairs(self, name: str, split: str) -> Rows:
        """The rows of a data set of sentences: sst2 and cola (label, sentence), rte (index,
        sentence, sentence, label), translations (..., German, English), tokenised, lower case."""
        return _pairs(self, name, split)

    def corpus_name(self) -> str:
        """Of the text that `text` gives."""
        there = [name for name in CORPORA if not self.missing("text", name)]
        if self.folder is not None:
            files = sorted(self.folder.glob("*.txt"), key=lambda file: -file.stat().st_size)
            there += [file.stem for file in files]
        return self.corpus or next(iter(there), EMBEDDED["text"][0])

    def shards(self, name: str) -> int:
        """How many of the five train files of CIFAR-10 there are; 1 of other images."""
        if name != "cifar10":
            return 0 if self.missing("images", name) else 1
        places = [place for place in (self.folder, cifar.cache_folder()) if place is not None]
        if self.folder is not None and _loader(self.folder) is not None:
            told = sum(bool(_files(self.folder, f"{name}_train_{k}")) for k in range(1, 6))
            if told:
                return told
        return max(len(cifar.batches(place)) for place in places)

    def model(self, name: str) -> Path | None:
        """The folder of a pretrained encoder, from the user's folder or from a package."""
        if self.folder is not None and (self.folder / "models" / name / "config.json").is_file():
            return self.folder / "models" / name
        # The packages that carry sentence encoders are named after them.
        spec = importlib.util.find_spec("gt_" + re.sub(r"\W", "_", name.lower()))
        if spec is None or spec.origin is None:
            return None
        return Path(spec.origin).parent / "model"

    def missing(self, kind: Kind, name: str) -> str:
        """Empty if it is there; else what was looked for, where, how to get it. Loads nothing."""
        if name in EMBEDDED[kind] or self._found(kind, name):
            return ""
        if kind == "images" and self.download and name in cifar.ARCHIVES:
            return ""
        place = "and no data folder is given" if self.folder is None else f"nor in {self.folder}"
        files = f"{GLUE[name][0]}/train.tsv and dev.tsv" if name in GLUE else f"{name}/train.de, …"
        how = HOW[kind].replace("NAME", name).replace("FILES", files)
        return f"{name} ({kind}) is not in an installed package, {place}: {how}."

    def identity(self, kind: Kind, name: str) -> str:
        """Tells data of one name apart by its files: their names, sizes and beginnings; empty if
        packages carry it."""
        digest = hashlib.sha1(usedforsecurity=False)
        files = sorted(self._found(kind, name))
        for path in files:
            with path.open("rb") as file:
                digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(1 << 16))
        return digest.hexdigest()[:12] if files else ""

    def _found(self, kind: Kind, name: str) -> list[Path]:
        """The files to read; of those with a split some, which change with the others."""
        folder = self.folder
        if folder is not None and _loader(folder) is not None and (files := _files(folder, name)):
            return files
        if kind == "images":
            for place in (folder, cifar.cache_folder()):
                if place is not None and cifar.found(name, place):
                    return list((place / cifar.ARCHIVES[name].folder).iterdir())
            return []
        if folder is None:
            return []
        standard = {
            "tabular": tables.libsvm(folder, name),
            "text": folder / f"{name}.txt",
            "pairs": _sentences(folder, name, "train"),
        }
        return [standard[kind]] if standard[kind].is_file() else []

    def need(self, kind: Kind, name: str) -> MissingData:
        """The error to raise where it is not there after all."""
        return MissingData(
            self.missing(kind, name) or f"{name} ({kind}) is in {self.folder} only in part."
        )


@cache
def _loader(folder: Path) -> ModuleType | None:
    """The folder's own reader, if it has one."""
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
    """Those of the name, with whatever split and suffix: iris.npz, novels_train.txt.xz."""
    return [path for path in folder.rglob(f"{name}*") if re.match(r"[._]", path.name[len(name) :])]


def _asked(data: Data, function: str, *arguments: Any, **options: Any) -> Any:
    """What the folder's loader says, or None."""
    loader = None if data.folder is None else _loader(data.folder)
    if loader is None:
        return None
    try:
        return getattr(loader, function)(*arguments, **options)
    except FileNotFoundError:
        return None


@cache
def _tabular(data: Data, name: str) -> Split:
    told = _asked(data, "tabular_scaled", name)
    if told is not None:
        split = (
            tables.divide(*told["all"]) if "all" in told else Split(*told["train"], *told["test"])
        )
    elif data.folder is not None and (path := tables.libsvm(data.folder, name)).is_file():
        split = tables.read_libsvm(path)
    elif name in EMBEDDED["tabular"]:
        split = tables.divide(*tables.bundled(name))
    else:
        raise data.need("tabular", name)
    return tables.scaled(split)


@cache
def _images(data: Data, name: str, most: int | None) -> Split:
    test = _images_asked(data, name, "test", None)
    if test is not None:
        return _first(Split(*_train_asked(data, name, most), *test), most)
    for place in (data.folder, cifar.cache_folder()):
        if place is not None and cifar.found(name, place):
            return _first(Split(*cifar.read(name, place, most)), most)
    if name in EMBEDDED["images"]:
        x, y = tables.bundled(name)
        pictures = (x * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
        return _first(tables.divide(pictures, y.astype(np.int64)), most)
    if not data.download or name not in cifar.ARCHIVES:
        raise data.need("images", name)
    try:
        place = cifar.download(name, data.folder or cifar.cache_folder())
    except OSError as error:
        raise MissingData(f"{name} could not be downloaded ({error}): {HOW['images']}.") from error
    return _first(Split(*cifar.read(name, place, most)), most)


@cache
def _images_asked(data: Data, name: str, split: str, shard: int | None) -> Any:
    options = {} if shard is None else {"shards": [shard]}
    return _asked(data, "images", name, split, **options)


def _train_asked(data: Data, name: str, most: int | None) -> tuple[Array, Array]:
    """A machine with little room may carry only some of CIFAR-10's five train files."""
    x: list[Array] = []
    y: list[Array] = []
    for shard in range(1, 6) if name == "cifar10" else (None,):
        if most is not None and sum(map(len, y)) >= most:
            break
        part = _images_asked(data, name, "train", shard)
        if part is not None:
            x.append(part[0])
            y.append(part[1])
    if not x:
        raise data.need("images", name)
    return np.concatenate(x), np.concatenate(y)


def _first(split: Split, most: int | None) -> Split:
    return split._replace(x_train=split.x_train[:most], y_train=split.y_train[:most])


@lru_cache(maxsize=1)
def _text(data: Data, name: str) -> Corpus:
    train, valid = _asked(data, "text", name, "train"), _asked(data, "text", name, "valid")
    if train is not None and valid is not None:
        return Corpus(name, train, valid)
    whole = _asked(data, "text", name)
    if whole is None and data.folder is not None and (data.folder / f"{name}.txt").is_file():
        whole = (data.folder / f"{name}.txt").read_text(encoding="utf-8")
    if whole is None and name in EMBEDDED["text"]:
        from pydoc_data.topics import topics

        whole = "\n".join(topics.values())
    if whole is None:
        raise data.need("text", name)
    held_out = len(whole) // VALID_PART
    return Corpus(name, whole[:-held_out], whole[-held_out:])


@cache
def _pairs(data: Data, name: str, split: str) -> Rows:
    rows: Rows | None = _asked(data, "pairs", name, split)
    if rows is not None:
        return rows
    path = None if data.folder is None else _sentences(data.folder, name, split)
    if path is None or not path.is_file():
        raise data.need("pairs", name)
    lines = path.read_text(encoding="utf-8").splitlines()
    if name not in GLUE:
        english = path.with_suffix(".en").read_text(encoding="utf-8").splitlines()
        return [(_words(a), _words(b)) for a, b in zip(lines, english, strict=True)]
    _, columns, header = GLUE[name]
    cells = (line.split("\t") for line in lines[header:])
    return [tuple(row[column] for column in columns) for row in cells]


def _sentences(folder: Path, name: str, split: str) -> Path:
    if name in GLUE:
        return folder / GLUE[name][0] / f"{split}.tsv"
    return folder / name / f"{split}.de"


def _words(line: str) -> str:
    return " ".join(re.findall(r"\w+|[^\w\s]", line.lower()))
