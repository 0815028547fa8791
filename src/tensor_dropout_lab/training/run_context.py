"""What a run happens inside of: signals that wait, CPU threads, tuned convolutions, and a full GPU explained."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.training.config import Config


class Interruption:
    """Ctrl-C and SIGTERM wait for the end of the step, so that the state that is saved is whole."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:  # asked twice: at once
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many CPU threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def tuned_convolutions() -> Iterator[None]:
    """Inside, cuDNN times its algorithms for every shape it meets and takes the fastest: batches are of one shape."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def explaining_memory(config: Config) -> Iterator[None]:
    """Turn a full GPU into a sentence with the batch size to try."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        smaller = 2 ** math.floor(math.log2(config.run.batch / 2)) if config.run.batch > 1 else 0
        advice = f"try --batch {smaller}" if smaller else "use a smaller network or smaller inputs"
        raise TensorDropoutError(
            f"train: the GPU's memory is full at run.batch={config.run.batch}; {advice}"
        ) from error
