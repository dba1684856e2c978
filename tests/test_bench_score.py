import math
import random
from dataclasses import replace

import pytest
from bench_runs import SWEEP, everything, free, only, only_result, only_row, ours, run, swept
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from mechanic.bench.noise import paired, t_quantile
from mechanic.bench.record import Curve, Run
from mechanic.bench.score import (
    ScoredMethod,
    compare,
    duels,
    format_lr,
    highest_rate,
    ranks,
    summarize,
)
from mechanic.bench.sweep import best_by_metric


def test_excess_by_hand() -> None:
    row = only_row([*SWEEP, *ours([0.3, 0.4])])
    assert row.sweep is not None
    assert row.sweep.best_lr == 0.1
    assert not row.sweep.edge
    (result,) = row.results
    assert result.excess is not None
    assert result.excess.mean == pytest.approx(100 * (0.35 - 0.25) / (1 - 0.25))
    assert result.counted == result.excess.mean
    assert result.excess.noise == pytest.approx(0.0, abs=1e-9)  # the seeds agree on the gap
    assert result.excess.within_noise is False


def test_better_than_the_sweep_is_below_zero() -> None:
    assert only_result([*SWEEP, *ours([0.1, 0.2])]).counted == pytest.approx(-100 * 0.1 / 0.75)


@pytest.mark.parametrize(
    ("losses", "edge"),
    [
        ({0.1: [0.2], 1.0: [0.3], 10.0: [0.4]}, "lowest"),
        ({0.1: [0.4], 1.0: [0.3], 10.0: [0.2]}, "highest"),
        ({0.1: [0.4], 1.0: [0.3], 10.0: [None]}, ""),  # divergence bounds the grid
        ({0.1: [0.4]}, "only"),
    ],
)
def test_edge_of_the_grid(losses: dict[float, list[float | None]], edge: str) -> None:
    sweep = only_row(swept(losses)).sweep
    assert sweep is not None
    assert sweep.edge == edge


def test_an_lr_whose_seeds_have_not_all_run_is_not_best_yet() -> None:
    row = only_row(swept({0.1: [0.2, 0.3], 1.0: [0.1]}))
    assert row.sweep is not None
    assert row.sweep.best_lr == 0.1


@pytest.mark.parametrize("status", ["diverged", "failed"])
def test_an_lr_with_a_lost_seed_is_never_best(status: str) -> None:
    lucky = swept({10.0: [0.001, 0.001]})
    broken = run(None, lr=10.0, seed=2, status=status)
    sweep = only_row([*SWEEP, *lucky, broken]).sweep
    assert sweep is not None
    assert sweep.best_lr == 0.1


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_run_that_claims_to_be_done_with_no_loss_is_not_believed(loss: float) -> None:
    sweep = only_row([*SWEEP, *swept({10.0: [loss, 0.01]})]).sweep
    assert sweep is not None
    assert sweep.best_lr == 0.1
    result = only_result([*SWEEP, *ours([loss, 0.01])])
    assert result.trouble == "diverged 1/2"
    assert result.counted == 100


def test_a_lost_seed_counts_as_no_learning_and_ranks_last() -> None:
    runs = [*SWEEP, *ours([0.01, None]), *free("dog", [1.0, 1.0]), *free("prodigy", [0.2, 0.2])]
    row = only_row(runs)
    result = row.result(ScoredMethod("mechanic", "mechanic"))
    assert result is not None
    assert (result.trouble, result.excess, result.counted) == ("diverged 1/2", None, 100)
    by_name = {method.name: rank for method, rank in ranks(row).items()}
    assert by_name == {"prodigy": 1, "dog": 2, "mechanic": 3}


def test_failures_and_divergence_are_told_apart() -> None:
    runs = [*ours([None, 0.1, 0.1]), run(None, seed=3, status="failed", **_ours_fields())]
    assert only_result([*SWEEP, *runs]).trouble == "diverged 1/4, failed 1/4"


def _ours_fields() -> dict[str, object]:
    return {"method": "mechanic", "kind": "mechanic", "base": "sgd", "lr": 1.0}


def test_above_the_start_counts_as_no_learning() -> None:
    result = only_result([*SWEEP, *ours([5.0, 7.0])])
    assert (result.trouble, result.counted) == ("above start", 100)


def test_without_a_whole_lr_the_row_is_left_out_and_says_why() -> None:
    comparison = only([*swept({0.1: [0.1, None], 1.0: [None, 0.1]}), *ours([0.1, 0.1])])
    assert comparison.scored == []
    assert "every learning rate" in comparison.rows[0].left_out
    assert summarize(comparison) == []


def test_a_sweep_that_learned_nothing_is_left_out() -> None:
    comparison = only([*swept({0.1: [1.0, 1.2]}), *ours([0.5, 0.5])])
    assert comparison.scored == []
    assert "learned" in comparison.rows[0].left_out


def test_without_a_sweep_there_is_nothing_to_compare_with() -> None:
    comparison = only(ours([0.1, 0.1]))
    assert [row.task for row in comparison.unswept] == ["task"]
    assert comparison.scored == []
    assert math.isnan(comparison.rows[0].results[0].counted)


def test_peers_without_a_base_count_for_all_bases_and_others_for_their_own() -> None:
    adamw = swept({0.1: [0.3, 0.3]}, base="adamw", method="adamw")
    runs = [*SWEEP, *adamw, *free("dog", [0.3, 0.4]), *free("dadaptation", [0.3, 0.3], base="sgd")]
    names = {row.base: [r.method.name for r in row.results] for row in only(runs).rows}
    assert names == {"adamw": ["dog"], "sgd": ["dadaptation", "dog"]}


def test_pairing_takes_out_what_the_seeds_share() -> None:
    hard = [0.2, 0.9, 0.5]  # seeds differ much more than methods do
    sweep = swept({0.01: [0.95] * 3, 0.1: hard, 1.0: [0.95] * 3})
    steady = only_result([*sweep, *ours([loss + 0.01 for loss in hard])])
    assert steady.excess is not None
    assert steady.excess.within_noise is False
    shuffled = only_result([*sweep, *ours([0.51, 0.21, 0.91])])
    assert shuffled.excess is not None
    assert shuffled.excess.mean == pytest.approx(steady.excess.mean)
    assert shuffled.excess.within_noise is True


def test_noise_by_hand() -> None:
    gap = paired({0: 1.0, 1: 2.0, 2: 6.0, 9: 50.0}, {0: 0.0, 1: 0.0, 2: 0.0, 8: -50.0})
    assert gap is not None
    assert (gap.mean, gap.seeds) == (3.0, 3)
    assert gap.noise == pytest.approx(4.3027 * math.sqrt(7.0) / math.sqrt(3), rel=1e-4)
    assert gap.within_noise is True


def test_one_seed_says_nothing() -> None:
    result = only_result([*swept({0.01: [0.9], 0.1: [0.2], 1.0: [0.9]}), *ours([0.3])])
    assert result.excess is not None
    assert result.excess.within_noise is None
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_equal_runs_are_within_noise() -> None:
    result = only_result([*SWEEP, *ours([0.2, 0.3])])
    assert result.excess is not None
    assert (result.excess.mean, result.excess.within_noise) == (0, True)


@pytest.mark.parametrize("freedom", [1, 2, 5, 10, 11, 15, 30, 200])
def test_quantiles_are_students(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(student.ppf(0.975, freedom), rel=1e-3)


def test_duels_count_each_kind() -> None:
    runs: list[Run] = []
    for task, mine, theirs in (
        ("better", [0.30, 0.31], [0.40, 0.412]),
        ("better too", [0.30, 0.31], [0.50, 0.512]),
        ("worse", [0.40, 0.412], [0.30, 0.31]),
        ("noise", [0.30, 0.50], [0.50, 0.30]),
        ("they diverge", [0.9, 0.9], [0.1, None]),
        ("we diverge", [None, 0.1], [0.9, 0.9]),
        ("both diverge", [None, 0.1], [0.1, None]),
    ):
        runs += [replace(r, task=task) for r in (*SWEEP, *ours(mine), *free("dog", theirs))]
    (duel,) = duels(only(runs))
    assert (duel.better, duel.worse, duel.within_noise, duel.undecided) == (3, 2, 1, 1)


def test_summary_over_rows_that_were_run() -> None:
    runs = [replace(r, task=task) for task in ("a", "b") for r in (*SWEEP, *ours([0.4, 0.4]))]
    runs += [replace(r, task="a") for r in free("dog", [0.25, 0.25])]
    mine, dog = sorted(summarize(only(runs)), key=lambda s: s.method.name, reverse=True)
    assert (mine.rows, mine.rank) == (2, 1.5)  # second on a, alone on b
    assert (dog.rows, dog.rank) == (1, 1.0)
    assert [s.method.name for s in summarize(only(runs))] == ["mechanic", "dog"]  # the whole first
    assert mine.mean == mine.worst == pytest.approx(100 * 0.15 / 0.75)


def test_suites_are_summed_up_apart() -> None:
    """Of start 1 and best 0: the excess in percent is the loss."""
    runs = []
    for suite, losses in (("big", (0.1, 0.3)), ("small", (0.5,))):
        for number, loss in enumerate(losses):
            at = {"suite": suite, "task": f"task {number}"}
            runs += [*swept({0.1: [0.0, 0.0]}, **at), *ours([loss, loss], **at)]
    (line,) = summarize(only(runs))
    assert line.by_suite == pytest.approx({"big": 20.0, "small": 50.0})
    assert line.mean == pytest.approx(30.0)
    assert only(runs).suites == ["big", "small"]


def test_equals_share_a_rank() -> None:
    row = only_row([*SWEEP, *free("a", [0.3, 0.3]), *free("b", [0.3, 0.3]), *free("c", [0.9, 0.9])])
    assert sorted(ranks(row).values()) == [1.5, 1.5, 3]


def test_several_typed_lrs_are_methods_of_their_own() -> None:
    runs = [r for lr in (1e-4, 1.0, 1e4) for r in ours([0.3, 0.3], lr=lr)]
    comparison = only([*SWEEP, *runs, *free("dog", [0.3, 0.3])])
    labels = [method.label for method in comparison.methods]
    assert labels == ["mechanic (lr 1)", "mechanic (lr 1e-4)", "mechanic (lr 1e4)", "dog"]
    assert comparison.default == comparison.methods[0]


def test_a_typed_lr_that_differs_by_task_does_not_split_a_method() -> None:
    runs = [*free("dog", [0.3], lr=1.0, task="a"), *free("dog", [0.3], lr=2.0, task="b")]
    assert [method.label for method in only(runs).methods] == ["dog"]


def test_budgets_are_not_mixed() -> None:
    other = [replace(r, budget="full", start_loss=9.0) for r in (*SWEEP, *ours([0.2, 0.2]))]
    small, full = compare([*other, *SWEEP, *ours([0.4, 0.4])])
    assert (small.budget, full.budget) == ("short", "full")
    assert small.rows[0].start == 1.0
    assert full.rows[0].start == 9.0


def test_of_equal_runs_the_last_counts() -> None:
    result = only_result([*SWEEP, *ours([None, 0.3]), *ours([0.3, 0.3])])
    assert not result.trouble
    assert len(result.runs) == 2


def test_methods_with_other_seeds_are_compared_over_those_in_common() -> None:
    more = run(0.9, seed=7, **_ours_fields())
    result = only_result([*SWEEP, *ours([0.3, 0.4]), more])
    assert result.excess is not None
    assert (result.excess.seeds, len(result.runs)) == (2, 3)
    assert result.counted == pytest.approx(100 * 0.1 / 0.75)


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 1.0), ("test_loss", 0.1)])
def test_a_metric_has_its_own_best_lr(metric: str, best: float) -> None:
    values = {0.01: 0.5, 0.1: 0.4, 1.0: 0.9, 10.0: 0.99}
    runs = [
        run(0.5 - lr / 100, lr=lr, metric=metric, metrics={"train_loss": 0.5, metric: value})
        for lr, value in values.items()
    ]
    runs[-1] = replace(runs[-1], status="diverged")
    row = only_row(runs)
    assert row.metric == metric
    assert row.sweep is not None
    found = best_by_metric(row.sweep, metric)
    assert found == (best, {0: values[best]})


def test_highest_rate_is_that_of_the_schedule() -> None:
    curve = Curve((1, 2, 3), (1.0, 1.0, 1.0), (math.nan, 0.3, 0.1))
    assert highest_rate(run(curve=curve)) == 0.3
    assert math.isnan(highest_rate(run()))


@pytest.mark.parametrize(
    ("lr", "text"), [(1.0, "1"), (1e-4, "1e-4"), (3e4, "3e4"), (0.001, "0.001"), (2.5e-5, "2.5e-5")]
)
def test_learning_rates_read_as_typed(lr: float, text: str) -> None:
    assert format_lr(lr) == text


losses = st.lists(st.floats(0.05, 0.9), min_size=3, max_size=3)
unhurried = settings(deadline=None)  # machines are shared


@unhurried
@given(
    sweep=st.lists(losses, min_size=2, max_size=5),
    method=losses,
    scale=st.floats(1e-3, 1e3),
    shift=st.floats(-10, 10),
)
def test_excess_knows_no_unit(
    sweep: list[list[float | None]], method: list[float | None], scale: float, shift: float
) -> None:
    runs = [*swept({10.0**k: group for k, group in enumerate(sweep)}), *ours(method)]

    def moved(one: Run) -> Run:
        loss = one.metrics["train_loss"] * scale + shift * scale
        return replace(
            one, metrics={"train_loss": loss}, start_loss=one.start_loss * scale + shift * scale
        )

    before, after = only_result(runs), only_result([moved(one) for one in runs])
    assert after.trouble == before.trouble
    assert after.counted == pytest.approx(before.counted, rel=1e-6, abs=1e-6)


@unhurried
@given(order=st.randoms(use_true_random=False))
def test_the_order_of_runs_does_not_matter(order: random.Random) -> None:
    runs = EVERYTHING.copy()
    order.shuffle(runs)
    assert [summarize(c) for c in compare(runs)] == SUMMARIES


EVERYTHING = [replace(one, curve=Curve((), (), ())) for one in everything()]
SUMMARIES = [summarize(comparison) for comparison in compare(EVERYTHING)]


@unhurried
@given(losses=st.lists(st.none() | st.floats(0.01, 2.0), min_size=1, max_size=4))
def test_whatever_happens_a_method_counts_at_most_as_no_learning(
    losses: list[float | None],
) -> None:
    result = only_result([*swept({0.1: [0.3] * 4, 1.0: [0.9] * 4}), *ours(losses)])
    assert result.counted <= 100
    wrong = [loss is None or loss > 1 or 100 * (loss - 0.3) / 0.7 > 20 for loss in losses]
    assert [lost.run.seed for lost in result.lost] == [n for n, bad in enumerate(wrong) if bad]
    if None in losses:
        assert result.counted == 100
        assert "diverged" in result.trouble
