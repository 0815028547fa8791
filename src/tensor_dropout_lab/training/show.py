"""What a person sees of a run: a bar with loss, accuracy, speed and remaining time, or a line per epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.registry import main_metric
from tensor_dropout_lab.data.base import Data
from tensor_dropout_lab.training.config import Config
from tensor_dropout_lab.training.runs import flatten, split_targets

_EVERY = 0.5  # seconds between looks at the device


class Reporter:
    """Shows the progress of a run.

    Args:
        config: of the run.
        data: the data set; simulated ones are named so.
        show: whether to show anything.
    """

    def __init__(self, config: Config, data: Data, show: bool) -> None:
        self.config, self.data, self.show = config, data, show
        self.metric = main_metric(data.task)
        self.several = data.task == "regression" and data.outputs > 1
        self.console = Console(file=sys.stderr)
        self.bar: Progress | None = None
        self.done = 0
        self._looked = (0.0, 0)

    @contextmanager
    def showing(self, done: int, total: int) -> Iterator[None]:
        """The bar, from step ``done`` of ``total``."""
        self.done = done
        self._looked = (time.monotonic(), done)
        if not self.show:
            yield
            return
        name = self.data.name + (" (SIMULATED)" if self.data.simulated else "")
        self.console.print(f"{name}: {self.data.provenance}", highlight=False)
        self.console.print(self.describe_epoch(), highlight=False)
        if done:
            self.console.print(f"going on from step {done} of {total}", highlight=False)
        if not self.console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[seen]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as self.bar:
            self.task = self.bar.add_task(self.config.net.head, total=total, completed=done, seen="")
            yield
        self.bar = None

    def describe_epoch(self) -> str:
        """How many examples an epoch has, and how many whole batches leave out."""
        examples, batch = len(self.data.train), self.config.run.batch
        left = examples % batch
        said = f"{examples:,} training examples, {examples // batch:,} steps of {batch} an epoch"
        if 10 * left <= examples:
            return said
        return f"{said}; every epoch leaves {left} of them out, a smaller run.batch fewer"

    def advance(self, look: Callable[[], tuple[float, float]] | None) -> None:
        """One more step is done; now and then the device is asked how it goes."""
        self.done += 1
        if self.bar is None:
            return
        now = time.monotonic()
        since, before = self._looked
        if now - since < _EVERY:
            return
        self._looked = (now, self.done)
        speed = (self.done - before) * self.config.run.batch / (now - since)
        seen = f"{speed:,.0f}/s"
        if look is not None:
            loss, counted = look()
            shown = "" if self.several else f"{self.metric.name} {self.metric.scale * counted:.2f}  "
            seen = f"loss {loss:.3f}  {shown}{seen}"
        self.bar.update(self.task, completed=self.done, seen=seen)

    def finish_epoch(self, line: dict[str, Any]) -> None:
        """A line per epoch where there is no bar."""
        if not self.show:
            return
        text = f"epoch {line['epoch']}/{self.config.run.epochs}  loss {line['loss']:.4f}{self.describe_scores(line)}"
        if self.bar is None:
            self.console.print(f"{text}  {line['seconds']:.1f} s", highlight=False)
        else:
            self.bar.update(
                self.task, description=f"epoch {line['epoch']}/{self.config.run.epochs}", completed=self.done
            )

    def describe_scores(self, line: dict[str, Any]) -> str:
        """The main metric in training and validation; of several targets, which may have several units, of each."""
        name, summary = self.metric.name, line.get("validation")
        if self.several:
            summary = summary or {}
            targets = split_targets(summary, self.data.point_names) if summary else {}
            scores = [f"{target} {found[name]:.4g}" for target, found in targets.items() if name in found]
            distance = f"  validation distance {summary['distance']:.4g} %" if "distance" in summary else ""
            return f"{distance}  validation {name}: {', '.join(scores)}" if scores else distance
        validation = "" if summary is None else f"  validation {summary[name]:.2f}"
        return f"  {name} {line[name]:.2f}{validation}"


class Board:
    """TensorBoard logging (extra ``tensorboard``) into the run's own folder; nothing is logged anywhere else.

    Args:
        folder: where to, or None for nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.writer: Any = None
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise TensorDropoutError(
                "train: run.tensorboard needs tensorboard; install it with: pip install 'tensor-dropout[tensorboard]'"
            ) from error
        self.writer = SummaryWriter(str(folder))

    def note(self, line: dict[str, Any]) -> None:
        """The metrics of an epoch."""
        if self.writer is None:
            return
        for key, number in flatten(line).items():
            if key != "epoch":
                self.writer.add_scalar(key.replace(".", "/"), number, line["epoch"])
        self.writer.flush()

    def close(self) -> None:
        """At the end."""
        if self.writer is not None:
            self.writer.close()
