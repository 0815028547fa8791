"""The processes of a run: one, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.nets import Network
from tensor_dropout_lab.training.config import Config


@dataclass(frozen=True)
class Process:
    """This process among all, and its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes and shows."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            distributed.barrier()

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, on every process."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value)
        return values

    def share(self, value: Any) -> Any:
        """The first process' value, on every process."""
        if self.world == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]


@contextmanager
def joined(device: str) -> Iterator[Process]:
    """Join the processes that torchrun started, if it did; leave them at the end.

    Args:
        device: "auto", "cpu", "cuda" or "cuda:1".
    """
    local, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    chosen = choose_device(device, local)
    if world == 1 or "RANK" not in os.environ:
        yield Process(0, 1, chosen)
        return
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    store, rank, world = next(distributed.rendezvous("env://", timeout=timedelta(minutes=10)))
    # torchrun keeps one store over its restarts: without a name of its own, a restart would meet the dead workers.
    store = distributed.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))
    try:
        yield Process(distributed.get_rank(), distributed.get_world_size(), chosen)
    finally:
        distributed.destroy_process_group()


def choose_device(device: str, local: int = 0) -> torch.device:
    """The device of a name; "auto" is a GPU where there is one.

    Raises:
        TensorDropoutError: if there is no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise TensorDropoutError(f"run.device is auto, cpu, cuda or cuda:N, got {device!r}") from error
    if chosen.type not in ("cpu", "cuda"):
        raise TensorDropoutError(f"run.device is auto, cpu, cuda or cuda:N, got {device!r}")
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise TensorDropoutError(f"run.device={device}: torch sees no CUDA device here; use cpu or auto")
        chosen = torch.device("cuda", local if chosen.index is None else chosen.index)
        count = torch.cuda.device_count()
        if chosen.index >= count:
            raise TensorDropoutError(f"run.device={chosen}: torch sees {count} CUDA devices here, counted from 0")
    return chosen


def wrap_network(network: nn.Module, config: Config, process: Process) -> nn.Module:
    """The network as it is called in training: itself, in DDP, or sharded in place."""
    if process.world == 1:
        return network
    if config.run.sharding == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for stage in network.stages() if isinstance(network, Network) else []:
            fully_shard(stage)
        fully_shard(network)
        return network
    return DistributedDataParallel(network, device_ids=[process.device] if process.device.type == "cuda" else None)


def seed_process(seed: int, process: Process) -> None:
    """Masks and augmentation differ between processes: equal seeds would give equal masks."""
    torch.manual_seed(seed * 4096 + process.rank + 1)


def describe_device(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
