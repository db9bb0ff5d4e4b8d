"""The text: what came in, what became of it, statistics of each source, and its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from drover.pipeline.core.files import Record
from drover.pipeline.data.counts import BECAME, MOST_NAMED
from drover.pipeline.data.filters.decontamination import OUTPUT
from drover.pipeline.reporting.document import ALL, Block, Table, Text, filled, flat
from drover.pipeline.reporting.facts import Facts
from drover.pipeline.tokenization.reporting import warnings

SPLITS = {"train": "training", "validation": "validation"}
RULES = {"hash": "by the hash of their text", "tail": "from the end of each source's text"}
"""How validation documents were chosen, by shard.validation_rule."""


def data(facts: Facts) -> Iterator[Block]:
    """The chapter."""
    counts, encoded = facts.counts("shard"), facts.counts("encode")
    if sources := counts.get("sources", {}):
        entries = {**sources, ALL: counts} if len(sources) > 1 else sources
        yield _documents(counts, entries, RULES[facts.config.shard.validation_rule])
        yield from _files(counts, entries)
        yield from _filters(counts, facts.config.shard.keep_dropped)
        yield from _sources(counts)
    yield tokens(encoded)
    yield from warnings(encoded.get("rare_ids", {}).get("outliers", []))


def _documents(counts: Record, entries: Record, rule: str) -> Table:
    """The fate of every document: each row adds up. What happened to none has no column."""
    became = {"training": "{train:,}", "validation": "{validation:,}",
              **{reason: f"{{dropped[{reason}]:,}}" for reason, number in counts["dropped"].items() if number},
              **({"unreadable": "{rejected:,}"} if counts.get("rejected") else {})}
    cut = {"cut in two": "{cut_in_two:,}"} if counts.get("cut_in_two") else {}
    return Table("Documents", {"source": "{source}", "came in": "{documents_in:,}", **cut, **became,
                               "training text": "{text_bytes[train]:B}",
                               "validation text": "{text_bytes[validation]:B}"},
                 flat(entries, "source"),
                 f"Came in{', and one more for each that was cut in two,' if cut else ''} = {' + '.join(became)}. No "
                 f"document was dropped for another reason. Validation documents were chosen {rule}.")


def _files(counts: Record, entries: Record) -> Iterator[Block]:
    """What became of the input files, and those of which something was not read."""
    became = [name for name in BECAME if name in counts.get("files", {})]
    yield Table("Input files", {"source": "{source}", "files": "{files[in]:,}",
                                **{name: f"{{files[{name}]:,}}" for name in became},
                                "bytes": "{bytes[in]:,}", "bytes rejected": "{bytes[rejected]:,}"},
                flat(entries, "source"),
                f"Files = {' + '.join(became)}. Partly: some records were rejected. Unread: all. Empty: has no record. "
                "Files of `kind: hf` are not counted: a library reads them.")
    yield Table("Files that were not read whole", {
        "file": "{source}/{file}", "bytes": "{bytes:,}", "bytes rejected": "{lost_bytes:,}",
        "documents": "{documents:,}", "documents rejected": "{rejected:,}", "first reason": "{reason}"},
        counts.get("incomplete_files", []), f"Those with the most rejected bytes, at most {MOST_NAMED:,}. All rejected "
        "records are in shard/rejected.jsonl.")
    for remark in chain.from_iterable(counts.get("remarks", {}).values()):
        yield f"{remark[:1].upper()}{remark[1:]}."


def _filters(counts: Record, kept: bool) -> Iterator[Block]:
    """The documents that each filter dropped and changed, with reasons; and contamination that it found."""
    yield Table("Filters", {"filter": "{filter}", "dropped": "{documents:,}", "dropped text": "{bytes:B}",
                            "changed": "{changed:,}", "why it dropped": "{why}"},
                [{**own, "why": [f"{count:,} {reason}" for reason, count in own["reasons"].items()]}
                 for own in flat(counts.get("filters", {}), "filter")],
                "In the order in which they ran, before deduplication. Each filter gets the documents that the "
                "filters before it kept, with their changes." + " Dropped documents are in shard/dropped." * kept)
    result = flat(counts.get("contamination", {}), "filter", "task")
    yield Table("Evaluation sets found in the text", {
        "filter": "{filter}", "task": "{task}", "documents": "{documents:,}", "what was done with them": "{action}",
        "items found": "{found:,}", "items": "{items:,}", "too short": "{too_short:,}", "words in a row": "{n:,}",
        "words of a whole item": "{min_words:,}"}, result,
        f"So many words in a row of an item are in a document, or all words of a shorter item that has at least as "
        f"many as the last column says. Each item that was found is in shard/{OUTPUT}.")
    yield from (f"Warning: {own['warning']}" for own in result if "warning" in own)


def _sources(counts: Record) -> Iterator[Block]:
    """Statistics of each source, and examples of dropped documents."""
    cards = {source: card for source, card in counts.get("cards", {}).items() if card["documents"]}
    yield Table("Sources", {
        "source": "{source}", "documents": "{documents:,}", "changed": "{changed / documents:.1%}",
        "text": "{bytes:B}", "bytes per document": "{bytes / documents:n}", "documents with meta fields": "{fields}",
        "documents by language": "{languages}"}, flat(cards, "source"),
        "Documents that the filters kept, before deduplication. Changed: by a filter. Languages: of all documents that "
        "reached the filter, including dropped ones.")
    removed = flat({source: card.get("removed", {}) for source, card in cards.items()}, "source", "filter")
    yield Table("Duplicate lines", {"source": "{source}", "filter": "{filter}", "removed lines": "{lines:,}",
                                    "removed text": "{bytes:B}"},
                [own for own in removed if own["lines"]])
    scores = flat({source: card.get("scores", {}) for source, card in cards.items()}, "source", "filter", "score")
    yield Table("Scores", {"source": "{source}", "filter": "{filter}", "score from": "{score}", "kept": "{kept:,}",
                           "dropped": "{dropped:,}"}, [own for own in scores if own["kept"] or own["dropped"]],
                "Of all documents that reached the classifier, in steps of 0.05.")
    examples = flat({source: card["examples"] for source, card in cards.items()}, "source", "filter", "reason")
    yield Text("Examples of dropped documents: the first for each reason, as the filter got them", "\n\n".join(
        "\n  ".join([filled("{source}, {filter}: {reason}", own),
                     *(f"{example['id']}  {' '.join(example['text'].split())}" for example in own["value"])])
        for own in examples), folded=True)


def tokens(counts: Record) -> Table:
    """Tokens by split and source."""
    result = {SPLITS[split]: sources for split, sources in counts.get("splits", {}).items()}
    return Table("Tokens", {"source": "{source}", "split": "{split}", "tokens": "{tokens:,}", "documents": "{docs:,}",
                            "bytes of text": "{text_bytes:,}", "bytes per token": "{text_bytes / tokens:n}"},
                 flat(result, "split", "source"),
                 filled("Stored as {dtype}; each document's BOS and EOS count as tokens.", counts))


def tokenizer(facts: Facts) -> Iterator[Block]:
    """The tokenizer: its vocabulary, and statistics of the encoded text."""
    report = facts.tokenizer
    if sources := report.get("sources", {}):
        yield filled("{kind}, {size:,} ids, {used:,} of them used: {pieces:,} pieces and {special_ids:,} special "
                     "tokens; the others are byte-fallback and unknown ids. {unused_pieces:,} of the pieces occurred "
                     "neither in the validation text nor in a sample of the training text.", report)
    rows = {**sources, **({"all validation text": report.get("total")} if len(sources) > 1 else {}),
            "sample of training text": report.get("training_sample")}
    yield Table("Encoding of text", {
        "source": "{name}", "bytes per token": "{bytes_per_token:.3f}",
        "characters per token": "{characters_per_token:.3f}", "tokens per word": "{tokens_per_word:.3f}",
        "byte fallback": "{fallback_share:.3%}", "unknown": "{unknown_share:.3%}",
        "round-trip failures": "{round_trip_failures:,}", "documents": "{documents:,}", "bytes": "{text_bytes:,}"},
        [{"name": name, **entry} for name, entry in rows.items() if entry])
