"""Simulated heads: volumes whose age is known, because we drew it. Nothing here was measured in a person.

A head is an analytic shape in millimetres: an intracranial surface, a cortical ribbon folded along random sulci,
white matter, deep grey nuclei, lateral and third ventricles, a cerebellum and a brain stem, as after skull stripping.
With age the cortex thins (most in front), the sulci and the Sylvian fissure open (most above), the ventricles grow,
white matter darkens, and dark caps form on the horns of the ventricles. Each of these also varies between people of
one age; head size, folding, asymmetry, pose, gain, bias field and noise vary independently of age. So total and
ventricle volume say little about age, and the ribbon says much: see :func:`draw_anatomy` for every number.

The effects are stronger than in people, so that a small network can learn them from a few hundred coarse volumes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.augment import augment_volumes
from tensor_dropout_lab.data.base import (
    Data,
    StandardizeImages,
    TensorSplit,
    bin_targets,
    check_size,
    hold_out,
    require_positive,
    split_tensors,
)

FIELD_OF_VIEW = (160.0, 200.0, 160.0)
"""Millimetres from left to right, back to front, bottom to top; the grid divides it, whatever its size."""

_HALF_AXES = (66.0, 82.0, 62.0)  # mm, of the intracranial surface
_WAVES = 8  # plane waves whose sum folds the cortex
_CHUNK = 4  # heads that are rendered at once: their fields stay in the cache
_CSF, _GREY, _WHITE = 0.18, 0.56, 0.90  # T1-like intensities


@dataclass(frozen=True)
class Heads:
    """Simulated volumes and what they were made from.

    Attributes:
        volumes: (n, 1, *size) uint8; axes: left to right, back to front, bottom to top (RAS).
        ages: (n,) years, float32.
        brain_ml: (n,) volume of grey and white matter in millilitres.
        ventricle_ml: (n,) volume of the ventricles in millilitres.
    """

    volumes: Tensor
    ages: Tensor
    brain_ml: Tensor
    ventricle_ml: Tensor


@dataclass(frozen=True)
class Anatomy:
    """The parameters of n heads: lengths in mm, one entry (or row) per head."""

    scale: Tensor  # (n,) head size
    rotation: Tensor  # (n, 3, 3)
    shift: Tensor  # (n, 3)
    shape: Tensor  # (n, 5) harmonics of the surface, among them left-right asymmetry
    folding: Tensor  # (n, _WAVES, 3) wave vectors of the sulci
    phase: Tensor  # (n, _WAVES)
    sulcal_depth: Tensor  # (n,)
    thickness: Tensor  # (n, 4) of the cortex: mean, and its log-slopes to the right, front and top
    sulcal_width: Tensor  # (n, 4) likewise
    gap: Tensor  # (n,) fluid between cortex and skull
    fissure: Tensor  # (n,) opening of the Sylvian fissure
    ventricle: Tensor  # (n, 3) linear size of the body, the frontal and the temporal horn
    third: Tensor  # (n,) width of the third ventricle
    caps: Tensor  # (n,) darkening of white matter at the horns
    white: Tensor  # (n,) intensity of white matter
    bias: Tensor  # (n, 6) bias field: linear and quadratic terms
    gain: Tensor  # (n,)


def load_phantom(
    *,
    seed: int = 0,
    n: int = 1000,
    size: Sequence[int] = (32, 40, 32),
    ages: Sequence[float] = (20.0, 80.0),
    validation: float = 0.25,
    test: float = 0.2,
    augment: bool | Literal["strong"] = True,
) -> Data:
    """Simulated brain-age volumes: an age in years behind each.

    Args:
        seed: of the heads and of the split.
        n: how many heads.
        size: voxels from left to right, back to front, bottom to top.
        ages: the youngest and the oldest age in years; uniform between them.
        validation: fraction (or number) of the heads that are not tested, held out for choosing.
        test: fraction (or number) of the heads, held out for testing.
        augment: flip left and right and shift by one voxel, in training; "strong" flips, turns by at most 10 degrees
            about every axis, zooms by 10 %, moves by 5 % and bends the contrast.

    Returns:
        Volumes (n, 1, *size) in uint8, ages in float32, ``simulated=True``.

    Raises:
        TensorDropoutError: if an option is out of range.

    Example:
        >>> data = load_phantom(n=10, size=(16, 20, 16))
        >>> data.train.inputs.shape, data.target, data.simulated
        (torch.Size([6, 1, 16, 20, 16]), 'age', True)
    """
    require_positive("phantom", "n", n)
    changes = augment_volumes("phantom", augment, pixels=1)
    size = check_size("phantom", size, axes=3)
    heads = simulate_heads(draw_ages(n, ages, seed), size=size, seed=seed)
    names = [f"phantom-{i:05d}" for i in range(n)]
    whole = TensorSplit(heads.volumes, heads.ages, names)
    rest, tested = hold_out(bin_targets(heads.ages), test, seed, "phantom: test")
    kept, held = hold_out(bin_targets(heads.ages[rest]), validation, seed, "phantom: validation")
    train, validated, tests = split_tensors(whole, rest[kept], rest[held], tested)
    return Data(
        name="phantom",
        task="regression",
        train=train,
        validation=validated,
        test=tests,
        input_shape=(1, *size),
        outputs=1,
        classes=None,
        target="age",
        prepare=StandardizeImages(),
        augment=changes,
        simulated=True,
        provenance=f"SIMULATED: {n} parametric heads drawn by tensor-dropout (BSD-3-Clause), seed {seed}; no person.",
        bounds=(0.0, 255.0),
    )


def draw_ages(n: int, ages: Sequence[float], seed: int) -> Tensor:
    """(n,) ages in years, uniform between the two given ones."""
    if len(ages) != 2 or not 0 <= ages[0] < ages[1] <= 120:
        raise TensorDropoutError(f"phantom: ages must be two years, 0 <= youngest < oldest <= 120, not {tuple(ages)}")
    generator = torch.Generator().manual_seed(2 * seed)
    return ages[0] + (ages[1] - ages[0]) * torch.rand(n, generator=generator)


def simulate_heads(ages: Tensor, *, size: tuple[int, int, int] = (32, 40, 32), seed: int = 0) -> Heads:
    """Draw and render one head per age; equal arguments give equal heads.

    Args:
        ages: (n,) in years.
        size: voxels per axis.
        seed: of everything but the ages.

    Returns:
        The volumes, with the tissue volumes in millilitres.
    """
    generator = torch.Generator().manual_seed(2 * seed + 1)
    anatomy = draw_anatomy(ages, generator)
    volumes, brain, ventricle = [], [], []
    for start in range(0, len(ages), _CHUNK):
        part = Anatomy(**{name: value[start : start + _CHUNK] for name, value in vars(anatomy).items()})
        image, in_brain, in_ventricle = render_heads(part, size)
        noise = 0.015 * torch.randn(image.shape, generator=generator)
        volumes.append(((image + noise).clamp_min(0) * 150).round().clamp_max(255).to(torch.uint8))
        brain.append(in_brain)
        ventricle.append(in_ventricle)
    return Heads(torch.cat(volumes).unsqueeze(1), ages.float(), torch.cat(brain), torch.cat(ventricle))


def draw_anatomy(ages: Tensor, generator: torch.Generator) -> Anatomy:
    """The parameters of one head per age: what age does, and what it does not.

    Each parameter is ``mean × (1 + effect × a) × exp(spread × noise)`` with ``a = (age − 50) / 30`` and noise of
    variance 1, or alike; the pairs below are (effect, spread).
    """
    n, a = len(ages), (ages.float() - 50) / 30

    def noise(*shape: int) -> Tensor:
        return torch.randn(n, *shape, generator=generator)

    def vary(mean: float, effect: float, spread: float) -> Tensor:
        return mean * (1 + effect * a) * torch.exp(spread * noise())

    def slopes(*effects: float) -> Tensor:
        return torch.stack([effect * a for effect in effects], 1) + 0.045 * noise(3)

    waves = nn.functional.normalize(noise(_WAVES, 3), dim=2) * (12.5 * torch.exp(0.08 * noise(1, 1)))
    horns = torch.stack([1.0 + 0 * a, 1 + 0.08 * a, 1 + 0.14 * a], 1) * torch.exp(0.06 * noise(3))
    return Anatomy(
        scale=torch.exp(0.05 * noise()),
        rotation=_rotations(0.07 * noise(3)),
        shift=2.5 * noise(3),
        shape=0.025 * noise(5),
        folding=waves,
        phase=2 * math.pi * torch.rand(n, _WAVES, generator=generator),
        sulcal_depth=13 * torch.exp(0.1 * noise()),
        thickness=torch.cat([vary(3.8, -0.24, 0.035)[:, None], slopes(0.0, -0.14, 0.0)], 1),
        sulcal_width=torch.cat([vary(2.8, 0.48, 0.08)[:, None], slopes(0.0, 0.0, 0.20)], 1),
        gap=(1.7 + 0.9 * a + 0.5 * noise()).clamp_min(0.2),
        fissure=vary(3.5, 0.40, 0.22),
        ventricle=torch.exp((0.35 * a + 0.42 * noise()) / 3)[:, None] * horns,
        third=vary(3.0, 0.35, 0.25),
        caps=(0.10 + 0.10 * a).clamp_min(0) * torch.exp(0.4 * noise()),
        white=_WHITE * (1 - 0.04 * a + 0.015 * noise()),
        bias=0.035 * noise(6),
        gain=torch.exp(0.12 * noise()),
    )


def render_heads(anatomy: Anatomy, size: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Images (n, *size) without noise, and the millilitres of brain and of ventricles (n,) each.

    Tissue borders are sigmoids of a distance in mm, a voxel wide: partial volume.
    """
    voxel = [extent / cells for extent, cells in zip(FIELD_OF_VIEW, size, strict=True)]
    soft = sum(voxel) / 12 / anatomy.scale[:, None]  # mm: such a sigmoid goes from 10 to 90 % within about a voxel
    grid = _place_voxels(size, voxel)  # (3, V)
    points = torch.einsum("nij,jv->niv", anatomy.rotation, grid) - anatomy.shift[:, :, None]
    points = points / anatomy.scale[:, None, None]
    depth, direction, radius = _measure_depth(points, anatomy.shape)
    pial = _measure_cortex(points, depth, direction, radius, anatomy)
    thickness = _vary_over(direction, anatomy.thickness)
    skull = torch.sigmoid(depth / soft)
    brain = torch.sigmoid(pial / soft) * skull
    white = torch.sigmoid((pial - thickness) / soft) * brain
    grey, hollow = _place_nuclei(points, anatomy), _measure_ventricles(points, anatomy)
    white = white * (1 - torch.sigmoid(grey / soft))
    ventricle = torch.sigmoid(-hollow / soft) * skull
    caps = anatomy.caps[:, None] * torch.exp(-((hollow - 2).clamp_min(0) / 6).square())
    low, low_white = _add_hindbrain(points, soft)
    inside = torch.maximum(skull, low)
    tissue = torch.maximum(brain * (1 - ventricle), low)
    white = torch.maximum(white * (1 - ventricle), low_white)
    image = _CSF * inside + (_GREY - _CSF) * tissue + (anatomy.white[:, None] * (1 - caps) - _GREY) * white
    image = image * _shade(grid, anatomy.bias) * anatomy.gain[:, None]
    millilitres = voxel[0] * voxel[1] * voxel[2] / 1000
    return image.unflatten(1, size), tissue.sum(1) * millilitres, ventricle.sum(1) * millilitres


# Geometry: every function takes points (n, 3, V) in mm of a head of normal size and gives (n, V).


def _place_voxels(size: tuple[int, int, int], voxel: list[float]) -> Tensor:
    """The centres of the voxels in mm, (3, V), the origin in the middle."""
    axes = [(torch.arange(cells) - (cells - 1) / 2) * step for cells, step in zip(size, voxel, strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)


def _measure_depth(points: Tensor, shape: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Depth below the intracranial surface, direction on the unit sphere (n, 3, V), and distance to the centre."""
    scaled = points / torch.tensor(_HALF_AXES)[:, None]
    rho = _length(scaled).clamp_min(1e-3)
    u = scaled / rho[:, None]
    x, y, z = u.unbind(1)
    waves = torch.stack([x * y, y * z, z * x, 3 * z**2 - 1, x**2 - y**2], 1)
    surface = 1 + torch.einsum("nk,nkv->nv", shape, waves) - 0.16 * torch.sigmoid(-8 * (z + 0.55))  # a flat base
    radius = _length(points)
    return (surface - rho) * radius / rho, u, radius


def _measure_cortex(points: Tensor, depth: Tensor, u: Tensor, radius: Tensor, anatomy: Anatomy) -> Tensor:
    """Distance below the pial surface, negative in fluid: the least of outer surface, sulci and fissures."""
    x, y, z = points.unbind(1)
    sulcus = _beyond(_distance_to_sulci(u, radius, anatomy), depth, anatomy.sulcal_depth[:, None])
    sulci = sulcus - _vary_over(u, anatomy.sulcal_width) / 2
    midline = _beyond(x.abs(), depth, 28.0) - 1.5
    lateral = _beyond((z + 6 - 0.35 * y).abs(), depth, 24.0) + ((y - 5).abs() - 35).clamp_min(0)
    return _smallest([depth - anatomy.gap[:, None], sulci, midline, lateral - anatomy.fissure[:, None] / 2])


def _distance_to_sulci(u: Tensor, radius: Tensor, anatomy: Anatomy) -> Tensor:
    """Distance in mm to the nearest zero of a sum of plane waves on the sphere, to first order."""
    angle = torch.einsum("nkj,njv->nkv", anatomy.folding, u) + anatomy.phase[:, :, None]
    height = angle.cos().sum(1)
    slope = torch.einsum("nkj,nkv->njv", anatomy.folding, angle.sin_())
    slope = slope - (slope * u).sum(1, keepdim=True) * u  # along the sphere
    return height.abs() / (_length(slope) + 6.0) * radius


def _length(vectors: Tensor) -> Tensor:
    """(n, 3, V) -> (n, V); several times faster here than ``norm(dim=1)``."""
    x, y, z = vectors.unbind(1)
    return torch.sqrt(x * x + y * y + z * z)


def _beyond(distance: Tensor, depth: Tensor, limit: Tensor | float) -> Tensor:
    """Distance to a sheet that ends at the depth ``limit``."""
    return torch.sqrt(distance.square() + (depth - limit).clamp_min(0).square())


def _smallest(distances: list[Tensor]) -> Tensor:
    """A minimum with rounded corners, 1 mm wide."""
    return -torch.logsumexp(-torch.stack(distances), 0)


def _vary_over(u: Tensor, field: Tensor) -> Tensor:
    """``mean × exp(slopes · direction)`` for a field (n, 4) of a mean and three slopes."""
    return field[:, :1] * torch.exp(torch.einsum("nj,njv->nv", field[:, 1:], u))


def _measure_ventricles(points: Tensor, anatomy: Anatomy) -> Tensor:
    """Distance outside the ventricles, negative within."""
    x, y, z = points.unbind(1)
    side = x.abs()
    body, frontal, temporal = (anatomy.ventricle[:, i : i + 1] for i in range(3))
    arch = 14 - 0.006 * y.square()  # the body bends down at both ends
    parts = [
        _ellipsoid((side - 9) / (6.5 * body), (y + 4) / (30 * body), (z - arch) / (8 * body), 6.5 * body),
        _ellipsoid((side - 11) / (6 * frontal), (y - 26) / (12 * frontal), (z - 6) / (9 * frontal), 6 * frontal),
        _ellipsoid((side - 28) / (5 * temporal), (y + 18) / (20 * temporal), (z + 10) / (5 * temporal), 5 * temporal),
        _ellipsoid(x / (anatomy.third[:, None] / 2), (y + 4) / 13, (z + 2) / 11, anatomy.third[:, None] / 2),
    ]
    return _smallest(parts)


def _ellipsoid(x: Tensor, y: Tensor, z: Tensor, half_axis: Tensor | float) -> Tensor:
    """Roughly the distance outside an ellipsoid, from coordinates in half axes and the shortest of these in mm."""
    return (torch.sqrt(x.square() + y.square() + z.square()) - 1) * half_axis


def _place_nuclei(points: Tensor, anatomy: Anatomy) -> Tensor:
    """How far inside the deep grey nuclei: thalamus, putamen and caudate."""
    x, y, z = points.unbind(1)
    side = x.abs() - 4 * (anatomy.ventricle[:, :1] - 1)  # wide ventricles push them outwards
    nuclei = [
        _ellipsoid((side - 11) / 8, (y + 14) / 13, (z - 2) / 9, 8),
        _ellipsoid((side - 26) / 6, (y - 4) / 15, (z - 0) / 10, 6),
        _ellipsoid((side - 17) / 5, (y - 16) / 16, (z - 8) / 8, 5),
    ]
    return -_smallest(nuclei)


def _add_hindbrain(points: Tensor, soft: Tensor) -> tuple[Tensor, Tensor]:
    """Cerebellum and brain stem: all of their tissue, and their white matter, as fractions."""
    x, y, z = points.unbind(1)
    cerebellum = _ellipsoid(x / 44, (y + 46) / 26, (z + 50) / 18, 18)
    stem = _ellipsoid(x / 11, (y + 18) / 11, (z + 46) / 34, 11)
    tissue = torch.sigmoid(-torch.minimum(cerebellum, stem) / soft)
    white = torch.sigmoid(-torch.minimum(cerebellum + 6, stem + 1) / soft)
    return tissue, white


def _shade(grid: Tensor, bias: Tensor) -> Tensor:
    """A smooth bias field (n, V), about 1."""
    unit = grid / 100
    terms = torch.cat([unit, unit.square()])  # (6, V)
    return torch.exp(bias @ terms)


def _rotations(angles: Tensor) -> Tensor:
    """Rotation matrices (n, 3, 3) from rotation vectors (n, 3) in radians."""
    x, y, z = angles.unbind(1)
    o = torch.zeros_like(x)
    skew = torch.stack([o, -z, y, z, o, -x, -y, x, o], 1).view(-1, 3, 3)
    return torch.linalg.matrix_exp(skew)
