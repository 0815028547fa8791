"""``tensor-dropout demo``: the library in one picture."""

from pathlib import Path
from typing import Annotated

import typer

from tensor_dropout_lab.cli.failures import report_failure
from tensor_dropout_lab.cli.options import spare_other_programs


def demo(
    out: Annotated[Path, typer.Option(file_okay=False, help="The folder for the picture and its numbers.")] = Path(
        "out", "demo"
    ),
    labels: Annotated[
        list[int] | None,
        typer.Option(min=5, help="A number of labelled pictures; may be repeated.", show_default="25 50 100 200 400"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="How often pictures are drawn anew, for the intervals.")] = 5,
) -> None:
    """Show in a minute what tensor dropout is for: where is the digit, from few labelled pictures?

    Real digits at simulated places, maps of a small frozen network with random weights, and four heads: ridge on pooled
    and on flattened maps, a tensor head, and one with tensor dropout. Writes one picture and prints one sentence.

    For example:

      tensor-dropout demo

      tensor-dropout demo --labels 50 --labels 100 --seeds 3 --out out/small-demo
    """
    with report_failure("demo", "nothing was written"):
        spare_other_programs()
        from tensor_dropout_lab.demo import LABELS, write_demo

        sentence, picture = write_demo(out, labels or LABELS, seeds)
    typer.echo(sentence)
    typer.echo(f"Picture: {picture}")
