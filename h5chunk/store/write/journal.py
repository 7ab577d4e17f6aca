"""Keep a journal of finished work, an append-only list of records, so that an interrupted writer can continue.

A line is a record: the CRC-32 of its JSON, and the JSON. The first record is a key, a digest of everything that
determines the meaning of the other records. A torn or damaged line ends the journal: later lines are ignored. Records
are claims, not facts: readers must check the data again.

A writer that is killed right after it has renamed its output cannot report success. The identity of its command is
therefore stored in an extended attribute of the output: it covers the options, and the size and times of all files
read. It is not stored inside the file, so that equal sources make equal bytes. It also covers the size and time of the
output, so that it is invalid once the output is modified, or copied. If the file system has no such attributes, nothing
is stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from h5chunk.errors import printable
from h5chunk.store.write.part_file import open_own, writing

ATTRIBUTE = "user.h5chunk.command"


class Journal:
    """Records beside a part file. Only the writer that holds the lock of the part file may use it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Any] = []  # existing records with the same key
        self.was_of_another = False  # whether a journal with another key was emptied
        self._file: IO[bytes] | None = None
        self._num_added = 0

    @property
    def holds_work(self) -> bool:
        """Whether the journal has records, existing or added."""
        return bool(self.records) or self._num_added > 0

    def open(self, key: str | None) -> None:
        """Reuse existing records if they have the same key; otherwise start over.

        Without a key, no records are reused or written.
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
        """Add a record (JSON). Once the disk is full, no more records are added: a later run then repeats more work."""
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
        """Close the journal; nothing can be added afterwards."""
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
    """Return the records before the first torn or damaged line, and the end of the last of them."""
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


def save_command_id(output: Path, command_id: str) -> None:
    """Keep the identity of the command with its output, if the file system can."""
    with suppress(OSError, AttributeError):
        os.setxattr(output, ATTRIBUTE, _bound_to(output, command_id))


def has_command_id(output: Path) -> bool:
    """Return whether a command's identity is stored with a file or folder."""
    return _command_of(output) is not None


def is_made_by(output: Path, command_id: str) -> bool:
    """Whether an output was made by this command and has not been written to since."""
    kept = _command_of(output)
    try:
        return kept is not None and kept == _bound_to(output, command_id)
    except OSError:  # another process removes it
        return False


def _command_of(output: Path) -> bytes | None:
    try:
        return os.getxattr(output, ATTRIBUTE)
    except (OSError, AttributeError, ValueError):
        return None


def _bound_to(output: Path, command_id: str) -> bytes:
    files = sorted(output.iterdir()) if output.is_dir() else [output]
    states = [(status.st_size, status.st_mtime_ns) for status in map(os.stat, files)]
    names = [os.fsencode(file.name).hex() for file in files] if output.is_dir() else []
    return key_of([command_id, names, states]).encode()
