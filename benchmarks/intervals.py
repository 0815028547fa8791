"""Do intervals hold, and which std tells the error? results/intervals-plan.md, cell by cell.

    python benchmarks/intervals.py                                what the record does not have: an hour on one CPU core
    python benchmarks/intervals.py --sets retina --n 100          some of it
    python benchmarks/intervals.py --scans FOLDER --sets ixi      brain ages; FOLDER as for examples/brain_age_frozen.py
    python benchmarks/intervals.py --report                       tables and the picture, from the record
    python benchmarks/intervals.py --quick                        two splits of simulated data, into --out

A cell is a set, a number of training samples and a split. All methods share the fits of a cell, but for the ensemble.
The maps are those of benchmarks/estimators/features.py. A finished cell is one line of the record.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from position_heads.data import FOLDS, Group, load_images
from position_heads.running import append
from position_heads.tables import write_interval, write_table
from scipy.stats import binomtest, norm, spearmanr
from sklearn.model_selection import GroupKFold
from torch import Tensor

from tensor_dropout.atomic_files import replacing
from tensor_dropout.calibration.conformal import conformal_quantile
from tensor_dropout.metrics.measures import normal_crps
from tensor_dropout.sklearn import TensorRegressor
from tensor_dropout_lab.evaluation.intervals import seed_interval
from tensor_dropout_lab.figures import draw_figure
from tensor_dropout_lab.run_records import describe_environment, handing_on_the_command

RECORD, PICTURE = Path("results/intervals.jsonl"), Path("docs/images/intervals.png")
POSITIONS, SIMULATED, IXI = ("wings", "retina", "faces"), "simulated", "ixi"
SETS = (*POSITIONS, SIMULATED, IXI)
SIZES = (100, 400)
PEOPLE = 116
LEVELS = (0.5, 0.9, 0.95)
CALIBRATE, MEMBERS = 5, 5
OURS, CONSTANT, MASKS = "leverage", "constant", "masks alone"
METHODS = (MASKS, CONSTANT, "masks + noise", OURS, "masks + leverage", "cross", "ensemble of five")
NAMES = {
    "wings": "fly wings", "retina": "optic disc", "faces": "faces", SIMULATED: "simulated", IXI: "brain age (IXI)",
}  # fmt: skip
SPLITS = {name: 5 if name == IXI else FOLDS for name in SETS}


@dataclass(frozen=True, order=True)
class Cell:
    """A set, a number of training samples and a split."""

    set: str
    n: int
    split: int


@dataclass(frozen=True)
class Data:
    """What is fitted, and what is predicted; groups or None."""

    x: np.ndarray
    y: np.ndarray
    groups: np.ndarray | None
    x_test: np.ndarray
    y_test: np.ndarray


def list_cells(sets: Sequence[str] = SETS, sizes: Sequence[int] = SIZES) -> list[Cell]:
    """What the plan asks for."""
    return [
        Cell(name, n, split)
        for n, name in product(sizes, sets)
        for split in range(SPLITS[name])
        if name != IXI or n == sizes[0]
    ]


# The data.


def load(cell: Cell, features: Path, scans: Path | None) -> Data:
    """The data of a cell."""
    if cell.set == SIMULATED:
        return simulate(cell)
    if cell.set == IXI:
        return load_ages(cell, scans)
    images = load_images(features, Group(cell.set, "efficientnet", cell.n))
    assert images is not None
    fold = images.folds[cell.split]
    groups = np.load(features / cell.set / "groups.npy")
    used = np.unique(np.concatenate([np.concatenate([each.train, each.test]) for each in images.folds]))
    assert len(used) == len(groups)  # ten folds test every image, so rows are those of the files
    x = images.x.astype(np.float32)
    return Data(x[fold.train], images.y[fold.train], groups[fold.train], x[fold.test], images.y[fold.test])


def simulate(cell: Cell, n_test: int = 1000) -> Data:
    """CP of rank 5 on 8×7×7, two outputs, noise of a quarter of the signal's std."""
    rng = np.random.default_rng([cell.split, 26])
    factors = [rng.normal(size=(size, 5)) for size in (8, 7, 7, 2)]
    weight = np.einsum("cr,hr,wr,or->chwo", *factors)
    x = rng.normal(size=(cell.n + n_test, 8, 7, 7)).astype(np.float32)
    signal = np.tensordot(x, weight, 3)
    y = (signal + 0.25 * signal.std(0) * rng.normal(size=signal.shape)).astype(np.float32)
    return Data(x[: cell.n], y[: cell.n], None, x[cell.n :], y[cell.n :])


_PEOPLE: dict[Path, Any] = {}


def load_ages(cell: Cell, scans: Path | None) -> Data:
    """Maps of all slices of a scan, and ages; folds of people."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import brain_age_frozen as ages

    assert scans is not None
    if scans not in _PEOPLE:
        volumes, known, folds = ages.load_people(scans)
        names = [name for fold in folds for name in fold]
        maps = ages.compute_maps("ImageNet", [volumes[name] for name in names])
        _PEOPLE[scans] = maps.astype(np.float32), np.array([known[name] for name in names], np.float32), folds
    maps, years, folds = _PEOPLE[scans]
    ends = np.cumsum([0, *map(len, folds)])
    test = np.zeros(len(years), bool)
    test[ends[cell.split] : ends[cell.split + 1]] = True
    return Data(maps[~test], years[~test], None, maps[test], years[test])


# The methods. Each gives the std of errors, held out and new, or the ends of intervals.


@dataclass
class Spread:
    """Held-out errors and the std of each, (m, O); groups (m,); predictions of new samples and their std, (n, O)."""

    errors: Tensor
    std: Tensor
    groups: Tensor
    mean: Tensor
    new_std: Tensor

    def scaled(self) -> Tensor:
        """The std of new samples, so that held-out errors over theirs have a mean square of 1."""
        return self.new_std * (self.errors / self.std).square().nanmean(0).sqrt()

    def interval(self, coverage: float) -> tuple[Tensor, Tensor]:
        """Conformal, by the scaled held-out errors."""
        half = conformal_quantile((self.errors / self.std).abs(), self.groups, coverage).value * self.new_std
        return self.mean - half, self.mean + half


def fit_shares(squares: Tensor, parts: Sequence[Tensor], steps: int = 2000) -> list[Tensor]:
    """Weights ≥ 0 of parts of the variance, of the highest normal likelihood: multiplicative steps that never lower it.

    Each output has a scale of its own; the shares are those of the whole model.
    """
    scale = squares.mean(0)
    relative = [part / part.mean(0).clamp(min=1e-300) for part in parts]
    weights = torch.full((len(parts),), 1 / len(parts), dtype=torch.float64)
    for _ in range(steps):
        variance = sum(w * part for w, part in zip(weights, relative, strict=True))
        up = torch.stack([(squares / scale / variance**2 * part).mean() for part in relative])
        down = torch.stack([(part / variance).mean() for part in relative])
        weights = weights * (up / down).sqrt()
    return [w * scale / part.mean(0).clamp(min=1e-300) for w, part in zip(weights, parts, strict=True)]


def run_cell(cell: Cell, data: Data) -> dict[str, Any]:
    """Every method of a cell."""
    began = time.perf_counter()
    model = TensorRegressor(calibrate=CALIBRATE, random_state=0).fit(data.x, data.y, groups=data.groups)
    seconds = time.perf_counter() - began
    calibration, fits = model.calibration_, model.cross_fits_
    outputs = int(np.prod(data.y.shape[1:], initial=1))
    x, x_test = torch.from_numpy(data.x), torch.from_numpy(data.x_test)
    shape = (-1, outputs)
    mean = torch.from_numpy(model.predict(data.x_test)).double().view(shape)
    std = calibration.std(calibration.leverage.measure(model.layer_, x_test), len(x_test)).view(shape)
    masks = model.layer_.moments(x_test).variance.detach().double().view(shape)
    # What the folds' own fits say of the samples that they had not seen.
    errors, held_h, held_masks = (torch.zeros(len(x), outputs, dtype=torch.float64) for _ in range(3))
    for fit in fits:
        layer, rows = fit.module, fit.rows
        errors[rows] = (torch.from_numpy(data.y)[rows].view(shape) - layer(x[rows]).view(shape)).detach().double()
        held_h[rows] = fit.leverage.measure(layer, x[rows]).reshape(shape)
        held_masks[rows] = layer.moments(x[rows]).variance.detach().double().view(shape)
    h = calibration.leverage.measure(model.layer_, x_test).reshape(shape)
    held_std = calibration.std(held_h.view(len(x), *calibration.noise.shape), len(x)).view(shape)
    ones, new_ones = torch.ones_like(errors), torch.ones_like(mean)
    noise = (errors.square() - held_masks).mean(0).clamp(min=0)
    a, b, c = fit_shares(errors.square(), [held_masks, held_h, ones])
    spreads = {
        CONSTANT: (ones, new_ones),
        "masks + noise": ((held_masks + noise).sqrt(), (masks + noise).sqrt()),
        OURS: (held_std, std),
        "masks + leverage": ((a * held_masks + b * held_h + c).sqrt(), (a * masks + b * h + c).sqrt()),
    }
    row: dict[str, Any] = {"share": calibration.share, "seconds": {"fit with five folds": seconds}}
    target = torch.from_numpy(data.y_test).double().view(shape)
    measured = {
        name: measure(Spread(errors, held, calibration.groups, mean, new), target)
        for name, (held, new) in spreads.items()
    }
    alone = {level: (mean - z * masks.sqrt(), mean + z * masks.sqrt()) for level in LEVELS for z in [two_sided(level)]}
    measured[MASKS] = measure_ends(alone, target) | measure_std(mean, masks.sqrt(), target)
    crossed = {}
    for level in LEVELS:
        ends = model.predict_interval(data.x_test, level, method="cross")
        crossed[level] = tuple(torch.from_numpy(np.asarray(end)).double().view(shape) for end in ends)
    measured["cross"] = measure_ends(crossed, target)
    if cell.n == SIZES[0] and cell.set != IXI:
        measured["ensemble of five"] = run_ensemble(data, calibration.groups, target, row["seconds"])
    return row | {"methods": measured}


def run_ensemble(data: Data, groups: Tensor, target: Tensor, seconds: dict[str, float]) -> dict[str, float]:
    """Five fits from other starts, in each fold and on all: the variance of their means, and one number."""
    began = time.perf_counter()
    numbers = np.arange(len(data.x)) if data.groups is None else data.groups
    folds = list(GroupKFold(CALIBRATE, shuffle=True, random_state=0).split(data.x, groups=numbers))

    def predict(train: np.ndarray, new: np.ndarray) -> Tensor:
        members = [TensorRegressor(random_state=seed).fit(data.x[train], data.y[train]) for seed in range(MEMBERS)]
        return torch.stack([torch.from_numpy(each.predict(new)).double().view(len(new), -1) for each in members])

    held = torch.zeros(MEMBERS, len(data.x), target.shape[1], dtype=torch.float64)
    for train, test in folds:
        held[:, test] = predict(train, data.x[test])
    new = predict(np.arange(len(data.x)), data.x_test)
    seconds["ensemble"] = time.perf_counter() - began
    errors = torch.from_numpy(data.y).double().view(held.shape[1:]) - held.mean(0)
    noise = (errors.square() - held.var(0)).mean(0).clamp(min=0)
    spread = Spread(errors, (held.var(0) + noise).sqrt(), groups, new.mean(0), (new.var(0) + noise).sqrt())
    return measure(spread, target)


# What is measured.


def two_sided(level: float) -> float:
    """The z of a normal interval."""
    return float(norm.ppf((1 + level) / 2))


def measure(spread: Spread, target: Tensor) -> dict[str, float]:
    """Of a std: its conformal intervals, and its scores."""
    ends = {level: spread.interval(level) for level in LEVELS}
    return measure_ends(ends, target) | measure_std(spread.mean, spread.scaled(), target)


def measure_ends(ends: dict[float, tuple[Tensor, Tensor]], target: Tensor) -> dict[str, float]:
    """Share of targets inside, and mean width, at each level; the size of the test part."""
    found: dict[str, float] = {"tested": len(target)}
    for level, (low, high) in ends.items():
        percent = f"{100 * level:g}"
        found[f"coverage_{percent}"] = float(((low <= target) & (target <= high)).double().mean())
        found[f"width_{percent}"] = float((high - low).mean())
    return found


def measure_std(mean: Tensor, std: Tensor, target: Tensor) -> dict[str, float]:
    """NLL and CRPS of normal predictions; rank correlation of a sample's mean error and mean std."""
    error = (target - mean).abs()
    sample, size = error.mean(1), std.mean(1)
    varies = float(size.max() - size.min()) > 1e-9 * float(size.max())
    return {
        "nll": -float(torch.distributions.Normal(mean, std.clamp(min=1e-12)).log_prob(target).mean()),
        "crps": normal_crps(mean.numpy(), std.numpy(), target.numpy()),
        "rank_correlation": float(spearmanr(sample, size).statistic) if varies else 0.0,
    }


# Running.


def read_record(path: Path) -> dict[Cell, dict[str, Any]]:
    """The finished cells."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return {Cell(row["set"], row["n"], row["split"]): row for row in rows}


def run_cells(cells: Sequence[Cell], record: Path, features: Path, scans: Path | None, minutes: float) -> None:
    """What the record does not have, until the time is over."""
    done, ends = read_record(record), time.monotonic() + 60 * minutes
    for cell in cells:
        if cell in done:
            continue
        if time.monotonic() > ends:
            print(f"ended after {minutes:g} minutes", file=sys.stderr)
            return
        row = run_cell(cell, load(cell, features, scans))
        append(record, {**vars(cell), **row, "environment": describe_environment("scikit-learn", "numpy", "scipy")})
        print(f"{cell.set}, n = {cell.n}, split {cell.split}: {row['seconds']}", file=sys.stderr, flush=True)


# Tables.

Groups = dict[tuple[str, int], list[dict[str, Any]]]


def group_rows(record: dict[Cell, dict[str, Any]]) -> Groups:
    """By set and n, in the plan's order."""
    groups: Groups = {}
    for cell, row in sorted(record.items(), key=lambda item: (SETS.index(item[0].set), item[0].n, item[0].split)):
        groups.setdefault((cell.set, cell.n), []).append(row)
    return groups


def values(rows: list[dict[str, Any]], method: str, key: str) -> list[float]:
    """Of every split; empty where the method was not run in all."""
    return [row["methods"][method][key] for row in rows] if all(method in row["methods"] for row in rows) else []


def mean_interval(numbers: Sequence[float], scale: float = 1.0, decimals: int = 1) -> str:
    """A mean and its 95 % t interval; nothing for nothing."""
    if not numbers:
        return ""
    low, high = seed_interval([scale * number for number in numbers])
    parts = (scale * float(np.mean(numbers)), low, high)
    text = [f"{part:.{decimals}f}".replace("-", "−") for part in parts]
    return f"{text[0]} [{text[1]}, {text[2]}]"


def name_group(key: tuple[str, int]) -> list[str]:
    return [NAMES[key[0]], str(PEOPLE if key[0] == IXI else key[1])]


def write_numbers(groups: Groups, key: str, scale: float, decimals: int, methods: Sequence[str] = METHODS) -> str:
    """A row for each set and n, a column for each method."""
    rows = (
        [*name_group(group), str(len(rows)), *(mean_interval(values(rows, m, key), scale, decimals) for m in methods)]
        for group, rows in groups.items()
    )
    return write_table(["set", "n", "splits", *methods], rows, 3)


def write_widths(groups: Groups) -> str:
    """Widths at 90 % over those of constant intervals, paired by split, in %."""
    methods = [method for method in METHODS if method not in (CONSTANT, MASKS)]
    lines = []
    for group, rows in groups.items():
        base, cells = values(rows, CONSTANT, "width_90"), []
        for method in methods:
            changes = [100 * (w / b - 1) for w, b in zip(values(rows, method, "width_90"), base, strict=False)]
            cells.append(write_interval((float(np.mean(changes)), *seed_interval(changes))) if changes else "")
        lines.append([*name_group(group), *cells])
    return write_table(["set", "n", *methods], lines, 2)


def write_verdict(groups: Groups) -> str:
    """The bars of the plan."""
    held = {key: 100 * float(np.mean(values(rows, OURS, "coverage_90"))) for key, rows in groups.items()}
    lines = []
    for (name, n), rows in groups.items():
        told = f"{NAMES[name]}, n = {PEOPLE if name == IXI else n}: {held[name, n]:.1f} % inside 90 % intervals"
        if name == IXI:
            people = round(sum(row["methods"][OURS]["tested"] for row in rows))
            inside = round(sum(row["methods"][OURS]["coverage_90"] * row["methods"][OURS]["tested"] for row in rows))
            low, high = binomtest(inside, people).proportion_ci()
            good = low <= 0.9 <= high
            told += f", binomial interval {100 * low:.1f} to {100 * high:.1f}"
        else:
            good = 87 <= held[name, n] <= 93
        lines.append(f"- {'met' if good else '**missed**'}: {told}")
    return "\n".join(lines)


PARTS: dict[str, Callable[[Groups], str]] = {
    "verdict": write_verdict,
    "coverage": lambda groups: write_numbers(groups, "coverage_90", 100, 1),
    "widths": write_widths,
    "nll": lambda groups: write_numbers(groups, "nll", 1, 2, [m for m in METHODS if m not in (MASKS, "cross")]),
    "ranks": lambda groups: write_numbers(
        groups, "rank_correlation", 1, 2, [m for m in METHODS if m not in (CONSTANT, "cross")]
    ),
}


def render(part: str, record: dict[Cell, dict[str, Any]]) -> str:
    """One of :data:`PARTS`, for the docs."""
    return PARTS[part](group_rows(record))


def draw(record: dict[Cell, dict[str, Any]], path: Path) -> None:
    """How many targets are inside, over how many are said to be: masks alone, and held-out intervals."""
    groups = group_rows(record)
    shown = {MASKS: ("C0", ":", "masks alone"), OURS: ("C3", "-", "held-out errors and leverage")}
    with draw_figure(10.5, 2.9) as figure:
        names = [name for name in SETS if any(group[0] == name for group in groups)]
        panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
        for panel, name in zip(panels, names, strict=True):
            panel.plot([45, 100], [45, 100], color="#999999", lw=1)
            rows = groups[min(group for group in groups if group[0] == name)]
            for method, (color, style, label) in shown.items():
                inside = [100 * np.mean(values(rows, method, f"coverage_{100 * level:g}")) for level in LEVELS]
                panel.plot([100 * level for level in LEVELS], inside, style, color=color, marker="o", ms=4, label=label)
            panel.set(title=NAMES[name], xlabel="stated, %", xticks=[50, 90], xlim=(45, 100), ylim=(0, 100))
        panels[0].set_ylabel("new targets inside, %")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2, fontsize=9)
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=110, format="png")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="intervals.py", description="Runs results/intervals-plan.md, prints tables.")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=[name for name in SETS if name != IXI])
    parser.add_argument("--n", nargs="+", type=int, choices=SIZES, default=SIZES)
    parser.add_argument("--features", type=Path, default=Path("out/features"), help="default: out/features")
    parser.add_argument("--scans", type=Path, help="IXI's scans and participants.tsv, for --sets ixi")
    parser.add_argument("--minutes", type=float, default=600, help="begin no cell after so many (default: 600)")
    parser.add_argument("--record", type=Path, help=f"default: {RECORD}")
    parser.add_argument("--picture", type=Path, help=f"default: {PICTURE}")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where --quick writes (default: out/bench)")
    parser.add_argument("--report", action="store_true", help="only tables and the picture")
    parser.add_argument("--quick", action="store_true", help="two splits of simulated data; into --out")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    folder = options.out if options.quick else Path()
    record = options.record or folder / (RECORD.name if options.quick else RECORD)
    picture = options.picture or folder / (PICTURE.name if options.quick else PICTURE)
    cells = list_cells([SIMULATED], SIZES[:1])[:2] if options.quick else list_cells(options.sets, options.n)
    if IXI in options.sets and options.scans is None and not options.report and not options.quick:
        parser.error("--sets ixi needs --scans FOLDER")
    missing = [
        n for n in {c.set for c in cells} & set(POSITIONS) if not (options.features / n / "block10.npy").exists()
    ]
    if missing and not options.report:
        parser.error(f"no maps of {', '.join(sorted(missing))} in {options.features}; make them with features.py")
    torch.set_num_threads(1)
    if not options.report:
        warnings.simplefilter("ignore", UserWarning)
        with handing_on_the_command():
            run_cells(cells, record, options.features, options.scans, options.minutes)
    found = {cell: row for cell, row in read_record(record).items() if cell in cells or options.report}
    if not found:
        parser.error(f"{record} has none of these cells")
    for part in PARTS:
        print(f"## {part}\n\n{render(part, found)}\n")
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(found, picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
