"""Names, identifiers and categories of a data set, and of the samples of a batch, for every kind of file."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import scipy.sparse
from support.foreign import make_images
from support.pictures import pixels
from torch.utils.data import DataLoader

import h5chunk
from h5chunk import ChunkDataset, ChunkLoader, ChunkSampler, FieldError, FileError

GENES = [f"gene{number}" for number in range(12)]
CELLS = [f"cell{number}" for number in range(40)]
TYPES = ["B", "T"]


@pytest.fixture(params=["one file", "shards"])
def photos(request, tmp_path, class_folder):
    """60 pictures of 3 classes; image i is ``pixels(i)`` and called ``class{i % 3}/{i:04d}.png``."""
    out = tmp_path / "photos.h5"
    options = {"shards": 3} if request.param == "shards" else {}
    h5chunk.convert(class_folder(60), out, chunk_samples=4, **options)
    return sorted(tmp_path.glob("photos*.h5")) if options else out


@pytest.fixture
def cells(tmp_path):
    """A matrix of 40 cells x 12 genes, shuffled, with identifiers and the type of each cell."""
    anndata = pytest.importorskip("anndata")
    pandas = pytest.importorskip("pandas")
    counts = scipy.sparse.csr_matrix(np.random.default_rng(0).integers(0, 3, (40, 12)).astype(np.float32))
    kinds = pandas.Categorical([TYPES[number % 2] for number in range(40)])
    source = anndata.AnnData(counts, obs=pandas.DataFrame({"kind": kinds}, index=CELLS))
    source.var_names = GENES
    source.write_h5ad(tmp_path / "cells.h5ad")
    h5chunk.convert(tmp_path / "cells.h5ad", tmp_path / "cells.h5")
    return tmp_path / "cells.h5", counts.toarray()


def number_of(name: str) -> int:
    """The picture that a source name is of."""
    return int(name.partition("/")[2].removesuffix(".png"))


def test_names_of_images(photos):
    dataset = ChunkDataset(photos)
    assert dataset.classes == ("class0", "class1", "class2")
    assert dataset.categories("labels").tolist() == list(dataset.classes)
    assert sorted(map(number_of, dataset.source_names)) == list(range(60))
    for number in (0, 17, 59):
        image, label = dataset[number]
        name = dataset.source_names[number]
        assert name.startswith(dataset.classes[label] + "/")
        np.testing.assert_array_equal(image, pixels(number_of(name)).transpose(2, 0, 1))


def test_names_of_a_subset(photos):
    whole = ChunkDataset(photos)
    part = whole.subset(np.arange(60) % 7 == 0)
    assert part.source_names.tolist() == whole.source_names[::7].tolist()
    assert part.subset([1, 3]).source_names.tolist() == whole.source_names[[7, 21]].tolist()


@pytest.mark.parametrize("way", ["loader", "DataLoader", "resident"])
def test_each_batch_says_which_samples_it_has(photos, way):
    dataset = ChunkDataset(photos, fields=["images", "labels", "sample_number"]).subset(np.arange(5, 60))
    if way == "DataLoader":
        batches = DataLoader(dataset, batch_sampler=ChunkSampler(dataset, 8))
    else:
        batches = ChunkLoader(dataset, 8, resident=way == "resident")
    seen = []
    for images, labels, numbers in batches:
        for image, label, name in zip(images, labels, dataset.source_names[numbers], strict=True):
            np.testing.assert_array_equal(image, pixels(number_of(name)).transpose(2, 0, 1))
            assert number_of(name) % 3 == label
        seen += numbers.tolist()
    assert sorted(seen) == list(range(55))
    if way != "DataLoader":
        batches.close()


def test_identifiers_of_a_matrix(cells):
    path, counts = cells
    dataset = ChunkDataset(path, fields=["X", "kind", "sample_number"])
    assert sorted(dataset.row_ids) == sorted(CELLS)
    assert dataset.categories("kind").tolist() == TYPES
    columns = [GENES.index(gene) for gene in dataset.column_ids]
    for rows, kinds, numbers in ChunkLoader(dataset, 16):
        cell = [CELLS.index(name) for name in dataset.row_ids[numbers]]
        np.testing.assert_array_equal(rows, counts[cell][:, columns])
        assert dataset.categories("kind")[kinds].tolist() == [TYPES[number % 2] for number in cell]


def test_categories_of_a_field_by_another_name(cells):
    dataset = ChunkDataset(cells[0], fields={"rows": "X", "type": "kind"})
    assert dataset.categories("type").tolist() == dataset.categories("kind").tolist() == TYPES


def test_a_table_is_read_once_and_cannot_be_changed(photos):
    dataset = ChunkDataset(photos)
    assert dataset.source_names is dataset.source_names
    with pytest.raises(ValueError, match="read-only"):
        dataset.source_names[0] = "other"


def test_rows_of_a_matrix_have_no_names(cells):
    with pytest.raises(FieldError, match=r"has no source_names: its source had none .*; rows of a matrix have row_ids"):
        ChunkDataset(cells[0], fields=["X"]).where("source_name == 'a'")


@pytest.mark.parametrize("name", ["row_ids", "column_ids"])
def test_what_a_file_does_not_have(photos, name):
    with pytest.raises(FieldError, match=f"has no {name}: its source had none"):
        getattr(ChunkDataset(photos), name)
    with pytest.raises(FieldError, match="field 'images' has no categories"):
        ChunkDataset(photos).categories("images")


def test_other_hdf5_files_have_no_tables(tmp_path):
    dataset = ChunkDataset(make_images(tmp_path / "a.h5", 20, 4))
    assert dataset.classes == ()
    with pytest.raises(FieldError, match="only files that h5chunk converted have names of samples"):
        dataset.source_names  # noqa: B018


def test_a_damaged_table(tmp_path, class_folder):
    h5chunk.convert(class_folder(20), tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["h5chunk/source_name_ends"][3] = 1 << 40
    with pytest.raises(FileError, match="source_name_ends does not fit source_names"):
        ChunkDataset(tmp_path / "a.h5").source_names  # noqa: B018
