"""Unknown and byte-fallback ids: counted per shard, and compared with what the tokenizer's report has."""

import numpy as np
import pytest
import yaml

from pipeline.contract.manifest import read_manifest
from pipeline.reporting.corpus import _tokens
from pipeline.tokenization.kinds import load_tokenizer
from pipeline.tokenization.rare_ids import rare_counts, rare_ids, warnings
from tests.conftest import run_stage


class Vocabulary:
    size, unk_id, byte_fallback_ids = 128, 0, frozenset({3, 4})
    bos_id, eos_id = 1, 2


def record(path, unknown, fallback, source="a", tokens=1002):
    return {"path": path, "source": source, "docs": 1, "tokens": tokens, "unknown_tokens": unknown,
            "fallback_tokens": fallback}


def test_they_are_counted_over_all_batches(monkeypatch):
    parts = [np.array([0, 1, 3, 9], np.uint16), np.array([4, 4, 0, 127], np.uint16)]
    assert rare_counts(parts, Vocabulary()) == {"unknown_tokens": 2, "fallback_tokens": 3}
    for name, value in (("eos_id", 0), ("unk_id", None)):  # one that stands around documents; none
        monkeypatch.setattr(Vocabulary, name, value)
        assert rare_counts(parts, Vocabulary()) == {"unknown_tokens": 0, "fallback_tokens": 3}


REPORT = {"total": {"unknown_share": 0.0, "fallback_share": 0.02},
          "sources": {"a": {"unknown_share": 0.0, "fallback_share": 0.02},
                      "b": {"unknown_share": None, "fallback_share": None}}}


@pytest.mark.parametrize(("unknown", "fallback", "kinds"), [
    (10, 60, []), (11, 0, ["unknown"]), (0, 61, ["fallback"]), (500, 500, ["unknown", "fallback"])])
def test_an_outlier_has_more_than_three_times_the_share_and_one_percent_more(unknown, fallback, kinds):
    for source in ("a", "b", "not in the report"):  # without a figure of its own, that of all
        found = rare_ids([record("x", unknown, fallback, source), record("y", 0, 20)], REPORT)["rare_ids"]
        assert [one["kind"] for one in found["outliers"]] == kinds and found["shards"] == 2
        assert found["fallback_tokens"] == fallback + 20


def test_they_are_said_and_in_the_report():
    found = rare_ids([record(f"train/{number}.arrow", 0, 200) for number in range(30)], REPORT)
    told = warnings(found)
    assert len(told) == 6 and "train/0.arrow: 20.00% byte-fallback ids, 2.00%" in told[0] and "25 more" in told[-1]
    table = _tokens({"splits": {}, "dtype": "uint16", **found})[1]
    assert table.rows[0][:3] == ["train/0.arrow", "byte-fallback ids", "20.0 %"] and len(table.rows) == 20
    older = [{key: value for key, value in record("x", 0, 0).items() if not key.endswith("n_tokens")
              and key != "fallback_tokens"}]
    assert rare_ids(older, REPORT) == {} and warnings({}) == [] and len(_tokens({"splits": {}})) == 1


@pytest.mark.slow
def test_encode_counts_them(tmp_path):
    """The vocabulary of characters is of the training text's first part; the held-out end is Greek."""
    (tmp_path / "a.txt").write_text("\n\n".join([f"plain text {number} of letters" for number in range(200)]
                                               + [f"ελληνικά {number} γράμματα" for number in range(60)]))
    config = tmp_path / "c.yaml"
    config.write_text(yaml.safe_dump({
        "name": "mini", "runs_dir": str(tmp_path / "runs"), "launch": {"processes": 1},
        "shard": {"heldout_share": 0.25, "heldout_rule": "tail", "shard_mb": 0.01, "sources": [
            {"kind": "files", "name": "a", "paths": [str(tmp_path / "a.txt")], "separator": "\n\n"}]},
        "tokenizer": {"kind": "char"}}))
    for stage in ("shard", "tokenizer"):
        run_stage(stage, config)
    said = run_stage("encode", config).stdout
    manifest = read_manifest(tmp_path / "runs/mini/encode")
    tokenizer = load_tokenizer(tmp_path / "runs/mini/tokenizer")
    assert manifest.counts["rare_ids"]["fallback_tokens"] == sum(one["fallback_tokens"] for one in manifest.outputs)
    assert manifest.counts["rare_ids"]["fallback_tokens"] > 100 and tokenizer.byte_fallback_ids
    assert manifest.counts["rare_ids"]["outliers"] == []  # the report is of this very text
    assert "warning: heldout" not in said
