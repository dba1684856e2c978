"""The doctor: each cause is named in a real run that has it, and healthy runs are not accused."""

import json
import math
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Logged, call, write
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from mechanic.cli import main
from mechanic.run import advice, doctor
from mechanic.run.rows import HistoryRow
from mechanic.run.spool import History
from mechanic.torch import mechanize, tuner

# One optimizer for each cause, of a class that bears its name.
SICK = """
import copy

from mechanic.torch import mechanize

model = make_model()


def fit(kind, factor=lambda step: 1.0, *, steps=60, base=torch.optim.SGD, lr=0.1, options=None):
    own = make_model()
    optimizer = type(kind, (base,), {})(own.parameters(), lr=lr)
    if options:
        mechanize(optimizer, **options)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        (factor(step) * nn.functional.mse_loss(own(inputs), targets)).backward()
        optimizer.step()


class Strangers(torch.optim.SGD): pass
class Unbounded(torch.optim.SGD): pass
class Against(torch.optim.SGD): pass

strangers = Strangers(copy.deepcopy(model).parameters(), lr=0.1)
train(model, strangers, steps=40)
fit("Zeros", lambda step: 0.0)
fit("Decayed", lambda step: 0.0, base=torch.optim.AdamW)
fit("Still", lr=0.0)
fit("Spike", lambda step: 1e6 if step == 40 else 1.0, steps=100)
fit("Ramping", steps=40, options={"s_init": 1e-20})
fit("Capped", steps=60, options={"max_scale": 1e-2})
fit("Ending", lambda step: float("nan") if step == 7 or step > 40 else 1.0)
fit("Middle", lambda step: float("nan") if 1100 < step <= 1200 else 1.0, steps=1500)
fit("Short", steps=20)
fit("Early", lambda step: float("nan") if step > 1 else 1.0)
own = make_model()
unbounded = Unbounded(own.parameters(), lr=0.1)
for _ in range(60):
    unbounded.zero_grad()
    (-sum(p.sum() for p in own.parameters())).backward()
    unbounded.step()
weights = nn.Parameter(torch.randn(100))
first, against = weights.detach().clone(), Against([weights], lr=0.1)
for step in range(60):
    against.zero_grad()
    (weights.sum() if step == 0 else (weights - first).norm()).backward()
    against.step()
"""

CAUSES = {
    "Strangers": "40 steps ! the scale stayed at 0: no step had a gradient. Either the optimizer "
    "does not hold the model's parameters",
    "Zeros": "60 steps ! nothing was learned: every gradient was exactly 0",
    "Decayed": "60 steps ! nothing was learned: every gradient was exactly 0",
    "Still": "60 steps ! the weights did not move: the lr was 0 in every step",
    "Spike": "100 steps ! the scale stalled: around step 4",
    "Ramping": "40 steps ! the lr in force was still growing at the end",
    "Capped": "60 steps ! the scale hit its cap of 0.01 at step",
    "Ending": "60 steps ! 21 of 60 steps were skipped for NaN or inf in the gradients or in the "
    "update, the first at step 7 and the last at step 60; the weights have "
    "not moved in the last 20 steps. Look",
    "Middle": "1,500 steps ! 100 of 1,500 steps were skipped for NaN or inf in the gradients or in "
    "the update, the first by step 1,110 and the last by step 1,200. Look",
    "Early": "60 steps ! 59 of 60 steps were skipped for NaN or inf in the gradients or in the "
    "update, the first at step 2 and the last at step 60; the weights have "
    "not moved in the last 59 steps. Look",
    "Short": "20 steps ! only 20 steps: too few",
    "Against": "60 steps ! the scale never grew",
    "Unbounded": "60 steps ! the lr in force exploded",
}


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The log of a run with all causes, and its summary."""
    folder = tmp_path_factory.mktemp("sick")
    write(folder, SICK)
    run = call(folder, "--log", "log", "train.py")
    assert run.returncode == 0, run.stderr
    return folder / "log", run.stderr


def flat(text: str) -> str:
    return " ".join(text.split())


def said_of(text: str, label: str) -> str:
    """The part of a text that is about one optimizer, in one line."""
    return flat(re.split(r"^(?=\w+: )", text.split(f"{label}: ", 1)[1], flags=re.MULTILINE)[0])


@pytest.mark.parametrize("label", CAUSES)
def test_each_cause_is_named(sick: tuple[Path, str], label: str, capsys) -> None:
    assert main(["doctor", str(sick[0])]) == 1
    said = said_of(capsys.readouterr().out, label)
    assert said.startswith(CAUSES[label])
    assert said.count("!") == 1  # and no other


@pytest.mark.parametrize("label", CAUSES)
def test_the_summary_of_the_run_says_the_same(sick: tuple[Path, str], label: str) -> None:
    folder, summary = sick
    (history,) = (one for one in doctor.load(folder) if one.label == label)
    said = list(advice.analyze(history).warnings)
    found = Logged(folder).found(label)
    assert said == found["warnings"]
    is_of_use = label in ("Ramping", "Capped", "Ending", "Middle")
    assert len(found["suggested"]) == is_of_use  # no lr to paste from a run that failed
    assert len(advice.analyze(history).suggested) == is_of_use
    assert all(flat(text) in flat(summary) for text in said)


HEALTHY = """
model, other, third, fourth, fifth, sixth = (make_model() for _ in range(6))
noisy = torch.Generator().manual_seed(0)


class Warmed(torch.optim.AdamW): pass
class Constant(torch.optim.AdamW): pass
class Clipped(torch.optim.SGD): pass
class Slow(torch.optim.AdamW): pass

for own, optimizer, make_schedule in (
    (model, torch.optim.AdamW(model.parameters(), lr=1e-4), "CosineAnnealingLR"),
    (other, torch.optim.SGD(other.parameters(), lr=10.0, momentum=0.9), "CosineAnnealingLR"),
    (third, Warmed(third.parameters(), lr=1.0), "OneCycleLR"),
    (fifth, Clipped(fifth.parameters(), lr=1.0), "CosineAnnealingLR"),
    (sixth, Slow(sixth.parameters(), lr=1.0), "LambdaLR"),
    (fourth, Constant(fourth.parameters(), lr=1.0), "ConstantLR"),
):
    options = {
        "CosineAnnealingLR": {"T_max": 300},
        "OneCycleLR": {"max_lr": 1.0, "total_steps": 301},
        "ConstantLR": {"factor": 1.0},
        "LambdaLR": {"lr_lambda": lambda step: 10 ** min(0.0, step / 25 - 6)},
    }[make_schedule]
    scheduler = getattr(torch.optim.lr_scheduler, make_schedule)(optimizer, **options)
    for step in range(300):
        chosen = torch.randint(64, (16,), generator=noisy)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(own(inputs[chosen]), targets[chosen])
        ((1e6 if own is fifth and step == 150 else 1.0) * loss).backward()
        if own is fifth:  # the advice on a scale that stalled
            torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    print(loss.item())
"""


def test_a_healthy_run_is_not_accused(tmp_path: Path, capsys) -> None:
    write(tmp_path, HEALTHY)
    run = call(tmp_path, "--log", "log", "train.py")
    assert all(float(loss) < 0.5 for loss in run.stdout.split()), run.stdout  # it has learned
    scales = [row["scale"] for row in Logged(tmp_path / "log").of("Slow")]
    assert sorted(scales)[-20] > 1000 * max(
        scales[225:]
    )  # in a warm-up the scale falls, and is healthy

    assert main(["doctor", str(tmp_path / "log")]) == 0

    said = capsys.readouterr().out
    for label in ("AdamW", "SGD", "Warmed", "Clipped", "Slow"):
        assert re.fullmatch(
            r"300 steps, healthy: nothing looks wrong; to paste: \w*lr=\S+", said_of(said, label)
        )
    assert "hint: the lr was constant. A schedule that falls" in said_of(said, "Constant")
    assert said.count("\n") == 8


# -- What it is given ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is damaged in")
def test_a_folder_without_a_log_is_refused(tmp_path: Path, capsys) -> None:
    empty, damaged, locked = (tmp_path / name for name in ("empty", "damaged", "locked"))
    for folder in (empty, damaged, locked):
        folder.mkdir()
    (damaged / "history.jsonl").write_bytes(b"\x00\xff not json\n{")
    (locked / "history.jsonl").write_bytes(b"")
    cases = {
        tmp_path / "nowhere": "there is no history.jsonl in",
        empty: "there is no history.jsonl in",
        damaged: "is empty or damaged, so there is nothing to diagnose. Run the script again",
        locked: "is empty or damaged",
    }
    for folder, message in cases.items():
        with pytest.raises(SystemExit) as stopped:
            main(["doctor", str(folder)])
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert said.startswith("mechanic doctor: ")
        assert message in said
        assert str(folder) in said


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "the script made no torch optimizer"),
        ([("AdamW", "tuned", "")], "no optimizer took a step. The script made: AdamW."),
        ([("Odd", "refused", "it is odd.")], "no optimizer took a step. The script made: Odd."),
    ],
)
def test_a_run_without_a_step_is_no_healthy_one(
    lines: list[tuple[str, str, str]], said: str, tmp_path: Path, capsys
) -> None:
    events: list[dict[str, Any]] = [{"event": "start"}]
    for name, status, reason in lines:
        about = {"class": name, "status": status, "reason": reason, "is_relative": True}
        own = {"event": "optimizer", "optimizer": name, "max_scale": None, "groups": []}
        events.append(own | about)
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    assert main(["doctor", str(tmp_path)]) == 1
    assert said in flat(capsys.readouterr().out)


@pytest.mark.nightly
def test_a_run_that_was_only_watched_has_nothing_to_diagnose(tmp_path: Path, capsys) -> None:
    write(tmp_path, "model = make_model(); train(model, torch.optim.SGD(model.parameters(), 0.1))")
    assert call(tmp_path, "--dry-run", "--log", "log", "train.py").returncode == 0
    assert main(["doctor", str(tmp_path / "log")]) == 0
    assert capsys.readouterr().out == "SGD: 30 steps, not tuned, so there is nothing to diagnose\n"


def test_a_damaged_log_is_judged_by_what_is_left_of_it(
    sick: tuple[Path, str], tmp_path: Path
) -> None:
    whole = (sick[0] / "history.jsonl").read_bytes()
    path = tmp_path / "history.jsonl"
    for seed in range(20):
        draw, data = random.Random(seed), bytearray(whole)
        for _ in range(draw.randrange(1, 400)):
            place = draw.randrange(len(data))
            if draw.random() < 0.5:
                data[place] ^= 1 << draw.randrange(8)
            else:
                del data[place : place + draw.randrange(1, 200)]
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            text, is_healthy = doctor.diagnose(doctor.load(tmp_path))
        assert not is_healthy
        assert "exploded" in text
    lines = whole.splitlines(keepends=True)  # without all that is not a step
    path.write_bytes(b"".join(line for line in lines if b'"event"' not in line))
    text, _ = doctor.diagnose(doctor.load(tmp_path))
    assert said_of(text, "Spike").startswith(CAUSES["Spike"])
    path.write_bytes(whole[: len(whole) // 2])  # killed in the middle of a line
    assert "Strangers: 40 steps" in doctor.diagnose(doctor.load(tmp_path))[0]


def test_a_log_without_the_mean_of_the_scale_has_no_lr_to_paste(tmp_path: Path, capsys) -> None:
    rates = {"lr": 0.1, "initial_lr": None, "max_lr": None}
    about = {"class": "SGD", "status": "tuned", "reason": "", "max_scale": None, "groups": [rates]}
    lines: list[dict[str, Any]] = [{"event": "optimizer", "optimizer": "SGD", **about}]
    for step in range(1, 101):
        scale = 1e-4 * 2 ** min(step, 10)
        numbers = {"scale": scale, "effective_lr": [0.1 * scale], "lr": [0.1]}
        lines.append({"step": step, "optimizer": "SGD", **numbers})
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert main(["doctor", str(tmp_path)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "SGD: 100 steps, healthy: nothing looks wrong"


# -- The handle ------------------------------------------------------------------------------------


Factor = Callable[[int], float]
MAKE: dict[str, Callable[..., Optimizer]] = {
    "AdamW": AdamW,
    "SGD": SGD,
    "momentum": lambda params, lr: SGD(params, lr=lr, momentum=0.9),
}


def fit(
    make: Callable[..., Optimizer],
    factor: Factor = lambda _: 1.0,
    *,
    steps: int = 60,
    lr: float = 1.0,
    **options: Any,
) -> Optimizer:
    """A mechanized optimizer after so many steps of a regression, with its loss times a factor."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    targets = inputs @ torch.randn(8, 1) + 0.1 * torch.randn(64, 1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = mechanize(make(model.parameters(), lr=lr), **options)
    for step in range(1, steps + 1):
        chosen = torch.randint(64, (16,))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[chosen]), targets[chosen])
        (factor(step) * loss).backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", MAKE)
def test_a_healthy_tuner_says_so(name: str) -> None:
    optimizer = fit(MAKE[name], steps=300)
    said = tuner(optimizer).diagnose()
    assert said == f"healthy: nothing looks wrong, and the scale is {tuner(optimizer).scale:.3g}"


def test_a_model_that_dies_in_its_ramp_is_not_growing() -> None:
    weights = nn.Parameter(torch.ones(50))
    optimizer = mechanize(SGD([weights], lr=1.0))
    for step in range(60):
        weights.grad = torch.full((50,), float(step < 2))
        optimizer.step()
    assert "the scale never grew" in tuner(optimizer).diagnose()


def test_a_new_ramp_is_neither_without_gradients_nor_one_that_never_grew() -> None:
    optimizer = fit(MAKE["AdamW"], steps=60)
    added = nn.Parameter(torch.ones(400))
    optimizer.add_param_group({"params": [added], "lr": 1.0})
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        param.grad = torch.ones_like(param)
    for _ in range(3):
        optimizer.step()
        assert "the lr in force was still growing" in tuner(optimizer).diagnose()


@pytest.mark.filterwarnings("ignore:mechanic. the last")
@pytest.mark.parametrize(
    ("said", "settings"),
    [
        ("nothing to say yet: no step was taken, or none that had a gradient", {"steps": 0}),
        ("nothing was learned: every gradient was exactly 0", {"factor": lambda _: 0.0}),
        ("the weights did not move: the lr was 0 in every step", {"lr": 0.0}),
        ("only 20 steps: too few", {"steps": 20}),
        ("the scale hit its cap of 0.001, and is there now", {"max_scale": 1e-3}),
        ("the lr in force was still growing", {"s_init": 1e-30, "steps": 40}),
        (
            "21 of 60 steps were skipped for NaN or inf in the gradients or in the update; the "
            "weights have not moved in the last 20 steps",
            {"factor": lambda step: math.nan if step == 7 or step > 40 else 1.0},
        ),
        (
            "59 of 60 steps were skipped",
            {"factor": lambda step: math.inf if step > 1 else 1.0},
        ),
        ("60 of 60 steps were skipped", {"factor": lambda _: math.inf}),
    ],
)
@pytest.mark.parametrize("name", MAKE)
def test_a_tuner_names_each_cause(name: str, said: str, settings: dict[str, Any]) -> None:
    found = tuner(fit(MAKE[name], **settings)).diagnose().splitlines()
    assert len(found) == 1
    assert found[0].startswith(said)


def test_a_tuner_knows_a_start_that_it_never_left_and_one_far_behind() -> None:
    torch.manual_seed(0)
    first = torch.randn(100)
    back, endless = (nn.Parameter(first.clone()) for _ in range(2))
    losses: dict[Tensor, Callable[[int], Tensor]] = {
        back: lambda step: (back - first).norm() if step else back.sum(),
        endless: lambda _: endless.sum(),
    }
    said = []
    for weights, loss in losses.items():
        optimizer = mechanize(SGD([weights], lr=1.0))
        scales = set()
        for step in range(60):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
            scales.add(float(tuner(optimizer).scale))
        assert len(scales) > 20
        said.append(tuner(optimizer).diagnose())
    assert said[0].startswith("the scale never grew")
    assert said[1].startswith("the lr in force exploded")


def test_a_held_scale_is_not_judged() -> None:
    optimizer = fit(AdamW, steps=2)
    tuner(optimizer).freeze()
    (param, *_) = optimizer.param_groups[0]["params"]
    for _ in range(40):
        param.grad = torch.randn_like(param)
        optimizer.step()
    assert tuner(optimizer).diagnose().startswith("healthy")


def test_a_schedule_that_falls_in_the_ramp_is_no_reason_to_train_longer() -> None:
    """The scale grows to make up for it."""
    weights = nn.Parameter(torch.ones(50))
    optimizer = mechanize(SGD([weights], lr=1.0))
    schedule = StepLR(optimizer, 10, gamma=0.1)
    for _ in range(40):
        weights.grad = torch.ones(50)
        optimizer.step()
        schedule.step()
    said = tuner(optimizer).diagnose()
    assert "still growing" not in said
    assert float(tuner(optimizer).scale) > 1


@pytest.mark.filterwarnings("ignore:mechanic. the last")
def test_what_a_divergence_leads_to_does_not_hide_it() -> None:
    """Where the weights run away, steps are skipped in the end."""
    weights = nn.Parameter(torch.ones(50))
    optimizer = mechanize(SGD([weights], lr=1.0, maximize=True))
    for _ in range(300):
        weights.grad = weights.detach().clamp(-1e20, 1e20)
        optimizer.step()
    assert tuner(optimizer).metrics()["skipped"] > 100
    assert tuner(optimizer).diagnose().startswith("the lr in force exploded")


def test_a_single_edit_is_told() -> None:
    optimizer = fit(AdamW, steps=100)
    (param, *_) = optimizer.param_groups[0]["params"]
    for step in range(20):
        param.grad = torch.randn_like(param)
        optimizer.step()
        if step == 10:
            param.data.mul_(0.5)
    lines = tuner(optimizer).diagnose().splitlines()
    assert lines[0].startswith("healthy")
    assert "has changed the weights between two steps" in lines[1]


def test_a_scale_that_came_down_again_in_noise_never_grew() -> None:
    scales = [1e-4 * 2**n for n in range(5)] + 20 * [1e-3] + 100 * [1.2e-4]
    rows = [HistoryRow(n, 0.0, s, 1e-4, 0, (1.0,), ()) for n, s in enumerate(scales, 1)]
    found = advice.analyze(History("SGD", 1, "SGD", "tuned", rows=rows, is_relative=True))
    assert "the scale never grew" in found.warnings[0]
    assert not found.suggested


# -- What is not seen in a few rows ----------------------------------------------------------------


def test_skipped_steps_of_a_run_before_a_checkpoint_are_not_counted() -> None:
    rows = [HistoryRow(n, 0.0, 0.1 + 0.001 * n, 0.1, 70, (1.0,), ()) for n in range(1, 41)]
    resumed = History("SGD", 1, "SGD", "tuned", rows=rows, resumed=True)
    assert advice.analyze(resumed).warnings == ()
    assert advice.analyze(resumed).skipped == 0
    resumed.rows[-1] = rows[-1]._replace(skipped=71)
    assert advice.analyze(resumed).warnings[0].startswith("1 of 40 steps were skipped")


def test_a_few_skipped_steps_are_no_fault() -> None:
    """GradScaler tries a larger scale from time to time."""
    ramp = [1e-4 * 2**n for n in range(10)] + 190 * [0.1]
    rows = [HistoryRow(n, 0.0, s, 0.1, n // 100, (1.0,), ()) for n, s in enumerate(ramp, 1)]
    found = advice.analyze(History("SGD", 1, "SGD", "tuned", rows=rows[:-1]))
    assert found.warnings == ()
    assert "1 of 199 steps were skipped" in found.hints[0]


# -- Weights that someone else changes between two steps -------------------------------------------


def go(
    make: Callable[..., Optimizer], between: Callable[[int, Tensor], None]
) -> tuple[Tensor, Tensor, list[float]]:
    """The weights, their displacement and the scales of 40 steps whose gradients are given."""
    draw = torch.Generator().manual_seed(0)
    weights = nn.Parameter(torch.randn(50, dtype=torch.float64, generator=draw))
    optimizer = mechanize(make([weights], lr=1.0))
    slope, scales = torch.randn(50, dtype=torch.float64, generator=draw), []
    for step in range(40):
        with torch.no_grad():
            between(step, weights)
        sign = 1 if step < 15 or step % 2 else -1
        noise = torch.randn(50, dtype=torch.float64, generator=draw)
        weights.grad = sign * slope + 0.5 * noise
        optimizer.step()
        scales.append(float(tuner(optimizer).scale))
    return weights.detach(), optimizer.state[weights]["mechanic_displacement"], scales


BASES: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda params, lr: AdamW(params, lr=lr, weight_decay=0.0),
    "fused": lambda params, lr: AdamW(params, lr=lr, weight_decay=0.0, fused=True),
    "SGD": SGD,
    "momentum": MAKE["momentum"],
}


@pytest.mark.parametrize("name", BASES)
def test_an_edit_between_two_steps_stays_and_changes_nothing_else(name: str) -> None:
    def edit(step: int, weights: Tensor) -> None:
        if step == 20:
            weights += 3.0

    plain, displacement, scales = go(BASES[name], lambda *_: None)
    edited, same, as_before = go(BASES[name], edit)
    assert max(scales) > 10 * scales[0]
    assert len(set(scales[20:])) > 5  # the scale moved after it, too
    assert as_before == scales
    assert torch.equal(same, displacement)
    torch.testing.assert_close(edited, plain + 3.0, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BASES)
def test_averaged_weights_may_be_swapped_in_for_a_look(name: str) -> None:
    """As an EMA does for an evaluation, between any two steps."""
    average: list[Tensor] = []

    def swap(step: int, weights: Tensor) -> None:
        own = weights.clone()
        average.append(own if not average else 0.9 * average[-1] + 0.1 * own)
        weights.copy_(average[-1])
        weights.copy_(own)

    plain, swapped = go(BASES[name], lambda *_: None), go(BASES[name], swap)
    assert max(plain[2]) > 10 * plain[2][0]
    assert torch.equal(swapped[0], plain[0])
    assert torch.equal(swapped[1], plain[1])
    assert swapped[2] == plain[2]
