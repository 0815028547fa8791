"""Make a PNG small enough to commit: 64 colours. Run ``python tools/shrink_png.py SOURCE TARGET``."""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

from tensor_dropout.atomic_files import replacing


def shrink_png(source: Path, target: Path) -> None:
    """Write ``source`` to ``target`` with a palette of 64 colours."""
    picture = Image.open(source).convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
    with replacing(target) as temporary:
        picture.save(temporary, optimize=True)


if __name__ == "__main__":
    shrink_png(Path(sys.argv[1]), Path(sys.argv[2]))
