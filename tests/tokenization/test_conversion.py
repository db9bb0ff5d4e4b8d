"""Converted vocabularies give the ids of the library that their file is made for, or are refused."""

import random

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.tokenization.conversion import agreement, open_tokenizer, refuse_inexact
from drover.pipeline.tokenization.tokenizer import ODD
from tests.refusal import refused

CONVERTED = ("bpe", "unigram", "tiktoken")


def mutated(texts, count, length, seed=0):
    """Pieces of real texts with random characters in them."""
    draw, full = random.Random(seed), "".join(texts)
    strange = "".join(ODD)
    for _ in range(count):
        start = draw.randrange(len(full))
        piece = list(full[start:start + draw.randint(1, length)])
        for _ in range(draw.randint(0, 1 + len(piece) // 20)):
            piece[draw.randrange(len(piece))] = draw.choice(
                (draw.choice(strange), chr(draw.choice((draw.randrange(0xD800), draw.randrange(0xE000, 0x110000))))))
        yield "".join(piece)


@pytest.mark.parametrize("kind", CONVERTED)
@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.slow)])
def test_ids_are_those_of_the_library_on_real_odd_and_mutated_text(vocabularies, files, texts, kind, count):
    vocabulary, path = vocabularies[kind], files[kind]
    agrees = agreement(vocabulary, path)
    refuse_inexact(vocabulary, path)
    for text in [*texts, *mutated(texts, count, 200)]:
        assert agrees(text, vocabulary.encode(text)), text
    other = vocabularies["byte"].encode("some text")
    assert not agrees("some text", other)


def test_a_damaged_model_is_told_from_one_without_bos(trained_model):
    path = trained_model(text="ab \xe4d\n" * 50, hard_vocab_limit=False, bos_id=-1)
    refused(UserError, "has no BOS or no EOS piece", open_tokenizer, "sentencepiece", path)
    path = trained_model(text="ab \xe4d\n" * 50, hard_vocab_limit=False)
    path.write_bytes(path.read_bytes().replace("\xe4".encode(), b"\xff\xfe"))
    refused(UserError, "is damaged: a piece is not UTF-8.*Take it from its source again", open_tokenizer,
            "sentencepiece", path)


def test_names_with_characters_beyond_the_vocabulary_stay_text(tmp_path, trained_model):
    """A unigram model of `tokenizers` would rather take the id of `<s>` than an unknown character."""
    path = trained_model(model_type="unigram", byte_fallback=True, hard_vocab_limit=False, text="ab cd\n" * 50)
    vocabulary = open_tokenizer("sentencepiece", path)
    refuse_inexact(vocabulary, path)
    for name in vocabulary.special_tokens:
        ids = vocabulary.encode(f"a{name}b")
        assert not vocabulary.special_ids & set(ids) and vocabulary.decode(ids) == f"a{name}b"


@pytest.fixture
def trained_model(tmp_path, texts):
    """Trains a sentencepiece model as others would, and returns its path."""
    def train(text=None, **settings):
        from sentencepiece import SentencePieceTrainer
        path = tmp_path / "ready.model"
        with open(path, "wb") as file, open(tmp_path / "log", "w") as log:
            SentencePieceTrainer.train(**{
                "sentence_iterator": iter((text or texts[0]).splitlines()), "model_writer": file, "vocab_size": 400,
                "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False, "logstream": log, "minloglevel": 2, **settings})
        return path
    return train


@pytest.mark.parametrize("settings", [
    {"add_dummy_prefix": True}, {"add_dummy_prefix": False, "user_defined_symbols": ["<ab>", "<a"]},
    {"model_type": "unigram"}, {"byte_fallback": False}])
def test_ready_models_that_do_not_normalize_are_converted(trained_model, settings):
    """Llama 2's put a space before a text; their own decoding takes it away again."""
    path = trained_model(**settings)
    vocabulary = open_tokenizer("sentencepiece", path)
    refuse_inexact(vocabulary, path)
    assert vocabulary.bounds == ("<s>", "</s>") and vocabulary.used > 256
    assert vocabulary.decode(vocabulary.encode(" two  words")) == " two  words"


@pytest.mark.parametrize("settings", [
    {"normalization_rule_name": "nmt_nfkc"}, {"remove_extra_whitespaces": True},
    {"model_type": "word", "hard_vocab_limit": False}, {"user_defined_symbols": ["<tool>"], "add_dummy_prefix": True}],
    ids=lambda settings: next(iter(settings)))
def test_models_that_cannot_be_converted_exactly_are_refused(trained_model, settings):
    path = trained_model(**settings)
    refused(UserError, "cannot be converted exactly: sentencepiece itself gives other ids for .* published with it",
            lambda: refuse_inexact(open_tokenizer("sentencepiece", path), path))
