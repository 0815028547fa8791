"""The second stage: look again around each predicted point, and correct it; repeated while held-out errors fall.

A round reads a crop of finer maps around each point, and predicts how far the point is off. Its weight is a tensor in
Tucker's form, ``W[d, p, o] = Σ_r V[d, r] G[r, p, o]``, with d the numbers of a crop, p the points, o the two
coordinates. All points share V, the principal axes of all crops; G is solved for, by ridge. Features of the whole image
(the principal axes of all its points' crops) stand beside those of the point: where one point is off, others often are.

A round is trained at positions that the rounds before had not been fitted on: held-out predictions, and true positions
moved at random by errors as large as theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ROUNDS = 3
BETTER = 0.01
"""A round is kept if the held-out error falls by this share of itself."""
SIDE = 5
"""A crop has so many by so many positions of each map, one cell apart."""
JITTERS = 2
"""How many moved copies of each true position are trained on."""
SHARED, WHOLE = 128, 64
"""How many axes points share, and how many features of the whole image there are, at most."""
WHOLE_SCALE = 0.5
"""How large those are beside the point's own."""
SAMPLED = 3000
"""How many crops the shared axes are computed from."""
PENALTIES = (3e-4, 1e-3, 3e-3, 1e-2)
"""Weights of the squared norm, as a share of the features' squared length; the first round chooses."""
FEWEST = 5

Read = Callable[[np.ndarray, Tensor], Tensor]
"""Rows of images (m,) and points (m, P, 2), as fractions, to crops (m, P, D)."""


def read_crops(maps: Tensor, rows: Tensor, points: Tensor, side: int = SIDE) -> Tensor:
    """Crops around points, one cell apart, bilinear; outside a map its border goes on.

    Only the cells that a crop needs are read: all of its positions lie between cells in the same way.

    Args:
        maps: (n, H, W, C), of any precision.
        rows: (m,), the numbers of the images.
        points: (m, P, 2), x and y as fractions of width and height.
        side: of a crop.

    Returns:
        (m, P, C · side²), float32.

    Example:
        >>> maps = torch.arange(6.0).view(1, 1, 6, 1).expand(1, 6, 6, 1)  # each cell is its column
        >>> read_crops(maps, torch.tensor([0]), torch.tensor([[[2.5 / 6, 0.5]]]), side=3)[0, 0, :3].tolist()
        [1.0, 2.0, 3.0]
    """
    (_, H, W, C), (m, P, _) = maps.shape, points.shape
    corner = points * torch.tensor([W, H]) - side / 2  # of the cells, counted from the center of the first
    whole = corner.floor()
    part = corner - whole  # (m, P, 2)
    steps = torch.arange(side + 1)
    x = (whole[..., 0, None].long() + steps).clamp(0, W - 1)
    y = (whole[..., 1, None].long() + steps).clamp(0, H - 1)
    index = (rows[:, None, None] * H + y)[..., :, None] * W + x[..., None, :]  # (m, P, side + 1, side + 1)
    cells = maps.reshape(-1, C).index_select(0, index.flatten()).float().view(*index.shape, C)
    cells = torch.lerp(cells[:, :, :-1], cells[:, :, 1:], part[..., 1, None, None, None])
    cells = torch.lerp(cells[..., :-1, :], cells[..., 1:, :], part[..., 0, None, None, None])
    return cells.view(m, P, side * side, C).mT.reshape(m, P, C * side * side)


@dataclass(frozen=True)
class Axes:
    """What crops are projected to: axes that all points share, and features of the whole image.

    Attributes:
        shared: (D, R).
        mean: (P · R,), of the whole image's crops on the shared axes.
        whole: (P · R, G), already scaled.
        one: the value of the constant feature.
    """

    shared: Tensor
    mean: Tensor
    whole: Tensor
    one: float

    def project(self, crops: Tensor) -> Tensor:
        """(m, P, D) to (m, P, R + G + 1)."""
        own = crops @ self.shared
        whole = ((own.flatten(1) - self.mean) @ self.whole)[:, None].expand(-1, own.shape[1], -1)
        return torch.cat([own, whole, own.new_full((*own.shape[:2], 1), self.one)], dim=-1)


def find_axes(crops: Tensor, seed: int) -> Axes:
    """From crops (n, P, D) at held-out positions."""
    n, P, D = crops.shape
    generator = torch.Generator().manual_seed(seed)
    flat = crops.flatten(0, 1)
    sample = flat[torch.randperm(len(flat), generator=generator)[:SAMPLED]]
    shared = principal_axes(sample, min(SHARED, D, len(sample) - 1), seed)
    own = crops @ shared
    every = own.flatten(1)
    mean = every.mean(0)
    axes = principal_axes(every - mean, min(WHOLE, every.shape[1], max(1, n - 1)), seed) if P > 1 else None
    length = float(own.norm(dim=-1).mean())
    if axes is None:
        return Axes(shared, mean, own.new_zeros(len(mean), 0), length)
    size = float(((every - mean) @ axes).norm(dim=-1).mean())
    return Axes(shared, mean, axes * (WHOLE_SCALE * length / max(size, 1e-12)), length)


def principal_axes(x: Tensor, rank: int, seed: int) -> Tensor:
    """The leading right singular vectors of (n, D): (D, rank)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.svd_lowrank(x, q=rank, niter=3)[2]


@dataclass(frozen=True)
class Round:
    """One correction of all points.

    Attributes:
        weight: (P, D, 2 + G), what a point's crop says of its own offset, in fractions, and of the whole image.
        center: (G,), of the features of the whole image.
        rest: (P, G + 1, 2), what they and a constant say of each offset.
        limit: (P, 2), the largest correction: no larger one was trained on.
        penalty: as chosen.
    """

    weight: Tensor
    center: Tensor
    rest: Tensor
    limit: Tensor
    penalty: float

    def correct(self, crops: Tensor, points: Tensor) -> Tensor:
        """Points (m, P, 2) after the correction that their crops (m, P, D) ask for."""
        said = torch.einsum("npd,pdk->npk", crops, self.weight)
        whole = said[..., 2:].sum(1) - self.center
        shift = said[..., :2] + torch.einsum("ng,pgo->npo", whole, self.rest[:, :-1]) + self.rest[:, -1]
        return points + shift.clamp(-self.limit, self.limit)


def combine(axes: Axes, W: Tensor, limit: Tensor, penalty: float) -> Round:
    """A round from the weights W (P, R + G + 1, 2) of the features of :meth:`Axes.project`."""
    R = axes.shared.shape[1]
    own = torch.einsum("dr,pro->pdo", axes.shared, W[:, :R])
    whole = torch.einsum("dr,prg->pdg", axes.shared, axes.whole.view(len(W), R, -1))
    rest = torch.cat([W[:, R:-1], axes.one * W[:, -1:]], dim=1)
    return Round(torch.cat([own, whole], dim=-1), axes.mean @ axes.whole, rest, limit, penalty)


def fit_round(
    crops: Tensor, offsets: Tensor, folds: Tensor, n: int, penalties: tuple[float, ...], seed: int
) -> tuple[Round, Axes, Tensor]:
    """Fit one round.

    Args:
        crops: (S, P, D); the first n at held-out positions, which are judged.
        offsets: (S, P, 2), truth minus position; NaN where unknown.
        folds: (S,), of the images.
        n: how many images.
        penalties: to choose from.
        seed: of the axes.

    Returns:
        The round, its axes, and the held-out corrections of the first n, (n, P, 2).
    """
    axes = find_axes(crops[:n], seed)
    known = ~offsets.isnan().any(-1)  # (S, P)
    scale = offsets.square().nanmean(0).sqrt().nan_to_num(nan=1.0).clamp(min=1e-9)
    z = (axes.project(crops) * known[..., None]).movedim(1, 0).double()  # (P, S, K)
    y = (offsets.nan_to_num() / scale).movedim(1, 0).double()
    parts = [torch.nonzero(folds == fold)[:, 0] for fold in folds.unique()]
    grams, rights = [[z[:, rows].mT @ each[:, rows] for rows in parts] for each in (z, y)]
    gram, right = torch.stack(grams).sum(0), torch.stack(rights).sum(0)
    free = torch.ones(z.shape[-1], dtype=torch.float64)
    free[-1] = 1e-6  # the constant is all but free
    ridge = gram.diagonal(dim1=-2, dim2=-1)[:, :-1].sum(-1)[:, None, None] * torch.diag(free) + 1e-9 * torch.diag(free)
    best: tuple[float, float, Tensor] | None = None
    for penalty in penalties:
        held = torch.zeros(z.shape[0], n, 2, dtype=torch.float64)
        for rows, own_gram, own_right in zip(parts, grams, rights, strict=True):
            share = 1 - len(rows) / len(crops)
            W = _solve(gram - own_gram + share * penalty * ridge, right - own_right)
            rows = rows[rows < n]
            held[:, rows] = z[:, rows] @ W
        error = float(((held - y[:, :n]) * scale[:, None]).norm(dim=-1)[known[:n].mT].mean())
        if best is None or error < best[0]:
            best = error, penalty, held
    assert best is not None
    _, penalty, held = best
    W = _solve(gram + penalty * ridge, right).float() * scale[:, None].float()
    limit = offsets.abs().nan_to_num().amax(0)
    corrections = (held.movedim(0, 1) * scale).float().clamp(-limit, limit)
    return combine(axes, W, limit, penalty), axes, corrections


def _solve(A: Tensor, B: Tensor) -> Tensor:
    """(P, K, 2); zeros for a point of which nothing is known: it is left where it is."""
    root, failed = torch.linalg.cholesky_ex(A)
    nothing = (failed > 0) | (B == 0).all(-1).all(-1)
    return torch.where(nothing[:, None, None], 0.0, torch.cholesky_solve(B, root))


@dataclass(frozen=True)
class Refinement:
    """The rounds that helped.

    Attributes:
        rounds: in their order; none where the second stage does not help.
        held: (n, P, 2), held-out predictions behind the last of them.
    """

    rounds: tuple[Round, ...]
    held: Tensor

    def refine(self, read: Read, rows: np.ndarray, points: Tensor) -> Tensor:
        """Predictions of the first stage (m, P, 2) after all rounds."""
        for each in self.rounds:
            points = each.correct(read(rows, points), points)
        return points


def fit_refinement(
    read: Read, rows: np.ndarray, truth: Tensor, held: Tensor, folds: np.ndarray, *, most: int = ROUNDS, seed: int = 0
) -> Refinement:
    """Fit rounds while they help.

    Args:
        read: gives crops.
        rows: (n,), the labelled images.
        truth: (n, P, 2), fractions; NaN where unknown.
        held: (n, P, 2), held-out predictions of the first stage.
        folds: (n,), in which the images were held out.
        most: how many rounds at most.
        seed: of what is random.
    """
    rounds: list[Round] = []
    if len(rows) < FEWEST or len(np.unique(folds)) < 2:
        return Refinement((), held)
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.from_numpy(np.tile(folds, 1 + JITTERS))
    penalties: tuple[float, ...] = PENALTIES
    error = mean_distance(held, truth)
    for _ in range(most):
        starts = [held, *(_move(truth, held, generator) for _ in range(JITTERS))]
        crops = torch.cat([read(rows, start) for start in starts])
        offsets = torch.cat([truth - start for start in starts])
        fitted, _, corrections = fit_round(crops, offsets, numbers, len(rows), penalties, seed)
        corrected = held + corrections
        now = mean_distance(corrected, truth)
        if not now < (1 - BETTER) * error:
            break
        rounds.append(fitted)
        held, error, penalties = corrected, now, (fitted.penalty,)
    return Refinement(tuple(rounds), held)


def mean_distance(points: Tensor, truth: Tensor) -> float:
    """Mean distance of the points that are known."""
    return float((points - truth).norm(dim=-1).nanmean())


def _move(truth: Tensor, held: Tensor, generator: torch.Generator) -> Tensor:
    """True positions, moved by normal errors with the covariance of each point's held-out ones."""
    errors = held - truth
    known = ~errors.isnan().any(-1, keepdim=True)
    errors = errors.nan_to_num()
    covariance = torch.einsum("npi,npj->pij", errors, errors) / known.sum(0).clamp(min=1)[..., None]
    root = torch.linalg.cholesky(covariance + 1e-10 * torch.eye(2).to(covariance))
    noise = torch.randn(truth.shape, generator=generator, dtype=torch.float32).to(truth)
    moved = truth + torch.einsum("pij,npj->npi", root, noise)
    return torch.where(known, moved, held)
