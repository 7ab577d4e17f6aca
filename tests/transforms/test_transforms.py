"""Transforms: each means what it says, alone, together in one kernel, before and after functions, on CPU and GPU."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from support.faults import small
from support.foreign import make_file, values
from support.loader_files import IMAGES, epoch_of, path
from support.matrices import dense, random_matrix, write, write_anndata

from h5chunk import ChunkDataset, ChunkLoader
from h5chunk.errors import OptionError
from h5chunk.transforms import L2, Binarize, Csr, Dense, Log1p, Normalize, ToDtype
from h5chunk.transforms.images import ImageConverter

__all__ = ["path"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
ALL = [
    Normalize(MEAN, STD),
    ToDtype(torch.bfloat16, True, channels_last=True),
    Dense(torch.float16),
    Csr(),
    Binarize(4),
    L2(),
    Log1p(1e4),
]


def convert(transforms: Any, stored: torch.dtype, shape: tuple[int, ...] = (3, 16, 16), axis: int = 0) -> Any:
    return ImageConverter(transforms, stored, shape, axis, lambda shape, dtype: torch.empty(shape, dtype=dtype))


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


# The objects


@pytest.mark.parametrize("transform", ALL, ids=repr)
def test_they_are_values(transform):
    """Frozen, equal to their copies, and written as they are made."""
    assert pickle.loads(pickle.dumps(transform)) == transform == eval(repr(transform))
    assert hash(transform) == hash(dataclasses.replace(transform))
    with pytest.raises(dataclasses.FrozenInstanceError):
        transform.dtype = torch.float32


def test_arrays_and_lists_are_taken_as_means():
    assert Normalize(list(MEAN), np.array(STD)) == Normalize(MEAN, torch.tensor(STD, dtype=torch.float64))
    assert repr(Normalize([0.5], 1)) == "Normalize(mean=(0.5,), std=1.0)"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Normalize(0.5, 0.0), "positive stds"),
        (lambda: Normalize(MEAN, (0.1, 0.0, 0.1)), "positive stds"),
        (lambda: Normalize(float("nan"), 1), "finite means"),
        (lambda: Normalize(MEAN, (0.1, 0.2)), "3 means but 2 stds"),
        (lambda: Normalize("a", 0.5), "each a number or one per channel"),
        (lambda: Normalize(0.5, [[0.5]]), "each a number or one per channel"),
        (lambda: Normalize(0.5, []), "each a number or one per channel"),
        (lambda: Normalize(None, 0.5), "each a number or one per channel"),
        (lambda: ToDtype("float32"), "dtype is 'float32'"),
        (lambda: ToDtype(torch.int32, scale=True), "scale is True, but torch.int32 holds no fractions"),
        (lambda: Dense(torch.bool), "dtype is torch.bool: pass a torch.dtype of numbers"),
        (lambda: Csr(torch.complex64), "Csr: dtype is torch.complex64"),
        (lambda: Binarize("4"), "threshold is '4': pass the smallest value"),
        (lambda: Binarize(float("nan")), "threshold is nan"),
        (lambda: Binarize(0), "threshold is 0"),
        (lambda: Log1p(-1), "target_sum is -1"),
    ],
)
def test_arguments_are_checked_when_they_are_made(make, match):
    with pytest.raises(OptionError, match=match):
        make()


# Images


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), (0.5, 0.25), (MEAN, 0.5), (0.5, STD), ([0.5], [0.5])])
def test_normalize(dtype, channels_last, mean, std):
    """Before or behind `ToDtype`: one rounding at the end."""
    images = all_bytes()
    pair = Normalize(mean, std), ToDtype(dtype, scale=True, channels_last=channels_last)
    for transforms in (pair, pair[::-1]):
        found = convert(transforms, torch.uint8)(images, keep=True)
        assert found.dtype == dtype
        assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        check_close(found, reference(images, mean, std, 1), bound=5)


def test_normalize_channels_at_the_end():
    images = all_bytes().permute(0, 2, 3, 1).contiguous()
    found = convert([Normalize(MEAN, STD)], torch.uint8, (16, 16, 3), 2)(images, keep=True)
    check_close(found, reference(images, MEAN, STD, 3), bound=5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_scale_gives_0_to_1(dtype):
    images = all_bytes()
    found = convert([ToDtype(dtype, scale=True)], torch.uint8)(images, keep=True)
    check_close(found, images.double() / 255, bound=1)
    assert (found.min(), found.max()) == (0, 1)
    assert convert([ToDtype(dtype)], torch.uint8)(images, keep=True).equal(images.to(dtype))
    after = convert([ToDtype(dtype), Normalize(2, 4)], torch.uint8)(images, keep=True)
    check_close(after, (images.double() - 2) / 4, bound=2)


@pytest.mark.parametrize("keep", [True, False])
def test_bytes_stay_bytes(keep):
    images = all_bytes()
    found = convert([], torch.uint8)(images, keep=keep)
    assert found.equal(images) and found.dtype == torch.uint8
    assert (found.data_ptr() == images.data_ptr()) == keep
    last = convert([ToDtype(torch.uint8, channels_last=True)], torch.uint8)(images, keep=keep)
    assert last.equal(images) and last.is_contiguous(memory_format=torch.channels_last)
    assert convert([ToDtype(torch.int16)], torch.uint8)(images, keep=keep).equal(images.short())


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_floats_are_normalized_as_they_are(stored, dtype):
    images = (all_bytes().double() / 255).to(stored)
    transforms = [Normalize(MEAN, STD), *([] if dtype is None else [ToDtype(dtype)])]
    found = convert(transforms, stored)(images, keep=True)
    assert found.dtype == (dtype or stored)
    check_close(found, reference(images.double() * 255, MEAN, STD, 1), bound=5)
    assert convert([], stored)(images, keep=True) is images


@pytest.mark.parametrize("stored", [torch.int16, torch.int64, torch.bool])
def test_other_integers_are_only_cast(stored):
    numbers = torch.tensor([0, 1]).to(stored)
    found = convert([ToDtype(torch.float32)], stored, ())(numbers, keep=True)
    assert (found.dtype, found.tolist()) == (torch.float32, [0, 1])
    found = convert([ToDtype(torch.float32), Normalize(0.5, 0.5)], stored, ())(numbers, keep=True)
    assert found.tolist() == [-1, 1]
    largest = 1 if stored == torch.bool else torch.iinfo(stored).max
    found = convert([ToDtype(torch.float32, scale=True)], stored, ())(torch.tensor([0, largest]).to(stored), keep=True)
    assert found.tolist() == [0, 1]
    with pytest.raises(OptionError, match=r"Normalize is for uint8 and floats, .*: put ToDtype\(torch.float32\) first"):
        convert([Normalize(0.5, 0.5)], stored, ())


@pytest.mark.parametrize(
    ("transforms", "shape", "axis", "match"),
    [
        ([Normalize((0.1, 0.2), 0.5)], (3, 16, 16), 0, "2 values of mean for 3 channels"),
        ([Normalize(0.5, (0.1, 0.2))], (3, 16, 16), 0, "2 values of std for 3 channels"),
        ([Normalize(0.5, 0.5), ToDtype(torch.uint8)], (3, 16, 16), 0, "floating dtype"),
        ([ToDtype(torch.int32), Normalize(0.5, 0.5)], (3, 16, 16), 0, "not for torch.int32"),
        ([ToDtype(torch.uint8, channels_last=True)], (16, 16), 0, "channels_last needs"),
        ([ToDtype(torch.uint8, channels_last=True)], (16, 16, 3), 2, "channels_last needs"),
    ],
)
def test_images_that_do_not_fit(transforms, shape, axis, match):
    with pytest.raises(OptionError, match=match):
        convert(transforms, torch.uint8, shape, axis)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", [*permutations(["flip", "normalize", "dtype"])], ids="-".join)
def test_functions_between(path, device, order):
    """Whatever stands between them, transforms mean the same."""
    steps = {
        "flip": lambda images: images.flip(3),
        "normalize": Normalize(MEAN, STD),
        "dtype": ToDtype(torch.float64, scale=True),
    }
    with ChunkLoader(path, 16, shuffle=False, transforms=[steps[name] for name in order], device=device) as loader:
        found = torch.cat([images for images, _ in loader]).cpu()
    assert found.dtype == torch.float64
    check_close(found.float(), reference(torch.from_numpy(IMAGES), MEAN, STD, 1).flip(3), bound=5)


@pytest.mark.parametrize("reuse", [False, True])
def test_fields_by_name(path, reuse):
    transforms = {"labels": [ToDtype(torch.float32), lambda labels: labels + 0.5], "images": [ToDtype(torch.float16)]}
    with ChunkLoader(path, 16, shuffle=False, transforms=transforms, reuse=reuse) as loader:
        for number, (images, labels) in enumerate(loader):
            assert images.dtype == torch.float16
            assert labels.tolist() == [16 * number + i + 0.5 for i in range(len(images))]


def test_a_function_that_changes_its_batch_changes_nothing_else(path):
    with ChunkLoader(path, 16, transforms=[lambda images: images.zero_()]) as loader:
        assert all(not images.any() for images, _ in loader)
    with ChunkLoader(path, 16) as loader:
        epoch_of(loader)


def double(images):
    return images.float() * 2


@pytest.mark.parametrize("transforms", [double, [double], {"images": double}, {"images": [double]}])
def test_one_transform_or_a_list_or_by_field(path, transforms):
    expected = torch.from_numpy(IMAGES[:16]).float() * 2
    assert ChunkDataset(path, transforms=transforms)[range(16)][0].equal(expected)
    with ChunkLoader(path, 16, shuffle=False, transforms=transforms) as loader:
        assert next(iter(loader))[0].equal(expected)


def test_single_samples_of_a_data_set(path):
    dataset = ChunkDataset(path, transforms=[Normalize(MEAN, STD), lambda image: image.flip(2)])
    expected = reference(torch.from_numpy(IMAGES[:2]), MEAN, STD, 1).flip(3)
    check_close(dataset[[0, 1]][0], expected, bound=5)
    check_close(
        pickle.loads(pickle.dumps(ChunkDataset(path, transforms=Normalize(MEAN, STD))))[1][0].flip(2), expected[1], 5
    )


def test_a_data_set_with_a_transform_is_refused(path):
    with pytest.raises(
        OptionError, match=r"cannot apply the data set's transforms, .*pass them to the loader as transforms="
    ):
        ChunkLoader(ChunkDataset(path, transforms=abs), 16)
    with pytest.raises(OptionError, match="the data set's transforms"):
        ChunkLoader(ChunkDataset(path, transforms=Normalize(MEAN, STD)), 16, transforms=[ToDtype(torch.float16)])


def test_each_part_of_a_split_has_its_own_transform(path):
    train, val = ChunkDataset(path).split((0.5, 0.5))
    train, plain = train.with_transforms([Normalize(MEAN, STD)]), train
    assert train.transforms == [Normalize(MEAN, STD)] and plain.transforms is None is val.transforms
    expected = reference(torch.from_numpy(IMAGES[train.samples]), MEAN, STD, 1)
    with ChunkLoader(train, 1000, shuffle=False) as loader:
        check_close(next(iter(loader))[0], expected, bound=5)
    check_close(train[range(len(train))][0], expected, bound=5)
    with ChunkLoader(val, 16) as loader:
        assert next(iter(loader))[0].dtype == torch.uint8
    assert train.with_transforms(None)[0][0].dtype == torch.uint8
    with pytest.raises(OptionError, match="not a matrix"):
        train.with_transforms(Dense(torch.float16))
    train.transforms = None
    assert train[0][0].dtype == torch.uint8


def test_fields_that_are_no_images(tmp_path):
    """Rows of floats are normalised as rows of a matrix are."""
    numbers = np.abs(values((20, 7), np.float32)) + 1
    with ChunkLoader(
        make_file(tmp_path / "a.h5", images=(numbers, {})), 20, shuffle=False, transforms=[L2()]
    ) as loader:
        [(found,)] = loader
    np.testing.assert_allclose(found.numpy(), numbers / np.linalg.norm(numbers, axis=1, keepdims=True), rtol=1e-6)


# Rows of a matrix


def on_rows(transforms: list[Any], rows: np.ndarray) -> np.ndarray:
    """Values as each transform says, in float64."""
    for transform in transforms:
        if isinstance(transform, Binarize):
            rows = (rows >= transform.threshold).astype(np.float64)
        elif isinstance(transform, L2):
            lengths = np.linalg.norm(rows, axis=1, keepdims=True)
            rows = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
        elif isinstance(transform, Log1p):
            sums = rows.sum(1, keepdims=True)
            if transform.target_sum is not None:
                rows = np.divide(rows * transform.target_sum, sums, out=np.zeros_like(rows), where=sums > 0)
            rows = np.log1p(rows)
    return rows


VALUES = [
    [],
    [Binarize(12.7)],
    [L2()],
    [Binarize(3), L2()],
    [Log1p()],
    [Log1p(1e4)],
    [Log1p(100.0), L2()],
    [L2(), Log1p()],
    [L2(), Binarize(0.3)],
    [Log1p(), Binarize(2.0), L2()],
]
LAYOUTS = [None, Dense(torch.float64), Dense(torch.float16), Csr(), Csr(torch.float64)]
KINDS = ["codes", "pattern", "float16", "float32", "floats"]  # of values in a file
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3}


def matrix_file(folder: Path, kind: str) -> tuple[Path, np.ndarray]:
    """A file of codes over a scale, of a pattern, of floats, or of another program's floats; and its values."""
    matrix = random_matrix(90, 50, 9)  # with rows that are empty
    if kind == "pattern":
        matrix.data[:] = 1
        return write(folder / "a.h5", matrix, pattern=True), matrix.toarray().astype(np.float64)
    if kind == "codes":
        return write(folder / "a.h5", matrix, scale=2.0), matrix.toarray() / 2
    if kind in ("float16", "float32"):
        matrix = scipy.sparse.csr_matrix(matrix.astype(np.float64) / 7)
        matrix.data = matrix.data.astype(kind).astype(np.float64)
        return write(folder / "a.h5", matrix, dtype=kind), matrix.toarray()
    matrix = scipy.sparse.csr_matrix(matrix.astype(np.float64) * 1.7)
    return write_anndata(folder / "a.h5ad", matrix), matrix.toarray()


@pytest.fixture(scope="module")
def matrix_files(tmp_path_factory):
    """Return a file of each kind of matrix, with its values."""
    return {kind: matrix_file(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("steps", VALUES, ids=repr)
def test_values_and_layouts(matrix_files, device, kind, steps, layout):
    """Wherever `Dense` or `Csr` stands, and with the values that numpy gives."""
    file, rows = matrix_files[kind]
    dtype = torch.float32 if layout is None else layout.dtype
    expected = on_rows(steps, rows)
    for place in {0, len(steps)}:
        transforms = [*steps[:place], *([] if layout is None else [layout]), *steps[place:]]
        with ChunkLoader(file, 20, shuffle=False, transforms=transforms, device=device) as loader:
            batches = [batch for (batch,) in loader]
        assert {(batch.layout, batch.dtype) for batch in batches} == {
            (torch.sparse_csr if isinstance(layout, Csr) else torch.strided, dtype)
        }
        found = torch.cat([dense(batch) for batch in batches]).cpu().double().numpy()
        np.testing.assert_allclose(found, expected, rtol=TOLERANCES[dtype], atol=1e-7 if dtype == torch.float16 else 0)


@pytest.mark.parametrize("steps", VALUES, ids=repr)
def test_functions_before_rows(tmp_path, steps):
    """Behind a function each is computed by itself, on dense or CSR batches."""
    file, rows = matrix_file(tmp_path, "codes")
    expected = on_rows(steps, rows)
    for layout in (Dense(torch.float64), Csr(torch.float64)):
        with ChunkLoader(file, 90, shuffle=False, transforms=[layout, lambda batch: batch, *steps]) as loader:
            [(found,)] = loader
        np.testing.assert_allclose(dense(found).numpy(), expected, rtol=1e-12)


def test_other_layouts_after_functions(tmp_path):
    file, rows = matrix_file(tmp_path, "codes")
    for first, second, layout in ((Dense(), Csr(), torch.sparse_csr), (Csr(), Dense(), torch.strided)):
        with ChunkLoader(file, 90, shuffle=False, transforms=[first, second]) as loader:
            [(found,)] = loader
        assert found.layout == layout and np.array_equal(dense(found).numpy(), rows.astype(np.float32))


@pytest.mark.parametrize("steps", VALUES[1:], ids=repr)
def test_rows_of_a_data_set(tmp_path, steps):
    file, rows = matrix_file(tmp_path, "codes")
    for layout in (Dense(torch.float64), Csr(torch.float64)):
        found = dense(ChunkDataset(file, transforms=[*steps, layout])[:][0])
        np.testing.assert_allclose(found.numpy(), on_rows(steps, rows), rtol=1e-12)


def test_a_threshold_is_compared_with_what_is_stored(tmp_path):
    """Not with what is left of it in float32."""
    matrix = scipy.sparse.csr_matrix(np.array([[0.1 - 1e-12, 0.1, 0.1 + 1e-12]]))
    with ChunkLoader(write_anndata(tmp_path / "a.h5ad", matrix), 1, transforms=[Binarize(0.1)]) as loader:
        [(found,)] = loader
    assert found.tolist() == [[0, 1, 1]]
    rounded = write(tmp_path / "b.h5", matrix, dtype="float16")  # 0.1 of float16 is less than 0.1
    with ChunkLoader(rounded, 1, transforms=[Binarize(0.1)]) as loader:
        [(found,)] = loader
    assert found.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("transforms", [[Binarize(3), Dense(torch.uint8)], [Csr(torch.int32), Binarize(3)]])
def test_whole_numbers(tmp_path, transforms):
    file, rows = matrix_file(tmp_path, "codes")
    with ChunkLoader(file, 90, shuffle=False, transforms=transforms) as loader:
        [(found,)] = loader
    assert np.array_equal(dense(found).numpy(), rows >= 3)


class TestCuda:
    """On a GPU."""

    pytestmark = NEEDS_GPU

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
    def test_fused(self, monkeypatch, shape, axis, channels_last, normalize, dtype):
        """Also where samples do not fill the kernel's programs; and the same bits as without it."""
        small(monkeypatch, fewest_numbers=0)
        images = torch.from_numpy(values((131, *shape), np.uint8))
        transforms = [
            *([] if normalize is None else [Normalize(*normalize)]),
            ToDtype(dtype, scale=True, channels_last=channels_last),
        ]
        converter = convert(transforms, torch.uint8, shape, axis)
        converter.prepare(torch.device("cuda"))
        slow = converter(images.cuda(), keep=False)
        assert converter._kernel.wait(), "Triton is missing on this machine"
        found = converter(images.cuda(), keep=False)
        assert found.equal(slow), "the bits depend on when it was compiled"
        assert found.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        check_close(found.cpu(), reference(images, *(normalize or (0.0, 1.0)), axis + 1), bound=5)

    def test_bytes_are_copied_out_of_the_slot(self):
        images = all_bytes().cuda()
        converter = convert([], torch.uint8)
        converter.prepare(images.device)
        assert converter(images, keep=False).data_ptr() != images.data_ptr()


def test_a_process_ends_after_its_kernels_are_compiled():
    """Python would end a daemon thread inside of the compiler, which aborts the process."""
    code = (
        "import time\n"
        "from h5chunk.transforms.compiled import Compiling\n"
        "Compiling()._prepare_in_thread(lambda: (time.sleep(0.5), print('compiled', flush=True)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "compiled\n"), run.stderr
