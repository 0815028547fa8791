"""Small runs on the CPU for the tests of training, and processes that may be killed in the middle of one."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

import pytest
import torch
from safetensors.torch import load_file

from tensor_dropout_lab.training.config import resolve_config
from tensor_dropout_lab.training.loop import Trainer, build_network, train
from tensor_dropout_lab.training.processes import Process
from tensor_dropout_lab.training.runs import RunFolder
from tensor_dropout_lab.training.show import Reporter

SMALL = {"data.name": "digits", "run.epochs": 2, "run.device": "cpu", "run.threads": 1, "run.workers": 0}
STEPS_PER_EPOCH = 16  # 1,077 digits to train on, in batches of 64
ALONE = Process(0, 1, torch.device("cpu"))


def configure(**overrides):
    """The config of a small run; ``run__epochs=3`` sets ``run.epochs``."""
    return resolve_config(overrides=SMALL | {key.replace("__", "."): value for key, value in overrides.items()})


def run(folder, **overrides):
    """Train a small run in a folder, or go on with it; the result."""
    return train(configure(**overrides), folder, show=False)


def make_trainer(folder, data, network=None, process=ALONE, **overrides):
    """A trainer on given data, with a network of ours or of one's own."""
    config = configure(**overrides)
    network = build_network(config, data) if network is None else network
    return Trainer(config, data, network, RunFolder(folder), process, Reporter(config, data, False))


def read_weights(folder):
    return load_file(folder / "model.safetensors")


def read_metrics(folder):
    """The lines of ``metrics.jsonl`` without what a clock says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def assert_equal_runs(found, expected):
    """Bit-identical weights, equal predictions, and the same metrics once per epoch."""
    ours, theirs = read_weights(found), read_weights(expected)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert (found / "predictions.csv").read_text() == (expected / "predictions.csv").read_text()
    assert read_metrics(found) == read_metrics(expected)


def fork(function, *arguments):
    """Start a function in a copy of this process, which knows torch already; the child's id."""
    if torch.cuda.is_initialized():
        pytest.skip("a test before this one used the GPU, and CUDA cannot be used in a copy of such a process")
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            # A suite in the background of a shell ignores SIGINT, and so would its children.
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        function(*arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(child):
    """How a child ended: its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_forked(function, *arguments):
    return wait(fork(function, *arguments))


def die():
    """As with ``kill -9``: no handler, no clean-up."""
    os.kill(os.getpid(), signal.SIGKILL)
