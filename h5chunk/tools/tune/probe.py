"""What this machine gives: the rates of single stages, for the cost model of `h5chunk tune`."""

from __future__ import annotations

import math
import os
import time
from contextlib import ExitStack, suppress

import h5py
import numpy as np

from h5chunk.store.format import open_file
from h5chunk.store.read.decoded import DecodedChunks, NotDirect
from h5chunk.store.read.direct import direct_field
from h5chunk.store.read.fields import Field
from h5chunk.store.read.ranges import open_descriptor
from h5chunk.store.read.reader import model_cache
from h5chunk.store.write.fill import available_cores
from h5chunk.tools.measure.disk import DiskRead, FileReads, cut, locate
from h5chunk.tools.measure.machine import MemoryCopy, NotMeasured, available_bytes
from h5chunk.tools.model.cost import Machine
from h5chunk.tools.tune.clock import Budget
from h5chunk.tools.tune.study import Study

WARM_SHARE, DISK_SHARE, EACH_SHARE = 0.1, 0.04, 0.01
HOP_PART = 0.3  # of copying: fresh pages of shared memory, and a file descriptor, for each batch of a worker
MOST_CALLS = 2000


def probe(study: Study, device: str, budget: Budget) -> Machine:
    """Rates of the stages; fills the page cache with what is measured later, and notes how much that is."""
    seconds = max(0.01, EACH_SHARE * budget.seconds)
    cores = available_cores()
    memory = MemoryCopy(1 << 20, cores, available_bytes() // 8)
    copy_rate = max(memory.rate(1, seconds / 2) for _ in range(2))
    read_rate, disk_rate = _read_rates(study, budget, cores, seconds, copy_rate)
    return Machine(
        num_cores=cores,
        read_rate=read_rate,
        copy_rate=copy_rate,
        call_s=_call_seconds(study, copy_rate, seconds),
        decode_rate=_decode_rate(study, seconds),
        hop_rate=HOP_PART * copy_rate,
        device_rate=_device_rate(device, seconds),
        disk_rate=disk_rate,
    )


def _read_rates(
    study: Study, budget: Budget, cores: int, seconds: float, copy_rate: float
) -> tuple[float, float | None]:
    """From the page cache by all cores, and from the disk; stored bytes/s."""
    try:
        stored = locate(study.reader) if not study.matrix else None
    except NotMeasured as reason:
        study.notes.append(f"reads of the file itself are not measured: {reason}")
        stored = None
    if stored is None:
        return copy_rate * cores / 2, None
    reads, disk_rate = FileReads(stored.path), None
    with ExitStack() as closing:
        closing.callback(reads.close)
        if study.converted:
            try:
                disk_rate = DiskRead(reads, stored.chunks()).rate(DISK_SHARE * budget.seconds)
            except NotMeasured as reason:
                study.notes.append(f"the disk is not measured: {reason}")
        room = available_bytes() // 2
        fitting = max(1, int(np.searchsorted(np.cumsum(stored.sizes), room, side="right")))
        ranges = list(zip(stored.offsets[:fitting].tolist(), stored.sizes[:fitting].tolist(), strict=True))
        pieces = cut(ranges)
        reads.rate(pieces, cores, WARM_SHARE * budget.seconds, again=False)
        num_bytes = sum(size for _, size in pieces[: reads.num_read])
        if num_bytes < stored.num_bytes:
            reached = int(np.searchsorted(np.cumsum(stored.sizes), num_bytes, side="right"))
            reached = min(reached, len(stored.sizes) - 1)
            study.num_measured = max(int(stored.first_samples[reached]), study.facts.batch_size)
        study.num_measured = min(study.num_measured, study.reader.num_samples)
        runs = cut(stored.head(study.num_measured).chunks())
        rate = max(reads.rate(runs, cores, seconds, again=True) for _ in range(2))
    return rate, disk_rate


def _call_seconds(study: Study, copy_rate: float, seconds: float) -> float:
    """Of a call of HDF5 for one sample, from single samples that a cache holds or that are read straight."""
    rows = np.zeros(1, np.int64)
    main = study.reader.main
    if study.matrix or main.grid.sample_bytes > (1 << 20):
        return 20e-6
    out = np.empty((1, *main.sample_shape), main.dtype)
    study.reader.set_caches(model_cache(study.reader, 1))
    taken: list[float] = []
    deadline = time.perf_counter() + seconds
    study.reader.read(main.name, rows, out)
    while time.perf_counter() < deadline and len(taken) < MOST_CALLS:
        started = time.perf_counter()
        study.reader.read(main.name, rows, out)
        taken.append(time.perf_counter() - started)
    study.reader.close()
    return max(2e-6, float(np.median(taken or [20e-6])) - main.grid.sample_bytes / copy_rate)


def _decode_rate(study: Study, seconds: float) -> float:
    """Bytes/s of one core that decodes chunks, or puts samples together from several; infinite if neither is needed."""
    main = study.reader.main
    if not isinstance(main, Field) or not main.grid.chunks:
        return math.inf
    if main.grid.chunks_per_sample > 1 and study.facts.direct:
        return _piece_rate(study, main, seconds)
    if not main.grid.filtered:
        return math.inf
    with open_file(study.reader.path, rdcc_nbytes=1, rdcc_nslots=1, rdcc_w0=0.0) as file:  # each call decodes
        dataset = file[main.dataset]
        with suppress(NotDirect):
            return _decode_directly(study, dataset, seconds)
        started, done = time.perf_counter(), 0
        while time.perf_counter() < started + seconds or not done:
            dataset[tuple(slice(0, size) for size in main.grid.chunks)]
            done += 1
        return done * main.grid.chunk_bytes / (time.perf_counter() - started)


def _piece_rate(study: Study, main: Field, seconds: float) -> float:
    with open_file(study.reader.path) as file:
        field = direct_field(study.reader.path, file, main)
    rows = np.arange(min(main.grid.band_samples or 1, study.num_measured))
    out = np.empty((len(rows), main.grid.sample_bytes), np.uint8)
    places = np.random.default_rng(0).permutation(len(rows))
    descriptor = open_descriptor(study.reader.path)
    try:
        for part in field.parts(rows, places, out):
            part(descriptor)
        started, done = time.perf_counter(), 0
        while time.perf_counter() < started + seconds or not done:
            for part in field.parts(rows, places, out):
                part(descriptor)
            done += out.nbytes
        return done / (time.perf_counter() - started)
    finally:
        os.close(descriptor)
        field.forget()


def _decode_directly(study: Study, dataset: h5py.Dataset, seconds: float) -> float:
    chunks = DecodedChunks(study.reader.path, study.reader.main.name, dataset)
    number = max(1, study.num_measured // (study.reader.main.grid.band_samples or 1))  # of those in the page cache
    descriptor = open_descriptor(study.reader.path)
    try:
        chunks.whole(descriptor, 0)
        started, done = time.perf_counter(), 0
        while time.perf_counter() < started + seconds or not done:
            chunks.whole(descriptor, done % number)
            done += 1
        return done * chunks.chunk_bytes / (time.perf_counter() - started)
    finally:
        os.close(descriptor)
        chunks.forget()


def _device_rate(device: str, seconds: float) -> float:
    if device == "cpu":
        return math.inf
    from h5chunk.tools.measure.batches import DeviceCopy

    copy = DeviceCopy(device)
    try:
        return copy.rate(seconds)
    finally:
        copy.close()
