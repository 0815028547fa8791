"""Where a network looks: contributions that sum to the output, their pictures, and ``tensor-dropout predict``."""

from __future__ import annotations

import copy
import csv
import hashlib
import itertools
import json
import shutil
import sys

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tensor_dropout as td
from tensor_dropout import files
from tensor_dropout_lab import cli
from tensor_dropout_lab.data.nifti import ScanReader
from tensor_dropout_lab.data.nifti.volumes import read_input
from tensor_dropout_lab.explanation import Explanation, enlarge, explain, find_peak, merge_head
from tensor_dropout_lab.explanation_figures import draw_explanation, slice_volume, view_picture
from tensor_dropout_lab.nets import HEADS, build_net
from tensor_dropout_lab.prediction_table import format_uncertain
from training_runs import run

SHAPES = {"2-D": (3, 16, 24), "3-D": (1, 16, 18, 24)}
each_head = pytest.mark.parametrize("head", HEADS)
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def build(head="rtrl-cp", shape=SHAPES["2-D"], outputs=5, **settings):
    """A network whose batch norms have seen something."""
    torch.manual_seed(1)
    net = build_net("resnet-mini", outputs=outputs, input_shape=shape, head=head, **settings)
    net(torch.randn(4, *shape))
    return net


def total(found: Explanation) -> torch.Tensor:
    return found.contributions.flatten(1, -2).sum(1) + found.bias


# The map.


@each_head
@each_shape
def test_contributions_sum_to_the_output(head, shape):
    net, x = build(head, shape), torch.randn(2, *shape)
    found = explain(net, x)
    with torch.no_grad():
        outputs = net.eval()(x)
    assert found.contributions.shape == (2, *net.feature_shape[1:], 5)
    torch.testing.assert_close(found.outputs, outputs)
    torch.testing.assert_close(total(found), outputs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scaling", ["inverted", "paper"])
@pytest.mark.parametrize("head", ["rtrl-cp", "rtrl-tucker", "rtrl-tt"])
def test_each_contribution_is_features_times_the_merged_weight(head, scaling):
    net = build(head, scaling=scaling, theta=0.5).double().eval()
    x = torch.randn(1, 3, 16, 24, dtype=torch.float64)
    found = explain(net, x)
    with torch.no_grad():
        features, weight = net.forward_features(x)[0], net.fc.dense_weight()
    for i, j, o in itertools.product(*map(range, (*features.shape[1:], 5))):
        expected = sum(features[c, i, j] * weight[c, i, j, o] for c in range(len(features)))
        assert float(found.contributions[0, i, j, o]) == pytest.approx(float(expected), abs=1e-12)


def test_the_weight_behind_average_pooling_is_shared_by_all_positions():
    net, x = build("fc").eval(), torch.randn(1, 3, 16, 24)
    weight, bias = merge_head(net.fc, (2, 3))
    with torch.no_grad():
        features = net.forward_features(x)[0]
        expected = torch.einsum("chw,oc->hwo", features, net.fc.weight) / 6
    assert torch.equal(bias, net.fc.bias)
    assert (weight == weight[:, :1, :1]).all()
    torch.testing.assert_close(explain(net, x).contributions[0], expected)


def test_a_change_at_one_position_changes_its_contribution_alone():
    head = td.TuckerRegression((8, 4, 6), 3, rank=(4, 3, 3, 2), dropout=0.7)
    x = torch.randn(1, 8, 4, 6)
    other = x.clone()
    other[0, :, 2, 5] += 1
    differences = (explain(head, other).contributions - explain(head, x).contributions).abs().sum(-1)[0]
    assert differences.nonzero().tolist() == [[2, 5]]


def test_the_network_is_left_as_it_was():
    net = build("rtrl-cp", theta=0.5)
    net.train()
    net.layer1.eval()
    before = copy.deepcopy(net.state_dict())
    x = torch.randn(2, 3, 16, 24)
    explain(net, x)
    assert (net.training, net.fc.training, net.layer1.training) == (True, True, False)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert not net.fc._forward_pre_hooks
    assert not torch.equal(net(x), net(x))
    assert not explain(net, x).contributions.requires_grad


def test_a_network_that_samples_at_test_is_explained_by_its_mean():
    net = build("rtrl-cp", theta=0.5).eval()
    x = torch.randn(1, 3, 16, 24)
    expected = explain(net, x)
    net.fc.dropout.at_test = "sample"
    torch.testing.assert_close(explain(net, x).contributions, expected.contributions)
    assert net.fc.dropout.at_test == "sample"


def test_other_networks():
    """Pooling and a linear layer anywhere at the end, and what surgery makes of them."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(8, 4))
    x = torch.randn(2, 3, 9, 7)
    plain = explain(net, x)
    assert plain.contributions.shape == (2, 7, 5, 4)
    torch.testing.assert_close(total(plain), net(x), rtol=0, atol=1e-5)
    td.tensorize_(net, torch.randn(2, 3, 9, 7), rank="full")
    torch.testing.assert_close(explain(net, x).contributions, plain.contributions, rtol=0, atol=1e-5)


def test_flattening_keeps_the_positions_of_the_weight():
    net = nn.Sequential(nn.AdaptiveAvgPool2d((2, 3)), nn.Flatten(), nn.Linear(3 * 2 * 3, 4))
    x = torch.randn(2, 3, 8, 9)
    found = explain(net, x)
    assert found.contributions.shape == (2, 2, 3, 4)
    features = net[0](x)
    weight = net[2].weight.reshape(4, 3, 2, 3)
    torch.testing.assert_close(found.contributions, torch.einsum("bchw,ochw->bhwo", features, weight).detach())


@pytest.mark.parametrize("head", ["fc", "rtrl-cp", "rtrl-tucker", "rtrl-tt"])
@pytest.mark.parametrize("how", [torch.bfloat16, torch.float16, "autocast"], ids=str)
def test_half_precision_is_explained_in_float32(head, how):
    net, x = build(head).eval(), torch.randn(3, 3, 16, 24)
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            found = explain(net, x)
    else:
        found = explain(copy.deepcopy(net).to(how), x.to(how))
    expected = explain(net, x)
    assert {part.dtype for part in found} == {torch.float32}
    scale = expected.contributions.abs().max()
    torch.testing.assert_close(found.contributions, expected.contributions, rtol=0, atol=float(0.1 * scale))


def test_a_small_change_behind_the_head_is_seen_in_half_precision():
    net = Halved(build()).bfloat16()
    with pytest.raises(td.TensorDropoutError, match="does not return the output of its last linear layer"):
        explain(net, torch.randn(3, 3, 16, 24).bfloat16())


class Halved(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x) / 2


class Twice(Halved):
    def forward(self, x):
        return self.net(x) + self.net(-x)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Conv2d(3, 8, 3), "has neither a tensor regression layer nor an nn.Linear"),
        (nn.Linear(24, 2), "nn.Linear without average pooling to one position or nn.Flatten"),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 24, 5), nn.Linear(5, 2)),
            "more than flattening before its end",
        ),
        (nn.Sequential(nn.Flatten(), td.CPRegression(3 * 16 * 24, 2, rank=2)), "without positions"),
        (Halved(build()), "does not return the output of its last linear layer as it is"),
        (Twice(build()), "does not return the output of its last linear layer as it is"),
    ],
)
def test_what_cannot_be_explained(net, message):
    with pytest.raises(td.TensorDropoutError, match=message) as error:
        explain(net, torch.randn(2, 3, 16, 24))
    assert "a tensor regression layer, or average pooling or flattening and nn.Linear" in str(error.value)


def test_enlarging_keeps_constants_and_places():
    torch.testing.assert_close(enlarge(torch.full((2, 3, 2), 1.5), (16, 18, 17)), torch.full((16, 18, 17), 1.5))
    grid = torch.zeros(4, 4)
    grid[1, 3] = -2.0
    large = enlarge(grid, (32, 16))
    assert find_peak(grid, (32, 16)) == (12, 14)
    assert large[12, 14] == large.min() < -1.5
    assert large[:4].abs().max() == 0


# Pictures.


def test_slices_are_the_right_way_up():
    volume, grid = torch.zeros(8, 12, 10), torch.zeros(2, 3, 2)
    volume[6, 10, 7] = 1  # right, front, top
    grid[1, 2, 1] = 5.0
    views = slice_volume(volume, grid, (1.0, 2.0, 3.0))
    assert [view.name.split(",")[0] for view in views] == ["axial", "coronal", "sagittal"]
    for view, shape, edges, pixel in zip(
        views, [(12, 8), (10, 8), (10, 12)], ["LRAP", "LRSI", "PASI"], [(2, 1), (3, 1), (3, 2)], strict=True
    ):
        assert (view.image.shape, view.overlay.shape, view.edges, view.pixel) == (shape, shape, edges, pixel)
        row, column = np.unravel_index(view.image.argmax(), shape)
        assert row < shape[0] / 2
        assert column >= shape[1] / 2
        assert view.cross == (row, column)
        assert view.overlay[view.cross] == view.overlay.max()


def test_slices_go_where_the_scan_is():
    volume, grid = torch.zeros(8, 8, 8), torch.zeros(2, 2, 2)
    volume[4:, :4, :4] = torch.rand(4, 4, 4) + 1
    grid[0, 1, 1], grid[1, 0, 0] = -9.0, 2.0  # the larger one is in the empty part
    assert slice_volume(volume, grid)[0].name == "axial, z = 2 of 8"


def read_png(path):
    """(rows, columns, 3) in 0 to 1."""
    from matplotlib.image import imread

    return imread(path)[..., :3]


def check_picture(path):
    """It is there, and in it are shades of grey, and red or blue."""
    pixels = read_png(path)
    assert min(pixels.shape[:2]) > 300
    assert len(np.unique(pixels[::5, ::5].reshape(-1, 3), axis=0)) > 100
    assert (np.abs(pixels[..., 0] - pixels[..., 2]) > 0.1).mean() > 0.01


@pytest.mark.parametrize("sign", [1, -1, 0])
def test_colours_say_what_raises_the_output(tmp_path, sign):
    grid = sign * torch.ones(3, 3)
    views = view_picture(torch.full((3, 30, 30), 128, dtype=torch.uint8), grid)
    path = tmp_path / "new" / "a.png"
    draw_explanation(path, views, grid, title="a$b_{c$", quantity="x_$", bias=1.0, output=1.0 + 9 * sign)
    pixels = read_png(path)
    pixels = pixels[:, : int(0.88 * pixels.shape[1])]  # without the scale
    red, blue = (pixels[..., 0] - pixels[..., 2] > 0.2).mean(), (pixels[..., 2] - pixels[..., 0] > 0.2).mean()
    assert (red > 0.2, blue > 0.2) == (sign > 0, sign < 0)
    assert [each.name for each in path.parent.iterdir()] == ["a.png"]


# The command.


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, ["predict", *map(str, arguments)])


def predict(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return result.output


def fail(*arguments):
    """The one sentence of a command that fails."""
    result = invoke(*arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith("Error: ")
    return line


def read_record(path):
    return json.loads(path.read_text(encoding="utf-8"))


def write_scan(path, volume, voxel=2.0):
    nibabel = pytest.importorskip("nibabel", reason="needs nibabel")
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(volume, np.diag([voxel, voxel, voxel, 1])), path)


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Twenty people; the brighter a box inside, the older."""
    root, random = tmp_path_factory.mktemp("scans"), np.random.default_rng(0)
    lines = ["participant_id\tage\theight"]
    for i in range(20):
        volume = random.normal(100, 10, (16, 18, 16)).astype(np.float32)
        volume[2:14, 3:9, 3:13] += 3 * (20 + 3 * i)
        write_scan(root / f"sub-{i:02d}_T1w.nii.gz", volume)
        lines.append(f"sub-{i:02d}\t{20 + 3 * i}\t{150 + i}")
    (root / "participants.tsv").write_text("\n".join(lines) + "\n")
    (root / "participants.json").write_text(json.dumps({"height": {"Units": "cm"}, "age": {"Description": "of life"}}))
    return root


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Six classes, each of its own colour: four pictures to train on and two to test on."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    root, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for part, n in (("train", 4), ("val", 2)):
        for k, colour in enumerate(itertools.islice(itertools.product((40, 200), repeat=3), 6)):
            (root / part / f"n{k}").mkdir(parents=True)
            for i in range(n):
                pixels = np.clip(colour + random.normal(0, 20, (24, 30, 3)), 0, 255).astype(np.uint8)
                image.fromarray(pixels).save(root / part / f"n{k}" / f"n{k}_{i}.JPEG")
    return root


SMALL = {"net__name": "resnet-mini", "run__epochs": 1}


@pytest.fixture(scope="module")
def trained(scans, pictures, tmp_path_factory):
    """A run by name, trained when it is asked for first."""
    base = tmp_path_factory.mktemp("runs")

    def train(name, **settings):
        folder = base / name
        if not folder.exists():
            run(folder, **SMALL, **settings)
        return folder

    def choose(name):
        if name.startswith("picture"):
            options = {"data__options__size": 16, "data__options__resize": 20, "data__options__validation": 0}
            head = name.removeprefix("picture-")
            options |= {"data__name": "imagefolder", "data__root": str(pictures), "run__batch": 8}
            return train(name, net__head=head, **options)
        target = ["age", "height"] if name == "two" else "age"
        head = "rtrl-tucker" if name == "two" else name
        options = {"data__name": "nifti", "data__root": str(scans), "data__options__target": target, "run__batch": 6}
        return train(name, net__head=head, **options)

    return choose


def first(folder, pattern):
    return min(folder.rglob(pattern))


@pytest.mark.parametrize("head", ["rtrl-cp", "rtrl-tucker", "rtrl-tt", "fc"])
def test_a_scan_gets_a_number_a_record_and_a_picture(scans, trained, tmp_path, head):
    folder, scan = trained(head), first(scans, "*.nii.gz")
    output = predict(scan, "--model", folder, "--out", tmp_path / "out")
    record = read_record(tmp_path / "out" / "sub-00_T1w.json")
    random = head != "fc"
    assert record["file"] == str(scan)
    assert (record["task"], record["mode"]) == ("regression", "exact" if random else "mean")
    assert record["model"]["run"] == str(folder)
    content = (folder / "model.safetensors").read_bytes()
    assert record["model"]["fingerprint"] == hashlib.sha256(content).hexdigest()[:16]
    assert (record["model"]["head"], record["unit"]) == (head, {"age": "years"})
    assert record["environment"]["torch"] == torch.__version__

    net = files.load(folder / "model.safetensors").eval()
    x = read_input(scan, net.input_shape, {})[None]
    expected = td.predict(net, x, mode="exact" if random else "mean", task="regression")
    age = record["prediction"]["age"]
    assert age == pytest.approx(float(expected.mean), rel=1e-6)
    if random:
        masks = record["masks_std"]["age"]
        assert masks == pytest.approx(float(expected.std), rel=1e-5)
        said = f"age {format_uncertain(age, masks)} years, no interval (masks {masks:.2g})"
        assert f"{scan}: {said}\n" in output
    else:
        assert record["masks_std"] is None
        assert f"{scan}: age {age:.4g} years, no interval\n" in output
    assert "No calibration: nobody measured how far off these are" in output
    assert "±" not in output
    assert (record["interval"], record["coverage"]) == (None, None)
    (explanation,) = record["explanation"]
    assert np.array(explanation["contributions"]).shape == net.feature_shape[1:]
    assert np.sum(explanation["contributions"]) + explanation["bias"] == pytest.approx(age, rel=1e-5)
    assert "2×3×2 positions of the last feature map" in explanation["caption"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["sub-00_T1w.json", explanation["picture"]]
    assert all(str(path) in output for path in (tmp_path / "out").iterdir())
    check_picture(tmp_path / "out" / explanation["picture"])


@pytest.mark.parametrize("head", ["rtrl-cp", "fc"])
def test_a_picture_gets_a_class_a_record_and_a_picture(pictures, trained, tmp_path, head):
    folder, file = trained(f"picture-{head}"), first(pictures / "val", "*.JPEG")
    output = predict(file, "--model", folder, "--out", tmp_path)
    record = read_record(tmp_path / "n0_0.json")
    with (folder / "predictions.csv").open() as stream:
        (expected,) = [row for row in csv.DictReader(stream) if row["name"] == "val/n0/n0_0.JPEG"]
    assert record["prediction"] == f"n{expected['predicted']}"
    assert record["probability"] == pytest.approx(float(expected["confidence"]), abs=1e-4)
    assert f"class {record['prediction']}, probability {record['probability']:.4g}" in output
    top = record["top"]
    assert len(top) == 5
    assert top[0] == {"class": record["prediction"], "probability": record["probability"]}
    assert [row["probability"] for row in top] == sorted((row["probability"] for row in top), reverse=True)
    (explanation,) = record["explanation"]
    assert explanation["output"] == record["prediction"]
    logit = np.sum(explanation["contributions"]) + explanation["bias"]
    assert logit == pytest.approx(explanation["value"], abs=1e-5)
    check_picture(tmp_path / "n0_0.png")


def test_several_targets_have_a_picture_each(scans, trained, tmp_path):
    output = predict(first(scans, "*.nii.gz"), "--model", trained("two"), "--out", tmp_path)
    record = read_record(tmp_path / "sub-00_T1w.json")
    assert record["unit"] == {"age": "years", "height": "cm"}
    assert list(record["masks_std"]) == ["age", "height"]
    assert output.count(" (masks ") == 2
    assert " cm, no interval (masks " in output
    for target, explanation in zip(("age", "height"), record["explanation"], strict=True):
        assert explanation["picture"] == f"sub-00_T1w-{target}.png"
        total = np.sum(explanation["contributions"]) + explanation["bias"]
        assert total == pytest.approx(record["prediction"][target], rel=1e-5)
        check_picture(tmp_path / explanation["picture"])


def test_many_files_have_a_table_too(scans, trained, tmp_path, monkeypatch):
    """In ./out/predict where nothing else is said, in the short form without --model, and with equal names."""
    monkeypatch.chdir(tmp_path)
    scan = first(scans, "*.nii.gz")
    for part in ("a", "b"):
        (tmp_path / "in" / part).mkdir(parents=True)
        shutil.copy(scan, tmp_path / "in" / part)
    (tmp_path / "in" / "notes.png").write_bytes(b"not for this network")
    output = predict(trained("rtrl-cp"), "in", scan)
    names = {path.name for path in (tmp_path / "out" / "predict").iterdir()}
    stems = ("sub-00_T1w", "sub-00_T1w-2", "sub-00_T1w-3")
    assert names == {"predictions.csv", *(f"{stem}.{kind}" for stem in stems for kind in ("json", "png"))}
    with (tmp_path / "out" / "predict" / "predictions.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["file"] for row in rows] == ["in/a/sub-00_T1w.nii.gz", "in/b/sub-00_T1w.nii.gz", str(scan)]
    assert list(rows[0]) == ["file", "record", "age", "age_masks"]
    for row, stem in zip(rows, stems, strict=True):
        record = read_record(tmp_path / "out" / "predict" / f"{stem}.json")
        assert record["file"] == row["file"]
        assert float(row["age"]) == record["prediction"]["age"]
    assert output.count(" (masks ") == 3
    assert "and 3 more in out/predict" in output


def test_a_table_alone_needs_no_matplotlib(scans, trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    scan, folder = first(scans, "*.nii.gz"), trained("rtrl-cp")
    predict(scan, "--model", folder, "-o", tmp_path / "ages.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["ages.csv"]
    predict(scan, "--model", folder, "-o", tmp_path / "out", "--no-picture")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sub-00_T1w.json"]
    assert read_record(tmp_path / "out" / "sub-00_T1w.json")["explanation"] is None
    line = fail(scan, "--model", folder, "-o", tmp_path / "other")
    assert "tensor-dropout[lab]" in line
    assert "--no-picture" in line
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("file", "parts"),
    [
        ("nowhere.nii.gz", ["there is no file"]),
        ("empty", ["no scans or pictures", ".nii.gz"]),
        ("text.nii.gz", ["text.nii.gz cannot be read"]),
        ("cut.nii.gz", ["cut.nii.gz cannot be read"]),
        ("picture.png", ["picture.png cannot be read"]),
        ("series.nii", ["(16, 18, 16, 3)", "one three-dimensional volume"]),
        ("small.nii", ["(9, 9, 9)", "(16, 18, 16)"]),
        ("nan.nii", ["1 voxels that are NaN"]),
        ("flat.nii", ["the same value in all voxels"]),
    ],
)
def test_files_that_cannot_be_predicted(scans, trained, tmp_path, file, parts):
    path, random = tmp_path / file, np.random.default_rng(0)
    volume = random.random((16, 18, 16)).astype(np.float32)
    if file == "empty":
        path.mkdir()
    elif file == "text.nii.gz":
        path.write_text("not a scan")
    elif file == "cut.nii.gz":
        path.write_bytes(first(scans, "*.nii.gz").read_bytes()[:2000])
    elif file == "picture.png":
        path.write_bytes(b"\x89PNG\r\n\x1a\n")
    elif file == "series.nii":
        write_scan(path, np.stack([volume] * 3, -1))
    elif file == "small.nii":
        write_scan(path, volume[:9, :9, :9])
    elif file == "nan.nii":
        volume[0, 0, 0] = np.nan
        write_scan(path, volume)
    elif file == "flat.nii":
        write_scan(path, np.ones_like(volume))
    line = fail(path, "--model", trained("rtrl-cp"), "-o", tmp_path / "out")
    assert [part for part in parts if part not in line] == [], line
    assert not (tmp_path / "out").exists()
    assert file in line


def test_a_scan_is_no_picture(scans, trained, tmp_path):
    scan = first(scans, "*.nii.gz")
    line = fail(scan, "--model", trained("picture-fc"), "-o", tmp_path / "out")
    assert "sub-00_T1w.nii.gz cannot be read" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "P"])
def test_pictures_of_any_number_of_channels(trained, tmp_path, mode):
    from PIL import Image

    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    Image.effect_noise((30, 24), 60).convert(mode).save(path)
    assert "class n" in predict(path, "--model", trained("picture-fc"), "-o", tmp_path / "out", "--no-picture")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("no run", "run.json"),
        ("not finished", "not the folder of a finished run: it has no result.json"),
        ("no model", "it has records, but no weights (model.safetensors)"),
        ("damaged model", "not a safetensors file"),
        ("damaged record", "is damaged"),
        ("digits", "this run was trained on digits"),
    ],
)
def test_runs_that_cannot_predict(scans, trained, tmp_path, change, part):
    folder = tmp_path / "run"
    if change == "no run":
        folder.mkdir()
    else:
        shutil.copytree(trained("rtrl-cp"), folder)
    if change == "not finished":
        (folder / "result.json").unlink()
    elif change == "no model":
        (folder / "model.safetensors").unlink()
    elif change == "damaged model":
        (folder / "model.safetensors").write_bytes(b"not a model")
    elif change == "damaged record":
        (folder / "run.json").write_text('{"settings": ')
    elif change == "digits":
        record = read_record(folder / "run.json")
        record["settings"]["data.name"] = "digits"
        (folder / "run.json").write_text(json.dumps(record))
    scan = first(scans, "*.nii.gz")
    for form in ([scan, "--model", folder], [folder, scan]):
        assert part in fail(*form, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_usage(scans, trained, tmp_path):
    scan, folder = first(scans, "*.nii.gz"), trained("rtrl-cp")
    for words in ([scan], [folder], [scan, scan], ["--model", folder]):
        assert invoke(*words).exit_code == 2
    (tmp_path / "file").touch()
    assert "--out is a folder or a .csv file" in fail(scan, "--model", folder, "-o", tmp_path / "file")


def test_what_was_written_before_a_bad_file_is_whole(scans, trained, tmp_path):
    scan, out = first(scans, "*.nii.gz"), tmp_path / "out"
    (tmp_path / "bad.nii").write_text("not a scan")
    result = invoke(scan, tmp_path / "bad.nii", "--model", trained("rtrl-cp"), "-o", out)
    assert result.exit_code == 1
    assert "Error: predict: 1 of 2 files could not be predicted: " in result.output.splitlines()[-1]
    assert sorted(path.name for path in out.iterdir()) == ["predictions.csv", "sub-00_T1w.json", "sub-00_T1w.png"]
    assert read_record(out / "sub-00_T1w.json")["prediction"]["age"] > 0


def find_units(root, table, targets):
    return ScanReader((1, 8, 8, 8), {"table": table}, root, {}).find_units(targets)


def test_units_are_those_that_are_stated(tmp_path):
    assert find_units(None, None, ["age"]) == {}
    assert find_units(str(tmp_path), None, ["age"]) == {}
    (tmp_path / "participants.tsv").touch()
    assert find_units(str(tmp_path), None, ["age", "iq"]) == {"age": "years"}
    assert find_units(str(tmp_path), "other.tsv", ["age"]) == {}
    for text in ("[", "[1]", '{"age": 3}', '{"age": {"Levels": {}}}'):
        (tmp_path / "participants.json").write_text(text)
        assert find_units(str(tmp_path), None, ["age"]) == {"age": "years"}
    (tmp_path / "participants.json").write_text('{"age": {"Units": "months"}, "iq": {"Units": "points"}}')
    assert find_units(str(tmp_path), None, ["age", "iq"]) == {"age": "months", "iq": "points"}
    assert find_units(str(tmp_path), None, ["iq"]) == {"iq": "points"}
