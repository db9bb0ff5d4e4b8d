"""Fingerprints of weights: every flipped bit shows, and the replica that is alone with it is named."""

import itertools

import pytest
import torch

from drover.pipeline.training import replicas
from drover.pipeline.training.engine import LocalWeights
from drover.pipeline.training.replicas import differences, fingerprint, imbalance
from tests.refusal import table


@pytest.mark.parametrize(("dtype", "integers"), [
    (torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float64, torch.int64),
    (torch.uint8, torch.uint8)])
def test_a_fingerprint_is_the_sum_of_bits_times_odd_numbers(monkeypatch, dtype, integers):
    """So a flipped bit shows, and so do exchanged elements; neither the layout nor the chunks of a sum do."""
    values = (torch.randn(70, 50) * 50).to(dtype)
    bits = values.flatten().view(integers).long()
    expected = int((bits * (2 * torch.arange(len(bits)) + 1)).sum())
    for chunk in (replicas.CHUNK, 768):
        monkeypatch.setattr(replicas, "CHUNK", chunk)
        assert fingerprint([values, torch.empty(0), values.t().contiguous().t()]) == [expected, 0, expected]
    assert fingerprint([]) == []


@pytest.mark.parametrize(("held", "expected"), table("""
    12 12 12 -> []
    12 13 , -> ['b: rank 0 differs from rank 1']
    1 5 1 2 1 -> ['a: rank 1 differs from rank 3 differs from rank 0, rank 2, rank 4']""", str.split))
def test_a_majority_names_the_replicas_that_differ(held, expected):
    """held: the fingerprint of the weights `a` and `b` of each rank, a digit each; a comma: none."""
    weights = [[(name, (0,), int(digit)) for name, digit in zip("ab", digits.strip(","), strict=False)]
               for digits in held]
    assert str(differences([f"rank {rank}" for rank in range(len(held))], weights)) == expected


def sum_of_copies(*changes):
    """Over ranks, in integers of 64 bits: of two weights in two shards, each in three copies, and of one that all six
    ranks hold. changes: (rank, weight, what is added to its fingerprint)."""
    result = [[*((name, (shard,), copy, 3, 1000 * shard - number) for number, name in enumerate("ab")),
              ("norm", (0,), 2 * copy + shard, 6, -(2**63))] for copy in range(3) for shard in range(2)]
    for rank, weight, change in changes:
        *held, value = result[rank][weight]
        result[rank][weight] = (*held, value + change)
    return torch.tensor([imbalance((LocalWeights(name, place, torch.empty(0), copy, copies), value)
                                   for name, place, copy, copies, value in held) for held in result]).sum()


def test_equal_copies_balance_and_any_other_does_not():
    """Nor do changes that cancel in another copy's shard, or in another weight, whose fingerprint is one less."""
    assert sum_of_copies() == 0
    for change in itertools.product(range(6), range(3), (1, -1, 2**63, 2**32, -(2**63))):
        assert sum_of_copies(change) != 0, change
    for other in ((2, 0), (0, 1)):
        assert sum_of_copies((0, 0, -1), (*other, 1)) != 0
