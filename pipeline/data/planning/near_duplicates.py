"""Near-duplicates: components of documents that share bands, and which document is dropped in favour of which.

One unit of work finds all components. It holds 4 bytes a document (8 from 2^32 documents on) and some 40 for each
document that is not the first of its component, and reads the links part by part. It writes the followers: the
documents that are not the first of their component, each with that first, sorted by component. A part has whole
components.

The first document of a component stays. Without `verify` all others are dropped. With it, each of them is compared, in
order, with those that stay so far: it is dropped in favour of the first that is similar enough, else it stays too. A
unit is a part of the components. It writes links in the two columns after the bands: from each dropped document to the
one that is kept instead, and from each that stays to the first of its component, whose split it shares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain, product
from pathlib import Path
from typing import TypedDict

import numpy as np

from drover.pipeline.config.data import NearDuplicates
from drover.pipeline.core.files import Outputs
from drover.pipeline.data.item_index import WITHOUT_SPACES
from drover.pipeline.data.mixing import GOLDEN, mixed
from drover.pipeline.data.planning.runs import (
    DIGEST,
    LINK,
    NONE,
    STAGING,
    CorpusLayout,
    PartitionTask,
    StagedDocuments,
    links_path,
    read_rows,
    with_records,
    write_array,
    write_links,
    write_rows,
)

AT_ONCE = 1 << 20
"""Links or documents that are processed at once."""


def followers_path(folder: Path) -> Path:
    """The file of the followers: the number of each as `other`, of the first of its component as `kept`; components one
    after another, each in order."""
    return folder / STAGING / "followers"


def join_components(folder: Path, task: object) -> dict[str, Outputs]:
    """Write the followers. Returns the file as `outputs`."""
    plan = CorpusLayout.read(folder)
    total = plan.starts[-1]
    parent = np.arange(total, dtype=np.uint32 if total < 1 << 32 else np.uint64)
    for links in _links(folder, plan):
        join(parent, links["other"].astype(np.int64), links["kept"].astype(np.int64))
    flatten(parent)
    others = np.flatnonzero(parent != np.arange(total, dtype=parent.dtype))
    others = others[np.argsort(parent[others], kind="stable")]
    firsts = parent[others]
    borders = firsts.searchsorted(firsts[np.arange(1, plan.partitions) * len(others) // plan.partitions]) \
        if len(others) else np.zeros(plan.partitions - 1, np.int64)
    rows = np.empty(len(others), LINK)
    rows["other"], rows["kept"] = others, firsts
    return with_records(folder, [write_rows(followers_path(folder), rows, np.concatenate([[0], borders, [len(rows)]]))])


def _links(folder: Path, plan: CorpusLayout) -> Iterator[np.ndarray]:
    """The links of all bands."""
    names = [*plan.group_names, *plan.partition_names]
    for band, name in product(range(plan.bands), names):
        with open(links_path(folder, DIGEST + 1 + band, name), "rb") as file:
            file.seek(8 * len(plan.groups))
            while len(links := np.fromfile(file, LINK, AT_ONCE)):
                yield links


def join(parent: np.ndarray, first: np.ndarray, other: np.ndarray) -> None:
    """Join trees of nodes along edges: the larger root gets the smaller one as its parent.

    Args:
        parent: of each node, itself for a root; no parent is larger than its child.
    """
    while len(first):
        first, other = _roots(parent, first), _roots(parent, other)
        apart = first != other
        first, other = first[apart], other[apart]
        np.minimum.at(parent, np.maximum(first, other), np.minimum(first, other))


def _roots(parent: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    result = parent[nodes]
    while True:
        above = parent[result]
        if (above == result).all():
            return result
        parent[nodes] = result = above  # halves the path for later calls


def flatten(parent: np.ndarray) -> None:
    """Make every node's parent its root."""
    for start in range(0, len(parent), AT_ONCE):
        part = parent[start:start + AT_ONCE]  # what is before is flat
        while not ((above := parent[part]) == part).all():
            part[:] = above


NGRAM = 3
"""Words of the shingles by which two documents are compared."""
MOST_COMPARED = 256
"""Documents of a component, without its first, that later ones are compared with: they are in memory."""
Shingles = set[tuple[str, ...]]


def near_columns(plan: CorpusLayout) -> tuple[int, int]:
    """The columns of near-duplicates that are dropped, and of those that stay."""
    return plan.bands + 1, plan.bands + 2


class ResolveTask(PartitionTask):
    """A part of the components. verify: the least similarity; None: drop without a comparison. words: see `words`."""

    verify: float | None
    words: str


def resolve_partition(folder: Path, task: ResolveTask) -> dict[str, Outputs]:
    """Choose in one part of the components. Returns the files as `outputs`."""
    plan, partition = CorpusLayout.read(folder), task["partition"]
    followers = read_rows(followers_path(folder), LINK, partition, plan.partitions)
    dropped = followers if task["verify"] is None else _similar(
        StagedDocuments(folder, plan), followers, task["verify"], task["words"])
    staying = followers[~np.isin(followers["other"], dropped["other"])]
    return with_records(folder, [
        write_links(folder, plan, column, plan.partition_names[partition], rows["other"], rows["kept"])
        for column, rows in zip(near_columns(plan), (dropped, staying), strict=True)])


def _similar(documents: StagedDocuments, followers: np.ndarray, least: float, kind: str) -> np.ndarray:
    """The followers that are dropped, each with the document that is kept instead."""
    result, component, staying = list[tuple[int, int]](), None, list[tuple[int, Shingles]]()
    for number, first in followers.tolist():
        if first != component:
            component, staying = first, [(first, shingles(documents.document(first).text, kind))]
        own = shingles(documents.document(number).text, kind)
        kept = next((other for other, its in staying if similarity(own, its) >= least), None)
        if kept is not None:
            result.append((number, kept))
        elif len(staying) <= MOST_COMPARED:
            staying.append((number, own))
    return np.array(result, LINK)


def shingles(text: str, kind: str) -> Shingles:
    """All runs of `NGRAM` words of a text, or its words where they are fewer; kind: see `signatures.words`."""
    own = words(text, kind)
    return {tuple(own[place:place + NGRAM]) for place in range(max(1, len(own) - NGRAM + 1))}


def similarity(one: Shingles, other: Shingles) -> float:
    """Jaccard similarity of two sets, of which one holds something."""
    shared = len(one & other)
    return shared / (len(one) + len(other) - shared)


PRESETS = {"fineweb": (5, 14, 8), "olmo3": (5, 26, 11)}
"""Words of a shingle, bands, rows. FineWeb (Penedo et al. 2024) aims at a Jaccard similarity of 0.75; Olmo 3 (2025) at
0.80, with shingles of 5 tokens of its own tokenizer where ours are of 5 words."""
WORDS = {"runs": re.compile(r"\w+"), "characters": re.compile(f"[{WITHOUT_SPACES}]|[^\\W{WITHOUT_SPACES}]+")}
_ASCII_WORDS = re.sub(rb"\W", b" ", bytes(range(256)))
"""Spaces in place of what is between words."""
_TEXTS_AT_ONCE, _CHARACTERS_AT_ONCE = 256, {"runs": 2_000_000, "characters": 500_000}
_SEED = 1


def banding(config: NearDuplicates) -> tuple[int, int, int]:
    """Words of a shingle, bands, rows."""
    preset = PRESETS[config.preset]
    return config.ngram or preset[0], config.bands or preset[1], config.rows or preset[2]


class SignatureSettings(TypedDict):
    """All that a signature depends on."""

    ngram: int
    bands: int
    rows: int
    words: str
    library: str


def signature_settings(config: NearDuplicates) -> SignatureSettings:
    """All that a signature depends on."""
    from importlib import metadata

    from rensa import RMinHash
    ngram, bands, rows = banding(config)
    return {"ngram": ngram, "bands": bands, "rows": rows, "words": config.words,
            "library": f"rensa {metadata.version('rensa')}, algorithm {RMinHash.ALGORITHM_VERSION}"}


def words(text: str, kind: str) -> list[str]:
    """The words of a text, for shingles; kind: one of `WORDS`. All kinds have the same words of ASCII."""
    if text.isascii():
        return text.lower().encode().translate(_ASCII_WORDS).decode().split()  # twice as fast
    return WORDS[kind].findall(text.lower())


class Signer:
    """Signatures of texts that come one by one, some of them in memory at a time."""

    def __init__(self, settings: SignatureSettings) -> None:
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
        return write_array(path, np.concatenate(self.signed))


def signatures(texts: Sequence[str], settings: SignatureSettings) -> np.ndarray:
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
