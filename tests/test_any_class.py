"""Optimizers of any make: whatever class they are of, they can be mechanized, and what cannot be is
left as it was."""

import abc
import copy
import functools
import gc
import pickle
import threading
import weakref
from typing import Any, ClassVar, Generic, TypeVar
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import SGD, AdamW, Optimizer

from mechanic.torch import attach, mechanize, tuner
from mechanic.torch.native import step as native

T = TypeVar("T")


class Slotted:
    __slots__ = ()

    def name(self) -> str:
        return "a mixin without a __dict__"


class Abstract(abc.ABC, SGD):
    pass


class Parametrised(Generic[T], SGD):
    pass


class Mixed(Slotted, SGD):
    pass


class Counting(SGD):
    """It keeps a number under a name in its state, beside the parameters'."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.state["total"] = 0  # type: ignore[index]

    def step(self, closure: Any = None) -> Any:
        self.state["total"] += 1  # type: ignore[index]
        return super().step(closure)


class OwnRate(Optimizer):
    """It chooses its learning rate by itself; the one in the group is None."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                param.data.add_(param.grad, alpha=-min(1e-2, state["step"] ** -0.5))


def train(optimizer: Any, weight: nn.Parameter, steps: int = 25) -> nn.Parameter:
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        weight.grad = weight.detach() - 3 + torch.randn(6, generator=draw)
        optimizer.step()
    return weight


def new_weight() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 6))


@pytest.mark.parametrize("base", [Abstract, Parametrised, Mixed], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("how", ["instance", "class"])
def test_whatever_its_bases_are(base, how):
    weight, expected = new_weight(), new_weight()
    made = (
        mechanize(base)([weight], lr=1.0) if how == "class" else mechanize(base([weight], lr=1.0))
    )
    plain = mechanize(SGD([expected], lr=1.0))
    assert isinstance(made, base)
    assert torch.equal(train(made, weight), train(plain, expected))
    assert float(tuner(made).scale) > 0
    copies = [copy.deepcopy(made), pickle.loads(pickle.dumps(made))]
    train(made, weight, 5)
    for other in copies:
        assert type(other) is type(made)
        assert torch.equal(train(other, other.param_groups[0]["params"][0], 5), weight)


def test_a_number_in_the_state():
    weight, expected = new_weight(), new_weight()
    optimizer = mechanize(Counting([weight], lr=1.0))
    plain = mechanize(SGD([expected], lr=1.0))
    # They differ by rounding: what is known to be proportional to its lr is run at another one.
    torch.testing.assert_close(train(optimizer, weight), train(plain, expected))
    assert optimizer.state["total"] == 25
    tuner(optimizer).detach()
    assert type(optimizer) is Counting


def test_a_base_that_chooses_its_learning_rate_itself():
    weight = new_weight()
    optimizer = mechanize(OwnRate([weight]))
    first = float((weight.detach() - 3).norm())
    train(optimizer, weight, 100)
    assert float((weight.detach() - 3).norm()) < 0.5 * first
    assert optimizer.param_groups[0]["lr"] is None
    other = mechanize(OwnRate([new_weight()]))
    other.load_state_dict(optimizer.state_dict())
    assert float(tuner(other).scale) == float(tuner(optimizer).scale)


def test_adafactor_of_transformers():
    transformers = pytest.importorskip("transformers")
    weight = nn.Parameter(torch.linspace(-1, 1, 6).repeat(4, 1))
    optimizer = mechanize(transformers.Adafactor([weight]))
    first = float((weight.detach() - 3).norm())
    for _ in range(100):
        weight.grad = weight.detach() - 3
        optimizer.step()
    assert float((weight.detach() - 3).norm()) < 0.5 * first


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_step_that_is_patched_later_is_heard(is_marked, monkeypatch):
    """Also by a function with the marks that torch's own wrapper has, as of `functools.wraps`."""

    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    weight = new_weight()
    optimizer = mechanize(Own([weight], lr=1.0))
    train(optimizer, weight, 5)
    calls = []
    with monkeypatch.context() as patch:
        step = Own.step
        patched = lambda self, closure=None: (calls.append(1), step(self))[1]  # noqa: E731
        patch.setattr(Own, "step", functools.wraps(step)(patched) if is_marked else patched)
        train(optimizer, weight, 3)
    assert len(calls) == 3
    train(optimizer, weight, 2)
    assert len(calls) == 3


@pytest.mark.parametrize("is_native", [False, True])
def test_a_patch_of_a_step_that_is_known_is_heard(is_native, monkeypatch):
    monkeypatch.setattr(native, "IS_ON", is_native)
    weight = new_weight()
    optimizer = mechanize(AdamW([weight], lr=1.0))
    train(optimizer, weight, 20)
    calls, step = [], AdamW.step

    @functools.wraps(step)
    def patched(self: Any, closure: Any = None) -> Any:
        calls.append(1)
        return step(self, closure)

    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "step", patched)
        train(optimizer, weight, 3)
    assert len(calls) == 3
    train(optimizer, weight, 2)
    assert len(calls) == 3


def test_a_mock_of_the_step_does_not_outlive_its_test():
    class Own(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    weight = new_weight()
    with mock.patch.object(Own, "step") as mocked:
        before = weight.detach().clone()
        train(mechanize(Own([weight], lr=1.0)), weight, 2)
        assert mocked.call_count == 2
        assert mocked.hooked.__bool__.call_count == 1  # by torch, when the optimizer is made
        assert torch.equal(weight, before)
    train(mechanize(Own([weight], lr=1.0)), weight, 20)
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("room", ["_attach", "publish_rates", "listen", "checkpoint.publish"])
def test_what_fails_is_left_as_it_was(room, monkeypatch):
    weight = new_weight()
    optimizer = AdamW([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(optimizer, weight, 3)
    attributes, group = dict(vars(optimizer)), dict(optimizer.param_groups[0])

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(f"{attach.__name__}.{room}", fail)
        with pytest.raises(RuntimeError, match="a fault"):
            mechanize(optimizer)
    assert type(optimizer) is AdamW
    assert vars(optimizer).keys() == attributes.keys()
    assert all(vars(optimizer)[name] is value for name, value in attributes.items())
    assert optimizer.param_groups[0] == group
    twin_weight = nn.Parameter(weight.detach().clone())
    twin = AdamW([twin_weight], lr=0.1)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(train(optimizer, weight, 3), train(twin, twin_weight, 3))
    scheduler.step()
    assert float(tuner(mechanize(optimizer)).scale) == 0


@pytest.mark.parametrize("room", ["publish_rates", "checkpoint.publish"])
def test_groups_that_were_divided_are_whole_again(room, monkeypatch):
    weights = [new_weight(), new_weight()]
    optimizer = AdamW(weights, lr=0.1)
    (group,) = optimizer.param_groups

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(f"{attach.__name__}.{room}", fail)
    with pytest.raises(RuntimeError, match="a fault"):
        mechanize(optimizer, scope="tensor")
    assert optimizer.param_groups == [group]
    assert optimizer.param_groups[0] is group
    assert group["params"] == weights


def test_detaching_a_base_that_finds_its_lr_by_itself():
    transformers = pytest.importorskip("transformers")
    weight = new_weight()
    optimizer = mechanize(transformers.Adafactor([weight]))
    train(optimizer, weight, 5)
    plain = tuner(optimizer).detach()
    assert type(plain) is transformers.Adafactor
    assert plain.param_groups[0]["lr"] is None
    train(plain, weight, 2)


class Freeing(SGD):
    """It holds something outside of Python, which it frees when it is deleted."""

    held: ClassVar[set[int]] = set()

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.held.add(id(self))
        self.key = id(self)

    def __del__(self) -> None:
        self.held.discard(self.key)


class InSlots(SGD):
    __slots__ = ("count",)

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)

    def __repr__(self) -> str:
        return f"{type(self).__name__} after {self.count} steps"


def test_a_base_that_frees_what_it_holds_is_deleted_once():
    weight, expected = new_weight(), new_weight()
    optimizer = mechanize(Freeing([weight], lr=1.0))
    torch.testing.assert_close(
        train(optimizer, weight), train(mechanize(SGD([expected], lr=1.0)), expected)
    )
    repr(optimizer)
    gc.collect()
    assert optimizer.key in Freeing.held
    del optimizer
    gc.collect()
    assert not Freeing.held


def test_attributes_in_slots():
    weight, expected = new_weight(), new_weight()
    optimizer = mechanize(InSlots([weight], lr=1.0))
    torch.testing.assert_close(
        train(optimizer, weight), train(mechanize(SGD([expected], lr=1.0)), expected)
    )
    assert repr(optimizer) == "InSlots after 25 steps"


class Locked(SGD):
    """It leaves a lock out of what is pickled."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("lock", "step")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()


def test_a_base_that_says_what_is_pickled():
    weight = new_weight()
    optimizer = mechanize(Locked([weight], lr=1.0))
    train(optimizer, weight)
    other = pickle.loads(pickle.dumps(optimizer))
    assert other.lock is not optimizer.lock
    train(optimizer, weight, 5)
    assert torch.equal(train(other, other.param_groups[0]["params"][0], 5), weight)


def test_a_state_dict_of_another_form():
    class Other(SGD):
        def state_dict(self) -> Any:
            return {"state": {}, "param_groups": {"a": 1}}

    assert mechanize(Other([new_weight()], lr=1.0)).state_dict()["param_groups"] == {"a": 1}


def test_a_subclass_shows_its_own_name():
    class Mine(mechanize(AdamW)):  # type: ignore[misc]
        pass

    assert repr(Mine([new_weight()], lr=1.0)).startswith("Mine (")


@pytest.mark.parametrize(
    "make",
    [SGD, AdamW, lambda p, lr: AdamW(p, lr, foreach=True), lambda p, lr: AdamW(p, lr, fused=True)],
)
def test_fake_tensors(make):
    """What tools use that ask for shapes and memory alone; wherever the plain base can step."""
    with FakeTensorMode():
        model = nn.Linear(4, 3)
        optimizer = mechanize(make(model.parameters(), lr=1.0))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        assert optimizer.state[model.weight]["mechanic_displacement"].shape == (3, 4)
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_step_that_make_fx_traces(mode):
    """What is traced is the step itself: the graph goes on as the optimizer would."""
    weight, expected = new_weight(), new_weight()
    optimizer, plain = mechanize(SGD([weight], lr=1.0)), mechanize(SGD([expected], lr=1.0))
    train(optimizer, weight)
    train(plain, expected)

    def step(grad: torch.Tensor) -> torch.Tensor:
        weight.grad = grad
        optimizer.step()
        return weight.detach().clone()

    grad = torch.linspace(1, 2, 6)
    graph = make_fx(step, tracing_mode=mode, _allow_non_fake_inputs=True)(grad)
    assert len(graph.graph.nodes) > 50
    if mode == "real":  # then the step was made as well
        expected.grad = grad
        plain.step()
        torch.testing.assert_close(weight, expected)


def test_one_that_steps_in_the_backward_pass_is_refused():
    class Lomo(torch.optim.SGD):
        def fused_backward(self, loss: Any, lr: float) -> None:
            pass

    own = Lomo([nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(
        ValueError, match=r"Lomo moves the weights in the backward pass.*Use a base"
    ):
        mechanize(own)
    assert type(own) is Lomo


def test_a_class_refuses_what_an_instance_does() -> None:
    made = mechanize(torch.optim.LBFGS, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="changes the gradients in place"):
        made([torch.nn.Parameter(torch.ones(3))])


def test_a_class_that_is_gone_is_kept_by_nothing():
    """Those made in a loop, as by a study of settings, would add up."""
    kept = []
    for _ in range(30):
        base = type("Own", (SGD,), {})
        weights = nn.Parameter(torch.ones(3))
        optimizer = mechanize(base([weights], lr=1.0))
        for _ in range(3):
            weights.grad = torch.ones(3)
            optimizer.step()
        kept.append(weakref.ref(type(optimizer)))
    del base, optimizer
    gc.collect()
    assert sum(one() is not None for one in kept) == 0
