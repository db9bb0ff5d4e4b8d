import lzma
import math
import random

import pytest

from drover.pipeline.evaluation.results import AFTER, OVERALL
from drover.pipeline.evaluation.validation import after_training, baselines, byte_counts, training_text
from drover.pipeline.tokenization.texts import ShardTexts

TRAINING = "".join(random.Random(1).choices(["def main():\n", "    return 0\n", "größer\n", "import os\n", "x = 1\n"],
                                            k=20_000)).encode()


def test_unigram_and_entropy_by_hand():
    # Training text "aab": a 2, b 1, all others 0; with one added to each of the 256 there are 259.
    result = baselines(b"aabc", byte_counts(b"aabc"), byte_counts(b"aab"))
    assert result["unigram"] == pytest.approx(
        (2 * math.log2(259 / 3) + math.log2(259 / 2) + math.log2(259 / 1)) / 4, rel=1e-12)
    assert result["entropy"] == pytest.approx(1.5)


@pytest.mark.parametrize("text", [TRAINING[:3000], random.Random(2).randbytes(5000), b"x", b"0" * 9])
def test_after_training_text_a_compressor_needs_what_the_text_adds(text):
    """The difference of two sizes, also for the second of two sources, and both together."""
    expected, complete = [], TRAINING
    for part in (text, b"other" * 20):
        expected.append(len(lzma.compress(complete + part, preset=9)) - len(lzma.compress(complete, preset=9)))
        complete += part
    result = after_training(TRAINING, {"one": text, "two": b"other" * 20})
    sizes = [result[source][f"xz -9{AFTER}"] * size / 8 for source, size in (("one", len(text)), ("two", 100))]
    assert sizes == pytest.approx(expected, abs=4) and min(sizes) >= 0
    assert result[OVERALL][f"xz -9{AFTER}"] == pytest.approx(8 * sum(sizes) / (len(text) + 100))
    if text == TRAINING[:3000]:
        assert sizes[0] < 100 < len(lzma.compress(text, preset=9)), "it is all there"


@pytest.mark.parametrize(("given", "expected"), [(10**6, b"aaaabbc"), (7, b"aaaabbc"), (4, b"aabc"[:3]), (0, b"")])
def test_training_text_is_all_of_little_and_the_beginning_of_each_shard_of_much(given, expected):
    """In proportion to its size: no shard, and no long document, crowds out another."""
    shards = {"one": ["aaa", "a"], "two": ["bb"], "three": ["c"]}
    counts, text = training_text([
        ShardTexts(name, "s", sum(map(len, texts)), lambda only, texts=texts: (("", text) for text in texts))
        for name, texts in shards.items()], 10**9, given)
    assert text == expected and [counts[ord(letter)] for letter in "abc"] == [4, 2, 1]
