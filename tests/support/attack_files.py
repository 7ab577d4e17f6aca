"""Files that somebody made to do harm, what h5chunk says of each, and what plain h5py 3.16 (HDF5 2.0) does with it.

Each attack changes a good file of 40 images, of 50 bytes each, in place; it may leave others beside it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
from support.foreign import make_images

from h5chunk.store.read.field_readers import read_rows
from h5chunk.store.read.reader import H5Reader

N = 40
SECRET = b"the password is swordfish".ljust(N)


class Attack(NamedTuple):
    """How a file is made bad, what we say, and what h5py does with it."""

    make: Callable[[Path], None]
    message: str
    h5py_does: str


def edit(change: Callable[[h5py.File, Path], object]) -> Callable[[Path], None]:
    """Changes the good file through h5py."""

    def make(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            change(file, path)

    return make


def instead(make: Callable[[h5py.File, Path], object], name: str = "images") -> Callable[[Path], None]:
    """Something else in the place of a dataset."""

    def change(file: h5py.File, path: Path) -> None:
        del file[name]
        make(file, path)

    return edit(change)


def patch(find: bytes, by: bytes, count: int = 1) -> Callable[[Path], None]:
    """Other bytes in the place of some that the file has ``count`` times."""

    def make(path: Path) -> None:
        data = path.read_bytes()
        assert data.count(find) == count and len(find) == len(by)
        path.write_bytes(data.replace(find, by))

    return make


def other_file(path: Path) -> Path:
    return make_images(path.with_name("other.h5"), N, 4)


def view(file: h5py.File, path: Path, source: str | None = None, **size: int) -> None:
    layout = h5py.VirtualLayout((N, 50), "u1")
    layout[:] = h5py.VirtualSource(source or other_file(path), "images", (N, 50))
    file.create_virtual_dataset("images", layout)


def endless_view(file: h5py.File, path: Path) -> None:
    """Its shape is asked of the other file."""
    layout = h5py.VirtualLayout((N, 50), "u1", maxshape=(None, 50))
    source = h5py.VirtualSource("pipe", "images", (N, 50), maxshape=(None, 50))
    layout[: h5py.h5s.UNLIMITED] = source[: h5py.h5s.UNLIMITED]
    file.create_virtual_dataset("images", layout)
    os.mkfifo(path.with_name("pipe"))


def secret(file: h5py.File, path: Path) -> None:
    path.with_name("secret").write_bytes(SECRET)
    file.create_dataset("images", (N,), "u1", external=[(str(path.with_name("secret")), 0, N)])


def chunked(file: h5py.File, shape: tuple[int, ...], chunks: tuple[int, ...], *codes: int) -> h5py.Dataset:
    """A dataset with these filters, none of whose chunks is there."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk(chunks)
    for code in codes:
        properties.set_filter(code, h5py.h5z.FLAG_OPTIONAL, (1,) if code == 1 else ())
    space, kind = h5py.h5s.create_simple(shape), h5py.h5t.NATIVE_UINT8
    return h5py.Dataset(h5py.h5d.create(file.id, b"images", kind, space, properties))


def bomb(file: h5py.File, _: Path) -> None:
    import zlib

    once = zlib.compress(bytes(50 << 20), 9)
    dataset = chunked(file, (N, 50 << 20), (1, 50 << 20), 1, 1)
    dataset.id.write_direct_chunk((0, 0), zlib.compress(once, 9))


def inflating(file: h5py.File, _: Path) -> None:
    """A chunk that inflates to more than it should hold."""
    import zlib

    dataset = chunked(file, (N, 50), (4, 50), 1)
    for first in range(0, N, 4):
        dataset.id.write_direct_chunk((first, 0), zlib.compress(bytes(1 << 20)))


def short_chunks(file: h5py.File, _: Path) -> None:
    import zlib

    dataset = chunked(file, (N, 50), (4, 50), 1)
    for first in range(0, N, 4):
        dataset.id.write_direct_chunk((first, 0), zlib.compress(bytes(16)))


def direct_chunk(size: int, rows: int = 4) -> Callable[[h5py.File, Path], None]:
    """Without a filter, a chunk that is stored in another size."""

    def make(file: h5py.File, _: Path) -> None:
        dataset = chunked(file, (N, 50), (rows, 50), 1)
        for first in range(0, N, rows):
            dataset.id.write_direct_chunk((first, 0), bytes(size))

    return make


def overlapping(path: Path) -> None:
    """The first chunk's address in the place of the second's."""
    with h5py.File(path) as file:
        first, second = (file["images"].id.get_chunk_info(i).byte_offset for i in range(2))
    patch(struct.pack("<Q", second), struct.pack("<Q", first))(path)


def beyond(path: Path) -> None:
    with h5py.File(path) as file:
        last = file["images"].id.get_chunk_info(9).byte_offset
    patch(struct.pack("<Q", last), struct.pack("<Q", path.stat().st_size - 20))(path)


def header_link(path: Path) -> None:
    other_file(path)
    with h5py.File(path, "r+") as file:
        file["h5chunk"] = h5py.ExternalLink("other.h5", "/")


def header(**attributes: object) -> Callable[[Path], None]:
    """A group like ours."""

    def change(file: h5py.File, _: Path) -> None:
        file.create_group("h5chunk").attrs.update({"format_version": 1, **attributes})

    return edit(change)


def header_table(name: str, value: object) -> Callable[[Path], None]:
    def change(file: h5py.File, _: Path) -> None:
        group = file.create_group("h5chunk")
        group.attrs["format_version"] = 1
        group[name] = value

    return edit(change)


def huge_table(file: h5py.File) -> None:
    file.create_dataset("h5chunk/source_index", (10**12,), "i8")


def large_attribute(path: Path) -> None:
    with h5py.File(path, "r+", libver="latest") as file:
        group = file.create_group("h5chunk")
        group.attrs["format_version"] = 1
        group.attrs["options"] = np.zeros(2 << 20, "u1")


def matrix(part: str, make: Callable[[h5py.Group], object]) -> Callable[[Path], None]:
    """A sparse matrix with something else in the place of a part."""

    def change(file: h5py.File, path: Path) -> None:
        group = file.create_group("images")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", (3, 4)
        group["indptr"], group["indices"], group["data"] = np.arange(4), np.arange(3), np.ones(3, "u1")
        del group[part]
        make(group)

    return instead(change)


def empty_chunk(path: Path) -> None:
    """The first chunk, which ends with a checksum, is stored in no bytes."""
    make_images(path, N, 4, fletcher32=True)
    data, size = path.read_bytes(), struct.pack("<II", 204, 0)
    path.write_bytes(data.replace(size, bytes(8), 1))


def scaled(path: Path) -> None:
    """Set up for other chunks than it has."""
    make_images(path, N, 4, scaleoffset=0)
    patch(struct.pack("<3I", 2, 0, 200), struct.pack("<3I", 2, 0, 1 << 26))(path)


def endless_heap(path: Path) -> None:
    """A string of variable length, in a heap whose first object is free space of no bytes."""
    matrix("data", lambda group: group.update(data=np.ones(3, "u1")))(path)
    data = bytearray(path.read_bytes())
    at = data.index(b"GCOL") + 16
    data[at : at + 16] = bytes(16)
    path.write_bytes(data)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


ATTACKS: dict[str, Attack] = {
    "soft link": Attack(
        instead(lambda f, _: f.update(images=h5py.SoftLink("/labels"))), "a soft link to '/labels'", "follows it"
    ),
    "soft link in a circle": Attack(
        instead(lambda f, _: f.update(images=h5py.SoftLink("/images"))), "a soft link to '/images'", "KeyError"
    ),
    "external link": Attack(
        instead(lambda f, p: f.update(images=h5py.ExternalLink(str(other_file(p)), "images"))),
        "an external link to 'images' of .*other.h5', which is not followed",
        "opens any file of the system that is HDF5; waits for ever for a pipe",
    ),
    "virtual dataset": Attack(instead(view), "a view of other files, such as '.*other.h5'", "reads the other file"),
    "endless virtual dataset": Attack(
        instead(endless_view), "a view of other files, such as 'pipe'", "waits for ever, as soon as the shape is asked"
    ),
    "external storage": Attack(
        instead(secret), "has its values in another file, '.*secret'", "gives the bytes of any file as pixels"
    ),
    "unknown filter": Attack(
        instead(lambda f, _: chunked(f, (N, 50), (4, 50), 299)),
        r"compressed with filter 299 \(''\), which would load a plugin",
        "loads every library in the plugin path, and asks it",
    ),
    "filter twice": Attack(instead(bomb), "filter gzip more than once, like a decompression bomb", "unpacks 50 MB"),
    "huge chunk": Attack(
        instead(lambda f, _: chunked(f, (N, 1 << 30), (1, 1 << 30), 1)),
        "has chunks of 1.0 GiB, but none was ever written: write it first",
        "takes 1 GiB for each chunk",
    ),
    "huge shape, nothing written": Attack(
        instead(lambda f, _: f.create_dataset("images", (10**12, 50), "u1")),
        "claims .*, but nothing was ever written",
        "takes 50 TB on [:]",
    ),
    "huge shape, chunked": Attack(
        instead(lambda f, _: f.create_dataset("images", (N, 10**9), "u1", chunks=(N, 1 << 20))),
        "claims .*, but only 0 bytes were ever written",
        "takes 40 GB on [:]",
    ),
    "endless chunks": Attack(
        instead(lambda f, _: f.create_dataset("images", (10**15, 1), "u1", chunks=(1, 1))),
        "has 1000000000000000 chunks, but only 0 were ever written",
        "takes 1 PB on [:]",
    ),
    "inflating chunks": Attack(
        instead(inflating), "more than the 200 that are expected|into 200 bytes", "returns what was asked for"
    ),
    "short chunks": Attack(instead(short_chunks), "gives 16 bytes, .*200", "returns bytes of its own memory as pixels"),
    "long chunks": Attack(
        instead(direct_chunk(1 << 20, 20)),
        "1048576 (stored bytes, which is impossible for 1000|bytes for 1000 of data)",
        "reads them; error from zlib",
    ),
    "no gzip": Attack(instead(direct_chunk(40)), "gzip: .*(BAD_DATA|incorrect header)", "OSError: inflate() failed"),
    "overlapping chunks": Attack(overlapping, "its chunks 0 and 1 overlap in the file", "shows one twice"),
    "chunk beyond the file": Attack(beyond, "a chunk that ends at byte .* but the file ends at", "OSError, once read"),
    "chunk of no bytes": Attack(empty_chunk, "its chunk 0 has 0 stored bytes, which is impossible", "crashes"),
    "scale-offset of other chunks": Attack(
        scaled,
        "filter scaleoffset for chunks of 67108864 elements, but its chunks have 200",
        "crashes, or takes 64 MB a chunk",
    ),
    "endless heap": Attack(endless_heap, r"heap is damaged \(element 0 is not in the heap\)", "goes round for ever"),
    "references": Attack(
        instead(lambda f, _: f.create_dataset("images", (N,), h5py.ref_dtype)),
        "has references to other objects",
        "reads them",
    ),
    "opaque": Attack(
        instead(lambda f, _: f.create_dataset("images", (N,), "V5")),
        "has opaque bytes .*, which are not numbers",
        "reads them",
    ),
    "header is a link": Attack(header_link, "/h5chunk is damaged: it is a link", "follows it"),
    "header of variable length": Attack(
        header(options="{}"), "attribute 'options' has variable length", "may hang where the file is damaged"
    ),
    "large attribute": Attack(large_attribute, "attribute 'options' has 2,097,152 bytes", "reads it"),
    "table of variable length": Attack(
        header_table("class_names", ["a"]), "class_names has values of variable length", "may hang"
    ),
    "table is a link": Attack(
        header_table("class_names", h5py.ExternalLink("other.h5", "images")), "class_names is a link", "follows it"
    ),
    "table claims too much": Attack(
        edit(lambda f, _: f.create_group("h5chunk").attrs.update(format_version=1) or huge_table(f)),
        "'h5chunk/source_index' claims .*, but nothing was ever written",
        "takes 8 TB on [:]",
    ),
    "newer format": Attack(header(format_version=99), "format version 99, but this h5chunk reads only", "reads it"),
    "header makes no sense": Attack(header(num_samples=np.int64(-5)), "its group /h5chunk is damaged", "reads it"),
    "part of a matrix is a link": Attack(
        matrix("indices", lambda g: g.update(indices=h5py.ExternalLink("other.h5", "images"))),
        "'images/indices' is an external link",
        "follows it",
    ),
    "part of a matrix claims too much": Attack(
        matrix("indptr", lambda g: g.create_dataset("indptr", (10**12,), "i8")),
        "'images/indptr' claims .*, but nothing was ever written",
        "takes 8 TB on [:]",
    ),
    "a pipe": Attack(pipe, "not a regular file", "waits for ever"),
    "no HDF5": Attack(lambda path: path.write_bytes(b"\x89PNG" + bytes(5000)) and None, "not an HDF5 file", "OSError"),
    "cut short": Attack(lambda path: os.truncate(path, 2500), r"cut short \(its header claims", "OSError"),
}
SAME = {"has references to other objects"}  # the message says the type, and is that of what cannot be a field


def make_good(path: Path) -> Path:
    """The file that attacks change."""
    make_images(path, N, 4, compression="gzip")
    with h5py.File(path, "r+") as file:
        file["labels"] = np.arange(N)
    return path


def read_all(path: Path, **options: object) -> np.ndarray:
    """All images, by byte ranges if they can be."""
    reader = H5Reader(path, {"images": "images"}, **options)
    if reader.matrix is not None:
        return reader.indptr_of("images")
    return read_rows(reader, "images", np.arange(reader.num_samples))
