"""What a state dict holds, and what hooks may make of it."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from bases import assert_moved, train
from checkpoints import (
    HALF,
    assert_ends_the_same,
    each_row,
    everything,
    few_bases,
    from_bytes,
    make,
    resumed,
    set_weights,
    to_bytes,
    trained,
)
from comparing import DISPLACEMENT, assert_same, bits, skipped
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch import tuner


def _leaves(value: Any, *path: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if type(value) in (dict, list, tuple):
        pairs = value.items() if type(value) is dict else enumerate(value)
        for key, own in pairs:
            yield from _leaves(own, *path, key)
    else:
        yield path, value


@each_row
def test_a_state_dict_holds_plain_things_only(row):
    opt, _ = resumed(row)
    for path, value in _leaves(opt.state_dict()):
        own_type = row == "AdamW8bit" and path[-1] in ("exp_avg", "exp_avg_sq")
        plain_type = type(value) in (Tensor, int, float, str, bool, type(None))
        assert plain_type or own_type, f"{path} is a {type(value)}"
        if isinstance(value, Tensor):
            assert not value.requires_grad
            assert "mechanic" not in path


@few_bases
def test_loading_copies(row):
    """Training on does not reach back into the dict that was loaded: not into its groups, not
    into the displacements. (torch itself shares the base's state with it.)"""
    opt, problem = make(row)
    loaded = from_bytes(trained(row).checkpoint)
    opt.load_state_dict(loaded)
    set_weights(problem, trained(row).weights)

    def own_part() -> Any:
        stored = {k: s.get(DISPLACEMENT) for k, s in loaded["state"].items()}
        assert any(value is not None for value in stored.values())
        return bits([stored, loaded["param_groups"]])

    before = own_part()
    train(opt, problem, 20, start=HALF)
    tuner(opt).freeze()
    opt.state_dict()
    assert own_part() == before

    for state in loaded["state"].values():
        if DISPLACEMENT in state:
            state[DISPLACEMENT].fill_(math.nan)
    for group in loaded["param_groups"]:
        group["mechanic"].clear()
    train(opt, problem, 5, start=HALF + 20)
    assert skipped(opt) == 0


def test_hooks_on_saving_and_loading_may_change_the_dict():
    """A user's format: the tuner and the displacements under keys of its own."""
    calls = []

    def before_saving(opt: Optimizer) -> None:
        calls.append("before saving")
        opt.param_groups[0]["note"] = "saved"

    def pack(opt: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        calls.append("pack")
        assert saved["param_groups"][0]["note"] == "saved"
        groups = [dict(group) for group in saved["param_groups"]]
        tuners = [group.pop("mechanic") for group in groups]
        state = {key: dict(own) for key, own in saved["state"].items()}
        moved = {key: own.pop(DISPLACEMENT) for key, own in state.items()}
        return {"state": state, "param_groups": groups, "moved": moved, "tuners": tuners}

    def unpack(opt: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        calls.append("unpack")
        state = {k: {**own, DISPLACEMENT: saved["moved"][k]} for k, own in saved["state"].items()}
        pairs = zip(saved["param_groups"], saved["tuners"], strict=True)
        return {"state": state, "param_groups": [{**g, "mechanic": t} for g, t in pairs]}

    def after_loading(opt: Optimizer) -> None:
        calls.append("after loading")
        scales.append(bits(tuner(opt).scale))
        assert all(DISPLACEMENT in opt.state[param] for param in opt.param_groups[0]["params"])

    scales: list[Any] = []
    run = trained("AdamW")
    opt, _ = resumed("AdamW")
    opt.register_state_dict_pre_hook(before_saving)
    opt.register_state_dict_post_hook(pack)
    packed = to_bytes(opt.state_dict())
    assert "moved" in from_bytes(packed)
    assert DISPLACEMENT not in from_bytes(packed)["state"][0]

    fresh, other = make("AdamW", seed=1)
    fresh.register_load_state_dict_pre_hook(unpack)
    fresh.register_load_state_dict_post_hook(after_loading)
    fresh.load_state_dict(from_bytes(packed))
    assert calls == ["before saving", "pack", "unpack", "after loading"]
    assert scales == [bits(tuner(opt).scale)]
    assert fresh.param_groups[0].pop("note") == "saved"
    set_weights(other, run.weights)
    assert_ends_the_same(fresh, other, "AdamW")


def test_a_hook_before_saving_may_freeze_the_tuner():
    opt, _ = resumed("AdamW")
    opt.register_state_dict_pre_hook(lambda opt: tuner(opt).freeze())
    fresh, _ = make("AdamW")
    fresh.load_state_dict(from_bytes(to_bytes(opt.state_dict())))
    assert tuner(fresh).frozen


def test_a_hook_on_loading_may_drop_the_tuner():
    """What is then loaded is a plain optimizer's checkpoint: the tuner starts anew."""

    def drop(opt: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        groups = [{k: v for k, v in g.items() if k != "mechanic"} for g in saved["param_groups"]]
        return {**saved, "param_groups": groups}

    opt, problem = make("AdamW")
    opt.register_load_state_dict_pre_hook(drop)
    opt.load_state_dict(from_bytes(trained("AdamW").checkpoint))
    assert float(tuner(opt).scale) == 0
    train(opt, problem, HALF)
    assert_moved(opt)


def test_a_hook_that_fails_leaves_nothing_behind():
    def fail(*_: Any) -> None:
        raise RuntimeError("not today")

    opt, problem = make("AdamW")
    handle = opt.register_load_state_dict_pre_hook(fail)
    before = everything(opt)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not today"):
            opt.load_state_dict(from_bytes(trained("AdamW").checkpoint))
    assert_same(everything(opt), before)
    handle.remove()
    assert not opt._optimizer_load_state_dict_pre_hooks
    assert not opt._optimizer_load_state_dict_post_hooks
    opt.load_state_dict(from_bytes(trained("AdamW").checkpoint))
    set_weights(problem, trained("AdamW").weights)
    assert_ends_the_same(opt, problem, "AdamW")


@few_bases
def test_a_state_dict_that_is_kept_does_not_change_with_later_steps(row):
    opt, problem = make(row)
    train(opt, problem, HALF)
    kept = opt.state_dict()
    rates = [float(group["effective_lr"]) for group in kept["param_groups"]]
    train(opt, problem, 10)
    assert [float(group["effective_lr"]) for group in kept["param_groups"]] == rates
    now = [float(group["effective_lr"]) for group in opt.param_groups]
    assert now != rates
    opt.load_state_dict(kept)
    assert [float(group["effective_lr"]) for group in opt.param_groups] == rates
