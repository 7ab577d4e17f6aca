"""Windows as slots hold them, and images as the network takes them."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from foreign import values

from h5chunk.errors import OptionError
from h5chunk.feed.device import CpuSlot, CudaSlot, PinnedMemory
from h5chunk.feed.memory import BatchMemory
from h5chunk.feed.normalize import Convert
from h5chunk.feed.spaces import FieldSpace, slot_bytes

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SPACES = {"x": FieldSpace((3, 70, 50), torch.uint8), "y": FieldSpace((), torch.int64)}
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def reference(images: torch.Tensor, mean: object, std: object, axis: int) -> torch.Tensor:
    """torchvision's to_tensor and normalize, in float64."""
    shape = [1] * images.ndim
    shape[axis] = -1
    means, stds = (torch.as_tensor(numbers, dtype=torch.float64).reshape(shape) for numbers in (mean, std))
    return (images.double() / 255 - means) / stds


def check_close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """Off by no more than one rounding of ``found``'s type, and three of float32, of numbers up to ``bound``."""
    single = 3 * torch.finfo(torch.float32).eps * bound
    allowed = torch.finfo(found.dtype).eps / 2 * expected.abs() + single
    assert ((found.double() - expected).abs() <= allowed).all()


def all_bytes(channels: int = 3) -> torch.Tensor:
    """(2, channels, 16, 16): every value of a byte in every channel."""
    plane = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    return torch.stack([plane.expand(channels, 16, 16), plane.flip(0).expand(channels, 16, 16)])


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [None, *FLOATS])
@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), (0.5, 0.25), (MEAN, 0.5), (0.5, STD), ([0.5], [0.5])])
def test_normalize(dtype, channels_last, mean, std):
    images = all_bytes()
    convert = Convert(torch.uint8, dtype, (mean, std), channels_last, (3, 16, 16), 0)
    found = convert(images, keep=True)
    assert found.dtype == (dtype or torch.float32)
    assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    check_close(found, reference(images, mean, std, 1), bound=5)


def test_normalize_channels_at_the_end():
    images = all_bytes().permute(0, 2, 3, 1).contiguous()
    found = Convert(torch.uint8, None, (MEAN, STD), False, (16, 16, 3), 2)(images, keep=True)
    check_close(found, reference(images, MEAN, STD, 3), bound=5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_floating_dtype_alone_gives_0_to_1(dtype):
    images = all_bytes()
    found = Convert(torch.uint8, dtype, None, False, (3, 16, 16), 0)(images, keep=True)
    check_close(found, images.double() / 255, bound=1)
    assert (found.min(), found.max()) == (0, 1)


@pytest.mark.parametrize("keep", [True, False])
def test_bytes_stay_bytes(keep):
    images = all_bytes()
    found = Convert(torch.uint8, None, None, False, (3, 16, 16), 0)(images, keep=keep)
    assert found.equal(images) and found.dtype == torch.uint8
    assert (found.data_ptr() == images.data_ptr()) == keep
    last = Convert(torch.uint8, None, None, True, (3, 16, 16), 0)(images, keep=keep)
    assert last.equal(images) and last.is_contiguous(memory_format=torch.channels_last)
    assert Convert(torch.uint8, torch.int16, None, False, (3, 16, 16), 0)(images, keep=keep).equal(images.short())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"normalize": (0.5, 0.0)}, "std of 0"),
        ({"normalize": (MEAN, (0.1, 0.0, 0.1))}, "std of 0"),
        ({"normalize": ((0.1, 0.2), 0.5)}, "2 values of mean for 3 channels"),
        ({"normalize": (0.5, (0.1, 0.2))}, "2 values of std for 3 channels"),
        ({"normalize": (0.5, 0.5), "dtype": torch.uint8}, "floating dtype"),
        ({"channels_last": True, "sample_shape": (16, 16)}, "channels_last needs"),
        ({"channels_last": True, "channel_axis": 2}, "channels_last needs"),
    ],
)
def test_options_that_do_not_fit(options, match):
    known = {
        "stored": torch.uint8,
        "dtype": None,
        "normalize": None,
        "channels_last": False,
        "sample_shape": (3, 16, 16),
        "channel_axis": 0,
    }
    with pytest.raises(OptionError, match=match):
        Convert(**{**known, **options})


@pytest.mark.parametrize("normalize", [(0.5,), 0.5, (0.1, 0.2, 0.3)])
def test_normalize_that_is_no_pair(normalize):
    with pytest.raises(OptionError, match="normalize is"):
        Convert(torch.uint8, None, normalize, False, (3, 16, 16), 0)


@pytest.mark.parametrize("normalize", [((0.1, 0.2, 0.3), (0.1, 0.2)), ("a", 0.5), (0.5, [[0.5]]), (None, 0.5)])
def test_normalize_that_is_no_pair_of_numbers(normalize):
    with pytest.raises(OptionError, match="normalize"):
        Convert(torch.uint8, None, normalize, False, (3, 16, 16), 0)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_floats_are_normalized_as_they_are(stored, dtype):
    images = (all_bytes().double() / 255).to(stored)
    found = Convert(stored, dtype, (MEAN, STD), False, (3, 16, 16), 0)(images, keep=True)
    assert found.dtype == (dtype or torch.float32)
    check_close(found, reference(images.double() * 255, MEAN, STD, 1), bound=5)
    assert Convert(stored, None, None, False, (3, 16, 16), 0)(images, keep=True) is images


@pytest.mark.parametrize("stored", [torch.int16, torch.int64, torch.bool])
def test_other_integers_are_only_cast(stored):
    numbers = torch.tensor([0, 1]).to(stored)
    found = Convert(stored, torch.float32, None, False, (), 0)(numbers, keep=True)
    assert (found.dtype, found.tolist()) == (torch.float32, [0, 1])
    with pytest.raises(OptionError, match="normalize is for uint8 and floats"):
        Convert(stored, None, (0.5, 0.5), False, (), 0)


def test_a_dtype_that_is_none():
    with pytest.raises(OptionError, match="dtype is 'float32'"):
        Convert(torch.uint8, "float32", None, False, (3, 16, 16), 0)


# Slots


def fill(buffers: dict[str, np.ndarray], data: dict[str, np.ndarray]) -> None:
    for name, buffer in buffers.items():
        assert buffer.nbytes == data[name].nbytes
        buffer[:] = data[name].reshape(buffer.shape[0], -1).view(np.uint8)


def window_data(num_samples: int, seed: int) -> dict[str, np.ndarray]:
    return {
        "x": values((num_samples, *SPACES["x"].sample_shape), np.uint8, seed),
        "y": values((num_samples,), np.int64, seed),
    }


def check_slot(slot: CpuSlot | CudaSlot, num_samples: int, batch_size: int, seed: int) -> torch.Tensor:
    """A window goes through the slot; gives "x" of its first batch."""
    data = window_data(num_samples, seed)
    fill(slot.begin(np.arange(num_samples)), data)
    slot.send()
    slot.receive()
    batches = list(zip(*(field.split(batch_size) for field in slot.window), strict=True))
    for number, batch in enumerate(batches):
        some = slice(number * batch_size, min((number + 1) * batch_size, num_samples))
        check_fields(batch, data, np.arange(num_samples)[some])
    assert sum(len(batch[0]) for batch in batches) == num_samples
    order = np.random.default_rng(seed).permutation(num_samples)[: num_samples // 2 + 1]
    check_fields(slot.gather(order), data, order)
    return batches[0][0]


def check_fields(batch: tuple[torch.Tensor, ...], data: dict[str, np.ndarray], samples: np.ndarray) -> None:
    for (name, space), tensor in zip(SPACES.items(), batch, strict=True):
        assert (tensor.dtype, tensor.shape[0]) == (space.dtype, len(samples))
        np.testing.assert_array_equal(tensor.cpu().numpy(), data[name][samples])


def test_sample_bytes():
    assert [space.sample_bytes for space in SPACES.values()] == [3 * 70 * 50, 8]
    assert FieldSpace((2, 3), torch.float64).sample_bytes == 48


@pytest.mark.parametrize("num_samples", [120, 120, 7])
@pytest.mark.parametrize("reuse", [True, False])
def test_cpu_slot(reuse, num_samples):
    slot = CpuSlot(SPACES, 120, None if reuse else BatchMemory())
    for seed in range(3):
        check_slot(slot, num_samples, 50, seed)
        slot.release()


def test_cpu_slot_with_reuse_is_one_place():
    slot = CpuSlot(SPACES, 120, None)
    places = set()
    for seed in range(4):
        places.add(check_slot(slot, 120 - seed, 50, seed).data_ptr())
        slot.release()
    assert len(places) == 1


def test_cpu_slot_without_reuse_never_overwrites_what_is_held():
    slot = CpuSlot(SPACES, 120, BatchMemory())
    held = []
    for seed in range(6):
        held.append(check_slot(slot, 120, 50, seed)[3:5])
        slot.release()
    for seed, part in enumerate(held):
        np.testing.assert_array_equal(part.numpy(), window_data(120, seed)["x"][3:5])


def test_cpu_slot_gives_memory_back_when_batches_are_gone():
    memory = BatchMemory()
    slot = CpuSlot(SPACES, 120, memory)
    place = check_slot(slot, 120, 50, 0).data_ptr()
    slot.release()
    gc.collect()
    assert check_slot(slot, 120, 50, 1).data_ptr() == place


def test_cpu_slot_of_no_bytes():
    slot = CpuSlot({"x": FieldSpace((0, 4), torch.uint8)}, 5, None)
    assert [buffer.nbytes for buffer in slot.begin(np.arange(5)).values()] == [0]
    assert slot.window[0].shape == (5, 0, 4)


class TestCuda:
    """On a GPU."""

    pytestmark = gpu

    @pytest.fixture
    def device(self):
        return torch.device("cuda")

    @pytest.fixture
    def slot(self, device):
        memory = PinnedMemory(slot_bytes(SPACES, 120))
        slot = CudaSlot(SPACES, memory.bytes[: slot_bytes(SPACES, 120)], torch.cuda.Stream(device))
        yield slot
        torch.cuda.synchronize()
        memory.close()

    def test_memory_that_is_still_in_use_is_not_overwritten(self, device):
        """A slot may get memory that kernels queued before still write."""
        num_bytes = slot_bytes(SPACES, 120)
        memory = PinnedMemory(num_bytes)
        data = window_data(120, 0)
        for _ in range(3):
            old = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            torch.cuda._sleep(100_000_000)
            old.fill_(7)
            del old
            slot = CudaSlot(SPACES, memory.bytes[:num_bytes], torch.cuda.Stream(device))
            fill(slot.begin(np.arange(120)), data)
            slot.send()
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
            fill(slot.begin(np.arange(120)), data)
            slot.send()
            slot.receive()
            torch.cuda._sleep(50_000_000)
            sums.append(slot.window[0].long().sum())
            slot.release()
        assert [int(total) for total in sums] == expected

    @pytest.mark.parametrize("channels_last", [False, True])
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_convert(self, device, dtype, channels_last):
        images = all_bytes()
        convert = Convert(torch.uint8, dtype, (MEAN, STD), channels_last, (3, 16, 16), 0)
        convert.to(device)
        found = convert(images.to(device), keep=False)
        assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        check_close(found.cpu(), reference(images, MEAN, STD, 1), bound=5)

    @pytest.mark.parametrize("dtype", FLOATS[:3])
    @pytest.mark.parametrize(
        ("shape", "axis", "channels_last", "normalize"),
        [
            ((3, 37, 53), 0, False, (MEAN, STD)),
            ((3, 37, 53), 0, True, (MEAN, STD)),
            ((3, 64, 64), 0, True, (0.4, 0.2)),
            ((37, 53, 3), 2, False, (MEAN, STD)),
            ((1, 28, 28), 0, False, (0.1, 0.3)),
            ((5, 9, 11), 0, False, ([0.1] * 5, [0.2, 0.3, 0.4, 0.5, 0.6])),
            ((777,), 0, False, None),
        ],
    )
    def test_fused(self, device, monkeypatch, shape, axis, channels_last, normalize, dtype):
        """Also where samples do not fill the kernel's programs; and the same bits as without it."""
        monkeypatch.setattr("h5chunk.feed.fused.FEWEST_NUMBERS", 0)
        images = torch.from_numpy(values((131, *shape), np.uint8))
        convert = Convert(torch.uint8, dtype, normalize, channels_last, shape, axis)
        convert.to(device)
        slow = convert(images.to(device), keep=False)
        assert convert._fused.wait(), "Triton is missing on this machine"
        found = convert(images.to(device), keep=False)
        assert found.equal(slow), "the bits depend on when it was compiled"
        assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        check_close(found.cpu(), reference(images, *(normalize or (0.0, 1.0)), axis + 1), bound=5)

    def test_bytes_are_copied_out_of_the_slot(self, device):
        images = all_bytes().to(device)
        convert = Convert(torch.uint8, None, None, False, (3, 16, 16), 0)
        convert.to(device)
        assert convert(images, keep=False).data_ptr() != images.data_ptr()
