"""Where documents with ids of their own were read: their shards say it."""

import json

from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import Run
from drover.pipeline.data import sources
from drover.pipeline.data.text_shards import SPLITS
from drover.tools.where.origin import Corpus
from tests.data.source_files import write_jsonl
from tests.stages.test_shard import documents, files_source, run, write_config


def test_file_and_record_of_every_document(tmp_path, monkeypatch, capsys):
    """Files of lines, of which one is large enough to be read in parts. Of two documents it is a part, since the
    border between the splits, which tests/data/planning/test_passes.py has of any corpus, cuts one."""
    monkeypatch.setattr(sources, "LEAST_PART", 100_000)
    for name, count in (("large.jsonl", 400), ("odd:7.jsonl", 20)):
        write_jsonl(tmp_path / "in" / name, [{"id": f"{name}-{number}", "text": f"{name} {number} " + "word " * number}
                                             for number in range(count)])
    config = write_config(tmp_path, [files_source("web", tmp_path / "in/*.jsonl", id_field="id")], shard_mb=0.1,
                          validation_share=0.2, validation_rule="tail")
    assert run(config) == 0 and "420 documents in + 1 by cutting in two = " in capsys.readouterr().out
    found = Corpus(Run(load_config(config)))
    seen, cut = set(), 0
    for document in (document for split in SPLITS for document in documents(config, split)):
        origin = found.placed(document.source, document.place or document.id)
        path, place = tmp_path / "in" / origin["file"], origin["record"]
        assert origin["path"] == str(path)
        content = path.read_bytes()
        seen.add((origin["file"], type(place)))
        record = json.loads(content.splitlines()[place - 1] if isinstance(place, int) else
                            content[int(place):].partition(b"\n")[0])
        first, _, end = (characters := origin["origin"].partition(", characters ")[2]).partition("..")
        cut += bool(characters)
        assert document.id.startswith(record["id"])
        assert document.text == record["text"][int(first or 0):int(end) if end else None]
    assert seen == {("large.jsonl", str), ("odd:7.jsonl", int)} and cut == 2
