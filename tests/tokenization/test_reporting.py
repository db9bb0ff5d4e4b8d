"""Shards with many more unknown and byte-fallback ids than the tokenizer's report has."""

from types import SimpleNamespace

import numpy as np
import pytest

from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.reporting.chapters.data import data
from drover.pipeline.reporting.facts import Facts
from drover.pipeline.tokenization.reporting import outliers, rare_counts, warnings

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


def test_outliers_are_printed_and_reported():
    result = outliers([record(f"train/{number}.arrow", 0, 200) for number in range(30)], REPORT)
    lines = warnings(result)
    assert len(lines) == 6 and "train/0.arrow: 20.00% byte-fallback ids, 2.00%" in lines[0] and "25 more" in lines[-1]
    encode = Manifest("encode", {}, [], {"rare_ids": {"outliers": result}}, "")
    assert [block for block in data(Facts(Config(), {"shard": Manifest("shard", {}, [], {}, ""), "encode": encode}))
            if block] == lines
    assert warnings([]) == []
