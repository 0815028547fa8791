"""How steps are computed: the precision, the layout of images in memory, and eagerly or as a CUDA graph."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.base import Data
from tensor_dropout_lab.training.config import Config


def autocast(device: torch.device, dtype: torch.dtype) -> Any:
    """bf16 arithmetic inside, or nothing."""
    if dtype != torch.bfloat16:
        return nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=False)  # a cache would outlive a captured graph


def choose_dtype(config: Config, device: torch.device) -> torch.dtype:
    """The arithmetic: bf16 on GPUs that have it, else float32, unless the config says otherwise."""
    named = {"float32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}
    if config.run.precision != "auto":
        return named[config.run.precision]
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


# Images: compiling takes 30 s and saves 4 µs an image of a run alone, which repays it at 7.5 million, and 7 µs where
# four runs share the GPU, as those of a table do, which repays it at 4.3 million (ResNet-18, CIFAR, H200).
_WORTH_COMPILING = 4_000_000


def choose_speed(config: Config, data: Data, device: torch.device, processes: int, examples: int) -> str:
    """How steps are run, where the config leaves it open.

    One process on a GPU: as one CUDA graph, compiled first if the run is long enough to repay it (volumes gained
    nothing from it). Several processes, and CPUs: eagerly.
    """
    if config.run.speed != "auto":
        if config.run.speed == "graph" and device.type != "cuda":
            raise TensorDropoutError("train: run.speed=graph needs a GPU; use eager or auto")
        if config.run.speed in ("graph", "compile") and processes > 1 and device.type == "cuda":
            raise TensorDropoutError(f"train: run.speed={config.run.speed} is for one process; use eager or auto")
        if config.run.speed == "compile" and config.run.adversarial is not None:
            raise TensorDropoutError("train: run.adversarial cannot be compiled (a gradient inside); use graph or auto")
        return config.run.speed
    if device.type != "cuda" or processes > 1:
        return "eager"
    long = len(data.input_shape) == 3 and examples >= _WORTH_COMPILING
    return "compile" if long and config.run.adversarial is None else "graph"


def lay_out_(network: nn.Module, memory_format: torch.memory_format) -> nn.Module:
    """The weights of convolutions in a memory format, in place; those of tensor layers are no images."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(memory_format=memory_format)
    return network


def choose_memory_format(config: Config, data: Data) -> torch.memory_format:
    """Channels last for images and volumes: what convolutions like best, on GPUs and CPUs alike.

    Weights that are to be sharded stay as they are: torch's FSDP takes contiguous ones alone.
    """
    formats = {3: torch.channels_last, 4: torch.channels_last_3d}
    if not config.run.channels_last or config.run.sharding == "fsdp":
        return torch.contiguous_format
    return formats.get(len(data.input_shape), torch.contiguous_format)
