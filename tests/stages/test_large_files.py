"""The shard stage over files that are read in parts: the corpus of the files read whole, by any number of processes."""

import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.contract.content_hash import BLOCK_BYTES
from pipeline.contract.manifest import read_manifest
from pipeline.data import sources
from tests.stages.test_shard import documents, files_source, folder_of, hashes, run, write_config


@pytest.fixture
def config(tmp_path):
    """Four sources, each one file that is large beside a shard."""
    texts = [f"{number} \u2028 " + "word " * (number % 97) + hashlib.sha512(str(number).encode()).hexdigest()
             for number in range(1500)]
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines) + b'{"text": "cut')
    (tmp_path / "b.txt").write_text("\n\n".join("b" + text for text in texts))
    pq.write_table(pa.table({"text": ["c" + text for text in texts]}), tmp_path / "c.parquet", row_group_size=100)
    data = b"".join(lines).replace(b': "', b': "d')
    (tmp_path / "d.jsonl.zst").write_bytes(b"".join(zstandard.compress(data[start:start + 9000])
                                                    for start in range(0, len(data), 9000)))
    return write_config(tmp_path, [
        files_source("lines", tmp_path / "a.jsonl"), files_source("text", tmp_path / "b.txt", separator="\n\n"),
        files_source("rows", tmp_path / "c.parquet"), files_source("frames", tmp_path / "d.jsonl.zst")],
        shard_mb=0.02, heldout_share=0.1, max_rejected_share=0.01)


def test_the_corpus_is_that_of_files_read_whole(config, monkeypatch):
    assert BLOCK_BYTES == sources.LEAST_PART and run(config) == 0  # these files are too small to be cut
    monkeypatch.setattr(sources, "LEAST_PART", 1000)
    for name, processes in (("one", 1), ("two", 2)):
        assert run(config, f"name={name}", f"launch.processes={processes}") == 0
    assert hashes(folder_of(config, "one")) == hashes(folder_of(config, "two"))
    for split in ("train", "heldout"):
        whole, parts = documents(config, split), documents(config, split, "one")
        assert [(own.source, own.text) for own in parts] == [(own.source, own.text) for own in whole]
        assert all("@" in own.id for own in parts if own.source != "rows")
        assert [own.id for own in parts if own.source == "rows"] == [own.id for own in whole if own.source == "rows"]
    counts, expected = (read_manifest(folder_of(config, name)).counts for name in ("one", "a"))
    assert counts == expected and counts["documents_in"] == 6001 and counts["rejected"] == 1
    [line] = (folder_of(config, "one") / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["record"] == str((config.parent / "a.jsonl").stat().st_size - len('{"text": "cut'))
