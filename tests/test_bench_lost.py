"""Which runs are lost: one definition, and nothing that hides them."""

import math
from dataclasses import replace

import pytest
from bench_runs import SWEEP, free, only, only_result, only_row, ours, run, swept

from mechanic.bench.record import Run
from mechanic.bench.score import find_lost, summarize
from mechanic.bench.sweep import find_best

TWENTY_PERCENT = 0.4  # the best of SWEEP is 0.25, at a start of 1


def causes(losses: list[float | None], runs: list[Run] = SWEEP) -> dict[int, str]:
    """Why runs of Mechanic with these losses are lost, by seed."""
    result = only_result([*runs, *ours(losses)])
    return {lost.run.seed: lost.cause for lost in result.lost}


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, -math.inf])
def test_a_run_that_is_not_finite_is_lost(loss: float | None) -> None:
    assert causes([0.25, loss]) == {1: "diverged"}


def test_a_run_that_failed_is_lost_and_says_so() -> None:
    broken = run(
        None, seed=1, status="failed", method="mechanic", kind="mechanic", base="sgd", lr=1.0
    )
    (lost,) = only_result([*SWEEP, *ours([0.25]), broken]).lost
    assert (lost.run.seed, lost.cause) == (1, "failed")


def test_a_run_that_ends_above_its_start_is_lost() -> None:
    assert causes([0.25, 1.01]) == {1: "above the start"}
    assert causes([1.0, 0.25]) == {0: "excess +100.0 %"}  # at the start, not above it


def test_the_start_of_a_run_is_its_own() -> None:
    high = [replace(one, start_loss=1.2) for one in ours([0.25, 1.1])]
    assert [lost.cause for lost in only_result([*SWEEP, *high]).lost] == ["excess +113.3 %"]


def test_a_run_with_an_excess_over_a_fifth_is_lost() -> None:
    assert causes([TWENTY_PERCENT - 0.001, 0.1, 0.0]) == {}
    assert causes([TWENTY_PERCENT + 0.003]) == {0: "excess +20.4 %"}


def test_a_lost_run_is_not_hidden_by_the_mean() -> None:
    """Nine seeds that are better than the sweep, and one that is lost: the mean says 0."""
    sweep = swept({0.01: [0.6] * 10, 0.1: [0.25] * 10, 1.0: [0.5] * 10})
    runs = [*sweep, *ours([0.2] * 9 + [0.7])]
    result = only_result(runs)
    assert result.counted == pytest.approx(0.0, abs=1e-9)
    assert not result.trouble
    assert [lost.run.seed for lost in result.lost] == [9]
    (summary,) = summarize(only(runs))
    assert (summary.lost, summary.runs) == (1, 10)


def test_the_luck_of_the_sweep_with_a_seed_does_not_decide_who_is_lost() -> None:
    sweep = swept({0.01: [0.9] * 2, 0.1: [0.0, 0.5], 1.0: [0.9] * 2})  # a mean of 0.25
    assert causes([0.3, 0.3], sweep) == {}  # 30 % above the sweep's own seed 0
    assert causes([0.25, 0.55], sweep) == {1: "excess +40.0 %"}  # 5 % above its seed 1


def test_without_a_sweep_two_causes_remain() -> None:
    assert causes([0.99, 1.5, None], []) == {1: "above the start", 2: "diverged"}
    useless = swept({0.1: [1.0, 1.2]})
    assert causes([0.99, 1.5, None], useless) == {1: "above the start", 2: "diverged"}


def test_a_start_that_is_not_known_is_no_cause() -> None:
    unknown = [replace(one, start_loss=math.nan) for one in ours([0.25, 9.0])]
    result = only_result([*SWEEP, *unknown])
    assert [(lost.run.seed, lost.cause) for lost in result.lost] == [(1, "excess +1166.7 %")]


def test_the_best_of_a_sweep_may_lose_runs_too() -> None:
    row = only_row(swept({0.1: [0.1, 0.1, 0.1, 0.7], 1.0: [0.5] * 4}))
    assert [(lost.run.seed, lost.cause) for lost in row.lost_by_sweep] == [(3, "excess +60.0 %")]
    assert only_row(ours([0.1])).lost_by_sweep == []


def test_lost_runs_are_counted_on_each_row_and_those_without_a_sweep() -> None:
    adamw = swept({0.1: [0.05, 0.05]}, base="adamw", method="adamw")
    runs = [*SWEEP, *adamw, *free("dog", [0.3, 0.41]), *free("dog", [2.0, 0.5], task="unswept")]
    comparison = only(runs)
    (summary,) = summarize(comparison)
    found = {
        (row.task, row.base): [lost.run.seed for lost in result.lost]
        for row in comparison.rows
        for result in row.results
    }
    assert found == {("task", "adamw"): [0, 1], ("task", "sgd"): [1], ("unswept", ""): [0]}
    assert (summary.lost, summary.runs, summary.rows) == (4, 6, 2)


def test_lost_runs_can_be_found_without_a_comparison() -> None:
    by_lr = {lr: tuple(one for one in SWEEP if one.lr == lr) for lr in (0.01, 0.1, 1.0)}
    lost = find_lost(ours([0.2, 0.9]), find_best(by_lr))
    assert [(one.run.seed, one.cause) for one in lost] == [(1, "excess +86.7 %")]
