"""Find the costs of training steps and of the machine. Apart from copying, they do not depend on the data."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from h5chunk.tools.model.cost import LEAST_SHARE, Cost, Fix, about, late_share, slowest_line, where
from h5chunk.tools.model.pipeline import Range
from h5chunk.tools.model.seen import Gpu, Seen

PINNED_BYTES_S = 4e10  # rate of a copy from pinned memory to the GPU
PINNING_BYTES_S = 6e9  # rate at which a thread copies to pinned memory
FUSED = 0.1  # time of a fused optimizer relative to one with several kernels per parameter
FEW_SAMPLES = 8
LEAST_IDLE = 0.1  # if the GPU is idle for a smaller fraction of the time, the step is not the cause


def step_costs(seen: Seen) -> Iterator[Cost]:
    """Yield the costs of steps that let the GPU wait while training does not wait for a batch."""
    gpu = seen.gpu
    if gpu is None:
        return
    if seen.pageable_bytes > 0.5 * seen.copy_bytes:
        yield _pageable(seen, gpu)
    if not gpu.is_profiled or seen.idle < LEAST_IDLE:
        return
    if gpu.blocked > 0.1 * seen.iteration:
        yield _synchronised(seen, gpu)
    if seen.held > LEAST_SHARE:  # waiting for the GIL makes launches and Python slow
        return
    host = seen.step - gpu.blocked
    if seen.optimizer > host / 3:
        yield _optimizer(seen, gpu)
    elif gpu.kernels > 20 and seen.in_torch > 0.5:
        yield _launches(seen, gpu)
    else:
        yield _python(seen, gpu)


def _step_cost(
    seen: Seen, gpu: Gpu, cause: str, sentence: str, fix: str, code: str, seconds: float, exact: bool
) -> Cost:
    """Return a cost of the training step, without which Python would take ``seconds`` per iteration.

    The time of the GPU's work limits the gain. Waiting for the GPU is a separate cost, not part of other costs.
    """
    before = seen.iteration - (0.0 if cause in ("copy", "synchronisation") else gpu.blocked)
    gain = seen.iteration / max(1e-9, seen.iteration - max(0.0, before - max(seconds, gpu.least)))
    rest = seen.other_share
    is_data = cause == "copy"
    busy = f"the GPU works {gpu.busy / seen.iteration:.0%} of the time"
    blamed = "Not your data: " if seen.has_loader or cause != "python" else "Your data or your step: "
    text = f"{'' if is_data else blamed}{sentence}; {busy}."
    fixes = [Fix(fix, about(seen, gain, 1.2 if exact else 2), code, is_bound=not exact)]
    return Cost(cause, is_data, (1 - 1 / gain) * (1 - rest), text, fixes)


def _pageable(seen: Seen, gpu: Gpu) -> Cost:
    pinned = seen.copy_bytes / PINNED_BYTES_S
    busy = gpu.least - gpu.copy + pinned if gpu.is_profiled else 0.0
    seconds = max(seen.wait + seen.step - seen.copy, busy, seen.copy_bytes / PINNING_BYTES_S)
    gain = max(1.0, seen.iteration / max(1e-9, seconds))
    text = f"Copying to the GPU from pageable memory takes {seen.copy / seen.iteration:.0%} of the time."
    code = f"{where(seen)}DataLoader(..., pin_memory=True), and tensor.to(device, non_blocking=True)"
    apply = {"loader": {"pin_memory": True}} if seen.is_torch else {}
    fix = Fix("pin_memory=True, non_blocking=True", about(seen, gain, high=1.2), code, apply)
    return Cost("copy", True, (1 - 1 / gain) * (1 - seen.other_share), text, [fix])


def _synchronised(seen: Seen, gpu: Gpu) -> Cost:
    line = slowest_line(seen, "step")
    after = seen.iteration - gpu.blocked
    if seen.copy > 0.5 * gpu.blocked and seen.pageable_bytes < 0.5 * seen.copy_bytes:
        code = "tensor.to(device, non_blocking=True): the batch is pinned, so that nothing needs to wait"
        text = "Python waits in each step until its batch is copied, and all work that was queued before is done"
        return _step_cost(seen, gpu, "copy", text, "non_blocking=True", code, after, True)
    code = "log losses every 100 steps: .item(), .cpu() and print of a GPU tensor wait for the GPU"
    place = "" if line is None else f" (its slowest line is {line})"
    text = f"Python waits for the GPU in each step, and the GPU for Python{place}"
    return _step_cost(seen, gpu, "synchronisation", text, "no synchronisation in each step", code, after, True)


def _optimizer(seen: Seen, gpu: Gpu) -> Cost:
    share = seen.optimizer / seen.iteration
    code = "torch.optim.Adam(..., fused=True), with parameters on the GPU, or the fused form of your optimizer"
    text = f"Python spends {share:.0%} of the time in the optimizer's step"
    after = seen.iteration - gpu.blocked - (1 - FUSED) * seen.optimizer
    return _step_cost(seen, gpu, "optimizer", text, "fused optimizer", code, after, True)


def _launches(seen: Seen, gpu: Gpu) -> Cost:
    text = f"launching {gpu.kernels:.0f} kernels per step takes longer than running them"
    code = "a CUDA graph of the whole step, torch.compile(..., mode='reduce-overhead'), or a larger batch"
    cause = "small batches" if seen.has_loader and seen.samples <= FEW_SAMPLES else "launches"
    return _step_cost(seen, gpu, cause, text, "fewer kernel launches", code, seen.wait + seen.copy, False)


def _python(seen: Seen, gpu: Gpu) -> Cost:
    line = slowest_line(seen, "step")
    place, share = ("", 1.0) if line is None else (f"; its slowest line is {line}", line.share)
    code = f"{line or 'the step'}: do less work there, or not in every step"
    text = f"Python keeps the GPU waiting within the step{place}"
    after = seen.iteration - gpu.blocked - share * (seen.step - gpu.blocked)
    return _step_cost(seen, gpu, "python", text, "less Python in the step", code, after, False)


def machine_costs(seen: Seen) -> Iterator[Cost]:
    """Yield the costs of threads, memory, clocks, slow ranks, and other loaders such as validation."""
    rest, delay = 1 - seen.elsewhere, seen.step_delay / seen.iteration
    if seen.elsewhere:
        text = f"Not training: other loaders, such as validation, take {seen.elsewhere:.0%} of the time."
        yield Cost("validation", False, seen.elsewhere, text)
    if seen.threads > seen.cores and (delay > 0.1 or seen.step_cpu > 2 * seen.step):
        yield Cost("oversubscription", False, rest * max(delay, 1 - seen.cores / seen.threads), *_threads(seen, delay))
    if seen.held > LEAST_SHARE:
        yield _held(seen)
    if seen.memory_stall > 0.05:
        text = (
            f"Not your data: processes wait {seen.memory_stall:.0%} of the time for memory pages that were evicted, "
            "because memory is short. Use fewer workers, smaller caches, fewer copies of the data, or more memory."
        )
        share, waits = seen.memory_stall, rest * seen.waiting()[0]  # stalls of the system make several processes wait
        yield Cost("memory", False, max(share, waits if share > waits / 5 else 0.0), text)
    if seen.gpu is not None and seen.gpu.slow_clocks:
        text = f"Not your data: the GPU's clock is at {seen.gpu.clock:.0%} of its maximum ({seen.gpu.slow_clocks})."
        yield Cost("clocks", False, rest * (1 - seen.gpu.clock) * (1 - seen.idle), text)
    if len(seen.ranks) > 1:
        yield _straggler(seen)


def _held(seen: Seen) -> Cost:
    """Return the cost of a thread that holds the GIL. Receiving batches from workers waits for the GIL, too."""
    share = min(0.99, seen.held * (seen.step / seen.iteration if seen.workers else 1.0) + late_share(seen))
    gain, thread = 1 / (1 - share), seen.holder
    text = (
        f"Not your data: thread {thread} holds Python's lock (GIL), and training waits {share:.0%} of its time for it."
    )
    code = "run it in a process (multiprocessing), or use a library that releases the lock"
    return Cost(
        "gil",
        False,
        share * (1 - seen.other_share),
        text,
        [Fix(f"without thread {thread}", about(seen, gain, high=1.2), code)],
    )


def _threads(seen: Seen, delay: float) -> tuple[str, list[Fix]]:
    wanted = max(1, seen.cores - round(seen.fetch_cpu / seen.iteration if seen.workers else 0))
    text = (
        f"Not your data: {seen.threads} threads of torch and {seen.workers} workers compete for "
        f"{seen.cores} cores, and the training thread waits {delay:.0%} of its time for one."
    )
    least = max(seen.step_cpu / seen.cores, seen.iteration - seen.step_delay if delay > 0.1 else 0.0)
    gain = max(1.0, seen.iteration / max(1e-9, least))
    code = f"torch.set_num_threads({wanted}), or OMP_NUM_THREADS={wanted}"
    return text, [Fix(f"{wanted} threads", Range(gain, 1.0, 2 * gain), code, {"threads": wanted})]


def _straggler(seen: Seen) -> Cost:
    """Return the cost of a slow DDP rank, which the others wait for. It is the one that waits least for gradients."""
    waits = [wait for _, wait in seen.ranks]
    slowest, iteration = waits.index(min(waits)), statistics.fmean(seconds for seconds, _ in seen.ranks)
    lost = statistics.median(wait for rank, wait in enumerate(waits) if rank != slowest) - waits[slowest]
    gain = iteration / max(1e-9, iteration - lost)
    text = (
        f"Rank {slowest} delays the others, which wait {lost / iteration:.0%} of their time for its gradients. "
        f"This report describes rank {slowest}."
    )
    fix = Fix(
        f"rank {slowest} as fast as the others", Range(gain, 0.9 * gain, 1.1 * gain), "see the report of the rank"
    )
    return Cost("straggler", False, lost / iteration, text, [fix])
