"""The command `doctor`."""

from __future__ import annotations

from typing import Any

import click

import h5chunk
from h5chunk.cli import options as shared
from h5chunk.cli.group import main
from h5chunk.cli.options import OUTPUT, RUNNING, SECONDS, option


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
@option("--epochs", type=int, heading=RUNNING, help="End the training after this many epochs.")
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
@shared.as_json
def doctor(command: tuple[str, ...], **options: Any) -> None:
    """Run COMMAND, which trains with PyTorch, and report what its GPU waits for and what each fix would gain.

    The training script needs no change, and its results stay the same. Put two dashes before COMMAND, as in the
    examples.
    """
    quiet, as_json = options.pop("quiet"), options.pop("as_json")
    failed = None
    try:
        report = h5chunk.doctor(command=command, **options)
    except h5chunk.UtilisationError as error:
        failed, report = error, error.report
    if as_json or not quiet:
        click.echo(report.to_json() if as_json else str(report))
    if failed is not None:
        raise failed
