"""torch.compile: whole graphs, masks drawn anew in every call, and no recompile when θ changes."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import tensor_dropout as td
from layers_under_test import (
    count_distinct,
    every_draw_in_turn,
    every_format,
    every_law_in_turn,
    make_input,
    make_layer,
)
from tensor_dropout import reference


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_counted(layer, backend="aot_eager"):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(layer, backend=counter, fullgraph=True), counter


def seeded_output(function, x, seed):
    torch.manual_seed(seed)
    return function(x)


def seeded_step(layer, function, x, seed):
    """The output of one training step and the gradients of all parameters."""
    layer.zero_grad()
    y = seeded_output(function, x, seed)
    y.square().sum().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in layer.parameters())]


@every_draw_in_turn
def test_training_follows_theta_and_draws_new_masks_without_recompiling(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, theta=0.5)
    x = make_input(layer)[:1].expand(4, *layer.input_shape)
    compiled, counter = compile_counted(layer)
    outputs = [compiled(x) for _ in range(20)]
    assert count_distinct(outputs) > 1
    assert (max(map(count_distinct, outputs)) > 1) == per_sample

    steps = {}
    for theta in (0.5, 0.9, 1.0):
        layer.dropout.theta = theta
        steps[theta] = seeded_step(layer, compiled, x, seed=3)
        assert_close(steps[theta], seeded_step(layer, layer, x, seed=3))
    assert counter.frame_count == 1
    assert not torch.allclose(steps[0.5][0], steps[0.9][0])
    if law != "replacement":  # whose K = R draws still repeat at θ = 1
        plain = make_layer(format, theta=None)
        assert_close(steps[1.0], seeded_step(plain, plain, x, seed=3))


@every_law_in_turn
@torch.no_grad()
def test_eval_uses_the_mean_weight_and_follows_theta_without_recompiling(format, law):
    layer = make_layer(format, law=law, scaling="paper").eval()
    x = make_input(layer)
    compiled, counter = compile_counted(layer)
    outputs = []
    for theta in (0.5, 0.9):
        layer.dropout.theta = theta
        outputs.append(compiled(x))
        assert_close(outputs[-1], torch.tensordot(x, layer.dense_weight(), dims=3) + layer.bias)
        assert torch.equal(compiled(x), outputs[-1])
    assert counter.frame_count == 1
    if law != "gaussian":  # whose mean is 1 for every θ
        assert not torch.allclose(*outputs)


@every_draw_in_turn
@torch.no_grad()
def test_sampling_at_test_time_draws_new_masks_without_recompiling(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, at_test="sample", theta=0.5).eval()
    x = make_input(layer)
    compiled, counter = compile_counted(layer)
    for theta in (0.5, 0.9):
        layer.dropout.theta = theta
        assert_close(seeded_output(compiled, x, seed=3), seeded_output(layer, x, seed=3))
        assert count_distinct([compiled(x) for _ in range(20)]) > 1
    assert counter.frame_count == 1


@every_format
def test_inductor_output_is_that_of_a_mask_and_its_mean_that_of_eval(format):
    layer = make_layer(format, theta=0.7, small=True, per_sample=True)
    x = make_input(layer, batch=1).expand(4096, *layer.input_shape).contiguous()
    compiled, counter = compile_counted(layer, "inductor")
    y = compiled(x).detach()  # 4096 draws of the masks
    assert torch.cdist(y.double(), possible_outputs(layer, x[:1])).min(dim=1).values.max() < 1e-5
    standard_error = y.std(dim=0) / len(y) ** 0.5
    assert ((y.mean(dim=0) - layer.eval()(x[:1])[0]).abs() < 5 * standard_error).all()

    layer.train()
    layer.dropout.theta = 1.0
    plain = make_layer(format, theta=None, small=True)
    assert_close(seeded_step(layer, compiled, x, seed=3), seeded_step(plain, plain, x, seed=3), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def possible_outputs(layer, x):
    """The outputs for one sample under every mask, in float64: (masks, outputs)."""
    exact = copy.deepcopy(layer).double().requires_grad_(False)
    return torch.cat([reference.regress(exact, x.double(), masks) for _, masks in reference.all_masks(exact)])


@every_format
@torch.no_grad()
def test_another_batch_size_gets_masks_of_its_own_size(format):
    layer = make_layer(format, per_sample=True)
    compiled, counter = compile_counted(layer)
    for batch in (4, 5, 6, 7, 8):
        x = make_input(layer, batch)
        assert_close(seeded_output(compiled, x, seed=batch), seeded_output(layer, x, seed=batch))
    assert counter.frame_count == 2  # the first batch size, then any batch size


@every_format
@torch.no_grad()
def test_fixed_masks_hold_inside_a_compiled_layer(format):
    layer = make_layer(format)
    x = make_input(layer)
    compiled, _ = compile_counted(layer)
    compiled(x)
    networks = []
    for _ in range(3):
        with td.fixed_masks(layer):
            networks.append(compiled(x))
            assert_close(networks[-1], layer(x))
            assert torch.equal(compiled(x), networks[-1])
    assert count_distinct(networks) == 3
    assert count_distinct([compiled(x) for _ in range(5)]) == 5
