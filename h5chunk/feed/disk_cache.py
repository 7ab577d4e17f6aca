"""Limit the size of the local cache of remote objects."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

import numpy as np

from h5chunk.errors import OptionError, exact_bytes
from h5chunk.plan.selection import FixedSelection, Selection
from h5chunk.remote.mirror import Hold, Mirror, page_runs
from h5chunk.remote.pages import GAP_PAGES, PAGE, Runs
from h5chunk.store.read.samples import FieldReader
from h5chunk.store.read.source import Source

TABLE_BYTES = 2 * PAGE  # for blocks in which a file system lists the extents of a sparse file, and counts as its size

Wanted = Mapping[Mirror, Runs]  # pages that are about to be read


class DiskCache:
    """The cache of a reader's remote objects, limited to the ``cache_bytes`` of their options.

    ``fields`` has the readers of its fields.
    """

    def __init__(self, reader: Source, fields: Mapping[str, FieldReader]) -> None:
        self._reader = reader
        self._mirrors = list(dict.fromkeys(mirror for mirror in reader.mirrors if mirror is not None))
        limits = [each.cache_bytes for each in self._mirrors if each.cache_bytes is not None]
        self._limit = min(limits, default=None)
        self._fields = fields
        self.pending_bytes = 0  # of pages that are being fetched

    def make_room(self, wanted: Wanted, num_windows: int = 1) -> int:
        """Free pages so that the missing pages of ``wanted`` fit, and return the size of those in bytes.

        ``num_windows`` is the number of windows that are read at the same time. Raises OptionError if they do not fit.
        """
        if self._limit is None:
            return 0
        needed = num_windows * PAGE * sum(stop - first for each in wanted.values() for first, stop in each)
        if needed > self._limit:
            raise OptionError(
                f"cache_bytes is {exact_bytes(self._limit)}, but the windows that are read at the same time need "
                f"{exact_bytes(needed)}: pass a cache_bytes of at least {needed}"
            )
        absent = PAGE * sum(_num_fetched(mirror.pages.absent(each)) for mirror, each in wanted.items())
        excess = absent + self.pending_bytes + self._disk_bytes() + TABLE_BYTES - self._limit
        if absent and excess > 0:
            self._free(excess)
        return absent

    def hold_all(self, selection: Selection | None, names: Collection[str]) -> Hold | None:
        """Hold all data of the fields ``names`` that an epoch may use. Return None if some of it is not cached."""
        samples = selection.samples if isinstance(selection, FixedSelection) else None
        wanted: dict[Mirror, list[tuple[np.ndarray, np.ndarray]]] = {}
        for number, mirror in enumerate(self._reader.mirrors):
            if mirror is None:
                continue
            for offsets, sizes, starts, stops in self._chunks(number, names):
                some = np.ones(len(starts), bool)
                if samples is not None:
                    some = np.searchsorted(samples, starts) < np.searchsorted(samples, stops)
                wanted.setdefault(mirror, []).append((offsets[some], sizes[some]))
        runs = {mirror: page_runs(*map(np.concatenate, zip(*each, strict=True))) for mirror, each in wanted.items()}
        if any(not mirror.keeps or mirror.pages.absent(each) for mirror, each in runs.items()):
            return None
        hold = Hold(runs)
        if not hold.absent:
            return hold
        hold.close()  # some pages were evicted in the meantime
        return None

    def _disk_bytes(self) -> int:
        return sum(mirror.pages.disk_bytes for mirror in self._mirrors)

    def _free(self, excess: int) -> None:
        """Free pages from the end of the last file on, so that the same pages stay from epoch to epoch.

        A cache for half of the data then serves 49 % of the reads of shuffled epochs. It would be 50 % if those pages
        were freed whose next use is furthest away, and 29 % if pages were freed at random.
        """
        for mirror in reversed(self._mirrors):
            pages = np.flatnonzero(np.frombuffer(mirror.pages.present(), np.uint8) & 1)
            while excess > 0 and len(pages):  # pages that are in use stay, so that others must be freed instead
                pages, last = np.split(pages, [-min(len(pages), -(-excess // PAGE))])
                before = mirror.pages.disk_bytes
                mirror.pages.free([(int(last[0]), int(last[-1]) + 1)])
                excess -= before - mirror.pages.disk_bytes

    def _chunks(self, number: int, names: Collection[str]) -> Iterator[tuple[np.ndarray, ...]]:
        """For each field, yield the offsets, sizes, first samples and end samples of its chunks in a file."""
        for name in names:
            yield from self._fields[name].block_rows(number)


def _num_fetched(runs: Runs) -> int:
    """Return how many pages the requests for absent runs fetch, with the pages between runs that share a request."""
    gaps = (first - stop for (_, stop), (first, _) in pairwise(sorted(runs)))
    return sum(stop - first for first, stop in runs) + sum(gap for gap in gaps if gap <= GAP_PAGES)
