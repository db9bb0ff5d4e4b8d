"""One changed byte anywhere in a run is found, and the file named; a run that nobody touched is in order."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import write_state
from drover.pipeline.core.files import (
    Ledger,
    append_line,
    output_record,
    read_json,
    read_sealed,
    sealed_text,
    sha256_file,
    write_json,
    write_sealed,
)
from drover.pipeline.records.checkpoints import FORMAT, MARKER, checkpoint_name
from drover.tools.verify import (
    FAR,
    LOGS,
    OTHERS,
    SCRATCH,
    SIZED,
    WENT,
    Inventory,
    Report,
    check_ledger,
    check_record,
    main,
    share_of,
    verify,
)
from tests.conftest import run_stage, write_config
from tests.mutations import OTHERWISE
from tests.refusal import printed
from tests.stages.test_damaged_inputs import flipped

slow = pytest.mark.slow
PLACES = (0.0, 0.4, 1.0)
"""How far into a file a bit is flipped."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "texts").mkdir()
    for number in range(40):
        (folder / f"texts/{number}.txt").write_text(f"def function_{number}(x):\n    return x * {number}\n" * 5)
    config = write_config(folder, folder / "texts", shard={"shard_mb": 0.004, "validation_share": 0.2},
                          tokenizer={"kind": "byte"}, launch={"processes": 1},
                          train={"steps": 4, "validation_every": 4, "sample_every": 4, "prompts": [],
                                 "batch_tokens": 256, "checkpoint": {"every_steps": 2}},
                          evaluate={"validation_tokens": 300, "prompts": [], "tasks": []})
    for stage in STAGES:
        run_stage(stage, config)
    return folder / "runs/mini"


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run, to damage."""
    return Path(shutil.copytree(finished, tmp_path / "mini", copy_function=shutil.copy2))


def named(report):
    return {problem.file for problem in report.problems}


@slow
def test_an_untouched_run_is_in_order(finished, capsys):
    report = verify(finished, documents=True)
    assert not report.problems and set(report.notes) == {LOGS} and report.files > 50
    assert json.loads(printed(capsys, main, "--run", finished, "--json"))["problems"] == []


@slow
def test_one_flipped_bit_in_each_file_is_found_and_the_file_named(finished):
    """Of records, on which the checks of others depend, one file at a time; of all other files all at once."""
    logs = {*verify(finished).notes[LOGS]}
    assert all(".locks" in file or ".tfevents." in file or file.endswith((".log", "PROGRESS.json")) for file in logs)
    files = [path for path in sorted([*finished.rglob("*"), *(finished.parents[1] / "texts").iterdir()])
             if path.is_file() and not path.is_symlink() and path.stat().st_size and str(path) not in logs]
    records = [path for path in files if path.suffix in (".json", ".yaml")]
    others = sorted({*files} - {*records})
    assert len(others) > 50 and len(records) > 20
    rounds = [(others, place) for place in PLACES] + [([path], PLACES[len(path.name) % 3]) for path in records]
    for paths, place in rounds:
        with ExitStack() as damage:
            for path in paths:
                at = int(place * (path.stat().st_size - 1))
                damage.enter_context(flipped(path, at, at % 8))
            report = verify(finished)
        assert not (missed := set(map(str, paths)) - named(report)), f"{place}: {missed}"
        assert all(problem.do and problem.what for problem in report.problems)
    assert not verify(finished).problems


@slow
def test_missing_cut_longer_and_unexpected_files(copied, capsys):
    tokens, texts = (sorted((copied / stage / "train").iterdir()) for stage in ("encode", "shard"))
    earlier, last = (next(path for path in sorted((copied / f"train/checkpoints/step-0000000{step}").iterdir())
                          if path.name != MARKER) for step in (2, 4))
    for path in (tokens[0], earlier):  # no manifest lists the earlier checkpoint
        path.unlink()
    texts[1].write_bytes(texts[1].read_bytes()[:-512])
    longer, foreign = copied / "shard/rejected.jsonl", copied / "encode/train/zz.arrow"
    longer.write_text("x")
    foreign.write_bytes(b"nobody's")
    report = verify(copied)
    assert named(report) == set(map(str, (tokens[0], earlier, texts[1], longer, foreign)))
    assert main(["--run", str(copied)]) == 1
    assert capsys.readouterr().out.count("WRONG") == len(report.problems)
    last.unlink()
    (copied / "train/manifest.json").unlink()  # as of a run that is not finished
    assert str(last) in named(verify(copied))


@slow
@pytest.mark.parametrize("column", ["data_offset", "keys_offset", "bytes_offset"])
def test_documents_are_compared_with_their_tokens(copied, column):
    """A token shard that was wrong when it was hashed."""
    manifest = read_sealed(copied / "encode/manifest.json")
    record = manifest["outputs"][0]
    path = copied / "encode" / record["path"]
    data = bytearray(path.read_bytes())
    data[record[column] + 8] ^= 1
    path.write_bytes(data)
    record["sha256"] = sha256_file(path)
    write_sealed(copied / "encode/manifest.json", manifest)
    assert str(path) not in named(verify(copied))
    problem, = (problem for problem in verify(copied, documents=True).problems if problem.file == str(path))
    assert "its document " in problem.what and ".txt of train/" in problem.what


@slow
@pytest.mark.parametrize(("stage", "file", "users"), [
    ("tokenizer", "report.json", "encode, train, convert, evaluate, report were"),
    ("evaluate", "results.json", "report was")])
def test_a_stage_whose_record_was_written_again_is_not_what_later_ones_used(copied, stage, file, users):
    path, manifest = copied / stage / file, read_sealed(copied / stage / "manifest.json")
    path.write_bytes(path.read_bytes() + b"\n")
    for record in manifest["outputs"]:
        if record["path"] == file:
            record.update(output_record(copied / stage, path))
    write_sealed(copied / stage / "manifest.json", manifest)
    problem, = verify(copied).problems
    assert problem.file == str(copied / stage / "manifest.json")
    assert problem.what == f"its outputs are not those that {users} made from"


@slow
def test_what_a_kill_left_of_a_finished_stage_is_listed(copied):
    """The next start removes it: tests/contract/test_passes.py."""
    left = copied / "shard/staging/x"
    left.parent.mkdir()
    left.touch()
    report = verify(copied)
    assert report.notes[SCRATCH] == [str(left)] and not report.problems


@slow
def test_a_sample_compares_all_sizes(copied):
    report = verify(copied, 0.01)
    assert not report.problems and len(report.notes[SIZED]) > 40
    for path in [*(copied / "encode/train").iterdir()]:
        path.write_bytes(path.read_bytes() + b"x")
        assert str(path) in named(verify(copied, 0.01))
    assert [share_of(text) for text in ("1%", "0.5", "100%")] == [0.01, 0.5, 1]


@slow
def test_records_without_a_checksum(copied):
    manifest, config, note = copied / "encode/manifest.json", copied / "config.yaml", copied / "train/rollbacks.json"
    content = read_json(manifest)
    del content["seal"]
    write_json(manifest, content)
    config.write_text("".join(config.read_text().splitlines(keepends=True)[:-1]))
    note.write_text("{")
    problems = {problem.file: problem.what for problem in verify(copied).problems}
    missing = "its checksum is missing: it was cut or edited"
    assert problems == {str(manifest): missing, str(config): missing, str(note): problems[str(note)]}


@slow
def test_token_shards_that_are_read_from_a_store_may_be_absent(copied):
    tokens = sorted((copied / "encode").rglob("*.arrow"))
    tokens[0].unlink()
    assert str(tokens[0]) in named(verify(copied))
    values = yaml.safe_load((copied / "config.yaml").read_text())
    values["train"]["tokens_from"] = "s3://bucket/tokens"
    (copied / "config.yaml").write_text(sealed_text(yaml.safe_dump(values)))
    report = verify(copied, documents=True)
    assert report.notes[FAR] == [str(tokens[0])] and not report.problems


@slow
def test_what_a_working_run_removes_meanwhile_is_no_problem(copied):
    write_state(copied / "train", "running")
    checks = Inventory(Report(str(copied)), 1.0, documents=False).checks
    shutil.rmtree(copied / "train/checkpoints/step-00000002")
    (copied / "train/STATE.json").unlink()
    results = {check.path.name: what for check in checks if (what := check())}
    assert {*results.values()} == {WENT} and {"STATE.json", MARKER} <= results.keys()
    shutil.rmtree(copied / "train/checkpoints/step-00000004")  # the manifest's
    assert any("is missing" in check() for check in checks if check.function is check_record)


def test_a_changed_byte_of_a_ledger_is_found_and_a_torn_line_is_none(tmp_path):
    ledger = Ledger(tmp_path)
    for name in "ab":
        ledger.add(name, "k", {"text": name * 50})
    [path] = tmp_path.iterdir()
    data = path.read_bytes()

    def problem(content):
        path.write_bytes(content)
        return check_ledger(path)
    assert problem(data.replace(b"b", b"c", 1))
    end = data.index(b"\n") + 1
    assert not any(problem(data[:cut] + torn) for cut in range(end, len(data) - 3) for torn in (b"", b"\n"))


def test_what_training_repeats_without_a_damaged_checkpoint(tmp_path):
    train = tmp_path / "train"
    for step in (2, 4):
        folder = train / "checkpoints" / checkpoint_name(step)
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"w" * 9)
        write_sealed(folder / MARKER, {"format": FORMAT, "progress": {"step": step},
                                       "files": [output_record(folder, folder / "weights")]})
    for step in range(1, 8):
        append_line(train / "metrics.jsonl", {"step": step})
    (train / "checkpoints/step-00000004/weights").write_bytes(b"x" * 9)
    without = "damaged checkpoints, without which training continues from step {} and repeats {} steps"
    assert without.format(2, 5) in verify(tmp_path).notes
    (train / "checkpoints/step-00000002/weights").unlink()
    assert len(verify(tmp_path).notes[without.format(0, 7)]) == 2


def test_a_file_of_a_stage_that_is_not_known_is_listed_and_never_wrong(tmp_path):
    """A JSON that ends in a hash looks like a damaged record of Drover's."""
    (tmp_path / "config.yaml").write_text(sealed_text("name: a\n"))
    (tmp_path / "words").mkdir()
    write_json(tmp_path / "words/words.json", {"sha256": "0" * 64})
    report = verify(tmp_path)
    assert not report.problems and report.notes[OTHERS] == [str(tmp_path / "words/words.json")]


@pytest.mark.parametrize(("kind", "expected"), [
    ("hole", "it has 4,398,046,511,104 bytes; at most"), ("endless", "it is not a regular file"),
    ("folder", "it is not a regular file"), ("loop", "Too many levels"), ("missing", "No such file")])
def test_a_configuration_that_is_not_read_is_one_of_the_problems(tmp_path, kind, expected):
    OTHERWISE[kind](tmp_path / "config.yaml")
    (tmp_path / "shard").mkdir()
    problem, = verify(tmp_path).problems
    assert expected in problem.what
