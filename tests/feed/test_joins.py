"""Fields of the same samples in several files, joined by position or by a key, and samples along any axis."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse
import torch
from support.loaders import loader_by

import h5chunk
from h5chunk.errors import FieldError, OptionError

N = 40
RANDOM = np.random.default_rng(7)
IMAGES = RANDOM.integers(0, 250, (N, 40, 30), np.uint8)
VECTORS = RANDOM.normal(size=(N, 6)).astype(np.float32)
NAMES = np.array([f"sample {number:03}" for number in RANDOM.permutation(N)], object)


def write(path: Path, layout: Any = None, **datasets: Any) -> str:
    with h5py.File(path, "w") as file:
        for name, data in datasets.items():
            file.create_dataset(name, data=data, **(layout or {}))
    return str(path)


def joined(order: np.ndarray, folder: Path, key: Any = NAMES, **options: Any) -> Any:
    """Images in one file, and vectors in another, whose rows have another order."""
    x = write(folder / "x.h5", images=IMAGES, id=key)
    y = write(folder / "y.h5", vectors=VECTORS[order], id=key[order], label=order)
    return h5chunk.ChunkDataset({"images": x, "vectors": y}, key="id", **options)


@pytest.mark.parametrize(
    "key", [NAMES, NAMES.astype("S"), np.arange(N)[::-1] - 3, np.arange(N) / 1.0], ids=["text", "bytes", "int", "float"]
)
def test_rows_are_joined_by_any_key(key: np.ndarray, tmp_path: Path) -> None:
    order = RANDOM.permutation(N)
    dataset = joined(order, tmp_path, key, fields=["vectors", "images", "sample_number"])
    assert dataset.fields == ("vectors", "images", "sample_number") and len(dataset) == N
    with h5chunk.ChunkLoader(dataset, 8) as loader:
        for vectors, images, numbers in loader:
            assert (vectors.numpy() == VECTORS[numbers]).all() and (images.numpy() == IMAGES[numbers]).all()
    assert dataset.values("label").tolist() == list(range(N))
    assert dataset.values("id").astype(str).tolist() == key.astype(str).tolist()


def test_missing_samples_are_left_out_with_a_warning_or_an_error(tmp_path: Path) -> None:
    order = RANDOM.permutation(N)[5:]
    with pytest.warns(
        UserWarning, match=r"35 samples are in all files: \S+y\.h5 lacks 5 samples of 40 in \S+x\.h5"
    ) as w:
        dataset = joined(order, tmp_path)
    assert w[0].filename == __file__
    kept = np.sort(order)
    assert (dataset[range(35)][1].numpy() == VECTORS[kept]).all() and (
        dataset[[3]][0][0].numpy() == IMAGES[kept[3]]
    ).all()
    with pytest.raises(FieldError, match=r"lacks 5 samples .*: pass missing='drop' to leave them out"):
        joined(order, tmp_path, missing="error")
    with pytest.raises(OptionError, match="missing is 'inner': pass 'drop' or 'error'"):
        joined(order, tmp_path, missing="inner")
    x = write(tmp_path / "x.h5", images=IMAGES[:9], id=NAMES[:9])
    with pytest.warns(UserWarning, match=r"9 samples .*: 31 rows of 40 in \S+z\.h5 are not used"):
        z = write(tmp_path / "z.h5", vectors=VECTORS, id=NAMES)
        assert (h5chunk.ChunkDataset({"images": x, "vectors": z}, key="id")[range(9)][1].numpy() == VECTORS[:9]).all()


def test_several_samples_may_have_one_row(tmp_path: Path) -> None:
    patients = RANDOM.integers(0, 3, N)
    x = write(tmp_path / "x.h5", images=IMAGES, patient=patients)
    y = write(tmp_path / "y.h5", age=np.array([50, 60, 70]), number=[2, 0, 1])
    dataset = h5chunk.ChunkDataset({"images": x, "age": y}, key={"images": "patient", "age": "number"})
    assert dataset.values("age").tolist() == np.array([60, 70, 50])[patients].tolist()
    with pytest.raises(FieldError, match=r"x\.h5: its rows \d+ and \d+ have the same key, \d: remove one of them"):
        big = write(tmp_path / "big.h5", large=np.zeros((3, 999)), number=[2, 0, 1])
        small = write(tmp_path / "x.h5", images=IMAGES[:, 0], patient=patients)
        h5chunk.ChunkDataset({"large": big, "images": small}, key={"images": "patient", "large": "number"})


def test_sets_of_files_are_joined(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path / f"x{number}.h5", images=IMAGES[number * 10 : number * 10 + 10])
    first = write(tmp_path / "y0.h5", vectors=VECTORS[:7], label=np.arange(7))
    second = write(tmp_path / "y1.h5", vectors=VECTORS[7:], label=np.arange(7, N))
    paths = {"images": str(tmp_path / "x*.h5"), "vectors": [first, second], "label": [first, second]}
    dataset = h5chunk.ChunkDataset(paths)
    assert dataset.fields == ("images", "vectors", "label") and len(dataset.files) == 6
    for images, vectors, label in h5chunk.ChunkLoader(dataset, 8):
        assert (images.numpy() == IMAGES[label]).all() and (vectors.numpy() == VECTORS[label]).all()
    assert h5chunk.ChunkDataset(paths, fields=["label"]).fields == ("label",)
    renamed = h5chunk.ChunkDataset(
        {"x": paths["images"], "y": first.replace("0", "[01]")}, fields={"x": "images", "y": "label"}
    )
    assert renamed.values("y").tolist() == list(range(N))


def test_tables_of_converted_and_other_files_are_keys(tmp_path: Path) -> None:
    matrix = scipy.sparse.random(N, 9, 0.5, "csr", dtype=np.float32, random_state=1)
    with h5py.File(tmp_path / "a.h5ad", "w") as file:
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": matrix.shape})
        for name in ("data", "indices", "indptr"):
            group[name] = getattr(matrix, name)
        file["obs/_index"] = NAMES
        file["obs"].attrs.update(
            {"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index", "column-order": []}
        )
    order = RANDOM.permutation(N)[3:]
    y = write(tmp_path / "y.h5", vectors=VECTORS[order], cell=NAMES[order])
    with pytest.warns(UserWarning, match="37 samples"):
        dataset = h5chunk.ChunkDataset(
            {"X": tmp_path / "a.h5ad", "vectors": y}, key={"X": "row_ids", "vectors": "cell"}
        )
    kept = np.sort(order)
    assert dataset.row_ids.tolist() == NAMES[kept].tolist()
    sampler = h5chunk.ChunkSampler(dataset, 37, shuffle=False)
    loaders = (
        h5chunk.ChunkLoader(dataset, 37, shuffle=False),
        torch.utils.data.DataLoader(dataset, batch_sampler=sampler),
    )
    for batch in (dataset[range(37)], *(next(iter(loader)) for loader in loaders)):
        assert (batch[0].numpy() == matrix.toarray()[kept]).all() and (batch[1].numpy() == VECTORS[kept]).all()


def test_images_that_were_converted_are_joined_by_their_names(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(12):
        path = tmp_path / f"photos/{'ab'[number % 2]}/{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(IMAGES[number]).save(path)
    h5chunk.convert(tmp_path / "photos", tmp_path / "photos.h5", keep_size=True)
    names = np.array([f"{'ab'[number % 2]}/{number}.png" for number in range(12)], object)
    y = write(tmp_path / "y.h5", number=np.arange(12), name=names)
    photos = tmp_path / "photos.h5"
    dataset = h5chunk.ChunkDataset(
        {"images": photos, "labels": str(photos), "number": y}, key={"images": "source_names", "number": "name"}
    )
    large = write(tmp_path / "z.h5", vectors=np.zeros((12, 9999)), name=names)
    beside = h5chunk.ChunkDataset(
        {"labels": photos, "vectors": large}, key={"labels": "source_names", "vectors": "name"}
    )
    assert beside.classes == ("a", "b") == tuple(beside.categories("labels"))
    assert dataset.classes == ("a", "b") and dataset.source_names.tolist() == names[dataset.values("number")].tolist()
    for number in range(12):
        image, label, own = dataset[number]
        assert (np.asarray(image).squeeze() == IMAGES[own]).all() and label == own % 2


def test_files_that_were_shuffled_are_not_joined_by_position_without_notice(tmp_path: Path) -> None:
    a, b, c = (str(tmp_path / name) for name in ("a.h5", "b.h5", "c.h5"))
    h5chunk.convert({"images": IMAGES, "label": np.arange(N)}, a, seed=1)
    h5chunk.convert({"vectors": VECTORS}, b, seed=2)
    h5chunk.convert({"vectors": VECTORS}, c, seed=1)
    with pytest.raises(FieldError, match=r"have other orders, .* pass key='h5chunk/source_index'"):
        h5chunk.ChunkDataset({"images": a, "vectors": b})
    y = write(tmp_path / "y.h5", vectors=VECTORS)
    by_source = {"images": "h5chunk/source_index", "vectors": "sample_number"}
    for path, key in ((b, "h5chunk/source_index"), (c, None), (y, by_source)):
        dataset = h5chunk.ChunkDataset({"images": a, "label": a, "vectors": path}, key=key)
        images, label, vectors = dataset[range(N)]
        assert (images.numpy() == IMAGES[label]).all() and (vectors.numpy() == VECTORS[label]).all()
    with pytest.warns(
        UserWarning, match=r"a.h5 was shuffled .* row i of \S+y.h5 is taken .* key='sample_number', and"
    ) as w:
        plainly = h5chunk.ChunkDataset({"images": a, "vectors": y})
    assert w[0].filename == __file__ and repr(by_source) in str(w[0].message)
    same = h5chunk.ChunkDataset({"images": a, "vectors": y}, key="sample_number")
    assert (plainly[range(N)][1].numpy() == VECTORS).all() and (same[range(N)][1].numpy() == VECTORS).all()


def test_errors_of_joined_files_name_remedies(tmp_path: Path) -> None:
    x = write(tmp_path / "x.h5", images=IMAGES, id=np.arange(N), text=NAMES)
    y = write(tmp_path / "y.h5", vectors=VECTORS[:30], id=NAMES[:30], part=np.arange(30) / 2, pair=np.zeros((30, 2)))
    both = {"images": x, "vectors": y}
    for options, error, text in (
        ({}, FieldError, r"differ in length \(\S+x.h5 has 40 samples; \S+y.h5 has 30 samples\): .* key="),
        ({"fields": ["images", "labels"]}, OptionError, "no file for the field 'labels': add it"),
        ({"key": "id"}, FieldError, r"y.h5: its key is text \(such as \['sample .*but that of .*x.h5 is numbers"),
        ({"key": "nothing"}, FieldError, "x.h5 has no dataset 'nothing'; it has id, images.*pass that of each field"),
        ({"key": {"images": "id"}}, OptionError, "key=.'vectors': 'id'"),
        ({"key": {"images": "id", "vectors": "part"}}, FieldError, "key is float64: name a key of text or of whole"),
        ({"key": {"images": "id", "vectors": "pair"}}, FieldError, "'pair' needs one value per sample"),
    ):
        with pytest.raises(error, match=text):
            h5chunk.ChunkDataset(both, **options)
    with pytest.raises(FieldError, match="no key is in all files"):
        z = write(tmp_path / "z.h5", vectors=VECTORS, id=np.arange(100, 100 + N))
        h5chunk.ChunkDataset({"images": x, "vectors": z}, key="id")
    with pytest.raises(OptionError, match=r"pass h5chunk\.ChunkDataset\(\{'x': "):
        h5chunk.ChunkDataset(x, fields=["images"], key="id")
    with pytest.raises(OptionError, match="which only h5chunk"):
        h5chunk.info(both)  # type: ignore[arg-type]


def test_read_amplification_of_another_order_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.zeros((4096, 1100), np.uint8)
    order = RANDOM.permutation(4096)
    x = write(tmp_path / "x.h5", images=images, id=np.arange(4096))
    layout = {"compression": "gzip", "chunks": (64, 1024)}
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file.create_dataset("vectors", data=np.zeros((4096, 1024), np.uint8), **layout)
        file["id"] = order
    for limit, least in ((1 << 30, 1.0), (1 << 20, 3.0)):
        monkeypatch.setattr("h5chunk.store.read.field_readers.CACHE_BYTES", limit)
        dataset = h5chunk.ChunkDataset({"images": x, "vectors": tmp_path / "y.h5"}, key="id")
        monkeypatch.setattr(type(dataset._reader), "recommended_window", 1)
        monkeypatch.setattr(dataset._reader, "chunk_samples", 64)
        assert dataset.read_amplification >= least and (least > 1) == (dataset.read_amplification > 1.01)
        assert ("x their bytes" in repr(dataset)) == (least > 1)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize(
    "layout", [{}, {"chunks": (3, 5, 4)}, {"chunks": (7, 2, 9), "compression": "gzip"}, {"dtype": ">i4"}]
)
@pytest.mark.parametrize("reader", ["auto", "h5py"])
def test_samples_are_along_any_axis(axis: int, layout: Any, reader: str, tmp_path: Path) -> None:
    data = RANDOM.integers(0, 99, (11, 12, 13), np.int32)
    x = write(tmp_path / "x.h5", layout, x=data)
    dataset = h5chunk.ChunkDataset(x, fields=["x", "sample_number"], sample_axis={"x": axis})
    expected = np.moveaxis(data, axis, 0)
    assert (dataset[range(len(dataset))][0].numpy() == expected).all() and len(dataset) == len(expected)
    with warnings.catch_warnings(), loader_by(dataset, 4, reader=reader) as loader:
        for batch, numbers in loader:
            assert (batch.numpy() == expected[numbers]).all()


def test_fields_have_axes_of_their_own(tmp_path: Path) -> None:
    images = RANDOM.integers(0, 99, (3, 8, 8, N), np.uint8)
    x = write(tmp_path / "x.h5", images=images, y=np.arange(N)[None], z=np.arange(N), t=NAMES, one=np.float64(3))
    with pytest.raises(FieldError, match=r"differ in length .* pass sample_axis=-1"):
        h5chunk.ChunkDataset(x, fields=["images", "y"])
    dataset = h5chunk.ChunkDataset(x, fields=["images", "y", "z", "t"], sample_axis=-1)
    assert dataset[5][0].shape == (3, 8, 8) and dataset[5][1:3] == (5, 5) and dataset[5][3] == NAMES[5]
    numbered = h5chunk.ChunkDataset(x, fields=["images", "sample_number"], sample_axis=-1)
    assert numbered[2][1] == 2
    other = h5chunk.ChunkDataset(x, fields=["images", "z"], sample_axis={"images": 3})
    assert (
        torch.cat([batch for batch, _ in h5chunk.ChunkLoader(other, 16, shuffle=False)]).numpy()
        == np.moveaxis(images, -1, 0)
    ).all()
    assert other.fingerprint != h5chunk.ChunkDataset(x, fields=["images"], sample_axis=1).fingerprint
    for options, error, text in (
        ({"fields": ["z"], "sample_axis": 1}, FieldError, "'z' has 1 axis, but sample_axis is 1"),
        ({"fields": ["t"], "sample_axis": 1}, FieldError, "'t' has samples along its first axis only"),
        ({"fields": ["z"], "sample_axis": {"y": -1}}, OptionError, "sample_axis has 'y': name a field of fields"),
        ({"fields": ["z"], "sample_axis": "last"}, OptionError, "pass the number of an axis, such as -1"),
        ({"sample_axis": -1}, OptionError, "no fields are named: name them"),
    ):
        with pytest.raises(error, match=text):
            h5chunk.ChunkDataset(x, **options)  # type: ignore[arg-type]


def test_windows_have_fields_in_several_files(tmp_path: Path) -> None:
    lengths = [10, 14, 16]
    x = write(tmp_path / "x.h5", images=IMAGES, length=lengths)
    y = write(tmp_path / "y.h5", vectors=VECTORS, step=np.arange(N), done=np.isin(np.arange(N), [9, 23, 39]))
    fields = ["images", "vectors"]
    for options in ({"episode_lengths": "length"}, {"episode_ends": "done"}, {"episode_lengths": lengths}):
        windows = h5chunk.Windows({"images": x, "vectors": y}, fields, 4, **options)
        starts = windows.values("step")
        assert starts.tolist() == [at for at in range(N) if at + 3 < 10 or 10 <= at < 21 or 24 <= at < 37]
        with h5chunk.ChunkLoader(windows, 8) as loader:
            batches = [tuple(field.clone() for field in batch) for batch in loader]
        for images, vectors in (windows[range(len(windows))], *batches):
            found = [int((image.numpy() == IMAGES).all((1, 2)).argmax()) for image in images[:, 0]]
            assert all((IMAGES[at : at + 4] == own.numpy()).all() for at, own in zip(found, images, strict=True))
            assert all((VECTORS[at : at + 4] == own.numpy()).all() for at, own in zip(found, vectors, strict=True))
    for number in range(3):
        write(tmp_path / f"a{number}.h5", images=IMAGES[number * 10 : number * 10 + 10])
        write(tmp_path / f"b{number}.h5", vectors=VECTORS[number * 10 : number * 10 + 10])
    paths = {"images": str(tmp_path / "a*.h5"), "vectors": str(tmp_path / "b*.h5")}
    assert len(h5chunk.Windows(paths, fields, 4)) == 21
    for given, options, error, text in (
        ({**paths, "vectors": y}, {}, FieldError, "differ in length .* 40 samples"),
        ({"images": x, "vectors": y}, {"constants": ["vectors"]}, OptionError, "pass a path for all fields"),
        ({"images": paths["images"], "vectors": [str(tmp_path / "b.h5")]}, {}, FieldError, "each file is an episode"),
    ):
        write(tmp_path / "b.h5", vectors=VECTORS[:30])
        with pytest.raises(error, match=text):
            h5chunk.Windows(given, fields, 4, **options)


def test_windows_of_several_files_unpack_their_numbers(tmp_path: Path) -> None:
    for name in "xy":
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file[name] = np.arange(10, dtype=np.int16)
            file[name].attrs["scale_factor"] = np.float32(0.5)
    paths = {name: tmp_path / f"{name}.h5" for name in "xy"}
    windows = h5chunk.Windows(paths, ["x", "y"], 4, decode="cf")
    for values in windows[2]:
        assert values.tolist() == [1.0, 1.5, 2.0, 2.5]


def test_a_folder_that_lacks_a_shard_is_refused_by_all_data_sets(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a-00000-of-00002.h5", "w") as file:
        file["s/x"] = np.zeros((8, 8))
    for open_folder in (
        lambda: h5chunk.ChunkDataset(tmp_path, fields=["s/x"]),
        lambda: h5chunk.Windows(tmp_path, {"x": "s/x"}, 2),
        lambda: h5chunk.Patches(tmp_path, {"x": "s/x"}, (4, 4)),
        lambda: h5chunk.Keyed(tmp_path, "*/x"),
    ):
        with pytest.raises(h5chunk.FileError, match=r"a-00001-of-00002\.h5 is missing"):
            open_folder()
