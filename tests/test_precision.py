"""Number formats: every dtype, autocast, θ in float32 throughout, and construction on the meta device."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tensor_dropout as td
from layers_under_test import every_format, every_pair, make_input, make_layer

# Relative error of an output or gradient with respect to its largest entry: some roundings of each type.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
LOW_PRECISION = (torch.float16, torch.bfloat16)

every_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
every_low_precision = pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)


def assert_near(found, exact, tolerance, what):
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error < tolerance, f"{what}: relative error {error:.1e}"


def step_under_masks(layer, x, masks, autocast=None):
    """Output, and gradients of the input and of every parameter, by name."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype=autocast) if autocast else nullcontext():
        y = layer.regress(x, masks)
    y.float().square().sum().backward()
    return {"output": y.detach(), "input": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def exact_step(layer, x, masks):
    """The same in float64, with the same rounded parameters and input."""
    masks = [None if mask is None else mask.double() for mask in masks]
    return step_under_masks(copy.deepcopy(layer).double(), x.double(), masks)


@every_dtype
@every_pair
def test_training_in_every_dtype_is_that_of_float64_up_to_rounding(dtype, format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, dtype=dtype)
    x = make_input(layer)
    masks = layer.draw_masks(batch=len(x) if per_sample else None)
    exact = exact_step(layer, x, masks)
    for name, found in step_under_masks(layer, x, masks).items():
        assert found.dtype == dtype, name
        assert_near(found, exact[name], TOLERANCES[dtype], name)


@every_dtype
@every_pair
def test_random_and_mean_outputs_have_the_dtype_of_the_layer(dtype, format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, dtype=dtype, scaling="paper")
    x = make_input(layer)
    assert layer(x).dtype == dtype
    exact = copy.deepcopy(layer).double().eval()(x.double())
    found = layer.eval()(x)
    assert found.dtype == dtype
    assert_near(found, exact, TOLERANCES[dtype], "eval")


@every_low_precision
@every_pair
def test_autocast_computes_in_low_precision_and_keeps_float32_gradients(dtype, format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample)
    x = make_input(layer)
    masks = layer.draw_masks(batch=len(x) if per_sample else None)
    exact = exact_step(layer, x, masks)
    found = step_under_masks(layer, x, masks, autocast=dtype)
    assert found["output"].dtype == dtype
    for name, value in found.items():
        assert name == "output" or value.dtype == torch.float32, name
        assert_near(value, exact[name], TOLERANCES[dtype], name)
    with torch.autocast("cpu", dtype=dtype):
        assert layer(x).dtype == dtype


@every_low_precision
@every_format
def test_autocast_accepts_features_of_its_own_dtype(dtype, format):
    layer = make_layer(format).eval()
    x = make_input(layer)
    with torch.autocast("cpu", dtype=dtype):
        assert_near(layer(x.to(dtype)), layer(x).double(), TOLERANCES[dtype], "eval")
    with pytest.raises(td.TensorDropoutError, match="autocast"):
        layer(x.to(dtype))


@every_low_precision
@every_format
def test_low_precision_masks_are_not_rounded(dtype, format):
    layer = make_layer(format, dtype=dtype, theta=0.9)
    masks = [mask.flatten() for mask in layer.draw_masks(batch=20) if mask is not None]  # enough for some zeros
    assert torch.cat(masks).unique().tolist() == [0.0, pytest.approx(1 / 0.9, rel=1e-6)]


# θ

CASTS = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "to(float16)": lambda module: module.to(torch.float16),
    "to(like)": lambda module: module.to(torch.zeros((), dtype=torch.bfloat16)),
    "type(double)": lambda module: module.type(torch.float64),
    "half, then float": lambda module: module.half().float(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
@every_format
def test_casting_the_network_leaves_theta_in_float32(cast, format):
    net = nn.Sequential(nn.Identity(), make_layer(format, theta=0.9))
    cast(net)
    theta = net[1].dropout.theta
    assert theta.dtype == torch.float32
    assert theta == torch.tensor(0.9)
    net[1].dropout.theta = 0.3
    assert net.state_dict()["1.dropout.theta"] == torch.tensor(0.3)


@every_pair
def test_state_dict_without_theta_loads_and_keeps_theta(format, law, per_sample):
    plain = make_layer(format, theta=None, seed=5)
    layer = make_layer(format, law=law, per_sample=per_sample, theta=0.3)
    state = plain.state_dict()
    layer.load_state_dict(state)
    assert "dropout.theta" not in state
    assert layer.dropout.theta == torch.tensor(0.3)
    x = make_input(layer)
    assert_close(layer.eval()(x), plain(x))


@every_format
def test_state_dict_with_theta_brings_it_along(format):
    layer = make_layer(format, theta=0.3)
    layer.load_state_dict(make_layer(format, theta=0.6).state_dict())
    assert layer.dropout.theta == torch.tensor(0.6)


@every_format
def test_other_missing_keys_are_still_refused(format):
    layer = make_layer(format)
    state = layer.state_dict()
    del state["bias"]
    with pytest.raises(RuntimeError, match="bias"):
        layer.load_state_dict(state)


# The meta device


def on_meta_device(**options):
    with torch.device("meta"):
        return make_layer(**options)


META = {
    "device='meta'": lambda **options: make_layer(device="meta", **options),
    "with torch.device('meta')": on_meta_device,
    "to('meta')": lambda **options: make_layer(**options).to("meta"),
}


@pytest.mark.parametrize("make_meta_layer", META.values(), ids=META.keys())
@every_pair
def test_a_layer_from_the_meta_device_keeps_theta(make_meta_layer, format, law, per_sample):
    options = {"format": format, "law": law, "per_sample": per_sample, "scaling": "paper"}
    source = make_layer(theta=0.6, **options)
    layer = make_meta_layer(theta=0.3, **options)
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device="cpu")
    assert layer.dropout.theta == torch.tensor(0.3)

    weights = {name: value for name, value in source.state_dict().items() if name != "dropout.theta"}
    layer.load_state_dict(weights)
    assert layer.dropout.theta == torch.tensor(0.3)
    layer.load_state_dict(source.state_dict())
    assert layer.dropout.theta == torch.tensor(0.6)
    x = make_input(source)
    assert_close(layer.eval()(x), source.eval()(x), rtol=0, atol=0)


@every_format
def test_weights_can_be_assigned_to_a_layer_on_the_meta_device(format):
    source = make_layer(format, theta=0.6)
    layer = make_layer(format, theta=0.3, device="meta")
    layer.load_state_dict(source.state_dict(), assign=True)
    x = make_input(source)
    assert layer.dropout.theta == torch.tensor(0.6)
    assert_close(layer.eval()(x), source.eval()(x), rtol=0, atol=0)


@every_format
@pytest.mark.parametrize("outputs", [1, 10])
@pytest.mark.parametrize(
    "dtypes", [(torch.float64, torch.float64), (torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str
)
def test_autocast_computes_in_float64_what_has_it_or_refuses_in_one_sentence(format, outputs, dtypes):
    """torch's autocast leaves float64 alone: two operands of different types would meet."""
    of_layer, of_input = dtypes
    layer = make_layer(format, dtype=of_layer, output_shape=outputs, rank=2)
    x = make_input(layer).to(of_input)
    for ask in (layer, layer.moments):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if of_layer == of_input:
                assert torch.as_tensor(ask(x)[0]).dtype == torch.float64
            else:
                with pytest.raises(td.TensorDropoutError, match=r"torch\.autocast leaves torch\.float64 as it is"):
                    ask(x)
