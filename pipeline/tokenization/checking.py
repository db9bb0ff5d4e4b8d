"""Checks of a tokenizer on validation text, document by document, and the numbers of the report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from drover.pipeline.core.errors import UnusableInputError, installed_version
from drover.pipeline.data.documents import Document
from drover.pipeline.data.text_shards import refuse_changed_shard
from drover.pipeline.tokenization.base import WORD_MARK, Tokenizer, reads_back
from drover.pipeline.tokenization.choosing import PIECE, documents_of, pieces
from drover.pipeline.tokenization.kinds import load_tokenizer, placed

BEGINNING = 1000
"""Characters of a document that show whether the exported tokenizer puts BOS before it."""
EXAMPLES = 5
"""Failures that are listed; the others are only counted."""

CORRECT = "Correct tokenizer_config.json (or special_tokens_map.json) next to the ready tokenizer.json."

FIELDS = ("documents", "text_bytes", "characters", "words", "tokens", "fallback_tokens", "unknown_tokens",
          "round_trip_failures", "hugging_face_failures", "literal_marks", "nul_documents", "cut_documents", "prefixed")
"""The counts. `literal_marks`: documents with U+2581 that are decoded with a space in its place. `cut_documents`:
documents so long that they are encoded or checked in parts. `prefixed`: documents whose token bytes begin with a space
that the tokenizer added."""
CURES = ("form: NFC", "form: NFKC", "line_ends: true")
"""Settings of the filter `normalization` after which a tokenizer that normalizes may lose nothing."""
NORMALIZED = "\r\n\ufb01e\u0301."
"""What each of them changes: what is named must also correct what does not occur in the text that is checked."""
OF_DOCUMENTS = (FIELDS[0], *FIELDS[7:])
"""Counts of documents."""


def summed(tallies: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Tallies added up."""
    found = list(tallies)
    return {name: sum(tally.get(name, 0) for tally in found) for name in FIELDS}


@dataclass
class Check:
    """A check of a tokenizer on documents: counts, ids that occurred, the first failures, the time; and which of
    `CURES` would correct all texts that were lost."""

    tally: Counter[str] = field(default_factory=Counter)
    seen: set[int] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    encode_s: float = 0.0
    cures: list[str] = field(default_factory=lambda: [*CURES])

    def document(self, document: Document, tokenizer: Tokenizer, exported: Any) -> None:
        """Encode and decode one document here and with the exported tokenizer, and compare. A very long one is compared
        piece by piece."""
        before = {name: self.tally[name] for name in OF_DOCUMENTS}
        for piece in pieces(document.text):
            self._piece(replace(document, text=piece), tokenizer, exported)
        self.tally["cut_documents"] += len(document.text) > PIECE
        for name, count in before.items():
            self.tally[name] = min(self.tally[name], count + 1)

    def _piece(self, document: Document, tokenizer: Tokenizer, exported: Any) -> None:
        text = document.text
        began = time.perf_counter()
        ids = tokenizer.encode(text)
        self.encode_s += time.perf_counter() - began
        decoded = tokenizer.decode(ids)
        self.tally.update(
            documents=1, text_bytes=len(text.encode()), characters=len(text), words=len(text.split()), tokens=len(ids),
            fallback_tokens=sum(map(tokenizer.byte_fallback_ids.__contains__, ids)),
            unknown_tokens=0 if tokenizer.unk_id is None else ids.count(tokenizer.unk_id),
            literal_marks=decoded != text and reads_back(text, decoded), nul_documents="\0" in text)
        self.seen.update(ids)
        self._round_trip(document, tokenizer, decoded, tokenizer.joined_bytes(ids))
        self._export(document, tokenizer, exported, ids, decoded)

    def _round_trip(self, document: Document, tokenizer: Tokenizer, decoded: str, joined: bytes) -> None:
        text = document.text
        accepted = {text.encode(), text.replace(WORD_MARK, " ").encode()}
        prefixed = joined not in accepted and joined.removeprefix(b" ") in accepted
        self.tally["prefixed"] += prefixed
        if not reads_back(text, decoded) or not (prefixed or joined in accepted):
            self.tally["round_trip_failures"] += 1
            self.cures = [cure for cure in self.cures if _is_corrected(document, tokenizer, cure)]
            at = _difference(text, decoded)
            self._fail(document, f"is decoded to other text: {text[at:at + 12]!r} at character {at} became "
                                 f"{decoded[at:at + 12]!r}")

    def _export(self, document: Document, tokenizer: Tokenizer, exported: Any, ids: list[int], decoded: str) -> None:
        parts = tokenizer.parts(document.text)
        self.tally["cut_documents"] += len(parts) > 1
        # Names of special tokens in a text are text here; the settings of a ready tokenizer may match them.
        plain = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        theirs = [token for part in parts for token in exported(part, **plain)["input_ids"]]
        begins = tokenizer.kind == "huggingface" or \
            exported(parts[0][:BEGINNING], verbose=False)["input_ids"][0] == tokenizer.bos_id
        back = exported.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if ids != theirs or not begins or back != decoded:
            self.tally["hugging_face_failures"] += 1
            at = _difference(ids, theirs)
            self._fail(document, f"has other ids in the exported tokenizer.json from token {at} on: "
                                 f"{ids[at:at + 4]} here, {theirs[at:at + 4]} there")

    def _fail(self, document: Document, what: str) -> None:
        if len(self.failures) < EXAMPLES:
            self.failures.append(f"the document {document.id} of {document.source} {what}")


def check_shard(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Unit of work: check documents of a text shard with the finished tokenizer in `folder` and its export.

    All documents, or with `limit` in the payload those that begin in the shard's first `limit` bytes of text.
    """
    tokenizer, exported = _loaded(folder, payload["sha256"])
    check, shards = Check(), placed(folder, payload["shards"])
    if payload["limit"] is None:  # otherwise only texts are read, each of which is compared with its own hash
        refuse_changed_shard(shards, payload["record"])
    for document in documents_of(shards, payload["record"], payload["limit"]):
        check.document(document, tokenizer, exported)
    return {"outputs": [], "tally": summed([check.tally]), "seen": bitmap(check.seen, tokenizer.size),
            "failures": check.failures, "cures": check.cures, "encode_s": check.encode_s}


@lru_cache(maxsize=1)
def _loaded(folder: Path, sha256: str) -> tuple[Tokenizer, Any]:
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
    return tokenizer, exported


def refuse_other_special_ids(tokenizer: Tokenizer, exported: Any) -> None:
    """UnusableInputError if transformers takes other ids for BOS and EOS than training, puts others around a text, or
    adds an id that the model will not have. The files next to a ready tokenizer.json decide that."""
    (bos, eos), ids = tokenizer.bounds, exported("a", verbose=False)["input_ids"]
    plain = exported("a", add_special_tokens=False, verbose=False)["input_ids"]
    found = [f"its {role} is {there} ({exported.convert_ids_to_tokens(there)}), not {here} ({name})"
             for role, there, here, name in (("BOS", exported.bos_token_id, tokenizer.bos_id, bos),
                                             ("EOS", exported.eos_token_id, tokenizer.eos_id, eos))
             if there not in (None, here)]
    if ids not in [[*first, *plain, *last] for first in ([], [tokenizer.bos_id]) for last in ([], [tokenizer.eos_id])]:
        found.append(f"it encodes 'a' as {ids}, not as {plain} between BOS {tokenizer.bos_id} and EOS "
                     f"{tokenizer.eos_id}")
    unused = {exported.unk_token, exported.mask_token}  # some classes of transformers always add one
    if beyond := [name for name, token in exported.get_added_vocab().items()
                  if token >= tokenizer.size and name not in unused]:
        found.append(f"it adds {len(beyond):,} tokens ({', '.join(beyond[:EXAMPLES])}) beyond the {tokenizer.size:,} "
                     f"ids of the model")
    if found:
        raise UnusableInputError(
            f"transformers does not read the exported tokenizer as training does: {'; '.join(found)}. {CORRECT}")


def bitmap(ids: Iterable[int], size: int) -> str:
    """A set of ids as hexadecimal text, one bit per id."""
    bits = np.zeros(size, dtype=np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits).tobytes().hex()


def from_bitmap(text: str) -> set[int]:
    """The ids of a `bitmap`."""
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8))).tolist())


def refuse_failures(tally: Mapping[str, int], failures: list[str], cures: Sequence[str] = ()) -> None:
    """UnusableInputError if a document was decoded to another text, or the exported tokenizer gave other ids.

    cures: those of `CURES` that would correct all texts that were lost.
    """
    named = "; ".join(failures[:EXAMPLES])
    if failed := tally["round_trip_failures"]:
        advice = (f"The tokenizer normalizes text. Normalize the corpus first, and these documents are read back: add "
                  f"{{kind: normalization, {cures[0]}}} to shard.filters and run the stages shard and tokenizer again "
                  f"with --force. Or" if cures else
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


def _is_corrected(document: Document, tokenizer: Tokenizer, cure: str) -> bool:
    """Whether a document that is lost is read back once the filter `normalization` has changed it."""
    from drover.pipeline.config.shipped import FILTERS

    [own] = FILTERS.made([FILTERS.read(yaml.safe_load(f"{{kind: normalization, {cure}}}"))])
    text = own(replace(document, text=document.text + NORMALIZED)).text
    return reads_back(text, tokenizer.decode(tokenizer.encode(text)))


def _difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The first position at which two sequences differ."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (own, theirs) in pairs if own != theirs), min(len(one), len(other)))
