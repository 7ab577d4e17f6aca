"""Which chunks, window, cache and workers are fastest for this data on this machine, and how well they mix."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import h5chunk
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.guard.guard import Trusted
from h5chunk.store.read.reader import H5Reader
from h5chunk.store.sidecar import write_recommendation
from h5chunk.tools.measure.counted import verify_order
from h5chunk.tools.measure.machine import available_bytes
from h5chunk.tools.model.advice import Advice
from h5chunk.tools.model.choose import Candidate
from h5chunk.tools.model.clustering import LEAST_CHANCE
from h5chunk.tools.model.cost import slowest
from h5chunk.tools.model.mixing import window_for
from h5chunk.tools.model.settings import DATASET, LOADER, Setting, enumerate_settings, order_of
from h5chunk.tools.progress import Progress
from h5chunk.tools.tune.advice import Remedies, Triple, default_cache, find_advice, usable
from h5chunk.tools.tune.clock import Budget
from h5chunk.tools.tune.measure import PlainLoop, measure_cold
from h5chunk.tools.tune.model import Model
from h5chunk.tools.tune.options import check_converted, check_numbers, check_unconverted, plain_cache, worker_numbers
from h5chunk.tools.tune.plot import check_plot
from h5chunk.tools.tune.plot import plot as draw
from h5chunk.tools.tune.probe import probe
from h5chunk.tools.tune.report import Recommendation, TuneRow
from h5chunk.tools.tune.rows import commands_for, plain_row, table, triple
from h5chunk.tools.tune.search import Options, Search
from h5chunk.tools.tune.source import is_source, look_at_source
from h5chunk.tools.tune.study import Study, look_at_file, temporary_folder

MEMORY_BYTES = 4 << 30
COLD_SHARE = 0.9  # of the budget, when reading from the disk ends
PREDICT_SHARE = 0.1  # of the budget, to predict what all settings read
LEAST_VERIFY_S = 1.0


def tune(
    source: str | os.PathLike[str],
    *,
    batch_size: int = 256,
    memory_bytes: int = MEMORY_BYTES,
    workers: Sequence[int] | None = None,
    device: str = "cpu",
    fields: Mapping[str, str] | Sequence[str] | None = None,
    group_by: str | None = None,
    min_effective_batch: float = 0.95,
    budget_s: float = 60.0,
    h5py_cache: Sequence[float] | None = None,
    size: tuple[int, int] | None = None,
    plot: str | os.PathLike[str] | None = None,
    apply: bool = False,
    verify: bool = False,
    trusted: Trusted = False,
    progress: Progress | None = None,
) -> Recommendation:
    """Find the fastest setting that mixes well enough, by a cost model and by measuring the best few.

    Parameters
    ----------
    source : path
        A converted file, anybody's HDF5 file, or what `h5chunk.convert` takes.
    batch_size : int
    memory_bytes : int
        The most that feeding may take, beside the interpreters.
    workers : sequence of int, optional
        Of torch's DataLoader; default: 0, and 1, 2, 4 as far as there are cores.
    device : str
        Where batches shall be.
    fields : sequence or mapping of str, optional
        As for `ChunkDataset`.
    group_by : str, optional
        Dataset that says which samples are alike; default: ``labels``, if there are any.
    min_effective_batch : float
        Part of a batch that it shall be worth, against a full shuffle: above 0, below 1.
    budget_s : float
        Seconds to take, about.
    h5py_cache : (nslots, nbytes, w0), optional
        The cache that plain h5py is given today; default: the library's.
    size : (height, width), optional
        Of images that are not converted yet; default: that of the first one.
    plot : path, optional
        A picture to draw: rate against effective batch, with the choice marked. Needs matplotlib.
    apply : bool
        Store window and cache, of the best setting without a new file, where readers take them from: in a file of ours,
        or beside one of others (``NAME.h5chunk.json``).
    verify : bool
        Read the order of that setting through HDF5, and count what it really reads against the model.
    trusted : bool, path or sequence of paths
        As for `ChunkDataset`.
    progress : callable, optional
        Called with ("tune", done, 100).

    Raises
    ------
    FileError, FieldError, SourceError
        The source cannot be used.
    OptionError
        An argument cannot be.
    """
    check_numbers(batch_size, memory_bytes, min_effective_batch, budget_s)
    from h5chunk.feed.dataset import field_mapping
    from h5chunk.tools.measure.batches import check_device

    check_device(device)
    if plot is not None:
        check_plot(plot)
    budget = Budget(budget_s, progress)
    with temporary_folder() as folder:
        if is_source(source):
            check_unconverted(source, apply=apply, verify=verify, group_by=group_by, fields=fields, trusted=trusted)
            study = look_at_source(source, batch_size=batch_size, size=size, folder=Path(folder), budget=budget)
        else:
            check_converted(source, size)
            named = field_mapping(fields)
            study = look_at_file(
                source, named, batch_size=batch_size, group_by=group_by, folder=Path(folder), trusted=trusted
            )
        worth = min_effective_batch * min(batch_size, study.facts.num_samples)
        options = Options(min(memory_bytes, available_bytes()), worker_numbers(workers), device, worth)
        found = _tune(study, options, budget, plain_cache(h5py_cache), min_effective_batch)
        if verify:
            found = replace(found, verify=_verify(study, found, budget))
        if plot is not None:
            draw(found, plot)
        if apply:
            found = replace(found, applied=str(_store(study.reader, found)))
        budget.has(1.0)
        return replace(found, seconds=budget.taken_s)


def _store(reader: H5Reader, found: Recommendation) -> Path:
    """Write window and cache beside the file, where readers look for them."""
    return write_recommendation(
        reader.path,
        found.window_in_place,
        CacheSettings.of(found.cache_in_place),
        dataset=reader.main.dataset,
        num_samples=reader.num_samples,
        chunk_samples=reader.chunk_samples,
    )


def _tune(study: Study, options: Options, budget: Budget, cache: Triple, min_share: float) -> Recommendation:
    machine = probe(study, options.device, budget)
    model = Model(study, machine)
    settings = _settings(study, model, options, min_share)
    model.replay_s = PREDICT_SHARE * budget.seconds / len(settings)
    search = Search(study, model, options, budget, settings)
    search.run()
    chosen, kept, enough = _choose(search)
    plain = _plain(search, cache)  # before the file leaves the page cache
    rows = table(search, chosen, enough, _colds(search, chosen))
    rows.insert(1, plain)
    commands = commands_for(search, chosen.setting)
    found = Remedies.of(study, _good_chunk(search))
    if chosen.setting.repack:  # then that is done anyway
        found = Remedies(commands[0], commands[0] if chosen.setting.shuffle else found.shuffle)
    return _report(search, chosen.setting, kept, rows, commands, find_advice(study, model, machine, cache, found))


def _choose(search: Search) -> tuple[Candidate, Setting, bool]:
    """What to recommend, what of that without a new file, and whether it mixes well enough and fits."""
    chosen, enough = search.choose(), True
    if chosen is None:
        enough = False
        chosen = search.nearest()
    in_place = search.choose([each for each in search.settings if not each.repack])
    kept = search.settings[0] if in_place is None else in_place.setting
    if in_place is not None and chosen.setting.repack and not search.repack_pays(chosen.setting, kept):
        chosen = in_place
    return chosen, kept, enough


def _report(
    search: Search,
    setting: Setting,
    kept: Setting,
    rows: list[TuneRow],
    commands: list[str],
    advice: list[Advice],
) -> Recommendation:
    study, options, budget, stages = search.study, search.options, search.budget, search.model.stages(setting)
    return Recommendation(
        chunk_samples=setting.chunk_samples,
        window_chunks=setting.window_chunks,
        cache=triple(setting, search, 1),
        compression=None,
        way=setting.way,
        num_workers=setting.num_workers,
        repack=setting.repack,
        shuffle=setting.shuffle,
        window_in_place=kept.window_chunks,
        cache_in_place=triple(kept, search, 1),
        path=study.source or str(study.reader.path),
        converted=study.converted,
        batch_size=study.facts.batch_size,
        device=options.device,
        num_samples=study.facts.num_samples,
        num_measured=study.num_measured,
        sample_bytes=study.facts.sample_bytes,
        rows=rows,
        advice=advice,
        stages={name: 1 / seconds for name, seconds in stages.items() if seconds > 0},
        slowest=slowest(stages),
        commands=commands,
        min_effective_batch=options.min_effective,
        memory_bytes=options.memory_bytes,
        notes=study.notes,
        seconds=budget.taken_s,
        budget_s=budget.seconds,
        versions=_versions(),
        candidates=[_described(search, each) for each in search.settings],
        machine=asdict(search.model.machine),
    )


def _verify(study: Study, found: Recommendation, budget: Budget) -> dict[str, Any]:
    """The order of the best setting without a new file, through real HDF5."""
    setting = Setting(DATASET, study.facts.chunk_samples, found.window_in_place)
    seconds = max(LEAST_VERIFY_S, budget.seconds - budget.taken_s)
    order, cache = order_of(setting, study.facts), CacheSettings.of(found.cache_in_place)
    return verify_order(study.reader, order, cache, seconds).to_dict()


def _settings(study: Study, model: Model, options: Options, min_share: float) -> list[Setting]:
    """All that are looked at, today's first."""
    facts = study.facts
    today = Setting(LOADER, facts.chunk_samples, facts.window_chunks)
    windows: list[int] = []
    if study.groups is not None:
        found = window_for(model.clustering(facts.chunk_samples), order_of(today, facts), min_share)
        windows = [found if found is not None else order_of(today, facts).num_chunks]
    settings = enumerate_settings(facts, workers=options.workers, windows=windows)
    can_shuffle = study.converted and not study.anndata
    if study.groups is not None and can_shuffle and model.clustering(facts.chunk_samples).chance < LEAST_CHANCE:
        kept = {each for each in settings if each.repack or study.matrix or facts.is_good}
        settings += sorted({replace(each, repack=True, shuffle=True) for each in kept}, key=str)
    return settings


def _colds(search: Search, chosen: Candidate) -> dict[Setting, float | None]:
    """Rates from the disk of today's setting and of the one chosen."""
    found: dict[Setting, float | None] = {}
    for setting in dict.fromkeys((search.settings[0], chosen.setting)):
        if (
            search.budget.has(COLD_SHARE)
            and search.study.converted
            and setting in search.rates
            and search.candidate(setting).memory_bytes <= search.options.memory_bytes
        ):
            found[setting] = measure_cold(
                search.study, setting, search.options.device, search.budget, 1.5 * search.budget.slice_s
            )
    return found


def _plain(search: Search, cache: Triple) -> TuneRow:
    reads, predicted = search.model.plain(usable(cache))
    measured = None
    if cache[:2] == default_cache()[:2]:
        loop = PlainLoop(search.study)
        try:
            measured = loop.rate(search.budget.slice_s)
        finally:
            loop.close()
    return plain_row(search, cache, reads, predicted, measured)


def _good_chunk(search: Search) -> int:
    """Samples a chunk of a new file, for advice where none is recommended."""
    anew = [each for each in search.settings if each.repack and not each.shuffle]
    if not anew:
        return search.study.facts.chunk_samples
    return max((search.candidate(each) for each in anew), key=lambda each: each.rate).setting.chunk_samples


def _described(search: Search, setting: Setting) -> dict[str, object]:
    each = search.candidate(setting)
    return asdict(setting) | {
        "predicted_rate": search.model.rate_by_others(setting),
        "measured_rate": search.measured(setting),
        "num_measured": len(search.rates.get(setting, ())),
        "memory_bytes": each.memory_bytes,
        "effective_batch": each.effective_batch,
        "allowed": search.allows(setting),
    }


def _versions() -> dict[str, str]:
    from h5chunk.tools.measure.batches import torch_version

    versions = {"h5chunk": h5chunk.__version__, "h5py": h5py.__version__, "hdf5": h5py.version.hdf5_version}
    return versions | {"numpy": np.__version__, "torch": torch_version(), "python": platform.python_version()}
