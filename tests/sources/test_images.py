"""Images by number: shapes that must agree, and what is said where they do not."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.listings import list_images
from support.pictures import pixels

import h5chunk
from h5chunk.errors import SampleError, ShapeError, SourceError
from h5chunk.sample_source import SampleField, shape_text
from h5chunk.sources.images import ImageSource
from h5chunk.sources.kinds import ImageOptions


def source_of(root: Path, **options: object) -> ImageSource:
    return ImageSource(list_images(root), ImageOptions(**options))  # type: ignore[arg-type]


def save(root: Path, name: str, seed: int, height: int = 10, width: int = 12) -> None:
    root.mkdir(exist_ok=True)
    Image.fromarray(pixels(seed, height, width)).save(root / name)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_samples_by_number(class_folder: Callable[..., Path], layout: str) -> None:
    source = pickle.loads(pickle.dumps(source_of(class_folder(6, 2), layout=layout)))
    assert len(source) == 6 and source.name(3) == "class1/0001.png"
    shape = (3, 10, 12) if layout == "nchw" else (10, 12, 3)
    assert source.find_fields(skip_bad=False) == ["images"]
    assert source.fields == {"images": SampleField(shape, np.dtype("u1"), layout.upper())}
    out = np.empty(shape, np.uint8)
    with source.session():
        assert source.read_into(3, {"images": out}) == ("RGB",)
    np.testing.assert_array_equal(out, pixels(1).transpose(2, 0, 1) if layout == "nchw" else pixels(1))


def test_other_shape_is_refused_and_leaves_the_buffer_alone(tmp_path: Path) -> None:
    save(tmp_path, "1.png", 1, 4, 5)
    out = np.full((3, 10, 12), 7, np.uint8)
    source = source_of(tmp_path)
    with source.session(), pytest.raises(ShapeError, match="is 3 x 4 x 5, but in other samples 3 x 10 x 12"):
        source.read_into(0, {"images": out})
    assert (out == 7).all()


def test_disagreement_names_the_first_two_in_the_order_of_the_source(tmp_path: Path) -> None:
    for name, height in (("a.png", 10), ("b.png", 10), ("d.png", 8), ("e.png", 6)):
        save(tmp_path, name, 1, height)
    (tmp_path / "c.png").write_bytes(b"broken")
    expected = (
        "samples differ in 'images': a.png is 3 x 10 x 12, d.png is 3 x 8 x 12: "
        "pass a size and how to fit it (--size H,W --fit stretch|crop|pad), or keep their sizes (--keep-encoded)"
    )
    assert source_of(tmp_path).disagreement() == expected
    (tmp_path / "d.png").unlink()
    (tmp_path / "e.png").unlink()
    assert "changed since" in source_of(tmp_path).disagreement()


def test_settling_the_shape_where_the_first_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"broken")
    save(tmp_path, "b.png", 1)
    source = source_of(tmp_path)
    source.find_fields(skip_bad=True)
    assert source.fields["images"].shape == (3, 10, 12)
    with pytest.raises(SampleError, match=r"a\.png: is not an image in a known format"):
        source.find_fields(skip_bad=False)


def test_settling_the_shape_where_all_are_broken(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.png").write_bytes(b"broken")
    with pytest.raises(SourceError, match=r"none of the 2 .* the error of the last is: b\.png: is not an image"):
        source_of(tmp_path).find_fields(skip_bad=True)


def test_shape_text() -> None:
    assert shape_text((5,)) == "5"


@pytest.mark.parametrize(("mode", "color", "is_said"), [("L", "rgb", True), ("1", "rgb", True), ("L", "gray", False)])
def test_images_that_are_all_grey_are_noted(tmp_path: Path, mode: str, color: str, is_said: bool) -> None:
    (tmp_path / "s").mkdir()
    for i in range(3):
        Image.fromarray(pixels(i)).convert(mode).save(tmp_path / "s" / f"{i}.png")
    note = "all images are grey, but have three equal channels: --color gray needs a third of the space"
    assert (note in h5chunk.convert(tmp_path / "s", tmp_path / "x.h5", color=color, workers=0).notes) == is_said
    save(tmp_path / "s", "3.png", 3)
    assert note not in h5chunk.convert(tmp_path / "s", tmp_path / "y.h5", color=color, workers=0).notes
