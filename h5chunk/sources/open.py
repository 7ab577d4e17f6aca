"""Determine the kind of a source, and open it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from h5chunk.errors import OptionError, SourceError, printable
from h5chunk.sources import foreign
from h5chunk.sources.kinds import KINDS
from h5chunk.sources.listing import check_source
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.sources.matrix.joined import SeveralFiles, list_paths
from h5chunk.sources.options import Options, flag_of, one_of
from h5chunk.sources.recognise import is_path, read_head
from h5chunk.store.hdf5.lookalike import describe_lookalike


def all_kinds() -> list[Any]:
    """Import and return the classes of all kinds of sources, in the order in which they are tried."""
    return [getattr(import_module(f"h5chunk.sources.{kind.module}"), kind.class_name) for kind in KINDS]


def find_kind(source: Any, kind: str | None = None) -> Any:
    """Return the class that opens a source: the class of kind ``kind``, or the first class that recognises the source.

    Raises OptionError if there is no such kind, and SourceError if no class recognises the source.
    """
    kinds = all_kinds()
    names = [candidate.kind for candidate in kinds]
    if kind is not None:
        if kind not in names:
            raise OptionError(f"format is {kind!r}: pass {one_of(names)}")
        return _named_kind(source, kinds[names.index(kind)])
    head = read_head(source)
    if is_path(source) and os.path.isdir(source) and (what := describe_lookalike(source)):
        raise SourceError(f"{describe(source)}: {what}")
    for candidate in kinds:
        if candidate.recognises(source, head):
            return candidate
    if not is_path(source):
        listed = ", or a list of the samples that it yields" if hasattr(source, "__iter__") else ""
        if hasattr(source, "dataset"):  # a DataLoader yields batches
            listed = f", such as the attribute dataset of this {type(source).__name__}"
        raise SourceError(
            f"an object of type {type(source).__name__} cannot be converted: pass a path, arrays or a data set{listed}"
        )
    if what := foreign.describe(source, head) or describe_lookalike(source):
        raise SourceError(f"{describe(source)}: {what}")
    raise SourceError(message=f"{describe(source)}: {_unrecognised()}")


def _named_kind(source: Any, kind: Any) -> Any:
    """Return the class that opens a source if the user named ``kind``: the kind of each file, if there are several."""
    if issubclass(kind, SparseSource) and list_paths(source, any_folder=not kind.reads_folders):
        return SeveralFiles
    if not is_path(source) and not kind.recognises(source, b""):
        raise SourceError(
            f"{describe(source)}: cannot be read as {kind.kind}: pass the path of a file or folder; several files of "
            "one sparse matrix may be a list of paths"
        )
    return kind


def _unrecognised() -> str:
    examples = "".join(f"\n  {kind.name:8}{kind.example}" for kind in KINDS if kind.example)
    known = f"If it is one of these, name its format, for example with --format csv:{examples}"
    return f"not recognised. {known}\n{foreign.ANY_WAY}"


def choose_options(
    kind: Any, source: Any, requested: Mapping[str, Any], groups: Sequence[type[Options]], *others: type[Options]
) -> list[Any]:
    """Create an object of each class in ``groups`` from the options that were ``requested`` by name.

    Raises OptionError if an option does not exist, or belongs only to other kinds of sources or to the classes in
    ``others``.
    """
    known = {name for group in groups for name in group.names()}
    for name in requested:
        if name not in known:
            raise _misplaced(name, kind, source, others)
    return [group(**{name: value for name, value in requested.items() if name in group.names()}) for group in groups]


def _misplaced(name: str, kind: Any, source: Any, others: Iterable[type[Options]]) -> OptionError:
    """Return the error for an option that does not exist, or that only other kinds of sources have."""
    homes: dict[str, list[str]] = {group.noun: [] for group in others if name in group.names()}
    for group in all_kinds():
        if name in group.Options.names():
            homes.setdefault(group.noun, []).append(group.kind)
    if not homes:
        return OptionError(f"there is no option {name!r}")
    if is_path(source) and kind.kind == "images":  # the kind of a path that does not exist
        check_source(Path(os.fsdecode(source)))
    nouns = one_of([_with_kinds(noun, *kinds) for noun, kinds in homes.items()])
    return OptionError(
        f"{flag_of(name)} applies only to {nouns}; {describe(source)} contains {_with_kinds(kind.noun, kind.kind)}: "
        "leave out the option, or pass the format of the source if the detected format is wrong"
    )


def _with_kinds(noun: str, *kinds: str) -> str:
    """Return a noun, such as images, followed by its kinds of sources in parentheses, unless they repeat the noun."""
    is_same = kinds in ((), (noun,), (noun.removesuffix("s"),))
    return noun if is_same else f"{noun} ({', '.join(kinds)})"


def describe(source: Any) -> str:
    """Describe a source by its path, or by its type if it is an object, for messages."""
    return printable(source) if is_path(source) else f"the {type(source).__name__}"
