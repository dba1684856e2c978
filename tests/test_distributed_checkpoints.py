"""`torch.distributed.checkpoint`, in a single process."""

import copy
import math
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from bases import (
    BY_ID,
    FEW,
    KINDS,
    Base,
    assert_equal,
    assert_moved,
    make_problem,
    plain_bases,
    train,
    values,
)
from cases import case
from checkpoints import (
    HALF,
    ROWS,
    assert_ends_the_same,
    by_day,
    everything,
    in_two_groups,
    make,
    resumed,
    set_weights,
    trained,
)
from comparing import assert_same, bad_step, bits, skipped, tuner_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from mechanic.torch import mechanize, tuner

FRESH = [
    case(
        base, flatten, name=f"{base.id}-{'flat' if flatten else 'nested'}", by_day=base.id in KINDS
    )
    for base in plain_bases
    for flatten in (False, True)
    if base.id != "AdamW8bit" and (base in FEW or not flatten)
]


@pytest.mark.parametrize(("base", "flatten"), FRESH)
def test_distributed_checkpointing_of_a_fresh_optimizer_leaves_no_trace(
    base: Base, flatten: bool
) -> None:
    """It makes the state with a step of zero gradients at lr 0. The tuner takes no part in it."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    one, two = make_problem(base), make_problem(base)
    untouched = base.factory(one.params, lr=1.0)
    get_optimizer_state_dict(one.model, untouched)  # the base's own step counts are 1 then
    mechanize(untouched)
    opt = mechanize(base.factory(two.params, lr=1.0))
    weights, known = values(two.params), tuner_of(opt)
    saved = get_optimizer_state_dict(two.model, opt, options=options)
    assert_equal(two.params, weights)
    assert_equal(tuner_of(opt), known)
    assert opt.param_groups[0]["lr"] == 1.0
    set_optimizer_state_dict(two.model, opt, saved, options=options)
    assert_equal(tuner_of(opt), known)
    assert train(untouched, one, 25) == train(opt, two, 25)
    assert_equal(one.params, two.params)
    assert_equal(tuner_of(untouched), tuner_of(opt))
    assert_moved(opt)


@pytest.mark.parametrize(
    ("name", "flatten"),
    [
        case(name, flatten, name=f"{name}-{flatten}", by_day=name == "AdamW" or i % 2 == flatten)
        for i, name in enumerate(["SGD", "SGD-momentum", "Adam", "AdamW", "Lion", "RMSprop"])
        for flatten in (False, True)
    ],
)
def test_distributed_checkpointing_resumes(name: str, flatten: bool) -> None:
    base, options = BY_ID[name], StateDictOptions(flatten_optimizer_state_dict=flatten)
    one, two = make_problem(base), make_problem(base)
    opt = mechanize(base.factory(one.params, lr=1.0))
    train(opt, one, 15)
    saved = copy.deepcopy(get_optimizer_state_dict(one.model, opt, options=options))
    two.model.load_state_dict(one.model.state_dict())
    resumed = mechanize(base.factory(two.params, lr=1.0))
    set_optimizer_state_dict(two.model, resumed, saved, options=options)
    assert train(opt, one, 15, start=15) == train(resumed, two, 15, start=15)
    assert_equal(one.params, two.params)
    assert_equal(tuner_of(opt), tuner_of(resumed))
    assert_moved(opt)


# It cannot hold LBFGS' lists, and makes SparseAdam's state with dense gradients: with the plain
# optimizers just so.
DCP_ROWS = [row for row in ROWS if row not in ("LBFGS", "SparseAdam")]
alone = pytest.mark.filterwarnings("ignore:.*assuming the intent is to:UserWarning")


def _through_a_folder(
    save: tuple[nn.Module, Optimizer], load: tuple[nn.Module, Optimizer], folder: Path, flat: bool
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = get_optimizer_state_dict(*save, options=options)
    dcp.save({"optimizer": saved}, checkpoint_id=folder)
    loaded = {"optimizer": get_optimizer_state_dict(*load, options=options)}
    dcp.load(loaded, checkpoint_id=folder)
    set_optimizer_state_dict(*load, loaded["optimizer"], options=options)


@alone
@pytest.mark.parametrize(
    ("row", "flat"),
    [
        *(case(row, True, name=f"{row}-True", by_day=by_day(row)) for row in DCP_ROWS),
        *(("AdamW", False), ("SGD", False), ("Lion", False)),
    ],
)
def test_distributed_checkpoint(row, flat, tmp_path):
    opt, problem = resumed(row)
    fresh, other = make(row, seed=1)
    # Torch makes no state for a plain Schedule-Free optimizer either, nor where there is some, as
    # Adagrad's from the beginning: then it has no place for the displacement before a step.
    if ROWS[row][0].modes or row.startswith("Adagrad"):
        train(fresh, other, 1)
    _through_a_folder((problem.model, opt), (other.model, fresh), tmp_path, flat)
    set_weights(other, trained(row).weights)
    assert_ends_the_same(fresh, other, row)


@alone
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("frozen", [False, True])
def test_distributed_checkpoint_with_groups(flat, frozen, tmp_path):
    opt, problem = in_two_groups(0, late=True)
    train(opt, problem, 15, start=10)
    assert_moved(opt)
    bad_step(opt, problem, math.nan)
    train(opt, problem, 1, start=HALF)
    if frozen:
        tuner(opt).freeze()
    fresh, other = in_two_groups(1)
    train(fresh, other, 5)
    _through_a_folder((problem.model, opt), (other.model, fresh), tmp_path, flat)
    set_weights(other, values(problem.params))
    train(opt, problem, 20)
    train(fresh, other, 20)
    assert_same(everything(fresh), everything(opt))
    assert tuner(fresh).frozen is frozen
    assert skipped(fresh) == 1


@alone
def test_making_state_for_a_distributed_checkpoint_changes_nothing():
    """torch makes it with a step of zero gradients at lr 0."""
    fresh, other = make("AdamW")
    before = bits(other.params)
    get_optimizer_state_dict(other.model, fresh)
    assert_same(bits(other.params), before)
    assert float(tuner(fresh).scale) == 0
    train(fresh, other, HALF)
    opt, problem = make("AdamW")
    train(opt, problem, HALF)
    assert_moved(fresh)
    assert float(tuner(fresh).scale) == pytest.approx(float(tuner(opt).scale), rel=0.5)
