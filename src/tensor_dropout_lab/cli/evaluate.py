"""``tensor-dropout evaluate`` and ``compare``: robustness and uncertainty of trained networks."""

from pathlib import Path
from typing import Annotated

import typer

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness.noise import CORRUPTIONS
from tensor_dropout_lab.cli.failures import report_failure


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run of tensor-dropout train.")],
    protocol: Annotated[
        str,
        typer.Option(
            help="paper: FGSM, BIM, PGD as printed. adaptive: margin losses, APGD, Square, transfer, and the audit. "
            "both, or none (noise only)."
        ),
    ] = "both",
    epsilon: Annotated[
        list[str] | None,
        typer.Option(
            help="A radius of both protocols, as a share of the input range; may be repeated.",
            show_default="2/255, 8/255, 16/255",
        ),
    ] = None,
    main: Annotated[
        str | None, typer.Option(help="The radius that the verdict is about.", show_default="the middle one")
    ] = None,
    norm: Annotated[str, typer.Option(help="linf or l2, of the adaptive protocol.")] = "linf",
    noise: Annotated[
        str, typer.Option(help=f"A list of {', '.join(CORRUPTIONS)}; all (that suit the data), or none.")
    ] = "gaussian",
    repeats: Annotated[int, typer.Option(min=1, help="Draws of each noise.")] = 5,
    images: Annotated[int, typer.Option(min=1, help="Examples, chosen by the seed.", show_default="1000")] = 1000,
    split: Annotated[str, typer.Option(help="test or validation.")] = "test",
    mode: Annotated[
        str,
        typer.Option(
            help="mean: the network as it is. sample: Monte-Carlo, of tensor dropout or plain dropout. exact: mean and "
            "exact std."
        ),
    ] = "mean",
    samples: Annotated[
        int | None, typer.Option(min=1, help="Draws of a prediction.", show_default="32, mean: 1")
    ] = None,
    ensemble: Annotated[
        list[Path] | None, typer.Option(help="A further run to average with, a deep ensemble; may be repeated.")
    ] = None,
    twin: Annotated[
        Path | None, typer.Option(help="A run to transfer attacks from.", show_default="a substitute is trained")
    ] = None,
    twin_epochs: Annotated[int, typer.Option(min=0, help="Of the substitute; 0: no transfer.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Of PGD and APGD.")] = 50,
    queries: Annotated[int, typer.Option(min=1, help="Of the Square attack.")] = 1000,
    head_sizes: Annotated[
        int,
        typer.Option(
            min=0,
            help="Also cut the head to about so many smaller sizes, none trained again: leading ranks of a tensor "
            "layer, low rank and pruning of a linear one.",
        ),
    ] = 0,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Examples that pass through the network at once.", show_default="256, fewer if they are large"
        ),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="The folder of the data, if it moved.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the examples, starts, noise and draws.")] = 0,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="The folder for results.", show_default="RUN/evaluation[-MODE]")
    ] = None,
) -> None:
    """Attack a trained network, add noise to its inputs, and say whether its robustness is real.

    Writes outcomes.npz (every example under every attack and noise), evaluation.json and figures. Interrupted, the
    same command goes on with the part that it was at. Radii are shares of the range of the stored inputs.

    For example:

      tensor-dropout evaluate out/runs/digits/rtrl-cp-seed0

      tensor-dropout evaluate RUN --epsilon 0.1 --epsilon 0.2 --noise all --images 500

      tensor-dropout evaluate RUN --protocol none --noise none --head-sizes 12

      tensor-dropout evaluate FC_RUN_0 --ensemble FC_RUN_1 --ensemble FC_RUN_2 --protocol none
    """
    with report_failure("evaluate", "finished parts are kept; the same command goes on"):
        from rich.console import Console

        from tensor_dropout.robustness.protocol import Budget
        from tensor_dropout_lab.evaluation.runs import RunSettings, evaluate_run
        from tensor_dropout_lab.evaluation.show import draw_evaluation, print_evaluation

        radii = {"budgets": tuple(map(Budget.parse, epsilon))} if epsilon else {}
        settings = RunSettings(
            protocol=protocol,  # type: ignore[arg-type]
            main=main,
            norm=norm,
            noise=tuple(name.strip() for name in noise.split(",")),
            repeats=repeats,
            steps=steps,
            queries=queries,
            twin_epochs=twin_epochs,
            head_sizes=head_sizes,
            seed=seed,
            **radii,
        )
        record, outcomes, folder = evaluate_run(
            run,
            settings,
            out=out,
            images=images,
            split=split,
            mode=mode,
            samples=samples,
            ensemble=ensemble or [],
            twin=twin,
            batch=batch,
            root=root,
            device=device,
        )
        print_evaluation(record, Console())
        paths = draw_evaluation(record, outcomes, folder)
        typer.echo("Wrote:")
        for path in (folder / "outcomes.npz", folder / "evaluation.json", *paths):
            typer.echo(f"  {path}")


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Evaluations, or runs that have one; the first is A.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A JSON file.", show_default="none")] = None,
) -> None:
    """Compare evaluated networks, example by example, from stored outcomes; nothing is run again.

    Every other one is compared with the first: the difference with a paired bootstrap interval; p is McNemar's exact
    test for classes and a sign-flip test for numbers. Then accuracy, likelihood and calibration side by side.

    For example:

      tensor-dropout compare out/runs/digits/rtrl-cp-seed0 out/runs/digits/fc-seed0

      tensor-dropout compare R_TRL/evaluation-exact FC_DROPOUT/evaluation-sample FC/evaluation-ensemble
    """
    with report_failure("compare", "nothing was written"):
        from rich.console import Console

        from tensor_dropout_lab.evaluation.compare import compare_outcomes, tabulate_detection, tabulate_uncertainty
        from tensor_dropout_lab.evaluation.show import print_comparison, print_detection, print_uncertainty
        from tensor_dropout_lab.record_store import read_outcomes
        from tensor_dropout_lab.run_records import write_json

        if len(folders) < 2:
            raise TensorDropoutError("compare: two evaluations at least are expected, got one")
        first, *others = (read_outcomes(folder) for folder in folders)
        names = [str(folder) for folder in folders]
        compared = [compare_outcomes(first, other) for other in others]
        for name, rows in zip(names[1:], compared, strict=True):
            print_comparison(rows, (names[0], name), Console())
        tables = tabulate_uncertainty([first, *others])
        print_uncertainty(tables, names, Console())
        detected = tabulate_detection([first, *others])
        if detected is not None:
            print_detection(detected, names, Console())
        if out is not None:
            pairs = [{"a": names[0], "b": name, "parts": rows} for name, rows in zip(names[1:], compared, strict=True)]
            record = {"pairs": pairs, "uncertainty": dict(zip(names, tables, strict=True))}
            if detected is not None:
                record["unknown"] = dict(zip(names, detected, strict=True))
            write_json(out, record)
            typer.echo(f"Wrote:\n  {out}")
