import gzip
import lzma
import math

import pytest

from drover.pipeline.evaluation.baselines import baselines
from drover.pipeline.evaluation.validation import byte_counts


def test_unigram_and_entropy_by_hand():
    # Training text "aab": a 2, b 1, all others 0; with one added to each of the 256 there are 259.
    found = baselines(b"aabc", byte_counts(b"aabc"), byte_counts(b"aab"))
    assert found["unigram"] == pytest.approx(
        (2 * math.log2(259 / 3) + math.log2(259 / 2) + math.log2(259 / 1)) / 4, rel=1e-12)
    assert found["entropy"] == pytest.approx(1.5)


def test_compressors_get_the_text_and_the_rest_the_counts():
    text = b"def main():\n    return 0\n" * 40 + "größer\n".encode()
    many = byte_counts(text) * 10**9
    found = baselines(text, many, many)
    assert found == {"gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
                     "xz -9": 8 * len(lzma.compress(text, preset=9)) / len(text), "compressed_bytes": len(text),
                     "entropy": found["entropy"], "unigram": pytest.approx(found["entropy"], rel=1e-6)}
