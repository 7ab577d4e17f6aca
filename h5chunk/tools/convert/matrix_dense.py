"""Write a sparse matrix as dense rows of uint8, in compressed chunks of whole rows."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from h5chunk.errors import OptionError
from h5chunk.machine import available_cores
from h5chunk.plan.layout import Layout, human_bytes, plan_layout
from h5chunk.store.format.header import header_attributes
from h5chunk.store.format.matrix import DENSE, MATRIX
from h5chunk.store.format.spec import GROUP, GZIP_LEVEL, FieldSpec, FileSpec
from h5chunk.store.write.columns import checksum_tables, column_specs
from h5chunk.store.write.new_file import NewFile
from h5chunk.tools.convert.matrix_select import Part


class DenseFile:
    """A file of dense rows.

    Parameters
    ----------
    num_rows, num_columns : int
    chunk_samples : int, optional
        Rows of a chunk; chosen if not given.
    is_compressed : bool
    memory_bytes : int

    Raises
    ------
    OptionError
        The chunks that are made at one time do not fit in memory.
    """

    def __init__(
        self, num_rows: int, num_columns: int, chunk_samples: int | None, is_compressed: bool, memory_bytes: int
    ) -> None:
        self.layout: Layout = plan_layout(num_rows, num_columns, chunk_samples)
        self._is_compressed = is_compressed
        self._threads = available_cores()
        self._shape = (num_rows, num_columns)
        need = self.layout.chunk_bytes * 3 * (self._threads + 1)
        if need > memory_bytes // 2:
            raise OptionError(
                f"dense chunks of {human_bytes(self.layout.chunk_bytes)} take {human_bytes(need)} while they are made, "
                f"but half of memory_bytes is {human_bytes(memory_bytes // 2)}: allow more, or give a smaller "
                "chunk_samples"
            )

    def spec(
        self,
        *,
        scale: float,
        pattern: bool,
        attributes: Mapping[str, Any],
        fields: Mapping[str, np.ndarray],
        tables: Mapping[str, np.ndarray],
    ) -> FileSpec:
        """The file to write; compressed rows are added to it as they are made."""
        rows = FieldSpec(MATRIX, (self._shape[1],), np.dtype(np.uint8), gzip=self._is_compressed)
        return FileSpec(
            num_samples=self.layout.num_samples,
            chunk_samples=self.layout.chunk_samples,
            fields=(rows, *column_specs(fields)),
            tables={
                **checksum_tables((MATRIX, *fields), self.layout.num_chunks),
                **{name: (values.shape, values.dtype) for name, values in tables.items()},
            },
            attributes=header_attributes(
                num_samples=self.layout.num_samples,
                chunk_samples=self.layout.chunk_samples,
                window_chunks=self.layout.window_chunks,
                cache=self.layout.cache,
                kind=DENSE,
                **attributes,
            ),
            field_attributes={MATRIX: {"scale": np.float64(scale), "pattern": np.uint8(pattern)}},
        )

    def write(self, new: NewFile, parts: Iterable[Part], wrote: Callable[[int], None]) -> None:
        """Write all rows, compressing in threads.

        Parameters
        ----------
        new : NewFile
        parts : iterable of Part
        wrote : callable
            Told how many entries were written since the last call.
        """
        chunks = self.chunks(parts, wrote)
        if self._is_compressed:
            with new.chunk_writer(MATRIX) as writer, ThreadPoolExecutor(self._threads) as pool:
                for data in compressed(pool, chunks, self._threads):
                    writer.write(data)
                checksums = writer.checksums
        else:
            checksums = []
            for number, chunk in enumerate(chunks):
                new.write_bytes(MATRIX, number * self.layout.chunk_bytes, chunk.data.cast("B"))
                checksums.append(zlib.crc32(chunk.data))
        new.write(f"{GROUP}/checksums/{MATRIX}", np.array(checksums, np.uint32))

    def chunks(self, parts: Iterable[Part], wrote: Callable[[int], None]) -> Iterator[np.ndarray]:
        """(chunk_samples, columns) uint8 each; rows behind the last are zero."""
        size = self.layout.chunk_samples
        number, chunk = 0, self._empty()
        for rows, columns, codes in parts:
            start = 0
            while start < len(rows):
                while rows[start] >= (number + 1) * size:
                    yield chunk
                    number, chunk = number + 1, self._empty()
                stop = int(np.searchsorted(rows, (number + 1) * size, "left"))
                chunk[rows[start:stop] - number * size, columns[start:stop]] = codes[start:stop]
                start = stop
            wrote(len(rows))
        yield chunk
        for _ in range(number + 1, self.layout.num_chunks):
            yield self._empty()

    def _empty(self) -> np.ndarray:
        return np.zeros((self.layout.chunk_samples, self._shape[1]), np.uint8)


def compressed(pool: ThreadPoolExecutor, chunks: Iterable[np.ndarray], threads: int) -> Iterator[bytes]:
    """Compress chunks in threads; yield them in order."""
    waiting: deque[Future[bytes]] = deque()
    for chunk in chunks:
        waiting.append(pool.submit(zlib.compress, chunk.data, GZIP_LEVEL))
        if len(waiting) > threads:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()
