"""Options that several commands share, and how they are read."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.nets.families import describe_families

if TYPE_CHECKING:
    import torch

Checkpoint = Annotated[
    Path, typer.Argument(help="A file of td.save, or a state dict: .safetensors, or .pt of torch.save.")
]
Arch = Annotated[
    str | None, typer.Option(help=f"The network that plain weights are of: {describe_families()}.", show_default=False)
]
Model = Annotated[
    str | None,
    typer.Option(help="Or any factory, package.module:function; the current folder is searched.", show_default=False),
]
ModelArguments = Annotated[str, typer.Option(help="Keyword arguments of that factory, or of --arch, as a JSON object.")]
InputShape = Annotated[
    str | None, typer.Option("--input", help="The shape of one input: 3,224,224.", show_default=False)
]


def spare_other_programs() -> None:
    """Let torch's threads sleep while they wait for each other; to be called before torch is imported.

    They spin otherwise, and small steps take many times as long where other programs need the cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def one_of(names: Collection[str], help: str) -> Any:
    """An option that takes one of these names; anything else is bad usage."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(names)}.")
        return value

    return typer.Option(help=help, metavar=f"[{'|'.join(names)}]", callback=check)


def find_file(checkpoint: Path) -> Path:
    """The file of a checkpoint: of the folder of a run, its network."""
    if not checkpoint.is_dir():
        return checkpoint
    model = checkpoint / "model.safetensors"
    if not model.is_file():
        raise TensorDropoutError(
            f"{checkpoint} is a folder without model.safetensors; give the folder of a finished run, or a file"
        )
    return model


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """``3,32,32`` as a tuple."""
    return parse_sizes("--input", text, "the shape of one input, such as 3,224,224")


def parse_sizes(option: str, text: str | None, expected: str) -> tuple[int, ...] | None:
    """``7`` or ``224x320`` as a tuple; ``expected`` says what the option takes."""
    if text is None:
        return None
    try:
        sizes = tuple(int(size) for size in text.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise TensorDropoutError(f"{option} is {expected}; got {text!r}")
    return sizes


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
    import torch

    shape = shape or getattr(network, "input_shape", None)
    if shape is None:
        raise TensorDropoutError("say the shape of one input with --input, such as 3,224,224")
    parameter = next(network.parameters())
    example = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    return example.to(parameter.device, parameter.dtype)
