"""Parts of byte-level and merging tokenizers of the Hugging Face library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def byte_of_character() -> dict[str, int]:
    """The byte of each printable character in byte-level BPE (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(value): value for value in shown}
    hidden = [value for value in range(256) if value not in set(shown)]
    return table | {chr(256 + index): value for index, value in enumerate(hidden)}


def byte_level_tokenizer(model: Any, pattern: str | None = None) -> Any:
    """A `tokenizers.Tokenizer` around `model` that works on bytes, after a split by `pattern`."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    tokenizer = Tokenizer(model)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = as_bytes if pattern is None else pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def merges(ids: Mapping[str, int], rank: Callable[[str], float]) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a third, ordered by the rank of the third, then by the ids of the two."""
    found = []
    for token in ids:
        order = rank(token)
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((order, ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
