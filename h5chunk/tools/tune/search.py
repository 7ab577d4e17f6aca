"""Search for the best setting: measure the settings with the best predictions, and correct the predictions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from h5chunk.errors import OptionError, OutputError
from h5chunk.plan.layout import human_bytes
from h5chunk.tools.measure.machine import interleaved_rates
from h5chunk.tools.model.settings import (
    LOADER,
    Candidate,
    Limits,
    Setting,
    TriedSetting,
    choose,
    cut_order,
    memory_of,
    order_of,
    window_samples,
)
from h5chunk.tools.progress import TimeBudget
from h5chunk.tools.tune.predict import Predictor
from h5chunk.tools.tune.study import Study

SEARCH_SHARE, FINAL_SHARE = 0.5, 0.85  # of the budget, when a phase ends
FIRST_SHARE = 0.3  # of the budget: settings whose first window takes more are not measured
LOOK, TURN = 0.4, 0.6  # of a slice: the first measurement of a setting, and those in turns
FINALISTS, TURNS, LEAST_TURNS = 6, 15, 2
HOPELESS, WORTH = 0.4, 0.3  # of the best rate: settings that are predicted to be slower are not measured
BEHIND = 0.88  # of the best rate: slower finalists leave the turns
MOST_LEAD = 3  # times the seconds of a measurement, to use up what was read ahead


def measure(study: Study, setting: Setting, device: str, budget: TimeBudget, seconds: float) -> float:
    """Measure samples/s of a setting with its actual loader, from the page cache."""
    from h5chunk.feed.dataset import ChunkDataset
    from h5chunk.tools.measure.batches import open_dataset, open_loader

    path, fields = study.path_of(setting, budget)
    order = cut_order(order_of(setting, study.facts), study.num_measured)
    dataset = ChunkDataset(path, fields=fields, trusted=study.reader.trusted)
    if setting.way == LOADER:
        batches = open_loader(dataset, order, device=device)
    else:
        batches = open_dataset(dataset, order, num_workers=setting.num_workers)
    with closing(batches):
        return batches.rate(seconds, MOST_LEAD * seconds)


@dataclass
class Search:
    """Measure settings, the current one first, within a time budget."""

    study: Study
    predictor: Predictor
    limits: Limits
    device: str
    budget: TimeBudget
    settings: list[Setting]
    rates: dict[Setting, list[float]] = field(default_factory=dict)  # samples/s of each measurement
    turns: list[dict[Setting, float]] = field(default_factory=list)  # rates of the best settings, measured in turns
    steady: dict[Setting, float] = field(default_factory=dict)  # one rate for each of these
    left_out: set[Setting] = field(default_factory=set)  # not measured, as they take too much memory or time

    @property
    def today(self) -> Setting:
        """The current setting: what readers choose by default."""
        return self.settings[0]

    def run(self) -> None:
        """Measure one setting of each kind, then the most promising ones; then race the best.

        Raises OptionError if no setting fits in memory.
        """
        least = min(memory_of(setting, self.study.facts) for setting in self.settings)
        if least > self.limits.memory_bytes:
            given, needed = human_bytes(self.limits.memory_bytes), human_bytes(least)
            raise OptionError(f"memory_bytes is {given}, but feeding takes at least {needed}: allow more memory")
        self.look(self._anchors())
        measured = [setting for setting in self.settings if setting in self.rates]
        ranked = sorted(measured, key=lambda setting: self.candidate(setting).rate, reverse=True)
        allowed = [setting for setting in ranked if self.allows(setting)] or ranked
        self.race(list(dict.fromkeys([*allowed[:FINALISTS], *self._needed(allowed)])))

    def look(self, anchors: Iterable[Setting]) -> None:
        """Measure the anchors and the current setting, then the most promising settings, while time remains."""
        for setting in anchors:
            if self.budget.has(SEARCH_SHARE) or not self.rates:
                self.measure(setting, LOOK)
        self.measure(self.today, LOOK)
        while self.budget.has(SEARCH_SHARE) and (promising := self._most_promising()) is not None:
            self.measure(promising, LOOK)

    def race(self, runners: list[Setting]) -> None:
        """Measure settings in turns; a setting that falls behind is dropped, unless the report needs it."""
        while len(self.turns) < TURNS and self.budget.has(FINAL_SHARE):
            turn = {setting: rate for setting in runners if (rate := self.measure(setting, TURN)) is not None}
            if not turn:
                break
            self.turns.append(turn)
            self.steady = interleaved_rates(self.turns)
            runners = list(turn)
            if len(self.turns) >= LEAST_TURNS:
                best = max((self.steady[setting] for setting in runners if self.allows(setting)), default=0.0)
                needed = self._needed(runners)
                runners = [each for each in runners if self.steady[each] >= BEHIND * best or each in needed]

    def measure(self, setting: Setting, part: float = 1.0) -> float | None:
        """Measure samples/s for this part of a slice; None if the setting exceeds memory, or starts too slowly."""
        first = min(window_samples(setting, self.study.facts), self.study.num_measured)
        too_long = first / self.predictor.rate(setting) > FIRST_SHARE * self.budget.seconds
        if too_long or memory_of(setting, self.study.facts) > self.limits.memory_bytes:
            self.left_out.add(setting)
            return None
        try:
            self.study.path_of(setting, self.budget)
        except OutputError as error:  # settings without a new file can still be measured
            self.study.note(f"other chunks are not measured: {error}")
            self.left_out.add(setting)
            return None
        rate = measure(self.study, setting, self.device, self.budget, part * self.budget.slice_s)
        self.predictor.learn(setting, rate)
        self.rates.setdefault(setting, []).append(rate)
        return rate

    def _anchors(self) -> Iterable[Setting]:
        """Yield the second-best setting per way, workers and layout: measuring it corrects the predicted best."""
        kinds: dict[tuple[str, int, bool], list[Setting]] = {}
        for setting in sorted(self.settings, key=self.predictor.rate, reverse=True):
            if memory_of(setting, self.study.facts) <= self.limits.memory_bytes:
                kinds.setdefault((setting.way, setting.num_workers, setting.repack), []).append(setting)
        for ranked in kinds.values():
            anchor = ranked[min(1, len(ranked) - 1)]
            best = max(map(statistics.median, self.rates.values()), default=0.0)
            if not anchor.repack or self.predictor.rate(anchor) >= HOPELESS * best:
                yield anchor

    def _most_promising(self) -> Setting | None:
        """Return the allowed, unmeasured setting with the fastest prediction, if measuring it may be worthwhile."""
        best = max((statistics.median(rates) for each, rates in self.rates.items() if self.allows(each)), default=0.0)
        known = self.rates.keys() | self.left_out
        unknown = [setting for setting in self.settings if setting not in known and self.allows(setting)]
        promising = max(unknown, key=self.predictor.rate, default=None)
        return None if promising is None or self.predictor.rate(promising) < WORTH * best else promising

    def _needed(self, ranked: Sequence[Setting]) -> list[Setting]:
        """Return the first setting without a new file, and the current setting."""
        return [*[setting for setting in ranked if not setting.repack][:1], self.today]

    def allows(self, setting: Setting) -> bool:
        """Return whether a setting fits in memory and mixes well enough."""
        return self.limits.allow(self.candidate(setting))

    def measured(self, setting: Setting) -> float | None:
        """Return measured samples/s, from turns if the setting took part in them; None if it was never measured."""
        rates = self.rates.get(setting)
        return self.steady.get(setting, statistics.median(rates)) if rates else None

    def candidate(self, setting: Setting) -> Candidate:
        """Return the candidate of a setting, with its rate in turns, or else measured once, or else predicted."""
        measured = self.measured(setting)
        rate = self.predictor.rate(setting) if measured is None else measured
        return Candidate(setting, rate, memory_of(setting, self.study.facts), self.predictor.effective(setting))

    def tried(self, setting: Setting) -> TriedSetting:
        """Return the setting with its predicted and measured rates, for the report."""
        candidate = self.candidate(setting)
        return TriedSetting(
            **vars(candidate),
            predicted_rate=self.predictor.rate(setting, alone=True),
            measured_rate=self.measured(setting),
            num_measured=len(self.rates.get(setting, ())),
            allowed=self.limits.allow(candidate),
        )

    def choose(self, *, in_place: bool = False) -> Candidate | None:
        """Choose a setting among those measured in turns, else once, else predicted; None if none is allowed.

        A single measurement may be too high by chance, and the maximum of many measurements usually is. With
        ``in_place`` only settings without a new file are considered.
        """
        settings = [setting for setting in self.settings if not (in_place and setting.repack)]
        for known in (self.steady.keys(), self.rates.keys(), set(settings)):
            best = choose([self.candidate(setting) for setting in settings if setting in known], self.limits)
            if best is not None:
                return best
        return None

    def nearest(self) -> Candidate:
        """Return the setting that mixes best among those that fit in memory, for when no setting is allowed."""
        candidates = [self.candidate(setting) for setting in self.settings]
        fitting = [each for each in candidates if each.memory_bytes <= self.limits.memory_bytes]
        return max(fitting, key=lambda each: (each.effective_batch or 0.0, -each.memory_bytes))
