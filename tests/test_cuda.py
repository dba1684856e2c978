"""What only a GPU can show. Skipped, clearly, where there is none."""

import copy
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lion_pytorch import Lion
from torch.nn import Parameter
from torch.optim import SGD, AdamW, RMSprop

from mechanic.torch import mechanize, tuner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def make_problem(device: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
    inputs, targets = torch.randn(256, 20), torch.randn(256, 5)
    return net.to(device, dtype), inputs.to(device, dtype), targets.to(device, dtype)


def train(optimizer, problem, steps: int) -> list[float]:
    net, inputs, targets = problem
    scales = []
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
        scales.append(tuner(optimizer).scale)
    return [float(scale) for scale in scales]


BASES = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1.0),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=1.0, fused=True),
    # Its bias corrections are in float32, so it is not compared with the CPU in float64.
    "adamw-capturable": lambda params: torch.optim.AdamW(params, lr=1.0, capturable=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9),
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("base", ["adamw", "adamw-fused", "sgd", "sgd-fused"])
def test_gives_what_the_cpu_gives(base):
    scales = {}
    for device in ("cpu", "cuda"):
        problem = make_problem(device, torch.float64)
        scales[device] = train(mechanize(BASES[base](problem[0].parameters())), problem, 100)
    assert scales["cpu"][-1] > 20 * scales["cpu"][0]
    assert scales["cuda"] == pytest.approx(scales["cpu"], rel=1e-6)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("skip_nonfinite", [True, False])
def test_a_step_does_not_wait_for_the_device(base, skip_nonfinite):
    if skip_nonfinite and "fused" not in base:
        pytest.skip("a base that does not know found_inf needs one scalar")
    problem = make_problem("cuda")
    optimizer = mechanize(BASES[base](problem[0].parameters()), skip_nonfinite=skip_nonfinite)
    torch.cuda.set_sync_debug_mode("error")
    try:
        net, inputs, targets = problem
        for _ in range(40):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(inputs), targets).backward()
            optimizer.step()
        metrics = tuner(optimizer).metrics()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(metrics["steps"]) == 40
    assert float(metrics["scale"]) > 0


@pytest.mark.parametrize("base", ["adamw", "adamw-fused", "sgd", "sgd-fused"])
def test_grad_scaler_with_an_inf_step(base):
    plain, scaled = make_problem("cuda"), make_problem("cuda")
    without = mechanize(BASES[base](plain[0].parameters()))
    with_scaler = mechanize(BASES[base](scaled[0].parameters()))
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(60):
        without.zero_grad()
        with_scaler.zero_grad()
        loss = torch.nn.functional.mse_loss(scaled[0](scaled[1]), scaled[2])
        scaler.scale(loss * (float("inf") if step == 20 else 1.0)).backward()
        scaler.step(with_scaler)
        scaler.update()
        if step != 20:
            torch.nn.functional.mse_loss(plain[0](plain[1]), plain[2]).backward()
            without.step()
    assert float(tuner(with_scaler).scale) > 20 * 1e-5
    assert float(tuner(with_scaler).scale) == pytest.approx(float(tuner(without).scale), rel=1e-3)
    for a, b in zip(plain[0].parameters(), scaled[0].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("base", ["adamw-fused", "sgd-fused"])
@pytest.mark.parametrize("bad", [0, 15])
def test_a_nan_step_is_skipped_on_the_device(base, bad):
    a, b = make_problem("cuda"), make_problem("cuda")
    with_nan, without = (mechanize(BASES[base](p[0].parameters())) for p in (a, b))
    for step in range(40):
        with_nan.zero_grad()
        torch.nn.functional.mse_loss(a[0](a[1]), a[2]).backward()
        if step == bad:
            next(a[0].parameters()).grad[0, 0] = float("nan")
        with_nan.step()
        if step != bad:
            train(without, b, 1)
    assert int(tuner(with_nan).metrics()["skipped"]) == 1
    if bad == 0:  # it made the state: the kernels make the next step, not the plain path
        near: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
    else:
        near = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(tuner(with_nan).scale, tuner(without).scale, **near)
    for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, **near)


def test_model_moved_to_the_gpu_after_mechanize():
    problem = make_problem("cpu", torch.float64)
    optimizer = mechanize(torch.optim.AdamW(problem[0].parameters(), lr=1.0))
    problem[0].cuda()
    problem = (problem[0], problem[1].cuda(), problem[2].cuda())
    assert train(optimizer, problem, 30)[-1] > 0
    assert tuner(optimizer).scale.is_cuda
    assert optimizer.param_groups[0]["effective_lr"].is_cuda


def test_parameters_on_cpu_and_gpu_share_one_scale():
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(30, dtype=torch.float64))
    split = [
        torch.nn.Parameter(weights.detach()[:10].clone()),
        torch.nn.Parameter(weights.detach()[10:].cuda()),
    ]
    together = mechanize(torch.optim.SGD([weights], lr=1.0, momentum=0.9))
    apart = mechanize(torch.optim.SGD(split, lr=1.0, momentum=0.9))
    for _ in range(60):
        for params, optimizer in (([weights], together), (split, apart)):
            for param in params:
                param.grad = (param.detach() - 3) * 2
            optimizer.step()
    assert float(tuner(together).scale) == pytest.approx(float(tuner(apart).scale), rel=1e-9)
    assert (weights.detach() - 3).abs().max() < 1


@pytest.mark.parametrize("base", ["adamw-fused", "sgd"])
def test_bfloat16_and_checkpoint(base, tmp_path):
    problem = make_problem("cuda", torch.bfloat16)
    optimizer = mechanize(BASES[base](problem[0].parameters()))
    train(optimizer, problem, 30)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    twin = (copy.deepcopy(problem[0]), *problem[1:])
    resumed = mechanize(BASES[base](twin[0].parameters()))
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert train(optimizer, problem, 30) == train(resumed, twin, 30)
    for p, q in zip(problem[0].parameters(), twin[0].parameters(), strict=True):
        assert torch.equal(p, q)
        assert resumed.state[q]["mechanic_displacement"].dtype == torch.float32


# -- Known bases ---------------------------------------------------------------------------------

KNOWN = {
    "adamw-fused": lambda params, lr=1.0: AdamW(params, lr=lr, weight_decay=0.1, fused=True),
    "sgd-fused": lambda params, lr=1.0: SGD(params, lr=lr, momentum=0.9, fused=True),
    "sgd": lambda params, lr=1.0: SGD(params, lr=lr, momentum=0.9),
    "lion": lambda params, lr=1.0: Lion(params, lr=lr, weight_decay=0.1),
}


class Own(AdamW):
    """A base that nobody knows: its step is its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have small gradients summed up as they arrive, too."""
    from mechanic.torch.kernels import layout

    monkeypatch.setattr(layout, "_LARGE", 16)


def make_weights() -> list[Parameter]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(40, 30), (70_001,), (7,), ()]
    return [Parameter(torch.randn(shape, generator=draw).cuda()) for shape in shapes]


def backward(weights: list[Parameter], goal: torch.Tensor) -> None:
    """Of a loss whose gradients are the same bits whether captured or not."""
    torch.stack([(w - goal).square().sum() for w in weights]).sum().backward()


def run_kernels(optimizer: Any) -> bool:
    """Whether the last step was made by the kernels, with a known base; they note its number."""
    plan = optimizer._mechanic.kernels.plan
    if plan is None or not plan.is_known:
        return False
    return bool(plan.verdict.sum() == optimizer._mechanic.counts.read().steps)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("sums_in_backward", [False, True])
@pytest.mark.parametrize("base", KNOWN)
def test_a_known_base_does_not_wait_for_the_device(base, sums_in_backward):
    weights, goal = make_weights(), torch.tensor(3.0, device="cuda")
    optimizer = mechanize(KNOWN[base](weights), sums_in_backward=sums_in_backward)
    backward(weights, goal)
    optimizer.step()  # the plain path's: where the base is not fused, the host decides
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(40):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            backward(weights, goal)
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run_kernels(optimizer)
    assert float(tuner(optimizer).scale) > 0


# -- CUDA graphs ---------------------------------------------------------------------------------


def warm_up(optimizer: Any, weights: list[Parameter], goal: torch.Tensor, steps: int) -> None:
    """As torch advises before a capture: on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            backward(weights, goal)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)


def capture(optimizer: Any, weights: list[Parameter], goal: torch.Tensor) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward(weights, goal)
        optimizer.step()
    return graph


@pytest.mark.usefixtures("small_is_large")
@pytest.mark.parametrize("sums_in_backward", [False, True])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("base", KNOWN)
def test_a_captured_step_is_replayed(base, as_tensor, sums_in_backward):
    runs = []
    for captures in (False, True):
        lr = torch.tensor(1.0, device="cuda") if as_tensor else 1.0
        weights, goal = make_weights(), torch.tensor(3.0, device="cuda")
        optimizer = mechanize(KNOWN[base](weights, lr), sums_in_backward=sums_in_backward)
        warm_up(optimizer, weights, goal, 1)
        first = float(tuner(optimizer).scale)
        warm_up(optimizer, weights, goal, 11)
        graph = capture(optimizer, weights, goal) if captures else None
        for step in range(20):
            goal.fill_(3 + 0.1 * (-1) ** step)
            if as_tensor:
                lr.fill_(0.97**step)
            if graph is not None:
                graph.replay()
            else:
                optimizer.zero_grad(set_to_none=True)
                backward(weights, goal)
                optimizer.step()
        metrics = tuner(optimizer).metrics()
        assert int(metrics["steps"]) == 32
        assert float(metrics["scale"]) > 20 * first
        runs.append((optimizer, weights))
    (eager, one), (captured, two) = runs
    assert float(tuner(captured).scale) == pytest.approx(float(tuner(eager).scale), rel=1e-6)
    for p, q in zip(one, two, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        for key, value in eager.state[p].items():
            torch.testing.assert_close(captured.state[q][key], value, rtol=1e-5, atol=1e-6)
    # Steps that are not replayed go on from there.
    for optimizer, weights in runs:
        optimizer.zero_grad(set_to_none=True)
        backward(weights, torch.tensor(3.0, device="cuda"))
        optimizer.step()
    assert float(tuner(captured).scale) == pytest.approx(float(tuner(eager).scale), rel=1e-6)
    assert int(tuner(captured).metrics()["steps"]) == 33


def test_a_replayed_step_that_is_not_finite_is_skipped():
    weights, goal = make_weights(), torch.tensor(3.0, device="cuda")
    optimizer = mechanize(KNOWN["adamw-fused"](weights))
    warm_up(optimizer, weights, goal, 12)
    graph = capture(optimizer, weights, goal)
    graph.replay()
    before = [w.detach().clone() for w in weights]
    goal.fill_(float("nan"))
    graph.replay()
    assert all(map(torch.equal, before, weights))
    goal.fill_(3.0)
    graph.replay()
    assert not torch.equal(before[0], weights[0])
    metrics = tuner(optimizer).metrics()
    assert (int(metrics["steps"]), int(metrics["skipped"])) == (14, 1)


@pytest.mark.parametrize(
    ("make", "warm", "message"),
    [
        (KNOWN["adamw-fused"], 0, "the first step of a mechanized optimizer cannot be captured"),
        (lambda p: RMSprop(p, lr=1.0), 3, "the host has to decide"),
        (lambda p: AdamW(p, lr=1.0), 3, "the host has to decide"),
    ],
    ids=["first step", "any base", "steps on the host"],
)
def test_what_cannot_be_captured_is_refused(make, warm, message):
    weights, goal = make_weights(), torch.tensor(3.0, device="cuda")
    optimizer = mechanize(make(weights))
    warm_up(optimizer, weights, goal, warm)
    with pytest.raises(RuntimeError, match=message):
        capture(optimizer, weights, goal)
    optimizer.zero_grad(set_to_none=True)
    backward(weights, goal)
    optimizer.step()
    assert int(tuner(optimizer).metrics()["steps"]) == warm + 1


# -- Compilation ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("base", "whole"),
    # The steps of torch.optim hold a graph break of their own.
    [("adamw-fused", False), ("sgd", False), ("lion", True)],
)
def test_a_compiled_step_gives_what_an_eager_one_gives(base, whole):
    torch._dynamo.reset()
    scales = []
    for compiles in (False, True):
        problem = make_problem("cuda")
        optimizer = mechanize(KNOWN[base](problem[0].parameters()))
        step = torch.compile(optimizer.step, fullgraph=whole) if compiles else optimizer.step
        first = 0.0
        for _ in range(30):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(problem[0](problem[1]), problem[2]).backward()
            step()
            first = first or float(tuner(optimizer).scale)
        scales.append(float(tuner(optimizer).scale))
        assert scales[-1] > 20 * first
        assert compiles or run_kernels(optimizer)
    torch._dynamo.reset()
    assert scales[1] == pytest.approx(scales[0], rel=1e-4)


# -- Memory --------------------------------------------------------------------------------------

MEBIBYTE = 1 << 20


def collect() -> None:
    """Free what earlier tests have left; a tensor in a cycle may take gc more than one pass."""
    had = -1
    while had != (had := torch.cuda.memory_allocated()):
        gc.collect()


def measure_first_step(make: Any) -> tuple[int, int]:
    """The bytes that an optimizer holds after its first step, and the most that it held in it."""
    collect()
    weights = [Parameter(torch.randn(4 * MEBIBYTE, device="cuda")) for _ in range(2)]
    optimizer = make(weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("base", KNOWN)
def test_the_first_step_of_a_known_base_takes_no_more_than_its_state(base):
    held, most = measure_first_step(lambda weights: mechanize(KNOWN[base](weights)))
    assert most - held < 8 * MEBIBYTE  # a few pieces in float64, to measure the weights
    slots = 3 if base.startswith("adamw") else 2
    assert held == pytest.approx(slots * 2 * 4 * MEBIBYTE * 4, abs=MEBIBYTE)


def measure_step(make: Any) -> tuple[int, int]:
    """The bytes that an optimizer holds, and those that it takes on top of it in a step."""
    collect()
    weights = [Parameter(torch.randn(4 * MEBIBYTE, device="cuda")) for _ in range(2)]
    torch.dot(weights[0].detach(), weights[1].detach())  # cuBLAS keeps 32 MiB from its first use on
    torch.cuda.synchronize()
    empty = torch.cuda.memory_allocated()
    optimizer = make(weights)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    gradients = sum(weight.nbytes for weight in weights)
    for _ in range(25):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    return before - empty - gradients, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("base", KNOWN)
def test_a_known_base_takes_one_more_slot_and_nothing_in_a_step(base):
    size = 2 * 4 * MEBIBYTE * 4
    held, taken = measure_step(lambda weights: mechanize(KNOWN[base](weights)))
    of_base, _ = measure_step(KNOWN[base])
    assert held - of_base == pytest.approx(size, abs=MEBIBYTE)
    assert taken < MEBIBYTE


def test_any_base_takes_one_more_slot_and_one_copy_in_a_step():
    size = 2 * 4 * MEBIBYTE * 4
    held, taken = measure_step(lambda weights: mechanize(Own(weights, lr=1.0, fused=True)))
    of_base, _ = measure_step(lambda weights: Own(weights, lr=1.0, fused=True))
    assert held - of_base == pytest.approx(size, abs=MEBIBYTE)
    assert taken == pytest.approx(size, abs=MEBIBYTE)


# -- The bench -----------------------------------------------------------------------------------


def test_a_run_of_the_bench_repeats_to_the_last_digit_at_any_typed_lr(tmp_path: Path) -> None:
    """Convolutions, attention, embeddings, of which torch has faster ones that add in no order."""
    studies = pytest.importorskip("mechanic.bench.study", reason="needs the extra 'bench'")
    command = [sys.executable, "-m", "mechanic", "bench", "lm", "vision", "--budget", "smoke"]
    options = ["--methods", "mechanic", "--seeds", "1", "--typed", "1e-4", "1", "1e4"]
    storage = ["--storage", f"sqlite:///{tmp_path}/bench.db"]
    subprocess.run([*command, *options, *storage], timeout=300, check=True)
    rows: dict[tuple[str, str], list[list[float]]] = {}
    for run in studies.load(studies.open_storage(storage[1])):
        assert run.status == "done"
        rows.setdefault((run.suite, run.base), []).append([*run.metrics.values(), *run.curve.loss])
    assert {suite for suite, _ in rows} == {"lm", "vision"}
    for at_each_lr in rows.values():
        assert len(at_each_lr) == 3
        assert at_each_lr[0] == at_each_lr[1] == at_each_lr[2]
