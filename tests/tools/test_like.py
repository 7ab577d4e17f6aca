"""One more file of a data set: the fields, types, classes and options of an earlier one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from support.pictures import pixels

import h5chunk
from h5chunk.cli import main
from h5chunk.errors import FileError, OptionError, OutputError, SourceError


def folder(root: Path, numbers: range, classes: str = "abc", **size: int) -> Path:
    """A folder of images; image i has the pixels ``pixels(i)``, and the class ``classes[i % len(classes)]``."""
    for i in numbers:
        path = root / classes[i % len(classes)] / f"{i:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(i, **size)).save(path)
    return root


@pytest.mark.parametrize(
    "options",
    [
        {"size": (12, 10), "fit": "crop", "color": "gray"},
        {"layout": "nhwc", "size": (9, 9), "fit": "pad"},
        {"keep_encoded": True, "max_side": 9},
        {"keep_size": True},
    ],
)
def test_files_are_one_data_set(tmp_path: Path, options: dict[str, Any]) -> None:
    h5chunk.convert(folder(tmp_path / "old", range(20)), tmp_path / "x.h5", chunk_samples=4, workers=0, **options)
    more = folder(tmp_path / "more", range(20, 31), "cb")  # classes in another order, and not all of them
    h5chunk.convert(more, tmp_path / "y.h5", like=tmp_path / "x.h5", workers=0)
    both = h5chunk.ChunkDataset([tmp_path / "x.h5", tmp_path / "y.h5"])
    assert len(both) == 31 and both.classes == ("a", "b", "c") and both.chunk_samples == 4
    with h5py.File(tmp_path / "y.h5") as file:
        index = file["h5chunk/source_index"][()]  # counts the images of class b, and then those of c
        assert file["labels"][()].tolist() == [1 if i < 5 else 2 for i in index]
    with h5py.File(tmp_path / "x.h5") as first, h5py.File(tmp_path / "y.h5") as second:
        assert dict(first["images"].attrs) == dict(second["images"].attrs)
    assert h5chunk.verify(tmp_path / "y.h5").ok
    report = h5chunk.convert(more, tmp_path / "y.h5", like=tmp_path / "x.h5", workers=2)
    assert report.already_complete


def test_new_classes_follow_the_others(tmp_path: Path) -> None:
    h5chunk.convert(folder(tmp_path / "old", range(9)), tmp_path / "x.h5")
    more = folder(tmp_path / "more", range(9, 20), "aAb")
    with pytest.raises(SourceError, match=r"lacks 1 of the 3 classes of the source, such as 'A': use --new-classes"):
        h5chunk.convert(more, tmp_path / "y.h5", like=tmp_path / "x.h5")
    report = h5chunk.convert(more, tmp_path / "y.h5", like=tmp_path / "x.h5", new_classes=True, workers=0)
    assert report.class_names == ["a", "b", "c", "A"]
    both = h5chunk.ChunkDataset([tmp_path / "x.h5", tmp_path / "y.h5"])
    assert both.classes == ("a", "b", "c", "A") and len(both) == 20
    third = folder(tmp_path / "third", range(20, 23), "A")
    h5chunk.convert(third, tmp_path / "z.h5", like=tmp_path / "y.h5", workers=0)
    with h5py.File(tmp_path / "z.h5") as file:
        assert file["labels"][()].tolist() == [3, 3, 3]
    with pytest.raises(OptionError, match="requires like"):
        h5chunk.convert(third, tmp_path / "w.h5", new_classes=True)


def test_a_folder_of_shards_gets_one_more_file(tmp_path: Path) -> None:
    h5chunk.convert(folder(tmp_path / "old", range(24)), tmp_path / "set", shards=2, chunk_samples=4, workers=0)
    h5chunk.convert(folder(tmp_path / "more", range(24, 30)), tmp_path / "y.h5", like=tmp_path / "set", workers=0)
    files = [*sorted((tmp_path / "set").iterdir()), tmp_path / "y.h5"]
    assert len(h5chunk.ChunkDataset(files)) == 30


def test_columns_get_the_types_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("name,n,x\n" + "".join(f"long{i},{i},{i}.5\n" for i in range(50)))
    (tmp_path / "b.csv").write_text("name,n,x\n" + "".join(f"s{i},{i},{i}\n" for i in range(9)))
    options: dict[str, Any] = {"format": "table", "workers": 0}
    h5chunk.convert(tmp_path / "a.csv", tmp_path / "a.h5", **options)
    h5chunk.convert(tmp_path / "b.csv", tmp_path / "b.h5", like=tmp_path / "a.h5", **options)
    with h5py.File(tmp_path / "a.h5") as first, h5py.File(tmp_path / "b.h5") as second:
        assert [first[name].dtype for name in ("name", "n", "x")] == [second[name].dtype for name in ("name", "n", "x")]
        order = np.argsort(second["n"][()])
        assert second["x"][()][order].tolist() == list(range(9))
        assert second["name"][()][order].tolist() == [f"s{i}".encode() for i in range(9)]
    assert len(h5chunk.ChunkDataset([tmp_path / "a.h5", tmp_path / "b.h5"])) == 59
    for line, message in (
        ("longer7,1,1", "field 'name' has the value .* cannot be stored exactly"),
        ("much longer,1,1", "its name are .S11, but those in .* are .S6"),
        ("longer,1.5,1", "its n are float64, but those in .* are int64"),
    ):
        (tmp_path / "c.csv").write_text(f"name,n,x\n{line}\n{line}\n")
        with pytest.raises(SourceError, match=message):
            h5chunk.convert(tmp_path / "c.csv", tmp_path / "c.h5", like=tmp_path / "a.h5", **options)
    (tmp_path / "long.csv").write_text("name,n,x\n" + "".join(f"{'very' * i},{i},1.5\n" for i in range(9)))
    (tmp_path / "short.csv").write_text("name,n,x\nnot long at all,1,2\nshort,2,3\n")
    h5chunk.convert(tmp_path / "long.csv", tmp_path / "long.h5", **options)
    h5chunk.convert(tmp_path / "short.csv", tmp_path / "short.h5", like=tmp_path / "long.h5", shuffle=False, **options)
    with h5py.File(tmp_path / "short.h5") as file:
        assert file["name"].dtype == "S32" and file["name"][()].tolist() == [b"not long at all", b"short"]
    (tmp_path / "d.csv").write_text("name,n\nx,1\ny,2\n")
    with pytest.raises(SourceError, match=r"lacks the field 'x', which .*a\.h5 has"):
        h5chunk.convert(tmp_path / "d.csv", tmp_path / "d.h5", like=tmp_path / "a.h5", **options)
    with pytest.raises(SourceError, match=r"has the field 'x', which .*d\.h5 lacks"):
        h5chunk.convert(tmp_path / "d.csv", tmp_path / "d.h5", **options)
        h5chunk.convert(tmp_path / "b.csv", tmp_path / "e.h5", like=tmp_path / "d.h5", **options)


def test_arrays_must_have_the_same_shape(tmp_path: Path) -> None:
    h5chunk.convert({"x": np.zeros((9, 3, 4), np.float32)}, tmp_path / "a.h5", workers=0)
    h5chunk.convert({"x": np.ones((5, 3, 4), np.float32)}, tmp_path / "b.h5", like=tmp_path / "a.h5", workers=0)
    assert len(h5chunk.ChunkDataset([tmp_path / "a.h5", tmp_path / "b.h5"], fields=["x"])) == 14
    with pytest.raises(SourceError, match=r"its x are 4 x 3 float32, but those in .* are 3 x 4 float32"):
        h5chunk.convert({"x": np.ones((5, 4, 3), np.float32)}, tmp_path / "c.h5", like=tmp_path / "a.h5")


def test_what_cannot_be_like_a_file(tmp_path: Path) -> None:
    images = folder(tmp_path / "old", range(6))
    h5chunk.convert(images, tmp_path / "x.h5", workers=0)
    (tmp_path / "r.csv").write_text("row,column,value\n" + "".join(f"{i},{i},1\n" for i in range(5)))
    h5chunk.convert(tmp_path / "r.csv", tmp_path / "r.h5", format="csv")
    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["images"] = np.zeros((5, 3, 4, 4), np.uint8)
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (images, {"size": (4, 4)}, OptionError, r"--size cannot be set, because images are decoded with the options"),
        (images, {"like": tmp_path / "r.h5"}, OptionError, "has a matrix: use --ids-from"),
        (images, {"like": tmp_path / "plain.h5"}, FileError, "was not written by h5chunk"),
        (images, {"like": tmp_path / "none.h5"}, FileError, "no such file"),
        (tmp_path / "r.csv", {"format": "csv"}, OptionError, r"--like applies only to images and other samples"),
        (images / "a", {}, SourceError, "lacks the field 'labels'"),
    ]
    for source, options, error, message in wrong:
        with pytest.raises(error, match=message):
            h5chunk.convert(source, tmp_path / "y.h5", **{"like": tmp_path / "x.h5", "workers": 0, **options})
        assert not (tmp_path / "y.h5").exists()
    with pytest.raises(OutputError, match="is also the source"):
        h5chunk.convert(images, tmp_path / "x.h5", like=tmp_path / "x.h5", overwrite=True)


def test_on_the_command_line(tmp_path: Path) -> None:
    h5chunk.convert(folder(tmp_path / "old", range(9)), tmp_path / "x.h5", size=(8, 8), fit="crop", workers=0)
    more = folder(tmp_path / "more", range(9, 15), height=20, width=30)
    command = ["convert", str(more), str(tmp_path / "y.h5"), "--like", str(tmp_path / "x.h5"), "--workers", "0"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0 and "6 images of 3 x 8 x 8" in done.output, done.output
