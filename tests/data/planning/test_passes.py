"""Duplicates, splits and shards in bounded passes: the bytes of the shards are those of one process that holds all."""

import io
import json
import tarfile
from collections import Counter
from fractions import Fraction
from math import ceil

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.documents import digest, document_key
from drover.pipeline.data.planning import passes as planning_passes
from drover.pipeline.data.planning.passes import decide
from drover.pipeline.data.text_shards import SPLITS
from tests.data.planning import staged_corpora
from tests.data.planning.staged_corpora import Work, cut_into, in_order, passes, stage
from tests.refusal import refused

TEXTS = st.lists(st.one_of(
    st.sampled_from(["same", "other", "ab", "a", "b", "bb", "a\0\u2581b", "x" * 70]),
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=9).filter(str.strip)), max_size=9)
CORPORA = st.fixed_dictionaries({name: st.lists(TEXTS, min_size=1, max_size=4) for name in "abc"})
TAIL = {"tail": True, "target": 3, "seed": 1}


@settings(max_examples=50)
@given(corpus=CORPORA, drop=st.booleans(), tail=st.booleans(),
       share=st.sampled_from([0.07, 0.1, 0.25, 0.5, 0.9]), target=st.sampled_from([3, 10, 60, 1000]),
       sizes=st.tuples(st.sampled_from([1, 5, 10**6]), st.sampled_from([1, 2, 256]), st.sampled_from([2, 9, 10**6])),
       seed=st.integers(0, 9))
@example(corpus={"a": [["bb", "b"]], "b": [["b"], ["bb"]], "c": [["b", "abab"]]}, drop=False, share=0.5,
         sizes=(1, 1, 2), **TAIL)
@example(corpus={"a": [["bb"]], "b": [["b"], ["bb"]], "c": [["b"]]}, drop=True, share=0.5, sizes=(1, 1, 2),
         **TAIL)
@example(corpus={"a": [["ab", "ab", "abab"]], "b": [["b"]], "c": [["c"]]}, drop=False, share=0.25,
         sizes=(1, 1, 2), **TAIL)
def test_the_shards_are_those_of_one_process_that_holds_all(tmp_path_factory, monkeypatch, corpus, drop, tail,
                                                            share, target, sizes, seed):
    """And have each document that stays once, in its split, in order, in shards of about equal size."""
    config = staged_corpora.settings(corpus, drop_duplicates=drop, validation_share=share,
                                     validation_rule="tail" if tail else "hash", shard_mb=target / 1e6)
    result = passes(tmp_path_factory.mktemp("whole"), corpus, config)
    with monkeypatch.context() as patch:
        cut_into(patch, *sizes)
        assert passes(tmp_path_factory.mktemp("passes"), corpus, config, seed).shards == result.shards
    every = [(unit.partition("-")[0], text) for unit, _, text in in_order(corpus)]
    once = {text: number for number, (_, text) in reversed([*enumerate(every)])}
    kept = [one for number, one in enumerate(every) if not drop or once[one[1]] == number]
    dropped = Counter(source for source, _ in every) - Counter(source for source, _ in kept)
    starts = np.cumsum([0, *map(len, corpus.values())])
    for source, name in enumerate(corpus):
        texts = [text for own, text in kept if own == name]
        train, validation = (shard_texts(result.shards, split, name) for split in SPLITS)
        if tail:
            together = "".join(texts)
            border = int(len(together) * (1 - Fraction(str(share))))
            assert ("".join(train), "".join(validation)) == (together[:border], together[border:])
            assert len(train) + len(validation) == len(texts) + result.decided.cuts(source)
        else:
            held = [int.from_bytes(digest(text.encode())[:8], "big") < ceil(share * 2**64) for text in texts]
            assert (train, validation) == tuple([text for text, is_held in zip(texts, held, strict=True)
                                                 if is_held == wanted] for wanted in (False, True))
        for split, own in zip(SPLITS, (train, validation), strict=True):
            assert result.decided.sums(source)[split] == {
                "documents": len(own), "text_bytes": sum(len(text.encode()) for text in own),
                "characters": sum(map(len, own)), "u2581": sum("\u2581" in text for text in own)}
        assert result.decided.dropped[starts[source]:starts[source + 1], 0].sum() == dropped[name]
        for split, own in zip(SPLITS, (train, validation), strict=True):
            size = sum(len(text.encode()) for text in own)
            numbers = [int(shard[-5:]) for shard in result.shards if shard.startswith(f"{split}/{name}-")]
            assert len(numbers) == len({*numbers}) and max(numbers, default=-1) < ceil(size / target)


def shard_texts(shards, split, source):
    """The texts of all shards of a split and source, in order, each of which its key fits."""
    result = []
    for _, content in sorted((name, data) for name, data in shards.items() if name.startswith(f"{split}/{source}-")):
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            members = [(member.name, json.load(tar.extractfile(member))["text"]) for member in tar]
        seen = Counter()
        for name, text in members:
            assert name == f"{document_key(digest(text.encode()), seen[text])}.json"
            seen[text] += 1
        result += [text for _, text in members]
    return result


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
