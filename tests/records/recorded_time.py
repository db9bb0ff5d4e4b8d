"""Records of a run's time as training and the launcher leave them, with every figure planted."""

import shlex
from datetime import UTC, datetime
from pathlib import Path

from drover.pipeline.contract.state import ATTEMPTS
from drover.pipeline.core.files import append_line
from drover.pipeline.records.hangs import HungRank, hang_folder, write_record

BEGIN = 1_800_000_000.0
STEP_S = 10.0


class Recorded:
    """A run folder with such records. Times are seconds since the run's beginning."""

    def __init__(self, folder):
        self.folder, self.clock = folder, 0.0
        self.step, self.train_s, self.look_s = 0, 0.0, 0.0

    def play(self, script):
        """Methods of this class, one after another: `start 20; steps 5; end finish stall_s=1`."""
        for call in script.split(";"):
            method, *words = shlex.split(call)
            given = {name: int(text) if text.isdigit() and name != "job" else text
                     for name, _, text in (word.rpartition("=") for word in words)}
            getattr(self, method)(*([given.pop("")] if "" in given else []), **given)
        return self

    def launcher(self, event, **details):
        """A line of what the launcher did."""
        self._write(ATTEMPTS / "1.jsonl", {"event": event, "stage": "train", "job": "1", "start": 0,
                                           "at": self._stamp(), **details})

    def event(self, event, **details):
        """A line of events.jsonl."""
        self._write(Path("train/events.jsonl"), {"event": event, "time": self._stamp(), **details})

    def start(self, startup_s, step=0, job=""):
        """A process that takes so long until its first step, going on from `step`."""
        self.clock += startup_s
        self.step, self.train_s, self.look_s = step, step * STEP_S, 0.0
        self.event("resume" if step else "start", step=step, ranks=2, startup_s=startup_s, train_s=self.train_s,
                   job=job)

    def steps(self, count, log_every=1, **details):
        """So many steps, each of STEP_S."""
        for _ in range(count):
            self.clock += STEP_S
            self.step, self.train_s = self.step + 1, self.train_s + STEP_S
            if self.step % log_every == 0:
                self._write(Path("train/metrics.jsonl"), {
                    "step": self.step, "loss": 3.0, "grad_norm": 1.0, "samples": [self.step - 1, self.step],
                    "time": BEGIN + self.clock, "step_s": STEP_S, "train_s": self.train_s,
                    **({"look_s": self.look_s} if self.look_s else {}), **details})

    def look(self, seconds):
        """Held-out text is measured after a step."""
        self.clock += seconds
        self.look_s += seconds

    def save(self, stall_s):
        """A checkpoint for which the loop stood still."""
        self.clock += stall_s
        self.event("checkpoint", step=self.step, stall_s=stall_s, seconds=99.0)

    def wait(self, seconds):
        """Time that nobody writes anything in."""
        self.clock += seconds

    def roll_back(self, step, lost_s):
        """The next step is undone, and those since `step`."""
        self.clock += lost_s
        self.step, self.train_s = step, step * STEP_S
        self.event("rolled_back", step=step, train_s=self.train_s, lost_s=lost_s)

    def hang(self, seconds, key="local.0.0"):
        """Nothing for so long, then the ranks write that they hang."""
        self.clock += seconds
        for rank in range(2):
            write_record(hang_folder(self.folder / "train", key),
                         HungRank(rank, "n1", self.step, seconds, BEGIN + self.clock, ("/x/train.py:9 train",)))

    def end(self, event, stall_s=0.0, **details):
        """Asked to stop, or finished."""
        self.clock += stall_s
        self.event(event, step=self.step, stall_s=stall_s, look_s=self.look_s, **details)

    def _stamp(self):
        return datetime.fromtimestamp(BEGIN + self.clock, UTC).isoformat(timespec="milliseconds")

    def _write(self, path, record):
        append_line(self.folder / path, record)
