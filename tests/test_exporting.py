"""Exports compute what the network does, with any batch size, and need nothing of this library."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tensor_dropout as td
from tensor_dropout.exporting import export_merged, export_onnx, export_program


def plain():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )


@pytest.fixture
def network():
    """Converted, then changed, as fine-tuning does: it is no average any more."""
    torch.manual_seed(0)
    network = plain().eval()
    td.tensorize_(network, torch.randn(2, 1, 6, 6), rank=(5, 2, 2, 5), dropout=td.TensorDropout(0.8, scaling="paper"))
    with torch.no_grad():
        for parameter in network[4].parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


def test_onnx(network, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    assert export_onnx(network, torch.randn(2, 1, 6, 6), tmp_path / "a.onnx") < 1e-5
    session = runtime.InferenceSession(str(tmp_path / "a.onnx"), providers=["CPUExecutionProvider"])
    x = torch.randn(7, 1, 6, 6)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.as_tensor(found), network(x).detach(), rtol=1e-5, atol=1e-5)


def test_program_runs_without_this_library(network, tmp_path):
    path = tmp_path / "a.pt2"
    assert export_program(network, torch.randn(2, 1, 6, 6), path) < 1e-6
    x = torch.randn(7, 1, 6, 6)
    torch.save((x, network(x).detach()), tmp_path / "truth.pt")
    script = (
        "import sys, torch\n"
        "sys.modules['tensor_dropout'] = None\n"  # importing it would fail
        f"x, y = torch.load({str(tmp_path / 'truth.pt')!r})\n"
        f"found = torch.export.load({str(path)!r}).module()(x)\n"
        "assert (found - y).abs().max() < 1e-5\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_merged_weights_fit_plain_layers(network, tmp_path):
    assert export_merged(network, torch.randn(2, 1, 6, 6), tmp_path / "a.safetensors") < 1e-5
    state = load_file(tmp_path / "a.safetensors")
    assert state["4.weight"].shape == (5, 8 * 6 * 6)
    again = plain()
    again[2], again[4] = nn.AdaptiveAvgPool2d((6, 6)), nn.Linear(8 * 36, 5)
    again.load_state_dict(state)
    x = torch.randn(3, 1, 6, 6)
    torch.testing.assert_close(again.eval()(x), network(x), rtol=1e-5, atol=1e-5)


def test_an_untouched_head_comes_back_as_it_was(tmp_path):
    network = plain().eval()
    keys = list(network.state_dict())
    td.tensorize_(network, torch.randn(2, 1, 6, 6))
    export_merged(network, torch.randn(2, 1, 6, 6), tmp_path / "a.safetensors")
    state = load_file(tmp_path / "a.safetensors")
    assert sorted(state) == sorted(keys)
    plain().load_state_dict(state)


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("export", [export_onnx, export_program])
def test_what_cannot_be_exported_leaves_nothing(export, tmp_path):
    with pytest.raises(td.TensorDropoutError, match="export"):
        export(Branching(), torch.randn(2, 3), tmp_path / "a.bin")
    assert list(tmp_path.iterdir()) == []


def test_merging_needs_a_tensor_regression(tmp_path):
    with pytest.raises(td.TensorDropoutError, match="no tensor regression"):
        export_merged(plain(), torch.randn(2, 1, 6, 6), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []
