"""Documents scored by a fastText model: scores are the library's, are counted and kept, and decide what is dropped."""

import hashlib
import json
import random
import re
from math import ceil

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_file
from drover.pipeline.data.documents import Document
from drover.tools.classifier import documents as texts_of
from drover.tools.classifier import main
from tests.data.filters.test_kinds import MODELS, TWO, made
from tests.data.planning.staged_corpora import cut_into
from tests.data.source_files import write_jsonl
from tests.data.test_counts import report
from tests.refusal import printed, refused
from tests.stages.test_shard import documents, files_source, finished, folder_of, hashes, run, write_config

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
            expected = dict(zip(*model.predict(text.replace("\n", " "), k=3, threshold=-1), strict=True))
            after = own(Document(text, "s", "i", {"stars": 3}))
            assert after.meta["stars"] == 3 and abs(after.meta["quality_score"] - expected[f"__label__{label}"]) < 1e-6
        counts = own.findings()["scores"]
        assert len(counts) == 20 and sum(bin["kept"] for bin in counts.values()) == len(LINES) + 3


SCORES = [0.5, "0.75", 1, None, 0.25, True]
"""As the field of a record has them; a text that is a number is one, as in CSV."""


def best(web, share):
    """The texts of a source's best documents, of (text, place in SCORES), each text once."""
    ranked = sorted((-float(SCORES[place] or -1), hashlib.sha256(text.encode()).hexdigest(), text)
                    for text, place in dict(reversed(web)).items())
    return {text for score, _, text in ranked[:ceil(share * len(ranked))] if score <= 0}


def dropped(config, name="a"):
    return [json.loads(line) for path in (folder_of(config, name) / "dropped").iterdir()
            for line in path.read_text().splitlines()]


@pytest.mark.parametrize("share", [0.35, pytest.param(0.9, marks=pytest.mark.slow)])
def test_the_best_share_of_a_source_is_kept_after_deduplication(tmp_path, monkeypatch, capsys, share):
    """Smaller digests are kept of equal scores, never a document without a score, and all books."""
    cut_into(monkeypatch, 30, 3, 20)
    web = [(f"page {number % 150} in the web", number % 149 % len(SCORES)) for number in range(200)]
    for source, texts in (("web", web), ("books", [(f"book {number}", 3) for number in range(20)])):
        for part in range(5):
            write_jsonl(tmp_path / source / f"{part}.jsonl", [
                {"text": text, "stars": SCORES[place]} for text, place in texts[part::5]])
    sources = [files_source(name, tmp_path / name / "*", meta_fields=["stars"]) for name in ("web", "books")]
    sources[0]["keep"] = {"by": "stars", "share": share}
    config = write_config(tmp_path, sources, shard_mb=0.0005, validation_share=0.2, keep_dropped=True)
    texts = best([one for part in range(5) for one in web[part::5]], share)
    for rule in ("hash", "tail"):
        sources = finished(config, f"shard.validation_rule={rule}", name=rule).counts["sources"]
        assert sum(sources["web"]["text_bytes"].values()) == sum(map(len, texts))
        assert sources["web"]["dropped"] == {"duplicate": 50, "low_score": 150 - len(texts), "empty": 0}
        assert sources["books"]["dropped"] == {"duplicate": 0, "low_score": 0, "empty": 0}
        low = [(one["text"], one["reason"]) for one in dropped(config, rule)]
        assert sorted(low) == [(text, f"below the best {100 * share:g}% by stars")
                               for text in sorted({text for text, _ in web} - texts)]
    kept = [document.text for split in ("train", "validation") for document in documents(config, split, "hash")]
    assert {text for text in kept if text.startswith("page")} == texts
    assert "are dropped, most as" not in capsys.readouterr().out
    bands = {"good": texts, "low": {text for text, _ in low}}  # sources of another run, which a mixture can weigh
    write_jsonl(tmp_path / "bands/good.jsonl", [{"text": text} for text in kept if text.startswith("page")])
    divided = write_config(tmp_path / "bands", [
        files_source("good", tmp_path / "bands/good.jsonl"),
        files_source("low", folder_of(config, "hash") / "dropped/*.jsonl")])
    assert not any(finished(divided).counts["dropped"].values())
    assert {name: {document.text for split in ("train", "validation") for document in documents(divided, split)
                   if document.source == name} for name in bands} == bands
    assert run(config, "launch.processes=3", "name=three") == 0
    assert hashes(folder_of(config, "three")) == hashes(folder_of(config, "hash"))


def test_a_score_that_no_document_has_is_refused(tmp_path, capsys):
    source = files_source("web", tmp_path / "f.txt", keep={"by": "stars", "share": 0.5})
    (tmp_path / "f.txt").write_text("a text")
    assert run(write_config(tmp_path, [source])) == 2
    assert "web keeps documents by stars, a field that its documents do not have" in capsys.readouterr().err
    model = {"kind": "classifier", "path": str(TWO), "label": "en", "name": "stars"}
    assert run(write_config(tmp_path, [source], filters=[model])) == 2
    assert "did you mean 'stars_score'?" in capsys.readouterr().err


@pytest.mark.parametrize("quantized", [None, {"qout": True}, {"qout": True, "qnorm": True}])
def test_a_part_of_a_model_is_refused(tmp_path, quantized):
    """fastText reads some parts of models without end. Complete models of every form are read."""
    path, text = tmp_path / "m.bin", tmp_path / "lines.txt"
    text.write_text("".join(f"__label__{number} word{number}\n" for number in range(300)))
    model = fasttext.train_supervised(str(text), dim=5, bucket=500, minCount=1, thread=1, verbose=0)
    if quantized is not None:
        model.quantize(str(text), **quantized)
    model.save_model(str(path))
    scored(path, "7")
    content = path.read_bytes()
    for size in (0, 50, 100, len(content) // 2, len(content) - 1):
        path = tmp_path / f"{size}.bin"
        path.write_bytes(content[:size])
        refused(UserError, "is no fastText model with labels: it does not begin or end as one does", scored, path)


def test_low_scores_are_dropped_with_the_score_and_the_histogram_is_reported(tmp_path):
    write_jsonl(tmp_path / "f.jsonl", [{"text": line} for line in LINES])
    config = write_config(tmp_path, [files_source("web", tmp_path / "f.jsonl")], validation_share=0.3,
                          keep_dropped=True, filters=[{"kind": "classifier", "path": str(TWO), "label": "en",
                                                       "min_score": 0.5}])
    manifest = finished(config)
    kept = [document for split in ("train", "validation") for document in documents(config, split)]
    low = dropped(config)
    assert len(kept) == len(low) / 2 == 10 and all(document.meta["classifier_score"] >= 0.5 for document in kept)
    assert all(own["meta"]["classifier_score"] < 0.5 and own["reason"] == "with a score below 0.5" for own in low)
    histogram = manifest.counts["cards"]["web"]["scores"]["classifier"].values()
    assert [sum(counts[what] for counts in histogram) for what in ("kept", "dropped")] == [10, 20]
    assert manifest.counts["filters"]["classifier"]["changed"] == 0
    assert "| web | classifier | 0.95 |" in report(tmp_path, manifest.counts)


def test_a_model_of_one_s_own_is_made_and_measured(tmp_path, capsys):
    """Equal documents give equal bytes, in any files, also where they hold a label. The scores that are printed let no
    more bad documents pass than they are to."""
    rng = random.Random(1)
    for kind, words in (("good", "sun sea sky and the of it"), ("bad", "mud fog rat and the of it")):
        texts = [f"{' '.join(rng.choices(words.split(), k=30))}\n__label__good" for _ in range(300)]
        for name, own in (("all/f", texts), ("1", texts[:70]), ("2", texts[70:])):
            write_jsonl(tmp_path / kind / f"{name}.jsonl", [{"body": text} for text in own])
    options = "--text-field", "body"
    output = printed(capsys, main, "train", "--good", tmp_path / "good/all", "--bad", tmp_path / "bad/all", "--out",
                     tmp_path / "new/one.bin", *options)
    again = ["train", *(part for kind in ("good", "bad") for part in (
        f"--{kind}", tmp_path / kind / "1.jsonl", tmp_path / kind / "2.jsonl")), "--out", tmp_path / "two.bin"]
    printed(capsys, main, *again, *options)
    assert sha256_file(tmp_path / "new/one.bin") == sha256_file(tmp_path / "two.bin")
    assert "accuracy 100.0% at a score of 0.5" in output
    shares = [float(share) for share in re.findall(r"([0-9.]+)%", output)[1::2]]
    assert shares[0] <= 1 < 5 < shares[1] <= 10 < 25 < shares[2] <= 30
    own = scored(tmp_path / "two.bin", "good")
    assert own.score("the sun and the sea") > 0.9 > 0.1 > own.score("the mud and the fog")
    assert "two.bin exists already" in printed(capsys, main, *again, expect=2)


def test_pages_are_read_as_shard_reads_them(tmp_path):
    write_jsonl(tmp_path / "f.jsonl", [{"html": "<html><p>A day at the sea."}] * 2)
    assert [*texts_of("good", [str(tmp_path / "f.jsonl")], "html")] == ["A day at the sea."] * 2


def test_too_few_documents_are_refused(tmp_path, capsys):
    write_jsonl(tmp_path / "f.jsonl", [{"text": line} for line in LINES])
    assert "too few good and bad documents" in printed(
        capsys, main, "train", "--good", tmp_path / "f.jsonl", "--bad", tmp_path / "f.jsonl", "--out",
        tmp_path / "m.bin", expect=2)
    assert [*tmp_path.iterdir()] == [tmp_path / "f.jsonl"]
