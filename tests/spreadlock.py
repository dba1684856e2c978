"""The plain path and the kernels side by side over sharded parameters, in a process of a pool.

prepare()
lock = SpreadLock("AdamW", "uneven")
lock.run()
lock.assert_same()
"""

import copy
import functools
import warnings
from types import SimpleNamespace
from typing import Any

import conftest
import torch
from distributed import full
from lockstep import DEVICE, FEW, KNOWN, ON_GPU, Lock, Make, Side
from torch import Tensor
from torch import distributed as dist
from torch.nn import Parameter

from mechanic.torch import tuner
from mechanic.torch.kernels import passes

# name: the mesh, how the parameters are placed on it, and their shapes
PLACES: dict[str, tuple[tuple[int, ...], str, list[tuple[int, ...]]]] = {
    "fsdp": ((2,), "0", [(6,), (4, 5)]),
    "uneven": ((2,), "0", [(7,), (3, 5)]),
    "empty part": ((4,), "0", [(3,), (5, 2)]),
    "a rank with empty parts alone": ((4,), "0", [(3,), (2, 5)]),
    "replicated": ((2,), "r", FEW),
    "hybrid": ((2, 2), "r0", FEW),
    "tensor": ((2,), "1", [(3, 5), (2, 4)]),
    "fsdp and tensor": ((2, 2), "01", [(3, 5), (4, 2)]),
    "split twice": ((2, 2), "00", FEW),
    "beside": ((2,), "0p", FEW),
}
STAGES = [(7,), (2, 5)]

BASES: dict[str, Make] = KNOWN | {
    # With plain tensors beside DTensors, torch takes neither `fused` nor, on a GPU, `foreach`.
    "AdamW-single": lambda p: torch.optim.AdamW(p, lr=1.0, weight_decay=0.1, foreach=False),
}

_interpreting: list[Any] = []


def prepare() -> None:
    """What the fixtures of `lockstep.on_kernels` do, in a process of a pool."""
    if ON_GPU:
        torch.zeros(1, device="cuda:0")  # else a mesh would choose a GPU for each process
    elif not _interpreting:
        _interpreting.append(conftest.quick_interpreter.__wrapped__())
        next(_interpreting[0])
        passes.CHUNK = 1024
        warnings.filterwarnings("ignore", "(invalid value|divide by zero|overflow) encount")


def spread_like(tensor: Tensor, param: Tensor) -> Tensor:
    """A tensor that all processes hold, placed as a parameter is."""
    from torch.distributed.tensor import distribute_tensor

    if not hasattr(param, "device_mesh"):
        return tensor
    own = param.device_mesh, param.placements
    return distribute_tensor(tensor, *own, src_data_rank=None)


def place(name: str, tensors: list[Tensor]) -> list[Tensor]:
    """Parameters as a case of `PLACES` has them; of those beside DTensors, the first is plain."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    sizes, letters, _ = PLACES[name]
    mesh = init_device_mesh(DEVICE, sizes)
    placements = [Replicate() if own == "r" else Shard(int(own)) for own in letters.strip("p")]
    plain = int("p" in letters)
    spread = [SimpleNamespace(device_mesh=mesh, placements=placements)] * (len(tensors) - plain)
    return tensors[:plain] + [
        spread_like(tensor, like) for tensor, like in zip(tensors[plain:], spread, strict=True)
    ]


class SpreadLock(Lock):
    """A `Lock` over parameters of a case of `PLACES`. All processes draw the same gradients."""

    def __init__(self, base: str, name: str, **options: Any) -> None:
        self.draw = torch.Generator().manual_seed(0)
        self.sign, self.first_scale = 1.0, 0.0
        if name == "stages":
            params = [self.noise(STAGES[dist.get_rank()]).to(DEVICE)]
        else:
            params = place(name, [self.noise(shape).to(DEVICE) for shape in PLACES[name][2]])
        self.targets = [spread_like(3 * self.noise(p.shape).to(DEVICE), p) for p in params]
        sides = [[Parameter(param.detach().clone()) for param in params] for _ in range(2)]
        self.plain = Side(BASES[base], sides[0], False, options)
        self.fast = Side(BASES[base], sides[1], True, options)

    def gradients(self) -> list[Tensor]:
        pairs = zip(self.plain.params, self.targets, strict=True)
        return [x.detach() - t + spread_like(self.noise(x.shape).to(DEVICE), x) for x, t in pairs]

    def assert_same(self, tolerance: float = 1e-5, *, factor: float = 20.0) -> None:
        """Compare all of each tensor, so that all processes come to the same answer."""
        lock = copy.copy(self)
        lock.plain, lock.fast = map(gathered, self.sides)
        Lock.assert_same(lock, tolerance, factor=factor)

    def assert_agrees(self) -> None:
        """All processes have learned the same, bit for bit."""
        assert all(tuner(side.optimizer).agrees() for side in self.sides)


def gather(tensor: Tensor) -> Tensor:
    """All of a tensor, on every process. On a GPU by way of the CPU: gloo, which the processes of
    one GPU have, cannot gather there."""
    from torch.distributed.tensor import DTensor

    if not ON_GPU or not isinstance(tensor, DTensor):
        return full(tensor)
    shape: Any = {"shape": tensor.shape, "stride": tensor.stride()}
    part, mesh = tensor.to_local().cpu(), _mesh_on_cpu(tensor.device_mesh)
    return full(DTensor.from_local(part, mesh, tensor.placements, **shape)).to(DEVICE)


@functools.cache
def _mesh_on_cpu(mesh: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", mesh.mesh)


def gathered(side: Side) -> Any:
    """A side with all of each tensor."""
    params = [gather(param) for param in side.params]
    state = {
        whole: {
            key: gather(value) if isinstance(value, Tensor) else value
            for key, value in side.optimizer.state[param].items()
        }
        for param, whole in zip(side.params, params, strict=True)
    }
    optimizer = SimpleNamespace(state=state, param_groups=side.optimizer.param_groups)
    return SimpleNamespace(params=params, optimizer=optimizer, mechanism=side.mechanism)


def messages_of(side: Side) -> int:
    """The collectives of a step."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as messages:
        side.step()
    return int(messages.get_total_counts())
