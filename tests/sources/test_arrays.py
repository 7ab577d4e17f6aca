"""Arrays in .npy and .npz files and in memory: every value in the file, and what is refused."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import run
from support.open_source import open_source
from support.samples import check_same, read_back

import h5chunk
from h5chunk.errors import OptionError, OutputError, SourceError
from h5chunk.sample_source import OpenContext
from h5chunk.sources.open import find_kind

RNG = np.random.default_rng(0)
DTYPES = ("u1", "i1", "<u2", ">i2", "<i4", ">i8", "<u8", "<f2", ">f4", "<f8", "?")


def values(dtype: str, *shape: int) -> np.ndarray:
    return RNG.integers(0, 100, shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 3), (7, 2, 3, 4)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_value_is_that_of_the_array(tmp_path: Path, dtype: str, shape: tuple[int, ...], order: Any) -> None:
    array = np.asarray(values(dtype, *shape), order=order)
    np.save(tmp_path / "x.npy", array)
    for source in (tmp_path / "x.npy", array):
        report = h5chunk.convert(source, tmp_path / "x.h5", workers=0, overwrite=True)
        assert (report.source_kind, report.num_samples, report.sample_shape) == ("arrays", 7, shape[1:])
        check_same(tmp_path / "x.h5", {"data": array})


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed, None])
def test_several_arrays(tmp_path: Path, save: Any) -> None:
    arrays = {
        "images": values("u1", 30, 3, 4, 5),
        "labels": np.arange(30),
        "depth": np.asfortranarray(values("f4", 30, 4, 5)),
        "mask": np.arange(30) % 2 == 0,
        "word": np.array([f"caf\xe9{i}" for i in range(30)]),
    }
    source: Any = arrays
    if save is not None:
        source = tmp_path / "x.npz"
        save(source, **arrays)
    h5chunk.convert(source, tmp_path / "x.h5", workers=2, shards=3, chunk_samples=4)
    check_same(tmp_path / "x.h5", {**arrays, "word": np.char.encode(arrays["word"], "utf-8")})
    assert h5chunk.verify(tmp_path / "x.h5").ok


def test_columns_alone(tmp_path: Path) -> None:
    arrays = {"a": values("f8", 9), "b": values("u1", 9)}
    h5chunk.convert(arrays, tmp_path / "x.h5")
    check_same(tmp_path / "x.h5", arrays)


@pytest.mark.parametrize("compress", [False, True])
def test_memory_that_does_not_suffice(tmp_path: Path, compress: bool) -> None:
    (np.savez_compressed if compress else np.savez)(tmp_path / "x.npz", data=values("u1", 100, 1000))
    np.save(tmp_path / "f.npy", np.asfortranarray(values("u1", 100, 1000)))
    context = OpenContext(memory_bytes=50_000)
    for name, refused in (("x.npz", compress), ("f.npy", True)):
        if refused:
            with pytest.raises(
                SourceError, match=r"needs 100,000 bytes .* of memory, .* limit of 50,000 bytes .*: save it"
            ):
                open_source(tmp_path / name, context=context)
        else:
            assert len(open_source(tmp_path / name, context=context)) == 100


def test_the_same_call_does_nothing_until_the_file_changes(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", values("f4", 20, 5))
    h5chunk.convert(tmp_path / "x.npy", tmp_path / "x.h5")
    assert h5chunk.convert(tmp_path / "x.npy", tmp_path / "x.h5").already_complete
    np.save(tmp_path / "x.npy", values("f4", 21, 5))
    with pytest.raises(OutputError, match="exists: use --overwrite"):
        h5chunk.convert(tmp_path / "x.npy", tmp_path / "x.h5")


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_a_conversion_that_is_interrupted_continues(tmp_path: Path, name: str) -> None:
    array = values("u1", 600, 5)
    np.save(tmp_path / name, array) if name == "x.npy" else np.savez(tmp_path / name, data=array)
    h5chunk.convert(tmp_path / name, tmp_path / "whole.h5", chunk_samples=4, workers=0)

    def interrupt(stage: str, done: int, total: int | None) -> None:
        if stage == "convert" and done >= 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        h5chunk.convert(tmp_path / name, tmp_path / "x.h5", chunk_samples=4, workers=0, progress=interrupt)
    lines: list[str] = []
    h5chunk.convert(tmp_path / name, tmp_path / "x.h5", chunk_samples=4, workers=0, notify=lines.append)
    assert any(line.startswith("continuing: 320 of 600 samples") for line in lines)
    assert (tmp_path / "x.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_the_command_line(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", values("f4", 20, 5))
    plan = run("convert", tmp_path / "x.npy", tmp_path / "x.h5", "--dry-run", "--json")
    assert json.loads(plan.stdout)["fields"] == {"data": "float32"}
    result = run("convert", tmp_path / "x.npy", tmp_path / "x.h5")
    assert result.exit_code == 0 and "20 samples of 5" in result.stdout
    result = run("convert", tmp_path / "x.npy", tmp_path / "y.h5", "--size", "3,4")
    assert result.exit_code == 1 and "--size applies only to " in result.stderr and "contains arrays" in result.stderr


def test_arrays_in_memory_are_never_complete(tmp_path: Path) -> None:
    report = h5chunk.convert(np.ones((3, 2)), tmp_path / "x.h5")
    assert any("starts over" in note for note in report.notes)
    with pytest.raises(OutputError, match="exists: use --overwrite"):
        h5chunk.convert(np.ones((3, 2)), tmp_path / "x.h5")


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"a": np.float32(1)}, "'a' is a single number: pass arrays whose first axis is the sample axis"),
        ({"a": np.ones((0, 3))}, r"'a' of shape \(0, 3\) is empty: it needs at least one sample"),
        ({"a": np.ones((5, 0))}, r"'a' of shape \(5, 0\) is empty: it needs at least one element per sample"),
        ({"a": np.ones((3, 0))}, r"'a' of shape \(3, 0\) is empty"),
        (
            {"a": np.ones(3), "b": np.ones(4)},
            r"'a' has 3 samples but 'b' has 4: select arrays of equal length \(--columns b\)",
        ),
        ({"a": np.float32(1), "b": np.ones(4), "c": np.ones(4)}, r"'a' is a single .* \(--columns b,c\)"),
        (
            {"a": np.ones(3, complex)},
            "a has the dtype complex128, which fields do not support: split real and imaginary",
        ),
        ({"a": np.array(["2020-01-01"], "M8[D]")}, r"dtype datetime64\[D\], .*: convert it to int64"),
        ({"a": np.zeros(2, [("date", "M8[D]"), ("price", "f8")])}, "pass each of its columns as a separate array"),
        ({"a": np.array([{}, 1], object)}, "Python objects, which are never unpickled"),
    ],
)
def test_what_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray], reason: str) -> None:
    with pytest.raises(SourceError, match=reason):
        h5chunk.convert(arrays, tmp_path / "x.h5")
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(SourceError, match=reason.replace("a has", "x.npz: member a.npy has")):
        h5chunk.convert(tmp_path / "x.npz", tmp_path / "x.h5")
    assert not (tmp_path / "x.h5").exists()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (npy(np.ones(99))[:-1], "require 792 bytes, but 791 are stored: it is damaged or truncated"),
        (npy(np.ones(99)) + b"x", "require 792 bytes, but 793 are stored"),
        (npy(np.ones(99)).replace(b"(99,), ", b"(9999,)"), "require 79992 bytes, but 792 are stored"),
        (npy(np.ones(99))[:20], r"is not a \.npy array"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_damaged_files(tmp_path: Path, data: bytes, reason: str, zipped: bool) -> None:
    path = tmp_path / ("x.npz" if zipped else "x.npy")
    path.write_bytes(data)
    if zipped:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.npy", data)
    with pytest.raises(SourceError, match=reason):
        h5chunk.convert(path, tmp_path / "x.h5")


def test_a_file_that_is_cut_short_meanwhile(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", values("f4", 2000, 50))
    source = open_source(tmp_path / "x.npy")
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:1000])
    with pytest.raises(SourceError, match=r"changed meanwhile|extends past the end"):
        source.read_into(1999, {"data": np.empty(50, "f4")})


def test_a_dense_npy_is_a_matrix_only_if_told(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.eye(3))
    assert find_kind(tmp_path / "x.npy").kind == "arrays"
    with pytest.raises(OptionError, match=r"--dense applies only to sparse matrices; .*x\.npy contains arrays"):
        h5chunk.convert(tmp_path / "x.npy", tmp_path / "x.h5", dense=True)
    h5chunk.convert(tmp_path / "x.npy", tmp_path / "x.h5", format="npy", dense=True)
    assert read_back(tmp_path / "x.h5", ["X"])["X"].shape == (3, 3)


def test_the_report_lists_fields_as_batches_do(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", np.arange(6), np.arange(12).reshape(6, 2))
    plan = h5chunk.convert(tmp_path / "a.npz", tmp_path / "a.h5", dry_run=True)
    report = h5chunk.convert(tmp_path / "a.npz", tmp_path / "a.h5")
    assert list(report.fields) == list(plan.fields) == list(h5chunk.ChunkDataset(tmp_path / "a.h5").fields)


def test_some_arrays_of_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=np.ones((4, 2)), labels=np.arange(4), names=np.array(["x", "y"]))
    with pytest.raises(SourceError, match=r"'images' has 4 samples but 'names' has 2: .*--columns images,labels\)"):
        h5chunk.convert(tmp_path / "a.npz", tmp_path / "x.h5")
    report = h5chunk.convert(tmp_path / "a.npz", tmp_path / "x.h5", columns=("images", "labels"))
    assert [*report.fields] == ["images", "labels"] and report.num_samples == 4
    with pytest.raises(OptionError, match="there is no array 'masks': choose from images, labels, names"):
        h5chunk.convert(tmp_path / "a.npz", tmp_path / "y.h5", columns=("masks",))
