"""Combine the tiles of volumes, such as the predictions of a network, into volumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from h5chunk.errors import OptionError
from h5chunk.feed.patches import Patches
from h5chunk.plan.patches import Tiles
from h5chunk.store.hdf5.attributes import EXACT

BLENDS: dict[str, Callable[[int], np.ndarray]] = {
    "uniform": lambda size: np.ones(size),
    "linear": lambda size: np.minimum(np.arange(1, size + 1), np.arange(size, 0, -1)) / ((size + 1) // 2),
    "gaussian": lambda size: np.exp(-0.5 * ((np.arange(size) - (size - 1) / 2) / (size / 8)) ** 2).clip(1e-3),
}


class Stitcher:
    """Combine the tiles of `Patches.tiles` into volumes. Where tiles overlap, the result is their weighted mean.

    ::

        tiles = patches.tiles(overlap=16)
        stitcher = h5chunk.Stitcher(tiles)
        for raw, position in h5chunk.ChunkLoader(tiles, 4, shuffle=False):
            stitcher.add(network(raw), position)
        volumes = stitcher.result()

    The mean of equal values is exactly that value, and the mean of integers is rounded. Apart from the results, only as
    many planes as a tile has are kept in memory.

    Parameters
    ----------
    tiles : Patches
        The data set that `Patches.tiles` returned. Its tiles must be added in order.
    blend : {"gaussian", "linear", "uniform"}
        The weights of the voxels of a tile: highest at the centre of the tile, or all equal.
    channels : {"first", "last"}
        Position of the axes of the added values that are not spatial.
    out : callable, optional
        Called as ``out(name, shape, dtype)`` for each volume. Returns the array to which its result is written, plane
        by plane, such as a dataset of an open HDF5 file:
        ``lambda name, shape, dtype: file.create_dataset(name, shape, dtype)``. Default: new NumPy arrays.

    Raises
    ------
    OptionError
        An argument is invalid.
    """

    def __init__(
        self,
        tiles: Patches,
        *,
        blend: str = "gaussian",
        channels: str = "first",
        out: Callable[[str, tuple[int, ...], np.dtype], Any] | None = None,
    ) -> None:
        if not isinstance(tiles, Patches) or not isinstance(tiles._patches.plan, Tiles):
            raise OptionError(f"tiles is {tiles!r:.80}: pass the data set that Patches.tiles() returned")
        if blend not in BLENDS:
            raise OptionError(f"blend is {blend!r}: pass one of {', '.join(BLENDS)}")
        if channels not in ("first", "last"):
            raise OptionError(f"channels is {channels!r}: pass 'first' or 'last'")
        self._tiles, self._size, self._first = tiles, tiles.size, channels == "first"
        self._make = out or (lambda _name, shape, dtype: np.empty(shape, dtype))
        self._next, self._results = 0, list[Any]()
        self._window = np.ones(())
        for length in self._size:
            self._window = np.multiply.outer(self._window, BLENDS[blend](length))

    def add(self, values: Any, positions: Any) -> None:
        """Add the next tiles.

        Parameters
        ----------
        values : tensor or array, (n, *channels, *size) or (n, *size, *channels)
            The values of n tiles, with or without the halo, which is discarded.
        positions : tensor or array, (n, 1 + axes) of int
            The field ``position`` of these tiles.

        Raises
        ------
        OptionError
            These are not the next tiles, they differ from earlier tiles in shape or dtype, or they contain integers
            beyond 2**53.
        """
        values, positions = _as_array(values), _as_array(positions)
        rows = np.arange(self._next, self._next + len(positions))
        if len(values) != len(positions) or rows[-1:] >= len(self._tiles):
            raise OptionError(
                f"there are {len(values)} tiles and {len(positions)} positions, but {len(self._tiles) - self._next} "
                "tiles are left: add each tile once, with its position"
            )
        if not np.array_equal(self._tiles._patches.positions_of(rows), positions):
            raise OptionError(
                "these are not the next tiles: add them in the order of ChunkLoader(tiles, ..., shuffle=False)"
            )
        if values.dtype.kind not in "biufc":
            raise OptionError(f"tiles are of type {values.dtype}: pass numbers")
        if values.dtype.itemsize == 8 and values.dtype.kind in "iu":
            least, most = int(values.min(initial=0)), int(values.max(initial=0))
            if not -EXACT <= least <= most <= EXACT:
                raise OptionError(
                    f"tiles contain {least} to {most}, but integers beyond 2**53 have no exact mean: use floats"
                )
        for value, (volume, *start) in zip(values, positions.tolist(), strict=True):
            if volume == len(self._results):
                self._begin(volume, value)
            self._put(self._in_space_first(value), np.array(start))
            self._next += 1

    def result(self) -> list[Any]:
        """Return the volumes, after all tiles have been added.

        Raises
        ------
        OptionError
            Tiles are missing.
        """
        if self._next < len(self._tiles):
            raise OptionError(f"only {self._next} of {len(self._tiles)} tiles were added: add the others first")
        self._flush(None)
        return self._results

    def _in_space_first(self, value: np.ndarray) -> np.ndarray:
        """Return a tile without its halo, with the spatial axes first."""
        axes = len(self._size)
        if self._first and value.ndim > axes:
            value = np.moveaxis(value, range(value.ndim - axes, value.ndim), range(axes))
        halos = [(length - size) / 2 for length, size in zip(value.shape, self._size, strict=False)]
        if value.ndim < axes or any(halo < 0 or halo % 1 for halo in halos):
            raise OptionError(
                f"a tile has the shape {value.shape}, but its spatial shape must be {self._size}, or that plus a halo: "
                "check the argument channels"
            )
        return value[tuple(slice(int(halo), int(halo) + size) for halo, size in zip(halos, self._size, strict=True))]

    def _begin(self, volume: int, value: np.ndarray) -> None:
        self._flush(None)
        name, shape = self._tiles.volumes[volume]
        others = self._in_space_first(value).shape[len(shape) :]
        self._results.append(self._make(name, (*others, *shape) if self._first else (*shape, *others), value.dtype))
        exact = value.dtype if value.dtype.kind in "fc" and value.dtype.itemsize >= 4 else np.dtype(np.float64)
        planes = (min(self._size[0], shape[0]), *shape[1:])
        self._low, self._shape, self._dtype = 0, np.array(shape), value.dtype
        self._mean, self._weight = np.zeros((*planes, *others), exact), np.zeros(planes)

    def _put(self, value: np.ndarray, start: np.ndarray) -> None:
        low, high = np.maximum(start, 0), np.minimum(start + self._size, self._shape)
        if value.dtype != self._dtype or value.shape[len(start) :] != self._mean.shape[len(start) :]:
            raise OptionError(
                f"a tile is {value.dtype}{list(value.shape)}, but the volume's first tile has another dtype or other "
                "channels: pass tiles that agree in both"
            )
        self._flush(int(low[0]))
        inside = tuple(map(slice, low - start, high - start))
        where = (slice(low[0] - self._low, high[0] - self._low), *map(slice, low[1:], high[1:]))
        window = self._window[inside]
        self._weight[where] += window
        share = (window / self._weight[where]).astype(self._mean.dtype)
        share = share.reshape(share.shape + (1,) * (value.ndim - share.ndim))
        self._mean[where] = _mean(self._mean[where], value[inside], share)

    def _flush(self, low: int | None) -> None:
        """Write the planes below ``low``, which no later tile can reach, to the output. None: all remaining planes."""
        if not self._results or low == self._low:
            return
        end = int(self._shape[0]) if low is None else low
        count, out = end - self._low, self._results[-1]
        planes = self._mean[:count]
        planes = (np.rint(planes) if self._dtype.kind in "iub" else planes).astype(self._dtype)
        where: tuple[slice, ...] = (slice(self._low, end),)
        if self._first:
            axes = len(self._size)
            planes = np.moveaxis(planes, range(axes), range(planes.ndim - axes, planes.ndim))
            where = (slice(None),) * (planes.ndim - axes) + where
        out[where] = planes
        for table in (self._mean, self._weight):
            table[: len(table) - count] = table[count:].copy()
            table[len(table) - count :] = 0
        self._low = end


def _mean(mean: np.ndarray, value: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Update a mean with a value whose weight is the fraction ``share`` of all weights so far.

    The mean of equal values is exactly that value.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        found: np.ndarray = mean + (value - mean) * share
        if not np.isfinite(found).all():  # the difference overflows, or is that of two infinities
            other = np.where(value == mean, value, mean * (1 - share) + value * share)
            found = np.where(np.isfinite(found), found, other)
    return found


def _as_array(values: Any) -> np.ndarray:
    """Return a tensor on any device as an array. A dtype that NumPy lacks, such as bfloat16, becomes float32."""
    if not hasattr(values, "detach"):
        return np.asarray(values)
    try:
        return values.detach().cpu().numpy()
    except TypeError:
        return values.detach().cpu().float().numpy()
