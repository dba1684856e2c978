"""The kernels against the plain path over sharded parameters, in lock step on every process.
Without a GPU, Triton's interpreter runs them; with one, all processes share it."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import case
from comparing import DISPLACEMENT
from distributed import Pool, full, loss_of, make_model, spread
from lockstep import DEVICE, FEW, KNOWN, ON_GPU, Side, kernels
from running import environment
from spreadlock import PLACES, SpreadLock, gather, messages_of, prepare
from torch import distributed as dist
from torch.nn import Parameter

from mechanic.torch import mechanize, tuner
from mechanic.torch.sharding import local

DAY, NIGHT = 30, 200
STARTING = 10  # steps in which a second message has the norm of the update


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    made = {size: Pool(size) for size in (2, 4)}
    yield made
    for pool in made.values():
        pool.stop()


def run(rank: int, base: str, name: str, steps: int) -> Any:
    prepare()
    lock = SpreadLock(base, name)
    counts, ran = [], []
    for _ in range(steps):
        lock.give(lock.gradients())
        lock.plain.step()
        counts.append(messages_of(lock.fast))
        ran.append(lock.fast.ran_kernels(known=True))
        lock.first_scale = lock.first_scale or float(lock.plain.mechanism.scale)
    lock.assert_same()
    lock.assert_agrees()
    return float(tuner(lock.fast.optimizer).scale), counts, ran


BY_DAY = "uneven"


@pytest.mark.parametrize(
    ("name", "base", "steps"),
    [
        case(BY_DAY, "AdamW-fused", DAY, name=BY_DAY),
        *(
            case(
                name,
                "AdamW-single" if name == "beside" else "AdamW-fused",
                NIGHT,
                name=f"{name}, long",
                by_day=False,
            )
            for name in PLACES
        ),
        *(
            case("hybrid", base, 2 * STARTING, name=f"hybrid, {base}", by_day=False)
            for base in KNOWN
            if base not in ("AdamW-fused", "Adam-maximize")
        ),
    ],
)
def test_every_placement(pools, name, base, steps):
    size = math.prod(PLACES[name][0])
    found = pools[size].run(run, base, name, steps)
    assert len({scale for scale, _, _ in found}) == 1  # bit for bit
    for _, counts, ran in found:
        assert counts == [2] * STARTING + [1] * (steps - STARTING)
        is_damped = base == "SGD-momentum"  # its first step is its own
        assert ran == [not is_damped] + [True] * (steps - 1)


# What has to be the same on all processes


def meet_on_two_paths(rank: int) -> float:
    """In each step some processes take the plain path, and some the kernels."""
    prepare()
    lock = SpreadLock("AdamW-single", "beside", max_grad_norm=3.0)
    for step in range(26):
        lock.fast.uses_kernels = (step // 2) % 2 == rank
        gradients = lock.gradients()
        if step in (5, 16) and rank == 1:
            local(gradients[1]).view(-1)[0] = math.nan
        if step in (13, 16):  # the second of them is skipped
            for side in lock.sides:
                side.optimizer.param_groups[0]["lr"] *= 1.3
        lock.step(gradients)
        ran = lock.fast.ran_kernels(known=True)
        assert ran == lock.fast.uses_kernels
    assert int(lock.fast.mechanism.counts.read().skipped) == 2
    lock.assert_same()
    return float(tuner(lock.fast.optimizer).scale)


def test_processes_on_different_paths_meet_in_one_message(pools):
    one, two = pools[2].run(meet_on_two_paths)
    assert one == pytest.approx(two, rel=1e-12)  # what is rounded in another order


def meet_what_is_not_finite(rank: int, name: str, has_scaler: bool) -> None:
    """NaN on one process, and GradScaler's word for it."""
    prepare()
    lock = SpreadLock("AdamW-fused", name, max_grad_norm=1.0)
    last = dist.get_world_size() - 1
    for step in range(24):
        gradients = lock.gradients()
        is_bad = step in (0, 5, 14, 15)
        if has_scaler:
            gradients = [8 * gradient for gradient in gradients]
            for side in lock.sides:
                found = float(is_bad and rank == last)
                side.optimizer.grad_scale = torch.tensor(8.0, device=DEVICE)
                side.optimizer.found_inf = torch.tensor(found, device=DEVICE)
        elif is_bad and rank == last:
            local(gradients[0]).view(-1)[:1] = math.nan
        before = [local(param).clone() for param in lock.fast.params]
        lock.step(gradients)
        after = map(local, lock.fast.params)
        assert not is_bad or all(map(torch.equal, after, before))
    assert lock.fast.ran_kernels(known=True)
    assert int(lock.fast.mechanism.counts.read().skipped) == 4
    lock.assert_same()
    lock.assert_agrees()


@pytest.mark.parametrize(
    ("name", "has_scaler"),
    [
        case(name, has_scaler, name=f"{name}-{'scaler' if has_scaler else 'nan'}", by_day=False)
        for name in ("uneven", "hybrid")
        for has_scaler in (False, True)
    ],
)
def test_what_is_not_finite_on_one_process_skips_the_step_on_all(pools, name, has_scaler):
    size = math.prod(PLACES[name][0])
    pools[size].run(meet_what_is_not_finite, name, has_scaler)


def meet_stages(rank: int, rises_on: int) -> list[int]:
    """Each process has parameters of its own, and one of them a learning rate that rises."""
    prepare()
    lock = SpreadLock("SGD-momentum", "stages", process_group=dist.group.WORLD)
    counts = []
    for step in range(26):
        if step % 6 == 5 and rank == rises_on:
            for side in lock.sides:
                side.optimizer.param_groups[0]["lr"] *= 1.3
        lock.give(lock.gradients())
        lock.plain.step()
        counts.append(messages_of(lock.fast))
        assert lock.fast.ran_kernels(known=True) == (step > 0)
        lock.first_scale = lock.first_scale or float(lock.plain.mechanism.scale)
    lock.assert_same()
    lock.assert_agrees()
    return counts


@pytest.mark.nightly
def test_a_group_of_stages_with_rates_of_their_own(pools):
    for counts in pools[2].run(meet_stages, 1):
        assert counts == [2] * STARTING + [1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1]


def meet_schedules(rank: int, with_tensor: bool) -> list[int]:
    prepare()
    lock = SpreadLock("AdamW-fused", "uneven")
    if with_tensor:
        for side in lock.sides:
            side.optimizer.param_groups[0]["lr"] = torch.tensor(1.0, device=DEVICE)
    counts = []
    for step in range(24):
        for side in lock.sides:
            group = side.optimizer.param_groups[0]
            group["lr"] *= 1.25 if step in (14, 18) else 0.99
        lock.give(lock.gradients())
        lock.plain.step()
        counts.append(messages_of(lock.fast))
        lock.first_scale = lock.first_scale or float(lock.plain.mechanism.scale)
    assert lock.fast.ran_kernels(known=True)
    lock.assert_same()
    lock.assert_agrees()
    return counts


@pytest.mark.nightly
@pytest.mark.parametrize("with_tensor", [False, True])
def test_a_rate_that_rises_is_measured_by_a_second_message(pools, with_tensor):
    expected = [2] * STARTING + [1, 1, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1, 1]
    for counts in pools[2].run(meet_schedules, with_tensor):
        assert counts == ([2] * 24 if with_tensor else expected)


# Both paths on one state


def resume(rank: int, saved_by_kernels: bool) -> None:
    prepare()
    lock = SpreadLock("AdamW", "uneven")
    lock.fast.uses_kernels = saved_by_kernels
    lock.run(14)
    saved = copy.deepcopy(lock.fast.optimizer.state_dict())
    params = [Parameter(param.detach().clone()) for param in lock.fast.params]
    lock.fast = Side(KNOWN["AdamW"], params, not saved_by_kernels, {})
    lock.fast.optimizer.load_state_dict(saved)
    lock.run(12)
    assert lock.fast.ran_kernels(known=True) == (not saved_by_kernels)
    lock.assert_same()
    lock.assert_agrees()


@pytest.mark.nightly
@pytest.mark.parametrize("saved_by_kernels", [True, False])
def test_a_checkpoint_of_one_path_loads_on_the_other(pools, saved_by_kernels):
    pools[2].run(resume, saved_by_kernels)


def move_tensors(rank: int) -> None:
    """Memory that is given anew to a parameter or its state is noticed, and so is a gradient that
    is placed unlike its parameter: that one is left to the plain path."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    prepare()
    lock = SpreadLock("AdamW", "uneven")
    for step in range(24):
        param = lock.fast.params[1]
        state = lock.fast.optimizer.state[param]
        if step == 12:
            state["exp_avg"] = state["exp_avg"].clone()
        elif step == 13:
            state[DISPLACEMENT] = state[DISPLACEMENT].clone()
        elif step == 14:
            param.data = param.data.clone()
        lock.give(lock.gradients())
        if step == 16:
            whole = gather(param.grad)
            own = param.device_mesh, [Replicate()]
            param.grad = distribute_tensor(whole, *own, src_data_rank=None)
        for side in lock.sides:
            side.step()
        assert lock.fast.ran_kernels(known=True) == (step != 16)
        lock.first_scale = lock.first_scale or float(lock.plain.mechanism.scale)
    lock.assert_same()
    lock.assert_agrees()


@pytest.mark.nightly
def test_tensors_that_are_moved(pools):
    pools[2].run(move_tensors)


# The engines of torch


def train(rank: int, engine: str, steps: int) -> None:
    """A model whose steps the kernels make, and one with those of the plain path."""
    prepare()
    ends = []
    for used in (False, True):
        model, part, parts = spread(engine, make_model())
        optimizer: Any = mechanize(KNOWN["AdamW"](list(model.parameters())))
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, step, part, parts).backward()
            with kernels(used):
                optimizer.step()
        assert tuner(optimizer).agrees()
        assert (optimizer._mechanic.kernels.plan is not None) == used
        ends.append(([full(p) for p in model.parameters()], float(tuner(optimizer).scale)))
    (weights, scale), (found, found_scale) = ends
    assert found_scale == pytest.approx(scale, rel=1e-5)
    for a, b in zip(found, weights, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.abs().max()))


ENGINES = [(2, "tensor"), (2, "beside"), (4, "fsdp"), (4, "fsdp-tensor"), (4, "hybrid")]


@pytest.mark.skipif(ON_GPU, reason="the engines of `distributed.py` are for a CPU")
@pytest.mark.parametrize(
    ("size", "engine", "steps"),
    [
        case(2, "fsdp", 12, name="fsdp-2"),
        *(case(*own, 24, name=f"{own[1]}-{own[0]}", by_day=False) for own in ENGINES),
    ],
)
def test_engines(pools, size, engine, steps):
    pools[size].run(train, engine, steps)


def train_with_zero(rank: int) -> float:
    """One process holds everything, and the other nothing."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    prepare()
    scales = []
    for used in (False, True):
        weights = Parameter(torch.ones(3, device=DEVICE))
        zero = ZeroRedundancyOptimizer([weights], torch.optim.SGD, lr=1.0, momentum=0.9)
        optimizer: Any = mechanize(zero)
        for _ in range(24):
            weights.grad = weights.detach() - 2
            with kernels(used):
                optimizer.step()
        assert tuner(optimizer).agrees()
        scales.append(float(tuner(optimizer).scale))
    assert scales[1] == pytest.approx(scales[0], rel=1e-5)
    return scales[1]


@pytest.mark.nightly
def test_a_process_without_parameters(pools):
    one, two = pools[2].run(train_with_zero)
    assert one == two


COMPILING = """
import sys, torch
from torch import distributed as dist
sys.path.insert(0, {tests!r})
import compiling
from mechanic.torch.kernels import step

step.check_size = lambda *_: None  # nothing is launched, so that nothing is counted

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
spread = {{"process_group": dist.group.WORLD}}
adamw, *_ = compiling.CASES[0]
compiling.CASES = [
    (adamw, torch.float32, spread),
    (adamw, torch.bfloat16, {{**spread, "s_init": 1e-3, "max_grad_norm": 1.0}}),
]
compiling.main()
"""


@pytest.mark.nightly
def test_what_is_told_compiles_for_a_gpu_that_is_not_there(tmp_path):
    own = environment(TRITON_CACHE_DIR=str(tmp_path))
    own.pop("TRITON_INTERPRET", None)
    script = COMPILING.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", script], env=own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {(row["kernel"], row["case"]) for row in json.loads(done.stdout)}
    assert {("tell", 0), ("tune", 0), ("tell", 1), ("tune", 1)} <= found


# On a GPU alone: one process, whose messages are of nccl


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpreadLock]:
    prepare()
    monkeypatch.setitem(PLACES, "alone", ((1,), "0", FEW))
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield SpreadLock("AdamW-fused", "alone")
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_steady_step_waits_for_nothing(alone):
    alone.run(STARTING + 2)
    for _ in range(20):
        alone.give(alone.gradients())
        alone.plain.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            alone.fast.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert alone.fast.ran_kernels(known=True)
    alone.assert_same()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_steps_in_a_cuda_graph(alone):
    alone.run(STARTING + 2)
    alone.give(alone.gradients())
    given = [param.grad for param in alone.fast.params]
    alone.plain.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        alone.fast.step()
    graph.replay()
    for _ in range(20):
        gradients = alone.gradients()
        for param, own, gradient in zip(alone.plain.params, given, gradients, strict=True):
            param.grad = gradient.clone()
            own.copy_(gradient)
        alone.plain.step()
        graph.replay()
    alone.assert_same()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_the_first_steps_are_not_captured(alone):
    alone.run(3)
    alone.give(alone.gradients())
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="first ten steps"):  # noqa: SIM117
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            alone.fast.step()
