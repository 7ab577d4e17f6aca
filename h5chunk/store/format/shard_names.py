"""Names of shards, ``NAME-00003-of-00012.h5``, and the set of files that they describe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from h5chunk.errors import printable

NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.h5")


def shard_name(name: str, number: int, count: int) -> str:
    """Return the name of a shard's file.

    >>> shard_name("photos", 3, 12)
    'photos-00003-of-00012.h5'
    """
    return f"{name}-{number:05}-of-{count:05}.h5"


def missing_shards(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of shards that are missing, as the names of others say.

    >>> list(missing_shards(["a-00001-of-00002.h5", "other.h5"]))
    ['a-00000-of-00002.h5']
    """
    for (name, count), there in sorted(shard_numbers(names).items()):
        yield from (shard_name(name, number, count) for number in range(count) if number not in there)


def wrong_counts(names: Iterable[str]) -> Iterator[str]:
    """Yield messages about shards of several sets with one name, and about numbers beyond their count."""
    sets = shard_numbers(names)
    for name in sorted({name for name, _ in sets}):
        counts = sorted(count for other, count in sets if other == name)
        if len(counts) > 1:
            yield f"there are shards of {printable(name)!r} out of {', '.join(map(str, counts))}: keep those of one set"
    for (name, count), there in sorted(sets.items()):
        for number in sorted(number for number in there if number >= count):
            yield f"{printable(shard_name(name, number, count))} has a number that {count} shards do not have"


def shard_numbers(names: Iterable[str]) -> dict[tuple[str, int], set[int]]:
    """Return the numbers of the shards that are there, by name and count of the set.

    >>> shard_numbers(["a-00001-of-00003.h5", "other.h5"])
    {('a', 3): {1}}
    """
    found: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if match := NUMBERED.fullmatch(name):
            found.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    return found
