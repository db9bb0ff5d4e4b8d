"""The data stages shared out over the elements of arrays, phase after phase: the bytes are those of one process."""

import shutil
import sys

import pytest
import yaml

from drover.launch.slurm.chain import read_chain
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.stages import STAGES
from tests.conftest import REPOSITORY
from tests.dirty_corpus import every_pass, write_dirty
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
SPEED = "encode_mb_per_s"
"""Of what is counted, the only thing that is not the same each time."""
DATA = ("shard", "tokenizer", "encode")
ELEMENTS = (0, 1, 2)


def test_elements_of_every_pass_over_dirty_files_give_the_bytes_of_one_process(cluster, tmp_path):
    """One element is killed; what waits for the array goes. The same command does that element, and the rest."""
    write_dirty(tmp_path)
    repaired, wrapper, config = tmp_path / "repaired", tmp_path / "wrapper", tmp_path / "config.yaml"
    wrapper.write_text('#!/bin/sh\ncase "$*" in *"--part 1/3 --phase encode"*) '
                       f'[ -e {repaired} ] || kill -9 $$;; esac\nexec "$@"\n')
    wrapper.chmod(0o755)
    config.write_text(yaml.safe_dump({
        "name": "one", "runs_dir": str(tmp_path / "runs"), "shard": every_pass(tmp_path),
        "tokenizer": {"vocab_size": 1024}, "launch": {"processes": 1, "preflight": False, "max_restarts": 0}}))
    many, one = tmp_path / "runs/many", tmp_path / "runs/one"
    command = (sys.executable, REPOSITORY / "launch/submit.py", "--config", config, "--stage", ",".join(DATA))

    def submitted():
        cluster.run(*command, "--cluster", "lab", "name=many", "--nodes", "3", f"launch.wrap=[{wrapper}]", cwd=tmp_path)
        wait_for(cluster.is_idle)
        return read_chain(many)

    def states(chain):
        return {f"{job.stage} {job.phase or job.kind}": [
            cluster.state(f"{job.id}_{element}" if job.elements else job.id) for element in job.elements or (0,)]
            for job in chain.jobs}

    first = submitted()
    story = "\n".join(path.read_text(errors="replace")[-2000:] for path in many.glob("logs/**/*") if path.is_file())
    done = {f"shard {phase}": ["COMPLETED"] * 3 for phase in STAGES["shard"].phases}
    assert states(first) == {
        **done, "shard finalise": ["COMPLETED"], "tokenizer job": ["COMPLETED"],
        "encode encode": ["COMPLETED", "FAILED", "COMPLETED"], "encode finalise": ["CANCELLED"]}, story
    assert all(job.elements == ELEMENTS for job in first.jobs if job.kind == "array")
    array = first.jobs[-2].id
    assert ": killed" in (many / f"launch/submitit/{array}_1_0_log.out").read_text()
    before = token_shards(many)
    repaired.touch()
    second = submitted()
    assert [(job.kind, job.elements) for job in second.jobs] == [("array", ELEMENTS), ("finalise", None)]
    assert states(second) == {"encode encode": ["COMPLETED"] * 3, "encode finalise": ["COMPLETED"]}
    after = token_shards(many)
    assert before and before.items() < after.items(), "kept, and more"

    cluster.run(*command, "--cluster", "local", cwd=tmp_path)
    for stage in DATA:
        ours, theirs = read_manifest(many / stage), read_manifest(one / stage)
        assert ours.outputs == theirs.outputs, story
        assert {**ours.counts, SPEED: 0} == {**theirs.counts, SPEED: 0}
    counts = read_manifest(one / "shard").counts
    assert all(counts["dropped"].values()) and counts["validation"] and counts["rejected"], "every pass had work"


def token_shards(run):
    """When encode's token shards were written, by path."""
    return {path: path.stat().st_mtime_ns for path in (run / "encode").rglob("*.arrow")}


def test_an_element_whose_runner_is_killed_restarts_alone(cluster, tmp_path, encoded):
    """The one whose id equals the array's, which means all of them to Slurm."""
    starts, config = tmp_path / "starts", tmp_path / "config.yaml"
    # The shell of the script becomes the runner's parent.
    killer = f"""if [ -n "$SLURM_ARRAY_TASK_ID" ]; then
echo $SLURM_ARRAY_TASK_ID ${{SLURM_RESTART_COUNT:-0}} >> {starts}
if [ $SLURM_JOB_ID = $SLURM_ARRAY_JOB_ID ] && mkdir {tmp_path}/killed; then
  parent=$$; (until pkill -9 -P $parent -f submitit.core._submit; do sleep 0.02; done) &
fi
fi"""
    mini = yaml.safe_load(encoded.read_text())
    config.write_text(yaml.safe_dump({**mini, "runs_dir": str(tmp_path / "runs"), "launch": {
        "processes": 1, "setup": [killer]}}))
    shutil.copytree(encoded.parent / "runs/mini", tmp_path / "runs/mini", symlinks=True)
    cluster.run(sys.executable, REPOSITORY / "launch/submit.py", "--config", config, "--stage", "encode", "--cluster",
                "lab", "launch.encode.array=3", "--force", cwd=tmp_path)
    wait_for(cluster.is_idle)
    assert sorted(starts.read_text().splitlines()) == ["0 0", "1 0", "2 0", "2 1"]
    assert read_manifest(tmp_path / "runs/mini/encode") is not None
