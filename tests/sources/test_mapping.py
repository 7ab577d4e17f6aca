"""Data sets in Python: how samples become fields, classes, and what is said of samples that are not alike."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import scipy.sparse
from PIL import Image
from support.samples import check_same

import h5chunk
from h5chunk.errors import OptionError, SampleError, SourceError
from h5chunk.sources.open import find_kind

torch = pytest.importorskip("torch")

COUNT = 30


class Dataset:
    """A map-style data set of any function."""

    def __init__(self, get: Callable[[int], Any], **attributes: Any) -> None:
        self._get = get
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self._get(index)


def pixels(index: int, height: int = 8) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 255, (height, 6, 3), np.uint8)


def picture(index: int, height: int = 8) -> Image.Image:
    return Image.fromarray(pixels(index, height))


IMAGES = np.stack([pixels(i).transpose(2, 0, 1) for i in range(COUNT)])
NUMBERS = np.arange(COUNT)
SCALES = NUMBERS[:, None]
PLANES = (np.ones((3, 4)) * SCALES[:, None]).astype("f4")
WORDS = np.array([("\xe9" * (i % 4)).encode() for i in NUMBERS], "S6")
CASES: list[tuple[Callable[[int], Any], dict[str, np.ndarray]]] = [
    (lambda i: (picture(i), i), {"images": IMAGES, "labels": NUMBERS}),
    (lambda i: [picture(i), torch.tensor(i)], {"images": IMAGES, "labels": NUMBERS}),
    (lambda i: (torch.ones(3, 4) * i, i), {"images": PLANES, "labels": NUMBERS}),
    (lambda i: picture(i), {"images": IMAGES}),
    (lambda i: i / 2, {"data": NUMBERS / 2}),
    (lambda i: np.full(3, i, "f2"), {"data": (np.ones(3) * SCALES).astype("f2")}),
    (lambda i: (i, i > 3, "\xe9" * (i % 4)), {"field0": NUMBERS, "field1": NUMBERS > 3, "field2": WORDS}),
    (lambda i: {"x": torch.ones(3) * i, "p": picture(i)}, {"x": (np.ones(3) * SCALES).astype("f4"), "p": IMAGES}),
]


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_is_in_the_file(tmp_path: Path, number: int, workers: int) -> None:
    get, expected = CASES[number]
    dataset = Dataset(get)
    assert find_kind(dataset).kind == "mapping"
    plan = h5chunk.convert(dataset, tmp_path / "x.h5", dry_run=True)
    report = h5chunk.convert(dataset, tmp_path / "x.h5", workers=workers, chunk_samples=4)
    check_same(tmp_path / "x.h5", expected)
    assert h5chunk.verify(tmp_path / "x.h5").ok
    assert set(plan.fields) == set(report.fields) == set(expected)
    assert any("starts over" in note for note in report.notes)


def test_a_list_of_samples_is_a_data_set(tmp_path: Path) -> None:
    h5chunk.convert([(np.ones((2, 2)) * i, i) for i in range(5)], tmp_path / "x.h5")
    check_same(tmp_path / "x.h5", {"images": np.ones((5, 2, 2)) * np.arange(5)[:, None, None], "labels": np.arange(5)})


@pytest.mark.parametrize(
    "attributes",
    [
        {"classes": ["cat", "dog"]},
        {"class_to_idx": {"dog": 1, "cat": 0}},
        {"features": {"labels": SimpleNamespace(names=["cat", "dog"])}},
    ],
)
def test_class_names(tmp_path: Path, attributes: dict[str, Any]) -> None:
    dataset = Dataset(lambda i: {"image": picture(i), "labels": i % 2}, **attributes)
    report = h5chunk.convert(dataset, tmp_path / "x.h5")
    assert report.class_names == ["cat", "dog"]


def test_images_follow_the_options_of_images(tmp_path: Path) -> None:
    dataset = Dataset(lambda i: (picture(i, 8 + i % 2), i))
    report = h5chunk.convert(dataset, tmp_path / "x.h5", size=(4, 5), fit="stretch", color="gray", layout="nhwc")
    assert report.sample_shape == (4, 5, 1) and report.counts["resized"] == COUNT
    with pytest.raises(OptionError, match=r"--manifest applies only to images; the Dataset contains"):
        h5chunk.convert(dataset, tmp_path / "y.h5", manifest="x.csv")


@pytest.mark.parametrize(
    ("get", "error", "reason"),
    [
        (
            lambda i: (picture(i, 8 + i // 20), i),
            SourceError,
            "samples differ in 'images': sample 0 is 3 x 8 x 6, sample 20 is 3 x 9 x 6: pass a size",
        ),
        (
            lambda i: np.zeros(i // 9 + 1),
            SourceError,
            "differ in 'data': sample 0 is 1, sample 9 is 2: make all arrays",
        ),
        (lambda i: {"a": 1} if i < 5 else {"b": 1}, SampleError, r"has the fields b, but other samples have a"),
        (lambda i: None if i == 7 else 3, SampleError, "sample 7: is missing"),
        (lambda i: {"a": None if i == 7 else 3}, SampleError, "sample 7: field 'a' is missing"),
        (lambda i: 2**64, SampleError, "to plain numbers of at most 64 bits"),
        (lambda i: sys.exit(3) if i == 7 else 3, SampleError, "sample 7: cannot be read: SystemExit: 3"),
        (
            lambda i: i if i < 29 else i + 0.5,
            SampleError,
            r"sample 29: .* float64, which does not fit the int64",
        ),
        (lambda i: 1 / (i - 5), SampleError, "sample 5: cannot be read: ZeroDivisionError: division"),
        (lambda i: "a\0", SampleError, "ends with a NUL byte"),
        (lambda i: object(), SampleError, "type object, and cannot be stored as an image, number"),
    ],
)
def test_samples_that_are_not_alike(tmp_path: Path, get: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        h5chunk.convert(Dataset(get), tmp_path / "x.h5", workers=0)
    assert not (tmp_path / "x.h5").exists()


def test_bad_samples_are_skipped(tmp_path: Path) -> None:
    report = h5chunk.convert(Dataset(lambda i: 1 / (i % 10)), tmp_path / "x.h5", on_error="skip")
    assert report.num_samples == 27
    assert [name for name, _ in sorted(report.skipped)] == ["sample 0", "sample 10", "sample 20"]


def test_what_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="the list is empty"):
        h5chunk.convert([], tmp_path / "x.h5")
    with pytest.raises(SourceError, match="photos: is a path, not a data set in Python"):
        h5chunk.convert("photos", tmp_path / "x.h5", format="mapping")
    with pytest.raises(
        SourceError, match="an object of type int cannot be converted: pass a path, arrays or a data set"
    ):
        h5chunk.convert(3, tmp_path / "x.h5")


def test_a_dict_with_a_list_names_it(tmp_path):
    with pytest.raises(SourceError, match=r"not arrays \('s'\): convert them with np.array"):
        h5chunk.convert({"a": np.zeros((2, 3)), "s": ["x", "y"]}, tmp_path / "a.h5")


def test_a_sparse_matrix_in_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"save it with scipy\.sparse\.save_npz"):
        h5chunk.convert(scipy.sparse.eye(5, format="csr"), tmp_path / "a.h5")
    frame = pandas.DataFrame({"a": [1, 2], "b": [0.5, 1.5]})
    with pytest.raises(SourceError, match=r"type DataFrame is not a source: pass a dict of its columns, dict\(frame\)"):
        h5chunk.convert(frame, tmp_path / "a.h5")
    assert h5chunk.convert(dict(frame), tmp_path / "a.h5").num_samples == 2


def test_a_dict_of_data_sets(tmp_path):
    class Part(list):
        features = "of Hugging Face"

    with pytest.raises(
        SourceError, match=r"a dict of the data sets 'train', 'test' is not a source: convert .* data\['train'\]"
    ):
        h5chunk.convert({"train": Part([1]), "test": Part([2])}, tmp_path / "x.h5")


@pytest.mark.parametrize("boxes", [[[{"box": [1]}]], [np.zeros((0, 4))], [np.ones((1, 4)), np.ones((2, 4))], [[], [1]]])
def test_boxes_of_varying_number_must_be_padded(tmp_path: Path, boxes: list[Any]) -> None:
    image = Image.new("RGB", (4, 3))
    with pytest.raises(SourceError, match="pad arrays whose lengths differ, such as the boxes"):
        h5chunk.convert([{"image": image, "boxes": value} for value in boxes], tmp_path / "x.h5", workers=0)
    padded = [{"image": image, "boxes": np.zeros((3, 4), "f4"), "count": count} for count in (0, 2)]
    h5chunk.convert(padded, tmp_path / "x.h5", workers=0)


def test_columns_in_a_tuple_are_not_taken_for_samples(tmp_path: Path) -> None:
    x, y = np.zeros((5, 3)), np.ones((5, 3))
    with pytest.raises(SourceError, match=r"pass columns as a dict, such as {'x': x, 'y': y}, and samples as a list"):
        h5chunk.convert((x, y), tmp_path / "x.h5")
    assert h5chunk.convert({"x": x, "y": y}, tmp_path / "x.h5").num_samples == 5
