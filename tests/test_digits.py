"""The experiment "digits" at a tiny setting: what it writes, what it reuses, and what it says."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict, replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import tensor_dropout as td
from tensor_dropout.atomic_files import replacing
from tensor_dropout_lab import cli
from tensor_dropout_lab.experiments import digits
from tensor_dropout_lab.records import read_finished, write_json

TINY = digits.Preset(
    seeds=1, epochs=1, channels=8, rank=(4, 2, 2, 5), snrs=(0.5, 4.0), shown_snrs=(4.0,), noise_draws=1
)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(digits.PRESETS, "quick", TINY)
    return TINY


@pytest.fixture
def trained(monkeypatch):
    """The (head, seed) pairs that were really trained."""
    calls = []
    train_one = digits.train_one

    def note(head, seed, *rest):
        calls.append((head, seed))
        return train_one(head, seed, *rest)

    monkeypatch.setattr(digits, "train_one", note)
    return calls


def test_both_presets_exist():
    assert {"quick", "paper"} <= set(digits.PRESETS)
    assert all(preset.seeds >= 3 for preset in digits.PRESETS.values())


def test_output_files(tiny, tmp_path):
    result = CliRunner().invoke(cli.app, ["reproduce", "digits", "--out", str(tmp_path), "--seed", "3"])
    assert result.exit_code == 0, result.output
    for ending in ("json", "png", "svg"):
        path = tmp_path / "digits" / f"digits-quick.{ending}"
        assert path.stat().st_size > 1000
        assert path.name in result.output
    assert not list(tmp_path.rglob(".*"))  # no temporary file is left
    record = json.loads((tmp_path / "digits" / "digits-quick.json").read_text())
    assert record["seeds"] == [3]
    assert record["settings"] == json.loads(json.dumps(asdict(tiny)))
    assert {"python", "torch", "numpy", "scikit-learn", "tensor_dropout", "command"} <= set(record["environment"])
    assert set(record["heads"]) == set(digits.HEADS)
    assert set(record["heads"]["rtrl"]["accuracy"]) == {"clean", "SNR 0.5", "SNR 4"}
    assert sum(record["images"].values()) == 1797
    assert record["verdicts"][0] in " ".join(result.output.split())


def test_finished_runs_are_not_repeated(tiny, trained, tmp_path):
    digits.run("digits", "quick", tmp_path, 0)
    assert trained == [(head, 0) for head in digits.HEADS]
    before = (tmp_path / "digits" / "digits-quick.json").read_text()
    trained.clear()
    (tmp_path / "digits" / "runs" / "quick" / "trl-seed0.json").unlink()
    (tmp_path / "digits" / "runs" / "quick" / "fc-seed0.json").write_text('{"settings": ')  # a damaged file
    digits.run("digits", "quick", tmp_path, 0)
    assert trained == [("fc", 0), ("trl", 0)]
    assert (tmp_path / "digits" / "digits-quick.json").read_text() == before  # equal seeds, equal numbers


def test_changed_settings_are_not_reused(tiny, trained, tmp_path, monkeypatch):
    digits.run("digits", "quick", tmp_path, 0)
    trained.clear()
    monkeypatch.setitem(digits.PRESETS, "quick", replace(tiny, theta=0.5))
    digits.run("digits", "quick", tmp_path, 0)
    assert len(trained) == len(digits.HEADS)
    trained.clear()
    monkeypatch.setattr(digits, "__version__", "another")
    digits.run("digits", "quick", tmp_path, 0)
    assert len(trained) == len(digits.HEADS)


def test_more_seeds_train_only_the_new_ones(tiny, trained, tmp_path, monkeypatch):
    digits.run("digits", "quick", tmp_path, 0)
    trained.clear()
    monkeypatch.setitem(digits.PRESETS, "quick", replace(tiny, seeds=2))
    digits.run("digits", "quick", tmp_path, 0)
    assert trained == [(head, 1) for head in digits.HEADS]


def test_the_callers_randomness_and_threads_are_left_alone(tiny):
    torch.manual_seed(0)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    digits.train_one("rtrl", 0, tiny, digits.load_parts(), lambda: None)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_parts_are_disjoint_and_normalized():
    parts = digits.load_parts()
    images = torch.cat([part.images for part in parts.values()])
    assert {name: len(part.labels) for name, part in parts.items()} == {"train": 1077, "validation": 360, "test": 360}
    assert len(torch.unique(images.flatten(1), dim=0)) == len(images) == 1797
    assert images.mean(dim=(1, 2, 3)).abs().max() < 1e-5
    assert (images.square().mean(dim=(1, 2, 3)) - 1).abs().max() < 1e-5


def test_noise_has_the_stated_snr():
    seen = []

    class Watch(torch.nn.Module):
        def forward(self, x):
            seen.append(x)
            return torch.zeros(len(x), 10)

    part = digits.load_parts()["test"]
    digits.evaluate_accuracy(Watch(), part, replace(TINY, snrs=(0.25,), noise_draws=20), seed=0)
    clean, noisy = seen
    noise = noisy - clean.repeat(20, 1, 1, 1)
    assert float(part.images.var() / noise.var()) == pytest.approx(0.25, rel=0.02)


def test_heads_have_the_stated_structure():
    preset = digits.PRESETS["quick"]
    trl, rtrl = (digits.build_head(head, preset) for head in ("trl", "rtrl"))
    assert trl.input_shape[1:] == (4, 4)
    assert trl.dropout is None
    assert float(rtrl.dropout.theta) == pytest.approx(preset.theta)
    assert digits.count_parameters(trl) == digits.count_parameters(rtrl)


def record(head, seed, accuracy):
    return {
        "settings": {"head": head, "seed": seed},
        "accuracy": {"clean": accuracy, "SNR 0.5": accuracy, "SNR 4": accuracy},
        "parameters_head": 1,
        "parameters_network": 2,
    }


@pytest.mark.parametrize(
    ("ours", "first", "second"),
    [
        ((99.0, 99.1, 99.2), "highest mean accuracy in every column", "(ahead)"),
        ((50.0, 50.2, 50.1), "does not win any column", "(behind)"),
        ((80.0, 90.5, 99.0), "does not win any column", "(no clear difference)"),
    ],
)
def test_the_sentences_follow_the_numbers(ours, first, second):
    runs = [record(head, seed, 90.0 + 0.1 * seed) for seed in range(3) for head in digits.HEADS if head != "rtrl"]
    runs += [record("rtrl", seed, accuracy) for seed, accuracy in enumerate(ours)]
    sentences = digits.compare_heads(runs, TINY)
    assert first in sentences[0]
    assert all(second in sentence for sentence in sentences[1:])


def test_the_table_shows_mean_and_deviation():
    runs = [record(head, seed, 90.0 + seed) for seed in range(3) for head in digits.HEADS]
    console = Console(record=True, width=100, file=io.StringIO())
    digits.print_table(digits.summarize(runs, TINY), TINY, {"torch": "x"}, console)
    assert "91.0 ± 1.0" in console.export_text()


@pytest.mark.parametrize("package", ["sklearn", "matplotlib"])
def test_a_missing_extra_is_named(package, monkeypatch, tmp_path):
    for name in (package, f"{package}.datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(td.TensorDropoutError, match=rf"{package} is not installed.*tensor-dropout\[lab\]"):
        digits.run("digits", "quick", tmp_path, 0)


def test_records_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "sub" / "record.json"
    write_json(path, {"settings": {"rank": (1, 2)}, "value": 1})
    assert read_finished(path, {"rank": (1, 2)})["value"] == 1
    assert read_finished(path, {"rank": (1, 3)}) is None
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        temporary.write_text(str(1 / 0))
    assert read_finished(path, {"rank": (1, 2)})["value"] == 1
    assert list(path.parent.iterdir()) == [path]
