"""Replace samples that cannot be read by other samples of their batch: ``on_error="skip"`` of a data set.

If a batch, or a window of batches, cannot be read, its samples are read again in ever smaller parts, which tells which
of them are bad. The number of each bad sample is then replaced by that of a good one, and all fields are read again
through the ordinary path. So labels stay with their images, and nothing is different as long as all samples are good.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from h5chunk.errors import FileError, H5ChunkError, OptionError, count_text, is_of_data, printable
from h5chunk.plan.draws import MOST_REPEATS, REPEAT, Draws
from h5chunk.store.read.source import Source

RAISE, SKIP = "raise", "skip"
MAX_SKIPPED = 0.01  # default of the largest share of bad samples
PARTS = 8  # into which samples are divided that cannot be read together
NAMED = 3  # bad samples that an error names
STREAM = 1 << 21  # of random numbers that choose replacements; those of transforms have smaller numbers

Bad = dict[int, BaseException]  # the errors of samples by their numbers in the files
Errors = Callable[[Sequence[np.ndarray]], Sequence[BaseException | None]]


class OneBatch(NamedTuple):
    """The seed and the epoch of a batch, and the group of each of its samples; None if it has no groups."""

    seed: int
    epoch: int
    groups: list[Any] | None

    def groups_of(self, _numbers: np.ndarray) -> list[Any] | None:
        """Return the groups of the samples of the batch."""
        return self.groups


class BadSample(NamedTuple):
    """A sample that could not be read, and was replaced by another one.

    Attributes
    ----------
    number : int
        The number of the sample in the data set.
    name : str
        Its name, as in ``source_names`` of the data set, or "" if it has none.
    reason : str
        The message of the error, with the file and the place in it.
    """

    number: int
    name: str
    reason: str


class SkipLog:
    """The bad samples that any process has found: names and reasons by the number of the sample in the files.

    Workers of a DataLoader are other processes. All append to a temporary file of the process that made the log.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[str, str]] = {}
        self._read_bytes = 0
        descriptor, path = tempfile.mkstemp(prefix="h5chunk-skipped-")
        os.close(descriptor)
        self._path = Path(path)
        weakref.finalize(self, _remove, self._path, os.getpid())

    def add(self, found: dict[int, tuple[str, str]]) -> None:
        """Add samples, and tell other processes about them."""
        self._found.update(found)
        lines = b"".join(json.dumps([row, *texts]).encode() + b"\n" for row, texts in found.items())
        with suppress(OSError):  # the file is on another host, or its disk is full
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, lines)
            finally:
                os.close(descriptor)

    def found(self) -> dict[int, tuple[str, str]]:
        """Return the name and the reason for each bad sample that this or another process has found."""
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
            complete = text.rfind(b"\n") + 1
            self._read_bytes += complete
            for row, name, reason in map(json.loads, text[:complete].splitlines()):
                self._found.setdefault(row, (name, reason))
        return self._found


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:
        with suppress(OSError):
            path.unlink()


@dataclass(frozen=True)
class Skipping:
    """Finds samples of a data set that cannot be read, and replaces them by good ones.

    ``log`` has those that were found, also in other subsets of the files. More than ``max_skipped`` of the samples, a
    share from 0 to 1, are an error. ``subset`` has the numbers of the data set's samples in the ``source``, or is None
    for all; ``names_of`` returns the names of samples, given these numbers.
    """

    log: SkipLog
    max_skipped: float
    source: Source
    subset: np.ndarray | None
    names_of: Callable[[np.ndarray], np.ndarray]

    @property
    def bad_samples(self) -> list[BadSample]:
        """The bad samples of this data set that any process has found so far, in the order in which they were found."""
        return self.described(self._own(np.array(list(self.log.found()), np.int64)))

    def find(self, keys: np.ndarray, errors_of: Errors) -> Bad:
        """Read samples in ever smaller parts, and return the error of each that is bad, by its number in the files.

        ``keys``, (n,) int64, are the keys of the samples. ``errors_of`` tries to read the samples of several arrays of
        keys, and returns the error or None for each of them. As requests to object stores are repeated until a
        deadline, it then gets all samples, one by one, at the same time.

        Raises FileError if more than `max_skipped` of the data set's samples are bad, or for an error that is not due
        to damaged data.
        """
        keys = np.unique(keys)
        keys = keys[np.argsort(keys % REPEAT, kind="stable")]
        most = len(keys) if self.source.is_remote else PARTS
        bad: Bad = {}
        groups = [np.array_split(keys, min(most, len(keys)))]
        while groups and len(bad) <= self._limit:
            parts = groups.pop()
            for part, error in zip(parts, errors_of(parts), strict=True):
                if error is None:
                    continue
                if not is_of_data(error):
                    raise error
                if len(part) > 1:
                    groups.append(np.array_split(part, min(most, len(part))))
                else:
                    bad[int(part[0]) % REPEAT] = error
        self.source.check_unchanged()
        if bad:
            self._add(dict(sorted(bad.items())))
        return bad

    def replaced(
        self, keys: np.ndarray, sizes: int | Sequence[int], bad: Bad, order: Any
    ) -> tuple[np.ndarray, list[BadSample]]:
        """Replace the bad samples of some batches, and return the new keys, and the samples that were replaced.

        ``keys``, (n,) int64, are the keys of the samples, batch after batch, and ``sizes`` the number of samples in
        each batch. ``bad`` has what `find` returned. ``order`` has the seed, the epoch and the
        groups of samples.

        A replacement is a random sample of the same batch, and of the same group if the order has groups. It depends on
        the seed, the epoch and the bad sample. It is never longer than the bad sample if there is such a one, so that
        memory which was planned for the batch suffices. If all samples of a batch are bad, or all of a group, they are
        replaced by those of the next batch. Raises FileError if all samples are bad, or all of a group.
        """
        rows = keys % REPEAT
        is_bad = np.isin(rows, list(bad))
        if not is_bad.any():  # another read may succeed
            return keys, []
        if is_bad.all():
            own = {row: bad[row] for row in np.unique(rows).tolist()}
            raise FileError(f"{self._where}: all samples that are read together are bad: {_listed(own)}")
        keys = keys.copy()
        groups = order.groups_of(self._numbers(rows))
        for places, good in _batches_with_bad(is_bad, sizes, groups):
            if not len(good):
                raise self._no_others(int(rows[places[0]]), bad, None if groups is None else groups[places[0]])
            chosen = self._choose(rows, places, good, Draws(order.seed, order.epoch, keys[places]))
            # keys of other repetitions, for other random numbers
            keys[places] = chosen + REPEAT * (MOST_REPEATS - 1 - _occurrences(chosen))
        return keys, self.described(rows[is_bad])

    def remade(
        self, planned: np.ndarray, keys: np.ndarray, bad: Bad, order: Any, make: Callable[[np.ndarray], Any]
    ) -> tuple[np.ndarray, Any, list[BadSample]]:
        """Make a batch some of whose samples turn out to be bad only then, because their images cannot be decoded.

        ``planned`` and ``keys`` are the keys of its samples before and after those in ``bad``, which could not even be
        read, were replaced. ``make`` makes a batch of some of them. Returns the new keys, the batch, and the samples
        that were replaced.
        """

        def errors_of(parts: Sequence[np.ndarray]) -> list[FileError | None]:
            errors: list[FileError | None] = []
            for part in parts:
                error = None
                try:
                    make(part)
                except FileError as failure:
                    error = failure
                errors.append(error)
            return errors

        found = self.find(keys, errors_of)
        keys, _ = self.replaced(planned, len(planned), {**bad, **found}, order)
        return keys, make(keys), self.described(planned[np.isin(planned % REPEAT, list(found))])

    def described(self, keys: np.ndarray) -> list[BadSample]:
        """Return the names of bad samples, and what is wrong with them, given their keys."""
        rows = keys % REPEAT
        found, numbers = self.log.found(), self._numbers(rows).tolist()
        return [BadSample(number, *found[row]) for number, row in zip(numbers, rows.tolist(), strict=True)]

    def _no_others(self, row: int, bad: Bad, group: Any) -> FileError:
        """Return the error of a bad sample of whose group no good sample is read with it."""
        number = int(self._numbers(np.array([row]))[0])
        return FileError(
            printable(
                f"{self._where}: sample {number} of group {group!r} cannot be read, and no other sample of this group "
                "that is read with it can: repair the file, leave the sample out by dataset.subset, or pass a larger "
                f"batch_size. {_listed({row: bad[row]})}"
            )
        )

    def _choose(self, rows: np.ndarray, places: np.ndarray, good: np.ndarray, draws: Draws) -> np.ndarray:
        """Return a good sample for each bad one, given the samples ``rows``, and the places of both in them."""
        indptrs = [self.source.indptr_of(name) for name in self.source.ragged_fields]
        lengths = [
            np.array([indptr[some + 1] - indptr[some] for indptr in indptrs]) for some in (rows[good], rows[places])
        ]
        chosen = []
        for number, random in enumerate(draws.uniform(STREAM, 1)[0].tolist()):
            fitting = rows[good]
            if indptrs:
                fits = (lengths[0] <= lengths[1][:, number, None]).all(axis=0)
                fitting = fitting[fits] if fits.any() else fitting[[lengths[0].sum(axis=0).argmin()]]
            chosen.append(fitting[int(random * len(fitting))])
        return np.array(chosen, np.int64)

    def _add(self, bad: Bad) -> None:
        """Log bad samples, with a warning about the first one. Raise FileError if there are too many."""
        known = self.log.found()
        new = np.array([row for row in bad if row not in known], np.int64)
        is_first = not known
        if len(new):
            names = self._names(new)
            texts = [(name, str(bad[row])) for name, row in zip(names, new.tolist(), strict=True)]
            self.log.add(dict(zip(new.tolist(), texts, strict=True)))
        rows = self._own(np.array(list(self.log.found()), np.int64))
        if period := self.source.epoch_samples:  # samples of other epochs are other samples
            rows = rows[rows // period == next(iter(bad)) // period]
        if len(rows) > self._limit:
            raise FileError(
                f"{self._where}: {count_text(len(rows), 'sample')} of {self._num_samples:,} cannot be read, which is "
                f"more than max_skipped={self.max_skipped:g} allows: repair the files, or pass a larger share. "
                f"{_listed(bad)}"
            )
        if is_first:
            number, name = int(self._numbers(new[:1])[0]), f" ({texts[0][0]})" if texts[0][0] else ""
            warnings.warn(
                printable(
                    f"sample {number}{name} cannot be read, so that another sample of its batch takes its place: "
                    f"{texts[0][1]}. There is no warning about further ones: see dataset.skipped, and the report of a "
                    "ChunkLoader"
                ),
                stacklevel=2,
            )

    def _names(self, rows: np.ndarray) -> list[str]:
        with suppress(H5ChunkError):  # the file has no names
            return [str(name) for name in self.names_of(self._in_file(rows)).tolist()]
        return [""] * len(rows)

    @property
    def _where(self) -> str:
        return printable(self.source.path)

    @property
    def _num_samples(self) -> int:
        return self.source.num_samples if self.subset is None else len(self.subset)

    @property
    def _limit(self) -> int:
        return max(1, math.floor(self.max_skipped * self._num_samples))

    def _in_file(self, rows: np.ndarray) -> np.ndarray:
        return rows % self.source.epoch_samples if self.source.epoch_samples else rows

    def _own(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.subset is None else rows[np.isin(self._in_file(rows), self.subset)]

    def _numbers(self, rows: np.ndarray) -> np.ndarray:
        rows = self._in_file(rows)
        return rows if self.subset is None else np.searchsorted(self.subset, rows)


def _batches_with_bad(
    is_bad: np.ndarray, sizes: int | Sequence[int], groups: Sequence[Any] | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each batch with bad samples, and each of their groups, yield their places, and those of good ones.

    Good samples are in the same batch or else in the next batch that has some of the group.
    """
    numbers: dict[Any, int] = {}
    codes = np.zeros(len(is_bad), np.int64)
    if groups is not None:
        codes[:] = [numbers.setdefault(group, len(numbers)) for group in groups]
    ends = range(sizes, len(is_bad) + sizes, sizes) if isinstance(sizes, int) else list(accumulate(sizes))
    bounds = list(pairwise([0, *ends]))
    for number in np.unique(np.searchsorted(ends, np.flatnonzero(is_bad), "right")).tolist():
        first, end = bounds[number]
        places = first + np.flatnonzero(is_bad[first:end])
        for code in np.unique(codes[places]).tolist():
            for start, stop in (*bounds[number:], *bounds[:number]):
                good = start + np.flatnonzero(~is_bad[start:stop] & (codes[start:stop] == code))
                if len(good):
                    break
            yield places[codes[places] == code], good


def _occurrences(rows: Iterable[int]) -> np.ndarray:
    """Return how often each number has occurred before."""
    seen: Counter[int] = Counter()
    counts = []
    for row in map(int, rows):
        counts.append(seen[row])
        seen[row] += 1
    return np.array(counts, np.int64)


def _listed(bad: Bad) -> str:
    return "; ".join(list(dict.fromkeys(map(str, bad.values())))[:NAMED])


def check_skipped(skipping: Skipping | None, error: FileError) -> None:
    """Raise an error unless it is due to damaged data, which is to be skipped."""
    if skipping is None or not is_of_data(error):
        raise error


def check_on_error(on_error: Any, max_skipped: Any) -> SkipLog | None:
    """Return the log of bad samples if they are to be skipped. Raise OptionError if an argument is invalid."""
    if on_error not in (RAISE, SKIP):
        raise OptionError(f"on_error is {on_error!r}: pass {RAISE!r} or {SKIP!r}")
    is_share = isinstance(max_skipped, (int, float)) and not isinstance(max_skipped, bool) and 0 < max_skipped <= 1
    if not is_share:
        raise OptionError(f"max_skipped is {max_skipped!r}: pass a share of the samples, above 0 and at most 1")
    return SkipLog() if on_error == SKIP else None
