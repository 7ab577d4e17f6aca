"""The command `doctor`."""

from __future__ import annotations

import sys
from typing import Any

import click

import h5chunk
from h5chunk.cli import options as shared
from h5chunk.cli.group import main, show_report
from h5chunk.cli.options import OUTPUT, RUNNING, SECONDS, option
from h5chunk.errors import printable


@main.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    examples={
        "Find out what training waits for, in its first minute": "h5chunk doctor --seconds 60 -- python train.py",
        "Try the best fix, and write a report in HTML": "h5chunk doctor --check --html why.html -- python train.py",
        "In CI, fail if the GPU is often idle": "h5chunk doctor --epochs 1 --assert-util 0.95 -- python train.py",
    },
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@option(
    "--seconds",
    type=SECONDS,
    show_default="run it to its end",
    heading=RUNNING,
    help="End the training after this time, such as 60s or 2m.",
)
@option(
    "--epochs", type=click.IntRange(1), metavar="N", heading=RUNNING, help="End the training after this many epochs."
)
@option(
    "--check",
    is_flag=True,
    heading=RUNNING,
    help="Run COMMAND again with the best fix that needs no change to the script, and compare the measured gain with "
    "the predicted one.",
)
@option("--html", type=click.Path(), metavar="PAGE.html", heading=OUTPUT, help="Also write the report as an HTML page.")
@option(
    "--assert-util",
    type=float,
    metavar="FRACTION",
    heading=OUTPUT,
    help="Exit with code 1 if the GPU (without a GPU, the training step) is busy for less than this fraction of the "
    "time.",
)
@shared.quiet
@option(
    "--json",
    "as_json",
    is_flag=True,
    heading=OUTPUT,
    help="Print the report as JSON, and the standard output of COMMAND on standard error.",
)
def doctor(command: tuple[str, ...], **options: Any) -> None:
    """Run COMMAND, which trains with PyTorch, and report what its GPU waits for and what each fix would gain.

    The training script needs no change, and its results stay the same. Put two dashes before COMMAND, as in the
    examples. Loops over a DataLoader or a ChunkLoader are measured in full; of other loops, the steps of the optimizer.
    The exit code is that of COMMAND, unless an option ends it.
    """
    quiet, as_json = options.pop("quiet"), options.pop("as_json")
    stdout = sys.__stderr__.fileno() if as_json and sys.__stderr__ is not None else None
    report = show_report(lambda: h5chunk.doctor(command=command, stdout=stdout, **options), quiet, as_json)
    if report.status:
        click.echo(f"error: {printable(command[0])} failed: {report.notes[-1]}", err=True)
        click.get_current_context().exit(report.status)
