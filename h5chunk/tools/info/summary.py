"""Summarise the datasets of a file on one screen.

Datasets that suit training come first, and similar datasets share a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from h5chunk.errors import count_text, human_bytes
from h5chunk.sample_source import shape_text
from h5chunk.store.format.header import Header
from h5chunk.tools.report import list_some, python_text

if TYPE_CHECKING:
    from h5chunk.tools.info.report import DatasetInfo, ImagesInfo, MatrixInfo

MIN_SIMILAR = 3  # similar datasets, whose names differ only in numbers, share a line if there are at least 3
MAX_LINES = 12  # maximum lines for datasets that suit training; half as many for other datasets
MAX_FIELDS = 8  # fields in a line of Python
NO_TENSORS = ("|S", "float128", "longdouble", ">f16")  # types that torch does not have
BATCH = 256
IMAGES = "JPEG or PNG images, which h5chunk.Windows decodes if they have one size"
SINGLE = "a single value, which has no axis of samples"
VLEN = "arrays of variable length, a field that must be named: ChunkDataset(path, fields=[...])"
TABLE = "is a table of "
BY_NAME = (TABLE, "has strings of variable length: ", "has elements of ")  # usable if a field names them
TRUSTED, DECODE = ", trusted=True", ', decode="cf"'
IMAGE_NAMES = re.compile(
    r"ima?ge?s?\b|image|img|frame|rgb|photo|picture|pixel|video|scan|slice|volume|point|(^|/)(x|data)$|raw"
)
TARGETS = re.compile(
    r"label|mask|target|segm|annot|truth|class|categor|normal|weight|(^|[/_])(y|gt|ids?|idx|index|indices|faces?)($|[/_])|_y$"
)
TESTS = re.compile(r"(^|[/_.])(test|val|valid|validation|dev)(_|$|/|\d)")
RESIZING = "from h5chunk.transforms import RandomResizedCrop"


def training_fields(
    datasets: Sequence[DatasetInfo],
    matrices: Sequence[MatrixInfo],
    images: Sequence[ImagesInfo],
    header: Header | None,
) -> list[str]:
    """Return the names of fields to train on; empty if no dataset suits training.

    The first name is that of the main field: the one that the header names, ``images``, ``X``, or the first dataset by
    `order_key`. Other fields must have the same length. They are those that the header names, ``labels``, or datasets
    in the same group or a parent group.
    """
    arrays = [item for item in datasets if item.verdict == VLEN and not matrices][:1]  # samples of only one field may
    numeric = {item.name: item for item in sorted([*_tensors(datasets), *arrays], key=order_key)}  # differ in length
    rows = {item.name: item.num_rows for item in matrices if item.num_rows}
    rows |= {item.name: item.num_images for item in images}
    lengths = {name: item.shape[0] for name, item in numeric.items()} | rows
    usual = [name for name in (header.fields if header else ()) if name in lengths]
    main = next((name for name in (*usual, "images", "X") if name in lengths), None)
    if main is None:
        sizes = {item.name: item.stored_bytes for item in matrices if item.num_rows}
        main = max(sizes, key=lambda name: sizes[name], default=None)
        first = next(iter(numeric.values()), None)
        if first is not None and (main is None or first.num_bytes > sizes[main]):
            main = first.name
    if main is None:
        return []
    others = [*usual, "labels"]
    if not usual and (main not in ("images", "X") or lengths.get("labels") != lengths[main]):
        others = [name for name in numeric if f"{_folder(main)}/".startswith(f"{_folder(name)}/".lstrip("/"))]
    others = [name for name in dict.fromkeys(others) if name != main and lengths.get(name) == lengths[main]]
    return [main, *others][: max(MAX_FIELDS, len(usual))]


def order_key(item: DatasetInfo) -> tuple[bool, bool, bool, int, str]:
    """Return a key that sorts datasets so that images come first, and masks and labels last.

    Transforms apply to the first field.
    """
    is_target = TARGETS.search(item.name.lower()) is not None
    is_image = len(item.shape) > 1 and IMAGE_NAMES.search(item.name.lower()) is not None
    is_test = TESTS.search(item.name.lower()) is not None
    return is_target, not is_image, is_test, -item.num_bytes, item.name


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def training_code(
    path: str,
    fields: Sequence[str],
    usual: Sequence[str],
    images: Sequence[ImagesInfo] = (),
    more: str = "",
) -> list[str]:
    """Return lines of Python that create a loader of ``fields``. ``path`` is a Python literal.

    ``more`` are other arguments of the data set, from `options_text`.

    The lines leave out the names of the fields if they are ``usual``, those that readers select by default.
    """
    transforms, imports = "", ["import h5chunk"]
    if any(item.name == fields[0] for item in images):
        transforms, imports = ", transforms=[RandomResizedCrop(224)]", [*imports, RESIZING]
    names = "" if list(fields) == list(usual) else f", fields=[{', '.join(map(python_text, fields))}]"
    if not names and not more:
        return [*imports, f"loader = h5chunk.ChunkLoader({path}, {BATCH}{transforms})"]
    data = f"data = h5chunk.ChunkDataset({path}{names}{more})"
    return [*imports, data, f"loader = h5chunk.ChunkLoader(data, {BATCH}{transforms})"]


def options_text(datasets: Sequence[DatasetInfo], fields: Iterable[str], *, trusted: bool) -> str:
    """Return the arguments that a data set of these fields needs, after others. A field may have a * for any name."""
    patterns = "|".join(re.escape(name.strip("/")).replace(r"\*", "[^/]*") for name in fields)
    items = [item for item in datasets if re.fullmatch(patterns, item.name.strip("/"))]
    is_packed = any(item.packing for item in items) and all(item.can_decode for item in items)
    return f"{TRUSTED if trusted else ''}{DECODE if is_packed else ''}"


def images_code(path: str, datasets: Sequence[DatasetInfo]) -> list[str]:
    """Return code that joins the images in the rows of a dataset with their labels; empty if there are no images.

    It copies the images unchanged to a file that `h5chunk.ChunkLoader` decodes, whatever their sizes.
    """
    rows = max((item for item in datasets if item.has_images), key=lambda item: item.shape[0], default=None)
    if rows is None:
        return []
    data = sorted(
        (item for item in datasets if item.can_train and not item.dtype.startswith(NO_TENSORS)), key=order_key
    )
    alike = [item.name for item in data if item.shape == rows.shape[:1] and _folder(item.name) == _folder(rows.name)]
    values = [f'"images": self.file[{python_text(rows.name)}][i].tobytes()']
    values += [
        f"{python_text(name.rpartition('/')[2])}: self.file[{python_text(name)}][i]" for name in alike[:MAX_FIELDS]
    ]
    target = python_text(f"{Path(path).stem}-images.h5")
    return [
        "import h5py",
        "import h5chunk",
        RESIZING,
        "class Images:",
        f"    def __init__(self): self.file = h5py.File({python_text(path)})",
        f"    def __len__(self): return {rows.shape[0]}",
        f"    def __getitem__(self, i): return {{{', '.join(values)}}}",
        f"h5chunk.convert(Images(), {target}, keep_encoded=True, workers=0)",
        f"loader = h5chunk.ChunkLoader({target}, {BATCH}, transforms=[RandomResizedCrop(224)])",
    ]


def matlab_code(path: str, datasets: Sequence[DatasetInfo]) -> tuple[list[str], list[str]]:
    """Return the fields of a file of MATLAB, and code that loads them; both are empty if there are none.

    MATLAB's first axis is HDF5's last one, and samples may be along either. The number of samples is the length of that
    of these axes of the main field that most other fields share.
    """
    data = _tensors(datasets)
    if not data:
        return [], []
    data = [item for item in data if _folder(item.name) == _folder(data[0].name)]
    first, *_, last = (*data[0].shape, data[0].shape[-1])
    counts = {size: sum(size in (item.shape[0], item.shape[-1]) for item in data) for size in (last, first) if size > 1}
    num_samples = max(
        counts, key=lambda size: (counts[size], size == (first if data[0].num_axes > 2 else last)), default=1
    )
    fields = [item for item in data if num_samples in (item.shape[0], item.shape[-1])][:MAX_FIELDS]
    names = [item.name for item in fields]
    if all(item.shape[0] == num_samples for item in fields):
        return names, training_code(python_text(path), names, ())
    others = [item.name for item in fields if item.shape[0] != num_samples]
    axes = "-1" if len(others) == len(fields) else f"{{{', '.join(f'{python_text(name)}: -1' for name in others)}}}"
    listed = ", ".join(map(python_text, names))
    return names, [
        "import h5chunk",
        f"data = h5chunk.ChunkDataset({python_text(path)}, fields=[{listed}], sample_axis={axes})",
        f"loader = h5chunk.ChunkLoader(data, {BATCH})",
    ]


def _tensors(datasets: Sequence[DatasetInfo]) -> list[DatasetInfo]:
    """Return the datasets that can be tensors, images first, and masks and labels last."""
    return sorted(
        (item for item in datasets if item.can_train and not item.dtype.startswith(NO_TENSORS)), key=order_key
    )


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
        prefix = "usable if named" if why.startswith(BY_NAME) else "not for training"
        lines.append(f"{why}: {listed}" if why in (VLEN, IMAGES) else f"{prefix} ({why}): {listed}")
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
