"""The errors that h5chunk raises on purpose.

H5ChunkError
 +-- OptionError   (ValueError)     an argument that cannot be: what, value, limit, remedy
 +-- SourceError   (ValueError)     the raw data: missing, empty, not agreeing
 |    +-- SampleError               one sample of it: path and reason
 +-- OutputError   (OSError)        the file to be written: exists, in use, no room
 +-- FileError     (OSError)        a file to be read: not HDF5, cut short, changed
 |    +-- FieldError (KeyError)     a field that it lacks, or that cannot be a field
 |         +-- TrustError           data that lie elsewhere, which is not followed unless trusted
 +-- StateError    (ValueError)     a saved state that belongs to another order of samples
 +-- WorkerError   (RuntimeError)   a process of ours that died, or a thread that hangs

The command line prints the message of any of these as one line and exits with 1.
"""

from __future__ import annotations

import os


class H5ChunkError(Exception):
    """Base of every error that h5chunk raises on purpose."""

    def __str__(self) -> str:  # OSError and KeyError decorate their message; ours is the message
        return str(self.args[0]) if self.args else ""


class OptionError(H5ChunkError, ValueError):
    """An argument that cannot be."""


class SourceError(H5ChunkError, ValueError):
    """The raw data are missing, empty or do not agree."""


class SampleError(SourceError):
    """One sample of the source cannot be used; ``str()`` gives the reason without the path."""


class OutputError(H5ChunkError, OSError):
    """The output exists, is in use or does not fit."""


class FileError(H5ChunkError, OSError):
    """A file cannot be read as what it should be."""


class FieldError(FileError, KeyError):
    """The file lacks a field, or has a dataset that cannot be one."""


class TrustError(FieldError):
    """What a file refers to lies elsewhere, or needs code of others: not followed unless the user trusts it."""


class StateError(H5ChunkError, ValueError):
    """A saved state is none, or belongs to another file, seed, batch size or order."""


class WorkerError(H5ChunkError, RuntimeError):
    """A worker process died, or a reading thread hangs."""


def printable(name: str | bytes | os.PathLike[str]) -> str:
    r"""A path for people: bytes that are no UTF-8 become ``\xNN``, so that printing cannot fail.

    >>> printable(b"caf\xe9.jpg")
    'caf\\xe9.jpg'
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")
