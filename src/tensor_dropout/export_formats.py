"""The formats that a network is exported to, by name: one entry each.

Importing this module does not import torch: ``tensor-dropout export --help`` lists the names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tensor_dropout.errors import TensorDropoutError

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class ExportFormat:
    """A format.

    Attributes:
        name: its key in :data:`EXPORTS`, and on the command line.
        ending: of its files.
        summary: what is written, for ``--help``.
        function: what writes it: ``function(network, example, path)`` returns the largest relative difference of the
            exported network's outputs. A function, or "module.name" in this package.
    """

    name: str
    ending: str
    summary: str
    function: str | Callable[[nn.Module, Tensor, Path], float]

    def write(self, network: nn.Module, example: Tensor, path: Path) -> float:
        """Write the network, read it again and compare.

        Args:
            network: any module.
            example: an input batch.
            path: the file.

        Returns:
            The largest difference of the outputs, relative to the network's largest output.

        Raises:
            TensorDropoutError: if the network cannot be written in this format.
        """
        if callable(self.function):
            return self.function(network, example, path)
        module, _, name = self.function.rpartition(".")
        difference: float = getattr(import_module(f"tensor_dropout.{module}"), name)(network, example, path)
        return difference


EXPORTS: dict[str, ExportFormat] = {
    entry.name: entry
    for entry in (
        ExportFormat("onnx", ".onnx", "ONNX", "exporting.export_onnx"),
        ExportFormat("pt2", ".pt2", "a torch.export program", "exporting.export_program"),
        ExportFormat("merged", ".safetensors", "the weights of plain torch layers", "exporting.export_merged"),
    )
}
"""Name -> format."""


def check_ending(path: Path, format: str) -> None:
    """Refuse a file name with the ending of another format; any other ending will do.

    Raises:
        TensorDropoutError: with the ending that fits.

    Example:
        >>> check_ending(Path("net.bin"), "onnx")
        >>> check_ending(Path("net.pt2"), "onnx")
        Traceback (most recent call last):
        tensor_dropout.errors.TensorDropoutError: --to onnx does not write net.pt2; call it net.onnx, or pass --to pt2
    """
    for other in EXPORTS.values():
        if path.suffix.lower() == other.ending and other.name != format:
            raise TensorDropoutError(
                f"--to {format} does not write {path}; call it {path.with_suffix(EXPORTS[format].ending).name}, or "
                f"pass --to {other.name}"
            )
