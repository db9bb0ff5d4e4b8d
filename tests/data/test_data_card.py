"""Cards of sources: what they count, that they do not depend on how the source was cut or read, and that they stay
small."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.contract.manifest import read_manifest
from pipeline.data.data_card import (
    EXAMPLE_CHARACTERS,
    EXAMPLE_UNITS,
    MOST_LANGUAGES,
    MOST_REASONS,
    DataCard,
    keeps_examples,
    source_card,
)
from pipeline.data.documents import Document
from pipeline.data.filters.chain import Dropped
from tests.data.source_files import write_jsonl
from tests.stages.test_shard import documents, files_source, folder_of, run, write_config


def document(text, number=1):
    return Document(text, "web", f"a.jsonl:{number}", {})


def dropping(card, *dropped):
    """Drop (text, filter, reason), numbered."""
    for number, (text, own, reason) in enumerate(dropped):
        card.drop(Dropped(document(text, number), own, reason))
    return card


def test_a_card_counts_what_was_kept_and_shows_what_was_dropped():
    card = DataCard(examples=2)
    for number, text in enumerate(["a", "éé", "x" * 4, "x" * 7, "x" * 8]):
        card.add(document(text), changed=number == 1)
    long = [f"text {number} " + "y" * 200 for number in range(4)]
    record = dropping(card, *((text, "short", "too short") for text in long), ("z", "long", "too long")).record()
    assert json.loads(json.dumps(record)) == {
        "documents": 5, "changed": 1, "bytes": 1 + 4 + 4 + 7 + 8, "characters": 1 + 2 + 4 + 7 + 8,
        "lengths": {"1": 1, "3": 3, "4": 1}, "examples": {
            "short": {"too short": [{"id": f"a.jsonl:{number}", "text": long[number][:EXAMPLE_CHARACTERS] + "…"}
                                    for number in (0, 1)]}, "long": {"too long": [{"id": "a.jsonl:4", "text": "z"}]}}}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["kept", "changed", "a", "b"]), st.text("xé", min_size=1, max_size=9))),
       st.lists(st.integers(0, 30), max_size=4), st.integers(0, 3))
def test_a_source_has_one_card_however_it_is_cut_into_units(events, borders, examples):
    def record(part):
        card = DataCard(examples)
        for number, (what, text) in part:
            if what in "ab":
                card.drop(Dropped(document(text, number), what, f"reason {len(text) % 2}"))
            else:
                card.add(document(text, number), changed=what == "changed")
        return {"card": json.loads(json.dumps(card.record())), "findings": {
            "language": {"languages": {"en": len(part)}}, "other": {"tasks": {"t": 1}}} if part else {}}
    numbered = list(enumerate(events))
    cut = source_card([record(numbered[start:end]) for start, end in pairwise(sorted([0, *borders, len(events)]))],
                      examples)
    assert cut == source_card([record(numbered)], examples) and list(cut["lengths"]) == sorted(cut["lengths"], key=int)
    if events:
        assert cut["languages"] == {"language": {"en": len(events)}}


def test_cards_stay_small_and_older_records_have_none():
    card = dropping(DataCard(examples=5), *(("x", "own", f"reason {number}") for number in range(3 * MOST_REASONS)))
    assert len(card.record()["examples"]["own"]) == MOST_REASONS
    other = {"card": DataCard(1).record() | {"examples": {"own": {"another": [{"id": "1", "text": "y"}]}}}}
    languages = {"findings": {"lid": {"languages": {f"l{number:03}": number + 1 for number in range(100)}}}}
    found = source_card([{"card": card.record()}, other, {"documents": 3}, languages], 5)
    assert len(found["examples"]["own"]) == MOST_REASONS and found["documents"] == 0
    lid = found["languages"]["lid"]
    assert len(lid) == MOST_LANGUAGES + 1 and lid["l099"] == 100 and sum(lid.values()) == 5050
    assert keeps_examples(f"web-{EXAMPLE_UNITS - 1:05}") and not keeps_examples(f"a-b-{EXAMPLE_UNITS:05}")
    assert not keeps_examples("cut")


def test_the_manifest_has_a_card_of_each_source_and_its_examples_change_no_shard(tmp_path, capsys):
    texts = {"web": ["mail a@example.org now", *(f"text number {number}" for number in range(40))],
             "books": ["short", *(f"a book with the number {number} é" for number in range(50)), "a book with " * 60]}
    for name, own in texts.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": text} for text in own])
    config = write_config(tmp_path, [files_source(name, tmp_path / f"{name}.jsonl") for name in texts],
                          heldout_share=0.2, filters=[{"kind": "masking"}, {"kind": "length", "least_characters": 8}])
    assert run(config) == 0
    made = read_manifest(folder_of(config))
    cards = made.counts["cards"]
    assert cards["web"]["changed"] == 1 and cards["books"]["changed"] == 0
    assert cards["books"]["examples"] == {"length": {"fewer than 8 characters": [
        {"id": "books.jsonl:1", "text": "short"}]}}
    for name, card in cards.items():
        own = [document.text for split in ("train", "heldout") for document in documents(config, split)
               if document.source == name]
        assert card["documents"] == len(own) == sum(card["lengths"].values())
        assert card["bytes"] == sum(len(text.encode()) for text in own) and card["characters"] == sum(map(len, own))
    assert "dropped_examples" not in made.fingerprint["config"]["shard"]
    assert run(config, "shard.dropped_examples=3") == 0
    report = folder_of(config).parent / "report"
    report.mkdir()
    made.write(report)
    capsys.readouterr()
    assert run(config, "shard.dropped_examples=0") == 2
    assert "shard.dropped_examples: " in (told := capsys.readouterr().err) and "-> 0" in told
    assert run(config, "shard.dropped_examples=0", "--force") == 0
    again = read_manifest(folder_of(config))
    assert again.counts["cards"]["books"]["examples"] == {} and again.digest == made.digest
    assert read_manifest(report) is None, "it shows what was dropped as well"
