"""Write SIMULATED heads as a BIDS folder of T1-weighted scans with a table of ages.

    python tools/make_bids.py scans --people 60 --size 32 40 32

The heads are those of the library's phantom: with age the cortex thins and the ventricles grow, more than in people.
Nobody was scanned. The folder has what ``tensor-dropout train --data nifti`` expects of a real one: participants.tsv
(participant_id, age, sex), its description with the units, dataset_description.json, which says SIMULATED, and
sub-001/anat/sub-001_T1w.nii.gz, ... The sexes are drawn and change nothing in a head.
"""

import argparse
import json
from pathlib import Path

import nibabel
import numpy as np

from tensor_dropout_lab.data.phantom import FIELD_OF_VIEW, draw_ages, simulate_heads

DESCRIPTION = {
    "Name": "SIMULATED heads, drawn by tensor-dropout; no person was scanned",
    "BIDSVersion": "1.10.0",
    "DatasetType": "raw",
    "License": "BSD-3-Clause",
}
COLUMNS = {
    "age": {"Description": "age that the head was drawn for", "Units": "years"},
    "sex": {"Description": "drawn at random; without effect on the head", "Levels": {"F": "female", "M": "male"}},
}


def make_bids(folder, people=60, size=(32, 40, 32), ages=(20.0, 80.0), seed=0):
    """Write the folder; equal arguments give equal scans.

    Args:
        folder: where to; it is made, and files of the same names are replaced.
        people: how many heads, each with one scan.
        size: voxels from left to right, back to front, bottom to top; the field of view stays 160×200×160 mm.
        ages: the youngest and the oldest age in years; uniform between them.
        seed: of ages, sexes and heads.

    Returns:
        The paths of the scans, in the order of the table.
    """
    heads = simulate_heads(draw_ages(people, ages, seed), size=tuple(size), seed=seed)
    sexes = np.random.default_rng(seed).choice(["F", "M"], people)
    edges = [extent / cells for extent, cells in zip(FIELD_OF_VIEW, size, strict=True)]
    affine = np.diag([*edges, 1.0])
    affine[:3, 3] = [-edge * (cells - 1) / 2 for edge, cells in zip(edges, size, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    rows, paths = ["participant_id\tage\tsex"], []
    for number, (volume, age, sex) in enumerate(zip(heads.volumes, heads.ages, sexes, strict=True), 1):
        name = f"sub-{number:03d}"
        path = folder / name / "anat" / f"{name}_T1w.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(volume[0].numpy(), affine), path)
        rows.append(f"{name}\t{float(age):.1f}\t{sex}")
        paths.append(path)
    (folder / "participants.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    for name, content in (("participants.json", COLUMNS), ("dataset_description.json", DESCRIPTION)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return paths


def main():
    """Read the command line, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--people", type=int, default=60)
    parser.add_argument("--size", type=int, nargs=3, default=(32, 40, 32), metavar=("X", "Y", "Z"), help="voxels")
    parser.add_argument("--ages", type=float, nargs=2, default=(20.0, 80.0), metavar=("YOUNGEST", "OLDEST"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    paths = make_bids(given.folder, given.people, given.size, given.ages, given.seed)
    print(f"Wrote {len(paths)} SIMULATED scans to {given.folder}")


if __name__ == "__main__":
    main()
