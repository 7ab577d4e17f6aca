"""The command `h5chunk` itself: what its subcommands hang on, and how their errors end."""

from __future__ import annotations

from typing import Any

import click
from tqdm import tqdm

import h5chunk
from h5chunk.errors import H5ChunkError, printable


class _Group(click.Group):
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


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(h5chunk.__version__, package_name="h5chunk")
def main() -> None:
    """Keep training data in plain HDF5, and feed the GPU from it as fast as the machine can move bytes."""
    tqdm.monitor_interval = 0  # its thread would make forking workers unsafe
