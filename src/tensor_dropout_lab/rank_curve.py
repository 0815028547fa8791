"""Accuracy over the rank of a converted head, on validation data: ``tensor-dropout convert --curve``."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor, nn

from tensor_dropout.atomic_files import replacing
from tensor_dropout.surgery.curve import rank_curve
from tensor_dropout.surgery.rank_choice import measure_accuracy
from tensor_dropout.surgery.report import Trial
from tensor_dropout_lab.data.base import Data
from tensor_dropout_lab.data.batches import Batches
from tensor_dropout_lab.figures import draw_figure, require_matplotlib, save_figure


def draw_rank_curve(
    network: nn.Module, example: Tensor, validation: Batches, factorization: str, out: Path
) -> list[str]:
    """Measure accuracy over rank on validation data, and write it as a figure and as JSON.

    Args:
        network: any module with a head that can be converted.
        example: an input batch.
        validation: what accuracy is measured on.
        factorization: the format of the head.
        out: the files without their endings.

    Returns:
        Lines to print.
    """
    require_matplotlib()
    trials = rank_curve(
        network,
        example,
        lambda changed: measure_accuracy(changed, validation),
        factorization=factorization,
    )
    unchanged = measure_accuracy(network, validation)
    record = {
        "data": validation.data.name,
        "part": "validation",
        "simulated": validation.data.simulated,
        "unchanged_accuracy": unchanged,
        "trials": [vars(trial) for trial in trials],
    }
    target = out.with_name(f"{out.name}.json")
    with replacing(target) as temporary:
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    written = [target, *plot_curve(trials, unchanged, validation.data, out)]
    lines = [
        f"rank {'×'.join(map(str, trial.rank)):>16}  parameters {trial.parameters:>10,}  error of the weight "
        f"{trial.relative_error:.3f}  accuracy {100 * (trial.accuracy or 0):.2f} %"
        for trial in trials
    ]
    summary = f"unchanged network: {100 * unchanged:.2f} %; validation part of {validation.data.name}."
    return [*lines, summary, "Wrote:", *(f"  {path}" for path in written)]


def plot_curve(trials: list[Trial], unchanged: float, data: Data, stem: Path) -> list[Path]:
    """Accuracy over the largest rank."""
    with draw_figure() as figure:
        axes = figure.add_subplot()
        accuracy = [100 * (trial.accuracy or 0.0) for trial in trials]
        axes.plot(
            [max(trial.rank) for trial in trials], accuracy, marker="o", color="#0072B2", label="cut at this rank"
        )
        axes.axhline(100 * unchanged, color="#666666", linestyle="--", label="the network as it was")
        axes.set_xscale("log", base=2)
        axes.set_xlabel("largest rank of the head")
        simulated = "SIMULATED " if data.simulated else ""
        axes.set_ylabel(f"accuracy on {simulated}{data.name}, validation (%)")
        axes.set_title("Accuracy over rank, one trained network")
        axes.legend(loc="lower right")
        return save_figure(figure, stem)
