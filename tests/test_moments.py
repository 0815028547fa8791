"""Exact moments against the enumeration of all masks, in float64."""

import itertools

import pytest
import torch

import tensor_dropout as td
from tensor_dropout import reference
from tensor_dropout.layers import moments as moments_module

LAWS = {
    "bernoulli": {},
    "bernoulli-min1": {"law": "bernoulli", "min_rank": 1},
    "bernoulli-min2": {"law": "bernoulli", "min_rank": 2},
    "replacement": {"law": "replacement"},
    "gaussian": {"law": "gaussian"},
    "nested": {"law": "nested"},
    "nested-min2": {"law": "nested", "min_rank": 2},
}
# (layer, input_shape, output_shape, rank, the mode subsets that are dropped)
LAYERS = {
    "tucker-scalar": (td.TuckerRegression, (3, 2, 2), 1, (2, 2, 2, 1), ["all", (0,), (1, 2), (0, 2)]),
    "tucker-vector": (td.TuckerRegression, (3, 2, 2), 2, (2, 2, 1, 2), ["all", (0,), (3,), (0, 3), (1,)]),
    "tucker-tensor": (td.TuckerRegression, (3, 2), (2, 2), (2, 2, 2, 2), ["all", (0,), (2,), (0, 3), (2, 3)]),
    "tucker-features": (td.TuckerRegression, (4,), 3, (3, 2), ["all", (0,), (1,)]),
    "cp-scalar": (td.CPRegression, (3, 2, 2), 1, 3, ["all"]),
    "cp-vector": (td.CPRegression, (3, 2, 2), 3, 3, ["all"]),
    "cp-tensor": (td.CPRegression, (3, 2), (2, 2), 3, ["all"]),
    "tt-scalar": (td.TTRegression, (3, 2, 2), 1, (2, 2, 1), ["all", (1,), (2,)]),
    "tt-vector": (td.TTRegression, (3, 2, 2), 2, (2, 2, 2), ["all", (1,), (3,), (1, 3)]),
    "tt-tensor": (td.TTRegression, (3, 2), (2, 2), (2, 3, 2), ["all", (2,), (3,), (1, 3)]),
    "tt-features": (td.TTRegression, (4,), 3, (2,), ["all"]),
    "ring-scalar": (td.TensorRingRegression, (3, 2, 2), 1, (2, 2, 2, 3), ["all", (0,), (1, 3)]),
    "ring-vector": (td.TensorRingRegression, (3, 2, 2), 2, (2, 2, 3, 2), ["all", (0,), (3,), (0, 3), (1, 2)]),
    "ring-tensor": (td.TensorRingRegression, (3, 2), (2, 2), (2, 2, 3, 2), ["all", (0,), (2,), (0, 3)]),
    "ring-outputs": (td.TensorRingRegression, (3,), (2, 2, 2), (2, 2, 2, 2), ["all", (2, 3)]),
    "ring-features": (td.TensorRingRegression, (4,), 3, (2, 3), ["all", (0,), (1,)]),
}
# Of layer, law and scaling every two meet: a layer sees nothing of the other two but the moments of a mask.
CASES = [
    pytest.param(layer, law, modes, ("inverted", "paper")[(k + n + m) % 2], id=f"{layer}-{law}-{modes}")
    for (k, layer), (n, law) in itertools.product(enumerate(LAYERS), enumerate(LAWS))
    for m, modes in enumerate(LAYERS[layer][4])
]


def make(layer, law, modes="all", **options):
    cls, inputs, outputs, rank, _ = LAYERS[layer]
    torch.manual_seed(3)
    dropout = td.TensorDropout(0.7, modes=modes, **LAWS[law], **options)
    made = cls(inputs, outputs, rank, init="normal", dtype=torch.float64, dropout=dropout)
    return made, torch.randn(3, *inputs, dtype=torch.float64) + 0.5


@pytest.mark.parametrize(("layer", "law", "modes", "scaling"), CASES)
def test_moments_equal_the_enumeration(layer, law, modes, scaling):
    made, x = make(layer, law, modes, scaling=scaling)
    mean, covariance = reference.mean_and_covariance(made, x)
    exact = made.moments(x)
    torch.testing.assert_close(exact.mean.flatten(1), mean, atol=1e-10, rtol=1e-10)
    variance = covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(exact.variance.flatten(1), variance, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(made.eval()(x).flatten(1), mean, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("law", "rank"), [("bernoulli", (8, 2)), ("gaussian", (2, 8)), ("nested", (8, 8))])
def test_moments_of_a_ring_of_rank_eight_equal_the_enumeration(law, rank):
    torch.manual_seed(3)
    dropout = td.TensorDropout(0.7, **LAWS[law])
    layer = td.TensorRingRegression((8,), 9, rank, init="normal", dtype=torch.float64, dropout=dropout)
    x = torch.randn(2, 8, dtype=torch.float64)
    mean, covariance = reference.mean_and_covariance(layer, x)
    found = layer.moments(x, covariance=True)
    torch.testing.assert_close(found.mean, mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.variance, covariance, rtol=0, atol=1e-12)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("layer", LAYERS)
def test_covariance_and_weighted_sums_equal_the_enumeration(layer, law):
    made, x = make(layer, law)
    _, covariance = reference.mean_and_covariance(made, x)
    exact = made.moments(x, covariance=True)
    assert exact.variance.shape == (3, *made.output_shape, *made.output_shape)
    torch.testing.assert_close(exact.variance.reshape(covariance.shape), covariance, atol=1e-10, rtol=1e-10)
    w = torch.randn(3, covariance.shape[1], dtype=torch.float64)
    expected = torch.einsum("bo,bop,bp->b", w, covariance, w)
    torch.testing.assert_close(made.exact_moments(x).variance_of(w), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("law", ["bernoulli", "replacement", "gaussian", "bernoulli-min2"])
@pytest.mark.parametrize(
    ("modes", "forms"),
    [
        ("all", ["pairs"]),
        ((0, 1, 2), ["pairs"]),
        ((3,), ["rows", "outputs"]),
        ((1, 3), ["rows", "outputs"]),
        ((0, 3), ["rows", "outputs"]),
        ((0,), ["rows", "outputs"]),
    ],
)
def test_all_tucker_forms_agree_where_they_apply(law, modes, forms, monkeypatch):
    torch.manual_seed(0)
    dropout = td.TensorDropout(0.6, modes=modes, **LAWS[law])
    layer = td.TuckerRegression((9, 4, 3), 5, (7, 3, 2, 4), init="normal", dtype=torch.float64, dropout=dropout)
    x, w = torch.randn(6, 9, 4, 3, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    found = {}
    for form in ["modes", *forms]:
        monkeypatch.setattr(moments_module, "cheapest_tucker_form", lambda *_, form=form: form)
        monkeypatch.setattr(moments_module, "IN_CACHE", 100)  # several blocks
        mean, variance, variance_of = layer.exact_moments(x)
        found[form] = mean, variance, variance_of(w)
    for form in forms:
        torch.testing.assert_close(found[form], found["modes"])


@pytest.mark.parametrize("layer", ["tucker-vector", "cp-vector", "tt-vector", "ring-vector"])
def test_blocks_do_not_change_the_result(layer, monkeypatch):
    made, x = make(layer, "nested")
    x = x.repeat(4, *[1] * (x.ndim - 1))
    whole = made._exact_moments
    monkeypatch.setattr(made, "_exact_moments", lambda p, masks, block, cov: whole(p, masks, 1, cov))
    blocked = made.moments(x)
    monkeypatch.undo()
    torch.testing.assert_close(blocked, made.moments(x))


@pytest.mark.parametrize("law", ["bernoulli", "replacement", "gaussian", "nested", "bernoulli-min2"])
@pytest.mark.parametrize(
    ("cls", "rank"),
    [
        (td.TuckerRegression, (20, 3, 3, 12)),
        (td.CPRegression, 40),
        (td.TTRegression, (12, 10, 8)),
        (td.TensorRingRegression, (5, 4, 6, 4)),
    ],
)
def test_monte_carlo_agrees_at_sizes_too_large_to_enumerate(cls, rank, law):
    torch.manual_seed(0)
    dropout = td.TensorDropout(0.8, **LAWS[law])
    layer = cls((24, 4, 4), 15, rank, init="normal", dtype=torch.float64, dropout=dropout)
    x = torch.randn(4, 24, 4, 4, dtype=torch.float64)
    exact, sampled = layer.moments(x), layer.moments(x, n_samples=500)
    for name in ("mean", "variance"):
        error = (getattr(sampled, name) - getattr(exact, name)) / getattr(sampled.standard_error, name)
        assert error.abs().max() < 6, name  # 60 entries, each within six standard errors
        assert error.square().mean() < 4, name


def test_moments_ignore_train_eval_and_per_sample():
    results = []
    for per_sample, training in itertools.product((False, True), repeat=2):
        made, x = make("tucker-vector", "bernoulli", per_sample=per_sample)
        results.append(made.train(training).moments(x))
    for other in results[1:]:
        assert torch.equal(other.mean, results[0].mean)
        assert torch.equal(other.variance, results[0].variance)


@pytest.mark.parametrize("law", ["bernoulli", "gaussian", "nested", "bernoulli-min2"])
@pytest.mark.parametrize("layer", ["tucker-vector", "cp-vector", "tt-vector", "ring-vector"])
def test_no_variance_at_theta_one_or_without_dropout(layer, law):
    made, x = make(layer, law)
    made.dropout.theta = 1.0
    assert made.moments(x).variance.abs().max() < 1e-30
    made.dropout = None
    plain = made.moments(x)
    assert plain.variance.abs().max() == 0
    torch.testing.assert_close(plain.mean, made(x))


@pytest.mark.parametrize("layer", ["tucker-vector", "cp-vector", "tt-vector", "ring-vector"])
@pytest.mark.parametrize("law", ["bernoulli", "replacement", "nested"])
def test_moments_are_differentiable(layer, law):
    made, x = make(layer, law)
    x.requires_grad_()
    parameters = [p for name, p in made.named_parameters() if name != "bias"]

    def variance(x, *values):
        names = [name for name, _ in made.named_parameters() if name != "bias"]
        functions = dict(zip(names, values, strict=True))
        return torch.func.functional_call(_Variance(made), {f"layer.{k}": v for k, v in functions.items()}, (x,))

    assert torch.autograd.gradcheck(variance, (x, *parameters))


class _Variance(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer.moments(x).variance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", ["tucker-vector", "cp-vector", "tt-vector", "ring-vector"])
def test_half_precision_keeps_a_positive_variance(layer, dtype):
    made, x = make(layer, "bernoulli")
    truth = made.moments(x)
    half = made.to(dtype).moments(x.to(dtype))
    assert half.variance.dtype == torch.float32
    assert (half.variance > 0).all()
    torch.testing.assert_close(half.variance.double(), truth.variance, rtol=0.1, atol=0.01)


@pytest.mark.parametrize(
    ("cls", "rank"),
    [
        (td.CPRegression, 6),
        (td.TuckerRegression, (5, 3, 2)),
        (td.TTRegression, (5, 2)),
        (td.TensorRingRegression, (3, 2, 3)),
    ],
)
def test_a_small_variance_beside_a_large_mean_keeps_its_digits(cls, rank):
    torch.manual_seed(0)
    layer = cls((6, 3), 2, rank, dropout=0.999)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.abs_().add_(1)
    x = torch.rand(4, 6, 3) + 10
    truth = layer.double().moments(x.double()).variance
    single = layer.float().moments(x).variance
    assert (layer(x).square() > 100 * single).all()
    torch.testing.assert_close(single.double(), truth, rtol=1e-4, atol=0)


class Half:
    """Keeps exactly half of the ranks; says nothing about second moments."""

    def draw(self, shape, theta, *, device):
        return (torch.rand(shape, device=device).argsort(-1).argsort(-1) < shape[-1] // 2).float()

    def mean(self, R, theta):
        return torch.full((R,), (R // 2) / R, dtype=torch.float64)

    def second_moment(self, R, theta):
        return None

    def support(self, R, theta):
        return None


class HalfWithMoments(Half):
    def second_moment(self, R, theta):
        k = R // 2
        off = torch.full((R, R), k * (k - 1) / (R * (R - 1)), dtype=torch.float64)
        return off.fill_diagonal_(k / R)


def test_a_law_without_moments_needs_samples_and_then_says_its_error():
    layer = td.CPRegression((6, 3), 2, 6, dtype=torch.float64, dropout=td.TensorDropout(0.5, law=Half()))
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    with pytest.raises(td.TensorDropoutError, match="no second moments; pass n_samples="):
        layer.moments(x)
    torch.manual_seed(0)
    sampled = layer.moments(x, n_samples=500)
    layer.dropout = td.TensorDropout(0.5, law=HalfWithMoments())
    exact = layer.moments(x)
    assert ((sampled.mean - exact.mean).abs() < 6 * sampled.standard_error.mean).all()
    assert ((sampled.variance - exact.variance).abs() < 6 * sampled.standard_error.variance).all()


def test_sampled_moments_are_the_unbiased_ones_of_the_draws():
    draws = torch.randn(4, 2, 3, dtype=torch.float64)  # (draws, B, outputs)
    sampled = moments_module.sampled_moments(draws, 1, covariance=False)
    torch.testing.assert_close((sampled.mean, sampled.variance), (draws.mean(0), draws.var(0)))
    whole = moments_module.sampled_moments(draws, 1, covariance=True)
    torch.testing.assert_close(whole.variance, torch.stack([draws[:, b].mT.cov() for b in range(2)]))
    torch.testing.assert_close(whole.standard_error.variance.diagonal(dim1=1, dim2=2), sampled.standard_error.variance)


def test_sampled_covariance_of_several_output_modes_has_both_of_their_shapes():
    made, x = make("cp-tensor", "bernoulli")
    exact, sampled = made.moments(x, covariance=True), made.moments(x, covariance=True, n_samples=2000)
    assert sampled.variance.shape == exact.variance.shape == (3, 2, 2, 2, 2)
    assert ((sampled.variance - exact.variance).abs() < 6 * sampled.standard_error.variance).all()


@pytest.mark.parametrize("precision", ["bfloat16", "autocast"])
def test_sampled_moments_are_not_the_rounding_of_half_precision(precision):
    layer = td.CPRegression((6, 3, 3), 1, rank=4, dropout=0.9)
    torch.nn.init.constant_(layer.bias, 70.0)
    x = torch.randn(3, 6, 3, 3)
    if precision == "bfloat16":
        layer, x = layer.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        exact, sampled = layer.moments(x), layer.moments(x, n_samples=800)
    assert sampled.variance.dtype == torch.float32
    torch.testing.assert_close(sampled.variance, exact.variance, rtol=0.4, atol=0)


@pytest.mark.parametrize("n_samples", [0, 1, 2, 2.5, True, "many"])
def test_a_bad_number_of_samples_is_refused(n_samples):
    made, x = make("cp-vector", "bernoulli")
    with pytest.raises(td.TensorDropoutError, match="n_samples is an integer of at least 3"):
        made.moments(x, n_samples=n_samples)


def test_the_core_is_never_held_for_the_whole_batch():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    layer = td.TuckerRegression((256, 7, 7), 100, (128, 3, 3, 64), dropout=0.8)
    x = torch.randn(64, 256, 7, 7)
    with torch.no_grad(), Largest() as largest:
        layer.moments(x)
    assert largest.numel <= 2**20 < 64 * layer.core.numel()
