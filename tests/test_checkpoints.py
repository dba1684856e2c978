"""Checkpoints: training goes on bit for bit, with everything that the tuner knew."""

import copy
import io
import math
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bases import MISSING, Problem, assert_moved, make_problem, train, values
from checkpoints import (
    HALF,
    ROWS,
    SPAWNED,
    assert_ends_the_same,
    each_row,
    everything,
    few_bases,
    from_bytes,
    in_two_groups,
    make,
    resumed,
    set_weights,
    to_bytes,
    trained,
)
from comparing import DISPLACEMENT, PATIENCE, assert_same, bad_step, bits, skipped
from running import environment
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from mechanic.torch import mechanize, tuner

_OTHERS = ("Adagrad", "Adafactor", "Muon", "SGD-momentum-fused", "AdamW8bit")
ELSEWHERE = [*SPAWNED, *(row for row in _OTHERS if row not in MISSING)]


@pytest.mark.parametrize("row", ROWS)
def test_resume_is_bitwise(row):
    opt, problem = resumed(row, seed=1)
    assert_ends_the_same(opt, problem, row)


@each_row
def test_loading_in_the_middle_of_a_run_replaces_everything(row):
    fresh, _ = resumed(row)
    opt, problem = make(row, lr=0.5, seed=1)
    train(opt, problem, 20, start=3)
    if not problem.closure_only:
        bad_step(opt, problem, math.nan)
    tuner(opt).freeze()
    opt.load_state_dict(from_bytes(trained(row).checkpoint))
    set_weights(problem, trained(row).weights)
    assert not tuner(opt).frozen
    after, expected = everything(opt), everything(fresh)
    del after["metrics"]["signal"], expected["metrics"]["signal"]
    assert_same(after, expected)
    assert_ends_the_same(opt, problem, row)


def test_what_the_tuner_shows_after_loading_is_not_of_the_run_before():
    fresh, _ = resumed("AdamW")
    opt, problem = make("AdamW", seed=1)
    train(opt, problem, 20)
    opt.load_state_dict(from_bytes(trained("AdamW").checkpoint))
    assert_same(bits(tuner(opt).metrics()), bits(tuner(fresh).metrics()))


def resume_files(folder: str) -> None:
    """What the new process runs: go on from each file there, and note where that ends."""
    for path in sorted(Path(folder).glob("*.pt")):
        opt, problem = make(path.stem, seed=2)
        saved = torch.load(path, weights_only=True)
        opt.load_state_dict(saved["optimizer"])
        set_weights(problem, saved["weights"])
        train(opt, problem, HALF, start=HALF)
        path.with_suffix(".end").write_bytes(pickle.dumps(everything(opt)))


def test_a_file_and_a_new_process(tmp_path):
    for row in ELSEWHERE:
        run = trained(row)
        saved = {"optimizer": from_bytes(run.checkpoint), "weights": run.weights}
        torch.save(saved, tmp_path / f"{row}.pt")
    code = f"import test_checkpoints; test_checkpoints.resume_files({str(tmp_path)!r})"
    here = Path(__file__).parent
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=here, env=environment(), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    ends = {row: pickle.loads((tmp_path / f"{row}.end").read_bytes()) for row in ELSEWHERE}
    assert_same(ends, {row: trained(row).end for row in ELSEWHERE})


def test_a_group_that_was_added_before_saving():
    opt, problem = in_two_groups(0, late=True)
    train(opt, problem, 15, start=10)
    assert_moved(opt)
    checkpoint, weights = to_bytes(opt.state_dict()), values(problem.params)
    first, second = from_bytes(checkpoint)["param_groups"]
    assert first["mechanic"] == second["mechanic"]
    train(opt, problem, HALF, start=HALF)

    fresh, other = in_two_groups(1)
    fresh.load_state_dict(from_bytes(checkpoint))
    set_weights(other, weights)
    train(fresh, other, HALF, start=HALF)
    assert_same(everything(fresh), everything(opt))

    lacking, _ = in_two_groups(1, extra=False)
    before = everything(lacking)
    with pytest.raises(ValueError, match=r"\[1, 3\].*\[1\]"):
        lacking.load_state_dict(from_bytes(checkpoint))
    assert_same(everything(lacking), before)


def test_a_parameter_that_gets_its_first_gradient_after_loading():
    def run(load: bool) -> dict[str, Any]:
        problem = make_problem(hidden=16)
        late = problem.params[-1].requires_grad_(False)
        opt = mechanize(torch.optim.AdamW(problem.params, lr=1.0))
        train(opt, problem, HALF)
        assert late not in opt.state
        if load:
            checkpoint, weights = to_bytes(opt.state_dict()), values(problem.params)
            problem = make_problem(seed=1, hidden=16)
            opt = mechanize(torch.optim.AdamW(problem.params, lr=1.0))
            train(opt, problem, 3)
            opt.load_state_dict(from_bytes(checkpoint))
            set_weights(problem, weights)
            late = problem.params[-1]
            assert late not in opt.state
        late.requires_grad_(True)
        train(opt, problem, HALF, start=HALF)
        assert DISPLACEMENT in opt.state[late]
        return everything(opt)

    assert_same(run(load=True), run(load=False))


@pytest.mark.parametrize("row", ["SGD-momentum", "AdamW-fused"])
@pytest.mark.parametrize("options", [{"preset": "paper"}, {"preset": "optax"}, {"s_decay": 0.01}])
def test_other_tuners_resume(row, options):
    opt, problem = make(row, **options)
    train(opt, problem, HALF)
    assert float(tuner(opt).scale) > 0
    checkpoint, weights = to_bytes(opt.state_dict()), values(problem.params)
    train(opt, problem, HALF, start=HALF)
    fresh, other = make(row, seed=1, **options)
    fresh.load_state_dict(from_bytes(checkpoint))
    set_weights(other, weights)
    train(fresh, other, HALF, start=HALF)
    assert_same(everything(fresh), everything(opt))


def _schedule(opt: Optimizer) -> LRScheduler:
    ramp, decay = LinearLR(opt, 0.1, total_iters=10), CosineAnnealingLR(opt, T_max=60)
    return SequentialLR(opt, [ramp, decay], milestones=[10])


# torch's SequentialLR steps its schedulers in a way that torch itself warns of
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("row", ["AdamW", "SGD-momentum", "AdamW-fused"])
def test_a_schedule_that_is_saved_beside_it(row, lr):
    opt, problem = make(row, lr=copy.deepcopy(lr))
    schedule = _schedule(opt)
    train(opt, problem, HALF, scheduler=schedule)
    assert_moved(opt)
    saved = to_bytes([opt.state_dict(), schedule.state_dict()])
    weights = values(problem.params)
    train(opt, problem, 20, start=HALF, scheduler=schedule)

    fresh, other = make(row, lr=copy.deepcopy(lr), seed=1)
    again = _schedule(fresh)
    optimizer_state, schedule_state = torch.load(io.BytesIO(saved), weights_only=False)
    again.load_state_dict(schedule_state)
    fresh.load_state_dict(optimizer_state)
    set_weights(other, weights)
    train(fresh, other, 20, start=HALF, scheduler=again)
    assert_same(everything(fresh), everything(opt))
    assert again.get_last_lr() == schedule.get_last_lr()
    assert 0 < float(opt.param_groups[0]["lr"]) < 1


class NormalizedSGD(Optimizer):
    """A base of a user's own. As NovoGrad's, its entries have the names of Adam's and shapes of
    their own: one number a tensor."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    def size_of(self, grad: Tensor) -> Tensor:
        return grad.square().sum()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state, size = self.state[param], self.size_of(param.grad)
                if not state:
                    state.update({"exp_avg_sq": torch.zeros_like(size), "sum": 0.0, "prev": None})
                state["exp_avg_sq"].lerp_(size, 0.1)
                param.sub_(param.grad / (state["exp_avg_sq"].sqrt() + 1e-8), alpha=group["lr"])


class NormalizedRowsSGD(NormalizedSGD):
    """As AdamWSN's and Nero's, its entries have as many dimensions as the parameter, and one number
    a row."""

    def size_of(self, grad: Tensor) -> Tensor:
        return grad.square().sum(-1, keepdim=True)


@pytest.mark.parametrize("base", [NormalizedSGD, NormalizedRowsSGD])
def test_a_base_whose_state_is_not_shaped_like_its_parameters_resumes(base):
    def make_it(seed: int) -> tuple[Optimizer, Problem]:
        problem = make_problem(seed=seed, hidden=16)
        return mechanize(base(problem.params)), problem

    opt, problem = make_it(0)
    train(opt, problem, HALF)
    assert_moved(opt)
    checkpoint, weights = to_bytes(opt.state_dict()), values(problem.params)
    train(opt, problem, HALF, start=HALF)
    fresh, other = make_it(1)
    fresh.load_state_dict(from_bytes(checkpoint))
    set_weights(other, weights)
    train(fresh, other, HALF, start=HALF)
    assert_same(everything(fresh), everything(opt))


# What survives.


@few_bases
def test_the_frozen_flag_survives(row):
    opt, problem = make(row)
    train(opt, problem, HALF)
    assert_moved(opt, factor=1.1)
    tuner(opt).freeze()
    checkpoint, weights = to_bytes(opt.state_dict()), values(problem.params)
    held = bits(tuner(opt).scale)
    train(opt, problem, 20, start=HALF)

    fresh, other = make(row)
    fresh.load_state_dict(from_bytes(checkpoint))
    set_weights(other, weights)
    assert tuner(fresh).frozen
    train(fresh, other, 20, start=HALF)
    assert_same(bits(tuner(fresh).scale), held)
    assert_same(everything(fresh), everything(opt))


def test_the_cap_survives():
    opt, problem = make("AdamW", max_scale=2e-3)
    train(opt, problem, HALF)
    checkpoint, weights = to_bytes(opt.state_dict()), values(problem.params)
    train(opt, problem, HALF, start=HALF)
    fresh, other = make("AdamW", max_scale=2e-3)
    fresh.load_state_dict(from_bytes(checkpoint))
    set_weights(other, weights)
    assert float(tuner(fresh).scale) == pytest.approx(2e-3, rel=1e-9)
    train(fresh, other, HALF, start=HALF)
    assert_same(everything(fresh), everything(opt))


@few_bases
@pytest.mark.parametrize("in_a_row", [1, 6])
def test_the_counts_of_skipped_steps_survive(row, in_a_row):
    """And the warning comes as it would have come without the interruption."""

    def go_on(opt: Optimizer, problem: Problem) -> dict[str, Any]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(PATIENCE - in_a_row):
                bad_step(opt, problem, math.nan)
            middle = everything(opt)
            del middle["metrics"]["signal"]  # of the last step, which is not saved
            train(opt, problem, 3, start=HALF)
        return {"warnings": len(caught), "middle": middle, "end": everything(opt)}

    opt, problem = make(row)
    bad_step(opt, problem, math.nan)
    train(opt, problem, HALF)
    for _ in range(in_a_row):
        bad_step(opt, problem, math.nan)
    checkpoint, weights = to_bytes(opt.state_dict()), values(problem.params)
    expected = go_on(opt, problem)

    fresh, other = make(row)
    fresh.load_state_dict(from_bytes(checkpoint))
    set_weights(other, weights)
    assert skipped(fresh) == 1 + in_a_row
    assert_same(go_on(fresh, other), expected)


@few_bases
def test_a_step_after_loading_ends_a_run_of_skips(row):
    opt, problem = make(row)
    train(opt, problem, HALF)
    for _ in range(3):
        bad_step(opt, problem, math.nan)
    checkpoint, weights = to_bytes(opt.state_dict()), values(problem.params)
    train(opt, problem, HALF, start=HALF)
    fresh, other = make(row)
    fresh.load_state_dict(from_bytes(checkpoint))
    set_weights(other, weights)
    train(fresh, other, HALF, start=HALF)
    assert_same(everything(fresh), everything(opt))


@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        *((row, torch.bfloat16) for row in ("SGD", "SGD-momentum", "AdamW", "Lion", "Adafactor")),
        ("SGD-momentum", torch.float16),
        ("AdamW", torch.float64),
    ],
    ids=str,
)
def test_the_displacement_keeps_its_dtype(row, dtype):
    def make_it(seed: int) -> tuple[Optimizer, Problem]:
        problem = make_problem(seed=seed, hidden=8, batch=32, dtype=dtype)
        return mechanize(ROWS[row][0].factory(problem.params, lr=1.0)), problem

    opt, problem = make_it(0)
    train(opt, problem, HALF)
    assert_moved(opt)
    checkpoint, weights = to_bytes(opt.state_dict()), values(problem.params)
    train(opt, problem, HALF, start=HALF)

    fresh, other = make_it(1)
    fresh.load_state_dict(from_bytes(checkpoint))
    set_weights(other, weights)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    stored = [fresh.state[param][DISPLACEMENT] for param in other.params]
    assert all(displacement.dtype is wide for displacement in stored)
    narrow = torch.float32 if dtype is torch.float64 else dtype
    assert any((value != value.to(narrow)).any() for value in stored), "a cast would not show"
    assert tuner(fresh).scale.dtype is torch.float64
    train(fresh, other, HALF, start=HALF)
    assert_same(everything(fresh), everything(opt))


def test_complex_and_scalar_parameters_resume():
    def make_it() -> tuple[Optimizer, list[nn.Parameter]]:
        params = [
            nn.Parameter(torch.tensor([1 + 2j, -1j, 0.5])),
            nn.Parameter(torch.tensor(0.3)),
            nn.Parameter(torch.zeros(0, 3)),
        ]
        return mechanize(torch.optim.AdamW(params, lr=1.0)), params

    def go_on(opt: Optimizer, params: list[nn.Parameter]) -> None:
        for _ in range(HALF):
            opt.zero_grad()
            sum((param - 3).abs().square().sum() for param in params).backward()
            opt.step()

    opt, params = make_it()
    go_on(opt, params)
    assert_moved(opt)
    checkpoint, weights = to_bytes(opt.state_dict()), values(params)
    go_on(opt, params)
    fresh, others = make_it()
    fresh.load_state_dict(from_bytes(checkpoint))
    for other, weight in zip(others, weights, strict=True):
        other.data.copy_(weight)
    go_on(fresh, others)
    assert_same(everything(fresh), everything(opt))
