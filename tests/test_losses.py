"""Expected losses against the enumeration of all masks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import counterexample
import tensor_dropout as td
from tensor_dropout import reference
from test_moments import LAWS, LAYERS, make


@pytest.mark.parametrize("scaling", ["inverted", "paper"])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("layer", LAYERS)
def test_expected_mse_is_the_average_over_all_masks(layer, law, scaling):
    made, x = make(layer, law, scaling=scaling)
    y = torch.randn(3, *made.output_shape, dtype=torch.float64)
    expected = reference.expected_mse(made, x, y)
    torch.testing.assert_close(td.expected_mse(made, x, y), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("law", ["bernoulli", "replacement", "nested", "gaussian", "bernoulli-min1"])
@pytest.mark.parametrize("layer", ["tucker-vector", "cp-vector", "tt-vector", "tucker-tensor", "tt-tensor"])
def test_its_gradient_is_the_average_gradient(layer, law):
    made, x = make(layer, law)
    y = torch.randn(3, *made.output_shape, dtype=torch.float64)
    parameters = list(made.parameters())
    exact = torch.autograd.grad(td.expected_mse(made, x, y), parameters)
    average = [torch.zeros_like(p) for p in parameters]
    for chance, masks in reference.all_masks(made):
        gradients = torch.autograd.grad(F.mse_loss(made.regress(x, masks), y), parameters)
        for total, gradient in zip(average, gradients, strict=True):
            total += chance * gradient
    for one, other in zip(exact, average, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def counterexample_layer():
    dropout = td.TensorDropout(counterexample.THETA, scaling="paper")
    layer = td.CPRegression((4, 5, 3), 1, 4, bias=False, dtype=torch.float64, dropout=dropout)
    with torch.no_grad():
        for factor, values in zip(layer.factors, [*counterexample.FACTORS, [[1.0] * 4]], strict=True):
            factor.copy_(torch.tensor(values, dtype=torch.float64))
    x = torch.tensor(counterexample.X, dtype=torch.float64)
    return layer, x, torch.tensor(counterexample.Y, dtype=torch.float64).unsqueeze(1)


def test_the_printed_cp_theorem_fails_on_the_counterexample():
    layer, x, y = counterexample_layer()
    truth = reference.expected_mse(layer, x, y)
    assert truth.item() == pytest.approx(85.499, abs=5e-4)
    assert td.expected_mse(layer, x, y).item() == pytest.approx(truth.item(), rel=1e-12)
    assert td.expected_mse(layer, x, y, regularizer="paper").item() == pytest.approx(90.368, abs=5e-4)


def test_the_printed_cp_theorem_holds_on_average_over_white_inputs():
    torch.manual_seed(0)
    dropout = td.TensorDropout(0.7, scaling="paper")
    layer = td.CPRegression((4, 5, 3), 1, 4, bias=False, init="normal", dtype=torch.float64, dropout=dropout)
    x = torch.randn(20_000, 4, 5, 3, dtype=torch.float64)
    exact = layer.moments(x).variance.mean()
    printed = td.losses.printed_moments(layer, x).variance.mean()
    assert printed.item() == pytest.approx(exact.item(), rel=0.05)


def test_the_printed_tucker_theorem_fails_even_on_average_over_white_inputs():
    torch.manual_seed(0)
    dropout = td.TensorDropout(0.7, scaling="paper")
    layer = td.TuckerRegression(
        (4, 5, 3), 1, (3, 3, 2, 1), bias=False, init="normal", dtype=torch.float64, dropout=dropout
    )
    x = torch.randn(20_000, 4, 5, 3, dtype=torch.float64)
    exact = layer.moments(x).variance.mean()
    printed = td.losses.printed_moments(layer, x).variance.mean()
    assert abs(printed / exact - 1) > 0.1
    # Not only the exponent: with the number of dropped modes in its place it is still wrong.
    keep, printed_keep = 0.7**3, 0.7**2
    corrected = printed * keep * (1 - keep) / (printed_keep * (1 - printed_keep))
    assert abs(corrected / exact - 1) > 0.1


def test_the_printed_formula_is_the_printed_one():
    torch.manual_seed(0)
    theta = 0.7
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    for cls, rank, keep in ((td.CPRegression, 3, theta), (td.TuckerRegression, (2, 2, 2), theta**2)):
        dropout = td.TensorDropout(theta, scaling="paper")
        layer = cls((4, 3), 2, rank, init="normal", dtype=torch.float64, dropout=dropout)
        weight = reference.dense_weight(layer, [None] * 3)
        with torch.no_grad():
            squared = cls((4, 3), 2, rank, bias=False, dtype=torch.float64)
            for parameter, other in zip(squared.operands(), layer.operands(), strict=True):
                parameter.copy_(other.square())
        squares = torch.tensordot(x.square(), reference.dense_weight(squared, [None] * 3), dims=2)
        mean, variance = td.losses.printed_moments(layer, x)
        torch.testing.assert_close(mean, keep * torch.tensordot(x, weight, dims=2) + layer.bias, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(variance, keep * (1 - keep) * squares, rtol=1e-6, atol=1e-6)


class Regressor(nn.Module):
    """A backbone, a head, and the reshape with which many regression networks end."""

    def __init__(self, ending=lambda y: y):
        super().__init__()
        self.backbone = nn.Conv2d(2, 4, 3)
        self.head = td.CPRegression((4, 3, 3), 1, 5, dropout=0.7)
        self.ending = ending

    def forward(self, x):
        return self.ending(self.head(self.backbone(x)))


@pytest.mark.parametrize(
    ("ending", "shape"),
    [
        (lambda y: y, (6, 1)),
        (lambda y: y.squeeze(-1), (6,)),
        (lambda y: y.flatten(), (6,)),
        (lambda y: y.reshape(-1), (6,)),
    ],
)
def test_a_whole_network_may_end_in_a_reshape(ending, shape):
    model = Regressor(ending)
    x, y = torch.randn(6, 2, 5, 5), torch.randn(shape)
    features = model.backbone(x)
    expected = td.expected_mse(model.head, features, y.view(6, 1))
    loss = td.expected_mse(model, x, y)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model(x).shape == shape  # and afterwards the network is itself again


@pytest.mark.parametrize(
    "ending", [lambda y: y * 2, lambda y: y[:, 0], torch.relu, lambda y: y.mean(1), lambda y: (y, y)]
)
def test_a_network_that_goes_on_after_its_head_is_refused(ending):
    model = Regressor(ending)
    with pytest.raises(td.TensorDropoutError, match="does not return its tensor regression layer's output"):
        td.expected_mse(model, torch.randn(6, 2, 5, 5), torch.randn(6, 1))
    assert model.head._instead_of_forward is None


def test_a_mistake_of_the_model_stays_what_it_is():
    model = Regressor()
    model.backbone = None
    with pytest.raises(TypeError, match="NoneType"):
        td.expected_mse(model, torch.randn(6, 2, 5, 5), torch.randn(6, 1))


@pytest.mark.parametrize("step", ["before the head", "after the head"])
@pytest.mark.parametrize("kind", [TypeError, AttributeError, td.TensorDropoutError])
def test_a_mistake_of_the_model_about_tuples_stays_what_it_is(step, kind):
    def fail(*_):
        raise kind("a tuple of two images is expected")

    model = Regressor(fail) if step == "after the head" else nn.Sequential(Failing(fail), Regressor())
    with pytest.raises(kind, match=r"^a tuple of two images is expected"):
        td.expected_mse(model, torch.randn(6, 2, 5, 5), torch.randn(6, 1))


class Failing(nn.Module):
    def __init__(self, fail):
        super().__init__()
        self.forward = fail


def test_two_randomized_layers_are_refused_and_one_is_found():
    random, plain = (td.CPRegression((4, 3), (4, 3), 5, dropout=theta) for theta in (0.7, None))
    x, y = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    with pytest.raises(td.TensorDropoutError, match="2 tensor regression layers, 2 of them with dropout"):
        td.expected_mse(nn.Sequential(random, td.CPRegression((4, 3), (4, 3), 5, dropout=0.7)), x, y)
    torch.testing.assert_close(
        td.expected_mse(nn.Sequential(plain, random), x, y), td.expected_mse(random, plain(x), y)
    )
    with pytest.raises(td.TensorDropoutError, match="must be the last step"):
        td.expected_mse(nn.Sequential(random, plain), x, y)
    with pytest.raises(td.TensorDropoutError, match="Linear has no tensor regression layer"):
        td.expected_mse(nn.Linear(3, 3), x, y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(6)}, r"y must have the output's shape \(6, 1\), got \(6,\)"),
        ({"y": torch.zeros(1, 1)}, r"y must have the output's shape \(6, 1\), got \(1, 1\)"),
        ({"y": torch.full((6, 1), torch.nan)}, "y contains NaN or infinity"),
        ({"x": torch.full((6, 4, 3), torch.nan)}, "x contains NaN or infinity"),
        ({"x": torch.full((6, 4, 3), torch.inf)}, "x contains NaN or infinity"),
        ({"regularizer": "none"}, "regularizer is 'exact' or 'paper', got 'none'"),
    ],
)
def test_bad_input_of_expected_mse(change, message):
    layer = td.CPRegression((4, 3), 1, 3, dropout=0.7)
    arguments = {"x": torch.zeros(6, 4, 3), "y": torch.zeros(6, 1), "regularizer": "exact", **change}
    x, y = arguments.pop("x"), arguments.pop("y")
    with pytest.raises(td.TensorDropoutError, match=message):
        td.expected_mse(layer, x, y, **arguments)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (td.TTRegression((4, 3), 1, (2, 1), dropout=td.TensorDropout(0.7, scaling="paper")), "CP and Tucker"),
        (td.CPRegression((4, 3), 1, 3), "CP and Tucker with plain Bernoulli"),
        (td.CPRegression((4, 3), 1, 3, dropout=td.TensorDropout(0.7, law="nested", scaling="paper")), "Bernoulli"),
        (td.CPRegression((4, 3), 1, 3, dropout=td.TensorDropout(0.7, min_rank=1, scaling="paper")), "Bernoulli"),
        (td.CPRegression((4, 3), 1, 3, dropout=0.7), "unscaled masks"),
        (
            td.TuckerRegression((4, 3), 1, (2, 2, 1), dropout=td.TensorDropout(0.7, scaling="paper", modes=(0,))),
            "masks on all modes",
        ),
        (
            td.TuckerRegression((4, 3), 1, (2, 1, 1), dropout=td.TensorDropout(0.7, scaling="paper")),
            "masks on all modes",
        ),
        (
            td.TuckerRegression((4, 3), 2, (2, 2, 2), dropout=td.TensorDropout(0.7, scaling="paper", modes="outer")),
            "use modes='all', or",
        ),
    ],
)
def test_the_printed_formula_is_refused_where_it_is_not_printed(layer, message):
    with pytest.raises(td.TensorDropoutError, match=message):
        td.expected_mse(layer, torch.zeros(6, 4, 3), torch.zeros(6, 1), regularizer="paper")


def monte_carlo_cross_entropy(layer, x, y, n=400):
    with torch.no_grad():
        return torch.stack([F.cross_entropy(layer.regress(x, layer.draw_masks(len(x))), y) for _ in range(n)]).mean()


@pytest.mark.parametrize("theta", [0.95, 0.8])
@pytest.mark.parametrize(
    ("cls", "rank"), [(td.TuckerRegression, (8, 3, 3, 6)), (td.CPRegression, 16), (td.TTRegression, (8, 6, 6))]
)
def test_expected_cross_entropy_is_closer_to_the_average_than_the_mean_network(cls, rank, theta):
    torch.manual_seed(0)
    layer = cls((12, 4, 4), 10, rank, init="normal", dropout=td.TensorDropout(theta, min_rank=1))
    x, y = 4 * torch.randn(32, 12, 4, 4), torch.randint(10, (32,))
    truth = monte_carlo_cross_entropy(layer, x, y)
    approximate = td.expected_cross_entropy(layer, x, y)
    plain = F.cross_entropy(layer.eval()(x), y)
    assert abs(approximate - truth) < 0.25 * abs(plain - truth)


def test_expected_cross_entropy_takes_probabilities_trains_and_vanishes_at_theta_one():
    layer = td.TuckerRegression((12, 4, 4), 10, (8, 3, 3, 6), init="normal", dropout=0.7)
    x, y = torch.randn(32, 12, 4, 4), torch.randint(10, (32,))
    one_hot = F.one_hot(y, 10).float()
    torch.testing.assert_close(td.expected_cross_entropy(layer, x, y), td.expected_cross_entropy(layer, x, one_hot))
    td.expected_cross_entropy(layer, x, y).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())
    layer.dropout.theta = 1.0
    torch.testing.assert_close(td.expected_cross_entropy(layer, x, y), F.cross_entropy(layer.eval()(x), y))


def test_expected_cross_entropy_of_rows_of_any_sum():
    layer = td.CPRegression((6, 3, 3), 5, 8, init="normal", dropout=0.8).double()
    x, y = torch.randn(4, 6, 3, 3, dtype=torch.float64), 3 * torch.rand(4, 5, dtype=torch.float64)
    separate = [td.expected_cross_entropy(layer, x, F.one_hot(torch.full((4,), k), 5).double()) for k in range(5)]
    same = y[:1].expand(4, 5)  # linear in y: a row of any sum is a weighted sum of classes
    expected = sum(weight * loss for weight, loss in zip(same[0], separate, strict=True))
    torch.testing.assert_close(td.expected_cross_entropy(layer, x, same), expected)


def test_expected_cross_entropy_leaves_out_the_rows_that_torch_ignores():
    layer = td.TuckerRegression((6, 3, 3), 5, (4, 2, 2, 4), init="normal", dropout=0.5)
    x, y = torch.randn(8, 6, 3, 3), torch.randint(5, (8,))
    x[1::2] *= 30
    y[1::2] = -100
    torch.testing.assert_close(td.expected_cross_entropy(layer, x, y), td.expected_cross_entropy(layer, x[::2], y[::2]))
    assert td.expected_cross_entropy(layer, x, torch.full_like(y, -100)).isnan()  # as F.cross_entropy


@pytest.mark.parametrize(
    ("outputs", "y", "message"),
    [
        (4, torch.zeros(6, 1, dtype=torch.long), r"class numbers of shape \(6,\)"),
        (4, torch.zeros(6), "probabilities of shape"),
        (4, torch.zeros(6, 3), "probabilities of shape"),
        (4, torch.full((6, 4), torch.nan), "y contains NaN or infinity"),
        ((2, 2), torch.zeros(6, dtype=torch.long), "one output mode"),
    ],
)
def test_bad_input_of_expected_cross_entropy(outputs, y, message):
    layer = td.CPRegression((4, 3), outputs, 3, dropout=0.7)
    with pytest.raises(td.TensorDropoutError, match=message):
        td.expected_cross_entropy(layer, torch.zeros(6, 4, 3), y)


@pytest.mark.parametrize("loss", [td.expected_mse, td.expected_cross_entropy])
def test_a_compiled_step_equals_the_eager_one_and_follows_theta(loss):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(2, 4, 3), td.TuckerRegression((4, 3, 3), 5, (3, 2, 2, 4), dropout=0.7))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 2, 5, 5)
    y = torch.randn(6, 5) if loss is td.expected_mse else torch.randint(5, (6,))
    for theta in (0.7, 0.9):
        model[1].dropout.theta = theta
        torch.testing.assert_close(loss(compiled, x, y), loss(model, x, y))
