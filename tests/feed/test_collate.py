"""Batches that torch takes as they are."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import default_collate

import h5chunk
from h5chunk.feed.collate import Batch, Sample, collate, no_samples
from h5chunk.feed.memory import BatchMemory
from h5chunk.feed.shared import shared_empty


def batch() -> Batch:
    return Batch((torch.arange(12).reshape(4, 3), torch.tensor([5, 6, 7, 8]), ["a", "b", "c", "d"]))


def test_a_batch_is_a_sequence_of_samples():
    b = batch()
    assert len(b) == 4
    assert isinstance(b[1], Sample) and isinstance(b[1], tuple)
    assert b[1][0].tolist() == [3, 4, 5]
    assert b[-1][1:] == (torch.tensor(8), "d")
    assert [sample[2] for sample in b] == ["a", "b", "c", "d"]
    assert [sample[2] for sample in b[1:3]] == ["b", "c"]
    images, labels, names = zip(*b, strict=True)
    assert torch.stack(images).equal(b.fields[0])
    assert (len(labels), names) == (4, ("a", "b", "c", "d"))
    with pytest.raises(IndexError):
        b[4]


def test_batches_are_joined_as_lists():
    first = batch()[0]
    for joined in (
        batch() + batch(),
        batch() * 2,
        functools.reduce(operator.add, [batch(), batch()], []),
        [*batch(), *batch()],
    ):
        assert [sample[2] for sample in joined] == [*"abcdabcd"]
    assert [sample[2] for sample in [first] + batch()] == [*"aabcd"]  # noqa: RUF005


@pytest.mark.parametrize("function", [collate, default_collate, h5chunk.collate])
def test_collating_a_batch_copies_nothing(function):
    b = batch()
    fields = function(b)
    assert isinstance(fields, tuple)
    assert all(mine is theirs for mine, theirs in zip(fields, b.fields, strict=True))


@pytest.mark.parametrize("function", [collate, default_collate])
def test_collating_samples(function):
    b = batch()
    images, labels, names = function([b[2], b[0]])
    assert images.equal(b.fields[0][[2, 0]])
    assert labels.tolist() == [7, 5]
    assert list(names) == ["c", "a"]


def test_others_are_collated_as_ever():
    assert collate([1, 2]).tolist() == [1, 2]
    left, right = default_collate([(1, 2.0), (3, 4.0)])
    assert (left.tolist(), right.tolist()) == ([1, 3], [2.0, 4.0])


class Views(NamedTuple):
    small: torch.Tensor
    large: torch.Tensor


@pytest.mark.parametrize("function", [collate, default_collate])
def test_no_samples_are_collated_as_some_are(function):
    """Whatever a transform gives: a batch of some, cut to none, has these types and shapes."""
    views = Views(torch.zeros(2, 2), torch.ones(4, dtype=torch.float64))
    sample = Sample(({"image": torch.zeros(3, 5), "name": "a"}, views, 7, 0.5, ("a", "b"), [torch.ones(2), "c"]))
    some, none = function([sample, sample]), function(no_samples(sample))
    assert len(no_samples(sample)) == 0 and list(no_samples(sample)) == []
    assert none[0]["image"].shape == (0, 3, 5) and none[0]["name"] == []
    assert isinstance(none[1], Views) and [each.shape for each in none[1]] == [(0, 2, 2), (0, 4)]
    assert [each.dtype for each in none[1]] == [each.dtype for each in some[1]]
    assert [(none[i].shape, none[i].dtype) for i in (2, 3)] == [((0,), torch.int64), ((0,), torch.float64)]
    assert none[4] == [[], []] and none[5][0].shape == (0, 2) and none[5][1] == []
    assert type(none) is type(some)


def test_no_samples_of_what_torch_cannot_collate():
    """Is for the ``collate_fn`` that takes them."""
    assert no_samples(Sample((object(), torch.tensor(1)))) == []


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(5, 3, 2), (7,), (0, 3), (4, 0)])
def test_empty(shape, dtype, shared):
    tensor = shared_empty(shape, dtype) if shared else BatchMemory().empty(shape, dtype)
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    assert tensor.is_shared() == shared or not tensor.numel()
    tensor.zero_()
    assert not tensor.any()
