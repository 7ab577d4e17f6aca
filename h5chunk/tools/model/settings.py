"""Enumerate the settings that tune considers, derive their order, cache and memory, and choose one.

A setting consists of the layout of samples (unchanged or repacked), the number of chunks to shuffle together, and the
reader: `ChunkLoader`, which reads byte ranges, or `ChunkDataset` in DataLoader workers with HDF5's chunk cache.

>>> grid = ChunkGrid((12_000, 3, 224, 224), (8, 3, 224, 224), 1)
>>> facts = DataFacts(grid, sample_bytes=150_536, chunk_samples=8, batch_size=256, window_chunks=9, shuffled=True)
>>> settings = enumerate_settings(facts, workers=(0, 2))
>>> len(settings), settings[0]
(30, Setting(reader='loader', chunk_samples=8, window_chunks=9, num_workers=0, repack=False, shuffle=False))
>>> order_of(settings[0], facts).window_batches
1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.plan.layout import choose_window_chunks, good_chunk_samples
from h5chunk.plan.order import Order, choose_interleave, with_full_windows
from h5chunk.plan.slots import plan_slots

LOADER, DATASET = "loader", "dataset"
CHUNK_BYTES = (128 << 10, 512 << 10, 1 << 20, 2 << 20)  # sizes of a repacked file's chunks to try
PAST_CACHE = 8 << 20  # larger chunks bypass HDF5's default cache, which is faster for plain readers of single samples
FEWEST_CHUNKS = 16  # minimum number of chunks of a repacked file
PREFETCH = 2  # batches that a DataLoader's worker prepares
KEPT = 2  # windows that a loader keeps for reuse
STAY = 0.97  # prefer a setting that is simpler, or needs no new file, if it reaches this fraction of the best rate


@dataclass(frozen=True)
class DataFacts:
    """Facts about the data, and about how it is used for training."""

    grid: ChunkGrid  # chunk grid of the field with the largest samples
    sample_bytes: int  # size of a sample in bytes, all fields together
    chunk_samples: int  # samples per chunk in the unchanged file
    batch_size: int
    window_chunks: int  # window that readers choose by default
    shuffled: bool = False  # whether the header says that the file was shuffled
    direct: bool = True  # whether the file can be read by byte ranges
    converted_bytes: int = 0  # size of a sample that batches convert, such as a sparse row made dense; else 0
    has_fixed_chunks: bool = False  # whether the chunks cannot be changed
    loader_reads_all: bool = True  # whether `ChunkLoader` supports all fields, because none contains strings

    @property
    def num_samples(self) -> int:
        return self.grid.shape[0]

    @property
    def batch_samples(self) -> int:
        """Number of samples in a batch: ``batch_size``, or all samples if there are fewer."""
        return min(self.batch_size, self.num_samples)

    @property
    def is_good(self) -> bool:
        """True if chunks contain complete samples and are not compressed."""
        return not self.grid.filtered and self.grid.chunks_per_sample == 1


@dataclass(frozen=True)
class Setting:
    """One way to feed training from the data."""

    reader: str  # "loader": `ChunkLoader`, or "dataset": `ChunkDataset` and `ChunkSampler` in torch's DataLoader
    chunk_samples: int
    window_chunks: int
    num_workers: int = 0  # workers of the DataLoader
    repack: bool = False  # whether the file is first rewritten uncompressed, in chunks of ``chunk_samples``
    shuffle: bool = False  # whether its samples are permuted when it is rewritten

    @property
    def layout(self) -> tuple[int, bool, bool]:
        """The layout of the samples in the file that is read."""
        return self.chunk_samples, self.repack, self.shuffle

    def __str__(self) -> str:
        workers = f"{self.num_workers} worker{'' if self.num_workers == 1 else 's'}"
        who = "ChunkLoader" if self.reader == LOADER else f"DataLoader with {workers}"
        rewritten = f", the file rewritten in chunks of {self.chunk_samples:,}" if self.repack else ""
        shuffled = " and shuffled" if self.shuffle else ""
        return f"{who}, windows of {self.window_chunks * self.chunk_samples:,} samples{rewritten}{shuffled}"


def grid_of(setting: Setting, facts: DataFacts) -> ChunkGrid:
    """Return the chunk grid of the largest field in the file that a setting reads."""
    if not setting.repack:
        return facts.grid
    return ChunkGrid(facts.grid.shape, (setting.chunk_samples, *facts.grid.shape[1:]), facts.grid.itemsize)


def _band_bytes(grid: ChunkGrid, chunk_samples: int) -> int:
    return grid.band_bytes if grid.chunks else chunk_samples * grid.sample_bytes


def order_of(setting: Setting, facts: DataFacts) -> Order:
    """Return the order in which a setting reads samples."""
    band_bytes = _band_bytes(grid_of(setting, facts), setting.chunk_samples)
    order = Order(
        num_samples=facts.num_samples,
        chunk_samples=setting.chunk_samples,
        batch_size=facts.batch_size,
        window_chunks=setting.window_chunks,
        interleave=choose_interleave(setting.window_chunks * band_bytes),
    )
    return order if facts.shuffled or setting.shuffle else with_full_windows(order)


def window_samples(setting: Setting, facts: DataFacts) -> int:
    """Return the number of samples in a full window, but at most the number of all samples."""
    order = order_of(setting, facts)
    return order.window_batches * order.batch_size


def cut_order(order: Order, num_samples: int) -> Order:
    """Return an order of fewer samples for measuring, with fewer windows of the same size."""
    if num_samples >= order.num_samples:
        return order
    batches = max((round_.window_batches for round_ in order.rounds()), default=1)
    chunks = max(1, batches * order.batch_size // order.chunk_samples)
    return with_full_windows(replace(order, num_samples=num_samples, window_chunks=chunks))


def cache_of(setting: Setting, facts: DataFacts, num_workers: int | None = None) -> CacheSettings:
    """Return the settings of the chunk cache of a process that reads through HDF5.

    ``num_workers`` is the number of such processes; by default, the number of workers of the setting.
    """
    order = order_of(setting, facts)
    workers = max(1, setting.num_workers if num_workers is None else num_workers)
    return grid_of(setting, facts).cache_for(order.open_chunks_of(workers), order.cache_w0)


def memory_of(setting: Setting, facts: DataFacts) -> int:
    """Return the memory in bytes that a setting needs for windows, batches and chunk caches."""
    order = order_of(setting, facts)
    batch = facts.batch_samples * (facts.converted_bytes or facts.sample_bytes)
    if setting.reader == DATASET:
        cache = cache_of(setting, facts).nbytes
        return max(1, setting.num_workers) * cache + (1 + setting.num_workers * (PREFETCH + 1) + KEPT) * batch
    windows = plan_slots(replace(order, interleave=1), lambda samples: samples * facts.sample_bytes, lambda order: 0)
    cache = 0 if facts.direct or setting.repack else cache_of(setting, facts, 1).nbytes
    made = (1 + KEPT) * batch if facts.converted_bytes else 0
    return (windows.num_slots + KEPT) * windows.window_samples * facts.sample_bytes + made + cache


def enumerate_settings(facts: DataFacts, *, workers: Sequence[int], windows: Iterable[int] = ()) -> list[Setting]:
    """Return the settings to consider, the current one first.

    ``windows`` are additional window sizes, in chunks, for the unchanged file.
    """
    found: dict[Setting, None] = {}
    for chunk_samples, repack in ((facts.chunk_samples, False), *((size, True) for size in _other_chunks(facts))):
        grid = grid_of(Setting(LOADER, chunk_samples, 1, repack=repack), facts)
        sizes = () if repack else (facts.window_chunks, *windows)
        for window in _window_sizes(replace(facts, grid=grid), chunk_samples, sizes):
            base = Setting(LOADER, chunk_samples, window, repack=repack)
            if facts.loader_reads_all:
                found[base] = None
            for number in workers:
                found[replace(base, reader=DATASET, num_workers=number)] = None
    return list(found)


def _other_chunks(facts: DataFacts) -> list[int]:
    """Return the numbers of samples per chunk to consider for a repacked file.

    Chunks between 2 MiB and the size of HDF5's default cache are left out, because plain h5py would read a whole chunk
    for each sample.
    """
    if facts.has_fixed_chunks:
        return []
    size = max(1, facts.grid.sample_bytes)
    past = 1 << (PAST_CACHE // size).bit_length()
    chosen = good_chunk_samples(facts.num_samples, size)
    max_samples = max(1, facts.num_samples // FEWEST_CHUNKS)
    counts = {chosen} | ({past} if past <= max_samples else set())
    counts |= {min(max_samples, 1 << max(0, (target // size).bit_length() - 1)) for target in CHUNK_BYTES}
    if facts.is_good and facts.grid.chunks:
        counts.discard(facts.chunk_samples)
    return sorted(counts)


def _window_sizes(facts: DataFacts, chunk_samples: int, requested: Iterable[int]) -> list[int]:
    """Return the window sizes to consider, in chunks.

    They are those ``requested``, the default, a quarter of it, four times the default, and four batches.
    """
    num_chunks = math.ceil(facts.num_samples / chunk_samples)
    default = choose_window_chunks(_band_bytes(facts.grid, chunk_samples), num_chunks)
    sizes = [*requested, default, max(1, default // 4), default * 4, math.ceil(4 * facts.batch_size / chunk_samples)]
    made: dict[int, int] = {}  # one size for each number of batches per window
    for size in (max(1, min(size, num_chunks)) for size in sizes):
        order = Order(facts.num_samples, chunk_samples, facts.batch_size, size)
        made.setdefault(order.window_batches, size)
    return list(made.values())


@dataclass(frozen=True)
class Trial:
    """A setting with its memory, shuffle quality and measured rate."""

    setting: Setting
    memory_bytes: int
    effective_batch: float | None  # None if no field shows which samples are similar
    allowed: bool  # whether it fits in memory, and its effective batch is large enough
    rate: float | None = None  # samples/s from the page cache; None if it was not measured


def choose(trials: Iterable[Trial]) -> Trial | None:
    """Choose the best of the settings that are allowed and were measured; return None if there are none.

    Among the settings within 3 % of the fastest rate, prefer those that change least: first settings for the unchanged
    file, then `ChunkLoader`, then fewer workers, smaller chunks (cheaper for reading single samples) and less memory.

    >>> small, large = (Trial(Setting(LOADER, n, 9, repack=True), 1 << 20, 250.0, True, 98.0 + n) for n in (1, 2))
    >>> choose([small, large, replace(large, allowed=False, rate=200.0)]).setting.chunk_samples
    1
    """
    fitting = [(trial.rate, trial) for trial in trials if trial.allowed and trial.rate is not None]
    best = max((rate for rate, _ in fitting), default=0.0)

    def effort(pair: tuple[float, Trial]) -> tuple[float, ...]:
        rate, trial = pair
        setting = trial.setting
        changes = setting.shuffle, setting.repack, setting.reader != LOADER, setting.num_workers
        return *changes, setting.chunk_samples * setting.repack, trial.memory_bytes, -rate

    return min((pair for pair in fitting if pair[0] >= STAY * best), key=effort, default=(0.0, None))[1]
