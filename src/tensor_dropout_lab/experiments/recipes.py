"""Recipes: a TOML file for each experiment, that is a table or a figure; in it a TOML table for each row or curve.

A file holds the place of the experiment in the ``order``, its title and reference. ``[both]`` (presets), ``[paper]``
(the full size) and ``[quick]`` (the miniature on data that comes with the library) hold what all rows share. Then come
the rows in the paper's order: ``[rows.NAME]`` with the paper's numbers, ``[rows.NAME.both]``, ``.paper`` and ``.quick``
with what is the row's own. Later ones win: both, the preset, the row's both, the row's preset.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tensor_dropout.errors import TensorDropoutError

ROOT = Path(__file__).parents[1] / "recipes"
_ROW_KEYS = {"row", "printed", "presets", "both", "paper", "quick"}
_CONFIG = ("data", "net", "optimizer", "schedule", "run")
VARIANT = "variant"
"""The key of a point that names one of the experiment's variants: settings that change together."""


@dataclass(frozen=True)
class Recipe:
    """One row of a table, or one curve or panel of a figure.

    Attributes:
        experiment: the table or figure.
        name: that of its table in the file.
        row: as the paper calls it.
        printed: the paper's numbers.
        settings: of the preset: the experiment's, then the recipe's own.
    """

    experiment: str
    name: str
    row: str
    printed: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run: a recipe at one point of its grid with one seed; or the evaluation of such a run.

    Attributes:
        experiment: the table or figure.
        recipe: its recipe.
        row: as the paper calls it.
        seed: of the run.
        point: the values of the grid's keys.
        config: dotted keys of the training config; empty if another experiment's run is evaluated.
        evaluation: settings of the evaluation; None: none.
        of: the cell whose run is evaluated; None: its own.
        others: cells whose runs are averaged with that one, as an ensemble.
    """

    experiment: str
    recipe: str
    row: str
    seed: int
    point: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] | None = None
    of: Cell | None = None
    others: tuple[Cell, ...] = ()

    @property
    def slug(self) -> str:
        """The name of its folder.

        Example:
            >>> Cell("cifar100-surface", "bernoulli", "", 0, {"net.rank": [24, 2, 2], "net.theta": 0.8}).slug
            'bernoulli-rank24x2x2-theta0.8-seed0'
        """
        words = [
            ("" if key == VARIANT else key.rpartition(".")[2]) + _write(value) for key, value in self.point.items()
        ]
        return "-".join([self.recipe, *words, f"seed{self.seed}"])

    def identity(self) -> dict[str, Any]:
        """What its record depends on; a record of another identity is stale."""
        own: dict[str, Any] = {"config": _essential(self.config), "evaluation": self.evaluation}
        sources = {} if self.of is None else {"of": {"config": _essential(self.of.config)}}
        others = {"others": [_essential(cell.config) for cell in self.others]} if self.others else {}
        return own | sources | others


_FREE = ("run.threads", "run.evaluate_every", "run.checkpoint_epochs")
"""Keys that do not say what is computed."""


def _essential(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _FREE}


def _write(value: Any) -> str:
    return (
        "x".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


@cache
def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise TensorDropoutError(f"recipes: {path.name} is not TOML: {error}") from None


def list_experiments(root: Path = ROOT) -> list[str]:
    """The tables and figures that there are recipes for, in the order of the paper.

    Example:
        >>> list_experiments()[0], list_experiments()[-1]
        ('synthetic-cp', 'digits')
    """
    paths = sorted(root.glob("*.toml"))
    return [path.stem for path in sorted(paths, key=lambda path: _read(path).get("order", math.inf))]


def describe_experiment(experiment: str, root: Path = ROOT) -> dict[str, Any]:
    """Title, reference and metrics of an experiment.

    Raises:
        TensorDropoutError: if there is none of that name, with the nearest.
    """
    known = list_experiments(root)
    if experiment not in known:
        raise TensorDropoutError(f"reproduce: there is no experiment {experiment!r}; {suggest(experiment, known)}")
    return _read(root / f"{experiment}.toml")


def suggest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    """The nearest known names, for a message."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"


def load_recipes(experiment: str, preset: str, root: Path = ROOT) -> list[Recipe]:
    """All recipes of an experiment for a preset.

    Raises:
        TensorDropoutError: if the file is not what it should be.

    Example:
        >>> [recipe.row for recipe in load_recipes("cifar100", "paper")][:2]
        ['FC', 'FC + dropout']
    """
    shared = describe_experiment(experiment, root)
    recipes = []
    for name, row in shared.get("rows", {}).items():
        unknown = set(row) - _ROW_KEYS
        if unknown or "row" not in row:
            what = f"has the key {sorted(unknown)[0]!r}" if unknown else "has no row"
            raise TensorDropoutError(
                f"recipes: {experiment}.toml, rows.{name} {what}; it may have {', '.join(sorted(_ROW_KEYS))}"
            )
        if preset not in row.get("presets", ("quick", "paper")):
            continue
        settings: dict[str, Any] = {}
        for layer in (shared.get("both"), shared.get(preset), row.get("both"), row.get(preset)):
            _merge(settings, layer or {})
        recipes.append(Recipe(experiment, name, row["row"], row.get("printed", {}), settings))
    return recipes


def _merge(into: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


def expand(
    recipe: Recipe, preset: str, first_seed: int = 0, root: Path = ROOT, *, seeds: Sequence[int] | None = None
) -> list[Cell]:
    """The cells of a recipe: every point of its grid, or of its list of points, with every seed.

    With ``resample`` a seed also draws the data: which images are used, which labels are wrong.

    Args:
        recipe: the recipe.
        preset: "quick" or "paper".
        first_seed: of as many as the recipe says.
        root: where recipes are.
        seeds: these instead.

    Raises:
        TensorDropoutError: if it names a recipe or a variant that does not exist.
    """
    settings = recipe.settings
    evaluation = dict(settings["evaluation"]) if "evaluation" in settings else None
    if "of" in settings:
        other, _, name = settings["of"].partition("/")
        found = [each for each in load_recipes(other, preset, root) if each.name == name]
        if not found:
            raise TensorDropoutError(
                f"recipes: {recipe.experiment}/{recipe.name} is of {settings['of']!r}, which is none"
            )
        runs = expand(found[0], preset, first_seed, root, seeds=seeds)
        members: dict[str, list[Cell]] = {}
        for run in runs:  # the runs that may form an ensemble differ in their seeds alone
            members.setdefault(repr(run.point), []).append(run)
        if evaluation is not None and evaluation.pop("ensemble", False):
            chosen = [(own[0], tuple(own[1:])) for own in members.values()]
        else:
            chosen = [(run, ()) for run in runs]
        return [
            Cell(recipe.experiment, recipe.name, recipe.row, run.seed, run.point, {}, evaluation, run, others)
            for run, others in chosen
        ]
    tables = {key: settings[key] for key in _CONFIG if key in settings}
    config = flatten(tables)
    cells = []
    for point in _list_points(settings):
        varied = {key: value for key, value in point.items() if key != VARIANT}
        if VARIANT in point:
            varied |= flatten(_find_variant(recipe, point[VARIANT], preset, root))
        for seed in seeds or range(first_seed, first_seed + settings.get("seeds", 1)):
            drawn = {"data.seed": seed} if settings.get("resample") else {}
            own = {**config, **varied, **drawn, "run.seed": seed}
            cells.append(Cell(recipe.experiment, recipe.name, recipe.row, seed, point, own, evaluation))
    return cells


def _list_points(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of the list ``points``, or all combinations of the grid."""
    if "points" in settings:
        return [flatten(point) for point in settings["points"]]
    grid = settings.get("grid", {})
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _find_variant(recipe: Recipe, name: str, preset: str, root: Path) -> Mapping[str, Any]:
    """The settings of a variant; ``variants`` may name the experiment that has them."""
    variants = recipe.settings.get("variants", {})
    if isinstance(variants, str):
        said = describe_experiment(variants, root)
        variants = {
            name: each for part in ("both", preset) for name, each in said.get(part, {}).get("variants", {}).items()
        }
    if name not in variants:
        raise TensorDropoutError(
            f"recipes: {recipe.experiment}/{recipe.name} has no variant {name!r}; {suggest(name, variants)}"
        )
    return variants[name]


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"run": {"epochs": 3}}`` -> ``{"run.epochs": 3}``."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
