"""Tables, from the records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from position import write_table

from tensor_dropout_lab.evaluation.intervals import seed_interval
from uncertainty import classes, methods
from uncertainty.running import CIFAR, IXI, RECORD, SIMULATED, Cell, read_record
from uncertainty.timing import OUTPUTS
from uncertainty.timing import RECORD as SPEED

NAMES = {"wings": "fly wings", "retina": "optic disc", "faces": "faces", IXI: "brain age (IXI)", SIMULATED: "simulated"}
OURS = methods.OURS

Record = dict[Cell, dict[str, Any]]
Groups = dict[tuple[str, int], list[dict[str, Any]]]
"""By set and n: a row for each split."""


def group_rows(record: Record) -> Groups:
    """Of regressions, in the plan's order."""
    groups: Groups = {}
    order = tuple(NAMES)
    known = [item for item in record.items() if item[0].set in order]
    for cell, row in sorted(known, key=lambda item: (order.index(item[0].set), item[0].n, item[0].split)):
        groups.setdefault((cell.set, cell.n), []).append(row)
    return groups


def draws_of(record: Record) -> list[dict[str, Any]]:
    return [row for cell, row in sorted(record.items()) if cell.set == CIFAR]


def name_group(key: tuple[str, int], rows: Sequence[Any]) -> str:
    return f"{NAMES[key[0]]}, n = {key[1]} ({len(rows)} splits)"


def write_number(value: float, decimals: int, sign: bool = False) -> str:
    return f"{value:{'+' if sign else ''}.{decimals}f}".replace("-", "−")


def write_mean(numbers: Sequence[float], decimals: int, *, sign: bool = False, bold: bool = False) -> str:
    """A mean and its 95 % t interval; bold where that leaves out 0."""
    if not numbers:
        return ""
    mean = write_number(float(np.mean(numbers)), decimals, sign)
    if len(numbers) < 2:
        return mean
    low, high = seed_interval(numbers)
    text = f"{mean} [{write_number(low, decimals, sign)}, {write_number(high, decimals, sign)}]"
    return f"**{text}**" if bold and (low > 0 or high < 0) else text


def values(rows: Sequence[dict[str, Any]], method: str, version: str, key: str) -> dict[int, float]:
    """By the place of the split, where the method was run."""
    known = {k: row["methods"].get(method, {}).get(version) for k, row in enumerate(rows)}
    return {k: scores[key] for k, scores in known.items() if scores is not None}


def differences(
    rows: Sequence[dict[str, Any]], method: str, key: str, *, version: str = "calibrated", relative: bool = False,
    base: str = OURS,
) -> list[float]:  # fmt: skip
    """To the base, calibrated, split by split; relative ones in %."""
    own, other = values(rows, method, version, key), values(rows, base, "calibrated", key)
    pairs = [(own[k], other[k]) for k in own if k in other]
    return [100 * (a / b - 1) if relative else a - b for a, b in pairs]


def shown(groups: Groups) -> list[str]:
    """Without Laplace's Kronecker form, whose scores are those of the full one within a thousandth."""
    known = {name for rows in groups.values() for row in rows for name in row["methods"]}
    return [name for name in methods.METHODS if name in known and name != methods.LAPLACE["kron"]]


def label(method: str) -> str:
    return "Laplace, full and Kronecker" if method == methods.LAPLACE["full"] else method


def compare(groups: Groups, key: str, decimals: int, *, relative: bool = False, version: str = "calibrated") -> str:
    """Ours as it is, the others as differences to it; bold where the interval leaves out 0."""
    lines = []
    for method in shown(groups):
        cells = []
        for rows in groups.values():
            if method == OURS:
                cells.append(write_mean([*values(rows, OURS, "calibrated", key).values()], 4 if relative else decimals))
            else:
                found = differences(rows, method, key, version=version, relative=relative)
                cells.append(write_mean(found, decimals, sign=True, bold=True))
        if any(cells):
            lines.append([label(method), *cells])
    return write_table(["", *(name_group(key, rows) for key, rows in groups.items())], lines, 1)


def write_scores(groups: Groups, key: str, decimals: int, scale: float = 1.0, left_out: Sequence[str] = ()) -> str:
    """Every method as it is, calibrated."""
    lines = []
    for method in shown(groups):
        if method in left_out:
            continue
        found = [[scale * v for v in values(rows, method, "calibrated", key).values()] for rows in groups.values()]
        lines.append([label(method), *(write_mean(each, decimals) for each in found)])
    return write_table(["", *(name_group(key, rows) for key, rows in groups.items())], lines, 1)


def write_coverage(groups: Groups) -> str:
    """Targets inside 90 % intervals: raw, scaled, calibrated."""
    lines = []
    for method in shown(groups):
        cells = []
        for rows in groups.values():
            means = []
            for version in ("raw", "scaled", "calibrated"):
                found = values(rows, method, version, "coverage_90")
                means.append(write_number(100 * float(np.mean([*found.values()])), 1) if found else "–")
            cells.append(" / ".join(means) if set(means) != {"–"} else "")
        lines.append([label(method), *cells])
    return write_table(["", *(name_group(key, rows) for key, rows in groups.items())], lines, 1)


def judge(numbers: Sequence[float], better: int) -> str:
    """Better, level or worse than ours; ``better`` is the sign of a good difference."""
    if len(numbers) < 2:
        return ""
    low, high = (better * end for end in seed_interval(numbers))
    return "better" if min(low, high) > 0 else "worse" if max(low, high) < 0 else "level"


VERDICTS = (
    ("NLL", "nll", -1, False), ("CRPS", "crps", -1, False), ("width at 90 %", "width_90", -1, True),
    ("rank correlation", "rank_correlation", 1, False), ("AURC", "risk_area", -1, False),
    ("large errors", "large_errors", 1, False),
)  # fmt: skip


def write_verdict(groups: Groups) -> str:
    """In how many sets a method is better, level, worse than ours, by measure."""
    lines = []
    for method in shown(groups):
        if method == OURS:
            continue
        cells = []
        for _, key, sign, relative in VERDICTS:
            found = [judge(differences(rows, method, key, relative=relative), sign) for rows in groups.values()]
            cells.append(" / ".join(str(found.count(word)) for word in ("better", "level", "worse")))
        lines.append([label(method), *cells])
    return write_table(["to the leverage", *(name for name, *_ in VERDICTS)], lines, 1)


def write_seconds(groups: Groups) -> str:
    """Of the processor, a cell: fits on all and on five folds, settings and predictions."""
    steps = [*dict.fromkeys(step for rows in groups.values() for row in rows for step in row["seconds"])]
    lines = []
    for step in steps:
        found = [[row["seconds"][step] for row in rows if step in row["seconds"]] for rows in groups.values()]
        lines.append([step, *(write_number(float(np.median(each)), 1) if each else "" for each in found)])
    return write_table(["", *(name_group(key, rows) for key, rows in groups.items())], lines, 1)


# Classes.

COLUMNS = (
    ("accuracy, %", "calibrated", "accuracy", 100, 1), ("NLL, raw", "raw", "nll", 1, 2),
    ("NLL", "calibrated", "nll", 1, 2), ("ECE, raw, %", "raw", "ece", 100, 1), ("ECE, %", "calibrated", "ece", 100, 1),
    ("AURC, %", "calibrated", "risk_area", 100, 1), ("unknown classes, %", "calibrated", "unknown", 100, 1),
    ("by entropy, %", "calibrated", "unknown_entropy", 100, 1),
)  # fmt: skip
SETS = (
    ("in filled sets, %", "raw", "set_coverage_90", 100, 1), ("their size", "raw", "set_size_90", 1, 1),
    ("in conformal sets, %", "calibrated", "set_coverage_90", 100, 1),
    ("their size", "calibrated", "set_size_90", 1, 1),
    ("95 % sets, %", "calibrated", "set_coverage_95", 100, 1), ("their size", "calibrated", "set_size_95", 1, 1),
)  # fmt: skip


def write_classes(rows: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str, str, int, int]]) -> str:
    """Means over draws with intervals."""
    lines = []
    for method in classes.METHODS:
        if any(method in row["methods"] for row in rows):
            cells = [[scale * v for v in values(rows, method, version, key).values()]
                     for _, version, key, scale, _ in columns]  # fmt: skip
            lines.append([method, *(write_mean(each, column[4]) for each, column in zip(cells, columns, strict=True))])
    return write_table(["", *(column[0] for column in columns)], lines, 1)


def compare_classes(rows: Sequence[dict[str, Any]]) -> str:
    """Differences to the tensor head, draw by draw; bold where the interval leaves out 0."""
    columns = [column for column in (*COLUMNS, SETS[3]) if column[1] == "calibrated"]
    lines = []
    for method in classes.METHODS[1:]:
        if any(method in row["methods"] for row in rows):
            cells = [
                [scale * v for v in differences(rows, method, key, base=classes.OURS)]
                for _, _, key, scale, _ in columns
            ]
            texts = [
                write_mean(each, max(2, column[4]), sign=True, bold=True)
                for each, column in zip(cells, columns, strict=True)
            ]
            lines.append([method, *texts])
    header = [name.replace("their size", "size of 90 % sets") for name, *_ in columns]
    return write_table(["to the tensor head", *header], lines, 1)


# Time and memory.


def write_cost(speed: dict[str, Any], key: str, scale: float) -> str:
    """By number of outputs; why there is no number, where there is none."""
    lines = []
    for method, rows in speed["methods"].items():
        cells = []
        for outputs in OUTPUTS:
            row = rows[str(outputs)]
            cells.append(f"stopped: {row['stopped']}" if "stopped" in row else round_to_three(scale * row[key]))
        lines.append([method, *cells])
    return write_table(["outputs", *(f"{outputs:,}" for outputs in OUTPUTS)], lines, 1)


def round_to_three(value: float) -> str:
    """To two or three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


PARTS: dict[str, Callable[[Groups], str]] = {
    "verdict": write_verdict,
    "nll": lambda groups: compare(groups, "nll", 3),
    "raw nll": lambda groups: compare(groups, "nll", 2, version="raw"),
    "scaled nll": lambda groups: compare(groups, "nll", 3, version="scaled"),
    "crps": lambda groups: compare(groups, "crps", 1, relative=True),
    "errors": lambda groups: compare(groups, "mae", 1, relative=True),
    "coverage": write_coverage,
    "widths": lambda groups: compare(groups, "width_90", 1, relative=True),
    "scaled widths": lambda groups: compare(groups, "width_90", 1, relative=True, version="scaled"),
    "ranks": lambda groups: write_scores(groups, "rank_correlation", 2, left_out=(methods.CONSTANT, methods.LAST)),
    "risk": lambda groups: write_scores(groups, "risk_area", 2, left_out=(methods.CONSTANT, methods.LAST)),
    "large errors": lambda groups: write_scores(
        groups, "large_errors", 2, left_out=(methods.CONSTANT, methods.LAST)
    ),
    "seconds": write_seconds,
}  # fmt: skip
CLASS_PARTS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "classes": lambda rows: write_classes(rows, COLUMNS),
    "sets": lambda rows: write_classes(rows, SETS),
    "classes compared": compare_classes,
}
COSTS = {"time": ("seconds", 1e3), "memory": ("bytes", 1e-6), "ready": ("ready", 1.0)}


def render(part: str, root: Path = Path()) -> str:
    """A table of the docs, from the records below a folder."""
    if part in COSTS:
        return write_cost(json.loads((root / SPEED).read_text(encoding="utf-8")), *COSTS[part])
    return render_rows(part, read_record(root / RECORD))


def render_rows(part: str, record: Record) -> str:
    """One of the parts that the record of cells makes."""
    return CLASS_PARTS[part](draws_of(record)) if part in CLASS_PARTS else PARTS[part](group_rows(record))
