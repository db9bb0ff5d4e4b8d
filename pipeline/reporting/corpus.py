"""The chapter on the text: what came in, what became of it, and the data card of each source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from drover.pipeline.data.filters.chain import total
from drover.pipeline.data.filters.decontamination import OUTPUT
from drover.pipeline.reporting.consumption import consumption_tables
from drover.pipeline.reporting.document import Fold, Section, Table, count_tables, percent, shown, size
from drover.pipeline.reporting.facts import Facts
from drover.pipeline.tokenization.rare_ids import BEYOND, KINDS, TIMES

SPLITS = {"train": "training", "heldout": "held out"}
RULES = {"hash": "by the hash of their text", "tail": "from the end of each source's text"}
"""How held-out documents were chosen, by shard.heldout_rule."""


MOST_SOURCES = 8
"""Sources whose lengths are shown apart."""
MOST_OUTLIERS = 20
"""Shards with many rare ids that are listed."""


def data_section(facts: Facts) -> Section:
    """Documents in, kept and dropped; tokens; shards on disk."""
    section = Section("data", "Data")
    counts, encode = facts.manifests["shard"].counts, facts.manifests["encode"]
    if counts.get("sources"):
        cut = f", and {counts['cut_in_two']:,} by cutting one in two" if counts.get("cut_in_two") else ""
        section.words.append(
            f"{counts['documents_in']:,} documents came in{cut}: {counts['train']:,} to train on, "
            f"{counts['heldout']:,} held out {RULES[facts.config.shard.heldout_rule]}, "
            f"{sum(counts['dropped'].values()):,} dropped, {counts['rejected']:,} unreadable.")
        section.tables.append(_documents(counts))
        section.tables += _filters(counts, facts)
        section.tables += _contamination(counts)
        _cards(section, counts, encode.counts)
    else:
        section.tables += count_tables("Documents", counts)
    section.tables += _tokens(encode.counts)
    section.tables += consumption_tables(facts)
    rows = []
    for kind, manifest in (("text", facts.manifests["shard"]), ("tokens", encode)):
        groups: dict[tuple[str, str], list[int]] = {}
        for record in manifest.outputs:
            if record.get("split") in SPLITS:
                group = groups.setdefault((str(record["source"]), str(record["split"])), [0, 0])
                group[0] += 1
                group[1] += record["bytes"]
        rows += [[source, SPLITS[split], kind, shown(files), size(total)]
                 for (source, split), (files, total) in groups.items()]
    if rows:
        section.tables.append(Table("Shards on disk", ["source", "split", "of", "files", "size"], rows, labels=3))
    return section


def _documents(counts: dict[str, Any]) -> Table:
    """What became of every document: each row adds up."""
    columns = {"came in": "documents_in", **({"cut in two": "cut_in_two"} if counts.get("cut_in_two") else {}),
               "trained on": "train", "held out": "heldout"}
    reasons = list(counts["dropped"])
    rows = [[name, *(shown(own[key]) for key in columns.values()),
             *(shown(own["dropped"].get(reason, 0)) for reason in reasons), shown(own["rejected"]),
             size(own["text_bytes"]["train"]), size(own["text_bytes"]["heldout"])]
            for name, own in (*counts["sources"].items(), *([("all", counts)] if len(counts["sources"]) > 1 else []))]
    came = " + ".join([name for name in columns if name in ("came in", "cut in two")]).capitalize()
    return Table("Documents", ["source", *columns, *reasons, "unreadable", "text to train on", "held-out text"], rows,
                 note=f"{came} = trained on + held out + {' + '.join(reasons)} + unreadable.",
                 strong=frozenset({len(rows) - 1}) if len(rows) > 1 else frozenset())


def _filters(counts: dict[str, Any], facts: Facts) -> list[Table]:
    """What each filter dropped and changed, by source and in all, and for which reasons."""
    filters: dict[str, dict[str, Any]] = counts.get("filters", {})
    if not filters:
        return []
    several = len(counts["sources"]) > 1
    entries = [(name, source, passed) for name, own in filters.items()
               for source, passed in (*((source, of["filters"][name]) for source, of in counts["sources"].items()),
                                      *([("all", own)] if several else []))]
    kept = " The dropped ones are in shard/dropped." if facts.config.shard.keep_dropped else ""
    tables = [Table(
        "Filters", ["filter", "source", "dropped", "text in them", "changed"],
        [[name, source, shown(passed["documents"]), size(passed["bytes"]), shown(passed["changed"])]
         for name, source, passed in entries], labels=2,
        note=f"In the order in which they were asked, before duplicates were looked for. A document that one dropped "
             f"was not shown to the next; one that was changed went on as it then was.{kept}",
        strong=frozenset(number for number, (_, source, _) in enumerate(entries) if several and source == "all"))]
    if reasons := [[name, reason, shown(documents)] for name, own in filters.items()
                   for reason, documents in own["reasons"].items()]:
        tables.append(Table("Why filters dropped documents", ["filter", "reason", "documents"], reasons, labels=2))
    return tables


def _tokens(counts: dict[str, Any]) -> list[Table]:
    """Tokens by source and split; whatever else there is, as it is."""
    splits = counts.get("splits")
    if not isinstance(splits, dict):
        return count_tables("Tokens", counts)
    rows = [[source, SPLITS.get(split, split), shown(own["tokens"]), shown(own["docs"]), shown(own["text_bytes"]),
             shown(own["text_bytes"] / max(1, own["tokens"]))]
            for split, sources in splits.items() for source, own in sources.items()]
    return [Table("Tokens", ["source", "split", "tokens", "documents", "bytes of text", "bytes per token"], rows,
                  labels=2, note=f"Stored as {counts.get('dtype')}; each document's BOS and EOS count as tokens."),
            *_rare_ids(counts)]


def _rare_ids(counts: Mapping[str, Any]) -> list[Table]:
    """The shards that have far more unknown or byte-fallback ids than the tokenizer's report."""
    outliers = counts.get("rare_ids", {}).get("outliers", [])
    rows = [[one["path"], KINDS[one["kind"]], percent(one["share"]), percent(one["reported"])]
            for one in outliers[:MOST_OUTLIERS]]
    more = f" {len(outliers) - len(rows):,} more are in encode's manifest." if len(outliers) > len(rows) else ""
    return [Table("Shards with text that the vocabulary cannot express", ["shard", "ids", "share", "in the report"],
                  rows, labels=2, note=f"More than {TIMES:g} times the share in the tokenizer's report, and "
                                       f"{percent(BEYOND)} of all ids beyond it.{more}")] if rows else []


def _contamination(counts: Mapping[str, Any]) -> list[Table]:
    """Which evaluation sets stood in the text, by filter and task."""
    tasks = [(name, task, own) for name, of_filter in counts.get("contamination", {}).items()
             for task, own in of_filter.items()]
    if not tasks:
        return []
    rules = dict.fromkeys(f"{name}: {own['n']} words in a row, or a whole item of {own['least_words']} to {own['n']} "
                          f"words; such documents were {'dropped' if own['action'] == 'drop' else 'kept, and flagged'}"
                          for name, _, own in tasks)
    return [Table("Evaluation sets found in the text", ["filter", "task", "documents", "items found", "of items",
                                                        "too short to say"],
                  [[name, task, shown(own["documents"]), shown(own["found"]), shown(own["items"]),
                    shown(own["too_short"])] for name, task, own in tasks], labels=2,
                  note=f"The rule: {'; '.join(rules)}. Each item that was found stands in shard/{OUTPUT}.")]


def _cards(section: Section, counts: Mapping[str, Any], encoded: Mapping[str, Any]) -> None:
    """The data cards: a row a source, lengths, languages, and what was dropped to be looked at."""
    cards: dict[str, dict[str, Any]] = counts.get("cards", {})
    if not any(card["documents"] for card in cards.values()):
        return
    tokens = {source: [sum(own.get(source, {}).get(key, 0) for own in encoded.get("splits", {}).values())
                       for key in ("text_bytes", "tokens")] for source in cards}
    columns = ["source", "documents", "changed", "duplicates", "text", "characters", "bytes per character",
               "bytes per document", "tokens", "bytes per token"]
    rows = []
    for source, card in cards.items():
        documents, dropped = card["documents"], counts["sources"][source]["dropped"]
        copies = sum(count for reason, count in dropped.items() if "duplicate" in reason)
        rows.append([source, shown(documents), _share(card["changed"], documents), _share(copies, documents),
                     size(card["bytes"]), shown(card["characters"]), _ratio(card["bytes"], card["characters"]),
                     _ratio(card["bytes"], documents), shown(tokens[source][1]), _ratio(*tokens[source])])
    section.tables.append(Table(
        "Data cards", columns, rows,
        note="Of the documents that the filters kept, before duplicates were dropped; tokens are those of both splits. "
             "Changed: by a filter. Duplicates: near ones included, where they were looked for."))
    section.tables.append(_lengths(cards))
    section.tables += _fields(cards) + _languages(cards)
    if text := "\n\n".join(_examples(cards)):
        section.folds.append(Fold("Documents that filters dropped: the first for each reason, as the filter saw them",
                                  text))


def _lengths(cards: Mapping[str, Mapping[str, Any]]) -> Table:
    """Shares of documents by length, a row for each power of two: of all, and of the sources with most documents."""
    largest = sorted(cards, key=lambda source: -cards[source]["documents"])[:MOST_SOURCES]
    shown_of = {source: cards[source] for source in cards if source in largest}
    if len(cards) > 1:
        shown_of["all"] = total({key: card[key] for key in ("documents", "lengths")} for card in cards.values())
    places = sorted({int(length) for card in cards.values() for length in card["lengths"]})
    rows = [[f"{size(2 ** (place - 1))} to {size(2 ** place)}", *(
        _share(card["lengths"].get(str(place), 0), card["documents"]) for card in shown_of.values())]
        for place in range(places[0], places[-1] + 1)]
    left = len(cards) - len(largest)
    return Table("Lengths of documents", ["text", *shown_of], rows, note="Shares of documents."
                 + (f" The {left} sources with fewer documents are only in all." if left else ""))


def _fields(cards: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """In how many documents each meta field is that a source names."""
    rows = [[source, name, shown(found["in"]), shown(found["of"]), _share(found["in"], found["of"])]
            for source, card in cards.items() for name, found in card.get("fields", {}).items()]
    return [Table("Meta fields", ["source", "field", "documents with it", "of", "share"], rows, labels=2,
                  note="Of the documents that could be read. Others have null there.")] if rows else []


def _languages(cards: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """What filters that tell languages have told, for each source."""
    rows = [[source, name, language, shown(count), _share(count, sum(languages.values()))]
            for source, card in cards.items() for name, languages in card.get("languages", {}).items()
            for language, count in languages.items()]
    return [Table("Languages", ["source", "told by", "language", "documents", "share"], rows, labels=3,
                  note="Of the documents that the filter was shown, those that it dropped included.")] if rows else []


def _examples(cards: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for source, card in cards.items():
        for name, reasons in card["examples"].items():
            for reason, examples in reasons.items():
                lines = [f"{example['id']}  {' '.join(example['text'].split())}" for example in examples]
                yield "\n  ".join([f"{source}, {name}: {reason}", *lines])


def _share(part: int, whole: int) -> str:
    return percent(part / whole) if whole else "–"


def _ratio(part: int, whole: int) -> str:
    return shown(part / whole) if whole else "–"
