"""The expected loss as L-BFGS sees it: many problems on the same features, with the output parameter solved for.

Only two products are as large as the features: what the channels' parameter makes of them, and its gradient. Everything
behind it works on the projected features, which are smaller by the ratio of rank to channels. So a line is prepared by
one product, each step length is tried without another, and the gradient takes the second.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.moments import ExactMoments
from tensor_dropout.layers.regression import TensorRegression

Task = Literal["regression", "classification"]


class Projection:
    """Features that meet the channels' parameter of P problems at once.

    Args:
        x: (C, n, *space), channels first of all.
        basis: (P, C, r): what each problem's parameter is multiplied by first; None for the identity.
        center: (P, C): what each problem subtracts from the features; None for nothing.
    """

    def __init__(self, x: Tensor, basis: Tensor | None = None, center: Tensor | None = None) -> None:
        self.x, self.shape = x.flatten(1), x.shape
        self.basis, self.center = basis, center

    @property
    def size(self) -> int:
        """How many coordinates the parameter has."""
        return self.shape[0] if self.basis is None else self.basis.shape[-1]

    def forward(self, U: Tensor) -> Tensor:
        """(P, r, K) -> (P, K, n, *space)."""
        W = U if self.basis is None else self.basis @ U
        G = (W.mT.reshape(len(W) * W.shape[2], self.shape[0]) @ self.x).view(*W.shape[::2], *self.shape[1:])
        if self.center is not None:
            shift = torch.einsum("pck,pc->pk", W, self.center)
            G -= shift.view(*shift.shape, *[1] * (G.ndim - 2))
        return G

    def backward(self, dG: Tensor) -> Tensor:
        """The gradient: (P, K, n, *space) -> (P, r, K)."""
        P, K = dG.shape[:2]
        dW = (dG.reshape(P * K, -1) @ self.x.mT).view(P, K, self.shape[0]).mT
        if self.center is not None:
            dW = dW - torch.einsum("pk,pc->pck", dG.flatten(2).sum(-1), self.center)
        return dW if self.basis is None else self.basis.mT @ dW


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
        self.V: Tensor | None = None
        """The output parameters of the problems, (P, K, O), at the point that was seen last."""
        self._D: Tensor | None = None
        self._here: tuple[Tensor, Tensor] | None = None
        self._there: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

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

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`tensor_dropout.fitting.lbfgs.Problems`."""
        G = self.projection.forward(self.unpack(z)[0])
        f, dG, d_others = self._behind_projection(G, z)
        self._here = (z.clone(), G)
        return f, self._gradient(z, dG, d_others)

    def aim(self, direction: Tensor) -> None:
        """See :class:`tensor_dropout.fitting.lbfgs.Problems`."""
        self._direction = direction
        self._D = self.projection.forward(self.unpack(direction)[0])

    def try_step(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`tensor_dropout.fitting.lbfgs.Problems`."""
        assert self._here is not None
        assert self._D is not None
        (z, G), D = self._here, self._D
        step = t.to(z.dtype)
        there = torch.addcmul(z, step[:, None], self._direction)
        moved = torch.addcmul(G, step.view(-1, *[1] * (G.ndim - 1)), D)
        f, dG, d_others = self._behind_projection(moved, there)
        slope = torch.einsum("pk,pk->p", dG.flatten(1), D.flatten(1)).double()
        toward, toward_others = self.unpack(self._direction)
        slope += 2 * self.alpha * (self._weigh(self.unpack(there)[0]) * toward).flatten(1).sum(-1).double()
        for name, gradient in d_others.items():
            slope += (gradient * toward_others[name]).flatten(1).sum(-1).double()
        self._there = (there, moved, dG, self._flat(d_others, z))
        return f, slope

    def take_step(self, t: Tensor) -> Tensor:
        """See :class:`tensor_dropout.fitting.lbfgs.Problems`."""
        assert self._there is not None
        z, G, dG, d_others = self._there
        self._here = (z, G)
        return self._gradient(z, dG, d_others)

    # The objective.

    def _behind_projection(self, G: Tensor, z: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Objectives, and the gradients of G and of the other parameters."""
        G = G.detach().requires_grad_()
        U, others = self.unpack(z)
        others = {name: value.detach().requires_grad_() for name, value in others.items()}
        with torch.enable_grad():
            sums = self._run(G, others)
        value, weights = self._value([part.detach() for part in sums])
        gradients = torch.autograd.grad(sums, [G, *others.values()], weights)
        norms = (self._weigh(U) * U).flatten(1).sum(-1).double()
        d_others = {}
        for (name, value_of), gradient in zip(others.items(), gradients[1:], strict=True):
            penalized = name != "bias"
            if penalized:
                norms = norms + value_of.detach().square().flatten(1).sum(-1).double()
                gradient = gradient + 2 * self._alpha_like(value_of) * value_of.detach()
            d_others[name] = gradient
        return value + self.alpha * norms, gradients[0], d_others

    def _run(self, G: Tensor, others: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The layer behind the projection, for every problem."""

        def one(G: Tensor, others: dict[str, Tensor], y: Tensor, weights: Tensor, theta: Tensor | None) -> Any:
            values = {f"layer.{name}": value for name, value in others.items()}
            if theta is not None:
                values["layer.dropout.theta"] = theta
            return functional_call(self.behind, values, (G, y, weights))

        if len(G) == 1:
            only = {name: value[0] for name, value in others.items()}
            made = one(G[0], only, self.y[0], self.weights[0], None if self.theta is None else self.theta[0])
            return tuple(part.unsqueeze(0) for part in made)
        theta_axis = None if self.theta is None else 0
        return tuple(vmap(one, in_dims=(0, 0, 0, 0, theta_axis))(G, others, self.y, self.weights, self.theta))

    def _value(self, sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The loss that follows from the sums, without ``α Σ ‖·‖²`` of what is searched, and its derivatives.

        Eliminated: ``min_V (tr Vᵀ(N + αO)V - 2 tr VᵀR + Σ y²) / O`` with N and R about the mean of z, since the best
        bias takes the means away. At the minimum the derivatives are those with V held.
        """
        if not self.eliminate:
            return sums[0], [torch.ones_like(sums[0])]
        second, center, right = sums
        normal = second - center.mT @ center
        right = right - torch.einsum("pmk,pmo->pko", center, self.mean_y)
        # α = 0 alone may leave the system singular.
        ridge = self.alpha * self.n_outputs + 1e-12 * normal.diagonal(dim1=-2, dim2=-1).mean(-1)
        eye = torch.eye(normal.shape[-1], dtype=normal.dtype, device=normal.device)
        triangle, _ = torch.linalg.cholesky_ex(normal + ridge[:, None, None] * eye)
        V = self.V = torch.cholesky_solve(right, triangle)
        value = (self.variance_y - (right * V).sum((1, 2))) / self.n_outputs
        d_second, d_right = V @ V.mT / self.n_outputs, -2 * V / self.n_outputs
        d_center = -2 * center @ d_second - self.mean_y @ d_right.mT
        return value, [d_second, d_center, d_right]

    def _weigh(self, U: Tensor) -> Tensor:
        """U as its squared norm counts it: half the derivative of that norm."""
        return U if self._stretch_squared is None else U * self._stretch_squared[..., None]

    def _gradient(self, z: Tensor, dG: Tensor, d_others: dict[str, Tensor] | Tensor) -> Tensor:
        U, _ = self.unpack(z)
        dU = self.projection.backward(dG) + 2 * self._alpha_like(U) * self._weigh(U)
        flat = d_others if isinstance(d_others, Tensor) else self._flat(d_others, z)
        return torch.cat([dU.flatten(1), flat], dim=1)

    def _flat(self, d_others: dict[str, Tensor], like: Tensor) -> Tensor:
        parts = [d_others[name].flatten(1) for name in self.others]
        return torch.cat(parts, dim=1) if parts else like.new_zeros(len(like), 0)

    def _alpha_like(self, value: Tensor) -> Tensor:
        return self.alpha.to(value.dtype).view(-1, *[1] * (value.ndim - 1))

    # What was found.

    @torch.no_grad()
    def parameters(self, z: Tensor) -> list[dict[str, Tensor]]:
        """The parameters of each problem, of features and targets as the projection has them; the bias too."""
        layer, axis = self.behind.layer, self._channel_axis
        U, others = self.unpack(z)
        W = U if self.projection.basis is None else self.projection.basis @ U
        shape = [W.shape[1], *(size for n, size in enumerate(self._first_shape) if n != axis)]
        found = [{self.first: W[p].view(shape).movedim(0, axis)} for p in range(len(z))]
        for p, own in enumerate(found):
            own |= {name: value[p] for name, value in others.items()}
        if self.eliminate and layer.output_parameter is not None:
            _, center, _ = sums = self._run(self.projection.forward(U), others)
            self._value(list(sums))
            assert self.V is not None
            name, axis = layer.output_parameter
            bias = (self.mean_y - center @ self.V).to(z.dtype)  # the mean of the residuals is zero
            for p, own in enumerate(found):
                own[name] = self.V[p].movedim(1, axis).reshape(layer.get_parameter(name).shape).to(z.dtype)
                own |= {} if layer.bias is None else {"bias": bias[p].reshape(layer.output_shape)}
        return found
