"""``tensor-dropout train`` and ``ls``: runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.cli.failures import report_failure
from tensor_dropout_lab.data import DATASETS
from tensor_dropout_lab.nets import HEADS
from tensor_dropout_lab.nets.families import describe_families

if TYPE_CHECKING:
    from tensor_dropout_lab.training.config import Config

_SHORT = {
    "data": "data.name",
    "root": "data.root",
    "target": "data.options.target",
    "units": "data.options.units",
    "net": "net.name",
    "weights": "net.weights",
    "head": "net.head",
    "rank": "net.rank",
    "theta": "net.theta",
    "law": "net.law",
    "epochs": "run.epochs",
    "batch": "run.batch",
    "lr": "optimizer.lr",
    "seed": "run.seed",
    "device": "run.device",
}
"""Options of their own, and the keys that they set."""


def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; without it, the defaults of the data.")] = None,
    data: Annotated[
        str | None, typer.Option(help=f"The data: {', '.join(DATASETS)}, or a registered set.", show_default="digits")
    ] = None,
    root: Annotated[str | None, typer.Option(help="The folder of the data.")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="The column to predict (nifti, table); several with commas.", show_default="nifti: age, table: all"
        ),
    ] = None,
    units: Annotated[
        str | None, typer.Option(help="Of points (table): fractions or pixels.", show_default="fractions")
    ] = None,
    net: Annotated[
        str | None, typer.Option(help=f"The network: {describe_families()}.", show_default="by data")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="A file with the published weights of the network, for all but its head.")
    ] = None,
    head: Annotated[str | None, typer.Option(help=f"The head: {', '.join(HEADS)}.", show_default="rtrl-cp")] = None,
    rank: Annotated[
        str | None, typer.Option(help="64, 128,3,3,96, a fraction 0.1, or full.", show_default="half the channels")
    ] = None,
    theta: Annotated[str | None, typer.Option(help="The KEEP probability.", show_default="0.9")] = None,
    law: Annotated[
        str | None,
        typer.Option(help="bernoulli, replacement, gaussian, nested, or a registered one.", show_default="bernoulli"),
    ] = None,
    epochs: Annotated[str | None, typer.Option(help="Passes over the training data.", show_default="by data")] = None,
    batch: Annotated[
        str | None, typer.Option(help="Examples in a step, over all processes.", show_default="by data")
    ] = None,
    lr: Annotated[str | None, typer.Option(help="The largest learning rate.", show_default="by data")] = None,
    seed: Annotated[str | None, typer.Option(help="Of initialisation, order, masks, augmentation.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", show_default="auto")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of the config; may be repeated. See --keys."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="The run's folder.", show_default="./out/runs/DATA/HEAD[-foldK]-seedN"),
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key with its default, and exit.")] = False,
) -> None:
    """Train a network, evaluate it on the test part once, and keep everything in a folder.

    Interrupted (Ctrl-C, SIGTERM, kill -9, power), the same command goes on. With torchrun it uses all its processes:
    torchrun --nproc-per-node 8 -m tensor_dropout_lab train ...

    For example:

      tensor-dropout train --data digits --head rtrl-cp

      tensor-dropout train --data nifti --root FOLDER --target age --head rtrl-tucker --rank 128,3,4,4,1

      tensor-dropout train --data table --root FOLDER --units pixels --set data.options.size=128

      tensor-dropout train --data imagefolder --root FOLDER --net timm:convnext_tiny --weights convnext.safetensors

      tensor-dropout train my.toml --set optimizer.weight_decay=5e-4 --set data.options.validation=0

      tensor-dropout --import my_module train --data my_data --law my_law
    """
    given = {name: value for name, value in locals().items() if name in _SHORT and value is not None}
    with report_failure("train", "the same command goes on from the last checkpoint"):
        from tensor_dropout_lab.training.config import parse_value, resolve_config
        from tensor_dropout_lab.training.loop import train as run

        overrides = {_SHORT[name]: parse_value(_SHORT[name], value) for name, value in given.items()}
        for setting in settings or []:
            key, equals, value = setting.partition("=")
            if not equals:
                raise TensorDropoutError(f"--set takes KEY=VALUE, such as run.epochs=3; got {setting!r}")
            overrides[key] = parse_value(key, value)
        resolved = resolve_config(config, overrides)
        if keys:
            _list_keys(resolved)
            return
        folder = out or _name_folder(resolved)
        result = run(resolved, folder)
        _show_result(result, folder)


def _list_keys(resolved: Any) -> None:
    from tensor_dropout_lab.data import describe_options
    from tensor_dropout_lab.training.config import describe_keys

    typer.echo(describe_keys(resolved))
    typer.echo(f"# data.options of {resolved.data.name}:")
    for name, option in describe_options(resolved.data.name).items():
        typer.echo(f"#   {name}: {option}")


def _name_folder(config: "Config") -> Path:
    """The default folder of a run: what usually differs between runs is in its name."""
    fold = config.data.options.get("fold")
    words = [config.net.head, *([] if fold is None else [f"fold{fold}"]), f"seed{config.run.seed}"]
    return Path("out", "runs", config.data.name, "-".join(words))


def _show_result(result: dict[str, Any], folder: Path) -> None:
    import os

    from tensor_dropout_lab.training.runs import split_targets

    if os.environ.get("RANK", "0") != "0":
        return
    points, labels = result.get("points", []), {"distance": "mean distance in % of the image side"}
    for part in ("validation", "test"):
        for target, found in split_targets(result.get(part, {}), points).items():
            known = {name: value for name, value in found.items() if value is not None}
            numbers = "  ".join(f"{labels.get(name, name)} {value:.4g}" for name, value in known.items())
            if numbers:
                typer.echo(f"{part}{target and f', {target}'}: {numbers}")
    if "baselines" in result:
        names = {"mean": "the mean of the training targets", "ridge": "ridge regression on the inputs"}
        baselines = {name: split_targets(found, points) for name, found in result["baselines"].items()}
        for target, scores in baselines["mean"].items():
            metric = "distance" if "distance" in scores else "mae"
            numbers = "  ".join(f"{names[name]} {found[target][metric]:.4g}" for name, found in baselines.items())
            said = f"{labels.get(metric, metric)}{target and f' of {target}'}"
            typer.echo(f"{said} on the same test examples: {numbers}")
        if "ridge" not in result["baselines"]:
            typer.echo(
                "(no ridge regression: it needs 3 to 2,000 pictures or volumes in memory, see data.options.memory)"
            )
    typer.echo(
        f"{result['parameters']:,} parameters; {result['epochs']} epochs in {result['seconds']:.1f} s "
        f"({result['examples_per_second']:,.0f} examples/s, {result['device']}, {result['precision']}).\nWrote:"
    )
    for name in ("config.toml", "run.json", "metrics.jsonl", "result.json", "predictions.csv", "model.safetensors"):
        if (folder / name).is_file():
            typer.echo(f"  {folder / name}")


def ls(
    root: Annotated[Path, typer.Argument(help="Where to look.", exists=True, file_okay=False)] = Path("out"),
) -> None:
    """List the runs under a folder: what they are, how far they came, and their test metric.

    For example: tensor-dropout ls out/runs
    """
    with report_failure("ls", "nothing was changed"):
        from rich.console import Console
        from rich.table import Table

        from tensor_dropout_lab.training.runs import list_runs

        rows = list_runs(root)
        if not rows:
            typer.echo(f"There are no runs under {root}.")
            return
        table = Table("run, and its folder", "epochs", "test", show_lines=True)
        table.columns[0].overflow = "fold"  # a folder may be long; nothing is cut off
        for row in rows:
            what = f"{row['data']}, {row['net']}, {row['head']}, seed {row['seed']}"
            scores = ", ".join(f"{score:.2f}" if score < 1e4 else f"{score:.4g}" for score in row["test"])
            table.add_row(
                f"{what}\n{row['folder']}",
                f"{row['epochs']} {row['state']}",
                f"{row['metric']} {scores}" if scores else "",
            )
        Console().print(table)
