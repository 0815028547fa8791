"""What a trained network says about files, and where it looks: the work of ``tensor-dropout predict``."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensor_dropout.calibration.model import ModelCalibration
from tensor_dropout.calibration.regression import Calibration
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.files import load
from tensor_dropout.layers.randomized import randomized_layers
from tensor_dropout.prediction import Prediction
from tensor_dropout.prediction import predict as predict_batch
from tensor_dropout.progress import show_progress
from tensor_dropout_lab.data import DATASETS
from tensor_dropout_lab.data.base import FileReader, PointReader, name_targets
from tensor_dropout_lab.evaluation.calibrating import read_calibration
from tensor_dropout_lab.explanation import explain
from tensor_dropout_lab.prediction_table import (
    COVERAGE,
    FilePredictions,
    add_records,
    check_coverage,
    check_drawing,
    format_uncertain,
    is_table_file,
    list_files,
    list_rows,
    name_results,
    refuse_overwriting,
    write_table,
)
from tensor_dropout_lab.run_records import describe_environment, write_json
from tensor_dropout_lab.training.runs import data_options, read_finished_run

_SPELLED_OUT = 6
"""As many numbers are printed one by one."""


def predict_files(
    run: Path, given: list[Path], out: Path, *, picture: bool = True, coverage: float = COVERAGE
) -> FilePredictions:
    """Predict files with the network of a finished run, and write tables, records and pictures.

    Args:
        run: the folder of the run.
        given: files like those it was trained on, or folders of them.
        out: a folder; or a .csv file, for a table alone.
        picture: whether to draw where the network looks.
        coverage: the share of new files that intervals are to hold for, where the run was calibrated.

    Raises:
        TensorDropoutError: if the run or ``out`` does not fit, there are no files, or the only file cannot be read.
    """
    is_table = is_table_file(out)
    check_coverage(coverage)
    if picture and not is_table:
        check_drawing()
    trained = _open_run(run, coverage)
    paths = list_files(given, trained.reader)
    names = name_results(paths)
    table = out if is_table else out / "predictions.csv"
    endings = [".json", *((".png", "-points.png", *map(_name_picture, trained.targets or [])) if picture else [])]
    refuse_overwriting(paths, [table] if is_table else [table, *(out / f"{n}{end}" for n in names for end in endings)])
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
        rows = list_rows(paths, [answer.row for answer in answers], failures)
        write_table(table, rows if is_table else add_records(rows, names))
        written = [table, *written]
    lines = [str(answer) for answer in answers]
    lines += [trained.explain()] if answers else []
    return FilePredictions(lines, written, failures, len(paths))


@dataclass(frozen=True)
class _Answer:
    """What the network says about one file: a line to print, a row of the table, and a record.

    Attributes:
        text: what is printed.
        row: of the table.
        record: the JSON.
        outputs: those whose maps are drawn.
        points: those to draw on the image, as fractions, (points, axes), and matrices of ellipses; None for none.
    """

    text: str
    row: dict[str, Any]
    record: dict[str, Any]
    outputs: tuple["_Output", ...]
    points: tuple[np.ndarray, np.ndarray | None] | None = None

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
        reader: of files like those it was trained on.
        network: in ``eval`` mode.
        targets: names of the outputs of a regression; None for classes.
        units: of those targets that have a known one.
        classes: their names, or None.
        model: run and fingerprint, for the record.
        points: which targets are the coordinates of each point.
        calibration: what held-out examples said of its errors, if it was calibrated.
        coverage: of intervals.
    """

    reader: FileReader
    network: Any
    targets: list[str] | None
    units: dict[str, str]
    classes: list[str] | None
    model: dict[str, Any]
    points: list[tuple[int, ...]]
    calibration: ModelCalibration | None
    coverage: float

    def explain(self) -> str:
        """What the numbers say, and what not."""
        if self.calibration is None and self.targets is None:
            return "No calibration, so no sets of classes; tensor-dropout calibrate makes one."
        if self.calibration is None:
            return (
                "No calibration: nobody measured how far off these are; tensor-dropout calibrate does. Masks: the "
                "spread over the masks, a small part of the error."
            )
        about = self.calibration.about
        return (
            f"{100 * self.coverage:g} % intervals and sets: as {about['examples']} {about['split']} examples of "
            f"{about['data']} showed; new files must be like them."
        )

    def read(self, path: Path) -> Tensor:
        """(1, *input_shape), prepared as in training."""
        x = self.reader.read(path)
        return x[None].to(next(self.network.parameters()).dtype)

    def ask(self, path: Path, x: Tensor) -> _Answer:
        """What the network says about one file."""
        return self._ask_class(path, x) if self.targets is None else self._ask_number(path, x, self.targets)

    def _asked(self) -> dict[str, Any]:
        return {} if self.calibration is None else {"coverage": self.coverage, "calibration": self.calibration}

    def _ask_number(self, path: Path, x: Tensor, targets: list[str]) -> _Answer:
        mode: Any = "exact" if len(randomized_layers(self.network)) == 1 else "mean"
        found = predict_batch(self.network, x, mode=mode, task="regression", **self._asked())
        scale = self._find_scale(path, targets)
        parts = {"": found.mean, "_low": found.low, "_high": found.high, "_masks": found.std}
        known = {
            ending: dict(zip(targets, (values[0].cpu() * scale).tolist(), strict=True))
            for ending, values in parts.items()
            if values is not None
        }
        drawn = {column for point in self.points for column in point}
        said, outputs = [], []
        for index, name in enumerate(targets):
            unit = self.units.get(name)
            said.append(f"{name} {self._say_number(known, name, unit)}")
            if index not in drawn:
                outputs.append(_Output(index, name, said[-1], f"{name} ({unit})" if unit else name))
        more = [f"and {len(said) - _SPELLED_OUT} more"] if len(said) > _SPELLED_OUT else []
        row = {"file": str(path)}
        row |= {f"{name}{ending}": value for ending, values in known.items() for name, value in values.items()}
        interval = {name: [known["_low"][name], known["_high"][name]] for name in targets} if "_low" in known else None
        record = {
            "file": str(path),
            "task": "regression",
            "prediction": known[""],
            "interval": interval,
            "coverage": None if interval is None else self.coverage,
            "masks_std": known.get("_masks"),
            "unit": {name: self.units.get(name) for name in targets},
            "mode": mode,
            "model": self.model,
        }
        return _Answer("; ".join(said[:_SPELLED_OUT] + more), row, record, tuple(outputs), self._draw_points(found))

    def _say_number(self, known: dict[str, dict[str, float]], name: str, unit: str | None) -> str:
        """``29.9 years, 90 % interval 14 to 46; masks 1.4``, with as many digits as the error has."""
        value, masks = known[""][name], known["_masks"][name] if "_masks" in known else None
        spread = "" if masks is None else f" (masks {masks:.2g})"
        if "_low" not in known:
            return f"{format_uncertain(value, masks)}{f' {unit}' if unit else ''}, no interval{spread}"
        low, high = known["_low"][name], known["_high"][name]
        value_text, *ends = (format_uncertain(number, (high - low) / 4) for number in (value, low, high))
        return (
            f"{value_text}{f' {unit}' if unit else ''}, {100 * self.coverage:g} % interval {' to '.join(ends)}{spread}"
        )

    def _draw_points(self, found: Prediction) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Points as fractions, and ellipses that hold them, where the run was calibrated."""
        if not self.points:
            return None
        mean, columns = found.mean.cpu(), np.array(self.points)
        if self.calibration is None or not isinstance(self.calibration.errors, Calibration):
            return mean[0].numpy()[columns], None
        h = found.std.square().cpu() if self.calibration.uses_masks and found.std is not None else None
        region, _ = self.calibration.errors.regions(
            mean, self.calibration.errors.std(h, 1).to(mean), self.points, self.coverage
        )
        return region.center[0].numpy(), region.matrix[0].numpy()

    def _find_scale(self, path: Path, targets: list[str]) -> Tensor:
        """What every output is multiplied by to be in its unit."""
        scale = torch.ones(len(targets))
        if self.points and isinstance(self.reader, PointReader):
            scale[torch.tensor(self.points)] = torch.tensor(self.reader.measure(path))
        return scale

    def _ask_class(self, path: Path, x: Tensor) -> _Answer:
        prediction = predict_batch(self.network, x, mode="mean", task="classification", **self._asked())
        assert prediction.probs is not None
        probabilities, order = prediction.probs[0].sort(descending=True, stable=True)
        names = [self.classes[k] if self.classes else k for k in order.tolist()]
        best, probability = names[0], float(probabilities[0])
        text = f"class {best}, probability {probability:.4g}"
        inside = None
        if prediction.sets is not None:
            inside = [name for name, k in zip(names, order.tolist(), strict=True) if bool(prediction.sets[0, k])]
            text += f"; {100 * self.coverage:g} % set: {', '.join(map(str, inside)) or 'none'}"
        record = {
            "file": str(path),
            "task": "classification",
            "prediction": best,
            "probability": probability,
            "top": [
                {"class": name, "probability": share}
                for name, share in zip(names[:5], probabilities[:5].tolist(), strict=True)
            ],
            "set": inside,
            "coverage": None if inside is None else self.coverage,
            "mode": "mean",
            "model": self.model,
        }
        row = {"file": str(path), "class": best, "probability": probability}
        row |= {} if inside is None else {"set": "; ".join(map(str, inside))}
        output = _Output(int(order[0]), str(best), text, f"the logit of {best}")
        return _Answer(text, row, record, (output,))

    def draw(self, path: Path, x: Tensor, answer: _Answer, stem: Path) -> tuple[list[dict[str, Any]], list[Path]]:
        """Draw the points, and the map of each other output: what is in maps, for the record, and the files."""
        from tensor_dropout_lab.explanation_figures import describe_map, draw_explanation

        described: list[dict[str, Any]] = []
        pictures: list[Path] = []
        if answer.points is not None and isinstance(self.reader, PointReader):
            from tensor_dropout_lab.point_pictures import draw_panels

            places, ellipses = answer.points
            pictures.append(stem.with_name(f"{stem.name}-points.png"))
            held = f" Ellipse: holds the point in {100 * self.coverage:g} % of images like the held-out ones."
            caption = "Blue: predicted." + (" Not calibrated." if ellipses is None else held)
            draw_panels(pictures[0], self.reader.show(path, places, ellipses), caption)
        if not answer.outputs:
            return described, pictures
        found = explain(self.network, x)
        for output in answer.outputs:
            grid = found.contributions[0, ..., output.index].double()
            bias, value = float(found.bias[output.index]), float(found.outputs[0, output.index])
            target = stem.with_name(f"{stem.name}{_name_picture(output.name) if len(answer.outputs) > 1 else '.png'}")
            draw_explanation(
                target,
                self.reader.view(path, x, grid),
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


def _name_picture(output: str) -> str:
    """How the name of the picture of one of several outputs ends."""
    return "-" + re.sub(r"[^\w.-]+", "_", output) + ".png"


def _open_run(run: Path, coverage: float) -> _Trained:
    try:
        record, result = read_finished_run(run)
    except json.JSONDecodeError as error:
        raise TensorDropoutError(f"predict: a record of the run {run} is damaged ({error})") from error
    settings = record["settings"]
    name, options = settings["data.name"], data_options(settings)
    readable = [name for name, source in DATASETS.items() if source.reader]
    if name not in readable:
        raise TensorDropoutError(
            f"predict: files are those of {' or '.join(readable)}, and this run was trained on {name}; its predictions "
            f"are in {run / 'predictions.csv'}"
        )
    path = run / "model.safetensors"
    network: Any = load(path).eval()
    targets = (
        name_targets(result.get("target"), network.settings["outputs"]) if result["task"] == "regression" else None
    )
    calibration = read_calibration(run, network)
    reader = DATASETS[name].import_reader()(
        tuple(network.input_shape), options, settings.get("data.root"), record.get("data", {})
    )
    return _Trained(
        reader=reader,
        network=network,
        targets=targets,
        units=reader.find_units(targets or []),
        classes=result.get("classes"),
        model={
            "run": str(run),
            "fingerprint": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
            "data": name,
            "net": settings["net.name"],
            "head": settings["net.head"],
        },
        points=reader.find_points(targets or []) if isinstance(reader, PointReader) else [],
        calibration=calibration,
        coverage=coverage,
    )
