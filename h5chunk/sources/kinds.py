"""The kinds of sources that can be converted, and their options.

To add a kind, write a module with a class that implements the interface in `h5chunk.sample_source`, and list it in
`KINDS`. The command line imports this module for its help. To keep help fast, only `h5chunk.sources.open` imports the
readers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from h5chunk.errors import OptionError
from h5chunk.sources.options import Options, option

MATRICES = "Matrices"  # heading of the options for matrices
DEFAULT_MEMORY_BYTES = 1 << 30
NAMED_SEPARATORS = {"tab": "\t", "\\t": "\t", "space": " "}
RECORDED = ("size", "fit", "color", "layout", "animated")  # options of images that determine the pixels
ANY_SIZE = ("keep_encoded", "keep_size", "max_side", "quality")  # recorded only for images of any size
MAX_PIXELS = 89_478_485  # Pillow's default limit: 256 MiB of RGB pixels


@dataclass(frozen=True)
class ImageOptions(Options):
    """Options for decoding images."""

    heading: ClassVar[str] = "Images"

    size: tuple[int, int] | None = option(
        None,
        "Height and width of the stored images; one number stands for both.",
        metavar="H[,W]",
        shown_default="all images must have the same size",
    )
    fit: str = option(
        "error",
        "How to treat an image whose size differs from that of the stored images. error: refuse it. stretch: scale "
        "height and width independently. crop: scale it and cut out the centre. pad: scale it and fill the rest with "
        "black.",
        choices=("error", "stretch", "crop", "pad"),
    )
    color: str = option(
        "rgb",
        "Channels of the stored images. keep: the channels of the source, including alpha.",
        choices=("rgb", "gray", "keep"),
    )
    layout: str = option("nchw", "Order of the axes of the stored images.", choices=("nchw", "nhwc"))
    animated: str = option(
        "error",
        "How to treat an image with several frames. error: refuse it. first: store its first frame.",
        choices=("error", "first"),
    )
    max_pixels: int = option(MAX_PIXELS, "Maximum number of pixels per image; larger images are refused.", minimum=1)
    mask_column: tuple[str, ...] | None = option(
        None,
        "Columns with the paths of masks, or folders of masks beside the folder of images. Masks are resized like "
        "their images, but by nearest neighbour, so that they keep their exact values. none: no image is a mask.",
        metavar="NAME[,NAME]",
        shown_default="columns called mask or masks, images with one value per pixel beside another image, and folders "
        "with usual names, such as masks, labels or gt",
    )
    keep_encoded: bool = option(
        False, "Store the image files unchanged, whatever their sizes. Loaders decode an image each time they read it."
    )
    keep_size: bool = option(False, "Store each image as pixels, (H, W, C), at its original size.")
    max_side: int | None = option(
        None,
        "With --keep-encoded or --keep-size: shrink images so that their longer side has at most N pixels.",
        minimum=1,
        metavar="N",
    )
    quality: int = option(90, "JPEG quality of the images that --max-side shrinks.", minimum=1, maximum=95)

    def __post_init__(self) -> None:
        if isinstance(self.mask_column, str):
            object.__setattr__(self, "mask_column", (self.mask_column,))
        if self.mask_column == ("none",):
            object.__setattr__(self, "mask_column", ())
        super().__post_init__()
        is_pair = isinstance(self.size, (tuple, list)) and len(self.size) == 2
        if self.size is not None and not (is_pair and all(isinstance(n, int) and n >= 1 for n in self.size)):
            raise OptionError(f"size is {self.size!r}: pass a height and a width of at least 1 (--size H,W)")
        if self.size is None and self.fit != "error":
            raise OptionError(f"fit is {self.fit!r}, but there is no size: pass a height and a width (--size H,W)")
        self._check_any_size()

    @property
    def form(self) -> str:
        """Form in which images of any size are stored, encoded or raw; empty if all images get one size."""
        return "encoded" if self.keep_encoded else "raw" if self.keep_size else ""

    def _check_any_size(self) -> None:
        """Raise OptionError for options that exclude keep_encoded or keep_size, or that need one of them."""
        if self.keep_encoded and self.keep_size:
            raise OptionError("keep_encoded and keep_size exclude each other: pass one of them")
        if not self.form:
            if self.max_side is not None:
                raise OptionError(f"max_side is {self.max_side}, but needs keep_encoded or keep_size: pass one of them")
            return
        problem = f"keep_{'encoded' if self.keep_encoded else 'size'} is given"
        if self.size is not None:
            raise OptionError(
                f"{problem} with size, which resizes all images to one size: leave size out, or use max_side instead"
            )
        if self.color == "keep":
            raise OptionError(
                f"{problem} with color 'keep', but all images need the same channels: pass color rgb or gray"
            )
        if self.layout != "nchw":
            raise OptionError(f"{problem} with layout, but images of any size are always (H, W, C): leave layout out")
        if self.mask_column:
            raise OptionError(f"{problem} with mask_column, but masks must have the same size: leave mask_column out")
        max_side = math.isqrt(MAX_PIXELS)
        if self.keep_encoded and self.max_pixels > MAX_PIXELS and (self.max_side or MAX_PIXELS) > max_side:
            raise OptionError(
                f"{problem} with max_pixels {self.max_pixels}, but loaders decode at most {MAX_PIXELS} pixels per "
                f"image: shrink large images with max_side (--max-side), at most {max_side}, lower max_pixels, or use "
                "keep_size"
            )

    def recorded(self) -> dict[str, Any]:
        """Return the options to record in the file: those that determine the pixels."""
        names = (
            *RECORDED,
            *(["mask_column"] if self.mask_column is not None else []),
            *(ANY_SIZE if self.form else ()),
        )
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of_recorded(cls, options: Mapping[str, Any], shape: Sequence[int] = ()) -> ImageOptions:
        """Create options from those recorded in a file.

        ``shape`` is that of the dataset of its images, such as (N, C, H, W), and sets the size; () if there is none.
        Raises KeyError, TypeError or ValueError if the file does not record valid options.
        """
        recorded = {name: options[name] for name in RECORDED}
        masks = options.get("mask_column")
        recorded["mask_column"] = masks if masks is None else tuple(map(str, masks))
        recorded |= {name: options[name] for name in ANY_SIZE if name in options}
        size = (shape[2:] if options["layout"] == "nchw" else shape[1:3]) or recorded["size"]
        return ImageOptions(**{**recorded, "size": size and tuple(int(n) for n in size)})


@dataclass(frozen=True)
class ColumnOptions(Options):
    """Options for reading tables and arrays."""

    heading: ClassVar[str] = "Tables"

    columns: tuple[str, ...] | None = option(
        None,
        "Columns of a table or manifest, or arrays of an .npz, to convert; by default, all.",
        metavar="A,B[,C[,D]]",
    )


@dataclass(frozen=True)
class KeyedOptions(Options):
    """Options for reading an HDF5 file in which each sample is a dataset, or a group of datasets."""

    heading: ClassVar[str] = "HDF5 files"

    samples: tuple[str, ...] | None = option(
        None,
        "Paths of the samples in an HDF5 file that has a dataset or group per sample, with * in place of the name of "
        "the sample. Paths that differ after the * become separate fields.",
        metavar="'traces/*/data'[,...]",
    )
    attributes: tuple[str, ...] | None = option(
        None,
        "With --samples: attributes to store as fields. Each attribute must be a single number or string.",
        metavar="A[,B]",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attributes is not None and self.samples is None:
            raise OptionError("attributes requires samples: also pass the paths of the samples (--samples)")


@dataclass(frozen=True)
class CellOptions(Options):
    """Options for reading the cells of text."""

    heading: ClassVar[str] = "Delimited text"

    encoding: str | None = option(None, "Encoding of the text, such as latin-1.", metavar="NAME", shown_default="utf-8")
    text_columns: tuple[str, ...] | None = option(
        None, "Columns to read as text although all their cells look like numbers, such as hashes.", metavar="A[,B]"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            "1".encode(self.encoding or "utf-8")
        except LookupError:
            raise OptionError(
                f"encoding is {self.encoding!r}: pass an encoding that Python supports, such as latin-1"
            ) from None


@dataclass(frozen=True)
class ImageSourceOptions(ImageOptions, CellOptions, ColumnOptions):
    """Options for reading a folder or an archive of images."""

    manifest: str | os.PathLike[str] | None = option(
        None,
        "Table with the paths of images, relative to SOURCE; its other columns become fields.",
        metavar="TABLE.csv",
        is_path=True,
    )
    split_folders: str = option(
        "auto",
        "Whether the top folders of SOURCE are splits (train, val, ...) rather than classes. The split of each "
        "image is stored in a field.",
        choices=("auto", "yes", "no"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.manifest is not None and self.split_folders != "auto":
            raise OptionError(
                f"split_folders is {self.split_folders!r}, but a manifest has the splits in a column: leave out "
                "split_folders"
            )


@dataclass(frozen=True)
class TextOptions(CellOptions):
    """Options for reading delimited text."""

    heading: ClassVar[str] = "Delimited text"

    separator: str | None = option(
        None,
        "Characters between two cells, such as ';' or '::'. tab: a tab character. space: one or more blanks.",
        metavar="SEP",
        shown_default="detected",
    )
    header: str = option(
        "auto",
        "Whether the first line contains the names of the columns. skip: ignore the first line.",
        choices=("auto", "yes", "no", "skip"),
    )
    quotes: bool = option(True, "Treat double quotes as ordinary characters.")
    decimal: str | None = option(
        None, "Decimal mark.", choices=(".", ","), shown_default="detected in tables, otherwise a point"
    )
    comment: str | None = option(None, "Skip lines that begin with MARK.", metavar="MARK")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.comment == "":
            raise OptionError("comment is empty: pass the characters at the beginning of comment lines, such as '#'")
        if self.separator is not None and (not self.separator or set(self.separator) & set('"\r\n')):
            raise OptionError(f"separator is {self.separator!r}: pass characters such as ';' or '::', tab or space")


@dataclass(frozen=True)
class TableOptions(TextOptions, ImageOptions, ColumnOptions):
    """Options for reading tables, which may have columns of images."""

    heading: ClassVar[str] = ColumnOptions.heading

    vector: str | None = option(
        None, "Combine all numeric columns into the field NAME, which has a vector per sample.", metavar="NAME"
    )
    vector_except: tuple[str, ...] | None = option(
        None, "Numeric columns, such as labels, that --vector leaves as separate fields.", metavar="A[,B]"
    )
    missing: str = option(
        "error",
        "How to treat missing values in columns of integers. error: refuse them. nan: convert the column to float64, "
        "and store NaN. In columns of floats, missing values are always stored as NaN.",
        choices=("error", "nan"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vector == "":
            raise OptionError("vector is empty: pass a name for the field")
        if self.vector_except is not None and self.vector is None:
            raise OptionError(
                "vector_except requires vector: also pass the name of the field of vectors (--vector NAME)"
            )


@dataclass(frozen=True)
class MatrixSourceOptions(Options):
    """Base class of the options for reading matrices."""

    heading: ClassVar[str] = MATRICES


@dataclass(frozen=True)
class LibsvmOptions(MatrixSourceOptions):
    """Options for reading libsvm and svmlight files."""

    first_index: str = option(
        "auto",
        "Index of the first column in libsvm and svmlight files. auto: 0 if the file contains an index 0, otherwise 1.",
        choices=("auto", "0", "1"),
    )


@dataclass(frozen=True)
class LayerOptions(MatrixSourceOptions):
    """Options for reading a file with several matrices."""

    layer: str | None = option(
        None,
        "Matrix to convert: X, raw, or a layer of an .h5ad; or a genome of a 10x file.",
        metavar="NAME",
        shown_default="X, or the only genome",
    )


@dataclass(frozen=True)
class EntryOptions(MatrixSourceOptions):
    """Options for reading a table of entries."""

    columns: tuple[str, ...] | None = option(
        None,
        "For ratings and other sparse matrices: the names or numbers (0, 1, ...) of the columns that contain the "
        "row, the column and, if present, the value and the time; by default, columns with well-known names, or else "
        "the first three.",
        metavar="A,B[,C[,D]]",
    )


@dataclass(frozen=True)
class DelimitedOptions(TextOptions, EntryOptions):
    """Options for reading entries of a matrix from delimited text."""


@dataclass(frozen=True)
class JoinOptions(LayerOptions, LibsvmOptions, DelimitedOptions):
    """Options for reading several matrices as one, with those for reading each of them."""

    heading: ClassVar[str] = MATRICES

    join: str | None = option(
        None,
        "How to combine files with different columns. inner: keep the columns that all files have. outer: keep all "
        "columns, and store zeros where a file lacks one.",
        choices=("inner", "outer"),
        shown_default="all files must have the same columns",
    )


class Kind(NamedTuple):
    """A kind of source."""

    name: str
    module: str  # below `h5chunk.sources`, with the class that reads sources of this kind
    class_name: str
    options: type[Options]  # the options for reading
    example: str  # an example of a source, for messages


# In the order in which they are tried. The kind images accepts any folder or archive that no other kind recognises.
KINDS = (
    Kind("10x", "matrix.tenx", "TenxSource", LayerOptions, "matrix.h5 or a folder with matrix.mtx.gz, of Cell Ranger"),
    Kind("h5ad", "matrix.anndata", "H5adSource", LayerOptions, "cells.h5ad"),
    Kind(
        "joined",
        "matrix.joined",
        "SeveralFiles",
        JoinOptions,
        "cells/, 'cells/*.h5ad' or 'ratings-*.csv': several as one",
    ),
    Kind("npz", "matrix.numpy", "NpzSource", MatrixSourceOptions, "matrix.npz, of scipy.sparse.save_npz"),
    Kind("arrays", "arrays", "ArraySource", ColumnOptions, "images.npy or data.npz"),
    Kind("npy", "matrix.numpy", "NpySource", MatrixSourceOptions, "matrix.npy: a dense matrix, with --format npy"),
    Kind("mtx", "matrix.mtx", "MtxSource", MatrixSourceOptions, "matrix.mtx"),
    Kind("libsvm", "matrix.libsvm", "LibsvmSource", LibsvmOptions, "train.svm: lines such as '1 3:0.5 7:1'"),
    Kind("csv", "matrix.delimited", "DelimitedSource", DelimitedOptions, "ratings.csv: lines such as 'user,item,4.5'"),
    Kind("ratings", "matrix.parquet", "ParquetEntries", EntryOptions, "ratings.parquet: columns user, item, rating"),
    Kind("table", "table", "TableSource", TableOptions, "table.parquet, iris.csv: one sample per row"),
    Kind("keyed", "keyed", "KeyedSource", KeyedOptions, "traces.h5: one dataset per sample, with --samples"),
    Kind("images", "images", "ImageSource", ImageSourceOptions, "photos/ or photos.zip: one folder per class"),
    Kind("mapping", "mapping", "MappingSource", ImageOptions, ""),
)
KIND_OPTIONS = {kind.name: kind.options for kind in KINDS}
