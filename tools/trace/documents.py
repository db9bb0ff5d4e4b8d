"""From a document to the steps that trained on it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from drover.pipeline.core.console import ProgressBar, echo, first
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record
from drover.pipeline.data.provenance import pieces_of
from drover.pipeline.data.sampling.order import PHASE_EPOCHS
from drover.pipeline.data.text_shards import SPLITS, read_shard, shard_records
from drover.pipeline.data.token_shards import KEY_BYTES, TokenShard
from drover.tools.trace.steps import Steps

SHORTEST_KEY = 4
Found = tuple[int, int]
"""A document: the row of its shard in the table of token shards, and its number in the shard."""


def show(steps: Steps, options: argparse.Namespace) -> None:
    """Print where the documents of `--document` or `--id` were used: lines, or with `--json` one object.

    Raises:
        UserError: there is no such document, or the options make no sense.
    """
    steps.check_ranks()
    steps.warn_of_changes()
    search = Search(steps)
    keys = search.keys_of_id(options.id) if options.document is None else [_prefix(options.document)]
    found = [document for key in keys for document in search.with_key(key)]
    if not found:
        raise UserError(f"No document whose key begins with {', '.join(keys)} is in the token shards of "
                        f"{search.folder}.")
    records = search.records(found, text=options.text)
    if options.json:
        print(json.dumps({"steps_done": steps.done, "steps_planned": steps.planned, "documents": records},
                         ensure_ascii=False))
        return
    for record in records:
        echo(*_lines(record, steps))


def _prefix(text: str) -> str:
    """The digits of `--document`; a key of a text shard may have a number behind a hyphen."""
    key = text.lower().partition("-")[0]
    if not re.fullmatch(rf"[0-9a-f]{{{SHORTEST_KEY},{2 * KEY_BYTES}}}", key):
        raise UserError(f"--document takes a key of {2 * KEY_BYTES} hexadecimal digits or its first {SHORTEST_KEY} at "
                        f"least; asked: {text}. --id takes a document's own id.")
    return key


class Search:
    """Finds documents of a run, and the samples that have a part of them."""

    def __init__(self, steps: Steps) -> None:
        run, self.steps, self.table = steps.ledger.run, steps, steps.ledger.table
        self.folder, self.texts = steps.ledger.work.input("encode")[0], run.stage_folder("shard")
        manifest = run.finished("shard")
        self.text_records = {record["path"]: record for split in SPLITS for record in shard_records(manifest, split)}

    def keys_of_id(self, name: str) -> list[str]:
        """The keys of the documents with this id, each once: all text shards are read."""
        keys, records = list[str](), self.text_records.values()
        with ProgressBar("trace", f"search for {name}", len(records), "text shards", sys.stderr) as progress:
            for record in records:
                keys += [document.key.partition("-")[0] for document in read_shard(self.texts, record)
                         if name in (document.id, document.place)]
                progress.advance()
        if not keys:
            raise UserError(f"No document with the id {name} is in the text shards of {self.texts}. rejected.jsonl "
                            f"there lists what could not be read; dropped/ and duplicates/ list what was dropped, with "
                            f"shard.keep_dropped.")
        return list(dict.fromkeys(keys))

    def with_key(self, prefix: str) -> list[Found]:
        """The documents whose key begins with these digits, in the order of the table.

        Raises:
            UserError: several different keys begin with them.
        """
        low, high = (np.bytes_(bytes.fromhex(prefix.ljust(2 * KEY_BYTES, end))) for end in "0f")
        found, different = list[Found](), dict[str, None]()
        for row in range(len(self.table)):
            shard = self._shard(row)
            keys = shard.keys(0, shard.documents).view(f"S{KEY_BYTES}").reshape(-1)
            for number in np.flatnonzero((keys >= low) & (keys <= high)).tolist():
                found.append((row, number))
                different[shard.document_key(number)] = None
        if len(different) > 1:
            raise UserError(f"{len(different):,} documents have keys that begin with {prefix}: "
                            f"{first([*different], 4)}. Give more digits.")
        return found

    def records(self, found: list[Found], *, text: bool) -> list[Record]:
        """What there is to print of documents, with all their readings."""
        end, data = self.steps.end, self.steps.ledger.data
        records = {(self.table.paths[row], number): self._record(row, number, text=text) for row, number in found}
        with ProgressBar("trace", "order", end, "samples", sys.stderr) as progress:
            for piece in pieces_of(data, found, end, progress.advance):
                phase, epoch = divmod(int(data.order.locate(np.array([piece.sample])).epoch[0]), PHASE_EPOCHS)
                records[piece.shard.record["path"], piece.document]["readings"].append({
                    **vars(self.steps.passage(piece.sample)), "sample": piece.sample, "epoch": epoch,
                    **({"own_phase": phase} if phase else {}), "tokens": [piece.start, piece.stop]})
        return list(records.values())

    def _record(self, row: int, number: int, *, text: bool) -> Record:
        shard = self._shard(row)
        begin, end = shard.document_span(number)
        record: Record = {
            "key": shard.document_key(number), "source": shard.source, "split": shard.record["split"],
            "shard": shard.record["path"], "document": number, "tokens": end - begin,
            "bytes": shard.document_bytes(number), "readings": []}
        text_record = self.text_records.get(Path(shard.record["path"]).with_suffix(".tar").as_posix())
        if text_record and (self.texts / text_record["path"]).is_file():
            [document] = read_shard(self.texts, text_record, only=[number])
            record |= {"id": document.id, **({"place": document.place} if document.place else {}),
                       **({"text": document.text} if text else {})}
        return record

    def _shard(self, row: int) -> TokenShard:
        record = self.table.record(row)
        return TokenShard(self.folder / record["path"], record)


def _lines(record: Record, steps: Steps) -> Iterator[str]:
    """The lines of one document; with one rank, no rank is printed."""
    yield (f"document {record['key']}  source {record['source']}  {record['shard']} document {record['document']}  "
           f"{record['tokens']:,} tokens, {record['bytes']:,} bytes"
           + "".join(f"  {name} {record[name]}" for name in ("id", "place") if name in record))
    yield f"    {_summary(record, steps)}"
    for one in record["readings"]:
        rank = f"  rank {one['rank']}" if steps.ranks > 1 and one["rank"] is not None else ""
        what = {"trained": "", "skipped": f"  update skipped ({one['why']})", "to come": "  to come",
                "left out": f"  left out by the rollback of this step ({one['why']})"}[one["what"]]
        yield (f"    step {one['step']}{rank}  sample {one['sample']}  epoch {_epoch(one)}  "
               f"tokens {one['tokens'][0]}..{one['tokens'][1]}{what}")
    if "text" in record:
        yield "    | " + record["text"].replace("\n", "\n    | ")


def _summary(record: Record, steps: Steps) -> str:
    if record["split"] == "validation":
        return "validation text: no step trains on it"
    if not record["readings"]:
        return f"read in none of the {max(steps.done, steps.planned)} steps that are done or planned"
    of = {what: sorted({one["step"] for one in record["readings"] if one["what"] == what})
          for what in ("trained", "skipped", "left out", "to come")}
    epochs = ", ".join(dict.fromkeys(_epoch(one) for one in record["readings"] if one["what"] == "trained"))
    parts = [f"trained on in {len(of['trained'])} of {steps.done} steps" + (f" (epochs {epochs})" if epochs else "")]
    parts += [f"{text} {len(of[what])}" for what, text in (("skipped", "skipped in"), ("left out", "left out of"))
              if of[what]]
    return "; ".join([*parts, *(f"next in step {step}" for step in of["to come"][:1])])


def _epoch(one: Record) -> str:
    """The epoch of a reading. A phase whose sequences do not divide a chunk counts its own epochs."""
    return str(one["epoch"]) + (f" of phase {one['own_phase']}" if "own_phase" in one else "")
