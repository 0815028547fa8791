"""Residual networks in 2-D and 3-D that can stop before pooling, with torchvision's parameter names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.nets.network import Network

Stem = Literal["small", "large"]
"""small: 3×3, stride 1 (CIFAR); large: 7×7, stride 2, then 3×3 max-pooling, stride 2 (ImageNet, MRI)."""

_CONVOLUTIONS: dict[int, type[nn.Conv2d] | type[nn.Conv3d]] = {2: nn.Conv2d, 3: nn.Conv3d}
_NORMS: dict[int, type[nn.BatchNorm2d] | type[nn.BatchNorm3d]] = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_MAX_POOLS: dict[int, type[nn.MaxPool2d] | type[nn.MaxPool3d]] = {2: nn.MaxPool2d, 3: nn.MaxPool3d}


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut: ``relu(x + f(x))``.

    Args:
        n_dims: 2 or 3.
        channels: of the input.
        width: of both convolutions, and of the output.
        stride: of the first convolution and of the shortcut.
    """

    expansion = 1

    def __init__(self, n_dims: int, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = convolve(n_dims, channels, width, 3, stride)
        self.bn1 = _NORMS[n_dims](width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = convolve(n_dims, width, width, 3)
        self.bn2 = _NORMS[n_dims](width)
        self.downsample = build_shortcut(n_dims, channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, *space) -> (B, width, *space / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.downsample(x))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a shortcut; the stride is in the 3×3, as in torchvision ("v1.5").

    Args:
        n_dims: 2 or 3.
        channels: of the input.
        width: of the first two convolutions; the output has four times as many channels.
        stride: of the 3×3 convolution and of the shortcut.
    """

    expansion = 4

    def __init__(self, n_dims: int, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = width * self.expansion
        self.conv1 = convolve(n_dims, channels, width, 1)
        self.bn1 = _NORMS[n_dims](width)
        self.conv2 = convolve(n_dims, width, width, 3, stride)
        self.bn2 = _NORMS[n_dims](width)
        self.conv3 = convolve(n_dims, width, wide, 1)
        self.bn3 = _NORMS[n_dims](wide)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = build_shortcut(n_dims, channels, wide, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, *space) -> (B, 4 width, *space / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + self.downsample(x))


class StemConvolution(nn.Conv3d):
    """7×7×7, stride 2, for volumes of one or few channels, computed so that a GPU's matrix units can work on it.

    ``y[o] = Σ_k w[k] x[2o + k - 3]`` along each axis. With ``k + 1 = 2a + b`` that is a convolution of size 4 and
    stride 1, over a, of the eight half-resolution volumes ``x[2i + b]`` taken as channels. cuDNN's kernel for one
    channel took a third of the whole training step of a 3-D ResNet-18. On a CPU it is the plain convolution.

    Args:
        channels: of the input.
        filters: of the output.
    """

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__(channels, filters, 7, stride=2, padding=3, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """(B, C, D, H, W) -> (B, filters, D/2, H/2, W/2), rounded up."""
        return convolve_folded(input, self.weight) if input.is_cuda else super().forward(input)


def convolve_folded(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution of :class:`StemConvolution` in its folded form: x (B, C, D, H, W), weight (F, C, 7, 7, 7)."""
    B, C, *sizes = x.shape
    halves = [ceil(size / 2) + 3 for size in sizes]
    # Four zeros before, and behind as many as make the size even and reach the last window.
    pads = [pad for size, half in zip(sizes, halves, strict=True) for pad in (4, 2 * half - 4 - size)]
    x = F.pad(x, pads[4:] + pads[2:4] + pads[:2])
    d, h, w = halves
    # (B, C, d, 2, h, 2, w, 2) -> (B, d, h, w, C·8) in memory, channels first in shape
    x = x.view(B, C, d, 2, h, 2, w, 2).permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(B, d, h, w, 8 * C)
    x = x.permute(0, 4, 1, 2, 3)
    weight = F.pad(weight, (1, 0, 1, 0, 1, 0))  # k + 1: eight taps, the first is zero
    weight = weight.view(-1, C, 4, 2, 4, 2, 4, 2).permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)  # (F, C·8, 4, 4, 4)
    return F.conv3d(x, weight.contiguous(memory_format=torch.channels_last_3d))


@dataclass(frozen=True)
class Design:
    """What tells one residual network from another.

    Attributes:
        name: as given to ``build_net``.
        block: the block that its stages repeat.
        depths: how many blocks each stage has.
        width: of the stem and the first stage; every later stage doubles it.
        is_mini: small stem only, and at least 2 positions along each size of the features.
    """

    name: str
    block: type[BasicBlock] | type[Bottleneck]
    depths: tuple[int, ...]
    width: int = 64
    is_mini: bool = False


DESIGNS = {
    design.name: design
    for design in (
        Design("resnet-mini", BasicBlock, (1, 1, 1), width=16, is_mini=True),
        Design("resnet18", BasicBlock, (2, 2, 2, 2)),
        Design("resnet34", BasicBlock, (3, 4, 6, 3)),
        Design("resnet50", Bottleneck, (3, 4, 6, 3)),
        Design("resnet101", Bottleneck, (3, 4, 23, 3)),
    )
}


def build(
    name: str, *, input_shape: tuple[int, ...], outputs: int, options: Mapping[str, Any], trusted: bool
) -> ResNet:
    """The residual network of that name, without a head."""
    if unknown := options.keys() - {"stem"}:
        raise TensorDropoutError(f"net {name}: its one option is stem, got {', '.join(sorted(unknown))}")
    return ResNet(DESIGNS[name], input_shape, options.get("stem"))


class ResNet(Network):
    """A residual network whose features keep their shape until a head takes them.

    Its parameters have torchvision's names. Made by ``build_net``.

    Args:
        design: one of ``DESIGNS``.
        input_shape: (channels, height, width) or (channels, depth, height, width).
        stem: "small" or "large"; None takes "small" if no size is above 64. ``resnet-mini`` has the small one.

    Attributes:
        stem: "small" or "large".

    Raises:
        TensorDropoutError: if the input has not 2 or 3 sizes, or is too small, or the stem does not fit the design.

    Example:
        >>> import torch
        >>> backbone = ResNet(DESIGNS["resnet18"], (3, 32, 32))
        >>> backbone.stem, backbone.feature_shape
        ('small', (512, 4, 4))
        >>> backbone(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 512, 4, 4])
    """

    def __init__(self, design: Design, input_shape: tuple[int, ...], stem: Stem | None = None) -> None:
        channels, *sizes = check_input_shape(input_shape)
        stem, strides = choose_stem(design, sizes, stem), choose_strides(design, sizes)
        super().__init__((channels, *sizes), find_feature_shape(design, sizes, stem, strides))
        self.stem = stem
        self.n_stages = len(design.depths)
        self._make_stem(len(sizes), channels, design.width)
        self._make_stages(len(sizes), design, strides)
        self.avgpool, self.fc = nn.Identity(), nn.Identity()
        self._fill()

    def _make_stem(self, n_dims: int, channels: int, width: int) -> None:
        large = self.stem == "large"
        self.conv1: nn.Module = convolve(n_dims, channels, width, 3)
        if large:
            self.conv1 = StemConvolution(channels, width) if n_dims == 3 else convolve(2, channels, width, 7, 2)
        self.bn1 = _NORMS[n_dims](width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = _MAX_POOLS[n_dims](3, stride=2, padding=1) if large else nn.Identity()

    def _make_stages(self, n_dims: int, design: Design, strides: tuple[int, ...]) -> None:
        channels = width = design.width
        for n, (depth, stride) in enumerate(zip(design.depths, strides, strict=True), 1):
            blocks = []
            for k in range(depth):
                blocks.append(design.block(n_dims, channels, width, stride if k == 0 else 1))
                channels = width * design.block.expansion
            self.add_module(f"layer{n}", nn.Sequential(*blocks))
            width *= 2

    def _fill(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def resolved_options(self) -> dict[str, Any]:
        """The stem."""
        return {"stem": self.stem}

    def stages(self) -> list[nn.Module]:
        """``layer1`` to ``layer4``."""
        return [getattr(self, f"layer{n}") for n in range(1, self.n_stages + 1)]

    def forward_features(self, x: Tensor) -> Tensor:
        """The features before pooling: (B, *input_shape) -> (B, *feature_shape)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in self.stages():
            x = stage(x)
        return x


def check_input_shape(input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """(channels, *size) with 2 or 3 sizes, as a tuple."""
    valid = isinstance(input_shape, tuple | list) and len(input_shape) in (3, 4)
    if not valid or not all(type(size) is int and size > 0 for size in input_shape):
        raise TensorDropoutError(
            "build_net: input_shape is (channels, height, width) or (channels, depth, height, width), without the "
            f"batch, got {input_shape!r}"
        )
    return tuple(input_shape)


def choose_stem(design: Design, sizes: list[int], stem: Stem | None) -> Stem:
    """The stem asked for; by default the small one if no size is above 64."""
    if stem not in (None, "small", "large"):
        raise TensorDropoutError(f"build_net: stem is 'small', 'large' or None, got {stem!r}")
    if design.is_mini and stem == "large":
        raise TensorDropoutError(f"build_net: {design.name} has the small stem only; leave stem out")
    if stem is not None:
        return stem
    return "small" if design.is_mini or max(sizes) <= 64 else "large"


def choose_strides(design: Design, sizes: list[int]) -> tuple[int, ...]:
    """The stride of each stage: 2 but for the first; the mini network starts with 2 where 2 positions are left."""
    first = 2 if design.is_mini and min(sizes) >= 16 else 1
    return (first, *(2 for _ in design.depths[1:]))


def find_feature_shape(design: Design, sizes: list[int], stem: Stem, strides: tuple[int, ...]) -> tuple[int, ...]:
    """(channels, *space) of the features: every size is divided by all strides, rounded up."""
    stride = prod(strides) * (4 if stem == "large" else 1)
    least = 2 * stride if design.is_mini else stride
    if min(sizes) < least:
        advice = "a larger input" if stem == "small" else "stem='small' or a larger input"
        raise TensorDropoutError(
            f"build_net: {design.name} with the {stem} stem divides each size by {stride} and needs at least {least}, "
            f"got {tuple(sizes)}; use {advice}"
        )
    channels = design.width * 2 ** (len(design.depths) - 1) * design.block.expansion
    return (channels, *(ceil(size / stride) for size in sizes))


def convolve(n_dims: int, channels: int, filters: int, kernel: int, stride: int = 1) -> nn.Conv2d | nn.Conv3d:
    """A convolution without bias that keeps the size, divided by the stride and rounded up."""
    return _CONVOLUTIONS[n_dims](channels, filters, kernel, stride=stride, padding=kernel // 2, bias=False)


def build_shortcut(n_dims: int, channels: int, filters: int, stride: int) -> nn.Module:
    """The identity where the shape stays, else a 1×1 convolution and batch norm."""
    if stride == 1 and channels == filters:
        return nn.Identity()
    return nn.Sequential(convolve(n_dims, channels, filters, 1, stride), _NORMS[n_dims](filters))
