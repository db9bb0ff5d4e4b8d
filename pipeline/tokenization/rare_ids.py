"""Ids for text that a vocabulary cannot express: the unknown id, and those that spell single bytes.

If a shard has many more of them than the tokenizer's report on validation text, its text is of another kind, or broken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.tokenization.tokenizer import Tokenizer

KINDS = {"unknown": "unknown ids", "fallback": "byte-fallback ids"}
TIMES = 3.0
"""An outlier has more than this many times the share in the report ..."""
BEYOND = 0.01
"""... and exceeds it by more than this share of all ids. Rare ids are few, so their share varies in small shards."""
MOST_PRINTED = 5
"""Outliers that are listed on the console."""


def rare_counts(ids: NDArray[Any], tokenizer: Tokenizer) -> dict[str, int]:
    """The numbers of unknown ids and of ids that spell a byte in a shard: fields of its output record.

    If the unknown id is also BOS or EOS, it occurs only around documents: a shard with more of it is refused.
    """
    unknown = [] if tokenizer.unk_id in (None, tokenizer.bos_id, tokenizer.eos_id) else [tokenizer.unk_id]
    counts = np.bincount(ids, minlength=tokenizer.size)
    return {"unknown_tokens": int(counts[unknown].sum()),
            "fallback_tokens": int(counts[sorted(tokenizer.byte_fallback_ids)].sum())}


def rare_ids(records: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> dict[str, Any]:
    """Counts for encode's manifest.

    Args:
        records: output records of token shards.
        report: of the tokenizer stage (report.json).

    Returns:
        unknown_tokens and fallback_tokens of all shards, and `outliers`: path, kind, share of the shard's ids without
        BOS and EOS, and the share in the report, of the shard's source if possible.
    """
    outliers = []
    for record in records:
        for kind in KINDS:
            share = record[f"{kind}_tokens"] / max(1, record["tokens"] - 2 * record["docs"])
            own = report["sources"].get(record["source"], {}).get(f"{kind}_share")
            reported = (report["total"][f"{kind}_share"] if own is None else own) or 0.0
            if share > TIMES * reported and share > reported + BEYOND:
                outliers.append({"path": record["path"], "kind": kind, "share": round(share, 6), "reported": reported})
    return {**{name: sum(record[name] for record in records) for name in ("unknown_tokens", "fallback_tokens")},
            "outliers": outliers}


def warnings(outliers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings about outliers, one line for each of the first."""
    lines = [f"warning: {one['path']}: {one['share']:.2%} {KINDS[one['kind']]}, {one['reported']:.2%} in the "
            f"tokenizer's report: text of another kind than the training text, or broken"
             for one in outliers[:MOST_PRINTED]]
    more = len(outliers) - MOST_PRINTED
    return [*lines, f"warning: {more:,} more shards like these are named in encode's manifest"] if more > 0 else lines
