"""Small vocabularies of every kind, trained on real text."""

import base64
import shutil

import pytest

from drover.pipeline.config.data import TokenizerConfig
from drover.pipeline.tokenization.conversion import (
    LLAMA3_PATTERN,
    byte_level_tokenizer,
    open_tokenizer,
    write_characters,
    write_hugging_face,
)
from drover.pipeline.tokenization.files import write_record
from drover.pipeline.tokenization.tokenizer import ODD, byte_of_character
from drover.pipeline.tokenization.training import chunked, train_sentencepiece

KINDS = ("bpe", "unigram", "tiktoken", "huggingface", "byte", "char")

ODD_TEXTS = [*ODD, "<|end_of_text|> and <|begin_of_text|><|eot_id|> in a text"]


def rank_lines(tokens):
    """A file of ranks as tiktoken reads it, of tokens in their order."""
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens))


@pytest.fixture(scope="session")
def texts(corpus):
    """The documents of the miniature corpus."""
    return [path.read_bytes().decode() for path in sorted(corpus.glob("*.txt"))]


@pytest.fixture(scope="session")
def chunks(texts):
    """The same in the pieces that vocabularies are trained on."""
    return [chunk for text in texts for chunk in chunked(text)]


@pytest.fixture(scope="session")
def byte_level(texts):
    """A byte-level BPE tokenizer, trained by the `tokenizers` library with Llama 3's pattern."""
    from tokenizers import models, trainers
    tokenizer = byte_level_tokenizer(models.BPE(), LLAMA3_PATTERN)
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=sorted(byte_of_character()), show_progress=False))
    return tokenizer


def with_special(byte_level, *tokens):
    """A copy of the tokenizer that has these special tokens, as ready ones come."""
    from tokenizers import Tokenizer
    ready = Tokenizer.from_str(byte_level.to_str())
    ready.add_special_tokens(list(tokens))
    return ready


@pytest.fixture(scope="session")
def files(tmp_path_factory, texts, chunks, byte_level):
    """A file of every kind of vocabulary."""
    folder = tmp_path_factory.mktemp("vocabularies")
    made = {name: folder / name / file for name, file in (
        ("bpe", "tokenizer.model"), ("unigram", "tokenizer.model"), ("tiktoken", "tokenizer.model"),
        ("huggingface", "tokenizer.json"), ("char", "characters.json"))}
    for path in made.values():
        path.parent.mkdir()
    for algorithm, size in (("bpe", 1024), ("unigram", 768)):
        train_sentencepiece(chunks, TokenizerConfig(vocab_size=size, algorithm=algorithm), made[algorithm])
    write_characters(made["char"], texts)
    of_character, ranks = byte_of_character(), byte_level.get_vocab()
    made["tiktoken"].write_bytes(rank_lines(bytes(map(of_character.__getitem__, token))
                                            for token in sorted(ranks, key=ranks.__getitem__)))
    ready = with_special(byte_level, "<s>", "</s>")
    ready.enable_truncation(8)
    ready.save(str(made["huggingface"]))
    return made


@pytest.fixture(scope="session")
def vocabularies(files):
    """A vocabulary of every kind, by the names of `KINDS`."""
    return {kind: open_tokenizer("sentencepiece" if kind in ("bpe", "unigram") else kind, files.get(kind))
            for kind in KINDS}


@pytest.fixture(scope="session")
def folders(tmp_path_factory, files, vocabularies):
    """What the tokenizer stage leaves of each kind: its file, its record and the export."""
    made = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, folder in made.items():
        if kind in files:
            shutil.copy(files[kind], folder)
        write_hugging_face(vocabularies[kind], folder / "hf")
        write_record(folder, vocabularies[kind])
    return made
