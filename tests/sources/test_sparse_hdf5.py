"""AnnData and 10x: names, fields, layers, what older versions wrote; strings of variable length without HDF5."""

from __future__ import annotations

import sys

import h5py
import numpy as np
import pandas
import pytest
import scipy.sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import odd_files as odd
from support.damaged_chunks import no_imagecodecs
from support.foreign import values
from support.jobs import crash, in_children_too
from support.matrix_files import anndata, dense, write_10x, write_h5ad
from support.open_source import open_source

import h5chunk
from h5chunk.errors import FieldError, OptionError, SourceError
from h5chunk.sources.matrix.hdf5 import GuardedFile
from h5chunk.sources.open import find_kind

__all__ = ["no_imagecodecs"]

MATRIX = scipy.sparse.random(40, 7, 0.3, random_state=0, format="csr")
PIPELINES = [
    {},
    {"compression": "gzip"},
    {"compression": "gzip", "shuffle": True},
    {"compression": "lzf"},
    {"compression": "lzf", "shuffle": True, "chunks": (7,)},
    {"chunks": (3,)},
]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    words=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=60), min_size=1, max_size=80
    ),
    repeat=st.sampled_from([7, 40]),
    pipeline=st.sampled_from(PIPELINES),
)
def test_strings_of_variable_length_equal_what_hdf5_reads(tmp_path_factory, words, repeat, pipeline):
    path = tmp_path_factory.mktemp("strings") / "s.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("s", data=words * repeat, dtype=h5py.string_dtype(), **pipeline)
    with GuardedFile(path).open() as root:
        strings = root.dataset("s").strings()
    assert strings.dtype.kind == "S"
    assert strings.tolist() == [word.encode() for word in words * repeat]


@pytest.mark.parametrize(
    "options", [*PIPELINES, {"fletcher32": True, "chunks": (333,)}, {"compression": "gzip", "fletcher32": True}]
)
@pytest.mark.parametrize("dtype", ["u1", "<i8", ">f4", "?", "S5"])
def test_numbers_equal_what_hdf5_reads(tmp_path, options, dtype):
    values = (np.random.default_rng(0).integers(0, 1 << 40, 1000) >> 33).astype(dtype)
    with h5py.File(tmp_path / "n.h5", "w") as file:
        file.create_dataset("n", data=values, **options)
    with GuardedFile(tmp_path / "n.h5").open() as root:
        stored = root.dataset("n")
        for start, stop in ((0, 1000), (5, 6), (332, 700), (999, 1000), (4, 4)):
            assert (stored.read(start, stop) == values[start:stop]).all()


@pytest.mark.parametrize("libver", ["earliest", "v110", "latest"])
@pytest.mark.parametrize("track_order", [False, True])
def test_words_in_attributes_equal_what_hdf5_reads(tmp_path, libver, track_order):
    words = {"one": "é word", "many": ["a", "", "c" * 200], "none": "", "number": 3}
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        group = file.create_group("g", track_order=track_order)
        for name, word in words.items():
            group.attrs[name] = word
            group.create_group("x" * 90 + name)  # so that the header goes on elsewhere
        group.attrs["fixed"] = np.bytes_(b"abc")
        group.attrs["fixed many"] = np.array([b"a", b"bc"])
    with GuardedFile(tmp_path / "a.h5").open() as root:
        group = root.group("g")
        assert group.word("one") == "é word"
        assert group.words("many") == ["a", "", "c" * 200]
        assert (group.words("none"), group.word("number"), group.words("missing")) == ([""], "", [])
        assert (group.word("fixed"), group.words("fixed many")) == ("abc", ["a", "bc"])
        assert group.numbers("number") == 3 and group.numbers("missing") is None
        with pytest.raises(SourceError, match="its attribute 'one' must be whole numbers"):
            group.numbers("one")


def test_attributes_in_a_heap_of_their_own_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        group = file.create_group("g")
        for number in range(20):
            group.attrs[f"a{number}"] = "word"
    with (
        GuardedFile(tmp_path / "a.h5").open() as root,
        pytest.raises(SourceError, match="g: its attribute 'a3' is damaged, or in an unsupported layout"),
    ):
        root.group("g").word("a3")


@pytest.mark.parametrize("filters", [[odd.SHUFFLE], [odd.GZIP], [odd.FLETCHER32]])
def test_partial_chunks_that_skip_the_filters(tmp_path, filters):
    data = values((37,), "u2")
    odd.make(tmp_path / "a.h5", data=data, chunks=(8,), filters=filters, partial_plain=True)
    with GuardedFile(tmp_path / "a.h5").open() as root:
        np.testing.assert_array_equal(root.dataset("images").read(0, 37), data)


@pytest.mark.parametrize("case", [case for case in odd.CASES if case.variant.startswith(("12 bits", "as bfloat16"))])
def test_numbers_of_unusual_bits_are_refused(tmp_path, case):
    case.make(tmp_path / "a.h5")
    with GuardedFile(tmp_path / "a.h5").open() as root, pytest.raises(SourceError, match="unusual precision"):
        root.dataset("images", 3)


@pytest.mark.parametrize("filters", [{}, {"shuffle": True}])
def test_filters_of_hdf5plugin_are_left_to_hdf5(tmp_path, filters):
    import hdf5plugin

    write_h5ad(tmp_path / "m.h5ad", MATRIX)
    with h5py.File(tmp_path / "m.h5ad", "a") as file:
        for name in ("data", "indices"):
            values = file[f"X/{name}"][:]
            del file[f"X/{name}"]
            file.create_dataset(f"X/{name}", data=values, **filters, **hdf5plugin.Zstd())
    assert (dense(open_source(tmp_path / "m.h5ad")) == MATRIX.toarray()).all()


@pytest.mark.parametrize("filters", [{"compression": "gzip"}, {"compression": "lzf", "shuffle": True}])
def test_compressed_files_without_imagecodecs(tmp_path, no_imagecodecs, filters):
    words = [f"cell {number}" for number in range(39)] + ["é" * 100]
    write_h5ad(tmp_path / "m.h5ad", MATRIX)
    with h5py.File(tmp_path / "m.h5ad", "a") as file:
        for name in ("data", "indices", "indptr"):
            values = file[f"X/{name}"][:]
            del file[f"X/{name}"]
            file.create_dataset(f"X/{name}", data=values, **filters)
        del file["obs/_index"]
        file.create_dataset("obs/_index", data=words, dtype=h5py.string_dtype(), **filters)
    source = open_source(tmp_path / "m.h5ad")
    assert (dense(source) == MATRIX.toarray()).all()
    assert source.row_names.tolist() == [word.encode() for word in words]
    with h5py.File(tmp_path / "m.h5ad", "a") as file:
        file["obs/_index"][5] = "x" * 257
    with pytest.raises(SourceError, match=r"obs/_index: .* 257 bytes,? but the limit is 256"):
        open_source(tmp_path / "m.h5ad")


def test_columns_of_obs_are_fields(tmp_path):
    obs = pandas.DataFrame(
        {
            "count": np.arange(40, dtype=np.int32),
            "part": np.linspace(0, 1, 40),
            "good": np.arange(40) % 3 == 0,
            "kind": pandas.Categorical(["T cell", None, "Bé", "T cell"] * 10),
            "batch": pandas.Categorical([3, 1, 2, 1] * 10),
            "note": [f"é{i}" for i in range(40)],
            "maybe": pandas.array([1, None] * 20, dtype="Int64"),
            "sure": pandas.array([1, 2] * 20, dtype="Int64"),
            "long": ["x" * 300] * 40,
        },
        index=[f"cell-{i}" for i in range(40)],
    )
    path = write_h5ad(tmp_path / "m.h5ad", MATRIX, obs=obs, var=pandas.DataFrame(index=list("abcdefg")))
    source = open_source(path)
    fields = source.row_fields
    assert list(fields) == ["count", "part", "good", "kind", "batch", "note", "sure"]
    assert fields["count"].dtype == np.int32 and (fields["count"] == np.arange(40)).all()
    assert (fields["part"] == np.linspace(0, 1, 40)).all()
    assert fields["good"].dtype == np.uint8 and (fields["good"] == (np.arange(40) % 3 == 0)).all()
    assert source.categories == {"kind": ["Bé", "T cell"], "batch": ["1", "2", "3"]}
    assert fields["kind"].tolist() == [1, -1, 0, 1] * 10
    assert fields["batch"].tolist() == [2, 0, 1, 0] * 10
    assert fields["note"].tolist() == [f"é{i}".encode() for i in range(40)]
    assert fields["sure"].tolist() == [1, 2] * 20
    assert set(source.ignored) == {"maybe", "long"}
    assert "missing values" in source.ignored["maybe"] and "300 bytes" in source.ignored["long"]
    assert source.row_names.tolist() == [f"cell-{i}".encode() for i in range(40)]
    assert source.column_names.tolist() == [b"a", b"b", b"c", b"d", b"e", b"f", b"g"]


def test_raw_has_columns_of_its_own(tmp_path):
    wide = scipy.sparse.random(40, 11, 0.3, random_state=1, format="csr")
    source = open_source(write_h5ad(tmp_path / "m.h5ad", MATRIX, raw=wide), layer="raw")
    assert source.shape == (40, 11) and len(source.column_names) == 11
    assert (dense(source) == wide.toarray()).all()


def legacy(path, form):
    """As anndata 0.6 wrote it."""
    matrix = MATRIX.asformat(form)
    with h5py.File(path, "w") as file:
        group = file.create_group("X")
        group.attrs["h5sparse_format"] = np.bytes_(form)
        group.attrs["h5sparse_shape"] = np.array(MATRIX.shape)
        for name in ("data", "indices", "indptr"):
            group[name] = getattr(matrix, name)
        file["obs"] = np.zeros(40, [("index", "S5"), ("n", "i4")])
        file["var"] = np.zeros(7, [("index", "S5")])
    return path


@pytest.mark.parametrize("form", ["csr", "csc"])
def test_legacy_files(tmp_path, form):
    source = open_source(legacy(tmp_path / "old.h5ad", form))
    assert source.row_names.tolist() == [b""] * 40 and list(source.row_fields) == ["n"]
    assert (dense(source) == MATRIX.toarray()).all()


def test_categoricals_of_anndata_before_0_8(tmp_path):
    path = write_h5ad(tmp_path / "m.h5ad", MATRIX)
    with h5py.File(path, "a") as file:
        file["obs/kind"] = np.arange(40, dtype=np.int8) % 2
        file["obs/__categories/kind"] = np.array(["a", "b"], h5py.string_dtype())
        del file["obs"].attrs["column-order"]
    source = open_source(path)
    assert source.categories == {"kind": ["a", "b"]}
    assert source.row_fields["kind"].tolist() == [0, 1] * 20


@pytest.mark.parametrize("empty", [np.array([], "S1"), h5py.Empty("S1")], ids=["no names", "no values"])
def test_tables_without_columns(tmp_path, empty):
    path = write_h5ad(tmp_path / "m.h5ad", MATRIX)
    with h5py.File(path, "a") as file:
        file["obs"].attrs["column-order"] = empty
    assert (dense(open_source(path)) == MATRIX.toarray()).all()


@pytest.mark.parametrize("chunks", [None, (40, 7), (5, 7), (7, 2)])
@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_dense_matrices_of_any_chunks(tmp_path, chunks, max_bytes):
    path = write_h5ad(tmp_path / "m.h5ad", MATRIX)
    with h5py.File(path, "a") as file:
        del file["X"]
        file.create_dataset("X", data=MATRIX.toarray(), chunks=chunks, compression="gzip" if chunks else None)
    source = open_source(path)
    assert (dense(source, max_bytes) == MATRIX.toarray()).all()


def test_layers_that_are_not_there(tmp_path):
    path = write_h5ad(tmp_path / "m.h5ad", MATRIX, layers={"counts": MATRIX})
    assert (dense(open_source(path, layer="layers/counts")) == MATRIX.toarray()).all()
    with pytest.raises(SourceError, match=r"no matrix 'layers/spliced'; .*X, counts"):
        open_source(path, layer="spliced")
    with pytest.raises(SourceError, match=r"has no 'raw'; choose one of its matrices \(--layer\): X, counts"):
        open_source(path, layer="raw")


def test_a_layer_called_raw(tmp_path):
    path = write_h5ad(tmp_path / "m.h5ad", MATRIX, layers={"raw": MATRIX * 2})
    assert (dense(open_source(path, layer="layers/raw")) == MATRIX.toarray() * 2).all()
    with pytest.raises(SourceError, match=r"has no 'raw'; choose one of its matrices \(--layer\): X, layers/raw"):
        open_source(path, layer="raw")


def test_genomes_of_10x_version_2(tmp_path):
    path = write_10x(tmp_path / "m.h5", MATRIX * 9, version=2)
    write_10x(path, MATRIX * 20, version=2, genome="mm10")
    with pytest.raises(SourceError, match="a matrix for each of hg19, mm10: choose one"):
        open_source(path)
    with pytest.raises(SourceError, match="has no matrix 'mm9': it has hg19, mm10"):
        open_source(path, layer="mm9")
    assert (dense(open_source(path, layer="mm10")) == (MATRIX * 20).toarray().astype(int)).all()


def test_hdf5_files_of_others_are_not_taken(tmp_path):
    with h5py.File(tmp_path / "images.h5", "w") as file:
        file["images"] = np.zeros((3, 3))
        file["data"] = h5py.ExternalLink("other.h5", "x")
    assert find_kind(tmp_path / "images.h5").kind == "keyed"
    with pytest.raises(SourceError, match=r"images\.h5: is an HDF5 file, but neither \.h5ad nor 10x .* h5chunk repack"):
        open_source(tmp_path / "images.h5")
    with h5py.File(tmp_path / "m.h5", "w") as file:
        for name in ("X", "obs", "var"):
            file.create_group(name)
    assert find_kind(tmp_path / "m.h5").kind == "h5ad"


def test_a_file_that_changed_is_noticed(tmp_path):
    source = open_source(write_h5ad(tmp_path / "m.h5ad", MATRIX))
    write_h5ad(tmp_path / "m.h5ad", MATRIX[:10])
    with pytest.raises(SourceError, match="changed while it was read"):
        dense(source)


WORDS = [f"é{i}" for i in range(40)]
INDEXES = {
    "objects": pandas.Index(WORDS),
    "nullable": pandas.Index(WORDS, dtype="string"),
    "arrow": pandas.Index(pandas.array(WORDS, dtype="string[pyarrow]")),
    "categories": pandas.CategoricalIndex(WORDS),
    "numbers": pandas.RangeIndex(40),
}


@pytest.mark.parametrize("form", INDEXES)
def test_names_that_anndata_writes(tmp_path, form):
    """Also as nullable strings, as pandas 3 has them: in the .h5ad itself, and after its conversion."""
    obs = pandas.DataFrame(index=INDEXES[form])
    obs["kind"] = pandas.Categorical(pandas.array(["a", "b"] * 20, dtype="string"))
    obs["good"] = pandas.Categorical([True, False] * 20)
    obs["note"] = pandas.array(WORDS, dtype="string") if form in ("nullable", "arrow") else 0
    var = pandas.DataFrame(index=pandas.Index([*"abcdefg"], dtype=obs.index.dtype if form == "nullable" else object))
    with anndata.settings.override(allow_write_nullable_strings=form in ("nullable", "arrow")):
        path = write_h5ad(tmp_path / "m.h5ad", MATRIX, obs=obs, var=var)
    h5chunk.convert(path, tmp_path / "m.h5", shuffle=False, values="float32")
    for dataset in (h5chunk.ChunkDataset(path), h5chunk.ChunkDataset(tmp_path / "m.h5")):
        assert dataset.row_ids.tolist() == INDEXES[form].astype(str).tolist() or form == "numbers"
        assert dataset.column_ids.tolist() == [*"abcdefg"]
    fields = ["X", "kind", "good", "note"]
    dataset = h5chunk.ChunkDataset(tmp_path / "m.h5", fields=fields)
    assert dataset.row_ids.tolist() == INDEXES[form].astype(str).tolist()
    assert dataset.categories("kind").tolist() == ["a", "b"] and dataset.categories("good").tolist() == [
        "False",
        "True",
    ]
    assert [int(dataset[i][1]) for i in range(4)] == [0, 1, 0, 1] and [int(dataset[i][2]) for i in range(2)] == [1, 0]
    assert form not in ("nullable", "arrow") or [dataset[i][3] for i in range(3)] == WORDS[:3]
    direct = h5chunk.ChunkDataset(path, fields=["X", "obs/kind"])
    assert direct.categories("obs/kind").tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("element", "attribute", "value", "problem"),
    [
        ("X", "encoding-version", "0.9", "X'?:? has AnnData's encoding 'csr_matrix' in version 0.9, but only 0.1.0"),
        ("X", "encoding-type", "new", "X'?:? has AnnData's encoding 'new', which is not supported"),
        ("obs", "encoding-version", "7", "obs'?:? has AnnData's encoding 'dataframe' in version 7, but only"),
        ("obs/_index", "encoding-type", "packed", "obs/_index'?:? has AnnData's encoding 'packed', which is not"),
        ("/", "encoding-version", "9", "has AnnData's encoding 'anndata' in version 9"),
    ],
)
def test_unknown_encodings_of_anndata_are_refused(tmp_path, element, attribute, value, problem):
    path = write_h5ad(tmp_path / "m.h5ad", MATRIX, obs=pandas.DataFrame({"n": 0, "m": 1}, index=WORDS))
    with h5py.File(path, "a") as file:
        file["obs/n"].attrs["encoding-type"] = "odd"
    assert "has AnnData's encoding 'odd'" in open_source(path).ignored["n"]
    with h5py.File(path, "a") as file:
        file[element].attrs[attribute] = value
    with pytest.raises(SourceError, match=problem):
        h5chunk.convert(path, tmp_path / "x.h5", values="float32")
    if element != "/":
        with pytest.raises(FieldError, match=problem):
            h5chunk.ChunkDataset(path, fields=["X"]).row_ids  # noqa: B018


def test_names_that_are_missing_are_an_error(tmp_path):
    index = pandas.Index([*WORDS[:-1], None], dtype="string")
    with anndata.settings.override(allow_write_nullable_strings=True):
        path = write_h5ad(tmp_path / "m.h5ad", MATRIX, obs=pandas.DataFrame(index=index))
    with pytest.raises(SourceError, match=r"obs/_index: has missing values in 1 row: change these names in the source"):
        h5chunk.convert(path, tmp_path / "x.h5", values="float32")
    with pytest.raises(FieldError, match="'obs/_index' has no value in 1 row: fill them in the source"):
        h5chunk.ChunkDataset(path).row_ids  # noqa: B018


def test_elements_that_are_left_out_are_named(tmp_path):
    obsm = {"protein": np.arange(80).reshape(40, 2)} | {f"X_{i}": np.zeros((40, 2)) for i in range(9)}
    path = write_h5ad(tmp_path / "m.h5ad", MATRIX, obsm=obsm)
    report = h5chunk.convert(path, tmp_path / "x.h5", values="float32")
    assert any("obsm/X_0: only the matrix and obs are" in line for line in report.ignored)
    assert "obsm: and 5 more" in report.ignored
    assert h5chunk.ChunkDataset(path, fields=["obsm/protein"])[3][0].tolist() == [6, 7]


def test_columns_are_no_option_of_anndata(tmp_path):
    with pytest.raises(
        OptionError,
        match=r"--columns applies only to .*\(joined, csv.*; .*m\.h5ad contains .*\(h5ad\)",
    ):
        open_source(write_h5ad(tmp_path / "m.h5ad", MATRIX), columns=("a", "b"))


@pytest.mark.parametrize("packed", [{}, {"chunks": (7,), "compression": "gzip"}])
def test_files_from_before_2020_have_tables(tmp_path, packed):
    """``obs`` is one dataset with several columns, categories are in ``uns``, and ``raw`` has a dot."""
    path = tmp_path / "old.h5ad"
    matrix = scipy.sparse.random(20, 6, 0.5, "csr", random_state=0)
    kinds = [("index", "S6"), ("louvain", "i1"), ("n_genes", "<i8"), ("score", "<f4"), ("good", "?")]
    obs = np.zeros(20, kinds)
    obs["index"], obs["louvain"] = [b"cell%d" % i for i in range(20)], np.arange(20) % 3 - 1
    obs["n_genes"], obs["score"], obs["good"] = np.arange(20) << 40, np.arange(20) / 8, np.arange(20) % 2
    var = np.array([(b"gene%d" % i, i) for i in range(6)], [("index", "S5"), ("n", "<i4")])
    with h5py.File(path, "w") as file:
        file["X"] = matrix.toarray()
        file.create_dataset("obs", data=obs, **packed)
        file["var"] = file["raw.var"] = var
        file["uns/louvain_categories"] = np.array([b"B", b"T"])
        group = file.create_group("raw.X")
        group.attrs.update({"h5sparse_format": b"csr", "h5sparse_shape": matrix.shape})
        for name in ("data", "indices", "indptr"):
            group[name] = getattr(matrix, name)
    for layer in ("X", "raw"):
        source = open_source(path, layer=layer)
        np.testing.assert_array_equal(dense(source), matrix.toarray())
        assert (
            source.row_names.tolist() == obs["index"].tolist() and source.column_names.tolist() == var["index"].tolist()
        )
        assert list(source.row_fields) == ["louvain", "n_genes", "score", "good"]
        for name, found in source.row_fields.items():
            assert found.tolist() == obs[name].tolist()
        assert source.categories == {"louvain": ["B", "T"]}
    assert (h5chunk.ChunkDataset(path, fields=["obs/louvain"]).values("obs/louvain") == obs["louvain"]).all()
    with h5py.File(path, "a") as file:
        del file["obs"]
        file["obs"] = obs[:19]
    with pytest.raises(SourceError, match="obs: has 19 rows but the matrix has 20"):
        open_source(path)
    with h5py.File(path, "a") as file:
        del file["obs"]
        file.create_dataset("obs", (20,), [("index", h5py.string_dtype()), ("n", "<i4")])
    source = open_source(path)
    assert source.row_names is None and list(source.ignored) == ["obs"]


def test_codes_of_our_own_files_are_not_taken_for_values(tmp_path):
    (tmp_path / "a.csv").write_text("user,item,rating\n1,2,0.5\n2,3,4.5\n")
    h5chunk.convert(tmp_path / "a.csv", tmp_path / "a.h5")
    with pytest.raises(SourceError, match=r"a\.h5: was written by h5chunk, which stores values multiplied by a scale"):
        h5chunk.convert(tmp_path / "a.h5", tmp_path / "b.h5", format="h5ad")


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked")
@pytest.mark.parametrize("name", ["m.h5ad", "m.h5", "cells.h5ad"])
def test_a_file_that_crashes_hdf5_is_an_error_of_convert(tmp_path, monkeypatch, name):
    """Whether HDF5 crashes when it opens the file, or an object in it, and whatever recognises the file."""
    write_h5ad(tmp_path / "cells.h5ad", MATRIX) if name == "cells.h5ad" else write_10x(tmp_path / name, MATRIX)
    where = "sources.matrix.hdf5.is_stored_as" if name == "cells.h5ad" else "store.hdf5.open._open_unlocked"
    in_children_too(monkeypatch, where, crash)
    with pytest.raises(SourceError, match=f"{name}: this file crashes HDF5"):
        h5chunk.convert(tmp_path / name, tmp_path / "x.h5", values="float32")
