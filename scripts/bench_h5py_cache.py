"""Count the chunks that plain h5py decodes in an epoch, with its default chunk cache and with the one that info prints.

    python scripts/bench_h5py_cache.py FOLDER

Makes ``FOLDER/gzip.h5``: 20,000 images of 64 x 64 x 3 in gzip chunks of 64 images. An epoch is ``file["images"][i]``
for all images, in random order with the default cache, and in the order of ChunkSampler with the cache for it. Chunks
are counted by the reads of their bytes. Rates are of processor time, and of epochs without counting.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from hdf5_cache import CountingFile

import h5chunk

COUNT, PER_CHUNK = 20_000, 64
LEAST_BYTES = 20_000  # of a stored chunk; reads of metadata are smaller


def make_file(path: Path) -> None:
    """Write images of which each number fills 4 x 4 pixels."""
    numbers = np.random.default_rng(0).integers(0, 255, (COUNT, 16, 16, 3), dtype="u1") // 16
    images = numbers.repeat(4, 1).repeat(4, 2)
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, chunks=(PER_CHUNK, 64, 64, 3), compression="gzip")


def read(file: h5py.File, order: np.ndarray) -> float:
    """Read images in this order, and return the seconds of processor time."""
    images, started = file["images"], time.process_time()
    for number in order.tolist():
        images[number]
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    path = parser.parse_args().folder / "gzip.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    make_file(path)
    in_chunks = np.concatenate([np.asarray(batch) for batch in h5chunk.ChunkSampler(h5chunk.ChunkDataset(path), 256)])
    described = h5chunk.info(path).chunk_cache
    assert described is not None
    cache = described.cache
    own: dict[str, Any] = {"rdcc_nbytes": cache.nbytes, "rdcc_nslots": cache.nslots, "rdcc_w0": cache.w0}
    shuffled = np.random.default_rng(0).permutation(COUNT)
    for name, order, options in (
        ("default cache, random order", shuffled, {}),
        (f"{described.text}; order of ChunkSampler", in_chunks, own),
    ):
        with path.open("rb") as raw:
            counted = CountingFile(raw)
            with h5py.File(counted, "r", **options) as file:
                read(file, order)
            chunks = sum(num_bytes >= LEAST_BYTES for _, num_bytes in counted.reads)
        with h5py.File(path, **options) as file:
            seconds = read(file, order)
        print(f"{name}: {chunks:,} chunks decoded, {COUNT / seconds:,.0f} images/s of processor time")


if __name__ == "__main__":
    main()
