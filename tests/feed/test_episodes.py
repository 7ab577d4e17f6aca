"""Windows over layouts of episodes as programs write them, compared with reading the same frames by h5py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support.loaders import loader_by

import h5chunk

LENGTHS = (6, 9, 3)
BORDERS = np.cumsum((0, *LENGTHS))
Layout = Callable[[Path], tuple[Path, dict[str, str], dict[str, Any], list[dict[str, np.ndarray]]]]


def _values(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (np.random.default_rng(seed).random(shape) * 200).astype(dtype)


def _robomimic(folder: Path) -> Any:
    path = folder / "demos.hdf5"
    with h5py.File(path, "w") as file:
        for number, length in enumerate(LENGTHS):
            group = file.create_group(f"data/demo_{number}")
            group.attrs["num_samples"] = length
            group["actions"] = _values(number, length, 7, dtype=np.float64)
            image = _values(9 + number, length, 8, 8, 3, dtype=np.uint8)
            group.create_dataset("obs/agentview_image", data=image, chunks=(2, 8, 8, 3), compression="gzip")
        file["mask/train"] = np.array([b"demo_0", b"demo_2"])
    fields = {"image": "data/*/obs/agentview_image", "actions": "data/*/actions"}
    return path, fields, {"attributes": ["num_samples"]}, [f"data/demo_{n}" for n in range(3)]


def _libero(folder: Path) -> Any:
    """A file per task, which has an instruction; the episodes of all tasks are read together."""
    for task in ("close_drawer", "open_door"):
        with h5py.File(folder / f"{task}_demo.hdf5", "w") as file:
            file["instruction"] = f"please {task}"
            for number, length in enumerate(LENGTHS):
                file[f"data/demo_{number}/actions"] = _values(number, length, 7)
                file[f"data/demo_{number}/embedding"] = _values(40 + number, 5)
                file[f"data/demo_{number}/language"] = f"{task} {number}"
    fields = {"actions": "data/*/actions", "language": "data/*/language", "embedding": "data/*/embedding"}
    groups = [f"data/demo_{n}" for n in range(3)]
    return folder, {**fields, "task": "instruction"}, {"constants": ["embedding", "task"]}, groups


def _minari(folder: Path) -> Any:
    path = folder / "main_data.hdf5"
    with h5py.File(path, "w") as file:
        for number, length in enumerate(LENGTHS):
            group = file.create_group(f"episode_{number}")
            group.attrs["total_steps"], group.attrs["seed"] = length, number
            group["observations/achieved"] = _values(number, length + 1, 4)
            group["actions"], group["rewards"] = _values(5 + number, length, 2), _values(7 + number, length)
    fields = {"obs": "*/observations/achieved", "action": "*/actions", "reward": "*/rewards"}
    fields["next"] = fields["obs"]
    return (
        path,
        fields,
        {"shift": {"next": 1}, "attributes": {"seed": None, "other": -1}},
        [f"episode_{n}" for n in range(3)],
    )


def _minari_compressed(folder: Path) -> Any:
    path, fields, options, groups = _minari(folder)
    with h5py.File(path, "r+") as file:
        for group in groups:
            values = file[f"{group}/observations/achieved"][()]
            del file[f"{group}/observations/achieved"]
            file.create_dataset(f"{group}/observations/achieved", data=values, chunks=(4, 4), compression="gzip")
    return path, fields, options, groups


def _d4rl(folder: Path) -> Any:
    path, rows = folder / "hopper.hdf5", BORDERS[-1]
    with h5py.File(path, "w") as file:
        terminals, timeouts = np.zeros(rows, bool), np.zeros(rows, bool)
        terminals[BORDERS[1] - 1], timeouts[BORDERS[2] - 1] = True, True  # the last episode is cut off
        file["terminals"], file["timeouts"] = terminals, timeouts
        file["observations"], file["actions"] = _values(1, rows, 11), _values(2, rows, 3)
        file["metadata/algorithm"] = "SAC"
    fields = {"obs": "observations", "action": "actions", "next": "observations", "by": "metadata/algorithm"}
    return path, fields, {"episode_ends": ["terminals", "timeouts"], "shift": {"next": 1}}, BORDERS


def _calvin(folder: Path) -> Any:
    """One flat file, with the exclusive ends of episodes, and a table of tasks with a row per episode."""
    path = folder / "calvin.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("rgb", data=_values(1, BORDERS[-1], 6, 6, 3, dtype=np.uint8), chunks=(4, 6, 6, 3))
        file["rel_actions"], file["ep_ends"] = _values(2, BORDERS[-1], 7), BORDERS[1:]
        file["task"], file["lang"] = np.array([3, 1, 2]), np.array([b"a", b"bcd", b"ef"])
    fields = {"rgb": "rgb", "action": "rel_actions", "task": "task", "lang": "lang"}
    return path, fields, {"episode_ends": "ep_ends", "constants": ["task", "lang"]}, BORDERS


def _rlds(folder: Path) -> Any:
    """Converted from TensorFlow: flags at the first steps, stored as integers with an axis of 1."""
    path, first = folder / "rlds.h5", np.zeros((BORDERS[-1], 1), bool)
    first[BORDERS[:-1]] = True
    with h5py.File(path, "w") as file:
        file["steps/is_first"], file["steps/action"] = first, _values(3, BORDERS[-1], 2)
    return path, {"action": "steps/action"}, {"episode_offsets": "steps/is_first"}, BORDERS


def _array_of_flags(folder: Path) -> Any:
    path, fields, options, borders = _d4rl(folder)
    done = np.zeros(BORDERS[-1], np.uint8)
    done[BORDERS[1:] - 1] = 1
    return path, fields, {**options, "episode_ends": done}, borders


def _extra_rows_in_flat_file(folder: Path) -> Any:
    """Episodes of Minari, one after another: the observations have one row more for each episode."""
    path = folder / "joined.h5"
    with h5py.File(path, "w") as file:
        file["obs"], file["act"] = _values(4, BORDERS[-1] + 3, 5), _values(5, BORDERS[-1], 2)
        file["lengths"] = np.array(LENGTHS)
    return path, {"act": "act", "obs": "obs"}, {"episode_lengths": "lengths", "goal": "last"}, BORDERS


def _aloha(folder: Path) -> Any:
    """A file per episode, with one state more than actions, and an attribute and a scalar of the file."""
    for number, length in enumerate(LENGTHS):
        with h5py.File(folder / f"episode_{number}.hdf5", "w") as file:
            file.attrs["sim"] = bool(number % 2)
            file["observations/qpos"], file["action"] = _values(number, length + 1, 14), _values(5 + number, length, 14)
            file["task_id"], file["calibration"] = number, _values(8 + number, 3, 3)
    fields = {"action": "action", "qpos": "observations/qpos", "task": "task_id", "calibration": "calibration"}
    return folder, fields, {"constants": ["calibration"], "attributes": ["sim"], "goal": "last"}, None


def _robonet(folder: Path) -> Any:
    """Nested groups of robots and trajectories; each robot has a constant, which its trajectories share."""
    path, groups = folder / "robonet.h5", ["baxter/traj2", "baxter/traj10", "sawyer/traj1"]
    with h5py.File(path, "w") as file:
        for number, (group, length) in enumerate(zip(groups, LENGTHS, strict=True)):
            file[f"{group}/env/frames"] = _values(number, length, 4, 4, dtype=np.uint16)
            file[f"{group}/policy/actions"] = _values(5 + number, length, 4)
        file["baxter/limits"], file["sawyer/limits"] = np.arange(4.0), -np.arange(4.0)
        file["about"] = "text"
    fields = {"frames": "*/traj*/env/frames", "actions": "*/traj*/policy/actions", "limits": "*/limits"}
    return path, fields, {"constants": ["limits"]}, groups


def _era5(folder: Path) -> Any:
    """A file per year, with a time axis, and an orography that does not change."""
    for year, length in zip((1999, 2000, 2001), LENGTHS, strict=True):
        with h5py.File(folder / f"{year}.h5", "w") as file:
            file.create_dataset("t2m", data=_values(year, length, 6, 8), chunks=(1, 6, 8), shuffle=True, compression=1)
            file.create_dataset("u10", data=_values(year + 9, length, 6, 8), dtype=">f4")
            file["orography"] = _values(year + 20, 6, 8)
    return folder, {"t2m": "t2m", "u10": "u10", "oro": "orography"}, {"constants": ["oro"], "history": 1}, None


def _swmr_log(folder: Path) -> Any:
    """A growing log, closed after a crash: chunked datasets with unlimited axes, and runs by their first row."""
    path = folder / "log.h5"
    with h5py.File(path, "w", libver="latest") as file:
        log = file.create_dataset("log/x", (0, 2), "f4", maxshape=(None, 2), chunks=(5, 2))
        for row in _values(6, BORDERS[-1], 2):
            log.resize(len(log) + 1, axis=0)
            log[-1] = row
        file["log/run_starts"] = BORDERS[:-1]
    return path, {"x": "log/x"}, {"episode_offsets": "log/run_starts"}, BORDERS


LAYOUTS = [
    _robomimic, _libero, _minari, _minari_compressed, _d4rl, _calvin, _rlds, _array_of_flags, _extra_rows_in_flat_file,
    _aloha, _robonet, _era5, _swmr_log,
]  # fmt: skip
LENGTH = 2
STRINGS = ("language", "task", "lang", "by")


def _episodes(
    path: Path, fields: dict[str, str], options: dict[str, Any], where: Any
) -> list[tuple[str, dict[str, np.ndarray]]]:
    """Read each episode by h5py: its name, and its fields. ``where`` has groups, borders of rows, or is None."""
    found = []
    for each in sorted(path.glob("*.h*5")) if path.is_dir() else [path]:
        with h5py.File(each) as file:
            if where is None:
                own = [({name: file[of][()] for name, of in fields.items()}, each.name, file)]
            elif isinstance(where, list):
                own = []
                for group in where:
                    paths = {name: _fill(of, group) for name, of in fields.items()}
                    name = group.removeprefix("data/")
                    own.append(({name: file[of][()] for name, of in paths.items()}, name, file[group]))
            else:
                own = []
                rows = {name: file[of] for name, of in fields.items()}
                for number, (start, stop) in enumerate(zip(where[:-1].tolist(), where[1:].tolist(), strict=True)):
                    episode = {}
                    for name, dataset in rows.items():
                        if dataset.shape == ():
                            episode[name] = dataset[()]
                        elif name in options.get("constants", ()):
                            episode[name] = dataset[number]
                        else:
                            more = len(dataset) > where[-1]
                            episode[name] = dataset[start + number * more : stop + (number + 1) * more]
                    own.append((episode, str(number), None))
            for episode, name, owner in own:
                for attribute in options.get("attributes", ()):
                    episode[attribute] = owner.attrs.get(attribute, -1)
                found.append((name, episode))
    return found


def _fill(pattern: str, group: str) -> str:
    """Put the names of a group in place of the names with a *."""
    names = group.split("/")
    parts = pattern.split("/")
    return "/".join(names[at] if "*" in part else part for at, part in enumerate(parts))


def _windows(fields: dict[str, str], options: dict[str, Any], episodes: Any) -> list[tuple[str, dict[str, Any]]]:
    history, shift = options.get("history", 0), options.get("shift", {})
    found = []
    for name, episode in episodes:
        fixed = {*options.get("constants", ()), *options.get("attributes", ())}
        fixed |= {field for field, values in episode.items() if np.ndim(values) == 0}
        timed = {field: values for field, values in episode.items() if field not in fixed}
        for now in range(min(map(len, timed.values()))):
            steps = {
                field: range(now - history + shift.get(field, 0), now + LENGTH + shift.get(field, 0)) for field in timed
            }
            if all(own[0] >= 0 and own[-1] < len(timed[field]) for field, own in steps.items()):
                window = {field: values[steps[field][0] : steps[field][-1] + 1] for field, values in timed.items()}
                window |= {field: episode[field] for field in fixed}
                if options.get("goal") == "last":
                    window |= {f"{field}_goal": values[-1:] for field, values in timed.items()}
                found.append((name, window))
    return found


def _same(got: Any, expected: Any) -> bool:
    if isinstance(expected, bytes | np.bytes_):
        return bool(got == expected.decode())
    return np.array_equal(np.asarray(got), expected)


@pytest.mark.filterwarnings("ignore:field 'u10' is read through h5py")  # in another byte order
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__[1:])
def test_windows_equal_the_frames_that_h5py_reads(layout: Layout, tmp_path: Path) -> None:
    path, fields, options, where = layout(tmp_path)
    dataset = h5chunk.Windows(path, fields, LENGTH, **options)
    expected = _windows(fields, options, _episodes(path, fields, options, where))
    assert len(dataset) == len(expected) > 0
    assert dataset.episode_names.tolist() == [name for name, _ in expected]
    assert {*dataset.fields} == {*expected[0][1]}
    for sample, (_, window) in zip((dataset[number] for number in range(len(dataset))), expected, strict=True):
        for name, values in zip(dataset.fields, sample, strict=True):
            assert _same(values, window[name]), name
    seen = 0
    numbers = {name: of for name, of in fields.items() if name not in STRINGS}  # a loader has no strings
    own = {**options, "constants": [name for name in options.get("constants", ()) if name in numbers]}
    numbered = h5chunk.Windows(path, {**numbers, "number": "sample_number"}, LENGTH, **own)
    for reading in ({}, {"resident": True}, {"reader": "h5py"}):
        for batch in loader_by(numbered, 4, **reading):
            columns = dict(zip(numbered.fields, batch, strict=True))
            for place, number in enumerate(columns["number"].tolist()):
                seen += 1
                for name in columns.keys() - {"number"}:
                    assert _same(columns[name][place], expected[number][1][name]), name
    assert seen == 3 * len(expected)
    trusted = h5chunk.Windows(path, fields, LENGTH, trusted=True, padding="edge", **options)
    assert len(trusted) == len(trusted.values("task") if "task" in fields else trusted) >= len(dataset)


def test_goals_and_padding_use_the_last_observation(tmp_path: Path) -> None:
    path, fields, _, _ = _minari(tmp_path)
    fields = {"obs": fields["obs"], "action": fields["action"]}
    dataset = h5chunk.Windows(path, fields, 3, padding="edge", goal={"obs": "future", "action": "last"}, seed=1)
    assert len(dataset) == sum(LENGTHS)
    with h5py.File(path) as file:
        observed = [file[f"episode_{number}/observations/achieved"][()] for number in range(3)]
    last = [0, 0, 0]
    for number in range(len(dataset)):
        episode, now = int(dataset.episodes[number]), number - int(BORDERS[dataset.episodes[number]])
        sample = dict(zip(dataset.fields, dataset[number], strict=True))
        assert sample["obs_is_pad"].tolist() == [now + step > LENGTHS[episode] for step in range(3)]
        assert sample["action_is_pad"].tolist() == [now + step >= LENGTHS[episode] for step in range(3)]
        (later,) = np.flatnonzero((observed[episode] == sample["obs_goal"].numpy()).all(axis=1))
        assert later > now
        last[episode] += later == LENGTHS[episode]
    assert any(last)


@pytest.mark.parametrize(
    ("layout", "fields", "options", "message"),
    [
        (_minari, {"obs": "*/observations/achieved", "other": "*/actions"}, {"constants": ["missing"]}, "constants is"),
        (_minari, {"action": "*/actions"}, {"attributes": ["missing"]}, "no attribute 'missing'"),
        (_minari, {"action": "*/actions"}, {"shift": {"missing": 1}}, "shift is"),
        (_minari, {"action": "*/actions"}, {"shift": {"action": 1.5}}, "shift of 'action'"),
        (_minari, {"action": "*/actions", "reward": "*/rewards"}, {"constants": ["reward"]}, "give it one shape"),
        (_d4rl, {"obs": "observations"}, {"episode_ends": "observations"}, "one axis of at most 18 integers"),
        (_d4rl, {"obs": "observations"}, {"episode_ends": ["terminals", "observations"]}, "one boolean for each of 18"),
        (_d4rl, {"obs": "observations"}, {"episode_ends": np.array([3, 17])}, "end with 18"),
        (_d4rl, {"obs": "observations"}, {"episode_ends": "terminals", "attributes": ["a"]}, "ranges of rows"),
        (_d4rl, {"obs": "observations"}, {"episode_ends": "terminals", "episode_lengths": [18]}, "exclude each other"),
        (_calvin, {"rgb": "rgb", "task": "task"}, {"episode_ends": "ep_ends"}, r"constants=\["),
        (_calvin, {"rgb": "rgb", "rel": "rel_actions"}, {"episode_ends": "ep_ends", "constants": ["rel"]}, "18 rows"),
    ],
)
def test_wrong_arguments_for_episodes_are_errors(
    layout: Layout, fields: dict[str, str], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(h5chunk.H5ChunkError, match=message):
        h5chunk.Windows(layout(tmp_path)[0], fields, LENGTH, **options)


def test_fields_that_are_longer_in_some_episodes_only_are_an_error(tmp_path: Path) -> None:
    path, fields, _, _ = _minari(tmp_path)
    with h5py.File(path, "r+") as file:
        del file["episode_2/rewards"]
        file["episode_2/rewards"] = np.zeros(LENGTHS[2] + 1)
    with pytest.raises(h5chunk.FieldError, match=r"fields differ in length .*episode_2"):
        h5chunk.Windows(path, {name: fields[name] for name in ("obs", "action", "reward")}, LENGTH)


def test_an_empty_attribute_counts_as_lacking_if_there_is_a_default(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(3):
            file[f"episode_{number}/x"] = np.arange(4)
            file[f"episode_{number}"].attrs["seed"] = h5py.Empty("i8") if number == 1 else number
    windows = h5chunk.Windows(tmp_path / "a.h5", {"x": "*/x"}, 4, attributes={"seed": -1})
    keyed = h5chunk.Keyed(tmp_path / "a.h5", "*/x", attributes={"seed": -1})
    for dataset in (windows, keyed):
        assert [int(dataset[number][1]) for number in range(3)] == [0, -1, 2]
