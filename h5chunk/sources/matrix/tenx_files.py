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
from itertools import islice

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
        None for a folder without ``matrix.mtx`` in it, or in the only folder in it, and for any other file that has no
        table beside it.
    """
    path = os.fsdecode(path)
    if os.path.isdir(path):
        matrix = _first_file(path, "matrix.mtx")
        return _in_only_folder(path) if matrix is None else _with_tables(matrix, path, "")
    folder, name = os.path.split(path)
    stem = name.removesuffix(".gz")
    if not stem.endswith(".mtx") or not os.path.isfile(path):
        return None
    for prefix in dict.fromkeys((stem.removesuffix("matrix.mtx") if stem.endswith("matrix.mtx") else "", "")):
        files = _with_tables(path, folder, prefix)
        if files.barcodes or files.features:
            return files
    return None


def _in_only_folder(path: str) -> TenxFiles | None:
    """The files of the one folder in a folder, as Cell Ranger 2 puts them below the name of the genome."""
    try:
        with os.scandir(path) as entries:
            folders = [entry.path for entry in islice(filter(os.DirEntry.is_dir, entries), 2)]
    except OSError:
        return None
    matrix = _first_file(folders[0], "matrix.mtx") if len(folders) == 1 else None
    files = None if matrix is None else _with_tables(matrix, folders[0], "")
    return files if files is not None and files.barcodes and files.features else None


def _with_tables(matrix: str, folder: str, prefix: str) -> TenxFiles:
    features = _first_file(folder, f"{prefix}features.tsv") or _first_file(folder, f"{prefix}genes.tsv")
    return TenxFiles(matrix, _first_file(folder, f"{prefix}barcodes.tsv"), features)


def _first_file(folder: str, name: str) -> str | None:
    paths = (os.path.join(folder, name + packing) for packing in PACKINGS)
    return next((path for path in paths if os.path.isfile(path)), None)
