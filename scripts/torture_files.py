"""Small good files of all kinds, ours and plain h5py's, to be damaged; and what must be read of them."""

from __future__ import annotations

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

SIDE = 12  # of an image


@dataclass(frozen=True)
class Good:
    """A good file.

    Attributes
    ----------
    name : str
    path : Path
    data : bytes
        Of the whole file.
    expected : tuple of arrays
        Of each field, all samples.
    has_checksums : bool
    is_data : (num_bytes,) bool
        Which bytes of the file are values of datasets; the others are metadata, or nothing.
    """

    name: str
    path: Path
    data: bytes
    expected: tuple[np.ndarray, ...]
    has_checksums: bool
    is_data: np.ndarray


def make_photos(folder: Path, count: int, side: int = SIDE, classes: int = 3, first: int = 0) -> Path:
    """A folder of PNGs, one folder a class."""
    for number in range(first, first + count):
        place = folder / f"class{number % classes}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number:05}.png", compress_level=1)
    return folder


def make_matrix(path: Path, rows: int = 90, columns: int = 60, pattern: bool = False) -> Path:
    """A sparse matrix as a .npz of scipy."""
    matrix = scipy.sparse.random(rows, columns, 0.15, random_state=0, format="csr")
    matrix.data = np.ones(matrix.nnz, "u1") if pattern else (np.arange(matrix.nnz) % 9 + 1).astype("u1")
    scipy.sparse.save_npz(path, matrix)
    return path


def _images(path: Path) -> None:
    photos = make_photos(path.parent / f"{path.stem}-photos", 24)
    h5chunk.convert(photos, path, chunk_samples=3, workers=0)


def _gzip_images(path: Path) -> None:
    _images(path.with_suffix(".plain"))
    repack(path.with_suffix(".plain"), path, chunk_samples=3, compression="gzip")


def _sparse(**options: Any) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        source = make_matrix(path.with_suffix(".npz"))
        h5chunk.convert(source, path, chunk_samples=8, **options)

    return make


def _plain(file: dict[str, Any], **options: Any) -> Callable[[Path], None]:
    """Images and labels as h5py writes them."""

    def make(path: Path) -> None:
        rng = np.random.default_rng(1)
        with h5py.File(path, "w", **file) as opened:
            shape = (24, 3, SIDE, SIDE)
            opened.create_dataset("images", data=rng.integers(0, 256, shape, np.uint8), **options)
            opened["labels"] = np.arange(24)
            opened.attrs["title"] = "photos"
            opened.create_group("meta")["note"] = "text of variable length"

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


def _many(path: Path) -> None:
    """Groups and attributes in heaps, which are kept so where there are more than eight of them."""
    _plain({"libver": "latest"}, chunks=CHUNKS)(path)
    with h5py.File(path, "r+", libver="latest") as file:
        group = file.create_group("many", track_order=True)
        for number in range(20):
            group[f"array {number}"] = np.arange(number)
            file["images"].attrs[f"attribute {number}"] = number


def _plugin(name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        import hdf5plugin

        _plain({}, chunks=CHUNKS, **getattr(hdf5plugin, name)())(path)

    return make


CHUNKS = (3, 3, SIDE, SIDE)
PLUGINS = {f"h5py, {name}": _plugin(name) for name in ("Zstd", "LZ4", "Blosc", "Bitshuffle", "Blosc2")}
OURS: dict[str, Callable[[Path], None]] = {
    "images": _images,
    "images, gzip": _gzip_images,
    "sparse": _sparse(),
    "dense rows, gzip": _sparse(dense=True),
}
OTHERS: dict[str, Callable[[Path], None]] = {
    "h5py, B-tree, gzip": _plain({}, chunks=CHUNKS, compression="gzip", shuffle=True),
    "h5py, B-tree, Fletcher-32": _plain({}, chunks=CHUNKS, fletcher32=True),
    "h5py, B-tree, parts of samples": _plain({}, chunks=(4, 1, 7, 5)),
    "h5py, contiguous": _plain({}),
    "h5py, latest, fixed array": _plain({"libver": "latest"}, chunks=CHUNKS, compression="gzip"),
    "h5py, latest, extensible array": _plain({"libver": "latest"}, chunks=CHUNKS, maxshape=(None, 3, SIDE, SIDE)),
    "h5py, latest, B-tree 2": _plain({"libver": "latest"}, chunks=CHUNKS, maxshape=(None, None, SIDE, SIDE)),
    "h5py, latest, many links": _many,
    "h5py, LZF": _plain({}, chunks=CHUNKS, compression="lzf"),
    "h5py, scale-offset": _plain({}, chunks=CHUNKS, scaleoffset=0),
    **PLUGINS,
    "h5py, AnnData": _anndata,
}


def make_good(folder: Path, names: Sequence[str] = ()) -> list[Good]:
    """All of them, or those of some names."""
    made = []
    for number, (name, make) in enumerate({**OURS, **OTHERS}.items()):
        if names and name not in names:
            continue
        path = folder / f"good{number}.h5"
        make(path)
        data = path.read_bytes()
        made.append(Good(name, path, data, expected_of(path), name in OURS, data_of(path)))
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
        if not isinstance(item, h5py.Dataset):
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
