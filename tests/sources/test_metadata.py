"""Hugging Face's imagefolder: tables of metadata beside the images, whose columns become fields."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pictures import mask_of, palette, pixels, save

import h5chunk
from h5chunk.errors import OptionError, SourceError

Rows = list[dict[str, Any]]


def write(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(root: Path, *names: str) -> Path:
    """Image ``.../7.png`` has the pixels ``pixels(7)``."""
    for name in names:
        save(root / name, pixels(int(Path(name).stem), 12, 18))
    return root


def converted(source: Path, **options: Any) -> h5chunk.ChunkDataset:
    path = source.with_name("x.h5")
    h5chunk.convert(source, path, workers=0, overwrite=True, **options)
    dataset = h5chunk.ChunkDataset(path)
    for index, name in enumerate(dataset.source_names.tolist()):
        np.testing.assert_array_equal(dataset[index][0], pixels(int(Path(name).stem), 12, 18).transpose(2, 0, 1))
    return dataset


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_at_the_top(tmp_path: Path, suffix: str, packed: bool) -> None:
    source = make(tmp_path / "data", "3.png", "sub/1.png", "2.png", "9.png")
    names = {3: "3.png", 1: "sub/1.png", 2: "2.png"}
    rows = [{"file_name": name, "year": 2000 + n, "text": f"it is {n}"} for n, name in names.items()]
    write(source / f"metadata.{suffix}", rows)
    if packed:
        source = Path(shutil.make_archive(str(tmp_path / "data"), "zip", tmp_path, "data"))  # wrapped in a folder
    report = h5chunk.convert(source, tmp_path / "y.h5", workers=0)
    assert report.ignored == ["1 image without a line in the metadata, such as 9.png"]
    dataset = converted(source)
    assert dataset.fields == ("images",) and sorted(dataset.source_names) == ["2.png", "3.png", "sub/1.png"]
    numbers = [int(Path(name).stem) for name in dataset.source_names]
    assert dataset.values("year").tolist() == [2000 + n for n in numbers]
    assert dataset.values("text").tolist() == [f"it is {n}" for n in numbers]


@pytest.mark.parametrize("labels", [True, False])
def test_in_each_split(tmp_path: Path, labels: bool) -> None:
    """Labels are those of the tables, or else the folders of classes."""
    names = {"train": ["cat/1.png", "dog/2.png", "cat/3.png"], "test": ["dog/4.png", "cat/5.png"]}
    source = tmp_path / "data"
    for split, files in names.items():
        make(source / split, *files)
        extra = [{"label": "ab"[int(Path(name).stem) > 2]} if labels else {} for name in files]
        rows = [{"file_name": name, "n": int(Path(name).stem)} | more for name, more in zip(files, extra, strict=True)]
        write(source / split / "metadata.jsonl", rows)
    dataset = converted(source)
    assert dataset.classes == (("a", "b") if labels else ("cat", "dog"))
    for name, n, split, (_, label) in zip(
        dataset.source_names.tolist(), dataset.values("n"), dataset.values("split"), dataset, strict=True
    ):
        assert name.startswith(split) and int(Path(name).stem) == n
        assert dataset.classes[label] == ("ab"[int(n > 2)] if labels else name.split("/")[1])


def test_a_split_without_metadata(tmp_path: Path) -> None:
    source = make(tmp_path / "data", "train/1.png", "test/2.png")
    write(source / "train" / "metadata.csv", [{"file_name": "1.png", "n": 1}])
    with pytest.raises(SourceError, match=r"1 images are outside of the folders with metadata, such as test/2\.png"):
        converted(source)


def test_several_images(tmp_path: Path) -> None:
    source = make(tmp_path / "data", *(f"in/{n}.png" for n in range(3)))
    for n in range(3):
        save(source / "out" / f"{n}_mask.png", palette(mask_of(n)))
    rows = [{"image_file_name": f"in/{n}.png", "mask_file_name": f"out/{n}_mask.png"} for n in range(3)]
    write(source / "metadata.csv", rows)
    dataset = converted(source)
    assert dataset.fields == ("images", "mask")
    for name, (_, mask) in zip(dataset.source_names.tolist(), dataset, strict=True):
        np.testing.assert_array_equal(mask, mask_of(int(Path(name).stem)))


def test_like_and_repair(tmp_path: Path) -> None:
    source, path = make(tmp_path / "data", "1.png", "2.png"), tmp_path / "x.h5"
    write(source / "metadata.csv", [{"file_name": f"{n}.png", "n": n} for n in (2, 1)])
    dataset = converted(source, chunk_samples=1)
    assert dataset.values("n").tolist() == [int(Path(name).stem) for name in dataset.source_names]
    more = make(tmp_path / "more", "3.png")
    write(more / "metadata.jsonl", [{"file_name": "3.png", "n": 3}])
    h5chunk.convert(more, tmp_path / "more.h5", like=path, workers=0)
    assert sorted(h5chunk.ChunkDataset([path, tmp_path / "more.h5"]).values("n").tolist()) == [1, 2, 3]
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(pixels(2, 12, 18).transpose(2, 0, 1).tobytes())] ^= 1
    path.write_bytes(damaged)
    assert not h5chunk.verify(path, repair=source).bad


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"file_name": "1.png"}, {"file_name": "7.png"}], r"metadata\.jsonl, line 2: 7\.png does not exist in"),
        ([{"file_name": "1.png"}, {"file_name": "1.png"}], r"the metadata lists 1\.png several times"),
        ([{"file_name": "../x.png"}], r"line 1: path \.\./x\.png is outside of the source"),
        ([{"file_name": "1.png", "n": 1}, {"file_name": "2.png"}], "line 2: some lines lack the key 'n'"),
        (
            [{"file_name": "1.png", "box": [1, 2], "n": 1}],
            r"column 'box' is a list or an object: drop the column .*n\)",
        ),
        ([{"file_name": "1.png", "n": None}], "line 1: column 'n' is empty: fill it .*, or drop the column"),
        ([{"file_name": "\ud800.png"}], "line 1: path .* is not valid Unicode"),
    ],
)
def test_refusals(tmp_path: Path, rows: Rows, reason: str) -> None:
    source = make(tmp_path / "data", "1.png", "2.png")
    write(source / "metadata.jsonl", rows)
    with pytest.raises(SourceError, match=reason):
        converted(source)


def test_columns_are_chosen(tmp_path: Path) -> None:
    source = make(tmp_path / "data", "1.png", "2.png")
    write(source / "metadata.jsonl", [{"file_name": f"{n}.png", "box": [n], "n": n, "is": n > 1} for n in (1, 2)])
    dataset = converted(source, columns=("n", "is"))
    assert dataset.values("is").tolist() == [n > 1 for n in dataset.values("n")]
    with pytest.raises(OptionError, match="has no column 'm': it has file_name, box, n, is"):
        converted(source, columns=("m",))
    (source / "metadata.jsonl").write_text("5\n")
    with pytest.raises(SourceError, match="line 1: is not an object: write one object per line"):
        converted(source)
    (source / "metadata.jsonl").write_text("[" * 100_000)
    with pytest.raises(SourceError, match="line 1: is not JSON"):
        converted(source)


def test_other_tables_of_that_name(tmp_path: Path) -> None:
    source = make(tmp_path / "data", "a/1.png", "b/2.png")
    write(source / "metadata.csv", [{"key": 1}])
    assert converted(source).classes == ("a", "b")
    report = h5chunk.convert(source, tmp_path / "x.h5", workers=0, overwrite=True)
    assert report.ignored == ["metadata.csv, which has no column 'file_name'"]
    with pytest.raises(SourceError, match=r"has neither a manifest nor a metadata\.csv .*--columns applies: leave out"):
        converted(source, columns=("key",))
