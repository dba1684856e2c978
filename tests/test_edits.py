"""Weights that someone else changes between steps. Without a tuner that knows of it, S grows
without end along what is taken back."""

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable
from itertools import product

import pytest
import torch
from bases import by_kind, make_problem, plain_bases
from cases import case
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from mechanic.torch import edits, mechanize, tuner
from mechanic.torch.edits import are_followed
from mechanic.torch.native import step as native
from mechanic.torch.vectors import DISPLACEMENT

STEPS = 400
BASES: dict[str, Callable[..., Optimizer]] = {
    "AdamW": AdamW,
    "momentum": lambda params, lr: SGD(params, lr=lr, momentum=0.9),
}


class Task:
    """A classification that two layers can learn."""

    def __init__(self, seed: int = 0):
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(256, 20, generator=draw)
        self.y = (self.x @ torch.randn(20, 4, generator=draw)).argmax(1)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 4))
        self.masks = [torch.rand(p.shape, generator=draw) < 0.3 for p in self.model.parameters()]
        self.first = self.model[0].weight[:16].detach().clone()
        self.draw = draw

    def loss(self, chosen=slice(None)):
        return cross_entropy(self.model(self.x[chosen]), self.y[chosen])

    def mask(self):
        for param, mask in zip(self.model.parameters(), self.masks, strict=True):
            param.mul_(mask)

    def mask_data(self):  # which autograd does not see
        for param, mask in zip(self.model.parameters(), self.masks, strict=True):
            param.data *= mask

    def clamp(self):
        for param in self.model.parameters():
            param.clamp_(-0.3, 0.3)

    def nonnegative(self):
        self.model[2].weight.clamp_(min=0)

    def unit_rows(self):
        self.model[0].weight.copy_(normalize(self.model[0].weight, dim=1))

    def restore_rows(self):
        self.model[0].weight[:16] = self.first

    def decay(self):
        for param in self.model.parameters():
            param.mul_(0.999)

    def train(self, optimizer, edit: str, steps=STEPS, *, every: int = 1):
        schedule = CosineAnnealingLR(optimizer, steps)
        for step in range(steps):
            optimizer.zero_grad()
            self.loss(torch.randint(256, (32,), generator=self.draw)).backward()
            optimizer.step()
            schedule.step()
            if step % every == every - 1:
                with torch.no_grad():
                    getattr(self, edit)()
        return self.loss().item()


EDITS = ["mask", "mask_data", "clamp", "nonnegative", "unit_rows", "restore_rows", "decay"]


BY_DAY = [("clamp", 10, "AdamW")]


@pytest.mark.parametrize(
    ("edit", "every", "base"),
    [
        case(*row, name="-".join(map(str, row)), by_day=row in BY_DAY)
        for row in product(EDITS, (1, 10, 100), BASES)
    ],
)
@pytest.mark.usefixtures("compiled_steps")
def test_a_run_ends_as_well_as_the_best_plain_one(edit, every, base):
    """Also where the weights are edited in one step of many alone."""
    steps = STEPS if every < 100 else 1000
    for seed in range(3):
        sweep = []
        for lr in (1e-3, 1e-2, 3e-2, 0.1, 0.3):
            task = Task(seed)
            plain = BASES[base](task.model.parameters(), lr=lr)
            sweep.append(task.train(plain, edit, steps, every=every))
        task = Task(seed)
        start = task.loss().item()
        optimizer = mechanize(BASES[base](task.model.parameters(), lr=1.0))
        end = task.train(optimizer, edit, steps, every=every)
        assert are_followed(optimizer._mechanic)
        assert end < min(sweep) + 0.1 * (start - min(sweep))
        assert tuner(optimizer).metrics()["skipped"] == 0


PATHS = ["plain", "native"]


def train_one(path, steps, edit, base=Adam, monkeypatch=None, **options):
    """Weights of 1 that are pulled to a target, in noise, and edited."""
    monkeypatch.setattr(native, "IS_ON", path == "native")
    draw = torch.Generator().manual_seed(0)
    target = torch.randn(40, generator=draw)
    weights = nn.Parameter(torch.ones(40))
    optimizer = mechanize(base([weights], lr=1.0), **options)
    for step in range(steps):
        weights.grad = 2 * (weights.detach() - target) + torch.randn(40, generator=draw)
        yield step, weights, optimizer
        optimizer.step()
        with torch.no_grad():
            edit(step, weights)


@pytest.mark.parametrize("path", PATHS)
def test_the_weights_lie_on_their_displacement(path, monkeypatch):
    """x = x_ref + S·Δ at every step, whatever is done to x: from where edits are known, x_ref stays
    where it is."""

    def clamp(_, weights):
        weights.clamp_(min=0)

    references, scales = [], []
    for step, weights, optimizer in train_one(path, 45, clamp, monkeypatch=monkeypatch):
        numbers = optimizer._mechanic.scalars.read()
        if step > 4 and are_followed(optimizer._mechanic):
            before = optimizer.state[weights][DISPLACEMENT].double()
            length = numbers.scale * numbers.share
            # what the next step will find, once the displacement has followed the last edit
            copied = next(iter(_copies(optimizer).values())).double()
            references.append(weights.detach().double() - length * before - (weights - copied))
            scales.append(float(numbers.scale))
    assert len(references) > 20
    assert max(scales) > 3 * min(scales)
    for reference in references[1:]:
        torch.testing.assert_close(reference, references[0], rtol=0, atol=1e-4)


def _copies(optimizer):
    return edits._watches[optimizer._mechanic].copies


def test_both_paths_come_to_the_same(monkeypatch):
    def mask(_, weights):
        weights[::3] = 0

    ends = []
    for path in PATHS:
        *_, (_, weights, optimizer) = train_one(path, 25, mask, monkeypatch=monkeypatch)
        ends.append((weights.detach(), float(tuner(optimizer).scale)))
    (weights, scale), (same, own) = ends
    assert (weights[::3] == 0).all()
    torch.testing.assert_close(same, weights, rtol=1e-4, atol=1e-6)
    assert own == pytest.approx(scale, rel=1e-4)


def test_a_single_edit_and_a_swap_change_no_displacement(monkeypatch):
    kept = {}

    def swap(step, weights):
        kept["own"] = weights.clone()
        weights.fill_(7.0)
        weights.copy_(kept["own"])
        if step == 20:
            weights += 3.0

    for _, _, optimizer in train_one("native", 100, swap, monkeypatch=monkeypatch):
        assert not are_followed(optimizer._mechanic)


@pytest.mark.parametrize("edited", [10, 300])
def test_of_many_tensors_some_are_looked_at_in_each_step(edited, monkeypatch):
    """A look costs no more where there are more tensors, and an edit of a few is found too."""
    taken = []
    as_strided = torch.Tensor.as_strided

    def counted(*args, **kwargs):
        taken.append(args[0])
        return as_strided(*args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "as_strided", counted)
    draw = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.ones(16)) for _ in range(300)]
    optimizer = mechanize(AdamW(params, lr=1.0))
    steps = 0
    while steps < 100 and not are_followed(optimizer._mechanic):
        for param in params:
            param.grad = param.detach() - 2 + torch.randn(16, generator=draw)
        taken.clear()
        optimizer.step()
        steps += 1
        assert len(taken) <= 2 * edits._TENSORS
        with torch.no_grad():
            for param in params[-edited:]:
                param[::3] = 0
    assert steps < (6 if edited == 300 else 50)


def test_edits_that_begin_late_are_found_and_those_that_end_are_forgotten(monkeypatch):
    def mask(step, weights):
        if 400 <= step < 600:
            weights[::3] = 0

    followed = []
    for step, _, optimizer in train_one("native", 1000, mask, monkeypatch=monkeypatch):
        if are_followed(optimizer._mechanic):
            followed.append(step)
    assert 400 < followed[0] <= 434
    assert 800 <= followed[-1] < 890
    assert followed == list(range(followed[0], followed[-1] + 1))


def test_an_edit_that_leads_far_away_is_not_followed(monkeypatch):
    """As new weights are, that are loaded in the middle of a run with a mask."""

    def mask(step, weights):
        weights[::3] = 0
        if step == 50:
            weights[1::3] += 1e6

    norms = []
    for _, weights, optimizer in train_one("native", 52, mask, monkeypatch=monkeypatch):
        norms.append(float(optimizer.state[weights].get(DISPLACEMENT, torch.zeros(1)).norm()))
    optimizer.step()
    assert float(optimizer.state[weights][DISPLACEMENT].norm()) < 2 * max(norms)


@pytest.mark.parametrize("base", by_kind(plain_bases))
def test_every_base_bears_a_mask(base):
    problem = make_problem(base)
    optimizer = mechanize(base.factory(problem.params, lr=1.0))
    held = problem.params[0]
    with torch.no_grad():
        held[::2] = 0
    start = problem.total()
    for step in range(60):
        optimizer.zero_grad()
        problem.loss(step).backward()
        optimizer.step()
        with torch.no_grad():
            held[::2] = 0
    assert are_followed(optimizer._mechanic) != base.modes
    assert all(param.isfinite().all() for param in problem.params)
    if not base.modes:
        assert problem.total() < start


@pytest.mark.parametrize("make_other", [SGD, lambda params, lr: mechanize(SGD(params, lr=lr))])
def test_the_steps_of_another_optimizer_are_no_edits(make_other):
    """As where two losses share a trunk, with an optimizer for each."""
    task = Task()
    optimizer = mechanize(AdamW(task.model.parameters(), lr=1.0))
    other = make_other(task.model[0].parameters(), lr=0.01)
    for _ in range(100):
        for one in (optimizer, other):
            one.zero_grad()
            task.loss(torch.randint(256, (32,), generator=task.draw)).backward()
            one.step()
        assert not are_followed(optimizer._mechanic)
    assert task.loss() < 0.3


class Wrapper(Optimizer):
    """As of trainers, or of ZeRO: it has groups of its own, and steps the other one."""

    def __init__(self, inner):
        super().__init__([param for group in inner.param_groups for param in group["params"]], {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("other", ["wrapper", "idle", "parts", "of others"])
def test_an_optimizer_that_wraps_it_or_rests_is_no_other(other):
    task = Task()
    optimizer = mechanize(
        AdamW(task.model.parameters(), lr=1.0), scope="tensor" if other == "parts" else "all"
    )
    used = Wrapper(optimizer) if other == "wrapper" else optimizer
    away = nn.Parameter(torch.ones(3))
    beside = SGD(task.model.parameters() if other == "idle" else [away], lr=0.1)
    for step in range(40):
        used.zero_grad()
        task.loss(torch.randint(256, (32,), generator=task.draw)).backward()
        used.step()
        if other == "of others":
            away.grad = torch.ones(3)
            beside.step()
        if step % 2:  # so that it is found at some looks, and not at others
            with torch.no_grad():
                task.mask()
    own = optimizer._mechanic
    assert all(map(are_followed, own.mechanisms.values() if other == "parts" else [own]))
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    assert not [hook for hook in hooks.values() if "_Others" in repr(hook)]


LAYOUTS = {
    "columns": lambda: torch.ones(128, 128),
    "channels last": lambda: torch.ones(16, 8, 3, 3).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.ones(16, 24).t(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("begin", [0, 100])
def test_edits_are_found_wherever_they_lie(layout, begin):
    """Also those of every second column, in a sample that takes one weight of many."""
    torch.manual_seed(0)
    weights = nn.Parameter(LAYOUTS[layout]())
    optimizer = mechanize(Adam([weights], lr=1.0))
    target = torch.randn_like(weights)
    for step in range(begin + 200):
        weights.grad = 2 * (weights.detach() - target) + torch.randn_like(weights)
        optimizer.step()
        if step >= begin:
            weights.data[:, 1::2] = 0
    assert are_followed(optimizer._mechanic)
    assert float(tuner(optimizer).scale) < (10 if begin == 0 else 1000)


def test_rounding_is_no_edit():
    """Of a point to look at the gradient from, and back."""
    torch.manual_seed(0)
    weights = nn.Parameter(torch.randn(500))
    optimizer = mechanize(Adam([weights], lr=1.0))
    for _ in range(60):
        weights.grad = 2 * weights.detach() + torch.randn(500)
        optimizer.step()
        with torch.no_grad():
            weights += 0.1
            weights -= 0.1
        assert not are_followed(optimizer._mechanic)


def test_what_is_observed_follows_too():
    """`observe()` takes the displacement before the step does."""
    torch.manual_seed(0)
    weights = nn.Parameter(torch.ones(64))
    optimizer = mechanize(Adam([weights], lr=1.0))
    target = torch.randn(64)
    for _ in range(200):
        weights.grad = 2 * (weights.detach() - target) + torch.randn(64)
        tuner(optimizer).observe()
        weights.grad = 2 * (weights.detach() - target) + torch.randn(64)
        optimizer.step()
        weights.data[::2] = 0
    assert float(tuner(optimizer).scale) < 5


def test_an_interrupt_follows_no_edit_twice(monkeypatch):
    *_, (_, weights, optimizer) = train_one(
        "plain", 30, lambda _, w: w[::3].zero_(), monkeypatch=monkeypatch
    )
    with torch.no_grad():
        weights[1::3] += 0.01

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", fail)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    before = optimizer.state[weights][DISPLACEMENT].clone()
    edits.settle(optimizer, optimizer._mechanic)
    assert torch.equal(optimizer.state[weights][DISPLACEMENT], before)


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_weight_that_is_nan_or_infinite_is_no_edit(is_masked):
    torch.manual_seed(0)
    weights = nn.Parameter(torch.tensor([float("nan"), -float("inf")] + [1.0] * 38))
    optimizer = mechanize(Adam([weights], lr=1.0))
    for _ in range(40):
        weights.grad = 2 * (weights.detach() - 3) + 0.1 * torch.randn(40)
        weights.grad[:2] = 0
        optimizer.step()
        if is_masked:
            weights.data[3::3] = 0
    assert are_followed(optimizer._mechanic) == is_masked
    assert optimizer.state[weights][DISPLACEMENT].isfinite().all()
    assert weights[2:].isfinite().all()
    assert float(weights.detach()[2]) > 1.1


def test_several_scales(monkeypatch):
    task = Task()
    optimizer = mechanize(AdamW(task.model.parameters(), lr=1.0), scope="tensor")
    assert task.train(optimizer, "mask") < 0.3
    assert max(float(one.scale) for one in tuner(optimizer).scopes.values()) < 1e3


def test_copies_and_pickles_watch_for_themselves(monkeypatch):
    *_, (_, weights, optimizer) = train_one(
        "native", 30, lambda _, w: w[::3].zero_(), monkeypatch=monkeypatch
    )
    assert are_followed(optimizer._mechanic)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not are_followed(twin._mechanic)
        param = twin.param_groups[0]["params"][0]
        for _ in range(5):
            param.grad = torch.ones_like(param)
            twin.step()
            with torch.no_grad():
                param[::3] = 0
        assert are_followed(twin._mechanic)
    held = weakref.ref(optimizer._mechanic)
    del optimizer, weights, twin, param
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("edits_before", [True, False])
def test_a_resumed_run_goes_on_bit_for_bit(edits_before):
    """Whether a checkpoint is taken before the edit that follows a step, or after it."""

    def go(weights, optimizer, target, steps, do_save_at=None):
        for step in steps:
            noise = torch.randn(40, generator=torch.Generator().manual_seed(step))
            weights.grad = 2 * (weights.detach() - target) + noise
            optimizer.step()
            saved = None
            for do_edit in (edits_before, not edits_before):
                if do_edit:
                    with torch.no_grad():
                        weights[::3] = 0
                elif step == do_save_at:
                    own = weights.detach().clone()
                    saved = own, copy.deepcopy(optimizer.state_dict())
            if saved is not None:
                return saved
        return None

    target, first = torch.linspace(-2, 2, 40), nn.Parameter(torch.ones(40))
    whole = mechanize(AdamW([first], lr=1.0))
    go(first, whole, target, range(60))
    second = nn.Parameter(torch.ones(40))
    weights, state_dict = go(second, mechanize(AdamW([second], lr=1.0)), target, range(60), 29)
    third = nn.Parameter(weights)
    resumed = mechanize(AdamW([third], lr=1.0))
    resumed.load_state_dict(state_dict)
    if not edits_before:
        with torch.no_grad():
            third[::3] = 0
    go(third, resumed, target, range(30, 60))
    assert are_followed(resumed._mechanic)
    if edits_before:
        assert torch.equal(third, first)
        assert torch.equal(resumed.state[third][DISPLACEMENT], whole.state[first][DISPLACEMENT])
    torch.testing.assert_close(third, first, rtol=0.1, atol=0.1)


def test_diagnose_names_it():
    task = Task()
    optimizer = mechanize(AdamW(task.model.parameters(), lr=1.0))
    task.train(optimizer, "mask", 100)
    assert "a mask, a clamp" in tuner(optimizer).diagnose()
    task.train(optimizer, "loss", 400)
    assert "a mask, a clamp" not in tuner(optimizer).diagnose()


def test_an_interrupted_step_makes_no_edit_of_its_own(monkeypatch):
    """A step that fails after the weights have moved leaves no copy that is older than they are."""
    last: Tensor | None = None
    for step, weights, optimizer in train_one(
        "plain", 40, lambda _, w: w[::3].zero_(), monkeypatch=monkeypatch
    ):
        if step == 30:
            displacement = optimizer.state[weights][DISPLACEMENT]

            def fail(*_args, **_kwargs):
                raise KeyboardInterrupt

            handle = optimizer.register_step_post_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            handle.remove()
            last = displacement.clone()
        elif step == 31:
            assert last is not None
            numbers = optimizer._mechanic.scalars.read()
            change = (optimizer.state[weights][DISPLACEMENT] - last).norm()
            assert float(change) < 0.5 * float(last.norm()) + 3 / float(numbers.share)
