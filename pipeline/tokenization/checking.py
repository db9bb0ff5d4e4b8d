"""Checks of a tokenizer on validation text, document by document, and of the fast encoder."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from drover.pipeline.core.errors import UnusableInputError, UserError, installed_version
from drover.pipeline.core.files import Record
from drover.pipeline.data.documents import Document
from drover.pipeline.data.text_shards import TextRecord, beginnings, documents_of, refuse_changed_shard
from drover.pipeline.tokenization.conversion import Agrees, agreement
from drover.pipeline.tokenization.files import FILES, placed
from drover.pipeline.tokenization.reporting import Tally, summed
from drover.pipeline.tokenization.tokenizer import (
    NAME,
    WORD_MARK,
    EncoderError,
    FastEncoder,
    Tokenizer,
    load_tokenizer,
    odd_strings,
    reads_back,
)

if TYPE_CHECKING:
    from drover.pipeline.contract.manifest import Manifest
    from drover.pipeline.contract.stage_work import Work

PIECE = 500_000
"""Characters of a document that are checked: each takes up to 250 bytes of memory, and tiktoken fails at a run of a
million blanks."""
BEGINNING = 1000
"""Characters of a document that show whether the exported tokenizer puts BOS before it."""
EXAMPLES = 5
"""Failures that are listed; the others are only counted."""
CORRECT = "Correct tokenizer_config.json (or special_tokens_map.json) next to the ready tokenizer.json."
VALIDATION_BYTES = 4_000_000
"""Bytes of validation text on which the fast encoder is compared."""
COUNT = "fast_encoder"
"""The key of the result in the counts of the tokenizer stage."""


class ShardCheck(TypedDict):
    """A text shard to check with the tokenizer of a hash, by the place of its folder and its record. limit: bytes of
    text in which the documents begin that are checked; None for all."""

    shards: str
    record: TextRecord
    sha256: str
    limit: int | None


def check_shard(folder: Path, payload: ShardCheck) -> Record:
    """Task: check documents of a text shard with the finished tokenizer in `folder` and its export."""
    shards, record, limit = placed(folder, payload["shards"]), payload["record"], payload["limit"]
    if limit is None:  # otherwise only texts are read, each of which is compared with its own hash
        refuse_changed_shard(shards, record)
    return {"outputs": [], **check(documents_of(shards, record, limit), *_loaded(folder, payload["sha256"]))}


def check(documents: Iterable[Document], tokenizer: Tokenizer, exported: Any, agrees: Agrees | None = None) -> Record:
    """Encode and decode the beginnings of documents, and compare with transformers and the export, and the tokenizer's
    own library. Returns counts (FIELDS), ids that occurred as a bitmap, the first failures, and the seconds."""
    tally, failures, encode_s = Counter[str](), list[str](), 0.0
    bytes_of = cache(tokenizer.token_bytes)
    seen = np.zeros(tokenizer.size, np.uint8)
    for document in documents:
        text, failure = document.text[:PIECE], ""
        began = time.perf_counter()
        ids = tokenizer.encode(text)
        encode_s += time.perf_counter() - began
        seen[ids] = 1
        decoded = tokenizer.decode(ids)
        # Names of special tokens in a text are text here; the settings of a ready tokenizer may match them.
        theirs = exported(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        begins = tokenizer.kind == "huggingface" or \
            exported(text[:BEGINNING], verbose=False)["input_ids"][0] == tokenizer.bos_id
        back = exported.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        # Generation streams the bytes of each token.
        utf8, accepted = b"".join(map(bytes_of, ids)), {text.encode(), text.replace(WORD_MARK, " ").encode()}
        is_read_back = reads_back(text, decoded) and not accepted.isdisjoint((utf8, utf8.removeprefix(b" ")))
        is_as_exported = ids == theirs and begins and back == decoded and (agrees is None or agrees(text, ids))
        tally.update(
            documents=1, text_bytes=len(text.encode()), characters=len(text), words=len(text.split()), tokens=len(ids),
            fallback_tokens=sum(map(tokenizer.byte_fallback_ids.__contains__, ids)),
            unknown_tokens=ids.count(-1 if tokenizer.unk_id is None else tokenizer.unk_id),
            round_trip_failures=int(not is_read_back), hugging_face_failures=int(not is_as_exported),
            literal_marks=int(decoded != text and is_read_back),
            cut_documents=int(len(document.text) > PIECE))
        if not is_read_back:
            other = utf8.decode(errors="replace") if reads_back(text, decoded) else decoded
            at = len(os.path.commonprefix([text, other]))  # noqa: RUF071 - texts, not paths
            failure = (f"is decoded to other text: {text[at:at + 12]!r} at character {at} became "
                       f"{other[at:at + 12]!r}")
        elif not is_as_exported:
            failure = f"has other ids {'in the export' if ids != theirs else f'by {tokenizer.kind} itself or no BOS'}"
        if failure and len(failures) < EXAMPLES:
            failures.append(f"the document {document.id} of {document.source} {failure}")
    return {"tally": summed([tally]), "seen": np.packbits(seen).tobytes().hex(), "failures": failures,
            "encode_s": encode_s}


def from_bitmap(text: str) -> set[int]:
    """The ids that have a bit in a unit's `seen`."""
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8))).tolist())


@lru_cache(maxsize=1)
def _loaded(folder: Path, sha256: str) -> tuple[Tokenizer, Any, Agrees | None]:
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
    ids = exported("a", verbose=False)["input_ids"]
    plain = exported("a", add_special_tokens=False, verbose=False)["input_ids"]
    bounds = {"BOS": (exported.bos_token_id, tokenizer.bos_id), "EOS": (exported.eos_token_id, tokenizer.eos_id)}
    problems = [f"its {name} is {theirs}, not {ours}" for name, (theirs, ours) in bounds.items()
                if theirs not in (None, ours)]
    if ids not in tokenizer.surrounded(plain):
        problems.append(f"it encodes 'a' as {ids}, not as {plain} between BOS and EOS")
    unused = {exported.unk_token, exported.mask_token}  # some classes of transformers always add one
    if beyond := [name for name, token in exported.get_added_vocab().items()
                  if token >= tokenizer.size and name not in unused]:
        problems.append(f"it adds {len(beyond):,} tokens ({', '.join(beyond[:EXAMPLES])}) beyond the "
                        f"{tokenizer.size:,} ids of the model")
    if problems:
        raise UnusableInputError(f"transformers does not read the exported tokenizer as training does: "
                                 f"{'; '.join(problems)}. {CORRECT}")


def refuse_failures(tally: Tally, failures: list[str]) -> None:
    """UnusableInputError if a document was decoded to another text, or the exported tokenizer gave other ids."""
    named = "; ".join(failures[:EXAMPLES])
    if failed := tally["round_trip_failures"]:
        raise UnusableInputError(
            f"The tokenizer loses text: {failed} of {tally['documents']} documents are decoded to other text "
            f"({named}). A model could never write the lost text. If only Unicode's form (NFC, NFKC) or line ends "
            f"change, add the filter `normalization` with `form` or `line_ends` to shard.filters and run the stages "
            f"shard and tokenizer again with --force. Otherwise take a tokenizer without normalization and with byte "
            f"fallback, or let Drover train one (tokenizer.kind=sentencepiece without tokenizer.path).")
    if failed := tally["hugging_face_failures"]:
        raise UnusableInputError(
            f"The Hugging Face export does not give the same tokens: {failed} of "
            f"{tally['documents']} documents differ ({named}). A converted model would be fed other tokens than it was "
            f"trained on, so the stage is not committed. With a ready tokenizer.path, use its tokenizer.json with "
            f"tokenizer.kind=huggingface; with a trained one, please report it.")


class Comparison(TypedDict):
    """Texts of which the fast encoder gave the ids of the tokenizer, and the problem if there was one."""

    texts: int
    problem: str


def admitted(work: Work, tokenizer: Path, made: Manifest, shards: Path, validation: Sequence[TextRecord]) -> bool:
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


def compared(reference: Tokenizer, folder: Path, shards: Path, validation: Sequence[TextRecord]) -> Comparison:
    """Compare the fast encoder with the finished tokenizer in a folder."""
    texts, problem = 0, ""
    documents = (document.text for record, limit in beginnings(validation, VALIDATION_BYTES)
                 for document in documents_of(shards, record, limit))
    try:
        encoder = FastEncoder(reference, folder)
        for text in chain(odd_strings(reference), documents):
            ids, own = encoder.encode_flat([text])[0], reference.encode_flat([text])[0]
            if not np.array_equal(ids, own):
                raise EncoderError(f"other ids for {text!r:.80}")
            texts += 1
    except EncoderError as error:
        problem = f"{NAME} cannot be used: {error}"
    return {"texts": texts, "problem": problem}
