"""What a browser is shown of a picture, and pictures of 16 bits and in DICOM. All of them are SIMULATED."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from tensor_dropout import TensorDropoutError
from tensor_dropout.features.decoding import decode_picture, read_greys
from tensor_dropout.features.inputs import Preparation, prepare_image
from tensor_dropout_lab.data.points_table import match_files, read_table
from tensor_dropout_lab.labelling.pictures import describe_numbers, make_thumbnail, measure_picture, show_picture

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
GREYS = np.linspace(1000, 3000, 24 * 32).reshape(24, 32).astype(np.uint16)


def save(path, pixels=PIXELS, orientation=None, **options):
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    Image.fromarray(pixels).save(path, **options)
    return path


def look(shown):
    content, media_type = shown
    picture = Image.open(io.BytesIO(content))
    assert picture.get_format_mimetype() == media_type
    return np.asarray(picture.convert("RGB")).astype(int)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.bmp", "a.webp"])
def test_what_browsers_know_is_given_as_it_is(tmp_path, name):
    path = save(tmp_path / name)
    assert show_picture(path)[0] == path.read_bytes()
    assert show_picture(path)[1] == f"image/{path.suffix[1:].replace('jpg', 'jpeg')}"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.tif", "a.webp"])
def test_what_is_shown_is_upright_and_as_large_as_it_is_said_to_be(tmp_path, name, orientation):
    path = save(tmp_path / name, orientation=orientation, **({"lossless": True} if name == "a.webp" else {}))
    expected = np.asarray(decode_picture(path)).astype(int)
    shown = look(show_picture(path))
    assert shown.shape[1::-1] == measure_picture(path) == ((32, 24) if orientation < 5 else (24, 32))
    assert np.abs(shown - expected).mean() < (3 if name == "a.jpg" else 1e-9)
    assert orientation == 1 or show_picture(path)[0] != path.read_bytes()


def test_what_is_transparent_is_shown_as_the_network_sees_it(tmp_path):
    path = save(tmp_path / "a.png", np.dstack([PIXELS, PIXELS[..., :1]]))
    np.testing.assert_array_equal(look(show_picture(path)), np.asarray(decode_picture(path)))


def test_pages_and_frames_after_the_first_are_left_out(tmp_path):
    first, second = Image.fromarray(PIXELS), Image.new("RGB", (9, 9))
    first.save(tmp_path / "a.tif", save_all=True, append_images=[second])
    first.save(tmp_path / "a.webp", save_all=True, append_images=[second.resize((32, 24))], lossless=True)
    for path in tmp_path.iterdir():
        assert measure_picture(path) == (32, 24)
        np.testing.assert_array_equal(look(show_picture(path)), PIXELS)


def test_a_printers_jpeg_is_shown_in_the_colours_that_the_network_sees(tmp_path):
    Image.fromarray(np.full((8, 8, 4), (0, 200, 200, 0), np.uint8), "CMYK").save(tmp_path / "a.jpg")
    assert np.abs(look(show_picture(tmp_path / "a.jpg")) - np.asarray(decode_picture(tmp_path / "a.jpg"))).max() < 4


# Sixteen bits.


@pytest.mark.parametrize("name", ["a.png", "a.tif", "big.tif"])
def test_a_picture_of_16_bits_is_shown_through_a_window(tmp_path, name):
    path = save(tmp_path / name, GREYS.astype(">u2") if name == "big.tif" else GREYS)
    numbers = describe_numbers(path)
    low, high = np.percentile(GREYS, (0.5, 99.5))
    assert numbers == {"bits": 16, "lowest": 1000, "highest": 3000, "low": low, "high": high}
    expected = np.clip((GREYS - low) / (high - low), 0, 1) * 255
    assert np.abs(look(show_picture(path)) - expected[..., None]).max() <= 0.5 + 1e-3
    shown = look(show_picture(path, (1500, 1501)))
    assert (shown == np.where(GREYS > 1500, 255, 0)[..., None]).all()
    assert np.asarray(decode_picture(path)).max() == round(3000 / 257)  # what the network sees
    assert np.array_equal(np.asarray(decode_picture(path, window=(1500, 1501))), shown)


def test_a_16_bit_picture_is_turned_with_its_numbers(tmp_path):
    path = save(tmp_path / "a.png", GREYS, orientation=6)
    found = read_greys(path)
    np.testing.assert_array_equal(found.numbers, np.rot90(GREYS, -1))
    assert look(show_picture(path)).shape[1::-1] == measure_picture(path) == (24, 32)


def test_numbers_are_counted_again_only_when_the_file_has_changed(tmp_path):
    path = save(tmp_path / "a.png", GREYS)
    assert describe_numbers(path)["highest"] == 3000
    save(path, GREYS // 2)
    assert describe_numbers(path)["highest"] == 1500
    assert describe_numbers(save(tmp_path / "b.png")) == {"bits": 8, "lowest": 0, "highest": 255, "low": 0, "high": 255}
    assert describe_numbers(save(tmp_path / "c.png", np.full((4, 4), 7, np.uint16)))["high"] == 8


def test_pictures_whose_white_is_unknown_are_refused_by_all(tmp_path):
    for dtype in (np.float32, np.int32):
        path = save(tmp_path / "a.tif", GREYS.astype(dtype))
        for ask in (show_picture, make_thumbnail, measure_picture):
            with pytest.raises(TensorDropoutError, match="whose white is unknown; save it with 8 or 16 bits"):
                ask(path)


# Thumbnails.


@pytest.mark.parametrize("size", [(3000, 200), (200, 3000), (20, 10)])
def test_thumbnails(tmp_path, size):
    path = save(tmp_path / "a.jpg", np.zeros((size[1], size[0], 3), np.uint8), orientation=6)
    small = Image.open(io.BytesIO(make_thumbnail(path)))
    assert (small.format, max(small.size)) == ("JPEG", min(160, max(size)))
    assert (small.width > small.height) == (size[1] > size[0])  # it is turned


def test_a_thumbnail_of_16_bits_is_no_black_square(tmp_path):
    small = Image.open(
        io.BytesIO(make_thumbnail(save(tmp_path / "a.png", np.kron(GREYS, np.ones((20, 20), np.uint16)))))
    )
    assert small.size == (160, 120)
    assert np.ptp(np.asarray(small)) > 240


# A PNG may have its EXIF data behind its pixels.


def make_png_with_late_exif(orientation):
    plain, stream = io.BytesIO(), io.BytesIO()
    Image.fromarray(PIXELS).save(plain, "PNG")
    exif = Image.Exif()
    exif[0x0112] = orientation
    PngImagePlugin.putchunk(stream, b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    content = plain.getvalue()
    end = content.index(b"IEND") - 4
    return content[:end] + stream.getvalue() + content[end:]


def test_a_png_is_measured_without_decoding_it(tmp_path):
    (tmp_path / "late.png").write_bytes(make_png_with_late_exif(6))
    assert measure_picture(tmp_path / "late.png") == decode_picture(tmp_path / "late.png").size == (24, 32)
    large = save(tmp_path / "large.png", np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), dtype=np.uint8))
    content = large.read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    assert measure_picture(tmp_path / "cut.png") == (1500, 1500)  # its header is sound
    with pytest.raises(TensorDropoutError):
        show_picture(tmp_path / "cut.png")


# Damage.


def make_bomb():
    """A PNG of 100,000 × 100,000 pixels in a few bytes."""
    stream = io.BytesIO()
    stream.write(b"\x89PNG\r\n\x1a\n")
    size = (100_000).to_bytes(4)
    PngImagePlugin.putchunk(stream, b"IHDR", size + size + b"\x08\0\0\0\0")
    PngImagePlugin.putchunk(stream, b"IDAT", b"")
    PngImagePlugin.putchunk(stream, b"IEND", b"")
    return stream.getvalue()


def test_damaged_files_are_a_sentence_and_nothing_else(tmp_path):
    content = save(tmp_path / "a.jpg", quality=95).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(content[: len(content) // 2])
    for name, options in (("a.bmp", {}), ("a.tif", {}), ("a.webp", {"lossless": True}), ("a.png", {})):
        content = save(tmp_path / name, **options).read_bytes()
        (tmp_path / f"cut{name[1:]}").write_bytes(content[: len(content) * 2 // 3])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "bomb.png").write_bytes(make_bomb())
    (tmp_path / "dir.png").mkdir()
    (tmp_path / "mark.dcm").write_bytes(b"\0" * 128 + b"DICM" + b"\xff" * 50)
    (tmp_path / "link.png").symlink_to(tmp_path / "nothing.png")
    bad = [path for path in tmp_path.iterdir() if not path.name.startswith("a.")]
    assert len(bad) == 11
    for path in bad:
        for ask in (show_picture, make_thumbnail):
            with pytest.raises(TensorDropoutError) as caught:
                ask(path)
            assert str(caught.value)
            assert "\n" not in str(caught.value)
    for name in ("text.png", "empty.jpg", "bomb.png", "dir.png", "mark.dcm", "link.png"):
        for ask in (measure_picture, describe_numbers):
            with pytest.raises(TensorDropoutError):
                ask(tmp_path / name)


# DICOM.


def make_dicom(path, array, photometric="MONOCHROME2", bits=12, frames=1, **tags):
    pydicom = pytest.importorskip("pydicom", reason="pydicom is not installed")
    from pydicom.dataset import FileDataset, FileMetaDataset

    meta = FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    data = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    data.Rows, data.Columns = array.shape[frames > 1 :][:2]
    data.SamplesPerPixel = 3 if array.shape[-1] == 3 else 1
    data.PhotometricInterpretation = photometric
    data.BitsAllocated = 8 * array.itemsize
    data.BitsStored, data.HighBit, data.PixelRepresentation = bits, bits - 1, 0
    if array.shape[-1] == 3:
        data.PlanarConfiguration = 0
    if frames > 1:
        data.NumberOfFrames = frames
    for tag, value in tags.items():
        setattr(data, tag, value)
    data.PixelData = array.tobytes()
    data.save_as(path, enforce_file_format=True)
    return path


def test_dicom_is_shown_through_its_window_and_the_network_sees_the_same(tmp_path):
    tags = {"RescaleSlope": 2, "RescaleIntercept": -1000, "WindowCenter": [3000.5, 7], "WindowWidth": [1001, 7]}
    path = make_dicom(tmp_path / "a.dcm", GREYS, **tags)
    numbers = describe_numbers(path)
    assert numbers == {"bits": 12, "lowest": 1000, "highest": 5000, "low": 2500, "high": 3500}
    expected = np.clip((2.0 * GREYS - 1000 - 2500) / 1000, 0, 1)[..., None] * 255
    shown = look(show_picture(path))
    assert np.abs(shown - expected).max() <= 0.5 + 1e-3
    np.testing.assert_array_equal(np.asarray(decode_picture(path)), shown)
    assert (look(show_picture(path, (0, 10_000))) <= 128).all()
    assert measure_picture(path) == (32, 24)
    with path.open("rb") as stream:
        tensor = prepare_image(stream, Preparation((24, 32), None, None))
    np.testing.assert_allclose(tensor.numpy() * 255, shown.transpose(2, 0, 1), atol=1e-3)


def test_dicom_without_a_window_inverted_and_of_several_frames(tmp_path):
    plain = make_dicom(tmp_path / "a.dcm", GREYS)
    inverted = make_dicom(tmp_path / "b.dcm", GREYS, "MONOCHROME1")
    frames = make_dicom(tmp_path / "c.dcm", np.stack([GREYS, GREYS * 0]), frames=2)
    low, high = np.percentile(GREYS, (0.5, 99.5))
    assert (describe_numbers(plain)["low"], describe_numbers(plain)["high"]) == (low, high)
    assert (look(show_picture(plain))[0, 0], look(show_picture(plain))[-1, -1]) == pytest.approx((0, 255))
    np.testing.assert_array_equal(look(show_picture(inverted)), 255 - look(show_picture(plain)))
    np.testing.assert_array_equal(look(show_picture(frames)), look(show_picture(plain)))


def test_coloured_dicom(tmp_path):
    path = make_dicom(tmp_path / "a.dcm", PIXELS, "RGB", 8)
    np.testing.assert_array_equal(look(show_picture(path)), PIXELS)
    assert describe_numbers(path)["bits"] == 8
    assert Image.open(io.BytesIO(make_thumbnail(path))).size == (32, 24)


def test_a_dicom_file_that_claims_too_much_or_is_cut_off(tmp_path):
    path = make_dicom(tmp_path / "a.dcm", GREYS)
    (tmp_path / "cut.dcm").write_bytes(path.read_bytes()[:-100])
    big = make_dicom(tmp_path / "big.dcm", np.zeros((2, 2), np.uint16), Rows=60_000, Columns=60_000)
    empty = make_dicom(tmp_path / "no.dcm", np.zeros((2, 2), np.uint16), Rows=0)
    for bad, said in (
        (tmp_path / "cut.dcm", "bytes"),
        (big, "60000 × 60000 pixels, too many"),
        (empty, "without a picture"),
    ):
        with pytest.raises(TensorDropoutError, match=said):
            show_picture(bad)


def test_without_pydicom_it_is_said_what_to_install(tmp_path, monkeypatch):
    path = make_dicom(tmp_path / "a.dcm", GREYS)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    for ask in (measure_picture, show_picture, make_thumbnail, describe_numbers):
        with pytest.raises(TensorDropoutError, match="it is DICOM, which pydicom reads; install it with: pip install"):
            ask(path)


def test_a_table_with_dicom_pictures_is_read_by_fit(tmp_path):
    (tmp_path / "images").mkdir()
    make_dicom(tmp_path / "images" / "a.dcm", GREYS)
    (tmp_path / "points.csv").write_text("file,tip_x,tip_y\na.dcm,16,12\n")
    table, images = match_files(read_table(tmp_path / "points.csv"), tmp_path / "images", units="pixels")
    np.testing.assert_array_equal(table.values, [[0.5, 0.5]])
    assert images.decode(0).size == (32, 24)
