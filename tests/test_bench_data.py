"""Where the benchmarks' data comes from: packages, a user's folder, a download."""

import functools
import hashlib
import http.server
import io
import pickle
import struct
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mechanic.bench import cifar, tabular
from mechanic.bench.data import Data, MissingData, Split

LOADER = """
import numpy as np
calls = []
def tabular_scaled(name):
    calls.append(name)
    if name != "toy":
        raise FileNotFoundError(name)
    return {"train": (np.eye(4), np.arange(4)), "test": (np.eye(4), np.arange(4))}
def images(name, split, shards=None):
    calls.append((name, split, shards))
    if name != "cifar10" or shards and shards[0] not in (2, 4):
        raise FileNotFoundError(name)
    return np.full((3, 32, 32, 3), shards[0] if shards else 9, np.uint8), np.arange(3)
def text(name, split=None):
    if (name, split) not in (("novels", "train"), ("novels", "valid"), ("whole", None)):
        raise FileNotFoundError(name)
    return f"{name} {split} " * 20
def pairs(name, split):
    if name != "sst2":
        raise FileNotFoundError(name)
    return [("1", split)]
"""


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing that this machine has downloaded before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def with_loader(tmp_path: Path) -> Path:
    (tmp_path / "loader.py").write_text(LOADER)
    for name in ("toy.npz", "cifar10_train_2.npz", "cifar10_train_4.npz", "novels_train.txt.xz"):
        (tmp_path / name).touch()
    return tmp_path


# --- packages


@pytest.mark.parametrize(
    ("name", "rows", "features"),
    [("iris", 150, 4), ("wine", 178, 13), ("breast_cancer", 569, 30), ("digits8x8", 1797, 64)],
)
def test_tables_of_scikit_learn(name: str, rows: int, features: int) -> None:
    split = Data().tabular(name)
    assert len(split.x_train) + len(split.x_test) == rows
    assert split.x_train.shape[1] == split.x_test.shape[1] == features
    assert split.x_train.dtype == np.float32
    assert split.x_train.min() == -1
    assert split.x_train.max() == 1
    assert split.y_train.dtype == np.int64
    for label in np.unique(split.y_train):
        train, test = (split.y_train == label).sum(), (split.y_test == label).sum()
        assert 0.18 < test / (train + test) <= 0.2


def test_a_table_is_loaded_once() -> None:
    assert Data().tabular("iris") is Data().tabular("iris")


def test_a_split_is_the_same_each_time_and_in_no_order_of_classes() -> None:
    x, y = np.arange(200).reshape(100, 2), np.repeat(np.arange(4), 25)
    first, again = tabular.divide(x, y), tabular.divide(x, y)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert set(first.y_train[:20]) == {0, 1, 2, 3}
    assert sorted([*first.x_train[:, 0], *first.x_test[:, 0]]) == list(range(0, 200, 2))


def test_scaling_is_by_the_range_in_training() -> None:
    train, test = np.array([[0.0, 7], [10, 7]]), np.array([[20.0, 9]])
    scaled = tabular.scaled(Split(train, np.arange(2), test, np.arange(1)))
    assert scaled.x_train.tolist() == [[-1, 0], [1, 0]]
    assert scaled.x_test.tolist() == [[3, 0]]


def test_digits_are_images_too() -> None:
    split = Data().images("digits8x8")
    assert split.x_train.shape[1:] == (8, 8, 1)
    assert split.x_train.dtype == np.uint8
    assert split.x_train.max() == 255
    assert len(Data().images("digits8x8", limit=100).y_train) == 100


def test_pythons_manual_is_the_embedded_corpus() -> None:
    text = Data().text()
    assert text.name == "python-manual"
    assert len(text.train) > 300_000
    assert len(text.valid) == pytest.approx(len(text.train) / 19, rel=0.01)
    assert "assert" in text.train


def test_data_can_be_sent_to_another_process(tmp_path: Path) -> None:
    data = Data(tmp_path, corpus="mine", download=True)
    assert pickle.loads(pickle.dumps(data)) == data


# --- what is not there


def test_what_is_missing_is_named_with_the_place_and_the_remedy(tmp_path: Path) -> None:
    message = Data(tmp_path).missing("tabular", "glass")
    assert "glass" in message
    assert str(tmp_path) in message
    assert "LIBSVM" in message
    assert "no data folder" in Data().missing("images", "cifar10")
    assert "--download" in Data().missing("images", "cifar10")
    for load in (
        lambda data: data.tabular("glass"),
        lambda data: data.images("cifar10"),
        lambda data: data.images("nothing"),
        lambda data: data.pairs("sst2", "train"),
        lambda data: data.pairs("multi30k", "train"),
    ):
        for data in (Data(), Data(tmp_path)):
            with pytest.raises(MissingData, match="installed package"):
                load(data)
    with pytest.raises(MissingData, match=r"mine \(text\)"):
        Data(tmp_path, corpus="mine").text()


def test_a_folder_that_does_not_exist_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="There is no data folder"):
        Data(tmp_path / "typo")


def test_a_folder_that_lacks_a_split_says_so(tmp_path: Path) -> None:
    _write(tmp_path / "SST-2" / "train.tsv", "sentence\tlabel\ngood\t1\n")
    with pytest.raises(MissingData, match="only in part"):
        Data(tmp_path).pairs("sst2", "dev")


# --- the files that people have


def test_libsvm_files(tmp_path: Path) -> None:
    _write(tmp_path / "toy.scale", "3 1:0.5 2:1\n7 2:0.25\n9 1:1\n")
    _write(tmp_path / "toy.scale.t", "9 1:0.5\n")
    split = Data(tmp_path).tabular("toy")
    assert split.y_train.tolist() == [0, 1, 2]
    assert split.y_test.tolist() == [2]
    assert split.x_train.tolist() == [[0, 1], [-1, -0.5], [1, -1]]
    assert split.x_test.tolist() == [[0, -1]]
    assert Data(tmp_path).missing("tabular", "toy") == ""


def test_a_libsvm_file_without_a_test_file_is_split(tmp_path: Path) -> None:
    _write(tmp_path / "toy", "".join(f"{row % 2} 1:{row}\n" for row in range(20)))
    split = Data(tmp_path).tabular("toy")
    assert (len(split.y_train), len(split.y_test)) == (16, 4)


def test_a_text_file(tmp_path: Path) -> None:
    _write(tmp_path / "mine.txt", "word " * 100)
    text = Data(tmp_path, corpus="mine").text()
    assert text == ("mine", "word " * 95, "word " * 5)
    _write(tmp_path / "wikitext2.txt", "wiki " * 100)
    assert Data(tmp_path).corpus_name() == "wikitext2"


def test_glue(tmp_path: Path) -> None:
    _write(tmp_path / "SST-2" / "train.tsv", 'sentence\tlabel\na "good" film\t1\nbad\t0\n')
    _write(tmp_path / "CoLA" / "train.tsv", "gj04\t1\t\tShe sleeps.\ngj04\t0\t*\tShe sleep.\n")
    _write(tmp_path / "RTE" / "train.tsv", "index\ts1\ts2\tlabel\n0\tA.\tB.\tentailment\n")
    data = Data(tmp_path)
    assert data.pairs("sst2", "train") == [("1", 'a "good" film'), ("0", "bad")]
    assert data.pairs("cola", "train") == [("1", "She sleeps."), ("0", "She sleep.")]
    assert data.pairs("rte", "train") == [("0", "A.", "B.", "entailment")]


def test_translations(tmp_path: Path) -> None:
    _write(tmp_path / "multi30k" / "train.de", "Ein Hund.\nZwei Männer\n")
    _write(tmp_path / "multi30k" / "train.en", "A dog.\nTwo men\n")
    rows = Data(tmp_path).pairs("multi30k", "train")
    assert rows == [("ein hund .", "a dog ."), ("zwei männer", "two men")]


def test_cifar_pickles_whole_and_in_part(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_cifar(folder / "test_batch", 4)
    _write_cifar(folder / "data_batch_2", 3)
    _write_cifar(folder / "data_batch_5", 3, first=100)
    data = Data(tmp_path)
    assert data.missing("images", "cifar10") == ""
    assert data.shards("cifar10") == 2
    split = data.images("cifar10")
    assert split.x_train.shape == (6, 32, 32, 3)
    assert split.x_test.shape == (4, 32, 32, 3)
    assert split.y_train.tolist() == [0, 1, 2, 0, 1, 2]
    # Red, green and blue are planes in the file, and channels here.
    assert split.x_train[0, 0, 0].tolist() == [1, 2, 3]
    assert split.x_train[3, 0, 0].tolist() == [101, 102, 103]
    assert data.images("cifar10", limit=2).x_train.shape == (2, 32, 32, 3)
    assert data.shards("cifar100") == 0


def test_cifar100(tmp_path: Path) -> None:
    for name in ("train", "test"):
        _write_cifar(tmp_path / "cifar-100-python" / name, 5, labels=b"fine_labels")
    assert Data(tmp_path).images("cifar100").y_train.tolist() == [0, 1, 2, 3, 4]
    assert Data(tmp_path).shards("cifar100") == 1


def test_a_pickle_of_python_2_as_the_university_has_them(tmp_path: Path) -> None:
    planes = bytes(range(256)) * 24  # two images
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + struct.pack("<i", len(planes)) + planes + b"tb"
    )
    batch = b"\x80\x02}(U\x04data" + array + b"U\x06labels](K\x07K\x03eu."
    for name in ("test_batch", "data_batch_1"):
        (tmp_path / "cifar-10-batches-py").mkdir(exist_ok=True)
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(batch)
    split = Data(tmp_path).images("cifar10")
    assert split.y_train.tolist() == [7, 3]
    assert split.x_train[0, 0, :4, 0].tolist() == [0, 1, 2, 3]


class _Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_a_pickle_with_code_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    _write_cifar(folder / "test_batch", 4)
    (folder / "data_batch_1").write_bytes(pickle.dumps(_Evil(tmp_path / "touched")))
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        Data(tmp_path).images("cifar10")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["numpy.load", "numpy.lib.npyio.load", "builtins.eval"])
def test_only_what_rebuilds_an_array_is_admitted(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    harmful = f"c{module}\n{attribute}\n.".encode()
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        cifar._ArraysOnly(io.BytesIO(harmful)).load()


# --- a folder with a reader of its own


def test_a_loader_is_asked_first(with_loader: Path) -> None:
    data = Data(with_loader)
    assert data.tabular("toy").x_train.shape == (4, 4)
    assert data.pairs("sst2", "dev") == [("1", "dev")]
    assert data.text() == ("novels", "novels train " * 20, "novels valid " * 20)
    assert Data(with_loader, corpus="whole").text().train.startswith("whole None")
    assert data.missing("tabular", "toy") == ""
    assert data.missing("tabular", "glass") != ""
    assert data.tabular("iris").x_train.shape == (120, 4)  # from the package after all


def test_some_shards_of_a_loaders_cifar(with_loader: Path) -> None:
    data = Data(with_loader)
    assert data.shards("cifar10") == 2
    assert data.images("cifar10").x_train[:, 0, 0, 0].tolist() == [2, 2, 2, 4, 4, 4]
    assert data.images("cifar10", limit=3).x_train[:, 0, 0, 0].tolist() == [2, 2, 2]


# --- downloads


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The university's server, with an archive of three images."""
    site, source = tmp_path / "site", tmp_path / "source" / "cifar-10-batches-py"
    site.mkdir()
    for name in ("test_batch", "data_batch_1"):
        _write_cifar(source / name, 3)
    file = site / cifar.ARCHIVES["cifar10"].file
    with tarfile.open(file, "w:gz") as archive:
        archive.add(source, "cifar-10-batches-py")
    handler = functools.partial(_Silent, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setattr(cifar, "SITE", f"http://127.0.0.1:{running.server_port}/")
        _expect(monkeypatch, file)
        yield site
        running.shutdown()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def _expect(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    md5 = hashlib.md5(file.read_bytes()).hexdigest()
    expected = cifar.ARCHIVES["cifar10"]._replace(md5=md5)
    monkeypatch.setitem(cifar.ARCHIVES, "cifar10", expected)


@pytest.mark.parametrize("folder", [None, "mine"])
def test_a_download(server: Path, tmp_path: Path, folder: str | None) -> None:
    data = Data(tmp_path / folder if folder else None, download=True)
    assert data.missing("images", "cifar10") == ""
    assert data.images("cifar10").x_train.shape == (3, 32, 32, 3)
    place = tmp_path / folder if folder else tmp_path / "cache" / "mechanic"
    assert [path.name for path in place.iterdir()] == ["cifar-10-batches-py"]
    assert Data(data.folder).missing("images", "cifar10") == ""  # the next time without
    assert Data(data.folder).shards("cifar10") == 1


def test_a_download_with_another_checksum_leaves_nothing(server: Path, tmp_path: Path) -> None:
    (server / cifar.ARCHIVES["cifar10"].file).write_bytes(b"a login page, say")
    with pytest.raises(MissingData, match="has md5"):
        Data(tmp_path / "mine", download=True).images("cifar10")
    assert list((tmp_path / "mine").iterdir()) == []


def test_an_archive_that_leaves_its_folder_is_refused(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = server / cifar.ARCHIVES["cifar10"].file
    with tarfile.open(file, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../../escaped"))
    _expect(monkeypatch, file)
    with pytest.raises(tarfile.OutsideDestinationError):
        Data(tmp_path / "mine", download=True).images("cifar10")
    assert not (tmp_path / "escaped").exists()


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "SITE", "http://127.0.0.1:9/")  # nobody answers there
    with pytest.raises(MissingData, match="could not be downloaded"):
        Data(tmp_path, download=True).images("cifar10")


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def _write_cifar(path: Path, count: int, first: int = 0, labels: bytes = b"labels") -> None:
    """Image k has the colour (first + k + 1, first + k + 2, first + k + 3)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colours = first + np.arange(count)[:, None] + np.array([1, 2, 3])
    planes = np.repeat(colours, 32 * 32, axis=1).astype(np.uint8)
    batch = {b"data": planes, labels: list(range(count))}
    path.write_bytes(pickle.dumps(batch, protocol=4))


def test_data_of_one_name_is_told_apart(tmp_path: Path) -> None:
    data = Data(tmp_path)
    assert data.identity("tabular", "iris") == ""  # of packages
    assert data.identity("text", "book") == ""
    seen = set()
    for text in ("one", "two", "three"):
        _write(tmp_path / "book.txt", text)
        seen.add(data.identity("text", "book"))
    _write(tmp_path / "other.txt", "of another name")
    assert data.identity("text", "book") in seen
    assert len(seen) == 3
    _write_cifar(tmp_path / "cifar-10-batches-py" / "data_batch_1", 2)
    _write_cifar(tmp_path / "cifar-10-batches-py" / "test_batch", 2)
    part = data.identity("images", "cifar10")
    _write_cifar(tmp_path / "cifar-10-batches-py" / "data_batch_2", 2)
    assert data.identity("images", "cifar10") != part != ""
