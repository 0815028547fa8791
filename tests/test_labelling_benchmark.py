"""The benchmark of labelling: the simulated annotator, its cells, its tables. Nothing is timed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from labelling import command, data, loop, running, tables

from tensor_dropout_lab.labelling.cross_fit import Settings


def test_the_plan_has_its_cells():
    cells = running.list_cells()
    assert len(cells) == len(set(cells)) == 3 * 5 * 5 + 3 * 3 * 5 * 2 + 3 * 5 + 2 * 3 * 3 + 3
    assert [cell.run for cell in cells if cell.part == "loop"] == sorted([0, 1, 2, 3, 4] * 15)


def test_the_simulated_annotator_drags_what_is_off_and_accepts_the_rest_with_one_click():
    truth = np.array([[0.1, 0.1], [0.5, 0.5], [0.9, 0.9]])
    for off, clicks in (((0, 0, 0), 1), ((0.05, 0, 0), 2), ((0.05, 0.05, 0), 3), ((0.05, 0.05, 0.05), 3)):
        suggestion = truth + 0.005
        suggestion[:, 0] += off
        done = loop.annotate(truth, suggestion, 0.01)
        assert done.clicks == clicks
        for point, moved in enumerate(off):  # what is accepted stays where it was suggested
            assert np.array_equal(done.label[point], (truth if moved else suggestion)[point])
    by_hand = loop.annotate(truth, np.full((3, 2), np.nan), 0.01)
    assert (by_hand.clicks, by_hand.label.tolist()) == (3, truth.tolist())


def test_ridge_is_chosen_and_held_out_on_the_same_folds():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, 4, 4, generator=generator)
    y = torch.stack([x[:, 0].mean((1, 2)), x[:, 1, 0, 0], x[:, 2, 1, 1], x[:, 2, 3, 3]], 1)
    folds = np.arange(40) % 5
    fitted = loop.cross_fit_ridge(x, y, folds, Settings(), 0)
    assert bool(fitted.held.isfinite().all())
    with torch.no_grad():
        seen = float((fitted.module(x) - y).square().mean())
    held = float((fitted.held - y).square().mean())
    assert seen < held < float(y.var(0).mean())


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The quick cells, and ridge beside them."""
    folder = tmp_path_factory.mktemp("labelling")
    cells = [running.Cell("loop", data.SIMULATED, method, 12, 0) for method in (loop.BY_GAIN, loop.RIDGE_ALONE)]
    path, threads = folder / "labelling.jsonl", torch.get_num_threads()
    torch.set_num_threads(1)
    rows = [running.run_cell(cell, folder, folder) for cell in cells]
    path.write_text("".join(json.dumps({**vars(c), **row}) + "\n" for c, row in zip(cells, rows, strict=True)))
    assert command.main(["--quick", "--out", str(folder)]) == 0
    torch.set_num_threads(threads)
    return path


def test_every_image_is_labelled_once_and_every_click_is_counted(record):
    for cell, row in running.read_record(record).items():
        if cell.part == "loop":
            assert len(row["per_image"]) == cell.n
            assert sum(row["per_image"]) == row["clicks"] <= row["by_hand"] == 4 * cell.n
            assert row["per_image"][:5] == [4] * 5  # there are no suggestions yet
            assert min(row["per_image"]) >= 1
            assert [fit[0] for fit in row["fits"]] == [n for n in loop.SCHEDULE if n < cell.n]
            assert row["label_error"] <= 100 * data.TOLERANCES[data.SIMULATED]


def test_a_second_look_saves_clicks_on_simulated_pictures(record):
    found = running.read_record(record)
    clicks = {cell.method: row["clicks"] / row["by_hand"] for cell, row in found.items() if cell.part == "loop"}
    assert clicks[loop.OURS] < 0.8 * clicks[loop.ALONE]
    stage = next(row for cell, row in found.items() if cell.part == "stage")
    assert stage["second"]["mean"] < 0.5 * stage["first"]["mean"]
    assert stage["tested"] == 300


def test_tables_and_the_picture_are_those_of_the_record(record, tmp_path):
    found = running.read_record(record)
    row = next(row for cell, row in found.items() if (cell.part, cell.method) == ("loop", loop.OURS))
    assert f"| {100 * row['clicks'] / row['by_hand']:.1f} |" in tables.render("clicks", found)
    for part in tables.TABLES:
        assert data.SIMULATED in tables.render(part, found) or part in ("verdict", "slips", "speed")
    tables.draw(found, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_bar_is_met_by_the_mean():
    rows = {
        running.Cell("loop", name, loop.OURS, 300, run): {"clicks": clicks, "by_hand": 100}
        for name, both in (("wings", (30, 50)), ("faces", (60, 72)))
        for run, clicks in enumerate(both)
    }
    wings, faces = tables.render("verdict", rows).splitlines()
    assert wings.startswith("- met: fly wings: 40.0 [")
    assert faces.startswith("- **missed**: faces: 66.0 [")


def test_slips_are_counted():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = loop.run_slips(data.simulate(40, 0), 40, data.SIMULATED, 0)
    torch.set_num_threads(threads)
    assert (found["slips"], found["good"]) == (5, 35)
    assert found["found"] >= 3


def test_what_is_missing_is_said(tmp_path, capsys):
    for arguments, said in (
        (["--sets", "wings", "--features", str(tmp_path)], "block10.npy"),
        (["--report", "--record", str(tmp_path / "none.jsonl")], "has none of these cells"),
    ):
        with pytest.raises(SystemExit):
            command.main(arguments)
        assert said in capsys.readouterr().err


def test_development_and_record_share_no_group(tmp_path):
    folder = tmp_path / "faces"
    folder.mkdir()
    groups = np.array([f"person {k % 40}" for k in range(200)])
    np.save(folder / "groups.npy", groups)
    seen, kept = data.split_set(tmp_path, "faces")
    assert len(seen) == 50
    assert len(kept) == 150
    assert not set(groups[seen]) & set(groups[kept])
