"""Windows of frames inside episodes: values, padding, episodes, order and errors, with every way of reading."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.loaders import loader_by
from support.scripts import needs_gpu

import h5chunk
from h5chunk.tools.model.clustering import find_clustering
from h5chunk.tools.model.mixing import effective_batch
from h5chunk.transforms import Normalize

LENGTHS = (9, 5, 12)
ROBOT = {"image": "data/*/obs/image", "actions": "data/*/actions"}


def _frames(count: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    image = random.integers(0, 255, (count, 6, 5, 3), np.uint8)
    return {"image": image, "actions": random.normal(size=(count, 7)).astype(np.float32)}


EPISODES = [_frames(length, seed) for seed, length in enumerate(LENGTHS)]


def _robomimic(path: Path, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        for number, (name, episode) in enumerate(zip((2, 10, 33), EPISODES, strict=True)):
            group = file.create_group(f"data/demo_{name}")
            own = {**options, "chunks": (4, 6, 5, 3)} if options else {}
            group.create_dataset("obs/image", data=episode["image"], **own)
            group.create_dataset("actions", data=episode["actions"])
            group.attrs["num_samples"] = LENGTHS[number]
    return path


def _flat(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        for name in ("image", "actions"):
            file[name] = np.concatenate([episode[name] for episode in EPISODES])
        file["ep_len"] = np.array(LENGTHS, np.int32)
    return path


def _aloha(folder: Path) -> Path:
    folder.mkdir()
    for number, episode in enumerate(EPISODES):
        with h5py.File(folder / f"episode_{number}.hdf5", "w") as file:
            file["observations/images/top"], file["action"] = episode["image"], episode["actions"]
    return folder


def _make(layout: str, folder: Path, **options: Any) -> h5chunk.Windows:
    if layout == "flat":
        fields, options = {"image": "image", "actions": "actions"}, {**options, "episode_lengths": "ep_len"}
        return h5chunk.Windows(_flat(folder / "flat.h5"), fields, **options)
    if layout == "aloha":
        fields = {"image": "observations/images/top", "actions": "action"}
        return h5chunk.Windows(_aloha(folder / "aloha"), fields, **options)
    compressed = {"compression": "gzip"} if layout == "compressed" else {}
    return h5chunk.Windows(_robomimic(folder / "robot.h5", **compressed), ROBOT, **options)


def _expected(steps: Mapping[str, range], *, pads: bool) -> list[list[np.ndarray]]:
    """The fields of all windows, computed naively, and with padding their masks."""
    windows = []
    for length, episode in zip(LENGTHS, EPISODES, strict=True):
        for anchor in range(length):
            rows = {name: np.array(own) + anchor for name, own in steps.items()}
            if pads or all(own[0] >= 0 and own[-1] < length for own in rows.values()):
                values = [episode[name][own.clip(0, length - 1)] for name, own in rows.items()]
                masks = [(own < 0) | (own >= length) for own in rows.values()] if pads else []
                windows.append([*values, *masks])
    return windows


@pytest.mark.parametrize("layout", ["robomimic", "compressed", "flat", "aloha"])
@pytest.mark.parametrize("padding", ["none", "edge"])
@pytest.mark.filterwarnings("ignore:.*skipped, because")
def test_windows_are_those_of_a_naive_reader_however_they_are_read(layout: str, padding: str, tmp_path: Path) -> None:
    stride = {"image": 2, "actions": 1}
    windows = _make(layout, tmp_path, length=2, history=1, stride=stride, padding=padding)
    expected = _expected({"image": range(-2, 4, 2), "actions": range(-2, 4)}, pads=padding == "edge")
    assert len(windows) == len(expected)
    for number, values in enumerate(expected):
        for got, value in zip(windows[number], values, strict=True):
            assert np.array_equal(got, value)
    for reader in ("auto", "h5py"):
        loader = loader_by(windows, 4, shuffle=False, reader=reader)
        batches = list(loader)
        for position in range(len(windows.fields)):
            got = torch.cat([batch[position] for batch in batches])
            assert np.array_equal(got, np.stack([values[position] for values in expected]))


@pytest.mark.parametrize("reuse", [False, True])
def test_masks_belong_to_their_windows_when_windows_of_the_order_are_joined(reuse: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["length"] = np.arange(66), [9, 36, 9, 5, 2, 5]
    windows = h5chunk.Windows(path, {"x": "x"}, 5, padding="edge", episode_lengths="length")
    order = [list(batch) for batch in h5chunk.ChunkSampler(windows, 4, window_chunks=1, num_workers=0)]
    sampler = h5chunk.ChunkSampler(windows, 4, window_chunks=1, num_workers=0)
    for numbers, batch in zip(order, h5chunk.ChunkLoader(windows, batch_sampler=sampler, reuse=reuse), strict=True):
        assert all(map(torch.equal, batch, map(torch.stack, zip(*windows.__getitems__(numbers), strict=True))))


@pytest.mark.parametrize("layout", ["robomimic", "compressed"])
def test_a_goal_is_the_last_frame_of_the_episode(layout: str, tmp_path: Path) -> None:
    windows = _make(layout, tmp_path, length=3, goal={"image": "last"})
    assert windows.fields == ("image", "actions", "image_goal")
    loader = h5chunk.ChunkLoader(windows, 4, shuffle=False)
    goals = torch.cat([batch[2] for batch in loader])
    assert np.array_equal(goals[:, 0], [EPISODES[number]["image"][-1] for number in windows.episodes])
    assert np.array_equal(windows[7][2], goals[7])
    for wrong in ("first", {"x": "last"}):
        with pytest.raises(h5chunk.OptionError, match="goal"):
            _make("flat", tmp_path, length=3, goal=wrong)


def test_episodes_by_their_first_rows(tmp_path: Path) -> None:
    path, fields = _flat(tmp_path / "flat.h5"), {"actions": "actions"}
    with h5py.File(path, "a") as file:
        file["ep_offset"] = np.array([0, 9, 14])
    expected = h5chunk.Windows(path, fields, 3, episode_lengths="ep_len")
    windows = h5chunk.Windows(path, fields, 3, episode_offsets="ep_offset")
    assert np.array_equal(windows[[*range(len(windows))]][0], expected[[*range(len(expected))]][0])
    with pytest.raises(h5chunk.OptionError, match="pass one of them"):
        h5chunk.Windows(path, fields, 3, episode_lengths="ep_len", episode_offsets="ep_offset")
    for wrong in ([1, 9, 14], [0, 14, 9], [0, 9, 27]):
        with h5py.File(path, "a") as file:
            file["ep_offset"][:] = wrong
        with pytest.raises(h5chunk.FieldError, match="must start with 0, not decrease, and be at most 26"):
            h5chunk.Windows(path, fields, 3, episode_offsets="ep_offset")


@pytest.mark.parametrize(
    ("layout", "name"),
    [("robomimic", "a group per episode"), ("flat", "one after another"), ("aloha", "a file per")],
)
@pytest.mark.filterwarnings("ignore:.*skipped, because")
def test_info_recognises_the_layout_and_prints_the_line_that_opens_it(layout: str, name: str, tmp_path: Path) -> None:
    _make(layout, tmp_path, length=1)
    path = next(path for path in sorted(tmp_path.rglob("*")) if path.is_file())
    info = h5chunk.info(path)
    assert name in info.layout and info.layout in str(info)
    space: dict[str, Any] = {}
    exec("\n".join(info.code), space)
    images, actions, *_ = next(iter(space["loader"]))
    assert images.shape[2:] == (6, 5, 3) and actions.shape[2:] == (7,) and len(actions) == len(images)


def test_shuffle_quality_counts_episodes_as_groups(tmp_path: Path) -> None:
    frames = np.arange(20 * 50, dtype=np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=frames, chunks=(10,))
        file["lengths"] = np.full(20, 50)
    windows = h5chunk.Windows(tmp_path / "a.h5", {"x": "x"}, 3, episode_lengths="lengths")
    report = h5chunk.ChunkSampler(windows, 16).report()
    assert report == h5chunk.ChunkSampler(windows, 16).report(windows.episodes)
    assert 15 < report.effective_batch <= report.samples == 16 and report.batches == 60 and report.padding is None
    inside = h5chunk.ChunkSampler(windows, 48, shuffle=False).report()
    assert inside.effective_batch == pytest.approx(1)
    plain = h5chunk.ChunkDataset(tmp_path / "a.h5", fields=["x"])
    samplers = [h5chunk.ChunkSampler(plain, 16, window_chunks=count) for count in (1, 10, 100)]
    groups = np.arange(1000) // 50
    expected = [effective_batch(find_clustering(groups, 10), sampler.order) for sampler in samplers]
    assert [each.report(groups).effective_batch for each in samplers] == pytest.approx(expected, rel=0.1)
    assert expected[0] < 2.1 < 5 < expected[1] < 7 < 13 < expected[2]
    with pytest.raises(h5chunk.OptionError, match="pass groups"):
        samplers[0].report()


def test_info_recognises_trajectories_of_fields(tmp_path: Path) -> None:
    random, path = np.random.default_rng(0), tmp_path / "well.hdf5"
    density, velocity = random.random((3, 9, 4, 6), np.float32), random.random((3, 9, 4, 6, 2), np.float32)
    with h5py.File(path, "w") as file:
        file["t0_fields/density"], file["t1_fields/velocity"] = density, velocity
        file["t0_fields/constant"], file["dimensions/time"] = density[:, 0], np.arange(9)
    space: dict[str, Any] = {}
    exec("\n".join(h5chunk.info(path).code), space)
    seen = []
    for speeds, densities, positions in space["loader"]:
        for speed, own, (_, number, start) in zip(speeds, densities, positions.tolist(), strict=True):
            seen.append((number, start))
            assert np.array_equal(speed[0], velocity[number, start : start + 5])
            assert np.array_equal(own[0], density[number, start : start + 5])
    assert sorted(seen) == [(number, start) for number in range(3) for start in range(5)]


@pytest.mark.parametrize("layout", ["robomimic", "aloha"])
@pytest.mark.filterwarnings("ignore:.*skipped, because")
def test_info_of_a_folder_of_episodes_prints_the_line_that_opens_all(layout: str, tmp_path: Path) -> None:
    _make(layout, tmp_path, length=1)
    folder = tmp_path / "aloha" if layout == "aloha" else tmp_path
    info = h5chunk.info(folder, stats=True)
    assert info.layout in str(info) and "Normalize" in str(info) and "not one data set" not in str(info)
    space: dict[str, Any] = {}
    exec("\n".join(info.code), space)
    assert len(np.unique(space["data"].episodes)) == (1 if layout == "robomimic" else 3)


def test_tune_says_what_chunks_cost_windows_and_repack_makes_better_ones(tmp_path: Path) -> None:
    path, frames = tmp_path / "a.h5", np.random.default_rng(0).integers(0, 9, (400, 40, 40, 3), np.uint8)
    with h5py.File(path, "w") as file:
        file.create_dataset("pixels", data=frames, chunks=(100, 40, 40, 3), compression="gzip", fletcher32=True)
        file["actions"] = np.zeros((400, 2))
    found = h5chunk.tune(path, window=4)
    (advice,) = found.advice
    decoded = np.mean([100 * len({first // 100, (first + 3) // 100}) / 4 for first in range(397)])
    assert advice.alone == pytest.approx(decoded) and advice.best_alone < 3
    assert f"--chunks {','.join(map(str, advice.best))} --compression gzip" in str(found)
    space: dict[str, Any] = {}
    exec("\n".join(found.code), space)
    assert [tuple(each.shape) for each in space["data"][0]] == [(4, 40, 40, 3), (4, 2)]
    h5chunk.repack(path, tmp_path / "b.h5", chunks=advice.best, compression="gzip")
    better = h5chunk.tune(tmp_path / "b.h5", window=4)
    assert better.advice[0].alone == pytest.approx(advice.best_alone) and "--chunks" not in str(better)
    windows = (h5chunk.Windows(tmp_path / name, {"pixels": "pixels"}, 4) for name in ("a.h5", "b.h5"))
    assert np.array_equal(*(own[[0, 300]][0] for own in windows))
    for more, why in [
        ({"window": 401}, "pixels"),
        ({"window": 4, "apply": True}, "leave it out"),
    ]:
        with pytest.raises(h5chunk.H5ChunkError, match=why):
            h5chunk.tune(path, **more)


def test_tune_gives_one_line_for_episodes_that_are_each_one_chunk(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, length in enumerate((200, 210, 220)):
            frames = np.zeros((length, 40, 40, 3), np.uint8)
            file.create_dataset(f"data/demo_{number}/obs/image", data=frames, chunks=frames.shape, compression="gzip")
            file[f"data/demo_{number}/actions"] = np.zeros((length, 2))
    (advice,) = h5chunk.tune(tmp_path / "a.h5", window=4).advice
    assert advice.dataset == "data/demo_2/obs/image" and advice.alone == pytest.approx(55)
    assert "--chunks" in advice.command and advice.command.endswith("--compression gzip")


@pytest.mark.parametrize("layout", ["robomimic", "flat"])
def test_tune_prints_the_line_for_the_length_of_window(layout: str, tmp_path: Path) -> None:
    _make(layout, tmp_path, length=3)
    (path,) = tmp_path.iterdir()
    space: dict[str, Any] = {}
    exec("\n".join(h5chunk.tune(path, window=3).code), space)
    assert len(space["data"][0][0]) == 3


def _joined(lists: list[list[int]]) -> list[int]:
    return [*chain.from_iterable(lists)]


def test_every_window_comes_once_in_a_shuffled_order_that_resumes_and_ranks_share(tmp_path: Path) -> None:
    path = tmp_path / "series.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("field", data=np.arange(60 * 8.0).reshape(60, 2, 2, 2), chunks=(5, 2, 2, 2))
    windows = h5chunk.Windows(path, {"field": "field"}, 4)

    def anchors(batches: Any) -> list[list[int]]:
        return [(batch[0][:, 0, 0, 0, 0] / 8).int().tolist() for batch in batches]

    loader = h5chunk.ChunkLoader(windows, 8)
    epoch = anchors(loader)
    assert sorted(_joined(epoch)) == list(range(57)) != _joined(epoch)
    iterator = iter(started := h5chunk.ChunkLoader(windows, 8))
    next(iterator), next(iterator)
    resumed = h5chunk.ChunkLoader(windows, 8)
    resumed.load_state_dict(started.state_dict())
    assert anchors(resumed) == epoch[2:]
    by_rank = [h5chunk.ChunkSampler(windows, 8, rank=rank, world_size=2) for rank in (0, 1)]
    shares = [_joined(anchors(h5chunk.ChunkLoader(windows, batch_sampler=sampler))) for sampler in by_rank]
    assert sorted(shares[0] + shares[1]) == list(range(57))
    dataloader = torch.utils.data.DataLoader(windows, batch_sampler=h5chunk.ChunkSampler(windows, 8))
    assert sorted(_joined(anchors(dataloader))) == list(range(57))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("stride", [2, 9])
@pytest.mark.filterwarnings("ignore:.*skipped, because")
def test_frames_are_held_once_whatever_the_order(stride: int, device: str, tmp_path: Path) -> None:
    lengths, path = np.arange(1, 31), tmp_path / "rows.h5"  # each frame holds its own row
    episode = np.repeat(np.arange(30), lengths)
    with h5py.File(path, "w") as file:
        file["plain"] = np.repeat(np.arange(len(episode), dtype=np.float32), 300).reshape(-1, 300)
        file.create_dataset("packed", data=file["plain"][:], chunks=(7, 300), compression="gzip")
        file["small"], file["length"] = np.arange(len(episode)), lengths
    names = {name: name for name in ("plain", "packed", "small")}
    windows = h5chunk.Windows(path, names, 2, history=1, stride=stride, episode_lengths="length")

    def anchors(loader: Any) -> list[int]:
        found = []
        for plain, packed, small in loader:
            rows = small.cpu().numpy()
            assert (np.diff(rows) == stride).all() and (episode[rows] == episode[rows[:, :1]]).all()
            assert all((own.cpu().numpy() == rows[:, :, None]).all() for own in (plain, packed))
            found += rows[:, 0].tolist()
        return sorted(found)

    every = anchors([windows[[*range(len(windows))]]])
    assert len(every) == len(windows) > 40
    some = windows.subset(np.arange(len(windows)) % 5 == 0)
    for options in ({}, {"reuse": True}, {"resident": True}, {"shuffle": False}, {"reader": "h5py"}):
        assert anchors(loader_by(windows, 8, device=device, **options)) == every
        assert anchors(loader_by(some, 8, device=device, **options)) == every[::5]
    for window_chunks in (1, 3, 50):
        sampler = h5chunk.ChunkSampler(windows, 4, window_chunks=window_chunks, rank=0, world_size=1, lanes=2)
        assert anchors(h5chunk.ChunkLoader(windows, batch_sampler=sampler, device=device)) == every
    assert anchors(h5chunk.ChunkLoader(windows, 8, echo=2, device=device)) == sorted(2 * every)
    weighted = h5chunk.ChunkSampler(windows, 8, weights=np.arange(len(windows)))
    assert set(anchors(h5chunk.ChunkLoader(windows, batch_sampler=weighted, device=device))) <= set(every)


@pytest.mark.parametrize("layout", ["groups", "aloha", "flat"])
def test_statistics_are_those_of_all_episodes_and_normalise_the_channels_of_each_frame(
    layout: str, tmp_path: Path
) -> None:
    windows = _make(layout, tmp_path, length=3)  # as many frames as an image has channels
    h5chunk.info(tmp_path / "aloha" if layout == "aloha" else next(tmp_path.glob("*.h5")), stats=True)
    stored = dict(zip(("image", "actions"), windows[np.arange(len(windows))], strict=True))
    found = {name: windows.statistics(name) for name in stored}
    transforms = {name: [Normalize(each.mean, each.std)] for name, each in found.items()}
    batches = list(h5chunk.ChunkLoader(windows, 4, shuffle=False, transforms=transforms))
    for field, (name, unit) in enumerate({"image": 255, "actions": 1}.items()):
        frames = np.concatenate([episode[name] for episode in EPISODES]) / unit
        mean, std = (take(frames, axis=tuple(range(frames.ndim - 1))) for take in (np.mean, np.std))
        np.testing.assert_allclose((found[name].mean, found[name].std), (mean, std), rtol=1e-5)
        batch = torch.cat([batch[field] for batch in batches])
        np.testing.assert_allclose(batch, (stored[name].numpy() / unit - mean) / std, rtol=1e-3, atol=1e-5)


def test_a_split_that_leaves_a_part_without_episodes_is_an_error(tmp_path: Path) -> None:
    windows = _make("groups", tmp_path, length=2)
    with pytest.raises(h5chunk.OptionError, match="with 3 episodes a part would be empty"):
        windows.split((0.9, 0.05, 0.05))


def test_a_split_keeps_episodes_whole(tmp_path: Path) -> None:
    windows = _make("flat", tmp_path, length=3)
    train, held_out = windows.split((0.67, 0.33))
    parts = {*train.episodes.tolist()}, {*held_out.episodes.tolist()}
    assert parts[0] | parts[1] == {0, 1, 2} and not parts[0] & parts[1]
    assert len(train) + len(held_out) == len(windows)
    images = torch.cat([batch[0] for batch in h5chunk.ChunkLoader(held_out, 4, shuffle=False)])
    episode = EPISODES[parts[1].pop()]["image"]
    assert np.array_equal(images, [episode[start : start + 3] for start in range(len(episode) - 2)])


def test_episodes_that_no_window_can_be_taken_from_are_errors_that_name_them(tmp_path: Path) -> None:
    path = _robomimic(tmp_path / "robot.h5")
    with pytest.raises(h5chunk.OptionError, match="needs 13 time steps, but the longest episode has 12"):
        h5chunk.Windows(path, ROBOT, 13)
    with pytest.warns(UserWarning, match="1 of 3 episodes skipped, because a window needs 6 time steps"):
        h5chunk.Windows(path, ROBOT, 6)
    with h5py.File(path, "a") as file:
        file["data/demo_10"].move("actions", "moved")
    with pytest.raises(h5chunk.FieldError, match="has no dataset 'data/demo_10/actions'"):
        h5chunk.Windows(path, ROBOT, 2)
    with h5py.File(path, "a") as file:
        file["data/demo_10/actions"] = np.zeros((4, 7), np.float32)
    with pytest.raises(h5chunk.FieldError, match="'data/demo_10/obs/image' has 5, 'data/demo_10/actions' has 4"):
        h5chunk.Windows(path, ROBOT, 2)


def test_episodes_of_other_types_and_rows_of_variable_length_are_errors(tmp_path: Path) -> None:
    path = _robomimic(tmp_path / "robot.h5")
    with h5py.File(path, "a") as file:
        del file["data/demo_10/actions"]
        file["data/demo_10/actions"] = np.zeros((5, 7))
        file.create_dataset("vlen", shape=(9,), dtype=h5py.vlen_dtype("f4"))[:] = [np.zeros(3, np.float32)] * 9
    with pytest.raises(h5chunk.FieldError, match=r"'data/demo_10/actions'.* float64, but in .*'data/demo_2/actions'"):
        h5chunk.Windows(path, ROBOT, 2)
    with pytest.raises(h5chunk.FieldError, match="'x' differ in shape"):
        h5chunk.Windows(path, {"x": "vlen"}, 2)


def test_episodes_that_are_stored_differently_are_one_data_set(tmp_path: Path) -> None:
    """Empty, compressed and chunked ones among contiguous ones, and the links of a file that is not trusted."""
    path = _robomimic(tmp_path / "robot.h5")
    with h5py.File(path, "a") as file:
        file["data/demo_5/obs/image"], file["data/demo_5/actions"] = (
            np.zeros((0, 6, 5, 3), "u1"),
            np.zeros((0, 7), "f4"),
        )
        for name, options in (("demo_10", {"compression": "gzip"}), ("demo_33", {"chunks": (2, 6, 5, 3)})):
            image = file[f"data/{name}/obs/image"][:]
            del file[f"data/{name}/obs/image"]
            file.create_dataset(f"data/{name}/obs/image", data=image, **options)
    with pytest.warns(UserWarning, match="1 of 4 episodes skipped"):
        windows = h5chunk.Windows(path, ROBOT, 3)
    loader = h5chunk.ChunkLoader(windows, 4, shuffle=False)
    found = torch.cat([batch[0] for batch in loader])
    expected = [frames["image"][at : at + 3] for frames in EPISODES for at in range(len(frames["image"]) - 2)]
    assert np.array_equal(found, expected) and np.array_equal(windows[11][0], expected[11])
    loader.close(), windows.close()
    with h5py.File(path, "a") as file:
        file["data/demo_5"].move("actions", "real")
        file["data/demo_5/actions"] = h5py.SoftLink("/data/demo_2/actions")
    with pytest.raises(h5chunk.TrustError, match=r"demo_5/actions.* is a soft link"):
        h5chunk.Windows(path, ROBOT, 3)


def test_a_damaged_chunk_is_an_error_that_names_the_episode(tmp_path: Path) -> None:
    path = _robomimic(tmp_path / "robot.h5", compression="gzip")
    with h5py.File(path) as file:
        chunk = file["data/demo_10/obs/image"].id.get_chunk_info(1)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(bytes(chunk.size))
    with pytest.raises(h5chunk.FileError, match=r"'image' \(data/demo_10/obs/image\), chunk 1 is damaged .gzip"):
        list(h5chunk.ChunkLoader(h5chunk.Windows(path, ROBOT, 2), 4))


def test_an_episode_that_is_damaged_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = _robomimic(tmp_path / "robot.h5")
    with h5py.File(path) as file:
        ends = [each.id.get_offset() + each.nbytes for each in (file[f"data/demo_{n}/actions"] for n in (2, 10, 33))]
    windows = h5chunk.Windows(path, ROBOT, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[: max(ends) - 4])
    with pytest.raises(h5chunk.FileError, match=r"robot.h5: .*changed"):
        list(h5chunk.ChunkLoader(windows, 4))
    with pytest.raises(h5chunk.FileError, match=r"robot\.h5"):
        h5chunk.Windows(path, ROBOT, 3)
    path.write_bytes(whole.replace(b"TREE", b"EERT"))
    with pytest.raises(h5chunk.FileError, match=r"robot\.h5"):
        h5chunk.Windows(path, ROBOT, 3)


def test_lengths_of_episodes_that_do_not_add_up_and_other_arguments_are_errors(tmp_path: Path) -> None:
    path, fields = _flat(tmp_path / "flat.h5"), {"image": "image", "actions": "actions"}
    with h5py.File(path, "a") as file:
        file["ep_len"][0] = 8
    with pytest.raises(h5chunk.FieldError, match="'ep_len' add up to 25, but the fields have 26 rows"):
        h5chunk.Windows(path, fields, 2, episode_lengths="ep_len")
    for options in ({"stride": {"image": 3, "actions": 2}}, {"stride": {"x": 2}}, {"padding": "x"}, {"history": -1}):
        with pytest.raises(h5chunk.OptionError):
            h5chunk.Windows(path, fields, 2, **options)


@pytest.mark.parametrize("layout", ["robomimic", "flat", "aloha"])
def test_episodes_are_selected_by_name(layout: str, tmp_path: Path) -> None:
    windows = _make(layout, tmp_path, length=2)
    names = list(dict.fromkeys(windows.episode_names.tolist()))
    chosen = windows.of_episodes(np.array([names[2].encode(), names[0].encode()]))
    assert [*np.unique(chosen.episodes)] == [0, 2] and {*chosen.episode_names} == {names[0], names[2]}
    assert len(windows.of_episodes(names)) == len(windows)
    if layout == "robomimic":
        with h5py.File(next(tmp_path.iterdir())) as file:
            assert names == sorted(file["data"], key=lambda name: int(name.split("_")[1]))
    for wrong, message in (
        (["demo_999"], "'demo_999', which is no episode: the first episodes are named"),
        (names[0], "pass a list"),
        ([], "none of the episodes"),
    ):
        with pytest.raises(h5chunk.OptionError, match=message):
            windows.of_episodes(wrong)


def test_files_of_episodes_have_their_own_names(tmp_path: Path) -> None:
    for name in ("b.h5", "a.h5"):
        with h5py.File(tmp_path / name, "w") as file:
            file["data/demo_1/x"], file["data/demo_0/x"] = np.arange(3), np.arange(4)
    windows = h5chunk.Windows(tmp_path, {"x": "data/*/x"}, 3)
    assert windows.episode_names.tolist() == ["demo_0", "demo_0", "demo_1"] * 2
    assert len(windows.of_episodes(["demo_1"])) == 2


def test_workers_are_refused_with_the_name_of_the_threads(tmp_path: Path) -> None:
    with pytest.raises(h5chunk.OptionError, match="num_threads"):
        h5chunk.ChunkLoader(_make("flat", tmp_path, length=2), 4, num_workers=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["robomimic", "compressed", "flat"])
def test_future_goals_are_later_frames_drawn_anew_in_each_epoch(layout: str, tmp_path: Path) -> None:
    fields = {"goal": {"image": "future", "actions": "future"}, "length": 1, "padding": "edge"}
    windows = _make(layout, tmp_path, **fields, seed=3)
    starts = np.searchsorted(windows.episodes, np.arange(len(EPISODES)))
    steps = np.arange(len(windows)) - starts[windows.episodes]
    plain = windows[[*range(len(windows))]]

    def check(number: int, image: np.ndarray, action: np.ndarray) -> int:
        own = EPISODES[windows.episodes[number]]
        (later,) = [at for at, value in enumerate(own["actions"]) if np.array_equal(value, action[0])]
        assert np.array_equal(own["image"][later], image[0])
        assert min(steps[number] + 1, len(own["actions"]) - 1) <= later
        return later

    loader = h5chunk.ChunkLoader(windows, 4, seed=5)
    assert windows.fields[2:4] == ("image_goal", "actions_goal")
    epochs: list[dict[int, int]] = []
    batches: list[list[np.ndarray]] = []
    for _ in range(3):
        drawn: dict[int, int] = {}
        for numbers, batch in zip(loader.batch_sampler.order.batches(), loader, strict=True):
            batches.append([each.numpy().copy() for each in batch])
            for number, image, action in zip(numbers.tolist(), batch[2].numpy(), batch[3].numpy(), strict=True):
                drawn[number] = check(number, image, action)
        epochs.append(drawn)
    assert len({tuple(sorted(each.items())) for each in epochs}) == 3
    goals = zip(plain[2].numpy(), plain[3].numpy(), strict=True)
    first = [check(number, *each) for number, each in enumerate(goals)]
    assert all(first != [drawn[number] for number in range(len(windows))] for drawn in epochs)
    started, resumed = (h5chunk.ChunkLoader(windows, 4, seed=5) for _ in range(2))
    for _ in started:  # epoch 0
        pass
    epoch = iter(started)
    next(epoch)
    resumed.load_state_dict(started.state_dict())
    per_epoch = len(batches) // 3
    rest = [[each.numpy().copy() for each in batch] for batch in resumed]
    assert len(rest) == per_epoch - 1
    for own, expected in zip(rest, batches[per_epoch + 1 :], strict=False):
        assert all(np.array_equal(*pair) for pair in zip(own, expected, strict=True))
    dataset = torch.utils.data.DataLoader(windows, batch_sampler=h5chunk.ChunkSampler(windows, 4, seed=5))
    for own, expected in zip(dataset, batches[:per_epoch], strict=True):
        assert all(np.array_equal(*pair) for pair in zip(own, expected, strict=True))


@pytest.mark.parametrize(("stride", "padding"), [(1, "none"), (1, "edge"), (2, "edge"), (3, "none")])
@pytest.mark.parametrize("resident", [False, True])
def test_long_windows_of_series_need_memory_for_their_frames_only(
    stride: int, padding: str, resident: bool, tmp_path: Path
) -> None:
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("x", data=np.arange(5_000, dtype=np.float32) + 5_000 * number, chunks=(500,))
    options = {"history": 100, "stride": stride, "padding": padding}
    windows = h5chunk.Windows(sorted(tmp_path.glob("*.h5")), {"x": "x"}, 1_000, **options)
    steps = np.arange(-100, 1_000) * stride
    edges = (0, 4_999) if padding == "edge" else (-steps[0], 4_999 - steps[-1])
    anchors = np.concatenate([np.arange(edges[0], edges[1] + 1) + first for first in (0, 5_000)])
    limits = anchors // 5_000 * 5_000
    rows = np.clip(anchors[:, None] + steps, limits[:, None], limits[:, None] + 4_999)
    order = [list(batch) for batch in h5chunk.ChunkSampler(windows, 100, window_chunks=3)]
    sampler = h5chunk.ChunkSampler(windows, 100, window_chunks=3)
    with h5chunk.ChunkLoader(windows, batch_sampler=sampler, memory_bytes=32 << 20, resident=resident) as loader:
        for samples, (batch, *_) in zip(order, loader, strict=True):
            assert np.array_equal(batch, rows[samples])


@pytest.mark.parametrize("options", [{"length": 1 << 30}, {"length": 1, "history": 1 << 30, "stride": 1 << 30}])
def test_impossibly_long_windows_are_refused_at_once(tmp_path: Path, options: Any) -> None:
    with h5py.File(tmp_path / "long.h5", "w") as file:
        file["x"] = np.arange(30.0)
    with pytest.raises(h5chunk.OptionError, match="the limit is 67108864"):
        h5chunk.Windows(tmp_path / "long.h5", {"x": "x"}, **options)


def test_a_negative_length_of_an_episode_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "long.h5", "w") as file:
        file["x"], file["lengths"] = np.arange(30.0), [40, -10]
    with pytest.raises(h5chunk.FieldError, match="'lengths' has the negative length -10"):
        h5chunk.Windows(tmp_path / "long.h5", {"x": "x"}, 2, episode_lengths="lengths")


def test_a_state_does_not_fit_a_file_whose_later_episodes_have_other_names(tmp_path: Path) -> None:
    loaders = []
    for names in ("abc", "ayz"):
        with h5py.File(tmp_path / f"{names}.h5", "w") as file:
            for name in names:
                file[f"data/{name}/x"] = np.arange(10.0)
        loaders.append(h5chunk.ChunkLoader(h5chunk.Windows(tmp_path / f"{names}.h5", {"x": "data/*/x"}, 2), 2))
    next(iter(loaders[0]))
    with pytest.raises(h5chunk.StateError, match="another file"):
        loaders[1].load_state_dict(loaders[0].state_dict())


def test_a_star_in_several_names_finds_episodes_in_nested_groups(tmp_path: Path) -> None:
    names = ["kitchen/ep_2", "kitchen/ep_10", "table2/ep_1", "table10/ep_1"]
    with h5py.File(tmp_path / "nested.h5", "w") as file:
        file["version"] = 3
        for number, name in enumerate(names):
            file[f"{name}/actions"] = np.full((4, 2), number)
            file[f"states/{name}"] = np.full((4, 3), number)
        file["kitchen/about"] = np.zeros(5)
    fields = {"actions": "*/ep_*/actions", "state": "states/*/ep_*"}
    dataset = h5chunk.Windows(tmp_path / "nested.h5", fields, 3)
    assert dataset.episode_names.tolist() == [name for name in names for _ in range(2)]
    actions, state = dataset[list(range(len(dataset)))]
    assert actions[:, 0, 0].tolist() == state[:, 0, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(dataset.of_episodes(["table2/ep_1"])) == 2
    patches = h5chunk.Patches(tmp_path / "nested.h5", {"actions": "*/ep_*/actions"}, (2, 2))
    assert patches[0][0].shape == (2, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"actions": "data/d*_*/actions"}, "one \\* in a name"),
        ({"actions": "data/*/actions", "image": "data/*/*/image"}, "same number of"),
        ({"actions": "data/other_*/actions"}, "nothing matches 'data/other_"),
        ({"actions": "missing/*/actions"}, "'missing' does not exist"),
        ({"actions": "data/*/actions", "image": "data/demo_1*/obs/image"}, "some of the fields have the episode"),
    ],
)
def test_patterns_that_do_not_name_episodes_are_errors(fields: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(h5chunk.H5ChunkError, match=message):
        h5chunk.Windows(_robomimic(tmp_path / "demos.h5"), fields, 2)


def test_values_are_those_of_the_current_time_steps(tmp_path: Path) -> None:
    with h5py.File(_flat(tmp_path / "a.h5"), "a") as file:
        file["reward"] = np.arange(float(sum(LENGTHS)))
    windows = h5chunk.Windows(tmp_path / "a.h5", ["image"], 3, history=1, episode_lengths="ep_len")
    current = np.concatenate(
        [np.arange(1, length - 2) + start for start, length in zip((0, 9, 14), LENGTHS, strict=True)]
    )
    assert windows.values("reward").tolist() == current.tolist()
    assert windows.subset([2, 5]).values("reward").tolist() == current[[2, 5]].tolist()
    with pytest.raises(h5chunk.FieldError, match="name a field with one value per sample"):
        windows.values("image")
    with pytest.raises(h5chunk.FieldError, match="there is no field 'reward': pass one of image, actions"):
        _make("groups", tmp_path, length=2).values("reward")


@pytest.mark.parametrize("layout", ["flat", "groups", "aloha"])
def test_windows_are_transformed_numbered_and_named(layout: str, tmp_path: Path) -> None:
    fields = {"image": ROBOT["image"], "n": "sample_number", "actions": ROBOT["actions"]}
    windows = _make(layout, tmp_path, length=4, padding="edge")
    plain, mean = windows[[7, 2]], lambda frames: frames.float().mean()
    normalize = Normalize((0.5, 0.5, 0.5), (0.1, 0.2, 0.5))
    changed = windows.with_transforms({"image": [normalize], "actions": [mean]})
    frames, means, *masks = changed[[7, 2]]
    expected = (plain[0] / 255 - 0.5) / torch.tensor([0.1, 0.2, 0.5])
    torch.testing.assert_close(frames, expected)
    torch.testing.assert_close(means, torch.stack([mean(each) for each in plain[1]]))
    assert all(torch.equal(mask, same) for mask, same in zip(masks, plain[2:], strict=True))
    assert windows.source_names.tolist() == windows.episode_names.tolist()
    if layout == "groups":
        with h5chunk.Windows(tmp_path / "robot.h5", fields, 4, transforms=[normalize]) as numbered:
            assert numbered.fields == ("image", "n", "actions") and numbered[5][1] == 5
            assert [int(number) for number in numbered.subset([3, 9])[:][1]] == [0, 1]
            assert numbered.values("n").tolist() == [*range(len(numbered))]
