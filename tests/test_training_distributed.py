"""Training on two processes: equal gradients, equal runs, restarts, and networks in shards.

Most cases run in one start of two processes, as torchrun would start them (environment variables, gloo); restarting is
torchrun's own work, so that it is tested with torchrun itself.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn

import tensor_dropout as td
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.nets import trust
from tensor_dropout_lab.training.checkpoint import read_latest
from tensor_dropout_lab.training.processes import joined
from tensor_dropout_lab.training.step import Step
from training_runs import ALONE, assert_equal_runs, make_trainer, read_metrics, read_weights, run

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")

WORLD = 2
SEEDS = (0, 1, 2)
AGREE = {"run__epochs": 3, "run__batch": 64}
CUT = {"run__batch": 128, "run__checkpoint_every": 5}  # 8 steps in each of 2 epochs, saved at 5, 8, 10, 15 and 16
SMALLEST = {"run__epochs": 1, "run__batch": 512}
FSDP = CUT | {"run__sharding": "fsdp"}
OTHERS = SMALLEST | {"net__name": f"{__name__}:plain_net"}


def plain_net(in_channels, num_classes):
    """A network that is not ours."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(in_channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, num_classes),
    )


def run_on_two(folder, cases, seconds=240, restart=0, store=None):
    """Run every case, a name with ``(check, *arguments)``, on two processes: the failures of each.

    What does not end in time is killed: "hung". The processes meet at a store of this one, as torchrun's meet at its
    agent's: a port that is only chosen here could be taken meanwhile.
    """
    store = store or dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (cases, store.port, restart, str(folder))
    context = mp.start_processes(_run_cases, args=arguments, nprocs=WORLD, join=False, start_method="spawn")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.is_alive() for process in context.processes):
        time.sleep(0.05)
    found = []
    for rank, process in enumerate(context.processes):
        ended = not process.is_alive()
        process.kill()
        process.join()
        found.append(json.loads((folder / f"{rank}.json").read_text()) if ended else "hung")
    return found


def _run_cases(rank, cases, port, restart, folder):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    failures = {}
    for attempt, (name, (check, *arguments)) in enumerate(cases.items(), restart):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)  # each case meets under a name of its own
        try:
            check(Path(folder), *arguments)
        except BaseException as error:
            failures[name] = f"{type(error).__name__}: {error}"[:2000]
    Path(folder, f"{rank}.json").write_text(json.dumps(failures))


class Plain(nn.Module):
    """No batch norm, and θ = 1: nothing depends on which process a row is in."""

    def __init__(self, format, theta=1.0):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        shape, rank = (6, 8, 8), {"cp": 7, "tucker": (4, 3, 3, 5), "tt": (4, 5, 6)}[format]
        layer = {"cp": td.CPRegression, "tucker": td.TuckerRegression, "tt": td.TTRegression}[format]
        self.head = layer(shape, 10, rank, dropout=theta)

    def forward(self, x):
        return self.head(torch.tanh(self.conv(x)))


def train_plain(folder, format, process, steps, theta=1.0):
    """The gradients of the first step and the weights after some more."""
    torch.manual_seed(0)
    data = load_data("digits", augment=False)
    settings = {"run__precision": "float64", "optimizer__name": "sgd", "optimizer__lr": 0.05, "optimizer__clip": 0.5}
    trainer = make_trainer(folder, data, Plain(format, theta).double(), process, **settings)
    gradients = None
    for _, start in zip(range(steps), trainer.feed.starts(0, 0), strict=False):
        trainer.step(*start)
        gradients = gradients or [parameter.grad.clone() for parameter in trainer.plain.parameters()]
    return gradients, [parameter.detach().clone() for parameter in trainer.plain.parameters()]


def check_gradients(folder, format):
    with joined("cpu") as process:
        assert process.world == WORLD
        found = train_plain(folder / "unused", format, process, 4)
    expected = train_plain(folder / "unused", format, ALONE, 4)
    for ours, theirs in zip(found, expected, strict=True):
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)
    assert max(float(gradient.abs().max()) for gradient in found[0]) > 1e-3


def check_masks(folder):
    data = load_data("digits", augment=False)
    with joined("cpu") as process:
        trainer = make_trainer(folder / "unused", data, process=process, net__theta=0.5)
        x = data.prepare(data.train.inputs[:8])
        masks = process.gather(trainer.plain.fc.draw_masks()[0].tolist())
        outputs = process.gather(trainer.plain(x).tolist())
        generators = process.gather(torch.get_rng_state().tolist())
    assert masks[0] != masks[1]
    assert outputs[0] != outputs[1]
    assert generators[0] != generators[1]


def check_parts(folder):
    """Who writes, what is shared, and what every process gets to know."""
    with joined("cpu") as process:
        rank = int(os.environ["RANK"])
        assert (process.rank, process.world, process.is_first) == (rank, WORLD, rank == 0)
        assert process.gather(10 + rank) == [10, 11]
        assert process.share({"from": rank}) == {"from": 0}
        process.wait()
    assert not dist.is_initialized()


def train_run(folder, name, settings):
    run(folder / name, **settings)


class StopRun(Exception):  # noqa: N818 - not an error
    pass


def stop_at(folder, name, step, settings):
    """Both processes end after so many steps, as if torchrun had killed them."""
    call = Step.__call__

    def counted(self, *start):
        call(self, *start)
        counted.steps += 1
        if counted.steps == step:
            raise StopRun

    counted.steps = 0
    Step.__call__ = counted
    try:
        run(folder / name, **settings)
    except StopRun:
        return
    finally:
        Step.__call__ = call
    raise AssertionError("it was not stopped")


def ask_one(folder, name, settings):
    """Only one of the processes gets the signal, in the middle of a step: none may wait for the other for ever."""
    call = Step.__call__

    def counted(self, *start):
        counted.steps += 1
        if counted.steps == 5 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        call(self, *start)

    counted.steps = 0
    Step.__call__ = counted
    try:
        run(folder / name, **settings)
    except KeyboardInterrupt:
        return
    finally:
        Step.__call__ = call
    raise AssertionError("it was not interrupted")


CASES = {
    "parts": (check_parts,),
    **{f"gradients of {format}": (check_gradients, format) for format in ("cp", "tucker", "tt")},
    "masks": (check_masks,),
    **{f"seed {seed}": (train_run, f"seed{seed}", AGREE | {"run__seed": seed}) for seed in SEEDS},
    "average": (train_run, "average", {"run__epochs": 1, "run__ema": 0.9}),
    "ddp cut off": (stop_at, "ddp", 12, CUT),
    "ddp goes on": (train_run, "ddp", CUT),
    "ddp whole": (train_run, "ddp-whole", CUT),
    "ddp for one": (stop_at, "ddp-for-one", 12, CUT),
    "fsdp whole": (train_run, "fsdp-whole", FSDP),
    "fsdp cut off": (stop_at, "fsdp", 12, FSDP),
    "fsdp goes on": (train_run, "fsdp", FSDP),
    "fsdp for one": (stop_at, "fsdp-for-one", 12, FSDP),
    "ddp for fsdp": (stop_at, "ddp-for-fsdp", 12, CUT),
    "fsdp from ddp": (train_run, "ddp-for-fsdp", FSDP),
    "fsdp with a scale": (
        train_run,
        "fsdp-phantom",
        FSDP
        | {"data__name": "phantom", "data__options": {"n": 24, "size": [8, 8, 8]}, "run__batch": 4, "run__epochs": 1},
    ),
    "ddp of a network of others": (train_run, "ddp-others", OTHERS),
    "fsdp of a network of others": (train_run, "fsdp-others", OTHERS | {"run__sharding": "fsdp"}),
    "fsdp in float64": (
        train_run,
        "fsdp-float64",
        FSDP | {"run__epochs": 1, "run__batch": 512, "run__precision": "float64"},
    ),
    "a signal to one": (ask_one, "asked", CUT | {"run__checkpoint_every": 3}),
}


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory):
    """Import here, once, what every process would import."""
    for module in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"):
        importlib.import_module(module)
    run(tmp_path_factory.mktemp("warm"), **SMALLEST)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Everything that two processes did, and what failed in it."""
    folder = tmp_path_factory.mktemp("two")
    return folder, run_on_two(folder, CASES)


@pytest.mark.parametrize("name", CASES)
def test_on_two_processes(two, name):
    _, failures = two
    assert "hung" not in failures
    assert [found[name] for found in failures if name in found] == []


def test_two_processes_learn_as_one(two, tmp_path):
    """Within the spread of three seeds."""
    folder, _ = two
    of_two = [json.loads((folder / f"seed{seed}" / "result.json").read_text()) for seed in SEEDS]
    of_one = [run(tmp_path / str(seed), **AGREE, run__seed=seed) for seed in SEEDS]
    assert {result["processes"] for result in of_two} == {2}
    accuracies = [[result["test"]["accuracy"] for result in results] for results in (of_one, of_two)]
    means = [sum(each) / len(SEEDS) for each in accuracies]
    spread = max(max(each) - min(each) for each in accuracies)
    assert min(accuracies[0]) > 75
    assert abs(means[0] - means[1]) <= max(spread, 1.0)
    losses = [read_metrics(path)[-1]["loss"] for path in (tmp_path / "0", folder / "seed0")]
    assert losses[1] == pytest.approx(losses[0], rel=0.25)


@pytest.mark.parametrize("name", ["ddp-others", "fsdp-others"])
def test_a_network_of_others_is_trained_by_two_and_loads(two, name):
    trust(__name__)
    network = td.load(two[0] / name / "model.safetensors").eval()
    assert network.settings["place"]["left_out"] == ["3"]
    assert network(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_a_run_of_two_goes_on_where_it_was_cut_off(two):
    folder, _ = two
    ours, theirs = read_weights(folder / "ddp"), read_weights(folder / "ddp-whole")
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert read_metrics(folder / "ddp") == read_metrics(folder / "ddp-whole")


def test_shards_go_on_where_they_were_cut_off(two):
    folder, _ = two
    assert_equal_runs(folder / "fsdp", folder / "fsdp-whole")


def test_shards_are_written_as_a_whole_network(two):
    folder, _ = two
    sharded, plain = load_file(folder / "fsdp-whole" / "model.safetensors"), read_weights(folder / "ddp-whole")
    assert {name: tensor.shape for name, tensor in sharded.items()} == {n: t.shape for n, t in plain.items()}
    data, network = load_data("digits"), td.load(folder / "fsdp-whole" / "model.safetensors").eval()
    with torch.no_grad():
        right = (network(data.prepare(data.test.inputs)).argmax(1) == data.test.targets).double().mean()
    result = json.loads((folder / "fsdp-whole" / "result.json").read_text())
    assert 100 * float(right) == pytest.approx(result["test"]["accuracy"])
    accuracy = json.loads((folder / "ddp-whole" / "result.json").read_text())["test"]["accuracy"]
    assert result["test"]["accuracy"] == pytest.approx(accuracy, abs=15)


def test_shards_in_float64_are_written_in_float64(two):
    folder, _ = two
    assert read_weights(folder / "fsdp-float64")["conv1.weight"].dtype == torch.float64


@pytest.mark.parametrize("name", ["ddp-for-one", "fsdp-for-one"])
def test_one_process_goes_on_with_the_run_of_two(two, name):
    folder, _ = two
    assert read_latest(folder / name)["step"] == 10
    result = run(folder / name, **CUT)
    assert result["processes"] == 1
    assert [line["epoch"] for line in read_metrics(folder / name)] == [1, 2]
    expected = read_metrics(folder / name.replace("for-one", "whole"))
    for ours, theirs in zip(read_metrics(folder / name), expected, strict=True):
        # The masks are others, but the sums of the steps before are not lost.
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.15)
        assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=8)


def test_a_signal_to_one_of_two_processes_stops_both(two):
    """Both ended, before the run was done, and what they had done is kept."""
    folder, failures = two
    assert "hung" not in failures
    assert 3 <= read_latest(folder / "asked")["step"] < 16
    assert not (folder / "asked" / "result.json").exists()


# torchrun.

DRIVER = """
import os, sys
from tensor_dropout_lab.training.step import Step
from tensor_dropout_lab import cli

call, step, restart = Step.__call__, int(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]

def counted(self, *start):
    counted.steps += 1
    if counted.steps == step and restart == "0" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    call(self, *start)

counted.steps = 0
Step.__call__ = counted
cli.app(["train", *sys.argv[2:]])
"""


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_torchrun_restarts_a_killed_worker_and_the_run_goes_on(two, tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    settings = ["--epochs", 2, "--batch", 128, "--device", "cpu", "--set", "run.checkpoint_every=5"]
    folder = tmp_path / "run"
    killed_at = random.Random(3).randint(7, 14)
    process = torchrun("--max-restarts", 1, driver, killed_at, *settings, "--out", folder)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "going on from step" in errors
    assert output.count("test: ") == 1  # one process shows the result
    ours, theirs = read_weights(folder), read_weights(two[0] / "ddp-whole")
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert [line["epoch"] for line in read_metrics(folder)] == [1, 2]


def join_late(folder, restart):
    """Meet; after a restart, one comes late."""
    time.sleep(0.7 * min(restart, int(os.environ["RANK"])))
    with joined("cpu") as process:
        assert process.gather(process.rank) == [0, 1]


def test_restarted_processes_do_not_meet_the_dead_ones(tmp_path):
    """torchrun keeps its store over restarts: what the dead workers wrote there must not be read."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for restart in range(2):
        folder = tmp_path / str(restart)
        folder.mkdir()
        assert run_on_two(folder, {"join": (join_late, restart)}, 20, restart, store) == [{}, {}]
