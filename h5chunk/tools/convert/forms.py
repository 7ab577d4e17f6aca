"""Compare two ways to store images of any size, encoded or as raw pixels, by their size and loading speed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from h5chunk.errors import OutputError, SampleError, SourceError, human_bytes
from h5chunk.store.write.new_file import NewFile
from h5chunk.store.write.samples import SampleJob, write_samples
from h5chunk.tools.measure.checks import CROP
from h5chunk.tools.measure.machine import available_bytes

FORMS = {"encoded": "--keep-encoded", "raw": "--keep-size"}
MAX_IMAGES, PROBE_BYTES = 48, 32 << 20  # limits on the number of images to measure, and on the size of their pixels
COPIES, BATCH_SIZE = 4, 16  # the file of measured images is copied, so that epochs are long enough
MEASURE_S, LEAD_S = 0.4, 0.1
GPU_RATE = 6900  # images/s at which an H200 trains a compiled ResNet-50: scripts/LOG.md
FASTER = 1.2  # speedup that justifies the additional space


@dataclass(frozen=True)
class FormCost:
    """The measured costs of storing images of any size in one form on this machine."""

    form: str  # encoded or raw
    option: str  # the option of convert that chooses this form
    num_bytes: int  # estimated size of all images, in bytes
    fits_disk: bool
    fits_memory: bool  # whether they fit in the page cache
    images_per_s: float  # rate of `ChunkLoader` from the page cache, with random crops of CROP x CROP pixels

    def __str__(self) -> str:
        where = "does not fit on the disk"
        if self.fits_disk:
            where = "fits in memory" if self.fits_memory else "does not fit in memory, so each epoch reads from disk"
        rate = f"{self.images_per_s:,.0f} random crops of {CROP} x {CROP} per second"
        return f"({self.option}): about {human_bytes(self.num_bytes)}, which {where}; {rate}"


def compare_forms(job: SampleJob, free_bytes: int) -> list[FormCost]:
    """Measure both forms with a few images. A form that cannot be written, or is unsupported, is left out."""
    costs = []
    memory = available_bytes()
    for form, option in FORMS.items():
        try:
            mean_bytes, rate = _measure(job, form)
        except (SampleError, SourceError, OutputError, OSError):
            continue
        num_bytes = int(mean_bytes * len(job.order))
        costs.append(FormCost(form, option, num_bytes, num_bytes < free_bytes, num_bytes < memory, rate))
    return costs


def _measure(job: SampleJob, form: str) -> tuple[float, float]:
    """Write a few images to a temporary file and load them; return the mean size in bytes, and the rate in images/s."""
    from h5chunk.feed.sampler import ChunkSampler
    from h5chunk.tools.measure.batches import open_loader
    from h5chunk.tools.measure.images import open_data

    source = job.source.in_form(form)
    pixel_bytes = max(1, source.size_bytes["as pixels"] // len(source))
    count = max(1, min(MAX_IMAGES, PROBE_BYTES // pixel_bytes, len(job.order)))
    order = job.order[np.linspace(0, len(job.order) - 1, count).astype(np.int64)]
    with tempfile.TemporaryDirectory(prefix="h5chunk-", ignore_cleanup_errors=True) as folder:
        probe = replace(job, source=source, path=Path(folder) / "images.h5", num_workers=0).with_order(order)
        with NewFile(probe.path) as new:
            written, _ = write_samples(new, probe)
            new.commit()
        paths = [probe.path.with_stem(f"images{number}") for number in range(COPIES)]
        for path in paths:
            shutil.copyfile(probe.path, path)
        dataset = open_data(paths, None, False)
        chosen = ChunkSampler(dataset, BATCH_SIZE).order
        with closing(open_loader(dataset, chosen, device="cpu")) as batches:
            batches.warm_up(MEASURE_S)
            return (written.num_bytes or 0) / len(written.order), batches.rate(MEASURE_S, LEAD_S)


def recommend(costs: Sequence[FormCost]) -> str:
    """Return a sentence that recommends one of the two forms; empty if only one was measured."""
    if len(costs) < len(FORMS):
        return ""
    encoded, raw = costs
    times = raw.images_per_s / encoded.images_per_s
    gpu = f"the {GPU_RATE:,} images/s at which an H200 trains ResNet-50"
    if encoded.images_per_s >= GPU_RATE:
        return f"keep them encoded, because this machine decodes them faster than {gpu}"
    if times < FASTER:
        return f"keep them encoded, because raw pixels would not load much faster; both are slower than {gpu}"
    short = f"decoding is slower than {gpu}"
    if raw.fits_disk and raw.fits_memory:
        return f"store raw pixels ({raw.option}), which load {times:.1f} times as fast, because {short}"
    where = "on this disk" if not raw.fits_disk else "in memory"
    return (
        f"keep them encoded, because raw pixels do not fit {where}; {short}, but --max-side or more cores speed it up"
    )
