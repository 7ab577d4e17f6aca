"""What the processes of a group do: a module of its own, which they import quickly."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from support.loader_files import IMAGES
from support.orders import ordered
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from h5chunk.errors import OptionError
from h5chunk.feed.dataset import ChunkDataset
from h5chunk.feed.loader import ChunkLoader
from h5chunk.feed.sampler import ChunkSampler
from h5chunk.transforms import ToDtype

WAIT_S = 60
ORDER = {"window_chunks": 4, "seed": 5}
TAILS: dict[str, dict[str, Any]] = {"exact": {}, "drop_last": {"drop_last": True}, "pad": {"pad": True}}


def start_ranks(folder: Path, world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Start processes that do ``work(rank, *args)`` in a process group, each with its result in a file."""
    context = multiprocessing.get_context("forkserver")
    folder.mkdir()
    ranks = [
        context.Process(target=run_rank, args=(rank, world_size, folder, work, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    return ranks


def run_rank(rank: int, world_size: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=WAIT_S / 2),  # ranks that wait for each other in vain end with an error
    )
    result = work(rank, *args)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    distributed.barrier()
    distributed.destroy_process_group()


def in_ranks(folder: Path, world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """The result of each rank."""
    ranks = start_ranks(folder, world_size, work, *args)
    for process in ranks:
        process.join(WAIT_S)
    assert [process.exitcode for process in ranks] == [0] * world_size
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def together(size: int) -> int:
    """How many samples all ranks have in this step: each rank must come here equally often."""
    count = torch.tensor(size)
    distributed.all_reduce(count)
    return int(count)


def refused(path: Path) -> list[str]:
    """What is said to those that were made before the process group: all ranks would read the same."""
    early = [
        ChunkLoader(**ordered(path, 16, rank=0, world_size=1)),
        ChunkSampler(ChunkDataset(path), 16, rank=0, world_size=1),
    ]
    assert all(len(list(each)) == 13 for each in early)  # as said
    said = []
    for each in early:
        each._given_rank = None
        try:
            next(iter(each))
        except OptionError as error:
            said.append(str(error))
    return said


def read_epoch(rank: int, path: Path, batch_size: int) -> dict[str, Any]:
    """Epochs of a loader and of a sampler that know of ranks by torch.distributed alone."""
    found: dict[str, Any] = {"early": refused(path)}
    for tail, options in TAILS.items():
        with ChunkLoader(**ordered(path, batch_size, **ORDER, **options)) as loader:
            assert (loader.order.rank, loader.order.world_size) == (rank, distributed.get_world_size())
            assert loader.order.lanes == distributed.get_world_size()
            batches, sizes = [], []
            for images, labels in loader:
                assert images.numpy().tobytes() == IMAGES[labels.numpy()].tobytes()
                batches.append(labels.tolist())
                sizes.append(together(len(labels)))
        sampler = ChunkSampler(ChunkDataset(path), batch_size, num_workers=0, **ORDER, **options)
        found[tail] = {"loader": batches, "sampler": list(sampler), "sizes": sizes}
    return found


def read_part(_rank: int, path: Path, global_batch: int, state: Any, count: int | None) -> dict[str, Any]:
    with ChunkLoader(**ordered(path, global_batch // distributed.get_world_size(), **ORDER, lanes=4)) as loader:
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)
        found = []
        for _, labels in islice(batches, count):
            together(len(labels))
            found.append(labels.tolist())
        state = loader.state_dict()
        batches.close()
    return {"batches": found, "state": state}


def train(rank: int, path: Path, folder: Path, pause_s: float) -> list[float]:
    """Two epochs of DDP, with a checkpoint after every third step; what each step sees goes to a log."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(90, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = ChunkLoader(**ordered(path, 12, **ORDER, lanes=4), transforms=[ToDtype(torch.float32, scale=True)])
    checkpoint, log, step = folder / "checkpoint.pt", folder / f"log{rank}", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
    while loader.order.epoch < 2:
        for images, labels in loader:
            optimizer.zero_grad()
            model(images.flatten(1)).square().sum().backward()
            optimizer.step()
            step += 1
            with log.open("a") as file:
                file.write(json.dumps([step, labels.tolist()]) + "\n")
            if step % 3 == 0 and rank == 0:
                state = {"model": model.state_dict(), "loader": loader.state_dict(), "step": step}
                torch.save(state, folder / "part")
                (folder / "part").rename(checkpoint)
            time.sleep(pause_s)
    loader.close()
    return [float(each) for each in model.module.weight.detach().flatten()]
