"""Where documents with ids of their own were read: their shards say it."""

import json
import random

from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import Run
from drover.pipeline.data import sources
from drover.pipeline.data.text_shards import SPLITS, read_documents
from drover.tools.where.origin import Corpus
from tests.data.source_files import write_jsonl
from tests.stages.test_shard import files_source, run, write_config


def test_file_and_record_of_every_document(tmp_path, monkeypatch):
    """Files of lines, of which one is large enough to be read in parts. Of two documents it is a part, since the
    border between the splits cuts one."""
    monkeypatch.setattr(sources, "LEAST_PART", 100_000)
    draw = random.Random(3)
    (tmp_path / "in").mkdir()
    for name, count, words in (("large.jsonl", 400, 1500), ("odd:7.jsonl", 20, 50)):
        write_jsonl(tmp_path / "in" / name, [{"id": f"{name}-{number}", "text": f"{name} {number} " + draw.randbytes(
            draw.randrange(words)).hex()} for number in range(count)])
    config = write_config(tmp_path, [files_source("web", tmp_path / "in/*.jsonl", id_field="id")], shard_mb=0.1,
                          validation_share=0.2, validation_rule="tail")
    assert run(config) == 0
    found = Corpus(Run(load_config(config)))
    data = {path.name: path.read_bytes() for path in (tmp_path / "in").iterdir()}
    seen, cut = set(), 0
    for document in (document for shard, record in found.shards.items() if record["split"] in SPLITS
                     for document in read_documents(found.folder / shard)):
        origin = found.placed(document.source, document.place or document.id)
        assert origin["path"] == str(tmp_path / "in" / origin["file"])
        content, place = data[origin["file"]], origin["record"]
        seen.add((origin["file"], type(place)))
        record = json.loads(content.splitlines()[place - 1] if isinstance(place, int) else
                            content[int(place):].partition(b"\n")[0])
        first, _, end = (characters := origin["origin"].partition(", characters ")[2]).partition("..")
        cut += bool(characters)
        assert document.id.startswith(record["id"])
        assert document.text == record["text"][int(first or 0):int(end) if end else None]
    assert seen == {("large.jsonl", str), ("odd:7.jsonl", int)} and cut == 2
