"""``tensor-dropout predict``: what a trained network says about files."""

import csv
import importlib
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tensor_dropout.cli.failures import report_failure
from tensor_dropout.data import DATASETS
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.files import load
from tensor_dropout.layers.regression import randomized_layers
from tensor_dropout.prediction import predict as predict_batch
from tensor_dropout.training.runs import data_options, read_finished_run
from tensor_dropout.writing import replacing

_ENDINGS = (".nii", ".nii.gz", ".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm")


def predict(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run of tensor-dropout train.")],
    files: Annotated[list[Path], typer.Argument(help="Scans (.nii, .nii.gz) or pictures, or folders of them.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A CSV file.", show_default="none")] = None,
) -> None:
    """Show what a trained network says about files that are like those it was trained on.

    For a regression: the prediction, and its exact standard deviation over the masks if the head has tensor dropout.
    For pictures: the class and its probability.

    For example: tensor-dropout predict out/runs/nifti/rtrl-cp-seed0 scan.nii.gz -o ages.csv
    """
    with report_failure("predict", "nothing was written"):
        record, result = read_finished_run(run)
        settings = record["settings"]
        network: Any = load(run / "model.safetensors").eval()
        reader = getattr(importlib.import_module(DATASETS[settings["data.name"]].module), "read_input", None)
        if reader is None:
            raise TensorDropoutError(
                f"{settings['data.name']} has no files of its own; its predictions are in {run / 'predictions.csv'}"
            )
        rows: list[dict[str, Any]] = []
        for path in _list_files(files):
            x = reader(path, network.input_shape, data_options(settings))[None].to(next(network.parameters()).dtype)
            rows.append({"file": str(path), **_describe(network, x, result)})
            if len(rows) == 1:
                typer.echo("  ".join(rows[0]))
            typer.echo(
                "  ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in rows[-1].values())
            )
        if out is not None:
            with replacing(out) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, fieldnames=list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
            typer.echo(f"Wrote:\n  {out}")


def _list_files(files: list[Path]) -> list[Path]:
    found: list[Path] = []
    for path in files:
        if path.is_dir():
            inside = (each for each in path.rglob("*") if each.is_file() and not each.name.startswith("."))
            found += sorted(each for each in inside if each.name.lower().endswith(_ENDINGS))
        elif path.is_file():
            found.append(path)
        else:
            raise TensorDropoutError(f"there is no file {path}")
    if not found:
        raise TensorDropoutError(f"there are no scans or pictures in {', '.join(map(str, files))}")
    return found


@torch.no_grad()
def _describe(network: Any, x: torch.Tensor, result: dict[str, Any]) -> dict[str, Any]:
    if result["task"] == "regression":
        mode = "exact" if len(randomized_layers(network)) == 1 else "mean"
        prediction = predict_batch(network, x, mode=mode, task="regression")  # type: ignore[arg-type]
        names = (result["target"] or "target").split(", ")
        described: dict[str, Any] = dict(zip(names, prediction.mean[0].tolist(), strict=True))
        if prediction.std is not None:
            described |= dict(zip((f"{name}_std" for name in names), prediction.std[0].tolist(), strict=True))
        return described
    probability, guess = network(x).softmax(1).max(1)
    classes = result.get("classes")
    return {"class": classes[int(guess)] if classes else int(guess), "probability": float(probability)}
