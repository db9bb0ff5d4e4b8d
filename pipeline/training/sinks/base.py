"""What a log sink is, and which ones ship.

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
run, too) and give `kind: my_module:Chat`. To add one to Drover: a module in this folder, its line in `SINKS` of
pipeline/config/shipped.py, and its test in tests/training/sinks. A library that it needs is imported in `open`, named
in `package`, and made an extra in pyproject.toml.

What a sink may count on: rank 0 alone has sinks. Each lives in a thread of its own, in which it is opened, told in
order, and closed, so it may take its time, and need not be safe against other threads. What it must keep to: a start of
training that goes on from a checkpoint does the steps since then again and tells them again, so that the last word on a
step counts (`About.first_step` says where it goes on); credentials come from the environment and never from settings,
which are written to files. What it raises switches it off, for this start of training, and stops nothing.
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pipeline.config.kinds import Kind
from pipeline.config.shipped import SINKS
from pipeline.errors import UserError, listed
from pipeline.files import read_record, write_json

CLOCKS = ("step", "time", "train_s", "look_s")
"""What of a step's record is no curve: counted is where the run stands, not how it goes."""
DATA = ("shards_checked",)
"""What of it tells of the data."""
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

    package: ClassVar[str] = ""
    """What must be importable for it; empty: nothing that Drover does not need anyway."""
    extra: ClassVar[str] = ""
    """Drover's extra in pyproject.toml that brings the package."""

    @abstractmethod
    def open(self, about: About) -> Sink:
        """The sink, open. Whatever it raises switches the sink off."""


def unusable(items: Iterable[Kind]) -> list[str]:
    """What keeps sinks that are asked for from being opened here, as sentences: wrong settings, absent packages."""
    items = list(items)
    if problems := SINKS.problems(items):
        return problems
    return [f"train.log_to asks for {sink.kind}, but the package {sink.package} is not installed here: "
            f"`pip install --editable '.[{sink.extra}]'` in the checkout installs it. Or take {sink.kind} out of "
            f"train.log_to." for sink in SINKS.made(items)
            if sink.package and importlib.util.find_spec(sink.package) is None]


def refuse_unusable(items: Iterable[Kind]) -> None:
    """UserError, naming them, if sinks that are asked for cannot be opened here."""
    if problems := unusable(items):
        raise UserError(listed(problems))


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
