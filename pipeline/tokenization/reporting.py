"""The tokenizer's report: statistics of its tokens on validation text of each source; and text that it cannot express.

That is spelled with the unknown id, and with ids for single bytes. If a shard has many more of them than the report,
its text is of another kind, or broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.core.files import Record
from drover.pipeline.tokenization.tokenizer import Tokenizer

Tally = Mapping[str, int]
"""Counts by name (FIELDS)."""
FIELDS = ("documents", "text_bytes", "characters", "words", "tokens", "fallback_tokens", "unknown_tokens",
          "round_trip_failures", "hugging_face_failures", "literal_marks", "cut_documents")
"""The counts. `hugging_face_failures`: documents with other ids in the export or by the tokenizer's own library.
`literal_marks`: documents with U+2581 that are decoded with a space in its place. `cut_documents`: documents so long
that only their beginning is checked."""
_SHARES = (("bytes_per_token", "text_bytes", "tokens"), ("characters_per_token", "characters", "tokens"),
           ("tokens_per_word", "tokens", "words"), ("fallback_share", "fallback_tokens", "tokens"),
           ("unknown_share", "unknown_tokens", "tokens"))
KINDS = {"unknown": "unknown ids", "fallback": "byte-fallback ids"}
TIMES = 3.0
"""An outlier has more than this many times the share in the report ..."""
BEYOND = 0.01
"""... and exceeds it by more than this share of all ids. Rare ids are few, so their share varies in small shards."""
MOST_PRINTED = 5
"""Outliers that are listed on the console."""


def summed(tallies: Iterable[Tally]) -> dict[str, int]:
    """Tallies added up."""
    total = sum(map(Counter, tallies), Counter[str]())
    return {name: total[name] for name in FIELDS}


def described(tokenizer: Tokenizer, tallies: Mapping[str, Tally], sample: Tally, seen: set[int], marks: int,
              validation: int) -> Record:
    """The report as JSON; the same text and vocabulary give the same report.

    Args:
        tallies: sums of the validation documents by source.
        sample: sums of the training documents that were checked, too.
        seen: ids that occurred in any of them.
        marks: documents of all text whose U+2581 is decoded as a space.
        validation: number of validation documents; reported if not all of them were checked.
    """
    total = summed(tallies.values())
    pieces = [token for token in range(tokenizer.used) if token not in tokenizer.special_ids
              and token not in tokenizer.byte_fallback_ids and token != tokenizer.unk_id]
    some = {"validation_documents": validation} if total["documents"] < validation else {}
    return {"kind": tokenizer.kind, "size": tokenizer.size, "used": tokenizer.used, **some,
            "special_ids": len(tokenizer.special_ids),
            "pieces": len(pieces), "unused_pieces": sum(token not in seen for token in pieces),
            "marks_as_spaces": marks, "total": _measured(total), "training_sample": _measured(sample),
            "sources": {source: _measured(tally) for source, tally in sorted(tallies.items())}}


def _measured(tally: Tally) -> Mapping[str, float | None]:
    return {**tally, **{name: round(tally[part] / tally[divisor], 6) if tally[divisor] else None
                        for name, part, divisor in _SHARES}}


def rare_counts(ids: NDArray[Any], tokenizer: Tokenizer) -> dict[str, int]:
    """The numbers of unknown ids and of ids that spell a byte in a shard: fields of its output record.

    If the unknown id is also BOS or EOS, it occurs only around documents: a shard with more of it is refused.
    """
    unknown = {tokenizer.unk_id} - {None, tokenizer.bos_id, tokenizer.eos_id}
    return {f"{kind}_tokens": int(np.isin(ids, [*rare]).sum()) if rare else 0
            for kind, rare in (("unknown", unknown), ("fallback", tokenizer.byte_fallback_ids))}


class Outlier(TypedDict):
    """A shard with many rare ids of a kind: their share of its ids without BOS and EOS, and of those in the report."""

    path: str
    kind: str
    share: float
    reported: float


def outliers(records: Sequence[Record], report: Record) -> list[Outlier]:
    """Those of the token shards, by their output records, that have many more rare ids than the tokenizer's report, for
    the shard's source if possible."""
    result = list[Outlier]()
    for record in records:
        for kind in KINDS:
            share = record[f"{kind}_tokens"] / max(1, record["tokens"] - 2 * record["docs"])
            own = report["sources"].get(record["source"], {}).get(f"{kind}_share")
            reported = (report["total"][f"{kind}_share"] if own is None else own) or 0.0
            if share > TIMES * reported and share > reported + BEYOND:
                result.append(Outlier(path=record["path"], kind=kind, share=round(share, 6), reported=reported))
    return result


def warnings(outliers: Sequence[Outlier]) -> list[str]:
    """Warnings about outliers, one line for each of the first."""
    lines = [f"warning: {one['path']}: {one['share']:.2%} {KINDS[one['kind']]}, {one['reported']:.2%} in the "
             f"tokenizer's report: text of another kind than the training text, or broken"
             for one in outliers[:MOST_PRINTED]]
    if more := len(outliers[MOST_PRINTED:]):
        lines.append(f"warning: {more:,} more shards like these are named in encode's manifest")
    return lines
