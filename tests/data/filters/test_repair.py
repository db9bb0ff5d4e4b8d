"""Encoding repair and normalization: what they change, and what they leave."""


import json

import pytest

from tests.data.filters.test_kinds import changed
from tests.refusal import table


@pytest.mark.parametrize(("text", "repaired"), [
    ("schÃ¶n", "schön"), ("â€œHello,â€\x9d he said", "“Hello,” he said"), ("schön “so” ﬁn ２ \r\n\x01", None),
    ("&amp; stays", None), ("L&AMP;AMP;ATILDE;", None)])
def test_wrongly_decoded_text_is_put_right_and_nothing_else(text, repaired):
    pytest.importorskip("ftfy", reason="of the extra `clean`")
    assert changed("encoding_repair", text) == (text if repaired is None else repaired)
    assert changed("encoding_repair", "fish &amp; chips", entities=True) == "fish & chips"


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
