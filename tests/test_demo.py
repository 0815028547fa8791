"""``tensor-dropout demo``: the small problem, the picture, and what is said of both."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="needs scikit-learn: pip install -e '.[lab]'")
pytest.importorskip("matplotlib", reason="needs matplotlib: pip install -e '.[lab]'")

from PIL import Image
from typer.testing import CliRunner

from tensor_dropout_lab import cli
from tensor_dropout_lab.data.placed_digits import DIGIT, build_network, make_maps, place_digits
from tensor_dropout_lab.demo import DROPOUT, FLATTENED, HEADS, NAME, POOLED, Pictures


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The demo with 100 labels and two draws: what was printed, and its folder."""
    folder = tmp_path_factory.mktemp("demo") / "new"
    options = ["--labels", "100", "--seeds", "2", "--out", str(folder)]
    done = CliRunner().invoke(cli.app, ["demo", *options])
    assert done.exit_code == 0, done.output
    return done.stdout, folder


def test_heads_that_keep_positions_win_and_dropout_adds_to_it(small):
    record = json.loads((small[1] / f"{NAME}.json").read_text("utf-8"))
    errors = {name: np.array(record["errors"][name])[:, 0] for name in HEADS}
    assert record["labels"] == [100]
    assert (errors[POOLED] - errors[FLATTENED] > 2).all()  # pixels; for each draw
    assert (errors[FLATTENED] - errors[DROPOUT] > 0.7).all()
    assert "simulated" in record


def test_says_the_errors_of_its_record_and_where_the_picture_is(small):
    printed, folder = small
    record = json.loads((folder / f"{NAME}.json").read_text("utf-8"))
    sentence, where = printed.strip().splitlines()
    said = [float(number) for number in re.findall(r"(\d+\.\d)(?= pixels off|, | on pooled|\. )", sentence)]
    assert sorted(said) == sorted(round(float(np.mean(record["errors"][name])), 1) for name in HEADS)
    assert "simulated" in sentence
    assert where == f"Picture: {folder / NAME}.png"
    assert Image.open(folder / f"{NAME}.png").size[0] > 900
    assert sorted(path.name for path in folder.iterdir()) == [f"{NAME}.json", f"{NAME}.png"]  # no scraps


def test_the_panels_are_the_first_pictures_and_say_the_error_of_all():
    images, places = place_digits(12, seed=0)
    predicted = {FLATTENED: places + np.array([3, 4]), DROPOUT: places + np.array([0, 1])}
    pictures = Pictures(images[:, 0], places, predicted)
    assert pictures.measure(FLATTENED) == pytest.approx(np.full(12, 5))
    first, second = pictures.describe().splitlines()
    assert first == "The first 8 test pictures of the first draw, with their errors in pixels."
    assert second == "Mean of all 12 test pictures: flattened ridge 5.0; tensor head, dropout 1.0."


def test_the_whole_digit_is_where_it_is_said_to_be():
    images, places = place_digits(50, seed=3, n_pieces=0)
    for image, (top, left) in zip(images[:, 0], places.astype(int), strict=True):
        assert image[top : top + DIGIT, left : left + DIGIT].sum() == image.sum() > 0


def test_maps_are_those_of_the_network_in_feature_maps():
    from tensor_dropout.sklearn import FeatureMaps

    images, _ = place_digits(6, seed=1)
    maps, _ = make_maps(6, seed=1)
    assert np.allclose(FeatureMaps(build_network(), "4", verbose=False).transform(images), maps, atol=1e-6)


@pytest.mark.parametrize("options", [["--labels", "3"], ["--seeds", "1"]])
def test_too_little_is_refused_in_one_sentence(options, tmp_path):
    done = CliRunner().invoke(cli.app, ["demo", *options, "--out", str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "greater than or equal to" in done.stderr
    assert not (tmp_path / "none").exists()


def test_ctrl_c_ends_it_in_one_sentence_and_leaves_nothing(tmp_path):
    command = [sys.executable, "-m", "tensor_dropout_lab", "demo", "--seeds", "500", "--out", str(tmp_path / "none")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        try:
            time.sleep(6)  # past the imports: fits are running
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()  # it would run on for an hour
    assert process.returncode == 130
    assert (stdout, stderr.strip()) == ("", "demo: interrupted; nothing was written")
    assert not (tmp_path / "none").exists()
