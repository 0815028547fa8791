"""Pack what a repository keeps of finished runs: ``python tools/keep_records.py SOURCE TARGET --commit REV``.

SOURCE is a folder of ``tensor-dropout reproduce``, on whatever machine it was made; TARGET is ``results``, where every
experiment becomes EXPERIMENT.jsonl.xz (see ``tensor_dropout_lab.record_store``); runs that are packed there already
stay. Kept are records, every tenth epoch of the metrics, of the outcomes under attack the decisions alone, and the
predictions of regressions; weights are not. The commit is that of the code that ran, which a machine without its
history cannot know; where it was known, both must agree, or the machine's clone is named: files were sent there that
it had not committed. Folders of that machine become words.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tensor_dropout.robustness.outcomes import Outcomes
from tensor_dropout_lab.record_store import RecordStore, Run

MOST = 2000  # examples of an evaluation
ENDED = {"result.json", "failed.json", "evaluation.json"}


def keep_run(run: Run, commit: str, clone: str | None, words: dict[str, str]) -> dict[str, Any]:
    """What is kept of a run, by file."""
    kept: dict[str, Any] = {}
    for name in run.names():
        content = run.read(name)
        if name.endswith(".json"):
            text = json.dumps(content)
            for folder, word in words.items():
                text = text.replace(json.dumps(folder)[1:-1], word)
            record: dict[str, Any] = json.loads(text)
            if "environment" in record:
                record["environment"] = settle_commit(record["environment"], commit, clone, run.folder / name)
            record.pop("classes", None)  # a hundred names, in every record
            kept[name] = record
        elif name == "metrics.jsonl":
            kept[name] = [line for line in content if line["epoch"] % 10 == 0]
        elif name == "predictions.csv" and (run.read_record("result.json") or {}).get("task") == "regression":
            kept[name] = content  # a line per scan: few, and all is made of them
        elif isinstance(content, Outcomes) and (decisions := keep_decisions(content)) is not None:
            kept[name] = decisions
    return kept


def settle_commit(environment: dict[str, Any], commit: str, clone: str | None, path: Path) -> dict[str, Any]:
    """The environment with the commit of the code that ran; what the machine's own clone said is kept beside it."""
    recorded = environment.get("commit", commit)
    if clone is not None and recorded == clone:
        of_clone = {"clone": clone, "clone_dirty": environment["dirty"]}
        return environment | {"commit": commit, "dirty": False} | of_clone
    if recorded != commit:
        raise SystemExit(f"{path} was made by {recorded}, not by {commit}; give its commit")
    return {"dirty": False} | environment | {"commit": commit}


def keep_decisions(outcomes: Outcomes) -> Outcomes | None:
    """Outcomes without what only says how sure a decision was, but for the clean examples and regressions.

    Of more examples than MOST nothing is kept: a quarter of a megabyte for each run.
    """
    if len(outcomes.examples["target"]) > MOST:
        return None
    arrays = {name: values for name, values in outcomes.arrays().items() if _is_kept(name)}
    return Outcomes.restore(outcomes.path, outcomes.header(), arrays)


def _is_kept(name: str) -> bool:
    part, _, key = name.rpartition("/")
    return part in ("", "clean", "validation", "unknown") or key in ("predicted", "output", "std")


def main() -> None:
    """Pack all runs that ended, those that failed too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--clone", metavar="REV", help="of the machine's own clone, if its files were those of COMMIT")
    parser.add_argument("--word", action="append", default=[], metavar="FOLDER=WORD", help="may be repeated")
    options = parser.parse_args()
    words = dict(word.split("=", 1) for word in options.word)
    source, target = RecordStore(options.source), RecordStore(options.target)
    for experiment in source.list_experiments():
        runs = {name: source.run(experiment, name) for name in ("", *source.list_runs(experiment))}
        ended = {name: run for name, run in runs.items() if not name or ENDED & set(run.names())}
        kept = {name: keep_run(run, options.commit, options.clone, words) for name, run in ended.items()}
        if kept := {name: files for name, files in kept.items() if files}:
            target.pack(experiment, kept)
            print(f"{experiment}: {', '.join(name or 'its own files' for name in kept)}")


if __name__ == "__main__":
    main()
