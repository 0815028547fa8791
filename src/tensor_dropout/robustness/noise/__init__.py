"""Corruptions of inputs, for measuring robustness to noise: the paper's Gaussian, Rician for MRI, and common families.

Every function takes a float batch (B, C, *size) with one to three spatial axes and returns a new one of the same shape,
dtype and device. Randomness comes from the generator that is passed and from nowhere else: equal states give equal
noise. The numbers are drawn on the generator's device, so a CPU generator gives the same noise to any device.

The functions do not clip. :data:`CORRUPTIONS` does, for corruptions of stored images; see :class:`Corruption`. To add a
family, write its function and its entry in that table; one of your own is registered by :func:`register_corruption`.

Importing this module does not import torch: ``tensor-dropout --help`` lists the names.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from tensor_dropout.errors import TensorDropoutError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tensor_dropout.robustness.noise.detail import blur as blur
    from tensor_dropout.robustness.noise.detail import occlude as occlude
    from tensor_dropout.robustness.noise.detail import pixelate as pixelate
    from tensor_dropout.robustness.noise.gain import add_bias_field as add_bias_field
    from tensor_dropout.robustness.noise.gain import change_brightness as change_brightness
    from tensor_dropout.robustness.noise.gain import change_contrast as change_contrast
    from tensor_dropout.robustness.noise.sensor import add_shot as add_shot
    from tensor_dropout.robustness.noise.sensor import add_speckle as add_speckle
    from tensor_dropout.robustness.noise.sensor import salt_and_pepper as salt_and_pepper
    from tensor_dropout.robustness.noise.snr import add_gaussian as add_gaussian
    from tensor_dropout.robustness.noise.snr import add_rician as add_rician
    from tensor_dropout.robustness.noise.snr import measure_snr as measure_snr

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
    "register_corruption",
    "salt_and_pepper",
    "suitable",
]

Bounds = tuple[float, float]
"""The smallest and largest value of a stored image; either may be infinite."""

UNBOUNDED: Bounds = (-math.inf, math.inf)


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
        function: what is applied: a function, or "module.name" of one beside this file. It takes a batch and a level,
            and, as arguments of these names, what it needs of ``generator``, ``bounds`` and ``low``, the lower bound.

    Example:
        >>> gaussian = CORRUPTIONS["gaussian"]
        >>> gaussian.levels, gaussian.unit, gaussian.space
        ((16.0, 8.0, 4.0, 2.0, 1.0), 'SNR', 'input')
    """

    name: str
    summary: str
    levels: tuple[float, ...]
    unit: str
    function: str | Callable[..., Tensor] = field(repr=False)
    space: Literal["input", "stored"] = "stored"
    axes: tuple[int, ...] = (1, 2, 3)
    needs_bounds: bool = False

    @cached_property
    def _function(self) -> Callable[..., Tensor]:
        if callable(self.function):
            return self.function
        module, _, name = self.function.rpartition(".")
        found: Callable[..., Tensor] = getattr(import_module(f"{__name__}.{module}"), name)
        return found

    @cached_property
    def _needs(self) -> frozenset[str]:
        return frozenset(inspect.signature(self._function).parameters)

    @property
    def random(self) -> bool:
        """Whether it draws from the generator; if not, one evaluation says it all."""
        return "generator" in self._needs

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
            >>> import torch
            >>> x, generator = torch.full((1, 1, 4), 200.0), torch.Generator()
            >>> CORRUPTIONS["brightness"].apply(x, 0.5, generator, (0.0, 255.0))
            tensor([[[255., 255., 255., 255.]]])
        """
        from tensor_dropout.robustness.noise.checks import require_batch, require_inside

        stored = self.space == "stored"
        require_batch(self.name, x)
        require_inside(self.name, x, bounds if stored else UNBOUNDED)
        low = bounds[0] if self.needs_bounds or math.isfinite(bounds[0]) else None
        given = {"generator": generator, "bounds": bounds, "low": low}
        changed = self._function(x, level, **{name: value for name, value in given.items() if name in self._needs})
        return changed.clamp(*bounds) if stored else changed


CORRUPTIONS: dict[str, Corruption] = {
    corruption.name: corruption
    for corruption in (
        Corruption(
            "gaussian",
            "white Gaussian noise on the prepared input, by the paper's ratio of variances",
            levels=(16.0, 8.0, 4.0, 2.0, 1.0),
            unit="SNR",
            function="snr.add_gaussian",
            space="input",
        ),
        Corruption(
            "rician",
            "complex Gaussian noise behind magnitudes, as in MRI, by the same ratio of variances",
            levels=(16.0, 8.0, 4.0, 2.0, 1.0),
            unit="SNR",
            function="snr.add_rician",
            axes=(3,),
        ),
        Corruption(
            "salt_and_pepper",
            "random positions become the lowest or the highest value",
            levels=(0.01, 0.02, 0.05, 0.1, 0.2),
            unit="share",
            function="sensor.salt_and_pepper",
            needs_bounds=True,
        ),
        Corruption(
            "shot",
            "Poisson noise of a sensor that counts so many photons at the highest value",
            levels=(128.0, 64.0, 32.0, 16.0, 8.0),
            unit="photons",
            function="sensor.add_shot",
            needs_bounds=True,
        ),
        Corruption(
            "speckle",
            "every intensity times its own random factor of this standard deviation around 1",
            levels=(0.1, 0.2, 0.3, 0.45, 0.6),
            unit="std",
            function="sensor.add_speckle",
            needs_bounds=True,
        ),
        Corruption(
            "blur",
            "Gaussian blur of this standard deviation",
            levels=(0.5, 0.75, 1.0, 1.5, 2.5),
            unit="pixels",
            function="detail.blur",
        ),
        Corruption(
            "pixelate",
            "blocks of this edge become their mean",
            levels=(2, 3, 4, 6, 8),
            unit="pixels",
            function="detail.pixelate",
        ),
        Corruption(
            "occlusion",
            "one box over this share of the image becomes the lowest value",
            levels=(0.02, 0.05, 0.1, 0.2, 0.4),
            unit="share",
            function="detail.occlude",
            needs_bounds=True,
        ),
        Corruption(
            "brightness",
            "brighter everywhere by this share of the range, clipped at the highest value",
            levels=(0.1, 0.2, 0.3, 0.4, 0.5),
            unit="share",
            function="gain.change_brightness",
            needs_bounds=True,
        ),
        Corruption(
            "contrast",
            "distances from the image's mean times this factor",
            levels=(0.8, 0.6, 0.45, 0.3, 0.15),
            unit="factor",
            function="gain.change_contrast",
        ),
        Corruption(
            "bias_field",
            "a smooth gain as of MRI coils, up to e to this power, brighter or darker",
            levels=(0.1, 0.2, 0.3, 0.5, 0.8),
            unit="log gain",
            function="gain.add_bias_field",
            axes=(3,),
            needs_bounds=True,
        ),
    )
}
"""Name -> corruption. ``contrast``, and ``brightness`` but for its clipping, are undone by ``StandardizeImages``."""


def __getattr__(name: str) -> Any:
    for module in ("detail", "gain", "sensor", "snr") if name in __all__ else ():
        functions = import_module(f"{__name__}.{module}")
        if hasattr(functions, name):
            return getattr(functions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_corruption(corruption: Corruption) -> None:
    """Add a family of corruptions of your own: evaluations and the command line then know its name.

    Raises:
        TensorDropoutError: if the name is that of another family.

    Example:
        >>> def invert(x, level, bounds):
        ...     return x + level * (sum(bounds) - 2 * x)
        >>> family = Corruption("invert", "towards the negative", (0.1, 0.2), "share", invert, needs_bounds=True)
        >>> register_corruption(family)
        >>> suitable(2, bounded=True)[-1], CORRUPTIONS["invert"].random
        ('invert', False)
        >>> del CORRUPTIONS["invert"]  # this page does not need it any longer
    """
    before = CORRUPTIONS.get(corruption.name, corruption)
    if before is not corruption and before != corruption:
        raise TensorDropoutError(
            f"register_corruption: the name {corruption.name!r} is taken by another family; choose another one"
        )
    CORRUPTIONS[corruption.name] = corruption


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
    if spatial_rank not in (1, 2, 3):
        raise TensorDropoutError(f"suitable: spatial_rank must be 1, 2 or 3, as in (B, C, *size), not {spatial_rank!r}")
    return [
        name
        for name, corruption in CORRUPTIONS.items()
        if spatial_rank in corruption.axes and (bounded or not corruption.needs_bounds)
    ]
