"""Load images of any size as training does, with random crops, and measure how fast they are decoded."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from h5chunk.feed.dataset import ChunkDataset
from h5chunk.sources.decode_any import decode_any
from h5chunk.store.read.field_readers import read_into
from h5chunk.store.read.files import Paths
from h5chunk.store.read.ragged import ImagesField
from h5chunk.store.read.samples import CsrBuffers
from h5chunk.store.read.source import Source
from h5chunk.tools.measure.checks import CROP
from h5chunk.tools.measure.machine import threads_rate
from h5chunk.transforms import RandomResizedCrop

PROBES = 64  # number of images that are decoded repeatedly


def open_data(path: Paths, fields: Mapping[str, str] | Sequence[str] | None, trusted: bool) -> ChunkDataset:
    """Open a data set to measure. Images of any size get a transform that crops them to CROP x CROP pixels."""
    dataset = ChunkDataset(path, fields=fields, trusted=trusted)
    ragged = [name for name in dataset.fields if isinstance(dataset.field(name), ImagesField)]
    return dataset.with_transforms({name: [RandomResizedCrop(CROP)] for name in ragged}) if ragged else dataset


def read_images(reader: Source, rows: np.ndarray) -> list[np.ndarray]:
    """Read the stored bytes of images of any size: one (num_bytes,) uint8 array per image."""
    assert reader.ragged is not None
    indptr = reader.indptr_of(reader.ragged.name)
    starts = np.concatenate(([0], np.cumsum(indptr[rows + 1] - indptr[rows])))
    data = np.empty(int(starts[-1]), np.uint8)
    read_into(reader, reader.ragged.name, rows, CsrBuffers(starts, data, None))
    return [data[start:stop] for start, stop in itertools.pairwise(starts.tolist())]


def decoding(reader: Source, num_samples: int) -> tuple[float, Callable[[int, float], float]]:
    """Return the mean size of a decoded image in bytes, and a function that measures the decoding rate in bytes/s.

    The function's arguments are a number of threads and a duration in seconds. It decodes some of the first
    ``num_samples`` images repeatedly.
    """
    field = reader.ragged
    assert isinstance(field, ImagesField)
    rows = np.unique(np.linspace(0, num_samples - 1, PROBES).astype(np.int64))
    images, facts = read_images(reader, rows), [table[rows].tolist() for table in reader.image_sizes_of(field.name)]
    areas = [height * width * field.channels for height, width in zip(*facts[:2], strict=True)]
    buffers: dict[int, np.ndarray] = {}
    numbers = itertools.count()

    def decode(thread: int) -> int:
        number = next(numbers) % len(images)
        height, width, orientation = (table[number] for table in facts)
        if thread not in buffers:
            buffers[thread] = np.empty(max(areas), np.uint8)
        decode_any(images[number], height, width, orientation, field.channels, (height, width), buffers[thread])
        return areas[number]

    return sum(areas) / len(areas), partial(threads_rate, decode)
