"""Duplicates, splits and shards in bounded passes: the bytes of the shards are those of one process that holds all."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.planning import passes as planning_passes
from drover.pipeline.data.planning import runs
from drover.pipeline.data.planning.passes import decide
from drover.pipeline.data.planning.runs import equal_rows
from tests.data.planning import in_memory, staged_corpora
from tests.data.planning.staged_corpora import Work, cut_into, passes, stage
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
    documents, folder = in_memory.plan(corpus, config), tmp_path_factory.mktemp("passes")
    written = in_memory.write_shards(folder, documents, corpus, target)
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


@given(digests=st.lists(st.tuples(st.sampled_from([0, 1, 2**63, 2**64 - 1]), st.sampled_from([0, 7, 2**64 - 1])),
                        min_size=1, max_size=30))
def test_digests_that_agree_in_a_half_differ(digests):
    high, low = np.array(digests, np.uint64).T
    for last, numbers in ((False, range(len(digests))), (True, reversed(range(len(digests))))):
        order = sorted(numbers, key=digests.__getitem__)
        first = {digests[place]: place for place in reversed(order)}
        others = [place for place in order if first[digests[place]] != place]
        assert [result.tolist() for result in equal_rows([high, low], last)] == [
            [place for place in order if place not in others], others, [first[digests[place]] for place in others]]


def test_groups_and_partitions_follow_from_the_documents_alone(monkeypatch):
    cut_into(monkeypatch, 100, 3, 64)
    result = runs.layout("abcdefgh", [0] * 8, [60, 40, 1, 0, 0, 0, 500, 7])
    assert result.groups == [0, 2, 5, 6, 7, 8] and result.group_starts.tolist() == [0, 100, 101, 101, 601, 608]
    assert result.partitions == 16, "the power of two above 608 / 64"
    assert runs.layout("a", [0], [0]).partitions == 1


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
    refused(UserError, r"a-00000\.tar cannot be written: the document \S+ is not what was staged",
            lambda: [planning_passes.write_shard(tmp_path, payload) for payload in decided.payloads])


def test_a_shard_that_reads_back_as_other_bytes_is_refused(tmp_path, monkeypatch):
    corpus, plain = {"a": [["one", "two"]]}, planning_passes.write_members

    def harmed(path, members):
        written = plain(path, members)
        path.write_bytes(path.read_bytes().replace(b"one", b"0ne"))
        return written
    monkeypatch.setattr(planning_passes, "write_members", harmed)
    refused(UserError, r"a-00000\.tar does not read back as it was written", passes, tmp_path, corpus,
            staged_corpora.settings(corpus, validation_share=0.5, shard_mb=1))
