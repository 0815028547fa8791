"""``tensor-dropout label``: points on pictures, on a page in the browser."""

from pathlib import Path
from typing import Annotated

import typer

from tensor_dropout_lab.cli.failures import report_failure
from tensor_dropout_lab.cli.options import one_of, parse_sizes, spare_other_programs


def label(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="A folder of pictures: PNG, JPEG, TIFF, WebP, DICOM.")],
    points: Annotated[
        Path | None,
        typer.Option(help="A text file with the name of a point in each line.", show_default="named on the page"),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="The frozen network, as tensor-dropout fit takes it.",
            show_default="as before, else efficientnet-lite0",
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="The network's weights: safetensors, or a state dict of torch.save.")
    ] = None,
    arguments: Annotated[
        str | None,
        typer.Option("--backbone-arguments", help="Keyword arguments of the network, as a JSON object."),
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(help="The layer whose maps are used; repeated, their maps are joined.", show_default="by stride"),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help="What pictures are resized to for it: 224, or 224,320.", show_default="the network's"),
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(
            help="A CSV with the columns file and group: pictures of one specimen or patient belong together."
        ),
    ] = None,
    group_pattern: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Or: where the group is in a picture's name, such as '(fly[0-9]+)_': the first bracket.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Where the labels are written.", show_default="labels in FOLDER"),
    ] = None,
    cache: Annotated[Path, typer.Option(file_okay=False, help="Keeps the features for the next start.")] = Path(
        "out/feature-maps"
    ),
    order: Annotated[
        str | None, one_of(("gain", "folder"), "Which picture is next: where a label brings most, or by name.")
    ] = None,
    read: Annotated[
        Path | None, typer.Option(help="Take over labels of TPS, COCO, DeepLabCut or a points.csv before the start.")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the labels to a file, .tps, .json (COCO) or .csv, and end; no page is shown."),
    ] = None,
    format: Annotated[
        str | None,
        one_of(("tps", "coco", "deeplabcut", "csv"), "Of --read or --write, where the ending does not tell it."),
    ] = None,
    units: Annotated[str, one_of(("fractions", "pixels"), "Of a points.csv in --read.")] = "fractions",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page.")] = True,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Of the page.", show_default="the last one if it is free, else any"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of folds and starts.")] = 0,
) -> None:
    """Place points on pictures; a head learns while you label, and places them for you to correct.

    Opens a page in the browser. After five pictures a head is fitted on frozen features, within seconds and again and
    again: it suggests where the points are, says where it is unsure, and which picture would teach it most. Everything
    stays on this machine. Labels are in FOLDER/labels: points.csv, the journal of what was done, and the fitted head.

    For example:

      tensor-dropout label wings --points names.txt

      tensor-dropout label skulls --group-pattern '(specimen[0-9]+)_' --read skulls.tps

      tensor-dropout label wings --write wings.tps
    """
    with report_failure("label", "everything that the page has confirmed is written"):
        spare_other_programs()
        from tensor_dropout_lab.labelling.application import LabelOptions, label_pictures

        above = context.parent.params if context.parent is not None else {}
        options = LabelOptions(
            folder=folder.expanduser(),
            points=points,
            backbone=backbone,
            weights=None if weights is None else str(weights.expanduser().resolve()),
            arguments=arguments,
            layer=tuple(layer) if layer else None,
            size=parse_sizes("--size", size, "a size in pixels, such as 224 or 224,320"),
            groups=None if groups is None else str(groups.expanduser().resolve()),
            group_pattern=group_pattern,
            order=order,
            out=None if out is None else out.expanduser(),
            cache=cache.expanduser(),
            read=read,
            write=write,
            format=format,
            units=units,
            browser=browser,
            port=port,
            seed=seed,
            modules=tuple(above.get("modules") or ()),
        )
        label_pictures(options, typer.echo)
