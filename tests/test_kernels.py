"""The fused heads equal the plain layers: outputs, gradients, gradients of gradients, compiled and exported.

Without a GPU the kernels run in Triton's interpreter (conftest.py), and are compiled for GPUs that are not there.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from heads.cases import CASES, SUITE

from layers_under_test import count_distinct, make_layer
from tensor_dropout.kernels import columns, dispatch, spatial
from tensor_dropout.kernels.cp import cp_head, cp_head_backward
from tensor_dropout.kernels.tucker import tucker_head, tucker_head_backward

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
KERNELS = Path(dispatch.__file__).parent
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
TF32 = 5e-3
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
needs_no_gpu = pytest.mark.skipif(ON_GPU, reason="the kernels run on the CUDA device that is there")
poisoned = pytest.mark.usefixtures("_poisoned")
both_formats = pytest.mark.parametrize("format", ["tucker", "cp"])


class Head(NamedTuple):
    """A batch, and a head on it: Tucker with ``ranks``, or CP with ``rank``."""

    batch: int
    channels: int
    space: tuple[int, ...]
    outputs: int
    ranks: tuple[int, ...]
    rank: int

    @property
    def input_shape(self):
        return (self.channels, *self.space)


BIG = 513 if ON_GPU else 67
"""Where each step costs the interpreter a millisecond; more than a tile of 64 either way."""
# Each of 1, 3, 5, 7, 49 and 513 as batch, channels, outputs and rank, up to 49 as positions (one program holds 256).
HEADS = {
    "ones": Head(1, 1, (1,), 1, (1, 1, 1), 1),
    "batch-3": Head(3, 513, (5,), 49, (49, 3, 7), 3),
    "batch-5": Head(5, 7, (7, 7), 513, (7, 3, 5, 49), 7),
    "batch-7": Head(7, 49, (3,), 3, (5, 1, 3), 5),
    "batch-49": Head(49, 5, (3, 1, 2), 7, (3, 3, 1, 2, 5), 7),
    "batch-big": Head(BIG, 3, (7,), 5, (1, 7, 5), 1),
    "rank-49": Head(2, 50, (49,), 5, (49, 2, 1), 49),
    "rank-in-big": Head(2, 513, (3,), 3, (BIG, 1, 3), 9),
    "rank-out-big": Head(2, 40, (3, 5), 513, (3, 1, 1, BIG), BIG),
    "one-channel": Head(3, 1, (2, 3), 4, (1, 2, 3, 4), 5),
    "one-position": Head(3, 5, (1, 1), 4, (5, 1, 1, 4), 4),
    "joint-rank-32": Head(2, 20, (4, 3, 5), 6, (9, 4, 2, 4, 6), 17),
}
SLOW = [] if ON_GPU else [key for key, head in HEADS.items() if max(head[0], head[1], head[3], head[5]) >= 49]
"""Tried in one layout alone."""
HEAD = Head(4, 21, (3, 5), 9, (6, 2, 4, 5), 11)


def scale_down(case):
    """A head of the benchmark with fewer channels and outputs, for the interpreter."""
    ranks, space = case.ranks["tucker"], case.input_shape[1:]
    channels, outputs = case.input_shape[0] // 16, -(-case.outputs // 8)
    return Head(2, channels, space, outputs, (ranks[0] // 16, *ranks[1:-1], -(-ranks[-1] // 8)), case.ranks["cp"] // 4)


def take_whole(case):
    return Head(8, case.input_shape[0], case.input_shape[1:], case.outputs, case.ranks["tucker"], case.ranks["cp"])


BENCHMARKED = {f"small-{key}": scale_down(CASES[key]) for key in SUITE}
if ON_GPU:
    BENCHMARKED |= {key: take_whole(CASES[key]) for key in SUITE}


def surround(x):
    """A slice of the channels: what lies beside them is no number."""
    beside = x.new_full((), float("nan")).expand_as(x)
    return torch.cat([beside, x, beside], 1)[:, x.shape[1] : 2 * x.shape[1]]


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


LAYOUTS = {
    "first": lambda x: x,
    "last": channels_last,
    "batch-inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "space-turned": lambda x: x.mT.contiguous().mT,
    "sliced-first": surround,
    "sliced-last": lambda x: channels_last(torch.cat([x, x * float("nan")], 1))[:, : x.shape[1]],
    "every-other": lambda x: x.repeat_interleave(2, 0)[::2],
    "repeated": lambda x: x[:1].expand_as(x),
}
MASKS = {
    "none": ["none"],
    "shared": ["shared"],
    "per-sample": ["per-sample"],
    "mixed": ["per-sample", "shared", "none"],
    "mixed-otherwise": ["shared", "none", "per-sample"],
}


def draw_masks(ranks, batch, kind):
    """Masks in float32 as a layer draws them, slices of one draw; one entry is dropped wherever others are left."""
    drawn = {}
    for name, shape in {"shared": (), "per-sample": (batch,)}.items():
        drawn[name] = (torch.rand(*shape, sum(ranks)) + 0.5).to(DEVICE).split(list(ranks), -1)
        for mask in drawn[name]:
            mask[..., mask.shape[-1] - 1 :].fill_(1.0 if mask.shape[-1] == 1 else 0.0)
    drawn["none"] = [None] * len(ranks)
    return [drawn[name][axis] for axis, name in zip(range(len(ranks)), cycle(MASKS[kind]))]


class Problem:
    """A head with its input and an output gradient; and the plain layer, in float64 on the same numbers."""

    def __init__(self, format, head, *, layout="first", masks="mixed", bias=True, dtype=torch.float32, parameters=None):
        self.format, self.dtype = format, dtype
        rank = head.ranks if format == "tucker" else head.rank
        shapes = {"input_shape": head.input_shape, "output_shape": head.outputs, "rank": rank}
        self.layer = make_layer(format, theta=None, bias=bias, dtype=torch.float64, **shapes).to(DEVICE)
        for parameter in self.layer.parameters():
            parameter.data = parameter.data.to(parameters or dtype).double()
        x = torch.randn(head.batch, *head.input_shape, dtype=torch.float64).to(DEVICE, dtype)
        self.x = LAYOUTS[layout](x)
        self.g = torch.randn(head.batch, head.outputs, dtype=torch.float64).to(DEVICE, dtype)
        ranks = head.ranks if format == "tucker" else (head.rank,)
        self.masks = draw_masks(ranks, head.batch, masks)
        self.names = ["x", *(name for name, _ in self.layer.named_parameters())]
        self.parameters = [p.detach().to(parameters or dtype).requires_grad_() for p in self.layer.parameters()]

    def call(self, x, parameters):
        """The output of the kernels."""
        given = dict(zip(self.names[1:], parameters, strict=True))
        factors = [given[name] for name in self.names if name.startswith("factors")]
        if self.format == "tucker":
            return tucker_head(x.flatten(2), factors, given["core"], given.get("bias"), self.masks)[0]
        return cp_head(x.flatten(2), factors, given.get("bias"), self.masks[0])[0]

    def run(self, *, wants_x=True):
        """The output and the gradients by name, by the kernels."""
        x = self.x.detach().requires_grad_(wants_x)
        out = self.call(x, self.parameters)
        sources = [x, *self.parameters] if wants_x else self.parameters
        gradients = torch.autograd.grad(out, sources, self.g)
        return {"output": out} | dict(zip(self.names[not wants_x :], gradients, strict=True))

    def solve(self):
        """The same in float64, by the plain layer."""
        x = self.x.detach().double().requires_grad_()
        masks = [None if mask is None else mask.double() for mask in self.masks]
        with dispatch.without_kernels():
            out = self.layer.regress(x, masks)
        gradients = torch.autograd.grad(out, [x, *self.layer.parameters()], self.g.double())
        return {"output": out} | dict(zip(self.names, gradients, strict=True))


def assert_near(found, truth, tolerance):
    """``‖a - b‖ / ‖b‖`` of each tensor is below the tolerance; NaN is not."""
    errors = {}
    for name, value in found.items():
        assert value.shape == truth[name].shape
        exact = truth[name].detach().double()
        errors[name] = float((value.detach().double() - exact).norm() / exact.norm().clamp_min(1e-30))
    assert not {name: error for name, error in errors.items() if not error < tolerance}, errors


@pytest.fixture
def _poisoned():
    """Memory that is not written is NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _exact_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


# The kernels against the plain layer.


@poisoned
@both_formats
@pytest.mark.parametrize(
    ("head", "layout"), [(key, layout) for key in HEADS for layout in ("first", "last")[key in SLOW :]]
)
def test_every_size(format, head, layout):
    problem = Problem(format, HEADS[head], layout=layout)
    assert_near(problem.run(), problem.solve(), TOLERANCES[torch.float32])


@poisoned
@both_formats
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("masks", MASKS)
def test_every_kind_of_mask(format, masks, bias):
    problem = Problem(format, HEAD, masks=masks, bias=bias)
    assert_near(problem.run(), problem.solve(), TOLERANCES[torch.float32])


@poisoned
@both_formats
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(format, layout):
    problem = Problem(format, HEAD, layout=layout)
    assert_near(problem.run(), problem.solve(), TOLERANCES[torch.float32])


@poisoned
@both_formats
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("parameters", [None, torch.float32], ids=["", "float32-parameters"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(format, dtype, parameters, layout):
    problem = Problem(format, HEAD, layout=layout, dtype=dtype, parameters=parameters)
    found = problem.run()
    assert found["output"].dtype == found["x"].dtype == dtype
    assert {found[name].dtype for name in problem.names[1:]} == {parameters or dtype}
    assert_near(found, problem.solve(), TOLERANCES[dtype])


@poisoned
@both_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head", BENCHMARKED.values(), ids=BENCHMARKED)
def test_heads_of_the_benchmark(format, head, dtype):
    if format == "tucker" and torch.Size(head.ranks[1:-1]).numel() > dispatch.MAX_JOINT_RANK:
        pytest.skip("its joint spatial rank is more than a program holds")
    problem = Problem(format, head, layout="last", masks="per-sample", dtype=dtype)
    assert_near(problem.run(), problem.solve(), TOLERANCES[dtype])


@both_formats
def test_tf32_is_used_if_allowed(format):
    torch.set_float32_matmul_precision("high")
    problem = Problem(format, HEADS["batch-3"])
    assert_near(problem.run(), problem.solve(), TF32)


@poisoned
@both_formats
def test_features_without_gradient(format):
    problem = Problem(format, HEAD)
    found = problem.run(wants_x=False)
    assert "x" not in found
    assert_near(found, problem.solve(), TOLERANCES[torch.float32])


@both_formats
def test_frozen_parameters(format):
    problem = Problem(format, HEAD)
    frozen = [parameter.detach() for parameter in problem.parameters]
    x = problem.x.clone().requires_grad_()
    problem.call(x, frozen).backward(problem.g)
    assert_near({"x": x.grad}, problem.solve(), TOLERANCES[torch.float32])


@both_formats
def test_gradients_accumulate_over_two_calls(format):
    problem = Problem(format, HEAD)
    for _ in range(2):
        problem.call(problem.x, problem.parameters).backward(problem.g)
    truth = {name: 2 * gradient for name, gradient in problem.solve().items()}
    found = {name: p.grad for name, p in zip(problem.names[1:], problem.parameters, strict=True)}
    assert_near(found, truth, TOLERANCES[torch.float32])


@both_formats
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize("head", ["joint-rank-32", "ones", "one-channel", "one-position"])
def test_the_gradient_of_x_lies_as_x(format, head, layout):
    problem = Problem(format, HEADS[head], layout=layout)
    x = problem.x.flatten(2).detach().requires_grad_()
    view = x.unflatten(2, HEADS[head].space)
    (dx,) = torch.autograd.grad(problem.call(view, problem.parameters), x, problem.g)
    axes = [axis for axis in range(3) if x.shape[axis] > 1]  # an axis of size 1 has any stride
    assert [dx.stride(axis) for axis in axes] == [x.stride(axis) for axis in axes]


# Memory.


def record_saved(function):
    """What autograd saves for backward while a function runs."""
    saved = []

    def save(tensor):
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        function()
    return saved


@poisoned
@both_formats
@pytest.mark.parametrize("masks", ["none", "mixed"])
def test_saved_for_backward(format, masks):
    problem = Problem(format, HEAD, masks=masks)
    given = [problem.x, *problem.parameters, *(mask for mask in problem.masks if mask is not None)]
    saved = record_saved(lambda: problem.call(problem.x, problem.parameters))
    places = {tensor.data_ptr() for tensor in given}
    new = [tensor for tensor in saved if tensor.data_ptr() not in places]
    B, C, T, P = HEAD.batch, HEAD.channels, 2 * 4, 3 * 5
    expected = {
        "tucker": [(B, T, C), (B * T, HEAD.ranks[0]), (B, HEAD.ranks[-1])],
        "cp": [(B, P, HEAD.rank), (B, HEAD.rank)],
    }
    assert [tuple(tensor.shape) for tensor in new] == expected[format]
    assert not any(tensor.isnan().any() for tensor in saved)


class Unlaunched:
    """A kernel that writes nothing."""

    def __getitem__(self, grid):
        return lambda *args, **options: None


@poisoned
@pytest.mark.parametrize(
    ("format", "module", "kernel"),
    [
        ("tucker", spatial, "project_kernel"),
        ("tucker", spatial, "spread_kernel"),
        ("cp", columns, "collect_kernel"),
        ("cp", columns, "column_factor_kernel"),
    ],
)
def test_what_is_not_written_is_found(format, module, kernel, monkeypatch):
    problem = Problem(format, HEAD)
    monkeypatch.setattr(module, kernel, Unlaunched())
    with pytest.raises(AssertionError, match="nan"):
        assert_near(problem.run(), problem.solve(), TOLERANCES[torch.bfloat16])


# Gradients of gradients.


def differentiate_twice(call, x, parameters, g, directions):
    """The gradients, and those of ``Σ ⟨direction, gradient⟩`` with respect to everything."""
    sources = [x, *parameters]
    first = torch.autograd.grad(call(x, parameters), sources, g, create_graph=True)
    total = sum((direction * gradient).sum() for direction, gradient in zip(directions, first, strict=True))
    second = torch.autograd.grad(total, [*sources, g], materialize_grads=True)
    return {f"first {k}": value for k, value in enumerate(first)} | {
        f"second {k}": value for k, value in enumerate(second)
    }


@both_formats
@pytest.mark.parametrize("masks", ["none", "mixed"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_gradients_of_gradients(format, masks, bias):
    problem = Problem(format, HEAD, masks=masks, bias=bias)
    x, g = (tensor.clone().requires_grad_() for tensor in (problem.x, problem.g))
    directions = [torch.randn_like(tensor) for tensor in (x, *problem.parameters)]
    found = differentiate_twice(problem.call, x, problem.parameters, g, directions)
    x64, g64 = (tensor.detach().double().requires_grad_() for tensor in (x, g))
    masks64 = [None if mask is None else mask.double() for mask in problem.masks]
    truth = differentiate_twice(
        lambda x, _: problem.layer.regress(x, masks64),
        x64,
        list(problem.layer.parameters()),
        g64,
        [direction.double() for direction in directions],
    )
    assert_near(found, truth, TOLERANCES[torch.float32])


# The compiler.


class Kernels(nn.Module):
    """A problem's head as a module."""

    def __init__(self, problem):
        super().__init__()
        self.problem = problem
        self.weights = nn.ParameterList(problem.parameters)

    def forward(self, x):
        return self.problem.call(x, list(self.weights)) * 2


def list_arguments(problem):
    """What the two operators of a format are called with: forward, and backward but for what forward saves."""
    given = dict(zip(problem.names[1:], problem.parameters, strict=True))
    factors = [given[name] for name in problem.names if name.startswith("factors")]
    bias = given.get("bias")
    x = problem.x.flatten(2).requires_grad_()
    if problem.format == "tucker":
        return x, factors, given["core"], bias, problem.masks
    return x, factors, bias, problem.masks[0]


OPERATORS = {"tucker": (tucker_head, tucker_head_backward), "cp": (cp_head, cp_head_backward)}


@both_formats
def test_opcheck(format):
    forward, backward = OPERATORS[format]
    given = list_arguments(Problem(format, Head(2, 5, (3, 2), 3, (3, 2, 2, 2), 3), layout="last"))
    torch.library.opcheck(forward, given)
    with torch.no_grad():
        out, *saved = forward(*given)
    plain = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, given)
    torch.library.opcheck(backward, (torch.randn_like(out), *plain, *saved, True))
    torch.library.opcheck(backward, (torch.randn_like(out), *plain, *saved, False), test_utils="test_faketensor")


@both_formats
@pytest.mark.parametrize("masks", ["none", "mixed"])
def test_compiled_equals_eager(format, masks):
    torch._dynamo.reset()
    problem = Problem(format, HEAD, masks=masks, layout="last")
    module = Kernels(problem)
    results = []
    for function in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        x = problem.x.detach().requires_grad_()
        out = function(x)
        results.append([out, *torch.autograd.grad(out, [x, *module.parameters()], problem.g)])
    assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)
    torch._dynamo.reset()


@both_formats
def test_the_compiled_backward_is_the_backward_operator(format):
    """Not the composed head, which is for gradients of gradients."""
    torch._dynamo.reset()
    problem, graphs = Problem(format, HEAD), []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    backend = aot_autograd(fw_compiler=lambda g, i: make_boxed_func(keep(g, i)), keep_inference_input_mutations=True)
    torch.compile(Kernels(problem), fullgraph=True, backend=backend)(problem.x).sum().backward()
    names = [{str(node.target) for node in graph.graph.nodes} for graph in graphs]
    assert [any(f"{format}_head" in name for name in found) for found in names] == [True, True]
    assert any(f"{format}_head_backward" in name for name in names[1])
    torch._dynamo.reset()


@both_formats
def test_export_keeps_the_operator(format):
    problem = Problem(format, HEAD)
    module = Kernels(problem)
    program = torch.export.export(module, (problem.x,))
    assert f"tensor_dropout.{format}_head" in program.graph_module.code
    assert_close(program.module()(problem.x), module(problem.x))


# Where they are used.

SHAPES = {
    "an image": ("tucker", (8, 4, 4), (4, 2, 2, 3), True),
    "a signal": ("tucker", (8, 9), (4, 2, 3), True),
    "a volume": ("cp", (8, 4, 4, 4), 5, True),
    "the largest joint rank": ("tucker", (8, 8, 8), (4, 4, 8, 3), True),
    "too large a joint rank": ("tucker", (8, 8, 8), (4, 5, 8, 3), False),
    "a large joint rank is not CP's": ("cp", (8, 8, 8), 64, True),
    "the most positions": ("cp", (8, 8, 8), 5, True),
    "too many positions": ("cp", (8, 8, 9), 5, False),
    "too many positions for Tucker": ("tucker", (8, 257), (4, 1, 3), False),
    "no spatial mode": ("cp", (8,), 5, False),
    "four spatial modes": ("cp", (8, 2, 2, 2, 2), 5, False),
}


@pytest.mark.parametrize(("format", "input_shape", "rank", "taken"), SHAPES.values(), ids=SHAPES)
def test_shapes(format, input_shape, rank, taken):
    layer = make_layer(format, theta=None, input_shape=input_shape, output_shape=10, rank=rank, device="meta")
    x = torch.empty(2, *input_shape, device="meta")
    assert dispatch._has_shape(format, x, list(layer.factors)) is taken


@both_formats
def test_several_output_modes_are_refused(format):
    layer = make_layer(format, theta=None, output_shape=(2, 5), rank=2, device="meta")
    assert not dispatch._has_shape(format, torch.empty(2, *layer.input_shape, device="meta"), list(layer.factors))


def test_what_32_bits_cannot_count_is_refused():
    layer = make_layer("cp", theta=None, device="meta")
    sizes = [2**31 // 240 + over for over in (0, 1)]
    found = [
        dispatch._has_shape("cp", torch.empty(B, *layer.input_shape, device="meta"), list(layer.factors)) for B in sizes
    ]
    assert found == [True, False]


WINNING = {
    "bfloat16": (torch.bfloat16, "highest", (9, 0), True),
    "float16": (torch.float16, "highest", (9, 0), True),
    "TF32": (torch.float32, "high", (9, 0), True),
    "exact float32": (torch.float32, "highest", (9, 0), False),
    "float64": (torch.float64, "high", (9, 0), False),
    "a GPU it was not measured on": (torch.float16, "highest", (8, 0), False),
}


@pytest.mark.parametrize(("dtype", "precision", "capability", "taken"), WINNING.values(), ids=WINNING)
def test_dtypes_and_devices(dtype, precision, capability, taken, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setitem(dispatch.WINS, "cp", dispatch.Wins(positions=64, exact_float32=False))
    torch.set_float32_matmul_precision(precision)
    assert dispatch._wins("cp", dtype, 0) is taken
    monkeypatch.setattr(torch.version, "cuda", None)  # a CPU build, or AMD's
    assert not dispatch._wins("cp", dtype, 0)


def test_the_mark_for_the_compiler_is_the_one_that_torch_sets():
    """Set by hand, it keeps the compiler out of the import; a torch with another mark would trace into the function."""
    marked = dispatch._settled_when_compiled(lambda: None)
    assert vars(marked) == vars(torch.compiler.assume_constant_result(lambda: None)) != {}
    assert vars(dispatch._wins).items() >= vars(marked).items()


def ask(mask=None):
    return dispatch._is_plain_autograd(torch.ones(3), [None, mask])


def ask_within(transform):
    """What is answered while a function is transformed."""
    answers = []

    def function(x):
        answers.append(ask())
        return x.sum()

    transform(function)
    return answers


def test_only_plain_autograd_is_taken():
    x = torch.ones(2, 3)
    assert ask()
    assert ask(torch.ones(3))
    assert not ask(torch.ones(3, requires_grad=True))
    assert ask_within(lambda f: torch.func.vmap(f)(x)) == [False]
    assert ask_within(lambda f: torch.func.grad(f)(x)) == [False]
    assert ask_within(lambda f: torch.func.jvp(f, (x,), (x,))) == [False]
    with torch.autograd.forward_ad.dual_level():
        assert not ask()
    assert ask()


def test_exporting_is_refused():
    class Asks(nn.Module):
        def forward(self, x):
            return x + int(ask())

    x = torch.zeros(2)
    assert Asks()(x).tolist() == [1, 1]
    assert torch.export.export(Asks(), (x,)).module()(x).tolist() == [0, 0]
    torch._dynamo.reset()
    assert torch.compile(Asks(), fullgraph=True, backend="eager")(x).tolist() == [1, 1]


@pytest.mark.parametrize("format", ["tucker", "cp", "tt"])
def test_the_cpu_takes_the_plain_path(format):
    layer, x = make_layer(format, theta=None), torch.randn(2, 8, 6, 5)
    with Recorder() as recorder:
        layer(x).sum().backward()
    assert recorder.names
    assert not recorder.heads


class Recorder(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    @property
    def heads(self):
        return [name for name in self.names if name.startswith("tensor_dropout.")]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# Layers on a GPU.


@pytest.fixture
def _always_win(monkeypatch):
    for format in dispatch.WINS:
        monkeypatch.setitem(dispatch.WINS, format, dispatch.Wins(positions=256, exact_float32=True))


on_gpu = [needs_gpu, pytest.mark.usefixtures("_always_win")]


def mark_all(marks):
    def decorate(test):
        for mark in marks:
            test = mark(test)
        return test

    return decorate


LAYER_OPTIONS = {"input_shape": (64, 4, 4), "output_shape": 10, "per_sample": True, "theta": 0.6}
LAYER_RANKS = {"tucker": (16, 2, 3, 8), "cp": 24, "tt": (4, 4, 4)}


def make_gpu_layer(format, **options):
    """A randomized layer on the GPU, its features (channels last) and an output gradient."""
    layer = make_layer(format, **{**LAYER_OPTIONS, "rank": LAYER_RANKS[format], **options}).cuda()
    like = layer.operands()[0]
    x = channels_last(torch.randn(8, *layer.input_shape).to(like))
    return layer, x, torch.randn(8, *layer.output_shape).to(like)


def differentiate(layer, regress, x, masks, g):
    """Output and gradients by name."""
    x = x.detach().requires_grad_()
    out = regress(x, masks)
    gradients = torch.autograd.grad(out, [x, *layer.parameters()], g.to(out.dtype))
    names = ["x", *(name for name, _ in layer.named_parameters())]
    return {"output": out} | dict(zip(names, gradients, strict=True))


@mark_all(on_gpu)
@both_formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layer_eager(format, dtype):
    layer, x, g = make_gpu_layer(format, dtype=dtype)
    masks = layer.draw_masks(len(x))
    with Recorder() as recorder:
        layer.regress(x, masks)
    assert recorder.heads == [f"tensor_dropout.{format}_head.default"]
    found = differentiate(layer, layer.regress, x, masks, g)
    with dispatch.without_kernels():
        plain = differentiate(layer, layer.regress, x, masks, g)
    assert_near(found, plain, 2 * TOLERANCES[dtype])
    assert found["x"].stride() == x.stride()


@mark_all(on_gpu)
@both_formats
def test_layer_forward_in_train_and_eval(format):
    layer, x, _ = make_gpu_layer(format, scaling="paper")
    for training in (True, False):
        layer.train(training)
        torch.manual_seed(3)
        found = layer(x)
        with dispatch.without_kernels(), Recorder() as recorder:
            torch.manual_seed(3)
            plain = layer(x)
        assert not recorder.heads
        assert_near({"output": found}, {"output": plain}, 2 * TOLERANCES[torch.float32])


@mark_all(on_gpu)
@both_formats
def test_layer_under_autocast(format):
    layer, x, g = make_gpu_layer(format)
    masks = layer.draw_masks(len(x))

    def regress(x, masks):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return layer.regress(x, masks)

    found = differentiate(layer, regress, x, masks, g)
    with dispatch.without_kernels():
        plain = differentiate(layer, regress, x, masks, g)
    assert found["output"].dtype == torch.bfloat16
    assert {found[name].dtype for name in found if name != "output"} == {torch.float32}
    assert_near(found, plain, 2 * TOLERANCES[torch.bfloat16])


@mark_all(on_gpu)
@both_formats
def test_layer_compiled(format):
    torch._dynamo.reset()
    layer, x, g = make_gpu_layer(format)
    masks = layer.draw_masks(len(x))
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer.regress, backend=counter, fullgraph=True)
    found = differentiate(layer, compiled, x, masks, g)
    assert any(f"tensor_dropout.{format}_head" in graph.code for graph in counter.graphs)
    with dispatch.without_kernels():
        plain = differentiate(layer, layer.regress, x, masks, g)
    assert_near(found, plain, 2 * TOLERANCES[torch.float32])
    torch._dynamo.reset()


@mark_all(on_gpu)
@both_formats
def test_layer_in_a_captured_graph(format):
    layer, x, g = make_gpu_layer(format)

    def step():
        masks = layer.draw_masks(len(x))
        return masks, differentiate(layer, layer.regress, x, masks, g)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        masks, found = step()
    drawn = []
    for _ in range(3):
        graph.replay()
        with dispatch.without_kernels():
            plain = differentiate(layer, layer.regress, x, masks, g)
        assert_near(found, plain, 2 * TOLERANCES[torch.float32])
        drawn.append(torch.cat([mask.flatten() for mask in masks if mask is not None]))
    assert count_distinct(drawn) == 3


def refuse(change, *, format="tucker", **options):
    return lambda: change(*make_gpu_layer(format, **options)[:2])


def fuse(layer, x, masks=None):
    masks = layer.draw_masks(len(x)) if masks is None else masks
    return dispatch.fused_head(layer._kernel, x, layer.operands(), layer.bias, masks)


def fuse_without_kernels(layer, x):
    with dispatch.without_kernels():
        return fuse(layer, x)


def fuse_learned_mask(layer, x):
    return fuse(layer, x, [torch.ones(R, device="cuda", requires_grad=True) for R in layer.rank])


def fuse_in_vmap(layer, x):
    answers = []
    torch.func.vmap(lambda x: answers.append(fuse(layer, x, [None] * 4)) or x.sum())(x[None])
    return answers[0]


def fuse_in_forward_mode(layer, x):
    with torch.autograd.forward_ad.dual_level():
        return fuse(layer, torch.autograd.forward_ad.make_dual(x, x))


REFUSALS = {
    "CPU": refuse(lambda layer, x: fuse(layer.cpu(), x.cpu())),
    "TT": refuse(fuse, format="tt"),
    "float64": refuse(fuse, dtype=torch.float64),
    "positions": refuse(fuse, input_shape=(8, 16, 17), rank=(4, 2, 2, 3)),
    "joint rank": refuse(fuse, input_shape=(8, 8, 8), rank=(4, 5, 8, 3)),
    "modes": refuse(fuse, input_shape=(8, 2, 2, 2, 2), rank=2),
    "outputs": refuse(fuse, output_shape=(2, 5), rank=2),
    "without_kernels": refuse(fuse_without_kernels),
    "learned mask": refuse(fuse_learned_mask),
    "vmap": refuse(fuse_in_vmap),
    "forward mode": refuse(fuse_in_forward_mode),
}


@mark_all(on_gpu)
@pytest.mark.parametrize("attempt", REFUSALS.values(), ids=REFUSALS)
def test_refusals(attempt):
    assert attempt() is None


@mark_all(on_gpu)
def test_what_is_not_refused_is_taken():
    assert fuse(*make_gpu_layer("tucker")[:2]) is not None


@mark_all(on_gpu)
@both_formats
def test_an_exported_layer_is_plain(format):
    layer, x, _ = make_gpu_layer(format)
    program = torch.export.export(layer.eval(), (x,))
    assert "tensor_dropout" not in program.graph_module.code
    assert_near({"output": program.module()(x)}, {"output": layer(x)}, 2 * TOLERANCES[torch.float32])


# Triton's compiler.


def find_launches():
    """The kernels that are launched from Python: ``name[grid](...)``."""
    calls = (node for path in KERNELS.glob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    launches = (
        node.func.value for node in calls if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    )
    return {name.id for name in launches if isinstance(name, ast.Name)}


@needs_no_gpu
@pytest.mark.parametrize(("capability", "kilobytes"), [(90, 227)])  # those of dispatch.MEASURED
def test_every_kernel_compiles(capability, kilobytes):
    script = Path(__file__).with_name("kernel_compilation.py")
    command = [sys.executable, str(script), str(capability), "bfloat16", "float32"]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode == 77:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    shared = json.loads(done.stdout.splitlines()[-1])
    assert set(shared) == find_launches()  # a new kernel is launched in kernel_compilation.py too
    assert max(shared.values()) <= kilobytes * 1024, shared
