"""Rows of a dataset whose chunks hold parts of samples, by their byte ranges, outside HDF5's lock.

A band is the chunks that lie side by side over the same samples. Each of them is read, and decoded if it is compressed,
once for all samples that are wanted of it; its piece of each sample is copied to its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import printable
from h5chunk.plan.repack import find_pieces
from h5chunk.store.guard.checksums import NO_SUMS, Sums
from h5chunk.store.read.decoded import KEPT_BYTES, DecodedChunks
from h5chunk.store.read.fields import Field
from h5chunk.store.read.ranges import PART_BYTES, Part

KEPT_BANDS = 2  # that windows cut, so that the next one finds the rest decoded


class TiledField:
    """Reads rows of chunks that hold parts of samples.

    Parameters
    ----------
    path : path
    dataset : h5py.Dataset
        Used now and not kept.
    field : Field
    sums : mapping of str to Checksums
        What is to be checked.

    Attributes
    ----------
    row_bytes, num_bytes : int
        Of a row, and of the whole field.

    Raises
    ------
    NotDirect
        A filter, or the size of its chunks, needs HDF5.
    """

    is_one_run = False

    def __init__(self, path: Path, dataset: h5py.Dataset, field: Field, sums: Sums = NO_SUMS) -> None:
        self.name = field.name
        self.row_bytes, self.num_bytes = field.grid.sample_bytes, dataset.nbytes
        self._dtype, self._shape, self._chunk = field.dtype, tuple(dataset.shape), tuple(dataset.chunks)
        self._pieces = find_pieces(self._shape[1:], self._chunk[1:])
        chunk_bytes = max(1, int(np.prod(self._chunk)) * field.dtype.itemsize)
        kept = min(KEPT_BANDS * len(self._pieces), KEPT_BYTES // chunk_bytes)
        self._chunks = DecodedChunks(path, field.name, dataset, sums, num_kept=kept)
        self.forget, self.scratch_bytes = self._chunks.forget, self._chunks.scratch_bytes

    def parts(self, rows: np.ndarray, places: np.ndarray, out: np.ndarray) -> Iterator[Part]:
        """As `PlainField.parts`; a part may also find stored bytes that cannot be decoded."""
        bands = rows // self._chunk[0]
        borders = [0, *(np.flatnonzero(bands[1:] != bands[:-1]) + 1).tolist(), len(rows)]
        per_part = max(1, PART_BYTES // self._chunks.chunk_bytes)
        samples = out.view(self._dtype).reshape(len(out), *self._shape[1:])
        for start, stop in itertools.pairwise(borders):
            band = int(bands[start])
            within = _as_slice(rows[start:stop] - band * self._chunk[0])
            for first in range(0, len(self._pieces), per_part):
                pieces = range(first, min(first + per_part, len(self._pieces)))
                yield _TilesPart(self, band, pieces, within, places[start:stop], samples)

    def copy_piece(
        self, descriptor: int, band: int, piece: int, rows: slice | np.ndarray, places: np.ndarray, samples: np.ndarray
    ) -> None:
        """Read a chunk, and copy its piece of some samples of its band to their places."""
        is_whole = len(places) >= min(self._chunk[0], self._shape[0] - band * self._chunk[0])
        read = self._chunks.whole if is_whole else self._chunks.shared
        values = read(descriptor, band * len(self._pieces) + piece).view(self._dtype).reshape(self._chunk)
        where = self._pieces[piece]
        inside = tuple(slice(0, each.stop - each.start) for each in where)  # chunks at the edge are stored in full
        source: Any = (rows, *inside)
        target: Any = (places, *where)
        samples[target] = values[source]

    def read_all(self, descriptor: int) -> np.ndarray:
        """The whole field, for small ones."""
        values = np.empty(self._shape, self._dtype)
        rows = np.arange(self._shape[0])
        for part in self.parts(rows, rows, values.reshape(len(values), -1).view(np.uint8)):
            part(descriptor)
        return values

    def __repr__(self) -> str:
        return f"TiledField({printable(self.name)!r}, {len(self._pieces)} chunks a sample)"


def _as_slice(rows: np.ndarray) -> slice | np.ndarray:
    """Neighbours as a slice, which NumPy copies at once."""
    first = int(rows[0])
    return slice(first, first + len(rows)) if (np.diff(rows) == 1).all() else rows


class _TilesPart:
    """Some chunks of a band."""

    def __init__(
        self,
        field: TiledField,
        band: int,
        pieces: range,
        rows: slice | np.ndarray,
        places: np.ndarray,
        samples: np.ndarray,
    ) -> None:
        self._field, self._band, self._pieces = field, band, pieces
        self._rows, self._places, self._samples = rows, places, samples

    def __call__(self, descriptor: int) -> None:
        for piece in self._pieces:
            self._field.copy_piece(descriptor, self._band, piece, self._rows, self._places, self._samples)
