"""Probe the rates of this machine for the cost model of `h5chunk tune`."""

from __future__ import annotations

import math
import time
from contextlib import closing

import numpy as np

from h5chunk.machine import available_cores
from h5chunk.store.hdf5.open import open_file
from h5chunk.store.read.fields import Field
from h5chunk.tools.measure.disk import FileReads, cut, large
from h5chunk.tools.measure.machine import NotMeasured, available_bytes, device_copy, memory_copy, threads_rate
from h5chunk.tools.model.cost import Machine
from h5chunk.tools.progress import TimeBudget
from h5chunk.tools.tune.study import Study

WARM_SHARE, EACH_SHARE = 0.1, 0.01  # of the budget
HOP_PART = 0.3  # of copying: fresh pages of shared memory, and a file descriptor, for each batch of a worker
MOST_CALLS = 2000
CALL_S = 20e-6  # of HDF5, where it is not measured
LEAST_CALL_S = 2e-6


def probe(study: Study, device: str, budget: TimeBudget) -> Machine:
    """Measure the rates of the stages, and fill the page cache with the samples to measure later."""
    seconds = max(0.01, EACH_SHARE * budget.seconds)
    cores = available_cores()
    memory_rate = memory_copy(1 << 20, cores, available_bytes() // 8)
    copy_rate = max(memory_rate(1, seconds / 2) for _ in range(2))
    read_rate = _read_rate(study, budget, cores, seconds)
    device_rate = math.inf
    if device != "cpu":
        with device_copy(device) as rate:
            device_rate = rate(seconds)
    return Machine(
        num_cores=cores,
        read_rate=copy_rate * cores / 2 if read_rate is None else read_rate,
        copy_rate=copy_rate,
        call_s=_call_seconds(study, copy_rate, seconds),
        decode_rate=_decode_rate(study, seconds),
        hop_rate=HOP_PART * copy_rate,
        device_rate=device_rate,
    )


def _read_rate(study: Study, budget: TimeBudget, cores: int, seconds: float) -> float | None:
    """Measure stored bytes/s from the page cache with all cores; None if the bytes lie in other files."""
    if study.matrix:
        return None
    try:
        reads = FileReads(study.reader)
    except NotMeasured as reason:
        study.note(f"reads of the file itself are not measured: {reason}")
        return None
    with closing(reads):
        cached, _ = reads.fill_page_cache(cores, WARM_SHARE * budget.seconds, available_bytes() // 2)
        study.num_measured = min(max(cached, study.facts.batch_size), study.num_measured)
        runs = cut(large(reads.head(study.num_measured)))
        return max(reads.rate(runs, cores, seconds, again=True) for _ in range(2))


def _call_seconds(study: Study, copy_rate: float, seconds: float) -> float:
    """Measure the seconds of an HDF5 call for one sample, without the time to copy its bytes."""
    main, reader = study.reader.main, study.reader
    if study.matrix or main.grid.sample_bytes > (1 << 20):
        return CALL_S
    row, out = np.zeros(1, np.int64), np.empty((1, *main.sample_shape), main.dtype)
    reader.set_caches(reader.main.grid.cache_for(1))
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
    """Measure bytes/s of decoding the first chunk, or of assembling samples, by HDF5; infinite if neither is needed."""
    main = study.reader.main
    if not isinstance(main, Field) or not main.grid.chunks:
        return math.inf
    if not main.grid.filtered and (main.grid.chunks_per_sample == 1 or not study.facts.direct):
        return math.inf
    with open_file(study.reader.path, rdcc_nbytes=1, rdcc_nslots=1, rdcc_w0=0.0) as file:  # each call decodes
        dataset = file[main.dataset]
        first = tuple(slice(0, size) for size in main.grid.chunks)

        def read_chunk(_thread: int) -> int:
            dataset[first]
            return main.grid.chunk_bytes

        return threads_rate(read_chunk, 1, seconds)
