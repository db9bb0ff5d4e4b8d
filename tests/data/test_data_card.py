"""Cards of sources: what they count, that they do not depend on how the source was cut or read, and that they stay
small."""

import json
from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.data.data_card import (
    EXAMPLE_CHARACTERS,
    EXAMPLE_UNITS,
    MOST_LANGUAGES,
    MOST_REASONS,
    DataCard,
    keeps_examples,
    source_card,
)
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.chain import Dropped
from tests.data.source_files import write_jsonl
from tests.stages.test_shard import documents, files_source, folder_of, run, write_config


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
        "documents": 5, "changed": 1, "bytes": 1 + 4 + 4 + 7 + 8, "characters": 1 + 2 + 4 + 7 + 8,
        "lengths": {"1": 1, "3": 3, "4": 1}, "examples": {
            "short": {"too short": [{"id": f"a.jsonl:{number}", "text": long[number][:EXAMPLE_CHARACTERS] + "…"}
                                    for number in (0, 1)]}, "long": {"too long": [{"id": "a.jsonl:4", "text": "z"}]}}}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans() | st.tuples(st.sampled_from("ab"), st.sampled_from("xyz")),
                          st.text("xé", min_size=1, max_size=9))),
       st.lists(st.integers(0, 30), max_size=4), st.integers(0, 3))
def test_a_source_has_one_card_however_it_is_cut_into_units(events, borders, examples):
    def card(*borders):
        return source_card([{"card": record_of(numbered[start:end], examples), "findings": {
            "language": {"languages": {"en": end - start}}, "other": {"tasks": {"t": 1}}} if end > start else {}}
            for start, end in pairwise(borders)], examples)
    numbered = list(enumerate(events))
    whole = card(0, len(events))
    assert card(*sorted([0, *(min(border, len(events)) for border in borders), len(events)])) == whole
    assert list(whole["lengths"]) == sorted(whole["lengths"], key=int)
    assert not events or whole["languages"] == {"language": {"en": len(events)}}


def test_cards_stay_small():
    many = {"card": record_of([(0, (("own", f"reason {number}"), "x")) for number in range(3 * MOST_REASONS)], 5),
            "findings": {}}
    other, twice = ({"card": record_of([(0, (("own", "another"), "x"))] * times, 2), "findings": {}}
                    for times in (1, 2))
    languages = {"card": record_of([], 0), "findings": {
        "lid": {"languages": {f"l{number:03}": number + 1 for number in range(100)}}}}
    assert len(many["card"]["examples"]["own"]) == MOST_REASONS
    found = source_card([many, other, languages], 5)
    assert len(found["examples"]["own"]) == MOST_REASONS and found["documents"] == 0
    lid = found["languages"]["lid"]
    assert len(lid) == MOST_LANGUAGES + 1 and lid["l099"] == 100 and sum(lid.values()) == 5050
    assert len(source_card([twice, twice], 3)["examples"]["own"]["another"]) == 3
    assert keeps_examples(f"web-{EXAMPLE_UNITS - 1:05}") and not keeps_examples(f"a-b-{EXAMPLE_UNITS:05}")
    assert not keeps_examples("cut")


def test_the_manifest_has_a_card_of_each_source_and_its_examples_change_no_shard(tmp_path):
    texts = {"web": ["mail a@example.org now", *(f"text number {number}" for number in range(40))],
             "books": ["short", *(f"a book with the number {number} é" for number in range(50)), "a book with " * 60]}
    for name, own in texts.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in own])
    config = write_config(tmp_path, [files_source(name, tmp_path / f"{name}.jsonl") for name in texts],
                          heldout_share=0.2, filters=[{"kind": "masking"}, {"kind": "length", "least_characters": 8}])
    assert run(config) == 0
    made = read_manifest(folder_of(config))
    cards = made.counts["cards"]
    assert {name: card["changed"] for name, card in cards.items()} == {"web": 1, "books": 0}
    assert cards["books"]["examples"] == {"length": {"fewer than 8 characters": [
        {"id": "books.jsonl:1", "text": "short"}]}}
    kept = Counter(document.source for split in ("train", "heldout") for document in documents(config, split))
    assert {name: card["documents"] for name, card in cards.items()} == kept
    assert {name: sum(card["lengths"].values()) for name, card in cards.items()} == kept
    report = folder_of(config).parent / "report"
    report.mkdir()
    made.write(report)
    assert run(config, "shard.dropped_examples=0") == 2
    assert run(config, "shard.dropped_examples=0", "--force") == 0
    again = read_manifest(folder_of(config))
    assert again.counts["cards"]["books"]["examples"] == {} and again.digest == made.digest
    assert read_manifest(report) is None, "it shows what was dropped as well"
