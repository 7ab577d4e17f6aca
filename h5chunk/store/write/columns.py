"""Write columns, which are fields of one value per sample that are in memory, with their checksums."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from h5chunk.store.format.spec import GROUP, FieldSpec
from h5chunk.store.write.new_file import NewFile


def column_specs(columns: Mapping[str, np.ndarray]) -> tuple[FieldSpec, ...]:
    """Return the fields to write; only types are looked at."""
    return tuple(FieldSpec(name, (), values.dtype) for name, values in columns.items())


def checksum_tables(fields: Iterable[str], num_chunks: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return the tables below ``/h5chunk`` that hold the checksums of some fields."""
    return {f"checksums/{name}": ((num_chunks,), np.dtype(np.uint32)) for name in fields}


def write_columns(new: NewFile, columns: Mapping[str, np.ndarray], chunk_samples: int) -> None:
    """Write columns, already in row order, and their checksums."""
    for name, values in columns.items():
        new.write(name, values)
        new.write(f"{GROUP}/checksums/{name}", chunk_checksums(values, chunk_samples))


def chunk_checksums(rows: np.ndarray, chunk_samples: int) -> np.ndarray:
    """Return the CRC-32 of each chunk of a field, the last filled up with zeros: (num_chunks,) uint32."""
    data, chunk_bytes = rows.tobytes(), chunk_samples * rows.itemsize
    data += bytes(-len(data) % chunk_bytes)
    return np.array([zlib.crc32(data[i : i + chunk_bytes]) for i in range(0, len(data), chunk_bytes)], np.uint32)
