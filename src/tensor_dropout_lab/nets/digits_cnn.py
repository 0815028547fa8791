"""A convolutional network for very small pictures: three convolutions with 7,184 parameters."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.nets.network import Network


def build(
    name: str, *, input_shape: tuple[int, ...], outputs: int, options: Mapping[str, Any], trusted: bool
) -> DigitsCNN:
    """The network, without a head."""
    if options:
        raise TensorDropoutError(f"net {name}: it has no options, got {', '.join(sorted(options))}")
    return DigitsCNN(input_shape)


class DigitsCNN(Network):
    """Three 3×3 convolutions with batch norm, of which the last halves the size: (C, H, W) -> (32, H/2, W/2).

    Args:
        input_shape: (channels, height, width).

    Raises:
        TensorDropoutError: if the input is no picture.

    Example:
        >>> import torch
        >>> backbone = DigitsCNN((1, 8, 8))
        >>> backbone.feature_shape, backbone(torch.randn(2, 1, 8, 8)).shape
        ((32, 4, 4), torch.Size([2, 32, 4, 4]))
    """

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        if len(input_shape) != 3:
            raise TensorDropoutError(f"net digits-cnn: it takes pictures (channels, height, width), got {input_shape}")
        channels, *sizes = input_shape
        super().__init__(input_shape, (32, *(ceil(size / 2) for size in sizes)))
        self.body = nn.Sequential(_convolve(channels, 16), _convolve(16, 16), _convolve(16, 32, stride=2))
        self.avgpool: nn.Module = nn.Identity()
        self.fc: nn.Module = nn.Identity()

    def stages(self) -> list[nn.Module]:
        """The three convolutions."""
        return list(self.body)

    def forward_features(self, x: Tensor) -> Tensor:
        """The features before pooling: (B, *input_shape) -> (B, *feature_shape)."""
        y: Tensor = self.body(x)
        return y


def _convolve(channels: int, filters: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, filters, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(filters), nn.ReLU())
