"""``points.csv``: what is read, what belongs together, and every mistake by name. The pictures are SIMULATED."""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

import tensor_dropout as td
from tensor_dropout_lab.data.image_files import ImageFiles, find_images
from tensor_dropout_lab.data.points_table import find_points, match_files, read_table


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def make_picture(width: int = 40, height: int = 20, shade: int = 90) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 0, 0)).save(stream, "PNG")
    return stream.getvalue()


def make_tar(path: Path, files: dict[str, bytes], mode: Literal["w", "w:gz"] = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pictures = tmp_path / "pictures"
    for number, name in enumerate(("a.png", "b.png", "sub/c.png")):
        path = pictures / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_picture(shade=100 * number))
    return pictures


def test_numbers_groups_and_missing_cells(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "t.csv", "\ufefffile,group,x0,y0,age\na,p,0.5,0.25,30\nb, q ,,,31\n\n"))
    assert table.files == ["a", "b"]
    assert table.groups == ["p", "q"]
    assert table.columns == ["x0", "y0", "age"]
    assert table.values is not None
    np.testing.assert_array_equal(table.values, [[0.5, 0.25, 30], [np.nan, np.nan, 31]])
    assert table.task == "regression"
    assert table.points == [(0, 1)]
    assert table.labels is None


def test_classes_by_name_and_on_request(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "t.csv", "file,kind\na,wing\nb,\nc,face\n"))
    assert table.task == "classification"
    assert table.labels == ["wing", "", "face"]
    assert table.classes == ["face", "wing"]
    assert table.values is None
    assert table.has_target.tolist() == [True, False, True]
    assert table.points == []
    numbers = write(tmp_path / "n.csv", "file,stage\na,1\nb,2\n")
    assert read_table(numbers).task == "regression"
    assert read_table(numbers, task="classification").classes == ["1", "2"]


@pytest.mark.parametrize(
    ("columns", "points"),
    [
        (["x0", "y0", "x1", "y1"], [(0, 1), (2, 3)]),
        (["p_x", "p_y", "age"], [(0, 1)]),
        (["y", "x"], [(1, 0)]),
        (["xmin", "ymin", "xmax", "ymax"], [(0, 1), (2, 3)]),
        (["x_0", "y_0", "left_eye_x", "left_eye_y"], [(0, 1), (2, 3)]),
        (["noseX", "noseY", "bbox_x1", "bbox_y1"], [(0, 1), (2, 3)]),
        (["left_eye_center_x", "left_eye_center_y"], [(0, 1)]),
        (["tip.x", "tip.y", "tip.z"], [(0, 1, 2)]),
        (["age", "max", "extra", "x9", "index", "indey"], []),  # no pair: x9 has no y9, index is a word
    ],
)
def test_points_are_found_by_their_names(columns: list[str], points: list[tuple[int, ...]]) -> None:
    assert find_points(columns) == points


BAD_TABLES = {
    "tabs": ("file\tx0\ty0\na\t0.1\t0.2\n", ["separated by tabs", "commas are expected"]),
    "semicolons": ("file;x0;y0\na;0,1;0,2\n", ["separated by semicolons", "commas are expected"]),
    "tabs in a row": ("file,x0,y0\na\t0.1\t0.2\n", ["line 2 has 1 cells, the header has 3", "tabs in place of commas"]),
    "a row too short": ("file,x0,y0\na,1,1\nb,1\n", ["line 3 has 2 cells, the header has 3"]),
    "text": ("file,x0,y0\na,0.1,0.2\nb,0.1,left\n", ["line 3", "column 'y0'", "'left' is not a number"]),
    "infinite": ("file,x0\na,inf\n", ["line 2", "'inf' is not a number"]),
    "no header": ("a.png,0.1,0.2\nb.png,0.2,0.2\n", ["a header is missing", "file,group,x0,y0"]),
    "other header": ("filename,x0\na.png,0.1\n", ["no column 'file'", "rename 'filename'"]),
    "unnamed column": (",file,x0\n0,a,0.1\n", ["column 1 has no name", "index=False"]),
    "column twice": ("file,x0,x0\na,0.1,0.2\n", ["'x0' is there twice"]),
    "no target": ("file,group\na,p\n", ["no column with targets"]),
    "empty": ("", ["is empty", "file,group,x0,y0"]),
    "only a header": ("file,x0,y0\n", ["has a header and no rows"]),
    "rows twice": ("file,x0\na,1\nb,1\na,2\n", ["files with more than one row: a", "lines 2, 4"]),
    "no file": ("file,x0\n,1\n", ["line 2 names no file"]),
    "no group": ("file,group,x0\na,,1\n", ["line 2 has an empty group"]),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_table_that_is_none_says_where(tmp_path: Path, name: str) -> None:
    text, words = BAD_TABLES[name]
    path = write(tmp_path / "points.csv", text)
    with pytest.raises(td.TensorDropoutError) as error:
        read_table(path)
    for word in (*words, str(path)):
        assert word in str(error.value)


def test_no_such_table_a_folder_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(td.TensorDropoutError, match="there is no such file"):
        read_table(tmp_path / "points.csv")
    with pytest.raises(td.TensorDropoutError, match="is a folder"):
        read_table(tmp_path)
    (tmp_path / "points.csv").write_bytes("file,x0\na,1\n".encode("utf-16"))
    with pytest.raises(td.TensorDropoutError, match="UTF-8"):
        read_table(tmp_path / "points.csv")


def test_several_columns_are_no_classes(tmp_path: Path) -> None:
    path = write(tmp_path / "points.csv", "file,a,b\nf,x,y\n")
    with pytest.raises(td.TensorDropoutError, match="classes are one column, here there are 2"):
        read_table(path, task="classification")


# Rows and images.


@pytest.mark.parametrize("kind", ["folder", "tar", "tar.gz", "tar in a folder"])
def test_rows_find_their_images(tmp_path: Path, folder: Path, kind: str) -> None:
    where = folder
    if kind != "folder":
        inside = "./pictures/" if kind == "tar in a folder" else "./"
        files = {inside + name: (folder / name).read_bytes() for name in ("sub/c.png", "a.png", "b.png")}
        where = make_tar(tmp_path / f"i.{kind[:6].strip()}", files, "w:gz" if kind == "tar.gz" else "w")
    table = read_table(write(tmp_path / "t.csv", "file,x0,y0\nsub/c.png,1,0\n./a.png,0,0\nb.png,.5,.5\n"))
    matched, images = match_files(table, where)
    assert matched.files == ["sub/c.png", "a.png", "b.png"]
    assert [np.asarray(images.decode(i))[0, 0, 0] for i in range(3)] == [200, 0, 100]
    paths = images.paths(tmp_path / "unpacked")
    assert [path.read_bytes() for path in paths] == [images.read(i) for i in range(3)]


def test_pixels_are_divided_and_other_numbers_are_not(tmp_path: Path, folder: Path) -> None:
    (folder / "b.png").write_bytes(make_picture(width=80, height=10))
    table = read_table(
        write(tmp_path / "t.csv", "file,nose_x,nose_y,age\na.png,10,5,30\nb.png,20,,40\nsub/c.png,0,20,\n")
    )
    matched, _ = match_files(table, folder, units="pixels")
    assert matched.values is not None
    np.testing.assert_allclose(matched.values, [[0.25, 0.25, 30], [0.25, np.nan, 40], [0, 1, np.nan]])


def test_pixels_are_those_of_the_upright_picture(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: shown as 20 wide and 40 high
    Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg", exif=exif)
    table = read_table(write(tmp_path / "t.csv", "file,x,y\na.jpg,10,10\n"))
    matched, images = match_files(table, tmp_path, units="pixels")
    assert matched.values is not None
    assert matched.values.tolist() == [[0.5, 0.25]]
    assert images.measure().tolist() == [[20, 40]]
    assert images.decode(0).size == (20, 40)


def test_what_is_alone_is_named_on_both_sides(tmp_path: Path, folder: Path) -> None:
    lone = "".join(f"z{i}.png,1\n" for i in range(7))
    table = read_table(write(tmp_path / "t.csv", f"file,age\na.png,1\nb.png,\n{lone}"))
    with pytest.raises(td.TensorDropoutError) as error:
        match_files(table, folder)
    for words in (
        "7 of 9 rows have no image in",
        "z0.png, z1.png, z2.png, z3.png, z4.png and 2 more",
        "1 of 3 images in",
        "have no row: sub/c.png",
        "rows have no target, all their cells are empty: b.png",
        "--missing skip",
    ):
        assert words in str(error.value)
    matched, images = match_files(table, folder, missing="skip")
    assert matched.files == images.names == ["a.png"]


def test_what_is_skipped_is_named(tmp_path: Path, folder: Path) -> None:
    table = read_table(write(tmp_path / "t.csv", "file,age\na.png,1\nb.png,\ny.png,1\nz.png,\n"))
    matched, _ = match_files(table, folder, missing="skip")
    assert matched.left_out == (
        "Left out: 2 rows without an image (y.png, z.png), 1 image without a row (sub/c.png), "
        "1 row without a target (b.png)"
    )
    whole = read_table(write(tmp_path / "w.csv", "file,age\na.png,1\nb.png,2\nsub/c.png,3\n"))
    assert match_files(whole, folder, missing="skip")[0].left_out == ""


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("a", "b", "sub/c"), "differ only by '.png': write them"),
        (("a.PNG", "b.PNG", "sub/c.PNG"), "differ only by '.PNG' and '.png': write them"),
        (("a.png", "b.png", "c.png"), None),  # two of them have an image
        (("images/a.png", "images/b.png"), "differ only by the folder 'images/': write them"),
        (("c.png",), "differ only by the folder 'sub/': write them"),
        (("a", "b", "d"), None),
        (("x/a.png", "y/a.png"), None),  # which of them?
    ],
)
@pytest.mark.parametrize("missing", ["error", "skip"])
def test_names_that_differ_by_an_ending_or_a_folder(
    tmp_path: Path, folder: Path, files: tuple[str, ...], words: str | None, missing: Literal["error", "skip"]
) -> None:
    rows = "".join(f"{file},{number}\n" for number, file in enumerate(files))
    table = read_table(write(tmp_path / "t.csv", f"file,age\n{rows}"))
    if words is None and missing == "skip" and "b.png" in files:
        assert len(match_files(table, folder, missing=missing)[0]) == 2
        return
    with pytest.raises(td.TensorDropoutError) as error:
        match_files(table, folder, missing=missing)
    assert ("differ only by" in str(error.value)) == (words is not None)
    assert words is None or words in str(error.value)
    assert words is None or "--missing skip" not in str(error.value)


def test_fractions_are_no_pixels(tmp_path: Path, folder: Path) -> None:
    rows = "file,x0,y0,age\na.png,0.5,1,30\nb.png,{},0,31\nsub/c.png,,0.2,32\n"
    fractions = read_table(write(tmp_path / "f.csv", rows.format(0.25)))
    with pytest.raises(td.TensorDropoutError, match=r"within one pixel .* look like fractions: leave --units out"):
        match_files(fractions, folder, units="pixels")
    match_files(read_table(write(tmp_path / "p.csv", rows.format(1.5))), folder, units="pixels")


def test_no_row_fits(tmp_path: Path, folder: Path) -> None:
    table = read_table(write(tmp_path / "t.csv", "file,age\na,1\nb,2\n"))
    with pytest.raises(td.TensorDropoutError, match=r"has a, b; there are a.png, b.png, sub/c.png"):
        match_files(table, folder, missing="skip")


def test_points_outside_of_the_picture(tmp_path: Path, folder: Path) -> None:
    rows = "file,x0,y0\na.png,0.5,0.5\nb.png,0.2,{}\nsub/c.png,0,\n"
    pixels = read_table(write(tmp_path / "p.csv", rows.format(17)))
    with pytest.raises(td.TensorDropoutError, match=r"1 of 3 rows .* b.png, y0 = 17, .*--units pixels"):
        match_files(pixels, folder)
    slightly = read_table(write(tmp_path / "s.csv", rows.format(1.1)))
    with pytest.warns(UserWarning, match=r"1 of 3 rows .* b.png, y0 = 1.1"):
        match_files(slightly, folder)
    far = read_table(write(tmp_path / "f.csv", rows.format(-0.5)))
    with pytest.raises(td.TensorDropoutError, match="leave the cells empty if the point cannot be seen"):
        match_files(far, folder)
    with pytest.raises(td.TensorDropoutError, match=r"upright image"):
        match_files(read_table(write(tmp_path / "q.csv", rows.format(50))), folder, units="pixels")


def test_pixels_without_points(tmp_path: Path, folder: Path) -> None:
    table = read_table(write(tmp_path / "t.csv", "file,age\na.png,1\nb.png,1\nsub/c.png,2\n"))
    with pytest.raises(td.TensorDropoutError, match="no two columns are a point"):
        match_files(table, folder, units="pixels")


def test_unreadable_pictures_are_named(tmp_path: Path, folder: Path) -> None:
    (folder / "b.png").write_bytes(b"not a picture")
    (folder / "sub/c.png").write_bytes(make_picture()[:-30])  # cut off: the header is sound
    table = read_table(write(tmp_path / "t.csv", "file,x,y\na.png,1,1\nb.png,1,1\nsub/c.png,2,2\n"))
    with pytest.raises(td.TensorDropoutError, match=r"1 of 3 images cannot be read: b.png"):
        match_files(table, folder, units="pixels")
    with pytest.raises(td.TensorDropoutError, match=r"2 of 3 images cannot be read: b.png, sub/c.png"):
        find_images(folder).check()
    with pytest.raises(td.TensorDropoutError, match=r"b.png cannot be read \(it is no picture"):
        find_images(folder).decode(1)


def test_places_without_images(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(td.TensorDropoutError, match="no such folder or tar file"):
        find_images(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(td.TensorDropoutError, match="has no images"):
        find_images(tmp_path / "empty")
    with pytest.raises(td.TensorDropoutError, match="no tar file of images"):
        find_images(write(tmp_path / "images.tar", "this is text"))
    (folder / "d.nii.gz").write_bytes(b"")
    with pytest.raises(td.TensorDropoutError, match=r"both pictures and volumes, such as a.png and d.nii.gz"):
        find_images(folder)


def test_a_tar_file_cut_short(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "i.tar", {"a.png": make_picture(), "b.png": make_picture(), ".c.png": b""})
    assert find_images(path).names == ["a.png", "b.png"]
    path.write_bytes(path.read_bytes()[:1600])
    with pytest.raises(td.TensorDropoutError, match="no tar file of images that can be read"):
        find_images(path)


@pytest.mark.parametrize("name", ["../e.png", "{}/e.png", ".//{}/e.png", "C:/e.png", "C:e.png", "a\\..\\..\\e.png"])
def test_names_in_a_tar_file_that_lead_out_of_it_are_refused(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    evil = name.format(outside)
    path = make_tar(tmp_path / "i.tar", {"a.png": make_picture(), evil: make_picture()})
    with pytest.raises(td.TensorDropoutError, match="leads out of it"):
        find_images(path)
    with pytest.raises(td.TensorDropoutError, match="leads out of"):  # also if it came in another way
        ImageFiles(path, [str(outside / "evil.png")], [b"x"]).paths(tmp_path / "unpacked")
    assert not outside.exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_in_a_tar_file_are_refused(tmp_path: Path, kind: bytes) -> None:
    path = make_tar(tmp_path / "i.tar", {"a.png": make_picture()})
    with tarfile.open(path, "a") as archive:
        member = tarfile.TarInfo("b.png")
        member.type, member.linkname = kind, "a.png"
        archive.addfile(member)
    with pytest.raises(td.TensorDropoutError, match=r"b\.png is a link, .*--dereference"):
        find_images(path)


def test_a_link_to_the_folder_itself_shows_no_image_twice(tmp_path: Path, folder: Path) -> None:
    (folder / "sub" / "again").symlink_to(folder)
    (folder / "other").symlink_to(folder / "sub")
    assert find_images(folder).names == ["a.png", "b.png", "other/c.png", "sub/c.png"]


def test_many_names_in_one_folder_of_a_tar_file_are_short_at_once(tmp_path: Path) -> None:
    names = [f"all/{number}.png" for number in range(20_000)]
    began = time.process_time()
    assert ImageFiles(tmp_path, names, [b""] * len(names)).short_names[-1] == "19999.png"
    assert time.process_time() - began < 2  # it was quadratic: minutes


@pytest.mark.parametrize("ending", ["jpg", "png", "tiff", "lzw.tiff"])
@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 8])
def test_sizes_are_those_of_the_decoded_picture(tmp_path: Path, ending: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"compression": "tiff_lzw"} if ending == "lzw.tiff" else {}
    Image.new("RGB", (40, 20)).save(tmp_path / f"a.{ending}", exif=exif, **options)
    images = find_images(tmp_path)
    expected = (20, 40) if orientation > 4 else (40, 20)
    assert images.decode(0).size == expected
    assert images.measure().tolist() == [list(expected)]


def test_a_point_has_two_coordinates_in_pictures_and_three_in_volumes(tmp_path: Path, folder: Path) -> None:
    table = read_table(write(tmp_path / "t.csv", "file,x,y,z\na.png,0.5,0.5,70\nb.png,1,0,80\nsub/c.png,0,1,90\n"))
    matched, _ = match_files(table, folder)  # z is any number there, not a fraction
    assert matched.points == [(0, 1)]
    assert table.take([0]).points == [(0, 1, 2)]
    for name in ("a", "b"):
        write(tmp_path / "volumes" / f"{name}.nii", "")
    flat = read_table(write(tmp_path / "f.csv", "file,x,y\na.nii,0.5,0.5\nb.nii,1,0\n"))
    with pytest.raises(td.TensorDropoutError, match="x and y are a point in a picture, and these are volumes"):
        match_files(flat, tmp_path / "volumes")
