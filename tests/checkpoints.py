"""Runs that are interrupted in the middle, and what the tests compare after it."""

import functools
import io
from typing import Any, NamedTuple

import pytest
import torch
from bases import BASES, BY_ID, KINDS, Base, Problem, assert_moved, make_problem, train, values
from cases import case
from comparing import DISPLACEMENT, assert_same, bits
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch import mechanize, tuner

HALF = 20

FUSED = [BY_ID[name] for name in ("AdamW", "Adagrad", "SGD-momentum")]
ROWS: dict[str, tuple[Base, dict[str, Any]]] = {
    **{base.id: (base, {}) for base in BASES},
    **{f"{base.id}-fused": (base, {"fused": True}) for base in FUSED},
}


def by_day(row: str) -> bool:
    return row in (*KINDS, "AdamW8bit", "AdamW-fused", "SGD-momentum-fused")


each_row = pytest.mark.parametrize("row", [case(row, name=row, by_day=by_day(row)) for row in ROWS])
each_base = pytest.mark.parametrize("row", BY_ID)
few_bases = pytest.mark.parametrize("row", ["SGD", "SGD-momentum", "AdamW", "LBFGS", "AdamW-fused"])


def plain(row: str, lr: Any = 1.0, seed: int = 0, **kwargs: Any) -> tuple[Optimizer, Problem]:
    base, flags = ROWS[row]
    if base.id == "LBFGS":
        flags = {"line_search_fn": "strong_wolfe", "max_iter": 4, "history_size": 5}
    hidden = 64 if base.id == "AdamW8bit" else 16
    problem = make_problem(base, seed=seed, hidden=hidden, **kwargs)
    problem.patience = 1  # runs are compared here, and need not get far
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


# One of each kind of state, for the tests that start a process
SPAWNED = ("AdamW", "AdamW-fused", "SGD", "LBFGS", "SparseAdam", "Lion", "ScheduleFree-AdamW")


def in_two_groups(
    seed: int, *, late: bool = False, extra: bool = True
) -> tuple[Optimizer, Problem]:
    problem = make_problem(seed=seed, hidden=16)
    first, *rest = problem.params
    opt = mechanize(torch.optim.AdamW([first], lr=1.0))
    if late:
        train(opt, problem, 10)
    if extra:
        opt.add_param_group({"params": rest, "lr": 0.3, "weight_decay": 0.1})
    return opt, problem
