"""Calibrate a finished run: what examples that it was not trained on say of its errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensor_dropout.calibration.classification import ClassCalibration
from tensor_dropout.calibration.files import load_calibration, save_calibration
from tensor_dropout.calibration.model import LEAST, ModelCalibration, calibrate
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.evaluation.examples import Scale, take_examples
from tensor_dropout_lab.evaluation.run_loading import load_run_data, load_run_network
from tensor_dropout_lab.run_records import describe_environment
from tensor_dropout_lab.training.processes import choose_device
from tensor_dropout_lab.training.runs import read_finished_run

FILE = "calibration.safetensors"
"""Beside the weights of a run."""
ADVICE = "calibrate the run anew (tensor-dropout calibrate RUN), or remove the file"
AS_STORED = Scale(0.0, 1.0, bounded=False)


@dataclass(frozen=True)
class CalibratedRun:
    """What was written, and what to say of it."""

    path: Path
    lines: list[str]


def calibrate_run(
    run: Path, *, split: str = "validation", root: Path | None = None, device: str = "auto", batch: int = 64
) -> CalibratedRun:
    """Measure the errors of a run's network on a part of its data, and keep them beside the weights.

    Args:
        run: the folder of a finished run.
        split: "validation" or "test", which the network was not trained on.
        root: the folder of the data, if it is not that of the run.
        device: "auto", "cpu", "cuda" or "cuda:N".
        batch: examples that pass through the network at once.

    Raises:
        TensorDropoutError: if the run has no such part, or it has too few examples.
    """
    where = choose_device(device)
    record, result = read_finished_run(run)
    data = load_run_data("calibrate", run, record, root, split)
    network = load_run_network("calibrate", run, data, where)
    part: Any = getattr(data, split)
    units = part.names if data.groups is None else [data.groups[name] for name in part.names]
    _require_enough(units, split, grouped=data.groups is not None)
    examples = take_examples(part, AS_STORED)
    prepare, like = data.prepare.to(where), next(network.parameters())
    groups = None if data.groups is None else [data.groups[name] for name in examples.names]
    with torch.no_grad():
        x = torch.cat([prepare(rows.to(where)).to(like.dtype).cpu() for rows in examples.x.split(batch)])
    about = {
        "run": run.name, "data": data.name, "split": split, "examples": len(x),
        "groups": None if groups is None else len(set(groups)), **_describe_data(record, result, split),
        "environment": describe_environment(),
    }  # fmt: skip
    y = examples.y.view(len(x), -1) if data.task == "regression" else examples.y
    found = calibrate(network, x, y, groups=groups, task=data.task, batch=batch, about=about)
    replaced = (run / FILE).exists()
    save_calibration(found, run / FILE)
    lines = list(_describe(found, data.target_names if data.task == "regression" else []))
    lines += ["It replaces the calibration that was there."] if replaced else []
    if split == "test":
        lines.append("The test part is used up by this: errors measured on it no longer judge these intervals.")
    return CalibratedRun(run / FILE, lines)


def _require_enough(units: Sequence[str], split: str, *, grouped: bool) -> None:
    """Refuse a part that is too small, before anything is read."""
    count = len(set(units))
    if count < LEAST:
        advice = "train with a larger part, --set data.options.validation=0.3" if split == "validation" else "add data"
        raise TensorDropoutError(
            f"calibrate: {count} held-out {'groups' if grouped else 'examples'} are too few; a 90 % interval takes at "
            f"least {LEAST} in the {split} part; {advice}"
        )


def _describe(found: ModelCalibration, targets: list[str]) -> Any:
    count, groups = found.about["examples"], found.about["groups"]
    of = "" if groups is None else f" in {groups} groups"
    yield f"Calibrated on {count} {found.about['split']} examples{of} of {found.about['data']}."
    if isinstance(found.errors, ClassCalibration):
        yield f"Temperature {found.errors.temperature:.3g}: probabilities are softmax(logits / temperature)."
        return
    half = (found.errors.quantile(0.9).value * found.errors.std(None, 1)[0]).flatten().tolist()
    shown = list(zip(targets, half, strict=True))[:6]
    yield (
        "90 % intervals: "
        + ", ".join(f"{name} ± {width:.3g}" for name, width in shown)
        + (f", and {len(half) - 6} more" if len(half) > 6 else "")
    )
    if found.uses_masks:
        yield f"{100 * found.errors.share:.0f} % of the variance of an error grows with the spread over the masks."
    else:
        yield "They are as wide for all: the spread over the masks, if there is one, does not tell the errors apart."


def _describe_data(record: dict[str, Any], result: dict[str, Any], split: str) -> dict[str, Any]:
    """What tells a part of a run's data from others: its fingerprint, and the targets' names."""
    return {
        "fingerprint": record["data"].get("fingerprints", {}).get(split),
        "targets": result.get("target") if result["task"] == "regression" else None,
    }


def read_calibration(run: Path, network: nn.Module) -> ModelCalibration | None:
    """That of a run, if it was calibrated.

    Args:
        run: its folder.
        network: its network.

    Raises:
        TensorDropoutError: if the file is damaged, or was made on other data or for other weights than the run's.
    """
    path = run / FILE
    if not path.exists():
        return None
    try:
        found = load_calibration(path)
    except TensorDropoutError as error:
        raise TensorDropoutError(f"{error}; {ADVICE}") from error
    found.check(network, str(path), ADVICE)
    _check_data(found.about, run, path)
    return found


def _check_data(about: dict[str, Any], run: Path, path: Path) -> None:
    """Refuse what was made on other data; older files say less of theirs."""
    record, result = read_finished_run(run)
    own = {"data": record["settings"]["data.name"], **_describe_data(record, result, about.get("split", ""))}
    for key, value in own.items():
        if about.get(key) is not None and value is not None and about[key] != value:
            what = "other examples" if key == "fingerprint" else f"{key} {about[key]!r}, the run has {value!r}"
            raise TensorDropoutError(
                f"{path}: this calibration was made on other data than those of the run: {what}; {ADVICE}"
            )
