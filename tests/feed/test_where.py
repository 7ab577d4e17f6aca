"""Samples that are selected by a condition on their fields."""

from __future__ import annotations

import pickle

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.foreign import make_file
from support.object_server import object_server

import h5chunk
import h5chunk.feed.filter
from h5chunk import ChunkDataset, ChunkLoader, FieldError, OptionError
from h5chunk.plan.condition import Column, Condition

N = 60
LABEL = np.arange(N, dtype=np.uint8) % 5
QUALITY = np.where(np.arange(N) % 7, np.linspace(0, 6, N), np.nan).astype(np.float32)
SITE = np.array([f"site{number % 3}".encode() for number in range(N)])
IS_GOOD = np.arange(N) % 4 == 0
BIG = (np.arange(N, dtype=np.uint64) % 2) + np.uint64(1 << 63)
NAMES = np.char.decode(SITE)
FIELDS = {"label": LABEL, "quality": QUALITY, "site": SITE, "is_good": IS_GOOD, "big": BIG}
COLUMNS = {"label": LABEL, "quality": QUALITY, "site": NAMES, "is_good": IS_GOOD, "big": BIG}
VALID = ~np.isnan(QUALITY)


@pytest.fixture
def path(tmp_path):
    images = np.arange(N, dtype=np.uint8)[:, None].repeat(20, 1)
    others = {name: (values, {}) for name, values in FIELDS.items()}
    return make_file(tmp_path / "a.h5", images=(images, {"chunks": (8, 20)}), obs__x=(LABEL, {}), **others)


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("label in [1, 2] and quality > 3", np.isin(LABEL, [1, 2]) & (QUALITY > 3)),
        ("label not in (1, 2) or is_good", ~np.isin(LABEL, [1, 2]) | IS_GOOD),
        ("1 < quality <= 3 != label", (QUALITY > 1) & (QUALITY <= 3) & (LABEL != 3)),
        ("label - 3 == -2", LABEL == 1),  # uint8 would wrap around
        ("label * label * label * label == 256", LABEL == 4),
        ("-label * 2 + 1 < -3 and not (site == 'site1')", (LABEL > 2) & (NAMES != "site1")),
        ("site in ['site0', 'site2'] and label % 2 == 1", np.isin(NAMES, ["site0", "site2"]) & (LABEL % 2 == 1)),
        ("site > 'site0'", NAMES > "site0"),
        ("quality != 3", VALID),
        ("quality not in [3]", VALID),
        ("not quality == quality", ~VALID),
        ("not quality + 1 > 0", ~VALID),
        ("12 / label >= 4", (LABEL > 0) & (LABEL < 4)),  # division by zero has no value
        ("12 % label != 7", LABEL > 0),
        ("big == 9223372036854775809", BIG[1] == BIG),
        ("big in [9223372036854775809, -1, 1e300, 0.5]", BIG[1] == BIG),
        ("label == 300 or label in [300, 1.5, 2.0]", LABEL == 2),
        ("is_good == False and is_good in [0, 2]", ~IS_GOOD),
        ("`obs/x`==1\n  and \t`label` == 1", LABEL == 1),
        ("site in ['`label`', 'site1']", NAMES == "site1"),
        ("sample_number >= 50", np.arange(N) >= 50),
        (lambda values: (values["label"] == 1) & (values["obs/x"] == 1), LABEL == 1),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_condition_is_true_for_the_samples_that_numpy_finds(path, condition, expected, monkeypatch):
    monkeypatch.setattr(h5chunk.feed.filter, "PART_SAMPLES", 7)
    dataset = ChunkDataset(path, fields=["images", "label"])
    found = dataset.where(condition)
    assert found.samples.tolist() == np.flatnonzero(expected).tolist()
    assert f"{expected.sum()} of {N} samples of" in repr(found) and "where " in repr(found)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("label ==", r"at its end.*not valid"),
        ("label == 1) or (label == 2", r"character 11 \('\) or .*unmatched"),
        (
            "labl == 1 or label == 2",
            r"'labl == 1 .*no dataset 'labl'.* sample are label, big, is_good, quality, site, obs/x, sample_number$",
        ),
        ("site == site1", "character 9 .*no dataset 'site1'.*; if site1 is a value, put it in quotes: 'site1'$"),
        ("site in [site1]", "not a number or a string: write the value itself, and strings in quotes"),
        ("label == 1 and images > 3", r"character 16 .*'images' has samples of shape \(20,\)"),
        ("open('a') == 1", "character 1 .*not supported: use names of fields"),
        ("label.real == 1", "not supported"),
        ("label[0] == 1", "not supported"),
        ("(lambda: 1) == label", "not supported"),
        ("label ** 2 == 1", "not supported"),
        ("f'{label}' == site", "not supported|not a number"),
        ("label is 1", "use == or !="),
        ("label in 3", "not followed by a list"),
        ("label in [label]", "not a number or a string"),
        ("label in [1] in [2]", "joined by|join the comparisons"),
        ("label == [1]", "only after 'in'"),
        ("label == None", "where x is missing"),
        ("1 == 1", "names no field"),
        ("", "not valid"),
        ("label", "character 1 .*numbers, not a condition"),
        ("label and quality > 1", "numbers, not a condition"),
        ("site == 3", "strings are compared with numbers"),
        ("label in ['a']", "has 'a', but the field has numbers"),
        ("site + 1 == 2", "computes with strings"),
        ("label * 9223372036854775807 > 1", "beyond 64 bits"),
        ("label == 18446744073709551616", "exceeds 64 bits"),
        ("-" * 200 + "label == 1", "more than 100 operators"),
        ("label > 4", "false for all 60 samples; label is from 0 to 4: change"),
        (lambda values: [True], r"returns bool of shape \(1,\): return a bool for each sample"),
        (lambda values: values["label"], r"returns uint8"),
        (3, "condition is a int"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_errors_say_where_and_what_to_do(path, condition, message):
    with pytest.raises((OptionError, FieldError), match=message):
        ChunkDataset(path, fields=["images", "label"]).where(condition)


def test_what_is_selected_is_a_subset(path):
    other = path.with_name("b.h5")
    other.write_bytes(path.read_bytes())
    dataset = ChunkDataset([path, other], fields=["images", "sample_number", "label"])
    part = dataset.where("label == 1").where("sample_number % 2 == 0").where("quality > 0")
    numbers = np.flatnonzero(np.tile(LABEL == 1, 2))[::2]
    numbers = numbers[np.tile(QUALITY > 0, 2)[numbers]]
    assert part.samples.tolist() == numbers.tolist()
    train, rest = part.split([0.5, 0.5], seed=1)
    assert sorted([*train.samples, *rest.samples]) == numbers.tolist() and "where label == 1" in repr(train)
    assert pickle.loads(pickle.dumps(part)).samples.tolist() == numbers.tolist()
    with ChunkLoader(part, 4) as loader:
        read = [image[0].item() + 60 * (number >= len(part) // 2) for images, _, own in loader
                for image, number in zip(images, own, strict=True)]  # fmt: skip
        state = loader.state_dict()
    assert sorted(value % 60 for value in read) == sorted((numbers % 60).tolist())
    with ChunkLoader(dataset.where("label == 2"), 4) as other, pytest.raises(h5chunk.StateError):
        other.load_state_dict(state)


def test_categories_by_name_and_code(tmp_path, class_folder):
    with h5py.File(tmp_path / "cells.h5", "w") as file:
        file["X"] = np.zeros((6, 3), np.float32)
        kind = file.create_group("obs/kind")
        kind.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
        kind["codes"], kind["categories"] = np.array([0, 1, 2, -1, 1, 0], np.int8), np.array([b"B", b"T", b"NK"])
        file["dtype"] = np.array([b"T", b"T", b"B", b"B", b"B", b"B"])
    cells = ChunkDataset(tmp_path / "cells.h5", fields={"X": "X", "kind": "obs/kind"})
    for condition, expected in {
        "kind == 'T'": [1, 4],
        "kind != 'T'": [0, 2, 5],
        "kind in ['T', 0]": [0, 1, 4, 5],
        "kind not in ['T']": [0, 2, 5],
        "kind < 2": [0, 1, 4, 5],
        "not kind == kind": [3],
        "kind == dtype": [1, 5],
        "kind == `obs/kind` and 'T' == kind": [1, 4],
    }.items():
        assert cells.where(condition).samples.tolist() == expected, condition
    for condition, message in {"kind == 'C'": "no category 'C': use one of B, T, NK", "kind < 'T'": "no order"}.items():
        with pytest.raises(OptionError, match=message):
            cells.where(condition)
    h5chunk.convert(class_folder(12), tmp_path / "photos.h5")
    photos = ChunkDataset(tmp_path / "photos.h5")
    expected = [name.startswith("class1/") for name in photos.source_names]
    assert photos.where("labels == 'class1'").samples.tolist() == np.flatnonzero(expected).tolist()
    assert len(photos.where(f"source_name == '{photos.source_names[3]}'")) == 1


def test_other_kinds_of_samples(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(6):
            group = file.create_group(f"t{number % 2}/s{number}")
            group["data"], group["reward"] = np.full((9, 9), number), np.arange(9.0)
            group.attrs["magnitude"] = float(number)
    with object_server() as server:
        server.objects["/a.h5"] = (tmp_path / "a.h5").read_bytes()
        for path in (tmp_path / "a.h5", f"{server.url}/a.h5"):
            keyed = h5chunk.Keyed(path, "*/*/data", attributes=["magnitude"], labels={"of": 0})
            assert keyed.where("magnitude > 1 and of == 't1'").source_names.tolist() == ["t1/s3", "t1/s5"]
            windows = h5chunk.Windows(path, {"x": "*/*/data", "r": "*/*/reward"}, 3, attributes=["magnitude"])
            found = windows.where("r >= 5 and magnitude == 2 or source_name == 't1/s3' and r == 0")
            assert found.source_names.tolist() == ["t0/s2", "t0/s2", "t1/s3"]
            patches = h5chunk.Patches(path, {"x": "*/*/data"}, (4, 4), per_volume=2)
            name = patches.source_names[4]
            assert patches.where(f"source_name in ['{name}']").source_names.tolist() == [name] * 2
            with pytest.raises(OptionError, match=r"source_name has values such as '.*a.h5: t0/s0'"):
                patches.where("source_name == 't0/s2'")
            with pytest.raises(OptionError, match="many values in a patch"):
                patches.where("x > 3")


numbers = st.integers(-3, 6)
operands = st.recursive(
    st.sampled_from(["a", "b", "c"]) | numbers.map(str),
    lambda each: st.tuples(each, st.sampled_from("+-*"), each).map(lambda x: f"({x[0]} {x[1]} {x[2]})"),
    max_leaves=4,
)
comparisons = st.tuples(operands, st.sampled_from(["<", "<=", "==", "!=", ">"]), operands).map(" ".join)
members = st.tuples(operands, st.sampled_from(["in", "not in"]), st.lists(numbers).map(str)).map(" ".join)
conditions = st.recursive(
    comparisons | members,
    lambda each: st.tuples(each, st.sampled_from(["and", "or", "and not"]), each).map(lambda x: f"({' '.join(x)})"),
    max_leaves=5,
)


@given(conditions)
@settings(max_examples=150, deadline=None)
def test_whole_numbers_are_compared_as_by_python(condition):
    random = np.random.default_rng(0)
    columns = {"a": random.integers(-3, 6, 20, np.int8), "b": random.integers(0, 6, 20, np.uint8), "c": np.arange(20)}
    try:
        parsed = Condition(condition)
    except OptionError as error:
        assert "names no field" in str(error)
        return
    found = parsed.mask(lambda name: Column(columns[name]), 20)
    each = [eval(condition, {name: int(values[row]) for name, values in columns.items()}) for row in range(20)]
    assert found.tolist() == each
