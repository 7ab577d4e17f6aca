"""Convert samples into one more file of a data set: with the fields, types, classes and options of an earlier file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from h5chunk.errors import FieldError, FileError, OptionError, SourceError, as_text, printable
from h5chunk.sample_source import SampleField, SampleSource, shape_text
from h5chunk.sources.images import ImageSource
from h5chunk.sources.kinds import ANY_SIZE, ImageOptions
from h5chunk.sources.options import flag_of
from h5chunk.store.format.header import Header, read_header
from h5chunk.store.format.spec import CHECKSUMS, GROUP
from h5chunk.store.hdf5.guard import Guard
from h5chunk.store.hdf5.open import opened
from h5chunk.store.read.files import list_files
from h5chunk.store.read.ragged import describe_images, find_image_groups
from h5chunk.store.write.samples import SampleJob

SET_BY_FILE = ("size", "color", "layout", "animated", "mask_column", *ANY_SIZE)  # options that the file determines


@dataclass(frozen=True)
class Like:
    """What a new file has in common with an earlier one, which `h5chunk.convert` made from samples."""

    label: str  # the file's path, for messages
    header: Header
    fields: Mapping[str, SampleField]
    categories: Mapping[str, list[str]]  # names of codes, by field; those of ``labels`` are the classes

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Like:
        """Read the header and the fields of a file or, if there are several files, of the one with the most classes.

        Raises FileError if a file is damaged, or was not made from samples by convert.
        """
        return max(map(_read, list_files(path)), key=lambda like: len(like.header.class_names))

    def options_for(self, kind: Any, requested: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``requested`` options for a kind of source, with those for decoding images that the file records.

        Raises OptionError if they include options that the file determines.
        """
        if not issubclass(kind.Options, ImageOptions):
            return dict(requested)
        if fixed := next((name for name in SET_BY_FILE if name in requested), None):
            raise OptionError(
                f"{flag_of(fixed)} cannot be set, because images are decoded with the options recorded in "
                f"{self.label}: leave it out, or leave out --like (like)"
            )
        recorded = self._image_options()
        if kind is ImageSource and not recorded:
            raise FileError(f"{self.label}: records no options of images: use --like with a file of images")
        if kind is ImageSource and "manifest" not in requested:
            recorded["split_folders"] = str(self.header.options.get("split_folders", "auto"))
        return {**recorded, **requested}

    def _image_options(self) -> dict[str, Any]:
        images = self.fields.get("images")
        shape = () if images is None or images.form else (1, *images.shape)
        try:
            return ImageOptions.of_recorded(self.header.options, shape).recorded()
        except (KeyError, TypeError, ValueError):
            return {}

    def check_fields(self, source: SampleSource, label: str) -> None:
        """Raise SourceError unless the source has the fields of the file. ``label`` names the source in messages."""
        names = [*source.fields, *source.columns]
        problem = ""
        if lacking := next((name for name in self.fields if name not in names), None):
            problem = f"lacks the field {lacking!r}, which {self.label} has"
        elif more := next((name for name in names if name not in self.fields), None):
            problem = f"has the field {more!r}, which {self.label} lacks"
        if problem:
            listed = ", ".join(map(printable, list(self.fields)[:10]))
            remedy = f"use a source or options with which it has exactly these fields: {listed}"
            if isinstance(source, ImageSource):
                tree = "folders of splits, such as train/ or val/" if "split" in self.fields else "a folder per class"
                remedy = f"use a folder that contains {tree}, or a manifest (--manifest) with these fields: {listed}"
            raise SourceError(f"{label}: {problem}: {remedy}")
        columns = {name: SampleField((), self.fields[name].dtype) for name in source.columns}  # dtypes are converted
        for name, field in (*source.fields.items(), *columns.items()):
            was = self.fields[name]
            are_texts = (field.dtype.kind == "S") == (was.dtype.kind == "S")
            fits = are_texts and np.can_cast(field.dtype, was.dtype, "safe")  # integers may become float64
            if not fits or (was.form, was.shape) != (field.form, () if field.form else field.shape):
                raise SourceError(
                    f"{label}: its {name} are {_text(field)}, but those in {self.label} are {_text(was)}: use samples "
                    "of the same shape and type"
                )

    @property
    def chunk_samples(self) -> int | None:
        """The number of samples per chunk of the file, or None if it has too few samples to tell."""
        header = self.header
        return header.chunk_samples if header.chunk_samples < header.num_samples else None

    def fit(self, job: SampleJob, label: str, *, new_classes: bool) -> SampleJob:
        """Return the job with columns of the dtypes and codes of the file.

        Raises SourceError if the source does not match the file. ``new_classes`` allows classes that the file lacks;
        their labels follow those of the file.
        """
        self.check_fields(job.source, label)
        columns = {name: self._converted(name, values, label) for name, values in job.columns.items()}
        categories = {}
        for name in sorted({*job.categories, *self.categories}):
            before, now = self.categories.get(name, []), job.categories.get(name, [])
            if bool(before) != bool(now):
                named, other = (self.label, label) if before else (label, self.label)
                raise SourceError(
                    f"{label}: the values of field {name!r} are names in {named}, but numbers in {other}: use names in "
                    "both, or in neither"
                )
            categories[name] = self._all_names(name, before, now, label, new_classes=new_classes)
            code_of = {category: code for code, category in enumerate(categories[name])}
            codes = np.array([code_of[category] for category in now], np.int64)
            if name in columns:
                known = columns[name] >= 0  # -1 means no class
                columns[name] = columns[name].copy()
                columns[name][known] = codes[columns[name][known]]
            elif not np.array_equal(codes, np.arange(len(codes))):
                raise SourceError(
                    f"{label}: the categories of field {name!r} have other codes in {self.label}: convert both sources "
                    "together"
                )
        options = dict(job.options)
        if "fields" in options:
            options["fields"] = self.header.options.get("fields", options["fields"])
        types = {name: self.fields[name].dtype for name in job.source.fields}
        return replace(job, options=options, columns=columns, categories=categories, types=types)

    def _all_names(
        self, field: str, before: list[str], now: Sequence[str], label: str, *, new_classes: bool
    ) -> list[str]:
        """Return the names of the codes of a field: those of the file, and then those that only the source has."""
        known = {*before}
        if len(known) < len(before):
            raise SourceError(f"{self.label}: two of the names of {field!r} are equal, which is ambiguous: rename one")
        added = [name for name in now if name not in known]
        is_class = field == "labels"  # files of one data set may differ in classes, but not in other categories
        if added and not (new_classes and is_class):
            noun = "classes" if is_class else f"categories of field {field!r}"
            remedy = "use --new-classes (new_classes=True) to add them after its classes"
            raise SourceError(
                f"{label}: {self.label} lacks {len(added)} of the {len(now)} {noun} of the source, such as "
                f"{printable(added[0])!r}: {remedy if is_class else 'convert both sources together'}"
            )
        return [*before, *added]

    def _converted(self, name: str, values: np.ndarray, label: str) -> np.ndarray:
        """Convert a column to its dtype in the file. Raises SourceError if that dtype cannot store the values exactly.

        Sources choose the smallest dtype that fits their values, which may be smaller than in the file.
        """
        dtype = self.fields[name].dtype
        if values.dtype == dtype:
            return values
        if "S" in (values.dtype.kind, dtype.kind):
            same = np.array([values.dtype.kind == dtype.kind])
            if same.all():
                same = np.char.str_len(values) <= dtype.itemsize
        else:
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
                f"{label}: field {name!r} has the value {values[first]} (sample {first}), which cannot be stored "
                f"exactly as {dtype}, its type in {self.label}: convert both sources together"
            )
        return values.astype(dtype)


def _read(path: Path) -> Like:
    label = printable(path)
    with opened(path) as file:
        header = read_header(file)
        if header is None:
            raise FileError(f"{label} was not written by h5chunk, so its options are unknown: leave out --like")
        if header.kind:
            raise OptionError(
                f"like is {label}, which has a matrix: use --ids-from (ids_from) instead of --like, so that columns "
                "keep their indices"
            )
        datasets: dict[str, h5py.Dataset] = {}
        for name, item in Guard(path).walk(file):
            if isinstance(item, FieldError):
                raise item
            datasets[name] = item
        fields = {name: _any_size_of(file, path, name) for name in find_image_groups(datasets)}
        for name, dataset in datasets.items():
            if "/" not in name and f"{CHECKSUMS}/{name}" in datasets:
                fields[name] = SampleField(dataset.shape[1:], dataset.dtype)
        prefix = f"{GROUP}/categories/"
        names = {path.removeprefix(prefix): path for path in datasets if path.startswith(prefix)}
        categories = {
            field: [as_text(name) for name in datasets[path][()].tolist()]
            for field, path in names.items()
            if field in fields
        }
        if header.class_names:
            categories["labels"] = list(header.class_names)
        return Like(label, header, fields, categories)


def _any_size_of(file: h5py.File, path: Path, name: str) -> SampleField:
    return SampleField((), np.dtype(np.uint8), form=describe_images(file[name], path, name, 1).form)


def _text(field: SampleField) -> str:
    return field.form or f"{shape_text(field.shape)} {field.dtype}".strip()
