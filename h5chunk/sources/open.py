"""Find out what kind of data a source is, and open it.

To add a kind of data, write a module with a class that keeps the contract of `h5chunk.source`, and put it on the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from h5chunk.errors import OptionError, SourceError, printable
from h5chunk.source import OpenContext
from h5chunk.sources.options import Options, flag_of, one_of
from h5chunk.sources.recognise import is_path, read_head

# In the order in which they are asked; images take any folder and archive that no other kind recognises.
KINDS = (
    ("matrix.tenx", "TenxSource"),
    ("matrix.anndata", "H5adSource"),
    ("matrix.npz", "NpzSource"),
    ("arrays", "ArraySource"),
    ("matrix.npy", "NpySource"),
    ("matrix.mtx", "MtxSource"),
    ("matrix.libsvm", "LibsvmSource"),
    ("matrix.delimited", "DelimitedSource"),
    ("table", "TableSource"),
    ("images", "ImageSource"),
    ("mapping", "MappingSource"),
)
PACKAGES = {"pyarrow": "sparse"}  # optional ones, and the extra that installs them


def all_kinds() -> list[Any]:
    """The classes of all kinds of sources, in the order in which they are asked."""
    return [getattr(import_module(f"h5chunk.sources.{module}"), name) for module, name in KINDS]


def find_kind(source: Any, kind: str | None = None) -> Any:
    """Find the class that opens a source.

    Parameters
    ----------
    source : path or object
    kind : str, optional
        The name of a kind; default: the first that recognises the source.

    Raises
    ------
    OptionError
        There is no such kind.
    SourceError
        No kind recognises the source.
    """
    kinds = all_kinds()
    if kind is not None:
        found = [each for each in kinds if each.kind == kind]
        if not found:
            raise OptionError(f"format is {kind!r}: give {one_of([each.kind for each in kinds])}")
        return found[0]
    head = read_head(source)
    for each in kinds:
        if each.recognises(source, head):
            return each
    if is_path(source):
        raise SourceError(
            f"{printable(source)}: not known by its name and first bytes: say the format "
            f"({', '.join(each.kind for each in kinds)})"
        )
    raise SourceError(f"an object of type {type(source).__name__} cannot be converted: give a path or a data set")


def open_source(source: Any, *, kind: str | None = None, context: OpenContext | None = None, **options: Any) -> Any:
    """Open a source, whatever kind of data it is.

    Parameters
    ----------
    source : path or object
    kind : str, optional
        See `find_kind`.
    context : OpenContext, optional
    **options
        Those of the kind: see its ``Options``.

    Returns
    -------
    SampleSource or SparseSource

    Raises
    ------
    SourceError
        The source is missing, of an unknown kind or damaged.
    OptionError
        An option is not one of the kind, or its value is not allowed.
    """
    found = find_kind(source, kind)
    (chosen,) = choose_options(found, source, options, (found.Options,))
    return open_kind(found, source, chosen, context or OpenContext())


def open_kind(kind: Any, source: Any, options: Options, context: OpenContext) -> Any:
    """Open a source of a known kind."""
    try:
        return kind.open(source, options, context)
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        raise SourceError(
            f'{describe(source)}: {kind.kind} is read with {error.name}: pip install "h5chunk[{PACKAGES[error.name]}]"'
        ) from None


def choose_options(
    kind: Any, source: Any, given: Mapping[str, Any], groups: Sequence[type[Options]], *others: type[Options]
) -> list[Any]:
    """Sort options into the groups that they belong to.

    Parameters
    ----------
    kind : class
        Of the source.
    source : path or object
        For messages.
    given : mapping
        Options by name.
    groups : sequence of type
        The kinds of options that apply to the source.
    *others : type
        Further kinds of options, which do not apply: for messages.

    Returns
    -------
    list
        One object for each group.

    Raises
    ------
    OptionError
        An option does not exist, applies to other kinds only, or has an invalid value.
    """
    known = {name for group in groups for name in group.names()}
    for name in given:
        if name not in known:
            raise _misplaced(name, kind, source, others)
    return [group(**{name: value for name, value in given.items() if name in group.names()}) for group in groups]


def _misplaced(name: str, kind: Any, source: Any, others: Iterable[type[Options]]) -> OptionError:
    """The error of an option that only other kinds have, or none at all."""
    homes: dict[str, list[str]] = {each.noun: [] for each in others if name in each.names()}
    for each in all_kinds():
        if name in each.Options.names():
            homes.setdefault(each.noun, []).append(each.kind)
    nouns = [_with_kinds(noun, *kinds) for noun, kinds in homes.items()]
    if not nouns:
        return OptionError(f"there is no option {name!r}")
    contained = _with_kinds(kind.noun, kind.kind)
    return OptionError(
        f"{flag_of(name)} applies only to {one_of(nouns)}; {describe(source)} contains {contained}: leave it out, or "
        "give the format of the source if it is another one"
    )


def _with_kinds(noun: str, *kinds: str) -> str:
    is_same = kinds in ((), (noun,), (noun.removesuffix("s"),))
    return noun if is_same else f"{noun} ({', '.join(kinds)})"


def describe(source: Any) -> str:
    """Name a source for people."""
    return printable(source) if is_path(source) else f"the {type(source).__name__}"
