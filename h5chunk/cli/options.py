"""Types of command-line options, options that several commands share, and options generated from option classes."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import click

from h5chunk.tools.units import parse_bytes, parse_seconds

SOURCE = "Source"
FIELDS = "Fields"
LAYOUT = "Layout"
RUNNING = "Running"
OUTPUT = "Output"

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Option(click.Option):
    """A `click.Option` that is listed under a heading of its command's help."""

    def __init__(self, *args: Any, heading: str, **attributes: Any) -> None:
        metavar = {int: "N"}.get(attributes.get("type", str))
        super().__init__(*args, **{"show_default": True, "metavar": metavar, **attributes})
        self.heading = heading

    def get_help_extra(self, ctx: click.Context) -> click.types.OptionHelpExtra:
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default  # click would put it in parentheses
        return extra


def option(*names: str, heading: str, **attributes: Any) -> Decorator:
    """Add an option to a command, like `click.option`, under a heading of the command's help."""
    return click.option(*names, cls=Option, heading=heading, **attributes)


class Parsed(click.ParamType):
    """An option type whose values are parsed by ``parse``, which raises ValueError for invalid text.

    ``name`` is the placeholder for the value in help texts. An error message consists of the value and ``problem``; if
    ``problem`` is empty, it is the message of the ValueError.
    """

    def __init__(self, name: str, parse: Callable[[Any], Any], problem: str = "") -> None:
        self.name, self.parse, self._problem = name, parse, problem

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(f"{value!r} {self._problem}" if self._problem else str(error), param, ctx)


SECONDS = Parsed("TIME", lambda value: value if isinstance(value, float) else parse_seconds(value))
CHUNK_SAMPLES = Parsed(
    "N|auto", lambda value: None if value in (None, "auto") else int(value), "is neither auto nor a whole number"
)
BYTES = Parsed("SIZE", lambda value: value if isinstance(value, int) else parse_bytes(value))
NUMBERS = Parsed(
    "N,N[,N]",
    lambda value: tuple(map(int, value.split(","))) if isinstance(value, str) else tuple(value),
    "is not a list of whole numbers, such as 64,64,64",
)


def _parse_pair(value: Any) -> tuple[int, ...]:
    numbers: tuple[int, ...] = NUMBERS.parse(value)
    return numbers * 2 if len(numbers) == 1 else numbers


PAIR = Parsed("N[,N]", _parse_pair, "is not a list of whole numbers, such as 224,224, or 224 for both")
NAMES = Parsed("A,B[,C[,D]]", lambda value: tuple(value.split(",")) if isinstance(value, str) else tuple(value))


# ---- options that several commands share

as_json = option("--json", "as_json", is_flag=True, heading=OUTPUT, help="Print the report as JSON.")
quiet = option("--quiet", is_flag=True, heading=OUTPUT, help="Print neither a progress bar nor a report.")
dry_run = option("--dry-run", is_flag=True, heading=OUTPUT, help="Print the plan and write nothing.")
overwrite = option("--overwrite", is_flag=True, heading=OUTPUT, help="Replace OUTPUT if it exists.")
client = option(
    "--dask",
    "client",
    metavar="ADDRESS",
    heading=RUNNING,
    help="Run on a Dask cluster. ADDRESS is tcp://HOST:PORT of its scheduler, the path of a scheduler file, or local:N "
    "for N processes on this machine. All workers must see the same files under the same paths.",
)
tuned = option(
    "--tuned",
    type=click.Path(),
    metavar="FOUND.json",
    heading=LAYOUT,
    help="Use the settings in this file, which is the output of h5chunk tune --json. Options on the command line take "
    "precedence.",
)
batch_size = option("--batch-size", type=int, default=256, heading=FIELDS, help="Number of samples per batch.")
device = option(
    "--device",
    metavar="DEVICE",
    default="cpu",
    heading=RUNNING,
    help="Device to copy batches to: cpu, cuda or cuda:N.",
)
fields = option(
    "--fields",
    multiple=True,
    metavar="DATASET",
    show_default="those that h5chunk info names",
    heading=FIELDS,
    help="Dataset to read (repeatable).",
)
trusted = option(
    "--trusted",
    is_flag=True,
    heading=SOURCE,
    help="Follow links, virtual datasets and external storage to other files, and load filter plugins.",
)


def source_format(kinds: Collection[str]) -> Decorator:
    """Return the option ``--format``, which accepts these kinds of sources."""
    names = sorted({*kinds} - {"mapping"})  # a mapping is not a path
    return option(
        "--format",
        type=click.Choice(names),
        metavar="KIND",
        heading=SOURCE,
        show_default="detected from its name and first bytes",
        help=f"Kind of SOURCE: {', '.join(names[:-1])} or {names[-1]}.",
    )


def memory_bytes(default: str, help: str) -> Decorator:
    return option("--memory-bytes", type=BYTES, default=default, heading=RUNNING, help=help)


def budget(default: str) -> Decorator:
    help = "Upper limit on the time for measuring, such as 500ms, 10s or 2m."
    return option("--budget", "budget_s", type=SECONDS, default=default, heading=RUNNING, help=help)


def loader_workers(default: str) -> Decorator:
    help = "Number of DataLoader workers to measure with (repeatable)."
    return option("--workers", type=int, multiple=True, show_default=default, heading=RUNNING, help=help)


# ---- options that are generated from option classes


def options_of(
    groups: Sequence[Any], *, excluded: Collection[str] = (), defaults: Mapping[str, str] | None = None
) -> Decorator:
    """Return a decorator that adds a command-line option for each field of the classes in ``groups``.

    The classes are subclasses of `h5chunk.sources.options.Options`. Fields in ``excluded`` get no option. If several
    classes have the same field, its help combines their descriptions. ``defaults`` maps names of fields to texts that
    help shows as their defaults.
    """
    made: dict[str, tuple[str, dict[str, Any]]] = {}
    for group in groups:
        hints = typing.get_type_hints(group)
        for field in dataclasses.fields(group):
            if field.name not in excluded:
                heading = group.heading_of(field.name)
                known = made.setdefault(field.name, _describe(field, hints[field.name], heading, defaults or {}))
                if field.metadata["help"] not in known[1]["help"]:
                    known[1]["help"] += f" {field.metadata['help']}"

    def decorate(function: Any) -> Any:
        for flag, attributes in reversed(made.values()):  # click lists the option that is added last first
            function = option(flag, **attributes)(function)
        return function

    return decorate


def _describe(
    field: dataclasses.Field[Any], hint: Any, heading: str, defaults: Mapping[str, str]
) -> tuple[str, dict[str, Any]]:
    """Return the flag of a field, such as --seed, and the keyword arguments for `option`."""
    metadata, name = field.metadata, field.name.replace("_", "-")
    default = defaults.get(field.name)
    shown_default = default or metadata["shown_default"] or field.default is not None
    attributes: dict[str, Any] = {"help": metadata["help"], "heading": heading, "show_default": shown_default}
    if metadata["metavar"]:
        attributes["metavar"] = metadata["metavar"]
    if isinstance(field.default, bool):
        return f"--no-{name}" if field.default else f"--{name}", attributes | {"is_flag": True}
    return f"--{name}", attributes | {"default": None if default else field.default} | _type(metadata, hint)


def _type(metadata: Any, hint: Any) -> dict[str, Any]:
    """Return the keyword arguments for `option` that depend on the field's type."""
    if metadata["choices"]:
        return {"type": click.Choice(metadata["choices"])}
    if metadata["is_path"] or metadata["repeatable"]:
        return {"type": click.Path() if metadata["is_path"] else str, "multiple": metadata["repeatable"]}
    if metadata["unit"] == "bytes":
        return {"type": BYTES}
    if metadata["metavar"] == CHUNK_SAMPLES.name:
        return {"type": CHUNK_SAMPLES}
    kind = typing.get_args(hint)[0] if type(None) in typing.get_args(hint) else hint
    if typing.get_origin(kind) is tuple:
        if typing.get_args(kind)[-1] is ...:
            return {"type": NUMBERS if typing.get_args(kind)[0] is int else NAMES}
        return {"type": PAIR}
    return {"type": kind}
