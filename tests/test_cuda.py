"""What only a GPU can show. Skipped, clearly, where there is none."""

import copy

import pytest
import torch

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
    assert float(tuner(with_nan).scale) == float(tuner(without).scale)
    for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
        assert torch.equal(p, q)


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
