"""Plain optimizers' checkpoints into mechanized ones, and back."""

import pytest
from bases import assert_moved, train, values
from cases import case
from checkpoints import (
    HALF,
    ROWS,
    base_state,
    by_day,
    each_row,
    everything,
    few_bases,
    from_bytes,
    make,
    plain,
    set_weights,
    to_bytes,
    trained,
)
from comparing import assert_same, bits

from mechanic.torch import mechanize, tuner

SMALL_LR = 1e-3  # one at which all plain bases train


@pytest.mark.parametrize(
    ("row", "used"),
    [
        *(case(row, 8, name=f"{row}-8", by_day=by_day(row)) for row in ROWS),
        *(("AdamW", 0), ("SGD", 0)),
    ],
)
def test_a_plain_checkpoint_into_a_mechanized_optimizer(row, used):
    """Into a new one, and into one that has run."""
    opt, problem = plain(row, SMALL_LR)
    train(opt, problem, 10)
    checkpoint, weights = to_bytes(opt.state_dict()), values(problem.params)

    fresh, other = make(row, SMALL_LR, seed=1)
    if used:
        train(fresh, other, used)
        assert float(tuner(fresh).scale) > 0
        tuner(fresh).freeze()
    fresh.load_state_dict(from_bytes(checkpoint))
    set_weights(other, weights)
    assert_same(bits(fresh.state_dict()["state"]), bits(opt.state_dict()["state"]))
    assert float(tuner(fresh).scale) == 0
    assert all(int(tuner(fresh).metrics()[name]) == 0 for name in ("steps", "skipped"))
    assert not tuner(fresh).frozen

    mechanize(opt)  # which is to start tuning with the base's state, too
    assert_same(everything(fresh), everything(opt))
    train(opt, problem, 20, start=10)
    train(fresh, other, 20, start=10)
    assert_same(everything(fresh), everything(opt))
    assert_moved(fresh, factor=1.1)


@each_row
def test_a_mechanized_checkpoint_into_a_plain_optimizer(row):
    saved = from_bytes(trained(row).checkpoint)
    opt, problem = plain(row, SMALL_LR, seed=1)
    opt.load_state_dict(from_bytes(trained(row).checkpoint))
    set_weights(problem, trained(row).weights)
    assert_same(bits(base_state(opt.state_dict()["state"])), bits(base_state(saved["state"])))

    own_groups = [
        {k: v for k, v in group.items() if k not in ("mechanic", "effective_lr")}
        for group in saved["param_groups"]
    ]
    reference, other = plain(row, SMALL_LR, seed=1)
    reference.load_state_dict({"state": base_state(saved["state"]), "param_groups": own_groups})
    set_weights(other, trained(row).weights)
    for group in opt.param_groups + reference.param_groups:
        group["lr"] *= SMALL_LR
    train(opt, problem, 20, start=HALF)
    train(reference, other, 20, start=HALF)
    assert_same(bits(problem.params), bits(other.params))
    assert bits(problem.params) != bits(trained(row).weights)
    theirs = bits(base_state(reference.state_dict()["state"]))
    assert_same(bits(base_state(opt.state_dict()["state"])), theirs)


@few_bases
def test_mechanizing_a_plain_optimizer_that_has_loaded_a_mechanized_checkpoint(row):
    """`mechanize` after loading instead of before: tuning goes on, or starts anew."""
    opt, problem = plain(row, seed=1)
    opt.load_state_dict(from_bytes(trained(row).checkpoint))
    set_weights(problem, trained(row).weights)
    before = problem.total()
    mechanize(opt)
    train(opt, problem, HALF, start=HALF)
    assert float(tuner(opt).scale) > 0
    assert problem.total() < before
