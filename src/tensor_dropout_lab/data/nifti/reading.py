"""Scans for a network that was trained on such a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.nifti.scans import find_files, list_kinds
from tensor_dropout_lab.data.nifti.volumes import read_header, read_input, require_voxel, typical_voxel

if TYPE_CHECKING:
    from tensor_dropout_lab.explanation_figures import View


class ScanReader:
    """Scans for a network that was trained on such a folder: a :class:`FileReader`.

    Args:
        input_shape: (1, *size) of the network.
        options: those that its data was loaded with.
        root: the folder it was trained on.
        described: what the run says about its data, such as the voxel edges.
    """

    endings = (".nii", ".nii.gz")

    def __init__(
        self, input_shape: tuple[int, ...], options: dict[str, Any], root: str | None, described: dict[str, Any]
    ) -> None:
        self.input_shape, self.options = input_shape, options
        self.root = None if root is None else Path(root).expanduser()
        self.voxel = tuple(described["voxel"]) if described.get("voxel") is not None else self._find_voxel()

    def find(self, folder: Path) -> list[Path]:
        """What training would take of a folder.

        Raises:
            TensorDropoutError: if it has several kinds of scan.
        """
        scans = find_files(folder, self._pattern)
        kinds = list_kinds(scans)
        if len(kinds) > 1:
            raise TensorDropoutError(f"{folder} has several kinds of scan ({', '.join(kinds)}); name the files instead")
        return scans

    def read(self, path: Path) -> Tensor:
        """(1, *size), of mean 0 and variance 1; its voxels must be near those of training."""
        if self.voxel is not None:
            require_voxel(path, self.voxel)
        return read_input(path, self.input_shape, self.options)

    def view(self, path: Path, x: Tensor, grid: Tensor) -> list[View]:
        """Three slices of the prepared scan."""
        from tensor_dropout_lab.explanation_figures import slice_volume

        voxel = (1.0, 1.0, 1.0) if self.options.get("resample") else read_header(path).voxel
        return slice_volume(x[0, 0].double(), grid, voxel)

    def find_units(self, targets: Sequence[str]) -> dict[str, str]:
        """The units that BIDS' description beside the table states; ``age`` in participants.tsv is in years by BIDS."""
        if self.root is None:
            return {}
        path = self.root / (self.options.get("table") or "participants.tsv")
        units = {"age": "years"} if path.name == "participants.tsv" and path.is_file() else {}
        try:
            stated = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            units |= {name: str(stated[name]["Units"]) for name in targets if "Units" in stated.get(name, {})}
        except (OSError, ValueError, AttributeError, TypeError):
            pass  # no description, or one that says nothing
        return {name: unit for name, unit in units.items() if name in targets}

    @property
    def _pattern(self) -> str:
        return str(self.options.get("images", "**/*.nii*"))

    def _find_voxel(self) -> tuple[float, ...] | None:
        """Of an older run: the voxel edges of the first 20 scans of its folder; None if resampled, or not known."""
        if self.root is None or self.options.get("resample") is not None:
            return None
        try:
            paths = find_files(self.root, self._pattern)[:20]
            return typical_voxel([read_header(path) for path in paths]) if paths else None
        except (OSError, TensorDropoutError):
            return None
