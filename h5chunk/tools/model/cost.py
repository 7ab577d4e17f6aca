"""Model the time of each stage of a setting from the probed rates of the machine.

Times are seconds per sample, divided by the threads or processes of a stage. A setting takes their sum times a factor,
which is learned from measured settings of its kind: similar settings have the largest weight.

>>> from h5chunk.plan.cache import ChunkGrid
>>> machine = Machine(num_cores=2, read_rate=4e9, copy_rate=8e9, call_s=20e-6, decode_rate=400e6, hop_rate=2e9)
>>> reads = Reads(bytes_read=150_000, decoded=0, calls=1 / 8, amplification=1.0, hit_rate=None)
>>> facts = DataFacts(ChunkGrid((1000, 150_000), (8, 150_000), 1), 150_000, 8, batch_size=256, window_chunks=9)
>>> stages = stage_times(Setting("loader", 8, 9), facts, 256, reads, machine)
>>> {name: round(1e6 * seconds, 1) for name, seconds in stages.items()}  # microseconds a sample
{'read': 37.5, 'decode': 0.0, 'windows': 1.0, 'batches': 0.2, 'copy to device': 0.0}
>>> slowest(stages)
'read'
>>> correction = Correction(facts)
>>> correction.learn(Setting("loader", 8, 9), 0.5)
>>> correction.factor(Setting("loader", 8, 9)), correction.factor(Setting("dataset", 8, 9, 2))
(0.5, 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from h5chunk.tools.model.settings import LOADER, DataFacts, Setting, uses_hdf5, window_samples

WINDOW_S, BATCH_S = 220e-6, 50e-6  # of Python, a window of the loader and a batch; scripts/LOG.md
READ_S = 3e-6  # of a processor, each chunk that is read by its byte range
SAMPLE_S = 0.3e-6  # of drawing orders, and of tables of addresses
ROUND_S = 400e-6  # of a batch that a worker hands over
NEAR = 1.0  # settings that differ by a factor of two count half as much as the same one


@dataclass(frozen=True)
class Machine:
    """Probed rates of a machine, in bytes/s."""

    num_cores: int
    read_rate: float  # of the file's chunks from the page cache, all cores together
    copy_rate: float  # within memory, one core
    call_s: float  # seconds of a call of HDF5 that reads one sample, without the bytes
    decode_rate: float = math.inf  # one core, of chunks, or of samples put together from several; infinite for neither
    hop_rate: float = math.inf  # from workers to the main process, all workers together
    device_rate: float = math.inf  # to the device; infinite for the CPU


@dataclass(frozen=True)
class Reads:
    """Reads of a setting, per delivered sample."""

    bytes_read: float  # of the file
    decoded: float  # bytes that filters gave, or that were put together from several chunks
    calls: float  # of HDF5, or chunks read by their byte ranges
    amplification: float  # decoded bytes read over bytes used
    hit_rate: float | None  # of HDF5's chunk cache; None: it is not asked


def stage_times(
    setting: Setting, facts: DataFacts, window_samples: int, reads: Reads, machine: Machine
) -> dict[str, float]:
    """Estimate the seconds per sample of each stage."""
    hdf5 = uses_hdf5(setting, facts)
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
    """Return the stage that takes most of the time."""
    return max(stages, key=lambda name: stages[name])


_Spot = tuple[tuple[str, int, bool], tuple[float, float]]  # kind of a setting, and its place within the kind


class Correction:
    """Learn the model's error from measured settings, as a factor of the rate of similar settings."""

    def __init__(self, facts: DataFacts) -> None:
        self._facts = facts
        self._known: list[tuple[_Spot, float]] = []

    def _spot(self, setting: Setting) -> _Spot:
        """Return a setting's kind and coordinates; `ChunkLoader` through HDF5 is another kind than by byte ranges."""
        through = " through HDF5" if setting.way == LOADER and uses_hdf5(setting, self._facts) else ""
        window_bytes = window_samples(setting, self._facts) * self._facts.sample_bytes
        place = math.log2(max(1, setting.chunk_samples)), math.log2(max(1, window_bytes))
        return (setting.way + through, setting.num_workers, setting.repack), place

    def learn(self, setting: Setting, ratio: float) -> None:
        """Add a measured setting, with the ratio of measured to predicted rate."""
        self._known.append((self._spot(setting), math.log(ratio)))

    def factor(self, setting: Setting, *, alone: bool = False) -> float:
        """Return the correction factor of the predicted rate; 1 if no setting of this kind was measured.

        With ``alone``, measurements of this setting itself are left out, to judge the model by the other settings.
        """
        kind, (chunk, window) = self._spot(setting)
        known = [(spot, error) for spot, error in self._known if not (alone and spot == (kind, (chunk, window)))]
        for parts in (3, 2, 1):  # of the same way, number of workers and layout; without the layout; of the same way
            same = [(place, error) for (other, place), error in known if other[:parts] == kind[:parts]]
            if same:
                break
        else:
            return 1.0
        errors = [(abs(place[0] - chunk) + abs(place[1] - window), error) for place, error in same]
        itself = [each for each in errors if each[0] == 0]  # perhaps several times
        weights = [(1 / (NEAR + distance) ** 2, error) for distance, error in itself or errors]
        return math.exp(sum(weight * error for weight, error in weights) / sum(weight for weight, _ in weights))
