"""Tensor-train regression: ``W[i_0,..,i_N] = C_0[i_0] C_1[i_1] … C_N[i_N]``, a product of matrices."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tensor_dropout.layers.decomposition import Decomposition, Ranks, left_singular, numerical_rank, threshold_path
from tensor_dropout.layers.dropout import Masks
from tensor_dropout.layers.initialize import target_norm
from tensor_dropout.layers.moments import (
    ExactMoments,
    Grams,
    MaskMoments,
    bond_grams,
    double_over_outputs,
    held_by_bonds,
    quadratic,
)
from tensor_dropout.layers.regression import TensorRegression, index_letters


class TTRegression(TensorRegression):
    """Tensor regression with a tensor-train weight; the paper says that its idea fits any decomposition.

    ``W[i_0,..,i_N] = C_0[i_0] · C_1[i_1] ⋯ C_N[i_N]`` with cores ``C_n: (R_n, size_n, R_{n+1})`` and
    ``R_0 = R_{N+1} = 1``. Tensor dropout draws one mask per bond ``R_1..R_N``, independently, and puts it between
    the cores.

    Args:
        input_shape: the sizes of the input modes, without the batch; channels first.
        output_shape: the sizes of the output modes; an int is one mode.
        rank: one rank per bond (N of them for N+1 modes); an int for all, cut at each bond's full rank; a float in
            (0, 1], the fraction of the dense parameter count; or "full", the smaller of the left and right products.
        dropout: a :class:`TensorDropout`, whose ``modes`` are bond numbers 1..N; a number θ is short for
            ``TensorDropout(θ)``.
        bias: whether to add a bias of ``output_shape``.
        init: "pool": spatial cores start as average pooling, extra bonds orthogonal to it; "normal": Gaussian.
            Either way the output has the variance of pooling + nn.Linear.
        device: where the parameters live.
        dtype: their type.

    Raises:
        TensorDropoutError: if a shape, rank or setting is not possible.

    Example:
        >>> import torch, tensor_dropout as td
        >>> head = td.TTRegression((512, 4, 4), 100, rank=64, dropout=0.8)
        >>> head(torch.randn(2, 512, 4, 4)).shape
        torch.Size([2, 100])
        >>> head.rank
        (64, 64, 64)
    """

    @classmethod
    def full_ranks(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        """At each bond the smaller of the products of the sizes to its left and to its right."""
        return tuple(min(prod(shape[:n]), prod(shape[n:])) for n in range(1, len(shape)))

    def _count(self, ranks: tuple[int, ...]) -> int:
        bonds = (1, *ranks, 1)
        return sum(bonds[n] * size * bonds[n + 1] for n, size in enumerate(self.weight_shape))

    def _make_parameters(self, **factory: Any) -> None:
        bonds = (1, *self._ranks, 1)
        self.cores = nn.ParameterList(
            torch.empty(bonds[n], size, bonds[n + 1], **factory) for n, size in enumerate(self.weight_shape)
        )

    def _fill(self) -> None:
        pooled = min(self._ranks[: len(self.input_shape)])  # bonds that carry a pooled channel all the way through
        cores = []
        for mode, core in enumerate(self.cores):
            filled = torch.randn(core.shape, device=core.device, dtype=torch.float32)
            if self.init != "normal" and mode < len(self.input_shape):
                filled = orthonormal_core(filled, pool=mode > 0)
            elif self.init != "normal" and mode == len(self.input_shape):
                filled[pooled:] = 0.0
            cores.append(filled)
        scale = target_norm(self.input_shape, self.output_shape) / _train_norm(cores)
        for core, filled in zip(self.cores, cores, strict=True):
            core.copy_(filled * scale ** (1 / len(cores)))

    def _indices(self) -> tuple[str, list[str], str, str]:
        n_in, n_out = len(self.input_shape), len(self.output_shape)
        inputs, outputs, bonds = index_letters(n_in, n_out, n_in + n_out - 1)
        modes = inputs + outputs
        cores = [bonds[max(0, n - 1) : n] + mode + bonds[n : n + 1] for n, mode in enumerate(modes)]
        return inputs, cores, outputs, bonds

    def _projection(self) -> tuple[int, str]:
        inputs, _, _, bonds = self._indices()
        return 1, bonds[0] + inputs[1:]

    channel_parameter = ("cores.0", 1)

    def finish_projection(self, first: Tensor) -> Tensor:
        """The bond moves behind the batch: (R_1, B, *space) -> (B, R_1, *space)."""
        return first.movedim(0, 1)

    def output_features(self, x: Tensor, masks: list[MaskMoments]) -> tuple[Tensor, Tensor]:
        """What reaches the last bond for each of the other outputs; see the base class."""
        cores, n_in = [core.to(x.dtype) for core in list(self.cores)[1:-1]], len(self.input_shape)
        equations = ["bri...,ris->brs..." if n < n_in else "br,ros->bros" for n in range(1, len(cores) + 1)]
        second = _second_moment_at_last_bond(x, list(zip(equations, cores, strict=True)), masks)
        mean = x
        for equation, core, mask in zip(equations, cores, masks, strict=False):
            inputs, output = equation.split("->")
            shape = [-1, *[1] * (core.ndim - 1)]
            mean = torch.einsum(f"{inputs}->{output.replace('r', '')}", mean, core * mask.mean.view(shape))
            mean = mean if equation[2] == "i" else mean.flatten(0, 1)
        return mean.unflatten(0, (x.shape[0], -1)) * masks[-1].mean, second

    def _exact_moments(self, x: Tensor, masks: list[MaskMoments], block: int, covariance: bool) -> ExactMoments:
        cores = [core.to(x.dtype) for core in self.cores]
        inner, outer = cores[1 : len(self.input_shape)], cores[len(self.input_shape) :]
        before, behind = masks[: len(inner)], masks[len(inner) :]
        held = held_by_bonds(tuple(x.shape[1:]), inner, before)
        held = max(held, self._ranks[len(inner)] * max(self._ranks[len(inner)], prod(self.output_shape)))
        chunk = max(1, block // held)

        def variance(covariance: bool) -> Tensor:
            grams = (bond_grams(part, inner, before) for part in x.split(chunk))
            return torch.cat([_read_out(part, outer, behind, covariance=covariance) for part in grams])

        def variance_of(w: Tensor) -> Tensor:
            if len(outer) > 1:
                return quadratic(variance(True), w)
            V = w @ outer[0].squeeze(-1).mT  # (B, R)
            grams = (bond_grams(part, inner, before).over_last(behind) for part in x.split(chunk))
            return torch.cat([quadratic(part, row) for part, row in zip(grams, V.split(chunk), strict=True)])

        mean = torch.einsum("br...,r->br...", x, masks[0].mean)
        for n, core in enumerate(inner, 1):
            mean = torch.einsum("bri...,ris->bs...", mean, core * masks[n].mean)
        last = outer[0]
        for n, core in enumerate(outer[1:], len(inner) + 1):
            last = torch.einsum("ros,spt->ropt", last * masks[n].mean, core).flatten(1, 2)
        mean = mean @ last.squeeze(-1)
        return ExactMoments(mean, variance(covariance), variance_of)

    def operands(self) -> list[Tensor]:
        """The cores, without the bonds of size 1 at the two ends."""
        cores = list(self.cores)
        return [cores[0].squeeze(0), *cores[1:-1], cores[-1].squeeze(-1)]

    @property
    def mode_numbers(self) -> tuple[int, ...]:
        """Bond numbers, 1 to N."""
        return tuple(range(1, len(self.weight_shape)))

    @property
    def output_parameter(self) -> tuple[str, int]:
        """The last core, (R, O, 1)."""
        return f"cores.{len(self.cores) - 1}", 1

    def reference_weight(self, masks: Masks) -> Tensor:
        """The product of the cores, the masks between them."""
        weight = self.cores[0]
        for core, mask in zip(self.cores[1:], masks, strict=True):
            weight = torch.tensordot(weight if mask is None else weight * mask, core, dims=1)
        return weight.squeeze(0).squeeze(-1)


def _second_moment_at_last_bond(y: Tensor, absorbed: list[tuple[str, Tensor]], masks: list[MaskMoments]) -> Tensor:
    """``Σ_rows E[z zᵀ]`` at the last bond, (K, K), of rows y (rows, R, ..) that absorb one core after the other.

    Each core comes with its einsum, which keeps the bond r in front of it; masked, the bond becomes rows.
    """
    mask = masks[0]
    if not absorbed:
        return mask.second() * (y.mT @ y)
    (equation, core), later = absorbed[0], absorbed[1:]

    def rest(kept: Tensor, rows: int) -> Tensor:
        return _second_moment_at_last_bond(kept.flatten(0, rows - 1), later, masks[1:])

    rows = 2 if equation[2] == "i" else 3  # an output mode stays as rows too
    summed = equation.split("->")[0] + "->" + equation.split("->")[1].replace("r", "")
    if not mask.dropped:
        return rest(torch.einsum(summed, y, core), rows - 1)
    kept = torch.einsum(equation, y, core)
    if mask.alike is None:
        assert mask.root is not None
        factor = torch.cat([mask.root, mask.mean.unsqueeze(0)])  # AᵀA = E[c cᵀ]
        return rest(torch.einsum("jr,br...->bj...", factor, kept), rows)
    v, e = mask.alike
    m = mask.mean[0]
    return v * rest(kept, rows) + (e + m * m) * rest(torch.einsum(summed, y, core), rows - 1)


def _read_out(grams: Grams, cores: list[Tensor], masks: list[MaskMoments], *, covariance: bool) -> Tensor:
    """The variance of the outputs, (B, O) or (B, O, O), from the sums of products (B, R, R) in front of their cores."""
    if len(cores) > 1:
        start = Grams(*(t[:, None, None] for t in grams))  # (B, O, P, R, R)
        found = double_over_outputs(start, cores, masks, covariance=covariance).second
        return found.reshape(found.shape[: 3 if covariance else 2])
    V = cores[0].squeeze(-1).mT
    whole = grams.over_last(masks)
    return V @ whole @ V.mT if covariance else ((V @ whole) * V).sum(-1)


def orthonormal_core(core: Tensor, pool: bool) -> Tensor:
    """A core (R, size, R') with orthonormal columns; with ``pool`` the first ones pass bond r on, averaging.

    The columns beyond the passed bonds are orthogonal to them, so that training can grow into them.
    """
    left, size, right = core.shape
    columns = core.reshape(left * size, right).clone()
    if pool:
        passed = min(left, right)
        average = torch.full((size, 1), size**-0.5, device=core.device, dtype=core.dtype)
        columns[:, :passed] = torch.kron(torch.eye(left, passed, device=core.device, dtype=core.dtype), average)
    orthonormal, triangle = torch.linalg.qr(columns)
    columns[:, : orthonormal.shape[1]] = orthonormal * triangle.diagonal().sign()
    return nn.functional.normalize(columns, dim=0).reshape(left, size, right)


def _train_norm(cores: list[Tensor]) -> Tensor:
    """``‖W‖`` of a tensor train, bond by bond."""
    gram = torch.ones(1, 1, device=cores[0].device, dtype=cores[0].dtype)
    for core in cores:
        gram = torch.einsum("sit,siu->tu", torch.einsum("rs,rit->sit", gram, core), core)
    return gram.sum().sqrt()


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
        return [first * prod(self.grid) ** -0.5, *self._pass_on(R), *rest]

    def _pass_on(self, R: int) -> list[Tensor]:
        """Spatial cores that pass R bonds on and average."""
        identity = torch.eye(R, dtype=self.weight.dtype, device=self.weight.device)
        return [torch.einsum("rs,i->ris", identity, self._spatial_column(size)[:, 0]) for size in self.grid]

    def _in_layer(self, ranks: Ranks) -> Ranks:
        return tuple(ranks[0] for _ in self.grid) + ranks


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
