"""Read windows of frames as samples: a sample is several rows of each field of a reader of frames.

The frames' own reader lists chunks, checks bytes and decodes. A window only names rows: `WindowReader.rows_of` turns
samples into rows, and `WindowBytes` passes these rows on, sorted, so that a chunk is decoded once for all windows that
are read together. Another kind of sample that consists of rows needs another ``rows_of``, and nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np

from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.plan.selection import starts_of_runs
from h5chunk.store.hdf5.ranges import ReadTask
from h5chunk.store.read.csr import CsrBuffers
from h5chunk.store.read.direct import ByteReader
from h5chunk.store.read.fields import Field
from h5chunk.store.read.reader import H5Reader


class WindowReader(H5Reader):
    """Present windows of the rows of ``frames`` as the samples of a reader.

    ``anchors``, (n,) int64 and ascending, is the row of each window's first step; ``borders``, (num_episodes + 1,)
    int64, has the first row of each episode, and finally the number of rows; ``steps`` maps each field to the offsets
    of its frames from the anchor. Rows beyond an episode are those of its first or last frame.
    """

    def __init__(
        self, frames: H5Reader, anchors: np.ndarray, borders: np.ndarray, steps: Mapping[str, np.ndarray]
    ) -> None:
        self.frames, self.anchors, self.steps = frames, anchors, dict(steps)
        self.path, self.header = frames.path, None
        if len(frames.readers) == 1:
            self.stamp = frames.stamp
        self.trusted, self.checksums = frames.trusted, frames.checksums
        self._readers = frames.readers if len(frames.readers) > 1 else ()
        self.episodes = np.searchsorted(borders, anchors, "right") - 1
        self._first, self._last = borders[self.episodes], borders[self.episodes + 1] - 1
        self.num_samples, self.ragged = len(anchors), None
        self.starts = np.searchsorted(anchors, frames.starts)
        self.fields = {name: self._describe(name) for name in frames.fields}
        self.main = self.fields[max(self.fields, key=lambda name: self.fields[name].grid.sample_bytes)]
        chunks = anchors // frames.chunk_samples
        if frames.chunk_starts is not None:
            chunks = np.searchsorted(frames.chunk_starts, anchors, "right") - 1
        self.chunk_starts = starts_of_runs(chunks)
        self.chunk_samples = max(1, round(self.num_samples / max(1, len(self.chunk_starts) - 1)))

    def _describe(self, name: str) -> Field:
        field = self.frames.fields[name]
        shape = self.num_samples, len(self.steps[name]), *field.sample_shape
        return Field(name, field.dataset, ChunkGrid(shape, None, field.dtype.itemsize, False), field.dtype)

    def rows_of(self, name: str, samples: np.ndarray) -> np.ndarray:
        """Return the rows of a field's frames in these samples: (n, num_frames) int64."""
        rows = self.anchors[samples, None] + self.steps[name]
        return np.clip(rows, self._first[samples, None], self._last[samples, None])

    def is_padding(self, name: str, samples: np.ndarray) -> np.ndarray:
        """Return which frames of a field are repeated because the episode has none there: (n, num_frames) bool."""
        return self.rows_of(name, samples) != self.anchors[samples, None] + self.steps[name]

    def byte_reader(self, name: str, frames: ByteReader) -> ByteReader:
        """Return the reader of a field's windows, given the reader of its frames."""
        return WindowBytes(self, name, frames)

    @cached_property
    def fingerprint(self) -> int:
        """See `H5Reader.fingerprint`; of the frames, and of the rows of all windows."""
        found = zlib.crc32(repr({name: steps.tolist() for name, steps in self.steps.items()}).encode())
        for table in (self.anchors, self._first, self._last):
            found = zlib.crc32(table.tobytes(), found)
        return zlib.crc32(str(self.frames.fingerprint).encode(), found)

    @property
    def recommendation(self) -> None:
        """None: what `h5chunk tune` stores is for frames."""
        return

    def set_caches(self, main: CacheSettings) -> None:
        """See `H5Reader.set_caches`: the cache holds as many chunks of frames as ``main`` holds of windows."""
        grid = self.frames.main.grid
        bands = min(grid.num_bands, 2 + main.nbytes // max(1, self.chunk_bytes)) if grid.chunks else 0
        self.frames.set_caches(grid.cache_for(bands))

    def actual_caches(self) -> dict[str, CacheSettings]:
        """See `H5Reader.actual_caches`."""
        return self.frames.actual_caches()

    def read(self, name: str, rows: np.ndarray, out: np.ndarray | CsrBuffers) -> None:
        """Read a field of samples through HDF5, each frame once: see `H5Reader.read`."""
        assert isinstance(out, np.ndarray)
        frames, where = np.unique(self.rows_of(name, rows), return_inverse=True)
        values = np.empty((len(frames), *out.shape[2:]), out.dtype)
        self.frames.read(name, frames, values)
        out[...] = values[where.reshape(out.shape[:2])]

    def check_unchanged(self, descriptor: Any = None) -> None:
        """See `H5Reader.check_unchanged`."""
        self.frames.check_unchanged(descriptor)

    def check_metadata(self) -> None:
        """See `H5Reader.check_metadata`."""
        self.frames.check_metadata()

    def close(self) -> None:
        """See `H5Reader.close`."""
        self.frames.close()

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "frames": copy(self.frames)}


class WindowBytes(ByteReader):
    """Read the windows of one field by byte ranges."""

    def __init__(self, reader: WindowReader, name: str, frames: ByteReader) -> None:
        self.name, self._reader, self._frames = name, reader, frames
        self.row_bytes = frames.row_bytes * len(reader.steps[name])
        self.num_bytes = self.row_bytes * reader.num_samples
        self.is_plain, self.chunks = frames.is_plain, frames.chunks

    def tasks(self, rows: np.ndarray, destinations: np.ndarray, out: np.ndarray) -> Iterator[ReadTask]:
        """See `ByteReader.tasks`; the rows of windows are sorted, because windows overlap."""
        frames = self._reader.rows_of(self.name, rows)
        places = destinations[:, None] * frames.shape[1] + np.arange(frames.shape[1])
        order = np.argsort(frames, axis=None, kind="stable")
        target = out.reshape(len(out) * frames.shape[1], self._frames.row_bytes)
        return self._frames.tasks(frames.ravel()[order], places.ravel()[order], target)

    def read_all(self, descriptor: Any) -> np.ndarray:
        field, samples = self._reader.fields[self.name], np.arange(self._reader.num_samples)
        values = np.empty(field.grid.shape, field.dtype)
        for task in self.tasks(samples, samples, values.reshape(len(samples), -1).view(np.uint8)):
            task(descriptor)
        return values

    def bytes_read(self, rows: np.ndarray) -> int:
        return self._frames.bytes_read(np.unique(self._reader.rows_of(self.name, rows)))
