"""What the fields of a file are read with, and the start of reading: slots, threads and a stream of windows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from h5chunk.errors import FieldError, OptionError, printable
from h5chunk.feed.batchmaker import Maker
from h5chunk.feed.device import CpuSlot, CudaSlot, PinnedMemory
from h5chunk.feed.memory import BatchMemory
from h5chunk.feed.pipeline import TIMEOUT_S, Direct, Readers, is_kept_whole
from h5chunk.feed.spaces import CsrRows, FieldSpace, MatrixSpace, Space, matrix_space, slot_bytes, torch_dtype
from h5chunk.feed.stream import WindowStream
from h5chunk.plan.order import Order
from h5chunk.store.format import opened
from h5chunk.store.guard.checksums import OFF, PIECE_BYTES
from h5chunk.store.read.amplification import read_amplification
from h5chunk.store.read.csrrows import CsrField
from h5chunk.store.read.direct import NotDirect, direct_field
from h5chunk.store.read.files import cache_bytes
from h5chunk.store.read.filesdirect import files_fields
from h5chunk.store.read.fileset import FileSet
from h5chunk.store.read.matrixfield import MatrixField
from h5chunk.store.read.reader import H5Reader, model_cache
from h5chunk.store.write.fill import available_cores

MAX_THREADS = 10  # more of them wait for each other, and keep the loop waiting; scripts/LOG.md
DECODING_BYTES = 1 << 30  # that threads decode in, unless their number is given


class Supply:
    """The fields of a file on their way to a device.

    Parameters
    ----------
    reader : H5Reader
    how : {"auto", "direct", "mapped", "h5py"}
    device : torch.device
    num_threads : int, optional
        Default: one per core, at most 10, and no more than decode chunks in 1 GiB together.
    counts : (num_samples,) int64, optional
        How often each sample may come in an epoch; None: all of them once.
    lanes : int
        Of this rank.
    timeout_s : float, optional
        As for `Readers`.

    Attributes
    ----------
    spaces : dict of str to FieldSpace or MatrixSpace
    why : mapping of str to str
        The fields that are read through h5py, and why.

    Raises
    ------
    FieldError
        A field holds strings, or numbers that torch does not have.
    OptionError
        ``how="direct"`` or ``"mapped"`` where that cannot be.
    """

    def __init__(
        self,
        reader: H5Reader,
        how: str,
        device: torch.device,
        num_threads: int | None,
        counts: np.ndarray | None = None,
        lanes: int = 1,
        timeout_s: float | None = TIMEOUT_S,
    ) -> None:
        self.spaces = {name: _space(reader, name, counts, lanes) for name in reader.fields}
        self._reader, self._device = reader, device
        self._direct, self.why = _direct_fields(reader, how)
        self.num_threads = num_threads or _default_threads(self._direct)
        self._mapped, self._timeout_s = how == "mapped", timeout_s

    @property
    def path(self) -> Path:
        """The file, or what messages call several."""
        return self._reader.path

    @property
    def num_samples(self) -> int:
        """Of the file."""
        return self._reader.num_samples

    def read_amplification(self, order: Order) -> float:
        """Bytes that the order's epoch reads, on all ranks, over those of its samples; but for small fields."""
        rows = None if order.picks is None else order.picks.drawn(order.seed, order.epoch).samples
        kept = [name for name, field in self._direct.items() if is_kept_whole(field)]
        return read_amplification(self._reader, rows, self._direct, kept)

    @property
    def all_bytes(self) -> int:
        """Of all samples of the file."""
        return sum(space.all_bytes(self.num_samples) for space in self.spaces.values())

    @property
    def example(self) -> CsrRows | None:
        """A row of a sparse matrix, if there is one."""
        first = next(iter(self.spaces.values()))
        return first.example() if isinstance(first, MatrixSpace) else None

    def window_bytes(self, num_samples: int) -> int:
        """Of a window: on the host and, if that is a GPU, on the device."""
        return (1 if self._device.type == "cpu" else 2) * slot_bytes(self.spaces, num_samples)

    def other_bytes(self, order: Order) -> int:
        """Memory beside the windows: small fields, what HDF5 caches, what compressed chunks are decoded in."""
        total = sum(
            field.num_bytes if is_kept_whole(field) else field.scratch_bytes(self.num_threads)
            for field in self._direct.values()
        )
        if self.why:
            total += cache_bytes(self._reader, model_cache(self._reader, order.open_chunks, order.cache_w0))
        if self._reader.matrix is not None:
            total += self._reader.indptr.nbytes * (2 if isinstance(self._reader, FileSet) else 1)  # each file's, too
        if self._reader.checksums != OFF:
            total += self.num_threads * PIECE_BYTES
        return total

    def start(
        self,
        order: Order,
        num_slots: int,
        num_samples: int,
        maker: Maker,
        *,
        late: bool,
        echo: float | str | None = None,
        start: int = 0,
    ) -> tuple[WindowStream, Callable[[], None]]:
        """Threads that read windows of at most ``num_samples``, and what ends them.

        ``late``, ``echo`` and ``start`` are those of `WindowStream`; ``echo`` is None for an epoch alone.
        """
        pinned: PinnedMemory | None = None
        readers: Readers | None = None
        slots: list[Any]

        def close() -> None:
            if readers is not None:
                readers.close()
            if pinned is not None:
                copies.synchronize()
                pinned.close()

        try:
            if self._device.type == "cpu":
                memory = None if late else BatchMemory()
                gathered = BatchMemory()
                slots = [CpuSlot(self.spaces, num_samples, memory, gathered) for _ in range(num_slots)]
            else:
                copies = torch.cuda.Stream(self._device)
                each = slot_bytes(self.spaces, num_samples)
                with torch.cuda.device(self._device):
                    pinned = PinnedMemory(num_slots * each)
                parts = pinned.bytes[: num_slots * each].reshape(num_slots, each)
                slots = [CudaSlot(self.spaces, part, copies) for part in parts]
            if self.why:
                self._reader.set_caches(model_cache(self._reader, order.open_chunks, order.cache_w0))
            options: Any = {"mapped": self._mapped, "timeout_s": self._timeout_s}
            readers = Readers(self._reader, self._direct, self.num_threads, **options)
            stream = WindowStream(
                readers, slots, order, maker, late=late, echo=echo or 1, once=echo is None, start=start
            )
            return stream, close
        except BaseException:
            close()
            raise


def _space(reader: H5Reader, name: str, counts: np.ndarray | None, lanes: int) -> Space:
    field = reader.fields[name]
    dtype = torch_dtype(field.dtype, name)
    if dtype is None:
        raise FieldError(f"field {name!r} holds strings, which no device takes: leave it out, or use ChunkDataset")
    if not isinstance(field, MatrixField):
        return FieldSpace(field.sample_shape, dtype)
    return matrix_space(reader, field, counts, lanes)


def _direct_fields(reader: H5Reader, how: str) -> tuple[dict[str, Direct], Mapping[str, str]]:
    """The fields that can be read by byte ranges, and why the others cannot."""
    if how == "h5py":
        return {}, dict.fromkeys(reader.fields, "asked for")
    direct, why = _by_ranges(reader)
    if how == "mapped":
        for name, found in direct.items():
            if isinstance(found, CsrField):
                why[name] = "it is a sparse matrix, whose rows are read by byte ranges"
            elif not found.is_one_run:
                why[name] = "it is compressed, or its chunks do not lie one behind the other"
    if why and how != "auto":
        name, reason = next(iter(why.items()))
        verb = "mapped" if how == "mapped" else "read directly"
        raise OptionError(f"field {name!r} cannot be {verb}: {reason}: use reader='auto' or 'h5py'")
    for name, reason in why.items():
        warnings.warn(printable(f"field {name!r} is read through h5py, in one thread: {reason}"), stacklevel=4)
    return direct, why


def _default_threads(fields: Mapping[str, Direct]) -> int:
    """One per core, but no more than what they decode in together allows."""
    thread_bytes = sum(field.scratch_bytes(1) - field.scratch_bytes(0) for field in fields.values())
    return max(1, min(MAX_THREADS, available_cores(), DECODING_BYTES // max(1, thread_bytes)))


def _by_ranges(reader: H5Reader) -> tuple[dict[str, Direct], dict[str, str]]:
    direct: dict[str, Direct] = {}
    why: dict[str, str] = {}
    if isinstance(reader, FileSet):
        found, why = files_fields(reader)
        return {**found}, why
    with opened(reader.path) as file:
        for name, field in reader.fields.items():
            try:
                if isinstance(field, MatrixField):
                    direct[name] = CsrField(reader.path, file, field, reader.indptr, reader.sums)
                else:
                    direct[name] = direct_field(reader.path, file, field, reader.sums)
            except NotDirect as error:
                why[name] = str(error)
    return direct, why
