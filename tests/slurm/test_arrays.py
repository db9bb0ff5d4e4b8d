"""The data stages shared by the elements of arrays: the bytes are those of one process."""

import shutil
import sys

import pytest
import yaml

from drover.launch.slurm.chain import read_chain
from drover.pipeline.contract.manifest import read_manifest
from tests.conftest import REPOSITORY
from tests.dirty_corpus import every_pass, write_dirty
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
SPEED = "encode_mb_per_s"
"""Of what is counted, the only thing that is not the same each time."""
DATA = ("shard", "tokenizer", "encode")
ELEMENTS = (0, 1, 2)


def test_elements_over_dirty_files_give_the_bytes_of_one_process(cluster, tmp_path):
    """An element that fails for good leaves its work to the others. What waits for the array goes; the same command
    continues."""
    write_dirty(tmp_path)
    wrapper, config = tmp_path / "wrapper", tmp_path / "config.yaml"
    wrapper.write_text('#!/bin/sh\ncase "$*" in *"pipeline.encode "*"_1") sleep 2; kill -9 $$;; esac\nexec "$@"\n')
    wrapper.chmod(0o755)
    config.write_text(yaml.safe_dump({
        "name": "one", "runs_dir": str(tmp_path / "runs"), "shard": every_pass(tmp_path),
        "tokenizer": {"vocab_size": 1024}, "launch": {"processes": 1, "preflight": False, "max_restarts": 0}}))
    many, one = tmp_path / "runs/many", tmp_path / "runs/one"
    command = (sys.executable, REPOSITORY / "launch/submit.py", "--config", config, "--stage", ",".join(DATA))
    cluster.run(*command, "--cluster", "lab", "name=many", "--nodes", "3", f"launch.wrap=[{wrapper}]", cwd=tmp_path)
    wait_for(cluster.is_idle)
    chain = read_chain(many)
    story = "\n".join(path.read_text(errors="replace")[-2000:] for path in many.glob("logs/**/*") if path.is_file())
    assert [(job.stage, job.elements, *(
        cluster.state(f"{job.id}_{element}" if job.elements else job.id) for element in job.elements or (0,)))
        for job in chain.jobs] == [
        ("shard", ELEMENTS, *["COMPLETED"] * 3), ("tokenizer", None, "COMPLETED"),
        ("encode", ELEMENTS, "COMPLETED", "FAILED", "COMPLETED")], story
    assert ": killed" in (many / f"launch/submitit/{chain.jobs[-1].id}_1_0_log.out").read_text()
    again = cluster.run(*command, "--cluster", "lab", "name=many", "--nodes", "3", cwd=tmp_path)
    assert "nothing to submit" in again.stdout

    cluster.run(*command, "--cluster", "local", cwd=tmp_path)
    for stage in DATA:
        ours, theirs = read_manifest(many / stage), read_manifest(one / stage)
        assert ours.outputs == theirs.outputs, story
        assert {**ours.counts, SPEED: 0} == {**theirs.counts, SPEED: 0}
    counts = read_manifest(one / "shard").counts
    assert counts["filters"]["duplicate_lines"]["changed"] and counts["dropped"].pop("duplicate_lines") == 0
    assert all(counts["dropped"].values()) and counts["validation"] and counts["rejected"], "every pass had work"


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
