"""Heads on scikit-learn's handwritten digits: accuracy, and accuracy under noise.

Claim: none. It trains a small convolutional network on 1,797 real 8×8 images with four heads of the same (C, 4, 4)
features, and reports what it measures:

- ``fc``: global average pooling + ``nn.Linear``, the usual head and the paper's baseline;
- ``fc-flat``: flattening + ``nn.Linear``, a control: it sees positions, as the tensor heads do, without low rank;
- ``trl``: a Tucker regression;
- ``rtrl``: the same Tucker regression with tensor dropout in training.

Noise is the paper's: white Gaussian, ``SNR = σ²_signal / σ²_noise``; every image has mean 0 and variance 1.
The images are split once, 60/20/20. Rank and θ were picked by hand on the validation part; in each run it picks the
epoch. The test part is read once, at the end, and picks nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from tensor_dropout.layers.head_outputs import count_parameters
from tensor_dropout.layers.tucker import TuckerRegression
from tensor_dropout.version import __version__
from tensor_dropout_lab.extras import import_extra
from tensor_dropout_lab.figures import LOOKS, draw_figure, require_matplotlib, save_figure
from tensor_dropout_lab.records import describe_environment, read_finished, write_json

HEADS = ("fc", "fc-flat", "trl", "rtrl")
CLASSES = 10


@dataclass(frozen=True)
class Preset:
    """All settings of the experiment; a finished run is reused only if every one of them is equal."""

    seeds: int
    epochs: int
    channels: int = 32
    rank: tuple[int, int, int, int] = (16, 3, 3, 10)
    theta: float = 0.8
    batch: int = 64
    lr: float = 3e-3
    weight_decay: float = 1e-3
    snrs: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    shown_snrs: tuple[float, ...] = (4.0, 1.0)
    noise_draws: int = 5


PRESETS: dict[str, Preset] = {
    "quick": Preset(seeds=5, epochs=20),
    "paper": Preset(seeds=20, epochs=100, noise_draws=20),
}


@dataclass(frozen=True)
class Part:
    """One part of the data: images (n, 1, 8, 8), each of mean 0 and variance 1, and labels (n,)."""

    images: Tensor
    labels: Tensor


def run(name: str, preset: str, out: Path, seed: int, **_: Any) -> list[Path]:
    """Train every head with every seed, and write the table, the figure and the numbers.

    Args:
        name: "digits".
        preset: one of ``PRESETS``.
        out: the folder of all experiments; finished runs in it are not repeated.
        seed: the first seed.

    Returns:
        The files that were written: JSON, PNG and SVG.

    Raises:
        TensorDropoutError: if scikit-learn or matplotlib is missing.
    """
    settings = PRESETS[preset]
    out = out / name
    require_matplotlib()
    parts = load_parts()
    console = Console()
    seeds = range(seed, seed + settings.seeds)
    runs = train_all(settings, seeds, parts, out / "runs" / preset, console)
    summary = summarize(runs, settings)
    environment = describe_environment("numpy", "scikit-learn")
    print_table(summary, settings, environment, console)
    verdicts = compare_heads(runs, settings)
    for sentence in verdicts:
        console.print(sentence, highlight=False)
    record = {
        "experiment": name,
        "preset": preset,
        "settings": asdict(settings),
        "seeds": list(seeds),
        "environment": environment,
        "images": {part: len(data.labels) for part, data in parts.items()},
        "heads": summary,
        "verdicts": verdicts,
        "runs": runs,
    }
    stem = out / f"{name}-{preset}"
    write_json(stem.with_name(f"{stem.name}.json"), record)
    return [stem.with_name(f"{stem.name}.json"), *plot_noise(summary, settings, stem)]


# Data.


def load_parts() -> dict[str, Part]:
    """The digits in three parts with the same share of each class: train, validation and test."""
    datasets = import_extra("sklearn.datasets", "reproduce digits")
    train_test_split = import_extra("sklearn.model_selection", "reproduce digits").train_test_split
    pixels, classes = datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    images = images - images.mean(dim=(1, 2, 3), keepdim=True)
    images = images / images.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
    labels = torch.tensor(classes)
    rest, test = train_test_split(range(len(labels)), test_size=0.2, stratify=classes, random_state=0)
    train, validation = train_test_split(rest, test_size=0.25, stratify=classes[rest], random_state=0)
    named = {"train": train, "validation": validation, "test": test}
    return {part: Part(images[rows], labels[rows]) for part, rows in named.items()}


# Networks.


def build_network(head: str, settings: Preset) -> nn.Sequential:
    """Three convolutions, (1, 8, 8) -> (C, 4, 4), and a head."""
    C = settings.channels
    body = nn.Sequential(_convolve(1, C // 2), _convolve(C // 2, C // 2), _convolve(C // 2, C, stride=2))
    return nn.Sequential(body, build_head(head, settings))


def build_head(head: str, settings: Preset) -> nn.Module:
    """(C, 4, 4) -> 10 logits."""
    C = settings.channels
    if head == "fc":
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, CLASSES))
    if head == "fc-flat":
        return nn.Sequential(nn.Flatten(), nn.Linear(C * 4 * 4, CLASSES))
    dropout = settings.theta if head == "rtrl" else None
    return TuckerRegression((C, 4, 4), CLASSES, rank=settings.rank, dropout=dropout)


def _convolve(channels: int, filters: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(channels, filters, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(filters), nn.ReLU())


# Training.


def train_all(
    settings: Preset, seeds: range, parts: dict[str, Part], folder: Path, console: Console
) -> list[dict[str, Any]]:
    """The record of every head with every seed; those that are in ``folder`` already are read, not repeated."""
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    records = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("digits", total=len(seeds) * len(HEADS) * settings.epochs)
        for seed in seeds:
            for head in HEADS:
                progress.update(task, description=f"{LOOKS[head].label}, seed {seed}")
                path = folder / f"{head}-seed{seed}.json"
                identity = describe_run(head, seed, settings)
                record = read_finished(path, identity)
                if record is None:
                    result = train_one(head, seed, settings, parts, lambda: progress.advance(task))
                    record = {"settings": identity, **result}
                    write_json(path, record)
                else:
                    progress.advance(task, settings.epochs)
                records.append(record)
        progress.update(task, description="done")
    return records


def describe_run(head: str, seed: int, settings: Preset) -> dict[str, Any]:
    """Everything that a run depends on: if any of it changes, the run is repeated."""
    shared = {key: value for key, value in asdict(settings).items() if key not in ("seeds", "shown_snrs")}
    return {"head": head, "seed": seed, **shared, "tensor_dropout": __version__, "torch": torch.__version__}


def train_one(
    head: str, seed: int, settings: Preset, parts: dict[str, Part], advance: Callable[[], None]
) -> dict[str, Any]:
    """Train one network, keep its best epoch on the validation part, and read the test part once.

    Args:
        head: one of ``HEADS``.
        seed: of the initialisation, the batches, the masks and the noise.
        settings: the preset.
        parts: from :func:`load_parts`.
        advance: called after each epoch.

    Returns:
        Parameter counts, the epoch that was kept, and the test accuracies in percent.
    """
    train = parts["train"]
    with isolated_randomness(seed):
        network = build_network(head, settings)
        optimizer = torch.optim.AdamW(network.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
        steps = settings.epochs * -(-len(train.labels) // settings.batch)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=steps)
        best_loss, best_epoch, best_state = float("inf"), 0, network.state_dict()
        for epoch in range(1, settings.epochs + 1):
            network.train()
            for rows in torch.randperm(len(train.labels)).split(settings.batch):
                loss = F.cross_entropy(network(train.images[rows]), train.labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            validation_loss = evaluate_loss(network, parts["validation"])
            if validation_loss < best_loss:
                best_loss, best_epoch, best_state = validation_loss, epoch, copy.deepcopy(network.state_dict())
            advance()
        network.load_state_dict(best_state)
        return {
            "parameters_head": count_parameters(network[1]),
            "parameters_network": count_parameters(network),
            "best_epoch": best_epoch,
            "validation_loss": best_loss,
            "accuracy": evaluate_accuracy(network, parts["test"], settings, seed),
        }


@contextmanager
def isolated_randomness(seed: int) -> Iterator[None]:
    """Seed torch and use one thread inside; the caller's generator and threads come back after.

    One thread: the network is so small that a second one gains a fifth, and on a shared machine loses far more.
    """
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@torch.no_grad()
def evaluate_loss(network: nn.Module, part: Part) -> float:
    """The cross-entropy on clean images."""
    network.eval()
    return float(F.cross_entropy(network(part.images), part.labels))


@torch.no_grad()
def evaluate_accuracy(network: nn.Module, part: Part, settings: Preset, seed: int) -> dict[str, float]:
    """Accuracy in percent on clean images ("clean") and at each SNR; every head meets the same noise."""
    network.eval()
    noise_source = torch.Generator().manual_seed(seed)
    accuracy = {"clean": _percent_right(network(part.images), part.labels)}
    for snr in settings.snrs:
        noise = torch.randn(settings.noise_draws, *part.images.shape, generator=noise_source) / snr**0.5
        logits = network((part.images + noise).flatten(0, 1))  # (draws · n, 10)
        accuracy[condition(snr)] = _percent_right(logits, part.labels.repeat(settings.noise_draws))
    return accuracy


def condition(snr: float) -> str:
    """The name of a noise level: "SNR 0.25"."""
    return f"SNR {snr:g}"


def _percent_right(logits: Tensor, labels: Tensor) -> float:
    return 100 * float((logits.argmax(1) == labels).double().mean())


# Results.


def summarize(runs: list[dict[str, Any]], settings: Preset) -> dict[str, Any]:
    """Parameters, and mean and standard deviation over the seeds, of each head under each condition."""
    summary: dict[str, Any] = {}
    for head in HEADS:
        own = [record for record in runs if record["settings"]["head"] == head]
        accuracy = {}
        for name in ("clean", *map(condition, settings.snrs)):
            values = torch.tensor([record["accuracy"][name] for record in own], dtype=torch.float64)
            spread = float(values.std()) if len(own) > 1 else None
            accuracy[name] = {"mean": float(values.mean()), "std": spread}
        summary[head] = {
            "label": LOOKS[head].label,
            "parameters_head": own[0]["parameters_head"],
            "parameters_network": own[0]["parameters_network"],
            "accuracy": accuracy,
        }
    return summary


def print_table(summary: dict[str, Any], settings: Preset, environment: dict[str, Any], console: Console) -> None:
    """The summary as a table, with what it is an average of."""
    shown = ("clean", *map(condition, settings.shown_snrs))
    table = Table(title="Test accuracy in %, mean ± standard deviation over the seeds", title_justify="left")
    table.add_column("head")
    for name in (*shown, "head params", "net params"):
        table.add_column(name, justify="right")
    for row in summary.values():
        cells = [_format_cell(row["accuracy"][name]) for name in shown]
        table.add_row(row["label"], *cells, f"{row['parameters_head']:,}", f"{row['parameters_network']:,}")
    console.print(table)
    console.print(
        f"{settings.seeds} seeds, {settings.epochs} epochs, θ = {settings.theta:g}, Tucker rank {settings.rank}; "
        f"torch {environment['torch']}, CPU.",
        highlight=False,
    )


def _format_cell(cell: dict[str, float | None]) -> str:
    return f"{cell['mean']:.1f}" + ("" if cell["std"] is None else f" ± {cell['std']:.1f}")


def compare_heads(runs: list[dict[str, Any]], settings: Preset) -> list[str]:
    """What the numbers say about the R-TRL, in sentences: differences paired by seed, with 95 % intervals."""
    shown = ("clean", *map(condition, settings.shown_snrs))
    values = {
        head: {name: [r["accuracy"][name] for r in runs if r["settings"]["head"] == head] for name in shown}
        for head in HEADS
    }
    sentences = [_name_winners(values, shown)]
    for rival in HEADS:
        if rival != "rtrl":
            parts = [f"{name} {_judge(values['rtrl'][name], values[rival][name])}" for name in shown]
            sentences.append(f"R-TRL against {LOOKS[rival].label}: {'; '.join(parts)}.")
    return sentences


def _name_winners(values: dict[str, dict[str, list[float]]], shown: tuple[str, ...]) -> str:
    best = {name: max(HEADS, key=lambda head: sum(values[head][name])) for name in shown}
    columns = {head: ", ".join(name for name in shown if best[name] == head) for head in HEADS}
    won = columns.pop("rtrl")
    elsewhere = "; ".join(f"{LOOKS[head].label} at {names}" for head, names in columns.items() if names)
    if not elsewhere:
        return "The R-TRL has the highest mean accuracy in every column."
    verb = f"has the highest mean accuracy at {won} only" if won else "does not win any column"
    return f"The R-TRL {verb}. The highest means elsewhere: {elsewhere}."


def _judge(ours: list[float], theirs: list[float]) -> str:
    """The mean of the paired differences in points, and whether its 95 % interval (Student's t) leaves out 0."""
    from scipy.stats import t as student

    differences = torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)
    n, mean = len(differences), float(differences.mean())
    if n < 2:
        return f"{mean:+.1f} (one seed: no interval)"
    half = float(student.ppf(0.975, n - 1)) * float(differences.std()) / n**0.5
    clear = "ahead" if mean > half else "behind" if mean < -half else "no clear difference"
    return f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}] ({clear})"


def plot_noise(summary: dict[str, Any], settings: Preset, stem: Path) -> list[Path]:
    """Accuracy over SNR for every head, with a band of one standard deviation."""
    snrs = sorted(settings.snrs)
    with draw_figure() as figure:
        axes = figure.add_subplot()
        for head, row in summary.items():
            cells = [row["accuracy"][condition(snr)] for snr in snrs]
            mean = torch.tensor([cell["mean"] for cell in cells])
            spread = torch.tensor([cell["std"] or 0.0 for cell in cells])
            axes.plot(snrs, mean, **LOOKS[head].as_line())
            axes.fill_between(snrs, mean - spread, mean + spread, color=LOOKS[head].color, alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(snrs, [f"{snr:g}" for snr in snrs])
        axes.set_ylim(0, 100)
        axes.set_xlabel("SNR = σ²(signal) / σ²(noise); more noise to the left")
        axes.set_ylabel("test accuracy (%)")
        axes.set_title(f"Digits under Gaussian noise, {settings.seeds} seeds, band: ± 1 std")
        axes.legend(loc="lower right")
        return save_figure(figure, stem)
