"""What the default rule must not depend on: the lr that is typed, the scale of the loss, the order
of parameters and groups. On scikit-learn's digits, with the same batches each time.

Where rounding in float32 is compared, the model is logistic regression, which does not amplify it:
the errors seen are below 1e-5. An MLP does, up to some percent within 300 steps.
"""

import functools

import numpy as np
import pytest
import torch
from cases import case
from sklearn.datasets import load_digits
from torch import nn

from mechanic.torch import mechanize, tuner

torch.set_num_threads(1)

STEPS, LONG = 100, 300
BASES = {
    "adamw": torch.optim.AdamW,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    # AdamW's own ε, 1e-8, stands beside √v and so breaks its scale-freeness before we can.
    "scale-free adamw": functools.partial(torch.optim.AdamW, eps=1e-30),
}


@functools.cache
def digits():
    features, labels = load_digits(return_X_y=True)
    return torch.tensor(features / 16), torch.tensor(labels)


def linear():
    return nn.Linear(64, 10)


def mlp():
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()


def train(
    base, lr, *, make=linear, steps=STEPS, cosine=False, loss_scale=1.0, group=None, s_decay=0.0
):
    """The effective learning rate S·lr after every step, and the last parameters.

    `group` makes the optimizer's groups from the list of parameters.
    """
    torch.manual_seed(0)
    model = make()
    params = list(model.parameters())
    groups = params if group is None else group(params)
    optimizer = mechanize(BASES[base](groups, lr=lr), s_decay=s_decay)
    if cosine:  # down to a hundredth: the typed rate is the largest, and the last is not 0
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=lr / 100)
    features, labels = digits()
    features, draw, rates = features.to(params[0]), torch.Generator().manual_seed(1), []
    for _ in range(steps):
        rows = torch.randint(len(features), (32,), generator=draw)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features[rows]), labels[rows])
        (loss * loss_scale).backward()
        optimizer.step()
        if cosine:
            scheduler.step()
        rates.append(float(tuner(optimizer).scale) * lr)
    assert max(rates) > 100 * rates[0]
    assert loss.item() < 1  # of 2.3: it has learned
    return np.array(rates), torch.cat([param.detach().flatten() for param in params]).double()


def assert_same(trajectory, expected, tolerance):
    (rates, params), (expected_rates, expected_params) = trajectory, expected
    np.testing.assert_allclose(rates, expected_rates, rtol=tolerance, atol=0)
    assert (params - expected_params).norm() <= tolerance * expected_params.norm()


@functools.cache
def at_one(base, **options):
    return train(base, 1.0, **options)


LRS = (1e-6, 1e-4, 1e-2, 1e2, 1e4, 1e6)


@pytest.mark.parametrize(
    ("base", "lr", "steps"),
    [
        *(case("adamw", lr, STEPS, name=f"adamw-{lr:g}") for lr in (1e-6, 1e-2, 1e4)),
        *(case("momentum", lr, STEPS, name=f"momentum-{lr:g}") for lr in (1e-4, 1e2, 1e6)),
        *(
            case(base, lr, LONG, name=f"{base}-{lr:g}-long", by_day=False)
            for base in ("adamw", "momentum")
            for lr in LRS
        ),
    ],
)
def test_typed_lr(base, lr, steps):
    # A tenth of float32's rounding: the base must be shown the same numbers at every lr.
    assert_same(train(base, lr, steps=steps), at_one(base, steps=steps), 1e-8)


def crossed(bases, lrs):
    """Each base with one of the lrs, and at night with the other."""
    return pytest.mark.parametrize(
        ("base", "lr"),
        [
            case(base, lr, name=f"{base}-{lr:g}", by_day=i == j)
            for i, base in enumerate(bases)
            for j, lr in enumerate(lrs)
        ],
    )


@crossed(["adamw", "momentum"], [1e-6, 1e6])
def test_typed_lr_under_a_schedule(base, lr):
    expected = at_one(base, cosine=True)
    assert_same(train(base, lr, cosine=True), expected, 1e-8)
    assert not np.allclose(expected[0], at_one(base)[0], rtol=0.05)


@crossed(["adamw", "momentum"], [1e4, 1e-4])
def test_typed_lr_with_a_decay(base, lr):
    expected = at_one(base, s_decay=0.01)
    assert_same(train(base, lr, s_decay=0.01), expected, 1e-8)
    assert not np.allclose(expected[0], at_one(base)[0], rtol=0.05)


@pytest.mark.parametrize("scale", [1e-8, 1e-3, 1e8])
def test_scale_of_the_loss(scale):
    trajectory = train("scale-free adamw", 1.0, loss_scale=scale)
    assert_same(trajectory, at_one("scale-free adamw"), 1e-3)


@pytest.mark.parametrize("scale", [2.0**-27, 2.0**27])
def test_scale_of_the_loss_in_powers_of_two(scale):
    # These are exact in floating point, and there is no ε: not a bit may differ, but for squares of
    # gradients that are too small for float32.
    trajectory = train("scale-free adamw", 1.0, loss_scale=scale)
    assert_same(trajectory, at_one("scale-free adamw"), 0.0 if scale > 1 else 1e-4)


def one_group_each(params):
    return [{"params": [param]} for param in params]


ORDERS = {
    "parameters shuffled": lambda params: [params[i] for i in (2, 0, 3, 1)],
    "groups reversed": lambda params: one_group_each(params)[::-1],
    "two groups": lambda params: [{"params": params[2:][::-1]}, {"params": params[:2]}],
}


@functools.cache
def in_order(base):
    return train(base, 1.0, make=mlp, steps=STEPS)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("base", ["adamw", "momentum"])
def test_order_of_parameters_and_groups(base, order):
    trajectory = train(base, 1.0, make=mlp, steps=STEPS, group=ORDERS[order])
    assert_same(trajectory, in_order(base), 1e-9)


@pytest.mark.parametrize("base", ["adamw", "momentum"])
def test_lrs_of_groups_are_ratios(base):
    def train_at(first, second):
        def group(params):
            return [{"params": params[:2], "lr": first}, {"params": params[2:], "lr": second}]

        return train(base, 1.0, make=mlp, steps=STEPS, group=group)

    scales, params = train_at(2.0, 1.0)
    same_scales, same_params = train_at(2e-3, 1e-3)
    assert_same((same_scales * 1e-3, same_params), (scales, params), 1e-6)
    assert not np.allclose(scales, in_order(base)[0], rtol=0.05)


@pytest.mark.parametrize("base", ["adamw", "momentum"])
def test_a_doubled_lr_moves_a_parameter_twice_as_far(base):
    draw = torch.Generator().manual_seed(0)
    one, two = (nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
    groups = [{"params": [one], "lr": 3e-4}, {"params": [two], "lr": 6e-4}]
    optimizer = mechanize(BASES[base](groups, lr=1.0, weight_decay=0.0))
    scales = []
    for _ in range(100):
        one.grad = one.detach() - 4 + torch.randn(5, generator=draw, dtype=torch.float64)
        two.grad = one.grad.clone()
        optimizer.step()
        scales.append(float(tuner(optimizer).scale))
        torch.testing.assert_close(two - 1, 2 * (one - 1), rtol=1e-9, atol=1e-15)
    assert max(scales) > 100 * scales[0]
