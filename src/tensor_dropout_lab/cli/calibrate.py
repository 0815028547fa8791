"""``tensor-dropout calibrate``: how far off a trained network is, measured once and kept beside its weights."""

from pathlib import Path
from typing import Annotated

import typer

from tensor_dropout_lab.cli.failures import report_failure


def calibrate(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run of tensor-dropout train.")],
    split: Annotated[str, typer.Option(help="validation, or test: examples that the run was not trained on.")] = (
        "validation"
    ),
    data: Annotated[Path | None, typer.Option("--data", "--root", help="The folder of the data, if it moved.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples that pass through the network at once.")] = 64,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Measure the errors of a trained network on examples that it was not trained on; predict then gives intervals.

    Writes RUN/calibration.safetensors. Of numbers: the variance of an error, and whether it grows with the spread over
    the masks. Of classes: the temperature. About 90 % of new targets lie in 90 % intervals, if the new examples are
    like these; nothing is said of other scanners, cameras or species.

    The validation part may have chosen settings, which makes intervals a little too narrow; where that matters, keep a
    part apart. A fit (tensor-dropout fit) is calibrated by its own folds and needs none of this.

    For example:

      tensor-dropout calibrate out/runs/nifti/rtrl-cp-seed0

      tensor-dropout predict scan.nii.gz --model out/runs/nifti/rtrl-cp-seed0 --coverage 0.9
    """
    with report_failure("calibrate", "nothing was written"):
        from tensor_dropout_lab.evaluation.calibrating import calibrate_run

        done = calibrate_run(run, split=split, root=data, device=device, batch=batch)
        for line in done.lines:
            typer.echo(line)
        typer.echo(f"Wrote {done.path}")
