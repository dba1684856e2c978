"""Checkpoints of something else: an error says what differs, and nothing is loaded."""

from typing import Any

import pytest
import torch
from checkpoints import ROWS, base_state, everything, few_bases
from comparing import assert_same, bits
from torch import Tensor, nn
from torch.optim import Optimizer

from mechanic.torch import mechanize


def _is_refused(opt: Optimizer, saved: dict[str, Any], *what: str) -> None:
    before, content = everything(opt), bits(saved)
    with pytest.raises(ValueError, match="checkpoint") as caught:
        opt.load_state_dict(saved)
    for words in what:
        assert words in str(caught.value)
    assert_same(everything(opt), before)
    assert_same(bits(saved), content)
    assert not opt._optimizer_load_state_dict_pre_hooks


def _used(params: list[nn.Parameter], row: str = "AdamW", **options: Any) -> Optimizer:
    """An optimizer over these parameters, after 20 steps."""
    base, flags = ROWS[row]
    if base.id == "LBFGS":
        flags = {"line_search_fn": "strong_wolfe", "max_iter": 2}
    opt = mechanize(base.factory(params, lr=1.0, **flags), **options)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = sum((param - 3).square().sum() for param in params)
        loss.backward()
        return loss.detach()

    for _ in range(20):
        opt.step(closure)
    return opt


def _params(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full(shape, 0.5)) for shape in shapes]


@pytest.mark.parametrize("row", ["SGD", "AdamW", "AdamW-fused"])
@pytest.mark.parametrize("other", [(4, 3), (3, 5), (12,), (1, 3, 4)], ids=str)
def test_another_shape_is_refused(row, other):
    """In a later parameter: the ones before it would have fitted."""
    saved = _used(_params((2, 2), other), row).state_dict()
    opt = _used(_params((2, 2), (3, 4)), row)
    _is_refused(opt, saved, str(other), "(3, 4)", "another model")


def test_another_shape_is_refused_by_the_name_of_its_parameter():
    def named(shape: tuple[int, ...]) -> Optimizer:
        a, b = _params((2, 2), shape)
        opt = mechanize(torch.optim.AdamW([("encoder.weight", a), ("head.bias", b)], lr=1.0))
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
        opt.step()
        return opt

    _is_refused(named((7,)), named((8,)).state_dict(), "head.bias", "(8,)", "(7,)")


@pytest.mark.parametrize("row", ["SGD-momentum", "AdamW", "Lion"])
def test_another_shape_in_a_plain_checkpoint_is_refused(row):
    base = ROWS[row][0]
    params = _params((2, 2), (4, 3))
    plain = base.factory(params, lr=0.1)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        plain.step()
    opt = _used(_params((2, 2), (3, 4)), row)
    _is_refused(opt, plain.state_dict(), "(4, 3)", "(3, 4)")


@pytest.mark.parametrize("row", ["SGD", "SGD-momentum", "AdamW", "AdamW-fused"])
def test_another_number_of_parameters_or_groups_is_refused(row):
    a, b, c = _params((2, 2), (3,), (3,))
    opt = _used([a, b, c], row)
    _is_refused(opt, _used(_params((2, 2), (3,)), row).state_dict(), "[2]", "[3]")
    base, flags = ROWS[row]

    def grouped(*sizes: int) -> Optimizer:
        params = iter(_params(*[(3,)] * sum(sizes)))
        groups = [{"params": [next(params) for _ in range(size)]} for size in sizes]
        opt = mechanize(base.factory(groups, lr=1.0, **flags))
        for group in groups:
            for param in group["params"]:
                param.grad = torch.ones(3)
        opt.step()
        return opt

    _is_refused(grouped(2, 1), grouped(3).state_dict(), "[3]", "[2, 1]")
    _is_refused(grouped(2, 1), grouped(1, 2).state_dict(), "[1, 2]", "[2, 1]")
    plain = base.factory(_params((3,), (3,)), lr=1.0, **flags)
    _is_refused(grouped(2, 1), plain.state_dict(), "[2]", "[2, 1]")


@few_bases
def test_another_tuner_is_refused(row):
    shapes = ((2, 2), (3,))
    opt = _used(_params(*shapes), row)
    paper = _used(_params(*shapes), row, preset="paper").state_dict()
    _is_refused(opt, paper, "preset", "'paper'", "'default'")
    betas = _used(_params(*shapes), row, betas=(0.5, 0.25)).state_dict()
    _is_refused(opt, betas, "betas", "0.25", "0.99")
    both = _used(_params(*shapes), row, preset="optax", betas=(0.5,)).state_dict()
    _is_refused(opt, both, "preset", "'optax'", "betas", "0.5")
    opt.load_state_dict(_used(_params(*shapes), row).state_dict())


@pytest.mark.parametrize(
    ("saved", "loads"), [("AdamW", "SGD"), ("SGD", "AdamW"), ("Lion", "AdamW")]
)
def test_another_optimizer_is_refused(saved, loads):
    """Whose every step would fail."""
    theirs = _used(_params((2, 2)), saved).state_dict()
    _is_refused(_used(_params((2, 2)), loads), theirs, "lack")


@pytest.mark.parametrize("entry", ["step", "exp_avg", "exp_avg_sq"])
def test_a_state_of_adam_in_part_is_refused(entry):
    saved = _used(_params((2, 2), (3,))).state_dict()
    del saved["state"][1][entry]
    _is_refused(_used(_params((2, 2), (3,))), saved, "parameter 1 lacks", entry)


def test_settings_that_a_new_version_has_added_may_be_missing():
    saved = _used(_params((2, 2))).state_dict()
    for key in ("fused", "foreach", "capturable", "maximize", "differentiable"):
        del saved["param_groups"][0][key]
    opt = _used(_params((2, 2)))
    opt.load_state_dict(saved)
    opt.step()


@pytest.mark.parametrize("key", ["share", "top", "size", "steps", "frozen", "preset"])
def test_a_tuner_that_is_incomplete_is_refused(key):
    """As another version of this library may have written it."""
    saved = _used(_params((2, 2), (3,))).state_dict()
    for group in saved["param_groups"]:
        group["mechanic"] = {k: v for k, v in group["mechanic"].items() if k != key}
    _is_refused(_used(_params((2, 2), (3,))), saved, key)


def test_a_checkpoint_that_has_lost_its_displacements_is_refused():
    """The tuner's scale would be applied to nothing."""
    saved = _used(_params((2, 2), (3,))).state_dict()
    saved["state"] = base_state(saved["state"])
    _is_refused(_used(_params((2, 2), (3,))), saved, "displacement")
