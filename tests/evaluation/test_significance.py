"""Differences of variants: the statistics against scipy, and how often chance alone is called a difference."""

import math
import random

import pytest
from scipy import stats

from drover.pipeline.evaluation.significance import (
    LEVEL,
    SeedPairs,
    bits_per_byte,
    judged,
    paired,
    read_losses,
    student,
)
from tests.data.source_files import write_jsonl

SIZES = [100 * number for number in range(1, 41)]


def trained(chance, seeds, better=0.0, of_seeds=0.01, of_documents=0.02, pool=None):
    """Losses of runs by seed: each seed has its luck, and the variant with each document. pool: luck that two variants
    share."""
    apart = [chance.gauss(-better, of_documents) for _ in SIZES]
    return {seed: {str(number): (size * (2.0 + (pool or {}).get(seed, 0) + luck + own), size)
                   for number, (size, own) in enumerate(zip(SIZES, apart, strict=True))}
            for seed in seeds for luck in [chance.gauss(0, of_seeds)]}


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30, 4001])
def test_quantiles_are_those_of_scipy(freedom):
    for level in (0.5, 0.05, 0.05 / 7, 1e-4):
        assert student(freedom, level) == pytest.approx(stats.t.isf(level / 2, freedom), rel=1e-9)


def test_where_documents_agree_it_is_the_paired_t_test_over_seeds():
    chance = random.Random(1)
    luck = {seed: chance.gauss(0, 0.1) for seed in range(4)}
    one, other = (trained(chance, luck, better, of_documents=0, pool=luck) for better in (0, 0.02))
    result = paired(one, other)
    totals = [[sum(bits for bits, _ in run.values()) / sum(SIZES) for run in runs.values()] for runs in (other, one)]
    low, high = stats.ttest_rel(*totals).confidence_interval(0.95)
    assert result.value == pytest.approx((low + high) / 2)
    assert result.uncertainty == pytest.approx((high - low) / 2)
    assert [*result.by_seed] == [0, 1, 2, 3] and result.documents == len(SIZES)


def test_where_seeds_agree_the_documents_decide_and_more_seeds_do_not_help():
    chance = random.Random(2)
    result = paired(*(trained(chance, range(3), of_seeds=0) for _ in range(2)))
    assert result.spread == pytest.approx(0, abs=1e-9) and result.document_error > 0.003
    assert result.uncertainty == pytest.approx(student(len(SIZES) - 1, LEVEL) * result.document_error)
    assert result.seen_with(3) == pytest.approx(result.seen_with(50))


def test_only_shared_seeds_and_documents_count():
    chance = random.Random(3)
    one, other = trained(chance, [0, 1, 2]), trained(chance, [1, 2, 3])
    del other[2]["7"]
    result = paired(one, other)
    assert [*result.by_seed] == [1, 2] and result.documents == len(SIZES) - 1
    assert paired(one, {}).by_seed == {} and "0 seeds" in str(paired(one, {}))


def test_equal_documents_count_each(tmp_path):
    (tmp_path / "evaluate").mkdir()
    write_jsonl(tmp_path / "evaluate/documents.jsonl", [
        {"source": "s", "key": key, "bytes": size, "nats": math.log(2) * size * bits}
        for key, size, bits in (("a", 10, 1), ("b", 20, 4), ("a", 10, 1))])
    losses = read_losses(tmp_path)
    assert bits_per_byte(losses) == pytest.approx(2.5) and paired({0: losses}, {0: losses}).documents == 3


def test_holm_s_levels_are_those_of_the_ordered_p_values():
    """By the definition in the textbook, on p-values of scipy."""
    chance = random.Random(4)
    for _ in range(50):
        pairs = [SeedPairs({seed: chance.gauss(mean, 1) for seed in range(5)}, 1, 0.0) for mean in (0, 1, 3, 6)]
        values = [stats.ttest_1samp([*one.by_seed.values()], 0).pvalue for one in pairs]
        expected = set()
        for rank, number in enumerate(sorted(range(4), key=values.__getitem__)):
            if values[number] > LEVEL / (4 - rank):
                break
            expected.add(number)
        result = judged([*pairs, SeedPairs({0: 9.0}, 1, 0.0)])
        assert {number for number, one in enumerate(result) if one.is_seen} == expected
        assert str(result[-1]).startswith("no comparison: 1 seed")


def test_chance_alone_is_rarely_called_a_difference_and_a_planted_gain_is_seen():
    """Sweeps of three variants and three seeds. None differs: at most LEVEL of them may say so. Then one is better."""
    chance = random.Random(5)
    false = gains = 0
    for _ in range(400):
        base = trained(chance, range(3))
        equal = [paired(base, trained(chance, range(3))) for _ in range(2)]
        false += any(one.is_seen for one in judged([*equal, paired(base, trained(chance, range(3)))]))
        gains += judged([*equal, paired(base, trained(chance, range(3), better=0.2))])[-1].is_seen
    assert false <= 400 * LEVEL and gains >= 320
