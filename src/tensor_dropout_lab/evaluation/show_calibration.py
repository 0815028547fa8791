"""The intervals and sets of a calibrated run in words and tables: no torch, the report reads this file."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

NOT_RECORDED = "this record says nothing of it; evaluate the run again"


def name_spread(key: str) -> str:
    """A number that was made of a spread, as a column is called: it must not be taken for the error.

    Example:
        >>> name_spread("coverage_95"), name_spread("width_95_widened")
        ('spread: 95 % covers', 'widened: 95 % width')
    """
    kind = "widened" if key.endswith("_widened") else "spread"
    name, _, percent = key.removesuffix("_widened").partition("_")
    what = {"coverage": "covers", "width": "width"}.get(name, name.upper())
    return f"{kind}: {percent} % {what}" if percent else f"{kind}: {what}"


def print_calibration(found: Mapping[str, Any] | None, split: str, console: Console) -> None:
    """The intervals first, and the masks as their part; or that there are none."""
    if found is None or "missing" in found:
        reason = NOT_RECORDED if found is None else found["missing"]
        console.print(f"No calibration: {escape(reason)}.", highlight=False, soft_wrap=True)
        return
    console.print(escape(describe_calibration(found)), highlight=False)
    if found["task"] == "classification":
        before, after = found["before"], found["after"]
        console.print(
            f"Temperature {found['temperature']:.3g}: NLL {before['nll']:.3g} before, {after['nll']:.3g} after; ECE "
            f"{before['ece']:.2g} before, {after['ece']:.2g} % after",
            highlight=False,
        )
    if not found["held_out"]:
        console.print(
            f"They were made on this very part: what they cover of it says nothing of new examples; evaluate on "
            f"{'validation' if split == 'test' else 'test'}.",
            highlight=False,
            style="bold",
        )
    console.print(tabulate_calibration(found))


def describe_calibration(found: Mapping[str, Any]) -> str:
    """What the calibration was made on, in a sentence."""
    about = found["about"]
    groups = f" in {about['groups']} groups" if about.get("groups") else ""
    of = f" of {about['data']}" if about.get("data") else ""
    return f"Calibrated on {about.get('examples', '?')} {about.get('split', 'held-out')} examples{groups}{of}."


def tabulate_calibration(found: Mapping[str, Any]) -> Table:
    """A row for each coverage, and for each target of several."""
    if found["task"] == "classification":
        table = Table("asked for", "hold the class, %", "classes in a set", title="calibrated sets")
        for row in found["levels"]:
            table.add_row(f"{100 * row['coverage']:g} %", show_share(row), f"{row['size']:.2f}")
        return table
    masks, names = found["masks"] or {}, list(dict.fromkeys(row["target"] for row in found["levels"]))
    heads = ["target"] * (len(names) > 1) + ["asked for", "inside, %", "mean width"] + ["masks, mean std"] * bool(masks)
    table = Table(*heads, title="calibrated intervals" + "; the masks are their part" * bool(masks))
    for row in sorted(found["levels"], key=lambda row: names.index(row["target"])):
        cells = [escape(row["target"])] * (len(names) > 1)
        cells += [f"{100 * row['coverage']:g} %", show_share(row), f"{row['width']:.3g}"]
        table.add_row(*cells, *([f"{masks[row['target']]:.3g}"] if masks else []))
    return table


def show_share(row: Mapping[str, Any]) -> str:
    """A share with its 95 % interval.

    Example:
        >>> show_share({"inside": 91.04, "low": 85.0, "high": 95.25})
        '91.0 [85.0, 95.2]'
    """
    if row["inside"] is None:
        return ""
    ends = "" if row["low"] is None else f" [{row['low']:.1f}, {row['high']:.1f}]"
    return f"{row['inside']:.1f}{ends}"


def read_levels(found: Mapping[str, Any] | None) -> tuple[list[float], list[float]]:
    """Coverages that were asked for and what was inside, both in percent, the mean over targets; empty without.

    Example:
        >>> read_levels({"levels": [{"coverage": 0.5, "inside": 40.0}, {"coverage": 0.5, "inside": 50.0}]})
        ([50.0], [45.0])
    """
    by_level: dict[float, list[float]] = {}
    for row in (found or {}).get("levels", []):
        if row["inside"] is not None:
            by_level.setdefault(row["coverage"], []).append(row["inside"])
    return [100 * level for level in by_level], [fmean(inside) for inside in by_level.values()]
