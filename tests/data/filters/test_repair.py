"""Encoding repair and normalization: what they change, and what they leave."""

import sys

import pytest
from pydantic import ValidationError

from pipeline.data.filters.base import unusable
from pipeline.errors import UserError
from tests.data.filters.test_kinds import document, made, outcome


def changed(kind, text, **settings):
    found = outcome(made(kind=kind, **settings), text)
    return found.text if found is not None else text


@pytest.mark.parametrize(("text", "repaired"), [
    ("schÃ¶n", "schön"), ("â€œHello,â€\x9d he said", "“Hello,” he said"), ("schön “so” ﬁn ２ \r\n\x01", None),
    ("&amp; stays", None), ("L&AMP;AMP;ATILDE;", None)])
def test_wrongly_decoded_text_is_put_right_and_nothing_else(text, repaired):
    pytest.importorskip("ftfy", reason="of the extra `clean`")
    assert changed("encoding_repair", text) == (text if repaired is None else repaired)


def test_entities_are_written_out_on_request():
    pytest.importorskip("ftfy", reason="of the extra `clean`")
    assert changed("encoding_repair", "fish &amp; chips", entities=True) == "fish & chips"


def test_an_absent_library_is_told_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(UserError, match=r"ftfy is not installed here: .pip install --editable '\.\[clean\]'"):
        made(kind="encoding_repair").open()


@pytest.mark.parametrize(("settings", "text", "after"), [
    ({"form": "NFC"}, "e\u0301 ﬁ ²", "é ﬁ ²"), ({"form": "NFKC"}, "e\u0301 ﬁ ²\u00a0x", "é fi 2 x"),
    ({"line_ends": True}, "a\r\nb\rc\n\r\n", "a\nb\nc\n\n"), ({"line_ends": True}, "a\x85b\u2028c", "a\x85b\u2028c"),
    ({"control_characters": True}, "a\0b\x1b[0m\tc\x9f\n\f\r", "ab[0m\tc\n\f\r"),
    ({"zero_width": True}, "\ufeffa\u200bb\u00adc\u2060 👨\u200d👩", "abc 👨\u200d👩"),
    ({"trailing_space": True}, " a \t\n\u3000\nb  \n\n ", " a\n\nb"),
    ({"most_blank_lines": 1}, "a\n\n \n\nb\n\nc\nd", "a\n\nb\n\nc\nd"), ({"most_blank_lines": 0}, "a\n\n\nb", "a\nb"),
    ({"trailing_space": True, "most_blank_lines": 2, "line_ends": True}, "a \r\n\r\n \r\n\r\nb\r\n", "a\n\n\nb")])
def test_each_setting_changes_its_own_part(settings, text, after):
    assert changed("normalization", text, **settings) == after
    assert changed("normalization", after, **settings) == after  # once is enough


def test_a_normalization_of_nothing_is_refused_and_a_text_in_form_is_left():
    with pytest.raises(ValidationError, match="needs one of form, line_ends"):
        made(kind="normalization")
    own, before = made(kind="normalization", form="NFC", trailing_space=True, zero_width=True), document("é\n  b")
    assert own(before) is before


def test_filters_without_their_library_are_refused_before_anything_starts(monkeypatch):
    asked = [made(kind="encoding_repair"), made(kind="length", least_words=2)]
    monkeypatch.setitem(sys.modules, "ftfy", None)
    [told] = unusable(asked)
    assert "shard.filters asks for encoding_repair, but the package ftfy is not installed here" in told
    assert unusable(asked[1:]) == []
