"""``tensor-dropout export``: a network for deployment."""

import enum
from pathlib import Path
from typing import Annotated

import typer

from tensor_dropout.cli.failures import report_failure
from tensor_dropout.cli.options import Arch, Checkpoint, InputShape, Model, ModelArguments, make_example, parse_shape
from tensor_dropout.exporting import EXPORTS
from tensor_dropout.sources import read_network


class Target(enum.StrEnum):
    """What can be written."""

    onnx = "onnx"
    pt2 = "pt2"
    merged = "merged"


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

    onnx and pt2 need nothing of this library to run. merged weights are for plain torch layers: they fit the original
    network if its head was not trained since; else its linear layer takes the flattened map (the file's notes say so).

    For example:

      tensor-dropout export head.safetensors --model my_nets:build --input 3,32,32 --to onnx -o net.onnx

      tensor-dropout export run.safetensors --to merged -o plain.safetensors
    """
    with report_failure("export", "nothing was written"):
        shape = parse_shape(input_shape)
        network = read_network(
            checkpoint, arch=arch, factory=model, factory_arguments=model_arguments, input_shape=shape
        ).eval()
        difference = EXPORTS[str(to)](network, make_example(network, shape), out)
        typer.echo(
            f"Outputs differ from the network's by {difference:.1e} (relative, two random inputs).\nWrote:\n  {out}"
        )
