"""Stages shared out over eight elements of arrays, phase after phase: the bytes are those of one process."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from launch.slurm.chain import read_chain
from pipeline.contract.manifest import read_manifest
from pipeline.contract.stages import STAGES
from tests.conftest import REPOSITORY, write_config
from tests.slurm.clusters import Cluster
from tests.waiting import wait_for

DIGITS = '''
import sys
from pathlib import Path
from pipeline.contract.entry import stage_main
from pipeline.contract.stage_work import Unit
from pipeline.contract.stages import Stage, register_stage
from pipeline.files import output_record, sha256_json, write_text

register_stage(Stage("digits", needs=("shard",), reads=(), code=(), workers=True, phases=("take", "sort", "add"),
                     own_module="digits"))

def written(folder, name, text):
    path = folder / f"{name}.txt"
    write_text(path, text)
    return {"outputs": [output_record(folder, path)]}

def take(folder, payload):
    return written(folder, payload["name"], " ".join(str(int(payload["sha256"][at:at + 4], 16)) for at in range(64)))

def sort(folder, payload):
    read = [int(word) for path in payload["paths"] for word in (folder / path).read_text().split()]
    return written(folder, payload["name"], " ".join(map(str, sorted(read))))

def add(folder, payload):
    read = [int(word) for path in payload["paths"] for word in (folder / path).read_text().split()]
    return written(folder, payload["name"], str(sum(value for value in read if value % 10 == payload["digit"])))

def body(work):
    _, shards = work.input("shard")
    def units(names, **payloads):
        return [Unit(name, {"name": name, **{key: value[at] for key, value in payloads.items()}})
                for at, name in enumerate(names)]
    def done(phase, of, function):
        return [record["outputs"][0] for record in work.do_units(phase, of, function)]
    tars = [record for record in shards.outputs if record["path"].endswith(".tar")]
    hashes = [record["sha256"] for record in tars]
    taken = done("take", units([f"taken-{at:05d}" for at in range(len(tars))], sha256=hashes), take)
    groups = [taken[at:at + 2] for at in range(0, len(taken), 2)]
    ordered = done("sort", units([f"sorted-{at}" for at in range(len(groups))], hashes=[
        [record["sha256"] for record in group] for group in groups], paths=[
        [record["path"] for record in group] for group in groups]), sort)
    sums = done("add", units([f"sum-{digit}" for digit in range(10)], digit=list(range(10)), hashes=10 * [
        sha256_json([record["sha256"] for record in ordered])], paths=10 * [
        [record["path"] for record in ordered]]), add)
    work.commit([*taken, *ordered, *sums], {"shards": len(tars)})

if __name__ == "__main__":
    sys.exit(stage_main("digits", body))
'''
"""Three phases over the shards, each made of what the one before made."""


def test_eight_elements_and_three_phases_give_the_bytes_of_one_process(
        cluster: Cluster, tmp_path: Path, corpus: Path, encoded: Path) -> None:
    (tmp_path / "digits.py").write_text(DIGITS)
    config = write_config(tmp_path, corpus, plugins=["digits.py"], launch={"processes": 1})
    for name in ("many", "one"):
        for stage in ("shard", "tokenizer"):
            shutil.copytree(encoded.parent / "runs/mini" / stage, tmp_path / "runs" / name / stage)
    command = (sys.executable, REPOSITORY / "launch/submit.py", "--config", config, "--stage", "encode,digits")
    cluster.run(*command, "--cluster", "lab", "name=many", "--nodes", "8", "launch.preflight=false", cwd=tmp_path)
    wait_for(lambda: not cluster.run("squeue", "--noheader").stdout.strip())
    many, one = tmp_path / "runs/many", tmp_path / "runs/one"
    chain = read_chain(many)
    assert chain is not None
    story = "\n".join(path.read_text(errors="replace")[-2000:] for path in many.glob("logs/**/*") if path.is_file())
    assert [(job.stage, job.kind, job.phase, len(job.elements or ())) for job in chain.jobs] == [
        ("encode", "array", "encode", 8), ("encode", "finalise", "", 0), ("digits", "array", "take", 8),
        ("digits", "array", "sort", 8), ("digits", "array", "add", 8), ("digits", "finalise", "", 0)], story
    cluster.run(*command, "--cluster", "local", "name=one", cwd=tmp_path, variables={
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY)])})
    for stage, phases in (("encode", STAGES["encode"].phases), ("digits", ("take", "sort", "add"))):
        ours, theirs = read_manifest(many / stage), read_manifest(one / stage)
        assert ours is not None and theirs is not None, story
        assert ours.outputs == theirs.outputs and ours.counts == theirs.counts and len(ours.outputs) > 4
        for record in ours.outputs:
            assert (many / stage / record["path"]).read_bytes() == (one / stage / record["path"]).read_bytes()
        markers = {path.name for path in (many / stage / "units/parts").glob("*-of-8.json")}
        assert markers == {f"{phase}.{index}-of-8.json" for phase in phases for index in range(8)}, "each said so"
