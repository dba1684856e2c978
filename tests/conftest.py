"""What several files of tests share."""

import os
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mechanic.bench.data import Data

collect_ignore = ["ranks", "site"]  # of other processes
collect_ignore_glob = [] if find_spec("triton") else ["test_kernel*"]

# Each worker of pytest-xdist takes a whole file, and then the next one. With these first, which
# take longest, the workers end together.
FIRST = (
    *("test_bench_run", "test_distributed", "test_run_examples", "test_run_adopt"),
    *("test_run_process", "test_kernels", "test_bench_report", "test_handle", "test_quality"),
)

if "PYTEST_XDIST_WORKER" in os.environ:  # there are as many workers as cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

# Most tests are of the plain path; `test_native.py` is of the compiled step that takes its place.
os.environ.setdefault("MECHANIC_NATIVE", "0")

if not torch.cuda.is_available():  # Triton's interpreter runs the kernels; asked for at its import
    os.environ.setdefault("TRITON_INTERPRET", "1")


# By day JAX's compiler, which takes most of the time of the tests with JAX, does less. At night it
# does what it does for users. XLA ends the process at a flag that it does not know.
JAXLIB = "0.10.2"
QUICK_XLA = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def pytest_configure(config: pytest.Config) -> None:
    is_day = config.getoption("markexpr") == "not nightly"
    if is_day and find_spec("jaxlib") and version("jaxlib") == JAXLIB:
        os.environ.setdefault("XLA_FLAGS", QUICK_XLA)
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    if torch.__version__ < (2, 13):  # whose own checkpoints and SequentialLR warn
        for text in ("TypedStorage is deprecated", "The epoch parameter in `scheduler.step"):
            config.addinivalue_line("filterwarnings", f"ignore:{text}:UserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(FIRST)))


@pytest.fixture(autouse=True)
def autograd_stays_on() -> Iterator[None]:
    """A test that leaves autograd switched off fails itself, and not the tests after it."""
    yield
    was_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert was_on, "this test has left autograd switched off"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def own_native_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is compiled is kept in a folder of the tests, and not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def compiled_steps(own_native_cache: None) -> Iterator[None]:
    """The compiled step of a CPU where there is a C compiler: many steps take less time."""
    # Not at the top, since it reads MECHANIC_NATIVE once.
    from mechanic.torch.native import step as native_step
    from mechanic.torch.native.build import find_compiler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_step, "IS_ON", native_step.IS_ON or find_compiler() is not None)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """A folder with something of everything that the bench reads."""
    from bench_data import make_folder

    return make_folder(tmp_path_factory.mktemp("data"))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program for each small tensor, where each program takes its time."""
    if not torch.cuda.is_available():
        from mechanic.torch.kernels import passes

        monkeypatch.setattr(passes, "CHUNK", 1024)


@pytest.fixture(scope="module")
def quick_interpreter() -> Iterator[None]:
    """For most of its time, Triton's interpreter prepares its language anew for each function that
    a kernel calls, makes and compares shapes, looks up types, and looks for overflows of integers.
    Here it does so once, or not at all."""
    if torch.cuda.is_available():
        yield
        return
    from triton.language import core
    from triton.runtime import interpreter

    prepare, find_type = interpreter._patch_lang, interpreter._get_np_dtype
    prepared: dict[int, Any] = {}
    types: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    make_tensor, make_block = core.tensor.__init__, core.block_type.__init__

    def prepare_once(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in prepared:
            prepared[id(names)] = prepare(function)
        return SimpleNamespace(restore=lambda: None)

    def find_type_once(of: Any) -> Any:
        if of.name not in types:
            types[of.name] = find_type(of)
        return types[of.name]

    def make_tensor_of_known_shape(self: Any, handle: Any, kind: Any) -> None:
        sizes = tuple(kind.shape.values) if kind.is_block() else ()
        if sizes not in shapes:
            make_tensor(self, handle, kind)
            shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[sizes]

    def make_known_block(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = vars(self)
        self.__dict__.update(blocks[key], element_ty=element)

    def is_same(self: Any, other: Any) -> Any:
        sizes = [getattr(size, "value", size) for size in other]
        return core.constexpr([getattr(size, "value", size) for size in self.values] == sizes)

    with pytest.MonkeyPatch.context() as patch:
        unchecked = interpreter.InterpreterOptions(sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", unchecked)
        patch.setattr(interpreter, "_patch_lang", prepare_once)
        patch.setattr(interpreter, "_get_np_dtype", find_type_once)
        patch.setattr(core.tensor, "__init__", make_tensor_of_known_shape)
        patch.setattr(core.block_type, "__init__", make_known_block)
        patch.setattr(core.tuple, "__eq__", is_same)
        yield
    for scope in reversed(prepared.values()):
        scope.restore()
