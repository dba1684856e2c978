"""Held-out tuning: the tuner learns from gradients that the user shows it, by `observe()`."""

import copy

import numpy as np
import pytest
import reference
import torch
from torch import nn
from torch.optim import SGD, AdamW

from mechanic.torch import mechanize, tuner

STEPS = 40
BASES = {
    "sgd": lambda params: SGD(params, lr=1.0, momentum=0.9),
    "adamw": lambda params: AdamW(params, lr=1.0),
}


class Regression:
    """A least-squares problem with one set of examples to train on and another that is held out."""

    def __init__(self, base, **options):
        draw = np.random.default_rng(0)
        self.inputs = draw.normal(size=(2, 12, 8))
        self.targets = draw.normal(size=(2, 12))
        self.weights = nn.Parameter(torch.from_numpy(draw.normal(size=8)))
        self.optimizer = mechanize(BASES[base]([self.weights]), **options)

    def gradient(self, weights, part):
        """The gradient on the train part (0) or the held-out part (1)."""
        rest = self.inputs[part] @ weights - self.targets[part]
        return self.inputs[part].T @ rest / len(rest)

    def show(self, part):
        own = self.gradient(self.weights.detach().numpy(), part)
        self.weights.grad = torch.from_numpy(own)

    def step(self, observed=None):
        if observed is not None:
            self.show(observed)
            tuner(self.optimizer).observe()
        self.show(0)
        self.optimizer.step()
        return float(tuner(self.optimizer).scale)


@pytest.mark.parametrize("preset", ["default", "paper"])
@pytest.mark.parametrize("base", BASES)
def test_to_observe_the_gradient_of_the_step_changes_nothing(base, preset):
    plain, observing = Regression(base, preset=preset), Regression(base, preset=preset)
    for _ in range(STEPS):
        assert plain.step() == observing.step(observed=0)
    assert torch.equal(plain.weights, observing.weights)
    assert plain.step() > 0


@pytest.mark.parametrize("base", BASES)
def test_the_scale_is_that_of_the_held_out_gradients(base):
    """Against the rule in float64, which is told of one gradient, where the base is of another."""
    run = Regression(base)
    x_ref = run.weights.detach().numpy().copy()
    x, delta, memory = x_ref, np.zeros_like(x_ref), {}
    state = {"x1": x_ref, "rise": 1.0, "rate": np.ones(()), "measured": np.ones(())}
    propose = {"sgd": reference.sgd, "adamw": reference.adamw}[base]
    options = {"sgd": {"momentum": 0.9}, "adamw": {"weight_decay": 0.01}}[base]
    scales = []
    for t in range(STEPS):
        u = propose(run.gradient(x, 0), x, memory, 1.0, **options)
        state["t"] = t + 1
        s, kept = reference.default(state, delta, run.gradient(x, 1), x, u)
        state["s"] = s
        x_ref = x if kept == 0 else x_ref
        delta = kept * delta + u
        x = x_ref + s.sum() * delta
        assert run.step(observed=1) == pytest.approx(s.sum(), rel=1e-6)
        scales.append(s.sum())
    np.testing.assert_allclose(run.weights.detach().numpy(), x, rtol=1e-6, atol=1e-9)
    assert len(set(scales)) > STEPS // 2


def test_between_observations_the_scale_is_held():
    run = Regression("adamw")
    scales = [run.step(observed=1 if t % 4 == 0 else None) for t in range(STEPS)]
    moved = {t for t in range(1, STEPS) if scales[t] != scales[t - 1]}
    assert moved <= set(range(0, STEPS, 4))
    assert len(moved) > 5
    tuner(run.optimizer).unfreeze()
    assert run.step() != scales[-1]


def test_a_held_out_gradient_with_nan_teaches_nothing():
    run = Regression("sgd")
    scales = [run.step(observed=1) for _ in range(10)]
    run.weights.grad = torch.full_like(run.weights, torch.nan)
    tuner(run.optimizer).observe()
    before = run.weights.detach().clone()
    assert run.step() == scales[-1]
    assert not torch.equal(run.weights, before)
    assert run.weights.isfinite().all()
    assert run.step(observed=1) != scales[-1]


def test_an_observation_survives_a_step_that_is_skipped():
    run, other = Regression("sgd"), Regression("sgd")
    for own in (run, other):
        for _ in range(20):
            own.step(observed=1)
        own.show(1)
        tuner(own.optimizer).observe()
    run.weights.grad = torch.full_like(run.weights, torch.nan)
    run.optimizer.step()
    assert run.step() == other.step()


def test_a_run_that_observes_goes_on_from_its_checkpoint():
    run = Regression("adamw")
    for t in range(20):
        run.step(observed=1 if t % 3 == 0 else None)
    saved = copy.deepcopy(run.optimizer.state_dict()), run.weights.detach().clone()
    resumed = Regression("adamw")
    resumed.optimizer.load_state_dict(saved[0])
    resumed.weights.data.copy_(saved[1])
    for t in range(20, 40):
        at = 1 if t % 3 == 0 else None
        assert run.step(observed=at) == resumed.step(observed=at)


def test_gradients_are_clipped_as_those_of_a_step():
    plain, observing = (Regression("adamw", max_grad_norm=0.1) for _ in range(2))
    for _ in range(STEPS):
        assert plain.step() == observing.step(observed=0)


def test_there_has_to_be_a_gradient():
    optimizer = mechanize(SGD([nn.Parameter(torch.ones(3))], lr=1.0))
    with pytest.raises(ValueError, match=r"no gradient .* backward\(\)"):
        tuner(optimizer).observe()
    assert not tuner(optimizer).frozen


def test_a_run_that_overfits_ends_better_when_it_is_tuned_on_what_is_held_out():
    """More weights than examples, and targets that are half noise. Over seeds."""

    def ends(seed, held_out):
        draw = torch.Generator().manual_seed(seed)
        true = torch.randn(60, generator=draw) / 8
        inputs = torch.randn(3, 40, 60, generator=draw)
        targets = inputs @ true + torch.randn(3, 40, generator=draw)
        weights = nn.Parameter(torch.zeros(60))
        optimizer = mechanize(AdamW([weights], lr=1.0, weight_decay=0.0))

        def loss(part):
            optimizer.zero_grad()
            value = (inputs[part] @ weights - targets[part]).square().mean()
            value.backward()
            return value.item()

        for _ in range(120):
            if held_out:
                loss(1)
                tuner(optimizer).observe()
            loss(0)
            optimizer.step()
        return loss(2)

    losses = {way: [ends(seed, way) for seed in range(3)] for way in (True, False)}
    pairs = list(zip(losses[True], losses[False], strict=True))
    assert all(own < other for own, other in pairs), pairs
