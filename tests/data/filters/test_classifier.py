"""Documents scored by a fastText model: scores are the library's, are counted and kept, and decide what is dropped."""

import json

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.documents import Document
from tests.data.filters.test_kinds import MODELS, TWO, made
from tests.data.source_files import write_jsonl
from tests.data.test_counts import report
from tests.refusal import refused
from tests.stages.test_shard import documents, files_source, finished, folder_of, write_config

fasttext = pytest.importorskip("fasttext", reason="of the extra `clean`")
LINES = [line.partition(" ")[2] for line in (MODELS / "languages.txt").read_text().splitlines()]


def scored(path=TWO, label="en", **settings):
    own = made(kind="classifier", path=str(path), label=label, **settings)
    own.open()
    return own


@pytest.mark.parametrize("path", [TWO, MODELS / "with_scripts.bin"], ids=["hierarchical, quantized", "softmax"])
def test_scores_are_the_library_s_and_are_counted(path):
    model = fasttext.load_model(str(path))
    for label in (name.removeprefix("__label__") for name in model.predict("", k=3)[0]):
        own = scored(path, label, name="quality")
        for text in (*LINES, "0101", "two\nlines \0", "?"):
            found = dict(zip(*model.predict(text.replace("\n", " "), k=3, threshold=-1), strict=True))
            after = own(Document(text, "s", "i", {"stars": 3}))
            assert after.meta["stars"] == 3 and abs(after.meta["quality_score"] - found[f"__label__{label}"]) < 1e-6
        counts = own.findings()["scores"]
        assert len(counts) == 20 and sum(bin["kept"] for bin in counts.values()) == len(LINES) + 3


def test_an_unknown_label_is_refused():
    refused(UserError, r"The filter classifier names __label__en, but the model .* knows 3 labels, among them de, en, "
            r"fr\. Did you mean en\? Correct `label`", scored, label="__label__en")


def test_low_scores_are_dropped_with_the_score_and_the_histogram_is_reported(tmp_path):
    write_jsonl(tmp_path / "f.jsonl", [{"text": line} for line in LINES])
    config = write_config(tmp_path, [files_source("web", tmp_path / "f.jsonl")], validation_share=0.3,
                          keep_dropped=True, filters=[{"kind": "classifier", "path": str(TWO), "label": "en",
                                                       "min_score": 0.5}])
    manifest = finished(config)
    kept = [document for split in ("train", "validation") for document in documents(config, split)]
    low = [json.loads(line) for path in (folder_of(config) / "dropped").iterdir()
           for line in path.read_text().splitlines()]
    assert len(kept) == len(low) / 2 == 10 and all(document.meta["classifier_score"] >= 0.5 for document in kept)
    assert all(own["meta"]["classifier_score"] < 0.5 and own["reason"] == "with a score below 0.5" for own in low)
    histogram = manifest.counts["cards"]["web"]["scores"]["classifier"]
    for begin, counts in histogram.items():
        assert counts["dropped"] == sum(float(begin) <= own["meta"]["classifier_score"] < float(begin) + 0.05
                                        for own in low)
    assert sum(counts["kept"] for counts in histogram.values()) == 10
    assert manifest.counts["filters"]["classifier"]["changed"] == 0
    assert "| web | classifier | 0.95 |" in report(tmp_path, manifest.counts)
