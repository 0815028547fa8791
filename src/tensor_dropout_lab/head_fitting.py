"""``tensor-dropout fit``: a head fitted on labelled images, and the folder that says how good it is."""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.evaluation.held_out import mean_distances, summarize, write_table
from tensor_dropout_lab.fitted_head import HEAD, RECORD, describe_head, describe_old_fit, new_results, write_head
from tensor_dropout_lab.head_search import (
    Examples,
    FitOptions,
    Fitted,
    check_options,
    compute_features,
    name_options,
    open_network,
    read_examples,
    search_heads,
)
from tensor_dropout_lab.run_records import describe_environment

Say = Callable[[str], None]
REPORT, PREDICTIONS, NUMBERS = "report.md", "predictions.csv", "numbers.png"
DRAWN_AT_RANDOM, DRAWN_WORST = 8, 4


def fit_head(options: FitOptions, say: Say) -> list[Path]:
    """Fit a head on labelled images, and write it with its held-out errors.

    Args:
        options: what was asked for.
        say: called with every line that a user is to see.

    Returns:
        The files that were written.

    Raises:
        TensorDropoutError: for what cannot be used; nothing is written then.
    """
    check_options(options)
    _keep_inputs(options)
    replaced = describe_old_fit(options.folder)
    if replaced:
        say(f"Replaces {replaced} in {options.folder}")
    with _saying_warnings(say):
        examples = read_examples(options)
        say(examples.describe())
        if examples.table.left_out:
            say(examples.table.left_out)
        backbone = open_network(options, examples.images)
        features = compute_features(options, backbone, examples.images)
        say(features.describe())
        fitted = search_heads(options, features.values, examples)
    summary = summarize(fitted.measures, examples.groups, seed=options.seed)
    table = write_table(summary, classes=fitted.is_classifier)
    for line in [*table, "", fitted.verdict.text, fitted.describe()]:
        say(line)
    record = {
        **describe_head(
            examples.table.task,
            examples.table.columns,
            examples.table.points,
            units=options.units,
            backbone=backbone,
            maps=features.transformer,
        ),
        **_describe_search(options, examples, fitted),
        "errors": summary,
        "verdict": vars(fitted.verdict),
        "cached": features.cached,
        "seconds": {"features": features.seconds, "search": fitted.seconds},
        "environment": describe_environment(),
    }
    with new_results(options.folder, RECORD, stale=[NUMBERS]) as staging:
        _write_results(staging, options, examples, fitted, record, table)
        names = sorted(path.name for path in staging.iterdir())
    return [options.folder / name for name in names]


def _keep_inputs(options: FitOptions) -> None:
    """Refuse to write over what the fit is made of, or among its images."""
    folder = options.folder.resolve()
    taken = {folder, *(folder / name for name in (HEAD, RECORD, REPORT, PREDICTIONS))}
    for option, given in (("images", options.images), ("targets", options.targets), ("weights", options.weights)):
        if given is not None and given.expanduser().resolve() in taken:
            raise TensorDropoutError(f"fit: the results would overwrite --{option} {given}, or mix with it; set --out")


@contextmanager
def _saying_warnings(say: Say) -> Iterator[None]:
    """Warnings that are meant for users become lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            yield
        finally:
            for each in caught:
                if issubclass(each.category, UserWarning) and "picked layer" not in str(each.message):
                    say(f"Note: {name_options(str(each.message))}")


# What is written.


def _describe_search(options: FitOptions, examples: Examples, fitted: Fitted) -> dict[str, Any]:
    search = fitted.search
    return {
        "images": len(examples.table),
        "available": examples.available,
        "groups": None if examples.table.groups is None else len(set(examples.table.groups)),
        "folds": options.folds,
        "seed": options.seed,
        "method": search.method_,
        "rank": search.rank_,
        "theta": search.theta_,
        "alpha": search.alpha_,
        "score": search.best_score_,
    }


def _write_results(
    folder: Path,
    options: FitOptions,
    examples: Examples,
    fitted: Fitted,
    record: dict[str, Any],
    table: list[str],
) -> None:
    fitted.search.plot(folder / "search.png")
    _write_predictions(folder / PREDICTIONS, options, examples, fitted)
    pictures = [*_draw_predictions(folder, options, examples, fitted), "search.png"]
    _write_report(folder / REPORT, options, examples, fitted, table, pictures)
    write_head(folder, fitted.search, record)


def _write_predictions(path: Path, options: FitOptions, examples: Examples, fitted: Fitted) -> None:
    """A row for each image: what the saved method said of it when it had not seen it."""
    table, measure = examples.table, fitted.measures[0]
    groups = [] if table.groups is None else ["group"]
    if fitted.is_classifier:
        header = [table.columns[0], "predicted", "probability"]
        likeliest = fitted.search.classes_[fitted.saved.argmax(1)]
        cells = [[*row] for row in zip(table.labels or [], likeliest, fitted.saved.max(1), strict=True)]
    else:
        error = f"{measure.name} ({measure.unit})"
        header = [*table.columns, *(f"{column}_predicted" for column in table.columns), error]
        numbers = [examples.in_units(values, options.units) for values in (examples.targets, fitted.saved)]
        both = np.hstack([*numbers, measure.values[fitted.search.method_][:, None]])
        cells = [["" if math.isnan(value) else f"{value:.7g}" for value in row] for row in both]
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["file", *groups, "fold", *header])
        for row, (file, fold) in enumerate(zip(table.files, fitted.search.held_out_fold_, strict=True)):
            writer.writerow([file, *([] if table.groups is None else [table.groups[row]]), fold, *cells[row]])


def _draw_predictions(folder: Path, options: FitOptions, examples: Examples, fitted: Fitted) -> list[str]:
    """Pictures of held-out predictions of the saved method; returns their names."""
    from tensor_dropout_lab.point_pictures import draw_classes, draw_numbers, draw_panels

    table, search = examples.table, fitted.search
    if fitted.is_classifier:
        true = np.searchsorted(search.classes_, examples.targets)
        draw_classes(folder / "predictions.png", list(search.classes_), fitted.saved.argmax(1), true)
        return ["predictions.png"]
    names = []
    flat = [point for point in table.points if len(point) == 2] if examples.sizes is not None else []
    if flat:
        caption = (
            f"Held-out images: {DRAWN_AT_RANDOM} at random (seed {options.seed}), then the worst of the others. "
            "White circle: true, blue dot: predicted."
        )
        draw_panels(folder / "predictions.png", _choose_panels(options, examples, fitted, flat), caption)
        names.append("predictions.png")
    others = [k for k in range(len(table.columns)) if all(k not in point for point in flat)]
    if others:
        name = NUMBERS if flat else "predictions.png"
        columns = [table.columns[k] for k in others]
        draw_numbers(folder / name, columns, fitted.saved[:, others], examples.targets[:, others])
        names.append(name)
    return names


def _choose_panels(
    options: FitOptions, examples: Examples, fitted: Fitted, points: Sequence[tuple[int, ...]]
) -> list[Any]:
    """Images at random, then the worst of the others; of images without a point none."""
    from tensor_dropout_lab.point_pictures import Panel, shrink

    errors = 100 * mean_distances(fitted.saved, examples.targets, points)
    known = np.flatnonzero(~np.isnan(errors))
    drawn = np.random.default_rng(options.seed).permutation(known)[:DRAWN_AT_RANDOM]
    others = np.setdiff1d(known, drawn)
    worst = others[np.argsort(-errors[others])][:DRAWN_WORST]
    columns = np.array(points)
    panels = []
    for row, label in [*((row, "") for row in drawn), *((row, "worst: ") for row in worst)]:
        title = f"{label}{Path(examples.table.files[row]).name}, {errors[row]:.2g} %"
        image = shrink(examples.images.decode(int(row)))
        panels.append(Panel(image, title, fitted.saved[row, columns], examples.targets[row, columns]))
    return panels


def _write_report(
    path: Path, options: FitOptions, examples: Examples, fitted: Fitted, table: list[str], pictures: list[str]
) -> None:
    groups = examples.table.groups is not None
    how = [
        f"Errors on images that the method had not seen: {options.folds} folds{', no group in two of them' * groups}.",
        "Each method's settings for a fold are those that were best in the other folds.",
        f"Intervals: 95 %, bootstrap over {'groups' if groups else 'images'}.",
        "Distances in % take x in widths and y in heights of the image." if examples.table.points else "",
    ]
    lines = [
        f"# {options.folder.name}: a head fitted on {len(examples.table)} images",
        "\n\n".join(filter(None, (examples.describe(), examples.table.left_out))),
        fitted.verdict.text,
        "\n".join(table),
        " ".join(how).strip(),
        fitted.describe(),
        f"New images: `tensor-dropout predict IMAGES --model {options.folder}`",
        *(f"![{name.removesuffix('.png')}]({name})" for name in pictures),
    ]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
