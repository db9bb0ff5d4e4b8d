"""A faster encoder of the same ids: fastokens over the exported tokenizer, or a table for bytes and characters.

It never decides what the ids are. Decoding to the same text proves little, since other ids can do that, too. So the ids
themselves are compared with the tokenizer's: on validation documents and odd strings once the tokenizer is made
(`compared`), and on some documents of every shard (`drover.pipeline.encode`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drover.pipeline.core.errors import UserError, install, installed_version
from drover.pipeline.core.files import Record, read_json
from drover.pipeline.tokenization.choosing import beginnings, documents_of
from drover.pipeline.tokenization.files import EXPORT
from drover.pipeline.tokenization.odd_strings import odd_strings
from drover.pipeline.tokenization.tokenizer import Flat, Tokenizer, joined, load_tokenizer

if TYPE_CHECKING:
    from drover.pipeline.contract.manifest import Manifest
    from drover.pipeline.contract.stage_work import Work

NAME = "fastokens"
COUNT = "fast_encoder"
"""The key of the result in the counts of the tokenizer stage."""
VALIDATION_BYTES = 4_000_000
"""Bytes of validation text that are compared."""
NOT_TAKEN = ("post_processor", "truncation", "padding")
"""Parts of a tokenizer.json that add or remove ids. Drover puts BOS and EOS around documents itself, and truncates
nothing."""


class EncoderError(Exception):
    """The fast encoder cannot open the vocabulary, or failed on a text; the message says why."""


def one_thread() -> None:
    """Limit the libraries written in Rust to one thread in this process: there is a process per core. Call it before
    their first use."""
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class FastEncoder:
    """Texts to ids, as `reference` gives them. Very long texts are cut where the reference cuts them."""

    def __init__(self, reference: Tokenizer, folder: Path) -> None:
        """Open the vocabulary of a finished tokenizer stage; EncoderError if the library refuses it or is absent."""
        self.reference = reference
        if reference.kind in ("byte", "char"):
            self._encode = _table(reference)
            return
        if installed_version(NAME) is None:
            raise EncoderError(f"it is several times faster, but not installed ({install(NAME)} installs it)")
        one_thread()
        native = _guarded(lambda: _opened(folder / EXPORT))
        self._encode = lambda texts: _flat(_guarded(lambda: native.encode_batch_flat(texts, False, True)), len(texts))

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """As `Tokenizer.encode_flat`; EncoderError if the library fails, or gives an id outside the vocabulary, BOS or
        EOS."""
        ids, offsets = self.reference.encoded_in_parts(texts, self._encode)
        if len(ids) and ids.max() >= self.reference.size:
            raise EncoderError(f"it gave the id {ids.max()}, outside the vocabulary of {self.reference.size}")
        if ((ids == self.reference.bos_id) | (ids == self.reference.eos_id)).any():
            raise EncoderError("it made BOS or EOS of text")
        return ids, offsets


def _table(reference: Tokenizer) -> Callable[[list[str]], Flat]:
    """An encoder of bytes, or of characters by a table; a text with others is left to the reference."""
    if reference.kind == "byte":
        return lambda texts: joined([np.frombuffer(text.encode(), np.uint8) for text in texts])
    table = np.full(0x110000, -1)
    for name, token in reference.backend.get_vocab().items():
        if len(name) == 1:
            table[ord(name)] = token

    def encode(text: str) -> Any:
        ids = table[np.frombuffer(text.encode("utf-32-le"), "<u4")]
        return ids if (ids >= 0).all() else reference.encode_flat([text])[0]
    return lambda texts: joined([encode(text) for text in texts])


def _flat(given: tuple[bytes, bytes], count: int) -> Flat:
    ids, offsets = np.frombuffer(given[0], "<u4"), np.frombuffer(given[1], "<u8").astype(np.int64)
    if len(offsets) != count + 1 or offsets[-1] != len(ids):
        raise EncoderError(f"it gave {len(offsets)} offsets up to {offsets[-1:]} for {count} texts")
    return ids, offsets


def _opened(path: Path) -> Any:
    """The library's tokenizer without special tokens: their names in a text are text. Other added tokens are still
    matched in texts, as by the reference."""
    import fastokens
    description = read_json(path)
    added = [token for token in description.get("added_tokens") or [] if not token.get("special")]
    return fastokens.Tokenizer.from_json_str(
        json.dumps({**description, "added_tokens": added, **dict.fromkeys(NOT_TAKEN)}))


def _guarded(call: Any) -> Any:
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic in Rust arrives as a class that is not even an Exception
        raise EncoderError(f"{type(error).__name__}: {str(error).strip()[:300]}") from None


def admitted(work: Work, tokenizer: Path, made: Manifest, shards: Path, validation: Sequence[Record]) -> bool:
    """Whether the fast encoder is used, or the reference. The choice is printed.

    Args:
        tokenizer: folder of the tokenizer stage, `made` its manifest.
        validation: records of validation text shards in `shards`, for a test if that stage did none with these
            packages.

    Raises:
        UserError: encode.encoder asks for the fast one, and it is missing or gives other ids.
    """
    from drover.pipeline.contract.stage_work import software_versions
    wanted, problem = work.config.encode.encoder, ""
    if wanted != "reference":
        tested = made.software == software_versions() and made.counts.get(COUNT)
        result = tested or compared(load_tokenizer(tokenizer), tokenizer, shards, validation)
        problem = result["problem"]
        if not problem:
            work.say(f"the fast encoder encodes: equal ids on {result['texts']:,} validation documents and odd "
                     f"strings, and compared again in every shard")
            return True
        if wanted == NAME:
            raise UserError(f"encode.encoder is {NAME}, but {problem}. Set encode.encoder to auto or reference.")
    work.say(f"the exported tokenizer encodes{problem and f'; {problem}'}")
    return False


def compared(reference: Tokenizer, folder: Path, shards: Path, validation: Sequence[Record]) -> Record:
    """Compare the fast encoder with the finished tokenizer in a folder. Returns the number of `texts` with equal ids,
    and the `problem` if a text has other ids or there is no such encoder."""
    texts, problem = 0, ""
    documents = (document.text for record, limit in beginnings(validation, VALIDATION_BYTES)
                 for document in documents_of(shards, record, limit))
    try:
        encoder = FastEncoder(reference, folder)
        for text in chain(odd_strings(reference), documents):
            ids, own = encoder.encode_flat([text])[0], reference.encode_flat([text])[0]
            if not np.array_equal(ids, own):
                raise EncoderError(f"other ids for {text!r:.80}: {ids!s:.80} instead of {own!s:.80}")
            texts += 1
    except EncoderError as error:
        problem = f"{NAME} cannot be used: {error}"
    return {"texts": texts, "problem": problem}
