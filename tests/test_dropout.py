"""TensorDropout: which axes it masks, how it scales, and how θ behaves as a buffer."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import tensor_dropout as td
from layers_under_test import FORMATS, every_format, make_input, make_layer

LIKE = torch.zeros(1)
THETA = torch.tensor(0.9)  # 0.9 in float32; bf16 would make it 0.8984


def mode_numbers(ranks):
    return tuple(range(len(ranks)))


# Which axes.


@pytest.mark.parametrize(
    ("ranks", "modes", "axes"),
    [
        ((4, 3, 3, 5), "all", (0, 1, 2, 3)),
        ((4, 1, 1, 5), "all", (0, 3)),
        ((4, 3, 3, 1), "all", (0, 1, 2)),
        ((1, 1), "all", ()),
        ((4, 1, 1, 5), (1,), (1,)),
        ((4, 3, 3, 5), (3, 0), (0, 3)),
        ((4, 3, 3, 5), "outer", (0, 3)),
        ((4, 3, 3, 1), "outer", (0,)),
        ((1, 3, 1), "outer", ()),
        ((4,), "outer", (0,)),
    ],
)
def test_which_axes_are_dropped(ranks, modes, axes):
    assert td.TensorDropout(0.5, modes=modes).dropped_axes(ranks, mode_numbers(ranks)) == axes


def test_modes_are_axes_of_the_weight_for_tucker_and_bond_numbers_for_tt():
    assert make_layer("tucker", modes=(0, 3)).dropped_axes == (0, 3)
    assert make_layer("tt", modes=(1, 3)).dropped_axes == (0, 2)
    assert make_layer("cp").dropped_axes == make_layer("cp", modes="outer").dropped_axes == (0,)
    assert make_layer("tt", modes="outer").dropped_axes == (0, 2)
    assert make_layer("cp", theta=None).dropped_axes == ()


@pytest.mark.parametrize(
    ("format", "rank", "axes"),
    [
        ("tucker", (5, 3, 3, 4), (0,)),
        ("tucker", (2, 3, 1, 4), (1,)),  # not the outputs, which have the largest
        ("tucker", (1, 1, 1, 4), ()),
        ("tt", (2, 4, 4), (1,)),
        ("tt", (2, 3, 4), (2,)),  # the bond in front of the outputs touches the inputs, too
        ("ring", (1, 2, 3, 2), (2,)),
        ("cp", 6, (0,)),
    ],
)
def test_auto_drops_the_largest_rank_of_the_inputs(format, rank, axes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one has nothing to drop
        layer = FORMATS[format]((6, 4, 4), 5, rank, dropout=td.TensorDropout(0.5, modes="auto"))
    assert layer.dropped_axes == axes
    masks = layer.dropout(layer._ranks, layer.dropped_axes, 2, next(layer.parameters()))
    assert [k for k, mask in enumerate(masks) if mask is not None] == list(axes)


def test_only_the_dropped_axes_get_a_mask():
    dropout = td.TensorDropout(0.5, modes=(0, 2))
    masks = dropout((4, 3, 2), (0, 2), batch=7, like=LIKE)
    assert [None if mask is None else tuple(mask.shape) for mask in masks] == [(4,), None, (2,)]


def test_min_rank_concerns_only_the_dropped_axes():
    assert td.TensorDropout(0.5, modes=(0,), min_rank=3).dropped_axes((4, 2), (0, 1)) == (0,)


# Masks and their scale.


@pytest.mark.parametrize("per_sample", [False, True])
def test_masks_are_per_batch_or_per_sample(per_sample):
    masks = td.TensorDropout(0.5, per_sample=per_sample)((4, 3), (0, 1), batch=7, like=LIKE)
    assert [mask.shape for mask in masks] == ([(7, 4), (7, 3)] if per_sample else [(4,), (3,)])


def test_modes_are_masked_independently():
    dropout = td.TensorDropout(0.5, per_sample=True)
    first, second = dropout((1, 1), (0, 1), batch=4000, like=LIKE)
    assert (first * second / 4).mean().item() == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 4000) ** 0.5)


@pytest.mark.parametrize(("scaling", "kept"), [("inverted", 1 / float(torch.tensor(0.7))), ("paper", 1.0)])
def test_a_kept_rank_has_the_value_of_the_scaling(scaling, kept):
    dropout = td.TensorDropout(0.7, scaling=scaling)
    (mask,) = dropout((1000,), (0,), batch=1, like=LIKE.double())
    assert mask.unique().tolist() == [0.0, kept]


@pytest.mark.parametrize(("law", "min_rank"), [("bernoulli", 0), ("bernoulli", 3), ("nested", 0), ("replacement", 0)])
def test_inverted_scaling_divides_by_the_true_mean(law, min_rank):
    dropout = td.TensorDropout(0.4, law=law, min_rank=min_rank)
    masks, chances = dropout.law.support(5, dropout.theta)
    mean = torch.einsum("m,mr->r", chances, dropout.scale(masks))
    torch.testing.assert_close(mean, torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-12)


def test_at_test_time_inverted_scaling_has_no_masks_and_the_papers_has_means():
    inverted = td.TensorDropout(0.7).eval()
    paper = td.TensorDropout(0.7, scaling="paper").eval()
    assert inverted((4, 3), (0, 1), batch=2, like=LIKE) == [None, None]
    means = paper((4, 3), (0,), batch=2, like=LIKE)
    assert torch.equal(means[0], torch.full((4,), 0.7))
    assert means[1] is None


@pytest.mark.parametrize(
    ("training", "at_test", "is_random"),
    [(True, "mean", True), (False, "mean", False), (True, "sample", True), (False, "sample", True)],
)
def test_when_it_is_random(training, at_test, is_random):
    assert td.TensorDropout(0.5, at_test=at_test).train(training).is_random is is_random


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_masks_next_to_half_precision_weights_stay_in_float32(dtype, expected):
    dropout = td.TensorDropout(0.9)
    for masks in (dropout.draw((4,), (0,), None, LIKE.to(dtype)), dropout.means((4,), (0,), LIKE.to(dtype))):
        assert masks[0].dtype == expected


def test_a_number_is_short_for_a_dropout():
    layer = td.CPRegression((4, 3), 2, rank=2, dropout=0.6)
    assert isinstance(layer.dropout, td.TensorDropout)
    assert float(layer.dropout.theta) == pytest.approx(0.6)


# θ is a buffer.


def test_theta_can_be_assigned_and_stays_the_same_tensor():
    dropout = td.TensorDropout(0.9)
    buffer = dropout.theta
    for value in (0.5, 1, torch.tensor(0.25)):
        dropout.theta = value
        assert dropout.theta is buffer
        assert buffer.dtype == torch.float32
        assert buffer.item() == float(value)


def test_theta_is_filled_in_also_where_a_state_dict_assigns_its_tensors():
    layer = make_layer("cp", theta=0.5)
    state = {name: value.bfloat16() for name, value in make_layer("cp", theta=0.25).state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert layer.factors[0].dtype == torch.bfloat16
    assert layer.dropout.theta.dtype == torch.float32
    assert layer.dropout.theta.item() == 0.25


def test_a_new_theta_changes_the_rate():
    layer = make_layer("cp", theta=1.0, rank=24, dtype=torch.float64)
    x = make_input(layer)
    plain = layer(x)
    layer.dropout.theta = 0.5
    assert not torch.equal(layer(x), plain)
    assert (layer.draw_masks(1000)[0] == 0).double().mean().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "float"])
def test_casts_of_the_network_do_not_cast_theta(cast):
    model = nn.Sequential(nn.Linear(2, 2), make_layer("cp", theta=0.9))
    getattr(model, cast)()
    assert model[0].weight.dtype == getattr(
        torch, {"double": "float64", "half": "float16", "float": "float32"}.get(cast, cast)
    )
    assert model[1].dropout.theta.dtype == torch.float32
    assert torch.equal(model[1].dropout.theta, THETA)


def test_casts_by_to_do_not_cast_theta():
    layer = make_layer("cp", theta=0.9).to(torch.bfloat16)
    assert layer.factors[0].dtype == torch.bfloat16
    assert torch.equal(layer.dropout.theta, THETA)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_have_a_theta_of_their_own(duplicate):
    layer = make_layer("tucker", theta=0.9)
    other = duplicate(layer)
    other.dropout.theta = 0.5
    assert torch.equal(layer.dropout.theta, THETA)
    x = make_input(layer)
    assert torch.equal(other.eval()(x), layer.eval()(x))


@every_format
def test_theta_travels_in_state_dicts_and_may_be_missing_from_them(format):
    layer, other = make_layer(format, theta=0.9), make_layer(format, theta=0.5, seed=1)
    state = layer.state_dict()
    other.load_state_dict(state)
    assert torch.equal(other.dropout.theta, THETA)
    x = make_input(layer)
    assert torch.equal(other.eval()(x), layer.eval()(x))
    plain = make_layer(format, theta=None, seed=2)
    other.load_state_dict(plain.state_dict())
    assert "dropout.theta" not in plain.state_dict()
    assert torch.equal(other.dropout.theta, THETA)
    assert torch.equal(other(x), plain(x))


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("theta", [0.0, -0.5, 1.5, torch.nan, torch.inf])
def test_a_state_dict_with_an_impossible_theta_is_refused(theta, assign):
    net = nn.Sequential(make_layer("cp", theta=0.9))
    state = {**net.state_dict(), "0.dropout.theta": torch.tensor(theta)}
    with pytest.raises(RuntimeError, match=r"0\.dropout\.theta: TensorDropout: theta is the KEEP probability.*, got"):
        net.load_state_dict(state, assign=assign)
    assert torch.equal(net[0].dropout.theta, THETA)


# What it says of itself.


def test_repr_shows_what_differs_from_the_defaults():
    assert repr(td.TensorDropout(0.8)) == "TensorDropout(theta=0.8, law='bernoulli', modes='all', scaling='inverted')"
    everything = td.TensorDropout(
        0.8, law="nested", modes=(0, 1), scaling="paper", per_sample=True, min_rank=2, at_test="sample"
    )
    assert repr(everything) == (
        "TensorDropout(theta=0.8, law='nested', modes=(0, 1), scaling='paper', per_sample=True, min_rank=2, "
        "at_test='sample')"
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"law": "nested", "modes": (0, 2), "scaling": "paper", "per_sample": True, "min_rank": 2, "at_test": "sample"},
        {"law": "gaussian"},
        {"law": "replacement"},
    ],
    ids=str,
)
def test_config_makes_an_equal_module(options):
    dropout = td.TensorDropout(0.3, **options)
    again = td.TensorDropout(**dropout.config())
    assert again.config() == dropout.config()
    assert repr(again) == repr(dropout)
    assert torch.equal(again.theta, dropout.theta)


# One draw for all axes.

INDEPENDENT = {
    "bernoulli": ("bernoulli", 0, True),
    "gaussian": ("gaussian", 0, True),
    "bernoulli with min_rank": ("bernoulli", 1, False),
    "replacement": ("replacement", 0, False),
    "nested": ("nested", 0, False),
}


@pytest.mark.parametrize(("law", "min_rank", "at_once"), INDEPENDENT.values(), ids=INDEPENDENT.keys())
@pytest.mark.parametrize("batch", [None, 5])
def test_laws_of_independent_entries_are_drawn_once_for_all_axes(monkeypatch, law, min_rank, at_once, batch):
    layer = make_layer("tucker", law=law, min_rank=min_rank, theta=0.6, dtype=torch.float64)
    draw, shapes = type(layer.dropout.law).draw, []

    def spy(self, shape, theta, *, device):
        shapes.append(tuple(shape))
        return draw(self, shape, theta, device=device)

    monkeypatch.setattr(type(layer.dropout.law), "draw", spy)
    masks = layer.draw_masks(batch)
    front = () if batch is None else (batch,)
    assert [tuple(mask.shape) for mask in masks] == [(*front, R) for R in layer.rank]
    assert shapes == ([(*front, sum(layer.rank))] if at_once else [(*front, R) for R in layer.rank])


@pytest.mark.parametrize("law", ["bernoulli", "gaussian"])
def test_masks_of_several_axes_drawn_at_once_are_independent(law):
    layer = make_layer("tucker", law=law, theta=0.6, dtype=torch.float64)
    masks = torch.cat(layer.draw_masks(20000), 1)
    covariance = torch.eye(masks.shape[1], dtype=torch.float64) * (1 - 0.6) / 0.6
    torch.testing.assert_close(masks.mean(0), torch.ones_like(masks[0]), rtol=0, atol=0.03)
    torch.testing.assert_close(masks.T.cov(), covariance, rtol=0, atol=0.06)


@pytest.mark.parametrize(("law", "min_rank", "at_once"), INDEPENDENT.values(), ids=INDEPENDENT.keys())
@pytest.mark.parametrize("batch", [None, 5])
def test_masks_in_float32_are_those_in_float64(law, min_rank, at_once, batch):
    drawn = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(3)
        drawn.append(make_layer("tucker", law=law, min_rank=min_rank, theta=0.6, dtype=dtype).dropout)
        torch.manual_seed(4)
        drawn[-1] = drawn[-1].draw((4, 3, 5), (0, 2), batch, torch.empty(0, dtype=dtype))
    for single, double in zip(*drawn, strict=True):
        assert (single is None) == (double is None)
        if single is not None:
            assert single.dtype == torch.float32
            torch.testing.assert_close(single.double(), double, rtol=1e-7, atol=0)


def test_a_law_that_inherits_is_drawn_axis_by_axis_until_it_says_otherwise():
    class Paired(td.layers.laws.Bernoulli):
        def draw(self, shape, theta, *, device):
            return super().draw((*shape[:-1], 1), theta, device=device).expand(shape).clone()

    layer = make_layer("tucker", law=Paired(), theta=0.5)
    assert all((mask == mask[:, :1]).all() for mask in layer.draw_masks(50))
    first, second = layer.draw_masks(200)[:2]
    assert (first[:, 0] != second[:, 0]).any()
