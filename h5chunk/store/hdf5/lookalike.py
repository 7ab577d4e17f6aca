"""Say what a file is that was passed as an HDF5 file but is not, and what to do with it."""

from __future__ import annotations

import os
import shlex
import zipfile
from pathlib import Path

from h5chunk.errors import printable

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
HEAD_BYTES = 1 << 10
UNPACK = "unpack it first ({} NAME > NEW.h5)"
CONVERT = "convert it first (h5chunk convert NAME NEW.h5)"
FROM_PYTHON = "read its arrays in Python, and convert them with h5chunk.convert({'x': array}, 'new.h5')"
AGAIN = "download it again, and look at what was downloaded with a text viewer"

# what a file is, and what to do, by its first bytes
NETCDF = "convert it to netCDF-4, which is HDF5 (nccopy -k nc4 NAME NEW.nc)"
IMAGE = "convert the folder of the images (h5chunk convert FOLDER NEW.h5)"
MAT = "read it with scipy.io.loadmat, and convert its arrays with h5chunk.convert({'x': array}, 'new.h5')"
KINDS: tuple[tuple[bytes | tuple[bytes, ...], str, str], ...] = (
    (b"version https://git-lfs", "it is a pointer of Git LFS instead of the data", "run git lfs pull"),
    (b"/annex/objects/", "it is a pointer of git-annex instead of the data", "run git annex get NAME"),
    (b"\x1f\x8b", "it is compressed with gzip", UNPACK.format("gzip -dc <")),
    (b"\x28\xb5\x2f\xfd", "it is compressed with Zstandard", UNPACK.format("zstd -dc <")),
    (b"\xfd7zXZ\0", "it is compressed with xz", UNPACK.format("xz -dc <")),
    (b"BZh", "it is compressed with bzip2", UNPACK.format("bzip2 -dc <")),
    (b"\x04\x22\x4d\x18", "it is compressed with LZ4", UNPACK.format("lz4 -dc <")),
    (b"MATLAB 5.0 MAT-file", "it is a MATLAB file of version 5 to 7, and only 7.3 is HDF5", MAT),
    ((b"CDF\x01", b"CDF\x02", b"CDF\x05"), "it is a netCDF-3 file", NETCDF),
    (b"\x0e\x03\x13\x01", "it is an HDF4 file", "convert it with h4toh5 NAME NEW.h5"),
    (b"\x93NUMPY", "it is a NumPy array", CONVERT),
    (b"PAR1", "it is a Parquet table", CONVERT),
    (b"ARROW1", "it is an Arrow table", "write it as Parquet, and convert that"),
    (b"SQLite format 3", "it is an SQLite database", "export its tables as CSV or Parquet, and convert those"),
    (b"SIMPLE  =", "it is a FITS file", FROM_PYTHON),
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "it is a pickle of Python", FROM_PYTHON),
    (b"\xff\xd8\xff", "it is a JPEG image", IMAGE),
    (b"\x89PNG", "it is a PNG image", IMAGE),
    (b"%PDF", "it is a PDF document", "name the file with the data"),
)
TEXTS = (
    (b"<!doctype html", "it is a web page, such as an error or login page"),
    (b"<html", "it is a web page, such as an error or login page"),
    (b"<?xml", "it is XML, such as an error message of an object store"),
    (b"<error", "it is XML, such as an error message of an object store"),
    (b"{", "it is JSON, such as an error message of a server"),
)
ZARR_FILES = (".zarray", ".zgroup", ".zattrs", "zarr.json")
ZARR = (
    "it is a Zarr folder: read its arrays with zarr.open, and convert them with h5chunk.convert({'x': array}, 'new.h5')"
)


def describe_lookalike(path: str | os.PathLike[str]) -> str:
    """Say what a file or folder is that is not an HDF5 file, and what to do. Returns "" if that is unknown.

    The result follows "not an HDF5 file: ".
    """
    path = Path(path)
    try:
        if path.is_dir():
            return ZARR if any((path / name).exists() for name in ZARR_FILES) else ""
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            head, size = file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size
            is_zip = head.startswith(b"PK\x03\x04") and zipfile.is_zipfile(file)
        names = zipfile.ZipFile(path).namelist() if is_zip and size < 1 << 32 else []
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return ""
    if not head:
        return "it is empty: copy or download it again"
    if not head.strip(b"\0"):
        return "it begins with zeros, so it was not written completely: copy, download or convert it again"
    name = printable(shlex.quote(os.fspath(path)))
    for magic, what, remedy in KINDS:
        if head.startswith(magic):
            return f"{what}: {remedy.replace('NAME', name)}"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for start, what in TEXTS:
        if text.startswith(start):
            return f"{what}: {AGAIN}"
    if head[257:262] == b"ustar":
        return f"it is a tar archive: unpack it first (tar -xf {name})"
    if head.startswith(b"PK\x03\x04") and not is_zip:
        return "it begins like a zip archive, but is incomplete: copy or download it again"
    if head.startswith(b"PK\x03\x04"):
        return _of_zip(names).replace("NAME", name)
    return ""


def _of_zip(names: list[str]) -> str:
    if any(name.endswith(".npy") for name in names):
        return f"it is a NumPy .npz archive: {CONVERT}"
    if any(name.endswith("/data.pkl") for name in names):
        return f"it is a checkpoint of torch: {FROM_PYTHON}"
    return "it is a zip archive: unpack it first (unzip NAME)"
