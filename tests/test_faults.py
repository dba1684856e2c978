"""Things that go wrong: odd gradients, weights that others change, memory that runs out, processes
that are killed, and checkpoints that are damaged. docs/reliability.md lists what is promised.

What else goes wrong is in `test_skipping.py` (NaN and inf), `test_interrupts.py` (Ctrl-C, signals,
threads), `test_refused_checkpoints.py` (another model or tuner) and `test_run_log.py` (a damaged
log).
"""

import copy
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case
from checkpoints import everything, from_bytes, to_bytes
from comparing import assert_same, bits, skipped
from running import MECHANIC, environment, write
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer, RMSprop

from mechanic import cli
from mechanic import tuner as rules
from mechanic.options import Preset
from mechanic.torch import mechanize, tuner, vectors
from mechanic.torch.counts import Counted
from mechanic.torch.scalars import BESIDE_STATE

MAKE: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: SGD(params, lr=1.0),
    "momentum": lambda params: SGD(params, lr=1.0, momentum=0.9),
    "AdamW": lambda params: AdamW(params, lr=1.0),
    "RMSprop": lambda params: RMSprop(params, lr=1.0),
}
each_base = pytest.mark.parametrize("name", MAKE)


class Run:
    """A small model in training, whose gradients depend on the number of the step alone and on
    where the weights are."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype = torch.float32,
        steps: int = 25,
        preset: Preset = "default",
    ) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = [(20, 30), (30,), (7, 3), ()]
        self.params = [nn.Parameter(torch.randn(s, generator=draw).to(dtype)) for s in shapes]
        self.opt: Any = mechanize(MAKE[name](self.params), preset=preset)
        self.at = 0
        self.train(steps)

    def give_gradients(self) -> None:
        draw = torch.Generator().manual_seed(1000 + self.at)
        self.at += 1
        for param in self.params:
            noise = torch.randn(param.shape, generator=draw).to(param.dtype)
            param.grad = param.detach() - 3 + noise

    def train(self, steps: int) -> "Run":
        first = float(tuner(self.opt).scale)
        for _ in range(steps):
            self.give_gradients()
            self.opt.step()
            first = first or float(tuner(self.opt).scale)
        assert steps < 20 or float(tuner(self.opt).scale) != first
        return self

    def fork(self) -> "Run":
        """A copy, gradients included."""
        other = copy.deepcopy(self)
        for param, own in zip(self.params, other.params, strict=True):
            own.grad = None if param.grad is None else param.grad.clone()
        return other

    def all(self) -> list[Tensor]:
        """All that a step writes but for the base's own state."""
        mechanism = self.opt._mechanic
        return [
            *(param.detach().clone() for param in self.params),
            *(self.opt.state[p]["mechanic_displacement"].clone() for p in self.params),
            mechanism.scalars.packed.clone(),
            mechanism.counts.packed.clone(),
        ]


def are_equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


# Gradients


def extreme_steps(name: str, size: float, *, all_of_them: bool) -> Iterator[Run]:
    """Thirty steps; the gradients of all of them, or of one after 25 others, are of this size."""
    run = Run(name, steps=0 if all_of_them else 25)
    for step in range(30):
        run.give_gradients()
        if all_of_them or step == 0:
            for param in run.params:
                param.grad.clamp_(-2, 2).mul_(size)
        run.opt.step()
        yield run


@pytest.mark.parametrize(
    "size",
    [0.0, 1e-45, 1e-30, 1e19, 1e30]
    + [case(size, name=str(size), by_day=False) for size in (1e-40, 1e-19, 1e10)],
)
@pytest.mark.parametrize("all_of_them", [False, True], ids=["one step", "all steps"])
@each_base
def test_finite_gradients_of_any_size_leave_everything_finite(name, size, all_of_them):
    """Denormal ones and those whose squares overflow. No step is skipped, none makes a NaN."""
    if name in ("SGD", "momentum") and all_of_them and size == 1e-45:
        pytest.skip("the scale that they need is above float32's largest number; see below")
    for run in extreme_steps(name, size, all_of_them=all_of_them):
        assert all(value.isfinite().all() for value in run.all())
    assert skipped(run.opt) == 0


@pytest.mark.filterwarnings("ignore:mechanic. ")
@pytest.mark.parametrize("size", [1e38, 1e-45])
@pytest.mark.parametrize("all_of_them", [False, True], ids=["one step", "all steps"])
@each_base
def test_gradients_at_the_ends_of_float32_leave_the_weights_finite(name, size, all_of_them):
    """The largest and the smallest: their steps may be skipped, which a warning tells."""
    for run in extreme_steps(name, size, all_of_them=all_of_them):
        assert all(param.isfinite().all() for param in run.params)
        assert math.isfinite(tuner(run.opt).scale)


def test_a_run_that_met_huge_gradients_is_resumed():
    *_, run = extreme_steps("AdamW", 1e38, all_of_them=False)
    other = Run("AdamW", steps=0)
    for param, own in zip(run.params, other.params, strict=True):
        own.data.copy_(param)
    other.opt.load_state_dict(copy.deepcopy(run.opt.state_dict()))
    other.at = run.at
    run.train(20)
    other.train(20)
    assert are_equal(run.all(), other.all())
    assert all(param.isfinite().all() for param in run.params)


# Weights that others change


@pytest.mark.parametrize("how", ["data", "init", "load_state_dict", "set_"])
@each_base
def test_weights_that_are_overwritten(name, how):
    """However they are: training goes on from there, as if they had been copied to."""
    run = Run(name)
    other = run.fork()
    new = torch.linspace(-1, 1, 600).reshape(20, 30)
    weight, expected = run.params[0], other.params[0]
    if how == "data":
        weight.data = new.clone()
    elif how == "init":
        torch.manual_seed(5)
        nn.init.normal_(weight)
        new = weight.detach().clone()
    elif how == "set_":
        with torch.no_grad():
            weight.set_(new.clone())
    else:
        model = nn.ParameterDict({"w": weight})
        model.load_state_dict({"w": new})
    with torch.no_grad():
        expected.copy_(new)
    assert torch.equal(weight, expected)
    run.train(20)
    assert_same(everything(run.opt), everything(other.train(20).opt))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@each_base
def test_a_model_in_another_dtype_and_back_before_the_next_step(name, dtype):
    """As some codes do to save it: only the weights are rounded."""
    run = Run(name)
    other = run.fork()
    for param, own in zip(run.params, other.params, strict=True):
        param.data = param.data.to(dtype).to(torch.float32)
        with torch.no_grad():
            own.copy_(own.to(dtype))
    assert_same(everything(run.train(20).opt), everything(other.train(20).opt))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@each_base
def test_a_model_that_trains_in_another_dtype_and_comes_back(name, dtype):
    """A base whose state cannot follow fails, as it does alone; the weights stay, and it goes on
    when they are back."""
    run = Run(name)
    for param in run.params:
        param.data = param.data.to(dtype)
        param.grad = None
    run.give_gradients()
    before = [param.detach().clone() for param in run.params]
    try:
        run.opt.step()
        is_moved = True
    except RuntimeError:
        is_moved = False
    assert is_moved or name != "SGD"
    assert are_equal(before, run.params) != is_moved
    assert all(param.dtype is dtype for param in run.params)
    for param in run.params:
        param.data = param.data.to(torch.float32)
        param.grad = None
    distance = sum(float((param.detach() - 3).norm()) for param in run.params)
    run.train(20)
    assert all(value.isfinite().all() for value in run.all())
    assert sum(float((param.detach() - 3).norm()) for param in run.params) < 1.5 * distance


# Memory


ALLOCATING = [
    *("stack", "cat", "zeros_like", "ones_like", "empty_like", "zeros", "tensor", "as_tensor"),
    *("_foreach_add", "_foreach_sub", "_foreach_mul", "_foreach_sqrt", "_foreach_norm"),
    *("_foreach_addcmul", "_foreach_addcmul_", "_foreach_addcdiv_", "_foreach_lerp_", "where"),
    *("_foreach_copy_", "_foreach_mul_", "_foreach_add_", "mul", "dot", "addcmul", "frexp"),
]


@contextmanager
def scarce_memory(at: int, error: Any, *, for_good: bool = False) -> Iterator[list[int]]:
    """The so many-th call that may allocate fails, and with `for_good` all after it as well."""
    count = [0]
    patch = pytest.MonkeyPatch()

    def scarce(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == at or (for_good and 0 < at < count[0]):
                raise error("out of memory")
            return function(*args, **kwargs)

        return call

    for name in ALLOCATING:
        patch.setattr(torch, name, scarce(getattr(torch, name)))
    for name in ("clone", "to"):
        patch.setattr(Tensor, name, scarce(getattr(Tensor, name)))
    try:
        yield count
    finally:
        patch.undo()


def calls_of_a_step(run: Run) -> int:
    """The first step of a process makes some more."""
    for _ in range(2):
        other = run.fork()
        with scarce_memory(0, MemoryError) as count:
            other.opt.step()
    assert count[0] > 20
    return count[0]


@pytest.mark.parametrize(
    "error", [MemoryError, case(torch.OutOfMemoryError, name="of torch", by_day=False)]
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, case(torch.bfloat16, name="bfloat16", by_day=False)], ids=str
)
@each_base
def test_memory_that_runs_out_at_any_call_of_a_step(name, dtype, error, monkeypatch):
    """Everything is before the step or after it, and the next step works."""
    monkeypatch.setattr(vectors, "PIECE", 1 << 8)  # several writes
    run = Run(name, dtype)
    run.give_gradients()
    after = run.fork()
    after.opt.step()
    count = calls_of_a_step(run)
    before, expected = run.all(), after.all()
    was_before = was_after = 0
    for at in range(1, count + 1):
        fresh = run.fork()
        with scarce_memory(at, error), pytest.raises(error):
            fresh.opt.step()
        is_before, is_after = are_equal(fresh.all(), before), are_equal(fresh.all(), expected)
        assert is_before or is_after, f"at call {at} of {count}"
        was_before, was_after = was_before + is_before, was_after + is_after
        fresh.train(2)
        assert not are_equal(fresh.all()[:4], expected[:4])
        assert all(value.isfinite().all() for value in fresh.all())
    assert was_before
    assert was_after


@each_base
def test_memory_that_is_gone_for_good(name, monkeypatch):
    """Each weight is before the step or after it."""
    monkeypatch.setattr(vectors, "PIECE", 1 << 8)
    run = Run(name)
    run.give_gradients()
    after = run.fork()
    after.opt.step()
    count = calls_of_a_step(run)
    for at in range(1, count + 1, 3):
        fresh = run.fork()
        with scarce_memory(at, MemoryError, for_good=True), pytest.raises(MemoryError):
            fresh.opt.step()
        for now, old, new in zip(fresh.params, run.params, after.params, strict=True):
            assert ((now == old) | (now == new)).all(), f"at call {at} of {count}"
        fresh.train(2)
        assert all(value.isfinite().all() for value in fresh.all())


# Closures


@pytest.mark.parametrize("at", [1, 2, case(3, name="3", by_day=False), 5])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_closure_of_lbfgs_that_fails(at, error):
    """At its first evaluation or a later one: the run goes on as if the step had not been tried."""
    ends = []
    for fails in (False, True):
        param = nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64))
        opt = mechanize(LBFGS([param], lr=1.0, max_iter=6))
        evaluations = [0]

        def closure(param=param, opt=opt, evaluations=evaluations) -> Tensor:
            evaluations[0] -= 1
            if evaluations[0] == 0:
                raise error
            opt.zero_grad()
            loss = ((param - 3) ** 4 * torch.linspace(1, 2, 8)).sum()
            loss.backward()
            return loss.detach()

        for step in range(25):
            if fails and step in (0, 3, 20):
                before = everything(opt)
                evaluations[0] = at
                with pytest.raises(error):
                    opt.step(closure)
                assert_same(everything(opt), before)
            opt.step(closure)
        ends.append(everything(opt))
    assert_same(*ends)


# Processes that are killed


SAVES = """
import os, random, signal, sys, time
import torch
from torch import nn
from mechanic.torch import mechanize, tuner

def run(until, save):
    param = nn.Parameter(torch.linspace(-1, 1, 4000))
    opt = mechanize(torch.optim.AdamW([param], lr=1.0))
    at = 0
    if save and os.path.exists("saved.pt"):
        saved = torch.load("saved.pt", weights_only=True)
        opt.load_state_dict(saved["optimizer"])
        at = saved["at"]
        with torch.no_grad():
            param.copy_(saved["param"])
    begun = at
    while at < until:
        draw = torch.Generator().manual_seed(at)
        param.grad = param.detach() - 3 + torch.randn(4000, generator=draw)
        opt.step()
        at += 1
        if save:
            saved = {"optimizer": opt.state_dict(), "param": param.detach(), "at": at}
            torch.save(saved, "next.pt")
            os.replace("next.pt", "saved.pt")
    return begun, float(tuner(opt).scale).hex(), param.detach().double().sum().item().hex()

torch.set_num_threads(1)
clean = run(60, False)
draw, kills, begins, longest = random.Random(0), 0, {0}, 0.02
while True:
    child = os.fork()
    if not child:
        run(60, True)
        os._exit(0)
    time.sleep(draw.uniform(0.1, 1.0) * longest)
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    kills += os.WIFSIGNALED(status)
    found = os.path.exists("saved.pt")
    at = torch.load("saved.pt", weights_only=True)["at"] if found else 0
    longest *= 0.8 if at > max(begins) + 10 else 1.2 if at in begins else 1.0  # on any machine
    begins.add(at)
    if not os.WIFSIGNALED(status) or kills == 200:
        break
print(kills, len(begins), run(60, True)[1:] == clean[1:])
"""


def test_a_process_that_is_killed_while_it_saves(tmp_path):
    """Again and again, where the file is written beside the old one and renamed: there is always a
    checkpoint that loads, and the run ends bit for bit where one that was left alone ends."""
    write(tmp_path, SAVES, name="saves.py", training=False)
    command = [sys.executable, "saves.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    kills, begins, is_same = done.stdout.split()
    assert int(kills) >= 5
    assert int(begins) >= 3
    assert is_same == "True"


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize("count", [1, 12], ids="{} kills".format)
def test_a_log_whose_run_is_killed_can_be_drawn(tmp_path, count, capsys):
    """At moments of chance: every line of the log but the last is whole."""
    body = "model = make_model()\ntrain(model, torch.optim.AdamW(model.parameters()), steps=10**6)"
    write(tmp_path, body)
    draw = random.Random(count)
    for i in range(count):
        log = tmp_path / f"log{i}" / "history.jsonl"
        process = subprocess.Popen(
            [*MECHANIC, "run", "--quiet", "--log", log.parent.name, "train.py"],
            cwd=tmp_path,
            env=environment(),
        )
        end = time.monotonic() + 60
        while not log.exists() or log.stat().st_size < 5000:
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        steps = _whole_lines(log)
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) > 10
        picture = tmp_path / f"{i}.png"
        assert cli.main(["plot", str(log.parent), "-o", str(picture)]) == 0
        assert picture.stat().st_size > 1000


def _whole_lines(path: Path) -> list[int]:
    *lines, rest = path.read_bytes().split(b"\n")
    rows = [json.loads(line) for line in lines]
    if rest:
        with pytest.raises(json.JSONDecodeError):
            json.loads(rest)
    return [row["step"] for row in rows if "event" not in row]


# Checkpoints that are damaged


def refuses(run: Run, saved: Any, *words: str) -> None:
    """An error says what is wrong, and the run goes on as if nothing had been tried."""
    other, before = run.fork(), everything(run.opt)
    with pytest.raises(ValueError, match="checkpoint") as caught:
        run.opt.load_state_dict(saved)
    assert "Nothing was loaded" in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert_same(everything(run.opt), before)
    assert_same(everything(run.train(20).opt), everything(other.train(20).opt))


def damaged(run: Run, damage: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """A checkpoint of the run in whose tuner something has been changed."""
    saved: dict[str, Any] = from_bytes(to_bytes(run.opt.state_dict()))
    for group in saved["param_groups"]:
        group["mechanic"] = dict(group["mechanic"])
        damage(group["mechanic"])
    return saved


LISTS = [name for name in rules.PaperState._fields if name in rules.PER_BETA and name != "beta"]
OWN = [name for name in rules.DefaultState._fields if name not in rules.PER_BETA]
NUMBERS = [*OWN, *BESIDE_STATE]
BAD_NUMBERS: list[Any] = [math.nan, math.inf, -1.0, 10**400, "1.0", None, [1.0], True]
BAD_LISTS: list[Any] = [[math.nan], [-math.inf], [], [0.5, 0.5], ["0.5"], [None], 0.5, "0.5", None]
BAD_COUNTS: list[Any] = [-1, 1.5, math.nan, 1 << 63, "3", None, [3], True]
DAMAGES = [
    *((name, bad) for name in NUMBERS if name != "signal" for bad in BAD_NUMBERS),
    *(("signal", bad) for bad in ("1.0", None, [1.0], True)),
    *((name, bad) for name in LISTS for bad in BAD_LISTS),
    *((name, bad) for name in Counted._fields for bad in BAD_COUNTS),
    *(("lrs", bad) for bad in ([math.nan], [-1.0], ["1"], [None], 1.0, "1", None)),
    *(("frozen", bad) for bad in (1, "True", None, [])),
    *(("share", bad) for bad in (0.0, -0.0)),
]


@pytest.fixture(scope="module")
def trained() -> Run:
    return Run("AdamW")


@pytest.fixture(scope="module")
def trained_by_the_paper() -> Run:
    return Run("AdamW", preset="paper")


@pytest.mark.parametrize("key", [*NUMBERS, *LISTS, *Counted._fields, "lrs", "frozen"])
def test_a_number_that_is_damaged_is_refused(trained, trained_by_the_paper, key):
    """NaN, out of range, of another kind or length: nothing is loaded of any of it."""
    trained = trained_by_the_paper if key in LISTS else trained
    before = everything(trained.opt)
    values = [bad for name, bad in DAMAGES if name == key]
    assert values
    for bad in values:
        saved = damaged(trained, lambda own, bad=bad: own.update({key: bad}))
        with pytest.raises(ValueError, match="checkpoint's tuner is damaged") as caught:
            trained.opt.load_state_dict(saved)
        assert f" {key} must be " in str(caught.value)
        assert "Nothing was loaded" in str(caught.value)
        assert_same(everything(trained.opt), before)
    refuses(trained.fork(), saved, key)


@pytest.mark.parametrize(
    "key", ["top", "scale", "share", "lrs", "frozen", "preset", "beta", "steps"]
)
def test_a_number_that_is_missing_is_refused(trained, key):
    refuses(trained.fork(), damaged(trained, lambda own: own.pop(key)), key, "lacks")


def test_a_number_of_another_version_is_refused(trained):
    saved = damaged(trained, lambda own: own.update(momentum=0.5))
    refuses(trained.fork(), saved, "momentum", "another version")


@pytest.mark.parametrize("value", ["tuner", 3, [1, 2], {"preset": "default"}], ids=str)
def test_something_else_in_place_of_the_tuner_is_refused(trained, value):
    saved = trained.opt.state_dict()
    saved["param_groups"] = [{**group, "mechanic": value} for group in saved["param_groups"]]
    refuses(trained.fork(), saved)


@pytest.mark.parametrize("value", [math.nan, math.inf, "none", None], ids=str)
def test_a_displacement_that_is_damaged_is_refused(trained, value):
    saved = from_bytes(to_bytes(trained.opt.state_dict()))
    own = saved["state"][2]
    if isinstance(value, float):
        own["mechanic_displacement"].view(-1)[-1] = value
    else:
        own["mechanic_displacement"] = value
    refuses(trained.fork(), saved, "displacement", "parameter 2")


@pytest.mark.parametrize("shapes", [[(20, 30)], [(20, 30), (30,), (7, 3), (), (2,)]], ids=len)
def test_the_checkpoint_of_another_model_is_refused(trained, shapes):
    other = mechanize(AdamW([nn.Parameter(torch.ones(shape)) for shape in shapes], lr=1.0))
    refuses(trained.fork(), other.state_dict(), "another model")


def test_a_run_that_goes_on_with_nan_resumes_where_that_is_asked_for():
    """With `skip_nonfinite=False` NaN are nobody's fault."""
    param = nn.Parameter(torch.ones(5))
    opt = mechanize(AdamW([param], lr=1.0), skip_nonfinite=False)
    for value in (1.0, 2.0, math.nan, 1.0):
        param.grad = torch.full((5,), value)
        opt.step()
    assert param.isnan().all()
    saved = from_bytes(to_bytes(opt.state_dict()))
    opt.load_state_dict(saved)
    assert_same(bits(opt.state_dict()), bits(saved))


@pytest.mark.parametrize(
    "count", [60, pytest.param(1500, marks=pytest.mark.nightly)], ids="{} flips".format
)
@pytest.mark.parametrize("how", ["flipped", "cut off"])
def test_a_file_that_is_damaged_is_loaded_as_a_whole_or_not_at_all(trained, how, count):
    """Bits that are flipped anywhere, or an end that is missing. What torch.load can still read is
    refused, or is loaded as a whole."""
    content, draw = to_bytes(trained.opt.state_dict()), random.Random(count)
    run = trained.fork()
    before = everything(run.opt)
    unread = refused = 0
    for _ in range(count):
        data = bytearray(content)
        if how == "flipped":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        else:
            del data[draw.randrange(len(data)) :]
        try:
            saved = from_bytes(bytes(data))
        except Exception:  # whatever torch says of it
            unread += 1
            continue
        try:
            run.opt.load_state_dict(saved)
        except Exception:
            refused += 1
            assert_same(everything(run.opt), before)
            continue
        numbers = run.opt._mechanic.scalars.packed
        assert numbers.isfinite().all()
        run = trained.fork()
    assert unread == count if how == "cut off" else unread + refused < count
    run.train(20)
    assert_same(everything(run.opt), everything(trained.fork().train(20).opt))
