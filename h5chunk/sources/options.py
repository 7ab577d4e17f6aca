"""Options as frozen dataclasses: the metadata of their fields defines validation, help and command lines."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, ClassVar

from h5chunk.errors import MAX_NUMBER, OptionError

MAX_SHOWN = 200  # characters of a value that a message shows
ANYTHING: tuple[Any, str] = (object, "")
KINDS: dict[Any, tuple[Any, str]] = {  # by the annotation of an option: the type of its values, and words for it
    int: (Integral, "a whole number"),
    bool: (bool, "True or False"),
    float: (Real, "a number"),
    str: (str, "text"),
}


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    minimum: int | None = None,
    maximum: int | None = None,
    metavar: str = "",
    shown_default: str = "",
    unit: str = "",
    heading: str = "",
    is_path: bool = False,
    repeatable: bool = False,
) -> Any:
    """Define an option as a field of a subclass of `Options`.

    The default is always valid; other values must be among ``choices`` and from ``minimum`` to ``maximum``, as far as
    these are passed. Help shows ``metavar`` as the value and ``shown_default`` as the default. If ``unit`` is
    ``bytes``, the command line accepts sizes such as ``512M``. ``heading`` overrides the heading of the class.
    ``is_path`` marks the path of an input file, which must not be the output. On the command line, a ``repeatable``
    option may occur several times.
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """Base class of options, which are validated on creation. Raises OptionError for an invalid value."""

    heading: ClassVar[str] = ""  # heading in the command line's help
    noun: ClassVar[str] = ""  # the data that the options apply to, for messages

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not field.default:
                wrong = _why_wrong(value, hints[field.name], field.metadata)
                if wrong:
                    shown = repr(value)
                    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
                    raise OptionError(f"{field.name} is {shown}: pass {wrong}")

    @classmethod
    def heading_of(cls, name: str) -> str:
        """Return the heading under which help lists an option: its own, or that of the class that defines it."""
        owners: list[Any] = [base for base in cls.__mro__ if name in getattr(base, "__dataclass_fields__", ())]
        return cls.__dataclass_fields__[name].metadata["heading"] or owners[-1].heading

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    def non_defaults(self) -> dict[str, Any]:
        """Return the options whose values differ from their defaults."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}

    def paths(self) -> list[Any]:
        """Return the values of all options that are paths."""
        values = [getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("is_path")]
        return [value for value in values if value is not None]


def _why_wrong(value: Any, hint: Any, metadata: Mapping[str, Any]) -> str:
    """Describe the valid values of an option for an error message; return "" if ``value`` is valid."""
    kind, *others = typing.get_args(hint) or (hint,)
    expected, description = KINDS.get(kind, ANYTHING) if {*others} <= {type(None)} else ANYTHING
    if not isinstance(value, expected) or (isinstance(value, bool) and expected in (Integral, Real)):
        return description
    if metadata["is_path"] and not isinstance(value, (str, os.PathLike)):
        return f"the path of a file, not an object of type {type(value).__name__} (which can be saved first)"
    if metadata["choices"] and value not in metadata["choices"]:
        return one_of(metadata["choices"])
    minimum, maximum = metadata["minimum"], metadata["maximum"]
    if expected is Integral and maximum is None and value > MAX_NUMBER:
        return f"at most {MAX_NUMBER}"
    if (minimum is None or value >= minimum) and (maximum is None or value <= maximum):
        return ""
    return f"at least {minimum}" if maximum is None else f"a number from {minimum} to {maximum}"


def one_of(words: Sequence[str]) -> str:
    """Join words with commas and "or".

    >>> one_of(["fail", "skip"]), one_of(["auto", "yes", "no"])
    ('fail or skip', 'auto, yes or no')
    """
    return " or ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), words[-1]])


def flag_of(name: str) -> str:
    """Return the command-line flag of an option.

    >>> flag_of("min_row_count")
    '--min-row-count'
    """
    return f"--{name.replace('_', '-')}"
