"""Train an image classifier as on ImageNet: random crops and flips, label smoothing, a cosine schedule, bf16, DDP.

    h5chunk convert train/ train.h5 --keep-encoded --max-side 512     # one folder per class
    h5chunk convert val/ val.h5 --keep-encoded --max-side 512
    torchrun --nproc-per-node 8 scripts/train_images.py train.h5 --val val.h5               # 8 GPUs
    python scripts/train_images.py train.h5 --val val.h5 --model cnn --size 64 --epochs 3   # one GPU, or the CPU

The script also reads files of pixels of any size (--keep-size) and of images of one size (--size 256 256).
With ``--checkpoint FILE``, the training is saved after each epoch and every ``--save-steps`` steps, and the same
command continues from there, with the same batches and the same random crops.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import MODELS, ModelError, make_model
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import h5chunk
from h5chunk.transforms import CenterCrop, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize, ToDtype

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
RESIZED = 256 / 224  # validation images are resized to RESIZED * --size, and cropped


def start_processes() -> torch.device:
    """Join the other processes of torchrun, if there are any; return the device of this process."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def num_processes() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def is_first() -> bool:
    return not distributed.is_initialized() or distributed.get_rank() == 0


def make_loaders(args: argparse.Namespace, device: torch.device) -> tuple[h5chunk.ChunkLoader, Any]:
    """Return loaders of random crops of the training images and, if given, of central crops of the validation images.

    Each process gets a different part of an epoch. Crops, flips and normalisation are computed in one kernel.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    normalize = [Normalize(MEAN, STD), ToDtype(dtype, channels_last=True)]
    augment = [RandomResizedCrop(args.size), RandomHorizontalFlip(), *normalize]
    centre = [Resize(round(RESIZED * args.size)), CenterCrop(args.size), *normalize]
    how = {"seed": args.seed, "device": device}
    train = h5chunk.ChunkLoader(args.data, args.batch_size, drop_last=True, transforms=augment, **how)
    if args.val is None:
        return train, None
    return train, h5chunk.ChunkLoader(args.val, args.batch_size, shuffle=False, transforms=centre, **how)


class Trainer:
    """A network, its optimizer and schedule, and the loader of its batches."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.step = args, device, 0
        self.loader, self.val = make_loaders(args, device)
        classes = h5chunk.ChunkDataset(args.data).classes
        torch.manual_seed(args.seed)
        network = make_model(args.model, len(classes), (args.size, args.size))
        self.network = network.to(device, memory_format=torch.channels_last)
        self.replica: Callable[[torch.Tensor], torch.Tensor] = self.network
        if num_processes() > 1:
            self.replica = DistributedDataParallel(self.network, [device.index] if device.type == "cuda" else None)
        if args.compile:
            self.replica = torch.compile(self.replica)
        lr = args.lr * args.batch_size * num_processes() / 256  # the learning rate grows with the batch
        options = {"momentum": 0.9, "nesterov": True, "weight_decay": args.weight_decay}
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr, **options)
        self.num_steps, self.warm_steps = args.epochs * len(self.loader), args.warmup * len(self.loader)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.lr_factor)

    def lr_factor(self, step: int) -> float:
        """Return the factor of the learning rate, which rises during warm-up, and then follows a cosine."""
        if step < self.warm_steps:
            return (step + 1) / (self.warm_steps + 1)
        done = (step - self.warm_steps) / max(1, self.num_steps - self.warm_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def autocast(self) -> torch.autocast:
        """Return a context in which convolutions and products are computed in bf16."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def train_step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            loss = nn.functional.cross_entropy(self.replica(images), labels, label_smoothing=self.args.label_smoothing)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        return loss.detach()

    def train_epoch(self) -> tuple[float, float]:
        """Train on the rest of an epoch; return the mean loss and images/s of all processes."""
        total, num_batches, started = torch.zeros((), device=self.device), 0, time.perf_counter()
        for images, labels in self.loader:
            total += self.train_step(images, labels)
            num_batches += 1
            if self.args.save_steps and self.step % self.args.save_steps == 0:
                self.save()
        loss = float(total) / max(1, num_batches)  # waits for the device
        rate = num_batches * self.args.batch_size * num_processes() / (time.perf_counter() - started)
        return loss, rate

    @torch.no_grad()
    def validate(self) -> float:
        """Return the accuracy on the validation images, which are divided among the processes."""
        right = torch.zeros(2, dtype=torch.float64, device=self.device)  # correct answers, and images
        self.network.eval()
        for images, labels in self.val:
            with self.autocast():
                answers = self.network(images).argmax(1)
            right += torch.stack(((answers == labels).sum(), torch.tensor(len(labels), device=self.device)))
        self.network.train()
        if num_processes() > 1:
            distributed.all_reduce(right)
        return float(right[0] / right[1])

    def save(self) -> None:
        """Save everything that the next steps depend on. If saving is interrupted, the earlier file remains."""
        path = self.args.checkpoint
        if path is None or not is_first():
            return
        state = {name: getattr(self, name).state_dict() for name in ("network", "optimizer", "schedule", "loader")}
        part = path.with_name(path.name + ".part")
        torch.save({**state, "step": self.step}, part)
        part.replace(path)

    def load(self) -> None:
        """Continue from the checkpoint, if it exists."""
        if self.args.checkpoint is not None and self.args.checkpoint.exists():
            state = torch.load(self.args.checkpoint, map_location=self.device)
            self.step = state.pop("step")
            for name, values in state.items():
                getattr(self, name).load_state_dict(values)
            self.say(f"continuing after {self.step} of {self.num_steps} steps")

    def say(self, text: str) -> None:
        if is_first():
            print(text, flush=True)

    def run(self) -> None:
        self.load()
        while self.step < self.num_steps:
            loss, rate = self.train_epoch()
            self.save()
            accuracy = "" if self.val is None else f"  validation {self.validate():.1%}"
            epoch = -(-self.step // len(self.loader))
            self.say(f"epoch {epoch:3d}  loss {loss:.4f}  {rate:,.0f} images/s{accuracy}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("data", type=Path, help="training images, a file of h5chunk convert")
    add("--val", type=Path, help="validation images, used after each epoch")
    add("--model", choices=MODELS, default="resnet50")
    add("--size", type=int, default=224, help="height and width of the crops (%(default)s)")
    add("--epochs", type=int, default=90)
    add("--warmup", type=int, default=5, help="epochs in which the learning rate rises (%(default)s)")
    add("--batch-size", type=int, default=256, help="images per process (%(default)s)")
    add("--lr", type=float, default=0.5, help="learning rate for 256 images per step (%(default)s)")
    add("--weight-decay", type=float, default=5e-5)
    add("--label-smoothing", type=float, default=0.1)
    add("--seed", type=int, default=0)
    add("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    add("--checkpoint", type=Path, help="file to save to and to continue from")
    add("--save-steps", type=int, default=0, help="also save after each N steps")
    args = parser.parse_args(argv)
    try:
        Trainer(args, start_processes()).run()
    except (ModelError, h5chunk.H5ChunkError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


if __name__ == "__main__":
    main()
