"""Measure an epoch of the same training with each feed, in turns and in one process.

A turn is two epochs, of which the second is timed, once read-ahead, caches and clocks have settled. Rounds go through
the feeds forwards and backwards. Before the first round each feed trains one epoch; ``ready`` is the time from its
construction to its first batch. Every feed trains the same network, on equally many batches of equal size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ablation_train import Waiting
from peers.vae_feeds import FEEDS, OURS
from peers.vae_job import Feed, FeedError, Job
from vae_model import Trainer

Say = Callable[[str], None]
MODEL_ALONE = "cached"


@dataclass(frozen=True)
class Epoch:
    """The results of an epoch: mean loss, seconds, seconds in the feed's ``next``, and seconds to the first batch.

    On a GPU, earlier steps may still run while the loop waits for the feed.
    """

    loss: float
    num_users: int
    seconds: float
    waiting_s: float
    first_s: float


def run_epoch(trainer: Trainer, feed: Feed, number: int) -> Epoch:
    """Train on an epoch of a feed, and wait for the device."""
    waiting, num_users, num_batches, first_s = Waiting(), 0, 0, 0.0
    trainer.synchronize()
    started = time.perf_counter()
    for x in waiting.over(feed.epoch(number)):
        first_s = first_s or time.perf_counter() - started
        trainer.step(x)
        num_users += len(x)
        num_batches += 1
    trainer.synchronize()
    seconds = time.perf_counter() - started
    return Epoch(trainer.take_total() / num_batches, num_users, seconds, waiting.seconds, first_s)


@dataclass
class Contender:
    """A feed, with the times of its epochs."""

    name: str
    feed: Feed
    ready_s: float
    epochs: list[Epoch] = field(default_factory=list)

    @property
    def epoch_s(self) -> float:
        return statistics.median(epoch.seconds for epoch in self.epochs)

    def result(self, contenders: Sequence[Contender]) -> dict[str, Any]:
        """Return the row of the table. ``times`` divides its seconds by those of h5chunk and of the model alone."""
        seconds = [epoch.seconds for epoch in self.epochs]
        return {
            "feed": self.name,
            "epoch_s": self.epoch_s,
            "epochs_s": seconds,
            "users_per_s": self.epochs[0].num_users / self.epoch_s,
            "waiting": statistics.median(epoch.waiting_s / epoch.seconds for epoch in self.epochs),
            "ready_s": self.ready_s,
            "times": {each.name: self.epoch_s / each.epoch_s for each in contenders if each.name in TIMES},
        }


TIMES = (MODEL_ALONE, *OURS)


def compare(
    names: Sequence[str], job: Job, trainer: Trainer, num_rounds: int, say: Say
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the rows of the table, and why feeds are missing. Raises FeedError if too few feeds remain."""
    contenders: list[Contender] = []
    refused: dict[str, str] = {}
    try:
        for name in dict.fromkeys((MODEL_ALONE, *names)):
            try:
                contenders.append(warm_up(name, job, trainer))
            except FeedError as error:
                refused[name] = str(error)
                say(f"{name} is skipped ({error})")
        for number, contender in turns(contenders, num_rounds):
            run_epoch(trainer, contender.feed, number)
            contender.epochs.append(run_epoch(trainer, contender.feed, number + 1))
        rows = [contender.result(contenders) for contender in contenders]
    finally:
        for contender in contenders:
            contender.feed.close()
    for line in table(rows):
        say(line)
    return rows, refused


def warm_up(name: str, job: Job, trainer: Trainer) -> Contender:
    """Open a feed and train one epoch with it."""
    started = time.perf_counter()
    feed = FEEDS[name](job)
    opened_s = time.perf_counter() - started
    return Contender(name, feed, opened_s + run_epoch(trainer, feed, 0).first_s)


def turns(contenders: Sequence[Contender], num_rounds: int) -> Iterator[tuple[int, Contender]]:
    """Yield the first epoch and the contender of each turn, forwards and then backwards."""
    for number in range(num_rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            yield 1 + 2 * number, contender


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Format the rows as lines."""
    times = [name for name in TIMES if name in rows[0]["times"]]
    heads = "".join(f"  / {name}" for name in times)
    yield f"{'feed':17s} {'s/epoch':>8s} {'(least to most)':>17s} {'users/s':>10s} {'waiting':>8s} {'ready':>8s}{heads}"
    for row in rows:
        span = f"({min(row['epochs_s']):.3f} to {max(row['epochs_s']):.3f})"
        ratios = "".join(f"{row['times'][name]:{len(name) + 4}.3f}" for name in times)
        yield (
            f"{row['feed']:17s} {row['epoch_s']:8.3f} {span:>17s} {row['users_per_s']:10,.0f} {row['waiting']:8.1%} "
            f"{row['ready_s']:6.2f} s{ratios}"
        )
