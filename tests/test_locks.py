"""Locks between processes: one holder at a time, and none that outlives its process."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress

import pytest

from tensor_dropout_lab.locks import FolderInUseError, is_in_use, lock_file, lock_folder

CONTEXT = multiprocessing.get_context("fork")


def hold(lock, path, entered, leave):
    with suppress(FolderInUseError), lock(path):
        entered.set()
        assert leave.wait(60)


@pytest.mark.parametrize("lock", [lock_folder, lock_file])
def test_a_process_that_waited_and_a_new_one_are_not_both_inside(tmp_path, lock):
    """They were when the first holder deleted the lock file: the second held the deleted one, the third a new one."""
    path = tmp_path / "shared"
    entered, leave = [CONTEXT.Event() for _ in range(2)], CONTEXT.Event()
    waiting, late = (CONTEXT.Process(target=hold, args=(lock, path, event, leave), daemon=True) for event in entered)
    with lock(path):
        waiting.start()
        assert not entered[0].wait(0.3)
    assert entered[0].wait(30)
    late.start()
    assert not entered[1].wait(0.5)
    leave.set()
    for process in (waiting, late):
        process.join(30)
        assert process.exitcode == 0


def enter_often(folder, entries, overlaps):
    while entries.value < 1000:
        with suppress(FolderInUseError), lock_folder(folder):
            entries.value += 1
            try:
                (folder / "inside").touch(exist_ok=False)
            except FileExistsError:
                overlaps.value += 1
            else:
                (folder / "inside").unlink()


def test_of_processes_that_come_and_go_never_two_are_inside(tmp_path):
    entries, overlaps = (CONTEXT.Value("i", 0) for _ in range(2))
    processes = [CONTEXT.Process(target=enter_often, args=(tmp_path, entries, overlaps), daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert overlaps.value == 0


def test_a_holder_that_is_killed_releases_the_lock(tmp_path):
    entered = CONTEXT.Event()
    process = CONTEXT.Process(target=hold, args=(lock_folder, tmp_path, entered, CONTEXT.Event()), daemon=True)
    process.start()
    assert entered.wait(30)
    assert is_in_use(tmp_path)
    with pytest.raises(FolderInUseError, match=r"^another process is training in"), lock_folder(tmp_path):
        pass
    with pytest.raises(FolderInUseError, match=r"^another process is packing in"), lock_folder(tmp_path, "packing"):
        pass
    process.kill()
    process.join(30)
    assert not is_in_use(tmp_path)
    with lock_folder(tmp_path):
        assert is_in_use(tmp_path)


def test_a_folder_is_unlocked_after_a_failure(tmp_path):
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path):
        raise ZeroDivisionError
    assert not is_in_use(tmp_path)


def test_asking_makes_no_file(tmp_path):
    assert not is_in_use(tmp_path / "nowhere")
    assert not is_in_use(tmp_path)
    assert not list(tmp_path.iterdir())
