"""The record of training: metrics.jsonl, samples.jsonl and events.jsonl in the train folder, a JSON object a line.

This sink is always there, and training stops where it fails, as on a full disk: what is read again to go on, to audit
and to report must not have holes.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class JsonLines:
    """The sink. Repeated steps have several lines, of which the last counts: see `records.metrics.read_metrics`.

    Attributes:
        torn_bytes: what a killed run had left unfinished at the files' ends, and is cut off.
        told: how many lines the files had then.
    """

    def __init__(self, folder: Path) -> None:
        self._metrics, self._samples, self._events = (
            _GrowingFile(folder / f"{name}.jsonl") for name in ("metrics", "samples", "events"))
        self._files = (self._metrics, self._samples, self._events)
        self.torn_bytes = sum(file.torn_bytes for file in self._files)
        self.told = sum(file.lines for file in self._files)

    def step(self, record: dict[str, Any]) -> None:
        """One training step."""
        self._metrics.write(record)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """One sample text."""
        self._samples.write({"step": step, "prompt": prompt, "text": text})

    def event(self, kind: str, details: dict[str, Any]) -> None:
        """Something that happened, with the time."""
        self._events.write({"event": kind, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **details})

    def close(self) -> None:
        """Make everything durable."""
        for file in self._files:
            file.close()


class _GrowingFile:
    """A file that only grows, one JSON object a line, flushed line by line so that a kill loses at most the last."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.torn_bytes, self.lines = _cut_torn_line(path), 0
        if path.is_file():
            with open(path, "rb") as file:
                self.lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as training runs

    def write(self, record: dict[str, Any]) -> None:
        """Append one object."""
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Make everything written durable."""
        os.fsync(self._file.fileno())
        self._file.close()


def _cut_torn_line(path: Path) -> int:
    """Remove what a kill left after the last newline; returns how many bytes went."""
    if not path.is_file():
        return 0
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        at = size
        while at > 0:
            start = max(0, at - 65536)
            file.seek(start)
            newline = file.read(at - start).rfind(b"\n")
            if newline >= 0:
                at = start + newline + 1
                break
            at = start
        file.truncate(at)
        return size - at
