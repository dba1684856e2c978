"""Parameters on another device, on several, and models that are moved after mechanize."""

from collections.abc import Callable, Iterator

import pytest
import torch
from bases import BASES, assert_moved, by_kind, make_problem, train, values
from cases import case
from comparing import DISPLACEMENT, assert_same, bits
from descents import MAKES, STEPS, each_kind, ramp
from torch import nn
from torch.optim import AdamW, Optimizer

from mechanic.torch import mechanize, tuner

TOGETHER = {"one group": True, "two groups": False}
FLAGS = [{}, {"foreach": True}, {"foreach": False}]


@pytest.mark.parametrize(
    ("make", "together", "flags"),
    [
        case(make, TOGETHER[how], own, name=f"{own}-{how}-{name}", by_day=(i + j + k) % 2 == 0)
        for i, own in enumerate(FLAGS)
        for j, how in enumerate(TOGETHER)
        for k, (name, make) in enumerate(MAKES.items())
    ],
)
def test_meta_beside_cpu(make, together, flags):
    def run(*meta: nn.Parameter) -> tuple[Optimizer, nn.Parameter]:
        weight = nn.Parameter(ramp(4, 3))
        groups = [{"params": [*meta, weight]}]
        if meta and not together:
            groups = [{"params": list(meta)}, {"params": [weight]}]
        opt = mechanize(make(groups, lr=1.0, **flags))
        for _ in range(STEPS):
            weight.grad = weight.detach() - 3
            for param in meta:
                param.grad = torch.ones_like(param)
            opt.step()
        return opt, weight

    there = nn.Parameter(torch.ones(2, 2, device="meta"))
    opt, weight = run(there)
    alone, other = run()
    assert opt.state[there][DISPLACEMENT].device.type == "meta"
    assert tuner(opt).scale.device.type == "cpu"
    assert_same(bits(weight), bits(other))
    assert_same(bits(tuner(opt).scale), bits(tuner(alone).scale))
    assert_moved(opt)


def test_a_step_with_gradients_on_one_device_alone():
    """The tuner stays where it can be read."""
    here, there = nn.Parameter(ramp(4)), nn.Parameter(torch.ones(3, device="meta"))
    opt = mechanize(AdamW([here, there], lr=1.0))
    for step in range(STEPS):
        here.grad = None if step in (0, 10) else here.detach() - 3
        there.grad = torch.ones(3, device="meta")
        before = bits(tuner(opt).scale)
        opt.step()
        if here.grad is None:
            assert_same(bits(tuner(opt).scale), before)
    assert_moved(opt)


# They read a number from a tensor, or take sparse gradients alone.
NOT_ON_META = ("Adafactor", "ASGD", "SparseAdam")


@pytest.mark.parametrize("base", by_kind(base for base in BASES if not base.needs_closure))
def test_everything_on_meta(base):
    """Wherever the plain optimizer runs there; no error is what is asked for."""
    shape = (64, 64)

    def run(prepare: Callable[[Optimizer], Optimizer]) -> Optimizer:
        params = [nn.Parameter(torch.ones(shape, device="meta")) for _ in range(2)]
        opt = prepare(base.factory(params, lr=1.0))
        for _ in range(3):
            for param in params:
                param.grad = torch.ones_like(param)
            opt.step()
        return opt

    if base.id in NOT_ON_META:
        with pytest.raises((NotImplementedError, RuntimeError)):
            run(lambda opt: opt)
        return
    opt = run(mechanize)
    assert all(value.is_meta for value in tuner(opt).metrics().values())
    assert all(opt.state[p][DISPLACEMENT].is_meta for p in opt.param_groups[0]["params"])
    opt.state_dict()
    repr(opt)


# models that are moved after mechanize


@pytest.fixture
def swapping() -> Iterator[None]:
    """`.to` keeps the Parameter objects even where the new data is of another kind."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@each_kind
@pytest.mark.usefixtures("swapping")
def test_a_model_that_moves_to_another_device(make):
    problem = make_problem(hidden=8)
    opt = mechanize(make(problem.params, lr=1.0))
    problem.model.to("meta")
    for _ in range(3):
        for param in problem.params:
            param.grad = torch.ones_like(param)
        opt.step()
    assert all(param.is_meta for param in opt.param_groups[0]["params"])
    assert tuner(opt).scale.is_meta


@each_kind
@pytest.mark.usefixtures("swapping")
def test_a_model_that_is_given_its_memory_after_mechanize(make):
    """Deferred initialisation: made on meta, and filled when its place is known."""

    def run(deferred: bool) -> tuple[Optimizer, list[nn.Parameter]]:
        problem = make_problem(hidden=8)
        weights = values(problem.params)
        if deferred:
            problem.model.to("meta")
        opt = mechanize(make(problem.params, lr=1.0))
        if deferred:
            problem.model.to_empty(device="cpu")
            with torch.no_grad():
                for param, weight in zip(problem.params, weights, strict=True):
                    param.copy_(weight)
        train(opt, problem, STEPS)
        return opt, problem.params

    opt, params = run(deferred=True)
    reference, others = run(deferred=False)
    assert_same(bits(params), bits(others))
    assert_same(bits(tuner(opt).scale), bits(tuner(reference).scale))
    assert_moved(opt)
