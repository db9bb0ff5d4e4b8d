"""Loggers (sinks): where the numbers, texts and events of training go.

A logger is two classes: its settings, and the logger that they open:

    class Chat(SinkSettings):
        \"\"\"Posts to a chat room.\"\"\"

        room: str = "training"
        \"\"\"Name of the room.\"\"\"

        def open(self, about: About) -> Sink:
            return _Room(self.room, about)          # anything with the methods of `Sink`

`train.log_to: [tensorboard, {kind: chat, room: ours}]` lists the loggers of a run; all get the same calls. The JSON
lines in the train folder are always written: a restart, the audit and the report read them.

To use your own logger, put the class into a module that Python finds (on PYTHONPATH, or in an installed package; also
where jobs run) and set `kind: my_module:Chat`. To add one to Drover, write a class here, a line in `SINKS` of
pipeline/config/shipped.py, and a test in tests/training/test_sinks.py. Import its library in `open`, name it in
`needs`, and make it an extra in pyproject.toml.

Guarantees: only rank 0 has loggers. Each has its own thread, which opens it, calls it in order and closes it. So it may
be slow, and need not be thread-safe. Duties: a start of training that continues from a checkpoint repeats the steps
since then and logs them again, from `About.first_step` on; the last value of a step counts. Credentials come from the
environment and never from settings, which are written to files. An error disables the logger for this start of
training, and training continues.
"""

from __future__ import annotations

import json
import os
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from textwrap import indent
from typing import Any, Literal, Protocol, TypedDict
from uuid import uuid4

from drover.pipeline.config.kinds import Kind
from drover.pipeline.config.section import flatten
from drover.pipeline.config.shipped import SINKS
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.contract.state import now
from drover.pipeline.core.background import BackgroundWorker
from drover.pipeline.core.console import Say
from drover.pipeline.core.errors import without_secrets
from drover.pipeline.core.files import Record, flush, read_record, write_json
from drover.pipeline.records.checkpoint_scores import SCORED

CLOCKS = ("step", "time", "train_s", "look_s")
"""Fields of a step's record that are not drawn: they only count."""
CLOSE_S = 30.0
"""Seconds that the end of training waits for all loggers together."""
LONGEST = 500
"""Characters of an error that are logged."""
SHOWN = ("seed", "model", "train", "parallel")
"""Sections of the configuration that loggers show."""
CURVES = {"loss": "train/loss", "lr": "train/lr", "grad_norm": "train/norm_of_gradient",
          "tokens_per_s": "train/tokens_per_s", "validation_text_bpb": "validation/bits_per_byte",
          "validation_sample_bpb": "validation/sample/bits_per_byte",
          "validation_sample_loss": "validation/sample/loss", "task_scores": "validation/tasks"}
"""The curve of a field of a step's record. The curves of a field with several values, of sources, have
their names at the end. TensorBoard sorts by these names, and its table of runs shows the first five: what a person
looks at comes first."""
OTHER_CURVES = "watch"
"""The group of all other fields, behind train and validation."""
EVENT_CURVES = {
    "checkpoint": {"stall_s": f"{OTHER_CURVES}/checkpoint_stall_s", "seconds": f"{OTHER_CURVES}/checkpoint_s"},
    "checkpoint_copied": {"seconds": f"{OTHER_CURVES}/checkpoint_copy_s",
                          "bytes": f"{OTHER_CURVES}/checkpoint_copy_bytes"}}
"""The curves of an event's details: seconds that training stalled for a checkpoint, and until it was written; seconds
and bytes of its upload."""


class Sink(Protocol):
    """An open logger."""

    def step(self, record: Record) -> None:
        """One training step: the line of metrics.jsonl. `curves` returns the numbers in it."""

    def sample(self, step: int, prompt: str, text: str) -> None:
        """One sample text, generated after a step; `text` continues the prompt."""

    def event(self, kind: str, details: Record) -> None:
        """An event: start, resume, checkpoint, stop, finish ..., as in events.jsonl."""

    def close(self) -> None:
        """This start of training is over: flush. No call follows."""


@dataclass(frozen=True)
class About:
    """Facts about the run for a logger.

    Attributes:
        name: of the run.
        run_folder: a logger may make its own folder in it.
        train_folder: of the stage. A logger may keep its ID here across starts (`kept_id`). Training that starts from
            scratch has another folder.
        first_step: the steps that were done before this start. Later steps may be logged a second time.
        reported: the steps, samples and events that earlier starts have logged, repeated steps included: a start value
            for a counter that must only grow. None if only results of the finished model follow.
        settings: the configuration for display, as plain values: name, seed, and the sections model, train, parallel.
    """

    name: str
    run_folder: Path
    train_folder: Path
    first_step: int
    reported: int | None
    settings: Mapping[str, Any]


class SinkSettings(Kind):
    """The settings of a logger: one field each, with its description underneath."""

    @abstractmethod
    def open(self, about: About) -> Sink:
        """Open the logger. An error disables it."""


def curves(record: Record) -> dict[str, float]:
    """The points of a step's record, by the name of their curve. A NaN loss is text in the record, and is not drawn."""
    return {"/".join(filter(None, (CURVES.get(name, f"{OTHER_CURVES}/{name}"), part))): float(number)
            for name, value in record.items() if name not in CLOCKS
            for part, number in (value if isinstance(value, dict) else {"": value}).items()
            if isinstance(number, (int, float))}


def event_curves(kind: str, details: Record) -> dict[str, float]:
    """The points of an event, by the name of their curve. Scores of a checkpoint are drawn as in its step's record."""
    if kind == SCORED:
        return curves(details)
    return {curve: float(details[name]) for name, curve in EVENT_CURVES.get(kind, {}).items() if name in details}


class KeptId(TypedDict):
    """The ID of a training in a logger."""

    id: str


def kept_id(about: About, sink: str, make: Callable[[], str]) -> str:
    """The ID of this training in a logger, made at the first call."""
    path = about.train_folder / f"{sink}.json"
    kept = read_record(path, KeptId, "Remove it, and the logger starts a new run.")
    if kept is None:
        kept = {"id": make()}
        write_json(path, dict(kept))
    return kept["id"]


class CurveSink:
    """A logger that draws curves: it logs those of each step and event.

    Attributes:
        ended: `finish` or `stop`, after that event.
    """

    ended = ""

    @cached_property
    def numbers(self) -> defaultdict[str, int]:
        """The number of each prompt, from 1, in the order of their texts."""
        return defaultdict(count(1).__next__)

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log one point of each curve, by name."""

    def step(self, record: Record) -> None:
        """See Sink."""
        self.log(curves(record), record["step"])

    def event(self, kind: str, details: Record) -> None:
        """See Sink."""
        if kind in ("finish", "stop"):
            self.ended = kind
        if result := event_curves(kind, details):
            self.log(result, details["step"])


FLUSH_S = 10
"""Seconds until TensorBoard finds what was logged."""
LAYOUT = {
    "Loss": {"training and validation sample, nats per token": ["train/loss$", "validation/sample/loss/"],
             "validation sample, bits per byte": ["validation/sample/bits_per_byte/"]},
    "Optimizer": {"learning rate": ["train/lr$"], "norm of the gradient before clipping": ["train/norm_of_gradient$"]},
    "Speed": {"tokens per second": ["train/tokens_per_s$"], "seconds of a step, and its wait for data": [
        f"{OTHER_CURVES}/(step|data_wait)_s$"]}}
"""The charts of TensorBoard's page Custom Scalars: category -> chart -> expressions for the curves in it."""


class TensorBoard(SinkSettings):
    """Curves, sample texts and settings, in files `events.out.tfevents.*` of the run folder.

    They lie in the folder itself because TensorBoard names a run after the folder of its files. A start repeats the
    steps after the checkpoint that it continues from. TensorBoard drops their old points.
    """

    needs = "tensorboard"

    def open(self, about: About) -> Sink:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from torch.utils.tensorboard import SummaryWriter
        writer: Any = SummaryWriter(str(about.run_folder), purge_step=about.first_step + 1, flush_secs=FLUSH_S)
        settings = {name: value for name, value in flatten(dict(about.settings)).items()
                    if isinstance(value, (int, float, str)) and name != "name"}
        writer.file_writer.add_summary(hparams_pb(settings, trial_id=about.name), 0)
        writer.add_custom_scalars({category: {title: ["Multiline", tags] for title, tags in charts.items()}
                                   for category, charts in LAYOUT.items()})
        return _Board(writer)


class _Board(CurveSink):
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def sample(self, step: int, prompt: str, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb  # SummaryWriter.add_text would lengthen the tag
        block = indent(f"{prompt}{text}", "    ", lambda _: True)  # code in Markdown, which no text can end
        self._writer.file_writer.add_summary(text_pb(f"samples/{self.numbers[prompt]}", block), step)

    def close(self) -> None:
        self._writer.close()


class JsonLines:
    """The record of training: metrics.jsonl, samples.jsonl and events.jsonl in the train folder, a JSON object a line.

    This logger is always on, and training stops if it fails, as on a full disk: restarts, the audit and the report read
    the lines, so none may be missing. Repeated steps have several lines, of which the last counts
    (`records.metrics.read_metrics`).

    Attributes:
        torn_bytes: bytes of incomplete lines that a killed run left at the files' ends, and that were cut off.
        reported: lines in the files at the start.
    """

    def __init__(self, folder: Path) -> None:
        self.torn_bytes = self.reported = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: self._open(folder / f"{name}.jsonl") for name in ("metrics", "samples", "events")}

    def _open(self, path: Path) -> Any:
        """A file to append to, without the incomplete line that a kill left at its end."""
        file = open(path, "ab+")  # noqa: SIM115 - open as long as training runs
        file.seek(0)
        for line in file:
            if line.endswith(b"\n"):
                self.reported += 1
            else:
                self.torn_bytes += len(line)
                file.truncate(file.tell() - len(line))
        return file

    def step(self, record: Record) -> None:
        """One training step."""
        self._write("metrics", record)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """One sample text."""
        self._write("samples", {"step": step, "prompt": prompt, "text": text})

    def event(self, kind: str, details: Record) -> None:
        """An event, with the time."""
        self._write("events", {"event": kind, "time": now(), **details})

    def close(self) -> None:
        """Make everything durable."""
        for file in self._files.values():
            flush(file)
            file.close()

    def _write(self, name: str, record: Record) -> None:
        """Append one object, flushed so that a kill loses at most the last."""
        self._files[name].write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._files[name].flush()


class BackgroundSink:
    """A logger in its own thread: its errors do not stop training, and its speed does not slow it.

    A logger that raises is disabled. Training ends without waiting for a logger that hangs.
    """

    def __init__(self, settings: Kind, about: About) -> None:
        self.name = settings.kind
        self._opened = lambda: SINKS.made([settings])[0].open(about)
        self._late = False  # whether training ended while calls waited
        self._sink: Sink | None = None
        self._worker = BackgroundWorker(f"sink-{self.name}", self._call)

    @property
    def failure(self) -> str:
        """Why it was disabled; empty if it was not."""
        error = self._worker.error
        if error is not None:
            return " ".join(without_secrets(f"{type(error).__name__}: {error}").split())[:LONGEST]
        return f"it had not taken in everything after {CLOSE_S:g} s" if self._late else ""

    def write(self, method: str, *arguments: Any) -> None:
        """Queue a call of a method of the logger. Returns at once and raises nothing."""
        self._worker.put((method, arguments))

    def close(self, until: float) -> None:
        """Close the logger after its queued calls, and wait for that until `time.monotonic()` is `until`."""
        self.write("close")
        self._late = not self._worker.close(max(0.0, until - time.monotonic()))
        if self._late:
            self._worker.close(0.0, drop=True)

    def _call(self, item: tuple[str, tuple[Any, ...]]) -> None:
        if self._sink is None:
            self._sink = self._opened()
        method, arguments = item
        try:
            getattr(self._sink, method)(*arguments)
        except BaseException:
            if method != "close":
                with suppress(BaseException):
                    self._sink.close()
            raise


class TrainingLog:
    """Rank 0's log of training; the other ranks have none.

    A logger of `train.log_to` that fails is disabled with one warning and the event `sink_failed`, and training
    continues. Training relies on the JSON lines, so their errors stop it.
    """

    def __init__(self, lines: JsonLines, about: About, sinks: list[Kind], say: Say) -> None:
        self._lines = lines
        self._say = say
        if lines.torn_bytes:
            say(f"cut {lines.torn_bytes} bytes of a line that a killed run left unfinished in its logs")
        self._sinks = [BackgroundSink(sink, about) for sink in sinks]

    def write(self, method: str, *arguments: Any) -> None:
        """Log a step, a sample or an event: a method of `Sink` with its arguments."""
        getattr(self._lines, method)(*arguments)
        for sink in self._sinks:
            sink.write(method, *arguments)
        self._look()

    def close(self) -> None:
        """Flush everything. Loggers that take too long are abandoned."""
        until = time.monotonic() + CLOSE_S
        for sink in self._sinks:
            sink.close(until)
        self._look()
        self._lines.close()

    def _look(self) -> None:
        """Remove loggers that have failed."""
        for sink in [sink for sink in self._sinks if sink.failure]:
            self._sinks.remove(sink)
            self._say(f"warning: the logger {sink.name} is disabled: {sink.failure.rstrip('.')}. Training continues; "
                      f"metrics.jsonl has everything")
            self._lines.event("sink_failed", {"sink": sink.name, "error": sink.failure})


def open_log(work: Work, first_step: int) -> TrainingLog:
    """Rank 0's log of one start of training, which continues after `first_step` steps. Opening it cuts off lines that a
    kill left incomplete."""
    lines = JsonLines(work.folder)
    return TrainingLog(lines, _about(work, first_step, lines.reported), list(work.config.train.log_to), work.say)


def _about(work: Work, first_step: int, reported: int | None) -> About:
    config = work.config
    settings = {name: value for name, value in config.model_dump(mode="json").items() if name in SHOWN}
    settings["train"].pop("log_to")  # it may contain a private address
    return About(config.name, work.run.folder, work.run.own_folder("train"), first_step, reported,
                 {"name": config.name, **settings})


LONGEST_TAG = 5000
"""Characters of a tag that MLflow takes."""
ENDINGS = {"finish": "FINISHED", "stop": "KILLED"}
"""MLflow's final status of a run by the event; any other end is FAILED."""


class MLflow(SinkSettings):
    """Curves, settings and the newest sample texts in MLflow.

    Every start of one training continues the same run; its ID is in train/mlflow.json. MLflow keeps every value of a
    step: a step that is repeated after a kill has several points with different times, of which the last counts. The
    newest sample text of each prompt is a tag (samples.jsonl has all texts). MLflow itself reads user and password of a
    server from the environment (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD).
    """

    needs = "mlflow"

    experiment: str = "drover"
    """MLflow's experiment. It is created if it does not exist."""
    tracking_uri: str | None = None
    """The tracking server, as http://host:5000; null: `mlflow/` in the run folder, without a network. To view that
    folder, install the full package mlflow, set MLFLOW_ALLOW_FILE_STORE=true and run `mlflow ui --backend-store-uri
    runs/<name>/mlflow`. Do not put a password here, since it would be written to files: use the environment."""

    def open(self, about: About) -> Sink:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # offline means offline
        uri = self.tracking_uri
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # required from version 3.13 on
            uri = (about.run_folder.absolute() / "mlflow").as_uri()
        from mlflow import MlflowClient
        return _MLflowRun(MlflowClient(tracking_uri=uri), self.experiment, about)


class _MLflowRun(CurveSink):
    def __init__(self, client: Any, experiment: str, about: About) -> None:
        self._client = client

        def make() -> str:
            result = client.get_experiment_by_name(experiment)
            place = result.experiment_id if result else client.create_experiment(experiment)
            return str(client.create_run(place, run_name=about.name).info.run_id)
        self._id = kept_id(about, "mlflow", make)
        client.update_run(self._id, status="RUNNING")
        logged = client.get_run(self._id).data.params  # by the first start, which may have been killed meanwhile
        for name, value in flatten(dict(about.settings)).items():
            if name not in logged:
                client.log_param(self._id, name, str(value)[:LONGEST_TAG])

    def sample(self, step: int, prompt: str, text: str) -> None:
        self._client.set_tag(self._id, f"sample {self.numbers[prompt]}",
                             f"after step {step}: {prompt}{text}"[:LONGEST_TAG])

    def close(self) -> None:
        self._client.set_terminated(self._id, status=ENDINGS.get(self.ended, "FAILED"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])


class WeightsAndBiases(SinkSettings):
    """Curves and sample texts in Weights & Biases.

    Every start of one training continues the same run; its ID is in train/wandb.json. W&B rejects values for an earlier
    step of its own counter. So that counter numbers rows, over all starts, and charts use the metric `step` as x axis:
    a step that is repeated after a kill has several points, of which the last counts. Offline, each start writes its
    own folder `wandb/offline-run-<time>-<ID>`. `wandb sync runs/<name>/wandb/offline-run-*` uploads them in order into
    the one run. The results of the stage evaluate are in the run's summary. W&B itself reads the key (WANDB_API_KEY,
    `wandb login`).
    """

    needs = "wandb"

    project: str = "drover"
    """W&B's project."""
    entity: str | None = None
    """The user or team that owns the project; null: the key's default in W&B."""
    mode: Literal["offline", "online"] = "offline"
    """`offline` writes to `wandb/` in the run folder and needs neither network nor key; `online` also uploads."""

    def open(self, about: About) -> Sink:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # offline means offline
        import wandb
        identity = kept_id(about, "wandb", lambda: uuid4().hex[:12])
        # Do not upload the console output or the checkout's changes: they may contain anything.
        quiet = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False)
        run = wandb.init(project=self.project, entity=self.entity, mode=self.mode, id=identity, resume="allow",
                         name=about.name, dir=str(about.run_folder), config=dict(about.settings), settings=quiet,
                         reinit="create_new")
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        return _WandbRun(run, about.reported)


class _WandbRun(CurveSink):
    def __init__(self, run: Any, rows: int | None) -> None:
        self._run = run
        self._rows = rows

    def sample(self, step: int, prompt: str, text: str) -> None:
        self.log({f"samples/{self.numbers[prompt]}": f"{prompt}{text}"}, step)

    def close(self) -> None:
        self._run.finish(exit_code=0 if self.ended else 1)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        if self._rows is None:  # a row would have to be behind all those of training, which may continue
            return self._run.summary.update(values)
        self._rows += 1
        self._run.log({"step": step, **values}, step=self._rows, commit=True)


def log_results(work: Work, *results: Record, after: int) -> None:
    """Give results of a finished training, fields as in records of its steps, to TensorBoard, MLflow and, as the run's
    summary, W&B. If one fails, it is named. Loggers of plugins get only what training reports. after: the last step of
    training, up to which a logger keeps what it has."""
    until = time.monotonic() + CLOSE_S
    about = _about(work, after, None)
    takers = [settings for settings in work.config.train.log_to
              if isinstance(settings, (TensorBoard, MLflow, WeightsAndBiases))]
    for sink in [BackgroundSink(settings, about) for settings in takers]:
        for record in results:
            sink.write("step", record)
        sink.write("event", "finish", {"step": after})
        sink.close(until)
        if sink.failure:
            work.say(f"warning: the logger {sink.name} does not have these results: {sink.failure.rstrip('.')}")
