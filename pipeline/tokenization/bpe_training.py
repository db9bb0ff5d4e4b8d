"""Training a byte-level BPE vocabulary with Llama 3's pre-tokenization, in the format of Llama 3's own tokenizer file.

The `tokenizers` library counts and merges the most frequent pair first; ties go to the smaller ids. So the same chunks
give the same file with any number of threads.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import atomic_file
from drover.pipeline.tokenization.base import SPECIAL_TOKENS
from drover.pipeline.tokenization.byte_level import byte_level_tokenizer, byte_of_character
from drover.pipeline.tokenization.tiktoken_tokenizer import LLAMA3_PATTERN
from drover.pipeline.tokenization.training import raised_behind, too_large

if TYPE_CHECKING:
    from drover.pipeline.config.data import TokenizerConfig

MOST_COUNTED = 2**31 - 1
"""The library counts pairs in signed 32-bit integers; larger counts silently overflow."""
COUNTED_BYTES = 1 << 20


class PairCounts:
    """Counts of neighbouring bytes in the chunks that pass. No pair of tokens is more frequent, since the last byte of
    one and the first of the other are neighbours."""

    def __init__(self) -> None:
        self.counts = np.zeros(65536, np.int64)

    def watch(self, chunks: Iterable[str]) -> Iterator[str]:
        """The chunks, counted; UserError as soon as a count is too large for the trainer."""
        held: list[bytes] = []
        size = 0
        for chunk in chunks:
            held.append(chunk.encode())
            size += len(held[-1])
            if size >= COUNTED_BYTES:
                self._count(b"".join(held))
                held, size = [], 0
            yield chunk
        self._count(b"".join(held))

    def _count(self, text: bytes) -> None:
        values = np.frombuffer(text, np.uint8).astype(np.uint16)
        self.counts += np.bincount(values[:-1] * 256 + values[1:], minlength=65536)
        if (most := int(self.counts.max())) > MOST_COUNTED:
            pair = bytes(divmod(int(self.counts.argmax()), 256))
            raise UserError(f"The pair of bytes {pair!r} occurs {most:,} times in the text to train on; beyond "
                            f"{MOST_COUNTED:,} the trainer's counts overflow, and the vocabulary would be wrong. Set "
                            f"tokenizer.train_mb lower: 5,000 to 20,000 MB are enough for any vocabulary.")


def train_bpe(chunks: Iterable[str], settings: TokenizerConfig, path: Path) -> None:
    """Train on `chunks` and write `base64 rank` lines to `path`: 256 bytes, then merged tokens in the order of merging,
    in all `settings.vocab_size` less the special ids.

    Raises:
        UserError: the text does not support so large a vocabulary, or is too large for the trainer's counts.
    """
    from tokenizers import models, trainers
    alphabet = byte_of_character()
    tokenizer = byte_level_tokenizer(models.BPE(), LLAMA3_PATTERN)
    wanted = settings.vocab_size - len(SPECIAL_TOKENS)
    with raised_behind(PairCounts().watch(chunks)) as given:
        tokenizer.train_from_iterator(given, trainers.BpeTrainer(
            vocab_size=wanted, initial_alphabet=sorted(alphabet), show_progress=False))
    found = sorted((token, bytes(alphabet[character] for character in name))
                   for name, token in tokenizer.get_vocab().items())
    if len(found) < wanted:
        if len(found) == len(alphabet):
            raise UserError(f"There is nothing to merge in the text to train the vocabulary on: tokenizer.train_mb is "
                            f"{settings.train_mb}. Raise it, look at the shard stage's sources, or take "
                            f"tokenizer.kind=byte.")
        raise too_large(settings, len(found) + len(SPECIAL_TOKENS))
    with atomic_file(path) as file:
        file.write(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in found))
