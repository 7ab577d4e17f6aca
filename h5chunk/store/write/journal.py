"""Keep a journal of finished work, an append-only list of records, so that an interrupted writer can be resumed.

Each line has a record: the CRC-32 of its JSON, and the JSON. The first record is a key, a digest of everything that
determines the meaning of the other records. Lines after an incomplete or damaged line are ignored. A resumed writer
must verify the data that a record describes.

A command can recognise an output that it has finished. A digest of the command and of the output's size and
modification time is stored in an extended attribute of the output, if the file system supports this. The digest is not
stored inside the file, because equal sources must result in equal bytes.
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
from h5chunk.store.write.part_file import open_side_file, writing

ATTRIBUTE = "user.h5chunk.command"


class Journal:
    """The journal of one output. Only the writer that holds the lock of the part file may use it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Any] = []  # records of an earlier writer with the same key
        self.key_mismatch = False  # whether records with another key were dropped
        self.holds_work = False  # whether the journal has records besides the key
        self._file: IO[bytes] | None = None

    def open(self, key: str | None) -> None:
        """Read the existing records if the journal has this key, otherwise clear the journal.

        If ``key`` is None, records are neither read nor written.
        """
        if key is None:
            return
        with writing(self.path):
            self._file = os.fdopen(open_side_file(self.path, printable(self.path)), "r+b", buffering=0)
            records, end = _read(self._file)
            if records[:1] == [key]:
                self.records = records[1:]
                self.holds_work = bool(self.records)
                self._file.truncate(end)
                self._file.seek(end)
                return
            self.key_mismatch = bool(records)
            self._file.truncate(0)
            self._file.seek(0)
        self._write(key)

    def add(self, record: Any) -> None:
        """Add a record, a JSON value. If the disk is full, the record is dropped, and a later run repeats more work."""
        self.holds_work |= self._write(record)

    def _write(self, record: Any) -> bool:
        line = _line(record)
        with suppress(OSError):
            if self._file is None or self._file.write(line) == len(line):
                return self._file is not None
        self.close()
        return False

    def close(self) -> None:
        """Close the journal. No record can be added afterwards."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Close the journal and remove its file, even if another writer created it."""
        self.close()
        self.records, self.holds_work = [], False
        if self.path.is_symlink() or not self.path.is_dir():
            self.path.unlink(missing_ok=True)


def _line(record: Any) -> bytes:
    data = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def _read(file: IO[bytes]) -> tuple[list[Any], int]:
    """Return the records before the first incomplete or damaged line, and the offset of their end."""
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


def key_of(facts: Any, blobs: Iterable[bytes] = ()) -> str:
    """Return the SHA-256 digest of a JSON value and of byte strings, in hexadecimal.

    >>> key_of({"seed": 1})[:8] == key_of({"seed": 2})[:8]
    False
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for blob in blobs:
        digest.update(len(blob).to_bytes(8, "little"))
        digest.update(blob)
    return digest.hexdigest()


def save_command_id(output: Path, command_id: str) -> None:
    """Store a digest of the command and the finished output in an extended attribute, if the system supports this."""
    with suppress(OSError, AttributeError):
        os.setxattr(output, ATTRIBUTE, _bound_to(output, command_id))


def has_command_id(output: Path) -> bool:
    """Return whether a file or folder has a digest that `save_command_id` stored."""
    return _command_of(output) is not None


def is_made_by(output: Path, command_id: str) -> bool:
    """Return whether this command wrote an output that has not been changed since."""
    kept = _command_of(output)
    try:
        return kept is not None and kept == _bound_to(output, command_id)
    except OSError:  # another process is removing the output
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
