"""The audit: does the robustness that attacks report exist, or do the gradients only fail to find the way?

It reads stored outcomes and needs no network. Each check is a rule that robust networks keep and masked gradients
break, with the publication that states it. The thresholds are fixed here, for all networks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tensor_dropout.metrics.measures import score_images
from tensor_dropout.robustness.attacks import Role, ensemble, first_loss, name_parts
from tensor_dropout.robustness.protocol import PAPER, UNBOUNDED

IMAGES = 2
"""Differences of so many images are chance, however few there are: a threshold in points is never below them."""
SLACK = 1.0
"""In points of accuracy: how much better the weaker of two attacks may do before it counts. For a regression, in
percent of the error of predicting the mean."""
LOSS_SLACK = 3.0
"""In points: how far the cross-entropy may trail the margin loss, and one draw the average of many."""
UNBOUNDED_ACCURACY = 1.0
"""In percent: the accuracy that an attack without a bound may leave."""
VANISHING = 1e-20
"""A gradient below this everywhere counts as vanished: products in a backward pass underflow near it in float32."""
VANISHED_SHARE = 5.0
"""In percent: the share of images whose gradient may be 0 or vanish."""

OBFUSCATED = "Athalye, Carlini, Wagner: Obfuscated Gradients Give a False Sense of Security (ICML 2018)"
EVALUATING = "Carlini et al.: On Evaluating Adversarial Robustness (2019)"
RELIABLE = "Croce, Hein: Reliable Evaluation of Adversarial Robustness (ICML 2020)"
SUBSTITUTES = "Papernot et al.: Practical Black-Box Attacks against Machine Learning (AsiaCCS 2017)"
DISTILLATION = "Carlini, Wagner: Defensive Distillation is Not Robust to Adversarial Examples (2016)"

Outcome = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Check:
    """One rule and how it went.

    Attributes:
        name: short.
        rule: what must hold.
        passed: whether it does; None if it could not be tried.
        measured: the number it was decided by; None if not tried.
        allowed: the most that it may be.
        finding: one sentence with what was seen.
        publication: where the rule comes from.
    """

    name: str
    rule: str
    passed: bool | None
    measured: float | None
    allowed: float
    finding: str
    publication: str


@dataclass(frozen=True)
class Audit:
    """The checks and what they amount to.

    Attributes:
        masked: True if a rule is broken.
        verdict: in plain words.
        checks: all of them.
    """

    masked: bool
    verdict: str
    checks: tuple[Check, ...]

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """What the audit looks at.

    Attributes:
        task: "classification" or "regression".
        parts: name of a part -> its outcome, all for the same examples.
        budgets: the labels of the radii, from small to large.
        main: the label at which the checks that need one radius are made.
        declared_random: whether the prediction mode says that the network is random.
        randomized: whether it is.
    """

    task: str
    parts: Mapping[str, Outcome]
    budgets: tuple[str, ...]
    main: str
    declared_random: bool
    randomized: bool

    def allow(self, points: float) -> float:
        """A threshold in points, but at least ``IMAGES`` images; a regression's is in percent as it is."""
        few = 100 * IMAGES / len(self.parts["clean"]["target"]) if self.task == "classification" else 0.0
        return max(points, few)

    def tell(self, points: float) -> str:
        """That more than a threshold in points is allowed, where the images are so few."""
        allowed = self.allow(points)
        return f"; of so few images {IMAGES} ({allowed:.1f} points) are allowed" if allowed > points else ""

    def damage(self, part: str) -> float | None:
        """Percent misclassified, or the error in percent of that of predicting the mean; None if it was not run."""
        if part not in self.parts:
            return None
        return float(self._scores(part).mean())

    def gain(self, parts: list[str], after: list[str]) -> float | None:
        """The damage that ``parts`` add, example by example, to that of all parts in ``after``."""
        new, old = ([self._scores(name) for name in names if name in self.parts] for names in (parts, after))
        if not new or not old:
            return None
        before = np.max(old, axis=0)
        return float((np.maximum(before, np.max(new, axis=0)) - before).mean())

    def worst(self, parts: list[str]) -> float | None:
        """The damage of the worst of these parts for every example; None if none was run."""
        found = [self._scores(name) for name in parts if name in self.parts]
        return float(np.max(found, axis=0).mean()) if found else None

    def _scores(self, part: str) -> np.ndarray:
        scores = score_images(self.parts[part])
        if self.task == "classification":
            return 100.0 - scores  # score_images: 100 where right
        target = np.asarray(self.parts["clean"]["target"], dtype=np.float64)
        target = target.reshape(len(target), -1)
        spread = float(np.abs(target - target.mean(0)).mean())
        return 100.0 * scores / max(spread, 1e-12)


def audit(evidence: Evidence) -> Audit:
    """Make every check that the evidence allows, and say what they amount to.

    Args:
        evidence: outcomes of the adaptive protocol, and of the paper's if it was run.
    """
    checks = tuple(_check(evidence))
    broken = [check for check in checks if check.passed is False]
    return Audit(bool(broken), _conclude(evidence, broken, checks), checks)


def _check(evidence: Evidence) -> Iterator[Check]:
    main, usual = evidence.main, first_loss(evidence.task)
    unit = "points" if evidence.task == "classification" else "% of the mean predictor's error"

    def compare(name: str, rule: str, weak: str, strong: str, publication: str) -> Check:
        allowed = evidence.allow(SLACK)
        low, high = evidence.damage(weak), evidence.damage(strong)
        if low is None or high is None:
            return Check(name, rule, None, None, allowed, "not run", publication)
        finding = f"{_plain(weak)} does {low:.1f} {unit} of damage, {_plain(strong)} {high:.1f}{evidence.tell(SLACK)}"
        return Check(name, rule, low - high <= allowed, low - high, allowed, finding, publication)

    yield compare(
        "single step",
        "one step must not beat many",
        f"adaptive/fgsm/{main}",
        f"adaptive/{usual}/{main}",
        OBFUSCATED,
    )
    yield compare(
        "more steps",
        "more steps must not help the defender",
        f"adaptive/{usual}-few/{main}",
        f"adaptive/{usual}/{main}",
        EVALUATING,
    )
    yield _check_radii(evidence, usual)
    yield _check_unbounded(evidence)
    yield _check_gain(
        evidence,
        "black box",
        "attacks without gradients must not find what gradients missed",
        "black box",
        OBFUSCATED,
    )
    if evidence.task == "classification":
        yield _check_losses(evidence)
    yield _check_gradients(evidence)
    yield _check_gain(
        evidence, "transfer", "a twin's gradients must not find what its own missed", "transfer", SUBSTITUTES
    )
    yield _check_randomness(evidence, usual, main)


def _check_radii(evidence: Evidence, usual: str) -> Check:
    rule, allowed = "a larger radius must not help the defender", evidence.allow(SLACK)
    found = [(budget, evidence.damage(f"adaptive/{usual}/{budget}")) for budget in (*evidence.budgets, UNBOUNDED)]
    known = [(budget, damage) for budget, damage in found if damage is not None]
    if len(known) < 2:
        return Check("larger radius", rule, None, None, allowed, "not run", EVALUATING)
    drops = [(small[1] - large[1], small[0], large[0]) for small, large in pairwise(known)]
    worst, small, large = max(drops)
    shown = ", ".join(f"{damage:.1f} at {budget}" for budget, damage in known)
    finding = f"damage of {usual}: {shown}" + (f"; it falls from {small} to {large}" if worst > allowed else "")
    finding += evidence.tell(SLACK)
    return Check("larger radius", rule, worst <= allowed, worst, allowed, finding, EVALUATING)


def _check_unbounded(evidence: Evidence) -> Check:
    usual = first_loss(evidence.task)
    parts = [f"adaptive/{kind}/{UNBOUNDED}" for kind in (usual, "pgd-margin")]
    damage = evidence.worst(parts)
    if evidence.task == "regression":
        rule = "an attack without a bound must do worse than predicting the mean"
        if damage is None:
            return Check("unbounded", rule, None, None, 0.0, "not run", OBFUSCATED)
        finding = f"its error is {damage:.0f} % of that of predicting the mean"
        return Check("unbounded", rule, damage >= 100, 100 - damage, 0.0, finding, OBFUSCATED)
    rule = "an attack without a bound must reach 0 %"
    if damage is None:
        return Check("unbounded", rule, None, None, UNBOUNDED_ACCURACY, "not run", OBFUSCATED)
    left, allowed = 100 - damage, evidence.allow(UNBOUNDED_ACCURACY)
    finding = f"it leaves {left:.1f} %{evidence.tell(UNBOUNDED_ACCURACY)}"
    return Check("unbounded", rule, left <= allowed, left, allowed, finding, OBFUSCATED)


def _check_gain(evidence: Evidence, name: str, rule: str, role: Role, publication: str) -> Check:
    gains = []
    for budget in evidence.budgets:
        parts, gradient = (name_parts(evidence.task, budget, each) for each in (role, "gradient"))
        gain = evidence.gain(parts, gradient)
        if gain is not None:
            gains.append((gain, budget))
    if not gains:
        return Check(name, rule, None, None, SLACK, "not run", publication)
    worst, budget = max(gains)
    unit = "% of the images" if evidence.task == "classification" else "% of the mean predictor's error"
    finding = f"at most {worst:.1f} {unit} more than all gradient attacks together (at {budget}){evidence.tell(SLACK)}"
    allowed = evidence.allow(SLACK)
    return Check(name, rule, worst <= allowed, worst, allowed, finding, publication)


def _check_losses(evidence: Evidence) -> Check:
    rule = f"the cross-entropy must not trail the margin loss by more than {LOSS_SLACK:g} points"
    gaps = []
    for budget in evidence.budgets:
        plain, margin = (evidence.damage(f"adaptive/{kind}/{budget}") for kind in ("pgd-ce", "pgd-margin"))
        if plain is not None and margin is not None:
            gaps.append((margin - plain, budget, 100 - plain, 100 - margin))
    if not gaps:
        return Check("losses", rule, None, None, LOSS_SLACK, "not run", RELIABLE)
    gap, budget, plain, margin = max(gaps)
    finding = (
        f"at {budget} cross-entropy leaves {plain:.1f} %, the margin loss {margin:.1f} %{evidence.tell(LOSS_SLACK)}"
    )
    allowed = evidence.allow(LOSS_SLACK)
    return Check("losses", rule, gap <= allowed, gap, allowed, finding, RELIABLE)


def _check_gradients(evidence: Evidence) -> Check:
    rule = "gradients must not be 0 or vanish"
    if "gradients" not in evidence.parts:
        return Check("gradients", rule, None, None, VANISHED_SHARE, "not run", DISTILLATION)
    largest = np.asarray(evidence.parts["gradients"]["largest"], dtype=np.float64)
    share = 100 * float((largest < VANISHING).mean())
    finding = f"{share:.1f} % of the images have none; the median of the largest entry is {np.median(largest):.1e}"
    return Check("gradients", rule, share <= VANISHED_SHARE, share, VANISHED_SHARE, finding, DISTILLATION)


def _check_randomness(evidence: Evidence, usual: str, main: str) -> Check:
    name, rule = "randomness", "averaging gradients over the network's randomness must not help the attacker"
    if not evidence.randomized:
        return Check(name, rule, True, 0.0, LOSS_SLACK, "nothing is random", OBFUSCATED)
    single, averaged = evidence.damage(f"adaptive/{usual}-single/{main}"), evidence.damage(f"adaptive/{usual}/{main}")
    if single is None or averaged is None:
        return Check(name, rule, None, None, LOSS_SLACK, "not run", OBFUSCATED)
    gap = averaged - single
    finding = f"two passes differ; damage {single:.1f} with one draw per gradient, {averaged:.1f} with the average"
    finding += evidence.tell(LOSS_SLACK)
    if not evidence.declared_random:
        finding += (
            "; and the network is random although its mean was asked for, so every single answer is a draw: use the "
            "mode 'sample'"
        )
    allowed = evidence.allow(LOSS_SLACK)
    return Check(name, rule, gap <= allowed and evidence.declared_random, gap, allowed, finding, OBFUSCATED)


def _conclude(evidence: Evidence, broken: list[Check], checks: tuple[Check, ...]) -> str:
    budget = evidence.main
    paper = evidence.worst([f"paper/{name}/{budget}" for name in PAPER])
    adaptive = evidence.worst(ensemble(evidence.task, budget))
    sentences = []
    tried = sum(check.passed is not None for check in checks)
    if broken:
        names = ", ".join(check.name for check in broken)
        number = f"{len(broken)} of the {tried} rules that were tried {'is' if len(broken) == 1 else 'are'} broken"
        sentences.append(f"GRADIENT MASKING: {number} ({names}).")
    else:
        sentences.append(f"No sign of gradient masking: all {tried} rules that were tried hold.")
    if adaptive is not None:
        sentences.append(_state(evidence.task, budget, paper, adaptive, bool(broken)))
    return " ".join(sentences)


def _state(task: str, budget: str, paper: float | None, adaptive: float, masked: bool) -> str:
    if task == "regression":
        seen = "" if paper is None else f"the paper's attacks bring the error to {paper:.0f} %, "
        return f"At ε = {budget} {seen}the adaptive ensemble to {adaptive:.0f} % of that of predicting the mean."
    left = 100 - adaptive
    if paper is None:
        return f"At ε = {budget} the adaptive ensemble leaves {left:.1f} % accuracy."
    gap = adaptive - paper
    sentence = (
        f"At ε = {budget} the paper's attacks leave {100 - paper:.1f} % accuracy, the adaptive ensemble {left:.1f} %"
    )
    if gap > LOSS_SLACK:
        what = "is not robustness; the attacks could not see it" if masked else "is due to the stronger attacks"
        return f"{sentence}: the difference of {gap:.1f} points {what}."
    return f"{sentence}."


def _plain(part: str) -> str:
    return part.split("/")[1]
