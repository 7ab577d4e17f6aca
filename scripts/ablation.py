"""Measure what each known trick for feeding a GPU adds, by turning them on one after another.

    python scripts/ablation.py --model resnet18 --num-workers 16 --json h200.json     # with a GPU: about ten minutes
    python scripts/ablation.py --quick                                                # on two cores: one minute
    python scripts/ablation.py --plot-json h200.json                                  # only plot earlier results

The first row is a folder of JPEGs with a plain DataLoader (decoding in the main process, float32 on the CPU). The last
row is ChunkLoader with all tricks. The script creates the folder (scripts/make_images.py) and the packed file if they
are missing; both must contain the same number of images. Each row keeps the settings of the rows above it, unless its
name says otherwise. The augmented rows crop and flip images at random: torchvision sample by sample in workers, FFCV,
and ChunkLoader. Torchvision and FFCV are skipped if they are not installed. All other rows use the images unchanged.

A row is a training run of one warm-up epoch and ``--epochs`` measured epochs, whose medians are printed. With
``--steps``, an epoch has only this number of steps, and the table marks epoch times that were computed from the rate.
On a CPU, the network gets half of the cores and the loaders get the other half.

Columns: seconds per epoch; images/s trained (echoes count); the ratio of this rate to that of the first row; the
fraction of time that the loop waited for the loader; peak GPU memory; images/s on one cached batch with the same model
settings, measured before and after each epoch; utilisation, which is the ratio of the two rates in images/s.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from ablation_feeds import Feed, FolderImages, Settings, cached_rate, check, open_dataset
from ablation_train import Epoch, SettingsError, Trainer, inspect, kernels, run_epoch
from models import MODELS, ModelError

import h5chunk
from h5chunk.machine import available_cores
from h5chunk.tools.measure.machine import cuda_device, library_versions

Say = Callable[[str], None]
DEFAULTS: dict[str, Any] = {
    "model": "resnet18",
    "batch_size": 256,
    "count": 12_000,
    "size": (224, 224),
    "epochs": 2,
    "utilisation_s": 2.0,
}
QUICK = {"model": "cnn", "batch_size": 64, "count": 2000, "size": (64, 64), "epochs": 3, "utilisation_s": 0.5}
QUICK_WORKERS = 2
PLOT_HELP = "the picture needs matplotlib: pip install 'h5chunk[plot]', then python scripts/ablation.py --plot-json {}"


@dataclass(frozen=True)
class Row:
    """One row of the table: a trick and the settings that it changes."""

    name: str
    changes: dict[str, Any]
    gpu_only: bool = False
    convolutions_only: bool = False
    passing: bool = False  # whether the settings apply only to this row
    needs: str = ""  # package that the row requires


def all_rows(folder: Path, packed: Path, image_size: tuple[int, int], num_workers: int) -> list[Row]:
    """Return all rows in the order of the table."""
    of_folder = {"data": folder, "loader": "folder", "image_size": image_size, "transport": "float32"}
    of_packed = {"data": packed, "loader": "dataset", "image_size": None}
    by_itself = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "non_blocking")
    workers = {"num_workers": num_workers, "prefetch_factor": 4, "persistent_workers": True}
    of_torchvision = {"loader": "dataset", **workers, "pin_memory": True, "non_blocking": True}
    of_ffcv = {"loader": "ffcv", "num_workers": num_workers}
    crops = {"augment": image_size, "resident": "no"}
    of_chunk = {name: getattr(Settings, name) for name in (*by_itself, "prefetch_stream")}
    return [
        Row("folder of JPEGs, plain DataLoader", of_folder),
        Row(f"+ num_workers={num_workers}", {"num_workers": num_workers}),
        Row("+ prefetch_factor=4", {"prefetch_factor": 4}),
        Row("+ persistent_workers", {"persistent_workers": True}),
        Row("+ pin_memory", {"pin_memory": True}, gpu_only=True),
        Row("+ non_blocking", {"non_blocking": True}, gpu_only=True),
        Row("+ uint8, normalised on the device", {"transport": "uint8"}),
        Row("+ prefetch stream", {"prefetch_stream": True}, gpu_only=True),
        Row("+ zero_grad(set_to_none)", {"set_to_none": True}),
        Row("+ fp16 with GradScaler", {"amp": "fp16"}, gpu_only=True),
        Row("+ bf16 in place of fp16", {"amp": "bf16"}, gpu_only=True),
        Row("+ channels_last", {"channels_last": True}, convolutions_only=True),
        Row("+ torch.compile", {"compile": True}, gpu_only=True),
        Row("packed file, ChunkDataset in DataLoader", of_packed),
        Row("ChunkLoader in place of DataLoader", {"loader": "chunk", **of_chunk, "resident": "no"}),
        Row("augmented: torchvision in workers", crops | of_torchvision, passing=True, needs="torchvision"),
        Row("augmented: FFCV", crops | of_ffcv, passing=True, needs="ffcv"),
        Row("augmented: ChunkLoader", crops, passing=True),
        Row("ChunkLoader, echo=2", {"echo": 2.0}, gpu_only=True, passing=True),
        Row("ChunkLoader, resident", {"resident": "yes"}, gpu_only=True),
    ]


def rows_for(base: Settings, rows: list[Row]) -> list[tuple[str, Settings]]:
    """Return the names and settings of the rows that apply to this device and model."""
    found = []
    for row in rows:
        if (row.gpu_only and not base.on_gpu) or (row.convolutions_only and base.model.startswith("vit")):
            continue
        if row.needs and not find_spec(row.needs):
            continue
        settings = replace(base, **row.changes)
        found.append((row.name, settings))
        base = base if row.passing else settings
    return found


# --- data ------------------------------------------------------------------------------------------------------------


def prepare_data(folder: Path, packed: Path, count: int, size: tuple[int, int], say: Say) -> tuple[int, int]:
    """Make the folder and the packed file if they are missing, and return the size of the images."""
    if not folder.is_dir():
        say(f"making {count} JPEGs of {size[0]} x {size[1]} in {folder}")
        script = Path(__file__).with_name("make_images.py")
        options = ["--count", str(count), "--size", *map(str, size)]
        subprocess.run([sys.executable, str(script), str(folder), *options], check=True, stdout=subprocess.DEVNULL)
    if not packed.exists():
        say(f"packing {folder} into {packed}")
        h5chunk.convert(folder, packed, size=size, fit="crop")
    dataset = h5chunk.ChunkDataset(packed)
    num_files = len(FolderImages(folder, None, None))
    if num_files != len(dataset):
        raise SettingsError(f"{folder} has {num_files} images, but {packed} has {len(dataset)}: remove one of them")
    return tuple(dataset[0][0].shape[1:])


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The epochs of a training run, with the rates of fresh images and the rates on a cached batch."""

    settings: Settings
    num_samples: int
    loader: str
    epochs: list[Epoch]
    fresh_images_per_s: list[float]
    cached_images_per_s: list[float]


def train(settings: Settings, utilisation_s: float | None = None) -> Run:
    """Train with a loader.

    With ``utilisation_s``, train for this time on a cached batch before and after each epoch.
    """
    check(settings)
    dataset = open_dataset(settings)
    image_size, num_classes = inspect(settings, dataset)
    run = Run(settings, len(dataset), "", [], [], [])
    with kernels(settings):
        trainer, feed = Trainer(settings, image_size, num_classes), Feed(settings, dataset)
        try:
            rates = [] if utilisation_s is None else [cached_rate(trainer, feed.real_batch, utilisation_s)]
            for batches in feed.epochs():
                run.epochs.append(run_epoch(trainer, batches, feed.waiting))
                run.fresh_images_per_s.append(run.epochs[-1].images_per_s * feed.fresh_share())
                if utilisation_s is not None:
                    rates.append(cached_rate(trainer, feed.real_batch, utilisation_s))
                    run.cached_images_per_s.append((rates[-2] + rates[-1]) / 2)
            return replace(run, loader=repr(feed.loader))
        finally:
            feed.close()
            del trainer, feed
            free_memory(settings)


def free_memory(settings: Settings) -> None:
    """Free the memory that a finished run still uses in this process."""
    gc.collect()
    if settings.compile:
        torch.compiler.reset()
    if settings.on_gpu:
        torch.cuda.empty_cache()


def measure(name: str, settings: Settings, utilisation_s: float) -> dict[str, Any]:
    """Measure one row of the table: the medians of all epochs but the first one."""
    run = train(settings, utilisation_s)
    epochs, cached, median = run.epochs[1:], run.cached_images_per_s[1:], statistics.median
    return {
        "name": name,
        "epoch_seconds": epoch_seconds(run),
        "images_per_s": median(epoch.images_per_s for epoch in epochs),
        "waiting": median(epoch.waiting for epoch in epochs),
        "peak_bytes": max(epoch.peak_bytes for epoch in epochs) if settings.on_gpu else None,
        "cached_images_per_s": median(cached),
        "utilisation": median(epoch.images_per_s / rate for epoch, rate in zip(epochs, cached, strict=True)),
        "loader": run.loader,
    }


def epoch_seconds(run: Run) -> float:
    """Return the seconds of an epoch: measured, or with --steps computed from the rate of fresh images."""
    if run.settings.steps is None:
        return statistics.median(epoch.seconds for epoch in run.epochs[1:])
    return run.num_samples / statistics.median(run.fresh_images_per_s[1:])


def ablation(
    rows: list[tuple[str, Settings]], utilisation_s: float, say: Say, save: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Measure the rows one after another, and save the results after each row."""
    done: list[dict[str, Any]] = []
    say(header(rows[0][1].steps))
    for name, settings in rows:
        done.append(measure(name, settings, utilisation_s))
        say(line(done[-1], done[0]["images_per_s"]))
        save(done)


def header(steps: int | None) -> str:
    seconds = "s/epoch" if steps is None else "s/epoch*"
    note = "" if steps is None else f"\n* computed from the rate of {steps} steps"
    return (
        f"{'':40s} {seconds:>8s} {'images/s':>9s} {'times':>6s} {'waiting':>7s} {'GPU memory':>10s} "
        f"{'cached':>8s} {'utilisation':>11s}{note}"
    )


def line(row: dict[str, Any], first_rate: float) -> str:
    memory = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f} GiB"
    return (
        f"{row['name']:40s} {row['epoch_seconds']:8.2f} {row['images_per_s']:9,.0f} "
        f"{row['images_per_s'] / first_rate:6.1f} {row['waiting']:7.1%} {memory:>10s} "
        f"{row['cached_images_per_s']:8,.0f} {row['utilisation']:11.3f}"
    )


# --- picture ---------------------------------------------------------------------------------------------------------


def plot(json_path: Path, png_path: Path) -> None:
    """Plot the results of a run. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    result = json.loads(json_path.read_text())
    rows = result["rows"]
    rates, cached = ([row[name] for row in rows] for name in ("images_per_s", "cached_images_per_s"))
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.36 * len(rows)), layout="constrained")
    axes.barh(range(len(rows)), cached, color="#d9dee4", label="on one cached batch, same model settings")
    axes.barh(range(len(rows)), rates, color="#2a6fb0", height=0.55, label="trained")
    for number, row in enumerate(rows):
        axes.annotate(
            f"{row['images_per_s']:,.0f}  ({row['utilisation']:.0%})",
            (max(rates[number], cached[number]), number),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel("images/s (in brackets: utilisation)")
    axes.set_title(f"{result['model']}, batches of {result['batch_size']}, {result['machine']}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(png_path, dpi=100)
    pyplot.close(figure)


def try_plot(json_path: Path, png_path: Path) -> str:
    """Plot the results and return the path of the picture, or what is missing."""
    try:
        plot(json_path, png_path)
    except ImportError:
        return PLOT_HELP.format(json_path)
    return f"picture: {png_path}"


# --- command line ----------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--folder", type=Path, help="folder of JPEGs, one folder per class; default: bench-data/COUNTxHxW")
    add("--packed", type=Path, help="the same images, converted; default: the folder's name with .h5")
    add("--count", type=int, help=f"number of images to make if the folder is missing ({DEFAULTS['count']})")
    add("--size", type=int, nargs=2, metavar=("H", "W"), help="size of the images (224 224)")
    add("--model", choices=MODELS, help=f"network ({DEFAULTS['model']})")
    add("--batch-size", type=int, help=f"images per batch ({DEFAULTS['batch_size']})")
    add("--num-workers", type=int, help="workers of the DataLoader (one per core)")
    add("--epochs", type=int, help=f"measured epochs, after a warm-up epoch ({DEFAULTS['epochs']})")
    add("--steps", type=int, help="steps per epoch; default: a pass over the data")
    add("--utilisation-s", type=float, help=f"seconds on the cached batch ({DEFAULTS['utilisation_s']:g})")
    add("--device", default=Settings.device, help="cpu or cuda (%(default)s)")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="small data and a small network: one minute on two cores")
    add("--json", type=Path, default=Path("bench-data/ablation.json"), help="written after each row (%(default)s)")
    add("--png", type=Path, help="path of the picture; default: beside the JSON file")
    add("--plot-json", type=Path, metavar="FILE", help="only plot the results of an earlier run")
    return parser


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in the defaults of options that were not given."""
    defaults = DEFAULTS | {"num_workers": available_cores()}
    if args.quick:
        defaults |= QUICK | {"num_workers": QUICK_WORKERS}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.size = tuple(args.size)
    args.folder = args.folder or Path("bench-data") / f"{args.count}x{args.size[0]}x{args.size[1]}"
    args.packed = args.packed or args.folder.with_name(args.folder.name + ".h5")
    return args


def run_all(args: argparse.Namespace, say: Say) -> None:
    cpu_threads = max(1, available_cores() // 2) if torch.device(args.device).type == "cpu" else None
    base = Settings(
        data=args.packed,
        cpu_threads=cpu_threads,  # the other cores are for loading
        model=args.model,
        device=args.device,
        batch_size=args.batch_size,
        epochs=1 + args.epochs,
        steps=args.steps,
        seed=args.seed,
    )
    started = time.perf_counter()
    image_size = prepare_data(args.folder, args.packed, args.count, args.size, say)
    about = {"model": args.model, "batch_size": args.batch_size, "image_size": image_size, "seed": args.seed}
    about |= {"device": args.device, "extrapolated_from_steps": args.steps}
    about |= {"versions": library_versions(), "machine": f"{cuda_device() or 'no GPU'}, {os.cpu_count()} cores"}

    args.json.parent.mkdir(parents=True, exist_ok=True)

    def save(rows: list[dict[str, Any]]) -> None:
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")

    rows = rows_for(base, all_rows(args.folder, args.packed, image_size, args.num_workers))
    for _, settings in rows:
        check(settings)  # all of them, before the first one runs
    say(f"{args.model}, batches of {args.batch_size}, {args.device}: {about['machine']}, torch {torch.__version__}")
    ablation(rows, args.utilisation_s, say, save)
    say(f"{time.perf_counter() - started:.0f} s; figures: {args.json}")


def main(argv: list[str] | None = None) -> None:
    def say(text: str) -> None:
        print(text, flush=True)

    parser = make_parser()
    args = complete(parser.parse_args(argv))
    json_path = args.plot_json or args.json
    if args.plot_json is not None and not args.plot_json.is_file():
        parser.error(f"--plot-json: there is no file {args.plot_json}")
    if args.plot_json is None:
        try:
            run_all(args, say)
        except (SettingsError, ModelError, h5chunk.H5ChunkError) as error:
            parser.error(str(error))
    say(try_plot(json_path, args.png or json_path.with_suffix(".png")))


if __name__ == "__main__":
    main()
