"""The log of training, behind which all sinks are: the JSON lines, and those that `train.log_to` asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pipeline.config.kinds import Kind
from pipeline.config.shipped import SINKS
from pipeline.contract.stage_work import Work
from pipeline.training.sinks.background import BackgroundSink
from pipeline.training.sinks.base import About
from pipeline.training.sinks.json_lines import JsonLines

CLOSE_S = 30.0
"""How long the end of training waits for all sinks together."""
SHOWN = ("seed", "model", "train", "parallel")
"""Sections of the configuration that sinks show."""


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

    def step(self, record: dict[str, Any]) -> None:
        """One training step."""
        self._lines.step(record)
        self._tell("step", record)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """One sample text."""
        self._lines.sample(step, prompt, text)
        self._tell("sample", step, prompt, text)

    def event(self, kind: str, **details: Any) -> None:
        """Something that happened: start, resume, checkpoint, stop."""
        self._lines.event(kind, details)
        self._tell("event", kind, details)

    def close(self) -> None:
        """Write everything out; sinks that take too long are left behind."""
        until = time.monotonic() + CLOSE_S
        for sink in self._sinks:
            sink.close(until)
        self._look()
        self._lines.close()

    def _tell(self, method: str, *arguments: Any) -> None:
        for sink in self._sinks:
            sink.tell(method, *arguments)
        self._look()

    def _look(self) -> None:
        """Take leave of sinks that have failed."""
        failed = [sink for sink in self._sinks if sink.failure]
        self._sinks = [sink for sink in self._sinks if not sink.failure]
        for sink in failed:
            self._say(f"warning: the log sink {sink.name} is switched off: {sink.failure.rstrip('.')}. Training goes "
                      f"on; metrics.jsonl has everything")
            self._lines.event("sink_failed", {"sink": sink.name, "error": sink.failure})


def open_log(work: Work, first_step: int, say: Callable[[str], None]) -> TrainingLog:
    """The log of one start of training, which has `first_step` steps behind it."""
    config = work.config
    settings = {name: value for name, value in config.model_dump(mode="json").items() if name in SHOWN}
    settings["train"].pop("log_to")  # an address in it may be nobody else's business
    lines = JsonLines(work.folder)
    about = About(config.name, work.run.folder, work.folder, first_step, lines.told, {"name": config.name, **settings})
    return TrainingLog(lines, about, list(config.train.log_to), say)
