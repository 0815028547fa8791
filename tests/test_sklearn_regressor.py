"""TensorRegressor: shapes, dtypes, what the fitted layer is, weights, missing targets, intervals, bad input."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import tensor_dropout as td
from estimators_under_test import SMALL, assert_one_sentence, fit_quietly, make_data, relative, spoil
from tensor_dropout.fitting import fit as fit_module
from tensor_dropout.fitting.statistics import StoredBlocks
from tensor_dropout.progress import Advance
from tensor_dropout.sklearn import TensorRegressor, TensorRegressorCV, base
from tensor_dropout.sklearn.base import MoveChannels

SHAPES = [(7,), (6, 5), (5, 3, 4), (4, 2, 3, 3)]

# Shapes and dtypes.


@pytest.mark.parametrize("outputs", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_predictions_are_shaped_like_y_and_are_those_of_the_layer(shape, outputs):
    X, y = make_data(shape, outputs)
    model = fit_quietly(TensorRegressor(**SMALL), X, y)
    predicted = model.predict(X)
    assert predicted.shape == y.shape
    assert predicted.dtype == np.float32
    with torch.no_grad():
        from_layer = model.layer_(torch.from_numpy(X))
    assert np.array_equal(from_layer.numpy().reshape(y.shape), predicted)
    assert (model.input_shape_, model.n_features_in_) == (shape, shape[0])
    assert model.score(X, y) > 0.5


@pytest.mark.parametrize("factorization", ["cp", "tucker", "tt", "ring"])
def test_every_format_is_fitted_and_named(factorization):
    X, y = make_data()
    model = fit_quietly(TensorRegressor(factorization, max_iter=40, tol=1e-2, random_state=0), X, y)
    assert model.method_ == factorization
    assert type(model.layer_).__name__.lower().startswith({"ring": "tensorring"}.get(factorization, factorization))
    assert model.score(X, y) > 0.8


@pytest.mark.parametrize("outputs", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((7,), 1), ((5, 3, 4), 1), ((5, 3, 4), -1), ((5, 3, 4), 2)], ids=str)
def test_coef_and_intercept_make_the_prediction(shape, axis, outputs):
    X, y = make_data(shape, outputs, dtype=np.float64)
    model = fit_quietly(TensorRegressor(channel_axis=axis, **SMALL), X, y)
    assert model.coef_.shape == shape + outputs
    assert model.intercept_.shape == outputs
    assert np.allclose(np.tensordot(X, model.coef_, len(shape)) + model.intercept_, model.predict(X))


def as_memory_map(X, folder):
    path = folder / "x.npy"
    np.save(path, X)
    return np.load(path, mmap_mode="r")


KINDS = {
    "float64": (lambda X, folder: X.astype(np.float64), 0.02),
    "float16": (lambda X, folder: X.astype(np.float16), 0.05),
    "memory-mapped float16": (lambda X, folder: as_memory_map(X.astype(np.float16), folder), 0.05),
    "big-endian": (lambda X, folder: X.astype(">f4"), 0.02),
    "reversed view": (lambda X, folder: X[::-1].copy()[::-1], 0.02),
    "nested lists": (lambda X, folder: X.tolist(), 0.02),
    "torch float32": (lambda X, folder: torch.from_numpy(X), 0.02),
    "torch bfloat16": (lambda X, folder: torch.from_numpy(X).bfloat16(), 0.2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_features_of_any_kind_give_the_same_predictions(kind, tmp_path):
    X, y = make_data(outputs=(2,))
    convert, tolerance = KINDS[kind]
    settings = {**SMALL, "rank": "auto"}
    expected = fit_quietly(TensorRegressor(**settings), X, y).predict(X)
    given = convert(X, tmp_path)
    predicted = fit_quietly(TensorRegressor(**settings), given, y).predict(given)
    assert isinstance(predicted, torch.Tensor) == isinstance(given, torch.Tensor)
    assert relative(predicted, expected) < tolerance


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("how", ["asked for", "because memory is short"])
def test_in_batches_from_a_file_it_is_the_same_fit(how, axis, monkeypatch, tmp_path):
    X, y = make_data((5, 3, 4), n=40)
    X = X.astype(np.float16)
    settings = {**SMALL, "channel_axis": axis, "max_iter": 15}
    expected = fit_quietly(TensorRegressor(**settings), X, y)
    batch_sizes = []

    def record(x, batch_size, dtype):
        batch_sizes.append(batch_size)
        return StoredBlocks(x, batch_size, dtype)

    monkeypatch.setattr(fit_module, "StoredBlocks", record)
    if how == "asked for":
        settings["batch_size"] = 6
    else:
        monkeypatch.setattr(base, "quarter_of_memory", lambda: 4 * X.size - 1)
        monkeypatch.setattr(base, "BATCH", 6 * X[0].size)
    model = fit_quietly(TensorRegressor(**settings), as_memory_map(X, tmp_path), y)
    assert batch_sizes == [6]
    assert relative(model.predict(X), expected.predict(X)) < 0.01
    assert model.loss_curve_ == pytest.approx(expected.loss_curve_, rel=1e-3)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.uint32, bool])
def test_whole_numbers_are_features_and_targets_too(dtype):
    rng = np.random.default_rng(0)
    X = rng.integers(0, 2 if dtype is bool else 100, (40, 5, 4)).astype(dtype)
    y = X[:, 0].sum(1).astype(np.int64)
    model = fit_quietly(TensorRegressor(**SMALL), X, y)
    assert model.score(X, y) > 0.8


def test_targets_may_be_a_torch_tensor():
    X, y = make_data()
    expected = fit_quietly(TensorRegressor(**SMALL), X, y)
    model = fit_quietly(TensorRegressor(**SMALL), torch.from_numpy(X), torch.from_numpy(y))
    assert np.array_equal(expected.predict(X), model.predict(X))
    assert model.score(torch.from_numpy(X), torch.from_numpy(y)) == expected.score(X, y)


@pytest.mark.parametrize("solver", ["auto", "lbfgs"])
@pytest.mark.parametrize("X_dtype", [np.float32, np.float64])
@pytest.mark.parametrize("y_dtype", [np.float16, np.float32, np.float64])
def test_dtypes_of_features_and_targets_mix(X_dtype, y_dtype, solver):
    X, y = make_data((6, 4), dtype=X_dtype)
    model = fit_quietly(TensorRegressor(solver=solver, **SMALL), X, y.astype(y_dtype))
    assert model.predict(X).dtype == X_dtype
    assert model.score(X, y) > 0.5


def r2(y, predicted):
    """Of each output."""
    return 1 - ((predicted - y) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)


@pytest.mark.parametrize("factorization", ["cp", "tucker", "tt", "ring"])
def test_outputs_of_several_modes_may_have_scales_of_their_own(factorization):
    X, y = make_data((6, 4), (2, 2), n=80)
    y = y * np.array([1.0, 1e4], np.float32)[:, None] * np.array([1e-2, 1.0], np.float32)
    model = fit_quietly(TensorRegressor(factorization, theta=1, random_state=0), X, y)
    assert r2(y, model.predict(X)).min() > 0.9


def test_outputs_of_several_modes_whose_scales_are_no_product_are_named():
    X, y = make_data((6, 4), (2, 2), n=80)
    with pytest.warns(UserWarning, match=r"y\[:, 0, 0\] .*reshape y to \(n, 4\)"):
        fit_quietly(TensorRegressor(**SMALL), X, y * np.array([[1e-4, 1.0], [1.0, 1e-4]], np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit_quietly(TensorRegressor(**SMALL), X, y * np.array([[0.0, 1.0], [0.1, 1.0]], np.float32))


def test_a_small_output_beside_a_large_mean_is_fitted():
    X, _ = make_data((6, 4), n=60, dtype=np.float64)
    y = np.stack([1e-6 * X[:, 3].sum(1), 1e7 * (X[:, 0, 0] + 1)], 1)
    model = fit_quietly(TensorRegressor(theta=1, alpha=1e-3, **SMALL), X, y)
    assert r2(y, model.predict(X)).min() > 0.9


@pytest.mark.parametrize("outputs", [(), (2,)], ids=str)
def test_features_of_a_table_may_have_units_of_their_own(outputs):
    X, y = make_data((6,), outputs, n=60)
    settings = {**SMALL, "rank": 2}
    usual = fit_quietly(TensorRegressor(**settings), X, y)
    mixed = X * np.array([1e3, 1, 1, 1e3, 1e-6, 1e3], np.float32)
    model = fit_quietly(TensorRegressor(**settings), mixed, y)
    assert relative(model.predict(mixed), usual.predict(X)) < 1e-3
    scores = [TensorRegressorCV(thetas=(1,), cv=3, random_state=0).fit(each, y).best_score_ for each in (X, mixed)]
    assert scores[1] == pytest.approx(scores[0], abs=1e-3)


@pytest.mark.parametrize("shape", [(6, 4), (6,)], ids=str)
def test_a_large_mean_leaves_the_features_precise(shape):
    X, y = make_data(shape, (2,), n=60, dtype=np.float64)
    settings = {**SMALL, "theta": 1, "rank": 2}
    expected = fit_quietly(TensorRegressor(**settings), X, y).predict(X)
    far = X + 2.0**31
    assert relative(fit_quietly(TensorRegressor(**settings), far, y).predict(far), expected) < 0.02


@pytest.mark.parametrize("shape", [(6, 4), (6,)], ids=str)
def test_targets_beside_a_large_offset_are_centred_before_they_are_rounded(shape):
    """Float32 features: what is predicted has the precision of float32, the weight that is found has not."""
    X, y = make_data(shape, (), n=60)
    given = y.astype(np.float64) + 1e8
    settings = {**SMALL, "theta": 1}
    expected = fit_quietly(TensorRegressor(**settings), X, y)
    assert relative(fit_quietly(TensorRegressor(**settings), X, given).coef_, expected.coef_) < 1e-3


# The layer.


def test_channels_may_be_anywhere():
    X, y = make_data((5, 3, 4))
    first = fit_quietly(TensorRegressor(**SMALL), X, y)
    for axis, moved in ((-1, np.moveaxis(X, 1, -1)), (3, np.moveaxis(X, 1, 3)), (2, np.moveaxis(X, 1, 2))):
        model = fit_quietly(TensorRegressor(channel_axis=axis, **SMALL), moved, y)
        assert np.array_equal(model.predict(moved), first.predict(X))
        assert np.array_equal(np.moveaxis(model.coef_, axis % X.ndim - 1, 0), first.coef_)
        assert isinstance(model.layer_[0], MoveChannels)


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("factorization", ["cp", "tucker", "tt"])
def test_the_layer_merges_into_plain_torch(factorization, axis):
    X, y = make_data((5, 3, 4), (2, 2), dtype=np.float64)
    model = fit_quietly(TensorRegressor(factorization, channel_axis=axis, max_iter=30, tol=1e-2, random_state=0), X, y)
    network = torch.nn.Sequential(model.layer_)
    before = model.predict(X)
    td.merge_(network)
    assert not any(
        isinstance(module, td.CPRegression | td.TuckerRegression | td.TTRegression) for module in network.modules()
    )
    with torch.no_grad():
        assert np.allclose(network(torch.from_numpy(X)).numpy(), before, atol=1e-8 * np.abs(before).max())


def test_a_layer_that_was_trained_elsewhere_becomes_an_estimator():
    X, _ = make_data((5, 3, 4))
    layer = td.CPRegression((5, 3, 4), 2, rank=4, dropout=0.8)
    model = TensorRegressor.from_layer(layer)
    with torch.no_grad():
        assert np.array_equal(model.predict(X), layer.eval()(torch.from_numpy(X)).numpy())
    last = TensorRegressor.from_layer(layer, channel_axis=-1)
    moved = np.moveaxis(X, 1, -1)
    assert np.array_equal(last.predict(moved), model.predict(X))
    assert last.input_shape_ == (3, 4, 5)
    assert np.allclose(np.tensordot(moved, last.coef_, 3) + last.intercept_, last.predict(moved), atol=1e-5)
    assert (model.method_, model.rank_, model.theta_) == ("cp", 4, pytest.approx(0.8))


def test_a_channel_that_hardly_varies_does_not_blow_up_on_new_samples():
    X, y = make_data((20, 4), (), n=60)
    X[:, 7] = 1.0
    X[0, 7, 0] += 1e-4  # the noise of one training image
    model = fit_quietly(TensorRegressor(max_iter=40, random_state=0), X[:40], y[:40])
    usual = model.predict(X[40:])
    moved = X[40:].copy()
    moved[:, 7] += 0.02
    assert relative(model.predict(moved), usual) < 1
    assert np.array_equal(model.layer_.center.numpy()[7:8], np.float32([X[:40, 7].mean(dtype=np.float64)]))


def test_a_layer_of_a_class_of_its_own_becomes_an_estimator():
    class Mine(td.CPRegression):
        pass

    model = TensorRegressor.from_layer(Mine((5, 3), 2, rank=2))
    assert model.method_ == "cp"
    assert model.predict(np.ones((4, 5, 3), np.float32)).shape == (4, 2)


def test_a_layer_in_half_precision_predicts():
    X, _ = make_data((5, 3))
    layer = td.CPRegression((5, 3), 2, rank=2, dropout=0.8)
    expected = TensorRegressor.from_layer(layer).predict(X)
    half = TensorRegressor.from_layer(layer.bfloat16())
    assert half.predict(X).dtype == np.float32
    assert relative(half.predict(X), expected) < 0.1
    assert half.predict(torch.from_numpy(X)).dtype == torch.bfloat16
    assert half.coef_.shape == (5, 3, 2)
    assert half.intercept_.shape == (2,)
    with pytest.warns(UserWarning, match="masks alone"):
        assert half.predict(X, return_std=True)[1].shape == (40, 2)


# Weights and missing targets.


@pytest.mark.parametrize("shape", [(7,), (5, 4)], ids=str)
def test_a_weight_of_two_is_a_row_twice_and_of_zero_none(shape):
    X, y = make_data(shape, (), n=30, dtype=np.float64)
    weights = np.random.default_rng(1).integers(0, 3, 30)
    settings = {"rank": 2, "max_iter": 300, "tol": 1e-7, "random_state": 0}
    weighted = fit_quietly(TensorRegressor(**settings), X, y, sample_weight=weights)
    repeated = fit_quietly(TensorRegressor(**settings), X.repeat(weights, 0), y.repeat(weights, 0))
    plain = fit_quietly(TensorRegressor(**settings), X, y)
    assert relative(weighted.predict(X), repeated.predict(X)) < 2e-3
    assert relative(plain.predict(X), repeated.predict(X)) > 4e-3
    assert weighted.alpha_ == pytest.approx(repeated.alpha_)


def test_whole_weights_are_repeated_rows_for_ridge_too():
    """Also where ridge chooses its own weight, by generalized cross-validation."""
    X, y = make_data((7,), (), n=16, dtype=np.float64, noise=8.0)
    wrong, spoilt = np.r_[y, np.zeros(200)], np.r_[X, 9 * np.ones((200, 7))]
    twice = TensorRegressor().fit(X, y, sample_weight=np.full(16, 2.0))
    repeated = TensorRegressor().fit(X.repeat(2, 0), y.repeat(2))
    assert np.allclose(twice.predict(X), repeated.predict(X))
    assert twice.alpha_ == pytest.approx(repeated.alpha_)
    kept = TensorRegressor().fit(X, y)
    masked = TensorRegressor().fit(spoilt, wrong, sample_weight=np.r_[np.ones(16), np.zeros(200)])
    assert np.allclose(masked.predict(X), kept.predict(X))
    assert masked.alpha_ == pytest.approx(kept.alpha_)
    parts = TensorRegressor().fit(X, y, sample_weight=np.full(16, 0.01))  # fewer than there are rows
    assert np.allclose(parts.predict(X), kept.predict(X))


@pytest.mark.parametrize(
    "weights", [2.0, np.full((40, 1), 2.0), torch.full((40,), 2.0)], ids=["one", "column", "torch"]
)
def test_weights_of_any_kind_count_alike(weights):
    X, y = make_data((5, 4))
    expected = fit_quietly(TensorRegressor(**SMALL), X, y, sample_weight=np.full(40, 2.0))
    model = fit_quietly(TensorRegressor(**SMALL), X, y, sample_weight=weights)
    assert np.array_equal(model.predict(X), expected.predict(X))
    assert model.alpha_ == expected.alpha_ == fit_quietly(TensorRegressor(**SMALL), X, y).alpha_ / 2


def test_rows_of_weight_zero_are_not_looked_at():
    X, y = make_data((5, 4), n=40)
    weights = np.r_[np.ones(30), np.zeros(10)]
    spoilt, wrong = X.copy(), y.copy()
    spoilt[30:], wrong[30:] = 50.0, -900.0
    kept = fit_quietly(TensorRegressor(calibrate=3, **SMALL), X, y, sample_weight=weights)
    model = fit_quietly(TensorRegressor(calibrate=3, **SMALL), spoilt, wrong, sample_weight=weights)
    assert relative(model.predict(X), kept.predict(X)) < 1e-3
    assert np.allclose(model.calibration_.noise, kept.calibration_.noise, rtol=1e-2)
    assert len(model.calibration_.scores) == 30


def test_missing_coordinates_are_masked_not_dropped():
    X, y = make_data((6, 4), (3,), n=60)
    holes = y.copy()
    holes[::2, 0] = np.nan
    model = fit_quietly(TensorRegressor(max_iter=60, random_state=0), X, holes)
    complete = fit_quietly(TensorRegressor(max_iter=60, random_state=0), X[1::2], y[1::2])
    assert np.isfinite(model.predict(X)).all()
    errors = ((model.predict(X[::2]) - y[::2]) ** 2).mean(0)
    dropped = ((complete.predict(X[::2]) - y[::2]) ** 2).mean(0)
    assert errors[0] < 0.5 * y[:, 0].var()
    assert errors[1:].mean() < dropped[1:].mean()  # the rows with a hole told about the other coordinates


def test_a_mask_of_y_marks_missing_targets():
    X, y = make_data((6, 4), (2,))
    hidden = np.zeros(y.shape, bool)
    hidden[::3, 0] = True
    expected = fit_quietly(TensorRegressor(**SMALL), X, np.where(hidden, np.nan, y))
    given = np.ma.masked_array(np.where(hidden, 1e6, y).astype(np.float32), hidden)
    model = fit_quietly(TensorRegressor(**SMALL), X, given)
    assert np.array_equal(model.predict(X), expected.predict(X))
    assert model.score(X, given) == expected.score(X, np.where(hidden, np.nan, y))
    whole = np.ma.masked_array(y.round().astype(int), hidden)
    assert np.isfinite(fit_quietly(TensorRegressor(**SMALL), X, whole).score(X, whole))
    unmasked = fit_quietly(TensorRegressor(**SMALL), np.ma.masked_array(X), np.ma.masked_array(y))
    assert np.array_equal(unmasked.predict(X), fit_quietly(TensorRegressor(**SMALL), X, y).predict(X))


# Ranks, ridge, solver.


def test_rank_auto_is_the_full_rank_of_small_data():
    X, y = make_data((5, 3), (2,))
    assert fit_quietly(TensorRegressor(max_iter=10), X, y).rank_ == 6
    assert fit_quietly(TensorRegressor("tucker", max_iter=10), X, y).rank_ == (5, 3, 2)


def test_a_vector_and_a_number_are_plain_ridge():
    X, y = make_data((7,), (), dtype=np.float64)
    model = TensorRegressor(alpha=0.3).fit(X, y)
    assert model.method_ == "ridge"
    assert (model.rank_, model.theta_, model.n_iter_, model.loss_curve_) == (None, None, 1, [])
    scaled = (X - X.mean(0)) / X.std(0)
    oracle = Ridge(alpha=0.3 * len(X)).fit(scaled, y)
    assert np.allclose(model.predict(X), oracle.predict(scaled))
    assert model.alpha_ == pytest.approx(0.3)
    assert TensorRegressor().fit(X, y).score(X, y) > 0.99


def test_one_feature_of_several_targets_with_holes_is_fitted_too():
    X, y = make_data((1,), (2,), n=40)
    y[::3, 0] = np.nan
    model = fit_quietly(TensorRegressor(theta=1, max_iter=40), X, y)
    assert ((model.predict(X) - y)[:, 1] ** 2).mean() < 0.1 * y[:, 1].var()
    assert np.nanmean((model.predict(X) - y)[:, 0] ** 2) < 0.1 * np.nanvar(y[:, 0])


def test_equal_seeds_give_equal_fits():
    X, y = make_data()
    models = [fit_quietly(TensorRegressor(max_iter=15, random_state=seed), X, y) for seed in (3, 3, 4)]
    first, same, other = (model.predict(X) for model in models)
    assert np.array_equal(first, same)
    assert models[0].loss_curve_ == models[1].loss_curve_
    assert not np.array_equal(first, other)


def test_fitting_leaves_torchs_generator_where_it_was():
    X, y = make_data()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    fit_quietly(TensorRegressor(max_iter=3, random_state=0), X, y)
    assert torch.equal(torch.rand(3), expected)


# How it ends.


def test_what_did_not_converge_names_the_remedy():
    X, y = make_data()
    with pytest.warns(ConvergenceWarning, match="raise max_iter") as caught:
        model = TensorRegressor(max_iter=2, random_state=0).fit(X, y)
    assert model.n_iter_ == 2
    assert caught[0].filename == __file__


def test_loss_curve_falls_and_has_an_entry_for_each_iteration():
    X, y = make_data()
    model = TensorRegressor(random_state=0, max_iter=500).fit(X, y)
    assert len(model.loss_curve_) == model.n_iter_ + 1
    assert all(
        later <= earlier + 1e-6 for earlier, later in zip(model.loss_curve_, model.loss_curve_[1:], strict=False)
    )


def test_an_interruption_keeps_the_best_so_far(monkeypatch):
    X, y = make_data()
    steps = []

    def press_control_c(self, count):
        steps.append(count)
        if len(steps) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Advance, "__call__", press_control_c)
    with pytest.warns(ConvergenceWarning, match="interrupted after 5 iterations: the best so far is kept"):
        model = TensorRegressor(random_state=0).fit(X, y)
    assert model.n_iter_ == 5
    assert model.loss_curve_[-1] < model.loss_curve_[0]
    monkeypatch.undo()
    stopped = fit_quietly(TensorRegressor(random_state=0, max_iter=5), X, y)
    assert np.array_equal(model.predict(X), stopped.predict(X))


def test_an_interruption_while_calibrating_stops(monkeypatch):
    def press_control_c(self, count):
        raise KeyboardInterrupt

    monkeypatch.setattr(Advance, "__call__", press_control_c)
    model = TensorRegressor(calibrate=3)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*make_data())
    with pytest.raises(NotFittedError):
        model.predict(make_data()[0])


def test_verbose_shows_a_bar_on_a_terminal(monkeypatch, capfd):
    X, y = make_data()
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    fit_quietly(TensorRegressor(max_iter=5), X, y)
    assert "TensorRegressor" not in capfd.readouterr().err
    fit_quietly(TensorRegressor(max_iter=5, verbose=True), X, y)
    assert "TensorRegressor" in capfd.readouterr().err


# Uncertainty.


@pytest.mark.parametrize("outputs", [(), (2,), (2, 2)], ids=str)
def test_calibrated_intervals_cover_what_they_say(outputs):
    X, y = make_data((6, 4), outputs, n=240, noise=2.0)
    model = fit_quietly(TensorRegressor(calibrate=5, **SMALL), X[:120], y[:120])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean, std = model.predict(X[120:], return_std=True)
    assert mean.shape == std.shape == y[120:].shape
    low, high = model.predict_interval(X[120:], coverage=0.8)
    assert low.shape == y[120:].shape
    assert 0.68 < ((low <= y[120:]) & (y[120:] <= high)).mean() < 0.92
    wide_low, wide_high = model.predict_interval(X[120:], coverage=0.95)
    assert (wide_low <= low).all()
    assert (high <= wide_high).all()
    errors = (mean - y[120:]) ** 2
    assert 0.5 < errors.mean() / (std**2).mean() < 2


def test_calibration_holds_groups_out_together():
    """Samples of one person are nearly alike: held out one by one, each is known from its neighbours."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(12), 5)
    X = rng.normal(size=(12, 30, 4))[groups] + 0.05 * rng.normal(size=(60, 30, 4))
    y = rng.normal(size=12)[groups] + 0.05 * rng.normal(size=60)
    order = rng.permutation(60)
    X, y, groups = X[order], y[order], groups[order]
    alone, together = (
        fit_quietly(TensorRegressor(calibrate=4, **SMALL), X, y, groups=given).calibration_.noise[0]
        for given in (None, [f"person {k}" for k in groups])
    )
    assert together > 3 * alone


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (np.arange(12) % 2, "calibrate=3 folds need as many groups, got 2"),
        (np.arange(11), r"groups has one entry per row of X, \(12,\)"),
        ([None] * 12, "groups holds None"),
    ],
)
def test_groups_that_calibrate_nothing_are_refused_in_a_sentence(groups, message):
    with pytest.raises(td.TensorDropoutError, match=message) as caught:
        TensorRegressor(calibrate=3, max_iter=2).fit(X, Y, groups=groups)
    assert_one_sentence(caught)


def test_without_calibration_the_std_is_that_of_the_masks_and_says_so():
    X, y = make_data()
    model = fit_quietly(TensorRegressor(theta=0.7, **SMALL), X, y)
    with pytest.warns(UserWarning, match="masks alone.*calibrate=5"):
        _, std = model.predict(X, return_std=True)
    variance = model.layer_.moments(torch.from_numpy(X)).variance
    assert np.allclose(std, variance.detach().sqrt().numpy(), rtol=1e-5)
    with pytest.raises(td.TensorDropoutError, match="calibrate=5, or use TensorRegressorCV"):
        model.predict_interval(X)


def test_intervals_count_the_residuals_of_each_output():
    X, y = make_data((6, 4), (2,), n=60, noise=2.0)
    holes = y.copy()
    holes[12:, 0] = np.nan
    model = fit_quietly(TensorRegressor(calibrate=5, **SMALL), X, holes)
    alone = model.calibration_.scores[:, 0].abs().numpy()
    alone = np.sort(alone[~np.isnan(alone)])
    assert len(alone) == 12
    low, high = model.predict_interval(X, coverage=0.8)  # the 11th of 12 and the 49th of 60
    _, std = model.predict(X, return_std=True)
    assert np.allclose((high - low)[:, 0], 2 * alone[10] * std[:, 0], rtol=1e-4)
    many = np.sort(model.calibration_.scores[:, 1].abs().numpy())
    assert np.allclose((high - low)[:, 1], 2 * many[48] * std[:, 1], rtol=1e-4)


@pytest.mark.parametrize(("coverage", "needed"), [(0.8, None), (0.9, None), (0.91, 11), (0.95, 19), (0.99, 99)])
def test_too_few_residuals_for_a_coverage_are_said(coverage, needed):
    X, y = make_data((7,), (), n=10, noise=1.0)
    model = TensorRegressor(calibrate=3, random_state=0).fit(X, y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.predict_interval(X, coverage)
    texts = [str(each.message) for each in caught]
    assert len(texts) == (needed is not None)
    if needed:
        assert f"10 held-out residuals are too few for coverage={coverage}" in texts[0]
        assert f"needs {needed}" in texts[0]
        assert caught[0].filename == __file__


@pytest.mark.parametrize("coverage", [0, 1, 1.5, -0.1, "90%", True])
def test_a_coverage_that_is_no_share_is_refused(coverage):
    X, y = make_data((7,), ())
    model = TensorRegressor(calibrate=3).fit(X, y)
    with pytest.raises(td.TensorDropoutError, match="coverage is a number between 0 and 1"):
        model.predict_interval(X, coverage)


def test_calibration_of_ridge_is_its_held_out_error():
    X, y = make_data((7,), (), n=100, noise=1.0)
    model = TensorRegressor(calibrate=5, random_state=0).fit(X, y)
    _, std = model.predict(X, return_std=True)
    assert std == pytest.approx(1.0, rel=0.25)


# In scikit-learn.


def test_clone_pickle_and_pipeline():
    X, y = make_data()
    model = fit_quietly(TensorRegressor(theta=0.7, **SMALL), X, y)
    fresh = clone(model)
    assert fresh.get_params() == model.get_params()
    assert not hasattr(fresh, "layer_")
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict(X), model.predict(X))
    halved = FunctionTransformer(lambda X: X / 2)
    piped = fit_quietly(make_pipeline(halved, TensorRegressor(theta=0.7, **SMALL)), 2 * X, y)
    assert np.array_equal(piped.predict(2 * X), model.predict(X))


def test_grid_search_and_cross_validation():
    X, y = make_data((5, 4), (2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        search = GridSearchCV(TensorRegressor(**SMALL), {"theta": [0.5, 1.0]}, cv=2).fit(X, y)
        flat_y = y.reshape(len(y), -1)
        predicted = cross_val_predict(TensorRegressor(**SMALL), X, flat_y, cv=2)
        scores = cross_val_score(TensorRegressor(**SMALL), X, flat_y, cv=KFold(2), scoring="r2")
    assert search.best_params_["theta"] in (0.5, 1.0)
    assert search.predict(X).shape == y.shape
    assert predicted.shape == flat_y.shape
    assert scores.min() > 0


def test_score_takes_any_number_of_output_modes():
    X, y = make_data((5, 4), (2, 2))
    model = fit_quietly(TensorRegressor(**SMALL), X, y)
    predicted = model.predict(X)
    own = 1 - ((y - predicted) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)
    assert model.score(X, y) == pytest.approx(own.mean(), rel=1e-4)
    with pytest.raises(td.TensorDropoutError, match=r"score: y has the shape \(40, 4\)"):
        model.score(X, y.reshape(40, 4))


def test_score_leaves_missing_targets_out():
    X, y = make_data((5, 4), (3,), n=60, noise=2.0)
    weights = np.linspace(0.5, 2, 60)
    model = fit_quietly(TensorRegressor(**SMALL), X, y)
    holes = y.copy()
    holes[::2, 0] = np.nan
    predicted = model.predict(X)
    kept = [~np.isnan(holes[:, k]) for k in range(3)]
    for w in (None, weights):
        each = [
            r2_score(y[rows, k], predicted[rows, k], sample_weight=None if w is None else w[rows])
            for k, rows in enumerate(kept)
        ]
        assert model.score(X, holes, w) == pytest.approx(np.mean(each))
        assert model.score(torch.from_numpy(X), torch.from_numpy(holes), w) == pytest.approx(np.mean(each))
    holes[1:, 0] = np.nan  # of one number there is no R²
    assert model.score(X, holes) == pytest.approx(r2_score(y[:, 1:], predicted[:, 1:]))
    holes[1:] = np.nan
    with pytest.raises(td.TensorDropoutError, match="score: no output has two known targets in y"):
        model.score(X, holes)


def test_scikit_learns_search_takes_missing_targets():
    X, y = make_data((5, 4), (3,), n=40)
    y[::2, 0] = np.nan
    search = fit_quietly(GridSearchCV(TensorRegressor(**SMALL), {"theta": [0.5, 1.0]}, cv=2), X, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


def test_settings_may_be_numbers_of_numpy():
    X, y = make_data((6, 4), (2,))
    plain = {"rank": 2, "theta": 0.5, "alpha": 0.25, "channel_axis": -1, "batch_size": 16, "max_iter": 5}
    kinds = {"rank": np.int64, "theta": np.float32, "alpha": np.float32, "channel_axis": np.int64}
    given = {key: kinds.get(key, np.int32)(value) for key, value in plain.items()}
    expected = fit_quietly(TensorRegressor(random_state=0, tol=0, **plain), X, y)
    model = fit_quietly(TensorRegressor(random_state=0, tol=np.float64(0), calibrate=np.int64(2), **given), X, y)
    assert np.array_equal(model.predict(X), expected.predict(X))
    assert type(model.rank_) is int
    tucker = fit_quietly(TensorRegressor("tucker", **{**SMALL, "rank": np.array([2, 3, 2])}), X, y)
    assert tucker.rank_ == (2, 3, 2)
    assert td.CPRegression((np.int64(5), np.int32(3)), np.int64(2), np.float32(1)).weight_shape == (5, 3, 2)
    grid = {"rank": np.arange(1, 3), "theta": np.array([0.5, 1.0], np.float32)}
    search = fit_quietly(GridSearchCV(TensorRegressor(max_iter=5), grid, cv=2), X, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


# Refits.


@pytest.mark.parametrize("spoilt", ["X", "y", "weights", "rank"])
def test_a_fit_that_fails_leaves_the_last_one_as_it_was(spoilt):
    X, y = make_data((6,), (2,))
    model = fit_quietly(TensorRegressor(calibrate=3, **{**SMALL, "rank": 2}), X, y)
    model.feature_names_in_ = np.array(list("abcdef"), dtype=object)  # as a data frame leaves them
    before, predicted = dict(vars(model)), model.predict(torch.from_numpy(X))
    other, targets = make_data((5, 4), (), n=30)
    weights = None
    if spoilt == "X":
        other[3] = np.nan
    elif spoilt == "y":
        targets[:] = 1
    elif spoilt == "weights":
        weights = -np.ones(30)
    model.set_params(rank=1000 if spoilt == "rank" else 2)
    with pytest.raises(td.TensorDropoutError):
        model.fit(other, targets, weights)
    assert vars(model).keys() == before.keys()
    assert all(vars(model)[key] is before[key] for key in before if key != "rank")
    assert torch.equal(model.predict(torch.from_numpy(X)), predicted)


def test_predicting_needs_a_fit():
    with pytest.raises(NotFittedError):
        TensorRegressor().predict(np.ones((2, 3)))
    with pytest.raises(NotFittedError):
        _ = TensorRegressor().coef_


def test_names_of_features_go_with_the_fit_that_had_none():
    X, y = make_data((6, 4))
    model = TensorRegressor(**SMALL)
    model.feature_names_in_ = np.array(list("abcdef"), dtype=object)  # as an earlier fit on a data frame leaves them
    fit_quietly(model, X, y)
    assert not hasattr(model, "feature_names_in_")


# Bad input: one clear sentence each.


X, Y = make_data((4, 3), (2,), n=12)
RAGGED = [[1.0, 2.0], [3.0]]
OBJECTS = np.array([{"a": 1}] * 24, dtype=object).reshape(12, 2)
BAD_DATA = {
    "another n": ((X, Y[:-1]), "X has 12 rows, y has 11"),
    "one number as y": ((X, 3.0), "X has 12 rows, y has a single number"),
    "no y": ((X, None), "requires y to be passed"),
    "NaN in X": ((spoil(X, np.nan), Y), "contains NaN, first in row 3"),
    "infinity in X": ((spoil(X, np.inf), Y), "contains infinity, first in row 3"),
    "NaN in a torch X": ((torch.from_numpy(spoil(X, np.nan)), Y), "contains NaN, first in row 3"),
    "a row of y missing": ((X, np.where(np.arange(12)[:, None] == 5, np.nan, Y)), r"no target at all in 1 rows.*\[5\]"),
    "a column of y missing": ((X, Y * [1, np.nan]), "column 1 of y has no target"),
    "infinity in y": ((X, Y * np.inf), "y contains infinity"),
    "constant y": ((X, np.ones(12)), "the target is constant"),
    "one sample": ((X[:1], Y[:1]), "at least 2 samples"),
    "no samples": ((X[:0], Y[:0]), "X is empty"),
    "no features": ((X[:, :0], Y), "X is empty"),
    "no outputs": ((X, Y[:, :0]), "y is empty"),
    "one axis of torch": ((torch.from_numpy(X[:, 0, 0]), Y), r"one sample per row, .*got the shape \(12,\)"),
    "one axis": ((X[:, 0, 0], Y), "Expected 2D array|one sample per row"),
    "strings": ((np.full((12, 3, 2), "a"), Y), "X must hold numbers"),
    "string targets": ((X, np.full(12, "a")), "y must hold numbers"),
    "objects": ((np.stack([OBJECTS] * 3, 2), Y), "X must hold numbers"),
    "ragged lists": ((RAGGED, [1.0, 2.0]), "its rows of equal shape"),
    "sparse": ((scipy.sparse.csr_matrix(X[:, 0]), Y), r"sparse input is not supported.*X\.toarray\(\)"),
    "sparse targets": ((X, scipy.sparse.csr_matrix(Y)), r"call y\.toarray\(\)"),
    "sparse in torch": ((torch.from_numpy(X).to_sparse(), Y), r"sparse input is not supported, .*X\.to_dense\(\)"),
    "sparse targets in torch": ((X, torch.from_numpy(Y).to_sparse()), r"sparse targets .*y\.to_dense\(\)"),
    "nothing": ((None, Y), r"X is an array, \(n, features\) or .*, got NoneType instead of rows"),
    "a dictionary": (({"x": X}, Y), "got dict instead of rows"),
    "a generator": (((row for row in X), Y), "got generator instead of rows"),
    "a word": (("maps.npy", Y), "got str instead of rows"),
    "dates": ((np.full((12, 3, 2), "2024-01-01", "M8[D]"), Y), r"X must hold numbers, got dtype datetime64\[D\]"),
    "times": ((X, np.arange(12).astype("m8[s]")), r"y must hold numbers, got dtype timedelta64\[s\]"),
    "records": ((X, np.zeros(12, [("a", float), ("b", int)])), "y must hold numbers, got dtype"),
    "a masked entry": ((np.ma.masked_greater(X, X.max() - 1e-6), Y), "1 entries of X are masked; fill them"),
    "masked weights": ((X, Y, np.ma.masked_array(np.ones(12), np.eye(12)[0])), "entries of sample_weight are masked"),
    "complex": ((X + 1j, Y), "Complex data not supported"),
    "complex targets": ((X, Y + 1j), "Complex data not supported"),
    "another number of weights": ((X, Y, np.ones(11)), r"sample_weight has one number per row of X, \(12,\)"),
    "negative weights": ((X, Y, -np.ones(12)), "sample_weight must be finite, not negative"),
    "no weight": ((X, Y, np.zeros(12)), "not all zero"),
    "one row that counts": ((X[:, :, 0], Y[:, 0], np.eye(12)[3]), "positive in 1 row, and a fit needs at least 2"),
    "weights in words": ((X, Y, np.full(12, "a")), "sample_weight must hold numbers"),
}
BAD_SETTINGS = {
    "theta of zero": ({"theta": 0}, "theta is a number"),
    "theta above one": ({"theta": 1.2}, "theta is a number"),
    "theta in words": ({"theta": "much"}, "theta is a number.*'much'"),
    "theta of nan": ({"theta": float("nan")}, "theta is a number"),
    "several thetas": ({"theta": np.array([0.5, 0.6])}, "theta is a number"),
    "theta of None": ({"theta": None}, "theta is a number .*, got None"),
    "theta of no kind": ({"theta": (0.5,)}, "theta is a number"),
    "negative alpha": ({"alpha": -1}, "alpha is a number of at least 0, got -1"),
    "alpha in words": ({"alpha": "small"}, "alpha is a number"),
    "infinite alpha": ({"alpha": float("inf")}, "alpha is a number"),
    "rank of zero": ({"rank": 0}, "rank"),
    "rank too large": ({"rank": 1000}, "rank"),
    "rank in words": ({"rank": "big"}, "rank"),
    "several ranks for CP": ({"rank": (2, 3)}, "rank"),
    "factorization": ({"factorization": "svd"}, "factorization is one of .*'svd'"),
    "factorization of another type": ({"factorization": 3}, "factorization is one of .*3"),
    "modes": ({"factorization": "tucker", "modes": (7,)}, r"modes=\(7,\)"),
    "law": ({"law": "coin"}, "unknown law 'coin'"),
    "solver": ({"solver": "sgd"}, "solver is 'auto'.*'sgd'"),
    "channel axis of the samples": ({"channel_axis": 0}, "channel_axis is the axis"),
    "channel axis beyond": ({"channel_axis": 3}, "channel_axis=3, but X has the axes 0 to 2"),
    "channel axis in words": ({"channel_axis": "last"}, "channel_axis is the axis"),
    "no device": ({"device": "toaster"}, "device='toaster' cannot be used"),
    "a device that is not here": ({"device": "cuda:99"}, "device='cuda:99' cannot be used"),
    "half a device": ({"device": 3.5}, r"device=3.5 cannot be used here \(a device is a name"),
    "a device without numbers": ({"device": "meta"}, r"device='meta' cannot be used here \(it holds no numbers"),
    "channel axis of several": ({"channel_axis": (1, 2)}, "channel_axis is the axis"),
    "no iterations": ({"max_iter": 0}, "max_iter is a number of at least 1"),
    "half an iteration": ({"max_iter": 1.5}, "max_iter is a number"),
    "tol": ({"tol": -1}, "tol is a number"),
    "empty batches": ({"batch_size": 0}, "batch_size is a number of at least 1"),
    "half a sample": ({"batch_size": 2.5}, "batch_size is a number"),
    "one fold": ({"calibrate": 1}, "calibrate is a number"),
    "too many folds": ({"calibrate": 13}, "calibrate=13 folds need as many rows, got 12"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_are_refused_in_a_sentence(case):
    data, message = BAD_DATA[case]
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        TensorRegressor(max_iter=2).fit(*data)
    if case != "one axis":  # scikit-learn's own words, of several lines
        assert_one_sentence(caught)


def test_a_calibration_whose_weight_is_in_one_fold_is_refused_in_a_sentence():
    folds = list(KFold(3, shuffle=True, random_state=TensorRegressor(random_state=0)._seed() % 2**31).split(X))
    weights = np.isin(np.arange(12), folds[1][1]).astype(float)
    with pytest.raises(td.TensorDropoutError, match=r"sample_weight is 0 in .* lower calibrate") as caught:
        TensorRegressor(calibrate=3, random_state=0).fit(X[:, 0], Y[:, 0], weights)
    assert_one_sentence(caught)


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings_are_refused_in_a_sentence(case):
    settings, message = BAD_SETTINGS[case]
    with pytest.raises(td.TensorDropoutError, match=message) as caught:
        TensorRegressor(**{"max_iter": 2, **settings}).fit(X, Y)
    assert_one_sentence(caught)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (X[:, :3], r"fitted to samples of shape \(4, 3\), got \(3, 3\)"),
        (X[:, :, 0], r"fitted to samples of shape \(4, 3\), got \(4,\)"),
        (spoil(X, np.nan), "contains NaN"),
        (X[:0], "X is empty"),
    ],
)
def test_features_unlike_those_of_the_fit_are_refused(given, message):
    model = fit_quietly(TensorRegressor(max_iter=2), X, Y)
    with pytest.raises(ValueError, match=message) as caught:
        model.predict(given)
    assert_one_sentence(caught)


def test_another_number_of_features_is_refused_in_scikit_learns_words():
    model = fit_quietly(TensorRegressor(max_iter=2), X[:, :, 0], Y)
    for given in (X[:, :3, 0], torch.from_numpy(X[:, :3, 0])):
        with pytest.raises(ValueError, match="X has 3 features, but TensorRegressor is expecting 4 features as input"):
            model.predict(given)


def test_from_layer_takes_layers_alone():
    with pytest.raises(td.TensorDropoutError, match="takes a tensor regression layer, got Linear"):
        TensorRegressor.from_layer(torch.nn.Linear(3, 2))
    with pytest.raises(td.TensorDropoutError, match="channel_axis=4, but X has the axes 0 to 2"):
        TensorRegressor.from_layer(td.CPRegression((4, 3), 2, rank=2), channel_axis=4)
