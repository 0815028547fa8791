"""Exports compute what the network does, with any batch size, and need nothing of this library."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import tensor_dropout as td
from tensor_dropout.exporting import export_merged, export_onnx, export_program
from tensor_dropout_lab import cli
from tensor_dropout_lab.nets import build_net


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


@pytest.mark.parametrize("export", [export_merged, export_program, export_onnx])
def test_the_network_stays_in_the_mode_that_it_was_in(network, tmp_path, export):
    if export is export_onnx:
        pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    network.train()
    network[0].eval()
    before = [module.training for module in network.modules()]
    export(network, torch.randn(2, 1, 6, 6), tmp_path / "exported")
    assert [module.training for module in network.modules()] == before


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


def test_bfloat16_is_refused_by_onnx_with_advice(tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    network = build_net("resnet-mini", outputs=5, input_shape=(1, 8, 8), head="rtrl-cp").bfloat16()
    example = torch.randn(2, 1, 8, 8).bfloat16()
    with pytest.raises(td.TensorDropoutError, match=r"torch\.bfloat16, .* convert it with \.float\(\) first"):
        export_onnx(network, example, tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []
    assert export_onnx(network.float(), example.float(), tmp_path / "a.onnx") < 1e-5


@pytest.mark.parametrize(
    ("dtype", "advice"), [(torch.float32, ""), (torch.float64, "; convert it with .float() first")], ids=str
)
def test_what_onnxruntime_does_not_run_is_refused_in_one_sentence(dtype, advice, tmp_path, monkeypatch):
    """As convolutions in float64, for which it has no implementation."""
    runtime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

    def refuse(*args, **kwargs):
        raise Exception("no implementation\nat all")

    monkeypatch.setattr(runtime, "InferenceSession", refuse)
    with pytest.raises(td.TensorDropoutError) as caught:
        export_onnx(nn.Linear(3, 2, dtype=dtype), torch.randn(2, 3, dtype=dtype), tmp_path / "a.onnx")
    wanted = f"export: onnxruntime does not run this network in {dtype}: Exception: no implementation{advice}"
    assert str(caught.value) == wanted
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_refuses_bfloat16_in_one_sentence(tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    network = build_net("resnet-mini", outputs=5, input_shape=(1, 8, 8), head="rtrl-cp")
    td.save(network.bfloat16(), tmp_path / "a.safetensors")
    call = ["export", str(tmp_path / "a.safetensors"), "--to", "onnx", "-o", str(tmp_path / "a.onnx")]
    result = CliRunner().invoke(cli.app, call)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: export: the network is in torch.bfloat16")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "a.onnx").exists()


def volumes(size):
    """A pooled head on volumes; its converted head needs AdaptiveAvgPool3d, for which torch has no ONNX."""
    return nn.Sequential(nn.Conv3d(1, 4, 3), nn.AdaptiveAvgPool3d(size), nn.Flatten(), nn.LazyLinear(3))


def run_onnx(path, x):
    runtime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.as_tensor(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.mark.parametrize("stage", ["fine-tuned", "merged"])
def test_a_converted_head_on_volumes_exports_to_onnx(stage, tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    torch.manual_seed(0)
    network, example = volumes(1), torch.randn(2, 1, 6, 6, 6)
    network(example)
    td.tensorize_(network, example, rank=(4, 2, 2, 2, 3), dropout=0.8)
    with torch.no_grad():
        for parameter in network[3].parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    if stage == "merged":
        td.merge_(network)
    assert isinstance(network[1], nn.AdaptiveAvgPool3d)
    assert network[1].output_size == (4, 4, 4)
    network.eval()
    assert export_onnx(network, example, tmp_path / "a.onnx") < 1e-5
    x = torch.randn(5, 1, 6, 6, 6)
    torch.testing.assert_close(run_onnx(tmp_path / "a.onnx", x), network(x).detach(), rtol=1e-4, atol=1e-5)


class Poolings(nn.Module):
    """Several poolings of one map side by side."""

    def __init__(self, *sizes):
        super().__init__()
        self.poolings = nn.ModuleList(nn.AdaptiveAvgPool3d(size) for size in sizes)

    def forward(self, x):
        return torch.cat([pooling(x).flatten(1) for pooling in self.poolings], 1)


def test_pooling_of_volumes_exports_whether_or_not_it_divides(tmp_path):
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    network, x = Poolings(2, (3, 2, 4), (None, 2, 1), 7), torch.randn(3, 2, 6, 5, 4)
    assert export_onnx(network, x[:2], tmp_path / "a.onnx") < 1e-5
    torch.testing.assert_close(run_onnx(tmp_path / "a.onnx", x), network(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("export", [export_onnx, export_program])
def test_one_sample_is_an_example_too(export, network, tmp_path):
    if export is export_onnx:
        pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    assert export(network, torch.randn(1, 1, 6, 6), tmp_path / "a") < 1e-5
    x = torch.randn(4, 1, 6, 6)
    found = run_onnx(tmp_path / "a", x) if export is export_onnx else torch.export.load(tmp_path / "a").module()(x)
    torch.testing.assert_close(found, network(x), rtol=1e-4, atol=1e-5, check_stride=False)


@pytest.mark.parametrize("export", [export_onnx, export_program, export_merged])
def test_a_network_that_diverged_is_refused(export, network, tmp_path):
    if export is export_onnx:
        pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    with torch.no_grad():
        network[0].bias.fill_(float("nan"))
    with pytest.raises(td.TensorDropoutError, match="NaN or infinite"):
        export(network, torch.randn(2, 1, 6, 6), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("export", [export_onnx, export_program, export_merged])
def test_an_example_of_another_shape_is_refused_in_one_sentence(export, network, tmp_path, capfd):
    if export is export_onnx:
        pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    with pytest.raises(td.TensorDropoutError, match=r"^export: Sequential does not run .*\[\(2, 3, 6, 6\)\]") as caught:
        export(network, torch.randn(2, 3, 6, 6), tmp_path / "a")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


class Eigenvalues(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x)


def test_what_onnx_has_no_operator_for_is_named_without_colours(tmp_path, capfd):
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    with pytest.raises(td.TensorDropoutError, match=r"does not export to ONNX: .*eigh") as caught:
        export_onnx(Eigenvalues(), torch.eye(3).expand(2, 3, 3), tmp_path / "a.onnx")
    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_tied_weights_are_written_under_each_name(tmp_path):
    network = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1), td.CPRegression((2, 3, 3), 4, rank=3)).eval()
    network[1].weight = network[0].weight
    assert export_merged(network, torch.randn(2, 2, 3, 3), tmp_path / "a.safetensors") < 1e-5
    state = load_file(tmp_path / "a.safetensors")
    assert torch.equal(state["1.weight"], state["0.weight"])


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize("export", [export_onnx, export_program])
def test_what_cannot_be_exported_leaves_nothing(export, tmp_path):
    with pytest.raises(td.TensorDropoutError, match="export"):
        export(Branching(), torch.randn(2, 3), tmp_path / "a.bin")
    assert list(tmp_path.iterdir()) == []


class Silent(nn.Module):
    def forward(self, x):
        return "no tensor"


@pytest.mark.parametrize("export", [export_onnx, export_program])
def test_a_network_that_returns_no_tensor_is_refused(export, tmp_path):
    with pytest.raises(td.TensorDropoutError, match="Silent returns no tensor"):
        export(Silent(), torch.randn(2, 3), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_merging_needs_a_tensor_regression(tmp_path):
    with pytest.raises(td.TensorDropoutError, match="no tensor regression"):
        export_merged(plain(), torch.randn(2, 1, 6, 6), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []
