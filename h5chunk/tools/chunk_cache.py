"""Describe the chunk cache that suits a file, for reports: its size, the reads that it serves, and code for h5py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import h5py

from h5chunk.errors import count_text, human_bytes
from h5chunk.plan.cache import CacheSettings, ChunkGrid, mean_hits
from h5chunk.plan.layout import choose_window_chunks, plan_layout
from h5chunk.plan.order import INTERLEAVE
from h5chunk.sample_source import shape_text
from h5chunk.store.format.header import Header
from h5chunk.store.format.recommendation import read_recommendation
from h5chunk.tools.report import code
from h5chunk.urls import is_url

BATCH = 256  # batch size of the order that a cache is chosen for
NO_CACHE = CacheSettings(1, 0)


@dataclass(frozen=True)
class ChunkCacheInfo:
    """The chunk cache for a dataset whose samples are read one by one with h5py.

    ``served_in_order`` is the share of the reads of chunks in an epoch that the cache serves if samples are read in the
    order of `h5chunk.ChunkSampler`; ``served_at_random`` is the share if they are read in random order.
    """

    chunks: tuple[int, ...] | None  # shape of a chunk; None for a contiguous dataset
    reason: str  # why chunks have this shape
    cache: CacheSettings
    served_in_order: float
    served_at_random: float
    code: str  # the call of h5py that sets the cache; empty for a URL, which h5py does not read

    def lines(self) -> list[str]:
        """Return the chunks, the cache and the call of h5py, in a line each."""
        if self.chunks is None:
            return ["chunks none: the data is contiguous, so that a sample is read without a chunk cache"]
        chunks = f"chunks {shape_text(self.chunks)}: {self.reason}"
        return [chunks, *self.cache_lines()]

    def cache_lines(self, indent: str = "") -> list[str]:
        """Return the cache and the call of h5py, in a line each."""
        reader = [f"{indent}for readers with h5py: {code(self.code)}"] if self.code else []
        return [f"{indent}chunk cache {self.text}", *reader]

    @property
    def text(self) -> str:
        """The cache and the reads that it serves, in words."""
        cache = f"nslots={self.cache.nslots:,}, nbytes={self.cache.nbytes:,}, w0={self.cache.w0:g}"
        if not self.cache.nbytes:
            return f"none ({cache}): a sample is one read of its own bytes, which a cache would only copy"
        return (
            f"{cache} ({human_bytes(self.cache.nbytes)}): serves {_percent(self.served_in_order)} of the reads of "
            f"chunks in the order of ChunkSampler, {_percent(self.served_at_random)} in random order"
        )


def describe_cache(
    path: str,
    grid: ChunkGrid,
    cache: CacheSettings,
    reason: str = "",
    chunks: tuple[int, ...] | None = None,
    chunk_bytes: int = 0,
) -> ChunkCacheInfo:
    """Describe a cache that keeps all chunks that `h5chunk.ChunkSampler` opens. ``path`` is a Python expression.

    ``reason`` says why the chunks have their shape. Default: as far as the shape shows it. If ``grid`` describes
    samples of several lengths by their mean length, ``chunks`` and ``chunk_bytes`` are the shape and size of a chunk.
    """
    chunks, chunk_bytes = chunks or grid.chunks, chunk_bytes or grid.chunk_bytes
    nbytes = cache.nbytes * grid.chunk_bytes // max(1, chunk_bytes)  # for as many chunks of the grid
    settings = f", rdcc_nbytes={cache.nbytes}, rdcc_nslots={cache.nslots}, rdcc_w0={cache.w0}" if grid.chunks else ""
    in_order, at_random = (mean_hits(grid, cache.nslots, nbytes, is_shuffled) for is_shuffled in (False, True))
    call = "" if is_url(path.strip("'\"")) else f"h5py.File({path}{settings})"
    return ChunkCacheInfo(chunks, reason or chunk_reason(grid), cache, in_order, at_random, call)


def cache_of_file(
    file: h5py.File, path: Path, argument: str, name: str, num_rows: int, header: Header | None
) -> ChunkCacheInfo:
    """Describe the cache for a dataset, or for the group of a sparse matrix or of images of any size, of an open file.

    The group has ``num_rows`` rows. The cache is the one that readers of single samples need in the order of
    `ChunkSampler`, with the window that `h5chunk tune --apply` or `h5chunk convert` stored, or else the default window.
    The cache that these stored is for readers of batches. ``argument`` is the path as a Python expression.
    """
    item = file[name]
    is_matrix = isinstance(item, h5py.Group) and "indices" in item
    dataset = item if isinstance(item, h5py.Dataset) else item["indices" if is_matrix else "data"]
    chunks, filtered = dataset.chunks, dataset.id.get_create_plist().get_nfilters() > 0
    grid, reason = ChunkGrid(tuple(dataset.shape), chunks, dataset.dtype.itemsize, filtered), ""
    chunk_bytes = grid.chunk_bytes
    if dataset is not item and chunks:  # treat the entries of a row as one sample of the mean length
        rows = max(1, chunks[0] * num_rows // max(1, len(dataset)))
        size = -(-grid.chunk_bytes // rows)
        grid = ChunkGrid((num_rows, size), (rows, size), 1, filtered)
        unit, sample = ("entries", "row") if is_matrix else ("bytes", "image")
        reason = f"{chunks[0]:,} {unit} per chunk, those of about {count_text(rows, sample)}"
    if dataset is not item and not is_matrix and not filtered:
        # A chunk has so many images that no window covers it, and an image is a run of bytes.
        return describe_cache(argument, grid, NO_CACHE, reason, chunks)
    chunk_samples = header.chunk_samples if header is not None else grid.band_samples or 0
    stored = read_recommendation(path, dataset=name, num_samples=num_rows, chunk_samples=chunk_samples)
    if is_matrix and header is not None and stored is None:
        cache = header.cache
    else:
        window_chunks = choose_window_chunks(grid.band_bytes, grid.num_bands) if grid.chunks else 1
        window_chunks = stored[0] if stored is not None else header.window_chunks if header else window_chunks
        cache = cache_for_h5py(grid, INTERLEAVE * window_chunks, BATCH)
    return describe_cache(argument, grid, cache, reason, chunks, chunk_bytes)


def cache_for_h5py(grid: ChunkGrid, open_chunks: int, batch_size: int) -> CacheSettings:
    """Return the cache for reading single samples in an order that keeps ``open_chunks`` chunks open between batches.

    Within a batch, samples of all its chunks alternate.
    """
    return grid.cache_for(max(open_chunks, -(-batch_size // (grid.band_samples or batch_size)) + 1))


def chunk_reason(grid: ChunkGrid) -> str:
    """Say why chunks have their shape: h5chunk's rule, if it explains them, or else what the shape means."""
    if not grid.chunks:
        return "contiguous"
    if grid.chunks_per_sample > 1:
        return f"chosen by the writer of the file; each sample is cut into {grid.chunks_per_sample:,} chunks"
    planned = plan_layout(max(1, grid.shape[0]), max(1, grid.sample_bytes))
    if planned.chunk_samples == grid.chunks[0]:
        return planned.reasons[0]
    return "chosen by the writer of the file; each chunk contains complete samples"


def _percent(share: float) -> str:
    """Format a share with as many digits as show that it is not all.

    >>> _percent(0.99984), _percent(0.5), _percent(1.0), _percent(0.0)
    ('99.98 %', '50 %', '100 %', '0 %')
    """
    return f"{100 * share:.4g} %"
