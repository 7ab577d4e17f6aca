"""Build the rows of tune's report with their reasons, and the commands to run."""

from __future__ import annotations

from pathlib import Path

from h5chunk.plan.layout import human_bytes
from h5chunk.tools.measure.machine import default_cache
from h5chunk.tools.model.cost import slowest
from h5chunk.tools.model.settings import DATASET, LOADER, Candidate, Setting, cache_of, runner_up
from h5chunk.tools.report import shell_command
from h5chunk.tools.tune.report import CHOSEN, PLAIN, SECOND, TODAY, Triple, TuneRow
from h5chunk.tools.tune.search import Search
from h5chunk.tools.tune.study import Study


def cache_triple(setting: Setting, search: Search, num_workers: int | None = None) -> Triple:
    """Return the cache of a setting as (nslots, nbytes, w0)."""
    cache = cache_of(setting, search.study.facts, num_workers)
    return cache.nslots, cache.nbytes, cache.w0


def rows_of(search: Search, chosen: Candidate, enough: bool) -> list[TuneRow]:
    """Return the lines of the current setting, the recommendation and the runner-up."""
    today = search.candidate(search.today)
    second = runner_up([search.candidate(setting) for setting in search.rates], chosen, search.limits)
    rows = [
        _row(TODAY, today, search, _reason_today(search, today)),
        _row(CHOSEN, chosen, search, _reason_chosen(search, chosen.setting, enough)),
    ]
    if second is not None:
        rows.append(_row(SECOND, second, search, _reason_second(second.setting, chosen.setting)))
    return rows


def _row(name: str, candidate: Candidate, search: Search, reason: str) -> TuneRow:
    setting, tried = candidate.setting, search.tried(candidate.setting)
    reads = search.predictor.reads(setting)
    return TuneRow(
        name=name,
        setting=setting,
        description=str(setting),
        cache=cache_triple(setting, search),
        rate=candidate.rate,
        measured_rate=tried.measured_rate,
        predicted_rate=tried.predicted_rate,
        memory_bytes=candidate.memory_bytes,
        hit_rate=reads.hit_rate,
        amplification=reads.amplification,
        effective_batch=candidate.effective_batch,
        slowest=slowest(search.predictor.stages(setting)),
        reason=reason,
    )


def plain_row(search: Search) -> TuneRow:
    """Measure plain h5py, which reads single random samples through the library's default chunk cache."""
    from h5chunk.tools.measure.batches import plain_rate

    study, facts, cache = search.study, search.study.facts, default_cache()
    measured = plain_rate(study.reader, study.num_measured, facts.batch_samples, search.budget.slice_s)
    reads, predicted = search.predictor.plain(cache)
    reason = "one call per sample, under HDF5's lock"
    if facts.grid.chunks and (chunks := facts.grid.chunks_per_sample) > 1:
        reason = f"a random sample is in {chunks:,} chunks: {reads.amplification:,.0f} x its bytes read"
    elif reads.amplification > 1.5:
        reason = f"a random sample reads its whole chunk, {reads.amplification:,.1f} x its bytes"
    return TuneRow(
        name=PLAIN,
        setting=None,
        description=f"h5py.File(...)[name][i], uniform shuffle, cache of {human_bytes(cache.nbytes)}",
        cache=(cache.nslots, cache.nbytes, cache.w0),
        rate=measured,
        measured_rate=measured,
        predicted_rate=predicted,
        memory_bytes=cache.nbytes * len(study.fields) + facts.batch_size * facts.sample_bytes,
        hit_rate=reads.hit_rate,
        amplification=reads.amplification,
        effective_batch=None if study.groups is None else float(facts.batch_samples),
        slowest="HDF5",
        reason=reason,
    )


def _reason_today(search: Search, today: Candidate) -> str:
    if search.study.why_not_direct:
        return f"through HDF5, one thread at a time, as {search.study.why_not_direct}"
    if not search.allows(today.setting):
        few = today.effective_batch is not None and today.effective_batch < search.limits.effective_batch
        return "mixes too little" if few else "takes more memory than allowed"
    return f"what readers do by default; {slowest(search.predictor.stages(today.setting))} takes longest"


def _reason_chosen(search: Search, setting: Setting, enough: bool) -> str:
    count = len(search.rates)
    if not enough:
        return "nothing mixes well enough within this memory: this mixes best"
    if setting.shuffle:
        return "no window mixes the file as it lies well enough and fast; shuffled once on disk, any does"
    if setting == search.today:
        return f"within 3 % of the fastest of {count} measured, and nothing has to change"
    if setting.repack:
        return f"the fastest of {count} measured; worth a new file"
    return f"the fastest of {count} measured, or within 3 % of it, without a new file"


def _reason_second(second: Setting, chosen: Setting) -> str:
    if chosen.repack and not second.repack:
        return "the best without a new file"
    if second.way == chosen.way:
        return "the next best"
    return "for training code that has a DataLoader" if second.way == DATASET else "without worker processes"


def _tuned_path(study: Study) -> Path:
    """Return the path of the file that the recommended command writes."""
    return study.reader.path.with_name(f"{study.reader.path.stem}-tuned.h5")


def repack_command(study: Study, chunk_samples: int | None = None, *, shuffle: bool = False) -> str:
    """Return the command that rewrites a file in other chunks; AnnData files are converted instead of shuffled."""
    verb = "convert" if study.anndata and shuffle else "repack"
    parts = ["h5chunk", verb, str(study.reader.path), str(_tuned_path(study))]
    if verb == "repack":
        parts += ["--chunk-samples", str(chunk_samples)] if chunk_samples else []
        parts += ["--shuffle"] if shuffle else []
        if not {"images", "X"} & {each.strip("/") for each in study.fields.values()}:
            parts += ["--fields", study.reader.main.dataset]
    return shell_command(parts)


def commands_for(study: Study, setting: Setting) -> list[str]:
    """Return the steps to take: a command, if needed, and a line of Python."""
    if not setting.repack:
        return [_code(study, study.reader.path, setting, stored=setting.window_chunks == study.facts.window_chunks)]
    command = repack_command(study, None if study.matrix else setting.chunk_samples, shuffle=setting.shuffle)
    if not study.anndata:
        command += f" --window-chunks {setting.window_chunks}"
    return [command, _code(study, _tuned_path(study), setting, stored=not study.anndata)]


def _code(study: Study, path: Path, setting: Setting, *, stored: bool) -> str:
    """Return the line of Python that feeds training; ``stored``: readers take the window from the file."""
    shown, batch_size, asked = str(path), study.facts.batch_size, study.asked
    name = f'"{shown}"' if shown.isprintable() and not {'"', "\\"} & set(shown) else repr(shown)
    fields = ""
    if asked and not (study.anndata and setting.repack):  # convert names the fields of AnnData anew
        fields = f", fields={list(asked) if all(key == asked[key] for key in asked) else dict(asked)!r}"
    if setting.way == LOADER and stored:
        opened = f"h5chunk.ChunkDataset({name}{fields})" if fields else name
        return f"h5chunk.ChunkLoader({opened}, {batch_size})"
    window = "" if stored else f", window_chunks={setting.window_chunks}"
    data, sampler = f"data = h5chunk.ChunkDataset({name}{fields})", f"h5chunk.ChunkSampler(data, {batch_size}{window})"
    if setting.way == LOADER:
        return f"{data}; h5chunk.ChunkLoader(data, sampler={sampler})"
    return f"{data}; DataLoader(data, batch_sampler={sampler}, num_workers={setting.num_workers})"
