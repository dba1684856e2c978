"""The memory that a mechanized optimizer costs, between steps and inside one."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bases import BASES, BY_ID, assert_moved, make_problem, take_step
from cases import case
from comparing import DISPLACEMENT
from descents import SOME, descend, momentum_sgd
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mechanic.torch import mechanize

SLACK = 4096  # the tuner's own scalars
PER_TENSOR = 40  # what the sums of each tensor take
WORKSPACE = 1 << 20  # what may be used beside a slot of 4 MiB


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that are reachable from a value, gradients left out."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name), seen)
        else:
            yield value
    elif isinstance(value, dict):
        for key, own in value.items():
            yield from _tensors(key, seen)
            yield from _tensors(own, seen)
    elif isinstance(value, (list, tuple, set)):
        for own in value:
            yield from _tensors(own, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _tensors(vars(value), seen)


def _reachable_bytes(opt: Optimizer) -> int:
    """The bytes behind an optimizer, those of the parameters not counted."""
    params = {id(param) for group in opt.param_groups for param in group["params"]}
    storages = {}
    for tensor in _tensors(vars(opt), set()):
        if id(tensor) not in params:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("base", "dtype"),
    [(base, torch.float32) for base in BASES if not base.needs_closure]
    + [(BY_ID[name], torch.bfloat16) for name in SOME if name != "LBFGS"],
    ids=str,
)
def test_one_slot_between_steps(base, dtype):
    """LBFGS is left out: how much history it holds depends on where the weights went."""

    def run(mechanized: bool) -> tuple[int, Optimizer]:
        problem = make_problem(base, dtype=dtype)
        opt = base.factory(problem.params, lr=1e-3)
        if mechanized:
            mechanize(opt)
        for step in range(3):
            take_step(opt, problem, step)
        size = sum(param.numel() for param in problem.params)
        return size, opt

    size, opt = run(True)
    extra = _reachable_bytes(opt) - _reachable_bytes(run(False)[1])
    assert 4 * size <= extra <= 4 * size + SLACK
    assert all(opt.state[p][DISPLACEMENT].nbytes == 4 * p.numel() for p in opt.state)


def test_the_rest_does_not_grow_with_the_number_of_parameters():
    def extra(count: int) -> int:
        params = [nn.Parameter(torch.ones(10)) for _ in range(count)]
        opt = mechanize(SGD(params, lr=1.0))
        descend(opt, params, 3)
        return _reachable_bytes(opt) - 40 * count

    assert extra(5) == extra(300) <= SLACK


def test_nothing_for_parameters_without_gradients():
    def run(prepare: Callable[[Optimizer], Optimizer]) -> Optimizer:
        big, small = nn.Parameter(torch.ones(10_000)), nn.Parameter(torch.ones(10))
        opt = prepare(AdamW([big, small], lr=1.0))
        descend(opt, [small])
        assert big not in opt.state
        return opt

    opt = run(mechanize)
    assert _reachable_bytes(opt) - _reachable_bytes(run(lambda opt: opt)) <= 40 + SLACK
    assert_moved(opt)


class Peak(TorchDispatchMode):
    """The most bytes that were alive at once of what was allocated inside it."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {StorageWeakRef(t.untyped_storage()).cdata for t in known}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak, self.at = 0, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self.known:
                    self.alive[reference.cdata] = (reference, storage.nbytes())
        self.alive = {k: own for k, own in self.alive.items() if not own[0].expired()}
        total = sum(size for _, size in self.alive.values())
        if total > self.peak:
            self.peak, self.at = total, str(func)
        return result


def _peak_of_a_step(opt: Optimizer) -> Peak:
    params = [param for group in opt.param_groups for param in group["params"]]
    for step in range(4):
        for param in params:
            param.grad = param.detach() - 3
        if step < 3:
            opt.step()
    known = [*_tensors(vars(opt), set()), *(param.grad for param in params)]
    with Peak(known) as peak:
        opt.step()
    return peak


# Shapes, and what may be used beside the slot: where it is large, a constant
SHAPES: dict[str, tuple[list[tuple[int, ...]], int]] = {
    "many": ([(15_000,)] * 80, WORKSPACE),
    "few": ([(1024, 1024), *[(50,)] * 9, (16, 3, 3, 3)], WORKSPACE),
    "transposed": ([(1024, 1024)], WORKSPACE),
}
KINDS: dict[str, Callable[..., Optimizer]] = {
    "AdamW-foreach": functools.partial(AdamW, foreach=True),
    "AdamW-single": functools.partial(AdamW, foreach=False),
    "AdamW-fused": functools.partial(AdamW, fused=True),
    "momentum": momentum_sgd,
}


@pytest.mark.parametrize(
    ("kind", "shapes", "dtype"),
    [
        case(kind, shapes, dtype, name=f"{kind}-{shapes}-{dtype}", by_day=(i + j + k) % 2 == 0)
        for i, kind in enumerate(KINDS)
        for j, shapes in enumerate(SHAPES)
        for k, dtype in enumerate([torch.float32, torch.bfloat16])
    ],
)
def test_one_more_slot_inside_a_step(kind, shapes, dtype):
    """At its peak a step holds at most one float32 slot more than the plain base's own step."""
    sizes, beside = SHAPES[shapes]

    def make() -> Optimizer:
        tensors = [torch.ones(shape, dtype=dtype) for shape in sizes]
        if shapes == "transposed":
            tensors = [tensor.t() for tensor in tensors]
        return KINDS[kind]([nn.Parameter(tensor) for tensor in tensors], lr=1e-3)

    size = sum(math.prod(shape) for shape in sizes)
    plain = _peak_of_a_step(make())
    own = _peak_of_a_step(mechanize(make()))
    allowed = plain.peak + 4 * size + PER_TENSOR * len(sizes) + SLACK + beside
    slots = (own.peak - plain.peak) / (4 * size)
    assert own.peak <= allowed, f"{slots:.2f} slots more than the plain step, at {own.at}"


def test_the_measure_of_memory_sees_what_is_allocated():
    """What the tests above rest on."""
    x = torch.ones(1000)
    with Peak([x]) as peak:
        a = x + 1
        b = a * 2
        del a
        c = b + 1
        x.add_(c)
    assert peak.peak == 8000
    opt = AdamW([nn.Parameter(torch.ones(1000))], lr=1e-3)
    descend(opt, opt.param_groups[0]["params"], 1)
    assert _reachable_bytes(opt) == 8004
