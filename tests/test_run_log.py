"""`mechanic run`: the log folder, the summary, the plots, and what is refused before the start."""

import json
import math
import random
import re
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.pyplot import imread
from running import MECHANIC, Logged, call, environment, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mechanic.cli import main
from mechanic.run import advice, doctor, plot
from mechanic.run.log import Log
from mechanic.run.rows import HistoryRow
from mechanic.run.spool import History


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of a GAN's kind: two optimizers, one of them with two groups and a schedule."""
    folder = tmp_path_factory.mktemp("done")
    write(
        folder,
        """
        model, other = make_model(), make_model()
        groups = [{"params": model[0].parameters(), "lr": 1e-5}, {"params": model[2].parameters()}]
        first = torch.optim.AdamW(groups, lr=1e-4)
        second = torch.optim.SGD(other.parameters(), lr=100.0, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(first, 200)
        for i in range(200):
            train(model, first, steps=1)
            if i == 150:
                other[0].weight.register_hook(lambda grad: grad * float("nan"))
            if i % 2:
                train(other, second, steps=1)
            scheduler.step()
        """,
    )
    run = call(folder, "--log", "runs/x", "--plot", "x.png", "train.py")
    assert run.returncode == 0, run.stderr
    return folder, run.stderr


def test_the_history_has_every_step_with_what_was_learned(done: tuple[Path, str]) -> None:
    log = Logged(done[0] / "runs" / "x")
    start = log.lines[0]
    assert start["event"] == "start"
    assert start["command"] == ["train.py"]
    assert start["versions"].keys() == {"mechanic", "python", "torch"}
    rows = log.of("AdamW")
    assert [row["step"] for row in rows] == list(range(1, 201))
    assert [row["step"] for row in log.of("SGD")] == list(range(1, 101))
    for row in rows:
        assert row["effective_lr"] == pytest.approx([row["scale"] * lr for lr in row["lr"]])
        assert sum(row["scales"]) == pytest.approx(row["scale"])
        assert len(row["scales"]) == 1
        assert "wealth" not in row
    assert rows[0]["lr"] == [1e-5, 1e-4]
    assert rows[100]["lr"][1] == pytest.approx(0.5e-4, rel=0.05)  # the schedule
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    assert log.of("SGD")[-1]["skipped"] == 25


def test_tensorboard_reads_the_events(done: tuple[Path, str]) -> None:
    folder = done[0] / "runs" / "x"
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()["scalars"]
    expected = {"scale", "effective_lr/0", "effective_lr/1", "lr/0", "lr/1", "skipped"}
    assert {tag for tag in tags if tag.startswith("AdamW/")} == {f"AdamW/{t}" for t in expected}
    logged = [row["scale"] for row in Logged(folder).of("AdamW")]
    read = events.Scalars("AdamW/scale")
    assert [event.step for event in read] == list(range(1, 201))
    assert [event.value for event in read] == pytest.approx(logged)


def test_the_summary_says_what_to_type(done: tuple[Path, str]) -> None:
    folder, said = done
    own = said[said.index("mechanic run: train.py: exit code 0") :]
    assert all(len(line) <= 80 for line in own.splitlines())
    adam = Logged(folder / "runs" / "x").found("AdamW")
    low, high = adam["suggested"]
    assert high == pytest.approx(10 * low)
    assert 1e-4 < high < 1
    assert f"lr={low:.3g} (group 0), lr={high:.3g} (group 1)" in " ".join(said.split())
    assert re.search(r"AdamW: tuned, 200 steps\n  lr typed +1e-05, 0\.0001\n", said)
    assert "with its schedule" in said
    assert "25 of 100 steps were skipped for NaN or inf" in said
    rows = Logged(folder / "runs" / "x").of("AdamW")
    scales = [row["scale"] for row in rows]
    applied = sum(row["scale"] * sum(row["lr"]) for row in rows)
    mean = applied / sum(sum(row["lr"]) for row in rows)  # a step counts by its lr
    assert [low, high] == pytest.approx([1e-5 * mean, 1e-4 * mean])
    assert adam["ramp"] == next(i for i, s in enumerate(scales, 1) if s >= mean / 2)
    assert adam["scale"]["final"] == scales[-1]
    assert (adam["scale"]["low"], adam["scale"]["high"]) == (min(scales), max(scales))


def test_runs_are_drawn_together(
    done: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    folder = done[0] / "runs" / "x"
    assert (done[0] / "x.png").read_bytes().startswith(b"\x89PNG")
    torn = tmp_path / "torn"
    torn.mkdir()
    whole = (folder / "history.jsonl").read_text()
    (torn / "history.jsonl").write_text(whole[: len(whole) // 2])  # killed in the middle of a line
    monkeypatch.chdir(tmp_path)

    assert main(["plot", str(folder), "torn", "-o", "both.svg"]) == 0

    assert capsys.readouterr().out == "both.svg\n"
    drawn = (tmp_path / "both.svg").read_text()
    for label in ("x AdamW, group 1", "torn AdamW, group 0", "learned scale", "lr in force"):
        assert f"<!-- {label} -->" in drawn
    x, y = (plot.load(one)[0] for one in (folder, torn))
    assert x.steps == list(range(1, 201))
    assert 5 < len(y.steps) < 200
    assert y.scale == x.scale[: len(y.scale)]


def test_an_old_log_is_drawn(tmp_path: Path) -> None:
    """It has a column `wealth`, which logs no longer have."""
    step = {
        "optimizer": "SGD",
        "effective_lr": [0.2],
        "lr": [0.1],
        "scales": [2.0],
        "wealth": [3.0],
    }
    lines = [{"event": "start"}, *({**step, "step": n, "time": 0.0, "scale": 2.0} for n in (1, 2))]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (curves,) = plot.load(tmp_path)
    assert (curves.label, curves.steps, curves.scale) == ("SGD", [1, 2], [2.0, 2.0])
    assert curves.groups() == [[0.2, 0.2]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "give a script"),
        (["run", "nowhere.py"], "there is no script nowhere.py"),
        (["run", "folder"], "folder is a folder without a __main__.py"),
        (["run", "-m"], "-m needs the name of a module"),
        (["run", "-m", "nowhere.train"], "there is no module nowhere"),
        (["run", "--nonsense", "train.py"], "there is no --nonsense"),
        (["run", "--freeze-after", "soon", "train.py"], "invalid int value: 'soon'"),
        (["run", "--freeze-after", "0", "train.py"], "--freeze-after must be at least 1, got 0"),
        (["run", "--nproc", "-1", "train.py"], "--nproc must be at least 1, got -1"),
        (["run", "--preset", "fast", "train.py"], "preset must be one of"),
        (["run", "--s-init", "x", "train.py"], "s_init must be"),
        (["run", "--s-decay=-1", "train.py"], "s_decay must be"),
        (["run", "--betas", "0.9,2", "train.py"], "betas must be"),
        (["run", "--betas", "0.9,x", "train.py"], "betas must be"),
        (["run", "--max-scale", "0", "train.py"], "max_scale must be"),
        (["run", "--log", "folder", "train.py"], "--log folder exists already"),
        (["run", "--log", "train.py/x", "train.py"], "--log train.py/x cannot be written"),
        (["run", "--plot", "nowhere/x.png", "train.py"], "there is no folder nowhere"),
        (["run", "--plot", "x.bmp", "train.py"], "draws .png, .svg or .pdf"),
        (["run", "--log"], "expected one argument"),
        (["plot"], "the following arguments are required"),
        (["plot", "folder"], "there is no history.jsonl in folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2_and_starts_nothing(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path, "open('started', 'w')", training=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    message = capfd.readouterr().err
    assert said in message
    assert len(message.strip().splitlines()) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "train.py"}


@pytest.mark.parametrize(
    ("absent", "arguments", "said"),
    [
        ("torch", ["run", "train.py"], "run: it needs torch: pip install torch\n"),
        (
            "matplotlib",
            ["run", "--plot", "x.png", "train.py"],
            "run: --plot needs matplotlib: pip install matplotlib\n",
        ),
        ("matplotlib", ["plot", "x"], "plot: it needs matplotlib: pip install matplotlib\n"),
        ("optuna rich", ["bench", "--list"], 'needs optuna, rich: pip install ".[torch,bench]"'),
        ("optuna rich numpy tensorboard matplotlib", ["run", "train.py"], ""),
    ],
)
def test_what_is_not_installed_is_named_before_the_start(
    absent: str, arguments: list[str], said: str, tmp_path: Path
) -> None:
    write(tmp_path, "open('started', 'w')", training=False)

    run = call_without(absent, tmp_path, *arguments)

    assert said in run.stderr
    assert len(run.stderr.splitlines()) == 1 or not said
    assert run.returncode == (2 if said else 0)
    assert (tmp_path / "started").exists() == (not said)


def call_without(absent: str, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command line where some packages are not installed."""
    hiding = f"""
        import importlib.util, sys
        from mechanic.cli import main
        find = importlib.util.find_spec
        hidden = {absent.split()!r}
        importlib.util.find_spec = lambda name: None if name in hidden else find(name)
        sys.exit(main(sys.argv[1:]))
        """
    write(folder, hiding, name="hiding.py", training=False)
    return call(folder, "hiding.py", *arguments, python=True)


def test_a_log_is_written_without_tensorboard_too(tmp_path: Path) -> None:
    write(tmp_path, "model = make_model(); train(model, torch.optim.SGD(model.parameters()))")
    run = call_without("tensorboard", tmp_path, "run", "--log", "x", "train.py")
    assert run.returncode == 0, run.stderr
    assert {path.name for path in (tmp_path / "x").iterdir()} == {"history.jsonl", "summary.json"}
    assert len(Logged(tmp_path / "x").of("SGD")) == 30
    assert "hint: TensorBoard's events need tensorboard: pip install tensorboard\n" in run.stderr


def test_the_supervisor_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path, "", training=False)
    code = (
        "import sys; from mechanic.cli import main; main(['run', '--quiet', 'train.py']);"
        "print({'torch', 'numpy', 'matplotlib', 'tensorboard'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert run.stdout == "set()\n"


def make_history(
    scales: list[float], *, lr: float = 1.0, skipped: int = 0, cap: float = math.inf
) -> History:
    made = History("AdamW", 1, "AdamW", "tuned", max_scale=cap)
    made.groups = [{"lr": lr, "initial_lr": None, "max_lr": None}]
    for step, scale in enumerate(scales, 1):
        mean = sum(scales[:step]) / step
        made.rows.append(HistoryRow(step, float(step), scale, mean, skipped, (lr,), (scale,)))
    return made


RAMP = [1e-4 * 2**i for i in range(10)]


@pytest.mark.parametrize(
    ("scales", "options", "warning"),
    [
        (RAMP + 90 * [0.1], {}, None),
        (RAMP + 90 * [0.1], {"cap": 0.1}, "hit its cap of 0.1 at step 11, and ended there"),
        (RAMP + 20 * [0.1] + 70 * [0.05], {"cap": 0.1}, "hit its cap of 0.1 at step 11. The"),
        ([1e-4 * 1.01**i for i in range(100)], {}, "the scale never grew"),
        ([1e-4 * 1.1**i for i in range(100)], {}, "still growing at the end"),
        (RAMP + 90 * [0.1], {"skipped": 60}, "60 of 100 steps were skipped for NaN or inf"),
        (100 * [0.0], {"skipped": 100}, "100 of 100 steps were skipped"),
        (100 * [0.0], {}, "the scale stayed at 0: no step had a gradient"),
        (RAMP, {}, "only 10 steps"),
        (RAMP[:1], {}, "only 1 step:"),
    ],
)
def test_warnings_name_their_cause(scales: list[float], options, warning: str | None) -> None:
    warnings = advice.analyze(make_history(scales, **options)).warnings
    if warning is None:
        assert warnings == ()
    else:
        (said,) = warnings
        assert warning in said


def test_a_scale_that_makes_up_for_a_falling_schedule_is_no_reason_to_train_longer() -> None:
    """What counts is the lr in force."""
    parts = [(step + 0.5) / 100 for step in range(100)]
    falling = [(1 + math.cos(math.pi * part)) / 2 for part in parts]
    scales = RAMP + [0.1 / lr**0.8 for lr in falling[10:]]
    assert scales[-1] > 10 * scales[75]
    made = make_history(scales)
    made.rows = [row._replace(lr=(lr,)) for row, lr in zip(made.rows, falling, strict=True)]
    assert advice.analyze(made).warnings == ()


def test_the_suggestion_is_the_mean_scale_times_the_lr_that_is_typed() -> None:
    found = advice.analyze(make_history([*RAMP, *[0.1, 0.2, 0.3] * 30], lr=0.5))
    assert found.suggested == pytest.approx((0.5 * (sum(RAMP) + 18) / 100,))
    assert found.ramp == 11
    scheduled = make_history([*RAMP, *[0.2] * 90], lr=0.01)
    scheduled.groups = [{"lr": 0.01, "initial_lr": 0.04, "max_lr": 1.0}]  # OneCycleLR's
    found = advice.analyze(scheduled)
    assert (found.typed_name, found.suggested) == (
        "max_lr",
        pytest.approx(((sum(RAMP) + 18) / 100,)),
    )


def test_a_thinned_history_counts_its_steps() -> None:
    made = make_history([1.0] * 1000)
    made.rows += [
        HistoryRow(1000 + 10 * i, 0.0, 5.0, 4.0, 0, (1.0,), (5.0,)) for i in range(1, 201)
    ]
    found = advice.analyze(made)
    assert found.scale is not None
    assert found.scale.median == 5.0  # 2,000 of 3,000 steps, though 200 of 1,200 rows


def test_a_log_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", {"command": ["x"]})
    made = make_history([1.0] * 200)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        log.add(made, [], made.rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.close({"ended": 1.0, "exit_code": 0})
    assert "could not be written to the end" in log.problem
    lines = (tmp_path / "log" / "history.jsonl").read_text().splitlines()
    assert json.loads(lines[-2])["step"] == len(lines) - 2


def test_help_is_for_the_script_after_its_name(tmp_path: Path) -> None:
    write(tmp_path, "import sys; print(sys.argv[1:])", training=False)
    assert call(tmp_path, "--quiet", "train.py", "--help").stdout == "['--help']\n"
    helped = subprocess.run(
        [*MECHANIC, "run", "--help"], env=environment(), capture_output=True, text=True, check=True
    )
    assert "mechanic run [options] (SCRIPT | -m MODULE) [its arguments]" in helped.stdout
    assert "--freeze-after" in helped.stdout


@pytest.mark.nightly
def test_one_that_goes_on_from_a_checkpoint_is_not_said_never_to_have_grown(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        """
        import os

        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        if os.path.exists("saved.pt"):
            saved = torch.load("saved.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, steps=40)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "saved.pt")
        """,
    )
    first, second = (call(tmp_path, "--log", name, "train.py") for name in "ab")
    assert "  ramp " in first.stderr
    assert "it had learned before" in second.stderr
    assert "never grew" not in second.stderr
    rows = [Logged(tmp_path / name).of("AdamW") for name in "ab"]
    assert rows[1][0]["scale"] > 0.5 * rows[0][-1]["scale"] > 0


@pytest.mark.nightly
def test_a_package_of_the_same_name_is_named(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    write(own, "", name="mechanic.py", training=False)
    write(own, "model = make_model()\ntrain(model, torch.optim.SGD(model.parameters(), 0.1))")
    done = call(tmp_path, "own/train.py")
    assert done.returncode == 0
    assert "rename it" in done.stderr
    assert "made no torch optimizer" not in done.stderr


@pytest.mark.parametrize("command", ["run", "bench", "report", "plot"])
def test_help_on_a_terminal_that_knows_no_greek(command: str) -> None:
    run = subprocess.run(
        [*MECHANIC, command, "--help"],
        env=environment(LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii"),
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.isascii()


@given(seed=st.integers(0, 10**6), count=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_a_damaged_history_is_drawn_without_what_is_damaged(done, seed: int, count: int) -> None:
    """Bytes that are flipped, cut out or doubled, anywhere."""
    draw = random.Random(seed)
    data = bytearray((done[0] / "runs" / "x" / "history.jsonl").read_bytes())
    for _ in range(count):
        place = draw.randrange(len(data))
        how = draw.choice(["flip", "cut", "double", "digit"])
        if how == "flip":
            data[place] ^= 1 << draw.randrange(8)
        elif how == "cut":
            del data[place : place + draw.randrange(1, 200)]
        elif how == "digit":
            digits = [i for i, byte in enumerate(data) if 48 <= byte < 58]
            data[draw.choice(digits)] = draw.randrange(48, 58)
        else:
            data[place:place] = data[place : place + draw.randrange(1, 50)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "history.jsonl").write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            curves = plot.load(Path(folder))
        assert curves
        for one in curves:
            assert len(one.steps) == len(one.scale) == len(one.rates)
            one.groups()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for history in doctor.load(Path(folder)):
                doctor.diagnose([history])


def test_a_step_number_that_is_damaged_ends_no_command(done, tmp_path: Path) -> None:
    lines = (done[0] / "runs" / "x" / "history.jsonl").read_text().splitlines()
    row = next(n for n, line in enumerate(lines) if '"scale"' in line)
    lines[row] = re.sub(r'"step": \d+', '"step": 900719925474099300', lines[row])
    (tmp_path / "history.jsonl").write_text("\n".join(lines))
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "x.png")]) == 0
    assert main(["doctor", str(tmp_path)]) in (0, 1)


def test_a_damaged_history_is_told(done, tmp_path: Path) -> None:
    lines = (done[0] / "runs" / "x" / "history.jsonl").read_text().splitlines()
    lines[5] = '{"step": "five"}'
    (tmp_path / "history.jsonl").write_text("\n".join([*lines, '{"step": 9']))
    with pytest.warns(UserWarning, match="damaged in 2 lines, first in line 6"):
        assert main(["plot", str(tmp_path), "-o", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_many_groups_in_one_plot(tmp_path: Path) -> None:
    """Their range is drawn; the figure is not made of its legend."""
    curves = plot.Curves("AdamW")
    for step in range(1, 50):
        curves.add(step, 0.1 * step, [step * (group + 1) for group in range(99)] + [None])
    low, high = plot._range(curves.groups())
    assert low == list(range(1, 50))
    assert high == [99 * step for step in range(1, 50)]
    plot.draw([curves], tmp_path / "many.png")
    assert imread(tmp_path / "many.png").shape[:2] == (960, 1200)


def test_many_optimizers_in_one_plot(tmp_path: Path) -> None:
    """Twelve have names."""
    many = [plot.Curves(f"SGD {i}") for i in range(40)]
    for curves in many:
        for step in range(1, 20):
            curves.add(step, 0.1 * step, [0.1 * step])
    plot.draw(many, tmp_path / "many.png")
    assert imread(tmp_path / "many.png").shape[:2] == (960, 1200)
