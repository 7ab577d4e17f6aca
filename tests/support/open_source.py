"""Open a source of any kind, as convert does, with options by their names."""

from __future__ import annotations

from typing import Any

from h5chunk.sample_source import OpenContext
from h5chunk.sources.open import choose_options, find_kind


def open_source(source: Any, *, kind: str | None = None, context: OpenContext | None = None, **options: Any) -> Any:
    """Open a source; its kind is found out if it is not given."""
    found = find_kind(source, kind)
    (chosen,) = choose_options(found, source, options, (found.Options,))
    return found.open(source, chosen, context or OpenContext())
