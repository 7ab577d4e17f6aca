"""Detect problems of a file, such as sorted labels or unsuitable chunks, and suggest a remedy for each."""

from __future__ import annotations

from dataclasses import dataclass, field

from h5chunk.errors import human_bytes
from h5chunk.machine import available_cores
from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.store.read.ragged import ImagesField
from h5chunk.tools.measure.checks import CROP
from h5chunk.tools.measure.machine import available_bytes, default_cache
from h5chunk.tools.model.clustering import MIN_CHANCE, find_clustering
from h5chunk.tools.tune.study import Study

GIANT_BYTES = 64 << 20  # a window of several larger chunks needs too much memory
MIN_GIANT_BYTES, FEW_CHUNKS = 1 << 20, 8  # a chunk of this size is too large if there are fewer than 8 along axis 0
MIN_CORRELATION = 0.02  # a smaller correlation of labels does not matter for a batch of hundreds
ENOUGH = 0.95  # fraction of a full shuffle that counts as full
DECODING_S = 0.3  # time to measure decoding
DECODES_SHARE = 0.5  # a loader that reaches this fraction of the decoding rate is limited by decoding
PIECES = (2, 16, 64)  # lengths of pieces in which labels are compared, besides the chunks


@dataclass(frozen=True)
class Advice:
    """A problem of the data, with its figures and its remedy: a command, or a sentence if the source is needed.

    ``code`` is ``labels_clustered``, ``sample_spans_chunks``, ``giant_chunk``, ``cache_below_chunk``, ``slow_filter``,
    ``slow_decoding`` or ``exceeds_memory``.
    """

    code: str
    message: str
    remedy: str
    figures: dict[str, float] = field(default_factory=dict)


def find_advice(study: Study, effective_batch: float | None, is_slow: bool, repack: str, shuffle: str) -> list[Advice]:
    """Detect all problems of the data.

    ``effective_batch`` is the effective batch of today's setting. ``is_slow`` is true if a new file is recommended.
    ``repack`` and ``shuffle`` are the commands that rewrite the file in other chunks, or shuffle it.
    """
    found = _advise_labels(study, effective_batch, shuffle)
    if not study.is_ragged:
        found += advise_layout(study.facts.grid, default_cache(), repack)
        found += [_advise_filter(study, repack)] if study.facts.grid.filtered and is_slow else []
    return found


def advise_layout(grid: ChunkGrid, cache: CacheSettings, repack: str) -> list[Advice]:
    """Detect problems of a field's chunks and of plain h5py's cache. ``repack`` is the command to suggest.

    >>> grid = ChunkGrid((50_000, 32, 32, 3), (6250, 4, 4, 1), 1)
    >>> [each.code for each in advise_layout(grid, CacheSettings(8191, 8 << 20), "repack")]
    ['sample_spans_chunks']
    """
    found: list[Advice] = []
    if grid.chunks is None:
        return found
    size = human_bytes(grid.chunk_bytes)
    if grid.chunks_per_sample > 1:
        spread = grid.amplification(cached=grid.chunk_bytes <= cache.nbytes)
        figures = {"chunks_per_sample": grid.chunks_per_sample, "amplification": spread}
        count = f"{grid.chunks_per_sample:,} chunks"
        message = f"each sample is cut into {count}, so reading a random sample reads {spread:,.0f} times its bytes"
        found.append(Advice("sample_spans_chunks", message, repack, figures))
    few = grid.num_bands < FEW_CHUNKS <= grid.shape[0]
    if grid.band_samples not in (None, 1) and grid.chunk_bytes > (MIN_GIANT_BYTES if few else GIANT_BYTES):
        share = min(1.0, (grid.band_samples or 1) / max(1, grid.shape[0]))
        message = f"a chunk has {size} ({share:.0%} of the samples), and shuffling needs several chunks in memory"
        found.append(Advice("giant_chunk", message, repack, {"chunk_bytes": grid.chunk_bytes, "share": share}))
    if grid.chunk_bytes > cache.nbytes and (grid.filtered or (cache.nbytes and grid.reads_per_sample(False) > 1)):
        cache_bytes = grid.band_bytes * 2
        settings = f"rdcc_nbytes={cache_bytes}, rdcc_nslots={grid.num_slots}, rdcc_w0=0.75"
        consequence = "decodes it completely" if grid.filtered else "reads it in pieces"
        message = (
            f"a chunk of {size} does not fit in the cache of {human_bytes(cache.nbytes)}, so each access "
            f"{consequence}; it fits with the arguments {settings} of h5py.File"
        )
        figures = {"cache_bytes": cache.nbytes, "chunk_bytes": grid.chunk_bytes, "wanted_bytes": cache_bytes}
        found.append(Advice("cache_below_chunk", message, repack, figures))
    return found


def _advise_labels(study: Study, effective_batch: float | None, shuffle: str) -> list[Advice]:
    """Detect whether the labels of neighbouring samples are more similar than in a shuffled file."""
    if study.groups is None:
        return []
    batch_size, sizes = study.facts.batch_size, {*PIECES, study.facts.chunk_samples}
    pieces = [find_clustering(study.groups, size) for size in sorted(sizes) if 1 < size <= len(study.groups) // 2]
    clear = [clustering for clustering in pieces if clustering.chance < MIN_CHANCE / len(pieces)]
    clear = [clustering for clustering in clear if clustering.correlation >= MIN_CORRELATION]
    if not clear:
        return []
    worst = max(clear, key=lambda clustering: clustering.correlation)
    effective = effective_batch or float(batch_size)
    worth = f"a batch of {batch_size} is as diverse as {effective:.0f} shuffled samples"
    if effective >= ENOUGH * batch_size:
        worth += ", but only because windows contain most of the file"
    message = (
        f"samples are sorted or in groups: the correlation among {worst.piece_samples} neighbours is "
        f"{worst.correlation:.0%} (0% if shuffled, 100% if all are equal); {worth}"
    )
    figures = {"h_y": worst.h_y, "correlation": worst.correlation, "effective_batch": effective}
    return [Advice("labels_clustered", message, shuffle, figures)]


def _advise_filter(study: Study, repack: str) -> Advice:
    """Recommend storing the file uncompressed, and say how much more space that needs."""
    times = 1 / max(1e-9, study.stored_share)
    message = f"decompression takes most of the time; uncompressed chunks need {times:,.1f} times the space"
    return Advice("slow_filter", message, repack, {"times_the_space": times})


def advise_images(study: Study, rate: float) -> list[Advice]:
    """Recommend the other form for images of any size if it is better. ``rate`` is the best rate, in samples/s."""
    field, memory = study.reader.ragged, available_bytes()
    if not isinstance(field, ImagesField):
        return []
    convert = "convert the images again, with"
    if field.form == "raw":
        if field.num_entries <= memory:
            return []
        message = (
            f"{human_bytes(field.num_entries)} of pixels exceed the {human_bytes(memory)} of free memory, so each "
            "epoch reads the disk"
        )
        raw = {"pixel_bytes": float(field.num_entries), "memory_bytes": float(memory)}
        return [Advice("exceeds_memory", message, f"{convert} --keep-encoded", raw)]
    from h5chunk.tools.measure.images import decoding

    image_bytes, measured = decoding(study.reader, study.num_measured)
    decoded = measured(available_cores(), DECODING_S) / image_bytes
    if rate < DECODES_SHARE * decoded:
        return []
    num_bytes = int(image_bytes * field.num_rows)
    fits = num_bytes <= memory
    figures = {"decoded_per_s": decoded, "pixel_bytes": num_bytes, "memory_bytes": memory}
    message = (
        f"decoding takes most of the time: all cores decode {decoded:,.0f} full images/s; raw pixels need about "
        f"{human_bytes(num_bytes)}, {num_bytes / field.num_entries:,.1f} times as much, "
        f"which {'fit' if fits else 'do not fit'} in the {human_bytes(memory)} of free memory"
    )
    smaller = f"{convert} --keep-encoded --max-side {2 * CROP}, or use more cores"
    return [Advice("slow_decoding", message, f"{convert} --keep-size" if fits else smaller, figures)]
