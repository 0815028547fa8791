"""Numbers that need no clock: operations, the bytes that must move, bytes kept for backward."""

import copy

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def count_operations(module: nn.Module, x: Tensor, kind: str) -> int | None:
    """Operations (two per multiply-add) of the matrix products in one pass, by torch's counter on the meta device.

    Elementwise work and sums are not counted. None where a contender does not run without data.
    """
    try:
        counted = copy.deepcopy(module).to("meta")
        features = torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=kind == "both")
        with FlopCounterMode(display=False) as counter:
            y = counted(features)
            if kind == "both":
                y.sum().backward()
        return int(counter.get_total_flops())
    except Exception:
        return None


def bytes_floor(module: nn.Module, x: Tensor, kind: str) -> tuple[int, int]:
    """The bytes that any implementation moves, of x and of the parameters.

    Forward: x and the parameters are read. Forward and backward: x is read twice and its gradient written, the
    parameters are read and their gradients written.
    """
    parameters = sum(p.nbytes for p in module.parameters())
    return (x.nbytes, parameters) if kind == "forward" else (3 * x.nbytes, 2 * parameters)


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes that one forward pass keeps for the backward pass, besides the parameters and x."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *module.parameters())}
    kept = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = module(x)  # noqa: F841  # alive, so that no storage is freed and counted under another's address
        return sum(kept.values())
