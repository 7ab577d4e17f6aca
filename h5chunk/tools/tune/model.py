"""The cost model of one study: for each setting its rate, memory and quality, predicted, and corrected as it learns."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.order import Order
from h5chunk.tools.model.accesses import find_accesses
from h5chunk.tools.model.choose import Candidate
from h5chunk.tools.model.clustering import LEAST_CHANCE, Clustering, find_clustering
from h5chunk.tools.model.cost import Batch, Correction, Machine, Reads, stage_times
from h5chunk.tools.model.hdf5_cache import HIT, ChunkCache
from h5chunk.tools.model.mixing import design_effect
from h5chunk.tools.model.row_reads import replay_batches
from h5chunk.tools.model.settings import DATASET, Setting, cache_of, grid_of, memory_of, order_of
from h5chunk.tools.tune.study import Study

ACCESSES = 20_000  # replayed to predict a setting
MOST_SAMPLES = 4096  # that h5py's own way is replayed for
LEAST_REPLAY_S = 2e-3  # of a setting: some batches of it


@dataclass
class Model:
    """Predicts settings.

    Attributes
    ----------
    study : Study
    machine : Machine
    correction : Correction
    replay_s : float
        The most that predicting what one setting reads may take: a loop over batches, long where these are small.
    """

    study: Study
    machine: Machine
    correction: Correction = field(default_factory=Correction)
    replay_s: float = math.inf

    def __post_init__(self) -> None:
        self.reads = lru_cache(None)(self._reads)
        self.effective = lru_cache(None)(self._effective)
        self.clustering = lru_cache(None)(self._clustering)

    def uses_hdf5(self, setting: Setting) -> bool:
        """Whether reading goes through HDF5."""
        return setting.way == DATASET or not (self.study.facts.direct or setting.repack)

    def all_reads(self, setting: Setting) -> Reads:
        """What it reads, a sample, however long that takes to predict."""
        return self._reads(setting, math.inf)

    def _reads(self, setting: Setting, seconds: float | None = None) -> Reads:
        """What it reads, a sample."""
        study = self.study
        grid, order = grid_of(setting, study.facts), order_of(setting, study.facts)
        stored = study.stored_share if not setting.repack else 1.0
        rest = study.facts.sample_bytes - grid.sample_bytes
        if grid.chunks is None or study.matrix or not self.uses_hdf5(setting):
            in_pieces = not study.matrix and grid.chunks_per_sample > 1
            amplification = _window_amplification(order) if grid.filtered and not study.matrix else 1.0
            main = grid.sample_bytes * amplification
            decoded = main if grid.filtered or in_pieces else 0.0
            calls = (grid.chunks_per_sample if in_pieces else 1) / setting.chunk_samples
            return Reads(main * stored + rest, decoded, calls, amplification, None)
        workers = max(1, setting.num_workers)
        cache = cache_of(setting, study.facts)
        batches = (batch for number, batch in enumerate(order.batches()) if number % workers == 0)
        some = _within(batches, self.replay_s if seconds is None else seconds)
        replay = replay_batches(grid, cache, some, most_accesses=ACCESSES)
        amplification = replay.chunk_bytes / max(1, replay.num_samples * grid.sample_bytes)
        if cache.nbytes >= grid.chunk_bytes and order.window_batches > 1:
            amplification = min(amplification, _whole_epoch(order, grid.band_bytes / max(1, grid.sample_bytes)))
        decoded = amplification * grid.sample_bytes if grid.filtered else 0.0
        read = amplification * grid.sample_bytes * stored + rest
        return Reads(read, decoded, replay.num_calls / max(1, replay.num_samples), amplification, replay.hit_rate)

    def _effective(self, setting: Setting) -> float | None:
        """Effective batch, of the whole data."""
        study = self.study
        if study.groups is None:
            return None
        if setting.shuffle:
            return float(min(study.facts.batch_size, study.facts.num_samples))
        order = order_of(setting, study.facts)
        clustering = self.clustering(setting.chunk_samples)
        batch = min(order.batch_size, order.num_samples)
        if clustering.chance >= LEAST_CHANCE:  # no more than a shuffled file shows
            return float(batch)
        deff = design_effect(clustering, order)
        return min(float(batch), batch / deff) if deff else float(batch)

    def _clustering(self, chunk_samples: int) -> Clustering:
        assert self.study.groups is not None
        return find_clustering(self.study.groups, chunk_samples)

    def memory(self, setting: Setting) -> int:
        """Bytes that feeding takes."""
        return memory_of(setting, self.study.facts)

    def window_bytes(self, setting: Setting) -> float:
        """Bytes of a window."""
        order = order_of(setting, self.study.facts)
        return float(order.window_batches * order.batch_size * self.study.facts.sample_bytes)

    def stages(self, setting: Setting) -> dict[str, float]:
        """Seconds of each stage, a sample."""
        order, facts = order_of(setting, self.study.facts), self.study.facts
        window = min(order.window_batches * order.batch_size, facts.num_samples)
        batch = Batch(facts.sample_bytes, min(facts.batch_size, facts.num_samples), window, facts.given_bytes)
        return stage_times(setting, batch, self.reads(setting), self.machine, hdf5=self.uses_hdf5(setting))

    def modelled_rate(self, setting: Setting) -> float:
        """Samples/s, uncorrected."""
        return 1 / max(1e-12, sum(self.stages(setting).values()))

    def rate(self, setting: Setting) -> float:
        """Samples/s, corrected by what was measured."""
        return self.modelled_rate(setting) * self.correction.factor(
            setting, self.window_bytes(setting), hdf5=self.uses_hdf5(setting)
        )

    def rate_by_others(self, setting: Setting) -> float:
        """Samples/s as the model has it, corrected by the other settings that were measured."""
        factor = self.correction.factor(setting, self.window_bytes(setting), alone=True, hdf5=self.uses_hdf5(setting))
        return self.modelled_rate(setting) * factor

    def learn(self, setting: Setting, measured: float) -> None:
        """A setting was measured."""
        modelled = self.modelled_rate(setting)
        self.correction.learn(
            setting,
            self.window_bytes(setting),
            modelled=modelled,
            measured=measured,
            hdf5=self.uses_hdf5(setting),
        )

    def candidate(self, setting: Setting, rate: float | None = None) -> Candidate:
        """A setting with what it gives, as predicted unless a rate is given."""
        found = self.rate(setting) if rate is None else rate
        return Candidate(setting, found, self.memory(setting), self.effective(setting))

    def plain(self, cache: CacheSettings) -> tuple[Reads, float]:
        """What single random samples of plain h5py read, and their rate."""
        facts, machine = self.study.facts, self.machine
        grid = facts.grid
        rest = facts.sample_bytes - grid.sample_bytes
        if grid.chunks is None or self.study.matrix:
            reads = Reads(facts.sample_bytes, 0.0, 1.0, 1.0, None)
        else:
            count = max(16, min(MOST_SAMPLES, ACCESSES // grid.chunks_per_sample))
            rows = np.random.default_rng(0).integers(0, facts.num_samples, 2 * count)
            accesses = find_accesses(grid, rows)
            replay = ChunkCache(grid, cache).access(accesses)
            half = len(accesses) // 2
            read = replay.outcomes[half:] != HIT
            straight = not grid.filtered and grid.chunk_bytes > cache.nbytes
            each = accesses.bytes_each[half:] if straight else np.full(len(read), grid.chunk_bytes)
            amplification = float(each[read].sum()) / (count * grid.sample_bytes)
            decoded = amplification * grid.sample_bytes if grid.filtered else 0.0
            main = amplification * grid.sample_bytes * self.study.stored_share
            reads = Reads(main + rest, decoded, 1.0, amplification, 1 - float(read.mean()))
        stages = stage_times(
            Setting(DATASET, facts.chunk_samples, 1), Batch(facts.sample_bytes, facts.batch_size, 1), reads, machine
        )
        return reads, 1 / max(1e-12, sum(stages.values()))


def _within(batches: Iterable[np.ndarray], seconds: float) -> Iterator[np.ndarray]:
    """Batches for so long; at least one."""
    until = time.perf_counter() + max(LEAST_REPLAY_S, seconds)
    for batch in batches:
        yield batch
        if time.perf_counter() >= until:
            return


def _window_amplification(order: Order) -> float:
    """Chunks read over chunks there are, where windows that cut chunks read them again."""
    window = order.window_batches * order.batch_size
    return _whole_epoch(order, 1.0) if window % order.chunk_samples == 0 else 1 + order.chunk_samples / window


def _whole_epoch(order: Order, band: float) -> float:
    """Decoded bytes over those used, if each chunk is read once: the last one may be short."""
    return band * order.num_chunks / max(1, order.num_samples) if band > 1 else 1.0
