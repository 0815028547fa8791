"""torch.export and ONNX: a dynamic batch, the mean weight in eval, and masks drawn anew at the right rate."""

import pytest
import torch
from torch import nn
from torch.export import Dim, export
from torch.testing import assert_close

from layers_under_test import (
    FORMATS,
    count_distinct,
    every_draw_in_turn,
    every_law_in_turn,
    in_turn,
    make_input,
    make_layer,
    name_combination,
)
from tensor_dropout import reference

DYNAMIC_BATCH = {"x": {0: Dim("batch", min=1)}}
OTHER_BATCHES = (1, 3, 7)


def seeded_output(function, x):
    torch.manual_seed(3)
    return function(x)


@every_law_in_turn
@torch.no_grad()
def test_exported_eval_agrees_with_eager_at_other_batch_sizes(format, law):
    layer = make_layer(format, law=law, scaling="paper").eval()
    exported = export(layer, (make_input(layer),), dynamic_shapes=DYNAMIC_BATCH).module()
    for batch in OTHER_BATCHES:
        x = make_input(layer, batch)
        assert_close(exported(x), torch.tensordot(x, layer.dense_weight(), dims=3) + layer.bias)


@every_draw_in_turn
@torch.no_grad()
def test_exported_sampling_draws_the_masks_of_eager(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, theta=0.5, at_test="sample").eval()
    exported = export(layer, (make_input(layer),), dynamic_shapes=DYNAMIC_BATCH).module()
    for batch in OTHER_BATCHES:
        x = make_input(layer, batch)
        assert_close(seeded_output(exported, x), seeded_output(layer, x))
    assert count_distinct([exported(x) for _ in range(20)]) > 1


class SideBySide(nn.Module):
    """Many layers on one input, to be exported in one go."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return tuple(layer(x) for layer in self.layers)


def export_to_onnx(layers, x):
    """A function that runs the exported layers in onnxruntime: x -> one output per layer."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = SideBySide(layers).eval()
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False, dynamic_shapes=DYNAMIC_BATCH)
    onnxruntime.set_seed(123456789)  # small seeds give random nodes that resemble one another
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (name,) = (argument.name for argument in session.get_inputs())
    return lambda x: [torch.from_numpy(y) for y in session.run(None, {name: x.numpy()})]


@torch.no_grad()
def test_onnx_eval_agrees_with_eager_at_other_batch_sizes():
    layers = {
        name_combination(format, law, per_sample): make_layer(format, law=law, per_sample=per_sample, scaling="paper")
        for format, law, per_sample in in_turn()
    }
    layers |= {f"{format}, inverted scaling": make_layer(format) for format in FORMATS}
    layers |= {f"{format}, no dropout": make_layer(format, theta=None) for format in FORMATS}
    some = next(iter(layers.values()))
    run = export_to_onnx(layers.values(), make_input(some, batch=4))
    for batch in OTHER_BATCHES:
        x = make_input(some, batch)
        for (name, layer), y in zip(layers.items(), run(x), strict=True):
            assert_close(y, layer.eval()(x), rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


# onnxruntime seeds its random nodes with one number + the node's position, so that they are independent in pairs only.
# Hence at most two random nodes meet in one output here: two dropped modes for the laws that use one node, one for
# bernoulli with min_rank, which uses two.
ONE_MODE = {"tucker": (0,), "cp": "all", "tt": (1,), "ring": (1,)}
TWO_MODES = {"tucker": (0, 2), "cp": "all", "tt": (1, 2), "ring": (0, 2)}
N_RUNS, N_ROWS = 1500, 3


def make_sampling_layers():
    options = {"theta": 0.6, "at_test": "sample", "input_shape": (4, 4), "output_shape": 4, "rank": 4}
    layers = {}
    for format, law, per_sample in in_turn():
        modes = (ONE_MODE if law == "bernoulli-min1" else TWO_MODES)[format]
        name = f"{name_combination(format, law, per_sample)}, modes {modes}"
        layers[name] = make_layer(format, law=law, per_sample=per_sample, modes=modes, **options)
    return layers


@torch.no_grad()
def test_onnx_sampling_has_the_moments_of_the_law_and_independent_draws():
    layers = make_sampling_layers()
    first = next(iter(layers.values()))
    x = make_input(first, batch=1)
    run = export_to_onnx(layers.values(), make_input(first, batch=2))
    runs = [run(x.expand(N_ROWS, 4, 4)) for _ in range(N_RUNS)]
    for (name, layer), outputs in zip(layers.items(), zip(*runs, strict=True), strict=True):
        y = torch.stack(outputs).double()  # (runs, rows, outputs)
        if layer.dropout.per_sample:
            assert_uncorrelated(y[:, 0], y[:, 1], f"{name}: rows of a batch")
        else:
            assert torch.allclose(y, y[:, :1], atol=1e-5), f"{name}: the rows of a batch must share their mask"
        assert_uncorrelated(y[:-1, 0], y[1:, 0], f"{name}: successive runs")
        assert_moments(y.flatten(0, 1) if layer.dropout.per_sample else y[:, 0], layer, x, name)


def assert_moments(draws, layer, x, name):
    """Mean and covariance of the draws are the exact ones, from an enumeration of all masks."""
    mean, covariance = reference.mean_and_covariance(layer.double(), x.double())
    assert_expectation(draws, mean[0], f"{name}: mean")
    centred = draws - mean[0]
    assert_expectation(torch.einsum("no,np->nop", centred, centred), covariance[0], f"{name}: covariance")


def assert_uncorrelated(a, b, what):
    centred_a, centred_b = a - a.mean(dim=0), b - b.mean(dim=0)
    assert_expectation(centred_a * centred_b, torch.zeros(a.shape[-1]), what)


def assert_expectation(draws, expected, what):
    """The mean of independent draws is within five standard errors of its expectation."""
    standard_error = draws.std(dim=0) / len(draws) ** 0.5
    errors = (draws.mean(dim=0) - expected).abs() / standard_error
    assert (errors < 5).all(), f"{what}: off by {errors.max():.1f} standard errors"
