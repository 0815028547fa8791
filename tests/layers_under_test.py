"""The layers that every integration test runs through: each format, law and kind of mask."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import tensor_dropout as td

FORMATS = {"tucker": td.TuckerRegression, "cp": td.CPRegression, "tt": td.TTRegression, "ring": td.TensorRingRegression}
LAWS = {
    "bernoulli": {"law": "bernoulli"},
    "bernoulli-min1": {"law": "bernoulli", "min_rank": 1},
    "replacement": {"law": "replacement"},
    "gaussian": {"law": "gaussian"},
    "nested": {"law": "nested"},
    "nested-min3": {"law": "nested", "min_rank": 3},
}
PER_SAMPLE = {"per-batch": False, "per-sample": True}

INPUT_SHAPE = (8, 6, 5)
OUTPUT_SHAPE = (10,)
RANKS = {"tucker": (8, 6, 5, 8), "cp": 24, "tt": (8, 8, 8), "ring": (4, 6, 5, 4)}

SMALL_INPUT_SHAPE = (3, 3, 3)
SMALL_OUTPUT_SHAPE = (3,)
SMALL_RANKS = {"tucker": (3, 3, 3, 3), "cp": 4, "tt": (3, 3, 3), "ring": (3, 3, 3, 3)}

# All three need not meet: a format gets masks of either kind, whatever law drew them.
PAIRED = [(format, law, (k + n) % 2 == 1) for (k, format), (n, law) in product(enumerate(FORMATS), enumerate(LAWS))]

every_format = pytest.mark.parametrize("format", FORMATS)
every_law = pytest.mark.parametrize("law", LAWS)
both_masks = pytest.mark.parametrize("per_sample", PER_SAMPLE.values(), ids=PER_SAMPLE.keys())

_DROPOUT_OPTIONS = ("modes", "scaling", "min_rank", "at_test")


def every_pair(test):
    """Parametrize a test so that every two of format, law and kind of mask meet."""
    return _parametrize(PAIRED)(test)


def _parametrize(cases):
    ids = ["-".join((format, law, "per-sample" if per_sample else "per-batch")) for format, law, per_sample in cases]
    return pytest.mark.parametrize(("format", "law", "per_sample"), cases, ids=ids)


def every_law_in_turn(test):
    """Parametrize a test over the laws, the formats taking turns: where masks are means, whatever their kind."""
    formats = list(FORMATS)
    pairs = [(formats[n % len(formats)], law) for n, law in enumerate(LAWS)]
    return pytest.mark.parametrize(("format", "law"), pairs, ids=["-".join(pair) for pair in pairs])(test)


def every_draw_in_turn(test):
    """Parametrize a test over the laws with both kinds of mask, the formats taking turns: where a case takes long."""
    return _parametrize(in_turn())(test)


def in_turn():
    """(format, law, per_sample) for every law with both kinds of mask; the formats take turns."""
    formats = list(FORMATS)
    return [
        (formats[(n + per_sample) % len(formats)], law, per_sample)
        for (n, law), per_sample in product(enumerate(LAWS), PER_SAMPLE.values())
    ]


def name_combination(format, law, per_sample):
    return f"{format}, {law}, {'per-sample' if per_sample else 'per-batch'} masks"


def make_layer(
    format, *, law="bernoulli", per_sample=False, theta=0.7, dtype=torch.float32, small=False, seed=0, **options
):
    """A layer in which every rank reaches the output (``init="normal"``); equal calls give equal parameters.

    ``law`` is a key of LAWS, another name or a law object; ``theta=None`` is the layer without dropout. Other options
    go to the dropout (modes, scaling, min_rank, at_test) or to the layer (rank, bias, init, device, ...).
    """
    dropout_options = {key: options.pop(key) for key in _DROPOUT_OPTIONS if key in options}
    law_options = LAWS.get(law, {"law": law}) if isinstance(law, str) else {"law": law}
    dropout = None
    if theta is not None:
        dropout = td.TensorDropout(theta, per_sample=per_sample, **{**law_options, **dropout_options})
    layer_options = {
        "input_shape": SMALL_INPUT_SHAPE if small else INPUT_SHAPE,
        "output_shape": SMALL_OUTPUT_SHAPE if small else OUTPUT_SHAPE,
        "rank": (SMALL_RANKS if small else RANKS)[format],
        "init": "normal",
        **options,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return FORMATS[format](dropout=dropout, dtype=dtype, **layer_options)


def make_input(layer, batch=4, *, seed=1):
    """A standard normal batch in the layer's dtype and on its device."""
    weight = layer.operands()[0]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, *layer.input_shape, generator=generator, dtype=torch.float64)
    return x.to(device=weight.device, dtype=weight.dtype)


def count_distinct(outputs):
    """How many of some tensors of equal shape differ from one another, by more than rounding.

    Equal rows of one product may differ in their last bit: some processors' kernels sum rows of a block differently.
    """
    kept: list[torch.Tensor] = []
    for output in outputs:
        if not any(torch.allclose(output, other, rtol=1e-5, atol=1e-6) for other in kept):
            kept.append(output)
    return len(kept)
