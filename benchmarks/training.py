"""Images per second of the training step, end to end: rows, normalisation, augmentation, forward, backward, update.

    python benchmarks/training.py cifar [--root FOLDER]     ResNet-18 on 3×32×32, batch 128
    python benchmarks/training.py imagenet                  ResNet-101 on 3×224×224, batch 256
    python benchmarks/training.py volumes                   3-D ResNet-18 on 1×182×218×182, batch 8

Without --root the images are random numbers of the same shape (simulated: nothing is learned from them). All variants
are timed in one interleaved run, in blocks of steps; medians over the blocks, with the smallest and largest. It uses
the step of ``tensor-dropout train`` itself. ``--profile`` adds the GPU kernels of each variant by their time.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.data.augment import RandomFlip, RandomShift
from tensor_dropout_lab.data.base import Data, StandardizeImages, TensorSplit
from tensor_dropout_lab.run_records import describe_environment
from tensor_dropout_lab.training.config import resolve_config
from tensor_dropout_lab.training.execution import choose_memory_format, lay_out_
from tensor_dropout_lab.training.loop import build_network
from tensor_dropout_lab.training.optimizers import make_optimizer
from tensor_dropout_lab.training.sampling import Feed, Sampler
from tensor_dropout_lab.training.step import Step, make_task_loss

HEADS = {
    "fc": {},
    "rtrl-cp": {"net.rank": 200, "net.theta": 0.8},
    "rtrl-tucker": {"net.rank": [256, 3, 3, 96], "net.theta": 0.8, "net.modes": "all"},
}
CASES = {
    "cifar": {"data": "cifar100", "shape": (3, 32, 32), "outputs": 100, "batch": 128, "rows": 50_000, "steps": 200},
    "imagenet": {
        "data": "imagefolder",
        "net": "resnet101",
        "shape": (3, 224, 224),
        "outputs": 1000,
        "batch": 256,
        "rows": 1024,
        "steps": 20,
        "ranks": {"rtrl-tucker": {"net.rank": [256, 3, 3, 256]}},
    },
    "volumes": {
        "data": "nifti",
        "shape": (1, 182, 218, 182),
        "outputs": 1,
        "batch": 8,
        "rows": 64,
        "steps": 20,
        "ranks": {"rtrl-cp": {"net.rank": 82}, "rtrl-tucker": {"net.rank": [128, 6, 7, 6, 1]}},
    },
}


def make_data(case):
    """Random images of the right shape."""
    task = "classification" if case["outputs"] > 1 else "regression"
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (case["rows"], *case["shape"]), dtype=torch.uint8, generator=generator)
    targets = torch.randint(0, 100, (case["rows"],), generator=generator)
    targets = targets if task == "classification" else targets.float()
    split = TensorSplit(inputs, targets, [str(k) for k in range(case["rows"])])
    augment = torch.nn.Sequential(RandomShift(4), RandomFlip(-1)) if len(case["shape"]) == 3 else None
    return Data(
        name="random",
        task=task,
        train=split,
        validation=None,
        test=None,
        input_shape=case["shape"],
        outputs=case["outputs"],
        classes=None,
        target=None,
        prepare=StandardizeImages(),
        augment=augment,
        simulated=True,
        provenance="random numbers",
    )


def make_step(case, data, head, speed, device):
    config = resolve_config(
        overrides={
            "data.name": case["data"],
            "net.name": case.get("net", "resnet18"),
            "net.head": head,
            "run.batch": case["batch"],
            **HEADS[head],
            **case.get("ranks", {}).get(head, {}),
        }
    )
    network = lay_out_(build_network(config, data).to(device), choose_memory_format(config, data)).train()
    feed = Feed(data.train, Sampler(len(data.train), case["batch"], 0), device, 0)
    optimizer = make_optimizer(network, config.optimizer, device)
    return Step(network, optimizer, feed.fetch, data, make_task_loss(data, config), config, device, speed), feed


def starts(feed):
    epoch = 0
    while True:
        yield from feed.starts(epoch, 0)
        epoch += 1


def run_block(step, source, steps):
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step.set_rate(1e-3)
        step(*next(source))
    torch.cuda.synchronize()
    return steps / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--root")
    parser.add_argument("--variants", default="fc:eager,fc:graph,fc:compile,rtrl-cp:graph,rtrl-tucker:graph")
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/training.py needs a GPU; torch sees none here")
    torch.backends.cudnn.benchmark = True
    case, device = CASES[arguments.case], torch.device("cuda")
    real = arguments.root is not None
    data = load_data(case["data"], root=arguments.root, validation=0) if real else make_data(case)
    variants = {}
    for name in arguments.variants.split(","):
        head, speed = name.split(":")
        began = time.perf_counter()
        step, feed = make_step(case, data, head, speed, device)
        source = starts(feed)
        try:
            run_block(step, source, 6)  # warm-up and capture
        except Exception as error:  # one variant that does not run leaves the others to be timed
            print(f"{name} failed: {type(error).__name__}: {str(error)[:600]}", flush=True)
            continue
        variants[name] = (step, source)
        print(f"{name}: ready after {time.perf_counter() - began:.1f} s", flush=True)
    rates = {name: [] for name in variants}
    for _ in range(arguments.blocks):
        for name, (step, source) in variants.items():
            rates[name].append(run_block(step, source, case["steps"]) * case["batch"])
    record = {"case": arguments.case, "real": real, "environment": describe_environment(), "rates": rates}
    record["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print(f"| variant | examples/s, median | smallest | largest |{' SIMULATED inputs' if not real else ''}")
    print("|---|---|---|---|")
    for name, values in rates.items():
        print(f"| {name} | {statistics.median(values):,.0f} | {min(values):,.0f} | {max(values):,.0f} |")
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    if arguments.profile:
        for name, (step, source) in variants.items():
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                run_block(step, source, 10)
            print(name)
            print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=70))


if __name__ == "__main__":
    main()
