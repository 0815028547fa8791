"""The benchmark of intervals: its data, what it measures, and its tables. Nothing is timed."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import intervals


def test_the_plan_has_its_cells():
    cells = intervals.list_cells()
    assert len(cells) == len(set(cells)) == 4 * 2 * 10 + 5
    assert {cell.split for cell in cells if cell.set == "ixi"} == set(range(5))


def test_shares_are_those_of_the_simulation():
    generator = torch.Generator().manual_seed(0)
    h = torch.rand(4000, 2, generator=generator, dtype=torch.float64) ** 3
    other = torch.rand(4000, 2, generator=generator, dtype=torch.float64)
    ones, noise = torch.ones_like(h), torch.tensor([2.0, 30.0], dtype=torch.float64)
    variance = noise * (0.3 * ones + 0.7 * h / h.mean(0))
    squares = variance * torch.randn(4000, 2, generator=generator, dtype=torch.float64).square()
    found = intervals.fit_shares(squares, [other, h, ones])
    parts = [
        float((weight * part.mean(0) / noise).mean()) for weight, part in zip(found, (other, h, ones), strict=True)
    ]
    assert parts == pytest.approx([0, 0.7, 0.3], abs=0.08)


def test_what_is_measured():
    target, mean = torch.tensor([[0.0], [1.0], [2.0], [9.0]]), torch.zeros(4, 1)
    ends = {0.5: (mean - 1, mean + 1), 0.9: (mean - 3, mean + 3)}
    assert intervals.measure_ends(ends, target) == {
        "tested": 4, "coverage_50": 0.5, "width_50": 2.0, "coverage_90": 0.75, "width_90": 6.0,
    }  # fmt: skip
    std = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    found = intervals.measure_std(mean, std, target)
    assert found["rank_correlation"] == pytest.approx(1)
    assert found["nll"] == pytest.approx(-float(torch.distributions.Normal(mean, std).log_prob(target).mean()))
    assert intervals.measure_std(mean, torch.ones(4, 1), target)["rank_correlation"] == 0


def test_a_scaled_std_has_the_mean_square_of_held_out_errors():
    errors, std = torch.tensor([[3.0], [-6.0]]), torch.tensor([[1.0], [2.0]])
    spread = intervals.Spread(errors, std, torch.arange(2), torch.zeros(1, 1), torch.ones(1, 1))
    assert spread.scaled().tolist() == [[3.0]]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Two cells of simulated data, smaller than the plan's."""
    path = tmp_path_factory.mktemp("intervals") / "record.jsonl"
    for split in range(2):
        cell = intervals.Cell("simulated", 40, split)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = intervals.run_cell(cell, intervals.simulate(cell, n_test=60))
        with path.open("a") as file:
            file.write(json.dumps({**vars(cell), **row}) + "\n")
    return path


def test_a_cell_has_every_method_but_the_ensemble(record):
    for row in intervals.read_record(record).values():
        methods = row["methods"]
        assert set(methods) == set(intervals.METHODS) - {"ensemble of five"}
        assert methods["masks alone"]["coverage_90"] < methods["constant"]["coverage_90"]
        for name, found in methods.items():
            assert found["tested"] == 60
            assert found["width_50"] < found["width_90"] <= found["width_95"]
            assert math.isfinite(found["nll"] if name != "cross" else 0)
        assert methods["constant"]["rank_correlation"] == 0


def test_the_tables_and_the_picture_are_those_of_the_record(record, tmp_path):
    found = intervals.read_record(record)
    covered = np.mean([row["methods"]["leverage"]["coverage_90"] for row in found.values()])
    assert f"simulated, n = 40: {100 * covered:.1f} % inside" in intervals.render("verdict", found)
    widths = intervals.render("widths", found)
    assert widths.splitlines()[0].count("|") == 3 + len(intervals.METHODS) - 2
    for part in intervals.PARTS:
        assert "simulated" in intervals.render(part, found)
    intervals.draw(found, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_folds_of_simulated_data_differ_and_repeat():
    first, again, other = (intervals.simulate(intervals.Cell("simulated", 20, k), n_test=5) for k in (0, 0, 1))
    assert np.array_equal(first.x, again.x)
    assert not np.array_equal(first.y, other.y)


def test_what_is_missing_is_said(tmp_path, capsys):
    for arguments, said in (
        (["--sets", "wings", "--features", str(tmp_path)], "no maps of wings"),
        (["--sets", "ixi"], "--sets ixi needs --scans FOLDER"),
        (["--report", "--record", str(tmp_path / "none.jsonl")], "has none of these cells"),
    ):
        with pytest.raises(SystemExit):
            intervals.main(arguments)
        assert said in capsys.readouterr().err
