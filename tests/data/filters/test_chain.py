"""Counts of filters: added up over units and sources, with few reasons however many a filter gives."""

from drover.pipeline.data.counts import total
from drover.pipeline.data.documents import Document, to_json
from drover.pipeline.data.filters.base import (
    MOST_REASONS,
    OTHER_REASONS,
    Chain,
    Dropped,
    Filter,
    few_reasons,
    no_counts,
)


class Numbered(Filter):
    """Drops everything, for as many reasons as there are lengths."""

    def __call__(self, document):
        return f"reason {len(document.text)}"


def test_reasons_of_a_filter_that_keeps_to_no_few_are_counted_together():
    chain = Chain([Numbered(kind="length")])
    for size in [*range(1, 101), 1, 1, 100]:
        document = Document("x" * size, "s", "i", {})
        assert isinstance(chain(document, to_json(document)), Dropped)
    few = few_reasons(total([no_counts(chain.filters), chain.counts, chain.counts]))["length"]
    assert few["documents"] == 206 and few["reasons"][OTHER_REASONS] == 100
    assert len(few["reasons"]) == MOST_REASONS + 1
    assert list(few["reasons"].items())[:2] == [("reason 1", 6), ("reason 100", 4)]


def test_a_filter_with_sources_sees_only_their_documents():
    chain = Chain([Numbered(kind="length", sources=["web"])])
    web, code = (Document("x", source, "i", {}) for source in ("web", "code"))
    assert isinstance(chain(web, to_json(web)), Dropped)
    assert chain(code, to_json(code)) == (code, to_json(code))
