"""Write into the recipes of ``mri`` what ``mri-tuning`` chose: ``python tools/choose_variants.py [RESULTS]``.

For every head and fold, the variant with the smallest error on the people that were held out from that fold's training
part. Each fold chooses by itself: people who test one fold are among those held out in others. Test people choose
nothing.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tensor_dropout.experiments.cells import find_cell
from tensor_dropout.experiments.recipes import ROOT, VARIANT, expand, load_recipes

TUNING, TARGET = "mri-tuning", "mri"
FOLD = "data.options.fold"


def choose(results: Path, preset: str = "paper") -> dict[str, dict[int, str]]:
    """The best variant of every fold, for every head.

    Raises:
        SystemExit: if a trial has not been run, or failed: the budgets would differ.
    """
    chosen: dict[str, dict[int, str]] = {}
    for recipe in load_recipes(TUNING, preset):
        errors: dict[int, dict[str, float]] = {}
        for cell in expand(recipe, preset):
            found = find_cell(cell, results)
            if found.state != "done":
                raise SystemExit(f"{found.folder} is {found.state}; run: tensor-dropout reproduce {TUNING}")
            score = json.loads((found.folder / "result.json").read_text(encoding="utf-8"))["validation"]["mae"]
            errors.setdefault(cell.point[FOLD], {})[cell.point[VARIANT]] = score
        chosen[recipe.name] = {fold: min(own, key=own.__getitem__) for fold, own in sorted(errors.items())}
    return chosen


def write_points(text: str, variants: dict[int, str]) -> str:
    r"""A recipe with these points in its section ``[paper]``, instead of those it had.

    Example:
        >>> print(write_points('row = "FC"\n\n[paper]\nseeds = 5\n', {0: "paper", 1: "cycle"}))
        row = "FC"
        <BLANKLINE>
        [paper]
        seeds = 5
        points = [
            { data.options.fold = 0, variant = "paper" },
            { data.options.fold = 1, variant = "cycle" },
        ]
        <BLANKLINE>
    """
    lines = [f'    {{ {FOLD} = {fold}, variant = "{variant}" }},' for fold, variant in variants.items()]
    points = "\n".join(["points = [", *lines, "]", ""])
    text = re.sub(r"^points = \[\n.*?^\]\n", "", text, flags=re.DOTALL | re.MULTILINE)
    if "[paper]\n" not in text:
        return f"{text.rstrip()}\n\n[paper]\n{points}"
    before, after = text.split("[paper]\n")
    own, gap, rest = after.partition("\n[")
    return f"{before}[paper]\n{own.rstrip()}\n{points}{gap}{rest}"


def main(results: Path) -> None:
    """Choose, and rewrite the recipes."""
    for head, variants in choose(results).items():
        path = ROOT / TARGET / f"{head}.toml"
        path.write_text(write_points(path.read_text(encoding="utf-8"), variants), encoding="utf-8")
        print(head, *(f"{fold}: {variant}" for fold, variant in variants.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "results"))
