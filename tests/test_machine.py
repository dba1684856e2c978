"""Whatever a user does to a mechanized optimizer, in any order: a machine draws it, and a model in
float64 (`model.py`) says after each of it what the weights, Δ and the scale have to be.

The gradients are computed from the model's weights and given to both, so that rounding does not
grow along a trajectory, and what is left of it is stated in `ROUNDING`.
"""

import copy
import functools
import gc
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from checkpoints import everything, from_bytes, to_bytes
from comparing import assert_same, bits
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import Model
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from mechanic.torch import edits, mechanize, tuner
from mechanic.torch.call import unhooked

# The largest error of a weight beside |x_ref| + |S·Δ|, and of the scale beside itself.
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}

BASES: dict[str, tuple[type[Optimizer], str, dict[str, Any]]] = {
    "SGD": (SGD, "sgd", {"weight_decay": 0.01}),
    "momentum": (SGD, "sgd", {"momentum": 0.9}),
    "AdamW": (AdamW, "adamw", {"weight_decay": 0.1}),
}
TUNERS: list[dict[str, Any]] = [
    *[{}] * 3,  # the default, mostly
    {"s_decay": 0.01},
    {"max_scale": 0.05},
    {"preset": "paper"},
]
INTERRUPTS = ("pre-hook", "post-hook", "closure", "base", "base, at its end")
SHAPES = [(4, 3), (5,), (), (2, 3), (1,), (7,)]
SIZES = [1.0, 1.0, 1.0, 0.0, 1e-30, 1e-3, 1e3]  # of gradients


def to_numpy(tensor: Tensor) -> Any:
    return tensor.detach().to(torch.float64).numpy().copy()


class BrokenError(RuntimeError):
    """What the machine raises by itself."""


@contextmanager
def broken_base(base: Any, when: str) -> Iterator[None]:
    """A base whose step fails before it has done anything, or at its end."""
    had = vars(base).get("step")
    step = unhooked(base.step)

    @functools.wraps(step)
    def fail(*args: Any, **kwargs: Any) -> None:
        if when == "at its end":
            step(*args, **kwargs)
        raise BrokenError

    base.step = fail
    try:
        yield
    finally:
        if had is None:
            del base.step
        else:
            base.step = had


def deed(**strategies: Any) -> Any:
    """A rule, after which training goes on for a few steps: the machine leaves out some of its
    rules in each story, and there would be stories without a step."""

    def decorate(method: Any) -> Any:
        @rule(steps=st.integers(0, 4), **strategies)
        @functools.wraps(method)
        def do(self: "Machine", steps: int, **drawn: Any) -> None:
            method(self, **drawn)
            self.compare()
            for _ in range(steps):
                self.train()

        del do.__wrapped__  # hypothesis reads the signature
        return do

    return decorate


class Machine(RuleBasedStateMachine):
    """An optimizer, the model, and what may be done to them."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        base=st.sampled_from(sorted(BASES)),
        options=st.sampled_from(TUNERS),
        lrs=st.lists(st.sampled_from([1e-3, 1.0, 50.0]), min_size=1, max_size=2),
        seed=st.integers(0, 1000),
        dtype=st.sampled_from([torch.float64, torch.float32]),
        warm=st.sampled_from([0, 12, 12]),  # in the first ten steps the update is always measured
    )
    def start(self, base, options, lrs, seed, dtype, warm) -> None:
        self.kind, name, hyper = BASES[base]
        self.options, self.hyper, self.has_state = options, hyper, base != "SGD"
        self.draw = np.random.default_rng(seed)
        self.dtype = self.coarsest = dtype
        self.model = Model(
            name,
            {"momentum": 0.0, **hyper} if name == "sgd" else hyper,
            rule=options.get("preset", "default"),
            decay=options.get("s_decay"),
            cap=options.get("max_scale", math.inf),
        )
        self.params: list[nn.Parameter] = []
        self.frozen: set[int] = set()
        groups = [self.new_group(lr, count=2) for lr in lrs]
        self.opt: Any = mechanize(self.kind(groups, **hyper), **options)
        self.saved: dict[str, Any] | None = None
        self.scales: list[float] = []
        for _ in range(warm):
            self.train()

    def new_group(self, lr: float, count: int) -> dict[str, Any]:
        first = len(self.params)
        shapes = [SHAPES[i % len(SHAPES)] for i in range(first, first + count)]
        own = [
            nn.Parameter(torch.tensor(self.draw.normal(size=s), dtype=self.dtype)) for s in shapes
        ]
        self.params += own
        self.model.add_group([to_numpy(param) for param in own], lr)
        return {"params": own, "lr": lr}

    # Gradients

    def give_gradients(self, idle: set[int], size: float) -> list[Any]:
        """To all but the idle and the frozen; noisy, and bounded, so that no run diverges."""
        grads: list[Any] = []
        for i, (param, own) in enumerate(zip(self.params, self.model.params, strict=True)):
            slope = (1 + i / 4) * np.clip(own.x - 3, -10, 10) + 2 * self.draw.normal(
                size=own.x.shape
            )
            if i in idle or i in self.frozen:
                param.grad = None
                grads.append(None)
                continue
            param.grad = torch.tensor(size * slope, dtype=self.dtype)
            grads.append(to_numpy(param.grad))
        return grads

    def everything(self) -> Any:
        return everything(self.opt), bits(self.opt._mechanic.history.lrs)

    # What may be done

    def train(self, closure: Callable[[], float] | None = None) -> Any:
        grads = self.give_gradients(set(), 1.0)
        loss = self.opt.step(closure)
        self.model.step(grads)
        self.scales.append(self.model.scale)
        self.compare()
        self.seen["steps"] += 1
        return loss

    @deed()
    def step_with_a_closure(self) -> None:
        assert self.train(lambda: 7.0) == 7.0

    @deed(idle=st.sets(st.integers(0, 7), max_size=4), size=st.sampled_from(SIZES))
    def step_of_some(self, idle, size) -> None:
        grads = self.give_gradients(idle, size)
        self.opt.step()
        self.model.step(grads)
        self.scales.append(self.model.scale)

    @deed()
    def step_without_gradients(self) -> None:
        self.opt.zero_grad()
        before = self.everything()
        self.opt.step()
        assert_same(self.everything(), before)

    @deed()
    def step_with_gradients_of_zero(self) -> None:
        grads = self.give_gradients(set(), 1.0)
        self.opt.zero_grad(set_to_none=False)
        self.opt.step()
        self.model.step([None if g is None else 0 * g for g in grads])

    @deed(value=st.sampled_from([math.nan, math.inf, -math.inf]), which=st.integers(0, 7))
    def skipped_step(self, value, which) -> None:
        self.give_gradients(set(), 1.0)
        given = [param for param in self.params if param.grad is not None]
        if not given:
            return
        given[which % len(given)].grad.view(-1)[-1] = value
        before, counts = self.opt._mechanic.scalars.packed.clone(), self.weights_and_state()
        self.opt.step()
        self.model.skip()
        assert torch.equal(self.opt._mechanic.scalars.packed, before)
        assert_same(self.weights_and_state(), counts)
        self.seen["skips"] += 1

    def weights_and_state(self) -> Any:
        return bits([self.params, [self.opt.state.get(param, {}) for param in self.params]])

    @deed(where=st.sampled_from(INTERRUPTS))
    def interrupted_step(self, where) -> None:
        grads = self.give_gradients(set(), 1.0)
        before = self.everything()
        error: Any = KeyboardInterrupt if "hook" in where else BrokenError

        def fail(*_: Any, **__: Any) -> None:
            raise error

        closure = fail if where == "closure" else None
        if where == "pre-hook":
            hook: Any = self.opt.register_step_pre_hook(fail)
        elif where == "post-hook":
            hook = self.opt.register_step_post_hook(fail)
        if where.startswith("base"):
            with broken_base(self.kind, where.removeprefix("base, ")), pytest.raises(error):
                self.opt.step(closure)
        else:
            with pytest.raises(error):
                self.opt.step(closure)
        if "hook" in where:
            hook.remove()
        if where == "post-hook":  # the step was over
            self.model.step(grads)
        elif where == "base, at its end":
            self.run_base_in_model(grads)  # as in the plain optimizer, its state has changed
        else:
            assert_same(self.everything(), before)
        self.seen[where] += 1

    def run_base_in_model(self, grads: list[Any]) -> None:
        """The state of parameters that had none is not kept."""
        kept = [own.memory for own in self.model.params]
        new = [not own.memory for own in self.model.params]
        self.model.run_base(grads)
        for own, memory, is_new in zip(self.model.params, kept, new, strict=True):
            own.memory = {} if is_new else memory

    @precondition(lambda self: len(self.params) < 7)
    @deed(lr=st.sampled_from([0.0, 1e-3, 1.0, 20.0]), count=st.integers(1, 2))
    def add_group(self, lr, count) -> None:
        self.opt.add_param_group(self.new_group(lr, count))
        self.seen["groups"] += 1

    @deed(which=st.sets(st.integers(0, 7), max_size=3))
    def freeze_parameters(self, which) -> None:
        self.frozen = {i for i in which if i < len(self.params)}
        for i, param in enumerate(self.params):
            param.requires_grad_(i not in self.frozen)

    @deed()
    def freeze_or_unfreeze_the_scale(self) -> None:
        handle = tuner(self.opt)
        (handle.unfreeze if handle.frozen else handle.freeze)()
        self.model.frozen = not self.model.frozen
        assert tuner(self.opt).frozen == self.model.frozen

    @deed(group=st.integers(0, 7), factor=st.sampled_from([0.0, 0.1, 0.5, 1.05, 1.2, 3.0, 10.0]))
    def change_lr(self, group, factor) -> None:
        if len(self.frozen) == len(self.params):
            return  # no step would be made, and the rate stays that of the last one
        group %= len(self.model.lrs)
        lr = min(self.model.lrs[group] * factor if self.model.lrs[group] else 1.0, 100.0)
        self.opt.param_groups[group]["lr"] = self.model.lrs[group] = lr
        self.train()

    @deed(which=st.integers(0, 7), how=st.sampled_from(["copy", "data", "init"]))
    def overwrite(self, which, how) -> None:
        which %= len(self.params)
        param = self.params[which]
        new = torch.tensor(self.draw.normal(size=param.shape), dtype=self.dtype)
        if how == "copy":
            with torch.no_grad():
                param.copy_(new)
        elif how == "data":
            param.data = new
        else:
            nn.init.constant_(param, 0.5)
        self.model.overwrite(which, to_numpy(param))

    @deed(dtype=st.sampled_from([torch.float64, torch.float32]))
    def change_dtype(self, dtype) -> None:
        if dtype is self.dtype:
            return
        self.dtype = dtype
        self.coarsest = torch.float32
        for i, param in enumerate(self.params):
            param.grad = None
            param.data = param.data.to(dtype)
            self.model.overwrite(i, to_numpy(param))
        if self.has_state:  # which torch's own step wants in the new dtype
            self.opt.load_state_dict(self.opt.state_dict())
        self.seen["dtypes"] += 1

    # Copies and checkpoints

    @deed()
    def save(self) -> None:
        self.saved = {
            "file": to_bytes(self.opt.state_dict()),
            "weights": [param.detach().clone() for param in self.params],
            "groups": len(self.model.lrs),
            "model": self.model.copy(),
        }

    @precondition(lambda self: self.saved is not None)
    @deed(into=st.sampled_from(["the same", "a fresh one"]), with_weights=st.booleans())
    def load(self, into, with_weights) -> None:
        saved: Any = self.saved
        if saved["groups"] != len(self.model.lrs):
            before = self.everything()
            with pytest.raises(ValueError, match="of another model"):
                self.opt.load_state_dict(from_bytes(saved["file"]))
            assert_same(self.everything(), before)
            self.seen["refused"] += 1
            return
        if into == "a fresh one":
            self.make_fresh()
        self.opt.load_state_dict(from_bytes(saved["file"]))
        model, now = saved["model"].copy(), self.model
        for i, (param, weight) in enumerate(zip(self.params, saved["weights"], strict=True)):
            if with_weights:
                param.data = weight.to(self.dtype)
            model.params[i].x = now.params[i].x
            model.overwrite(i, to_numpy(param))
        self.model = model
        self.seen["loads"] += 1

    def make_fresh(self) -> None:
        """Other parameters in another optimizer, at an lr that the checkpoint replaces."""
        copies = {param: nn.Parameter(param.detach().clone()) for param in self.params}
        groups = [
            {"params": [copies[param] for param in group["params"]], "lr": 0.123}
            for group in self.opt.param_groups
        ]
        self.params = [copies[param] for param in self.params]
        for i in self.frozen:
            self.params[i].requires_grad_(False)
        self.opt = mechanize(self.kind(groups, **self.hyper), **self.options)

    @deed(by=st.sampled_from([copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))]))
    def replace_by_a_copy(self, by: Callable[[Any], Any]) -> None:
        old, before = self.opt, self.everything()
        self.params, self.opt = by((self.params, self.opt))
        assert all(p is q for p, q in zip(self.params, self.flat(), strict=True))
        assert not {id(param) for param in self.params} & {
            id(param) for group in old.param_groups for param in group["params"]
        }
        for group in old.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        old.step()  # which the copy has no part in
        assert_same(self.everything(), before)
        self.seen["copies"] += 1

    def flat(self) -> list[Tensor]:
        return [param for group in self.opt.param_groups for param in group["params"]]

    @deed()
    def detach_and_mechanize(self) -> None:
        """The tuner begins anew, at the lr that was learned."""
        scale = float(tuner(self.opt).scale) or 1.0
        plain = tuner(self.opt).detach()
        assert type(plain) is self.kind
        for group, lr in zip(plain.param_groups, self.model.lrs, strict=True):
            assert group["lr"] == pytest.approx(scale * lr, rel=1e-12)
            group["lr"] = lr
        self.opt = mechanize(plain, **self.options)
        self.model.forget()

    # What always holds

    @invariant()
    def compare(self) -> None:
        if not hasattr(self, "opt"):
            return
        model, rounding = self.model, ROUNDING[self.coarsest]
        scale, share = float(tuner(self.opt).scale), float(self.opt._mechanic.scalars.read().share)
        assert math.isfinite(scale)
        assert scale == pytest.approx(model.scale, rel=rounding, abs=1e-300)
        metrics = tuner(self.opt).metrics()
        assert int(metrics["skipped"]) == model.skipped
        for i, lr in enumerate(model.lrs):
            assert self.opt.param_groups[i]["lr"] == lr
            assert float(metrics[f"effective_lr/{i}"]) == pytest.approx(scale * lr, rel=1e-6)
        for param, own in zip(self.params, model.params, strict=True):
            weights = to_numpy(param)
            stored = self.opt.state.get(param, {}).get("mechanic_displacement")
            assert (stored is not None) == own.is_known
            delta = share * to_numpy(stored) if stored is not None else 0 * weights
            size = np.max(np.abs(own.x_ref) + np.abs(model.scale * own.delta)) * rounding
            assert np.isfinite(weights).all()
            assert np.abs(weights - own.x).max() <= size
            assert np.abs(own.x_ref + scale * delta - weights).max() <= 2 * size

    def teardown(self) -> None:
        scales = [scale for scale in getattr(self, "scales", []) if scale > 0]
        if len(scales) >= 20 and max(scales) > 2 * min(scales):
            self.seen["long runs"] += 1


@pytest.mark.filterwarnings("ignore:mechanic. the last 10 steps were skipped")
@pytest.mark.parametrize(
    "examples", [12, pytest.param(2000, marks=pytest.mark.nightly)], ids="{} stories".format
)
def test_whatever_is_done_to_it(examples, monkeypatch):
    # The model takes each edit of the weights for a single one; `test_edits.py` has the others.
    monkeypatch.setattr(edits, "_ENOUGH", math.inf)
    Machine.seen.clear()
    gc.freeze()  # `detach` looks at all objects for schedulers; at all but those that were there
    try:
        _run(examples)
    finally:
        gc.unfreeze()
    # A machine that does nothing finds nothing.
    seen = Machine.seen
    assert seen["long runs"] > examples / 3, seen
    assert sum(seen[where] for where in INTERRUPTS) > examples / 2, seen
    assert seen["loads"] + seen["copies"] > examples / 4, seen
    rare = (*INTERRUPTS, "skips", "groups", "dtypes", "loads", "copies", "refused")
    assert examples < 100 or all(seen[what] > examples / 50 for what in rare), seen


def _run(examples: int) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],  # a story need not be short, and shrinking takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
