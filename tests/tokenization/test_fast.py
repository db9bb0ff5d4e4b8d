"""The fast encoder gives the reference's ids, or the gate says that it does not."""

from types import SimpleNamespace

import numpy as np
import pytest

from drover.pipeline.config.data import TokenizerConfig
from drover.pipeline.tokenization import tokenizer as tokenizers
from drover.pipeline.tokenization.checking import compared
from drover.pipeline.tokenization.conversion import open_tokenizer, write_hugging_face
from drover.pipeline.tokenization.files import write_record
from drover.pipeline.tokenization.tokenizer import FastEncoder, byte_of_character, joined, odd_strings
from drover.pipeline.tokenization.training import train_sentencepiece
from tests.tokenization.conftest import ODD_TEXTS

pytest.importorskip("fastokens")
FAST = ("bpe", "tiktoken", "huggingface", "byte", "char")


@pytest.mark.parametrize("kind", FAST)
def test_ids_are_those_of_the_reference_and_the_gate_lets_it_through(vocabularies, folders, texts, kind):
    """Also of a very long text. The gate's own strings are of all scripts."""
    vocabulary, encoder = vocabularies[kind], FastEncoder(vocabularies[kind], folders[kind])
    long = "0123456789 and so on, " * 27_000 + "x" * 60_000 + " " * 60_000
    flat = [*texts, long, *ODD_TEXTS]
    ids, offsets = encoder.encode_flat(flat)
    wanted, at = vocabulary.encode_flat(flat)
    assert np.array_equal(ids, wanted) and np.array_equal(offsets, at) and len(encoder.encode_flat([])[0]) == 0
    odd = list(odd_strings(vocabulary))
    assert len(odd) > 6000 and odd == list(odd_strings(vocabulary)), "always the same ones"
    assert all(any(name in text for text in odd) for name in vocabulary.special_tokens)
    assert compared(vocabulary, folders[kind], folders[kind], []) == {"texts": len(odd), "problem": ""}


def test_names_of_special_tokens_are_text_where_the_vocabulary_lacks_their_bar(tmp_path, chunks):
    bare = [chunk.replace("|", "") for chunk in chunks]
    train_sentencepiece(bare, TokenizerConfig(vocab_size=1024), tmp_path / "tokenizer.model")
    vocabulary = open_tokenizer("sentencepiece", tmp_path / "tokenizer.model")
    write_hugging_face(vocabulary, tmp_path / "hf")
    write_record(tmp_path, vocabulary)
    odd = list(odd_strings(vocabulary))
    assert compared(vocabulary, tmp_path, tmp_path, []) == {"texts": len(odd), "problem": ""}


def test_a_vocabulary_that_the_library_refuses_is_left_to_the_reference(vocabularies, folders):
    assert compared(vocabularies["unigram"], folders["unigram"], folders["unigram"], [])["problem"]


def spelled_in_bytes(vocabulary, text, ids):
    letters = {value: vocabulary.backend.token_to_id(letter) for letter, value in byte_of_character().items()}
    return [letters[value] for value in text.encode()] if "\u2028" in text else ids


def panicking(vocabulary, text, ids):
    if "\0" in text:
        raise type("PanicException", (BaseException,), {})("called `Option::unwrap()` on a `None` value")
    return ids


@pytest.mark.parametrize(("wrong", "problem"), [
    (spelled_in_bytes, "other ids for"), (panicking, "PanicException: called `Option::unwrap()`"),
    (lambda vocabulary, text, ids: [vocabulary.eos_id, *ids] if "<|end_of_text|>" in text else ids,
     "it made BOS, EOS or an id outside")])
def test_a_wrong_encoder_does_not_come_through_the_gate(monkeypatch, vocabularies, folders, wrong, problem):
    """Wrong in ways that a round trip would not show, or only in one text in thousands."""
    vocabulary = vocabularies["tiktoken"]

    def encode_batch_flat(texts, *_):
        result = [np.array(wrong(vocabulary, text, vocabulary.encode(text)), np.uint32) for text in texts]
        return [own.tobytes() for own in joined(result)]
    monkeypatch.setattr(tokenizers, "_opened", lambda path: SimpleNamespace(encode_batch_flat=encode_batch_flat))
    result = compared(vocabulary, folders["tiktoken"], folders["tiktoken"], [])
    assert result["problem"].startswith("fastokens cannot be used: ") and problem in result["problem"]
