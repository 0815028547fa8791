"""``tensor-dropout export``: a network for deployment."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.exporting import EXPORTS
from tensor_dropout_lab.cli.failures import report_failure
from tensor_dropout_lab.cli.options import (
    Arch,
    Checkpoint,
    InputShape,
    Model,
    ModelArguments,
    make_example,
    parse_shape,
)
from tensor_dropout_lab.network_loading import read_network


class Target(enum.StrEnum):
    """What can be written."""

    onnx = "onnx"
    pt2 = "pt2"
    merged = "merged"


ENDINGS = {Target.onnx: ".onnx", Target.pt2: ".pt2", Target.merged: ".safetensors"}
"""What the file of each target is called; any other ending but those of the others is as good."""


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    to: Annotated[
        Target, typer.Option(help="onnx; pt2: a torch.export program; merged: plain torch weights (.safetensors).")
    ] = Target.onnx,
    arch: Arch = None,
    model: Model = None,
    model_arguments: ModelArguments = "{}",
    input_shape: InputShape = None,
) -> None:
    """Write a network for deployment: its eval function, with a free batch size.

    The checkpoint may also be the folder of a run, which stands for its model.safetensors.

    onnx and pt2 need nothing of this library to run. merged weights are for plain torch layers: they fit the original
    network if its head was not trained since; else its linear layer takes the flattened map (the file's notes say so).

    For example:

      tensor-dropout export head.safetensors --model my_nets:build --input 3,32,32 --to onnx -o net.onnx

      tensor-dropout export run.safetensors --to merged -o plain.safetensors
    """
    with report_failure("export", "nothing was written"):
        check_ending(out, to)
        shape = parse_shape(input_shape)
        network = read_network(
            find_file(checkpoint), arch=arch, factory=model, factory_arguments=model_arguments, input_shape=shape
        ).eval()
        difference = EXPORTS[str(to)](network, make_example(network, shape), out)
        typer.echo(
            f"Outputs differ from the network's by {difference:.1e} (relative, two random inputs).\nWrote:\n  {out}"
        )


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


def check_ending(out: Path, to: Target) -> None:
    """Refuse a file name that says another format."""
    for target, ending in ENDINGS.items():
        if out.suffix.lower() == ending and target is not to:
            raise TensorDropoutError(
                f"--to {to} does not write a file such as {out}; call it {out.with_suffix(ENDINGS[to]).name}, or pass "
                f"--to {target}"
            )
