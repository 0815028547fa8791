"""Checkpoints: killed at any moment a run ends as if nothing had happened; what is damaged is named and not used."""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import time
import warnings

import pytest
import torch

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.run_records import write_json
from tensor_dropout_lab.training import checkpoint, loop, runs
from tensor_dropout_lab.training.checkpoint import list_checkpoints, read_checkpoint, read_latest, write_checkpoint
from tensor_dropout_lab.training.step import Step
from training_runs import (
    STEPS_PER_EPOCH,
    assert_equal_runs,
    configure,
    die,
    fork,
    read_metrics,
    read_weights,
    run,
    run_forked,
    wait,
)

RUN = {"run__epochs": 3, "run__checkpoint_every": 3, "run__ema": 0.9}
STEPS = 3 * STEPS_PER_EPOCH


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, **RUN)
    return folder


def steps_of(folder):
    return [int(path.name.split("-")[1]) for path in list_checkpoints(folder)]


def hidden_files(folder):
    """What a killed process left half-written; the lock stays, since others may wait for it."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]


def state_of(value):
    return {"model": {"weight": torch.full((1000,), float(value))}}


# One file.


def test_a_checkpoint_comes_back_as_it_was(tmp_path):
    state = {
        "model": {"a": torch.randn(3, dtype=torch.float64), "n": torch.tensor(7)},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "generators": [[torch.get_rng_state()]],
        "average": None,
        "seconds": 1.5,
    }
    path = write_checkpoint(tmp_path, 12, state)
    found = read_checkpoint(path)
    assert found["step"] == 12
    assert torch.equal(found["model"]["a"], state["model"]["a"])
    assert torch.equal(found["generators"][0][0], state["generators"][0][0])
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert found["average"] is None
    content = path.read_bytes()
    assert path.name == f"checkpoint-000000012-{hashlib.sha256(content).hexdigest()[:16]}.pt"


def test_the_last_two_are_kept(tmp_path):
    for step in (5, 10, 200, 1000):
        write_checkpoint(tmp_path, step, state_of(step))
    assert steps_of(tmp_path) == [1000, 200]
    assert read_latest(tmp_path)["step"] == 1000
    assert hidden_files(tmp_path) == []


def test_an_empty_folder_has_none(tmp_path):
    assert read_latest(tmp_path) is None


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "one bit":
        content[len(content) // 3] ^= 4
        path.write_bytes(content)
    else:
        path.write_bytes(content + b"\0")


@pytest.mark.parametrize("how", ["truncated", "empty", "one bit", "longer"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, how):
    write_checkpoint(tmp_path, 1, state_of(1))
    last = write_checkpoint(tmp_path, 2, state_of(2))
    damage(last, how)
    with pytest.raises(TensorDropoutError, match=last.name):
        read_checkpoint(last)
    with pytest.warns(UserWarning, match=last.name):
        assert read_latest(tmp_path)["step"] == 1


class Bomb:
    """Unpickled without restriction, it writes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def write_named(folder, step, content):
    """Any bytes under a name that fits them."""
    path = folder / f"checkpoint-{step:09d}-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("how", ["torch.save", "old torch.save", "pickle"])
def test_a_checkpoint_cannot_execute_code(tmp_path, how):
    exploded = tmp_path / "exploded"
    state = {"format": checkpoint.FORMAT_VERSION, "step": 9, "model": Bomb(exploded)}
    buffer = io.BytesIO()
    if how == "pickle":
        pickle.dump(state, buffer)
    else:
        torch.save(state, buffer, _use_new_zipfile_serialization=how == "torch.save")
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False) if how != "pickle" else pickle.loads(
        buffer.getvalue()
    )
    assert exploded.is_file()  # the bomb is a real one
    exploded.unlink()
    write_checkpoint(tmp_path, 1, state_of(1))
    bomb = write_named(tmp_path, 9, buffer.getvalue())
    with pytest.raises(TensorDropoutError, match=bomb.name):
        read_checkpoint(bomb)
    with pytest.warns(UserWarning, match=bomb.name):
        assert read_latest(tmp_path)["step"] == 1
    assert not exploded.exists()


@pytest.mark.parametrize("content", [{"format": 99, "step": 3}, {"step": 3}, [1, 2], 5])
def test_a_file_of_another_format_is_refused(tmp_path, content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path = write_named(tmp_path, 3, buffer.getvalue())
    with pytest.raises(TensorDropoutError, match=path.name):
        read_checkpoint(path)


# A full disk.


def open_full_disk(path, mode):
    return builtins.open("/dev/full", mode)


def test_a_full_disk_keeps_the_earlier_checkpoints(tmp_path, monkeypatch):
    """The kernel's own error: what is written goes to /dev/full."""
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    write_checkpoint(tmp_path, 1, state_of(1))
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(checkpoint, "open", open_full_disk, raising=False)
    with pytest.raises(TensorDropoutError, match="No space left on device") as failure:
        write_checkpoint(tmp_path, 2, state_of(2))
    assert "\n" not in str(failure.value)
    assert str(tmp_path) in str(failure.value)
    assert failure.value.__cause__.errno == errno.ENOSPC
    assert sorted(tmp_path.iterdir()) == before
    assert read_latest(tmp_path)["step"] == 1


def limit_files(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def expect_one_sentence(folder, *texts, **settings):
    with pytest.raises((TensorDropoutError, OSError)) as failure:
        run(folder, **settings)
    assert "\n" not in str(failure.value)
    assert all(text in str(failure.value) for text in texts), str(failure.value)


def test_a_run_on_a_disk_that_fills_goes_on_once_there_is_room(tmp_path, whole):
    """Files of this process cannot grow beyond a limit: the kernel fails the write in its middle."""
    step = Step.__call__

    def fill_at_20():
        def counted(self, *start):
            counted.steps += 1
            if counted.steps == 20:
                limit_files(100_000)
            return step(self, *start)

        counted.steps = 0
        Step.__call__ = counted
        expect_one_sentence(tmp_path, "could not be written", "make room", **RUN)
        assert steps_of(tmp_path) == [18, 16]
        assert hidden_files(tmp_path) == []

    assert run_forked(fill_at_20) == 0
    run(tmp_path, **RUN)
    assert_equal_runs(tmp_path, whole)


def test_a_disk_that_fills_at_the_very_end(tmp_path, whole):
    """The model is the last large file: its failure is one sentence, too, and the run can be finished later."""

    def fill_at_the_end():
        write = runs.RunFolder.write_predictions

        def limited(self, *arguments):
            path = write(self, *arguments)
            limit_files(100_000)
            return path

        runs.RunFolder.write_predictions = limited
        expect_one_sentence(tmp_path, **RUN)
        assert hidden_files(tmp_path) == []

    assert run_forked(fill_at_the_end) == 0
    assert not (tmp_path / "result.json").exists()
    run(tmp_path, **RUN)
    assert_equal_runs(tmp_path, whole)


# kill -9.


class DyingFile:
    """A file that writes some of its bytes, and then its process is killed."""

    def __init__(self, file, share):
        self.file, self.share = file, share

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def write(self, content):
        self.file.write(content[: int(self.share * len(content))])
        self.file.flush()
        die()


def die_in_write(nth, share):
    """Replace ``open`` in the module of checkpoints: the nth file that it writes is cut off."""

    def opened(path, mode):
        opened.count += 1
        file = builtins.open(path, mode)  # noqa: SIM115 - it is handed on
        return DyingFile(file, share) if opened.count == nth else file

    opened.count = 0
    checkpoint.open = opened


def die_in_call(owner, name, nth, after=False):
    """Kill this process in the nth call of a function, before it does anything or once it has."""
    original = getattr(owner, name)

    def call(*arguments, **options):
        call.count += 1
        if call.count == nth and not after:
            die()
        result = original(*arguments, **options)
        if call.count == nth:
            die()
        return result

    call.count = 0
    setattr(owner, name, call)


def run_and_die(folder, place, nth, share):
    calls = {
        "before fsync": (os, "fsync", nth),
        "after fsync": (os, "fsync", nth, True),
        "before cleaning up": (checkpoint, "list_checkpoints", nth),
        "in a step": (Step, "update", nth),
        "after a step": (Step, "update", nth, True),
        "before metrics": (runs.RunFolder, "note", 1),
        "after metrics": (runs.RunFolder, "note", 1, True),
        "before the model": (loop, "save", 1),
        "before the result": (runs.RunFolder, "finish", 1),
    }
    if place == "in the bytes":
        die_in_write(nth, share)
    else:
        die_in_call(*calls[place])
    run(folder, **RUN)


WRITES = ["in the bytes", "before fsync", "after fsync", "before cleaning up"]


def plan_kills(seed):
    """Moments of every kind in a random order, each a few steps or writes after a start; the end comes last."""
    dice = random.Random(seed)
    places = [*WRITES, "in the bytes", "in the bytes", "in a step", "after a step", "in a step", "after metrics"]
    places.append("before metrics")
    dice.shuffle(places)
    nth = {place: (1, 8) if "step" in place else (1, 3) for place in places}
    kills = [(place, dice.randint(*nth[place]), dice.random()) for place in places]
    return [*kills, ("before the model", 1, 0), ("before the result", 1, 0)]


def test_killed_at_many_moments_a_run_ends_bit_identical(tmp_path, whole):
    inside, started_at = 0, []
    for place, nth, share in plan_kills(seed=2024):
        assert run_forked(run_and_die, tmp_path, place, nth, share) == -signal.SIGKILL, f"not killed {place}"
        half_written = [name for name in hidden_files(tmp_path) if name.endswith(".pt")]
        assert bool(half_written) == (place in WRITES[:3]), place
        inside += bool(half_written)
        started_at += steps_of(tmp_path)[:1]
    assert inside >= 3
    assert len(set(started_at)) >= 6  # spread over the run
    assert max(started_at) == STEPS
    assert run(tmp_path, **RUN)["steps"] == STEPS
    assert_equal_runs(tmp_path, whole)
    assert hidden_files(tmp_path) == []


def test_killed_by_a_clock_a_run_ends_bit_identical(tmp_path, whole):
    """From outside, at moments that the run does not know: ten seeded delays."""
    dice, killed = random.Random(7), 0
    for _ in range(60):
        child = fork(lambda: run(tmp_path, **RUN))
        time.sleep(dice.uniform(0.02, 0.25))
        try:
            os.kill(child, signal.SIGKILL)
        finally:
            code = wait(child)
        killed += code == -signal.SIGKILL
        if code == 0 or killed == 10:
            break
    run(tmp_path, **RUN)
    assert_equal_runs(tmp_path, whole)
    assert killed >= 5


@pytest.mark.parametrize("place", ["after metrics", "in the bytes"])
def test_killed_before_the_first_checkpoint_it_begins_anew(tmp_path, place):
    """The metrics of the first epoch are there already; they must not be there twice in the end."""
    settings = {"run__epochs": 1}

    def start():
        if place == "in the bytes":
            die_in_write(1, 0.5)
        else:
            die_in_call(runs.RunFolder, "note", 1, after=True)
        run(tmp_path, **settings)

    assert run_forked(start) == -signal.SIGKILL
    assert steps_of(tmp_path) == []
    run(tmp_path, **settings)
    assert [line["epoch"] for line in read_metrics(tmp_path)] == [1]


# Damage between two starts.


def interrupt(folder, steps):
    """Run so many steps, and be killed."""
    assert run_forked(lambda: (die_in_call(Step, "update", steps + 1), run(folder, **RUN))) == -signal.SIGKILL


@pytest.mark.parametrize("how", ["truncated", "one bit"])
def test_the_one_before_a_damaged_checkpoint_is_used(tmp_path, whole, how):
    interrupt(tmp_path, 26)
    last = list_checkpoints(tmp_path)[0]
    assert steps_of(tmp_path) == [24, 21]
    damage(last, how)
    with pytest.warns(UserWarning, match=last.name):
        run(tmp_path, **RUN)
    assert_equal_runs(tmp_path, whole)


def test_after_damage_two_good_checkpoints_are_kept_again(tmp_path, whole):
    """A damaged file must not take the place of a good one: another kill and another damage may follow."""
    interrupt(tmp_path, 26)
    damage(list_checkpoints(tmp_path)[0], "one bit")
    step = Step.__call__

    def killed_at_29(self, *start):
        killed_at_29.steps += 1
        if killed_at_29.steps == 29 - 21:
            die()
        return step(self, *start)

    def again():
        killed_at_29.steps = 0
        Step.__call__ = killed_at_29
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(tmp_path, **RUN)

    assert run_forked(again) == -signal.SIGKILL
    good = [path for path in list_checkpoints(tmp_path) if is_whole(path)]
    assert len(good) == 2
    damage(good[0], "truncated")
    with pytest.warns(UserWarning, match=good[0].name):
        run(tmp_path, **RUN)
    assert_equal_runs(tmp_path, whole)


def is_whole(path):
    try:
        return bool(read_checkpoint(path))
    except TensorDropoutError:
        return False


def test_with_all_checkpoints_damaged_a_run_begins_anew_and_can_be_killed_again(tmp_path, whole):
    interrupt(tmp_path, 26)
    for path in list_checkpoints(tmp_path):
        damage(path, "truncated")

    def again():
        die_in_call(Step, "update", 12)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(tmp_path, **RUN)

    assert run_forked(again) == -signal.SIGKILL
    assert [step for step in steps_of(tmp_path) if step <= 11] == [9, 6]  # the new ones were not thrown away
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(tmp_path, **RUN)
    assert_equal_runs(tmp_path, whole)


def test_the_warning_does_not_promise_a_checkpoint_that_is_not_there(tmp_path):
    path = write_checkpoint(tmp_path, 1, state_of(1))
    damage(path, "truncated")
    with pytest.warns(UserWarning, match=path.name) as caught:
        assert read_latest(tmp_path) is None
    assert "the one before it is used" not in str(caught[-1].message)


# Seeds, and what may change when a run goes on.


def test_a_seed_is_a_run(tmp_path, whole):
    run(tmp_path / "same", **RUN)
    assert_equal_runs(tmp_path / "same", whole)
    run(tmp_path / "other", **RUN, run__seed=1)
    ours, theirs = read_weights(tmp_path / "other"), read_weights(whole)
    assert not torch.equal(ours["conv1.weight"], theirs["conv1.weight"])


def test_how_often_it_is_saved_does_not_change_a_run(tmp_path, whole):
    run(tmp_path, **RUN | {"run__checkpoint_every": None, "run__evaluate_every": 3})
    ours, theirs = read_weights(tmp_path), read_weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def saved(monkeypatch):
    """The steps that are saved."""
    steps = []
    write = checkpoint.write_checkpoint

    def noted(folder, step, state):
        steps.append(step)
        return write(folder, step, state)

    monkeypatch.setattr(loop, "write_checkpoint", noted)
    return steps


def test_a_checkpoint_is_due_by_the_clock(tmp_path, saved):
    """checkpoint_seconds: with a tiny one, every step is saved."""
    run(tmp_path, run__epochs=1, run__checkpoint_seconds=1e-6)
    assert saved == list(range(1, STEPS_PER_EPOCH + 1))


def test_short_epochs_need_not_all_be_saved_and_the_last_always_is(tmp_path, saved, whole):
    rare = RUN | {"run__checkpoint_every": None, "run__checkpoint_epochs": 2}
    run(tmp_path, **rare)
    assert saved == [2 * STEPS_PER_EPOCH, 3 * STEPS_PER_EPOCH]
    assert_equal_runs(tmp_path, whole)


def test_a_run_that_is_asked_to_stop_saves_an_epoch_that_would_not_be(tmp_path, saved, whole, monkeypatch):
    finish = loop.Trainer.finish_epoch

    def stop_after(trainer, epoch):
        finish(trainer, epoch)
        if epoch == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    rare = RUN | {"run__checkpoint_every": None, "run__checkpoint_epochs": 100}
    monkeypatch.setattr(loop.Trainer, "finish_epoch", stop_after)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **rare)
    assert saved == [STEPS_PER_EPOCH]
    monkeypatch.setattr(loop.Trainer, "finish_epoch", finish)
    run(tmp_path, **rare)
    assert_equal_runs(tmp_path, whole)


def test_a_finished_run_is_not_repeated(whole, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    monkeypatch.setattr(Step, "update", die)
    result = run(folder, **RUN | {"run__checkpoint_every": 7})  # which may change
    assert result["steps"] == STEPS
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()} == before


def test_a_run_does_not_go_on_as_the_head_of_another_default(whole, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    record = json.loads((folder / "run.json").read_text("utf-8"))
    record["head"]["min_rank"] += 1
    write_json(folder / "run.json", record)
    with pytest.raises(TensorDropoutError, match=r"head was built with min_rank=1, by default it is now 0; choose ano"):
        run(folder, **RUN)
    del record["head"]  # an older version wrote none
    write_json(folder / "run.json", record)
    assert run(folder, **RUN)["steps"] == STEPS


def test_other_settings_in_the_same_folder_are_refused(whole):
    for change in (
        {"run__seed": 5},
        {"net__theta": 0.5},
        {"optimizer__lr": 1.0},
        {"data__options": {"augment": False}},
    ):
        with pytest.raises(TensorDropoutError, match=r"holds a run with .*choose another folder with --out"):
            run(whole, **RUN | change)
    assert configure(**RUN) != configure(**RUN, run__seed=5)
