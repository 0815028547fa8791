"""Features and fits in the background: what the worker computes, when, and how it ends. SIMULATED pictures."""

from __future__ import annotations

import os
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from multiprocessing import Pipe

import numpy as np
import pytest

import small_backbone
from label_project import CLIENT, SETTINGS, draw_spots, open_session, place
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.probe import fixed_input, pick_layer
from tensor_dropout.sklearn import FeatureMaps
from tensor_dropout_lab.fitted_head import open_fitted
from tensor_dropout_lab.labelling import fit_loop
from tensor_dropout_lab.labelling.fit_loop import FitLoop, NotReadyError
from tensor_dropout_lab.labelling.messages import (
    BadPicture,
    Failed,
    FeaturesDone,
    FitRequest,
    Fitted,
    HeadRequest,
    Task,
)
from tensor_dropout_lab.labelling.network_failures import explain
from tensor_dropout_lab.labelling.worker import Computer

N = 40


@pytest.fixture(scope="module")
def spots(tmp_path_factory):
    """A folder of pictures, and the places of the spots."""
    folder = tmp_path_factory.mktemp("spots")
    return folder, draw_spots(folder, N)


def make_task(folder, n=N, **changes):
    names = [f"{number}.png" for number in range(n)]
    settings = SETTINGS | changes
    return Task(folder, names, np.full((n, 2), 32.0), None, settings, folder / "cache")


def make_targets(places, rows):
    targets = np.full((len(places), 1, 2), np.nan)
    targets[rows, 0] = places[rows]
    return targets


@pytest.fixture(scope="module")
def computer(spots):
    return Computer(make_task(spots[0]))


# What it computes.


def test_labelled_pictures_have_their_features_first(computer, spots, tmp_path):
    folder, places = spots
    rows = np.arange(20, 36)
    *features, fitted = computer.fit(FitRequest(7, make_targets(places, rows)))
    assert features == [FeaturesDone(16)]
    assert isinstance(fitted, Fitted)
    assert (fitted.seq, fitted.record["labelled"]) == (7, 16)
    assert np.isnan(fitted.arrays["points"][:20]).all()
    chunk = computer.take_chunk()
    assert chunk == [*range(20), *range(36, 40)]
    assert computer.compute(chunk) == [FeaturesDone(N)]
    (fitted,) = computer.fit(FitRequest(8, make_targets(places, rows)))
    points = fitted.arrays["points"]
    assert points.shape == (N, 1, 2)
    errors = np.linalg.norm(points[:20, 0] - places[:20], axis=1)
    by_mean = np.linalg.norm(places[rows].mean(0) - places[:20], axis=1)
    assert errors.mean() < 0.9 * by_mean.mean()
    assert np.isneginf(fitted.arrays["gain"][rows]).all()
    check_head(computer, folder, tmp_path / "head")


def check_head(computer, pictures, folder):
    """The head is one that predict opens, and takes the maps that it says."""
    written = computer.write_head(HeadRequest(folder, ["spot"]))
    assert written.problem is None
    head = open_fitted(folder)
    assert (head.columns, head.points) == (["spot_x", "spot_y"], [(0, 1)])
    assert (head.record["seq"], head.record["images"]) == (8, 16)
    maps = head.feature_maps("small_backbone:build").transform([pictures / "30.png"])
    assert np.isfinite(head.estimator.predict(maps)).all()


def test_a_fit_that_is_not_possible_is_said(computer):
    (failed,) = computer.fit(FitRequest(1, np.full((N, 1, 2), np.nan)))
    assert isinstance(failed, Failed)
    assert failed.message
    assert not failed.for_good


def test_damaged_pictures_are_named_and_the_others_go_on(tmp_path):
    draw_spots(tmp_path, 4)
    content = (tmp_path / "1.png").read_bytes()
    (tmp_path / "1.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "2.png").unlink()
    (tmp_path / "2.png").symlink_to("/dev/null")
    computer = Computer(make_task(tmp_path, 4))
    bad, also_bad, done = computer.compute(computer.take_chunk())
    assert {bad.number, also_bad.number} == {1, 2}
    by_number = {each.number: each.problem for each in (bad, also_bad) if isinstance(each, BadPicture)}
    assert by_number[2] == "a link out of the folder"
    assert "truncated" in by_number[1]
    assert str(tmp_path) not in by_number[1]
    assert done == FeaturesDone(4)
    targets = make_targets(np.full((4, 2), 0.5), np.arange(4))
    targets[0] = 0.3
    (answer,) = computer.fit(FitRequest(1, targets))
    assert isinstance(answer, Fitted | Failed)


def test_early_maps_are_finer_than_those_of_the_first_stage(computer, spots):
    pytest.importorskip("efficientnet_lite_pytorch", reason="EfficientNet-Lite0 is not among the packages of the tests")
    assert computer.fine is None  # the small network has no finer maps
    large = Computer(make_task(spots[0], backbone="efficientnet-lite0", size=[64]))
    assert (large.maps.map_shape_, large.fine.map_shape_) == ((112, 4, 4), (24, 16, 16))
    assert large.compute([0, 1]) == [FeaturesDone(2)]


def test_the_layer_of_a_stride():
    network = small_backbone.build().eval()
    x = fixed_input(network, (3, 16, 16))
    assert pick_layer(network, x, 2, "test") == "1"
    assert pick_layer(network, x, 4, "test") == pick_layer(network, x, 64, "test") == "3"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert FeatureMaps(network).fit(np.zeros((1, 3, 16, 16), np.float32)).layer_ == "3"


# When it is asked, and how it ends.


@contextmanager
def looping(folder):
    """A session whose fits run, and the news of it."""
    news = []
    session = open_session(folder, news.append)
    fits = FitLoop(session, folder / "cache", say=lambda text: news.append({"type": "said", "text": text}))
    with closing(session), fits.running():
        yield session, fits, news


def wait_for(is_so, seconds=200):
    end = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < end, f"nothing within {seconds} seconds"
        time.sleep(0.02)
    return found


def test_a_worker_that_dies_is_started_again(tmp_path, monkeypatch):
    places = draw_spots(tmp_path, 8)
    monkeypatch.setattr(fit_loop, "RESTART_AFTER", 0.0)
    with looping(tmp_path) as (session, fits, news):
        session.rename(CLIENT, ["spot"])
        with pytest.raises(NotReadyError, match="5 labelled images are needed, and there are 0"):
            fits.fit_now()
        for image in range(4):
            session.act(CLIENT, [place(image, (0, *places[image].tolist()))])
            fits.note_labels()
        assert session.fit["state"] == "waiting"
        first = wait_for(lambda: fits.worker)
        os.kill(first.pid, signal.SIGKILL)
        wait_for(lambda: fits.worker is not first)
        assert [message["text"] for message in news if message["type"] == "said"] == [
            "Note: the process that fits has ended unexpectedly; it starts again in 0 seconds"
        ]
        session.act(CLIENT, [place(4, (0, *places[4].tolist()))])
        fits.note_labels()
        wait_for(lambda: session.suggestions is not None and session.features["done"] == 8)
        wait_for(lambda: not np.isnan(session.suggestions.points).any() and session.fit["state"] == "idle")
        assert session.suggestions.seq == 6
        assert fits.has_news
        assert fits.save_head() == tmp_path / "labels" / "head"
        assert not fits.has_news
        second = fits.worker
    assert not first.is_alive()
    assert not second.is_alive()
    assert session.rounds[0]["labelled"] == 5
    assert open_fitted(tmp_path / "labels" / "head").record["images"] == 5


def test_a_network_that_cannot_be_used_is_said_and_labels_go_on(tmp_path):
    draw_spots(tmp_path, 5)
    task = make_task(tmp_path, 5, backbone="small_backbone:build_for_volumes")
    with pytest.raises(TensorDropoutError, match="does not run on an input") as failed:
        Computer(task)
    why = explain(failed.value, task.settings)
    assert why.startswith("--backbone small_backbone:build_for_volumes does not run on pictures of 16 × 16 pixels; ")
    news = []
    session = open_session(tmp_path, news.append)
    fits = FitLoop(session, tmp_path / "cache", say=news.append, remembered=" (of the last start)")
    session.rename(CLIENT, ["spot"])
    session.act(CLIENT, [place(image, (0, 0.5, 0.5)) for image in range(5)])
    fits._connection, theirs = Pipe()
    theirs.send(Failed(why, for_good=True))
    assert fits._listen(fits._connection)  # it is not started again
    fits.note_labels()
    assert session.fit == {"state": "failed", "message": f"{why} (of the last start)"}
    assert f"There will be no suggestions: {why} (of the last start)" in news
    for ask in (fits.fit_now, fits.save_head):
        with pytest.raises(NotReadyError, match="does not run on pictures"):
            ask()
    assert not fits.has_news


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": [2]}, "does not run on pictures of 2 × 2 pixels; choose a larger --size, such as 224, or"),
        ({"layer": ["nolayer"]}, "--layer: Sequential has no layer 'nolayer'; there are 0, 1, 2, 3"),
        ({"backbone": "no_nets:build"}, "there is no module no_nets in the current folder, "),
        ({"backbone": "no.nets:build"}, "start label in the folder that no.py is in"),
        ({"backbone": "small_backbone:nothing"}, "has no attribute 'nothing'"),
    ],
)
def test_options_that_name_no_network_are_explained(spots, changes, said):
    task = make_task(spots[0], **changes)
    with pytest.raises(TensorDropoutError) as failed:
        Computer(task)
    assert said in explain(failed.value, task.settings)


def test_a_page_that_waits_for_the_head_is_let_go_at_the_end(tmp_path):
    draw_spots(tmp_path, 5)
    with closing(open_session(tmp_path)) as session, ThreadPoolExecutor(1) as pool:
        session.rename(CLIENT, ["spot"])
        session.act(CLIENT, [place(image, (0, 0.5, 0.5)) for image in range(5)])
        fits = FitLoop(session, tmp_path / "cache", say=print)
        fits._connection, _theirs = Pipe()  # where nobody answers
        with pytest.raises(NotReadyError, match="not written within 0 seconds"):
            fits.save_head(within=0.01)
        waiting = pool.submit(fits.save_head)
        wait_for(fits._saving.locked)
        wait_for(lambda: _theirs.poll())
        while not waiting.done():
            fits.stop_waiting()
            time.sleep(0.02)
        with pytest.raises(NotReadyError, match="the server ends"):
            waiting.result()
