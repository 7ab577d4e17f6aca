"""Model the time of each stage of a setting from the probed rates of the machine.

The times are seconds per sample, shared among the threads or processes that work at a stage. A whole setting takes
their sum times a factor, which measured settings of the same way correct: nearby ones count most.

>>> from h5chunk.plan.cache import ChunkGrid
>>> machine = Machine(num_cores=2, read_rate=4e9, copy_rate=8e9, call_s=20e-6, decode_rate=400e6, hop_rate=2e9)
>>> reads = Reads(bytes_read=150_000, decoded=0, calls=1 / 8, amplification=1.0, hit_rate=None)
>>> facts = DataFacts(ChunkGrid((1000, 150_000), (8, 150_000), 1), 150_000, 8, batch_size=256, window_chunks=9)
>>> stages = stage_times(Setting("loader", 8, 9), facts, 256, reads, machine, hdf5=False)
>>> {name: round(1e6 * seconds, 1) for name, seconds in stages.items()}  # microseconds a sample
{'read': 37.5, 'decode': 0.0, 'windows': 1.0, 'batches': 0.2, 'copy to device': 0.0}
>>> slowest(stages)
'read'
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from h5chunk.tools.model.settings import LOADER, DataFacts, Setting

WINDOW_S, BATCH_S = 220e-6, 50e-6  # of Python, a window of the loader and a batch; scripts/LOG.md
READ_S = 3e-6  # of a processor, each chunk that is read by its byte range
SAMPLE_S = 0.3e-6  # of drawing orders, and of tables of addresses
ROUND_S = 400e-6  # of a batch that a worker hands over
NEAR = 1.0  # settings that differ by a factor of two count half as much as the same one


@dataclass(frozen=True)
class Machine:
    """Probed rates of a machine, in bytes/s.

    Attributes
    ----------
    num_cores : int
    read_rate : float
        Of the file's chunks from the page cache, all cores together.
    copy_rate : float
        Within memory, one core.
    call_s : float
        Seconds of a call of HDF5 that reads one sample, without the bytes.
    decode_rate : float
        Bytes of chunks decoded, or of samples put together from several chunks, one core; infinite where neither is.
    hop_rate : float
        From a worker to the main process, all workers together.
    device_rate : float
        To the device; infinite for the CPU.
    """

    num_cores: int
    read_rate: float
    copy_rate: float
    call_s: float
    decode_rate: float = math.inf
    hop_rate: float = math.inf
    device_rate: float = math.inf


@dataclass(frozen=True)
class Reads:
    """Reads of a setting, per delivered sample.

    Attributes
    ----------
    bytes_read : float
        Of the file.
    decoded : float
        Bytes that filters gave, or that were put together from several chunks.
    calls : float
        Of HDF5, or chunks read by their byte ranges.
    amplification : float
        Decoded bytes read over bytes used.
    hit_rate : float or None
        Of HDF5's chunk cache; None: it is not asked.
    """

    bytes_read: float
    decoded: float
    calls: float
    amplification: float
    hit_rate: float | None


def stage_times(
    setting: Setting, facts: DataFacts, window_samples: int, reads: Reads, machine: Machine, *, hdf5: bool
) -> dict[str, float]:
    """Seconds per sample of each stage; ``hdf5``: whether reading goes through HDF5."""
    one_core = machine.read_rate / machine.num_cores if hdf5 else machine.read_rate
    sharing = max(1, min(setting.num_workers, machine.num_cores)) if hdf5 else machine.num_cores
    workers = sharing if hdf5 else 1
    decode = reads.decoded / machine.decode_rate / sharing
    stages = {"read": reads.bytes_read / one_core / workers, "decode": decode}
    if hdf5:
        stages["HDF5"] = (reads.calls * machine.call_s + facts.sample_bytes / machine.copy_rate) / workers
    if setting.way == LOADER:
        ranges = 0.0 if hdf5 else reads.calls * READ_S / machine.num_cores
        stages["windows"] = WINDOW_S / window_samples + ranges
    elif setting.num_workers:
        stages["workers"] = ROUND_S / facts.batch_samples + facts.sample_bytes / machine.hop_rate
    stages["batches"] = BATCH_S / facts.batch_samples + (SAMPLE_S if window_samples > facts.batch_samples else 0)
    if facts.given_bytes:
        stages["make dense"] = facts.given_bytes / machine.copy_rate
    stages["copy to device"] = facts.sample_bytes / machine.device_rate
    return stages


def slowest(stages: Mapping[str, float]) -> str:
    """The stage that takes most of the time."""
    return max(stages, key=lambda name: stages[name])


class _Measured(NamedTuple):
    """A measured setting: its kind, its coordinates among settings of that kind, and the log error of the model."""

    kind: tuple[str, int, bool]
    place: tuple[float, float]
    error: float


@dataclass
class Correction:
    """Learns the model's error from measured settings, as a factor of the rate of similar settings.

    >>> correction = Correction()
    >>> correction.learn(Setting("loader", 8, 9), 1 << 20, modelled=1000.0, measured=500.0)
    >>> correction.factor(Setting("loader", 8, 9), 1 << 20), correction.factor(Setting("dataset", 8, 9, 2), 1 << 20)
    (0.5, 1.0)
    """

    known: list[_Measured] = field(default_factory=list)

    def learn(
        self, setting: Setting, window_bytes: float, *, modelled: float, measured: float, hdf5: bool = False
    ) -> None:
        """Add a measured setting; ``hdf5``: whether `ChunkLoader` had to read it through HDF5."""
        error = math.log(measured / modelled)
        self.known.append(_Measured(_kind(setting, hdf5), _place(setting, window_bytes), error))

    def factor(self, setting: Setting, window_bytes: float, *, alone: bool = False, hdf5: bool = False) -> float:
        """Correction factor of the model's rate; 1 where no setting of this way was measured.

        Parameters
        ----------
        setting : Setting
        window_bytes : float
        alone : bool
            Leave out what was measured of this very setting: the model is judged by what others say.
        hdf5 : bool
            As for `learn`: what byte ranges gave says nothing of it.
        """
        kind, place = _kind(setting, hdf5), _place(setting, window_bytes)
        known = [each for each in self.known if not (alone and (each.kind, each.place) == (kind, place))]
        same: list[_Measured] = []
        for parts in (3, 2, 1):  # of the same way, number of workers and layout; without the layout; of the same way
            same = same or [each for each in known if each.kind[:parts] == kind[:parts]]
        if not same:
            return 1.0
        away = [sum(abs(a - b) for a, b in zip(each.place, place, strict=True)) for each in same]
        if min(away) == 0:  # the setting itself, perhaps several times
            same = [each for each, distance in zip(same, away, strict=True) if distance == 0]
            away = [0.0] * len(same)
        weights = [1 / (NEAR + distance) ** 2 for distance in away]
        mean = sum(weight * each.error for weight, each in zip(weights, same, strict=True)) / sum(weights)
        return math.exp(mean)


def _kind(setting: Setting, hdf5: bool) -> tuple[str, int, bool]:
    way = f"{setting.way} through HDF5" if hdf5 and setting.way == LOADER else setting.way
    return way, setting.num_workers, setting.repack


def _place(setting: Setting, window_bytes: float) -> tuple[float, float]:
    return math.log2(max(1, setting.chunk_samples)), math.log2(max(1.0, window_bytes))
