"""Heads sharded over their classes, on two CPU processes: each equals the plain layer, to rounding, in all it does."""

import copy
import doctest

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.testing import assert_close

import tensor_dropout as td
from layers_under_test import FORMATS as ALL_FORMATS
from layers_under_test import make_input, make_layer
from tensor_dropout.sharding import OutputParallel
from test_distributed import WORLD_SIZE, Net, gather, run_on_two_ranks

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")

BATCH = 4
UNEVEN = 9
CLASSES = {"even": 10, "uneven": UNEVEN}
LAYOUTS = {"replicated": Replicate(), "own samples": Shard(0)}
EXACT = {"rtol": 1e-10, "atol": 1e-10}
FORMATS = [name for name in ALL_FORMATS if make_layer(name).output_parameter is not None]
EVEN_ONLY = "2.11."
"""The torch that mistakes the stride of uneven shards of axis 1: gradients come whole, loading fills them wrongly."""


def make_mesh():
    return init_device_mesh("cpu", (WORLD_SIZE,))


def make_pair(format, classes=UNEVEN, layout=None, **options):
    """A plain layer in float64, and its sharded copy."""
    plain = make_layer(format, output_shape=classes, dtype=torch.float64, **options)
    return plain, parallelize_module(copy.deepcopy(plain), make_mesh(), OutputParallel(input_layouts=layout))


def make_labels(classes, seed=3):
    return torch.randint(classes, (BATCH,), generator=torch.Generator().manual_seed(seed))


def own_part(x, rank, layout):
    """What a process passes to the head: all samples, or its own."""
    return (x if layout == Replicate() else x.chunk(WORLD_SIZE)[rank]).clone()


def sharded_loss(logits, labels):
    """The cross-entropy with its backward pass; returns a plain number."""
    with loss_parallel():
        loss = F.cross_entropy(logits, labels)
        loss.backward()
    return loss.to_local()


def full(tensors):
    return {name: tensor.full_tensor() for name, tensor in tensors}


# One pass


def check_pass(rank, format, classes, layout):
    plain, sharded = make_pair(format, classes, layout, theta=None)
    x, labels = make_input(plain, BATCH).requires_grad_(), make_labels(classes)
    own = own_part(x.detach(), rank, layout).requires_grad_()
    logits = sharded(own)
    loss = sharded_loss(logits, labels)
    found, gradients = logits.full_tensor(), full((n, p.grad) for n, p in sharded.named_parameters())
    expected = plain(x)
    F.cross_entropy(expected, labels).backward()
    assert logits.placements == (Shard(1),)
    assert_close(found, expected, **EXACT)
    assert_close(loss, F.cross_entropy(expected, labels), **EXACT)
    assert_close(gradients, {name: p.grad for name, p in plain.named_parameters()}, **EXACT)
    assert_close(own.grad, own_part(x.grad, rank, layout), **EXACT)
    if (format, classes) != ("tt", UNEVEN) or EVEN_ONLY not in torch.__version__:
        assert all(p.grad.placements == p.placements for p in sharded.parameters())


def check_parts(rank, format):
    """No process holds more than its classes of the output factor, the bias and the logits."""
    plain, sharded = make_pair(format, UNEVEN)
    logits = sharded(make_input(plain, BATCH))
    own = (5, 4)[rank]
    output = "cores.3" if format == "tt" else "factors.3"
    for name, parameter in sharded.named_parameters():
        whole, local = plain.get_parameter(name), parameter.to_local()
        split = name in (output, "bias")
        assert local.nbytes == round((own / UNEVEN if split else 1) * whole.nbytes), name
        # A smaller shard lies in memory of the size of the largest.
        assert local.untyped_storage().nbytes() <= (5 / UNEVEN if split else 1) * whole.nbytes, name
    assert logits.shape == (BATCH, UNEVEN)
    assert logits.to_local().shape == (BATCH, own)


def check_communication(rank, layout, forward, backward):
    """Nothing as large as the features or the logits travels."""
    plain, sharded = make_pair("tucker", UNEVEN, layout)
    x = own_part(make_input(plain, BATCH), rank, layout).requires_grad_()
    with CommDebugMode() as there:
        logits = sharded(x)
    with loss_parallel():
        loss = F.cross_entropy(logits, make_labels(UNEVEN))
        with CommDebugMode() as back:
            loss.backward()
    counts = [{str(op): n for op, n in mode.get_comm_counts().items() if n} for mode in (there, back)]
    assert counts == [forward, backward]


# Training with masks


def check_training(rank, format, layout, per_sample):
    """The seeds differ; the first process's masks count, except that own samples keep their own."""
    plain, sharded = make_pair(format, UNEVEN, layout, theta=0.5, per_sample=per_sample)
    x, labels = make_input(plain, BATCH), make_labels(UNEVEN)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (plain, sharded)]
    found, expected = [], []
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        logits = sharded(own_part(x, rank, layout))
        sharded_loss(logits, labels)
        found.append(logits.full_tensor().detach())
        logits = plain.regress(x, draw_masks(plain, 10 * step, layout))
        F.cross_entropy(logits, labels).backward()
        expected.append(logits.detach())
        for optimizer in optimizers:
            optimizer.step()
    trained = full(sharded.named_parameters())
    assert_close(found, expected, **EXACT)
    assert_close(trained, dict(plain.named_parameters()), **EXACT)
    assert not torch.allclose(found[0], found[1])


def draw_masks(layer, seed, layout):
    """The masks of the whole batch, as two processes with seeds ``seed`` and ``seed + 1`` must have them."""
    own = layer.dropout.per_sample and layout == Shard(0)
    parts = []
    for rank in range(WORLD_SIZE if own else 1):
        torch.manual_seed(seed + rank)
        batch = BATCH // WORLD_SIZE if own else BATCH
        parts.append(layer.draw_masks(batch if layer.dropout.per_sample else None))
    return [torch.cat(each) if own else each[0] for each in zip(*parts, strict=True)]


def check_seeds(rank):
    """Equal seeds give what the plain layer gives; each process's generator moves on as usual."""
    plain, sharded = make_pair("tucker")
    x = make_input(plain)
    torch.manual_seed(5)
    found = [sharded(x).full_tensor() for _ in range(2)]
    after = torch.rand(1)
    torch.manual_seed(5)
    expected = [plain(x) for _ in range(2)]
    assert_close(found, expected, **EXACT)
    assert torch.equal(after, torch.rand(1))


def check_fixed_masks(rank):
    plain, sharded = make_pair("cp")
    x = make_input(plain)
    torch.manual_seed(5 + rank)
    with td.fixed_masks(sharded):
        found = [sharded(x).full_tensor(), sharded.eval()(x).full_tensor()]
    torch.manual_seed(5)
    with td.fixed_masks(plain):
        assert_close(found, [plain(x)] * 2, **EXACT)
    assert_close(sharded(x).full_tensor(), plain.eval()(x), **EXACT)


def check_network(rank):
    """A data-parallel backbone (FSDP2) before a head that exchanges h."""
    torch.manual_seed(0)
    plain = Net(make_layer("tucker", output_shape=UNEVEN, dtype=torch.float64), torch.float64)
    sharded = copy.deepcopy(plain)
    parallelize_module(sharded, make_mesh(), {"head": OutputParallel(input_layouts=Shard(0))})
    fully_shard(sharded.backbone, mesh=make_mesh())
    sharded.backbone.set_gradient_divide_factor(1.0)  # the loss is the mean over all samples: a sum of gradients
    images = torch.randn(BATCH, 3, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(5)
    sharded_loss(sharded(images.chunk(WORLD_SIZE)[rank]), make_labels(UNEVEN))
    gradients = full((name, p.grad) for name, p in sharded.named_parameters())
    torch.manual_seed(5)
    F.cross_entropy(plain(images), make_labels(UNEVEN)).backward()
    assert_close(gradients, {name: p.grad for name, p in plain.named_parameters()}, **EXACT)


def check_example(rank):
    """The example of the docstring runs, and both processes see one loss."""
    namespace = {}
    for example in doctest.DocTestParser().get_examples(OutputParallel.__doc__):
        exec(example.source, namespace)
    labels = torch.arange(BATCH)
    images = torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    losses = gather(namespace["train_one_step"](make_mesh(), images, labels))
    assert torch.equal(*losses)
    assert 6 < losses[0] < 8  # log(1000) = 6.9


# Checkpoints


def check_checkpoint(rank, format):
    """Full tensors load into a plain layer; those of the first process alone fill a head that was made on "meta"."""
    plain, sharded = make_pair(format, seed=rank)  # different weights: those of the first process count
    x = make_input(plain)
    expected = sharded.eval()(x).full_tensor()
    state = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in sharded.state_dict().items()}
    again = make_layer(format, output_shape=UNEVEN, dtype=torch.float64, seed=2)
    again.load_state_dict(state)
    empty = make_layer(format, output_shape=UNEVEN, dtype=torch.float64, device="meta")
    parallelize_module(empty, make_mesh(), OutputParallel()).to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(empty, state if rank == 0 else {}, options=options)
    found = empty.eval()(x).full_tensor()
    assert_close(again.eval()(x), expected, **EXACT)
    if format != "tt" or EVEN_ONLY not in torch.__version__:
        assert_close(found, expected, **EXACT)
    assert torch.equal(make_layer(format, output_shape=UNEVEN, dtype=torch.float64).eval()(x), again(x))
    assert list(empty.state_dict()) == list(again.state_dict())


# Refusals


def check_refusals(rank):
    mesh, layer = make_mesh(), make_layer("tucker")
    several = td.TuckerRegression((4, 3), (2, 3), rank=2)
    refused = {
        "one output mode": lambda: parallelize_module(several, mesh, OutputParallel()),
        "the mesh must have one dimension": lambda: parallelize_module(
            layer, init_device_mesh("cpu", (1, WORLD_SIZE)), OutputParallel()
        ),
        "do not reach all 2 processes": lambda: parallelize_module(
            td.CPRegression((4, 3), 1, rank=2), mesh, OutputParallel()
        ),
        "a TensorRingRegression cannot be sharded over its classes": lambda: parallelize_module(
            make_layer("ring"), mesh, OutputParallel()
        ),
        "plain tensor regression layer, got Linear": lambda: parallelize_module(
            nn.Linear(2, 2), mesh, OutputParallel()
        ),
    }
    sharded, x = parallelize_module(make_layer("tucker"), mesh, OutputParallel()), make_input(layer)
    refused |= {
        "got ShardedTuckerRegression": lambda: parallelize_module(sharded, mesh, OutputParallel()),
        "logits only, not moments; use": lambda: td.expected_cross_entropy(sharded, x, make_labels(UNEVEN)),
        "logits only": lambda: sharded.moments(x),
        "cannot be saved as it is": lambda: td.save(sharded, "head.safetensors"),
        r"expected an input of shape \(B, 8, 6, 5\)": lambda: sharded(x[:, :4]),
    }
    for message, call in refused.items():
        with pytest.raises(td.TensorDropoutError, match=message):
            call()
    assert sharded(x).shape == (BATCH, 10)  # a refused pass leaves the head as it was
    assert_close(full(sharded.named_parameters()), dict(layer.named_parameters()))


# One start of two processes

PASSES = {
    f"{format}, {count} classes, {layout}": (check_pass, format, CLASSES[count], LAYOUTS[layout])
    for format in FORMATS
    for count in CLASSES
    for layout in LAYOUTS
}
MASKS, OF = {"c10d.broadcast_": 1}, "c10d_functional."
TRAFFIC = {
    "traffic, replicated": (check_communication, Replicate(), MASKS, {f"{OF}all_reduce": 1}),
    "traffic, own samples": (
        check_communication,
        Shard(0),
        {**MASKS, f"{OF}all_gather_into_tensor": 1},
        {f"{OF}reduce_scatter_tensor": 1, f"{OF}all_reduce": 4},  # of h; of the core and the input factors
    ),
}
TRAININGS = {
    f"training, {format}, {layout}, {'per sample' if per_sample else 'per batch'}": (
        check_training,
        format,
        LAYOUTS[layout],
        per_sample,
    )
    for format in FORMATS
    for layout in LAYOUTS
    for per_sample in (False, True)
}
CHECKS = {
    "a sharded head is the plain head": {
        **PASSES,
        **{f"checkpoint, {format}": (check_checkpoint, format) for format in FORMATS},
        "refusals": (check_refusals,),
        **{f"parts, {format}": (check_parts, format) for format in FORMATS},
        **TRAFFIC,
    },
    "masks are common and training is the plain one": {
        **TRAININGS,
        **{check.__name__: (check,) for check in (check_seeds, check_fixed_masks, check_network, check_example)},
    },
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return run_on_two_ranks(tmp_path_factory.mktemp("ranks"), CHECKS)


@pytest.mark.parametrize("part", CHECKS)
def test_on_two_processes(part, failures):
    assert failures[part] == []


def test_layouts_other_than_the_batch_are_refused():
    with pytest.raises(td.TensorDropoutError, match="the batch"):
        OutputParallel(input_layouts=Shard(1))
