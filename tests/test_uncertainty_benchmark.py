"""The benchmark of intervals beside those of others: scores, last layers, records and tables. Nothing is timed."""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "estimators"))

import intervals
from scipy.integrate import quad
from scipy.stats import norm
from sklearn.linear_model import QuantileRegressor, Ridge
from sklearn.metrics import mean_pinball_loss, roc_auc_score
from uncertainty import classes, command, images, last_layers, methods, running, scores, tables, timing

HERE = {name: importlib.util.find_spec(name) is not None for name in ("laplace", "vbll", "scoringrules")}
needs_laplace = pytest.mark.skipif(not HERE["laplace"], reason="laplace-torch is not installed")
needs_vbll = pytest.mark.skipif(not HERE["vbll"], reason="vbll is not installed")
needs_rules = pytest.mark.skipif(not HERE["scoringrules"], reason="scoringrules is not installed")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Scores.


@pytest.fixture
def predictions():
    mean, target = draw(40, 2), draw(40, 2, seed=1)
    return mean, draw(40, 2, seed=2).exp(), target


def test_nll_and_crps_are_those_of_the_normal_distribution(predictions):
    mean, std, target = predictions
    found = scores.score_std(mean, std, target)
    assert found["nll"] == pytest.approx(-norm.logpdf(target, mean, std).mean())

    def integrate(m, s, y):
        parts = (quad(norm(m, s).cdf, -50, y)[0] * 0, quad(lambda t: norm.cdf(t, m, s) ** 2, m - 12 * s - 1, y)[0])
        return sum(parts) + quad(lambda t: (1 - norm.cdf(t, m, s)) ** 2, y, max(m + 12 * s, y) + 1)[0]

    few = scores.score_std(mean[:4], std[:4], target[:4])["crps"]
    cells = zip(mean[:4].flatten(), std[:4].flatten(), target[:4].flatten(), strict=True)
    assert few == pytest.approx(np.mean([integrate(*map(float, cell)) for cell in cells]), abs=1e-6)


@needs_rules
def test_crps_is_that_of_scoringrules(predictions):
    import scoringrules

    mean, std, target = (part.numpy() for part in predictions)
    expected = scoringrules.crps_normal(target, mean, std).mean()
    assert scores.score_std(*predictions)["crps"] == pytest.approx(expected)


def test_how_well_a_std_tells_errors():
    target = torch.linspace(1, 10, 20, dtype=torch.float64)[:, None]
    zero = torch.zeros_like(target)
    good = scores.score_std(zero, target, target)
    assert good["rank_correlation"] == pytest.approx(1)
    assert good["large_errors"] == 1
    error = target[:, 0].numpy()
    assert good["risk_area"] == pytest.approx(np.mean(np.cumsum(error) / np.arange(1, 21)) / error.mean())
    nothing = scores.score_std(zero, torch.ones_like(target), target)
    assert (nothing["rank_correlation"], nothing["risk_area"], nothing["large_errors"]) == (0, pytest.approx(1), 0.5)


def test_large_errors_are_found_as_by_scikit_learn():
    error, size = (draw(50, seed=seed).abs().numpy() for seed in (3, 4))
    largest = error >= np.sort(error)[-5]
    assert scores.find_large(error, size) == pytest.approx(roc_auc_score(largest, size))


def test_pinball_is_that_of_scikit_learn():
    quantiles, target = draw(2, 30, 3), draw(30, 3, seed=1)
    expected = [mean_pinball_loss(target, each, alpha=a) for each, a in zip(quantiles, (0.05, 0.5), strict=True)]
    assert scores.pinball(quantiles, torch.tensor([0.05, 0.5]).double(), target) == pytest.approx(np.mean(expected))


def test_scores_of_classes():
    probs = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.2, 0.8]], dtype=torch.float64)
    target, unknown = torch.tensor([0, 1, 1]), torch.tensor([[0.5, 0.5], [0.65, 0.35]], dtype=torch.float64)
    found = scores.score_classes(probs, target, unknown)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["nll"] == pytest.approx(-np.log([0.7, 0.4, 0.8]).mean())
    assert found["ece"] == pytest.approx((0.3 + 0.6 + 0.2) / 3)
    assert found["risk_area"] == pytest.approx((0 + 0 + 1 / 3) / 3)
    assert found["unknown"] == pytest.approx(roc_auc_score([0, 0, 0, 1, 1], [0.3, 0.4, 0.2, 0.5, 0.35]))


def test_sets_that_are_filled():
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.95, 0.03, 0.02]])
    sets = classes.fill(probs, 0.7)
    assert sets.tolist() == [[True, True, False], [True, False, False]]
    assert scores.score_sets(sets, torch.tensor([2, 0]), 0.9) == {"set_size_90": 1.5, "set_coverage_90": 0.5}


def test_probabilities_are_averaged():
    logits = [draw(4, 3, seed=seed) for seed in range(3)]
    mean = torch.stack([each.softmax(-1) for each in logits]).mean(0)
    assert torch.allclose(classes.average(logits).exp(), mean)


# Last layers.


def test_ridge_is_that_of_scikit_learn():
    z, y = draw(30, 5), draw(30, 2, seed=1)
    expected = Ridge(alpha=30 * 0.1, fit_intercept=False).fit(z, y).coef_.T
    assert np.allclose(last_layers.solve_ridge(z, y, 0.1), expected)


def test_quantiles_have_the_loss_of_scikit_learn():
    z, y = draw(60, 3), draw(60, 1, seed=1) + draw(60, 3)[:, :1]
    wide, levels = torch.cat([torch.ones(60, 1).double(), z], 1), torch.tensor([0.05, 0.5]).double()
    found = last_layers.solve_quantiles(wide, y, levels, 0.0, 3000)
    for level, coefficients in zip(levels, found, strict=True):
        model = QuantileRegressor(quantile=float(level), alpha=0).fit(z, y[:, 0])
        best = mean_pinball_loss(y[:, 0], model.predict(z), alpha=float(level))
        assert mean_pinball_loss(y[:, 0], (wide @ coefficients)[:, 0], alpha=float(level)) == pytest.approx(best, 1e-3)


def test_quantiles_do_not_cross():
    found = last_layers.fit_quantiles(draw(30, 4), draw(30, 2, seed=1), draw(7, 4, seed=2), 0.1, steps=50)
    assert found.quantiles.shape == (7, 7, 2)
    assert bool((found.quantiles.diff(dim=0) >= 0).all())
    assert torch.equal(found.mean, found.quantiles[3])


@needs_laplace
def test_laplace_of_one_output_is_that_of_several_and_the_closed_form():
    z, y, new = draw(40, 4), draw(40, 3, seed=1), draw(6, 4, seed=2)
    z, weight = z - z.mean(0), draw(4, 3, seed=3)
    settings = {"sigma_noise": 0.5, "prior_precision": 2.0}
    for structure in ("full", "kron", "diag"):
        found = [
            last_layers.make_laplace(
                last_layers.linear_model(weight[:, :n]), "regression", structure, z, y[:, :n], **settings
            )(new)[1].diagonal(dim1=1, dim2=2)
            for n in (3, 1)
        ]
        assert torch.allclose(found[0], found[1].expand(6, 3))
        if structure == "full":
            precision = z.mT @ z / 0.25 + 2 * torch.eye(4).double()
            expected = (new @ torch.linalg.inv(precision) * new).sum(1) + 1 / (40 / 0.25 + 2)  # and that of the bias
            assert torch.allclose(found[1][:, 0], expected)


@needs_laplace
def test_laplace_chooses_a_noise_near_the_true_one():
    z = draw(400, 3)
    y = z @ draw(3, 2, seed=1) + 0.3 * draw(400, 2, seed=2)
    found = last_layers.fit_laplace(z, y, draw(5, 3, seed=3), 1e-6)
    assert set(found) == {"full", "kron", "diag"}
    assert float(found["full"].noise.mean().sqrt()) == pytest.approx(0.3, rel=0.1)


@needs_vbll
def test_the_loss_of_each_output_is_that_of_vbll_with_it_alone():
    from vbll.layers.regression import Regression

    z, y = draw(9, 4).float(), draw(9, 2, seed=1).float()
    both = Regression(4, 2, 0.1, parameterization="diagonal")
    own = last_layers.output_losses(both, z, y)
    for k in range(2):
        one = Regression(4, 1, 0.1, parameterization="diagonal")
        with torch.no_grad():
            for name in ("W_mean", "W_logdiag", "noise_logdiag"):
                getattr(one, name).copy_(getattr(both, name)[k : k + 1])
        assert float(own[k]) == pytest.approx(float(one(z).train_loss_fn(y[:, k : k + 1])), rel=1e-5)


@needs_vbll
def test_vbll_finds_a_line():
    z, new = draw(200, 3), draw(50, 3, seed=4)
    weight = draw(3, 2, seed=1)
    found = last_layers.fit_vbll(z, z @ weight + 0.3 * draw(200, 2, seed=2), new, 1.0, 50)
    assert float((found.mean - new @ weight).square().mean()) < 0.05
    assert float(found.noise.mean().sqrt()) == pytest.approx(0.3, rel=0.3)


def test_maps_keep_their_inner_products():
    x, new = draw(6, 2, 3, 3), draw(4, 2, 3, 3, seed=1)
    flat, flat_new = methods.span_maps(x, new)
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    rows, rows_new = (((part - mean) / std).flatten(1) for part in (x, new))
    rows, rows_new = rows - rows.mean(0), rows_new - rows.mean(0)
    unit = (rows_new @ rows.mT) / (flat_new @ flat.mT)
    assert torch.allclose(unit, unit[0, 0].expand_as(unit))
    assert float(flat.square().mean()) == pytest.approx(1)
    axes = last_layers.turn(rows)
    assert torch.allclose(axes.mT @ (rows.mT @ rows) @ axes, torch.diag((rows @ axes).square().sum(0)), atol=1e-9)


# Cells.


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The quick mode with fewer settings: a cell of simulated data."""
    folder = tmp_path_factory.mktemp("uncertainty")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(methods, "ALPHAS", (16.0,))
        patch.setattr(methods, "WEIGHTS", ((1.0, 50),))
        patch.setattr(methods, "SETTINGS", ((methods.HEAD, 1.0), (methods.MAPS, 1.0)))
        assert command.main(["--quick", "--out", str(folder)]) == 0
    return folder / running.RECORD.name


def test_the_quick_mode_has_every_method_it_can(record):
    left_out = {methods.ENSEMBLE}
    if not running.have_others():
        left_out |= {*methods.LAPLACE.values(), methods.VBLL}
    for row in running.read_record(record).values():
        assert set(methods.METHODS) - left_out <= set(row["methods"])
        for name, found in row["methods"].items():
            assert 0.6 < found["calibrated"]["coverage_90"] <= 1, name
            assert ("raw" in found) == (name not in (methods.OURS, methods.CONSTANT, methods.LAST))
        assert row["methods"][methods.MASKS]["raw"]["coverage_90"] < 0.8


def test_ours_is_what_the_library_gives(record):
    cell = running.QUICK
    data = intervals.simulate(intervals.Cell(*vars(cell).values()), n_test=60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = intervals.run_cell(intervals.Cell("simulated", 40, 0), data)["methods"]["leverage"]
    found = running.read_record(record)[cell]["methods"][methods.OURS]["calibrated"]
    for key in ("coverage_90", "width_90", "nll", "crps", "rank_correlation"):
        assert found[key] == pytest.approx(row[key], rel=1e-4), key


def test_the_tables_are_those_of_the_record(record):
    (row,) = running.read_record(record).values()
    rows = {running.Cell("simulated", 40, split): row for split in range(2)}
    for part in tables.PARTS:
        table = tables.render_rows(part, rows)
        assert ("simulated, n = 40 (2 splits)" in table) or part == "verdict"
    if HERE["laplace"]:
        full, kron = (row["methods"][methods.LAPLACE[kind]]["calibrated"] for kind in ("full", "kron"))
        assert full == pytest.approx(kron, rel=1e-3)  # one row stands for both
        assert "Laplace, full and Kronecker" in tables.render_rows("nll", rows)
    lines = tables.render_rows("verdict", rows).splitlines()
    assert all(sum(map(int, cell.split("/"))) == 1 for cell in lines[2].split("|")[2:-1])


def test_signs_of_verdicts():
    assert tables.judge([-1.0, -1.1, -0.9], -1) == "better"
    assert tables.judge([-1.0, -1.1, -0.9], 1) == "worse"
    assert tables.judge([-1.0, 1.1, 0.1], 1) == "level"
    assert tables.write_mean([1.0, 1.1, 0.9], 1, sign=True, bold=True) == "**+1.0 [+0.8, +1.2]**"


def test_the_plan_has_its_cells():
    cells = running.list_cells()
    assert len(cells) == len(set(cells)) == 3 * 10 + 3 * 5 + 5 + 5
    assert len(running.list_cells(["wings", "cifar100"], [100])) == 15


# Classes.


def test_no_image_is_dealt_twice():
    labels = np.repeat(np.arange(4), 60)
    rows = images.deal(labels, 10, seed=1)
    assert rows.shape == (images.DRAWS, 4, 10)
    assert len(np.unique(rows)) == rows.size
    assert all((labels[rows[:, k]] == k).all() for k in range(4))
    known, unknown = images.choose_known(3)
    assert (len(known), len(unknown)) == (80, 20)
    assert not set(known) & set(unknown)


@pytest.mark.skipif(not running.have_others(), reason="laplace-torch or vbll is not installed")
def test_a_draw_of_classes_has_every_method():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(6, 8, 1, 1))

    def make(each):
        return (centers[:, None] + rng.normal(size=(6, each, 8, 2, 2))).astype(np.float32)

    data = images.split_draw(make(12), make(6), np.arange(4), np.arange(4, 6))
    assert (data.x.shape, data.x_unknown.shape) == ((28, 8, 2, 2), (12, 8, 2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = classes.run_classes(data)
    assert set(row["methods"]) == set(classes.METHODS)
    cell = running.Cell(running.CIFAR, 20, 0)
    two = {cell: row, running.Cell(running.CIFAR, 20, 1): row}
    for part in tables.CLASS_PARTS:
        assert "linear head" in tables.render_rows(part, two)


@needs_laplace
@pytest.mark.parametrize("structure", classes.LAPLACE)
def test_probabilities_are_those_of_laplace_torch(structure):
    x, y, layer = draw(40, 5).float(), torch.arange(40) % 3, torch.nn.Linear(5, 3)
    model = torch.nn.Sequential(torch.nn.Identity(), layer)
    found = last_layers.make_laplace(model, "classification", structure, x, y, 16, prior_precision=2.0)
    new = draw(7, 5, seed=1).float()
    probs = classes.probit(layer(new), classes.output_variance(found, structure, new))
    assert torch.allclose(probs, found(new), atol=1e-5)


# Time.


@pytest.mark.parametrize("method", [name for name in timing.METHODS if not name.startswith(("Laplace", "VBLL"))])
def test_a_pass_gives_the_ends_of_intervals(method):
    torch.manual_seed(0)
    with torch.no_grad():
        low, high = timing.METHODS[method](3)(torch.randn(2, *timing.SHAPE))
    assert low.shape == high.shape == (2, 3)
    assert bool((low < high).all())


def test_what_is_stopped_is_said(tmp_path):
    rows = {str(outputs): {"seconds": 0.00123} for outputs in timing.OUTPUTS} | {"10000": {"stopped": "memory"}}
    (tmp_path / timing.RECORD.parent).mkdir(parents=True)
    (tmp_path / timing.RECORD).write_text(json.dumps({"methods": {"slow": rows}}))
    table = tables.render("time", tmp_path)
    assert "| slow | 1.23 | 1.23 | 1.23 | 1.23 | stopped: memory |" in table
