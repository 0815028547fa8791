"""Networks for deployment: ONNX, ``torch.export`` programs, and plain torch weights.

Each is written whole or not at all, and what was written is read again and compared with the network.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.surgery.merge import merge_
from tensor_dropout.surgery.trace import run
from tensor_dropout.writing import replacing


def export_onnx(network: nn.Module, example: Tensor, path: Path) -> float:
    """Write the ``eval`` network as ONNX with a free batch size.

    Args:
        network: any module; it is left as it was.
        example: an input batch.
        path: where to write.

    Returns:
        The largest difference of onnxruntime's outputs from the network's, relative to its largest output.

    Raises:
        TensorDropoutError: if the extra ``onnx`` is missing, the network cannot be exported, or onnxruntime cannot run
            it, as in bfloat16.
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
    batch = torch.export.Dim("batch", min=1)
    with replacing(path) as temporary, _quiet():
        try:
            program = torch.onnx.export(
                network,
                (example,),
                dynamo=True,
                dynamic_shapes=({0: batch},),
                verbose=False,
                input_names=["input"],
                output_names=["output"],
            )
        except (RuntimeError, torch.onnx.errors.OnnxExporterError) as error:
            raise TensorDropoutError(f"export: this network does not export to ONNX: {_first_line(error)}") from error
        assert program is not None
        program.save(str(temporary))
        try:
            session = onnxruntime.InferenceSession(str(temporary), providers=["CPUExecutionProvider"])
            found = session.run(None, {session.get_inputs()[0].name: example.numpy()})[0]
        except Exception as error:  # onnxruntime's have no class in common
            advice = "" if example.dtype == torch.float32 else "; convert it with .float() first"
            raise TensorDropoutError(
                f"export: onnxruntime does not run this network in {example.dtype}: {_first_line(error)}{advice}"
            ) from error
        return _difference(network, example, torch.as_tensor(found))


def export_program(network: nn.Module, example: Tensor, path: Path) -> float:
    """Write the ``eval`` network as a ``torch.export`` program (.pt2) with a free batch size.

    Returns:
        The largest difference of the program's outputs from the network's, relative to its largest output.

    Raises:
        TensorDropoutError: if the network cannot be exported.
    """
    network = copy.deepcopy(network).eval()
    batch = torch.export.Dim("batch", min=1)
    try:
        program = torch.export.export(network, (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # whatever its tracing raises about the user's network
        raise TensorDropoutError(f"export: torch.export cannot trace this network: {_first_line(error)}") from error
    with replacing(path) as temporary, _quiet():
        torch.export.save(program, temporary)
        found = torch.export.load(temporary).module()(example)
        return _difference(network, example, found)


def export_merged(network: nn.Module, example: Tensor, path: Path) -> float:
    """Write the weights of the network with its tensor regressions merged into plain torch layers.

    Returns:
        The largest difference of the merged network's outputs, relative to the network's largest output.
    """
    if not any(isinstance(module, TensorRegression) for module in network.modules()):
        raise TensorDropoutError("export: the network has no tensor regression to merge: its weights are plain already")
    network = network.eval()
    merged = copy.deepcopy(network)
    notes = [note for each in merge_(merged).replacements for note in each.notes]
    changed = {name: str(module) for name, module in merged.named_modules() if "Linear" in type(module).__name__}
    with replacing(path) as temporary:
        state = {name: tensor.contiguous() for name, tensor in merged.state_dict().items()}
        save_file(state, temporary, metadata={"linear_layers": str(changed), "notes": " ".join(notes)})
        merged.load_state_dict(load_file(temporary))
        with torch.no_grad():
            return _difference(network, example, run(merged, example)[0])


EXPORTS = {"onnx": export_onnx, "pt2": export_program, "merged": export_merged}
"""What ``tensor-dropout export --to`` offers."""


@torch.no_grad()
def _difference(network: nn.Module, example: Tensor, found: Tensor) -> float:
    expected = run(network, example)[0]
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' remarks on torch's own internals and on packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
