"""Fits of the exact expected loss: what they minimize is the average over all masks, and they end at its minimum.

The truth is written here once more, slowly: data are standardized one channel and one target at a time, the loss is the
enumeration of all masks, and its gradient that of autograd or of finite differences.
"""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tensor_dropout as td
from layers_under_test import FORMATS, make_layer
from tensor_dropout import reference
from tensor_dropout.fitting import fit as fit_module
from tensor_dropout.fitting import statistics
from tensor_dropout.fitting.fit import Prepared, Setting, fit, fit_many
from tensor_dropout.fitting.lbfgs import minimize
from tensor_dropout.fitting.objective import ExpectedLoss
from tensor_dropout.sklearn.defaults import build_layer

EXACT = {"rtol": 1e-9, "atol": 1e-9}
ALPHA = 1e-2
TO_THE_END = {"max_iter": 500, "tol": 1e-11}
# (format, input_shape, output_shape, rank, modes): the masks are few enough to be listed.
SHAPES = {
    "cp": ("cp", (4, 3, 2), (3,), 4, "all"),
    "cp-tensor": ("cp", (4, 3), (2, 3), 3, "all"),
    "cp-scalar": ("cp", (4, 3), (1,), 3, "all"),
    "tucker": ("tucker", (4, 3, 2), (3,), (2, 1, 2, 2), "all"),
    "tucker-one-mode": ("tucker", (4, 3, 2), (3,), (3, 2, 2, 2), (0,)),
    "tucker-tensor": ("tucker", (4, 3), (2, 3), (2, 2, 2, 2), "outer"),
    "tt": ("tt", (4, 3, 2), (3,), (2, 2, 2), "all"),
    "tt-tensor": ("tt", (4, 3), (2, 3), (2, 3, 2), (1, 3)),
    "tt-vector": ("tt", (5,), (3,), (3,), "all"),
    "ring": ("ring", (4, 3, 2), (3,), (2, 2, 2, 2), "outer"),
    "ring-tensor": ("ring", (4, 3), (2, 3), (2, 1, 2, 2), "all"),
}
LAWS = ("bernoulli", "bernoulli-min1", "replacement", "gaussian", "nested")
# The laws, the scalings and what is solved for take turns over the shapes.
IN_TURN = [
    pytest.param(shape, LAWS[n % len(LAWS)], ("inverted", "paper")[n % 2], id=f"{shape}-{LAWS[n % len(LAWS)]}")
    for n, shape in enumerate(SHAPES)
]
every_shape = pytest.mark.parametrize(("shape", "law", "scaling"), IN_TURN)
every_format = pytest.mark.parametrize("format", FORMATS)
solved_or_searched = pytest.mark.parametrize("eliminate", [True, False], ids=["solved", "searched"])


def make(shape, law="bernoulli", **options):
    format, inputs, outputs, rank, modes = SHAPES[shape]
    made = {"input_shape": inputs, "output_shape": outputs, "rank": rank, "modes": modes, "dtype": torch.float64}
    return make_layer(format, law=law, **{**made, **options})


def make_data(layer, n=14, *, seed=1, noise=0.5):
    """Features whose channels depend on one another, and targets of a linear map; nothing is standardized."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    C = layer.input_shape[0]
    spatial = [1] * (len(layer.input_shape) - 1)
    x = torch.einsum("cd,nd...->nc...", randn(C, C), randn(n, *layer.input_shape))
    x = x * (0.2 + randn(C).abs()).view(-1, *spatial) + 3 * randn(C).view(-1, *spatial)
    y = torch.tensordot(x, randn(*layer.weight_shape), dims=len(layer.input_shape))
    y = y / y.std() + noise * randn(n, *layer.output_shape)
    return x, y * (0.5 + 3 * randn(*layer.output_shape[-1:]).abs()) + 5 * randn(*layer.output_shape)


def make_labels(layer, n=14, *, seed=1):
    """Features, and the class that a linear map gives each of them, three of them at random."""
    x, y = make_data(layer, n, seed=seed)
    labels = (y - y.mean(0)).div(y.std(0)).argmax(-1)
    labels[:3] = torch.arange(3) % layer.output_shape[0]
    return x, F.one_hot(labels, layer.output_shape[0]).double()


# The truth.


def equal_weights(x):
    return torch.full((len(x),), 1 / len(x), dtype=torch.float64)


def moments_of(values, weights):
    """Mean and std of some numbers, (n, ...), each sample with its weight; NaN does not count."""
    shares = weights.view(-1, *[1] * (values.ndim - 1)).expand_as(values)[~values.isnan()]
    known = values[~values.isnan()]
    mean = (shares * known).sum() / shares.sum()
    return mean, ((shares * (known - mean) ** 2).sum() / shares.sum()).sqrt()


def standardize(layer, x, y, weights, task="regression"):
    """The layer that does for standardized data what it does for these, with its features and its targets."""
    twin, x, y = copy.deepcopy(layer), x.clone(), y.clone()
    plain = twin(x).detach()
    name, axis = twin.channel_parameter
    with torch.no_grad():
        channels = twin.get_parameter(name).movedim(axis, 0)
        for c in range(x.shape[1]):
            mean, std = moments_of(x[:, c], weights)
            assert_close(twin.center[c], mean, **EXACT)
            x[:, c] = (x[:, c] - mean) / std
            channels[c] *= std
        twin.set_center(None)
        if task == "regression":
            stds = y.new_zeros(y.shape[1:])
            for place in itertools.product(*map(range, y.shape[1:])):
                mean, stds[place] = moments_of(y[:, *place], weights)
                y[:, *place] -= mean
                twin.bias[place] -= mean
                plain[:, *place] -= mean
            last = stds.square().flatten(0, -2).mean(0).sqrt() if stds.ndim > 1 else stds
            scales = [(stds / last).square().mean(1).sqrt(), last] if stds.ndim > 1 else [last]
            std = math.prod([scales[0][:, None], last]) if stds.ndim > 1 else last
            y, plain = y / std, plain / std
            twin.scale_outputs_(*(1 / scale for scale in scales))
            twin.bias /= std
    assert_close(twin(x), plain, **EXACT)
    return twin, x, y


def enumerated_mse(layer, x, y, weights):
    """The mean squared error over all masks; of missing targets none."""
    shares = (weights.view(-1, *[1] * (y.ndim - 1)) * ~y.isnan()).to(y)
    shares = shares / shares.sum()
    losses = (
        chance * (shares * (reference.regress(layer, x, masks) - y.nan_to_num()).square()).sum()
        for chance, masks in reference.all_masks(layer)
    )
    return sum(losses, torch.zeros(()))


def expected_cross_entropy(layer, x, y, weights):
    """The loss that the library offers for training, sample by sample."""
    losses = [td.expected_cross_entropy(layer, x[n : n + 1], y[n : n + 1]) for n in range(len(x))]
    return (weights * torch.stack(losses)).sum()


def squared_norms(layer):
    return sum(parameter.square().sum() for name, parameter in layer.named_parameters() if name != "bias")


def objective(layer, x, y, *, alpha=ALPHA, weights=None, task="regression"):
    """What a fit minimizes, of a layer that takes x as it came; and that layer's twin for standardized data."""
    weights = equal_weights(x) if weights is None else (weights / weights.sum()).double()
    layer = layer.eval()
    twin, x, y = standardize(layer, x, y, weights, task)
    loss = enumerated_mse if task == "regression" else expected_cross_entropy
    return loss(twin, x, y, weights) + alpha * squared_norms(twin), twin


def gradients(layer, x, y, **options):
    """The gradient of the true objective by each parameter, of standardized data."""
    value, twin = objective(layer, x, y, **options)
    names, parameters = zip(*twin.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


class CaughtError(Exception):
    pass


def problem_of(run):
    """What a fit minimizes, and from where."""
    caught = []

    def catch(problems, start, **options):
        caught.append((problems, start.clone()))
        raise CaughtError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_module, "minimize", catch)
        with pytest.raises(CaughtError):
            run()
    return caught[0]


def fitted(layer, x, y, weights=None, *, task="regression", alpha=ALPHA, seed=0, **options):
    """A copy of the layer that was fitted, and how it ended."""
    layer = copy.deepcopy(layer)
    ended, _ = fit(layer, Prepared(x, y, weights, task), alpha=alpha, seed=seed, **options)
    return layer, ended


# The objective.


@solved_or_searched
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_objective_is_the_average_over_all_masks(shape, law, eliminate):
    scaling = ("inverted", "paper")[(list(SHAPES).index(shape) + LAWS.index(law)) % 2]
    layer = make(shape, law, scaling=scaling)
    x, y = make_data(layer)
    layer, ended = fitted(layer, x, y, max_iter=3, eliminate=eliminate)
    expected, twin = objective(layer, x, y)
    assert ended.loss_curve[-1] == pytest.approx(expected.item(), rel=1e-9)
    assert expected < 0.999 * ended.loss_curve[0]
    _, x, y = standardize(layer, x, y, equal_weights(x))
    closed = td.expected_mse(twin, x, y) + ALPHA * squared_norms(twin)
    assert ended.loss_curve[-1] == pytest.approx(closed.item(), rel=1e-9)


@every_format
@pytest.mark.parametrize("theta", [None, 1.0])
def test_without_masks_it_is_that_of_the_layer(format, theta):
    layer = make(format, theta=theta)
    x, y = make_data(layer)
    layer, ended = fitted(layer, x, y, max_iter=3)
    _, twin = objective(layer, x, y)
    _, x, y = standardize(layer, x, y, equal_weights(x))
    expected = F.mse_loss(twin(x), y) + ALPHA * squared_norms(twin)
    assert ended.loss_curve[-1] == pytest.approx(expected.item(), rel=1e-9)


@every_format
@pytest.mark.parametrize("law", ["bernoulli", "gaussian"])
def test_the_objective_is_the_average_over_drawn_masks(format, law):
    """At ranks whose masks nobody could list."""
    shapes = {"input_shape": (12, 3, 3), "output_shape": (4,)}
    rank = {"cp": 20, "tucker": (10, 3, 3, 4), "tt": (10, 6, 4), "ring": (4, 3, 3, 3)}[format]
    layer = make_layer(format, law=law, rank=rank, dtype=torch.float64, **shapes)
    x, y = make_data(layer, n=40)
    layer, ended = fitted(layer, x, y, alpha=1e-3, max_iter=10)
    twin, x, y = standardize(layer.eval(), x, y, equal_weights(x))
    with torch.no_grad():
        draws = torch.stack([F.mse_loss(twin.regress(x, twin.draw_masks()), y) for _ in range(600)])
        plain = F.mse_loss(twin(x), y)
        found = ended.loss_curve[-1] - 1e-3 * squared_norms(twin)
    error = draws.std() / math.sqrt(len(draws))
    assert error < 0.1 * (found - plain)  # so much do the masks add
    assert abs(draws.mean() - found) < 4 * error


@solved_or_searched
def test_without_norms_the_linear_system_may_be_singular(eliminate):
    layer = make_layer("cp", input_shape=(9,), output_shape=(4,), rank=4, theta=None, dtype=torch.float64)
    x, y = make_data(layer, n=4)  # three dimensions are left of the features, and four ranks
    layer, ended = fitted(layer, x, y, alpha=0.0, max_iter=30, eliminate=eliminate)
    expected, _ = objective(layer, x, y, alpha=0.0)
    assert ended.loss_curve[-1] == pytest.approx(expected.item(), abs=1e-6)
    assert ended.loss_curve[-1] < 0.05  # four points and their four ranks


# Its gradient.


def check_gradient(layer, x, y, weights=None, *, task="regression", eliminate=True, step=1e-4):
    """Along some directions, of what L-BFGS sees against the true objective of the layers at both ends."""
    prepared = Prepared(x, y, weights, task)
    options = {"alpha": ALPHA, "seed": 3, "eliminate": eliminate}
    problems, z = problem_of(lambda: fit(copy.deepcopy(layer), prepared, **options))
    generator = torch.Generator().manual_seed(5)
    z = z + 0.1 * torch.randn(z.shape, generator=generator, dtype=torch.float64)
    f, g = problems.evaluate(z)

    def true_objective(z):
        filled = copy.deepcopy(layer)
        ended, _ = fit(filled, prepared, start=z, max_iter=0, **options)
        value = objective(filled, x, y, weights=weights, task=task)[0].item()
        assert ended.loss_curve == [pytest.approx(value, rel=1e-9)]
        return value

    assert f.tolist() == [pytest.approx(true_objective(z), rel=1e-9)]
    for direction in torch.randn(3, *z.shape, generator=generator, dtype=torch.float64):
        slope = (true_objective(z + step * direction) - true_objective(z - step * direction)) / (2 * step)
        assert float((g * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-6)


@solved_or_searched
@every_shape
def test_the_gradient_is_that_of_the_average_over_all_masks(shape, law, scaling, eliminate):
    layer = make(shape, law, scaling=scaling)
    check_gradient(layer, *make_data(layer), eliminate=eliminate)


@every_format
def test_the_gradient_with_weights(format):
    layer = make(format)
    x, y = make_data(layer)
    weights = torch.rand(len(x), dtype=torch.float64)
    weights[2] = 0
    check_gradient(layer, x, y, weights)


@every_format
def test_the_gradient_with_missing_targets(format):
    layer = make(format)
    x, y = make_data(layer)
    y[torch.rand(y.shape) < 0.2] = torch.nan
    check_gradient(layer, x, y, torch.rand(len(x), dtype=torch.float64))


@pytest.mark.parametrize(
    ("format", "law"), list(zip(FORMATS, ("bernoulli", "gaussian", "nested", "replacement"), strict=True))
)
def test_the_gradient_of_cross_entropy(format, law):
    layer = make(format, law)
    check_gradient(layer, *make_labels(layer), torch.rand(14, dtype=torch.float64), task="classification")


@every_format
def test_many_problems_have_the_gradients_of_each(format):
    layer = make(format, "nested")
    x, y = make_data(layer)
    halves = torch.tensor([[2.0, 0.0], [0.0, 2.0]], dtype=torch.float64).repeat_interleave(7, 1) / 14
    settings = [Setting(half, theta, ALPHA, seed=0) for half in halves for theta in (0.5, 0.9)]
    problems, z = problem_of(lambda: fit_many(layer, x, y, settings, "regression"))
    f, g = problems.evaluate(z)
    assert len(f) == 4
    direction = torch.randn_like(z)
    ahead, behind = (problems.evaluate(z + step * direction)[0] for step in (1e-4, -1e-4))
    assert_close((g * direction).sum(1), (ahead - behind) / 2e-4, rtol=1e-5, atol=1e-6)


@solved_or_searched
@pytest.mark.parametrize("shape", ["cp-tensor", "tucker", "tt", "ring"])
def test_some_of_the_problems_are_evaluated_as_all_of_them_are(shape, eliminate):
    layer = make(shape, "nested")
    x, y = make_data(layer, n=18)
    settings, _ = make_settings(18)
    problems, z = problem_of(lambda: fit_many(layer, x, y, settings, "regression", eliminate=eliminate))
    f, g = problems.evaluate(z)
    assert f.unique().numel() == len(settings)
    for which in ([3], [0, 4, 5], [2, 1]):
        some_f, some_g = problems.evaluate(z[which], torch.tensor(which))
        assert_close(some_f, f[which], **EXACT)
        assert_close(some_g, g[which], **EXACT)


@pytest.mark.parametrize("shape", [name for name in SHAPES if SHAPES[name][0] != "ring"])
def test_the_output_parameter_that_was_solved_for_is_the_best_one(shape):
    """At any point, not only at the end."""
    layer = make(shape, "nested")
    x, y = make_data(layer)
    layer, _ = fitted(layer, x, y, max_iter=0)
    found = gradients(layer, x, y)
    solved = {layer.output_parameter[0], "bias"}
    for name, gradient in found.items():
        assert (gradient.norm() < 1e-9) == (name in solved), name


# The end.


@every_shape
def test_at_the_end_the_true_gradient_is_zero(shape, law, scaling):
    layer = make(shape, law, scaling=scaling)
    x, y = make_data(layer)
    layer, ended = fitted(layer, x, y, **TO_THE_END)
    assert ended.converged
    assert ended.loss_curve[-1] < 0.95  # the targets' variance is 1: this is not the zero weight
    for name, gradient in gradients(layer, x, y).items():
        assert gradient.abs().max() < 2e-5, name


@pytest.mark.parametrize(("shape", "seed"), [("cp", 1), ("tucker-one-mode", 0), ("tt-vector", 0), ("cp-scalar", 0)])
def test_the_end_is_the_same_where_the_output_parameter_is_searched(shape, seed):
    """From a start that is in the same valley for both: CP of rank four has several minima."""
    layer = make(shape)
    x, y = make_data(layer)
    (_, solved), (searched_layer, searched) = (
        fitted(layer, x, y, seed=seed, eliminate=eliminate, **TO_THE_END) for eliminate in (True, False)
    )
    assert searched.loss_curve[-1] == pytest.approx(solved.loss_curve[-1], rel=1e-5)
    assert searched.loss_curve[0] > solved.loss_curve[0]
    for name, gradient in gradients(searched_layer, x, y).items():
        assert gradient.abs().max() < 2e-5, name


def test_the_scale_of_the_data_does_not_matter():
    layer = make("tucker-tensor")
    x, y = make_data(layer)
    first, ended = fitted(layer, x, y, max_iter=15)
    scale = torch.tensor([0.01, 1, 30, 2], dtype=torch.float64).view(-1, 1)
    target_scale = torch.tensor([7, 0.1, 1], dtype=torch.float64)
    second, other = fitted(layer, x * scale - 2, y * target_scale + 4, max_iter=15)
    assert_close(other.loss_curve, ended.loss_curve, rtol=1e-6, atol=0)
    expected = first.eval()(x) * target_scale + 4
    assert_close(second.eval()(x * scale - 2), expected, rtol=1e-4, atol=1e-4)


# Classification.


@every_format
@pytest.mark.parametrize("law", ["bernoulli", "nested"])
def test_the_cross_entropy_is_the_one_that_the_library_trains_with(format, law):
    layer = make(format, law)
    x, y = make_labels(layer)
    layer, ended = fitted(layer, x, y, task="classification", max_iter=8)
    twin, x, y = standardize(layer.eval(), x, y, equal_weights(x), "classification")
    expected = td.expected_cross_entropy(twin, x, y.argmax(-1)) + ALPHA * squared_norms(twin)
    assert ended.loss_curve[-1] == pytest.approx(expected.item(), rel=1e-9)
    assert ended.loss_curve[-1] < 0.9 * ended.loss_curve[0]


@pytest.mark.parametrize("format", ["cp", "tucker"])
def test_the_cross_entropy_ends_where_its_gradient_is_zero(format):
    layer = make(format)
    x, y = make_labels(layer, n=30)
    layer, ended = fitted(layer, x, y, task="classification", **TO_THE_END)
    assert ended.converged
    assert ended.loss_curve[-1] < 0.9 * math.log(3)
    for name, gradient in gradients(layer, x, y, task="classification").items():
        assert gradient.abs().max() < 2e-5, name


def share_of_what_masks_add(format, law, theta):
    """The true average of the cross-entropy over all masks, less that without masks, over what the fit says of it."""
    rank = {"cp": 6, "tucker": (3, 2, 3), "tt": (3, 3), "ring": (2, 2, 2)}[format]
    shapes = {"input_shape": (4, 3), "output_shape": (3,), "rank": rank}
    layer = make_layer(format, law=law, theta=theta, dtype=torch.float64, **shapes)
    x, y = make_labels(layer, n=60)
    y[:20] = F.one_hot(torch.arange(20) % 3, 3)  # whatever the features are
    layer, ended = fitted(layer, x, y, task="classification", max_iter=40)
    twin, x, y = standardize(layer.eval(), x, y, equal_weights(x), "classification")
    with torch.no_grad():
        losses = [
            chance * F.cross_entropy(reference.regress(twin, x, masks), y)
            for chance, masks in reference.all_masks(twin)
        ]
        plain = F.cross_entropy(twin(x), y)
        said = ended.loss_curve[-1] - ALPHA * squared_norms(twin) - plain
    assert said > 0.01 * plain
    return float((sum(losses) - plain) / said)


@every_format
def test_the_cross_entropy_is_close_to_the_average_over_masks(format):
    """It is of second order in the spread of the logits. What it leaves out vanishes with the spread of Gaussian masks.

    Bernoulli masks keep a third order, of the same power of 1 - θ as the second, which is small for small logits.
    """
    wide, narrow = (abs(share_of_what_masks_add(format, "gaussian", theta) - 1) for theta in (0.8, 0.95))
    assert wide < 0.2
    assert narrow < 0.06
    assert narrow < 0.5 * wide or narrow < 0.01
    assert abs(share_of_what_masks_add(format, "bernoulli", 0.8) - 1) < 0.2


def test_a_weighted_sum_of_classes_is_a_target():
    layer = make("cp")
    x, labels = make_labels(layer)
    soft = 0.8 * labels + 0.2 / 3
    weights = torch.rand(14, dtype=torch.float64)
    layer, ended = fitted(layer, x, soft, weights, task="classification", max_iter=8)
    expected, _ = objective(layer, x, soft, weights=weights, task="classification")
    assert ended.loss_curve[-1] == pytest.approx(expected.item(), rel=1e-9)


# Missing targets and weights.


@every_shape
def test_missing_targets_do_not_count(shape, law, scaling):
    layer = make(shape, law, scaling=scaling)
    x, y = make_data(layer)
    y[torch.rand(y.shape) < 0.25] = torch.nan
    layer, ended = fitted(layer, x, y, max_iter=5)
    expected, _ = objective(layer, x, y)
    assert ended.loss_curve[-1] == pytest.approx(expected.item(), rel=1e-9)


def test_a_fit_with_missing_targets_ends_where_its_gradient_is_zero():
    layer = make("cp-tensor")
    x, y = make_data(layer)
    y[torch.rand(y.shape) < 0.2] = torch.nan
    weights = torch.rand(14, dtype=torch.float64)
    layer, ended = fitted(layer, x, y, weights, **TO_THE_END)
    assert ended.converged
    for name, gradient in gradients(layer, x, y, weights=weights).items():
        assert gradient.abs().max() < 2e-5, name


def test_a_sample_without_any_target_teaches_nothing_but_its_features():
    layer = make("cp-tensor")
    x, y = make_data(layer)
    y[3] = torch.nan
    layer, ended = fitted(layer, x, y, max_iter=5)
    twin, x, y = standardize(layer.eval(), x, y, equal_weights(x))
    known = torch.arange(14) != 3
    expected = td.expected_mse(twin, x[known], y[known]) + ALPHA * squared_norms(twin)
    assert ended.loss_curve[-1] == pytest.approx(expected.item(), rel=1e-9)


def test_a_target_that_is_never_known_leaves_the_others_as_they_are():
    layer = make("cp-tensor")
    x, y = make_data(layer)
    y[:, 1, 2] = torch.nan
    layer, ended = fitted(layer, x, y, max_iter=20)
    assert layer.eval()(x).isfinite().all()
    residuals = (layer(x) - y)[~y.isnan()].square().mean()
    assert residuals < (y - y.nanmean(0))[~y.isnan()].square().mean()
    assert ended.loss_curve[-1] < ended.loss_curve[0]


CURVES = {"rtol": 1e-6, "atol": 0}
"""Equal sums in another order differ in their last digits, and the iterations carry that on."""


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("shape", ["cp", "tucker", "tt", "ring"])
def test_whole_weights_are_repeated_samples(shape, task):
    layer = make(shape)
    x, y = make_data(layer) if task == "regression" else make_labels(layer)
    counts = torch.tensor([1, 2, 3, 1, 4, 2, 1, 1, 2, 3, 1, 1, 2, 1])
    first, weighted = fitted(layer, x, y, counts.double(), task=task, max_iter=12)
    again, repeated = fitted(
        layer, x.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0), task=task, max_iter=12
    )
    plain, equal = fitted(layer, x, y, task=task, max_iter=12)
    assert_close(weighted.loss_curve, repeated.loss_curve, **CURVES)
    assert_close(first.eval()(x), again.eval()(x), rtol=1e-4, atol=1e-4)
    assert abs(equal.loss_curve[-1] / weighted.loss_curve[-1] - 1) > 1e-3
    assert not torch.allclose(plain.eval()(x), first(x), atol=0.01)


def test_whole_weights_are_as_exact_as_others():
    layer = make("cp")
    x, y = make_data(layer)
    counts = torch.arange(1, 15)
    assert_close(Prepared(x, y, counts, "regression").weights, counts.double() / counts.sum(), rtol=1e-12, atol=0)


@solved_or_searched
@pytest.mark.parametrize("C", [4, 60], ids=["few channels", "many channels"])
def test_samples_of_weight_zero_are_not_there(C, eliminate):
    layer = make_layer("cp", input_shape=(C, 2), output_shape=(3,), rank=4, dtype=torch.float64)
    x, y = make_data(layer)
    weights = torch.ones(14, dtype=torch.float64)
    weights[[0, 5, 6]] = 0
    seen = weights > 0
    x[~seen], y[~seen] = 1e3 * x[~seen], -1e3
    first, weighted = fitted(layer, x, y, weights, max_iter=12, eliminate=eliminate)
    again, absent = fitted(layer, x[seen], y[seen], max_iter=12, eliminate=eliminate)
    assert_close(weighted.loss_curve, absent.loss_curve, **CURVES)
    assert_close(first.eval()(x[seen]), again.eval()(x[seen]), rtol=1e-4, atol=1e-4)


def test_weights_of_any_sum_are_alike():
    layer = make("tt")
    x, y = make_data(layer)
    weights = torch.rand(14, dtype=torch.float64)
    _, one = fitted(layer, x, y, weights, max_iter=10)
    _, other = fitted(layer, x, y, 64 * weights, max_iter=10)
    assert one.loss_curve == other.loss_curve


def test_one_sample_that_counts():
    layer = make("cp")
    x, y = make_data(layer)
    weights = torch.zeros(14, dtype=torch.float64)
    weights[4] = 2.5
    layer, ended = fitted(layer, x, y, weights, max_iter=20)
    assert_close(layer.eval()(x[4:5]), y[4:5], rtol=1e-6, atol=1e-6)
    assert ended.loss_curve[-1] < 1e-6


# Seeds and precisions.


@pytest.mark.parametrize("many", [False, True], ids=["fit", "fit_many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_seeds_give_equal_bits(dtype, many):
    layer = make("tucker", dtype=dtype)
    x, y = (part.to(dtype) for part in make_data(layer))

    def run(seed):
        torch.rand(int(torch.randint(1, 9, ())))  # torch's own generator is somewhere else
        if not many:
            return fitted(layer, x, y, seed=seed, max_iter=30)
        return fit_many(layer, x, y, [Setting(equal_weights(x), 0.7, ALPHA, seed)], "regression", max_iter=30)[0]

    (one, ended), (same, again), (_, elsewhere) = run(1), run(1), run(2)
    assert ended.loss_curve == again.loss_curve
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), same.parameters(), strict=True))
    assert ended.loss_curve[0] != elsewhere.loss_curve[0]


def test_a_seed_leaves_the_generator_alone_and_none_takes_it():
    layer = make("cp")
    x, y = make_data(layer)
    state = torch.get_rng_state()
    fitted(layer, x, y, seed=4, max_iter=2)
    assert torch.equal(torch.get_rng_state(), state)
    drawn = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        drawn.append(fitted(layer, x, y, seed=None, max_iter=2)[1].loss_curve)
    assert drawn[0] == drawn[1] != drawn[2]


def planted(n=150, held_out=200):
    """Targets from a weight of rank two, with a noise of a third of their spread."""
    generator = torch.Generator().manual_seed(2)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    W = torch.einsum("cr,hr,wr,or->chwo", randn(8, 2), randn(3, 2), randn(3, 2), randn(2, 2))
    x = randn(n + held_out, 8, 3, 3)
    y = torch.tensordot(x, W, dims=3)
    noise = y.std() / 3
    y = y + noise * randn(*y.shape)
    return (x[:n], y[:n]), (x[n:], y[n:]), noise


@torch.no_grad()
def error_of(layer, x, y):
    return float((layer.eval()(x) - y).square().mean().sqrt())


@pytest.mark.parametrize(("format", "rank"), [("cp", 12), ("tucker", (8, 3, 3, 2)), ("tt", (8, 4, 2))])
def test_seeds_and_precisions_end_alike_at_generous_ranks(format, rank):
    """Of a narrow rank the minima differ, and seeds with them."""
    train, test, noise = planted()
    errors = []
    for dtype, seed in ((torch.float64, 0), (torch.float32, 0), (torch.float32, 1)):
        layer = build_layer(format, (8, 3, 3), (2,), rank, 0.7, "auto", "bernoulli", dtype=dtype)
        layer, _ = fitted(layer, *(part.to(dtype) for part in train), seed=seed, alpha=1e-3, tol=1e-3, max_iter=100)
        assert all(parameter.dtype == dtype for parameter in layer.parameters())
        errors.append(error_of(layer, *(part.to(dtype) for part in test)))
    double, single, other_seed = errors
    assert abs(single / double - 1) < 0.005
    assert abs(other_seed / single - 1) < 0.015
    assert max(errors) < 1.2 * noise


# Many fits at once.


def compare_many(layer, x, y, settings, rows, *, task="regression", **options):
    """Every problem of one program against a fit of its own on the rows that it sees."""
    together = fit_many(layer, x, y, settings, task, **options)
    assert len(together) == len(settings)
    for setting, own, (filled, many) in zip(settings, rows, together, strict=True):
        alone = copy.deepcopy(layer)
        alone.dropout.theta = setting.theta
        alone, one = fitted(
            alone, x[own], y[own], setting.weights[own], task=task, alpha=setting.alpha, seed=setting.seed, **options
        )
        assert_close(many.loss_curve, one.loss_curve, **CURVES)
        assert (many.n_iter, many.converged) == (one.n_iter, one.converged)
        assert float(filled.dropout.theta) == pytest.approx(setting.theta)
        assert_close(filled.eval()(x), alone.eval()(x), rtol=1e-4, atol=1e-4)
    return together


def make_settings(n):
    """Thetas and alphas on two subsets of the rows, one of them with weights."""
    subsets = [torch.arange(n) % 3 != 0, torch.arange(n) % 4 != 1]
    weights = [subset.double() for subset in subsets]
    weights[1] = weights[1] * torch.linspace(0.5, 2, n, dtype=torch.float64)
    weights = [each / each.sum() for each in weights]
    chosen = list(itertools.product((0, 1), ((0.5, 1e-2, 0), (0.8, 1e-3, 1), (1.0, 1e-1, 0))))
    settings = [Setting(weights[k], theta, alpha, seed) for k, (theta, alpha, seed) in chosen]
    return settings, [subsets[k] for k, _ in chosen]


@pytest.mark.parametrize(
    ("shape", "law", "eliminate"),
    [
        ("cp", "bernoulli", True),
        ("cp-tensor", "gaussian", False),
        ("tucker", "nested", True),
        ("tucker-tensor", "bernoulli-min1", True),
        ("tt", "replacement", True),
        ("tt-tensor", "bernoulli", False),
        ("ring", "nested", True),
    ],
)
def test_many_fits_are_those_of_each_alone(shape, law, eliminate):
    layer = make(shape, law)
    x, y = make_data(layer, n=18)
    settings, rows = make_settings(18)
    together = compare_many(layer, x, y, settings, rows, max_iter=10, tol=1e-3, eliminate=eliminate)
    assert len({ended.loss_curve[-1] for _, ended in together}) == len(settings)


def test_many_fits_end_each_in_its_own_time():
    layer = make("cp")
    x, y = make_data(layer, n=18)
    settings, rows = make_settings(18)
    together = compare_many(layer, x, y, settings, rows, max_iter=40, tol=0.02)
    assert len({ended.n_iter for _, ended in together}) > 2
    assert all(ended.converged for _, ended in together)


def test_many_fits_of_classes():
    layer = make("tt", "gaussian")
    x, y = make_labels(layer, n=18)
    compare_many(layer, x, y, *make_settings(18), task="classification", max_iter=10)


def test_many_fits_with_missing_targets():
    layer = make("cp-tensor")
    x, y = make_data(layer, n=18)
    y[torch.rand(y.shape) < 0.15] = torch.nan
    compare_many(layer, x, y, *make_settings(18), max_iter=10)


@pytest.mark.parametrize("largest", [0, statistics.LARGEST_AXES])
def test_many_fits_of_many_channels(largest, monkeypatch):
    """The subsets span different numbers of axes."""
    monkeypatch.setattr(statistics, "LARGEST_AXES", largest)
    layer = make_layer("tucker", input_shape=(40, 2), output_shape=(3,), rank=(4, 2, 3), dtype=torch.float64)
    x, y = make_data(layer, n=18)
    settings, rows = make_settings(18)
    compare_many(layer, x, y, settings, rows, max_iter=10)


def test_many_fits_go_in_groups_and_say_how_far_they_are(monkeypatch):
    layer = make("cp")
    x, y = make_data(layer, n=18)
    settings, _ = make_settings(18)
    whole = fit_many(layer, x, y, settings, "regression", max_iter=10)
    monkeypatch.setattr(fit_module, "_side_by_side", lambda *_: 4)
    monkeypatch.setattr(fit_module, "MADE_AT_ONCE", 500)  # five samples of four problems
    done = []
    parts = fit_many(layer, x, y, settings, "regression", max_iter=10, report=done.append)
    assert done == [4, 2]
    for (_, one), (_, other) in zip(whole, parts, strict=True):
        assert_close(one.loss_curve, other.loss_curve, **CURVES)


# Coordinates.


def channel_weight(layer):
    name, axis = layer.channel_parameter
    return layer.get_parameter(name).detach().movedim(axis, 0).flatten(1)


@pytest.mark.parametrize("C", [5, 40], ids=["few channels", "many channels"])
@pytest.mark.parametrize(("constant", "value"), [("LARGEST_AXES", 0), ("WHITENING", 1e-3), ("WHITENING", 1e3)])
@every_format
def test_the_coordinates_do_not_change_the_objective(format, constant, value, C, monkeypatch):
    rank = {"cp": 4, "tucker": (3, 2, 3), "tt": (3, 3), "ring": (2, 2, 2)}[format]
    layer = make_layer(format, input_shape=(C, 2), output_shape=(3,), rank=rank, dtype=torch.float64)
    x, y = make_data(layer, n=12)
    _, usual = fitted(layer, x, y, max_iter=3)
    monkeypatch.setattr(statistics, constant, value)
    layer, ended = fitted(layer, x, y, max_iter=3)
    expected, _ = objective(layer, x, y)
    assert ended.loss_curve[-1] == pytest.approx(expected.item(), rel=1e-9)
    assert ended.loss_curve[-1] != pytest.approx(usual.loss_curve[-1], rel=1e-6)  # it went another way
    if C == 5 or constant == "WHITENING":  # from the same start: of the features' span alone
        assert ended.loss_curve[0] == pytest.approx(usual.loss_curve[0], rel=1e-9)


@pytest.mark.parametrize("C", [5, 40], ids=["few channels", "many channels"])
def test_the_coordinates_do_not_change_the_minimum(C, monkeypatch):
    layer = make_layer("cp", theta=0.8, input_shape=(C, 2), output_shape=(2,), rank=4, dtype=torch.float64)
    x, y = make_data(layer, n=8)
    first, turned = fitted(layer, x, y, **TO_THE_END)
    monkeypatch.setattr(statistics, "LARGEST_AXES", 0)
    second, plain = fitted(layer, x, y, **TO_THE_END)
    assert turned.converged
    assert plain.converged
    assert plain.loss_curve[-1] == pytest.approx(turned.loss_curve[-1], rel=1e-6)
    fresh, _ = make_data(layer, n=20, seed=9)
    assert_close(second.eval()(fresh), first.eval()(fresh), rtol=2e-3, atol=2e-3)


def test_a_factor_stays_in_the_span_of_the_features():
    layer = make_layer("tt", input_shape=(40, 2), output_shape=(3,), rank=(3, 3), dtype=torch.float64)
    x, y = make_data(layer, n=6)
    layer, _ = fitted(layer, x, y, max_iter=10)
    twin, x, _ = standardize(layer.eval(), x, y, equal_weights(x))
    span = x.movedim(1, 0).flatten(1)  # (40, 12), of rank 12 at most
    found = channel_weight(twin)
    assert_close(span @ torch.linalg.lstsq(span, found, driver="gelsd").solution, found, rtol=1e-6, atol=1e-6)
    assert found.norm() > 0.1


@solved_or_searched
@every_format
def test_blocks_of_samples_change_nothing(format, eliminate, monkeypatch):
    layer = make(format)
    x, y = make_data(layer, n=17)
    weights = torch.rand(17, dtype=torch.float64)
    first, whole = fitted(layer, x, y, weights, max_iter=10, eliminate=eliminate)
    monkeypatch.setattr(statistics, "BLOCK", 80)  # numbers: three samples
    monkeypatch.setattr(statistics, "SOLVED_AT_ONCE", 24)  # positions: four samples
    prepared = Prepared(x, y, weights, "regression")
    assert [block.shape[1] for block in prepared.projection.blocks] == [4, 4, 3, 3, 3]
    second, parts = fitted(layer, x, y, weights, max_iter=10, eliminate=eliminate)
    assert_close(parts.loss_curve, whole.loss_curve, **CURVES)
    assert_close(second.eval()(x), first.eval()(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("task", "eliminate"),
    [("regression", True), ("regression", False), ("classification", True)],
    ids=["solved", "searched", "classes"],
)
@every_format
def test_samples_that_are_read_anew_in_every_iteration_are_the_same(format, task, eliminate):
    layer = make(format)
    x, y = make_data(layer, n=17) if task == "regression" else make_labels(layer, n=17)
    weights = torch.rand(17, dtype=torch.float64)
    first, whole = fitted(layer, x, y, weights, task=task, max_iter=6, eliminate=eliminate)
    prepared, second = Prepared(x, y, weights, task, batch_size=5), copy.deepcopy(layer)
    parts, _ = fit(second, prepared, alpha=ALPHA, seed=0, max_iter=6, eliminate=eliminate)
    assert_close(parts.loss_curve, whole.loss_curve, **CURVES)
    assert_close(second.eval()(x), first.eval()(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("C", [1, 40], ids=["one channel", "many channels"])
def test_stored_samples_of_half_precision_in_a_file(C, tmp_path):
    layer = make_layer("cp", input_shape=(C, 4), output_shape=(3,), rank=3)
    x, y = make_data(layer, n=17)
    np.save(tmp_path / "x.npy", x.half().numpy())
    stored = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="c"))
    first, whole = fitted(layer, x.half(), y.float(), max_iter=10)
    second = copy.deepcopy(layer)
    parts, _ = fit(second, Prepared(stored, y.float(), None, "regression", 5), alpha=ALPHA, seed=0, max_iter=10)
    assert_close(parts.loss_curve, whole.loss_curve, rtol=1e-3, atol=0)
    assert_close(second.eval()(x.float()), first.eval()(x.float()), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("block", [20, statistics.BLOCK])
def test_the_scales_are_those_of_one_channel_and_one_target_at_a_time(block, monkeypatch):
    monkeypatch.setattr(statistics, "BLOCK", block)
    x = 100 + torch.randn(9, 4, 5, dtype=torch.float64)
    y = 3 * torch.randn(9, 2, 3, dtype=torch.float64) + torch.arange(6.0).view(2, 3)
    y[1, 0, 0] = y[3:6, 1, 2] = torch.nan
    weights = torch.rand(9, dtype=torch.float64)
    weights /= weights.sum()
    scale, target = statistics.channel_scale(x, weights), statistics.target_scale(y, weights)
    for c in range(4):
        assert_close(torch.stack([scale.mean[c], scale.std[c]]), torch.stack(moments_of(x[:, c], weights)), **EXACT)
    stds = torch.zeros(2, 3, dtype=torch.float64)
    for place in itertools.product(range(2), range(3)):
        mean, stds[place] = moments_of(y[:, *place], weights)
        assert_close(target.mean[place], mean, **EXACT)
    last = stds.square().mean(0).sqrt()
    first = (stds / last).square().mean(1).sqrt()
    assert_close(target.modes, (first, last), **EXACT)
    assert_close(target.std, first[:, None] * last, **EXACT)
    assert_close(target.left, stds / target.std, **EXACT)


@pytest.mark.parametrize(("n", "C"), [(20, 5), (3, 30)], ids=["few channels", "many channels"])
def test_principal_axes_are_orthogonal_and_uncorrelated(n, C):
    x = torch.randn(n, C, 4, dtype=torch.float64) * torch.linspace(0.1, 5, C, dtype=torch.float64)[:, None]
    x = torch.einsum("cd,nds->ncs", torch.randn(C, C, dtype=torch.float64), x) + 2
    weights = torch.rand(n, dtype=torch.float64)
    weights /= weights.sum()
    scale = statistics.channel_scale(x, weights)
    axes = statistics.principal_axes(x, scale, weights)
    r = axes.stretch.numel()
    assert r == min(C, 4 * n if n > C else 4 * n - 1)  # the weighted mean is taken away
    turn = axes.basis * scale.std[:, None] / axes.stretch
    assert_close(turn.mT @ turn, torch.eye(r, dtype=torch.float64), **EXACT)
    coordinates = torch.cat(statistics.to_axes(x, scale, axes), 1) / axes.stretch[:, None, None]  # (r, n, 4)
    covariance = torch.einsum("ans,n,bns->ab", coordinates, weights, coordinates) / 4
    assert_close(covariance, covariance.diagonal().diag(), rtol=0, atol=1e-9)
    standard = (x - scale.mean[:, None]) / scale.std[:, None]
    assert_close(torch.einsum("ca,ans->ncs", turn, coordinates), standard, rtol=1e-7, atol=1e-7)  # nothing is lost


# Data of every kind.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_features_of_half_precision_are_read_as_they_are(dtype):
    layer = make("tucker", dtype=torch.float32)
    x, y = make_data(layer)
    x, y = x.to(dtype), y.float()
    first, half = fitted(layer, x, y, max_iter=15)
    second, single = fitted(layer, x.float(), y, max_iter=15)
    assert half.loss_curve == single.loss_curve
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))
    assert half.loss_curve[-1] < 0.9 * half.loss_curve[0]


@every_format
def test_a_constant_channel_gets_no_weight(format):
    layer = make(format)
    x, y = make_data(layer)
    x[:, 2] = 7.3
    layer, _ = fitted(layer, x, y, max_iter=60)
    found = channel_weight(layer).norm(dim=1)
    assert found[2] < 1e-6 * found.max()
    other = x.clone()
    other[:, 2] = 9
    assert_close(layer.eval()(other), layer(x), rtol=1e-4, atol=1e-4)


def test_the_std_of_a_channel_that_hardly_varies_is_floored():
    x = torch.randn(20, 5, 3, dtype=torch.float64)
    x[:, 1] *= 1e-7
    std = statistics.channel_scale(x, equal_weights(x)).std
    usual = [float(moments_of(x[:, c], equal_weights(x))[1]) for c in (0, 2, 3, 4)]
    assert_close(std[[0, 2, 3, 4]].tolist(), usual)
    assert 0.008 < float(std[1]) < 0.012


@pytest.mark.parametrize("value", [0.0, 2.5])
def test_features_that_do_not_vary_give_the_mean(value):
    layer = make("cp")
    _, y = make_data(layer)
    x = torch.full((14, 4, 3, 2), value, dtype=torch.float64)
    layer, _ = fitted(layer, x, y, max_iter=30)
    assert_close(layer.eval()(x), y.mean(0).expand_as(y), rtol=1e-6, atol=1e-6)


@every_format
@solved_or_searched
def test_one_channel(format, eliminate):
    rank = {"cp": 4, "tucker": (1, 3, 2, 3), "tt": (1, 2, 3), "ring": (2, 2, 2, 2)}[format]
    layer = make_layer(format, input_shape=(1, 5, 4), output_shape=(3,), rank=rank, dtype=torch.float64)
    x, y = make_data(layer)
    layer, ended = fitted(layer, x, y, max_iter=5, eliminate=eliminate)
    expected, _ = objective(layer, x, y)
    assert ended.loss_curve[-1] == pytest.approx(expected.item(), rel=1e-9)
    assert ended.loss_curve[-1] < 0.99


@every_format
@solved_or_searched
def test_more_channels_than_samples_and_places(format, eliminate):
    rank = {"cp": 4, "tucker": (3, 2, 3), "tt": (3, 3), "ring": (2, 2, 2)}[format]
    layer = make_layer(format, input_shape=(50, 2), output_shape=(3,), rank=rank, dtype=torch.float64)
    x, y = make_data(layer, n=6)
    layer, ended = fitted(layer, x, y, max_iter=5, eliminate=eliminate)
    expected, _ = objective(layer, x, y)
    assert ended.loss_curve[-1] == pytest.approx(expected.item(), rel=1e-9)


def test_constant_targets_are_their_constant():
    layer = make("cp")
    x, y = make_data(layer)
    y[:, 1] = 4.5
    layer, _ = fitted(layer, x, y, max_iter=60)
    found = layer.eval()(x)
    assert_close(found[:, 1], y[:, 1], rtol=1e-5, atol=1e-5)
    assert (found - y)[:, [0, 2]].square().mean() < (y - y.mean(0))[:, [0, 2]].square().mean()


def test_a_layer_without_a_bias_is_refused_as_it_cannot_hold_the_mean_of_the_targets():
    layer = make("cp", bias=False)
    with pytest.raises(td.TensorDropoutError, match="use bias=True"):
        fitted(layer, *make_data(layer), max_iter=5)


# How it goes.


def test_the_curve_falls_and_is_reported():
    layer = make("tt")
    x, y = make_data(layer)
    seen = []
    _, ended = fitted(layer, x, y, max_iter=25, tol=0.0, report=lambda *each: seen.append(each))
    assert [iteration for iteration, _ in seen] == list(range(1, 26))
    assert [loss for _, loss in seen] == ended.loss_curve[1:]
    assert all(after < before for before, after in itertools.pairwise(ended.loss_curve))
    assert (ended.n_iter, ended.converged, ended.interrupted) == (25, False, False)


@pytest.mark.parametrize("tol", [0.1, 5e-3, 1e-5])
@every_format
def test_it_ends_as_soon_as_ten_iterations_gain_less_than_the_tolerance(format, tol):
    layer = make(format)
    x, y = make_data(layer)
    _, ended = fitted(layer, x, y, max_iter=400, tol=tol)
    curve = ended.loss_curve
    assert ended.converged
    assert len(curve) == ended.n_iter + 1 < 400
    gains = [(curve[k - 10] - curve[k]) / curve[k] for k in range(10, len(curve))]
    assert gains[-1] <= tol
    assert all(gain > tol for gain in gains[:-1])


def test_no_iterations_only_fill_the_layer():
    layer = make("cp")
    x, y = make_data(layer)
    layer, ended = fitted(layer, x, y, max_iter=0)
    assert (ended.n_iter, ended.converged, len(ended.loss_curve)) == (0, False, 1)
    assert ended.loss_curve[0] == pytest.approx(objective(layer, x, y)[0].item(), rel=1e-9)


@pytest.mark.parametrize("at", [1, 6])
@solved_or_searched
def test_an_interrupted_fit_keeps_the_best_so_far(at, eliminate):
    def interrupt(iteration, loss):
        if iteration == at:
            raise KeyboardInterrupt

    layer = make("tucker")
    x, y = make_data(layer)
    prepared, whole = Prepared(x, y, None, "regression"), copy.deepcopy(layer)
    options = {"alpha": ALPHA, "eliminate": eliminate, "tol": 0.0}
    ended, z = fit(layer, prepared, seed=0, max_iter=20, report=interrupt, **options)
    assert ended.interrupted
    assert not ended.converged
    assert at - 1 <= ended.n_iter <= at
    uninterrupted, _ = fit(whole, prepared, seed=0, max_iter=20, **options)
    assert ended.loss_curve == uninterrupted.loss_curve[: len(ended.loss_curve)]
    assert at <= len(ended.loss_curve) <= at + 1
    value = objective(layer, x, y)[0].item()
    assert value == pytest.approx(min(ended.loss_curve), rel=1e-9)
    resumed, _ = fit(layer, prepared, start=z, max_iter=20, **options)
    assert resumed.loss_curve[0] == pytest.approx(value, rel=1e-9)
    assert resumed.loss_curve[-1] < value


def test_many_fits_that_are_interrupted_say_so(monkeypatch):
    layer = make("cp")
    x, y = make_data(layer, n=18)
    usual, steps = ExpectedLoss.evaluate, []

    def evaluate(self, *given):
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return usual(self, *given)

    monkeypatch.setattr(ExpectedLoss, "evaluate", evaluate)
    with pytest.raises(KeyboardInterrupt):
        fit_many(layer, x, y, make_settings(18)[0], "regression", max_iter=9)
    assert len(steps) == 3


@pytest.mark.parametrize(
    ("format", "eliminate"), [("cp", True), ("cp", False), ("tucker", True), ("tt", False), ("ring", False)]
)
def test_a_fit_goes_on_from_an_earlier_one(format, eliminate):
    layer = make(format)
    x, y = make_data(layer)
    prepared = Prepared(x, y, None, "regression")
    options = {"tol": 1e-4, "max_iter": 300, "eliminate": eliminate}
    first, z = fit(layer, prepared, alpha=ALPHA, seed=0, **options)
    kept = z.clone()
    again, _ = fit(layer, prepared, alpha=ALPHA, start=z, **options)
    assert torch.equal(z, kept)
    assert again.loss_curve[0] == pytest.approx(first.loss_curve[-1], rel=1e-9)
    assert again.loss_curve[-1] <= again.loss_curve[0]
    assert again.n_iter < first.n_iter / 2
    cold, _ = fit(layer, prepared, alpha=1.1 * ALPHA, seed=0, **options)
    warm, _ = fit(layer, prepared, alpha=1.1 * ALPHA, start=z, **options)
    assert warm.n_iter < cold.n_iter
    assert warm.loss_curve[0] < cold.loss_curve[0]
    assert warm.loss_curve[-1] <= 1.001 * cold.loss_curve[-1]


# The minimizer itself.


class Quadratics:
    """``½ (z - m)ᵀ A (z - m) + c`` with eigenvalues from 1 to the condition."""

    def __init__(self, conditions, N=12, dtype=torch.float64):
        generator = torch.Generator().manual_seed(3)
        randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        turns = torch.linalg.qr(randn(len(conditions), N, N))[0]
        spectra = torch.stack([torch.logspace(0, math.log10(c), N, dtype=torch.float64) for c in conditions])
        self.A = (turns @ torch.diag_embed(spectra) @ turns.mT).to(dtype)
        self.m = randn(len(conditions), N).to(dtype)
        self.start = 3 * randn(len(conditions), N).to(dtype)
        self.seen, self.asked = [], []

    def evaluate(self, z, which):
        self.seen.append(z.clone())
        self.asked.append(which.tolist())
        away = z - self.m[which]
        g = torch.einsum("pnm,pm->pn", self.A[which], away)
        return 1 + 0.5 * (g * away).sum(-1).double(), g

    def values(self, z):
        return self.evaluate(z, torch.arange(len(z)))[0]


class Rosenbrock:
    """``Σ 100 (z₂ - z₁²)² + (1 - z₁)²`` over pairs, its valley turned from problem to problem by a shift."""

    def __init__(self, starts):
        self.start = torch.tensor(starts, dtype=torch.float64)

    def evaluate(self, z, which):
        a, b = z[:, ::2], z[:, 1::2]
        f = (100 * (b - a.square()).square() + (1 - a).square()).sum(-1)
        g = torch.stack([-400 * a * (b - a.square()) - 2 * (1 - a), 200 * (b - a.square())], dim=-1)
        return f, g.flatten(1)


class Barriers:
    """``-Σ log z + c z``, which is infinite where z is not positive: the minimum is 1/c."""

    def __init__(self, slopes):
        self.c = torch.tensor(slopes, dtype=torch.float64)[:, None]

    def evaluate(self, z, which):
        f = torch.where((z > 0).all(-1), (self.c[which] * z - z.log()).sum(-1), torch.inf)
        return f, self.c[which] - 1 / z


def test_quadratics_of_every_condition_end_at_their_minimum():
    problems = Quadratics([1.0, 10.0, 1e3, 1e5])
    ended = minimize(problems, problems.start, max_iter=400, tol=1e-15)
    assert ended.converged.all()
    assert_close(ended.curve[-1], torch.ones(4, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert_close(ended.z, problems.m, rtol=1e-5, atol=1e-5)
    assert ended.n_iter[0] < ended.n_iter[2]
    assert ended.n_iter[2] < 150
    assert not ended.interrupted


def test_the_minimizer_leaves_the_start_as_it_was():
    problems = Quadratics([5.0])
    start = problems.start.clone()
    ended = minimize(problems, problems.start, max_iter=5, tol=0.0)
    assert torch.equal(problems.start, start)
    assert_close(ended.curve[0], problems.values(start), rtol=0, atol=0)
    assert_close(ended.curve[-1], problems.values(ended.z), rtol=1e-12, atol=0)


def test_each_curve_falls_and_stays_once_its_problem_is_done():
    problems = Quadratics([10.0, 1e2, 1e4])
    ended = minimize(problems, problems.start, max_iter=300, tol=1e-6)
    assert ended.n_iter.unique().numel() == 3
    for p in range(3):
        n = int(ended.n_iter[p])
        own, rest = ended.curve[: n + 1, p], ended.curve[n:, p]
        assert (own.diff() <= 0).all()
        assert (own[:6].diff() < 0).all()
        assert torch.equal(rest, rest[:1].expand_as(rest))
    assert_close(ended.curve[-1], problems.values(ended.z), rtol=1e-12, atol=0)


def test_neighbours_do_not_matter():
    problems = Quadratics([3.0, 2e3, 50.0])
    together = minimize(problems, problems.start, max_iter=40, tol=1e-9)
    for p in range(3):
        alone = Quadratics([3.0, 2e3, 50.0])
        alone.A, alone.m = alone.A[p : p + 1], alone.m[p : p + 1]
        ended = minimize(alone, alone.start[p : p + 1], max_iter=40, tol=1e-9)
        assert (int(ended.n_iter), bool(ended.converged)) == (int(together.n_iter[p]), bool(together.converged[p]))
        assert_close(together.z[p], ended.z[0], rtol=1e-6, atol=1e-6)


def test_the_valley_of_rosenbrock_is_followed_to_its_end():
    problems = Rosenbrock([[-1.2, 1.0, -1.2, 1.0], [5.0, -3.0, 0.0, 2.0], [1.0, 1.0, 0.0, 0.0]])
    ended = minimize(problems, problems.start, max_iter=300, tol=1e-12)
    assert_close(ended.z, torch.ones_like(ended.z), rtol=1e-5, atol=1e-5)
    assert (ended.curve[1:] <= ended.curve[:-1]).all()


def test_steps_that_leave_the_domain_are_shortened():
    problems = Barriers([1.0, 1e-2, 1e2])
    ended = minimize(problems, torch.full((3, 4), 0.5, dtype=torch.float64), max_iter=200, tol=1e-14)
    assert_close(ended.z, (1 / problems.c).expand(3, 4), rtol=1e-4, atol=0)
    assert ended.curve.isfinite().all()


def test_single_precision_ends_as_near_as_it_can():
    problems = Quadratics([10.0, 1e3], dtype=torch.float32)
    ended = minimize(problems, problems.start, max_iter=300, tol=1e-7)
    assert ended.z.dtype == torch.float32
    assert ended.curve.dtype == torch.float64
    assert ended.converged.all()
    assert_close(ended.curve[-1], torch.ones(2, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_a_start_at_the_minimum_stays_there():
    problems = Quadratics([10.0, 10.0])
    start = problems.start.clone()
    start[0] = problems.m[0]
    ended = minimize(problems, start, max_iter=100, tol=1e-12)
    assert torch.equal(ended.z[0], problems.m[0])
    assert ended.converged.all()
    assert_close(ended.z[1], problems.m[1], rtol=1e-4, atol=1e-4)


def test_the_minimizer_stops_at_the_last_iteration_and_reports_each():
    problems = Quadratics([1e4, 1e4])
    seen = []
    ended = minimize(
        problems, problems.start, max_iter=7, tol=0.0, report=lambda k, f, *_: seen.append((k, f.tolist()))
    )
    assert not ended.converged.any()
    assert ended.n_iter.tolist() == [7, 7]
    assert ended.curve.shape == (8, 2)
    assert seen == [(k, ended.curve[k].tolist()) for k in range(1, 8)]


def test_an_interrupt_while_evaluating_keeps_the_best_so_far():
    problems = Quadratics([1e3])
    usual = problems.evaluate

    def evaluate(z, which):
        if len(problems.seen) == 9:
            raise KeyboardInterrupt
        return usual(z, which)

    problems.evaluate = evaluate
    ended = minimize(problems, problems.start, max_iter=100, tol=0.0)
    problems.evaluate = usual
    assert ended.interrupted
    assert not ended.converged.any()
    values = [float(problems.values(z)) for z in list(problems.seen)]
    assert float(ended.curve[-1]) == pytest.approx(float(problems.values(ended.z)), rel=1e-12)
    assert float(ended.curve[-1]) < float(ended.curve[0])
    assert float(ended.curve[-1]) <= sorted(values)[1]  # a trial that was not yet judged may be lower


def test_after_a_line_without_a_step_the_next_is_along_steepest_descent():
    problems = Quadratics([50.0])
    usual, reached, tried = problems.evaluate, [], []

    def evaluate(z, which):
        f, g = usual(z, which)
        if len(reached) == 4:  # nothing falls in the fifth iteration
            return torch.full_like(f, torch.inf), g
        if len(reached) == 5:
            tried.append(z.clone())
        return f, g

    problems.evaluate = evaluate
    ended = minimize(problems, problems.start, max_iter=30, tol=1e-9, report=lambda k, f, z: reached.append(z.clone()))
    assert torch.equal(reached[4], reached[3])
    step, downhill = tried[0] - reached[4], -usual(reached[4], torch.tensor([0]))[1]
    assert float(F.cosine_similarity(step, downhill)) == pytest.approx(1, abs=1e-9)
    assert_close(ended.curve[-1], torch.ones(1, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_what_cannot_fall_is_given_up_where_it_is():
    """Uphill whatever the gradient says: two lines without a step are enough."""
    problems = Quadratics([10.0, 10.0])
    usual = problems.evaluate

    def evaluate(z, which):
        f, g = usual(z, which)
        return f, torch.where((which == 0)[:, None], -g, g)

    problems.evaluate = evaluate
    ended = minimize(problems, problems.start, max_iter=50, tol=1e-9)
    assert torch.equal(ended.z[0], problems.start[0])
    assert int(ended.n_iter[0]) == 2
    assert ended.converged.all()
    assert_close(ended.z[1], problems.m[1], rtol=1e-3, atol=1e-3)


def test_what_is_done_is_not_evaluated_again():
    problems = Quadratics([1.0, 1e4])
    ended = minimize(problems, problems.start, max_iter=300, tol=1e-6)
    assert ended.n_iter[0] < ended.n_iter[1]
    together = [k for k, which in enumerate(problems.asked) if 0 in which]
    assert problems.asked[0] == [0, 1]
    assert len(together) < 0.5 * len(problems.asked)
    assert problems.asked[-1] == [1]


def test_more_memory_takes_fewer_iterations():
    problems = Quadratics([1e3], N=40)
    short, long = (minimize(problems, problems.start, max_iter=400, tol=1e-9, history=h) for h in (2, 20))
    assert long.converged.all()
    assert int(long.n_iter) < int(short.n_iter)


@pytest.mark.parametrize("S", [1, 5])
def test_a_large_mean_does_not_cancel_the_digits_of_the_std(S):
    x = torch.randn(60, 4, S, dtype=torch.float64) * 10
    weights = equal_weights(x)
    far = x + torch.tensor([0.0, 1.7e9, -1e12, 1e3], dtype=torch.float64)[:, None]
    expected, found = statistics.channel_scale(x, weights), statistics.channel_scale(far, weights)
    assert_close(found.std, expected.std, rtol=1e-4, atol=0)
    assert torch.equal(found.std[0], expected.std[0])  # what needs no second look is left as it was
