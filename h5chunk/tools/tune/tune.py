"""`h5chunk tune`: find the fastest chunks, window, cache and workers for data on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from h5chunk.errors import OptionError, check_whole, printable
from h5chunk.machine import available_cores
from h5chunk.plan.cache import CacheSettings
from h5chunk.store.format.recommendation import write_recommendation
from h5chunk.store.hdf5.child import in_child
from h5chunk.tools.measure.checks import check_budget, worker_counts
from h5chunk.tools.measure.counted import count_reads
from h5chunk.tools.measure.machine import available_bytes, describe_device, library_versions
from h5chunk.tools.model.clustering import LEAST_CHANCE
from h5chunk.tools.model.mixing import window_for
from h5chunk.tools.model.settings import DATASET, Limits, Setting, enumerate_settings, order_of
from h5chunk.tools.progress import Progress, TimeBudget
from h5chunk.tools.tune.advice import find_advice
from h5chunk.tools.tune.plot import check_plot
from h5chunk.tools.tune.plot import plot as draw
from h5chunk.tools.tune.predict import Predictor
from h5chunk.tools.tune.probe import probe
from h5chunk.tools.tune.report import Recommendation
from h5chunk.tools.tune.rows import cache_triple, commands_for, plain_row, repack_command, rows_of
from h5chunk.tools.tune.search import Search
from h5chunk.tools.tune.study import Study, check_converted, study_file, temporary_folder

MEMORY_BYTES = 4 << 30
MAX_WORKERS = 4
LEAST_VERIFY_S = 1.0
PREDICT_SHARE = 0.1  # of the budget, to predict the reads of all settings


def tune(
    path: str | os.PathLike[str],
    *,
    batch_size: int = 256,
    memory_bytes: int = MEMORY_BYTES,
    workers: Sequence[int] | None = None,
    device: str = "cpu",
    fields: Mapping[str, str] | Sequence[str] | None = None,
    group_by: str | None = None,
    min_effective_batch: float = 0.95,
    budget_s: float = 60.0,
    plot: str | os.PathLike[str] | None = None,
    apply: bool = False,
    verify: bool = False,
    trusted: bool = False,
    progress: Progress | None = None,
) -> Recommendation:
    """Find the fastest setting that mixes well enough, by a cost model and by measuring the best few.

    Parameters
    ----------
    path : path
        An h5chunk file, or any other HDF5 file.
    batch_size : int
    memory_bytes : int
        Upper limit on the memory of feeding, without the interpreters.
    workers : sequence of int, optional
        DataLoader worker counts to try. Default: 0, 1, 2 and 4, up to the number of cores.
    device : str
        Device that batches go to.
    fields : sequence or mapping of str, optional
        As for `ChunkDataset`.
    group_by : str, optional
        Dataset whose equal values mark similar samples; default: ``labels``, if it exists.
    min_effective_batch : float
        Minimum shuffle quality, as a fraction of a full shuffle: above 0, below 1.
    budget_s : float
        Approximate duration in seconds.
    plot : path, optional
        Path of a picture of rate against effective batch, with the choice marked. Needs matplotlib.
    apply : bool
        Whether to write the window and cache of the best setting without a new file to ``NAME.h5chunk.json``, where
        readers find them.
    verify : bool
        Whether to read the order of that setting through HDF5, and compare HDF5's reads with the model.
    trusted : bool
        As for `ChunkDataset`.
    progress : callable, optional
        Called with ("tune", done, 100).

    Raises
    ------
    FileError, FieldError
        The file cannot be used; sources of `h5chunk.convert` must be converted first.
    OptionError
        An argument is invalid.
    """
    batch_size, memory_bytes = check_whole("batch_size", batch_size, 1), check_whole("memory_bytes", memory_bytes, 1)
    check_budget(budget_s)
    if not 0 < min_effective_batch < 1:
        raise OptionError(
            f"min_effective_batch is {min_effective_batch!r}: give a share of the batch above 0 and below 1"
        )
    from h5chunk.feed.sample_reader import field_mapping

    describe_device(device)
    if plot is not None:
        check_plot(plot)
    usual = [number for number in (0, 1, 2, MAX_WORKERS) if number <= max(1, available_cores())]
    numbers = worker_counts(workers, usual)
    check_converted(path)
    budget, named = TimeBudget("tune", budget_s, progress), field_mapping(fields)
    with temporary_folder() as folder:
        options: dict[str, Any] = {"batch_size": batch_size, "group_by": group_by, "trusted": trusted}
        study = in_child(lambda _: study_file(path, named, folder=folder, **options), lambda: printable(path))
        predictor = Predictor(study, probe(study, device, budget))
        settings = _settings(study, predictor, numbers, min_effective_batch)
        predictor.replay_s = PREDICT_SHARE * budget_s / len(settings)
        limits = Limits(min_effective_batch * study.facts.batch_samples, min(memory_bytes, available_bytes()))
        search = Search(study, predictor, limits, device, budget, settings)
        search.run()
        found = _report(search)
        if verify:
            found = replace(found, verify=_verify(study, found, budget))
        if plot is not None:
            draw(found, plot)
        if apply:
            found = replace(found, applied=_store(study, found))
        budget.report()
        return replace(found, seconds=budget.taken_s)


def _settings(study: Study, predictor: Predictor, workers: Sequence[int], min_share: float) -> list[Setting]:
    """Enumerate the settings to consider, the current one first."""
    facts, settings = study.facts, enumerate_settings(study.facts, workers=workers)
    if study.groups is None:
        return settings
    clustering, order = predictor.clustering(facts.chunk_samples), order_of(settings[0], facts)
    window = window_for(clustering, order, min_share)
    settings = enumerate_settings(facts, workers=workers, windows=[order.num_chunks if window is None else window])
    if not study.anndata and clustering.chance < LEAST_CHANCE:
        kept = {each for each in settings if each.repack or study.matrix or facts.is_good}
        settings += sorted({replace(each, repack=True, shuffle=True) for each in kept}, key=str)
    return settings


def _report(search: Search) -> Recommendation:
    """Choose the recommendation, and the best setting without a new file."""
    study, facts, predictor = search.study, search.study.facts, search.predictor
    allowed, in_place = search.choose(), search.choose(in_place=True)
    chosen = search.nearest() if allowed is None else allowed
    setting, kept = chosen.setting, search.today if in_place is None else in_place.setting
    today, *others = rows_of(search, chosen, allowed is not None)
    commands = commands_for(study, setting)
    repack, shuffle = commands[0], commands[0] if setting.shuffle else repack_command(study, shuffle=True)
    if not setting.repack:  # what a new file would need
        anew = [search.candidate(each) for each in search.settings if each.repack and not each.shuffle]
        best = max(anew, key=lambda each: each.rate, default=chosen)
        repack = repack_command(study, best.setting.chunk_samples)
    return Recommendation(
        setting=setting,
        cache=cache_triple(setting, search, 1),
        window_in_place=kept.window_chunks,
        cache_in_place=cache_triple(kept, search, 1),
        path=str(study.reader.path),
        batch_size=facts.batch_size,
        device=search.device,
        num_samples=facts.num_samples,
        num_measured=study.num_measured,
        sample_bytes=facts.sample_bytes,
        rows=[today, plain_row(search), *others],
        advice=find_advice(study, predictor.effective(search.today), predictor.machine, repack, shuffle),
        commands=commands,
        min_effective_batch=search.limits.effective_batch,
        memory_bytes=search.limits.memory_bytes,
        notes=study.notes,
        seconds=search.budget.taken_s,
        budget_s=search.budget.seconds,
        versions=library_versions(),
        candidates=[search.tried(each) for each in search.settings],
        machine=asdict(predictor.machine),
    )


def _verify(study: Study, found: Recommendation, budget: TimeBudget) -> dict[str, Any]:
    """Count the reads that HDF5 makes in the order of the best setting without a new file."""
    setting = Setting(DATASET, study.facts.chunk_samples, found.window_in_place)
    seconds = max(LEAST_VERIFY_S, budget.seconds - budget.taken_s)
    order, cache = order_of(setting, study.facts), CacheSettings.of(found.cache_in_place)
    return asdict(count_reads(study.reader, order, cache, seconds))


def _store(study: Study, found: Recommendation) -> str:
    """Write window and cache beside the file, where readers find them."""
    reader, cache = study.reader, CacheSettings.of(found.cache_in_place)
    path = write_recommendation(
        reader.path,
        found.window_in_place,
        cache,
        dataset=reader.main.dataset,
        num_samples=reader.num_samples,
        chunk_samples=reader.chunk_samples,
    )
    return str(path)
