"""Options as frozen dataclasses whose fields describe themselves: checks, help and command lines are made from them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, ClassVar

from h5chunk.errors import MAX_NUMBER, OptionError

ANYTHING: tuple[Any, str] = (object, "")
KINDS: dict[Any, tuple[Any, str]] = {
    int: (Integral, "a whole number"),
    bool: (bool, "True or False"),
    float: (Real, "a number"),
    str: (str, "text"),
}  # by type of option: types of values, and words for messages


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
    """Describe an option: a field of a dataclass that derives from `Options`.

    The default is always allowed; the default of a switch is ``False``. ``metavar`` replaces the value in help, such as
    ``H W``; ``shown_default`` replaces the default in help. A number whose unit is ``bytes`` may be written as
    ``512M``. ``heading`` replaces that of the class. A path names a file, which must not be the output.
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of options: checks choices and limits on creation, and raises `OptionError`."""

    heading: ClassVar[str] = ""  # heading in the command line's help
    noun: ClassVar[str] = ""  # the data that the options apply to, for messages

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not field.default:
                wrong = _why_wrong(value, hints[field.name], field.metadata)
                if wrong:
                    raise OptionError(f"{field.name} is {value!r}: give {wrong}")

    @classmethod
    def heading_of(cls, name: str) -> str:
        """Return the heading of the class that describes an option."""
        homes: list[Any] = [each for each in cls.__mro__ if name in getattr(each, "__dataclass_fields__", ())]
        return cls.__dataclass_fields__[name].metadata["heading"] or homes[-1].heading

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    def given(self) -> dict[str, Any]:
        """The options whose values differ from their defaults."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}

    def paths(self) -> list[Any]:
        """Values of the options that are paths of files."""
        values = [getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata.get("is_path")]
        return [value for value in values if value is not None]


def _why_wrong(value: Any, hint: Any, about: Mapping[str, Any]) -> str:
    """Return what an option must be instead; empty if its value is valid."""
    kind, *others = typing.get_args(hint) or (hint,)
    wanted, words = KINDS.get(kind, ANYTHING) if {*others} <= {type(None)} else ANYTHING
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted in (Integral, Real)):
        return words
    if about["choices"] and value not in about["choices"]:
        return one_of(about["choices"])
    minimum, maximum = about["minimum"], about["maximum"]
    if wanted is Integral and maximum is None and value > MAX_NUMBER:
        return f"at most {MAX_NUMBER}"
    if (minimum is None or value >= minimum) and (maximum is None or value <= maximum):
        return ""
    return f"at least {minimum}" if maximum is None else f"a number from {minimum} to {maximum}"


def one_of(words: Sequence[str]) -> str:
    """List words to choose from.

    >>> one_of(["fail", "skip"]), one_of(["auto", "yes", "no"])
    ('fail or skip', 'auto, yes or no')
    """
    return " or ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), words[-1]])


def flag_of(name: str) -> str:
    """Return the spelling of an option on the command line.

    >>> flag_of("min_row_count")
    '--min-row-count'
    """
    return f"--{name.replace('_', '-')}"
