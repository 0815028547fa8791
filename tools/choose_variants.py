"""Write into recipes what a search chose: ``python tools/choose_variants.py SEARCH TARGET [RESULTS]``.

``mri-tuning mri``: for every head and fold, the variant with the smallest error on the people that were held out from
that fold's training part. Each fold chooses by itself: people who test one fold are among those held out in others.
``beyond-search beyond-best`` and ``beyond-laptop-search beyond-laptop``: for every head, the trial with the highest
accuracy on held-out images. The test examples choose nothing, and nothing is chosen before all trials of all heads are
there.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tensor_dropout.metrics.registry import find_metric
from tensor_dropout_lab.experiments.cells import find_cell
from tensor_dropout_lab.experiments.recipes import ROOT, describe_experiment, expand, load_recipes

FOLD = "data.options.fold"


def choose(search: str, results: Path, preset: str = "paper") -> dict[str, list[dict[str, Any]]]:
    """The best point of every fold, or of all if there are none, for every head.

    Raises:
        SystemExit: if a trial has not been run: the budgets would differ. One that failed was a trial, and lost.
    """
    metric = find_metric(describe_experiment(search)["metrics"][0])
    sign = 1 if metric.better == "higher" else -1
    chosen: dict[str, list[dict[str, Any]]] = {}
    for recipe in load_recipes(search, preset):
        best: dict[Any, tuple[float, dict[str, Any]]] = {}
        for cell in expand(recipe, preset):
            found = find_cell(cell, results)
            if found.state == "failed":
                continue
            if found.state != "done":
                raise SystemExit(f"{found.run.folder} is {found.state}; run: tensor-dropout reproduce {search}")
            assert found.result is not None
            score, fold = sign * found.result["validation"][metric.name], cell.point.get(FOLD)
            if fold not in best or score > best[fold][0]:
                best[fold] = score, cell.point
        chosen[recipe.name] = [point for _, point in best.values()]
    return chosen


def write_points(text: str, row: str, points: list[dict[str, Any]]) -> str:
    r"""The recipes of an experiment with these points in ``[rows.ROW.paper]``, instead of those it had.

    Example:
        >>> print(write_points('[rows.fc]\nrow = "FC"\n\n[rows.fc.paper]\nseeds = 5\n', "fc", [{"net.theta": 0.9}]))
        [rows.fc]
        row = "FC"
        <BLANKLINE>
        [rows.fc.paper]
        seeds = 5
        points = [
            { net.theta = 0.9 },
        ]
        <BLANKLINE>
    """
    lines = [", ".join(f"{key} = {json.dumps(value)}" for key, value in point.items()) for point in points]
    block = "\n".join(["points = [", *(f"    {{ {line} }}," for line in lines), "]", ""])
    before, own, after = split_row(text, row)
    own = re.sub(r"^points = \[\n.*?^\]\n", "", own, flags=re.DOTALL | re.MULTILINE)
    head = f"[rows.{row}.paper]\n"
    if head not in own:
        return f"{before}{own.rstrip()}\n\n{head}{block}{after}"
    start, section = own.split(head)
    section, gap, rest = section.partition("\n[")
    return f"{before}{start}{head}{section.rstrip()}\n{block}{gap}{rest}{after}"


def split_row(text: str, row: str) -> tuple[str, str, str]:
    """The file before a row, the comment and the tables of the row, and the rows after it."""
    tables = [*re.finditer(r"(?:^#.*\n)*^\[rows\.([\w-]+|\".+\")\]\n", text, re.MULTILINE)]
    place = [table[1] for table in tables].index(row)
    start = tables[place].start()
    end = tables[place + 1].start() - 1 if place + 1 < len(tables) else len(text)
    return text[:start], text[start:end], text[end:]


def main(search: str, target: str, results: Path) -> None:
    """Choose, and rewrite the recipes."""
    path = ROOT / f"{target}.toml"
    for head, points in choose(search, results).items():
        path.write_text(write_points(path.read_text(encoding="utf-8"), head, points), encoding="utf-8")
        print(head, *points)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]) if len(sys.argv) == 4 else Path(__file__).parents[1] / "results")
