"""Schedule-Free as a base: no peer combines the two."""

import copy

import pytest
import schedulefree
import torch
from cases import case
from sklearn.datasets import load_digits

from mechanic.torch import mechanize, modes, tuner, vectors
from mechanic.torch.vectors import DISPLACEMENT

BASES = [schedulefree.AdamWScheduleFree, schedulefree.SGDScheduleFree]


class Problem:
    """Digits, a small network and mini-batches in a fixed order."""

    def __init__(self) -> None:
        inputs, targets = load_digits(return_X_y=True)
        self.inputs = torch.tensor(inputs / 16, dtype=torch.float32)
        self.targets = torch.tensor(targets)
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        )
        self.order = torch.Generator().manual_seed(1)

    def loss(self) -> float:
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(self.net(self.inputs), self.targets))

    def train(self, optimizer, steps: int) -> None:
        for _ in range(steps):
            rows = torch.randint(0, len(self.inputs), (64,), generator=self.order)
            logits = self.net(self.inputs[rows])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, self.targets[rows]).backward()
            optimizer.step()


def run(base, lr: float, *, tuned: bool, steps: int = 200):
    problem = Problem()
    optimizer = base(problem.net.parameters(), lr=lr)
    if tuned:
        mechanize(optimizer)
    optimizer.train()
    problem.train(optimizer, steps)
    optimizer.eval()
    return problem, optimizer


@pytest.mark.nightly
@pytest.mark.parametrize("base", BASES)
def test_the_averaged_weights_are_as_good_as_a_sweep_at_any_lr(base):
    sweep = [run(base, 10.0**k, tuned=False)[0].loss() for k in range(-3, 2)]
    tuned = {lr: run(base, lr, tuned=True) for lr in (1e-2, 1.0, 1e2)}
    losses = [problem.loss() for problem, _ in tuned.values()]
    rates = [lr * float(tuner(optimizer).scale) for lr, (_, optimizer) in tuned.items()]
    best, initial = min(sweep), Problem().loss()
    assert max(losses) - best < 0.02 * (initial - best)
    # In the end rounding decides about the sign of a cosine, and the losses do not care.
    assert rates == pytest.approx([rates[1]] * 3, rel=0.25)
    assert max(losses) - min(losses) < 0.001 * (initial - best)


@pytest.mark.parametrize("base", BASES)
def test_changing_modes_back_and_forth_changes_nothing(base):
    problem, optimizer = run(base, 1.0, tuned=True, steps=60)
    in_eval = [param.clone() for param in problem.net.parameters()]
    optimizer.train()
    in_train = [param.clone() for param in problem.net.parameters()]
    optimizer.eval()
    assert any(not torch.equal(a, b) for a, b in zip(in_eval, in_train, strict=True))
    for param, expected in zip(problem.net.parameters(), in_eval, strict=True):
        torch.testing.assert_close(param.detach(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("base", BASES)
def test_a_step_that_the_base_refuses_leaves_the_weights(base):
    problem, optimizer = run(base, 1.0, tuned=True, steps=30)
    before = [param.clone() for param in problem.net.parameters()]
    with pytest.raises(Exception, match="train mode"):
        problem.train(optimizer, 1)
    for param, expected in zip(problem.net.parameters(), before, strict=True):
        assert torch.equal(param, expected)


@pytest.mark.parametrize("base", BASES)
def test_resume_in_eval_mode_is_bitwise(base):
    problem, optimizer = run(base, 1.0, tuned=True, steps=40)
    twin = copy.deepcopy(problem)
    twin.order = torch.Generator()
    twin.order.set_state(problem.order.get_state())
    resumed = mechanize(base(twin.net.parameters(), lr=1.0))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, own in ((problem, optimizer), (twin, resumed)):
        own.train()
        each.train(own, 20)
        own.eval()
    for a, b in zip(problem.net.parameters(), twin.net.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("base", "mode"),
    [
        case(base, mode, name=f"{mode}-{base.__name__}", by_day=i == j)
        for i, base in enumerate(BASES)
        for j, mode in enumerate(["train", "eval"])
    ],
)
def test_detach_goes_on_from_where_the_weights_are(base, mode):
    problem, optimizer = run(base, 1.0, tuned=True, steps=50)
    frozen, twin_optimizer = run(base, 1.0, tuned=True, steps=50)
    tuner(twin_optimizer).freeze()
    if mode == "train":
        optimizer.train()
    tuner(optimizer).detach()
    assert type(optimizer) is base
    for each, own in ((problem, optimizer), (frozen, twin_optimizer)):
        own.train()
        each.train(own, 30)
        own.eval()
    for a, b in zip(problem.net.parameters(), frozen.net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_the_second_point_follows_where_the_displacement_is_forgotten(kept):
    """What lies between it and the point that the base is shown stays what it is."""
    model = torch.nn.Linear(5, 3)
    optimizer = mechanize(schedulefree.SGDScheduleFree(model.parameters(), lr=1.0))
    optimizer.train()
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
    numbers = optimizer._mechanic.scalars.read()
    batches = vectors.batches(
        (0, param, None, optimizer.state[param][DISPLACEMENT]) for param in model.parameters()
    )
    targets, values = modes.follow_reference(optimizer, numbers, batches, kept)
    for param, z, after in zip(model.parameters(), targets, values, strict=True):
        assert z is optimizer.state[param]["z"]
        delta = optimizer.state[param][DISPLACEMENT] * float(numbers.share)
        shown = param + (1 - float(numbers.scale)) * delta
        shown_after = shown if kept else param  # Δ is then the next update alone
        torch.testing.assert_close(after - shown_after, z - shown, rtol=1e-5, atol=1e-6)
        assert torch.equal(z, after) == bool(kept)
