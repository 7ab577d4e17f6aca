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
    requested, chunk_samples = chunk_samples, good_chunk_samples(num_samples, sample_bytes, chunk_samples)
    chunk_bytes = chunk_samples * sample_bytes
    if chunk_bytes > MAX_CHUNK_BYTES:
        raise OptionError(
            f"a chunk of {chunk_samples} samples has {chunk_bytes} bytes, but HDF5's limit is {MAX_CHUNK_BYTES}: "
            f"use at most {MAX_CHUNK_BYTES // sample_bytes} samples per chunk"
        )
    window_chunks = choose_window_chunks(chunk_bytes, math.ceil(num_samples / chunk_samples))
    layout = Layout(num_samples, sample_bytes, chunk_samples, window_chunks)
    return replace(layout, reasons=(*_chunk_reasons(layout, requested), _window_reason(layout)))


def _chunk_reasons(layout: Layout, requested: int | None) -> list[str]:
    size, target = human_bytes(layout.chunk_bytes), human_bytes(TARGET_CHUNK_BYTES)
    chunk = f"{count_text(layout.chunk_samples, 'sample')} per chunk"
    if requested is not None:
        return [f"{chunk}, as requested: {size}"]
    if layout.num_chunks == 1:
        return [f"{chunk}: all of them, {size}"]
    if layout.chunk_bytes > TARGET_CHUNK_BYTES:
        why = f"one sample is {size}, more than the target of {target}"
    elif 2 * layout.chunk_bytes > TARGET_CHUNK_BYTES:
        why = f"{size}, the largest power of two of samples within {target}"
    else:
        why = f"{size}, small enough for {layout.num_chunks} chunks to shuffle"
    return [
        f"{chunk}: {why}",
        "a power of two, so that batches of 32, 64, 128, ... consist of whole chunks and no chunk is read twice",
    ]


def _window_reason(layout: Layout) -> str:
    why = (
        f"no chunk cache: samples of {human_bytes(layout.sample_bytes)} are read directly, and a cache would copy them "
        "twice"
    )
    if layout.cache.nbytes:
        size = human_bytes(layout.cache.nbytes)
        why = f"the {INTERLEAVE} open windows need a cache of {size} over all processes"
    return f"windows of {count_text(layout.window_chunks, 'chunk')} are shuffled; {why}"


def choose_window_chunks(chunk_bytes: int, num_chunks: int) -> int:
    """Choose how many chunks to shuffle together, so that the open windows have at most `OPEN_WINDOWS_BYTES`."""
    return max(1, min(OPEN_WINDOWS_BYTES // max(1, INTERLEAVE * chunk_bytes), num_chunks))


def good_chunk_samples(
    num_samples: int,
    sample_bytes: int,
    requested: int | None = None,
    target_bytes: int = TARGET_CHUNK_BYTES,
    min_bytes: int = MIN_CHUNK_BYTES,
) -> int:
    """Return the number of samples per chunk that is ``requested``, or a suitable power of two, or all samples.

    A chunk has at most ``target_bytes``, and there are at least `MIN_CHUNKS` chunks or a chunk has ``min_bytes``.
    """
    if requested is not None and requested < 1:
        raise OptionError(f"chunk_samples is {requested}: pass at least 1, or leave it out")
    if requested is None:
        by_bytes, at_least = (_power_of_two_below(size / max(1, sample_bytes)) for size in (target_bytes, min_bytes))
        requested = min(by_bytes, max(at_least, _power_of_two_below(num_samples / MIN_CHUNKS)))
    return max(1, min(requested, num_samples))


def _power_of_two_below(value: float) -> int:
    """Return the largest power of two that is at most ``value``, and at least 1."""
    return 1 << (math.floor(value).bit_length() - 1) if value >= 1 else 1
