"""Continuing a conversion that was stopped: what its journal is bound to, and what people are told.

An image conversion is continued task by task: the chunks that the journal claims are read and their checksums computed
again, and the samples in them must have the size and times that they had. So only what changed is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import h5chunk
from h5chunk.errors import printable
from h5chunk.store.write.filltask import Done, done_of
from h5chunk.store.write.journal import Journal
from h5chunk.store.write.newfile import NewFile
from h5chunk.store.write.newfolder import NewFolder

Notify = Callable[[str], None]


def say_nothing(line: str) -> None:
    """For those who do not want to be told."""


def facts_of_all() -> dict[str, Any]:
    """What every journal is bound to."""
    return {"h5chunk": h5chunk.__version__, "journal": 1}


class TaskLog:
    """The tasks of several files that a journal claims to be done, and where more are added.

    Parameters
    ----------
    journal : Journal
        Opened.
    sizes : list of (num_samples, chunk_samples)
        Of the files.
    notify : callable
        Told how many samples are there.
    """

    def __init__(self, journal: Journal, sizes: Sequence[tuple[int, int]], notify: Notify) -> None:
        self._journal = journal
        self._sizes = sizes
        self._notify = notify
        self._claims: list[dict[int, Done]] = [{} for _ in sizes]
        self._num_again = 0
        for record in journal.records:
            self._take(record)
        if journal.was_of_another:
            notify("the unfinished conversion was of other options or sources: starting over")
        if journal.records:
            there = sum(self._samples(i, done) for i, claims in enumerate(self._claims) for done in claims.values())
            notify(f"continuing: {there:,} of {sum(size for size, _ in sizes):,} samples are there")

    def _take(self, record: Any) -> None:
        if isinstance(record, list) and record and record[0] in range(len(self._sizes)):
            done = done_of(record[1:])
            if done is not None:
                self._claims[record[0]][done.chunks.start] = done

    def _samples(self, number: int, done: Done) -> int:
        num_samples, size = self._sizes[number]
        return max(0, min(done.chunks.stop * size, num_samples) - done.chunks.start * size)

    def claims(self, number: int) -> dict[int, Done]:
        """What is claimed of a file, by the first chunk of each task."""
        return self._claims[number]

    def adder(self, number: int) -> Callable[[Done], None]:
        """What adds tasks of a file."""

        def add(done: Done) -> None:
            if done.chunks.start in self._claims[number]:
                self._num_again += self._samples(number, done)
            self._journal.add([number, *done.record()])

        return add

    def finish(self) -> None:
        """Tell what did not hold."""
        if self._num_again:
            self._notify(f"{self._num_again:,} samples were not as they had been, and were done again")


@contextmanager
def telling(new: NewFile | NewFolder, notify: Notify) -> Iterator[None]:
    """Tell what can be done about an output that is kept unfinished."""
    try:
        yield
    except BaseException:
        if new.kept:
            there = [path for path in (new.part, new.journal.path) if path.exists()]
            notify(
                "what was done is kept, and the same command continues it; to give its space back, delete "
                + " and ".join(map(printable, there))
            )
        raise
