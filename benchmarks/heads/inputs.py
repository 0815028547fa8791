"""Inputs and modules for one contender or many."""

import torch
from torch import Tensor, nn

from heads.cases import Case
from heads.contenders import Contender
from heads.timing import count_buffers


def make_module(contender: Contender, case: Case, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The contender on the device, in training mode, always from the same seed."""
    torch.manual_seed(0)
    return contender.make(case).to(device, dtype).train()


def make_inputs(
    case: Case, batch: int, dtype: torch.dtype, layout: str, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """Buffers of x (B, *input_shape), channels ``first`` or ``last`` in memory, and a gradient of the output (B, O)."""
    torch.manual_seed(1)

    def make() -> Tensor:
        x = torch.randn(batch, *case.input_shape, device=device, dtype=dtype)
        if layout == "last":
            x = x.movedim(1, -1).contiguous().movedim(-1, 1)
        return x.requires_grad_()

    first = make()
    buffers = [first, *(make() for _ in range(count_buffers(first.nbytes, device) - 1))]
    return buffers, torch.randn(batch, case.outputs, device=device, dtype=dtype)
