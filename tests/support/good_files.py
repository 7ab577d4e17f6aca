"""Small undamaged HDF5 files of every kind, h5chunk's and h5py's, and what a reader must give of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import scipy.sparse
from PIL import Image

import h5chunk
from h5chunk.tools.repack.repack import repack

NUM_IMAGES, SIDE = 24, 12
SHAPE = (NUM_IMAGES, 3, SIDE, SIDE)
CHUNKS = (3, 3, SIDE, SIDE)


@dataclass(frozen=True)
class GoodFile:
    """An undamaged file.

    Attributes
    ----------
    name : str
    path : Path
    data : bytes
        Of the whole file.
    expected : tuple of arrays
        All samples of each field.
    has_checksums : bool
        Whether h5chunk wrote it, with a checksum of each chunk.
    is_data : (num_bytes,) bool
        Which bytes of the file are values of datasets; the others are metadata or unused.
    """

    name: str
    path: Path
    data: bytes
    expected: tuple[np.ndarray, ...]
    has_checksums: bool
    is_data: np.ndarray


def _images(path: Path) -> None:
    photos = path.with_suffix("")
    for number in range(NUM_IMAGES):
        place = photos / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number:02}.png", compress_level=1)
    h5chunk.convert(photos, path, chunk_samples=3, workers=0)


def _gzip_images(path: Path) -> None:
    _images(path.with_suffix(".plain"))
    repack(path.with_suffix(".plain"), path, chunk_samples=3, compression="gzip")


def _sparse(**options: Any) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        matrix = scipy.sparse.random(90, 60, 0.15, random_state=0, format="csr")
        matrix.data = (np.arange(matrix.nnz) % 9 + 1).astype("u1")
        scipy.sparse.save_npz(path.with_suffix(".npz"), matrix)
        h5chunk.convert(path.with_suffix(".npz"), path, chunk_samples=8, **options)

    return make


def _write(file: h5py.File, **options: Any) -> None:
    """Images and labels as h5py writes them."""
    file.create_dataset("images", data=np.random.default_rng(1).integers(0, 256, SHAPE, np.uint8), **options)
    file["labels"] = np.arange(NUM_IMAGES)
    file.attrs["title"] = "photos"
    file.create_group("meta")["note"] = "text of variable length"


def _plain(file: dict[str, Any], **options: Any) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with h5py.File(path, "w", **file) as opened:
            _write(opened, **options)

    return make


def _anndata(path: Path) -> None:
    matrix = scipy.sparse.random(60, 40, 0.2, random_state=0, format="csr", dtype=np.float32)
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["encoding-version"] = "csr_matrix", "0.1.0"
        group.attrs["shape"] = np.array(matrix.shape, np.int64)
        group["indptr"] = matrix.indptr
        group.create_dataset("indices", data=matrix.indices, chunks=(100,), compression="gzip")
        group.create_dataset("data", data=matrix.data, chunks=(100,), compression="gzip")


def _extensible(path: Path) -> None:
    """An extensible array with super blocks, and another one whose data blocks have pages."""
    with h5py.File(path, "w", libver="latest") as file:
        _write(file, chunks=(1, 1, 3, 3), maxshape=(None, *SHAPE[1:]), compression="gzip")
        file.create_dataset("paged", (200_000,), "u1", chunks=(1,), maxshape=(None,))[150_000] = 3


def _old_groups(path: Path) -> None:
    with h5py.File(path, "w", libver="earliest") as file:
        _write(file, chunks=CHUNKS)
        for number in range(120):
            file.create_group(f"many/group {number}").attrs["number"] = number


def _heaps(path: Path, num_links: int = 60, **options: Any) -> None:
    """Links and attributes in heaps, some deleted so that there is free space, some large; and a virtual dataset."""
    with h5py.File(path, "w", libver="latest", **options) as file:
        _write(file, chunks=CHUNKS)
        group = file.create_group("many", track_order=True)
        attributes = file.create_dataset("described", data=np.arange(3), track_order=True).attrs
        for number in range(num_links):
            group[f"array {number}"] = number
            attributes[f"attribute {number}"] = np.bytes_(b"x" * (1 + 3 * number))
            file["images"].attrs[f"attribute {number}"] = number
        attributes["huge"] = np.zeros(6000, "u1")
        for number in range(0, num_links, 3):
            del group[f"array {number}"], attributes[f"attribute {number}"]
        layout = h5py.VirtualLayout(SHAPE, "u1")
        layout[:] = h5py.VirtualSource(".", "images", SHAPE)
        file.create_virtual_dataset("view", layout)


def _continued(path: Path) -> None:
    """Object headers in several pieces, and a fixed array with pages."""
    with h5py.File(path, "w", libver="latest") as file:
        _write(file, chunks=(1, 1, 3, 3))
        for number in range(6):
            file["images"].attrs[f"attribute {number}"] = np.zeros(40)
            file["labels"].attrs[f"attribute {number}"] = number


def _free_space(path: Path) -> None:
    _heaps(path, 30, fs_strategy="fsm", fs_persist=True)
    with h5py.File(path, "r+", libver="latest") as file:
        file["many/gone"] = np.ones(500)
        file["last"] = 1
    with h5py.File(path, "r+", libver="latest") as file:
        del file["many/gone"]


def _shared_messages(path: Path) -> None:
    """Types, shapes and attributes that several objects share; h5py has no call for it, the library has."""
    mapped = Path("/proc/self/maps").read_text().split()
    library = ctypes.CDLL(next(name for name in mapped if "libhdf5" in name and "_hl" not in name))
    properties, access = h5py.h5p.create(h5py.h5p.FILE_CREATE), h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_LATEST, h5py.h5f.LIBVER_LATEST)
    shapes_and_types, attributes = 1 << 1 | 1 << 3, 1 << 12
    identifier = ctypes.c_int64(properties.id)
    assert library.H5Pset_shared_mesg_nindexes(identifier, 2) >= 0
    assert library.H5Pset_shared_mesg_index(identifier, 0, shapes_and_types, 8) >= 0
    assert library.H5Pset_shared_mesg_index(identifier, 1, attributes, 8) >= 0
    with h5py.File(h5py.h5f.create(bytes(path), h5py.h5f.ACC_TRUNC, properties, access)) as file:
        _write(file, chunks=CHUNKS)
        for number in range(60):
            file["images"].attrs[f"attribute {number}"] = np.arange(5) + number


def _plugin(name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        import hdf5plugin

        _plain({}, chunks=CHUNKS, **getattr(hdf5plugin, name)())(path)

    return make


LATEST = {"libver": "latest"}
PLUGINS = {f"h5py, {name}": _plugin(name) for name in ("Zstd", "LZ4", "Blosc", "Bitshuffle", "Blosc2")}
BY_H5CHUNK: dict[str, Callable[[Path], None]] = {
    "images": _images,
    "images, gzip": _gzip_images,
    "sparse": _sparse(),
    "dense rows, gzip": _sparse(dense=True),
}
BY_H5PY: dict[str, Callable[[Path], None]] = {
    "h5py, B-tree, gzip": _plain({}, chunks=CHUNKS, compression="gzip", shuffle=True),
    "h5py, B-tree, Fletcher-32": _plain({}, chunks=CHUNKS, fletcher32=True),
    "h5py, B-tree, parts of samples": _plain({}, chunks=(4, 1, 7, 5)),
    "h5py, contiguous": _plain({}),
    "h5py, old groups": _old_groups,
    "h5py, latest, fixed array": _plain(LATEST, chunks=CHUNKS, compression="gzip"),
    "h5py, latest, pages of a fixed array": _continued,
    "h5py, latest, extensible array": _plain(LATEST, chunks=CHUNKS, maxshape=(None, *SHAPE[1:])),
    "h5py, latest, super blocks": _extensible,
    "h5py, latest, B-tree 2": _plain(LATEST, chunks=CHUNKS, maxshape=(None, None, SIDE, SIDE)),
    "h5py, latest, deep B-tree 2": _plain(LATEST, chunks=(1, 1, 2, 2), maxshape=(None, None, SIDE, SIDE)),
    "h5py, latest, heaps": _heaps,
    "h5py, latest, free space": _free_space,
    "h5py, latest, shared messages": _shared_messages,
    "h5py, LZF": _plain({}, chunks=CHUNKS, compression="lzf"),
    "h5py, scale-offset": _plain({}, chunks=CHUNKS, scaleoffset=0),
    **PLUGINS,
    "h5py, AnnData": _anndata,
}


def make_good(folder: Path, names: Sequence[str] = ()) -> list[GoodFile]:
    """Make all of them, or those of some names."""
    made = []
    for number, (name, make) in enumerate({**BY_H5CHUNK, **BY_H5PY}.items()):
        if names and name not in names:
            continue
        path = folder / f"good{number}.h5"
        make(path)
        made.append(GoodFile(name, path, path.read_bytes(), expected_of(path), name in BY_H5CHUNK, data_of(path)))
    return made


def expected_of(path: Path) -> tuple[np.ndarray, ...]:
    """What a reader must give of all samples, by plain h5py and scipy."""
    with h5py.File(path) as file:
        if "X" in file:
            item = file["X"]
            if isinstance(item, h5py.Dataset):
                values = item[()]
            else:
                parts = tuple(item[part][()] for part in ("data", "indices", "indptr"))
                values = scipy.sparse.csr_matrix(parts, tuple(item.attrs["shape"])).toarray()
            return ((values / item.attrs.get("scale", 1)).astype(np.float32),)
        return file["images"][()], file["labels"][()]


def data_of(path: Path) -> np.ndarray:
    """Which bytes of a file are values of datasets."""
    found = np.zeros(path.stat().st_size, bool)

    def mark(_: str, item: h5py.Dataset | h5py.Group) -> None:
        if not isinstance(item, h5py.Dataset) or item.is_virtual:
            return
        if item.chunks is None:
            start = item.id.get_offset()
            if start is not None:
                found[start : start + item.nbytes] = True
            return
        item.id.chunk_iter(lambda chunk: found.__setitem__(slice(chunk[2], chunk[2] + chunk[3]), True))

    with h5py.File(path) as file:
        file.visititems(mark)
    return found
