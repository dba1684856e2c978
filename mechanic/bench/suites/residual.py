"""Residual networks for small images: they begin with a 3x3 convolution, and have no pooling before
the last layer."""

from torch import Tensor, nn
from torch.nn.functional import relu


def resnet18(channels: int, classes: int, width: int = 64, dropout: float = 0.0) -> nn.Module:
    """ResNet-18 (He et al., 2016), with a 3x3 convolution as its first layer."""
    return nn.Sequential(
        _conv3(channels, width),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        *_stages(Block, width, [width, 2 * width, 4 * width, 8 * width], 2, dropout),
        *_head(8 * width, classes, dropout),
    )


def wide_resnet(channels: int, classes: int, blocks: int = 6, wider: int = 10) -> nn.Module:
    """A wide ResNet (Zagoruyko and Komodakis, 2016); by default WRN-40-10."""
    width = 16 * wider
    return nn.Sequential(
        _conv3(channels, 16),
        *_stages(PreBlock, 16, [width, 2 * width, 4 * width], blocks, 0.0),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(),
        *_head(4 * width, classes, 0.0),
    )


class Block(nn.Module):
    """Two convolutions beside a shortcut, each followed by its norm."""

    def __init__(self, inside: int, outside: int, stride: int, dropout: float) -> None:
        super().__init__()
        convolutions = _two_convolutions(inside, outside, stride, dropout)
        self.path = nn.Sequential(*convolutions, nn.BatchNorm2d(outside))
        self.shortcut: nn.Module = nn.Identity()
        if inside != outside:
            project = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        """The output for a batch of images."""
        return relu(self.shortcut(x) + self.path(x))


class PreBlock(nn.Module):
    """Two convolutions beside a shortcut, each preceded by its norm."""

    def __init__(self, inside: int, outside: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.BatchNorm2d(inside), nn.ReLU())
        self.path = nn.Sequential(*_two_convolutions(inside, outside, stride, dropout))
        self.project: nn.Module | None = None
        if inside != outside:
            self.project = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The output for a batch of images."""
        normed = self.norm(x)
        change: Tensor = self.path(normed)
        return change + (x if self.project is None else self.project(normed))


def _stages(
    block: type[Block] | type[PreBlock], inside: int, widths: list[int], blocks: int, dropout: float
) -> list[nn.Module]:
    """The blocks of each width. Every width but the first halves the size of the image."""
    layers: list[nn.Module] = []
    for stage, width in enumerate(widths):
        for block_index in range(blocks):
            stride = 2 if stage > 0 and block_index == 0 else 1
            layers.append(block(inside, width, stride, dropout))
            inside = width
    return layers


def _head(width: int, classes: int, dropout: float) -> list[nn.Module]:
    linear = nn.Linear(width, classes)
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), linear]


def _two_convolutions(inside: int, outside: int, stride: int, dropout: float) -> list[nn.Module]:
    between = nn.BatchNorm2d(outside), nn.ReLU(), nn.Dropout(dropout)
    return [_conv3(inside, outside, stride), *between, _conv3(outside, outside)]


def _conv3(inside: int, outside: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
