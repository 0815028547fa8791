"""CIFAR: the official format, the MD5s, and a pickle reader that runs nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data import cifar, load_data
from tensor_dropout_lab.data.cifar import OFFICIAL, unpickle_plain


class Text(bytes):
    """A string of Python 2, as the official files have them."""


def pickle_like_python2(value) -> bytes:
    """The opcodes of Python 2's protocol 2, as in the official files: byte strings, and numpy's old module names."""
    if isinstance(value, np.ndarray):
        dtype = b"cnumpy\ndtype\nU\x02" + value.dtype.str[1:].encode() + b"K\x00K\x01\x87R"
        dtype += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        shape = b"".join(pickle_like_python2(size) for size in value.shape)
        content = value.tobytes()
        state = b"(K\x01(" + shape + b"t" + dtype + b"\x89T" + struct.pack("<i", len(content)) + content + b"tb"
        return b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R" + state
    if isinstance(value, dict):
        items = b"".join(pickle_like_python2(Text(key)) + pickle_like_python2(item) for key, item in value.items())
        return b"}(" + items + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(pickle_like_python2, value)) + b"e"
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    return b"U" + bytes([len(value)]) + value


def write_file(path: Path, content: dict) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x80\x02" + pickle_like_python2(content) + b".")
    return hashlib.md5(path.read_bytes()).hexdigest()


def make_batch(name: str, n: int, classes: int, labels: bytes) -> dict:
    images = np.random.default_rng(len(name)).integers(0, 256, (n, 3072), dtype=np.uint8)
    files = [Text(f"{name}_{i}.png".encode()) for i in range(n)]
    return {b"data": images, labels: [i % classes for i in range(n)], b"filenames": files, b"batch_label": Text(b"x")}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Both data sets in the official format with few images; their MD5s replace the published ones."""
    contents = {}
    for name, classes in (("cifar10", 10), ("cifar100", 100)):
        official = OFFICIAL[name]
        folder = tmp_path / official.folder
        sums = {}
        for part, n in (("train", 2 * classes), ("test", classes)):
            made = {file: make_batch(file, n, classes, official.labels) for file in getattr(official, part)}
            sums[part] = {file: write_file(folder / file, batch) for file, batch in made.items()}
            contents[name, part] = np.concatenate([batch[b"data"] for batch in made.values()])
        (meta,) = official.meta
        labels = [Text(f"class{i:02d}".encode()) for i in range(classes)]
        sums["meta"] = {meta: write_file(folder / meta, {official.label_names: labels})}
        monkeypatch.setitem(OFFICIAL, name, dataclasses.replace(official, **sums))
    return tmp_path, contents


@pytest.mark.parametrize(("name", "classes", "n"), [("cifar10", 10, 100), ("cifar100", 100, 200)])
def test_files_in_the_official_format_are_read(small, name, classes, n):
    root, contents = small
    data = load_data(name, root=root, validation=0)
    assert data.validation is None
    assert (len(data.train), len(data.test), data.outputs) == (n, classes, classes)
    assert data.train.inputs.dtype == torch.uint8
    assert np.array_equal(data.train.inputs.flatten(1).numpy(), contents[name, "train"])
    assert np.array_equal(data.test.inputs.flatten(1).numpy(), contents[name, "test"])
    assert data.test.targets.tolist() == list(range(classes))
    assert data.classes[:2] == ["class00", "class01"]
    assert data.train.names[1].endswith("_1.png")
    assert data.prepare(data.train.inputs[:2]).shape == (2, 3, 32, 32)
    assert data.bounds == (0.0, 255.0)
    assert not data.simulated


def test_the_root_may_be_the_folder_its_parent_or_the_variable(small, monkeypatch):
    root, _ = small
    inner = load_data("cifar10", root=root / "cifar-10-batches-py")
    monkeypatch.setenv(cifar.DATA_VARIABLE, str(root))
    assert torch.equal(load_data("cifar10").train.inputs, inner.train.inputs)


def test_validation_images_are_the_same_share_of_every_class_and_not_trained_on(small):
    root, _ = small
    data = load_data("cifar10", root=root, validation=0.2)
    assert data.validation.targets.bincount().tolist() == [2] * 10
    assert not set(data.train.names) & set(data.validation.names)
    again = load_data("cifar10", root=root, validation=20)
    assert again.validation.names == data.validation.names
    assert load_data("cifar10", root=root, validation=20, seed=1).validation.names != data.validation.names


def test_channels_are_normalized_by_the_training_images(small):
    root, _ = small
    data = load_data("cifar10", root=root, normalize="channel", augment=False)
    out = data.prepare(data.train.inputs)
    torch.testing.assert_close(out.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(out.std(dim=(0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)
    assert data.augment is None
    with pytest.raises(TensorDropoutError, match=r"option normalize is of type .*, got 'batch'"):
        load_data("cifar10", root=root, normalize="batch")


def test_a_missing_folder_gives_the_expected_layout(tmp_path, monkeypatch):
    with pytest.raises(TensorDropoutError, match=r"Expected: ROOT/cifar-100-python/\{train,test,meta\}.*download=true"):
        load_data("cifar100", root=tmp_path)
    monkeypatch.delenv(cifar.DATA_VARIABLE, raising=False)
    with pytest.raises(TensorDropoutError, match=r"set root.*Expected: ROOT/cifar-10-batches-py/\{data_batch_1,"):
        load_data("cifar10")


def test_a_missing_file_is_named(small):
    root, _ = small
    (root / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(TensorDropoutError, match="data_batch_4 is missing"):
        load_data("cifar10", root=root)


def test_a_wrong_md5_is_refused_before_the_file_is_unpickled(small, monkeypatch):
    root, _ = small
    path = root / "cifar-100-python" / "test"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    opened = []
    monkeypatch.setattr(
        cifar, "unpickle_plain", lambda content, name: opened.append(name) or unpickle_plain(content, name)
    )
    with pytest.raises(TensorDropoutError, match=r"test has MD5 [0-9a-f]{32}, the official file has .*damaged"):
        load_data("cifar100", root=root)
    assert not [name for name in opened if name.endswith("test")]


# The unpickler.


class Touches:
    """A pickle that would create a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def evil_pickles(path: Path) -> dict[str, bytes]:
    call = f"cposix\nmkdir\n(V{path}\ntR.".encode()
    inst = f"(V{path}\niposix\nmkdir\n.".encode()
    return {
        "reduce": pickle.dumps({"a": Touches(path)}),
        "reduce, protocol 0": pickle.dumps(Touches(path), protocol=0),
        "global": b"\x80\x02" + call,
        "inst": inst,
        "getattr": b"cbuiltins\ngetattr\n(cnumpy\nndarray\nV__class__\ntR.",
        "eval": f"cbuiltins\neval\n(V__import__('os').mkdir({str(path)!r})\ntR.".encode(),
        "a submodule of numpy": b"cnumpy.testing\nmeasure\n(V1\ntR.",
        "an object array": pickle.dumps({"a": np.array([Touches(path)], dtype=object)}, protocol=2),
        "a changed stand-in": b"cnumpy\nndarray\n}(V__setstate__\nNub.",
        "truncated": pickle.dumps({"a": [1, 2, 3]})[:-4],
        "not a pickle": b"\xff\xd8\xff\xe0 a picture",
        "empty": b"",
        "a list": pickle.dumps([1, 2]),
        "a persistent id": b"Vfile\nQ.",
    }


@pytest.mark.parametrize("case", evil_pickles(Path("x")))
def test_evil_and_damaged_pickles_are_refused_and_run_nothing(case, tmp_path):
    target = tmp_path / "executed"
    with pytest.raises(TensorDropoutError, match=r"some/file is refused"):
        unpickle_plain(evil_pickles(target)[case], "some/file")
    assert not target.exists()
    assert callable(cifar.PickledArray.__setstate__)


def test_plain_data_are_read():
    content = {"a": [1, 2.5, "x", b"y", None, True], "b": {"c": (1, 2)}}
    assert unpickle_plain(pickle.dumps(content), "file") == content


@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i4", "<f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_rebuilt_from_their_bytes(dtype, order):
    array = np.arange(12).reshape(3, 4).astype(dtype, order=order)
    stand_in = cifar.PickledArray()
    held = cifar.PickledDtype(array.dtype.str)
    stand_in.__setstate__((1, array.shape, held, order == "F", array.tobytes(order)))
    assert np.array_equal(stand_in.build(), array)


# Download.


def test_files_are_downloaded_only_when_asked_and_checked(small, tmp_path, monkeypatch):
    root, contents = small
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(root / "cifar-100-python", "cifar-100-python")
    path = tmp_path / "archive.tar.gz"
    path.write_bytes(archive.getvalue())
    sums = {"url": path.as_uri(), "archive_md5": hashlib.md5(archive.getvalue()).hexdigest()}
    monkeypatch.setitem(OFFICIAL, "cifar100", dataclasses.replace(OFFICIAL["cifar100"], **sums))
    fresh = tmp_path / "fresh"
    data = load_data("cifar100", root=fresh, download=True, validation=0)
    assert np.array_equal(data.train.inputs.flatten(1).numpy(), contents["cifar100", "train"])
    assert sorted(file.name for file in (fresh / "cifar-100-python").iterdir()) == ["meta", "test", "train"]
    path.write_bytes(archive.getvalue() + b"more")
    with pytest.raises(TensorDropoutError, match=r"archive\.tar\.gz has MD5"):
        load_data("cifar100", root=tmp_path / "other", download=True)
    path.unlink()
    with pytest.raises(TensorDropoutError, match="cannot be fetched"):
        load_data("cifar100", root=tmp_path / "other", download=True)


# The real thing.


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_the_official_files(name, classes):
    folder = Path(os.environ.get(cifar.DATA_VARIABLE, "")) / OFFICIAL[name].folder
    if not folder.is_dir() or cifar.DATA_VARIABLE not in os.environ:
        pytest.skip(f"the official files are not here: set ${cifar.DATA_VARIABLE} to a folder with {folder.name}/")
    data = load_data(name)
    assert (len(data.train), len(data.validation), len(data.test)) == (45_000, 5_000, 10_000)
    assert data.validation.targets.bincount().tolist() == [5000 // classes] * classes
    assert data.test.targets.bincount().tolist() == [10_000 // classes] * classes
