"""Duplicates, splits and shards in bounded passes: the bytes of the shards are those of one process that holds all."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.documents import Document, digest, document_key, to_json
from drover.pipeline.data.planning import passes as planning_passes
from drover.pipeline.data.planning.passes import decide
from drover.pipeline.data.text_shards import SPLITS, write_members
from tests.data.planning import staged_corpora
from tests.data.planning.staged_corpora import Work, cut_into, in_order, passes, stage
from tests.refusal import refused

TEXTS = st.lists(st.one_of(
    st.sampled_from(["same", "other", "ab", "a", "b", "bb", "a\0\u2581b", "x" * 70]),
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=9).filter(str.strip)), max_size=9)
CORPORA = st.fixed_dictionaries({name: st.lists(TEXTS, min_size=1, max_size=4) for name in "abc"})
TAIL = {"tail": True, "target": 3, "seed": 1}


@settings(max_examples=50)
@given(corpus=CORPORA, drop=st.booleans(), keep=st.sampled_from(["first", "last"]), tail=st.booleans(),
       share=st.sampled_from([0.07, 0.1, 0.25, 0.5, 0.9]), target=st.sampled_from([3, 10, 60, 1000]),
       sizes=st.tuples(st.sampled_from([1, 5, 10**6]), st.sampled_from([1, 2, 256]), st.sampled_from([2, 9, 10**6])),
       seed=st.integers(0, 9))
@example(corpus={"a": [["bb", "b"]], "b": [["b"], ["bb"]], "c": [["b", "abab"]]}, drop=False, keep="last", share=0.5,
         sizes=(1, 1, 2), **TAIL)
@example(corpus={"a": [["bb"]], "b": [["b"], ["bb"]], "c": [["b"]]}, drop=True, keep="last", share=0.5, sizes=(1, 1, 2),
         **TAIL)
@example(corpus={"a": [["ab", "ab", "abab"]], "b": [["b"]], "c": [["c"]]}, drop=False, keep="first", share=0.25,
         sizes=(1, 1, 2), **TAIL)
def test_the_shards_are_those_of_one_process_that_holds_all(tmp_path_factory, monkeypatch, corpus, drop, keep, tail,
                                                            share, target, sizes, seed):
    config = staged_corpora.settings(corpus, drop_duplicates=drop, keep_duplicate=keep, validation_share=share,
                                     validation_rule="tail" if tail else "hash", shard_mb=target / 1e6)
    documents, folder = plan(corpus, config), tmp_path_factory.mktemp("passes")
    written = write_shards(folder, documents, corpus, target)
    cut_into(monkeypatch, *sizes)
    result = passes(folder, corpus, config, seed)
    assert result.shards == written
    first = 0
    for source, (name, units) in enumerate(corpus.items()):
        own = [one for one in documents if one.source == name]
        for split, sums in result.decided.sums(source).items():
            texts = [one.text for one in own if not one.dropped and one.validation == (split == "validation")]
            assert sums == {
                "documents": len(texts), "text_bytes": sum(len(text.encode()) for text in texts),
                "characters": sum(map(len, texts)), "nul": sum("\0" in text for text in texts),
                "u2581": sum("\u2581" in text for text in texts)}
        assert result.decided.dropped[first:first + len(units), 0].sum() == sum(one.dropped for one in own)
        assert result.decided.cuts(source) * 2 == sum(one.unit == f"{name}-cut" for one in own)
        first += len(units)


def test_a_torn_file_is_named(tmp_path):
    corpus, work = {"a": [["one", "two", "three"]]}, Work(tmp_path)
    run_pass = work.run_pass

    def torn(own, *arguments):
        if own == "match":
            path = next((tmp_path / "staging").glob("runs/*/group-000000"))
            path.write_bytes(path.read_bytes()[:-1])
        return run_pass(own, *arguments)
    work.run_pass = torn
    refused(UserError, "runs/000/group-000000 ends before its part 0 of 1. Delete it", decide, work,
            staged_corpora.settings(corpus, validation_share=0.5), *stage(tmp_path, corpus))


def test_a_staged_document_that_a_disk_changes_is_refused(tmp_path):
    corpus = {"a": [["one", "two"]]}
    decided = decide(Work(tmp_path), staged_corpora.settings(corpus, validation_share=0.5), *stage(tmp_path, corpus))
    staging = next((tmp_path / "staging").glob("*/a-00000.documents"))
    staging.write_bytes(staging.read_bytes().replace(b"one", b"0ne"))
    refused(UserError, r"a-00000\.documents changed after it was written",
            lambda: [planning_passes.write_shard(tmp_path, payload) for payload in decided.payloads])


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
