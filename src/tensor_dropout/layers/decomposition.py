"""What the decompositions of a trained weight share: the search path over the ranks, singular vectors, padding.

Each format has its own decomposition beside its layer: Tucker by HOSVD and HOOI, CP by SVD and ALS, TT by TT-SVD. All
compute in float64.

A weight of a linear layer behind average pooling, ``W[c,h,w,o] = F[o,c] / (H·W)``, is never formed: the matrix F is
decomposed, and the constant spatial modes are put in afterwards, exactly.

Why not TensorLy: its backend is a global switch (a library must not turn it), its CP has neither restarts nor a start
that is exact at full rank, and it would need the dense W. The tests compare with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

Ranks = tuple[int, ...]


class Decomposition(ABC):
    """A weight that can be written in factors of any rank.

    Args:
        weight: (*modes), float64, at least two modes; for a pooled head the matrix ``Fᵀ: (C, O)``.
        grid: the sizes of the pooled spatial modes, which are put in behind the first mode; () if there are none.
    """

    zero_padded: frozenset[int] = frozenset()
    """Positions of the operands, from the end if negative, whose new entries are all zero: the core of Tucker, the
    factor of the output of CP. A core of a train needs none: beyond its first bond's old rank it is zero anyway."""

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

    def fill(self, like: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
        """The operands at these ranks in the shapes of ``like``, padded where the weight's own rank is lower."""
        return pad(self.operands(ranks), like, {position % len(like) for position in self.zero_padded})

    def _spatial_column(self, size: int) -> Tensor:
        # Unit length, as in a fresh layer; the scale is in the rest: ∏ H^-1/2 here, ∏ H^-1/2 there make 1/(H·W).
        return torch.full((size, 1), size**-0.5, dtype=self.weight.dtype, device=self.weight.device)


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


def pad(operands: list[Tensor], like: Sequence[Tensor], zero: set[int]) -> list[Tensor]:
    """Operands of higher rank and the same function.

    New columns are orthonormal to the old ones where there is room, else random directions. The operands in ``zero``,
    and every core along its first bond, get zeros, so that the function stays and training can grow into the new ranks.

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
        grown[: filled[0], :, old:] = drawn.reshape(filled[0], -1, new)
    else:
        grown[:, old:] = drawn
