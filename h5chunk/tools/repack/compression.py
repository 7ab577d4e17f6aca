"""The names of compressions."""

from __future__ import annotations

import h5py

from h5chunk.errors import OptionError
from h5chunk.store.hdf5.codecs import GZIP, LZF
from h5chunk.store.rewrite.replica import Filter

COMPRESSIONS = ("none", "gzip", "lzf", "zstd", "lz4", "blosc")
_LEVELS = {"gzip": (0, 9, 4), "zstd": (1, 22, 3)}  # least, most, default


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
