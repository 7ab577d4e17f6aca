"""`h5chunk tune`: find the fastest chunks, window, cache and workers for data on this machine."""

from __future__ import annotations

import inspect
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from h5chunk.errors import FieldError, OptionError, OutputError, check_whole, human_bytes
from h5chunk.machine import available_cores
from h5chunk.paths import takes_paths
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.hdf5.child import in_child
from h5chunk.store.hdf5.open import opened
from h5chunk.store.write.new_file import write_recommendation
from h5chunk.tools.chunk_cache import ChunkCacheInfo, cache_of_file, describe_cache
from h5chunk.tools.info.usual import Fields, with_usual_fields
from h5chunk.tools.measure.checks import check_budget, worker_counts
from h5chunk.tools.measure.machine import available_bytes, default_cache, describe_device, library_versions
from h5chunk.tools.model.clustering import MIN_CHANCE
from h5chunk.tools.model.mixing import window_for
from h5chunk.tools.model.settings import (
    Setting,
    Trial,
    cache_of,
    enumerate_settings,
    memory_of,
    order_of,
)
from h5chunk.tools.progress import Progress, TimeBudget
from h5chunk.tools.report import python_text
from h5chunk.tools.tune.advice import advise_images, find_advice
from h5chunk.tools.tune.chunk_shapes import ChunkRecommendation, recommend_chunks
from h5chunk.tools.tune.commands import code_for, rewrite_command
from h5chunk.tools.tune.plot import check_plot
from h5chunk.tools.tune.plot import plot as draw
from h5chunk.tools.tune.remote import StoreRecommendation, tune_store
from h5chunk.tools.tune.report import Recommendation, TuneRow
from h5chunk.tools.tune.search import CACHED, NEW, PLAIN, TODAY, Search
from h5chunk.tools.tune.study import (
    Study,
    check_converted,
    fill_page_cache,
    no_gain_reason,
    study_file,
    temporary_folder,
)
from h5chunk.urls import is_url

MEMORY_BYTES = 4 << 30
MAX_WORKERS = 4
READ_SHARE = 0.1  # share of the budget for filling the page cache, and also for reading samples to copy to other chunks


@takes_paths("path")
def tune(
    path: str | os.PathLike[str],
    *,
    batch_size: int = 256,
    memory_bytes: int = MEMORY_BYTES,
    workers: Sequence[int] | None = None,
    device: str = "cpu",
    fields: Mapping[str, str] | Sequence[str] | None = None,
    group_by: str | None = None,
    window: int | None = None,
    patch: Sequence[int] = (),
    min_effective_batch: float = 0.95,
    budget_s: float = 60.0,
    plot: str | os.PathLike[str] | None = None,
    apply: bool = False,
    trusted: bool = False,
    progress: Progress | None = None,
) -> Recommendation | StoreRecommendation | ChunkRecommendation:
    """Find the fastest setting that shuffles well enough, and compare it with today's setting.

    Parameters
    ----------
    path : path
        An h5chunk file, or any other HDF5 file. For a URL, tune measures the store's latency, and its rate for several
        sizes and numbers of concurrent requests, and recommends a size and a number. ``memory_bytes``, ``workers``,
        ``group_by``, ``min_effective_batch``, ``plot`` and ``apply`` apply only to local files.
    batch_size : int
        Number of samples per batch.
    memory_bytes : int
        Upper limit on the memory for windows, batches and chunk caches. The memory of processes is not counted.
    workers : sequence of int, optional
        DataLoader worker counts to try. Default: 0, 1, 2 and 4, up to the number of cores.
    device : str
        Device of the batches.
    fields : sequence or mapping of str, optional
        As for `ChunkDataset`, whose defaults are used. If it has none for this file: those that `h5chunk.info` names.
    group_by : str, optional
        Dataset in which similar samples have equal values. Default: ``labels``, if it exists.
    window : int, optional
        Only compute which chunks suit random windows of this number of time steps, as `h5chunk.Windows` reads them. The
        result is a `ChunkRecommendation`. Of the other arguments, only ``trusted`` applies.
    patch : sequence of int
        As ``window``, but for random patches of this spatial shape, as `h5chunk.Patches` reads them.
    min_effective_batch : float
        Minimum shuffle quality, as a fraction of a full shuffle: above 0, below 1.
    budget_s : float
        Approximate duration of the measurements in seconds.
    plot : path, optional
        Path of a picture of the measured rates, with the recommended setting marked. Needs matplotlib.
    apply : bool
        Whether to store the best window and cache for the unchanged file in ``FILE.h5chunk.json``, where readers find
        them.
    trusted : bool
        As for `ChunkDataset`.
    progress : callable, optional
        Called with ("tune", done, 100).

    Raises
    ------
    FileError, FieldError
        The file cannot be used. A source of `h5chunk.convert`, such as a folder of images, must be converted first.
    OptionError
        An argument is invalid.
    """
    only_local: dict[str, Any] = {"memory_bytes": memory_bytes, "workers": workers, "group_by": group_by}
    only_local |= {"min_effective_batch": min_effective_batch, "plot": plot, "apply": apply}
    if window is not None or patch:
        name = "patch" if window is None else "window"
        if is_url(path):
            raise OptionError(f"{name} applies only to local files: leave it out for a URL")
        measuring = {"batch_size": batch_size, "device": device, "fields": fields, "budget_s": budget_s}
        _check_ignored({**only_local, **measuring}, f"{name} computes chunks without measuring")
        check_converted(path)
        return recommend_chunks(path, window, patch, trusted)
    batch_size, memory_bytes = check_whole("batch_size", batch_size, 1), check_whole("memory_bytes", memory_bytes, 1)
    check_budget(budget_s)
    if not 0 < min_effective_batch < 1:
        raise OptionError(f"min_effective_batch is {min_effective_batch!r}: use a fraction above 0 and below 1")
    from h5chunk.store.read.fields import field_mapping

    describe_device(device)
    if is_url(path):
        _check_ignored(only_local, "it applies only to local files")
        return tune_store(str(path), fields, batch_size, device, TimeBudget("tune", budget_s, progress), trusted)
    if plot is not None:
        check_plot(plot)
    usual = [number for number in (0, 1, 2, MAX_WORKERS) if number <= max(1, available_cores())]
    numbers = worker_counts(workers, usual)
    check_converted(path)
    budget = TimeBudget("tune", budget_s, progress)
    with temporary_folder() as folder:
        options: dict[str, Any] = {"folder": folder, "batch_size": batch_size, "group_by": group_by, "trusted": trusted}

        def read_facts(fields: Fields) -> Study:
            named = field_mapping(fields)
            return in_child(Path(path), _study, path, named, options)

        try:
            study, _ = with_usual_fields(read_facts, path, fields, trusted)
        except FieldError as error:
            if type(error) is not FieldError or "has no dataset 'images'" not in str(error):
                raise
            remedy = "tune measures samples that are rows; for windows or patches, pass --window or --patch"
            raise FieldError(f"{error} ({remedy})") from None
        study.reading_s = READ_SHARE * budget_s
        limits = min_effective_batch * study.facts.batch_samples, min(memory_bytes, available_bytes())
        trials = {
            setting: _trial(study, setting, *limits) for setting in _settings(study, numbers, min_effective_batch)
        }
        _check_memory(trials.values(), limits[1])
        fill_page_cache(study, READ_SHARE * budget_s)
        search = Search(study, device, budget, trials, limits[1])
        small = no_gain_reason(study) if trials[search.today].allowed else ""
        search.run(only_today=bool(small))
        found = _report(search, small, *limits)
        try:
            if plot is not None:
                draw(found, plot)
            if apply:
                found = replace(found, applied=_store(study, found))
        except OutputError as error:
            error.report = found  # the measurements took long
            raise
        budget.report()
        return replace(found, seconds=budget.taken_s)


def _study(path: str | os.PathLike[str], fields: Mapping[str, str] | None, options: dict[str, Any]) -> Study:
    return study_file(path, fields, **options)


def _check_ignored(given: Mapping[str, Any], reason: str) -> None:
    """Raise OptionError if an option that would have no effect has another value than its default."""
    for name, value in given.items():
        default = inspect.signature(tune).parameters[name].default
        if value is not default and (default is None or value != default):
            raise OptionError(f"{name} is {value!r}, but {reason}: leave it out")


def _settings(study: Study, workers: Sequence[int], min_share: float) -> list[Setting]:
    """Return the settings to consider, today's first."""
    facts, settings = study.facts, enumerate_settings(study.facts, workers=workers)
    if study.groups is None:
        return settings
    clustering, order = study.clustering(facts.chunk_samples), order_of(settings[0], facts)
    window = window_for(clustering, order, min_share)
    settings = enumerate_settings(facts, workers=workers, windows=[order.num_chunks if window is None else window])
    if not study.anndata and clustering.chance < MIN_CHANCE:
        changed = {setting for setting in settings if setting.repack or study.is_ragged or facts.is_good}
        settings += sorted({replace(setting, repack=True, shuffle=True) for setting in changed}, key=str)
    return settings


def _trial(study: Study, setting: Setting, min_batch: float, memory_bytes: int) -> Trial:
    """Return a setting with its memory and shuffle quality, before it is measured."""
    needed, effective = memory_of(setting, study.facts), study.effective_batch(setting)
    mixes = effective is None or effective >= min_batch
    return Trial(setting, needed, effective, mixes and needed <= memory_bytes)


def _check_memory(trials: Iterable[Trial], memory_bytes: int) -> None:
    min_bytes = min(trial.memory_bytes for trial in trials)
    if min_bytes > memory_bytes:
        limit, needed = human_bytes(memory_bytes), human_bytes(min_bytes)
        raise OptionError(f"loading needs {needed}, but the limit is {limit}: raise memory_bytes, or free memory")


def _report(search: Search, small: str, min_batch: float, memory_bytes: int) -> Recommendation:
    """Choose the recommendation, and return the report."""
    study, facts = search.study, search.study.facts
    chosen, unchanged = search.decide()
    setting, in_place = search.finalists[chosen], search.finalists[unchanged]
    rewritten = search.finalists.get(NEW)
    best_new = None if rewritten is None or rewritten.shuffle else rewritten
    repack, shuffle = rewrite_command(study, best_new), rewrite_command(study, best_new, shuffle=True)
    commands = [rewrite_command(study, setting, shuffle=setting.shuffle)] if setting.repack else []
    if commands and setting.shuffle:
        repack = shuffle = commands[0]
    advice = find_advice(study, search.trials[search.today].effective_batch, chosen == NEW, repack, shuffle)
    if shuffle in (each.remedy for each in advice):  # one command for everything, because all write the same file
        advice = [replace(each, remedy=shuffle) if each.remedy == repack else each for each in advice]
        commands = [shuffle for _ in commands]
    return Recommendation(
        setting=setting,
        cache=astuple(cache_of(setting, facts, 1)),
        window_in_place=in_place.window_chunks,
        cache_in_place=astuple(cache_of(in_place, facts, 1)),
        path=str(study.reader.path),
        batch_size=facts.batch_size,
        device=search.device,
        num_samples=facts.num_samples,
        num_measured=study.num_measured,
        sample_bytes=facts.sample_bytes,
        chosen=chosen,
        rows=[*(_row(search, name) for name in search.finalists), *_plain_rows(search)],
        chunk_cache=_describe_cache(search),
        advice=[
            *advice,
            *advise_images(study, max(statistics.median(turns) for turns in search.turns.values())),
        ],
        commands=commands,
        code=code_for(study, setting, search.device),
        no_gain_reason=small,
        min_effective_batch=min_batch,
        memory_bytes=memory_bytes,
        num_turns=len(search.turns[PLAIN]),
        notes=study.notes,
        seconds=search.budget.taken_s,
        budget_s=search.budget.seconds,
        versions=library_versions(),
        candidates=list(search.trials.values()),
    )


def _describe_cache(search: Search) -> ChunkCacheInfo | None:
    """Describe the chunk cache for the unchanged file; None for samples of several lengths other than matrix rows."""
    reader, path = search.study.reader, python_text(str(search.study.reader.path))
    if not search.study.is_ragged:
        return describe_cache(path, search.study.facts.grid, search.h5py_cache)
    if reader.matrix is None:
        return None
    with opened(reader.path) as file:
        return cache_of_file(file, reader.path, path, reader.matrix.dataset, reader.num_samples, reader.header)


def _row(search: Search, name: str) -> TuneRow:
    trial = search.trials[search.finalists[name]]
    times = None if name == TODAY else search.ratio(name)
    description = str(trial.setting)
    return TuneRow(
        name, trial.setting, description, trial.rate or 0.0, times, trial.memory_bytes, trial.effective_batch
    )


def _plain_rows(search: Search) -> list[TuneRow]:
    """Return the rows for h5py, which reads single samples through its default chunk cache, and through ours."""
    study, facts, cache = search.study, search.study.facts, default_cache()
    description = f"h5py.File(...)[name][i] in random order, with a chunk cache of {human_bytes(cache.nbytes)}"
    if not study.is_ragged and facts.grid.chunks:
        times = facts.grid.amplification(facts.grid.chunk_bytes <= cache.nbytes)
        description += f", which reads up to {times:,.1f} times the bytes of its samples" if times > 1.5 else ""
    memory = cache.nbytes * len(study.fields) + facts.batch_size * facts.sample_bytes
    mixed = None if study.groups is None else float(facts.batch_samples)
    rate = statistics.median(search.turns[PLAIN])
    rows = [TuneRow(PLAIN, None, description, rate, search.ratio(PLAIN), memory, mixed)]
    if CACHED in search.turns:
        cache = search.h5py_cache
        description = (
            f"h5py.File(..., rdcc_...)[name][i] in the order of ChunkSampler, with a chunk cache of "
            f"{human_bytes(cache.nbytes)}"
        )
        memory = cache.nbytes * len(study.fields) + facts.batch_size * facts.sample_bytes
        effective = search.trials[search.today].effective_batch
        rate = statistics.median(search.turns[CACHED])
        rows.append(TuneRow(CACHED, None, description, rate, search.ratio(CACHED), memory, effective))
    return rows


def _store(study: Study, report: Recommendation) -> str:
    """Store the best window and cache beside the file, where readers find them, and return the path."""
    reader, cache = study.reader, CacheSettings.of(report.cache_in_place)
    path = write_recommendation(
        reader.path,
        report.window_in_place,
        cache,
        dataset=reader.main.dataset,
        num_samples=reader.num_samples,
        chunk_samples=reader.chunk_samples,
    )
    return str(path)
