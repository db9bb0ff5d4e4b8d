"""A folder of mixed, dirty files, as crawls and colleagues leave them: every format, planted copies, leaks and damage.

The text is the English of this Python's own documentation. What was planted is known, so that tests can say which
documents must be gone, which must be there, and which of two stays.
"""

import gzip
import random
import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tests.data.source_files import lines, write_jsonl


@dataclass
class Planted:
    """Ids of documents."""

    clean: set[str] = field(default_factory=set)
    """That survive."""
    gone: set[str] = field(default_factory=set)
    """That filters drop."""
    near: dict[str, str] = field(default_factory=dict)
    """Near-duplicate -> what it is a copy of."""


def paragraphs():
    """English prose: the longer paragraphs of Python's own help, in their order, without repetitions."""
    from pydoc_data.topics import topics
    pieces = [re.sub(r"\s+", " ", piece).strip() for text in topics.values() for piece in re.split(r"\n\s*\n", text)]
    prose = [piece for piece in pieces if len(piece.split()) > 25 and sum(map(str.isalpha, piece)) > 0.7 * len(piece)]
    return list(dict.fromkeys(prose))


def changed(text, chance, words=2):
    """The text with a few words replaced: a near-duplicate, where the text is long."""
    parts = text.split(" ")
    for at in chance.sample(range(len(parts)), words):
        parts[at] = "otherwise"
    return " ".join(parts)


def write_dirty(folder, size=1):
    """Fill `folder/texts` and `folder/evaluation` with files; `size` times as many documents of the clean kind."""
    chance, planted, texts = random.Random(0), Planted(), folder / "texts"
    prose = paragraphs()
    held_out = [prose.pop(at) for at in range(400, 0, -80)]  # what is asked for stands in leaked documents only

    def documents(kind, count):
        # Four paragraphs in an order of their own, so that no two documents are near each other by chance.
        return [{"id": f"{kind}-{number}", "url": f"https://example.org/{kind}/{number}", "text": "\n\n".join(
            textwrap.fill(changed(piece, chance, 3), 90) for piece in chance.sample(prose, 4))}
            for number in range(count)]

    def plain(kind, *pieces):
        return [{"id": f"{kind}-{number}", "text": text, "url": "x"} for number, text in enumerate(pieces)]

    web, second, books, tables = (documents(kind, count * size) for kind, count in (
        ("web", 60), ("second", 40), ("book", 20), ("table", 30)))
    planted.clean |= {each["id"] for each in [*web, *second, *tables]}  # of plain text the ids are places
    copies = [{**each, "id": f"copy-{number}"} for number, each in enumerate(chance.sample(web, 8))]
    first = chance.sample(web, 6)
    near = [{**each, "id": f"near-{number}", "text": changed(each["text"], chance)}
            for number, each in enumerate(first)]
    planted.near = {own["id"]: each["id"] for own, each in zip(near, first, strict=True)}
    questions = [{"question": f"In the manual, complete: {' '.join(piece.split()[:18])}",
                  "answer": " ".join(piece.split()[18:24])} for piece in held_out]
    leaked = documents("leaked", 3)
    for host, each in zip(leaked, questions, strict=False):
        host["text"] += f"\n\n{each['question']} {each['answer']}"
    menu = "Home | Products | About us | Sign in\n"
    gone = [*leaked, *plain("repeated", *(menu * 30 + f"Page {number}" for number in range(4))),
            *plain("short", *(f"Click here {number}." for number in range(5))),
            *plain("empty", *(" \n" * number for number in range(3))), *plain("long", "base64" * 60_000)]
    planted.gone |= {each["id"] for each in gone}
    dirt = [*copies, *near, *gone]
    chance.shuffle(dirt)
    rows = [*web, *dirt[::2]]
    write_jsonl(texts / "web/part-0.jsonl", rows[:40])
    (texts / "web/part-1.jsonl.gz").write_bytes(gzip.compress(lines(rows[40:]), mtime=0))
    data = lines([*second, *dirt[1::2]])
    (texts / "web/part-2.jsonl.zst").write_bytes(b"".join(  # as pzstd writes it: frames end in the middle of lines
        zstandard.compress(data[at:at + 20_000]) for at in range(0, len(data), 20_000)))
    # Lines that are not JSON, lack the field, hold broken UTF-8, a null, half of a surrogate pair.
    (texts / "web/part-3.jsonl").write_bytes(
        b'{"id": "torn-0", "text": "it breaks o\n{"id": "torn-1"}\n{"id": "torn-2", "text": null}\n'
        b'{"id": "torn-3", "text": "caf\xe9"}\n{"id": "torn-4", "text": "half \\ud83d"}\n[]\n\n')
    (texts / "web/part-4.jsonl").write_text("<!DOCTYPE html><html>404 Not Found</html>")
    (texts / "books.txt").write_text("\n=====\n".join(each["text"] for each in books))
    pq.write_table(pa.Table.from_pylist(tables), texts / "tables.parquet", row_group_size=7)
    write_jsonl(folder / "evaluation/questions.jsonl", questions)
    return planted


def every_pass(folder):
    """Settings of the shard stage for the files in `folder`: many small units, and work for every one of its passes."""
    texts = folder / "texts"
    return {
        "sources": [{"kind": "files", "name": "web", "paths": [f"{texts}/web/*"], "id_field": "id",
                     "keep": {"by": "classifier_score", "share": 0.9}},
                    {"kind": "files", "name": "books", "paths": [f"{texts}/books.txt"], "separator": "\n=====\n"},
                    {"kind": "files", "name": "tables", "paths": [f"{texts}/*.parquet"], "id_field": "id"}],
        "filters": [{"kind": "length", "min_words": 20},
                    {"kind": "duplicate_lines", "max_documents": 3, "sources": ["web"]},
                    {"kind": "gopher_repetition"},
                    {"kind": "classifier", "sources": ["web"], "label": "en", "min_score": 0.3,
                     "path": str(Path(__file__).with_name("data") / "filters/models/two_letters.ftz")},
                    {"kind": "decontamination", "files": [{"path": f"{folder}/evaluation/questions.jsonl",
                                                           "task": "questions", "fields": ["question", "answer"]}]}],
        "shard_mb": 0.02, "validation_share": 0.1, "max_document_mb": 0.2, "max_rejected_share": 0.2,
        "keep_dropped": True, "near_duplicates": {"verify": 0.7}}


if __name__ == "__main__":
    write_dirty(Path())
