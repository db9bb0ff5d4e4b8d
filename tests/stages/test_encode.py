"""The encode stage as users run it: documents come back, counts agree, kills and process counts leave no trace."""

import numpy as np
import pytest
from tokenizers import models

from drover.pipeline.config.data import EncodeConfig
from drover.pipeline.contract import stage_work
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_json
from drover.pipeline.data.text_shards import SPLITS, read_shard, shard_records
from drover.pipeline.encode import chosen_dtype, prove
from drover.pipeline.tokenization import tokenizer as tokenizers
from drover.pipeline.tokenization.conversion import LLAMA3_PATTERN, byte_level_tokenizer
from drover.pipeline.tokenization.tokenizer import (
    FastEncoder,
    Tokenizer,
    byte_of_character,
    joined,
    load_tokenizer,
    reads_back,
)
from drover.tools.verify import verify
from tests.conftest import run_stage
from tests.refusal import refused, table
from tests.stages.training import copy_run, manifest_of
from tests.token_shards import shards_in


def run_folder(config):
    return config.parent / "runs/mini"


@pytest.fixture
def copy(encoded, tmp_path):
    """The finished run in a folder of its own."""
    return copy_run(encoded, tmp_path)


def test_every_document_comes_back_from_its_tokens_and_counts_are_those_of_the_text(encoded):
    run = run_folder(encoded)
    vocabulary = load_tokenizer(run / "tokenizer")
    bounds = vocabulary.bos_id, vocabulary.eos_id
    text, tokens = manifest_of(encoded, "shard"), manifest_of(encoded, "encode")
    for split in SPLITS:
        records = sorted(shard_records(text, split), key=lambda record: record["path"])
        for source, token_shard in zip(records, shards_in(run / "encode", tokens.outputs, split), strict=True):
            [record] = [record for record in tokens.outputs if record["path"] == token_shard.record["path"]]
            assert (record["input"], record["input_sha256"]) == (source["path"], source["sha256"])
            for number, document in enumerate(read_shard(run / "shard", source)):
                first, *ids, last = token_shard.document_tokens(number).tolist()
                assert (first, last) == bounds and ids == vocabulary.encode(document.text)
                assert reads_back(document.text, vocabulary.decode(ids))
                assert token_shard.document_key(number) == document.key
                assert token_shard.document_bytes(number) == len(document.text.encode())
        own = tokens.counts["splits"][split]["code"]
        assert own["docs"] == text.counts["sources"]["code"][split]
        assert own["text_bytes"] == text.counts["sources"]["code"]["text_bytes"][split]


def test_the_bytes_do_not_depend_on_the_number_of_processes_and_the_ids_not_on_their_type(run, copy, encoded):
    before = manifest_of(copy, "encode").digest
    for again in (run, run_stage):
        again("encode", copy, "--force")
        assert manifest_of(copy, "encode").digest == before
    assert "up to date" in run("encode", copy).out
    run("encode", copy, "--force", "encode.dtype=uint32")
    wide, narrow = (shards_in(run_folder(config) / "encode", manifest_of(config, "encode").outputs, "train")
                    for config in (copy, encoded))
    for two, one in zip(wide, narrow, strict=True):
        assert two.dtype == np.uint32 and (two.tokens(0, two.token_count) == one.tokens(0, one.token_count)).all()


def test_too_narrow_a_type_is_refused_with_the_numbers():
    assert chosen_dtype(EncodeConfig(), 65536) == chosen_dtype(EncodeConfig(dtype="uint16"), 512) == "uint16"
    assert chosen_dtype(EncodeConfig(), 65664) == chosen_dtype(EncodeConfig(dtype="uint32"), 512) == "uint32"
    refused(UserError, "up to 65535, but the vocabulary has 128256", chosen_dtype, EncodeConfig(dtype="uint16"), 128256)


@pytest.mark.parametrize(("position", "value", "problem"), table("""
    0 -> 7 -> BOS and EOS are not around each document
    5 -> 1 -> or are inside of one
    3 -> 60000 -> the id 60000 is outside the vocabulary of 768
    4 -> 600 -> does not decode to its text""", int, int))
def test_wrong_tokens_are_found_before_they_are_committed(copy, position, value, problem):
    run = run_folder(copy)
    vocabulary, record = load_tokenizer(run / "tokenizer"), manifest_of(copy, "encode").outputs[0]
    source = shard_records(manifest_of(copy, "shard"), "train")[0]
    path, proved = run / "encode" / record["path"], {0: (next(read_shard(run / "shard", source)).text, np.empty(0))}
    prove(path, record, source, vocabulary, proved)
    tokens = np.memmap(path, "uint16", "r+", record["data_offset"], record["tokens"])
    tokens[position] = value
    refused(UserError, problem, prove, path, record, source, vocabulary, proved)


def arrows(config):
    return {path.relative_to(run_folder(config)): path.read_bytes()
            for path in (run_folder(config) / "encode").rglob("*.arrow")}


def encoders(config):
    return manifest_of(config, "encode").counts["encoders"]


def other_ids(text, vocabulary):
    """Ids that decode to the text and are not the vocabulary's: its first character spelled in bytes."""
    first = {vocabulary.token_bytes(token): token for token in vocabulary.byte_fallback_ids}
    return [*(first[bytes([value])] for value in text[0].encode()), *vocabulary.encode(text[1:])]


def test_both_encoders_make_the_same_bytes_and_one_ends_what_the_other_began(run, copy):
    pytest.importorskip("fastokens")
    message, folder = run("encode", copy, "--force", "encode.encoder=fastokens").out, run_folder(copy) / "encode"
    full, right = manifest_of(copy, "encode"), arrows(copy)
    assert "encodes: equal ids on" in message
    assert "up to date" in run("encode", copy, "encode.encoder=reference").out  # it decides nothing
    message = run("encode", copy, "--force", "encode.encoder=reference").out
    assert "the exported tokenizer encodes" in message and arrows(copy) == right
    (folder / "manifest.json").unlink()
    [ledger] = (folder / "units/encode").iterdir()
    first, *_ = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(first)
    run("encode", copy)
    assert manifest_of(copy, "encode").digest == full.digest


def test_an_encoder_that_goes_wrong_after_the_gate_is_replaced_in_each_shard(run, copy, monkeypatch):
    """In the documents of one shard it gives ids that decode to the text: no round trip would tell."""
    pytest.importorskip("fastokens")
    right, shards, honest = arrows(copy), run_folder(copy) / "shard", FastEncoder.encode_flat
    reference = load_tokenizer(run_folder(copy) / "tokenizer")
    record = shard_records(manifest_of(copy, "shard"), "train")[1]
    bad, name = {document.text for document in read_shard(shards, record)}, record["path"].replace(".tar", ".arrow")

    def wrong(self, texts):
        result = [np.array(other_ids(text, reference), np.uint32) if text in bad else honest(self, [text])[0]
                 for text in texts]
        assert all(reads_back(text, reference.decode(ids)) for text, ids in zip(texts, result, strict=True))
        return joined(result)

    monkeypatch.setattr(FastEncoder, "encode_flat", wrong)
    logged = run("encode", copy, "--force").out
    assert f"in {name}" in logged and "WARNING: fastokens gave other ids for the document 0" in logged
    assert arrows(copy) == right and encoders(copy)["fallback_shards"] == 1


def test_a_library_that_gives_other_ids_or_is_not_installed_is_left_to_the_reference(run, copy, monkeypatch):
    right = arrows(copy)
    pytest.importorskip("fastokens")
    monkeypatch.setattr(stage_work, "software_versions", lambda: {"fastokens": "9.9"})  # the tokenizer stage had others
    for name, value, message in (("_opened", lambda path: None, "cannot be used: AttributeError"),
                              ("installed_version", lambda package: None, "not installed (`pip install")):
        monkeypatch.setattr(tokenizers, name, value)
        logged = run("encode", copy, "--force").out
        assert "the exported tokenizer encodes; fastokens" in logged and message in logged and arrows(copy) == right
        assert encoders(copy) == {"encoder": "reference", "version": None, "fallback_shards": 0}
        assert message in run("encode", copy, "--force", "encode.encoder=fastokens", expect=2).err


def test_a_reference_that_disagrees_with_itself_is_named(run, copy, monkeypatch):
    honest = Tokenizer.encode_flat

    def encode_flat(self, texts):
        ids, offsets = honest(self, texts)
        return (ids[::-1] if len(texts) == 1 else ids), offsets
    monkeypatch.setattr(Tokenizer, "encode_flat", encode_flat)
    error = run("encode", copy, "--force", "encode.encoder=reference", expect=2).err
    assert ".tar: the tokenizer's own batches give other ids for the document 0" in error
    assert "it does not depend on encode.encoder" in error


def test_one_token_may_be_bos_and_eos(run, copy, tmp_path):
    """As in the vocabularies of GPT-2 and Qwen, of which some name it as the unknown token too."""
    letters, end = sorted(byte_of_character()), "<|endoftext|>"
    vocab = {letter: number for number, letter in enumerate([*letters, end])}
    ready = byte_level_tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=end), LLAMA3_PATTERN)
    ready.add_special_tokens([end])
    ready.save(str(tmp_path / "tokenizer.json"))
    settings = ["tokenizer.kind=huggingface", f"tokenizer.path={tmp_path}/tokenizer.json", "--force"]
    run("tokenizer", copy, *settings)
    folder = run_folder(copy)
    assert "unknown ids" not in run("encode", copy, *settings).out and not verify(folder, documents=True).problems
    record, vocabulary = manifest_of(copy, "encode").outputs[0], read_json(folder / "tokenizer/vocabulary.json")
    assert vocabulary["bos_id"] == vocabulary["eos_id"] == len(letters) and record["unknown_tokens"] == 0
