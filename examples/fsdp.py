"""FSDP2 with a learned learning rate: a small transformer reads digits row by row, sharded.

    torchrun --nproc-per-node 2 examples/fsdp.py
    torchrun --nproc-per-node 4 examples/fsdp.py --checkpoint run1             # saves at the end
    torchrun --nproc-per-node 2 examples/fsdp.py --checkpoint run1 --resume    # at any world size

It uses gloo on a CPU and nccl on GPUs. The learned rate is the same with any number of processes.
"""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mechanic.torch import mechanize, tuner

BATCH = 64  # over all processes


class Reader(nn.Module):
    """Reads eight rows of eight pixels; each row is a token."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rows = nn.Linear(8, width)
        self.place = nn.Parameter(torch.randn(8, width) / 10)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.rows(images) + self.place
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))


def batches(steps: range, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This process's part of each batch. The whole batch is the same at every world size."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in steps:
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))
        own = chosen[:BATCH].chunk(size)[rank]
        yield images[own].to(device), labels[own].to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", metavar="FOLDER", help="save here at the end")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FOLDER, where the run was saved")

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = Reader().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = mechanize(torch.optim.AdamW(model.parameters(), lr=1.0))  # after fully_shard

    done = 0
    if args.resume:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        done = int(tuner(optimizer).metrics()["steps"])

    for step, (images, labels) in enumerate(batches(range(done, done + args.steps), device), done):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if (step + 1) % 50 == 0:
            dist.all_reduce(loss.detach_(), op=dist.ReduceOp.SUM)
            if dist.get_rank() == 0:
                mean, rate = loss / dist.get_world_size(), float(tuner(optimizer).effective_lr[0])
                print(f"step {step + 1:5}  loss {float(mean):.4f}  lr {rate:.3g}", flush=True)

    if args.checkpoint:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
