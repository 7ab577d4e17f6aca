"""Memory of batches is used again, but never while something still holds it."""

from __future__ import annotations

import gc
import os
import pickle
from typing import Any

import pytest
import torch
from support.faults import watch
from support.leftovers import in_fork
from torch.utils.data import DataLoader, Dataset

from h5chunk.feed.memory import KEPT, BatchMemory
from h5chunk.feed.shared import SharedMemory, _kept, shared_empty


def test_memory_is_used_again_when_the_tensor_is_gone() -> None:
    memory = BatchMemory()
    place = memory.empty((4, 1 << 20), torch.uint8).data_ptr()
    assert memory.empty((4, 1 << 20), torch.uint8).data_ptr() == place


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[2:3],
        lambda tensor: tensor.view(torch.int16),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: tensor.detach(),
        lambda tensor: list(tensor.unbind()),
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: torch.from_dlpack(tensor),
    ],
)
def test_memory_that_anything_holds_is_not_given_away(hold: object) -> None:
    memory = BatchMemory()
    tensor = memory.empty((4, 1 << 20), torch.uint8).fill_(7)
    place = tensor.data_ptr()
    held = hold(tensor)
    del tensor
    gc.collect()
    other = memory.empty((4, 1 << 20), torch.uint8)
    assert other.data_ptr() != place
    del held
    gc.collect()
    assert memory.empty((4, 1 << 20), torch.uint8).data_ptr() == place


def test_few_free_buffers_are_kept() -> None:
    memory = BatchMemory()
    held = [memory.empty((1 << 20,), torch.float32) for _ in range(5)]
    del held
    assert len(memory._free) == KEPT


def test_a_much_smaller_tensor_takes_a_buffer_of_its_own() -> None:
    memory = BatchMemory()
    del_me = memory.empty((9 << 20,), torch.uint8)
    del del_me
    small = memory.empty((1 << 20,), torch.uint8)
    assert small.untyped_storage().nbytes() == 1 << 20
    assert len(memory._free) == 1


def test_shapes_and_dtypes() -> None:
    memory = BatchMemory()
    for shape, dtype in (((3, 2), torch.int64), ((0, 5), torch.uint8), ((), torch.float16), ((2, 1, 1), torch.bool)):
        tensor = memory.empty(shape, dtype)
        assert tensor.shape == torch.Size(shape)
        assert tensor.dtype == dtype
        assert not pickle.loads(pickle.dumps(memory))._free


def test_shared_memory_is_shared() -> None:
    tensor = shared_empty((3, 4), torch.int32)
    assert tensor.is_shared()
    assert tensor.shape == (3, 4)
    assert shared_empty((0, 4), torch.int32).shape == (0, 4)


def test_memory_that_comes_back_while_other_is_taken() -> None:
    """As from another thread, or from the garbage collector, in the middle of the search."""
    memory = BatchMemory(keep=3)
    held = [memory.empty((size << 20,), torch.uint8) for size in (1, 4, 16)]
    held.pop()

    class Misfit:
        @property
        def nbytes(self) -> int:
            held.clear()
            return 1

    memory._free.append(Misfit())  # type: ignore[arg-type]
    tensor = memory.empty((16 << 20,), torch.uint8)
    assert tensor.numel() == 16 << 20
    assert not held


def test_a_fork_that_lets_go_of_a_batch_does_not_free_it() -> None:
    memory = SharedMemory()
    sent = memory.empty([((1000,), torch.uint8)])
    receive, arguments = sent.__reduce__()
    received = [receive(*arguments)]  # type: ignore[operator]
    flag = arguments[0][-1:]  # type: ignore[index]
    assert flag.item() == 1
    pid = os.getpid()
    assert in_fork(received.clear) == 0
    assert (os.getpid(), flag.item()) == (pid, 1)
    received.clear()
    assert flag.item() == 2  # as a fork may still read it
    assert memory.empty([((1000,), torch.uint8)])[0].data_ptr() != sent[0].data_ptr()


def test_what_a_fork_holds_is_not_overwritten() -> None:
    loader = DataLoader(Growing(same=True), batch_size=None, num_workers=1, collate_fn=as_it_is)
    batches = iter(loader)
    held = [next(batches)[0]]
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(writing)
        os.read(reading, 1)  # until the epoch is over
        os._exit(held[0].tolist() != [0] * 1000)
    held.clear()
    assert [int(batch[0]) for (batch,) in batches] == list(range(1, 12))
    os.close(writing)
    os.close(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_batch_that_is_sent_twice_is_not_overwritten() -> None:
    loader = DataLoader(Growing(same=True, twice=True), batch_size=None, num_workers=1, collate_fn=as_it_is)
    held = [batch for number, (batch,) in enumerate(loader) if number % 2]
    assert [batch.tolist() for batch in held] == [[number] * 1000 for number in range(0, 12, 2)]


class Growing(Dataset[Any]):
    """Batches in shared memory, each larger than the one before, or of the ``same`` size; or each one ``twice``."""

    def __init__(self, same: bool = False, twice: bool = False) -> None:
        self.memory, self.same, self.twice = SharedMemory(), same, twice
        self.last: tuple[torch.Tensor, ...] = ()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[torch.Tensor, ...]:
        if not (self.twice and number % 2):
            self.last = ()
            self.last = self.memory.empty([((1000 if self.same else 1000 * (number + 1),), torch.uint8)])
            self.last[0].fill_(number)
        return self.last if self.twice else self._pop()

    def _pop(self) -> tuple[torch.Tensor, ...]:
        batch, self.last = self.last, ()
        return batch


def as_it_is(batch: Any) -> Any:
    return batch


def test_the_buffers_of_a_worker_are_sent_once_and_kept_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watch(monkeypatch, "feed.shared._receive")
    loader = DataLoader(Growing(), batch_size=None, num_workers=1, persistent_workers=True, collate_fn=as_it_is)
    next(iter(loader))  # leaves the epoch
    for _ in range(3):
        for number, (batch,) in enumerate(loader):
            assert batch.tolist() == [number] * 1000 * (number + 1)
        (kept,) = _kept.values()
        assert len(kept) <= 6  # those that became too small are gone
    assert len({id(buffer) for buffer, *_ in calls[-12:]}) < 12  # how many depends on which became too small when
    del loader, batch, kept
    calls.clear()
    gc.collect()
    assert not _kept


class Changing(Dataset[Any]):
    """Batches in one buffer, whose numbers, shapes and dtypes are different each time."""

    def __init__(self) -> None:
        self.memory = SharedMemory()

    def __len__(self) -> int:
        return 30

    def __getitem__(self, number: int) -> tuple[torch.Tensor, ...]:
        dtype = (torch.uint8, torch.int16, torch.float64)[number % 3]
        shapes = [((number % 4, 3), dtype), ((0,), torch.bfloat16), ((), torch.int64), ((5, number % 2, 2), dtype)]
        batch = self.memory.empty([*shapes, ((4096 - number,), torch.uint8)], last_first if number % 5 else None)
        for tensor in batch:
            tensor.fill_(number)
        return batch


def last_first(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tensors[::-1]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_shapes_dtypes_and_assembly_may_change_from_batch_to_batch(context: str) -> None:
    loader = DataLoader(
        Changing(), None, num_workers=1, collate_fn=as_it_is, multiprocessing_context=context, persistent_workers=True
    )
    for _ in range(2):
        for number, batch in enumerate(loader):
            first = batch[::-1] if number % 5 else batch
            dtype = (torch.uint8, torch.int16, torch.float64)[number % 3]
            assert [tensor.dtype for tensor in first] == [dtype, torch.bfloat16, torch.int64, dtype, torch.uint8]
            shapes = [(number % 4, 3), (0,), (), (5, number % 2, 2), (4096 - number,)]
            assert [tuple(tensor.shape) for tensor in first] == shapes
            assert all((tensor == number).all() for tensor in batch)


def test_memory_of_several_fields_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = watch(monkeypatch, "feed.memory.np.empty")
    memory, held = BatchMemory(KEPT * 2), []
    for _ in range(20):
        held.clear()
        held += [memory.empty((size,), torch.uint8) for size in (1 << 20, 5 << 20) * 2]  # two batches of two fields
    assert len(allocated) == 4
