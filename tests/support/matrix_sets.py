"""A sparse matrix cut into several files."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from support.matrices import random_matrix, write, write_anndata

WHOLE = random_matrix(203, 300, 9)
CUTS = (0, 40, 41, 130, 203)


def make_set(folder: Path, kind: str = "ours", cuts: tuple[int, ...] = CUTS, **options: Any) -> list[Path]:
    """Files ``m0.h5``, ...: the rows of the whole, in order. We pack no matrix without rows; AnnData does."""
    folder.mkdir()
    cuts = tuple(sorted(set(cuts))) if kind == "ours" else cuts
    paths = [folder / f"m{number}.h5" for number in range(len(cuts) - 1)]
    for path, (start, stop) in zip(paths, pairwise(cuts), strict=True):
        if kind == "ours":
            write(path, WHOLE[start:stop], **options)
        else:
            write_anndata(path, WHOLE[start:stop], **options)
    return paths
