"""Tune reading from object stores: measure latency and rate, and choose the requests, the chunks and the window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from h5chunk.errors import FieldError, count_text, human_bytes, printable
from h5chunk.plan.layout import choose_window_chunks
from h5chunk.store.read.files import open_reader
from h5chunk.tools.measure.checks import check_samples
from h5chunk.tools.measure.machine import NotMeasured, library_versions
from h5chunk.tools.measure.store import StoreRequests, loader_rate
from h5chunk.tools.progress import TimeBudget
from h5chunk.tools.report import Report, code, shell_command

REQUESTS = (16, 64, 256)  # numbers of concurrent requests to try
CHUNK_BYTES = (256 << 10, 1 << 20, 4 << 20)  # chunk sizes to try besides that of the file
TRIALS_SHARE, LOADER_SHARE = 0.6, 0.15  # shares of the time for all trials, and for each loader
OVERRUN = 1.5  # trials whose first requests would take more than this many times their time are skipped
ENOUGH = 0.9  # a setting with this share of the highest rate is fast enough


@dataclass(frozen=True)
class Trial:
    """The measured rate of concurrent requests of one size."""

    requests: int
    request_bytes: int
    bytes_per_s: float


@dataclass(frozen=True)
class StoreRecommendation(Report):
    """The measured latency and rates of an object store, and the recommended requests, chunks and window.

    Attributes
    ----------
    latency_s : float
        Time of a request for one byte.
    requests, today_requests : int
        Recommended and default number of concurrent requests.
    chunk_bytes, today_chunk_bytes : int
        Recommended chunk size, and that of the file, in bytes. Several requests fetch a chunk of more than 4 MiB.
    chunk_samples, window_chunks : int
        Number of samples in a chunk of the recommended size, and number of chunks that are shuffled together.
    today_rate, rate : float
        Measured samples/s of a `ChunkLoader` with the default and with the recommended number of requests.
    best_bytes_per_s : float
        The highest measured rate of requests.
    """

    path: str
    num_samples: int
    latency_s: float
    requests: int
    today_requests: int
    chunk_bytes: int
    today_chunk_bytes: int
    chunk_samples: int
    window_chunks: int
    today_rate: float
    rate: float
    first_batch_s: float
    best_bytes_per_s: float
    trials: list[Trial]
    commands: list[str]
    code: list[str]
    seconds: float
    versions: dict[str, str]

    def lines(self) -> list[str]:
        window = count_text(self.window_chunks, "chunk")
        lines = [
            self.headline(),
            *(f"    {code(line)}" for line in (*self.commands, *self.code)),
            "",
            f"{self.path}: a small request takes {1000 * self.latency_s:.0f} ms; concurrent requests reach "
            f"{_rate(self.best_bytes_per_s)}",
            f"ChunkLoader: {self.today_rate:,.0f} samples/s with {self.today_requests} requests at a time"
            f"{self._changed_rate()}; first batch after {self.first_batch_s:.2f} s",
            f"window: {window} of {human_bytes(self.chunk_bytes)} ({self.chunk_samples:,} samples each)",
            "",
            f"{'requests of':>12s}{''.join(f'{count:>14,}' for count in REQUESTS)}  at a time",
        ]
        for size in sorted({trial.request_bytes for trial in self.trials}):
            found = {each.requests: _rate(each.bytes_per_s) for each in self.trials if each.request_bytes == size}
            rates = "".join(f"{found.get(requests, '-'):>14s}" for requests in REQUESTS)
            today = "  (today's chunks)" if size == self.today_chunk_bytes else ""
            lines.append(f"{human_bytes(size):>12s}{rates}{today}")
        return [*lines, f"measured in {self.seconds:.0f} s"]

    def _changed_rate(self) -> str:
        return f", {self.rate:,.0f} with {self.requests}" if self.requests != self.today_requests else ""

    def headline(self) -> str:
        """Return the recommendation in a sentence."""
        changes = []
        if self.requests != self.today_requests:
            changes.append(f"use {self.requests} requests at a time")
        if self.chunk_bytes != self.today_chunk_bytes:
            changes.append(
                f"store chunks of {human_bytes(self.chunk_bytes)}, not {human_bytes(self.today_chunk_bytes)}"
            )
        return f"Recommended: {', and '.join(changes)}." if changes else "Keep the requests and chunks as they are."


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.1f} MB/s"


def tune_store(
    path: str,
    fields: Mapping[str, str] | Sequence[str] | None,
    batch_size: int,
    device: str,
    budget: TimeBudget,
    trusted: bool,
) -> StoreRecommendation:
    """Measure requests and loaders for the objects at a URL. May raise FileError and FieldError."""
    from h5chunk.store.read.fields import field_mapping

    reader = open_reader(path, field_mapping(fields), trusted=trusted)
    check_samples(reader, "tuned")
    try:
        store = StoreRequests(reader)
    except NotMeasured as reason:
        raise FieldError(f"{printable(path)}: cannot be tuned ({reason})") from None
    latency_s = store.latency_s()
    trials = _trials(store, budget)
    chosen = choose(trials, store.chunk_bytes, store.num_requests)
    how: dict[str, Any] = {"trusted": trusted, "device": device}
    seconds = LOADER_SHARE * budget.seconds
    first_s, today_rate = loader_rate(path, fields, batch_size, seconds, **how)
    budget.report()
    rate = today_rate
    if chosen.requests != store.num_requests:
        how["storage_options"] = {"requests": chosen.requests}
        rate = loader_rate(path, fields, batch_size, seconds, **how)[1]
    budget.report()
    chunk_samples = reader.chunk_samples
    if chosen.request_bytes != store.chunk_bytes:
        chunk_samples = max(1, round(chosen.request_bytes / store.bytes_per_sample))
    num_chunks = -(-reader.num_samples // chunk_samples)
    window_chunks = choose_window_chunks(round(chunk_samples * store.bytes_per_sample), num_chunks)
    return StoreRecommendation(
        path=path,
        num_samples=reader.num_samples,
        latency_s=latency_s,
        requests=chosen.requests,
        today_requests=store.num_requests,
        chunk_bytes=chosen.request_bytes,
        today_chunk_bytes=store.chunk_bytes,
        chunk_samples=chunk_samples,
        window_chunks=window_chunks,
        today_rate=today_rate,
        rate=rate,
        first_batch_s=first_s,
        best_bytes_per_s=max(trial.bytes_per_s for trial in trials),
        trials=trials,
        commands=_commands(path, chosen, store, chunk_samples, window_chunks, is_fixed=reader.ragged is not None),
        code=_code(path, chosen, store, batch_size, device),
        seconds=budget.taken_s,
        versions=library_versions(),
    )


def _trials(store: StoreRequests, budget: TimeBudget) -> list[Trial]:
    sizes = sorted({store.chunk_bytes, *CHUNK_BYTES})
    seconds = TRIALS_SHARE * budget.seconds / len(sizes) / len(REQUESTS)
    trials: list[Trial] = []
    for size in sizes:
        for requests in REQUESTS:
            fastest = max((trial.bytes_per_s for trial in trials), default=0.0)
            if trials and requests * size > OVERRUN * seconds * fastest:  # the first requests would take too long
                continue
            own = None if size == store.chunk_bytes else size
            trials.append(Trial(requests, size, store.rate(requests, seconds, own)))
            budget.report()
    return trials


def choose(trials: Sequence[Trial], chunk_bytes: int, requests: int) -> Trial:
    """Choose a trial that is nearly the fastest, preferring today's chunks, and then today's number of requests.

    >>> trials = [Trial(64, 256, 10.0), Trial(64, 512, 95.0), Trial(256, 256, 94.0), Trial(256, 512, 100.0)]
    >>> choose(trials, 256, 64), choose(trials, 512, 64)
    (Trial(requests=256, request_bytes=256, bytes_per_s=94.0), Trial(requests=64, request_bytes=512, bytes_per_s=95.0))
    """
    best = max(trial.bytes_per_s for trial in trials)
    near = [trial for trial in trials if trial.bytes_per_s >= ENOUGH * best]
    return min(
        near,
        key=lambda trial: (
            trial.request_bytes != chunk_bytes,
            trial.requests != requests,
            trial.requests,
            trial.request_bytes,
        ),
    )


def _commands(
    path: str, chosen: Trial, store: StoreRequests, chunk_samples: int, window_chunks: int, *, is_fixed: bool
) -> list[str]:
    """Return the command that rewrites the objects in other chunks, if that is recommended.

    Objects of a web server are rewritten to a local file.
    """
    if chosen.request_bytes == store.chunk_bytes or is_fixed:
        return []
    sizes = ["--chunk-samples", str(chunk_samples), "--window-chunks", str(window_chunks)]
    base, suffix = path.rstrip("/").removesuffix(".h5"), ".h5" if path.endswith(".h5") else ""
    target = base.rpartition("/")[2] if path.startswith("http") else base
    return [shell_command(["h5chunk", "repack", path, f"{target}-tuned{suffix}", *sizes])]


def _code(path: str, chosen: Trial, store: StoreRequests, batch_size: int, device: str) -> list[str]:
    if chosen.requests == store.num_requests:
        return []
    target = "" if device == "cpu" else f", device={device!r}"
    return [
        f"data = h5chunk.ChunkDataset({path!r}, storage_options={{'requests': {chosen.requests}}})",
        f"loader = h5chunk.ChunkLoader(data, {batch_size}{target})",
    ]
