"""``tensor-dropout convert`` and ``export``, as they are typed."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from typer.testing import CliRunner

import tensor_dropout as td
from tensor_dropout.layers.formats import _FORMATS
from tensor_dropout_lab import cli
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.nets import build_net, families

runner = CliRunner()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network that was really trained on digits, in a file of ours and as plain weights."""
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    folder = tmp_path_factory.mktemp("trained")
    digits = load_data("digits")
    x, y = digits.prepare(digits.train.inputs), digits.train.targets
    torch.manual_seed(0)
    network = build_net("resnet-mini", outputs=10, input_shape=(1, 8, 8))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(5):
        for rows in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
    td.save(network.eval(), folder / "ours.safetensors")
    torch.save(network.state_dict(), folder / "plain.pt")
    return folder, network


def call(*words):
    return runner.invoke(cli.app, [str(word) for word in words])


def test_exact_conversion_of_our_file(trained, tmp_path):
    folder, network = trained
    out = tmp_path / "converted.safetensors"
    result = call("convert", folder / "ours.safetensors", "--theta", 0.8, "-o", out)
    assert result.exit_code == 0, result.output
    assert "TuckerRegression" in result.output
    assert str(out) in result.output
    converted = td.load(out).eval()
    x = torch.randn(4, 1, 8, 8)
    torch.testing.assert_close(converted(x), network(x), rtol=1e-4, atol=1e-4)
    assert converted.fc.regression.dropout.config()["theta"] == 0.8


@pytest.mark.parametrize("factorization", ["tucker", "cp", "tt", "ring"])
def test_plain_weights_with_an_error_bound(trained, factorization, tmp_path):
    folder, _ = trained
    out = tmp_path / "a.safetensors"
    result = call(
        "convert", folder / "plain.pt", "--arch", "resnet-mini", "--input", "1,8,8", "--max-error", 0.4,
        "--factorization", factorization, "-o", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    network = build_net("resnet-mini", outputs=10, input_shape=(1, 8, 8))
    loaded = td.load(out, network)
    assert max(loaded.fc.regression._ranks) < 10


def test_a_format_of_an_imported_module(trained, tmp_path, monkeypatch):
    (tmp_path / "cp_again.py").write_text(
        "from tensor_dropout.layers.cp import CPDecomposition, CPRegression\n"
        "from tensor_dropout.layers.formats import Format, register_format\n"
        "class AgainRegression(CPRegression): pass\n"
        "register_format(Format('again', __name__, 'AgainRegression', 'CPDecomposition'))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(families, "_TRUSTED", {*families._TRUSTED})
    words = ("convert", trained[0] / "ours.safetensors", "--factorization", "again", "--rank", 2, "-o", "a.safetensors")
    try:
        result = call("--import", "cp_again", *words)
        assert result.exit_code == 0, result.output
        assert "AgainRegression" in result.output
        assert type(td.load("a.safetensors").fc.regression).__name__ == "AgainRegression"
        assert "again" in call("convert", "a", "-o", "b", "--factorization", "svd").output
    finally:
        _FORMATS.pop("again", None)
        sys.modules.pop("cp_again", None)


def test_accuracy_bound_and_curve(trained, tmp_path):
    folder, _ = trained
    ours = folder / "ours.safetensors"
    result = call("convert", ours, "--max-accuracy-loss", 0.02, "--data", "digits", "-o", tmp_path / "a.safetensors")
    assert result.exit_code == 0, result.output
    result = call("convert", ours, "--curve", "--data", "digits", "-o", tmp_path / "curve")
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "curve.json").read_text())
    errors = [trial["relative_error"] for trial in record["trials"]]
    assert errors == sorted(errors, reverse=True)
    assert record["part"] == "validation"
    assert record["trials"][-1]["accuracy"] == pytest.approx(record["unchanged_accuracy"], abs=1e-9)
    assert (tmp_path / "curve.png").is_file()
    assert (tmp_path / "curve.svg").is_file()


def test_the_curve_of_a_tensor_network_cuts_its_ranks(trained, tmp_path):
    head = build_net("resnet-mini", outputs=10, input_shape=(1, 8, 8), head="rtrl-cp", rank=8, law="nested")
    td.save(head, tmp_path / "nested.safetensors")
    result = call("convert", tmp_path / "nested.safetensors", "--curve", "--data", "digits", "-o", tmp_path / "curve")
    assert result.exit_code == 0, result.output
    ranks = [trial["rank"] for trial in json.loads((tmp_path / "curve.json").read_text())["trials"]]
    assert ranks[0] == [1]
    assert ranks[-1] == [8]


@pytest.mark.parametrize("to", ["onnx", "pt2", "merged"])
def test_export(trained, to, tmp_path):
    if to == "onnx":
        pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    folder, network = trained
    call("convert", folder / "ours.safetensors", "-o", tmp_path / "a.safetensors")
    result = call("export", tmp_path / "a.safetensors", "--to", to, "-o", tmp_path / f"out.{to}")
    assert result.exit_code == 0, result.output
    assert str(tmp_path / f"out.{to}") in result.output
    if to == "merged":
        state = load_file(tmp_path / "out.merged")
        assert sorted(state) == sorted(network.state_dict())
        torch.testing.assert_close(state["fc.weight"], network.fc.weight.detach(), rtol=0, atol=1e-6)


def test_the_folder_of_a_run_stands_for_its_network(trained, tmp_path):
    _, network = trained
    (tmp_path / "run").mkdir()
    td.save(network, tmp_path / "run" / "model.safetensors")
    assert call("convert", tmp_path / "run", "-o", tmp_path / "a.safetensors").exit_code == 0
    assert call("export", tmp_path / "run", "--to", "pt2", "-o", tmp_path / "a.pt2").exit_code == 0
    assert (tmp_path / "a.pt2").exists()


def test_a_converted_network_for_volumes_exports(tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    network = build_net("resnet-mini", outputs=1, input_shape=(1, 16, 16, 16)).eval()
    td.save(network, tmp_path / "a.safetensors")
    words = ("--rank", "4,2,2,2,1", "--theta", "0.8", "-o", tmp_path / "b.safetensors")
    assert call("convert", tmp_path / "a.safetensors", *words).exit_code == 0
    result = call("export", tmp_path / "b.safetensors", "--to", "onnx", "-o", tmp_path / "b.onnx")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "b.onnx").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert", "absent.pt", "-o", "a"], "there is no file"),
        (["convert", "{plain}", "-o", "a"], "--arch"),
        (["convert", "{plain}", "--arch", "resnet-mini", "-o", "a"], "--input"),
        (["convert", "{plain}", "--arch", "resnet-mini", "--input", "1,x", "-o", "a"], "--input is the shape"),
        (["convert", "{plain}", "--arch", "resnet18", "--input", "1,8,8", "-o", "a"], "fit"),
        (["convert", "{ours}", "--rank", "99", "-o", "a"], "rank is between 1 and 10"),
        (["convert", "{ours}", "--rank", "many", "-o", "a"], "--rank is full"),
        (["convert", "{ours}", "--rank", "3", "--max-error", "0.1", "-o", "a"], "one thing decides"),
        (["convert", "{ours}", "--theta", "1.5", "-o", "a"], "KEEP probability"),
        (["convert", "{ours}", "--head", "nothing", "-o", "a"], "nothing"),
        (["convert", "{ours}", "--curve", "-o", "a"], "--data"),
        (["convert", "{ours}", "--curve", "--data", "synthetic", "-o", "a"], "regression"),
        (["convert", "{ours}", "-o", "no/such/folder/a.safetensors"], "does not exist"),
        (["export", "{ours}", "--to", "merged", "-o", "a"], "no tensor regression"),
        (["export", "{plain}", "-o", "a"], "--arch"),
        (["export", "{folder}", "-o", "a"], "is a folder without model.safetensors"),
        (["convert", "{folder}", "-o", "a"], "is a folder without model.safetensors"),
        (["export", "{ours}", "--to", "merged", "-o", "a.onnx"], "call it a.safetensors, or pass --to onnx"),
        (["export", "{ours}", "--to", "pt2", "-o", "a.safetensors"], "call it a.pt2, or pass --to merged"),
        (["export", "{ours}", "-o", "a.PT2"], "call it a.onnx, or pass --to pt2"),
        (["export", "{ours}", "--to", "pt2", "--input", "3,64,64", "-o", "a"], "export: ResNet does not run"),
    ],
)
def test_mistakes_show_one_sentence_and_write_nothing(trained, words, message, tmp_path, monkeypatch):
    folder, _ = trained
    monkeypatch.chdir(tmp_path)
    places = {"{plain}": folder / "plain.pt", "{ours}": folder / "ours.safetensors", "{folder}": folder}
    result = call(*(places.get(word, word) for word in words))
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["convert", "a"], ["convert", "a", "-o", "b", "--factorization", "svd"], ["export"]])
def test_bad_usage_exits_with_2(words):
    assert call(*words).exit_code == 2


@pytest.mark.parametrize("command", ["convert", "export", "train", "predict", "ls"])
def test_help_has_an_example(command):
    result = call(command, "--help")
    assert result.exit_code == 0
    assert "For example:" in result.output
