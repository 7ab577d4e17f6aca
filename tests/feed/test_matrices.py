"""Rows of a sparse matrix come as they are in the source, whoever wrote the file, dense or CSR, by any way."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.faults import small
from support.loader_files import slots_of
from support.loaders import loader_by
from support.matrices import LAYOUTS, check_epoch, dense, random_matrix, write, write_anndata
from support.orders import ordered
from torch.utils.data import DataLoader

import h5chunk
from h5chunk import ChunkDataset, ChunkLoader, ChunkSampler
from h5chunk.errors import FieldError, FileError, OptionError
from h5chunk.feed import kept_rows
from h5chunk.feed.columns import slot_bytes
from h5chunk.store.read.reader import H5Reader
from h5chunk.transforms import L2, Binarize, Csr, Dense, HoldOut, Log1p, Normalize, ToDtype
from h5chunk.transforms.csr import fresh

TIGHT = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def expected_rows(
    matrix: scipy.sparse.csr_matrix, scale: float, binarize: float | None, normalize: str | None
) -> np.ndarray:
    rows = matrix.toarray().astype(np.float64) / scale
    if binarize is not None:
        rows = ((rows >= binarize) & (rows != 0)).astype(np.float64)
    if normalize:
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        rows = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return rows


@pytest.mark.parametrize("device", DEVICES)
@TIGHT
@given(
    num_rows=st.sampled_from([1, 7, 100, 333]),
    num_columns=st.sampled_from([1, 256, 300, 70_000]),
    per_row=st.sampled_from([0.1, 5, 60]),
    pattern=st.booleans(),
    scale=st.sampled_from([1.0, 2.0, 10.0]),
    sparse=st.sampled_from(["dense", "csr"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16]),
    binarize=st.sampled_from([None, 1, 12.7]),
    normalize=st.sampled_from([None, "l2"]),
    resident=st.booleans(),
    reader=st.sampled_from(["direct", "h5py"]),
    chunk_samples=st.sampled_from([None, 1, 8, 50]),
    seed=st.integers(0, 3),
)
def test_rows_are_those_of_the_source(
    tmp_path, device, num_rows, num_columns, per_row, pattern, scale, sparse, dtype, binarize, normalize, resident,
    reader, chunk_samples, seed,
):  # fmt: skip
    matrix = random_matrix(num_rows, num_columns, per_row, seed)
    if pattern:
        matrix.data[:] = 1
        scale = 1.0
    if not matrix.nnz and reader == "direct":
        reader = "auto"
    path = write(tmp_path / "a.h5", matrix, pattern=pattern, scale=scale, chunk_samples=chunk_samples)
    expected = expected_rows(matrix, scale, binarize, normalize)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3}[dtype]
    values = [*([] if binarize is None else [Binarize(binarize)]), *([L2()] if normalize else [])]
    options = {"transforms": [*values, LAYOUTS[sparse](dtype)], "resident": resident}
    with loader_by(path, 9, device=device, reader=reader, seed=seed, **options) as loader:
        assert loader.is_resident == resident
        for _ in range(2):
            check_epoch(loader, expected, sparse=sparse, tolerance=tolerance)


@pytest.mark.parametrize("options", [{}, {"chunks": (40,)}, {"chunks": (40,), "compression": "gzip", "shuffle": True}])
@pytest.mark.parametrize("kind", ["f4", "f8", "i8", "u2"])
@pytest.mark.parametrize("sparse", ["dense", "csr"])
def test_files_of_others(tmp_path, options, kind, sparse):
    """AnnData's types, plain and compressed; values as they are."""
    matrix = random_matrix(200, 400, 12)
    matrix.data = (matrix.data.astype(kind) * (3 if kind in ("i8", "u2") else 0.1)).astype(kind)
    path = write_anndata(tmp_path / "a.h5ad", matrix, **options)
    expected = matrix.toarray().astype(np.float64)
    for reader in ("direct", "h5py"):
        with loader_by(path, 30, reader=reader, transforms=[LAYOUTS[sparse](torch.float64)]) as loader:
            check_epoch(loader, expected, sparse=sparse, tolerance=0)
    dataset = ChunkDataset(path, transforms=LAYOUTS[sparse](torch.float64))
    rows = [5, 199, 5, 0, 7]
    assert np.array_equal(dense(dataset[rows][0]).numpy(), expected[rows])


@pytest.mark.parametrize("echo", [1.5, 3])
@pytest.mark.parametrize("sparse", ["dense", "csr"])
@pytest.mark.parametrize("device", DEVICES)
def test_echoes_are_rows_of_the_window(tmp_path, echo, sparse, device):
    matrix = random_matrix(200, 50, 6)
    path = write(tmp_path / "a.h5", matrix)
    with ChunkLoader(path, 20, echo=echo, device=device, transforms=[LAYOUTS[sparse]()]) as loader:
        found = torch.cat([dense(batch).cpu() for (batch,) in loader]).numpy()
    known = {tuple(row) for row in matrix.toarray().tolist()}
    assert len(found) == 200 * echo and {tuple(row) for row in found.tolist()} == known


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("options", [{}, {"scale": 10.0}, {"dtype": "f2"}, {"dtype": "f4"}, {"pattern": True}], ids=str)
@pytest.mark.parametrize(
    "transforms",
    [
        *([Csr(dtype)] for dtype in (torch.float32, torch.float64, torch.bfloat16)),
        *([step, Csr()] for step in (Binarize(3), Log1p(), Log1p(9), L2())),
        [L2(), Dense(torch.float16)],
    ],
    ids=str,
)
def test_native_code_gives_the_same_bytes(tmp_path, monkeypatch, transforms, options, resident):
    path = write(tmp_path / "a.h5", random_matrix(70, 300, 9, 1), **options)

    def batches() -> list[torch.Tensor]:
        loader = ChunkLoader(ChunkDataset(path, trusted=True), 16, transforms=transforms, resident=resident)
        return [part for (batch,) in loader for part in _parts(batch)]

    made = batches()
    monkeypatch.setenv("H5CHUNK_NATIVE", "0")
    for part, other in zip(made, batches(), strict=True):
        assert part.dtype == other.dtype and torch.equal(part, other)


def _parts(batch: torch.Tensor) -> list[torch.Tensor]:
    if batch.layout == torch.strided:
        return [batch]
    return [batch.crow_indices(), batch.col_indices(), batch.values()]


@pytest.mark.parametrize("sparse", ["dense", "csr"])
def test_batches_that_are_kept_stay_what_they_are(tmp_path, sparse):
    """Also where the file's types are those of the batch, so that nothing need be converted."""
    matrix = random_matrix(400, 40, 8)
    matrix.data, matrix.indices = matrix.data.astype(np.float32), matrix.indices.astype(np.int32)
    for reuse in (False, True):
        path = write_anndata(tmp_path / "a.h5", matrix)
        loader = ChunkLoader(path, 25, reuse=reuse, transforms=[LAYOUTS[sparse]()])
        numbers = list(loader.order.batches())
        kept = [batch.clone() if reuse else batch for (batch,) in loader]
        list(loader)
        for batch, rows in zip(kept, numbers, strict=True):
            assert np.array_equal(dense(batch).numpy(), matrix[rows].toarray())


@pytest.mark.parametrize("sparse", ["dense", "csr"])
@pytest.mark.parametrize("workers", [(0, None), (2, "fork"), (2, "forkserver")])
def test_dataloader(tmp_path, sparse, workers):
    """Sparse tensors survive workers, and come in the loader's order."""
    matrix = random_matrix(300, 60, 9)
    labels = np.arange(300)
    path = write(tmp_path / "a.h5", matrix, scale=2.0, fields={"labels": labels})
    dataset = ChunkDataset(path, transforms=[L2(), LAYOUTS[sparse]()])
    assert dataset.fields == ("X", "labels")
    sampler = ChunkSampler(dataset, 32)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers[0], multiprocessing_context=workers[1])
    expected = expected_rows(matrix, 2.0, None, "l2")
    for _ in range(2):
        kept = list(loader)
        for rows, numbers in kept:
            assert rows.layout == (torch.sparse_csr if sparse == "csr" else torch.strided)
            np.testing.assert_allclose(dense(rows).numpy(), expected[numbers.numpy()], rtol=1e-6)
        assert sorted(torch.cat([numbers for _, numbers in kept]).tolist()) == labels.tolist()


def test_single_samples(tmp_path):
    matrix = random_matrix(50, 30, 5)
    path = write(tmp_path / "a.h5", matrix)
    assert torch.equal(ChunkDataset(path)[7][0], torch.from_numpy(matrix[7].toarray()[0]).float())
    row = ChunkDataset(path, transforms=Csr())[7][0]
    assert row.layout == torch.sparse_coo and np.array_equal(row.to_dense().numpy(), matrix[7].toarray()[0])
    doubled = ChunkDataset(path, transforms=lambda row: row * 2)
    assert torch.equal(doubled[[3, 4]][0], torch.from_numpy(matrix[[3, 4]].toarray()).float() * 2)


def test_dense_rows_of_ours(tmp_path):
    """Codes over the scale, not codes."""
    matrix = random_matrix(90, 40, 6)
    matrix.data = (matrix.data % 10 + 1) / 2
    scipy.sparse.save_npz(tmp_path / "a.npz", matrix)
    h5chunk.convert(tmp_path / "a.npz", tmp_path / "a.h5", dense=True, shuffle=False)
    for normalize in (None, "l2"):
        expected = expected_rows(matrix, 1.0, None, normalize)
        transforms = [L2()] if normalize else []
        with ChunkLoader(tmp_path / "a.h5", 20, transforms=transforms) as loader:
            check_epoch(loader, expected, sparse="dense", tolerance=1e-6)
        dataset = ChunkDataset(tmp_path / "a.h5", transforms=transforms)
        np.testing.assert_allclose(dataset[[8, 2]][0].numpy(), expected[[8, 2]], rtol=1e-6)
    with pytest.raises(OptionError, match="Csr is for sparse rows, but field 'X' has dense ones"):
        ChunkLoader(tmp_path / "a.h5", 20, transforms=[Csr()])


def test_windows_are_bounded_by_bytes(tmp_path, monkeypatch):
    """A matrix whose long rows lie together: windows are fewer rows, none takes more than it may."""
    small(monkeypatch, open_windows_bytes=1 << 20)
    counts = np.sort(np.random.default_rng(0).lognormal(2, 1.5, 4000).astype(int).clip(1, 2000))
    indices = np.concatenate([np.arange(count) for count in counts])
    matrix = scipy.sparse.csr_matrix((np.ones(len(indices), np.uint8), indices, np.append(0, np.cumsum(counts))))
    path = write(tmp_path / "a.h5", matrix, chunk_samples=16)
    reader = H5Reader(path)
    assert reader.recommended_window < reader.header.window_chunks
    with ChunkLoader(path, 40, memory_bytes=3 << 20) as loader:
        space = loader._source.kinds["X"]
        bound = slot_bytes({"X": space}, loader.read_ahead_samples // slots_of(loader))
        taken = [
            sum(array.nbytes for array in space.arrays(space.empty(window.samples, fresh)))
            for window in loader.order.windows()
        ]
        assert max(taken) <= bound <= 3 << 20 and max(taken) > bound / 4
        assert sum(len(batch) for (batch,) in loader) == 4000


@pytest.mark.parametrize("sparse", ["dense", "csr"])
@pytest.mark.parametrize("part", [None, 0.7, 0.2])
def test_rows_of_chunks_that_come_and_go(tmp_path, monkeypatch, sparse, part):
    """Few chunks fit in the memory for them, and their pages are used again."""
    monkeypatch.setattr(kept_rows, "KEPT_BYTES", 0)
    matrix = random_matrix(3000, 5000, 200)
    dataset = ChunkDataset(write(tmp_path / "a.h5", matrix, chunk_samples=64), transforms=[LAYOUTS[sparse]()])
    if part is not None:
        dataset = dataset.subset(np.random.default_rng(0).random(3000) < part)
    sampler = ChunkSampler(dataset, 32, window_chunks=4, num_workers=2)
    expected = expected_rows(matrix, 1.0, None, "")
    numbers = dataset.samples
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            batches = list(sampler)
            found = map(dataset.__getitem__, batches)
            if part is None:  # threads may share a data set
                found = pool.map(dataset.__getitem__, batches)
            for rows, (batch,) in zip(batches, found, strict=True):
                np.testing.assert_array_equal(dense(batch).numpy(), expected[numbers[rows]])


@pytest.mark.parametrize(("kept_bytes", "flag"), [(0, "nh"), (1 << 20, "hg")])
def test_kept_rows_use_large_pages_only_if_no_chunk_is_freed(tmp_path, monkeypatch, kept_bytes, flag):
    monkeypatch.setattr(kept_rows, "KEPT_BYTES", kept_bytes)
    arrays = []
    monkeypatch.setattr(kept_rows.KeptRows, "_load", lambda kept, chunks: arrays.append(kept._arrays[0]))
    dataset = ChunkDataset(write(tmp_path / "a.h5", random_matrix(3000, 200, 30), chunk_samples=64))
    dataset[next(iter(ChunkSampler(dataset, 32, window_chunks=4, num_workers=2)))]
    flags = flags_of_memory(arrays[0].data_ptr())
    if not {"hg", "nh"} & flags:
        pytest.skip("this kernel has no large pages")
    assert flag in flags


def flags_of_memory(address: int) -> set[str]:
    """The flags of the mapping that an address belongs to."""
    is_own = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *words = line.split()
        if "-" in name:
            first, last = (int(number, 16) for number in name.split("-"))
            is_own = first <= address < last
        if is_own and name == "VmFlags:":
            return set(words)
    raise AssertionError("not mapped")


@pytest.mark.parametrize("device", DEVICES)
def test_a_column_beyond_the_matrix_is_an_error(tmp_path, device):
    """Not a write beyond the batch."""
    path = write(tmp_path / "a.h5", random_matrix(200, 300, 20))
    with h5py.File(path, "r+") as file:
        file["X/indices"][1234] = 300
    for options in ({}, {"resident": True}, {"transforms": [Csr()]}, {"reader": "h5py"}):
        loader = loader_by(path, 10, device=device, **options)
        with pytest.raises(FileError, match=r"a\.h5: 'X' is damaged: it has an entry in column 300 of 300"):
            list(loader)
    with pytest.raises(FileError, match="column 300 of 300"):
        list(DataLoader(dataset := ChunkDataset(path), batch_sampler=ChunkSampler(dataset, 50)))


@pytest.mark.parametrize("columns", [-1, 1 << 40])
def test_columns_of_others_are_checked_too(tmp_path, columns):
    matrix = random_matrix(200, 300, 20)
    matrix.indices = matrix.indices.astype(np.int64)
    matrix.indices[77] = columns
    with pytest.raises(FileError, match=f"an entry in column {columns} of 300"):
        list(ChunkLoader(write_anndata(tmp_path / "a.h5", matrix), 20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transforms": [Dense(torch.uint8)]}, r"cannot represent all values of field 'X' \(uint8 over 2\)"),
        ({"transforms": [Normalize(0.5, 0.5)]}, "field 'X', which is a matrix: pass Dense, Csr, L2 or Log1p"),
        ({"transforms": [ToDtype(torch.float16)]}, "field 'X', which is a matrix"),
        ({"transforms": [Binarize(1), L2(), Dense(torch.int32)]}, r"L2\(\) gives fractions, but Dense"),
        ({"transforms": {"labels": [Csr()]}}, "field 'labels', which is not a matrix: use ToDtype"),
        ({"transforms": {"labels": [Log1p()]}}, r"'labels', which is torch.int64: put ToDtype\(torch.float32\) first"),
        ({"transforms": {"genes": []}}, "transforms has the field 'genes', but the fields are 'X', 'labels'"),
        ({"transforms": [L2]}, "transforms has <class .*: pass objects of h5chunk.transforms"),
        ({"transforms": "L2"}, "transforms is 'L2': pass a list"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, message):
    path = write(tmp_path / "a.h5", random_matrix(20, 30, 5), scale=2.0, fields={"labels": np.arange(20)})
    with pytest.raises(OptionError, match=message):
        loader_by(path, 10, **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_several_matrices_at_any_place(tmp_path, workers):
    first, second = random_matrix(40, 30, 5), random_matrix(40, 70, 8)
    path, other = write_anndata(tmp_path / "a.h5", first), write_anndata(tmp_path / "b.h5", second)
    with h5py.File(path, "a") as file, h5py.File(other) as peaks:
        peaks.copy("X", file, "peaks")
        file["labels"] = np.arange(40)
    dataset = ChunkDataset(path, fields=("labels", "peaks", "X"))
    transforms = {"peaks": [Csr()], "X": [HoldOut(0.5, seed=1), Csr()]}
    for batches in (
        DataLoader(dataset.with_transforms(transforms), batch_sampler=ChunkSampler(dataset, 8), num_workers=workers),
        ChunkLoader(dataset, 8, transforms=transforms),
        ChunkLoader(dataset, 8, transforms=transforms, resident=True),
    ):
        seen = []
        for labels, peaks, (inputs, targets) in batches:
            rows = labels.numpy()
            np.testing.assert_array_equal(peaks.to_dense(), second[rows].toarray())
            np.testing.assert_array_equal(inputs.to_dense() + targets.to_dense(), first[rows].toarray())
            seen += rows.tolist()
        assert sorted(seen) == list(range(40))


@pytest.mark.parametrize("userblock", [0, 512])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_what_a_matrix_says_it_is_in_a_string_of_variable_length(tmp_path, userblock, libver):
    """That is looked up without HDF5, which hangs where the heap of strings is damaged."""
    matrix = random_matrix(30, 20, 4)
    with h5py.File(tmp_path / "x.h5", "w", libver=libver, userblock_size=userblock) as file:
        for name, kind in (("rows", "csr_matrix"), ("columns", "csc_matrix")):
            group = file.create_group(name)
            group.attrs["other"], group.attrs["encoding-type"] = "text", kind
            group.attrs["shape"] = np.array(matrix.shape)
            for part in ("indptr", "indices", "data"):
                group[part] = getattr(matrix, part)
    dataset = ChunkDataset(tmp_path / "x.h5", fields=["rows"])
    np.testing.assert_array_equal(dataset[:][0].numpy(), matrix.toarray())
    with pytest.raises(FieldError, match=r"not a CSR matrix \(encoding-type 'csc_matrix'\)"):
        ChunkDataset(tmp_path / "x.h5", fields=["columns"])


def test_options_of_the_dataset_that_do_not_fit(tmp_path):
    path = write(tmp_path / "a.h5", random_matrix(20, 30, 5))
    with pytest.raises(OptionError, match="Csr makes whole batches: pass them as collate_fn"):
        ChunkDataset(path, transforms=[Csr(), abs])
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["images"] = np.zeros((4, 3, 8, 8), np.uint8)
    for transform, message in (
        (Dense(), "field 'images', which is not a matrix"),
        (Binarize(1), r"field 'images', which is torch.uint8: put ToDtype\(torch.float32\) first"),
        (ToDtype(torch.float32, channels_last=True), "channels_last is for batches"),
        ([5], "transforms has 5"),
    ):
        with pytest.raises(OptionError, match=message):
            ChunkDataset(tmp_path / "b.h5", transforms=transform)


def test_other_layouts_are_refused(tmp_path):
    matrix = random_matrix(20, 20, 5)
    path = write_anndata(tmp_path / "a.h5", matrix)
    with h5py.File(path, "r+") as file:
        file["X"].attrs["encoding-type"] = "csc_matrix"
        file.copy("X", "raw")
    with pytest.raises(FieldError, match=r"not a CSR matrix .*'csc_matrix'.*h5chunk convert"):
        ChunkLoader(path, 10)
    with h5py.File(path, "r+") as file:
        file["X"].attrs["encoding-type"] = "csr_matrix"
    with pytest.raises(FieldError, match="sparse matrix, which bench cannot measure"):
        h5chunk.bench(path)


def test_a_file_that_changes_is_an_error(tmp_path):
    path = write(tmp_path / "a.h5", random_matrix(200, 30, 5))
    dataset = ChunkDataset(path)
    dataset[[1, 2]]
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(FileError, match="replaced or changed"):
        dataset[[1, 2]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_gives_what_torch_does(tmp_path):
    """The compiled kernel is the one that is tested, and plain indexing gives the same bits."""
    path = write(tmp_path / "a.h5", random_matrix(300, 70_000, 30), scale=10.0)
    with ChunkLoader(path, 50, device="cuda", resident=False) as loader:
        first, converter = [batch for (batch,) in loader], loader._pipelines[0].converter
        assert converter._kernel.wait()
        loader.set_epoch(0)
        again = [batch for (batch,) in loader]
        kernel, converter._kernel = converter._kernel, None
        loader.set_epoch(0)
        plain = [batch for (batch,) in loader]
        converter._kernel = kernel
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, plain, strict=True))


def test_rows_wider_than_memory_are_an_error(tmp_path):
    path = write_anndata(tmp_path / "a.h5", random_matrix(40, 300, 5))
    with h5py.File(path, "r+") as file:
        file["X"].attrs["shape"] = np.array([40, 1 << 58])
    with pytest.raises(OptionError, match=r"8 rows and 288230376151711744 columns needs .* smaller batch_size, or"):
        next(iter(ChunkLoader(path, 8)))
    with pytest.raises(OptionError, match=r"a batch needs .* more than the free memory"):
        ChunkDataset(path)[0]
    with pytest.raises(OptionError, match=r"a batch needs .* more than the free memory"):
        ChunkDataset(path)[[0, 1]]


def test_negative_columns_are_an_error(tmp_path):
    """Of types that hold no number as large as the width."""
    matrix = random_matrix(50, 40_000, 8)
    matrix.indices = matrix.indices.astype(np.int16)
    matrix.indices[5] = -3
    for options in ({}, {"transforms": [Csr()]}, {"reader": "h5py"}):
        with pytest.raises(FileError, match=r"an entry in column -\d+ of 40000"):
            list(loader_by(write_anndata(tmp_path / "a.h5", matrix), 20, **options))


@pytest.mark.parametrize("part", ["data", "indices"])
def test_big_endian_numbers_are_converted(tmp_path, part):
    matrix = random_matrix(90, 300, 8)
    wanted = matrix.toarray()
    numbers = getattr(matrix, part)
    setattr(matrix, part, numbers.astype(">f4" if part == "data" else ">i4"))
    path = write_anndata(tmp_path / "a.h5", matrix)
    loader = ChunkLoader(path, 90, shuffle=False)
    assert np.array_equal(next(iter(loader))[0].numpy(), wanted)
    assert np.array_equal(ChunkDataset(path)[np.arange(90)][0].numpy(), wanted)


def test_entries_behind_a_link_are_not_taken_from_this_file(tmp_path):
    matrix = random_matrix(90, 300, 8)
    write_anndata(tmp_path / "a.h5", matrix)
    path = write_anndata(tmp_path / "b.h5", matrix)
    with h5py.File(path, "r+") as file:
        del file["X/data"]
        file["X/data"] = h5py.ExternalLink("a.h5", "/X/data")
    with pytest.raises(FileError, match="X/data"):
        ChunkLoader(path, 90, shuffle=False)


def test_changing_a_csr_batch_changes_no_echo(tmp_path):
    matrix = random_matrix(400, 40, 8)
    matrix.data, matrix.indices = matrix.data.astype(np.float32), matrix.indices.astype(np.int32)
    for (batch,) in ChunkLoader(write_anndata(tmp_path / "a.h5", matrix), 50, echo=2, transforms=[Csr()]):
        assert (batch.values() > 0).all()
        batch.values().fill_(-1)
        batch.col_indices().fill_(0)


CHANGES = {
    "nothing": lambda batch: None,
    "by torch": lambda batch: batch[:, :3].add_(1),
    "a view by torch": lambda batch: batch.T[5:9].sub_(1),
    "detached": lambda batch: batch.detach()[:, -1].add_(1),
    "all by NumPy": lambda batch: np.add(batch.numpy(), 1, out=batch.numpy()),
    "zeros by NumPy": lambda batch: batch.numpy().fill(0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lent_dense_batches_may_be_changed(tmp_path, change, dtype):
    if dtype == torch.bfloat16 and "NumPy" in change:
        pytest.skip("NumPy has no bfloat16")
    matrix = random_matrix(430, 9000, 20)
    rows = torch.from_numpy(matrix.toarray())
    loader = ChunkLoader(write(tmp_path / "a.h5", matrix), 50, transforms=[Dense(dtype)], reuse=True)
    for _ in range(2):
        for number, ((batch,), numbers) in enumerate(zip(loader, loader.order.batches(), strict=True)):
            assert torch.equal(batch, rows[numbers].to(dtype))
            if number % 3 != 1:
                CHANGES[change](batch)
            if number % 4 == 3:
                del batch
    with torch.inference_mode():
        for (batch,), numbers in zip(loader, loader.order.batches(), strict=True):
            assert torch.equal(batch, rows[numbers].to(dtype))
            CHANGES[change](batch)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("sparse", ["dense", "csr"])
def test_windows_of_lanes_and_of_padding_fit(tmp_path, reuse, sparse):
    """Of skewed rows, where every lane cuts chunks, and of fewer rows than a batch."""
    counts = np.ones(4096, np.int64)
    counts[::64] = 2000
    indices = np.concatenate([np.arange(count) for count in counts])
    matrix = scipy.sparse.csr_matrix((np.ones(len(indices), np.uint8), indices, np.append(0, np.cumsum(counts))))
    path = write(tmp_path / "a.h5", matrix, chunk_samples=8)
    options = {"reuse": reuse, "transforms": [LAYOUTS[sparse]()]}
    loader = loader_by(**ordered(path, 64, lanes=16, shuffle=False), **options)
    assert sum(batch.shape[0] for (batch,) in loader) == 4096
    small = write(tmp_path / "b.h5", matrix[:50])
    (batch,) = next(iter(loader_by(**ordered(small, 256, pad=True, shuffle=False), **options)))
    assert np.array_equal(dense(batch).numpy(), matrix[np.arange(256) % 50].toarray())


def test_threads_may_share_a_dataset(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = np.arange(600)[:, None] * np.ones((1, 300), np.int64)
    dataset = ChunkDataset(tmp_path / "a.h5")
    rng = np.random.default_rng(0)

    def check(rows: np.ndarray) -> bool:
        return bool((dataset[rows][0].numpy() == rows[:, None]).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(check, [rng.permutation(600)[:50] for _ in range(200)]))


def test_samplers_can_be_pickled(tmp_path):
    dataset = ChunkDataset(write(tmp_path / "a.h5", random_matrix(50, 30, 5)))
    sampler = ChunkSampler(dataset, 8, weights=np.ones(50))
    again = pickle.loads(pickle.dumps(sampler))
    assert list(again) == list(sampler) and again.state_dict() == sampler.state_dict()


@pytest.mark.parametrize("part", [[0], [3, 4, 900]])
def test_part_of_a_matrix_stays_on_the_device(tmp_path, part):
    """All rows are read, whichever are wanted: long ones beside those of the part, too."""
    matrix = random_matrix(1000, 40, 3)
    matrix = scipy.sparse.vstack([matrix[:500], np.ones((5, 40)), matrix[500:]]).tocsr()
    write_anndata(tmp_path / "m.h5", matrix)
    dataset = ChunkDataset(tmp_path / "m.h5", fields=["X", "sample_number"]).subset(part)
    with ChunkLoader(dataset, 2, resident=True) as loader:
        for rows, numbers in loader:
            assert np.array_equal(rows, matrix[np.array(part)[numbers]].toarray())


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("columns", [[1, 1, 2], [1, 2, 1]])
def test_several_entries_in_one_place_are_refused(tmp_path, columns, resident):
    """scipy adds them, which no layout of a batch does by itself."""
    with h5py.File(tmp_path / "m.h5", "w") as file:
        group = file.create_group("X")
        group.attrs["encoding-type"], group.attrs["shape"] = "csr_matrix", np.array([3, 3])
        group["indptr"], group["indices"], group["data"] = [0, 2, 2, 5], [2, 0, *columns], [1.0, 2.0, 3.0, 4.0, 5.0]
    rows = ChunkDataset(tmp_path / "m.h5")
    assert rows[0][0].tolist() == [2, 0, 1]
    with pytest.raises(FileError, match="several entries in column 1: write a file in which"):
        rows[2]
    with (
        pytest.raises(FileError, match="several entries in column 1"),
        ChunkLoader(rows, 3, resident=resident) as loader,
    ):
        list(loader)


@pytest.mark.parametrize("sparse", ["dense", "csr"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_loader(tmp_path, sparse, dtype):
    """With numbers of samples that are a view, and without samples."""
    path = write(tmp_path / "a.h5", random_matrix(40, 30, 8))
    fields = {"X": "X", "numbers": "sample_number"}
    dataset = ChunkDataset(path, fields=fields, transforms=LAYOUTS[sparse](dtype), trusted=True)
    (whole,) = ChunkLoader(ChunkDataset(path, trusted=True), 40, shuffle=False, transforms=[LAYOUTS[sparse](dtype)])
    for numbers in (np.arange(40)[::3], np.arange(0)):
        rows, found = dataset[numbers]
        assert found.tolist() == numbers.tolist() and rows.dtype == dtype
        assert torch.equal(dense(rows), dense(whole[0])[numbers])
