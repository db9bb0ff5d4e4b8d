"""Stages whose tasks hash what they read: nothing is hashed before, and a manifest says the same as of any other."""

import os
from itertools import pairwise
from pathlib import Path

import pytest

import drover.pipeline.contract.inputs
from drover.pipeline.contract.inputs import gathered
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.workers import Task
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import output_record, write_text
from drover.pipeline.data.streams import Input, Piece
from drover.pipeline.storage.object_files import content_hash
from tests.contract.conftest import OwnStage
from tests.refusal import refused
from tests.stand_ins import never, run_of

BORDER = 1 << 22
LARGE = BORDER + 100
"""Bytes of the file that two tasks read."""
CHANGED = "some of its input files are new, missing or changed since it was started"


class Upper(OwnStage):
    """A stage that writes its files in capitals. Each is a task, `large` two; `stop_at`: the task that fails."""

    stop_at = None

    def body(self, work):
        tasks = []
        for file in work.listing():
            borders = sorted({0, min(BORDER, file["bytes"]), file["bytes"]})
            tasks += [Task(f"{Path(file['path']).stem}-{start}", {**file, "start": start, "stop": stop})
                      for start, stop in pairwise(borders)]
        records = work.run_pass("read", tasks, self.read)
        work.commit([record["outputs"][0] for record in records], {"tasks": len(records)},
                    files=gathered([entry for record in records for entry in record["inputs"]]))

    def read(self, folder, payload):
        piece = Piece(**payload)
        name = f"{Path(piece.path).stem}-{piece.start}"
        if name == self.stop_at:
            raise UserError("cannot go on")
        self.made[name] += 1
        source = Input(piece)
        write_text(folder / f"{name}.txt", source.open().read(piece.stop - piece.start).decode().upper())
        return {"outputs": [output_record(folder, folder / f"{name}.txt")], "inputs": [source.record()]}

    @property
    def state(self):
        return run_of(self.place).state("upper")


@pytest.fixture
def upper(place, monkeypatch):
    """The stage and its files; hashing before the tasks do is counted as `hashed`."""
    (place / "in").mkdir()
    for name in ("one", "two", "three"):
        write_text(place / f"in/{name}.txt", f"text of {name}\n")
    (place / "in/large.txt").write_bytes(b"a" * LARGE)
    write_text(place / "c.yaml", (place / "c.yaml").read_text().replace("corpus.txt", "in/*.txt"))
    made = Upper(place, monkeypatch, "upper", functions={"task_files": "drover.pipeline.data.sources:input_files"})
    made.hashed = []
    hashing = drover.pipeline.contract.inputs.content_hash
    monkeypatch.setattr(drover.pipeline.contract.inputs, "content_hash",
                        lambda path: made.hashed.append(Path(path).name) or hashing(path))
    return made


def test_what_units_hash_stands_in_the_manifest(upper, monkeypatch):
    """Which a kill between it and the clearing of what it needs no more finds in order."""
    def killed(folder, manifest):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr("drover.pipeline.contract.stage_work.clear", killed)
        assert upper() == 130
    assert upper.state.kind == "done" and upper() == 0
    assert upper.hashed == [] and set(upper.made.values()) == {1}
    manifest = read_manifest(upper.folder())
    hashes = {f"t/{name}.txt": content_hash(str(upper.place / "in" / f"{name}.txt"))
              for name in ("large", "one", "three", "two")}
    assert {record["name"]: record["sha256"] for record in manifest.files} == manifest.fingerprint["files"] == hashes
    assert set(manifest.fingerprint) == {"config", "inputs", "files"}


def test_a_finished_stage_hashes_touched_files_once(upper, capsys):
    assert upper() == 0
    for path in (upper.place / "in").iterdir():
        os.utime(path, (1, 1))
    large = upper.place / "in/large.txt"
    for _ in range(3):
        assert upper.state.kind == "done"
    assert sorted(upper.hashed) == ["large.txt", "one.txt", "three.txt", "two.txt"], "once, and remembered"
    with open(large, "r+b") as file:
        file.seek(BORDER + 5)
        file.write(b"!")
    assert [difference.key for difference in upper.state.differences] == ["files.t/large.txt"]
    assert upper() == 2 and "t/large.txt has other content" in capsys.readouterr().err
    (upper.place / "in").rename(upper.place / "gone")
    assert upper.state.kind == "done", "raw text may go"


def test_files_that_change_after_the_start_are_read_again_and_no_others(upper, capsys):
    upper.stop_at = "two-0"
    assert upper() == 2
    assert len(upper.made) == 4
    (upper.place / "in/one.txt").write_text("another text\n")
    (upper.place / "in/three.txt").unlink()
    (upper.place / "in/zero.txt").write_text("nothing\n")
    assert upper.state.kind == "resumable" and CHANGED in str(upper.state)
    upper.made.clear()
    upper.stop_at = None
    assert upper() == 0 and CHANGED in capsys.readouterr().out
    again = ["one-0", "two-0", "zero-0"]
    assert sorted(upper.made) == again and upper.state.kind == "done"
    assert [record["path"] for record in read_manifest(upper.folder()).outputs] == [
        f"{name}.txt" for name in ("large-0", f"large-{BORDER}", *again)]
    assert (upper.folder() / "one-0.txt").read_text() == "ANOTHER TEXT\n"


def test_an_element_that_sees_other_files_than_those_at_work_is_refused(upper, capsys):
    def body(work):
        (upper.place / "in/zero.txt").write_text("another text\n")
        assert upper("--element", "b", body=never) == 2
        assert f"would do other work: resumable (will continue; {CHANGED})" in capsys.readouterr().err
        (upper.place / "in/zero.txt").unlink()
        upper.body(work)
    assert upper("--element", "a", body=body) == 0 and upper.state.kind == "done"


def test_a_file_that_changes_while_the_stage_runs_is_not_committed(upper, capsys):
    def body(work):
        work.commit([], {}, files=[{**record, "sha256": "0", "mtime_ns": 1} if record["name"] == "t/one.txt" else record
                                   for record in work.listing()])
    assert upper(body=body) == 2
    assert "1 input files were changed while upper was reading them (t/one.txt)" in capsys.readouterr().err
    assert read_manifest(upper.folder()) is None and upper() == 0


def entry(name="s/a", **more):
    return {"name": name, "path": "/in", "bytes": 20, "mtime_ns": 5, "sha256": "aa", **more}


@pytest.mark.parametrize("other", [{"bytes": 21}, {"mtime_ns": 6}, {"sha256": "ab"}])
def test_units_that_saw_other_files_are_not_brought_together(other):
    assert [record["name"] for record in gathered([entry("s/b"), entry(), entry()])] == ["s/a", "s/b"]
    refused(UserError, r"1 input files changed between two tasks that read them \(s/a\)", gathered,
            [entry(), entry("s/b"), entry(**other)])
