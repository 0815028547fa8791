"""Compiles every kernel for a GPU that need not be there: Triton's interpreter runs what its compiler refuses.

``python tests/kernel_compilation.py 90 bfloat16 float32`` prints, as JSON, the shared memory in bytes that each kernel
takes on compute capability 9.0 at most. It is a process of its own: in one that interprets, nothing is compiled.
"""

from __future__ import annotations

import inspect
import json
import os
import sys

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # as in conftest.py

import torch

SKIPPED = 77
"""The exit code where this Triton lacks what is used here."""
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}

try:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source
    from triton.runtime.jit import JITFunction

    inspect.signature(ASTSource).bind("fn", "signature", "constexprs", "attrs")
except (ImportError, TypeError) as error:
    print(f"Triton's compiler cannot be called: {error}", file=sys.stderr)
    sys.exit(SKIPPED)


def describe(kernel, values):
    """The types, constants and divisibilities that Triton would derive from a launch with these arguments."""
    types, constants, hints = {}, {}, {}
    for k, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            types[parameter.name], constants[k,] = "constexpr", value
            continue
        types[parameter.name] = POINTERS[value.dtype] if isinstance(value, torch.Tensor) else "i32"
        if isinstance(value, torch.Tensor) or value % 16 == 0:
            hints[k,] = [["tt.divisibility", 16]]
    return types, constants, hints


class Compiler:
    """Stands in for launching: each kernel is compiled, none is run."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)
        self.shared = {}
        self.known = set()

    def launch(self, kernel, *args, grid=None, warmup=False, num_warps=4, num_stages=3, **constants):
        values = dict(zip((parameter.name for parameter in kernel.params), args, strict=False)) | constants
        name = kernel.fn.__name__
        types = [value.dtype if isinstance(value, torch.Tensor) else value is None for value in values.values()]
        branches = name, *types, values.get("INNER", 0) == 0
        if branches not in self.known:  # another size would take seconds and show nothing new
            self.known.add(branches)
            options = {"num_warps": num_warps, "num_stages": num_stages}
            source = ASTSource(kernel, *describe(kernel, values))
            compiled = compile_source(source, target=self.target, options=options)
            self.shared[name] = max(self.shared.get(name, 0), compiled.metadata.shared)


def make_head(channels, space, outputs, ranks, dtype):
    """Features (channels first), factors and bias; the numbers do not matter."""
    x = torch.zeros(8, channels, torch.Size(space).numel(), dtype=dtype)
    sizes = (channels, *space, outputs)
    factors = [torch.zeros(size, rank, dtype=dtype) for size, rank in zip(sizes, ranks, strict=True)]
    return x, factors, torch.zeros(outputs, dtype=dtype)


def run_tucker(dtype):
    """The ImageNet head, forward and backward: two spatial modes, channels last."""
    from tensor_dropout.kernels.tucker import tucker_head, tucker_head_backward

    ranks = (256, 3, 3, 256)
    x, factors, bias = make_head(2048, (7, 7), 1000, ranks, dtype)
    x = x.mT.contiguous().mT
    given = x, factors, torch.zeros(ranks, dtype=dtype), bias, [torch.zeros(8, rank) for rank in ranks]
    out, *saved = tucker_head(*given)
    tucker_head_backward(out, *given, *saved, True)


def run_cp(dtype):
    """Forward and backward with three spatial modes, channels first: the features are copied."""
    from tensor_dropout.kernels.cp import cp_head, cp_head_backward

    given = *make_head(512, (3, 4, 4), 400, (200,) * 5, dtype), torch.zeros(8, 200)
    out, *saved = cp_head(*given)
    cp_head_backward(out, *given, *saved, True)


def main(capability, *dtypes):
    """Run the heads of all dtypes, and print what their kernels take."""
    compiler = Compiler(int(capability))
    JITFunction.run = lambda kernel, *args, **options: compiler.launch(kernel, *args, **options)
    for dtype in dtypes:
        run_tucker(getattr(torch, dtype))
        run_cp(getattr(torch, dtype))
    print(json.dumps(compiler.shared))


if __name__ == "__main__":
    main(*sys.argv[1:])
