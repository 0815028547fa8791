"""DDP and FSDP2 on two CPU processes: each rank draws its own masks, and the gradients are averaged.

Two processes start once, run all checks of this file and hand back the names of those that failed. Collectives come
first in each check and comparisons last, so that a failure on one rank does not leave the other one waiting.
"""

import copy
import json
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import tensor_dropout as td
from layers_under_test import FORMATS, PAIRED, make_input, make_layer, name_combination

WORLD_SIZE = 2

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")


def run_on_two_ranks(folder, parts):
    """Run the checks of every part, a name with ``(check, *arguments)``, on both ranks; part -> its failures."""
    checks = {name: check for part in parts.values() for name, check in part.items()}
    assert len(checks) == sum(map(len, parts.values()))
    mp.spawn(_run_checks, args=(checks, str(folder)), nprocs=WORLD_SIZE)
    failed = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return {
        part: [
            f"rank {rank}, {name}: {errors[name]}"
            for rank, errors in enumerate(failed)
            for name in own
            if name in errors
        ]
        for part, own in parts.items()
    }


def _run_checks(rank, checks, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    failures = {}
    for name, (check, *arguments) in checks.items():
        try:
            check(rank, *arguments)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(failures, file)
    dist.destroy_process_group()
    os._exit(0)  # torch's own threads sometimes abort while Python is shut down ("terminate called …", one in ten)


def for_every_pair(check):
    return {f"{check.__name__}: {name_combination(*each)}": (check, *each) for each in PAIRED}


def for_formats(check, formats):
    return {f"{check.__name__}: {format}": (check, format) for format in formats}


def seeded_step(model, x, seed):
    """One training step with the masks of a seed; returns the output."""
    model.zero_grad()
    torch.manual_seed(seed)
    y = model(x)
    y.square().sum().backward()
    return y.detach()


def average_gradients(model, inputs, seeds):
    """Give the model the mean of the gradients that single processes would have; returns their outputs."""
    outputs, gradients = [], []
    for x, seed in zip(inputs, seeds, strict=True):
        outputs.append(seeded_step(model, x, seed))
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for parameter, *each in zip(model.parameters(), *gradients, strict=True):
        parameter.grad = torch.stack(each).mean(dim=0)
    return outputs


def gather(tensor):
    gathered = [torch.empty_like(tensor) for _ in range(WORLD_SIZE)]
    dist.all_gather(gathered, tensor)
    return gathered


# DDP


def check_ddp_gradients(rank, format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, dtype=torch.float64)
    ddp = DistributedDataParallel(copy.deepcopy(layer))
    inputs, seeds = [make_input(layer, seed=1), make_input(layer, seed=2)], (10, 11)
    output = seeded_step(ddp, inputs[rank], seeds[rank])
    expected = average_gradients(layer, inputs, seeds)
    assert_close(output, expected[rank])
    for (name, parameter), found in zip(layer.named_parameters(), ddp.parameters(), strict=True):
        assert_close(found.grad, parameter.grad, msg=lambda text, name=name: f"gradient of {name}: {text}")


def check_ddp_masks(rank, format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, theta=0.5)
    x = make_input(layer)
    ddp = DistributedDataParallel(layer)

    def draw(seed):
        torch.manual_seed(seed)
        return torch.stack([ddp(x).detach() for _ in range(20)])

    equal_seeds, different_seeds = gather(draw(seed=5)), gather(draw(seed=5 + rank))
    assert torch.equal(*equal_seeds), "equal seeds must give equal masks"
    assert not torch.allclose(*different_seeds), "different seeds must give different masks"


# FSDP2


class Net(nn.Module):
    """A small backbone with a tensor regression head."""

    def __init__(self, head, dtype):
        super().__init__()
        self.backbone = nn.Conv2d(3, head.input_shape[0], 3, padding=1, dtype=dtype)
        self.head = head

    def forward(self, x):
        return self.head(self.backbone(x))


def make_net(format, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return Net(make_layer(format, dtype=dtype, **options), dtype)


def make_images(seed, dtype=torch.float64):
    return torch.randn(4, 3, 6, 5, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def shard(net, **options):
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    fully_shard(net.head, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def check_fsdp_training(rank, format, law, per_sample):
    plain = make_net(format, law=law, per_sample=per_sample)
    sharded = shard(copy.deepcopy(plain))
    images = [make_images(1), make_images(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (plain, sharded)]
    outputs, expected = [], []
    for step in range(3):
        seeds = (10 * step, 10 * step + 1)
        outputs.append(seeded_step(sharded, images[rank], seeds[rank]))
        expected.append(average_gradients(plain, images, seeds)[rank])
        for optimizer in optimizers:
            optimizer.step()
    trained = {name: parameter.full_tensor() for name, parameter in sharded.named_parameters()}
    assert_close(outputs, expected)
    assert_close(trained, dict(plain.named_parameters()))
    assert not torch.allclose(outputs[0], outputs[1])


def check_fsdp_mixed_precision(rank, format):
    plain = make_net(format, dtype=torch.float32, theta=0.9)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = shard(copy.deepcopy(plain), mp_policy=policy)
    x = make_images(1, torch.float32)
    output, expected = seeded_step(sharded, x, seed=3), seeded_step(plain, x, seed=3)
    gradient = sharded.head.bias.grad.full_tensor()
    assert output.dtype == torch.bfloat16
    assert gradient.dtype == torch.float32
    assert_close(output.float(), expected, rtol=0.05, atol=0.05)
    assert sharded.head.dropout.theta.dtype == torch.float32
    assert sharded.head.dropout.theta == torch.tensor(0.9)


def check_fsdp_fixed_masks(rank, format):
    sharded = shard(make_net(format))
    x = make_images(1)
    networks = []
    for seed in range(2):
        torch.manual_seed(seed)
        with td.fixed_masks(sharded):
            networks.append((sharded(x), sharded(x)))
    (first, again), (second, _) = networks
    assert torch.equal(first, again)
    assert not torch.allclose(first, second)


# Expected losses: the call goes through the wrapped network, so that gradients are synchronised


def check_expected_losses(rank, format, wrap):
    plain = make_net(format)
    wrapped = wrap(copy.deepcopy(plain))
    images = [make_images(1), make_images(2)]
    y = torch.randn(4, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for loss, target in ((td.expected_mse, y), (td.expected_cross_entropy, y.argmax(1))):
        wrapped.zero_grad()
        loss(wrapped, images[rank], target).backward()
        found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in wrapped.parameters()]
        plain.zero_grad()
        (sum(loss(plain, x, target) for x in images) / WORLD_SIZE).backward()
        for gradient, (name, parameter) in zip(found, plain.named_parameters(), strict=True):
            assert_close(
                gradient, parameter.grad, msg=lambda text, name=name, loss=loss: f"{loss.__name__}, {name}: {text}"
            )


WRAPS = {"DDP": DistributedDataParallel, "FSDP2": shard}
CHECKS = {
    "DDP draws masks by rank and averages gradients": {
        **for_every_pair(check_ddp_gradients),
        **for_every_pair(check_ddp_masks),
    },
    "FSDP trains like the unsharded net": {
        **for_every_pair(check_fsdp_training),
        **for_formats(check_fsdp_mixed_precision, FORMATS),
        **for_formats(check_fsdp_fixed_masks, FORMATS),
    },
    "expected losses are synchronised": {
        f"{name} {format}": (check_expected_losses, format, wrap) for name, wrap in WRAPS.items() for format in FORMATS
    },
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return run_on_two_ranks(tmp_path_factory.mktemp("ranks"), CHECKS)


@pytest.mark.parametrize("part", CHECKS)
def test_on_two_processes(part, failures):
    assert failures[part] == []
