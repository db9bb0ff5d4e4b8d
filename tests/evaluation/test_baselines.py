import gzip
import lzma
import math

import numpy as np
import pytest

from drover.pipeline.evaluation.baselines import baselines, byte_counts, entropy_bits, unigram_bits

TEXT = b"def main():\n    return 0\n" * 40 + "größer\n".encode()


def test_unigram_by_hand():
    # Training text "aab": a 2, b 1, all others 0; with one added to each of the 256 there are 259.
    expected = (2 * math.log2(259 / 3) + math.log2(259 / 2) + math.log2(259 / 1)) / 4
    assert unigram_bits(byte_counts(b"aab"), byte_counts(b"aabc")) == pytest.approx(expected, rel=1e-12)
    assert unigram_bits(np.zeros(256, np.int64), byte_counts(TEXT)) == pytest.approx(8)


def test_entropy_by_hand_and_as_the_limit_of_the_unigram():
    assert entropy_bits(byte_counts(b"aabb")) == pytest.approx(1)
    assert entropy_bits(byte_counts(b"aaaa")) == 0
    many = byte_counts(TEXT) * 10**9
    assert unigram_bits(many, byte_counts(TEXT)) == pytest.approx(entropy_bits(byte_counts(TEXT)), rel=1e-6)


def test_all_together():
    found = baselines(TEXT, byte_counts(TEXT), byte_counts(TEXT))
    assert set(found) == {"unigram", "gzip -9", "xz -9", "entropy"}
    assert found["gzip -9"] == 8 * len(gzip.compress(TEXT, 9)) / len(TEXT)
    assert found["xz -9"] == 8 * len(lzma.compress(TEXT, preset=9)) / len(TEXT)
    assert found["gzip -9"] < found["entropy"] <= found["unigram"]
