"""Checks of a tokenizer on validation text, document by document, and the numbers of the report."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.core.errors import UnusableInputError, installed_version
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.rewriting import Normalization
from drover.pipeline.data.text_shards import refuse_changed_shard
from drover.pipeline.tokenization.choosing import documents_of
from drover.pipeline.tokenization.conversion import agreement
from drover.pipeline.tokenization.files import FILES, placed
from drover.pipeline.tokenization.tokenizer import WORD_MARK, Tokenizer, load_tokenizer, reads_back

PIECE = 4_000_000
"""Characters of a document that are checked: each takes up to 250 bytes of memory."""
BEGINNING = 1000
"""Characters of a document that show whether the exported tokenizer puts BOS before it."""
EXAMPLES = 5
"""Failures that are listed; the others are only counted."""
CORRECT = "Correct tokenizer_config.json (or special_tokens_map.json) next to the ready tokenizer.json."
FIELDS = ("documents", "text_bytes", "characters", "words", "tokens", "fallback_tokens", "unknown_tokens",
          "round_trip_failures", "hugging_face_failures", "literal_marks", "cut_documents")
"""The counts. `hugging_face_failures`: documents with other ids in the export or by the tokenizer's own library.
`literal_marks`: documents with U+2581 that are decoded with a space in its place. `cut_documents`: documents so long
that only their beginning is checked, or that are encoded in parts."""
CURES: list[dict[str, Any]] = [{"form": "NFC"}, {"form": "NFKC"}, {"line_ends": True}]
"""Settings of the filter `normalization` after which a tokenizer that normalizes may lose nothing."""
OFTEN_LOST = " One caf\xe9 cafe\u0301 \ufb01ne \u201cit\u2019s\u201d \u2013\u2026\t\u3000\u6f22\r\n "
"""What tokenizers change that normalize: blanks, case, accents, ligatures, quotes, wide characters and line ends."""


def summed(tallies: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Tallies added up."""
    total = sum(map(Counter, tallies), Counter[str]())
    return {name: total[name] for name in FIELDS}


@dataclass
class Check:
    """A check of a tokenizer on documents, against transformers with its export and its own library: counts, ids that
    occurred, the first failures, the time."""

    tokenizer: Tokenizer
    exported: Any
    agrees: Callable[[str, list[int]], bool] | None = None
    tally: Counter[str] = field(default_factory=Counter)
    seen: set[int] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    encode_s: float = 0.0

    def document(self, document: Document) -> None:
        """Encode and decode the beginning of a document, and compare."""
        text, tokenizer = document.text[:PIECE], self.tokenizer
        began = time.perf_counter()
        ids = tokenizer.encode(text)
        self.encode_s += time.perf_counter() - began
        decoded, parts = tokenizer.decode(ids), tokenizer.parts(text)
        self.seen.update(ids)
        self.tally.update(
            documents=1, text_bytes=len(text.encode()), characters=len(text), words=len(text.split()), tokens=len(ids),
            fallback_tokens=sum(map(tokenizer.byte_fallback_ids.__contains__, ids)),
            unknown_tokens=ids.count(-1 if tokenizer.unk_id is None else tokenizer.unk_id),
            literal_marks=decoded != text and reads_back(text, decoded),
            cut_documents=len(document.text) > PIECE or len(parts) > 1)
        joined, accepted = tokenizer.joined_bytes(ids), [text.encode(), text.replace(WORD_MARK, " ").encode()]
        if not reads_back(text, decoded) or not {joined, joined.removeprefix(b" ")} & {*accepted}:
            at = len(os.path.commonprefix([text, decoded]))  # noqa: RUF071 - texts, not paths
            self._fail("round_trip_failures", document, f"is decoded to other text: {text[at:at + 12]!r} at character "
                                                        f"{at} became {decoded[at:at + 12]!r}")
        # Names of special tokens in a text are text here; the settings of a ready tokenizer may match them.
        plain = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        theirs = [token for part in parts for token in self.exported(part, **plain)["input_ids"]]
        begins = tokenizer.kind == "huggingface" or \
            self.exported(text[:BEGINNING], verbose=False)["input_ids"][0] == tokenizer.bos_id
        back = self.exported.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if ids != theirs or not begins or back != decoded:
            self._fail("hugging_face_failures", document, "has other ids in the export")
        elif self.agrees and not self.agrees(text, ids):
            self._fail("hugging_face_failures", document, f"has other ids by {tokenizer.kind} itself")

    def _fail(self, count: str, document: Document, what: str) -> None:
        self.tally[count] += 1
        self.failures = [*self.failures, f"the document {document.id} of {document.source} {what}"][:EXAMPLES]


def check_shard(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Task: check documents of a text shard with the finished tokenizer in `folder` and its export.

    All documents, or with `limit` in the payload those that begin in the shard's first `limit` bytes of text.
    """
    check, shards = Check(*_loaded(folder, payload["sha256"])), placed(folder, payload["shards"])
    if payload["limit"] is None:  # otherwise only texts are read, each of which is compared with its own hash
        refuse_changed_shard(shards, payload["record"])
    for document in documents_of(shards, payload["record"], payload["limit"]):
        check.document(document)
    seen = np.zeros(check.tokenizer.size, np.uint8)
    seen[[*check.seen]] = 1
    return {"outputs": [], "tally": summed([check.tally]), "seen": np.packbits(seen).tobytes().hex(),
            "failures": check.failures, "encode_s": check.encode_s}


def from_bitmap(text: str) -> set[int]:
    """The ids that have a bit in a unit's `seen`."""
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8))).tolist())


@lru_cache(maxsize=1)
def _loaded(folder: Path, sha256: str) -> tuple[Tokenizer, Any, Callable[[str, list[int]], bool] | None]:
    import transformers
    tokenizer = load_tokenizer(folder)
    assert tokenizer.sha256 == sha256, "the tokenizer changed between planning and checking"
    # What AutoTokenizer takes for our own exports; asked itself (as convert does), it imports torch.
    kind = transformers.AutoTokenizer if tokenizer.kind == "huggingface" else transformers.PreTrainedTokenizerFast
    try:
        exported = kind.from_pretrained(folder / "hf", local_files_only=True, trust_remote_code=False)
        exported("a", verbose=False)
    except Exception as error:  # noqa: BLE001 - each class of transformers fails in its own way
        raise UnusableInputError(
            f"The installed transformers {installed_version('transformers')} cannot read the exported tokenizer: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}. {CORRECT}") from None
    refuse_other_special_ids(tokenizer, exported)
    return tokenizer, exported, agreement(tokenizer, folder / (FILES[tokenizer.kind] or ""))


def refuse_other_special_ids(tokenizer: Tokenizer, exported: Any) -> None:
    """UnusableInputError if transformers takes other ids for BOS and EOS than training, puts others around a text, or
    adds an id that the model will not have. The files next to a ready tokenizer.json decide that."""
    (bos, eos), ids = tokenizer.bounds, exported("a", verbose=False)["input_ids"]
    plain = exported("a", add_special_tokens=False, verbose=False)["input_ids"]
    result = [f"its {role} is {exported_id} ({exported.convert_ids_to_tokens(exported_id)}), not {ours} ({name})"
             for role, exported_id, ours, name in (("BOS", exported.bos_token_id, tokenizer.bos_id, bos),
                                             ("EOS", exported.eos_token_id, tokenizer.eos_id, eos))
             if exported_id not in (None, ours)]
    if ids not in [[*first, *plain, *last] for first in ([], [tokenizer.bos_id]) for last in ([], [tokenizer.eos_id])]:
        result.append(f"it encodes 'a' as {ids}, not as {plain} between BOS {tokenizer.bos_id} and EOS "
                     f"{tokenizer.eos_id}")
    unused = {exported.unk_token, exported.mask_token}  # some classes of transformers always add one
    if beyond := [name for name, token in exported.get_added_vocab().items()
                  if token >= tokenizer.size and name not in unused]:
        result.append(f"it adds {len(beyond):,} tokens ({', '.join(beyond[:EXAMPLES])}) beyond the {tokenizer.size:,} "
                     f"ids of the model")
    if result:
        raise UnusableInputError(
            f"transformers does not read the exported tokenizer as training does: {'; '.join(result)}. {CORRECT}")


def refuse_failures(tally: Mapping[str, int], failures: list[str], tokenizer: Tokenizer) -> None:
    """UnusableInputError if a document was decoded to another text, or the exported tokenizer gave other ids."""
    named = "; ".join(failures[:EXAMPLES])
    if failed := tally["round_trip_failures"]:
        cure = next((cure for cure in CURES if _is_corrected(tokenizer, cure)), None)
        advice = (f"The tokenizer normalizes text. Normalize the corpus first, and its documents are read back: add "
                  f"{json.dumps({'kind': 'normalization', **cure})} to shard.filters and run the stages shard and "
                  f"tokenizer again with --force. Or" if cure else
                  "No setting of the filter normalization prevents this: it is lost case, accents, white space or "
                  "characters that the vocabulary lacks. So")
        raise UnusableInputError(
            f"The tokenizer loses text: {failed} of {tally['documents']} documents are decoded to other text "
            f"({named}). A model could never write the lost text. {advice} take a tokenizer without normalization "
            f"and with byte fallback, or let Drover train one (tokenizer.kind=sentencepiece without tokenizer.path).")
    if failed := tally["hugging_face_failures"]:
        raise UnusableInputError(
            f"The Hugging Face export does not give the same tokens: {failed} of "
            f"{tally['documents']} documents differ ({named}). A converted model would be fed other tokens than it was "
            f"trained on, so the stage is not committed. With a ready tokenizer.path, use its tokenizer.json with "
            f"tokenizer.kind=huggingface; with a trained one, please report it.")


def _is_corrected(tokenizer: Tokenizer, cure: dict[str, Any]) -> bool:
    """Whether what is `OFTEN_LOST` is read back once the filter `normalization` has changed it."""
    normalized = Normalization(kind="normalization", **cure)(Document(OFTEN_LOST, "", "", {}))
    assert isinstance(normalized, Document)
    return reads_back(normalized.text, tokenizer.decode(tokenizer.encode(normalized.text)))
