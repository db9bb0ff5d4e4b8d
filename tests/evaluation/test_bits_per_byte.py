import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.evaluation.bits_per_byte import IGNORED, ValidationBatches, ValidationText, measure
from drover.pipeline.evaluation.scores import Measurement

VOCABULARY = 50


def uniform(tokens, labels, documents, positions):
    """A model that finds all tokens equally likely, and sees where documents begin."""
    begins = documents.diff(prepend=documents[:, :1] - 1, dim=1) != 0
    assert (positions == 0).equal(begins)
    return (labels != IGNORED).double() * math.log(VOCABULARY)


def test_a_uniform_model_needs_log2_of_the_vocabulary_for_each_token():
    lengths, sizes, targets = {"a": [2, 9, 40, 17, 1], "b": [33], "none": []}, [123, 77, 0], [64, 32, 0]
    texts = {name: ValidationText([np.zeros(length, np.uint16) for length in lengths[name]], size)
             for name, size in zip(lengths, sizes, strict=True)}
    result = measure(uniform, ValidationBatches(texts, length=16, batch=3))
    for one, count, size in zip(result.values(), targets, sizes, strict=True):
        bits = math.log2(VOCABULARY) * count / size if size else math.nan
        assert one.targets == count and one.bits_per_byte == pytest.approx(bits, rel=1e-12, nan_ok=True)
        assert one.perplexity == pytest.approx(VOCABULARY if count else math.nan, rel=1e-12, nan_ok=True)
    assert Measurement(1e6, 1, 1).perplexity == math.inf, "a hopeless model does not overflow"


class Documents(list):
    """Documents, and the numbers of those that were read."""

    def __init__(self, documents):
        super().__init__(documents)
        self.read = set()

    def __getitem__(self, number):
        self.read.add(number)
        return super().__getitem__(number)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 25), max_size=12), st.integers(1, 4), st.integers(1, 3))
def test_every_target_counts_exactly_once(lengths, batch, world):
    """Documents of 0 to 3 windows: each (document, place) is a label once, and its input is the token before it. A
    rank reads the documents of its own labels."""
    # Token t of document d is d * 100 + t, so a window shows what it holds.
    rows = [np.arange(length, dtype=np.int64) + 100 * number for number, length in enumerate(lengths)]
    seen = Counter()
    texts = [ValidationText(Documents(rows), 1, lengths) for _ in range(world)]
    shares = [ValidationBatches({"x": text}, length=8, batch=batch, rank=rank, world=world)
              for rank, text in enumerate(texts)]
    assert not any(text.documents.read for text in texts), "making them reads nothing"
    assert len({len(list(share)) for share in shares}) == 1
    for share, text in zip(shares, texts, strict=True):
        places = [place for part in share for place in zip(*(own.flatten().tolist() for own in part.inputs),
                                                           strict=True) if place[1] != IGNORED]
        assert all(token + 1 == label for token, label, _, _ in places)
        assert text.documents.read == {label // 100 for _, label, _, _ in places}
        seen.update(label for _, label, _, _ in places)
    of_documents = measure(lambda tokens, labels, *_: (labels != IGNORED) * labels.double(), ValidationBatches(
        {"y": texts[0], "x": texts[0]}, length=8, batch=batch), by_document=True)["x"].documents
    assert list(of_documents) == [row[1:].sum() for row in rows], "whatever shares their windows"
    assert seen == Counter(100 * number + t for number, length in enumerate(lengths) for t in range(1, length))
