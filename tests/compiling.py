"""Compiles the kernels for a GPU that need not be there, and prints what became of them as JSON.

    TRITON_CACHE_DIR=$(mktemp -d) python tests/compiling.py

It is a script, since it has to run without Triton's interpreter.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import triton.runtime.jit
from lion_pytorch import Lion
from torch.optim import AdamW, Optimizer, RMSprop
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from mechanic.torch import mechanize
from mechanic.torch.kernels import dispatch

CASES: list[tuple[Callable[[Any], Optimizer], torch.dtype, dict[str, Any]]] = [
    (lambda p: AdamW(p, lr=1.0, fused=True), torch.float32, {}),
    (lambda p: RMSprop(p, lr=1.0), torch.float32, {}),  # the one that is not known
    (Lion, torch.bfloat16, {"preset": "paper", "max_grad_norm": 1.0}),
]


class Absent(DriverBase):
    """A driver of a GPU that nothing is launched on."""

    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> None:
        pass

    def get_device_interface(self) -> Any:
        return torch.cpu


def main() -> None:
    driver.set_active(Absent())
    found: dict[str, dict[str, Any]] = {}
    run = triton.runtime.jit.JITFunction.run

    def compile_only(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        made = run(kernel, *args, warmup=True, **kwargs)
        lines = made.asm["ptx"].splitlines()
        found.setdefault(
            made.hash,
            {
                "kernel": kernel.fn.__name__,
                "case": case,
                "cubin": len(made.asm["cubin"]),
                "wide loads": sum("ld.global.v4.b32" in line for line in lines),
                "wide stores": sum("st.global.v4.b32" in line for line in lines),
            },
        )

    triton.runtime.jit.JITFunction.run = compile_only
    dispatch.DEVICES = ("cpu",)
    for case, (make, dtype, options) in enumerate(CASES):
        param = torch.nn.Parameter(torch.ones(64, dtype=dtype))
        optimizer = mechanize(make([param]), **options)
        for _ in range(2):  # the plain path makes the first step of a base that is not known
            if case not in [row["case"] for row in found.values()]:
                param.grad = torch.ones_like(param)
                optimizer.step()
    print(json.dumps(list(found.values())))


if __name__ == "__main__":
    main()
