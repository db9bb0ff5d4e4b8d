"""One changed byte anywhere in a run is found, and the file named; a run that nobody touched is in order."""

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.files import (
    output_record,
    read_json,
    read_sealed,
    sealed_text,
    sha256_file,
    write_json,
    write_sealed,
)
from drover.pipeline.records.checkpoints import MARKER
from drover.tools.verify.__main__ import main, share_of, verify
from drover.tools.verify.checks import WENT, Findings
from drover.tools.verify.inventory import FAR, LOGS, Inventory
from tests.conftest import run_stage, write_config
from tests.refusal import printed
from tests.stages.test_damaged_inputs import flipped

pytestmark = pytest.mark.slow
PLACES = (0.0, 0.4, 1.0)
"""How far into a file a bit is flipped."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run, and the corpus that it is made of."""
    folder = tmp_path_factory.mktemp("whole")
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
def copied(whole, tmp_path):
    """A copy of the finished run, to spoil."""
    return Path(shutil.copytree(whole, tmp_path / "mini", copy_function=shutil.copy2))


def named(report):
    return {problem.file for problem in report.problems}


def test_an_untouched_run_is_in_order(whole, capsys):
    report = verify(whole)
    assert not report.problems and report.shards == report.shards_read > 4
    assert set(report.notes) == {LOGS}
    assert all(".locks" in file or file.endswith((".log", "PROGRESS.json")) for file in report.notes[LOGS])
    alone = json.loads(printed(capsys, main, "--run", whole, "--processes", 1, "--json"))
    assert alone["problems"] == []
    assert json.loads(printed(capsys, main, "--run", whole, "--processes", 2, "--json")) == alone


def test_one_flipped_bit_in_each_file_is_found_and_the_file_named(whole):
    """Of records, on which the checks of others depend, one file at a time; of all other files all at once."""
    endless = set(verify(whole).notes[LOGS])
    files = [path for path in sorted([*whole.rglob("*"), *(whole.parents[1] / "texts").iterdir()])
             if path.is_file() and path.stat().st_size and str(path) not in endless]
    records = [path for path in files if path.suffix in (".json", ".yaml")]
    others = sorted({*files} - {*records})
    assert len(others) > 50 and len(records) > 20
    rounds = [(others, place) for place in PLACES] + [([path], PLACES[len(path.name) % 3]) for path in records]
    for paths, place in rounds:
        with ExitStack() as damage:
            for path in paths:
                at = int(place * (path.stat().st_size - 1))
                damage.enter_context(flipped(path, at, at % 8))
            report = verify(whole)
        assert not (missed := set(map(str, paths)) - named(report)), f"{place}: {missed}"
        assert all(problem.do and problem.what for problem in report.problems)
    assert not verify(whole).problems


def test_missing_cut_longer_and_unexpected_files(copied, capsys):
    tokens, texts = (sorted((copied / stage / "train").iterdir()) for stage in ("encode", "shard"))
    earlier, last = (next(path for path in sorted((copied / f"train/checkpoints/step-0000000{step}").iterdir())
                          if path.name != MARKER) for step in (2, 4))
    for path in (tokens[0], earlier):  # of the earlier checkpoint no manifest speaks
        path.unlink()
    texts[1].write_bytes(texts[1].read_bytes()[:-512])
    longer, foreign = copied / "shard/rejected.jsonl", copied / "encode/train/zz.arrow"
    longer.write_text("x")
    foreign.write_bytes(b"nobody's")
    report = verify(copied)
    assert named(report) == set(map(str, (tokens[0], earlier, texts[1], longer, foreign)))
    assert main(["--run", str(copied), "--processes", "1"]) == 1
    assert capsys.readouterr().out.count("WRONG") == len(report.problems)
    last.unlink()
    (copied / "train/manifest.json").unlink()  # as of a run that is not finished
    assert str(last) in named(verify(copied))
    assert main(["--run", str(copied / "nothing")]) == 2


def test_shards_are_read_and_not_only_hashed(copied):
    """What was wrong when it was hashed: records whose hashes fit, and whose content does not."""
    vocabulary, folder = read_json(copied / "tokenizer/vocabulary.json"), copied / "encode"
    manifest = read_sealed(folder / "manifest.json")
    record = min((one for one in manifest["outputs"] if one["path"].startswith("train/")), key=lambda one: one["path"])
    path, width = folder / record["path"], 2 if record["dtype"] == "uint16" else 4
    data, at = bytearray(path.read_bytes()), record["data_offset"] + 5 * width

    def told(token):
        """What is found where a document's sixth token is another, and the manifest says of the file what is there."""
        data[at:at + width] = token.to_bytes(width, "little")
        path.write_bytes(data)
        record["sha256"] = sha256_file(path)
        write_sealed(folder / "manifest.json", manifest)
        return " ".join(map(str, verify(copied).problems))
    data[record["keys_offset"]] ^= 1
    found = told(vocabulary["eos_id"])
    assert "EOS is inside of a document at its token 5 (document 0" in found and "its document 0 is" in found
    assert "outside of the vocabulary" in told(vocabulary["size"] + 1)


@pytest.mark.parametrize(("stage", "file", "users"), [
    ("train", "metrics.jsonl", "convert, report were"), ("convert", "hf/config.json", "evaluate, report were"),
    ("tokenizer", "report.json", "encode, train, convert, evaluate, report were"),
    ("evaluate", "results.json", "report was")])
def test_an_output_and_its_manifest_that_fit_to_each_other_and_not_to_later_stages(copied, stage, file, users):
    """As somebody writes them who seals them again: `drover run` takes such a stage for another."""
    path, manifest = copied / stage / file, read_sealed(copied / stage / "manifest.json")
    path.write_bytes(path.read_bytes() + b"\n")
    for record in manifest["outputs"]:
        if record["path"] == file:
            record.update(output_record(copied / stage, path))
    write_sealed(copied / stage / "manifest.json", manifest)
    problem, = verify(copied).problems
    assert problem.file == str(copied / stage / "manifest.json")
    assert problem.what == f"its outputs are not those that {users} made from"


def test_a_sample_looks_at_all_sizes(whole):
    report = verify(whole, 0.01)
    assert 0 < report.shards_read < report.shards and not report.problems
    assert f"of {report.shards:,} shards" in report.lines()[0]
    last = sorted((whole / "encode/train").iterdir())[-1]
    with open(last, "ab") as file:
        file.write(b"x")
    try:
        assert str(last) in named(verify(whole, 0.01))
    finally:
        os.truncate(last, last.stat().st_size - 1)
    assert [share_of(text) for text in ("1%", "0.5", "100%")] == [0.01, 0.5, 1]


def listed(run):
    """The inventory of a run before a file is read, and its checks."""
    report = Inventory(run=str(run))
    return report, report.take()


def test_records_without_a_checksum_and_those_that_are_not_made_again(copied):
    manifest, config = copied / "encode/manifest.json", copied / "config.yaml"
    content = read_json(manifest)
    del content["seal"]
    write_json(manifest, content)
    config.write_text("".join(config.read_text().splitlines(keepends=True)[:-1]))
    names = ("rollbacks.json", "copying.json", "wandb.json")
    for name in names:
        (copied / "train" / name).write_text("{")
    found = {Path(problem.file).relative_to(copied).as_posix(): problem for problem in verify(copied).problems}
    assert found.keys() == {"encode/manifest.json", "config.yaml", *(f"train/{name}" for name in names)}
    for name in ("encode/manifest.json", "config.yaml"):
        assert found[name].what == "its checksum is missing: it was cut or edited"
    assert [found[f"train/{name}"].do.partition(":")[0] for name in names] == [
        *["Restore it from a copy"] * 2, "Delete it"]
    config.write_text("name: mini\n")  # what cannot be loaded any more
    assert str(config) in named(verify(copied))


def test_token_shards_that_are_read_from_a_store_may_be_away(copied):
    tokens = sorted((copied / "encode").rglob("*.arrow"))
    tokens[0].unlink()
    assert str(tokens[0]) in named(verify(copied))
    values = yaml.safe_load((copied / "config.yaml").read_text())
    values["train"]["tokens_from"] = "s3://bucket/tokens"
    (copied / "config.yaml").write_text(sealed_text(yaml.safe_dump(values)))
    text = copied / "shard" / tokens[0].relative_to(copied / "encode").with_suffix(".tar")
    with flipped(text):
        report = verify(copied)
    assert report.notes[FAR] == [str(tokens[0])] and named(report) == {str(text)}


def test_what_a_run_at_work_removes_meanwhile_is_no_problem(copied):
    report, checks = listed(copied)
    shutil.rmtree(copied / "train/checkpoints/step-00000002")
    (copied / "train/STATE.json").unlink()
    for check in checks:
        report.add(check())
    assert not report.problems
    assert {Path(file).name for file in report.notes[WENT]} >= {"STATE.json", "COMPLETE.json"}
    shutil.rmtree(copied / "train/checkpoints/step-00000004")  # the manifest's
    assert any(check().problems for check in checks if check.function is Findings.compare)
