"""Several scales in one optimizer: `mechanize(optimizer, scope=...)`."""

import copy
import math
import pickle

import pytest
import torch
from cases import case
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from mechanic.integrations import metrics
from mechanic.torch import mechanize, optim, tuner

STEPS = 40
PARTS = {"text": "text.*", "unet": "unet.*"}


class Scaled(torch.optim.Optimizer):
    """A base that nobody knows, with a counter of its own."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * group["lr"] / self.count)
        return loss


BASES = {
    "adamw": lambda params: AdamW(params, lr=1.0),
    "momentum": lambda params: SGD(params, lr=1.0, momentum=0.9),
    "rmsprop": lambda params: RMSprop(params, lr=1.0),
    "unknown": Scaled,
}


class Model(nn.Module):
    """Two parts whose gradients differ by far in size."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.text, self.unet = nn.Linear(6, 4), nn.Linear(4, 2)
            self.inputs = torch.randn(32, 6, dtype=dtype)
            self.targets = torch.randn(32, 2, dtype=dtype)
        self.to(dtype)

    def loss(self):
        rest = self.unet(torch.tanh(100 * self.text(self.inputs))) - self.targets
        return rest.square().mean()

    def groups(self, **text):
        return [
            {"params": list(self.text.parameters()), "name": "text", **text},
            {"params": list(self.unet.parameters()), "name": "unet"},
        ]


def train(model, *optimizers, steps=STEPS):
    for _ in range(steps):
        model.zero_grad()
        model.loss().backward()
        for optimizer in optimizers:
            optimizer.step()


def are_equal(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("base", "preset"),
    [
        case(base, preset, name=f"{base}-{preset}", by_day=preset == "default" or base == "adamw")
        for base in BASES
        for preset in ("default", "paper", "mechanic-pytorch")
    ],
)
def test_scopes_are_as_optimizers_of_their_own(base, preset):
    one, two = Model(), Model()
    scoped = mechanize(BASES[base](one.groups()), scope="group", preset=preset)
    apart = [mechanize(BASES[base]([group]), preset=preset) for group in two.groups()]
    train(one, scoped)
    train(two, *apart)
    assert are_equal(one, two)
    scales = tuner(scoped).scale
    assert scales.tolist() == [float(tuner(own).scale) for own in apart]
    assert scales[0] != scales[1]
    assert scales.min() > 0
    if base == "unknown":
        assert scoped.count == STEPS


def test_each_tensor_may_have_a_scale():
    one, two = Model(), Model()
    scoped = mechanize(AdamW(one.named_parameters(), lr=1.0), scope="tensor")
    train(one, scoped)
    train(two, *(mechanize(AdamW([param], lr=1.0)) for param in two.parameters()))
    assert are_equal(one, two)
    assert list(tuner(scoped).scopes) == [name for name, _ in one.named_parameters()]
    nameless = mechanize(AdamW(Model().parameters(), lr=1.0), scope="tensor")
    assert list(tuner(nameless).scopes) == [f"group0.tensor{i}" for i in range(4)]
    in_groups = mechanize(AdamW(Model().groups(), lr=1.0), scope="tensor")
    assert list(tuner(in_groups).scopes) == [
        f"{name}.tensor{i}" for name in ("text", "unet") for i in range(2)
    ]


def test_patterns_choose_parameters_and_the_rest_has_a_scope():
    model, apart = Model(), Model()
    scoped = mechanize(AdamW(model.named_parameters(), lr=1.0), scope={"text": "text.*"})
    assert [group["name"] for group in scoped.param_groups] == ["text", "rest"]
    train(model, scoped)
    train(apart, *(mechanize(AdamW([group], lr=1.0)) for group in apart.groups()))
    assert are_equal(model, apart)
    assert list(tuner(scoped).scopes) == ["text", "rest"]


def test_groups_are_divided_and_keep_their_settings():
    model = Model()
    named = list(model.named_parameters())
    groups = [
        {"params": [p for p in named if p[0].endswith("weight")], "weight_decay": 0.1, "name": "w"},
        {"params": [p for p in named if p[0].endswith("bias")], "lr": 0.5},
    ]
    optimizer = mechanize(AdamW(groups, lr=1.0), scope=PARTS)
    own = [
        (g["name"], g["lr"], g["weight_decay"], g["param_names"]) for g in optimizer.param_groups
    ]
    assert own == [
        ("w/text", 1.0, 0.1, ["text.weight"]),
        ("w/unet", 1.0, 0.1, ["unet.weight"]),
        ("text", 0.5, 0.01, ["text.bias"]),
        ("unet", 0.5, 0.01, ["unet.bias"]),
    ]
    train(model, optimizer)
    rates, handle = tuner(optimizer).effective_lr, tuner(optimizer)
    for name, weights, biases in (("text", 0, 2), ("unet", 1, 3)):
        assert rates[weights] == 2 * rates[biases]  # ratios inside a scope
        assert float(handle.scopes[name].scale) == pytest.approx(float(rates[weights]))
    assert [float(group["effective_lr"]) for group in optimizer.param_groups] == list(
        map(float, rates)
    )


def test_groups_of_one_name_share_a_scale():
    model = Model()
    groups = [{**group, "name": "both"} for group in model.groups()]
    one, other = mechanize(AdamW(groups, lr=1.0), scope="group"), Model()
    train(model, one)
    train(other, mechanize(AdamW(other.groups(), lr=1.0)))
    assert are_equal(model, other)


def test_the_typed_lr_of_a_scope_does_not_matter():
    scales = []
    for lr in (1.0, 1e-6, 1e6):
        model = Model()
        optimizer = mechanize(AdamW(model.groups(lr=lr), lr=1.0, weight_decay=0.0), scope="group")
        train(model, optimizer)
        scales.append([float(rate) for rate in tuner(optimizer).effective_lr])
    assert scales[1] == pytest.approx(scales[0], rel=1e-3)
    assert scales[2] == pytest.approx(scales[0], rel=1e-3)


def test_nan_in_one_scope_skips_the_step_of_all():
    model, other = Model(), Model()
    optimizer = mechanize(AdamW(model.groups(), lr=1.0), scope="group")
    train(model, optimizer)
    before = copy.deepcopy(model)
    model.zero_grad()
    model.loss().backward()
    model.unet.weight.grad[0, 0] = math.nan
    optimizer.step()
    assert are_equal(model, before)
    assert {own.metrics()["skipped"].item() for own in tuner(optimizer).scopes.values()} == {1}
    train(model, optimizer)
    train(other, mechanize(AdamW(other.groups(), lr=1.0), scope="group"), steps=2 * STEPS)
    assert are_equal(model, other)


def test_nan_is_not_looked_for_where_no_step_is_skipped():
    model = Model()
    optimizer = mechanize(SGD(model.groups(), lr=1.0), scope="group", skip_nonfinite=False)
    train(model, optimizer)
    before = copy.deepcopy(model)
    model.unet.weight.grad[0, 0] = math.nan
    optimizer.step()
    assert not torch.equal(model.text.weight, before.text.weight)
    assert not model.unet.weight.isfinite().all()


def test_gradients_are_clipped_together():
    one, two = Model(torch.float64), Model(torch.float64)
    options = {"scope": "group", "max_grad_norm": 0.05}
    train(one, mechanize(SGD(one.groups(), lr=1.0), **options))
    plain = mechanize(SGD(two.groups(), lr=1.0), scope="group")
    for _ in range(STEPS):
        two.zero_grad()
        two.loss().backward()
        norm = nn.utils.clip_grad_norm_(two.parameters(), 0.05)
        plain.step()
    assert norm > 0.05
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_norm_that_is_not_finite_leaves_the_gradients():
    model = Model()
    optimizer = mechanize(SGD(model.groups(), lr=1.0), scope="group", max_grad_norm=0.1)
    train(model, optimizer)
    model.text.bias.grad[0] = math.inf
    before = model.unet.weight.grad.clone()
    optimizer.step()
    assert torch.equal(model.unet.weight.grad, before)


@pytest.mark.parametrize("scope", ["group", "tensor", PARTS], ids=str)
@pytest.mark.parametrize("way", ["checkpoint", "deepcopy", "pickle"])
def test_a_run_goes_on_bit_for_bit(scope, way):
    model = Model()
    optimizer = mechanize(AdamW(model.named_parameters(), lr=1.0), scope=scope)
    train(model, optimizer)
    if way == "checkpoint":
        other = copy.deepcopy(model)
        resumed = mechanize(AdamW(other.named_parameters(), lr=1.0), scope=scope)
        resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    else:
        both = {"deepcopy": copy.deepcopy, "pickle": lambda own: pickle.loads(pickle.dumps(own))}
        other, resumed = both[way]((model, optimizer))
    train(model, optimizer)
    train(other, resumed)
    assert are_equal(model, other)
    assert tuner(optimizer).scale.tolist() == tuner(resumed).scale.tolist()


def test_a_checkpoint_loads_without_pickled_code(tmp_path):
    model = Model()
    optimizer = mechanize(AdamW(model.named_parameters(), lr=1.0), scope="tensor")
    train(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = mechanize(AdamW(model.named_parameters(), lr=1.0), scope="tensor")
    resumed.load_state_dict(saved)
    assert tuner(resumed).scale.tolist() == tuner(optimizer).scale.tolist()


@pytest.mark.parametrize(("saved", "here"), [("all", "group"), ("group", "all")])
def test_a_checkpoint_of_other_scopes_is_refused(saved, here):
    model = Model()
    optimizer = mechanize(AdamW(model.groups(), lr=1.0), scope=saved)
    train(model, optimizer)
    other = mechanize(AdamW(model.groups(), lr=1.0), scope=here)
    train(model, other)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"made with other scopes: .*Nothing was loaded"):
        other.load_state_dict(optimizer.state_dict())
    assert str(other.state_dict()) == str(before)


def test_a_checkpoint_of_a_plain_optimizer_starts_to_be_tuned():
    model = Model()
    plain = AdamW(model.groups(), lr=1.0)
    train(model, plain, steps=3)
    scoped = mechanize(AdamW(model.groups(), lr=1.0), scope="group")
    train(model, scoped)
    scoped.load_state_dict(plain.state_dict())
    assert tuner(scoped).scale.tolist() == [0.0, 0.0]
    train(model, scoped)
    assert tuner(scoped).scale.min() > 0


def test_the_handle_reaches_each_scope():
    model = Model()
    optimizer = mechanize(AdamW(model.groups(lr=0.5), lr=1.0), scope="group")
    train(model, optimizer)
    handle = tuner(optimizer)
    found = handle.metrics()
    assert {"scale/text", "scale/unet", "steps/text", "effective_lr/0", "effective_lr/1"} <= {
        *found
    }
    assert found["scale/text"] * 0.5 == pytest.approx(float(found["effective_lr/0"]))
    logged = metrics(optimizer)
    assert list(logged) == [
        "mechanic/scale/text",
        "mechanic/scale/unet",
        "mechanic/lr/text",
        "mechanic/lr/unet",
    ]
    assert handle.suggest_lr() == [own.suggest_lr()[0] for own in handle.scopes.values()]
    handle.scopes["text"].freeze()
    assert not handle.frozen
    before = handle.scale
    train(model, optimizer, steps=5)
    assert handle.scale[0] == before[0]
    assert handle.scale[1] != before[1]
    handle.freeze()
    assert handle.frozen
    handle.unfreeze()
    assert not handle.scopes["text"].frozen
    lines = handle.diagnose().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["text", "unet"]


def test_held_out_gradients_are_for_all_scopes():
    one, two = Model(), Model()
    scoped = mechanize(AdamW(one.groups(), lr=1.0), scope="group")
    apart = [mechanize(AdamW([group], lr=1.0)) for group in two.groups()]
    for _ in range(STEPS):
        for model, optimizers in ((one, [scoped]), (two, apart)):
            model.zero_grad()
            (model.loss() * 2 + model.unet.weight.sum()).backward()
            for optimizer in optimizers:
                tuner(optimizer).observe()
        train(one, scoped, steps=1)
        train(two, *apart, steps=1)
    assert are_equal(one, two)


@pytest.mark.parametrize("scheduler", [lambda o: StepLR(o, 5), lambda o: CosineAnnealingLR(o, 99)])
def test_detached_groups_have_the_learning_rates_of_their_scopes(scheduler):
    model = Model()
    optimizer = mechanize(AdamW(model.groups(), lr=1.0), scope="group")
    schedule = scheduler(optimizer)
    for _ in range(STEPS):
        train(model, optimizer, steps=1)
        schedule.step()
    scales = tuner(optimizer).scale.tolist()
    plain = tuner(optimizer).detach()
    assert type(plain) is AdamW
    assert plain is optimizer
    assert schedule.base_lrs == scales
    rate = [group["lr"] for group in plain.param_groups]
    assert rate[0] / rate[1] == pytest.approx(scales[0] / scales[1])
    assert not any("mechanic_scope" in group for group in plain.param_groups)
    train(model, plain)
    train(model, mechanize(plain, scope="group"))


def test_a_schedule_with_one_rate_for_all_is_not_detached():
    model = Model()
    optimizer = mechanize(AdamW(model.groups(), lr=1.0), scope="group")
    schedule = CosineAnnealingLR(optimizer, 10, eta_min=0.1)
    train(model, optimizer)
    with pytest.raises(ValueError, match=r"CosineAnnealingLR has eta_min=0\.1 for all groups"):
        tuner(optimizer).detach()
    train(model, optimizer)
    assert schedule.base_lrs == [1.0, 1.0]


def test_groups_come_and_go():
    model = Model()
    text, unet = model.groups()
    optimizer = mechanize(AdamW([text], lr=1.0), scope="group")
    train(model, optimizer)
    optimizer.add_param_group(unet)
    train(model, optimizer)
    assert list(tuner(optimizer).scopes) == ["text", "unet"]
    assert tuner(optimizer).scale.min() > 0
    optimizer.param_groups.pop(0)
    train(model, optimizer)
    assert list(tuner(optimizer).scopes) == ["unet"]


def test_a_scheduler_is_made_after_groups_are_divided():
    model = Model()
    plain = AdamW(model.named_parameters(), lr=1.0)
    StepLR(plain, 5)
    with pytest.raises(ValueError, match="Call mechanize before the scheduler is made"):
        mechanize(plain, scope="tensor")
    assert type(plain) is AdamW
    assert len(plain.param_groups) == 1
    train(model, plain, steps=3)
    mechanize(plain, scope="group")


def test_a_closure_is_evaluated_once():
    for make in (BASES["adamw"], BASES["unknown"]):
        model, count = Model(), 0

        def closure(model=model):
            nonlocal count
            count += 1
            model.zero_grad()
            loss = model.loss()
            loss.backward()
            return loss

        optimizer = mechanize(make(model.groups()), scope="group")
        losses = [optimizer.step(closure).item() for _ in range(STEPS)]
        assert count == STEPS
        assert losses[-1] < losses[0]


def test_a_base_that_fails_leaves_each_weight_before_or_after():
    class Failing(SGD):
        fails = False

        def step(self, closure=None):
            if self.fails and self.param_groups[0]["name"] == "unet":
                raise MemoryError
            return super().step(closure)

    model = Model()
    optimizer = mechanize(Failing(model.groups(), lr=1.0), scope="group")
    train(model, optimizer)
    before = copy.deepcopy(model)
    optimizer.fails = True
    with pytest.raises(MemoryError):
        optimizer.step()
    assert torch.equal(model.unet.weight, before.unet.weight)
    assert (model.text.weight - before.text.weight).abs().max() < 1
    optimizer.fails = False
    train(model, optimizer)
    assert model.loss() < before.loss()


def test_a_grad_scaler_skips_all_scopes():
    model, scaler = Model(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    optimizer = mechanize(AdamW(model.groups(), lr=1.0), scope="group")
    other = Model()
    expected = mechanize(AdamW(other.groups(), lr=1.0), scope="group")
    for step in range(STEPS):
        model.zero_grad()
        scaler.scale(model.loss()).backward()
        if step == 20:
            model.text.weight.grad[0, 0] = math.inf
            before = copy.deepcopy(model)
        scaler.step(optimizer)
        scaler.update()
        if step == 20:
            assert are_equal(model, before)
        else:
            train(other, expected, steps=1)
    assert are_equal(model, other)


def test_the_importable_classes_take_a_scope():
    model = Model()
    optimizer = optim.AdamW(model.named_parameters(), lr=1.0, mechanic_scope=PARTS)
    train(model, optimizer)
    assert list(tuner(optimizer).scopes) == ["text", "unet"]


def test_iterates_of_schedule_free_belong_to_their_scopes():
    schedulefree = pytest.importorskip("schedulefree")
    one, two = Model(), Model()
    scoped = mechanize(schedulefree.AdamWScheduleFree(one.groups(), lr=1.0), scope="group")
    apart = [mechanize(schedulefree.AdamWScheduleFree([group], lr=1.0)) for group in two.groups()]
    for _ in range(3):
        for optimizer in (scoped, *apart):
            optimizer.train()
        train(one, scoped, steps=15)
        train(two, *apart, steps=15)
        for optimizer in (scoped, *apart):
            optimizer.eval()
        assert are_equal(one, two)
    for optimizer in (scoped, *apart):
        tuner(optimizer).detach()
    assert torch.equal(scoped.state[one.text.weight]["z"], apart[0].state[two.text.weight]["z"])


class Knowing(SGD):
    """A base that keeps its parameters in an attribute, too."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.known = [param for group in self.param_groups for param in group["params"]]


class Counting(Scaled):
    """A base that counts its steps for all parameters together."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "scope", "reason"),
    [
        (lambda m: LBFGS(m.parameters()), "tensor", "LBFGS has one direction"),
        (lambda m: AdamW(m.parameters()), PARTS, r"Make it from model.named_parameters\(\)"),
        (lambda m: Knowing(m.parameters(), 1.0), "tensor", "knows its parameters by other ways"),
        (lambda m: AdamW(m.parameters()), "layer", "scope must be 'all', 'group'"),
        (lambda m: AdamW(m.parameters()), {}, "scope must be"),
        (lambda m: AdamW(m.parameters()), {"a": 1}, "scope must be"),
        (lambda m: AdamW(m.parameters()), None, "scope must be"),
    ],
)
def test_what_is_refused_is_left_as_it_was(make, scope, reason):
    model = Model()
    plain = make(model)
    before = [dict(group) for group in plain.param_groups]
    with pytest.raises(ValueError, match=reason):
        mechanize(plain, scope=scope)
    assert plain.param_groups == before
    assert type(plain) is type(make(model))


def test_state_for_all_parameters_together_is_refused():
    model = Model()
    optimizer = mechanize(Counting(model.groups()), scope="group")
    with pytest.raises(ValueError, match="keeps state for all parameters together, under 'steps'"):
        train(model, optimizer, steps=3)


def test_a_closure_that_is_asked_twice_is_refused():
    class Twice(Scaled):
        def step(self, closure=None):
            closure()
            return super().step(closure)

    model = Model()
    optimizer = mechanize(Twice(model.groups()), scope="group")
    with pytest.raises(ValueError, match="evaluates its closure several times"):
        optimizer.step(model.loss)


@pytest.mark.parametrize(
    "scope",
    [{"a": "nothing.*"}, {"a": "text.*", "b": "text.*"}, {"rest": "text.*"}],
    ids=["none", "taken", "rest"],
)
def test_patterns_that_say_nothing_are_refused(scope):
    plain = AdamW(Model().named_parameters(), lr=1.0)
    before = [dict(group) for group in plain.param_groups]
    with pytest.raises(ValueError, match=r"no parameter is left for|must not name a part 'rest'"):
        mechanize(plain, scope=scope)
    assert plain.param_groups == before


def test_a_checkpoint_of_divided_groups_is_told_from_one_of_another_model():
    model = Model()
    tensors = mechanize(AdamW(model.named_parameters(), lr=1.0), scope="tensor")
    train(model, tensors)
    other = mechanize(AdamW(model.named_parameters(), lr=1.0))
    with pytest.raises(
        ValueError, match=r"other scopes: it has a scale for text.weight, .*for all"
    ):
        other.load_state_dict(tensors.state_dict())
