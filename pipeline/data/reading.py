"""One unit of reading: its files into documents, those through the filters, and what is left into `staging/`.

Texts stay on disk. What is read is hashed on the way, so that the stage knows of every file what it held.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from drover.pipeline.config.data import FilesSource, HubSource, Source, StdlibSource
from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import atomic_file, output_record
from drover.pipeline.data.counts import DataCard
from drover.pipeline.data.documents import (
    Document,
    Limit,
    Page,
    Place,
    PlainText,
    Records,
    Rejection,
    damage,
    is_shortage,
    place_in,
    plain,
    raise_unless_damage,
    to_json,
    value_in,
)
from drover.pipeline.data.extraction import Extraction, Item, Waiting
from drover.pipeline.data.filters.base import DROPPED, Chain, Dropped
from drover.pipeline.data.hub import hub_rows
from drover.pipeline.data.planning.near_duplicates import Signer
from drover.pipeline.data.planning.runs import INDEX, index_row, score_of, staged, write_array
from drover.pipeline.data.readers import file_records, lists_of_records, python_records
from drover.pipeline.data.streams import PAGE, UTF8, Input, Piece
from drover.pipeline.storage.store import Changed, Missing

MOST_FIELDS = 20
"""So many of a record's fields are named where one is missing."""


def stage_unit(folder: Path, payload: dict[str, Any]) -> dict[str, Any]:
    """Read one unit: its documents as the filters leave them, as JSON, one after another, their index, and what could
    not be read; on request the documents that filters dropped.

    Returns the counts `read`, `documents` (staged), `empty`, `rejected`, `lost` (files that break off) and `html`, of
    documents that begin as a page (PAGE) after the filters, dropped ones as their filter saw them; those of `filters`
    (see `Chain`), its `card` (see `DataCard`), `inputs` (of each file or part: path, name, bytes, mtime_ns and sha256,
    see `Input.record`, and what became of it, see `FileRead`), the files as `outputs`, the staged documents first, and
    `fields`: in how many of the documents that could be read each meta field is that the source names.

    Raises:
        UserError: a file is not what it was when the stage began, or cannot be read; a filter failed.
    """
    name = payload["name"]
    source = payload["source"]
    texts, index, rejections, bands, scores = (staged(folder, name, ending)
                                               for ending in (".documents", ".npy", ".rejected", ".bands", ".scores"))
    aside = folder / DROPPED / f"{name}.jsonl"
    rows = bytearray()
    offset = 0
    counts = {"read": 0, "empty": 0, "rejected": 0, "lost": 0, "html": 0}
    chain = Chain(payload.get("filters", ()), folder, payload.get("made"))
    card = DataCard(payload.get("examples", 0))
    signer = Signer(payload["near_duplicates"]) if payload.get("near_duplicates") else None
    inputs = list[dict[str, Any]]()
    fields = Counter[str]()
    keep = source.get("keep")
    scored: list[float] = []
    with (atomic_file(texts) as out, atomic_file(rejections) as rejected,
          atomic_file(aside) if payload.get("keep_dropped") else nullcontext() as kept_aside):
        for item in unit_documents(payload, inputs.append, fields):
            if isinstance(item, Rejection):
                counts["read"] += item.documents
                counts["rejected"] += item.documents
                counts["lost"] += item.lost
                rejected.write(item.line())
                continue
            read = item[0]
            counts["read"] += 1
            if not read.text or read.text.isspace():
                counts["empty"] += 1
                rejected.write(Rejection(read.source, read.place or read.id, None, "it has no text", documents=0,
                                         url=str(read.meta.get("url") or "")).line())
                continue
            left = chain(*item)
            counts["html"] += bool(PAGE.match((left.document if isinstance(left, Dropped) else left[0]).text))
            if isinstance(left, Dropped):
                card.drop(left)
                if kept_aside is not None:
                    kept_aside.write(left.line())
                continue
            document, member = left
            card.add(document, changed=document.text != read.text)
            if signer is not None:
                signer.add(document.text)
            if keep is not None:
                scored.append(score_of(document.meta.get(keep["by"])))
            rows += index_row(document.text, offset, member)
            offset += out.write(member)
    made = [texts, write_array(index, np.frombuffer(rows, INDEX)), rejections]
    if signer is not None:
        made.append(signer.write(bands))
    if keep is not None:
        made.append(write_array(scores, np.array(scored)))
    outputs = [output_record(folder, path) for path in made]
    if kept_aside is not None:
        gone = chain.counts.values()
        outputs.append(output_record(folder, aside, split=DROPPED, source=source["name"],
                                     docs=sum(own["documents"] for own in gone),
                                     text_bytes=sum(own["bytes"] for own in gone)))
    return {"documents": len(rows) // INDEX.itemsize, **counts, "filters": chain.counts, "inputs": inputs,
            "fields": {name: fields[name] for name in source.get("meta_fields") or ()},
            "card": card.record(), "findings": chain.findings(), "outputs": outputs}


def unit_documents(payload: dict[str, Any], seen: Callable[[dict[str, Any]], object] = lambda record: None,
                   fields: Counter[str] | None = None) -> Iterator[Item]:
    """The documents of one unit in order: by file name, then place in the file.

    seen: called with the record of each file or part, when it has been read (see `Input.record`).
    fields: where it is counted in how many documents each of the source's meta fields is, null or not.

    Raises:
        UserError: a file is not what it was when the stage began, or cannot be read; the dataset of a `kind: hf` source
            cannot be loaded or read on.
    """
    source: Source = TypeAdapter(Source).validate_python(payload["source"])
    limit = Limit(payload["max_document_mb"])
    fields = Counter() if fields is None else fields
    with Extraction(getattr(source, "extractor", ""), limit, fields) as extraction:
        yield from _documents(source, payload, seen, limit, fields, extraction)


def _documents(source: Source, payload: dict[str, Any], seen: Callable[[dict[str, Any]], object], limit: Limit,
               fields: Counter[str], extraction: Extraction) -> Iterator[Item]:
    if isinstance(source, HubSource):
        yield from extraction.documents(_document(source, source.split, number, row, limit, fields)
                                        for number, row in hub_rows(source))
        return
    for piece in (Piece(**piece) for piece in payload["pieces"]):
        try:
            file = Input(piece, getattr(source, "encoding", UTF8))
            records = python_records(file, limit) if isinstance(source, StdlibSource) else \
                file_records(file, source, limit)
            for item in extraction.documents(file_items(source, file, records, limit, fields)):
                file.about.count(item)
                yield item
            file.about.lost_bytes = file.on_disk(file.about.lost_bytes)
            seen({**file.record(), **file.about.record()})
        except (Missing, Changed) as error:
            raise UserError(f"source {source.name}: {error} It has changed since the stage shard began. Let nobody "
                            f"write there, and run the same command again: it reads what is there then.") from None
        except MemoryError as error:  # not the data: recorded as damage it would stay lost when there is more
            why = f" ({error})" if str(error) else ""
            raise UserError(f"source {source.name}: {piece.file} needs more memory than this process can have{why}. "
                            f"Give the stage more, or fewer processes at once (launch.processes), and run it again."
                            ) from None
        except OSError as error:
            if is_shortage(error):
                raise
            raise UserError(f"source {source.name}: {piece.file} cannot be read: "
                            f"{os.strerror(error.errno or errno.EIO)}. Put it back or make it readable, and run the "
                            f"stage again.") from None


def file_items(source: StdlibSource | FilesSource, file: Input, records: Records, limit: Limit,
                fields: Counter[str]) -> Iterator[Item | Waiting]:
    """The documents of a file or a part of it."""
    name = file.piece.file
    place: Place = None
    value: Any = None
    read = list[Any]()  # the first two
    try:
        for record in records:
            read += [record][:2 - len(read)]
            if isinstance(record, Rejection):
                yield record
            else:
                place, value = record
                yield _document(source, name, place, value, limit, fields, file)
        if len(read) == 1 and isinstance(source, FilesSource) and isinstance(value, dict):
            lists = [field for field, _ in lists_of_records(value, source.text_field, "")]
            file.about.more_records = lists[-1] if lists else ""
    except damage() as error:
        raise_unless_damage(error)
        after = place + 1 if isinstance(place, int) else place
        item = file.reject(after, f"the file cannot be read from here on: {error}", lost=True,
                           lost_bytes=file.give_up(0 if place is None else None))
        yield item


def _document(source: Source, name: str, place: Place, record: Any, limit: Limit, fields: Counter[str],
              file: Input | None = None) -> Item | Waiting:
    """A record as a document, of which `fields` counts the meta fields, or why it is none. file: of which it is the
    last one that was read, by this name."""
    where = place_in(name, place)
    none = Rejection(source.name, name, place, "", lost_bytes=0 if file is None else file.current())
    if isinstance(record, Page):
        own = record.meta.get(getattr(source, "id_field", None) or "")
        meta = {**dict.fromkeys(getattr(source, "meta_fields", ())), **record.meta}
        document = Document("", source.name, str(own or where), meta, place=where if own else "")
        return Waiting(document, record, replace(none, url=record.meta.get("url", "")))
    try:
        if isinstance(source, StdlibSource) or isinstance(record, PlainText):
            document = Document(str(record), source.name, where, {})
        else:
            document = _from_fields(source, where, record)
        if limit.allows(document.text):
            member = to_json(document)
            if getattr(source, "html", "") == "fields" and not isinstance(record, PlainText):
                return Waiting(document, Page(document.text.encode(), "html", UTF8), none)
            if document.meta:
                fields.update(name for name in document.meta
                              if name in record or value_in(record, name, also_meta=True) is not None)
            return document, member
        reason = limit.reason
    except UnicodeEncodeError:
        encoding = UTF8 if file is None else file.encoding
        reason = (f"bytes that {encoding} has not, or half of a surrogate pair, as the escape \\ud83d; "
                  f"correct the source's `encoding`, or the file (iconv -f latin1 -t utf-8, where it is Latin-1)")
    except TypeError as error:
        reason = str(error)
    except RecursionError:
        reason = "a field that is kept as meta is nested too deeply"
    return replace(none, reason=reason)


def _from_fields(source: FilesSource | HubSource, where: str, record: Any) -> Document:
    """The document in a record's fields; TypeError, fit for a reader's eyes, if it lacks one or is of another kind."""
    if not isinstance(record, dict):
        raise TypeError(f"the record is {_kind(record)}, not an object with fields")
    if missing := [name for name in (source.text_field, source.id_field) if name and name not in record and value_in(
            record, name, also_meta=name == source.id_field) is None]:
        present = first(list(map(str, record)), MOST_FIELDS)
        raise TypeError(f"no field named {', '.join(missing)}; the fields are {present or 'none'}")
    text = value_in(record, source.text_field)
    own = value_in(record, source.id_field, also_meta=True) if source.id_field else where
    if isinstance(text, bytes):  # a column of binary values
        text = text.decode("utf-8", "surrogateescape")
    if not isinstance(text, str):
        raise TypeError(f"the field '{source.text_field}' is {_kind(text)}, not text")
    if not isinstance(own, (str, int)):
        raise TypeError(f"the field '{source.id_field}' is {_kind(own)}, not text or a whole number")
    meta = {field: plain(value_in(record, field, also_meta=True)) for field in source.meta_fields}
    return Document(text, source.name, str(own), meta, place=where if source.id_field else "")


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
