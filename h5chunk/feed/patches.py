"""Patches of volumes as the samples of a data set, for microscopy, CT, electron microscopy and large images."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from h5chunk.errors import OptionError, check_whole, count_text, printable
from h5chunk.feed.columns import torch_dtype
from h5chunk.feed.dataset import ChunkDataset, without_numbers
from h5chunk.feed.patch_weights import Weights, read_weights, weights_field
from h5chunk.feed.skipping import MAX_SKIPPED, RAISE
from h5chunk.plan.draws import epoch_rows
from h5chunk.plan.order import Order
from h5chunk.plan.patches import CELL_BYTES, RandomPatches, Starts, Tiles, cell_shape, decoded_voxels
from h5chunk.plan.permutation import MAX_SEED
from h5chunk.remote.mirror import remote_options
from h5chunk.store.hdf5.packing import check_decode
from h5chunk.store.read.checksums import OFF
from h5chunk.store.read.field_readers import field_readers
from h5chunk.store.read.fields import SAMPLE_NUMBER, Fields, named_paths
from h5chunk.store.read.files import Paths, list_data_files
from h5chunk.store.read.volumes import POSITION, WEIGHTS, PatchReader, VolumeBoxes, VolumeField, Volumes, open_volumes
from h5chunk.transforms.compile import Transforms

PADDINGS = ("none", "edge", "reflect")


class Patches(ChunkDataset):
    """Random patches of 1-D to 4-D volumes, at new positions in each epoch, as the samples of a `ChunkDataset`.

    ::

        patches = h5chunk.Patches("ct.h5", {"raw": "*/raw", "label": "*/label"}, size=(64, 64, 64))
        for raw, label in h5chunk.ChunkLoader(patches, 4, device="cuda"):
            ...

    ``dataset[i]`` is a tuple with patch i of each field, ``(*channels, *size)`` or ``(*size, *channels)``. In a
    `ChunkLoader`, or a DataLoader with a `ChunkSampler`, the position of patch i depends only on (seed, epoch, i), so
    that patches are the same after resuming and with any number of workers. Without a sampler, torch's random generator
    draws an epoch for each patch that is read: ``dataset[i]`` is at another position each time.

    Each volume is divided into cells, by default of up to 128 MiB. The patches of a few random cells are shuffled
    together, so that each chunk of these cells is decoded only once. The patches of a batch are therefore neighbours
    more often than after a full shuffle. ``window_chunks`` of `ChunkSampler` is the number of cells that are shuffled
    together.

    Parameters
    ----------
    path : path or sequence of paths
        As for `ChunkDataset`.
    fields : sequence or mapping of str
        Datasets; a mapping gives them names. If a file has several volumes, ``*`` takes the place of the volume's name,
        as in ``{"raw": "*/raw", "label": "*/label"}``. Volumes may differ in size. ``sample_number`` is the number of
        each patch, as for `ChunkDataset`.
    size : sequence of int
        The shape of a patch in space, such as ``(64, 64, 64)``.
    per_volume : int, optional
        Number of patches per volume in an epoch. Default: the voxels of the volume divided by those of a patch, rounded
        up.
    channels : {"first", "last"}, or mapping of str
        Position of the axes that are not spatial, for all fields or by field name: first, as in (C, Z, Y, X), or last,
        as in (Z, Y, X, C). These axes are read completely. Required if a dataset has more axes than ``size``.
    halo : int, sequence of int, or mapping of these
        Width in voxels of a border that is read around each patch: for all axes, for each axis, or by field name.
    padding : {"none", "edge", "reflect"} or number
        The values outside of a volume, where a halo extends beyond it or where the volume is smaller than a patch: the
        nearest voxel, the volume mirrored at its border, or a constant. "none": a patch and its halo never extend
        beyond the volume.
    weights : str or mapping, optional
        A field or dataset with a weight for each voxel, which is the relative probability that the voxel is the centre
        of a patch. In a dataset of integers, all values other than 0 have the same weight. To compute the weights, pass
        ``{"label": function}``: the function gets blocks of the dataset, and returns weights of the same shape. The
        dataset is read once, and 256 centres are kept for each cell. A patch that would extend beyond the volume is
        moved inside. If all weights of a volume are 0, its patches are at uniformly random positions.
    share : float
        Fraction of the patches that are placed by weights. The others are at uniformly random positions.
    cell_bytes : int
        Size in bytes of all decoded chunks that the patches of a cell need. With larger cells, fewer chunks are decoded
        twice, but a window of the shuffle has more neighbouring patches.
    positions : bool
        Add the field ``position``, (1 + axes,) int64: the number of the volume, and the start of the patch in it,
        without the halo.
    seed : int
        Random seed for the positions.
    transforms, as_dict, on_error, max_skipped, trusted, checksums, decode, cache_dir, cache_bytes, storage_options
        As for `ChunkDataset`.

    Raises
    ------
    FieldError
        A dataset is missing, or the fields of a volume differ in their shape in space.
    OptionError
        An argument is invalid; or a volume is smaller than a patch, and there is no padding.
    """

    def __init__(
        self,
        path: Paths,
        fields: Fields,
        size: Sequence[int],
        *,
        per_volume: int | None = None,
        channels: str | Mapping[str, str] | None = None,
        halo: Any = 0,
        padding: Any = "none",
        weights: Weights | None = None,
        share: float = 1.0,
        cell_bytes: int = CELL_BYTES,
        positions: bool = False,
        seed: int = 0,
        transforms: Transforms | None = None,
        as_dict: bool = False,
        on_error: str = RAISE,
        max_skipped: float = MAX_SKIPPED,
        trusted: bool = False,
        checksums: str = OFF,
        decode: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        named = named_paths(fields)
        fields = without_numbers(named)[0]
        if POSITION in named and positions:
            raise OptionError(f"fields has {POSITION!r}, which is the name of the field of positions: rename it")
        if isinstance(size, str) or not hasattr(size, "__len__") or not 1 <= len(size) <= 4:
            raise OptionError(f"size is {size!r}: pass 1 to 4 numbers, such as (64, 64, 64)")
        size = tuple(check_whole("size", length, 1, 1 << 30) for length in size)
        halos = {name: _halo(halo, name, len(size)) for name in fields}
        if not _is_number(padding) and not (isinstance(padding, str) and padding in PADDINGS):
            raise OptionError(f"padding is {padding!r}: pass 'none', 'edge', 'reflect' or a number")
        if not _is_number(share) or not 0 <= share <= 1:
            raise OptionError(f"share is {share!r}: pass a number from 0 to 1")
        seed = check_whole("seed", seed, 0, MAX_SEED)
        files = list_data_files(path, remote_options(cache_dir, cache_bytes, storage_options))
        weigher, weighed = weights_field(weights, fields)
        of_field = channels if isinstance(channels, Mapping) else dict.fromkeys((*fields, WEIGHTS), channels)
        leading = {name: of_field.get(name) for name in (*fields, WEIGHTS)}
        opened_as = {**fields, **weigher}, size, leading, check_decode(decode), trusted, checksums
        volumes = open_volumes(files, *opened_as)
        padded = {name: _with_halo(volumes.fields[name], halos[name], padding) for name in fields}
        margin = np.max(list(halos.values()), axis=0) if padding == "none" else np.zeros(len(size), np.int64)
        _check_sizes(volumes, size, margin, padding)
        self._starts, self._size, self._padding = Starts.of(volumes.shapes, np.array(size), margin), size, padding
        counts = np.ceil(volumes.shapes.prod(axis=1, dtype=np.float64) / math.prod(size)).astype(np.int64)
        if per_volume is not None:
            counts[:] = check_whole("per_volume", per_volume, 1, 1 << 24)
        cell = _cell(padded, size, check_whole("cell_bytes", cell_bytes, 1))
        place = partial(RandomPatches, volumes.shapes, size, self._starts, cell, counts, seed)
        if not weigher:
            plan = place()
        else:
            with closing(VolumeBoxes(volumes, WEIGHTS)) as boxes:
                plan = place(partial(read_weights, boxes, weighed), float(share))
            if plan.unweighted:
                warnings.warn(
                    f"{printable(files[0])}: in {len(plan.unweighted)} of "
                    f"{count_text(len(counts), 'volume')}, such as {printable(volumes.names[plan.unweighted[0]])}, no "
                    "weights are above 0, so their patches are at uniformly random positions",
                    stacklevel=2,
                )
        source = PatchReader(volumes.with_fields(padded), plan, has_positions=positions)
        how: dict[str, Any] = {"decode": decode, "on_error": on_error, "max_skipped": max_skipped}
        super().__init__(source, fields=named, transforms=transforms, as_dict=as_dict, **how)

    @property
    def _patches(self) -> PatchReader:
        assert isinstance(self._reader, PatchReader)
        return self._reader

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of a patch in space, without its halo."""
        return self._size

    @property
    def volumes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The name of each volume, and its shape in space."""
        volumes = self._patches.volumes
        return [(name, tuple(shape)) for name, shape in zip(volumes.names, volumes.shapes.tolist(), strict=True)]

    def positions(self, epoch: int = 0) -> np.ndarray:
        """Return the positions of all patches of an epoch: (n, 1 + axes) int64.

        Each row has the number of the volume, and the start of the patch in it, without the halo.
        """
        check_whole("epoch", epoch, 0, (1 << 63) - 1)
        added = epoch_rows(epoch, self.epoch_samples) if self.epoch_samples else 0
        return self._patches.positions_of(self.samples + added)

    def amplification(self, order: Order) -> float:
        """Return the bytes that an epoch reads and decodes, divided by the bytes of its patches.

        Parameters
        ----------
        order : Order
            The order of the patches, such as ``ChunkSampler(patches, 4).order``. A chunk counts once per window of the
            order, because a `ChunkLoader` reads the patches of a window together.
        """
        fields = field_readers(self._reader)[0].values()
        added = epoch_rows(order.epoch, self.epoch_samples) if self.epoch_samples else 0
        windows = [self.samples[window.rows] + added for window in order.windows()]
        read = sum(field.bytes_read(rows) for rows in windows for field in fields)
        return read / max(1, sum(len(rows) for rows in windows) * sum(field.row_bytes for field in fields))

    def tiles(self, overlap: int | Sequence[int] = 0) -> Patches:
        """Return a data set of tiles that cover all volumes, for inference: see `Stitcher`.

        The tiles have the size of the patches, and are in the order of the volumes. The last tile along an axis ends
        at the border of the volume. The field ``position`` is added.

        Parameters
        ----------
        overlap : int or sequence of int
            Minimum overlap of neighbouring tiles, in voxels: for all axes, or for each axis.

        Raises
        ------
        OptionError
            The overlap is not less than the size, the halo reaches beyond the volume and there is no padding, or this
            data set is a subset.
        """
        both = _numbers("overlap", overlap, len(self._size))
        if any(each >= length for each, length in zip(both, self._size, strict=True)):
            raise OptionError(f"overlap is {overlap!r}: it must be less than the size, {self._size}")
        source = self._patches
        if self._padding == "none" and any(any(each.halo) for each in source.volumes.fields.values()):
            raise OptionError("tiles with a halo reach beyond the volume: pass padding= to Patches, such as 'reflect'")
        if POSITION in source.fields or POSITION in self._numbered:
            raise OptionError(f"fields has {POSITION!r}, which is the name of the field of positions: rename it")
        if self._samples is not None:
            raise OptionError("this is a subset of patches: call tiles() of the full data set first, then subset()")
        tiles = Tiles(source.volumes.shapes, self._size, self._starts, both)
        other = copy(self)
        fields = {name: SAMPLE_NUMBER if name in self._numbered else name for name in self.fields}
        ChunkDataset.__init__(
            other,
            PatchReader(source.volumes, tiles, has_positions=True),
            fields=fields,
            decode=self._decode,
            transforms=self.transforms,
            as_dict=self.as_dict,
            on_error=self.on_error,
            max_skipped=self._max_skipped,
        )
        return other


def _check_sizes(volumes: Volumes, size: tuple[int, ...], margin: np.ndarray, padding: Any) -> None:
    needed = np.array(size) + 2 * margin
    small = np.flatnonzero((volumes.shapes < needed).any(axis=1))
    if padding == "none" and len(small):
        name, shape = printable(volumes.names[small[0]]), tuple(volumes.shapes[small[0]].tolist())
        raise OptionError(
            f"{name}: a volume has the shape {shape}, but a patch with its halo has {tuple(needed.tolist())}. Reduce "
            "size or halo, or use padding='reflect'"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _holds(dtype: np.dtype, value: Any) -> bool:
    """Return whether an integer or boolean dtype represents a number exactly."""
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return bool(low <= value <= high) and value == int(value)


def _numbers(name: str, value: Any, count: int) -> tuple[int, ...]:
    values = [value] * count if isinstance(value, (int, np.integer)) else value
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
        raise OptionError(f"{name} is {value!r}: pass one whole number, or {count} of them")
    return tuple(check_whole(name, each, 0, 1 << 30) for each in values)


def _halo(halo: Any, name: str, count: int) -> tuple[int, ...]:
    return _numbers("halo", halo.get(name, 0) if isinstance(halo, Mapping) else halo, count)


def _with_halo(each: VolumeField, halo: tuple[int, ...], padding: Any) -> VolumeField:
    if _is_number(padding) and each.dtype.kind in "biu" and not _holds(each.dtype, padding):
        raise OptionError(
            f"padding is {padding!r}, which {each.dtype}, the type of {each.name!r}, cannot hold: pass another value"
        )
    if _is_number(padding) and each.dtype.names:  # a type that NumPy lacks
        value = torch.tensor([padding], dtype=torch_dtype(each.dtype, each.name))
        padding = value.view(torch.uint8).numpy().view(each.dtype)[0]
    return replace(each, halo=halo, padding=padding)


def _cell(fields: Mapping[str, VolumeField], size: tuple[int, ...], cell_bytes: int) -> tuple[tuple[int, ...], int]:
    """Return the cell shape that suits the largest field, and the decoded bytes that one cell needs."""
    main = max(fields.values(), key=lambda each: math.prod(each.box_shape()) * each.dtype.itemsize)
    grid = max((stored.grid for _, stored in main.stored), key=lambda grid: math.prod(grid.shape))
    space = slice(main.leading, main.leading + len(size))
    shape, chunks = grid.shape[space], grid.chunks[space] if grid.chunks else (1,) * len(size)
    voxel_bytes = math.prod(grid.shape) // math.prod(shape) * main.dtype.itemsize
    cell = cell_shape(shape, size, chunks, voxel_bytes, cell_bytes)
    return cell, decoded_voxels(shape, size, chunks, cell) * voxel_bytes
