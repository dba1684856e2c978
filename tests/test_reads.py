"""No host synchronisation: what a step reads from its tensors."""

from collections import Counter
from typing import Any

import pytest
import torch
from bases import (
    BASES,
    FEW,
    KINDS,
    PRESETS,
    READS,
    Base,
    Problem,
    assert_moved,
    counted,
    few_bases,
    make_problem,
)
from cases import case
from comparing import two_groups
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch import mechanize, tuner


def test_reads_are_counted() -> None:
    one = torch.ones(())
    with counted() as reads:
        one.item(), bool(one), one.cpu(), one.tolist(), float(one), int(one), one + one
    assert {name: reads[name] for name in READS[:6]} == dict.fromkeys(READS[:6], 1)
    assert reads["host"] >= 4
    assert Tensor.item is torch._C.TensorBase.item
    with counted() as reads:
        torch.ones(3).add_(one, alpha=1).mul_(one)
    assert reads["host"] == 0
    with counted() as reads:
        torch.ones(3).add_(one, alpha=one)  # torch fetches it by itself
    assert reads["host"] == 1


def reads_of_steps(opt: Optimizer, problem: Problem, steps: int) -> list[Counter[str]]:
    found = []
    for step in range(steps):
        problem.backward(step)
        if problem.closure_only:
            with counted() as reads:
                opt.step(problem.closure(step))
        else:
            with counted() as reads:
                opt.step()
        found.append(+reads)
    return found


@pytest.mark.parametrize(("base", "fused", "preset"), [p for p in PRESETS if p.values[1]])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
def test_a_fused_step_reads_nothing(base: Base, fused: bool, preset: Any, as_tensor: bool) -> None:
    """From the first one on, and with the check for non-finite gradients."""
    problem, other = make_problem(), make_problem()
    lr = torch.tensor(1.0) if as_tensor else 1.0
    opt = mechanize(base.factory(problem.params, lr=lr, fused=True), preset=preset, s_init=1e-5)
    own = reads_of_steps(base.factory(other.params, lr=lr, fused=True), other, 1)
    if base.id == "Adagrad" and own != [Counter()]:
        pytest.skip("this torch's own step reads a tensor lr")
    assert own == [Counter()]
    assert reads_of_steps(opt, problem, 25) == [Counter()] * 25
    assert_moved(opt)


@pytest.mark.parametrize(
    ("base", "check"),
    [
        case(
            base, check, name=f"{check}-{base}", by_day=base in FEW or (check and base.id in KINDS)
        )
        for base in BASES
        for check in (True, False)
    ],
)
def test_another_step_reads_one_bool_at_most(base: Base, check: bool) -> None:
    """Beside what the base reads by itself."""
    one, two = make_problem(base), make_problem(base)
    steps = 1 if base.needs_closure else 12  # then its evaluations depend on where it is
    plain = reads_of_steps(base.factory(one.params, lr=1e-3), one, steps)
    opt = mechanize(base.factory(two.params, lr=1e-3), skip_nonfinite=check)
    for own, reads in zip(plain, reads_of_steps(opt, two, steps), strict=True):
        # one for each evaluation of a closure
        count = opt.state[two.params[0]]["func_evals"] if base.needs_closure else 1
        assert reads - own == (Counter({"__bool__": count, "host": count}) if check else Counter())
    if not base.needs_closure:
        assert_moved(opt)


@few_bases
def test_no_read_on_a_schedule_with_groups_frozen_or_at_0(base: Base) -> None:
    problem = make_problem()
    opt = mechanize(base.factory(two_groups(problem, 1.0, 0.5)), skip_nonfinite=False)
    own = base.factory(two_groups(make_problem(), 1.0, 0.5))
    for step in range(24):
        problem.backward(step)
        opt.param_groups[1]["lr"] = own.param_groups[1]["lr"] = 0.0 if step % 5 == 0 else 0.5
        tuner(opt).freeze() if step % 7 == 6 else tuner(opt).unfreeze()
        with counted() as reads:
            opt.step()
        ours = +reads
        for group, other in zip(opt.param_groups, own.param_groups, strict=True):
            for p, q in zip(group["params"], other["params"], strict=True):
                q.grad = p.grad
        with counted() as reads:
            own.step()
        assert ours - reads == Counter()
    assert_moved(opt)
