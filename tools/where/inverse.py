"""From a document to the steps that trained on it, and to its source file and record; and how that is printed."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from drover.pipeline.core.console import echo
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record
from drover.pipeline.data.planning.passes import DUPLICATES
from drover.pipeline.data.provenance import readings
from drover.pipeline.data.text_shards import SPLITS, SUFFIX
from drover.pipeline.data.token_shards import TokenShard
from drover.tools.processes import processes_asked
from drover.tools.where.origin import Corpus
from drover.tools.where.search import DROPPED, Hit, Wanted, key_hits, rejections, text_hits
from drover.tools.where.steps import Steps

TOKEN_SHARD, TEXT_SHARD = ".arrow", ".tar"
SHORTEST_KEY = 4


def trace(steps: Steps, options: argparse.Namespace) -> None:
    """Print where documents were used: lines, or with `--json` one object.

    Raises:
        UserError: no document was found, or the options make no sense.
    """
    wanted, tracer = _wanted(options), Tracer(steps)
    steps.warn_of_drift()
    told, cut = tracer.documents(wanted, options.source, processes_asked(options.processes), options.limit)
    if not told:
        raise UserError(_nothing(options, tracer.corpus))
    if not options.text:
        told = [{name: value for name, value in record.items() if name != "text"} for record in told]
    if options.json:
        print(json.dumps({"steps_done": steps.done, "steps_planned": steps.planned, "documents": told, "more": cut},
                         ensure_ascii=False))
        return
    for record in told:
        echo("\n".join(lines_of(record, steps.done, steps.planned, options.ranks)))
    if cut:
        echo(f"the search ended at --limit {options.limit}: there are more such documents")


class Tracer:
    """Finds documents of a run, and the steps that used them."""

    def __init__(self, steps: Steps) -> None:
        steps.check_ranks()
        self.steps, self.data, self.table = steps, steps.ledger.data, steps.ledger.table
        self.tokens, _ = steps.ledger.work.input("encode")
        self.corpus = Corpus(steps.ledger.run)
        self._rows = {path: row for row, path in enumerate(self.table.paths)}

    def documents(self, wanted: Wanted, source: str | None, processes: int, limit: int) -> tuple[list[Record], bool]:
        """The record of each document that was found, and whether there are more than `limit`."""
        if wanted.key:
            return self._of_key(wanted, source, processes, limit)
        told: list[Record] = []
        if wanted.ids:
            gone = list(self.corpus.duplicates(wanted.ids))
            told = [{"split": "rejected", **{name: line[name] for name in ("source", "file", "record", "reason")}}
                    for line in rejections(self.corpus.folder, wanted.ids)]
            told += [{"split": row["kind"], **{name: row[name] for name in ("source", "id", "kept_source", "kept_id")}}
                     for row in gone]
            kept = frozenset((row["kept_source"], row["kept_id"]) for row in gone)
            wanted, source = Wanted(ids=wanted.ids | kept), None if kept else source
        hits, cut = text_hits(self.corpus.folder, self.corpus.manifest, wanted, source, processes, limit)
        told += [self._dropped(hit) if hit.dropped else self._kept(hit.shard, hit.number, hit.excerpt) for hit in hits]
        return self._with_duplicates(told), cut

    def _of_key(self, wanted: Wanted, source: str | None, processes: int, limit: int) -> tuple[list[Record], bool]:
        if places := key_hits(self.tokens, self.table, wanted.key, source, processes):
            return self._with_duplicates([
                self._kept(Path(self.table.paths[row]).with_suffix(TEXT_SHARD).as_posix(), number)
                for row, number in places[:limit]]), len(places) > limit
        hits, cut = text_hits(self.corpus.folder, self.corpus.manifest, wanted, source, processes, limit, (DROPPED,))
        return [self._dropped(hit) for hit in hits], cut

    def _kept(self, shard: str, number: int, excerpt: str = "") -> Record:
        """A document in a text shard, of either split."""
        row = self._rows.get(Path(shard).with_suffix(TOKEN_SHARD).as_posix())
        if row is None:
            raise UserError(f"The stage encode has no token shard of {self.corpus.folder / shard}: it was made from "
                            f"other text shards. Run it again.")
        about = self.table.record(row)
        tokens = TokenShard(self.tokens / about["path"], about)
        begin, end = tokens.document_span(number)
        record: Record = {
            "key": tokens.document_key(number), "source": about["source"], "split": about["split"], "shard": shard,
            "document": number, "tokens": end - begin, "bytes": tokens.document_bytes(number)}
        if (document := self.corpus.text_of(shard, number)) is not None:
            if document.key.partition("-")[0] != record["key"]:
                raise UserError(f"{tokens.path} and {self.corpus.folder / shard} do not hold the same documents (at "
                                f"{number}). Run --stage encode again.")
            record |= {"id": document.id, "meta": document.meta, **({"found": excerpt} if excerpt else {}),
                       **self.corpus.placed(about["source"], document.place or document.id), "text": document.text}
        else:
            record["origin"] = f"{self.corpus.folder / shard} is gone, and with it the document's id"
        return {**record, "readings": list(self._readings(row, number))}

    def _readings(self, row: int, document: int) -> Iterator[Record]:
        """The readings of a document, in the order of samples."""
        for pool, shards in enumerate(self.data.shards):
            for index in np.flatnonzero(shards.rows == row).tolist():
                for one in readings(self.data, pool, index, document, self.steps.end):
                    passage = self.steps.passage(one.sample)
                    yield {**vars(passage), "sample": one.sample, "epoch": one.epoch,
                           **({"own_phase": one.own_phase} if one.own_phase else {}), "tokens": [one.start, one.stop]}

    def _dropped(self, hit: Hit) -> Record:
        assert hit.dropped is not None
        origin = self.corpus.placed(hit.source, hit.place or hit.id)
        return {"split": DROPPED, "source": hit.source, "id": hit.id, "filter": hit.dropped[0],
                "reason": hit.dropped[1], **({"found": hit.excerpt} if hit.excerpt else {}), **origin}

    def _with_duplicates(self, told: list[Record]) -> list[Record]:
        """The same, with the duplicates of each kept document, and the key of the kept one for each duplicate."""
        kept = {(record["source"], record["id"]): record for record in told
                if record["split"] in SPLITS and "id" in record}
        for row in self.corpus.duplicates(frozenset(kept), "kept_") if kept else ():
            kept[row["kept_source"], row["kept_id"]].setdefault("duplicates", []).append(
                {"source": row["source"], "id": row["id"], "kind": row["kind"]})
        for record in told:
            if "kept_id" in record and (stays := kept.get((record["kept_source"], record["kept_id"]))):
                record["kept_key"] = stays["key"]
        return told


def _wanted(options: argparse.Namespace) -> Wanted:
    if options.limit < 1:
        raise UserError(f"--limit counts from 1; asked: {options.limit}.")
    if options.document is not None:
        key = options.document.lower().removesuffix(SUFFIX).partition("-")[0]
        if not re.fullmatch(rf"[0-9a-f]{{{SHORTEST_KEY},32}}", key):
            raise UserError(f"--document takes a key of 32 hexadecimal digits or its first {SHORTEST_KEY} at least; "
                            f"asked: {options.document}. --find searches for text, --id for a document's own id.")
        return Wanted(key=key)
    if options.id is not None:
        return Wanted(ids=frozenset({(options.source or "", options.id)}))
    if not options.find:
        raise UserError("--find needs a text to search for; asked: nothing.")
    return Wanted(text=options.find, ignore_case=options.ignore_case)


def _nothing(options: argparse.Namespace, corpus: Corpus) -> str:
    what = f"whose key begins with {options.document}" if options.document is not None else \
        f"with the id {options.id}" if options.id is not None else f"that holds {options.find!r}"
    where = f" in the source {options.source}" if options.source else ""
    splits = {record.get("split") for record in corpus.manifest.outputs}
    aside = "" if DROPPED in splits else " (documents that filters dropped were not kept: shard.keep_dropped)"
    copies = "" if DUPLICATES in splits else "; dropped duplicates were not recorded (shard.keep_dropped)"
    unknown = f" There is no such source; there are {', '.join(corpus.sources)}." \
        if options.source not in (None, "", *corpus.sources) else ""
    return f"No document {what}{where} is in the shards of {corpus.folder}{aside}{copies}.{unknown}"


def lines_of(record: Record, done: int, planned: int, ranks: int) -> Iterator[str]:
    """The lines of one document.

    Args:
        done, planned: steps of the run.
        ranks: number of data-parallel ranks; with one, no rank is printed.
    """
    found = [f"    ... {' '.join(record['found'].split())} ..."] if "found" in record else []
    origin = [f"    from {record['origin']}"] if "origin" in record else []
    if record["split"] not in SPLITS:
        yield from (_gone(record), *found, *origin)
        return
    own = f"  id {record['id']}" if "id" in record else ""
    yield (f"document {record['key']}  source {record['source']}  {record['shard']} document {record['document']}  "
           f"{record['tokens']:,} tokens, {record['bytes']:,} bytes{own}")
    yield from (*origin, *found)
    for copy in record.get("duplicates", ()):
        yield f"    {copy['source']} {copy['id']} was dropped as a {copy['kind'].replace('_', '-')} of it"
    yield f"    {_summary(record, done, planned)}"
    for one in record["readings"]:
        rank = f"  rank {one['rank']}" if ranks > 1 and one["rank"] is not None else ""
        what = {"trained": "", "skipped": f"  update skipped ({one['why']})", "to come": "  to come",
                "left out": f"  left out by the rollback of this step ({one['why']})"}[one["what"]]
        yield (f"    step {one['step']}{rank}  sample {one['sample']}  epoch {_epoch(one)}  "
               f"tokens {one['tokens'][0]}..{one['tokens'][1]}{what}")
    if "text" in record:
        yield "    | " + record["text"].replace("\n", "\n    | ")


def _gone(record: Record) -> str:
    what = f"{record['source']} {record.get('id')} was dropped"
    if record["split"] == "rejected":
        place = "" if record["record"] is None else f", record {record['record']}"
        return f"{record['source']}/{record['file']}{place} could not be read, and no step sees it: {record['reason']}"
    if "kept_id" in record:
        key = f" (key {record['kept_key']}, see there)" if "kept_key" in record else ""
        return (f"{what} as a {record['split'].replace('_', '-')} of {record['kept_source']} {record['kept_id']}{key}; "
                f"no step sees it")
    return f"{what} by the filter {record['filter']} ({record['reason']}); no step sees it"


def _summary(record: Record, done: int, planned: int) -> str:
    if record["split"] == "validation":
        return "validation text: no step trains on it"
    if not record["readings"]:
        return f"read in none of the {max(done, planned)} steps that are done or planned"
    of = {what: sorted({one["step"] for one in record["readings"] if one["what"] == what})
          for what in ("trained", "skipped", "left out", "to come")}
    epochs = ", ".join(dict.fromkeys(_epoch(one) for one in record["readings"] if one["what"] == "trained"))
    told = {f"trained on in {len(of['trained'])} of {done} steps{f' (epochs {epochs})' if epochs else ''}": True,
            f"skipped in {len(of['skipped'])}": of["skipped"], f"left out of {len(of['left out'])}": of["left out"],
            f"next in step {(of['to come'] or [0])[0]}": of["to come"]}
    return "; ".join(text for text, holds in told.items() if holds)


def _epoch(one: Record) -> str:
    """The epoch of a reading. A phase whose sequences do not divide a chunk counts its own epochs."""
    return str(one["epoch"]) + (f" of phase {one['own_phase']}" if "own_phase" in one else "")
