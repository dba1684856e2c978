"""Copies by deepcopy, by pickle and in other processes go on bit for bit."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from bases import Problem, train
from cases import case
from checkpoints import (
    HALF,
    ROWS,
    SPAWNED,
    assert_ends_the_same,
    by_day,
    each_base,
    each_row,
    everything,
    make,
    resumed,
    trained,
)
from comparing import assert_same
from running import PATH
from torch.optim import Optimizer

from mechanic.torch import mechanize, tuner

# torchao's quantized state cannot be cloned, in its own optimizer either.
each_copied_row = pytest.mark.parametrize(
    "row", [case(row, name=row, by_day=by_day(row)) for row in ROWS if row != "AdamW8bit"]
)


@each_base
@pytest.mark.parametrize("options", [{}, {"preset": "paper", "betas": [0.9], "max_scale": 3}])
def test_a_class_pickles_as_itself(row, options):
    cls = mechanize(ROWS[row][0].cls, **options)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(cls, protocol)) is cls
    assert copy.deepcopy(cls) is cls
    assert mechanize(ROWS[row][0].cls, **options) is cls
    assert mechanize(ROWS[row][0].cls, betas=(0.5, 0.9)) is not cls


@each_row
def test_an_instance_pickles(row):
    opt, problem = resumed(row)
    twin_opt, twin = pickle.loads(pickle.dumps((opt, problem)))
    assert type(twin_opt) is type(opt)
    assert_same(everything(twin_opt), everything(opt))
    before = everything(opt)
    assert_ends_the_same(twin_opt, twin, row)
    assert_same(everything(opt), before)


@each_copied_row
def test_deepcopy(row):
    opt, problem = resumed(row)
    twin_opt, twin = copy.deepcopy((opt, problem))
    assert type(twin_opt) is type(opt)
    assert_same(everything(twin_opt), everything(opt))
    before = everything(opt)
    assert_ends_the_same(twin_opt, twin, row)
    assert_same(everything(opt), before)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_has_its_own_options_and_flags(copier):
    opt, problem = make("AdamW", max_scale=2e-3, betas=(0.9, 0.99))
    train(opt, problem, HALF)
    assert float(tuner(opt).scale) == pytest.approx(2e-3)
    tuner(opt).freeze()
    twin_opt, twin = copier((opt, problem))
    assert tuner(twin_opt).frozen
    tuner(twin_opt).unfreeze()
    train(twin_opt, twin, 5)
    assert float(tuner(twin_opt).scale) <= 2e-3 * (1 + 1e-12)
    assert tuner(opt).frozen
    with pytest.raises(ValueError, match="mechanized already"):
        mechanize(twin_opt)


def go_on_in_another_process(
    runs: dict[str, tuple[Optimizer, Problem]],
) -> dict[str, dict[str, Any]]:
    for opt, problem in runs.values():
        train(opt, problem, HALF, start=HALF)
    return {row: everything(opt) for row, (opt, _) in runs.items()}


@pytest.mark.nightly
def test_a_spawned_process(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PATH)
    runs = {row: resumed(row) for row in SPAWNED}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        ends = pool.submit(go_on_in_another_process, runs).result(timeout=120)
    assert_same(ends, {row: trained(row).end for row in SPAWNED})
