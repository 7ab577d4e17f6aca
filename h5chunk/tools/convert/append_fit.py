"""Check that new samples match the file to which they are appended, and convert their columns to its dtypes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from h5chunk.errors import FileError, SourceError, as_text
from h5chunk.plan.layout import plan_layout
from h5chunk.source import SampleSource, shape_text
from h5chunk.sources.images import IMAGES, ImageSource
from h5chunk.sources.kinds import ANY_SIZE, ImageOptions
from h5chunk.store.format.spec import GROUP, IMAGE_TABLES
from h5chunk.store.read.ragged import describe_images
from h5chunk.store.write.old_file import OldDataset, OldFile, OldImages
from h5chunk.store.write.samples import OldSamples, SampleJob

SET_BY_FILE = ("size", "color", "layout", "animated", "mask_column", *ANY_SIZE)  # options that the file determines
TABLES = ("source_index", "source_names", "source_name_ends", "class_names")
CATEGORIES = f"{GROUP}/categories/"


def recorded_options(old: OldFile, kind: Any) -> dict[str, Any]:
    """Return the options for decoding images that the file records, or nothing if the source decodes no images.

    Raises FileError if the source is a folder or archive of images, and the file records no such options.
    """
    if not issubclass(kind.Options, ImageOptions):
        return {}
    try:
        has_images = IMAGES in old.fields
        shape = old.datasets[IMAGES].shape if IMAGES in old.datasets else ()
        recorded = ImageOptions.of_recorded(old.options, shape).recorded()
    except (KeyError, TypeError, ValueError):
        recorded = {}
    if kind is ImageSource:
        if not has_images or not recorded:
            missing = "the options of its images" if has_images else repr(IMAGES)
            raise FileError(f"{old.label}: lacks {missing}: only files made by h5chunk convert can be appended to")
        recorded["split_folders"] = str(old.options.get("split_folders", "auto"))
    return recorded


def plan_addition(old: OldFile, job: SampleJob, *, new_classes: bool, source: str) -> tuple[SampleJob, list[str]]:
    """Return the job that writes the longer file, and the names of the new classes.

    ``job`` is the job for the new samples alone, and ``source`` names their source in messages. Raises FileError if the
    file is damaged or was not written by convert, and SourceError if the source does not match the file.
    """
    _check_file(old)
    _check_fields(old, job.source, job.columns, source)
    types = {name: old.datasets[name].dtype for name in old.fields if name not in job.fields}
    columns = {name: _fit(name, job.columns[name], dtype, old.label, source) for name, dtype in types.items()}
    old_categories = _old_categories(old)
    categories, added = {}, []
    for name in sorted({*job.categories, *old_categories}):
        before, now = old_categories.get(name, []), job.categories.get(name, [])
        if bool(before) != bool(now):
            named, other = (old.label, source) if before else (source, old.label)
            raise SourceError(
                f"{source}: the values of field {name!r} are names in {named}, but numbers in {other}: use names "
                "in both, or in neither"
            )
        new = _new_names(before, now, new_classes=new_classes, label=old.label, source=source)
        categories[name] = [*before, *new]
        added += new
        codes = {category: code for code, category in enumerate(categories[name])}
        numbers = np.array([codes[category] for category in now], np.int64)
        if name in columns:  # -1, which means no class, is kept
            labels = columns[name]
            columns[name] = np.where(labels < 0, labels, numbers[np.maximum(labels, 0)]) if len(numbers) else labels
        elif not np.array_equal(numbers, np.arange(len(numbers))):
            raise SourceError(
                f"{source}: the categories of field {name!r} have other codes in {old.label}: convert the source to a "
                "second file"
            )
    header, first = old.header, _old_samples(old, job.source)
    sample_bytes = job.layout.sample_bytes if first.images is None else first.images.mean_bytes
    was = plan_layout(header.num_samples, sample_bytes, header.chunk_samples)
    layout = plan_layout(header.num_samples + len(job.order), sample_bytes, header.chunk_samples, "as in the old file")
    if header.window_chunks != was.window_chunks:  # tune chose the window, and perhaps the cache
        layout = replace(layout, window_chunks=header.window_chunks)
    first = replace(first, cache=None if header.cache == was.cache else header.cache)
    options = {name: value for name, value in job.options.items() if name in ("seed", "shuffle", "fit")}
    job = replace(job, layout=layout, options=options, columns=columns, categories=categories, old=first)
    return job, added


def _check_file(old: OldFile) -> None:
    """Raise FileError unless the file contains only datasets that convert writes, in uncompressed chunks."""
    fields = [name for name in old.fields if name != old.image_group]
    written = [*fields, *(f"{old.image_group}/{part}" for part in ("data", *IMAGE_TABLES) if old.image_group)]
    known = {*(f"{GROUP}/{name}" for name in TABLES), *written}
    known |= {f"{GROUP}/checksums/{name}" for name in written}
    known |= {path for path in old.datasets if path.startswith(CATEGORIES)}  # also of columns that were left out
    lost = min(old.datasets.keys() - known, default=None)
    if lost is not None:
        raise FileError(
            f"{old.label}: {lost!r} was not written by h5chunk convert, and would be lost: remove it, or append "
            "to the original converted file"
        )
    if f"{GROUP}/source_index" not in old.datasets:
        raise FileError(f"{old.label}: lacks 'source_index': only files made by h5chunk convert can be appended to")
    size = old.header.chunk_samples
    for name in fields:
        dataset = old.datasets[name]
        is_plain = not dataset.id.get_create_plist().get_nfilters() and dataset.chunks == (size, *dataset.shape[1:])
        if dataset.shape[:1] != (old.header.num_samples,) or not is_plain:
            raise FileError(
                f"{old.label}: its fields are not stored in uncompressed chunks of {size} complete samples: repack it "
                "(--compression none), or convert all sources together"
            )


def _check_fields(old: OldFile, source: SampleSource, columns: Collection[str], label: str) -> None:
    """Raise SourceError unless the source has the same fields as the file."""
    names = [*source.fields, *columns]
    more = next((name for name in names if name not in old.fields), None)
    lacking = next((name for name in old.fields if name not in names), None)
    if more is not None or lacking is not None:
        problem = f"has the field {more!r}, which {old.label} lacks"
        if lacking is not None:
            problem = f"lacks the field {lacking!r}, which {old.label} has"
        listed = ", ".join(name for name in old.fields if name not in source.fields) or "none"
        if not isinstance(source, ImageSource):
            raise SourceError(f"{label}: {problem}: read it with the options with which the file was converted")
        tree = " (a folder that contains a folder for each class)" * ("labels" in old.fields)
        if "split" in old.fields:
            tree = " (a folder that contains the folders of splits, such as train/ or val/)"
        raise SourceError(
            f"{label}: {problem}: use a source with the fields of the file{tree}, or a manifest (--manifest) with the "
            f"columns {listed}"
        )
    for name, field in source.fields.items():
        if name == old.image_group or field.form:
            _check_images(old, name, field.form, label)
            continue
        dataset = old.datasets[name]
        if (dataset.shape[1:], dataset.dtype) != (field.shape, field.dtype):
            raise SourceError(
                f"{label}: its {name} are {shape_text(field.shape)} {field.dtype}, but those in {old.label} are "
                f"{shape_text(dataset.shape[1:])} {dataset.dtype}: use samples of the same shape and type"
            )
    if (source.names is None) == (f"{GROUP}/source_names" in old.datasets):
        named, other = (label, old.label) if source.names is not None else (old.label, label)
        raise SourceError(
            f"{label}: samples have names in {named}, but not in {other}: use names in both, or in neither"
        )


def _check_images(old: OldFile, name: str, form: str, label: str) -> None:
    """Raise SourceError unless source and file store images in the same form: encoded, raw, or of one size."""
    was = describe_images(old.file[name], old.path, name, 1).form if name == old.image_group else "of one size"
    if form != was:
        raise SourceError(
            f"{label}: its {name} are {form or 'of one size'}, but those in {old.label} are {was}: convert the source "
            "to a second file"
        )
    filters = old.datasets[f"{name}/data"].id.get_create_plist().get_nfilters()
    if filters:
        raise FileError(f"{old.label}: its {name} are compressed: repack the file (--compression none)")


def _old_categories(old: OldFile) -> dict[str, list[str]]:
    """Return the names of the categories of each field in the file, in the order of their codes."""
    categories = {"labels": list(old.header.class_names)} if old.header.class_names else {}
    for path in old.datasets:
        if path.startswith(CATEGORIES) and path.removeprefix(CATEGORIES) in old.fields:
            categories[path.removeprefix(CATEGORIES)] = [as_text(name) for name in old.datasets[path][()].tolist()]
    return categories


def _new_names(old: Sequence[str], new: Sequence[str], *, new_classes: bool, label: str, source: str) -> list[str]:
    """Return the class names that the file lacks. Raises SourceError unless ``new_classes`` allows them."""
    twice = next((name for name in old if old.count(name) > 1), None) if len({*old}) < len(old) else None
    if twice is not None:
        raise SourceError(f"{label}: two of its classes have the name {twice!r}, which is ambiguous: rename one")
    known = {*old}
    added = [name for name in new if name not in known]
    if added and not new_classes:
        raise SourceError(
            f"{source}: {label} lacks {len(added)} of the {len(new)} classes of the source, such as {added[0]!r}: use "
            "--new-classes (new_classes=True) to add them after the old classes"
        )
    return added


def _old_samples(old: OldFile, source: SampleSource) -> OldSamples:
    """Read the columns and tables of the old file."""
    index, ends, names = (old.table(name) for name in ("source_index", "source_name_ends", "source_names"))
    assert index is not None
    return OldSamples(
        num_samples=old.header.num_samples,
        label=old.label,
        fields={name: OldDataset(old, name) for name in source.fields if name != old.image_group},
        images=OldImages(old, old.image_group) if old.image_group else None,
        columns={name: OldDataset(old, name).values() for name in old.fields if name not in source.fields},
        source_index=index,
        name_ends=index[:0] if ends is None else ends,
        names=b"" if names is None else names.tobytes(),
        attributes={name: old.attributes(name) for name in ("/", GROUP, *old.fields)},
        options=old.options,
        seed=old.header.seed,
    )


def _fit(name: str, values: np.ndarray, dtype: np.dtype, label: str, source: str) -> np.ndarray:
    """Convert a column of the source to its dtype in the file.

    Sources choose the smallest dtype that fits the values, which may be smaller than in the file. Raises SourceError if
    the dtype in the file cannot store the values exactly.
    """
    if values.dtype == dtype:
        return values
    strings = values.dtype.kind == "S", dtype.kind == "S"
    if any(strings):
        if not all(strings):
            raise SourceError(
                f"{source}: field {name!r} has type {_text(values.dtype)}, but type {_text(dtype)} in {label}: convert "
                "it to a second file"
            )
        if values.dtype.itemsize > dtype.itemsize:
            longest = max(map(len, values.tolist()))
            if longest > dtype.itemsize:
                raise SourceError(
                    f"{source}: field {name!r} has a string of {longest} bytes, but {label} stores at most "
                    f"{dtype.itemsize}: shorten it, or convert all sources together"
                )
        return values.astype(dtype)
    with np.errstate(all="ignore"):
        fitted = values.astype(dtype)
        same = (fitted.astype(values.dtype) == values) | ((values != values) & (fitted != fitted))
        if values.dtype.kind in "iu" and dtype.kind in "iu":
            same &= (fitted < 0) == (values < 0)
        if values.dtype.kind in "iu" and dtype.kind == "f":
            same &= np.abs(fitted) < 2.0**63  # the conversion back to integers overflows
    if not same.all():
        first = int((~same).argmax())
        raise SourceError(
            f"{source}: field {name!r} has the value {values[first]} (sample {first}), which cannot be stored exactly "
            f"as {dtype}, its type in {label}: convert all sources together"
        )
    return fitted


def _text(dtype: np.dtype) -> str:
    return f"strings of {dtype.itemsize} bytes" if dtype.kind == "S" else str(dtype)
