"""``tensor-dropout predict``: what a trained network says about files, and where it looks."""

import csv
import hashlib
import importlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.files import load
from tensor_dropout.layers.regression import randomized_layers
from tensor_dropout.prediction import predict as predict_batch
from tensor_dropout.progress import show_progress
from tensor_dropout_lab.cli.failures import report_failure
from tensor_dropout_lab.data import DATASETS
from tensor_dropout_lab.data.base import name_targets
from tensor_dropout_lab.explanation import explain
from tensor_dropout_lab.figures import require_matplotlib
from tensor_dropout_lab.records import describe_environment, write_json
from tensor_dropout_lab.training.runs import data_options, read_finished_run

_ENDINGS = {
    "nifti": (".nii", ".nii.gz"),
    "imagefolder": (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm"),
}
"""What is looked for in a folder, by the data that the network was trained on."""


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
        is_table = out.suffix == ".csv"
        if not is_table and out.exists() and not out.is_dir():
            raise TensorDropoutError(f"predict: --out is a folder or a .csv file, and {out} is another file")
        if picture and not is_table:
            _require_matplotlib()
        trained = _open_run(run)
        paths = _list_files(given, trained)
        names = _name_results(paths)
        environment = describe_environment()
        answers: list[_Answer] = []
        failures: dict[Path, str] = {}
        written: list[Path] = []
        with show_progress("files", len(paths)) as advance:
            for path, name in zip(paths, names, strict=True):
                advance.describe(path.name)
                try:
                    x = trained.read(path)
                except (TensorDropoutError, OSError) as error:
                    if len(paths) == 1:
                        raise
                    failures[path] = str(error)
                    advance(1)
                    continue
                answers.append(trained.ask(path, x))
                if not is_table:
                    explanation, pictures = trained.draw(path, x, answers[-1], out / name) if picture else (None, [])
                    record = {**answers[-1].record, "explanation": explanation, "environment": environment}
                    write_json(out / f"{name}.json", record)
                    written += [out / f"{name}.json", *pictures]
                advance(1)
        if is_table or len(paths) > 1:
            table = out if is_table else out / "predictions.csv"
            rows = _list_rows(paths, answers, failures)
            _write_table(table, rows if is_table else _add_records(rows, names))
            written = [table, *written]
        for answer in answers:
            typer.echo(answer)
        if any(" ± " in answer.text for answer in answers):
            typer.echo("± is the spread over the masks, not the whole error: see the test errors of the run.")
        typer.echo("Wrote:")
        for path in written[:4]:
            typer.echo(f"  {path}")
        if len(written) > 4:
            typer.echo(f"  and {len(written) - 4} more in {out}")
        if failures:
            raise TensorDropoutError(_describe_failures(failures, len(paths), table))


@dataclass(frozen=True)
class _Answer:
    """What the network says about one file: a line to print, a row of the table, and a record."""

    text: str
    row: dict[str, Any]
    record: dict[str, Any]
    outputs: tuple["_Output", ...]

    def __str__(self) -> str:
        return f"{self.row['file']}: {self.text}"


@dataclass(frozen=True)
class _Output:
    """One number of the network's answer whose map is drawn."""

    index: int
    name: str
    title: str
    quantity: str


@dataclass(frozen=True)
class _Trained:
    """The network of a finished run, and what its outputs mean.

    Attributes:
        data: the name of the data set it was trained on.
        module: where that data set's ``read_input`` is.
        options: those its data was loaded with.
        network: in ``eval`` mode.
        targets: names of the outputs of a regression; None for classes.
        units: of those targets that have a known one.
        classes: their names, or None.
        model: run and fingerprint, for the record.
        voxel: edges in mm that a scan's must be near; None: not known, or scans are resampled.
    """

    data: str
    module: ModuleType
    options: dict[str, Any]
    network: Any
    targets: list[str] | None
    units: dict[str, str]
    classes: list[str] | None
    model: dict[str, Any]
    voxel: tuple[float, ...] | None

    def read(self, path: Path) -> Tensor:
        """(1, *input_shape), prepared as in training."""
        if self.voxel is not None:
            self.module.require_voxel(path, self.voxel)
        x: Tensor = self.module.read_input(path, self.network.input_shape, self.options)
        return x[None].to(next(self.network.parameters()).dtype)

    def ask(self, path: Path, x: Tensor) -> _Answer:
        """What the network says about one file."""
        return self._ask_class(path, x) if self.targets is None else self._ask_number(path, x, self.targets)

    def _ask_number(self, path: Path, x: Tensor, targets: list[str]) -> _Answer:
        mode = "exact" if len(randomized_layers(self.network)) == 1 else "mean"
        prediction = predict_batch(self.network, x, mode=mode, task="regression")  # type: ignore[arg-type]
        values = dict(zip(targets, prediction.mean[0].tolist(), strict=True))
        deviations = None if prediction.std is None else dict(zip(targets, prediction.std[0].tolist(), strict=True))
        said, outputs = [], []
        for index, name in enumerate(targets):
            unit = self.units.get(name)
            number = format_uncertain(values[name], None if deviations is None else deviations[name])
            said.append(f"{name} {number}{f' {unit}' if unit else ''}")
            outputs.append(_Output(index, name, said[-1], f"{name} ({unit})" if unit else name))
        row = {"file": str(path), **values}
        row |= {f"{name}_std": deviation for name, deviation in (deviations or {}).items()}
        record = {
            "file": str(path),
            "task": "regression",
            "prediction": values,
            "std": deviations,
            "unit": {name: self.units.get(name) for name in targets},
            "mode": mode,
            "model": self.model,
        }
        return _Answer(", ".join(said), row, record, tuple(outputs))

    def _ask_class(self, path: Path, x: Tensor) -> _Answer:
        prediction = predict_batch(self.network, x, mode="mean", task="classification")
        assert prediction.probs is not None
        probabilities, order = prediction.probs[0].sort(descending=True, stable=True)
        names = [self.classes[k] if self.classes else k for k in order.tolist()]
        best, probability = names[0], float(probabilities[0])
        text = f"class {best}, probability {probability:.4g}"
        record = {
            "file": str(path),
            "task": "classification",
            "prediction": best,
            "probability": probability,
            "top": [
                {"class": name, "probability": share}
                for name, share in zip(names[:5], probabilities[:5].tolist(), strict=True)
            ],
            "std": None,
            "mode": "mean",
            "model": self.model,
        }
        row = {"file": str(path), "class": best, "probability": probability}
        output = _Output(int(order[0]), str(best), text, f"the logit of {best}")
        return _Answer(text, row, record, (output,))

    def draw(self, path: Path, x: Tensor, answer: _Answer, stem: Path) -> tuple[list[dict[str, Any]], list[Path]]:
        """Draw the map of each output: what is in them, for the record, and the files."""
        from tensor_dropout_lab.explanation_figures import describe_map, draw_explanation

        found = explain(self.network, x)
        described, pictures = [], []
        for output in answer.outputs:
            grid = found.contributions[0, ..., output.index].double()
            bias, value = float(found.bias[output.index]), float(found.outputs[0, output.index])
            ending = "" if len(answer.outputs) == 1 else "-" + re.sub(r"[^\w.-]+", "_", output.name)
            target = stem.with_name(f"{stem.name}{ending}.png")
            draw_explanation(
                target,
                self._view(path, x, grid),
                grid,
                title=f"{path.name}: {output.title}",
                quantity=output.quantity,
                bias=bias,
                output=value,
            )
            pictures.append(target)
            described.append(
                {
                    "output": output.name,
                    "contributions": grid.tolist(),
                    "bias": bias,
                    "value": value,
                    "picture": target.name,
                    "caption": describe_map(grid, output.quantity, bias, value),
                }
            )
        return described, pictures

    def _view(self, path: Path, x: Tensor, grid: Tensor) -> list[Any]:
        """The input as it is drawn: slices of the prepared scan, or the pixels that the network sees."""
        from tensor_dropout_lab.explanation_figures import slice_volume, view_picture

        if self.data == "nifti":
            voxel = (1.0, 1.0, 1.0) if self.options.get("resample") else self.module.read_header(path).voxel
            return slice_volume(x[0, 0].double(), grid, voxel)
        stream = self.module.PictureStream(
            [path.name],
            torch.zeros(1, dtype=torch.int64),
            root=path.parent,
            size=self.network.input_shape[1],
            resize=self.options.get("resize", 256),
        )
        return view_picture(stream.read(0), grid)


def format_uncertain(value: float, deviation: float | None) -> str:
    """``value ± deviation``, both to the second digit of the deviation; the value alone without one.

    Example:
        >>> format_uncertain(54.3127, 2.138), format_uncertain(1234.5, 210.0), format_uncertain(54.3127, None)
        ('54.3 ± 2.1', '1234 ± 210', '54.31')
    """
    if deviation is None:
        return f"{value:.4g}"
    if not (math.isfinite(deviation) and deviation > 0):
        return f"{value:.4g} ± {deviation:.4g}"
    digits = max(0, 1 - math.floor(math.log10(deviation)))
    return f"{value:.{digits}f} ± {deviation:.{digits}f}"


def _choose_run(files: list[Path], model: Path | None) -> tuple[Path, list[Path]]:
    """The run and the files; without --model the first argument is the run, if it is a folder and others follow."""
    if model is not None:
        return model, files
    if len(files) < 2 or not files[0].is_dir():
        raise typer.BadParameter("name the folder of a finished run with --model RUN", param_hint="--model")
    return files[0], files[1:]


def _require_matplotlib() -> None:
    try:
        require_matplotlib()
    except TensorDropoutError as error:
        raise TensorDropoutError(f"{error}, or predict without pictures: --no-picture") from error


def _open_run(run: Path) -> _Trained:
    try:
        record, result = read_finished_run(run)
    except json.JSONDecodeError as error:
        raise TensorDropoutError(f"predict: a record of the run {run} is damaged ({error})") from error
    settings = record["settings"]
    name, options = settings["data.name"], data_options(settings)
    if name not in _ENDINGS:
        raise TensorDropoutError(
            f"predict: files are those of {' or '.join(_ENDINGS)}, and this run was trained on {name}; its predictions "
            f"are in {run / 'predictions.csv'}"
        )
    module = importlib.import_module(DATASETS[name].module)
    path = run / "model.safetensors"
    network: Any = load(path).eval()
    targets = (
        name_targets(result.get("target"), network.settings["outputs"]) if result["task"] == "regression" else None
    )
    return _Trained(
        data=name,
        module=module,
        options=options,
        network=network,
        targets=targets,
        units=_find_units(settings.get("data.root"), options.get("table"), targets or []),
        classes=result.get("classes"),
        model={
            "run": str(run),
            "fingerprint": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
            "data": name,
            "net": settings["net.name"],
            "head": settings["net.head"],
        },
        voxel=_find_voxel(module, record, options) if name == "nifti" else None,
    )


def _find_units(root: str | None, table: str | None, targets: Sequence[str]) -> dict[str, str]:
    """The units that BIDS' description beside the table states; ``age`` in participants.tsv is in years by BIDS."""
    if root is None:
        return {}
    path = Path(root).expanduser() / (table or "participants.tsv")
    units = {"age": "years"} if path.name == "participants.tsv" and path.is_file() else {}
    try:
        stated = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        units |= {name: str(stated[name]["Units"]) for name in targets if "Units" in stated.get(name, {})}
    except (OSError, ValueError, AttributeError, TypeError):
        pass  # no description, or one that says nothing
    return {name: unit for name, unit in units.items() if name in targets}


def _find_voxel(module: ModuleType, record: dict[str, Any], options: dict[str, Any]) -> tuple[float, ...] | None:
    """The voxel edges of the training scans: from the run or, if it is older, the first 20 scans of its folder.

    None if they are resampled, or nobody knows.
    """
    root, stored = record["settings"].get("data.root"), record.get("data", {}).get("voxel")
    if stored is not None:
        return tuple(stored)
    if root is None or options.get("resample") is not None:
        return None
    try:
        paths = module.find_files(Path(root).expanduser(), options.get("images", "**/*.nii*"))[:20]
        return module.typical_voxel([module.read_header(path) for path in paths]) if paths else None
    except (OSError, TensorDropoutError):
        return None


def _list_files(given: list[Path], trained: _Trained) -> list[Path]:
    """The files named, and those in the folders named; of a folder of scans, what training would take of it."""
    endings = _ENDINGS[trained.data]
    found: list[Path] = []
    for path in given:
        if path.is_dir() and trained.data == "nifti":
            scans = trained.module.find_files(path, trained.options.get("images", "**/*.nii*"))
            kinds = trained.module.list_kinds(scans)
            if len(kinds) > 1:
                raise TensorDropoutError(
                    f"{path} has several kinds of scan ({', '.join(kinds)}); name the files instead"
                )
            found += scans
        elif path.is_dir():
            inside = (each for each in path.rglob("*") if each.is_file() and not each.name.startswith("."))
            found += sorted(each for each in inside if each.name.lower().endswith(endings))
        elif path.is_file():
            found.append(path)
        else:
            raise TensorDropoutError(f"there is no file {path}")
    if not found:
        kinds = f"no scans or pictures that this network takes ({', '.join(endings)})"
        raise TensorDropoutError(f"there are {kinds} in {', '.join(map(str, given))}")
    return found


def _name_results(paths: list[Path]) -> list[str]:
    """A name for the results of each file: its own without the ending, and a number where two are alike.

    Example:
        >>> _name_results([Path("a/sub-01_T1w.nii.gz"), Path("b/cat.png"), Path("c/cat.jpg")])
        ['sub-01_T1w', 'cat', 'cat-2']
    """
    names: dict[str, None] = {}
    for path in paths:
        stem = path.name.removesuffix(".gz").removesuffix(".nii") if ".nii" in path.suffixes else path.stem
        name, number = stem, 2
        while name in names:
            name, number = f"{stem}-{number}", number + 1
        names[name] = None
    return list(names)


def _list_rows(paths: list[Path], answers: list[_Answer], failures: dict[Path, str]) -> list[dict[str, Any]]:
    """A row for each file in its order; if one failed, all have the column ``error``, which is empty for the others."""
    if not failures:
        return [answer.row for answer in answers]
    given = iter(answers)
    columns = dict.fromkeys(answers[0].row if answers else ["file"], "")
    return [
        {**columns, "file": str(path), "error": failures[path]}
        if path in failures
        else {**next(given).row, "error": ""}
        for path in paths
    ]


def _add_records(rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """The rows with the column ``record`` behind the file: its JSON, whose name has a number where files are alike."""
    return [
        {"file": row["file"], "record": "" if row.get("error") else f"{name}.json", **row}
        for row, name in zip(rows, names, strict=True)
    ]


def _describe_failures(failures: dict[Path, str], count: int, table: Path) -> str:
    names = ", ".join(str(path) for path in list(failures)[:3]) + (", …" if len(failures) > 3 else "")
    first = next(iter(failures.values()))
    return (
        f"predict: {len(failures)} of {count} files could not be predicted: {names}; the first because {first}; the "
        f"reason of each is in the column error of {table}"
    )


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    with replacing(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
