"""Records, live and packed: the same files, bit for bit."""

from __future__ import annotations

import json
import lzma
import multiprocessing
import shutil
import time

import numpy as np
import pytest
import torch

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness.outcomes import Outcomes
from tensor_dropout.robustness.protocol import Budget
from tensor_dropout_lab import record_store
from tensor_dropout_lab.evaluation.runs import RunSettings, evaluate_run
from tensor_dropout_lab.record_store import LiveRun, RecordStore, open_run, read_outcomes
from tensor_dropout_lab.run_records import write_json
from training_runs import run


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A folder of results with a real run, trained for an epoch and attacked."""
    base = tmp_path_factory.mktemp("live")
    run(base / "trial" / "fc-seed0", run__epochs=1)
    settings = RunSettings("adaptive", (Budget.parse("8/255"),), noise=("gaussian",), repeats=2, steps=1, queries=1)
    evaluate_run(base / "trial" / "fc-seed0", settings, images=20, device="cpu")
    write_json(base / "trial" / "stage.json", {"losses": [0.1, 1e-300, -0.0, 2**53 + 1], "environment": {"torch": "2"}})
    (base / "trial" / "table.md").write_text("a\r\nb\u2028c\n", "utf-8", newline="")
    return base


def pack(live, base):
    source, store = RecordStore(live), RecordStore(base)
    store.pack("trial", {name: source.run("trial", name).read_all() for name in ("", *source.list_runs("trial"))})
    return store


def test_a_live_run_comes_back_bit_for_bit(live, tmp_path):
    store = pack(live, tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [".trial.jsonl.xz.lock", "trial.jsonl.xz", "trial.npz.xz"]
    assert store.list_experiments() == RecordStore(live).list_experiments() == ["trial"]
    assert store.list_runs("trial") == RecordStore(live).list_runs("trial") == ["fc-seed0"]
    for name in ("", "fc-seed0"):
        before, after = RecordStore(live).run("trial", name), store.run("trial", name)
        assert (before.packed, after.packed) == (False, True)
        assert before.names() == after.names()
        for file in before.names():
            one, other = before.read(file), after.read(file)
            if isinstance(one, Outcomes):
                assert (one.names(), one.header()) == (other.names(), other.header())
                assert len(one.arrays()) > 30
                for key, values in one.arrays().items():
                    again = other.arrays()[key]
                    assert (values.dtype, values.shape, values.tobytes()) == (again.dtype, again.shape, again.tobytes())
            else:  # text shows the bits of a float, the order of keys and -0.0
                assert json.dumps(one) == json.dumps(other), file
        assert before.read_metrics() == after.read_metrics()
    files = store.run("trial", "fc-seed0").names()
    assert {"run.json", "result.json", "metrics.jsonl", "predictions.csv", "evaluation/outcomes.npz"} <= set(files)
    folder = live / "trial" / "fc-seed0"
    assert store.run("trial", "fc-seed0").read("predictions.csv").encode() == (folder / "predictions.csv").read_bytes()
    environments = [sorted(map(repr, each.list_environments())) for each in (RecordStore(live), store)]
    assert environments[0] == environments[1]


def test_an_environment_is_kept_once(live, tmp_path):
    source = RecordStore(live).run("trial", "fc-seed0").read_all()
    RecordStore(tmp_path).pack("trial", {f"fc-seed{seed}": source for seed in range(5)})
    head, *runs = lzma.decompress((tmp_path / "trial.jsonl.xz").read_bytes()).decode().splitlines()
    environments = [source[name]["environment"] for name in ("run.json", "evaluation/evaluation.json")]
    kept = json.loads(head)["environments"]
    assert sorted(map(json.dumps, kept)) == sorted({json.dumps(environment) for environment in environments})
    assert not any('"torch"' in line for line in runs)


def test_outcomes_are_found_by_the_path_of_a_run_packed_or_not(live, tmp_path):
    pack(live, tmp_path)
    for base in (live, tmp_path):
        found = [read_outcomes(base / "trial" / "fc-seed0" / part).names() for part in ("", "evaluation")]
        assert found[0] == found[1] == read_outcomes(live / "trial" / "fc-seed0").names()
        with pytest.raises(TensorDropoutError, match=r"holds no evaluation.*tensor-dropout evaluate"):
            read_outcomes(base / "trial" / "no-such-run")
    with pytest.raises(TensorDropoutError, match="is packed; nothing is added"):
        read_outcomes(tmp_path / "trial" / "fc-seed0").add("noise", {}, {}, 0.0)
    assert isinstance(open_run(live / "trial" / "fc-seed0"), LiveRun)


def test_a_live_run_counts_before_a_packed_one(live, tmp_path):
    store = pack(live, tmp_path)
    write_json(tmp_path / "trial" / "fc-seed0" / "result.json", {"test": {"accuracy": 1.0}})
    write_json(tmp_path / "trial" / "fc-seed1" / "result.json", {"test": {"accuracy": 2.0}})
    assert store.list_runs("trial") == ["fc-seed0", "fc-seed1"]
    assert store.run("trial", "fc-seed0").read("result.json") == {"test": {"accuracy": 1.0}}
    shutil.rmtree(tmp_path / "trial")
    assert store.run("trial", "fc-seed0").packed


def test_packing_again_keeps_what_is_there_and_replaces_what_is_new(live, tmp_path):
    store = pack(live, tmp_path)
    before = store.run("trial", "fc-seed0").read_outcomes("evaluation").arrays()
    for value in (1, 2):  # the same size in the same second
        store.pack("trial", {"later": {"result.json": {"value": value, "environment": {"torch": "3"}}}})
        assert store.run("trial", "later").read("result.json")["value"] == value
    assert store.list_runs("trial") == ["fc-seed0", "later"]
    after = store.run("trial", "fc-seed0").read_outcomes("evaluation").arrays()
    assert all(np.array_equal(before[key], after[key]) for key in before)


def test_packing_one_file_of_the_experiment_keeps_its_others(tmp_path):
    store = RecordStore(tmp_path)
    store.pack("trial", {"": {"white.json": {"loss": 1.0}, "adam.json": {"loss": 2.0}}})
    store.pack("trial", {"": {"adam.json": {"loss": 3.0}}})
    assert store.run("trial").read_all() == {"white.json": {"loss": 1.0}, "adam.json": {"loss": 3.0}}


def pack_often(base, name):
    for k in range(20):
        RecordStore(base).pack("trial", {f"{name}-seed{k}": {"result.json": {"value": k}}})


def test_two_that_pack_at_once_keep_each_others_runs(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=pack_often, args=(tmp_path, name), daemon=True) for name in ("fc", "trl")]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(RecordStore(tmp_path).list_runs("trial")) == 40


def test_no_outcomes_are_packed_without_their_arrays(live, tmp_path, monkeypatch):
    store = pack(live, tmp_path)
    write = record_store._write_compressed

    def write_one(path, content):
        write(path, content)
        raise KeyboardInterrupt

    later = {"later": RecordStore(live).run("trial", "fc-seed0").read_all()}
    with monkeypatch.context() as patch:
        patch.setattr(record_store, "_write_compressed", write_one)
        with pytest.raises(KeyboardInterrupt):
            store.pack("trial", later)
    assert store.list_runs("trial") == ["fc-seed0"]
    assert store.run("trial", "fc-seed0").read_outcomes("evaluation").arrays()
    arrays = (tmp_path / "trial.npz.xz").read_bytes()
    store.pack("trial", later)
    assert store.run("trial", "later").read_outcomes("evaluation").arrays()
    assert (tmp_path / "trial.npz.xz").read_bytes() == arrays


def test_outcomes_whose_arrays_are_missing_say_so(live, tmp_path):
    store = pack(live, tmp_path)
    arrays = (tmp_path / "trial.npz.xz").read_bytes()
    store.pack("trial", {"later": RecordStore(live).run("trial", "fc-seed0").read_all()})
    (tmp_path / "trial.npz.xz").write_bytes(arrays)
    assert store.run("trial", "fc-seed0").read_outcomes("evaluation").arrays()
    with pytest.raises(TensorDropoutError, match=r"trial\.npz\.xz has no arrays of later/evaluation.*; restore it"):
        store.run("trial", "later").read_outcomes("evaluation")


def test_what_is_not_there_is_empty(tmp_path):
    store = RecordStore(tmp_path / "nowhere")
    assert store.list_experiments() == store.list_runs("trial") == store.list_environments() == []
    run = store.run("trial", "fc-seed0")
    assert run.names() == run.read_metrics() == []
    assert run.read_record("run.json") is None
    with pytest.raises(FileNotFoundError, match=r"predictions\.csv"):
        run.read_predictions()


def test_damaged_files_are_named(live, tmp_path):
    store = pack(live, tmp_path)
    for name in ("trial.npz.xz", "trial.jsonl.xz"):
        path = tmp_path / name
        whole = path.read_bytes()
        contents = [b"", b"no archive", whole[: len(whole) // 2], lzma.compress(b"{}\n"), lzma.compress(b"[1]\n[2]\n")]
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(TensorDropoutError, match=rf"{name} cannot be read .*; restore it"):
                store.run("trial", "fc-seed0").read_outcomes("evaluation")
        path.write_bytes(whole)
    (tmp_path / "trial.jsonl.xz").write_bytes(lzma.compress(b'{"format": 2}\n'))
    with pytest.raises(TensorDropoutError, match="has format 2, this version reads 1"):
        store.list_runs("trial")


def test_a_live_record_that_is_none_says_so(tmp_path):
    folder = tmp_path / "trial" / "fc-seed0"
    write_json(folder / "run.json", {})
    (folder / "result.json").write_text("[1]", "utf-8")
    (folder / "metrics.jsonl").write_text('{"epoch": 1}\n{"epo', "utf-8")
    run = RecordStore(tmp_path).run("trial", "fc-seed0")
    with pytest.raises(ValueError, match=r"result\.json holds no record"):
        run.read_record("result.json")
    assert run.read_metrics() == [{"epoch": 1}]


def test_tens_of_thousands_of_runs_are_read_in_seconds(tmp_path):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(20_000, 8, generator=generator, dtype=torch.float64).tolist()
    environment = {"torch": "2.13.0", "command": "a command"}
    store = RecordStore(tmp_path)
    store.pack(
        "fits",
        {f"fit-seed{k}": {"result.json": {"test": row, "environment": environment}} for k, row in enumerate(scores)},
    )
    start = time.perf_counter()
    names = store.list_runs("fits")
    last = store.run("fits", "fit-seed19999").read("result.json")
    assert time.perf_counter() - start < 5
    assert (len(names), last["test"], last["environment"]) == (20_000, scores[-1], environment)
