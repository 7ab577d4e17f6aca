"""Paths of datasets in which ``*`` stands for names of episodes, volumes or samples, and the order of these names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import h5py

from h5chunk.errors import FieldError, OptionError, as_text, printable
from h5chunk.store.hdf5.guard import Guard

STAR = "*"


class Pattern(NamedTuple):
    """The names on a path. Each name may have one ``*``, which stands for any text without a slash."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return "/".join(self.names)

    @property
    def stars(self) -> list[int]:
        """The positions of the names that have a ``*``."""
        return [number for number, name in enumerate(self.names) if STAR in name]

    @property
    def before(self) -> str:
        """The path of the group in which the first ``*`` is looked up; empty for the root group."""
        return "/".join(self.names[: self.stars[0]])

    @property
    def samples(self) -> str:
        """The path up to the name with the last ``*``, which all samples have in common; empty without ``*``."""
        return "/".join(self.names[: self._end])

    @property
    def after(self) -> str:
        """The path of the dataset within a sample; empty if the sample is the dataset itself."""
        return "/".join(self.names[self._end :])

    @property
    def _end(self) -> int:
        return self.stars[-1] + 1 if self.stars else 0


class Match(NamedTuple):
    """The dataset at a path. ``texts`` are what each ``*`` stands for, and ``name`` has the names that have a ``*``."""

    texts: tuple[str, ...]
    name: str
    path: str


def parse(argument: str, paths: Mapping[str, str]) -> dict[str, Pattern]:
    """Split the path of each field into names.

    Raises OptionError if a name has several ``*``, or if some paths have more ``*`` than others. ``argument`` is the
    name of the argument with the paths.
    """
    found = {name: Pattern(tuple(filter(None, path.split("/")))) for name, path in paths.items()}
    if not found:
        raise OptionError(f"{argument} is empty: name at least one dataset")
    first = next(iter(found.values()))
    for pattern in found.values():
        if any(name.count(STAR) > 1 for name in pattern.names):
            raise OptionError(f"{argument} has {str(pattern)!r}: use one * in a name, as in 'data/*/obs'")
        if len(pattern.stars) != len(first.stars):
            raise OptionError(
                f"{argument} has {str(first)!r} and {str(pattern)!r}: use the same number of * in all paths, as in "
                "'data/*/obs' and 'data/*/actions'"
            )
    return found


def parse_samples(argument: str, paths: str | Sequence[str] | Mapping[str, str]) -> dict[str, Pattern]:
    """Split paths of datasets as `parse` does. They differ only after the last ``*``, and a name with ``*`` is no more.

    If ``paths`` has no names, a field is named after the path that follows ``*``, with ``_`` instead of ``/``. Without
    such a path it is named after the group.
    """
    listed = [paths] if isinstance(paths, str) else paths
    given = listed.values() if isinstance(listed, Mapping) else listed
    if not isinstance(given, Iterable) or not all(str(path).strip("/") for path in given):
        raise OptionError(f"{argument} is {paths!r}: pass the path of the samples' datasets, as in 'traces/*/data'")
    keys = list(listed) if isinstance(listed, Mapping) else range(len(listed))
    found: dict[str, Pattern] = {}
    for key, path in zip(keys, given, strict=True):
        pattern = parse(argument, {"": str(path)})[""]
        if any(pattern.names[number] != STAR for number in pattern.stars):
            raise OptionError(f"{argument} has {str(path)!r}: use a * in place of a whole name, as in 'traces/*/data'")
        name = pattern.after.replace("/", "_") or pattern.before.rpartition("/")[2] or "data"
        name = key if isinstance(key, str) else name
        if name in found or pattern.samples != next(iter(found.values()), pattern).samples:
            text = ", ".join(map(str, given))
            raise OptionError(
                f"{argument} is {text}: use patterns that differ only after the last *, and another name for each field"
            )
        found[name] = pattern
    if not found:
        raise OptionError(f"{argument} is empty: pass at least one pattern")
    return found


def fill(pattern: str, key: str) -> str:
    """Return the path of a sample: a pattern with the parts of its key in place of each ``*``.

    >>> fill("images/*/*/pixels", "cat/0001")
    'images/cat/0001/pixels'
    """
    parts = iter(key.split("/"))
    return "".join(next(parts) if part == STAR else part for part in re.split(r"(\*)", pattern))


def find_matches(file: h5py.File, guard: Guard, pattern: Pattern) -> list[Match]:
    """List what a pattern matches in a file, sorted by `natural`. Whether the datasets exist is not checked.

    A pattern without a ``*`` matches once. Raises FieldError if nothing matches.
    """
    if not pattern.stars:
        return [Match((), "", str(pattern))]
    group = guard.find(file, pattern.before or "/")
    if not isinstance(group, h5py.Group):
        what = "does not exist" if group is None else "is not a group"
        raise FieldError(
            f"{printable(guard.path)}: {pattern.before!r} {what}: * stands for names in a group, as in 'data/*/obs'"
        )
    found = list(_matches(group, guard, pattern, pattern.stars[0], (), (), pattern.before))
    if not found:
        raise FieldError(
            f"{printable(guard.path)}: nothing matches {str(pattern)!r}: run h5chunk info to list the datasets"
        )
    return sorted(found, key=lambda match: [natural(text) for text in match.texts])


def _matches(
    group: h5py.Group,
    guard: Guard,
    pattern: Pattern,
    at: int,
    texts: tuple[str, ...],
    named: tuple[str, ...],
    path: str,
) -> Iterator[Match]:
    """Yield the matches in the group at ``path``, in which the name at the position ``at`` is looked up."""
    start, end = pattern.names[at].split(STAR)
    following = next((star for star in pattern.stars if star > at), len(pattern.names))
    between = pattern.names[at + 1 : following]
    for each in group:
        name = as_text(each)
        if len(name) < len(start) + len(end) or not (name.startswith(start) and name.endswith(end)):
            continue
        if isinstance(each, bytes):  # h5py returns names that it cannot decode as bytes
            raise FieldError(f"{printable(guard.path)}: the name {each!r} in {path or '/'!r} is not UTF-8: rename it")
        text = name[len(start) : len(name) - len(end)]
        inner = "/".join((path, name, *between) if path else (name, *between))
        own = (*texts, text), (*named, name)
        if following == len(pattern.names):
            yield Match(own[0], "/".join(own[1]), inner)
        elif isinstance(below := guard.find(group, "/".join((name, *between))), h5py.Group):
            yield from _matches(below, guard, pattern, following, *own, inner)


def natural(text: str | os.PathLike[str]) -> list[Any]:
    """Return a key that sorts texts by the values of the numbers in them, and then by their exact text.

    >>> sorted(["a10", "a2", "a02"], key=natural)
    ['a02', 'a2', 'a10']
    """
    parts = re.split(r"(\d+)", str(text))
    return [*((_value(part) if number % 2 else (-1, part)) for number, part in enumerate(parts)), (-1, str(text))]


def _value(digits: str) -> tuple[int, str]:
    """Return the value of a number, as the number of its digits and these digits: its size has no limit."""
    plain = digits if digits.isascii() else "".join(str(int(digit)) for digit in digits)
    stripped = plain.lstrip("0")
    return len(stripped), stripped
