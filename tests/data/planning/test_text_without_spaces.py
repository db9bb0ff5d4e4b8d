"""Near-duplicates in scripts that put no spaces between words: `near_duplicates.words: characters`."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.data import NearDuplicates
from pipeline.config.section import identity
from pipeline.data.planning.kept import shingles, similarity
from pipeline.data.planning.signatures import NONE, signature_settings, signatures, words
from tests.data.planning import staged_corpora
from tests.data.planning.staged_corpora import passes, texts_of

HAN = [chr(0x4e00 + number) for number in range(3000)]
SETTINGS = {kind: signature_settings(NearDuplicates(words=kind)) for kind in ("runs", "characters")}


def article(rng, length=600):
    """Characters, of which few are frequent, in clauses of about twelve."""
    drawn = rng.choices(HAN, [1 / (number + 1) for number in range(len(HAN))], k=length)
    return [character + rng.choice("，，。") * (rng.random() < 1 / 12) for character in drawn]


def near_copy(rng, characters, edits):
    characters = list(characters)
    for place in rng.sample(range(len(characters)), edits):
        characters[place] = rng.choice(HAN)
    return characters


def found(texts, kind):
    """Which of the pairs (0, 1), (2, 3), ... share a band, and which of the pairs that are no copies do."""
    own = signatures(texts, SETTINGS[kind])
    one, other = own[0::2], own[1::2]
    return [((one == those) & (one != NONE)).any(axis=1) for those in (other, np.roll(other, 1, axis=0))]


def test_near_copies_of_chinese_text_are_found_by_characters_and_hardly_by_runs():
    rng, texts = random.Random(5), []
    for _ in range(60):
        own = article(rng)
        texts += ["".join(own), "".join(near_copy(rng, own, 6))]
    copies, others = found(texts, "characters")
    assert copies.mean() >= 0.98 and not others.any()
    assert found(texts, "runs")[0].mean() <= 0.2


@pytest.mark.parametrize(("text", "own"), [
    ("我們在2024年、買了iPhone。", ["我", "們", "在", "2024", "年", "買", "了", "iphone"]),
    ("カタカナと、ひらがなー々", [*"カタカナとひらがなー々"]),
    ("ภาษาไทย ดี", [*"ภาษาไทยดี"]), ("ที่นี่", [*"ที่นี่"]), ("မြန်မာ ខ្មែរ ລາວ", [*"မြန်မာខ្មែរລາວ"]),
    ("\U00020000\U00030000x", ["\U00020000", "\U00030000", "x"]),
    ("한국어 문장", ["한국어", "문장"]), ("Ünï_code, words: ΑΒΓ हिन्दी", words("Ünï_code, words: ΑΒΓ हिन्दी"))])
def test_what_a_word_is(text, own):
    assert words(text, "characters") == own


@given(text=st.text(st.characters(max_codepoint=0xdff, exclude_categories=["Cs"])))
def test_text_with_spaces_is_compared_as_before(text):
    assert words(text, "characters") == words(text) == words(text, "runs")
    assert shingles(text, "characters") == shingles(text)


def test_who_does_not_ask_for_characters_has_what_was_before():
    assert list(SETTINGS["runs"]) == ["ngram", "bands", "rows", "library"]
    assert SETTINGS["characters"] == SETTINGS["runs"] | {"words": "characters"}
    assert "words" not in identity(NearDuplicates()) and "words" in identity(NearDuplicates(words="characters"))
    text = "Some WORDS that are, like, these: 我們在年 one two."
    assert (signatures([text], SETTINGS["runs"]) != signatures([text], SETTINGS["characters"])).any()


@pytest.mark.parametrize("kind", ["runs", "characters"])
def test_the_stage_drops_them_and_compares_by_the_same_words(tmp_path, kind):
    rng = random.Random(6)
    own = article(rng)
    far = [*own[:400], *article(rng, 200)]  # half of their runs of 3 are the same
    texts = ["".join(own), "".join(near_copy(rng, own, 6)), "".join(far), "".join(article(rng))]
    corpus = {"s": [texts[:2], texts[2:]]}
    near = {"preset": "fineweb", "bands": 60, "rows": 2, "verify": 0.8, "words": kind}
    passes(tmp_path, corpus, staged_corpora.settings(corpus, near_duplicates=near, heldout_share=0.3))
    stay = {**texts_of(tmp_path, "train"), **texts_of(tmp_path, "heldout")}
    alike = similarity(shingles(texts[0], "characters"), shingles(texts[1], "characters"))
    assert alike > 0.9 > 0.8 > similarity(shingles(texts[0], "characters"), shingles(texts[2], "characters"))
    assert sorted(stay.values()) == sorted(texts[:1] + texts[2:] if kind == "characters" else texts)
