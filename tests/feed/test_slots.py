"""Slots: windows lie in them unharmed, on the CPU and on a GPU."""

from __future__ import annotations

import gc
from collections import deque

import numpy as np
import pytest
import torch
from support.foreign import values

from h5chunk.errors import OptionError
from h5chunk.feed.columns import Dense, Destination, slot_bytes
from h5chunk.feed.cuda_slots import CudaSlot, PinnedBuffer
from h5chunk.feed.memory import BatchMemory, PinnedMemory
from h5chunk.feed.slots import CpuSlot, to_device
from h5chunk.transforms.csr import fresh

KINDS = {"x": Dense((3, 70, 50), torch.uint8), "y": Dense((), torch.int64)}

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def fill(destinations: dict[str, Destination], data: dict[str, np.ndarray]) -> None:
    for name, (buffer, _) in destinations.items():
        assert buffer.nbytes == data[name].nbytes
        buffer[:] = data[name].reshape(buffer.shape[0], -1).view(np.uint8)


def window_data(num_samples: int, seed: int) -> dict[str, np.ndarray]:
    return {
        "x": values((num_samples, *KINDS["x"].sample_shape), np.uint8, seed),
        "y": values((num_samples,), np.int64, seed),
    }


def check_slot(slot: CpuSlot | CudaSlot, num_samples: int, batch_size: int, seed: int) -> torch.Tensor:
    """A window goes through the slot; gives "x" of its first batch."""
    data = window_data(num_samples, seed)
    fill(slot.begin(np.arange(num_samples), queued=False), data)
    slot.send()
    slot.return_pinned()
    slot.receive()
    batches = list(zip(*(field.split(batch_size) for field in slot.window), strict=True))
    for number, batch in enumerate(batches):
        some = slice(number * batch_size, min((number + 1) * batch_size, num_samples))
        check_fields(batch, data, np.arange(num_samples)[some])
    assert sum(len(batch[0]) for batch in batches) == num_samples
    order = np.random.default_rng(seed).permutation(num_samples)[: num_samples // 2 + 1]
    numbers, allocate = to_device(order, slot.window[0].device), fresh if slot.window[0].device.type == "cpu" else None
    taken = [kind.take(column, numbers, allocate) for kind, column in zip(KINDS.values(), slot.window, strict=True)]
    check_fields(tuple(taken), data, order)
    return batches[0][0]


def check_fields(batch: tuple[torch.Tensor, ...], data: dict[str, np.ndarray], samples: np.ndarray) -> None:
    for (name, kind), tensor in zip(KINDS.items(), batch, strict=True):
        assert (tensor.dtype, tensor.shape[0]) == (kind.dtype, len(samples))
        np.testing.assert_array_equal(tensor.cpu().numpy(), data[name][samples])


def test_sample_bytes():
    assert [kind.sample_bytes for kind in KINDS.values()] == [3 * 70 * 50, 8]
    assert Dense((2, 3), torch.float64).sample_bytes == 48


@pytest.mark.parametrize("num_samples", [120, 120, 7])
@pytest.mark.parametrize("reuse", [True, False])
def test_cpu_slot(reuse, num_samples):
    slot = CpuSlot(KINDS, 120, None if reuse else BatchMemory())
    for seed in range(3):
        check_slot(slot, num_samples, 50, seed)
        slot.release()


def test_cpu_slot_with_reuse_is_one_place():
    slot = CpuSlot(KINDS, 120, None)
    places = set()
    for seed in range(4):
        places.add(check_slot(slot, 120 - seed, 50, seed).data_ptr())
        slot.release()
    assert len(places) == 1


def test_cpu_slot_without_reuse_never_overwrites_what_is_held():
    slot = CpuSlot(KINDS, 120, BatchMemory())
    held = []
    for seed in range(6):
        held.append(check_slot(slot, 120, 50, seed)[3:5])
        slot.release()
    for seed, part in enumerate(held):
        np.testing.assert_array_equal(part.numpy(), window_data(120, seed)["x"][3:5])


def test_cpu_slot_gives_memory_back_when_batches_are_gone():
    memory = BatchMemory()
    slot = CpuSlot(KINDS, 120, memory)
    place = check_slot(slot, 120, 50, 0).data_ptr()
    slot.release()
    gc.collect()
    assert check_slot(slot, 120, 50, 1).data_ptr() == place


def test_cpu_slot_of_no_bytes():
    slot = CpuSlot({"x": Dense((0, 4), torch.uint8)}, 5, None)
    assert [to.out.nbytes for to in slot.begin(np.arange(5), queued=False).values()] == [0]
    assert slot.window[0].shape == (5, 0, 4)


def test_a_window_that_is_larger_than_planned_is_an_error():
    """Threads would otherwise write beyond the end of the slot."""
    slot = CpuSlot(KINDS, 120, None)
    with pytest.raises(OptionError, match=r"needs an array of \(121, 3, 70, 50\), but was planned to need \(120, 3"):
        slot.begin(np.arange(121), queued=False)


class TestCuda:
    """On a GPU."""

    pytestmark = gpu

    @pytest.fixture
    def device(self):
        return torch.device("cuda")

    @pytest.fixture
    def slot(self, device):
        memory = PinnedBuffer(KINDS, 120)
        slot = CudaSlot(KINDS, 120, deque([memory]), torch.cuda.Stream(device))
        yield slot
        torch.cuda.synchronize()
        memory.close()

    def test_memory_that_is_still_in_use_is_not_overwritten(self, device):
        """A slot may get memory that kernels queued before still write."""
        num_bytes = slot_bytes(KINDS, 120)
        memory = PinnedBuffer(KINDS, 120)
        data = window_data(120, 0)
        for _ in range(3):
            old = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            torch.cuda._sleep(100_000_000)
            old.fill_(7)
            del old
            slot = CudaSlot(KINDS, 120, deque([memory]), torch.cuda.Stream(device))
            fill(slot.begin(np.arange(120), queued=False), data)
            slot.send()
            slot.return_pinned()
            slot.receive()
            check_fields(slot.window, data, np.arange(120))
            del slot
        torch.cuda.synchronize()
        memory.close()

    def test_pinned_memory(self, device):
        memory = PinnedMemory(100_000)
        tensor = torch.from_numpy(memory.bytes)
        assert tensor.is_pinned()
        memory.close()
        assert not tensor.is_pinned()

    def test_slot(self, slot):
        for seed, num_samples in enumerate((120, 7, 120, 50, 51)):
            check_slot(slot, num_samples, 50, seed)
            slot.release()

    def test_nothing_is_overwritten_while_it_is_used(self, slot):
        """The consumer's stream is late; the slot is filled with others at once."""
        sums, expected = [], []
        for seed in range(8):
            data = window_data(120, seed)
            expected.append(int(data["x"].astype(np.int64).sum()))
            fill(slot.begin(np.arange(120), queued=False), data)
            slot.send()
            slot.return_pinned()
            slot.receive()
            torch.cuda._sleep(50_000_000)
            sums.append(slot.window[0].long().sum())
            slot.release()
        assert [int(total) for total in sums] == expected
