"""Tiny networks with fixed weights, as a user has them in a module: ``--backbone small_backbone:build``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def build(seed: int = 0, width: int = 4) -> nn.Module:
    """Two convolutions and a head: the map of layer "3" has a quarter of the image's side."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * width, 5),
        )


def build_other() -> nn.Module:
    """The same structure with other weights."""
    return build(seed=1)


class Tokens(nn.Module):
    """Five tokens, which are no grid."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, 5, 4)."""
        tokens: Tensor = self.embed(x.flatten(2)[:, :, :5].mT)
        return tokens


def build_tokens() -> nn.Module:
    """See :class:`Tokens`."""
    return Tokens()


def build_unknown_tokens() -> nn.Module:
    """Tokens that come out of nothing like a map."""
    return nn.Sequential(nn.Flatten(2), nn.Linear(256, 4))


def build_for_volumes() -> nn.Module:
    """A network that takes no pictures."""
    return nn.Sequential(nn.Conv3d(1, 4, 3, stride=2), nn.ReLU())
