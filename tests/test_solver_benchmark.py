"""The solvers of benchmarks/estimators minimize one objective, and its curves are read right. Nothing is timed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "estimators"))

import other_solvers
import solvers

import tensor_dropout as td

TINY = {
    "cp": (td.CPRegression, 4, td.TensorDropout(0.5)),
    "tucker": (td.TuckerRegression, (4, 2, 2, 3), td.TensorDropout(0.7, modes=(0,))),
    "tt": (td.TTRegression, (4, 4, 3), td.TensorDropout(0.7, modes=(1,))),
}
CELLS = [(head, name) for head in TINY for name in solvers.SOLVERS if head == "cp" or name not in solvers.CP_ONLY]


@pytest.fixture
def make_problem(monkeypatch):
    monkeypatch.setattr(solvers, "HEADS", TINY)
    x = 3 + 2 * torch.randn(30, 6, 3, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :5, 1, 1] + x[:, 1:, 0, 2]
    return lambda head: solvers.make_problem(head, x[:20], y[:20], x[20:], y[20:], 0)


def run(problem, name, steps=40):
    watch = other_solvers.Watch(problem, 60.0, steps)
    watch.run(solvers.SOLVERS[name])
    return watch


@pytest.mark.parametrize(("head", "name"), CELLS)
def test_a_solver_reports_the_objective_of_the_layer_that_it_fills(make_problem, head, name):
    problem = make_problem(head)
    watch = run(problem, name)
    objective = watch.points[-1][3]
    norms = sum(p.square().sum() for p in watch.layer.parameters()) - watch.layer.bias.square().sum()
    expected = td.expected_mse(watch.layer, problem.x, problem.y) + problem.alpha * norms
    assert objective == pytest.approx(expected.item(), rel=1e-4)
    assert objective < 0.9 * problem.objective(problem.draw()).item()
    assert watch.marks[-1]["objective"] == objective
    assert watch.marks[-1]["test_error"] == pytest.approx(problem.test_error(watch.layer))


@pytest.mark.parametrize("name", ["torch L-BFGS", "L-BFGS", "L-BFGS, turned"])
def test_solvers_that_search_all_parameters_begin_at_the_same_point(make_problem, name):
    problem = make_problem("cp")
    start = problem.objective(problem.draw()).item()
    assert run(problem, name, steps=1).points[0][3] == pytest.approx(start, rel=1e-4)


def test_a_cell_says_when_each_solver_came_near_the_best(make_problem):
    cell = {"head": "cp", "n": 20, "solvers": {}}
    curves = {"a": [(0.1, 2, 1, 2.0), (0.2, 4, 2, 1.0)], "b": [(0.1, 3, 1, 1.04)]}
    cell["solvers"] = {"a": {}, "b": {}}
    solvers.judge(cell, curves)
    assert cell["best"] == 1.0
    assert cell["solvers"]["a"]["reached"]["0.05"] == {"seconds": 0.2, "products": 4, "steps": 2}
    assert cell["solvers"]["b"]["reached"]["0.05"]["products"] == 3
    assert cell["solvers"]["b"]["reached"]["0.01"] is None
    assert cell["solvers"]["b"]["above_best"] == pytest.approx(0.04)


def test_test_images_come_from_groups_without_training_images():
    groups = np.repeat(np.arange(100), 9)
    train, test = solvers.split_groups(groups)
    assert len(test) == solvers.N_TEST
    assert not set(groups[train]) & set(groups[test])
    assert len(set(train) | set(test)) == len(train) + len(test) > 850
