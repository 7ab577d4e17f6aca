"""What was read of a sparse matrix, kept on disk until the file that is made of it is complete.

Only where the entries are on disk anyway: those that fit in memory are soon read again. What a journal says of them is
looked at before it is believed.
"""

from __future__ import annotations

import os
import zlib
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from h5chunk.errors import OutputError
from h5chunk.plan.codes import Coding
from h5chunk.sources.sparse.block import SparseSource
from h5chunk.store.write.journal import Journal
from h5chunk.store.write.partfile import write_at
from h5chunk.tools.convert.sparse_entries import Entries, Run
from h5chunk.tools.convert.sparse_read import Budget, Read, order_of

READ = "read"  # of records of a journal
IDS = ("row_ids", "column_ids")


def keep_read(read: Read, budget: Budget, journal: Journal) -> None:
    """Keep what was read, if it is on disk and the system can; on a full disk nothing is kept."""
    runs = read.entries.keep(journal.data_path) if read.entries.on_disk else None
    if runs is None:
        return
    try:
        ids = {name: _append(journal.data_path, getattr(read, name)) for name in IDS}
    except OSError:
        journal.data_path.unlink(missing_ok=True)
        return
    facts = {
        "memory_bytes": budget.memory_bytes,
        "rows": len(read.order),
        "columns": int(read.num_columns),
        "num_read": int(read.num_read),
        "num_zeros": int(read.num_zeros),
        "runs": runs,
        "ids": ids,
    }
    journal.add([READ, facts])


def _append(path: Path, values: np.ndarray | None) -> list[Any] | None:
    """Write an array behind all else; says of which type, how long and where it is, and its CRC-32."""
    if values is None:
        return None
    data = values.tobytes()
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        offset = os.fstat(descriptor).st_size
        write_at(descriptor, data, offset)
    finally:
        os.close(descriptor)
    return [values.dtype.str, len(values), offset, zlib.crc32(data)]


def kept_read(
    source: SparseSource,
    coding: Coding,
    folder: Path,
    budget: Budget,
    seed: int | None,
    stack: ExitStack,
    journal: Journal,
) -> Read | None:
    """What was kept; None if nothing was, or if it is damaged.

    Parameters
    ----------
    source, coding, folder, budget, seed, stack
        As of `h5chunk.tools.convert.sparse_read.read_source`.
    journal : Journal
        Of the same source and options.
    """
    facts = next((record[1] for record in reversed(journal.records) if record[:1] == [READ]), None)
    if facts is None or facts["memory_bytes"] != budget.memory_bytes:
        return None
    rows, columns = int(facts["rows"]), int(facts["columns"])
    entries = Entries(folder, rows, columns, coding.dtype, coding.num_bits, budget.sort_bytes)
    with suppress(OutputError), ExitStack() as opened:
        opened.enter_context(entries)
        ids = {name: _array(journal.data_path, facts["ids"][name]) for name in IDS}
        if entries.restore(journal.data_path, [Run(*map(int, run)) for run in facts["runs"]]):
            stack.enter_context(opened.pop_all())
            order, _ = order_of(rows, seed)
            return Read(
                source, coding, entries, order, columns, **ids, num_read=facts["num_read"], num_zeros=facts["num_zeros"]
            )
    return None


def _array(path: Path, facts: list[Any] | None) -> np.ndarray | None:
    if facts is None:
        return None
    dtype, size, offset, checksum = facts
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(size * np.dtype(dtype).itemsize)
    except OSError as error:
        raise OutputError(f"{path}: {error}") from None
    if zlib.crc32(data) != checksum:
        raise OutputError(f"{path}: is damaged")
    return np.frombuffer(data, dtype)
