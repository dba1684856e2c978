"""Numbers at the edge of float32: losses of any size, absurd weights, updates that overflow."""

import functools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from bases import assert_moved
from lion_pytorch import Lion
from torch import Tensor, nn
from torch.optim import Optimizer

from mechanic.torch import mechanize, tuner
from mechanic.torch.measure import robust_square
from mechanic.torch.native import step as native

STEPS = 30
BASES: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, eps=0.0, weight_decay=0.0),
    "lion": Lion,
}


def regression(seed: int) -> tuple[nn.Linear, Tensor, Tensor]:
    """A model, inputs and targets; the weights are more than a hundred thousand numbers."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 512, generator=draw)
    torch.manual_seed(seed)
    return nn.Linear(512, 256), inputs, inputs @ torch.randn(512, 256, generator=draw) / 20


def scales_at(base: str, factor: float) -> Tensor:
    """The scale after each step where the gradients are multiplied with a factor."""
    model, inputs, targets = regression(0)
    optimizer = mechanize(BASES[base](model.parameters(), lr=1.0))
    scales, losses = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        for param in model.parameters():
            param.grad.mul_(factor)
        optimizer.step()
        scales.append(float(tuner(optimizer).scale))
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert max(scales) > 100 * scales[0] > 0
    assert tuner(optimizer).metrics()["skipped"] == 0
    return torch.tensor(scales, dtype=torch.float64)


expected = functools.cache(lambda base: scales_at(base, 1.0))

# Powers of two, with which nothing is rounded: from 1e-30 to 1e30.
RANGES = {
    "sgd": (-100, -33, 50, 100),
    "momentum": (-100, -33, 50, 100),
    "adamw": (-33, 50),  # AdamW itself squares the gradients in float32
    "lion": (-100, -66, 66, 100),
}


@pytest.mark.parametrize(
    ("base", "power"), [(base, power) for base, powers in RANGES.items() for power in powers]
)
def test_a_loss_of_any_size(base: str, power: int) -> None:
    factor = 2.0**power
    grows = factor if base in ("sgd", "momentum") else 1.0  # the update grows with the gradient
    torch.testing.assert_close(scales_at(base, factor) * grows, expected(base), rtol=1e-3, atol=0.0)


def train_with(base: str, value: float | None) -> tuple[list[float], Tensor, Optimizer]:
    """Train towards 3, where one weight has a value that is absurd: the scales, the weights."""
    torch.manual_seed(0)
    one, two = nn.Parameter(0.1 * torch.randn(40, 30)), nn.Parameter(torch.zeros(40))
    if value is not None:
        with torch.no_grad():
            one[3, 4] = value
    optimizer, scales = mechanize(BASES[base]([one, two], lr=1.0)), []
    for _ in range(STEPS):
        for param in (one, two):
            param.grad = torch.where(param.abs() < 100, param.detach() - 3, 0.5)
        optimizer.step()
        scales.append(float(tuner(optimizer).scale))
    return scales, torch.cat([one.detach().flatten(), two.detach()]), optimizer


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("value", [-math.inf, math.inf, 1e25, -1e9, 1e4])
def test_one_absurd_weight(base: str, value: float) -> None:
    scales, weights, optimizer = train_with(base, value)
    usual, others, _ = train_with(base, None)
    place = 3 * 30 + 4
    assert 0.5 < scales[0] / usual[0] < 2
    is_other = torch.arange(len(weights)) != place
    assert weights[is_other].isfinite().all()
    assert (weights[is_other] - 3).norm() < 0.5 * 3 * len(weights) ** 0.5
    torch.testing.assert_close(weights[is_other], others[is_other], rtol=0.2, atol=0.2)
    if abs(value) > 1e20:
        assert weights[place] == value
    assert tuner(optimizer).metrics()["skipped"] == 0
    assert_moved(optimizer)


def test_a_parameter_of_one_absurd_weight_and_masks() -> None:
    home = torch.device("cpu")
    usual = [torch.full((10, 10), 0.5), torch.full((7,), -0.5)]
    mask = torch.full((5, 5), -1e9)
    assert float(robust_square(usual, home)) == 0.25 * 107
    assert float(robust_square([*usual, torch.tensor(-1e9)], home)) == 0.25 * 107
    assert float(robust_square([*usual, mask], home)) == 0.25 * 107
    assert float(robust_square([mask], home)) == 25e18  # all of them: that is what is typical
    assert float(robust_square([torch.full((3,), math.nan)], home)) == 0
    assert float(robust_square([torch.empty(0)], home)) == 0


def test_ordinary_weights_count_in_full() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 32), nn.LayerNorm(32), nn.Linear(32, 20000)).double()
    with torch.no_grad():
        model[1].weight.mul_(30)  # as large as in trained models
    params = list(model.parameters())
    norm = torch.cat([param.flatten() for param in params]).norm()
    for like in (torch.float64, torch.float32, torch.bfloat16):
        own = [param.detach().to(like) for param in params]
        square = robust_square(own, torch.device("cpu"))
        torch.testing.assert_close(square, norm.detach() ** 2, rtol=1e-2, atol=0)
        if like is torch.float64:
            torch.testing.assert_close(square, norm.detach() ** 2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("steps_before", [0, 15])
def test_an_update_that_is_not_finite_skips_the_step(steps_before: int) -> None:
    model, inputs, targets = regression(0)
    optimizer = mechanize(BASES["adamw"](model.parameters(), lr=1.0, betas=(0.0, 0.0)))
    for factor in [1.0] * steps_before + [1e-28]:  # whose square is 0, and 0 / 0 is NaN
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        for param in model.parameters():
            param.grad.mul_(factor)
        before = [param.detach().clone() for param in model.parameters()]
        if factor == 1.0:
            optimizer.step()
    with pytest.warns(RuntimeWarning, match="the update of AdamW held NaN or inf"):
        optimizer.step()
    for param, had in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, had)
    assert tuner(optimizer).metrics()["skipped"] == 1
    for _ in range(25):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    assert all(param.isfinite().all() for param in model.parameters())
    assert tuner(optimizer).metrics()["skipped"] == 1
    assert_moved(optimizer)


class Broken(torch.optim.SGD):
    """A base of which nothing is known. A step that finds a value here makes an update of it."""

    values: ClassVar[list[float]] = []

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for value in self.values:
            self.param_groups[-1]["params"][-1].data.view(-1)[-1] = value


@pytest.fixture
def values() -> Iterator[list[float]]:
    yield Broken.values
    Broken.values.clear()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("steps_before", [0, 1, 25])
def test_an_unknown_base_that_breaks_by_itself(
    value: float, steps_before: int, values: list[float]
) -> None:
    model, inputs, targets = regression(0)
    optimizer = mechanize(Broken(model.parameters(), lr=1.0, momentum=0.9))

    def train(steps: int) -> float:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        return float(nn.functional.mse_loss(model(inputs), targets).detach())

    first = train(steps_before)
    before = [param.detach().clone() for param in model.parameters()]
    values.append(value)
    with pytest.warns(RuntimeWarning) as told:
        train(12)
    texts = [str(own.message) for own in told]
    assert sum("the update of Broken held NaN or inf" in text for text in texts) == 12
    assert sum("the last 10 steps were skipped" in text for text in texts) == 1
    assert all(map(torch.equal, before, model.parameters()))
    values.clear()
    assert train(40) < 0.5 * first
    assert tuner(optimizer).metrics()["skipped"] == 12
    assert_moved(optimizer)


@pytest.mark.parametrize("base", ["SparseAdam", "SGD", "Lion"])
def test_weights_stay_finite_where_there_is_no_minimum(base: str) -> None:
    weight = nn.Parameter(torch.ones(8, 3))
    kind = Lion if base == "Lion" else getattr(torch.optim, base)
    optimizer = mechanize(kind([weight], lr=1.0))

    def train() -> None:
        for _ in range(200):
            weight.grad = -torch.ones(8, 3)
            if base == "SparseAdam":
                weight.grad = weight.grad.to_sparse(1)
            optimizer.step()

    with pytest.warns(RuntimeWarning, match="steps were skipped"):
        train()
    assert weight.isfinite().all()
    assert (weight > 1e15).all()


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("base", ["SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adadelta"])
def test_weights_stay_finite_where_the_loss_falls_ever_faster(
    base: str, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update is lost beside its weight then, and 0 times a scale that is infinite is NaN."""
    monkeypatch.setattr(native, "IS_ON", is_native)
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = mechanize(getattr(torch.optim, base)([weight], lr=1.0))

    def train() -> None:
        for _ in range(200):
            optimizer.zero_grad()
            (weight.sum() - weight.square().sum()).backward()
            optimizer.step()

    with pytest.warns(RuntimeWarning, match="steps were skipped"):
        train()
    assert weight.isfinite().all()
    assert (weight.abs() > 1e15).all()


@pytest.mark.parametrize("decay", [0.0, 0.01, 0.1])
def test_two_parameters_in_one_memory_learn_as_one(decay: float) -> None:
    """The base is run on them in place: at a large lr, the second would decay what the first has
    made of the weights."""
    model, inputs, targets = regression(0)
    shared = nn.Parameter(model.weight.data)
    held = [*model.parameters(), shared]
    optimizer = mechanize(torch.optim.AdamW(held, lr=1.0, weight_decay=decay))
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        shared.grad = model.weight.grad
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    assert_moved(optimizer)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_used_where_that_is_asked_for(value: float) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = mechanize(torch.optim.SGD([weight], lr=1.0), skip_nonfinite=False)
    weight.grad = torch.tensor([1.0, value, 1.0])
    optimizer.step()
    assert not weight[1].isfinite()
    assert tuner(optimizer).metrics()["skipped"] == 0


def test_two_optimizers_from_the_same_groups_are_two() -> None:
    weight = nn.Parameter(torch.ones(3))
    groups = [{"params": [weight]}]
    one, two = (torch.optim.SGD(groups, lr=1.0) for _ in range(2))
    assert one.param_groups[0] is two.param_groups[0]
    mechanize(one)
    mechanize(two)
    three = mechanize(torch.optim.SGD)(groups, lr=1.0)
    for _ in range(20):
        weight.grad = weight.detach() - 3
        one.step()
    assert_moved(one)
    for optimizer in (one, two, three):
        (group,) = optimizer.param_groups
        scale = float(tuner(optimizer).scale)
        assert float(group["effective_lr"]) == pytest.approx(scale)
        assert optimizer.state_dict()["param_groups"][0]["mechanic"]["scale"] == scale
    assert float(tuner(two).scale) == float(tuner(three).scale) == 0 < float(tuner(one).scale)
    tuner(two).detach()
    assert "mechanic" in one.param_groups[0]
    assert "effective_lr" in one.param_groups[0]
    two.param_groups[0]["lr"] = 0.25
    assert one.param_groups[0]["lr"] == three.param_groups[0]["lr"] == 1.0
