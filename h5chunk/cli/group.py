"""The command `h5chunk`: help, progress bars and reports of its subcommands, and their exit codes on errors."""

from __future__ import annotations

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
WORDS = {"list": "listing", "convert": "converting", "bench": "measuring", "read": "reading", "write": "writing"}
WORDS |= {"repack": "repacking", "tune": "tuning", "verify": "verifying", "copy": "copying"}
UNITS = {"read": "B", "write": " entries", "repack": "B", "verify": "B", "copy": "B", "bench": " %", "tune": " %"}


class Command(click.Command):
    """A command whose help lists options under headings and ends with examples: command lines by what they do."""

    def __init__(self, *args: Any, examples: Mapping[str, str] | None = None, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.examples = dict(examples or {})

    def get_short_help_str(self, limit: int = 45) -> str:
        return super().get_short_help_str(1000)  # summaries are wrapped instead of cut off

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
        except click.UsageError as error:  # it may have names of files that the shell found for a pattern
            raise click.UsageError(printable(error.format_message()), error.ctx) from None
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)


@click.group(cls=_Group, context_settings=SETTINGS)
@click.version_option(h5chunk.__version__, package_name="h5chunk")
def main() -> None:
    """Keep training data in plain HDF5, and feed the GPU from it as fast as the machine can move bytes."""
    tqdm.monitor_interval = 0  # tqdm's thread would make forking workers unsafe


def run(call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """Call a function with the options of the command line; print its report, which --quiet silences unless as JSON."""
    options = {**more, **_given_options()}
    quiet, as_json = options.pop("quiet", False), options.pop("as_json", False)
    with progress_bar(quiet) as progress:
        result = call(*arguments, progress=progress, **options)
    if as_json or not quiet:
        click.echo(result.to_json() if as_json else str(result))
    return result


def _given_options() -> dict[str, Any]:
    """Return the options that were given to the current command, by their names in Python."""
    context, given = click.get_current_context(), dict[str, Any]()
    for parameter in context.command.params:
        name = parameter.name or ""
        is_default = context.get_parameter_source(name) is ParameterSource.DEFAULT
        if isinstance(parameter, click.Option) and not is_default:
            given |= {name.removeprefix("no_"): False} if name.startswith("no_") else {name: context.params[name]}
    return given


def note(line: str) -> None:
    tqdm.write(f"note: {printable(line)}", file=sys.stderr)  # above the bar


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """Draw a progress bar per stage, unless --quiet is given or standard error is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    bars: dict[str, tqdm[Any]] = {}
    with ExitStack() as shown:

        def show(stage: str, done: int, total: int | None) -> None:
            if stage not in bars:
                shown.close()  # the bar of the previous stage
                bars.clear()
                unit = UNITS.get(stage, " images")
                look = {"unit": unit, "unit_scale": unit in ("B", " entries"), "leave": False, "dynamic_ncols": True}
                bar = tqdm(desc=WORDS[stage], total=total, mininterval=0.1, **look)
                bars[stage] = shown.enter_context(bar)
            bars[stage].update(done - bars[stage].n)

        yield show
