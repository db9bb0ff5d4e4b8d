"""What each kind of filter keeps, drops and changes, and how it is counted; what it is told wrongly is refused when it
is made. The small fastText models, and their making: tests/data/filters/models/README.md."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from drover.pipeline.config.section import identity
from drover.pipeline.config.shipped import FILTERS
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.counts import total
from drover.pipeline.data.documents import Document, to_json
from drover.pipeline.data.filters.base import (
    MOST_REASONS,
    OTHER_REASONS,
    Chain,
    Dropped,
    Filter,
    few_reasons,
    no_counts,
)
from drover.pipeline.data.sources import label_problems
from tests.data.source_files import config_of
from tests.refusal import refused, table


def made(**settings):
    [result] = FILTERS.made([FILTERS.read(settings)])
    return result


def outcome(own, text):
    """The reason why a text is dropped, the text that it becomes, or None where it is kept as it is."""
    before = Document(text, "s", "f.txt:1", {"stars": 3})
    result = own(before)
    if isinstance(result, str) or result is before:
        return result if isinstance(result, str) else None
    assert result == replace(before, text=result.text)  # all else stays
    return result


LINES = "a menu\n\n" * 3 + "said once and for all, at some length\n" * 1


@pytest.mark.parametrize(("kind", "settings", "text", "reason"), [*table(r"""
    length -> {"min_characters": 3} -> "ab" -> "fewer than 3 characters"
    length -> {"min_characters": 3} -> "abc" -> null
    length -> {"max_characters": 3} -> "abcd" -> "more than 3 characters"
    length -> {"max_characters": 3} -> "äöü" -> null
    length -> {"min_words": 2} -> "one" -> "fewer than 2 words"
    length -> {"min_words": 2} -> "one\ntwo" -> null
    length -> {"max_words": 2} -> "one two  three" -> "more than 2 words"
    length -> {"max_words": 2} -> " one  two " -> null
    repetition -> {"max_lines": 0, "max_characters": 0} -> "a\nb\n\n\nc" -> null
    repetition -> {"max_lines": 0, "max_characters": 1} -> "a\n  a " -> "more than 0 of the lines are repetitions"
    characters -> {"max_share": {"digits": 0.5}} -> "ab12" -> null
    characters -> {"max_share": {"digits": 0.5}} -> "ab123" -> "more than 0.5 digits"
    characters -> {"min_share": {"letters": 0.5}} -> "ab   \n  12" -> null
    characters -> {"min_share": {"letters": 0.5}} -> "ab12." -> "fewer than 0.5 letters"
    characters -> {"max_share": {"control": 0}} -> "a\tb\n" -> null
    characters -> {"max_share": {"control": 0}} -> "a\u0000b" -> "more than 0 control"
    characters -> {"max_share": {"symbols": 0.2}} -> "ab\ufffd" -> "more than 0.2 symbols"
    characters -> {"max_share": {"punctuation": 0.2}} -> "a?!" -> "more than 0.2 punctuation"
    characters -> {"min_share": {"letters": 1}} -> "e\u0301té漢" -> null
    characters -> {"max_share": {"symbols": 0, "digits": 0}} -> "1+" -> "more than 0 digits"
    """, str, json.loads, json.loads, json.loads),
    ("repetition", {}, LINES, "more than 0.3 of the lines are repetitions"),
    ("repetition", {"max_lines": 0.5}, LINES, "more than 0.2 of the characters are in repeated lines"),
    ("repetition", {"max_lines": 0.5, "max_characters": 0.3}, LINES, None), ("repetition", {}, "x" * 1000, None)])
def test_what_is_dropped(kind, settings, text, reason):
    """A combining accent belongs to its letter. The first reason does not hang on the order of the shares as they are
    written."""
    assert outcome(made(kind=kind, **settings), text) == reason


def changed(kind, text, **settings):
    """What a filter makes of a text, which it drops for no reason."""
    result = outcome(made(kind=kind, **settings), text)
    return text if result is None else result.text


@pytest.mark.parametrize(("text", "after"), table("""
    mail me (john.doe+x@example.co.uk). -> mail me (<email>).
    a@b.org,c@d.org -> <email>,<email>
    @decorator x @ y a@b user@host -> as it was
    from 8.8.8.8, port 53 -> from <ip>, port 53
    http://93.184.216.34:8080/ -> http://<ip>:8080/
    2606:4700:4700::1111 and 2a00:1450:4001:81b:0:0:0:200e. -> <ip> and <ip>.
    ::ffff:8.8.4.4 -> ::ffff:<ip>
    127.0.0.1 10.1.2.3 192.168.0.1 255.255.255.0 2001:db8::1:2 -> as it was
    1.2.3 1.2.3.4.5 256.1.1.1 v1.2.3.4 -> as it was
    12:34:56:78 x[1::2] std::vector a:b:c:d fe80::1 -> as it was
    nothing to hide -> as it was"""))
def test_masking(text, after):
    assert changed("masking", text) == (text if after == "as it was" else after)


def test_masks_can_be_chosen_left_out_and_added():
    text = "a@b.org 8.8.8.8 12-345 \\1"
    assert changed("masking", text, email="", ip=None) == " 8.8.8.8 12-345 \\1"
    own = [{"find": "[0-9]{2}-[0-9]{3}", "mask": r"\1"}, {"find": "1", "mask": "one"}]
    assert changed("masking", text, email=None, ip=None, patterns=own) == "a@b.org 8.8.8.8 \\one \\one"


@pytest.mark.parametrize(("expression", "message"), [("(", "no regular expression"), ("a*", "matches the empty text")])
def test_expressions_that_cannot_mask_are_refused(expression, message):
    refused(ValidationError, message, FILTERS.read,
            {"kind": "masking", "patterns": [{"find": expression, "mask": ""}]})


MODELS = Path(__file__).parent / "models"
TWO, WITH_SCRIPTS = MODELS / "two_letters.ftz", MODELS / "with_scripts.bin"
ENGLISH = "The ship and the rain\nhave been seen by them, and she would come\r\nif you had asked."
GERMAN = "Der Regen und das Schiff sind nicht gekommen,\nund wenn du mich gefragt hättest."
FRENCH = "Le soir la ville est à nous et ils ont vu la rivière."
NONE = "0101 // {} []"


@pytest.fixture
def outcomes():
    """Function: a filter of languages, and what it makes of a text in each."""
    pytest.importorskip("fasttext", reason="of the extra `clean`")

    def of_languages(languages, path=TWO, **wanted):
        own = made(kind="language", path=str(path), languages=languages, **wanted)
        own.open()
        return own, [outcome(own, text) for text in (ENGLISH, GERMAN, FRENCH, NONE)]
    return of_languages


def test_other_languages_and_doubtful_ones_are_dropped(outcomes):
    other, doubtful = "of another language", "of no language with a probability of 0.65"
    own, result = outcomes(["en"])
    assert own.reads() == [TWO] and "path" not in identity(own)
    assert result == [None, other, other, doubtful]
    assert own.findings()["languages"] == {"de": 1, "en": 1, "fr": 1, "unknown": 1}
    assert outcomes(["de", "fr"])[1] == [other, None, None, doubtful]
    assert outcomes(["en"], min_probability=0.0)[1] == [None, other, other, other]


def test_labels_are_those_of_the_model(outcomes):
    assert outcomes(["eng_Latn", "fra_Latn"], WITH_SCRIPTS)[1][:3] == [None, "of another language", None]
    refused(UserError, r"names eng, but the model .* knows 3 labels; the nearest are eng_Latn, .*\. Correct `lang",
            made(kind="language", path=str(WITH_SCRIPTS), languages=["eng"]).open)
    wrong = [{"kind": "classifier", "path": str(TWO), "label": label, "name": label} for label in ("hq", "en", "pt")]
    problems = label_problems(config_of(filters=wrong))
    assert [problem.partition(",")[0] for problem in problems] == ["The filter hq names hq", "The filter pt names pt"]


def test_pages_are_dropped_by_their_site():
    """Names of domains end at a dot: notexample.org is no part of example.org."""
    pages = {"https://www.Example.org:80/a": "of a site to drop", "example.org./b": "of a site to drop",
             "example.org/to?next=http://a.com": "of a site to drop", "//example.org/c": "of a site to drop",
             "https://notexample.org": None, "https://me@b.org/?example.org": None, "": None, "http://[": None}
    kept = {"https://a.edu/x": None, "https://edu.org": "of no site to keep", "": "without a URL",
            "https://ads.a.edu": "of a site to drop"}
    for settings, expected in ({"drop": ["example.org"]}, pages), ({"keep": ["EDU"], "drop": ["ads.a.edu"]}, kept):
        own = made(kind="site", **settings)
        documents = {url: Document("a", "s", "1", {"url": url or None}) for url in expected}
        assert {url: own(document) if own(document) is not document else None
                for url, document in documents.items()} == expected
    chain = Chain([own])
    document = Document("a", "s", "1", {})
    refused(UserError, "has no url: name it in meta_fields of the source s, or give", chain, document, b"")
    for wrong, said in ({}, "give the domains"), ({"drop": ["https://example.org"]}, "pattern"):
        refused(ValidationError, said, made, kind="site", **wrong)


def test_documents_of_mixed_languages_are_judged_by_their_lines(outcomes):
    """By characters; lines without any count for nothing. A line of unknown language counts against the share."""
    english, german = "The ship and the rain have been seen", "Der Regen und das Schiff sind nicht gekommen"
    for text, share, reason in [(f"{english}\n\n \n{german}", 0.45, None), (f"{english}\n{german}", 0.46, "0.46"),
                                (f"{english}\n{NONE}", 0.8, "0.8")]:
        own, _ = outcomes(["en"], min_share=share)
        assert outcome(own, text) == (reason and f"fewer than {reason} of the characters in wanted languages")


@pytest.mark.parametrize(("text", "repaired"), [
    ("schÃ¶n", "schön"), ("â€œHello,â€\x9d he said", "“Hello,” he said"), ("schön “so” ﬁn ２ \r\n\x01", None),
    ("&amp; stays", None), ("L&AMP;AMP;ATILDE;", None)])
def test_wrongly_decoded_text_is_put_right_and_nothing_else(text, repaired):
    pytest.importorskip("ftfy", reason="of the extra `clean`")
    assert changed("encoding_repair", text) == (text if repaired is None else repaired)


@pytest.mark.parametrize(("settings", "text", "after"), table(r"""
    {"form": "NFC"} -> "e\u0301 ﬁ ²" -> "é ﬁ ²"
    {"form": "NFKC"} -> "e\u0301 ﬁ ²\u00a0x" -> "é fi 2 x"
    {"line_ends": true} -> "a\r\nb\rc\n\r\n" -> "a\nb\nc\n\n"
    {"line_ends": true} -> "a\u0085b\u2028c" -> "a\u0085b\u2028c"
    {"control_characters": true} -> "a\u0000b\u001b[0m\tc\u009f\n\f\r" -> "ab[0m\tc\n\f\r"
    {"zero_width": true} -> "\ufeffa\u200bb\u00adc\u2060 👨\u200d👩" -> "abc 👨\u200d👩"
    {"trailing_space": true} -> " a \t\n\u3000\nb  \n\n " -> " a\n\nb"
    {"max_blank_lines": 1} -> "a\n\n \n\nb\n\nc\nd" -> "a\n\nb\n\nc\nd"
    {"max_blank_lines": 0} -> "a\n\n\nb" -> "a\nb"
    {"trailing_space": true, "max_blank_lines": 2, "line_ends": true} -> "a \r\n\r\n \r\n\r\nb\r\n" -> "a\n\n\nb"
    {"form": "NFC", "trailing_space": true, "zero_width": true} -> "é\n  b" -> "é\n  b"
    """, json.loads, json.loads, json.loads))
def test_each_setting_changes_its_own_part(settings, text, after):
    assert changed("normalization", text, **settings) == after
    assert changed("normalization", after, **settings) == after  # once is enough


class Numbered(Filter):
    """Drops everything, for as many reasons as there are lengths."""

    def __call__(self, document):
        return f"reason {len(document.text)}"


def test_reasons_of_a_filter_that_keeps_to_no_few_are_counted_together():
    chain = Chain([Numbered(kind="length")])
    for size in [*range(1, 101), 1, 1, 100]:
        document = Document("x" * size, "s", "i", {})
        assert isinstance(chain(document, to_json(document)), Dropped)
    few = few_reasons(total([no_counts(chain.filters), chain.counts, chain.counts]))["length"]
    assert few["documents"] == 206 and few["reasons"][OTHER_REASONS] == 100
    assert len(few["reasons"]) == MOST_REASONS + 1
    assert list(few["reasons"].items())[:2] == [("reason 1", 6), ("reason 100", 4)]


def test_a_filter_with_sources_sees_only_their_documents():
    chain = Chain([Numbered(kind="length", sources=["web"])])
    web, code = (Document("x", source, "i", {}) for source in ("web", "code"))
    assert isinstance(chain(web, to_json(web)), Dropped)
    assert chain(code, to_json(code)) == (code, to_json(code))
