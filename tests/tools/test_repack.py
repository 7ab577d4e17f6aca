"""Everything of a file is in the repacked one, in well-laid chunks, whatever it was; and every way to fail."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import warnings
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from anndata.tests.helpers import assert_equal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from support.commands import run
from support.faults import small, watch
from support.matrices import write_anndata
from support.matrix_files import write_10x, write_h5ad
from support.repack_files import check_checksums, check_same, make_everything

import h5chunk
import h5chunk.store.rewrite.replica
from h5chunk.errors import FieldError, H5ChunkError, OptionError, OutputError
from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.permutation import permutation
from h5chunk.store.format.header import read_header
from h5chunk.tools.repack.options import RepackOptions, read_tuned
from h5chunk.tools.repack.plan import COMPRESSIONS
from h5chunk.tools.repack.repack import repack
from h5chunk.tools.repack.report import DatasetLayout

# what `make_everything` has beside its samples, and what might depend on their order
INDEPENDENT = ["other/named", "other/table", *(f"{name}@ant" for name in ("", "meta", "images", "other/table", "kind"))]
INDEPENDENT += ["meta@names", "meta@large", "meta@lists"]

ANYTHING = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def report_of(report: Any, name: str) -> Any:
    return next(each for each in report.fields if each.name == name)


def make_images(path: Path, num_samples: int = 200, **options: Any) -> np.ndarray:
    """A file as h5py makes it: ``images`` in its guessed chunks, and ``labels``."""
    images = np.random.default_rng(1).integers(0, 256, (num_samples, 8, 6, 3), np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, **({"chunks": (50, 4, 3, 1)} | options))
        file["labels"] = np.arange(num_samples)
    return images


def left_beside(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir() if each.name.startswith("."))


@pytest.fixture
def tiny_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any memory will do, reads and buckets are of few bytes, and chunks of any size are compressed."""
    small(
        monkeypatch,
        min_memory_bytes=-(1 << 40),
        step_bytes=1000,
        least_write_bytes=100,
        table_bytes=0,
        least_vector_bytes=16,
        least_filtered_bytes=0,
    )


@pytest.fixture
def quick(in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in this process, and nothing waits for the disk."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr("os.fdatasync", lambda descriptor: None)


# ------------------------------------------------------------------------------------------------ all that there is


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_everything(tmp_path_factory.mktemp("everything") / "everything.h5")


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_everything_is_kept(everything: Path, tmp_path: Path, compression: str, shuffle: bool) -> None:
    if compression not in ("none", "gzip", "lzf"):
        pytest.importorskip("hdf5plugin")
    out = tmp_path / "out.h5"
    keep = INDEPENDENT if shuffle else ()
    report = repack(everything, out, compression=compression, shuffle=shuffle, seed=5, keep=keep)
    order = permutation(100, 5)
    check_same(everything, out, order if shuffle else None)
    assert out.read_bytes()[:12] == b"a user block"
    with h5py.File(out) as file:
        assert ("h5chunk" in file) == shuffle
        assert file["images"].chunks == (100, 9, 7, 3)
        assert (file["images"].id.get_create_plist().get_nfilters() > 0) == (compression != "none")
        assert file["images"].shuffle == (compression not in ("none", "blosc"))  # as in the source
        assert file["train/unwritten"].id.get_storage_size() == 0
        if shuffle:
            np.testing.assert_array_equal(file["h5chunk/source_index"], order)
    if shuffle:
        objects = {f"train/{name}" for name in ("names", "ragged", "mixed", "refs")}
        assert check_checksums(out) == {each.name for each in report.fields} - {"train/unwritten"} - objects
        assert {each.name for each in report.fields if each.shuffled} == {each.name for each in report.fields}
    lost: list[str] = []
    if not shuffle:
        lost.append("Fletcher32 checksums are not kept in images; --window-chunks adds other checksums")
    assert report.notes == ["images can no longer be resized, because chunks are stored one after the other", *lost]


def test_values_of_variable_length_are_permuted_in_parts(
    everything: Path, tmp_path: Path, tiny_memory: None, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = watch(monkeypatch, "store.rewrite.replica._write")
    options: dict[str, Any] = {"memory_bytes": 20_000, "compression": "gzip", "keep": INDEPENDENT}
    repack(everything, tmp_path / "out.h5", shuffle=True, **options)
    check_same(everything, tmp_path / "out.h5", permutation(100, 0))
    assert sum(rows is not None and len(rows) < 50 for _, rows, *_ in written) > 4


@pytest.mark.parametrize("window_chunks", [None, 2])
def test_checksums_of_hdf5_are_replaced_or_said_to_be_lost(tmp_path: Path, window_chunks: int | None) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(600).reshape(100, 6), chunks=(10, 6), fletcher32=True)
    report = repack(tmp_path / "a.h5", tmp_path / "b.h5", window_chunks=window_chunks)
    lost = ["Fletcher32 checksums are not kept in x; --window-chunks adds other checksums"]
    assert report.notes == ([] if window_chunks else lost)
    if window_chunks:
        assert check_checksums(tmp_path / "b.h5") == {"x"}


def test_the_report_says_what_was_changed(tmp_path: Path) -> None:
    make_images(tmp_path / "a.h5", compression="gzip")
    report = repack(tmp_path / "a.h5", tmp_path / "b.h5", chunk_samples=16)
    images = report_of(report, "images")
    assert (images.before.chunks, images.before.chunks_per_sample) == ((50, 4, 3, 1), 12)
    assert (images.after.chunks, images.after.chunks_per_sample) == ((16, 8, 6, 3), 1)
    assert (images.before.filters, images.after.filters) == (("gzip",), ())
    assert images.after.stored_bytes == 13 * 16 * 144 and images.num_bytes == 200 * 144
    assert (report.num_samples, report.main, report.chunk_samples) == (200, "images", 16)
    assert report.num_bytes == (tmp_path / "b.h5").stat().st_size
    assert json.loads(report.to_json())["fields"][0]["after"]["chunks"] == [16, 8, 6, 3]
    assert "was chunks of 50 x 4 x 3 x 1, gzip" in str(report) and "is  chunks of 16 x 8 x 6 x 3" in str(report)


def test_chunks_are_one_run_in_order(tmp_path: Path) -> None:
    make_images(tmp_path / "a.h5")
    repack(tmp_path / "a.h5", tmp_path / "b.h5", chunk_samples=7)
    places: list[tuple[int, int]] = []
    with h5py.File(tmp_path / "b.h5") as file:
        file["images"].id.chunk_iter(lambda chunk: places.append((chunk.byte_offset, chunk.size)))
    assert places == [(places[0][0] + i * 7 * 144, 7 * 144) for i in range(29)]


DTYPES = ["u1", "<i4", ">f8", "S5", "?", "c8", [("a", "u1"), ("b", "<f4", (3,))], "V7", ("<u2", (2, 2))]


def draw_dataset(data: st.DataObject, file: h5py.File, name: str, num_rows: int) -> None:
    rest = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
    shape = (num_rows, *rest)
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    options: dict[str, Any] = {}
    if data.draw(st.booleans()):
        options["chunks"] = tuple(data.draw(st.integers(1, size + 1)) for size in shape)
        options["maxshape"] = tuple(data.draw(st.sampled_from([None, size + 1])) for size in shape)
        for filter_name in ("shuffle", "fletcher32"):
            options[filter_name] = data.draw(st.booleans())
        options["compression"] = data.draw(st.sampled_from([None, "gzip", "lzf"]))
    dataset = file.create_dataset(name, shape, dtype, **options)
    values = np.random.default_rng(0).integers(0, 2, (*shape, dtype.itemsize), np.uint8).view(dtype.base)
    values = values.reshape(*shape, *dtype.shape)
    written = data.draw(st.sampled_from(["all", "all", "some", "none"]))
    if written == "all":
        dataset[...] = values
    elif written == "some":
        first = data.draw(st.integers(0, num_rows - 1))
        dataset[first : first + 2] = values[first : first + 2]


@given(st.data())
@ANYTHING
def test_any_layout_of_any_type(tmp_path: Path, tiny_memory: None, quick: None, data: st.DataObject) -> None:
    source, out = tmp_path / "a.h5", tmp_path / "b.h5"
    num_rows = data.draw(st.integers(1, 60))
    with h5py.File(source, "w", libver=data.draw(st.sampled_from(["earliest", "latest"]))) as file:
        draw_dataset(data, file, "images", num_rows)
        names = data.draw(st.sets(st.sampled_from(["b", "g/c", "g/d"])))
        for name in names:
            draw_dataset(data, file, name, num_rows)
        file["other"] = np.arange(num_rows + 1)
    shuffle, seed = data.draw(st.booleans()), data.draw(st.integers(0, 5))
    options = {
        "keep": ["other"],
        "fields": ["images", *names],  # by itself, nothing takes complex numbers for samples
        "chunk_samples": data.draw(st.sampled_from([None, 1, 3, 1000])),
        "compression": data.draw(st.sampled_from([None, None, "gzip:1", "lzf"])),
    }
    repack(source, out, shuffle=shuffle, seed=seed, memory_bytes=1 << 18, overwrite=True, **options)
    check_same(source, out, permutation(num_rows, seed) if shuffle else None)
    if shuffle:
        check_checksums(out)


# --------------------------------------------------------------------------------------------------- shuffle, memory


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("chunks", [(50, 4, 3, 1), (1, 8, 6, 3), None])
def test_bytes_do_not_depend_on_memory(
    tmp_path: Path,
    tiny_memory: None,
    in_process: None,
    chunks: Any,
    compression: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_images(tmp_path / "a.h5", 500, chunks=chunks)
    outputs, scattered = set(), watch(monkeypatch, "plan.repack.MemoryShares.scatter_bytes")
    for memory_bytes in (1 << 30, 100_000, 20_000):
        out = tmp_path / f"{memory_bytes}.h5"
        repack(
            tmp_path / "a.h5", out, shuffle=True, chunk_samples=8, memory_bytes=memory_bytes, compression=compression
        )
        outputs.add(out.read_bytes())
    assert len(outputs) == 1
    assert max(buckets for _, buckets in scattered) > 50  # it was a shuffle in two passes
    assert check_checksums(out) == {"images", "labels"}
    with h5py.File(out) as file:
        stored = file["images"].id.read_direct_chunk((496, 0, 0, 0))[1]
        last = np.frombuffer(zlib.decompress(stored) if compression else stored, np.uint8)
    assert len(last) == 8 * 144 and not last[4 * 144 :].any()
    check_same(tmp_path / "a.h5", out, permutation(500, 0))


def test_bytes_do_not_depend_on_the_time(tmp_path: Path) -> None:
    """New objects are not stamped, though those of the source are, as h5py's groups and strings may be."""
    make_images(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file.create_dataset("names", data=["abc"] * 200, track_times=True)
        properties = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
        properties.set_obj_track_times(True)
        h5py.h5g.create(file.id, b"group", gcpl=properties)
    repack(tmp_path / "a.h5", tmp_path / "b.h5", shuffle=True)
    with h5py.File(tmp_path / "b.h5") as file:
        stamps = {name: h5py.h5o.get_info(file[name].id).ctime for name in ("/", "names", "group", "h5chunk")}
    assert set(stamps.values()) == {0}, stamps


def test_a_file_sorted_by_class_becomes_mixed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = np.repeat(np.arange(10, dtype=np.uint8), 100)[:, None] * np.ones(20, np.uint8)
        file["labels"] = np.repeat(np.arange(10), 100)
    repack(tmp_path / "a.h5", tmp_path / "b.h5", shuffle=True, seed=2)
    with h5py.File(tmp_path / "b.h5") as file:
        np.testing.assert_array_equal(file["images"][:, 0], file["labels"])
        assert len(set(file["labels"][:32])) > 7
        header = read_header(file)
    assert header is not None and header.shuffled and header.seed == 2


def test_bands_of_chunks_that_do_not_fit_wait_on_disk(
    tmp_path: Path, tiny_memory: None, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spilled = watch(monkeypatch, "store.rewrite.raw_rows.SpilledBand.read")
    make_images(tmp_path / "a.h5", 350, chunks=(100, 8, 6, 1), compression="gzip")
    for shuffle in (False, True):
        repack(tmp_path / "a.h5", tmp_path / "b.h5", memory_bytes=80_000, shuffle=shuffle, overwrite=True)
        check_same(tmp_path / "a.h5", tmp_path / "b.h5", permutation(350, 0) if shuffle else None)
    assert {band for _, band, *_ in spilled} == set(range(4))


MEASURE = """
import resource, sys
from h5chunk.tools.repack.repack import repack
repack({small!r}, {out!r}, memory_bytes=16 << 20, overwrite=True, **{options!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
repack({large!r}, {out!r}, memory_bytes=16 << 20, overwrite=True, **{options!r})
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, children - before)
"""


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "compression": "lzf"}], ids=str)
def test_memory_is_bounded(tmp_path: Path, options: dict[str, Any]) -> None:
    small, large, out = (str(tmp_path / name) for name in ("small.h5", "large.h5", "out.h5"))
    for path, num_samples in ((small, 1), (large, 25_000)):  # of 75 MB
        with h5py.File(path, "w") as file:
            chunk = (min(num_samples, 5000), 50, 1)
            values = file.create_dataset("images", (num_samples, 1000, 3), "u1", chunks=chunk)
            for first, column, channel in np.ndindex(num_samples // chunk[0], 20, 3):
                values.id.write_direct_chunk((first * chunk[0], column * 50, channel), bytes(chunk[0] * 50))
            file["names"] = [f"{i}" for i in range(num_samples)]
    code = MEASURE.format(small=small, large=large, out=out, options=options)
    grown = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=240
    ).stdout.split()
    assert max(map(int, grown)) < (16 << 10) * 1.3  # KiB


@pytest.mark.parametrize(("options", "message"), [
    ({"memory_bytes": 1 << 20}, "memory is 1048576 bytes: pass at least"),
    ({"memory_bytes": 8 << 20, "shuffle": True}, "shuffling 400000 samples needs"),
    ({"chunk_samples": 0}, "chunk_samples is 0"),
    ({"window_chunks": 0}, "window_chunks is 0"),
    ({"window_chunks": 1 << 63}, "window_chunks is 9223372036854775808: pass at most 9223372036854775807"),
    ({"cache": (1 << 63, 0, 0.0)}, "use numbers of at most 9223372036854775807"),
    ({"seed": -1}, "seed is -1"),
    ({"compression": "brotli"}, "compression is 'brotli': use one of none, gzip, lzf, zstd, lz4, blosc"),
    ({"compression": "gzip:10"}, "use a level of gzip from 0 to 9"),
    ({"compression": "gzip:x"}, "use a level of gzip from 0 to 9"),
    ({"compression": "lzf:1"}, "compression is 'lzf:1'"),
    ({"cache": (1, 2)}, "cache is (1, 2)"),
    ({"cache": (1, 0, 1.0)}, "cache w0 is 1.0"),
    ({"fields": ["nope"]}, "has no dataset 'nope'; it has images"),
    ({"fields": ["text"]}, "'text' of type object and shape () cannot be a field"),
    ({"keep": ["nope"]}, "has no dataset, group or attribute (OBJECT@ATTRIBUTE) 'nope'"),
])  # fmt: skip
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"], file["text"] = np.zeros((400_000, 2), np.uint8), "text"
    with pytest.raises(H5ChunkError) as error:
        repack(tmp_path / "a.h5", tmp_path / "b.h5", **options)
    assert message in str(error.value) and isinstance(error.value, (OptionError, FieldError))
    assert os.listdir(tmp_path) == ["a.h5"]


def test_a_sample_that_does_not_fit_in_memory(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((2, 5 << 20), np.uint8), np.arange(2)
    for options in ({"shuffle": True}, {"fields": ["images"]}):
        with pytest.raises(OptionError, match=r"a sample of 'images' takes up 5.0 MiB, .* which is .* MiB: raise"):
            repack(tmp_path / "a.h5", tmp_path / "b.h5", memory_bytes=8 << 20, **options)
    report = repack(tmp_path / "a.h5", tmp_path / "b.h5", memory_bytes=8 << 20)
    check_same(tmp_path / "a.h5", tmp_path / "b.h5")
    assert report.main == "labels"
    assert report.notes == ["images is copied unchanged, because its rows are too large for a chunk or for memory"]


def test_compression_without_hdf5plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_images(tmp_path / "a.h5")
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)
    with pytest.raises(H5ChunkError, match=r'needs hdf5plugin: pip install "h5chunk\[codecs\]"'):
        repack(tmp_path / "a.h5", tmp_path / "b.h5", compression="zstd")


# ------------------------------------------------------------------------------------------------- files of our own


def make_ours(tmp_path: Path) -> Path:
    """A converted file of 40 images in 3 classes, with a manifest's column."""
    folder = tmp_path / "photos"
    lines = ["path,weight"]
    for i in range(40):
        path = folder / f"class{i % 3}" / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 5, 3), i, np.uint8)).save(path)
        lines.append(f"{path.relative_to(folder)},{i / 2}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    h5chunk.convert(folder, tmp_path / "ours.h5", manifest=tmp_path / "list.csv", seed=3, workers=0, chunk_samples=8)
    return tmp_path / "ours.h5"


def names_of(file: h5py.File) -> list[bytes]:
    ends, data = file["h5chunk/source_name_ends"][()], file["h5chunk/source_names"][()].tobytes()
    return [data[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_file_of_ours_stays_one(tmp_path: Path, shuffle: bool) -> None:
    ours, out = make_ours(tmp_path), tmp_path / "out.h5"
    repack(ours, out, shuffle=shuffle, seed=9, chunk_samples=5, window_chunks=4)
    order = permutation(40, 9) if shuffle else np.arange(40)
    assert check_checksums(out) == {"images", "weight"}
    with h5py.File(ours) as old, h5py.File(out) as new:
        assert list(old["h5chunk"]) == list(new["h5chunk"]) and set(old["h5chunk"].attrs) == set(new["h5chunk"].attrs)
        for name in ("images", "weight", "h5chunk/source_index"):
            np.testing.assert_array_equal(old[name][()][order], new[name][()])
        assert [names_of(old)[i] for i in order] == names_of(new)
        assert all(
            f"{index:04}.png".encode() in name
            for index, name in zip(new["images"][:, 0, 0, 0], names_of(new), strict=True)
        )
        before, after = read_header(old), read_header(new)
        assert new["images"].chunks[0] == new["weight"].chunks[0] == 5
    assert (after.chunk_samples, after.window_chunks, after.num_samples) == (5, 4, 40)
    assert (after.shuffled, after.seed) == (True, 9 if shuffle else 3)
    options = after.options
    assert options["repack"]["chunk_samples"] == 5 and options.items() >= before.options.items()


def make_matrix(tmp_path: Path, pattern: bool) -> tuple[Path, np.ndarray]:
    matrix = np.random.default_rng(0).poisson(0.2, (300, 40)).astype(np.uint8)
    matrix[17] = 0
    scipy.sparse.save_npz(tmp_path / "matrix.npz", scipy.sparse.csr_matrix(matrix))
    h5chunk.convert(tmp_path / "matrix.npz", tmp_path / "matrix.h5", **({"binarize": 1} if pattern else {}))
    return tmp_path / "matrix.h5", matrix > 0 if pattern else matrix


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("pattern", [False, True])
def test_rows_of_a_sparse_matrix_are_permuted(
    tmp_path: Path, tiny_memory: None, in_process: None, pattern: bool, compression: str | None
) -> None:
    ours, matrix = make_matrix(tmp_path, pattern)
    with h5py.File(ours, "r+") as file:
        file["h5chunk/row_ids"] = file["h5chunk/source_index"][()].astype("S5")
    outputs = set()
    for memory_bytes in (1 << 30, 40_000):
        out = tmp_path / f"{memory_bytes}.h5"
        repack(ours, out, shuffle=True, seed=4, memory_bytes=memory_bytes, compression=compression)
        outputs.add(out.read_bytes())
    assert len(outputs) == 1
    with h5py.File(ours) as old, h5py.File(out) as new:
        index = new["h5chunk/source_index"][()]
        np.testing.assert_array_equal(index, old["h5chunk/source_index"][()][permutation(300, 4)])
        np.testing.assert_array_equal(new["h5chunk/row_ids"][()].astype(int), index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = anndata.io.sparse_dataset(new["X"])[:].toarray()
        assert new["X/indices"].chunks == new["X/data"].chunks and new["X/indptr"].chunks is None
        assert (new["X/data"].id.get_storage_size() == 0) == pattern
    np.testing.assert_array_equal(rows, matrix[index])
    assert check_checksums(out) == {"X/indices", "X/indptr", *(() if pattern else ("X/data",))}
    assert str(h5chunk.info(out)).startswith(f"{out}")


def test_a_matrix_in_a_file_of_others_is_permuted_with_its_labels(tmp_path: Path) -> None:
    matrix = scipy.sparse.random(90, 70, 0.3, "csr", np.float32, np.random.default_rng(0))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("train/x")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", matrix.shape
        for name in ("data", "indices", "indptr"):
            group.create_dataset(name, data=getattr(matrix, name), chunks=True, compression="gzip")
        file["train/y"] = np.arange(90)
    report = repack(tmp_path / "a.h5", tmp_path / "b.h5", shuffle=True)
    order = permutation(90, 0)
    with h5py.File(tmp_path / "b.h5") as file:
        parts = tuple(file[f"train/x/{name}"][()] for name in ("data", "indices", "indptr"))
        np.testing.assert_array_equal(scipy.sparse.csr_matrix(parts, matrix.shape).toarray(), matrix.toarray()[order])
        np.testing.assert_array_equal(file["train/y"], order)
        assert file["train/x/indptr"].dtype == np.int32
    assert report.main == "train/x" and 1 < report_of(report, "train/x/data").after.chunks_per_sample < 1.1


def test_a_matrix_that_says_not_what_it_is_keeps_its_order(tmp_path: Path) -> None:
    write_10x(tmp_path / "a.h5", scipy.sparse.random(30, 20, 0.3, "csr", random_state=0))
    report = repack(tmp_path / "a.h5", tmp_path / "b.h5")
    check_same(tmp_path / "a.h5", tmp_path / "b.h5")
    assert report_of(report, "matrix/data").after.filters == ()
    with pytest.raises(
        OptionError, match="'matrix' looks like a sparse matrix, but its format, csr or csc, is unknown"
    ):
        repack(tmp_path / "a.h5", tmp_path / "c.h5", shuffle=True)


def test_dense_rows_are_decompressed(tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).poisson(0.2, (300, 40)).astype(np.uint8)
    scipy.sparse.save_npz(tmp_path / "matrix.npz", scipy.sparse.csr_matrix(matrix))
    h5chunk.convert(tmp_path / "matrix.npz", tmp_path / "a.h5", dense=True, shuffle=False)
    repack(tmp_path / "a.h5", tmp_path / "b.h5")
    with h5py.File(tmp_path / "b.h5") as file:
        np.testing.assert_array_equal(file["X"], matrix)
        assert file["X"].compression is None
    assert check_checksums(tmp_path / "b.h5") == {"X"}


# ---------------------------------------------------------------------------------------------------------- AnnData


@pytest.fixture(scope="module", params=["csr_matrix", "csc_matrix", "array"])
def cells(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, n = np.random.default_rng(0), 60
    matrix = getattr(scipy.sparse, request.param, np.array)(rng.poisson(0.3, (n, 30)).astype(np.float32))
    obs = pd.DataFrame(
        {"kind": pd.Categorical(rng.choice(["a", "b"], n)), "size": rng.random(n), "note": [f"é{i}" for i in range(n)]},
        index=[f"cell{i}" for i in range(n)],
    )
    counts = scipy.sparse.csr_matrix(rng.poisson(0.3, (n, 30)))
    return write_h5ad(
        tmp_path_factory.mktemp("cells") / "cells.h5ad",
        matrix,
        obs=obs,
        obsm={"pca": rng.random((n, 4)), "table": pd.DataFrame({"q": np.arange(n)}, index=obs.index)},
        layers={"counts": counts, "dense": rng.random((n, 30))},
        obsp={"near": scipy.sparse.csr_matrix(rng.poisson(0.1, (n, n)).astype(float))},
        uns={"a": {"b": np.arange(n), "c": "text"}, "none": scipy.sparse.csr_matrix((0, 5))},
        raw=counts,
        compression="gzip",
    )


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_anndata_reads_the_same(cells: Path, tmp_path: Path, compression: str | None) -> None:
    report = repack(cells, tmp_path / "out.h5ad", compression=compression)
    check_same(cells, tmp_path / "out.h5ad")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equal(anndata.read_h5ad(cells), anndata.read_h5ad(tmp_path / "out.h5ad"), exact=True)
        backed = anndata.read_h5ad(tmp_path / "out.h5ad", backed="r")
        assert backed.X[3:5].shape == (2, 30)
        backed.file.close()
    assert (report.main, report.num_samples, report.has_header) == ("X", 60, False)
    with h5py.File(tmp_path / "out.h5ad") as file:
        assert "h5chunk" not in file and file["layers/dense"].chunks[1:] == (30,)
        assert file["obs/size"].chunks is None  # columns are read whole
        assert compression or file["layers/counts/data"].compression is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "shuffle it with h5chunk convert, which makes a training file"),
        ({"window_chunks": 4}, "window_chunks would add the group /h5chunk"),
        ({"cache": (1, 0, 0.0)}, "cache would add the group /h5chunk"),
    ],
)
def test_what_anndata_could_not_read_is_refused(
    cells: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        repack(cells, tmp_path / "out.h5ad", **options)
    assert os.listdir(tmp_path) == []


# -------------------------------------------------------------------------------------------------- which are fields


def test_datasets_that_are_named_say_how_many_samples_there_are(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for part, n in (("train", 50), ("test", 20)):
            file.create_dataset(f"{part}/x", data=np.arange(n * 60).reshape(n, 60), chunks=(n, 7))
            file[f"{part}/y"] = np.arange(n)
    report = repack(tmp_path / "a.h5", tmp_path / "b.h5")
    assert {each.name for each in report.fields} == {"train/x", "train/y", "test/x", "test/y"}
    report = repack(tmp_path / "a.h5", tmp_path / "c.h5", fields=["test/x", "/train/x"], chunk_samples=30)
    assert {each.name: each.after.chunks for each in report.fields} == {
        "train/x": (30, 60), "test/x": (20, 60)
    }  # fmt: skip
    check_same(tmp_path / "a.h5", tmp_path / "c.h5")
    with pytest.raises(OptionError, match=r"shuffle is set, but the fields differ in length \(20, 50\)"):
        repack(tmp_path / "a.h5", tmp_path / "d.h5", fields=["test/x", "train/x"], shuffle=True)


def test_all_episodes_get_complete_samples_and_what_keeps_cut_samples_is_named(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.h5", np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number in range(12):
            group, steps = file.create_group(f"data/demo_{number}"), 30 + number
            frames = rng.integers(0, 256, (steps + 1, 8, 8, 3), np.uint8)
            group.create_dataset("obs/rgb", data=frames, chunks=(steps, 4, 4, 3), compression="gzip")
            group.create_dataset("actions", data=rng.random((steps, 4)), chunks=(steps, 2))
        file.create_dataset("other", data=rng.random((7, 6)), chunks=(7, 2))
    report = repack(path, tmp_path / "b.h5")
    check_same(path, tmp_path / "b.h5")
    with h5py.File(tmp_path / "b.h5") as file:
        for demo in file["data"].values():
            assert demo["obs/rgb"].chunks[1:] == (8, 8, 3) and demo["actions"].chunks[1:] == (4,)
    assert report.num_alike == 11 and "and 11 datasets like it" in str(report) and "and 11 more like it" in str(report)
    assert len(str(report).splitlines()) < 12
    assert any(note.startswith("other keep chunks that cut each sample") for note in report.notes)
    named = ["data/*/obs/rgb", "other"]  # as the note says
    report = repack(path, tmp_path / "c.h5", fields=named)
    assert len(report.fields) == 13 and all(each.after.chunks_per_sample == 1 for each in report.fields)
    check_same(path, tmp_path / "c.h5")
    windowed = repack(path, tmp_path / "d.h5", window_chunks=4, dry_run=True)  # is for samples of one length
    assert any("without shuffle, window_chunks and cache" in note for note in windowed.notes)
    with pytest.raises(FieldError, match=r"has no dataset 'data/\*/nothing'"):
        repack(path, tmp_path / "d.h5", fields=["data/*/nothing"])


def test_what_is_to_be_kept_is_no_field(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"], file["mean"] = np.arange(60).reshape(12, 5), np.arange(12)
        file.attrs["weights"] = np.arange(12)
    report = repack(tmp_path / "a.h5", tmp_path / "b.h5", shuffle=True, keep=["mean", "@weights"])
    check_same(tmp_path / "a.h5", tmp_path / "b.h5", permutation(12, 0), {"/images"})
    assert report.notes == []


def test_a_file_without_samples_is_copied(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["scalar"], file["text"], file.attrs["a"] = 5, "text", 3
        file.create_dataset("none", (0, 4), "f4")
    report = repack(tmp_path / "a.h5", tmp_path / "b.h5")
    check_same(tmp_path / "a.h5", tmp_path / "b.h5")
    assert (report.num_samples, report.fields, report.num_copied) == (0, [], 3) and "no samples" in str(report)
    with pytest.raises(OptionError, match="shuffle is set, but no dataset has samples"):
        repack(tmp_path / "a.h5", tmp_path / "c.h5", shuffle=True)


@pytest.mark.parametrize("ordered", [False, True])
def test_groups_of_many_links_and_attributes(tmp_path: Path, ordered: bool) -> None:
    """HDF5 keeps those in heaps, whose places in the old file mean nothing in the new one."""
    with h5py.File(tmp_path / "a.h5", "w", libver="v110") as file:
        file["images"] = np.arange(200).reshape(40, 5)
        group = file.create_group("many", track_order=ordered)
        for i in reversed(range(30)):
            group[f"{i}"] = np.arange(i)
            group.attrs[f"{i}"] = i
        group["inner/array"] = np.arange(3)
    for old, new in (("a.h5", "b.h5"), ("b.h5", "c.h5")):
        repack(tmp_path / old, tmp_path / new)
        check_same(tmp_path / "a.h5", tmp_path / new)


def test_an_axis_without_limit_that_is_not_the_first(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:  # HDF5 says wrong places of its chunks
        file.create_dataset("images", data=np.arange(24).reshape(4, 6), chunks=(2, 1), maxshape=(4, None))
    repack(tmp_path / "a.h5", tmp_path / "b.h5")
    check_same(tmp_path / "a.h5", tmp_path / "b.h5")


def test_window_and_cache_are_stored(tmp_path: Path) -> None:
    make_images(tmp_path / "a.h5")
    report = repack(tmp_path / "a.h5", tmp_path / "b.h5", window_chunks=7, cache=(11, 4096, 0.5), chunk_samples=4)
    with h5py.File(tmp_path / "b.h5") as file:
        header = read_header(file)
        assert "source_index" not in file["h5chunk"]
    assert (header.window_chunks, header.cache, header.shuffled) == (7, CacheSettings(11, 4096, 0.5), False)
    assert report.has_header and "windows of 7 chunks of 4 samples are recommended" in str(report)
    assert check_checksums(tmp_path / "b.h5") == {"images", "labels"}
    dataset = h5chunk.ChunkDataset(tmp_path / "b.h5")
    assert (dataset.window_chunks, dataset.chunk_samples) == (7, 4)
    again = repack(tmp_path / "b.h5", tmp_path / "c.h5", chunk_samples=8)  # ours now: it keeps its group
    assert again.has_header and check_checksums(tmp_path / "c.h5") == {"images", "labels"}


def test_a_tuned_file(tmp_path: Path) -> None:
    make_images(tmp_path / "a.h5")
    tuned = tmp_path / "tuned.json"
    tuned.write_text('{"chunk_samples": 6, "window_chunks": 3, "cache": [5, 99, 0.0], "compression": "gzip", "x": []}')
    report = repack(tmp_path / "a.h5", tmp_path / "b.h5", tuned=tuned)
    assert (report.chunk_samples, report.window_chunks) == (6, 3)
    assert report_of(report, "images").after.filters == ()  # so small chunks are not compressed
    with h5py.File(tmp_path / "b.h5") as file:
        assert read_header(file).cache == CacheSettings(5, 99, 0.0)
    report = repack(tmp_path / "a.h5", tmp_path / "c.h5", tuned=tuned, chunk_samples=40, compression="lzf")
    assert report_of(report, "images").after == DatasetLayout(
        (40, 8, 6, 3), ("lzf",), report.fields[0].after.stored_bytes, 1
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "contains [1], not a JSON object"),
        ("{", "not a JSON file"),
        ('{"chunk_samples": 0}', "chunk_samples is 0: pass at least 1"),
        ('{"chunk_samples": true}', "chunk_samples is True: pass a whole number"),
        ('{"window_chunks": 2.5}', "window_chunks is 2.5"),
        ('{"cache": [1, 2]}', "cache is [1, 2]: pass (nslots, nbytes, w0)"),
        ('{"cache": [1, 2.5, 0]}', "cache is [1, 2.5, 0]"),
        ('{"cache": [1, 2, 1.0]}', "cache w0 is 1.0"),
        ('{"compression": 5}', "compression is 5"),
        ('{"shuffle": 1}', "shuffle is 1: pass True or False"),
        ('{"num_samples": 0, "cache": null}', "num_samples is 0"),
        ('{"compression": "zip"}', "compression is 'zip'"),
        ('{"advice": [], "code": []}', "has none of the keys chunk_samples, "),
        ('{"repack": false, "chunks": null}', "recommends keeping the chunks of the file"),
    ],
)
def test_a_tuned_file_that_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tuned.json").write_text(text)
    with pytest.raises(OptionError) as error:
        read_tuned(tmp_path / "tuned.json")
    assert str(error.value).startswith(f"{tmp_path / 'tuned.json'}: ") and message in str(error.value)


def test_a_tuner_that_found_that_samples_have_to_be_shuffled(tmp_path: Path) -> None:
    """Its chunks and window are for that: else they would mix too little."""
    make_images(tmp_path / "a.h5")
    tuned = tmp_path / "tuned.json"
    tuned.write_text('{"chunk_samples": 6, "window_chunks": 3, "shuffle": true, "num_samples": 7}')
    report = repack(tmp_path / "a.h5", tmp_path / "b.h5", tuned=tuned)
    with h5py.File(tmp_path / "b.h5") as file:
        assert read_header(file).shuffled and len(file["h5chunk/source_index"]) == report.num_samples
    assert report.shuffled and "shuffled with seed 0" in str(report)
    assert f"the options were tuned for 7 samples, but this file has {report.num_samples}" in report.notes


def test_a_tuned_file_of_anndata(cells: Path, tmp_path: Path) -> None:
    """Takes what it can have, and says so; what was asked for itself is still an error."""
    tuned = tmp_path / "tuned.json"
    tuned.write_text('{"chunk_samples": 6, "window_chunks": 3, "cache": [5, 99, 0.0], "shuffle": true}')
    report = repack(cells, tmp_path / "out.h5ad", tuned=tuned)
    assert not report.has_header and not report.shuffled and "AnnData files support only" in report.notes[0]
    check_same(cells, tmp_path / "out.h5ad")
    with pytest.raises(OptionError, match="window_chunks would add"):
        repack(cells, tmp_path / "no.h5ad", tuned=tuned, window_chunks=3)


def test_tuned_options_of_a_file_that_is_kept(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=np.ones((60, 4, 4), "u1"), chunks=(1, 4, 4))
    (tmp_path / "tuned.json").write_text('{"repack": false, "chunk_samples": 1, "window_chunks": 60}')
    report = repack(tmp_path / "a.h5", tmp_path / "b.h5", tuned=tmp_path / "tuned.json")
    assert report.chunk_samples == 60 and "keep the file as it is" in str(report)


def test_what_a_tuned_file_may_leave_out(tmp_path: Path) -> None:
    (tmp_path / "tuned.json").write_text('{"cache": null, "compression": null, "other": {}}')
    assert read_tuned(tmp_path / "tuned.json") == (RepackOptions(), None)
    with pytest.raises(OptionError, match=r"cannot be read \(No such file"):
        read_tuned(tmp_path / "nothing.json")


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"chunk_samples": 8, "window_chunks": 3}])
def test_a_plan_writes_nothing_and_comes_true(tmp_path: Path, options: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=np.zeros((50, 4, 6), "u1"), chunks=(7, 2, 3))
        file["labels"] = np.arange(50)
    planned = h5chunk.repack(tmp_path / "a.h5", tmp_path / "b.h5", dry_run=True, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]
    done = h5chunk.repack(tmp_path / "a.h5", tmp_path / "b.h5", **options)
    for name in ("path", "num_samples", "main", "chunk_samples", "window_chunks", "shuffled"):
        assert getattr(planned, name) == getattr(done, name)
    assert [replace(each, after=replace(each.after, stored_bytes=None)) for each in done.fields] == planned.fields
    assert "would be chunks of" in str(planned) and json.loads(planned.to_json())["num_bytes"] > 0
    with pytest.raises(OutputError, match="exists"):
        h5chunk.repack(tmp_path / "b.h5", tmp_path / "a.h5", dry_run=True, **options)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"window_chunks": 1}])
def test_attributes_and_matrices_of_others_mean_what_they_meant(tmp_path: Path, options: dict[str, Any]) -> None:
    """A scale is h5chunk's only where h5chunk converted a matrix."""
    rows = scipy.sparse.random(6, 5, 0.5, "csr", rng=np.random.default_rng(1))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, values in (("images", np.arange(24, dtype="u1").reshape(6, 4)), ("labels", np.arange(6))):
            file.create_dataset(name, data=values).attrs["scale"] = 255.0
    write_anndata(tmp_path / "m.h5", rows)
    for name in ("a", "m"):
        repack(tmp_path / f"{name}.h5", tmp_path / f"{name}2.h5", **options)
    fields = ["images", "labels"]
    images, labels = next(iter(h5chunk.ChunkLoader(h5chunk.ChunkDataset(tmp_path / "a2.h5", fields=fields), 6)))
    assert images.dtype == h5chunk.ChunkDataset(tmp_path / "a2.h5")[0][0].dtype == torch.uint8
    assert np.array_equal(images[:, 0], labels * 4)
    with h5py.File(tmp_path / "m2.h5") as file:
        order = file["h5chunk/source_index"][:] if "shuffle" in options else np.arange(6)
    (dense,) = next(iter(h5chunk.ChunkLoader(tmp_path / "m2.h5", 6, shuffle=False)))
    assert np.array_equal(dense, rows.toarray()[order].astype("f4"))


@pytest.mark.filterwarnings("ignore:.* is read through h5py:UserWarning")
@pytest.mark.parametrize("options", [{"shuffle": True}, {"window_chunks": 1}])
def test_what_was_never_written_needs_no_checksums(tmp_path: Path, options: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", (3, 4), "u1", chunks=(1, 4), fillvalue=7)
    repack(tmp_path / "a.h5", tmp_path / "b.h5", **options)
    assert h5chunk.verify(tmp_path / "b.h5").ok
    (images,) = next(iter(h5chunk.ChunkLoader(tmp_path / "b.h5", 3)))
    assert (images == 7).all()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_field_that_is_kept_keeps_its_checksums(class_folder, tmp_path, shuffle):
    h5chunk.convert(class_folder(count=40), tmp_path / "old.h5", chunk_samples=4)
    h5chunk.repack(tmp_path / "old.h5", tmp_path / "new.h5", keep=("labels",), chunk_samples=8, shuffle=shuffle)
    report = h5chunk.verify(tmp_path / "new.h5")
    assert report.ok, report.problems
    assert [field.field for field in report.fields if field.method == "checksum"] == ["images", "labels"]


def test_a_dataset_per_sample_gets_a_note_with_the_command_that_joins_them(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(120):
            file[f"traces/{number}/data"], file[f"traces/{number}/pick"] = np.full(50, number), np.arange(2)
    (note,) = [note for note in repack(tmp_path / "a.h5", tmp_path / "b.h5").notes if "convert" in note]
    words = shlex.split(note.partition(": ")[2].partition(" puts")[0])
    assert run(*words[1:3], tmp_path / "c.h5", *words[4:]).exit_code == 0
    with h5py.File(tmp_path / "c.h5") as file:
        assert file["data"].shape == (120, 50) and file["pick"].shape == (120, 2)
    assert not any("convert" in note for note in repack(tmp_path / "c.h5", tmp_path / "d.h5").notes)


@pytest.mark.parametrize("separate", [False, True])
def test_repack_suggests_convert_only_for_a_dataset_per_sample(tmp_path: Path, separate: bool) -> None:
    source = tmp_path / "mine.h5"
    with h5py.File(source, "w") as file:
        if separate:
            for number in range(100):
                file[f"traces/{number}"] = np.arange(20.0) + number
        else:
            file.create_dataset("x", data=np.ones((100, 8), np.float32), chunks=(10, 8), compression="gzip")
    report = str(h5chunk.repack(source, tmp_path / "new.h5"))
    assert ("--samples 'traces/*'" in report) == separate


@pytest.mark.parametrize(
    ("options", "is_noted"), [({}, True), ({"compression": "gzip"}, False), ({"compression": "none"}, False)]
)
def test_compression_that_is_left_out_is_noted(tmp_path, options, is_noted):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=np.zeros((64, 32, 32), "u1"), chunks=(8, 32, 32), compression="gzip")
    report = h5chunk.repack(path, tmp_path / "b.h5", **options)
    assert any("images will not be compressed any more" in note for note in report.notes) == is_noted


@pytest.mark.parametrize("shuffle", [False, True])
def test_bands_that_do_not_fit_in_memory_are_read_anew(tmp_path: Path, shuffle: bool) -> None:
    """No part of a band is one of the band before it."""
    values = np.random.default_rng(0).integers(0, 60, (1500, 32, 32, 3), np.uint8)
    with h5py.File(tmp_path / "old.h5", "w") as file:
        file.create_dataset("images", data=values, chunks=(500, 8, 8, 1), compression="gzip", compression_opts=1)
    h5chunk.repack(tmp_path / "old.h5", tmp_path / "new.h5", memory_bytes=8 << 20, shuffle=shuffle)
    with h5py.File(tmp_path / "new.h5") as file:
        order = file["h5chunk/source_index"][()] if shuffle else slice(None)
        np.testing.assert_array_equal(file["images"][()], values[order])
