"""Make the lines of a tuner's table, each with a sentence of reason, and the commands that follow from the choice."""

from __future__ import annotations

from dataclasses import replace

from h5chunk.plan.layout import human_bytes
from h5chunk.tools.model.cost import Reads, slowest
from h5chunk.tools.model.settings import DATASET, LOADER, Candidate, Setting, cache_of, runner_up
from h5chunk.tools.report import shell_command
from h5chunk.tools.tune.advice import Triple, repack_command, tuned_path
from h5chunk.tools.tune.report import CHOSEN, PLAIN, SECOND, TODAY, TuneRow
from h5chunk.tools.tune.search import Search


def cache_triple(setting: Setting, search: Search, num_workers: int | None = None) -> Triple:
    """The cache of a setting as numbers."""
    cache = cache_of(setting, search.study.facts, num_workers)
    return cache.nslots, cache.nbytes, cache.w0


def _row(name: str, each: Candidate, search: Search, reason: str, cold: float | None = None) -> TuneRow:
    setting, predictor = each.setting, search.predictor
    reads = predictor.all_reads(setting)
    return TuneRow(
        name=name,
        setting=setting,
        description=str(setting if search.study.converted else replace(setting, repack=False)),
        cache=cache_triple(setting, search),
        rate=each.rate,
        measured_rate=search.measured(setting),
        predicted_rate=predictor.rate(setting, alone=True),
        cold_rate=cold,
        memory_bytes=each.memory_bytes,
        hit_rate=reads.hit_rate,
        amplification=reads.amplification,
        effective_batch=each.effective_batch,
        slowest=slowest(predictor.stages(setting)),
        reason=reason,
    )


def plain_row(search: Search, cache: Triple, reads: Reads, predicted: float, measured: float | None) -> TuneRow:
    """The line of plain h5py."""
    facts = search.study.facts
    if facts.grid.chunks and facts.grid.chunks_per_sample > 1:
        times, count = reads.amplification, facts.grid.chunks_per_sample
        reason = f"a random sample is in {count:,} chunks: {times:,.0f} x its bytes read"
    elif reads.amplification > 1.5:
        reason = f"a random sample reads its whole chunk, {reads.amplification:,.1f} x its bytes"
    else:
        reason = "one call a sample, under HDF5's lock"
    return TuneRow(
        name=PLAIN,
        setting=None,
        description=f"h5py.File(...)[name][i], uniform shuffle, cache of {human_bytes(cache[1])}",
        cache=cache,
        rate=predicted if measured is None else measured,
        measured_rate=measured,
        predicted_rate=predicted,
        cold_rate=None,
        memory_bytes=cache[1] * len(search.study.fields) + facts.batch_size * facts.sample_bytes,
        hit_rate=reads.hit_rate,
        amplification=reads.amplification,
        effective_batch=None if search.study.groups is None else float(facts.batch_samples),
        slowest="HDF5",
        reason=reason,
    )


def rows_of(search: Search, chosen: Candidate, enough: bool, colds: dict[Setting, float | None]) -> list[TuneRow]:
    """Today's setting, the recommendation and the runner-up."""
    today = search.candidate(search.today)
    second = runner_up([search.candidate(each) for each in search.rates], chosen, search.limits)
    rows = [
        _row(TODAY, today, search, _reason_today(search, today), colds.get(today.setting)),
        _row(CHOSEN, chosen, search, _reason_chosen(search, chosen, enough), colds.get(chosen.setting)),
    ]
    if second is not None:
        rows.append(_row(SECOND, second, search, _reason_second(search, second, chosen)))
    return rows


def _reason_today(search: Search, today: Candidate) -> str:
    study = search.study
    if study.why_not_direct:
        return f"through HDF5, one thread at a time, as {study.why_not_direct}"
    if not search.allows(today.setting):
        few = today.effective_batch is not None and today.effective_batch < search.limits.effective_batch
        return "mixes too little" if few else "takes more memory than allowed"
    who = "readers do" if study.converted else "convert and readers do"
    return f"what {who} by default; {slowest(search.predictor.stages(today.setting))} takes longest"


def _reason_chosen(search: Search, chosen: Candidate, enough: bool) -> str:
    setting, count, converted = chosen.setting, len(search.rates), search.study.converted
    if not search.anything_fits:
        return f"nothing fits in {human_bytes(search.limits.memory_bytes)}: this takes least; allow more memory"
    if not enough:
        return "nothing mixes well enough within this memory: this mixes best"
    if setting.shuffle:
        return "no window mixes the file as it lies well enough and fast; shuffled once on disk, any does"
    if setting == search.today and not converted:
        return f"what convert chooses by itself is within 3 % of the fastest of {count} measured"
    if setting == search.today:
        return f"within 3 % of the fastest of {count} measured, and nothing has to change"
    if converted and setting.repack:
        return f"the fastest of {count} measured; worth a new file"
    return f"the fastest of {count} measured, or within 3 % of it{', without a new file' if converted else ''}"


def _reason_second(search: Search, second: Candidate, chosen: Candidate) -> str:
    if search.study.converted and chosen.setting.repack and not second.setting.repack:
        return "the best without a new file"
    if second.setting.way == chosen.setting.way:
        return "the next best"
    return "for training code that has a DataLoader" if second.setting.way == DATASET else "without worker processes"


def commands_for(search: Search, setting: Setting) -> list[str]:
    """The steps to take: a command, if one is needed, and a line of Python."""
    study, steps = search.study, []
    path = str(study.reader.path)
    if not study.converted:
        path = "OUT.h5"
        source = shell_command(["h5chunk", "convert", study.source, path])
        steps.append(
            f"{source} --chunk-samples {setting.chunk_samples}"
            "   # or: h5chunk tune ... --json > tuned.json, and --tuned tuned.json"
        )
    elif setting.repack:
        command = repack_command(study, None if study.matrix else setting.chunk_samples, shuffle=setting.shuffle)
        steps.append(command if study.anndata else f"{command} --window-chunks {setting.window_chunks}")
        path = str(tuned_path(study))
    stored = setting.repack and study.converted and not study.anndata
    known = stored or setting.window_chunks == study.facts.window_chunks
    return [*steps, _code(path, setting, study.facts.batch_size, None if known else setting.window_chunks)]


def _code(path: str, setting: Setting, batch_size: int, window_chunks: int | None) -> str:
    """The line of Python that feeds training."""
    name = f'"{path}"' if path.isprintable() and not {'"', "\\"} & set(path) else repr(path)
    window = "" if window_chunks is None else f", window_chunks={window_chunks}"
    if setting.way == LOADER and not window:
        return f"h5chunk.ChunkLoader({name}, {batch_size})"
    data, sampler = f"data = h5chunk.ChunkDataset({name})", f"h5chunk.ChunkSampler(data, {batch_size}{window})"
    if setting.way == LOADER:
        return f"{data}; h5chunk.ChunkLoader(data, sampler={sampler})"
    return f"{data}; DataLoader(data, batch_sampler={sampler}, num_workers={setting.num_workers})"
