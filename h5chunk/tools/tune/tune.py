"""`h5chunk tune`: find the chunks, window, cache and workers that are fastest for data on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from h5chunk.errors import OptionError, printable
from h5chunk.machine import available_cores
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.format.recommendation import write_recommendation
from h5chunk.store.hdf5.child import in_child
from h5chunk.store.read.reader import H5Reader
from h5chunk.tools.measure.checks import check_budget, check_counts, worker_counts
from h5chunk.tools.measure.counted import count_reads
from h5chunk.tools.measure.machine import available_bytes, describe_device, library_versions
from h5chunk.tools.model.clustering import LEAST_CHANCE
from h5chunk.tools.model.mixing import window_for
from h5chunk.tools.model.settings import DATASET, LOADER, Candidate, Limits, Setting, enumerate_settings, order_of
from h5chunk.tools.progress import Progress, TimeBudget
from h5chunk.tools.tune.advice import Remedies, default_cache, find_advice, repack_command
from h5chunk.tools.tune.plot import check_plot
from h5chunk.tools.tune.plot import plot as draw
from h5chunk.tools.tune.predict import Predictor
from h5chunk.tools.tune.probe import probe
from h5chunk.tools.tune.report import Recommendation, TuneRow
from h5chunk.tools.tune.search import Search
from h5chunk.tools.tune.source import is_source, study_source
from h5chunk.tools.tune.study import Study, study_file, temporary_folder
from h5chunk.tools.tune.table import cache_triple, commands_for, plain_row, rows_of

MEMORY_BYTES = 4 << 30
MAX_WORKERS = 4
LEAST_VERIFY_S = 1.0
PREDICT_SHARE = 0.1  # of the budget, to predict the reads of all settings


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
    size: tuple[int, int] | None = None,
    plot: str | os.PathLike[str] | None = None,
    apply: bool = False,
    verify: bool = False,
    trusted: bool = False,
    progress: Progress | None = None,
) -> Recommendation:
    """Find the fastest setting that mixes well enough, by a cost model and by measuring the best few.

    Parameters
    ----------
    source : path
        An h5chunk file, any other HDF5 file, or what `h5chunk.convert` takes.
    batch_size : int
    memory_bytes : int
        The most that feeding may take, beside the interpreters.
    workers : sequence of int, optional
        DataLoader worker counts to try. Default: 0, and 1, 2, 4 as far as there are cores.
    device : str
        Where batches shall be.
    fields : sequence or mapping of str, optional
        As for `ChunkDataset`.
    group_by : str, optional
        Dataset that says which samples are alike; default: ``labels``, if there are any.
    min_effective_batch : float
        Minimum shuffle quality, as a fraction of a full shuffle: above 0, below 1.
    budget_s : float
        Seconds to take, about.
    size : (height, width), optional
        Of images that are not converted yet; default: that of the first one.
    plot : path, optional
        A picture to draw: rate against effective batch, with the choice marked. Needs matplotlib.
    apply : bool
        Whether to write window and cache of the best setting without a new file to ``NAME.h5chunk.json``, where readers
        find them.
    verify : bool
        Whether to read the order of that setting through HDF5, and count what HDF5 really reads against the model.
    trusted : bool
        As for `ChunkDataset`.
    progress : callable, optional
        Called with ("tune", done, 100).

    Raises
    ------
    FileError, FieldError, SourceError
        The source cannot be used.
    OptionError
        An argument is invalid.
    """
    check_counts(batch_size=batch_size, memory_bytes=memory_bytes)
    check_budget(budget_s)
    if not 0 < min_effective_batch < 1:
        raise OptionError(
            f"min_effective_batch is {min_effective_batch!r}: give a share of the batch above 0 and below 1"
        )
    from h5chunk.feed.sample_reader import field_mapping

    describe_device(device)
    if plot is not None:
        check_plot(plot)
    numbers = worker_counts(workers, _usual_workers())
    budget = TimeBudget("tune", budget_s, progress)
    with temporary_folder() as folder:
        if is_source(source):
            _check_unconverted(source, apply=apply, verify=verify, group_by=group_by, fields=fields, trusted=trusted)
            study = study_source(source, batch_size=batch_size, size=size, folder=folder, budget=budget)
        else:
            _check_converted(source, size)
            named = field_mapping(fields)
            options: dict[str, Any] = {"batch_size": batch_size, "group_by": group_by, "trusted": trusted}
            study = in_child(lambda _: study_file(source, named, folder=folder, **options), lambda: printable(source))
        worth = min_effective_batch * study.facts.batch_samples
        limits = Limits(worth, min(memory_bytes, available_bytes()))
        found = _tune(study, limits, numbers, device, budget, min_effective_batch)
        if verify:
            found = replace(found, verify=_verify(study, found, budget))
        if plot is not None:
            draw(found, plot)
        if apply:
            found = replace(found, applied=str(_store(study.reader, found)))
        budget.report()
        return replace(found, seconds=budget.taken_s)


def _usual_workers() -> tuple[int, ...]:
    return tuple(number for number in (0, 1, 2, MAX_WORKERS) if number <= max(1, available_cores()))


def _check_unconverted(source: str | os.PathLike[str], **options: object) -> None:
    """Raise OptionError for an option that only a file can have."""
    for name, value in options.items():
        if value:
            raise OptionError(f"{name} is {value!r}, but {printable(source)} is not converted yet: leave it out")


def _check_converted(source: str | os.PathLike[str], size: object) -> None:
    """Raise OptionError for an option that only a source can have."""
    if size is not None:
        raise OptionError(f"size is {size!r}, but {printable(source)} is no source of images: leave it out")


def _tune(
    study: Study,
    limits: Limits,
    workers: Sequence[int],
    device: str,
    budget: TimeBudget,
    min_share: float,
) -> Recommendation:
    predictor = Predictor(study, probe(study, device, budget))
    settings = _settings(study, predictor, workers, min_share)
    predictor.replay_s = PREDICT_SHARE * budget.seconds / len(settings)
    search = Search(study, predictor, limits, device, budget, settings)
    search.run()
    chosen, kept, enough = _choose(search)
    today, *others = rows_of(search, chosen, enough)
    return _report(search, chosen.setting, kept, [today, _plain(search), *others])


def _settings(study: Study, predictor: Predictor, workers: Sequence[int], min_share: float) -> list[Setting]:
    """Enumerate the settings to consider, today's first."""
    facts = study.facts
    if study.groups is None:
        return enumerate_settings(facts, workers=workers)
    clustering, order = predictor.clustering(facts.chunk_samples), order_of(_today(study), facts)
    window = window_for(clustering, order, min_share)
    settings = enumerate_settings(facts, workers=workers, windows=[order.num_chunks if window is None else window])
    if study.converted and not study.anndata and clustering.chance < LEAST_CHANCE:
        kept = {each for each in settings if each.repack or study.matrix or facts.is_good}
        settings += sorted({replace(each, repack=True, shuffle=True) for each in kept}, key=str)
    return settings


def _today(study: Study) -> Setting:
    return Setting(LOADER, study.facts.chunk_samples, study.facts.window_chunks)


def _choose(search: Search) -> tuple[Candidate, Setting, bool]:
    """Choose the recommendation and the best setting without a new file; also whether the limits are kept."""
    chosen = search.choose()
    enough = chosen is not None
    chosen = chosen or search.nearest()
    in_place = search.choose(in_place=True)
    kept = search.today if in_place is None else in_place.setting
    return chosen, kept, enough


def _plain(search: Search) -> TuneRow:
    """Measure plain h5py, with the chunk cache that the library gives."""
    from h5chunk.tools.measure.batches import PlainLoop

    study = search.study
    loop = PlainLoop(study.reader, study.num_measured, study.facts.batch_samples)
    try:
        measured = loop.rate(search.budget.slice_s)
    finally:
        loop.close()
    return plain_row(search, default_cache(), measured)


def _report(search: Search, setting: Setting, kept: Setting, rows: list[TuneRow]) -> Recommendation:
    study, limits, predictor = search.study, search.limits, search.predictor
    commands = commands_for(search, setting)
    remedies = Remedies(repack_command(study, _good_chunk(search)), repack_command(study, shuffle=True))
    if setting.repack:  # then that is done anyway
        remedies = Remedies(commands[0], commands[0] if setting.shuffle else remedies.shuffle)
    effective = predictor.effective(_today(study))
    return Recommendation(
        setting=setting,
        cache=cache_triple(setting, search, 1),
        window_in_place=kept.window_chunks,
        cache_in_place=cache_triple(kept, search, 1),
        path=study.source or str(study.reader.path),
        converted=study.converted,
        batch_size=study.facts.batch_size,
        device=search.device,
        num_samples=study.facts.num_samples,
        num_measured=study.num_measured,
        sample_bytes=study.facts.sample_bytes,
        rows=rows,
        advice=find_advice(study, effective, predictor.machine, remedies),
        commands=commands,
        min_effective_batch=limits.effective_batch,
        memory_bytes=limits.memory_bytes,
        notes=study.notes,
        seconds=search.budget.taken_s,
        budget_s=search.budget.seconds,
        versions=library_versions(),
        candidates=[search.tried(each) for each in search.settings],
        machine=asdict(predictor.machine),
    )


def _good_chunk(search: Search) -> int:
    """Samples per chunk of a new file, for advice where none is recommended."""
    anew = [each for each in search.settings if each.repack and not each.shuffle]
    if not anew:
        return search.study.facts.chunk_samples
    return max((search.candidate(each) for each in anew), key=lambda each: each.rate).setting.chunk_samples


def _verify(study: Study, found: Recommendation, budget: TimeBudget) -> dict[str, Any]:
    """Count the reads that HDF5 makes in the order of the best setting without a new file."""
    setting = Setting(DATASET, study.facts.chunk_samples, found.window_in_place)
    seconds = max(LEAST_VERIFY_S, budget.seconds - budget.taken_s)
    order, cache = order_of(setting, study.facts), CacheSettings.of(found.cache_in_place)
    return asdict(count_reads(study.reader, order, cache, seconds))


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
