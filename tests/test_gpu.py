"""A smoke test of every format on a CUDA device."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from layers_under_test import count_distinct, every_format, every_pair, make_input, make_layer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make_pair(format, **options):
    """Equal layers on the CPU and on the GPU, in eval, with their inputs."""
    cpu, gpu = make_layer(format, **options).eval(), make_layer(format, **options).eval().cuda()
    x = make_input(cpu)
    return cpu, x, gpu, x.cuda()


@every_pair
def test_eval_agrees_with_the_cpu_and_training_runs(format, law, per_sample):
    cpu, x, gpu, x_gpu = make_pair(format, law=law, per_sample=per_sample, scaling="paper", theta=0.5)
    assert gpu.dropout.theta.is_cuda
    assert gpu.dropout.theta.dtype == torch.float32
    assert_close(gpu(x_gpu).cpu(), cpu(x), rtol=1e-4, atol=1e-4)
    gpu.train()
    outputs = [gpu(x_gpu) for _ in range(20)]
    assert count_distinct(outputs) > 1
    outputs[0].square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in gpu.parameters())


@every_pair
def test_gradients_under_equal_masks_agree_with_the_cpu(format, law, per_sample):
    cpu, x, gpu, x_gpu = make_pair(format, law=law, per_sample=per_sample)
    masks = cpu.draw_masks(batch=len(x) if per_sample else None)
    cpu.regress(x, masks).square().sum().backward()
    gpu.regress(x_gpu, [None if mask is None else mask.cuda() for mask in masks]).square().sum().backward()
    for (name, expected), found in zip(cpu.named_parameters(), gpu.parameters(), strict=True):
        assert_close(found.grad.cpu(), expected.grad, rtol=1e-3, atol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


@every_format
def test_inductor_follows_theta_without_recompiling(format):
    torch._dynamo.reset()
    layer, x = make_layer(format).cuda(), make_input(make_layer(format)).cuda()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    outputs = [compiled(x) for _ in range(20)]
    outputs[0].sum().backward()
    assert count_distinct(outputs) > 1
    for theta in (0.9, 1.0):
        layer.dropout.theta = theta
        y = compiled(x)
    assert counter.frame_count == 1
    assert_close(y, layer.eval()(x), rtol=1e-4, atol=1e-4)  # θ = 1 drops nothing
    torch._dynamo.reset()


@every_format
def test_bfloat16_autocast_trains(format):
    layer, x = make_layer(format).cuda(), make_input(make_layer(format)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        random, mean = layer(x), layer.eval()(x)
    random.float().square().sum().backward()
    assert random.dtype == mean.dtype == torch.bfloat16
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())
    exact = layer(x)
    assert (mean.float() - exact).abs().max() < 0.05 * exact.abs().max()


@every_format
def test_construction_on_the_device(format):
    layer = make_layer(format, device="cuda")
    assert {tensor.device.type for tensor in layer.state_dict().values()} == {"cuda"}
    assert layer(make_input(layer)).is_cuda
