"""``FeatureMaps``: its speed beside the bare forward pass, from files, its memory, and what the cache saves.

    python benchmarks/feature_maps.py --images faces/images.tar           # CPU: about three minutes on two cores
    python benchmarks/feature_maps.py --device cuda                       # a GPU: under a minute
    python benchmarks/feature_maps.py --quick                             # to see that it runs

- **throughput**: from decoded arrays in memory (random numbers: only the time means something), float32 without TF32.
  The bare pass takes batches that are on the device, up to the same layer, and drops what it gives;
  ``FeatureMaps.transform`` copies the samples, finds the layer, checks the maps and returns them in memory.
  Interleaved; the ratio is taken in each round. The first time of each, when memory is new, is told apart.
- **files**: JPEG files (those of ``--images``, a tar file; else simulated ones) with a cache: what the first start
  spends waiting for decoded images, in the network and in the cache; decoding alone; the second start.
- **memory**: the peak beyond what was there before, for n and 4n samples of a Dataset, in processes of their own. On
  the CPU only.

EfficientNet-Lite0 needs its two packages (see ``estimators/features.py``); what is missing is left out and said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from estimators.features import load_backbone
from estimators.own_process import measure_peak, run_apart
from torch import Tensor, nn
from torch.utils.data import Dataset

from tensor_dropout.atomic_files import replacing
from tensor_dropout.sklearn import FeatureMaps
from tensor_dropout_lab.nets import build_net
from tensor_dropout_lab.run_records import describe_environment

SIZE = 224


class Network(NamedTuple):
    """What is timed: a network, its layer, and the pieces up to that layer."""

    model: nn.Module
    layer: str
    up_to_layer: Callable[[Tensor], Tensor]


def make_resnet() -> Network:
    """Our ResNet-18, which is torchvision's."""
    torch.manual_seed(0)
    net: Any = build_net("resnet18", outputs=1000, input_shape=(3, SIZE, SIZE), stem="large")
    pieces = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2, net.layer3)
    return Network(net.eval(), "layer3", pieces.eval())


def make_efficientnet() -> Network:
    """EfficientNet-Lite0 with its ImageNet weights."""
    net: Any = load_backbone()
    pieces = nn.Sequential(net._conv_stem, net._bn0, net._swish, *net._blocks[:11])
    return Network(net, "_blocks.10", pieces)


NETWORKS = {"EfficientNet-Lite0": make_efficientnet, "ResNet-18": make_resnet}


class Samples(Dataset):
    """Different inputs that are made when they are asked for."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.base = torch.randn(3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, number: int) -> Tensor:
        return self.base + number / self.n


def make_arrays(batches: int, batch: int) -> np.ndarray:
    """(batches · batch, 3, 224, 224), the same random batch again and again."""
    base = torch.randn(batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    x = np.empty((batches, *base.shape), np.float32)
    torch.from_numpy(x).copy_(base)  # with all threads: gigabytes on a GPU
    return x.reshape(-1, 3, SIZE, SIZE)


def measure_seconds(call: Callable[[], Any]) -> float:
    """The time of a call, with what it started on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def spread(numbers: list[float]) -> dict[str, float]:
    return {"median": statistics.median(numbers), "min": min(numbers), "max": max(numbers)}


def measure_throughput(network: Network, x: np.ndarray, batch: int, rounds: int, device: str) -> dict[str, Any]:
    """Images per second, bare and through ``FeatureMaps``, in turn; the first round of each is not counted."""
    network.model.to(device)
    on_device = torch.from_numpy(x[:batch]).to(device)
    maps = FeatureMaps(network.model, network.layer, batch=batch, verbose=False)

    @torch.inference_mode()
    def run_bare(function: Callable[[Tensor], Any]) -> None:
        for _ in range(len(x) // batch):
            function(on_device)

    contenders: dict[str, Callable[[], Any]] = {
        "FeatureMaps": lambda: maps.transform(x),
        "bare": lambda: run_bare(network.up_to_layer),
    }
    first = {name: len(x) / measure_seconds(call) for name, call in contenders.items()}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            rates[name].append(len(x) / measure_seconds(call))
    ratios = [ours / bare for ours, bare in zip(rates["FeatureMaps"], rates["bare"], strict=True)]
    return {
        "layer": network.layer,
        "batch": batch,
        "n": len(x),
        "images_per_second": {name: spread(numbers) for name, numbers in rates.items()},
        "first_time": first,
        "last_seconds_of_FeatureMaps": maps.seconds_,
        "ratio_to_bare": spread(ratios),
        "rounds": rounds,
    }


@contextmanager
def image_files(archive: Path | None, n: int) -> Iterator[list[Path]]:
    """A folder of JPEG files: the first n of a tar file, or simulated ones."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        if archive is not None:
            with tarfile.open(archive) as tar:
                members = [member for member in tar if member.name.lower().endswith((".jpg", ".jpeg"))][:n]
                for number, member in enumerate(members):
                    source = tar.extractfile(member)
                    assert source is not None
                    (Path(folder) / f"{number:05}.jpg").write_bytes(source.read())
        else:

            def draw(number: int) -> None:
                pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
                large = Image.fromarray(pixels).resize((512, 512), Image.Resampling.BICUBIC)
                large.save(Path(folder) / f"{number:05}.jpg", quality=90)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(draw, range(n)))
        yield sorted(Path(folder).iterdir())


def measure_files(network: Network, paths: list[Path], batch: int, device: str) -> dict[str, Any]:
    """From files with a cache: the first start, the second, and decoding alone."""
    from PIL import Image

    network.model.to(device)
    decoding = FeatureMaps(nn.Sequential(nn.Identity()), "0", pool=1, batch=batch, verbose=False)
    with Image.open(paths[0]) as image:
        size = image.size
    record: dict[str, Any] = {"n": len(paths), "first_image": size, "batch": batch}
    record["decoding_alone_images_per_second"] = len(paths) / measure_seconds(lambda: decoding.transform(paths))
    with tempfile.TemporaryDirectory() as folder:
        for start in ("first_start", "second_start"):
            maps = FeatureMaps(network.model, network.layer, batch=batch, cache=folder, verbose=False)
            seconds = measure_seconds(lambda maps=maps: maps.transform(paths))  # type: ignore[misc]
            record[start] = {"seconds": seconds, "images_per_second": len(paths) / seconds, "of_it": maps.seconds_}
    return record


def measure_memory(n: int, cached: bool) -> dict[str, Any]:
    """The peak of one transform of n samples whose maps have 200 KB; the network is one convolution."""
    network = nn.Sequential(nn.Conv2d(3, 256, 16, 16))
    with tempfile.TemporaryDirectory() as folder:
        maps = FeatureMaps(network, "0", verbose=False)
        maps.transform(Samples(64))
        maps.set_params(cache=folder if cached else None)
        result, peak = measure_peak(lambda: maps.transform(Samples(n)))
        return {"n": n, "cache": cached, "maps_bytes": result.nbytes, "peak_bytes": peak}


def report(record: dict[str, Any]) -> str:
    """The record in lines."""
    lines = []
    for name, row in record["throughput"].items():
        rates = ", ".join(
            f"{key} {value['median']:.1f} (first time {row['first_time'][key]:.1f})"
            for key, value in row["images_per_second"].items()
        )
        ratio = row["ratio_to_bare"]
        lines.append(f"{name}, batch {row['batch']}, n = {row['n']}: images/s: {rates}")
        lines.append(f"  FeatureMaps ÷ bare: {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})")
    for name, row in record.get("files", {}).items():
        first, second = row["first_start"]["seconds"], row["second_start"]["seconds"]
        split = ", ".join(f"{key} {seconds:.2f} s" for key, seconds in row["first_start"]["of_it"].items())
        lines.append(f"{name} from {row['n']} files: {first:.2f} s ({split}); second start {second:.2f} s")
        lines.append(f"  decoding alone: {row['decoding_alone_images_per_second']:.0f} images/s")
    for row in record.get("memory", []):
        words = "with a cache" if row["cache"] else "without"
        sizes = f"peak {row['peak_bytes'] / 2**20:.0f} MiB, maps {row['maps_bytes'] / 2**20:.0f} MiB"
        lines.append(f"memory, n = {row['n']}, {words}: {sizes}")
    return "\n".join([*lines, *record["left_out"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--images", type=Path, help="a tar file of JPEG images (default: simulated ones)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch on the CPU")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--batches", type=int, help="how many are timed at once (default: 4; on a GPU 48)")
    parser.add_argument("--quick", action="store_true", help="few samples: to see that it runs")
    parser.add_argument("--out", type=Path, help="the record (default: out/bench/feature-maps-DEVICE.json)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.backends.cudnn.allow_tf32 = False
    gpu, quick = arguments.device == "cuda", arguments.quick
    batch = 256 if gpu else 32
    batches = arguments.batches or (4 if quick or not gpu else 48)
    rounds = 1 if quick else 4 if gpu else 9
    n_files = 64 if quick else 512
    n_memory = 100 if quick else 1500
    began = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s: {what}", file=sys.stderr, flush=True)

    record: dict[str, Any] = {"environment": describe_environment(), "throughput": {}, "files": {}, "memory": []}
    if arguments.images:  # where it lies on this machine is of no use to others
        command = record["environment"]["command"]
        record["environment"]["command"] = command.replace(str(arguments.images), arguments.images.name)
    record["environment"]["load"] = os.getloadavg()[0]
    record["left_out"] = []
    say(f"arrays: {batches} batches of {batch} images")
    x = make_arrays(batches, batch)
    say(f"{n_files} files")
    with image_files(arguments.images, n_files) as paths:
        for name in arguments.networks:
            try:
                network = NETWORKS[name]()
            except ModuleNotFoundError as error:
                record["left_out"].append(f"{name}: {error}")
                continue
            say(f"{name} on arrays")
            record["throughput"][name] = measure_throughput(network, x, batch, rounds, arguments.device)
            say(f"{name} on files")
            record["files"][name] = measure_files(network, paths, batch, arguments.device)
            record["files"][name]["images"] = "of --images" if arguments.images else "simulated"
    for samples, cached in ((n_memory, True), (4 * n_memory, True), (n_memory, False), (4 * n_memory, False)):
        if not gpu:
            say(f"memory, {samples} samples")
            threads = arguments.threads
            record["memory"].append(run_apart(measure_memory, samples, cached, limit=300, threads=threads))
    say("done")

    path = arguments.out or Path(f"out/bench/feature-maps-{arguments.device}.json")
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(report(record), path, sep="\n")


if __name__ == "__main__":
    main()
