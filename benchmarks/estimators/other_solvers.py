"""What the solvers are compared on, the watch that times them, and the solvers that the product does not use.

Gauss-Newton and alternating least squares are written for CP on channels × height × width; PyTorch's L-BFGS takes any
layer. Whoever solves calls :meth:`Watch.note` at every point that it reaches, until that raises :class:`BudgetSpent`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import tensor_dropout as td
from tensor_dropout.fitting.fit import fill
from tensor_dropout.fitting.objective import Projection
from tensor_dropout.fitting.statistics import Axes, Scale, principal_axes, to_axes
from tensor_dropout.layers.regression import TensorRegression

MARKS = 1.2
"""Each mark of time, at which the test error is taken, is so many times the last."""
TORCH_HISTORY = 20


class BudgetSpent(Exception):  # noqa: N818 (ends a solver, and is no error)
    """The solver's time is over."""


@dataclass(frozen=True)
class Problem:
    """One head on one data set, all standardized: what every solver minimizes.

    Attributes:
        make: an empty layer of the head.
        x: (n, C, *space).
        y: (n, O).
        x_test: images of other groups.
        y_test: their targets, on the scale of y.
        alpha: the weight of the squared norms.
        seed: of the start.
    """

    make: Callable[[], TensorRegression]
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    alpha: float
    seed: int = 0

    @cached_property
    def scale(self) -> Scale:
        """That of features that are standardized already."""
        C = self.x.shape[1]
        return Scale(self.x.new_zeros(C), self.x.new_ones(C))

    @property
    def weights(self) -> Tensor:
        """Equal ones, (n,)."""
        return self.x.new_full((len(self.x),), 1 / len(self.x))

    def draw(self) -> TensorRegression:
        """A layer at the start of all solvers."""
        layer = self.make()
        layer.init = "normal"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            layer.reset_parameters()
        return layer

    def objective(self, layer: TensorRegression) -> Tensor:
        """``E[loss] + α Σ ‖factors‖²`` of a filled layer, by the library's own layer and loss."""
        norms = sum(p.square().sum() for name, p in layer.named_parameters() if name != "bias")
        return td.expected_mse(layer, self.x, self.y) + self.alpha * norms

    @torch.no_grad()
    def test_error(self, layer: TensorRegression) -> float:
        """Mean squared error of the mean output on the held-out images."""
        return float((layer.eval()(self.x_test) - self.y_test).square().mean())

    def turn(self, turned: bool) -> tuple[list[Tensor], Axes | None]:
        """The features as the product's solver takes them, in blocks, on their principal axes or as they are."""
        flat = self.x.flatten(2)
        axes = principal_axes(flat, self.scale, self.weights) if turned else None
        return [block.unflatten(2, self.x.shape[2:]) for block in to_axes(flat, self.scale, axes)], axes

    def fill(self, layer: TensorRegression, found: dict[str, Tensor], axes: Axes | None) -> None:
        """Write parameters of turned features into a layer that takes the standardized ones."""
        fill(layer, found, self.scale, axes, None)


class CountingProjection(Projection):
    """Counts the products with all features."""

    calls = 0

    @property
    def products(self) -> int:
        return self.calls // len(self.blocks)

    def forward(self, W: Tensor, block: Tensor, which: Tensor | slice) -> Tensor:
        self.calls += 1
        return super().forward(W, block, which)

    def backward(self, dG: Tensor, block: Tensor, which: Tensor | slice) -> Tensor:
        self.calls += 1
        return super().backward(dG, block, which)


@dataclass
class Watch:
    """Times a solver, and takes the test error at marks of time; what it does itself is not timed.

    Attributes:
        problem: what is solved.
        seconds: the budget.
        steps: the most points that the solver may note.
        points: (seconds, products, steps, objective) wherever the objective was the best so far.
        marks: the same with the test error, as records.
    """

    problem: Problem
    seconds: float
    steps: int = sys.maxsize
    points: list[tuple[float, int, int, float]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)

    def run(self, solve: Callable[[Problem, Watch], None]) -> None:
        """Let it solve until it ends or the time is over; ``layer`` is then the best found."""
        self.layer = self.problem.make()
        self._steps, self._next, self._paused = 0, 0.0, 0.0
        self._write: Callable[[TensorRegression], None] | None = None
        self._began = time.perf_counter()
        with contextlib.suppress(BudgetSpent):
            solve(self.problem, self)
        if not self.marks or self.marks[-1]["objective"] > self.points[-1][3]:
            self._mark()

    def note(self, objective: float, products: int, write: Callable[[TensorRegression], None]) -> None:
        """Say where the solver is.

        Args:
            objective: there.
            products: how many products with the features were made so far.
            write: fills a layer with the parameters of this point, also later.

        Raises:
            BudgetSpent: if the budget is spent.
        """
        entered = time.perf_counter()
        now = entered - self._began - self._paused
        self._steps += 1
        if not self.points or objective < self.points[-1][3]:
            self.points.append((now, products, self._steps, objective))
            self._write = write
            if now >= self._next:
                self._mark()
                self._next = MARKS * now
        if now > self.seconds or self._steps >= self.steps:
            raise BudgetSpent
        self._paused += time.perf_counter() - entered

    @torch.no_grad()
    def _mark(self) -> None:
        assert self._write is not None, "the solver noted nothing"
        self._write(self.layer)
        seconds, products, steps, objective = self.points[-1]
        self.marks.append(
            {
                "seconds": seconds,
                "products": products,
                "steps": steps,
                "objective": objective,
                "test_error": self.problem.test_error(self.layer),
            }
        )


def solve_by_torch(problem: Problem, watch: Watch) -> None:
    """``torch.optim.LBFGS`` on all parameters of the layer; two products in each of its evaluations."""
    layer = problem.draw()
    optimizer = torch.optim.LBFGS(
        layer.parameters(),
        max_iter=10**9,
        max_eval=10**9,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        history_size=TORCH_HISTORY,
        line_search_fn="strong_wolfe",
    )
    evaluations = 0

    def evaluate() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        objective = problem.objective(layer)
        objective.backward()
        state = {name: value.detach().clone() for name, value in layer.state_dict().items()}
        watch.note(float(objective.detach()), 2 * evaluations, lambda filled: filled.load_state_dict(state))
        return objective

    optimizer.step(evaluate)


class CPProblem:
    """CP on turned features, with the output factor and the bias in closed form: what the two solvers below share.

    The factors are U (r, R), A (H, R), B (W, R) and V (O, R). G (R, n, H, W) is what U makes of the features, a (n, R)
    what A and B make of G: the mean output is ``a Vᵀ`` and the variance over masks ``τ Σ_r a_r² v_r²``.
    """

    def __init__(self, problem: Problem, watch: Watch) -> None:
        self.problem, self.watch = problem, watch
        blocks, self.axes = problem.turn(True)
        assert self.axes is not None
        self.x, self.products = torch.cat(blocks, dim=1), 0
        layer = problem.draw()
        theta = 1.0 if layer.dropout is None else float(layer.dropout.theta)
        self.tau = (1 - theta) / theta
        self.alpha, self.penalty = problem.alpha, self.axes.stretch.square()[:, None]
        self.y_mean = problem.y.mean(0)
        self.y = problem.y - self.y_mean
        self.share = 2 / self.y.numel()
        U, *self.start = (factor.detach() for factor in layer.factors)
        self.start = [(self.axes.basis.mT @ U) / self.penalty, *self.start]

    def project(self, U: Tensor) -> Tensor:
        """G, by one product with the features."""
        self.products += 1
        return (U.mT @ self.x.flatten(1)).view(-1, *self.x.shape[1:])

    def pull_back(self, d_rows: Tensor, columns: Tensor) -> Tensor:
        """The gradient of U from that of a, by one product with the features."""
        self.products += 1
        return self.x.flatten(1) @ (d_rows.mT[:, :, None] * columns.mT[:, None]).flatten(1).mT

    def best_output(self, rows: Tensor) -> Tensor:
        """V that is the best one for a: one linear system."""
        a = rows.double()
        centred = a - a.mean(0)
        normal = centred.mT @ centred + torch.diag(self.tau * a.square().sum(0) + 2 * self.alpha / self.share)
        return torch.linalg.solve(normal, centred.mT @ self.y.double()).mT.to(rows.dtype)

    def residual(self, rows: Tensor, V: Tensor) -> Tensor:
        """Mean output minus targets, with the best bias."""
        return (rows - rows.mean(0)) @ V.mT - self.y

    def data_loss(self, rows: Tensor, V: Tensor) -> float:
        """The expected loss without the squared norms."""
        spread = self.tau * (rows.square().sum(0) * V.square().sum(0)).sum()
        return 0.5 * self.share * float(self.residual(rows, V).square().sum() + spread)

    def norms(self, factors: list[Tensor]) -> float:
        """``Σ ‖factors‖²``, of the standardized channels."""
        return float((self.penalty * factors[0].square()).sum() + sum(factor.square().sum() for factor in factors[1:]))

    def row_gradient(self, rows: Tensor, V: Tensor) -> Tensor:
        """The gradient of a, (n, R)."""
        return self.share * (self.residual(rows, V) @ V + self.tau * rows * V.square().sum(0))

    def note(self, rows: Tensor, factors: list[Tensor]) -> float:
        """Tell the watch; returns the objective."""
        objective = self.data_loss(rows, factors[3]) + self.alpha * self.norms(factors)

        def write(layer: TensorRegression) -> None:
            found = {f"factors.{mode}": factor for mode, factor in enumerate(factors)}
            found["bias"] = self.y_mean - rows.mean(0) @ factors[3].mT
            self.problem.fill(layer, found, self.axes)

        self.watch.note(objective, self.products, write)
        return objective


def khatri_rao(A: Tensor, B: Tensor) -> Tensor:
    """(H, R) and (W, R) -> (H·W, R)."""
    return (A[:, None] * B).flatten(0, 1)


def meet(G: Tensor, columns: Tensor) -> Tensor:
    """The maps G (R, n, H, W) with columns (H·W, R): (n, R)."""
    return torch.bmm(G.flatten(2), columns.mT.unsqueeze(-1)).squeeze(-1).mT


def conjugate_gradients(
    apply: Callable[[list[Tensor]], tuple[list[Tensor], Tensor]],
    right: list[Tensor],
    precondition: Callable[[list[Tensor]], list[Tensor]],
    *,
    tol: float,
    max_iter: int,
) -> tuple[list[Tensor], Tensor]:
    """Solve ``H d = right``.

    Args:
        apply: gives H q, and something linear in q that is wanted for d as well.
        right: the right-hand side.
        precondition: about the inverse of H.
        tol: the share that is left of the residual.
        max_iter: the most iterations.

    Returns:
        d, and the linear thing for it.
    """
    d, r = [torch.zeros_like(part) for part in right], right
    image: Tensor | None = None
    q = z = precondition(r)
    start = left = inner(r, z)
    for _ in range(max_iter):
        Hq, image_q = apply(q)
        step = left / inner(q, Hq)
        d, r = add(d, step, q), add(r, -step, Hq)
        image = step * image_q if image is None else image.add_(image_q, alpha=step)
        z = precondition(r)
        before, left = left, inner(r, z)
        if left <= tol**2 * start:
            break
        q = add(z, left / before, q)
    assert image is not None
    return d, image


def inner(left: list[Tensor], right: list[Tensor]) -> float:
    """The inner product of two lists of tensors."""
    return float(sum((a * b).sum() for a, b in zip(left, right, strict=True)))


def add(left: list[Tensor], step: float, right: list[Tensor]) -> list[Tensor]:
    """``left + step · right``."""
    return [a + step * b for a, b in zip(left, right, strict=True)]


class GaussNewton:
    """Gauss-Newton on all four factors, each step by preconditioned conjugate gradients, with Levenberg's damping.

    The residuals are those of the mean and, for the masks, ``√τ a_r v_or``. The output factor is solved for after each
    step. Along a step a is a cubic in its length, so lengths are tried without touching the maps.
    """

    TOL, MAX_CG = 0.3, 10
    LENGTHS = (0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.3)
    DAMPING = 1e-2

    def __init__(self, problem: Problem, watch: Watch) -> None:
        self.cp, self.damping = CPProblem(problem, watch), self.DAMPING
        self.mean_square = self.cp.x.flatten(1).square().mean(1)

    def solve(self) -> None:
        """Step until the time is over, or no length of the most cautious step helps."""
        cp, factors = self.cp, self.cp.start
        G = cp.project(factors[0])
        rows = meet(G, khatri_rao(*factors[1:3]))
        while self.damping < 1e6:
            factors = [*factors[:3], cp.best_output(rows)]
            objective = cp.note(rows, factors)
            d, DG = self.direction(G, rows, factors)
            length, rows_there = self.search(G, DG, factors, d, objective)
            if length == 0.0:
                self.damping = max(4 * self.damping, 1e-4)
                continue
            self.damping *= 3.0 if length < 0.5 else 1 / 3 if length >= 0.7 else 1.0
            factors, G, rows = add(factors, length, d), G.add_(DG, alpha=length), rows_there

    def direction(self, G: Tensor, rows: Tensor, factors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The step, and what its first factor makes of the features."""
        cp, (_, A, B, V) = self.cp, factors
        columns = khatri_rao(A, B)
        over_width = torch.einsum("rnhw,wr->rnh", G, B)
        over_height = torch.einsum("rnhw,hr->rnw", G, A)
        v2, a2 = V.square().sum(0), rows.square().sum(0)
        pull = [(2 * cp.alpha + self.damping) * weight for weight in (cp.penalty, 1.0, 1.0, 1.0)]

        def gather(d_rows: Tensor, dV: Tensor) -> list[Tensor]:
            dA, dB = (torch.einsum("rns,nr->sr", map_, d_rows) for map_ in (over_width, over_height))
            return [cp.pull_back(d_rows, columns), dA, dB, dV]

        def apply(q: list[Tensor]) -> tuple[list[Tensor], Tensor]:
            DG = cp.project(q[0])
            da = meet(DG, columns)
            da = da + torch.einsum("rnh,hr->nr", over_width, q[1]) + torch.einsum("rnw,wr->nr", over_height, q[2])
            E = da @ V.mT + rows @ q[3].mT
            E = E - E.mean(0)
            d_rows = cp.share * (E @ V + cp.tau * (da * v2 + rows * (V * q[3]).sum(0)))
            dV = cp.share * (E.mT @ rows + cp.tau * (q[3] * a2 + V * (rows * da).sum(0)))
            return [h + weight * part for h, weight, part in zip(gather(d_rows, dV), pull, q, strict=True)], DG

        E = cp.residual(rows, V)
        gradient = gather(cp.row_gradient(rows, V), cp.share * (E.mT @ rows + cp.tau * V * a2))
        weights = (cp.penalty, 1.0, 1.0, 1.0)
        gradient = [g + 2 * cp.alpha * w * part for g, w, part in zip(gradient, weights, factors, strict=True)]
        inverses = self.diagonal(factors, over_width, over_height, a2, pull)
        return conjugate_gradients(
            apply,
            [-g for g in gradient],
            lambda r: [inverse * part for inverse, part in zip(inverses, r, strict=True)],
            tol=self.TOL,
            max_iter=self.MAX_CG,
        )

    def diagonal(
        self, factors: list[Tensor], over_width: Tensor, over_height: Tensor, a2: Tensor, pull: list[Any]
    ) -> list[Tensor]:
        """The inverse of about the diagonal of H; exact but for U, whose positions are taken as uncorrelated."""
        cp, (_, A, B, V) = self.cp, factors
        v2, k = V.square().sum(0), self.cp.share * (1 + self.cp.tau)
        of_U = k * len(cp.y) * self.mean_square[:, None] * A.square().sum(0) * B.square().sum(0) * v2
        of_A, of_B = (k * map_.square().sum(1).mT * v2 for map_ in (over_width, over_height))
        of_V = (k * a2).expand_as(V)
        return [1 / (part + weight) for part, weight in zip((of_U, of_A, of_B, of_V), pull, strict=True)]

    def search(
        self, G: Tensor, DG: Tensor, factors: list[Tensor], d: list[Tensor], objective: float
    ) -> tuple[float, Tensor]:
        """The best of some lengths, 0 if none helps; and a there."""
        cp, (_, A, B, V), (_, dA, dB, dV) = self.cp, factors, d
        columns = torch.stack([khatri_rao(A, B), khatri_rao(dA, B) + khatri_rao(A, dB), khatri_rao(dA, dB)], -1)
        ours, theirs = (torch.bmm(maps.flatten(2), columns.movedim(1, 0)).movedim(0, 1).unbind(-1) for maps in (G, DG))
        cubic = [ours[0], ours[1] + theirs[0], ours[2] + theirs[1], theirs[2]]
        best = (objective, 0.0, ours[0])
        for t in self.LENGTHS:
            rows = cubic[0] + t * (cubic[1] + t * (cubic[2] + t * cubic[3]))
            value = cp.data_loss(rows, V + t * dV) + cp.alpha * cp.norms(add(factors, t, d))
            best = min(best, (value, t, rows), key=lambda tried: tried[0])
        return best[1], best[2]


class AlternatingLeastSquares:
    """One factor after the other, with the others held: V, A and B exactly, U by conjugate gradients.

    After each sweep the columns of each term are made equally long, which lowers the norms and leaves the rest.
    """

    TOL, MAX_CG = 0.3, 5

    def __init__(self, problem: Problem, watch: Watch) -> None:
        self.cp = CPProblem(problem, watch)
        self.mean_square = self.cp.x.flatten(1).square().mean(1)

    def solve(self) -> None:
        """Sweep until the time is over."""
        cp, (U, A, B, _) = self.cp, self.cp.start
        G = cp.project(U)
        while True:
            V = cp.best_output(meet(G, khatri_rao(A, B)))
            A = self.solve_space(torch.einsum("rnhw,wr->rnh", G, B), V)
            V = cp.best_output(meet(G, khatri_rao(A, B)))
            B = self.solve_space(torch.einsum("rnhw,hr->rnw", G, A), V)
            rows = meet(G, khatri_rao(A, B))
            V = cp.best_output(rows)
            cp.note(rows, [U, A, B, V])
            scales = self.balance([U, A, B, V])
            U, A, B, V = (factor * scale for factor, scale in zip((U, A, B, V), scales, strict=True))
            G *= scales[0][:, None, None, None]
            dU, DG = self.step_channels(meet(G, khatri_rao(A, B)), [U, A, B, V])
            U, G = U + dU, G.add_(DG)
            cp.note(meet(G, khatri_rao(A, B)), [U, A, B, V])

    def solve_space(self, maps: Tensor, V: Tensor) -> Tensor:
        """The best factor (S, R) of one spatial mode, from the maps (R, n, S) without it."""
        cp, (R, n, S) = self.cp, maps.shape
        maps = maps.double()
        rows = maps.movedim(1, 0).reshape(n, R * S)
        rows, V = rows - rows.mean(0), V.double()
        normal = (rows.mT @ rows).view(R, S, R, S) * (V.mT @ V)[:, None, :, None]
        own = cp.tau * (maps.mT @ maps) * V.square().sum(0)[:, None, None]
        normal.diagonal(dim1=0, dim2=2).add_(own.movedim(0, -1))
        normal = normal.reshape(R * S, R * S)
        normal.diagonal().add_(2 * cp.alpha / cp.share)
        right = torch.einsum("nrs,nr->rs", rows.view(n, R, S), cp.y.double() @ V).reshape(-1, 1)
        found = torch.cholesky_solve(right, torch.linalg.cholesky(normal))
        return found.view(R, S).mT.to(cp.y.dtype).contiguous()

    def balance(self, factors: list[Tensor]) -> list[Tensor]:
        """What each column is to be multiplied by."""
        weights = (self.cp.penalty, 1.0, 1.0, 1.0)
        lengths = torch.stack([(w * f.square()).sum(0).sqrt() for w, f in zip(weights, factors, strict=True)])
        lengths = lengths.clamp(min=1e-12)
        return list(lengths.log().mean(0).exp() / lengths)

    def step_channels(self, rows: Tensor, factors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Towards the best U, and what the step makes of the features."""
        cp, (U, A, B, V) = self.cp, factors
        columns, v2 = khatri_rao(A, B), V.square().sum(0)
        k = cp.share * (1 + cp.tau) * len(cp.y)
        of_U = k * self.mean_square[:, None] * A.square().sum(0) * B.square().sum(0) * v2
        inverse = 1 / (of_U + 2 * cp.alpha * cp.penalty)

        def apply(q: list[Tensor]) -> tuple[list[Tensor], Tensor]:
            DG = cp.project(q[0])
            da = meet(DG, columns)
            E = (da - da.mean(0)) @ V.mT
            d_rows = cp.share * (E @ V + cp.tau * da * v2)
            return [cp.pull_back(d_rows, columns) + 2 * cp.alpha * cp.penalty * q[0]], DG

        gradient = cp.pull_back(cp.row_gradient(rows, V), columns) + 2 * cp.alpha * cp.penalty * U
        (dU,), DG = conjugate_gradients(
            apply, [-gradient], lambda r: [inverse * r[0]], tol=self.TOL, max_iter=self.MAX_CG
        )
        return dU, DG


def solve_by_gauss_newton(problem: Problem, watch: Watch) -> None:
    """See :class:`GaussNewton`."""
    GaussNewton(problem, watch).solve()


def solve_by_alternating(problem: Problem, watch: Watch) -> None:
    """See :class:`AlternatingLeastSquares`."""
    AlternatingLeastSquares(problem, watch).solve()
