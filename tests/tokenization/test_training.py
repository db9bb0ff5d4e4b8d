"""Training: nothing left out in silence, the same bytes every time, errors that say what to change."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover.pipeline.config.data import TokenizerConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.tokenization import training
from drover.pipeline.tokenization.training import Sample, chunked, sampled, train_sentencepiece
from tests.refusal import refused
from tests.tokenization.conftest import largest_that_fits


@given(st.text("ab\n ü漢", max_size=200).map(lambda text: text * 97))
def test_chunks_are_the_text_in_small_pieces(text):
    chunks = list(chunked(text))
    assert "".join(chunks) == text
    assert all(0 < len(chunk) <= training.CHUNK_CHARACTERS for chunk in chunks)
    assert max((len(chunk.encode()) for chunk in chunks), default=0) <= training.MAX_SENTENCE_BYTES
    lines = list(chunked("a line of some length\n" * 1000))
    assert len(lines) == 6 and all(chunk.endswith("\n") for chunk in lines)


def test_a_sample_is_even_and_decided_by_keys():
    own = [(hashlib.sha256(str(number).encode()).hexdigest()[:32], f"document {number}\n" * 600)
           for number in range(400)]
    first, again = Sample(), Sample()
    chosen = list(sampled(own, 0.25, first))
    assert list(sampled(own, 0.25, again)) == chosen and again == first
    assert 0.2 < first.text_bytes / sum(len(text) for _, text in own) < 0.3 and first.chunks == len(chosen)
    one, other = (sum(map(len, sampled(half, 0.25, Sample()))) for half in (own[:200], own[200:]))
    assert one + other == first.text_bytes and 0.7 < one / other < 1.4


@pytest.mark.parametrize(("algorithm", "size", "threads"), [("bpe", 1024, None), ("unigram", 768, None),
                                                            ("bpe", 1024, 1)])
def test_training_again_gives_the_same_bytes_and_on_any_threads_the_same_pieces(files, chunks, tmp_path, monkeypatch,
                                                                                algorithm, size, threads):
    from sentencepiece import SentencePieceProcessor

    def pieces(path):
        processor = SentencePieceProcessor(model_file=str(path))
        return [(processor.id_to_piece(token), processor.get_score(token)) for token in range(len(processor))]

    monkeypatch.setattr(training, "THREADS", threads or training.THREADS)
    path = tmp_path / "again.model"
    train_sentencepiece(chunks, TokenizerConfig(vocab_size=size, algorithm=algorithm), path, tmp_path / "train.log")
    assert pieces(path) == pieces(files[algorithm])
    assert threads or path.read_bytes() == files[algorithm].read_bytes()


@pytest.mark.parametrize(("texts", "size", "message"), [
    (["hello world\n"] * 9, 4096, r"vocab_size 4096 is too large .* supports 5\d\d ids. Take tokenizer.kind=byte"),
    (["".join(map(chr, range(0x4E00, 0x5E00)))], 640,
     r"vocab_size 640 is too small: 4609 ids are needed .* to 4736 or more or lower .*0\.98 is the least"),
    ([], 640, "There is no text to train"),
])
def test_what_cannot_be_trained_says_what_to_change(tmp_path, texts, size, message):
    settings = TokenizerConfig(vocab_size=size, character_coverage=1.0)
    refused(UserError, message, train_sentencepiece, texts, settings, tmp_path / "m", tmp_path / "log")


def test_the_error_for_a_too_large_vocabulary_names_the_largest_that_fits(tmp_path, texts):
    largest_that_fits("", lambda size: train_sentencepiece(texts[:3], TokenizerConfig(vocab_size=size), tmp_path / "m",
                                                           tmp_path / "log"))
