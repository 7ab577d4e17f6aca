"""The table of a tuner: four lines, each with a sentence of reason; and the commands that follow from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from h5chunk.plan.layout import human_bytes
from h5chunk.tools.model.choose import Candidate, runner_up
from h5chunk.tools.model.cost import Reads, slowest
from h5chunk.tools.model.settings import DATASET, LOADER, Setting, cache_of
from h5chunk.tools.report import shell_command
from h5chunk.tools.tune.advice import Triple, repack_command, tuned_path
from h5chunk.tools.tune.report import CHOSEN, PLAIN, SECOND, TODAY, TuneRow
from h5chunk.tools.tune.search import Search


def triple(setting: Setting, search: Search, num_workers: int | None = None) -> Triple:
    """The cache of a setting as numbers."""
    cache = cache_of(setting, search.study.facts, num_workers)
    return cache.nslots, cache.nbytes, cache.w0


def row_of(name: str, each: Candidate, search: Search, reason: str, cold: float | None = None) -> TuneRow:
    """A line of the table."""
    setting, model = each.setting, search.model
    reads = model.all_reads(setting)
    return TuneRow(
        name=name,
        setting=shown(setting, search),
        way=setting.way,
        chunk_samples=setting.chunk_samples,
        window_chunks=setting.window_chunks,
        num_workers=setting.num_workers,
        cache=triple(setting, search),
        repack=setting.repack,
        shuffle=setting.shuffle,
        rate=each.rate,
        measured_rate=search.measured(setting),
        predicted_rate=model.rate_by_others(setting),
        cold_rate=cold,
        memory_bytes=each.memory_bytes,
        hit_rate=reads.hit_rate,
        amplification=reads.amplification,
        effective_batch=each.effective_batch,
        slowest=slowest(model.stages(setting)),
        reason=reason,
    )


def shown(setting: Setting, search: Search) -> str:
    """In words; of what is to be converted yet, nothing is repacked."""
    return str(setting if search.study.converted else replace(setting, repack=False))


def plain_row(search: Search, cache: Triple, reads: Reads, predicted: float, measured: float | None) -> TuneRow:
    """The line of plain h5py."""
    facts = search.study.facts
    grid = facts.grid
    if grid.chunks and grid.chunks_per_sample > 1:
        why = f"a random sample is in {grid.chunks_per_sample:,} chunks: {reads.amplification:,.0f} x its bytes read"
    elif reads.amplification > 1.5:
        why = f"a random sample reads its whole chunk, {reads.amplification:,.1f} x its bytes"
    else:
        why = "one call a sample, under HDF5's lock"
    return TuneRow(
        name=PLAIN,
        setting=f"h5py.File(...)[name][i], uniform shuffle, cache of {human_bytes(cache[1])}",
        way="h5py",
        chunk_samples=facts.chunk_samples,
        window_chunks=None,
        num_workers=0,
        cache=cache,
        repack=False,
        shuffle=False,
        rate=predicted if measured is None else measured,
        measured_rate=measured,
        predicted_rate=predicted,
        cold_rate=None,
        memory_bytes=cache[1] * len(search.study.fields) + facts.batch_size * facts.sample_bytes,
        hit_rate=reads.hit_rate,
        amplification=reads.amplification,
        effective_batch=None if search.study.groups is None else float(min(facts.batch_size, facts.num_samples)),
        slowest="HDF5",
        reason=why,
    )


def table(search: Search, chosen: Candidate, enough: bool, colds: dict[Setting, float | None]) -> list[TuneRow]:
    """Today's setting, the recommendation and the runner-up."""
    options: dict[str, Any] = {
        "min_effective": search.options.min_effective,
        "memory_bytes": search.options.memory_bytes,
    }
    known = [search.candidate(each) for each in search.settings if each in search.rates]
    today = search.candidate(search.settings[0])
    second = runner_up(known, chosen, **options)
    rows = [
        row_of(TODAY, today, search, _reason_today(search, today), colds.get(today.setting)),
        row_of(CHOSEN, chosen, search, _reason_chosen(search, chosen, enough), colds.get(chosen.setting)),
    ]
    if second is not None:
        rows.append(row_of(SECOND, second, search, _reason_second(search, second, chosen)))
    return rows


def _reason_today(search: Search, today: Candidate) -> str:
    study = search.study
    if study.why_not_direct:
        return f"through HDF5, one thread at a time, as {study.why_not_direct}"
    if not search.allows(today.setting):
        few = today.effective_batch is not None and today.effective_batch < search.options.min_effective
        return "mixes too little" if few else "takes more memory than allowed"
    who = "readers do" if study.converted else "convert and readers do"
    return f"what {who} by default; {slowest(search.model.stages(today.setting))} takes longest"


def _reason_chosen(search: Search, chosen: Candidate, enough: bool) -> str:
    setting, count = chosen.setting, len(search.rates)
    if not search.anything_fits:
        return f"nothing fits in {human_bytes(search.options.memory_bytes)}: this takes least; allow more memory"
    if not enough:
        return "nothing mixes well enough within this memory: this mixes best"
    if setting.shuffle:
        return "no window mixes the file as it lies well enough and fast; shuffled once on disk, any does"
    if setting == search.settings[0] and not search.study.converted:
        return f"what convert chooses by itself is within 3 % of the fastest of {count} measured"
    if setting == search.settings[0]:
        return f"within 3 % of the fastest of {count} measured, and nothing has to change"
    if not search.study.converted:
        return f"the fastest of {count} measured, or within 3 % of it"
    if setting.repack:
        return f"the fastest of {count} measured; worth a new file"
    return f"the fastest of {count} measured, or within 3 % of it, without a new file"


def _reason_second(search: Search, second: Candidate, chosen: Candidate) -> str:
    if not search.study.converted and second.setting.way == chosen.setting.way:
        return "the next best"
    if search.study.converted and chosen.setting.repack and not second.setting.repack:
        return "the best without a new file"
    if second.setting.way != chosen.setting.way:
        return (
            "for training code that has a DataLoader" if second.setting.way == DATASET else "without worker processes"
        )
    return "the next best"


def commands_for(search: Search, setting: Setting) -> list[str]:
    """What to do, one step each."""
    study = search.study
    path, steps = str(study.reader.path), []
    if not study.converted:
        path = "OUT.h5"
        source = shell_command(["h5chunk", "convert", study.source, path])
        steps.append(f"{source} --chunk-samples {setting.chunk_samples}")
        steps[0] += "   # or: h5chunk tune ... --json > tuned.json, and --tuned tuned.json"
    elif setting.repack:
        keep = None if study.matrix else setting.chunk_samples
        command = repack_command(study, keep, shuffle=setting.shuffle)
        steps.append(command if study.anndata else f"{command} --window {setting.window_chunks}")
        path = str(tuned_path(study))
    known = (
        setting.repack and study.converted and not study.anndata
    ) or setting.window_chunks == study.facts.window_chunks
    given = "" if known else f", window_chunks={setting.window_chunks}"
    batch, name = study.facts.batch_size, _literal(path)
    if setting.way == LOADER:
        steps.append(f"h5chunk.ChunkLoader({name}, {batch}{given})")
    else:
        steps.append(
            f"data = h5chunk.ChunkDataset({name}); DataLoader(data, batch_sampler=h5chunk.ChunkSampler(data, {batch}"
            f"{given}), num_workers={setting.num_workers})"
        )
    return steps


def _literal(path: str) -> str:
    """A path as Python writes it; in double quotes where these do."""
    return f'"{path}"' if path.isprintable() and not {'"', "\\"} & set(path) else repr(path)
