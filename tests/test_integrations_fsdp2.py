"""accelerate's FSDP2 plugin: prepared, saved, loaded, and the same as in one process."""

import os

import pytest
import torch
from distributed import Pool, loss_of, make_model

from mechanic.integrations import metrics
from mechanic.torch import mechanize, tuner

pytest.importorskip("accelerate", minversion="1.15")  # in 1.6 its FSDP2 wraps nothing by size
# What accelerate and its dependencies warn about among themselves is not ours.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.nightly]

STEPS = 40


@pytest.fixture(scope="module")
def pool():
    processes = Pool(2)
    yield processes
    processes.stop()


def accelerator_of(kind):
    """An accelerator that shards on a CPU. accelerate itself does so on accelerators alone: with
    `cpu=True` it would leave the plugin aside, without a word, and run DistributedDataParallel."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state()
    PartialState._reset_state()
    os.environ.update(LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="1")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=50,
        state_dict_type=kind,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    assert accelerator.is_fsdp2
    return accelerator


def train(accelerator, model, optimizer, start, end):
    rank, size = accelerator.process_index, accelerator.num_processes
    for step in range(start, end):
        accelerator.backward(loss_of(model, step, rank, size))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def whole(model):
    from torch.distributed.tensor import DTensor

    assert all(isinstance(param, DTensor) for param in model.parameters())
    return [param.full_tensor().detach().clone() for param in model.parameters()]


def sharded(rank, folder, kind, when):
    """A run that is saved at half its length, goes on, and is taken up again from there."""
    accelerator = accelerator_of(kind)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=10.0)
    if when == "before":
        optimizer = mechanize(optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    if when == "after":
        mechanize(optimizer.optimizer)
    train(accelerator, model, optimizer, 0, 2)
    early = metrics(optimizer)
    train(accelerator, model, optimizer, 2, STEPS // 2)
    accelerator.save_state(folder)
    middle = metrics(optimizer)
    train(accelerator, model, optimizer, STEPS // 2, STEPS)
    expected, end = whole(model), metrics(optimizer)
    accelerator.load_state(folder)
    loaded = metrics(optimizer)
    train(accelerator, model, optimizer, STEPS // 2, STEPS)
    equal = all(map(torch.equal, expected, whole(model)))
    return [early, middle, loaded, end, metrics(optimizer)], equal, expected


def alone():
    model = make_model()
    optimizer = mechanize(torch.optim.AdamW(model.parameters(), lr=10.0))
    for step in range(STEPS):
        loss_of(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return float(tuner(optimizer).scale), list(model.parameters())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_prepared_saved_and_loaded(pool, tmp_path, kind, when):
    """`mechanize` before `prepare`, or after it."""
    scale, params = alone()
    for logged, equal, found in pool.run(sharded, str(tmp_path / "state"), kind, when):
        early, middle, loaded, end, again = logged
        assert middle["mechanic/lr/0"] == pytest.approx(10 * middle["mechanic/scale"])
        assert end["mechanic/scale"] > middle["mechanic/scale"] > 2 * early["mechanic/scale"] > 0
        assert loaded == middle
        assert again == end
        assert equal
        assert end["mechanic/scale"] == pytest.approx(scale, rel=1e-4)
        for one, two in zip(found, params, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)
