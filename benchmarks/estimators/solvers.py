"""The choice of solver for the estimators: time and products with the features to near the best objective found.

    python benchmarks/estimators/solvers.py                          an hour and a half on two cores
    python benchmarks/estimators/solvers.py --n 100 --seconds 20     about six minutes
    python benchmarks/estimators/solvers.py --quick                  half a minute

Every solver minimizes the same ``E[loss] + α Σ ‖factors‖²`` from the same start: faces, the frozen maps that
benchmarks/estimators/features.py makes (``block10`` averaged to 112×7×7), 136 coordinates, α = 1e-3 · 100/n, float32.
The solvers of a cell are deterministic and long, so they run one after another in one process; with --jobs, cells run
side by side in processes. Writes the record (JSON), and tables and a figure to --out, after every cell.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from other_solvers import (
    TORCH_HISTORY,
    CountingProjection,
    Problem,
    Watch,
    solve_by_alternating,
    solve_by_gauss_newton,
    solve_by_torch,
)
from torch import Tensor
from torch.nn.functional import avg_pool2d

import tensor_dropout as td
from tensor_dropout.atomic_files import replacing
from tensor_dropout.fitting.fit import MAX_ITER, TOL, draw_start
from tensor_dropout.fitting.lbfgs import HISTORY, PATIENCE, minimize
from tensor_dropout.fitting.objective import ExpectedLoss
from tensor_dropout.fitting.statistics import channel_scale, target_scale
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout_lab.figures import draw_figure
from tensor_dropout_lab.run_records import describe_environment, write_json

FEATURES = Path("out/features/faces")
RECORD = Path("results/speed/solvers.json")
N_TEST = 400
WARM = 8
ALPHA_AT_100 = 1e-3
SHARES = (0.05, 0.01)
HEADS: dict[str, tuple[type[TensorRegression], Any, td.TensorDropout]] = {
    "cp": (td.CPRegression, 128, td.TensorDropout(0.5)),
    "tucker": (td.TuckerRegression, (48, 5, 5, 32), td.TensorDropout(0.7, modes=(0,))),
    "tt": (td.TTRegression, (48, 64, 48), td.TensorDropout(0.7, modes=(1,))),
}


# The solvers.


class WatchedLoss:
    """The product's problem for its L-BFGS, told to the watch after each iteration."""

    def __init__(self, problem: Problem, watch: Watch, *, eliminate: bool, turned: bool) -> None:
        self.problem, self.watch, layer = problem, watch, problem.make()
        blocks, self.axes = problem.turn(turned)
        self.projection = CountingProjection(blocks)
        alpha = torch.tensor([problem.alpha], dtype=torch.float64)
        theta = None if layer.dropout is None else layer.dropout.theta.reshape(1)
        stretch = None if self.axes is None else self.axes.stretch.unsqueeze(0)
        self.loss = ExpectedLoss(
            layer,
            self.projection,
            problem.y.unsqueeze(0),
            problem.weights.unsqueeze(0),
            alpha,
            theta,
            stretch,
            "regression",
            eliminate=eliminate,
        )
        self.start = draw_start(layer, self.loss, [self.axes], [problem.scale], [problem.seed])

    def report(self, iteration: int, f: Tensor, z: Tensor) -> None:
        """After each iteration."""
        z = z.clone()

        def write(layer: TensorRegression) -> None:
            before = self.projection.calls
            self.problem.fill(layer, self.loss.parameters(z)[0], self.axes)
            self.projection.calls = before

        self.watch.note(float(f[0]), self.projection.products, write)


def solve_by_ours(*, eliminate: bool, turned: bool) -> Callable[[Problem, Watch], None]:
    """The product's L-BFGS, without its stopping rule."""

    def solve(problem: Problem, watch: Watch) -> None:
        loss = WatchedLoss(problem, watch, eliminate=eliminate, turned=turned)
        loss.report(0, loss.loss.evaluate(loss.start)[0], loss.start)
        minimize(loss.loss, loss.start, max_iter=10**9, tol=0.0, report=loss.report)

    return solve


SOLVERS: dict[str, Callable[[Problem, Watch], None]] = {
    "torch L-BFGS": solve_by_torch,
    "L-BFGS": solve_by_ours(eliminate=False, turned=False),
    "L-BFGS, turned": solve_by_ours(eliminate=False, turned=True),
    "L-BFGS, eliminated": solve_by_ours(eliminate=True, turned=False),
    "L-BFGS, eliminated, turned": solve_by_ours(eliminate=True, turned=True),
    "Gauss-Newton": solve_by_gauss_newton,
    "alternating": solve_by_alternating,
}
PRODUCT = "L-BFGS, eliminated, turned"
CP_ONLY = ("Gauss-Newton", "alternating")


# The data.


def load_faces() -> tuple[Tensor, Tensor, np.ndarray]:
    """Maps (4232, 112, 7, 7), targets (4232, 136) and groups."""
    groups = load_groups()
    maps = np.load(FEATURES / "block10.npy", mmap_mode="r")
    pooled = [avg_pool2d(torch.from_numpy(rows.astype(np.float32)), 2) for rows in np.array_split(maps, 16)]
    return torch.cat(pooled), torch.from_numpy(np.load(FEATURES / "targets.npy")), groups


def load_groups() -> np.ndarray:
    """Who is on each image."""
    if not (FEATURES / "groups.npy").exists():
        raise SystemExit(f"solvers.py: {FEATURES} is missing; make it with benchmarks/estimators/features.py")
    return np.load(FEATURES / "groups.npy")


def split_groups(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training, in random order, and 400 for testing, from groups that give no training rows."""
    generator = np.random.default_rng(0)
    names, sizes = np.unique(groups, return_counts=True)
    order = generator.permutation(len(names))
    n_held = 1 + int(np.searchsorted(np.cumsum(sizes[order]), N_TEST))
    held = np.isin(groups, names[order[:n_held]])
    train, test = (generator.permutation(np.flatnonzero(rows)) for rows in (~held, held))
    return train, test[:N_TEST]


def make_problem(head: str, x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, seed: int) -> Problem:
    """One head on data that are standardized here, by the training part."""
    format_, rank, dropout = HEADS[head]
    equal = x.new_full((len(x),), 1 / len(x))
    scale, target = channel_scale(x.flatten(2), equal), target_scale(y, equal)
    x, x_test = ((maps - scale.mean[:, None, None]) / scale.std[:, None, None] for maps in (x, x_test))
    y, y_test = ((targets - target.mean) / target.std for targets in (y, y_test))

    def make() -> TensorRegression:
        return format_(tuple(x.shape[1:]), y.shape[1], rank, dropout=td.TensorDropout(**describe_dropout(dropout)))

    return Problem(make, x, y, x_test, y_test, ALPHA_AT_100 * 100 / len(x), seed)


def describe_dropout(dropout: td.TensorDropout) -> dict[str, Any]:
    """What makes an equal one."""
    return {"theta": float(dropout.theta), "modes": dropout.modes}


# One cell: all solvers on one head and one n.


def run_cell(head: str, n: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one solver after the other on one head and one number of images."""
    torch.set_num_threads(options.threads)
    x, y, groups = load_faces()
    train, test = split_groups(groups)
    rows = train[:n]
    problem = make_problem(head, x[rows], y[rows], x[test], y[test], options.seed)
    del x
    cell: dict[str, Any] = {"head": head, "n": len(rows), "alpha": problem.alpha, "solvers": {}}
    curves: dict[str, list[tuple[float, int, int, float]]] = {}
    warm_up(problem)
    for name, solve in SOLVERS.items():
        if not takes(name, problem):
            continue
        watch = Watch(problem, options.seconds)
        watch.run(solve)
        curves[name] = watch.points
        cell["solvers"][name] = {
            "objective": watch.points[-1][3],
            "objective_of_layer": float(problem.objective(watch.layer).detach()),
            "products": watch.points[-1][1],
            "steps": watch.points[-1][2],
            "test_error": watch.marks[-1]["test_error"],
            "marks": watch.marks,
        }
    judge(cell, curves)
    return cell


def takes(name: str, problem: Problem) -> bool:
    """Whether the solver is written for this head."""
    return name not in CP_ONLY or isinstance(problem.make(), td.CPRegression)


def warm_up(problem: Problem) -> None:
    """Let every solver begin once on few images: what is imported or planned on first use is not timed."""
    few = replace(problem, x=problem.x[:WARM], y=problem.y[:WARM])
    for name, solve in SOLVERS.items():
        if takes(name, problem):
            Watch(few, 0.2).run(solve)


def judge(cell: dict[str, Any], curves: dict[str, list[tuple[float, int, int, float]]]) -> None:
    """When each solver came near the best objective that any of them has found."""
    best = cell["best"] = min(points[-1][3] for points in curves.values())
    for name, points in curves.items():
        found = cell["solvers"][name]
        found["above_best"] = points[-1][3] / best - 1
        found["reached"] = {f"{share:g}": first_below(points, (1 + share) * best) for share in SHARES}
        found["reached"]["own"] = first_below(points, (1 + SHARES[-1]) * points[-1][3])
    if PRODUCT in curves:
        cell["rule"] = apply_rule(curves[PRODUCT], cell["solvers"][PRODUCT]["marks"], best)


def first_below(points: list[tuple[float, int, int, float]], level: float) -> dict[str, float] | None:
    """The first point at or below a level."""
    for seconds, products, steps, objective in points:
        if objective <= level:
            return {"seconds": seconds, "products": products, "steps": steps}
    return None


def apply_rule(points: list[tuple[float, int, int, float]], marks: list[dict[str, Any]], best: float) -> dict[str, Any]:
    """Where the product's stopping rule would have ended, and the test error at the next mark."""
    end = points[-1]
    for k in range(PATIENCE, len(points)):
        if points[k - PATIENCE][3] - points[k][3] <= TOL * points[k][3] or points[k][2] > MAX_ITER:
            end = points[k]
            break
    after = next((mark["test_error"] for mark in marks if mark["seconds"] >= end[0]), marks[-1]["test_error"])
    return {
        "seconds": end[0],
        "products": end[1],
        "steps": end[2],
        "above_best": end[3] / best - 1,
        "test_error": after,
    }


# What is written.

ABOUT = f"""\
Faces: frozen EfficientNet-Lite0 maps 112×7×7, 136 coordinates, the test error is the mean squared error of the
standardized targets of {N_TEST} images of other people. Every solver minimizes `E[loss] + α Σ ‖factors‖²` from the same
start, α = {ALPHA_AT_100:g} · 100/n on all factors of standardized features and targets, the bias free, float32.
CP: rank 128, θ = 0.5. Tucker: rank (48, 5, 5, 32), TT: rank (48, 64, 48), θ = 0.7 on the channel rank alone.
*turned*: features on their principal axes, small ones scaled up; *eliminated*: output factor and bias solved for.
Time includes the turning; evaluating the test error is not timed. Products are those with the features, either way.
PyTorch's L-BFGS: strong Wolfe, history {TORCH_HISTORY}, its every trial counted as a point; ours: history {HISTORY}.
Gauss-Newton and alternating least squares are written for CP only. Best is the lowest objective that any solver found
in its time; "–": did not come so near; *of its own*: of where it ended itself, as minima differ. The solvers of a cell
ran one after another in one process."""


def write_report(record: dict[str, Any]) -> str:
    """The tables."""
    environment = record["environment"]
    settings = record["settings"]
    where = f"{settings['threads']} CPU threads for a cell, {settings['jobs']} cells side by side"
    parts = ["# Solvers of the estimators", f"torch {environment['torch']}, {where}, `{environment['command']}`", ABOUT]
    parts += [f"Each had {settings['seconds']:g} s; seed {settings['seed']}."]
    parts += [write_cell(cell) for cell in record["cells"] if cell["solvers"]]
    return "\n\n".join(parts) + "\n"


def render(part: str, record: dict[str, Any]) -> str:
    """For the docs: "summary", seconds to 5 % / 1 % above the best objective, a row for each cell."""
    assert part == "summary", part
    lines = [
        "| head | n | " + " | ".join(SOLVERS) + " | its stopping rule |",
        "| --- |" + " ---: |" * (len(SOLVERS) + 2),
    ]
    for cell in (cell for cell in record["cells"] if cell["solvers"]):
        times = [write_times(cell["solvers"].get(name)) for name in SOLVERS]
        rule = f"{cell['rule']['seconds']:.1f} s, {100 * cell['rule']['above_best']:+.1f} %"
        lines.append(f"| {' | '.join([cell['head'], str(cell['n']), *times, rule])} |")
    return "\n".join(lines)


def write_times(found: dict[str, Any] | None) -> str:
    """Seconds to each share above the best."""
    if found is None:
        return ""
    reached = [found["reached"][f"{share:g}"] for share in SHARES]
    return " / ".join("–" if point is None else f"{point['seconds']:.1f}" for point in reached)


def write_cell(cell: dict[str, Any]) -> str:
    """One head at one n."""
    lines = [
        f"## {cell['head']}, n = {cell['n']}: best objective {cell['best']:.5f}",
        "",
        "| solver | to 5 % | products | to 1 % | products | to 1 % of its own | at the end: above best | test error |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, found in cell["solvers"].items():
        reached = [text for share in SHARES for text in write_reached(found["reached"][f"{share:g}"])]
        reached += write_reached(found["reached"]["own"])[:1]
        end = [f"{100 * found['above_best']:.2f} %", f"{found['test_error']:.4f}"]
        lines.append(f"| {' | '.join([name, *reached, *end])} |")
    lines += [f"| {name} | CP only | | | | | | |" for name in CP_ONLY if cell["head"] != "cp"]
    if "rule" in cell:
        rule = cell["rule"]
        lines += [
            "",
            f"The product's stopping rule ends it after {rule['seconds']:.2f} s ({rule['products']} products, "
            f"{100 * rule['above_best']:.1f} % above the best, test error {rule['test_error']:.4f}).",
        ]
    return "\n".join(lines)


def write_reached(reached: dict[str, float] | None) -> list[str]:
    """Seconds and products."""
    return ["–", "–"] if reached is None else [f"{reached['seconds']:.2f} s", f"{reached['products']:,}"]


def draw(record: dict[str, Any], path: Path) -> None:
    """Objective above the best, and test error, over time: two rows for each head, a column for each n."""
    cells = [cell for cell in record["cells"] if cell["solvers"]]
    heads, sizes = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("head", "n"))
    with draw_figure(4.0 * len(sizes), 4.6 * len(heads) + 0.8) as figure:
        grid = figure.subplots(2 * len(heads), len(sizes), squeeze=False, sharex="col")
        for cell in cells:
            row, column = 2 * heads.index(cell["head"]), sizes.index(cell["n"])
            draw_cell(cell, grid[row, column], grid[row + 1, column])
        lines, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside upper left", ncols=min(4, 1 + 2 * len(sizes)), fontsize=8)
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=100)


def draw_cell(cell: dict[str, Any], above: Any, below: Any) -> None:
    """Two plots over time."""
    for k, name in enumerate(SOLVERS):
        if name not in cell["solvers"]:
            continue
        marks = [mark for mark in cell["solvers"][name]["marks"] if mark["seconds"] > 0]
        seconds = [mark["seconds"] for mark in marks]
        style = {"color": f"C{k}", "label": name, "linewidth": 2.2 if name == PRODUCT else 1.2}
        above.plot(seconds, [100 * max(mark["objective"] / cell["best"] - 1, 1e-3) for mark in marks], **style)
        below.plot(seconds, [mark["test_error"] for mark in marks], **style)
    above.set(xscale="log", yscale="log", ylim=(0.1, 1000), ylabel="objective above best, %")
    above.set_title(f"{cell['head']}, n = {cell['n']}")
    low = min(mark["test_error"] for found in cell["solvers"].values() for mark in found["marks"])
    below.set(yscale="log", ylim=(0.95 * low, min(1.0, 4 * low)), ylabel="test error", xlabel="seconds")


# The command.


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=numbers, help="training images, separated by commas (default: 100,800,5000)")
    parser.add_argument("--heads", type=heads, help=f"some of {','.join(HEADS)} (default: all)")
    parser.add_argument("--seconds", type=float, help="time of each solver in each cell (default: 60)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of a cell (default: 2)")
    parser.add_argument("--jobs", type=int, default=1, help="cells side by side (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the start (default: 0)")
    parser.add_argument("--quick", action="store_true", help="n = 100 and two seconds; the record goes to --out")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of solvers.md and solvers.png")
    parser.add_argument("--record", type=Path, help=f"default: {RECORD}")
    return parser


def numbers(text: str) -> list[int]:
    """An argument type: numbers of images."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise argparse.ArgumentTypeError(f"takes numbers above 1 separated by commas, got {text!r}")
    return [int(part) for part in parts]


def heads(text: str) -> list[str]:
    """An argument type: names of heads."""
    names = text.split(",")
    if not set(names) <= set(HEADS):
        raise argparse.ArgumentTypeError(f"got {text!r}, choose from {', '.join(HEADS)}")
    return names


def save(record: dict[str, Any], path: Path, out: Path) -> None:
    """The record, the tables and the figure of what there is."""
    write_json(path, record)
    with replacing(out / "solvers.md") as temporary:
        temporary.write_text(write_report(record), encoding="utf-8")
    if any(cell["solvers"] for cell in record["cells"]):
        draw(record, out / "solvers.png")


def main(arguments: list[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    sizes = options.n or ([100] if options.quick else [100, 800, 5000])
    options.seconds = options.seconds or (2.0 if options.quick else 60.0)
    path = options.record or (options.out / "solvers.json" if options.quick else RECORD)
    train, test = split_groups(load_groups())
    sizes = list(dict.fromkeys(min(n, len(train)) for n in sizes))
    settings = {"n": sizes, "heads": options.heads or list(HEADS), "alpha_at_100": ALPHA_AT_100, "n_test": len(test)}
    settings |= {key: getattr(options, key) for key in ("seconds", "seed", "threads", "jobs")}
    cells: list[dict[str, Any]] = []
    record = {"settings": settings, "environment": describe_environment(), "cells": cells, "finished": False}
    todo = [(head, n) for n in sizes for head in settings["heads"]]
    began = time.perf_counter()
    # Those that take longest first, so that no cell is left alone at the end.
    results = Parallel(n_jobs=options.jobs, return_as="generator_unordered")(
        delayed(run_cell)(head, n, options) for head, n in sorted(todo, key=lambda each: each[0] != "cp")
    )
    for cell in results:
        cells.append(cell)
        cells.sort(key=lambda each: todo.index((each["head"], each["n"])))
        record["finished"] = len(cells) == len(todo)
        save(record, path, options.out)
        ends = ", ".join(f"{name} {end['objective']:.5f}" for name, end in cell["solvers"].items())
        print(
            f"{time.perf_counter() - began:5.0f} s  {cell['head']}, n = {cell['n']}: {ends}",
            file=sys.stderr,
            flush=True,
        )
    print(write_report(record))


if __name__ == "__main__":
    main()
