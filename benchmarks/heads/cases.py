"""The heads that are timed: shapes and ranks."""

from dataclasses import dataclass, field

Rank = int | tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A feature map (channels first, without the batch), the number of outputs, and a rank per format.

    ``cpu_batches`` are those of the CPU suite, which has minutes; a GPU has time for ``BATCHES``.
    """

    key: str
    title: str
    input_shape: tuple[int, ...]
    outputs: int
    ranks: dict[str, Rank] = field(hash=False)
    cpu_batches: tuple[int, ...] = (1, 8, 64)

    @property
    def shape(self) -> str:
        """As in ``512×4×4→100``."""
        return f"{'×'.join(map(str, self.input_shape))}→{self.outputs}"


BATCHES = (1, 8, 64, 512)
CASES = {
    case.key: case
    for case in (
        Case(
            "cifar",
            "CIFAR-100 head",
            (512, 4, 4),
            100,
            {"tucker": (256, 3, 3, 96), "cp": 200, "tt": (64, 32, 32)},
            BATCHES,
        ),
        Case("imagenet", "ImageNet head", (2048, 7, 7), 1000, {"tucker": (256, 3, 3, 256), "cp": 200}),
        Case("mri", "MRI head", (512, 6, 7, 6), 1, {"tucker": (128, 6, 7, 6, 1), "cp": 48}),
        Case("video", "Video head", (512, 4, 7, 7), 400, {"tucker": (256, 2, 3, 3, 128), "cp": 200}),
        Case("tiny", "Tiny head, for tests", (8, 3, 3), 5, {"tucker": (4, 2, 2, 3), "cp": 6, "tt": (4, 3, 3)}, (2, 8)),
    )
}
SUITE = ("cifar", "imagenet", "mri", "video")


def rank_cases(tiny: bool = False) -> dict[int, Case]:
    """Heads that differ in their rank alone: Tucker (R, 3, 3, R) and CP R."""
    shape, outputs, ranks = ((16, 3, 3), 16, (4, 8, 16)) if tiny else ((512, 4, 4), 512, (32, 64, 128, 256, 512))
    return {R: Case(f"rank-{R}", f"rank {R}", shape, outputs, {"tucker": (R, 3, 3, R), "cp": R}) for R in ranks}


def mode_cases(tiny: bool = False) -> dict[int, Case]:
    """Heads with 2 to 6 input modes: always 4,096 numbers per sample, 256 × 32 core entries, CP 64, TT 16."""
    shapes = {
        2: ((64, 64), (16, 16)),
        3: ((16, 16, 16), (8, 8, 4)),
        4: ((8, 8, 8, 8), (4, 4, 4, 4)),
        5: ((8, 8, 4, 4, 4), (4, 4, 4, 2, 2)),
        6: ((4,) * 6, (4, 4, 2, 2, 2, 2)),
    }
    counts = (2, 3, 4) if tiny else tuple(shapes)
    return {
        n: Case(f"modes-{n}", f"{n} modes", shapes[n][0], 100, {"tucker": (*shapes[n][1], 32), "cp": 64, "tt": 16})
        for n in counts
    }
