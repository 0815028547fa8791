"""The data and the network of a finished run, as it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.files import load
from tensor_dropout_lab.data import DATASETS, OF_YOUR_OWN, Data, load_data
from tensor_dropout_lab.training.runs import data_options, read_finished_run, require_same_examples


def load_run_data(what: str, run: Path, record: dict[str, Any], root: Path | None, split: str) -> Data:
    """The data that a run was trained on, refused if it changed; ``what`` begins an error, here and below."""
    settings = record["settings"]
    if split not in ("test", "validation"):
        raise TensorDropoutError(f"{what}: --split is test or validation, got {split!r}")
    name = settings["data.name"]
    if name not in DATASETS:
        raise TensorDropoutError(f"{what}: {run} was trained on {name!r}, which is unknown here; {OF_YOUR_OWN}")
    data = load_data(name, root=root or settings.get("data.root"), seed=settings["data.seed"], **data_options(settings))
    if getattr(data, split) is None:
        raise TensorDropoutError(f"{what}: {name} has no {split} part in this run; use another --split")
    require_same_examples(what, run, record, {split: getattr(data, split)})
    return data


def load_run_network(what: str, run: Path, data: Data, device: torch.device) -> nn.Module:
    """The network of a finished run, for this data."""
    read_finished_run(run)
    network: Any = load(run / "model.safetensors").eval().to(device)
    if tuple(network.input_shape) != tuple(data.input_shape):
        raise TensorDropoutError(
            f"{what}: the network of {run} takes inputs of {tuple(network.input_shape)}, the data has "
            f"{tuple(data.input_shape)}"
        )
    outputs = network.settings["outputs"]
    if outputs != data.outputs:
        raise TensorDropoutError(f"{what}: the network of {run} has {outputs} outputs, the data has {data.outputs}")
    if device.type == "cuda" and len(data.input_shape) == 3:
        network = network.to(memory_format=torch.channels_last)
    return network
