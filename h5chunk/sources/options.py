"""Options as frozen dataclasses whose fields describe themselves: checks, help and command lines are made from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from h5chunk.errors import OptionError


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
    is_path: bool = False,
) -> Any:
    """Describe an option: a field of a dataclass that derives from `Options`.

    The default is always allowed; the default of a switch is ``False``. ``metavar`` replaces the value in help, such as
    ``H W``; ``shown_default`` replaces the default in help. A number whose unit is ``bytes`` may be written as
    ``512M``. A path names a file, which must not be the output.
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of options: checks choices and limits on creation, and raises `OptionError`."""

    heading: ClassVar[str] = ""  # of the command line's help
    noun: ClassVar[str] = ""  # the data that they apply to, for messages

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, about = getattr(self, field.name), field.metadata
            minimum, maximum = about.get("minimum"), about.get("maximum")
            if value == field.default:
                continue
            if about.get("choices") and value not in about["choices"]:
                raise OptionError(f"{field.name} is {value!r}: give {one_of(about['choices'])}")
            if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
                limits = f"at least {minimum}" if maximum is None else f"a number from {minimum} to {maximum}"
                raise OptionError(f"{field.name} is {value!r}: give {limits}")

    @classmethod
    def heading_of(cls, name: str) -> str:
        """Return the heading of the class that describes an option."""
        homes: list[Any] = [each for each in cls.__mro__ if name in getattr(each, "__dataclass_fields__", ())]
        return homes[-1].heading

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
