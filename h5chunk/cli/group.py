"""The command `h5chunk`: format help, show progress, print reports, and turn errors into exit codes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import click
from click.core import ParameterSource
from tqdm import tqdm

import h5chunk
from h5chunk.errors import H5ChunkError, printable

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
STAGES = {  # label and unit of the progress bar of each stage
    "fetch": ("downloading", "B"),
    "list": ("listing", " samples"),
    "convert": ("converting", " samples"),
    "read": ("reading", "B"),
    "sort": ("sorting", " entries"),
    "survey": ("counting", " entries"),
    "write": ("writing", " entries"),
    "copy": ("copying", "B"),
    "repack": ("repacking", "B"),
    "verify": ("verifying", "B"),
    "bench": ("measuring", " %"),
    "tune": ("tuning", " %"),
    "statistics": ("computing statistics", " samples"),
}


class Command(click.Command):
    """A command whose help groups the options under headings and ends with examples.

    ``examples`` maps the purpose of each example to its command line.
    """

    def __init__(self, *args: Any, examples: Mapping[str, str] | None = None, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.examples = dict(examples or {})

    def get_short_help_str(self, limit: int = 45) -> str:
        return super().get_short_help_str(1000)  # wrap the summary instead of truncating it

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                sections.setdefault(getattr(parameter, "heading", "Help"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for purpose, line in self.examples.items():
                    formatter.write_text(f"{purpose}:")
                    formatter.write(f"{'':{formatter.current_indent + 2}}{line}\n")


class _Group(click.Group):
    command_class = Command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except H5ChunkError as error:
            kind = type(error)
            *_, message = str(error).strip().rpartition(f"{kind.__module__}.{kind.__qualname__}: ")
            click.echo(f"error: {message}", err=True)  # the message of a worker's error starts with a traceback
            ctx.exit(1)
        except click.UsageError as error:  # its message may contain file names
            raise click.UsageError(printable(error.format_message()), error.ctx) from None
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)


@click.group(cls=_Group, context_settings=SETTINGS)
@click.version_option(h5chunk.__version__, package_name="h5chunk")
def main() -> None:
    """Keep training data in plain HDF5, and feed the GPU from it as fast as the machine can move bytes."""
    tqdm.monitor_interval = 0  # forking workers is unsafe while tqdm's monitor thread runs


def run(call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """Call a function with the options from the command line, print the report that it returns, and return it.

    ``more`` are further keyword arguments. With ``--json``, the report is printed as JSON, even with ``--quiet``.
    """
    options = {**more, **_given_options()}
    quiet, as_json = options.pop("quiet", False), options.pop("as_json", False)

    def show_progress() -> Any:
        with progress_bar(quiet) as progress:
            return call(*arguments, progress=progress, **options)

    return show_report(show_progress, quiet, as_json)


def show_report(call: Callable[[], Any], quiet: bool, as_json: bool) -> Any:
    """Call a function, print the report that it returns, and return it.

    If an error has a report of what was done before it, this report is printed as well.
    """
    failure = None
    try:
        report = call()
    except H5ChunkError as error:
        failure, report = error, error.report
    if report is not None and (as_json or not quiet):
        click.echo(report.to_json() if as_json else report.text(terminal_width()))
    if failure is not None:
        raise failure
    return report


def _given_options() -> dict[str, Any]:
    """Return the options that were given on the command line, by their Python names."""
    context, options = click.get_current_context(), dict[str, Any]()
    for parameter in context.command.params:
        name = parameter.name or ""
        is_default = context.get_parameter_source(name) is ParameterSource.DEFAULT
        if isinstance(parameter, click.Option) and not is_default:
            options |= {name.removeprefix("no_"): False} if name.startswith("no_") else {name: context.params[name]}
    return options


def terminal_width() -> int:
    """Return the width of the terminal, or of COLUMNS; 0 if standard output is a file or pipe, which has no limit."""
    return shutil.get_terminal_size((0, 0)).columns


def note(line: str) -> None:
    """Print a note to standard error, above the progress bar."""
    tqdm.write(f"note: {printable(line)}", file=sys.stderr)


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """Yield a function that draws a progress bar for each stage.

    Yields None if ``quiet`` is true or standard error is not a terminal.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    bars: dict[str, tqdm[Any]] = {}
    with ExitStack() as shown:

        def show(stage: str, done: int, total: int | None) -> None:
            if stage not in bars:
                shown.close()  # the bar of the previous stage
                bars.clear()
                label, unit = STAGES[stage]
                look = {"unit": unit, "unit_scale": unit in ("B", " entries"), "leave": False, "dynamic_ncols": True}
                bar = tqdm(desc=label, total=total, mininterval=0.1, **look)
                bars[stage] = shown.enter_context(bar)
            bars[stage].update(done - bars[stage].n)

        yield show
