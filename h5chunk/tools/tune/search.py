"""Measure settings to find the fastest, then measure the best ones again, in turns with today's setting."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from h5chunk.errors import OutputError
from h5chunk.machine import available_cores
from h5chunk.plan.cache import CacheSettings
from h5chunk.tools.chunk_cache import cache_for_h5py
from h5chunk.tools.model.ratio import Ratio
from h5chunk.tools.model.settings import (
    LOADER,
    Setting,
    Trial,
    choose,
    cut_order,
    order_of,
    window_samples,
)
from h5chunk.tools.progress import TimeBudget
from h5chunk.tools.tune.study import Study

if TYPE_CHECKING:
    from h5chunk.tools.measure.batches import BatchRate

IN_PLACE_SHARE, NEW_SHARE, HEATS_SHARE, TURNS_SHARE = 0.15, 0.35, 0.4, 0.95  # ends of phases: shares of the budget
FIRST_SHARE = 0.2  # settings whose first window takes a larger share of the budget are not measured
FINALISTS, HEATS = 2, 2  # settings to compare for the unchanged and for a new file, and turns to compare them
MIN_TURNS, FEW_TURNS, MAX_TURNS = 3, 6, 15
MAX_SHARE = 1.2  # fraction of the budget at which measuring ends, even with fewer turns
BUSY = 1.5  # load per core from which a machine is busy
WARM_SHARE = 0.05  # share of the budget for warming up, because the first write to memory is slow
ROUND_SHARE = 0.05  # share of the budget for consuming prefetched samples, and for complete rounds of windows
TRY_LEAD, TRY_ROUND = 3, 3  # the same limits for the first measurement of a setting, as multiples of its duration
WORTH_CODE, WORTH_FILE = 1.0, 1.3  # minimum certain speedup that justifies a line of code, and a new file

TODAY, IN_PLACE, NEW, PLAIN = "as today", "best without a new file", "rewritten", "plain h5py"
CACHED = "h5py, chunk cache"  # as plain h5py, but with the cache for the order of today's setting, and in this order


def open_batches(study: Study, setting: Setting, device: str) -> BatchRate:
    """Open the loader of a setting for the samples to measure."""
    from h5chunk.tools.measure.batches import open_dataset, open_loader
    from h5chunk.tools.measure.images import open_data

    path, fields = study.path_of(setting)
    order = cut_order(order_of(setting, study.facts), study.num_measured)
    dataset = open_data(path, fields, study.reader.trusted)
    if setting.reader != LOADER:
        return open_dataset(dataset, order, num_workers=setting.num_workers)
    return open_loader(dataset, order, device=device)


def other_load(own: int = 0) -> float:
    """Return the mean load per core in the last minute, at least 1. The load of ``own`` threads is not counted."""
    try:
        return max(1.0, (os.getloadavg()[0] - own) / (os.cpu_count() or 1))
    except OSError:
        return 1.0


@dataclass
class Search:
    """Measure the settings in ``trials``, of which the first is today's, within a time budget."""

    study: Study
    device: str
    budget: TimeBudget
    trials: dict[Setting, Trial]
    memory_bytes: int
    finalists: dict[str, Setting] = field(default_factory=dict)  # by the name of their row in the report
    turns: dict[str, list[float]] = field(default_factory=dict)  # samples/s in each turn, by the name of the row
    busy: float = 1.0  # load per core by other programs
    _tried: set[Setting] = field(default_factory=set)

    @property
    def today(self) -> Setting:
        """The setting that readers choose by default."""
        return next(iter(self.trials))

    def run(self, *, only_today: bool) -> None:
        """Search for the fastest settings, unless ``only_today``, and measure the finalists in turns."""
        in_place: list[Setting] = []
        rewritten: list[Setting] = []
        self.busy = other_load()
        if not only_today:
            in_place = self._search([finalist for finalist in self.trials if not finalist.repack], IN_PLACE_SHARE)
            rewritten = self._search([finalist for finalist in self.trials if finalist.repack], NEW_SHARE)
        in_place = list(dict.fromkeys([self.today, *in_place]))
        with self._opened([*in_place, *rewritten, *self._best_shuffled()]) as runners:
            self._choose_finalists(runners, in_place, rewritten)
            race: dict[Any, Callable[[], float]] = {
                name: runners[finalist] for name, finalist in self.finalists.items()
            }
            race[PLAIN] = self._plain_rate
            if not self.study.is_ragged and self.h5py_cache.nbytes:
                race[CACHED] = self._cached_rate
            self.turns = self._measure_in_turns(race, MIN_TURNS, FEW_TURNS if only_today else MAX_TURNS, TURNS_SHARE)
        self.busy = max(self.busy, other_load(own=available_cores()))
        if self.busy > BUSY:
            self.study.note(
                f"other programs keep the machine busy (load {os.getloadavg()[0]:.0f}), so the intervals are wide"
            )
        for name, setting in self.finalists.items():
            self.trials[setting] = replace(self.trials[setting], rate=statistics.median(self.turns[name]))

    def ratio(self, name: str, other: str = TODAY) -> Ratio:
        """Return the ratio of the rates of two finalists, measured in the same turns."""
        return Ratio.of(self.turns[name], self.turns[other], self.busy)

    def decide(self) -> tuple[str, str]:
        """Return the name of the recommended finalist, and the name of the best finalist for the unchanged file.

        A change is recommended only if its gain is certain. The gain of a new file must be at least WORTH_FILE.
        """
        name = TODAY
        today_fails = not self.trials[self.today].allowed
        if IN_PLACE in self.finalists and (today_fails or self.ratio(IN_PLACE).low > WORTH_CODE):
            name = IN_PLACE
        rewritten = NEW in self.finalists and (
            (today_fails and name == TODAY) or self.ratio(NEW, name).low > WORTH_FILE < self.ratio(NEW).low
        )
        return (NEW if rewritten else name), name

    def _search(self, settings: Sequence[Setting], share: float) -> list[Setting]:
        """Repeatedly measure a setting that differs in one respect from the fastest one; return the fastest ones."""
        allowed = [candidate for candidate in settings if self.trials[candidate].allowed]
        while allowed and (not self._tried.intersection(allowed) or self.budget.has(share)):
            best = choose(self.trials[candidate] for candidate in allowed)
            at = allowed[0] if best is None else best.setting
            near = (candidate for candidate in allowed if candidate not in self._tried and self._is_near(candidate, at))
            if (setting := next(near, None)) is None:
                break
            self._try(setting)
        known = [candidate for candidate in allowed if self.trials[candidate].rate is not None]
        return sorted(known, key=lambda candidate: self.trials[candidate].rate or 0.0, reverse=True)[:FINALISTS]

    def _is_near(self, setting: Setting, other: Setting) -> bool:
        """Return whether two settings differ only in their window, reader or layout.

        If the layouts differ, the first setting must have the default window of its layout.
        """
        same_reader = (setting.reader, setting.num_workers) == (other.reader, other.num_workers)
        if setting.layout == other.layout:
            return same_reader or setting.window_chunks == other.window_chunks
        default = next(candidate for candidate in self.trials if candidate.layout == setting.layout)
        return same_reader and setting.window_chunks == default.window_chunks

    def _try(self, setting: Setting) -> None:
        """Measure a setting once, unless its first window takes too long or its file cannot be written."""
        self._tried.add(setting)
        known = [tried for tried in self._tried if tried.layout == setting.layout and self.trials[tried].rate]
        fastest = max((self.trials[tried].rate or 0.0 for tried in known), default=0.0)
        first = min(window_samples(setting, self.study.facts), self.study.num_measured)
        if fastest and first / fastest > FIRST_SHARE * self.budget.seconds:
            return
        try:
            self.study.path_of(setting)
        except OutputError as error:  # settings without a new file can still be measured
            self.study.note(f"no new file was measured ({error})")
            return
        self.trials[setting] = replace(self.trials[setting], rate=self._rate(setting))

    def _best_shuffled(self) -> list[Setting]:
        """Return the setting with the best shuffle that fits in memory, if no setting is allowed."""
        if any(trial.allowed for trial in self.trials.values()):
            return []
        fitting = [trial for trial in self.trials.values() if trial.memory_bytes <= self.memory_bytes]
        return [min(fitting, key=lambda trial: (-(trial.effective_batch or 0.0), trial.memory_bytes)).setting]

    def _choose_finalists(
        self, runners: Mapping[Setting, Callable[[], float]], in_place: Sequence[Setting], rewritten: Sequence[Setting]
    ) -> None:
        """Choose finalists by a few turns, because the fastest of many settings may be the fastest by chance."""
        heats = self._measure_in_turns(runners, 1, HEATS if len(runners) > 1 else 0, HEATS_SHARE)
        for setting, rates in heats.items():
            self.trials[setting] = replace(self.trials[setting], rate=statistics.median(rates or [0.0]))
        self.finalists = {TODAY: self.today}
        for name, settings in ((IN_PLACE, in_place), (NEW, rewritten)):
            best = choose(self.trials[shuffled] for shuffled in settings)
            if best is not None and best.setting != self.today:
                self.finalists[name] = best.setting
        self.finalists |= {NEW if shuffled.repack else IN_PLACE: shuffled for shuffled in self._best_shuffled()}

    def _measure_in_turns(
        self, runners: Mapping[Any, Callable[[], float]], min_turns: int, max_turns: int, share: float
    ) -> dict[Any, list[float]]:
        """Measure all runners in turns, in alternating order, as often as a share of the budget allows.

        There are at most ``max_turns`` turns, and at least ``min_turns`` unless these exceed the budget by far.
        """
        turns: dict[Any, list[float]] = {name: [] for name in runners}
        longest = 0.0
        for number in range(max_turns):
            limit = share if number >= min_turns else MAX_SHARE
            if number and self.budget.taken_s + longest > limit * self.budget.seconds:
                break
            started = self.budget.taken_s
            for name in list(runners)[:: 1 if number % 2 else -1]:
                turns[name].append(runners[name]())
                self.budget.report()
            longest = max(longest, self.budget.taken_s - started)
        return turns

    @contextmanager
    def _opened(self, settings: Iterable[Setting]) -> Iterator[dict[Setting, Callable[[], float]]]:
        """Yield a function for each setting that measures its rate. All loaders stay open, and are warmed up."""
        from h5chunk.tools.measure.batches import wait_for_readers

        def rate(batches: BatchRate) -> float:
            wait_for_readers()  # the previous loader may still be reading ahead
            max_s = ROUND_SHARE * self.budget.seconds
            return batches.rate(self.budget.slice_s, max_s, max_s)

        with ExitStack() as stack:
            runners: dict[Setting, Callable[[], float]] = {}
            for setting in sorted(
                set(settings), key=lambda key: key.reader == LOADER
            ):  # fork workers before threads start
                batches = stack.enter_context(closing(open_batches(self.study, setting, self.device)))
                batches.warm_up(WARM_SHARE * self.budget.seconds)
                runners[setting] = partial(rate, batches)
            yield runners

    def _rate(self, setting: Setting) -> float:
        seconds = self.budget.slice_s
        with closing(open_batches(self.study, setting, self.device)) as batches:
            batches.warm_up(TRY_LEAD * seconds)
            return batches.rate(seconds, 0.0, TRY_ROUND * seconds)

    def _plain_rate(self) -> float:
        from h5chunk.tools.measure.batches import plain_rate

        study, rng = self.study, np.random.default_rng(0)
        batches = (rng.integers(0, study.num_measured, study.facts.batch_samples) for _ in count())
        return plain_rate(study.reader, batches, self.budget.slice_s)

    def _cached_rate(self) -> float:
        from h5chunk.tools.measure.batches import plain_rate

        # windows one by one decode as many chunks as windows that alternate, but not all of them at the beginning
        order = replace(cut_order(order_of(self.today, self.study.facts), self.study.num_measured), interleave=1)
        batches = (batch for epoch in count() for batch in replace(order, epoch=epoch).batches())
        return plain_rate(self.study.reader, batches, self.budget.slice_s, self.h5py_cache)

    @property
    def h5py_cache(self) -> CacheSettings:
        """The chunk cache for reading single samples with h5py, in the order of today's setting."""
        facts = self.study.facts
        return cache_for_h5py(facts.grid, order_of(self.today, facts).open_chunks_of(1), facts.batch_samples)
