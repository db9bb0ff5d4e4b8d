"""The fast encoder gives the reference's ids, or the gate says that it does not."""

from types import SimpleNamespace

import numpy as np
import pytest

from drover.pipeline.tokenization import tokenizer as tokenizers
from drover.pipeline.tokenization.checking import compared
from drover.pipeline.tokenization.conversion import open_tokenizer
from drover.pipeline.tokenization.files import copy_hugging_face, write_record
from drover.pipeline.tokenization.tokenizer import MAX_PART, FastEncoder, byte_of_character, joined, odd_strings
from tests.tokenization.conftest import ODD_TEXTS, with_special

pytest.importorskip("fastokens")
FAST = ("bpe", "tiktoken", "huggingface", "byte")


@pytest.mark.parametrize("kind", FAST)
def test_ids_are_those_of_the_reference_and_the_gate_lets_it_through(vocabularies, folders, texts, kind):
    """Also of a text so long that the reference cuts it. The gate's own strings are of all scripts."""
    vocabulary, encoder = vocabularies[kind], FastEncoder(vocabularies[kind], folders[kind])
    long = "0123456789 and so on, " * (MAX_PART // 15) + "x" * 60_000
    flat = [*texts, long, *ODD_TEXTS]
    ids, offsets = encoder.encode_flat(flat)
    wanted, at = vocabulary.encode_flat(flat)
    assert np.array_equal(ids, wanted) and np.array_equal(offsets, at) and len(encoder.encode_flat([])[0]) == 0
    ids, _ = encoder.encode_flat([f"a{name}b" for name in vocabulary.special_tokens])
    assert not vocabulary.special_ids & set(ids.tolist()) and len(ids), "names of special tokens stay text"
    odd = list(odd_strings(vocabulary))
    assert len(odd) > 6000 and odd == list(odd_strings(vocabulary)), "always the same ones"
    assert all(any(name in text for text in odd) for name in vocabulary.special_tokens)
    assert compared(vocabulary, folders[kind], folders[kind], []) == {"texts": len(odd), "problem": ""}


def test_added_tokens_match_in_texts_and_special_tokens_do_not(tmp_path, byte_level):
    from tokenizers import AddedToken
    ready = with_special(byte_level, "<s>", "</s>")
    ready.add_tokens([AddedToken("->", normalized=False), AddedToken("lstrip", lstrip=True, normalized=False)])
    path = tmp_path / "tokenizer.json"
    ready.save(str(path))
    copy_hugging_face(path, [], tmp_path / "hf")
    vocabulary = open_tokenizer("huggingface", path)
    write_record(tmp_path, vocabulary)
    assert not compared(vocabulary, tmp_path, tmp_path, [])["problem"]
    texts = ["def f(x) -> int:", " lstrip(->)<s>"]
    ids, _ = FastEncoder(vocabulary, tmp_path).encode_flat(texts)
    assert ids.tolist() == [token for text in texts for token in vocabulary.encode(text)]


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
