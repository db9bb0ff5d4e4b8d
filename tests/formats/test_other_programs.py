"""The vocabulary of a GGUF file, as llama.cpp's converter reads it from an export, where its library is installed."""

import json

import pytest

from tests.tiny_models import TOKENIZER_OF_BYTES, for_tokenizer, write_huggingface
from tests.tools.test_chat import TEMPLATE


def test_the_vocabulary_of_a_gguf_file(tmp_path):
    exported = write_huggingface(tmp_path / "hf", for_tokenizer(TOKENIZER_OF_BYTES), TOKENIZER_OF_BYTES)
    (exported / "chat_template.jinja").write_text(TEMPLATE)
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    vocabulary = gguf.SpecialVocab(exported, load_merges=True)
    assert vocabulary.special_token_ids["bos"] == TOKENIZER_OF_BYTES.bos_id
    assert vocabulary.special_token_ids["eos"] == TOKENIZER_OF_BYTES.eos_id
    assert vocabulary.add_special_token["bos"] is True and not vocabulary.add_special_token.get("eos")
    assert vocabulary.chat_template == TEMPLATE

    known = list(gguf.BpeVocab(exported).all_tokens())
    for token in json.loads((exported / "tokenizer.json").read_text())["added_tokens"]:
        text, _, kind = known[token["id"]]  # llama.cpp knows the end of a turn by its name
        assert (text.decode(), kind) == (token["content"], gguf.TokenType.CONTROL)
