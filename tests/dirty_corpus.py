"""A folder of mixed, dirty files, as crawls and colleagues leave them: every format, planted copies, leaks and damage.

The text is the English of this Python's own documentation. What was planted is known, so that tests can say which
documents must be gone, which must be there, and which of two stays.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard


@dataclass
class Planted:
    """Ids of documents by what is wrong with them; `clean` are to survive."""

    clean: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    near: dict[str, str] = field(default_factory=dict)
    """Near-duplicate -> what it is a copy of."""
    leaked: set[str] = field(default_factory=set)
    repeated: set[str] = field(default_factory=set)
    short: set[str] = field(default_factory=set)
    empty: set[str] = field(default_factory=set)
    long: set[str] = field(default_factory=set)
    questions: list[dict[str, str]] = field(default_factory=list)


def paragraphs() -> list[str]:
    """English prose: the longer paragraphs of Python's own help, in their order, without repetitions."""
    from pydoc_data.topics import topics
    found = [re.sub(r"\s+", " ", piece).strip() for text in topics.values() for piece in re.split(r"\n\s*\n", text)]
    prose = [piece for piece in found if len(piece.split()) > 25 and sum(map(str.isalpha, piece)) > 0.7 * len(piece)]
    return list(dict.fromkeys(prose))


def changed(text: str, chance: random.Random, words: int = 2) -> str:
    """The text with a few words replaced: a near-duplicate, where the text is long."""
    parts = text.split(" ")
    for at in chance.sample(range(len(parts)), words):
        parts[at] = "otherwise"
    return " ".join(parts)


def write_dirty(folder: Path, seed: int = 0, size: int = 1) -> Planted:
    """Fill `folder/texts` and `folder/evaluation` with files; `size` times as many documents of the clean kind."""
    chance, planted = random.Random(seed), Planted()
    prose = paragraphs()
    asked = [prose.pop(at) for at in range(400, 0, -80)]  # what is asked for stands in leaked documents only
    texts, evaluation = folder / "texts", folder / "evaluation"
    texts.mkdir(parents=True)
    evaluation.mkdir()

    def document(kind: str, number: int) -> dict[str, Any]:
        # Four paragraphs in an order of their own, so that no two documents are near each other by chance.
        pieces = chance.sample(prose, 4)
        text = "\n\n".join(textwrap.fill(changed(piece, chance, 3), 90) for piece in pieces)
        return {"id": f"{kind}-{number}", "text": text, "url": f"https://example.org/{kind}/{number}"}

    def clean(kind: str, count: int) -> list[dict[str, Any]]:
        found = [document(kind, number) for number in range(count * size)]
        planted.clean |= {each["id"] for each in found}
        return found

    web, second, books, tables = clean("web", 60), clean("second", 40), clean("book", 20), clean("table", 30)

    copies = [{**each, "id": f"copy-{number}"} for number, each in enumerate(chance.sample(web, 8))]
    planted.copies |= {each["id"] for each in copies}
    near = []
    for number, each in enumerate(chance.sample(web, 6)):
        near.append({**each, "id": f"near-{number}", "text": changed(each["text"], chance)})
        planted.near[f"near-{number}"] = each["id"]

    planted.questions = [{"question": f"In the manual, complete: {' '.join(piece.split()[:18])}",
                          "answer": " ".join(piece.split()[18:24])} for piece in asked]
    leaked = []
    for number, each in enumerate(planted.questions[:3]):
        host = document("leaked", number)
        leaked.append({**host, "text": f"{host['text']}\n\n{each['question']} {each['answer']}"})
    planted.leaked |= {each["id"] for each in leaked}

    menu = "Home | Products | About us | Sign in\n"
    repeated = [{"id": f"menu-{number}", "text": menu * 30 + f"Page {number}", "url": "x"} for number in range(4)]
    short = [{"id": f"short-{number}", "text": f"Click here {number}.", "url": "x"} for number in range(5)]
    empty = [{"id": f"empty-{number}", "text": " \n" * number, "url": "x"} for number in range(3)]
    long = [{"id": "long-0", "text": "base64" * 60_000, "url": "x"}]
    for name, found in (("repeated", repeated), ("short", short), ("empty", empty), ("long", long)):
        getattr(planted, name).update(each["id"] for each in found)

    dirt = [*copies, *near, *leaked, *repeated, *short, *empty, *long]
    chance.shuffle(dirt)
    lines = [*web, *dirt[::2]]
    _lines(texts / "web/part-0.jsonl", lines[:40])
    (texts / "web/part-1.jsonl.gz").write_bytes(gzip.compress(_encoded(lines[40:]), mtime=0))
    _frames(texts / "web/part-2.jsonl.zst", [*second, *dirt[1::2]])
    _damaged_lines(texts / "web/part-3.jsonl")
    (texts / "books.txt").write_text("\n=====\n".join(each["text"] for each in books))
    planted.clean -= {each["id"] for each in books}  # of plain text the ids are places
    table = pa.table({name: [each[name] for each in tables] for name in ("id", "text", "url")})
    pq.write_table(table, texts / "tables.parquet", row_group_size=7)
    (texts / "web/part-4.jsonl").write_text("<!DOCTYPE html><html>404 Not Found</html>")
    _lines(evaluation / "questions.jsonl", planted.questions)
    return planted


def every_pass(folder: Path) -> dict[str, Any]:
    """Settings of the shard stage for the files in `folder`: many small units, and work for every one of its passes."""
    texts = folder / "texts"
    return {
        "sources": [{"kind": "files", "name": "web", "paths": [f"{texts}/web/*"], "id_field": "id"},
                    {"kind": "files", "name": "books", "paths": [f"{texts}/books.txt"], "separator": "\n=====\n"},
                    {"kind": "files", "name": "tables", "paths": [f"{texts}/*.parquet"], "id_field": "id"}],
        "filters": [{"kind": "length", "least_words": 20}, {"kind": "gopher_repetition"},
                    {"kind": "decontamination", "files": [{"path": f"{folder}/evaluation/questions.jsonl",
                                                           "task": "questions", "fields": ["question", "answer"]}]}],
        "shard_mb": 0.02, "heldout_share": 0.1, "max_document_mb": 0.2, "max_rejected_share": 0.2,
        "keep_dropped": True, "near_duplicates": {"verify": 0.7}}


def _encoded(documents: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each, ensure_ascii=False).encode() + b"\n" for each in documents)


def _lines(path: Path, documents: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(_encoded(documents))


def _frames(path: Path, documents: list[dict[str, Any]]) -> None:
    """zstd as pzstd writes it: frames that end in the middle of lines."""
    data, out = _encoded(documents), io.BytesIO()
    for at in range(0, len(data), 20_000):
        out.write(zstandard.ZstdCompressor().compress(data[at:at + 20_000]))
    path.write_bytes(out.getvalue())


def _damaged_lines(path: Path) -> None:
    """Lines that are not JSON, lack the field, hold broken UTF-8, a null, half of a surrogate pair."""
    path.write_bytes(b'{"id": "torn-0", "text": "it breaks o\n{"id": "torn-1"}\n{"id": "torn-2", "text": null}\n'
                     b'{"id": "torn-3", "text": "caf\xe9"}\n{"id": "torn-4", "text": "half \\ud83d"}\n[]\n\n')
