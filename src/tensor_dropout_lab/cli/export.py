"""``tensor-dropout export``: a network for deployment."""

from pathlib import Path
from typing import Annotated

import typer

from tensor_dropout.export_formats import EXPORTS, check_ending
from tensor_dropout_lab.cli.failures import report_failure
from tensor_dropout_lab.cli.options import (
    Arch,
    Checkpoint,
    InputShape,
    Model,
    ModelArguments,
    find_file,
    make_example,
    one_of,
    parse_shape,
)


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")],
    to: Annotated[
        str,
        one_of(EXPORTS, "; ".join(f"{entry.name}: {entry.summary} ({entry.ending})" for entry in EXPORTS.values())),
    ] = "onnx",
    arch: Arch = None,
    model: Model = None,
    model_arguments: ModelArguments = "{}",
    input_shape: InputShape = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Of a fit: its network, if code of yours makes it, or it has moved.",
            show_default="as fitted",
        ),
    ] = None,
) -> None:
    """Write a network for deployment: its eval function, with a free batch size.

    The checkpoint may also be the folder of a run, which stands for its model.safetensors, or that of tensor-dropout
    fit, which stands for the network with the fitted head behind its layer.

    onnx and pt2 need nothing of this library to run. merged weights are for plain torch layers: they fit the original
    network if its head was not trained since; else its linear layer takes the flattened map (the file's notes say so).

    For example:

      tensor-dropout export head.safetensors --model my_nets:build --input 3,32,32 --to onnx -o net.onnx

      tensor-dropout export run.safetensors --to merged -o plain.safetensors

      tensor-dropout export out/fit/wings -o wings.onnx
    """
    with report_failure("export", "nothing was written"):
        from tensor_dropout_lab.fitted_head import find_fitted, join_fitted
        from tensor_dropout_lab.network_loading import read_network

        check_ending(out, to)
        shape = parse_shape(input_shape)
        fit = find_fitted(checkpoint)
        if fit is not None:
            network, shape = join_fitted(fit, backbone)
        else:
            network = read_network(
                find_file(checkpoint), arch=arch, factory=model, factory_arguments=model_arguments, input_shape=shape
            ).eval()
        difference = EXPORTS[to].write(network, make_example(network, shape), out)
        typer.echo(
            f"Outputs differ from the network's by {difference:.1e} (relative, two random inputs).\nWrote:\n  {out}"
        )
