"""Fingerprints of weights: every flipped bit shows, and the replica that is alone with it is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.training import replicas
from pipeline.training.engines.engine import LocalWeights
from pipeline.training.fault_injection import flip_bit
from pipeline.training.replicas import addends, balanced, compare, explain, fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_single_bit_shows(dtype):
    values = (torch.randn(7, 5) * 50).to(dtype)
    size = values.element_size()
    whole = fingerprint([values])[0]
    raw = values.view(torch.uint8)
    seen = []
    for place in (0, 3, 34):
        for bit in range(8 * size):
            row, column = divmod(place, 5)
            raw[row, column * size + bit // 8] ^= 1 << bit % 8
            seen.append(fingerprint([values])[0])
            raw[row, column * size + bit // 8] ^= 1 << bit % 8
    assert len(seen) == 3 * 8 * size and whole not in seen and fingerprint([values])[0] == whole


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


def test_empty_pieces_and_no_tensors_have_fingerprints():
    assert fingerprint([]) == [] and fingerprint([torch.empty(0), torch.empty(3, 0)]) == [0, 0]


def test_equal_replicas_give_nothing_and_a_flipped_bit_names_tensor_and_replica():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8)) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    names = [name for name, _ in models[0].named_parameters()]
    assert compare([fingerprint(model.parameters()) for model in models], names) == []
    flip_bit(models[2], bit=0)
    found = compare([fingerprint(model.parameters()) for model in models], names, ["rank 0", "rank 4", "rank 8"])
    assert found == ["1.weight: rank 8 differs from the other 2"]
    two = compare([fingerprint(model.parameters()) for model in models[1:]], names)
    assert two == ["1.weight: replica 0 | replica 1 differ, and which of them is right cannot be told"]


def test_no_majority_names_nobody_and_two_odd_ones_are_both_named():
    assert compare([[1], [1], [2], [2]], ["w"]) == \
        ["w: replica 0, replica 1 | replica 2, replica 3 differ, and which of them is right cannot be told"]
    assert compare([[1], [5], [1], [2], [1]], ["w"]) == ["w: replica 1, replica 3 differ from the other 3"]


def test_the_explanation_says_since_when_and_what_to_do():
    text = explain([f"w{number}: x" for number in range(5)], step=400, last_equal=200)
    assert "in step 400" in text and "since step 200" in text and "(and 2 more)" in text and "w3" not in text


def sums_of(ranks):
    """Over ranks, each a list of (name, place, copy, copies, fingerprint)."""
    told = [addends((LocalWeights(name, place, torch.empty(0), copy, copies), value)
                    for name, place, copy, copies, value in held) for held in ranks]
    assert all(0 <= limb < 2**16 for limbs in told for limb in limbs)
    return [float(sum(limbs)) for limbs in zip(*told, strict=True)]


def three_copies(shards=2):
    """Two weights in shards, each in three copies, and one that all six ranks hold."""
    return [[*((name, (shard,), copy, 3, 1000 * shard - number) for number, name in enumerate("ab")),
             ("norm", (0,), 2 * copy + shard, 6, -(2**63))] for copy in range(3) for shard in range(shards)]


def test_equal_copies_balance_and_any_other_does_not():
    assert balanced(sums_of(three_copies())) and balanced([0.0] * 4)
    for rank in range(6):
        for weight in range(3):
            for change in (1, -1, 2**63, 2**32, -(2**63)):
                wrong = three_copies()
                name, place, copy, copies, value = wrong[rank][weight]
                wrong[rank][weight] = (name, place, copy, copies, value + change)
                assert not balanced(sums_of(wrong)), (rank, weight, change)


def test_changes_that_cancel_elsewhere_or_change_places_do_not_balance():
    wrong = three_copies()
    for rank, change in ((0, 5), (2, -5)):
        name, place, copy, copies, value = wrong[rank][0]
        wrong[rank][0] = (name, place, copy, copies, value + change)
    assert not balanced(sums_of(wrong))
    wrong = three_copies()
    wrong[0][0], wrong[0][1] = (*wrong[0][0][:4], wrong[0][1][4]), (*wrong[0][1][:4], wrong[0][0][4])
    assert not balanced(sums_of(wrong))
