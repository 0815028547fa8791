"""NIfTI folders: flat and BIDS layouts, tables, preparation, cache, splits by subject, and every kind of bad input."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data import StreamSplit, TensorSplit, load_data
from tensor_dropout_lab.data.nifti import cache as module
from tensor_dropout_lab.data.nifti.scans import find_place, find_row
from tensor_dropout_lab.data.nifti.volumes import read_input, resample_volume

nibabel = pytest.importorskip("nibabel", reason="needs nibabel")

SHAPE = (10, 12, 8)


def make_volume(seed: int, shape=SHAPE, margin: int = 2) -> np.ndarray:
    """Random numbers 1..200 in a box, 0 around it."""
    volume = np.zeros(shape, dtype=np.uint8)
    inside = tuple(slice(margin, size - margin) for size in shape)
    volume[inside] = np.random.default_rng(seed).integers(1, 200, volume[inside].shape)
    return volume


def write_volume(path: Path, values: np.ndarray, affine=None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([2.0, 2, 2, 1]) if affine is None else affine), path)


def write_table(root: Path, lines: list[str], name: str = "participants.tsv") -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def flat(tmp_path):
    """Twenty people, one file each beside the table; their ages are 20, 23, 26, ..."""
    root = tmp_path / "flat"
    for i in range(20):
        write_volume(root / f"sub-{i:02d}_T1w.nii.gz", make_volume(i))
    write_table(root, ["participant_id\tage\tsex", *(f"sub-{i:02d}\t{20 + 3 * i}\tF" for i in range(20))])
    return root


@pytest.fixture
def bids(tmp_path):
    """Eight people with two sessions each, in BIDS' folders, with a table by session."""
    root = tmp_path / "bids"
    lines = ["participant_id\tsession_id\tage\theight"]
    for i in range(8):
        for session in (1, 2):
            name = f"sub-{i:02d}_ses-{session}_T1w.nii.gz"
            write_volume(root / f"sub-{i:02d}" / f"ses-{session}" / "anat" / name, make_volume(10 * i + session))
            lines.append(f"sub-{i:02d}\tses-{session}\t{30 + i + 0.5 * session}\t{150 + i}")
    write_table(root, lines)
    (root / "dataset_description.json").write_text(json.dumps({"Name": "Our people", "License": "CC0"}))
    return root


def load(root, **options):
    return load_data("nifti", root=root, **options)


def all_names(data) -> list[str]:
    return [name for part in (data.train, data.validation, data.test) if part is not None for name in part.names]


def people(split) -> set[str]:
    return {name.split("/")[-1].split("_")[0] for name in split.names}


# Layouts.


def test_a_flat_folder_is_loaded(flat):
    data = load(flat)
    assert isinstance(data.train, TensorSplit)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [12, 4, 4]
    assert sorted(all_names(data)) == [f"sub-{i:02d}_T1w" for i in range(20)]
    for part in (data.train, data.validation, data.test):
        for volume, age, name in zip(part.inputs, part.targets, part.names, strict=True):
            number = int(name[4:6])
            assert age == 20 + 3 * number
            assert np.array_equal(volume[0].numpy(), make_volume(number))
    assert data.train.inputs.dtype == torch.uint8
    assert (data.task, data.outputs, data.target, data.input_shape) == ("regression", 1, "age", (1, *SHAPE))
    prepared = data.prepare(data.train.inputs)
    torch.testing.assert_close(prepared.flatten(1).std(1, correction=0), torch.ones(12), atol=1e-4, rtol=0)
    assert data.augment(prepared).shape == prepared.shape
    assert not data.simulated
    assert "20 NIfTI volumes of 20 people" in data.provenance


def test_a_bids_folder_is_loaded_with_sessions_of_one_person_together(bids):
    data = load(bids, test=0.25, validation=0.25)
    assert len(all_names(data)) == 16
    parts = [people(part) for part in (data.train, data.validation, data.test)]
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]
    assert all(
        len(part) == 2 * len(own) for part, own in zip((data.train, data.validation, data.test), parts, strict=True)
    )
    row = data.train.names.index(next(name for name in data.train.names if "ses-2" in name))
    assert data.train.targets[row] == 31 + int(data.train.names[row][4:6])
    assert data.provenance == "Our people: 16 NIfTI volumes of 8 people; CC0."


def test_one_row_per_person_serves_all_sessions(bids):
    write_table(bids, ["participant_id\tage", *(f"{i:02d}\t{30 + i}" for i in range(8))])  # ids without "sub-"
    assert len(all_names(load(bids))) == 16


def test_several_targets_and_a_csv_with_other_columns(bids):
    (bids / "participants.tsv").unlink()
    write_table(bids, ["who,age,height", *(f"sub-{i:02d},{30 + i},{150 + i}" for i in range(8))], "people.csv")
    data = load(bids, subject="who", target=["age", "height"], provenance="Ours.")
    assert (data.train.targets.shape[1], data.outputs, data.target) == (2, 2, "age, height")
    assert torch.equal(data.train.targets[:, 1] - data.train.targets[:, 0], torch.full((len(data.train),), 120.0))
    assert data.provenance == "Ours."
    by_name = load(bids, subject="who", table="people.csv")
    by_path = load(bids, subject="who", table=bids / "people.csv")
    assert by_name.train.names == by_path.train.names


def test_several_kinds_of_image_must_be_told_apart(flat):
    for i in range(20):
        write_volume(flat / f"sub-{i:02d}_T2w.nii.gz", make_volume(i))
    with pytest.raises(TensorDropoutError, match=r"several kinds of image \(T1w, T2w\); choose one, e.g. images='"):
        load(flat)
    assert len(all_names(load(flat, images="*_T2w.nii*"))) == 20


def test_derivatives_and_hidden_folders_are_left_out(flat):
    write_volume(flat / "derivatives" / "sub-00_T1w.nii.gz", make_volume(0))
    write_volume(flat / ".old" / "sub-00_T1w.nii.gz", make_volume(0))
    assert len(all_names(load(flat))) == 20
    assert len(all_names(load(flat, images="derivatives/*.nii.gz", missing="skip", test=0, validation=0))) == 1


PEOPLE = [f"{i}" for i in range(1, 9)]


@pytest.mark.parametrize(
    ("layout", "stranger"),
    [
        ("{}_1_T1.nii.gz", "99_1_T1.nii.gz"),  # visit 1, not person 1
        ("sub-{}_run-1_T1w.nii.gz", "sub-99_1_T1w.nii.gz"),
        ("{}/1/T1.nii.gz", "99/1/T1.nii.gz"),
        ("sub-{}/anat/T1.nii.gz", "sub-99/1/T1.nii.gz"),
        ("1/{}_T1.nii.gz", "1/99_T1.nii.gz"),
        ("sub-{0}/anat/sub-{0}_T1w.nii.gz", "sub-1/anat/sub-99_T1w.nii.gz"),
    ],
)
def test_a_scan_of_nobody_in_the_table_gets_nobodys_age(tmp_path, layout, stranger):
    write_table(tmp_path, ["participant_id\tage", *(f"{i}\t{20 + 5 * int(i)}" for i in PEOPLE)])
    for i in PEOPLE:
        write_volume(tmp_path / layout.format(i), make_volume(int(i)))
    data = load(tmp_path, test=0, validation=0)
    expected = {layout.format(i).removesuffix(".nii.gz"): 20 + 5 * int(i) for i in PEOPLE}
    assert dict(zip(data.train.names, data.train.targets.tolist(), strict=True)) == expected
    write_volume(tmp_path / stranger, make_volume(99))
    with pytest.raises(TensorDropoutError, match=f"1 images without a row in the table: {stranger}"):
        load(tmp_path)
    assert load(tmp_path, missing="skip", test=0, validation=0).train.names == data.train.names


def test_a_name_may_be_all_of_a_file_name_or_a_folder(tmp_path):
    rows = {("IXI_07", ""): 60.0, ("8", ""): 61.0}
    assert find_row(Path("IXI_07.nii.gz"), rows) == ("IXI_07", "")
    assert find_row(Path("site/8/T1.nii"), rows, 1) == ("8", "")
    assert find_place([Path("site/8/T1.nii"), Path("site/9/T1.nii")], rows) == 1


def test_quotes_in_a_table_with_tabs_are_characters(flat):
    table, whole = flat / "participants.tsv", all_names(load(flat))
    lines = table.read_text()
    table.write_text(lines.replace("sub-03\t29\tF", 'sub-03\t29\t"left handed'))
    assert all_names(load(flat)) == whole
    quoted = ["\t".join(f'"{cell}"' for cell in line.split("\t")) for line in lines.splitlines()]  # as R writes it
    write_table(flat, [*quoted, ""])
    assert all_names(load(flat)) == whole


# Preparation.


def test_axes_are_reordered_to_ras(flat):
    volume = make_volume(0)
    stored = volume[::-1].transpose(1, 0, 2)  # axes: front, left, up
    affine = np.array([[0, -2.0, 0, 0], [2, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 1]])
    write_volume(flat / "sub-00_T1w.nii.gz", stored, affine)
    data = load(flat, test=0, validation=0)
    assert np.array_equal(data.train.inputs[data.train.names.index("sub-00_T1w"), 0].numpy(), volume)


def test_other_numbers_are_kept_as_standardized_halves(flat):
    volumes = {i: 1000 * make_volume(i).astype(np.float32) + 7 for i in range(20)}
    for i, volume in volumes.items():
        write_volume(flat / f"sub-{i:02d}_T1w.nii.gz", volume)
    data = load(flat)
    assert (data.train.inputs.dtype, data.bounds) == (torch.float16, None)
    expected = data.prepare(torch.from_numpy(volumes[int(data.train.names[0][4:6])])[None, None])
    torch.testing.assert_close(data.prepare(data.train.inputs[:1]), expected, atol=2e-3, rtol=0)


def test_resampling_keeps_the_field_of_view(flat):
    data = load(flat, resample=4.0)
    assert data.input_shape == (1, 5, 6, 4)
    blocks = torch.from_numpy(make_volume(int(data.train.names[0][4:6]))).float().view(5, 2, 6, 2, 4, 2)
    torch.testing.assert_close(data.train.inputs[0, 0].float(), blocks.mean(dim=(1, 3, 5)), atol=0.51, rtol=0)
    assert load(flat, resample=1.0).input_shape == (1, 20, 24, 16)


@pytest.mark.parametrize("crop", ["brain", "common"])
def test_cropping_cuts_to_the_brain(flat, crop):
    shifted = np.roll(make_volume(0), 1, axis=0)
    write_volume(flat / "sub-00_T1w.nii.gz", shifted)
    data = load(flat, crop=crop, test=0, validation=0)
    first = data.train.inputs[data.train.names.index("sub-00_T1w"), 0].numpy()
    if crop == "brain":  # each by its own box
        assert data.input_shape == (1, 6, 8, 4)
        assert np.array_equal(first, make_volume(0)[2:-2, 2:-2, 2:-2])
    else:  # one box around all of them
        assert data.input_shape == (1, 7, 8, 4)
        assert np.array_equal(first, shifted[2:-1, 2:-2, 2:-2])


@pytest.mark.parametrize("size", [None, (4, 5, 3)])
def test_resampled_voxels_lie_around_the_middle_of_the_brain(flat, size):
    """Wherever the brain is in its field of view, by less than a resampled voxel: the same voxels come out."""
    brain = 100 * (make_volume(0) > 0).astype(np.uint8)
    for i in range(4):
        write_volume(flat / f"sub-{i:02d}_T1w.nii.gz", np.roll(brain, (i % 2, i // 2, i % 3 - 1), axis=(0, 1, 2)))
    data = load(flat, resample=5.0, crop="brain", size=size, test=0, validation=0)
    assert data.input_shape == (1, *(size or (3, 4, 2)))  # the brain: 12×16×8 mm
    moved = [data.train.inputs[data.train.names.index(f"sub-{i:02d}_T1w")] for i in range(4)]
    assert moved[0].max() > 0
    for each in moved:
        assert torch.equal(each, moved[0])
        assert torch.equal(each, each.flip(1, 2, 3))  # in the middle


@pytest.mark.parametrize("size", [None, (4, 5, 3)])
def test_a_file_is_resampled_around_the_middle_of_its_brain_too(flat, size):
    options = {"resample": 5.0, "crop": "brain", "size": size}
    data = load(flat, **options)
    stored = data.prepare(data.test.inputs)
    for volume, name in zip(stored, data.test.names, strict=True):
        own = read_input(flat / f"{name}.nii.gz", data.input_shape, options)
        torch.testing.assert_close(own, volume, rtol=0, atol=1e-5)


@pytest.mark.parametrize("edge", [0.7, 1.0, 2.6])
def test_resampling_keeps_positions_and_amounts(edge):
    """The centre of mass stays, in mm, and so does the sum over the volume."""
    volume = np.zeros((20, 24, 16), dtype=np.float32)
    volume[6:13, 9:14, 5:9] = np.random.default_rng(0).random((7, 5, 4)) + 1
    voxel = (1.5, 1.0, 2.0)
    found = resample_volume(volume, voxel, edge)

    def locate(values, edges):
        weights = [values.sum(tuple(j for j in range(3) if j != i)) for i in range(3)]
        centres = [(np.arange(len(w)) + 0.5 - len(w) / 2) * e for w, e in zip(weights, edges, strict=True)]
        return [float((w * c).sum() / w.sum()) for w, c in zip(weights, centres, strict=True)]

    np.testing.assert_allclose(locate(found, (edge,) * 3), locate(volume, voxel), atol=0.05)
    assert found.sum() * edge**3 == pytest.approx(volume.sum() * np.prod(voxel), rel=0.02)


def test_padding_and_cutting_to_a_size(flat):
    data = load(flat, size=[12, 8, 9])
    volume = make_volume(int(data.train.names[0][4:6]))
    expected = np.zeros((12, 8, 9), dtype=np.uint8)
    expected[1:11, :, :8] = volume[:, 2:10]
    assert np.array_equal(data.train.inputs[0, 0].numpy(), expected)


def test_different_shapes_need_a_crop_or_a_size(flat):
    write_volume(flat / "sub-07_T1w.nii.gz", make_volume(7, (11, 12, 8)))
    with pytest.raises(
        TensorDropoutError, match=r"differ in shape: .*sub-00.* \(10, 12, 8\), .*sub-07.* \(11, 12, 8\); set crop"
    ):
        load(flat)
    with pytest.raises(TensorDropoutError, match="differ in shape"):
        load(flat, crop="common")
    assert load(flat, crop="brain").input_shape == (1, 7, 8, 4)
    assert load(flat, size=(8, 8, 8)).input_shape == (1, 8, 8, 8)


def test_voxels_that_differ_a_little_warn_unless_resampled(flat):
    write_volume(flat / "sub-07_T1w.nii.gz", make_volume(7), np.diag([2.0, 2, 2.1, 1]))
    with pytest.warns(UserWarning, match=r"voxels differ.*sub-07_T1w; set resample"):
        load(flat)


@pytest.mark.parametrize("odd", [0, 7])
def test_voxels_that_differ_by_more_than_a_tenth_are_refused_unless_resampled(flat, odd):
    load(flat)
    turned = np.array([[0, 2.0, 0, 0], [3, 0, 0, 0], [0, 0, 2, 0], [0, 0, 0, 1]])  # stored: y, x, z
    for affine, size in ((np.diag([2.0, 3, 2, 1]), SHAPE), (turned, (12, 10, 8))):
        write_volume(flat / f"sub-{odd:02d}_T1w.nii.gz", make_volume(odd, size), affine)
        message = rf"sub-{odd:02d}_T1w.nii.gz has voxels of 2×3×2 mm, other scans .* 2×2×2 mm; set resample to one edge"
        with pytest.raises(TensorDropoutError, match=message):
            load(flat, size=SHAPE)
        assert load(flat, size=SHAPE, resample=2.0).input_shape == (1, *SHAPE)


def test_a_header_that_states_two_voxel_sizes_is_refused(flat):
    path = flat / "sub-05_T1w.nii"
    (flat / "sub-05_T1w.nii.gz").unlink()
    write_volume(path, make_volume(5))
    content = path.read_bytes()

    def state(edge):  # bytes 80 to 92 are pixdim[1:4]; the affine stays at 2 mm
        path.write_bytes(content[:80] + np.full(3, edge, "<f4").tobytes() + content[92:])

    state(2.015)
    load(flat)
    state(1)
    message = r"sub-05_T1w\.nii has voxels of 1×1×1 mm by its pixdim, but of 2×2×2 mm by its affine .*; correct"
    for options in ({}, {"resample": 4.0}):
        with pytest.raises(TensorDropoutError, match=message):
            load(flat, **options)
        with pytest.raises(TensorDropoutError, match=message):
            read_input(path, (1, *SHAPE), options)


@pytest.mark.parametrize("resample", [None, 1.0])
def test_brains_that_a_size_cuts_are_warned_of_when_they_are_prepared(flat, resample):
    write_volume(flat / "sub-07_T1w.nii.gz", make_volume(7, margin=1))  # the others: 6×8×4 voxels of 2 mm
    scale = 1 if resample is None else 2
    size, larger = ((scale * x, scale * y, scale * z) for x, y, z in ((6, 10, 5), (8, 10, 6)))
    message = rf"cuts 1 of 20 brains, sub-07_T1w of \({larger[0]}, .* voxels most; size \({larger[0]}, {larger[1]}, "
    with pytest.warns(UserWarning, match=message):
        load(flat, crop="brain", resample=resample, size=size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(flat, crop="brain", resample=resample, size=larger)
        load(flat, crop="brain", resample=resample)


@pytest.mark.parametrize("resample", [None, 1.0])
def test_a_brain_larger_than_the_networks_box_is_not_cut_silently(tmp_path, resample):
    path, scale = tmp_path / "new.nii.gz", 1 if resample is None else 2
    write_volume(path, np.pad(np.ones((10, 22, 10), dtype=np.uint8), 2))
    options = {"crop": "brain", "resample": resample}

    def read(*size, **more):
        return read_input(path, (1, *(scale * cells for cells in size)), {**options, **more})

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(11, 22, 10)
    with pytest.warns(UserWarning, match=r"new\.nii\.gz.* voxels, the network takes .*; what is outside is cut off"):
        read(10, 20, 10)
    with pytest.raises(
        TensorDropoutError, match=r"the brain of .*new\.nii\.gz.*, the largest that it was trained on; "
    ):
        read(10, 19, 10)
    with pytest.warns(UserWarning, match="cut off"):
        read(10, 11, 10, size=(10, 11, 10))


# Cache.


def test_prepared_volumes_are_cached_until_a_file_or_a_setting_changes(flat, monkeypatch):
    first = load(flat)
    read = []
    original = module.read_volume
    monkeypatch.setattr(module, "read_volume", lambda path, *settings: read.append(path) or original(path, *settings))
    assert torch.equal(load(flat).train.inputs, first.train.inputs)
    assert not read
    load(flat, size=(8, 8, 8))
    assert len(read) == 20
    write_volume(flat / "sub-07_T1w.nii.gz", make_volume(99))
    os.utime(flat / "sub-07_T1w.nii.gz", ns=(1, 1))
    again = load(flat, test=0, validation=0)
    assert len(read) == 40
    assert np.array_equal(again.train.inputs[again.train.names.index("sub-07_T1w"), 0].numpy(), make_volume(99))


def test_a_damaged_cache_is_made_again(flat):
    first = load(flat)
    (path,) = (flat / ".cache").glob("*.npy")
    path.write_bytes(path.read_bytes()[:500])
    assert torch.equal(load(flat).train.inputs, first.train.inputs)


def test_a_failed_preparation_leaves_no_file(flat):
    values = make_volume(5).astype(np.float32)
    values[4, 4, 4] = np.nan
    write_volume(flat / "sub-05_T1w.nii.gz", values)
    with pytest.raises(TensorDropoutError):
        load(flat)
    assert [path.suffix for path in (flat / ".cache").iterdir()] == [".lock"]


def test_the_cache_goes_where_it_can_be_written(flat, tmp_path, monkeypatch):
    (flat / ".cache").write_text("a file, so that no folder can be made here")
    monkeypatch.setattr(module, "_user_cache", lambda: tmp_path / "home")
    load(flat)
    assert len(list((tmp_path / "home" / "tensor-dropout").glob("*.npy"))) == 1
    load(flat, cache=tmp_path / "mine")
    assert len(list((tmp_path / "mine").glob("*.npy"))) == 1
    with pytest.raises(TensorDropoutError, match=r"cannot write to .*set cache"):
        load(flat, cache=flat / ".cache" / "inside")


def test_a_read_only_folder_stays_as_it_is(flat, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_user_cache", lambda: tmp_path / "home")
    flat.chmod(0o555)
    try:
        load(flat)
        assert not (flat / ".cache").exists()
    finally:
        flat.chmod(0o755)
    assert len(list((tmp_path / "home" / "tensor-dropout").glob("*.npy"))) == 1


def test_sets_that_do_not_fit_stream_from_the_cache(flat):
    whole, data = load(flat), load(flat, memory=1e-6)
    assert isinstance(data.train, StreamSplit)
    assert data.train.names == whole.train.names
    copy = pickle.loads(pickle.dumps(data.train))
    assert torch.equal(copy[3][0], whole.train.inputs[3])
    volumes, ages = next(iter(DataLoader(data.train, batch_size=12, num_workers=1)))
    assert torch.equal(volumes, whole.train.inputs)
    assert torch.equal(ages, whole.train.targets)


def test_prepared_volumes_that_nobody_uses_are_removed(flat):
    """Those not used for 30 days, when others are prepared; files of other names stay."""
    folder, sizes = flat / ".cache", {"unused": (8, 8, 8), "used": (8, 8, 6), "read": (8, 8, 5)}
    paths, loaded = {}, {}
    for name, size in sizes.items():
        before = set(folder.glob("*.npy"))
        loaded[name] = load(flat, size=size, memory=0)
        (paths[name],) = set(folder.glob("*.npy")) - before
    notes = folder / "nifti-notes.npy"
    notes.touch()
    month_ago = time.time() - 31 * 24 * 3600
    for path in (*paths.values(), notes):
        os.utime(path, (month_ago, month_ago))
    load(flat, size=sizes["used"])
    loaded["read"].train.set_epoch(3, seed=0)
    assert paths["unused"].exists()  # nothing new was prepared yet
    load(flat)
    assert [name for name, path in paths.items() if not path.exists()] == ["unused"]
    assert notes.exists()
    assert len(set(folder.glob("*.npy")) - {*paths.values(), notes}) == 1
    locks = {path.name for path in folder.glob("*.lock")}
    assert locks == {f".{path.name}.lock" for path in folder.glob("nifti-?*.npy") if path != notes}


# Splits.


def test_folds_test_everybody_once_and_balance_the_target(flat):
    tested, means = [], []
    for fold in range(4):
        data = load(flat, folds=4, fold=fold)
        assert (len(data.test), len(data.validation)) == (5, 4)
        assert not set(data.test.names) & {*data.train.names, *data.validation.names}
        tested += data.test.names
        means.append(float(data.test.targets.mean()))
    assert sorted(tested) == [f"sub-{i:02d}_T1w" for i in range(20)]
    assert max(means) - min(means) < 9


def test_splits_depend_on_the_seed_only(flat):
    first = load(flat, seed=1)
    torch.manual_seed(77)
    assert load(flat, seed=1).test.names == first.test.names
    assert load(flat, seed=2).test.names != first.test.names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 1}, "folds must be 2 to 20"),
        ({"folds": 21}, "folds must be 2 to 20"),
        ({"folds": 4, "fold": 4}, "fold must be 0 to 3"),
        ({"test": 20}, "nifti: test"),
        ({"validation": 1.5}, "nifti: validation"),
        ({"crop": "head"}, "option crop is of type .*, got 'head'"),
        ({"missing": "ignore"}, "option missing is of type .*, got 'ignore'"),
        ({"resample": 0}, "resample is the edge"),
        ({"resample": "2"}, "option resample is of type .*, got '2'"),
        ({"size": (8, 8)}, "a size of 3 numbers"),
        ({"size": 8}, "option size is of type .*, got 8"),
        ({"table": "nowhere.tsv"}, "no table nowhere.tsv"),
        ({"images": "*.mgz"}, "no file that matches"),
        ({"target": "weight"}, "no 'weight' column, only participant_id, age, sex"),
        ({"subject": "id"}, "no 'id' column"),
        ({"target": "sex"}, "sex of subject '00' is 'F', not a number"),
    ],
)
def test_bad_options_are_refused(flat, options, message):
    with pytest.raises(TensorDropoutError, match=message):
        load(flat, **options)


# Bad files.


def test_a_missing_folder_gives_the_expected_layout(tmp_path):
    with pytest.raises(TensorDropoutError, match=r"no folder .*Expected: ROOT/participants.tsv .*sub-01_T1w.nii.gz"):
        load(tmp_path / "nowhere")
    with pytest.raises(TensorDropoutError, match="set root"):
        load(None)
    with pytest.raises(TensorDropoutError, match=r"has no tables; set table. Expected"):
        load(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_voxels_that_are_no_numbers_name_the_file(flat, value):
    values = make_volume(5).astype(np.float32)
    values[4, 4, 3:5] = value
    write_volume(flat / "sub-05_T1w.nii.gz", values)
    with pytest.raises(TensorDropoutError, match=r"sub-05_T1w.nii.gz has 2 voxels that are NaN or infinite; repair"):
        load(flat)


@pytest.mark.parametrize("damage", ["text", "truncated", "empty volume", "four-dimensional"])
def test_unreadable_volumes_are_named(flat, damage):
    path = flat / "sub-05_T1w.nii.gz"
    if damage == "text":
        path.write_text("no volume")
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-200])
    elif damage == "empty volume":
        write_volume(path, np.zeros(SHAPE, dtype=np.uint8))
    else:
        write_volume(path, np.stack([make_volume(0)] * 3, -1))
    with pytest.raises(TensorDropoutError, match=r"sub-05_T1w\.nii\.gz"):
        load(flat)


def test_a_fourth_axis_of_length_one_is_dropped(flat):
    write_volume(flat / "sub-05_T1w.nii.gz", make_volume(5)[..., None])
    assert load(flat).input_shape == (1, *SHAPE)


def test_images_without_row_are_named_or_skipped(flat):
    for i in range(30, 37):
        write_volume(flat / f"sub-{i}_T1w.nii.gz", make_volume(i))
    with pytest.raises(
        TensorDropoutError, match=r"7 images without a row .*sub-30_T1w.*sub-34_T1w.nii.gz and 2 more; .*skip"
    ):
        load(flat)
    assert len(all_names(load(flat, missing="skip"))) == 20


def test_rows_without_image_are_named_or_skipped(flat):
    (flat / "sub-03_T1w.nii.gz").unlink()
    with pytest.raises(TensorDropoutError, match=r"1 subjects without an image: 03; "):
        load(flat)
    assert len(all_names(load(flat, missing="skip"))) == 19


@pytest.mark.parametrize("text", ["n/a", "", "NaN"])
def test_missing_targets_are_named_or_skipped(flat, text):
    table = flat / "participants.tsv"
    table.write_text(table.read_text().replace("sub-04\t32", f"sub-04\t{text}"))
    with pytest.raises(TensorDropoutError, match=r"1 subjects without a target: 04; .*missing='skip'"):
        load(flat)
    assert "sub-04_T1w" not in all_names(load(flat, missing="skip"))


@pytest.mark.parametrize("text", ["old", "inf", "3O"])
def test_targets_that_are_no_numbers_are_named(flat, text):
    table = flat / "participants.tsv"
    table.write_text(table.read_text().replace("sub-04\t32", f"sub-04\t{text}"))
    with pytest.raises(TensorDropoutError, match=f"age of subject '04' is '{text}', not a number"):
        load(flat)


def test_a_subject_with_two_rows_is_refused(flat):
    with (flat / "participants.tsv").open("a") as table:
        table.write("sub-04\t33\tF\n")
    with pytest.raises(TensorDropoutError, match="two rows of subject '04'"):
        load(flat)


def test_two_tables_must_be_told_apart(flat):
    (flat / "participants.tsv").rename(flat / "a.tsv")
    assert len(all_names(load(flat))) == 20
    (flat / "b.csv").write_text("x\n")
    with pytest.raises(TensorDropoutError, match="has 2 tables; set table"):
        load(flat)


# The real thing.


def test_ixi_loads_through_the_same_loader(tmp_path):
    root = Path(os.environ.get("TENSOR_DROPOUT_DATA", "")) / "ixi"
    if "TENSOR_DROPOUT_DATA" not in os.environ or not root.is_dir():
        pytest.skip("IXI is not here: set $TENSOR_DROPOUT_DATA to a folder that holds ixi/")
    data = load(root, resample=8.0, cache=tmp_path)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [87, 29, 29]
    ages = torch.cat([part.targets for part in (data.train, data.validation, data.test)])
    assert 14 < float((ages - ages.mean()).abs().mean()) < 16


# Augmentation.


def test_strong_augmentation_is_a_choice(flat):
    data = load(flat, augment="strong")
    assert [type(change).__name__ for change in data.augment] == ["RandomAffine", "RandomFlip", "RandomContrast"]
    assert [type(change).__name__ for change in load(flat).augment] == ["RandomShift", "RandomFlip"]
    assert load(flat, augment=False).augment is None
    prepared = data.prepare(data.train.inputs)
    changed = data.augment(prepared)
    assert changed.shape == prepared.shape
    background = prepared.amin((1, 2, 3, 4))
    assert background.max() < 0
    torch.testing.assert_close(changed.amin((1, 2, 3, 4)), background)  # it stays, and nothing darker comes in


def test_other_augmentation_is_refused_before_a_file_is_read(flat):
    with pytest.raises(TensorDropoutError, match=r"nifti: the option augment is of type .*, got 'mild'"):
        load(flat, augment="mild")
    assert not (flat / ".cache").exists()


def test_strong_augmentation_can_be_set_on_the_command_line(monkeypatch):
    from typer.testing import CliRunner

    from tensor_dropout_lab import cli

    monkeypatch.setenv("COLUMNS", "500")
    command = ["train", "--keys", "--data", "nifti", "--set"]
    shown = CliRunner().invoke(cli.app, [*command, "data.options.augment=strong"])
    assert shown.exit_code == 0, shown.output
    assert '[data.options]\naugment = "strong"\n' in shown.output
    assert "#   augment: flip left and right" in shown.output
    assert "(bool | Literal['strong']; default True)" in shown.output
    refused = CliRunner().invoke(cli.app, [*command, "data.options.augment=mild"])
    assert refused.exit_code != 0
    assert "data.options.augment is of type bool | Literal['strong'], got 'mild'" in refused.output


def test_of_several_processes_one_prepares_and_the_others_wait(flat, monkeypatch):
    """Two at once: the file is written once, and both read it."""
    write = module._write_cache
    context = multiprocessing.get_context("fork")
    said = context.Queue()

    def write_slowly(*arguments):
        said.put("writes")
        time.sleep(0.5)
        write(*arguments)

    monkeypatch.setattr(module, "_write_cache", write_slowly)
    processes = [context.Process(target=lambda: said.put(len(load(flat).train))) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    found = [said.get(timeout=10) for _ in range(3)]
    assert found.count("writes") == 1
    assert found[1] == found[2] > 0
    assert said.empty()


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_a_file_is_prepared_as_those_of_the_folder_were(flat, kind):
    for i in range(20):
        write_volume(flat / f"sub-{i:02d}_T1w.nii.gz", make_volume(i).astype(kind))
    options = {"resample": 3.0}
    data = load(flat, **options)
    stored = data.prepare(data.test.inputs)
    for volume, name in zip(stored, data.test.names, strict=True):
        own = read_input(flat / f"{name}.nii.gz", data.input_shape, options)
        torch.testing.assert_close(own, volume, rtol=0, atol=1e-5)


def test_a_field_of_view_that_does_not_fit_after_resampling_is_said(flat):
    data = load(flat, resample=3.0)
    wide = flat / "wide.nii.gz"
    write_volume(wide, np.pad(make_volume(0), 6))
    with pytest.raises(TensorDropoutError, match=r"voxels of 3 mm after resampling, .* cut or pad its field of view"):
        read_input(wide, data.input_shape, {"resample": 3.0})


def test_a_fold_without_folds_is_refused(flat):
    with pytest.raises(TensorDropoutError, match="fold=3 needs folds"):
        load(flat, fold=3)


def test_what_a_killed_preparation_left_is_removed(flat):
    load(flat)
    [cache] = (flat / ".cache").glob("nifti-*.npy")
    cache.unlink()
    left = cache.with_name(f".{cache.stem}.4711.npy")
    left.write_bytes(b"half")
    assert len(load(flat).train) == 12
    assert not left.exists()
