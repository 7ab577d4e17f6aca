"""Search for the best setting: measure the settings that are predicted to be best, which corrects the predictions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from h5chunk.errors import OutputError
from h5chunk.tools.measure.machine import interleaved_rates
from h5chunk.tools.model.settings import Candidate, Limits, Setting, choose
from h5chunk.tools.progress import TimeBudget
from h5chunk.tools.tune.measure import measure
from h5chunk.tools.tune.predict import Predictor
from h5chunk.tools.tune.study import Study

SEARCH_SHARE, FINAL_SHARE = 0.5, 0.82  # of the budget, when a phase ends
FIRST_SHARE = 0.3  # of the budget: settings whose first window takes more are not measured
LOOK, TURN = 0.4, 0.6  # of a slice: the first measurement of a setting, and those in turns
FINALISTS, TURNS, LEAST_TURNS = 6, 15, 2
HOPELESS, WORTH = 0.4, 0.3  # of the best rate: what is predicted to give less is not measured, in each phase
BEHIND = 0.88  # of the best rate: finalists that do not reach this leave the turns
MOSTLY = 0.75  # of the turns


@dataclass
class Search:
    """Measures settings within a time budget.

    Attributes
    ----------
    study : Study
    predictor : Predictor
    limits : Limits
    device : str
    budget : TimeBudget
    settings : list of Setting
        Today's first.
    rates : dict of Setting to list of float
        Samples/s of each measurement.
    turns : list of dict of Setting to float
        Rates of the best settings, measured in turns.
    left_out : set of Setting
        Not measured, as they take too much memory or time.
    """

    study: Study
    predictor: Predictor
    limits: Limits
    device: str
    budget: TimeBudget
    settings: list[Setting]
    rates: dict[Setting, list[float]] = field(default_factory=dict)
    turns: list[dict[Setting, float]] = field(default_factory=list)
    left_out: set[Setting] = field(default_factory=set)
    _steady: dict[Setting, float] = field(default_factory=dict)

    @property
    def today(self) -> Setting:
        """The setting that readers choose by default."""
        return self.settings[0]

    def run(self) -> None:
        """Measure one setting of each kind, then the most promising ones; then race the best."""
        for setting in self._anchors():
            if self.budget.has(SEARCH_SHARE) or not self.rates:
                self.measure(setting, LOOK)
        self.measure(self.today, LOOK)
        while self.budget.has(SEARCH_SHARE) and (promising := self._most_promising()) is not None:
            self.measure(promising, LOOK)
        self._race()

    def _race(self) -> None:
        """Measure the best in turns; a setting that falls behind leaves, unless the table needs it."""
        runners = self.finalists()
        while len(self.turns) < TURNS and self.budget.has(FINAL_SHARE):
            turn = {each: rate for each in runners if (rate := self.measure(each, TURN)) is not None}
            if not turn:
                break
            self.turns.append(turn)
            self._steady = interleaved_rates(self.turns)
            best = max((self._steady[each] for each in turn if self.allows(each)), default=0.0)
            runners = list(turn)  # without those that could not be measured any more
            if len(self.turns) >= LEAST_TURNS:
                needed = self._needed(runners)
                runners = [each for each in turn if self._steady[each] >= BEHIND * best or each in needed]

    def measure(self, setting: Setting, part: float = 1.0) -> float | None:
        """Samples/s, over this part of a slice; None if it does not fit in memory, or takes too long to start."""
        window_samples = self.predictor.window_bytes(setting) / self.study.facts.sample_bytes
        first_s = min(window_samples, self.study.sample_count) / self.predictor.rate(setting)
        if self.predictor.memory(setting) > self.limits.memory_bytes or first_s > FIRST_SHARE * self.budget.seconds:
            self.left_out.add(setting)
            return None
        try:
            self.study.path_of(setting, self.budget)
        except OutputError as error:  # what needs no new file can still be measured
            self.study.note(f"other chunks are not measured: {error}")
            self.left_out.add(setting)
            return None
        rate = measure(self.study, setting, self.device, self.budget, part * self.budget.slice_s)
        self.predictor.learn(setting, rate)
        self.rates.setdefault(setting, []).append(rate)
        return rate

    def _anchors(self) -> Iterable[Setting]:
        """The second best of each kind that is not hopeless, so that the best is predicted from another one."""
        kinds: dict[tuple[str, int, bool], list[Setting]] = {}
        for each in self.settings:
            if self.predictor.memory(each) <= self.limits.memory_bytes:
                kinds.setdefault((each.way, each.num_workers, each.repack), []).append(each)
        firsts = sorted(map(self._anchor, kinds.values()), key=self.predictor.rate, reverse=True)
        for setting in firsts:
            best = max((statistics.median(rates) for rates in self.rates.values()), default=0.0)
            if not setting.repack or self.predictor.rate(setting) >= HOPELESS * best:
                yield setting

    def _anchor(self, kind: list[Setting]) -> Setting:
        """The second best, or the third where the second is today's, which is measured anyway."""
        ranked = sorted(kind, key=self.predictor.rate, reverse=True)
        if len(ranked) == 1:
            return ranked[0]
        return ranked[2] if ranked[1] == self.today and len(ranked) > 2 else ranked[1]

    def _most_promising(self) -> Setting | None:
        """The allowed setting that was not measured and is predicted to be fastest, if that may be worth it."""
        good = [statistics.median(rates) for each, rates in self.rates.items() if self.allows(each)]
        known = self.rates.keys() | self.left_out
        fresh = [each for each in self.settings if each not in known and self.allows(each)]
        found = max(fresh, key=self.predictor.rate, default=None)
        return None if found is None or self.predictor.rate(found) < WORTH * max(good, default=0.0) else found

    def allows(self, setting: Setting) -> bool:
        """Whether it fits in memory and mixes well enough."""
        return self.limits.allow(self.candidate(setting))

    def candidate(self, setting: Setting) -> Candidate:
        """The setting with its rate in turns, else the measured, else the predicted one."""
        measured = self.measured(setting)
        rate = self.predictor.rate(setting) if measured is None else measured
        return self.predictor.candidate(setting, self._bounded(setting, rate))

    def measured(self, setting: Setting) -> float | None:
        """Samples/s: in turns, where it took part in them; None if it was never measured."""
        rates = self.rates.get(setting)
        return self._steady.get(setting, statistics.median(rates)) if rates else None

    def _bounded(self, setting: Setting, rate: float) -> float:
        """No more than the disk gives, where the data does not fit in memory."""
        disk = self.predictor.machine.disk_rate
        if disk is None or self.study.fits_memory:
            return rate
        return min(rate, disk / max(1.0, self.predictor.reads(setting).bytes_read))

    def finalists(self) -> list[Setting]:
        """The fastest measured settings that are allowed, and today's; one without a new file, and of small chunks."""
        measured = [each for each in self.settings if each in self.rates]
        ranked = sorted(measured, key=lambda each: self.candidate(each).rate, reverse=True)
        good = [each for each in ranked if self.allows(each)] or ranked
        near = [each for each in good if self.candidate(each).rate >= BEHIND * self.candidate(good[0]).rate]
        smallest = [min(near, key=lambda each: each.chunk_samples)] if near else []
        return list(dict.fromkeys([*good[:FINALISTS], *self._needed(good), *smallest]))

    def _needed(self, ranked: Sequence[Setting]) -> list[Setting]:
        """The first setting without a new file, and today's."""
        return list(dict.fromkeys([*[each for each in ranked if not each.repack][:1], self.today]))

    def repack_pays(self, new: Setting, old: Setting) -> bool:
        """Whether a new file is faster in most of the turns: chance alone shall not ask for one."""
        both = [(turn[new], turn[old]) for turn in self.turns if new in turn and old in turn]
        return sum(one > other for one, other in both) >= MOSTLY * len(both)

    def choose(self, settings: Sequence[Setting] | None = None) -> Candidate | None:
        """The setting to take, of those measured in turns, else once, else predicted; None if none is allowed.

        A single measurement may be lucky: of many, the luckiest would win.
        """
        some = self.settings if settings is None else settings
        for known in (self._steady.keys(), self.rates.keys(), set(some)):
            found = choose([self.candidate(each) for each in some if each in known], self.limits)
            if found is not None:
                return found
        return None

    def nearest(self) -> Candidate:
        """Where nothing is allowed: of what fits in memory the one that mixes best, else the one that takes least."""
        candidates = [self.candidate(each) for each in self.settings]
        if not self.anything_fits:
            return min(candidates, key=lambda each: each.memory_bytes)
        fitting = [each for each in candidates if each.memory_bytes <= self.limits.memory_bytes]
        return max(fitting, key=lambda each: (each.effective_batch or 0.0, -each.memory_bytes))

    @property
    def anything_fits(self) -> bool:
        """Whether there is a setting that takes no more memory than is allowed."""
        return any(self.predictor.memory(each) <= self.limits.memory_bytes for each in self.settings)
