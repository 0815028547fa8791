"""What would show the spread over the masks as if it were the error, in text, tables, records and pictures.

A ± must say what it is of: an interval, or seeds. A column with a std must be that of an error, with the ends of an
interval beside it.
"""

from __future__ import annotations

import csv
import json
import re

NO_SPREAD = ("targets like 1e8 ± 1",)
"""Words with a ± that are about something else."""
MEANT = re.compile(r"\d+ % intervals: |± half of the \d+ % interval|± std over mask seeds")
"""How a line says what its ± is of."""
SEEDS = re.compile(r"± [\d.]+ \(\d+\)")
"""Of a table: half of the interval over seeds, and their number."""


def find_bare(text):
    """Lines with a ± that do not say what it is of."""
    for words in NO_SPREAD:
        text = text.replace(words, "")
    return [line for line in text.splitlines() if "±" in line and not MEANT.search(line) and "±" in SEEDS.sub("", line)]


def find_bare_headings(text):
    """Coverage and width that do not say that they are of the spread alone."""
    named = re.findall(r"(?:coverage|width)_\d+(?! \(spread| of the spread|\w)", text)
    return [*named, *re.findall(r"(?<!spread: )(?<!widened: )\b\d+ % (?:covers|width)", text)]


def find_bare_columns(rows):
    """Columns with a std that has no interval beside it, or none that goes with it."""
    bare = []
    for column in rows[0]:
        if column == "std" or column.startswith("std_"):
            bare.append(column)
        elif column.endswith("_std"):
            low, high = (column.replace("_std", end) for end in ("_low", "_high"))
            if not {low, high} <= rows[0].keys():
                bare.append(column)
            else:
                halves = [(float(row[high]) - float(row[low])) / 2 / float(row[column]) for row in rows]
                bare += [] if 1 <= min(halves) <= max(halves) <= 4 else [column]
    return bare


def find_bare_keys(record):
    """Keys of a record, at any depth, that hold a std without saying of what."""
    if isinstance(record, list):
        return [key for each in record for key in find_bare_keys(each)]
    if not isinstance(record, dict):
        return []
    own = [key for key in record if re.search(r"(^|_)std$", key) and key not in ("masks_std", "zero_std")]
    return own + [key for each in record.values() for key in find_bare_keys(each)]


def check(said, *folders):
    """No bare spread in what was printed, or in any table, record, page or picture of these folders."""
    assert find_bare(said) == []
    assert find_bare_headings(said) == []
    seen = set()
    for path in (path for folder in folders for path in folder.rglob("*")):
        if path.suffix == ".csv" and path.name not in ("points.csv", "few.csv"):
            with path.open(encoding="utf-8", newline="") as file:
                assert find_bare_columns(list(csv.DictReader(file))) == [], path
        elif path.suffix == ".json" and path.name not in ("run.json", "fit.json"):
            assert find_bare_keys(json.loads(path.read_text("utf-8"))) == [], path
        elif path.suffix in (".svg", ".md", ".html"):  # matplotlib writes what is drawn as comments
            text = path.read_text("utf-8")
            assert find_bare(text) == [], path
        else:
            continue
        seen.add(path.suffix)
    return seen
