"""The matrix of base optimizers as data, one row a base, and small real problems to train.

@pytest.mark.parametrize("base", BASES, ids=str)
def test_trains(base):
    problem = make_problem(base)
    opt = mechanize(base.factory(problem.params, lr=1.0))
    losses = train(opt, problem, steps=30)
    assert_moved(opt)
"""

import contextlib
import functools
import importlib
import pkgutil
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import case
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.utils._python_dispatch import TorchDispatchMode

from mechanic import tuner as rules
from mechanic.torch import tuner

torch.set_num_threads(1)  # the tensors are small, and the cores are shared
torch.backends.mkldnn.set_flags(_enabled=False)  # slow on them, and Muon's bfloat16 may warn


@dataclass(frozen=True)
class Base:
    """One base optimizer: how to make it, what it needs and what it can do."""

    id: str
    path: str
    """Where the class is, imported when it is first used"""
    kwargs: dict[str, Any] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    """Which of foreach, fused (on a CPU), capturable, differentiable and maximize it takes"""
    tensor_lr: bool = True
    """Whether lr may be typed as a tensor"""
    needs_closure: bool = False
    sparse: bool = False
    """Its gradients must be sparse"""
    matrices_only: bool = False
    one_group: bool = False
    lr_in_state: bool = False
    """Its state holds lengths in units of its lr, which a change of unit must reach"""
    modes: bool = False
    """It has `train()` and `eval()`; the factory calls `train()`"""

    def __str__(self) -> str:
        return self.id

    @property
    def cls(self) -> type[Optimizer]:
        if self.path.startswith("torchao"):
            _run_torchao_eagerly()
        return pkgutil.resolve_name(self.path)

    def factory(self, params: Iterable[Any], lr: float | Tensor = 1.0, **kw: Any) -> Optimizer:
        """The plain optimizer, ready to step."""
        return self.prepare(self.cls(params, lr=lr, **{**self.kwargs, **kw}))

    def prepare(self, optimizer: Optimizer) -> Optimizer:
        if self.modes:
            optimizer.train()
        return optimizer

    def __deepcopy__(self, memo: object) -> "Base":
        return self


def _row(name: str, path: str, *flags: str, **row: Any) -> Base:
    return Base(name, path, flags=frozenset(flags), **row)


_ALL = ("foreach", "capturable", "differentiable", "maximize")
_HYPER = {"weight_decay": 0.01}
_MUON = _row("Muon", "torch.optim.Muon", tensor_lr=False, matrices_only=True)

MISSING = () if hasattr(torch.optim, "Muon") else ("Muon",)
"""The bases that this torch does not have: Muon came with 2.9."""

BASES: list[Base] = [
    _row("Adadelta", "torch.optim.Adadelta", *_ALL),
    _row("Adafactor", "torch.optim.Adafactor", "foreach", "maximize"),
    _row("Adagrad", "torch.optim.Adagrad", "foreach", "fused", "differentiable", "maximize"),
    _row("Adam", "torch.optim.Adam", *_ALL, "fused"),
    _row("Adam-amsgrad", "torch.optim.Adam", *_ALL, "fused", kwargs={"amsgrad": True}),
    _row("AdamW", "torch.optim.AdamW", *_ALL, "fused"),
    _row("Adamax", "torch.optim.Adamax", *_ALL),
    _row("ASGD", "torch.optim.ASGD", *_ALL, lr_in_state=True),
    _row("LBFGS", "torch.optim.LBFGS", needs_closure=True, one_group=True),
    *([] if "Muon" in MISSING else [_MUON]),
    _row("NAdam", "torch.optim.NAdam", *_ALL),
    _row("RAdam", "torch.optim.RAdam", *_ALL),
    _row("RMSprop", "torch.optim.RMSprop", *_ALL),
    _row("RMSprop-momentum", "torch.optim.RMSprop", *_ALL, kwargs={"momentum": 0.9}),
    _row("Rprop", "torch.optim.Rprop", *_ALL, lr_in_state=True),
    _row("SGD", "torch.optim.SGD", "foreach", "fused", "differentiable", "maximize"),
    _row(
        "SGD-momentum",
        "torch.optim.SGD",
        *("foreach", "fused", "differentiable", "maximize"),
        kwargs={"momentum": 0.9},
    ),
    _row(
        "SGD-nesterov",
        "torch.optim.SGD",
        *("foreach", "fused", "differentiable", "maximize"),
        kwargs={"momentum": 0.9, "nesterov": True, **_HYPER},
    ),
    _row("SparseAdam", "torch.optim.SparseAdam", "maximize", sparse=True),
    _row("Lion", "lion_pytorch.Lion", kwargs=_HYPER),
    _row(
        "ScheduleFree-AdamW",
        "schedulefree.AdamWScheduleFree",
        "foreach",
        modes=True,
        lr_in_state=True,
    ),
    _row(
        "ScheduleFree-SGD",
        "schedulefree.SGDScheduleFree",
        "foreach",
        modes=True,
        lr_in_state=True,
    ),
    _row("AdamW8bit", "torchao.optim.AdamW8bit"),
]

BY_ID: dict[str, Base] = {base.id: base for base in BASES}


def supporting(*flags: str) -> list[Base]:
    """The bases that take all of these flags."""
    return [base for base in BASES if base.flags.issuperset(flags)]


# One of each kind. The tests at night (`make test-all`) run over its relatives too, and everywhere
# over AdamW8bit, which is slow: by day it is there where its state is copied, saved or put back.
KINDS = (
    *("Adafactor", "Adagrad", "AdamW", "ASGD", "LBFGS", "Muon", "SGD", "SGD-momentum"),
    *("SparseAdam", "Lion", "ScheduleFree-AdamW"),
)


def by_kind(bases: Iterable[Base]) -> list[Any]:
    """A case for each base."""
    return [case(base, name=base.id, by_day=base.id in KINDS) for base in bases]


every_base = pytest.mark.parametrize("base", by_kind(BASES))
# Where one base stands for all of its kind: scale-free, momentum, signs, lr in the state.
FEW = [BY_ID[name] for name in ("AdamW", "SGD-momentum", "Lion", "ASGD")]
few_bases = pytest.mark.parametrize("base", FEW, ids=str)
plain_bases = [b for b in BASES if not (b.needs_closure or b.sparse)]
scheduled_bases = pytest.mark.parametrize("base", [BY_ID["AdamW"], BY_ID["SGD-momentum"]], ids=str)
# Those that can be fused, fused and not
PRESETS = [
    case(
        *(base, fused, preset),
        name=f"{base.id}-{'fused' if fused else 'default'}-{preset}",
        by_day=base.id in KINDS,
    )
    for base in supporting("fused")
    for fused in (False, True)
    for preset in ("default", "paper")
    if preset == "default" or base in FEW
]


@functools.cache
def _run_torchao_eagerly() -> None:
    """torchao compiles its update at every step; the tests ask for no compiler."""
    module = importlib.import_module("torchao.optim.adam")
    eager = types.ModuleType("torch")
    vars(eager).update(vars(torch), compile=lambda function, **_: function)
    module.torch = eager


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16)[order], torch.tensor(labels)[order]


class Problem:
    """scikit-learn's digits and a small model: `params` to optimize, `loss(step)` of the step's
    batch. Two problems made with the same arguments are equal bit for bit."""

    def __init__(
        self, model: nn.Module, images: Tensor, batch: int, batches: int, closure: bool
    ) -> None:
        self.model, self.closure_only = model, closure
        self.images, self.labels = images, _digits()[1]
        self.batch, self.batches = batch, batches
        self.patience = 1
        """How many times as long it is trained: some bases start slowly."""

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def data(self, step: int = 0) -> tuple[Tensor, Tensor]:
        first = step % self.batches * self.batch
        chosen = slice(first, first + self.batch)
        return self.images[chosen], self.labels[chosen]

    def loss(self, step: int = 0) -> Tensor:
        """The loss of one step's batch."""
        images, labels = self.data(step)
        return nn.functional.cross_entropy(self.model(images).float(), labels)

    def total(self) -> float:
        """The loss of all batches."""
        with torch.no_grad():
            return sum(self.loss(i).item() for i in range(self.batches)) / self.batches

    def backward(self, step: int = 0) -> Tensor:
        """Fill the gradients, and give the loss."""
        self.model.zero_grad()
        loss = self.loss(step)
        loss.backward()
        return loss.detach()

    def closure(self, step: int = 0) -> Callable[[], Tensor]:
        return lambda: self.backward(step)


class _Bag(nn.Module):
    """Logistic regression on the pixels that are on, whose gradient is sparse."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 10, sparse=True, dtype=dtype)
        with torch.no_grad():
            self.table.weight.mul_(0.1)

    def forward(self, images: Tensor) -> Tensor:
        row, pixel = (images > 0.5).nonzero(as_tuple=True)
        logits = torch.zeros(len(images), 10, dtype=self.table.weight.dtype)
        return logits.index_add(0, row, self.table(pixel))


def make_problem(
    base: Base | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    hidden: int | None = None,
    batch: int = 128,
    batches: int = 4,
) -> Problem:
    """A problem that suits a base: sparse gradients, matrices alone or one batch where it needs
    them. With its 64 hidden units the first layer is large enough for 8-bit state."""
    hidden = hidden or (16 if base and base.matrices_only else 64)  # Muon is slow on a CPU
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        bias = not (base and base.matrices_only)
        model: nn.Module
        if base and base.sparse:
            model = _Bag(dtype)
        else:
            model = nn.Sequential(
                nn.Linear(64, hidden, bias=bias), nn.Tanh(), nn.Linear(hidden, 10, bias=bias)
            ).to(dtype)
    closure = bool(base and base.needs_closure)
    images = _digits()[0].to(dtype)
    problem = Problem(model, images, batch, 1 if closure else batches, closure)
    problem.patience = 4 if base and base.id == "AdamW8bit" else 1
    return problem


def take_step(opt: Optimizer, problem: Problem, step: int = 0) -> float:
    """One step, with a closure where the base needs one; gives the loss before it."""
    if problem.closure_only:
        return float(opt.step(problem.closure(step)))
    loss = problem.backward(step)
    opt.step()
    return float(loss)


def train(
    opt: Optimizer, problem: Problem, steps: int = 30, *, start: int = 0, scheduler: Any = None
) -> list[float]:
    """Train, and give the loss before each step."""
    losses = []
    for step in range(start, start + steps * problem.patience):
        losses.append(take_step(opt, problem, step))
        if scheduler is not None:
            scheduler.step()
    return losses


def values(params: Iterable[Tensor]) -> list[Tensor]:
    """A copy of the parameters."""
    return [param.detach().clone() for param in params]


def dense(tensor: Tensor) -> Tensor:
    """A tensor that can be compared: torchao's 8-bit state, and sparse ones, written out."""
    tensor = tensor.detach()
    if hasattr(tensor, "dequantize") and type(tensor).__name__.startswith("OptimState"):
        return tensor.dequantize()
    return tensor.to_dense() if tensor.is_sparse else tensor


def assert_equal(a: Iterable[Tensor], b: Iterable[Tensor]) -> None:
    """Bit for bit."""
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(dense(x), dense(y), rtol=0, atol=0, equal_nan=True)


def start_of(opt: Optimizer) -> float:
    """The scale that a mechanized optimizer started from."""
    mechanism = opt._mechanic
    numbers = mechanism.scalars.read()
    zero = torch.zeros_like(numbers.scale)
    sums = rules.Sums(*[zero] * 8)._replace(x1=numbers.reference_square, d=numbers.size)
    return float(rules.start(mechanism.options, numbers.state, sums)[0])


def assert_moved(opt: Optimizer, factor: float = 2.0) -> None:
    """The scale has left its start by at least a factor: the tuner was at work."""
    scale, first = float(tuner(opt).scale), start_of(opt)
    assert scale > factor * first, f"the scale is {scale}, and it started from {first}"


# -- Schedulers --------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.97**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.97),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=9, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [7, 20], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.5, total_iters=6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=10),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.97),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=30, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(
        o, T_0=12, eta_min=0.01
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=40, power=2.0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.1, max_lr=1.0, step_size_up=8),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=40),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2, factor=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=6),
            lr_scheduler.CosineAnnealingLR(o, T_max=30),
        ],
        milestones=[6],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(o, factor=0.5, total_iters=6),
            lr_scheduler.ExponentialLR(o, gamma=0.98),
        ],
        optimizer=o,
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=0.2, anneal_epochs=12),
}


def advance(scheduler: Any, step: int) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1 / (1 + min(step, 10)))  # a metric that stops falling
    else:
        scheduler.step()


# -- Host synchronisation ----------------------------------------------------------------------

READS = ("item", "__bool__", "cpu", "tolist", "__float__", "__int__", "__index__", "numpy")


class Reads(TorchDispatchMode):
    """Counts what reads a tensor on the host, by name, and as `host` what torch itself makes of
    it: a scalar that is fetched, or data whose amount depends on values."""

    HOST = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.HOST:
            self.count["host"] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the host's reads of tensors."""
    own = {name: vars(Tensor).get(name) for name in READS}
    reads = Reads()

    def count(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def read(*args: Any, **kwargs: Any) -> Any:
            reads.count[name] += 1
            return original(*args, **kwargs)

        return read

    try:
        for name in READS:
            setattr(Tensor, name, count(name))
        with reads:
            yield reads.count
    finally:
        for name, original in own.items():
            if original is None:
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, original)
