"""MinHash signatures of texts, as one 64-bit number a band (Broder 1997; banding as in Rajaraman and Ullman 2011, 3.4).

Two texts whose sets of shingles (runs of words) have a Jaccard similarity of J agree in one of b bands of r rows with
a probability of 1 - (1 - J^r)^b. Words are runs of letters, digits and `_` of the text in lower case, by this Python's
Unicode tables (their version is in the manifest). With `near_duplicates.words: characters`, each character of a script
without spaces is a word, because its runs are whole clauses. A text with fewer words than a shingle has no signature
and is similar to no other. The permutations are rensa's, whose version is among the settings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from drover.pipeline.config.data import NearDuplicates
from drover.pipeline.core.files import atomic_file
from drover.pipeline.data.comparable_words import WITHOUT_SPACES
from drover.pipeline.data.mixing import GOLDEN, mixed

PRESETS = {"fineweb": (5, 14, 8), "olmo3": (5, 26, 11)}
"""Words of a shingle, bands, rows. FineWeb (Penedo et al. 2024) aims at a Jaccard similarity of 0.75; Olmo 3 (2025) at
0.80, with shingles of 5 tokens of its own tokenizer where ours are of 5 words."""
NONE = 0
"""In every band of a text without a signature."""
WORDS = {"runs": re.compile(r"\w+"), "characters": re.compile(f"[{WITHOUT_SPACES}]|[^\\W{WITHOUT_SPACES}]+")}
_TEXTS_AT_ONCE, _CHARACTERS_AT_ONCE = 256, {"runs": 2_000_000, "characters": 500_000}
_SEED = 1


def banding(config: NearDuplicates) -> tuple[int, int, int]:
    """Words of a shingle, bands, rows."""
    preset = PRESETS[config.preset]
    return config.ngram or preset[0], config.bands or preset[1], config.rows or preset[2]


def signature_settings(config: NearDuplicates | None) -> dict[str, Any] | None:
    """All that a signature depends on; None without near-duplicates."""
    if config is None:
        return None
    from importlib import metadata

    from rensa import RMinHash
    ngram, bands, rows = banding(config)
    return {"ngram": ngram, "bands": bands, "rows": rows, "words": config.words,
            "library": f"rensa {metadata.version('rensa')}, algorithm {RMinHash.ALGORITHM_VERSION}"}


def words(text: str, kind: str) -> list[str]:
    """The words of a text, for shingles; kind: one of `WORDS`."""
    return WORDS[kind].findall(text.lower())


class Signer:
    """Signatures of texts that come one by one, some of them in memory at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.signed = settings, [np.zeros((0, settings["bands"]), np.uint64)]
        self.texts: list[str] = []
        self.characters, self.most = 0, _CHARACTERS_AT_ONCE[settings["words"]]

    def add(self, text: str) -> None:
        """Take one more text."""
        self.texts.append(text)
        self.characters += len(text)
        if len(self.texts) == _TEXTS_AT_ONCE or self.characters > self.most:
            self._sign()

    def _sign(self) -> None:
        self.signed.append(signatures(self.texts, self.settings))
        self.texts, self.characters = [], 0

    def write(self, path: Path) -> Path:
        """Write the signatures of all texts, (texts, bands) uint64, as .npy."""
        if self.texts:
            self._sign()
        with atomic_file(path) as file:
            np.save(file, np.concatenate(self.signed))
        return path


def signatures(texts: Sequence[str], settings: dict[str, Any]) -> np.ndarray:
    """A number for each band of each text, (texts, bands) uint64; `NONE` for a text that is too short.

    Give it some hundred texts at a time: it holds the words of all of them.
    """
    from rensa import RMinHash
    ngram, bands, rows = settings["ngram"], settings["bands"], settings["rows"]
    kind = settings["words"]
    own = [words(text, kind) for text in texts]
    hashed = np.array(RMinHash.hash_token_sets([list(chain.from_iterable(own))])[0], np.uint64)
    lengths = np.array([len(text) for text in own], np.int64)
    shingles = np.maximum(lengths - ngram + 1, 0)
    offsets = np.concatenate([[0], np.cumsum(shingles)])
    first = np.cumsum(lengths) - lengths
    places = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], shingles)
    values = np.zeros(len(places), np.uint64)
    for word in range(ngram):
        values = mixed(values * GOLDEN + hashed[places + word])
    digests = RMinHash.digest_matrix_from_flat_token_hashes(values, offsets.astype(np.uint64), bands * rows, _SEED)
    minima = np.array(digests.to_rows(), np.uint64).reshape(len(texts), bands, rows)
    result = np.zeros((len(texts), bands), np.uint64)
    for row in range(rows):
        result = mixed(result * GOLDEN + minima[:, :, row])
    result[result == NONE] = 1
    result[shingles == 0] = NONE
    return result
