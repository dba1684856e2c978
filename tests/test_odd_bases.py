"""Bases that do unusual things in their step: each trains as on the parameters themselves."""

import copy
import weakref
from typing import Any

import pytest
import torch
from cases import case
from torch.nn import Parameter
from torch.optim import SGD, Adadelta, Adamax, AdamW, NAdam, Optimizer, RMSprop

from mechanic.torch import mechanize, plain, tuner, vectors


class Odd(Optimizer):
    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, param: Any, group: Any) -> None:
        param.data.add_(param.grad.data, alpha=-group["lr"])

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.update(param, group)


class Aliases(Odd):
    def update(self, param: Any, group: Any) -> None:
        self.state[param].setdefault("w", param.data)
        super().update(param, group)


class Exchanges(Odd):
    def update(self, param: Any, group: Any) -> None:
        z = self.state[param].setdefault("z", param.data.clone())
        z.copy_(param.data).sub_(param.grad, alpha=group["lr"])
        param.data = z


class Lists(Odd):
    def step(self, closure: Any = None) -> None:
        if not hasattr(self, "listed"):
            self.listed = [p for group in self.param_groups for p in group["params"]]
        for param in self.listed:
            self.update(param, self.param_groups[0])


class Hoards(Odd):
    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr)
        self.first = self.param_groups[0]["params"][:1]

    def step(self, closure: Any = None) -> None:
        for param in self.first + self.param_groups[0]["params"][1:]:
            self.update(param, self.param_groups[0])


class Knows(Odd):
    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr)
        self.ids = {id(param) for param in self.param_groups[0]["params"]}

    def update(self, param: Any, group: Any) -> None:
        assert id(param) in self.ids
        super().update(param, group)


def train(optimizer: Any, params: list[Parameter], steps: int) -> None:
    for _ in range(steps):
        for param in params:
            param.grad = param.detach() - 3
        optimizer.step()


def make(base: Any, size: int = 1000) -> tuple[list[Parameter], Any]:
    draw = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(size, generator=draw)) for _ in range(2)]
    return params, mechanize(base(params))


@pytest.mark.parametrize("base", [Odd, Aliases, Exchanges, Lists, Hoards, Knows])
def test_it_trains_as_any_other(base):
    params, optimizer = make(base)
    expected, plainly = make(Odd)
    first = params[0].detach().clone()
    for _ in range(10):
        train(optimizer, params, 3)
        train(plainly, expected, 3)
        copy.deepcopy(optimizer)
        params[0].tag = object()
    for one, two in zip(params, expected, strict=True):
        torch.testing.assert_close(one, two)
    assert not torch.equal(first, params[0])
    assert all(param.isfinite().all() for param in params)
    torch.save(optimizer.state_dict(), "/dev/null")
    for state in optimizer.state.values():
        assert all(value.sum().isfinite() for value in state.values())


def test_one_that_hoards_goes_on_from_a_checkpoint():
    params, optimizer = make(Hoards)
    train(optimizer, params, 30)
    others = [Parameter(param.detach().clone()) for param in params]
    resumed = mechanize(Hoards(others))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, params, 5)
    train(resumed, others, 5)
    for one, two in zip(params, others, strict=True):
        torch.testing.assert_close(one, two)


def test_a_subclass_of_a_mechanized_class_keeps_its_overrides():
    class Own(mechanize(SGD)):
        def _init_group(self, *args: Any) -> Any:
            self.called = True
            return super()._init_group(*args)

    param = Parameter(torch.ones(3))
    optimizer = Own([param], lr=1.0)
    train(optimizer, [param], 2)
    assert optimizer.called


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_second_derivatives():
    class Newton(Odd):
        def step(self, closure: Any = None) -> None:
            params = self.param_groups[0]["params"]
            ones = [torch.ones_like(param) for param in params]
            with torch.enable_grad():
                curvature = torch.autograd.grad([p.grad for p in params], params, ones)
            for param, own in zip(params, curvature, strict=True):
                param.data.addcdiv_(param.grad.data, own.abs() + 1e-3, value=-1.0)

    param = Parameter(torch.zeros(4))
    optimizer = mechanize(Newton([param]))
    for _ in range(60):
        optimizer.zero_grad()
        ((param - 3) ** 4).sum().backward(create_graph=True)
        optimizer.step()
        param.grad = None
    assert (param - 3).abs().max() < 1


def test_attributes_of_parameters_and_of_the_optimizer():
    class Counts(Odd):
        def update(self, param: Any, group: Any) -> None:
            param.count = getattr(param, "count", 0) + 1
            self.total = getattr(self, "total", 0) + 1
            if hasattr(self, "once"):
                del self.once
            super().update(param, group)

    params, optimizer = make(Counts)
    optimizer.once = True
    for step in range(3):
        params[0].mask = torch.ones(2) * step
        train(optimizer, params, 1)
    assert [param.count for param in params] == [3, 3]
    assert optimizer.total == 6
    assert not hasattr(optimizer, "once")


def test_a_mask_on_each_parameter_that_every_step_draws_anew():
    class Masks(Odd):
        def update(self, param: Any, group: Any) -> None:
            param.mask = param.grad > 0 if hasattr(param, "mask") else param.grad < 0
            super().update(param, group)

    params, optimizer = make(Masks)
    train(optimizer, params, 1)
    assert all(torch.equal(param.mask, param.grad < 0) for param in params)
    train(optimizer, params, 19)
    assert all(torch.equal(param.mask, param.grad > 0) for param in params)


def test_two_parameters_that_are_one_memory():
    shared = torch.zeros(4)
    one, two = Parameter(shared), Parameter(shared)
    optimizer = mechanize(SGD([one, two], lr=1.0), s_init=1.0)
    plain_x = torch.zeros(4)
    for _ in range(3):
        one.grad, two.grad = torch.ones(4), torch.full((4,), 10.0)
        optimizer.step()
    assert torch.equal(one, two)
    assert not torch.equal(shared, plain_x)


def test_a_parameter_that_is_removed_is_let_go():
    params, optimizer = make(SGD)
    train(optimizer, params, 3)
    gone = weakref.ref(params[0])
    optimizer.state.pop(params[0])
    optimizer.param_groups[0]["params"] = params = params[1:]
    train(optimizer, params, 2)
    assert gone() is None


def test_a_fault_in_the_first_step_costs_nothing(monkeypatch):
    params, optimizer = make(SGD)
    with monkeypatch.context() as patch:
        patch.setattr(plain, "pack", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            train(optimizer, params, 1)
    expected, plainly = make(SGD)
    train(optimizer, params, 20)
    train(plainly, expected, 20)
    assert torch.equal(params[0], expected[0])
    assert float(tuner(optimizer).scale) > 0


def test_a_second_interrupt_in_the_middle_of_the_move(monkeypatch):
    monkeypatch.setattr(vectors, "PIECE", 1 << 15)
    params, optimizer = make(AdamW, size=40_000)
    train(optimizer, params, 15)
    other, twin = make(AdamW, size=40_000)
    train(twin, other, 16)
    calls, moved = [0], vectors._moved

    def interrupted(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] in (2, 3, 5):
            raise KeyboardInterrupt
        return moved(*args)

    monkeypatch.setattr(vectors, "_moved", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(optimizer, params, 1)
    for one, two in zip(params, other, strict=True):
        assert torch.equal(one, two)


def test_memory_that_stays_exhausted_leaves_the_tuner_where_the_weights_are(monkeypatch):
    params, optimizer = make(AdamW)
    train(optimizer, params, 15)
    before, scale = params[0].detach().clone(), tuner(optimizer).scale

    def exhausted(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(vectors, "_moved", exhausted)
    with pytest.raises(MemoryError):
        train(optimizer, params, 1)
    assert torch.equal(params[0], before)
    assert torch.equal(tuner(optimizer).scale, scale)


def late(base: type[Optimizer], *, in_place: bool) -> type[Optimizer]:
    """A base that makes a step in one of four calls, and its state in the first of these."""

    class Late(base):  # type: ignore[misc, valid-type]
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            if in_place:
                assert self.param_groups[0]["params"][0] in KNOWN_PARAMS
            return super().step(closure) if self.calls % 4 == 0 else None

        if in_place:

            def __del__(self) -> None:
                """Whoever frees something has no twin."""

    return Late


KNOWN_PARAMS: set[Parameter] = set()


@pytest.mark.parametrize(
    ("base", "in_place"),
    [
        case(base, in_place, name=f"{base.__name__}-{in_place}", by_day=base is AdamW)
        for base in (AdamW, RMSprop, NAdam, Adamax, Adadelta)
        for in_place in (False, True)
    ],
)
def test_a_base_that_makes_its_state_late(base, in_place):
    params = [Parameter(torch.zeros(10) + torch.arange(10) / 10) for _ in range(2)]
    KNOWN_PARAMS.clear()
    KNOWN_PARAMS.update(params)
    optimizer = mechanize(late(base, in_place=in_place)(params, lr=1.0))
    scales = set()
    for step in range(400):
        for param in params:
            param.grad = param.detach() - 3
        optimizer.step()
        scales.add(float(tuner(optimizer).scale))
        entries = set(optimizer.state[params[0]])
        assert (entries == {vectors.DISPLACEMENT}) == (step < 3)
    assert len(scales) > 20
    assert all((param - 3).norm() < 1 for param in params)  # 8.1 at the start


@pytest.mark.parametrize("base", [AdamW, RMSprop])
def test_a_checkpoint_from_before_its_state_was_made(base):
    params = [Parameter(torch.arange(10) / 10)]
    optimizer = mechanize(base(params, lr=1.0))
    train(optimizer, params, 5)
    saved = optimizer.state_dict()
    saved["state"][0] = {vectors.DISPLACEMENT: saved["state"][0][vectors.DISPLACEMENT].clone()}
    resumed = mechanize(base(params, lr=1.0))
    resumed.load_state_dict(saved)
    train(resumed, params, 60)
    assert (params[0] - 3).norm() < 1
