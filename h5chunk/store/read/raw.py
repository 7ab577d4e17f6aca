"""Read elements as they are stored, without conversion: to rewrite or verify a file, or to follow its pointers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import UnsupportedError
from h5chunk.store.hdf5.chunk_table import NotDirect, is_variable, stored_item_bytes
from h5chunk.store.hdf5.codecs import INSTALL, KNOWN_FILTERS
from h5chunk.store.hdf5.open import descriptor_of
from h5chunk.store.hdf5.ranges import OneFile
from h5chunk.store.hdf5.types import Element
from h5chunk.store.read.arrays import Arrays, Boxes, dataset_text
from h5chunk.store.read.checksums import NO_SUMS
from h5chunk.store.read.engine import BlockCache, BoxReader, items_of
from h5chunk.store.read.stored import dataset_arrays
from h5chunk.store.read.through_hdf5 import Hdf5Files, hdf5_arrays


class RawValues:
    """The elements of an open dataset of any type as bytes, which any number of threads can read.

    Boxes have all indices of the axes after the first ``axes``. ``arrays`` has a block for each chunk with filters, and
    ``left_to_hdf5`` is the reason why HDF5 must read them, or empty. The block that was used last is kept if only a
    part of it was used. Raises NotDirect if HDF5 would have to read elements of variable length, which it would follow
    without checks.
    """

    def __init__(self, dataset: h5py.Dataset, axes: int = 1) -> None:
        self._files, self.cache = OneFile(descriptor_of(dataset.file)), BlockCache()
        self.arrays, self.left_to_hdf5 = _arrays(dataset, self.cache.hdf5, axes)
        self._reader = BoxReader(self.arrays, self.cache)

    def read(self, low: Sequence[int], high: Sequence[int], out: np.ndarray) -> None:
        """Read the elements from the indices ``low`` to ``high`` (excluded) into ``out``, C-contiguous.

        The indices may be along the first axes only. Raises FileError if a chunk is damaged.
        """
        read_box(self._reader, self._files, low, high, out)

    def decode(self, chunk: int, out: np.ndarray) -> None:
        """Read a whole chunk with a filter into ``out``, (n,) uint8. Raises FileError if it is damaged."""
        (block,) = self.arrays.listed(np.array([chunk]))
        self._reader.decode(self._files, block, out)


def read_box(
    reader: BoxReader, files: Any, low: Sequence[int], high: Sequence[int], out: np.ndarray, array: int = 0
) -> None:
    """Read a box of one of a reader's arrays into memory. The indices may be along the first axes only.

    ``files`` is a `OneFile`, or a `h5chunk.store.read.open_files.OpenFiles`.
    """
    shape = reader.arrays.shape[array].tolist()
    start, stop = [*low, *(0 for _ in shape[len(low) :])], [*high, *shape[len(high) :]]
    first = np.zeros(1, np.int64)
    boxes = Boxes(first + array, np.array([start], np.int64), np.array([stop], np.int64), first, 0)
    inside = (end - begin for begin, end in zip(start, stop, strict=True))
    target = items_of(out.reshape(-1).view(np.uint8), reader.arrays.item_bytes, (1, *inside))
    for task in reader.boxes(boxes, target):
        task(files)


def _arrays(dataset: h5py.Dataset, files: Hdf5Files, axes: int) -> tuple[Arrays, str]:
    """Describe the stored elements as an array of bytes, and return the reason why HDF5 must read it, or no text."""
    kind, properties = dataset.id.get_type(), dataset.id.get_create_plist()
    path = Path(dataset.file.filename)
    item = np.dtype(f"V{stored_item_bytes(dataset)}")
    element = Element(item, item)
    if is_variable(kind) and properties.get_layout() == h5py.h5d.COMPACT:
        raise NotDirect("it is stored compactly")
    try:
        return dataset_arrays(path, "", 0, dataset, element, axes=axes), ""
    except NotDirect as error:
        if is_variable(kind):
            raise
        reason = str(error)
    for number in range(properties.get_nfilters()):
        code = properties.get_filter(number)[0]
        if code in KNOWN_FILTERS and not h5py.h5z.filter_avail(code):
            label, where = f"{KNOWN_FILTERS[code]} ({code})", dataset_text(path, "", dataset.name)
            raise UnsupportedError(f"{where} is compressed with filter {label}, which needs hdf5plugin: {INSTALL}")
    about = path, "", 0, dataset, dataset.name, element, NO_SUMS, None, files, lambda: None
    return hdf5_arrays(*about, axes=dataset.ndim, block=dataset.chunks), reason
