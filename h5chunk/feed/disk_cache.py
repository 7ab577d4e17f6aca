"""Limit the size of the local cache of remote objects. Data whose next use is furthest away is evicted first."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from h5chunk.errors import OptionError, exact_bytes
from h5chunk.feed.nodes import ranks_of_node
from h5chunk.plan.eviction import NextUses, uses_of_rows
from h5chunk.plan.order import Order
from h5chunk.plan.selection import FixedSelection
from h5chunk.remote.mirror import Hold, Mirror, page_runs
from h5chunk.remote.pages import PAGE
from h5chunk.store.hdf5.ranges import Ranges
from h5chunk.store.read.direct import ByteReader
from h5chunk.store.read.source import Source

LARGE_PAGES = 64  # chunks of at least this size keep their first and last page, which neighbours share
UNIT_PAGES = 256  # pages that are evicted together if no order is known

Wanted = Mapping[Mirror, Ranges]  # byte ranges that are about to be fetched


class DiskCache:
    """The cache of a reader's remote objects, limited to the ``cache_bytes`` of their options.

    ``direct`` has the fields that are read by byte ranges.
    """

    def __init__(self, reader: Source, direct: Mapping[str, ByteReader]) -> None:
        self._reader = reader
        self._mirrors = list(dict.fromkeys(each.mirror for each in reader.readers if each.mirror is not None))
        limits = [each.cache_bytes for each in self._mirrors if each.cache_bytes is not None]
        self._limit = min(limits, default=None)
        self._direct = direct
        self.pending_bytes = 0  # of pages that are being fetched
        self._uses: tuple[Order, NextUses] | None = None

    def make_room(
        self, wanted: Wanted, order: Order | None = None, position: tuple[int, int] = (0, 0), num_windows: int = 1
    ) -> int:
        """Evict chunks so that the missing pages of ``wanted`` fit.

        Chunks whose next use in ``order`` is furthest away are evicted first; without an order, random pages are.
        ``position`` is the epoch and batch that need the pages, and ``num_windows`` the number of windows that are read
        at the same time. Returns the size of the missing pages in bytes. Raises OptionError if the windows do not fit.
        """
        if self._limit is None:
            return 0
        runs = {mirror: page_runs(*ranges) for mirror, ranges in wanted.items()}
        needed = num_windows * PAGE * sum(stop - first for each in runs.values() for first, stop in each)
        if needed > self._limit:
            raise OptionError(
                f"cache_bytes is {exact_bytes(self._limit)}, but the windows that are read at the same time need "
                f"{exact_bytes(needed)}: pass a cache_bytes of at least {needed}"
            )
        absent = PAGE * sum(stop - first for mirror, each in runs.items() for first, stop in mirror.pages.absent(each))
        excess = absent + self.pending_bytes + self._disk_bytes() - self._limit
        if absent and excess > 0:
            self._free(excess, self._by_next_use(order, position) if order is not None else self._at_random())
        return absent

    def hold_all(self, order: Order, names: Collection[str]) -> list[Hold] | None:
        """Hold all data of the fields ``names`` that an epoch may use. Return None if some of it is not cached."""
        samples = order.selection.samples if isinstance(order.selection, FixedSelection) else None
        wanted: dict[Mirror, list[tuple[np.ndarray, np.ndarray]]] = {}
        for number, reader in enumerate(self._reader.readers):
            if reader.mirror is None:
                continue
            for offsets, sizes, starts, stops in self._chunks(number, names):
                first, some = int(self._reader.starts[number]), np.ones(len(starts), bool)
                if samples is not None:
                    some = np.searchsorted(samples, starts + first) < np.searchsorted(samples, stops + first)
                wanted.setdefault(reader.mirror, []).append((offsets[some], sizes[some]))
        runs = {mirror: page_runs(*map(np.concatenate, zip(*each, strict=True))) for mirror, each in wanted.items()}
        if any(not mirror.keeps or mirror.pages.absent(each) for mirror, each in runs.items()):
            return None
        holds = [Hold(mirror, each) for mirror, each in runs.items()]
        if not any(hold.absent for hold in holds):
            return holds
        for hold in holds:  # some pages were evicted in the meantime
            hold.drop()
        return None

    def _disk_bytes(self) -> int:
        return sum(mirror.pages.disk_bytes for mirror in self._mirrors)

    def _free(self, excess: int, candidates: Iterable[tuple[Mirror, int, int]]) -> None:
        for mirror, first, stop in candidates:
            before = mirror.pages.disk_bytes
            mirror.pages.free([(first, stop)])
            excess -= before - mirror.pages.disk_bytes
            if excess <= 0:
                return

    def _by_next_use(self, order: Order, position: tuple[int, int]) -> Iterator[tuple[Mirror, int, int]]:
        """Yield the runs of pages of cached chunks. Those whose next use is furthest away come first."""
        order = replace(order, epoch=0)
        if self._uses is None or self._uses[0] != order:
            ranks = ranks_of_node(order.rank, order.world_size)
            self._uses = order, NextUses(order, self._reader.num_samples, ranks)
        chunk_uses = self._uses[1].since(*position)
        found: list[tuple[int, int, int, int]] = []
        for number, reader in enumerate(self._reader.readers):
            if reader.mirror is None:
                continue
            there = np.frombuffer(reader.mirror.pages.present(), np.uint8)
            for offsets, sizes, starts, stops in self._chunks(number, self._direct):
                first_row = int(self._reader.starts[number])
                uses = uses_of_rows(chunk_uses, order.chunk_samples, starts + first_row, stops + first_row)
                firsts, ends = offsets // PAGE, (offsets + sizes) // PAGE
                firsts += sizes >= LARGE_PAGES * PAGE
                some = (ends > firsts) & (there[np.minimum((firsts + ends) // 2, len(there) - 1)] > 0)
                columns = (column[some].tolist() for column in (uses, firsts, ends))
                found += [(use, number, first, end) for use, first, end in zip(*columns, strict=True)]
        for _, number, first, end in sorted(found, reverse=True):
            mirror: Any = self._reader.readers[number].mirror
            yield mirror, first, end

    def _chunks(self, number: int, names: Collection[str]) -> Iterator[tuple[np.ndarray, ...]]:
        """For each field, yield the offsets, sizes, first samples and end samples of its chunks in a file."""
        for name in names:
            yield from self._direct[name].chunk_rows(number)

    def _at_random(self) -> Iterator[tuple[Mirror, int, int]]:
        """Yield the runs of cached pages in random order. For shuffled epochs, this has a higher hit rate than LRU."""
        found: list[tuple[Mirror, int, int]] = []
        for mirror in self._mirrors:
            there = np.flatnonzero(np.frombuffer(mirror.pages.present(), np.uint8) & 1) // UNIT_PAGES
            found += [(mirror, unit * UNIT_PAGES, (unit + 1) * UNIT_PAGES) for unit in np.unique(there).tolist()]
        random.shuffle(found)
        return iter(found)
