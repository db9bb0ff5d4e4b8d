"""Near-duplicates: found as brute force finds them, the kept one defined, the same for any cut and order."""

import ast
import random
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest

from pipeline.config.data import NearDuplicates
from pipeline.data.planning import components, runs
from pipeline.data.planning.kept import alike, shingles, similarity
from pipeline.data.planning.signatures import NONE, signature_settings, signatures
from pipeline.data.planning.signatures import words as words_of
from tests.data.planning import staged_corpora
from tests.data.planning.staged_corpora import passes, texts_of

FINEWEB = signature_settings(NearDuplicates())


def article(rng, length=200):
    return [f"w{rng.randrange(4000)}" for _ in range(length)]


def edited(rng, words, edits):
    """Words with so many of them replaced at random places."""
    words = list(words)
    for place in rng.sample(range(len(words)), edits):
        words[place] = f"new{rng.randrange(10**6)}"
    return words


def planted(seed=1, families=120, copies=3, sources=3, units=3):
    """Articles with near-copies of 0 to 12 edits (Jaccard of 5-grams 1.0 to 0.54), shuffled over units of sources."""
    rng = random.Random(seed)
    texts = []
    for _ in range(families):
        words = article(rng)
        texts.append(" ".join(words))
        texts += [" ".join(edited(rng, words, rng.choice([0, 1, 2, 4, 6, 9, 12]))) for _ in range(copies)]
    texts += [" ".join(article(rng)) for _ in range(100)] + ["too short"] * 3 + ["one two three four"]
    rng.shuffle(texts)
    cut = np.array_split(np.arange(len(texts)), sources * units)
    return {f"s{source}": [[texts[place] for place in cut[source * units + unit]] for unit in range(units)]
            for source in range(sources)}


def in_order(corpus):
    return [(f"{source}-{unit:05d}:{number}", text) for source, units in corpus.items()
            for unit, texts in enumerate(units) for number, text in enumerate(texts)]


def grams(text, length=5):
    words = words_of(text)
    return {tuple(words[place:place + length]) for place in range(len(words) - length + 1)}


def jaccards(texts):
    """(one, other) -> Jaccard similarity of the 5-grams of any two texts that share some, by brute force."""
    holders, shared = defaultdict(list), defaultdict(int)
    sets = [grams(text) for text in texts]
    for number, own in enumerate(sets):
        for gram in own:
            for other in holders[gram]:
                shared[other, number] += 1
            holders[gram].append(number)
    return {(one, other): count / (len(sets[one]) + len(sets[other]) - count)
            for (one, other), count in shared.items()}


def same_component(count, pairs):
    """The first of each one's component."""
    label = list(range(count))

    def root(node):
        while label[node] != node:
            node = label[node]
        return node
    for one, other in pairs:
        one, other = sorted((root(one), root(other)))
        label[other] = one
    return [root(node) for node in range(count)]


def config_of(corpus, verify=None, **values):
    return staged_corpora.settings(corpus, near_duplicates={"preset": "fineweb", "verify": verify}, shard_mb=0.05,
                                   heldout_share=0.3, **values)


def test_recall_and_precision_against_brute_force():
    texts = [text for _, text in in_order(planted())]
    similar = jaccards(texts)
    found = signatures(texts, FINEWEB)
    same = {pair for pair in similar if (found[pair[0]] == found[pair[1]])[found[pair[0]] != NONE].any()}
    every = {(int(one), int(other)) for band in range(14) for key in np.unique(found[:, band])
             for places in [np.flatnonzero(found[:, band] == key)] if key != NONE
             for at, one in enumerate(places) for other in places[at + 1:]}
    assert every == same  # of those that share no shingle, none
    for least, most, low, high in ((0.9, 1.01, 0.995, 1), (0.8, 0.9, 0.85, 1), (0.5, 0.62, 0.0, 0.5)):
        pairs = [pair for pair, value in similar.items() if least <= value < most]
        expected = np.mean([1 - (1 - similar[pair] ** 8) ** 14 for pair in pairs])
        share = sum(pair in same for pair in pairs) / len(pairs)
        assert len(pairs) > 40 and low <= share <= high
        assert share == pytest.approx(expected, abs=0.1)  # the curve that the bands are chosen by
    assert all(value > 0.3 for pair, value in similar.items() if pair in same)


@pytest.mark.parametrize("keep", ["first", "last"])
@pytest.mark.parametrize("verify", [None, 0.8])
def test_one_of_a_component_stays_and_every_dropped_one_names_it(tmp_path, keep, verify):
    corpus = planted(seed=2)
    documents = in_order(corpus)
    texts = [text for _, text in documents]
    found = passes(tmp_path, corpus, config_of(corpus, verify, keep_duplicate=keep))
    bands = signatures(texts, FINEWEB)
    order = list(range(len(texts))) if keep == "first" else list(reversed(range(len(texts))))
    pairs = [(one, other) for one in range(len(texts)) for other in range(one)
             if texts[one] == texts[other] or ((bands[one] == bands[other]) & (bands[one] != NONE)).any()]
    rank = {place: number for number, place in enumerate(order)}
    label = same_component(len(texts), [(rank[one], rank[other]) for one, other in pairs])
    expected = {}
    for place, (identity, text) in enumerate(documents):
        first = order[label[rank[place]]]
        equal = min((other for other in range(len(texts)) if texts[other] == text), key=rank.get)
        like = first != place and (verify is None or text == texts[first]
                                   or similarity(shingles(text), shingles(texts[first])) >= verify)
        if equal != place or like:
            kept = first if like else equal
            expected[identity] = (documents[kept][0], "duplicate" if equal != place else "near_duplicate")
    assert {row["id"]: (row["kept_id"], row["kind"]) for row in found.kept} == expected
    assert {row["kind"] for row in found.kept} == {"duplicate", "near_duplicate"}
    assert all(row["source"] == row["id"][:2] and row["kept_source"] == row["kept_id"][:2] for row in found.kept)
    stay = {**texts_of(tmp_path, "train"), **texts_of(tmp_path, "heldout")}
    assert stay == {identity: text for identity, text in documents if identity not in expected}
    assert len(found.kept) == found.decided.summary.dropped.sum() > 200
    assert all(row["kept_id"] in stay for row in found.kept)
    split = {identity: name for name in ("train", "heldout") for identity in texts_of(tmp_path, name)}
    of_component = defaultdict(set)
    for place, (identity, _) in enumerate(documents):
        if identity in split:
            of_component[label[rank[place]]].add(split[identity])
    assert all(len(splits) == 1 for splits in of_component.values())
    several = len(stay) - len(of_component)
    assert several > 10 if verify else several == 0


def test_nothing_depends_on_groups_partitions_order_or_being_done_again(tmp_path, monkeypatch):
    corpus = planted(seed=3)
    config = config_of(corpus, 0.7)
    whole = passes(tmp_path / "0", corpus, config)
    for number, (documents, units, rows, stretch) in enumerate([(50, 1, 10, 7), (200, 2, 100, 50),
                                                                (10**6, 4, 40, 100)], 1):
        for name, value in (("GROUP_DOCUMENTS", documents), ("GROUP_UNITS", units), ("PARTITION_ROWS", rows)):
            monkeypatch.setattr(runs, name, value)
        monkeypatch.setattr(components, "STRETCH", stretch)
        cut = passes(tmp_path / str(number), corpus, config, seed=number)
        assert cut.shards == whole.shards and cut.kept == whole.kept and len(cut.done) > len(whole.done)
        again = passes(tmp_path / str(number), corpus, config, seed=number + 9)
        assert again.shards == whole.shards and again.kept == whole.kept


def test_many_copies_of_a_page_are_a_row_a_group_and_no_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "GROUP_UNITS", 2)
    page = " ".join(article(random.Random(4)))
    corpus = {"a": [[page, *(f"{page} {number}" for number in range(99))] for _ in range(8)]}
    passes(tmp_path, corpus, config_of(corpus))
    bands = [path.stat().st_size - 8 * 15 for path in sorted((tmp_path / "staging/runs").glob("*.bands"))]
    assert len(bands) == 4 and all(size <= 14 * 100 * 12 for size in bands)
    edges = sum(path.stat().st_size // 16 for path in (tmp_path / "staging/edges").iterdir())
    assert edges < 14 * (4 * 100 + 4 * 100)  # of 800 documents; pairs would be 319,600 a band


def test_signatures_are_a_function_of_the_text_alone():
    code = ("from pipeline.data.planning.signatures import *; from pipeline.config.data import NearDuplicates; "
            "settings = signature_settings(NearDuplicates()); "
            "print(signatures(['Some WORDS that are, like, these: ÄÖ one two.', 'x', 'a b c d e'], settings).tolist())")
    said = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                           env={"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}).stdout
            for seed, threads in (("1", "1"), ("2", "4"))}
    assert len(said) == 1
    one, short, other = np.array(ast.literal_eval(said.pop()), np.uint64)
    assert (short == NONE).all() and (one != NONE).all() and (one != other).all()
    texts = ["some words that are like these äö one two", "y", "", "a b c d e"]
    batched = signatures(texts, FINEWEB)
    assert (batched[0] == one).all() and (batched[3] == other).all()
    assert all((signatures([text], FINEWEB)[0] == row).all() for text, row in zip(texts, batched, strict=True))
    assert signatures([], FINEWEB).shape == (0, 14)


def test_presets_and_what_replaces_them():
    assert {name: value for name, value in FINEWEB.items() if name != "library"} == {"ngram": 5, "bands": 14, "rows": 8}
    own = signature_settings(NearDuplicates(preset="olmo3", rows=4))
    assert (own["ngram"], own["bands"], own["rows"]) == (5, 26, 4) and own["library"].startswith("rensa ")
    assert signature_settings(None) is None


def test_documents_are_compared_with_the_one_that_is_kept():
    class Documents:
        def document(self, number):
            return staged_corpora.Document(["a b c d", "a b c d e", "x y z", "A, b; c d"][number], "s", "i", {})
    assert alike(Documents(), np.array([1, 2, 3]), np.array([0, 0, 0]), 0.6).tolist() == [True, False, True]
    assert alike(Documents(), np.array([1, 2, 3]), np.array([0, 0, 0]), 0.7).tolist() == [False, False, True]
