"""Read libsvm and svmlight files: ``label [qid:N] index:value ... # comment``; also .gz.

Indices count from 1, or from 0 if the file contains an index 0, unless the option ``first_index`` says otherwise. A
file is read twice: first for its labels and qids and to look for an index 0, then for its entries. Blank lines and
comment lines are not rows. Sources: the README of LIBSVM, and the home page of SVM-light.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from h5chunk.errors import count_text
from h5chunk.sample_source import OpenContext
from h5chunk.sources.arrow import compute as pc
from h5chunk.sources.arrow import pyarrow
from h5chunk.sources.kinds import LibsvmOptions
from h5chunk.sources.matrix.block import Block, MemoryLimit
from h5chunk.sources.matrix.text import TextSource, quote_line
from h5chunk.sources.recognise import has_suffix, text_lines

LABEL_BYTES = 64  # bytes of memory per label and qid, with all copies
NO_QUERY = -1  # qid of rows that have none
COMMENT = re.compile(rb"#[^\n]*")
FIRST_WORDS = re.compile(rb"(?m)^[ \t]*([^ \t\r\n]+)(?:[ \t]+qid:([^ \t\r\n]*))?")
WHOLE = re.compile(rb"-?[0-9]{1,18}")
ZERO = re.compile(rb"[ \t]\+?0+:")
PAIR = re.compile(rb"(0|[1-9][0-9]{0,17}):(\S+)")
NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class LibsvmSource(TextSource):
    """A libsvm or svmlight file; its labels are kept in memory."""

    kind = "libsvm"
    Options = LibsvmOptions
    types_remedy = "say which is right (--first-index 0 or 1)"
    pieces_in_memory = 24  # bytes of memory per byte read: words, pairs and numbers in pyarrow's columns

    @classmethod
    def recognises(cls, source: Any, head: bytes) -> bool:
        """Return whether the suffix is known, or the first lines are labels followed by pairs."""
        if has_suffix(source, ".libsvm", ".svmlight", ".svm"):
            return True
        lines = text_lines(source, head)[:100]
        rows = [words for line in lines if (words := _without_comments(line).split())]
        pairs = [word for words in rows for word in words[1:]]
        has_labels = all(NUMBER.fullmatch(words[0]) for words in rows)
        return bool(pairs) and has_labels and all(PAIR.fullmatch(word) or word.startswith(b"qid:") for word in pairs)

    def __init__(self, path: str, options: LibsvmOptions, context: OpenContext) -> None:
        super().__init__(path, options, context)
        self.notes: list[str] = []
        self._read_labels(MemoryLimit(path, context.memory_bytes))
        labels = self.row_fields["labels"]
        if options.first_index != "auto":
            self._base = int(options.first_index)
        else:
            from_1 = "no index is 0, so indices count from 1: index 1 became column 0 (if wrong, pass --first-index 0)"
            self.notes.append(from_1 if self._base else "an index is 0, so that indices count from 0")
            self.entry_types = {"indices": f"from {self._base}"}
        self.shape = (len(labels), None)

    def _read_labels(self, memory: MemoryLimit) -> None:
        """Read all labels, as int64 if all are integers, otherwise as float64, and the qids. Also detect an index 0."""
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        self._base, count = 1, 0
        for piece in self._pieces(memory.memory_bytes // 8):
            if ZERO.search(_without_comments(piece.data)):
                self._base = 0
            parts.append(self._parse(piece, _labels))
            count += len(parts[-1][0])
            memory.check(f"{count:,} rows", count * LABEL_BYTES, piece.consumed_bytes / self.num_bytes)
        if not count:
            self._text.fail("has no rows: it contains only comments")
        labels, queries = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        whole = (labels == np.rint(labels)).all() and np.abs(labels).max() < 1 << 53
        self.row_fields = {"labels": labels.astype(np.int64) if whole else labels}
        if (lacking := int((queries == NO_QUERY).sum())) < count:
            self.row_fields["qid"] = queries
            if lacking:
                self.notes.append(f"{count_text(lacking, 'row')} without qid have {NO_QUERY}")

    def blocks(self, max_bytes: int) -> Iterator[tuple[Block, int]]:
        num_rows = 0
        for piece in self._pieces(max_bytes):
            counts, columns, values = self._parse(piece, self._read)
            rows = np.repeat(np.arange(num_rows, num_rows + len(counts), dtype=np.int64), counts)
            num_rows += len(counts)
            yield Block(rows, columns, values), piece.consumed_bytes

    def _read(self, data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the number of entries of each row, then the columns and values of all entries.

        Raises ValueError if a line is invalid.
        """
        lines = pyarrow.array([_without_comments(data)], pyarrow.large_binary())
        lines = pc.split_pattern(lines, "\n").flatten().cast(pyarrow.large_string())
        lines = pc.ascii_trim_whitespace(lines)
        lines = lines.filter(pc.not_equal(lines, ""))
        words = pc.ascii_split_whitespace(lines)
        counts = pc.list_value_length(words).to_numpy().astype(np.int64)
        starts = np.cumsum(counts) - counts
        flat = words.flatten()
        is_pair = np.ones(len(flat), bool)
        is_pair[starts] = False
        second = starts[counts > 1] + 1
        queries = pc.starts_with(flat.take(pyarrow.array(second)), "qid:").to_numpy(zero_copy_only=False)
        is_pair[second[queries]] = False
        counts = counts - 1
        counts[np.flatnonzero(counts > 0)[queries]] -= 1
        pairs = flat.filter(pyarrow.array(is_pair))
        parts = pc.split_pattern(pairs, ":")
        if len(parts) and not (pc.list_value_length(parts).to_numpy() == 2).all():
            raise ValueError("an entry is not a pair")
        numbers = parts.flatten()
        columns = numbers[::2].cast(pyarrow.int64()).to_numpy() - self._base
        values = numbers[1::2]
        if b"+" in data:
            values = pc.replace_substring_regex(values, r"^\+([0-9.])", r"\1")
        values = values.cast(pyarrow.float64()).to_numpy()
        if len(columns) and (columns.min() < 0 or not np.isfinite(values).all()):
            raise ValueError("an index is negative or a value not finite")
        return counts, columns, values

    def _refuse_line(self, line: int, text: bytes) -> NoReturn:
        words = _without_comments(text).split()
        if not words or not NUMBER.fullmatch(words[0]) or not np.isfinite(float(words[0])):
            self._text.fail(f"must start with a label that is a finite number: {quote_line(text)}", line)
        for position, word in enumerate(words[1:]):
            if position == 0 and word.startswith(b"qid:"):
                if not WHOLE.fullmatch(word[4:]):
                    self._text.fail(f"{quote_line(word)} must be a whole number: {quote_line(text)}", line)
                continue
            pair = PAIR.fullmatch(word)
            if not pair or int(pair[1]) < self._base:
                self._text.fail(
                    f"{quote_line(word)} must be index:value, with an index of at least {self._base}: "
                    f"{quote_line(text)}",
                    line,
                )
            elif not NUMBER.fullmatch(pair[2]) or not np.isfinite(float(pair[2])):
                self._text.fail(
                    f"column {quote_line(pair[1])} has the value {quote_line(pair[2])}, which is not a finite number",
                    line,
                )
        self._text.fail(f"cannot be read: {quote_line(text)}", line)


def _without_comments(data: bytes) -> bytes:
    return COMMENT.sub(b"", data) if b"#" in data else data


def _labels(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels and qids of whole lines, `NO_QUERY` where there is none. Raises ValueError for invalid ones."""
    words = FIRST_WORDS.findall(_without_comments(data))
    labels, queries = ([row[place] for row in words] for place in (0, 1))
    numbers = np.array(labels, dtype="S").astype(np.float64) if words else np.empty(0)
    if not np.isfinite(numbers).all() or b"_" in b"".join(labels):
        raise ValueError("a label is not a finite number")
    if not any(queries):
        if b"qid:" in data:
            raise ValueError("a qid is empty")
        return numbers, np.full(len(words), NO_QUERY)
    if not all(WHOLE.fullmatch(query) for query in queries if query):
        raise ValueError("a qid is not a whole number")
    return numbers, np.array([int(query) if query else NO_QUERY for query in queries], np.int64)
