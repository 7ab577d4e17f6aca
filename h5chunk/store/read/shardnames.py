"""What the names of shards say about the set that they belong to: ``NAME-00003-of-00012.h5``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from h5chunk.errors import printable
from h5chunk.store.write.newfolder import shard_name

NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.h5")


def missing_shards(names: Iterable[str]) -> Iterator[str]:
    """Names of shards that others say there are.

    >>> list(missing_shards(["a-00001-of-00002.h5", "other.h5"]))
    ['a-00000-of-00002.h5']
    """
    for (name, count), there in sorted(shard_numbers(names).items()):
        yield from (shard_name(name, number, count) for number in range(count) if number not in there)


def wrong_counts(names: Iterable[str]) -> Iterator[str]:
    """Shards of one name that were packed several times, and numbers that cannot be, in words."""
    sets = shard_numbers(names)
    for name in sorted({name for name, _ in sets}):
        counts = sorted(count for other, count in sets if other == name)
        if len(counts) > 1:
            yield f"there are shards of {printable(name)!r} out of {', '.join(map(str, counts))}: keep those of one set"
    for (name, count), there in sorted(sets.items()):
        for number in sorted(number for number in there if number >= count):
            yield f"{printable(shard_name(name, number, count))} has a number that {count} shards do not have"


def shard_numbers(names: Iterable[str]) -> dict[tuple[str, int], set[int]]:
    """Numbers of the shards that are there, by name and number of shards.

    >>> shard_numbers(["a-00001-of-00003.h5", "other.h5"])
    {('a', 3): {1}}
    """
    found: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := NUMBERED.fullmatch(name):
            found.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    return found
