"""The search of a tuner: what is predicted to be best is measured, which corrects the predictions, until time is up."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from h5chunk.errors import OutputError
from h5chunk.tools.measure.turns import rates_in_turns
from h5chunk.tools.model.choose import Candidate, allowed, choose
from h5chunk.tools.model.settings import Setting
from h5chunk.tools.tune.clock import Budget
from h5chunk.tools.tune.measure import measure
from h5chunk.tools.tune.model import Model
from h5chunk.tools.tune.study import Study

SEARCH_SHARE, FINAL_SHARE = 0.5, 0.82  # of the budget, when a phase ends
FIRST_SHARE = 0.3  # of the budget: settings whose first window takes more are not measured
LOOK, TURN = 0.4, 0.6  # of a slice: the first measurement of a setting, and those in turns
FINALISTS, TURNS, LEAST_TURNS = 6, 15, 2
HOPELESS, WORTH = 0.4, 0.3  # of the best rate: what is predicted to give less is not measured, in each phase
BEHIND = 0.88  # of the best rate: finalists that do not reach this leave the turns
MOSTLY = 0.75  # of the turns


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes
    ----------
    memory_bytes : int
        That feeding may take.
    workers : tuple of int
    device : str
    min_effective : float
        Samples that a batch shall be worth.
    """

    memory_bytes: int
    workers: tuple[int, ...]
    device: str
    min_effective: float


@dataclass
class Search:
    """Measures settings.

    Attributes
    ----------
    study : Study
    model : Model
    options : Options
    budget : Budget
    settings : list of Setting
        Today's first.
    rates : dict of Setting to list of float
        Samples/s of each measurement.
    turns : list of dict of Setting to float
        Those of the best, measured in turns.
    left_out : set of Setting
        Not measured, as they take too much memory or time.
    """

    study: Study
    model: Model
    options: Options
    budget: Budget
    settings: list[Setting]
    rates: dict[Setting, list[float]] = field(default_factory=dict)
    turns: list[dict[Setting, float]] = field(default_factory=list)
    left_out: set[Setting] = field(default_factory=set)
    _steady: dict[Setting, float] = field(default_factory=dict)

    def run(self) -> None:
        """Look at one of each kind, then at all that may be worth it, the most promising first; then race the best."""
        for setting in self._anchors():
            if self.budget.has(SEARCH_SHARE) or not self.rates:
                self.measure(setting, LOOK)
        self.measure(self.settings[0], LOOK)
        while self.budget.has(SEARCH_SHARE):
            promising = self._most_promising()
            if promising is None:
                break
            self.measure(promising, LOOK)
        self._race()

    def _race(self) -> None:
        """The best in turns; who falls behind leaves, but for those that the table needs."""
        runners = self.finalists()
        while len(self.turns) < TURNS and self.budget.has(FINAL_SHARE):
            turn = {each: rate for each in runners if (rate := self.measure(each, TURN)) is not None}
            if not turn:
                break
            self.turns.append(turn)
            self._steady = rates_in_turns(self.turns)
            best = max((self._steady[each] for each in turn if self.allows(each)), default=0.0)
            runners = list(turn)  # who could not run any more has left
            if len(self.turns) >= LEAST_TURNS:
                needed = self._kept(runners)
                runners = [each for each in turn if self._steady[each] >= BEHIND * best or each in needed]

    def measure(self, setting: Setting, part: float = 1.0) -> float | None:
        """Samples/s, over this part of a slice; None if it does not fit in memory, or takes too long to start."""
        window_samples = self.model.window_bytes(setting) / self.study.facts.sample_bytes
        first_s = min(window_samples, self.study.sample_count) / self.model.rate(setting)
        if self.model.memory(setting) > self.options.memory_bytes or first_s > FIRST_SHARE * self.budget.seconds:
            self.left_out.add(setting)
            return None
        try:
            self.study.path_of(setting, self.budget)
        except OutputError as error:  # what needs no new file can still be measured
            self.study.note(f"other chunks are not measured: {error}")
            self.left_out.add(setting)
            return None
        rate = measure(self.study, setting, self.options.device, self.budget, part * self.budget.slice_s)
        self.model.learn(setting, rate)
        self.rates.setdefault(setting, []).append(rate)
        return rate

    def _anchors(self) -> Iterable[Setting]:
        """The second best of each kind that is not hopeless, so that the best is predicted from another one."""
        kinds: dict[tuple[str, int, bool], list[Setting]] = {}
        for each in self.settings:
            if self.model.memory(each) > self.options.memory_bytes:
                continue
            kinds.setdefault((each.way, each.num_workers, each.repack), []).append(each)
        for some in kinds.values():
            some.sort(key=self.model.rate, reverse=True)
            if len(some) > 1 and (some[1] != self.settings[0] or len(some) == 2):
                some.insert(0, some.pop(1))
            elif len(some) > 2:
                some.insert(0, some.pop(2))
        firsts = sorted((some[0] for some in kinds.values()), key=self.model.rate, reverse=True)
        for setting in firsts:
            best = max((statistics.median(rates) for rates in self.rates.values()), default=0.0)
            if not setting.repack or self.model.rate(setting) >= HOPELESS * best:
                yield setting

    def _most_promising(self) -> Setting | None:
        """The allowed setting that was not measured and is predicted to be fastest, if that may be worth it."""
        good = [statistics.median(rates) for each, rates in self.rates.items() if self.allows(each)]
        best = max(good, default=0.0)
        fresh = [
            each for each in self.settings if each not in self.rates and each not in self.left_out and self.allows(each)
        ]
        found = max(fresh, key=self.model.rate, default=None)
        if found is None or self.model.rate(found) < WORTH * best:
            return None
        return found

    def allows(self, setting: Setting) -> bool:
        """Whether it fits in memory and mixes well enough."""
        return allowed(self.candidate(setting), self.options.min_effective, self.options.memory_bytes)

    def candidate(self, setting: Setting) -> Candidate:
        """With its rate in turns, else the measured, else the predicted one."""
        measured = self.measured(setting)
        rate = self.model.rate(setting) if measured is None else measured
        return self.model.candidate(setting, self._bounded(setting, rate))

    def measured(self, setting: Setting) -> float | None:
        """Samples/s: in turns, where it took part in them; None if it was never measured."""
        rates = self.rates.get(setting)
        return self._steady.get(setting, statistics.median(rates)) if rates else None

    def _bounded(self, setting: Setting, rate: float) -> float:
        """No more than the disk gives, where the data does not fit in memory."""
        disk = self.model.machine.disk_rate
        if disk is None or self.study.fits_memory:
            return rate
        return min(rate, disk / max(1.0, self.model.reads(setting).bytes_read))

    def finalists(self) -> list[Setting]:
        """The fastest measured ones that are allowed, without a new file, and of the smallest chunks; and today's."""
        measured = [each for each in self.settings if each in self.rates]
        ranked = sorted(measured, key=lambda each: self.candidate(each).rate, reverse=True)
        good = [each for each in ranked if self.allows(each)] or ranked
        near = [each for each in good if self.candidate(each).rate >= BEHIND * self.candidate(good[0]).rate]
        smallest = [min(near, key=lambda each: each.chunk_samples)] if near else []
        return list(dict.fromkeys([*good[:FINALISTS], *self._kept(good), *smallest]))

    def _kept(self, ranked: Sequence[Setting]) -> list[Setting]:
        """The first one without a new file, and today's."""
        return list(dict.fromkeys([*[each for each in ranked if not each.repack][:1], self.settings[0]]))

    def repack_pays(self, new: Setting, old: Setting) -> bool:
        """Whether a new file is faster in most of the turns: chance alone shall not ask for one."""
        both = [turn for turn in self.turns if new in turn and old in turn]
        return sum(turn[new] > turn[old] for turn in both) >= MOSTLY * len(both)

    def choose(self, settings: Sequence[Setting] | None = None) -> Candidate | None:
        """The one to take, of those measured in turns, else once, else predicted; None if none is allowed.

        A single measurement may be lucky: of many, the luckiest would win.
        """
        some = self.settings if settings is None else settings
        options = {"min_effective": self.options.min_effective, "memory_bytes": self.options.memory_bytes}
        for known in (self._steady.keys(), self.rates.keys(), set(some)):
            found = choose([self.candidate(each) for each in some if each in known], **options)  # type: ignore[arg-type]
            if found is not None:
                return found
        return None

    def nearest(self) -> Candidate:
        """Where nothing is allowed: of what fits in memory the one that mixes best, else the one that takes least."""
        candidates = [self.candidate(each) for each in self.settings]
        if not self.anything_fits:
            return min(candidates, key=lambda each: each.memory_bytes)
        fitting = [each for each in candidates if each.memory_bytes <= self.options.memory_bytes]
        return max(fitting, key=lambda each: (each.effective_batch or 0.0, -each.memory_bytes))

    @property
    def anything_fits(self) -> bool:
        """Whether there is a setting that takes no more memory than is allowed."""
        return any(self.model.memory(each) <= self.options.memory_bytes for each in self.settings)
