"""Types of options that several commands have, and options that are the same in all of them."""

from __future__ import annotations

from typing import Any

import click

from h5chunk.errors import H5ChunkError


class ChunkSamples(click.ParamType):
    name = "auto|N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value in (None, "auto"):
            return None
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither auto nor a number", param, ctx)


class Bytes(click.ParamType):
    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from h5chunk.tools.convert.sparse_options import parse_bytes

        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except H5ChunkError as error:
            self.fail(str(error), param, ctx)


trusted = click.option(
    "--trusted",
    multiple=True,
    type=click.Path(),
    metavar="FOLDER",
    callback=lambda _context, _option, folders: list(folders) or False,
    help="Follow links, views and external storage into FOLDER, and load plugins for filters; again for more.",
)


class Seconds(click.ParamType):
    name = "SECONDS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip().lower()
        factor = 60.0 if text.endswith("m") else 1.0
        try:
            seconds = factor * float(text.rstrip("ms"))
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            self.fail(f"{value!r} is no time above 0 such as 60s or 2m", param, ctx)
        return seconds


class Triple(click.ParamType):
    name = "NSLOTS,NBYTES,W0"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in value.split(",")) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is not three numbers with commas between", param, ctx)


class Names(click.ParamType):
    name = "A,B[,C[,D]]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        return tuple(value.split(",")) if isinstance(value, str) else tuple(value)
