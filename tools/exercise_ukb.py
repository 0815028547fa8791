"""Run the full-size UK Biobank recipe, shortened, on generated volumes, and say what the whole would take.

    python tools/exercise_ukb.py out/ukb-exercise
    python tools/exercise_ukb.py out/ukb-tiny --size 24 28 24 --net resnet-mini --heads rtrl-cp --device cpu

The volumes are SIMULATED (noise on an ellipsoid, as gzipped NIfTI of uint8 in a BIDS folder): the numbers say how fast
and with how much memory docs/how-to/ukbiobank.toml trains, nothing about heads. Each volume stands for several people,
by links, so that an epoch has steps enough to be timed. Every head is trained from volumes that stream from the
cache, as 11,500 would; the first head once more with all of them in memory. Only the epochs, with the milestones in
proportion, and the data differ from the recipe; ranks are the paper's where size and network are. A second start
measures all anew.

OUT/exercise.json has all that is printed: volumes per second, peak memory, what the cache costs, and projections.
"""

import argparse
import gc
import json
import shutil
import time
from pathlib import Path
from unittest import mock

import nibabel
import numpy as np
import torch

from tensor_dropout.progress import show_progress
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.run_records import describe_environment, write_json
from tensor_dropout_lab.training import loop
from tensor_dropout_lab.training.config import resolve_config

RECIPE = Path(__file__).resolve().parents[1] / "docs" / "how-to" / "ukbiobank.toml"
SIZE = (182, 218, 182)
TUCKER = [128, 6, 7, 6, 1]
RANKS = {"fc": None, "trl-tucker": TUCKER, "rtrl-tucker": TUCKER, "trl-cp": 82, "rtrl-cp": 82}
EPOCHS, TRAINED, PEOPLE, GPUS = 100, 11_500, 19_100, 8
COVERS = (
    "examples_per_second is that of result.json: all steps over the seconds inside epochs, with the start of the "
    "readers, waiting for data, the first steps, the timing of convolutions and the capture of the CUDA graph; without "
    "evaluation and the checkpoint after an epoch. volumes_per_second is the same without the first epoch."
)


def generate(folder, volumes, links, size, seed=0):
    """A BIDS folder of ``volumes`` files, each linked under the names of ``links`` people; what is there is kept."""
    rng = np.random.default_rng(seed)
    axes = np.meshgrid(*(np.linspace(-1, 1, cells, dtype=np.float32) for cells in size), indexing="ij", sparse=True)
    radius = np.sqrt(sum((axis / 0.85) ** 2 for axis in axes))
    ages = rng.uniform(45, 80, volumes)
    rows = ["participant_id\tage"]
    with show_progress("generating volumes", volumes) as advance:
        for number, age in enumerate(ages):
            names = [f"sub-{number:04d}x{link:02d}" for link in range(links)]
            paths = [folder / name / "anat" / f"{name}_T1w.nii.gz" for name in names]
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
            if not paths[0].is_file():
                inside = radius < 1.15 - age / 400
                noise = rng.integers(0, 64, size, dtype=np.uint8)
                nibabel.save(nibabel.Nifti1Image(inside * (noise + np.uint8(96)), np.eye(4)), paths[0])
            for path in paths[1:]:
                if not path.is_file():
                    path.hardlink_to(paths[0])
            rows += [f"{name}\t{age:.1f}" for name in names]
            advance(1)
    (folder / "participants.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    description = {"Name": "SIMULATED volumes: noise on an ellipsoid; no person was scanned", "BIDSVersion": "1.10.0"}
    (folder / "dataset_description.json").write_text(json.dumps(description) + "\n", encoding="utf-8")


def measure_cache(data, people):
    """Seconds to prepare the cache and to start with one, and its bytes, each for one volume."""
    shutil.rmtree(data / ".cache", ignore_errors=True)
    seconds = []
    for _ in range(2):
        started = time.monotonic()
        load_data("nifti", root=data, memory=0.0)
        seconds.append(time.monotonic() - started)
    (store,) = (data / ".cache").glob("*.npy")
    return {
        "seconds_per_volume": seconds[0] / people,
        "start_seconds_per_volume": seconds[1] / people,
        "bytes_per_volume": store.stat().st_size / people,
        "prepared": "decompressed, put in order and written, with the reader's threads; start: headers and names read",
    }


def configure(given, data, head, memory):
    """The recipe with another length, other data and this head."""
    held = min(32, given.volumes * given.links // 5)  # evaluation takes 32 volumes at once
    as_printed = tuple(given.size) == SIZE and given.net == "resnet18"
    milestones = {round(given.epochs * share) for share in (0.25, 0.5, 0.75)}
    overrides = {
        "data.root": str(data),
        "data.options.test": held,
        "data.options.validation": held,
        "data.options.memory": memory,
        "net.name": given.net,
        "net.head": head,
        "net.rank": RANKS[head] if as_printed else None,
        "net.theta": 0.8 if head.startswith("rtrl") else None,
        "net.modes": "all" if head == "rtrl-tucker" else None,
        "schedule.milestones": sorted(milestone for milestone in milestones if 0 < milestone < given.epochs),
        "run.epochs": given.epochs,
        "run.evaluate_every": given.epochs,
        "run.device": given.device,
    }
    overrides |= {} if given.workers is None else {"run.workers": given.workers}
    return resolve_config(RECIPE, overrides)


def measure_run(config, folder):
    """Train in a fresh folder: speed, and peak memory until the first evaluation and in all."""
    shutil.rmtree(folder, ignore_errors=True)
    peaks, evaluate = {}, loop.evaluate

    def note_and_evaluate(*arguments, **settings):
        peaks.setdefault("training", peak_memory())
        return evaluate(*arguments, **settings)

    if torch.cuda.is_available():
        gc.collect()  # what is left of the run before must not count
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with mock.patch.object(loop, "evaluate", note_and_evaluate):
        result = loop.train(config, folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    later = lines[-1]["seconds"] - lines[0]["seconds"]
    epochs, volumes = config.run.epochs, result["steps"] * config.run.batch
    kept = ("examples_per_second", "seconds", "steps", "parameters", "device", "precision", "speed")
    return {
        **{key: result[key] for key in kept},
        "volumes_per_second": volumes * (epochs - 1) / epochs / later if later else result["examples_per_second"],
        "peak_bytes_training": peaks["training"],
        "peak_bytes_with_evaluation": peak_memory(),
        "test_mae": result["test"]["mae"],
    }


def peak_memory():
    """Bytes that tensors took on the GPU at most, since it was last reset; None on a CPU."""
    return (torch.cuda.max_memory_allocated() or None) if torch.cuda.is_available() else None


def project(rate, cache):
    """What the whole recipe would take at this rate: hours, and the gigabytes (10⁹ bytes) that are read in a second."""
    hours, read = EPOCHS * TRAINED / rate / 3600, rate * cache["bytes_per_volume"] / 1e9
    return {
        "hours_1_gpu": hours,
        f"hours_{GPUS}_gpus_if_perfect": hours / GPUS,
        "read_gb_per_second_1_gpu": read,
        f"read_gb_per_second_{GPUS}_gpus_if_perfect": GPUS * read,
    }


def main():
    """Generate, prepare, train, project."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--volumes", type=int, default=24, help="files to generate")
    parser.add_argument("--links", type=int, default=8, help="people that each file stands for")
    parser.add_argument("--size", type=int, nargs=3, default=SIZE, metavar=("X", "Y", "Z"), help="voxels")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--net", default="resnet18")
    parser.add_argument("--heads", nargs="+", choices=list(RANKS), default=["fc", "rtrl-tucker", "rtrl-cp"])
    parser.add_argument("--workers", type=int, help="processes that read; by default the recipe's")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    people, data = given.volumes * given.links, given.out / "data"
    generate(data, given.volumes, given.links, given.size)
    cache = measure_cache(data, people)
    record = {
        "data": f"SIMULATED: {given.volumes} volumes of noise on an ellipsoid, for {people} people",
        "size": list(given.size),
        "net": given.net,
        "epochs": given.epochs,
        "covers": COVERS,
        "cache": cache,
        "projection": {
            "of": f"{EPOCHS} epochs of {TRAINED:,} volumes, without evaluation; a cache of {PEOPLE:,} volumes",
            "read": "what streaming asks of the disk; here the cache stayed in memory once it was written",
            "cache_gb": PEOPLE * cache["bytes_per_volume"] / 1e9,
            "cache_hours": PEOPLE * cache["seconds_per_volume"] / 3600,
            "start_seconds": PEOPLE * cache["start_seconds_per_volume"],
            "gpus": f"{GPUS} GPUs as if each were as fast as one alone; a batch of 8 leaves each of them one volume",
        },
        "environment": describe_environment("nibabel"),
        "runs": [],
    }
    plan = [(head, "stream") for head in given.heads] + [(given.heads[0], "memory")]
    record["planned_runs"] = len(plan)
    write_json(given.out / "exercise.json", record)
    for head, reader in plan:
        config = configure(given, data, head, 0.0 if reader == "stream" else 1e6)
        found = measure_run(config, given.out / "runs" / f"{head}-{reader}")
        settings = {"head": head, "rank": config.net.rank, "reader": reader}
        settings |= {"batch": config.run.batch, "workers": config.run.workers}
        record["runs"].append({**settings, **found, "projection": project(found["volumes_per_second"], cache)})
        write_json(given.out / "exercise.json", record)  # after every run: the next may be the one that fails
    print(json.dumps(record, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
