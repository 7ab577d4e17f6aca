"""Check what a source claims to hold against the memory that is allowed, before that memory is taken."""

from __future__ import annotations

import os

from h5chunk.errors import SourceError, human_bytes, printable

DEFAULT_MEMORY_BYTES = 1 << 30


class MemoryLimit:
    """Limit on the memory that one source may take.

    Parameters
    ----------
    path : path
        Of the source, for messages.
    memory_bytes : int
    """

    def __init__(self, path: str | os.PathLike[str], memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        self.memory_bytes = memory_bytes
        self._name = printable(path)
        self._held_bytes = 0

    def check(self, claim: str, num_bytes: int, part_read: float = 1.0) -> None:
        """Refuse what does not fit in memory beside what the source keeps there.

        Parameters
        ----------
        claim : str
            What the source says that it holds, such as ``2,000,000,000 rows``.
        num_bytes : int
            Memory that it would take.
        part_read : float
            Part of the source that this was found in, from 0 to 1; the rest is taken to be alike.

        Raises
        ------
        SourceError
            It takes more than is left of ``memory_bytes``.
        """
        if self._held_bytes + num_bytes <= self.memory_bytes:
            return
        held = f" beside the {human_bytes(self._held_bytes)} of its names and fields" if self._held_bytes else ""
        where = f" in the first {part_read:.0%} of it" if part_read < 1 else ""
        enough = _round_up(self._held_bytes + int(num_bytes / max(part_read, 0.01)))
        raise SourceError(
            f"{self._name}: claims {claim}{where}, which take {human_bytes(num_bytes)} of memory{held}, but "
            f"memory_bytes is {human_bytes(self.memory_bytes)}: if the claim is right, allow more "
            f"(--memory-bytes {enough})"
        )

    def keep(self, claim: str, num_bytes: int) -> None:
        """Check what the source keeps in memory until it is converted, and count it."""
        self.check(claim, num_bytes)
        self._held_bytes += num_bytes


def _round_up(num_bytes: int) -> str:
    """A size that ``--memory-bytes`` takes, of at least so many bytes.

    >>> _round_up(96_000_000_000), _round_up(5_000_000)
    ('90G', '5M')
    """
    unit, letter = (1 << 30, "G") if num_bytes >= 1 << 30 else (1 << 20, "M")
    return f"{-(-num_bytes // unit)}{letter}"
