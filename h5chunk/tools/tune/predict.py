"""Predict the rate, memory and shuffle quality of settings, and correct the predictions by measured rates."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from h5chunk.plan.cache import CacheSettings, ChunkGrid
from h5chunk.plan.order import Order
from h5chunk.tools.model.accesses import sample_accesses
from h5chunk.tools.model.clustering import Clustering, find_clustering
from h5chunk.tools.model.cost import Correction, Machine, Reads, stage_times
from h5chunk.tools.model.hdf5_cache import HIT, ChunkCache, replay_batches
from h5chunk.tools.model.mixing import effective_batch
from h5chunk.tools.model.settings import (
    DATASET,
    Setting,
    cache_of,
    grid_of,
    order_of,
    uses_hdf5,
    window_samples,
)
from h5chunk.tools.tune.study import Study

ACCESSES = 20_000  # replayed to predict a setting
MOST_SAMPLES = 4096  # replayed of single samples that plain h5py reads
LEAST_REPLAY_S = 2e-3  # for a setting: some batches of it


class Predictor:
    """Predict the rate, memory and shuffle quality of settings.

    ``replay_s`` is an upper limit on the time to predict the reads of one setting: a loop over batches, slow for small
    batches.
    """

    def __init__(self, study: Study, machine: Machine) -> None:
        self.study, self.facts, self.machine = study, study.facts, machine
        self.replay_s = math.inf
        self._correction = Correction(study.facts)
        self._reads = lru_cache(None)(lambda setting: self.reads(setting, self.replay_s))
        self.effective = lru_cache(None)(self._effective)
        self.clustering = lru_cache(None)(self._clustering)

    def reads(self, setting: Setting, seconds: float = math.inf) -> Reads:
        """Return the reads of a setting, per sample; predicting them takes at most about ``seconds``."""
        grid, order = grid_of(setting, self.facts), order_of(setting, self.facts)
        if grid.chunks is None or self.study.matrix or not uses_hdf5(setting, self.facts):
            return self._direct_reads(setting, grid, order)
        return self._cached_reads(setting, grid, order, seconds)

    def _direct_reads(self, setting: Setting, grid: ChunkGrid, order: Order) -> Reads:
        """Return the reads by byte ranges: of chunks or, if these hold whole samples, of rows."""
        in_pieces = not self.study.matrix and grid.chunks_per_sample > 1
        amplification = 1.0
        if grid.filtered and not self.study.matrix:  # windows that cut a chunk read it again
            window = order.window_batches * order.batch_size
            amplification += order.chunk_samples / window if window % order.chunk_samples else 0.0
        calls = (grid.chunks_per_sample if in_pieces else 1) / setting.chunk_samples
        return self._reads_of(setting, amplification, calls, in_pieces=in_pieces)

    def _cached_reads(self, setting: Setting, grid: ChunkGrid, order: Order, seconds: float) -> Reads:
        """Return the reads of the first worker through HDF5's chunk cache."""
        workers, cache = max(1, setting.num_workers), cache_of(setting, self.facts)
        batches = (batch for number, batch in enumerate(order.batches()) if number % workers == 0)
        replay = replay_batches(grid, cache, batches, ACCESSES, max(LEAST_REPLAY_S, seconds))
        amplification = replay.chunk_bytes / max(1, replay.num_samples * grid.sample_bytes)
        if cache.nbytes >= grid.chunk_bytes and order.window_batches > 1:  # each chunk is read once an epoch
            epoch_bytes = order.num_samples * grid.sample_bytes
            amplification = min(amplification, grid.band_bytes * order.num_chunks / epoch_bytes)
        calls, hit_rate = replay.num_calls / max(1, replay.num_samples), 1 - replay.misses / max(1, replay.num_accesses)
        return self._reads_of(setting, amplification, calls, hit_rate)

    def _reads_of(
        self,
        setting: Setting,
        amplification: float,
        calls: float,
        hit_rate: float | None = None,
        in_pieces: bool = False,
    ) -> Reads:
        """Return the reads of the largest field with this amplification, and of the others without one."""
        grid, stored = grid_of(setting, self.facts), 1.0 if setting.repack else self.study.stored_share
        used = grid.sample_bytes * amplification
        bytes_read = used * stored + self.facts.sample_bytes - grid.sample_bytes
        return Reads(bytes_read, used if grid.filtered or in_pieces else 0.0, calls, amplification, hit_rate)

    def _effective(self, setting: Setting) -> float | None:
        """Return the effective batch size on the whole data; None if no field marks similar samples."""
        if self.study.groups is None:
            return None
        if setting.shuffle:
            return float(self.facts.batch_samples)
        return effective_batch(self.clustering(setting.chunk_samples), order_of(setting, self.facts))

    def _clustering(self, chunk_samples: int) -> Clustering:
        assert self.study.groups is not None
        return find_clustering(self.study.groups, chunk_samples)

    def stages(self, setting: Setting) -> dict[str, float]:
        """Return the seconds of each stage, per sample."""
        window = min(window_samples(setting, self.facts), self.facts.num_samples)
        return stage_times(setting, self.facts, window, self._reads(setting), self.machine)

    def _modelled_rate(self, setting: Setting) -> float:
        return 1 / max(1e-12, sum(self.stages(setting).values()))

    def rate(self, setting: Setting, *, alone: bool = False) -> float:
        """Predict samples/s, corrected by measurements; with ``alone``, only by those of other settings."""
        return self._modelled_rate(setting) * self._correction.factor(setting, alone=alone)

    def learn(self, setting: Setting, measured: float) -> None:
        """Correct the model by the measured rate of a setting."""
        self._correction.learn(setting, measured / self._modelled_rate(setting))

    def plain(self, cache: CacheSettings) -> tuple[Reads, float]:
        """Predict reads per sample and samples/s of plain h5py, which reads single random samples."""
        setting = Setting(DATASET, self.facts.chunk_samples, 1)
        reads = Reads(self.facts.sample_bytes, 0.0, 1.0, 1.0, None)
        if self.facts.grid.chunks is not None and not self.study.matrix:
            reads = self._reads_of(setting, *self._replay_plain(self.facts.grid, cache))
        return reads, 1 / max(1e-12, sum(stage_times(setting, self.facts, 1, reads, self.machine).values()))

    def _replay_plain(self, grid: ChunkGrid, cache: CacheSettings) -> tuple[float, float, float]:
        """Return amplification, calls and hit rate of random samples: the first half of them warms the cache."""
        count = max(16, min(MOST_SAMPLES, ACCESSES // grid.chunks_per_sample))
        accesses = sample_accesses(grid, np.random.default_rng(0).integers(0, self.facts.num_samples, 2 * count))
        half = len(accesses) // 2
        read = ChunkCache(grid, cache).access(accesses).outcomes[half:] != HIT
        straight = not grid.filtered and grid.chunk_bytes > cache.nbytes
        num_bytes = accesses.bytes_each[half:] if straight else np.full(len(read), grid.chunk_bytes)
        return float(num_bytes[read].sum()) / (count * grid.sample_bytes), 1.0, 1 - float(read.mean())
