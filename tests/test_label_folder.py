"""Which pictures a folder has, and that no other file is ever opened."""

from __future__ import annotations

import os

import pytest
from PIL import Image

from label_project import draw_spots
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.labelling.folder import list_pictures, match_groups, read_groups


def test_pictures_are_counted_as_people_count_and_labels_are_none(tmp_path):
    draw_spots(tmp_path, 11)
    draw_spots(tmp_path / "b", 1)
    draw_spots(tmp_path / "labels", 1)
    draw_spots(tmp_path / ".thumbs", 1)
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / ".hidden.png").write_bytes(b"")
    (tmp_path / "bad.PNG").write_text("no picture")
    (tmp_path / "folder.png").mkdir()
    turned = Image.new("RGB", (10, 20))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    folder = list_pictures(tmp_path, tmp_path / "labels")
    assert folder.names == [*(f"{n}.png" for n in range(11)), "b/0.png", "bad.PNG", "turned.jpg"]
    pictures = {picture.name: picture for picture in folder.pictures}
    assert (pictures["turned.jpg"].width, pictures["turned.jpg"].height) == (20, 10)
    assert pictures["bad.PNG"].problem
    assert str(tmp_path) not in pictures["bad.PNG"].problem
    assert {name for name, picture in pictures.items() if picture.problem} == {"bad.PNG"}


def test_links_that_lead_out_are_listed_and_never_opened(tmp_path):
    draw_spots(tmp_path / "outside", 1)
    inside = tmp_path / "inside"
    draw_spots(inside, 2)
    (inside / "alias.png").symlink_to("0.png")
    (inside / "away.png").symlink_to(tmp_path / "outside" / "0.png")
    (inside / "gone.png").symlink_to(inside / "nothing.png")
    (inside / "elsewhere").symlink_to(tmp_path / "outside", target_is_directory=True)
    os.mkfifo(inside / "pipe.png")
    (tmp_path / "link").symlink_to(inside, target_is_directory=True)
    folder = list_pictures(tmp_path / "link", tmp_path / "link" / "labels")
    assert {picture.name: picture.problem for picture in folder.pictures} == {
        "0.png": None,
        "1.png": None,
        "alias.png": None,
        "away.png": "a link out of the folder",
        "gone.png": "there is no such file",
        "pipe.png": "no plain file",
    }
    assert folder.find(2) == (inside / "0.png").resolve()
    (inside / "1.png").unlink()
    (inside / "1.png").symlink_to(tmp_path / "outside" / "0.png")  # after the folder was listed
    with pytest.raises(TensorDropoutError, match=r"^1\.png cannot be read: a link out of the folder$"):
        folder.find(1)


def test_folders_that_cannot_be_labelled(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, said in (("nowhere", "does not exist"), ("file", "is a file"), ("empty", "there are no pictures in")):
        with pytest.raises(TensorDropoutError, match=said):
            list_pictures(tmp_path / name, tmp_path / "labels")


def test_groups_of_a_table(tmp_path):
    path = tmp_path / "groups.csv"
    path.write_text("file,group\na.png,fly\nb.png, bee\nc.png,\n")
    assert read_groups(path, ["b.png", "a.png"]) == ["bee", "fly"]
    with pytest.raises(TensorDropoutError, match=r"2 of 3 pictures have no group: c\.png, d\.png"):
        read_groups(path, ["a.png", "c.png", "d.png"])
    path.write_text("file,specimen\na.png,fly\n")
    with pytest.raises(TensorDropoutError, match="the columns file and group"):
        read_groups(path, ["a.png"])
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TensorDropoutError, match="is not a CSV in UTF-8"):
        read_groups(path, ["a.png"])
    with pytest.raises(TensorDropoutError, match="cannot be read"):
        read_groups(tmp_path, ["a.png"])


def test_groups_of_a_pattern():
    assert match_groups("fly[0-9]+", ["a/fly1_2.png", "fly22_1.png"]) == ["fly1", "fly22"]
    with pytest.raises(TensorDropoutError, match=r"does not match 1 of 2 names: bee\.png"):
        match_groups("fly", ["fly.png", "bee.png"])
    with pytest.raises(TensorDropoutError, match="no regular expression"):
        match_groups("(", ["a.png"])
    with pytest.raises(TensorDropoutError, match=r"names no group in 1 of 1 names: a\.png"):
        match_groups("a(b)?", ["a.png"])
