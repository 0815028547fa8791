"""Evaluate a finished run of ``tensor-dropout train``: its network, on the data it was trained for."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness.evaluation import evaluate
from tensor_dropout.robustness.outcomes import FILE, Outcomes
from tensor_dropout.robustness.protocol import choose_noise
from tensor_dropout.robustness.runner import Pair, Variant
from tensor_dropout.robustness.settings import Settings
from tensor_dropout.robustness.target import Target
from tensor_dropout_lab.data import Data, Split
from tensor_dropout_lab.evaluation.calibrated import UNCALIBRATED, measure_calibration
from tensor_dropout_lab.evaluation.calibrating import read_calibration
from tensor_dropout_lab.evaluation.examples import Examples, Scale, build_target, measure_scale, take_examples
from tensor_dropout_lab.evaluation.intervals import metric_interval
from tensor_dropout_lab.evaluation.run_loading import load_run_data, load_run_network
from tensor_dropout_lab.evaluation.shrinking import shrink
from tensor_dropout_lab.evaluation.twin import fit_twin
from tensor_dropout_lab.run_records import describe_environment, write_json
from tensor_dropout_lab.training.processes import choose_device
from tensor_dropout_lab.training.runs import read_finished_run

NUMBERS_AT_ONCE = 2**25
"""Of the inputs that pass through the network at once, at most: 222 pictures of 224×224, 4 volumes of 182×218×182."""
OF_AN_ENSEMBLE = "an ensemble has none; each of its runs may have its own, of tensor-dropout calibrate RUN"
UNLABELLED = 10_000
"""Training inputs, without labels, that a substitute is trained on: at most so many,"""
UNLABELLED_BYTES = 2**31
"""and at most so many bytes of them."""


@dataclass(frozen=True)
class RunSettings(Settings):
    """What is measured of a run.

    Attributes:
        twin_epochs: of the substitute that is trained when no twin is given; 0: no transfer.
        head_sizes: about how many smaller sizes the head is cut to, none trained again; 0: none.
    """

    twin_epochs: int = 20
    head_sizes: int = 0


def evaluate_run(
    run: Path,
    settings: RunSettings,
    *,
    out: Path | None = None,
    images: int | None = 1000,
    split: str = "test",
    mode: str = "mean",
    samples: int | None = None,
    ensemble: Sequence[Path] = (),
    twin: Path | None = None,
    batch: int | None = None,
    root: Path | None = None,
    device: str = "auto",
) -> tuple[dict[str, Any], Outcomes, Path]:
    """Run what is missing of an evaluation, and write its record.

    Args:
        run: the folder of a finished run.
        settings: what is measured; ``noise`` may be ("all",) or ("none",).
        out: the folder for results; None: ``evaluation`` in the run's folder, with mode and ensemble in its name.
        images: how many examples, chosen by the seed; None: all.
        split: "test" or "validation".
        mode: how the network predicts: "mean", "sample" or "exact".
        samples: draws of a prediction.
        ensemble: further runs to average with.
        twin: a run to transfer attacks from.
        batch: examples that pass through the network at once; None: 256, fewer if they are large.
        root: the folder of the data, if it is not that of the run.
        device: "auto", "cpu", "cuda" or "cuda:N".

    Returns:
        The record, the outcomes, and the folder.

    Raises:
        TensorDropoutError: if something does not fit.
    """
    where = choose_device(device)
    record, _ = read_finished_run(run)
    data = load_run_data("evaluate", run, record, root, split)
    settings = replace(settings, noise=choose_noise(settings.noise, len(data.input_shape) - 1, data.bounds is not None))
    batch = batch or max(1, min(256, NUMBERS_AT_ONCE // math.prod(data.input_shape)))
    members = [run, *ensemble]
    scale = measure_scale(data)
    networks = [load_run_network("evaluate", member, data, where) for member in members]
    calibration = read_calibration(run, networks[0]) if not ensemble else None
    target = build_target(networks, data, scale, mode=mode, n_samples=samples, batch=batch)
    examples = take_examples(getattr(data, split), scale, count=images, seed=settings.seed, device=where)
    _check_request(run, target, examples, settings, scale)
    folder = out or run / "-".join(
        ["evaluation", *([mode] if mode != "mean" else []), *(["ensemble"] if ensemble else [])]
    )
    identity = {
        "networks": [_fingerprint(member) for member in members],
        "data": data.name,
        "split": split,
        "examples": hashlib.sha256("\n".join(examples.names).encode()).hexdigest()[:16],
        "mode": mode,
        "samples": target.n_samples,
        "norm": settings.norm,
        "steps": settings.steps,
        "queries": settings.queries,
        "seed": settings.seed,
        "twin": _fingerprint(twin) if twin is not None else f"trained as in 0.2.0, {settings.twin_epochs} epochs",
    }
    outcomes = Outcomes(folder / FILE, identity)
    if outcomes.names():
        print(f"Going on: {len(outcomes.names())} parts in {folder} are done.", file=sys.stderr)
    other = (
        None
        if twin is None
        else build_target(load_run_network("evaluate", twin, data, where), data, scale, batch=batch)
    )

    def train_twin() -> Target:
        count = min(UNLABELLED, max(UNLABELLED_BYTES // (4 * math.prod(data.input_shape)), 16))
        unlabelled = take_examples(data.train, scale, count=count, seed=settings.seed, device=where).x
        return fit_twin(target, unlabelled, epochs=settings.twin_epochs, seed=settings.seed + 1)

    def take(part: Split | None) -> Callable[[], Pair] | None:
        if part is None:
            return None
        return lambda: take_examples(part, scale, count=images, seed=settings.seed, device=where)[:2]

    evaluation = evaluate(
        target,
        examples.x,
        examples.y,
        settings,
        names=examples.names,
        outcomes=outcomes,
        twin=other or (train_twin if settings.twin_epochs else None),
        validation=None if split == "validation" else take(data.validation),
        unknown=take(data.unknown),
        variants=_cut_head(networks, settings.head_sizes),
    )
    written = {
        "title": _describe(record["settings"], data, mode, len(members)),
        "run": run.name,
        "split": split,
        "identity": identity,
        "settings": {**asdict(settings), "main": settings.main_label(), "mode": mode, "images": len(examples.names)},
        "data": record["data"],
        "training": record["settings"],
        "environment": describe_environment(),
        "calibration": {"missing": OF_AN_ENSEMBLE if ensemble else UNCALIBRATED},
        "summary": evaluation.summary(
            targets=data.target_names if data.task == "regression" else (), interval=metric_interval
        ),
    }
    if calibration is not None:
        written["calibration"] = measure_calibration(
            networks[0],
            calibration,
            examples,
            target.prepare,
            split=split,
            batch=batch,
            targets=data.target_names if data.task == "regression" else (),
            groups=None if data.groups is None else [data.groups[name] for name in examples.names],
        )
    write_json(folder / "evaluation.json", written)
    return written, outcomes, folder


def _check_request(run: Path, target: Target, examples: Examples, settings: Settings, scale: Scale) -> None:
    """Refuse at once what would fail, or mean nothing, after an hour of attacks."""
    target.check(examples.x, examples.y)
    if target.mode == "sample":
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            if not target.is_randomized(examples.x):
                raise TensorDropoutError(f"evaluate: the network of {run} has nothing random; use --mode mean")
    largest = settings.ordered()[-1]
    if scale.bounded and largest.epsilon > 1:
        raise TensorDropoutError(
            f"evaluate: epsilon is a share of the inputs' range, at most 1, got {largest.label}; did you mean "
            f"{largest.epsilon:g}/255?"
        )


def _cut_head(networks: list[nn.Module], sizes: int) -> dict[str, Variant]:
    """The network with about so many smaller heads."""
    if not sizes:
        return {}
    if len(networks) > 1:
        raise TensorDropoutError("evaluate: the head of one network can be cut down, not those of an ensemble")
    return {
        f"head/{cut.kind}/{cut.size}": Variant(
            {"kind": cut.kind, "size": cut.size, "parameters": cut.parameters}, cut.network
        )
        for cut in shrink(networks[0], sizes)
    }


def _fingerprint(run: Path) -> str:
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()[:16]


def _describe(settings: dict[str, Any], data: Data, mode: str, members: int) -> str:
    words = [data.name + (" (simulated)" if data.simulated else ""), settings["net.name"], settings["net.head"]]
    words += [f"ensemble of {members}"] if members > 1 else []
    words += [f"prediction: {mode}"] if mode != "mean" else []
    return ", ".join(words)
