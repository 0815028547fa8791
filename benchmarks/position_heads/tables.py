"""Tables and the picture, from the record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from position import write_interval, write_table
from scipy.stats import rankdata

from position_heads.data import FINALIST_SIZES, MAPS, SETS, SIZES, Group
from position_heads.running import ABLATIONS, BASELINES, HEADS, PLAIN, RANDOMIZED, Task
from tensor_dropout.atomic_files import replacing
from tensor_dropout_lab.evaluation.intervals import seed_interval
from tensor_dropout_lab.figures import draw_figure

RECORD = Path("results/position-heads.jsonl")
PICTURE = Path("docs/images/position-heads.png")
ALL_SIZES = (FINALIST_SIZES[0], *SIZES, FINALIST_SIZES[1])
MAIN, RIDGE = "CP, dropout", "flattened ridge"

Record = dict[Task, dict[str, Any]]
Groups = dict[Group, dict[str, list[dict[str, Any]]]]
"""By group and head: a row for each fold."""


def group_rows(record: Record) -> Groups:
    """In the plan's order."""
    groups: Groups = {}
    for task, row in record.items():
        groups.setdefault(task.group, {})[task.head] = row["folds"]
    return dict(sorted(groups.items(), key=lambda item: _place(item[0])))


def _place(group: Group) -> tuple[int, int, int]:
    return SETS.index(group.set), list(MAPS).index(group.backbone), group.n


def mean_of(rows: Sequence[dict[str, Any]], what: str = "error") -> float:
    """Over the folds; infinite where one is missing."""
    return float(np.mean([float("inf") if row[what] is None else row[what] for row in rows]))


def compare(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Mean of the paired relative differences of the errors in %, and its 95 % t interval over folds."""
    changes = [100 * (a["error"] / b["error"] - 1) for a, b in zip(first, second, strict=True)]
    return float(np.mean(changes)), *seed_interval(changes)


def judge(difference: tuple[float, float, float]) -> str:
    """Better, level or worse: whether the interval leaves out 0."""
    _, low, high = difference
    return "better" if high < 0 else "worse" if low > 0 else "level"


def name_size(n: int) -> str:
    return "all" if n == FINALIST_SIZES[1] else str(n)


def best(heads: dict[str, list[dict[str, Any]]], names: Sequence[str], what: str) -> str | None:
    """The head with the lowest mean of ``error`` or ``held_out``; None where none was run."""
    known = [name for name in names if name in heads]
    return min(known, key=lambda name: mean_of(heads[name], what)) if known else None


# Tables.


def write_errors(groups: Groups) -> str:
    """A table for each set and backbone: heads over n."""
    parts = []
    for name in SETS:
        for backbone in MAPS:
            own = {g.n: heads for g, heads in groups.items() if (g.set, g.backbone) == (name, backbone)}
            if not own:
                continue
            lowest = {n: min(mean_of(rows) for rows in heads.values()) for n, heads in own.items()}

            def cell(n: int, head: str, own: Any = own, lowest: Any = lowest) -> str:
                if head not in own[n]:
                    return ""
                error = mean_of(own[n][head])
                return f"**{error:.3f}**" if error == lowest[n] else f"{error:.3f}"

            shown = [head for head in HEADS if any(head in heads for heads in own.values())]
            table = write_table(
                [f"{name}, {backbone}", *map(name_size, own)],
                ([head, *(cell(n, head) for n in own)] for head in shown),
                1,
            )
            parts.append(table)
    return "\n\n".join(parts)


def list_verdicts(groups: Groups) -> list[dict[str, Any]]:
    """For each group: the randomized head that its held-out errors choose, beside the best baseline and its twin.

    Against the baselines twice: the one that *its* held-out errors choose, as a user would, and the one with the lowest
    error on the test images, which nobody could have known.
    """
    verdicts = []
    for group, heads in groups.items():
        ours, usual = best(heads, RANDOMIZED, "held_out"), best(heads, BASELINES, "held_out")
        oracle, plain = best(heads, BASELINES, "error"), best(heads, PLAIN, "held_out")
        if ours is None or usual is None or oracle is None or plain is None:
            continue
        verdicts.append(
            {"group": group, "ours": ours, "usual": usual, "oracle": oracle, "plain": plain}
            | {f"to {key}": compare(heads[ours], heads[other]) for key, other in
               (("usual", usual), ("oracle", oracle), ("plain", plain))}
        )  # fmt: skip
    return verdicts


def write_verdict(groups: Groups) -> str:
    """The claim: in how many groups better, level, worse."""
    lines = []
    for n_text, kept in (("50 to 800", SIZES), *((name_size(n), (n,)) for n in ALL_SIZES)):
        rows = [verdict for verdict in list_verdicts(groups) if verdict["group"].n in kept]
        if not rows:
            continue
        counts = [Counter(judge(row[key]) for row in rows) for key in ("to usual", "to oracle", "to plain")]
        lines.append([n_text, str(len(rows)), *(f"{c['better']} / {c['level']} / {c['worse']}" for c in counts)])
    header = [
        "n",
        "groups",
        "to the baseline chosen by held-out images",
        "to the best baseline of the test",
        "to θ = 1",
    ]
    return write_table(header, lines, 1)


def write_differences(groups: Groups) -> str:
    rows = [
        [v["group"].set, v["group"].backbone, name_size(v["group"].n), v["ours"],
         f"{write_interval(v['to usual'])} ({v['usual']})", f"{write_interval(v['to oracle'])} ({v['oracle']})",
         f"{write_interval(v['to plain'])} ({v['plain']})"]
        for v in list_verdicts(groups)
    ]  # fmt: skip
    header = ["set", "backbone", "n", "randomized head", "to the chosen baseline", "to the best baseline", "to θ = 1"]
    return write_table(header, rows, 4)


def write_pairs(groups: Groups) -> str:
    """What dropout does to each format, and which masks train as well as the exact loss."""
    pairs = [(a, b) for a, b in zip(RANDOMIZED, PLAIN, strict=True)]
    pairs += [("two matrices, dropout", "two matrices"), (MAIN, "two matrices, dropout"), (MAIN, RIDGE)]
    pairs += [(MAIN, head) for head in ABLATIONS[1:]]
    lines = []
    for a, b in pairs:
        found = [compare(h[a], h[b]) for g, h in groups.items() if g.n in SIZES and a in h and b in h]
        if found:
            counts = Counter(map(judge, found))
            spread = [f"{np.median([d for d, *_ in found]):+.1f}", f"{min(d for d, *_ in found):+.1f}",
                      f"{max(d for d, *_ in found):+.1f}"]  # fmt: skip
            lines.append(
                [f"{a} to {b}", str(len(found)), *(s.replace("-", "−") for s in spread),
                 f"{counts['better']} / {counts['level']} / {counts['worse']}"]
            )  # fmt: skip
    return write_table(["error of … to …, %", "groups", "median", "least", "most", "better / level / worse"], lines, 1)


def write_ranks(groups: Groups) -> str:
    """Mean ranks over the groups in which all of these heads were run, by backbone."""
    lines: dict[str, list[str]] = {head: [] for head in HEADS}
    columns = []
    for backbone in MAPS:
        own = [heads for g, heads in groups.items() if g.backbone == backbone and g.n in SIZES]
        shown = [head for head in HEADS if own and all(head in heads for heads in own)]
        if not shown:
            continue
        ranks = np.mean([rankdata([mean_of(heads[head]) for head in shown]) for heads in own], axis=0)
        columns.append(f"{backbone}, {len(own)} groups")
        known = dict(zip(shown, ranks, strict=True))
        for head in HEADS:
            lines[head].append(f"{known[head]:.1f}" if head in known else "")
    return write_table(["mean rank", *columns], ([head, *cells] for head, cells in lines.items() if any(cells)), 1)


def write_costs(record: Record) -> str:
    """Fits and seconds of every head, by device."""
    lines = []
    for head in HEADS:
        rows = [row for task, row in record.items() if task.head == head]
        if rows:
            devices = sorted({row["environment"].get("gpu", row["environment"]["device"]) for row in rows})
            seconds = sum(row["seconds"] for row in rows)
            lines.append([head, str(sum(row["fits"] for row in rows)), f"{seconds / 60:.1f}", ", ".join(devices)])
    total = [sum(row["fits"] for row in record.values()), sum(row["seconds"] for row in record.values()) / 60]
    lines.append(["**all**", f"**{total[0]}**", f"**{total[1]:.0f}**", ""])
    return write_table(["head", "fits", "minutes of its process", "where"], lines, 1)


PARTS: dict[str, Callable[[Record], str]] = {
    "verdict": lambda record: write_verdict(group_rows(record)),
    "differences": lambda record: write_differences(group_rows(record)),
    "pairs": lambda record: write_pairs(group_rows(record)),
    "errors": lambda record: write_errors(group_rows(record)),
    "ranks": lambda record: write_ranks(group_rows(record)),
    "costs": write_costs,
}
TITLES = {
    "verdict": "Randomized tensor regression: better / level / worse, in how many groups",
    "differences": "Differences of the errors in %, negative where randomized is better; 95 % t intervals over folds",
    "pairs": "Pairs of heads, over all groups with n of 50 to 800",
    "errors": "Errors: mean distance, % of the image side; mean over ten folds",
    "ranks": "Mean ranks",
    "costs": "Costs",
}


def render(part: str, record: Record) -> str:
    """One of :data:`PARTS`, for the docs."""
    return PARTS[part](record)


def write_report(record: Record) -> str:
    """All of it in Markdown."""
    parts = [f"## {TITLES[part]}\n\n{render(part, record)}" for part in PARTS]
    made = sorted({describe(row["environment"]) for row in record.values()})
    return "\n\n".join(["# Heads on frozen maps", *parts, "## Made by\n\n" + "\n".join(f"- {line}" for line in made)])


def describe(environment: dict[str, Any]) -> str:
    """What a line of the record was made with."""
    commit = f", commit {environment['commit'][:7]}" if "commit" in environment else ""
    device = environment.get("gpu", environment["device"])
    versions = f"torch {environment['torch']}, scikit-learn {environment['scikit-learn']}"
    return f"{versions}, {device}{commit}: `{environment['command']}`"


# The picture.

SHOWN = {
    "pooled ridge": ("#8c564b", ":"),
    "flattened ridge": ("black", "-"),
    "flattened linear, dropout": ("#7f7f7f", "--"),
    "convolutional": ("C2", "--"),
    "attention pooling": ("C4", ":"),
    "soft-argmax": ("C1", "--"),
    "CP, θ = 1": ("C0", "--"),
    "CP, dropout": ("C3", "-"),
}
SET_TITLES = {"wings": "fly wings, 15 points", "retina": "optic disc, 2 points", "faces": "faces, 68 points"}


def draw(record: Record, path: Path, backbone: str = "efficientnet") -> None:
    """The error over n: a panel for each set."""
    groups = group_rows(record)
    known = {head for group, heads in groups.items() if group.backbone == backbone for head in heads}
    with draw_figure(10.5, 3.8) as figure:
        panels = figure.subplots(1, len(SETS), squeeze=False)[0]
        for panel, name in zip(panels, SETS, strict=True):
            own = {
                g.n: heads for g, heads in groups.items() if (g.set, g.backbone) == (name, backbone) and g.n in SIZES
            }
            for head, (color, style) in SHOWN.items():
                if head not in known:
                    continue
                ns = [n for n in own if head in own[n]]
                panel.plot(ns, [mean_of(own[n][head]) for n in ns], style, color=color, marker="o", ms=3, label=head)
            panel.set(title=SET_TITLES[name], xlabel="labelled images", xscale="log", yscale="log", xticks=list(SIZES))
            panel.set_xticklabels(list(SIZES))
            panel.minorticks_off()
            low, high = panel.get_ylim()
            levels = [level for level in (0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 7, 10, 15) if low < level < high]
            panel.set(yticks=levels, yticklabels=[f"{level:g}" for level in levels])
        panels[0].set_ylabel("error: mean distance, % of the image side")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=4, fontsize=9)
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=110, format="png")
