"""Processes that train together over gloo: `Pool` keeps them between tests, since to start them is
what takes time, and runs a function of a test on all of them.

The job that the tests run is here too: one small model, under each of torch's engines.
"""

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed as dist

FSDP_NEEDS_A_GPU = torch.__version__ < (2, 7)
FSDP_LACKS = ("has no attribute 'record_event'", "unexpected keyword argument 'ignored_params'")

PATIENCE = 120.0  # seconds: a process that has not answered by then never will

# What takes seconds to import, and is imported once, by the process that all others are forked from
PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "pytest"]


class Pool:
    """So many processes in one process group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """What `job(rank, *args)` gives on each process. It is a function of a module.

        Raises:
            AssertionError: if it fails on one of them, with its traceback.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((job, args))
        answers = [self._answer(rank) for rank in range(self.size)]
        failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
        if failed:
            self.stop()
            if FSDP_NEEDS_A_GPU and any(word in failed[0] for word in FSDP_LACKS):
                pytest.skip("FSDP2 on a CPU needs torch 2.7")
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def _answer(self, rank: int) -> tuple[str, Any]:
        try:
            if self._pipes[rank].poll(PATIENCE):
                answer: tuple[str, Any] = self._pipes[rank].recv()
                return answer
        except EOFError:
            return "it died", None
        return f"it gave no answer in {PATIENCE} seconds", None

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        pairs = [context.Pipe() for _ in range(self.size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=_serve, args=(rank, self.size, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()

    def stop(self) -> None:
        """End the processes; the next `run` starts others."""
        for process in self._processes:
            process.kill()
            process.join()
        if self._processes:
            self._folder.cleanup()
        self._processes = []


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE / 2),
    )
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = ("", job(rank, *args))
        except BaseException:
            answer = (traceback.format_exc(), None)
        pipe.send(answer)


# The model, its data, and the engines.

WIDTHS = (7, 12, 5)  # the last does not divide: shards are uneven, and of 4 one has nothing


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    first, middle, last = WIDTHS
    return torch.nn.Sequential(
        torch.nn.Linear(first, middle),
        torch.nn.Tanh(),
        torch.nn.Linear(middle, 8),
        torch.nn.LayerNorm(8),
        torch.nn.Tanh(),
        torch.nn.Linear(8, last),
    ).to(dtype)


def batch(step: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    inputs = torch.randn(rows, WIDTHS[0], generator=draw)
    noise = torch.randn(rows, WIDTHS[-1], generator=draw)
    return inputs, inputs[:, : WIDTHS[-1]].sin() * 2 + noise / 2


def loss_of(model: torch.nn.Module, step: int, part: int = 0, parts: int = 1) -> torch.Tensor:
    """The mean loss over one part of a batch; parts are of one size, so that their mean is that
    of the whole."""
    inputs, targets = (tensor.chunk(parts)[part] for tensor in batch(step))
    return torch.nn.functional.mse_loss(model(inputs), targets)


def spread(engine: str, model: torch.nn.Sequential) -> tuple[torch.nn.Module, int, int]:
    """The model under an engine, over all processes, and which part of a batch is this one's, of
    how many."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, size = dist.get_rank(), dist.get_world_size()
    if engine == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model), rank, size
    if engine == "tensor":
        return _parallelize(model, init_device_mesh("cpu", (size,))), 0, 1
    if engine in ("fsdp", "beside"):
        # Beside DTensors the LayerNorm stays plain; what fully_shard ignores, the user averages.
        plain = set(model[3].parameters()) if engine == "beside" else set()
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model, **({"ignored_params": plain} if plain else {}))  # not in torch 2.6
        for param in plain:
            param.register_post_accumulate_grad_hook(_average)
        return model, rank, size
    names = ("data", "tensor") if engine == "fsdp-tensor" else ("copies", "shards")
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names)
    if engine == "hybrid":
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, rank, size
    assert engine == "fsdp-tensor"
    _parallelize(model, mesh["tensor"])
    fully_shard(model[0], mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model, mesh["data"].get_local_rank(), 2


def _average(param: torch.Tensor) -> None:
    dist.all_reduce(param.grad)
    param.grad /= dist.get_world_size()


def _parallelize(model: torch.nn.Sequential, mesh: Any) -> torch.nn.Module:
    """Two layers split across, then along; the LayerNorm and the last layer are not split."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every process."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()
