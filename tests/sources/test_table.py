"""Tables in .parquet files: every column in the file, and what is refused with row and column."""

from __future__ import annotations

import errno
import gzip
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from support.samples import check_same, read_back

import h5chunk
from h5chunk.errors import OptionError, OutputError, SampleError, SourceError
from h5chunk.sources.open import find_kind

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("pyarrow.csv")

COUNT = 40


def png(index: int, height: int = 8) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((height, 6, 3), index, np.uint8)).save(file, "png")
    return file.getvalue()


ARRAYS = {
    "image": np.ones((COUNT, 3, 8, 6), np.uint8) * np.arange(COUNT, dtype=np.uint8)[:, None, None, None],
    "label": np.arange(COUNT) % 3,
    "text": np.array([f"w{i}\xe9".encode() for i in range(COUNT)], "S5"),
    "vector": np.stack([np.arange(COUNT), np.arange(COUNT) + 0.5], axis=1).astype("f4"),
    "flag": np.arange(COUNT) % 2 == 0,
    "category": np.arange(COUNT) % 2,
}
FEATURES = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["a", "b", "c"]}, "image": {}}}}


def table(images: str = "struct", **changes: Any) -> Any:
    encoded = [png(i) for i in range(COUNT)]
    columns = {
        "image": encoded if images == "bytes" else [{"bytes": data, "path": None} for data in encoded],
        "label": ARRAYS["label"],
        "text": [text.decode() for text in ARRAYS["text"].tolist()],
        "vector": pa.array(ARRAYS["vector"].tolist(), pa.list_(pa.float32(), 2 if images == "bytes" else -1)),
        "flag": ARRAYS["flag"],
        "category": pa.array([("even", "odd")[i] for i in ARRAYS["category"]]).dictionary_encode(),
        **changes,
    }
    metadata = {b"huggingface": json.dumps(FEATURES).encode()}
    return pa.table(columns).replace_schema_metadata({**(pa.table(columns).schema.metadata or {}), **metadata})


@pytest.mark.parametrize("images", ["struct", "bytes"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_column_is_in_the_file(tmp_path: Path, images: str, workers: int) -> None:
    pq.write_table(table(images), tmp_path / "t.parquet", row_group_size=7)
    assert find_kind(tmp_path / "t.parquet").kind == "table"
    plan = h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5", dry_run=True)
    h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5", workers=workers, chunk_samples=4)
    assert list(plan.fields) == list(h5chunk.ChunkDataset(tmp_path / "x.h5").fields) == table(images).column_names
    check_same(tmp_path / "x.h5", ARRAYS)
    assert h5chunk.verify(tmp_path / "x.h5").ok
    assert h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5", chunk_samples=4).already_complete
    dataset = h5chunk.ChunkDataset(tmp_path / "x.h5")
    assert [list(dataset.categories(name)) for name in ("label", "category")] == [["a", "b", "c"], ["even", "odd"]]
    pq.write_table(table(label=ARRAYS["label"] * 2), tmp_path / "t.parquet")
    with pytest.raises(OutputError, match="exists"):
        h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5", chunk_samples=4)


def test_a_folder_of_tables(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(table().slice(0, 11), tmp_path / "data" / "a.parquet")
    pq.write_table(table().slice(11), tmp_path / "data" / "b.parquet")
    h5chunk.convert(tmp_path / "data", tmp_path / "x.h5")
    check_same(tmp_path / "x.h5", ARRAYS)
    pq.write_table(table().drop_columns(["flag"]), tmp_path / "data" / "c.parquet")
    with pytest.raises(
        SourceError,
        match=r"c\.parquet: its columns differ from those of .*a\.parquet: 1 only in .*a\.parquet, such as 'flag'",
    ):
        h5chunk.convert(tmp_path / "data", tmp_path / "y.h5")


def test_options_of_images_and_columns(tmp_path: Path) -> None:
    pq.write_table(table(image=[png(i, 8 + i % 2) for i in range(COUNT)]), tmp_path / "t.parquet")
    options: dict[str, Any] = {"columns": ("image", "label")}
    with pytest.raises(SourceError, match=r"row 0 is 3 x 8 x 6, t\.parquet, row 1 is 3 x 9 x 6: pass a size"):
        h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5", **options)
    h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5", **options, size=(4, 4), fit="crop", color="gray")
    assert read_back(tmp_path / "x.h5", ["image"])["image"].shape == (COUNT, 1, 4, 4)
    with pytest.raises(OptionError, match=r"has no column 'none': it has image, label, text"):
        h5chunk.convert(tmp_path / "t.parquet", tmp_path / "y.h5", columns=("none",))


def test_a_table_of_numbers_alone(tmp_path: Path) -> None:
    arrays = {"a": np.arange(9, dtype="i2"), "b": np.arange(9) / 7}
    pq.write_table(pa.table(arrays), tmp_path / "t.parquet")
    h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5")
    check_same(tmp_path / "x.h5", arrays)


def test_images_that_cannot_be_used_are_skipped(tmp_path: Path) -> None:
    pq.write_table(table(image=[png(i) if i % 4 else b"rubbish" for i in range(COUNT)]), tmp_path / "t.parquet")
    with pytest.raises(SampleError, match=r"t\.parquet, row 0: is not an image"):
        h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5")
    report = h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5", on_error="skip")
    assert report.num_samples == 30 and len(report.skipped) == 10


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ([1, 2, None], "column 'a' has no value in row 2: fill it, .*or convert the table without it"),
        (["x", None], "column 'a' has no value in row 1"),
        ([[1], [1, 2]], "column 'a' contains lists of different lengths \\(1 and 2\\)"),
        ([[1, None]], "column 'a' contains a list with a missing number"),
        (["x", "y\0"], "column 'a' .*string ends with a NUL byte"),
        (["x" * 5000], "column 'a' contains a string of 5000 bytes, over the limit of 4096"),
        (
            [{"b": 1}],
            "column 'a' has values of type struct<b: int64>, which fields do not support: convert the table without it",
        ),
        ([{"bytes": None, "path": "a.png"}], "column 'a' contains an image as a path without its bytes"),
    ],
)
def test_what_is_refused(tmp_path: Path, column: list[Any], reason: str) -> None:
    pq.write_table(pa.table({"a": column}), tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=rf"t\.parquet: {reason}|{reason}"):
        h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5")


def test_the_remedy_names_the_other_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2], "b": ["x", None], "c": [3, 4]}), tmp_path / "t.parquet")
    with pytest.raises(
        SourceError, match=r"'b' has no value in row 1: fill it, skip .*skip\), or leave it out \(--columns a,c\)"
    ):
        h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5")
    h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5", columns=("a", "c"))
    check_same(tmp_path / "x.h5", {"a": np.array([1, 2]), "c": np.array([3, 4])})


def test_a_table_of_strings_alone(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x", "yyy", ""], "b": ["", "", ""]}), tmp_path / "t.parquet")
    h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5")
    check_same(tmp_path / "x.h5", {"a": np.array([b"x", b"yyy", b""]), "b": np.array([b"", b"", b""], "S1")})


def test_vectors_of_two_types_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, kind in (("a", pa.float32()), ("b", pa.float64())):
        pq.write_table(
            pa.table({"v": pa.array([[1, 2], [3, 4]], pa.list_(kind))}), tmp_path / "data" / f"{name}.parquet"
        )
    with pytest.raises(
        SourceError, match=r"b\.parquet: column 'v' contains lists of different types \(float32 and float64\)"
    ):
        h5chunk.convert(tmp_path / "data", tmp_path / "x.h5")


@pytest.mark.parametrize("data", [b"PAR1", b"PAR1" + bytes(99) + b"PAR1", b"PAR1" + bytes(99)])
def test_damaged_files(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "t.parquet").write_bytes(data)
    with pytest.raises(SourceError, match=r"t\.parquet: cannot be read as \.parquet"):
        h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5")


def test_an_empty_table(tmp_path: Path) -> None:
    pq.write_table(table().slice(0, 0), tmp_path / "t.parquet")
    with pytest.raises(SourceError, match="contains no rows"):
        h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5")


def test_whole_numbers_that_the_type_of_another_file_lacks(tmp_path: Path) -> None:
    """Files of several types are joined where that is exact, and refused where it would change ids without a word."""
    (tmp_path / "t").mkdir()
    for name, column in (("a", pa.array([0.5])), ("b", pa.array([7]))):
        pq.write_table(pa.table({"x": column}), tmp_path / "t" / f"{name}.parquet")
    h5chunk.convert(tmp_path / "t", tmp_path / "x.h5")
    pq.write_table(pa.table({"x": pa.array([2**60 + 1])}), tmp_path / "t" / "b.parquet")
    with pytest.raises(
        SourceError, match=r"common type of column 'x', float64, cannot hold all its integers of type int64"
    ):
        h5chunk.convert(tmp_path / "t", tmp_path / "y.h5")


IRIS = b"""sepal length (cm),petal width (cm),size,species\n5.1,0.2,3,setosa\n6.3,1.8,4,virginica\n4.9,0.2,5,setosa\n"""


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".data.gz"])
def test_a_text_whose_lines_are_samples(tmp_path: Path, suffix: str) -> None:
    text = IRIS.replace(b",", b"\t") if suffix == ".tsv" else IRIS
    source = tmp_path / f"iris{suffix}"
    source.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    report = h5chunk.convert(source, tmp_path / "x.h5", shuffle=False)
    assert "each line became a sample" in str(report)
    dataset = h5chunk.ChunkDataset(tmp_path / "x.h5")
    assert dataset.values("sepal length (cm)").tolist() == [5.1, 6.3, 4.9]
    assert dataset.values("size").tolist() == [3, 4, 5] and dataset.values("size").dtype == np.int64
    assert dataset.values("species").tolist() == [0, 1, 0] and dataset.classes == ("setosa", "virginica")


def test_a_table_of_names_of_images_says_how_to_convert_the_images(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,label,share\ncat/1.JPG,cat,0.5\nowl/2.JPG,owl,1.5\n")
    report = h5chunk.convert(tmp_path / "list.csv", tmp_path / "x.h5", format="table", shuffle=False)
    assert "column 'path' contains names of images, which are stored as text" in str(report) and "--manifest" in str(
        report
    )
    assert h5chunk.ChunkDataset(tmp_path / "x.h5").values("share").tolist() == [0.5, 1.5]


def test_texts_without_header_or_with_row_names(tmp_path: Path) -> None:
    (tmp_path / "iris.data").write_bytes(b"".join(IRIS.splitlines(keepends=True)[1:]))
    h5chunk.convert(tmp_path / "iris.data", tmp_path / "x.h5", shuffle=False)
    assert {*h5chunk.ChunkDataset(tmp_path / "x.h5").fields} == {f"column_{number}" for number in range(4)}
    (tmp_path / "r.csv").write_bytes(b'"","a","b"\n"1",0.5,"x, y"\n"2",1.5,"z\nz"\n"3",1.5,"z\nz"\n')
    h5chunk.convert(tmp_path / "r.csv", tmp_path / "r.h5", shuffle=False, format="table")
    dataset = h5chunk.ChunkDataset(tmp_path / "r.h5")
    assert dataset.values("index").tolist() == [1, 2, 3] and [*dataset.categories("b")] == ["x, y", "z\nz"]
    (tmp_path / "n.csv").write_bytes(b"150,4,'a/b',c\n5.1,0.2,0.5,3\n6.3,1.8,0.5,4\n")
    report = h5chunk.convert(tmp_path / "n.csv", tmp_path / "n.h5", shuffle=False)
    assert report.num_samples == 2 and "the first line became names of columns: 150, 4, a_b, c" in str(report)
    (tmp_path / "eu.csv").write_bytes(b"ph;name\n3,5;x\n4;y\n")
    h5chunk.convert(tmp_path / "eu.csv", tmp_path / "eu.h5", shuffle=False)
    assert h5chunk.ChunkDataset(tmp_path / "eu.h5").values("ph").tolist() == [3.5, 4]
    later = b"a,b,c\n" + b"1,0.5,0.5\n" * 400_000 + b"1.5,0.5,0.5\n"  # the type of the first column shows late
    (tmp_path / "late.csv").write_bytes(later)
    h5chunk.convert(tmp_path / "late.csv", tmp_path / "late.h5", shuffle=False)
    assert h5chunk.ChunkDataset(tmp_path / "late.h5").values("a")[-1] == 1.5


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (IRIS, {"columns": ("size", "species")}, "pass --format table for samples, or --format csv"),
        (
            IRIS + b"1.5,1.5,,setosa\n",
            {},
            r"'size' has no value in row 3: .*\(--columns .* --format table",
        ),
        (IRIS + b"1.5,2.5,3\n", {}, "cannot be read as a table: .*Expected 4 columns, got 3"),
        (b"a,b,a\n1.5,2.5,3.5\n", {}, "two columns are called 'a'"),
        (
            IRIS + b"1.5,2.5,3,s\xe9tosa\n",
            {},
            r"t\.csv, line 5: is not UTF-8: pass its encoding, such as --encoding latin-1",
        ),
        (
            b"14,3,a,b\n" + b"1.5,2,3,4,5\n" * 3,
            {},
            r"first line has 4 cells but the others have 5: .*\(--header skip\)",
        ),
        (IRIS, {"size": (8, 8)}, "--size applies only to images, but .* has no column with .* pass a source of images"),
        (IRIS, {"vector": "x", "columns": ("species",)}, "there is no numeric column for it"),
        (IRIS, {"vector": "species"}, "a column is called that: pass another name"),
        (IRIS, {"vector": "x", "vector_except": ("sorte",)}, "has no column 'sorte': it has sepal"),
        (b"a b\n\nc\n", {"format": "table"}, "its first lines are not a table"),
    ],
)
def test_texts_that_are_no_table(tmp_path: Path, text: bytes, options: dict[str, Any], message: str) -> None:
    (tmp_path / "t.csv").write_bytes(text)
    with pytest.raises((SourceError, OptionError), match=message):
        h5chunk.convert(tmp_path / "t.csv", tmp_path / "x.h5", **options)
    assert find_kind(tmp_path / "t.csv").kind == ("csv" if b" b" in text else "table")


def test_a_first_line_that_is_no_header(tmp_path: Path) -> None:
    """As in the files of scikit-learn: a line of counts and names of classes, of another or of the same width."""
    for number, first in enumerate((b"2,3,a\n", b"2,4,setosa,b\n", b"#\n2,4,setosa,b\n")):
        (tmp_path / "t.csv").write_bytes(first + b"5.5,0.2,3,0\n6.3,1.8,4,1\n")
        report = h5chunk.convert(tmp_path / "t.csv", tmp_path / f"{number}.h5", header="skip", shuffle=False)
        assert report.num_samples == 2 and "there is no header" in str(report)
        assert h5chunk.ChunkDataset(tmp_path / f"{number}.h5").values("column_0").tolist() == [5.5, 6.3]
    (tmp_path / "t.csv").write_bytes(b"5.1,x\n6.1,y\n7.1,x\n")
    for header, count in (("auto", 3), ("no", 3), ("yes", 2)):
        report = h5chunk.convert(tmp_path / "t.csv", tmp_path / "h.h5", header=header, overwrite=True, format="table")
        assert report.num_samples == count
    (tmp_path / "r.txt").write_bytes(b'"a" "b"\n"1" 0.5 2\n"2" 1.5 3\n')  # as R writes it
    h5chunk.convert(tmp_path / "r.txt", tmp_path / "r.h5", shuffle=False, format="table")
    assert h5chunk.ChunkDataset(tmp_path / "r.h5").values("index").tolist() == [1, 2]


def test_the_dialect_of_a_table_can_be_given(tmp_path: Path) -> None:
    text = "größe~n~wort\n!3,5~1~é\n4,5~2~ä\n! 1~2~3\n5,5~3~ä\n".encode("latin-1")
    (tmp_path / "t.csv").write_bytes(text)
    options: dict[str, Any] = {"separator": "~", "decimal": ",", "comment": "!", "encoding": "latin-1"}
    h5chunk.convert(tmp_path / "t.csv", tmp_path / "x.h5", format="table", shuffle=False, **options)
    dataset = h5chunk.ChunkDataset(tmp_path / "x.h5")
    assert dataset.values("größe").tolist() == [4.5, 5.5] and dataset.values("wort").tolist() == ["ä"] * 2
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "t.parquet")
    with pytest.raises(OptionError, match=r"--decimal applies only to text, but .*t\.parquet is \.parquet"):
        h5chunk.convert(tmp_path / "t.parquet", tmp_path / "y.h5", decimal=",")


def test_text_and_parquet_make_the_same_fields(tmp_path: Path) -> None:
    words = [("cat", "dog")[i % 2] for i in range(60)]
    table = pa.table({"x": np.arange(60) / 8, "n": np.arange(60), "kind": words, "name": [f"n{i}" for i in range(60)]})
    pq.write_table(table, tmp_path / "t.parquet")
    pa.csv.write_csv(table, tmp_path / "t.csv")
    for suffix in ("csv", "parquet"):
        h5chunk.convert(tmp_path / f"t.{suffix}", tmp_path / f"{suffix}.h5", format="table", shuffle=False)
    one, other = (h5chunk.ChunkDataset(tmp_path / f"{suffix}.h5") for suffix in ("csv", "parquet"))
    assert one.fields == other.fields and [*one.categories("kind")] == [*other.categories("kind")] == ["cat", "dog"]
    for name in one.fields:
        values = one.values(name), other.values(name)
        assert values[0].dtype == values[1].dtype and (values[0] == values[1]).all()


def test_columns_of_numbers_as_one_vector(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 40))
    header = ",".join(["label", *(f"p{i}" for i in range(40))])
    lines = [header, *(",".join(map(str, [i % 3, *row])) for i, row in enumerate(pixels))]
    (tmp_path / "digits.csv").write_text("\n".join(lines) + "\n")
    options: dict[str, Any] = {"vector": "pixels", "vector_except": ("label",)}
    report = h5chunk.convert(tmp_path / "digits.csv", tmp_path / "x.h5", shuffle=False, **options)
    assert "pixels combines 40 columns: p0 to p39" in str(report)
    dataset = h5chunk.ChunkDataset(tmp_path / "x.h5")
    assert dataset.fields == ("pixels", "label") and dataset[0][0].dtype == torch.uint8
    assert all((dataset[i][0].numpy() == pixels[i]).all() for i in range(9))
    assert dataset.values("label").tolist() == [0, 1, 2] * 3
    h5chunk.convert(tmp_path / "digits.csv", tmp_path / "more.h5", like=tmp_path / "x.h5", **options)
    assert len(h5chunk.ChunkDataset([tmp_path / "x.h5", tmp_path / "more.h5"])) == 18
    assert "41 numeric columns could become one field" in str(
        h5chunk.convert(tmp_path / "digits.csv", tmp_path / "y.h5")
    )
    pq.write_table(pa.table({"a": [1, 2**60 + 1], "b": [0.5, 1.5]}), tmp_path / "t.parquet")
    with pytest.raises(SourceError, match=r"column 'a' contains integers that float64.*--vector-except a"):
        h5chunk.convert(tmp_path / "t.parquet", tmp_path / "z.h5", vector="x")


def test_missing_values(tmp_path: Path) -> None:
    """They are NaN in real numbers; in whole numbers and strings their rows are refused, skipped, or NaN if asked."""
    lines = ["x,n,flag,kind,y", "0.5,1,true,a,?", ",2,false,b,1.5", "1.5,NA,true,a,2", "2.5,4,,b,3"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    with pytest.raises(SourceError, match=r"'n' has no value in row 2: fill it, .*--missing nan\), .*--on-error"):
        h5chunk.convert(tmp_path / "t.csv", tmp_path / "x.h5")
    report = h5chunk.convert(tmp_path / "t.csv", tmp_path / "nan.h5", missing="nan", shuffle=False)
    dataset = h5chunk.ChunkDataset(tmp_path / "nan.h5")
    for name, values in {"x": [0.5, np.nan, 1.5, 2.5], "n": [1, 2, np.nan, 4], "flag": [1, 0, 1, np.nan]}.items():
        np.testing.assert_array_equal(dataset.values(name), values)
    assert "1 missing value of 'n' became NaN" in str(report) and "of 'y' became NaN" in str(report)
    report = h5chunk.convert(tmp_path / "t.csv", tmp_path / "skip.h5", on_error="skip", shuffle=False)
    dataset = h5chunk.ChunkDataset(tmp_path / "skip.h5")
    assert dataset.values("n").tolist() == [1, 2] and dataset.values("kind").tolist() == [0, 1]
    assert ("t.csv, row 2", "has no value in column 'n'") in report.skipped and len(report.skipped) == 2
    pq.write_table(pa.table({"a": ["x", None, "y", "x", "y"]}), tmp_path / "t.parquet")
    h5chunk.convert(tmp_path / "t.parquet", tmp_path / "words.h5", on_error="skip", shuffle=False)
    dataset = h5chunk.ChunkDataset(tmp_path / "words.h5")
    assert sorted(dataset.values("a").tolist()) == [0, 0, 1, 1] and [*dataset.categories("a")] == ["x", "y"]


def test_columns_that_can_only_be_fields_need_no_format(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(IRIS)
    for columns in (("size",), ("sepal length (cm)", "species")):
        h5chunk.convert(tmp_path / "t.csv", tmp_path / "x.h5", columns=columns, overwrite=True)
        assert h5chunk.ChunkDataset(tmp_path / "x.h5", fields=columns).fields == columns


def test_years_and_numbers_in_sequence_are_names_of_columns(tmp_path: Path) -> None:
    for number, first in enumerate(("country,code,1960,1961,1962", ",label,0,1,2", "7,8,9,10,11")):
        (tmp_path / "t.csv").write_text(f"{first}\nx,y,2.5,3,2.25\nz,y,4.5,5,1.25\n")
        report = h5chunk.convert(tmp_path / "t.csv", tmp_path / f"{number}.h5")
        assert report.num_samples == 2 and [*report.fields][-1] == first.split(",")[-1]
    (tmp_path / "t.csv").write_text("1,2,3,4,5\n2,3,4,5,6\n0,2,4,1,5\n")
    assert h5chunk.convert(tmp_path / "t.csv", tmp_path / "x.h5").num_samples == 3


def test_a_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    for number, name in enumerate(("a.csv", "b.csv.gz")):
        text = f"x,n,kind\n0.5,{number},cat\n1.5,7,dog\n".encode()
        (tmp_path / "t" / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    h5chunk.convert(tmp_path / "t", tmp_path / "x.h5", shuffle=False)
    dataset = h5chunk.ChunkDataset(tmp_path / "x.h5")
    assert dataset.values("n").tolist() == [0, 7, 1, 7] and [*dataset.categories("kind")] == ["cat", "dog"]
    with pytest.raises(SourceError, match=r"lacks the field .*: use a source or options with which it has exactly"):
        h5chunk.convert(tmp_path / "t", tmp_path / "more.h5", like=tmp_path / "x.h5", vector="v")
    (tmp_path / "t" / "b.csv.gz").write_bytes(gzip.compress(b"x,other,kind\n0.5,1,a\n1.5,2,b\n"))
    with pytest.raises(SourceError, match="pass tables with the same columns"):
        h5chunk.convert(tmp_path / "t", tmp_path / "y.h5")


def test_dates_become_text(tmp_path: Path) -> None:
    days = [f"2020-01-{day:02}" for day in range(1, 31)] + [f"2021-01-{day:02}" for day in range(1, 31)]
    (tmp_path / "t.csv").write_text("day,x\n" + "".join(f"{day},0.5\n" for day in days))
    pq.write_table(pa.table({"day": pa.array(days).cast(pa.date32()), "x": [0.5] * 60}), tmp_path / "t.parquet")
    for suffix in ("csv", "parquet"):
        report = h5chunk.convert(tmp_path / f"t.{suffix}", tmp_path / f"{suffix}.h5", shuffle=False)
        assert "'day' became text, because fields do not support date32" in str(report)
        assert h5chunk.ChunkDataset(tmp_path / f"{suffix}.h5").values("day").tolist() == days


def test_a_gap_in_a_table_of_many_columns(tmp_path: Path) -> None:
    names = ",".join(f"c{i}" for i in range(20))
    (tmp_path / "t.csv").write_text(f"{names}\n{'1,' * 19}2\n{'1,' * 19}\n")
    with pytest.raises(
        SourceError, match=r"or leave it out \(name all other columns: --columns A,B,... --format table"
    ):
        h5chunk.convert(tmp_path / "t.csv", tmp_path / "x.h5")


def test_a_column_without_any_value(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,c,d,e\n0.5,,1,2,3\n1.5,,1,2,3\n")
    report = h5chunk.convert(tmp_path / "t.csv", tmp_path / "x.h5")
    assert "2 missing values of 'b' became NaN" in str(report)
    assert np.isnan(h5chunk.ChunkDataset(tmp_path / "x.h5").values("b")).all()


def test_unknown_columns_that_are_taken_as_entries_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,y,rating\n3,1,0.5\n4,1,1.5\n")
    report = h5chunk.convert(tmp_path / "t.csv", tmp_path / "x.h5")
    assert "an entry of a matrix: row 'x', column 'y', value 'rating' (--format table" in str(report)
    (tmp_path / "t.csv").write_text("x,y,weight\n3,1,0.5\n4,1,1.5\n")
    for number, options in enumerate(({"format": "csv"}, {"columns": ("x", "y", "weight")})):
        report = h5chunk.convert(tmp_path / "t.csv", tmp_path / f"{number}.h5", **options)
        assert report.notes == ["value 'weight'"]


def test_what_becomes_of_cells_below_the_first_lines_is_told(tmp_path: Path) -> None:
    lines = ["zip,id,word,x"] + [f"{10000 + i},{i},w{i % 3},0.5" for i in range(500)]
    (tmp_path / "t.csv").write_text("\n".join([*lines, f"01234,{2**64},,0.5", ""]))
    notes = str(h5chunk.convert(tmp_path / "t.csv", tmp_path / "x.h5", format="table").notes)
    assert "'zip' became numbers, without leading zeros such as those of 01234 (--text-columns zip" in notes
    assert "'id' became text, because its integers do not fit 64 bits" in notes
    assert "1 empty cell of 'word' became a category of its own" in notes
    (tmp_path / "t.csv").write_text("\n".join([*lines, "0,1,w1,0.5", ""]))
    assert len(h5chunk.convert(tmp_path / "t.csv", tmp_path / "y.h5", format="table").notes) == 1


def test_text_labels_are_classes_however_many_there_are(tmp_path: Path) -> None:
    words = [f"breed{i % 90:02d}" for i in range(200)]
    pq.write_table(pa.table({"label": words, "word": words}), tmp_path / "t.parquet")
    h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5", shuffle=False)
    labels = read_back(tmp_path / "x.h5", ["label"])["label"]
    assert labels.tolist() == [i % 90 for i in range(200)]
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["word"].dtype.kind == "S" and len(file["h5chunk/categories/label"]) == 90


def test_two_columns_of_one_name_are_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1.5]), pa.array([2.5])], ["a", "a"]), tmp_path / "t.parquet")
    with pytest.raises(SourceError, match="two columns are called 'a': rename one"):
        h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5")


def test_a_loader_of_a_file_with_strings(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1.5, 2.5], "word": ["x", "y"]}), tmp_path / "t.parquet")
    h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5")
    with pytest.warns(UserWarning, match="batches leave out 'word', because tensors cannot hold strings"):
        loader = h5chunk.ChunkLoader(tmp_path / "x.h5", 2)
    with loader:
        [(numbers,)] = loader
    assert sorted(numbers.tolist()) == [1.5, 2.5]
    assert h5chunk.ChunkDataset(tmp_path / "x.h5").fields == ("a", "word")


def stored(tmp_path: Path, source: Path, *names: str, **options: Any) -> list[list[Any]]:
    h5chunk.convert(source, tmp_path / "s.h5", shuffle=False, overwrite=True, **{"format": "table", **options})
    return [read_back(tmp_path / "s.h5", [name])[name].tolist() for name in names]


def test_digits_of_text_are_kept_or_the_column_must_be_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    ids = [10000169349117863715, 9007199254740993]
    path.write_text(f"id,y\n{ids[0]},0\n{ids[1]},1\n")
    assert stored(tmp_path, path, "id") == [ids]
    path.write_text(f"id,y\n{ids[0]}0,0\n{ids[1]},1\n-1,0\n")
    assert stored(tmp_path, path, "id") == [[f"{ids[0]}0".encode(), str(ids[1]).encode(), b"-1"]]
    refused = {"68e51234": "beyond the range", "1e400": "beyond", "9007199254740993": "rounded to 9007199254740992"}
    for cell, reason in refused.items():
        path.write_text(f"id,y\n{cell},0\n0.5,1\n12345678,1\n")
        with pytest.raises(SourceError, match=rf"column 'id' contains {cell}.*{reason}.*\(--text-columns id\)"):
            stored(tmp_path, path)
        assert stored(tmp_path, path, "id", text_columns=("id",)) == [[cell.encode(), b"0.5", b"12345678"]]
    path.write_text("x,y\n1e300,0\ninf,1\n,1\n")
    np.testing.assert_equal(stored(tmp_path, path, "x"), [[1e300, np.inf, np.nan]])
    for missing, reason in (("error", "has no value in row 1"), ("nan", "integers that would be rounded, .*id")):
        path.write_text(f"id,y\n{ids[1]},0\n,1\n0,1\n")
        with pytest.raises(SourceError, match=reason):
            stored(tmp_path, path, missing=missing)
    with pytest.raises(OptionError, match="has no column 'ids': it has id, y"):
        stored(tmp_path, path, text_columns=("ids",))


def test_leading_zeros_that_numbers_lose_are_told(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("zip,y\n02134,0\n10001,0.5\n")
    report = str(h5chunk.convert(tmp_path / "t.csv", tmp_path / "x.h5", format="table"))
    assert "'zip' became numbers, without leading zeros such as those of 02134 (--text-columns zip" in report
    assert "'y' became" not in report
    assert stored(tmp_path, tmp_path / "t.csv", "zip", text_columns=("zip",)) == [[b"02134", b"10001"]]


def test_digits_in_several_texts(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.csv").write_text("id,x,y\n1,0.5,1\n2,1.5,2\n")
    for other, kept in (("18446744073709551615", [1, 2, 2**64 - 1, 3]), ("x01", [b"1", b"2", b"x01", b"3"])):
        (tmp_path / "data" / "b.csv").write_text(f"id,x,y\n{other},2.5,3\n3,0.5,9\n")
        if other == "x01":
            with pytest.raises(SourceError, match=r"'id' has numbers in some files .* \(--text-columns id\)"):
                stored(tmp_path, tmp_path / "data")
        texts = {"text_columns": ("id",)} if other == "x01" else {}
        assert stored(tmp_path, tmp_path / "data", "id", **texts) == [kept]


def test_missing_images_are_counted_or_skipped(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    images = [None if i in (3, 7) else png(i) for i in range(COUNT)]
    labels = ["x" if i == 5 else None if i == 6 else "ab"[i % 2] for i in range(COUNT)]
    for form in (images, [data and {"bytes": data, "path": None} for data in images]):
        pq.write_table(pa.table({"image": form, "label": labels}), path)
        with pytest.raises(SourceError, match=r"no value in row 3 \(the first of 2 missing .*\(--on-error skip\)"):
            h5chunk.convert(path, tmp_path / "x.h5")
        report = h5chunk.convert(path, tmp_path / "x.h5", on_error="skip", shuffle=False, overwrite=True)
        assert report.num_samples == COUNT - 3
        dataset = h5chunk.ChunkDataset(tmp_path / "x.h5")
        words = np.array(dataset.categories("label"))[dataset.values("label")]
        with h5py.File(tmp_path / "x.h5") as file:
            numbers = file["image"][:, 0, 0, 0]
        assert words.tolist() == [labels[i] for i in numbers.tolist()] and len(set(numbers.tolist())) == COUNT - 3


def test_memory_limits_of_tables_can_be_raised(tmp_path: Path) -> None:
    lines = "".join(f"{i}.5,{i},{'x' * 90}{i}\n" for i in range(20_000))
    (tmp_path / "t.csv").write_text(f"a,b,c\n{lines}")
    pq.write_table(pa.csv.read_csv(tmp_path / "t.csv"), tmp_path / "t.parquet")
    np.savez_compressed(tmp_path / "t.npz", a=np.zeros(300_000))
    for name, reason in (("t.csv", "text, half of"), ("t.parquet", "numbers and strings of"), ("t.npz", "needs")):
        with pytest.raises(SourceError, match=rf"{reason}.*allow more memory \(--memory-bytes,? .*1G"):
            h5chunk.convert(tmp_path / name, tmp_path / "x.h5", memory_bytes=1 << 20)
        h5chunk.convert(tmp_path / name, tmp_path / "x.h5", memory_bytes=1 << 30, overwrite=True)


def test_images_of_tables_are_copied_beside_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(table(), tmp_path / "t.parquet")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5", workers=0)
    monkeypatch.setattr(tempfile, "TemporaryFile", FullFile)
    with pytest.raises(OutputError, match=r"the disk is full after .* of a temporary file, .*: free some space"):
        h5chunk.convert(tmp_path / "t.parquet", tmp_path / "y.h5", workers=0)


class FullFile(io.BytesIO):
    def __init__(self, **_: Any) -> None:
        super().__init__()

    def write(self, _: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_table_of_text_alone(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("text,mood\nnice,good\nbad,bad\nugly,bad\n")
    with pytest.raises(SourceError, match=r"may be names of columns or data: .* pass --format table"):
        h5chunk.convert(path, tmp_path / "x.h5")
    assert stored(tmp_path, path, "text") == [[b"nice", b"bad", b"ugly"]]
    report = str(h5chunk.convert(path, tmp_path / "x.h5", format="table"))
    assert "the first line became names of columns: text, mood (if it is a sample, pass --header no" in report
    path.write_text("path,label\n1.png,cat\n2.png,dog\n")
    with pytest.raises(SourceError, match=r"names of images: .* h5chunk convert FOLDER OUTPUT\.h5 --manifest TABLE"):
        h5chunk.convert(path, tmp_path / "y.h5")
    assert "--manifest" in str(h5chunk.convert(path, tmp_path / "y.h5", format="table"))


@pytest.mark.parametrize("name", ["r.jsonl", "r.json.gz"])
def test_json_lines_name_the_command_that_makes_a_table(tmp_path: Path, name: str) -> None:
    lines = b'{"user": 1, "item": 2, "rating": 4.5}\n'
    (tmp_path / name).write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    with pytest.raises(SourceError, match=r"is JSON, .* convert the \.parquet that this command writes") as caught:
        h5chunk.convert(tmp_path / name, tmp_path / "x.h5", columns=("user", "item", "rating"))
    [code] = re.findall(r'python -c "(.*?)"', str(caught.value))
    code = code.replace("FILE", str(tmp_path / name)).replace("NEW.parquet", str(tmp_path / "new.parquet"))
    subprocess.run([sys.executable, "-c", code], check=True)
    h5chunk.convert(tmp_path / "new.parquet", tmp_path / "x.h5")
    assert h5chunk.ChunkDataset(tmp_path / "x.h5").row_ids.tolist() == [1]


@pytest.mark.parametrize("names", [("s", "y"), ("user", "item")])
def test_text_of_parquet_that_is_not_utf8(tmp_path: Path, names: tuple[str, str]) -> None:
    buffers = [None, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"\xe9b")]
    pq.write_table(
        pa.table({names[0]: pa.Array.from_buffers(pa.string(), 2, buffers), names[1]: [1, 2]}), tmp_path / "t.parquet"
    )
    with pytest.raises(SourceError, match=rf"{names[0]}'.*(not UTF-8|Invalid UTF8)"):
        h5chunk.convert(tmp_path / "t.parquet", tmp_path / "x.h5")
