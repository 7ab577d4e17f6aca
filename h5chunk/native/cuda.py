"""Copy data to a GPU and launch kernels, with C functions that use handles of CUDA contexts, streams and events.

Calls take a few microseconds, and release the GIL because CUDA may block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from h5chunk import native

NUM_ARGUMENTS = 16  # maximum number of arguments of a launch


class Sending(ctypes.Structure):
    """Copies from pinned memory on a stream, after the event ``consumed`` and before the event ``copied``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("context", "stream", "consumed", "copied", "copies")),
        ("num_copies", ctypes.c_int64),
    )

    events: object = None  # of torch, which would destroy ``consumed`` and ``copied``

    def set_copies(self, copies: np.ndarray) -> None:
        """Set the copies, (n, 3) int64. Each row has the device address, the host address and the number of bytes."""
        self._kept = copies
        self.copies, self.num_copies = copies.ctypes.data, len(copies)

    @property
    def address(self) -> int:
        """The address to pass to the C function that `sender` returns."""
        return ctypes.addressof(self)


class Launch(ctypes.Structure):
    """A kernel and its first arguments, of 4 or 8 bytes each. The other arguments are zero.

    ``grid_y`` and ``grid_z`` are the numbers of blocks along the last two axes of the grid.
    """

    kept: object = None  # the kernel and the arrays that the arguments refer to
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("arguments", ctypes.c_uint64 * NUM_ARGUMENTS),
        ("num_threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("grid_y", ctypes.c_uint32),
        ("grid_z", ctypes.c_uint32),
    )

    def __init__(self, context: int | None, function: int, **values: Any) -> None:
        super().__init__(context, function, **({"grid_y": 1, "grid_z": 1} | values))

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the kernel, or -1 if it is unknown or a parameter has neither 4 nor 8 bytes."""
        return int(native._library().h5chunk_cuda_parameters(ctypes.addressof(self)))

    def __call__(self, stream: int, num_blocks: int, arguments: Sequence[int]) -> bool:
        """Launch the kernel on a stream, with blocks along the first axis. Returns whether that succeeded."""
        own = Launch.from_buffer_copy(self)  # other threads may launch it at the same time
        own.arguments[: len(arguments)] = arguments
        return not native._library().h5chunk_cuda_launch(ctypes.addressof(own), stream, num_blocks)


def context() -> int | None:
    """Return the CUDA context of the calling thread, or None if there is none or the C library was not built."""
    found: int | None = native._library().h5chunk_cuda_context() if native.available() else None
    return found


def load(context: int, image: bytes, name: str) -> int | None:
    """Load a module of machine code, or of PTX, into a context, for good. Return its function with this name."""
    function: int | None = native._library().h5chunk_cuda_load(context, image, name.encode())
    return function


def order(context: int, stream: int, *, wait: int | None = None, record: int | None = None) -> bool:
    """Make a stream wait for the event ``wait``, and then record the event ``record``.

    Returns whether that succeeded.
    """
    return not native._library().h5chunk_cuda_order(context, stream, wait, record)


def sender() -> int:
    """Return the address of the C function that runs a `Sending`, for `h5chunk.native.Ending`."""
    return ctypes.cast(native._library().h5chunk_cuda_send, ctypes.c_void_p).value or 0


def copied() -> int:
    """Return the address of the C function that says whether a `Sending` has ended, for `h5chunk.native.Buffer`."""
    return ctypes.cast(native._library().h5chunk_cuda_is_copied, ctypes.c_void_p).value or 0
