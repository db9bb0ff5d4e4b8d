"""Stage 1, shard: clean and deduplicate the sources' documents, and write them as WebDataset tar shards for training
and validation.

The stage reads input files in units, applies the filters, and writes documents into `staging/`. Passes over their
digests (`drover.pipeline.data.planning`) then sort and match them in partitions. They decide which documents are kept,
and in which split and shard. Last, each shard is written as a unit. No pass holds the corpus in memory. Each pass has
units for processes and for several nodes. Documents keep the order of sources, file names and records, so the bytes
depend on the input only, not on the number of processes or on interruptions. The validation split is chosen after the
reading, by the digests or by the sizes of all documents (`shard.validation_rule`). Filters come first, so that
documents are compared, hashed and split by the text that is trained on.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from drover.pipeline.config.data import web_packages
from drover.pipeline.contract.workers import Task
from drover.pipeline.core.console import counted, readable
from drover.pipeline.core.errors import UnusableInputError, UserError, absent, all_problems, installed_version, listed
from drover.pipeline.core.files import atomic_file, output_record, read_lines, sha256_file
from drover.pipeline.data.counts import (
    MOST_NAMED,
    FileRead,
    counts_of_files,
    dropped_by_reason,
    files_read,
    incomplete,
    named,
    passed_over,
    source_card,
    total,
)
from drover.pipeline.data.counts import remarks as file_remarks
from drover.pipeline.data.documents import Rejection
from drover.pipeline.data.filters.base import DROPPED, external_code, few_reasons, libraries, no_counts
from drover.pipeline.data.sources import FILTER_FILES, reading_units
from drover.pipeline.data.text_shards import SPLITS

if TYPE_CHECKING:
    from drover.pipeline.config.data import ShardConfig, Source
    from drover.pipeline.contract.manifest import ListedFile
    from drover.pipeline.contract.stage_work import Work
    from drover.pipeline.data.planning.passes import Decided

REJECTED = "rejected.jsonl"
FEW = 50
"""Documents of which the hash may choose none for a split."""
FEW_REJECTED, FEW_REJECTED_SHARE = 10, 0.1
"""So many documents of a corpus in which they are more than the usual limit may be rejected, if documents, files and
bytes that are lost are at most this share."""
MANY_DROPPED = 0.5
"""If more than this share of a source's documents is dropped, a warning names the most frequent reasons."""
MANY_PAGES = 0.01
"""If more than this share of a source's documents begins as HTML, a warning says so."""


def shard(work: Work) -> None:
    """Read, plan, write, reconcile, commit."""
    from drover.pipeline.contract.inputs import gathered
    from drover.pipeline.data.planning.frequent_lines import find_frequent_lines
    from drover.pipeline.data.planning.near_duplicates import signature_settings
    from drover.pipeline.data.planning.passes import decide, write_shard
    from drover.pipeline.data.planning.runs import STAGING
    from drover.pipeline.data.reading import stage_unit

    config, folder = work.config.shard, work.folder
    sources = config.source_names
    if not sources:
        work.say("no source has text, so there is nothing to do: encode takes the tokens of encode.sources")
        work.commit([], {})
        return
    files = work.listing()
    of_web = {source.name: web_packages(source, [file["name"] for file in files if
                                                 file["name"].startswith(f"{source.name}/")])
              for source in config.sources}
    if problems := [problem for name, packages in of_web.items() for package in packages
                    for problem in absent(f"the source {name}", package)]:
        raise UserError(listed(problems))
    for source in config.sources:
        if source.kind == "hf" and source.revision is None:
            work.say(f"warning: source {source.name} has no `revision`; Drover will not notice if {source.dataset} "
                     f"changes on the Hub")
    filters = _filters(work)
    if config.near_duplicates is not None:
        filters["near_duplicates"] = signature_settings(config.near_duplicates)
    extractors = {name: {"extractors": {package: installed_version(package) for package in packages}}
                  for name, packages in of_web.items() if packages}
    units = [Task(payload["name"], {**payload, **filters, **extractors.get(payload["source"]["name"], {})})
             for payload in reading_units(config, files)]
    work.check(work.external_files())  # files of filters, which each worker reads
    searches = [own for own in config.filters if own.kind == "decontamination"]
    if searches:
        from drover.pipeline.data.filters.decontamination import gather_contamination, short_sets

        for warning in short_sets(searches):
            work.say(f"warning: {warning}")
    if any(own.kind == "duplicate_lines" for own in config.filters):
        made = find_frequent_lines(work, units)
        units = [Task(unit.name, {**unit.payload, "made": made}) for unit in units]
    read = work.run_pass("read", units, stage_unit)
    names = [unit.name for unit in units]
    source_of_unit = [sources.index(unit.payload["source"]["name"]) for unit in units]
    decided = decide(work, config, names, source_of_unit, read)
    _gather_rejections(folder, names)
    inputs = files_read(own for record in read for own in record["inputs"])
    counts = _count(decided, read, source_of_unit, config, inputs)
    _refuse(work, counts, inputs)

    written = work.run_pass("write", [Task(f"{payload['split']}-{payload['name']}", payload)
                                      for payload in decided.payloads], write_shard, "shards")
    shards = [output for record in written for output in record["outputs"]]
    _reconcile(counts, shards, files)
    contamination = []
    if searches:
        counts["contamination"], record = gather_contamination(work, searches, [own["findings"] for own in read])
        contamination.append(record)
    _print_counts(work, counts, shards, inputs)

    outputs = [*shards, *(record["outputs"][-1] for record in read if filters.get("keep_dropped")), *decided.kept,
               output_record(folder, folder / REJECTED, split="rejected", source="", docs=counts["rejected"],
                             text_bytes=0), *contamination]
    _clear_outputs(folder, {record["path"] for record in outputs})
    work.commit(outputs, counts, verified=True, files=gathered([own for record in read for own in record["inputs"]]),
                scratch=[folder / STAGING])


def _filters(work: Work) -> dict[str, Any]:
    """The fields of a unit's payload about filters; empty without filters."""
    config = work.config.shard
    code = {module: (path, sha256_file(path)) for module, path in external_code(work.config).items()}
    for module, (path, digest) in code.items():
        work.say(f"filters of the module {module} are not Drover's: {path}, sha256 {digest[:12]}")
    items = [item.model_dump(mode="json") for item in config.filters]
    files = {record["name"]: record["sha256"] for record in work.run.files(work.name)
             if record["name"].startswith(f"{FILTER_FILES}/")}
    # With code, files and libraries, so that units of an attempt with other ones are not mixed with these.
    return {"filters": items, "keep_dropped": config.keep_dropped, **({"filter_files": files} if files else {}),
            "libraries": libraries(config.filters),
            "code": {module: digest for module, (_, digest) in code.items()}} if items else {}


def _count(decided: Decided, read: list[dict[str, Any]], source_of_unit: list[int], config: ShardConfig,
           inputs: list[FileRead]) -> dict[str, Any]:
    """How many documents were kept and dropped and why and how many files were read, for each source and in total; each
    source's data card; the files of which something was not read, and remarks on each source."""
    of_source: dict[str, dict[str, Any]] = {}
    cards: dict[str, dict[str, Any]] = {}
    remarks: dict[str, list[str]] = {}
    for number, source in enumerate(config.sources):
        units = [unit for unit, owner in enumerate(source_of_unit) if owner == number]
        records = [read[unit] for unit in units]
        documents, empty, rejected, pages = (sum(record.get(name, 0) for record in records)
                                             for name in ("read", "empty", "rejected", "html"))
        fields = {name: {"in": count, "of": documents - rejected}
                  for name, count in total(record["fields"] for record in records).items()}
        cards[source.name] = {**source_card(records, config.dropped_examples), **({"fields": fields} if fields else {})}
        kept = decided.sums(number)
        duplicate, near, low = decided.dropped[units].sum(axis=0).tolist()
        filtered = few_reasons(total([no_counts(config.filters), *(record["filters"] for record in records)]))
        own = [file for file in inputs if file.source == source.name]
        of_source[source.name] = counts = {
            "documents_in": documents, "cut_in_two": int(decided.cuts(number)),
            **{split: sums["documents"] for split, sums in kept.items()},
            "dropped": {"duplicate": duplicate, **({"near_duplicate": near} if config.near_duplicates else {}),
                        **({"low_score": low} if decided.least else {}),
                        "empty": empty, **{name: own["documents"] for name, own in filtered.items()}},
            **({"filters": filtered} if filtered else {}),
            "rejected": rejected,
            **({"documents_that_are_html": pages} if pages else {}),
            **({"passed_over": passed} if (passed := passed_over(own)) else {}),
            **counts_of_files(own),
            "text_bytes": {split: sums["text_bytes"] for split, sums in kept.items()},
            "documents_with_u2581": sum(sums["u2581"] for sums in kept.values()),
        }
        remarks[source.name] = [*file_remarks(source, own), *_warnings(config, source, counts, cards[source.name])]
        if number in decided.least:
            remarks[source.name].append(f"source {source.name}: {low:,} documents are "
                                        f"{config.best_shares[source.name].reason}, whose scores are "
                                        f"{decided.least[number]:.6g} and more")
    return {**total(of_source.values()), "sources": of_source, "cards": cards, "remarks": remarks,
            "incomplete_files": [vars(file) for file in incomplete(inputs)[:MOST_NAMED]]}


def _warnings(config: ShardConfig, source: Source, counts: dict[str, Any], card: dict[str, Any]) -> Iterator[str]:
    reasons = Counter(dropped_by_reason(counts) | {"low_score": 0})
    dropped = reasons.total()
    if dropped > MANY_DROPPED * counts["documents_in"]:
        yield (f"warning: source {source.name}: {dropped:,} of {counts['documents_in']:,} documents "
               f"({dropped / counts['documents_in']:.0%}) are dropped, most as "
               f"{_counted(dict((+reasons).most_common(3)))}")
    for name, left in card.get("languages_kept", {}).items():
        if gone := [language for language, count in left.items() if not count]:
            yield (f"warning: source {source.name}: other filters drop all documents in {', '.join(gone)} that the "
                   f"filter {name} keeps; gopher_quality's stop words, for example, are English")
    for split in SPLITS:
        if not counts[split]:
            yield (f"warning: source {source.name} has no {split} document ({counts['train']} train, "
                   f"{counts['validation']} validation); shard.validation_share is {config.validation_share:g}")
    if pages := _pages(source, counts):
        yield f"warning: source {source.name}: {pages}"


def _pages(source: Source, counts: dict[str, Any]) -> str:
    """Why a source's HTML pages are taken for text, and what to do; "" if there are few."""
    pages = counts.get("documents_that_are_html", 0)
    if pages <= MANY_PAGES * counts["documents_in"] or getattr(source, "html", "pages") == "keep":
        return ""
    begin = (f"{pages:,} of {counts['documents_in']:,} documents begin as HTML pages, so the model learns their "
             f"markup; ")
    if source.kind == "hf":
        return f"{begin}download the data set's files, and read them by kind: files with html: fields"
    return (f"{begin}put these into a source of their own with html: fields, which extracts the text of all its "
            f"records, or set html: keep")


def _gather_rejections(folder: Path, units: list[str]) -> None:
    from drover.pipeline.data.planning.runs import staged

    with atomic_file(folder / REJECTED, keep_equal=True) as out:
        for unit in units:
            with open(staged(folder, unit, ".rejected"), "rb") as file:
                shutil.copyfileobj(file, out)


def _refuse(work: Work, counts: dict[str, Any], inputs: list[FileRead]) -> None:
    """UserError if too much was unreadable, or if a source or split is empty. No shard is written before."""
    config, problems = work.config.shard, []
    for settings in config.sources:
        source = settings.name
        own = counts["sources"][source]
        if own["train"] + own["validation"] == 0:
            pages = _pages(settings, own)
            rejected = f"{own['rejected']:,} unreadable{_most_rejected(work.folder, source)}"
            problems.append(f"source {source} yields no documents: {own['documents_in']:,} read, of which "
                            f"{_counted(own['dropped'])}, {rejected}. Correct the source"
                            f"{' or shard.filters' if config.filters else ''}, or leave it out."
                            f"{f' Of the source, {pages}.' if pages else ''}")
        fields = counts["cards"][source].get("fields", {})
        if absent := [name for name, own in fields.items() if own["of"] and not own["in"]]:
            problems.append(f"source {source}: none of the {fields[absent[0]]['of']:,} records that could be read has "
                            f"a field named {', '.join(absent)}. Correct the source's meta_fields, or remove the name "
                            f"there; the source is then read again.")
    size = counts["bytes"]
    shares = {f"{count:,} of {of:,} {what} cannot be read{rest}": count / of for count, of, what, rest in (
        (counts["rejected"], counts["documents_in"], "documents", ""),
        (sum(file.lost for file in inputs), len(inputs), "files", " to their end"),
        (size["rejected"], size["in"], "bytes of the files", "")) if of}
    most = config.max_rejected_share
    usual = type(config)().max_rejected_share  # another one is the user's choice
    if most == usual and max(counts["rejected"], most * counts["documents_in"]) <= FEW_REJECTED:
        most = FEW_REJECTED_SHARE
    if over := [text for text, share in shares.items() if share > most]:
        files = f" The files that lose most: {named(incomplete(inputs))}." if inputs else ""
        problems.append(f"{', and '.join(over)}, more than shard.max_rejected_share {config.max_rejected_share:g} "
                        f"allows{_most_rejected(work.folder)}.{files} {work.folder / REJECTED} names all "
                        f"of them. Repair or remove them, or add shard.max_rejected_share="
                        f"{math.ceil(1000 * max(shares.values())) / 1000:g} to the same command, which then "
                        f"continues.")
    documents = counts["train"] + counts["validation"]
    if documents == 1 and config.validation_rule == "hash":
        problems.append("the corpus is a single document, which cannot be used for both training and validation. Cut "
                        "it into documents with the source's `separator`, use its end for validation "
                        "(shard.validation_rule: tail), or give more files.")
    elif documents and not (counts["validation"] and counts["train"]):
        split, cure = ("train", "Lower it") if counts["validation"] else (
            "validation", f"Raise it (for example to {min(0.5, 5 / documents):.2g})")
        if documents < FEW and config.validation_rule == "hash":  # at any share all may fall into one split
            cure = "Take the end of each source's text instead (shard.validation_rule: tail)"
        problems.append(f"none of the {documents:,} documents is in the {split} split. shard.validation_share is "
                        f"{config.validation_share:g}. {cure}, or give more documents; a `separator` makes many of one "
                        f"text file.")
    if problems:
        raise UnusableInputError(all_problems(problems, "the corpus cannot be used", len(problems)))


def _most_rejected(folder: Path, source: str | None = None) -> str:
    """The most frequent reasons of rejections, as text for a message: how many documents each cost, and the first."""
    counts = Counter[str]()
    first_ones = dict[str, Rejection]()
    for rejection in read_lines(folder / REJECTED, Rejection):
        if rejection.documents and source in (None, rejection.source):
            reason = re.split(r"[:;,\d]", rejection.reason)[0]  # without what differs from record to record
            first_ones.setdefault(reason, rejection)
            counts[reason] += rejection.documents
    shown = [f"{count:,} as {first_ones[reason].source}/{first_ones[reason]}"
             for reason, count in counts.most_common(3)]
    return f" ({'; '.join(shown)})" if shown else ""


def _reconcile(counts: dict[str, Any], outputs: list[dict[str, Any]], files: list[ListedFile]) -> None:
    """AssertionError unless the documents in the shards (as read back) and the dropped ones are all that were read, and
    the files that units read are all that were listed, to their bytes."""
    for source, own in counts["sources"].items():
        sizes = [file["bytes"] for file in files if file["name"].startswith(f"{source}/")]
        if own["files"]["in"] != len(sizes) or own["bytes"]["in"] != sum(sizes):
            raise AssertionError(f"{source}: {len(sizes)} files of {sum(sizes)} bytes were listed: {own}")
        written = {split: sum(record["docs"] for record in outputs
                              if (record["split"], record["source"]) == (split, source)) for split in SPLITS}
        accounted = sum(written.values()) + sum(own["dropped"].values()) + own["rejected"] - own["cut_in_two"]
        if accounted != own["documents_in"] or any(written[split] != own[split] for split in SPLITS):
            raise AssertionError(f"{source}: {own['documents_in']} documents in, {accounted} accounted for: {written}, "
                                 f"{own}")


def _print_counts(work: Work, counts: dict[str, Any], outputs: list[dict[str, Any]], inputs: list[FileRead]) -> None:
    for remark in chain.from_iterable(counts["remarks"].values()):
        work.say(remark)
    for source, card in counts["cards"].items():
        for field, result in card.get("fields", {}).items():
            work.say(f"source {source}: meta field {field} in {result['in']:,} of {result['of']:,} documents")
    if files := incomplete(inputs):
        work.say(f"warning: {counted(counts['rejected'], 'document')} could not be read "
                 f"({work.folder / REJECTED} names them), of {counted(len(files), 'file')}: {named(files)}")
    for name, own in counts.get("filters", {}).items():
        reasons = f" ({_counted(own['reasons'], '; ')})" if own["reasons"] else ""
        size = f" ({readable(own['bytes'])})" if own["bytes"] else ""
        work.say(f"filter {name}: {own['documents']:,} documents{size} dropped{reasons}, {own['changed']:,} changed")
    cut = f" + {counts['cut_in_two']:,} by cutting in two" if counts["cut_in_two"] else ""
    shards = " + ".join(str(sum(record["split"] == split for record in outputs)) for split in SPLITS)
    became, size = {name: count for name, count in counts["files"].items() if count}, counts["bytes"]
    work.say(f"{counted(became.pop('in', 0), 'file')} in = {_counted(became, ' + ')}; {size['in']:,} bytes in, "
             f"{size['rejected']:,} rejected")
    work.say(f"{counted(counts['documents_in'], 'document')} in{cut} = {counts['train']:,} train + "
             f"{counts['validation']:,} validation + {sum(counts['dropped'].values()):,} dropped "
             f"({_counted(counts['dropped'])}) + "
             f"{counts['rejected']:,} rejected; {readable(sum(counts['text_bytes'].values()))} in {shards} shards")


def _counted(counts: dict[str, int], separator: str = ", ") -> str:
    return separator.join(f"{count:,} {what}" for what, count in counts.items())


def _clear_outputs(folder: Path, outputs: set[str]) -> None:
    """Remove files that are no outputs of this run: an interrupted run may have read another state of a Hub dataset."""
    from drover.pipeline.data.planning.passes import DUPLICATES

    for place in (*SPLITS, DROPPED, DUPLICATES):
        for path in (folder / place).rglob("*"):
            if path.is_file() and path.relative_to(folder).as_posix() not in outputs:
                path.unlink()


if __name__ == "__main__":
    from drover.pipeline.contract.entry import stage_main  # here: whoever imports this file needs none of it

    sys.exit(stage_main("shard", shard))
