"""Options under headings, their types, and the options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from h5chunk.errors import H5ChunkError

SOURCE = "Source"
FIELDS = "Fields"
LAYOUT = "Layout"
RUNNING = "Running"
OUTPUT = "Output"

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Option(click.Option):
    """An option that the help of its command lists under a heading."""

    def __init__(self, *args: Any, heading: str, **attributes: Any) -> None:
        super().__init__(*args, **{"show_default": True, **attributes})
        self.heading = heading

    def get_help_extra(self, ctx: click.Context) -> click.types.OptionHelpExtra:
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default  # without click's parentheses
        return extra


def option(*names: str, heading: str, **attributes: Any) -> Decorator:
    """Declare an option of a command, like `click.option`, listed under a heading of the command's help."""
    return click.option(*names, cls=Option, heading=heading, **attributes)


class Number(click.ParamType):
    """A whole number from a minimum to a maximum, shown as ``N``."""

    name = "N"

    def __init__(self, minimum: int = 0, maximum: int | None = None) -> None:
        self._minimum, self._maximum = minimum, maximum

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number", param, ctx)
        if number < self._minimum:
            self.fail(f"{number} is below {self._minimum}", param, ctx)
        if self._maximum is not None and number > self._maximum:
            self.fail(f"{number} is above {self._maximum}", param, ctx)
        return number


class Fraction(click.ParamType):
    """A number between 0 and 1, both excluded."""

    name = "FRACTION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 < number < 1:
            self.fail(f"{value!r} is not a number between 0 and 1", param, ctx)
        return number


class ChunkSamples(click.ParamType):
    """A number of samples, or None for ``auto``."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value in (None, "auto"):
            return None
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither auto nor a number", param, ctx)


class Bytes(click.ParamType):
    """A number of bytes, such as 512M or 1GiB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from h5chunk.tools.convert.options import parse_bytes

        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except H5ChunkError as error:
            self.fail(str(error), param, ctx)


class Seconds(click.ParamType):
    """A time such as 60s or 2m, in seconds."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip().lower()
        factor = 60.0 if text.endswith("m") else 1.0
        try:
            seconds = factor * float(text.rstrip("ms"))
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < math.inf:
            self.fail(f"{value!r} is no time above 0 such as 60s or 2m", param, ctx)
        return seconds


class Names(click.ParamType):
    """Names with commas between."""

    name = "A,B[,C[,D]]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        return tuple(value.split(",")) if isinstance(value, str) else tuple(value)


# ---- options that several commands share

as_json = option("--json", "as_json", is_flag=True, heading=OUTPUT, help="Print the report as JSON.")
quiet = option("--quiet", is_flag=True, heading=OUTPUT, help="Show neither a progress bar nor a report.")
dry_run = option("--dry-run", is_flag=True, heading=OUTPUT, help="Print the plan and write nothing.")
overwrite = option("--overwrite", is_flag=True, heading=OUTPUT, help="Replace OUTPUT if it exists.")
no_shuffle = option("--no-shuffle", is_flag=True, heading=LAYOUT, help="Keep the order of SOURCE.")
seed = option(
    "--seed",
    type=Number(0, (1 << 64) - 1),
    default=0,
    heading=LAYOUT,
    help="Seed of the permutation that samples are written in.",
)
chunk_samples = option(
    "--chunk-samples",
    type=ChunkSamples(),
    metavar="N|auto",
    default="auto",
    heading=LAYOUT,
    help="Samples in one HDF5 chunk.",
)
encoders = option(
    "--workers", type=Number(), show_default="one per core", heading=RUNNING, help="Number of processes that decode."
)
batch_size = option("--batch-size", type=Number(1), default=256, heading=FIELDS, help="Samples in a batch.")
device = option(
    "--device",
    metavar="DEVICE",
    default="cpu",
    heading=RUNNING,
    help="Device to bring batches to: cpu, cuda or cuda:N.",
)
fields = option(
    "--fields",
    multiple=True,
    metavar="DATASET",
    show_default="images, and labels if there are any",
    heading=FIELDS,
    help="Dataset to read (repeatable).",
)
trusted = option(
    "--trusted",
    is_flag=True,
    heading=SOURCE,
    help="Follow links, views and external storage within the file's folder, and load plugins for filters.",
)


def memory_bytes(default: str, help: str) -> Decorator:
    """The option of an upper limit on memory."""
    return option("--memory-bytes", type=Bytes(), default=default, heading=RUNNING, help=help)


def budget(default: str) -> Decorator:
    """The option of the time that measuring may take."""
    return option(
        "--budget",
        "budget_s",
        type=Seconds(),
        default=default,
        heading=RUNNING,
        help="Time that measuring may take, such as 10s or 2m.",
    )


def loader_workers(default: str) -> Decorator:
    """The option of the DataLoader workers to measure."""
    return option(
        "--workers",
        type=Number(),
        multiple=True,
        show_default=default,
        heading=RUNNING,
        help="Number of DataLoader workers to try (repeatable).",
    )
