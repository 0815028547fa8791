"""Copy what a repository keeps of finished runs: ``python tools/keep_records.py SOURCE TARGET --commit REV``.

SOURCE is a folder of ``tensor-dropout reproduce``, on whatever machine it was made; TARGET is ``results``. Kept are
records, every tenth epoch of the metrics, of the outcomes under attack the decisions alone (packed with xz), and the
predictions of regressions; weights are not. The commit is that of the code that ran, which a machine without its
history cannot know; where it was known, both must agree, or the machine's clone is named: files were sent there that
it had not committed. Folders of that machine become words.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tensor_dropout.atomic_files import replacing
from tensor_dropout_lab.evaluation.outcomes import PACKED, PLAIN
from tensor_dropout_lab.training.runs import RunFolder

MOST = 2000  # examples of an evaluation
RECORDS = ("cell.json", "run.json", "result.json", "failed.json", "evaluation.json", "evaluation/evaluation.json")


def keep_run(source: Path, target: Path, commit: str, clone: str | None, words: dict[str, str]) -> None:
    """Copy the records of one run."""
    for name in RECORDS:
        if (source / name).is_file():
            text = (source / name).read_text(encoding="utf-8")
            for folder, word in words.items():
                text = text.replace(folder, word)
            record: dict[str, Any] = json.loads(text)
            if "environment" in record:
                record["environment"] = settle_commit(record["environment"], commit, clone, source / name)
            record.pop("classes", None)  # a hundred names, in every record
            write_record(target / name, record)
    lines = [line for line in RunFolder(source).metrics() if line["epoch"] % 10 == 0]
    if lines:
        with replacing(target / "metrics.jsonl") as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if (source / "result.json").is_file() and json.loads((source / "result.json").read_text())["task"] == "regression":
        # a line per scan: few, and all is made of them
        shutil.copyfile(source / "predictions.csv", target / "predictions.csv")
    for path in (*source.glob(PLAIN), *source.glob(f"*/{PLAIN}")):
        keep_decisions(path, (target / path.relative_to(source)).with_name(PACKED))


def write_record(path: Path, record: dict[str, Any]) -> None:
    """A line for each key: half a thousand records have to be small, and are still read by people now and then."""
    lines = ",\n".join(
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}" for key, value in record.items()
    )
    with replacing(path) as temporary:
        temporary.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def settle_commit(environment: dict[str, Any], commit: str, clone: str | None, path: Path) -> dict[str, Any]:
    """The environment with the commit of the code that ran; what the machine's own clone said is kept beside it."""
    found = environment.get("commit", commit)
    if clone is not None and found == clone:
        said = {"clone": clone, "clone_dirty": environment["dirty"]}
        return environment | {"commit": commit, "dirty": False} | said
    if found != commit:
        raise SystemExit(f"{path} was made by {found}, not by {commit}; give its commit")
    return {"dirty": False} | environment | {"commit": commit}


def keep_decisions(source: Path, target: Path) -> None:
    """Outcomes without what only says how sure a decision was, but for the clean examples and regressions.

    Of more examples than MOST nothing is kept: a quarter of a megabyte for each run.
    """
    with np.load(source, allow_pickle=False) as file:
        if len(file["target"]) > MOST:
            return
        kept = {name: file[name] for name in file.files if _is_kept(name)}
    plain = io.BytesIO()
    np.savez(plain, **kept)
    with replacing(target) as temporary:
        temporary.write_bytes(lzma.compress(plain.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def _is_kept(name: str) -> bool:
    part, _, key = name.rpartition("/")
    return part in ("", "clean", "validation", "unknown") or key in ("predicted", "output", "std")


def main() -> None:
    """Copy all runs that ended, those that failed too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--clone", metavar="REV", help="of the machine's own clone, if its files were those of COMMIT")
    parser.add_argument("--word", action="append", default=[], metavar="FOLDER=WORD", help="may be repeated")
    said = parser.parse_args()
    words = dict(word.split("=", 1) for word in said.word)
    ends = ("result.json", "failed.json", "evaluation.json")
    for run in sorted({path.parent for end in ends for path in said.source.glob(f"*/*/{end}")}):
        keep_run(run, said.target / run.relative_to(said.source), said.commit, said.clone, words)
        print(run.relative_to(said.source))


if __name__ == "__main__":
    main()
