"""Decompositions of a trained weight, in float64: Tucker by HOSVD and HOOI, CP by SVD and ALS, TT by TT-SVD.

A weight of a linear layer behind average pooling, ``W[c,h,w,o] = F[o,c] / (H·W)``, is never formed: the matrix F is
decomposed, and the constant spatial modes are put in afterwards, exactly.

Why not TensorLy, which has all three: its backend is a global switch (a library must not turn it), it offers CP
neither restarts nor a start that is exact at full rank, and it would need the dense W. It is the oracle of the tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor

Ranks = tuple[int, ...]


class Decomposition(ABC):
    """A weight that can be written in factors of any rank.

    Args:
        weight: (*modes), float64, at least two modes; for a pooled head the matrix ``Fᵀ: (C, O)``.
        grid: the sizes of the pooled spatial modes, which are put in behind the first mode; () if there are none.
    """

    def __init__(self, weight: Tensor, grid: Sequence[int] = ()) -> None:
        self.weight = weight
        self.grid = tuple(grid)
        self._last: tuple[Ranks, list[Tensor]] | None = None

    def operands(self, ranks: Ranks) -> list[Tensor]:
        """:meth:`at`, remembered: a search asks for the same ranks twice in a row."""
        if self._last is None or self._last[0] != ranks:
            self._last = (ranks, self.at(ranks))
        return self._last[1]

    @property
    @abstractmethod
    def exact_rank(self) -> Ranks:
        """The smallest rank, in the layer's axes, at which :meth:`at` is exact (for CP: that we can construct)."""

    @property
    @abstractmethod
    def path(self) -> list[Ranks]:
        """Ranks from the smallest to the exact one, none of them falling: where a budget or an error is sought."""

    @abstractmethod
    def at(self, ranks: Ranks) -> list[Tensor]:
        """The operands of a layer, in the order of ``layer.operands()``, of at most these ranks (see :func:`pad`)."""

    def _spatial_column(self, size: int) -> Tensor:
        # Unit length, as in a fresh layer; the scale is in the rest: ∏ H^-1/2 here, ∏ H^-1/2 there make 1/(H·W).
        return torch.full((size, 1), size**-0.5, dtype=self.weight.dtype, device=self.weight.device)


class TuckerDecomposition(Decomposition):
    """``W ≈ G ×_0 U0 … ×_N UN`` with orthonormal factors."""

    @cached_property
    def _bases(self) -> list[tuple[Tensor, Tensor]]:
        if self.weight.ndim == 2:  # one SVD has both sides
            left, spectrum, right = torch.linalg.svd(self.weight, full_matrices=False)
            return [(left, spectrum), (right.T, spectrum)]
        return [left_singular(unfold(self.weight, mode)) for mode in range(self.weight.ndim)]

    @property
    def exact_rank(self) -> Ranks:
        """See :class:`Decomposition`."""
        return self._in_layer(tuple(numerical_rank(spectrum) for _, spectrum in self._bases))

    @cached_property
    def path(self) -> list[Ranks]:
        """See :class:`Decomposition`."""
        spectra = [spectrum for _, spectrum in self._bases]
        if len(spectra) == 2:  # the two sides of a matrix have one spectrum
            return [self._in_layer((R, R)) for R in range(1, numerical_rank(spectra[0]) + 1)]
        return [self._in_layer(ranks) for ranks in threshold_path(spectra)]

    def at(self, ranks: Ranks) -> list[Tensor]:
        """See :class:`Decomposition`."""
        wanted = (ranks[0], *ranks[1 + len(self.grid) :])
        exact = [numerical_rank(spectrum) for _, spectrum in self._bases]
        kept = [min(R, most) for R, most in zip(wanted, exact, strict=True)]
        factors = [basis[:, :R] for (basis, _), R in zip(self._bases, kept, strict=True)]
        if kept != exact and self.weight.ndim > 2:  # a truncated SVD is the best there is
            factors = improve_tucker(self.weight, factors)
        core = project(self.weight, factors)
        for size in reversed(self.grid):
            factors.insert(1, self._spatial_column(size))
            core = core.unsqueeze(1) * size**-0.5
        return [*factors, core]

    def _in_layer(self, ranks: Ranks) -> Ranks:
        return (ranks[0], *[1 for _ in self.grid], *ranks[1:])


class CPDecomposition(Decomposition):
    """``W ≈ Σ_r u0_r ∘ … ∘ uN_r`` with the length of each term shared equally by its vectors.

    Exact from the singular vectors of the slices along the two largest modes; below that rank by alternating least
    squares from several starts, the best of which is kept. A matrix needs its SVD only.

    Args:
        weight: as in :class:`Decomposition`.
        grid: as in :class:`Decomposition`.
        restarts: how many random starts are tried beside the two that the SVDs give.
        sweeps: the most sweeps over the factors from each start.
    """

    def __init__(self, weight: Tensor, grid: Sequence[int] = (), restarts: int = 2, sweeps: int = 100) -> None:
        super().__init__(weight, grid)
        self.restarts = restarts
        self.sweeps = sweeps

    @cached_property
    def _slices(self) -> tuple[list[Tensor], Tensor]:
        return slice_terms(self.weight)

    @property
    def exact_rank(self) -> Ranks:
        """See :class:`Decomposition`."""
        return (max(1, self._slices[1].numel()),)

    @cached_property
    def path(self) -> list[Ranks]:
        """See :class:`Decomposition`."""
        return [(R,) for R in range(1, self.exact_rank[0] + 1)]

    def at(self, ranks: Ranks) -> list[Tensor]:
        """See :class:`Decomposition`."""
        factors, lengths = self._slices
        R = min(ranks[0], self.exact_rank[0])
        start = [factor[:, :R] for factor in factors]
        start[0] = start[0] * lengths[:R]
        if self.weight.ndim > 2 and lengths.numel() > R:
            starts = [start, leading_columns(self.weight, R)]
            starts += [random_columns(self.weight, R, seed) for seed in range(self.restarts)]
            fits = [alternate_least_squares(self.weight, each, self.sweeps) for each in starts]
            start = min(fits, key=lambda fit: cp_misfit(self.weight, fit))
            longest = torch.stack([factor.norm(dim=0) for factor in start]).prod(0).argsort(descending=True)
            start = [factor[:, longest] for factor in start]
        for size in reversed(self.grid):
            start.insert(1, self._spatial_column(size).expand(-1, R) * size**-0.5)
        return balance(start)


class TTDecomposition(Decomposition):
    """``W[i_0,..,i_N] ≈ C_0[i_0] ⋯ C_N[i_N]`` by successive SVDs."""

    @cached_property
    def _splits(self) -> list[tuple[Tensor, Tensor]]:
        """Left singular vectors and values of W as a matrix, cut at every bond."""
        modes = range(1, self.weight.ndim)
        return [left_singular(self.weight.flatten(n).flatten(0, n - 1)) for n in modes]

    @property
    def exact_rank(self) -> Ranks:
        """See :class:`Decomposition`."""
        return self._in_layer(tuple(numerical_rank(spectrum) for _, spectrum in self._splits))

    @cached_property
    def path(self) -> list[Ranks]:
        """See :class:`Decomposition`."""
        return [self._in_layer(ranks) for ranks in threshold_path([spectrum for _, spectrum in self._splits])]

    def at(self, ranks: Ranks) -> list[Tensor]:
        """See :class:`Decomposition`."""
        first_basis = self._splits[0][0]
        if not self.grid:
            return tensor_train(self.weight, ranks, first_basis)
        R = min(ranks[: len(self.grid) + 1])  # a pooled channel passes through all bonds up to the output
        first, *rest = tensor_train(self.weight, (R, *ranks[len(self.grid) + 1 :]), first_basis)
        R = first.shape[-1]
        identity = torch.eye(R, dtype=first.dtype, device=first.device)
        middle = [torch.einsum("rs,i->ris", identity, self._spatial_column(size)[:, 0]) for size in self.grid]
        return [first * prod(self.grid) ** -0.5, *middle, *rest]

    def _in_layer(self, ranks: Ranks) -> Ranks:
        return tuple(ranks[0] for _ in self.grid) + ranks


DECOMPOSITIONS: dict[str, type[Decomposition]] = {
    "tucker": TuckerDecomposition,
    "cp": CPDecomposition,
    "tt": TTDecomposition,
}


# Matrices.


def unfold(tensor: Tensor, mode: int) -> Tensor:
    """(size_mode, everything else)."""
    return tensor.movedim(mode, 0).flatten(1)


def left_singular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors and singular values; a wide matrix is first made square by QR, which keeps them."""
    rows, columns = matrix.shape
    if columns > rows:
        matrix = torch.linalg.qr(matrix.T, mode="r").R.T
    left, spectrum, _ = torch.linalg.svd(matrix, full_matrices=False)
    return left, spectrum


def numerical_rank(spectrum: Tensor) -> int:
    """How many singular values are not rounding errors; 1 at least."""
    noise = spectrum.max() * spectrum.numel() * torch.finfo(spectrum.dtype).eps
    return max(1, int((spectrum > noise).sum()))


def threshold_path(spectra: list[Tensor]) -> list[Ranks]:
    """All ranks "keep what lies above t" for falling t, of every spectrum together.

    Each rank is the smallest whose discarded energy ``Σ s²`` is at most t² (t = 0: the numerical rank).
    """
    tails, rank = [], []
    for spectrum in spectra:
        kept = spectrum[: numerical_rank(spectrum)].square()
        tails.append(torch.cat([kept.flip(0).cumsum(0).flip(0)[1:], kept.new_zeros(1)]))  # after 1, 2, .. ranks
        rank.append(1)
    steps = sorted(((float(tail[R - 1]), n) for n, tail in enumerate(tails) for R in range(1, len(tail))), reverse=True)
    path = [tuple(rank)]
    for _, n in steps:  # the mode that loses most grows next
        rank[n] += 1
        path.append(tuple(rank))
    return path


# Tucker.


def project(tensor: Tensor, factors: list[Tensor], skip: int | None = None) -> Tensor:
    """``tensor ×_n Unᵀ`` over all modes but ``skip``, those first that shrink it most."""
    order = sorted(range(tensor.ndim), key=lambda n: factors[n].shape[1] / factors[n].shape[0])
    for mode in order:
        if mode != skip:
            tensor = torch.tensordot(tensor, factors[mode], dims=([mode], [0])).movedim(-1, mode)
    return tensor


def improve_tucker(weight: Tensor, factors: list[Tensor], sweeps: int = 20, tolerance: float = 1e-6) -> list[Tensor]:
    """HOOI: each factor in turn becomes the best one for the others, until the captured energy stands still."""
    factors, captured = list(factors), 0.0
    for _ in range(sweeps):
        for mode, factor in enumerate(factors):
            if factor.shape[1] < factor.shape[0]:
                left, _ = left_singular(unfold(project(weight, factors, skip=mode), mode))
                factors[mode] = left[:, : factor.shape[1]]
        before, captured = captured, float(project(weight, factors).norm())
        if captured - before <= tolerance * captured:
            break
    return factors


# CP.


def slice_terms(weight: Tensor) -> tuple[list[Tensor], Tensor]:
    """An exact CP, longest terms first: the SVD of every slice along the two largest modes.

    Returns:
        Factors with columns of unit length, and the lengths of the terms (those that are not rounding errors).
    """
    rows, columns = sorted(sorted(range(weight.ndim), key=lambda n: weight.shape[n])[-2:])
    rest = [n for n in range(weight.ndim) if n not in (rows, columns)]
    slices = weight.permute(*rest, rows, columns).flatten(0, len(rest) - 1) if rest else weight.unsqueeze(0)
    left, spectrum, right = torch.linalg.svd(slices, full_matrices=False)  # (S, m, k), (S, k), (S, k, n)
    lengths, order = spectrum.flatten().sort(descending=True)
    order = order[: numerical_rank(lengths)]
    where = torch.unravel_index(order // spectrum.shape[1], [weight.shape[n] for n in rest] or [1])
    factors: list[Tensor] = [weight] * weight.ndim
    for n, index in zip(rest, where, strict=False):
        factors[n] = torch.eye(weight.shape[n], dtype=weight.dtype, device=weight.device)[:, index]
    factors[rows] = left.movedim(2, 1).flatten(0, 1)[order].T
    factors[columns] = right.flatten(0, 1)[order].T
    return factors, lengths[: len(order)]


def leading_columns(weight: Tensor, R: int) -> list[Tensor]:
    """A start for ALS: leading singular vectors of every mode, and random columns where a mode has too few."""
    start = random_columns(weight, R, seed=-1)
    for mode, columns in enumerate(start):
        left, _ = left_singular(unfold(weight, mode))
        k = min(R, left.shape[1])
        columns[:, :k] = left[:, :k]
    return start


def random_columns(weight: Tensor, R: int, seed: int) -> list[Tensor]:
    """A start for ALS: Gaussian columns of unit length; the global generator is not touched."""
    generator = torch.Generator().manual_seed(2**31 + seed)
    drawn = (torch.randn(size, R, generator=generator, dtype=weight.dtype) for size in weight.shape)
    return [torch.nn.functional.normalize(columns, dim=0).to(weight.device) for columns in drawn]


def alternate_least_squares(
    weight: Tensor, factors: list[Tensor], sweeps: int, tolerance: float = 1e-5
) -> list[Tensor]:
    """Solve for one factor after the other until the misfit stands still.

    A small pull towards the last value, ``(Γ + μI) Uᵀ = MTTKRPᵀ + μ U_oldᵀ``, keeps singular Γ solvable, and the
    misfit still never grows.
    """
    factors, misfit = list(factors), float("inf")
    for _ in range(sweeps):
        for mode, old in enumerate(factors):
            others = [factor for n, factor in enumerate(factors) if n != mode]
            gram = torch.stack([factor.T @ factor for factor in others]).prod(0)
            pull = 1e-9 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
            target = unfold(weight, mode) @ khatri_rao(others)
            factors[mode] = torch.linalg.solve(gram + pull, (target + old @ pull).T).T
        factors = balance(factors)
        before, misfit = misfit, cp_misfit(weight, factors)
        if before - misfit <= tolerance * misfit:
            break
    return factors


def khatri_rao(factors: list[Tensor]) -> Tensor:
    """Column-wise Kronecker product: (sizes.., R) with the sizes flattened in order."""
    product = factors[0]
    for factor in factors[1:]:
        product = (product[:, None] * factor).flatten(0, 1)
    return product


def cp_misfit(weight: Tensor, factors: list[Tensor]) -> float:
    """``‖W - Σ_r u0_r ∘ … ∘ uN_r‖``."""
    return float((unfold(weight, 0) - factors[0] @ khatri_rao(factors[1:]).T).norm())


def balance(factors: list[Tensor]) -> list[Tensor]:
    """The same tensor with equally long vectors in each of its terms."""
    lengths = torch.stack([factor.norm(dim=0) for factor in factors])
    mean = lengths.clamp(min=torch.finfo(lengths.dtype).tiny).log().mean(0).exp()
    mean = torch.where((lengths == 0).any(0), 0.0, mean)
    return [factor * (mean / torch.where(own == 0, 1.0, own)) for factor, own in zip(factors, lengths, strict=True)]


# TT.


def tensor_train(weight: Tensor, ranks: Ranks, first_basis: Tensor) -> list[Tensor]:
    """TT-SVD: the cores, without the bonds of size 1 at the two ends.

    Args:
        weight: (*modes).
        ranks: the most that each bond may have.
        first_basis: the left singular vectors of W as a matrix, cut behind its first mode.
    """
    cores, left, rest = [], 1, weight
    for n, R in enumerate(ranks):
        matrix = rest.reshape(left * weight.shape[n], -1)
        U = first_basis if n == 0 else left_singular(matrix)[0]
        R = min(R, U.shape[1])
        cores.append(U[:, :R].reshape(left, weight.shape[n], R))
        rest, left = U[:, :R].T @ matrix, R
    cores.append(rest.reshape(left, -1))
    cores[0] = cores[0].squeeze(0)
    return cores


# Filling a layer.


def pad(operands: list[Tensor], like: Sequence[Tensor], zero: set[int]) -> list[Tensor]:
    """Operands of higher rank and the same function.

    New columns are orthonormal to the old ones where there is room, else random directions; the operands in ``zero``
    (the core; the CP factor of the output; every TT core after the first, along its first bond) get zeros, so that the
    function stays and training can grow into the new ranks.

    Args:
        operands: what :meth:`Decomposition.at` gave.
        like: tensors of the wanted shapes.
        zero: positions of the operands that are extended by zeros.
    """
    padded = []
    for n, (operand, wanted) in enumerate(zip(operands, like, strict=True)):
        grown = operand.new_zeros(wanted.shape)
        grown[tuple(slice(size) for size in operand.shape)] = operand
        if n not in zero and wanted.shape[-1] > operand.shape[-1]:
            extend_columns_(grown, operand.shape, seed=n)
        padded.append(grown)
    return padded


def extend_columns_(grown: Tensor, filled: torch.Size, seed: int) -> None:
    """Fill the last axis beyond the filled part; only the filled rows of a bond before it are used."""
    block = grown[: filled[0]].flatten(0, -2) if len(filled) == 3 else grown
    old, new = filled[-1], grown.shape[-1] - filled[-1]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(block.shape[0], new, generator=generator, dtype=block.dtype).to(block.device)
    basis = torch.linalg.qr(block[:, :old]).Q
    drawn = drawn - basis @ (basis.T @ drawn)
    if old + new <= block.shape[0]:
        drawn = torch.linalg.qr(drawn).Q
    elif old >= block.shape[0]:  # no direction is left
        drawn = torch.randn(block.shape[0], new, generator=generator, dtype=block.dtype).to(block.device)
    length = block[:, :old].norm(dim=0).mean()
    drawn = torch.nn.functional.normalize(drawn, dim=0) * torch.where(length > 0, length, 1.0)
    if len(filled) == 3:
        grown[: filled[0], :, old:] = drawn.reshape(filled[0], filled[1], new)
    else:
        grown[:, old:] = drawn
