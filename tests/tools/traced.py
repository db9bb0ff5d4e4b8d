"""A small corpus of known documents, as tokens: for the tools that follow and export documents."""

import random

import yaml

from tests.data.source_files import lines
from tests.stages.here import prepare_here
from tests.stages.test_shard import files_source

PLANNED = 36
WORDS = ["oak", "elm", "ash", "fir", "yew", "box", "bay", "fig", "plum", "pear", "rose", "lime", "teak", "alder",
         "maple", "cedar", "birch", "beech", "larch", "thorn"]


def sentence(draw, words):
    """So many words."""
    return " ".join(draw.choice(WORDS) for _ in range(words))


def make_traced(folder, **settings):
    """Config of a run whose shard, tokenizer and encode stages are done, in `folder`/runs/mini: two sources, one with
    ids of its own; copies, a short document that a filter drops, a line that is no JSON."""
    draw = random.Random(5)
    (folder / "in").mkdir()
    pages = [{"id": f"p{number}", "url": f"https://example.org/{number}",
              "text": f"Page {number} says {sentence(draw, draw.randrange(6, 34))}."}
             for number in range(90)]
    pages[70]["text"] = pages[3]["text"]
    pages[20]["text"] = "too short\u00e9"
    (folder / "in/pages.jsonl").write_bytes(lines(pages[:40]) + b"{broken\n" + lines(pages[40:]))
    notes = [f"Note {number}: {sentence(draw, draw.randrange(6, 44))}" for number in range(60)]
    (folder / "in/notes.txt").write_text("\n---\n".join([*notes, pages[5]["text"]]))
    config = {"name": "mini", "runs_dir": str(folder / "runs"),
              "shard": {"shard_mb": 0.003, "validation_share": 0.15, "keep_dropped": True, "max_rejected_share": 0.1,
                        "filters": [{"kind": "length", "min_words": 5}], "sources": [
                            files_source("web", folder / "in/pages.jsonl", id_field="id", meta_fields=["url"]),
                            files_source("notes", folder / "in/notes.txt", separator="\n---\n")]},
              "tokenizer": {"kind": "byte"}, "model": {"context_length": 128},
              "train": {"steps": PLANNED, "sequence_length": 64, "batch_tokens": 1024, "micro_batch": 4,
                        "warmup_steps": 1}, **settings}
    path = folder / "mini.yaml"
    path.write_text(yaml.safe_dump(config))
    prepare_here(path)
    return path
