"""Summarise the datasets of a file on one screen.

Datasets that suit training come first, and similar datasets share a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from h5chunk.errors import count_text, human_bytes
from h5chunk.source import shape_text
from h5chunk.store.format.header import Header
from h5chunk.tools.report import list_some, python_text

if TYPE_CHECKING:
    from h5chunk.tools.info.report import DatasetInfo, ImagesInfo, MatrixInfo

MIN_SIMILAR = 3  # similar datasets, whose names differ only in numbers, share a line if there are at least 3
MAX_LINES = 12  # maximum lines for datasets that suit training; half as many for other datasets
MAX_FIELDS = 8  # fields in a line of Python
NO_TENSORS = ("|S", "float128", "longdouble", ">f16")  # types that torch does not have
BATCH = 256
IMAGES = "JPEG or PNG images, which h5chunk.Windows decodes"
VLEN = "arrays of variable length, a field that must be named: ChunkDataset(path, fields=[...])"
RESIZING = "from h5chunk.transforms import RandomResizedCrop"


def training_fields(
    datasets: Sequence[DatasetInfo],
    matrices: Sequence[MatrixInfo],
    images: Sequence[ImagesInfo],
    header: Header | None,
) -> list[str]:
    """Return the names of fields to train on; empty if no dataset suits training.

    The first name is that of the main field: the one that the header names, ``images``, ``X``, or the largest dataset.
    Other fields must have the same length. They are those that the header names, ``labels``, or datasets in the same
    group or a parent group.
    """
    numeric = {item.name: item for item in datasets if item.can_train and not item.dtype.startswith(NO_TENSORS)}
    rows = {item.name: item.num_rows for item in matrices if item.num_rows}
    rows |= {item.name: item.num_images for item in images}
    lengths = {name: item.shape[0] for name, item in numeric.items()} | rows
    usual = [name for name in (header.fields if header else ()) if name in lengths]
    main = next((name for name in (*usual, "images", "X") if name in lengths), None)
    if main is None:
        sizes = {name: item.stored_bytes for name, item in numeric.items()}
        sizes |= {item.name: item.stored_bytes for item in matrices if item.num_rows}
        main = max(sizes, key=lambda name: sizes[name], default=None)
    if main is None:
        return []
    others = [*usual, "labels"]
    if not usual and main not in ("images", "X"):
        others = [name for name in numeric if f"{_folder(main)}/".startswith(f"{_folder(name)}/".lstrip("/"))]
    others = [name for name in dict.fromkeys(others) if name != main and lengths.get(name) == lengths[main]]
    return [main, *others][: max(MAX_FIELDS, len(usual))]


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def training_code(
    path: str, fields: Sequence[str], usual: Sequence[str], images: Sequence[ImagesInfo] = ()
) -> list[str]:
    """Return lines of Python that create a loader of ``fields``.

    The lines leave out the names of the fields if they are ``usual``, those that readers select by default.
    """
    argument, transforms, imports = python_text(path), "", ["import h5chunk"]
    if any(item.name == fields[0] for item in images):
        transforms, imports = ", transforms=[RandomResizedCrop(224)]", [*imports, RESIZING]
    if list(fields) == list(usual):
        return [*imports, f"loader = h5chunk.ChunkLoader({argument}, {BATCH}{transforms})"]
    names = ", ".join(map(python_text, fields))
    data = f"data = h5chunk.ChunkDataset({argument}, fields=[{names}])"
    return [*imports, data, f"loader = h5chunk.ChunkLoader(data, {BATCH}{transforms})"]


def default_fields(names: Iterable[str], header: Header | None) -> list[str]:
    """Return the members that readers select as fields by default; empty if the user must name fields."""
    members = set(names)
    recorded = [name for name in (header.fields if header else ()) if name in members]
    main = next((name for name in ("images", "X") if name in members), None)
    return recorded or ([main, *({"labels"} & members)] if main else [])


def summarise(datasets: Sequence[DatasetInfo]) -> list[str]:
    """Describe the datasets that suit training, the largest first, then the other datasets, grouped by reason."""
    groups = _grouped([dataset for dataset in datasets if dataset.can_train])
    lines = [_group_line(group) for group in groups[:MAX_LINES]]
    hidden = sum(len(group) for group in groups[MAX_LINES:])
    others: dict[str, list[str]] = {}
    for dataset in datasets:
        if not dataset.can_train:
            others.setdefault(dataset.verdict, []).append(dataset.name)
    for why, names in list(others.items())[: MAX_LINES // 2]:
        listed = list_some(names) if len(names) > 1 else names[0]
        lines.append(f"{why}: {listed}" if why in (VLEN, IMAGES) else f"not for training ({why}): {listed}")
    hidden += sum(map(len, list(others.values())[MAX_LINES // 2 :]))
    return [*lines, f"{count_text(hidden, 'more dataset')} (--all)"] if hidden else lines


def _grouped(datasets: Sequence[DatasetInfo]) -> list[list[DatasetInfo]]:
    """Group datasets with equal dtype and sample shape whose names differ only in numbers, the largest group first."""
    by_pattern: dict[tuple[object, ...], list[DatasetInfo]] = {}
    for dataset in datasets:
        pattern = re.sub(r"\d+", "*", dataset.name)
        by_pattern.setdefault((pattern, dataset.dtype, dataset.shape[1:], dataset.is_cut), []).append(dataset)
    groups = []
    for group in by_pattern.values():
        groups += [group] if len(group) >= MIN_SIMILAR else [[dataset] for dataset in group]
    return sorted(groups, key=lambda group: -sum(dataset.stored_bytes for dataset in group))


def _group_line(group: Sequence[DatasetInfo]) -> str:
    """Describe a dataset or several similar ones in one line."""
    first, counts = group[0], sorted(dataset.shape[0] for dataset in group)
    samples = count_text(counts[0], "sample") if counts[0] == counts[-1] else f"{counts[0]:,} to {counts[-1]:,} samples"
    shape = f" of {shape_text(first.shape[1:])}" if first.shape[1:] else ""
    name = first.name
    if len(group) > 1:
        name = f"{first.name} to {group[-1].name} ({len(group):,} datasets)"
        samples = f"{samples} each"
    size = human_bytes(sum(dataset.stored_bytes for dataset in group))
    filters = f", {'+'.join(first.filters)}" if first.filters else ""
    cut = f"; a sample is cut into {first.chunks_per_sample:,} chunks" if first.is_cut else ""
    return f"{name}  {first.dtype}, {samples}{shape}, {size}{filters}{cut}"
