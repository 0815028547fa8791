"""Corruptions of inputs, for measuring robustness to noise: the paper's Gaussian, Rician for MRI, and common families.

Every function takes a float batch (B, C, *size) with one to three spatial axes and returns a new one of the same shape,
dtype and device. Randomness comes from the generator that is passed and from nowhere else: equal states give equal
noise. The numbers are drawn on the generator's device, so a CPU generator gives the same noise to any device.

The functions do not clip. :data:`CORRUPTIONS` does, for corruptions of stored images; see :class:`Corruption`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tensor_dropout.robustness.noise.checks import UNBOUNDED, Bounds, require, require_batch, require_inside
from tensor_dropout.robustness.noise.detail import blur, occlude, pixelate
from tensor_dropout.robustness.noise.gain import add_bias_field, change_brightness, change_contrast
from tensor_dropout.robustness.noise.sensor import add_shot, add_speckle, salt_and_pepper
from tensor_dropout.robustness.noise.snr import add_gaussian, add_rician, measure_snr

__all__ = [
    "CORRUPTIONS",
    "UNBOUNDED",
    "Bounds",
    "Corruption",
    "add_bias_field",
    "add_gaussian",
    "add_rician",
    "add_shot",
    "add_speckle",
    "blur",
    "change_brightness",
    "change_contrast",
    "measure_snr",
    "occlude",
    "pixelate",
    "salt_and_pepper",
    "suitable",
]


@dataclass(frozen=True)
class Corruption:
    """One family of corruptions, with five levels from mild to severe.

    Attributes:
        name: its key in :data:`CORRUPTIONS`.
        summary: one line for ``--help``.
        levels: five parameters from mild to severe. :meth:`apply` takes any other value that the family allows, e.g.
            every SNR of a curve.
        unit: of the levels, e.g. "SNR".
        space: "input": it changes the network's prepared input, as the paper's Gaussian noise, and is not clipped.
            "stored": it changes the stored image and is clipped to its bounds.
        axes: the numbers of spatial axes for which :func:`suitable` proposes it; :meth:`apply` takes 1 to 3.
        needs_bounds: whether it has no meaning without a finite lower bound or a finite range. Without them, Rician
            noise takes the smallest value of each example for no signal.
        random: whether it draws from the generator; if not, one evaluation says it all.
        change: the function behind :meth:`apply`, with the same arguments.

    Example:
        >>> gaussian = CORRUPTIONS["gaussian"]
        >>> gaussian.levels, gaussian.unit, gaussian.space
        ((16.0, 8.0, 4.0, 2.0, 1.0), 'SNR', 'input')
    """

    name: str
    summary: str
    levels: tuple[float, ...]
    unit: str
    space: Literal["input", "stored"]
    axes: tuple[int, ...]
    needs_bounds: bool
    random: bool
    change: Callable[[Tensor, float, torch.Generator, Bounds], Tensor] = field(repr=False)

    def apply(self, x: Tensor, level: float, generator: torch.Generator, bounds: Bounds = UNBOUNDED) -> Tensor:
        """Corrupt a batch.

        Args:
            x: (B, C, *size), finite: prepared inputs if ``space`` is "input", else stored images within the bounds.
            level: one of ``levels``, or any other parameter of the family.
            generator: of the noise; left alone if the corruption is not random.
            bounds: (low, high) of stored images; not used if ``space`` is "input".

        Returns:
            (B, C, *size); within the bounds if ``space`` is "stored".

        Raises:
            TensorDropoutError: if the level is not allowed, x is not such a batch or not within the bounds, or the
                corruption needs finite bounds and they are not.

        Example:
            >>> x, generator = torch.full((1, 1, 4), 200.0), torch.Generator()
            >>> CORRUPTIONS["brightness"].apply(x, 0.5, generator, (0.0, 255.0))
            tensor([[[255., 255., 255., 255.]]])
        """
        stored = self.space == "stored"
        require_batch(self.name, x)
        require_inside(self.name, x, bounds if stored else UNBOUNDED)
        changed = self.change(x, level, generator, bounds)
        return changed.clamp(*bounds) if stored else changed


CORRUPTIONS: dict[str, Corruption] = {
    corruption.name: corruption
    for corruption in (
        Corruption(
            name="gaussian",
            summary="white Gaussian noise on the prepared input, by the paper's ratio of variances",
            levels=(16.0, 8.0, 4.0, 2.0, 1.0),
            unit="SNR",
            space="input",
            axes=(1, 2, 3),
            needs_bounds=False,
            random=True,
            change=lambda x, level, generator, bounds: add_gaussian(x, level, generator),
        ),
        Corruption(
            name="rician",
            summary="complex Gaussian noise behind magnitudes, as in MRI, by the same ratio of variances",
            levels=(16.0, 8.0, 4.0, 2.0, 1.0),
            unit="SNR",
            space="stored",
            axes=(3,),
            needs_bounds=False,
            random=True,
            change=lambda x, level, generator, bounds: add_rician(x, level, generator, _find_low(bounds)),
        ),
        Corruption(
            name="salt_and_pepper",
            summary="random positions become the lowest or the highest value",
            levels=(0.01, 0.02, 0.05, 0.1, 0.2),
            unit="share",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=True,
            random=True,
            change=salt_and_pepper,
        ),
        Corruption(
            name="shot",
            summary="Poisson noise of a sensor that counts so many photons at the highest value",
            levels=(128.0, 64.0, 32.0, 16.0, 8.0),
            unit="photons",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=True,
            random=True,
            change=add_shot,
        ),
        Corruption(
            name="speckle",
            summary="every intensity times its own random factor of this standard deviation around 1",
            levels=(0.1, 0.2, 0.3, 0.45, 0.6),
            unit="std",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=True,
            random=True,
            change=lambda x, level, generator, bounds: add_speckle(x, level, generator, bounds[0]),
        ),
        Corruption(
            name="blur",
            summary="Gaussian blur of this standard deviation",
            levels=(0.5, 0.75, 1.0, 1.5, 2.5),
            unit="pixels",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=False,
            random=False,
            change=lambda x, level, generator, bounds: blur(x, level),
        ),
        Corruption(
            name="pixelate",
            summary="blocks of this edge become their mean",
            levels=(2, 3, 4, 6, 8),
            unit="pixels",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=False,
            random=False,
            change=lambda x, level, generator, bounds: pixelate(x, level),
        ),
        Corruption(
            name="occlusion",
            summary="one box over this share of the image becomes the lowest value",
            levels=(0.02, 0.05, 0.1, 0.2, 0.4),
            unit="share",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=True,
            random=True,
            change=lambda x, level, generator, bounds: occlude(x, level, generator, bounds[0]),
        ),
        Corruption(
            name="brightness",
            summary="brighter everywhere by this share of the range, clipped at the highest value",
            levels=(0.1, 0.2, 0.3, 0.4, 0.5),
            unit="share",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=True,
            random=False,
            change=lambda x, level, generator, bounds: change_brightness(x, level, bounds),
        ),
        Corruption(
            name="contrast",
            summary="distances from the image's mean times this factor",
            levels=(0.8, 0.6, 0.45, 0.3, 0.15),
            unit="factor",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=False,
            random=False,
            change=lambda x, level, generator, bounds: change_contrast(x, level),
        ),
        Corruption(
            name="bias_field",
            summary="a smooth gain as of MRI coils, up to e to this power, brighter or darker",
            levels=(0.1, 0.2, 0.3, 0.5, 0.8),
            unit="log gain",
            space="stored",
            axes=(3,),
            needs_bounds=True,
            random=True,
            change=lambda x, level, generator, bounds: add_bias_field(x, level, generator, bounds[0]),
        ),
    )
}
"""Name -> corruption. ``contrast``, and ``brightness`` but for its clipping, are undone by ``StandardizeImages``."""


def _find_low(bounds: Bounds) -> float | None:
    """The lower bound, or None if there is none."""
    return bounds[0] if math.isfinite(bounds[0]) else None


def suitable(spatial_rank: int, bounded: bool) -> list[str]:
    """The names of the corruptions that make sense for the data, in the order of :data:`CORRUPTIONS`.

    Args:
        spatial_rank: the number of spatial axes, 1 to 3.
        bounded: whether stored values have finite bounds.

    Raises:
        TensorDropoutError: if ``spatial_rank`` is not 1, 2 or 3.

    Example:
        >>> suitable(2, bounded=False)
        ['gaussian', 'blur', 'pixelate', 'contrast']
    """
    require("suitable", "spatial_rank", spatial_rank, spatial_rank in (1, 2, 3), "1, 2 or 3, as in (B, C, *size)")
    return [
        name
        for name, corruption in CORRUPTIONS.items()
        if spatial_rank in corruption.axes and (bounded or not corruption.needs_bounds)
    ]
