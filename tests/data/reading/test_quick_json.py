"""JSON by the quick library: never anything else than Python's own gives."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.documents import Document, from_json, to_json
from pipeline.data.quick_json import UNSURE, compact, parsed


def slow(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def same(one, other):
    """Equal, of the same types all through, and -0.0 is not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other and (not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other))


def agrees(text):
    found = parsed(text.encode("utf-8", "surrogatepass"))
    if found is UNSURE:
        return False
    assert same(found, json.loads(text)), text[:100]
    return True


def test_every_character_is_written_as_before():
    for start in range(0, 0x30000, 0x1000):
        text = "".join(chr(code) for code in range(start, start + 0x1000) if not 0xd800 <= code < 0xe000)
        value = {"text": text, "source": text[:9], "id": text[-9:], "meta": {text[:5]: [text]}}
        assert to_json(Document(**value)) == slow(value)


def test_what_cannot_be_written_is_refused_as_before():
    deep = value = []
    for _ in range(100_000):
        value.append([])
        value = value[0]
    for meta, error in (({"a": math.nan}, ValueError), ({"a": {1, 2}}, TypeError), ({"a": deep}, RecursionError),
                        ({"a": b"b"}, TypeError), *(({"a": half}, UnicodeEncodeError) for half in (
                            "\ud800", "\udbff", "\udc00", "\udfff"))):
        with pytest.raises(error):
            to_json(Document("t", "s", "1", meta))


KEYS = st.text(max_size=4) | st.integers(-9, 9) | st.just(2.5)
JSON = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(-2**70, 2**70), st.text(max_size=8),
                              st.floats(allow_nan=False, allow_infinity=False)),
                    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4),
                                            st.lists(inner, max_size=2).map(tuple)), max_leaves=12)


@settings(max_examples=80, deadline=None)
@given(JSON)
def test_any_value(value):
    agrees(json.dumps(value))
    agrees(json.dumps(value, ensure_ascii=False, indent=1))
    assert compact({"meta": value}, value) == slow({"meta": value})


@settings(max_examples=150, deadline=None)
@given(JSON, st.integers(0, 60), st.sampled_from(['"', "\\", "]", "}", "0", "-", ".", "e", "NaN", "\t", "\0", "\x7f",
                                                 ",", "\\ud83d", "\\u00", "\ufeff", "\x85", ":", "1", " "]),
       st.booleans())
def test_anything_like_json_is_taken_by_both_or_left_to_the_slow_one(value, place, piece, replaced):
    text = json.dumps(value)
    agrees(text[:place] + piece + text[place + replaced:])  # json.loads raises where the quick one took what is wrong


def test_numbers_and_depths_on_which_libraries_differ_are_left_to_the_slow_one():
    for text in ("18446744073709551616", '{"a":[-9223372036854775809]}', "9" * 5000, "1e400", "NaN",
                 "[" * 1010 + "]" * 1010,
                 '{"a":"\\ud83d"}', '"\udcff"', "\ufeff1", ""):
        assert not agrees(text), text[:50]
    for text in ('{"a":1,"a":[2]}', "[" * 400 + "]" * 400, "7", '"x"',
                 "0.1", "1e5", "-0", "-0.0", "0.0", "1e-400", '{"score":0.25,"text":"x"}',
                 "18446744073709551615", '"\\u0000\\ud83d\\ude00"'):
        assert agrees(text), text[:50]


def test_a_member_reads_back_as_it_was():
    document = Document("text \0\u2028", "s", "1", {"a": -0.0, "b": 2**70, "c": 0.1, "x": [None, {"y": "\u2028"}]})
    back = from_json(to_json(document), "")
    assert back == document and same(back.meta, document.meta)
    with pytest.raises(ValueError, match="Expecting"):
        from_json(b"{not json", "")
