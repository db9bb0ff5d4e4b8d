"""The plan of shards as it is written most plainly, with all documents in memory: what the passes are compared with."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np

from drover.pipeline.data.documents import Document, digest, document_key, to_json
from drover.pipeline.data.text_shards import SPLITS, write_members
from tests.data.planning.staged_corpora import in_order


@dataclass
class Planned:
    """A document, and what becomes of it."""

    unit: str
    id: str
    text: str
    dropped: bool = False
    validation: bool = False

    @property
    def source(self):
        return self.unit.partition("-")[0]


def plan(corpus, config):
    """All documents of a corpus, in order, and how many there are; those that a border cuts as their two parts."""
    documents = [Planned(*entry) for entry in in_order(corpus)]
    seen = set()
    for document in documents if config.keep_duplicate == "first" else reversed(documents):
        document.dropped = config.drop_duplicates and document.text in seen
        seen.add(document.text)
    for document in documents:
        high = int.from_bytes(hashlib.sha256(document.text.encode()).digest()[:8], "big")
        document.validation = high < ceil(config.validation_share * 2**64)
    if config.validation_rule == "tail":
        for source in corpus:
            documents = _with_tail(documents, source, 1 - Fraction(str(config.validation_share)))
    return documents


def _with_tail(documents, source, trained):
    """The documents, the last share of one source's characters held out."""
    left = int(sum(len(one.text) for one in documents if one.source == source and not one.dropped) * trained)
    result = []
    for document in documents:
        parts, size = [document], len(document.text)
        if document.source == source and not document.dropped:
            document.validation = size > left
            if 0 < left < size:
                parts = [Planned(f"{source}-cut", f"{document.id}{place}", text, validation=half)
                         for half, place, text in ((False, f"[:{left}]", document.text[:left]),
                                                   (True, f"[{left}:]", document.text[left:]))]
            left = max(0, left - size)
        result += parts
    return result


def write_shards(folder, documents, sources, target):
    """The bytes of all shards, by split and name: runs of documents of about equal size, as few as keep to `target`
    bytes of text on average."""
    result = {}
    for split in SPLITS:
        for source in sources:
            own = [one for one in documents if one.source == source and not one.dropped
                   and one.validation == (split == "validation")]
            sizes = np.array([len(one.text.encode()) for one in own], np.int64)
            shards = max(1, ceil(sizes.sum() / target))
            numbers = (np.cumsum(sizes) - sizes) * shards // max(sizes.sum(), 1)  # a document of several leaves a gap
            for number in np.unique(numbers).tolist():
                path, seen, members = folder / "expected.tar", Counter(), []
                for one in (one for one, where in zip(own, numbers, strict=True) if where == number):
                    members.append((document_key(digest(one.text.encode()), seen[one.text]),
                                    to_json(Document(one.text, source, one.id, {"of": one.id.partition("[")[0]}))))
                    seen[one.text] += 1
                write_members(path, members)
                result[f"{split}/{source}-{number:05d}"] = path.read_bytes()
    return result
