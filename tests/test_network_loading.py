"""Networks from files: ours, torchvision's names, any factory; nothing that is read can execute code."""

import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tensor_dropout as td
from tensor_dropout_lab.nets import build_net
from tensor_dropout_lab.network_loading import call_factory, read_network, read_state


def small_net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def scaled_net(factor=1):
    return nn.Linear(4 * factor, 3)


def not_a_net():
    return 3


HERE = __name__


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return build_net("resnet-mini", outputs=7, input_shape=(1, 8, 8)).state_dict()


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "model", "module.", "_orig_mod.", "safetensors"])
def test_plain_weights_in_their_usual_wrappings(weights, wrap, tmp_path):
    path = tmp_path / "weights.pt"
    if wrap == "safetensors":
        save_file(weights, path)
    elif wrap.endswith("."):
        torch.save({wrap + key: value for key, value in weights.items()}, path)
    else:
        torch.save(weights if wrap == "plain" else {wrap: weights, "epoch": 3}, path)
    network = read_network(path, arch="resnet-mini", input_shape=(1, 8, 8))
    assert all(torch.equal(value, weights[key]) for key, value in network.state_dict().items())


def test_the_stem_follows_the_weights(tmp_path):
    large = build_net("resnet18", outputs=5, input_shape=(3, 64, 64), stem="large")
    torch.save(large.state_dict(), tmp_path / "a.pt")
    assert read_network(tmp_path / "a.pt", arch="resnet18", input_shape=(3, 64, 64)).stem == "large"


def test_a_factory_is_called_with_its_arguments(tmp_path):
    torch.save(scaled_net(2).state_dict(), tmp_path / "a.pt")
    network = read_network(tmp_path / "a.pt", factory=f"{HERE}:scaled_net", factory_arguments='{"factor": 2}')
    assert network.in_features == 8


def test_a_converted_network_goes_into_its_factory(tmp_path):
    network = small_net().eval()
    x = torch.randn(2, 1, 8, 8)
    td.tensorize_(network, x, dropout=0.7)
    td.save(network, tmp_path / "a.safetensors")
    again = read_network(tmp_path / "a.safetensors", factory=f"{HERE}:small_net").eval()
    assert torch.equal(again(x), network(x))


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_nothing_in_a_file_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bomb.pt").write_bytes(pickle.dumps({"state_dict": Bomb()}))
    torch.save(Bomb(), tmp_path / "bomb2.pt")
    for name in ("bomb.pt", "bomb2.pt"):
        with pytest.raises(td.TensorDropoutError, match="neither a safetensors file nor a state dict"):
            read_state(tmp_path / name)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("text", ["import os\n", "a = 1\n", "", "0", "(lp0\n."])
def test_a_file_that_is_no_network_is_refused_without_torchs_advice(tmp_path, text):
    (tmp_path / "make.py").write_text(text)
    with pytest.raises(
        td.TensorDropoutError, match=r"neither a safetensors file nor a state dict|no state dict"
    ) as caught:
        read_state(tmp_path / "make.py")
    assert "weights_only" not in str(caught.value)


def make(path, content):
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        (None, {}, "there is no file"),
        ({"a": 1}, {"arch": "resnet-mini"}, "no state dict"),
        ({"a": torch.ones(2)}, {}, "--arch"),
        ({"a": torch.ones(2)}, {"arch": "resnet-mini", "input_shape": (1, 8, 8)}, "fc.weight"),
        ({"fc.weight": torch.ones(2, 3)}, {"arch": "resnet-mini"}, "--input"),
        ({"fc.weight": torch.ones(2, 3)}, {"arch": "resnet-mini", "input_shape": (1, 8, 8)}, "lacks"),
        ({"fc.weight": torch.ones(2, 3)}, {"arch": "resnet-mni", "input_shape": (1, 8, 8)}, "resnet-mini"),
        ({"weight": torch.ones(3, 5), "bias": torch.ones(3)}, {"factory": f"{HERE}:scaled_net"}, "another shape"),
        (
            {"weight": torch.ones(3, 4), "bias": torch.ones(3), "more": torch.ones(1)},
            {"factory": f"{HERE}:scaled_net"},
            "beyond",
        ),
        ({"a": torch.ones(2)}, {"factory": "nonsense"}, "package.module:function"),
        ({"a": torch.ones(2)}, {"factory": "no.such.module:f"}, "ModuleNotFoundError"),
        ({"a": torch.ones(2)}, {"factory": f"{HERE}:no_such_function"}, "AttributeError"),
        ({"a": torch.ones(2)}, {"factory": f"{HERE}:not_a_net"}, "not an nn.Module"),
        ({"a": torch.ones(2)}, {"factory": f"{HERE}:scaled_net", "factory_arguments": "{"}, "JSON"),
        ({"a": torch.ones(2)}, {"factory": f"{HERE}:scaled_net", "factory_arguments": "[1]"}, "JSON object"),
        ({"a": torch.ones(2)}, {"factory": f"{HERE}:scaled_net", "factory_arguments": '{"b": 1}'}, "TypeError"),
        ({"a": torch.ones(2)}, {"factory": "a:b", "arch": "resnet18"}, "not both"),
    ],
)
def test_refusals_name_what_is_wrong(content, settings, words, tmp_path):
    path = tmp_path / "absent.pt" if content is None else make(tmp_path / "weights.pt", content)
    with pytest.raises(td.TensorDropoutError, match=words):
        read_network(path, **settings)


def test_a_factory_may_stand_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "nets_of_a_user.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(2, 2)\n")
    monkeypatch.chdir(tmp_path)
    assert call_factory("nets_of_a_user:build").in_features == 2
