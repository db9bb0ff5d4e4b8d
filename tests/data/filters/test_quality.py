"""The quality filters give the verdicts of datatrove's, reason for reason and text for text, on the same words: on real
texts, on dirty ones made of them, on made-up ones, and with thresholds on both sides of what each document has."""

import functools
import inspect
import json
import re
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.config.shipped import FILTERS
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Filter
from drover.pipeline.data.filters.quality import NO_WORD, TERMINAL, sentences, word_counts, words
from drover.pipeline.data.filters.repetition import WordRuns
from tests.refusal import table

pytest.importorskip("datatrove", reason="the reference of the quality filters, in the extra `clean`")

import datatrove.utils.text as reference_text
from datatrove.data import Document as ReferenceDocument
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    c4_filters,
    fineweb_quality_filter,
    gopher_quality_filter,
    gopher_repetition_filter,
)

REASONS = {
    "c4": {"lorem_ipsum": "lorem ipsum", "curly_bracket": "a curly bracket",
           "too_few_sentences": "fewer than # sentences are left"},
    "gopher_quality": dict(table("""
        gopher_short_doc -> fewer than # words
        gopher_long_doc -> more than # words
        gopher_below_avg_threshold -> words shorter than # characters on average
        gopher_above_avg_threshold -> words longer than # characters on average
        gopher_too_many_hashes -> more than # # for each word
        gopher_too_many_ellipsis -> more than # ellipses for each word
        gopher_too_many_bullets -> more than # of the lines begin with a bullet
        gopher_too_many_end_ellipsis -> more than # of the lines end in an ellipsis
        gopher_below_alpha_threshold -> fewer than # of the words have a letter
        gopher_enough_stop_words -> fewer than # of the stop words""")),
    "gopher_repetition": {
        **dict(table("""
            dup_para_frac -> more than # of the paragraphs are repetitions
            dup_para_char_frac -> more than # of the characters are in repeated paragraphs
            dup_line_frac -> more than # of the lines are repetitions
            dup_line_char_frac -> more than # of the characters are in repeated lines""")),
        **{f"top_{n}_gram": f"more than # of the characters are one run of {n} words" for n in (2, 3, 4)},
        **{f"duplicated_{n}_n_grams": f"more than # of the characters are in repeated runs of {n} words"
           for n in range(5, 11)}},
    "fineweb_quality": {
        "line_punct_ratio": "fewer than # of the lines end a sentence",
        "short_line_ratio": "more than # of the lines are short",
        "char_dup_ratio": "more than # of the characters are in repeated lines",
        "list_ratio": "more than # line ends for each word"}}
"""datatrove's name of a reason and ours, # being the threshold."""
KINDS = {"c4": C4QualityFilter, "gopher_quality": GopherQualityFilter, "gopher_repetition": GopherRepetitionFilter,
         "fineweb_quality": FineWebQualityFilter}


@pytest.fixture(autouse=True, scope="module")
def same_words():
    """datatrove sees the words and sentences that Drover sees; its own come from spaCy."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (gopher_quality_filter, gopher_repetition_filter, fineweb_quality_filter):
            patch.setattr(module, "split_into_words", lambda text, language: list(words(text)))
        patch.setattr(c4_filters, "split_into_sentences", lambda text, language: [text] * sentences(text))
        yield


def theirs(kind, text, **wanted):
    """datatrove's reason, or the text that it leaves."""
    document = ReferenceDocument(text=text, id="1")
    decision = KINDS[kind](**translated(kind, wanted)).filter(document)
    if decision is True:
        return None, document.text
    return REASONS[kind][decision[1]], None


def translated(kind, wanted):
    """Our settings as the arguments that datatrove's class takes."""
    if kind == "gopher_quality":
        return {"max_non_alpha_words_ratio" if name == "min_alpha_words_ratio" else name: value
                for name, value in wanted.items()}
    if kind == "c4":
        return {name: -1 if value is None else value for name, value in wanted.items()}
    if kind != "gopher_repetition":
        return wanted
    result, defaults = {**wanted}, inspect.signature(GopherRepetitionFilter).parameters
    for rule in ("top", "dup"):  # runs that overlap count more than once
        shares = [(n, result.pop(f"{rule}_{n}_gram", share)) for n, share in defaults[f"{rule}_n_grams"].default]
        result[f"{rule}_n_grams"] = tuple((n, 99 if share is None else share) for n, share in shares)
    return result


def ours(kind, text, **wanted):
    [own] = FILTERS.made([FILTERS.read({"kind": kind, **wanted})])
    result = own(Document(text, "s", "1", {}))
    return (re.sub("(?<=than )[0-9.e,-]+", "#", result), None) if isinstance(result, str) else (None, result.text)


def compare(kind, text, **wanted):
    expected = theirs(kind, text, **wanted)
    assert ours(kind, text, **wanted) == expected, (kind, wanted, text[:500])
    return expected[0]


@functools.cache
def real_texts():
    """Beginnings of files of the standard library, and of Python's help."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    texts = [*(path.read_text(errors="ignore") for path in files), *topics.values()]
    return [text[:10_000] for text in texts if text.strip()]


LINES = ["Home", "read more...", "- one", "• two", "A fact [12] was told [citation needed]. [edit]",
         "Enable JavaScript to see this page, please.", "function() { return 1; }.", "Lorem ipsum dolor sit amet.",
         "We use cookies on this site.", "", "\u3000", "x" * 1001 + " is a long word.", "Again, and again.\n\n",
         "# # # # # #", 'He said "yes" to it. She did not! Why? “So.” Well.', "很好。我们走吧！", "क्या है।",
         "…", "1 2 3 4 5 6 7 8 9"]
"""What pages have: menus, ellipses, bullets, citations, code."""


def dirty(text, draw):
    """The text with such lines and some of its own, each several times, and other line ends."""
    lines = text.split("\n")[:40]
    for _ in range(draw.randint(0, 10)):
        lines.insert(draw.randrange(len(lines) + 1), "\n".join([draw.choice([*LINES, *lines])] * draw.randint(1, 30)))
    return draw.choice(["\n", "\n\n", "\r\n", "\n\n\n"]).join(lines) + draw.choice(["", "\n", " "])


def real_or_dirty(draw):
    text = draw.choice(real_texts())
    return (dirty(text, draw) if draw.random() < 0.7 else text)[:3000]


SHARES = [0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0]
VALUES = [*table("""
    short_line_length -> [1, 10, 60]
    num_sentences -> [1, 2, 3, 4, 5, 8, 30]
    words_per_line -> [1, 2, 3, 5, 9]
    max_word_length -> [1, 4, 8, 20]
    doc_words -> [1, 5, 20, 100, 400]
    avg -> [1.5, 2, 3, 4, 4.5, 5, 6]
    stop_words -> [1, 2, 3, 4, 5, 6, 7, 8]
    filter -> [true, false]
    citations -> [true, false]""", str, json.loads), ("", SHARES)]
"""What is tried of a setting, by the first of these that is part of its name."""
PROBED = {kind: {name: next(values for part, values in VALUES if part in name)
                 for name in type(FILTERS.read({"kind": kind})).model_fields
                 if name not in {*Filter.model_fields, "stop_words", "line_punct_exclude_zero"}} for kind in KINDS}
LOOSE = {kind: {name: False if values == [True, False] else None for name, values in PROBED[kind].items()}
         for kind in KINDS} | {"fineweb_quality": {"line_punct_thr": 0.0, "short_line_thr": 1.0,
                                                   "char_duplicates_ratio": 1.0, "new_line_ratio": 9.0}}


HASHES = WordRuns._hashes
PIECES = st.sampled_from([
    "the ", "be", "that's ", "a", "ab", "b", " ", "\n", "\n\n", "\r\n", ".", "...", "…", "? ", "#", "- ", "• ", "[1]",
    "[edit]", "{", "javascript", "Java[2]Script ", "lorem ipsum", "use cookies", "\"", "'", "’s ", "\x1c", "\x85",
    "\u2028", "１", "。", "x" * 40, "_", "\u0301", "\ud7ff", "😀"])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's mean of no words at all
@settings(max_examples=600)
@given(st.lists(PIECES, min_size=1, max_size=120).map("".join) | st.randoms(use_true_random=False).map(real_or_dirty),
       st.sampled_from(sorted(KINDS)), st.booleans(), st.data())
def test_any_text_under_any_thresholds_gets_the_same_decision(monkeypatch, text, kind, collide, data):
    """Also where all hashes of runs of words are equal."""
    monkeypatch.setattr(WordRuns, "_hashes", lambda own, n: HASHES(own, n) * (0 if collide else 1))
    names = data.draw(st.lists(st.sampled_from(sorted(PROBED[kind])), max_size=4, unique=True))
    wanted = {name: data.draw(st.sampled_from(PROBED[kind][name])) for name in names}
    if text.strip():
        compare(kind, text, **({**LOOSE[kind], **wanted} if data.draw(st.booleans()) else wanted))


@pytest.mark.parametrize(("text", "parts"), table("""
    It's so-called 'x_1' (v2.0)... -> It 's so - called ' x_1 ' ( v2.0 ) ...
    — 漢字 ende\u0301 1.10 --opt -x foo.c -> — 漢字 ende\u0301 1.10 --opt -x foo.c
    https://a.bc/d?e=f, /usr/share/doc. -> https://a.bc/d?e=f , /usr / share / doc .
    don't cannot they'll kill'd Mr. e.g. U.S. -> do n't can not they 'll kill'd Mr. e.g. U.S.
    f(x): 10km 50% #include <a.h>; it.It -> f(x ): 10 km 50 % # include < a.h > ; it . It"""))
def test_words_are_nearly_those_of_spacy(text, parts):
    """And exactly those here, as spaCy 3.8.18 cuts them."""
    assert words(text) == parts.split()


def test_words_leave_nothing_out_and_take_linear_time():
    assert "".join(words(text := " ".join(real_texts()[:5]))) == "".join(text.split())
    for long in ("(" * 10**5, "=)" * 10**5, "a-" * 10**5, "a.b@" * 10**5, "it's" * 10**5):
        assert "".join(words(long)) == long
    assert word_counts("a b a") == {"a": 2, "b": 1}
    assert [sentences(text) for text in ("", "one", "one. two", 'He said "No." Why?', "v1.2 is out", "so... well! ")] \
        == [1, 1, 2, 2, 1, 2]
    assert reference_text.TERMINAL_PUNCTUATION == TERMINAL
    assert reference_text.PUNCTUATION_SET == NO_WORD
