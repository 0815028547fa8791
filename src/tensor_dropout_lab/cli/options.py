"""Options that several commands share, and how they are read."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.nets import NETS

Checkpoint = Annotated[
    Path, typer.Argument(help="A file of td.save, or a state dict: .safetensors, or .pt of torch.save.")
]
Arch = Annotated[
    str | None, typer.Option(help=f"The network that plain weights are of: {', '.join(NETS)}.", show_default=False)
]
Model = Annotated[
    str | None,
    typer.Option(help="Or any factory, package.module:function; the current folder is searched.", show_default=False),
]
ModelArguments = Annotated[str, typer.Option(help="The factory's keyword arguments, as a JSON object.")]
InputShape = Annotated[
    str | None, typer.Option("--input", help="The shape of one input: 3,224,224.", show_default=False)
]


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """``3,32,32`` as a tuple."""
    if text is None:
        return None
    try:
        shape = tuple(int(size) for size in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise TensorDropoutError(f"--input is the shape of one input, such as 3,224,224; got {text!r}")
    return shape


def parse_rank(text: str | None) -> Any:
    """``full``, ``64``, ``0.25``, ``128,3,3,96`` or ``[128, 3, 3, 96]``."""
    if text is None or text == "full":
        return text
    try:
        if "," in text:
            return tuple(int(rank) for rank in text.strip().removeprefix("[").removesuffix("]").split(","))
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        raise TensorDropoutError(
            f"--rank is full, a number, a fraction such as 0.25, or a list such as 128,3,3,96; got {text!r}"
        ) from None


def make_example(network: torch.nn.Module, shape: tuple[int, ...] | None) -> torch.Tensor:
    """Two random inputs for a network; our own networks know their shape."""
    shape = shape or getattr(network, "input_shape", None)
    if shape is None:
        raise TensorDropoutError("say the shape of one input with --input, such as 3,224,224")
    parameter = next(network.parameters())
    example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    return example.to(parameter.device, parameter.dtype)
