"""Patches of volumes: values, halos, weights, order, resuming, tiles and errors, with every way of reading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.loaders import loader_by
from torch.utils.data import ConcatDataset, DataLoader

import h5chunk
from h5chunk.errors import FileError, OptionError
from h5chunk.plan.patches import chunk_cost
from h5chunk.transforms import Normalize, RandomHorizontalFlip

LAYOUTS = {
    "contiguous": {},
    "chunked": {"chunks": (8, 9, 10)},
    "gzip": {"chunks": (8, 9, 10), "compression": "gzip"},
    "big-endian": {"dtype": ">u2"},
}
SHAPES = {"a": (30, 22, 41), "b10": (16, 33, 20), "b9": (13, 14, 15)}  # b9 comes before b10
SIZE = (6, 11, 8)
FIELDS = {"raw": "*/raw", "label": "*/label"}


def _volume(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 60000, shape).astype(np.uint16)


VOLUMES = [_volume(SHAPES[name], number) for number, name in enumerate(("a", "b9", "b10"))]


def _write(path: Path, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in zip(("a", "b9", "b10"), VOLUMES, strict=True):
            file.create_dataset(f"{name}/raw", data=values, **options)
            file.create_dataset(f"{name}/label", data=(values > 50000).astype(np.uint8))
    return path


@pytest.fixture(params=LAYOUTS)
def path(request, tmp_path):
    return _write(tmp_path / "volumes.h5", **LAYOUTS[request.param])


@pytest.fixture
def plain(tmp_path):
    return _write(tmp_path / "volumes.h5")


def _cut(values: np.ndarray, start: list[int], size: tuple[int, ...], halo: int = 0, **how: Any) -> np.ndarray:
    """Cut a patch out of a volume, padded by NumPy."""
    most = 40
    if how:
        values = np.pad(values, most, **how)
        start = [at + most for at in start]
    return values[tuple(slice(at - halo, at + length + halo) for at, length in zip(start, size, strict=True))]


def _check(batch: Any, cut: Callable[[int, list[int]], np.ndarray]) -> None:
    raw, label, positions = batch
    for patch, mask, (volume, *start) in zip(raw.numpy(), label.numpy(), positions.tolist(), strict=True):
        assert np.array_equal(patch, cut(volume, start))
        assert np.array_equal(mask, patch > 50000)


def _cut_plain(volume: int, start: list[int]) -> np.ndarray:
    return _cut(VOLUMES[volume], start, SIZE)


def _epochs(loader: Any, count: int = 1) -> list[list[torch.Tensor]]:
    return [[field.clone() for field in batch] for _ in range(count) for batch in loader]


def _same(first: Any, second: Any) -> bool:
    return len(first) == len(second) and all(
        torch.equal(left, right)
        for one, other in zip(first, second, strict=True)
        for left, right in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("shape", [(30, 200, 210), (2, 1100, 1000), (2, 2, 90, 1600, 2)], ids=str)
def test_contiguous_volumes_are_read_in_blocks(tmp_path, shape):
    values = np.random.default_rng(0).random(shape, np.float32)
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["raw"] = values
    size, before = ((2, 40, 30), ()) if len(shape) == 3 else ((50, 70, 2), (slice(None),) * 2)
    channels = "first" if before else None
    patches = h5chunk.Patches(tmp_path / "v.h5", {"raw": "raw"}, size, channels=channels, positions=True, per_volume=60)
    starts = set()
    with h5chunk.ChunkLoader(patches, 16) as loader:
        for raw, positions in loader:
            for patch, (_, *start) in zip(raw.numpy(), positions.tolist(), strict=True):
                starts.add(tuple(start))
                box = tuple(slice(first, first + length) for first, length in zip(start, size, strict=True))
                assert np.array_equal(patch, values[(*before, *box)])
    assert len(starts) == 60


def test_each_epoch_has_other_patches_as_many_of_each_volume(plain):
    patches = h5chunk.Patches(plain, FIELDS, SIZE, per_volume=20, positions=True)
    with h5chunk.ChunkLoader(patches, 8) as loader:
        epochs = [torch.cat([batch[2] for batch in loader]) for _ in range(2)]
    for number, positions in enumerate(epochs):
        assert torch.bincount(positions[:, 0]).tolist() == [20, 20, 20]
        assert {*map(tuple, positions.tolist())} == {*map(tuple, patches.positions(number).tolist())}
    assert len(torch.cat(epochs).unique(dim=0)) > 100


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_a_plain_dataloader_has_other_patches_in_each_epoch(plain, num_workers, persistent):
    """Also if it reads one patch at a time, through another data set."""
    patches = h5chunk.Patches(plain, FIELDS, SIZE, per_volume=20, positions=True)
    how = {"num_workers": num_workers, "persistent_workers": persistent}
    for dataset in (patches, ConcatDataset([patches])):
        loader = DataLoader(dataset, batch_size=8, **how)
        torch.manual_seed(5)
        epochs = [torch.cat([batch[2] for batch in loader]) for _ in range(3)]
        assert not epochs[0].equal(epochs[1]) and not epochs[1].equal(epochs[2])
        assert all(torch.bincount(each[:, 0]).tolist() == [20, 20, 20] for each in epochs)
        _check(next(iter(loader)), _cut_plain)
    torch.manual_seed(5)
    first = patches[3][2]
    torch.manual_seed(5)
    assert patches[3][2].equal(first)


def test_resuming_and_ranks(plain):
    patches = h5chunk.Patches(plain, FIELDS, SIZE, positions=True)
    whole = h5chunk.ChunkLoader(patches, 8)
    batches = _epochs(whole, 2)
    resumed = h5chunk.ChunkLoader(h5chunk.Patches(plain, FIELDS, SIZE, positions=True), 8)
    state = h5chunk.ChunkSampler(patches, 8).state_dict(3)
    state["epoch"] = 1
    resumed.load_state_dict(state)
    assert _same(_epochs(resumed), batches[len(whole) + 3 :])
    ranks = [h5chunk.ChunkSampler(patches, 4, lanes=2, rank=rank, world_size=2) for rank in range(2)]
    together = [_epochs(h5chunk.ChunkLoader(patches, batch_sampler=sampler)) for sampler in ranks]
    alone = _epochs(h5chunk.ChunkLoader(patches, batch_sampler=h5chunk.ChunkSampler(patches, 8, lanes=2)))
    for left, right, both in zip(*together, alone, strict=True):
        own = torch.cat([left[2], right[2]]).tolist()
        assert sorted(own) == sorted(both[2].tolist())
    other = h5chunk.Patches(plain, FIELDS, SIZE, seed=1, positions=True)
    with pytest.raises(h5chunk.StateError, match="another file"):
        h5chunk.ChunkLoader(other, 8).load_state_dict(state)


def test_a_split_divides_volumes(plain):
    patches = h5chunk.Patches(plain, FIELDS, SIZE, positions=True)
    train, test = patches.split((2 / 3, 1 / 3))
    own = [{*part[list(range(len(part)))][2][:, 0].tolist()} for part in (train, test)]
    assert sorted(map(len, own)) == [1, 2] and not own[0] & own[1]
    with h5chunk.ChunkLoader(train, 5) as loader:
        for batch in _epochs(loader, 2):
            _check(batch, _cut_plain)
            assert {*batch[2][:, 0].tolist()} <= own[0]


@pytest.mark.parametrize("padding", ["edge", "reflect", 7])
@pytest.mark.parametrize("layout", ["contiguous", "gzip"])
def test_halos_are_padded_as_numpy_does(tmp_path, layout, padding):
    path = _write(tmp_path / "volumes.h5", **LAYOUTS[layout])
    size, halo = (14, 20, 12), {"raw": 5}  # larger than one of the volumes
    how: dict[str, Any] = {"mode": padding} if isinstance(padding, str) else {"mode": "constant", "constant_values": 7}
    patches = h5chunk.Patches(path, FIELDS, size, halo=halo, padding=padding, positions=True, per_volume=9)
    with h5chunk.ChunkLoader(patches, 6) as loader:
        batches = _epochs(loader)
    batches.append([field[None] for field in patches[9]])
    assert {*torch.cat([batch[2] for batch in batches])[:, 0].tolist()} == {0, 1, 2}
    for raw, _, positions in batches:
        for patch, (volume, *start) in zip(raw.numpy(), positions.tolist(), strict=True):
            assert np.array_equal(patch, _cut(VOLUMES[volume], start, size, 5, **how))


def test_without_padding_halos_stay_inside(plain):
    patches = h5chunk.Patches(plain, {"raw": "a/raw"}, SIZE, halo=(2, 3, 4), positions=True)
    positions = torch.from_numpy(patches.positions(3))
    room = np.array(SHAPES["a"]) - SIZE
    assert (positions[:, 1:].numpy() >= (2, 3, 4)).all() and (positions[:, 1:].numpy() <= room - (2, 3, 4)).all()
    assert patches[0][0].shape == (10, 17, 16)


@pytest.mark.parametrize(
    ("shape", "size", "channels", "expected"),
    [
        ((40, 30), (8, 6), None, (8, 6)),
        ((3, 40, 30), (8, 6), "first", (3, 8, 6)),
        ((40, 30, 3), (8, 6), "last", (8, 6, 3)),
        ((2, 3, 12, 40, 30), (4, 8, 6), "first", (2, 3, 4, 8, 6)),
        ((5, 12, 40, 30), (2, 4, 8, 6), None, (2, 4, 8, 6)),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_axes_beyond_space_are_read_whole(tmp_path, shape, size, channels, expected, chunked):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    chunks = tuple(max(2, length // 3) for length in shape) if chunked else None
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("raw", data=values, chunks=chunks, compression="gzip" if chunked else None)
    patches = h5chunk.Patches(tmp_path / "v.h5", {"raw": "raw"}, size, channels=channels, positions=True)
    with h5chunk.ChunkLoader(patches, 4) as loader:
        for raw, positions in loader:
            assert tuple(raw.shape[1:]) == expected
            for patch, (_, *start) in zip(raw.numpy(), positions.tolist(), strict=True):
                where = tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))
                where = (..., *where) if channels != "last" else where
                assert np.array_equal(patch, values[where])


def test_several_files(tmp_path):
    for number, values in enumerate(VOLUMES):
        with h5py.File(tmp_path / f"v{number}.h5", "w") as file:
            file.create_dataset("raw", data=values, chunks=(8, 9, 10), compression="gzip" if number else None)
            file["label"] = (values > 50000).astype(np.uint8)
    patches = h5chunk.Patches(tmp_path / "v*.h5", {"raw": "raw", "label": "label"}, SIZE, positions=True)
    with h5chunk.ChunkLoader(patches, 8) as loader:
        batches = _epochs(loader)
    assert sum(len(batch[0]) for batch in batches) == len(patches)
    for batch in batches:
        _check(batch, _cut_plain)
    loader = DataLoader(patches, batch_sampler=h5chunk.ChunkSampler(patches, 8), num_workers=1)
    assert _same(batches, _epochs(loader))


def test_weights_place_centres(plain):
    patches = h5chunk.Patches(plain, FIELDS, SIZE, weights={"label": lambda label: label}, share=1)
    with h5chunk.ChunkLoader(patches, len(patches), shuffle=False) as loader:
        (batch,) = loader
    assert all(batch[1][number][3, 5, 4] for number in range(len(patches)) if _is_inside(patches, number))
    anywhere = h5chunk.Patches(plain, FIELDS, SIZE, weights="label", share=0)
    assert not all(anywhere[number][1][3, 5, 4] for number in range(len(anywhere)))
    assert anywhere.fingerprint != patches.fingerprint
    with pytest.warns(UserWarning, match="in 3 of 3 volumes, .*no weights are above 0"):
        h5chunk.Patches(plain, FIELDS, SIZE, weights={"label": lambda label: label * 0})
    with pytest.raises(h5chunk.OptionError, match="a finite weight of at least 0"):
        h5chunk.Patches(plain, FIELDS, SIZE, weights={"label": lambda label: label - 1.0})


def _is_inside(patches: h5chunk.Patches, number: int) -> bool:
    """Whether a patch touches no border, so that it was not moved."""
    volume, *start = patches.positions()[number].tolist()
    room = np.array(patches.volumes[volume][1]) - SIZE
    return bool((np.array(start) > 0).all() and (start < room).all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fields": {"raw": "*/raw", "label": "*/missing"}}, "no dataset matches"),
        ({"fields": {"raw": "**/raw"}}, "one \\* in a name"),
        ({"fields": {"raw": "*/*/raw"}}, "no dataset matches"),
        ({"fields": {"raw": "*"}}, "name a dataset in it"),
        ({"fields": {}}, "or a mapping of names"),
        ({"size": (6, 11, 80)}, "padding='reflect'"),
        ({"size": (6, 0, 8)}, "size"),
        ({"size": 6}, "pass 1 to 4 numbers"),
        ({"size": (6, 11, 8, 2)}, "has 3 axes, but size has 4"),
        ({"size": (6, 8)}, "channels='first'"),
        ({"per_volume": 0}, "per_volume"),
        ({"padding": "wrap"}, "padding"),
        ({"padding": -1}, "cannot hold"),
        ({"padding": 10**30}, "cannot hold"),
        ({"padding": float("nan")}, "cannot hold"),
        ({"padding": np.zeros(2)}, "padding"),
        ({"halo": (1, 2)}, "halo"),
        ({"weights": {"label": 3}}, "function"),
        ({"weights": {"label": lambda label: np.full(label.shape, 1e308)}}, "a finite weight"),
        ({"share": 2}, "share"),
    ],
)
def test_errors(plain, changes: Mapping[str, Any], message):
    arguments = {"fields": FIELDS, "size": SIZE, **changes}
    with pytest.raises(h5chunk.H5ChunkError, match=message):
        h5chunk.Patches(plain, **arguments)


def test_padding_with_nan_and_a_field_that_is_named_position(tmp_path):
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["raw"] = np.ones((4, 10), np.float32)
    for padding in (np.nan, 0.1):
        patch = h5chunk.Patches(tmp_path / "v.h5", {"raw": "raw"}, (4, 10), halo=1, padding=padding)[0][0].numpy()
        assert patch[1:-1, 1:-1].sum() == 40
        assert np.array_equal(patch[0], np.full(12, padding, np.float32), equal_nan=True)
    with pytest.raises(h5chunk.OptionError, match="rename it"):
        h5chunk.Patches(tmp_path / "v.h5", {"position": "raw"}, (4, 6)).tiles()


def test_fields_of_a_volume_must_have_the_same_voxels(plain):
    with h5py.File(plain, "a") as file:
        del file["a/label"]
        file["a/label"] = np.zeros((30, 22, 40), np.uint8)
    with pytest.raises(h5chunk.FieldError, match="both must be equal"):
        h5chunk.Patches(plain, FIELDS, SIZE)


def test_a_changed_file_is_an_error(path):
    patches = h5chunk.Patches(path, FIELDS, SIZE)
    with h5py.File(path, "a") as file:
        file["more"] = np.zeros(3)
    with pytest.raises(h5chunk.FileError, match="changed"):
        patches[0]


TILES = {"size": (10, 12, 9), "overlap": (3, 0, 5)}


@pytest.mark.parametrize("blend", ["gaussian", "linear", "uniform"])
@pytest.mark.parametrize("dtype", ["u2", "i8", "f2", "f4", "f8"])
def test_stitching_gives_the_volumes_back(tmp_path, dtype, blend):
    volumes = [(values.astype(np.float64) - 30000).astype(dtype) for values in VOLUMES]
    if dtype == "u2":
        volumes = VOLUMES
    with h5py.File(tmp_path / "v.h5", "w") as file:
        for number, values in enumerate(volumes):
            file.create_dataset(f"{number}/raw", data=values, chunks=(7, 8, 9), compression="gzip")
    tiles = h5chunk.Patches(tmp_path / "v.h5", {"raw": "*/raw"}, TILES["size"]).tiles(TILES["overlap"])
    stitcher = h5chunk.Stitcher(tiles, blend=blend)
    for raw, position in h5chunk.ChunkLoader(tiles, 5, shuffle=False):
        stitcher.add(raw, position)
    for found, expected in zip(stitcher.result(), volumes, strict=True):
        assert found.dtype == expected.dtype and np.array_equal(found, expected)


@pytest.mark.parametrize("channels", ["first", "last"])
def test_stitching_to_hdf5_with_channels_halo_and_small_volumes(plain, tmp_path, channels):
    size = (15, 12, 21)  # larger than a volume
    tiles = h5chunk.Patches(plain, {"raw": "*/raw"}, size, halo=2, padding="edge").tiles(4)
    axis = 1 if channels == "first" else -1
    with h5py.File(tmp_path / "out.h5", "w") as file:
        stitcher = h5chunk.Stitcher(
            tiles, channels=channels, out=lambda name, *how: file.create_dataset(f"seen/{name.split()[-1]}", *how)
        )
        for raw, position in DataLoader(tiles, batch_size=3, collate_fn=h5chunk.collate):
            raw = raw.numpy().astype(np.float32)
            stitcher.add(torch.from_numpy(np.stack([raw, -raw], axis)), position)
        assert len(stitcher.result()) == 3
        for name, values in zip(("a", "b9", "b10"), VOLUMES, strict=True):
            found, both = file[f"seen/{name}"], values.astype(np.float32)
            assert np.array_equal(found, np.stack([both, -both], 0 if channels == "first" else -1))


def test_blending_is_a_weighted_mean(tmp_path):
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["raw"] = np.zeros((4, 10), np.float32)
    tiles = h5chunk.Patches(tmp_path / "v.h5", {"raw": "raw"}, (4, 6)).tiles((0, 2))
    stitcher = h5chunk.Stitcher(tiles, blend="linear")
    for value, position in enumerate(tiles.positions()):
        stitcher.add(np.full((1, 4, 6), value, np.float32), position[None])
    assert np.allclose(stitcher.result()[0][0], [0, 0, 0, 0, 1 / 3, 2 / 3, 1, 1, 1, 1])


def _stitched(path, tile_of, overlap=(0, 2)):
    """Stitch the tiles that a function returns, given their number, and return the only volume."""
    with h5py.File(path, "w") as file:
        file["raw"] = np.zeros((4, 10), np.float32)
    tiles = h5chunk.Patches(path, {"raw": "raw"}, (4, 6)).tiles(overlap)
    stitcher = h5chunk.Stitcher(tiles, blend="linear")
    for number, position in enumerate(tiles.positions()):
        stitcher.add(tile_of(number), position[None])
    return stitcher.result()[0]


def test_stitching_infinities_complex_numbers_and_tensors_that_numpy_lacks(tmp_path):
    path, inf = tmp_path / "v.h5", np.inf
    equal = _stitched(path, lambda _: np.full((1, 4, 6), -inf, np.float32))
    assert (equal == -inf).all()
    mixed = _stitched(path, lambda number: np.full((1, 4, 6), [1.0, inf][number]))
    assert mixed[0].tolist() == [1, 1, 1, 1, inf, inf, inf, inf, inf, inf]
    large = _stitched(path, lambda number: np.full((1, 4, 6), [3e38, -3e38][number], np.float32))
    assert np.isfinite(large).all() and np.allclose(large[0, 4:6], [1e38, -1e38])
    assert np.array_equal(_stitched(path, lambda _: np.full((1, 4, 6), 1 + 2j)), np.full((4, 10), 1 + 2j))
    halves = _stitched(path, lambda number: torch.full((1, 4, 6), number, dtype=torch.bfloat16))
    assert halves.dtype == np.float32 and np.allclose(halves[0], [0, 0, 0, 0, 1 / 3, 2 / 3, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (np.full((1, 4, 6), 2**53 + 1), "beyond 2"),
        (np.full((1, 4, 6), "a"), "pass numbers"),
        (np.zeros((1, 6)), "its spatial shape must be"),
    ],
)
def test_tiles_that_cannot_be_stitched(tmp_path, tile, message):
    with pytest.raises(h5chunk.OptionError, match=message):
        _stitched(tmp_path / "v.h5", lambda _: tile)


def test_tiles_cover_all_and_errors_of_stitching(plain):
    patches = h5chunk.Patches(plain, FIELDS, SIZE)
    tiles = patches.tiles(2)
    used = [np.zeros(shape, int) for _, shape in tiles.volumes]
    for volume, *start in tiles.positions().tolist():
        used[volume][tuple(slice(at, at + size) for at, size in zip(start, SIZE, strict=True))] += 1
    assert all((each > 0).all() for each in used)
    assert np.array_equal(tiles.positions(0), tiles.positions(9))
    stitcher = h5chunk.Stitcher(tiles)
    raw, _, position = tiles[[0, 1, 2]]
    with pytest.raises(h5chunk.OptionError, match="in the order of"):
        stitcher.add(raw[1:], position[1:])
    stitcher.add(raw, position)
    with pytest.raises(h5chunk.OptionError, match="only 3 of"):
        stitcher.result()
    with pytest.raises(h5chunk.OptionError, match="its spatial shape must be"):
        stitcher.add(raw[:1, 1:], tiles[[3]][2])
    with pytest.raises(h5chunk.OptionError, match=r"Patches\.tiles"):
        h5chunk.Stitcher(patches)
    with pytest.raises(h5chunk.OptionError, match="less than the size"):
        patches.tiles(8)
    with pytest.raises(h5chunk.OptionError, match="padding"):
        h5chunk.Patches(plain, FIELDS, SIZE, halo=1).tiles()


def test_tune_recommends_chunks(tmp_path):
    with h5py.File(tmp_path / "v.h5", "w") as file:
        values = np.zeros((48, 256, 256), np.float32)
        file.create_dataset("a/raw", data=values, chunks=(1, 256, 256), compression="gzip")
        file["a/label"], file["b/raw"] = np.zeros((48, 40, 40), np.uint8), values[:, :40, :40]
        file["a/mask"], file["b/mask"] = values > 0, values[:, :40, :40] > 0
        file["small"] = np.zeros((9, 20, 20), np.uint8)
    found = h5chunk.tune(tmp_path / "v.h5", patch=(16, 32, 32))
    advice = {each.dataset: each for each in found.advice}
    raw, label = advice["a/raw"], advice["a/label"]
    assert raw.alone == pytest.approx(256 * 256 / 32**2) and (label.alone, label.together) == (1, 1)
    assert raw.best_alone < 10 and "small" not in advice
    assert f"--chunks {','.join(map(str, raw.best))} --compression gzip" in str(found)
    space = {}
    exec("\n".join(found.code), space)
    assert [tuple(each.shape) for each in space["data"][0]] == [(16, 32, 32)] * 2
    (tmp_path / "found.json").write_text(found.to_json())
    h5chunk.repack(tmp_path / "v.h5", tmp_path / "new.h5", tuned=tmp_path / "found.json")
    with h5py.File(tmp_path / "new.h5") as file:
        assert file["a/raw"].chunks == raw.best and file["a/raw"].compression == "gzip"
    with h5py.File(tmp_path / "good.h5", "w") as file:
        file.create_dataset("raw", data=values, chunks=raw.best, compression="gzip")
    (tmp_path / "kept.json").write_text(h5chunk.tune(tmp_path / "good.h5", patch=(16, 32, 32)).to_json())
    with pytest.raises(h5chunk.OptionError, match="recommends keeping the chunks of the file"):
        h5chunk.repack(tmp_path / "good.h5", tmp_path / "newer.h5", tuned=tmp_path / "kept.json")
    with pytest.raises(h5chunk.OptionError, match="chunks of parts of samples, which only repack writes"):
        h5chunk.convert({"x": np.zeros(5)}, tmp_path / "x.h5", tuned=tmp_path / "found.json")
    with pytest.raises(h5chunk.FileError, match="one file"):
        h5chunk.tune(tmp_path, patch=(8, 8, 8))


def test_repack_makes_chunks_of_any_shape(tmp_path):
    values = _volume((70, 90, 50), 0)
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("a/raw", data=values, chunks=(1, 90, 50), compression="gzip")
        file["a/label"], file["names"] = (values > 50000).astype(np.uint8), np.arange(70)
    for compression in (None, "gzip", "lzf"):
        chunks = (16, 32, 24)
        h5chunk.repack(tmp_path / "v.h5", tmp_path / "new.h5", chunks=chunks, compression=compression, overwrite=True)
        with h5py.File(tmp_path / "new.h5") as file:
            assert file["a/raw"].chunks == chunks and file["a/raw"].compression == compression
            assert np.array_equal(file["a/raw"][()], values) and file["names"].chunks is None
            assert np.array_equal(file["a/label"][()], values > 50000)
        h5chunk.Patches(tmp_path / "new.h5", FIELDS, (8, 8, 8))[3]
    with pytest.raises(h5chunk.OptionError, match="divides samples"):
        h5chunk.repack(tmp_path / "v.h5", tmp_path / "other.h5", chunks=(8, 8, 8), shuffle=True)
    with pytest.raises(h5chunk.OptionError, match="no field has 2 axes"):
        h5chunk.repack(tmp_path / "v.h5", tmp_path / "other.h5", chunks=(8, 8))
    with pytest.raises(h5chunk.OptionError, match="pass the shape of a patch"):
        h5chunk.tune(tmp_path / "v.h5", patch=8)


def test_the_model_of_bytes_is_what_is_read(tmp_path):
    values = np.zeros((96, 80, 64), np.float32)
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("raw", data=values, chunks=(16, 16, 16), compression="gzip")
    cost = chunk_cost(values.shape, (16, 12, 20), (16, 16, 16), 4)
    patches = h5chunk.Patches(tmp_path / "v.h5", {"raw": "raw"}, (16, 12, 20), per_volume=400)
    alone = patches.amplification(h5chunk.ChunkSampler(patches, 1, window_chunks=1).order)
    assert alone < cost.alone
    singles = [patches.subset([number]) for number in range(0, 400, 2)]
    read = [each.amplification(h5chunk.ChunkSampler(each, 1).order) for each in singles]
    assert np.mean(read) == pytest.approx(cost.alone, rel=0.05)
    small = h5chunk.Patches(tmp_path / "v.h5", {"raw": "raw"}, (16, 12, 20), per_volume=400, cell_bytes=1)
    assert small.amplification(h5chunk.ChunkSampler(small, 4, window_chunks=1).order) > 1.5 * alone


@pytest.mark.parametrize("position", ["first", "last"])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_channels_are_normalised_where_they_are_and_have_no_stored_statistics(tmp_path, position, axes):
    values = np.random.default_rng(0).random((2, *(9, 8, 7)[:axes])).astype(np.float32)
    stored = np.moveaxis(values, 0, -1) if position == "last" else values
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file["raw"] = stored
    patches = h5chunk.Patches(tmp_path / "v.h5", {"raw": "raw"}, (4,) * axes, channels=position, per_volume=3)
    normalize = Normalize((0.5, 2.0), (0.5, 4.0))
    ((plain,),) = h5chunk.ChunkLoader(patches, 3, shuffle=False)
    ((found,),) = h5chunk.ChunkLoader(patches, 3, shuffle=False, transforms=[normalize])
    plain, found = (np.moveaxis(each.numpy(), 1 if position == "first" else -1, -1) for each in (plain, found))
    np.testing.assert_allclose(found, (plain - (0.5, 2.0)) / (0.5, 4.0), rtol=1e-5, atol=1e-6)
    with pytest.raises(h5chunk.FieldError, match=r"has channels.*compute their mean and standard deviation"):
        patches.statistics("raw")


@pytest.mark.parametrize("codec", ["none", "gzip"])
@pytest.mark.parametrize("reader", ["auto", "h5py"])
def test_patches_are_compared_with_checksums(tmp_path: Path, codec: str, reader: str) -> None:
    images, path = np.random.default_rng(0).integers(0, 255, (24, 12, 12), np.uint8), tmp_path / "a.h5"
    h5chunk.convert({"images": images}, tmp_path / "plain.h5", chunk_samples=4)
    h5chunk.repack(tmp_path / "plain.h5", path, chunk_samples=4, **({} if codec == "none" else {"compression": codec}))
    with h5py.File(path) as file:
        stored, chunk = file["images"][()], file["images"].id.get_chunk_info(0)
    for checksums in ("first", "always"):
        patches = h5chunk.Patches(path, {"x": "images"}, (6, 6, 6), positions=True, checksums=checksums)
        for batch, positions in loader_by(patches, 4, reader=reader):
            for patch, (_, z, y, x) in zip(batch.numpy(), positions.tolist(), strict=True):
                np.testing.assert_array_equal(patch, stored[z : z + 6, y : y + 6, x : x + 6])
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset + chunk.size - 1] ^= 1
    path.write_bytes(content)
    patches = h5chunk.Patches(path, {"x": "images"}, (6, 6, 6), checksums="first", per_volume=64)
    with pytest.raises(FileError, match="does not match its checksum"):
        list(loader_by(patches, 4, reader=reader))


def test_patches_of_a_file_without_checksums(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros((9, 9), np.uint8)
    with pytest.raises(OptionError, match="has no checksums of 'x'"):
        h5chunk.Patches(tmp_path / "a.h5", {"x": "x"}, (3, 3), checksums="first")


def test_patches_are_numbered_named_and_transformed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, name in enumerate("ab"):
            file[f"{name}/photo"] = np.full((20, 30 + number, 3), 50 * number + 50, np.uint8)
    fields = {"photo": "*/photo", "n": "sample_number"}
    normalize = Normalize((0.5, 0.25, 0), (0.5, 1, 2))
    with h5chunk.Patches(
        tmp_path / "a.h5", fields, (8, 8), channels="last", per_volume=5, transforms=[normalize]
    ) as patches:
        sampler = h5chunk.ChunkSampler(patches, 4, seed=3)
        for epoch in (0, 1, 5):
            sampler.set_epoch(epoch)
            batches = list(DataLoader(patches, batch_sampler=sampler))
            assert sorted(torch.cat([numbers for _, numbers in batches]).tolist()) == [*range(10)]
            for photos, numbers in batches:
                stored = torch.tensor([50, 100])[numbers // 5].float()[:, None, None, None].expand(-1, 8, 8, 3) / 255
                expected = (stored - torch.tensor([0.5, 0.25, 0])) / torch.tensor([0.5, 1, 2])
                torch.testing.assert_close(photos, expected)
        some = patches.subset([4, 6, 7])
        assert [name.rpartition(": ")[2] for name in some.source_names] == ["a", "b", "b"]
        assert some.values("n").tolist() == [0, 1, 2] and some.groups.tolist() == [0, 1, 1]
        with pytest.raises(OptionError, match="split by volume: leave stratify out"):
            patches.split((0.5, 0.5), stratify="n")
        batch, numbers = next(iter(h5chunk.ChunkLoader(patches.with_transforms([RandomHorizontalFlip(1)]), 10)))
        assert batch.shape == (10, 8, 8, 3) and (batch[:, 0, 0, 0] == torch.tensor([50, 100])[numbers // 5]).all()
