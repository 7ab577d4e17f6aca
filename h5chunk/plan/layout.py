"""Choose how many samples a chunk holds, and derive the window and the cache from this number.

>>> plan_layout(12_000, 3 * 224 * 224)
Layout(num_samples=12000, sample_bytes=150528, chunk_samples=8, window_chunks=9)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from h5chunk.errors import OptionError, count_text, human_bytes
from h5chunk.plan.cache import DIRECT_BYTES, CacheSettings, cache_for
from h5chunk.plan.order import INTERLEAVE

TARGET_CHUNK_BYTES = 2 << 20  # larger chunks shuffle worse, and are not read faster: scripts/LOG.md
MIN_CHUNK_BYTES = 64 << 10
MIN_CHUNKS = 128  # a file with fewer chunks is shuffled poorly
MAX_CHUNK_BYTES = (4 << 30) - 1  # HDF5 stores the size of a chunk in 32 bits
OPEN_WINDOWS_BYTES = 256 << 20  # memory for all windows whose batches alternate, over all workers


@dataclass(frozen=True)
class Layout:
    """The layout of the samples in a file. A chunk has ``chunk_samples`` samples in every field."""

    num_samples: int
    sample_bytes: int  # size in bytes of a sample of the largest field
    chunk_samples: int
    window_chunks: int  # recommended number of chunks to shuffle together
    reasons: tuple[str, ...] = field(default=(), repr=False, compare=False)  # for the report, one sentence each

    @property
    def chunk_bytes(self) -> int:
        """Size in bytes of one chunk of the largest field."""
        return self.chunk_samples * self.sample_bytes

    @property
    def num_chunks(self) -> int:
        """Number of chunks of a field, including a last chunk that may not be full."""
        return math.ceil(self.num_samples / self.chunk_samples)

    @property
    def cache(self) -> CacheSettings:
        """Recommended cache for one process that reads all batches. With W workers, each worker needs 1/W of it."""
        if self.sample_bytes >= DIRECT_BYTES:
            return CacheSettings(1, 0)
        return cache_for(INTERLEAVE * self.window_chunks, self.chunk_bytes, self.num_chunks)


def plan_layout(num_samples: int, sample_bytes: int, chunk_samples: int | None = None) -> Layout:
    """Plan the layout of a file. If ``chunk_samples`` is None, choose a suitable number of samples per chunk.

    Raises OptionError if a chunk would exceed HDF5's limit of 4 GiB.
    """
    if sample_bytes > MAX_CHUNK_BYTES:
        raise OptionError(
            f"one sample has {sample_bytes} bytes, but HDF5's limit for a chunk is {MAX_CHUNK_BYTES}: "
            "split the samples, or use a narrower dtype"
        )
    if chunk_samples is None:
        chunk_samples, reasons = _choose_chunk_samples(num_samples, sample_bytes)
    elif chunk_samples < 1:
        raise OptionError(f"chunk_samples is {chunk_samples}: pass at least 1, or leave it out")
    else:
        size = human_bytes(chunk_samples * sample_bytes)
        reasons = [f"{count_text(chunk_samples, 'sample')} per chunk, as requested: {size}"]
        chunk_samples = min(chunk_samples, num_samples)
    chunk_bytes = chunk_samples * sample_bytes
    if chunk_bytes > MAX_CHUNK_BYTES:
        raise OptionError(
            f"a chunk of {chunk_samples} samples has {chunk_bytes} bytes, but HDF5's limit is {MAX_CHUNK_BYTES}: "
            f"use at most {MAX_CHUNK_BYTES // sample_bytes} samples per chunk"
        )
    num_chunks = math.ceil(num_samples / chunk_samples)
    window_chunks = choose_window_chunks(chunk_bytes, num_chunks)
    layout = Layout(num_samples, sample_bytes, chunk_samples, window_chunks)
    size, cache = human_bytes(sample_bytes), human_bytes(layout.cache.nbytes)
    why = f"no chunk cache: samples of {size} are read directly, and a cache would copy them twice"
    if layout.cache.nbytes:
        why = f"the {INTERLEAVE} open windows need a cache of {cache} over all processes"
    chunks = "chunk" if window_chunks == 1 else "chunks"
    return replace(layout, reasons=(*reasons, f"windows of {window_chunks} {chunks} are shuffled; {why}"))


def choose_window_chunks(chunk_bytes: int, num_chunks: int) -> int:
    """Choose how many chunks to shuffle together, so that the open windows have at most `OPEN_WINDOWS_BYTES`."""
    return max(1, min(OPEN_WINDOWS_BYTES // max(1, INTERLEAVE * chunk_bytes), num_chunks))


def _choose_chunk_samples(num_samples: int, sample_bytes: int) -> tuple[int, list[str]]:
    by_bytes = power_of_two_below(TARGET_CHUNK_BYTES / sample_bytes)
    by_count = max(power_of_two_below(num_samples / MIN_CHUNKS), power_of_two_below(MIN_CHUNK_BYTES / sample_bytes))
    chosen = min(by_bytes, by_count)
    if chosen >= num_samples:
        size = human_bytes(num_samples * sample_bytes)
        return num_samples, [f"{count_text(num_samples, 'sample')} per chunk: all of them, {size}"]
    size = human_bytes(chosen * sample_bytes)
    if chosen == 1 and sample_bytes > TARGET_CHUNK_BYTES:
        why = f"one sample is {size}, more than the target of {human_bytes(TARGET_CHUNK_BYTES)}"
    elif by_bytes <= by_count:
        why = f"{size}, the largest power of two of samples within {human_bytes(TARGET_CHUNK_BYTES)}"
    else:
        why = f"{size}, small enough for {math.ceil(num_samples / chosen)} chunks to shuffle"
    return chosen, [
        f"{count_text(chosen, 'sample')} per chunk: {why}",
        "a power of two, so that batches of 32, 64, 128, ... consist of whole chunks and no chunk is read twice",
    ]


def good_chunk_samples(num_samples: int, sample_bytes: int) -> int:
    """Return a suitable number of samples per chunk, for data that is only read: samples may have any size."""
    return _choose_chunk_samples(max(1, num_samples), max(1, sample_bytes))[0]


def power_of_two_below(value: float) -> int:
    """Return the largest power of two that is at most ``value``, and at least 1."""
    return 1 << (math.floor(value).bit_length() - 1) if value >= 1 else 1
