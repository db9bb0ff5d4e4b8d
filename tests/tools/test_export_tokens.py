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


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_traced(tmp_path_factory.mktemp("exported")).parent / "runs/mini"


@pytest.fixture(scope="module")
def wide(run, tmp_path_factory):
    """The same tokens in four bytes each, some of them large."""
    from pipeline.config.loading import load_config, save_config
    from pipeline.contract.entry import stage_main
    from pipeline.encode import encode
    folder = tmp_path_factory.mktemp("wide")
    save_config(load_config(run / "config.yaml", [f"runs_dir={folder}", "name=wide", f"reuse={run}",
                                                  "encode.dtype=uint32"]), folder / "wide.yaml")
    shutil.copytree(run, folder / "mini")
    config = load_config(folder / "wide.yaml", [f"reuse={folder / 'mini'}"])
    shutil.rmtree(folder / "mini/encode")
    save_config(config, folder / "wide.yaml")
    assert stage_main("encode", encode, ["--config", str(folder / "wide.yaml")]) == 0
    return folder / "wide"


@pytest.mark.parametrize("split, without_bos", [("train", False), ("heldout", True)])
@pytest.mark.parametrize("width", ["uint16", "uint32"])
def test_megatron_reads_every_document_in_order(request, tmp_path, split, without_bos, width):
    run = request.getfixturevalue("run" if width == "uint16" else "wide")
    exported(run, "megatron", tmp_path / "out", "--split", split, *(["--without-bos"] if without_bos else []))
    told = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert told["bos"] == (not without_bos) and told["eos"]
    assert (told["dtype"], told["dtype_code"]) == (("uint16", 8) if width == "uint16" else ("int32", 4))
    for source in ("web", "notes"):
        found, wanted = IndexedDataset(tmp_path / "out" / source), documents_of(run, split, source)
        assert found.dtype.itemsize == (2 if width == "uint16" else 4) and len(wanted) > 5
        assert found.documents.tolist() == list(range(len(wanted) + 1)) and len(found.lengths) == len(wanted)
        for number, (_, _, tokens) in enumerate(wanted):
            assert (tokens[0], tokens[-1]) == (told["bos_id"], told["eos_id"])
            assert found[number].tolist() == tokens[without_bos:].tolist()
        assert told["sources"][source]["docs"] == len(wanted)
        assert told["sources"][source]["tokens"] == len(found.tokens) // found.dtype.itemsize == found.lengths.sum()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == \
        sorted([MANIFEST, *(record["path"] for record in told["files"])])
    for record in told["files"]:
        path = tmp_path / "out" / record["path"]
        assert (path.stat().st_size, sha256_file(path)) == (record["bytes"], record["sha256"])


@pytest.mark.parametrize("arguments, sources", [([], ["web", "notes"]), (["--source", "notes"], ["notes"]),
                                                (["--without-bos"], ["web", "notes"])])
def test_datasets_reads_every_document_in_order(run, tmp_path, arguments, sources):
    exported(run, "hf", tmp_path / "out", *arguments)
    found = datasets.load_from_disk(str(tmp_path / "out"))
    assert found.column_names == ["input_ids", "key", "source", "bytes"]
    wanted = [{"input_ids": tokens[len(arguments) == 1:].tolist(), "key": key, "source": source, "bytes": size}
              for source in sources for key, size, tokens in documents_of(run, "train", source)]
    assert found.to_list() == wanted
    assert found.features["input_ids"].feature.dtype == "uint16"
    assert found.with_format("torch")[3]["input_ids"].tolist() == wanted[3]["input_ids"]


@pytest.mark.parametrize("form", ["megatron", "hf"])
def test_processes_make_the_same_bytes(run, tmp_path, form):
    exported(run, form, tmp_path / "one")
    exported(run, form, tmp_path / "two", "--processes", "2")
    one, two = (json.loads((tmp_path / name / MANIFEST).read_text()) for name in ("one", "two"))
    assert one == two and one["total"]["docs"] == sum(own["docs"] for own in one["sources"].values())


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


@pytest.mark.parametrize("form", ["megatron", "hf"])
def test_a_kill_leaves_nothing_under_the_name_and_the_same_command_goes_on(run, tmp_path, capsys, form):
    out = tmp_path / "out"
    arguments = ["--run", str(run), "--format", form, "--out", str(out), "--processes", "1"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=REPOSITORY, env=environment(), check=False)
    assert killed.returncode == -signal.SIGKILL and not out.exists()
    exported(run, form, out, "--source", "web", expect=2)
    assert "another export that was not finished" in capsys.readouterr().err
    exported(run, form, out)
    assert "going on: 4 of" in capsys.readouterr().out
    exported(run, form, tmp_path / "whole")
    assert (out / MANIFEST).read_bytes() == (tmp_path / "whole" / MANIFEST).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    exported(run, form, out)
    assert "is there already, of these very tokens" in capsys.readouterr().out


def test_what_was_torn_after_it_was_written_is_not_published(run, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--run", str(run), "--format", "megatron", "--out", str(out), "--processes", "1"]
    subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=REPOSITORY, env=environment(), check=False)
    with open(tmp_path / "out.unfinished/web.bin", "r+b") as file:
        file.seek(10)
        file.write(b"\xff\xff")
    exported(run, "megatron", out, expect=2)
    assert "web.bin does not hold at byte 0 what was written there" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize("form", ["megatron", "hf"])
def test_a_full_disk_is_said_and_made_good(run, tmp_path, form):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tools.export_tokens", "--run", str(run), "--format", form, "--out", str(out),
               "--processes", "2"]
    full = subprocess.run(command, cwd=REPOSITORY, env=environment(), text=True, capture_output=True, check=False,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)))
    assert full.returncode == 2 and "is exhausted" in full.stderr and "Traceback" not in full.stderr
    assert not out.exists()
    again = subprocess.run(command, cwd=REPOSITORY, env=environment(), text=True, capture_output=True, check=False)
    assert again.returncode == 0, again.stderr
    assert (out / MANIFEST).is_file()


def test_nothing_is_written_over_and_what_is_not_there_is_said(run, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.bin").write_text("mine")
    exported(run, "megatron", tmp_path / "mine", expect=2)
    assert "no export: nothing is written over it" in capsys.readouterr().err
    exported(run, "hf", tmp_path / "hf", "--split", "heldout")
    exported(run, "megatron", tmp_path / "hf", expect=2)
    assert "another export: nothing is written over it" in capsys.readouterr().err
    (tmp_path / "b.unfinished").mkdir()
    (tmp_path / "b.unfinished/a").write_text("mine")
    exported(run, "hf", tmp_path / "b", expect=2)
    assert "is no unfinished export" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "b.unfinished")
    exported(run, "hf", tmp_path / "mine/notes.bin/b", expect=2)
    assert "cannot be made" in capsys.readouterr().err
    exported(run, "hf", tmp_path / "b", "--source", "books", expect=2)
    assert "has no source books; it has web, notes" in capsys.readouterr().err
    assert (tmp_path / "mine/notes.bin").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mine"]


def test_a_changed_token_shard_is_refused(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "mini")
    path = next((tmp_path / "mini/encode/train").iterdir())
    path.write_bytes(path.read_bytes()[:-9] + b"x" + path.read_bytes()[-8:])
    exported(tmp_path / "mini", "hf", tmp_path / "out", expect=2)
    assert f"{path} is not what the stage encode committed" in capsys.readouterr().err
    path.unlink()
    exported(tmp_path / "mini", "hf", tmp_path / "out", expect=2)
    assert f"{path} is missing" in capsys.readouterr().err and not (tmp_path / "out").exists()
