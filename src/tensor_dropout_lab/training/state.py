"""The state of a run: gathered from network, optimizer and generators, and put back; sharded or whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tensor_dropout.network_builders import build_network, settings_of
from tensor_dropout_lab.training.config import Config
from tensor_dropout_lab.training.processes import Process


def gather_state(
    network: nn.Module, optimizer: torch.optim.Optimizer, config: Config, process: Process
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State dicts of network and optimizer; a sharded network is put together on the first process."""
    if process.world > 1 and config.run.sharding == "fsdp":
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_state_dict(network, optimizer, options=options)  # type: ignore[return-value]
    return network.state_dict(), optimizer.state_dict()


def restore_state(network: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put the state of a checkpoint into network and optimizer."""
    rates = [(group["lr"], group["initial_lr"]) for group in optimizer.param_groups]
    if any(hasattr(parameter, "placements") for parameter in network.parameters()):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        set_state_dict(
            network,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=name_states(state["optimizer"]),
            options=options,
        )
    else:
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for group, (lr, initial) in zip(optimizer.param_groups, rates, strict=True):
        group["lr"], group["initial_lr"] = lr, initial


def name_states(saved: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer by the names of its parameters, as shards have it, instead of their numbers."""
    groups = saved["param_groups"]
    names = {p: name for group in groups for p, name in zip(group["params"], group["param_names"], strict=True)}
    return {
        "state": {names[p]: each for p, each in saved["state"].items()},
        "param_groups": [{**group, "params": [names[p] for p in group["params"]]} for group in groups],
    }


def gather_network(network: nn.Module) -> nn.Module:
    """A whole network on this process: a sharded one is put together."""
    if not any(hasattr(parameter, "placements") for parameter in network.parameters()):
        return network
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(network, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
    whole = build_network(settings_of(network) or {})
    whole.to(next(network.parameters()).dtype).load_state_dict(state)
    return whole.to(next(network.parameters()).device)


def generator_states(device: torch.device) -> list[Tensor]:
    """The default generators: of the CPU and, if it is one, of the GPU."""
    gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *gpu]


def set_generator_states(states: list[Tensor], device: torch.device) -> None:
    """Put them back."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
