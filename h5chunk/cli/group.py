"""The command `h5chunk` itself: the help of its subcommands, and how their errors end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from tqdm import tqdm

import h5chunk
from h5chunk.errors import H5ChunkError, printable


class Command(click.Command):
    """A command whose help lists options under headings and ends with examples.

    Parameters
    ----------
    examples : dict of str to str
        Command lines, each with what it does.
    """

    def __init__(self, *args: Any, examples: Mapping[str, str] | None = None, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.examples = dict(examples or {})

    def get_short_help_str(self, limit: int = 45) -> str:
        return super().get_short_help_str(1000)  # a summary is wrapped rather than cut off

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
            *_, last = str(error).strip().split("\n")  # of a worker's error, what is before is its traceback
            kind = type(error)
            click.echo(f"error: {last.removeprefix(f'{kind.__module__}.{kind.__qualname__}: ')}", err=True)
            ctx.exit(1)
        except click.UsageError as error:  # it may name files that the shell found for a pattern
            raise click.UsageError(printable(error.format_message()), error.ctx) from None
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=_Group, context_settings=_SETTINGS)
@click.version_option(h5chunk.__version__, package_name="h5chunk")
def main() -> None:
    """Keep training data in plain HDF5, and feed the GPU from it as fast as the machine can move bytes."""
    tqdm.monitor_interval = 0  # its thread would make forking workers unsafe
