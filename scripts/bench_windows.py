"""Compare windows of episodes, simulations and strain with the readers that the projects of these layouts use.

    python scripts/bench_windows.py FOLDER [--windows 4000] [--rounds 3] [--device cuda] [--json FILE]
    python scripts/bench_windows.py FOLDER --python robomimic=ENV/bin/python --python stable=ENV/bin/python
    python scripts/bench_windows.py FOLDER --files well/made.hdf5 strain/0.h5 --python well=ENV/bin/python
    python scripts/bench_windows.py FOLDER --files jpeg/world.h5 --python lance=ENV/bin/python

These files are generated in FOLDER. With smooth random images: ``robot.hdf5`` as robomimic writes it (a group for each
of 100 demonstrations, 84 x 84 pixels; windows of 10 time steps), and ``world.h5`` as stable-worldmodel writes it (all
episodes one after another, a chunk for each frame of 224 x 224 pixels; windows of 4 observations, 5 time steps apart,
with all 20 actions). ``world-100.h5`` has the same frames in compressed chunks of 100, and ``world.lance`` has them as
JPEG. ``jpeg/world.h5`` has the frames as JPEG of variable length, and ``jpeg/world.lance`` has the same bytes. There,
peers read and decode whole batches, with simplejpeg. ``well/made.hdf5`` has four simulations as The Well writes them
(windows of 5 steps of three fields on 128 x 384 points, read as ``h5chunk info`` recommends, and stacked as channels; a
tenth of ``--windows`` is timed). ``strain/0.h5`` to ``3.h5`` have the strain of two detectors (kernels of 8192 samples
at random positions, from `h5chunk.Patches`).

Peers run in a DataLoader with 0 and 2 workers, in separate processes; they need ``pip install robomimic``, ``pip
install stable-worldmodel`` with lancedb, ``pip install the_well``, ``pip install ml4gw`` or, for JPEG, ``pip install
pylance``. Peers that cannot be imported are listed as "not installed".

In each round all contenders take turns. A turn makes the reader, and times its first batch and ``--windows`` windows
in random order, after a warm-up of as many windows. Before the first turn each contender reads the first 256 windows in
order, and the sums of their values must be the same for all readers of the file. For ``world.lance``, whose JPEG
images are not exact, only the sums of the actions are compared.

Prints for each file the time to the first batch, windows/s (median and range of the rounds; without workers, also per
second of processor time), and the ratio to the fastest peer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from peers import frames, series

BATCH, CHECKED = 64, 256
LENGTH, STEPS, SKIP = 10, 4, 5
ROBOT = {"image": "data/*/obs/agentview_image", "pos": "data/*/obs/robot0_eef_pos", "actions": "data/*/actions"}
WORLD = {"image": "pixels", "actions": "action"}
FILES = ("robot.hdf5", "world.h5", "world-100.h5", "jpeg/world.h5", "well/made.hdf5", "strain/0.h5")
PEERS = {
    "robot.hdf5": ("h5py:0", "h5py:2", "robomimic:0", "robomimic:2"),
    "world.h5": ("h5py:0", "h5py:2", "stable:0", "stable:2", "lance:0", "lance:2"),
    "world-100.h5": ("h5py:0", "h5py:2", "stable:0", "stable:2"),
    "jpeg/world.h5": ("h5py:0", "h5py:2", "lance:0", "lance:2"),
    "well/made.hdf5": ("h5py:0", "h5py:2", "well:0", "well:2"),
    "strain/0.h5": ("h5py:0", "h5py:2", "ml4gw:0", "ml4gw:2"),
}
WORLD_LENGTHS = [80 + episode % 40 for episode in range(40)]
CACHE_BYTES = 256 << 20  # size of h5py's chunk cache in stable-worldmodel


def pictures(count: int, size: int, seed: int) -> np.ndarray:
    """Return smooth pictures that differ from frame to frame: (count, size, size, 3) uint8."""
    random = np.random.default_rng(seed)
    waves = random.uniform(0.02, 0.2, (3, 3))
    steps = np.arange(count)[:, None, None, None], np.arange(size)[:, None, None], np.arange(size)[:, None]
    phase = sum(step * wave for step, wave in zip(steps, waves, strict=True))
    return (127 + 100 * np.sin(phase) + random.integers(0, 8, (count, size, size, 1))).astype(np.uint8)


def make_files(folder: Path, names: list[str]) -> None:
    random = np.random.default_rng(0)
    for name, make in (("well/made.hdf5", series.make_well), ("strain/0.h5", series.make_strain)):
        if name in names and not (folder / name).exists():
            make(folder / name)
    if "robot.hdf5" in names and not (folder / "robot.hdf5").exists():
        with h5py.File(folder / "robot.hdf5", "w") as file:
            for demo in range(100):
                length = 120 + demo % 60
                group = file.create_group(f"data/demo_{demo}")
                group.attrs["num_samples"] = length
                group["obs/agentview_image"] = pictures(length, 84, demo)
                group["obs/robot0_eef_pos"] = random.normal(size=(length, 3)).astype(np.float32)
                group["actions"] = random.normal(size=(length, 7)).astype(np.float32)
    if "jpeg/world.h5" in names and not (folder / "jpeg/world.h5").exists():
        frames.make_world(folder / "jpeg/world.h5", world_episodes(random))
    if (folder / "world.h5").exists() or not {"world.h5", "world-100.h5"} & {*names}:
        return
    lengths = np.array(WORLD_LENGTHS, np.int32)
    offsets = np.append(0, np.cumsum(lengths)[:-1])
    with h5py.File(folder / "world.h5", "w") as file, h5py.File(folder / "world-100.h5", "w") as packed:
        for each, chunk in ((file, 1), (packed, 100)):
            options = {"compression": "gzip", "compression_opts": 1} if chunk > 1 else {}
            shape = (int(lengths.sum()), 224, 224, 3)
            each.create_dataset("pixels", shape, np.uint8, chunks=(chunk, *shape[1:]), **options)
            each.create_dataset("action", (shape[0], 2), np.float32, chunks=(chunk, 2))
            each["ep_len"], each["ep_offset"] = lengths, offsets
        for first, (images, actions) in zip(offsets.tolist(), world_episodes(random), strict=True):
            rows = slice(first, first + len(images))
            for each in (file, packed):
                each["pixels"][rows], each["action"][rows] = images, actions


def world_episodes(random: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the frames and actions of each episode of stable-worldmodel's files."""
    for episode, length in enumerate(WORLD_LENGTHS):
        yield pictures(length, 224, episode), random.normal(size=(length, 2))


class NaiveReader:
    """The usual reader: open the file once in each process, and read the steps of a window by slices."""

    def __init__(self, path: Path) -> None:
        self._path, self._file, self.windows = path, None, []
        self._is_robot = path.name == "robot.hdf5"
        with h5py.File(path) as file:
            if self._is_robot:
                names = sorted(file["data"], key=lambda name: int(name.removeprefix("demo_")))
                ends = [(f"data/{name}", 0, len(file[f"data/{name}/actions"]), LENGTH) for name in names]
            else:
                pairs = zip(file["ep_offset"][:].tolist(), file["ep_len"][:].tolist(), strict=True)
                ends = [("", first, length, STEPS * SKIP) for first, length in pairs]
        for group, first, length, span in ends:
            self.windows += [(group, first + start) for start in range(length - span + 1)]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self._file = self._file or h5py.File(self._path, rdcc_nbytes=CACHE_BYTES)
        group, start = self.windows[index]
        if self._is_robot:
            own = self._file[group]
            return own["obs/agentview_image"][start : start + LENGTH], own["actions"][start : start + LENGTH]
        stop = start + STEPS * SKIP
        return self._file["pixels"][start:stop][::SKIP], self._file["action"][
            start:stop
        ]  # strides in h5py would take 10 times as long


def robomimic_reader(path: Path) -> Any:
    """Return robomimic's reader, which keeps everything except images in memory."""
    import robomimic.utils.obs_utils as utils
    from robomimic.utils.dataset import SequenceDataset

    utils.initialize_obs_utils_with_obs_specs({"obs": {"rgb": ["agentview_image"], "low_dim": ["robot0_eef_pos"]}})
    return SequenceDataset(
        str(path),
        obs_keys=("agentview_image", "robot0_eef_pos"),
        dataset_keys=("actions",),
        seq_length=LENGTH,
        pad_seq_length=False,
        hdf5_cache_mode="low_dim",
        load_next_obs=False,
    )


def stable_reader(path: Path) -> Any:
    """Return stable-worldmodel's reader of HDF5 files."""
    from stable_worldmodel.data.formats.hdf5 import HDF5Dataset

    return HDF5Dataset(path=path, frameskip=SKIP, num_steps=STEPS, keys_to_load=["pixels", "action"])


def lance_reader(path: Path) -> Any:
    """Return stable-worldmodel's reader of Lance. The table is made from the HDF5 file if it is missing."""
    from stable_worldmodel.data.formats.lance import LanceDataset, LanceWriter

    table = path.with_suffix(".lance")
    if not table.exists():
        with h5py.File(path) as file, LanceWriter(table) as writer:
            for first, length in zip(file["ep_offset"][:].tolist(), file["ep_len"][:].tolist(), strict=True):
                rows = slice(first, first + length)
                writer.write_episode({"pixels": [*file["pixels"][rows]], "action": [*file["action"][rows]]})
    return LanceDataset(path=table, frameskip=SKIP, num_steps=STEPS)


READERS: dict[str, Callable[[Path], Any]] = {
    "h5py": NaiveReader,
    "robomimic": robomimic_reader,
    "stable": stable_reader,
    "lance": lance_reader,
}


def parts_of(batch: Any) -> tuple[Any, Any]:
    """Return the images and actions of a batch of any reader. A tensor of fields or strain is both."""
    if hasattr(batch, "shape"):
        return batch, batch[:, :1]
    if not isinstance(batch, dict):
        return batch[0], batch[-1]
    images = batch["obs"]["agentview_image"] if "obs" in batch else batch["pixels"]
    return images, batch["actions"] if "actions" in batch else batch["action"]


def peer_batches(name: str, path: Path, *, shuffle: bool) -> Iterator[Any]:
    """Yield the batches of a peer, which is specified as NAME:WORKERS."""
    from torch.utils.data import DataLoader

    kind, _, workers = name.partition(":")
    if path.parent.name in series.BATCHES:
        return series.peer_batches(kind, path, int(workers), shuffle=shuffle)
    more = {"multiprocessing_context": "spawn" if kind == "lance" else "fork"} if int(workers) else {}
    if path.parent.name == frames.FOLDER:
        return frames.batches(kind, path, (STEPS, SKIP), BATCH, int(workers), shuffle=shuffle, **more)
    return iter(DataLoader(READERS[kind](path), BATCH, shuffle=shuffle, num_workers=int(workers), **more))


def own_batches(name: str, path: Path, *, shuffle: bool) -> Iterator[Any]:
    """Yield batches of h5chunk's windows."""
    import h5chunk

    if path.parent.name in series.BATCHES:
        return series.own_batches(name, path, shuffle=shuffle, device=DEVICE)
    if path.name == "robot.hdf5":
        windows = h5chunk.Windows(path, ROBOT, LENGTH)
    else:
        stride = {"image": SKIP, "actions": 1}
        windows = h5chunk.Windows(path, WORLD, STEPS, stride=stride, episode_lengths="ep_len")
    loader = h5chunk.ChunkLoader(windows, BATCH, shuffle=shuffle, device=DEVICE, reuse=name == "h5chunk:reuse")

    def epochs() -> Iterator[Any]:
        while True:
            yield from loader

    return epochs()


DEVICE = "cpu"


def run_turn(name: str, path: Path, count: int, device: str) -> dict[str, Any]:
    """Run one contender here; return seconds to its first batch, and windows/s, or sums without ``count``."""
    import torch

    global DEVICE
    DEVICE = device
    make = own_batches if name.startswith("h5chunk") else peer_batches
    if not count:
        sums: list[list[float]] = [[], []]
        for batch in make(name, path, shuffle=False):
            for own, part in zip(sums, parts_of(batch), strict=True):
                own += [float(np.asarray(each.cpu()).astype(np.float64).sum()) for each in part]
            if len(sums[0]) >= CHECKED:
                return {"sums": [own[:CHECKED] for own in sums]}
    start = time.perf_counter()
    batches, left = make(name, path, shuffle=True), 2 * count
    first_s = began = 0.0
    for batch in batches:
        images, _ = (part.to(device, non_blocking=True) for part in parts_of(batch))
        left -= len(images)
        first_s = first_s or time.perf_counter() - start
        if left <= count and not began:
            torch.cuda.synchronize() if device != "cpu" else None
            began, counted, cpu_s = time.perf_counter(), left, time.process_time()
        if left <= 0:
            break
    torch.cuda.synchronize() if device != "cpu" else None
    count, cpu_s = counted - left, time.process_time() - cpu_s
    return {"first_s": first_s, "rate": count / (time.perf_counter() - began), "per_cpu_s": count / cpu_s}


def ask(name: str, path: Path, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run a turn in a separate process. If it fails, ``trouble`` is the reason."""
    pythons = dict(each.split("=", 1) for each in options.python)
    kind = name.split(":")[0]
    kind = "stable" if kind == "lance" and kind not in pythons else kind
    own = [sys.argv[0], str(path), "--turn", name, "--windows", str(count), "--device", options.device]
    done = subprocess.run([pythons.get(kind, sys.executable), *own], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"trouble": "not installed" if "ModuleNotFoundError" in last else last[:90]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def compare(file: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run all contenders on one file, print a table, and return the results of all rounds."""
    path, count = options.folder / file, options.windows // (10 if file.startswith("well") else 1)
    names = ["h5chunk:new", *(["h5chunk:reuse"] if options.device == "cpu" else []), *PEERS[file]]
    checked = {name: ask(name, path, 0, options) for name in names}
    expected = checked["h5py:0"]["sums"]
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names[:: -1 if number % 2 else 1]:
            if "trouble" not in checked[name]:
                turn = ask(name, path, count, options)
                checked[name] |= {key: why for key, why in turn.items() if key == "trouble"}
                rounds[name] += [turn] * ("rate" in turn)
    print(f"{file}, load {os.getloadavg()[0]:.1f}")
    medians = {name: statistics.median(turn["rate"] for turn in turns) for name, turns in rounds.items() if turns}
    best = max(rate for name, rate in medians.items() if not name.startswith("h5chunk"))
    for name in names:
        if name not in medians:
            print(f"  {name:15} {checked[name]['trouble']}")
            continue
        parts = zip(checked[name]["sums"], expected, strict=True)
        equal = [np.allclose(got, want, rtol=1e-9) for got, want in parts]
        values = "equal" if all(equal) else "equal actions" if equal[1] and name.startswith("lance") else "DIFFERENT"
        rates, first = [turn["rate"] for turn in rounds[name]], statistics.median(t["first_s"] for t in rounds[name])
        per_cpu_s = statistics.median(turn["per_cpu_s"] for turn in rounds[name])
        by_cpu = "" if name.endswith(":2") else f", {per_cpu_s:,.0f} per second of processor time"
        print(
            f"  {name:15} first batch {first:5.2f} s  {medians[name]:8,.0f} windows/s ({min(rates):,.0f} to "
            f"{max(rates):,.0f}){by_cpu}  {medians[name] / best:5.2f} of the best peer  values {values}"
        )
    return {"checked": {name: "trouble" not in each for name, each in checked.items()}, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--windows", type=int, default=4000, help="windows to time in a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--files", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH", help="interpreter of a peer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        print(json.dumps(run_turn(options.turn, options.folder, options.windows, options.device)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    make_files(options.folder, options.files)
    results = {name: compare(name, options) for name in options.files}
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
