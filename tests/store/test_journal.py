"""Records that are only added: whatever happens to the end of the file, those before it are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.full_disk import largest_file

from h5chunk.errors import OutputError
from h5chunk.store.write.journal import Journal, key_of

RECORDS = [["read", {"rows": 3}], [0, 7, [1, 2], 0.5, "näme\udce9"], None, "x"]


def write(path: Path, records: list[object] = RECORDS, key: str = "key") -> None:
    journal = Journal(path)
    journal.open(key)
    for record in records:
        journal.add(record)
    journal.close()


def reopen(path: Path, key: str = "key") -> Journal:
    journal = Journal(path)
    journal.open(key)
    return journal


def read(path: Path, key: str = "key") -> Journal:
    journal = reopen(path, key)
    journal.close()
    return journal


def test_records_come_back_and_more_can_be_added(tmp_path: Path) -> None:
    write(tmp_path / "j")
    journal = reopen(tmp_path / "j")
    assert journal.records == RECORDS and journal.holds_work and not journal.key_mismatch
    journal.add("more")
    journal.close()
    assert read(tmp_path / "j").records == [*RECORDS, "more"]


def test_a_journal_that_is_cut_at_any_byte(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data)):
        (tmp_path / "j").write_bytes(data[:size])
        journal = reopen(tmp_path / "j")
        there = sum(end <= size for end in ends)
        assert journal.records == RECORDS[: max(0, there - 1)] and not journal.key_mismatch
        journal.add("more")
        journal.close()
        assert read(tmp_path / "j").records == [*RECORDS[: max(0, there - 1)], "more"]


def test_a_damaged_record_is_the_end(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for at in range(len(data)):
        (tmp_path / "j").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        before = max(0, data.count(b"\n", 0, at) - 1)
        assert read(tmp_path / "j").records == RECORDS[:before]


def test_that_of_another_key_is_emptied(tmp_path: Path) -> None:
    write(tmp_path / "j")
    journal = read(tmp_path / "j", "other")
    assert journal.records == [] and journal.key_mismatch and not journal.holds_work
    assert read(tmp_path / "j").key_mismatch


def test_remove_takes_all(tmp_path: Path) -> None:
    write(tmp_path / "j")
    journal = read(tmp_path / "j")
    journal.remove()
    assert list(tmp_path.iterdir()) == [] and not journal.holds_work
    journal.add("nowhere")
    assert list(tmp_path.iterdir()) == [] and not journal.holds_work


def test_a_full_disk_ends_it_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "j", RECORDS[:1])
    journal = reopen(tmp_path / "j")
    with largest_file((tmp_path / "j").stat().st_size):
        journal.add(RECORDS[1])
    journal.add(RECORDS[2])
    assert read(tmp_path / "j").records == RECORDS[:1]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "j").symlink_to("victim")
    with pytest.raises(OutputError, match="j is a symbolic link"):
        read(tmp_path / "j")
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_keys_differ_with_all_that_they_are_made_of() -> None:
    keys = [key_of({"a": 1}), key_of({"a": 2}), key_of({"a": 1}, [b"x", b"y"]), key_of({"a": 1}, [b"xy"])]
    assert len({*keys, key_of({"a": 1}, [b"xy", b""])}) == 5
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "cannot be written: Is a directory"),
        (lambda path: path.symlink_to("precious"), "j is a symbolic link, which is not followed: remove it"),
        (os.mkfifo, "j is not a regular file: remove it"),
    ],
)
def test_what_is_no_file_is_neither_written_nor_waited_for(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    (tmp_path / "precious").write_text("precious")
    make(tmp_path / "j")
    journal = Journal(tmp_path / "j")
    with pytest.raises(OutputError, match=message):
        journal.open("key")
    journal.remove()
    assert (tmp_path / "precious").read_text() == "precious"
