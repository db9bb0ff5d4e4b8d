"""A training job that cannot go on says why, and evaluations beside one never hold it up."""

import pytest

from drover.launch.slurm.chain import read_chain
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.files import read_json
from drover.pipeline.records.pending_evaluations import evaluation_record
from tests.faulty import PLUGIN

pytestmark = pytest.mark.slow


def test_a_hang_is_named_and_starts_that_bring_nothing_end_with_the_reason(training):
    """Rank 1 hangs; started again, it crashes at the same step, before there is a checkpoint. The chain ends there."""
    run = training(faults="hang:rank=1,step=3; exit:rank=1,step=3,again=1",
                             train={"guards": {"hang_minutes": 0.3}}, launch={"max_restarts": 1})
    run.submit(stages="train,convert")
    run.wait_until_gone()
    hung, crashed = run.ends
    assert (hung.status, hung.next) == ("hung", "restart"), run.story()
    assert f"rank 1 ({run.starts[0]['nodes'][1]})" in hung.reason
    assert (crashed.status, crashed.next, run.state.status) == ("crashed", "stop", "failed")
    assert "2 starts in a row" in run.state.reason and "rank 1" in run.state.reason
    assert read_manifest(run.run / "convert") is None
    assert [run.cluster.state(run.job(stage)) for stage in ("train", "convert")] == ["FAILED", "CANCELLED"]
    run.check_curve()


def test_a_spare_node_replaces_one_that_fails_the_preflight(training):
    """In the same job, which is not queued again. The job that waits to continue is not waited for at the end."""
    run = training(launch={"train": {"spare_nodes": 1, "links": 2}, "preflight": True, "health_check": [
        "sh", "-c", "test $SLURMD_NODENAME != n2 || { echo n2 is ill; exit 1; }"]})
    run.submit("launch.exclude=n[4-5]", stages="train,convert")
    run.next_wait()
    assert (run.last["nodes"], run.last["restart"]) == (["n1", "n3"], 0), run.story()
    assert "preflight: n2 is bad: " in run.log() and "n2 is ill" in run.log()
    run.finish()
    assert [run.cluster.state(run.job(*which)) for which in (("train", 0), ("train", 1), ("convert", 0))] == [
        "COMPLETED", "CANCELLED", "COMPLETED"], run.story()


def test_checkpoints_are_evaluated_in_jobs_of_their_own_that_never_hold_training_up(training, tmp_path):
    """They are submitted while training waits for them, it ends though none of them can start, and then they do. Each
    imports the plugin of the submission."""
    (tmp_path / "noted.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "Path(__file__).with_name(f\"imported-{os.environ.get('SLURM_JOB_ID')}\").touch()\n")
    run = training(train={"steps": 12}, launch={"evaluate": {"every_checkpoints": 1}})
    barrier = run.ask("sbatch", "--hold", "--parsable", "--output=/dev/null", "--wrap=true")
    run.submit(f"launch.evaluate.extra={{dependency: 'afterany:{barrier}'}}",
               f"plugins=[{tmp_path}/noted.py, {PLUGIN['plugins'][0]}]",
               nodes=1)

    def evaluations():
        chain = read_chain(run.run)
        return {int(job.name[-8:]): job.id for job in chain.jobs if job.kind == "evaluation" and not job.dependencies}

    for _ in range(2):
        step = run.next_wait()
        run.next(lambda: step - 2 in evaluations(), "the evaluation of the newest checkpoint")  # noqa: B023
        run.go_on()
    assert run.next_end().status == "done", run.story()
    jobs = evaluations()
    for step, job in jobs.items():
        assert run.log().index(f"the checkpoint of step {step} is evaluated by job {job}") < run.log().index(
            "train is done")
        assert run.cluster.state(job) == "PENDING Dependency" and not evaluation_record(run.run, step).exists()
    run.ask("scontrol", "release", barrier)
    run.wait_until_gone()
    assert sorted(jobs) == [4, 8]
    found = [read_json(evaluation_record(run.run, step))["counts"]["bits_per_byte"] for step in (4, 8)]
    assert found[0] > found[1] > 0
    assert all((tmp_path / f"imported-{job}").exists() for job in jobs.values())
