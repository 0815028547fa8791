"""The comparison with TensorLy-Torch: measured here, and its page must show what is measured.

``make comparison`` (or REWRITE_COMPARISON=1) writes the table into the page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path

import pytest
import tltorch
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tensor_dropout as td
from tensor_dropout import reference

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "tensorly-torch.md"
MARKS = "<!-- comparison:start -->", "<!-- comparison:end -->"
SMALL = (16, 4, 4), 10
SMALL_RANK = (12, 3, 3, 8)
LARGE = (512, 7, 7), 1000
LARGE_RANK, LARGE_BATCH = 64, 8
DRAWS = 2000

pytestmark = pytest.mark.filterwarnings("ignore:torch.meshgrid")  # called by TensorLy-Torch without its indexing


def make_theirs(shape: tuple, rank: int | tuple, factorization: str, drop: float) -> nn.Module:
    """TensorLy-Torch's layer, with its tensor dropout attached as its documentation says."""
    torch.manual_seed(0)
    layer = tltorch.TRL(*shape, factorization=factorization, rank=rank, bias=True)
    tltorch.tensor_dropout(layer.weight, p=drop)
    return layer.train()


def make_ours(shape: tuple, rank: int | tuple, factorization: str, drop: float) -> td.TensorRegression:
    torch.manual_seed(0)
    layer = {"tucker": td.TuckerRegression, "cp": td.CPRegression}[factorization]
    return layer(*shape, rank=rank, dropout=1 - drop, init="normal").train()


MAKERS = make_ours, make_theirs


def passes_are_equal(layer: nn.Module) -> bool:
    """Whether two training passes of the same input are equal, bit for bit."""
    x = torch.randn(4, *SMALL[0])
    return bool((layer(x) == layer(x)).all())


@torch.no_grad()
def mean_over_truth(draw: Callable[[], Tensor], truth: Tensor) -> float:
    """How many times the true weight the average of many randomized weights is (least squares)."""
    mean = sum(draw() for _ in range(DRAWS)) / DRAWS
    return float((mean * truth).sum() / truth.square().sum())


def saved_bytes(layer: nn.Module) -> int:
    """Bytes that one forward pass keeps for the backward pass, besides the parameters and the input."""
    x = torch.randn(LARGE_BATCH, *LARGE[0], requires_grad=True)  # features of a backbone that is trained as well
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *layer.parameters())}
    kept = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = layer(x)  # noqa: F841  # alive, so that no storage is freed and counted under another's address
        return sum(kept.values())


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns, by what it holds in memory (an expanded view: once)."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.size = max(self.size, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return result


def largest_tensor(layer: nn.Module) -> int:
    """The number of entries of the largest tensor in one forward pass."""
    x = torch.randn(LARGE_BATCH, *LARGE[0])
    with LargestTensor() as largest:
        layer(x)
    return largest.size


def draw_rank_three(draw: Callable[[], object]) -> str:
    """What drawing a randomized CP weight of rank 3 gives."""
    try:
        draw()
    except Exception as error:
        return f"`{type(error).__name__}`"
    return "works"


@cache
def measure_equality() -> tuple[bool, ...]:
    return tuple(passes_are_equal(make(SMALL, SMALL_RANK, "tucker", 0.5)) for make in MAKERS)


@cache
def measure_means() -> tuple[float, float]:
    ours, theirs = (make(SMALL, SMALL_RANK, "tucker", 0.5) for make in MAKERS)
    return (
        mean_over_truth(lambda: reference.dense_weight(ours, ours.draw_masks()), ours.dense_weight()),
        mean_over_truth(lambda: theirs.weight().to_tensor(), theirs.weight.to_tensor()),
    )


@cache
def measure_rank_three() -> tuple[str, str]:
    ours, theirs = (make(SMALL, 3, "cp", 0.5) for make in MAKERS)
    return draw_rank_three(ours.draw_masks), draw_rank_three(theirs.weight)


@cache
def measure_memory() -> tuple[tuple[int, int], ...]:
    """(bytes kept for backward, largest tensor), ours and theirs."""
    layers = (make(LARGE, LARGE_RANK, "cp", 0.2) for make in MAKERS)
    return tuple((saved_bytes(layer), largest_tensor(layer)) for layer in layers)


def render_table() -> str:
    inert = [
        "bit-identical: the dropout never runs" if equal else "differ: masks are drawn" for equal in measure_equality()
    ]
    dense = prod(LARGE[0]) * LARGE[1]
    saved = [f"{size / 2**20:.2f} MiB" for size, _ in measure_memory()]
    largest = [
        f"{size:,} entries: {'the dense weight' if size >= dense else 'the input'}" for _, size in measure_memory()
    ]
    rows = [
        ("", f"tensor-dropout {td.__version__}", f"TensorLy-Torch {tltorch.__version__}"),
        ("---", "---", "---"),
        ("two training passes of one input through a Tucker layer with dropout", *inert),
        (
            f"mean of {DRAWS:,} randomized Tucker weights ÷ true weight, rank {SMALL_RANK}, half dropped",
            *(f"{factor:.1f}" for factor in measure_means()),
        ),
        ("drawing a randomized CP weight of rank 3", *measure_rank_three()),
        (f"kept for backward, CP rank {LARGE_RANK}, {LARGE[0]} → {LARGE[1]}, batch {LARGE_BATCH}", *saved),
        ("largest tensor in that forward pass", *largest),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_page_shows_what_is_measured():
    text = PAGE.read_text(encoding="utf-8")
    before, shown, after = re.split("|".join(MARKS), text)
    measured = f"\n{render_table()}\n"
    if os.environ.get("REWRITE_COMPARISON"):
        PAGE.write_text(f"{before}{MARKS[0]}{measured}{MARKS[1]}{after}", encoding="utf-8")
        return
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    if torch.__version__.split("+")[0] != pinned:
        pytest.skip(f"the page's numbers are those of torch {pinned}, this is {torch.__version__}")
    assert shown == measured, "the comparison is stale; run: make comparison"


def test_their_dropout_is_inert_and_ours_is_not():
    assert measure_equality() == (False, True)


def test_mean_weights():
    ours, theirs = measure_means()
    assert ours == pytest.approx(1, abs=0.05)
    # Two modes of rank 3 are not dropped (min_dim=3) but scaled as if they were: 1 / 0.5².
    assert theirs == pytest.approx(4, abs=0.2)


def test_low_cp_rank():
    assert measure_rank_three() == ("works", "`UnboundLocalError`")


def test_memory():
    (our_saved, our_largest), (their_saved, their_largest) = measure_memory()
    dense = prod(LARGE[0]) * LARGE[1]
    assert their_largest >= dense
    assert their_saved >= 4 * dense
    assert our_largest == LARGE_BATCH * prod(LARGE[0])  # the input itself
    assert our_saved < their_saved / 50
