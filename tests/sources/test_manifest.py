"""Manifests: what each column becomes, and the line and column in each refusal."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.listings import list_images

import h5chunk
from h5chunk.errors import SourceError
from h5chunk.sources.listing import Listing

Read = Callable[..., Listing]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Lists a manifest of the given text over a folder with 1.png, 2.png, 3.png and sub/4.png."""
    root = tmp_path / "photos"
    (root / "sub").mkdir(parents=True)
    for name in ("1.png", "2.png", "3.png", "sub/4.png"):
        (root / name).write_bytes(name.encode())
    (tmp_path / "outside.png").touch()

    def run(text: str | bytes, name: str = "list.csv", source: Path = root, **options: Any) -> Listing:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return list_images(source, manifest=path, **options)

    return run


def column(read: Read, *cells: str) -> np.ndarray:
    rows = "".join(f"{i + 1}.png,{cell}\n" for i, cell in enumerate(cells))
    return read(f"path,value\n{rows}").columns["value"]


def check_refused(read: Read, text: str | bytes, reason: str) -> None:
    with pytest.raises(SourceError, match=reason):
        read(text)


@pytest.mark.parametrize(
    ("cells", "dtype", "values"),
    [
        (("0", "1", "0"), np.uint8, [0, 1, 0]),
        (("1", "1"), np.uint8, [1, 1]),
        (("-1", "1", "-1"), np.int8, [-1, 1, -1]),
        (("-1", "-1"), np.int8, [-1, -1]),
        (("0", "-1", "1"), np.int64, [0, -1, 1]),
        (("5", "-7", "+3"), np.int64, [5, -7, 3]),
        (("9223372036854775807", "-9223372036854775808"), np.int64, [2**63 - 1, -(2**63)]),
        (("1", "2.5", "-3e2"), np.float64, [1, 2.5, -300]),
        (("2.5", "1", ".5"), np.float64, [2.5, 1, 0.5]),
        (("inf", "-inf", "1"), np.float64, [np.inf, -np.inf, 1]),
        (("nan", "1.5"), np.float64, [np.nan, 1.5]),
        (("red", "green", "1"), "S5", [b"red", b"green", b"1"]),
        (("1", "2", "x"), "S1", [b"1", b"2", b"x"]),
        (("é", "ab"), "S2", ["é".encode(), b"ab"]),
        (("1_000", "2"), "S5", [b"1_000", b"2"]),
    ],
)
def test_columns(read: Read, cells: tuple[str, ...], dtype: object, values: list[object]) -> None:
    array = column(read, *cells)
    assert array.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(array, np.array(values, dtype))


def test_numbers_that_do_not_fit_64_bits_are_kept_as_they_stand(read: Read) -> None:
    ids = ("18446744073709551616", "7")
    assert column(read, *ids).tolist() == [cell.encode() for cell in ids]
    huge = "9" * 200
    assert column(read, huge, "1").tolist() == [huge.encode(), b"1"]
    assert column(read, "18446744073709551616", "0.5").tolist() == [2.0**64, 0.5]


def test_digits_are_kept_or_the_column_must_be_read_as_text(read: Read) -> None:
    ids = ("18446744073709551615", "9007199254740993")
    assert column(read, *ids).dtype == np.uint64 and column(read, *ids).tolist() == [int(cell) for cell in ids]
    assert read("path,label\n1.png,{}\n2.png,{}\n".format(*ids)).class_names == list(ids)
    assert column(read, "True", "false").tolist() == [1, 0]
    refused = {"68e51234": "beyond the range", "-1e400": "beyond", "9007199254740993": r"rounded to 9007199254740992,"}
    for cell, reason in refused.items():
        lines = f'{{"path": "1.png", "id": {cell}}}\n{{"path": "2.png", "id": 0.5}}\n'
        for text, name in ((f"path,id\n1.png,{cell}\n2.png,0.5\n", "a.csv"), (lines, "a.jsonl")):
            with pytest.raises(SourceError, match=rf"{name}: column 'id' .*{cell}.*{reason}.*\(--text-columns id\)"):
                read(text, name)
            kept = read(text, name, text_columns=("id",)).columns["id"]
            assert kept.tolist() == [cell.encode(), b"0.5"]
    assert column(read, "1e300", "9007199254740992").tolist() == [1e300, 2.0**53]


def test_leading_zeros_that_numbers_lose_are_told(read: Read) -> None:
    text = "path,zip,n\n1.png,02134,0\n2.png,10001,10\n"
    [note] = read(text).notes
    assert "'zip' became numbers, without leading zeros such as those of 02134 (--text-columns zip" in note
    listing = read(text, text_columns=("zip",))
    assert listing.columns["zip"].tolist() == [b"02134", b"10001"] and not listing.notes


def test_encodings(read: Read) -> None:
    for column, kept in (("word", "cafe\u0301\xe9"), ("label", "\xe9")):
        text = f"path,{column}\n1.png,{kept}\n"
        for encoding in ("utf-8-sig", "utf-16", "utf-16-le"):
            listing = read(text.encode(encoding), encoding="utf-16-le" if encoding == "utf-16-le" else None)
            assert [*listing.class_names, *(listing.columns.get("word", ()))] in ([kept], [kept.encode()])
    latin = "path,word\n1.png,caf\xe9\n".encode("latin-1")
    assert read(latin, encoding="latin-1").columns["word"].tolist() == ["caf\xe9".encode()]
    check_refused(read, latin, r"line 2: column 'word': 'caf\\\\?xe9' is not UTF-8: .*--encoding latin-1")
    check_refused(read, latin.replace(b"word", b"w\xe9"), r"line 1: the header .* --encoding latin-1")
    with pytest.raises(SourceError, match=r"is not text in the encoding ascii: .*\(--encoding\)"):
        read(latin, encoding="ascii")


def test_packed_manifests_and_other_kinds_of_files(read: Read) -> None:
    text = b"path,n\n1.png,7\n"
    for suffix, pack in ((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)):
        assert read(pack(text), f"m.csv{suffix}").columns["n"].tolist() == [7]
    assert read(gzip.compress(b'{"path": "1.png", "n": 7}'), "m.jsonl.gz").columns["n"].tolist() == [7]
    with pytest.raises(SourceError, match="cannot be read: Compressed file ended"):
        read(gzip.compress(text)[:-9], "m.csv.gz")
    for data, name in ((b"PAR1\x15\0\x15", "m.parquet"), (b'[{"path": "1.png"}]', "m.json"), (b'{"a": []}', "m.json")):
        with pytest.raises(SourceError, match=r"is (not text|JSON): a manifest is a \.csv, \.tsv or \.jsonl file"):
            read(data, name)
    with pytest.raises(SourceError, match=r"is an Excel table.*pandas.read_excel\('.*m\.xlsx'\)\.to_csv"):
        read(b"PK\x03\x04\x14\0\x06\0", "m.xlsx")


def test_long_strings_are_refused_before_memory_is_taken(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    assert column(read, "x" * 4096).dtype == "S4096"
    monkeypatch.setattr(np, "empty", None)
    check_refused(
        read,
        f"path,word\n1.png,{'x' * 4097}\n",
        "column 'word' contains a string of 4097 bytes, over the limit of 4096",
    )


@pytest.mark.parametrize("text", [b"x" * 3_000_000, b"path,n\n" + b"y" * 3_000_000, b"1\na b\n" + b"c" * 3_000_000])
def test_lines_without_an_end_are_refused_before_memory_is_taken(read: Read, text: bytes) -> None:
    tracemalloc.start()
    try:
        check_refused(read, text, r"line \d: is longer than 1048576 characters")
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_many_columns_and_a_number_of_many_digits(read: Read) -> None:
    check_refused(read, "path," + ",".join(map(str, range(100_000))) + ",7\n", "two columns are called '7'")
    check_refused(read, "9" * 5000 + "\na b\n1.png 1\n", "line 2: .*a b.* does not exist in")


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_table_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "table.csv"
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    with pytest.raises(SourceError, match=r"table\.csv: is not a regular file: pass a table as a file"):
        list_images(tmp_path, manifest=path)


def test_order_is_that_of_the_lines_and_paths_may_repeat(read: Read) -> None:
    listing = read("n,filename\n1,3.png\n2,./sub/../1.png\n3,sub/4.png\n4,3.png\n")
    assert list(listing.names) == [b"3.png", b"1.png", b"sub/4.png", b"3.png"]
    assert listing.columns["n"].tolist() == [1, 2, 3, 4]
    assert listing.container.read(2, listing.names[2]) == b"sub/4.png"
    assert listing.class_names == [] and list(listing.columns) == ["n"]


def test_path_column_is_the_usual_name_else_the_first(read: Read) -> None:
    assert list(read("n,Image_ID\n1,2.png\n").names) == [b"2.png"]
    assert list(read("thing,n\n2.png,1\n").names) == [b"2.png"]


def test_label_words_become_numbers(read: Read) -> None:
    listing = read("path,Label\n1.png,dog\n2.png,cat\n3.png,dog\n")
    assert listing.columns["labels"].dtype == np.int64
    assert listing.columns["labels"].tolist() == [1, 0, 1] and listing.class_names == ["cat", "dog"]
    listing = read("path,label,other\n1.png,0,x\n2.png,1,y\n")
    assert listing.columns["labels"].dtype == np.int64 and list(listing.columns) == ["labels", "other"]
    assert listing.class_names == []


def test_celebas_own_list(read: Read) -> None:
    text = "3\nSmiling  Young\n1.png -1  1\n3.png  1 -1\n2.png  1  1\n"
    listing = read(text, name="list_attr_celeba.txt")
    assert list(listing.names) == [b"1.png", b"3.png", b"2.png"]
    assert listing.columns["Smiling"].dtype == listing.columns["Young"].dtype == np.int8
    assert listing.columns["Smiling"].tolist() == [-1, 1, 1] and listing.columns["Young"].tolist() == [1, -1, 1]
    check_refused(read, text[:-13], r"list\.csv: is truncated: it lists 2 images, but its first line declares 3")
    check_refused(read, text.replace("-1  1", "-1"), r"list\.csv, line 3: has 2 columns, but the header has 3")


def test_forms_of_the_file(read: Read) -> None:
    plain = ("a b", "c,d", 'say "hi"')
    text = 'path,word\n1.png,a b\n2.png,"c,d"\n3.png,"say ""hi"""\n'
    for form in (text, "\ufeff" + text, text.replace("\n", "\r\n"), text.rstrip("\n"), text.replace("\n", "\n\n")):
        assert read(form).columns["word"].tolist() == [word.encode() for word in plain]
    assert read("path\tword\n1.png\ta,b\n", name="list.TSV").columns["word"].tolist() == [b"a,b"]
    assert read(" path , word \n 1.png , x \n").columns["word"].tolist() == [b"x"]
    for mark in (";", "\t"):
        assert read(f"path{mark}word\n1.png{mark}a,b\n").columns["word"].tolist() == [b"a,b"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("path,n\n1.png,1\n2.png\n", r"list\.csv, line 3: has 1 column, but the header has 2"),
        ("path,n\n1.png,1\n\n2.png,1,2\n", "line 4: has 3 columns, but the header has 2"),
        (
            "path,n\n1.png,1\n2.png,\n",
            "column 'n' is empty: fill it .with nan in a column of numbers., skip such samples .*, or drop the column",
        ),
        ("path,n\n ,1\n", "line 2: column 'path' is empty"),
        ('path,n\n1.png,"1\n', "line 2: unexpected end of data"),
        ('path,n\n1.png,"1"x\n', r"line 2: ',' expected after"),
        ("path,n\n1.png,1\n,2\n", "line 3: column 'path' is empty: write the path of an image, or remove the line"),
        ("path,n\n1.png,1\n9.png,1\n", r"line 3: 9\.png does not exist in .*photos: correct the path"),
        ("path,n\n/etc/hostname,1\n", "line 2: path /etc/hostname is outside of the source"),
        ("1.png 0\n2.png 1\n", "1.png 0 is not a column name: insert a header .*, and separate the columns by commas"),
        ("path,n\n../outside.png,1\n", r"line 2: path \.\./outside\.png is outside of"),
        ("path,n\nsub/../../outside.png,1\n", r"line 2: path \.\./outside\.png is outside of"),
        ("path,n\n.,1\n", r"line 2: path \. is outside of"),
        ("path,n,n\n1.png,1,2\n", "line 1: two columns are called 'n'"),
        ("path,label,labels\n1.png,1,2\n", "two columns would become the field 'labels'"),
        ("path,\n1.png,1\n", "line 1: the header must name every column"),
        ("", "line 1: the header must name every column"),
        ("path,a/b\n1.png,1\n", "line 1: column 'a/b' is not a valid name of a field"),
        ("path,.\n1.png,1\n", r"line 1: column '\.' is not a valid name of a field"),
        ("path,a\tb\n1.png,1\n", r"line 1: column 'a\\tb' is not a valid name"),
        ("path,images\n1.png,1\n", "line 1: column 'images' has a name that is reserved"),
        ("path,h5chunk\n1.png,1\n", "line 1: column 'h5chunk' has a name that is reserved"),
        ("1.png,0\n2.png,1\n", r"line 1: 1\.png is not a column name: insert a header with the column names"),
        ("path,n\n", "lists no images: it has no line below the header"),
    ],
)
def test_refusals(read: Read, text: str | bytes, reason: str) -> None:
    check_refused(read, text, reason)


def test_missing_manifest_or_source(read: Read, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none\.csv: no such file"):
        list_images(tmp_path, manifest=tmp_path / "none.csv")
    with pytest.raises(SourceError, match="photos: is not a regular file"):
        list_images(tmp_path, manifest=tmp_path / "photos")
    with pytest.raises(SourceError, match="nowhere: no such file or folder"):
        read("path\n1.png\n", source=tmp_path / "nowhere")


def test_archive_as_source(read: Read, tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("photos/1.png", "photos/sub/", "photos/2.png"):
            archive.writestr(name, name.encode() if not name.endswith("/") else b"")
    listing = read("path,n\nphotos/2.png,7\n./photos/1.png,8\nphotos/2.png,9\n", source=path)
    data = [listing.container.read(i, name) for i, name in enumerate(listing.names)]
    assert data == [b"photos/2.png", b"photos/1.png", b"photos/2.png"]
    assert listing.columns["n"].tolist() == [7, 8, 9]
    for name in ("3.png", "photos/sub"):
        with pytest.raises(SourceError, match=rf"line 2: {name} does not exist in .*x\.zip"):
            read(f"path\n{name}\n", source=path)


def test_paths_that_are_not_utf8(read: Read, tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/photos/\xff.png")).write_bytes(b"x")
    listing = read(b"path,n\n\xff.png,1\n")
    assert list(listing.names) == [b"\xff.png"] and listing.container.read(0, b"\xff.png") == b"x"
    check_refused(read, b"path,n\n\xfe.png,1\n", r"line 2: \\xfe\.png does not exist in")


def test_manifest_that_changes_while_it_is_read(read: Read, tmp_path: Path) -> None:
    read("path,n\n1.png,1\n2.png,2\n")
    path = tmp_path / "list.csv"
    with pytest.raises(SourceError, match=r"list\.csv: changed while it was read"):
        list_images(tmp_path / "photos", lambda count: path.write_text("path,n\n1.png,1\n"), manifest=path)


def test_paths_without_suffix_and_from_windows(read: Read, tmp_path: Path) -> None:
    for text in ("id,n\n1,7\nsub\\4,8\n", "path,n\n.\\1.png,7\nsub\\4.png,8\n", ",path,n\n0,1.png,7\n1,sub/4,8\n"):
        listing = read(text)
        assert list(listing.names) == [b"1.png", b"sub/4.png"] and list(listing.columns) == ["n"]
    assert any("sub/4 in the table is read as sub/4.png" in note for note in listing.notes)
    assert listing.ignored == ["the first column of the table, which has no name"]
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a/1.JPG", b"1")
    assert list(read("id\na\\1\n", source=tmp_path / "x.zip").names) == [b"a/1.JPG"]
    root = tmp_path / "photos"
    assert list(read(f"path\n{root}/1.png\n{root}/sub/4\n").names) == [b"1.png", b"sub/4.png"]
    check_refused(read, f"path\n{root}/../outside.png\n", "is outside of the source")
    (root / "1.jpg").touch()
    check_refused(read, "id\n1\n", r"line 2: 1 does not exist")  # 1.png or 1.jpg
    check_refused(read, "path\n..\\outside.png\n", "is outside of the source")


def test_missing_files_and_empty_cells_are_counted_or_skipped(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    for number in range(6):
        Image.new("RGB", (4, 3), (number, 0, 0)).save(tmp_path / "p" / f"{number}.png")
    manifest, path = tmp_path / "m.csv", tmp_path / "x.h5"
    manifest.write_text("path,label,n\n7.png,a,1\n0.png,b,2\n1.png,c,\n8.png,a,4\n2.png,a,5\n")
    with pytest.raises(
        SourceError, match=r"line 2: 7\.png does not exist in .*p \(and so 1 more line\): .*on-error skip"
    ):
        h5chunk.convert(tmp_path / "p", path, manifest=manifest)
    report = h5chunk.convert(tmp_path / "p", path, manifest=manifest, on_error="skip", shuffle=False)
    assert report.num_samples == 2 and len(report.skipped) == 3 and h5chunk.verify(path).ok
    dataset = h5chunk.ChunkDataset(path)
    words = [dataset.classes[label] for label in dataset.values("labels")]
    assert sorted(zip(dataset.values("n").tolist(), words, strict=True)) == [(2, "b"), (5, "a")]
    assert dataset.values("n").dtype == np.int64
    (tmp_path / "p" / "metadata.csv").write_text("file_name,n\n" + "".join(f"{i}.png,{i or ''}\n" for i in range(6)))
    with pytest.raises(SourceError, match=r"metadata\.csv, line 2: column 'n' is empty: .* \(--on-error skip\)"):
        h5chunk.convert(tmp_path / "p", tmp_path / "y.h5")
    h5chunk.convert(tmp_path / "p", tmp_path / "y.h5", on_error="skip")
    assert sorted(h5chunk.ChunkDataset(tmp_path / "y.h5").values("n").tolist()) == [1, 2, 3, 4, 5]


def test_a_column_of_text_that_may_be_the_label_is_told(read: Read) -> None:
    text = "path,breed,name,n\n1.png,pug,a,1\n2.png,pug,b,2\n3.png,dingo,c,3\n"
    [note] = read(text).notes
    assert note.startswith("column 'breed' became text") and "call it 'label' in the table" in note
    listing = read(text.replace("breed", "label"))
    assert listing.class_names == ["dingo", "pug"] and not listing.notes
