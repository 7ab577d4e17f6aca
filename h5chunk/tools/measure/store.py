"""Measure the rate of range requests to an object store, and of loaders that read from it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any

import numpy as np

from h5chunk.errors import count_text
from h5chunk.remote.mirror import measure
from h5chunk.remote.objects import NUM_REQUESTS
from h5chunk.store.read.source import Source
from h5chunk.tools.measure.disk import locate
from h5chunk.tools.measure.machine import NotMeasured
from h5chunk.tools.measure.stages import DATALOADER, LIMITS, LOADER, Figure, Subject

STORE = "requests to the store"
ENOUGH = 0.8  # a loader that reaches this fraction of the rate of requests is limited by the store
REQUEST_BYTES = 4 << 20  # larger chunks are fetched by several requests
LATENCY_REQUESTS = 8
MOST_RANGES = 4096  # maximum number of ranges in a message to the process that makes the requests


class StoreRequests:
    """Make range requests for the chunks of a reader's remote objects, and discard the received bytes.

    Raises NotMeasured in the same cases as `locate`.
    """

    def __init__(self, reader: Source) -> None:
        self._mirrors = {number: mirror for number, mirror in enumerate(reader.mirrors) if mirror is not None}
        chunks = [each for each in locate(reader) if each.file in self._mirrors and each.size]
        self.num_bytes = sum(each.size for each in chunks)
        self.bytes_per_sample = self.num_bytes / max(1, reader.num_samples)
        sizes = np.sort([each.size for each in chunks])
        self.chunk_bytes = int(sizes[np.searchsorted(np.cumsum(sizes), self.num_bytes / 2)])  # weighted median
        self._options = next(iter(self._mirrors.values())).options.storage_options
        self.num_requests = int(self._options.get("requests", NUM_REQUESTS))
        self._random = np.random.default_rng(0)
        self._ranges = []
        for each in chunks:
            count = -(-each.size // REQUEST_BYTES)
            cuts = [each.offset + each.size * part // count for part in range(count + 1)]
            url = self._mirrors[each.file].url
            self._ranges += [(url, start, stop) for start, stop in pairwise(cuts)]

    def latency_s(self) -> float:
        """Return the median time of small requests, made one after another."""
        url = self._ranges[0][0]
        times = measure([(url, 0, 1)], 1, 60.0, self._options, LATENCY_REQUESTS)["times"]
        return statistics.median(times[1:])

    def rate(self, requests: int, seconds: float, request_bytes: int | None = None) -> float:
        """Return the bytes/s of ``requests`` concurrent requests, each for a random chunk or for ``request_bytes``."""
        ranges = self._ranges if request_bytes is None else self._cut(request_bytes)
        order = self._random.permutation(len(ranges))[:MOST_RANGES]
        found = measure([ranges[number] for number in order.tolist()], requests, seconds, self._options)
        return float(found["num_bytes"] / found["seconds"])

    def _cut(self, request_bytes: int) -> list[tuple[str, int, int]]:
        """Divide the objects into ranges of this size. A smaller object is a single range."""
        ranges = []
        for mirror in self._mirrors.values():
            num_bytes = mirror.pages.num_bytes
            starts = range(0, max(1, num_bytes - request_bytes + 1), max(1, request_bytes))
            ranges += [(mirror.url, start, min(num_bytes, start + request_bytes)) for start in starts]
        return ranges


def loader_rate(
    path: Any, fields: Mapping[str, str] | Sequence[str] | None, batch_size: int, seconds: float, **options: Any
) -> tuple[float, float]:
    """Return the seconds from opening a data set to its first batch, and the samples/s after that.

    ``options`` are options of `ChunkDataset`, the ``device`` of a `ChunkLoader`, and ``num_workers``, which measures a
    DataLoader instead of a `ChunkLoader`.
    """
    from h5chunk.feed.dataset import ChunkDataset
    from h5chunk.feed.sampler import ChunkSampler
    from h5chunk.tools.measure.batches import open_dataset, open_loader

    device, num_workers = options.pop("device", "cpu"), options.pop("num_workers", None)
    started = time.perf_counter()
    dataset = ChunkDataset(path, fields=fields, **options)
    order = ChunkSampler(dataset, batch_size).order
    batches = (
        open_loader(dataset, order, device=device, reuse=True)
        if num_workers is None
        else open_dataset(dataset, order, num_workers=num_workers)
    )
    with closing(batches):
        first_s = time.perf_counter() - started
        return first_s, batches.rate(seconds, 0.0)


def measure_store(subject: Subject, workers: Sequence[int]) -> tuple[list[Figure], list[str], int | None]:
    """Measure loaders, and bare requests for the chunks of remote objects.

    Returns figures, notes, and the stored size in bytes, or None if it is unknown.
    """
    try:
        requests = StoreRequests(subject.reader)
    except NotMeasured as reason:
        return [Figure(LIMITS, STORE, note=str(reason))], [], None
    seconds = subject.budget.seconds / (2 + 1 + len(workers))
    latency_s = requests.latency_s()
    rates = []

    def measure_requests() -> None:
        rates.append(requests.rate(requests.num_requests, seconds))
        subject.budget.report()

    def figure(group: str, name: str, **options: Any) -> Figure:
        options |= {"trusted": subject.reader.trusted}
        first_s, rate = loader_rate(subject.path, subject.fields, subject.batch_size, seconds, **options)
        subject.budget.report()
        limit = statistics.mean(rates) / requests.bytes_per_sample
        note = f"first batch after {first_s:.2f} s"
        return Figure(group, name, rate, rate * subject.sample_bytes, STORE, rate / limit, (rate,), note)

    measure_requests()
    loaders = [figure(LOADER, "reuse=True", device=subject.device)]
    measure_requests()
    loaders += [figure(DATALOADER, count_text(number, "worker"), num_workers=number) for number in workers]
    mean = statistics.mean(rates)
    note = f"{requests.num_requests} concurrent requests for chunks; one small request takes {1000 * latency_s:.0f} ms"
    samples_per_s = mean / requests.bytes_per_sample
    store = Figure(LIMITS, STORE, samples_per_s, mean, rates=tuple(rates), note=note)
    notes = ["no cache was used; with ChunkDataset(cache_dir=...), later epochs read from a local disk"]
    return [store, *loaders], notes, requests.num_bytes


def remote_verdict(figures: Sequence[Figure]) -> str:
    """Return a sentence that names the slower of the store and the loader, and how to speed it up."""
    loader = next((each for each in figures if each.group == LOADER), None)
    if loader is None or loader.ratio is None:
        return "Slowest stage: unknown, because nothing could be measured"
    share = f"{loader.samples_per_s or 0:,.0f} samples/s, {loader.ratio:.2f} times the rate of requests alone"
    if loader.ratio >= ENOUGH:
        remedy = (
            "cache_dir= makes later epochs as fast as local files, and h5chunk tune finds better requests and chunks"
        )
        return f"Slowest stage: the store. ChunkLoader delivers {share}; {remedy}"
    return f"Slowest stage: ChunkLoader ({share}). Raise its memory_bytes=, so that it reads further ahead"
