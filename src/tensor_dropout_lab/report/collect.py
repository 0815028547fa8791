"""From recipes and records to the report: verdicts first, then the full size, then the miniatures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from tensor_dropout_lab.experiments.recipes import list_experiments
from tensor_dropout_lab.record_store import RecordStore
from tensor_dropout_lab.report.claims import judge_claims
from tensor_dropout_lab.report.drawings import draw_claim
from tensor_dropout_lab.report.model import VERDICTS, Judged, Report, Section
from tensor_dropout_lab.report.sections.ages import build_ages, build_uncertainty
from tensor_dropout_lab.report.sections.attacks import build_attacks
from tensor_dropout_lab.report.sections.beyond import build_conditions, build_settings, build_sizes, build_unknown
from tensor_dropout_lab.report.sections.calibration import add_calibration
from tensor_dropout_lab.report.sections.grids import build_surface, build_tuning
from tensor_dropout_lab.report.sections.noise import build_noise
from tensor_dropout_lab.report.sections.runs import Part
from tensor_dropout_lab.report.sections.scores import build_scores
from tensor_dropout_lab.report.sections.synthetic import build_synthetic

Bases = Mapping[str, Path]
"""Preset -> the folder of its results."""
SIZES: dict[str, str] = {"paper": "full size", "quick": "miniatures"}

_BUILDERS: dict[str, Callable[[Part], Section]] = {
    "synthetic-cp": build_synthetic,
    "synthetic-tucker": build_synthetic,
    "imagenet-attacks": build_attacks,
    "cifar100-attacks": build_attacks,
    "mri": build_ages,
    "mri-small": build_ages,
    "mri-noise": build_noise,
    "mri-uncertainty": build_uncertainty,
    "mri-tuning": build_tuning,
    "cifar100-surface": build_surface,
    "cifar100-tuning": build_tuning,
    "beyond-search": build_tuning,
    "beyond-laptop-search": build_tuning,
    "beyond-laptop-settings": build_settings,
    "beyond-defaults": build_settings,
    "beyond-small": build_conditions,
    "beyond-labels": build_conditions,
    "beyond-unknown": build_unknown,
    "beyond-sizes": build_sizes,
}


def collect(bases: Bases, figures: Path) -> Report:
    """The whole report.

    Args:
        bases: preset -> the folder of its results.
        figures: the folder for pictures.
    """
    sections = {
        preset: [build_section(name, preset, base, figures) for name in _list_experiments(preset, base)]
        for preset, base in bases.items()
    }
    summary = [
        "The claims of “Tensor Dropout for Robust Learning”, each with a verdict that follows from our records by a "
        "rule; then its tables and figures, ours beside the paper's."
    ]
    if "paper" not in bases:
        summary.append("There are no records of the full size here, so no claim is judged: this page has miniatures.")
    judged = judge_claims(bases["paper"]) if "paper" in bases else []
    if judged:
        counts = Counter(claim.verdict for claim in judged)
        words = ", ".join(f"“{verdict}” {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
        summary.append(
            f"Verdicts on {len(judged)} claims: {words}. They come from records of the full size, not from miniatures."
        )
    claims = [
        Judged(claim, draw_claim(claim, figures / f"claim-{number}") if claim.measures else None)
        for number, claim in enumerate(judged, 1)
    ]
    return Report(
        "Tensor dropout: the paper, rerun",
        summary,
        sections.get("paper", []),
        _environment(bases),
        claims=claims,
        miniatures=sections.get("quick", []),
    )


def _list_experiments(preset: str, base: Path) -> list[str]:
    """All at full size, where what was not run must be seen; of the miniatures those that were run."""
    there = RecordStore(base).list_experiments()
    return [name for name in list_experiments() if preset == "paper" or name in there]


def build_section(experiment: str, preset: str, base: Path, figures: Path) -> Section:
    """One table or figure of the paper at one size.

    Args:
        experiment: its name.
        preset: "paper" or "quick".
        base: the folder of its results.
        figures: the folder for its pictures.
    """
    part = Part(experiment, preset, base, figures)
    section = _BUILDERS.get(experiment, build_scores)(part)
    return section if _BUILDERS.get(experiment) is build_synthetic else add_calibration(section, part)


def _environment(bases: Bases) -> list[tuple[str, str]]:
    """Hardware and versions of all records, each combination once."""
    seen: dict[tuple[str, str], None] = {}
    for preset, base in bases.items():
        for environment in RecordStore(base).list_environments():
            if "torch" not in environment:
                continue
            device = environment.get("gpu") or f"{environment.get('cpu_count', '?')} CPU cores"
            packages = (("tensor-dropout", "tensor_dropout"), ("torch", "torch"), ("Python", "python"))
            versions = ", ".join(f"{name} {environment.get(key)}" for name, key in packages)
            seen[SIZES[preset], f"{device}; {versions}"] = None
    return list(seen)
