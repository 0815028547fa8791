"""COCO keypoints: JSON with ``images``, ``categories`` that name the keypoints, and ``annotations``.

A keypoint is x, y, v: v = 0 is not labelled, 1 labelled though hidden, 2 visible. Coordinates count pixels from 0, and
a whole number is the centre of a pixel, as Detectron2 takes it: ours in pixels is theirs plus 0.5. Boxes are measured
from edge to edge.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.inputs import name_some
from tensor_dropout_lab.labelling.exchange.external_labels import Convention, ExternalLabels, number_names

CONVENTION = Convention("pixels", centres=True)
_DIGITS = 4
_ABSENT = "absent"
"""A key of ours in annotations: the numbers, from 0, of the keypoints that cannot be seen; others with v = 0 "
"are open."""


def read_coco(path: Path, text: str) -> ExternalLabels:
    """The keypoints of a COCO file.

    Raises:
        TensorDropoutError: for what is no such file, and for several objects on one image.
    """
    document = _parse(path, text)
    images = _index(path, _read_records(path, document, "images"), "images")
    categories = _index(path, _read_records(path, document, "categories"), "categories")
    annotations = _read_records(path, document, "annotations")
    chosen = [annotation for annotation in annotations if annotation.get("keypoints")]
    if not chosen:
        raise TensorDropoutError(
            f"{path}: none of its {len(annotations)} annotations has keypoints; export it with keypoints"
        )
    names, named = _choose_names(path, chosen, categories)
    order = {identity: row for row, identity in enumerate(images)}
    points = np.full((len(images), len(names), 2), math.nan)
    absent = np.zeros((len(images), len(names)), dtype=bool)
    seen: set[Any] = set()
    for annotation in chosen:
        identity = _read_image_id(path, annotation, order)
        read_points, read_absent = _read_keypoints(path, annotation, names)
        if not (read_absent.any() or np.isfinite(read_points).any()):
            continue  # an object without any keypoint: nothing is said
        file = images[identity]["file_name"]
        if identity in seen:
            raise TensorDropoutError(
                f"{path}: {file} has several objects with keypoints; one per image is read, so keep one, or cut "
                "the image up"
            )
        seen.add(identity)
        points[order[identity]], absent[order[identity]] = read_points, read_absent
    left_out = len(annotations) - len(chosen)
    return ExternalLabels(
        names,
        tuple(image["file_name"] for image in images.values()),
        points,
        absent,
        sizes=_read_sizes(path, list(images.values())),
        groups=_read_groups(list(images.values())),
        convention=CONVENTION,
        named=named,
        notes=(f"{left_out} annotations without keypoints were left out",) if left_out else (),
        source=str(path),
    )


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TensorDropoutError(f"{path} is no JSON that can be read ({error}); export it anew") from None
    if not isinstance(document, dict):
        raise TensorDropoutError(
            f"{path}: a COCO file is an object with images, categories and annotations; this is a "
            f"{type(document).__name__}, "
            "such as a file of results; export the annotations"
        )
    return document


def _read_records(path: Path, document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    records = document.get(key)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        there = name_some(list(map(str, document))) or "nothing"
        raise TensorDropoutError(f"{path}: a COCO file has a list {key!r} of objects; this file has {there}")
    return records


def _index(path: Path, records: list[dict[str, Any]], key: str) -> dict[Any, dict[str, Any]]:
    """Images or categories by their id."""
    by_id: dict[Any, dict[str, Any]] = {}
    for number, record in enumerate(records):
        identity = record.get("id")
        if not isinstance(identity, str | int) or identity in by_id:
            raise TensorDropoutError(
                f"{path}: {key}[{number}] has the id {identity!r}; each needs an id of its own, a number or a text"
            )
        if key == "images" and not (isinstance(record.get("file_name"), str) and record["file_name"].strip()):
            raise TensorDropoutError(f"{path}: images[{number}] has no file_name; name its file")
        by_id[identity] = record
    return by_id


def _choose_names(
    path: Path, annotations: list[dict[str, Any]], categories: dict[Any, dict[str, Any]]
) -> tuple[tuple[str, ...], bool]:
    """The names of the keypoints, and whether the file has any."""
    used = {json.dumps(annotation.get("category_id")): annotation.get("category_id") for annotation in annotations}
    if len(used) > 1:
        called = [_name_category(identity, categories) for identity in used.values()]
        raise TensorDropoutError(
            f"{path}: annotations of several categories have keypoints: {name_some(called)}; one is read, export "
            "one alone"
        )
    (identity,) = used.values()
    category = categories.get(identity) if isinstance(identity, str | int) else None
    if category is None:
        raise TensorDropoutError(
            f"{path}: the annotations are of category {identity!r}, which is not in categories; add it"
        )
    names = category.get("keypoints")
    if not names:
        count = len(annotations[0]["keypoints"]) // 3 if isinstance(annotations[0]["keypoints"], list) else 0
        return number_names(count), False
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        raise TensorDropoutError(
            f"{path}: the keypoints of category {identity!r} are a list of names; got {str(names)[:60]}"
        )
    return tuple(names), True


def _name_category(identity: Any, categories: dict[Any, dict[str, Any]]) -> str:
    category = categories.get(identity) if isinstance(identity, str | int) else None
    return str((category or {}).get("name", identity))


def _read_image_id(path: Path, annotation: dict[str, Any], order: dict[Any, int]) -> Any:
    identity = annotation.get("image_id")
    if not isinstance(identity, str | int) or identity not in order:
        raise TensorDropoutError(
            f"{path}: an annotation (id {annotation.get('id')!r}) is of image {identity!r}, which is not in "
            "images; add the "
            "image, or delete the annotation"
        )
    return identity


def _read_keypoints(path: Path, annotation: dict[str, Any], names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Points (P, 2) and which are absent (P), of one annotation."""
    called = f"{path}: annotation {annotation.get('id')!r}"
    values = annotation["keypoints"]
    if not isinstance(values, list) or not all(type(value) in (int, float) for value in values):
        raise TensorDropoutError(f"{called}: keypoints are a list of numbers x, y, v; got {str(values)[:60]}")
    if len(values) != 3 * len(names):
        raise TensorDropoutError(
            f"{called} has {len(values)} numbers of keypoints; {len(names)} keypoints, each x, y, v, are "
            f"{3 * len(names)}"
        )
    table = np.array(values, dtype=np.float64).reshape(-1, 3)
    if not np.isin(table[:, 2], (0, 1, 2)).all():
        raise TensorDropoutError(
            f"{called}: the third number of a keypoint, v, is 0, 1 or 2; got {name_some(list(map(str, table[:, 2])))}"
        )
    points = np.where(table[:, 2:] > 0, table[:, :2], math.nan)
    if np.isinf(points).any() or np.isnan(points[table[:, 2] > 0]).any():
        raise TensorDropoutError(f"{called} has a keypoint that is labelled, and not at finite numbers; correct it")
    there = table[:, 2] > 0
    listed = annotation.get(_ABSENT)
    if not isinstance(listed, list):  # another program's: whoever labels an object leaves out what cannot be seen
        return points, ~there & there.any()
    known = np.isin(np.arange(len(names)), [number for number in listed if type(number) is int])
    return points, known & ~there


def _read_sizes(path: Path, images: list[dict[str, Any]]) -> np.ndarray | None:
    """(n, 2) if every image has its width and height."""
    if not all({"width", "height"} <= set(image) for image in images):
        return None
    for image in images:
        if not all(type(image[side]) in (int, float) and image[side] > 0 for side in ("width", "height")):
            raise TensorDropoutError(
                f"{path}: {image['file_name']} is {image['width']!r} wide and {image['height']!r} high; positive "
                "numbers are "
                "expected; correct them, or leave them out of all images"
            )
    return np.array([[image["width"], image["height"]] for image in images], dtype=np.float64).reshape(-1, 2)


def _read_groups(images: list[dict[str, Any]]) -> tuple[str, ...] | None:
    groups = [image.get("group") for image in images]
    return tuple(map(str, groups)) if all(isinstance(group, str) for group in groups) else None


def write_coco(labels: ExternalLabels) -> str:
    """Labels in pixels of :data:`CONVENTION` as a COCO file."""
    sizes = labels.sizes
    assert sizes is not None  # write_labels has refused labels without
    images, annotations = [], []
    for row, file in enumerate(labels.files):
        width, height = (int(side) for side in sizes[row])
        group = {} if labels.groups is None else {"group": labels.groups[row]}
        images.append({"id": row + 1, "file_name": file, "width": width, "height": height, **group})
        annotations.append(_write_annotation(labels, row))
    category = {"id": 1, "name": "object", "supercategory": "object", "keypoints": list(labels.names), "skeleton": []}
    document = {
        "info": {"description": "Landmarks of tensor-dropout label"},
        "licenses": [],
        "images": images,
        "categories": [category],
        "annotations": annotations,
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


def _write_annotation(labels: ExternalLabels, row: int) -> dict[str, Any]:
    there = labels.there[row]
    keypoints: list[float] = []
    for (x, y), is_there in zip(labels.points[row].tolist(), there, strict=True):
        keypoints += [round(x, _DIGITS), round(y, _DIGITS), 2] if is_there else [0, 0, 0]
    box = [0.0, 0.0, 0.0, 0.0]
    if there.any():
        first, last = labels.points[row, there].min(0) + 0.5, labels.points[row, there].max(0) + 0.5
        box = [round(side, _DIGITS) for side in (*first.tolist(), *(last - first).tolist())]
    return {
        "id": row + 1,
        "image_id": row + 1,
        "category_id": 1,
        "keypoints": keypoints,
        "num_keypoints": int(there.sum()),
        "bbox": box,
        "area": round(box[2] * box[3], _DIGITS),
        "iscrowd": 0,
        _ABSENT: np.flatnonzero(labels.absent[row]).tolist(),
    }
