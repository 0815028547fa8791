"""Run a function in a process of its own, and measure the peak memory of a call."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADED = ["numpy", "scipy.linalg", "torch", "sklearn.linear_model", "tensor_dropout.sklearn"]
"""Imported once, by the server that the processes are forked from; a package that is missing there is left out."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class FailedApartError(RuntimeError):
    """The function raised in its process, or the process was killed."""


def run_apart(function: Callable[..., Any], *arguments: Any, limit: float, threads: int = 1) -> Any:
    """What a module's function returns, called in a fresh process.

    Args:
        function: of a module, with arguments and a result that can be pickled.
        arguments: of the function.
        limit: seconds after which the process is ended.
        threads: of every library; the first call of a program decides for those that read it when they are imported.

    Raises:
        TimeoutError: at the limit.
        FailedApartError: if the function raised, with what it said.
    """
    context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(writer, threads, function, arguments))
    try:
        with _environment(dict.fromkeys(THREADS, str(threads))):
            process.start()
        writer.close()
        if not reader.poll(limit):
            raise TimeoutError(f"not finished after {limit:g} s")
        try:
            good, value = reader.recv()
        except EOFError:
            process.join()
            raise FailedApartError(f"its process ended with status {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        reader.close()
    if not good:
        raise FailedApartError(value)
    return value


def _answer(writer: Connection, threads: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(threads)
    try:
        writer.send((True, function(*arguments)))
    except Exception as error:
        writer.send((False, f"{type(error).__name__}: {error}"))


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def measure_peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a call, and how many bytes of memory the process had at most beyond what it had before.

    On Linux the kernel's mark of the most is set back first: ``ru_maxrss`` alone would still know the loading of the
    data, and what the parent process once had. Elsewhere it is ``ru_maxrss`` that is compared.
    """
    gc.collect()
    status, marks = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        marks.write_text("5")
        before = _read_status(status, "VmRSS")
        result = call()
        return result, max(0, _read_status(status, "VmHWM") - before)
    except OSError:
        before = _largest()
        result = call()
        return result, _largest() - before


def _read_status(status: Path, key: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


def _largest() -> int:
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size
