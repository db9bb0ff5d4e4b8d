"""Fingerprints of weights: every flipped bit shows, and the replica that is alone with it is named."""

import itertools

import pytest
import torch

from drover.pipeline.training import replicas
from drover.pipeline.training.engines.engine import LocalWeights
from drover.pipeline.training.replicas import differences, explain, fingerprint, imbalance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_single_bit_shows(dtype):
    values = (torch.randn(7, 5) * 50).to(dtype)
    whole, raw = fingerprint([values]), values.view(-1).view(torch.uint8)
    assert fingerprint([]) == [] and fingerprint([torch.empty(0), values]) == [0, *whole]
    for at, bit in itertools.product(range(len(raw)), range(8)):
        raw[at] ^= 1 << bit
        assert fingerprint([values]) != whole
        raw[at] ^= 1 << bit
    assert fingerprint([values]) == whole


def test_exchanged_elements_show_and_layout_does_not():
    values = torch.randn(6, 4)
    exchanged = values.flip(0)
    assert fingerprint([values]) != fingerprint([exchanged])
    assert fingerprint([values]) == fingerprint([values.t().contiguous().t()])
    assert fingerprint([torch.tensor([0.0])]) != fingerprint([torch.tensor([-0.0])])


def test_chunks_are_a_matter_of_memory_only(monkeypatch):
    values = torch.randn(10_000)
    whole = fingerprint([values])
    monkeypatch.setattr(replicas, "CHUNK", 768)
    odd = 2 * torch.arange(len(values), dtype=torch.int64) + 1
    assert fingerprint([values]) == whole == [int((values.view(torch.int32) * odd).sum())]


@pytest.mark.parametrize(("held", "told"), [
    ([[1, 2], [1, 2], [1, 2]], []),
    ([[1, 2], [1, 2], [1, 3]], ["b: rank 2 differs from the other 2"]),
    ([[1, 2], [1, 3], []], ["b: rank 0 | rank 1 differ, and it is unknown which of them is right"]),
    ([[1], [1], [2], [2]], ["a: rank 0, rank 1 | rank 2, rank 3 differ, and it is unknown which of them is right"]),
    ([[1], [5], [1], [2], [1]], ["a: rank 1, rank 3 differ from the other 3"])])
def test_a_majority_names_the_replicas_that_differ(held, told):
    weights = [[(name, (0,), value) for name, value in zip("ab", values, strict=False)] for values in held]
    assert differences([f"rank {rank}" for rank in range(len(held))], weights) == told


def test_the_explanation_says_since_when_and_what_to_do():
    text = explain([f"w{number}: x" for number in range(5)], step=400, last_equal=200)
    assert "in step 400" in text and "since step 200" in text and "w2: x and 2 more." in text and "w3" not in text


def sum_of(ranks):
    """Over ranks, each a list of (name, place, copy, copies, fingerprint), in integers of 64 bits."""
    return torch.tensor([imbalance((LocalWeights(name, place, torch.empty(0), copy, copies), value)
                                   for name, place, copy, copies, value in held) for held in ranks]).sum()


def three_copies(shards=2):
    """Two weights in shards, each in three copies, and one that all six ranks hold."""
    return [[*((name, (shard,), copy, 3, 1000 * shard - number) for number, name in enumerate("ab")),
             ("norm", (0,), 2 * copy + shard, 6, -(2**63))] for copy in range(3) for shard in range(shards)]


def with_change(found, rank, weight, change):
    """The same, one fingerprint changed."""
    name, place, copy, copies, value = found[rank][weight]
    found[rank][weight] = (name, place, copy, copies, value + change)
    return found


def test_equal_copies_balance_and_any_other_does_not():
    assert sum_of(three_copies()) == 0
    for case in itertools.product(range(6), range(3), (1, -1, 2**63, 2**32, -(2**63))):
        assert sum_of(with_change(three_copies(), *case)) != 0, case


@pytest.mark.parametrize("other", [(2, 0), (0, 1)])
def test_changes_that_cancel_elsewhere_or_change_places_do_not_balance(other):
    """Of another copy's shard, or of another weight, whose fingerprint is one less."""
    assert sum_of(with_change(with_change(three_copies(), 0, 0, -1), *other, 1)) != 0
