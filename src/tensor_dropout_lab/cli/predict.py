"""``tensor-dropout predict``: what a trained network says about files, and where it looks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.cli.failures import report_failure
from tensor_dropout_lab.cli.options import spare_other_programs

if TYPE_CHECKING:
    from tensor_dropout_lab.prediction_table import FilePredictions


def predict(
    files: Annotated[list[Path], typer.Argument(help="Scans (.nii, .nii.gz) or pictures, or folders of them.")],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            metavar="RUN",
            help="The folder of a finished run of tensor-dropout train, or of a fit.",
            show_default="the first argument",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="A folder for tables and pictures; or a .csv file, for a table alone."),
    ] = Path("out/predict"),
    picture: Annotated[
        bool, typer.Option("--picture/--no-picture", help="Draw where the network looks, or points (matplotlib).")
    ] = True,
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Of a fit: its network, named again, where it is code of yours or has moved.",
            show_default="as fitted",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Of a fit: the network's weights, where they have moved.", show_default="as fitted"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Of a fit: where the network runs, cpu or cuda.", show_default="cpu")
    ] = None,
    coverage: Annotated[
        float, typer.Option(help="The share of new files that intervals are to hold for; of a fit or a calibrated run.")
    ] = 0.9,
) -> None:
    """Show what a trained network says about files that are like those it was trained on, and where it looks.

    For a regression: the prediction, its interval if the run was calibrated (tensor-dropout calibrate), and the spread
    over the masks, which is only a part of the error. For pictures: the class and its probability, and the set of
    classes that holds the right one in 90 % of such pictures, if the run was calibrated. Each file gets a JSON record
    and a picture: the image, or three slices of the scan, under the contribution of every position of the last feature
    map to the output.

    With the folder of tensor-dropout fit: a table of the points or numbers, in the units of the fit's own table, each
    with an interval that held for 90 % of its held-out images (x_low, x_high) and the standard deviation of its error
    (x_std); and the points drawn on each image, in ellipses. Of classes, the class, its probability and the set.

    Of several files, one that cannot be predicted does not stop the others: its row in the table has the reason under
    "error", and the exit status is 1.

    For example:

      tensor-dropout predict scan.nii.gz --model out/runs/nifti/rtrl-cp-seed0

      tensor-dropout predict FOLDER --model RUN -o ages.csv

      tensor-dropout predict new-photos --model out/fit/wings
    """
    with report_failure("predict", "files that were written are whole"):
        spare_other_programs()
        run, given = _choose_run(files, model)
        of_fit = {"backbone": backbone, "weights": weights, "device": device}
        done = _predict(run, given, out, picture=picture, coverage=coverage, **of_fit)
        for line in done.lines:
            typer.echo(line)
        typer.echo("Wrote:")
        for path in done.written[:4]:
            typer.echo(f"  {path}")
        if len(done.written) > 4:
            typer.echo(f"  and {len(done.written) - 4} more in {out}")
        done.raise_failures()


def _predict(
    run: Path, given: list[Path], out: Path, *, picture: bool, coverage: float, **of_fit: Any
) -> "FilePredictions":
    """With the network of a run, or with the head of a fit, which alone takes the other options."""
    from tensor_dropout_lab.fitted_head import find_fitted

    fit = find_fitted(run)
    if fit is not None:
        from tensor_dropout_lab.head_predictions import predict_with_head

        return predict_with_head(fit, given, out, picture=picture, coverage=coverage, **of_fit)
    if not run.exists():
        raise TensorDropoutError(f"predict: there is no {run}; --model is the folder of a finished run, or of a fit")
    named = [f"--{name}" for name, value in of_fit.items() if value is not None]
    if named:
        raise TensorDropoutError(f"predict: {', '.join(named)} is for the folder of a fit, and {run} has no fit.json")
    from tensor_dropout_lab.file_predictions import predict_files

    return predict_files(run, given, out, picture=picture, coverage=coverage)


def _choose_run(files: list[Path], model: Path | None) -> tuple[Path, list[Path]]:
    """The run and the files; without --model the first argument is the run, if it is a folder and others follow."""
    if model is not None:
        return model, files
    if len(files) < 2 or not files[0].is_dir():
        raise typer.BadParameter("name the folder of a finished run with --model RUN", param_hint="--model")
    return files[0], files[1:]
