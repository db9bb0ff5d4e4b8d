"""Checkpoints are scored while training runs, and both are killed: each score is that of the stage, and made once."""

import random
import shlex
import shutil
import time
from collections import Counter

import pytest

from drover.launch.status import main as status
from drover.pipeline.config.loading import load_config, save_config
from drover.pipeline.core.files import Ledger, read_json
from drover.pipeline.evaluation.checkpoint_scores import SCORED, read_scores
from tests.conftest import environment, run_stage, warm_server
from tests.pages import commands
from tests.refusal import printed
from tests.stages.small_run import item, write_task
from tests.stages.training import copy_run, events, kill, reusing, run_train, started, train_folder
from tests.training.test_sinks import board_of, points
from tests.waiting import HANG_S, wait_for

COMMANDS = [shlex.split(command)[2:] for command in commands("evaluation") if command.startswith("drover evaluate")]
WATCH, ONCE = ([*command][1:] for command in COMMANDS)
"""The options in docs/evaluation.md."""
PARTS = ["task one", "task two", "validation text"]


@pytest.fixture(scope="session")
def scored_once(tmp_path_factory, encoded):
    """Config of a run whose checkpoints are to be scored, and keeps one; nothing of it ran."""
    folder = tmp_path_factory.mktemp("scored")
    for name, golds in (("one", (0, 1, 2, 0)), ("two", (1, 1, 0))):
        write_task(folder, name, *(item(number, gold) for number, gold in enumerate(golds)))
    return reusing(encoded, folder, train={"checkpoint": {"every_steps": 2, "keep": 1}}, evaluate={
        "every": 4, "tasks": ["one", "two"], "task_folders": [str(folder)]})


@pytest.fixture(scope="session")
def unscored_once(scored_once):
    """The same, trained."""
    run_train(scored_once)
    return scored_once


@pytest.fixture
def unscored(unscored_once, tmp_path):
    """The same for a test alone."""
    return copy_run(unscored_once, tmp_path)


def evaluator(config, options=ONCE, ranks=1):
    return warm_server().start(["drover.pipeline.watch", str(config.parent / "runs/mini"), *options], environment(),
                               ranks=ranks)


def finished(process):
    output = "".join(process.communicate(HANG_S))
    assert process.wait(HANG_S) == 0, output
    return output


def scores(config):
    return read_scores(train_folder(config))


def steps_there(config):
    return [int(path.name[5:]) for path in sorted((train_folder(config) / "checkpoints").glob("step-*"))]


def measured(config):
    """How often each part of each checkpoint was measured."""
    lines = [line for path in (train_folder(config) / "scores/measured").glob("*.jsonl")
             for line in path.read_text().splitlines() if line]
    assert len(lines) == len([*Ledger(train_folder(config) / "scores/measured").lines()]), "a part is there twice"
    return Counter(name for name, _, _ in Ledger(train_folder(config) / "scores/measured").lines())


def curve(config):
    return points(board_of(config.parent / "runs/mini"), "validation/tasks/one/acc")


def test_checkpoints_wait_for_their_scores_which_are_those_of_the_stage(unscored, capsys):
    """A kill of the evaluator costs the part that it hit. The last checkpoint is the model that is exported."""
    assert steps_there(unscored) == [4, 8, 12]
    chance = random.Random(5)
    for _ in range(3):
        process = evaluator(unscored)
        time.sleep(chance.uniform(0, 4))
        kill(process)
    finished(evaluator(unscored))
    assert measured(unscored) == dict.fromkeys(PARTS, 3)
    result = scores(unscored)
    assert [entry.step for entry in result] == [4, 8, 12]
    assert [entry.tokens for entry in result] == [4096, 8192, 12288]
    assert result[1].flops == 2 * result[0].flops > 0
    assert len({entry.bits_per_byte[""] for entry in result}) == 3
    assert finished(evaluator(unscored)).strip() == "evaluate  3 checkpoints scored", "nothing is due"
    assert "scored 3 checkpoints" in printed(capsys, status, unscored.parent / "runs/mini")
    for stage in ("convert", "evaluate"):
        run_stage(stage, unscored)
    expected = read_json(unscored.parent / "runs/mini/evaluate/results.json")
    assert result[-1].bits_per_byte[""] == expected["validation"]["overall"]["bits_per_byte"]
    for name, task in result[-1].tasks.items():
        assert task == {key: expected["tasks"][name][key] for key in task}
    assert curve(unscored) == [(entry.step, pytest.approx(entry.tasks["one"]["metrics"]["acc"]["value"]))
                               for entry in [*result, result[-1]]], "and the stage's own"
    run_train(unscored, "train.steps=16", "--accept-changes")
    assert steps_there(unscored) == [16]


@pytest.mark.slow
def test_two_ranks_that_shard_the_weights_score_the_same(unscored):
    finished(evaluator(unscored))
    alone = scores(unscored)
    shutil.rmtree(train_folder(unscored) / "scores")
    save_config(load_config(unscored, ["evaluate.dp_shard=2"]), unscored.parent / "runs/mini/config.yaml")
    assert "weights sharded over 2 ranks" in finished(evaluator(unscored, ranks=2))
    assert scores(unscored) == alone


def test_beside_a_training_that_is_killed(scored_once, unscored_once, tmp_path):
    config = copy_run(scored_once, tmp_path, name="mini")
    kill_at = random.Random(3)
    (tmp_path / "runs/mini").rename(tmp_path / "alone")
    watching = None
    for _ in range(3):
        with started(config) as process:
            folder = train_folder(config)
            wait_for(folder.is_dir, of=process)
            watching = watching or evaluator(config, WATCH)
            time.sleep(kill_at.uniform(1, 3))
    run_train(config)
    output = finished(watching)
    assert "step-00000012" in output
    result = scores(config)
    assert [entry.step for entry in result] == [4, 8, 12] and measured(config) == dict.fromkeys(PARTS, 3)
    drawn = curve(config)
    assert drawn == [(entry.step, pytest.approx(entry.tasks["one"]["metrics"]["acc"]["value"])) for entry in result]
    logged = [event["step"] for event in events(config, SCORED)]
    assert logged == sorted({*logged}), "training logs each once, and the evaluator the rest"
