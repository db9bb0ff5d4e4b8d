"""How much of each item of a task stands in the training text, and the scores with and without those items.

A text is normalised (Unicode NFKC, case folded) and read as words, runs of letters and digits; what is between them
does not count. An item is its question and right answer (of a text to be predicted, the text); wrong choices and
few-shot examples do not belong to it. Its share is that of its n-grams of words that occur inside some training
document: n is N = 13 (Brown et al., Language Models are Few-Shot Learners, 2020, appendix C), for an item of fewer
words their number; one of fewer than LEAST words says nothing and is not judged. An item is dirty if its share is above
DIRTY.

The index is of the items: hashes of their n-grams, so its memory does not grow with the corpus, which is read once.
Two different n-grams share a hash with a chance of 2^-63: beside 10^6 n-grams of items, 10^12 words hold a false match
with a chance of about a tenth.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.data.comparable_words import comparable_words
from drover.pipeline.data.text_shards import read_shard, shard_records
from drover.pipeline.evaluation.paired import score
from drover.pipeline.parallel.ranks import Ranks

N = 13
LEAST = 5
DIRTY = 0.5
BASE = 0x9E3779B97F4A7C15
"""Of the rolling hash; odd, so that it has an inverse modulo 2^64."""


class ItemIndex:
    """The n-grams of some texts, and which of them were met.

    Args:
        texts: of the items.
        n: words of an n-gram, of texts that have as many.
    """

    def __init__(self, texts: Iterable[str], n: int = N) -> None:
        self._codes: dict[str, int] = {}  # of the items' words; whatever else a document holds cannot match
        grams: dict[int, list[np.ndarray]] = {}
        sizes: list[tuple[int, int, int]] = []  # of each item: its n, and where its n-grams lie among those of that n
        for text in texts:
            found = comparable_words(text)
            size = min(n, len(found))
            if size < min(LEAST, n):
                sizes.append((0, 0, 0))
                continue
            for word in found:
                if word not in self._codes:
                    digest = hashlib.blake2b(word.encode(errors="surrogatepass"), digest_size=8).digest()
                    self._codes[word] = int.from_bytes(digest, "little") | 1  # never 0, which is every other word
            parts = grams.setdefault(size, [])
            start = sum(map(len, parts))
            parts.append(_hashes(self._coded(found), size)[0])
            sizes.append((size, start, start + len(parts[-1])))
        self._sizes = sizes
        self._of_items = {size: np.concatenate(parts) for size, parts in grams.items()}
        self._known = {size: np.unique(hashes) for size, hashes in self._of_items.items()}
        self.met = {size: np.zeros(len(hashes), bool) for size, hashes in self._known.items()}
        """By n: which of the distinct n-grams, by their hashes in order, stood in a document."""

    def scan(self, text: str) -> None:
        """Note which n-grams stand in a document."""
        codes = self._coded(comparable_words(text))
        for size, known in self._known.items():
            if len(codes) < size:
                continue
            hashes, whole = _hashes(codes, size)
            hashes = hashes[whole]
            places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            self.met[size][places[known[places] == hashes]] = True

    def merge(self, others: Iterable[dict[int, np.ndarray]]) -> None:
        """Add what others have met in other documents."""
        for met in others:
            for size, flags in met.items():
                self.met[size] |= flags

    def shares(self) -> list[float | None]:
        """Of each text the share of its n-grams that were met; None where it has too few words to say."""
        flags = {size: self.met[size][np.searchsorted(self._known[size], hashes)]
                 for size, hashes in self._of_items.items()}
        return [float(flags[size][start:end].mean()) if size else None for size, start, end in self._sizes]

    def _coded(self, found: Sequence[str]) -> np.ndarray:
        return np.fromiter((self._codes.get(word, 0) for word in found), np.uint64, len(found))


def _hashes(codes: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Hash of each window of `size` codes, and whether none of these is 0: (len(codes) - size + 1,) each.

    The hash of a window is sum(code_j BASE^j) modulo 2^64, by differences of prefix sums.
    """
    count = len(codes)
    powers = np.cumprod(np.full(count, BASE, np.uint64))
    back = np.cumprod(np.full(count, pow(BASE, -1, 2**64), np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(codes * powers, dtype=np.uint64)])
    zeros = np.concatenate([[0], np.cumsum(codes == 0)])
    windows = count - size + 1
    return (sums[size:] - sums[:-size]) * back[:windows], zeros[size:] == zeros[:-size]


def shares_in_training_text(texts: Sequence[str], folder: Path, manifest: Manifest,
                            ranks: Ranks) -> list[float | None]:
    """Of each text the share of its n-grams in the training documents of a shard stage; each rank reads its part of the
    shards."""
    index = ItemIndex(texts)
    for record in shard_records(manifest, "train")[ranks.rank::ranks.world]:
        for document in read_shard(folder, record):
            index.scan(document.text)
    index.merge(ranks.gather(index.met))
    return index.shares()


def clean_and_dirty(per_item: dict[str, Any], shares: Sequence[float | None]) -> dict[str, Any]:
    """The scores of a task's clean and dirty items, beside how many of each there are.

    per_item: as `items.item_scores` has it. shares: of its items, in order. A part without items has no scores.
    """
    parts = {"clean": [share is not None and share <= DIRTY for share in shares],
             "dirty": [share is not None and share > DIRTY for share in shares]}
    found: dict[str, Any] = {"too_short": sum(share is None for share in shares)}
    for part, chosen in parts.items():
        scores = {}
        for metric, items in per_item["metrics"].items():
            if any(kept := [item if here else None for item, here in zip(items, chosen, strict=True)]):
                value, stderr = score(kept, per_item["forms"].get(metric, "ratio"))
                scores[metric] = {"value": value, "stderr": stderr}
        found[part] = {"items": sum(chosen), "metrics": scores}
    return found
