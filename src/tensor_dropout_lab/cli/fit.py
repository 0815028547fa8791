"""``tensor-dropout fit``: a head on the frozen features of labelled images."""

from pathlib import Path
from typing import Annotated

import typer

from tensor_dropout_lab.cli.failures import report_failure
from tensor_dropout_lab.cli.options import one_of, parse_sizes, spare_other_programs


def fit(
    images: Annotated[Path, typer.Option(help="A folder or a tar file of pictures or NIfTI volumes.")],
    targets: Annotated[
        Path,
        typer.Option(
            help="A CSV with the columns file, group (if any) and the targets: numbers, or one of class names."
        ),
    ],
    backbone: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help="The frozen network: efficientnet-lite0 (weights from the package index), timm:NAME, torchvision:NAME "
            "or monai:NAME with --weights, my_nets:build, or the folder of a run of train.",
        ),
    ],
    weights: Annotated[
        Path | None, typer.Option(help="The network's weights: safetensors, or a state dict of torch.save.")
    ] = None,
    arguments: Annotated[
        str, typer.Option("--backbone-arguments", help="Keyword arguments of the network, as a JSON object.")
    ] = "{}",
    layer: Annotated[
        list[str] | None,
        typer.Option(help="The layer whose maps are used; repeated, their maps are joined.", show_default="by stride"),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="What images are resized to: 224, or 224,320; volumes: 64, or 64,64,48.", show_default="the network's"
        ),
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="A smaller grid to average the maps to: 7, or 7,10.", show_default="none")
    ] = None,
    grid: Annotated[
        str | None, typer.Option(help="How a transformer's tokens lie, if it cannot be told: 14,14.")
    ] = None,
    channel_axis: Annotated[int, typer.Option(help="Where a map's channels are: 1, or -1 if they are last.")] = 1,
    units: Annotated[
        str, one_of(("fractions", "pixels"), "Of the points: of width and height, or pixels from the top left.")
    ] = "fractions",
    missing: Annotated[
        str, one_of(("error", "skip"), "Rows without an image and images without a row: an error, or left out.")
    ] = "error",
    task: Annotated[
        str | None, one_of(("regression", "classification"), "What the targets are, if their column does not tell.")
    ] = None,
    folds: Annotated[int, typer.Option(min=2, help="Of the cross-validation; a group is in one of them.")] = 5,
    n: Annotated[
        int | None,
        typer.Option(
            "--n",
            min=2,
            help="Use only this many images, chosen by --seed; a larger --n keeps them. Several sizes show what more "
            "labels would bring.",
            show_default="all",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cpu")] = None,
    cache: Annotated[Path, typer.Option(file_okay=False, help="Keeps the features for the next start.")] = Path(
        "out/feature-maps"
    ),
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="The folder of the results.",
            show_default="out/fit/ and the name of the table, or of its folder if it is points.csv",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of folds, starts and --n.")] = 0,
) -> None:
    """Fit a tensor regression on frozen features of labelled images, and say whether it beats ridge.

    Images go through the network once. Cross-validation then compares tensor regression with flattened ridge, pooled
    ridge and predicting the mean, on images that none of them saw. The winner is fitted on all images and saved, with
    a report, predictions of held-out images and pictures. Targets are points (x0, y0, ..), other numbers, or classes.

    For example:

      tensor-dropout fit --images wings/images --targets wings/points.csv --backbone efficientnet-lite0

      tensor-dropout fit --images images.tar --targets ages.csv --backbone timm:convnext_tiny --weights W.safetensors

      tensor-dropout predict new-photos --model out/fit/wings
    """
    with report_failure("fit", "features are kept, the search begins anew with the same command"):
        spare_other_programs()
        from tensor_dropout_lab.head_fitting import fit_head
        from tensor_dropout_lab.head_search import FitOptions

        options = FitOptions(
            images=images,
            targets=targets,
            backbone=backbone,
            weights=weights,
            arguments=arguments,
            layer=tuple(layer or ()),
            size=parse_sizes("--size", size, "a size in pixels, such as 224 or 224,320 (volumes: 64 or 64,64,48)"),
            pool=parse_sizes("--pool", pool, "the grid to average to, such as 7 or 7,10"),
            grid=parse_sizes("--grid", grid, "the grid of the tokens, such as 14,14"),
            channel_axis=channel_axis,
            units=units,  # type: ignore[arg-type]
            missing=missing,
            task=task,  # type: ignore[arg-type]
            folds=folds,
            n=n,
            device=device,
            cache=cache,
            out=out,
            seed=seed,
        )
        written = fit_head(options, typer.echo)
        typer.echo("Wrote:")
        for path in written:
            typer.echo(f"  {path}")
