"""Run the ImageNet recipes, shortened, on a generated folder of JPEG files in ImageNet's layout.

    python tools/exercise_imagenet.py out/imagenet-exercise --recipes fc theta-0.6 --epochs 10

The pictures are SIMULATED (a coloured pattern per class under noise): the numbers say that training, single-crop
evaluation with top-1 and top-5, and the attacks run as the recipes say, nothing about heads. Only the epochs, with the
milestones in proportion, the batch, with the rate in proportion, and the pictures differ from the full run. Records go
to OUT/results, as `tensor-dropout reproduce` would lay them out.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from tensor_dropout.progress import show_progress
from tensor_dropout_lab.experiments.cells import RunContext, find_cell, run_cell
from tensor_dropout_lab.experiments.paper import list_cells


def generate(folder, classes, train, validation, side, seed=0):
    """ROOT/train/CLASS/*.JPEG and ROOT/val/CLASS/*.JPEG; files that are there are kept."""
    rng = np.random.default_rng(seed)
    patterns = rng.uniform(0, 255, (classes, 5, 5, 3))
    with show_progress("generating JPEG files", classes * (train + validation)) as advance:
        for part, number in (("train", train), ("val", validation)):
            for label in range(classes):
                class_folder = folder / part / f"n{label:08d}"
                class_folder.mkdir(parents=True, exist_ok=True)
                for k in range(number):
                    path = class_folder / f"{part}_{k:05d}.JPEG"
                    if not path.is_file():
                        pixels = patterns[label] + rng.normal(0, 60, patterns[label].shape)
                        coarse = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                        coarse.resize((side + 40 * (k % 3), side), Image.Resampling.BICUBIC).save(path, quality=90)
                    advance(1)


def main():
    """Generate, train, evaluate, attack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recipes", nargs="+", default=["fc", "theta-0.6"])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--classes", type=int, default=260)
    parser.add_argument("--train", type=int, default=4, help="pictures per class")
    parser.add_argument("--validation", type=int, default=4, help="pictures per class")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--images", type=int, default=1000, help="attacked pictures")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    data = given.out / "data"
    generate(data, given.classes, given.train, given.validation, given.side)
    context = RunContext(given.out / "results", {"imagefolder": str(data)}, given.device)
    milestones = [round(given.epochs * share) for share in (1 / 3, 2 / 3)]
    shorter = {
        "run.epochs": given.epochs,
        "run.batch": given.batch,
        "optimizer.lr": 0.1 * given.batch / 256,
        "run.evaluate_every": given.epochs,
        "schedule.milestones": sorted({milestone for milestone in milestones if 0 < milestone < given.epochs}),
    }
    for recipe in given.recipes:
        (attacked,) = list_cells(f"imagenet-attacks/{recipe}", "paper")
        run = replace(attacked.of, config={**attacked.of.config, **shorter})
        evaluation = {**attacked.evaluation, "images": given.images}
        for cell in (run, replace(attacked, of=run, evaluation=evaluation)):
            run_cell(cell, context)
            found = find_cell(cell, context.base)
            print(f"{cell.experiment}/{cell.slug}: {found.state} {found.detail}")
            if found.result is not None:
                print(
                    json.dumps({key: found.result[key] for key in ("test", "seconds", "examples_per_second", "device")})
                )
            if found.evaluation is not None:
                print(json.dumps(found.evaluation["summary"]["worst_case"]))
                print(found.evaluation["summary"]["audit"]["verdict"])


if __name__ == "__main__":
    main()
