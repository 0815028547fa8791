"""The figure, from the record alone: time over batch for each head, a roofline, and growth."""

import itertools
import math
from pathlib import Path
from typing import Any

from heads.cases import CASES
from heads.tables import headline_batch, is_of, pick_mode, write_device
from tensor_dropout_lab.figures import draw_figure, save_figure

Cell = dict[str, Any]
COLORS = {"tucker": "#0072B2", "cp": "#D55E00", "tt": "#009E73"}
SHORT = {"ours": "", "einsum": ", einsum", "tensorly": ", TensorLy"}
NAMES = {"tucker": "Tucker", "cp": "CP", "tt": "TT"}
FILLS = {
    "ours": {},
    "linear": {},
    "einsum": {"markerfacecolor": "none"},
    "tensorly": {"markerfacecolor": "none", "alpha": 0.45},
}
LINEAR = {
    "pooled": {"label": "pooled linear", "color": "#666666", "marker": "o", "linestyle": "--"},
    "flattened": {"label": "flatten + linear", "color": "#CC79A7", "marker": "D", "linestyle": ":"},
}
OVER = {"rank": "rank R", "modes": "input modes"}


def look(contender: str, group: str, format: str | None) -> dict[str, Any]:
    """Colour is the factorization, line style is who computes it."""
    if format is None:
        return LINEAR["pooled" if contender == "pooled" else "flattened"]
    style = {
        "ours": {"linestyle": "-", "marker": "o", "linewidth": 2.0},
        "einsum": {"linestyle": "--", "marker": "", "linewidth": 1.2},
        "tensorly": {"linestyle": ":", "marker": "x", "linewidth": 1.4},
    }[group]
    return {"color": COLORS[format], "label": NAMES[format] + SHORT[group], **style}


def draw(record: dict[str, Any], stem: Path) -> list[Path]:
    """Draw and save; returns the paths of the PNG and the SVG.

    Raises:
        TensorDropoutError: if matplotlib is missing.
    """
    cells = [c for c in record["cells"] if c["pass"] == "both" and "median" in c]
    cells = cells or [c for c in record["cells"] if "median" in c]
    kind = pick_mode(cells) if cells else None
    cells = [c for c in cells if is_of(c, kind)]
    heads = list(dict.fromkeys(c["case"] for c in cells))
    grown = [over for over in OVER if any(s["over"] == over for s in record["growth"])]
    one_row = len(heads) < 2
    columns = len(heads) + 2 + len(grown) if one_row else max(len(heads), 2 + len(grown))
    with draw_figure(3.9 * columns, 3.6 * (1 if one_row else 2) + 0.4) as figure:
        grid = figure.add_gridspec(1 if one_row else 2, columns)
        below, start = (0, len(heads)) if one_row else (1, 0)
        for k, key in enumerate(heads):
            draw_batches(figure.add_subplot(grid[0, k]), key, [c for c in cells if c["case"] == key])
        roofline = columns - len(grown)
        draw_roofline(figure.add_subplot(grid[below, start:roofline]), record, cells)
        for k, over in enumerate(grown):
            slopes = [s for s in record["growth"] if s["over"] == over]
            draw_growth(figure.add_subplot(grid[below, roofline + k]), over, slopes)
        figure.suptitle(write_title(record, kind), x=0.01, ha="left", fontsize=11)
        return save_figure(figure, stem)


def write_title(record: dict[str, Any], kind: tuple[str, str, str] | None) -> str:
    """What, how and where."""
    how = f"{kind[0]}, {kind[1]}, channels {kind[2]}" if kind else "nothing measured"
    return f"Time of a head: {how}; {write_device(record)}, torch {record['environment']['torch']}"


def draw_batches(axes: Any, key: str, cells: list[Cell]) -> None:
    """Time over batch, one line per contender, with the interquartile range behind it."""
    ends = []
    for name in dict.fromkeys(c["contender"] for c in cells if c["group"] not in ("rtrl", "plain")):
        line = sorted((c for c in cells if c["contender"] == name), key=lambda c: c["batch"])
        style = look(name, line[0]["group"], line[0]["format"])
        batches, medians = [c["batch"] for c in line], [c["median"] * 1e3 for c in line]
        axes.plot(batches, medians, **style)
        low, high = ([c["quartiles"][side] * 1e3 for c in line] for side in (0, 1))
        axes.fill_between(batches, low, high, color=style["color"], alpha=0.15, linewidth=0)
        ends.append((medians[-1], style["label"], style["color"]))
    pass_ = "forward + backward" if cells[0]["pass"] == "both" else "forward"
    axes.set(title=f"{CASES[key].title}, {CASES[key].shape}", xlabel="batch", ylabel=f"{pass_}, ms")
    prepare_log_axes(axes, sorted({c["batch"] for c in cells}))
    label_ends(axes, ends)


def prepare_log_axes(axes: Any, sizes: list[float]) -> None:
    """Logarithmic axes: the measured sizes as ticks, and plain numbers for times, more of them on short axes."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    bottom, top = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if top > 100 * bottom else (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.minorticks_off()


def label_ends(axes: Any, ends: list[tuple[float, str, str]], least: float = 0.066) -> None:
    """Names to the right of the lines' ends, moved apart where they would touch.

    Args:
        axes: with its final scale and data.
        ends: (last value, label, color) of each line.
        least: the least distance of two labels, as a fraction of the height.
    """
    bottom, top = (math.log(limit) for limit in axes.get_ylim())
    wanted = [(math.log(value) - bottom) / (top - bottom) for value, _, _ in ends]
    places = spread(wanted, least)
    for (_, label, color), from_, to in zip(ends, wanted, places, strict=True):
        axes.annotate(
            label,
            xy=(1.0, from_),
            xytext=(1.1, to),
            xycoords="axes fraction",
            color=color,
            fontsize=7.5,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.5,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )


def spread(wanted: list[float], least: float) -> list[float]:
    """Positions near the wanted ones, in the same order, at least ``least`` apart, and from 0 to 1 where they fit."""
    order = sorted(range(len(wanted)), key=lambda k: wanted[k])
    blocks: list[list[int]] = []  # neighbours that touch are moved as one block around their mean

    def start(block: list[int]) -> float:
        length = least * (len(block) - 1)
        centred = sum(wanted[k] for k in block) / len(block) - length / 2
        return max(0.0, min(centred, 1.0 - length))

    for k in order:
        blocks.append([k])
        while len(blocks) > 1 and start(blocks[-2]) + least * len(blocks[-2]) > start(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    places = {k: start(block) + least * j for block in blocks for j, k in enumerate(block)}
    return [places[k] for k in range(len(wanted))]


def draw_roofline(axes: Any, record: dict[str, Any], cells: list[Cell]) -> None:
    """Achieved operations per second over operations per byte that must move, at the headline batch of each head.

    Without pooled linear, whose sums torch does not count, and R-TRLs.
    """
    intensities = []
    for mark, key in zip(itertools.cycle("osD^v"), dict.fromkeys(c["case"] for c in cells), strict=False):
        of_case = [c for c in cells if c["case"] == key]
        batch = headline_batch(record, of_case)
        for c in of_case:
            if (
                c["batch"] != batch
                or not c["multiply_adds"]
                or c["group"] in ("rtrl", "plain")
                or c["contender"] == "pooled"
            ):
                continue
            work, color = 2 * c["multiply_adds"], look(c["contender"], c["group"], c["format"])["color"]
            intensities.append(work / sum(c["floor_bytes"].values()))
            style = {"color": color, "markersize": 6, **FILLS[c["group"]]}
            axes.plot(intensities[-1], work / c["median"] / 1e9, mark, **style)
        axes.plot([], [], mark, color="#555555", label=f"{CASES[key].title}, batch {batch}")
    for name, group in (("ours, flatten + linear", "ours"), ("einsum", "einsum"), ("TensorLy-Torch", "tensorly")):
        axes.plot([], [], "o", color="#555555", label=name, **FILLS[group])
    axes.set_xscale("log")
    axes.set_yscale("log")
    if intensities:
        ceilings = record["ceilings"]
        rate = ceilings["operations_per_second"][cells[0]["dtype"]]
        draw_ceilings(axes, ceilings["bytes_per_second"], rate, intensities)
        axes.legend(fontsize=7, loc="lower right", ncols=2, handletextpad=0.1)
    axes.set(title="Roofline", xlabel="operations per byte that must move", ylabel="GFLOP/s")


def draw_ceilings(axes: Any, bandwidth: float, rate: float, intensities: list[float]) -> None:
    """What the copy bandwidth and the rate of matrix products allow."""
    knee = rate / bandwidth
    left, right = min(*intensities, knee) / 2, max(*intensities, knee) * 2
    axes.plot([left, knee, right], [left * bandwidth / 1e9, rate / 1e9, rate / 1e9], color="#222222", linewidth=1.2)
    label = {"textcoords": "offset points", "fontsize": 7, "color": "#222222"}
    products = f"matrix products {rate / 1e9:,.3g} GFLOP/s"
    axes.annotate(products, (right, rate / 1e9), xytext=(0, 4), ha="right", **label)
    middle = (left * knee) ** 0.5
    axes.annotate(f"copy {bandwidth / 1e9:,.3g} GB/s", (middle, middle * bandwidth / 1e9), xytext=(6, -8), **label)


def draw_growth(axes: Any, over: str, slopes: list[dict[str, Any]]) -> None:
    """Time over rank or modes, with the slope in the label."""
    ends = []
    for s in slopes:
        style = look(s["contender"], "ours", s["contender"])
        medians = [median * 1e3 for median in s["medians"]]
        axes.plot(s["sizes"], medians, **style)
        ends.append((medians[-1], f"{style['label']}: slope {s['slope']:.2f}", style["color"]))
    axes.set(title=f"Growth with the {over}, batch 64", xlabel=OVER[over], ylabel="forward + backward, ms")
    prepare_log_axes(axes, slopes[0]["sizes"])
    label_ends(axes, ends)
