"""Token shards in other programs' layouts: every document read back in order, by a reader of the published layout."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest

from pipeline.contract.run import run_in
from pipeline.data.shard_table import open_shards
from pipeline.files import sha256_file
from tests.conftest import REPOSITORY, environment
from tests.tools.traced import make_traced
from tools.export_tokens.__main__ import main
from tools.export_tokens.draft import MANIFEST

TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


class IndexedDataset:
    """Megatron Core's reader, from its published layout, over a mapped .bin."""

    def __init__(self, prefix):
        data = Path(f"{prefix}.idx").read_bytes()
        assert data[:9] == b"MMIDIDX\x00\x00"
        version, code, sequences, documents = struct.unpack_from("<QBQQ", data, 9)
        assert version == 1
        self.dtype, at = np.dtype(TYPES[code]), 34
        self.lengths = np.frombuffer(data, "<i4", sequences, at)
        self.pointers = np.frombuffer(data, "<i8", sequences, at + 4 * sequences)
        self.documents = np.frombuffer(data, "<i8", documents, at + 12 * sequences)
        assert len(data) == at + 12 * sequences + 8 * documents
        self.tokens = np.memmap(f"{prefix}.bin", np.uint8, "r")

    def __getitem__(self, number):
        pointer = self.pointers[number]
        return np.frombuffer(self.tokens, self.dtype, self.lengths[number], pointer)


def exported(run, form, out, *arguments, expect=0):
    assert main(["--run", str(run), "--format", form, "--out", str(out), "--processes", "1", *arguments]) == expect


def documents_of(run, split, source):
    """(key, text bytes, tokens) of every document, from the token shards."""
    run = run_in(run)
    shards = open_shards(run.stage_folder("encode"), run.finished("encode").outputs, split, source)
    return [(shard.document_key(number), shard.document_bytes(number), shard.document_tokens(number))
            for shard in shards for number in range(shard.documents)]


@pytest.fixture(scope="module", params=["uint16", "uint32"])
def wide(request, tmp_path_factory):
    """A run, its tokens of two bytes each or of four."""
    folder = tmp_path_factory.mktemp("exported")
    return request.param, make_traced(folder, encode={"dtype": request.param}).parent / "runs/mini"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_traced(tmp_path_factory.mktemp("exported")).parent / "runs/mini"


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_megatron_reads_every_document_in_order(wide, tmp_path, split):
    (width, run), without_bos, out = wide, split == "heldout", tmp_path / "out"
    exported(run, "megatron", out, "--split", split, *["--without-bos"] * without_bos)
    told = json.loads((out / MANIFEST).read_text())
    assert told["bos"] == (not without_bos) and told["eos"]
    assert (told["dtype"], told["dtype_code"]) == (("uint16", 8) if width == "uint16" else ("int32", 4))
    for source in ("web", "notes"):
        found, wanted = IndexedDataset(out / source), documents_of(run, split, source)
        assert found.dtype.itemsize == (2 if width == "uint16" else 4) and len(wanted) > 5
        assert found.documents.tolist() == list(range(len(wanted) + 1)) and len(found.lengths) == len(wanted)
        for number, (_, _, tokens) in enumerate(wanted):
            assert (tokens[0], tokens[-1]) == (told["bos_id"], told["eos_id"])
            assert found[number].tolist() == tokens[without_bos:].tolist()
        assert told["sources"][source] == {**told["sources"][source], "docs": len(wanted),
                                           "tokens": found.lengths.sum()}
    assert {path.name for path in out.iterdir()} == {MANIFEST, *(record["path"] for record in told["files"])}
    for record in told["files"]:
        path = out / record["path"]
        assert (path.stat().st_size, sha256_file(path)) == (record["bytes"], record["sha256"])


@pytest.mark.parametrize("arguments, sources", [([], ["web", "notes"]), (["--without-bos", "--source", "notes"],
                                                                         ["notes"])])
def test_datasets_reads_every_document_in_order(run, tmp_path, arguments, sources):
    exported(run, "hf", tmp_path / "out", *arguments)
    found = datasets.load_from_disk(str(tmp_path / "out"))
    assert found.column_names == ["input_ids", "key", "source", "bytes"]
    assert found.to_list() == [
        {"input_ids": tokens[bool(arguments):].tolist(), "key": key, "source": source, "bytes": size}
        for source in sources for key, size, tokens in documents_of(run, "train", source)]
    assert found.features["input_ids"].feature.dtype == "uint16"


KILLED = """
import os, signal, sys
from tools.export_tokens import huggingface, megatron
from tools.export_tokens.__main__ import main
for module in (megatron, huggingface):
    def write(job, inner=module.write_part):
        if job[1].number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(job)
    module.write_part = write
main(sys.argv[1:])
"""


def killed(run, form, out):
    """Export in a process that is killed before its fifth part."""
    arguments = ["--run", str(run), "--format", form, "--out", str(out), "--processes", "1"]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=REPOSITORY, env=environment(), check=False)
    assert done.returncode == -signal.SIGKILL and not out.exists()


@pytest.mark.parametrize("form", ["megatron", pytest.param("hf", marks=pytest.mark.slow)])
def test_a_kill_leaves_nothing_under_the_name_and_the_same_command_goes_on(run, tmp_path, capsys, form):
    out = tmp_path / "out"
    killed(run, form, out)
    exported(run, form, out, "--source", "web", expect=2)
    assert "another export that was not finished" in capsys.readouterr().err
    exported(run, form, out)
    assert "going on: 4 of" in capsys.readouterr().out
    exported(run, form, tmp_path / "whole", "--processes", "2")
    assert (out / MANIFEST).read_bytes() == (tmp_path / "whole" / MANIFEST).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    exported(run, form, out)
    assert "is there already, of these very tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_what_was_torn_after_it_was_written_is_not_published(run, tmp_path, capsys):
    killed(run, "megatron", tmp_path / "out")
    with open(tmp_path / "out.unfinished/web.bin", "r+b") as file:
        file.seek(10)
        file.write(b"\xff\xff")
    exported(run, "megatron", tmp_path / "out", expect=2)
    assert "web.bin does not hold at byte 0 what was written there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["megatron", "hf"])
def test_a_full_disk_is_said_and_made_good(run, tmp_path, form):
    out = tmp_path / "out"
    full = subprocess.run([sys.executable, "-m", "tools.export_tokens", "--run", str(run), "--format", form, "--out",
                           str(out), "--processes", "2"], cwd=REPOSITORY, env=environment(), text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)),
                          capture_output=True, check=False)
    assert full.returncode == 2 and "is exhausted" in full.stderr and "Traceback" not in full.stderr
    assert not out.exists()
    exported(run, form, out)
    assert (out / MANIFEST).is_file()


def test_nothing_is_written_over_and_what_is_not_there_is_said(run, tmp_path, capsys):
    for folder, name in (("mine", "notes.bin"), ("b.unfinished", "a")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("mine")
    exported(run, "hf", tmp_path / "hf", "--split", "heldout")
    for out, arguments, told in (("mine", [], "no export: nothing is written over it"),
                                 ("hf", [], "another export: nothing is written over it"),
                                 ("b", [], "is no unfinished export"), ("mine/notes.bin/b", [], "cannot be made"),
                                 ("c", ["--source", "books"], "has no source books; it has web, notes")):
        exported(run, "megatron", tmp_path / out, *arguments, expect=2)
        assert told in capsys.readouterr().err
    assert (tmp_path / "mine/notes.bin").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.unfinished", "hf", "mine"]


def test_a_changed_token_shard_is_refused(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "mini")
    path = next((tmp_path / "mini/encode/train").iterdir())
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    exported(tmp_path / "mini", "hf", tmp_path / "out", expect=2)
    assert f"{path} is not what the stage encode committed" in capsys.readouterr().err
    path.unlink()
    exported(tmp_path / "mini", "hf", tmp_path / "out", expect=2)
    assert f"{path} is missing" in capsys.readouterr().err and not (tmp_path / "out").exists()
