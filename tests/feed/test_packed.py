"""Numbers that are packed as in netCDF, with ``decode="cf"``: all kinds of samples have the values of the CF rule."""

import h5py
import numpy as np
import pytest
import torch

import h5chunk
from h5chunk.errors import FieldError, OptionError

pytestmark = pytest.mark.filterwarnings("ignore:.*is read through h5py")
N = 12
LAYOUTS = {
    "contiguous": {},
    "chunked": {"chunks": (5, 3, 4)},
    "gzip": {"chunks": (5, 3, 4), "compression": "gzip", "shuffle": True},
    "szip": {"chunks": (5, 3, 4), "compression": "szip"},
}
PACKED = {
    "era5": ("<i2", "f4", {"scale_factor": 0.25, "add_offset": 250.0, "_FillValue": np.int16(-7), "missing_value": -7}),
    "big": (">i2", "f4", {"scale_factor": np.float32(0.5), "_FillValue": np.array([-3, 4], "i2")}),
    "wide": ("<i4", "f8", {"scale_factor": 0.001, "add_offset": -3.5}),
    "single": ("<i4", "f4", {"scale_factor": np.float32(0.5)}),
    "bytes": ("i1", "f4", {"scale_factor": [2.0], "_Unsigned": np.bytes_("true"), "_FillValue": np.int8(-7)}),
    "unsigned": ("<i2", "u2", {"_Unsigned": "true"}),
    "filled": ("<f4", "f4", {"_FillValue": np.float32(6)}),
    "limited": ("<f8", "f8", {"valid_range": np.array([-5.0, 5.0])}),
    "least": ("u1", "f4", {"valid_min": np.uint8(2), "missing_value": -9999.0}),
    "nan": ("<f4", "f4", {"_FillValue": np.float32(np.nan)}),
    "plain": ("<i2", "i2", {"units": "K"}),
}


def numbers(dtype, seed):
    values = np.random.default_rng(seed).integers(-9, 9, (N, 6, 7))
    return (values % 9 if dtype == "u1" else values).astype(dtype)


def put(group, name, seed, layout, **changed):
    dtype, _, attributes = PACKED[name]
    dataset = group.create_dataset(name, data=numbers(dtype, seed), **LAYOUTS[layout])
    dataset.attrs.update({**attributes, **changed})


def unpacked(dataset):
    """The values of a dataset by the rule of CF 8.1 and 2.5.1, computed from what plain h5py reads."""
    dtype, attributes = PACKED[dataset.name.rpartition("/")[2]][1], dict(dataset.attrs)
    stored = dataset[()].astype(dataset.dtype.newbyteorder("="))
    stored = stored.view(f"u{stored.itemsize}") if "_Unsigned" in attributes else stored
    scale, offset = (float(np.ravel(attributes.get(*each))[0]) for each in (("scale_factor", 1), ("add_offset", 0)))
    values = (stored * np.float64(scale) + offset).astype(dtype)
    marks = np.r_[np.ravel(attributes.get("_FillValue", [])), np.ravel(attributes.get("missing_value", []))]
    if "_Unsigned" in attributes:
        marks = marks.astype(np.int64) % (1 << 8 * stored.itemsize)
    low, high = attributes.get("valid_range", (attributes.get("valid_min", -np.inf), np.inf))
    missing = np.isin(stored, marks) | (stored < low) | (stored > high)
    if missing.any():
        values[missing] = np.nan
    return values


def same(found, expected):
    assert found.numpy().dtype == expected.dtype
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_windows_patches_and_groups(tmp_path, layout):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for seed, name in enumerate(PACKED):
            put(file, name, seed, layout)
        for number in range(4):
            group = file.create_group(f"g/{number}")
            for name in PACKED:
                changed = {"scale_factor": number + 0.5} if name == "era5" else {}
                put(group, name, number, layout, **changed)
    path = tmp_path / "a.h5"
    with h5py.File(path) as file:
        rows = {name: unpacked(file[name]) for name in PACKED}
        groups = [{name: unpacked(file[f"g/{number}/{name}"]) for name in PACKED} for number in range(4)]
    rows["nan"] = rows["nan"].astype("f4")
    names = list(PACKED)
    dataset = h5chunk.ChunkDataset(path, fields=names, decode="cf")
    with h5chunk.ChunkLoader(dataset, N, shuffle=False) as loader:
        for batch in (dataset[list(range(N))], next(iter(loader))):
            for name, values in zip(names, batch, strict=True):
                same(values, rows[name])
    windows = h5chunk.Windows(path, {name: f"g/*/{name}" for name in names}, 3, decode="cf")
    keyed = h5chunk.Keyed(path, [f"g/*/{name}" for name in names], decode="cf")
    patches = h5chunk.Patches(path, {name: f"g/*/{name}" for name in names}, (3, 2, 4), decode="cf", positions=True)
    for number, own in enumerate(groups):
        for name, values in zip(names, windows[number * 10 + 4], strict=True):
            same(values, own[name][4:7])
        for name, values in zip(names, keyed[number], strict=True):
            same(values, own[name])
    with h5chunk.ChunkLoader(patches, 4) as loader:
        for *batch, positions in loader:
            for name, values in zip(names, batch, strict=True):
                for patch, (volume, z, y, x) in zip(values, positions.tolist(), strict=True):
                    same(patch, groups[volume][name][z : z + 3, y : y + 2, x : x + 4])
    raw = h5chunk.ChunkDataset(path, fields=["era5"])[3][0]
    assert raw.dtype == torch.int16
    again = h5chunk.Keyed(path, [f"g/*/{name}" for name in names])  # another index than that of decoded values
    assert again[1][0].dtype == torch.int16


def test_files_that_are_packed_in_different_ways(tmp_path):
    for number in range(3):
        with h5py.File(tmp_path / f"{number}.nc", "w") as file:
            put(file, "era5", number, "gzip", scale_factor=0.5 + number, add_offset=float(number))
            file["time"] = np.arange(N, dtype="i4") + N * number
            file["time"].attrs["add_offset"] = 0.5
    files = sorted(tmp_path.glob("*.nc"))
    dataset = h5chunk.ChunkDataset(files, fields=["era5", "time"], decode="cf")
    expected = []
    for path in files:
        with h5py.File(path) as file:
            expected.append(unpacked(file["era5"]))
    same(dataset[list(range(3 * N))][0], np.concatenate(expected))
    assert dataset.values("time").tolist() == (np.arange(3 * N) + 0.5).tolist()
    h5chunk.info(tmp_path, stats=True)
    found, values = dataset.statistics("era5"), np.concatenate(expected)
    channels = (0, 2) if len(found.mean) > 1 else (0, 1, 2)
    np.testing.assert_allclose(found.mean, np.ravel(np.nanmean(values.astype("f8"), axis=channels)), rtol=1e-6)
    np.testing.assert_allclose(found.std, np.ravel(np.nanstd(values.astype("f8"), axis=channels)), rtol=1e-6)
    assert (min(found.minimum), max(found.maximum)) == (np.nanmin(values), np.nanmax(values))


def test_values_that_were_never_written_are_missing(tmp_path):
    with h5py.File(tmp_path / "a.nc", "w") as file:
        dataset = file.create_dataset("t", (10, 4), "i2", fillvalue=-99, chunks=(5, 4))
        dataset.attrs.update({"_FillValue": np.int16(-99), "scale_factor": 0.5})
        dataset[:5] = 4
    found = h5chunk.ChunkDataset(tmp_path / "a.nc", fields=["t"], decode="cf")[[2, 7]][0]
    assert found[0].tolist() == [2.0] * 4 and found[1].isnan().all()


def test_info_says_how_to_unpack_and_errors_have_remedies(tmp_path):
    with h5py.File(tmp_path / "a.nc", "w") as file:
        put(file, "era5", 0, "contiguous")
        put(file, "wide", 0, "contiguous", scale_factor="no number")
        put(file, "limited", 0, "contiguous", valid_range=[1.0, 2.0, 3.0])
    assert "value = stored * 0.25 (scale_factor) + 250 (add_offset)" in str(h5chunk.info(tmp_path / "a.nc"))
    assert 'pass decode="cf" to the data set' in str(h5chunk.info(tmp_path / "a.nc"))
    with pytest.raises(OptionError, match="decode is 'CF': pass 'cf'"):
        h5chunk.ChunkDataset(tmp_path / "a.nc", fields=["era5"], decode="CF")
    with pytest.raises(FieldError, match="'wide' has an attribute 'scale_factor' that is no number: leave decode out"):
        h5chunk.ChunkDataset(tmp_path / "a.nc", fields=["wide"], decode="cf")
    with pytest.raises(FieldError, match="'valid_range' with 3 values instead of 2: leave decode out"):
        h5chunk.ChunkDataset(tmp_path / "a.nc", fields=["limited"], decode="cf")
    assert h5chunk.ChunkDataset(tmp_path / "a.nc", fields=["wide"])[0][0].dtype == torch.int32
