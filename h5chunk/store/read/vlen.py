"""Read datasets whose elements are arrays of variable length, without HDF5, which trusts the lengths in the file.

Each element is a pointer into the heap of the file. The heap is read once to find where every array is stored. Source:
HDF5 File Format Specification, III.E (global heap) and VIII.B (disk format of variable-length data).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np

from h5chunk.errors import FileError, UnsupportedError, printable
from h5chunk.plan.layout import good_chunk_samples
from h5chunk.store.hdf5.chunk_table import NotDirect, count_unwritten, is_vlen
from h5chunk.store.hdf5.strings import MAX_TEXT_BYTES, POINTER, FileBytes, find_in_heap
from h5chunk.store.hdf5.types import Element, element_of, type_text
from h5chunk.store.read.arrays import Arrays, Blocks, Origin
from h5chunk.store.read.ragged import SeriesField
from h5chunk.store.read.raw import RawValues
from h5chunk.store.read.samples import Elements, Part, StoredFile, Texts
from h5chunk.store.read.stored import Filtered

LETTER = Element(np.dtype(np.uint8), np.dtype(np.uint8))  # a byte of a string
AS_FIXED = "copy it (x) to fixed-length strings, such as file['NEW'] = np.char.encode(np.array(x.asstr()[()], str))"
CUT = "copy it (x) to shorter strings, such as file['NEW'] = np.char.encode(np.array(x.asstr()[()], 'U1000'))"
REMEDY = "write its values one after the other, and their offsets to another dataset (offsets=...)"


@dataclass(frozen=True, kw_only=True)
class VlenField(SeriesField):
    """A dataset whose elements are arrays of variable length."""

    first: bytes  # the pointer of the first element, as stored; empty if there are no elements
    element: Element  # of the arrays

    noun = "arrays of variable length"
    table_datasets = ()

    def read_indptr(self, file: h5py.File, path: Path) -> np.ndarray:
        dataset = file[self.dataset]
        return vlen_indptr(read_pointers(dataset, path), dataset, path, self.element)

    def part(self, file: StoredFile) -> Part:
        """Return what a file stores of this field: an array for each element."""
        dataset = file.file[self.dataset]
        pointers = read_pointers(dataset, file.path)
        vlen_indptr(pointers, dataset, file.path, self.element)  # checks the lengths
        arrays = _heap_arrays(file, self.dataset, pointers, self.element)
        sizes = pointers["length"].astype(np.int64) * self.element.num_bytes
        return Part(Elements, (arrays,), sizes=sizes)


def describe_vlen(dataset: h5py.Dataset, path: Path, name: str) -> VlenField:
    """Describe a dataset of arrays of variable length. Raises UnsupportedError unless they can be read without HDF5."""
    where = f"{printable(path)}: {dataset.name!r}"
    base = dataset.id.get_type().get_super()
    try:
        element = element_of(base, where)
    except UnsupportedError:
        element = None
    if element is None or element.shape or element.dtype.kind not in "biufc":
        raise UnsupportedError(f"{where} has arrays of an unsupported type ({type_text(base)}): {REMEDY}")
    if dataset.ndim != 1 or dataset.file.id.get_create_plist().get_sizes()[0] != 8:
        raise UnsupportedError(f"{where} has {dataset.ndim} axes, or addresses of fewer than 8 bytes: {REMEDY}")
    pointers = read_pointers(dataset, path)
    num_rows, total = len(dataset), int(vlen_indptr(pointers, dataset, path, element)[-1])
    chunk_samples = good_chunk_samples(num_rows, total * element.dtype.itemsize // max(1, num_rows))
    chunk_samples = max(1, min(chunk_samples, num_rows))
    sizes, first = (num_rows, total, chunk_samples), pointers[:1].tobytes()
    dtype = element.dtype
    return VlenField(name, dataset.name, *sizes, False, step_shape=(), value_dtype=dtype, first=first, element=element)


def read_pointers(dataset: h5py.Dataset, path: Path) -> np.ndarray:
    """Read the pointers of all elements, of dtype `POINTER`. Elements that were never written are empty."""
    where = f"{printable(path)}: {dataset.name!r}"
    noun, remedy = ("arrays", REMEDY) if is_vlen(dataset) else ("strings", AS_FIXED)
    pointers = np.zeros(dataset.shape, POINTER)
    try:
        if dataset.size:
            RawValues(dataset).read([0], [len(dataset)], pointers)
    except NotDirect as error:
        raise UnsupportedError(f"{where} has {noun} of variable length, but {error}: {remedy}") from None
    return pointers


def longest_text(dataset: h5py.Dataset, path: Path) -> int:
    """Return the length in bytes of the longest string of variable length, at least 1.

    Raises UnsupportedError if it is longer than `MAX_TEXT_BYTES`, or the strings can't be read without HDF5.
    """
    where = f"{printable(path)}: {dataset.name!r}"
    if dataset.file.id.get_create_plist().get_sizes()[0] != 8:
        raise UnsupportedError(f"{where} has strings with addresses of fewer than 8 bytes: {AS_FIXED}")
    pointers = read_pointers(dataset, path)
    properties = dataset.id.get_create_plist()
    if properties.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED and count_unwritten(dataset):
        raise UnsupportedError(f"{where} has strings that were never written, and a fill value: {AS_FIXED}")
    width = max(1, int(pointers["length"].max(initial=0)))
    if width > MAX_TEXT_BYTES:
        raise UnsupportedError(
            f"{where} has a string of {width} bytes, but strings may have at most {MAX_TEXT_BYTES} bytes: {CUT}"
        )
    return width


def text_part(file: StoredFile, dataset: str) -> Part:
    """Return what a file stores of strings of variable length: an array of bytes for each string."""
    item = file.file[dataset]
    pointers = read_pointers(item, file.path)
    arrays = _heap_arrays(file, dataset, pointers.reshape(-1), LETTER)
    return Part(Texts, (arrays,), step_items=int(np.prod(item.shape[1:], dtype=np.int64)))


def _heap_arrays(file: StoredFile, dataset: str, pointers: np.ndarray, element: Element) -> Arrays:
    """Return an array for each pointer into the heap of a file, whose items are such elements."""
    lengths = pointers["length"].astype(np.int64)
    sizes = lengths * element.item_bytes
    places = find_in_heap(open_heap(file.file, file.path, dataset), pointers, sizes)
    zeros, numbers = np.zeros(len(lengths), np.int64), np.arange(len(lengths))
    masks = zeros.astype(np.uint32)
    blocks = Blocks(np.full(len(lengths), file.number, np.int32), places, sizes, masks)
    shape, origin = lengths[:, None], Origin(file.number, lambda _: f"{printable(file.path)}: {dataset!r}")
    # an array without elements has a block, too, which is never read
    codecs = () if element.is_plain else (Filtered(None, element, 1, b""),)
    tables = numbers, shape, np.maximum(shape, 1), zeros + len(codecs)
    return Arrays(element.num_bytes, *tables, blocks, codecs, (origin,), zeros[:1])


def open_heap(file: h5py.File, path: Path, dataset: str) -> FileBytes:
    """Return the open file, which contains the heap, for `find_in_heap`. Errors name the dataset."""
    return FileBytes.of(file, lambda problem: FileError(f"{printable(path)}: {dataset!r}: {problem}"))


def vlen_indptr(pointers: np.ndarray, dataset: h5py.Dataset, path: Path, element: Element) -> np.ndarray:
    """Return the index of the first entry of each element, and finally the number of entries: (n + 1,) int64.

    Raises FileError if the elements have more bytes than the file.
    """
    indptr = np.concatenate([[0], np.cumsum(pointers["length"], dtype=np.int64)])
    file_bytes = dataset.file.id.get_filesize()
    if indptr[-1] * element.item_bytes > file_bytes:
        raise FileError(
            f"{printable(path)}: {dataset.name!r} claims {indptr[-1] * element.item_bytes} bytes, but the file has "
            f"{file_bytes}: it is damaged"
        )
    return indptr
