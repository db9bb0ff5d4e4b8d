"""Vocabularies from files: the record, ready tokenizers and what is wrong with some of them."""

import json
import shutil
from types import SimpleNamespace

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import write_json
from drover.pipeline.tokenization.files import input_files, vocabulary_record
from drover.pipeline.tokenization.ready import open_tokenizer
from drover.pipeline.tokenization.tokenizer import load_tokenizer
from tests.refusal import refused, table
from tests.tokenization.conftest import KINDS, ODD_TEXTS, rank_lines, with_special


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_folder_loads_back_as_the_vocabulary_it_was_written_from(folders, vocabularies, kind):
    loaded, vocabulary = load_tokenizer(folders[kind]), vocabularies[kind]
    assert [loaded.encode(text) for text in ODD_TEXTS] == [vocabulary.encode(text) for text in ODD_TEXTS]
    assert loaded.special_tokens == vocabulary.special_tokens and loaded.bounds == vocabulary.bounds
    assert vocabulary_record(folders[kind])["size"] == vocabulary.size


def test_another_file_than_the_recorded_one_is_refused(folders, tmp_path):
    place = shutil.copytree(folders["bpe"], tmp_path / "bpe")
    (place / "hf/tokenizer.json").write_bytes((folders["unigram"] / "hf/tokenizer.json").read_bytes())
    refused(UserError, r"not the file that .*vocabulary.json was written for", load_tokenizer, place)
    (place / "hf/tokenizer.json").unlink()
    refused(UserError, "missing", load_tokenizer, place)
    (place / "vocabulary.json").unlink()
    refused(UserError, "--stage tokenizer", load_tokenizer, place)


def test_the_settings_beside_a_ready_tokenizer_are_inputs(tmp_path):
    """As it is itself, of any kind: tests/stages/test_tokenizer.py."""
    path, beside = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    beside.write_text("{}")
    config = SimpleNamespace(tokenizer=SimpleNamespace(kind="huggingface", path=str(path)))
    assert input_files(config) == [("tokenizer", path), ("tokenizer_config", beside)]


@pytest.mark.parametrize(("line", "message"), [
    (b"no base64! 0", ":257: not a line"), (b"QUJD", ":257: not a line"), (b"QUJD 300", "do not run from 0 to 256")])
def test_a_broken_rank_file_names_the_line(tmp_path, line, message):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(rank_lines(bytes([value]) for value in range(256)) + line)
    refused(UserError, message, open_tokenizer, "tiktoken", path)


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken", "huggingface"])
def test_a_file_of_another_kind_is_named(tmp_path, kind):
    path = tmp_path / "file"
    path.write_text("{}\n")
    refused(UserError, str(path), open_tokenizer, kind, path)


@pytest.mark.parametrize("name, token", [("a far one", 1_500_000_000), ("a far one", 2**32 - 1), ("a", 40_000_000)])
def test_a_token_far_beyond_the_others_is_refused_before_it_takes_memory(tmp_path, byte_level, name, token):
    content = json.loads(byte_level.to_str())
    content["model"]["vocab"][name] = token
    write_json(tmp_path / "tokenizer.json", content)
    refused(UserError, f"'{name}' has the id {token:,}: a model would need", open_tokenizer, "huggingface",
            tmp_path / "tokenizer.json")


@pytest.mark.parametrize(("tokens", "settings", "bounds"), [*table("""
    <s> </s> ->  -> <s> </s>
    <|endoftext|> ->  -> <|endoftext|> <|endoftext|>
    <a> <z> <s> </s> -> {"bos_token": "<a>", "eos_token": {"content": "<z>"}} -> <a> <z>
    <|endoftext|> <|im_start|> -> {"bos_token": null, "eos_token": "<|endoftext|>"} -> <|endoftext|> <|endoftext|>
    """, str.split, str, lambda text: tuple(text.split())),
    (["</s>"], "", None)])
def test_bos_and_eos_are_known_or_the_error_names_what_to_add(tmp_path, byte_level, tokens, settings, bounds):
    path = tmp_path / "tokenizer.json"
    with_special(byte_level, *tokens).save(str(path))
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(settings)
    if bounds:
        assert open_tokenizer("huggingface", path).bounds == bounds
    else:
        refused(UserError, r"no token that is known as BOS, .*tokenizer_config.json", open_tokenizer, "huggingface",
                path)
