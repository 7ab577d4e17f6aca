"""Compute the statistics of fields in one pass over their files, and store them beside each file."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch

from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.windows import Windows
from h5chunk.store.format.statistics import FieldStatistics, merged, statistics_path, statistics_text
from h5chunk.store.read.fields import Field
from h5chunk.store.write.new_file import write_text
from h5chunk.tools.progress import Progress, count_up
from h5chunk.transforms.images import channel_axis

BATCH_BYTES = 8 << 20
MAX_MERGED = 64  # number of batch statistics that are merged at a time


def store_statistics(
    path: Path,
    fields: Mapping[str, Sequence[float]],
    images: Collection[str],
    *,
    trusted: bool,
    progress: Progress | None = None,
) -> dict[str, FieldStatistics]:
    """Compute the statistics of these fields of a file, store them beside it, and return them.

    ``fields`` has the stored values of each field that mean that there is no value; the statistics leave them out.

    A * in the path of a field stands for all episodes, as in `h5chunk.Windows`. Fields in ``images`` are JPEG or PNG
    images, whose pixels the statistics describe.
    """
    datasets = {
        name: Windows(path, {name: name}, 1, trusted=trusted)
        if "*" in name or name in images
        else ChunkDataset(path, fields={name: name}, trusted=trusted)
        for name in fields
    }
    add = count_up("statistics", sum(map(len, datasets.values())), progress)
    found = {name: _statistics(dataset, name, fields[name], add) for name, dataset in datasets.items()}
    write_text(statistics_path(path), statistics_text(path, found))
    return found


def has_statistics(dtype: str, sample_shape: tuple[int, ...]) -> bool:
    """Return whether a field has statistics: floats and arrays of numbers do, complex numbers and strings do not."""
    return not dtype.startswith(("|S", "complex")) and (bool(sample_shape) or "float" in dtype)


def _statistics(
    dataset: ChunkDataset, name: str, missing: Sequence[float], add: Callable[[int], None]
) -> FieldStatistics:
    field = dataset.field(name)
    assert isinstance(field, Field)
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
