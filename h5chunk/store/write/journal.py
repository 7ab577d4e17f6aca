"""Journal of what a writer has done, so that an interrupted one can be continued: records that are only ever added.

A line is a record: the CRC-32 of its JSON, the JSON. The first one is a key, which stands for all that decides what the
other records mean. A line that is torn or damaged ends the journal: what stands behind it is not believed. Records are
claims, not facts: whoever reads them looks at the data again.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from h5chunk.errors import printable
from h5chunk.store.write.part_file import open_own, writing


class Journal:
    """Records beside a part file. Only the writer that holds the lock of the part file may use it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Any] = []  # what was found, of the same key
        self.was_of_another = False  # one of another key was found, and emptied
        self._file: IO[bytes] | None = None
        self._num_added = 0

    @property
    def holds_work(self) -> bool:
        """Whether the journal has records, found or added."""
        return bool(self.records) or self._num_added > 0

    def open(self, key: str | None) -> None:
        """Take over the records that are there, if they are of the same key, or start anew.

        Without a key, nothing is taken over and nothing is recorded.
        """
        if key is None:
            return
        with writing(self.path):
            self._file = os.fdopen(open_own(self.path, printable(self.path)), "r+b", buffering=0)
            records, end = _read(self._file)
            if records[:1] == [key]:
                self.records = records[1:]
                self._file.truncate(end)
                self._file.seek(end)
                return
            self.was_of_another = bool(records)
            self._file.truncate(0)
            self._file.seek(0)
        self._write(key)

    def add(self, record: Any) -> None:
        """Add a record (JSON). Once the disk is full, none is added: a later run repeats more work then."""
        if self._write(record):
            self._num_added += 1

    def _write(self, record: Any) -> bool:
        if self._file is None:
            return False
        line = _line(record)
        try:
            if self._file.write(line) == len(line):
                return True
        except OSError:
            pass
        self.close()
        return False

    def close(self) -> None:
        """Close the journal; nothing can be added any more."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Close the journal and remove its file, whichever writer made it."""
        self.close()
        self.records, self._num_added = [], 0
        if self.path.is_symlink() or not self.path.is_dir():
            self.path.unlink(missing_ok=True)


def _line(record: Any) -> bytes:
    data = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def _read(file: IO[bytes]) -> tuple[list[Any], int]:
    """Return the records before the first line that is torn or damaged, and where they end."""
    records, end = [], 0
    with os.fdopen(os.dup(file.fileno()), "rb") as lines:
        for line in lines:
            try:
                record = json.loads(line[9:])
            except (ValueError, RecursionError):
                break
            if line != _line(record):
                break
            records.append(record)
            end += len(line)
    return records, end


def key_of(what: Any, blobs: Iterable[bytes] = ()) -> str:
    """Return a digest of a JSON value and of byte strings.

    >>> key_of({"seed": 1})[:8] == key_of({"seed": 2})[:8]
    False
    """
    digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode())
    for blob in blobs:
        digest.update(len(blob).to_bytes(8, "little"))
        digest.update(blob)
    return digest.hexdigest()
