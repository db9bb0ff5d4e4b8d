import gzip
import lzma
import math

import numpy as np
import pytest

from drover.pipeline.evaluation.baselines import baselines
from drover.pipeline.evaluation.heldout import byte_counts

NONE = np.zeros(256, np.int64)
TEXT = b"def main():\n    return 0\n" * 40 + "größer\n".encode()


def found(name, text, training=NONE):
    return baselines(text, byte_counts(text), training)[name]


def test_unigram_by_hand():
    # Training text "aab": a 2, b 1, all others 0; with one added to each of the 256 there are 259.
    expected = (2 * math.log2(259 / 3) + math.log2(259 / 2) + math.log2(259 / 1)) / 4
    assert found("unigram", b"aabc", byte_counts(b"aab")) == pytest.approx(expected, rel=1e-12)
    assert found("unigram", TEXT) == pytest.approx(8)


def test_entropy_by_hand_and_as_the_limit_of_the_unigram():
    assert found("entropy", b"aabb") == pytest.approx(1)
    assert found("entropy", b"aaaa") == 0
    many = byte_counts(TEXT) * 10**9
    assert found("unigram", TEXT, many) == pytest.approx(found("entropy", TEXT), rel=1e-6)


def test_all_together():
    all_of = baselines(TEXT, byte_counts(TEXT), byte_counts(TEXT))
    assert set(all_of) == {"unigram", "gzip -9", "xz -9", "entropy", "compressed_bytes"}
    assert all_of["gzip -9"] == 8 * len(gzip.compress(TEXT, 9)) / len(TEXT)
    assert all_of["xz -9"] == 8 * len(lzma.compress(TEXT, preset=9)) / len(TEXT)
    assert all_of["gzip -9"] < all_of["entropy"] <= all_of["unigram"]
