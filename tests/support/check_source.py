"""What every kind of source must keep, whatever it reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.open_source import open_source

import h5chunk
from h5chunk.errors import OptionError
from h5chunk.sources.kinds import KIND_OPTIONS
from h5chunk.sources.matrix.block import SparseSource
from h5chunk.sources.open import find_kind
from h5chunk.sources.options import Options


def check_kind(kind: Any) -> None:
    """What its class says of itself."""
    assert isinstance(kind.kind, str) and isinstance(kind.noun, str) and issubclass(kind.Options, Options)
    assert KIND_OPTIONS[kind.kind] is kind.Options
    kind.Options()  # all options have defaults
    for field in dataclasses.fields(kind.Options):
        assert field.metadata["help"].endswith(".") and field.metadata["help"][0].isupper()
        assert kind.Options.heading_of(field.name)
        if field.metadata["choices"]:
            with pytest.raises(OptionError, match=f"{field.name} is 'nothing': pass "):
                kind.Options(**{field.name: "nothing"})
    for stranger in (b"bytes", 3, None, object()):
        assert not kind.recognises(stranger, b"")


def check_source(kind: Any, source: Any, folder: Path, **given: Any) -> None:
    """Open an example of the kind with the options that it needs, and convert it."""
    found = find_kind(source) if kind.kind != "npy" else kind
    assert found is kind
    with pytest.raises(OptionError, match="there is no option 'nothing'"):
        open_source(source, kind=kind.kind, nothing=1)
    opened = open_source(source, kind=kind.kind, **given)
    assert opened.kind == kind.kind
    (check_matrix if isinstance(opened, SparseSource) else check_samples)(opened)
    identity = opened.identity()
    json.dumps(identity[0] if isinstance(identity, tuple) else identity)
    options = {"format": kind.kind, **given}
    plan = h5chunk.convert(source, folder / "x.h5", **options, dry_run=True)
    report = h5chunk.convert(source, folder / "x.h5", **options)
    assert plan.source_kind == report.source_kind == kind.kind
    assert json.loads(report.to_json()) and str(report)
    assert h5chunk.verify(folder / "x.h5").ok
    assert len(h5chunk.ChunkDataset(folder / "x.h5")) > 0
    assert h5chunk.info(folder / "x.h5")
    if identity is not None:
        assert h5chunk.convert(source, folder / "x.h5", **options).already_complete


def check_samples(source: Any) -> None:
    """What a `h5chunk.sample_source.SampleSource` promises."""
    assert len(source) > 0 and source.fields
    sizes = [field.sample_bytes for field in source.fields.values()]
    assert sizes == sorted(sizes, reverse=True)
    for field in source.fields.values():
        assert field.dtype.isnative and field.dtype.kind in "iufS"
    for name, values in source.columns.items():
        assert values.shape == (len(source),) and name not in source.fields
    json.dumps(dict(source.options))
    assert source.names is None or len(source.names) == len(source)
    with source.session():
        for index in (0, len(source) - 1):
            out = [
                {name: np.full(field.shape, fill, field.dtype) for name, field in source.fields.items()}
                for fill in (1, 77)
            ]
            for each in out:
                source.read_into(index, each)
            assert all(np.array_equal(out[0][name], out[1][name]) for name in source.fields)  # all is written
            assert isinstance(source.name(index), str)
            assert all(isinstance(number, int) for number in source.stamp(index))


def check_matrix(source: SparseSource) -> None:
    """What a `SparseSource` promises."""
    totals = []
    for max_bytes in (1 << 12, 1 << 20):
        total, before = 0, 0
        for block, consumed in source.blocks(max_bytes):
            assert len(block.rows) == len(block.columns) and before <= consumed <= source.num_bytes
            before, total = consumed, total + len(block)
        totals.append(total)
    assert totals[0] == totals[1] > 0
