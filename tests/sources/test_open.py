"""How a sparse file is recognised and opened."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest
import scipy.io
import scipy.sparse
from PIL import Image
from support.open_source import open_source

import h5chunk
from h5chunk.errors import H5ChunkError, OptionError, SourceError
from h5chunk.sources.kinds import KIND_OPTIONS
from h5chunk.sources.open import find_kind

PNG = b"\x89PNG\r\n\x1a\n" + bytes(9)
BANNER = b"%%MatrixMarket matrix coordinate real general\n1 1 0\n"


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("ratings.csv", b"1,2,3\n", "csv"),
        ("RATINGS.CSV", b"1,2,3\n", "csv"),
        ("ratings.csv", bytes(9), "csv"),
        ("u.data", b"196\t242\t3\t881250949\n", "csv"),
        ("u1.base", b"1 2\n", "csv"),
        ("edges", b"# a graph\n1 2\n", "csv"),
        ("matrix.mtx", b"", "mtx"),
        ("matrix", BANNER, "mtx"),
        ("a9a", b"-1 3:1 11:1\n+1 5:1\n", "libsvm"),
        ("train.txt", b"2 qid:1 1:0.5\n", "libsvm"),
        ("likes.txt", b"user_id|item_id\nann|7\n", "csv"),
        ("images.npz", b"PK\x03\x04 and no more", "npz"),
        ("images.zip", b"PK\x03\x04 and no more", "images"),
        ("photos.tar", b"photo.jpg" + bytes(2000), "images"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_looks(tmp_path, name, data, kind, packed):
    import gzip

    if packed and (not data or name.endswith(("npz", "zip"))):
        return
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(data) if packed else data)
    assert find_kind(path).kind == find_kind(str(path)).kind == kind


PICKLED = "h5chunk.convert(pickle.load(file), path)"


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("train-images-idx3-ubyte", "h5chunk.convert(torchvision.datasets.MNIST(root), path)"),
        ("raw/t10k-images-idx3-ubyte.gz", "h5chunk.convert(torchvision.datasets.MNIST(root), path)"),
        ("cifar-10-batches-py/data_batch_1", "h5chunk.convert(torchvision.datasets.CIFAR10(root), path)"),
        ("data_batch_1.bin", "h5chunk.convert(torchvision.datasets.CIFAR10(root), path)"),
        ("x.pt", "h5chunk.convert(torch.load(file), path)"),
        ("x.pkl", PICKLED),
        ("x.mat", "h5chunk.convert({'x': scipy.io.loadmat(file)['x']}, path)"),
        ("records/train-00000-of-00001.tfrecord", "h5chunk.convert(list(tfrecord.tfrecord_loader(file, None)), path)"),
        ("train.tfrecord-00001-of-00009", "h5chunk.convert(list(tfrecord.tfrecord_loader(file, None)), path)"),
        ("lmdb/data.mdb", "h5chunk.convert(dataset, path), if dataset[i] decodes a record"),
        ("mds/shard.00000.mds", "h5chunk.convert(dataset, path), where dataset is a data set of the package streaming"),
        ("x.beton", "h5chunk.convert(dataset, path), with the data set from which it was written"),
        ("saved/data-00000-of-00001.arrow", "h5chunk.convert(datasets.load_from_disk(folder), path)"),
        ("one.jpg", "h5chunk.convert([PIL.Image.open(file)], path)"),
        ("scans/0.dcm", "h5chunk.convert([pydicom.dcmread(file).pixel_array for file in files], path)"),
        ("brain.nii.gz", "h5chunk.convert([nibabel.load(file).get_fdata(dtype='float32') for file in files], path)"),
        ("npys/a/0.npy", "h5chunk.convert([numpy.load(file) for file in files], path)"),
        ("shards/000000.tar", "h5chunk.convert(list(webdataset.WebDataset(files).decode('pil')"),
        ("parts/1.tar.gz", "unpack it first, and convert the folder"),
        ("x.7z", "unpack it first, and convert the folder"),
        ("shots/0.heic", "h5chunk.convert(dataset, path), where dataset[i] is an image that Pillow opened"),
        ("film.mp4", "h5chunk.convert(dataset, path), if dataset[i] returns its arrays"),
        ("words/readme", "anything that Python can read is converted as a data set"),
    ],
)
def test_what_cannot_be_read_is_told_the_way_in_python(tmp_path, name, way):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\0\1\2" * 9)
    with pytest.raises(SourceError) as caught:
        h5chunk.convert(tmp_path / name.partition("/")[0], tmp_path / "x.h5")
    assert way in str(caught.value)


def test_files_without_a_suffix_are_known_by_their_bytes(tmp_path):
    (tmp_path / "IM0001").write_bytes(bytes(128) + b"DICM" + bytes(50))
    with pytest.raises(SourceError, match=r"IM0001: is DICOM, .*pydicom\.dcmread"):
        find_kind(tmp_path / "IM0001")


def test_other_formats_that_are_a_zip_are_not_taken_for_an_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.xlsx", "w") as archive:
        archive.writestr("[Content_Types].xml", "<xml/>")
    with pytest.raises(SourceError, match=r"x\.xlsx: is an Excel table, .*pandas\.read_excel\('.*x\.xlsx'\)"):
        find_kind(tmp_path / "x.xlsx")


def test_ways_in_python_that_are_told(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"images": torch.ones(3, 4, 4), "labels": torch.arange(3)}, tmp_path / "x.pt")
    for path in (tmp_path / "x.pt", tmp_path / "x.pkl"):
        if path.suffix == ".pkl":
            path.write_bytes(pickle.dumps([(np.ones((4, 4)), i) for i in range(3)]))
        with pytest.raises(SourceError, match=r"h5chunk\.convert\((torch|pickle)\.load\(file\), path\)"):
            h5chunk.convert(path, tmp_path / "x.h5")
    scipy.io.savemat(tmp_path / "x.mat", {"x": np.ones((3, 4))})
    Image.new("L", (4, 4)).save(tmp_path / "x.png")
    for number, data in enumerate(
        (
            torch.load(tmp_path / "x.pt"),
            pickle.loads((tmp_path / "x.pkl").read_bytes()),
            {"x": scipy.io.loadmat(tmp_path / "x.mat")["x"]},
            [Image.open(tmp_path / "x.png")] * 3,
            [np.ones((4, 4), np.uint16)] * 3,
        )
    ):
        assert h5chunk.convert(data, tmp_path / f"{number}.h5", workers=0).num_samples == 3


def test_folders_and_missing_paths_would_have_to_be_images(tmp_path):
    for path in (tmp_path, tmp_path / "missing.csv"):
        assert find_kind(path).kind == "images"


@pytest.mark.parametrize("kind", [None, *KIND_OPTIONS])
def test_sources_that_cannot_be_read_are_errors_of_h5chunk(tmp_path, kind):
    """Missing and empty files and folders, folders with a suffix, noise, text, other HDF5 files, and other objects."""
    (tmp_path / "folder").mkdir()
    sources = [
        tmp_path / "missing",
        f"{tmp_path}/a\0b",
        "x" * 5000,
        tmp_path / "folder",
        3,
        None,
        [],
        {},
        b"x",
        object(),
    ]
    for suffix in ("parquet", "h5ad", "h5", "npz", "npy", "mtx", "svm", "csv", "csv.gz", "zip"):
        for name, data in (("empty", b""), ("noise", bytes(range(256)) * 9), ("text", b"hello world\n" * 9)):
            sources.append(tmp_path / f"{name}.{suffix}")
            sources[-1].write_bytes(data)
        sources += [tmp_path / f"missing.{suffix}", tmp_path / f"folder.{suffix}"]
        (sources[-1]).mkdir()
    for source in sources:
        with contextlib.suppress(H5ChunkError):
            h5chunk.convert(source, tmp_path / "x.h5", format=kind, dry_run=True)


@pytest.mark.parametrize("data", [b"some words, and more\n", b"1. read this\n", b"1\n2\n", b"\1\2\0"])
def test_what_is_not_recognised_is_told_the_formats(tmp_path, data):
    (tmp_path / "notes.txt").write_bytes(data)
    with pytest.raises(SourceError, match=r"notes.txt: not recognised.*--format csv:(.*\n)+  ratings +ratings.parquet"):
        find_kind(tmp_path / "notes.txt")


def test_other_hdf5_files_are_for_repack(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = [1, 2, 3]
    with pytest.raises(
        SourceError,
        match=r"x\.h5: is an HDF5 file, but neither \.h5ad nor 10x \.h5: .* h5chunk repack; .* --samples",
    ):
        open_source(tmp_path / "x.h5")


def test_a_format_may_be_told(tmp_path):
    (tmp_path / "ratings").write_bytes(b"user one,item one\nuser two,item one\nuser one,item two\n")
    assert open_source(tmp_path / "ratings", kind="csv").kind == "csv"
    with pytest.raises(OptionError, match=r"format is 'parquet': pass 10x, .*csv, .*images"):
        open_source(tmp_path / "ratings", kind="parquet")


def test_options_that_a_format_does_not_have(tmp_path):
    scipy.sparse.save_npz(tmp_path / "m.npz", scipy.sparse.eye(3, format="csr"))
    for options in ({"layer": "X"}, {"columns": ("0", "1")}):
        (name,) = options
        with pytest.raises(OptionError, match=rf"--{name} applies only to .*m.npz contains sparse matrices \(npz\)"):
            open_source(tmp_path / "m.npz", **options)
    with pytest.raises(OptionError, match="there is no option 'laier'"):
        open_source(tmp_path / "m.npz", laier="X")
    with pytest.raises(SourceError, match=r"n\.npz: no such file or folder"):
        open_source(tmp_path / "n.npz", layer="X")


def test_names_that_are_not_utf8(tmp_path):
    path = bytes(tmp_path) + b"/caf\xe9.csv"
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(b"1,x\n1,2,3\n")
    import os

    with pytest.raises(SourceError, match=r"caf\\xe9.csv, line 2: 3 columns"):
        list(open_source(os.fsdecode(path)).blocks(1 << 20))


def test_only_text_needs_pyarrow(tmp_path):
    scipy.sparse.save_npz(tmp_path / "m.npz", scipy.sparse.eye(3, format="csr"))
    (tmp_path / "r.csv").write_bytes(b"1,2,3\n")
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; sys.modules['pyarrow'] = None\n"
        "from h5chunk.errors import MissingPackageError\n"
        "from support.open_source import open_source\nassert len(list(open_source('m.npz').blocks(1 << 20))) == 1\n"
        "assert 'scipy' not in sys.modules\ntry: open_source('r.csv')\n"
        "except MissingPackageError as error: print(error)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path, timeout=240
    )
    assert out.stdout.strip() == 'reading text, .parquet or ids needs pyarrow: pip install "h5chunk[tables]"'
