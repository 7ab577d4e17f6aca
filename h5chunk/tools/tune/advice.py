"""What is wrong with a file: looks, and asks `h5chunk.tools.model.advice` what that means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import h5py

from h5chunk.plan.cache import CacheSettings
from h5chunk.store.format import GROUP, opened
from h5chunk.tools.model.advice import PIECES, Advice, advise_filter, advise_labels, advise_layout, advise_w0, is_giant
from h5chunk.tools.model.clustering import Clustering, find_clustering
from h5chunk.tools.model.cost import Machine
from h5chunk.tools.model.settings import LOADER, Setting
from h5chunk.tools.report import shell_command
from h5chunk.tools.tune.model import Model
from h5chunk.tools.tune.study import Study

Triple = tuple[int, int, float]
MOST_W0 = 0.99


def default_cache() -> Triple:
    """What this HDF5 library gives a dataset."""
    nslots, nbytes, w0 = h5py.h5p.create(h5py.h5p.FILE_ACCESS).get_cache()[1:]
    return int(nslots), int(nbytes), float(w0)


def stored_w0(path: str) -> float:
    """What a file of ours says of w0; 0 for others."""
    with opened(path) as file:
        group = file.get(GROUP)
        return float(group.attrs.get("rdcc_w0", 0.0)) if isinstance(group, h5py.Group) else 0.0


def usable(cache: Triple) -> CacheSettings:
    """A triple as settings; w0 = 1 as the most that has a limit."""
    return CacheSettings(max(1, int(cache[0])), int(cache[1]), min(float(cache[2]), MOST_W0))


def tuned_path(study: Study) -> Path:
    """The file that the recommended command writes."""
    source = study.reader.path
    return source.with_name(f"{source.stem}-tuned.h5")


def repack_command(study: Study, chunk_samples: int | None = None, *, shuffle: bool = False) -> str:
    """The command line that lays a file out anew; AnnData's are not shuffled, but converted."""
    source = study.reader.path
    verb = "convert" if study.anndata and shuffle else "repack"
    parts = ["h5chunk", verb, str(source), str(tuned_path(study))]
    if verb == "convert":
        return shell_command(parts)
    parts += ["--chunk-samples", str(chunk_samples)] if chunk_samples else []
    parts += ["--shuffle"] if shuffle else []
    if not {"images", "X"} & {each.strip("/") for each in study.fields.values()}:
        parts += ["--fields", study.reader.main.dataset]
    return shell_command(parts)


def find_clusterings(study: Study) -> list[Clustering]:
    """How much alike neighbours are, in pieces of several sizes."""
    if study.groups is None:
        return []
    sizes = {*PIECES, study.facts.chunk_samples}
    return [find_clustering(study.groups, size) for size in sorted(sizes) if 1 < size <= len(study.groups) // 2]


@dataclass(frozen=True)
class Remedies:
    """Commands that lay a file out anew, and that shuffle it."""

    repack: str
    shuffle: str

    @classmethod
    def of(cls, study: Study, chunk_samples: int) -> Remedies:
        """Those for a file, in chunks of so many samples."""
        return cls(repack_command(study, chunk_samples), repack_command(study, shuffle=True))


def find_advice(study: Study, model: Model | None, machine: Machine, cache: Triple, remedies: Remedies) -> list[Advice]:
    """All that is wrong."""
    if not study.converted:
        return []
    facts, repack = study.facts, remedies.repack
    found: list[Advice] = []
    clusterings = find_clusterings(study)
    if clusterings and model is not None:
        today = Setting(LOADER, facts.chunk_samples, facts.window_chunks)
        effective = model.effective(today) or float(facts.batch_size)
        found += advise_labels(clusterings, effective, facts.batch_size, remedies.shuffle)
    if not study.matrix:
        found += advise_layout(facts.grid, usable(cache), repack)
        found += [each for each in _of_header(study, repack) if each.code not in {one.code for one in found}]
    if facts.grid.filtered and not study.matrix:
        found += advise_filter(machine.decode_rate, machine.read_rate, machine.num_cores, repack)
    return found + advise_w0(max(float(cache[2]), stored_w0(str(study.reader.path))))


def _of_header(study: Study, repack: str) -> list[Advice]:
    """Of the cache that the file itself recommends, if it is of use."""
    header, grid = study.reader.header, study.facts.grid
    if header is None or not header.cache.nbytes or not grid.needs_cache or is_giant(grid):
        return []
    return [each for each in advise_layout(grid, header.cache, repack) if each.code == "cache_below_chunk"]
