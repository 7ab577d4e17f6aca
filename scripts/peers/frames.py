"""Readers of frames that are stored as JPEG, which `bench_windows.py` compares: h5py's and Lance's, both at their best.

All tables have the same JPEG bytes. Both readers decode with simplejpeg, and only the frames of a window, without the
steps between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

FOLDER = "jpeg"
QUALITY = 90


def make_world(path: Path, episodes: Any) -> None:
    """Make a file like stable-worldmodel's, with a JPEG of variable length for each step.

    ``episodes`` yields the frames, (n, H, W, 3) uint8, and the actions, (n, k), of each episode.
    """
    import simplejpeg

    path.parent.mkdir(exist_ok=True)
    images, actions, lengths = [], [], []
    for frames, own in episodes:
        images += [np.frombuffer(simplejpeg.encode_jpeg(frame, QUALITY), np.uint8) for frame in frames]
        actions.append(own.astype(np.float32))
        lengths.append(len(frames))
    with h5py.File(path, "w") as file:
        pixels = file.create_dataset("pixels", (len(images),), h5py.vlen_dtype(np.uint8))
        for number, image in enumerate(images):
            pixels[number] = image
        file["action"], file["ep_len"] = np.concatenate(actions), np.array(lengths, np.int32)
        file["ep_offset"] = np.cumsum([0, *lengths[:-1]])


class JpegWindows:
    """The windows of a table: ``steps`` frames, ``skip`` time steps apart, and the actions of all time steps."""

    def __init__(self, path: Path, steps: int, skip: int) -> None:
        self._path, self._skip, self._span, self._source = path, skip, steps * skip, None
        with h5py.File(path) as file:
            pairs = zip(file["ep_offset"][:].tolist(), file["ep_len"][:].tolist(), strict=True)
            firsts = [first + start for first, length in pairs for start in range(length - self._span + 1)]
            self.firsts, self._actions = np.array(firsts), file["action"][:]

    def __len__(self) -> int:
        return len(self.firsts)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        images, actions = self.batch([number])
        return images[0], actions[0]

    def batch(self, numbers: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the images and actions of windows. Frames that several of them have are decoded once."""
        from simplejpeg import decode_jpeg

        steps = self.firsts[np.asarray(numbers)][:, None] + np.arange(self._span)
        rows, where = np.unique(steps[:, :: self._skip], return_inverse=True)
        frames = np.stack([decode_jpeg(image) for image in self._read(rows)])
        return frames[where.reshape(len(steps), -1)], self._actions[steps]

    def _read(self, rows: np.ndarray) -> list[Any]:
        self._source = self._source or h5py.File(self._path)["pixels"]
        return [self._source[row] for row in rows.tolist()]


class LanceWindows(JpegWindows):
    """The same windows from a table of Lance, which is made if it is missing. A batch is one ``take``."""

    def __init__(self, path: Path, steps: int, skip: int) -> None:
        super().__init__(path, steps, skip)
        self._table = path.with_suffix(".lance")
        if not self._table.exists():
            import lance
            import pyarrow

            with h5py.File(path) as file:
                images = [image.tobytes() for image in file["pixels"]]
            lance.write_dataset(pyarrow.table({"pixels": pyarrow.array(images, pyarrow.binary())}), self._table)

    def _read(self, rows: np.ndarray) -> list[Any]:
        import lance

        self._source = self._source or lance.dataset(str(self._table))
        return [
            np.frombuffer(image.as_buffer(), np.uint8)
            for image in self._source.take(rows, columns=["pixels"])["pixels"]
        ]


READERS = {"h5py": JpegWindows, "lance": LanceWindows}


class Batches:
    """A reader whose items are whole batches, for a DataLoader that samples batches of numbers."""

    def __init__(self, windows: JpegWindows) -> None:
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, numbers: Any) -> Any:
        import torch

        return [torch.from_numpy(each) for each in self._windows.batch(numbers)]


def batches(
    kind: str, path: Path, shape: tuple[int, int], size: int, workers: int, *, shuffle: bool, **options: Any
) -> Iterator[Any]:
    """Yield the batches of ``h5py`` or ``lance`` in a DataLoader, for any number of epochs."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

    dataset = Batches(READERS[kind](path, *shape))
    sampler = BatchSampler((RandomSampler if shuffle else SequentialSampler)(dataset), size, drop_last=False)
    loader = DataLoader(dataset, None, sampler=sampler, num_workers=workers, persistent_workers=workers > 0, **options)
    while True:
        yield from loader
