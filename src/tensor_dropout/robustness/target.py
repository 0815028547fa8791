"""What is attacked: a network with its input bounds, its preparation, its task and its way to predict.

Attacks see a function with a gradient. Everything random lives here: a target averages over draws, so that no attack
needs to know of it (expectation over transformation; Athalye, Carlini, Wagner, 2018).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.outcome_arrays import Task
from tensor_dropout.prediction import at_test, evaluating, predict
from tensor_dropout.robustness.answers import Ascent, Nature, Predicted, average, log_average
from tensor_dropout.robustness.audit import VANISHING
from tensor_dropout.robustness.losses import Loss
from tensor_dropout.robustness.randomness import (
    draw_heads,
    draws_masks,
    dropping,
    is_random_in_its_head_only,
)

Mode = Literal["mean", "sample", "exact"]


PASSES = 16
"""Passes of a few examples that are compared, where only that shows whether a network is random."""


class Target:
    """A network as an attacker, or a source of noise, meets it.

    Its parameters, modes and settings are as before after every call; while a call runs, the network is in ``eval``
    mode and its parameters need no gradient.

    Args:
        model: maps prepared inputs (B, C, *size) to logits or numbers; several models are an ensemble, whose
            probabilities or outputs are averaged.
        bounds: the smallest and largest value that an input can have; ``(-inf, inf)`` for none.
        prepare: from inputs within the bounds to what the model takes, e.g. a normalisation; differentiable.
        task: "classification" or "regression".
        mode: "mean", the network as it is in ``eval``: with the mean weight, unless it was built with
            ``at_test="sample"``; then every answer is one draw, and the audit says so. "sample", with tensor dropout,
            and ``nn.Dropout``, drawn anew and averaged (Monte-Carlo dropout). "exact": of a regression the exact mean
            and std, with nothing random; of classes the softmax averaged over draws of the last layer alone, which is
            random, and attacked as such.
        n_samples: draws of a prediction; None: 32, or 1 for the mode "mean".
        eot_samples: draws behind a gradient; None: as many as for a prediction, 1 where that is exact.
        batch: examples that pass through the network at once.

    Attributes:
        exhaustive: attacks go on with examples that are fooled already: what fools one network only just rarely fools
            another.

    Raises:
        TensorDropoutError: if a setting is none of these.

    Example:
        >>> import tensor_dropout as td
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), td.CPRegression((4, 6, 6), 10, rank=5, dropout=0.8))
        >>> target = Target(net, bounds=(0, 1), prepare=lambda x: (x - 0.5) / 0.25)
        >>> x = torch.rand(2, 1, 8, 8)
        >>> target.predict(x).output.shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        bounds: tuple[float, float] = (0.0, 1.0),
        prepare: Callable[[Tensor], Tensor] | None = None,
        task: Task = "classification",
        mode: Mode = "mean",
        n_samples: int | None = None,
        eot_samples: int | None = None,
        batch: int = 256,
    ) -> None:
        self.members = [model] if not isinstance(model, Sequence) else list(model)
        if not self.members or any(not isinstance(member, nn.Module) for member in self.members):
            raise TensorDropoutError(f"target: a module, or a list of modules, is expected, got {type(model).__name__}")
        if len(bounds) != 2 or not bounds[0] < bounds[1]:
            raise TensorDropoutError(f"target: bounds are (smallest, largest), got {bounds}")
        if task not in ("classification", "regression"):
            raise TensorDropoutError(f"target: task is 'classification' or 'regression', got {task!r}")
        if mode not in ("mean", "sample", "exact"):
            raise TensorDropoutError(f"target: mode is 'mean', 'sample' or 'exact', got {mode!r}")
        n_samples = n_samples if n_samples is not None else 1 if mode == "mean" else 32
        self._sampling = mode == "sample" or (mode == "exact" and task == "classification")
        eot_samples = eot_samples if eot_samples is not None else n_samples if self._sampling else 1
        for name, count in (("n_samples", n_samples), ("eot_samples", eot_samples), ("batch", batch)):
            if type(count) is not int or count < 1:
                raise TensorDropoutError(f"target: {name} is a whole number of at least 1, got {count!r}")
        self.bounds = (float(bounds[0]), float(bounds[1]))
        self.prepare = prepare if prepare is not None else nn.Identity()
        self.task: Task = task
        self.mode: Mode = mode
        self.n_samples, self.eot_samples, self.batch = n_samples, eot_samples, batch
        self.exhaustive = False
        self._randomized: bool | None = None
        self._outputs: int | None = None
        self._warned = False
        in_heads = mode == "exact" or all(is_random_in_its_head_only(member) for member in self.members)
        self._heads_only = self._sampling and in_heads

    def clip(self, x: Tensor) -> Tensor:
        """The inputs, brought back within the bounds."""
        return x.clamp(*self.bounds)

    def ascend(self, x: Tensor, y: Tensor, loss: Loss, goal: Tensor | None = None) -> Ascent:
        """The loss of every example, its gradient with respect to the input, and the scores, over ``eot_samples``.

        Inside ``torch.inference_mode`` and ``torch.no_grad`` too. A network that cuts its input from the graph has a
        gradient of zeros: attacks that follow it do nothing, and a warning says so, once per target.

        Raises:
            TensorDropoutError: if the network returns a number that is not finite, or has tensors that were made inside
                ``torch.inference_mode``.
        """
        found, reached = self._climb(x, y, loss, goal)
        if not reached and not self._warned:
            self._warned = True
            warnings.warn(
                f"target: no gradient comes back from {type(self.members[0]).__name__} or its preparation, so attacks "
                "by gradient do nothing, which is not robustness; make them differentiable, or use Square or Transfer",
                stacklevel=2,
            )
        return found

    def _climb(self, x: Tensor, y: Tensor, loss: Loss, goal: Tensor | None) -> tuple[Ascent, bool]:
        """The ascent, and whether autograd reached the input."""
        with self._settled():
            found = [self._ascend(*rows, loss) for rows in self._split(x, y, goal)]
        parts = [ascent for ascent, _ in found]
        return Ascent(*(torch.cat(tensors) for tensors in zip(*parts, strict=True))), all(ok for _, ok in found)

    def _ascend(self, x: Tensor, y: Tensor, goal: Tensor | None, loss: Loss) -> tuple[Ascent, bool]:
        with _differentiating():  # copies: autograd refuses tensors that were made in inference mode
            z, y = x.detach().clone().requires_grad_(), y.clone()
            goal = None if goal is None else goal.clone()
            draws = self._draw(z, self.eot_samples)
            values = torch.stack([loss(outputs, y, goal) for outputs in draws]).mean(0)
            gradient = None
            if values.requires_grad:
                (gradient,) = torch.autograd.grad(values.sum(), z, allow_unused=True)
        reached = gradient is not None
        gradient = torch.zeros_like(x) if gradient is None else gradient.nan_to_num(0.0, 0.0, 0.0)
        return Ascent(values.detach(), gradient, self._score(draws.detach())), reached

    @torch.no_grad()
    def score(self, x: Tensor, y: Tensor, loss: Loss, goal: Tensor | None = None) -> Ascent:
        """As :meth:`ascend`, without the gradient (zeros): for attacks that use none."""
        with self._settled():
            parts = []
            for part, labels, goals in self._split(x, y, goal):
                draws = self._draw(part, self.eot_samples)
                values = torch.stack([loss(outputs, labels, goals) for outputs in draws]).mean(0)
                parts.append(Ascent(values, part.new_zeros(()).expand(part.shape), self._score(draws)))
        return Ascent(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    @torch.no_grad()
    def predict(self, x: Tensor) -> Predicted:
        """What the target says, over ``n_samples`` draws.

        Raises:
            TensorDropoutError: if the network returns a number that is not finite.
        """
        predict_part = self._predict_exact if self.mode == "exact" else self._predict
        with self._settled():
            parts = [predict_part(part) for part in x.split(self.batch)]
        output, *others = (_join(kind) for kind in zip(*parts, strict=True))
        assert output is not None
        return Predicted(output, *others)

    def _predict(self, x: Tensor) -> Predicted:
        draws = self._draw(x, self.n_samples)
        several = len(draws) > 1
        if self.task == "regression":
            return Predicted(draws.mean(0), draws.std(0) if several else None)
        return average(draws, draws.mean(0), draws.std(0) if several else None)

    def _predict_exact(self, x: Tensor) -> Predicted:
        prepared = self.prepare(x)  # once: members must see the same noise
        members = [predict(member, prepared, mode="exact", task="regression") for member in self.members]
        means = self._check_finite(torch.stack([member.mean for member in members])).flatten(2)
        within = torch.stack([member.std.square() for member in members if member.std is not None]).mean(0).flatten(1)
        mean, std = means.mean(0), (within + means.var(0, correction=0)).sqrt()
        if self.task == "regression":
            return Predicted(mean, std)
        return average(self._draw_prepared(prepared, max(self.n_samples, 2)), mean, std)

    def examine(self, x: Tensor, y: Tensor, loss: Loss) -> Nature:
        """Look at the forward pass: is it random, and does a gradient come back?"""
        gradient = self._climb(x, y, loss, None)[0].gradient
        vanished = gradient.flatten(1).abs().amax(1) < VANISHING
        return Nature(self.is_randomized(x), not bool(vanished.all()), float(vanished.double().mean()))

    @torch.no_grad()
    def is_randomized(self, x: Tensor) -> bool:
        """Whether two answers of the network to one input, in this mode, may differ.

        Of tensor dropout its layers say so: where most masks keep everything, passes agree by luck. For anything else
        that is random, ``PASSES`` passes of a few of these inputs are compared, once.
        """
        with self._settled():
            if any(draws_masks(member) for member in self.members):
                return True
            if self._randomized is None:
                few = x[: min(self.batch, PASSES)]
                draws = torch.stack([self._draw(few, 1) for _ in range(PASSES)])
                spread = (draws - draws[0]).abs().max()
                self._randomized = bool(spread > 1e-5 * draws[0].abs().max())
        return self._randomized

    def is_fooled(self, scores: Tensor, y: Tensor) -> Tensor:
        """(B,): which examples are misclassified; a regression has only errors, so none."""
        if self.task == "regression":
            return torch.zeros(len(y), dtype=torch.bool, device=y.device)
        return scores.argmax(1) != y

    def check(self, x: Tensor, y: Tensor) -> None:
        """Refuse inputs and targets that cannot be what they should be.

        Raises:
            TensorDropoutError: if x is empty, not finite or outside the bounds, or y does not fit the outputs.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2 or len(x) == 0:
            what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise TensorDropoutError(f"target: inputs are floating-point (B, C, *size) with B ≥ 1, got {what}")
        smallest, largest = (float(limit) for limit in x.detach().aminmax())
        slack = 1e-6 * min(self.bounds[1] - self.bounds[0], 1e30)
        if not bool(x.isfinite().all()):
            raise TensorDropoutError("target: an input is not finite (NaN or infinity); leave such examples out")
        if not (smallest >= self.bounds[0] - slack and largest <= self.bounds[1] + slack):
            raise TensorDropoutError(
                f"target: inputs lie in [{smallest:g}, {largest:g}], outside the bounds "
                f"[{self.bounds[0]:g}, {self.bounds[1]:g}]; give inputs before normalisation, and the normalisation as "
                "prepare"
            )
        if not isinstance(y, Tensor) or len(y) != len(x):
            raise TensorDropoutError(f"target: {len(x)} inputs need as many targets, got {_describe_shape(y)}")
        outputs = self.count_outputs(x)
        if self.task == "regression":
            if y.numel() != len(x) * outputs:
                raise TensorDropoutError(
                    f"target: the network has {outputs} outputs per example, the targets are {_describe_shape(y)}"
                )
            if not bool(y.double().isfinite().all()):
                raise TensorDropoutError("target: a target is not finite; leave such examples out")
            return
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or y.ndim != 1:
            raise TensorDropoutError(f"target: labels are whole numbers (B,), got {y.dtype} of {_describe_shape(y)}")
        lowest, highest = (int(limit) for limit in y.long().aminmax())
        if not 0 <= lowest <= highest < outputs:
            raise TensorDropoutError(
                f"target: labels lie in {lowest}..{highest}, the network has the classes 0..{outputs - 1}"
            )

    @torch.no_grad()
    def count_outputs(self, x: Tensor) -> int:
        """The number of classes, or of regression outputs."""
        if self._outputs is None:
            with self._settled():
                outputs = self._draw(x[:1], 1).shape[2]
            if self.task == "classification" and outputs < 2:
                raise TensorDropoutError(
                    "target: a classification needs at least 2 outputs, the network has 1; say task='regression'"
                )
            self._outputs = outputs
        return self._outputs

    @torch.no_grad()
    def mean_outputs(self, x: Tensor) -> Tensor:
        """(B, O): logits or outputs averaged over ``eot_samples``; unlike probabilities they never saturate."""
        with self._settled():
            return torch.cat([self._draw(part, self.eot_samples).mean(0) for part in x.split(self.batch)])

    # One pass.

    def _draw(self, x: Tensor, n: int) -> Tensor:
        """(draws · members, B, O), differentiable."""
        return self._draw_prepared(self.prepare(x), n)

    def _draw_prepared(self, prepared: Tensor, n: int) -> Tensor:
        draws = [draw for member in self.members for draw in self._draw_member(member, prepared, n)]
        return self._check_finite(torch.stack(draws))

    def _draw_member(self, member: nn.Module, prepared: Tensor, n: int) -> list[Tensor]:
        if self._heads_only and n > 1:
            if draws := draw_heads(member, prepared, n):
                return draws
            self._heads_only = False
        return [_run(member, prepared) for _ in range(n)]

    def _check_finite(self, outputs: Tensor) -> Tensor:
        if not bool(outputs.isfinite().all()):
            raise TensorDropoutError(
                "target: the network returns NaN or infinity; no robustness can be measured for it (did training "
                "diverge, or does prepare divide by zero?)"
            )
        return outputs

    def _score(self, draws: Tensor) -> Tensor:
        if self.task == "classification" and len(draws) > 1:
            return log_average(draws)
        return draws.mean(0)

    def _split(self, x: Tensor, y: Tensor, goal: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        for start in range(0, len(x), self.batch):
            rows = slice(start, start + self.batch)
            yield x[rows], y[rows], None if goal is None else goal[rows]

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Every member in ``eval`` and in the target's mode, its parameters without gradients."""
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(evaluating(member))
                if self.mode != "mean":
                    stack.enter_context(at_test(member, "sample" if self._sampling else "mean"))
                stack.enter_context(_frozen(member))
                if self.mode == "sample":
                    stack.enter_context(dropping(member))
            yield


def _join(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if given else None


def _run(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    if not isinstance(output, Tensor) or output.ndim < 2 or len(output) != len(x):
        raise TensorDropoutError(
            f"target: {type(model).__name__} returns {_describe_shape(output)} for {len(x)} examples; one tensor "
            "(B, outputs) is expected; wrap the model in a module that returns it"
        )
    return output.flatten(1)


@contextmanager
def _differentiating() -> Iterator[None]:
    """Autograd on, even inside ``torch.inference_mode``, which ``enable_grad`` alone does not undo."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    except RuntimeError as error:
        if "nference tensor" not in str(error):
            raise
        raise TensorDropoutError(
            "target: the network, or its preparation, has tensors that were made inside torch.inference_mode, and a "
            "gradient is needed, which cannot pass them; build or load the network outside of it"
        ) from error


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Parameters need no gradient inside: a backward pass to the input is half the work."""
    learning = [
        parameter for parameter in model.parameters() if parameter.requires_grad and not parameter.is_inference()
    ]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _describe_shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
