"""Shards with many more unknown and byte-fallback ids than the tokenizer's report has."""

from types import SimpleNamespace

import numpy as np
import pytest

from drover.pipeline.tokenization.reporting import outliers, rare_counts

REPORT = {"total": {"unknown_share": 0.0, "fallback_share": 0.02},
          "sources": {"a": {"unknown_share": 0.0, "fallback_share": 0.02},
                      "b": {"unknown_share": None, "fallback_share": None}}}


def test_rare_ids_are_counted():
    """How often an id that is BOS and the unknown one comes around documents is no count."""
    ids = np.array([0, 1, 3, 9, 4, 4, 0, 127], np.uint16)
    for bos, unknown in ((1, 2), (0, 0)):
        vocabulary = SimpleNamespace(size=128, unk_id=0, byte_fallback_ids={3, 4}, bos_id=bos, eos_id=2)
        assert rare_counts(ids, vocabulary) == {"unknown_tokens": unknown, "fallback_tokens": 3}


def record(path, unknown, fallback, source="a"):
    return {"path": path, "source": source, "docs": 1, "tokens": 1002, "unknown_tokens": unknown,
            "fallback_tokens": fallback}


@pytest.mark.parametrize(("unknown", "fallback", "kinds"), [(10, 60, []), (11, 61, ["unknown", "fallback"])])
def test_an_outlier_has_more_than_three_times_the_share_and_one_percent_more(unknown, fallback, kinds):
    for source in ("a", "b", "not in the report"):  # without a figure of its own, that of all
        result = outliers([record("x", unknown, fallback, source), record("y", 0, 20)], REPORT)
        assert [one["kind"] for one in result] == kinds
