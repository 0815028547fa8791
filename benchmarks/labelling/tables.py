"""Tables and the picture, from the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from position_heads.tables import write_table

from labelling.data import SETS, SIDES, SIMULATED, TOLERANCES
from labelling.loop import BY_GAIN, METHODS, OURS, RIDGE
from labelling.running import DLIB, LOOP, SLIP, SPEED, STAGE, Cell
from tensor_dropout.atomic_files import replacing
from tensor_dropout_lab.evaluation.intervals import seed_interval
from tensor_dropout_lab.figures import draw_figure

RECORD, PICTURE = Path("results/labelling.jsonl"), Path("docs/images/labelling.png")
NAMES = {"wings": "fly wings", "retina": "optic disc", "faces": "faces", SIMULATED: "simulated pictures"}
BARS = {"wings": 40, "faces": 65}
"""The most clicks, in % of those by hand."""
COLORS = {OURS: "C3", BY_GAIN: "C1", "first stage alone": "C0", RIDGE: "C2", "ridge alone": "C7"}

Record = dict[Cell, dict[str, Any]]


def rows_of(record: Record, part: str, name: str, method: str, n: int | None = None) -> list[dict[str, Any]]:
    """All runs of a method, in their order."""
    cells = [cell for cell in record if (cell.part, cell.set, cell.method) == (part, name, method)]
    return [record[cell] for cell in sorted(cells, key=lambda cell: cell.run) if n in (None, cell.n)]


def sets_of(record: Record, part: str) -> list[str]:
    """The sets that a part of the record has."""
    there = {cell.set for cell in record if cell.part == part}
    return [name for name in (*SETS, SIMULATED) if name in there]


def mean_interval(values: Sequence[float], decimals: int = 1, *, sign: bool = False) -> str:
    """A mean and its 95 % t interval; the mean alone of a single run; nothing for nothing."""
    if not values:
        return ""
    form = f"{{:{'+' if sign else ''}.{decimals}f}}"
    parts = [float(np.mean(values)), *(seed_interval(list(values)) if len(values) > 1 else ())]
    text = [form.format(part).replace("-", "−") for part in parts]
    return text[0] if len(text) == 1 else f"{text[0]} [{text[1]}, {text[2]}]"


def shares(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Clicks in % of those by hand."""
    return [100 * row["clicks"] / row["by_hand"] for row in rows]


def write_clicks(record: Record) -> str:
    """Clicks of the simulated annotator, in % of those by hand."""
    lines = []
    for name in sets_of(record, LOOP):
        by_method = [shares(rows_of(record, LOOP, name, method)) for method in METHODS]
        first = rows_of(record, LOOP, name, OURS)
        head = [NAMES[name], f"{100 * TOLERANCES[name]:g} %", f"{first[0]['by_hand']:,}", str(len(first))]
        lines.append([*head, *map(mean_interval, by_method)])
    return write_table(["set", "tolerance", "clicks by hand", "runs", *METHODS], lines, 4)


def write_differences(record: Record) -> str:
    """Clicks of the first over those of the second, paired by run, in %."""
    pairs = [(OURS, RIDGE), (OURS, "first stage alone"), ("first stage alone", "ridge alone"), (BY_GAIN, OURS)]
    lines = []
    for name in sets_of(record, LOOP):
        cells = []
        for method, other in pairs:
            a, b = (rows_of(record, LOOP, name, each) for each in (method, other))
            cells.append(
                mean_interval([100 * (x["clicks"] / y["clicks"] - 1) for x, y in zip(a, b, strict=False)], sign=True)
            )
        lines.append([NAMES[name], *cells])
    return write_table(["set", *(f"{a} to {b}" for a, b in pairs)], lines, 1)


def write_stage(record: Record) -> str:
    """Errors on new images, in pixels of the original, before and behind the second stage."""
    lines = []
    for name in sets_of(record, STAGE):
        pixel = SIDES[name] / 100
        for n in sorted({cell.n for cell in record if (cell.part, cell.set) == (STAGE, name)}):
            cells = []
            for method in (OURS, RIDGE):
                for stage in ("first", "second"):
                    errors = [pixel * row[stage]["mean"] for row in rows_of(record, STAGE, name, method, n)]
                    cells.append(mean_interval(errors, 2))
            cells.append(
                mean_interval([pixel * row["second"]["mean"] for row in rows_of(record, DLIB, name, DLIB, n)], 2)
            )
            lines.append([NAMES[name], str(n), *cells])
    head = ["tensor regression", "and second stage", "flattened ridge", "and second stage", "dlib"]
    return write_table(["set", "n", *head], lines, 2)


def write_within(record: Record) -> str:
    """Points of new images within the tolerance, in %; and those inside 90 % ellipses."""
    lines = []
    for name in sets_of(record, STAGE):
        for n in sorted({cell.n for cell in record if (cell.part, cell.set) == (STAGE, name)}):
            ours, ridge = (rows_of(record, STAGE, name, method, n) for method in (OURS, RIDGE))
            columns = [
                [row[stage]["within"] for row in rows] for rows in (ours, ridge) for stage in ("first", "second")
            ]
            columns.append([row["second"]["within"] for row in rows_of(record, DLIB, name, DLIB, n)])
            columns.append([row["inside"] for row in ours if "inside" in row])
            lines.append([NAMES[name], str(n), *map(mean_interval, columns)])
    head = [
        "tensor regression",
        "and second stage",
        "flattened ridge",
        "and second stage",
        "dlib",
        "inside 90 % ellipses",
    ]
    return write_table(["set", "n", *head], lines, 2)


def write_slips(record: Record) -> str:
    """Simulated slips that were found, and good labels that were suspected."""
    lines = []
    for name in sets_of(record, SLIP):
        rows = rows_of(record, SLIP, name, OURS)
        total = {key: sum(row[key] for row in rows) for key in ("slips", "found", "alarms", "good")}
        lines.append([NAMES[name], f"{total['found']} of {total['slips']}", f"{total['alarms']} of {total['good']}"])
    return write_table(["set", "slips found", "good labels suspected"], lines, 1)


def write_speed(record: Record) -> str:
    """Seconds of fits, with the suggestions for all images, and the peak of memory."""
    rows = [row for cell, row in record.items() if cell.part == SPEED]
    counts = [count for count, _, _ in rows[0]["fits"]] if rows else []
    lines = []
    for number, count in enumerate(counts):
        wall, cpu = ([row["fits"][number][k] for row in rows] for k in (1, 2))
        search = "no" if number == len(counts) - 1 else "yes"
        lines.append([str(count), search, f"{min(wall):.1f} to {max(wall):.1f}", f"{min(cpu):.1f} to {max(cpu):.1f}"])
    table = write_table(["labelled", "with other settings tried", "seconds", "seconds of CPU time"], lines, 2)
    peak = max((row["peak_bytes"] for row in rows), default=0) / 2**20
    return f"{table}\n\nPeak of memory: {peak:,.0f} MB beyond what the program had, {len(rows)} runs." if rows else ""


def write_verdict(record: Record) -> str:
    """The bars of the plan."""
    lines = []
    for name, bar in BARS.items():
        found = shares(rows_of(record, LOOP, name, OURS))
        if found:
            told = f"{NAMES[name]}: {mean_interval(found)} % of the clicks by hand, at most {bar} % were asked"
            lines.append(f"- {'met' if np.mean(found) <= bar else '**missed**'}: {told}")
    return "\n".join(lines)


TABLES: dict[str, Callable[[Record], str]] = {
    "verdict": write_verdict,
    "clicks": write_clicks,
    "differences": write_differences,
    "stage": write_stage,
    "within": write_within,
    "slips": write_slips,
    "speed": write_speed,
}


def render(part: str, record: Record) -> str:
    """One of :data:`TABLES`, for the docs."""
    return TABLES[part](record)


def draw(record: Record, path: Path) -> None:
    """Clicks for each image over the images that are labelled, in % of its points: means over runs and 20 images."""
    names = sets_of(record, LOOP)
    if not names:
        return  # only other cells were run
    with draw_figure(10.5, 3.2) as figure:
        panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
        for panel, name in zip(panels, names, strict=True):
            for method in METHODS:
                rows = rows_of(record, LOOP, name, method)
                if method == BY_GAIN or not rows:
                    continue
                points = rows[0]["by_hand"] / len(rows[0]["per_image"])
                clicks = 100 * np.mean([row["per_image"] for row in rows], axis=0) / points
                width = max(1, len(clicks) // 15)
                blocks = clicks[: len(clicks) // width * width].reshape(-1, width).mean(1)
                places = width * (np.arange(len(blocks)) + 0.5)
                style = "--" if "ridge" in method else "-"
                panel.plot(places, blocks, style, color=COLORS[method], label=method)
            panel.set(title=NAMES[name], xlabel="labelled images", ylim=(0, 105))
        panels[0].set_ylabel("simulated clicks, % of by hand")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=4, fontsize=9)
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=110, format="png")
