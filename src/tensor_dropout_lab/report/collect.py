"""From recipes and records to the report: what the paper prints, what we measured, and what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tensor_dropout_lab.experiments.recipes import list_experiments
from tensor_dropout_lab.record_store import RecordStore
from tensor_dropout_lab.report.model import Report, Section
from tensor_dropout_lab.report.sections.ages import build_ages, build_uncertainty
from tensor_dropout_lab.report.sections.attacks import build_attacks
from tensor_dropout_lab.report.sections.beyond import build_conditions, build_settings, build_sizes, build_unknown
from tensor_dropout_lab.report.sections.grids import build_surface, build_tuning
from tensor_dropout_lab.report.sections.noise import build_noise
from tensor_dropout_lab.report.sections.runs import SIZES, Bases
from tensor_dropout_lab.report.sections.scores import build_scores
from tensor_dropout_lab.report.sections.synthetic import build_synthetic

_BUILDERS: dict[str, Callable[[str, Bases, Path], Section]] = {
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
    sections = [build_section(name, bases, figures) for name in list_experiments()]
    cells = [cell for section in sections for table in section.tables for row in table.rows for cell in row]
    measured = sum(cell.state == "ours" for cell in cells)
    masked = [name for section in sections for name, verdict in section.verdicts if verdict.startswith("GRADIENT")]
    summary = [
        "Every table and figure of “Tensor Dropout for Robust Learning” beside what this library measured. Miniatures "
        "run on data that comes with the library; they show that the experiment runs, not what it finds at full size.",
        f"{measured} numbers were measured here; what was not run says so.",
    ]
    if masked:
        summary.append(f"The audit calls {len(masked)} of the attacked networks gradient masking.")
    return Report("Tensor dropout: the paper, rerun", summary, sections, _environment(bases))


def build_section(experiment: str, bases: Bases, figures: Path) -> Section:
    """One table or figure of the paper.

    Args:
        experiment: its name.
        bases: preset -> the folder of its results.
        figures: the folder for its pictures.
    """
    section = _BUILDERS.get(experiment, build_scores)(experiment, bases, figures)
    return section if "quick" in bases else _leave_out(section, SIZES["quick"])


def _leave_out(section: Section, size: str) -> Section:
    """Without the tables, columns and rows of a size of which there is no folder: each would say "not run"."""
    tables = []
    for table in section.tables:
        kept = [k for k, head in enumerate(table.columns) if size not in head]
        rows = [[row[k] for k in kept] for row in table.rows if size not in row[0].text]
        if size not in table.caption:
            tables.append(replace(table, columns=[table.columns[k] for k in kept], rows=rows))
    return replace(section, tables=tables)


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
