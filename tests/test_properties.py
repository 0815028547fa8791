"""Random layers, inputs and masks: the fast path against the slow truth, in float64."""

from __future__ import annotations

import warnings

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tensor_dropout as td
from layers_under_test import FORMATS, make_input
from tensor_dropout import reference

EXACT = {"rtol": 1e-10, "atol": 1e-11}
repeatable = settings(
    derandomize=True, deadline=None, max_examples=60, database=None, suppress_health_check=list(HealthCheck)
)


@st.composite
def layers(draw, max_size=5, max_inputs=4):
    """Any layer that can be asked for: format, shapes, rank, law, θ, modes, scaling, bias."""
    make = FORMATS[draw(st.sampled_from(sorted(FORMATS)))]
    sizes = st.integers(1, max_size)
    input_shape = draw(st.lists(sizes, min_size=1, max_size=max_inputs))
    output_shape = draw(st.lists(sizes, min_size=1, max_size=2))
    full = make(input_shape, output_shape, "full", device="meta")._ranks
    rank = [draw(st.integers(1, min(largest, 6))) for largest in full]
    # modes: those of the layer, by name, also where the rank is 1
    numbers = make(input_shape, output_shape, rank, device="meta").mode_numbers
    modes, dropped = "all", [R for R in rank if R > 1]
    if numbers and draw(st.booleans()):
        modes = draw(st.lists(st.sampled_from(numbers), min_size=1, unique=True))
        dropped = [rank[numbers.index(mode)] for mode in modes]
    law = draw(st.sampled_from(["bernoulli", "nested", "replacement", "gaussian"]))
    min_rank = draw(st.integers(0, min(dropped, default=0))) if law in ("bernoulli", "nested") else 0
    dropout = td.TensorDropout(
        draw(st.sampled_from([0.1, 0.5, 0.8, 1.0]) | st.floats(0.05, 1.0)),
        law=law,
        modes=modes,
        min_rank=min_rank,
        scaling=draw(st.sampled_from(["inverted", "paper"])),
        per_sample=draw(st.booleans()),
    )
    options = {"bias": draw(st.booleans()), "init": "normal", "dtype": torch.float64}
    torch.manual_seed(draw(st.integers(0, 2**16)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing to drop at rank 1
        return make(input_shape, output_shape, rank, dropout=dropout, **options)


def reference_per_sample(layer, x, masks):
    """Each sample through the dense weight of its own masks."""

    def own(b):
        return [mask if mask is None or mask.ndim == 1 else mask[b] for mask in masks]

    return torch.cat([reference.regress(layer, x[b : b + 1], own(b)) for b in range(len(x))])


@repeatable
@given(layers(), st.integers(1, 3))
def test_fast_path_is_the_reference_under_drawn_masks(layer, batch):
    x = make_input(layer, batch)
    masks = layer.draw_masks(batch if layer.dropout.per_sample else None)
    y = layer.regress(x, masks)
    assert y.shape == (batch, *layer.output_shape)
    torch.testing.assert_close(y, reference_per_sample(layer, x, masks), **EXACT)


@repeatable
@given(layers(), st.integers(1, 3), st.integers(0, 99))
def test_training_pass_is_the_reference_under_the_masks_of_its_seed(layer, batch, seed):
    x = make_input(layer, batch)
    torch.manual_seed(seed)
    y = layer.train()(x)
    torch.manual_seed(seed)
    masks = layer.draw_masks(batch if layer.dropout.per_sample else None)
    torch.testing.assert_close(y, reference_per_sample(layer, x, masks), **EXACT)


@repeatable
@given(layers())
def test_eval_pass_is_the_dense_weight(layer):
    x = make_input(layer, 2)
    dense = torch.tensordot(x, layer.dense_weight(), dims=len(layer.input_shape))
    torch.testing.assert_close(layer.eval()(x), dense if layer.bias is None else dense + layer.bias, **EXACT)


@repeatable
@given(layers(max_size=3, max_inputs=2))
def test_mean_over_all_masks_is_the_eval_pass(layer):
    x = make_input(layer, 2)
    mean, covariance = reference.mean_and_covariance(layer, x)
    torch.testing.assert_close(mean.view(2, *layer.output_shape), layer.eval()(x), **EXACT)
    assert (covariance.diagonal(dim1=1, dim2=2) >= -1e-12).all()


@repeatable
@given(layers())
def test_gradients_are_those_of_the_reference(layer):
    x = make_input(layer, 2).requires_grad_()
    masks = layer.draw_masks(2 if layer.dropout.per_sample else None)
    weights = torch.randn(2, *layer.output_shape, dtype=torch.float64)
    leaves = [x, *layer.parameters()]
    fast = torch.autograd.grad((layer.regress(x, masks) * weights).sum(), leaves)
    slow = torch.autograd.grad((reference_per_sample(layer, x, masks) * weights).sum(), leaves)
    for ours, theirs in zip(fast, slow, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)
