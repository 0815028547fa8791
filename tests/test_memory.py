"""Memory: no dense weight on the way or among the tensors kept for backward (but for one or two outputs)."""

from math import prod

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tensor_dropout as td
from layers_under_test import every_pair, make_input, make_layer
from tensor_dropout.layers.plan import FEW_OUTPUTS

FEATURES = (512, 7, 7)
HEAD_RANKS = {"tucker": (64, 7, 7, 64), "cp": 64, "tt": (64, 64, 64), "ring": (16, 16, 16, 16)}
BATCH = 8
MIB = 2**20


def make_head(format, n_outputs, **options):
    return make_layer(format, input_shape=FEATURES, output_shape=n_outputs, rank=HEAD_RANKS[format], **options)


def count_bytes(tensors):
    """The bytes behind some tensors, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def saved_bytes(layer, x):
    """What one forward pass keeps for backward, input and parameters included."""
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    return count_bytes(saved)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest result of any operation."""

    def __init__(self):
        super().__init__()
        self.numel, self.operation = 0, None

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() // tensor.itemsize > self.numel:
                self.numel, self.operation = tensor.untyped_storage().nbytes() // tensor.itemsize, function
        return result


def test_saved_bytes_of_a_dense_layer_are_counted():
    layer, x = torch.nn.Linear(64, 100), torch.randn(BATCH, 64, requires_grad=True)
    assert saved_bytes(layer, x) == 4 * (64 * 100 + BATCH * 64)


def test_the_largest_tensor_of_a_dense_layer_is_found():
    x = torch.randn(BATCH, 64)
    with LargestTensor() as largest:
        torch.outer(x[0], x[1]).sum()
    assert largest.numel == 64 * 64


@pytest.mark.parametrize("per_sample", [False, True])
def test_cp_head_keeps_less_than_two_mebibytes(per_sample):
    layer = make_head("cp", 1000, per_sample=per_sample)
    assert saved_bytes(layer, make_input(layer, BATCH).requires_grad_()) < 2 * MIB


HEADS = {
    "small image": ((512, 4, 4), 100, (256, 3, 3, 96), 200),
    "image": ((2048, 7, 7), 1000, (256, 3, 3, 256), 200),
    "volume": ((512, 6, 7, 6), 1, (128, 6, 7, 6, 1), 48),
    "video": ((512, 4, 7, 7), 400, (256, 2, 3, 3, 128), 200),
}
every_head = pytest.mark.parametrize("head", HEADS)
every_mask = pytest.mark.parametrize("dropout", [None, False, True], ids=["plain", "per-batch", "per-sample"])


def kept_activations(layer, x):
    """The numbers that one forward pass keeps for backward besides the input and the parameters."""
    saved, known = [], {tensor.untyped_storage().data_ptr() for tensor in (x, *layer.parameters())}
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    return count_bytes([tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in known]) // 4


def make_dropout(per_sample):
    return None if per_sample is None else td.TensorDropout(0.8, per_sample=per_sample)


@every_head
@every_mask
def test_tucker_keeps_one_tensor_of_channels_and_what_lives_in_rank_space(head, dropout):
    input_shape, n_outputs, rank, _ = HEADS[head]
    layer = td.TuckerRegression(input_shape, n_outputs, rank, dropout=make_dropout(dropout))
    joint = prod(rank[1:-1])
    in_rank_space = prod(rank[:-1]) + rank[-1]
    masks = 0 if dropout is None else sum(rank) + prod(rank[:-1])  # what is drawn and, per sample, their joint mask
    merged = 2 * prod(input_shape[1:]) * joint  # the Kronecker product of the spatial factors, and on the way to it
    limit = BATCH * (input_shape[0] * joint + in_rank_space + masks) + merged
    assert kept_activations(layer, make_input(layer, BATCH).requires_grad_()) <= limit


@every_head
@every_mask
def test_cp_keeps_the_projected_channels_and_what_lives_in_rank_space(head, dropout):
    input_shape, n_outputs, _, rank = HEADS[head]
    layer = td.CPRegression(input_shape, n_outputs, rank, dropout=make_dropout(dropout))
    space = prod(input_shape[1:])
    limit = BATCH * (space * rank + 2 * rank) + 2 * space * rank
    if n_outputs <= FEW_OUTPUTS:  # the weight is formed
        limit = max(limit, input_shape[0] * space * n_outputs + 3 * space * rank)
    assert kept_activations(layer, make_input(layer, BATCH).requires_grad_()) <= limit


@every_pair
def test_saved_bytes_grow_with_the_factors_not_with_the_dense_weight(format, law, per_sample):
    small, large = (make_head(format, n_outputs, law=law, per_sample=per_sample) for n_outputs in (100, 4000))
    x = make_input(small, BATCH).requires_grad_()
    saved_small, saved_large = saved_bytes(small, x), saved_bytes(large, x)
    assert saved_small < 1.5 * count_bytes([x, *small.parameters()])
    added_outputs = 4000 - 100
    row = 16 * 16 if format == "ring" else 64  # of the last factor; each output adds one
    assert saved_large - saved_small < 1.5 * 4 * added_outputs * row


@every_pair
def test_no_tensor_is_larger_than_the_features_or_a_factor(format, law, per_sample):
    layer = make_head(format, 1000, law=law, per_sample=per_sample)
    x = make_input(layer, BATCH).requires_grad_()
    with LargestTensor() as largest:
        layer(x).square().sum().backward()
    limit = max(tensor.numel() for tensor in (x, *layer.parameters()))
    assert x.grad is not None
    assert 0 < largest.numel <= limit, f"{largest.operation} makes {largest.numel} numbers"
