"""Find the files of a 10x Genomics matrix: the Matrix Market file, and the tables of barcodes and features beside it.

| | matrix | cells | genes |
| --- | --- | --- | --- |
| Cell Ranger 2 | ``matrix.mtx`` | ``barcodes.tsv`` | ``genes.tsv`` |
| Cell Ranger 3 and later, STARsolo | ``matrix.mtx.gz`` | ``barcodes.tsv.gz`` | ``features.tsv.gz`` |

Each of them may be packed with gzip or not. The names may have one prefix, as in ``GSM123_matrix.mtx.gz``; the matrix
may have another name if the tables have none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

PACKINGS = ("", ".gz")


@dataclass(frozen=True)
class TenxFiles:
    """Paths of the matrix and of its tables; None for a table that is missing."""

    matrix: str
    barcodes: str | None
    features: str | None


def find_tenx_files(path: str | os.PathLike[str]) -> TenxFiles | None:
    """Find the tables that belong to a folder, or to a Matrix Market file.

    Returns
    -------
    TenxFiles or None
        None for a folder without ``matrix.mtx``, and for any other file that has no table beside it.
    """
    path = os.fsdecode(path)
    if os.path.isdir(path):
        matrix = _first_file(path, "matrix.mtx")
        return None if matrix is None else _with_tables(matrix, path, "")
    folder, name = os.path.split(path)
    stem = name.removesuffix(".gz")
    if not stem.endswith(".mtx") or not os.path.isfile(path):
        return None
    for prefix in dict.fromkeys((stem.removesuffix("matrix.mtx") if stem.endswith("matrix.mtx") else "", "")):
        files = _with_tables(path, folder, prefix)
        if files.barcodes or files.features:
            return files
    return None


def _with_tables(matrix: str, folder: str, prefix: str) -> TenxFiles:
    features = _first_file(folder, f"{prefix}features.tsv") or _first_file(folder, f"{prefix}genes.tsv")
    return TenxFiles(matrix, _first_file(folder, f"{prefix}barcodes.tsv"), features)


def _first_file(folder: str, name: str) -> str | None:
    paths = (os.path.join(folder, name + packing) for packing in PACKINGS)
    return next((path for path in paths if os.path.isfile(path)), None)
