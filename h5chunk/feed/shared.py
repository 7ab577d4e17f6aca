"""Batches in memory that a worker of a DataLoader shares with the main process."""

from __future__ import annotations

import errno
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from multiprocessing import active_children
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk.errors import WorkerError, human_bytes

FREE, IN_USE, LOST = range(3)  # uses of a shared buffer by its receiver
FLAG_BYTES = 64  # bytes at the end of a shared buffer; tensors start at multiples of this

Tensors = tuple[torch.Tensor, ...]
Shapes = tuple[tuple[int, ...], ...]
Assemble = Callable[[Tensors], Tensors]


class Form(NamedTuple):
    """The dtypes of the tensors in a shared buffer, and the function that makes the fields of a batch from them."""

    dtypes: tuple[torch.dtype, ...]
    assemble: Assemble | None  # None if the tensors are the fields

    def assembled(self, tensors: Tensors) -> Tensors:
        """Make the fields of a batch from its tensors."""
        return tensors if self.assemble is None else self.assemble(tensors)


class SharedBuffer:
    """A buffer of a DataLoader's worker that is shared with the main process.

    The last two bytes are ``flags``, (2,) uint8: whether the main process has kept the buffer, and its `use`.
    """

    def __init__(self, memory: torch.Tensor, number: int) -> None:
        self.bytes, self.number, self.flags = memory, number, memory.numpy()[-2:]
        self.form: Form | None = None  # the form of the batch that was sent last

    @property
    def use(self) -> int:
        """The value of the second flag: FREE, IN_USE or LOST.

        IN_USE means that the receiver refers to the batch in the buffer; LOST, that a fork of the receiver still may.
        """
        return int(self.flags[1])


class SharedMemory:
    """Allocate the batches of a DataLoader's worker in memory shared with the main process, and reuse that memory.

    torch sends a shared tensor as a file descriptor, each time through a new connection, and allocates new memory for
    each batch, whose pages the system must find and clear. Here a buffer is reused once no tensor of this process
    refers to it, and the receiving process has dropped its last reference and cleared a flag in the buffer. The
    receiver keeps the buffers, and the forms of their batches, until the worker ends, so that afterwards only the
    number of the buffer and the shapes of the tensors are sent.
    """

    def __init__(self) -> None:
        self._idle: list[SharedBuffer] = []
        self._dropped: list[int] = []  # buffers that the receiver no longer has to keep

    def empty(
        self, fields: Sequence[tuple[tuple[int, ...], torch.dtype]], assemble: Assemble | None = None
    ) -> SharedFields:
        """Allocate tensors of these shapes and dtypes in one buffer. ``assemble`` builds a batch's fields from them."""
        shapes, dtypes = tuple(shape for shape, _ in fields), tuple(dtype for _, dtype in fields)
        end = sum(map(_padded_bytes, shapes, dtypes))
        buffer = self._take(end + FLAG_BYTES)
        owned = buffer.bytes.numpy()[:end]
        weakref.finalize(owned, self._idle.append, buffer).atexit = False
        return SharedFields(buffer, owned, shapes, Form(dtypes, assemble), self._dropped)

    def _take(self, num_bytes: int) -> SharedBuffer:
        for buffer in [each for each in self._idle if each.use != IN_USE]:
            self._idle[:] = [other for other in self._idle if other is not buffer]
            if buffer.use == FREE and buffer.bytes.numel() >= num_bytes:
                return buffer
            self._dropped.append(buffer.number)
        memory = shared_empty((num_bytes,), torch.uint8)
        memory[-FLAG_BYTES:] = 0
        return SharedBuffer(memory, next(_numbers))


_numbers = count()  # of the buffers of this process
_kept: dict[int, dict[int, tuple[torch.Tensor, Form]]] = {}  # received buffers and forms, by process and number


class SharedFields(tuple[torch.Tensor, ...]):
    """Fields in one shared buffer. Another process receives them as a plain tuple of tensors."""

    tensors: tuple[torch.Tensor, ...]  # the fields are made from these
    _sent: tuple[SharedBuffer, Shapes, Form, list[int]]

    def __new__(
        cls, buffer: SharedBuffer, owned: np.ndarray, shapes: Shapes, form: Form, dropped: list[int]
    ) -> SharedFields:
        tensors = tuple(_views(owned, shapes, form.dtypes))
        self = super().__new__(cls, form.assembled(tensors))
        self.tensors, self._sent = tensors, (buffer, shapes, form, dropped)
        return self

    def __reduce__(self) -> tuple[object, ...]:
        buffer, shapes, form, _ = self._sent
        if buffer.use != FREE:
            return self._copied()
        buffer.flags[1] = IN_USE
        return _receive, (buffer.bytes, shapes, form)

    def reduce_to_parent(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the fields for a queue to the parent process, to which each buffer and form is sent only once."""
        buffer, shapes, form, dropped = self._sent
        if buffer.use != FREE:
            return self._copied()
        buffer.flags[1] = IN_USE
        is_kept = buffer.flags[0]
        sent = None if is_kept else buffer.bytes
        news = None if is_kept and form == buffer.form else form
        buffer.form = form
        gone = [dropped.pop() for _ in range(len(dropped))]
        return _receive_again, (os.getpid(), buffer.number, shapes, sent, news, gone)

    def _copied(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Copy the fields. A batch needs this when it is sent again, because its buffer supports only one receiver."""
        return Form.assembled, (self._sent[2], tuple(each.clone() for each in self.tensors))


ForkingPickler.register(SharedFields, SharedFields.reduce_to_parent)


def _receive_again(
    worker: int, number: int, shapes: Shapes, sent: torch.Tensor | None, form: Form | None, gone: list[int]
) -> tuple[torch.Tensor, ...]:
    """Receive fields in a buffer that is sent only once, and is kept as long as the worker runs."""
    if worker not in _kept:
        for process in (each for each in active_children() if each.pid == worker):
            _kept[worker] = {}
            weakref.finalize(process, _kept.pop, worker, None).atexit = False
    kept = _kept.get(worker, {})
    for old in gone:
        kept.pop(old, None)
    if number in kept:
        sent, form = kept[number][0], form or kept[number][1]
    assert sent is not None and form is not None
    if worker in _kept:
        kept[number] = sent, form
        sent.numpy()[-2] = 1
    return _receive(sent, shapes, form)


def _receive(buffer: torch.Tensor, shapes: Shapes, form: Form) -> tuple[torch.Tensor, ...]:
    whole = buffer.numpy()
    owned = whole[:-FLAG_BYTES]
    weakref.finalize(owned, _clear, whole[-1:], os.getpid(), _num_forks).atexit = False
    return form.assembled(tuple(_views(owned, shapes, form.dtypes)))


def _clear(flag: np.ndarray, process: int, num_forks: int) -> None:
    if os.getpid() == process:  # a fork that drops its copy does not free this one
        flag[0] = FREE if num_forks == _num_forks else LOST


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


_num_forks = 0  # of this process
os.register_at_fork(before=_count_fork)


def _padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // FLAG_BYTES) * FLAG_BYTES


def _views(owned: np.ndarray, shapes: Shapes, dtypes: Sequence[torch.dtype]) -> Iterator[torch.Tensor]:
    start = 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        size = math.prod(shape)
        flat = torch.frombuffer(owned, dtype=dtype, count=size, offset=start) if size else torch.empty(0, dtype=dtype)
        yield flat if len(shape) == 1 else flat.view(shape)
        start += _padded_bytes(shape, dtype)


def shared_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor in memory shared between processes, so that a worker need not copy it to the main process.

    Raises WorkerError if the shared memory is full, as it soon is in containers, which have 64 MiB by default.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    try:
        storage = torch.UntypedStorage._new_shared(num_bytes)
    except RuntimeError as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise WorkerError(
            f"/dev/shm has no room for a batch of {human_bytes(num_bytes)}, which a worker shares with the main "
            "process: make it larger (docker run --shm-size=8g), or use fewer workers, a smaller prefetch_factor or "
            "batch_size, or a ChunkLoader, which reads in threads"
        ) from error
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]
