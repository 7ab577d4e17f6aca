"""Measure loaders in turns; shared by `bench_augment.py` and `bench_encoded.py`."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

Epoch = Callable[[], Iterator[int]]  # yields the number of images in each batch
Contenders = Mapping[str, Callable[[argparse.Namespace], Epoch]]


def make_parser(description: str, contenders: Contenders, *, images: int, side: int) -> argparse.ArgumentParser:
    """Return a parser of the common options, with these defaults."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in (("images", images), ("side", side), ("size", 224), ("rounds", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", choices=contenders, default=list(contenders))
    parser.add_argument("--json", type=Path)
    return parser


def take_turns(args: argparse.Namespace, contenders: Contenders) -> dict[str, list[tuple[float, float]]]:
    """Return images/s, and images per second of processor time, of each contender in each round."""
    torch.set_num_threads(args.threads)
    epochs: dict[str, Epoch] = {}
    for name in args.only:
        try:
            epochs[name] = contenders[name](args)
        except ImportError as error:
            print(f"{name} is skipped ({error})")
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in epochs}
    for number in range(args.rounds):
        for name in list(epochs)[:: -1 if number % 2 else 1]:
            rates[name].append(turn(epochs[name], args.images, getattr(args, "epochs", 1)))
    return rates


def turn(epoch: Epoch, num_images: int, num_epochs: int = 1) -> tuple[float, float]:
    """Return images/s, and images per second of processor time, of epochs after a first one."""
    for _ in epoch():
        pass
    started, before = time.perf_counter(), sum(os.times()[:4])
    for _ in range(num_epochs):
        assert sum(epoch()) == num_images
    total = num_epochs * num_images
    return total / (time.perf_counter() - started), total / (sum(os.times()[:4]) - before or math.nan)


def write_json(args: argparse.Namespace, rates: Mapping[str, list]) -> None:
    """Write arguments and rates to the file named by ``--json``, if any."""
    if args.json:
        args.json.write_text(json.dumps({"arguments": vars(args) | {"json": None}, "rates": rates}, indent=1))
