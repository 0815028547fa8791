"""``tensor-dropout predict``: what a trained network says about files, and where it looks."""

from pathlib import Path
from typing import Annotated

import typer

from tensor_dropout_lab.cli.failures import report_failure


def predict(
    files: Annotated[list[Path], typer.Argument(help="Scans (.nii, .nii.gz) or pictures, or folders of them.")],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            metavar="RUN",
            help="The folder of a finished run of tensor-dropout train.",
            show_default="the first argument",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="A folder for JSON and pictures; or a .csv file, for a table alone."),
    ] = Path("out/predict"),
    picture: Annotated[
        bool, typer.Option("--picture/--no-picture", help="Draw where the network looks (matplotlib).")
    ] = True,
) -> None:
    """Show what a trained network says about files that are like those it was trained on, and where it looks.

    For a regression: the prediction, ± its exact standard deviation over the masks if the head has tensor dropout.
    For pictures: the class and its probability. Each file gets a JSON record and a picture: the image, or three
    slices of the scan, under the contribution of every position of the last feature map to the output.

    Of several files, one that cannot be predicted does not stop the others: its row in the table has the reason under
    "error", and the exit status is 1.

    For example:

      tensor-dropout predict scan.nii.gz --model out/runs/nifti/rtrl-cp-seed0

      tensor-dropout predict FOLDER --model RUN -o ages.csv
    """
    with report_failure("predict", "files that were written are whole"):
        run, given = _choose_run(files, model)
        from tensor_dropout_lab.file_predictions import predict_files

        done = predict_files(run, given, out, picture=picture)
        for line in done.lines:
            typer.echo(line)
        typer.echo("Wrote:")
        for path in done.written[:4]:
            typer.echo(f"  {path}")
        if len(done.written) > 4:
            typer.echo(f"  and {len(done.written) - 4} more in {out}")
        done.raise_failures()


def _choose_run(files: list[Path], model: Path | None) -> tuple[Path, list[Path]]:
    """The run and the files; without --model the first argument is the run, if it is a folder and others follow."""
    if model is not None:
        return model, files
    if len(files) < 2 or not files[0].is_dir():
        raise typer.BadParameter("name the folder of a finished run with --model RUN", param_hint="--model")
    return files[0], files[1:]
