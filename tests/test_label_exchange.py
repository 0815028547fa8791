"""Labels of other programs: every format there and back, its dialects, and every damage in one sentence.

The files are written by hand as the programs write them; the labels of the round trips are SIMULATED.
"""

from __future__ import annotations

import contextlib
import json
import math
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensor_dropout import TensorDropoutError
from tensor_dropout_lab.data.points_table import read_table
from tensor_dropout_lab.labelling.exchange import FORMATS, ExternalLabels, match_labels, read_labels, write_labels
from tensor_dropout_lab.labelling.exchange.external_labels import find_absent

NAN = math.nan


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def make_labels(files=("a.png", "b/c.png"), names=("tip", "base"), points=None, absent=None, sizes=None, groups=None):
    shape = (len(files), len(names))
    points = np.full((*shape, 2), 0.25) if points is None else np.array(points, dtype=float)
    absent = np.zeros(shape, dtype=bool) if absent is None else np.array(absent)
    sizes = np.tile((40, 20), (shape[0], 1)) if sizes is None else np.array(sizes)
    return ExternalLabels(tuple(names), tuple(files), points, absent, sizes=sizes, groups=groups)


# There and back.

# No control characters and no slashes; what ends in spaces cannot be told from what does not in most programs.
words = st.text(
    st.one_of(
        st.sampled_from(" ,;\"'=_-.xyXY1é中"), st.characters(exclude_categories=("C", "Z"), exclude_characters="/\\")
    ),
    min_size=1,
    max_size=8,
).map(str.strip)
words = words.filter(lambda word: word.strip("._- ") != "")


def spell(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


@st.composite
def labels_of_a_folder(draw):
    names = draw(st.lists(words, min_size=1, max_size=4, unique=True))
    folders = st.sampled_from(["", "v 1/", "v,2/", "labeled-data/v 1/", "deep/er/"])
    images = draw(st.lists(st.builds("{}{}.png".format, folders, words), min_size=1, max_size=5, unique_by=spell))
    shape = (len(images), len(names))
    sizes = np.array(draw(st.lists(st.tuples(*[st.integers(1, 9000)] * 2), min_size=shape[0], max_size=shape[0])))
    fractions = st.floats(0, 1, allow_subnormal=False)
    states = st.one_of(st.tuples(fractions, fractions), st.sampled_from(["absent", "open"]))
    table = draw(st.lists(states, min_size=math.prod(shape), max_size=math.prod(shape)))
    points = np.array([(NAN, NAN) if isinstance(state, str) else state for state in table]).reshape(*shape, 2)
    absent = np.array([state == "absent" for state in table]).reshape(shape)
    points[0, 0], absent[0, 0] = (0.5, 1.0), False
    groups = draw(st.none() | st.lists(words, min_size=shape[0], max_size=shape[0]).map(tuple))
    return ExternalLabels(tuple(names), tuple(images), points, absent, sizes, groups)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=40, deadline=None)
@given(labels=labels_of_a_folder())
def test_there_and_back(tmp_path_factory, format, labels):
    path = tmp_path_factory.mktemp("exchange") / f"labels{FORMATS[format].ending}"
    write_labels(path, labels, format)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    found = match_labels(read_labels(path, format), labels.files, labels.sizes)
    labelled = labels.there | labels.absent if FORMATS[format].knows_absent else labels.there
    expected = labels.take(np.flatnonzero(labelled.any(axis=1)))
    assert found.files == expected.files
    assert found.named == (format != "tps")
    assert not found.named or found.names == labels.names
    precision = 1e-4 / expected.sizes[:, None] + 1e-8  # a tenth of a thousandth of a pixel
    np.testing.assert_array_equal(np.isnan(found.points), np.isnan(expected.points))
    assert (np.nan_to_num(np.abs(found.points - expected.points)) <= precision).all()
    absent = expected.absent if FORMATS[format].knows_absent else find_absent(expected.points)
    np.testing.assert_array_equal(found.absent, absent)
    np.testing.assert_array_equal(found.sizes, expected.sizes)
    assert found.groups == expected.groups or format in ("tps", "deeplabcut")
    assert not [note for note in found.notes if "left out" in note]


def test_the_format_is_told_by_the_ending_and_a_csv_by_its_first_cell(tmp_path):
    labels = make_labels()
    for format, known in FORMATS.items():
        path = tmp_path / f"{format}{known.ending.upper()}"
        write_labels(path, labels, format)
        assert read_labels(path).convention == known.convention
        np.testing.assert_allclose(match_labels(read_labels(path), labels.files, labels.sizes).points, labels.points)
    assert read_labels(tmp_path / "deeplabcut.CSV").names == ("tip", "base")


def test_our_table_is_one_that_fit_reads(tmp_path):
    points = [[[0.25, 0.5], [NAN, NAN]], [[NAN, NAN], [NAN, NAN]]]
    write_labels(tmp_path / "points.csv", make_labels(points=points, groups=("s1", "s2"), absent=np.ones((2, 2), bool)))
    assert (
        tmp_path / "points.csv"
    ).read_text() == "file,group,tip_x,tip_y,base_x,base_y\na.png,s1,0.25000000,0.50000000,,\n"
    table = read_table(tmp_path / "points.csv")
    assert (table.columns, table.groups, table.points) == (
        ["tip_x", "tip_y", "base_x", "base_y"],
        ["s1"],
        [(0, 1), (2, 3)],
    )


def test_where_each_format_puts_a_point(tmp_path):
    """The centre of the upper left pixel of 40 × 20, and a point a quarter of the way into the picture."""
    labels = make_labels(files=("v/a.png",), points=[[[0.5 / 40, 0.5 / 20], [0.25, 0.25]]])
    for format in FORMATS:
        write_labels(tmp_path / format, labels, format)
    assert (tmp_path / "tps").read_text().splitlines()[:3] == ["LM=2", "0.50000 19.50000", "10.00000 15.00000"]
    annotation = json.loads((tmp_path / "coco").read_text())["annotations"][0]
    assert annotation["keypoints"] == [0, 0, 2, 9.5, 4.5, 2]
    assert annotation["bbox"] == [0.5, 0.5, 9.5, 4.5]  # from edge to edge
    assert (tmp_path / "deeplabcut").read_text().splitlines()[3] == "labeled-data,v,a.png,0.0000,0.0000,9.5000,4.5000"
    assert (tmp_path / "csv").read_text().splitlines()[1] == "v/a.png,0.01250000,0.02500000,0.25000000,0.25000000"


# Dialects.


def test_tps_of_tpsdig(tmp_path):
    """Windows' line ends and alphabet, a path of Windows, curves, a scale, a missing landmark, an image without any."""
    text = (
        "LM=2\r\n10.00000 15.00000\r\n-1.00000 -1.00000\r\nCURVES=1\r\nPOINTS=2\r\n1.0 2.0\r\n3.0 4.0\r\n"
        "IMAGE=C:\\fotos\\Flügel 1.JPG\r\nID=0\r\nSCALE=0.001\r\nLM=0\r\nIMAGE=b.png\r\nID=1\r\n"
    )
    read = read_labels(write(tmp_path / "wings.TPS", text.encode("cp1252")))
    assert (read.names, read.named) == (("1", "2"), False)
    assert read.files == ("C:\\fotos\\Flügel 1.JPG", "b.png")
    found = match_labels(read, ["b.png", "Flügel 1.jpg"], np.array([[40, 20], [40, 20]]))
    assert found.files == ("Flügel 1.jpg", "b.png")
    np.testing.assert_allclose(found.points, [[[0.25, 0.25], [NAN, NAN]], [[NAN, NAN], [NAN, NAN]]])
    assert found.absent.tolist() == [[False, True], [False, False]]
    assert "curves and outlines of 1 image were left out" in found.notes[0]


def test_tps_of_geomorph_and_of_a_land_that_writes_commas(tmp_path):
    text = "\n  lm=2\n 1 2\n NA NA\nIMAGE = a.png\nid=5\n\nLM=2\n3,5 4,25\n1e1\t2\nCOMMENT=by hand\nIMAGE=b.png"
    read = read_labels(write(tmp_path / "a.tps", text))
    np.testing.assert_array_equal(read.points, [[[1, 2], [NAN, NAN]], [[3.5, 4.25], [10, 2]]])
    assert match_labels(read, ["a.png", "b.png"], np.full((2, 2), 20)).files == ("a.png", "b.png")


COCO = {
    "images": [{"id": "x", "file_name": "a.png", "width": 40, "height": 20}, {"id": 7, "file_name": "b.png"}],
    "categories": [{"id": 1, "name": "fly", "keypoints": ["tip", "base"]}, {"id": 2, "name": "box"}],
    "annotations": [
        {"id": 1, "image_id": "x", "category_id": 1, "keypoints": [9.5, 4, 2, 0, 0, 0], "num_keypoints": 1},
        {"id": 2, "image_id": "x", "category_id": 2, "bbox": [0, 0, 3, 3]},
        {"id": 3, "image_id": 7, "category_id": 1, "keypoints": [0, 0, 0, 0, 0, 0]},
        {"id": 4, "image_id": 7, "category_id": 1, "keypoints": [1, 2, 1, 3, 4, 2.0]},
    ],
}


def test_coco_of_others(tmp_path):
    """Ids that are texts, boxes beside keypoints, an object without any keypoint, hidden keypoints, sizes left out."""
    read = read_labels(write(tmp_path / "a.json", b"\xef\xbb\xbf" + json.dumps(COCO).encode()))
    assert (read.names, read.files, read.sizes) == (("tip", "base"), ("a.png", "b.png"), None)
    np.testing.assert_array_equal(read.points, [[[9.5, 4], [NAN, NAN]], [[1, 2], [3, 4]]])
    assert read.absent.tolist() == [[False, True], [False, False]]
    assert read.notes == ("1 annotations without keypoints were left out",)


def test_coco_without_names(tmp_path):
    document = {**COCO, "categories": [{"id": 1, "name": "fly"}]}
    read = read_labels(write(tmp_path / "a.json", json.dumps(document)))
    assert (read.names, read.named) == (("1", "2"), False)


DEEPLABCUT = "scorer,anna,anna,anna,anna\nbodyparts,nose,nose,tail,tail\ncoords,x,y,x,y\n"


@pytest.mark.parametrize("columns", [1, 3])
def test_deeplabcut_with_one_column_and_with_three(tmp_path, columns):
    text = DEEPLABCUT + "labeled-data/v1/img1.png,9.5,4.5,,\nlabeled-data/v2/img1.png,,,,\n"
    if columns == 3:
        text = (
            text.replace("scorer,", "scorer,,,").replace("bodyparts,", "bodyparts,,,").replace("coords,", "coords,,,")
        )
        text = text.replace("v1/", "v1,").replace("v2/", "v2,").replace("labeled-data/", "labeled-data,")
    read = read_labels(write(tmp_path / "CollectedData_anna.csv", text.replace("\n", "\r\n")))
    assert read.files == ("labeled-data/v1/img1.png", "labeled-data/v2/img1.png")
    assert (read.names, read.groups) == (("nose", "tail"), ("v1", "v2"))
    found = match_labels(read, ["v1/img1.png", "v2/img1.png"], np.array([[40, 20], [40, 20]]))
    np.testing.assert_allclose(found.points[0], [[0.25, 0.25], [NAN, NAN]])
    assert found.absent.tolist() == [[False, True], [False, False]]


def test_a_table_with_other_columns_and_other_names(tmp_path):
    text = "file,sex,x0,y0,tip.x,tip.y,age\na.png,f,0.1,0.2,0.3,0.4,7\n"
    read = read_labels(write(tmp_path / "a.csv", text))
    assert (read.names, read.notes) == (("0", "tip"), ("Columns that are no points were left out: sex, age",))
    np.testing.assert_array_equal(read.points, [[[0.1, 0.2], [0.3, 0.4]]])


# Which image is meant.


def test_an_image_is_found_by_its_path_or_by_an_end_of_it_that_is_the_only_one():
    images = ["a/1.png", "b/1.png", "b/2.png", "c/Ä.png", "3.png"]
    found = match_labels(
        make_labels(files=("b/1.png", "x\\a\\1.png", "2.png", "c/A\u0308.png", "./3.PNG "), names=("tip",)),
        images,
        np.full((5, 2), 10),
    )
    assert found.files == ("b/1.png", "a/1.png", "b/2.png", "c/Ä.png", "3.png")
    assert found.notes == ()


def test_images_that_are_not_there_are_named_and_left_out():
    found = match_labels(
        make_labels(files=("a.png", "no.png"), names=("tip",)), ["a.png", "z.png"], np.full((2, 2), 10)
    )
    assert found.files == ("a.png",)
    assert found.notes == ("1 image is not in the folder, and their labels were left out: no.png",)


def test_an_image_in_another_folder_is_taken_and_said():
    """But not if a row fits its image better: frames of several videos have the same names."""
    found = match_labels(make_labels(files=("v1/1.png", "v2/1.png"), names=("tip",)), ["v2/1.png"], np.full((1, 2), 10))
    assert (found.files, found.notes) == (
        ("v2/1.png",),
        ("1 image is not in the folder, and their labels were left out: v1/1.png",),
    )
    found = match_labels(make_labels(files=("v1/1.png",), names=("tip",)), ["v2/1.png"], np.full((1, 2), 10))
    assert found.notes == ("1 image was found by their names, in other folders, such as v1/1.png as v2/1.png",)


def test_images_that_cannot_be_read_are_left_out():
    found = match_labels(
        make_labels(files=("a.png", "b.png"), names=("t",)), ["a.png", "b.png"], np.array([[0, 0], [9, 9]])
    )
    assert found.files == ("b.png",)
    assert "1 image cannot be read, and their labels were left out: a.png" in found.notes[0]


@pytest.mark.parametrize(
    ("files", "images", "said"),
    [
        (["1.png"], ["a/1.png", "b/1.png"], r"1\.png may be several images of the folder: a/1\.png, b/1\.png"),
        (["x/1.png", "y/1.png"], ["1.png"], r"x/1\.png and y/1\.png would both be 1\.png"),
        (["1.png"], ["2.png"], r"none of its 1 image is in the folder: it has 1\.png, the folder has 2\.png"),
    ],
)
def test_images_that_are_not_clear(files, images, said):
    with pytest.raises(TensorDropoutError, match=said):
        match_labels(make_labels(files=files, names=("tip",)), images, np.full((len(images), 2), 10))


def test_another_size_and_points_far_outside(tmp_path):
    document = {**COCO, "images": [{"id": i, "file_name": f"{i}.png", "width": 40, "height": 20} for i in ("x", 7)]}
    read = read_labels(write(tmp_path / "a.json", json.dumps(document)))
    with pytest.raises(
        TensorDropoutError, match=r"x\.png has 40 × 20 pixels in this file, and 20 × 40 in the folder.*EXIF"
    ):
        match_labels(read, ["x.png", "7.png"], np.array([[20, 40], [40, 20]]))
    tps = read_labels(write(tmp_path / "a.tps", "LM=1\n900 3\nIMAGE=a.png\n"))
    with pytest.raises(
        TensorDropoutError, match=r"point '1' of a\.png is at 900, 3, far outside.*are these the pictures"
    ):
        match_labels(tps, ["a.png"], np.array([[40, 20]]))
    with pytest.raises(TensorDropoutError, match="look like pixels"):
        match_labels(make_labels(points=np.full((2, 2, 2), 90.0)), ["a.png", "b/c.png"], np.full((2, 2), 400))


# Damage.


def change(**changes):
    return json.dumps({**COCO, **changes})


def annotate(**changes):
    return change(annotations=[{**COCO["annotations"][0], **changes}])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.tps", "", "is empty"),
        ("a.tps", b"LM=1\0", "is no text file"),
        ("a.tps", '{"images": []}', "line 1 is .*two numbers or KEY=VALUE is expected"),
        ("a.tps", "IMAGE=a.png\n", "line 1, IMAGE=, comes before any LM="),
        ("a.tps", "\n", "is empty"),
        ("a.tps", "LM=x\n", "line 1 is LM=x; a number of landmarks"),
        ("a.tps", "LM=-3\n", "line 1 is LM=-3; a number of landmarks"),
        ("a.tps", "LM=2\n1 2\nIMAGE=a.png\n", r"line 1 \(a.png\) says LM=2, and 1 landmarks follow"),
        ("a.tps", "LM=1\n1 2\n3 4\nIMAGE=a.png\n", "line 3 is one landmark more than LM=1 of line 1"),
        ("a.tps", "LM=1\n1 2 3\nIMAGE=a.png\n", "line 2 is '1 2 3'; two numbers"),
        ("a.tps", "LM=1\n1 inf\nIMAGE=a.png\n", "line 2 is '1 inf'; two numbers"),
        ("a.tps", "LM=1\n1 2\nID=7\n", r"line 1 \(ID=7\) has no IMAGE="),
        ("a.tps", "LM3=1\n1 2 3\nIMAGE=a.png\n", "landmarks in space"),
        ("a.tps", "LM=0\nIMAGE=a.png\n", "no image in it has landmarks"),
        ("a.tps", "LM=1\n1 2\nIMAGE=a.png\nLM=1\n1 2\nIMAGE=a.png\n", "the image a.png is there more than once"),
        (
            "a.tps",
            "LM=1\n1 2\nIMAGE=a.png\nLM=2\n1 2\n3 4\nIMAGE=b.png\n",
            r"line 1 \(a.png\) has 1 landmarks, the block of line 4 \(b.png\) 2; give every image the same",
        ),
        ("a.json", "{", "is no JSON that can be read"),
        ("a.json", "[" * 100_000, "is no JSON that can be read"),
        ("a.json", "[]", "this is a list, such as a file of results"),
        ("a.json", "{}", "has a list 'images' of objects; this file has nothing"),
        ("a.json", change(images={"a": 1}), "has a list 'images' of objects; this file has images, categories"),
        ("a.json", change(images=[{"id": [1], "file_name": "a"}]), r"images\[0\] has the id \[1\]"),
        ("a.json", change(images=[{"id": 1, "file_name": "a"}, {"id": 1}]), r"images\[1\] has the id 1; each needs"),
        ("a.json", change(images=[{"id": 1}]), r"images\[0\] has no file_name"),
        (
            "a.json",
            change(images=[{"id": i, "file_name": "a", "width": -4, "height": 3} for i in ("x", 7)]),
            "a is -4 wide and 3 high",
        ),
        ("a.json", change(annotations=[]), "none of its 0 annotations has keypoints"),
        ("a.json", annotate(image_id=99), r"\(id 1\) is of image 99, which is not in images"),
        ("a.json", annotate(category_id=5), "are of category 5, which is not in categories"),
        ("a.json", annotate(keypoints=[1, 2, 3]), "has 3 numbers of keypoints; 2 keypoints, each x, y, v, are 6"),
        ("a.json", annotate(keypoints=[1, 2, 3, 4, 5, 6]), "v, is 0, 1 or 2"),
        ("a.json", annotate(keypoints=[1, 2, 2, True, 5, 2]), "are a list of numbers"),
        ("a.json", annotate(keypoints={"a": 1}), "are a list of numbers"),
        ("a.json", annotate(keypoints=[1, NAN, 2, 1, 1, 2]), "not at finite numbers"),
        ("a.json", annotate(keypoints=[1, math.inf, 2, 1, 1, 2]), "not at finite numbers"),
        ("a.json", change(annotations=[COCO["annotations"][0]] * 2), "a.png has several objects with keypoints"),
        (
            "a.json",
            change(annotations=[COCO["annotations"][0], {**COCO["annotations"][3], "category_id": 2}]),
            "annotations of several categories have keypoints: fly, box",
        ),
        ("a.json", change(categories=[{"id": 1, "keypoints": ["a", 3]}]), "are a list of names"),
        ("a.json", change(categories=[{"id": 1, "keypoints": ["a", "a"]}]), "the point a is there more than once"),
        ("c.csv", "scorer,individuals\nindividuals,a,a\nbodyparts,n,n\ncoords,x,y\n", "several animals per image"),
        ("c.csv", "scorer,a\n", "the first cells of the first three lines are scorer; DeepLabCut writes"),
        ("c.csv", DEEPLABCUT.replace("coords,x,y", "coords,y,x"), "has a column x and then a column y"),
        ("c.csv", DEEPLABCUT.replace("tail,tail", "tail,neck"), "has a column x and then a column y"),
        ("c.csv", DEEPLABCUT.replace("nose", "tail"), "the point tail is there more than once"),
        ("c.csv", DEEPLABCUT.replace("anna\n", "bert\n"), "labels of several people: anna, bert"),
        (
            "c.csv",
            "scorer,n,n,n\nbodyparts,a,a,a\ncoords,x,y,likelihood\n0,1,2,0.5\n",
            "predictions of a network",
        ),
        ("c.csv", DEEPLABCUT + "a.png,1,2,3\n", "line 4 has 4 cells, the header has 5"),
        ("c.csv", DEEPLABCUT + "a.png,1,2,3,\n", "line 4, 'tail' has only one of x and y"),
        ("c.csv", DEEPLABCUT + "a.png,1,2,3,inf\n", "line 4 has 'inf'; a number"),
        ("c.csv", DEEPLABCUT + ",1,2,3,4\n", "line 4 names no image"),
        ("p.csv", "file,a,b\nx.png,1,2\n", "no two columns are a point"),
        ("p.csv", "image;x0;y0\n", "separated by semicolons"),
        ("p.csv", "file,a_x,a_y\nx.png,1,\n", r"x\.png, point 'a' has only one of x and y"),
        ("p.csv", "file,a_x,a_y\nx.png,1,b\n", "line 2, column 'a_y': 'b' is not a number"),
        ("p.csv", "file,a_x,a_y\nx.png,1,2\nx.png,1,2\n", "files with more than one row: x.png"),
        (
            "labels.xml",
            "<a/>",
            r"choose one of \.tps, \.json, \.csv, or name it with --format: tps, coco",
        ),
    ],
)
def test_damaged_files(tmp_path, name, text, said):
    path = write(tmp_path / name, text)
    with pytest.raises(TensorDropoutError, match=said) as caught:
        read_labels(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there(tmp_path):
    for path, said in ((tmp_path / "no.tps", "there is no such file"), (tmp_path, "is a folder")):
        with pytest.raises(TensorDropoutError, match=said):
            read_labels(path, "tps")
    with pytest.raises(TensorDropoutError, match="no format 'coko'; did you mean 'coco'"):
        read_labels(write(tmp_path / "a.json", "{}"), "coko")


@pytest.mark.parametrize("data", [b"\xff\xfe" + b"LM=1", b"PK\x03\x04", b"\x89PNG\r\n\x1a\n\0", b"\xff" * 99])
@pytest.mark.parametrize("format", FORMATS)
def test_files_of_other_kinds_are_refused_in_a_sentence(tmp_path, format, data):
    with pytest.raises(TensorDropoutError, match=r"labels\.bin"):
        read_labels(write(tmp_path / "labels.bin", data), format)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), format=st.sampled_from(list(FORMATS)))
def test_any_cut_and_any_changed_byte_is_read_or_refused_in_a_sentence(tmp_path_factory, data, format):
    path = tmp_path_factory.mktemp("damage") / "labels"
    write_labels(path, make_labels(), format)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(place, len(content)))])
    with contextlib.suppress(TensorDropoutError):  # any other exception is a failure
        assert read_labels(path, format).points.ndim == 3


@pytest.mark.parametrize(
    ("labels", "format", "said"),
    [
        (make_labels(points=np.full((2, 2, 2), NAN)), "csv", "no image has a label yet"),
        (make_labels(points=np.full((2, 2, 2), -0.1)), "tps", r"a\.png, point 'tip', lies left of the image or below"),
        (make_labels(files=("a\nb.png", "c.png")), "tps", "has a line break"),
        (make_labels(sizes=[[0, 0], [3, 3]]), "coco", "need the size of every image, and a.png cannot be read"),
        (make_labels(files=("a\udcff.png", "c.png")), "tps", "is no text; rename the image"),
    ],
)
def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path, labels, format, said):
    path = write(tmp_path / "labels", "before")
    with pytest.raises(TensorDropoutError, match=said):
        write_labels(path, labels, format)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TensorDropoutError, match="cannot be written"):
        write_labels(tmp_path / "file" / "a.tps", make_labels())


@pytest.mark.parametrize(
    "change",
    [
        {"points": np.zeros((1, 2, 2))},
        {"absent": np.zeros((2, 1), dtype=bool)},
        {"sizes": np.zeros((1, 2))},
        {"groups": ("a",)},
        {"points": [[[NAN, 1], [1, 1]], [[1, 1], [1, 1]]]},
        {"points": np.full((2, 2, 2), np.inf)},
        {"names": ("tip", "tip")},
    ],
)
def test_labels_that_do_not_belong_together(change):
    with pytest.raises(TensorDropoutError):
        make_labels(**change)
