"""The data stages shared out over eight elements of arrays, phase after phase: the bytes are those of one process."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from launch.slurm.chain import read_chain
from pipeline.contract.manifest import read_manifest
from pipeline.contract.stages import STAGES
from pipeline.contract.state import read_attempts
from tests.conftest import REPOSITORY
from tests.dirty_corpus import every_pass, write_dirty
from tests.slurm.clusters import Cluster
from tests.waiting import wait_for

SPEED = "encode_mb_per_s"
"""Of what is counted, the only thing that is not the same each time."""
DATA = ("shard", "tokenizer", "encode")


def test_eight_elements_of_every_pass_over_dirty_files_give_the_bytes_of_one_process(
        cluster: Cluster, tmp_path: Path) -> None:
    write_dirty(tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({
        "name": "one", "runs_dir": str(tmp_path / "runs"), "shard": every_pass(tmp_path),
        "tokenizer": {"vocab_size": 1024}, "launch": {"processes": 1, "preflight": False}}))
    command = (sys.executable, REPOSITORY / "launch/submit.py", "--config", config, "--stage", ",".join(DATA))
    cluster.run(*command, "--cluster", "lab", "name=many", "--nodes", "8", cwd=tmp_path)
    wait_for(lambda: not cluster.run("squeue", "--noheader").stdout.strip())
    many, one = tmp_path / "runs/many", tmp_path / "runs/one"
    chain = read_chain(many)
    assert chain is not None
    story = "\n".join(path.read_text(errors="replace")[-2000:] for path in many.glob("logs/**/*") if path.is_file())
    arrays = [(job.stage, job.phase, len(job.elements)) for job in chain.jobs if job.kind == "array"]
    assert arrays == [(stage, phase, 8) for stage in ("shard", "encode") for phase in STAGES[stage].phases], story
    ended = sorted((event["job"], event["status"]) for event in read_attempts(many) if event["event"] == "ended")
    assert ended == sorted((f"{job.id}_{element}" if job.elements else job.id, "done")
                           for job in chain.jobs for element in job.elements or (0,)), story
    cluster.run(*command, "--cluster", "local", cwd=tmp_path)
    for stage in DATA:
        ours, theirs = read_manifest(many / stage), read_manifest(one / stage)
        assert ours is not None and theirs is not None, story
        assert ours.outputs == theirs.outputs
        assert {**ours.counts, SPEED: 0} == {**theirs.counts, SPEED: 0}
        for record in ours.outputs:
            assert (many / stage / record["path"]).read_bytes() == (one / stage / record["path"]).read_bytes()
    counts = read_manifest(one / "shard").counts
    assert all(counts["dropped"].values()) and counts["heldout"] and counts["rejected"], "every pass had work"
