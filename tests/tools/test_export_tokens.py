"""Token shards in other programs' layouts: every document read back in order, by a reader of the published layout."""

import shutil
import struct
from pathlib import Path

import datasets
import numpy as np
import pytest

from drover.pipeline.contract.run import run_in
from drover.pipeline.core.files import read_json, sha256_file
from drover.tools import token_export
from drover.tools.export_tokens import main
from drover.tools.token_export import MANIFEST
from tests.refusal import printed
from tests.token_shards import shards_in
from tests.tools.traced import make_traced

TYPES = {4: "<i4", 8: "<u2"}


def indexed(prefix):
    """The type, sequences and bounds of documents of Megatron Core's layout, by its publication."""
    data, tokens = (Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("idx", "bin"))
    mark, version, code, sequences, documents = struct.unpack_from("<9sQBQQ", data)
    assert mark == b"MMIDIDX\x00\x00" and version == 1
    ends = (34, 34 + 4 * sequences, 34 + 12 * sequences)
    lengths, pointers, bounds = (np.frombuffer(data, kind, count, at) for kind, count, at in zip(
        ("<i4", "<i8", "<i8"), (sequences, sequences, documents), ends, strict=True))
    assert len(data) == ends[-1] + 8 * documents
    return TYPES[code], [np.frombuffer(tokens, TYPES[code], length, pointer).tolist()
                         for length, pointer in zip(lengths, pointers, strict=True)], bounds.tolist()


@pytest.fixture
def exported(capsys):
    """Function: export a run, in this process; what was said."""
    return lambda run, out, *arguments, expect=0: printed(
        capsys, main, "--run", run, "--out", out, *arguments, expect=expect)


def documents_of(run, split, source):
    """(key, text bytes, tokens) of every document, from the token shards."""
    run = run_in(run)
    shards = shards_in(run.stage_folder("encode"), run.finished("encode").outputs, split, source)
    return [(shard.document_key(number), shard.document_bytes(number), shard.document_tokens(number))
            for shard in shards for number in range(shard.documents)]


@pytest.fixture(scope="module")
def run(request, tmp_path_factory):
    """Its tokens are of two bytes each, where a test does not want four."""
    dtype = getattr(request, "param", "uint16")
    return make_traced(tmp_path_factory.mktemp("exported"), encode={"dtype": dtype}).parent / "runs/mini"


@pytest.mark.parametrize(("run", "split"), [("uint16", "train"), ("uint32", "validation")], indirect=["run"])
def test_megatron_reads_every_document_in_order(run, split, tmp_path, exported):
    out, without_bos = tmp_path / "out", split == "validation"
    exported(run, out, "--split", split, *["--without-bos"] * without_bos)
    manifest = read_json(out / MANIFEST)
    assert manifest["bos"] == (not without_bos) and manifest["eos"]
    assert manifest["dtype"] == ("uint16" if split == "train" else "int32")
    for source in ("web", "notes"):
        (kind, exported_documents, bounds), wanted = indexed(out / source), documents_of(run, split, source)
        assert np.dtype(kind).name == manifest["dtype"] and len(wanted) > 5 and bounds == list(range(len(wanted) + 1))
        assert exported_documents == [tokens[without_bos:].tolist() for _, _, tokens in wanted]
        assert {(tokens[0], tokens[-1]) for _, _, tokens in wanted} == {(manifest["bos_id"], manifest["eos_id"])}
        assert manifest["sources"][source] == {**manifest["sources"][source], "docs": len(wanted),
                                           "tokens": sum(map(len, exported_documents))}
    assert {path.name for path in out.iterdir()} == {MANIFEST, *(record["path"] for record in manifest["files"])}
    for record in manifest["files"]:
        path = out / record["path"]
        assert (path.stat().st_size, sha256_file(path)) == (record["bytes"], record["sha256"])


@pytest.mark.parametrize("arguments", [[], ["--without-bos"]])
def test_datasets_reads_the_export_for_it(run, tmp_path, exported, arguments, monkeypatch):
    monkeypatch.setattr(token_export, "BLOCK_TOKENS", 900)  # several row groups
    exported(run, tmp_path / "out", "--format", "hf", *arguments)
    rows = datasets.load_dataset("parquet", data_files=str(tmp_path / "out/web.parquet"), split="train",
                                 cache_dir=str(tmp_path / "cache"))
    assert rows["input_ids"][:] == [tokens[len(arguments):].tolist() for _, _, tokens in documents_of(
        run, "train", "web")]


def test_datasets_reads_the_token_shards_themselves(run, tmp_path):
    rows = datasets.load_dataset("arrow", data_files=str(run / "encode/train/web-*.arrow"), split="train",
                                 cache_dir=str(tmp_path))
    assert [(row["key"].hex(), row["bytes"], row["tokens"]) for row in rows] == [
        (key, size, tokens.tolist()) for key, size, tokens in documents_of(run, "train", "web")]


def test_a_file_that_does_not_hold_what_was_written_is_refused(run, tmp_path, exported, monkeypatch):
    monkeypatch.setattr(token_export, "_write", lambda content, path, inner=token_export._write: inner(
        content, path)[::-1])
    output = exported(run, tmp_path / "out", expect=2)
    assert "web.bin has other content than was written there" in output and not (tmp_path / "out").exists()


def test_a_changed_token_shard_is_refused(run, tmp_path, exported):
    shutil.copytree(run, tmp_path / "mini")
    path = next((tmp_path / "mini/encode/train").iterdir())
    for change, manifest in ((lambda: path.write_bytes(path.read_bytes()[:-1] + b"x"), "is not what the stage encode"),
                         (path.unlink, "cannot be read: No such file")):
        change()
        output = exported(tmp_path / "mini", tmp_path / "out", expect=2)
        assert f"{path} {manifest}" in output and not (tmp_path / "out").exists()
