"""Which encoder works in the stage encode: the reference, or a faster one that a gate found to give the same ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.data.text_shards import read_shard
from pipeline.errors import UserError
from pipeline.files import read_json, write_json
from pipeline.tokenization.fast import KINDS, NAME, installed_version
from pipeline.tokenization.gate import applies, key_of, verdict
from pipeline.tokenization.kinds import load_tokenizer

if TYPE_CHECKING:
    from pipeline.contract.stage_work import Work

COUNT = "fast_encoder"
"""Where the tokenizer stage's counts have the verdict."""
VERDICT = "encoder.json"
"""Where the stage encode keeps one of its own, so that it is asked for once."""
DOCUMENT_BYTES = 16_000_000
"""Held-out text that the gate compares in the tokenizer stage."""
QUICK_BYTES = 2_000_000
"""The same at the start of encode, where the tokenizer stage has no verdict that holds."""
MOST_SHARDS = 64


def gate_texts(shards: Path, heldout: Sequence[Mapping[str, Any]], most_bytes: int) -> Iterator[str]:
    """Held-out texts, about `most_bytes` of them: the beginnings of at most 64 shards, chosen by their hashes."""
    chosen = sorted(heldout, key=lambda record: hashlib.sha256(record["sha256"].encode()).digest())[:MOST_SHARDS]
    for record in chosen:
        left = most_bytes // len(chosen)
        for document in read_shard(shards, dict(record)):
            left -= len(document.text.encode())
            yield document.text
            if left <= 0:
                break


def admitted(work: Work, tokenizer: Path, counts: dict[str, Any], shards: Path,
             heldout: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The verdict under which the fast encoder works; None where the reference does. What it is, is said.

    Args:
        tokenizer: folder of the tokenizer stage, `counts` those of its manifest.
        heldout: records of held-out text shards in `shards`, on which the gate is tried where no verdict holds.

    Raises:
        UserError: encode.encoder asks for the fast one, and it is not there or gives other ids.
    """
    wanted, reference = work.config.encode.encoder, counts["kind"]
    if wanted == "reference" or (wanted == "auto" and not applies(reference)):
        advice = wanted == "auto" and reference in KINDS
        work.say(f"the reference encodes ({reference})"
                 + (f"; {NAME} is faster, and not installed (pip install --editable '.[fast]')" if advice else ""))
        return None
    if not applies(reference):
        raise UserError(f"encode.encoder is {NAME}, but " + (
            "it is not installed: pip install --editable '.[fast]', or set encode.encoder to auto."
            if installed_version() is None else
            f"it knows no vocabularies of tokenizer.kind {reference}. Set encode.encoder to auto or reference."))
    found = _verdict(work, tokenizer, counts, shards, heldout)
    name = f"{NAME} {found['version']}"
    if found["equal"]:
        work.say(f"{name} encodes: equal ids to {reference} on {found['documents']:,} documents and "
                 f"{found['strings']:,} odd strings, and compared again in every shard")
        return found
    if wanted == NAME:
        raise UserError(f"encode.encoder is {NAME}, but {name} does not give this vocabulary's ids "
                        f"({found['problem']}). Set encode.encoder to auto or reference.")
    work.say(f"the reference encodes ({reference}): {name} does not give this vocabulary's ids ({found['problem']})")
    return None


def told(work: Work, fast: dict[str, Any] | None, done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the manifest says of the encoders: which, and how many shards each has made, those included in which the
    reference had to step in. That is also said."""
    fallbacks = [(record["outputs"][0]["path"], record["fallback"]) for record in done if record.get("fallback")]
    by_fast = sum(record.get("encoder") == "fast" for record in done)
    for path, problem in fallbacks[:5]:
        work.say(f"WARNING: {NAME} gave {problem} in {path}: the reference encoded that shard")
    if fallbacks:
        work.say(f"WARNING: {len(fallbacks)} of {len(done)} shards were encoded by the reference, since {NAME} gave "
                 f"other ids for documents that were compared. Those shards are right; of the others the compared "
                 f"documents are. Set encode.encoder to reference and run with --force to be sure, and report it")
    return {"encoder": NAME if fast else "reference", "version": fast["version"] if fast else None,
            "fast_shards": by_fast, "reference_shards": len(done) - by_fast, "fallback_shards": len(fallbacks)}


def _verdict(work: Work, tokenizer: Path, counts: dict[str, Any], shards: Path,
             heldout: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tokenizer stage's, or one made here before, if it holds for these files and versions; else a new one."""
    path, key = work.folder / VERDICT, key_of(tokenizer, counts["kind"], counts["sha256"])
    for known in (counts.get(COUNT), _read(path)):
        if isinstance(known, dict) and key.items() <= known.items():
            return known
    work.say(f"comparing {NAME} {key['version']} with {key['reference']} {key['reference_version']}")
    found = verdict(tokenizer, load_tokenizer(tokenizer), gate_texts(shards, heldout, QUICK_BYTES))
    write_json(path, found)
    return found


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None
