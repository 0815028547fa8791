"""How many threads a fit takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

SMALL = 2**28
"""Multiply-adds of the product of features and channels' factor, below which one thread is as fast as several."""


@contextmanager
def one_thread_if_small(x: Tensor, width: int) -> Iterator[None]:
    """One thread for small fits on a CPU.

    Several gain nothing there. Where other programs are at work they wait for each other at every one of the many small
    steps: 20 times the time was seen.

    Args:
        x: the features.
        width: how many numbers the channels' factor makes of each position.
    """
    threads = torch.get_num_threads()
    if x.device.type != "cpu" or threads == 1 or x.numel() * width > SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
