"""Run the parts of a protocol against a target, keep every outcome, and go on where a run was cut off."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.measures import fit_extra_variance
from tensor_dropout.progress import show_progress
from tensor_dropout.robustness.attack_loop import seeded
from tensor_dropout.robustness.losses import find_loss
from tensor_dropout.robustness.noise import CORRUPTIONS
from tensor_dropout.robustness.norms import find_norm
from tensor_dropout.robustness.protocol import (
    AttackPart,
    Budget,
    NoisePart,
    Protocol,
    first_loss,
    plan_attacks,
    plan_noise,
)
from tensor_dropout.robustness.target import Target
from tensor_dropout.robustness.transfer import Transfer
from tensor_dropout_lab.data.base import Data, Split, TensorSplit
from tensor_dropout_lab.data.batches import naming_the_file
from tensor_dropout_lab.evaluation.describe import describe_outcome
from tensor_dropout_lab.evaluation.outcomes import Arrays, Outcomes, slim
from tensor_dropout_lab.evaluation.shrinking import Shrunk, shrink
from tensor_dropout_lab.evaluation.twin import fit_twin

EOT_SAMPLES = 16
"""Draws behind a gradient of the adaptive protocol, against a random network."""


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        protocol: "paper", "adaptive", "both" or "none".
        budgets: the radii of the adaptive protocol, in shares of the inputs' range.
        main: the label of the radius that the audit looks at closely; None: the middle one.
        norm: of the adaptive protocol: "linf" or "l2".
        noise: families of noise.
        repeats: draws of each noise.
        steps: of PGD and APGD.
        queries: of Square.
        twin_epochs: of the substitute that is trained when no twin is given; 0: no transfer.
        head_sizes: about how many smaller sizes the head is cut to, none trained again; 0: none.
        seed: of everything random.
    """

    protocol: Protocol = "both"
    budgets: tuple[Budget, ...] = (
        Budget("2/255", 2 / 255),
        Budget("8/255", 8 / 255),
        Budget("16/255", 16 / 255),
    )
    main: str | None = None
    norm: str = "linf"
    noise: tuple[str, ...] = ("gaussian",)
    repeats: int = 5
    steps: int = 50
    queries: int = 1000
    twin_epochs: int = 20
    head_sizes: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the radii."""
        if self.protocol not in ("paper", "adaptive", "both", "none"):
            raise TensorDropoutError(
                f"evaluate: protocol is 'paper', 'adaptive', 'both' or 'none', got {self.protocol!r}"
            )
        find_norm(self.norm)
        labels = [budget.label for budget in self.ordered()]
        if not labels or len({budget.epsilon for budget in self.budgets}) != len(labels):
            raise TensorDropoutError(f"evaluate: different radii are expected, got {', '.join(labels) or 'none'}")
        if self.main is not None and self.main not in labels:
            raise TensorDropoutError(f"evaluate: the main radius is one of {', '.join(labels)}, got {self.main!r}")

    def ordered(self) -> tuple[Budget, ...]:
        """The radii from small to large."""
        return tuple(sorted(self.budgets, key=lambda budget: budget.epsilon))

    def main_label(self) -> str:
        """The label of the main radius."""
        ordered = self.ordered()
        return self.main or ordered[len(ordered) // 2].label


@dataclass(frozen=True)
class Examples:
    """Inputs in [0, 1], or in units of their spread where they have no bounds, with targets and names."""

    x: Tensor
    y: Tensor
    names: list[str]


def evaluate(
    target: Target,
    examples: Examples,
    outcomes: Outcomes,
    settings: Settings,
    *,
    twin: Target | None = None,
    unlabelled: Callable[[], Tensor] | None = None,
    validation: Callable[[], Examples] | None = None,
    unknown: Callable[[], Examples] | None = None,
) -> list[str]:
    """Run what is missing of a protocol; every part that is done is kept at once.

    Args:
        target: what is evaluated, on inputs in the unit of ``examples``.
        examples: what it is evaluated on.
        outcomes: where results go; parts that are there are not run again.
        settings: what is measured.
        twin: a network to transfer attacks from.
        unlabelled: inputs to train a substitute on, asked for when there is no twin.
        validation: examples to fit a regression's residual variance on.
        unknown: examples of classes that the network was not trained for, to be told from the others.

    Returns:
        The names of the parts that were asked for: the file may hold others.

    Raises:
        TensorDropoutError: if inputs, targets and network do not fit, or the network returns NaN.
    """
    with _seeded(settings.seed, examples.x):
        evaluation = _Evaluation(target, examples, outcomes, settings, twin, unlabelled)
    return evaluation.run(validation, unknown)


@contextmanager
def _seeded(seed: int, x: Tensor) -> Iterator[None]:
    """The network's own randomness, and ours, drawn from this seed inside; the caller's numbers go on after it."""
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(seed)
        yield


class _Evaluation:
    def __init__(
        self,
        target: Target,
        examples: Examples,
        outcomes: Outcomes,
        settings: Settings,
        twin: Target | None,
        unlabelled: Callable[[], Tensor] | None,
    ) -> None:
        self.target, self.outcomes, self.settings = target, outcomes, settings
        self.x, self.y = examples.x, examples.y
        target.check(self.x, self.y)
        self.twin, self.unlabelled = twin, unlabelled
        self.randomized = target.is_randomized(self.x)
        self.single, self.averaged = (_with_draws(target, n) for n in (1, EOT_SAMPLES if self.randomized else 1))
        if "target" not in outcomes.examples:
            outcomes.set_examples(self.y, examples.names)

    def run(
        self, validation: Callable[[], Examples] | None, unknown: Callable[[], Examples] | None = None
    ) -> list[str]:
        settings = self.settings
        attacks = plan_attacks(
            settings.protocol,
            self.target.task,
            self.target.count_outputs(self.x),
            settings.ordered(),
            main=settings.main_label(),
            norm=settings.norm,
            steps=settings.steps,
            queries=settings.queries,
            randomized=self.randomized,
            unbounded=self._reach(),
            seed=settings.seed,
        )
        if self.twin is None and (self.unlabelled is None or settings.twin_epochs == 0):
            attacks = [part for part in attacks if not part.transferred]
        noises = plan_noise(settings.noise, settings.repeats)
        wide = settings.protocol in ("adaptive", "both")
        shrunk = self._shrink()
        with show_progress("clean images", len(attacks) + len(noises) + len(shrunk) + 4) as advance:
            self._keep("clean", {}, lambda: self._describe(self.x, settings.seed))
            advance(1)
            if self.target.task == "regression" and validation is not None:
                outputs = self.target.count_outputs(self.x)
                each = {"targets": outputs} if outputs > 1 else {}  # older files have one variance for all
                self._keep("validation", each, lambda: self._fit_residual(validation()))
            advance(1)
            if unknown is not None:
                self._keep("unknown", {}, lambda: self._describe_unknown(unknown()))
            advance(1)
            if wide:
                self._keep("gradients", {"loss": first_loss(self.target.task)}, self._measure_gradients)
            advance(1)
            for part in attacks:
                advance.describe(part.name)
                self._attack(part)
                advance(1)
            for noise in noises:
                advance.describe(noise.name)
                self._keep(noise.name, noise.settings(), partial(self._add_noise, noise))
                advance(1)
            for name, smaller in shrunk.items():
                advance.describe(name)
                settings_of = {"kind": smaller.kind, "size": smaller.size, "parameters": smaller.parameters}
                self._keep(name, settings_of, partial(self._describe_shrunk, smaller))
                advance(1)
        asked = {"clean": True, "validation": validation is not None, "unknown": unknown is not None, "gradients": wide}
        fixed = [name for name, wanted in asked.items() if wanted and name in self.outcomes]
        return [*fixed, *(part.name for part in attacks), *(noise.name for noise in noises), *shrunk]

    def _shrink(self) -> dict[str, Shrunk]:
        if not self.settings.head_sizes:
            return {}
        if len(self.target.members) > 1:
            raise TensorDropoutError("evaluate: the head of one network can be cut down, not those of an ensemble")
        found = shrink(self.target.members[0], self.settings.head_sizes)
        return {f"head/{each.kind}/{each.size}": each for each in found}

    def _describe_shrunk(self, smaller: Shrunk) -> Arrays:
        """As it would be deployed, whatever the mode."""
        target = _copy(self.target, members=[smaller.network], mode="mean", n_samples=1, eot_samples=1)
        return slim(self._describe(self.x, self.settings.seed, target))

    def _describe_unknown(self, examples: Examples) -> Arrays:
        found = describe_outcome(self.target.predict(examples.x), examples.y, "classification")
        return {"target": examples.y.cpu().numpy(), **found}

    def _keep(self, name: str, settings: Mapping[str, Any], work: Callable[[], Arrays]) -> None:
        settings = {**settings, "seed": self.settings.seed}
        if not self.outcomes.has(name, settings):
            began = time.perf_counter()
            with _seeded(self.settings.seed, self.x):
                arrays = work()
            self.outcomes.add(name, settings, arrays, time.perf_counter() - began)

    def _describe(self, x: Tensor, seed: int, target: Target | None = None) -> Arrays:
        target = target or self.target
        with _seeded(seed, x):
            return describe_outcome(target.predict(x), self.y, target.task)

    # Attacks.

    def _attack(self, part: AttackPart) -> None:
        settings: dict[str, Any] = {**part.settings(), "eot": self._source(part).eot_samples, "after": list(part.after)}
        if part.after and self.target.task == "classification":  # if those before change, so does this
            standing = self._standing(self._worst_before(part.after)).cpu().numpy()
            settings["standing"] = hashlib.sha256(standing.astype(np.int64).tobytes()).hexdigest()[:16]
        if part.transferred:
            settings["transferred"] = True
        self._keep(part.name, settings, lambda: self._run_attack(part))

    def _source(self, part: AttackPart) -> Target:
        return self.averaged if part.averaged else self.single

    def _run_attack(self, part: AttackPart) -> Arrays:
        before = self._worst_before(part.after)
        rows = self._standing(before)
        seed = self.settings.seed
        if len(rows) == 0:
            assert before is not None
            return before
        worst = self._make(part)(self._source(part), self.x[rows], self.y[rows])
        full = self.x.clone()
        full[rows] = worst
        found = slim(self._describe(full, seed + 1))
        if before is None or self.target.task == "regression":
            return found
        chosen = torch.zeros(len(self.x), dtype=torch.bool)
        chosen[rows.cpu()] = True
        return {key: np.where(chosen.numpy(), found[key], before[key]) for key in found}

    def _make(self, part: AttackPart) -> Any:
        if not part.transferred:
            return part.attack
        if self.twin is None:
            assert self.unlabelled is not None
            self.twin = fit_twin(
                self.target, self.unlabelled(), epochs=self.settings.twin_epochs, seed=self.settings.seed + 1
            )
        return Transfer(part.attack, self.twin)

    def _worst_before(self, parts: Sequence[str]) -> Arrays | None:
        """Of classes: for every example, the outcome of the first of these parts that fooled it, else of the last."""
        if not parts or self.target.task == "regression":
            return None
        worst: Arrays | None = None
        wrong = np.zeros(len(self.x), dtype=bool)
        for name in parts:
            if name not in self.outcomes:  # a transfer without a twin
                continue
            found = {key: value for key, value in self.outcomes[name].items() if key != "target"}
            keep = wrong.copy()
            worst = found if worst is None else {key: np.where(keep, worst[key], found[key]) for key in found}
            wrong |= found["predicted"] != self.outcomes.examples["target"]
        return worst

    def _standing(self, before: Arrays | None) -> Tensor:
        if before is None:
            return torch.arange(len(self.x), device=self.x.device)
        right = before["predicted"] == self.outcomes.examples["target"]
        return torch.from_numpy(np.flatnonzero(right)).to(self.x.device)

    def _reach(self) -> float:
        """A radius from which the whole range can be reached: in the Euclidean norm its diagonal, without bounds 10."""
        low, high = self.target.bounds
        width = high - low if high - low < math.inf else 10.0
        return width if self.settings.norm == "linf" else width * math.sqrt(self.x[0].numel())

    def _measure_gradients(self) -> Arrays:
        """The largest entry of every example's gradient, on clean inputs, for the usual loss."""
        loss = find_loss("cross_entropy" if self.target.task == "classification" else "absolute")
        y = self.y.long() if self.target.task == "classification" else self.y
        gradient = self.averaged.ascend(self.x, y, loss).gradient
        return {"largest": gradient.flatten(1).abs().amax(1).double().cpu().numpy()}

    # Noise.

    def _add_noise(self, part: NoisePart) -> Arrays:
        corruption, low_high = CORRUPTIONS[part.corruption], self.target.bounds
        generator = seeded(self.x, self.settings.seed * 1_000_003 + part.draw)
        prepare = self.target.prepare

        def corrupt(x: Tensor) -> Tensor:
            if corruption.space == "input":
                return corruption.apply(prepare(x), part.level, generator)
            return prepare(corruption.apply(x, part.level, generator, low_high))

        noisy = _with_prepare(self.target, corrupt)
        return self._describe(self.x, self.settings.seed + part.draw, noisy)

    def _fit_residual(self, examples: Examples) -> Arrays:
        """Target by target, the residual variance that the masks' std does not cover, fitted on validation examples."""
        predicted = self.target.predict(examples.x)
        found = describe_outcome(predicted, examples.y, "regression")
        return {"extra_variance": np.array(fit_extra_variance({"target": examples.y.cpu().numpy(), **found}))}


def _with_draws(target: Target, draws: int) -> Target:
    """The same target with other draws behind a gradient."""
    return _copy(target, eot_samples=max(draws, target.eot_samples) if draws > 1 else 1)


def _with_prepare(target: Target, prepare: Callable[[Tensor], Tensor]) -> Target:
    return _copy(target, prepare=prepare)


def _copy(target: Target, **changes: Any) -> Target:
    settings: dict[str, Any] = {
        "bounds": target.bounds,
        "prepare": target.prepare,
        "task": target.task,
        "mode": target.mode,
        "n_samples": target.n_samples,
        "eot_samples": target.eot_samples,
        "batch": target.batch,
    }
    return Target(changes.pop("members", target.members), **(settings | changes))


# From data sets to examples.


@dataclass(frozen=True)
class Scale:
    """How stored numbers become inputs of a target: ``(stored - low) / width``.

    With bounds, inputs lie in [0, 1] and a radius is a share of the range. Without, ``width`` is the standard deviation
    of stored training numbers, and a radius is a share of that.
    """

    low: float
    width: float
    bounded: bool


def measure_scale(data: Data) -> Scale:
    """The scale of a data set: its bounds, or else the spread of its first 64 training examples."""
    if data.bounds is not None:
        return Scale(data.bounds[0], data.bounds[1] - data.bounds[0], bounded=True)
    first, _ = _read(data.train, torch.arange(min(64, len(data.train))))
    return Scale(0.0, float(first.std()), bounded=False)


def take_examples(
    split: Split, scale: Scale, *, count: int | None = None, seed: int = 0, device: torch.device | str = "cpu"
) -> Examples:
    """Examples of a split, chosen by the seed alone; fewer, if it is to skip pictures that cannot be read.

    Args:
        split: a part of a data set.
        scale: from :func:`measure_scale`.
        count: how many; None: all.
        seed: of the choice.
        device: where they go.

    Example:
        >>> from tensor_dropout_lab.data import load_data
        >>> data = load_data("digits")
        >>> few = take_examples(data.test, measure_scale(data), count=3)
        >>> few.x.shape, float(few.x.max()), few.names
        (torch.Size([3, 1, 8, 8]), 1.0, ['digit-1372', 'digit-1560', 'digit-1331'])
    """
    rows = torch.arange(len(split))
    if count is not None and count < len(split):
        rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))[:count].sort().values
    x, rows = _read(split, rows)
    x = (x - scale.low) / scale.width
    y = split.targets[rows.to(split.targets.device)]
    return Examples(x.to(device), y.to(device), [split.names[row] for row in rows.tolist()])


def _read(split: Split, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs, and their rows: without those that cannot be read, if the split is to skip them."""
    if isinstance(split, TensorSplit):
        return split.inputs[rows.to(split.inputs.device)].float(), rows
    skip = getattr(split, "skip_unreadable", False)
    with show_progress("reading", len(rows)) as advance, naming_the_file():
        inputs, kept = [], []
        for row in rows.tolist():
            try:
                inputs.append(split.read(row).float())
                kept.append(row)
            except TensorDropoutError as error:
                if not skip or (not kept and row == rows[-1]):
                    raise
                warnings.warn(f"{error} (left out)", stacklevel=3)
            advance(1)
    return torch.stack(inputs), torch.tensor(kept)


def build_target(models: nn.Module | Sequence[nn.Module], data: Data, scale: Scale, **options: Any) -> Target:
    """A target for inputs of :func:`take_examples`: they go back to stored units, and through the data's preparation.

    Args:
        models: a network for prepared inputs, or several for an ensemble.
        data: the data set.
        scale: from :func:`measure_scale`.
        **options: of :class:`Target`: ``mode``, ``n_samples``, ``batch``.
    """
    weight = next((models if isinstance(models, nn.Module) else models[0]).parameters())
    prepare = data.prepare.to(weight.device)
    return Target(
        models,
        bounds=(0.0, 1.0) if scale.bounded else (-math.inf, math.inf),
        prepare=lambda x: prepare(x * scale.width + scale.low).to(weight.dtype),
        task=data.task,
        **options,
    )
