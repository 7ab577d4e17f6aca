"""Compute the statistics of fields in one pass over their files, and store them beside each file."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from h5chunk.errors import FieldError, FileError, printable
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.windows import Windows
from h5chunk.store.format.statistics import FieldStatistics, merged, read_statistics, statistics_path, statistics_text
from h5chunk.store.read.fields import Field
from h5chunk.store.write.new_file import write_text
from h5chunk.tools.progress import Progress, count_up
from h5chunk.transforms.images import channel_axis
from h5chunk.urls import url_of

BATCH_BYTES = 8 << 20
MAX_MERGED = 64  # number of batch statistics that are merged at a time


def store_statistics(
    path: Path,
    fields: Mapping[str, Sequence[float]],
    images: Collection[str],
    volumes: Mapping[str, Sequence[str]],
    *,
    trusted: bool,
    progress: Progress | None = None,
) -> dict[str, FieldStatistics]:
    """Compute the statistics of these fields of a file, store them beside it, and return them.

    Stored statistics of its other fields are kept. Nothing is stored beside the local copy of a remote object.

    ``fields`` has the stored values of each field that mean that there is no value; the statistics leave them out.

    A * in the path of a field stands for all episodes, as in `h5chunk.Windows`. Fields in ``images`` are JPEG or PNG
    images, whose pixels the statistics describe. ``volumes`` has the datasets of those fields whose frames differ in
    size, which Windows does not read.
    """
    datasets: dict[str, list[ChunkDataset]] = {}
    for name in fields:
        if ("*" in name and name not in volumes) or name in images:
            datasets[name] = [Windows(path, {name: name}, 1, trusted=trusted)]
        else:
            stored = volumes.get(name, [name])
            datasets[name] = [ChunkDataset(path, fields={name: each}, trusted=trusted) for each in stored]
    add = count_up("statistics", sum(len(each) for parts in datasets.values() for each in parts), progress)
    found = {}
    for name, parts in datasets.items():
        of_parts = [_statistics(each, name, fields[name], add) for each in parts]
        counts = sorted({len(each.mean) for each in of_parts})
        if len(counts) > 1:
            raise FieldError(
                f"{printable(path)}: the datasets {name!r} differ in their number of channels ({counts[0]} and "
                f"{counts[-1]}): name datasets that are alike"
            )
        found[name] = merged(of_parts)
    if not url_of(path):
        earlier: dict[str, FieldStatistics] = {}
        with suppress(FileError):  # there are none, or they are those of an earlier version of the file, or damaged
            earlier = read_statistics(path, "")
        write_text(statistics_path(path), statistics_text(path, {**earlier, **found}))
    return found


def has_statistics(dtype: str, sample_shape: tuple[int, ...]) -> bool:
    """Return whether a field has statistics: floats and arrays of numbers do, complex numbers and strings do not."""
    return not dtype.startswith(("|S", "complex")) and (bool(sample_shape) or "float" in dtype)


def _statistics(
    dataset: ChunkDataset, name: str, missing: Sequence[float], add: Callable[[int], None]
) -> FieldStatistics:
    field = dataset.field(name)
    if not isinstance(field, Field) or field.is_text or field.dtype.kind not in "biuf":
        kind = "strings" if isinstance(field, Field) and field.is_text else f"elements of {field.dtype}"
        kind = kind if isinstance(field, Field) else "samples that differ in size"
        raise FieldError(f"{printable(dataset.path)}: {name!r} has {kind}, which have no statistics: leave it out")
    is_window = isinstance(dataset, Windows)
    shape = field.sample_shape[is_window:]  # of a frame
    axis = _channel_axis(shape, "" if is_window else field.axes)
    batch_size = max(1, BATCH_BYTES // field.grid.sample_bytes)
    parts: list[FieldStatistics] = []
    loader = ChunkLoader(dataset, batch_size, shuffle=False, reuse=True, resident=False)
    for (batch,) in loader:
        parts.append(_of_batch(batch.flatten(0, 1) if is_window else batch, axis, missing))
        add(len(batch))
        if len(parts) == MAX_MERGED:
            parts = [merged(parts)]
    loader.close()
    return merged(parts)


def _channel_axis(shape: tuple[int, ...], axes: str) -> int | None:
    """Return the channel axis of a sample; None if the sample is a single channel."""
    if not shape or len(shape) == 2:
        return None
    return channel_axis(shape, axes)


def _of_batch(batch: torch.Tensor, axis: int | None, missing: Sequence[float]) -> FieldStatistics:
    """Return the statistics of a batch without ``missing`` values; ``axis`` is the channel axis of a sample."""
    values = batch.to(torch.float64)
    if batch.dtype == torch.uint8:
        values /= 255
    for mark in missing:
        values[batch == mark] = math.nan
    values = values.reshape(1, -1) if axis is None else values.movedim(axis + 1, 0).flatten(1)
    valid = torch.isfinite(values)
    count = valid.sum(dim=1)
    if bool(valid.all()):
        variance, mean = torch.var_mean(values, dim=1, correction=0)
        lowest, highest = values.aminmax(dim=1)
    else:
        mean = torch.where(valid, values, 0).sum(dim=1) / count
        variance = torch.where(valid, values - mean[:, None], 0).square().sum(dim=1) / count
        lowest, highest = (
            torch.where(valid, values, math.inf).amin(dim=1),
            torch.where(valid, values, -math.inf).amax(dim=1),
        )
    means, stds, lows, highs = (tuple(column.tolist()) for column in (mean, variance.sqrt(), lowest, highest))
    return FieldStatistics(tuple(count.tolist()), means, stds, lows, highs, valid.numel() - int(count.sum()))
