"""From labelled images to a fitted head and its held-out errors: the steps of ``tensor-dropout fit``.

Images go through a frozen network once; their maps are kept in a cache. A search fits heads in grouped
cross-validation. Every method is judged on images that it had not seen, its settings chosen in the other folds.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.decoding import measure_volume
from tensor_dropout.features.inputs import name_some
from tensor_dropout_lab.backbones import SIDE, Backbone, check_spec, open_backbone
from tensor_dropout_lab.data.image_files import ImageFiles
from tensor_dropout_lab.data.points_table import Table, Task, Units, find_halves, match_files, read_table
from tensor_dropout_lab.evaluation.held_out import (
    BASELINE,
    Measure,
    Verdict,
    judge,
    measure_classes,
    measure_numbers,
    name_method,
    predict_by_fold,
)
from tensor_dropout_lab.figures import require_matplotlib
from tensor_dropout_lab.fitted_head import check_folder, scale_points

if TYPE_CHECKING:
    from tensor_dropout.sklearn import FeatureMaps

SETTINGS = {
    "say grid=(h, w)": "say --grid h,w",
    "set size, or pass inputs such as the network gets in use": "set --size, or name a network for such images",
    "one with layer=, and for tokens its grid with grid=": "one with --layer, and for tokens its grid with --grid",
    "set channel_axis=-1": "set --channel-axis -1",
    "FeatureMaps: channel_axis is": "FeatureMaps: --channel-axis is",
    "FeatureMaps: grid is": "FeatureMaps: --grid is",
    "FeatureMaps: pool is": "FeatureMaps: --pool is",
    "FeatureMaps: device=": "FeatureMaps: --device ",
    "replace them, or leave them out": "replace them, or delete them and their rows",
}
"""What messages advise in Python, and the options that do the same."""


@dataclass(frozen=True)
class FitOptions:
    """What ``tensor-dropout fit`` is told; see its help."""

    images: Path
    targets: Path
    backbone: str
    weights: Path | None = None
    arguments: str = "{}"
    layer: tuple[str, ...] = ()
    size: tuple[int, ...] | None = None
    pool: tuple[int, ...] | None = None
    grid: tuple[int, ...] | None = None
    channel_axis: int = 1
    units: Units = "fractions"
    missing: Any = "error"
    task: Task | None = None
    folds: int = 5
    n: int | None = None
    device: str | None = None
    cache: Path = Path("out/feature-maps")
    out: Path | None = None
    seed: int = 0

    @property
    def folder(self) -> Path:
        """Where the results go: named by the table, or by its folder if it is called ``points.csv``."""
        path = self.targets.expanduser().resolve()
        return self.out or Path("out", "fit", path.parent.name if path.stem == "points" else path.stem)


@dataclass(frozen=True)
class Examples:
    """Images with their targets.

    Attributes:
        table: a row for each image.
        images: in the same order.
        available: how many there were to choose from.
        sizes: (n, 2) width and height in pixels; None for volumes.
    """

    table: Table
    images: ImageFiles
    available: int
    sizes: np.ndarray | None

    @property
    def groups(self) -> np.ndarray:
        """(n,) the group of each; of a table without groups each image is its own."""
        return np.array(self.table.groups or self.table.files)

    @property
    def targets(self) -> np.ndarray:
        """What the estimator is given as y: numbers (n, k), or class names (n,)."""
        return np.array(self.table.labels) if self.table.values is None else self.table.values

    def in_units(self, values: np.ndarray, units: Units) -> np.ndarray:
        """Coordinates (n, k) as the user's table has them."""
        return scale_points(values, self.table.points, self.sizes) if units == "pixels" else values

    def describe(self) -> str:
        """One line."""
        kind = "volumes" if self.images.are_volumes else "images"
        of = "" if len(self.table) == self.available else f" of {self.available}"
        groups = "" if self.table.groups is None else f" in {len(set(self.table.groups))} groups"
        return f"{len(self.table)}{of} {kind}{groups}; {self._describe_targets()}"

    def _describe_targets(self) -> str:
        if self.table.values is None:
            return f"{len(self.table.classes)} classes: {name_some(self.table.classes)}"
        points = len(self.table.points)
        others = len(self.table.columns) - sum(map(len, self.table.points))
        parts = [f"{points} point{'s' * (points != 1)}"] * bool(points)
        parts += [f"{others} number{'s' * (others != 1)}"] * bool(others)
        return f"targets: {' and '.join(parts)} each"


@dataclass(frozen=True)
class Fitted:
    """What a search found, and how its methods did on images that they had not seen.

    Attributes:
        search: the fitted estimator.
        held_out: by method, predictions: numbers (n, k), or probabilities (n, classes).
        measures: the first one decides.
        verdict: who won.
        seconds: of the search.
    """

    search: Any
    held_out: dict[str, np.ndarray]
    measures: list[Measure]
    verdict: Verdict
    seconds: float

    @property
    def is_classifier(self) -> bool:
        """Whether it tells classes."""
        return hasattr(self.search, "classes_")

    @property
    def saved(self) -> np.ndarray:
        """Held-out predictions of the method that is saved."""
        return self.held_out[self.search.method_]

    def describe(self) -> str:
        """What is saved."""
        search, n = self.search, len(self.search.held_out_fold_)
        theta = "" if search.theta_ is None else f", rank {search.rank_}, θ = {search.theta_:g}"
        text = f"Saved: {name_method(search.method_)}{theta}, α = {search.alpha_:.2g}, fitted on all {n} images."
        if self.is_classifier or not (search.theta_ is None or search.theta_ == 1):
            return text
        why = "ridge has no masks" if search.theta_ is None else "θ = 1 draws no masks"
        return f"{text} Its ± will be the same for every image, since {why}: the mean error of held-out images."


# Images and targets.


def check_options(options: FitOptions) -> None:
    """Refuse at once what would only show after the features."""
    check_spec(options.backbone)
    require_matplotlib()
    if options.weights is not None and not options.weights.expanduser().is_file():
        raise TensorDropoutError(f"fit: there is no file {options.weights} of weights; correct --weights")
    check_folder(options.folder, "fit")


def read_examples(options: FitOptions) -> Examples:
    """The images and targets, checked.

    Raises:
        TensorDropoutError: if they do not belong together, cannot be read, or are too few for the folds.
    """
    table = read_table(options.targets, task=options.task)
    matched, images = match_files(table, options.images, units=options.units, missing=options.missing)
    available = len(matched)
    if options.n is not None and options.n < available:
        rows = sorted(np.random.default_rng(options.seed).permutation(available)[: options.n])
        matched, images = matched.take(rows), images.take(rows)
    for x, y in find_halves(matched.columns) if matched.labels is None else ():
        warnings.warn(f"{x} has no {y}: taken as a number, not a point", stacklevel=2)
    _check_columns(matched)
    _check_folds(matched, options.folds)
    return Examples(matched, images, available, None if images.are_volumes else images.measure())


def _check_columns(table: Table) -> None:
    if table.values is None:
        if len(table.classes) < 2:
            raise TensorDropoutError(
                f"{table.path}: all {len(table)} images are of the class {table.classes[0]!r}; two classes are needed"
            )
        return
    empty = [column for column, values in zip(table.columns, table.values.T, strict=True) if np.isnan(values).all()]
    if empty:
        raise TensorDropoutError(
            f"{table.path}: no number in the column {name_some(empty)}, of {len(table)} images; fill it, or delete it"
        )


def _check_folds(table: Table, folds: int) -> None:
    units = len(set(table.groups or table.files))
    if units == 1 and table.groups is not None:
        raise TensorDropoutError(
            f"fit: at least 2 groups are needed, and all {len(table)} images are of the group {table.groups[0]!r}; "
            "label images of another group, or leave the column group out if these are independent"
        )
    if folds > units:
        what = "images" if table.groups is None else "groups"
        raise TensorDropoutError(
            f"fit: {folds} folds need at least {folds} {what}, and there are {units}; lower --folds (from 2 up), or "
            "label more"
        )
    if table.labels is not None and table.groups is None:
        counts = {name: table.labels.count(name) for name in table.classes}
        rarest = min(counts, key=lambda name: counts[name])
        if counts[rarest] < folds:
            raise TensorDropoutError(
                f"fit: {folds} folds need at least {folds} images of every class, and {rarest!r} has "
                f"{counts[rarest]}; lower --folds (from 2 up), or label more"
            )


# Features.


@dataclass(frozen=True)
class Features:
    """The maps of all images.

    Attributes:
        transformer: what made them.
        values: (n, C, H, W[, D]).
        seconds: what was spent on what.
    """

    transformer: FeatureMaps
    values: np.ndarray
    seconds: dict[str, float]

    @property
    def cached(self) -> int:
        """How many came from the cache."""
        return len(self.values) - self.transformer.computed_

    def describe(self) -> str:
        """One line."""
        maps = self.transformer
        layers = maps.layer_ if isinstance(maps.layer_, str) else " + ".join(maps.layer_)
        picked = " (picked; --layer names another)" if maps.layer is None else ""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items() if name != "all")
        return (
            f"Features: layer {layers}{picked}, maps {'×'.join(map(str, maps.map_shape_))}; {maps.computed_} computed, "
            f"{self.cached} from the cache {maps.cache}; {self.seconds['all']:.1f} s ({parts})"
        )


def open_network(options: FitOptions, images: ImageFiles) -> Backbone:
    """The backbone for these images, with the size that was asked for.

    Raises:
        TensorDropoutError: if the images have no such size, or several without one; see also :func:`open_backbone`.
    """
    size, axes = options.size or (), 3 if images.are_volumes else 2
    if len(size) not in (0, 1, axes):
        kind, sides = ("volumes", "three: x,y,z") if images.are_volumes else ("pictures", "two: height,width")
        raise TensorDropoutError(f"fit: --size of {kind} is one number, or {sides}; got {','.join(map(str, size))}")
    size = size * axes if len(size) == 1 else size
    input_shape = _measure_volumes(images, size) if images.are_volumes else (3, *(size or (SIDE, SIDE)))
    backbone = open_backbone(options.backbone, options.weights, options.arguments, input_shape=input_shape)
    return replace(backbone, size=input_shape[1:]) if size else backbone


def _measure_volumes(images: ImageFiles, size: tuple[int, ...]) -> tuple[int, ...]:
    """(C, *size) of all of them, after they were resized if there is a size."""
    shapes = [(shape[0], *(size or shape[1:])) for shape in images.decode_all(lambda _, file: measure_volume(file))]
    other = next((number for number, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        first, second = ("×".join(map(str, shapes[number])) for number in (0, other))
        cure = "convert them to one number of channels" if size else "set --size, such as --size 64, to resize them"
        raise TensorDropoutError(
            f"{images.where}: the volumes have {len(set(shapes))} sizes (channels×x×y×z): {images.names[0]} has "
            f"{first}, {images.names[other]} {second}; {cure}"
        )
    return shapes[0]


def make_feature_maps(options: FitOptions, backbone: Backbone) -> FeatureMaps:
    """What turns images into maps, with the settings that were asked for."""
    from tensor_dropout.sklearn import FeatureMaps

    layer = options.layer[0] if len(options.layer) == 1 else list(options.layer) or None
    pool = options.pool[0] if options.pool and len(options.pool) == 1 else options.pool
    return FeatureMaps(
        backbone.network, layer, size=backbone.size, mean=backbone.mean, std=backbone.std, pool=pool,
        grid=options.grid, channel_axis=options.channel_axis, device=options.device, cache=options.cache,
    )  # fmt: skip


def compute_features(options: FitOptions, backbone: Backbone, images: ImageFiles) -> Features:
    """The maps of all images, from the cache where it has them."""
    began = time.perf_counter()
    maps = make_feature_maps(options, backbone)
    with tempfile.TemporaryDirectory(prefix="tensor-dropout-") as folder:
        try:
            values = maps.transform(images.paths(Path(folder)))
        except TensorDropoutError as error:  # of a tar file, name the tar file
            message = str(error).replace(f"{folder}/", f"{images.where}: ")
            raise TensorDropoutError(name_options(message)) from error
    return Features(maps, values, {**maps.seconds_, "all": time.perf_counter() - began})


def name_options(message: str) -> str:
    """A message of ``FeatureMaps`` as the command line says it."""
    for setting, option in SETTINGS.items():
        message = message.replace(setting, option)
    return message


# The search, and its errors.


def search_heads(options: FitOptions, features: np.ndarray, examples: Examples) -> Fitted:
    """Fit heads and ridges in grouped cross-validation, and judge them by held-out images."""
    from tensor_dropout.sklearn import TensorClassifierCV, TensorRegressorCV

    began = time.perf_counter()
    is_classifier = examples.table.values is None
    kind = TensorClassifierCV if is_classifier else TensorRegressorCV
    search = kind(cv=options.folds, random_state=options.seed, device=options.device, verbose=True)
    search.fit(features, examples.targets, groups=examples.table.groups)
    seconds = time.perf_counter() - began
    held_out = dict(search.held_out_)
    if is_classifier:
        true = np.searchsorted(search.classes_, examples.targets)
        held_out[BASELINE] = predict_by_fold(np.eye(len(search.classes_))[true], search.held_out_fold_)
        measures = measure_classes(held_out, true)
    else:
        held_out[BASELINE] = predict_by_fold(examples.targets, search.held_out_fold_)
        table = examples.table
        measures = measure_numbers(held_out, examples.targets, table.columns, table.points, examples.sizes)
    verdict = judge(measures[0], examples.groups, seed=options.seed)
    return Fitted(search, held_out, measures, verdict, seconds)
