"""One scale at every world size: the same training under torch's engines, in 2 and 4 processes, and
in one."""

import copy
import functools
import math
import pickle
import subprocess
import sys
import time
from pathlib import Path

import lion_pytorch
import pytest
import torch
from cases import case
from distributed import FSDP_NEEDS_A_GPU, Pool, batch, full, loss_of, make_model, spread
from running import environment
from torch import distributed as dist

from mechanic.torch import mechanize, tuner

STEPS, HALF = 20, 10
LONG = 50

# Float32 has 6e-8 to the last place. Sums in another order, over 50 steps and with the scale fed
# back into the weights, came to 2.2e-6 in S and 8e-7 in the weights at most.
SCALE_BOUND, WEIGHT_BOUND = 1e-5, 1e-5

BASES = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1.0),
    "SGD": functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9, weight_decay=1e-3),
    "Lion": functools.partial(lion_pytorch.Lion, lr=1.0),
}


@pytest.fixture(scope="module")
def pools():
    made = {size: Pool(size) for size in (2, 4)}
    yield made
    for pool in made.values():
        pool.stop()


def train(model, optimizer, part=0, parts=1, start=0, stop=STEPS):
    for step in range(start, stop):
        optimizer.zero_grad()
        loss_of(model, step, part, parts).backward()
        optimizer.step()


def result(model, optimizer):
    assert tuner(optimizer).agrees() if dist.is_initialized() else True
    return [full(param) for param in model.parameters()], float(tuner(optimizer).scale)


@functools.cache
def alone(base, steps=STEPS):
    model = make_model()
    optimizer = mechanize(BASES[base](model.parameters()))
    train(model, optimizer, stop=steps)
    return result(model, optimizer)


def assert_alike(found, expected):
    (weights, scale), (expected_weights, expected_scale) = found, expected
    assert scale == pytest.approx(expected_scale, rel=SCALE_BOUND)
    for a, b in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=WEIGHT_BOUND * float(b.abs().max()))


def run_engine(rank, engine, base, steps):
    model, part, parts = spread(engine, make_model())
    optimizer = mechanize(BASES[base](model.parameters()))
    train(model, optimizer, part, parts, stop=steps)
    return result(model, optimizer)


def run_scoped(rank, engine):
    """A scale for each tensor, gradients clipped, and NaN on one process in one step."""
    model, part, parts = (make_model(), 0, 1) if engine is None else spread(engine, make_model())
    optimizer = mechanize(
        torch.optim.AdamW(model.parameters(), lr=1.0), scope="tensor", max_grad_norm=0.5
    )
    for step in range(HALF + 2):
        optimizer.zero_grad()
        loss_of(model, step, part, parts).backward()
        if step == HALF and rank == 0:
            grad = next(iter(model.parameters())).grad
            getattr(grad, "_local_tensor", grad).fill_(math.nan)
        optimizer.step()
    handle = tuner(optimizer)
    assert engine is None or handle.agrees()
    assert {int(own.metrics()["skipped"]) for own in handle.scopes.values()} == {1}
    return [full(param) for param in model.parameters()], handle.scale.tolist()


@pytest.mark.parametrize(
    "engine",
    ["beside", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("fsdp", "tensor"))],
)
def test_several_scales_over_processes(pools, engine):
    weights, scales = run_scoped(0, None)
    for found, found_scales in pools[2].run(run_scoped, engine):
        assert found_scales == pytest.approx(scales, rel=SCALE_BOUND)
        for a, b in zip(found, weights, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=WEIGHT_BOUND * float(b.abs().max()))


ENGINES = [
    (2, "ddp"),
    (2, "fsdp"),
    (2, "tensor"),
    (2, "beside"),
    (4, "ddp"),
    (4, "fsdp"),
    (4, "tensor"),
    (4, "fsdp-tensor"),
    (4, "hybrid"),
]


RUNS = [
    *(("AdamW", engine, 2, STEPS) for engine in ("ddp", "fsdp", "tensor")),
    *(("AdamW", engine, 4, STEPS) for engine in ("fsdp", "fsdp-tensor", "hybrid")),
    *(("SGD", "beside", 2, STEPS), ("SGD", "tensor", 4, STEPS), ("Lion", "fsdp", 2, STEPS)),
]
LONG_RUNS = [(base, engine, size, LONG) for base in BASES for size, engine in ENGINES]


@pytest.mark.parametrize(
    ("base", "engine", "size", "steps"),
    [
        *(pytest.param(*run, id="{1}-{2}-{0}".format(*run)) for run in RUNS),
        *(
            pytest.param(*run, id="{1}-{2}-{0}-{3}".format(*run), marks=pytest.mark.nightly)
            for run in LONG_RUNS
        ),
    ],
)
def test_all_ranks_train_as_one_process_does(pools, size, engine, base, steps):
    expected = alone(base, steps)
    assert expected[1] > 50 * alone(base, 1)[1]  # the scale has moved
    for found in pools[size].run(run_engine, engine, base, steps):
        assert_alike(found, expected)


def count_messages(rank, engine, steps):
    from torch.distributed.tensor.debug import CommDebugMode

    model, part, parts = spread(engine, make_model())
    optimizer = mechanize(BASES["AdamW"](model.parameters()))
    counts = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, part, parts).backward()
        with CommDebugMode() as messages:
            optimizer.step()
        counts.append(messages.get_total_counts())
    return counts


@pytest.mark.parametrize(
    ("engine", "start", "then"), [("ddp", 0, 0), ("fsdp", 2, 1), ("tensor", 2, 1), ("beside", 2, 1)]
)
def test_a_step_sends_one_message_and_under_ddp_none(pools, engine, start, then):
    for counts in pools[2].run(count_messages, engine, 14):
        assert counts == [start] * 10 + [then] * 4


def meshes_of_one_optimizer(rank):
    """A layer on a mesh of 2 x 2, one on a mesh of 4, and two on a pair, of which there are two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model = make_model()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=init_device_mesh("cpu", (4,)))
    for layer in (model[3], model[5]):
        fully_shard(layer, mesh=mesh["shards"])
    on_pairs = [*model[3].parameters(), *model[5].parameters()]
    optimizer = mechanize(BASES["AdamW"](model.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank, 4).backward()
        for param in on_pairs:  # no engine averages between the two
            average_over(mesh["copies"], param)
        optimizer.step()
    return result(model, optimizer)


def average_over(mesh, param):
    part = param.grad.to_local()
    dist.all_reduce(part, group=mesh.get_group())
    part /= mesh.size()


def test_several_meshes_in_one_optimizer(pools):
    for found in pools[4].run(meshes_of_one_optimizer):
        assert_alike(found, alone("AdamW"))


def mesh_of_some_ranks(rank):
    """Ranks 1 to 3 train, as an engine within a larger job does; a mesh of 3 x 1 has no group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh("cpu", torch.tensor([[1], [2], [3]]), mesh_dim_names=("a", "b"))
    if rank == 0:
        return None
    model = make_model()
    fully_shard(model, mesh=mesh)
    optimizer = mechanize(BASES["AdamW"](model.parameters()))
    for step in range(STEPS):  # every rank has the whole batch, for 3 does not divide it
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return [full(param) for param in model.parameters()], float(tuner(optimizer).scale)


def test_a_mesh_of_some_of_the_ranks(pools):
    first, *others = pools[4].run(mesh_of_some_ranks)
    assert first is None
    for found in others:
        assert_alike(found, alone("AdamW"))


# Groups and presets: what the tuner reads is complete, whichever it is


def run_presets(rank, preset):
    model, part, parts = spread("fsdp", make_model(torch.float64))
    optimizer = mechanize(torch.optim.SGD(model.parameters(), lr=0.5), preset=preset, **START)
    train_in_double(model, optimizer, part, parts)
    return result(model, optimizer)


START = {"s_init": 1e-3}


def train_in_double(model, optimizer, part, parts):
    for step in range(STEPS):
        inputs, targets = (half.double().chunk(parts)[part] for half in batch(step))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


@pytest.mark.parametrize("preset", ["paper", "mechanic-pytorch", "optax"])
def test_presets_with_their_decay(pools, preset):
    model = make_model(torch.float64)
    optimizer = mechanize(torch.optim.SGD(model.parameters(), lr=0.5), preset=preset, **START)
    train_in_double(model, optimizer, 0, 1)
    weights, scale = result(model, optimizer)
    assert scale > 2e-3
    for found, found_scale in pools[2].run(run_presets, preset):
        assert found_scale == pytest.approx(scale, rel=1e-9)
        for a, b in zip(found, weights, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


# Engines that hand out plain tensors


def run_fsdp1_that_ignores_a_layer(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = make_model()
    ignored = model[5]
    model = FullyShardedDataParallel(
        model, ignored_modules=[ignored], use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = mechanize(BASES["AdamW"](model.parameters()), process_group=model.process_group)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank, 2).backward()
        for param in ignored.parameters():
            dist.all_reduce(param.grad)
            param.grad /= 2
        optimizer.step()
    return float(tuner(optimizer).scale), int(optimizer._mechanic.scalars.read().size)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_fsdp1_ignores_counts_once(pools):
    size = sum(param.numel() for param in make_model().parameters())
    for scale, counted in pools[2].run(run_fsdp1_that_ignores_a_layer):
        assert counted == size
        assert scale == pytest.approx(alone("AdamW")[1], rel=SCALE_BOUND)


def run_fsdp1(rank, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        make_model(),
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    plain = BASES["AdamW"](model.parameters())
    with pytest.raises(ValueError, match=r"process_group=model\.process_group"):
        mechanize(plain)
    assert type(plain) is torch.optim.AdamW
    optimizer = mechanize(plain, process_group=model.process_group)
    assert optimizer is plain
    train(model, optimizer, rank, dist.get_world_size())
    agrees, scale = tuner(optimizer).agrees(), float(tuner(optimizer).scale)
    with FullyShardedDataParallel.summon_full_params(model):
        return agrees, ([full(param).reshape(-1) for param in model.parameters()], scale)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("use_orig_params", "size"),
    [
        case(own, size, name=f"{own}-{size}", by_day=size == 2)
        for own in (True, False)
        for size in (2, 4)
    ],
)
def test_fsdp1_with_its_group(pools, use_orig_params, size):
    weights, scale = alone("AdamW")
    for agrees, (found, found_scale) in pools[size].run(run_fsdp1, use_orig_params):
        assert agrees
        assert found_scale == pytest.approx(scale, rel=SCALE_BOUND)
        if use_orig_params:
            assert_alike((found, found_scale), ([w.reshape(-1) for w in weights], scale))


def zero_optimizer(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1.0)


def run_zero(rank, folder):
    size = dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    optimizer = mechanize(zero_optimizer(model))
    assert type(optimizer).__name__ == "ZeroRedundancyOptimizer"
    train(model, optimizer, rank, size, stop=HALF)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, Path(folder) / "zero.pt")
    scale = tuner(optimizer).scale.clone()
    train(model, optimizer, rank, size, start=HALF)
    went_on = result(model, optimizer)

    dist.barrier()
    other = torch.nn.parallel.DistributedDataParallel(make_model())
    resumed = mechanize(zero_optimizer(other))
    saved = torch.load(Path(folder) / "zero.pt", weights_only=True)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert torch.equal(tuner(resumed).scale, scale)
    train(other, resumed, rank, size, start=HALF)
    # DDP adds up gradients in another order before it has rebuilt its buckets.
    assert_alike(result(other, resumed), went_on)
    return went_on


@pytest.mark.parametrize("size", [2, case(4, name="4", by_day=False)])
def test_zero_redundancy_and_its_checkpoints(pools, tmp_path, size):
    for found in pools[size].run(run_zero, str(tmp_path)):
        assert_alike(found, alone("AdamW"))


def run_zero_with_fewer_parameters_than_ranks(rank):
    """Ranks that hold nothing take part in the sums all the same."""
    weights = torch.nn.Parameter(torch.ones(3))
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = mechanize(ZeroRedundancyOptimizer([weights], torch.optim.SGD, lr=1.0))
    for _ in range(30):
        weights.grad = weights.detach() - 2
        optimizer.step()
    return full(weights), float(tuner(optimizer).scale), tuner(optimizer).agrees()


def zero_meets_a_nan(rank, fused):
    """One rank holds everything, the other nothing; a skipped step among the first ten."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    weights = torch.nn.Parameter(torch.ones(3))
    optimizer = mechanize(
        ZeroRedundancyOptimizer([weights], torch.optim.AdamW, lr=1.0, fused=fused)
    )
    for step in range(30):
        weights.grad = weights.detach() - 2
        if step in (3, 20):
            weights.grad[0] = math.nan
        optimizer.step()
    assert tuner(optimizer).agrees()
    return full(weights), float(tuner(optimizer).scale)


@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_where_one_rank_has_no_parameter(pools, fused):
    weights = torch.nn.Parameter(torch.ones(3))
    optimizer = mechanize(torch.optim.AdamW([weights], lr=1.0))
    for _ in range(28):
        weights.grad = weights.detach() - 2
        optimizer.step()
    for found, scale in pools[2].run(zero_meets_a_nan, fused):
        assert scale == pytest.approx(float(tuner(optimizer).scale), rel=SCALE_BOUND)
        torch.testing.assert_close(found, weights.detach())


def detach_zero(rank):
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    optimizer = zero_optimizer(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    mechanize(optimizer)
    train(model, optimizer, rank, 2)
    scale = float(tuner(optimizer).scale)
    plain = tuner(optimizer).detach()
    assert plain is optimizer
    assert type(optimizer.optim) is torch.optim.AdamW
    train(model, optimizer, rank, 2, start=STEPS, stop=STEPS + 1)
    rates = [own.param_groups[0]["lr"] for own in (optimizer, optimizer.optim)]
    optimizer.consolidate_state_dict()
    left = "mechanic" in optimizer.state_dict()["param_groups"][0] if rank == 0 else False
    return scale, rates, scheduler.base_lrs, left


def test_zero_is_given_back_with_the_learned_lr(pools):
    for scale, rates, base_lrs, left in pools[2].run(detach_zero):
        assert 0 < scale < 0.5
        assert rates == [scale, scale]
        assert base_lrs == [scale]
        assert not left


def test_ranks_without_a_parameter(pools):
    weights = torch.nn.Parameter(torch.ones(3))
    optimizer = mechanize(torch.optim.SGD([weights], lr=1.0))
    for _ in range(30):
        weights.grad = weights.detach() - 2
        optimizer.step()
    for found, scale, agrees in pools[4].run(run_zero_with_fewer_parameters_than_ranks):
        assert agrees
        assert scale == pytest.approx(float(tuner(optimizer).scale), rel=SCALE_BOUND)
        torch.testing.assert_close(found, weights.detach())


def run_stages(rank):
    """Two pipeline stages, each with an optimizer of its own, as torch's schedules run them."""
    layers = list(make_model())
    stage = torch.nn.Sequential(*(layers[:3] if rank == 0 else layers[3:]))
    optimizer = mechanize(BASES["AdamW"](stage.parameters()), process_group=dist.group.WORLD)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        if rank == 0:
            hidden = stage(inputs)
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(len(inputs), 8)
            dist.recv(hidden, 0)
            torch.nn.functional.mse_loss(stage(hidden.requires_grad_()), targets).backward()
            dist.send(hidden.grad, 0)
        optimizer.step()
    return result(stage, optimizer)


def test_pipeline_stages_with_an_optimizer_each(pools):
    (first, scale), (second, _) = pools[2].run(run_stages)
    assert_alike((first + second, scale), alone("AdamW"))


def run_stages_of_shards(rank):
    """Two stages of two ranks each, FSDP2 within a stage, over one group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    number = mesh["stage"].get_local_rank()
    stage = torch.nn.Linear(5, 3, dtype=torch.float64)
    with torch.no_grad():
        for index, param in enumerate(stage.parameters()):
            param.copy_(stage_values(number, index, param.shape))
    fully_shard(stage, mesh=mesh["data"])
    lr = (0.1, 1.0)[number]
    optimizer = mechanize(
        torch.optim.SGD(stage.parameters(), lr=lr), process_group=dist.group.WORLD
    )
    for _ in range(30):
        for param in stage.parameters():
            param.grad = param.detach() - 1
        optimizer.step()
    return result(stage, optimizer)


def stage_values(number, index, shape):
    draw = torch.Generator().manual_seed(10 * number + index)
    return torch.randn(shape, generator=draw, dtype=torch.float64)  # 30 steps enlarge a rounding


def test_stages_that_are_sharded_and_have_rates_of_their_own(pools):
    stages = [
        [torch.nn.Parameter(stage_values(number, 0, (3, 5))),
         torch.nn.Parameter(stage_values(number, 1, (3,)))]
        for number in range(2)
    ]  # fmt: skip
    groups = [{"params": own, "lr": lr} for own, lr in zip(stages, (0.1, 1.0), strict=True)]
    optimizer = mechanize(torch.optim.SGD(groups))
    for _ in range(30):
        for param in stages[0] + stages[1]:
            param.grad = param.detach() - 1
        optimizer.step()
    for rank, found in enumerate(pools[4].run(run_stages_of_shards)):
        own = [param.detach() for param in stages[rank // 2]]
        assert_alike(found, (own, float(tuner(optimizer).scale)))


# Checkpoints


def options_of(style):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(
        flatten_optimizer_state_dict=style == "flat",
        full_state_dict=style == "full",
        broadcast_from_rank0=style == "full" and dist.is_initialized(),
    )


def save(model, optimizer, folder, style):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = options_of(style)
    if style == "full":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    if style == "full":
        if dist.get_rank() == 0:
            torch.save((weights, state), Path(folder) / "full.pt")
        dist.barrier()
        return None
    saved = {"model": weights, "optimizer": state}
    if style == "async":
        # it talks while training does, and so needs a group of its own
        return dcp.async_save(saved, checkpoint_id=folder, process_group=dist.new_group())
    dcp.save(saved, checkpoint_id=folder)
    return None


def load(model, optimizer, folder, style):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    options = options_of(style)
    if style == "full":
        weights, state = {}, {}
        if not dist.is_initialized() or dist.get_rank() == 0:
            weights, state = torch.load(Path(folder) / "full.pt", weights_only=True)
    else:
        weights, state = get_state_dict(model, optimizer, options=options)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_model_state_dict(model, weights, options=options)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def save_and_go_on(rank, engine, base, folder, style):
    model, part, parts = spread(engine, make_model())
    optimizer = mechanize(BASES[base](model.parameters()))
    train(model, optimizer, part, parts, stop=HALF)
    pending = save(model, optimizer, folder, style)
    scale = float(tuner(optimizer).scale)
    train(model, optimizer, part, parts, start=HALF)  # while an asynchronous one is being written
    if pending is not None:
        pending.result()
    return scale, result(model, optimizer)


def load_and_go_on(rank, engine, base, folder, style):
    model, part, parts = spread(engine, make_model())
    return resume(model, base, folder, style, part, parts)


def resume(model, base, folder, style, part=0, parts=1):
    optimizer = mechanize(BASES[base](model.parameters()))
    load(model, optimizer, folder, style)
    scale = float(tuner(optimizer).scale)
    train(model, optimizer, part, parts, start=HALF)
    return scale, result(model, optimizer)


MOVES = [
    ("sharded", "AdamW", (2, "fsdp"), [(4, "fsdp"), (1, "alone"), (2, "fsdp")]),
    ("flat", "AdamW", (2, "fsdp"), [(4, "fsdp-tensor"), (1, "alone")]),
    ("full", "AdamW", (2, "fsdp"), [(4, "fsdp"), (1, "alone")]),
    ("async", "SGD", (2, "fsdp"), [(4, "hybrid"), (1, "alone")]),
    ("sharded", "Lion", (4, "fsdp-tensor"), [(2, "fsdp"), (2, "ddp"), (2, "tensor")]),
]


@pytest.mark.filterwarnings("ignore")  # torch's own, about its checkpoints
@pytest.mark.parametrize(
    ("style", "base", "origin", "targets"),
    [case(*move, name=f"{move[0]}-{move[1]}", by_day=move[1] != "Lion") for move in MOVES],
)
def test_saved_at_one_world_size_and_loaded_at_another(
    pools, tmp_path, style, base, origin, targets
):
    size, engine = origin
    folder = str(tmp_path)
    saved = pools[size].run(save_and_go_on, engine, base, folder, style)
    scale, went_on = saved[0]
    assert {own for own, _ in saved} == {scale}
    for size, engine in targets:
        if engine == "alone":
            found = [resume(make_model(), base, folder, style)]
        else:
            found = pools[size].run(load_and_go_on, engine, base, folder, style)
        for loaded, ended in found:
            assert loaded == scale  # bit for bit
            assert_alike(ended, went_on)
            if (size, engine) == origin:
                assert all(map(torch.equal, ended[0], went_on[0]))


# What cannot be


def refusals(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, _, _ = spread("fsdp", make_model())
    with pytest.raises(ValueError, match="LBFGS"):
        mechanize(torch.optim.LBFGS(model.parameters()))
    alone = dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match=r"leaves out ranks \[[01]\]"):
        mechanize(BASES["AdamW"](model.parameters()), process_group=alone)
    overlapping = ZeroRedundancyOptimizer(
        make_model().parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1.0
    )
    with pytest.raises(ValueError, match="overlap_with_ddp"):
        mechanize(overlapping)
    given = mechanize(BASES["AdamW"](make_model().parameters()), process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="cannot be pickled"):
        pickle.dumps(given)
    twin = copy.deepcopy(given)
    assert twin._mechanic.process_group is dist.group.WORLD
    return True


def test_what_is_refused(pools):
    assert pools[2].run(refusals) == [True, True]


# Faults


def nan_on_one_rank(rank, fused):
    model, part, parts = spread("fsdp", make_model())
    optimizer = mechanize(torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused))
    for step in range(24):
        optimizer.zero_grad()
        loss_of(model, step, part, parts).backward()
        if step in (5, 12):
            with torch.no_grad():
                if rank == 1:
                    next(model.parameters()).grad.to_local()[0, 0] = math.nan
            before = [param.to_local().clone() for param in model.parameters()]
            moments = [own["exp_avg"].to_local().clone() for own in optimizer.state.values()]
            scale = tuner(optimizer).scale.clone()
        optimizer.step()
        if step in (5, 12):
            after = [param.to_local() for param in model.parameters()]
            assert all(map(torch.equal, after, before))
            now = [own["exp_avg"].to_local() for own in optimizer.state.values()]
            assert all(map(torch.equal, now, moments))
            assert torch.equal(tuner(optimizer).scale, scale)
    return int(tuner(optimizer).metrics()["skipped"]), result(model, optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_on_one_rank_skips_the_step_on_all(pools, fused):
    model = make_model()
    optimizer = mechanize(BASES["AdamW"](model.parameters()))
    for step in range(24):
        if step in (5, 12):
            continue
        train(model, optimizer, start=step, stop=step + 1)
    for skipped, found in pools[2].run(nan_on_one_rank, fused):
        assert skipped == 2
        assert_alike(found, result(model, optimizer))


DYING = """
import os, sys, torch
from torch import distributed as dist
sys.path.insert(0, {tests!r})
from distributed import loss_of, make_model, spread
from mechanic.torch import mechanize
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

dist.init_process_group("gloo")
model, part, parts = spread("fsdp", make_model())
optimizer = mechanize(torch.optim.AdamW(model.parameters(), lr=1.0))
for step in range(40):
    optimizer.zero_grad()
    loss_of(model, step, part, parts).backward()
    if step == 20:
        dcp.save({{"optim": get_optimizer_state_dict(model, optimizer)}}, checkpoint_id={folder!r})
    if step == 30 and dist.get_rank() == 1:
        os._exit(7)
    if step == 30:
        print("about to step", flush=True)
    optimizer.step()
"""


@pytest.mark.nightly
@pytest.mark.skipif(FSDP_NEEDS_A_GPU, reason="FSDP2 on a CPU needs torch 2.7")
def test_a_rank_that_dies_leaves_the_others_with_an_error(tmp_path, pools):
    folder = str(tmp_path / "checkpoint")
    script = DYING.format(tests=str(Path(__file__).parent), folder=folder)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment(**common, RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert ranks[1].wait(100) == 7
    begun = time.monotonic()
    output, errors = ranks[0].communicate(timeout=60)
    assert time.monotonic() - begun < 30
    assert "about to step" in output
    assert ranks[0].returncode == 1
    assert "Connection" in errors.splitlines()[-1], errors  # gloo's own word for it
    ranks[1].communicate()
    assert pools[2].run(load_checkpoint, folder) == [21, 21]


def load_checkpoint(rank, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model, _, _ = spread("fsdp", make_model())
    optimizer = mechanize(BASES["AdamW"](model.parameters()))
    saved = {"optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(saved, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, saved["optim"])
    return int(tuner(optimizer).metrics()["steps"]) + 1


def free_port():
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
