"""Opening files: what is not HDF5, file systems without locks, and files that changed while they are open."""

from __future__ import annotations

import contextlib
import errno
import gc
import gzip
import io
import os
import struct
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support.loaders import loader_by
from support.open_fields import OpenField

import h5chunk
from h5chunk.store.read.engine import Kept
from h5chunk.store.read.field_readers import scratch_bytes


def save(path: Path, add: int, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=(np.arange(400)[:, None] * 3 + np.arange(16) + add), **options)
    return path


def overwrite(path: Path, add: int, **options: Any) -> None:
    new = save(path.with_name("new.h5"), add, **options).read_bytes()
    with path.open("r+b") as file:  # with the same inode
        file.write(new)
        file.truncate(len(new))


def values_of(path: Path, reader: str = "auto") -> np.ndarray:
    with loader_by(path, 64, shuffle=False, reader=reader) as loader:
        return np.concatenate([np.asarray(batch[0]).copy() for batch in loader])


STORAGES = [
    ({"dtype": "i4", "chunks": (7, 16)}, "h5py"),
    ({"dtype": "i4", "chunks": (7, 16), "scaleoffset": 0}, "auto"),
]


@pytest.mark.filterwarnings("ignore:.*read through h5py")
@pytest.mark.parametrize(("options", "reader"), STORAGES)
def test_old_and_new_values_are_not_mixed(tmp_path: Path, options: Any, reader: str) -> None:
    path = save(tmp_path / "a.h5", 0, **options)
    with loader_by(path, 64, shuffle=False, reader=reader) as old:
        next(iter(old))
        overwrite(path, 100, **options)
        assert (values_of(path, reader)[:, 0] == np.arange(400) * 3 + 100).all()
        with loader_by(path, 64, shuffle=False, reader=reader) as second:
            next(iter(second))
            overwrite(path, 1000, **options)
            with pytest.raises(h5chunk.FileError, match="overwritten while data sets of an older version"):
                values_of(path, reader)
    assert (values_of(path, reader)[:, 0] == np.arange(400) * 3 + 1000).all()


@pytest.mark.parametrize("dtype", ["i4", ">i4"])
def test_files_read_without_hdf5_may_be_overwritten(tmp_path: Path, dtype: str) -> None:
    path = save(tmp_path / "a.h5", 0, dtype=dtype, chunks=(7, 16))
    with h5chunk.ChunkLoader(path, 64, shuffle=False) as old:
        next(iter(old))
        for add in (100, 1000):
            overwrite(path, add, dtype=dtype, chunks=(7, 16))
            assert (values_of(path)[:, 0] == np.arange(400) * 3 + add).all()


@pytest.mark.filterwarnings("ignore:.*read through h5py")
def test_a_file_that_h5py_has_open_is_read_as_it_is_now(tmp_path: Path) -> None:
    path = save(tmp_path / "a.h5", 0, dtype="i4", chunks=(7, 16), scaleoffset=0)
    with h5py.File(path) as file:
        assert file["images"][399, 0] == 1197
        overwrite(path, 100, dtype="i4", chunks=(7, 16), scaleoffset=0)
        assert (values_of(path)[:, 0] == np.arange(400) * 3 + 100).all()


@pytest.mark.filterwarnings("ignore:.*read through h5py")
def test_threads_may_open_a_file_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real, found = save(tmp_path / "a.h5", 0, dtype="i4", chunks=(7, 16), scaleoffset=0), h5py.File, []

    def slow(*args: Any, **options: Any) -> h5py.File:
        file = real(*args, **options)
        time.sleep(0.05)  # another thread runs
        return file

    monkeypatch.setattr(h5py, "File", slow)
    threads = [threading.Thread(target=lambda: found.append(values_of(path)[-1, 0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1197] * 4


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_files_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    save(tmp_path / "a.h5", 0)
    real = h5py.File

    def file(*args: Any, locking: Any = None, **options: Any) -> Any:
        if locking is not False:
            raise OSError(f"Unable to synchronously open file (unable to lock file, errno = {number}, error message)")
        return real(*args, locking=locking, **options)

    monkeypatch.setattr("h5chunk.store.hdf5.open.h5py.File", file)
    assert len(values_of(tmp_path / "a.h5")) == 400


def _gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(b"\x89HDF\r\n\x1a\n" + bytes(100)))


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("a.h5"), io.BytesIO())


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.h5", b"x" * 100)


def _npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, x=np.arange(3))


LOOKALIKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "LFS": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid"),
        "git lfs pull",
    ),
    "HTML": (lambda path: path.write_text("\n<!DOCTYPE html><html>404</html>"), "web page.*download it again"),
    "XML": (lambda path: path.write_text('<?xml version="1.0"?><Error>'), "XML.*download it again"),
    "gzip": (_gzip, "compressed with gzip: unpack it first"),
    "zstd": (lambda path: path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20)), "compressed with Zstandard: unpack"),
    "zip": (_zip, "zip archive: unpack it"),
    "npz": (_npz, r"\.npz archive: convert it"),
    "tar": (_tar, "tar archive: unpack it"),
    "MATLAB": (lambda path: path.write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200)), r"MATLAB.*scipy\.io\.loadmat"),
    "netCDF": (lambda path: path.write_bytes(b"CDF\x01" + bytes(200)), "netCDF-3.*nccopy -k nc4"),
    "HDF4": (lambda path: path.write_bytes(b"\x0e\x03\x13\x01" + bytes(200)), "HDF4.*h4toh5"),
    "npy": (lambda path: path.write_bytes(b"\x93NUMPY\x01\0" + bytes(200)), "NumPy array: convert it"),
    "Parquet": (lambda path: path.write_bytes(b"PAR1" + bytes(200)), "Parquet table: convert it"),
    "empty": (lambda path: path.write_bytes(b""), "it is empty"),
    "zeros": (lambda path: path.write_bytes(bytes(5000)), "begins with zeros"),
    "cut": (lambda path: path.write_bytes(save(path, 0).read_bytes()[:3000]), "cut short"),
}
CONVERTED = ("npz", "zip", "tar", "npy", "Parquet")  # by their content, whatever their name is
TOOLS: dict[str, Callable[[Path], Any]] = {
    "info": h5chunk.info,
    "verify": h5chunk.verify,
    "ChunkDataset": h5chunk.ChunkDataset,
    "Keyed": lambda path: h5chunk.Keyed(path, "*/x"),
    "Windows": lambda path: h5chunk.Windows(path, {"x": "*/x"}, 4),
    "Patches": lambda path: h5chunk.Patches(path, {"x": "x"}, (4,)),
    "repack": lambda path: h5chunk.repack(path, path.with_name("out.h5")),
    "convert": lambda path: h5chunk.convert(path, path.with_name("out.h5")),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_file_that_is_not_hdf5_says_what_it_is(tmp_path: Path, name: str) -> None:
    make, message = LOOKALIKES[name]
    make(tmp_path / "a.h5")
    for tool in TOOLS:
        if tool != "convert" or name not in CONVERTED:
            with pytest.raises(h5chunk.H5ChunkError, match=rf"a\.h5: .*{message}"):
                TOOLS[tool](tmp_path / "a.h5")


def test_a_zarr_folder_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / ".zgroup").write_text("{}")
    for tool in TOOLS.values():
        with pytest.raises(h5chunk.H5ChunkError, match=r"Zarr folder.*zarr\.open"):
            tool(tmp_path / "a.zarr")


def test_rows_of_more_than_4_gib_are_only_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "v.h5", "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # a sparse file, which needs no space
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        shape = h5py.h5s.create_simple((2, 5 << 30))
        h5py.h5d.create(file.id, b"raw", h5py.h5t.NATIVE_UINT8, shape, properties)
    patches = h5chunk.Patches(tmp_path / "v.h5", {"raw": "raw"}, (64,), channels="first", per_volume=4)
    assert np.asarray(patches[0][0]).shape == (2, 64)
    assert len(h5chunk.ChunkDataset(tmp_path / "v.h5", fields="raw")) == 2


def test_offsets_that_compress_well_are_not_damaged(tmp_path: Path) -> None:
    hdf5plugin = pytest.importorskip("hdf5plugin")
    offsets = np.arange(0, 1_600_001, dtype=np.int64)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["values"] = np.arange(1_600_000, dtype="f4")
        file.create_dataset("offsets", data=offsets, chunks=(len(offsets),), shuffle=True, **hdf5plugin.Zstd(19))
        assert file["offsets"].id.get_storage_size() * 1032 + (1 << 20) < offsets.nbytes
    dataset = h5chunk.ChunkDataset(tmp_path / "a.h5", fields="values", offsets={"values": "offsets"})
    assert len(dataset) == 1_600_000


def test_kept_chunks_of_volumes_have_one_limit_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h5chunk.store.read.samples.CACHE_BYTES", 8 << 10)
    with h5py.File(tmp_path / "v.h5", "w") as file:
        for name, chunk in ("a", 16), ("b", 64):
            data = np.random.default_rng(0).integers(0, 255, (128, 128), dtype="u1")
            file.create_dataset(f"{name}/raw", data=data, chunks=(chunk, chunk), compression="gzip")
    reader = h5chunk.Patches(tmp_path / "v.h5", {"raw": "*/raw"}, (8, 8), per_volume=64)._reader
    field = OpenField(reader, "raw")
    others = [block for block in gc.get_objects() if isinstance(block, Kept)]  # of other tests
    for row in range(reader.num_samples):
        field.read([row])
    kept = [block for block in gc.get_objects() if isinstance(block, Kept) and not any(block is o for o in others)]
    assert 0 < sum(len(block.memory[0]) for block in kept) <= 8 << 10
    assert scratch_bytes([field.reader], 1) == 3 * 64 * 64 + (8 << 10)


def test_paths_with_a_tilde_and_after_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    h5chunk.convert({"images": np.zeros((40, 4), "f4"), "labels": np.arange(40)}, "~/a.h5")
    assert (tmp_path / "a.h5").is_file()
    assert len(h5chunk.ChunkDataset(["~/a.h5"])) == 40
    for tool in TOOLS.values():
        with contextlib.suppress(h5chunk.FieldError, h5chunk.SourceError):  # the kinds of samples differ
            tool(Path("~/a.h5"))
    relative = h5chunk.ChunkDataset("a.h5")
    (tmp_path / "other").mkdir()
    assert len(h5chunk.ChunkDataset((tmp_path / "a.h5").as_uri())) == 40
    with pytest.raises(h5chunk.FileError, match="URLs with ftp:// are not read"):
        h5chunk.ChunkDataset("ftp://host/a.h5")
    monkeypatch.chdir(tmp_path / "other")
    assert relative[39][1] == 39
    with h5chunk.ChunkLoader(relative, 8) as loader:
        assert sum(len(batch[0]) for batch in loader) == 40


@pytest.mark.parametrize("name", TOOLS)
def test_an_open_file_is_refused_by_what_it_is(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "a.h5", 0)
    tool: Any = {
        "repack": lambda source: h5chunk.repack(source, tmp_path / "out.h5"),
        "convert": lambda source: h5chunk.convert(source, tmp_path / "out.h5"),
    }.get(name, TOOLS[name])
    with h5py.File(path) as file, path.open("rb") as stream:
        objects = {
            r"h5py\.File.*file\.filename": file,
            r"BufferedReader.*file\.name": stream,
            "BytesIO.*write its content to a file": io.BytesIO(path.read_bytes()),
            "bytes.*write the content to a file": path.read_bytes(),
        }
        for message, opened in objects.items():
            with pytest.raises(h5chunk.OptionError, match=message) as refused:
                tool(opened)
            assert len(str(refused.value)) < 300


@pytest.mark.skipif(h5py.version.hdf5_version_tuple[:2] != (2, 0), reason="other versions of HDF5 read such files")
def test_what_only_this_version_of_hdf5_refuses_is_not_called_damaged(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver="earliest") as file:
        file.create_dataset("images", data=np.arange(40.0).reshape(10, 4), chunks=(5, 4), compression="gzip")
    sizes = [struct.pack("<III", 5, 4, item_bytes) for item_bytes in (8, 4)]  # as PureHDF writes them
    (tmp_path / "a.h5").write_bytes((tmp_path / "a.h5").read_bytes().replace(*sizes))
    for tool in h5chunk.info, h5chunk.ChunkDataset, TOOLS["repack"]:
        with pytest.raises(h5chunk.FileError, match=r'PureHDF.*pip install "h5py<3\.16"') as refused:
            tool(tmp_path / "a.h5")
        assert "damaged" not in str(refused.value)


def test_an_error_in_the_second_half_of_a_sample_names_it(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(6):
            file[f"t/{number}/x"] = np.arange(1000.0)
        end = file["t/3/x"].id.get_offset() + 6000
    path = tmp_path / "a.h5"
    keyed = OpenField(h5chunk.Keyed(path, "t/*/x")._reader, "x")
    os.truncate(path, end)
    with pytest.raises(h5chunk.FileError, match="'t/3/x'"):
        keyed.read(range(6))
