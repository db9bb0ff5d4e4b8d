"""How much is read does not grow with the corpus, and what is read is chosen evenly, by contents alone."""

import hashlib

import pytest

from drover.pipeline.tokenization.choosing import (
    COVER,
    MOST_LOOKED_AT,
    beginnings,
    beginnings_by_source,
    training_shards,
)

MB = 1_000_000


def shards(**sources):
    """Records of so many shards of 64 MB each, by source."""
    return [{"path": f"train/{source}-{number:05d}.tar", "source": source, "text_bytes": 64 * MB,
             "sha256": hashlib.sha256(f"{source}{number}".encode()).hexdigest()}
            for source, count in sources.items() for number in range(count)]


def size(records):
    return sum(record["text_bytes"] for record in records)


def test_what_is_read_does_not_grow_with_the_corpus():
    records = shards(web=18_000, code=2000)
    chosen, shares = training_shards(records, 2000 * MB)
    assert COVER * 2000 * MB <= size(chosen) < COVER * 2000 * MB + 2 * 64 * MB
    for source, wanted in (("web", 1800 * MB), ("code", 200 * MB)):
        of_source = [record for record in chosen if record["source"] == source]
        assert shares[source] * size(of_source) == pytest.approx(wanted)
    places = [records.index(record) for record in chosen]
    assert places == sorted(places), "in the corpus's order"
    assert min(sum(low <= place < low + 4500 for place in places) for low in range(0, 18_000, 4500)) > len(places) / 10


def test_a_small_source_has_one_shard_at_least():
    chosen, shares = training_shards(shards(web=1000, poems=1), 100 * MB)
    assert sum(record["source"] == "poems" for record in chosen) == 1
    assert shares["poems"] == pytest.approx(100 / 1001 / 64)


def test_held_out_text_is_checked_up_to_a_bound_in_each_source():
    records = shards(web=1000, code=1)
    result = beginnings_by_source(records, 64 * MB)
    assert [limit for record, limit in result if record["source"] == "code"] == [None]
    limits = [limit for record, limit in result if record["source"] == "web"]
    assert len(limits) == MOST_LOOKED_AT and set(limits) == {64 * MB // MOST_LOOKED_AT}
    assert beginnings(records[:1], 64 * MB) == [(records[0], None)] and beginnings([], MB) == []
