"""Options of repack, including tuned options (``--tuned FILE.json``)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h5chunk.errors import MAX_NUMBER, OptionError, check_whole, printable
from h5chunk.sources.kinds import DEFAULT_MEMORY_BYTES
from h5chunk.sources.options import option
from h5chunk.tools.convert.options import WriteOptions

TUNED = ("chunk_samples", "window_chunks", "cache", "compression")  # options that a tuner may recommend


@dataclass(frozen=True)
class RepackOptions(WriteOptions):
    """Options of `h5chunk.repack`."""

    fields: tuple[str, ...] = option(
        (),
        "Dataset to repack, whose first axis indexes the samples (repeatable); others are copied, or left out if that "
        "is impossible. A * stands for the name of each group, as in 'data/*/obs/rgb'. With --shuffle, all of them "
        "must have the same length, and other datasets of it move, too.",
        metavar="DATASET",
        shown_default="images, AnnData's X, or the largest, and those like it in other groups",
        heading="Fields",
        repeatable=True,
    )
    keep: tuple[str, ...] = option(
        (),
        "Dataset or group to copy unchanged, although its length is the number of samples, or because a shuffle does "
        "not concern it; OBJECT@NAME for an attribute (repeatable).",
        metavar="NAME",
        heading="Fields",
        repeatable=True,
    )
    chunks: tuple[int, ...] = option(
        (),
        "Shape of the chunks, for reading patches of volumes. It applies to fields with this number of axes.",
        metavar="N,N[,N...]",
        shown_default="complete samples",
    )
    shuffle: bool = option(False, "Shuffle the samples, in the same order in all fields.")
    window_chunks: int | None = option(None, "Shuffle window, in chunks, to recommend to readers in OUTPUT.", minimum=1)
    cache: Any = option(None, "Chunk cache to recommend to readers in OUTPUT: (nslots, nbytes, w0).")
    compression: str | None = option(
        None,
        "Compression of the fields: gzip, lzf, zstd, lz4, blosc or none.",
        metavar="NAME[:LEVEL]",
        shown_default="none",
    )
    memory_bytes: int = option(
        DEFAULT_MEMORY_BYTES,
        "Approximate upper limit on memory, such as 512M.",
        unit="bytes",
        shown_default="1GiB",
        heading="Running",
    )

    def __post_init__(self) -> None:
        from h5chunk.plan.cache import CacheSettings
        from h5chunk.plan.repack import memory_for_copying
        from h5chunk.tools.repack.plan import parse_compression

        super().__post_init__()
        if self.cache is not None:
            object.__setattr__(self, "cache", CacheSettings.of(self.cache))
            if max(self.cache.nslots, self.cache.nbytes) > MAX_NUMBER:
                raise OptionError(f"cache is {self.cache}: use numbers of at most {MAX_NUMBER}")
        object.__setattr__(self, "chunks", tuple(check_whole("chunks", each, 1, 1 << 30) for each in self.chunks))
        if self.chunks and (self.shuffle or self.chunk_samples or self.window_chunks or self.cache):
            raise OptionError("chunks divides samples: leave out shuffle, chunk_samples, window_chunks and cache")
        memory_for_copying(self.memory_bytes, 0)
        parse_compression(self.compression)

    @property
    def needs_header(self) -> bool:
        """Whether the new file gets the group /h5chunk, which describes samples of one number."""
        return self.shuffle or self.window_chunks is not None or self.cache is not None

    def recorded(self) -> dict[str, Any]:
        """Return the options to record in the file: those that determine its bytes."""
        names = ("chunk_samples", "window_chunks", "shuffle", "seed", "compression", "fields", "keep")
        return {name: getattr(self, name) for name in names} | ({"chunks": self.chunks} if self.chunks else {})


def read_tuned(path: str | os.PathLike[str]) -> tuple[RepackOptions, int | None]:
    """Read the recommended options from JSON that tune or another tuner wrote, such as ``{"chunk_samples": 8}``.

    Returns the options, and the number of samples of the tuned file, or None if it is not recorded. If the
    tuner recommends keeping a file with one sample per chunk as it is, all options have their defaults. Keys may be
    missing or null, but not all missing, and unknown keys are ignored. Raises OptionError if the tuner recommends
    keeping chunks of parts of samples.
    """
    label = printable(path)
    try:
        recorded = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise OptionError(f"{label}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{label}: is not a JSON file ({error})") from None
    if not isinstance(recorded, dict):
        held = json.dumps(recorded)[:60]
        raise OptionError(f'{label}: contains {held}, not a JSON object such as {{"chunk_samples": 8}}')
    known = (*TUNED, "shuffle", "chunks")
    if not recorded.keys() & {*known}:
        raise OptionError(
            f"{label}: has none of the keys {', '.join(known)}, so it recommends nothing to repack or convert: "
            "pass the output of h5chunk tune FILE --json for a local file"
        )
    if recorded.get("repack") is False and "chunks" in recorded:
        raise OptionError(
            f"{label}: recommends keeping the chunks of the file, so there is nothing to repack: leave out tuned, and "
            "pass chunks if you want others"
        )
    is_none = (
        recorded.get("repack") is False and recorded.get("chunk_samples") == 1
    )  # the settings of a file that should not be rewritten
    names = () if is_none else known
    found = {name: recorded[name] for name in names if recorded.get(name) is not None}
    try:
        num_samples = (
            None if recorded.get("num_samples") is None else check_whole("num_samples", recorded["num_samples"], 1)
        )
        return RepackOptions(**found), num_samples
    except OptionError as error:
        raise OptionError(f"{label}: {error}") from None
