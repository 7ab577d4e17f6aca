"""Find the splits (train, test, ...) that the names of files and folders tell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from h5chunk.errors import SourceError, names_text, printable
from h5chunk.sample_source import split_words


def splits_of(folder: Path, files: Sequence[Path]) -> list[str]:
    """Return the split of each file of a folder, by its name or that of its innermost folder that tells one.

    Returns an empty list if no name tells a split. Raises SourceError if only some do, or if files are in several
    folders that are not splits, and thus perhaps different data sets.

    >>> root = Path("data")
    >>> splits_of(root, [root / "train-00000-of-00001.parquet", root / "test" / "0.parquet"])
    ['train', 'test']
    """
    told = [[_split(part) for part in file.relative_to(folder).with_suffix("").parts] for file in files]
    splits = [next(filter(None, reversed(parts)), "") for parts in told]
    others = {
        os.path.join(
            *(name for name, split in zip(file.relative_to(folder).parts[:-1], parts, strict=False) if not split), ""
        )
        for file, parts in zip(files, told, strict=True)
    }
    if len(others) > 1:
        names = names_text(sorted(name or "." for name in others))
        raise SourceError(
            f"{printable(folder)}: has tables in several folders ({names}), which may be different data sets: convert "
            "each of these folders alone"
        )
    if not any(splits):
        return []
    if not all(splits):
        named, nameless = (
            next(f for f, split in zip(files, splits, strict=True) if bool(split) == has) for has in (True, False)
        )
        raise SourceError(
            f"{printable(folder)}: {printable(named.relative_to(folder))} has the name of a split, but "
            f"{printable(nameless.relative_to(folder))} has not: rename files so that all or none of them have the "
            "name of a split (train, val, test), or convert each file alone"
        )
    return splits


def refuse_splits(folder: Path, files: Sequence[Path]) -> None:
    """Raise SourceError if files with the entries of one matrix are splits, because entries do not keep their split."""
    splits = sorted({*splits_of(folder, files)})
    if len(splits) > 1:
        raise SourceError(
            f"{printable(folder)}: its files are the splits {names_text(splits)}, and entries of a matrix do not keep "
            "their split: convert each of them alone, the others with the rows and columns of the first (--ids-from "
            "FIRST.h5 --keep-rows)"
        )


def _split(name: str) -> str:
    """Return the only word in a name that is the name of a split; "" if there is none, or several.

    >>> _split("train-00000-of-00001"), _split("Test_2"), _split("train_test"), _split("contest")
    ('train', 'test', '', '')
    """
    words = {*split_words(name)[0]}
    return words.pop() if len(words) == 1 else ""
