"""Text as it comes: nothing that would have to be taken back, nothing that depends on where tokens begin and end."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drover.model.generation.text import TextStream


def streamed(parts, stop=()):
    """The pieces, what followed the last, and whether it was stopped."""
    text = TextStream(stop)
    pieces = []
    for part in parts:
        pieces.append(text.add(part))
        if text.stopped:
            break
    return pieces, text.finish(), text.stopped


def cut(text, stop):
    """By the book: character by character, until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        ended = [each for each in stop if text[:end].endswith(each)]
        if ended:
            return text[:end - max(map(len, ended))], True
    return text, False


@pytest.mark.parametrize(("parts", "stop", "pieces", "rest"), [
    (["one E", "N", "E two"], ("END",), ["one ", "", "ENE two"], ""),
    (["one E", "N"], ("END",), ["one ", ""], "EN"),
    (["aa", "a", "ab"], ("aab",), ["", "a", "a"], ""),
])
def test_what_may_become_a_stop_string_is_held_back(parts, stop, pieces, rest):
    assert streamed([part.encode() for part in parts], stop)[:2] == (pieces, rest)


def test_characters_come_whole_and_broken_ones_as_a_sign():
    smile = "😀".encode()
    assert streamed([b"a" + smile[:1], smile[1:3], smile[3:] + b"b"])[:2] == (["a", "", "😀b"], "")
    assert streamed([b"a\xff", b"b" + smile[:2]])[:2] == (["a\ufffd", "b"], "\ufffd")


@given(content=st.one_of(st.text("ab\né😀", max_size=30).map(str.encode), st.binary(max_size=20)),
       stop=st.lists(st.text("ab\né😀", min_size=1, max_size=4), max_size=3),
       cuts=st.lists(st.integers(0, 60), max_size=20))
def test_the_pieces_are_the_text_up_to_its_stop_wherever_tokens_end(content, stop, cuts):
    places = [0, *sorted(min(place, len(content)) for place in cuts), len(content)]
    parts = [content[start:end] for start, end in itertools.pairwise(places)]
    expected, stopped = cut(content.decode("utf-8", errors="replace"), stop)
    pieces, rest, ended = streamed(parts, stop)
    assert ("".join(pieces) + rest, ended) == (expected, stopped)
