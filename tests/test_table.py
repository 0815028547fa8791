"""The data set ``table``: images with a points.csv. All images are SIMULATED: two spots, a bright and a dark one."""

from __future__ import annotations

import csv
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import tensor_dropout as td
from tensor_dropout.losses import expect
from tensor_dropout_lab import cli
from tensor_dropout_lab.data import Data, load_data
from tensor_dropout_lab.data.augment_points import MovePoints
from tensor_dropout_lab.data.table_reader import slice_at_points
from tensor_dropout_lab.training.config import resolve_config
from tensor_dropout_lab.training.step import TaskLoss, make_task_loss

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")

WIDTH, HEIGHT, COUNT = 24, 16, 24
HEADER = "file,group,x0,y0,x1,y1,age"


def draw_spots(points: np.ndarray, size: tuple[int, ...], brightness: tuple[float, ...]) -> np.ndarray:
    """An image (*size) with a spot for each of the points (P, axes), which are fractions in the order of its axes."""
    grid = np.stack(np.meshgrid(*[(np.arange(cells) + 0.5) / cells for cells in size], indexing="ij"), -1)
    image = np.zeros(size)
    for point, value in zip(points, brightness, strict=True):
        image += value * np.exp(-np.square((grid - point) * size).sum(-1) / 4)
    return image


def place_points(count: int, axes: int = 2) -> np.ndarray:
    """(count, 2, axes); by the last axis the first is in the one half, the second in the other."""
    points = np.random.default_rng(0).uniform(0.2, 0.8, (count, 2, axes))
    points[..., -1] = points[..., -1] / 2 + np.array([0.05, 0.45])
    return points


def write_pictures(folder: Path, count: int = COUNT) -> Path:
    """Pictures and their table; every two are of one group."""
    (folder / "images").mkdir(parents=True)
    lines = [HEADER]
    for number, points in enumerate(place_points(count)):  # (2, 2): x and y
        shades = 128 + draw_spots(points[:, ::-1], (HEIGHT, WIDTH), (127.0, -127.0))
        Image.fromarray(shades.clip(0, 255).astype(np.uint8)).convert("RGB").save(folder / f"images/{number:02d}.png")
        coordinates = ",".join(f"{value:.5f}" for value in points.flatten())
        lines.append(f"{number:02d}.png,g{number // 2:02d},{coordinates},{30 + number}")
    (folder / "points.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_volumes(folder: Path, count: int = 12) -> Path:
    nibabel = pytest.importorskip("nibabel", reason="needs nibabel")
    (folder / "images").mkdir(parents=True)
    turned = np.array([[0.0, -1, 0, 9], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]])  # stored as z, x backwards, y
    lines = ["file,x,y,z"]
    for number, points in enumerate(place_points(count, 3)[:, :1]):
        volume = draw_spots(points, (10, 12, 8), (1.0,)).astype(np.float32)  # (X, Y, Z)
        stored, affine = (volume, np.eye(4)) if number % 2 else (volume[::-1].transpose(2, 0, 1), turned)
        nibabel.save(nibabel.Nifti1Image(np.ascontiguousarray(stored), affine), folder / f"images/{number:02d}.nii.gz")
        lines.append(f"{number:02d}.nii.gz," + ",".join(f"{value:.5f}" for value in points[0]))
    (folder / "points.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("table") / "pictures")


@pytest.fixture
def folder(pictures: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(pictures, tmp_path / "data"))


@pytest.fixture(scope="session")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_volumes(tmp_path_factory.mktemp("table") / "volumes")


def load(root: Path, **options: Any) -> Data:
    return load_data("table", root=root, **options)


def edit(folder: Path, change: Callable[[list[list[str]]], list[list[str]]], name: str = "points.csv") -> None:
    """Rewrite the cells of the table."""
    cells = [line.split(",") for line in (folder / "points.csv").read_text().splitlines()]
    (folder / name).write_text("\n".join(",".join(row) for row in change(cells)) + "\n")


def list_parts(data: Data) -> list[Any]:
    return [part for part in (data.train, data.validation, data.test) if part is not None]


def by_name(data: Data) -> dict[str, Tensor]:
    return {name: target for part in list_parts(data) for name, target in zip(part.names, part.targets, strict=True)}


def find_brightest(image: Tensor) -> Tensor:
    """The brightest pixel of one channel, as fractions in the order of the axes."""
    place = torch.unravel_index(image.argmax(), image.shape)
    return torch.stack([(index + 0.5) / cells for index, cells in zip(place, image.shape, strict=True)])


# What is loaded.


def test_pictures_points_and_numbers(pictures: Path) -> None:
    data = load(pictures)
    assert data.task == "regression"
    assert data.target_names == ["x0", "y0", "x1", "y1", "age"]
    assert data.points == [(0, 1), (2, 3)]
    assert data.point_names == [["x0", "y0"], ["x1", "y1"]]
    assert data.input_shape == (3, HEIGHT, WIDTH)
    assert sum(len(part) for part in list_parts(data)) == COUNT
    with (pictures / "points.csv").open() as stream:
        rows = {row["file"]: row for row in csv.DictReader(stream)}
    for name, target in by_name(data).items():
        written = [float(rows[name][column]) for column in data.target_names]
        torch.testing.assert_close(target, torch.tensor(written))
    for part in list_parts(data):
        for image, target in zip(part.inputs, part.targets, strict=True):
            x, y = target[:2]
            assert (find_brightest(image[0]) - torch.stack([y, x])).abs().max() < 0.05


def test_groups_stay_together_and_folds_cover_all(pictures: Path) -> None:
    tested = []
    for fold in range(3):
        data = load(pictures, folds=3, fold=fold)
        groups = [{int(name[:2]) // 2 for name in part.names} for part in list_parts(data)]
        assert not groups[0] & groups[1]
        assert not (groups[0] | groups[1]) & groups[2]
        tested += data.test.names  # type: ignore[union-attr]
    assert sorted(tested) == [f"{number:02d}.png" for number in range(COUNT)]


@pytest.mark.parametrize("memory", [2.0, 0.0])
@pytest.mark.parametrize("prefix", ["", "wings/"])
def test_a_tar_file_is_like_a_folder(folder: Path, tmp_path: Path, prefix: str, memory: float) -> None:
    packed = tmp_path / "packed"
    packed.mkdir()
    shutil.copy(folder / "points.csv", packed)
    with tarfile.open(packed / "images.tar", "w") as archive:
        for path in sorted((folder / "images").iterdir()):
            archive.add(path, prefix + path.name)
    expected, found = load(folder), load(packed, memory=memory)
    for part, other in zip(list_parts(expected), list_parts(found), strict=True):
        assert [name.removeprefix(prefix) for name in other.names] == part.names
        assert torch.equal(other.targets, part.targets)
        images = torch.stack([other[i][0] for i in range(len(other))]) if memory == 0 else other.inputs
        assert torch.equal(images, part.inputs)


def test_pixels_are_the_fractions_times_the_size_of_the_picture(folder: Path) -> None:
    def multiply(cells: list[list[str]]) -> list[list[str]]:
        scale = [1, 1, WIDTH, HEIGHT, WIDTH, HEIGHT, 1]
        rows = [
            [*row[:2], *(f"{float(cell) * side:.6f}" for cell, side in zip(row[2:], scale[2:], strict=True))]
            for row in cells[1:]
        ]
        return [cells[0], *rows]

    expected = by_name(load(folder))
    edit(folder, multiply)
    for options in ({}, {"size": 32}):
        found = by_name(load(folder, units="pixels", **options))
        for name, target in expected.items():
            torch.testing.assert_close(found[name], target, atol=1e-5, rtol=0)


def test_resized_pictures_keep_their_points(folder: Path) -> None:
    name = "03.png"
    Image.open(folder / "images" / name).resize((60, 30)).save(folder / "images" / name)
    data = load(folder, size=[40, 20])
    assert data.input_shape == (3, 40, 20)
    for part in list_parts(data):
        for image, target in zip(part.inputs, part.targets, strict=True):
            assert (find_brightest(image[0]) - target[:2].flip(0)).abs().max() < 0.06


def test_volumes_are_turned_before_their_points_count(volumes: Path) -> None:
    data = load(volumes)
    assert data.input_shape == (1, 10, 12, 8)
    assert data.points == [(0, 1, 2)]
    for part in list_parts(data):
        for image, target in zip(part.inputs, part.targets, strict=True):
            assert (find_brightest(image[0]) - target).abs().max() < 0.08
    smaller = load(volumes, size=8)
    assert smaller.input_shape == (1, 8, 8, 8)


def test_one_column_of_a_wide_table(folder: Path) -> None:
    edit(folder, lambda cells: [[*row, "kind"] if not i else [*row, "ab"[i % 2]] for i, row in enumerate(cells)])
    kinds = load(folder, target="kind")
    assert (kinds.task, kinds.classes, kinds.outputs) == ("classification", ["a", "b"], 2)
    assert {int(target) for target in by_name(kinds).values()} == {0, 1}
    ages = load(folder, target="age")
    assert (ages.task, ages.outputs, ages.points) == ("regression", 1, [])
    corner = load(folder, target=["x1", "y1"])
    torch.testing.assert_close(by_name(corner)["00.png"], by_name(load(folder, target=["y1", "x1"]))["00.png"].flip(0))


def test_numbers_as_classes(folder: Path) -> None:
    edit(folder, lambda cells: [["file", "grade"], *([row[0], str(i % 3)] for i, row in enumerate(cells[1:]))])
    assert load(folder).task == "regression"
    data = load(folder, task="classification")
    assert data.classes == ["0", "1", "2"]
    assert by_name(data)["04.png"] == 1


def test_what_is_alone_can_be_left_out(folder: Path) -> None:
    (folder / "images/05.png").unlink()
    edit(folder, lambda cells: [row for row in cells if row[0] != "07.png"])
    said = r"Left out: 1 row without an image \(05\.png\), 1 image without a row \(07\.png\)"
    with pytest.warns(UserWarning, match=said):
        names = by_name(load(folder, missing="skip"))
    assert len(names) == COUNT - 2
    assert {"05.png", "07.png"}.isdisjoint(names)


# Missing targets.


def remove_points(cells: list[list[str]]) -> list[list[str]]:
    """Every second image has no second point."""
    return [row if i % 2 else [*row[:4], "", "", row[6]] if i else row for i, row in enumerate(cells)]


def test_rows_that_lack_a_target_are_trained_on_only(folder: Path) -> None:
    edit(folder, remove_points)
    with pytest.warns(UserWarning, match="rows to (validate|test) on lack a target and are left out"):
        data = load(folder)
    assert data.train.targets.isnan().any()
    for part in (data.validation, data.test):
        assert part is not None
        assert not part.targets.isnan().any()


def test_what_is_missing_does_not_count_in_the_loss() -> None:
    loss = TaskLoss("regression", torch.tensor([1.0, 2]), torch.tensor([2.0, 4]), may_miss=True)
    outputs = torch.tensor([[0.5, 1.0], [1.0, 3.0], [0.0, 0.0]], requires_grad=True)
    y = torch.tensor([[3.0, torch.nan], [torch.nan, torch.nan], [1.0, 6.0]])
    value, counted = loss(outputs, y)
    # standardized: 1 and 0, 1; their errors -0.5 and 0, -1; in their own units 1 and 0, 4
    assert value.item() == pytest.approx((0.25 + 0 + 1) / 3)
    assert counted.item() == pytest.approx(1 + 2)
    value.backward()
    assert outputs.grad is not None
    torch.testing.assert_close(outputs.grad, torch.tensor([[-1 / 3, 0], [0, 0], [0, -2 / 3]]))
    complete = torch.tensor([[3.0, 6.0], [1.0, 2.0], [5.0, -2.0]])
    torch.testing.assert_close(loss(outputs, complete), TaskLoss("regression", loss.mean, loss.std)(outputs, complete))


def test_the_expected_loss_is_the_average_over_masks_of_what_is_there() -> None:
    layer = td.CPRegression((4, 3), 2, rank=3, dropout=0.7).double()
    x, y = torch.randn(5, 4, 3).double(), torch.randn(5, 2).double()
    y[0, 1] = y[3, 0] = torch.nan
    known = ~y.isnan()
    mean, penalty = expect(layer, x, "regression", known)
    closed = (mean - y)[known].square().mean() + penalty
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = torch.stack([(layer(x) - y)[known].square().mean() for _ in range(4000)])
    assert float(drawn.mean()) == pytest.approx(closed.item(), abs=4 * float(drawn.std()) / 4000**0.5)


def test_mean_and_scale_are_those_of_the_targets_that_are_there(folder: Path) -> None:
    edit(folder, remove_points)
    with pytest.warns(UserWarning, match="left out"):
        data = load(folder, augment=False)
    loss = make_task_loss(data, resolve_config(overrides={"data.name": "table"}))
    known = data.train.targets[~data.train.targets[:, 2].isnan(), 2]
    assert 0 < len(known) < len(data.train)
    torch.testing.assert_close(loss.mean[2], known.mean())
    torch.testing.assert_close(loss.std[2], known.std(correction=0))


# Changes in training.


def test_volumes_and_pictures_have_their_own_changes(pictures: Path, volumes: Path) -> None:
    picture, volume = load(pictures).augment, load(volumes, flip=True).augment
    assert isinstance(picture, MovePoints)
    assert isinstance(volume, MovePoints)
    assert (picture.x_axis, picture.affine.fill, picture.mirrored) == (1, "zero", None)
    assert (volume.x_axis, volume.affine.fill, volume.mirrored.tolist()) == (0, "edge", [0, 1, 2])  # type: ignore[union-attr]
    assert load(pictures, augment=False).augment is None


def test_mirrored_columns_from_a_file_in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "pairs.csv").write_text("*0,*1\n")
    (folder.parent / "pairs.csv").write_text("nonsense\n")
    monkeypatch.chdir(folder.parent)  # the folder of the data comes before the current one
    moved = load(folder, flip=True, mirrored="pairs.csv").augment
    assert isinstance(moved, MovePoints)
    assert moved.mirrored.tolist() == [2, 3, 0, 1, 4]  # type: ignore[union-attr]


# Mistakes.


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def rewrite(change: Callable[[list[list[str]]], list[list[str]]]) -> Callable[[Path], None]:
    return lambda folder: edit(folder, change)


def replace_text(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "points.csv"
        path.write_text(path.read_text().replace(old, new))

    return change


def put(name: str, content: bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return change


def cut_short(folder: Path) -> None:
    path = folder / "images/03.png"
    path.write_bytes(path.read_bytes()[:120])


def shrink(folder: Path) -> None:
    Image.new("RGB", (5, 7)).save(folder / "images/03.png")


def empty_first(cells: list[list[str]]) -> list[list[str]]:
    return [row if not i else [*row[:2], "", *row[3:]] for i, row in enumerate(cells)]


def write_two_tables(folder: Path) -> None:
    (folder / "points.csv").rename(folder / "a.csv")
    (folder / "b.csv").touch()


def keep(_: Path) -> None:
    pass


FLIP = {"flip": True}
SIDES = [["file", "x", "y", "w", "h"], *([f"{i:02d}.png", "0.1", "0.2", "0.3", "0.4"] for i in range(COUNT))]
ONE_CLASS = [["file", "kind"], *([f"{i:02d}.png", "a"] for i in range(COUNT))]
MISTAKES = {
    "unreadable": (put("images/03.png", b"none"), {}, ["03.png", "no picture of a known format", "delete"]),
    "truncated": (cut_short, {}, ["03.png", "cannot be read"]),
    "no image": (remove("images/03.png"), {}, ["1 of 24 rows have no image", "03.png", "'skip'"]),
    "no row": (rewrite(lambda cells: cells[:-1]), {}, ["1 of 24 images", "have no row", "23.png"]),
    "sizes": (shrink, {}, ["2 sizes", "3×16×24", "03.png 3×7×5", "size=128"]),
    "semicolons": (replace_text(",", ";"), {}, ["separated by semicolons, commas are expected"]),
    "tabs": (replace_text(",", "\t"), {}, ["separated by tabs, commas are expected"]),
    "outside": (rewrite(lambda cells: [*cells[:-1], [*cells[-1][:2], "1.7", *cells[-1][3:]]]), {}, ["x0 = 1.7"]),
    "pixels": (replace_text(",0.", ",19."), {}, ["look like pixels", "--units pixels"]),
    "duplicate": (rewrite(lambda cells: [*cells, cells[2]]), {}, ["01.png", "lines 3, 26", "one row"]),
    "empty": (rewrite(empty_first), {}, ["'x0' is empty in all rows"]),
    "one class": (rewrite(lambda _: ONE_CLASS), {}, ["all rows are of the class 'a'"]),
    "words": (replace_text(",40", ",old"), {}, ["line 12, column 'age': 'old' is not a number"]),
    "target": (keep, {"target": "agee"}, ["no target 'agee'", "did you mean 'age'?"]),
    "targets": (keep, {"target": ["x0", "x0"]}, ["name each column once"]),
    "classes": (keep, {"task": "classification"}, ["classes are one column, here there are 5", "choose one as target"]),
    "sides of a box": (rewrite(lambda _: SIDES), {}, ["'w' looks like a coordinate or a side of a box", "two corners"]),
    "flip": (keep, FLIP, ["change places", "set mirrored"]),
    "mirrored": (keep, {"mirrored": [["*0", "*1"]]}, ["set flip to true"]),
    "axes": (keep, FLIP | {"mirrored": [["x0", "y1"]]}, ["'x0' and 'y1' are on different axes"]),
    "pairs": (keep, FLIP | {"mirrored": "pairs.csv"}, ["mirrored is pairs.csv", "nor pairs.csv is there"]),
    "zoom": (keep, {"zoom": 2.0}, ["zoom must be a number from 0 to 0.9"]),
    "folds": (keep, {"folds": 13}, ["folds must be 2 to 12, the number of groups"]),
    "fold": (keep, {"fold": 1}, ["fold=1 needs folds"]),
    "test": (keep, {"test": 12}, ["table: test", "a number below 12"]),
    "size": (keep, {"size": [8, 8, 8]}, ["a size of 2 numbers"]),
    "table": (remove("points.csv"), {}, ["no .csv files", "Expected: ROOT/points.csv"]),
    "tables": (write_two_tables, {}, ["2 .csv files", "set table"]),
    "given": (keep, {"images": "scans"}, ["images is scans"]),
    "units": (keep, {"units": "pixels", "target": "age"}, ["units is 'pixels', but no two columns are a point"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_in_one_sentence(folder: Path, mistake: str) -> None:
    change, options, said = MISTAKES[mistake]
    change(folder)  # type: ignore[operator]
    with pytest.raises(td.TensorDropoutError) as raised:
        load(folder, **options)  # type: ignore[arg-type]
    message = str(raised.value)
    assert [words for words in said if words not in message] == [], message
    assert "\n" not in message


def test_no_folder() -> None:
    with pytest.raises(td.TensorDropoutError, match=r"set root. Expected: ROOT/points.csv"):
        load_data("table")


def test_a_column_that_is_empty_where_it_is_trained_on(folder: Path) -> None:
    trained_on = set(load(folder).train.names)
    edit(folder, lambda cells: [[*row[:6], ""] if row[0] in trained_on else row for row in cells])
    with pytest.raises(td.TensorDropoutError, match="'age' is empty in all rows of the training part"):
        load(folder)


def test_no_whole_row_to_test_on(folder: Path) -> None:
    tested = set(load(folder).test.names)  # type: ignore[union-attr]
    edit(folder, lambda cells: [[*row[:6], ""] if row[0] in tested else row for row in cells])
    with pytest.raises(td.TensorDropoutError, match="every row to test on lacks a target"):
        load(folder)


def test_mistakes_with_volumes(volumes: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(volumes, tmp_path / "data"))
    with pytest.raises(td.TensorDropoutError, match="points in volumes are fractions"):
        load(folder, units="pixels")
    with pytest.raises(td.TensorDropoutError, match="add its third column, z"):
        load(folder, target=["x", "y"])
    (folder / "images/03.nii.gz").write_bytes(b"none")
    with pytest.raises(td.TensorDropoutError, match=r"1 of 12 images cannot be read: 03\.nii\.gz"):
        load(folder)


# The commands.


def invoke(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return result.output


def train(root: Path, out: Path, *arguments: object) -> dict[str, Any]:
    small = ["--device", "cpu", "--set", "run.threads=1", "--set", "run.workers=0", "--batch", 4, "--epochs", 1]
    invoke("train", "--data", "table", "--root", root, *small, *arguments, "--out", out)
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


@pytest.mark.filterwarnings("ignore:table. . of . rows to")
def test_landmarks_from_training_to_evaluation(folder: Path, tmp_path: Path) -> None:
    edit(folder, remove_points)
    run = tmp_path / "run"
    flip = ["--set", "data.options.flip=true", "--set", 'data.options.mirrored=[["*0", "*1"]]']
    result = train(folder, run, *flip, "--set", "run.loss=expected")
    assert result["points"] == [["x0", "y0"], ["x1", "y1"]]
    with (run / "predictions.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    distances = [
        np.hypot(*(float(row[f"predicted_{letter}{k}"]) - float(row[f"target_{letter}{k}"]) for letter in "xy"))
        for row in rows
        for k in range(2)
    ]
    assert result["test"]["distance"] == pytest.approx(100 * np.mean(distances), rel=1e-4)
    assert result["baselines"]["mean"]["distance"] > 0
    assert "distance" in invoke("ls", tmp_path)
    said = invoke("evaluate", run, "--protocol", "none", "--noise", "none", "--mode", "exact", "--device", "cpu")
    assert "evaluation.json" in said


def test_classes_and_ages(folder: Path, tmp_path: Path) -> None:
    edit(folder, lambda cells: [[*row, "kind"] if not i else [*row, "ab"[i % 2]] for i, row in enumerate(cells)])
    ages = train(folder, tmp_path / "ages", "--target", "age")
    assert set(ages["baselines"]) == {"mean", "ridge"}
    assert "points" not in ages
    kinds = train(folder, tmp_path / "kinds", "--target", "kind", "--set", "data.options.memory=0")
    assert kinds["classes"] == ["a", "b"]


def test_a_network_finds_the_spots(tmp_path: Path) -> None:
    root = write_pictures(tmp_path / "data", count=160)
    common = ["--target", "x0,y0", "--batch", 16, "--epochs", 12, "--set", "net.init=normal"]
    flip = ["--set", "data.options.flip=true", "--set", "data.options.mirrored=[]"]
    result = train(root, tmp_path / "run", *common, *flip)
    assert result["test"]["distance"] < 0.5 * result["baselines"]["mean"]["distance"]


def test_predictions_come_in_the_unit_of_the_table_with_the_points_drawn(folder: Path, tmp_path: Path) -> None:
    fractions = train(folder, tmp_path / "fractions")
    answers = {}
    for run, units in (("fractions", "fractions"), ("pixels", "pixels")):
        if units == "pixels":  # the same network, whose run says that points are in pixels
            shutil.copytree(tmp_path / "fractions", tmp_path / run)
            record = json.loads((tmp_path / run / "run.json").read_text())
            record["settings"]["data.options.units"] = units
            (tmp_path / run / "run.json").write_text(json.dumps(record))
        said = invoke("predict", folder / "images/03.png", "--model", tmp_path / run, "-o", tmp_path / "out" / run)
        answers[run] = json.loads((tmp_path / "out" / run / "03.json").read_text())
        assert ("pixels" if units == "pixels" else "of the width") in said
    assert fractions["points"] == [["x0", "y0"], ["x1", "y1"]]
    sides = {"x0": "width", "y0": "height", "x1": "width", "y1": "height"}
    assert answers["fractions"]["unit"] == {name: f"of the {side}" for name, side in sides.items()} | {"age": None}
    scale = {name: WIDTH if side == "width" else HEIGHT for name, side in sides.items()} | {"age": 1}
    for key in ("prediction", "masks_std"):
        for name, value in answers["fractions"][key].items():
            assert answers["pixels"][key][name] == pytest.approx(value * scale[name], rel=1e-4)
    written = sorted(path.name for path in (tmp_path / "out/fractions").iterdir())
    assert written == ["03-points.png", "03.json", "03.png"]  # the points, and the map of the age
    assert Image.open(tmp_path / "out/fractions/03-points.png").size[0] > 100
    for place, names in (("a", ["03.png"]), ("b", ["04.jpg", "04-points.png"])):
        (tmp_path / place).mkdir()
        for name in names:
            shutil.copy(folder / "images/03.png", tmp_path / place / name)
        result = CliRunner(env={"COLUMNS": "300"}).invoke(
            cli.app,
            [str(word) for word in ("predict", tmp_path / place, "-m", tmp_path / "fractions", "-o", tmp_path / place)],
        )
        assert result.exit_code == 1
        assert f"would overwrite the image {tmp_path / place / names[-1]}; name another folder" in result.stderr
        assert sorted(path.name for path in (tmp_path / place).iterdir()) == sorted(names)


def test_files_that_cannot_be_predicted(folder: Path, volumes: Path, tmp_path: Path) -> None:
    train(volumes, tmp_path / "run")
    (tmp_path / "none.nii.gz").write_bytes(b"none")
    result = CliRunner(env={"COLUMNS": "300"}).invoke(
        cli.app, ["predict", str(tmp_path / "none.nii.gz"), "--model", str(tmp_path / "run")]
    )
    assert result.exit_code == 1
    assert "none.nii.gz cannot be read as a volume" in result.stderr
    said = invoke("predict", volumes / "images/00.nii.gz", "--model", tmp_path / "run", "-o", tmp_path / "out")
    assert "of the depth" in said
    assert (tmp_path / "out/00-points.png").is_file()


def test_slices_show_a_point_where_the_voxel_is() -> None:
    volume = torch.zeros(5, 6, 7)
    volume[1, 4, 2] = 1
    point = (np.array([[1, 4, 2]]) + 0.5) / np.array([5, 6, 7])
    panels = slice_at_points(volume, point, None)
    assert [panel.title for panel in panels] == ["axial, z = 2 of 7", "coronal, y = 4 of 6", "sagittal, x = 1 of 5"]
    for panel in panels:
        row, column = np.unravel_index(panel.image[..., 0].argmax(), panel.image.shape[:2])
        height, width = panel.image.shape[:2]
        assert panel.image.max() == 255
        np.testing.assert_allclose(panel.predicted * (width, height), [[column + 0.5, row + 0.5]])
