"""The record as Markdown: a summary, a table per head, growth, and how it was measured."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from heads.cases import CASES

Cell = dict[str, Any]
PASSES = {"forward": "forward", "both": "forward + backward"}
MISSING = "–"
ABOUT = """\
Times are medians of samples taken in turn from all contenders, with the smallest, the largest and the interquartile
range (IQR). × floor of x: over the time that moving x takes at the bandwidth above (forward: read once; forward +
backward: read twice, its gradient written); × floor: with the parameters (read) and their gradients (written). Kept:
bytes kept for backward besides x and the parameters. Peak: of one pass, with x and the parameters. Multiply-adds are
those of matrix products; elementwise work is not counted."""
BUFFERS = {
    "cpu": "There is one input buffer: small inputs stay in the cache, and can be below 1 × floor.",
    "cuda": "Inputs rotate over more than four times the L2 cache; parameters do not.",
}


def write_report(record: dict[str, Any]) -> str:
    """The whole report."""
    cells = record["cells"]
    parts = [write_head(record), write_summary(record)]
    for case, of_case in groupby(cells, key=lambda cell: cell["case"]):
        parts.append(f"## {CASES[case].title}, {CASES[case].shape}")
        parts += write_case(list(of_case))
    parts += [write_growth(record["growth"]), write_checks(record["checks"])]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_head(record: dict[str, Any]) -> str:
    """Where and how."""
    environment, ceilings, device = record["environment"], record["ceilings"], record["settings"]["device"]
    where = write_device(record)
    commit = environment.get("commit", "unknown")[:7] + (" with changes" if environment.get("dirty") else "")
    versions = [f"torch {environment['torch']}", f"Python {environment['python']}", f"commit {commit}"]
    versions.append(f"TensorLy-Torch {environment['tensorly-torch']}")
    lines = [f"# Heads on {where}", f"{', '.join(versions)}. `{environment['command']}`"]
    if ceilings:
        rates = ceilings["operations_per_second"].items()
        products = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in rates)
        copied = f"copy {ceilings['bytes_per_second'] / 1e9:,.4g} GB/s (read + written)"
        lines.append(f"Measured in the same run: {copied}; matrix products {products}.")
    lines.append(ABOUT + " " + BUFFERS[device])
    if device == "cpu" and environment["load"] > 0.5 * environment["cpu_count"]:
        load = f"a load of {environment['load']:.1f} on {environment['cpu_count']} cores"
        lines.append(f"**The machine was busy with other work when the run began ({load}): do not trust these times.**")
    if not record["finished"]:
        lines.append("**The run did not end: this is what it had measured.**")
    return "\n\n".join(lines)


def write_device(record: dict[str, Any]) -> str:
    """The GPU's name, or how many threads of the CPU."""
    environment = record["environment"]
    if record["settings"]["device"] == "cuda":
        return environment["gpu"]
    return f"{environment['threads']} CPU thread{'s' if environment['threads'] > 1 else ''}"


def write_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def write_case(cells: list[Cell]) -> list[str]:
    """The tables of one head: one per mode, dtype, layout and pass."""

    def kind(cell: Cell) -> tuple[str, ...]:
        return cell["pass"], cell["mode"], cell["dtype"], cell["layout"]

    parts = []
    for (pass_, mode, dtype, layout), group in groupby(sorted(cells, key=kind, reverse=True), key=kind):
        parts.append(f"### {PASSES[pass_].capitalize()}: {mode}, {dtype}, channels {layout}")
        parts.append(write_cells(list(group)))
    return parts


def write_cells(cells: list[Cell]) -> str:
    """Rows by batch, the fastest first; those without a time last, with the reason."""
    header = ["contender", "batch", "ms", "min – max", "IQR", "× pooled", "× flat", "TensorLy ÷ ours", "einsum ÷ ours"]
    header += ["× floor of x", "× floor", "M multiply-adds", "GFLOP/s"]
    both = any(cell["pass"] == "both" for cell in cells)
    header += ["kept, MiB", "peak, MiB"] if both else []
    rows = []
    for cell in sorted(cells, key=lambda cell: (cell["batch"], cell.get("median", float("inf")))):
        same = {other["contender"]: other for other in cells if other["batch"] == cell["batch"]}
        rows.append(write_row(cell, same, both))
    return write_table(header, rows)


def write_row(cell: Cell, same: dict[str, Cell], both: bool) -> list[str]:
    """One contender at one batch."""
    name = [f"**{cell['label']}**" if cell["group"] in ("ours", "rtrl") else cell["label"], str(cell["batch"])]
    if "median" not in cell:
        return [*name, cell["failure"].replace("|", "/"), *[MISSING] * (12 if both else 10)]
    work, seconds = cell["multiply_adds"], cell["median"]
    row = [
        *name,
        milliseconds(seconds),
        f"{milliseconds(cell['min'])} – {milliseconds(cell['max'])}",
        milliseconds(cell["iqr"]),
        times(ratio(cell, same.get("pooled"))),
        times(ratio(cell, same.get("flat"))),
        times(versus_ours("tensorly", cell, same)),
        times(versus_ours("einsum", cell, same)),
        f"{cell['over_floor_x']:.3g}",
        f"{cell['over_floor']:.3g}",
        MISSING if work is None else f"{work / 1e6:,.1f}",
        MISSING if not work else f"{2 * work / seconds / 1e9:,.4g}",
    ]
    return row + ([mebibytes(cell["saved_bytes"]), mebibytes(cell["peak_bytes"])] if both else [])


def ratio(cell: Cell | None, other: Cell | None) -> float | None:
    """The time of one over that of the other, or None where one has none."""
    if cell is None or other is None or "median" not in cell or "median" not in other:
        return None
    return cell["median"] / other["median"]


def versus_ours(group: str, cell: Cell, same: dict[str, Cell]) -> float | None:
    """How many times as long another implementation of our head takes; None for heads that are not ours."""
    return ratio(same.get(f"{group}-{cell['format']}"), cell) if cell["group"] in ("ours", "rtrl") else None


def write_summary(record: dict[str, Any]) -> str:
    """Our heads at the headline batch, forward + backward, in the first mode and dtype."""
    cells = [c for c in record["cells"] if c["pass"] == "both" and "median" in c]
    if not cells:
        return ""
    best = pick_mode(cells)
    header = [
        "head",
        "shape",
        "batch",
        "ms",
        "× pooled",
        "× flat",
        "TensorLy ÷ ours",
        "einsum ÷ ours",
        "× floor",
        "kept, MiB",
    ]
    rows = []
    for case, group in groupby((c for c in cells if is_of(c, best)), key=lambda c: c["case"]):
        of_case = list(group)
        batch = headline_batch(record, of_case)
        same = {c["contender"]: c for c in of_case if c["batch"] == batch}
        for c in same.values():
            if c["group"] in ("ours", "rtrl"):
                rows.append(
                    [
                        c["label"],
                        CASES[case].shape,
                        str(batch),
                        milliseconds(c["median"]),
                        times(ratio(c, same.get("pooled"))),
                        times(ratio(c, same.get("flat"))),
                        times(versus_ours("tensorly", c, same)),
                        times(versus_ours("einsum", c, same)),
                        f"{c['over_floor']:.3g}",
                        mebibytes(c["saved_bytes"]),
                    ]
                )
    mode, dtype, layout = best
    return f"## Summary: forward + backward, {mode}, {dtype}, channels {layout}\n\n" + write_table(header, rows)


def pick_mode(cells: list[Cell]) -> tuple[str, str, str]:
    """The mode, dtype and layout of summary and figure: CUDA graphs if there are any, else eager; the first of each."""
    modes = [cell["mode"] for cell in cells]
    mode = next((m for m in ("graph", "eager") if m in modes), modes[0])
    first = next(cell for cell in cells if cell["mode"] == mode)
    return mode, first["dtype"], first["layout"]


def is_of(cell: Cell, kind: tuple[str, str, str]) -> bool:
    """Whether a cell has this mode, dtype and layout."""
    return (cell["mode"], cell["dtype"], cell["layout"]) == kind


def headline_batch(record: dict[str, Any], cells: list[Cell]) -> int:
    """The first headline batch that was measured, else the largest."""
    batches = {cell["batch"] for cell in cells}
    return next((b for b in record["settings"]["headline"] if b in batches), max(batches))


def write_growth(slopes: list[dict[str, Any]]) -> str:
    """Slopes of log time over log size."""
    if not slopes:
        return ""
    rows = [
        [
            s["label"],
            s["over"],
            CASES[s["case"]].title if "case" in s else MISSING,
            f"{s['mode']}, {s['dtype']}, {s['layout']}",
            f"{s['sizes'][0]} – {s['sizes'][-1]} ({len(s['sizes'])})",
            f"{s['slope']:.2f}",
            f"{s['r2']:.3f}",
        ]
        for s in sorted(slopes, key=lambda s: (s["over"], s.get("case", ""), s["mode"], s["dtype"], s["slope"]))
    ]
    about = (
        "Slopes of log(forward + backward time) over log(size): 1 is proportional, 0 constant. Rank: 512×4×4→512,\n"
        "Tucker (R, 3, 3, R) and CP R, batch 64. Modes: 2 to 6 input modes, 4,096 numbers in all, 100 outputs."
    )
    return f"## Growth\n\n{about}\n\n" + write_table(["head", "over", "case", "how", "sizes", "slope", "R²"], rows)


def write_checks(checks: list[dict[str, Any]]) -> str:
    """The largest error of each of our heads, and those that were refused."""
    lines = []
    for (contender, dtype), group in groupby(
        sorted(checks, key=lambda c: (c["contender"], c["dtype"])), key=lambda c: (c["contender"], c["dtype"])
    ):
        errors = [check["error"] for check in group if check["error"] is not None]
        lines.append([contender, dtype, str(len(errors)), f"{max(errors):.1e}" if errors else MISSING])
    refused = [f"- {c['case']}, batch {c['batch']}, {c['contender']}: {c['problem']}" for c in checks if c["problem"]]
    if not lines:
        return ""
    about = (
        "Output and all gradients against those of the dense weight in float64: largest error over the largest entry."
    )
    table = write_table(["head", "dtype", "checks", "largest relative error"], lines)
    return f"## Checked before timing\n\n{about}\n\n{table}" + ("\n\n" + "\n".join(refused) if refused else "")


def milliseconds(seconds: float) -> str:
    """Three digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def mebibytes(count: int | None) -> str:
    """Three digits."""
    return MISSING if count is None else f"{count / 2**20:,.0f}" if count >= 100 * 2**20 else f"{count / 2**20:.3g}"


def times(factor: float | None) -> str:
    """As in ``2.3×``."""
    return MISSING if factor is None else f"{factor:,.0f}×" if factor >= 100 else f"{factor:.3g}×"
