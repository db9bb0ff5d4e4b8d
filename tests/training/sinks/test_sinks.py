"""Each sink that ships, told of two starts of one training, of which the second does a step again.

TensorBoard's files are read back. W&B and MLflow, which are not among the test tools, have stand-ins that note calls.
"""

import json
import os
import sys
import time
from collections import namedtuple
from types import SimpleNamespace
from unittest.mock import ANY, MagicMock, call, patch

import pytest

from drover.pipeline.config.shipped import SINKS
from drover.pipeline.core.files import read_lines
from drover.pipeline.training.sinks.base import About, JsonLines, TrainingLog, checkpoint_curves, curves
from tests.training.sinks.reading import board_points
from tests.waiting import wait_for

SETTINGS = {"name": "mine", "seed": 3, "model": {"dim": 32}, "train": {"lr": 0.001, "prompts": ["def "]}}
KEY = "0123456789abcdef0123456789abcdef01234567"


def record(step, loss, **more):
    return {"step": step, "loss": loss, "lr": 0.5, "samples": [0, 16], "mfu": None, "time": 1.0, "train_s": step,
            **more}


def start(folder, said, *sinks, steps, first_step=0, end="finish"):
    """One start of a training, which is told some (step, loss), with a checkpoint, a text and held-out loss at the
    last."""
    lines = JsonLines(folder / "train")
    log = TrainingLog(lines, About("mine", folder, folder / "train", first_step, lines.told, SETTINGS),
                      [SINKS.read(sink) for sink in sinks], said.append)
    log.tell("event", "resume" if first_step else "start", {"step": first_step})
    for step, loss in steps:
        log.tell("step", record(step, loss, **({"heldout_bpb": {"code": 2.5}} if (step, loss) == steps[-1] else {})))
    log.tell("event", "checkpoint", {"step": steps[-1][0], "stall_s": 0.25, "seconds": 1.5, "path": "x"})
    log.tell("sample", steps[-1][0], "def (", f"text {steps[-1][1]}")
    if end:
        log.tell("event", end, {"step": steps[-1][0]})
    log.close()


@pytest.fixture(autouse=True)
def environment():
    """It is put back as it was: sinks set variables."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def two_starts(tmp_path, monkeypatch):
    """Tell sinks of steps 1 to 3, and after a kill of steps 3 and 4; the run folder. None may fail."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", KEY)

    def told(*sinks):
        said = []
        start(tmp_path, said, *sinks, steps=[(1, 4.0), (2, 3.0), (3, 2.0)], end=None)
        ended = int(time.time())
        wait_for(lambda: int(time.time()) > ended)  # TensorBoard orders its files by the second
        start(tmp_path, said, *sinks, steps=[(3, 1.75), (4, 1.5)], first_step=2)
        assert said == []
        for path in (path for path in tmp_path.rglob("*") if path.is_file()):
            assert KEY.encode() not in path.read_bytes(), path
        return tmp_path
    return told


STEPS = [(1, 4.0), (2, 3.0), (3, 2.0), (3, 1.75), (4, 1.5)]


def test_json_lines_go_on_after_a_torn_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    lines = JsonLines(tmp_path)
    assert (lines.torn_bytes, lines.told) == (15, 1)
    lines.step({"step": 2})
    lines.close()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_tensorboard_drops_what_is_done_again(two_starts):
    board = two_starts("tensorboard") / "tensorboard"
    assert board_points(board, "train/loss") == [(1, 4.0), (2, 3.0), (3, 1.75), (4, 1.5)]
    assert board_points(board, "validation/bits_per_byte/code") == [(4, 2.5)]
    assert board_points(board, "checkpoint/stall_s") == [(4, 0.25)]


def test_wandb_continues_one_run_in_rows_that_only_grow(two_starts, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := MagicMock())
    folder = two_starts({"kind": "wandb", "project": "ours"})
    same = {"id": json.loads((folder / "train/wandb.json").read_text())["id"], "project": "ours", "name": "mine",
            "mode": "offline", "resume": "allow", "dir": str(folder)}
    assert [start.kwargs | same for start in wandb.init.call_args_list] == [
        start.kwargs for start in wandb.init.call_args_list] and wandb.init.call_count == 2
    run = wandb.init.return_value
    rows, places = zip(*((each.args[0], each.kwargs["step"]) for each in run.log.call_args_list), strict=True)
    assert list(places) == sorted(set(places)), "W&B drops what is not further on"
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == STEPS
    assert [row["samples/1"] for row in rows if "samples/1" in row] == ["def (text 2.0", "def (text 1.5"]
    assert run.finish.call_args_list == [call(exit_code=1), call(exit_code=0)]


@pytest.fixture
def mlflow(monkeypatch):
    """The client of a server without experiments."""
    monkeypatch.setitem(sys.modules, "mlflow", found := MagicMock())
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(
        Metric=namedtuple("Metric", "key value timestamp step"), Param=namedtuple("Param", "key value")))
    client = found.MlflowClient.return_value
    client.get_experiment_by_name.return_value, client.create_run.return_value.info.run_id = None, "one"
    return client


def test_mlflow_continues_one_run(two_starts, mlflow):
    two_starts({"kind": "mlflow", "experiment": "ours"})
    mlflow.create_experiment.assert_called_once_with("ours")
    mlflow.create_run.assert_called_once_with(ANY, run_name="mine")
    mlflow.update_run.assert_called_once_with("one", status="RUNNING")
    logged = [entry for batch in mlflow.log_batch.call_args_list for entry in next(iter(batch.kwargs.values()))]
    assert {entry.key: entry.value for entry in logged if not hasattr(entry, "step")} == {
        "name": "mine", "seed": "3", "model.dim": "32", "train.lr": "0.001", "train.prompts.0": "def "}
    assert [(entry.step, entry.value) for entry in logged if entry.key == "train/loss"] == STEPS
    assert mlflow.set_tag.call_args == call("one", "sample 1", "after step 4: def (text 1.5")
    assert mlflow.set_terminated.call_args_list == [call("one", status="FAILED"), call("one", status="FINISHED")]


def test_mlflow_is_told_of_a_stop(tmp_path, mlflow):
    start(tmp_path, said := [], "mlflow", steps=[(1, 4.0)], end="stop")
    assert mlflow.set_terminated.call_args == call("one", status="KILLED") and not said


def test_curves_are_the_numbers_that_can_be_drawn():
    assert curves(record(2, "nan", skipped="nonfinite", tokens=7, heldout_bpb={"a": 1, "b": 2.5})) == {
        "train/lr": 0.5, "train/tokens": 7.0, "validation/bits_per_byte/a": 1.0, "validation/bits_per_byte/b": 2.5}
    assert checkpoint_curves("checkpoint", {"step": 2, "stall_s": 1, "path": "x"}) == {"checkpoint/stall_s": 1.0}
    assert checkpoint_curves("checkpoint_copied", {"step": 2, "bytes": 9, "seconds": 2.5, "behind_s": 4}) == {
        "checkpoint/copy_bytes": 9.0, "checkpoint/copy_seconds": 2.5, "checkpoint/copy_behind_s": 4.0}
    assert checkpoint_curves("stop", {"step": 2, "stall_s": 1}) == {}
