"""The tokenizer's report: statistics of its tokens on validation text of each source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drover.pipeline.tokenization.checking import summed
from drover.pipeline.tokenization.tokenizer import Tokenizer

LONGEST = 12
_SHARES = (("bytes_per_token", "text_bytes", "tokens"), ("characters_per_token", "characters", "tokens"),
           ("tokens_per_word", "tokens", "words"), ("fallback_share", "fallback_tokens", "tokens"),
           ("unknown_share", "unknown_tokens", "tokens"))


def described(tokenizer: Tokenizer, tallies: Mapping[str, Mapping[str, int]], sample: Mapping[str, int],
              seen: set[int], marks: int, validation: int) -> dict[str, Any]:
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
    unused = [token for token in pieces if token not in seen]
    longest = sorted(pieces, key=lambda token: (-len(tokenizer.token_bytes(token)), token))
    some = {"validation_documents": validation} if total["documents"] < validation else {}
    return {"kind": tokenizer.kind, "size": tokenizer.size, "used": tokenizer.used, **some,
            "special_ids": len(tokenizer.special_ids),
            "pieces": len(pieces), "unused_pieces": len(unused),
            "unused_examples": _shown(tokenizer, unused), "longest_pieces": _shown(tokenizer, longest),
            "marks_as_spaces": marks, "total": _measured(total), "training_sample": _measured(sample),
            "sources": {source: _measured(tally) for source, tally in sorted(tallies.items())}}


def _measured(tally: Mapping[str, int]) -> dict[str, Any]:
    return {**tally, **{name: round(tally[part] / tally[divisor], 6) if tally[divisor] else None
                        for name, part, divisor in _SHARES}}


def _shown(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    return [tokenizer.token_bytes(token).decode("utf-8", errors="backslashreplace") for token in tokens[:LONGEST]]
