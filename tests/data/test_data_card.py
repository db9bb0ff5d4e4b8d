"""Cards of sources: what they count, that they do not depend on how the source was cut or read, and that they stay
small."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.data.counts import (
    EXAMPLE_CHARACTERS,
    MOST_LANGUAGES,
    MOST_REASONS,
    DataCard,
    source_card,
)
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.base import Dropped


def record_of(events, examples):
    """The record of a card; events: (what became of a document, its text). It was dropped for a filter and reason, or
    kept, changed or not."""
    card = DataCard(examples)
    for number, (what, text) in events:
        own = Document(text, "web", f"a.jsonl:{number}", {})
        if isinstance(what, bool):
            card.add(own, changed=what)
        else:
            card.drop(Dropped(own, *what))
    return json.loads(json.dumps(card.record()))


def test_a_card_counts_what_was_kept_and_shows_what_was_dropped():
    long = [f"text {number} " + "y" * 200 for number in range(4)]
    kept = [(False, "a"), (True, "éé"), *((False, "x" * size) for size in (4, 7, 8))]
    dropped = [*((("short", "too short"), text) for text in long), (("long", "too long"), "z")]
    assert record_of(enumerate([*dropped, *kept]), 2) == {
        "documents": 5, "changed": 1, "bytes": 24, "characters": 22,
        "lengths": {"1": 1, "3": 3, "4": 1}, "examples": {
            "short": {"too short": [{"id": f"a.jsonl:{number}", "text": long[number][:EXAMPLE_CHARACTERS] + "…"}
                                    for number in (0, 1)]}, "long": {"too long": [{"id": "a.jsonl:4", "text": "z"}]}}}


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans() | st.tuples(st.sampled_from("ab"), st.sampled_from("xyz")),
                          st.text("xé", min_size=1, max_size=9))),
       st.lists(st.integers(0, 30), max_size=4), st.integers(0, 3))
def test_a_source_has_one_card_however_it_is_cut_into_units(events, borders, examples):
    def card(*borders):
        return source_card([{"card": record_of(numbered[start:end], examples), "findings": {
            "language": {"languages": {"en": end - start}}, "other": {"tasks": {"t": 1}}} if end > start else {}}
            for start, end in pairwise(borders)], examples)
    numbered = list(enumerate(events))
    undivided = card(0, len(events))
    assert card(*sorted([0, *(min(border, len(events)) for border in borders), len(events)])) == undivided
    assert list(undivided["lengths"]) == sorted(undivided["lengths"], key=int)
    assert not events or undivided["languages"] == {"language": {"en": len(events)}}


def test_cards_stay_small():
    many = {"card": record_of([(0, (("own", f"reason {number}"), "x")) for number in range(3 * MOST_REASONS)], 5),
            "findings": {}}
    other = {"card": record_of([(0, (("own", "another"), "x"))], 2), "findings": {
        "lid": {"languages": {f"l{number:03}": number + 1 for number in range(100)}}}}
    assert len(many["card"]["examples"]["own"]) == MOST_REASONS
    card = source_card([many, other], 5)
    assert len(card["examples"]["own"]) == MOST_REASONS and card["documents"] == 0
    lid = card["languages"]["lid"]
    assert len(lid) == MOST_LANGUAGES + 1 and lid["l099"] == 100 and sum(lid.values()) == 5050
