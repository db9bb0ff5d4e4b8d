"""Unknown and byte-fallback ids: counted per shard, and compared with what the tokenizer's report has."""

from types import SimpleNamespace

import numpy as np
import pytest

from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.reporting.chapters.data import data
from drover.pipeline.reporting.facts import Facts
from drover.pipeline.tokenization.rare_ids import rare_counts, rare_ids, warnings


def record(path, unknown, fallback, source="a"):
    return {"path": path, "source": source, "docs": 1, "tokens": 1002, "unknown_tokens": unknown,
            "fallback_tokens": fallback}


@pytest.mark.parametrize(("changes", "unknown"), [({}, 2), ({"eos_id": 0}, 0), ({"unk_id": None}, 0)],
                         ids=["as it is", "around documents", "none"])
def test_they_are_counted(changes, unknown):
    vocabulary = SimpleNamespace(**{"size": 128, "unk_id": 0, "byte_fallback_ids": {3, 4}, "bos_id": 1, "eos_id": 2,
                                    **changes})
    assert rare_counts(np.array([0, 1, 3, 9, 4, 4, 0, 127], np.uint16), vocabulary) == {
        "unknown_tokens": unknown, "fallback_tokens": 3}


REPORT = {"total": {"unknown_share": 0.0, "fallback_share": 0.02},
          "sources": {"a": {"unknown_share": 0.0, "fallback_share": 0.02},
                      "b": {"unknown_share": None, "fallback_share": None}}}


@pytest.mark.parametrize(("unknown", "fallback", "kinds"), [
    (10, 60, []), (11, 0, ["unknown"]), (0, 61, ["fallback"]), (500, 500, ["unknown", "fallback"])])
def test_an_outlier_has_more_than_three_times_the_share_and_one_percent_more(unknown, fallback, kinds):
    for source in ("a", "b", "not in the report"):  # without a figure of its own, that of all
        result = rare_ids([record("x", unknown, fallback, source), record("y", 0, 20)], REPORT)
        assert [one["kind"] for one in result["outliers"]] == kinds
        assert result["fallback_tokens"] == fallback + 20


def test_outliers_are_printed_and_reported():
    result = rare_ids([record(f"train/{number}.arrow", 0, 200) for number in range(30)], REPORT)
    lines = warnings(result["outliers"])
    assert len(lines) == 6 and "train/0.arrow: 20.00% byte-fallback ids, 2.00%" in lines[0] and "25 more" in lines[-1]
    encode = Manifest("encode", {}, [], {"rare_ids": result}, "")
    assert [block for block in data(Facts(Config(), {"shard": Manifest("shard", {}, [], {}, ""), "encode": encode}))
            if block] == lines
    assert warnings([]) == []
