"""Copies and checkpoints: training goes on bit for bit, or an error says why it cannot."""

import copy
import functools
import io
import math
import multiprocessing
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bases import BASES, BY_ID, Base, Problem, assert_moved, make_problem, train, values
from test_nonfinite import PATIENCE, assert_same, bad_step, bits, skipped
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from mechanic.torch import mechanize, tuner

HALF = 25
DISPLACEMENT = "mechanic_displacement"

FUSED = [BY_ID[name] for name in ("AdamW", "Adagrad", "SGD-momentum")]
ROWS: dict[str, tuple[Base, dict[str, Any]]] = {
    **{base.id: (base, {}) for base in BASES},
    **{f"{base.id}-fused": (base, {"fused": True}) for base in FUSED},
}
each_row = pytest.mark.parametrize("row", ROWS)
each_base = pytest.mark.parametrize("row", BY_ID)
few_bases = pytest.mark.parametrize("row", ["SGD", "SGD-momentum", "AdamW", "LBFGS", "AdamW-fused"])


def plain(row: str, lr: Any = 1.0, seed: int = 0, **kwargs: Any) -> tuple[Optimizer, Problem]:
    base, flags = ROWS[row]
    if base.id == "LBFGS":
        flags = {"line_search_fn": "strong_wolfe", "max_iter": 4, "history_size": 5}
    hidden = 64 if base.id == "AdamW8bit" else 16
    problem = make_problem(base, seed=seed, hidden=hidden, **kwargs)
    return base.factory(problem.params, lr=lr, **flags), problem


def make(row: str, lr: Any = 1.0, seed: int = 0, **options: Any) -> tuple[Optimizer, Problem]:
    opt, problem = plain(row, lr, seed)
    return mechanize(opt, **options), problem


def everything(opt: Optimizer) -> dict[str, Any]:
    """The weights, the whole state and all that the tuner shows, to be compared bit for bit."""
    weights = [param for group in opt.param_groups for param in group["params"]]
    metrics = tuner(opt).metrics() if hasattr(opt, "_mechanic") else {}
    return bits({"weights": weights, "metrics": metrics, **opt.state_dict()})


def base_state(state: dict[Any, Any]) -> dict[Any, Any]:
    """The state that is the base's own."""
    own = {k: {n: v for n, v in s.items() if n != DISPLACEMENT} for k, s in state.items()}
    return {k: s for k, s in own.items() if s}


def set_weights(problem: Problem, weights: list[Tensor]) -> None:
    with torch.no_grad():
        for param, weight in zip(problem.params, weights, strict=True):
            param.copy_(weight)


def to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


class Trained(NamedTuple):
    """A run of two halves, with a checkpoint between them."""

    checkpoint: bytes
    weights: list[Tensor]
    end: dict[str, Any]


@functools.cache
def trained(row: str) -> Trained:
    opt, problem = make(row)
    train(opt, problem, HALF)
    assert_moved(opt, factor=1.1)
    checkpoint, weights = to_bytes(opt.state_dict()), values(problem.params)
    middle = float(tuner(opt).scale)
    train(opt, problem, HALF, start=HALF)
    assert float(tuner(opt).scale) != middle
    return Trained(checkpoint, weights, everything(opt))


def resumed(row: str, **kwargs: Any) -> tuple[Optimizer, Problem]:
    """A new optimizer at the checkpoint of `trained`."""
    opt, problem = make(row, **kwargs)
    run = trained(row)
    opt.load_state_dict(from_bytes(run.checkpoint))
    set_weights(problem, run.weights)
    return opt, problem


def assert_ends_the_same(opt: Optimizer, problem: Problem, row: str) -> None:
    train(opt, problem, HALF, start=HALF)
    assert_same(everything(opt), trained(row).end)


# Copies: deepcopy, pickle, other processes.

# torchao's quantized state cannot be cloned, in its own optimizer either.
each_copied_row = pytest.mark.parametrize("row", [row for row in ROWS if row != "AdamW8bit"])


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


# One of each kind of state, for the tests that start a process
SPAWNED = ("AdamW", "AdamW-fused", "SGD", "LBFGS", "SparseAdam", "Lion", "ScheduleFree-AdamW")
ELSEWHERE = (*SPAWNED, "Adagrad", "Adafactor", "Muon", "SGD-momentum-fused", "AdamW8bit")


def go_on_in_another_process(
    runs: dict[str, tuple[Optimizer, Problem]],
) -> dict[str, dict[str, Any]]:
    for opt, problem in runs.values():
        train(opt, problem, HALF, start=HALF)
    return {row: everything(opt) for row, (opt, _) in runs.items()}


def test_a_spawned_process():
    runs = {row: resumed(row) for row in SPAWNED}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        ends = pool.submit(go_on_in_another_process, runs).result(timeout=120)
    assert_same(ends, {row: trained(row).end for row in SPAWNED})


# Checkpoints: the same tuner goes on.


@each_row
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
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    ends = {row: pickle.loads((tmp_path / f"{row}.end").read_bytes()) for row in ELSEWHERE}
    assert_same(ends, {row: trained(row).end for row in ELSEWHERE})


def _two_groups(seed: int, *, late: bool = False, extra: bool = True) -> tuple[Optimizer, Problem]:
    problem = make_problem(seed=seed, hidden=16)
    first, *rest = problem.params
    opt = mechanize(torch.optim.AdamW([first], lr=1.0))
    if late:
        train(opt, problem, 10)
    if extra:
        opt.add_param_group({"params": rest, "lr": 0.3, "weight_decay": 0.1})
    return opt, problem


def test_a_group_that_was_added_before_saving():
    opt, problem = _two_groups(0, late=True)
    train(opt, problem, 15, start=10)
    assert_moved(opt)
    checkpoint, weights = to_bytes(opt.state_dict()), values(problem.params)
    first, second = from_bytes(checkpoint)["param_groups"]
    assert first["mechanic"] == second["mechanic"]
    train(opt, problem, HALF, start=HALF)

    fresh, other = _two_groups(1)
    fresh.load_state_dict(from_bytes(checkpoint))
    set_weights(other, weights)
    train(fresh, other, HALF, start=HALF)
    assert_same(everything(fresh), everything(opt))

    lacking, _ = _two_groups(1, extra=False)
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

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update({"exp_avg_sq": torch.zeros(()), "sum": 0.0, "prev": None})
                state["exp_avg_sq"].lerp_(param.grad.square().sum(), 0.1)
                param.sub_(param.grad / state["exp_avg_sq"].sqrt(), alpha=group["lr"])


def test_a_base_whose_state_is_not_shaped_like_its_parameters_resumes():
    def make_it(seed: int) -> tuple[Optimizer, Problem]:
        problem = make_problem(seed=seed, hidden=16)
        return mechanize(NormalizedSGD(problem.params)), problem

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


# What a state dict is.


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


# Plain optimizers' checkpoints, and back.

SMALL_LR = 1e-3  # one at which all plain bases train


@pytest.mark.parametrize(("row", "used"), [*((row, 8) for row in ROWS), ("AdamW", 0), ("SGD", 0)])
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


# Checkpoints of something else: an error that says what differs, and nothing is loaded.


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


@pytest.mark.parametrize("key", ["share", "m", "size", "steps", "frozen", "preset"])
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


# torch.distributed.checkpoint, in a single process.

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
    [*((row, True) for row in DCP_ROWS), ("AdamW", False), ("SGD", False), ("Lion", False)],
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
    opt, problem = _two_groups(0, late=True)
    train(opt, problem, 15, start=10)
    assert_moved(opt)
    bad_step(opt, problem, math.nan)
    train(opt, problem, 1, start=HALF)
    if frozen:
        tuner(opt).freeze()
    fresh, other = _two_groups(1)
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
