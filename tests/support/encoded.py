"""Files of episodes whose frames are stored as JPEG or PNG."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

LENGTHS = (9, 5, 12)
SIZE = (24, 20)
ROBOT = {"image": "data/*/obs/image", "actions": "data/*/actions"}
FLAT = {"image": "image", "actions": "actions"}


def encoded(pixels: np.ndarray, kind: str = "JPEG", **options: Any) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def by_pillow(data: np.ndarray) -> np.ndarray:
    pixels = np.asarray(Image.open(io.BytesIO(data.tobytes())))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def pictures(count: int, seed: int, channels: int = 3) -> np.ndarray:
    shape = (count, *SIZE, 3)[: 3 + (channels == 3)]
    return np.random.default_rng(seed).integers(0, 255, shape, np.uint8)


def frames(kind: str = "JPEG", channels: int = 3) -> list[list[np.ndarray]]:
    """The encoded frames of each episode."""
    episodes = [pictures(length, seed, channels) for seed, length in enumerate(LENGTHS)]
    return [[encoded(frame, kind) for frame in episode] for episode in episodes]


def put(group: h5py.Group, name: str, images: list[np.ndarray], form: str) -> None:
    """Store images in rows of variable length, or padded with zeros."""
    if form == "vlen":
        rows = group.create_dataset(name, (len(images),), h5py.vlen_dtype(np.uint8))
        for number, image in enumerate(images):
            rows[number] = image
        return
    length = max(map(len, images)) + 5
    padded = np.stack([np.pad(image, (0, length - len(image))) for image in images])
    if form == "text":
        group[name] = padded.view(f"S{length}")[:, 0]
        return
    options: dict[str, Any] = {"chunks": (4, length), "compression": "gzip"} if form == "compressed" else {}
    if form == "rows":
        options = {"chunks": (1, length)}
    group.create_dataset(name, data=padded, **options)


def robot(path: Path, episodes: list[list[np.ndarray]], form: str = "vlen") -> Path:
    with h5py.File(path, "w") as file:
        for name, images in zip((2, 10, 33), episodes, strict=True):
            group = file.create_group(f"data/demo_{name}")
            put(group, "obs/image", images, form)
            group["actions"] = np.arange(len(images), dtype=np.float32)[:, None] + name
    return path


def flat(path: Path, episodes: list[list[np.ndarray]], form: str = "vlen") -> Path:
    with h5py.File(path, "w") as file:
        put(file, "image", [image for images in episodes for image in images], form)
        lengths = [len(images) for images in episodes]
        file["actions"] = np.concatenate([np.arange(length) for length in lengths]).astype(np.float32)[:, None]
        file["ep_len"] = np.array(lengths)
    return path
