"""Average the entries that share a place, or name the first of them in an error."""

from __future__ import annotations

import numpy as np

from h5chunk.errors import SourceError, printable
from h5chunk.tools.convert.matrix_read import Read, place_text, unfit_error
from h5chunk.tools.convert.matrix_sort import Places


def settle_duplicates(read: Read, places: Places) -> np.ndarray:
    """The value of each place, in units.

    Raises
    ------
    SourceError
        Two entries share a place where that is an error, or their mean is no whole number of units.
    """
    if places.counts is None:
        return places.values
    if read.options.duplicates == "error":
        raise duplicate_error(read)
    return _means(read, places, places.counts) if read.options.duplicates == "mean" else places.values


def _means(read: Read, places: Places, counts: np.ndarray) -> np.ndarray:
    if places.values.dtype.kind == "f":  # to be binarized
        return places.values / counts
    means, rest = np.divmod(places.values.astype(np.int64), counts)
    if rest.any():
        first = int(rest.argmax())
        place = read.place(int(places.rows[first]), int(places.columns[first]))
        value = int(places.values[first]) / int(counts[first]) / read.coding.units_per_one
        raise unfit_error(read.source, f"{place} (the mean of {counts[first]} entries)", value, read.coding)
    return means


def duplicate_error(read: Read) -> SourceError:
    """Describe the first place, by row and column of the source, that has more than one entry.

    Entries are read again for it, as only the source knows where they are and what they were.
    """
    first: tuple[int, int] | None = None
    num_duplicates = 0
    for places in read.entries.sorted():
        if places.counts is None:
            continue
        repeated = np.flatnonzero(places.counts > 1)
        num_duplicates += int(places.counts.sum()) - len(places.counts)
        rows, columns = read.order[places.rows[repeated]], places.columns[repeated]
        smallest = np.lexsort((columns, rows))[0]
        here = int(rows[smallest]), int(columns[smallest])
        first = here if first is None else min(first, here)
    assert first is not None
    place = read.ids(*first)
    where = f"{printable(read.source.path)}: {place_text(*place)}"
    return SourceError(
        f"{where} has more than one entry: {' and '.join(_entries_of(read, *place))}; {num_duplicates:,} of "
        f"{read.num_read:,} entries repeat a place: say what counts with --duplicates last, first, max, mean or sum"
    )


def _entries_of(read: Read, row: object, column: object) -> list[str]:
    """The first two entries of a place, with their lines, or else their numbers."""
    entries: list[str] = []
    num_before = 0
    for block, _ in read.source.blocks(read.options.memory_bytes // 8):
        for index in np.flatnonzero((block.rows == row) & (block.columns == column)).tolist():
            value = 1 if block.values is None else block.values[index].item()
            line = f"entry {num_before + index + 1}" if block.first_line is None else f"line {block.first_line + index}"
            entries.append(f"{value:g} ({line})")
            if len(entries) == 2:
                return entries
        num_before += len(block)
    return entries
