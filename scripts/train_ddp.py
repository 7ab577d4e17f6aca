"""Train on several GPUs with DistributedDataParallel, and measure scaling and how busy the data keeps each GPU.

    python scripts/make_packed.py data.h5 --count 60000                                         # 9 GB
    python scripts/train_ddp.py data.h5 --gpus 1 2 4 --compile [--json FILE]                    # 1.5 minutes each
    python scripts/make_packed.py small.h5 --count 3000 --size 32 32
    python scripts/train_ddp.py small.h5 --gpus 1 2 --model cnn --batch-size 32 --block 5       # a trial on a CPU

Starts torchrun for each number of GPUs (NCCL; gloo without GPUs). Each process reads its part of the file with a
ChunkLoader, without resident data, and trains in bf16 autocast and channels_last. Blocks of steps on real data and one
cached real batch take turns, in alternating order. All processes begin a block together.

Prints for each number of GPUs: images/s of a GPU on real data and on the cached batch (medians over blocks, means over
GPUs); the ratio of real to cached for each GPU (medians over pairs of blocks); and the ratio of both rates to those of
one GPU, which trains without DDP. ``--alone`` never uses DDP, so that any remaining loss is due to the data. Pixels
are random, because only rates matter. NVLink multicast is off. The models need torchvision.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models import MODELS, make_model
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import h5chunk
from h5chunk.transforms import Normalize, ToDtype

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WARM_STEPS = 20

Batch = tuple[torch.Tensor, torch.Tensor]


# --- one process of a group ------------------------------------------------------------------------------------------


class Worker:
    """A rank: its loader, its replica of the network, and a step of training."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.loader = h5chunk.ChunkLoader(
            args.path,
            args.batch_size,
            drop_last=True,
            device=device,
            transforms=[Normalize(MEAN, STD), ToDtype(torch.bfloat16, channels_last=True)],
            resident=False,
            num_threads=args.threads,
        )
        self.batches = self._forever()
        images, labels = next(self.batches)
        self.cached = images.clone(memory_format=torch.preserve_format), labels.clone()
        self.network = self._make_network(images)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.01, momentum=0.9)

    def _forever(self) -> Iterator[Batch]:
        while True:
            yield from self.loader

    def _make_network(self, images: torch.Tensor) -> nn.Module:
        torch.manual_seed(0)
        args, on_gpu = self.args, self.device.type == "cuda"
        network = make_model(args.model, args.classes, (images.shape[2], images.shape[3]))
        network.to(self.device, memory_format=torch.channels_last)
        if distributed.get_world_size() > 1 and not args.alone:
            # batch normalisation keeps separate statistics in each process, which is enough for training
            options = {"bucket_cap_mb": args.bucket_mb, "gradient_as_bucket_view": True, "broadcast_buffers": False}
            network = DistributedDataParallel(network, [self.device.index] if on_gpu else None, **options)
        return torch.compile(network) if args.compile else network  # DDP's reductions overlap the backward

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.network(images), labels)
        loss.backward()
        self.optimizer.step()

    def block(self, batch: Callable[[], Batch]) -> float:
        """Return images/s of a block of steps."""
        distributed.barrier()
        self.synchronize()
        started = time.perf_counter()
        for _ in range(self.args.block):
            self.step(*batch())
        self.synchronize()
        return self.args.block * self.args.batch_size / (time.perf_counter() - started)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(self) -> dict[str, list[float]]:
        """Return images/s of each block."""
        for _ in range(WARM_STEPS if self.device.type == "cuda" else 2):
            self.step(*self.cached)
            self.step(*next(self.batches))
        rates: dict[str, list[float]] = {"real": [], "cached": []}
        sources = {"real": lambda: next(self.batches), "cached": lambda: self.cached}
        for number in range(self.args.blocks):
            for name in ("real", "cached") if number % 2 else ("cached", "real"):
                rates[name].append(self.block(sources[name]))
        return rates

    def close(self) -> None:
        self.batches.close()
        self.loader.close()


def work(args: argparse.Namespace) -> None:
    """Run one process of torchrun. Rank 0 writes the rates of all processes."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        distributed.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
        distributed.init_process_group("gloo")
    worker = Worker(args, device)
    if not rank:
        print(worker.loader, flush=True)
    rates = worker.measure()
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, rates)
    worker.close()
    if not rank:
        args.result.write_text(json.dumps(gathered))
    distributed.barrier()
    distributed.destroy_process_group()


# --- all numbers of GPUs ---------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, num_gpus: int) -> dict[str, Any]:
    """Run a group of ``num_gpus`` processes, and return its measurements."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rates.json"
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_gpus}"]
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        subprocess.run([*start, __file__, *sys.argv[1:], "--result", str(result)], check=True, env=environment)
        ranks = json.loads(result.read_text())
    rates = {name: [statistics.median(rank[name]) for rank in ranks] for name in ("real", "cached")}
    ratios = [
        statistics.median(real / cached for real, cached in zip(rank["real"], rank["cached"], strict=True))
        for rank in ranks
    ]
    return {
        "real_images_per_s": statistics.mean(rates["real"]),
        "cached_images_per_s": statistics.mean(rates["cached"]),
        "real_over_cached": ratios,
        "ranks": ranks,
    }


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run all numbers of GPUs and print their rates."""
    found: dict[str, Any] = {}
    for num_gpus in args.gpus:
        found[str(num_gpus)] = each = run(args, num_gpus)
        text = f"{num_gpus} GPUs: {each['real_images_per_s']:,.1f} images/s a GPU, "
        text += f"{each['cached_images_per_s']:,.1f} on the cached batch; "
        text += "real over cached " + ", ".join(f"{ratio:.4f}" for ratio in each["real_over_cached"])
        if alone := found.get("1"):
            for name in ("real", "cached"):
                each[f"{name}_scaling"] = each[f"{name}_images_per_s"] / alone[f"{name}_images_per_s"]
            text += f"; of one GPU {each['real_scaling']:.4f}, on the cached batch {each['cached_scaling']:.4f}"
        print(text, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[1, 2], help="numbers of GPUs to compare, starting with 1"
    )
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=256, help="images per batch of each GPU")
    parser.add_argument("--threads", type=int, help="threads per loader; default: the loader's")
    parser.add_argument("--block", type=int, default=40, help="training steps per block")
    parser.add_argument("--blocks", type=int, default=12, help="blocks of each kind")
    parser.add_argument("--bucket-mb", type=int, default=25, help="MB of gradients that DDP reduces together")
    parser.add_argument("--alone", action="store_true", help="train a separate network per GPU, without DDP")
    parser.add_argument("--compile", action="store_true", help="torch.compile the network")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.result is not None:
        work(args)
        return
    if torch.cuda.is_available() and max(args.gpus) > torch.cuda.device_count():
        parser.error(f"--gpus {max(args.gpus)}, but there are {torch.cuda.device_count()}")
    found = compare(args)
    if args.json:
        options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        machine = f"{gpu}, {os.cpu_count()} cores, Python {platform.python_version()}"
        versions = {"h5chunk": h5chunk.__version__, "torch": torch.__version__}
        args.json.write_text(
            json.dumps({"gpus": found, "options": options, "machine": machine, "versions": versions}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
