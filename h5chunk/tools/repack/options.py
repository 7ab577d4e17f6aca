"""Options of repack, including tuned options (``--tuned FILE.json``), and the names of compressions."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import h5py

from h5chunk.errors import OptionError, printable
from h5chunk.plan.cache import CacheSettings
from h5chunk.plan.repack import check_memory
from h5chunk.store.hdf5.codecs import GZIP, LZF
from h5chunk.store.rewrite.replica import Filter

MEMORY_BYTES = 1 << 30
MAX_COUNT = (1 << 63) - 1  # that a file can keep
COMPRESSIONS = ("none", "gzip", "lzf", "zstd", "lz4", "blosc")
_LEVELS = {"gzip": (0, 9, 4), "zstd": (1, 22, 3)}  # least, most, default


@dataclass(frozen=True)
class RepackOptions:
    """Options of repack; see the arguments of `h5chunk.tools.repack.repack.repack`."""

    chunk_samples: int | None = None
    window_chunks: int | None = None
    cache: CacheSettings | None = None
    shuffle: bool = False
    seed: int = 0
    compression: str | None = None
    fields: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    memory_bytes: int = MEMORY_BYTES
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("chunk_samples", "window_chunks"):
            _check_count(name, getattr(self, name))
        if self.cache is not None and max(self.cache.nslots, self.cache.nbytes) > MAX_COUNT:
            raise OptionError(f"cache is {self.cache}: give numbers of at most {MAX_COUNT}")
        if not 0 <= self.seed < 1 << 64:
            raise OptionError(f"seed is {self.seed}: give a number from 0 to {(1 << 64) - 1}")
        check_memory(self.memory_bytes, 0)
        parse_compression(self.compression)

    def recorded(self) -> dict[str, Any]:
        """Return the options that are recorded in the file: all that determine its bytes."""
        names = ("chunk_samples", "window_chunks", "shuffle", "seed", "compression", "fields", "keep")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Tuned:
    """Options that a tuner recommends for a file; None for an option without a recommendation."""

    chunk_samples: int | None = None
    window_chunks: int | None = None
    cache: CacheSettings | None = None
    compression: str | None = None
    shuffle: bool = False  # its window and chunks mix well enough only once samples are permuted
    num_samples: int | None = None  # of the file


def read_tuned(path: str | os.PathLike[str]) -> Tuned:
    """Read tuned options, such as ``{"chunk_samples": 8, "cache": [1, 0, 0.0]}``, from a JSON file.

    Every key may be missing or null; unknown keys are ignored.
    """
    shown = printable(path)
    try:
        given = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise OptionError(f"{shown}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{shown}: not a JSON file: {error}") from None
    if not isinstance(given, dict):
        raise OptionError(f'{shown}: holds {_shown(given)}, not a JSON object such as {{"chunk_samples": 8}}')
    found = {name: given[name] for name in (each.name for each in fields(Tuned)) if given.get(name) is not None}
    try:
        for name in ("chunk_samples", "window_chunks", "num_samples"):
            _check_count(name, found.get(name))
        if not isinstance(found.get("shuffle", False), bool):
            raise OptionError(f"shuffle is {_shown(found['shuffle'])}: give true or false")
        compression = found.get("compression", "none")
        if not isinstance(compression, str):
            raise OptionError(f"compression is {_shown(compression)}: give one of {', '.join(COMPRESSIONS)}")
        parse_compression(compression)
        if "cache" in found:
            cache = found["cache"]
            if not isinstance(cache, list) or [type(each) for each in cache] not in ([int] * 3, [int, int, float]):
                raise OptionError(
                    f"cache is {_shown(cache)}: give [nslots, nbytes, w0], two whole numbers and one from 0 to 1"
                )
            found["cache"] = CacheSettings.of(cache)
    except OptionError as error:
        raise OptionError(f"{shown}: {error}") from None
    return Tuned(**found)


def _check_count(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise OptionError(f"{name} is {_shown(value)}: give a whole number, at least 1")
    if value is not None and value > MAX_COUNT:
        raise OptionError(f"{name} is {_shown(value)}: give at most {MAX_COUNT}")


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_compression(text: str | None) -> tuple[Filter, ...]:
    """Parse the name of a compression, such as ``gzip`` or ``gzip:9``."""
    name, _, level = (text or "none").partition(":")
    if name not in COMPRESSIONS or (level and name not in _LEVELS):
        raise OptionError(
            f"compression is {text!r}: give one of {', '.join(COMPRESSIONS)}, gzip:0 to 9 or zstd:1 to 22"
        )
    if name == "none":
        return ()
    if name == "lzf":
        return (Filter(LZF),)
    number = 0
    if name in _LEVELS:
        least, most, number = _LEVELS[name]
        number = int(level) if level.isdecimal() else -1 if level else number
        if not least <= number <= most:
            raise OptionError(f"compression is {text!r}: levels of {name} are {least} to {most}")
    return (Filter(GZIP, (number,)),) if name == "gzip" else _of_plugin(name, number)


def _of_plugin(name: str, level: int) -> tuple[Filter, ...]:
    try:
        import hdf5plugin
    except ImportError:
        raise OptionError(f'compression is {name!r} but hdf5plugin is missing: pip install "h5chunk[codecs]"') from None
    made = {"zstd": lambda: hdf5plugin.Zstd(clevel=level), "lz4": hdf5plugin.LZ4, "blosc": hdf5plugin.Blosc}[name]()
    code = int(made["compression"])
    if not h5py.h5z.filter_avail(code):
        raise OptionError(f"compression is {name!r} but this hdf5plugin lacks it: install one that has it")
    return (Filter(code, tuple(made["compression_opts"])),)
