"""What is wrong with a file, or with the settings that it is read with: each with its figure and the remedy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from h5chunk.errors import printable
from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.plan.layout import human_bytes
from h5chunk.tools.model.clustering import LEAST_CHANCE, Clustering

GIANT_BYTES = 64 << 20  # of a chunk: a window of a few no longer fits in memory
LEAST_GIANT_BYTES, FEW_CHUNKS = 1 << 20, 8  # a smaller one is giant if it holds an eighth of the data
LEAST_CORRELATION = 0.02  # of labels in a piece: less is of no consequence for a batch of hundreds
SLOW_SHARE = 0.5  # decoding by all cores that gives less than this part of what reading gives is slow
ENOUGH = 0.95  # of a batch: it is worth no less for being read from neighbours
PIECES = (2, 16, 64)  # neighbours that are looked at, whatever the chunks are


@dataclass(frozen=True)
class Advice:
    """One thing to change.

    Attributes
    ----------
    code : str
        ``labels_clustered``, ``sample_spans_chunks``, ``giant_chunk``, ``cache_below_chunk``, ``w0_one`` or
        ``slow_filter``.
    message : str
        With the figures.
    figures : dict of str to float
    remedy : str
        A command, or settings for h5py.File.
    """

    code: str
    message: str
    remedy: str
    figures: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return printable(f"{self.code}: {self.message}: {self.remedy}")


def advise_layout(grid: ChunkGrid, cache: CacheSettings, repack: str) -> list[Advice]:
    """What the chunks of a field, and the cache in use, cost.

    Parameters
    ----------
    grid : ChunkGrid
    cache : CacheSettings
        That plain reads have: HDF5's default, or what the file or the user says.
    repack : str
        The command that would lay it out better.

    Examples
    --------
    >>> grid = ChunkGrid((50_000, 32, 32, 3), (6250, 4, 4, 1), 1)
    >>> [each.code for each in advise_layout(grid, CacheSettings(8191, 8 << 20), "repack")]
    ['sample_spans_chunks']
    """
    found: list[Advice] = []
    if grid.chunks is None:
        return found
    if grid.chunks_per_sample > 1:
        spread = grid.amplification(cached=grid.chunk_bytes <= cache.nbytes)
        figures = {"chunks_per_sample": grid.chunks_per_sample, "amplification": spread}
        message = f"each sample touches {grid.chunks_per_sample:,} chunks; a random one reads {spread:,.0f} x its bytes"
        found.append(Advice("sample_spans_chunks", message, repack, figures))
    if is_giant(grid):
        share = min(1.0, (grid.band_samples or 1) / max(1, grid.shape[0]))
        figures = {"chunk_bytes": grid.chunk_bytes, "share": share}
        size = human_bytes(grid.chunk_bytes)
        message = f"a chunk is {size}, {share:.0%} of the samples: shuffling needs several of them in memory"
        found.append(Advice("giant_chunk", message, repack, figures))
    if grid.chunk_bytes > cache.nbytes and (grid.filtered or (cache.nbytes and grid.reads_per_sample(False) > 1)):
        wanted = grid.band_bytes * 2
        settings = f"rdcc_nbytes={wanted}, rdcc_nslots={grid.num_slots}, rdcc_w0=0.75"
        figures = {"cache_bytes": cache.nbytes, "chunk_bytes": grid.chunk_bytes, "wanted_bytes": wanted}
        what = "is decoded whole" if grid.filtered else "is read in pieces"
        size, room = human_bytes(grid.chunk_bytes), human_bytes(cache.nbytes)
        message = f"a chunk of {size} does not fit the cache of {room}: it {what} at every access"
        found.append(Advice("cache_below_chunk", message, f"h5py.File(..., {settings}), or {repack}", figures))
    return found


def is_giant(grid: ChunkGrid) -> bool:
    """Whether a chunk is too large to shuffle by."""
    if grid.chunks is None or grid.chunk_bytes <= LEAST_GIANT_BYTES:
        return False
    few = grid.num_bands < FEW_CHUNKS and grid.shape[0] >= FEW_CHUNKS and (grid.band_samples or 1) > 1
    return few or (grid.chunk_bytes > GIANT_BYTES and (grid.band_samples or 1) > 1)


def advise_w0(w0: float) -> list[Advice]:
    """HDF5's cache without a limit.

    >>> advise_w0(0.75), advise_w0(1.0)[0].code
    ([], 'w0_one')
    """
    if w0 < 1.0:
        return []
    message = "w0 is 1: HDF5 never evicts partly read chunks, and memory grows past the cache's limit"
    return [Advice("w0_one", message, "rdcc_w0=0.75, or 0 for windows; at most 0.99", {"w0": w0})]


def advise_labels(pieces: list[Clustering], effective_batch: float, batch_size: int, repack: str) -> list[Advice]:
    """Labels of neighbours that are more alike than a shuffled file would have them.

    Parameters
    ----------
    pieces : list of Clustering
        Of pieces of several sizes.
    effective_batch : float
        As things are.
    batch_size : int
    repack : str
        The command that shuffles the file.
    """
    clear = [each for each in pieces if each.chance < LEAST_CHANCE / len(pieces)]
    clear = [each for each in clear if each.correlation >= LEAST_CORRELATION]
    if not clear:
        return []
    worst = max(clear, key=lambda each: each.correlation)
    figures = {"h_y": worst.h_y, "correlation": worst.correlation, "effective_batch": effective_batch}
    worth = f"a batch of {batch_size} is worth {effective_batch:.0f}"
    if effective_batch >= ENOUGH * batch_size:
        worth += ", but only as windows hold most of the file"
    message = (
        f"samples lie sorted or in groups: {worst.piece_samples} neighbours are {worst.correlation:.0%} alike, where "
        f"0% is shuffled and 100% all equal; {worth}"
    )
    return [Advice("labels_clustered", message, repack, figures)]


def advise_filter(decode_rate: float, read_rate: float, num_cores: int, repack: str) -> list[Advice]:
    """Filters that decode slower than the file can be read; rates in bytes/s, decoding's of one core.

    >>> advise_filter(3e8, 5e9, 2, "repack")[0].code, advise_filter(math.inf, 5e9, 2, "repack")
    ('slow_filter', [])
    """
    if math.isinf(decode_rate) or decode_rate * num_cores >= SLOW_SHARE * read_rate:
        return []
    figures = {"decode_bytes_per_s": decode_rate * num_cores, "read_bytes_per_s": read_rate}
    message = (
        f"{num_cores} cores decode {human_bytes(decode_rate * num_cores)}/s, where {human_bytes(read_rate)}/s could be "
        "read"
    )
    return [Advice("slow_filter", message, repack, figures)]
