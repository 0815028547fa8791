"""``tensor-dropout fit`` on networks of timm and torchvision with a file of weights, and ``predict`` after it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import timm
import torchvision
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from tensor_dropout_lab import cli

N, SIDE = 12, 64
MAKERS = {
    "timm:resnet18": lambda: timm.create_model("resnet18"),
    "timm:vit_tiny_patch16_224": lambda: timm.create_model("vit_tiny_patch16_224"),
    "torchvision:mobilenet_v3_small": lambda: torchvision.models.mobilenet_v3_small(),
}


def invoke(*arguments):
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return result.output


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("spec", MAKERS)
def test_a_network_by_name_with_a_file_of_weights(spec, tmp_path):
    """SIMULATED pictures of a spot; the weights are random."""
    save_file(MAKERS[spec]().state_dict(), tmp_path / "weights.safetensors")
    random, lines = np.random.default_rng(0), ["file,x,y"]
    (tmp_path / "images").mkdir()
    for number in range(N):
        x, y = random.uniform(0.2, 0.8, 2)
        rows, columns = np.mgrid[:SIDE, :SIDE] / SIDE
        spot = np.exp(-((columns - x) ** 2 + (rows - y) ** 2) / 0.02)
        Image.fromarray(np.uint8(255 * spot)).save(tmp_path / "images" / f"{number}.png")
        lines.append(f"{number}.png,{x},{y}")
    (tmp_path / "spots.csv").write_text("\n".join(lines) + "\n")
    options = ["--backbone", spec, "--weights", tmp_path / "weights.safetensors", "--folds", "2", "--pool", "4"]
    places = ["--cache", tmp_path / "cache", "--out", tmp_path / "fit"]
    invoke("fit", "--images", tmp_path / "images", "--targets", tmp_path / "spots.csv", *options, *places)
    record = json.loads((tmp_path / "fit" / "fit.json").read_text())
    assert record["backbone"]["spec"] == spec
    assert record["maps"]["shape"][1:] == [4, 4]
    invoke("predict", tmp_path / "images" / "3.png", "--model", tmp_path / "fit", "-o", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().startswith("file,x,y,x_std,y_std")
