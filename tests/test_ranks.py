"""Ranks: numbers, fractions and "full", and the compression that they give (bad ones are in test_bad_input.py)."""

from __future__ import annotations

import re
from math import prod

import pytest
import torch

import tensor_dropout as td
from layers_under_test import FORMATS, every_format

SHAPE, OUTPUTS = (8, 4, 5), 10


def make(format, rank, input_shape=SHAPE, output_shape=OUTPUTS, **options):
    return FORMATS[format](input_shape, output_shape, rank, **options)


def count(layer):
    return sum(parameter.numel() for name, parameter in layer.named_parameters() if name != "bias")


@pytest.mark.parametrize(
    ("format", "asked", "rank"),
    [
        ("tucker", 1, (1, 1, 1, 1)),
        ("tucker", 4, (4, 4, 4, 4)),
        ("tucker", 6, (6, 4, 5, 6)),  # an int is cut at each mode's size
        ("tucker", 10, (8, 4, 5, 10)),
        ("tucker", (3, 1, 5, 2), (3, 1, 5, 2)),
        ("tucker", [3, 1, 5, 2], (3, 1, 5, 2)),
        ("tucker", torch.Size((3, 1, 5, 2)), (3, 1, 5, 2)),
        ("tucker", "full", (8, 4, 5, 10)),
        ("tt", 1, (1, 1, 1)),
        ("tt", 9, (8, 9, 9)),
        ("tt", (2, 20, 3), (2, 20, 3)),
        ("tt", "full", (8, 32, 10)),
        ("ring", 1, (1, 1, 1, 1)),
        ("ring", 9, (9, 9, 9, 9)),
        ("ring", (3, 2, 20, 3), (3, 2, 20, 3)),
        ("ring", "full", (1, 8, 32, 10)),
        ("cp", 7, 7),
        ("cp", (7,), 7),
        ("cp", "full", 160),  # 8·4·5 < any product with the 10
    ],
)
def test_rank_as_asked(format, asked, rank):
    assert make(format, asked).rank == rank


@pytest.mark.parametrize(
    ("input_shape", "output_shape", "cp", "tt"),
    [
        ((8,), 3, 3, (3,)),
        ((3,), 8, 3, (3,)),
        ((6, 2, 2), 1, 4, (4, 2, 1)),
        ((2, 3, 4), (5, 6), 120, (2, 6, 24, 6)),
        ((1, 1), 1, 1, (1, 1)),
    ],
)
def test_full_ranks(input_shape, output_shape, cp, tt):
    assert make("cp", "full", input_shape, output_shape).rank == cp
    assert make("tt", "full", input_shape, output_shape).rank == tt
    outputs = (output_shape,) if isinstance(output_shape, int) else output_shape
    assert make("tucker", "full", input_shape, output_shape).rank == input_shape + outputs


WEIGHT_SHAPES = [((5,), 3), ((4, 3, 2), 5), ((2, 3, 2), (2, 3))]


@pytest.mark.parametrize(("input_shape", "output_shape"), WEIGHT_SHAPES)
def test_full_tucker_is_any_weight(input_shape, output_shape):
    layer = make("tucker", "full", input_shape, output_shape, dtype=torch.float64)
    weight = torch.randn(layer.weight_shape, dtype=torch.float64)
    with torch.no_grad():
        layer.core.copy_(weight)
        for factor in layer.factors:
            factor.copy_(torch.eye(len(factor)))
    torch.testing.assert_close(layer.dense_weight(), weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("input_shape", "output_shape"), WEIGHT_SHAPES)
def test_full_tensor_train_is_any_weight_and_no_bond_is_too_large(input_shape, output_shape):
    layer = make("tt", "full", input_shape, output_shape, dtype=torch.float64)
    weight = torch.randn(layer.weight_shape, dtype=torch.float64)
    rest = weight.reshape(1, -1)
    with torch.no_grad():
        for core in layer.cores[:-1]:  # TT-SVD
            left, size, right = core.shape
            unfolded = rest.reshape(left * size, -1)
            U, S, V = torch.linalg.svd(unfolded, full_matrices=False)
            core.copy_(U[:, :right].reshape(core.shape))
            rest = S[:right, None] * V[:right]
        layer.cores[-1].copy_(rest.reshape(layer.cores[-1].shape))
    torch.testing.assert_close(layer.dense_weight(), weight, rtol=0, atol=1e-12)
    for n, rank in enumerate(layer.rank, start=1):
        assert torch.linalg.matrix_rank(weight.reshape(prod(layer.weight_shape[:n]), -1)) == rank


@pytest.mark.parametrize(("input_shape", "output_shape"), WEIGHT_SHAPES)
def test_full_cp_is_any_weight(input_shape, output_shape):
    """One term per fibre of the largest mode: unit columns elsewhere, the fibre itself there."""
    layer = make("cp", "full", input_shape, output_shape, dtype=torch.float64)
    weight = torch.randn(layer.weight_shape, dtype=torch.float64)
    longest = max(range(weight.ndim), key=lambda mode: weight.shape[mode])
    fibres = weight.movedim(longest, -1)
    with torch.no_grad():
        for r, place in enumerate(torch.cartesian_prod(*map(torch.arange, fibres.shape[:-1])).reshape(layer.rank, -1)):
            others = iter(place.tolist())
            for mode, factor in enumerate(layer.factors):
                column = fibres[tuple(place)] if mode == longest else torch.eye(len(factor))[next(others)]
                factor[:, r] = column
    torch.testing.assert_close(layer.dense_weight(), weight, rtol=0, atol=1e-12)


# Fractions.

FRACTIONS = [0.08, 0.1, 0.25, 0.5, 0.75, 1.0]


@every_format
@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("shapes", [(SHAPE, OUTPUTS), ((64, 7, 7), 100), ((20,), 30), ((6, 5, 4), (3, 2))], ids=str)
def test_fraction_is_the_largest_rank_within_the_parameter_count(format, fraction, shapes):
    try:
        layer = make(format, fraction, *shapes, device="meta")
    except td.TensorDropoutError:
        assert count(make(format, 1, *shapes)) > fraction * prod(make(format, 1, *shapes).weight_shape)
        return
    budget = fraction * prod(layer.weight_shape)
    assert count(layer) <= budget
    ranks, full = layer._ranks, layer.largest_ranks(layer.weight_shape)
    # The next step along the way from rank 1 to full rank: the largest axis gets one rank more.
    step = max(full)
    position = max(k for k in range(step + 1) if tuple(max(1, f * k // step) for f in full) == ranks)
    if position < step:
        larger = tuple(max(1, f * (position + 1) // step) for f in full)
        assert count(make(format, larger, *shapes, device="meta")) > budget


@every_format
@pytest.mark.parametrize("shapes", [(SHAPE, OUTPUTS), ((7, 7), 7), ((10, 5, 3), 11), ((13, 3, 3), 7)], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_fraction_of_exactly_n_parameters_allows_n(format, shapes, rank):
    """In spite of rounding: (n / dense) · dense may be below n."""
    layer = make(format, rank, *shapes)
    if layer.compression_ratio >= 1:
        assert count(make(format, 1 / layer.compression_ratio, *shapes)) <= count(layer)
    lone = make(format, 1, *shapes)
    assert make(format, count(lone) / prod(lone.weight_shape), *shapes).rank == lone.rank


@every_format
@pytest.mark.parametrize("shapes", [((8, 4, 4), 1), ((8, 2, 2), 1), ((6, 3, 3), 2), ((16, 7, 7), 10)], ids=str)
def test_the_fraction_that_an_error_asks_for_is_enough(format, shapes):
    with pytest.raises(td.TensorDropoutError, match="ask for a fraction of at least") as refusal:
        make(format, 1e-9, *shapes)
    asked = float(re.search(r"at least ([\d.e-]+)", str(refusal.value)).group(1))
    assert set(make(format, asked, *shapes)._ranks) == {1}


@every_format
def test_where_no_fraction_is_enough_the_error_says_so(format):
    with pytest.raises(td.TensorDropoutError, match=r"rank 1 already has .*write rank=1"):
        make(format, 1.0, (2,), 1)
    assert make(format, 1, (2,), 1)(torch.zeros(3, 2)).shape == (3, 1)


# Compression.


@every_format
@pytest.mark.parametrize("rank", [1, 3, "full"])
def test_compression_ratio_is_dense_size_over_parameters(format, rank):
    layer = make(format, rank)
    assert layer.compression_ratio == pytest.approx(8 * 4 * 5 * 10 / count(layer))


def test_compression_ratio_of_the_papers_layer():
    """ResNet-101 on ImageNet: 2048·7·7·1000 entries; the bias does not count."""
    layer = td.TuckerRegression((2048, 7, 7), 1000, (256, 3, 3, 256), device="meta")
    factors = 2048 * 256 + 7 * 3 + 7 * 3 + 1000 * 256
    assert layer.compression_ratio == pytest.approx(2048 * 49 * 1000 / (256 * 9 * 256 + factors))
