"""Options of commands that are made from the options of the kinds of sources."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from h5chunk.cli.options import BYTES, CHUNK_SAMPLES, NAMES, Decorator, number, option
from h5chunk.tools.convert.options import KIND_OPTIONS

IN_PYTHON = "mapping"  # the kind that no path leads to


def options_of(
    groups: Sequence[Any], *, left_out: Collection[str] = (), defaults: Mapping[str, str] | None = None
) -> Decorator:
    """Declare an option for each field of some classes of options.

    Where several classes have a field, its help has the descriptions of all.

    Parameters
    ----------
    left_out : collection of str
        Fields that the command does not have.
    defaults : mapping of str to str
        What help says of the defaults of some options, where it is not what the classes say.
    """
    made: dict[str, tuple[str, dict[str, Any]]] = {}
    for group in groups:
        hints = typing.get_type_hints(group)
        for field in dataclasses.fields(group):
            if field.name not in left_out:
                heading = group.heading_of(field.name)
                known = made.setdefault(field.name, _describe(field, hints[field.name], heading, defaults or {}))
                if field.metadata["help"] not in known[1]["help"]:
                    known[1]["help"] += f" {field.metadata['help']}"

    def decorate(function: Any) -> Any:
        for flag, attributes in reversed(made.values()):  # as of decorators, the last comes first
            function = option(flag, **attributes)(function)
        return function

    return decorate


def _describe(
    field: dataclasses.Field[Any], hint: Any, heading: str, defaults: Mapping[str, str]
) -> tuple[str, dict[str, Any]]:
    """The flag of an option, and what `click.option` is to know of it."""
    about, name = field.metadata, field.name.replace("_", "-")
    default = defaults.get(field.name)
    shown_default = default or about["shown_default"] or field.default is not None
    attributes: dict[str, Any] = {"help": about["help"], "heading": heading, "show_default": shown_default}
    if about["metavar"]:
        attributes["metavar"] = about["metavar"]
    if isinstance(field.default, bool):
        return f"--no-{name}" if field.default else f"--{name}", attributes | {"is_flag": True}
    return f"--{name}", attributes | {"default": None if default else field.default} | _type(about, hint)


def _type(about: Any, hint: Any) -> dict[str, Any]:
    """The type of click that fits the type of an option."""
    if about["choices"]:
        return {"type": click.Choice(about["choices"])}
    if about["is_path"]:
        return {"type": click.Path()}
    if about["unit"] == "bytes":
        return {"type": BYTES}
    if about["metavar"] == CHUNK_SAMPLES.name:
        return {"type": CHUNK_SAMPLES}
    kind = typing.get_args(hint)[0] if type(None) in typing.get_args(hint) else hint
    if kind is int:
        return {"type": number(about["minimum"] or 0, about["maximum"])}
    if typing.get_origin(kind) is tuple:
        return {"type": NAMES} if typing.get_args(kind)[-1] is ... else {"type": int, "nargs": 2}
    return {"type": kind}


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
    type=click.Choice(sorted({*KIND_OPTIONS} - {IN_PYTHON})),
    heading="Source",
    show_default="as its name and first bytes say",
    help="Kind of SOURCE.",
)
