"""How a sparse file is recognised and opened."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import h5py
import pytest
import scipy.sparse
from support.open_source import open_source

import h5chunk
from h5chunk.errors import H5ChunkError, OptionError, SourceError
from h5chunk.sources.kinds import KIND_OPTIONS
from h5chunk.sources.open import find_kind

PNG = b"\x89PNG\r\n\x1a\n" + bytes(9)
BANNER = b"%%MatrixMarket matrix coordinate real general\n1 1 0\n"


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("ratings.csv", b"1,2,3\n", "csv"),
        ("RATINGS.CSV", b"1,2,3\n", "csv"),
        ("ratings.csv", bytes(9), "csv"),
        ("u.data", b"196\t242\t3\t881250949\n", "csv"),
        ("u1.base", b"1 2\n", "csv"),
        ("edges", b"# a graph\n1 2\n", "csv"),
        ("matrix.mtx", b"", "mtx"),
        ("matrix", BANNER, "mtx"),
        ("a9a", b"-1 3:1 11:1\n+1 5:1\n", "libsvm"),
        ("train.txt", b"2 qid:1 1:0.5\n", "libsvm"),
        ("likes.txt", b"user_id|item_id\nann|7\n", "csv"),
        ("images.npz", b"PK\x03\x04 and no more", "npz"),
        ("images.zip", b"PK\x03\x04 and no more", "images"),
        ("photos.tar", b"photo.jpg" + bytes(2000), "images"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_looks(tmp_path, name, data, kind, packed):
    import gzip

    if packed and (not data or name.endswith(("npz", "zip"))):
        return
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(data) if packed else data)
    assert find_kind(path).kind == find_kind(str(path)).kind == kind


def test_folders_and_missing_paths_would_have_to_be_images(tmp_path):
    for path in (tmp_path, tmp_path / "missing.csv"):
        assert find_kind(path).kind == "images"


@pytest.mark.parametrize("kind", [None, *KIND_OPTIONS])
def test_sources_that_cannot_be_read_are_errors_of_h5chunk(tmp_path, kind):
    """Missing and empty files and folders, folders with a suffix, noise, text, other HDF5 files, and other objects."""
    (tmp_path / "folder").mkdir()
    sources = [
        tmp_path / "missing",
        f"{tmp_path}/a\0b",
        "x" * 5000,
        tmp_path / "folder",
        3,
        None,
        [],
        {},
        b"x",
        object(),
    ]
    for suffix in ("parquet", "h5ad", "h5", "npz", "npy", "mtx", "svm", "csv", "csv.gz", "zip"):
        for name, data in (("empty", b""), ("noise", bytes(range(256)) * 9), ("text", b"hello world\n" * 9)):
            sources.append(tmp_path / f"{name}.{suffix}")
            sources[-1].write_bytes(data)
        sources += [tmp_path / f"missing.{suffix}", tmp_path / f"folder.{suffix}"]
        (sources[-1]).mkdir()
    for source in sources:
        with contextlib.suppress(H5ChunkError):
            h5chunk.convert(source, tmp_path / "x.h5", format=kind, dry_run=True)


@pytest.mark.parametrize("data", [b"some words, and more\n", b"1. read this\n", b"1\n2\n", b"\1\2\0"])
def test_what_is_not_recognised_is_told_the_formats(tmp_path, data):
    (tmp_path / "notes.txt").write_bytes(data)
    with pytest.raises(SourceError, match=r"notes.txt: not recognised.*--format csv:(.*\n)+  ratings +ratings.parquet"):
        find_kind(tmp_path / "notes.txt")


def test_other_hdf5_files_are_for_repack(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = [1, 2, 3]
    with pytest.raises(
        SourceError,
        match=r"x\.h5: is an HDF5 file, but neither \.h5ad nor 10x \.h5: .* h5chunk repack; .* --samples",
    ):
        open_source(tmp_path / "x.h5")


def test_a_format_may_be_told(tmp_path):
    (tmp_path / "ratings").write_bytes(b"user one,item one\nuser two,item one\nuser one,item two\n")
    assert open_source(tmp_path / "ratings", kind="csv").kind == "csv"
    with pytest.raises(OptionError, match=r"format is 'parquet': pass 10x, .*csv, .*images"):
        open_source(tmp_path / "ratings", kind="parquet")


def test_options_that_a_format_does_not_have(tmp_path):
    scipy.sparse.save_npz(tmp_path / "m.npz", scipy.sparse.eye(3, format="csr"))
    for options in ({"layer": "X"}, {"columns": ("0", "1")}):
        (name,) = options
        with pytest.raises(OptionError, match=rf"--{name} applies only to .*m.npz contains sparse matrices \(npz\)"):
            open_source(tmp_path / "m.npz", **options)
    with pytest.raises(OptionError, match="there is no option 'laier'"):
        open_source(tmp_path / "m.npz", laier="X")
    with pytest.raises(SourceError, match=r"n\.npz: no such file or folder"):
        open_source(tmp_path / "n.npz", layer="X")


def test_names_that_are_not_utf8(tmp_path):
    path = bytes(tmp_path) + b"/caf\xe9.csv"
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(b"1,x\n1,2,3\n")
    import os

    with pytest.raises(SourceError, match=r"caf\\xe9.csv, line 2: 3 columns"):
        list(open_source(os.fsdecode(path)).blocks(1 << 20))


def test_only_text_needs_pyarrow(tmp_path):
    scipy.sparse.save_npz(tmp_path / "m.npz", scipy.sparse.eye(3, format="csr"))
    (tmp_path / "r.csv").write_bytes(b"1,2,3\n")
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; sys.modules['pyarrow'] = None\n"
        "from h5chunk.errors import SourceError\n"
        "from support.open_source import open_source\nassert len(list(open_source('m.npz').blocks(1 << 20))) == 1\n"
        "assert 'scipy' not in sys.modules\ntry: open_source('r.csv')\n"
        "except SourceError as error: print(error)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path, timeout=240
    )
    assert out.stdout.strip() == 'r.csv: reading csv requires pyarrow: pip install "h5chunk[tables]"'
