"""From a step to its documents, and from a document to the steps that trained on it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.contract.run import Run
from drover.pipeline.core.console import ProgressBar, echo, first
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, read_lines
from drover.pipeline.data.documents import Document, Rejection, place_in
from drover.pipeline.data.exclusion import Range, format_ranges, ranges_of, sample_numbers
from drover.pipeline.data.filters.base import DROPPED
from drover.pipeline.data.planning.passes import DUPLICATES
from drover.pipeline.data.provenance import pieces, pieces_of
from drover.pipeline.data.sampling.order import PHASE_EPOCHS
from drover.pipeline.data.text_shards import SPLITS, read_shard, shard_records
from drover.pipeline.data.token_shards import KEY_BYTES, TokenShard
from drover.pipeline.records.metrics import Line, reordered
from drover.pipeline.tokenization.tokenizer import load_tokenizer
from drover.tools.sample_history import SampleHistory, trained_on

SHORTEST_KEY = 4
MOST_SHARDS = 32
"""A step's documents are looked up in at most so many text shards, a second for 100 MB of each."""
DocumentId = tuple[int, int]
"""A document: the row of its shard in the table of token shards, and its number in the shard."""


class Steps:
    """The steps of a run: those in its log that no rollback undid, and planned ones.

    Attributes:
        done: the last step in the log.
        planned: the last step of the plan.
    """

    def __init__(self, history: SampleHistory) -> None:
        self.history = history
        self.phases = PhasePlan.of(history.run.config.train)
        self.planned, self.done = self.phases.steps, max(history.final, default=0)
        self._excluded = history.excluded()
        self._logged = sorted(history.final.values(), key=_first_sample)
        if changed := reordered(history.events):
            echo(f"warning: after step {changed[-1]} this run continued with other text or another order of samples "
                 f"(--accept-changes); earlier steps may have trained on other text than is shown here",
                 file=sys.stderr)

    @property
    def end(self) -> int:
        """The sample after the last one of the log and of the plan."""
        planned = self._excluded.take(0, self.phases.sequences_between(0, self.planned)).end
        return max([planned, *(line["samples"][1] for line in self.history.final.values())])

    def samples(self, step: int) -> np.ndarray:
        """The sample numbers of a step (from 1), ascending."""
        if (line := self.history.final.get(step)) is None:
            before = self.phases.sequences_between(0, step - 1)
            return self._excluded.numbers(0, before, self.phases.sequences_between(0, step) - before)
        return sample_numbers(trained_on(line))

    def skipped(self, step: int) -> str:
        """Why a step's update was skipped; "" if it was not."""
        line = self.history.final.get(step)
        return line.get("skipped", "") if line else ""

    def use_of(self, sample: int) -> tuple[int, str, str]:
        """How a sample was used, or will be: the step; `trained`, `skipped`, `left out` or `to come`; and why."""
        for rollback in self.history.rollbacks:
            if rollback.plan_sha256 in self.history.data.order.links and _is_in(sample, rollback.samples):
                return rollback.step, "left out", rollback.why
        place = bisect_right(self._logged, sample, key=_first_sample)
        if place and _is_in(sample, trained_on(self._logged[place - 1])):
            step = self._logged[place - 1]["step"]
        else:
            step = self.phases.step_of(sample - sum(end - begin for begin, end in self._excluded.within(0, sample)))
        why = self.skipped(step)
        return step, "skipped" if why else "trained" if step <= self.done else "to come", why


@dataclass(frozen=True)
class Reading:
    """A part of a document in a sample. step, what, why: see `Steps.use_of`. own_phase: the phase, if its sequences do
    not divide a chunk: it counts its own epochs."""

    step: int
    what: str
    why: str
    sample: int
    epoch: int
    own_phase: int | None
    tokens: tuple[int, int]

    @property
    def in_epoch(self) -> str:
        """The epoch, as text."""
        return f"{self.epoch}" + (f" of phase {self.own_phase}" if self.own_phase else "")


@dataclass
class TracedDocument:
    """A document of a token shard, by its number there, and all its readings. id, place, url, text: from its text
    shard, if that is there."""

    key: str
    source: str
    split: str
    shard: str
    document: int
    tokens: int
    bytes: int
    readings: list[Reading] = field(default_factory=list)
    id: str | None = None
    place: str | None = None
    url: str | None = None
    text: str | None = None


def _first_sample(line: Line) -> int:
    return line["samples"][0]


def _is_in(sample: int, ranges: Iterable[Range]) -> bool:
    return any(begin <= sample < end for begin, end in ranges)


def show_samples(search: Search, options: argparse.Namespace) -> None:
    """Print the documents of `--step` or `--samples`, as lines or with `--json` as one object. A step's samples are
    those of the log, or the planned ones if it is not done yet."""
    steps = search.steps
    notes = list[str]()
    step = options.step
    if step is None:
        begin, end = options.samples
        if not 0 <= begin < end:
            raise UserError(f"--samples takes FIRST and END with 0 <= FIRST < END; asked: {begin} {end}.")
        samples = sample_numbers([(begin, end)])
    else:
        if step < 1:
            raise UserError(f"--step counts from 1; asked: step {step}.")
        if step > steps.done:
            notes.append(f"this run has done {steps.done} steps; these are the planned samples of step {step}")
        if why := steps.skipped(step):
            notes.append(f"the update of step {step} was skipped ({why})")
        samples = steps.samples(step)
    tokenizer = load_tokenizer(steps.history.work.input("tokenizer")[0]) if options.text else None
    spans = [*pieces(steps.history.data, samples)]
    originals, rest = search.originals({(piece.shard.record["path"], piece.document): piece.key for piece in spans})
    if rest:
        notes.append(f"the documents of {rest:,} more text shards are not looked up; --document KEY shows one of them")
    records: list[Record] = [
        {"sample": piece.sample, "source": piece.shard.source, "shard": piece.shard.path.name,
         "document": piece.document, "key": piece.key, "tokens": [piece.start, piece.stop],
         **_origin_of(originals.get((piece.shard.record["path"], piece.document))),
         **({"text": tokenizer.decode(piece.ids().tolist())} if tokenizer else {})}
        for piece in spans]
    if options.json:
        print(json.dumps({"step": step, "samples": ranges_of(samples), "notes": notes, "pieces": records},
                         ensure_ascii=False))
        return
    title = "" if step is None else f"step {step}: "
    echo(*notes, f"{title}samples {format_ranges(ranges_of(samples))}")
    for record in records:
        start, stop = record["tokens"]
        echo(f"sample {record['sample']}  {record['shard']}  document {record['document']}  key {record['key']}  "
             f"tokens {start}..{stop}{_as_text(record)}")
        if tokenizer:
            echo("    " + record["text"].replace("\n", "\n    "))


def _origin(own_id: str | None, place: str | None = None, meta: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Where a document comes from: its id, the file and record if these are not its id, and the `url` of its meta."""
    return {"id": own_id, "place": place or None, "url": meta.get("url")}


def _origin_of(document: Document | None) -> dict[str, Any]:
    return _origin(document.id, document.place, document.meta) if document else _origin(None)


def _names(own: Record) -> set[str]:
    """A document's own names, alone and after the source's, as messages of shard write them."""
    names = {own[kind] for kind in _origin(None) if own[kind]}
    return names | {f"{own['source']}/{name}" for name in names}


def _as_text(origin: Mapping[str, Any]) -> str:
    return "".join(f"  {name} {origin[name]}" for name in _origin(None) if origin[name])


def show_documents(search: Search, options: argparse.Namespace) -> None:
    """Print where the documents of `--document` or `--id` were used, or why they were left out: lines, or with `--json`
    one object.

    Raises:
        UserError: there is no such document, or the options make no sense.
    """
    names = {*(options.id or ())}
    texts = search.texts_of(names)
    keys = [*texts] if names else [_prefix(options.document)]
    is_encoded = not names or search.run.manifest("encode") is not None
    encoded = {key: search.with_key(key) if is_encoded else [] for key in keys}
    documents = [document for own in encoded.values() for document in own]
    if not documents and not names:
        raise UserError(f"No document whose key begins with {', '.join(keys)} is in the token shards of "
                        f"{search.folder}.")
    missing = names.difference(*map(_names, texts.values()))
    left_out = [own for key, own in texts.items() if not encoded[key]] + search.left_out(missing)
    traced = search.traced(documents, text=options.text) if documents else []
    if options.json:
        steps = {"steps_done": search.steps.done, "steps_planned": search.steps.planned} if is_encoded else {}
        print(json.dumps({**steps, "left_out": left_out, "documents": [asdict(document) for document in traced]},
                         ensure_ascii=False))
    else:
        echo(*(f"source {own['source']}{_as_text(own)}: {own['reason']}; no step trains on it" for own in left_out),
             *(line for document in traced for line in _lines(document, search.steps)))


def _prefix(text: str) -> str:
    """The digits of `--document`; a key of a text shard may have a number behind a hyphen."""
    key = _digits(text.lower())
    if not re.fullmatch(rf"[0-9a-f]{{{SHORTEST_KEY},{2 * KEY_BYTES}}}", key):
        raise UserError(f"--document takes a key of {2 * KEY_BYTES} hexadecimal digits or its first {SHORTEST_KEY} at "
                        f"least; asked: {text}. --id takes a document's own id.")
    return key


def _digits(key: str) -> str:
    """A text's key without the number that equal texts of a shard have."""
    return key.partition("-")[0]


class Search:
    """Finds documents of a run, and the samples that have a part of them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.texts = run.stage_folder("shard")
        self.manifest = run.manifest("shard")
        self.text_records = {record["path"]: record for split in SPLITS
                             for record in (shard_records(self.manifest, split) if self.manifest else ())}

    @cached_property
    def steps(self) -> Steps:
        """The steps of the run; UserError before `encode` is done."""
        return Steps(SampleHistory(self.run))

    @property
    def folder(self) -> Path:
        """Where the token shards are."""
        return self.steps.history.work.input("encode")[0]

    def texts_of(self, names: set[str]) -> dict[str, Record]:
        """The documents with these ids by their keys, as `left_out` gives them. Text shards are read if one of the
        names occurs in them."""
        self.run.finished("shard")
        forms = [orjson.dumps(name) for own in names for name in (own, own.partition("/")[2]) if name]
        result = dict[str, Record]()
        records = self.text_records if names else {}
        with ProgressBar("trace", "search", len(records), "text shards", sys.stderr) as progress:
            for path, record in records.items():
                file = self.texts / path
                data = file.read_bytes() if file.is_file() else b""
                is_named = not data or any(form in data for form in forms)
                for document in read_shard(self.texts, record) if is_named else ():
                    own: Record = {"source": document.source, **_origin_of(document)}
                    if names & _names(own):
                        key = _digits(document.key)
                        result[key] = {**own, "reason": f"it is in {path} with the key {key}, and encode has made no "
                                       f"tokens of it yet"}
                progress.advance()
        return result

    def left_out(self, names: set[str]) -> list[Record]:
        """The documents with these ids that are in no text shard: source, id, place, url, and the reason.

        Raises:
            UserError: no record of the stage names one of them.
        """
        result = [own for own in self._listed() if names & _names(own)] if names else []
        if missing := names.difference(*map(_names, result)):
            tokens = [source.name for source in self.run.config.encode.sources]
            raise UserError(f"No document with the id {', '.join(sorted(missing))} is in the text shards of "
                            f"{self.texts}. rejected.jsonl, dropped/ and duplicates/ there do not name it either; the "
                            f"last two are written with shard.keep_dropped: true. So it is in none of this run's "
                            f"records. Where a source reads the texts of another run, that run may know it; else it "
                            f"is no input, or came after the stage shard." + f" The documents of {', '.join(tokens)} "
                            f"came as tokens, without an id: --document finds them by their keys." * bool(tokens))
        return result

    def _listed(self) -> Iterator[Record]:
        from pyarrow import parquet

        for record in self.run.finished("shard").outputs:
            path = self.texts / record["path"]
            if record.get("split") == DROPPED:
                for line in read_lines(path):
                    yield {"source": line["source"], **_origin(line["id"], line.get("place"), line["meta"]),
                           "reason": f"the filter {line['filter']} dropped it ({line['reason']})"}
            elif record.get("split") == DUPLICATES and path.is_file():
                for batch in parquet.ParquetFile(path).iter_batches():
                    for row in batch.to_pylist():
                        yield {"source": row["source"], **_origin(row["id"], None, row), "reason":
                               f"it is a {row['kind'].replace('_', '-')} of {row['kept_id']} of the source "
                               f"{row['kept_source']}, which is kept"}
            elif record.get("split") == "rejected":
                for own in read_lines(path, Rejection):
                    what = "it could not be read" if own.documents else "it is passed over"
                    yield {"source": own.source, **_origin(place_in(own.file, own.record), None, vars(own)),
                           "reason": f"{what} ({own.reason})"}

    def originals(self, wanted: Mapping[tuple[str, int], str]) -> tuple[dict[tuple[str, int], Document], int]:
        """Documents of token shards from the text shards that are there, if these have the same text still; and of how
        many text shards none was looked up. wanted: keys, by the shard's path and the number in it."""
        numbers = defaultdict[str, set[int]](set)
        for path, number in wanted:
            numbers[path].add(number)
        result = dict[tuple[str, int], Document]()
        looked_up = [*numbers][:MOST_SHARDS]
        with ProgressBar("trace", "documents", len(looked_up), "text shards", sys.stderr, transient=True) as progress:
            for path in looked_up:
                record = self.text_records.get(Path(path).with_suffix(".tar").as_posix())
                if record and (self.texts / record["path"]).is_file():
                    own = sorted(numbers[path])
                    result |= {(path, number): document for number, document in zip(
                        own, read_shard(self.texts, record, own), strict=False)
                        if _digits(document.key) == wanted[path, number]}
                progress.advance()
        return result, len(numbers) - len(looked_up)

    def with_key(self, prefix: str) -> list[DocumentId]:
        """The documents whose key begins with these digits, in the order of the table.

        Raises:
            UserError: several different keys begin with them.
        """
        low, high = (np.bytes_(bytes.fromhex(prefix.ljust(2 * KEY_BYTES, end))) for end in "0f")
        matching = dict[DocumentId, str]()
        for row in range(len(self.steps.history.table)):
            shard = self._shard(row)
            keys = shard.keys(0, shard.documents).view(f"S{KEY_BYTES}").reshape(-1)
            for number in np.flatnonzero((keys >= low) & (keys <= high)).tolist():
                matching[row, number] = shard.document_key(number)
        if len(different := [*dict.fromkeys(matching.values())]) > 1:
            raise UserError(f"{len(different):,} documents have keys that begin with {prefix}: {first(different, 4)}. "
                            f"Give more digits.")
        return [*matching]

    def traced(self, documents: list[DocumentId], *, text: bool) -> list[TracedDocument]:
        """The documents with all their readings. text: and their text."""
        end, data = self.steps.end, self.steps.history.data
        places = [(self.steps.history.table.paths[row], number) for row, number in documents]
        keys = [self._shard(row).document_key(number) for row, number in documents]
        originals, _ = self.originals(dict(zip(places, keys, strict=True)))
        traced = {place: self._document(*document, originals.get(place), text=text)
                  for place, document in zip(places, documents, strict=True)}
        with ProgressBar("trace", "order", end, "samples", sys.stderr) as progress:
            for piece in pieces_of(data, documents, end, progress.advance):
                phase, epoch = divmod(int(data.order.locate(np.array([piece.sample])).epoch[0]), PHASE_EPOCHS)
                traced[piece.shard.record["path"], piece.document].readings.append(Reading(
                    *self.steps.use_of(piece.sample), piece.sample, epoch, phase or None, (piece.start, piece.stop)))
        return [*traced.values()]

    def _document(self, row: int, number: int, original: Document | None, *, text: bool) -> TracedDocument:
        shard = self._shard(row)
        begin, end = shard.document_span(number)
        own = original.text if original else None
        if text and shard.source not in self.run.config.shard.source_names:  # it came as tokens
            own = load_tokenizer(self.steps.history.work.input("tokenizer")[0]).decode(shard.document_tokens(number))
        return TracedDocument(shard.document_key(number), shard.source, shard.record["split"], shard.record["path"],
                              number, end - begin, shard.document_bytes(number), **_origin_of(original),
                              text=own if text else None)

    def _shard(self, row: int) -> TokenShard:
        record = self.steps.history.table.record(row)
        return TokenShard(self.folder / record["path"], record)


def _lines(document: TracedDocument, steps: Steps) -> Iterator[str]:
    """The lines of one document."""
    yield (f"document {document.key}  source {document.source}  {document.shard} document {document.document}  "
           f"{document.tokens:,} tokens, {document.bytes:,} bytes{_as_text(vars(document))}")
    yield f"    {_summary(document, steps)}"
    for reading in document.readings:
        what = {"trained": "", "skipped": f"  update skipped ({reading.why})", "to come": "  to come",
                "left out": f"  left out by the rollback of this step ({reading.why})"}[reading.what]
        start, stop = reading.tokens
        yield (f"    step {reading.step}  sample {reading.sample}  epoch {reading.in_epoch}  "
               f"tokens {start}..{stop}{what}")
    if document.text is not None:
        yield "    | " + document.text.replace("\n", "\n    | ")


def _summary(document: TracedDocument, steps: Steps) -> str:
    if document.split == "validation":
        return "validation text: no step trains on it"
    if not document.readings:
        return f"read in none of the {max(steps.done, steps.planned)} steps that are done or planned"
    of = {what: sorted({reading.step for reading in document.readings if reading.what == what})
          for what in ("trained", "skipped", "left out", "to come")}
    epochs = ", ".join(dict.fromkeys(reading.in_epoch for reading in document.readings if reading.what == "trained"))
    parts = [f"trained on in {len(of['trained'])} of {steps.done} steps" + (f" (epochs {epochs})" if epochs else "")]
    parts += [f"{text} {len(of[what])}" for what, text in (("skipped", "skipped in"), ("left out", "left out of"))
              if of[what]]
    return "; ".join([*parts, *(f"next in step {step}" for step in of["to come"][:1])])
