"""Pictures in folders: layout, decoding in worker processes, and pictures that cannot be read."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.data.batches import Batches
from tensor_dropout_lab.data.imagefolder import PictureReader, decode_picture, draw_box
from tensor_dropout_lab.evaluation.examples import measure_scale, take_examples

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")

CLASSES = {"n01": (200, 30, 30), "n02": (30, 200, 30), "n03": (30, 30, 200)}


@pytest.fixture
def folder(tmp_path):
    """Three classes, each of its own colour: 6 pictures to train on and 2 to test on, of various sizes."""
    for part, n in (("train", 6), ("val", 2)):
        for label, colour in CLASSES.items():
            (tmp_path / part / label).mkdir(parents=True)
            for i in range(n):
                picture = Image.new("RGB", (40 + 7 * i, 60 - 5 * i), colour)
                picture.save(tmp_path / part / label / f"{label}_{i}.JPEG", quality=95)
    return tmp_path


def load(root, **options):
    return load_data("imagefolder", root=root, **{"size": 16, "resize": 20, "validation": 0, **options})


def test_pictures_are_found_by_class_and_decoded(folder):
    data = load(folder)
    assert (len(data.train), data.validation, len(data.test)) == (18, None, 6)
    assert (data.classes, data.outputs, data.input_shape) == (list(CLASSES), 3, (3, 16, 16))
    assert data.train.names[0] == "train/n01/n01_0.JPEG"
    for split in (data.train, data.test):
        for i in range(len(split)):
            image, target = split[i]
            assert (image.shape, image.dtype) == ((3, 16, 16), torch.uint8)
            colour = torch.tensor(list(CLASSES.values())[int(target)]).view(3, 1, 1)
            assert (image.int() - colour).abs().max() < 12
    assert data.prepare(image[None]).dtype == torch.float32
    assert load(folder, normalize="image").prepare(image[None]).shape == (1, 3, 16, 16)


def test_evaluation_takes_the_centre_of_the_resized_picture(folder):
    gradient = np.broadcast_to(np.arange(80, dtype=np.uint8)[None, :, None] * 3, (40, 80, 3))
    Image.fromarray(np.ascontiguousarray(gradient)).save(folder / "val" / "n01" / "n01_0.png")
    data = load(folder)
    image, _ = data.test[data.test.names.index("val/n01/n01_0.png")]
    columns = image[0].float().mean(0)
    expected = (24 + (torch.arange(16) + 0.5) * 2 - 0.5) * 3  # 32 of 80 columns around the middle, two to one
    assert (columns - expected).abs().max() < 3


@pytest.mark.parametrize("name", ["a.png", "a.tif", "big.tif", "a.ppm"])
def test_pictures_of_16_bits_keep_their_greys(tmp_path, name):
    greys = np.linspace(0, 65535, 40 * 40).reshape(40, 40).astype(np.uint16)
    stored = greys.astype(">u2") if name == "big.tif" else greys.astype(np.int32) if name == "a.ppm" else greys
    Image.fromarray(stored).save(tmp_path / name)
    found = np.asarray(decode_picture(tmp_path / name))
    assert found.shape == (40, 40, 3)
    assert np.abs(found - greys[..., None] / 257).max() <= 0.5
    assert (found[0, 0, 0], found[-1, -1, 0]) == (0, 255)


def test_a_picture_of_16_bits_is_as_bright_as_one_of_8(folder):
    greys = np.linspace(0, 255, 40 * 40).reshape(40, 40).astype(np.uint8)
    Image.fromarray(greys).save(folder / "val" / "n01" / "a8.png")
    Image.fromarray(greys.astype(np.uint16) * 257).save(folder / "val" / "n01" / "b16.png")
    test = load(folder).test
    few, many = (test.read(test.names.index(f"val/n01/{name}.png")) for name in ("a8", "b16"))
    assert torch.equal(few, many)
    reader = PictureReader((3, 16, 16), {}, None, {})
    few, many = (reader.read(folder / "val" / "n01" / f"{name}.png") for name in ("a8", "b16"))
    assert torch.equal(few, many)


@pytest.mark.parametrize(("dtype", "kind"), [(np.int32, "32-bit whole"), (np.float32, "floating-point")])
def test_a_picture_whose_white_is_unknown_is_refused(tmp_path, dtype, kind):
    Image.fromarray(np.arange(100).reshape(10, 10).astype(dtype)).save(tmp_path / "a.tif")
    with pytest.raises(TensorDropoutError, match=rf"a\.tif cannot be read .*{kind} numbers.*save it with 8 or 16 bits"):
        PictureReader((3, 16, 16), {}, None, {}).read(tmp_path / "a.tif")


def test_hidden_files_and_folders_are_left_out_and_inner_folders_taken(folder):
    before = load(folder)
    inner = folder / "train" / "n02"
    for name in (".thumb.jpg", ".old/a.png", "more/a.png", "more/deep/b.JPG", "n02_3b.png", "more/.c.png"):
        (inner / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), CLASSES["n02"]).save(inner / name)
    (inner / "._n02_0.jpg").write_bytes(b"a Mac's note, no picture")
    (inner / "folder.jpg").mkdir()
    data = load(folder)
    new = [f"train/n02/{name}" for name in ("more/a.png", "more/deep/b.JPG", "n02_3b.png")]
    assert [name for name in data.train.names if name not in new] == before.train.names
    assert sorted(set(data.train.names) - set(before.train.names)) == new
    assert data.train.targets.bincount().tolist() == [6, 9, 6]
    assert len([data.train[i] for i in range(21)]) == 21


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif"])
@pytest.mark.parametrize("orientation", [*range(1, 9), 99])
def test_a_picture_is_turned_as_its_exif_orientation_says(tmp_path, name, orientation):
    stored = np.zeros((24, 48, 3), dtype=np.uint8)
    stored[:12, :24], stored[12:, 24:] = 255, 128
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).save(tmp_path / name, exif=exif, **({"lossless": True} if name == "a.webp" else {}))
    upright = {
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: np.rot90(stored, -1),
        7: np.rot90(stored, 2).transpose(1, 0, 2),
        8: np.rot90(stored),
    }.get(orientation, stored)
    found = np.asarray(decode_picture(tmp_path / name)).astype(int)
    assert found.shape == upright.shape
    assert np.abs(found - upright).max() < 12


def test_damaged_exif_data_do_not_cost_the_picture(tmp_path):
    picture = Image.new("RGB", (20, 10), (200, 30, 30))
    picture.save(tmp_path / "a.jpg", exif=b"Exif\0\0no TIFF header")
    assert decode_picture(tmp_path / "a.jpg").size == (20, 10)


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P", "palette", "RGB", "L", "1"])
def test_what_is_transparent_lies_on_white(tmp_path, kind):
    """Half of the picture is transparent and black underneath."""
    grey = np.zeros((10, 20), dtype=np.uint8)
    grey[:, 10:] = 255 if kind == "1" else 100
    alpha = Image.fromarray(np.where(grey > 0, 255, 0).astype(np.uint8))
    picture, options = Image.fromarray(grey), {}
    if kind in ("RGBA", "LA"):
        picture = picture.convert(kind)
        picture.putalpha(alpha)
    elif kind in ("P", "palette"):
        picture = picture.convert("RGB").quantize(4)
        hidden = picture.getpixel((0, 0))
        options["transparency"] = hidden if kind == "P" else bytes(0 if i == hidden else 255 for i in range(4))
    else:
        picture, options["transparency"] = picture.convert(kind), (0, 0, 0) if kind == "RGB" else 0
    picture.save(tmp_path / "a.png", **options)
    found = np.asarray(decode_picture(tmp_path / "a.png"))
    assert (found[:, :10] == 255).all()
    assert (found[:, 10:] == grey[:, 10:, None]).all()


def test_half_transparent_pixels_are_mixed_with_white_and_opaque_ones_kept(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 4), dtype=np.uint8)
    pixels[8:, :, 3] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found, share = np.asarray(decode_picture(tmp_path / "a.png")).astype(float), pixels[..., 3:] / 255
    assert np.array_equal(found[8:], pixels[8:, :, :3])
    assert np.abs(found - (share * pixels[..., :3] + (1 - share) * 255)).max() <= 1


def test_training_crops_and_flips_at_random_and_repeats_under_a_seed(folder):
    gradient = np.broadcast_to(np.arange(80, dtype=np.uint8)[None, :, None] * 3, (40, 80, 3))
    Image.fromarray(np.ascontiguousarray(gradient)).save(folder / "train" / "n01" / "n01_0.png")
    train = load(folder).train
    row = train.names.index("train/n01/n01_0.png")

    def draw_in(epoch):
        train.set_epoch(epoch, seed=0)
        return train[row][0]

    draws = [draw_in(epoch) for epoch in range(20)]
    rising = [bool(draw[0, 0, -1] > draw[0, 0, 0]) for draw in draws]
    assert 2 < sum(rising) < 18
    assert len({draw.numpy().tobytes() for draw in draws}) > 15
    assert torch.equal(draw_in(0), draws[0])
    train.set_epoch(0, seed=1)
    assert not torch.equal(train[row][0], draws[0])
    plain = load(folder, augment=False).train
    assert torch.equal(plain[row][0], plain[row][0])


def draw_boxes(width, height, n=3000):
    generator = torch.Generator().manual_seed(0)
    boxes = np.array([draw_box(width, height, generator) for _ in range(n)])
    assert (boxes >= -1e-9).all()
    assert (boxes <= np.array([width, height, width, height]) + 1e-9).all()
    return boxes, boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]


@pytest.mark.parametrize("shape", [(300, 200), (400, 100), (100, 400), (640, 37), (1, 50)])
def test_random_crops_keep_their_sides_between_3_to_4_and_4_to_3(shape):
    _, widths, heights = draw_boxes(*shape, n=500)
    assert 3 / 4 - 1e-9 <= (widths / heights).min() <= (widths / heights).max() <= 4 / 3 + 1e-9


@pytest.mark.parametrize("shape", [(256, 256), (300, 200), (400, 100), (100, 400)])
def test_random_crops_have_the_distribution_of_uniform_draws_that_fit(shape):
    """Area and log ratio are uniform, up to ten tries until the box fits; then the largest central box."""
    boxes, widths, heights = draw_boxes(*shape)
    area = shape[0] * shape[1]
    grid = (np.arange(1000) + 0.5) / 1000
    shares, log_ratios = np.meshgrid(0.08 + 0.92 * grid, np.log(4 / 3) * (2 * grid - 1), indexing="ij")
    fits = np.sqrt(shares * area * np.exp(log_ratios)) <= shape[0]
    fits &= np.sqrt(shares * area / np.exp(log_ratios)) <= shape[1]
    central = np.isclose(boxes[:, 0] + boxes[:, 2], shape[0]) & np.isclose(boxes[:, 1] + boxes[:, 3], shape[1])
    failed = int(central.sum())
    assert stats.binomtest(failed, len(boxes), (1 - fits.mean()) ** 10).pvalue > 0.01
    drawn = ~central
    for values, expected in (
        ((widths * heights / area)[drawn], shares[fits]),
        (np.log(widths / heights)[drawn], log_ratios[fits]),
    ):
        assert stats.kstest(values, np.sort(expected)[:: expected.size // 2000]).pvalue > 0.01
    for starts, room in ((boxes[drawn, 0], shape[0] - widths[drawn]), (boxes[drawn, 1], shape[1] - heights[drawn])):
        assert stats.kstest(starts / room, "uniform").pvalue > 0.01


@pytest.mark.parametrize(
    ("width", "height", "expected"), [(1000, 30, (480, 0, 520, 30)), (40, 1000, (0, 473.333, 40, 526.667))]
)
def test_a_picture_in_which_no_random_crop_fits_gives_its_centre(width, height, expected):
    boxes, _, _ = draw_boxes(width, height, n=20)
    assert boxes == pytest.approx(np.array([expected] * 20), abs=1e-3)


def test_validation_is_held_out_of_train_by_seed(folder):
    data = load(folder, validation=1 / 3)
    assert data.validation.targets.bincount().tolist() == [2, 2, 2]
    assert not set(data.train.names) & set(data.validation.names)
    assert load(folder, validation=6, seed=3).validation.names != data.validation.names
    image, again = data.validation[0][0], data.validation[0][0]
    assert torch.equal(image, again)


def test_worker_processes_decode(folder):
    data = load(folder)
    batches = list(DataLoader(data.test, batch_size=4, num_workers=2))
    assert [len(images) for images, _ in batches] == [4, 2]
    copy = pickle.loads(pickle.dumps(data.train))
    assert copy.names == data.train.names


# Bad input.


@pytest.mark.parametrize("missing", ["", "train", "val"])
def test_a_missing_folder_gives_the_expected_layout(folder, missing):
    root = folder / "nowhere" if not missing else folder
    if missing:
        (folder / missing).rename(folder / "elsewhere")
    with pytest.raises(TensorDropoutError, match=r"no folder .*Expected: ROOT/train/CLASS/\*\.JPEG and ROOT/val/"):
        load(root)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root": None}, "set root"),
        ({"size": 0}, "size must be"),
        ({"resize": 8}, r"resize \(8\) must not be below size \(16\)"),
        ({"normalize": "x"}, "option normalize is of type .*, got 'x'"),
        ({"validation": 18}, "imagefolder: validation"),
    ],
)
def test_bad_options_are_refused(folder, options, message):
    root = options.pop("root", folder)
    with pytest.raises(TensorDropoutError, match=message):
        load(root, **options)


def test_an_empty_class_and_an_unknown_one_are_named(folder):
    (folder / "val" / "n99").mkdir()
    with pytest.raises(TensorDropoutError, match="folders that train has not: n99"):
        load(folder)
    (folder / "train" / "n99").mkdir()
    with pytest.raises(TensorDropoutError, match=r"n99 has no picture"):
        load(folder)
    (folder / "val" / "n99").rmdir()
    Image.new("RGB", (9, 9)).save(folder / "train" / "n99" / "a.png")
    with pytest.raises(TensorDropoutError, match="val lacks: n99"):
        load(folder)


def test_a_train_folder_without_classes_is_refused(folder):
    for label in list(CLASSES)[1:]:
        (folder / "train" / label).rename(folder / label)
    with pytest.raises(TensorDropoutError, match="1 class folders, at least 2"):
        load(folder)


@pytest.mark.parametrize(("damage", "workers"), [("truncated", 0), ("text", 0), ("empty", 0), ("truncated", 1)])
def test_an_unreadable_picture_in_the_middle_of_an_epoch_is_named(folder, damage, workers):
    path = folder / "train" / "n02" / "n02_3.JPEG"
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[: len(whole) // 2], "text": b"no picture", "empty": b""}[damage])
    batches = iter(DataLoader(load(folder).train, batch_size=3, num_workers=workers))
    assert len([next(batches) for _ in range(3)]) == 3
    with pytest.raises(TensorDropoutError, match=r"n02_3\.JPEG cannot be read .*skip_unreadable=true"):
        list(batches)


def test_an_unreadable_picture_is_skipped_on_request_with_one_warning(folder):
    (folder / "train" / "n02" / "n02_3.JPEG").write_bytes(b"no picture")
    train = load(folder, skip_unreadable=True, augment=False).train
    row = train.names.index("train/n02/n02_3.JPEG")
    with pytest.warns(UserWarning, match=r"n02_3\.JPEG cannot be read .*skipped"):
        image, target = train[row]
    assert torch.equal(image, train[row + 1][0])
    assert target == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train[row]


def test_a_folder_of_nothing_readable_is_refused(folder):
    for path in folder.glob("train/*/*"):
        path.write_bytes(b"no picture")
    train = load(folder, skip_unreadable=True).train
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(TensorDropoutError, match="not one of the 18"):
        train[4]


def damage(path, how):
    whole = path.read_bytes()
    path.write_bytes({"text": b"no picture", "truncated": whole[: len(whole) // 2]}[how])


@pytest.mark.parametrize("how", ["text", "truncated"])
def test_an_unreadable_picture_to_test_on_is_left_out_everywhere(folder, how):
    damage(folder / "val" / "n02" / "n02_0.JPEG", how)
    whole = load(folder)
    with pytest.raises(TensorDropoutError, match=r"n02_0\.JPEG cannot be read"):
        take_examples(whole.test, measure_scale(whole))
    with pytest.warns(UserWarning, match=r"1 of 6 pictures cannot be read and are left out; .*val/n02/n02_0\.JPEG"):
        data = load(folder, skip_unreadable=True)
    names = [name for name in whole.test.names if not name.endswith("n02_0.JPEG")]
    assert (data.test.names, data.test.targets.tolist()) == (names, [0, 0, 1, 2, 2])
    examples = take_examples(data.test, measure_scale(data))
    assert (examples.names, examples.y.tolist()) == (names, [0, 0, 1, 2, 2])
    inputs, targets = zip(*Batches(data, data.test, batch=2), strict=True)
    assert torch.equal(torch.cat(targets), examples.y)
    torch.testing.assert_close(torch.cat(inputs), data.prepare(255 * examples.x))


def test_an_unreadable_picture_held_out_to_choose_by_is_left_out(folder):
    names = load(folder, validation=6).validation.names
    damage(folder / names[2], "truncated")
    with pytest.warns(UserWarning, match="1 of 6 pictures cannot be read"):
        validation = load(folder, validation=6, skip_unreadable=True).validation
    assert validation.names == names[:2] + names[3:]
    assert len(validation.targets) == 5


def test_unreadable_pictures_to_train_on_are_left_out_of_an_evaluation(folder):
    """A substitute network is trained on them; nothing is read at the start."""
    damage(folder / "train" / "n02" / "n02_3.JPEG", "truncated")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load(folder, skip_unreadable=True)
    with pytest.warns(UserWarning, match=r"n02_3\.JPEG cannot be read .*left out"):
        examples = take_examples(data.train, measure_scale(data))
    assert examples.names == [name for name in data.train.names if not name.endswith("n02_3.JPEG")]
    assert examples.y.tolist() == [0] * 6 + [1] * 5 + [2] * 6
    for path in folder.glob("train/*/*"):
        path.write_bytes(b"no picture")
    with pytest.warns(UserWarning, match="left out"), pytest.raises(TensorDropoutError, match="cannot be read"):
        take_examples(data.train, measure_scale(data))


def test_nothing_readable_to_test_on_is_refused(folder):
    for path in folder.glob("val/*/*"):
        path.write_bytes(b"no picture")
    with pytest.raises(TensorDropoutError, match=r"not one of 6 pictures can be read; the first is .*n01_0\.JPEG"):
        load(folder, skip_unreadable=True)
