"""Probe this machine: the rates of single stages, for the cost model of `h5chunk tune`."""

from __future__ import annotations

import itertools
import math
import os
import time
from contextlib import ExitStack

import numpy as np

from h5chunk.store.format import open_file
from h5chunk.store.read.direct import NotDirect, direct_field
from h5chunk.store.read.fields import Field
from h5chunk.store.read.ranges import open_descriptor
from h5chunk.store.read.reader import model_cache
from h5chunk.store.write.fill import available_cores
from h5chunk.tools.measure.disk import DiskRead, FileReads, cut, locate
from h5chunk.tools.measure.machine import DeviceCopy, MemoryCopy, NotMeasured, available_bytes, repeated_rate
from h5chunk.tools.model.cost import Machine
from h5chunk.tools.progress import TimeBudget
from h5chunk.tools.tune.study import Study

WARM_SHARE, DISK_SHARE, EACH_SHARE = 0.1, 0.04, 0.01  # of the budget
HOP_PART = 0.3  # of copying: fresh pages of shared memory, and a file descriptor, for each batch of a worker
MOST_CALLS = 2000
CALL_S = 20e-6  # of HDF5, where it is not measured
LEAST_CALL_S = 2e-6


def probe(study: Study, device: str, budget: TimeBudget) -> Machine:
    """Measure the rates of the stages, and fill the page cache with the samples that are measured later."""
    seconds = max(0.01, EACH_SHARE * budget.seconds)
    cores = available_cores()
    memory = MemoryCopy(1 << 20, cores, available_bytes() // 8)
    copy_rate = max(memory.rate(1, seconds / 2) for _ in range(2))
    read_rate, disk_rate = _read_rates(study, budget, cores, seconds)
    return Machine(
        num_cores=cores,
        read_rate=copy_rate * cores / 2 if read_rate is None else read_rate,
        copy_rate=copy_rate,
        call_s=_call_seconds(study, copy_rate, seconds),
        decode_rate=_decode_rate(study, seconds),
        hop_rate=HOP_PART * copy_rate,
        device_rate=_device_rate(device, seconds),
        disk_rate=disk_rate,
    )


def _read_rates(study: Study, budget: TimeBudget, cores: int, seconds: float) -> tuple[float | None, float | None]:
    """Stored bytes/s from the page cache by all cores, and from the disk."""
    try:
        stored = locate(study.reader) if not study.matrix else None
    except NotMeasured as reason:
        study.note(f"reads of the file itself are not measured: {reason}")
        stored = None
    if stored is None:
        return None, None
    reads, disk_rate = FileReads(*stored.paths), None
    with ExitStack() as closing:
        closing.callback(reads.close)
        if study.converted:
            try:
                disk_rate = DiskRead(reads, stored.chunks()).rate(DISK_SHARE * budget.seconds)
            except NotMeasured as reason:
                study.note(f"the disk is not measured: {reason}")
        cached, _ = reads.fill_page_cache(stored, cores, WARM_SHARE * budget.seconds, available_bytes() // 2)
        study.num_measured = min(max(cached, study.facts.batch_size), study.num_measured)
        runs = cut(stored.head(study.num_measured).chunks())
        return max(reads.rate(runs, cores, seconds, again=True) for _ in range(2)), disk_rate


def _call_seconds(study: Study, copy_rate: float, seconds: float) -> float:
    """Seconds of a call of HDF5 for one sample, which a cache holds or which is read straight."""
    main, reader = study.reader.main, study.reader
    if study.matrix or main.grid.sample_bytes > (1 << 20):
        return CALL_S
    row, out = np.zeros(1, np.int64), np.empty((1, *main.sample_shape), main.dtype)
    reader.set_caches(model_cache(reader, 1))
    reader.read(main.name, row, out)
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline and len(taken) < MOST_CALLS:
        started = time.perf_counter()
        reader.read(main.name, row, out)
        taken.append(time.perf_counter() - started)
    reader.close()
    return max(LEAST_CALL_S, float(np.median(taken or [CALL_S])) - main.grid.sample_bytes / copy_rate)


def _decode_rate(study: Study, seconds: float) -> float:
    """Bytes/s of one core that decodes chunks, or puts samples together from several; infinite if neither is needed."""
    main = study.reader.main
    if not isinstance(main, Field) or not main.grid.chunks:
        return math.inf
    if not main.grid.filtered and (main.grid.chunks_per_sample == 1 or not study.facts.direct):
        return math.inf
    try:
        return _direct_rate(study, main, seconds)
    except NotDirect:
        return _hdf5_rate(study, main, seconds)


def _direct_rate(study: Study, main: Field, seconds: float) -> float:
    """Bytes/s of samples in whole chunks that are in the page cache, read by byte ranges."""
    path, band = study.reader.path, main.grid.band_samples or 1
    with open_file(path) as file:
        direct = direct_field(path, file, main)
    rows = np.arange(min(band, study.num_measured))
    places = np.random.default_rng(0).permutation(len(rows))
    out = np.empty((len(rows), main.grid.sample_bytes), np.uint8)
    numbers = itertools.count()
    num_bands = max(1, study.num_measured // band)

    def read_band() -> int:
        first = next(numbers) % num_bands * band
        for part in direct.parts(rows + first, places, out):
            part(descriptor)
        direct.forget()  # chunks that it keeps decoded
        return out.nbytes

    descriptor = open_descriptor(path)
    try:
        read_band()
        return repeated_rate(read_band, seconds)
    finally:
        os.close(descriptor)


def _hdf5_rate(study: Study, main: Field, seconds: float) -> float:
    """Decoded bytes/s of the first chunk, through HDF5."""
    with open_file(study.reader.path, rdcc_nbytes=1, rdcc_nslots=1, rdcc_w0=0.0) as file:  # each call decodes
        dataset = file[main.dataset]
        first = tuple(slice(0, size) for size in main.grid.chunks or ())

        def read_chunk() -> int:
            dataset[first]
            return main.grid.chunk_bytes

        return repeated_rate(read_chunk, seconds)


def _device_rate(device: str, seconds: float) -> float:
    if device == "cpu":
        return math.inf
    copy = DeviceCopy(device)
    try:
        return copy.rate(seconds)
    finally:
        copy.close()
