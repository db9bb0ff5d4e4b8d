"""Checkpoints are scored while training runs, and both are killed: each score is that of the stage, and made once."""

import os
import random
import re
import shlex
import shutil
import signal
import time

import pytest

from drover.launch.status import main as status
from drover.launch.submit import run as launch
from drover.pipeline.config.loading import load_config, save_config
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.manifest import MANIFEST, read_manifest
from drover.pipeline.contract.stages import WATCH as WATCH_JOB
from drover.pipeline.contract.state import StageJob, log_attempt, read_attempts, read_state
from drover.pipeline.core.console import INTERRUPTED
from drover.pipeline.core.files import read_json, read_lines
from drover.pipeline.records.checkpoint_scores import read_scores
from drover.pipeline.records.checkpoints import SCORES
from drover.pipeline.records.goodput import VALIDATION, goodput
from drover.pipeline.records.metrics import RunFacts, read_metrics
from tests.conftest import REPOSITORY, environment, run_stage, warm_server
from tests.pages import commands
from tests.refusal import printed
from tests.slurm.conftest import cluster, training, undisturbed  # noqa: F401 - fixtures
from tests.slurm.faults import job_processes
from tests.stages.small_run import item, write_task
from tests.stages.training import (
    CURVE,
    copy_run,
    descendants,
    kill,
    lines,
    reusing,
    run_train,
    started,
    train_folder,
)
from tests.training.test_sinks import board_of, points
from tests.waiting import HANG_S, process_words, wait_for

WATCH, ONCE = (shlex.split(command)[3:] for command in commands("evaluation") if "drover evaluate" in command)
"""The options in docs/evaluation.md."""
STEPS = [4, 8, 12]


@pytest.fixture(scope="session")
def trained(tmp_path_factory, encoded):
    """Config of a trained run, which keeps one checkpoint and those that are to be scored."""
    folder = tmp_path_factory.mktemp("scored")
    for name in ("one", "two"):
        write_task(folder, name, *(item(number, number % 3) for number in range(4)))
    config = reusing(encoded, folder, train={"checkpoint": {"every_steps": 2, "keep": 1}}, evaluate={
        "every": 4, "tasks": ["one", "two"], "task_folders": [str(folder)]})
    with evaluating_elsewhere(config):
        run_train(config)
    return config


@pytest.fixture
def run(trained, tmp_path):
    """The same for a test alone."""
    return copy_run(trained, tmp_path)


def evaluating_elsewhere(config):
    """The lock of an evaluator, for which training does not pause."""
    return lock(config.parent / "runs/mini", SCORES)


def evaluator(config, options=ONCE, ranks=1):
    return warm_server().start(["drover.pipeline.watch", str(config.parent / "runs/mini"), *options], environment(),
                               ranks=ranks)


def finished(process):
    output = "".join(process.communicate(HANG_S))
    assert process.wait(HANG_S) == 0, output
    return output


def assert_scored_once(config, drawn=True, parts=("task one", "task two", "validation text")):
    """All checkpoints are, and no part of one was measured twice; the curve has them if all are `drawn`. The scores."""
    scores = read_scores(train_folder(config))
    ledger = (train_folder(config) / "scores/measured").glob("*.jsonl")
    assert sorted(line["task"] for path in ledger for line in read_lines(path, appended=True)) == sorted(
        3 * parts)
    assert not drawn or points(board_of(config.parent / "runs/mini"), "validation/bits_per_byte") == [
        (entry.step, pytest.approx(entry.validation["overall"]["bits_per_byte"])) for entry in scores]
    assert [entry.step for entry in scores] == STEPS
    return scores


def test_checkpoints_wait_for_their_scores_which_are_those_of_the_stage(run, capsys):
    """A kill of the evaluator costs the part that it hit. The last checkpoint is the model that is exported."""
    checkpoints = train_folder(run) / "checkpoints"
    assert len([*checkpoints.iterdir()]) == len(STEPS)
    chance = random.Random(5)
    for seconds in (chance.uniform(0, 4) for _ in range(3)):
        process = evaluator(run)
        time.sleep(seconds)
        kill(process)
    finished(evaluator(run))
    assert finished(evaluator(run)).strip() == "evaluate  0 checkpoints scored", "none is due"
    first, second, last = read_scores(train_folder(run))
    assert (first.tokens, second.flops) == (4096, 2 * first.flops) and first.validation != second.validation
    assert "scored 3 checkpoints" in printed(capsys, status, run.parent / "runs/mini")
    for stage in ("convert", "evaluate"):
        run_stage(stage, run)
    expected = read_json(run.parent / "runs/mini/evaluate/results.json")
    assert last.tasks == expected["tasks"]
    assert last.validation["overall"]["nats"] == expected["validation"]["overall"]["nats"]
    run_train(run, "train.steps=16", "evaluate.every=null", "--accept-changes")
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000016"]


@pytest.mark.slow
def test_two_ranks_that_shard_the_weights_score_the_same(run):
    finished(evaluator(run))
    alone = assert_scored_once(run)
    shutil.rmtree(train_folder(run) / "scores")
    save_config(load_config(run, ["evaluate.dp_shard=2"]), run.parent / "runs/mini/config.yaml")
    assert "weights sharded over 2 ranks" in finished(evaluator(run, ranks=2))
    assert read_scores(train_folder(run)) == alone


def test_beside_a_training_that_is_killed(run):
    """Training logs each score once, and the evaluator the rest."""
    train_folder(run).rename(run.parent / "before")
    watching = evaluator(run, WATCH)
    wait_for(lambda: f"process {watching.pid} " in (run.parent / "runs/mini/.locks" / SCORES).read_text(), of=watching)
    chance = random.Random(3)
    for seconds in (chance.uniform(1, 3) for _ in range(3)):
        with started(run) as process:
            wait_for(train_folder(run).is_dir, of=process)
            time.sleep(seconds)
    run_train(run)
    assert "waits for the next checkpoint at a multiple of 4 steps" in finished(watching)
    assert_scored_once(run)
    logged = [event["step"] for event in lines(run, log="events") if event["event"] == "scored"]
    assert logged == sorted({*logged})


def test_training_pauses_for_its_scores_if_no_evaluator_runs(run):
    """It and the evaluator are killed: it learns the same, and each checkpoint is scored once."""
    expected = [[line.get(name) for name in CURVE] for line in lines(run)]
    train_folder(run).rename(run.parent / "before")

    def evaluators(process):
        return [pid for pid in descendants(process.pid) if "multiprocessing.spawn" in " ".join(process_words(pid))]
    with started(run) as process:  # kills the evaluator with it
        wait_for(lambda: evaluators(process), of=process)
        time.sleep(1)
    with started(run) as process:
        wait_for(lambda: evaluators(process), of=process)
        os.kill(evaluators(process)[0], signal.SIGKILL)
        wait_for(lambda: len(lines(run)) >= 4 and lines(run)[-1]["step"] > 4, of=process)
    assert "step-00000012" not in run_train(run).stdout, "the stage evaluate measures the last one"
    assert finished(evaluator(run)).strip().endswith("1 checkpoint scored")
    assert_scored_once(run, drawn=False)
    steps = read_metrics(train_folder(run) / "metrics.jsonl")
    assert [[line.get(name) for name in CURVE] for line in steps] == expected
    assert [path.name for path in (train_folder(run) / "checkpoints").iterdir()] == ["step-00000012"]
    last = next(event for event in lines(run, log="events") if event["event"] == "finish")
    assert goodput(RunFacts(run.parent / "runs/mini")).lost[VALIDATION] >= last["look_s"] > 0


def test_as_a_job_it_leaves_the_records_of_a_stage(run):
    """It scores what is there and ends where training has ended for good, and is done where training is."""
    folder, job = run.parent / "runs/mini", StageJob("chain", 1, 1)
    options = [*WATCH, "--config", str(run), "--job", str(job)]
    (train_folder(run) / MANIFEST).rename(run.parent / MANIFEST)
    log_attempt(folder, "ended", job="7", stage="train", chain="chain", start=1, next="stop")
    process = evaluator(run, options)
    assert "stopped (training ended before it was done)" in "".join(process.communicate(HANG_S))
    state = read_state(folder / WATCH_JOB)
    assert (process.returncode, state.status, state.again, state.attempt) == (INTERRUPTED, "preempted", False, 1)
    (run.parent / MANIFEST).rename(train_folder(run) / MANIFEST)
    finished(evaluator(run, options))
    assert [entry.step for entry in read_scores(train_folder(run))] == STEPS
    assert read_manifest(folder / WATCH_JOB).counts == {"checkpoints": 0}
    assert read_state(folder / WATCH_JOB).status == "done"


def test_the_plan_for_slurm_has_a_job_that_scores_checkpoints(tmp_path, capsys):
    """It has what the stage evaluate requests, and begins with training."""
    shown = printed(capsys, launch, REPOSITORY / "configs/demo.yaml", "--cluster", "slurm", "--dry-run",
                    f"runs_dir={tmp_path}", "evaluate.every=60", "launch.evaluate.cpus=3")
    jobs = dict(re.findall(r"# ---- (\w+):.*\n(?:#.*\n)?((?:.+\n)*)", shown))
    assert "dependency: after:ID_OF_train" in jobs["watch"] and "cpus_per_task: 3" in jobs["watch"]
    assert [name for name in jobs if "ID_OF_train" in jobs[name]] == ["watch", "convert"]
    assert "drover.pipeline.watch" in shown and "watch" not in printed(
        capsys, launch, REPOSITORY / "configs/demo.yaml", "--cluster", "slurm", "--dry-run", f"runs_dir={tmp_path}")


@pytest.mark.slow
def test_the_chain_scores_checkpoints_in_a_job_of_its_own(training, tmp_path):  # noqa: F811
    """On Slurm, beside a training that does not pause. Both are killed."""
    write_task(tmp_path, "one", *(item(number, number % 3) for number in range(4)))
    run = training(train={"steps": 12, "checkpoint": {"every_steps": 2, "keep": 1}}, evaluate={
        "every": 4, "tasks": ["one"], "task_folders": [str(tmp_path)]})
    run.submit(nodes=1)
    run.next_wait()
    os.kill(run.next(lambda: [
        pid for pid in job_processes(run.cluster) if "drover.pipeline.watch" in process_words(pid)[2:3]],
        "an evaluator")[0], signal.SIGKILL)
    os.kill(run.rank(0), signal.SIGKILL)
    run.go_on(to_the_end=True)
    run.wait_until_gone()
    assert [run.cluster.state(run.job(stage)) for stage in ("train", "watch")] == ["COMPLETED"] * 2, run.story()
    assert_scored_once(run.config, parts=("task one", "validation text"), drawn=False)
    assert "crashed" in [event.get("status") for event in read_attempts(run.run) if event["stage"] == "watch"]
    assert "paused" not in run.output()
