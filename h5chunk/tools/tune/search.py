"""Search for the fastest setting by measuring, then measure the finalists again, in turns with today's setting."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from h5chunk.errors import OutputError
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

IN_PLACE_SHARE, NEW_SHARE, HEATS_SHARE, TURNS_SHARE = 0.15, 0.35, 0.4, 0.95  # used shares of the budget that end phases
FIRST_SHARE = 0.2  # settings whose first window takes a larger share of the budget are not measured
FINALISTS, HEATS = 2, 2  # fastest settings of the unchanged and of a new file, and turns among them before the choice
LEAST_TURNS, FEW_TURNS, MOST_TURNS = 3, 6, 15
WARM_SHARE = 0.05  # share of the budget to warm up, as memory takes longer to write for the first time
ROUND_SHARE = 0.05  # share of the budget to take samples that were read ahead, and for whole rounds of windows
LOOK_LEAD, LOOK_ROUND = 3, 3  # time for the same in a first look, over the time of a measurement
WORTH_CODE, WORTH_FILE = 1.0, 1.3  # least certain gain that is worth a line of code, and a new file

TODAY, IN_PLACE, NEW, PLAIN = "as today", "best without a new file", "rewritten", "plain h5py"


def open_batches(study: Study, setting: Setting, device: str) -> BatchRate:
    """Open the loader of a setting, on the samples to measure."""
    from h5chunk.tools.measure.batches import open_dataset, open_loader
    from h5chunk.tools.measure.images import open_data

    path, fields = study.path_of(setting)
    order = cut_order(order_of(setting, study.facts), study.num_measured)
    dataset = open_data(path, fields, study.reader.trusted)
    if setting.way != LOADER:
        return open_dataset(dataset, order, num_workers=setting.num_workers)
    is_whole = study.num_measured == study.facts.num_samples
    return open_loader(dataset, order, device=device, resident="auto" if is_whole else False)


@dataclass
class Search:
    """Measure the settings of ``trials``, of which the first is today's, within a time budget."""

    study: Study
    device: str
    budget: TimeBudget
    trials: dict[Setting, Trial]
    memory_bytes: int
    finalists: dict[str, Setting] = field(default_factory=dict)  # by the name of the row in the report
    turns: dict[str, list[float]] = field(default_factory=dict)  # samples/s in each turn, by the name of the row
    _tried: set[Setting] = field(default_factory=set)

    @property
    def today(self) -> Setting:
        """The setting that readers choose by default."""
        return next(iter(self.trials))

    def run(self, *, only_today: bool) -> None:
        """Search for the fastest settings unless ``only_today``, and measure the finalists in turns."""
        in_place: list[Setting] = []
        rewritten: list[Setting] = []
        if not only_today:
            in_place = self._climb([each for each in self.trials if not each.repack], IN_PLACE_SHARE)
            rewritten = self._climb([each for each in self.trials if each.repack], NEW_SHARE)
        in_place = list(dict.fromkeys([self.today, *in_place]))
        with self._opened([*in_place, *rewritten, *self._mixes_best()]) as runners:
            self._choose_finalists(runners, in_place, rewritten)
            race: dict[Any, Callable[[], float]] = {name: runners[each] for name, each in self.finalists.items()}
            race[PLAIN] = self._plain_rate
            self.turns = self._race(race, FEW_TURNS if only_today else MOST_TURNS, TURNS_SHARE)
        for name, setting in self.finalists.items():
            self.trials[setting] = replace(self.trials[setting], rate=statistics.median(self.turns[name]))

    def ratio(self, name: str, other: str = TODAY) -> Ratio:
        """Return the ratio of the rates of two finalists in the same turns."""
        return Ratio.of(self.turns[name], self.turns[other])

    def decide(self) -> tuple[str, str]:
        """Return the names of the recommended finalist, and of the best finalist without a new file.

        The gain of any change must be certain, and that of a new file must be at least WORTH_FILE.
        """
        kept = TODAY
        today_fails = not self.trials[self.today].allowed
        if IN_PLACE in self.finalists and (today_fails or self.ratio(IN_PLACE).low > WORTH_CODE):
            kept = IN_PLACE
        rewritten = NEW in self.finalists and (
            (today_fails and kept == TODAY) or self.ratio(NEW, kept).low > WORTH_FILE < self.ratio(NEW).low
        )
        return (NEW if rewritten else kept), kept

    def _climb(self, settings: Sequence[Setting], share: float) -> list[Setting]:
        """Measure settings that differ in one respect from the fastest so far; return the fastest settings."""
        allowed = [each for each in settings if self.trials[each].allowed]
        while allowed and (not self._tried.intersection(allowed) or self.budget.has(share)):
            best = choose(self.trials[each] for each in allowed)
            at = allowed[0] if best is None else best.setting
            near = (each for each in allowed if each not in self._tried and self._is_near(each, at))
            if (setting := next(near, None)) is None:
                break
            self._look(setting)
        known = [each for each in allowed if self.trials[each].rate is not None]
        return sorted(known, key=lambda each: self.trials[each].rate or 0.0, reverse=True)[:FINALISTS]

    def _is_near(self, one: Setting, other: Setting) -> bool:
        """Return whether two settings differ only in window, reader or layout.

        A setting of another layout is near only with its default window.
        """
        same_reader = (one.way, one.num_workers) == (other.way, other.num_workers)
        if one.layout == other.layout:
            return same_reader or one.window_chunks == other.window_chunks
        default = next(each for each in self.trials if each.layout == one.layout)
        return same_reader and one.window_chunks == default.window_chunks

    def _look(self, setting: Setting) -> None:
        """Measure a setting once, unless its first window would take too long, or its file cannot be written."""
        self._tried.add(setting)
        known = [each for each in self._tried if each.layout == setting.layout and self.trials[each].rate]
        fastest = max((self.trials[each].rate or 0.0 for each in known), default=0.0)
        first = min(window_samples(setting, self.study.facts), self.study.num_measured)
        if fastest and first / fastest > FIRST_SHARE * self.budget.seconds:
            return
        try:
            self.study.path_of(setting)
        except OutputError as error:  # settings without a new file can still be measured
            self.study.note(f"a new file is not measured: {error}")
            return
        self.trials[setting] = replace(self.trials[setting], rate=self._rate(setting))

    def _mixes_best(self) -> list[Setting]:
        """Return the setting with the best shuffle that fits in memory if none is allowed, otherwise nothing."""
        if any(each.allowed for each in self.trials.values()):
            return []
        fitting = [each for each in self.trials.values() if each.memory_bytes <= self.memory_bytes]
        return [min(fitting, key=lambda each: (-(each.effective_batch or 0.0), each.memory_bytes)).setting]

    def _choose_finalists(
        self, runners: Mapping[Setting, Callable[[], float]], in_place: Sequence[Setting], rewritten: Sequence[Setting]
    ) -> None:
        """Choose the finalists by a few turns, because the fastest of many single measurements may be so by chance."""
        heats = self._race(runners, HEATS if len(runners) > 1 else 0, HEATS_SHARE)
        for setting, rates in heats.items():
            self.trials[setting] = replace(self.trials[setting], rate=statistics.median(rates or [0.0]))
        self.finalists = {TODAY: self.today}
        for name, settings in ((IN_PLACE, in_place), (NEW, rewritten)):
            best = choose(self.trials[each] for each in settings)
            if best is not None and best.setting != self.today:
                self.finalists[name] = best.setting
        self.finalists |= {NEW if each.repack else IN_PLACE: each for each in self._mixes_best()}

    def _race(self, runners: Mapping[Any, Callable[[], float]], most: int, share: float) -> dict[Any, list[float]]:
        """Measure all runners in turns, forwards and backwards, at least three and at most ``most`` times."""
        turns: dict[Any, list[float]] = {name: [] for name in runners}
        for number in range(most):
            if number >= LEAST_TURNS and not self.budget.has(share):
                break
            for name in list(runners)[:: 1 if number % 2 else -1]:
                turns[name].append(runners[name]())
                self.budget.report()
        return turns

    @contextmanager
    def _opened(self, settings: Iterable[Setting]) -> Iterator[dict[Setting, Callable[[], float]]]:
        """Yield a function for each setting that measures its rate; all loaders are warmed up, and stay open."""
        from h5chunk.tools.measure.batches import settle

        def rate(batches: BatchRate) -> float:
            settle()  # the previous loader may still be reading ahead
            most_s = ROUND_SHARE * self.budget.seconds
            return batches.rate(self.budget.slice_s, most_s, most_s)

        with ExitStack() as stack:
            runners: dict[Setting, Callable[[], float]] = {}
            for setting in sorted(set(settings), key=lambda each: each.way == LOADER):  # workers fork without threads
                batches = stack.enter_context(closing(open_batches(self.study, setting, self.device)))
                batches.warm_up(WARM_SHARE * self.budget.seconds)
                runners[setting] = partial(rate, batches)
            yield runners

    def _rate(self, setting: Setting) -> float:
        seconds = self.budget.slice_s
        with closing(open_batches(self.study, setting, self.device)) as batches:
            batches.warm_up(LOOK_LEAD * seconds)
            return batches.rate(seconds, 0.0, LOOK_ROUND * seconds)

    def _plain_rate(self) -> float:
        from h5chunk.tools.measure.batches import plain_rate

        study = self.study
        return plain_rate(study.reader, study.num_measured, study.facts.batch_samples, self.budget.slice_s)
