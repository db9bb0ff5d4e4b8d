"""Near-duplicates: found as brute force finds them, the kept one defined, the same for any cut and order; in scripts
without spaces between words, too (`near_duplicates.words: characters`)."""

import ast
import random
from collections import defaultdict

import numpy as np
import pytest

from drover.pipeline.config.data import NearDuplicates
from drover.pipeline.data.planning import near_duplicates
from drover.pipeline.data.planning.near_duplicates import (
    NONE,
    WORDS,
    shingles,
    signature_settings,
    signatures,
    similarity,
    words,
)
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
        monkeypatch.setattr(near_duplicates, "AT_ONCE", sizes[2])
    corpus, rng = planted(seed=2, families=60), random.Random(3)
    chain = [article(rng)]
    while len(chain) < 40:
        chain.append(edited(rng, chain[-1], 2))
    rng.shuffle(chain)
    corpus["s3"] = [[" ".join(own) for own in chain]]
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
