"""A step is a transaction: whoever looks at the weights, whenever, sees those before the step or
those after it, and a run that was interrupted goes on."""

import copy
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import mechanic.torch
from mechanic.torch import mechanize, tuner, vectors


@pytest.fixture(autouse=True)
def several_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters are moved in several pieces, as those of a large model are."""
    monkeypatch.setattr(vectors, "PIECE", 1 << 14)


class Unknown(Optimizer):
    """A base that nobody knows: old style, and with a count in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                state = self.state[param]
                mean = state.setdefault("mean", torch.zeros_like(param.data))
                mean.mul_(0.9).add_(param.grad.data)
                param.data.add_(mean.sign(), alpha=-group["lr"])


class Hoarder(Optimizer):
    """A base that keeps the parameters elsewhere, too, and steps those."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.hoard = [param for group in self.param_groups for param in group["params"]]

    def step(self, closure: Any = None) -> None:
        for param in self.hoard:
            mean = self.state[param].setdefault("mean", torch.zeros_like(param.data))
            mean.mul_(0.9).add_(param.grad.data)
            param.data.add_(mean, alpha=-self.param_groups[0]["lr"])


MAKE: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: AdamW(params, lr=1.0),
    "SGD": lambda params: SGD(params, lr=1.0, momentum=0.9),
    "RMSprop": lambda params: RMSprop(params, lr=1.0),
    "Unknown": lambda params: Unknown(params, lr=1.0),
}
IN_PLACE: dict[str, Callable[[Any], Optimizer]] = {
    "Hoarder": lambda params: Hoarder(params, lr=1.0),
    "Schedule-Free": lambda params: AdamWScheduleFree(params, lr=1.0),
}
"""Bases that see the real parameters: a thread may find those where the base has put them."""


ROOMS = Path(mechanic.torch.__file__).parent, Path(torch.optim.__file__).parent, Path(__file__)
TRACED = tuple(str(room) for room in ROOMS)


class Run:
    """A small model with large and small tensors, in training."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = [(200, 200), (200,), (7, 3), ()]
        self.params = [
            nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes
        ]
        self.goal = [param.detach() * 0 + 3 for param in self.params]
        self.draw = torch.Generator().manual_seed(1)
        self.optimizer: Any = mechanize((MAKE | IN_PLACE)[name](self.params))
        if name == "Schedule-Free":
            self.optimizer.train()

    def give_gradients(self) -> None:
        for param, goal in zip(self.params, self.goal, strict=True):
            noise = torch.randn(param.shape, generator=self.draw).to(param.dtype)
            param.grad = param.detach() - goal + noise

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.params]

    def everything(self) -> list[Tensor]:
        """All that a step writes but for the base's own state."""
        stored = [self.optimizer.state[p]["mechanic_displacement"].clone() for p in self.params]
        mechanism = self.optimizer._mechanic
        return [
            *self.weights(),
            *stored,
            mechanism.scalars.packed.clone(),
            mechanism.counts.packed.clone(),
        ]

    def fork(self) -> "Run":
        """A copy, gradients included."""
        other = copy.deepcopy(self)
        for param, own in zip(self.params, other.params, strict=True):
            own.grad = param.grad.clone()
        return other

    def after(self) -> "Run":
        """What a step that is not interrupted comes to."""
        other = self.fork()
        other.optimizer.step()
        return other


def are_equal(these: list[Tensor], those: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


@contextmanager
def interrupted_at(event: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """Act before the so many-th instruction that Python runs in a block. Signal handlers run
    between two instructions, and to count them, where a timer would be left to chance, reaches
    every one. Gives the number of instructions in the files of Mechanic and of the base."""
    count = [0]

    def trace(frame: Any, what: str, _: Any) -> Any:
        if what == "call" and not frame.f_code.co_filename.startswith(TRACED):
            return None
        frame.f_trace_opcodes = True
        if what in ("line", "opcode"):
            count[0] += 1
            if count[0] == event:
                act()
        return trace

    before, records = sys.gettrace(), torch.is_grad_enabled()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 heeds it only if it was set before
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)
        # An interrupt in the last line of torch's own `_use_grad` leaves autograd switched off.
        torch.set_grad_enabled(records)


def trained(name: str, steps: int = 25, dtype: torch.dtype = torch.float32) -> Run:
    run = Run(name, dtype)
    first = 0.0
    for _ in range(steps):
        run.give_gradients()
        run.optimizer.step()
        first = first or float(tuner(run.optimizer).scale)
    assert float(tuner(run.optimizer).scale) > 3 * first
    return run


def press_ctrl_c() -> None:
    raise KeyboardInterrupt


def interrupted(
    run: Run, act: Callable[[Any], object], moments: int, seed: int
) -> Iterator[tuple[Run, str]]:
    """Forks of a run in which Ctrl-C is pressed while their optimizer acts, each at a moment that
    is drawn, and the moment in words."""
    with interrupted_at(-1, press_ctrl_c) as count:
        act(run.fork().optimizer)
    for moment in random.Random(seed).sample(range(1, count[0] + 1), moments):
        fresh = run.fork()
        try:
            with interrupted_at(moment, press_ctrl_c):
                act(fresh.optimizer)
        except KeyboardInterrupt:
            pass
        yield fresh, f"interrupted at {moment} of {count[0]}"


# Python itself swallows what is raised while a generator is closed, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "moments", [30, pytest.param(250, marks=pytest.mark.nightly)], ids="{} moments".format
)
@pytest.mark.parametrize("name", [*MAKE, *IN_PLACE])
def test_ctrl_c_at_any_moment_leaves_everything_before_or_after(name, moments, dtype):
    """The weights, the displacements and the tuner are all before the step, or all after it."""
    run = trained(name, dtype=dtype)
    run.give_gradients()
    before, after = run.everything(), run.after().everything()
    assert not are_equal(before[:4], after[:4])
    was_before = was_after = 0
    for fresh, moment in interrupted(run, lambda own: own.step(), moments, seed=moments):
        now = fresh.everything()
        is_before, is_after = are_equal(now, before), are_equal(now, after)
        assert is_before or is_after, moment
        was_before += is_before
        was_after += is_after
        assert [group["lr"] for group in fresh.optimizer.param_groups] == [1.0]
    assert was_before
    assert was_after


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_any_moment_of_eval_leaves_the_mode_that_fits_the_weights():
    """Where it did not, the next `eval()` would move the weights once more."""
    run = trained("Schedule-Free")
    run.give_gradients()
    evaluated = run.fork()
    evaluated.optimizer.eval()
    ends = {True: run.weights(), False: evaluated.weights()}
    assert not are_equal(*ends.values())
    seen = set()
    for fresh, moment in interrupted(run, lambda own: own.eval(), 100, seed=0):
        mode = fresh.optimizer.param_groups[0]["train_mode"]
        assert are_equal(fresh.weights(), ends[mode]), moment
        seen.add(mode)
    assert seen == {True, False}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", MAKE)
def test_a_run_goes_on_after_ctrl_c(name):
    run = trained(name)
    draw = random.Random(1)
    run.give_gradients()
    with interrupted_at(-1, press_ctrl_c) as count:
        run.fork().optimizer.step()
    distance = [float((p.detach() - g).norm()) for p, g in zip(run.params, run.goal, strict=True)]
    for _ in range(40):
        run.give_gradients()
        try:
            with interrupted_at(draw.randrange(1, count[0]), press_ctrl_c):
                run.optimizer.step()
        except KeyboardInterrupt:
            pass
        run.give_gradients()
        run.optimizer.step()
    now = [float((p.detach() - g).norm()) for p, g in zip(run.params, run.goal, strict=True)]
    assert now[0] < distance[0]
    assert all(param.isfinite().all() for param in run.params)


@pytest.mark.parametrize("name", MAKE)
def test_real_signals_leave_the_weights_before_or_after(name):
    """A timer of the system interrupts at moments of its own, inside of torch's operators too."""
    run = trained(name)
    draw = random.Random(3)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    interrupted = 0
    had = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(100):
            run.give_gradients()
            before, after = run.weights(), run.after().weights()
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 4e-3))
                run.optimizer.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            torch.set_grad_enabled(True)  # see `interrupted_at`
            now = run.weights()
            assert are_equal(now, before) or are_equal(now, after)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, had)
    assert interrupted > 20


@pytest.mark.parametrize("name", MAKE)
def test_a_handler_that_saves_finds_the_weights_before_or_after(name, tmp_path):
    """What clusters send before they end a job, at 80 moments: the model's weights are those before
    or after the step, each of them, and the optimizer's state dict can be loaded and holds the
    learning rate that was typed."""
    run = trained(name)
    run.give_gradients()
    saved: list[dict[str, Any]] = []

    def save(*_: Any) -> None:
        saved.append({"weights": target.weights(), "optimizer": target.optimizer.state_dict()})

    had = signal.signal(signal.SIGUSR1, save)
    try:
        with interrupted_at(-1, press_ctrl_c) as count:
            run.fork().optimizer.step()
        before, after = run.weights(), run.after().weights()
        finds = 0
        for moment in random.Random(2).sample(range(1, count[0]), 80):
            target = run.fork()
            with interrupted_at(moment, lambda: signal.raise_signal(signal.SIGUSR1)):
                target.optimizer.step()
            assert are_equal(target.weights(), after)
            if not saved:  # the step was over before
                continue
            found = saved.pop()
            finds += 1
            for now, old, new in zip(found["weights"], before, after, strict=True):
                assert ((now == old) | (now == new)).all(), moment
            assert [group["lr"] for group in found["optimizer"]["param_groups"]] == [1.0]
            other = Run(name)
            other.optimizer.load_state_dict(found["optimizer"])
        assert finds > 50
    finally:
        signal.signal(signal.SIGUSR1, had)


@pytest.mark.parametrize("name", MAKE)
def test_a_thread_that_reads_sees_the_weights_before_or_after(name):
    run = trained(name)
    known = [run.weights()]
    seen: list[list[Tensor]] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            weights = run.weights()
            if len(seen) < 2 or not are_equal(weights, seen[-1]):
                seen.append(weights)

    had = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(2000):
            run.give_gradients()
            run.optimizer.step()
            known.append(run.weights())
            if step >= 60 and len(seen) > 30:  # on a busy machine the thread waits
                break
    finally:
        is_over.set()
        reader.join()
        sys.setswitchinterval(had)
    assert len(seen) > 30
    for place, tensors in enumerate(zip(*known, strict=True)):
        values = torch.stack(tensors)
        for weights in seen:
            assert (values == weights[place]).any(0).all()


@pytest.mark.parametrize("error", [ValueError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "room",
    [
        "mechanic.torch.measure.measure",
        "mechanic.advance.advance",
        "mechanic.torch.base.copy_params",
    ],
)
def test_a_fault_before_the_move_leaves_everything(room, error, monkeypatch):
    run = trained("AdamW")
    run.give_gradients()
    before, expected = run.everything(), run.after().everything()
    groups = [dict(group) for group in run.optimizer.param_groups]
    module, name = room.rsplit(".", 1)
    broken = {m for m in list(sys.modules) if m.startswith("mechanic.torch")}

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        original = getattr(sys.modules[module], name)
        for user in broken:
            if getattr(sys.modules[user], name, None) is original:
                patch.setattr(sys.modules[user], name, fail)
        with pytest.raises(error):
            run.optimizer.step()
    assert are_equal(run.everything(), before)
    assert [group["lr"] for group in run.optimizer.param_groups] == [g["lr"] for g in groups]
    if room != "mechanic.advance.advance":  # the base had not run yet
        run.optimizer.step()
        assert are_equal(run.everything(), expected)


@pytest.mark.parametrize("name", MAKE)
def test_a_fault_of_the_base_leaves_the_weights(name):
    run = trained(name)
    run.give_gradients()
    before = run.everything()
    last = run.optimizer.state[run.params[-1]]
    had = {
        key: last.pop(key)
        for key in ("exp_avg", "momentum_buffer", "square_avg", "mean")
        if key in last
    }
    last.update(dict.fromkeys(had, "no tensor"))  # so that the base fails at its last parameter
    with pytest.raises((TypeError, AttributeError)):
        run.optimizer.step()
    assert are_equal(run.everything(), before)
    last.update(had)
    run.give_gradients()
    run.optimizer.step()
    assert not are_equal(run.weights(), before[:4])


def test_memory_that_runs_out_in_the_middle_of_the_move(monkeypatch):
    """The move is tried once more; where that fails too, each weight is before or after."""
    run = trained("AdamW")
    run.give_gradients()
    before, after = run.weights(), run.after().weights()
    moved, calls = vectors._moved, []

    def scarce(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        return moved(*args)

    monkeypatch.setattr(vectors, "_moved", scarce)
    with pytest.raises(MemoryError):
        run.optimizer.step()
    assert are_equal(run.weights(), after)
    assert not are_equal(before, after)


def test_a_base_that_keeps_the_parameters_elsewhere_is_tuned(monkeypatch):
    """Such a base is found out at its first step, and tuned as any other."""
    monkeypatch.setitem(MAKE, "SGD", lambda params: SGD(params, lr=1.0, momentum=0.9))
    run, plain = Run("Hoarder"), Run("SGD")
    for _ in range(40):
        for one in (run, plain):
            one.give_gradients()
            one.optimizer.step()
    assert run.optimizer._mechanic.steps_in_place
    assert not plain.optimizer._mechanic.steps_in_place
    for a, b in zip(run.params, plain.params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
