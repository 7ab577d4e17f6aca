"""Tell folders of splits, such as ``train`` and ``val``, from folders of classes.

A data set often comes as ``train/cat/1.png``, ``val/cat/2.png``: its top folders are no classes, and labels that count
them would be worthless. Names decide; where they leave a doubt, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Collection

from h5chunk.errors import OptionError, SourceError, as_text

SPLIT_NAMES = (
    b"train", b"training", b"val", b"valid", b"validation", b"dev", b"test", b"testing", b"eval", b"evaluation",
)  # fmt: skip
CHOICES = ("auto", "yes", "no")


def check_split_folders(choice: str) -> None:
    """Raise OptionError unless it is one of `CHOICES`."""
    if choice not in CHOICES:
        raise OptionError(f"split_folders is {choice!r}: give {', '.join(CHOICES[:-1])} or {CHOICES[-1]}")


def has_split_folders(source: str, folders: Collection[bytes], choice: str) -> bool:
    """Decide whether the top folders of a source are splits.

    Parameters
    ----------
    source : str
        For messages.
    folders : collection of bytes
        Paths below the source of all folders that hold images; ``b""`` is the source itself.
    choice : {"auto", "yes", "no"}
        ``auto``: they are if all have names of splits, and there are two or more of them.

    Raises
    ------
    SourceError
        With ``auto``, only some of them have; or some hold class folders and others do not.

    Examples
    --------
    >>> has_split_folders("data", [b"train/cat", b"train/dog", b"val/cat"], "auto")
    True
    >>> has_split_folders("data", [b"car", b"bus", b"train"], "auto")
    False
    """
    check_split_folders(choice)
    tops = sorted({folder.partition(b"/")[0] for folder in folders} - {b""})
    nested = {folder.partition(b"/")[0] for folder in folders if b"/" in folder}
    named = [top for top in tops if top.lower() in SPLIT_NAMES]
    if choice == "no" or (choice == "auto" and not named):
        return False
    if not tops:
        raise SourceError(f"{source}: there are no folders in it that could be splits: leave --split-folders out")
    shown = ", ".join(repr(as_text(top)) for top in tops[:5]) + (", ..." if len(tops) > 5 else "")
    if choice == "auto" and not len(named) == len(tops) > 1:
        if len(named) == 1 < len(tops) and named[0] not in nested:
            return False  # one class among others, which happens to be called so, such as trains among vehicles
        raise SourceError(
            f"{source}: holds the folders {shown}, of which {as_text(named[0])!r} is called like a split: give "
            "--split-folders yes if they are splits, with classes one level down; no if they are classes; or convert "
            "one of them alone"
        )
    if nested and len(nested) < len(tops):
        flat = next(top for top in tops if top not in nested)
        raise SourceError(
            f"{source}: of the splits {shown}, {as_text(min(nested))!r} has class folders and {as_text(flat)!r} has "
            "none: convert each alone; or give --split-folders no if they are classes"
        )
    return True
