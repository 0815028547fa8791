"""Make a PNG small enough to commit: ``python tools/shrink_png.py SOURCE TARGET [COLOURS]``, 64 if not said."""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

from tensor_dropout.atomic_files import replacing


def shrink_png(source: Path, target: Path, colors: int = 64) -> None:
    """Write ``source`` to ``target`` with a palette; few colours lose those that are rare."""
    picture = Image.open(source).convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE, colors=colors)
    with replacing(target) as temporary:
        picture.save(temporary, optimize=True)


if __name__ == "__main__":
    shrink_png(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
