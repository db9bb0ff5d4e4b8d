"""The text: what came in, what became of it, and statistics of each source."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from drover.pipeline.core.files import Record
from drover.pipeline.data.files_read import BECAME, TOGETHER
from drover.pipeline.data.filters.chain import total
from drover.pipeline.data.filters.decontamination import OUTPUT
from drover.pipeline.reporting.chapters.consumption import consumption
from drover.pipeline.reporting.document import ALL, Block, Fold, Lines, Series, Table, filled, flat
from drover.pipeline.reporting.facts import Facts
from drover.pipeline.tokenization.rare_ids import BEYOND, KINDS, TIMES

SPLITS = {"train": "training", "validation": "validation"}
RULES = {"hash": "by the hash of their text", "tail": "from the end of each source's text"}
"""How validation documents were chosen, by shard.validation_rule."""
MOST_SOURCES = 8
"""Sources with their own line in the chart of lengths."""
MOST_OUTLIERS = 20
"""Shards with many rare ids that are listed."""


def data(facts: Facts) -> Iterator[Block]:
    """The chapter."""
    counts, encoded = facts.counts("shard"), facts.counts("encode")
    if sources := counts.get("sources", {}):
        cut = ", and {cut_in_two:,} by cutting one in two" if counts.get("cut_in_two") else ""
        yield filled(f"{{documents_in:,}} documents came in{cut}: {{train:,}} for training, {{validation:,}} for "
                     f"validation, chosen {RULES[facts.config.shard.validation_rule]}, "
                     f"{sum(counts['dropped'].values()):,} dropped, {{rejected:,}} unreadable.", counts)
        entries = {**sources, ALL: counts} if len(sources) > 1 else sources
        yield _documents(counts, entries)
        yield from _files(counts, entries)
        yield from _filters(counts, entries, facts.config.shard.keep_dropped)
        yield from _sources(counts, encoded.get("splits", {}))
    yield tokens(encoded)
    yield rare_ids(encoded)
    yield consumption(facts)
    groups: dict[tuple[str, str, str], list[int]] = {}
    for content, stage in (("text", "shard"), ("tokens", "encode")):
        for record in facts.manifests[stage].outputs:
            if record.get("split") in SPLITS:
                groups.setdefault((record["source"], SPLITS[record["split"]], content), []).append(record["bytes"])
    yield Table("Shards on disk", {"source": "{group[0]}", "split": "{group[1]}", "content": "{group[2]}",
                                   "files": "{files:,}", "size": "{bytes:B}"},
                [{"group": group, "files": len(sizes), "bytes": sum(sizes)} for group, sizes in groups.items()])


def _documents(counts: Record, entries: Record) -> Table:
    """The fate of every document: each row adds up."""
    came = {"came in": "{documents_in:,}", **({"cut in two": "{cut_in_two:,}"} if counts.get("cut_in_two") else {})}
    became = {"training": "{train:,}", "validation": "{validation:,}",
              **{reason: f"{{dropped[{reason}]:,}}" for reason in counts["dropped"]}, "unreadable": "{rejected:,}"}
    none = dict.fromkeys(counts["dropped"], 0)
    return Table("Documents", {"source": "{source}", **came, **became, "training text": "{text_bytes[train]:B}",
                               "validation text": "{text_bytes[validation]:B}"},
                 [{**own, "dropped": none | own["dropped"]} for own in flat(entries, "source")],
                 f"{' + '.join(came).capitalize()} = {' + '.join(became)}.")


def _files(counts: Record, entries: Record) -> Iterator[Block]:
    """What became of the input files, and those of which something was not read. Older runs do not have it."""
    became = [name for name in (*BECAME, TOGETHER) if name in counts.get("files", {})]
    yield Table("Input files", {"source": "{source}", "files": "{files[in]:,}",
                                **{name: f"{{files[{name}]:,}}" for name in became},
                                "bytes": "{bytes[in]:,}", "bytes rejected": "{bytes[rejected]:,}"},
                [own for own in flat(entries, "source") if "files" in own],
                f"Files = {' + '.join(became)}. Partly: some records were rejected. Unread: all. Empty: has no record."
                + " Together: by the library of `kind: hf`, which does not say what it took from which file." *
                (TOGETHER in became))
    some, rejected = counts.get("incomplete_files", []), counts.get("files", {})
    more = sum(rejected.get(name, 0) for name in ("partly", "unread")) - len(some)
    yield Table("Files that were not read whole", {
        "file": "{source}/{file}", "bytes": "{bytes:,}", "bytes rejected": "{lost_bytes:,}",
        "documents": "{documents:,}", "documents rejected": "{rejected:,}", "first reason": "{reason}"}, some,
        "All rejected records are in shard/rejected.jsonl." + (f" {more:,} more files have fewer rejected bytes."
                                                               if more > 0 else ""))
    yield Table("Files that were left out", {"source": "{source}", "file": "{file}", "reason": "{reason}"},
                counts.get("left_out_files", []))
    for remark in chain.from_iterable(counts.get("remarks", {}).values()):
        yield f"{remark[:1].upper()}{remark[1:]}."


def _filters(counts: Record, entries: Record, kept: bool) -> Iterator[Block]:
    """The documents that each filter dropped and changed, by source, with reasons; and contamination that it found."""
    filters = counts.get("filters", {})
    yield Table("Filters", {"filter": "{filter}", "source": "{source}", "dropped": "{documents:,}",
                            "dropped text": "{bytes:B}", "changed": "{changed:,}"},
                flat({name: {source: own["filters"][name] for source, own in entries.items()} for name in filters},
                     "filter", "source"),
                "In the order in which they ran, before deduplication. Each filter gets the documents that the "
                "filters before it kept, with their changes." + " Dropped documents are in shard/dropped." * kept)
    yield Table("Why filters dropped documents", {"filter": "{filter}", "reason": "{reason}", "documents": "{value:,}"},
                flat({name: own["reasons"] for name, own in filters.items()}, "filter", "reason"))
    found = flat(counts.get("contamination", {}), "filter", "task")
    rules = [filled("{filter}: {n:,} words in a row, or a whole item of {min_words:,} to {n:,} words; such documents "
                    "were " + ("dropped" if own["action"] == "drop" else "kept, and flagged"), own) for own in found]
    yield Table("Evaluation sets found in the text", {
        "filter": "{filter}", "task": "{task}", "documents": "{documents:,}", "items found": "{found:,}",
        "items": "{items:,}", "too short": "{too_short:,}"}, found,
        f"Rule: {'; '.join(dict.fromkeys(rules))}. Each item that was found is in shard/{OUTPUT}.")
    yield from (f"Warning: {own['warning']}" for own in found if "warning" in own)


def _sources(counts: Record, splits: Record) -> Iterator[Block]:
    """Statistics of each source: sizes, lengths, fields, languages, and examples of dropped documents."""
    cards = {source: {"fields": {}, "languages": {}, **card} for source, card in counts.get("cards", {}).items()
             if card["documents"]}
    dropped = {source: counts["sources"][source]["dropped"] for source in cards}
    yield Table("Sources", {
        "source": "{source}", "documents": "{documents:,}", "changed": "{changed / documents:.1%}",
        "duplicates": "{copies / documents:.1%}", "text": "{bytes:B}", "characters": "{characters:,}",
        "bytes per character": "{bytes / characters:n}", "bytes per document": "{bytes / documents:n}",
        "tokens": "{tokens:,}", "bytes per token": "{text_bytes / tokens:n}"}, [
        {"source": source, **card, **total(own.get(source, {}) for own in splits.values()),
         "copies": sum(count for reason, count in dropped[source].items() if "duplicate" in reason)}
        for source, card in cards.items()],
        "Documents that the filters kept, before deduplication. Tokens: of both splits. Changed: by a filter. "
        "Duplicates: including near-duplicates, if those were removed.")
    yield _lengths(cards)
    yield Table("Meta fields", {"source": "{source}", "field": "{field}", "documents with it": "{in:,}",
                                "documents": "{of:,}", "share": "{in / of:.1%}"},
                flat({source: card["fields"] for source, card in cards.items()}, "source", "field"),
                "Share of all readable documents. In the others the field is null.")
    languages = {source: {name: {language: {"count": count, "all": sum(found.values())}
                                 for language, count in found.items()} for name, found in card["languages"].items()}
                 for source, card in cards.items()}
    yield Table("Languages", {"source": "{source}", "identified by": "{filter}", "language": "{language}",
                              "documents": "{count:,}", "share": "{count / all:.1%}"},
                flat(languages, "source", "filter", "language"),
                "Share of all documents that reached the filter, including dropped ones.")
    examples = flat({source: card["examples"] for source, card in cards.items()}, "source", "filter", "reason")
    yield Fold("Examples of dropped documents: the first for each reason, as the filter got them", "\n\n".join(
        "\n  ".join([filled("{source}, {filter}: {reason}", found),
                     *(f"{example['id']}  {' '.join(example['text'].split())}" for example in found["value"])])
        for found in examples))


def _lengths(cards: Record) -> Lines:
    """Shares of documents by length, in classes of powers of two, for the largest sources and for all."""
    largest = sorted(cards, key=lambda source: -cards[source]["documents"])[:MOST_SOURCES]
    shown = {source: cards[source] for source in cards if source in largest}
    if len(cards) > 1:
        shown[ALL] = total({key: card[key] for key in ("documents", "lengths")} for card in cards.values())
    places = sorted({int(length) for card in cards.values() for length in card["lengths"]})
    classes = range(places[0], places[-1] + 1) if places else ()
    left = len(cards) - len(largest)
    return Lines("Document lengths", "bytes of text", "share of documents", [
        Series(source, [2.0 ** place for place in classes],
               [card["lengths"].get(str(place), 0) / card["documents"] for place in classes])
        for source, card in shown.items()],
        f"The {left:,} smaller sources are included in `all` only." if left else "",
        "from zero", percent=True, histogram=True)


def tokens(counts: Record) -> Table:
    """Tokens by split and source."""
    found = {SPLITS[split]: sources for split, sources in counts.get("splits", {}).items()}
    return Table("Tokens", {"source": "{source}", "split": "{split}", "tokens": "{tokens:,}", "documents": "{docs:,}",
                            "bytes of text": "{text_bytes:,}", "bytes per token": "{text_bytes / tokens:n}"},
                 flat(found, "split", "source"),
                 filled("Stored as {dtype}; each document's BOS and EOS count as tokens.", counts))


def rare_ids(counts: Record) -> Table:
    """Shards with a far larger share of unknown or byte-fallback ids than in the tokenizer's report."""
    outliers = counts.get("rare_ids", {}).get("outliers", [])
    more = f" {len(outliers) - MOST_OUTLIERS:,} more are in encode's manifest." if len(outliers) > MOST_OUTLIERS else ""
    return Table("Shards with many rare ids", {
        "shard": "{path}", "ids": "{kind}", "share": "{share:.1%}", "in the tokenizer's report": "{reported:.1%}"},
        [{**one, "kind": KINDS[one["kind"]]} for one in outliers[:MOST_OUTLIERS]],
        f"Their share is over {TIMES:g} times that in the tokenizer's report, and {BEYOND:.1%} of all ids above it."
        + more)
