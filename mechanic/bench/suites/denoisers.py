"""Two networks that predict the noise in an image, a U-Net and a DiT; LoRA for the latter."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

GROUPS = 8  # of the group norms
PATCH = 4
HEAD = 64  # width of an attention head


class TimeEmbedding(nn.Module):
    """A time between 0 and 1 as a vector: waves of many lengths, then two linear layers."""

    def __init__(self, waves: int, width: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1000 * torch.logspace(0, -4, waves // 2))
        self.layers = nn.Sequential(nn.Linear(waves, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: Tensor) -> Tensor:
        """One vector for each time."""
        angles = time[:, None] * self.get_buffer("frequencies")
        embedded: Tensor = self.layers(torch.cat([angles.sin(), angles.cos()], 1))
        return embedded


class Residual(nn.Module):
    """Two convolutions beside a shortcut. The time scales and shifts what is between them."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(GROUPS, inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.modulation = nn.Linear(time, 2 * outputs)
        self.second_norm = nn.GroupNorm(GROUPS, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        nn.init.zeros_(self.second.weight)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The features after the block."""
        scale, shift = self.modulation(silu(time))[:, :, None, None].chunk(2, 1)
        hidden = self.first(silu(self.first_norm(x)))
        hidden = self.second_norm(hidden) * (1 + scale) + shift
        block: Tensor = self.shortcut(x) + self.second(silu(hidden))
        return block


class UNet(nn.Module):
    """Three resolutions, each with a block on the way down and one on the way up (Ho et al., 2020,
    without attention)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        time, wide = 4 * width, 2 * width
        self.time = TimeEmbedding(width, time)
        self.entry = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(
            [Residual(width, width, time), Residual(width, wide, time), Residual(wide, wide, time)]
        )
        self.halve = nn.ModuleList(
            [nn.Conv2d(channels, channels, 3, stride=2, padding=1) for channels in (width, wide)]
        )
        self.up = nn.ModuleList(
            [Residual(2 * wide, wide, time), Residual(wide + width, width, time)]
        )
        self.exit = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The noise in each image, given the time of each."""
        embedded = self.time(time)
        fine = self.down[0](self.entry(x), embedded)
        middle = self.down[1](self.halve[0](fine), embedded)
        coarse = self.down[2](self.halve[1](middle), embedded)
        middle = self.up[0](torch.cat([doubled(coarse), middle], 1), embedded)
        fine = self.up[1](torch.cat([doubled(middle), fine], 1), embedded)
        noise: Tensor = self.exit(silu(fine))
        return noise


def doubled(x: Tensor) -> Tensor:
    """Each pixel twice in both directions, by operators that are deterministic on a GPU."""
    count, channels, height, width = x.shape
    pixels = x[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2)
    return pixels.reshape(count, channels, 2 * height, 2 * width)


class DiTBlock(nn.Module):
    """Attention and two linear layers, scaled, shifted and gated by the time. The gates are 0 at
    the start, so that the block is the identity ("adaLN-Zero")."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The tokens after the block."""
        parts = self.modulation(silu(time))[:, None].chunk(6, -1)
        scale, shift, gate, late_scale, late_shift, late_gate = parts
        x = x + gate * self._attend(self.norm(x) * (1 + scale) + shift)
        hidden = self.widen(self.norm(x) * (1 + late_scale) + late_shift)
        tokens: Tensor = x + late_gate * self.narrow(nn.functional.gelu(hidden))
        return tokens

    def _attend(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        split = self.attention(x).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*split)
        mixed: Tensor = self.mix(attended.transpose(1, 2).reshape(count, length, width))
        return mixed


class DiT(nn.Module):
    """A transformer over patches of the image (Peebles and Xie, 2023, without classes)."""

    def __init__(self, width: int, layers: int, size: int = 32) -> None:
        super().__init__()
        self.side, values = size // PATCH, 3 * PATCH**2
        self.time = TimeEmbedding(width, width)
        self.entry = nn.Linear(values, width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, self.side**2, width))
        self.blocks = nn.ModuleList([DiTBlock(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.exit = nn.Linear(width, values)
        nn.init.zeros_(self.exit.weight)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """The noise in each image, given the time of each."""
        embedded, side = self.time(time), self.side
        patches = x.reshape(len(x), 3, side, PATCH, side, PATCH).permute(0, 2, 4, 1, 3, 5)
        tokens = self.entry(patches.reshape(len(x), side**2, -1))
        tokens = tokens + self.positions
        for block in self.blocks:
            tokens = block(tokens, embedded)
        values = self.exit(self.norm(tokens)).view(len(x), side, side, 3, PATCH, PATCH)
        noise: Tensor = values.permute(0, 3, 1, 4, 2, 5).reshape(x.shape)
        return noise


class LowRank(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices, 0 at the start (Hu et al.,
    2022)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.inner = nn.Linear(layer.in_features, rank, bias=False)
        self.outer = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.inner.weight, a=math.sqrt(5))
        nn.init.zeros_(self.outer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the adapted layer."""
        adapted: Tensor = self.layer(x) + self.outer(self.inner(x))
        return adapted


def adapt(model: nn.Module, rank: int) -> nn.Module:
    """Freeze a model, and adapt each of its linear layers with matrices of this rank."""
    model.requires_grad_(False)
    for part in list(model.modules()):
        for name, layer in list(part.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(part, name, LowRank(layer, rank))
    return model
