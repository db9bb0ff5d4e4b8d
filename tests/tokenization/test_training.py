"""Which text vocabularies are trained on, and training: nothing left out in silence, the same bytes every time, errors
that say what to change."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover.pipeline.config.data import TokenizerConfig
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.text_shards import text_bytes
from drover.pipeline.tokenization import training
from drover.pipeline.tokenization.conversion import open_tokenizer, read_ranks
from drover.pipeline.tokenization.tokenizer import SPECIAL_TOKENS
from drover.pipeline.tokenization.training import (
    COVER,
    Sample,
    chunked,
    sampled,
    train_bpe,
    train_sentencepiece,
    training_shards,
)
from tests.conftest import run_python
from tests.refusal import refused

MB = 1_000_000


def shards(**sources):
    """Records of so many shards of 64 MB each, by source."""
    return [{"path": f"train/{source}-{number:05d}.tar", "source": source, "text_bytes": 64 * MB,
             "sha256": hashlib.sha256(f"{source}{number}".encode()).hexdigest()}
            for source, count in sources.items() for number in range(count)]


def test_what_is_read_does_not_grow_with_the_corpus():
    """In the corpus's order, evenly, and of a small source one shard at least."""
    records = shards(web=18_000, poems=1)
    chosen, shares = training_shards(records, 2000 * MB)
    assert COVER * 2000 * MB <= text_bytes(chosen) < COVER * 2000 * MB + 2 * 64 * MB
    [poem] = [record for record in chosen if record["source"] == "poems"]
    assert shares["poems"] * text_bytes([poem]) == pytest.approx(2000 * MB / 18_001)
    places = [records.index(record) for record in chosen]
    assert places == sorted(places)
    assert min(sum(low <= place < low + 4500 for place in places) for low in range(0, 18_000, 4500)) > len(places) / 10


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
    first = Sample()
    chosen = list(sampled(own, 0.25, first))
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
    train_sentencepiece(chunks, TokenizerConfig(vocab_size=size, algorithm=algorithm), path)
    assert pieces(path) == pieces(files[algorithm])
    assert threads or path.read_bytes() == files[algorithm].read_bytes()


def test_byte_level_bpe_is_a_file_of_ranks_that_depends_on_no_thread_or_hash_seed(chunks, tmp_path):
    path = tmp_path / "tokenizer.model"
    train_bpe(iter(chunks), TokenizerConfig(kind="bpe", vocab_size=1152), path)
    vocabulary, ranks = open_tokenizer("bpe", path), read_ranks(path)
    assert vocabulary.kind == "tiktoken" and vocabulary.size == vocabulary.used == 1152
    assert len(ranks) == 1152 - len(SPECIAL_TOKENS) == vocabulary.bos_id
    assert {bytes([value]) for value in range(256)} == {token for token, rank in ranks.items() if rank < 256}
    (tmp_path / "chunks").write_bytes(repr(chunks).encode())
    code = ("import ast, sys; from pathlib import Path; from drover.pipeline.config.data import TokenizerConfig; "
            "from drover.pipeline.tokenization.training import train_bpe; "
            "train_bpe(ast.literal_eval(Path(sys.argv[1]).read_text()), TokenizerConfig(kind='bpe', vocab_size=1152), "
            "Path(sys.argv[2]))")
    again = tmp_path / "again.model"
    run_python("-c", code, tmp_path / "chunks", again, RAYON_NUM_THREADS="3", PYTHONHASHSEED="3")
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("train", "texts", "size", "message"), [
    (train_sentencepiece, ["hello world\n"] * 9, 4096, r"4096 is too large .* 5\d\d ids.* tokenizer.kind=byte"),
    (train_sentencepiece, ["".join(map(chr, range(0x4E00, 0x5E00)))], 640,
     r"vocab_size 640 is too small: 4609 ids are needed .* to 4736 or more, lower the second"),
    (train_sentencepiece, [], 640, "There is no text to train"),
    (train_bpe, [], 640, "supports 512 ids at most.* tokenizer.kind=byte at its end, or give more")])
def test_what_cannot_be_trained_says_what_to_change(tmp_path, train, texts, size, message):
    refused(UserError, message, train, texts, TokenizerConfig(vocab_size=size, character_coverage=1.0), tmp_path / "m")


@pytest.mark.parametrize("train", [train_sentencepiece, train_bpe])
def test_the_error_for_a_too_large_vocabulary_names_one_that_fits(tmp_path, texts, train):
    def of_size(size):
        train(texts[:3], TokenizerConfig(vocab_size=size), tmp_path / "m")
    message = refused(UserError, r"vocab_size 32768 is too large .*command with tokenizer.vocab_size=\d+ at its end",
                      of_size, 32768)
    size = int(message.split("tokenizer.vocab_size=")[1].split()[0])
    assert size % 128 == 0
    of_size(size)


@pytest.mark.parametrize("train", [train_sentencepiece, train_bpe])
def test_an_error_of_the_text_stays_what_it_is(tmp_path, train):
    def damaged():
        yield "some text\n"
        raise UserError("the shard is damaged")
    refused(UserError, "^the shard is damaged$", train, damaged(), TokenizerConfig(vocab_size=640), tmp_path / "m")
