"""``tensor-dropout convert``: a trained network becomes a tensor-dropout network."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.formats import FORMATS
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
    parse_rank,
    parse_shape,
)
from tensor_dropout_lab.data import DATASETS

if TYPE_CHECKING:
    from tensor_dropout_lab.data.batches import Batches


def convert(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write; with --curve, of the figure and JSON.")],
    arch: Arch = None,
    model: Model = None,
    model_arguments: ModelArguments = "{}",
    input_shape: InputShape = None,
    factorization: Annotated[str, one_of(FORMATS, "The format of the weight.")] = "tucker",
    rank: Annotated[
        str | None,
        typer.Option(
            help="full, one number, a list 128,3,3,96, or a fraction of the weights 0.25.", show_default="full"
        ),
    ] = None,
    max_parameters: Annotated[int | None, typer.Option(help="Or: the most parameters of the head.")] = None,
    max_error: Annotated[float | None, typer.Option(help="Or: the largest relative error of the weight.")] = None,
    max_accuracy_loss: Annotated[
        float | None, typer.Option(help="Or: the most that the accuracy on --data's validation part may fall, 0.01.")
    ] = None,
    theta: Annotated[
        float | None, typer.Option(help="Tensor dropout for fine-tuning: the KEEP probability.", show_default="none")
    ] = None,
    law: Annotated[str, typer.Option(help="How the masks are drawn: bernoulli, replacement, gaussian, nested.")] = (
        "bernoulli"
    ),
    head: Annotated[
        list[str] | None,
        typer.Option(help="The layer to convert, instead of the search; may be repeated.", metavar="<str>"),
    ] = None,
    curve: Annotated[bool, typer.Option("--curve", help="Draw accuracy over rank instead of converting.")] = False,
    data: Annotated[
        str | None, typer.Option(help=f"Data for --curve and --max-accuracy-loss: {', '.join(DATASETS)}.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="The folder of the data.")] = None,
) -> None:
    """Turn the head of a trained network into a tensor regression that computes the same.

    Exact at full rank. The file that is written goes through td.load(FILE, model) into the network as it was. The
    checkpoint may also be the folder of a run, which stands for its model.safetensors.

    For example:

      tensor-dropout convert resnet50.pth --arch resnet50 --input 3,224,224 --theta 0.8 -o head.safetensors

      tensor-dropout convert weights.pt --model my_nets:build --input 3,32,32 --max-error 0.05 -o small.safetensors

      tensor-dropout convert digits.safetensors --curve --data digits -o curve
    """
    with report_failure("convert", "nothing was written"):
        from tensor_dropout.files import save
        from tensor_dropout.layers.dropout import TensorDropout
        from tensor_dropout.surgery.tensorize import tensorize_
        from tensor_dropout_lab.network_loading import read_network
        from tensor_dropout_lab.rank_curve import draw_rank_curve

        network = read_network(
            find_file(checkpoint),
            arch=arch,
            factory=model,
            factory_arguments=model_arguments,
            input_shape=parse_shape(input_shape),
        ).eval()
        if law != "bernoulli" and theta is None:
            raise TensorDropoutError(f"--law {law} needs --theta, the KEEP probability")
        chosen = (rank, max_parameters, max_error, max_accuracy_loss, theta, head)
        if curve and any(option is not None for option in chosen):
            raise TensorDropoutError(
                "--curve tries all ranks and writes no network; leave --rank, --theta and so on out"
            )
        validation = _load_validation(data, root) if curve or max_accuracy_loss is not None else None
        shape = parse_shape(input_shape) or (validation.data.input_shape if validation is not None else None)
        example = make_example(network, shape)
        if curve:
            assert validation is not None
            for line in draw_rank_curve(network, example, validation, factorization, out):
                typer.echo(line)
            return
        report = tensorize_(
            network,
            example,
            factorization=factorization,
            rank=parse_rank(rank),
            max_parameters=max_parameters,
            max_error=max_error,
            max_accuracy_loss=max_accuracy_loss,
            loader=validation,
            dropout=None if theta is None else TensorDropout(theta, law=law),
            heads=head,
        )
        save(network, out)
        typer.echo(str(report))
        typer.echo(f"Wrote:\n  {out}")


def _load_validation(name: str | None, root: Path | None) -> "Batches":
    from tensor_dropout_lab.data import load_data
    from tensor_dropout_lab.data.batches import Batches

    if name is None:
        raise TensorDropoutError("--curve and --max-accuracy-loss need --data, such as --data digits")
    data = load_data(name, root=root)
    if data.task != "classification":
        raise TensorDropoutError(f"the accuracy of {name} is not defined: it is a {data.task}; use --max-error")
    if data.validation is None:
        raise TensorDropoutError(f"{name} has no validation part; the test part chooses nothing")
    return Batches(data, data.validation)
