"""Training a vocabulary on a sample of the text, from shards that are chosen by hash, never all of a large corpus: a
sentencepiece model, or byte-level BPE."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import atomic_file
from drover.pipeline.data.text_shards import TextRecord, by_hash, by_source, text_bytes
from drover.pipeline.tokenization.conversion import LLAMA3_PATTERN, byte_level_tokenizer, write_ranks
from drover.pipeline.tokenization.tokenizer import BOS, EOS, SIZE_MULTIPLE, SPECIAL_TOKENS, byte_of_character, padded

if TYPE_CHECKING:
    from drover.pipeline.config.data import TokenizerConfig

COVER = 4
"""Training text is sampled from shards with this many times as much text, so that the sample spreads over documents."""
CHUNK_CHARACTERS = 4096
MAX_SENTENCE_BYTES = 65536
THREADS = 16
"""A constant: the model file records it, and unigram's sums depend on it. It need not be the number of cores."""


def training_shards(records: Sequence[TextRecord], train_bytes: float) -> tuple[list[TextRecord], dict[str, float]]:
    """The shards from which `train_bytes` of training text are sampled, in the order of `records`, and by source the
    share of their text to take.

    All shards if the corpus is at most COVER times as large. Otherwise each source gets at least one shard, and as many
    as hold COVER times its proportion of the sample. So the amount that is read does not grow with the corpus.
    """
    total = max(1, text_bytes(records))
    chosen, shares = set[str](), {}
    for source, own in by_source(records).items():
        share, some = train_bytes / total, own
        if total > COVER * train_bytes:
            order, wanted = by_hash(own), train_bytes * text_bytes(own) / total
            covered = np.cumsum([record["text_bytes"] for record in order])
            some = order[:int(np.searchsorted(covered, COVER * wanted)) + 1]
            share = wanted / max(1, text_bytes(some))
        chosen.update(record["path"] for record in some)
        shares[source] = share
    return [record for record in records if record["path"] in chosen], shares


@dataclass
class Sample:
    """Counts of the text that a vocabulary was trained on, and of the shards that were read for it, out of how many."""

    chunks: int = 0
    text_bytes: int = 0
    nul_characters: int = 0
    shards: int = 0
    of_shards: int = 0
    read_bytes: int = 0


def chunked(text: str) -> Iterator[str]:
    """Cut a document into chunks of about 4 KB, at line ends if possible. Newlines are kept.

    sentencepiece drops "sentences" above its configured length, and its own file reader would remove newlines.
    """
    start = 0
    while len(text) - start > CHUNK_CHARACTERS:
        stop = text.rfind("\n", start, start + CHUNK_CHARACTERS) + 1 or start + CHUNK_CHARACTERS
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def sampled(documents: Iterable[tuple[str, str]], share: float, counts: Sample,
            most_characters: int | None = None) -> Iterator[str]:
    """Chunks of (key, text) documents, each kept with probability `share`, decided by a hash of key and position.

    So the sample is spread evenly, whatever the order of shards and the other documents. NUL characters, at which
    sentencepiece would drop the whole chunk, are removed and counted. Only the first `most_characters` of each document
    are used.
    """
    limit = int(min(share, 1.0) * 2**64)
    for key, text in documents:
        for index, chunk in enumerate(chunked(text[:most_characters])):
            if share < 1:
                name = f"0/{key}/{index}".encode()
                if int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >= limit:
                    continue
            counts.nul_characters += chunk.count("\0")
            chunk = chunk.replace("\0", "")
            counts.chunks += 1
            counts.text_bytes += len(chunk.encode())
            yield chunk


def train_sentencepiece(chunks: Iterable[str], settings: TokenizerConfig, path: Path) -> None:
    """Train a model on `chunks` and write it to `path`; the trainer's own messages go into train.log next to it.

    The same chunks give the same bytes, whatever the number of cores.

    Raises:
        UserError: the text does not support so large (or so small) a vocabulary.
    """
    from sentencepiece import SentencePieceTrainer
    model, problems = io.BytesIO(), list[Exception]()
    log = path.with_name("train.log")

    def given() -> Iterator[str]:
        try:
            yield from chunks
        except Exception as error:
            problems.append(error)  # of which the trainer would make another one
            raise
    with _standard_error_in(log):
        try:
            SentencePieceTrainer.train(
                sentence_iterator=given(), model_writer=model,
                model_type=settings.algorithm, vocab_size=settings.vocab_size,
                character_coverage=settings.character_coverage, split_digits=True,
                max_sentencepiece_length=16, byte_fallback=True,
                normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
                split_by_unicode_script=True, allow_whitespace_only_pieces=True,
                max_sentence_length=MAX_SENTENCE_BYTES, num_threads=THREADS,
                unk_id=0, bos_id=1, eos_id=2, pad_id=-1, bos_piece=BOS, eos_piece=EOS,
                control_symbols=list(SPECIAL_TOKENS[2:]),
                minloglevel=0)  # it holds for the whole process, and another call may have silenced the log
        except RuntimeError as error:
            raise (problems or [explained(error, settings, log)])[0] from None
    with atomic_file(path) as file:
        file.write(model.getvalue())


@contextmanager
def _standard_error_in(path: Path) -> Iterator[None]:
    """Redirect this process's standard error, C++ included, to a file.

    sentencepiece's own `logstream` redirects `sys.stderr`'s descriptor, which need not be the one that C++ writes to.
    """
    kept = os.dup(2)
    try:
        with open(path, "wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def train_bpe(chunks: Iterable[str], settings: TokenizerConfig, path: Path) -> None:
    """Train on `chunks` and write `base64 rank` lines to `path`: 256 bytes, then merged tokens in the order of merging,
    in all `settings.vocab_size` less the special ids. The library merges the most frequent pair first; ties go to the
    smaller ids. So the same chunks give the same file with any number of threads.

    Raises:
        UserError: the text does not support so large a vocabulary.
    """
    from tokenizers import models, trainers
    alphabet = byte_of_character()
    tokenizer = byte_level_tokenizer(models.BPE(), LLAMA3_PATTERN)
    wanted = settings.vocab_size - len(SPECIAL_TOKENS)
    tokenizer.train_from_iterator(chunks, trainers.BpeTrainer(
        vocab_size=wanted, initial_alphabet=sorted(alphabet), show_progress=False))
    result = sorted((token, bytes(alphabet[character] for character in name))
                   for name, token in tokenizer.get_vocab().items())
    if len(result) < wanted:
        raise too_large(settings, len(result) + len(SPECIAL_TOKENS))
    write_ranks(path, (token for _, token in result))


def too_large(settings: TokenizerConfig, ids: int) -> UserError:
    """The error for a vocabulary of which the text supports only so many ids."""
    largest = ids // SIZE_MULTIPLE * SIZE_MULTIPLE
    usual = min(largest, max(1024, settings.vocab_size // 16))  # one of all that occur would be learned by heart
    smaller = f"tokenizer.vocab_size={usual}" if largest >= 640 else "tokenizer.kind=byte"
    return UserError(f"tokenizer.vocab_size {settings.vocab_size} is too large for the training text, which supports "
                     f"{ids} ids at most. Give the same command with {smaller} at its end, or give more "
                     f"text (shard.sources, tokenizer.train_mb).")


def explained(error: RuntimeError, settings: TokenizerConfig, log: Path) -> Exception:
    """The trainer's error as a UserError; the error itself if the user cannot fix it."""
    from drover.pipeline.config.data import LEAST_COVERAGE
    message, covered = str(error), settings.character_coverage
    if match := re.search(r"Vocabulary size too high .*value <= (\d+)", message):
        return too_large(settings, int(match[1]))
    if match := re.search(r"smaller than required_chars\. (\d+) vs (\d+)", message):
        return UserError(f"tokenizer.vocab_size {settings.vocab_size} is too small: {match[2]} ids are needed for the "
                         f"special ids, the bytes and every character of the text up to tokenizer.character_coverage "
                         f"{covered}. Raise the first to {padded(int(match[2]))} or more, lower the second "
                         f"(to {LEAST_COVERAGE} at least), or take tokenizer.kind=bpe, which spells rare characters in "
                         f"bytes.")
    if "!sentences_.empty()" in message:
        return UserError(f"There is no text to train the vocabulary on: tokenizer.train_mb is {settings.train_mb}, "
                         f"and the sample that it allows is empty. Raise it, or look at the shard stage's sources.")
    error.add_note(f"The trainer's log is {log}.")
    return error
