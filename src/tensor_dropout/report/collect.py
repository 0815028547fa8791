"""From recipes and records to the report: what the paper prints, what we measured, and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensor_dropout.experiments.cells import Found, find_cell
from tensor_dropout.experiments.recipes import Recipe, describe_experiment, expand, list_experiments, load_recipes
from tensor_dropout.experiments.synthetic import is_stage_of
from tensor_dropout.report import drawings
from tensor_dropout.report.model import Cell, Figure, Report, Section, Table
from tensor_dropout.robustness.measures import proportion_interval, seed_interval

SIZES = {"paper": "ours, full size", "quick": "ours, miniature"}
UNITS = {"accuracy": "accuracy, %", "top5": "top-5, %", "mae": "MAE, years"}
Bases = Mapping[str, Path]
"""Preset -> the folder of its results."""


@dataclass(frozen=True)
class Runs:
    """All runs of one recipe in one preset."""

    recipe: Recipe
    found: list[tuple[Any, Found]]

    def done(self) -> list[Found]:
        """Those that may be averaged."""
        return [found for _, found in self.found if found.state == "done"]

    def broken(self) -> Cell | None:
        """What to show instead of a number, if there is none."""
        states: list[Any] = [found.state for _, found in self.found]
        for state in ("failed", "damaged", "stale"):
            if state in states:
                details = {found.detail for _, found in self.found if found.state == state}
                number = f"{states.count(state)} of {len(states)} runs"
                return Cell(state, state, f"{number}: {'; '.join(sorted(details))}")
        return None if self.done() else Cell("not run", "not run")


def find_runs(experiment: str, bases: Bases, preset: str) -> list[Runs]:
    """The recipes of an experiment with what there is of their runs; none without a folder for the preset."""
    runs = []
    seeds = _find_seeds(bases[preset] / experiment) if preset in bases else None
    for recipe in load_recipes(experiment, preset):
        cells = expand(recipe, preset, seeds=seeds)
        missing = Found("missing", "not run", Path())
        runs.append(
            Runs(recipe, [(cell, find_cell(cell, bases[preset]) if preset in bases else missing) for cell in cells])
        )
    return runs


def _find_seeds(folder: Path) -> list[int] | None:
    """The seeds that were run; None if there are none."""
    found = {path.parent.name.rpartition("-seed")[2] for path in folder.glob("*-seed*/cell.json")}
    return sorted(int(seed) for seed in found if seed.isdigit()) or None


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
    builders: dict[str, Callable[[str, Bases, Path], Section]] = {
        "synthetic-cp": _build_synthetic,
        "synthetic-tucker": _build_synthetic,
        "imagenet-attacks": _build_attacks,
        "cifar100-attacks": _build_attacks,
        "mri-noise": _build_noise,
        "cifar100-surface": _build_surface,
        "cifar100-tuning": _build_tuning,
    }
    return builders.get(experiment, _build_scores)(experiment, bases, figures)


def _label(experiment: str, preset: str) -> str:
    return str(describe_experiment(experiment).get(preset, {}).get("label", ""))


def _open(experiment: str, bases: Bases, **content: Any) -> Section:
    """A section with its title, its reference and its label."""
    said = describe_experiment(experiment)
    labels = [_label(experiment, preset) for preset in ("paper", "quick") if preset in bases]
    label = "; ".join(dict.fromkeys(label for label in labels if label))
    return Section(experiment, said["title"], said["reference"], label, **content)


# Tables of one number per run.


def _build_scores(experiment: str, bases: Bases, figures: Path) -> Section:
    metrics = describe_experiment(experiment)["metrics"]
    sizes = {preset: find_runs(experiment, bases, preset) for preset in ("paper", "quick")}
    columns = ["", *(f"{UNITS[metric]}, {source}" for metric in metrics for source in ("paper", *SIZES.values()))]
    rows = []
    for k, runs in enumerate(sizes["paper"]):
        row = [Cell(runs.recipe.row)]
        for metric in metrics:
            row.append(Cell(f"{runs.recipe.printed[metric]:g}", "paper"))
            row += [_score(sizes[preset][k], metric) for preset in SIZES]
        rows.append(row)
    note = (
        "Several seeds: mean ± half of the 95 % interval (Student's t), and the number of seeds in brackets. One seed: "
        "the 95 % interval over test images (Wilson), for accuracies. Miniatures are of other data: compare their rows "
        "with each other, never with the paper's."
    )
    return _open(experiment, bases, tables=[Table(describe_experiment(experiment)["title"], columns, rows, note)])


def _score(runs: Runs, metric: str, part: str = "test") -> Cell:
    """The mean over seeds of a metric on a part of the data; failed and stale runs are never averaged in."""
    broken = runs.broken()
    if broken is not None:
        return broken
    done = runs.done()
    values = [found.result[part][metric] for found in done if found.result is not None]
    return show_number(values, metric, _count_examples(done[0], part), part)


def _count_examples(found: Found, part: str) -> int | None:
    examples = (found.record or {}).get("data", {}).get("examples", {})
    return examples.get(part)


def show_number(values: Sequence[float], metric: str, examples: int | None, part: str = "test") -> Cell:
    """A measured number with its interval.

    Example:
        >>> show_number([75.0, 77.0], "accuracy", None).text
        '76.00 ± 12.71 (2)'
    """
    mean = float(np.mean(values))
    if len(values) > 1:
        low, high = seed_interval(values)
        listed = ", ".join(f"{value:.2f}" for value in values)
        detail = f"{len(values)} seeds: {listed}; 95 % interval {low:.2f} to {high:.2f}"
        return Cell(f"{mean:.2f} ± {(high - low) / 2:.2f} ({len(values)})", "ours", detail)
    if metric in ("accuracy", "top5") and examples:
        low, high = proportion_interval(round(mean / 100 * examples), examples)
        detail = f"one seed, {examples} {part} images: 95 % interval {100 * low:.2f} to {100 * high:.2f}"
        return Cell(f"{mean:.2f} [{100 * low:.1f}, {100 * high:.1f}]", "ours", detail)
    return Cell(f"{mean:.2f} (1)", "ours", "one seed")


# Attacks.


def _build_attacks(experiment: str, bases: Bases, figures: Path) -> Section:
    tables, pictures, verdicts = [], [], []
    sizes = {preset: find_runs(experiment, bases, preset) for preset in SIZES}
    for runs in zip(*sizes.values(), strict=True):
        rows = _list_printed(runs[0].recipe)
        for preset, own in zip(SIZES, runs, strict=True):
            for cell, found in own.found:
                rows += _list_attacks(_name_point("", cell.point), SIZES[preset], found)
                if found.state == "done" and found.evaluation and "audit" in found.evaluation["summary"]:
                    name = _name_point(own.recipe.row, cell.point)
                    verdicts.append((f"{name} ({SIZES[preset]})", found.evaluation["summary"]["audit"]["verdict"]))
        columns = ["attack", "whose", *(f"ε = {radius}" for radius in RADII)]
        tables.append(Table(f"{runs[0].recipe.row}: accuracy in % under attack", columns, rows))
    for preset, size in SIZES.items():
        curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for own in sizes[preset]:
            for cell, found in own.found:
                if found.state == "done" and found.evaluation:
                    label = _name_point("", cell.point) or own.recipe.row
                    panel = curves.setdefault(own.recipe.row if cell.point else "", {})
                    panel[label] = _fgsm_curve(found.evaluation["summary"])
        if curves:
            stem = figures / f"{experiment}-{preset}"
            drawings.draw_curves(curves, stem, f"{describe_experiment(experiment)['title']}, {size}")
            alt = "Accuracy over the magnitude of FGSM, one curve per network: " + drawings.describe_curves(curves)
            pictures.append(
                Figure(stem.with_suffix(".svg"), alt, f"FGSM, the paper's protocol, {size}", _label(experiment, preset))
            )
    return _open(experiment, bases, tables=tables, figures=pictures, verdicts=verdicts, notes=[_ATTACKS])


RADII = ("2/255", "8/255", "16/255")
_ATTACKS = (
    "The paper's attacks are FGSM, BIM and PGD with the cross-entropy. The adaptive ensemble at the same radius "
    "(margin and DLR losses, APGD, transfer, Square) is the number to trust: what only the first three leave is not "
    "robustness."
)


def _list_printed(recipe: Recipe) -> list[list[Cell]]:
    rows = []
    for attack, numbers in recipe.printed.items():
        rows.append([Cell(attack.upper()), Cell("paper"), *(Cell(f"{numbers[radius]:g}", "paper") for radius in RADII)])
    return rows


def _list_attacks(point: str, size: str, found: Found) -> list[list[Cell]]:
    """Rows of one network: the paper's attacks, then the worst case of the adaptive ensemble."""
    whose = f"{size}, {point}" if point else size
    if found.state != "done" or found.evaluation is None:
        state: Any = found.state if found.state in ("failed", "stale", "damaged") else "not run"
        detail = found.detail if state != "not run" else ""
        return [[Cell("all attacks"), Cell(whose), *(Cell(state, state, detail) for _ in RADII)]]
    summary, rows = found.evaluation["summary"], []
    for attack in ("fgsm", "bim", "pgd"):
        own = [row for row in summary["attacks"] if row["protocol"] == "paper" and row["attack"] == attack]
        measured = {row["budget"]: row for row in own}
        rows.append([Cell(attack.upper()), Cell(whose), *(_attacked(measured.get(radius)) for radius in RADII)])
    worst = {row["budget"]: row.get("adaptive") for row in summary["worst_case"]}
    rows.append([Cell("adaptive ensemble"), Cell(whose), *(_attacked(worst.get(radius)) for radius in RADII)])
    return rows


def _attacked(row: Mapping[str, Any] | None) -> Cell:
    if row is None:
        return Cell("not run", "not run")
    metric = "accuracy" if "accuracy" in row else "mae"
    detail = f"95 % interval {row['low']:.1f} to {row['high']:.1f} over images"
    return Cell(f"{row[metric]:.1f}", "ours", detail)


def _fgsm_curve(summary: Mapping[str, Any]) -> list[tuple[float, float]]:
    found = {
        row["epsilon"]: row["accuracy"]
        for row in summary["attacks"]
        if row["protocol"] == "paper" and row["attack"] == "fgsm" and row["budget"].endswith("e-3")
    }
    return sorted(found.items())


def _name_point(row: str, point: Mapping[str, Any]) -> str:
    words = [f"{_name_key(key)} = {value:g}" for key, value in point.items()]
    return ", ".join([*([row] if row else []), *words])


def _name_key(key: str) -> str:
    """A key of the config in words.

    Example:
        >>> _name_key("net.theta"), _name_key("net.drop_rate")
        ('θ', 'drop rate')
    """
    name = key.rpartition(".")[2]
    return {"theta": "θ"}.get(name, name.replace("_", " "))


# Noise.


def _build_noise(experiment: str, bases: Bases, figures: Path) -> Section:
    tables, pictures = [], []
    for preset, size in SIZES.items():
        curves: dict[str, list[dict[str, Any]]] = {}
        rows: list[tuple[str, Cell | None, dict[float | None, dict[str, Any]]]] = []
        levels: list[float] = []
        for runs in find_runs(experiment, bases, preset):
            broken = runs.broken()
            if broken is not None:
                rows.append((runs.recipe.row, broken, {}))
                continue
            pooled = _pool_noise([found.evaluation["summary"] for found in runs.done() if found.evaluation])
            curves[runs.recipe.row] = list(pooled.values())
            levels = levels or [level for level in pooled if level is not None]
            rows.append((runs.recipe.row, None, pooled))
        columns = (
            ["head", "clean", *(f"SNR {level:g}" for level in levels)] if levels else ["head", "clean and under noise"]
        )
        cells = []
        for name, missing, pooled in rows:
            width = len(columns) - 1
            if missing is not None:
                cells.append([Cell(name), *([missing] * width)])
            else:
                cells.append([Cell(name), *(_noisy(pooled[level]) for level in (None, *levels))])
        caption = f"Mean absolute error in years under white Gaussian noise, {size}"
        tables.append(Table(caption, columns, cells, _NOISE_NOTE, _label(experiment, preset)))
        if curves:
            stem = figures / f"{experiment}-{preset}"
            drawings.draw_noise(curves, stem, f"{describe_experiment(experiment)['title']}, {size}")
            alt = (
                f"Mean absolute error over SNR for {', '.join(curves)}, with bands of 95 %; it grows as the SNR falls."
            )
            pictures.append(Figure(stem.with_suffix(".svg"), alt, f"MAE over SNR, {size}", _label(experiment, preset)))
    return _open(experiment, bases, tables=tables, figures=pictures)


_NOISE_NOTE = (
    "SNR = σ²(signal)/σ²(noise). Intervals: one run, over draws and scans (bootstrap); several runs, over runs (t)."
)


def _pool_noise(summaries: list[dict[str, Any]]) -> dict[float | None, dict[str, Any]]:
    """Level -> mean and interval; None is clean."""
    pooled: dict[float | None, dict[str, Any]] = {}
    per_run = [
        {None: each["clean"], **{row["level"]: row for row in each["noise"] if row["corruption"] == "gaussian"}}
        for each in summaries
    ]
    for level in per_run[0]:
        values = [run[level]["mae"] for run in per_run]
        low, high = seed_interval(values) if len(values) > 1 else (per_run[0][level]["low"], per_run[0][level]["high"])
        pooled[level] = {"level": level, "mae": float(np.mean(values)), "low": low, "high": high, "runs": len(values)}
    return pooled


def _noisy(row: Mapping[str, Any]) -> Cell:
    detail = f"95 % interval {row['low']:.2f} to {row['high']:.2f}, {row['runs']} run{'s' * (row['runs'] > 1)}"
    return Cell(f"{row['mae']:.2f}", "ours", detail)


# The surface.


def _build_surface(experiment: str, bases: Bases, figures: Path) -> Section:
    tables, pictures = [], []
    for preset, size in SIZES.items():
        panels: dict[str, list[tuple[float, float, float]]] = {}
        for runs in find_runs(experiment, bases, preset):
            tables.append(_build_grid(runs, "test", f"accuracy in %, {size}", _label(experiment, preset)))
            if preset == "paper":
                caption = f"accuracy in % on held-out training images, {size}"
                tables.append(_build_grid(runs, "validation", caption, _label(experiment, preset)))
            for cell, found in runs.found:
                if found.state == "done" and found.result:
                    point = (
                        found.result["compression_ratio"],
                        cell.point["net.theta"],
                        found.result["test"]["accuracy"],
                    )
                    panels.setdefault(runs.recipe.row, []).append(point)
        if panels:
            stem = figures / f"{experiment}-{preset}"
            drawings.draw_surface(panels, stem, f"{describe_experiment(experiment)['title']}, {size}")
            alt = "Accuracy by compression ratio and θ: " + drawings.describe_surface(panels)
            pictures.append(
                Figure(
                    stem.with_suffix(".svg"),
                    alt,
                    f"Accuracy over compression ratio and θ, {size}",
                    _label(experiment, preset),
                )
            )
    return _open(experiment, bases, tables=tables, figures=pictures)


def _build_grid(runs: Runs, part: str, caption: str, label: str) -> Table:
    """One number per point of a recipe's grid: the last key across, the others down."""
    *down, across = runs.found[0][0].point
    values = list(dict.fromkeys(cell.point[across] for cell, _ in runs.found))
    rows = []
    for name in dict.fromkeys(_name_values(cell.point, down) for cell, _ in runs.found):
        own = [(cell, found) for cell, found in runs.found if _name_values(cell.point, down) == name]
        ratios = [found.result["compression_ratio"] for _, found in own if found.state == "done" and found.result]
        row = [Cell(name), Cell(f"{ratios[0]:.1f}" if ratios and ratios[0] else "")] if down else [Cell("")]
        for value in values:
            chosen = [(cell, found) for cell, found in own if cell.point[across] == value]
            row.append(_score(Runs(runs.recipe, chosen), "accuracy", part))
        rows.append(row)
    head = [", ".join(_name_key(key) for key in down), "compression ratio"] if down else [""]
    columns = [*head, *(f"{_name_key(across)} = {value:g}" for value in values)]
    return Table(f"{runs.recipe.row}: {caption}", columns, rows, label=label)


def _name_values(point: Mapping[str, Any], keys: Sequence[str]) -> str:
    return ", ".join(
        "×".join(map(str, point[key])) if isinstance(point[key], list) else str(point[key]) for key in keys
    )


# What was chosen.


def _build_tuning(experiment: str, bases: Bases, figures: Path) -> Section:
    tables = []
    for preset, size in SIZES.items():
        for runs in find_runs(experiment, bases, preset):
            caption = f"accuracy in % on held-out training images, {size}"
            tables.append(_build_grid(runs, "validation", caption, _label(experiment, preset)))
    note = "Held-out training images choose; the test images of these runs are not looked at."
    return _open(experiment, bases, tables=tables, notes=[note])


# Synthetic data.


def _build_synthetic(experiment: str, bases: Bases, figures: Path) -> Section:
    tables, pictures = [], []
    for preset, size in SIZES.items():
        path = bases[preset] / experiment / "white.json" if preset in bases else None
        record = drawings.read_stage(path) if path is not None else None
        state: Any = "not run"
        if path is not None and path.is_file():
            state = "damaged" if record is None else "ours" if is_stage_of(record, experiment, preset) else "stale"
        if state == "stale":
            record = None
        columns = [
            "θ",
            "final loss, deterministic",
            "final loss, stochastic",
            "mean gap ± std over mask seeds",
            "printed formula off by",
        ]
        if record is None:
            rows = [[Cell("all θ"), *(Cell(state, state) for _ in columns[1:])]]
        else:
            rows = [
                [Cell(f"{row[0]:g}"), *(Cell(text, "ours") for text in row[1:])]
                for row in drawings.describe_stage(record)
            ]
            stem = figures / f"{experiment}-{preset}"
            drawings.draw_stage(record, stem)
            alt = (
                "Five panels, one per θ: the stochastic loss and its exact deterministic form over the epochs; a third "
                "curve is training on the printed formula."
            )
            pictures.append(
                Figure(
                    stem.with_suffix(".svg"),
                    alt,
                    f"Loss over epochs, simulated white inputs, {size}",
                    _label(experiment, preset),
                )
            )
        caption = f"Exact expected loss, simulated white inputs, {size}"
        tables.append(Table(caption, columns, rows, label=_label(experiment, preset)))
    notes = ["The paper shows these curves and calls them identical; it prints no numbers."]
    return _open(experiment, bases, tables=tables, figures=pictures, notes=notes)


def _environment(bases: Bases) -> list[tuple[str, str]]:
    """Hardware and versions of all records, each combination once."""
    import json

    seen: dict[tuple[str, str], None] = {}
    for preset, base in bases.items():
        patterns = ("*/*/run.json", "*/*.json", "*/*/evaluation.json", "*/*/evaluation/evaluation.json")
        for path in sorted(path for pattern in patterns for path in base.glob(pattern)):
            try:
                said = json.loads(path.read_text(encoding="utf-8")).get("environment")
            except (ValueError, AttributeError):
                continue
            if isinstance(said, dict) and "torch" in said:
                device = said.get("gpu") or f"{said.get('cpu_count', '?')} CPU cores"
                versions = (
                    f"tensor-dropout {said.get('tensor_dropout')}, torch {said['torch']}, Python {said.get('python')}"
                )
                seen[SIZES[preset], f"{device}; {versions}"] = None
    return list(seen)
