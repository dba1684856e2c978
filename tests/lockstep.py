"""The plain path and the kernels side by side, on the same gradients.

    lock = Lock(lambda params: torch.optim.AdamW(params, lr=1.0, fused=True), [(7,), (3, 5)])
    lock.run()
    lock.assert_same()

Where there is no GPU, Triton's interpreter runs the kernels, and takes its time: some 10 ms for
each chunk of a tensor and pass, so tensors are few and small here, and steps no more than needed.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lion_pytorch
import pytest
import torch
from comparing import DISPLACEMENT
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from mechanic.torch import mechanize
from mechanic.torch.kernels import dispatch
from mechanic.tuner import DefaultState

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
STEPS = 200 if ON_GPU else 20

Make = Callable[[list[Any]], Optimizer]

# What each file with tests of them has as its `pytestmark`
on_kernels = [
    pytest.mark.usefixtures("small_chunks", "quick_interpreter", "one_thread"),
    # The interpreter computes with NumPy, which warns of what a GPU does in silence.
    pytest.mark.filterwarnings(
        "ignore:(invalid value|divide by zero|overflow) encount:RuntimeWarning"
    ),
]

ONE = [(3, 5)]
FEW = [(7,), (3, 5)]


class Own(AdamW):
    """A base that nobody knows: its step is its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


KNOWN: dict[str, Make] = {
    "AdamW": lambda p: AdamW(p, lr=1.0, weight_decay=0.1),
    "AdamW-fused": lambda p: AdamW(p, lr=1.0, weight_decay=0.1, betas=(0.8, 0.95), fused=True),
    "Adam-maximize": lambda p: Adam(p, lr=0.5, weight_decay=0.01, maximize=True, fused=True),
    "SGD": lambda p: SGD(p, lr=1.0, weight_decay=0.01),
    "SGD-momentum": lambda p: SGD(p, lr=1.0, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD-nesterov": lambda p: SGD(p, lr=2.0, momentum=0.9, nesterov=True),
    "Lion": lambda p: lion_pytorch.Lion(p, lr=1.0, betas=(0.3, 0.95), weight_decay=0.1),
}
if ON_GPU:
    KNOWN["AdamW-capturable"] = lambda p: AdamW(p, lr=1.0, capturable=True)

ANY: dict[str, Make] = {
    "Any": lambda p: RMSprop(p, lr=1.0),
    "Adagrad-fused": lambda p: Adagrad(p, lr=1.0, fused=not ON_GPU),
    "Own": lambda p: Own(p, lr=1.0, weight_decay=0.1, fused=True),
}

BASES = KNOWN | ANY


@contextmanager
def kernels(used: bool = True) -> Iterator[None]:
    """Let the dispatcher use the kernels here, or not."""
    before = dispatch.DEVICES
    dispatch.DEVICES = (DEVICE,) if used else ()
    try:
        yield
    finally:
        dispatch.DEVICES = before


class Side:
    """An optimizer, and the path that its steps take."""

    def __init__(self, make: Make, params: list[Parameter], uses_kernels: bool, options: Any):
        self.params = params
        self.optimizer: Any = mechanize(make(params), **options)
        self.uses_kernels = uses_kernels

    @property
    def mechanism(self) -> Any:
        return self.optimizer._mechanic

    @property
    def displacements(self) -> list[Tensor]:
        return [self.optimizer.state[param][DISPLACEMENT] for param in self.params]

    def step(self) -> None:
        with kernels(self.uses_kernels):
            self.optimizer.step()

    def ran_kernels(self, *, known: bool) -> bool:
        """Whether the last step was made by the kernels: they note its number."""
        plan = self.mechanism.kernels.plan
        if plan is None or plan.is_known != known:
            return False
        done, turn = plan.verdict.tolist()
        return bool(turn + done == int(self.mechanism.counts.read().steps))


class Lock:
    """Two optimizers that `make` makes, over equal parameters; see the top of this file.

    The gradients are those of ½‖x − target‖² (or for an `ascent`, of its negative), with noise, at
    the parameters of the plain path: what rounding makes of the other's does not come back, so
    there is nothing to grow from it.
    """

    def __init__(
        self,
        make: Make,
        shapes: Sequence[tuple[int, ...]] | None = None,
        *,
        params: list[Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        ascent: bool = False,
        **options: Any,
    ) -> None:
        self.draw = torch.Generator().manual_seed(0)
        self.sign = -1.0 if ascent else 1.0
        if params is None:
            assert shapes is not None
            params = [self.noise(shape).to(DEVICE, dtype) for shape in shapes]
        self.targets = [3 * self.noise(param.shape).to(param) for param in params]
        sides = [[Parameter(copied(param)) for param in params] for _ in range(2)]
        self.plain = Side(make, sides[0], False, options)
        self.fast = Side(make, sides[1], True, options)
        self.first_scale = 0.0

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.plain, self.fast

    def noise(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self.draw)

    def gradients(self) -> list[Tensor]:
        pairs = zip(self.plain.params, self.targets, strict=True)
        return [self.sign * (x.detach() - t + self.noise(x.shape).to(t)) for x, t in pairs]

    def give(self, gradients: Sequence[Tensor | None]) -> None:
        for side in self.sides:
            for param, gradient in zip(side.params, gradients, strict=True):
                param.grad = None if gradient is None else laid_out_like(param, gradient)

    def step(self, gradients: Sequence[Tensor | None] | None = None) -> None:
        self.give(self.gradients() if gradients is None else gradients)
        for side in self.sides:
            side.step()
        self.first_scale = self.first_scale or float(self.plain.mechanism.scale)

    def run(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.step()

    def assert_same(self, tolerance: float = 1e-5, *, factor: float = 20.0) -> None:
        """Both came to the same, and the scale has moved meanwhile."""
        scale = float(self.plain.mechanism.scale)
        moved = max(scale / self.first_scale, self.first_scale / scale)
        assert moved > factor, f"the scale moved by {moved:.3g} only"
        options = self.plain.mechanism.options
        for name in ("steps", "updates", "skipped", "skipped_in_a_row"):
            counts = [getattr(side.mechanism.counts.read(), name) for side in self.sides]
            assert int(counts[0]) == int(counts[1]), name
        one, two = (side.mechanism.scalars.read() for side in self.sides)
        assert float(two.scale) == approx(scale, tolerance)
        assert float(two.share) == approx(float(one.share), tolerance)
        for name, a, b in zip(one.state._fields, one.state, two.state, strict=True):
            if name != "D" or options.s_init == "relative":  # else it is not used
                assert_near(a, b, tolerance * 10, name)  # of h, of which much may have cancelled
        # The largest recent h: the default rule keeps that of S·h.
        is_default = isinstance(one.state, DefaultState)
        largest = one.state.recent_fall / scale if is_default else one.state.m.max()
        assert abs(one.signal - two.signal) <= tolerance * 10 * largest
        assert_near(one.reference_square, two.reference_square, tolerance, "‖x₁‖²")
        for a, b in zip(*(side.optimizer.param_groups for side in self.sides), strict=True):
            assert float(a["lr"]) == float(b["lr"])
            assert float(b["effective_lr"]) == approx(float(a["effective_lr"]), tolerance)
        for p, q in zip(self.plain.params, self.fast.params, strict=True):
            assert_near(p.detach(), q.detach(), tolerance, "a parameter")
            self._assert_same_state(p, q, tolerance)

    def _assert_same_state(self, p: Tensor, q: Tensor, tolerance: float) -> None:
        one, two = self.plain.optimizer.state.get(p, {}), self.fast.optimizer.state.get(q, {})
        assert one.keys() == two.keys()
        for key, value in one.items():
            if isinstance(value, Tensor):
                assert value.dtype == two[key].dtype
                # On a GPU torch's fused Adam has 1 − β₂ from a β₂ in float32: 1.3e-5 off at 0.999.
                group = self.plain.optimizer.param_groups[0]
                rounds = ON_GPU and key == "exp_avg_sq" and bool(group.get("fused"))
                assert_near(value, two[key], tolerance + 2e-5 * rounds, key)
            else:
                assert value == two[key], key

    def assert_known(self, known: bool = True) -> None:
        """The kernels made the last step, and computed the base's if it is known."""
        assert self.fast.ran_kernels(known=known)
        assert not self.plain.mechanism.kernels.plan
        base = type(self.fast.optimizer)._base
        for side, expected in ((self.plain, 1), (self.fast, 0 if known else 1)):
            for param in side.params:
                param.grad = torch.ones_like(param)
            with calls_of(inspect.unwrap(base.step)) as calls:
                side.step()
            assert len(calls) == expected


@contextmanager
def calls_of(function: Any) -> Iterator[list[str]]:
    """The calls of a Python function."""
    calls: list[str] = []

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is function.__code__:
            calls.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def approx(value: float, tolerance: float) -> Any:
    return pytest.approx(value, rel=tolerance, abs=0)


def assert_near(a: Tensor, b: Tensor, tolerance: float, what: str) -> None:
    """Equal to a part of the largest element."""
    assert a.shape == b.shape, what
    if not a.numel():
        return
    a, b = a.double(), b.double()
    size, gap = a.abs().max().item(), (a - b).abs().max().item()
    assert gap <= tolerance * size, f"{what}: {gap:.3g} apart, at a size of {size:.3g}"


def copied(tensor: Tensor, shift: int | None = None) -> Tensor:
    """A copy that lies in memory as the tensor does, alignment included, or else `shift` elements
    beyond what is aligned."""
    size = 16 // tensor.element_size()
    if shift is None:
        shift = tensor.data_ptr() % 16 // tensor.element_size()
    storage = torch.empty(size + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    assert storage.data_ptr() % 16 == 0
    return storage.as_strided(tensor.shape, tensor.stride(), shift).copy_(tensor)


def laid_out_like(param: Tensor, gradient: Tensor) -> Tensor:
    """A copy of a gradient in the strides of its parameter."""
    return torch.empty_like(param.detach()).copy_(gradient)


def bits(optimizer: Any) -> list[Tensor]:
    """Everything that a mechanized optimizer holds but for how many steps it skipped."""
    mechanism = optimizer._mechanic
    params = [param for group in optimizer.param_groups for param in group["params"]]
    counted = mechanism.counts.read()
    found = [mechanism.scalars.packed, counted.steps, counted.updates]
    found += [param.detach() for param in params]
    for param in params:
        state = optimizer.state.get(param, {})
        found += [value for value in state.values() if isinstance(value, Tensor)]
    return [value.clone() for value in found]


def same_bits(one: Any, two: Any) -> bool:
    pairs = zip(bits(one), bits(two), strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
