"""Windows of frames that are stored as JPEG or PNG: values, layouts, damaged frames, and decoding only once."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from support.encoded import FLAT, LENGTHS, ROBOT, SIZE, by_pillow, encoded, flat, frames, pictures, put, robot
from support.loaders import loader_by
from support.scripts import needs_gpu
from torch.utils.data import DataLoader

import h5chunk
from h5chunk.sources.frame_decoder import FRAME_DECODER
from h5chunk.transforms import Normalize


def expected(episodes: list[list[np.ndarray]], steps: range) -> np.ndarray:
    """The frames of all windows, decoded by Pillow one by one."""
    decoded = [np.stack([by_pillow(image) for image in images]) for images in episodes]
    return np.stack(
        [images[np.array(steps) + anchor] for images in decoded for anchor in range(-steps[0], len(images) - steps[-1])]
    )


def loaded(windows: h5chunk.Windows, **options: Any) -> torch.Tensor:
    return torch.cat([batch[0] for batch in loader_by(windows, 4, shuffle=False, **options)])


@pytest.mark.parametrize("form", ["vlen", "padded", "rows", "compressed", "text"])
@pytest.mark.parametrize("layout", ["robot", "flat"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_frames_are_those_that_pillow_decodes_however_they_are_read(
    form: str, layout: str, kind: str, tmp_path: Path
) -> None:
    episodes = frames(kind)
    make, fields, options = (robot, ROBOT, {}) if layout == "robot" else (flat, FLAT, {"episode_lengths": "ep_len"})
    windows = h5chunk.Windows(make(tmp_path / "a.h5", episodes, form), fields, 2, history=1, **options)
    wanted = expected(episodes, range(-1, 2))
    assert windows.field("image").sample_shape == (3, *SIZE, 3)
    assert len(windows) == len(wanted)
    assert np.array_equal(np.stack([windows[number][0] for number in range(len(windows))]), wanted)
    for reader in ("auto", "h5py"):
        assert np.array_equal(loaded(windows, reader=reader), wanted)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("missing", [("native.jpeg.load",), ("native.jpeg.load", "sources.decode_frame.simplejpeg")])
def test_each_decoder_returns_the_same_values(
    kind: str, missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in missing:
        monkeypatch.setattr(f"h5chunk.{name}", (lambda _: None) if name.endswith("load") else None)
    episodes = frames(kind)
    windows = h5chunk.Windows(robot(tmp_path / "a.h5", episodes), ROBOT, 2)
    assert np.array_equal(loaded(windows), expected(episodes, range(2)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_grey_frames_have_one_channel(kind: str, tmp_path: Path) -> None:
    episodes = frames(kind, channels=1)
    windows = h5chunk.Windows(robot(tmp_path / "a.h5", episodes), ROBOT, 2)
    assert windows.field("image").sample_shape == (2, *SIZE, 1)
    assert np.array_equal(loaded(windows), expected(episodes, range(2)))


def test_grey_frames_among_coloured_ones_become_coloured_but_not_the_reverse(tmp_path: Path) -> None:
    episodes = frames()
    episodes[1][3], episodes[2][1] = frames("JPEG", channels=1)[1][3], frames("PNG", channels=1)[2][1]
    windows = h5chunk.Windows(robot(tmp_path / "a.h5", episodes), ROBOT, 1)
    wanted = [np.broadcast_to(by_pillow(image), (*SIZE, 3)) for images in episodes for image in images]
    assert np.array_equal(loaded(windows)[:, 0], np.stack(wanted))
    grey = frames("JPEG", channels=1)
    grey[1][3] = frames()[1][3]
    windows = h5chunk.Windows(robot(tmp_path / "b.h5", grey), ROBOT, 1)
    with pytest.raises(h5chunk.FileError, match=r"'data/demo_10/obs/image', frame 3: is 24 x 20 in RGB, but .* GRAY"):
        loaded(windows)


def overwrite(path: Path, row: int, image: np.ndarray) -> None:
    with h5py.File(path, "a") as file:
        file["data/demo_10/obs/image"][row] = image


def flipped(image: np.ndarray) -> np.ndarray:
    changed = image.copy()
    changed[-200:-100] = 0
    return changed


SMALL = np.zeros((8, 8, 3), np.uint8)
DAMAGED = {
    "another size": (lambda _: encoded(SMALL), "is 8 x 8 in RGB, but frame 0 is 24 x 20 in RGB: all frames must have"),
    "a PNG of another size": (lambda _: encoded(SMALL, "PNG"), "is 8 x 8 in RGB, but frame 0 is 24 x 20 in RGB"),
    "cut short": (lambda image: image[: len(image) // 2], "cannot be decoded|is damaged|is not a JPEG"),
    "flipped bytes": (flipped, "cannot be decoded|is damaged"),
    "empty": (lambda image: image[:0], "has 0 bytes, so it is damaged or was never written"),
    "zeros": (lambda image: image * 0, "is not a JPEG or PNG image"),
    "much too long": (lambda image: np.append(image, np.zeros(1 << 17, np.uint8)), "has 13.* bytes, so it is damaged"),
    "alpha": (lambda _: encoded(np.zeros((*SIZE, 4), np.uint8), "PNG"), "has mode RGBA, but windows support only"),
    "another format": (lambda _: encoded(np.zeros((*SIZE, 3), np.uint8), "BMP"), "is not a JPEG or PNG image"),
}


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_frame_that_cannot_be_used_is_named(damage: str, kind: str, tmp_path: Path) -> None:
    change, text = DAMAGED[damage]
    episodes, path = frames(kind), tmp_path / "a.h5"
    robot(path, episodes)
    overwrite(path, 3, change(episodes[1][3]))
    windows = h5chunk.Windows(path, ROBOT, 2)
    match = f"a.h5: 'data/demo_10/obs/image', frame 3: ({text})"
    for read in (lambda: loaded(windows), lambda: loaded(windows, reader="h5py"), lambda: windows[11]):
        with pytest.raises(h5chunk.FileError, match=match):
            read()
    assert np.array_equal(windows[0][0], expected(episodes, range(2))[0])


@pytest.mark.parametrize("form", ["vlen", "padded"])
def test_a_first_frame_that_cannot_be_used_is_named_at_once(form: str, tmp_path: Path) -> None:
    episodes = frames()
    header = encoded(pictures(1, 0)[0], "PNG").copy()
    header[16:24] = np.frombuffer(np.array([9000, 9000], ">u4").tobytes(), np.uint8)
    header[29:33] = np.frombuffer(zlib.crc32(header[12:29].tobytes()).to_bytes(4, "big"), np.uint8)
    deep = io.BytesIO()
    Image.fromarray(np.zeros(SIZE, np.uint16)).save(deep, "PNG")
    cases = {
        "more than 8 bits": np.frombuffer(deep.getvalue(), np.uint8),
        "claims 9000 x 9000 pixels in .* bytes, so it is damaged": header,
        "is not a JPEG or PNG image, or is damaged": episodes[1][0][:20],
        "has mode RGBA": encoded(np.zeros((*SIZE, 4), np.uint8), "PNG"),
    }
    for number, (text, image) in enumerate(cases.items()):
        episodes[1][0] = image
        path = robot(tmp_path / f"{number}.h5", episodes, form)
        with pytest.raises(h5chunk.FileError, match=rf"{number}.h5: 'data/demo_10/obs/image', frame 0: .*{text}"):
            h5chunk.Windows(path, ROBOT, 2)


def test_episodes_of_another_size_or_without_images_are_errors(tmp_path: Path) -> None:
    episodes = frames()
    episodes[1] = [encoded(SMALL) for _ in episodes[1]]
    with pytest.raises(h5chunk.FieldError, match=r"demo_10.* has the sample shape \[8, 8, 3\], but in .*demo_2"):
        h5chunk.Windows(robot(tmp_path / "a.h5", episodes), ROBOT, 2)
    episodes[1] = [np.arange(8, dtype=np.uint8)] * 5
    with pytest.raises(h5chunk.FieldError, match=r"is arrays of variable length, but in .* it is JPEG or PNG images"):
        h5chunk.Windows(robot(tmp_path / "b.h5", episodes), ROBOT, 2)


@pytest.mark.parametrize("form", ["vlen", "padded"])
@pytest.mark.parametrize("empty", ["demo_1", "demo_5"])
@pytest.mark.filterwarnings("ignore:.*1 of 4 episodes skipped")
def test_an_episode_without_frames_has_no_windows(form: str, empty: str, tmp_path: Path) -> None:
    episodes = frames()
    path = robot(tmp_path / "a.h5", episodes, form)
    with h5py.File(path, "a") as file:
        shape, dtype = ((0,), h5py.vlen_dtype(np.uint8)) if form == "vlen" else ((0, 9), np.uint8)
        file.create_dataset(f"data/{empty}/obs/image", shape, dtype)
        file[f"data/{empty}/actions"] = np.zeros((0, 1), np.float32)
    windows = h5chunk.Windows(path, ROBOT, 2)
    for reader in ("auto", "h5py"):
        assert np.array_equal(loaded(windows, reader=reader), expected(episodes, range(2)))
    assert windows.chunk_samples <= sum(LENGTHS)


def test_files_that_store_images_in_two_ways_are_an_error(tmp_path: Path) -> None:
    images = [encoded(picture) for picture in pictures(4, seed=0)]
    padded = np.zeros((4, max(map(len, images))), np.uint8)
    for row, image in zip(padded, images, strict=True):
        row[: len(image)] = image
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["camera"] = padded
    with h5py.File(tmp_path / "b.h5", "w") as file:
        rows = file.create_dataset("camera", (4,), h5py.vlen_dtype(np.uint8))
        for number, image in enumerate(images):
            rows[number] = image
    with pytest.raises(h5chunk.FieldError, match=r"b.h5: .* in arrays of variable length, but in .* in dense rows"):
        h5chunk.Windows([tmp_path / "a.h5", tmp_path / "b.h5"], ["camera"], 2)


def test_bytes_that_are_no_images_stay_bytes(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 255, (9, 64), np.uint8)
    rows[0, :3] = 0xFF, 0xD8, 0xFF
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = rows
        put(file, "vlen", list(rows[1:]), "vlen")
    windows = h5chunk.Windows(tmp_path / "a.h5", {"x": "x"}, 2)
    assert np.array_equal(loaded(windows)[:, 0], rows[:-1])
    with pytest.raises(h5chunk.FieldError, match="rows of 'x' differ in shape and are not JPEG or PNG images"):
        h5chunk.Windows(tmp_path / "a.h5", {"x": "vlen"}, 2)


class Counting(NamedTuple):
    """A decoder that counts the frames that it decodes."""

    shape_of: Any
    decode: Any
    decoded: list[int]

    @classmethod
    def new(cls) -> Counting:
        decoded: list[int] = []

        def decode(data: np.ndarray, bounds: np.ndarray, *more: Any) -> Any:
            decoded.append(len(bounds))
            return FRAME_DECODER.decode(data, bounds, *more)

        return cls(FRAME_DECODER.shape_of, decode, decoded)


def test_a_pass_decodes_each_frame_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting.new()
    monkeypatch.setattr("h5chunk.feed.windows.FRAME_DECODER", counting)
    windows = h5chunk.Windows(flat(tmp_path / "a.h5", frames()), FLAT, 4, episode_lengths="ep_len", trusted=True)
    with h5chunk.ChunkLoader(windows, len(windows), seed=1) as loader:
        for batch in loader:
            assert len(batch[0]) == len(windows)
            break
    assert {*counting.decoded} == {sum(LENGTHS)}  # for each epoch that was read ahead
    counting.decoded.clear()
    batch = windows[[3, 0, 1, 2, 2]]
    assert sum(counting.decoded) == 7
    assert torch.equal(batch[0][3], batch[0][4])
    assert torch.equal(batch[0][1, 3], batch[0][0, 0])


@pytest.mark.parametrize("task_bytes", [1, 5000])
def test_threads_divide_a_pass_between_frames(task_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting.new()
    monkeypatch.setattr("h5chunk.feed.windows.FRAME_DECODER", counting)
    monkeypatch.setattr("h5chunk.store.read.samples.TASK_BYTES", task_bytes)
    episodes = frames()
    windows = h5chunk.Windows(flat(tmp_path / "a.h5", episodes), FLAT, 3, episode_lengths="ep_len", trusted=True)
    order = [5, 0, 0, 1, 2, 9, 9]
    assert np.array_equal(windows[order][0], expected(episodes, range(3))[order])
    assert sum(counting.decoded) == 11
    assert len(counting.decoded) > (3 if task_bytes > 1 else 10)
    assert np.array_equal(loaded(windows), expected(episodes, range(3)))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_dataloader_read_the_same_windows(context: str, tmp_path: Path) -> None:
    episodes = frames()
    windows = h5chunk.Windows(robot(tmp_path / "a.h5", episodes), ROBOT, 3)
    sampler = h5chunk.ChunkSampler(windows, 4, shuffle=False)
    loader = DataLoader(windows, batch_sampler=sampler, num_workers=2, multiprocessing_context=context)
    assert np.array_equal(torch.cat([batch[0] for batch in loader]), expected(episodes, range(3)))


def test_padding_strides_goals_and_splits_apply_to_images(tmp_path: Path) -> None:
    episodes = frames()
    path = robot(tmp_path / "a.h5", episodes)
    stride = {"image": 3, "actions": 1}
    windows = h5chunk.Windows(path, ROBOT, 2, stride=stride, padding="edge", goal={"image": "last"})
    decoded = [np.stack([by_pillow(image) for image in images]) for images in episodes]
    wanted = [
        images[np.minimum([anchor, anchor + 3], len(images) - 1)] for images in decoded for anchor in range(len(images))
    ]
    by_name = dict(zip(windows.fields, windows[[*range(len(windows))]], strict=True))
    assert np.array_equal(by_name["image"], np.stack(wanted))
    goals = np.concatenate([np.broadcast_to(images[-1:], images.shape) for images in decoded])
    assert np.array_equal(by_name["image_goal"][:, 0], goals)
    assert by_name["image_is_pad"].sum() == 9
    part = windows.split([0.4, 0.6])[1]
    assert np.array_equal(loaded(part), np.stack(wanted)[part.samples])


NORMALIZE = {"image": [Normalize((0.5,) * 3, (0.2,) * 3)]}


@pytest.mark.parametrize("options", [{"resident": True}, {"reuse": True}, {"transforms": NORMALIZE}])
def test_images_are_resident_reused_and_normalised_like_pixels(options: dict[str, Any], tmp_path: Path) -> None:
    episodes = frames()
    windows = h5chunk.Windows(robot(tmp_path / "a.h5", episodes), ROBOT, 2)
    with h5chunk.ChunkLoader(windows, 4, shuffle=False, **options) as loader:
        found = torch.cat([batch[0].clone() for batch in loader])
    wanted = torch.from_numpy(expected(episodes, range(2)))
    if "transforms" in options:
        assert torch.allclose(found, (wanted / 255 - 0.5) / 0.2, atol=1e-5)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("form", ["vlen", "rows"])
def test_a_folder_with_a_file_per_episode(form: str, tmp_path: Path) -> None:
    episodes, folder = frames(), tmp_path / "aloha"
    folder.mkdir()
    for number, images in enumerate(episodes):
        with h5py.File(folder / f"episode_{number}.hdf5", "w") as file:
            put(file.create_group("observations"), "images/top", images, form)
            file["action"] = np.zeros((len(images), 14), np.float32)
    fields = {"image": "observations/images/top", "action": "action"}
    windows = h5chunk.Windows(folder, fields, 2)
    for reader in ("auto", "h5py"):
        assert np.array_equal(loaded(windows, reader=reader), expected(episodes, range(2)))
    with h5py.File(folder / "episode_1.hdf5", "a") as file:
        file["observations/images/top"][2] = 7 if form == "rows" else np.full(9, 7, np.uint8)
    windows = h5chunk.Windows(folder, fields, 2)
    with pytest.raises(h5chunk.FileError, match=r"episode_1.hdf5: 'observations/images/top', frame 2: is not a JPEG"):
        loaded(windows)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("resident", [False, True])
def test_images_on_each_device(device: str, resident: bool, tmp_path: Path) -> None:
    episodes = frames()
    windows = h5chunk.Windows(robot(tmp_path / "a.h5", episodes), ROBOT, 3)
    found = loaded(windows, device=device, resident=resident)
    assert np.array_equal(found.cpu(), expected(episodes, range(3)))
