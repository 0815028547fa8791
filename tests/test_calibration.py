"""From held-out errors to intervals: quantiles, leverages, standard deviations, ellipses, and what they cover.

The truth is written here once more, slowly: quantiles by a loop in fractions, leverages from the dense matrix over all
masks, crossed intervals and ellipses sample by sample; and what is promised is counted on simulated data.
"""

from __future__ import annotations

import copy
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from sklearn.exceptions import NotFittedError
from torch.testing import assert_close

import tensor_dropout as td
from estimators_under_test import SMALL, assert_one_sentence, fit_quietly, make_data
from layers_under_test import make_layer
from tensor_dropout import reference
from tensor_dropout.calibration import leverage as leverage_module
from tensor_dropout.calibration.conformal import conformal_quantile, groups_needed
from tensor_dropout.calibration.leverage import fit_leverage
from tensor_dropout.calibration.regression import SHARES, Calibration, calibrate_errors, negative_log_likelihood
from tensor_dropout.sklearn import TensorRegressor, TensorRegressorCV
from tensor_dropout.sklearn import regressor as regressor_module
from tensor_dropout.sklearn import search_mixin as search_module

NAN = float("nan")
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Conformal quantiles.


def slow_quantile(scores, groups, coverage):
    """Value, whether it was reached, and the number of groups, of one column; the coverage is a fraction."""
    pairs = sorted((s, g) for s, g in zip(scores, groups, strict=True) if not math.isnan(s))
    members = [g for _, g in pairs]
    n_groups, reached = len(set(members)), Fraction(0)
    for score, group in pairs:
        reached += Fraction(1, members.count(group))
        if reached >= coverage * (n_groups + 1):  # one more group, the unseen one, is beyond all of them
            return score, True, n_groups
    return (pairs[-1][0] if pairs else math.inf), False, n_groups


def check_quantile(scores, groups, coverage):
    """Every column against the loop."""
    found = conformal_quantile(scores, groups, float(coverage))
    assert found.value.shape == found.reached.shape == found.groups.shape == scores.shape[1:]
    columns = scores.double().flatten(1).mT.tolist()
    for column, *answer in zip(columns, *(part.flatten().tolist() for part in found), strict=True):
        assert tuple(answer) == slow_quantile(column, groups.tolist(), coverage)
    return found


@pytest.mark.parametrize(
    "coverage", [Fraction(1, 20), Fraction(1, 2), Fraction(4, 5), Fraction(9, 10), Fraction(99, 100)]
)
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("missing", [False, True], ids=["", "missing"])
def test_a_quantile_is_that_of_a_loop(coverage, ties, missing):
    scores = randn(60, 2, 3).abs()
    scores = (scores * 3).floor() if ties else scores
    groups = torch.tensor([900, -3, 17, 4, 5, 0, 33, 8, 9, 10, 11, 12])[(torch.rand(60) ** 3 * 12).long()]
    if missing:
        scores[torch.rand(scores.shape) < 0.4] = NAN
        scores[:, 0, 1] = NAN  # no score at all
        scores[3:, 1, 1] = NAN  # few groups
        scores[groups == 900, 0, 2] = NAN  # one group less
    found = check_quantile(scores, groups, coverage)
    check_quantile(scores[:, 0], groups, coverage)
    if missing:
        assert (found.value[0, 1], found.reached[0, 1], found.groups[0, 1]) == (math.inf, False, 0)
        assert found.groups[0, 2] == found.groups[0, 0] - 1


def test_the_order_of_samples_and_the_names_of_groups_do_not_matter():
    scores, groups, order = randn(40, 5), torch.randint(9, (40,)), torch.randperm(40)
    found, again = (
        conformal_quantile(*given, 0.8) for given in ((scores, groups), (scores[order], -7 * groups[order]))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
def test_scores_of_any_type_have_a_quantile_in_float64(dtype):
    found = conformal_quantile(torch.arange(1, 20)[:, None].to(dtype), torch.arange(19), 0.9)
    assert (found.value.item(), found.value.dtype) == (18.0, torch.float64)


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.9, 0.95])
def test_where_each_sample_is_its_own_group_the_quantile_is_a_rank(coverage):
    exact = Fraction(coverage).limit_denominator(1000)
    for n in range(1, 60):
        scores = torch.randperm(n)[:, None].double()
        found, rank = conformal_quantile(scores, torch.arange(n), coverage), math.ceil((n + 1) * exact)
        assert found.reached.item() == (rank <= n) == (n >= groups_needed(coverage))
        assert found.value.item() == min(rank, n) - 1
        assert found.groups.item() == n


@pytest.mark.parametrize(("n", "coverage"), [(9, 0.9), (19, 0.95), (99, 0.99), (4, 0.8), (29, 0.9), (6, 6 / 7)])
def test_a_coverage_that_is_reached_exactly_asks_for_no_sample_more(n, coverage):
    assert groups_needed(coverage) <= n
    found = conformal_quantile(torch.arange(1.0, n + 1)[:, None], torch.arange(n), coverage)
    assert (found.value.item(), found.reached.item()) == (round(coverage * (n + 1)), True)
    assert groups_needed(0.9), groups_needed(0.95) == (9, 19)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 400))
def test_a_coverage_of_k_of_n_plus_one_is_the_kth_score(data, n):
    k = data.draw(st.integers(1, n))
    found = conformal_quantile(torch.arange(1.0, n + 1)[:, None], torch.arange(n), k / (n + 1))
    assert (found.value.item(), found.reached.item()) == (k, True)
    assert groups_needed(k / (n + 1)) == math.ceil(Fraction(k, n + 1 - k))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_a_coverage_of_k_of_n_plus_one_groups_is_that_of_the_loop(sizes, data):
    k = data.draw(st.integers(1, len(sizes)))
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    scores = torch.tensor(data.draw(st.lists(st.integers(0, 8), min_size=len(groups), max_size=len(groups))))
    check_quantile(scores[:, None], groups, Fraction(k, len(sizes) + 1))


@pytest.mark.parametrize(("coverage", "n_groups"), [(0.9, 9), (0.9, 30), (0.8, 14), (0.5, 5)])
def test_a_new_group_is_covered_as_promised(coverage, n_groups):
    """Groups of one to forty samples, the large ones easy: exchangeable, and nothing else is asked of them."""
    draws, most = 4000, 40
    rng = np.random.default_rng(1)
    sizes = rng.choice([1, 2, 5, most], size=(draws, n_groups + 1), p=[0.4, 0.2, 0.2, 0.2])
    level = rng.normal(size=sizes.shape) + 2.0 * (sizes < most)  # what the samples of a group share
    scores = level[..., None] + 0.3 * rng.normal(size=(*sizes.shape, most))
    scores[np.arange(most) >= sizes[..., None]] = NAN
    seen, new = torch.from_numpy(scores[:, :-1]).flatten(1).mT, scores[:, -1]
    found = conformal_quantile(seen, torch.arange(n_groups).repeat_interleave(most), coverage)
    assert bool(found.reached.all())
    assert bool((found.groups == n_groups).all())
    inside = np.where(np.isnan(new), NAN, new <= found.value.numpy()[:, None])
    covered = np.nanmean(inside, axis=1)  # of each new group
    error = covered.std() / math.sqrt(draws)
    assert coverage - 3 * error <= covered.mean() < coverage + 1 / (n_groups + 1) + 3 * error


# Leverages.

SHAPES = {  # format, input_shape, output_shape, rank, modes: few masks
    "cp": ("cp", (4, 3, 2), (3,), 4, "all"),
    "cp-tensor": ("cp", (4, 3), (2, 3), 3, "all"),
    "tucker": ("tucker", (4, 3), (3,), (3, 2, 2), "all"),
    "tucker-tensor": ("tucker", (3, 2), (2, 3), (2, 2, 2, 2), "outer"),
    "tucker-one-mode": ("tucker", (4, 3), (3,), (3, 2, 2), (0,)),
    "tt": ("tt", (4, 3), (3,), (3, 2), "all"),
    "tt-tensor": ("tt", (4, 3), (2, 3), (2, 3, 2), "all"),
    "tt-tensor-unmasked": ("tt", (4, 3), (2, 3), (2, 3, 2), None),
}
ALPHA = 0.02


def make(shape, theta=0.6, **options):
    format, inputs, outputs, rank, modes = SHAPES[shape]
    given = {"input_shape": inputs, "output_shape": outputs, "rank": rank, **options}
    masked = {"theta": None} if modes is None else {"theta": theta, "modes": modes}
    layer = make_layer(format, dtype=torch.float64, **masked, **given)
    layer.set_center(0.5 * randn(inputs[0], seed=9))  # as a fit leaves it
    return layer.eval()


def features_under(layer, x, masks):
    """z (n, M, K) under given masks: the first output where one entry of its parameter is 1 and all others are 0."""
    probe = copy.deepcopy(layer)
    name, axis = probe.output_parameter
    columns = []
    with torch.no_grad():
        probe.bias.zero_()
        parameter = probe.get_parameter(name)
        of_first = parameter.movedim(axis, 0)[0]  # a view
        for place in np.ndindex(tuple(of_first.shape)):
            parameter.zero_()
            of_first[place] = 1
            columns.append(probe.regress(x, masks).reshape(len(x), -1, layer.output_shape[-1])[..., 0])
    return torch.stack(columns, -1)


def dense_leverage(layer, x, weights, alpha, new):
    """The formula, mask by mask and sample by sample: (new, M)."""
    mean, second = 0.0, 0.0
    for chance, masks in reference.all_masks(layer):
        z = features_under(layer, x, masks)
        mean = mean + chance * z
        second = second + chance * torch.einsum("nmj,nmk->njk", z, z)
    new_mean = sum(chance * features_under(layer, new, masks) for chance, masks in reference.all_masks(layer))
    share = weights.double() / weights.sum()
    center = torch.einsum("n,nmk->mk", share, mean)
    A = torch.einsum("n,njk->jk", share, second) - center.mT @ center
    A = A + alpha * math.prod(layer.output_shape) * torch.eye(len(A), dtype=A.dtype)
    far = new_mean - center
    return torch.einsum("nmj,jk,nmk->nm", far, torch.linalg.inv(A), far) / int((weights > 0).sum())


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_leverage_is_that_of_the_dense_matrix_over_all_masks(shape, weighted):
    layer = make(shape)
    x, new = randn(9, *layer.input_shape, seed=1) + 0.3, randn(5, *layer.input_shape, seed=2)
    weights = torch.tensor([3.0, 0, 1, 0.5, 2, 0, 1, 1, 4]) if weighted else None
    found = fit_leverage(layer, x, weights, ALPHA)
    h = found.measure(layer, new)
    assert h.shape == (5, *layer.output_shape)
    expected = dense_leverage(layer, x, torch.ones(9) if weights is None else weights, ALPHA, new)
    for output in range(layer.output_shape[-1]):  # all share the features
        assert_close(h[..., output].reshape(5, -1), expected, **EXACT)
    assert not found.root.requires_grad


@pytest.mark.parametrize("scaling", ["inverted", "paper"])
@pytest.mark.parametrize("law", ["bernoulli-min1", "replacement", "nested"])
def test_a_leverage_follows_the_law_of_the_masks(law, scaling):
    layer = make("tucker", law=law, scaling=scaling)
    x = randn(7, *layer.input_shape, seed=1)
    expected = dense_leverage(layer, x, torch.ones(7), ALPHA, x)
    assert_close(fit_leverage(layer, x, None, ALPHA).measure(layer, x)[..., 0:1], expected, **EXACT)


@pytest.mark.parametrize("shape", ["cp-tensor", "tucker", "tt"])
def test_blocks_do_not_change_a_leverage(shape, monkeypatch):
    layer = make(shape)
    x, weights = randn(11, *layer.input_shape), torch.rand(11)
    whole = fit_leverage(layer, x, weights, ALPHA)
    h, passes, project = whole.measure(layer, x), [], type(layer).project
    monkeypatch.setattr(leverage_module, "BLOCK", 4 * math.prod(layer.input_shape))
    monkeypatch.setattr(type(layer), "project", lambda self, rows: passes.append(len(rows)) or project(self, rows))
    in_blocks = fit_leverage(layer, x, weights, ALPHA)
    assert_close(in_blocks.measure(layer, x), h, **EXACT)
    assert passes == [4, 4, 3] * 2
    monkeypatch.setattr(leverage_module, "BLOCK", 1)  # less than a sample
    assert_close(fit_leverage(layer, x, weights, ALPHA).measure(layer, x), h, **EXACT)


def test_samples_of_weight_zero_do_not_count():
    layer = make("cp")
    x, weights = randn(8, *layer.input_shape), torch.tensor([1.0, 2, 0, 1, 0, 3, 1, 1])
    kept = weights > 0
    with_them, without = (fit_leverage(layer, *given, ALPHA) for given in ((x, weights), (x[kept], weights[kept])))
    assert_close(with_them.measure(layer, x), without.measure(layer, x), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_features_of_another_precision_are_measured(dtype):
    layer = make_layer("cp", input_shape=(4, 3), output_shape=(2,), rank=3, theta=0.6)
    x = randn(12, 4, 3).to(dtype)
    found = fit_leverage(layer, x, None, ALPHA)
    same = fit_leverage(layer, x.float(), None, ALPHA)
    assert torch.equal(found.measure(layer, x), same.measure(layer, x.float()))
    assert found.measure(layer, x).dtype == found.root.dtype == torch.float64
    expected = dense_leverage(layer.double(), x.double(), torch.ones(12), ALPHA, x.double())
    assert_close(found.measure(layer.float(), x)[:, :1], expected, rtol=1e-4, atol=1e-6)


def test_a_ring_has_no_leverage():
    layer = make_layer("ring", input_shape=(4, 3), output_shape=(2,), rank=(2, 2, 2), dtype=torch.float64)
    assert fit_leverage(layer, randn(5, 4, 3), None, ALPHA) is None


def orthogonal_layer(inputs=5, outputs=6):
    """``f = (x Q) V``: a linear map without masks, whose features are a turn of x."""
    layer = make_layer("cp", input_shape=(inputs,), output_shape=(outputs,), rank="full", theta=1, dtype=torch.float64)
    with torch.no_grad():
        layer.factors[0].copy_(torch.linalg.qr(randn(inputs, inputs))[0])
    return layer


@pytest.mark.parametrize("alpha", [1e-3, 0.3])
def test_without_masks_a_leverage_is_the_variance_of_ridge(alpha):
    """The textbook: ``y = x w + noise``, ``w ~ N(0, σ²/(n λ))`` on centered x, and the covariance of w given y."""
    layer, x, new = orthogonal_layer(), randn(30, 5) * torch.arange(1, 6) + 2, 3 * randn(20, 5, seed=1)
    n, penalty, centered = len(x), alpha * 6, x - x.mean(0)
    posterior = torch.linalg.inv(centered.mT @ centered + n * penalty * torch.eye(5))
    expected = torch.einsum("ni,ij,nj->n", new - x.mean(0), posterior, new - x.mean(0))
    h = fit_leverage(layer, x, None, alpha).measure(layer, new)
    assert_close(h, expected[:, None].expand(20, 6), **EXACT)


def test_without_a_penalty_a_leverage_is_the_diagonal_of_the_hat_matrix():
    layer, x = orthogonal_layer(), randn(30, 5) + 1
    Q = torch.linalg.qr(torch.cat([torch.ones(30, 1), x], 1))[0]
    h = fit_leverage(layer, x, None, 0.0).measure(layer, x)[:, 0]
    assert_close(h + 1 / 30, Q.square().sum(1), **EXACT)  # the mean is one more thing that is fitted


def test_a_direction_that_the_samples_do_not_have_is_no_infinity():
    layer, x = orthogonal_layer(), randn(30, 5)
    x[:, 4] = 1.0
    h = fit_leverage(layer, x, None, 0.0).measure(layer, x)
    assert bool(h.isfinite().all())
    assert_close(h.mean(), torch.tensor(4 / 30).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.01, 1.0])
def test_the_mean_leverage_is_the_number_of_parameters_in_use_over_that_of_the_samples(alpha):
    layer, x = orthogonal_layer(), randn(40, 5) * torch.tensor([3, 1, 0.3, 0.1, 0.03])
    spectrum = torch.linalg.eigvalsh(torch.cov(x.mT, correction=0))
    used = (spectrum / (spectrum + 6 * alpha)).sum()
    h = fit_leverage(layer, x, None, alpha).measure(layer, x)
    assert_close(h[:, 0].mean(), used / 40, **EXACT)
    twice = fit_leverage(layer, x.repeat(2, 1), None, alpha).measure(layer, x)
    assert_close(twice, h / 2, **EXACT)


@pytest.mark.parametrize("shape", ["cp", "cp-tensor", "tucker", "tt"])
def test_a_leverage_grows_with_the_square_of_the_distance(shape):
    layer = make(shape)
    x, direction = randn(20, *layer.input_shape), randn(1, *layer.input_shape, seed=4)
    near, far, farther = fit_leverage(layer, x, None, ALPHA).measure(layer, x.mean(0) + torch.cat(
        [0 * direction, direction, 10 * direction]
    ))  # fmt: skip
    assert_close(near, torch.zeros_like(near))
    assert bool((far > 0).all())
    assert_close(farther, 100 * far, **EXACT)


@pytest.mark.parametrize(("format", "rank"), [("cp", 3), ("tt", (3, 3, 3)), ("tucker", (3, 3, 2, 3))])
def test_the_unit_of_an_output_does_not_change_the_leverage_of_a_sample(format, rank):
    X, y = make_data((6, 4), (2, 3), n=60, noise=2.0, dtype=np.float64)
    weights = np.ones(60)
    weights[:4] = 0
    y = (y - y[4:].mean(0)) / y[4:].std(0)  # so that the scales of the modes are exact, and both fits the same
    y[:4, 0, 0] = 50  # does not count
    options = {**SMALL, "rank": rank, "tol": 1e-3}
    ratios, predictions = [], []
    for unit in (1.0, 100.0):
        scale = np.array([1.0, unit])[:, None]
        model = fit_quietly(TensorRegressor(format, calibrate=2, **options), X, y * scale, weights)
        h = model.calibration_.leverage.measure(model.layer_, torch.from_numpy(X))
        ratios.append(h / h.mean(0))
        predictions.append(model.predict(X) / scale)
    assert np.allclose(*predictions, atol=1e-6)
    assert_close(*ratios, rtol=1e-5, atol=1e-8)


# Standard deviations.


def simulate_errors(share, n=6000, outputs=(3,), seed=0):
    """Errors whose variance is ``noise ((1 - share) + share h / h̄)``, and the leverages."""
    rng = np.random.default_rng(seed)
    h = 0.01 * rng.chisquare(3, size=(n, *outputs))
    noise = np.linspace(0.5, 20, math.prod(outputs)).reshape(outputs)
    variance = noise * ((1 - share) + share * h / h.mean(0))
    return torch.from_numpy(np.sqrt(variance) * rng.normal(size=h.shape)), torch.from_numpy(h), torch.from_numpy(noise)


@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_the_share_of_the_leverage_is_found(share, missing):
    errors, h, noise = simulate_errors(share)
    errors[torch.rand(errors.shape) < missing] = NAN
    found = calibrate_errors(errors, h, None, None)
    assert found.share == pytest.approx(share, abs=0.06)
    assert found.share in SHARES
    assert_close(found.noise, noise, rtol=0.08, atol=0)
    assert_close(found.mean_leverage, h.mean(0), **EXACT)
    variance = found.noise * ((1 - found.share) + found.share * h / h.mean(0))
    assert_close(found.std(h, len(h)), variance.sqrt(), **EXACT)
    assert_close(found.scores, errors / variance.sqrt(), equal_nan=True, **EXACT)
    assert_close(found.scores.square().nanmean(0), torch.ones(3).double(), **EXACT)
    assert torch.equal(found.groups, torch.arange(6000))


def likelihood_of(errors, h, share):
    """Twice the mean of each output at its most likely noise, which is searched for; less what is always the same."""
    total = 0.0
    for k in range(errors.shape[1]):
        known = ~errors[:, k].isnan()
        e, ratio = errors[known, k], ((1 - share) + share * h[:, k] / h[:, k].mean())[known]

        def loss(log_noise, e=e, ratio=ratio):
            return -torch.distributions.Normal(0.0, (math.exp(log_noise) * ratio).sqrt()).log_prob(e).mean().item()

        found = optimize.minimize_scalar(loss, bracket=(-1.0, 3.0))
        total += 2 * found.fun - math.log(2 * math.pi) - 1
    return total


@pytest.mark.parametrize("share", [0.0, 0.4, 0.98])
def test_the_likelihood_is_that_of_normal_errors(share):
    errors, h, _ = simulate_errors(0.5, n=40, outputs=(2,))
    errors[3:20, 1] = NAN
    ratio = (1 - share) + share * h / h.mean(0)
    found = negative_log_likelihood(errors.square(), ratio)
    assert found == pytest.approx(likelihood_of(errors, h, share), abs=1e-6)
    if share == 0:  # as it comes from variance_ratio
        assert negative_log_likelihood(errors.square(), torch.ones(2).double()) == pytest.approx(found, abs=1e-12)


def test_the_share_is_the_most_likely_one():
    errors, h, _ = simulate_errors(0.5, n=60, outputs=(2,))
    errors[:20, 0] = NAN
    likelihoods = [likelihood_of(errors, h, share) for share in (k / 50 for k in range(50))]
    assert calibrate_errors(errors, h, None, None).share == int(np.argmin(likelihoods)) / 50


def test_an_output_that_is_hit_exactly_neither_breaks_nor_decides():
    errors, h, _ = simulate_errors(0.6, outputs=(2,))
    alone = calibrate_errors(errors, h, None, None)
    padded = torch.cat([errors[:, :1], torch.zeros(len(errors), 1), errors[:, 1:]], 1)
    found = calibrate_errors(padded, torch.cat([h[:, :1], h.flip(0)[:, :1], h[:, 1:]], 1), None, None)
    assert found.share == alone.share
    assert_close(found.noise[[0, 2]], alone.noise, **EXACT)
    assert found.noise[1] == 0
    assert bool((found.scores[:, 1] == 0).all())
    assert found.quantile(0.9).value[1] == 0
    assert bool((found.std(h[:4, :1], 4)[:, 1] == 0).all())
    nothing = calibrate_errors(torch.zeros(5, 1), torch.rand(5, 1), None, None)
    assert (nothing.share, nothing.std(torch.rand(2, 1), 2).tolist()) == (0, [[0.0], [0.0]])


def test_an_output_without_targets_is_refused():
    errors = randn(6, 2)
    errors[:, 1] = NAN
    for unknown in (errors, errors[:0]):
        with pytest.raises(td.TensorDropoutError, match="calibrate: an output has no held-out target") as caught:
            calibrate_errors(unknown, None, None, None)
        assert_one_sentence(caught)


@pytest.mark.parametrize("outputs", [(1,), (2, 3)], ids=str)
def test_without_leverages_the_std_is_that_of_the_errors(outputs):
    errors = randn(50, *outputs)
    found = calibrate_errors(errors.float(), None, torch.arange(50) // 5 + 100, None)
    assert found.share == 0
    assert_close(found.std(None, 4), errors.float().double().square().mean(0).sqrt().expand(4, *outputs), **EXACT)
    assert torch.equal(found.groups, torch.arange(50) // 5)
    assert bool((found.quantile(0.9).groups == 10).all())


@pytest.mark.parametrize("h", [0.0, 0.3])
def test_leverages_that_are_all_alike_say_nothing(h):
    for seed in range(20):
        errors = randn(50, 2, seed=seed)
        found = calibrate_errors(errors, torch.full((50, 2), h), None, None)
        assert found.share == 0
        assert_close(found.std(torch.full((1, 2), 1e-5), 1)[0], errors.square().mean(0).sqrt(), **EXACT)


def test_a_calibration_goes_to_a_file_and_back():
    layer = make("cp")
    x = randn(12, *layer.input_shape)
    leverage = fit_leverage(layer, x, None, ALPHA)
    found = calibrate_errors(randn(12, 3), leverage.measure(layer, x), torch.arange(12) // 2, leverage)
    again = Calibration.from_dict(found.as_dict())
    assert torch.equal(again.std(again.leverage.measure(layer, x), 12), found.std(found.leverage.measure(layer, x), 12))
    assert torch.equal(again.quantile(0.5).value, found.quantile(0.5).value)
    assert Calibration.from_dict(calibrate_errors(randn(12, 3), None, None, None).as_dict()).leverage is None


# Ellipses.


def slow_regions(calibration, mean, std, points, coverage):
    """Centers and matrices, point by point."""
    scores, centers, matrices = calibration.scores.flatten(1).numpy(), [], []
    for outputs in map(list, points):
        known = [row[outputs] for row in scores if not np.isnan(row[outputs]).any()]
        shape = sum(np.outer(e, e) for e in known) / len(known)
        lengths = [math.sqrt(e @ np.linalg.solve(shape, e)) for e in scores[:, outputs]]  # NaN where one is missing
        radius, _, _ = slow_quantile(lengths, calibration.groups.tolist(), coverage)
        centers.append(mean[:, outputs])
        matrices.append([radius**2 * np.diag(row[outputs]) @ shape @ np.diag(row[outputs]) for row in std])
    return np.stack(centers, 1), np.stack(matrices, 1)


@pytest.mark.parametrize("points", [[(0, 1)], [(2, 0), (1, 3), (0, 1)], [(3, 0, 1), (0, 1, 2)]], ids=str)
def test_regions_are_those_of_a_loop(points):
    errors = randn(80, 4) @ randn(4, 4, seed=1)
    errors[torch.rand(errors.shape) < 0.2] = NAN
    calibration = calibrate_errors(errors.view(80, 2, 2), None, torch.randint(25, (80,)), None)
    mean, std = randn(6, 4, seed=2), randn(6, 4, seed=3).abs()
    region, radius = calibration.regions(mean, std, points, 0.9)
    expected = slow_regions(calibration, mean.numpy(), std.numpy(), points, Fraction(9, 10))
    assert radius.value.shape == (len(points),)
    np.testing.assert_allclose(region.center, expected[0], rtol=1e-12)
    np.testing.assert_allclose(region.matrix, expected[1], rtol=1e-4)  # a little is added to the diagonal


def test_a_point_that_is_always_hit_has_a_region_of_no_size():
    calibration = calibrate_errors(torch.zeros(30, 2), None, None, None)
    region, _ = calibration.regions(torch.ones(3, 2), calibration.std(None, 3), [(0, 1)], 0.9)
    assert bool((region.matrix == 0).all())


def test_coordinates_that_were_never_known_together_have_a_region_without_end():
    errors = randn(20, 2)
    errors[:10, 0] = errors[10:, 1] = NAN
    region, radius = calibrate_errors(errors, None, None, None).regions(
        torch.zeros(1, 2), torch.ones(1, 2), [(0, 1)], 0.8
    )
    assert not radius.reached
    assert bool((region.matrix.diagonal(dim1=-2, dim2=-1) == math.inf).all())
    assert not region.matrix.isnan().any()


# The estimators, on simulated data.

CORRELATION = 0.6
N = 300


def simulate(n, new=2000, *, seed=3, outputs=2, noise=0.7, spread=0.0, dtype=np.float64):
    """Targets of a weight of rank two, with noise that the outputs share in pairs; n samples, and new ones.

    The features of a sample are as large as a number of its own, whose logarithm has the std ``spread``.
    """
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n + new, 6, 4)) * np.exp(spread * rng.normal(size=(n + new, 1, 1)))
    W = sum(np.einsum("a,b,c->abc", *(rng.normal(size=size) for size in (6, 4, outputs))) for _ in range(2))
    y = np.tensordot(X, W, 2)
    root = np.linalg.cholesky(np.array([[1.0, CORRELATION], [CORRELATION, 1.0]]))
    errors = np.concatenate([rng.normal(size=(n + new, 2)) @ root.T for _ in range(outputs // 2)], 1)
    y = y / y.std(0) + noise * errors
    X, y = X.astype(dtype), (y * np.geomspace(1, 50, outputs)).astype(dtype)  # each in its own unit
    return X[:n], y[:n], X[n:], y[n:]


@pytest.fixture(scope="module")
def fitted():
    """A calibrated estimator, and what it had not seen."""
    X, y, new, true = simulate(N)
    return fit_quietly(TensorRegressor(calibrate=5, **SMALL), X, y), new, true


def inside(interval, true):
    low, high = interval
    return (low <= true) & (true <= high)


def inside_ellipses(region, points):
    """(n, P) for points (n, P, 2)."""
    centers, matrices = region
    away = points - centers
    return np.einsum("npi,npij,npj->np", away, np.linalg.inv(matrices), away) <= 1


def test_intervals_cover_new_samples(fitted):
    model, new, true = fitted
    covered = inside(model.predict_interval(new, 0.9), true).mean(0)
    assert ((covered > 0.84) & (covered < 0.96)).all()
    half = inside(model.predict_interval(new, 0.5), true).mean(0)
    assert ((half > 0.4) & (half < 0.6)).all()


def test_the_std_is_that_of_the_errors(fitted):
    model, new, true = fitted
    mean, std = model.predict(new, return_std=True)
    assert mean.dtype == std.dtype == np.float64
    assert ((true - mean) / std).std(0) == pytest.approx(1, rel=0.15)
    low, high = model.predict_interval(new)
    assert np.allclose(low + high, 2 * mean)
    assert np.allclose(high - low, (high - low)[0] / std[0] * std)


def test_samples_far_from_those_of_the_fit_have_a_larger_std():
    """And larger errors, for few samples: their intervals are wider, and hold."""
    X, y, new, true = simulate(40, noise=0.5, spread=0.7)
    model = fit_quietly(TensorRegressor(calibrate=5, **{**SMALL, "theta": 1.0}), X, y)
    calibration = model.calibration_
    assert calibration.share > 0.2
    mean, std = model.predict(new, return_std=True)
    covered = inside(model.predict_interval(new), true)
    for k, far in enumerate((std > np.quantile(std, 0.75, axis=0)).T):
        errors, deviations = np.abs(true - mean)[:, k], std[:, k]
        assert errors[far].mean() > 1.4 * errors[~far].mean()
        assert deviations[far].mean() > 1.4 * deviations[~far].mean()
        assert covered[far, k].mean() > 0.84
    h = calibration.leverage.measure(model.layer_, torch.from_numpy(new))
    expected = calibration.noise * (1 - calibration.share + calibration.share * h / calibration.mean_leverage)
    assert np.allclose(std, expected.sqrt().numpy())


def test_held_out_errors_are_those_of_fits_that_had_not_seen_them(fitted):
    model, _, _ = fitted
    X, y, _, _ = simulate(N)
    calibration, seen = model.calibration_, []
    hs = torch.zeros(N, 2, dtype=torch.float64)
    for fit in model.cross_fits_:
        rows = torch.as_tensor(fit.rows)
        others = np.setdiff1d(np.arange(N), rows.numpy())
        with torch.no_grad():
            errors = torch.from_numpy(y)[rows] - fit.module(torch.from_numpy(X)[rows])
        again = fit_leverage(fit.module, torch.from_numpy(X)[others], None, model.alpha_)
        hs[rows] = again.measure(fit.module, torch.from_numpy(X)[rows])
        assert_close(fit.leverage.measure(fit.module, torch.from_numpy(X)[rows]), hs[rows], **EXACT)
        std = calibration.std(hs[rows], len(rows))
        assert_close(calibration.scores[rows], errors / std, rtol=1e-6, atol=1e-9)
        seen += rows.tolist()
    assert sorted(seen) == list(range(N))
    assert_close(calibration.mean_leverage, hs.mean(0), **EXACT)
    x = torch.from_numpy(X)
    whole = fit_leverage(model.layer_, x, None, model.alpha_, n=0.8 * N)
    assert_close(calibration.leverage.measure(model.layer_, x), whole.measure(model.layer_, x))


def slow_cross(model, new, coverage, groups=None):
    """CV+ as it is written: every held-out error around the prediction of the fit that had not seen it."""
    calibration = model.calibration_
    scores = calibration.scores.numpy()
    fold_of = {int(row): fold for fold, fit in enumerate(model.cross_fits_) for row in fit.rows}
    predictions = []
    for fit in model.cross_fits_:
        with torch.no_grad():
            x = torch.from_numpy(new)
            h = None if fit.leverage is None else fit.leverage.measure(fit.module, x)
            predictions.append((fit.module(x).numpy(), calibration.std(h, len(x)).numpy()))
    groups = list(range(len(scores))) if groups is None else groups
    low, high = np.zeros(predictions[0][0].shape), np.zeros(predictions[0][0].shape)
    for place in np.ndindex(low.shape):
        lows, highs = [], []
        for i in range(len(scores)):
            mean, std = (part[place] for part in predictions[fold_of[i]])
            reach = abs(scores[(i, *place[1:])]) * std
            lows.append(-(mean - reach))
            highs.append(mean + reach)
        low[place] = -slow_quantile(lows, groups, coverage)[0]
        high[place] = slow_quantile(highs, groups, coverage)[0]
    return low, high


def test_crossed_intervals_are_those_of_a_loop(fitted, monkeypatch):
    model, new, _ = fitted
    found = model.predict_interval(new[:7], 0.9, method="cross")
    np.testing.assert_allclose(found, slow_cross(model, new[:7], Fraction(9, 10)), rtol=1e-9)
    monkeypatch.setattr(regressor_module, "CROSSED_AT_ONCE", 1300)  # two samples
    np.testing.assert_allclose(model.predict_interval(new[:7], 0.9, method="cross"), found, rtol=1e-12)


@pytest.mark.parametrize("factorization", ["cp", "ring"])
def test_crossed_intervals_with_weights_groups_and_missing_targets(factorization):
    X, y, new, _ = simulate(60, new=3)
    y[5:25, 0] = NAN
    weights, groups = np.ones(60), np.arange(60) // 2
    weights[[3, 10, 11, 40]] = 0
    options = SMALL if factorization == "cp" else {**SMALL, "rank": (2, 2, 2)}
    model = fit_quietly(TensorRegressor(factorization, calibrate=3, **options), X, y, weights, groups=groups)
    assert (model.calibration_.leverage is None) == (factorization == "ring")
    assert len(model.calibration_.scores) == 56
    if factorization == "cp":  # for as many samples as the folds' fits had
        n = np.mean([56 - len(fit.rows) for fit in model.cross_fits_])
        x, w = torch.from_numpy(X), torch.from_numpy(weights)
        expected = fit_leverage(model.layer_, x, w, model.alpha_, n=n).measure(model.layer_, x)
        assert_close(model.calibration_.leverage.measure(model.layer_, x), expected)
    expected = slow_cross(model, new, Fraction(4, 5), groups[weights > 0].tolist())
    np.testing.assert_allclose(model.predict_interval(new, 0.8, method="cross"), expected, rtol=1e-9)
    for fit in model.cross_fits_:  # the rows are those of the fit, among the ones that count
        rows = np.flatnonzero(weights > 0)[np.asarray(fit.rows)]
        with torch.no_grad():
            errors = torch.from_numpy(y[rows]) - fit.module(torch.from_numpy(X[rows]))
        assert_close(model.calibration_.scores[fit.rows].sign(), errors.sign(), equal_nan=True)


def test_crossed_intervals_cover_new_samples(fitted):
    model, new, true = fitted
    found = model.predict_interval(new, 0.9, method="cross")
    covered = inside(found, true).mean(0)
    assert ((covered >= 0.8) & (covered < 0.97)).all()
    assert (found[1] - found[0]).mean() < 2 * np.subtract(*model.predict_interval(new)[::-1]).mean()


def test_ellipses_cover_points_and_boxes_do_not(fitted):
    model, new, true = fitted
    centers, matrices = model.predict_region(new)
    assert (centers.shape, matrices.shape) == ((2000, 1, 2), (2000, 1, 2, 2))
    assert np.array_equal(centers[:, 0], model.predict(new))
    covered = inside_ellipses((centers, matrices), true[:, None]).mean()
    assert 0.84 < covered < 0.96
    box = model.predict_interval(new)
    assert inside(box, true).all(1).mean() < covered - 0.03
    assert np.allclose(matrices, matrices.swapaxes(-1, -2), rtol=1e-12, atol=0)
    assert (np.linalg.eigvalsh(matrices) > 0).all()
    deviations = np.sqrt(matrices[:, 0, [0, 1], [0, 1]])
    tilt = matrices[:, 0, 0, 1] / deviations.prod(1)
    assert tilt == pytest.approx(CORRELATION, abs=0.15)
    assert np.allclose(
        deviations[:, 1] / deviations[:, 0], np.divide(*np.std((true - centers[:, 0]), 0)[::-1]), rtol=0.2
    )


def test_ellipses_of_an_estimator_are_those_of_a_loop(fitted):
    model, new, _ = fitted
    mean, std = model.predict(new[:5], return_std=True)
    for points in (None, [(0, 1)], [(1, 0)], np.array([[0, 1], [1, 0]])):
        pairs = [(0, 1)] if points is None else [tuple(map(int, pair)) for pair in points]
        expected = slow_regions(model.calibration_, mean, std, pairs, Fraction(4, 5))
        found = model.predict_region(new[:5], 0.8, points=points)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-9)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-4)


def test_points_of_a_picture_have_their_regions_wherever_the_channels_are():
    """y of shape (n, P, 2): each row of outputs is a point; and any two outputs can be one."""
    X, y, new, true = simulate(120, new=1000, outputs=4)
    y, true = y.reshape(-1, 2, 2), true.reshape(-1, 2, 2)
    first = fit_quietly(TensorRegressor(calibrate=4, **SMALL), X, y)
    last = fit_quietly(TensorRegressor(calibrate=4, channel_axis=-1, **SMALL), X.swapaxes(1, 2), y)
    centers, matrices = found = first.predict_region(new)
    assert matrices.shape == (1000, 2, 2, 2)
    assert np.array_equal(centers, first.predict(new))
    assert (np.abs(inside_ellipses(found, true).mean(0) - 0.9) < 0.07).all()
    moved = new.swapaxes(1, 2)
    for calls in (
        lambda model, x: model.predict_region(x),
        lambda model, x: model.predict(x, return_std=True),
        lambda model, x: model.predict_interval(x, 0.7, method="cross"),
    ):
        for here, there in zip(calls(first, new), calls(last, moved), strict=True):
            np.testing.assert_allclose(here, there, rtol=1e-6)
    across = first.predict_region(new, points=[(3, 0), (0, 1)])
    assert np.array_equal(across[0][:, 0], first.predict(new).reshape(-1, 4)[:, [3, 0]])
    assert np.array_equal(across[1][:, 1], matrices[:, 0])
    assert np.abs(inside_ellipses(across, true.reshape(-1, 4)[:, [[3, 0], [0, 1]]]).mean(0) - 0.9).max() < 0.07


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_errors_on_a_line_have_an_ellipse_that_can_be_inverted(dtype):
    X, y, new, true = simulate(60, new=400, dtype=dtype)
    y[:, 1], true[:, 1] = 2 * y[:, 0] + 1, 2 * true[:, 0] + 1
    found = fit_quietly(TensorRegressor(calibrate=3, **SMALL), X, y).predict_region(new)
    assert (np.linalg.eigvalsh(found[1]) > 0).all()
    assert 0.8 < inside_ellipses(found, true[:, None]).mean() < 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_give_tensors_in_the_precision_of_the_fit(dtype):
    X, y, new, _ = (torch.from_numpy(part).to(dtype) for part in simulate(60, new=20))
    model = fit_quietly(TensorRegressor(calibrate=3, **SMALL), X, y)
    same = fit_quietly(TensorRegressor(calibrate=3, **SMALL), X.numpy(), y.numpy())
    for call in (
        lambda model, x: model.predict(x, return_std=True),
        lambda model, x: model.predict_interval(x, 0.8),
        lambda model, x: model.predict_interval(x, 0.8, method="cross"),
        lambda model, x: model.predict_region(x, 0.8),
    ):
        for tensor, array in zip(call(model, new), call(same, new.numpy()), strict=True):
            assert isinstance(tensor, torch.Tensor)
            assert isinstance(array, np.ndarray)
            assert tensor.dtype == dtype
            assert np.array_equal(tensor.numpy(), array)


def test_a_vector_of_targets_has_vectors_of_ends():
    X, y, new, _ = simulate(60, new=20)
    model = fit_quietly(TensorRegressor(calibrate=3, **SMALL), X, y[:, 0])
    for part in (*model.predict(new, return_std=True), *model.predict_interval(new, method="cross")):
        assert part.shape == (20,)
    with pytest.raises(td.TensorDropoutError, match="got 1 outputs"):
        model.predict_region(new)


def test_half_precision_and_memory_maps_are_predicted_with_intervals(tmp_path, fitted):
    model, new, _ = fitted
    np.save(tmp_path / "new.npy", new[:50].astype(np.float16))
    half = np.load(tmp_path / "new.npy", mmap_mode="r")
    for method in ("held-out", "cross"):
        found = model.predict_interval(half, method=method)
        np.testing.assert_allclose(
            found, model.predict_interval(np.asarray(half, np.float64), method=method), rtol=1e-9
        )


def simulate_people(n, *, seed=1, samples=5):
    """Pictures of people, those of one person nearly alike; what is asked is of the person."""
    rng = np.random.default_rng(seed)
    people = np.repeat(np.arange(n), samples)
    X = rng.normal(size=(n, 30, 4))[people] + 0.05 * rng.normal(size=(len(people), 30, 4))
    return X, rng.normal(size=n)[people] + 0.05 * rng.normal(size=len(people)), people


def test_intervals_that_know_of_groups_cover_new_ones():
    X, y, people = simulate_people(24)
    new, true, _ = simulate_people(200, seed=2)
    found = {}
    for name, groups in (("alone", None), ("together", people)):
        model = fit_quietly(TensorRegressor(calibrate=4, **SMALL), X, y, groups=groups)
        low, high = model.predict_interval(new)
        found[name] = inside((low, high), true).mean(), (high - low).mean(), model.calibration_.quantile(0.9).groups
    assert found["together"][1] > 1.5 * found["alone"][1]
    assert found["together"][0] > max(0.8, found["alone"][0] + 0.2)
    assert (found["alone"][2].item(), found["together"][2].item()) == (120, 24)


def test_a_collapsed_fit_has_the_std_of_the_targets():
    """Under a penalty that leaves no weight at all."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(60, 5, 4)), rng.normal(size=(60, 2))
    model = fit_quietly(TensorRegressor(alpha=1.0, calibrate=3, **SMALL), X, y)
    assert np.allclose(model.coef_, 0, atol=1e-6)
    assert model.predict(X, return_std=True)[1] == pytest.approx(1.0, rel=0.25)


def test_a_collapsed_fit_in_single_precision_has_a_std():
    rng = np.random.default_rng(0)
    X, y = (rng.normal(size=shape).astype(np.float32) for shape in ((60, 5, 4), (60, 2)))
    model = fit_quietly(TensorRegressor(rank=3, alpha=1.0, calibrate=3, random_state=0), X, y)
    assert model.predict(X, return_std=True)[1] == pytest.approx(1.0, rel=0.25)


def test_where_one_fold_is_ridge_no_leverage_is_made_up():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 1))
    y = X * rng.normal(size=3) + rng.normal(size=(60, 3))
    y[7, 0] = NAN  # held out, it leaves complete targets
    model = TensorRegressor(calibrate=5, random_state=1).fit(X, y)
    ridges = [fit.leverage is None for fit in model.cross_fits_]
    held_out = torch.cat([fit.leverage.measure(fit.module, torch.from_numpy(X)[fit.rows])
                          for fit in model.cross_fits_ if fit.leverage is not None])  # fmt: skip
    assert sum(ridges) == 1
    calibration = model.calibration_
    assert calibration.share == 0 or torch.allclose(calibration.mean_leverage, held_out.mean(0))
    assert torch.allclose(calibration.mean_leverage, held_out.mean(0)) or bool((calibration.mean_leverage == 1).all())


# The search.


@pytest.mark.parametrize("outputs", [(2,), (2, 2)], ids=str)
def test_the_search_gives_intervals_and_refuses_crossed_ones(monkeypatch, outputs):
    """Here of one candidate, whose folds can be fitted once more."""
    monkeypatch.setattr(search_module, "search_ridges", lambda *arguments: [])
    caught, calibrate = [], regressor_module.calibrate_errors
    monkeypatch.setattr(regressor_module, "calibrate_errors", lambda *given: caught.append(given) or calibrate(*given))
    X, y, new, true = simulate(90, new=1000, outputs=math.prod(outputs), spread=0.7)
    x, y, true = torch.from_numpy(X), y.reshape(-1, *outputs), true.reshape(-1, *outputs)
    options = {"max_iter": 40, "tol": 1e-2, "random_state": 0}
    search = TensorRegressorCV(ranks=[3], thetas=[1.0], alphas=[1e-3], cv=3, **options)
    model = fit_quietly(search, X, y)
    ((errors, h, groups, leverage),) = caught
    folds = model.held_out_fold_
    rows = np.concatenate([np.flatnonzero(folds == fold) for fold in range(3)])
    np.testing.assert_allclose(errors, (y - model.held_out_["cp"])[rows], rtol=1e-9)
    assert groups.tolist() == rows.tolist()
    for fold in range(3):
        seen, targets = x[folds != fold], torch.from_numpy(y[folds != fold])
        again = TensorRegressor(rank=3, theta=1.0, alpha=model.alpha_, **options)
        layer = fit_quietly(again, seen, targets).layer_
        expected = fit_leverage(layer, seen, None, model.alpha_, targets).measure(layer, x[folds == fold])
        assert_close(h[folds[rows] == fold], expected, rtol=1e-4, atol=1e-9)
    whole = fit_leverage(model.layer_, x, None, model.alpha_, torch.from_numpy(y), n=60)
    assert_close(leverage.measure(model.layer_, x), whole.measure(model.layer_, x))
    assert model.calibration_.share > 0
    assert np.ptp(model.predict(new, return_std=True)[1], axis=0).min() > 0
    assert (np.abs(inside(model.predict_interval(new), true).mean(0) - 0.9) < 0.09).all()
    points = true.reshape(len(true), -1, 2)
    assert (np.abs(inside_ellipses(model.predict_region(new), points).mean(0) - 0.9) < 0.09).all()
    with pytest.raises(td.TensorDropoutError, match=r"only TensorRegressor\(calibrate=\.\.\.\) keeps") as refused:
        model.predict_interval(new, method="cross")
    assert_one_sentence(refused)


def test_ridge_that_won_has_the_same_std_everywhere():
    X, y = make_data((7,), (), n=100, dtype=np.float64, noise=2.0)
    model = TensorRegressorCV(cv=4, random_state=0).fit(X, y)
    assert model.method_ == "flattened ridge"
    assert (model.calibration_.leverage, model.calibration_.share) == (None, 0)
    _, std = model.predict(3 * X, return_std=True)
    errors = y - model.held_out_["flattened ridge"]
    assert (std == std[0]).all()
    assert std[0] == pytest.approx(np.sqrt((errors**2).mean()), rel=0.02)  # the settings may differ by fold


# Too few, and bad input.


@pytest.mark.parametrize("method", ["held-out", "cross", "region"])
def test_few_groups_are_said_and_the_largest_error_is_taken(method):
    X, y, new, _ = simulate(30, new=4)
    model = fit_quietly(TensorRegressor(calibrate=3, **SMALL), X, y, groups=np.arange(30) // 5)
    call = {"region": model.predict_region}.get(method, lambda x, c: model.predict_interval(x, c, method=method))
    with pytest.warns(UserWarning, match=r"6 held-out .* too few for coverage=0\.9, which needs 9"):
        found = call(new, 0.9)
    with pytest.warns(UserWarning, match=r"coverage=0\.99, which needs 99"):
        again = call(new, 0.99)
    assert all(np.array_equal(here, there) for here, there in zip(again, found, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(new, 0.8)


def test_the_warning_of_few_groups_names_the_line_of_the_user():
    X, y, new, _ = simulate(30, new=4)
    model = fit_quietly(TensorRegressor(calibrate=3, **SMALL), X, y, groups=np.arange(30) // 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.predict_interval(new, method="cross")
    assert {each.filename for each in caught} == {__file__}


@pytest.mark.parametrize("coverage", [0, 1, 0.0, 1.0, 1.5, -0.1, NAN, "90%", True, None, [0.9]], ids=repr)
@pytest.mark.parametrize("method", ["predict_interval", "predict_region"])
def test_a_coverage_that_is_no_share_is_refused(fitted, method, coverage):
    model, new, _ = fitted
    with pytest.raises(td.TensorDropoutError, match="coverage is a number between 0 and 1, got") as caught:
        getattr(model, method)(new, coverage)
    assert_one_sentence(caught)


@pytest.mark.parametrize("coverage", [np.float32(0.5), np.float64(0.5)])
def test_a_coverage_may_be_a_number_of_numpy(fitted, coverage):
    model, new, _ = fitted
    assert np.array_equal(model.predict_interval(new, coverage), model.predict_interval(new, 0.5))


@pytest.mark.parametrize("method", ["heldout", "cv+", "", None])
def test_an_unknown_method_is_refused(fitted, method):
    model, new, _ = fitted
    with pytest.raises(td.TensorDropoutError, match="predict_interval: method is 'held-out' or 'cross', got") as caught:
        model.predict_interval(new, method=method)
    assert_one_sentence(caught)


NO_POINTS = [
    [(0, 2)], [(-1, 0)], [(0,)], [(0, 1, 0, 1)], [], [(0, 1), (0, 1, 0)], [(0, 1), (1, 2)], "01",
    (0, 1), 3, [(0, 0.5)], [("x", "y")], [(0, 0)],
]  # fmt: skip


@pytest.mark.parametrize("points", NO_POINTS, ids=repr)
def test_points_that_are_no_pairs_of_outputs_are_refused(fitted, points):
    model, new, _ = fitted
    with pytest.raises(td.TensorDropoutError, match=r"region: points are pairs.* of the outputs 0 to 1") as caught:
        model.predict_region(new, points=points)
    assert_one_sentence(caught)


def test_an_odd_number_of_outputs_is_no_points():
    X, y, new, _ = simulate(40, new=4, outputs=4)
    model = fit_quietly(TensorRegressor(calibrate=2, **SMALL), X, y[:, :3])
    with pytest.raises(td.TensorDropoutError, match=r"pairs.* of the outputs 0 to 2, got 3 outputs") as caught:
        model.predict_region(new, 0.8)
    assert_one_sentence(caught)
    assert model.predict_region(new, 0.8, points=[(0, 2)])[1].shape == (4, 1, 2, 2)
    assert model.predict_region(new, 0.8, points=[(0, 1, 2)])[1].shape == (4, 1, 3, 3)


@pytest.mark.parametrize("method", ["predict_interval", "predict_region"])
def test_an_estimator_without_held_out_errors_is_refused(fitted, method):
    model, new, _ = fitted
    with pytest.raises(NotFittedError):
        getattr(TensorRegressor(), method)(new)
    plain = TensorRegressor.from_layer(model.layer_)
    search = TensorRegressorCV()
    vars(search).update({name: value for name, value in vars(plain).items() if name.endswith("_")})
    cures = (plain, "fit with calibrate=5, or use TensorRegressorCV"), (search, "no held-out errors in this estimator")
    for estimator, cure in cures:
        with pytest.raises(td.TensorDropoutError, match=rf"{type(estimator).__name__}\.{method}: .*{cure}") as caught:
            getattr(estimator, method)(new)
        assert_one_sentence(caught)


def test_no_scores_have_no_quantile_and_a_row_of_them_has_one():
    value, reached, groups = conformal_quantile(torch.zeros(0, 3), torch.zeros(0), 0.9)
    assert (value.tolist(), reached.tolist(), groups.tolist()) == ([math.inf] * 3, [False] * 3, [0] * 3)
    assert float(conformal_quantile(torch.arange(1.0, 20.0), torch.arange(19), 0.9).value) == 18
