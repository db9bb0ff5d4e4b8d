"""Log sinks: where the numbers, texts and events of training go.

A sink is two classes: its settings, which open it, and what is then open and is told of training:

    class Chat(SinkSettings):
        \"\"\"Tells a chat room.\"\"\"

        room: str = "training"
        \"\"\"Name of the room.\"\"\"

        def open(self, about: About) -> Sink:
            return _Room(self.room, about)          # anything with the methods of `Sink`

`train.log_to: [tensorboard, {kind: chat, room: ours}]` lists the sinks of a run; all are told the same. The JSON lines
in the train folder are no choice: starting again, the audit and the report read them.

To add one from outside: put the class into a module that Python finds (PYTHONPATH, or an installed package; where jobs
run, too) and give `kind: my_module:Chat`. To add one to Drover: a class in this folder, its line in `SINKS` of
pipeline/config/shipped.py, and its test in tests/training/sinks. A library that it needs is imported in `open`, named
in `needs`, and made an extra in pyproject.toml.

What a sink may count on: rank 0 alone has sinks. Each lives in a thread of its own, in which it is opened, told in
order, and closed, so it may take its time, and need not be safe against other threads. What it must keep to: a start of
training that goes on from a checkpoint does the steps since then again and tells them again, so that the last word on a
step counts (`About.first_step` says where it goes on); credentials come from the environment and never from settings,
which are written to files. What it raises switches it off, for this start of training, and stops nothing.
"""

from __future__ import annotations

import json
import os
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from drover.pipeline.config.kinds import Kind
from drover.pipeline.config.shipped import SINKS
from drover.pipeline.contract.stage_work import Work
from drover.pipeline.core.background import BackgroundWorker
from drover.pipeline.core.files import flush, read_record, write_json

CLOCKS = ("step", "time", "train_s", "look_s")
"""What of a step's record is no curve: counted is where the run stands, not how it goes."""
DATA = ("shards_checked",)
"""What of it tells of the data."""
CLOSE_S = 30.0
"""How long the end of training waits for all sinks together."""
MOST_WAITING = 10_000
"""Calls that a sink may be behind."""
LONGEST = 500
"""Characters of an error that are told."""
LEAST_SECRET = 6
"""Characters of a value of the environment from which on it is told from ordinary words."""
SHOWN = ("seed", "model", "train", "parallel")
"""Sections of the configuration that sinks show."""
GROUPS = {"heldout_bpb": "heldout/bits_per_byte", "gradient_norms": "norms/gradient", "weight_norms": "norms/weight",
          "update_norms": "norms/update"}
"""What of it has a value for each source or layer, and what the curves' names begin with."""


class Sink(Protocol):
    """A sink that is open."""

    def step(self, record: dict[str, Any]) -> None:
        """One training step: the line of metrics.jsonl. `curves` has what of it can be drawn."""

    def sample(self, step: int, prompt: str, text: str) -> None:
        """One sample text, drawn after a step; `text` goes on from the prompt."""

    def event(self, kind: str, details: dict[str, Any]) -> None:
        """Something that happened: start, resume, checkpoint, stop, finish ..., as in events.jsonl."""

    def close(self) -> None:
        """This start of training is over: write out what is held back. Nothing is told any more."""


@dataclass(frozen=True)
class About:
    """What a sink may know of the run.

    Attributes:
        name: the run's.
        run_folder: where a sink may make a folder of its own.
        train_folder: of the stage; a sink may remember here, across starts, what it began (`kept_id`). Where training
            is begun anew, it is another folder.
        first_step: how many steps are done and kept as this start begins; those after it may be told again.
        told: how many steps, samples and events earlier starts have recorded, steps that were done again included: what
            a counter that must only grow may begin with.
        settings: what the run is, as plain values, for display: name, seed, and the sections model, train, parallel.
    """

    name: str
    run_folder: Path
    train_folder: Path
    first_step: int
    told: int
    settings: Mapping[str, Any]


class SinkSettings(Kind):
    """The settings of one sink, each a field with its text underneath."""

    @abstractmethod
    def open(self, about: About) -> Sink:
        """The sink, open. Whatever it raises switches the sink off."""


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """The curves of a step's record: every number under train/ or data/, and those of GROUPS.

    A loss that is NaN stands in the record as text, and is no point of a curve.
    """
    found = {f"{'data' if name in DATA else 'train'}/{name}": float(value) for name, value in record.items()
             if isinstance(value, (int, float)) and name not in CLOCKS}
    return found | {f"{curve}/{source}": float(value) for name, curve in GROUPS.items()
                    for source, value in record.get(name, {}).items() if isinstance(value, (int, float))}


def checkpoint_curves(kind: str, details: Mapping[str, Any]) -> dict[str, float]:
    """The curves of an event: of a checkpoint, how long training stood still for it, and how long it took to write; of
    its copy, how long it took, how long after the checkpoint it was there, and its bytes."""
    shown = {"checkpoint": {"stall_s": "stall_s", "seconds": "seconds"},
             "checkpoint_copied": {"seconds": "copy_seconds", "behind_s": "copy_behind_s", "bytes": "copy_bytes"}}
    return {f"checkpoint/{curve}": float(details[name]) for name, curve in shown.get(kind, {}).items()
            if name in details}


@dataclass(frozen=True)
class KeptId:
    """The ID under which a sink began a training."""

    id: str


def kept_id(about: About, sink: str, make: Callable[[], str]) -> tuple[str, bool]:
    """The ID under which a sink began this training, made when it is first asked for; and whether it was made now."""
    path = about.train_folder / f"{sink}.json"
    if found := read_record(path, KeptId, "Remove it, and the sink begins anew."):
        return found.id, False
    made = make()
    write_json(path, asdict(KeptId(made)))
    return made, True


class CurveSink:
    """A sink that draws curves: it logs those of each step and event.

    Attributes:
        ended: finish or stop, once that has happened.
    """

    ended = ""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Points of curves, by name."""

    def step(self, record: dict[str, Any]) -> None:
        """See Sink."""
        self.log(curves(record), record["step"])

    def event(self, kind: str, details: dict[str, Any]) -> None:
        """See Sink."""
        if kind in ("finish", "stop"):
            self.ended = kind
        if found := checkpoint_curves(kind, details):
            self.log(found, details["step"])


class TensorBoard(SinkSettings):
    """Curves and sample texts in `tensorboard/` of the run folder.

    Steps after the checkpoint that a start continues from are done again: TensorBoard drops its old points of them.
    """

    needs = "tensorboard"

    def open(self, about: About) -> Sink:
        from torch.utils.tensorboard import SummaryWriter
        return _Board(SummaryWriter(str(about.run_folder / "tensorboard"), purge_step=about.first_step + 1))


class _Board(CurveSink):
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def sample(self, step: int, prompt: str, text: str) -> None:
        self._writer.add_text(f"samples/{prompt.strip()[:40] or 'empty'}", f"```\n{prompt}{text}\n```", step)

    def close(self) -> None:
        self._writer.close()


class JsonLines:
    """The record of training: metrics.jsonl, samples.jsonl and events.jsonl in the train folder, a JSON object a line.

    This sink is always there, and training stops where it fails, as on a full disk: what is read again to go on, to
    audit and to report must not have holes. Repeated steps have several lines, of which the last counts: see
    `records.metrics.read_metrics`.

    Attributes:
        torn_bytes: what a killed run had left unfinished at the files' ends, and is cut off.
        told: how many lines the files had then.
    """

    def __init__(self, folder: Path) -> None:
        self.torn_bytes = self.told = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._files = {name: self._open(folder / f"{name}.jsonl") for name in ("metrics", "samples", "events")}

    def _open(self, path: Path) -> Any:
        """A file to append to, without what a kill left after the last newline."""
        file = open(path, "ab+")  # noqa: SIM115 - open as long as training runs
        file.seek(0)
        for line in file:
            if line.endswith(b"\n"):
                self.told += 1
            else:
                self.torn_bytes += len(line)
                file.truncate(file.tell() - len(line))
        return file

    def step(self, record: dict[str, Any]) -> None:
        """One training step."""
        self._write("metrics", record)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """One sample text."""
        self._write("samples", {"step": step, "prompt": prompt, "text": text})

    def event(self, kind: str, details: dict[str, Any]) -> None:
        """Something that happened, with the time."""
        self._write("events", {"event": kind, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **details})

    def close(self) -> None:
        """Make everything durable."""
        for file in self._files.values():
            flush(file)
            file.close()

    def _write(self, name: str, record: dict[str, Any]) -> None:
        """Append one object, flushed so that a kill loses at most the last."""
        self._files[name].write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._files[name].flush()


class BackgroundSink:
    """A sink in a thread of its own: neither its errors nor its pace are training's.

    A sink that raises, or that falls so far behind that the queue is full, is switched off; one that hangs is left
    behind when training ends.
    """

    def __init__(self, name: str, opened: Callable[[], Sink], most_waiting: int = MOST_WAITING) -> None:
        self.name, self._opened, self._most, self._reason = name, opened, most_waiting, ""
        self._sink: Sink | None = None
        self._worker = BackgroundWorker(f"sink-{name}", self._call, most=most_waiting)

    @property
    def failure(self) -> str:
        """Why it was switched off; empty as long as it is not."""
        error = self._worker.error
        return self._reason or ("" if error is None else
                                without_secrets(f"{type(error).__name__}: {error}", os.environ))

    def tell(self, method: str, *arguments: Any) -> None:
        """Have a method of the sink called, some time; at once nothing happens, and nothing is raised."""
        if not self.failure and self._worker.put((method, arguments)) and not self.failure:
            self._switch_off(f"it is {self._most:,} calls behind")

    def close(self, until: float) -> None:
        """Close the sink when all is told, and wait for that until `time.monotonic()` is `until`."""
        self.tell("close")
        if not self.failure and not self._worker.close(max(0.0, until - time.monotonic())):
            self._switch_off("it had not taken in everything when training ended")

    def _switch_off(self, reason: str) -> None:
        self._reason = reason
        self._worker.close(0.0, drop=True)

    def _call(self, item: tuple[str, tuple[Any, ...]]) -> None:
        if self._sink is None:
            self._sink = self._opened()
        (method, arguments), done = item, False
        try:
            getattr(self._sink, method)(*arguments)
            done = not self._reason
        finally:
            if not done and method != "close":
                with suppress(BaseException):
                    self._sink.close()


_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL", re.IGNORECASE)
_CREDENTIALS_IN_ADDRESS = re.compile(r"(://)[^\s/@]+@")


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """An error's text as it may be logged: without values of the environment that are secret by their names, and
    without users and passwords in addresses; on one line, and not too long."""
    for name, value in environment.items():
        if len(value) >= LEAST_SECRET and _SECRET.search(name):
            text = text.replace(value, f"<{name}>")
    return " ".join(_CREDENTIALS_IN_ADDRESS.sub(r"\1<...>@", text).split())[:LONGEST]


class TrainingLog:
    """Where rank 0 records training; the other ranks hold none.

    A sink of `train.log_to` that fails is switched off: that is said and logged (`sink_failed`), once, and training
    goes on. The JSON lines are what training itself relies on: their errors are its own.
    """

    def __init__(self, lines: JsonLines, about: About, sinks: list[Kind], say: Callable[[str], None]) -> None:
        self._lines, self._say = lines, say
        if lines.torn_bytes:
            say(f"cut {lines.torn_bytes} bytes of a line that a killed run left unfinished in its logs")
        self._sinks = [BackgroundSink(sink.kind, lambda sink=sink: SINKS.made([sink])[0].open(about))  # type: ignore[misc]
                       for sink in sinks]

    def tell(self, method: str, *arguments: Any) -> None:
        """A step, a sample or an event: the method of `Sink`, and what it is given."""
        getattr(self._lines, method)(*arguments)
        for sink in self._sinks:
            sink.tell(method, *arguments)
        self._look()

    def close(self) -> None:
        """Write everything out; sinks that take too long are left behind."""
        until = time.monotonic() + CLOSE_S
        for sink in self._sinks:
            sink.close(until)
        self._look()
        self._lines.close()

    def _look(self) -> None:
        """Take leave of sinks that have failed."""
        for sink in [sink for sink in self._sinks if sink.failure]:
            self._sinks.remove(sink)
            self._say(f"warning: the log sink {sink.name} is switched off: {sink.failure.rstrip('.')}. Training goes "
                      f"on; metrics.jsonl has everything")
            self._lines.event("sink_failed", {"sink": sink.name, "error": sink.failure})


def open_log(work: Work, first_step: int) -> TrainingLog:
    """The log of one start of training, which has `first_step` steps behind it."""
    config = work.config
    settings = {name: value for name, value in config.model_dump(mode="json").items() if name in SHOWN}
    settings["train"].pop("log_to")  # an address in it may be nobody else's business
    lines = JsonLines(work.folder)
    about = About(config.name, work.run.folder, work.folder, first_step, lines.told, {"name": config.name, **settings})
    return TrainingLog(lines, about, list(config.train.log_to), work.say)
