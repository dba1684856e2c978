"""`mechanic run`: which optimizers are tuned, when, and that nothing else changes."""

import os
from pathlib import Path

import pytest
from running import Logged, call, write


def test_a_run_is_bit_for_bit_the_script_with_mechanize_written_in(tmp_path: Path) -> None:
    body = """
    {imports}
    model = make_model()
    optimizer = {maker}
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    train(model, optimizer, steps=60, after=scheduler.step)
    print(bits(model))
    """
    plain = "torch.optim.AdamW(model.parameters(), lr=1e-4)"
    write(tmp_path, body.format(imports="", maker=plain))
    by_hand = "from mechanic.torch import mechanize"
    write(tmp_path, body.format(imports=by_hand, maker=f"mechanize({plain})"), name="by_hand.py")

    run = call(tmp_path, "--log", "log", "train.py")
    own = call(tmp_path, "--log", "own", "by_hand.py")

    assert run.stdout == call(tmp_path, "by_hand.py", python=True).stdout == own.stdout
    assert len(run.stdout.split()) == 8 * 16 + 16 + 16 + 1
    assert Logged(tmp_path / "log").found("AdamW")["status"] == "tuned"
    assert Logged(tmp_path / "own").found("AdamW")["status"] == "own"
    scales = [row["scale"] for row in Logged(tmp_path / "log").rows]
    assert len(scales) == 60
    assert max(scales) > 10 * scales[0]
    assert scales == [row["scale"] for row in Logged(tmp_path / "own").rows]


def test_a_dry_run_changes_no_bit(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        train(model, optimizer, after=scheduler.step)
        print(type(optimizer), bits(model), torch.rand(3).tolist())
        """,
    )

    dry = call(tmp_path, "--dry-run", "--log", "log", "train.py")

    assert dry.stdout == call(tmp_path, "train.py", python=True).stdout
    rows = Logged(tmp_path / "log").rows
    assert [row["lr"][0] for row in rows[::10]] == pytest.approx([0.01, 0.001, 0.0001])
    assert {row["scale"] for row in rows} == {None}
    assert "SGD: watched only, 30 steps" in dry.stderr
    assert "to paste" not in dry.stderr


def test_wrappers_are_left_alone_and_what_they_hold_is_tuned_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        from torch.optim import SGD, AdamW, Optimizer

        class Lookahead(Optimizer):
            def __init__(self, inner):
                self.inner = inner
                super().__init__(inner.param_groups, {})
            def step(self):
                self.inner.step()

        class Sharpness(Optimizer):
            def __init__(self, params, base, **options):
                super().__init__(params, options)
                self.base = base(self.param_groups, **options)
            def step(self):
                self.base.step()

        class Chain(Optimizer):
            def __init__(self, *parts):
                self.parts = list(parts)
                super().__init__([p for part in parts for p in part.param_groups], {})
            def step(self):
                for part in self.parts:
                    part.step()

        model = make_model()
        first, second = model[0].parameters(), model[2].parameters()
        wrapped = [
            Lookahead(AdamW(first, lr=0.1)),
            Sharpness(second, SGD, lr=0.1),
        ]
        unused = AdamW(make_model().parameters())
        chained = Chain(AdamW(model[0].parameters()), SGD(model[2].parameters(), lr=0.1))
        train(model, *wrapped)
        train(model, chained)
        print([type(o).__module__ for o in wrapped], type(chained).__module__)
        """,
    )

    result = call(tmp_path, "--log", "log", "train.py")

    assert result.returncode == 0, result.stderr
    assert "mechanic" not in result.stdout
    log = Logged(tmp_path / "log")
    steps = {one["optimizer"]: (one["status"], one["steps"]) for one in log.summary["optimizers"]}
    assert steps == {
        "AdamW": ("tuned", 30), "SGD": ("tuned", 30),
        "AdamW 2": ("tuned", 0), "AdamW 3": ("tuned", 30), "SGD 2": ("tuned", 30),
    }  # fmt: skip
    assert "AdamW 2" not in result.stderr  # made and never stepped: nothing to tell


def test_constructors_copies_and_pickles_stay_what_they_were(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import copy, inspect, io, pickle, traceback

        class Own(torch.optim.AdamW):
            def __init__(self, params, lr=0.3, *, extra=1):
                super().__init__(params, lr=lr)
                self.extra = extra

        print(inspect.signature(torch.optim.AdamW), inspect.signature(Own))
        print(torch.optim.AdamW.__init__)
        model = make_model()
        for wrong in ({"lr": -1.0}, {"nonsense": 1}):
            try:
                Own(model.parameters(), **wrong)
            except (TypeError, ValueError):
                traceback.print_exc()
        optimizer = Own(model.parameters(), extra=2)
        train(model, optimizer)
        copies = [optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        for one in copies:
            assert isinstance(one, Own)
            one.step()
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        fresh = Own(model.parameters())
        fresh.load_state_dict(torch.load(buffer, weights_only=True))
        train(model, fresh, steps=1)
        fresh.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.03})
        train(model, fresh, steps=1)
        """,
    )

    plain = call(tmp_path, "train.py", python=True)
    run = call(tmp_path, "--log", "log", "train.py")

    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == plain.stdout.splitlines()[0]
    assert "<function AdamW.__init__" in run.stdout
    assert run.stderr.startswith(plain.stderr)  # the tracebacks: no frame of ours
    assert "Invalid learning rate" in plain.stderr
    assert "unexpected keyword argument" in plain.stderr
    log = Logged(tmp_path / "log")
    resumed = log.of("Own 4")
    assert resumed[0]["scale"] > 10 * log.of("Own")[0]["scale"]  # it went on, not anew
    assert [len(row["lr"]) for row in resumed] == [1, 2]
    assert resumed[1]["effective_lr"][1] == pytest.approx(0.03 * resumed[1]["scale"])
    assert {one["status"] for one in log.summary["optimizers"]} == {"tuned"}


def test_resuming_from_a_checkpoint_goes_on_bitwise(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        def make():
            model = make_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=40)

        whole, optimizer, scheduler = make()
        train(whole, optimizer, steps=40, after=scheduler.step)

        half, optimizer, scheduler = make()
        train(half, optimizer, steps=20, after=scheduler.step)
        torch.save([part.state_dict() for part in (half, optimizer, scheduler)], "checkpoint.pt")
        parts = make()
        for part, state in zip(parts, torch.load("checkpoint.pt", weights_only=True)):
            part.load_state_dict(state)
        resumed, optimizer, scheduler = parts
        train(resumed, optimizer, steps=20, after=scheduler.step)
        print(bits(whole) == bits(resumed))
        """,
    )

    run = call(tmp_path, "--log", "log", "train.py")

    assert run.stdout == "True\n", run.stderr
    log = Logged(tmp_path / "log")
    halves = [row["scale"] for row in log.of("AdamW 2") + log.of("AdamW 3")]
    assert halves == [row["scale"] for row in log.of("AdamW")]


def test_a_script_that_mechanizes_gets_what_it_asks_for(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        from mechanic.torch import mechanize, tuner
        model = make_model()
        plain = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 10)
        optimizer = mechanize(plain, preset="paper", max_scale=0.25)
        assert optimizer is plain
        made = mechanize(torch.optim.AdamW)(make_model().parameters(), lr=1.0)
        train(model, optimizer, made, after=scheduler.step)
        assert optimizer._options.preset == "paper" and made._options.preset == "default"
        try:
            mechanize(optimizer)
        except ValueError as error:
            print(error)
        learned = tuner(optimizer).detach()
        assert type(learned) is torch.optim.SGD
        train(model, learned, steps=2)
        """,
    )

    result = call(tmp_path, "--preset", "optax", "--log", "log", "train.py")

    assert result.returncode == 0, result.stderr
    assert "is mechanized already" in result.stdout
    log = Logged(tmp_path / "log")
    assert [one["status"] for one in log.summary["optimizers"]] == ["own", "own"]
    assert log.of("SGD")[1]["scale"] == pytest.approx(1e-8)  # the paper's start
    assert [row["scale"] for row in log.of("SGD")][-2:] == [None, None]  # detached


def test_only_skip_freeze_after_and_the_tuners_options(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        model = make_model()
        first = torch.optim.AdamW(model[0].parameters(), lr=1.0)
        second = torch.optim.SGD(model[2].parameters(), lr=0.02)
        third = torch.optim.Adam(make_model().parameters(), lr=0.03)
        train(model, first, second, third)
        print(type(first).__module__, type(second).__module__, type(third).__module__)
        """,
    )

    only = call(
        tmp_path, "--only", "SGD,Lion", "--only", "Adam*", "--skip", "AdamW",
        "--freeze-after", "12", "--max-scale", "0.0008", "--s-init", "1e-3", "--betas", "0.9,0.99",
        "--log", "log", "train.py",
    )  # fmt: skip

    assert only.stdout.split() == ["torch.optim.adamw", "mechanic.torch", "mechanic.torch"]
    log = Logged(tmp_path / "log")
    assert log.found("AdamW")["status"] == "left"
    assert len({row["scale"] for row in log.of("SGD")[:12]}) > 1
    assert len({row["scale"] for row in log.of("SGD")[11:]}) == 1  # frozen
    assert max(row["scale"] for row in log.rows if row["scale"]) == pytest.approx(0.0008)
    assert "hit its cap of 0.0008" in only.stderr.replace("\n   ", "")
    assert {len(row["scales"]) for row in log.of("SGD")} == {2}
    assert "--only Lion matched no optimizer" in only.stderr
    assert "AdamW: left alone (--skip), 30 steps" in only.stderr


def test_what_mechanize_refuses_stays_plain_and_is_told(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        class Replaced(torch.optim.SGD):
            def __init__(self, params, lr):
                super().__init__(params, lr)
                self.step = self.other_step
            def other_step(self):
                return type(self).step(self)

        model = make_model()
        train(model, Replaced(model.parameters(), 0.01))
        print(len(bits(model)) > 0)
        """,
    )

    run = call(tmp_path, "train.py")

    assert run.stdout == "True\n"
    assert "Replaced: not tuned, 30 steps" in run.stderr
    assert "was replaced on the instance" in " ".join(run.stderr.split())


def test_any_error_of_mechanize_leaves_the_script_plain_and_is_told(tmp_path: Path) -> None:
    """Also one that nobody has foreseen."""
    write(
        tmp_path,
        """
        class Strange(torch.optim.SGD):
            error = TypeError("no attributes of others here")
            def __setattr__(self, name, value):
                if name == "_mechanic":
                    raise self.error
                super().__setattr__(name, value)

        class Ends(Strange):
            error = SystemExit(7)

        class Lacks(Strange):
            error = KeyError("own")

        for kind in (Strange, Ends, Lacks):
            model = make_model()
            optimizer = kind(model.parameters(), 0.01)
            print(type(optimizer) is kind)
            train(model, optimizer)
        """,
    )

    run = call(tmp_path, "train.py")

    assert run.returncode == 0, run.stderr
    assert run.stdout == "True\n" * 3
    said = " ".join(run.stderr.split())
    for name, reason in (
        ("Strange", "TypeError: no attributes of others here"),
        ("Ends", "SystemExit: 7"),
        ("Lacks", "KeyError: 'own'"),
    ):
        assert f"{name}: not tuned, 30 steps" in said
        assert reason in said


@pytest.mark.nightly
def test_an_optimizer_without_a_learning_rate_of_its_own(tmp_path: Path) -> None:
    """Its group has lr=None (transformers' Adafactor), and what is learned is told all the same."""
    write(
        tmp_path,
        """
        class OwnRate(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {"lr": None})
            def step(self):
                for group in self.param_groups:
                    for param in group["params"]:
                        param.data.add_(param.grad, alpha=-1e-3)

        model = make_model()
        train(model, OwnRate(model.parameters()), steps=60)
        print("trained")
        """,
    )

    run = call(tmp_path, "--log", "log", "train.py")

    assert run.returncode == 0, run.stderr
    assert run.stdout == "trained\n"
    assert "OwnRate: tuned, 60 steps" in run.stderr
    assert "nan" not in run.stderr
    assert all(row["effective_lr"][0] > 0 for row in Logged(tmp_path / "log").of("OwnRate")[5:])


@pytest.mark.nightly
def test_bases_closures_tensors_and_compiled_steps(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        from torch.optim import LBFGS, SGD, AdamW

        def closed(model, optimizer):
            def closure():
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                return loss
            for _ in range(20):
                optimizer.step(closure)

        model = make_model()
        closed(model, LBFGS(model.parameters(), lr=0.1))
        model = make_model()
        train(model, AdamW(model.parameters(), lr=torch.tensor(0.01)), steps=20)
        model = make_model()
        optimizer = SGD(model.parameters(), lr=0.01, fused=True)
        compiled = torch.compile(optimizer.step, backend="eager")
        for _ in range(20):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            compiled()
        """,
    )

    run = call(tmp_path, "--log", "log", "train.py")

    assert run.returncode == 0, run.stderr
    log = Logged(tmp_path / "log")
    for name in ("LBFGS", "AdamW", "SGD"):
        rows = log.of(name)
        assert [row["step"] for row in rows] == list(range(1, 21))
        assert rows[-1]["scale"] > 2 * rows[0]["scale"]
    assert log.of("AdamW")[3]["lr"] == [pytest.approx(0.01)]


def test_the_users_own_sitecustomize_runs_and_imports_stay_as_they_are(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    write(theirs, "import builtins; builtins.theirs = 1", name="sitecustomize.py", training=False)
    write(
        tmp_path,
        """
        import sys
        print(theirs, "torch" in sys.modules, "mechanic" in sys.modules)
        print(any("inject" in entry for entry in sys.path), sys.path[0])
        import sitecustomize
        print(sitecustomize.__file__)
        """,
        training=False,
    )

    path = os.pathsep.join(filter(None, (str(theirs), os.environ.get("PYTHONPATH"))))
    run = call(tmp_path, "train.py", PYTHONPATH=path)

    plain = call(tmp_path, "train.py", python=True, PYTHONPATH=path)
    assert run.stdout == plain.stdout
    assert run.stdout.startswith("1 False False\nFalse")
