"""The cache of ``FeatureMaps``: killed, shared, damaged, outdated, read while it is written; the maps are the same."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

from tensor_dropout import TensorDropoutError
from tensor_dropout.features import store
from tensor_dropout.features.store import LINE, Store
from tensor_dropout.sklearn import FeatureMaps

FORK = multiprocessing.get_context("fork")
N = 40


class Slow(Dataset):
    """Different inputs; each takes a while."""

    def __init__(self, n=N, seconds=0.0):
        self.n, self.seconds = n, seconds

    def __len__(self):
        return self.n

    def __getitem__(self, number):
        time.sleep(self.seconds)
        return torch.full((3, 16, 16), number + 1.0)


class Scaled(nn.Module):
    """Its factor is neither a weight nor in its ``repr``."""

    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.factor = nn.Conv2d(3, 4, 4, 4), factor

    def forward(self, x):
        return self.conv(self.factor * x)


def make_maps(folder, network=None, **settings):
    settings = {"batch": 4, "verbose": False, **settings}
    return FeatureMaps(Scaled() if network is None else network, "conv", cache=folder, **settings)


def expected(n=N):
    return make_maps(None).transform(Slow(n))


def compute(folder, seconds, commit_every=0.0):
    """What a process does that is killed, or watched."""
    store.COMMIT_EVERY = commit_every
    warnings.simplefilter("ignore")
    make_maps(folder).transform(Slow(seconds=seconds))


def start(*arguments):
    process = FORK.Process(target=compute, args=arguments, daemon=True)
    process.start()
    return process


def count_lines(folder):
    """How many maps are in the cache for good."""
    return sum(path.stat().st_size // LINE for path in folder.glob("*/index.txt"))


def wait_for(condition, limit=30.0):
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# Killed.


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_killed_at_any_moment_a_second_start_goes_on(tmp_path):
    n_kept = 0
    for moment in np.random.default_rng(0).uniform(0, 0.04, 5):
        process = start(tmp_path, 0.004)
        wait_for(lambda n=n_kept: count_lines(tmp_path) > n or not process.is_alive())  # noqa: B023
        time.sleep(moment)  # while a batch is read, computed, written, or added to the index
        kill(process)
        assert count_lines(tmp_path) > n_kept  # nothing is lost, and each start comes further
        n_kept = count_lines(tmp_path)
        if n_kept == N:
            break
        maps = make_maps(tmp_path)
        np.testing.assert_array_equal(maps.transform(Slow(n_kept)), expected(n_kept))
        assert maps.computed_ == 0
    maps = make_maps(tmp_path)
    np.testing.assert_array_equal(maps.transform(Slow()), expected())
    assert maps.computed_ == N - n_kept


def test_killed_before_the_first_commit_it_starts_anew(tmp_path):
    process = start(tmp_path, 0.004, 1000.0)
    time.sleep(0.1)
    wait_for(lambda: any(tmp_path.glob("*/rows.bin")))
    kill(process)
    assert count_lines(tmp_path) == 0
    maps = make_maps(tmp_path)
    np.testing.assert_array_equal(maps.transform(Slow()), expected())
    assert maps.computed_ == N


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_computed_before_an_error_is_kept(tmp_path, error):
    class Breaking(Slow):
        def __getitem__(self, number):
            if number == 18:
                raise error
            return super().__getitem__(number)

    with pytest.raises(error):
        make_maps(tmp_path).transform(Breaking())
    maps = make_maps(tmp_path)
    np.testing.assert_array_equal(maps.transform(Slow()), expected())
    assert maps.computed_ == N - 16  # four batches of four were done


# Shared.


def test_two_processes_at_once_compute_each_sample_once(tmp_path):
    processes = [start(tmp_path, 0.002) for _ in range(3)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert count_lines(tmp_path) == N
    maps = make_maps(tmp_path)
    np.testing.assert_array_equal(maps.transform(Slow()), expected())
    assert maps.computed_ == 0


def test_what_is_there_is_read_while_another_process_writes(tmp_path):
    process = start(tmp_path, 0.05)
    wait_for(lambda: count_lines(tmp_path) >= 8)
    maps = make_maps(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it does not wait
        np.testing.assert_array_equal(maps.transform(Slow(8)), expected(8))
    assert process.is_alive()
    assert maps.computed_ == 0
    process.kill()
    process.join()


def test_who_needs_more_waits_for_the_writer_and_says_so(tmp_path):
    process = start(tmp_path, 0.01)
    wait_for(lambda: count_lines(tmp_path) >= 4)
    maps = make_maps(tmp_path)
    with pytest.warns(UserWarning, match="waiting for another process that writes to the cache"):
        np.testing.assert_array_equal(maps.transform(Slow()), expected())
    assert maps.computed_ == 0
    process.join(30)


# Damaged.


def cut(path, n_bytes):
    os.truncate(path, n_bytes if n_bytes >= 0 else path.stat().st_size + n_bytes)


def overwrite(path, offset, words):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(words)


ROW = 4 * 4 * 4 * 4
# What happens to the folder, and how many maps are still good.
DAMAGE = {
    "half a row at the end": (lambda folder: cut(folder / "rows.bin", -ROW // 2), N - 1),
    "half a line at the end": (lambda folder: cut(folder / "index.txt", -LINE // 2), N - 1),
    "rows without lines": (lambda folder: cut(folder / "index.txt", 10 * LINE), 10),
    "lines without rows": (lambda folder: cut(folder / "rows.bin", 10 * ROW), 10),
    "a line that is none": (lambda folder: overwrite(folder / "index.txt", 7 * LINE, b"\0" * LINE), 7),
    "a torn line in the middle": (lambda folder: overwrite(folder / "index.txt", 7 * LINE + 20, b"\n"), 7),
    "no rows": (lambda folder: (folder / "rows.bin").unlink(), 0),
    "no lines": (lambda folder: (folder / "index.txt").unlink(), 0),
    "nothing in them": (lambda folder: [cut(folder / name, 0) for name in ("rows.bin", "index.txt")], 0),
    "about.json is not needed": (lambda folder: (folder / "about.json").write_text("{"), N),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_computed_anew(case, tmp_path):
    damage, n_good = DAMAGE[case]
    make_maps(tmp_path).transform(Slow())
    (folder,) = tmp_path.iterdir()
    assert (folder / "rows.bin").stat().st_size == N * ROW
    damage(folder)
    maps = make_maps(tmp_path)
    np.testing.assert_array_equal(maps.transform(Slow()), expected())
    assert maps.computed_ == N - n_good
    assert make_maps(tmp_path).fit_transform(Slow()).shape == (N, 4, 4, 4)
    assert count_lines(tmp_path) == N


# Outdated.


def draw(path, seed):
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)


def test_files_are_known_by_their_content(tmp_path):
    paths = [tmp_path / f"{number}.bmp" for number in range(4)]
    for number, path in enumerate(paths):
        draw(path, number)
    settings = {"size": 16}
    make_maps(tmp_path / "cache", **settings).transform(paths)
    before = os.stat(paths[2])
    draw(paths[2], 99)
    os.utime(paths[2], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(paths[2]).st_size == before.st_size
    maps = make_maps(tmp_path / "cache", **settings)
    np.testing.assert_array_equal(maps.transform(paths), make_maps(None, **settings).transform(paths))
    assert maps.computed_ == 1

    renamed = [path.rename(path.with_name(f"other-{path.name}")) for path in paths]
    twice = [renamed[1], *renamed[::-1], renamed[1]]
    np.testing.assert_array_equal(maps.transform(twice), make_maps(None, **settings).transform(twice))
    assert maps.computed_ == 0
    os.utime(renamed[0])
    maps.transform(renamed)
    assert maps.computed_ == 0


def test_another_network_or_setting_has_maps_of_its_own(tmp_path):
    trained = Scaled()
    with torch.no_grad():
        trained.conv.bias += 1e-3
    changes = [
        {},
        {"network": trained},
        {"network": Scaled(1.1)},
        {"network": nn.Sequential(Scaled()), "layer": "0.conv"},
        {"pool": 2},
        {"dtype": "float16"},
        {"precision": "bfloat16"},
    ]
    for number, change in enumerate(changes, 1):
        network, layer = change.pop("network", None), change.pop("layer", "conv")
        with_cache, without = (
            make_maps(folder, network, **change).set_params(layer=layer) for folder in (tmp_path, None)
        )
        np.testing.assert_array_equal(with_cache.transform(Slow()), without.transform(Slow()))
        assert with_cache.computed_ == N
        assert len(list(tmp_path.iterdir())) == number
        assert with_cache.transform(Slow()).shape[0] == N
        assert with_cache.computed_ == 0


def test_how_files_are_prepared_belongs_to_the_key(tmp_path):
    draw(tmp_path / "a.png", 0)
    for number, settings in enumerate([{"size": 16}, {"size": 16, "mean": None}, {"size": 16, "std": 0.5}], 1):
        maps = make_maps(tmp_path / "cache", **settings)
        maps.transform([tmp_path / "a.png"])
        assert maps.computed_ == 1
        assert len(list((tmp_path / "cache").iterdir())) == number


# Rows.


def make_store(folder, n=10):
    rows = np.arange(6 * n, dtype=np.float32).reshape(n, 2, 3)
    digests = [f"{number:064x}" for number in range(n)]
    kept = Store(folder, (2, 3), "float32", {})
    with kept.writing():
        kept.append(digests, rows)
    return kept, digests, rows


def test_rows_come_in_any_order_as_an_array_or_a_memory_map(tmp_path, monkeypatch):
    kept, digests, rows = make_store(tmp_path / "store")
    order = [3, 9, 9, 0]
    some = kept.read([digests[number] for number in order], 1e9)
    assert not isinstance(some, np.memmap)
    np.testing.assert_array_equal(some, rows[order])
    mapped = kept.read([digests[number] for number in order], limit=1)  # more than may be held in memory
    assert isinstance(mapped, np.memmap)
    np.testing.assert_array_equal(mapped, rows[order])
    monkeypatch.setattr(store, "MAPPED_FROM", 1)
    following = kept.read(digests[2:7], 1e9)
    assert isinstance(following, np.memmap)
    np.testing.assert_array_equal(following, rows[2:7])
    with pytest.raises(ValueError, match="read-only"):
        following[0] = 0
    assert len(list((tmp_path / "store").glob("order-*"))) == 1


def test_an_order_of_lost_rows_is_not_taken_for_another(tmp_path):
    kept, digests, rows = make_store(tmp_path / "store")
    kept.read([digests[3], digests[1]], limit=1)  # leaves a file with these rows in this order
    (tmp_path / "store" / "index.txt").unlink()
    again = Store(tmp_path / "store", (2, 3), "float32", {})
    with again.writing():
        again.append(digests[::-1], rows[::-1])
    np.testing.assert_array_equal(again.read([digests[8], digests[6]], limit=1), rows[[8, 6]])  # the rows 1 and 3 now
    np.testing.assert_array_equal(again.read([digests[6], digests[8]], limit=1), rows[[6, 8]])
    np.testing.assert_array_equal(again.read([digests[3], digests[1]], limit=1), rows[[3, 1]])


def read_status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


def measure_peak(results, folder, n):
    """How much memory maps of 64 KiB each take at most, beyond what was there before."""
    store.MAPPED_FROM = 1
    network = nn.Sequential(nn.Conv2d(3, 1024, 4, 4))
    make_maps(None, network).set_params(layer="0").transform(Slow(4))
    ctypes.CDLL(None).malloc_trim(0)  # memory that the tests before freed would be taken again, and not seen
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = read_status("VmRSS")
    make_maps(folder, network).set_params(layer="0").transform(Slow(n))
    results.put(read_status("VmHWM") - before)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of memory are read as Linux gives them")
def test_memory_is_flat_in_the_number_of_samples_with_a_cache(tmp_path):
    def measure(*arguments):
        results = FORK.Queue()
        process = FORK.Process(target=measure_peak, args=(results, *arguments), daemon=True)
        process.start()
        peak = results.get(timeout=60)
        process.join()
        return peak

    more = 600 * 2**16  # bytes of the maps of 600 samples
    few, many = (measure(tmp_path / str(n), n) for n in (200, 800))
    assert many - few < more / 5
    assert measure(None, 800) - measure(None, 200) > more / 2


def test_a_reader_sees_what_another_has_written_since(tmp_path):
    reader = Store(tmp_path / "store", (2, 3), "float32", {})
    assert reader.rows == {}
    _, digests, rows = make_store(tmp_path / "store")
    reader.refresh()
    np.testing.assert_array_equal(reader.read(digests, 1e9), rows)


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TensorDropoutError, match=r"the cache .* cannot be written to") as caught:
        make_maps(tmp_path / "file").transform(Slow())
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_told_and_leaves_a_sound_cache(tmp_path, monkeypatch):
    make_maps(tmp_path).transform(Slow(8))
    monkeypatch.setattr(os, "fsync", _raise_full)
    with pytest.raises(TensorDropoutError, match=r"cannot be written to: .*No space left"):
        make_maps(tmp_path).transform(Slow())
    monkeypatch.undo()
    maps = make_maps(tmp_path)
    np.testing.assert_array_equal(maps.transform(Slow()), expected())
    assert maps.computed_ == N - 8


def _raise_full(descriptor):
    raise OSError(28, "No space left on device")
