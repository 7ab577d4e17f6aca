"""Delimited files: what is told from their first lines, ids, lines of errors, memory."""

from __future__ import annotations

import bz2
import lzma
import re
import subprocess
import sys

import numpy as np
import pandas
import pyarrow
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from support.matrix_files import entries, opened
from support.open_source import open_source

import h5chunk
from h5chunk.errors import OptionError, SourceError
from h5chunk.sources.open import find_kind

LINES = [(1, 31, 2.5), (1, 1029, 3.0), (671, 6565, 3.5)]


@pytest.mark.parametrize(
    ("name", "head", "form", "end"),
    [
        ("ratings.csv", "userId,movieId,rating,timestamp\n", "{},{},{},1260759144\n", ""),
        ("ratings.csv", '"userId","movieId","rating"\r\n', '"{}","{}","{}"\r\n', ""),
        ("ratings.csv", "\ufeffuserId,movieId,rating\n", "{},{},{}\n", "\n\n"),
        ("ratings.csv", "timestamp,rating,movieId,userId\n", "99,{2},{1},{0}\n", ""),
        ("ratings.csv", ",user_id,item_id,rating\n", "7,{},{},{}\n", ""),
        ("ratings.csv", "one,two,stars\n", "{},{},{}\n", ""),
        ("ratings.csv", "one,two,time,stars\n", "{},{},999,{}\n", ""),
        ("ratings.csv", "", "{},{},{}\n", ""),
        ("ratings.csv", "", "{}, {}, {} \n", ""),
        ("ratings.csv.gz", "userId,movieId,rating\n", "{},{},{}\n", ""),
        ("ratings.dat", "", "{}::{}::{}::978300760\n", ""),
        ("ratings.dat", "UserID::MovieID::Rating\n", "{}::{}::{}\n", ""),
        ("u.data", "", "{}\t{}\t{}\t881250949\n", ""),
        ("ratings.tsv", "user\titem\trating\n", "{}\t{}\t{}\n", ""),
        ("books.csv", '"User-ID";"ISBN";"Book-Rating"\n', '"{}";"{}";"{}"\n', ""),
        ("u.item", "", "{}|{}|{}\n", ""),
        ("ratings.txt", "user item rating\n", "{}   {} {}\n", ""),
        ("ratings.csv", "user,item,rating\n", "{},{},{},\n", ""),
        ("ratings.csv", '"user","item","rating"\n', '"row 1",{},{},{}\n', ""),
        ("edges.txt", "# FromNodeId ToNodeId\n# more\n\n", "{} {} {}\n", ""),
        ("edges.txt", "% a graph\n", "  {}   {}\t{}  \r\n", ""),
    ],
)
@pytest.mark.parametrize("max_bytes", [1, 1 << 24])
def test_dialects_of_ratings(tmp_path, name, head, form, end, max_bytes):
    lines = LINES * 3000
    text = head + "".join(form.format(*line) for line in lines) + end
    source = opened(tmp_path / name, text.encode())
    assert find_kind(source.path).kind == source.kind == "csv"
    assert source.has_ids and source.shape == (None, None)
    rows, columns, values = entries(source, max_bytes)
    assert list(zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True)) == lines


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("1/31/2,5\n1/1029/3\n671/6565/3,5\n", {"separator": "/", "decimal": ","}),
        ("1-=31-=2.5\n1-=1029-=3\n671-=6565-=3.5\n", {"separator": "-="}),
        ("1\t31\t2.5\n1\t1029\t3\n671\t6565\t3.5\n", {"separator": "tab", "header": "no"}),
        ("7,8,9\n1,31,2.5\n1,1029,3\n671,6565,3.5\n", {"header": "yes"}),
        ("// made\nuser,item,rating\n1,31,2.5\n1,1029,3\n// more\n671,6565,3.5\n", {"comment": "//"}),
        ('1,31,2.5,"\n1,1029,3,x\n671,6565,3.5,"\n', {"quotes": False, "columns": ("0", "1", "2")}),
        ('a b,1,31,2.5\n"c, d",1,1029,3\n,671,6565,3.5\n', {"columns": ("1", "2", "3")}),
    ],
)
def test_layouts_that_options_tell(tmp_path, text, options):
    rows, columns, values = entries(opened(tmp_path / "r.txt", text.encode(), kind="csv", **options))
    assert list(zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True)) == LINES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"separator": ""}, "separator is ''"),
        ({"encoding": "utf-99"}, "encoding is 'utf-99': pass an encoding that Python supports"),
        ({"encoding": "base64"}, "encoding is 'base64'"),
        ({"comment": ""}, "comment is empty"),
    ],
)
def test_options_that_make_no_sense(tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        opened(tmp_path / "r.csv", b"1,2,3\n", **options)


PACKINGS = {
    "bz2": bz2.compress,
    "xz": lambda data: lzma.compress(data[:99]) + lzma.compress(data[99:]),
    "zst": lambda data: pyarrow.compress(data, "zstd", asbytes=True),
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_text(tmp_path, packing):
    lines = b"".join(b"%d,%d,%d\n" % (n, n % 7, n % 5) for n in range(70_000))
    (tmp_path / f"r.csv.{packing}").write_bytes(PACKINGS[packing](b"user,item,rating\n" + lines))
    rows, columns, values = entries(open_source(tmp_path / f"r.csv.{packing}"), 1 << 16)
    assert np.array_equal(rows, np.arange(70_000)) and np.array_equal(columns, rows % 7)
    assert np.array_equal(values, rows % 5)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le"])
def test_other_encodings(tmp_path, encoding):
    text = "user,item,rating\n" + "".join(f"é{number},ß,3\n" for number in range(20_000))
    (tmp_path / "r.csv").write_bytes(text.encode(encoding))
    options = {} if encoding == "utf-16" else {"encoding": encoding}  # which its first bytes tell
    rows, columns, _ = entries(open_source(tmp_path / "r.csv", **options), 1 << 16)
    assert rows.tolist() == [f"é{number}".encode() for number in range(20_000)]
    assert set(columns.tolist()) == {"ß".encode()}


def test_ids_that_are_not_utf8_name_the_option(tmp_path):
    source = opened(tmp_path / "r.csv", "user,item\nann,x\ncafé,y\n".encode("latin-1"))
    with pytest.raises(
        SourceError, match=r"line 3: row 'user' is 'caf.+xe9', which is not UTF-8: .*--encoding latin-1"
    ):
        entries(source)
    with pytest.raises(SourceError, match=r"is not text in the encoding ascii: .*: pass another \(--encoding\)"):
        open_source(tmp_path / "r.csv", encoding="ascii")
    titles = "1|7|Café\n2|8|x\n".encode("latin-1")  # of a column that is left out
    assert len(entries(opened(tmp_path / "u.item", titles, columns=("0", "1")))[0]) == 2


def parquet(path, **columns):
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path)
    return path


def test_parquet_of_entries(tmp_path):
    days = pyarrow.array([3, 1, 2], pyarrow.date32())
    words = pyarrow.array(["b", "c", "b"]).dictionary_encode()
    path = parquet(tmp_path / "r.parquet", rating=[0.5, 1.0, 2.0], user_id=[7, 7, 9], item_id=words, date=days)
    rows, columns, values = entries(open_source(path), 1)
    assert (rows.tolist(), columns.tolist(), values.tolist()) == ([7, 7, 9], [b"b", b"c", b"b"], [0.5, 1, 2])
    h5chunk.convert(path, tmp_path / "r.h5")
    assert h5chunk.ChunkDataset(tmp_path / "r.h5").column_ids.tolist() == ["b", "c"]
    report = h5chunk.convert(path, tmp_path / "t.h5", format="ratings", columns=("item_id", "user_id"))
    assert (report.num_rows, report.num_columns) == (2, 2)
    assert find_kind(parquet(tmp_path / "t.parquet", user=[1], item=[2], age=[3])).kind == "table"
    (tmp_path / "several").mkdir()
    for number in range(2):
        parquet(tmp_path / "several" / f"{number}.parquet", user=[number], item=[5])
    rows, columns, values = entries(open_source(tmp_path / "several"))
    assert (rows.tolist(), columns.tolist(), values) == ([0, 1], [5, 5], None)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user": [1, None], "item": [2, 3]}, "row 'user' has no value in row 1"),
        ({"user": [1, 2], "item": [2.0, 3.0]}, "column 'item' is of type double, but only integer, string"),
        ({"user": [1, 2], "item": ["", "x"]}, "column 'item' has an id that is empty"),
        ({"user": [1, 2], "item": [2, 3], "rating": [1, float("nan")]}, "value 'rating' is nan in row 1"),
    ],
)
def test_parquet_that_cannot_be_read(tmp_path, columns, message):
    with pytest.raises(SourceError, match=message):
        entries(open_source(parquet(tmp_path / "r.parquet", **columns)))


def test_the_last_duplicate_by_a_time_in_parquet(tmp_path):
    path = parquet(tmp_path / "r.parquet", user=[1, 1, 1], item=[2, 2, 2], rating=[3, 4, 5], timestamp=[1.5, -2.0, 1.0])
    h5chunk.convert(path, tmp_path / "r.h5", duplicates="last")
    assert h5chunk.ChunkDataset(tmp_path / "r.h5")[[0]][0].tolist() == [[3.0]]


@pytest.mark.parametrize(
    "text", ["1,2\n3,4\n", "user,item\n1,2\n3,4\n", "user,item,timestamp\n1,2,77\n3,4,78\n", "1,2\n\n\r\n3,4"]
)
def test_pairs_are_a_pattern(tmp_path, text):
    rows, columns, values = entries(opened(tmp_path / "pairs.csv", text.encode()))
    assert (rows.tolist(), columns.tolist(), values) == ([1, 3], [2, 4], None)


def test_ids_that_are_words(tmp_path):
    source = opened(tmp_path / "plays.csv", 'user,artist,plays\n"a,b",007,3\nbb,Sigur Rós,4\n'.encode())
    rows, columns, values = entries(source)
    assert rows.tolist() == [b"a,b", b"bb"]
    assert columns.tolist() == [b"007", "Sigur Rós".encode()]
    assert values.tolist() == [3, 4]


def test_words_far_from_the_start_are_seen(tmp_path):
    text = b"user,isbn,rating\n" + b"1,200,3\n" * 200_000 + b"1,20X,3\n" * 200_000
    columns = entries(opened(tmp_path / "books.csv", text), 1 << 22)[1]
    assert set(columns.tolist()) == {b"200", b"20X"}


def test_leading_zeros_make_an_id_a_word(tmp_path):
    assert entries(opened(tmp_path / "r.csv", b"1,007,3\n1,7,4\n"))[1].tolist() == [b"007", b"7"]


def test_words_may_not_be_empty(tmp_path, monkeypatch):
    source = opened(tmp_path / "r.csv", b"user,item,rating\na,b,1\na,,1\n,,\nc,007,2\n")
    with pytest.raises(SourceError, match="line 3: column 'item' is empty: 'a,,1'") as caught:
        entries(source)
    monkeypatch.chdir(tmp_path)
    remedy = re.search(r"leave them out: (pandas.*)\)$", str(caught.value))
    exec(remedy[1], {"pandas": pandas})
    assert entries(open_source(tmp_path / "complete.csv"))[1].tolist() == [b"b", b"007"]


def test_long_words_do_not_take_memory_out_of_proportion(tmp_path):
    text = b"a,b,1\n" * 20_000 + b"a," + b"x" * 256 + b",1\n"
    source = opened(tmp_path / "r.csv", text)
    assert max(len(block) * block.columns.itemsize for block, _ in source.blocks(1 << 16)) <= 1 << 16
    assert entries(source, 1 << 16)[1][-1] == b"x" * 256


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (("c", "a"), ([3], [1], None)),
        (("c", "a", "b"), ([3], [1], [2.0])),
        (("2", "1", "0"), ([3], [2], [1.0])),
        (("a:str", "b"), ([b"1"], [2], None)),
    ],
)
def test_columns_may_be_told(tmp_path, columns, expected):
    source = opened(tmp_path / "r.csv", b"a,b,c,d,e\n1,2,3,4,5\n", kind="csv", columns=columns)
    assert tuple(None if part is None else part.tolist() for part in entries(source)) == expected


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("a",), "columns has 1 name"),
        (("a", "a"), "names a column twice"),
        (("a", "z"), "column 'z' is not in .*which has the columns a, b"),
        (("a", "9"), "column 9 is missing"),
    ],
)
def test_columns_that_are_not_there(tmp_path, columns, message):
    with pytest.raises(OptionError, match=message):
        opened(tmp_path / "r.csv", b"a,b,c\n1,2,3\n", columns=columns)


BROKEN = {
    "1,x,3": "column 'movieId' is 'x', which is not a 64-bit integer.*'movieId:str'",
    "1,2,x": "value 'rating' is 'x', which is not a number",
    '1,2,"3,5"': "is '3,5', which is not a number: if commas mark decimals, pass --decimal ,",
    "1,,3": "column 'movieId' is empty",
    "1,2,": "value 'rating' is empty",
    "1,2": "2 columns where the lines above have 3: '1,2'",
    "1,2,3,4": "4 columns where",
    "1,2,nan": "value 'rating' at row '1', column '2' is 'nan': values must be finite",
    "1,2,-inf": "at row '1', column '2' is '-inf'",
    "1,2,1e999": "is '1e999': values must be finite",
    "1,99999999999999999999,3": "which is not a 64-bit integer",
    "1.5,2,3": "row 'userId' is '1.5', which is not a 64-bit integer",
    '1,"2,3': "a quote is not closed",
    "1,2\r,3": "contains a carriage return",
    "1,2,3\r4,5,6": "contains a carriage return",
    "   ": "1 column where",
}


@pytest.mark.parametrize("bad", BROKEN)
@pytest.mark.parametrize("name", ["r.csv", "r.csv.gz"])
def test_malformed_lines_are_named(tmp_path, bad, name):
    head = "userId,movieId,rating\n" + "1,2,3\n" * 4000 + "\n"
    text = head + "5,6,7\n" + bad + "\n" + "1,2,3\n" * 4000 + "7,y,x\n"
    source = opened(tmp_path / name, text.encode())
    with pytest.raises(SourceError, match=rf"{name}, line 4004: .*({BROKEN[bad]})"):
        entries(source, 1)
    with pytest.raises(SourceError, match="line 4004:"):
        entries(source, 1 << 24)


def test_reading_twice_gives_the_same(tmp_path):
    source = opened(tmp_path / "r.csv", b"1,2,3\n4,5,6\n")
    assert [part.tolist() for part in entries(source)] == [part.tolist() for part in entries(source)]


def test_a_file_that_changed_is_noticed(tmp_path):
    source = opened(tmp_path / "r.csv", b"1,2,3\n4,5,6\n")
    (tmp_path / "r.csv").write_bytes(b"1,2,3\n4,5,6\n7,8,9\n")
    with pytest.raises(SourceError, match="changed while it was read"):
        entries(source)


def test_memory_is_bounded(tmp_path):
    rng = np.random.default_rng(0)
    lines = b"".join(
        b"%d,%d,3.5,1234567890\n" % tuple(pair) for pair in rng.integers(0, 1 << 17, (100_000, 2)).tolist()
    )
    (tmp_path / "r.csv").write_bytes(lines * 35)  # 80 MB
    code = (
        f"import resource, sys; sys.path[:0] = {sys.path!r}\nfrom support.open_source import open_source\n"
        "source = open_source(sys.argv[1]); blocks = source.blocks(16 << 20); next(blocks)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\ncount = sum(len(block) for block, _ in blocks)\n"
        "print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "r.csv"], check=True, capture_output=True, text=True, timeout=240
    )
    count, grown = (int(word) for word in out.stdout.split())
    assert 3_300_000 < count < 3_500_000
    unit = 1024 if sys.platform == "darwin" else 1
    assert grown // unit < 64 << 10


def test_what_names_do_not_tell_is_an_error(tmp_path):
    with pytest.raises(SourceError, match="names of the columns 'a', 'b', 'c', 'd', 'e' do not show"):
        opened(tmp_path / "r.csv", b"a,b,c,d,e\n1,2,3,4,5\n", kind="csv")
    with pytest.raises(SourceError, match="5 columns and no header"):
        opened(tmp_path / "r.csv", b"1,2,3,4,5\n1,2,3,4,5\n", kind="csv")
    assert open_source(tmp_path / "r.csv", kind="csv", columns=("0", "4")).kind == "csv"


@pytest.mark.parametrize("header", [("user", "item", "rating"), ("u", "i", "r"), ("i", "u", "r"), ("uid", "I", "v")])
def test_i_is_an_item_beside_users(tmp_path, header):
    values = {header[0]: 1, header[1]: 2, header[2]: 4.5}
    text = f"{','.join(header)}\n{','.join(map(str, values.values()))}\n"
    rows, columns, ratings = entries(opened(tmp_path / "r.csv", text.encode()))
    user, item = (2, 1) if header[1] == "u" else (1, 2)
    assert (rows.tolist(), columns.tolist(), ratings.tolist()) == ([user], [item], [4.5])


def test_a_comment_below_the_first_line_is_an_error(tmp_path):
    source = opened(tmp_path / "r.csv", b"# ratings\n" + b"a,b,1\n" * 9 + b"#c,d,2\n")
    with pytest.raises(SourceError, match=r"line 11: a comment among the data: remove it, or pass --comment '#'"):
        entries(source)
    rows, _, _ = entries(opened(tmp_path / "tags.csv", b"tag,user,count\n#love,b,1\n#cats,d,2\n"))
    assert rows.tolist() == [b"#love", b"#cats"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("country,city\nfr,paris\nde,berlin\n", "line 1: the first line, 'country', 'city', may be names"),
        (
            "name,date,price\na,2020-01-01,1.5\nb,2020-01-02,2.5\n",
            "'price' do not show which are row, column and value",
        ),
        ("year,volume\n1871,1120\n1872,1160\n", "'year', 'volume' do not show which are row, column"),
        ("a,b,c\n1990,15,3\n1991,25,4\n", "'c' do not show which are row, column and value"),
        (
            "uid,age,income,target\n1,20,3000,1\n2,30,4000,0\n",
            r"'target' do not show .*--columns; or pass --format table",
        ),
        ("uid,age,target\n1,20,1\n2,30,0\n", "'target' do not show which are row, column and value"),
    ],
)
def test_a_layout_that_is_not_clear_is_no_guess(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path / "a.csv")


@pytest.mark.parametrize(
    "text",
    [
        "height,weight,target\n160,62,1\n180,80,0\n",
        ",age,height,weight\n0,31,2.5,2\n1,22,3.5,3\n",
        "r,g,b\n1,2,3\n4,5,6\n",
        "x,target\n1,31\n2,22\n",
    ],
)
def test_a_name_that_many_tables_have_is_no_guess(tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(SourceError, match=r"do not show which are row, column.*--format table"):
        h5chunk.convert(tmp_path / "a.csv", tmp_path / "a.h5")
    assert h5chunk.convert(tmp_path / "a.csv", tmp_path / "a.h5", format="table").num_samples == 2


def test_a_first_line_whose_cells_come_again_is_data(tmp_path):
    (tmp_path / "a.csv").write_text("fr,paris\nde,berlin\nfr,lyon\n")
    h5chunk.convert(tmp_path / "a.csv", tmp_path / "a.h5")
    assert sorted(h5chunk.ChunkDataset(tmp_path / "a.h5").column_ids) == ["berlin", "lyon", "paris"]


def test_two_columns_of_which_one_is_known(tmp_path):
    rows, columns, _ = entries(opened(tmp_path / "r.csv", b"film,user\n1,2\n"))
    assert (rows.tolist(), columns.tolist()) == ([2], [1])


def test_digits_of_ids_and_values_are_kept_or_refused(tmp_path):
    path, ids = tmp_path / "r.csv", ["10000169349117863715", "7"]
    path.write_text(f"user,item,rating\n{ids[0]},2,1\n{ids[1]},3,4\n")
    h5chunk.convert(path, tmp_path / "x.h5", text_columns=("user",), shuffle=False)
    assert [str(name) for name in h5chunk.ChunkDataset(tmp_path / "x.h5").row_ids] == ids
    with pytest.raises(OptionError, match=r"text_columns has 'rating', but only ids can be text, .*'user' and 'item'"):
        h5chunk.convert(path, tmp_path / "y.h5", text_columns=("rating",))
    path.write_text("user,item,rating\n1,2,9007199254740992\n1,3,9007199254740993\n")
    with pytest.raises(SourceError, match=r"line 3: value 'rating' is '9007199254740993', which would be rounded"):
        h5chunk.convert(path, tmp_path / "y.h5")
    path.write_bytes("us\xe9r,item,rating\n1,2,1\n1,3,4\n".encode("latin-1"))
    with pytest.raises(SourceError, match=r"line 1: a name of a column is not UTF-8: .* --encoding latin-1"):
        h5chunk.convert(path, tmp_path / "y.h5", columns=("0", "item"))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("options", [{}, {"format": True}, {"columns": ("user_id", "item_id", "stars")}])
def test_the_value_and_columns_that_are_left_out_are_named(tmp_path, suffix, options):
    names = ("user_id", "item_id", "stars", "timestamp", "score")
    path = tmp_path / f"r.{suffix}"
    table = pyarrow.table({name: [number + 1, number + 2] for number, name in enumerate(names)})
    (pyarrow.csv.write_csv if suffix == "csv" else pq.write_table)(table, path)
    options = {**options, "format": "csv" if suffix == "csv" else "ratings"} if options else {}
    if suffix == "parquet" and not options:  # so that all names are known, each for another part
        pq.write_table(table.drop_columns(["score"]), path)
    report = h5chunk.convert(path, tmp_path / "x.h5", **options)
    assert re.search(r"value 'stars'; columns left out: 'timestamp'", str(report))
    assert ("'score'" in str(report)) == (suffix == "csv" or bool(options))


def test_a_table_of_many_columns_is_no_list_of_entries(tmp_path):
    names = [f"GENE{number}" for number in range(200)] + ["SRC", "DST"]
    (tmp_path / "c.csv").write_text(",".join(["", *names]) + "\n" + "".join(f"c{i}{',1' * 202}\n" for i in range(5)))
    h5chunk.convert(tmp_path / "c.csv", tmp_path / "x.h5", vector="X")
    assert list(h5chunk.ChunkDataset(tmp_path / "x.h5").fields) == ["X", "index"]
    for options in (
        {"format": "csv"},
        {"format": "csv", "columns": ("a", "b")},
        {"columns": ("a",), "format": "table"},
    ):
        with pytest.raises((SourceError, OptionError), match=r"GENE.* and 19[0-9] more") as caught:
            h5chunk.convert(tmp_path / "c.csv", tmp_path / "y.h5", **options)
        assert len(str(caught.value)) < 800


def test_zeros_of_ratings_are_noted_with_a_way_to_keep_them(tmp_path):
    (tmp_path / "b.csv").write_text('User-ID;ISBN;"Book Rating"\n1;X1;0\n1;X2;5\n2;X3;0\n3;X1;0\n')
    report = h5chunk.convert(tmp_path / "b.csv", tmp_path / "b.h5")
    assert "3 entries had the value 0, and zeros are not stored" in str(report)
    assert "read all entries as ones (--columns User-ID,ISBN)" in str(report)
    report = h5chunk.convert(tmp_path / "b.csv", tmp_path / "c.h5", columns=("User-ID", "ISBN"))
    assert (report.num_rows, report.num_columns, report.num_entries) == (3, 3, 4) and "value 0" not in str(report)


def test_atomic_files_of_recbole(tmp_path):
    text = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n1\t7\t3\t20\n2\t8\t5\t10\n1\t8\t4\t10\n"
    (tmp_path / "toy.inter").write_text(text)
    report = h5chunk.convert(tmp_path / "toy.inter", tmp_path / "o.h5", time_order=True)
    assert (report.source_kind, report.num_rows, report.num_columns, report.num_entries) == ("csv", 2, 2, 3)
