"""Encoding repair and normalization: what they change, and what they leave."""


import pytest

from tests.data.filters.test_kinds import changed


@pytest.mark.parametrize(("text", "repaired"), [
    ("schÃ¶n", "schön"), ("â€œHello,â€\x9d he said", "“Hello,” he said"), ("schön “so” ﬁn ２ \r\n\x01", None),
    ("&amp; stays", None), ("L&AMP;AMP;ATILDE;", None)])
def test_wrongly_decoded_text_is_put_right_and_nothing_else(text, repaired):
    pytest.importorskip("ftfy", reason="of the extra `clean`")
    assert changed("encoding_repair", text) == (text if repaired is None else repaired)
    assert changed("encoding_repair", "fish &amp; chips", entities=True) == "fish & chips"


@pytest.mark.parametrize(("settings", "text", "after"), [
    ({"form": "NFC"}, "e\u0301 ﬁ ²", "é ﬁ ²"), ({"form": "NFKC"}, "e\u0301 ﬁ ²\u00a0x", "é fi 2 x"),
    ({"line_ends": True}, "a\r\nb\rc\n\r\n", "a\nb\nc\n\n"), ({"line_ends": True}, "a\x85b\u2028c", "a\x85b\u2028c"),
    ({"control_characters": True}, "a\0b\x1b[0m\tc\x9f\n\f\r", "ab[0m\tc\n\f\r"),
    ({"zero_width": True}, "\ufeffa\u200bb\u00adc\u2060 👨\u200d👩", "abc 👨\u200d👩"),
    ({"trailing_space": True}, " a \t\n\u3000\nb  \n\n ", " a\n\nb"),
    ({"max_blank_lines": 1}, "a\n\n \n\nb\n\nc\nd", "a\n\nb\n\nc\nd"), ({"max_blank_lines": 0}, "a\n\n\nb", "a\nb"),
    ({"trailing_space": True, "max_blank_lines": 2, "line_ends": True}, "a \r\n\r\n \r\n\r\nb\r\n", "a\n\n\nb"),
    ({"form": "NFC", "trailing_space": True, "zero_width": True}, "é\n  b", "é\n  b")])
def test_each_setting_changes_its_own_part(settings, text, after):
    assert changed("normalization", text, **settings) == after
    assert changed("normalization", after, **settings) == after  # once is enough
