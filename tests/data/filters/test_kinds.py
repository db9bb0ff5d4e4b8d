"""What each kind of filter keeps, drops and changes; what it is told wrongly is refused when it is made."""

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from drover.pipeline.config.shipped import FILTERS
from drover.pipeline.data.documents import Document
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
