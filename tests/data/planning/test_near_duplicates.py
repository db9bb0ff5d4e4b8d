"""Near-duplicates: found as brute force finds them, the kept one defined, the same for any cut and order; in scripts
without spaces between words, too (`near_duplicates.words: characters`)."""

import ast
import random
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drover.pipeline.config.data import NearDuplicates
from drover.pipeline.data.planning import near_duplicates
from drover.pipeline.data.planning.near_duplicates import (
    NONE,
    WORDS,
    followers_path,
    join_components,
    shingles,
    signature_settings,
    signatures,
    similarity,
    words,
)
from drover.pipeline.data.planning.runs import DIGEST, LINK, CorpusLayout, read_rows, write_links
from tests.conftest import run_python
from tests.data.planning import staged_corpora
from tests.data.planning.staged_corpora import cut_into, firsts, in_order, passes, texts_of

FINEWEB = signature_settings(NearDuplicates())
def article(rng):
    return [f"w{rng.randrange(4000)}" for _ in range(200)]


def edited(rng, own, edits):
    """Words with so many of them replaced at random places."""
    own = list(own)
    for place in rng.sample(range(len(own)), edits):
        own[place] = f"new{rng.randrange(10**6)}"
    return own


def planted(seed=1, families=120):
    """Articles with near-copies of 0 to 12 edits (Jaccard of 5-grams 1.0 to 0.54), shuffled over three units of three
    sources."""
    rng = random.Random(seed)
    texts = []
    for _ in range(families):
        own = article(rng)
        texts.append(" ".join(own))
        texts += [" ".join(edited(rng, own, rng.choice([0, 1, 2, 4, 6, 9, 12]))) for _ in range(3)]
    texts += [" ".join(article(rng)) for _ in range(100)] + ["too short"] * 3 + ["one two three four"]
    rng.shuffle(texts)
    units = [own.tolist() for own in np.array_split(texts, 9)]
    return {f"s{source}": units[3 * source:3 * source + 3] for source in range(3)}


def share_a_band(result, one, other):
    return bool(((result[one] == result[other]) & (result[one] != NONE)).any())


def config_of(corpus, **near):
    return staged_corpora.settings(corpus, near_duplicates=near, shard_mb=0.05,
                                   validation_share=0.3)


def test_recall_and_precision_against_brute_force():
    texts = [text for _, _, text in in_order(planted())]
    result, cut = signatures(texts, FINEWEB), [text.lower().split() for text in texts]
    sets = [{tuple(own[place:place + 5]) for place in range(len(own) - 4)} for own in cut]
    similar = {(one, other): similarity(sets[one], sets[other]) for other in range(len(texts)) for one in range(other)
               if not sets[one].isdisjoint(sets[other])}
    same = {(one, other) for other in range(len(texts)) for one in range(other) if share_a_band(result, one, other)}
    assert same <= similar.keys()  # of those that share no shingle, none
    for least, most, error in ((0.9, 1.01, 0.005), (0.8, 0.9, 0.1), (0.5, 0.62, 0.1)):
        pairs = [pair for pair, value in similar.items() if least <= value < most]
        expected = np.mean([1 - (1 - similar[pair] ** 8) ** 14 for pair in pairs])  # the curve that bands are chosen by
        assert len(pairs) > 40 and np.mean([pair in same for pair in pairs]) == pytest.approx(expected, abs=error)


def greedily(texts, label, verify):
    """place -> the place of the document that is kept instead, of those that are dropped."""
    result, staying = {}, defaultdict(list)
    for place in range(len(texts)):
        own = staying[label.get(place, place)]
        kept = next((other for other in own if verify is None or texts[place] == texts[other]
                     or similarity(shingles(texts[place], "runs"), shingles(texts[other], "runs")) >= verify), None)
        if kept is None:
            own.append(place)
        else:
            result[place] = kept
    return result


@pytest.mark.parametrize(("verify", "sizes"), [(0.8, None), (0.8, (50, 1, 10)), (None, (10**6, 4, 40))])
def test_one_of_a_component_stays_and_every_dropped_one_names_it(tmp_path, monkeypatch, verify, sizes):
    """However groups, partitions and components are cut."""
    if sizes:
        cut_into(monkeypatch, *sizes)
    corpus = planted(seed=2, families=60)
    documents = [(own, text) for _, own, text in in_order(corpus)]
    texts = [text for _, text in documents]
    result = passes(tmp_path, corpus, config_of(corpus, verify=verify))
    bands = signatures(texts, FINEWEB)
    label = firsts((one, other) for other in range(len(texts)) for one in range(other)
                    if texts[one] == texts[other] or share_a_band(bands, one, other))
    expected = {}
    for place, of in greedily(texts, label, verify).items():
        equal = min(other for other, text in enumerate(texts) if text == texts[place])
        expected[documents[place][0]] = (documents[of][0], texts[place] == texts[of],
                                         "near_duplicate" if equal == place else "duplicate")
    assert {row["id"]: (row["kept_id"], row["equal"], row["kind"]) for row in result.kept} == expected
    assert {(kind, equal) for _, equal, kind in expected.values()} >= {("duplicate", True), ("near_duplicate", False)}
    assert all(row["source"] == row["id"][:2] and row["kept_source"] == row["kept_id"][:2] for row in result.kept)
    assert len(result.kept) == result.decided.dropped.sum() > 100
    splits = {own: split for split in ("train", "validation") for own in texts_of(tmp_path, split)}
    assert {own for own, _ in documents} - splits.keys() == expected.keys()
    of_component = {(label.get(place, place), splits[own]) for place, (own, _) in enumerate(documents) if own in splits}
    assert len({component for component, _ in of_component}) == len(of_component), "a component lies in one split"


def test_signatures_are_a_function_of_the_text_alone():
    """In any process, alone or beside others, of words without their case and marks."""
    code = ("from drover.pipeline.data.planning.near_duplicates import *; "
            "from drover.pipeline.config.data import NearDuplicates; "
            "settings = signature_settings(NearDuplicates()); "
            "print(signatures(['Some WORDS that are, like, these: ÄÖ one two.', 'x', 'a b c d e'], settings).tolist())")
    logged = {run_python("-c", code, PYTHONHASHSEED=seed, RAYON_NUM_THREADS=threads).stdout
            for seed, threads in (("1", "1"), ("2", "4"))}
    [result] = map(ast.literal_eval, logged)
    texts = ["some words that are like these äö one two", "", "a b c d e"]
    assert result == [signatures([text], FINEWEB)[0].tolist() for text in texts]
    assert signatures([], FINEWEB).shape == (0, 14)


def test_of_one_component_only_so_many_that_stay_are_compared(tmp_path, monkeypatch):
    """Versions of a page by twos, none like the first: those that came too late to be compared with all stay."""
    rng = random.Random(8)
    page = article(rng)
    versions = [" ".join(edited(rng, page, 60)) for _ in range(6)]
    corpus = {"a": [[" ".join(page), *(f"{version} {number}" for number in range(2) for version in versions)]]}
    for most, stay in ((256, 7), (4, 7 + 2)):
        monkeypatch.setattr(near_duplicates, "MOST_COMPARED", most)
        passes(tmp_path / str(most), corpus, config_of(corpus, verify=0.9, bands=80, rows=1))
        assert len(texts_of(tmp_path / str(most))) == stay


@pytest.mark.parametrize(("text", "own"), [
    ("我們在2024年、買了iPhone。", ["我", "們", "在", "2024", "年", "買", "了", "iphone"]),
    ("カタカナと、ひらがなー々", [*"カタカナとひらがなー々"]),
    ("ภาษาไทย ดี ที่นี่", [*"ภาษาไทยดีที่นี่"]), ("မြန်မာ ខ្មែរ ລາວ", [*"မြန်မာខ្មែរລາວ"]),
    ("\U00020000\U00030000x", ["\U00020000", "\U00030000", "x"]),
    ("한국어 문장", ["한국어", "문장"])])
def test_what_a_word_is(text, own):
    assert words(text, "characters") == own


@pytest.mark.parametrize("kind", WORDS)
def test_ascii_has_the_words_that_other_text_has(kind):
    rng = random.Random(0)
    texts = ["".join(map(chr, rng.choices(range(128), k=300))) for _ in range(200)]
    for text in texts:
        assert words(text, kind) == words(f"{text}\u00a0", kind)  # which is no word


def write_edges(folder, plan, edges, seed):
    """Edges (n, 2) in the files of links, in any order."""
    plan.write(folder)
    names = [(column, name) for column in range(DIGEST + 1, plan.bands + 1)
             for name in (*plan.group_names, *plan.partition_names)]
    of = np.random.default_rng(seed).integers(0, len(names), len(edges))
    rows = np.array(edges, np.int64).reshape(-1, 2)
    for number, (column, name) in enumerate(names):
        write_links(folder, plan, column, name, *rows[of == number].T)


@st.composite
def graphs(draw):
    """(documents, edges): a path or none, in any order of the documents, and edges at random."""
    documents = draw(st.integers(2, 120) | st.just(400))
    seed, numbers = draw(st.integers(0, 2**32 - 1)), np.arange(documents)
    shuffled = np.random.default_rng(seed).permutation(documents)
    path = draw(st.sampled_from([numbers[:0], numbers, numbers[::-1], shuffled]))
    edges = draw(st.lists(st.tuples(st.integers(0, documents - 1), st.integers(0, documents - 1)), max_size=120))
    return documents, [*pairwise(path), *(edge for edge in edges if edge[0] != edge[1])], seed


@settings(max_examples=40)
@given(graph=graphs(), rows=st.sampled_from([1, 5, 10**6]), groups=st.integers(1, 5),
       bands=st.integers(1, 2), partitions=st.sampled_from([1, 4]))
@example(graph=(0, [], 0), rows=5, groups=1, bands=1, partitions=1)
def test_components_are_those_of_union_find(tmp_path_factory, monkeypatch, graph, rows, groups, bands,
                                            partitions):
    """The plan has groups of one unit each."""
    folder, (documents, edges, seed) = tmp_path_factory.mktemp("graph"), graph
    starts = np.linspace(0, documents, groups + 1).astype(int).tolist()
    plan = CorpusLayout([f"a-{group:05d}" for group in range(groups)], [0] * groups, starts, list(range(groups + 1)),
                  partitions, bands)
    write_edges(folder, plan, edges, seed)
    monkeypatch.setattr(near_duplicates, "AT_ONCE", rows)
    join_components(folder, {})
    parts = [read_rows(followers_path(folder), LINK, part, partitions).tolist() for part in range(partitions)]
    followers = [row for row in firsts(edges).items() if row[0] != row[1]]
    assert [row for part in parts for row in part] == sorted(followers, key=lambda row: row[::-1])
    full = [first for part in parts for first in {first for _, first in part}]
    assert len(full) == len(set(full)), "a component lies in one part"
