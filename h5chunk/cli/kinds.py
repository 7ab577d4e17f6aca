"""Commands whose options are those of the kinds of sources."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from h5chunk.cli.group import Command
from h5chunk.cli.options import Bytes, ChunkSamples, Names, Number, Option, option

IN_PYTHON = "mapping"  # the kind that no path leads to
NUM_BEFORE = 3  # parameters that stand before those of the kinds: two paths and --format


class KindsCommand(Command):
    """A command whose options are those of all kinds of sources, and of the files made from them.

    They are made when they are first asked for: other commands need not import what knows them.

    Parameters
    ----------
    groups : callable
        Returns the classes of options.
    left_out : collection of str
        Options that the command does not have.
    defaults : mapping of str to str
        What help says of the defaults of some options, where it is not what the classes say.
    """

    def __init__(
        self,
        *args: Any,
        groups: Callable[[], Sequence[Any]],
        left_out: Collection[str] = (),
        defaults: Mapping[str, str] | None = None,
        **attributes: Any,
    ) -> None:
        self._has_all = False
        super().__init__(*args, **attributes)
        self._groups, self._left_out, self._defaults = groups, left_out, defaults or {}

    @property
    def params(self) -> list[click.Parameter]:
        if not self._has_all:
            self._has_all = True
            self._params[NUM_BEFORE:NUM_BEFORE] = self._make_options()
        return self._params

    @params.setter
    def params(self, params: list[click.Parameter]) -> None:
        self._params, self._has_all = params, False

    def _make_options(self) -> list[click.Parameter]:
        """Make one option for each name; where kinds describe it differently, its help has both descriptions."""
        made: dict[str, Option] = {}
        for group in self._groups():
            for field in dataclasses.fields(group):
                if field.name not in self._left_out:
                    each = _option(group, field, self._defaults.get(field.name))
                    known = made.setdefault(field.name, each)
                    if str(each.help) not in str(known.help):
                        known.help = f"{known.help} {each.help}"
        return list(made.values())


def _option(group: Any, field: dataclasses.Field[Any], shown_default: str | None) -> Option:
    about = field.metadata
    name = field.name.replace("_", "-")
    attributes: dict[str, Any] = {"help": about["help"], "heading": group.heading_of(field.name)}
    attributes["show_default"] = shown_default or about["shown_default"] or field.default is not None
    if about["metavar"]:
        attributes["metavar"] = about["metavar"]
    if isinstance(field.default, bool):
        return Option([f"--no-{name}" if field.default else f"--{name}"], is_flag=True, **attributes)
    attributes["default"] = None if shown_default else field.default
    return Option([f"--{name}"], **_type(about, typing.get_type_hints(group)[field.name]), **attributes)


def _type(about: Any, hint: Any) -> dict[str, Any]:
    """The type of click that fits the type of an option."""
    arguments = [each for each in typing.get_args(hint) if each is not type(None)] or [hint]
    kind = arguments[0] if type(None) in typing.get_args(hint) else hint
    if about["choices"]:
        return {"type": click.Choice(about["choices"])}
    if about["is_path"]:
        return {"type": click.Path()}
    if about["unit"] == "bytes":
        return {"type": Bytes()}
    if about["metavar"] == ChunkSamples.name:
        return {"type": ChunkSamples()}
    if kind is int:
        return {"type": Number(about["minimum"] or 0, about["maximum"])}
    if typing.get_origin(kind) is tuple:
        return {"type": Names()} if typing.get_args(kind)[-1] is ... else {"type": int, "nargs": 2}
    return {"type": kind}


class KindName(click.Choice):
    """The names of all kinds of sources."""

    def __init__(self) -> None:
        super().__init__([])

    @property
    def choices(self) -> tuple[str, ...]:
        from h5chunk.tools.convert.options import all_kinds

        return tuple(sorted(kind.kind for kind in all_kinds() if kind.kind != IN_PYTHON))

    @choices.setter
    def choices(self, choices: Any) -> None:
        pass


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given, by their names in Python."""
    context = click.get_current_context()
    given: dict[str, Any] = {}
    for name, value in options.items():
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            given |= {name.removeprefix("no_"): False} if name.startswith("no_") else {name: value}
    return given


source_format = option(
    "--format",
    type=KindName(),
    heading="Source",
    show_default="as its name and first bytes say",
    help="Kind of SOURCE.",
)
