"""Statistics of a file's fields, which `h5chunk info --stats` stores next to the file in ``NAME.h5chunk-stats.json``.

The JSON object has the keys ``version`` (1), ``stamp`` (size and modification time of the file, which must match for
the statistics to be used) and ``fields`` (the attributes of `FieldStatistics` by the path of the dataset in the file).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from h5chunk.errors import FieldError, FileError, printable
from h5chunk.stamp import stamp_of
from h5chunk.urls import url_of

VERSION = 1
SUFFIX = ".h5chunk-stats.json"
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class FieldStatistics:
    """Statistics of each channel of a field. Values of uint8 are scaled to 0..1, as by `h5chunk.transforms.Normalize`.

    If samples have one axis, each of its elements is a channel. If samples have three or more axes, the channels are
    along the first axis, or along the last one for images (H, W, C). Otherwise the field is one channel.

    Attributes
    ----------
    count : tuple of int
        Number of finite values of each channel that are not missing.
    mean, std, minimum, maximum : tuple of float
        Statistics of these values of each channel, NaN if there are none. ``std`` has the divisor ``count``.
    num_missing : int
        Number of NaN and infinite values, and of those that netCDF's attributes call missing, in all channels.
    """

    count: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    minimum: tuple[float, ...]
    maximum: tuple[float, ...]
    num_missing: int = 0


def merged(parts: Sequence[FieldStatistics]) -> FieldStatistics:
    """Combine the statistics of parts of a field.

    >>> merged([FieldStatistics((1,), (value,), (0.0,), (value,), (value,)) for value in (1.0, 3.0)])
    FieldStatistics(count=(2,), mean=(2.0,), std=(1.0,), minimum=(1.0,), maximum=(3.0,), num_missing=0)
    """
    if len(parts) == 1:
        return parts[0]
    channels = [_merged_channel([part for part in parts if part.count[at]], at) for at in range(len(parts[0].count))]
    count, mean, std, minimum, maximum = zip(*channels, strict=True)
    return FieldStatistics(count, mean, std, minimum, maximum, sum(part.num_missing for part in parts))


def _merged_channel(parts: Sequence[FieldStatistics], at: int) -> tuple[int, float, float, float, float]:
    count = sum(part.count[at] for part in parts)
    if not count:
        return 0, math.nan, math.nan, math.nan, math.nan
    mean = math.fsum(part.count[at] * part.mean[at] for part in parts) / count
    squares = math.fsum(part.count[at] * (part.std[at] ** 2 + (part.mean[at] - mean) ** 2) for part in parts)
    lowest, highest = min(part.minimum[at] for part in parts), max(part.maximum[at] for part in parts)
    return count, mean, math.sqrt(squares / count), lowest, highest


def statistics_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of the statistics of a file."""
    path = Path(path)
    return path.with_name(path.name + SUFFIX)


def statistics_text(path: str | os.PathLike[str], fields: Mapping[str, FieldStatistics]) -> str:
    """Return the JSON text to store next to a file. ``fields`` has the statistics by path of the dataset."""
    content = {name: asdict(statistics) for name, statistics in fields.items()}
    return json.dumps({"version": VERSION, "stamp": stamp_of(path)[2:], "fields": content}) + "\n"


def read_statistics(path: str | os.PathLike[str], command: str) -> dict[str, FieldStatistics]:
    """Read the stored statistics of a file by the paths of its datasets. ``command`` computes them, for messages.

    Raises FieldError if there are none, or if they belong to an earlier version of the file. Raises FileError if they
    are damaged.
    """
    stored = statistics_path(path)
    if url_of(Path(path)):
        raise FieldError(
            f"{printable(path)} has no stored statistics, which are kept beside local files only: {command} prints "
            "them, as arguments of Normalize"
        )
    try:
        with stored.open("rb") as file:
            text = file.read(MAX_BYTES)
    except OSError:
        raise FieldError(f"{printable(path)} has no stored statistics: run {command}") from None
    try:
        content = json.loads(text)
        fields = {name: _parsed(values) for name, values in content["fields"].items()}
        is_current = content["version"] == VERSION and tuple(content["stamp"]) == stamp_of(path)[2:]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(f"{printable(stored)} is damaged ({error}): run {command} to replace it") from None
    if not is_current:
        raise FieldError(f"{printable(stored)} belongs to an earlier version of the file: run {command} to replace it")
    return fields


def _parsed(values: Mapping[str, Any]) -> FieldStatistics:
    count = tuple(map(int, values["count"]))
    numbers = {name: tuple(map(float, values[name])) for name in ("mean", "std", "minimum", "maximum")}
    if not count or any(len(column) != len(count) for column in numbers.values()):
        raise ValueError("lists differ in length")
    return FieldStatistics(count, num_missing=int(values["num_missing"]), **numbers)
