"""The tokenizer stage as users run it: odd text, every kind, equal outputs on every run, gates that stop it."""

import shutil

import pytest

import drover.pipeline.tokenizer as stage
from drover.pipeline.core.errors import installed_version
from drover.pipeline.core.files import read_json
from drover.pipeline.data.text_shards import shard_records
from drover.pipeline.tokenization.tokenizer import NAME, load_tokenizer
from tests.conftest import run_stage, write_config
from tests.data.source_files import write_jsonl
from tests.stages.conftest import halves
from tests.stages.test_shard import files_source
from tests.stages.training import copy_run, manifest_of
from tests.tokenization.conftest import ODD_TEXTS, byte_level, chunks, files, texts, vocabularies, with_special  # noqa: F401


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, corpus):
    """Config of a run whose shard stage is done, over the corpus and odd texts, a third of them held out."""
    folder = tmp_path_factory.mktemp("sharded")
    write_jsonl(folder / "odd.jsonl", ({"text": f"{text} {number}"} for number, text in enumerate(ODD_TEXTS * 8)))
    sources = [files_source("code", corpus / "*.txt"), files_source("odd", folder / "odd.jsonl")]
    config = write_config(folder, corpus, shard={"validation_share": 0.3, "sources": sources})
    run_stage("shard", config)
    return config


@pytest.fixture
def copy(sharded, tmp_path):
    """The same run in a folder of its own."""
    return copy_run(sharded, tmp_path)


def stage_folder(config):
    return config.parent / "runs/mini/tokenizer"


def test_sentencepiece_is_trained_proved_and_reported(run, copy):
    message = run("tokenizer", copy).out
    folder = stage_folder(copy)
    manifest, shard = manifest_of(copy, "tokenizer"), manifest_of(copy, "shard").counts
    assert len(manifest.outputs) == 5 and (folder / "train.log").stat().st_size > 0
    counts, report = manifest.counts, read_json(folder / "report.json")
    assert counts["vocab_size"] == 768 and counts["trained_on"]["nul_characters"] > 0
    assert report["pieces"] == 768 - 1 - 256 - 256 > report["unused_pieces"] >= 0
    result = report["sources"]["odd"]
    assert result["literal_marks"] > 0 and result["fallback_tokens"] > 0
    assert counts["trained_on"]["text_bytes"] + counts["trained_on"]["nul_characters"] == shard["text_bytes"]["train"]
    marks, kept = shard["documents_with_u2581"], shard["train"] + shard["validation"]
    assert counts["documents_with_u2581_as_space"] == report["marks_as_spaces"] == marks > result["literal_marks"]
    assert installed_version(NAME) is None or not counts["fast_encoder"]["problem"]
    assert f"{marks} of {kept} documents have the character U+2581 (\u2581)" in message


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_small_vocabularies(run, copy, kind):
    """They have nothing to tell of U+2581."""
    message, folder = run("tokenizer", copy, f"tokenizer.kind={kind}").out, stage_folder(copy)
    vocabulary = load_tokenizer(folder)
    assert "U+2581" not in message and manifest_of(copy, "tokenizer").counts["documents_with_u2581_as_space"] == 0
    assert vocabulary.kind == kind and vocabulary.size % 128 == 0
    assert (read_json(folder / "report.json")["total"]["bytes_per_token"] == 1) == (kind == "byte")


@pytest.mark.parametrize(("name", "kind"), [("tiktoken", "tiktoken"), ("bpe", "sentencepiece")])
def test_ready_tokenizers_are_taken(run, copy, files, vocabularies, name, kind):  # noqa: F811
    run("tokenizer", copy, f"tokenizer.kind={kind}", f"tokenizer.path={files[name]}")
    assert load_tokenizer(stage_folder(copy)).sha256 == vocabularies[name].sha256
    elsewhere = shutil.copyfile(files[name], copy.parent / "moved")
    again = run("tokenizer", copy, f"tokenizer.kind={kind}", f"tokenizer.path={elsewhere}").out
    assert "up to date" in again  # its content counts, not its place


def test_what_cannot_be_made_is_named(run, copy, tmp_path, byte_level):  # noqa: F811
    """And a tokenizer that loses text is not committed."""
    from tokenizers import normalizers
    lossy = with_special(byte_level, "<s>", "</s>")
    lossy.normalizer = normalizers.NFKC()
    lossy.save(str(tmp_path / "tokenizer.json"))
    for settings, message in (
            (["tokenizer.kind=huggingface", f"tokenizer.path={tmp_path}/tokenizer.json"], "The tokenizer loses text"),
            (["tokenizer.kind=tiktoken", f"tokenizer.path={tmp_path}/none.model"],
             f"{tmp_path}/none.model cannot be read"),
            (["tokenizer.kind=bpe", "tokenizer.path=/nowhere/tokenizer.model"],
             "a file of ranks like Llama 3's is of kind tiktoken")):
        assert message in run("tokenizer", copy, "--force", *settings, expect=2).err
        assert manifest_of(copy, "tokenizer") is None


def test_of_a_large_corpus_only_a_sample_is_read(run, tmp_path, corpus, monkeypatch):
    """Two sources of many small shards: the vocabulary is trained on some, and checked on some validation text."""
    many = write_config(tmp_path, corpus, shard={"shard_mb": 0.01, "validation_share": 0.3, "sources": halves(corpus)})
    run_stage("shard", many)
    read, honest, shard = [], stage.read_texts, manifest_of(many, "shard")
    monkeypatch.setattr(stage, "read_texts",
                        lambda folder, record, size: read.append(record) or honest(folder, record, size))
    full, records = shard.counts["text_bytes"]["train"], shard_records(shard, "train")
    settings = [f"tokenizer.train_mb={full / 10e6}", "tokenizer.vocab_size=640", "tokenizer.check_mb=0.02",
                "tokenizer.document_characters=500"]
    run("tokenizer", many, *settings)
    made = manifest_of(many, "tokenizer")
    sample = made.counts["trained_on"]
    assert 0 < sample["shards"] == len(read) < sample["of_shards"] == len(records)
    assert sample["read_bytes"] == sum(record["text_bytes"] for record in read) < 0.5 * full
    assert 0 < sample["text_bytes"] <= 2 * 500 * sum(record["docs"] for record in read)
    assert {record["source"] for record in read} == {"code", "more"}
    run_stage("tokenizer", many, "--force", *settings)
    assert manifest_of(many, "tokenizer").digest == made.digest
