"""Networks for deployment: ONNX, ``torch.export`` programs, and plain torch weights.

Each is written whole or not at all, and what was written is read again and compared with the network.
"""

from __future__ import annotations

import copy
import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.surgery.find_head import run
from tensor_dropout.surgery.merge import merge_

_BATCH = torch.export.Dim("batch", min=1)
"""The free axis of every exported network."""


def export_onnx(network: nn.Module, example: Tensor, path: Path) -> float:
    """Write the ``eval`` network as ONNX with a free batch size.

    Args:
        network: any module; it is left as it was.
        example: an input batch.
        path: where to write.

    Returns:
        The largest difference of onnxruntime's outputs from the network's, relative to its largest output.

    Raises:
        TensorDropoutError: if the extra ``onnx`` is missing, the network does not run on the example, returns NaN or
            cannot be exported, or onnxruntime cannot run it, as in bfloat16.
    """
    try:
        import onnx  # noqa: F401 - the exporter needs it
        import onnxruntime
        import onnxscript  # noqa: F401 - the exporter needs it
    except ModuleNotFoundError as error:
        raise TensorDropoutError(
            f"export: {error.name} is not installed; install it with: pip install 'tensor-dropout[onnx]'"
        ) from error
    if torch.bfloat16 in {example.dtype, *(tensor.dtype for tensor in network.state_dict().values())}:
        raise TensorDropoutError(
            "export: the network is in torch.bfloat16, which onnxruntime does not run; convert it with .float() first"
        )
    network = copy.deepcopy(network).eval()
    expected = _run(network, example)
    with _quiet(), replacing(path) as temporary:
        program = trace_program(network, example)
        try:
            written = torch.onnx.export(
                program.run_decompositions({torch.ops.aten.adaptive_avg_pool3d.default: pool_in_steps}),
                dynamo=True,
                dynamic_shapes=({0: _BATCH},),
                verbose=False,
                input_names=["input"],
                output_names=["output"],
            )
        except Exception as error:  # whatever the exporter raises about the user's network
            raise TensorDropoutError(f"export: this network does not export to ONNX: {_cause(error)}") from error
        assert written is not None
        written.save(str(temporary))
        try:
            session = onnxruntime.InferenceSession(str(temporary), providers=["CPUExecutionProvider"])
            found = session.run(None, {session.get_inputs()[0].name: example.numpy()})[0]
        except Exception as error:  # onnxruntime's have no class in common
            advice = "" if example.dtype == torch.float32 else "; convert it with .float() first"
            raise TensorDropoutError(
                f"export: onnxruntime does not run this network in {example.dtype}: {_cause(error)}{advice}"
            ) from error
        return _difference(torch.as_tensor(found), expected)


def pool_in_steps(x: Tensor, size: Sequence[int | None]) -> Tensor:
    """``adaptive_avg_pool3d``, for which torch has no ONNX, over height and width first and then over depth.

    Exact for all sizes: the mean of a box is a mean of means.

    Example:
        >>> x = torch.rand(2, 3, 5, 4, 7)
        >>> torch.allclose(pool_in_steps(x, (2, 4, 3)), nn.functional.adaptive_avg_pool3d(x, (2, 4, 3)))
        True
    """
    pool = torch.ops.aten.adaptive_avg_pool2d
    depth, height, width = (present if n is None else n for n, present in zip(size, x.shape[-3:], strict=True))
    # (B, C, D, H, W) -> (B, C, D, h, w) -> (B, C, d, h, w)
    flat = pool(x.flatten(1, 2), [height, width]).unflatten(1, x.shape[1:3])
    return pool(flat.flatten(3), [depth, height * width]).unflatten(3, (height, width))


def export_program(network: nn.Module, example: Tensor, path: Path) -> float:
    """Write the ``eval`` network as a ``torch.export`` program (.pt2) with a free batch size.

    Returns:
        The largest difference of the program's outputs from the network's, relative to its largest output.

    Raises:
        TensorDropoutError: if the network does not run on the example, returns NaN or cannot be exported.
    """
    network = copy.deepcopy(network).eval()
    expected = _run(network, example)
    with _quiet(), replacing(path) as temporary:
        torch.export.save(trace_program(network, example), temporary)
        found = torch.export.load(temporary).module()(example)
        return _difference(found, expected)


def trace_program(network: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """The network as a program with a free batch size.

    Raises:
        TensorDropoutError: if it cannot be traced.
    """
    if len(example) == 1:  # a batch of one would be taken for a fixed size
        example = torch.cat([example, example])
    try:
        return torch.export.export(network, (example,), dynamic_shapes=({0: _BATCH},))
    except TensorDropoutError:
        raise
    except Exception as error:  # whatever its tracing raises about the user's network
        raise TensorDropoutError(f"export: torch.export cannot trace this network: {_cause(error)}") from error


def export_merged(network: nn.Module, example: Tensor, path: Path) -> float:
    """Write the weights of the network with its tensor regressions merged into plain torch layers.

    The network is left as it was.

    Returns:
        The largest difference of the merged network's outputs, relative to the network's largest output.

    Raises:
        TensorDropoutError: if there is nothing to merge, or the network does not run on the example or returns NaN.
    """
    if not any(isinstance(module, TensorRegression) for module in network.modules()):
        raise TensorDropoutError("export: the network has no tensor regression to merge: its weights are plain already")
    merged = copy.deepcopy(network).eval()
    expected = _run(merged, example)
    notes = [note for each in merge_(merged).replacements for note in each.notes]
    changed = {name: str(module) for name, module in merged.named_modules() if "Linear" in type(module).__name__}
    with replacing(path) as temporary:
        # Tied weights are written under each of their names, as a plain network expects them.
        state = {name: tensor.contiguous().clone() for name, tensor in merged.state_dict().items()}
        save_file(state, temporary, metadata={"linear_layers": str(changed), "notes": " ".join(notes)})
        merged.load_state_dict(load_file(temporary))
        return _difference(_run(merged, example), expected)


@torch.no_grad()
def _run(network: nn.Module, example: Tensor) -> Tensor:
    """The output of a network, or the first of several; refused if it cannot be compared."""
    outputs = run(network, example, "export")
    if not outputs:
        raise TensorDropoutError(f"export: {type(network).__name__} returns no tensor, which is what can be exported")
    if not bool(torch.isfinite(outputs[0]).all()):
        raise TensorDropoutError(
            f"export: {type(network).__name__} returns NaN or infinite numbers for the example, so that nothing could "
            "be compared; see whether its training diverged"
        )
    return outputs[0]


def _difference(found: Any, expected: Tensor) -> float:
    """``max |found - expected| / max |expected|``, of what an exported network returns first."""
    first = found[0] if isinstance(found, tuple | list) else found
    difference = float((first - expected).detach().abs().max() / expected.abs().max().clamp(min=1e-30))
    if difference != difference:
        raise TensorDropoutError("export: the exported network returns NaN where the network does not; not written")
    return difference


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' remarks on torch's own internals and on packages that are not needed."""
    loggers = [logging.getLogger(name) for name in _LOUD]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_LOUD = ("torch.onnx", "torch.export", "torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")


def _cause(error: BaseException) -> str:
    """What an exporter failed on, in one line: its innermost cause, without the colours of a terminal."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return f"{type(error).__name__}: {(words.splitlines() or [''])[0][:300]}"
