"""A fresh layer has the output of average pooling + nn.Linear: its variance, and for "pool" its invariance."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from layers_under_test import FORMATS, every_format
from tensor_dropout.layers.initialize import Init

INITIALISATIONS = 100
TUCKER, TT, CP, RING = "tucker", "tt", "cp", "ring"

SHAPES = {"1-D": (6,), "2-D": (6, 4), "3-D": (5, 3, 4)}
RANKS = {
    ("1-D", 1): {TUCKER: (1, (4, 1), "full"), TT: ("full",), CP: ("full",), RING: ("full",)},
    ("1-D", 3): {TUCKER: (1, 2, "full"), TT: (1, 2, "full"), CP: (1, 2, "full"), RING: (1, 2, "full")},
    ("2-D", 1): {TUCKER: (1, 2, "full"), TT: (1, (3, 1), "full"), CP: (1, 2, "full"), RING: (1, 3)},
    ("2-D", 3): {
        TUCKER: (1, 2, (5, 1, 2), "full"),
        TT: (1, (1, 3), (5, 2), "full"),
        CP: (1, 2, 6, "full"),
        RING: (1, 2, (3, 5, 2)),
    },
    ("3-D", 1): {
        TUCKER: (1, 2, (4, 1, 1, 1), "full"),
        TT: (1, (2, 3, 1), "full"),
        CP: (1, 3, "full"),
        RING: (1, (2, 3, 2, 4)),
    },
    ("3-D", 3): {
        TUCKER: (1, 3, "full"),
        TT: (1, 2, (1, 7, 2), (5, 2, 3), "full"),
        CP: (1, 8, "full"),
        RING: (1, 2, "full"),
    },
    ("3-D", (2, 2)): {TUCKER: (2,), TT: (3,), CP: (4,), RING: (3,)},
}
CASES = [
    pytest.param(format, SHAPES[name], outputs, rank, id=f"{format}-{name}-{outputs}-{rank}")
    for (name, outputs), ranks_of in RANKS.items()
    for format, ranks in ranks_of.items()
    for rank in ranks
]


def white_noise(shape):
    return torch.randn(64, *shape)


def features_of_a_network(shape):
    """ReLU of correlated features: non-zero mean, correlated channels and neighbours."""
    channels = torch.randn(shape[0], shape[0]) / shape[0] ** 0.5
    shared = torch.randn(64, shape[0], *(1 for _ in shape[1:]))
    noise = torch.randn(64, *shape)
    return torch.relu(torch.einsum("dc,zc...->zd...", channels, shared + noise) + 0.5)


@torch.no_grad()
def output_std(layer, x):
    """Over inputs, outputs and fresh initialisations."""
    outputs = []
    for _ in range(INITIALISATIONS):
        layer.reset_parameters()
        outputs.append(layer(x))
    return torch.stack(outputs).std()


def ratio_to_pooled_linear(format, shape, outputs, rank, init, x):
    pooled = x.flatten(2).mean(-1) if x.ndim > 2 else x
    n_outputs = outputs if isinstance(outputs, int) else outputs[0] * outputs[1]
    linear = nn.Linear(shape[0], n_outputs, bias=False)
    layer = FORMATS[format](shape, outputs, rank, init=init, bias=False)
    return (output_std(layer, x) / output_std(linear, pooled)).item()


@pytest.mark.parametrize("init", get_args(Init))
@pytest.mark.parametrize(("format", "shape", "outputs", "rank"), CASES)
def test_output_std_is_that_of_the_pooled_linear(format, shape, outputs, rank, init):
    x = white_noise(shape)
    assert 0.8 < ratio_to_pooled_linear(format, shape, outputs, rank, init, x) < 1.25


@pytest.mark.parametrize(("format", "shape", "outputs", "rank"), CASES)
def test_output_std_of_pool_init_is_right_on_features_that_are_not_white(format, shape, outputs, rank):
    x = features_of_a_network(shape)
    assert 0.8 < ratio_to_pooled_linear(format, shape, outputs, rank, "pool", x) < 1.25


@pytest.mark.parametrize(("format", "shape", "outputs", "rank"), [c for c in CASES if len(c.values[1]) > 1])
def test_pool_init_is_average_pooling(format, shape, outputs, rank):
    """Its output does not change when the pixels are permuted; that of the other init does."""
    x = white_noise(shape).double()
    shuffled = x.flatten(2)[..., torch.randperm(x[0, 0].numel())].view_as(x)
    pool = FORMATS[format](shape, outputs, rank, init="pool", dtype=torch.float64)
    torch.testing.assert_close(pool(shuffled), pool(x), rtol=1e-5, atol=1e-5)
    assert pool(x).std() > 0.01
    normal = FORMATS[format](shape, outputs, rank, init="normal", dtype=torch.float64)
    assert not torch.allclose(normal(shuffled), normal(x), rtol=1e-2, atol=1e-2)


@every_format
@pytest.mark.parametrize("init", get_args(Init))
def test_bias_is_drawn_like_that_of_the_pooled_linear(format, init):
    layer = FORMATS[format]((25, 3, 3), 4000, 2, init=init)
    bound = 1 / 25**0.5
    assert layer.bias.abs().max() <= bound
    assert layer.bias.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert layer.bias.mean().item() == pytest.approx(0, abs=5 * bound / (3 * 4000) ** 0.5)


@every_format
@pytest.mark.parametrize("init", get_args(Init))
@pytest.mark.parametrize("rank", [1, 2, "full"])
def test_the_weight_has_the_norm_of_a_pooled_linear(format, init, rank):
    """``‖W‖² = O / (3·H·W)``, on average; exactly where the factors are orthonormal."""
    layer = FORMATS[format]((6, 4, 2), 5, rank, init=init)
    squares = []
    for _ in range(INITIALISATIONS):
        layer.reset_parameters()
        squares.append(layer.dense_weight().square().sum())
    target = 5 / (3 * 4 * 2)
    assert torch.stack(squares).mean().item() == pytest.approx(target, rel=0.2)
    if format == TT or (format == TUCKER and init != "normal"):
        torch.testing.assert_close(torch.stack(squares), torch.full((INITIALISATIONS,), target))


ONE_TO_ONE = [((1, 4, 4), 1, 4), ((1, 2, 2), 1, 2), ((1, 3, 5), (1, 1), 3), ((1, 2, 3, 4), 1, 6)]


@pytest.mark.parametrize(("shape", "outputs", "rank"), ONE_TO_ONE)
def test_a_cp_layer_from_one_channel_to_one_output_starts_as_pooling_in_parts_that_differ(shape, outputs, rank):
    """Of equal columns training would keep the sum alone, and columns of opposite signs would cancel."""
    layer = FORMATS[CP](shape, outputs, rank)
    target = 1 / (3 * torch.tensor(shape).prod()) ** 0.5
    for _ in range(40):
        layer.reset_parameters()
        columns = torch.cat([factor.detach() for factor in layer.factors])
        assert torch.pdist(columns.T).min() > 1e-3 * columns.norm(dim=0).mean()
        weight = layer.dense_weight().detach()
        torch.testing.assert_close(weight.norm(), target)
        torch.testing.assert_close(weight, weight.mean().expand_as(weight), rtol=1e-4, atol=1e-6)


def test_a_cp_layer_from_one_channel_to_one_output_can_learn_all_its_ranks():
    torch.manual_seed(0)
    target = torch.randn(6, 4) @ torch.randn(4, 6)
    target /= target.norm()
    layer = FORMATS[CP]((1, 6, 6), 1, 6, bias=False)
    optimizer = torch.optim.Adam(layer.parameters(), 0.03)
    for _ in range(600):
        loss = (layer.dense_weight()[0, :, :, 0] - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.01  # equal columns: 0.3, all but the largest singular value


def test_more_channels_or_outputs_start_with_the_columns_of_average_pooling():
    """Their columns differ anyway: what a seed draws there is what it always drew."""
    for shape, outputs in (((2, 3, 4), 1), ((1, 3, 4), 2)):
        torch.manual_seed(0)
        layer = FORMATS[CP](shape, outputs, 3)
        for factor in list(layer.factors)[1:3]:
            torch.testing.assert_close(factor, factor[0, 0].expand_as(factor))
        assert torch.pdist(torch.cat(list(layer.factors)).T).min() > 1e-3


@every_format
@pytest.mark.parametrize("init", get_args(Init))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_every_dtype_can_be_initialised(format, init, dtype):
    layer = FORMATS[format]((6, 4, 4), 5, 3, init=init, dtype=dtype)
    assert all(parameter.dtype == dtype for parameter in layer.parameters())
    assert all(parameter.isfinite().all() for parameter in layer.parameters())
    assert layer.dense_weight().double().norm().item() == pytest.approx((5 / 48) ** 0.5, rel=0.5)


@every_format
@pytest.mark.parametrize("init", get_args(Init))
@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_layer_can_be_made_under_any_default_dtype(format, init, default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        layer = FORMATS[format]((6, 4, 4), 5, 3, init=init, dropout=0.5)
    finally:
        torch.set_default_dtype(before)
    assert all(parameter.dtype == default for parameter in layer.parameters())
    assert layer.dropout.theta.dtype == torch.float32
    assert layer.dense_weight().double().norm().item() == pytest.approx((5 / 48) ** 0.5, rel=0.5)


@every_format
@pytest.mark.parametrize("init", get_args(Init))
def test_equal_seeds_make_equal_layers_and_a_reset_makes_another(format, init):
    layers = []
    for _ in range(2):
        torch.manual_seed(4)
        layers.append(FORMATS[format]((6, 4, 4), 5, 3, init=init))
    one, two = (layer.state_dict() for layer in layers)
    assert all(torch.equal(one[name], two[name]) for name in one)
    before = layers[0].dense_weight().clone()
    layers[0].reset_parameters()
    assert not torch.allclose(layers[0].dense_weight(), before)


@pytest.mark.parametrize("shape", [(6, 7), (4, 5, 7), (3, 4, 2, 1)])
def test_smooth_columns_of_cp_are_pooling_and_low_waves(shape):
    layer = FORMATS[CP](shape, 3, 6, init="smooth")
    for size, factor in zip(shape[1:], list(layer.factors)[1:], strict=False):
        columns = factor.detach() / factor.detach().norm(dim=0)
        spectrum = torch.fft.rfft(torch.cat([columns, columns.flip(0)]), dim=0).abs()
        assert (spectrum[3:] < 1e-4).all()  # a cosine of half a wave and of one
        torch.testing.assert_close(columns.sum(0) / size**0.5, torch.full((6,), 0.2**0.5 if size > 1 else 1.0))
        assert size < 3 or torch.pdist(columns.T).min() > 1e-3


def test_smooth_is_pooling_for_formats_that_leave_it_by_themselves():
    for format in (TUCKER, TT, RING):
        weights = []
        for init in ("pool", "smooth"):
            torch.manual_seed(0)
            weights.append(FORMATS[format]((5, 4, 4), 3, 2, init=init).dense_weight())
        assert torch.equal(*weights)
