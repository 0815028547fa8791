"""Copies, pickles, torch.func transforms and derivatives of the layers."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.testing import assert_close

import tensor_dropout as td
from layers_under_test import count_distinct, every_format, every_pair, make_input, make_layer
from tensor_dropout.layers import laws


def seeded(function, *arguments, seed=3, **options):
    torch.manual_seed(seed)
    return function(*arguments, **options)


def pickle_copy(layer):
    return pickle.loads(pickle.dumps(layer))


def torch_save_copy(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": pickle_copy, "torch.save": torch_save_copy}
every_copy = pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES.keys())


@every_copy
@every_pair
def test_a_copy_is_equal_and_independent(make_copy, format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, scaling="paper")
    x = make_input(layer)
    layer(x).sum().backward()
    twin = make_copy(layer)
    assert repr(twin) == repr(layer)
    assert twin.training
    expected = seeded(layer, x)
    assert_close(seeded(twin, x), expected, rtol=0, atol=0)
    assert_close(twin.eval()(x), layer.eval()(x), rtol=0, atol=0)

    twin.dropout.theta = 0.1
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert layer.dropout.theta == torch.tensor(0.7)
    assert_close(seeded(layer.train(), x), expected, rtol=0, atol=0)


class KeepFirst:
    """A law of one's own: always the first rank alone."""

    def draw(self, shape, theta, *, device):
        return (torch.arange(shape[-1], device=device) == 0).float().expand(shape)

    def mean(self, R, theta):
        return torch.ones(R, dtype=torch.float64, device=theta.device)

    def second_moment(self, R, theta):
        return None

    def support(self, R, theta):
        return None


@every_copy
@every_format
def test_a_copy_keeps_a_law_of_ones_own(make_copy, format):
    layer = make_layer(format, law=KeepFirst())
    x = make_input(layer)
    assert_close(make_copy(layer)(x), layer(x))
    assert not torch.allclose(layer(x), layer.eval()(x))


@every_copy
def test_a_copy_with_a_registered_law_can_be_saved(make_copy, tmp_path, monkeypatch):
    monkeypatch.setattr(laws, "_REGISTERED", {})
    td.register_law("keep-first", KeepFirst())
    layer = make_layer("cp", law="keep-first")
    td.save(make_copy(layer), tmp_path / "copy.safetensors")
    assert repr(td.load(tmp_path / "copy.safetensors")) == repr(layer)


# torch.func


def one_sample(layer):
    """The layer as a function of its parameters and a single sample."""
    return lambda parameters, x: functional_call(layer, parameters, (x.unsqueeze(0),)).squeeze(0)


def detached_parameters(layer):
    return {name: parameter.detach() for name, parameter in layer.named_parameters()}


def sample_loss(layer):
    function = one_sample(layer)
    return lambda parameters, x: function(parameters, x).square().sum()


@every_pair
def test_vmap_draws_a_mask_for_each_sample_or_one_for_all(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, theta=0.5)
    x = make_input(layer, batch=1).expand(30, *layer.input_shape)
    function, parameters = one_sample(layer), detached_parameters(layer)
    different = vmap(function, in_dims=(None, 0), randomness="different")(parameters, x)
    assert count_distinct(different) > 1
    same = seeded(vmap(function, in_dims=(None, 0), randomness="same"), parameters, x)
    assert_close(same, seeded(function, parameters, x[0]).expand_as(same))


@every_pair
def test_vmap_over_samples_has_the_mean_of_eval(format, law, per_sample):
    shape = {"input_shape": (4, 4), "output_shape": 4, "rank": 4}
    layer = make_layer(format, law=law, per_sample=per_sample, theta=0.6, **shape)
    x = make_input(layer, batch=1)
    function, parameters = one_sample(layer), detached_parameters(layer)
    draws = vmap(function, in_dims=(None, 0), randomness="different")(parameters, x.expand(5000, *layer.input_shape))
    expected = layer.eval()(x)[0].detach()
    assert ((draws.mean(dim=0) - expected).abs() < 5 * draws.std(dim=0) / len(draws) ** 0.5).all()


@every_pair
def test_vmap_over_an_ensemble_gives_each_member_its_theta(format, law, per_sample):
    thetas = (0.3, 0.6, 1.0)
    layers = [
        make_layer(format, law=law, per_sample=per_sample, theta=theta, scaling="paper", seed=seed).eval()
        for seed, theta in enumerate(thetas)
    ]
    x = make_input(layers[0])
    state = stack_module_state(layers)
    outputs = vmap(lambda *state: functional_call(layers[0], state, (x,)))(*state)
    assert_close(outputs, torch.stack([layer(x) for layer in layers]))


@every_pair
def test_per_sample_gradients_agree_with_a_loop(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, dtype=torch.float64)
    x = make_input(layer)
    loss, parameters = sample_loss(layer), detached_parameters(layer)
    gradients = seeded(vmap(grad(loss), in_dims=(None, 0), randomness="same"), parameters, x)
    for k, sample in enumerate(x):
        layer.zero_grad()
        seeded(layer, sample.unsqueeze(0)).square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert_close(gradients[name][k], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


@every_pair
def test_per_sample_gradients_differ_where_the_masks_do(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, theta=0.5)
    x = make_input(layer, batch=1).expand(30, *layer.input_shape)
    loss, parameters = sample_loss(layer), detached_parameters(layer)
    gradients = vmap(grad(loss), in_dims=(None, 0), randomness="different")(parameters, x)
    assert all(count_distinct(gradient) > 1 for gradient in gradients.values())


# Derivatives


class UnderMasks(nn.Module):
    """A layer under given masks."""

    def __init__(self, layer, masks):
        super().__init__()
        self.layer, self.masks = layer, masks

    def forward(self, x):
        return self.layer.regress(x, self.masks)


@every_pair
def test_first_and_second_derivatives_under_fixed_masks(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, dtype=torch.float64, small=True)
    thinned = UnderMasks(layer, layer.draw_masks(batch=2 if per_sample else None))
    names, parameters = zip(*thinned.named_parameters(), strict=True)
    inputs = (make_input(layer, batch=2).requires_grad_(), *parameters)

    def function(x, *parameters):
        return functional_call(thinned, dict(zip(names, parameters, strict=True)), (x,))

    assert gradcheck(function, inputs, fast_mode=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


@every_format
def test_every_entry_of_the_jacobian_under_fixed_masks(format):
    layer = make_layer(format, dtype=torch.float64, small=True)
    x = make_input(layer, batch=2).requires_grad_()
    with td.fixed_masks(layer):
        assert gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))
