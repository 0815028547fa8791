"""The expected loss as L-BFGS sees it: many problems on the same features, with the output parameter solved for.

Only two products are as large as the features: what the channels' parameter makes of them, and its gradient. The
samples come in blocks, so that what is made of a block stays in the cache, and so that the features may stay on disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.moments import ExactMoments
from tensor_dropout.layers.regression import TensorRegression

Task = Literal["regression", "classification"]


class Projection:
    """Features that meet the channels' parameter of P problems at once, block by block.

    Args:
        blocks: (C, b, *space) each, channels first of all; b differs. A sequence that makes its blocks when they are
            asked for, such as :class:`tensor_dropout.fitting.statistics.StoredBlocks`, keeps the features on disk.
        basis: (P, C, r): what each problem's parameter is multiplied by first; None for the identity.
        center: (P, C): what each problem subtracts from the features; None for nothing.
    """

    def __init__(self, blocks: Sequence[Tensor], basis: Tensor | None = None, center: Tensor | None = None) -> None:
        self.blocks, self.basis, self.center = blocks, basis, center
        self.n_channels = blocks[0].shape[0]
        self.kept = isinstance(blocks, list)
        """Whether what a parameter makes of the features is kept for the gradient; else it is made again."""

    @property
    def size(self) -> int:
        """How many coordinates the parameter has."""
        return self.n_channels if self.basis is None else self.basis.shape[-1]

    def weight(self, U: Tensor, which: Tensor | slice) -> Tensor:
        """What the features meet: (p, r, K) -> (p, C, K)."""
        return U if self.basis is None else self.basis[which] @ U

    def forward(self, W: Tensor, block: Tensor, which: Tensor | slice) -> Tensor:
        """(p, C, K) -> (p, K, b, *space)."""
        K = W.shape[2]
        G = (W.mT.reshape(len(W) * K, self.n_channels) @ block.flatten(1)).view(len(W), K, *block.shape[1:])
        if self.center is not None:
            shift = torch.einsum("pck,pc->pk", W, self.center[which])
            G -= shift.view(*shift.shape, *[1] * (G.ndim - 2))
        return G

    def backward(self, dG: Tensor, block: Tensor, which: Tensor | slice) -> Tensor:
        """The gradient of what the features meet: (p, K, b, *space) -> (p, C, K)."""
        p, K = dG.shape[:2]
        dW = (dG.reshape(p * K, -1) @ block.flatten(1).mT).view(p, K, self.n_channels).mT
        if self.center is not None:
            dW = dW - torch.einsum("pk,pc->pck", dG.flatten(2).sum(-1), self.center[which])
        return dW


class Behind(nn.Module):
    """One problem behind its projection: sums over the samples, from which the loss follows.

    Args:
        layer: the format, the shapes and the law.
        task: squared errors or cross-entropy.
        eliminate: whether the output parameter and the bias are solved for. Then the sums are those of a linear system;
            else the one sum is the loss.
    """

    def __init__(self, layer: TensorRegression, task: Task, eliminate: bool) -> None:
        super().__init__()
        self.layer, self.task, self.eliminate = layer, task, eliminate

    def forward(self, G: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """The sums, in float64.

        Args:
            G: (K, n, *space).
            y: (n, M, O), or (n, outputs) where nothing is eliminated.
            weights: (n,), or (n, outputs) for squared errors where nothing is eliminated.
        """
        projected = self.layer.finish_projection(G)
        if self.eliminate:
            return self._sums_of_system(projected, y, weights)
        exact = self.layer.projected_moments(projected, block=2**62)
        return (self._squares(exact, y, weights) if self.task == "regression" else self._entropy(exact, y, weights),)

    def _sums_of_system(self, projected: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``Σ w E[z zᵀ]`` (K, K), ``Σ w E[z]`` (M, K) and ``Σ w E[z] yᵀ`` (K, O), for the features z of V."""
        root = weights.double().sqrt()
        rows = projected.double() * root.view(-1, *[1] * (projected.ndim - 1))
        mean, second = self.layer.output_features(rows, self.layer.mask_moments(rows))
        weighted = y * root[:, None, None]
        return second, torch.einsum("n,nmk->mk", root, mean), torch.einsum("nmk,nmo->ko", mean, weighted)

    def _squares(self, exact: ExactMoments, y: Tensor, weights: Tensor) -> Tensor:
        return (weights * ((exact.mean - y).square() + exact.variance)).sum().double()

    def _entropy(self, exact: ExactMoments, y: Tensor, weights: Tensor) -> Tensor:
        p = exact.mean.softmax(-1)
        spread = ((p * exact.variance).sum(-1) - exact.variance_of(p)).clamp(min=0)
        return (weights * (0.5 * spread - (y * exact.mean.log_softmax(-1)).sum(-1))).sum().double()


class ExpectedLoss:
    """``Σ_b w_b E[loss_b] + α Σ ‖factors‖²`` for P problems, as :class:`tensor_dropout.fitting.lbfgs.Problems`.

    For squared errors the output parameter and the bias are not searched: they are the solution of a linear system in
    the random features of the layer, whose matrix is ``Σ w E[z zᵀ] + α O I``.

    Args:
        layer: says the format, the shapes and the law; its parameters are not used.
        projection: the features.
        y: targets (P, n, *output_shape) or (1, n, *output_shape) for all alike, scaled, NaN where missing; class
            probabilities for classification.
        weights: (P, n), each row sums to 1; 0 for a sample that a problem does not see.
        alpha: (P,), the weight of the squared norms.
        theta: (P,), the keep probabilities; None for a layer without dropout.
        stretch: (P, r), from :class:`tensor_dropout.fitting.statistics.Axes`, or None.
        task: squared errors or cross-entropy.
        eliminate: whether to solve for the output parameter where that is possible.
    """

    def __init__(
        self,
        layer: TensorRegression,
        projection: Projection,
        y: Tensor,
        weights: Tensor,
        alpha: Tensor,
        theta: Tensor | None,
        stretch: Tensor | None,
        task: Task,
        eliminate: bool = True,
    ) -> None:
        if task == "regression" and layer.bias is None:
            raise TensorDropoutError("fit: a layer without a bias cannot hold the mean of the targets; use bias=True")
        self.projection, self.alpha = projection, alpha.double()
        self.theta = None if layer.dropout is None else theta
        self.n_outputs = math.prod(layer.output_shape)
        missing = bool(y.isnan().any())
        possible = task == "regression" and layer.output_parameter is not None and not missing
        self.eliminate = eliminate and possible
        self.behind = Behind(layer, task, self.eliminate)
        self.weights = weights
        if self.eliminate:
            self.y = y.reshape(*y.shape[:2], -1, layer.output_shape[-1]).double().expand(len(weights), -1, -1, -1)
            self.mean_y = torch.einsum("pn,pnmo->pmo", weights.double(), self.y)
            self.variance_y = torch.einsum("pn,pnmo->p", weights.double(), self.y.square())
            self.variance_y = self.variance_y - self.mean_y.square().sum((1, 2))
        else:
            self.y = y.flatten(2).nan_to_num().expand(len(weights), -1, -1)
            if task == "regression":
                known = weights[:, :, None] * ~y.flatten(2).isnan()
                self.weights = known / known.sum((1, 2), keepdim=True)
        self.first, channel_axis = layer.channel_parameter
        first = layer.get_parameter(self.first)
        self._first_shape, self._channel_axis = first.shape, channel_axis
        self.K = first.numel() // first.shape[channel_axis]
        solved = {layer.output_parameter[0], "bias"} if self.eliminate and layer.output_parameter else set()
        self.others = {
            name: parameter.shape
            for name, parameter in layer.named_parameters()
            if name != self.first and name not in solved
        }
        self._stretch_squared = None if stretch is None else stretch.square()

    # Between one long vector and the parameters.

    @property
    def n_parameters(self) -> int:
        """N, the length of a problem's vector."""
        return self.projection.size * self.K + sum(shape.numel() for shape in self.others.values())

    def pack(self, U: Tensor, others: dict[str, Tensor]) -> Tensor:
        """(P, r, K) and the other parameters (P, ...) as (P, N)."""
        return torch.cat([U.flatten(1), *(others[name].flatten(1) for name in self.others)], dim=1)

    def unpack(self, z: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The inverse of :meth:`pack`: views."""
        end = self.projection.size * self.K
        U, others = z[:, :end].view(len(z), self.projection.size, self.K), {}
        for name, shape in self.others.items():
            others[name] = z[:, end : end + shape.numel()].view(len(z), *shape)
            end += shape.numel()
        return U, others

    # What L-BFGS asks.

    def evaluate(self, z: Tensor, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :class:`tensor_dropout.fitting.lbfgs.Problems`."""
        chosen: Tensor | slice = slice(None) if which is None or len(which) == len(self.weights) else which
        U, others = self.unpack(z)
        others = {name: value.detach().requires_grad_() for name, value in others.items()}
        W = self.projection.weight(U, chosen)
        one_pass = not self.eliminate or len(self.projection.blocks) == 1
        kept: list[Tensor] = []
        if one_pass:
            value, dW, d_others = self._backward(W, others, chosen, None, kept)
        else:
            value, weights = self._value(self._sums(W, others, chosen, kept), chosen)
            _, dW, d_others = self._backward(W, others, chosen, weights, kept)
        gradient = torch.empty_like(z)
        into, others_into = self.unpack(gradient)
        into.copy_(dW if self.projection.basis is None else self.projection.basis[chosen].mT @ dW)
        penalized = [(U, into, self._penalty(chosen))]
        for name, parameter in others.items():
            others_into[name].copy_(d_others[name])
            penalized += [(parameter.detach(), others_into[name], None)] if name != "bias" else []
        alpha = self.alpha[chosen]
        for parameter, slot, penalty in penalized:
            weighed = parameter if penalty is None else penalty * parameter
            value = value + alpha * (weighed * parameter).flatten(1).sum(-1).double()
            slot += 2 * alpha.to(slot.dtype).view(-1, *[1] * (slot.ndim - 1)) * weighed
        return value, gradient

    # The objective.

    def _penalty(self, chosen: Tensor | slice) -> Tensor | None:
        """How the squared entries of U count: (p, r, 1)."""
        return None if self._stretch_squared is None else self._stretch_squared[chosen][..., None]

    def _parts(self) -> Iterator[tuple[int, Tensor, slice]]:
        """The blocks of the features with their numbers and rows."""
        start = 0
        for k in range(len(self.projection.blocks)):
            block = self.projection.blocks[k]
            yield k, block, slice(start, start + block.shape[1])
            start += block.shape[1]

    @torch.no_grad()
    def _sums(self, W: Tensor, others: dict[str, Tensor], chosen: Tensor | slice, kept: list[Tensor]) -> list[Tensor]:
        """The sums over all samples; what was made of the blocks is added to ``kept``, if it may be."""
        total: list[Tensor] = []
        for _, block, rows in self._parts():
            G = self.projection.forward(W, block, chosen)
            sums = self._run(G, others, rows, chosen)
            total = [a + b for a, b in zip(total, sums, strict=True)] if total else list(sums)
            if self.projection.kept:
                kept.append(G)
        return total

    def _backward(
        self,
        W: Tensor,
        others: dict[str, Tensor],
        chosen: Tensor | slice,
        weights: list[Tensor] | None,
        kept: list[Tensor],
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Objectives without the norms, and the gradients of W and of the other parameters.

        Args:
            W: what the features meet.
            others: the other parameters; they require gradients.
            chosen: the problems.
            weights: the derivatives by the sums, where they are known; None computes them from each block's own sums.
            kept: what the features make of the blocks, or nothing.
        """
        value, dW = torch.zeros(len(W), dtype=torch.float64, device=W.device), torch.zeros_like(W)
        d_others = {name: torch.zeros_like(parameter) for name, parameter in others.items()}
        for k, block, rows in self._parts():
            G = (kept[k] if kept else self.projection.forward(W, block, chosen)).requires_grad_()
            with torch.enable_grad():
                sums = self._run(G, others, rows, chosen)
            by_sums = weights
            if by_sums is None:
                part, by_sums = self._value([each.detach() for each in sums], chosen)
                value += part
            dG, *gradients = torch.autograd.grad(sums, [G, *others.values()], by_sums)
            dW += self.projection.backward(dG, block, chosen)
            for into, gradient in zip(d_others.values(), gradients, strict=True):
                into += gradient
            if kept:
                kept[k] = G.new_empty(0)
        return value, dW, d_others

    def _run(self, G: Tensor, others: dict[str, Tensor], rows: slice, chosen: Tensor | slice) -> tuple[Tensor, ...]:
        """The layer behind the projection, for some samples of some problems."""

        def one(G: Tensor, others: dict[str, Tensor], y: Tensor, weights: Tensor, theta: Tensor | None) -> Any:
            values = {f"layer.{name}": value for name, value in others.items()}
            if theta is not None:
                values["layer.dropout.theta"] = theta
            return functional_call(self.behind, values, (G, y, weights))

        y, weights = self.y[chosen, rows], self.weights[chosen, rows]
        theta = None if self.theta is None else self.theta[chosen]
        if len(G) == 1:
            only = {name: value[0] for name, value in others.items()}
            made = one(G[0], only, y[0], weights[0], None if theta is None else theta[0])
            return tuple(part.unsqueeze(0) for part in made)
        in_dims = (0, 0, 0, 0, None if theta is None else 0)
        return tuple(vmap(one, in_dims=in_dims)(G, others, y, weights, theta))

    def _value(self, sums: list[Tensor], chosen: Tensor | slice) -> tuple[Tensor, list[Tensor]]:
        """The loss that follows from the sums, without ``α Σ ‖·‖²`` of what is searched, and its derivatives.

        Eliminated: ``min_V (tr Vᵀ(N + αO)V - 2 tr VᵀR + Σ y²) / O`` with N and R about the mean of z, since the best
        bias takes the means away. At the minimum the derivatives are those with V held.
        """
        if not self.eliminate:
            return sums[0], [torch.ones_like(sums[0])]
        V, right = self._solve(sums, chosen)
        value = (self.variance_y[chosen] - (right * V).sum((1, 2))) / self.n_outputs
        d_second, d_right = V @ V.mT / self.n_outputs, -2 * V / self.n_outputs
        d_center = -2 * sums[1] @ d_second - self.mean_y[chosen] @ d_right.mT
        return value, [d_second, d_center, d_right]

    def _solve(self, sums: list[Tensor], chosen: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The best output parameter V (p, K, O), and R of the linear system ``(N + αO) V = R``."""
        second, center, right = sums
        normal = second - center.mT @ center
        right = right - torch.einsum("pmk,pmo->pko", center, self.mean_y[chosen])
        # α = 0 alone may leave the system singular.
        ridge = self.alpha[chosen] * self.n_outputs + 1e-12 * normal.diagonal(dim1=-2, dim2=-1).mean(-1)
        eye = torch.eye(normal.shape[-1], dtype=normal.dtype, device=normal.device)
        triangle, _ = torch.linalg.cholesky_ex(normal + ridge[:, None, None] * eye)
        return torch.cholesky_solve(right, triangle), right

    # What was found.

    @torch.no_grad()
    def parameters(self, z: Tensor) -> list[dict[str, Tensor]]:
        """The parameters of each problem, of features and targets as the projection has them; the bias too."""
        layer, axis = self.behind.layer, self._channel_axis
        U, others = self.unpack(z)
        W = self.projection.weight(U, slice(None))
        shape = [W.shape[1], *(size for n, size in enumerate(self._first_shape) if n != axis)]
        found = [{self.first: W[p].view(shape).movedim(0, axis)} for p in range(len(z))]
        for p, own in enumerate(found):
            own |= {name: value[p] for name, value in others.items()}
        if self.eliminate and layer.output_parameter is not None:
            sums = self._sums(W, others, slice(None), [])
            V, _ = self._solve(sums, slice(None))
            name, axis = layer.output_parameter
            bias = (self.mean_y - sums[1] @ V).to(z.dtype)  # the mean of the residuals is zero
            for p, own in enumerate(found):
                own[name] = V[p].movedim(1, axis).reshape(layer.get_parameter(name).shape).to(z.dtype)
                own |= {} if layer.bias is None else {"bias": bias[p].reshape(layer.output_shape)}
        return found
