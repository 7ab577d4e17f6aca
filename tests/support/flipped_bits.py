"""Flip single bits of the chunks of a file."""

from __future__ import annotations

from pathlib import Path

import h5py


def places(path: Path) -> list[tuple[str, int, int, int]]:
    """(dataset, chunk, offset, bytes) of all chunks that have checksums."""
    found = []
    with h5py.File(path) as file:
        for name in ("images", "labels", "X", "X/indptr", "X/indices", "X/data"):
            dataset = file.get(name)
            if not isinstance(dataset, h5py.Dataset) or not dataset.id.get_storage_size():
                continue
            if dataset.chunks is None:
                found.append((name, 0, dataset.id.get_offset(), dataset.nbytes))
                continue
            for number in range(dataset.id.get_num_chunks()):
                info = dataset.id.get_chunk_info(number)
                found.append((name, number, info.byte_offset, info.size))
    return found


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
