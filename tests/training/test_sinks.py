"""Each logger that ships gets two starts of one training, of which the second repeats a step; its files are read back.
W&B's and MLflow's are tested where these packages are installed. A logger's errors and its slowness are not training's.
"""

import importlib.util
import json
import os
import re
import threading
import time
from types import SimpleNamespace
from unittest.mock import MagicMock, call, patch

import pytest

from drover.pipeline.config.shipped import SINKS
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import without_secrets
from drover.pipeline.core.files import read_lines
from drover.pipeline.training.sinks import (
    CURVES,
    EVENT_CURVES,
    LAYOUT,
    OTHER_CURVES,
    About,
    JsonLines,
    SinkSettings,
    TrainingLog,
    curves,
    event_curves,
    log_results,
)
from tests.reporting.picture import REPOSITORY
from tests.waiting import HANG_S, wait_for

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None,
                                 reason="the package wandb is not installed: pip install -e '.[wandb]'")
needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None,
                                  reason="the package mlflow is not installed: pip install -e '.[mlflow]'")


def board_of(folder):
    """What TensorBoard reads in a folder, as a run of that name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    return EventAccumulator(str(folder)).Reload()


def points(board, tag):
    """A TensorBoard curve."""
    return [(event.step, event.value) for event in board.Scalars(tag)]


def wandb_records(run_folder):
    """All records of the offline files in a run folder, in the order in which they were begun. Each file is a LevelDB
    log, here shorter than one of its blocks."""
    from wandb.proto.wandb_internal_pb2 import Record
    for path in sorted((run_folder / "wandb").glob("offline-run-*/run-*.wandb")):
        data = path.read_bytes()[7:]  # without the header of the file
        while data:
            end = 7 + int.from_bytes(data[4:6], "little")
            record = Record()
            record.ParseFromString(data[7:end])
            data = data[end:]
            yield record


def mlflow_run(run_folder):
    """A client of the file store in a run folder, and the one run in it."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient
    client = MlflowClient(tracking_uri=(run_folder / "mlflow").as_uri())
    [run] = [run for experiment in client.search_experiments()
             for run in client.search_runs([experiment.experiment_id])]
    return client, run


SETTINGS = {"name": "mine", "seed": 3, "model": {"dim": 32}, "train": {"lr": 0.001, "prompts": ["def "]}}
KEY = "0123456789abcdef0123456789abcdef01234567"


def record(step, loss, **more):
    return {"step": step, "loss": loss, "lr": 0.5, "samples": [0, 16], "mfu": None, "time": 1.0, "train_s": step,
            **more}


def start(folder, printed, *sinks, steps, first_step=0, end="finish"):
    """One start of a training, which is told some (step, loss), with a checkpoint, a text and validation loss at the
    last."""
    lines = JsonLines(folder / "train")
    log = TrainingLog(lines, About("mine", folder, folder / "train", first_step, lines.reported, SETTINGS),
                      [SINKS.read(sink) for sink in sinks], printed.append)
    log.write("event", "resume" if first_step else "start", {"step": first_step})
    for step, loss in steps:
        validated = {"validation_sample_bpb": {"code": 2.5}} if (step, loss) == steps[-1] else {}
        log.write("step", record(step, loss, **validated))
    log.write("event", "checkpoint", {"step": steps[-1][0], "stall_s": 0.25, "seconds": 1.5, "path": "x"})
    log.write("sample", steps[-1][0], "def (", f"text {steps[-1][1]}")
    if end:
        log.write("event", end, {"step": steps[-1][0]})
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

    def log_to(*sinks):
        printed = []
        start(tmp_path, printed, *sinks, steps=[(1, 4.0), (2, 3.0), (3, 2.0)], end=None)
        ended = int(time.time())
        wait_for(lambda: int(time.time()) > ended)  # TensorBoard orders its files by the second
        start(tmp_path, printed, *sinks, steps=[(3, 1.75), (4, 1.5)], first_step=2)
        assert printed == []
        for path in (path for path in tmp_path.rglob("*") if path.is_file()):
            assert KEY.encode() not in path.read_bytes(), path
        return tmp_path
    return log_to


STEPS = [(1, 4.0), (2, 3.0), (3, 2.0), (3, 1.75), (4, 1.5)]


def test_json_lines_go_on_after_a_torn_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    lines = JsonLines(tmp_path)
    assert (lines.torn_bytes, lines.reported) == (15, 1)
    lines.step({"step": 2})
    lines.close()
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_tensorboard_drops_what_is_done_again_and_shows_first_what_people_look_at(two_starts):
    """By names that it sorts, by its layout, and in its table of runs; and the sample texts under their numbers."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data

    board = board_of(two_starts("tensorboard"))
    for tag, expected in (("train/loss", [(1, 4.0), (2, 3.0), (3, 1.75), (4, 1.5)]),
                          ("validation/sample/bits_per_byte/code", [(4, 2.5)]),
                          ("watch/checkpoint_stall_s", [(4, 0.25)])):
        assert points(board, tag) == expected
    assert sorted(board.Tags()["scalars"]) == ["train/loss", "train/lr", "validation/sample/bits_per_byte/code",
                                               "watch/checkpoint_s", "watch/checkpoint_stall_s"]
    assert sorted(CURVES.values())[:5] == ["train/loss", "train/lr", "train/norm_of_gradient", "train/tokens_per_s",
                                           "validation/bits_per_byte"]
    assert max(CURVES[name] for name in ("tokens_per_s", "task_scores")) < OTHER_CURVES
    [layout] = board.Tensors("custom_scalars__config__")[:1]
    chart = Layout.FromString(layout.tensor_proto.string_val[0]).category[0].chart[0]
    assert list(chart.multiline.tag) == ["train/loss$", "validation/sample/loss/"]
    [settings] = board.PluginTagToContent("hparams").values()
    assert {name: value.number_value or value.string_value for name, value in
            parse_session_start_info_plugin_data(settings).hparams.items()} == {
        "seed": 3, "model.dim": 32, "train.lr": 0.001, "train.prompts.0": "def "}
    assert board.Tensors("samples/1")[-1].tensor_proto.string_val == [b"    def (text 1.5"]


def test_every_curve_is_in_the_reference_and_every_chart_has_one():
    page = (REPOSITORY / "docs/reference.md").read_text()
    names = [*CURVES.values(), *(curve for of_event in EVENT_CURVES.values() for curve in of_event.values())]
    assert [name for name in names if f"`{name}" not in page] == []
    drawn = curves({**{name: {"code": 1.0} if "sample" in name else 1.0 for name in CURVES}, "step_s": 1.0})
    for tag in (tag for charts in LAYOUT.values() for tags in charts.values() for tag in tags):
        assert any(re.match(tag, name) for name in drawn), tag


@needs_wandb
def test_wandb_continues_one_run_offline(two_starts):
    folder = two_starts({"kind": "wandb", "project": "ours"})
    records = list(wandb_records(folder))
    rows = [{".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for record in records if record.WhichOneof("record_type") == "history"]
    shown = {name: [row[name] for row in rows if name in row]
             for name in ("_step", "train/loss", "samples/1", "watch/checkpoint_stall_s",
                          "validation/sample/bits_per_byte/code")}
    assert shown == {"_step": sorted({row["_step"] for row in rows}), "train/loss": [loss for _, loss in STEPS],
                     "samples/1": ["def (text 2.0", "def (text 1.5"], "watch/checkpoint_stall_s": [0.25, 0.25],
                     "validation/sample/bits_per_byte/code": [2.5, 2.5]}, "W&B drops what is not further on"
    runs = [item.run for item in records if item.WhichOneof("record_type") == "run"]
    identity = json.loads((folder / "train/wandb.json").read_text())["id"]
    assert {(run.run_id, run.project, run.display_name) for run in runs} == {(identity, "ours", "mine")}
    assert [item.exit.exit_code for item in records if item.WhichOneof("record_type") == "exit"] == [1, 0]


@needs_wandb
def test_wandb_has_the_results_of_the_finished_model_in_the_runs_summary(tmp_path):
    config, said = Config.model_validate({"name": "mine", "train": {"log_to": ["wandb"]}}), []
    run = SimpleNamespace(folder=tmp_path, own_folder=tmp_path.joinpath)
    (tmp_path / "train").mkdir()
    log_results(SimpleNamespace(config=config, run=run, say=said.append), {"step": 4, "validation_text_bpb": 1.25},
                after=4)
    records = list(wandb_records(tmp_path))
    assert said == [] and not any(record.WhichOneof("record_type") == "history" for record in records)
    assert {item.key: item.value_json for record in records for item in record.summary.update}[
        "validation/bits_per_byte"] == "1.25"


@needs_mlflow
def test_mlflow_continues_one_run_in_files(two_starts):
    client, run = mlflow_run(two_starts({"kind": "mlflow", "experiment": "ours"}))
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in points) == sorted(STEPS)
    assert points == sorted(points, key=lambda point: point.timestamp)
    assert (run.info.run_name, client.get_experiment(run.info.experiment_id).name) == ("mine", "ours")
    assert run.info.status == "FINISHED"
    assert run.data.params == {"name": "mine", "seed": "3", "model.dim": "32", "train.lr": "0.001",
                               "train.prompts.0": "def "}
    assert run.data.tags["sample 1"] == "after step 4: def (text 1.5"
    assert run.data.metrics["validation/sample/bits_per_byte/code"] == 2.5
    assert run.data.metrics["watch/checkpoint_stall_s"] == 0.25


def test_curves_are_the_numbers_that_can_be_drawn():
    assert curves(record(2, "nan", skipped="nonfinite", tokens=7, validation_text_bpb={"": 1, "b": 2.5})) == {
        "train/lr": 0.5, "watch/tokens": 7.0, "validation/bits_per_byte": 1.0, "validation/bits_per_byte/b": 2.5}
    assert event_curves("checkpoint_copied", {"step": 2, "bytes": 9, "seconds": 2.5}) == {
        "watch/checkpoint_copy_bytes": 9.0, "watch/checkpoint_copy_s": 2.5}


def sink_mock(fails="", gate=None):
    """A sink that keeps what it is told, fails where it is to, and waits at the gate before it opens."""
    sink = MagicMock()
    sink.open.return_value = sink
    if gate is not None:
        sink.open.side_effect = lambda: gate.wait(HANG_S)
    if fails:
        getattr(sink, fails).side_effect = SystemExit("no more of that")  # the worst that a library does
    return sink


class Given(SinkSettings):
    """The settings of a sink that is open already; one for each kind below."""

    def open(self, about):
        return OPENED[self.kind].open()


OPENED = {}


@pytest.fixture
def log(tmp_path):
    """Make a log of these sinks; what it says stands in `log.said`, its events in `log.events()`."""
    def make(**sinks):
        OPENED.update(sinks)
        lines = JsonLines(tmp_path)
        return TrainingLog(lines, About("mine", tmp_path, tmp_path, 0, 0, {}), [Given(kind=name) for name in sinks],
                           make.printed.append)
    make.printed = []
    make.events = lambda: [line for line in read_lines(tmp_path / "events.jsonl") if line["event"] == "sink_failed"]
    make.steps = lambda: [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")]
    yield make
    OPENED.clear()


@pytest.mark.parametrize("fails", ["open", "step", "close"])
def test_one_that_fails_is_switched_off_and_said_once_and_another_is_told_everything_in_order(log, fails):
    log_ = log(bad=sink_mock(fails), good=(good := sink_mock()))
    for step in range(1, 20):
        log_.write("step", {"step": step})
        log_.write("sample", step, "a", "b")
        log_.write("event", "checkpoint", {"step": step})
    log_.close()
    assert log.printed == ["warning: the logger bad is disabled: SystemExit: no more of that. Training continues; "
                        "metrics.jsonl has everything"]
    assert [(event["sink"], event["error"]) for event in log.events()] == [("bad", "SystemExit: no more of that")]
    told_of = [each for step in range(1, 20) for each in (
        call.step({"step": step}), call.sample(step, "a", "b"), call.event("checkpoint", {"step": step}))]
    assert good.mock_calls == [call.open(), *told_of, call.close()]
    assert log.steps() == list(range(1, 20))


def test_one_that_hangs_stalls_nothing_and_is_left_behind(log, monkeypatch):
    monkeypatch.setattr("drover.pipeline.training.sinks.CLOSE_S", 0.05)
    gate = threading.Event()
    log_ = log(slow=(slow := sink_mock(gate=gate)))
    for step in range(100):
        log_.write("step", {"step": step})
    log_.close()
    assert log.steps() == list(range(100)) and not slow.step.called and len(log.events()) == 1
    assert "it had not taken in everything after 0.05 s" in "".join(log.printed)
    gate.set()


def test_errors_are_told_without_secrets(monkeypatch):
    for name, value in {"WANDB_API_KEY": "s3cretvalue", "MLFLOW_TRACKING_PASSWORD": "hunter22", "A_KEY": "1",
                        "GOOGLE_APPLICATION_CREDENTIALS": "/home/user"}.items():
        monkeypatch.setenv(name, value)
    assert without_secrets("401 for s3cretvalue at https://user:hunter22@host:5000/api of /home/user, 1 try") == \
        "401 for <WANDB_API_KEY> at https://<...>@host:5000/api of /home/user, 1 try"
