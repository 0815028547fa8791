"""Evaluate a finished run of ``tensor-dropout train``: its network, on the data it was trained for."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.files import load
from tensor_dropout.robustness.noise import CORRUPTIONS, suitable
from tensor_dropout.robustness.target import Target
from tensor_dropout_lab.data import DATASETS, OF_YOUR_OWN, Data, load_data
from tensor_dropout_lab.evaluation.evaluate import (
    Examples,
    Scale,
    Settings,
    build_target,
    evaluate,
    measure_scale,
    take_examples,
)
from tensor_dropout_lab.evaluation.outcomes import FILE, Outcomes
from tensor_dropout_lab.evaluation.summary import summarize_evaluation
from tensor_dropout_lab.records import describe_environment, write_json
from tensor_dropout_lab.training.processes import choose_device
from tensor_dropout_lab.training.runs import data_options, read_finished_run, require_same_examples

NUMBERS_AT_ONCE = 2**25
"""Of the inputs that pass through the network at once, at most: 222 pictures of 224×224, 4 volumes of 182×218×182."""
UNLABELLED = 10_000
"""Training inputs, without labels, that a substitute is trained on: at most so many,"""
UNLABELLED_BYTES = 2**31
"""and at most so many bytes of them."""


def evaluate_run(
    run: Path,
    settings: Settings,
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
    data = _load_data(run, record, root, split)
    settings = replace(settings, noise=_choose_noise(settings.noise, data))
    batch = batch or max(1, min(256, NUMBERS_AT_ONCE // math.prod(data.input_shape)))
    members = [run, *ensemble]
    scale = measure_scale(data)
    networks = [_load_network(member, data, where) for member in members]
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
        "twin": _fingerprint(twin) if twin is not None else f"trained, {settings.twin_epochs} epochs",
    }
    outcomes = Outcomes(folder / FILE, identity)
    if outcomes.names():
        print(f"Going on: {len(outcomes.names())} parts in {folder} are done.", file=sys.stderr)
    source = None
    if twin is not None:
        source = build_target(_load_network(twin, data, where), data, scale, batch=batch)

    def unlabelled() -> Tensor:
        count = min(UNLABELLED, max(UNLABELLED_BYTES // (4 * math.prod(data.input_shape)), 16))
        return take_examples(data.train, scale, count=count, seed=settings.seed, device=where).x

    def validate() -> Examples:
        assert data.validation is not None
        return take_examples(data.validation, scale, count=images, seed=settings.seed, device=where)

    def take_unknown() -> Examples:
        assert data.unknown is not None
        return take_examples(data.unknown, scale, count=images, seed=settings.seed, device=where)

    planned = evaluate(
        target,
        examples,
        outcomes,
        settings,
        twin=source,
        unlabelled=unlabelled,
        validation=None if data.validation is None or split == "validation" else validate,
        unknown=None if data.unknown is None else take_unknown,
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
        "summary": summarize_evaluation(
            outcomes,
            planned,
            data.task,
            [budget.label for budget in settings.ordered()],
            settings.main_label(),
            norm=settings.norm,
            declared_random=mode != "mean",
            randomized=target.is_randomized(examples.x),
            targets=data.target_names if data.task == "regression" else (),
        ),
    }
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
    for name in settings.noise:
        if CORRUPTIONS[name].needs_bounds and not scale.bounded:
            raise TensorDropoutError(f"evaluate: the noise {name!r} needs inputs with bounds, and this data has none")


def _load_data(run: Path, record: dict[str, Any], root: Path | None, split: str) -> Data:
    settings = record["settings"]
    if split not in ("test", "validation"):
        raise TensorDropoutError(f"evaluate: --split is test or validation, got {split!r}")
    name = settings["data.name"]
    if name not in DATASETS:
        raise TensorDropoutError(f"evaluate: {run} was trained on {name!r}, which is unknown here; {OF_YOUR_OWN}")
    data = load_data(name, root=root or settings.get("data.root"), seed=settings["data.seed"], **data_options(settings))
    if getattr(data, split) is None:
        raise TensorDropoutError(f"evaluate: {name} has no {split} part in this run; use another --split")
    require_same_examples("evaluate", run, record, {split: getattr(data, split)})
    return data


def _load_network(run: Path, data: Data, device: torch.device) -> nn.Module:
    read_finished_run(run)
    network: Any = load(run / "model.safetensors").eval().to(device)
    if tuple(network.input_shape) != tuple(data.input_shape):
        raise TensorDropoutError(
            f"evaluate: the network of {run} takes inputs of {tuple(network.input_shape)}, the data has "
            f"{tuple(data.input_shape)}"
        )
    outputs = network.settings["outputs"]
    if outputs != data.outputs:
        raise TensorDropoutError(f"evaluate: the network of {run} has {outputs} outputs, the data has {data.outputs}")
    if device.type == "cuda" and len(data.input_shape) == 3:
        network = network.to(memory_format=torch.channels_last)
    return network


def _fingerprint(run: Path) -> str:
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()[:16]


def _choose_noise(noise: tuple[str, ...], data: Data) -> tuple[str, ...]:
    if noise == ("none",):
        return ()
    if noise == ("all",):
        return tuple(suitable(len(data.input_shape) - 1, data.bounds is not None))
    for name in noise:
        if name not in CORRUPTIONS:
            raise TensorDropoutError(
                f"evaluate: there is no noise {name!r}; known are {', '.join(CORRUPTIONS)}, all and none"
            )
    return noise


def _describe(settings: dict[str, Any], data: Data, mode: str, members: int) -> str:
    words = [data.name + (" (simulated)" if data.simulated else ""), settings["net.name"], settings["net.head"]]
    words += [f"ensemble of {members}"] if members > 1 else []
    words += [f"prediction: {mode}"] if mode != "mean" else []
    return ", ".join(words)
