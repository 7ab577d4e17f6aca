"""Published layouts of files with a dataset, a group or a file for each sample: their samples are those of h5py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import h5chunk

LAYOUTS: dict[str, tuple[Callable[[Path], Any], dict[str, str], Any]] = {}


def layout(fields: dict[str, str], attributes: Any = ()) -> Any:
    """Register a function that writes files of a layout, and returns the path of one, or of a folder."""

    def register(write: Callable[[Path], Any]) -> Callable[[Path], Any]:
        LAYOUTS[write.__name__] = write, fields, attributes
        return write

    return register


def _random(*shape: int, dtype: Any = "f4") -> np.ndarray:
    return (np.random.default_rng(sum(shape)).normal(size=shape) * 50).astype(dtype)


def _put(path: Path, values: Mapping[str, Any], attributes: Mapping[str, Any], **options: Any) -> Path:
    """Add datasets to a file, with options if they have axes. The path before a : in an attribute's name has it."""
    path.parent.mkdir(exist_ok=True, parents=True)
    with h5py.File(path, "a") as file:
        for name, value in values.items():
            file.create_dataset(name, data=value, **(options if np.ndim(value) else {}))
        for name, value in attributes.items():
            owner, _, attribute = name.rpartition(":")
            file[owner or "/"].attrs[attribute] = value
    return path


@layout({"data": "data/*"}, {"p_arrival_sample": -1.0, "source_magnitude": -1, "snr_db": -1.0, "coda_end_sample": -1})
def stead(folder: Path) -> Path:
    for number in range(9):
        is_event, name = number % 3 > 0, f"data/B{number}.TA_EV"
        found = {"p_arrival_sample": 700.0 + number, "source_magnitude": f"{number / 10}", "snr_db": [1.0, 2.0, number]}
        found["coda_end_sample"] = [[3000.0 + number]]
        known = {f"{name}:{key}": value if is_event else "" for key, value in found.items()}
        path = _put(folder / "stead.h5", {name: _random(60, 3)}, {**known, f"{name}:network": "TA"})
    return path


@layout({"features": "features"})
def bags_of_slides(folder: Path) -> Path:
    for number in range(7):
        values = {"features": _random(3 + number, 32), "coords": _random(3 + number, 2, dtype="i8")}
        _put(folder / "bags" / f"slide_{number}.h5", values, {}, maxshape=(None, None), chunks=(1, 2))
    return folder / "bags"


@layout({"kspace": "kspace", "target": "reconstruction_rss"}, ["max", "patient_id"])
def fastmri(folder: Path) -> Path:
    for number in range(4):
        values = {
            "kspace": _random(2, 6, 8, dtype="c8") * 1j,
            "reconstruction_rss": _random(2, 6, 6),
            "header": b"<xml/>",
        }
        _put(folder / "mri" / f"file{number}.h5", values, {":max": 1.5 * number, ":patient_id": f"p{number}"})
    return folder / "mri"


@layout({"actions": "data/*/actions"}, ["num_samples", "env", "total"])
def robosuite(folder: Path) -> Path:
    for number in range(12):
        name = f"data/demo_{number}"
        values = {f"{name}/actions": _random(5 + number, 7), f"{name}/obs/eef": _random(5 + number, 3)}
        path = _put(
            folder / "demo.hdf5", values, {f"{name}:num_samples": 5 + number, "data:env": "Lift", ":total": 126}
        )
    return path


@layout({"audio": "*/*"}, ["rate"])
def utterances_of_speakers(folder: Path) -> Path:
    for number in range(9):
        name = f"speaker{number % 3}/{number}"
        values = {name: _random(10 + number * 7, dtype="i2")}
        path = _put(folder / "audio.h5", values, {f"{name}:rate": 16000}, compression="gzip", shuffle=True)
    return path


@layout({"image": "*/*"})
def encoded_images_of_classes(folder: Path) -> Path:
    for number in range(8):
        path = _put(
            folder / "voc.h5", {f"{'cat' if number % 2 else 'dog'}/{number}.jpg": _random(50 + number, dtype="u1")}, {}
        )
    return _put(path, {"names": np.array([b"cat", b"dog"])}, {})


@layout({"energies": "*/energies"})
def molecules(folder: Path) -> Path:
    for number, name in enumerate(("C2H6O", "CH4", "H2O")):
        values = {f"{name}/energies": _random(4 + number, dtype="f8"), f"{name}/coordinates": _random(4 + number, 5, 3)}
        path = _put(folder / "molecules.h5", values, {})
    return path


@layout({"eeg": "trials/*/eeg", "label": "trials/*/label"}, ["age", "sex", "rt"])
def eeg_of_subjects(folder: Path) -> Path:
    for number in range(12):
        name = f"trials/trial_{number // 3}"
        facts = {f"{name}:rt": np.float32(number) / 3, ":age": 20 + number % 3, ":sex": "fm"[number % 2]}
        values = {f"{name}/eeg": _random(8, 50, dtype=">f4"), f"{name}/label": np.int8(number % 2)}
        _put(folder / "eeg" / f"subject{number % 3}.h5", values, facts)
    return folder / "eeg"


@layout({"hits": "events/*/hits", "weight": "events/*/weight"}, ["ids", "signal"])
def events_of_a_detector(folder: Path) -> Path:
    for number in range(11):
        name = f"events/event_{number}"
        facts = {f"{name}:ids": [number, 2**40 + number], f"{name}:signal": bool(number % 2)}
        values = {f"{name}/hits": _random(number * 3, 5), f"{name}/weight": np.float64(number)}
        path = _put(folder / "atlas.h5", values, facts, chunks=(16, 5), maxshape=(None, 5), compression="lzf")
    return path


@layout({"rgb": "train/*/rgb", "depth": "train/*/depth"})
def splits_of_hard_links(folder: Path) -> Path:
    for number in range(6):
        values = {f"all/{number}/rgb": _random(3, 6, 8, dtype="u1"), f"all/{number}/depth": _random(6, 8, dtype="f2")}
        path = _put(folder / "nyu.h5", values, {})
    with h5py.File(path, "a") as file:
        for number in (1, 3):
            file[f"train/{number}"] = file[f"all/{number}"]
    return path


@layout({"frames": "*/*/frames"}, ["index", "fps"])
def videos_of_classes(folder: Path) -> Path:
    for number in range(8):
        name = f"class{number % 2}/video_{number}"
        facts = {f"class{number % 2}:index": number % 2, f"{name}:fps": 25 if number else 29.97}
        values = {f"{name}/frames": _random(2 + number, 4, 5, 3, dtype="u1")}
        path = _put(folder / "ucf.h5", values, facts, chunks=(1, 4, 5, 3), compression="gzip")
    return path


@layout({"signal": "*/signal", "y": "*/y"}, ["MATLAB_class"])
def records_of_matlab(folder: Path) -> Path:
    with h5py.File(folder / "matlab.mat", "w", userblock_size=512):
        pass
    for number in range(6):
        options: dict[str, Any] = {"scaleoffset": 0} if number % 2 else {"fletcher32": True}
        values = {f"rec{number}/signal": _random(30, 2, dtype="i4"), f"rec{number}/y": np.array([[number, 1]])}
        path = _put(folder / "matlab.mat", values, {f"rec{number}:MATLAB_class": np.bytes_("double")}, **options)
    return path


def _of_sample(file: h5py.File, path: str, name: str, default: Any) -> Any:
    """Return an attribute of a sample or, if it lacks it, of the nearest group above."""
    while name not in file[path].attrs and path.strip("/"):
        path = path.rpartition("/")[0] or "/"
    value = file[path].attrs.get(name, "")
    if default is not None and isinstance(value, str):
        return float(value) if value else default
    return value.decode() if isinstance(value, bytes) else np.squeeze(value).tolist()


@pytest.mark.parametrize("name", LAYOUTS)
def test_samples_are_those_of_h5py(tmp_path: Path, name: str) -> None:
    write, fields, attributes = LAYOUTS[name]
    path = write(tmp_path)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    dataset = h5chunk.Keyed(path, fields, attributes=attributes)
    assert len(dataset) > 1
    expected, known = [], []
    for number, key in enumerate(dataset.source_names.tolist()):
        with h5py.File(files[number * len(files) // len(dataset)]) as file:  # files have equally many samples
            paths = [pattern.replace("*", "{}").format(*key.split("/")) for pattern in fields.values()]
            expected.append([file[each][()] for each in paths])
            owner = paths[0] if file[paths[0]].attrs else paths[0].rpartition("/")[0] or "/"
            defaults = attributes if isinstance(attributes, dict) else dict.fromkeys(attributes)
            known.append([_of_sample(file, owner, *each) for each in defaults.items()])
    are_ragged = [len({values[at].shape for values in expected}) > 1 for at in range(len(fields))]
    for number, (values, facts) in enumerate(zip(expected, known, strict=True)):
        found = list(dataset[number])
        for value, is_ragged in zip(values, are_ragged, strict=True):
            item = found.pop(0)
            np.testing.assert_array_equal(item.values if is_ragged else item, value)
            assert not is_ragged or item.lengths == len(value)
        for fact in facts:
            value = found.pop(0)
            assert value == fact if isinstance(fact, str) else np.allclose(value, fact)
        assert not found


def test_files_store_samples_in_different_ways(tmp_path):
    for number, how in enumerate([{}, {"chunks": (4,), "compression": "gzip"}, {}]):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            for sample in range(3):
                file.create_dataset(f"s{sample}/data", data=np.arange(9) + 100 * number + 10 * sample, **how)
    dataset = h5chunk.Keyed(tmp_path, "*/data")
    expected = [[*range(start, start + 9)] for start in (0, 10, 20, 100, 110, 120, 200, 210, 220)]
    assert dataset[:][0].tolist() == expected
    with h5chunk.ChunkLoader(dataset, 4, shuffle=False) as loader:
        assert [row for (batch,) in loader for row in batch.tolist()] == expected
