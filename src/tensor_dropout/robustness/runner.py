"""Run the parts of an evaluation one by one, keep every outcome, and go on where one was cut off."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.metrics.measures import fit_extra_variance
from tensor_dropout.progress import show_progress
from tensor_dropout.robustness.attack_loop import seeded
from tensor_dropout.robustness.attacks import first_loss
from tensor_dropout.robustness.describe import describe_outcome
from tensor_dropout.robustness.losses import find_loss
from tensor_dropout.robustness.noise import CORRUPTIONS
from tensor_dropout.robustness.outcomes import Arrays, Outcomes, slim
from tensor_dropout.robustness.protocol import AttackPart, NoisePart, choose_noise, plan_attacks, plan_noise
from tensor_dropout.robustness.settings import Settings
from tensor_dropout.robustness.target import Target
from tensor_dropout.robustness.transfer import Transfer

EOT_SAMPLES = 16
"""Draws behind a gradient of the adaptive protocol, against a random network."""

_PLACE = re.compile(r" at 0x[0-9a-f]+| \((GPU |cuda)[^)]*\)")
"""What texts of modules say of where they are."""

Pair = tuple[Tensor, Tensor]
"""Inputs and targets."""


class Variant(NamedTuple):
    """Another form of the network, measured on the same inputs, such as one with a smaller head.

    Attributes:
        settings: what it is, for records.
        network: what is measured, in ``eval`` mode.
    """

    settings: Mapping[str, Any]
    network: nn.Module


@contextmanager
def seeded_inside(seed: int, x: Tensor) -> Iterator[None]:
    """The network's own randomness, and ours, drawn from this seed inside; the caller's numbers go on after it."""
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(seed)
        yield


class Runner:
    """Runs the parts of an evaluation that are missing; every one that is done is kept at once.

    Its arguments are those of :func:`~tensor_dropout.robustness.evaluate`.
    """

    def __init__(
        self,
        target: Target,
        x: Tensor,
        y: Tensor,
        names: Sequence[str],
        outcomes: Outcomes,
        settings: Settings,
        twin: Target | Callable[[], Target] | None,
    ) -> None:
        self.target, self.outcomes, self.settings, self.twin = target, outcomes, settings, twin
        self.x, self.y = x, y
        target.check(x, y)
        self.bounded = math.isfinite(target.bounds[1] - target.bounds[0])
        if not outcomes.identity:
            outcomes.claim(_fingerprint(target, x, y))
        self.randomized = target.is_randomized(x)
        self.single, self.averaged = (_with_draws(target, n) for n in (1, EOT_SAMPLES if self.randomized else 1))
        if "target" not in outcomes.examples:
            outcomes.set_examples(y, list(names))

    def run(
        self,
        validation: Callable[[], Pair] | None,
        unknown: Callable[[], Pair] | None,
        variants: Mapping[str, Variant],
    ) -> list[str]:
        """Run what is missing, and name the parts that were asked for."""
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
            unit=self.target.bounds[1] - self.target.bounds[0] if self.bounded else 1.0,
            seed=settings.seed,
        )
        if self.twin is None:
            attacks = [part for part in attacks if not part.transferred]
        noises = plan_noise(choose_noise(settings.noise, self.x.ndim - 2, self.bounded), settings.repeats)
        wide = settings.protocol in ("adaptive", "both")
        with show_progress("clean images", len(attacks) + len(noises) + len(variants) + 4) as advance:
            self._keep("clean", {}, lambda: self._describe(self.x, settings.seed))
            advance(1)
            if self.target.task == "regression" and validation is not None:
                outputs = self.target.count_outputs(self.x)
                each = {"targets": outputs} if outputs > 1 else {}  # older files have one variance for all
                self._keep("validation", each, lambda: self._fit_residual(*validation()))
            advance(1)
            if unknown is not None:
                self._keep("unknown", {}, lambda: self._describe_unknown(*unknown()))
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
            for name, variant in variants.items():
                advance.describe(name)
                self._keep(name, variant.settings, partial(self._describe_variant, variant.network))
                advance(1)
        asked = {"clean": True, "validation": validation is not None, "unknown": unknown is not None, "gradients": wide}
        fixed = [name for name, wanted in asked.items() if wanted and name in self.outcomes]
        return [*fixed, *(part.name for part in attacks), *(noise.name for noise in noises), *variants]

    def _describe_variant(self, network: nn.Module) -> Arrays:
        """As it would be deployed, whatever the mode."""
        target = _copy(self.target, members=[network], mode="mean", n_samples=1, eot_samples=1)
        return slim(self._describe(self.x, self.settings.seed, target))

    def _describe_unknown(self, x: Tensor, y: Tensor) -> Arrays:
        return {"target": y.cpu().numpy(), **describe_outcome(self.target.predict(x), y, "classification")}

    def _keep(self, name: str, settings: Mapping[str, Any], work: Callable[[], Arrays]) -> None:
        settings = {**settings, "seed": self.settings.seed}
        if not self.outcomes.has(name, settings):
            began = time.perf_counter()
            with seeded_inside(self.settings.seed, self.x):
                arrays = work()
            self.outcomes.add(name, settings, arrays, time.perf_counter() - began)

    def _describe(self, x: Tensor, seed: int, target: Target | None = None) -> Arrays:
        target = target or self.target
        with seeded_inside(seed, x):
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
        assert self.twin is not None
        if not isinstance(self.twin, Target):
            self.twin = self.twin()
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
        """A radius from which every input can be reached: the range, 10 without bounds; for l2 times the diagonal."""
        width = 1.0 if self.bounded else 10.0
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

    def _fit_residual(self, x: Tensor, y: Tensor) -> Arrays:
        """Target by target, the residual variance that the masks' std does not cover, fitted on validation examples."""
        found = describe_outcome(self.target.predict(x), y, "regression")
        return {"extra_variance": np.array(fit_extra_variance({"target": y.cpu().numpy(), **found}))}


def _with_draws(target: Target, draws: int) -> Target:
    """The same target with other draws behind a gradient."""
    return _copy(target, eot_samples=max(draws, target.eot_samples) if draws > 1 else 1)


def _with_prepare(target: Target, prepare: Callable[[Tensor], Tensor]) -> Target:
    return _copy(target, prepare=prepare)


def _fingerprint(target: Target, x: Tensor, y: Tensor) -> str:
    """Of the networks, what is asked of them, and the examples; what ``prepare`` does is not seen."""
    digest = hashlib.sha256(repr((target.task, target.mode, target.n_samples, target.bounds)).encode())
    each: list[tuple[str, Any]] = [("x", x), ("y", y)]
    for k, member in enumerate(target.members):
        each += [(f"{k}", repr(member)), *((f"{k}.{key}", value) for key, value in member.state_dict().items())]
    for key, value in each:
        if isinstance(value, Tensor):
            digest.update(f"\n{key} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:  # settings that are no weights; neither an address in memory nor a device is one
            digest.update(f"\n{key} {_PLACE.sub('', repr(value))}\n".encode())
    return digest.hexdigest()[:16]


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
