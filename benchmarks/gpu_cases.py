"""What `step_cost.py` measures on a GPU: the methods, their steps and memory, and GPT-2."""

import gc
import importlib
import importlib.util
import inspect
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, NAdam, Optimizer

from mechanic.torch import mechanize
from mechanic.torch.mechanism import MECHANISM

Params = list[nn.Parameter]
Method = Callable[[Params], Optimizer]
Shapes = list[tuple[int, ...]]
Work = Sequence[Callable[[], object]]

SEED = 0
FIRST = 15
"""Steps before timing begins: the first ten steps of a tuner differ from those that follow."""
LOOKED_AT = 260
"""The same of what is mechanized, on a GPU: some weights are looked at in the first 256 steps, and
later in one of 32."""

CONTEXT = 1024
VOCABULARY = 50257
PADDED = 50304
"""The vocabulary in training: a multiple of 64 makes the whole step faster. A slower step would
flatter every optimizer."""


class BlackBox(AdamW):
    """An AdamW that the library cannot recognize as one."""

    def step(self, closure=None):
        return super().step(closure)


def fused(params: Params, kind: type[AdamW] = AdamW) -> AdamW:
    return kind(params, lr=1e-3, fused=True)


def momentum(params: Params) -> SGD:
    return SGD(params, lr=1e-3, momentum=0.9, fused=True)


def imported(package: str) -> ModuleType:
    return importlib.import_module(package)


def lion(params: Params) -> Optimizer:
    return imported("lion_pytorch").Lion(params, lr=1e-4)


def schedule_free(params: Params) -> Optimizer:
    optimizer = imported("schedulefree").AdamWScheduleFree(params, lr=1e-3)
    optimizer.train()
    return optimizer


@dataclass(frozen=True)
class Row:
    """A method."""

    label: str
    make: Method
    base: str = "adamw"
    """The row that the ratio refers to"""
    words: float | None = None
    """Words moved per parameter in a step, by count"""
    kept: float = 4
    """Words of weights and state per parameter; they decide what fits in the memory"""
    passing: float = 3
    """Words that are allocated during a step only, at most"""
    package: str | None = None
    option: str | None = None
    """A package and an option of mechanize that the row needs"""
    arrives: bool = False
    """Whether a backward pass produces its gradients before each step"""

    def lacks(self) -> str | None:
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.option and self.option not in inspect.signature(mechanize).parameters:
            return f"not there: mechanize has no {self.option}="
        return None


ROWS = {
    # reads x, g, m, v, writes x, m, v
    "adamw": Row("AdamW(fused=True)", fused, words=7, kept=3, passing=0),
    # reads g, Δ; then reads x, g, m, v, Δ, writes x, m, v, Δ
    "mechanic": Row("mechanize(AdamW(fused=True))", lambda p: mechanize(fused(p)), words=11),
    # reads x, g, m, v, Δ, writes x, m, v, Δ; it keeps gradients of its own
    "sums-in-backward": Row(
        "mechanize(AdamW(fused=True), sums_in_backward=True)",
        lambda p: mechanize(fused(p), sums_in_backward=True),
        words=9,
        kept=5,
        option="sums_in_backward",
        arrives=True,
    ),
    # Δ, read twice and written once, is half a word
    "bfloat16": Row(
        'mechanize(AdamW(fused=True), displacement="bfloat16")',
        lambda p: mechanize(fused(p), displacement="bfloat16"),
        words=9.5,
        option="displacement",
    ),
    # reads g, Δ; copies x; AdamW's 7; then reads x, the copy, Δ, writes x, Δ
    "black-box": Row(
        "mechanize over AdamW(fused=True) as a black box",
        lambda p: mechanize(fused(p, BlackBox)),
        words=16,
    ),
    "unfused": Row(
        "mechanize(AdamW())", lambda p: mechanize(AdamW(p, lr=1e-3)), words=11, passing=4
    ),
    # reads x, g, m, writes x, m
    "sgd": Row("SGD(momentum=0.9, fused=True)", momentum, "sgd", words=5, kept=2, passing=0),
    # reads g, Δ; then reads x, g, m, Δ, writes x, m, Δ
    "mechanic-sgd": Row(
        "mechanize(SGD(momentum=0.9, fused=True))",
        lambda p: mechanize(momentum(p)),
        "sgd",
        words=9,
        kept=3,
    ),
    # reads x, g, m, Δ, writes x, m, Δ; it keeps gradients of its own
    "sgd-in-backward": Row(
        "mechanize(SGD(momentum=0.9, fused=True), sums_in_backward=True)",
        lambda p: mechanize(momentum(p), sums_in_backward=True),
        "sgd",
        words=7,
        kept=4,
        option="sums_in_backward",
        arrives=True,
    ),
    "sgd-bfloat16": Row(
        'mechanize(SGD(momentum=0.9, fused=True), displacement="bfloat16")',
        lambda p: mechanize(momentum(p), displacement="bfloat16"),
        "sgd",
        words=7.5,
        kept=3,
        option="displacement",
    ),
    # reads x in the sums, too
    "paper": Row(
        'mechanize(AdamW(fused=True), preset="paper")',
        lambda p: mechanize(fused(p), preset="paper"),
        words=12,
    ),
    "paper-bfloat16": Row(
        'mechanize(AdamW(fused=True), preset="paper", displacement="bfloat16")',
        lambda p: mechanize(fused(p), preset="paper", displacement="bfloat16"),
        words=10.5,
        option="displacement",
    ),
    "nadam": Row("NAdam()", lambda p: NAdam(p, lr=1e-3), "nadam", kept=3, passing=4),
    "mechanic-nadam": Row(
        "mechanize(NAdam())", lambda p: mechanize(NAdam(p, lr=1e-3)), "nadam", passing=5
    ),
    "adafactor": Row(
        "Adafactor()", lambda p: Adafactor(p, lr=1e-2), "adafactor", kept=1.1, passing=3
    ),
    "mechanic-adafactor": Row(
        "mechanize(Adafactor())",
        lambda p: mechanize(Adafactor(p, lr=1e-2)),
        "adafactor",
        kept=2.1,
        passing=4,
    ),
    "lion": Row("Lion()", lion, "lion", kept=2, passing=1, package="lion_pytorch"),
    "mechanic-lion": Row(
        "mechanize(Lion())",
        lambda p: mechanize(lion(p)),
        "lion",
        words=9,
        kept=3,
        package="lion_pytorch",
    ),
    "mechanic-pytorch": Row(
        "mechanic-pytorch over AdamW(fused=True)",
        lambda p: imported("mechanic_pytorch").mechanize(AdamW)(p, lr=1e-3, fused=True),
        kept=4.1,
        passing=4,
        package="mechanic_pytorch",
    ),
    "prodigy": Row(
        "Prodigy", lambda p: imported("prodigyopt").Prodigy(p), kept=5, package="prodigyopt"
    ),
    "d-adaptation": Row(
        "D-Adapt Adam", lambda p: imported("dadaptation").DAdaptAdam(p), package="dadaptation"
    ),
    "schedule-free": Row("Schedule-Free AdamW", schedule_free, kept=3, package="schedulefree"),
}
WHOLE = ("adamw", "mechanic", "sums-in-backward")
"""The rows whose whole training steps are timed"""


def clock(work: Callable[[], object], device: str) -> float:
    """The seconds that the work takes."""
    if device == "cpu":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin_event.record()
    work()
    end_event.record()
    torch.cuda.synchronize()
    return begin_event.elapsed_time(end_event) / 1e3


def copy_bandwidth(device: str, elements: int = 1 << 30) -> float:
    """Bytes per second, read and written, of a copy on the device."""
    source = torch.empty(elements, device=device).normal_()
    target = torch.empty_like(source)

    def copies() -> None:
        for _ in range(5):
            target.copy_(source)

    seconds = [clock(copies, device) for _ in range(12)][2:]
    return 5 * 2 * source.nbytes / statistics.median(seconds)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Gradients:
    """The gradients that all methods share: copies of them would leave room for fewer."""

    def __init__(self, case: Shapes, device: str) -> None:
        self._generator = torch.Generator(device).manual_seed(SEED)
        self.tensors = [torch.empty(shape, device=device) for shape in case]
        self.draw()

    def draw(self) -> None:
        for tensor in self.tensors:
            tensor.normal_(0, 1e-3, generator=self._generator)

    def arrive_at(self, params: Params) -> None:
        """A backward pass, in which each parameter gets a copy of its gradient."""
        for param in params:
            param.grad = None
        torch.autograd.backward(params, self.tensors)


@dataclass
class Result:
    """What was measured for a method; times are in seconds, one per round."""

    memory: tuple[float, float, float] | None
    """Bytes per parameter beyond weights and gradients: the state, the peak of a step, and the
    peak of the first steps; None on a CPU"""
    plain_backward: float
    """The time of a backward pass before there was an optimizer"""
    backwards: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


def start(row: Row, gradients: Gradients, device: str) -> tuple[Work, Result]:
    """Give a method its own weights, take its first steps, and measure its memory. Returns what is
    to be timed: its step, after the backward pass if the row has one."""
    chance = torch.Generator(device).manual_seed(SEED + 1)
    params = []
    for gradient in gradients.tensors:
        weights = torch.empty_like(gradient).normal_(0, 0.02, generator=chance)
        params.append(nn.Parameter(weights))
        params[-1].grad = gradient
    work: list[Callable[[], object]] = []
    plain = math.nan
    if row.arrives:
        work.append(lambda: gradients.arrive_at(params))
        plain = statistics.median(clock(work[0], device) for _ in range(5))
    memory = torch.cuda if device == "cuda" else None
    before = memory.memory_allocated() if memory else 0
    optimizer = row.make(params)
    work.append(optimizer.step)
    peaks = []
    for steps in (LOOKED_AT if hasattr(optimizer, MECHANISM) else FIRST, 1):
        if memory:
            memory.reset_peak_memory_stats()
        for _ in range(steps):
            gradients.draw()
            for part in work:
                part()
        peaks.append(memory.max_memory_allocated() - before if memory else 0)
    if memory is None:
        return work, Result(None, plain)
    size = sum(param.numel() for param in params)
    first, most = (peak / size for peak in peaks)
    return work, Result(((memory.memory_allocated() - before) / size, most, first), plain)


def shapes(width: int, layers: int) -> Shapes:
    """The parameters of a GPT-2 whose head is tied to its embedding."""
    block = [(width,), (width,)]
    block += [(3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(VOCABULARY, width), (CONTEXT, width), *block * layers, (width,), (width,)]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 without dropout; the defaults are those of 124M parameters in 148 tensors."""

    def __init__(
        self,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        vocabulary: int = PADDED,
        context: int = CONTEXT,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.tokens.weight)


def loss(model: GPT2, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def training_steps(
    model: GPT2,
    optimizer: Optimizer,
    compiled: Callable[[GPT2, Tensor], Tensor],
    ids: Tensor,
    count: int,
) -> Callable[[], None]:
    """A function that takes `count` whole training steps on `ids`, in bf16 autocast."""

    def run() -> None:
        for _ in range(count):
            optimizer.zero_grad()
            with torch.autocast(ids.device.type, dtype=torch.bfloat16):
                value = compiled(model, ids)
            value.backward()
            optimizer.step()

    return run
