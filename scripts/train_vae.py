"""Train Mult-VAE on a matrix of ratings, and compare ways to feed it.

    python scripts/make_ratings.py ratings.csv                     # or a real ratings.csv, such as MovieLens-20M's
    h5chunk convert ratings.csv ml.h5 --binarize 4 --min-row-count 5
    python scripts/train_vae.py ml.h5 --epochs 20 --json vae.json
    python scripts/train_vae.py ml.h5 --compare --rounds 5 --amp bf16 --compile --json feeds.json

If the file is a ratings.csv, it is first converted to a file beside it. Training follows the paper
(arXiv:1802.05814): ratings of at least 4 count as ones, and users have at least 5 of them; an encoder of 600 and a code
of 200, dropout 0.5 on rows of length 1, Adam 1e-3, batches of 500, the KL term annealed to 0.2 at the rate that reaches
1 in 200,000 updates; 10,000 users held out for validation and 10,000 for test (a tenth each of a small file), of whom
the model sees four fifths of their likes. scripts/vae_data.py describes the split.

Without --compare, the script prints the metrics of always recommending the most popular columns; for each epoch loss,
users/s, seconds, the share of them that the loop waited for the feed, and NDCG@100, Recall@20 and Recall@50 of the
validation users; and at the end those of the test users, with the weights that were best in validation.

With --compare, it trains with all feeds in turns (see scripts/vae_compare.py) and prints for each the median seconds of
an epoch, users/s, waiting, seconds to its first batch, and its epoch over those of the model alone on one cached batch
and over h5chunk's. ``h5chunk`` reads from disk (the page cache), ``h5chunk-resident`` keeps the rows on the device;
``getitem`` makes rows dense in the workers of a DataLoader, ``workers`` whole batches there; ``toarray`` makes batches
dense with SciPy in the loop, ``thread`` ten batches ahead in threads; ``sparse`` copies sparse tensors and makes them
dense on the device; ``dense`` and ``dense-device`` keep the whole matrix dense, in host memory or on the GPU.

Every epoch leaves out the last, smaller batch. The defaults are float32 without compiling, as in the paper; --amp bf16
and --compile make the network several times as fast on a GPU, so that it needs faster feeding.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import scipy
import torch
from peers.vae_feeds import FEEDS
from peers.vae_job import Feed, FeedError, Job
from vae_compare import Epoch, compare, run_epoch
from vae_data import HELD_OUT, DataError, Split, packed_file, split_users
from vae_model import AMP, NDCG_AT, Trainer, evaluate

import h5chunk
from h5chunk.machine import available_cores
from h5chunk.tools.measure.machine import cuda_device, library_versions

Say = Callable[[str], None]
METRICS = (f"ndcg@{NDCG_AT}", "recall@20", "recall@50")


class SettingsError(ValueError):
    """Raised if settings are invalid, or do not fit the data."""


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on. The command line has an option for each field."""

    data: Path
    feed: str = "h5chunk"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    epochs: int = 20
    batch_size: int = 500
    lr: float = 1e-3
    beta: float = 0.2
    anneal_updates: int = 200_000
    held_out: int = HELD_OUT
    amp: str = "none"
    compile: bool = False
    seed: int = 0
    num_workers: int = available_cores()
    num_threads: int = 2
    rounds: int = 5
    feeds: tuple[str, ...] = tuple(FEEDS)


def check(settings: Settings) -> None:
    """Raise SettingsError unless the settings are valid."""
    least = {"epochs": 1, "batch_size": 1, "anneal_updates": 1, "held_out": 1, "num_workers": 0, "num_threads": 1}
    for name, value in (least | {"rounds": 1}).items():
        if getattr(settings, name) < value:
            raise SettingsError(f"--{name.replace('_', '-')} is {getattr(settings, name)}: give at least {value}")
    if torch.device(settings.device).type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"--device is {settings.device}, but torch finds no GPU: use cpu")


def make_trainer(settings: Settings, split: Split) -> Trainer:
    """Make a trainer with a fresh network for this data."""
    s = settings
    return Trainer(
        split.train.num_columns,
        device=torch.device(s.device),
        lr=s.lr,
        beta=s.beta,
        anneal_updates=s.anneal_updates,
        amp=s.amp,
        compile=s.compile,
        seed=s.seed,
    )


def make_job(settings: Settings, split: Split) -> Job:
    """Make the arguments of feeds. Raises SettingsError."""
    s = settings
    if len(split.train) < s.batch_size:
        raise SettingsError(f"--batch-size is {s.batch_size}, but there are only {len(split.train)} training users")
    device, dtype = torch.device(s.device), AMP[s.amp]
    threads = {"num_workers": s.num_workers, "num_threads": s.num_threads}
    return Job(split.path, split.train, s.batch_size, device, dtype, s.seed, **threads)


# --- training --------------------------------------------------------------------------------------------------------


def in_words(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {metrics[name]:.4f} (+- {metrics[f'{name}_error']:.4f})" for name in METRICS)


def most_popular(split: Split, device: str) -> dict[str, dict[str, float]]:
    """Return the metrics of recommending the most popular columns to everybody."""
    popularity = torch.from_numpy(split.popularity).float().to(device)
    sets = {"validation": split.validation, "test": split.test}
    return {name: evaluate(lambda x: popularity.expand_as(x), users, device) for name, users in sets.items()}


def train(settings: Settings, split: Split, say: Say = print) -> dict[str, Any]:
    """Train and test; return the results of each epoch and of the test. Raises SettingsError or FeedError."""
    trainer, feed = make_trainer(settings, split), FEEDS[settings.feed](make_job(settings, split))
    try:
        popular = most_popular(split, settings.device)
        say(f"most popular, validation: {in_words(popular['validation'])}")
        epochs = train_epochs(settings, split, trainer, feed, say)
    finally:
        feed.close()
    found = trainer.evaluate(split.test)
    say(f"most popular, test: {in_words(popular['test'])}")
    say(f"Mult-VAE, test:     {in_words(found)}")
    return {"epochs": epochs, "test": found, "most_popular": popular}


def train_epochs(settings: Settings, split: Split, trainer: Trainer, feed: Feed, say: Say) -> list[dict[str, Any]]:
    """Train and validate epoch after epoch, and restore the best weights at the end."""
    say(f"epoch      loss    users/s  seconds  waiting{''.join(f'{name:>11s}' for name in METRICS)}")
    epochs: list[dict[str, Any]] = []
    best, weights = -1.0, None
    for number in range(settings.epochs):
        epoch, metrics = run_epoch(trainer, feed, number), trainer.evaluate(split.validation)
        say(f"{number:5d} {line(epoch)}{''.join(f'{metrics[name]:11.4f}' for name in METRICS)}")
        epochs.append(asdict(epoch) | metrics)
        if metrics[METRICS[0]] > best:
            best, weights = metrics[METRICS[0]], copy.deepcopy(trainer.network.state_dict())
    if weights is not None:
        trainer.network.load_state_dict(weights)
    return epochs


def line(epoch: Epoch) -> str:
    rate = epoch.num_users / epoch.seconds
    return f"{epoch.loss:9.3f} {rate:10,.0f} {epoch.seconds:8.2f} {epoch.waiting_s / epoch.seconds:8.1%}"


def run(settings: Settings, comparing: bool, say: Say = print) -> dict[str, Any]:
    """Train, or compare feeds. Raises SettingsError, DataError, FeedError or H5ChunkError."""
    check(settings)
    path = packed_file(settings.data, say)
    with split_users(path, settings.held_out) as split:
        say(f"{path}: {split}")
        result: dict[str, Any] = {"split": str(split)}
        if comparing:
            job, trainer = make_job(settings, split), make_trainer(settings, split)
            result["feeds"], result["left_out"] = compare(settings.feeds, job, trainer, settings.rounds, say)
        else:
            result |= train(settings, split, say)
    return result


# --- command line ----------------------------------------------------------------------------------------------------


def describe(settings: Settings, result: dict[str, Any]) -> dict[str, Any]:
    """Return a run as values for JSON."""
    versions = library_versions() | {"scipy": scipy.__version__}
    machine = f"{cuda_device() or 'no GPU'}, {os.cpu_count()} cores"
    chosen = asdict(settings) | {"data": str(settings.data)}
    return {"settings": chosen, **result, "versions": versions, "machine": machine}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(**{field.name: field.default for field in fields(Settings) if field.name != "data"})
    add = parser.add_argument
    add("data", type=Path, help="packed file, or a ratings.csv")
    add("--feed", choices=FEEDS, help="feed to train with (%(default)s)")
    add("--epochs", type=int, help="epochs (%(default)s)")
    add("--device", help="cpu or cuda (%(default)s)")
    add("--batch-size", type=int, help="users per batch (%(default)s)")
    add("--lr", type=float, help="learning rate of Adam (%(default)s)")
    add("--beta", type=float, help="weight of the KL term at the end of annealing (%(default)s)")
    add("--anneal-updates", type=int, help="updates in which the weight of the KL term would grow to 1 (%(default)s)")
    add("--held-out", type=int, help="number of users for validation, and for the test (%(default)s)")
    add("--seed", type=int, help="seed of weights and order, not of the held-out users")
    add("--amp", choices=AMP, help="autocast (%(default)s)")
    add("--compile", action="store_true", help="torch.compile the network and its loss")
    add("--num-workers", type=int, help="worker processes of getitem and workers; default: one per core")
    add("--num-threads", type=int, help="threads of the feed thread (%(default)s)")
    add("--json", type=Path, help="write the results to this file")
    add = parser.add_argument_group("to compare feeds").add_argument
    add("--compare", action="store_true", help="train with all feeds in turns")
    add("--rounds", type=int, help="rounds (%(default)s)")
    add("--feeds", nargs="+", choices=FEEDS, metavar="FEED", help="feeds to compare, besides cached; default: all")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = make_parser()
    values = vars(parser.parse_args(argv))
    json_path, comparing = values.pop("json"), values.pop("compare")
    if json_path is not None and not json_path.resolve().parent.is_dir():
        parser.error(f"--json: there is no folder {json_path.resolve().parent}: make it first")
    settings = Settings(**values | {"feeds": tuple(values["feeds"])})
    try:
        result = run(settings, comparing)
    except (SettingsError, DataError, FeedError, h5chunk.H5ChunkError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if json_path is not None:
        json_path.write_text(json.dumps(describe(settings, result), indent=2) + "\n")


if __name__ == "__main__":
    main()
