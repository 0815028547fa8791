"""Networks by a short text: where their weights come from, and what is never executed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import small_backbone
import tensor_dropout as td
from tensor_dropout_lab.backbones import open_backbone
from tensor_dropout_lab.nets import build_net, build_plain

SHAPE = (3, 32, 32)


def same(network: torch.nn.Module, state: dict[str, Tensor]) -> bool:
    found = network.state_dict()
    return found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)


@pytest.mark.parametrize("kind", ["safetensors", "torch.save", "a checkpoint"])
def test_a_network_by_name_takes_its_weights_from_a_file(tmp_path: Path, kind: str) -> None:
    network = build_plain("resnet-mini", outputs=7, input_shape=SHAPE)
    state, path = network.state_dict(), tmp_path / "weights"
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state if kind == "torch.save" else {"state_dict": state, "epoch": 3}, path)
    opened = open_backbone("resnet-mini", path, input_shape=SHAPE)
    assert same(opened.network, state)
    assert not opened.network.training
    assert all(parameter.requires_grad for parameter in opened.network.parameters())  # it may be trained on
    assert opened.hash_weights() == open_backbone("resnet-mini", path, input_shape=SHAPE).hash_weights()
    with torch.no_grad():
        next(opened.network.parameters()).add_(1)
    assert opened.hash_weights() != open_backbone("resnet-mini", path, input_shape=SHAPE).hash_weights()


def test_a_function_of_the_users_with_and_without_a_file(tmp_path: Path) -> None:
    other = small_backbone.build_other().state_dict()
    save_file(other, tmp_path / "other.safetensors")
    assert same(open_backbone("small_backbone:build", tmp_path / "other.safetensors").network, other)
    alone = open_backbone("small_backbone:build", arguments='{"width": 5}').network
    assert same(alone, small_backbone.build(width=5).state_dict())


def test_a_run_has_everything(tmp_path: Path) -> None:
    network = build_net("resnet-mini", outputs=3, input_shape=SHAPE, head="rtrl-cp")
    td.save(network, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        opened = open_backbone(str(path))
        assert same(opened.network, network.state_dict())
        assert opened.size == (32, 32)
    with pytest.raises(td.TensorDropoutError, match="has its own weights"):
        open_backbone(str(tmp_path), tmp_path / "model.safetensors")
    with pytest.raises(td.TensorDropoutError, match=r"a folder without model\.safetensors"):
        open_backbone(str(tmp_path.parent))


class Trap:
    """Unpickled, it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("spec", ["resnet-mini", "small_backbone:build", "efficientnet-lite0"])
def test_weights_execute_nothing(tmp_path: Path, spec: str) -> None:
    if spec == "efficientnet-lite0":
        pytest.importorskip("efficientnet_lite_pytorch")
    with (tmp_path / "weights.pth").open("wb") as stream:
        pickle.dump(Trap(tmp_path / "sprung"), stream, protocol=2)
    with pytest.raises(td.TensorDropoutError, match=r"could execute code: save model\.state_dict"):
        open_backbone(spec, tmp_path / "weights.pth", input_shape=SHAPE)
    assert not (tmp_path / "sprung").exists()


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    save_file({"wrong": torch.zeros(2, 2)}, tmp_path / "w.safetensors")
    with pytest.raises(td.TensorDropoutError, match="does not fit"):
        open_backbone("small_backbone:build", tmp_path / "w.safetensors")
