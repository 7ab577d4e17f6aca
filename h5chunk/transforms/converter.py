"""The base class of converters, which compute the transforms of a field: all that feed needs to know of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from h5chunk.machine import KeptThreads
from h5chunk.plan.draws import Draws
from h5chunk.store.read.source import Source
from h5chunk.transforms.compiled import Compiling
from h5chunk.transforms.pairs import Kind
from h5chunk.transforms.segments import as_array

Converted = torch.Tensor | tuple[torch.Tensor, ...]  # a batch of a field: one tensor, or the two of a `Kind`


class Loaded(NamedTuple):
    """The samples of a field before memory is allocated: the shapes of the tensors, and a function that fills them.

    If there are ``num_columns``, three tensors are the parts of one CSR tensor.
    """

    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]
    fill: Callable[[Sequence[torch.Tensor]], None]
    num_columns: int | None = None


def loaded(*parts: torch.Tensor, num_columns: int | None = None) -> Loaded:
    """Wrap tensors that have already been made, and only have to be copied.

    NumPy copies them, because torch would start threads that wait for each other on busy cores.
    """

    def fill(tensors: Sequence[torch.Tensor]) -> None:
        for part, tensor in zip(parts, tensors, strict=True):
            np.copyto(as_array(tensor), as_array(part))

    return Loaded([(tuple(part.shape), part.dtype) for part in parts], fill, num_columns)


class Converter:
    """Converts the stored samples of a field to batches, by the leading transforms of the field, in one step.

    Samples are a tensor, or `h5chunk.transforms.csr.CsrRows` of a field whose samples differ in length.

    Attributes
    ----------
    dtype : torch.dtype
        Of the batches.
    sample_bytes : int
        Bytes of a converted sample, on average.
    together_bytes : int
        Bytes of batches that should be converted by one call.
    pair : Kind, optional
        The type of the two tensors of a batch; None for one tensor.
    changes_nothing : bool
        Whether batches contain the samples exactly as stored.
    is_random : bool
        Whether results depend on `Draws`.
    is_uncut : bool
        Whether the result for several batches cannot be split into these.
    takes_numbers : bool
        Whether it takes samples on a GPU by their numbers, as `h5chunk.transforms.images.ImagesByNumber`.
    ahead : int
        Number of batches to `start` before they are requested. 0: batches are made when they are requested.
    whole_by : str
        Names of the transforms, if any, that make whole batches, so that functions cannot take single samples.
    decoder : str
        What decodes encoded images, for the repr of a loader.
    """

    dtype: torch.dtype
    sample_bytes: int
    together_bytes = 64 << 20  # because launching a kernel for a small batch costs more than running it
    pair: Kind | None = None
    changes_nothing = False
    is_random = False
    is_uncut = False
    takes_numbers = False
    ahead = 0
    whole_by = ""
    decoder = ""
    threads: KeptThreads | None = None
    _kernel: Compiling | None = None

    def attach(
        self, source: Source, name_of: Callable[[int], str], num_threads: int | None, device: torch.device
    ) -> None:
        """Prepare to convert samples of a source, whose names in messages ``name_of`` returns.

        Use at most ``num_threads`` threads; None for no limit. ``device`` is where the user gets batches.
        """
        if self.threads is not None:
            self.threads.limit = num_threads

    def prepare(self, device: torch.device) -> None:
        """Put constants on the device of the samples, and start to compile kernels for it."""

    def __call__(self, samples: Any, keep: bool, draws: Draws) -> Converted:
        """Return the batch on the device of the samples. With ``keep`` it may share memory with them."""
        raise NotImplementedError

    def load(self, samples: Any, draws: Draws) -> list[Loaded]:
        """Convert samples on the host, with memory that is allocated later: one item for each item of the field."""
        converted = self(samples, True, draws)
        return [loaded(part) for part in (converted if isinstance(converted, tuple) else (converted,))]

    def start(self, samples: Any, draws: Draws, then: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Start to make a batch, if there is ``ahead``: see `h5chunk.transforms.any_size.Pending`."""
        raise NotImplementedError

    def decoding_bytes(self, batch_size: int) -> int:
        """Estimate the bytes that are needed besides the samples and their batches."""
        return 0

    def release(self) -> None:
        """Stop the threads, and wait for the one that compiles the kernel."""
        if self._kernel is not None:
            self._kernel.wait()
        if self.threads is not None:
            self.threads.close()
