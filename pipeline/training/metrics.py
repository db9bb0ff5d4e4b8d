"""What training says of itself: metrics.jsonl, TensorBoard, the progress line."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from pipeline.console import duration
from pipeline.files import read_lines

PEAK_TFLOPS = {"H100": 989.5, "H200": 989.5, "A100": 312.0, "A800": 312.0, "H800": 989.5, "L40S": 362.0,
               "B200": 2250.0, "V100": 125.0}
"""Dense bf16 peaks from the vendors' data sheets (V100: fp16), by a part of the device's name. A card that is not
here gets no MFU: no figure is better than a guessed one."""
CLOCKS = ("step", "time", "train_s", "look_s")
"""What of a step's record is no curve: counted is where the run stands, not how it goes."""


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of the device in bf16, or None where it is not known for certain."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if "PCIe" in name or "NVL" in name:
        return None  # other clocks than the cards of the table
    return next((peak * 1e12 for key, peak in PEAK_TFLOPS.items() if key in name), None)


def memory_mb(device: torch.device) -> float:
    """Peak memory so far in MB: the device's on a GPU, the process's resident set elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process so far; 0 where it was never used."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


class JsonLines:
    """A file that only grows, one JSON object a line, flushed line by line so that a kill loses at most the last."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.torn_bytes = _cut_torn_line(path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as training runs

    def write(self, record: dict[str, Any]) -> None:
        """Append one object."""
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Make everything written durable."""
        os.fsync(self._file.fileno())
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One record per step, in order; where a restart did a step again, the last counts."""
    return [record for _, record in sorted({record["step"]: record for record in read_lines(path)}.items())]


class MetricsLog:
    """Where rank 0 records training; the other ranks hold none."""

    def __init__(self, folder: Path, tensorboard: Path, first_step: int, say: Callable[[str], None]) -> None:
        self._metrics, self._samples = JsonLines(folder / "metrics.jsonl"), JsonLines(folder / "samples.jsonl")
        self._events = JsonLines(folder / "events.jsonl")
        torn = self._metrics.torn_bytes + self._samples.torn_bytes + self._events.torn_bytes
        if torn:
            say(f"cut {torn} bytes of a line that a killed run left unfinished in its logs")
        self._board = _tensorboard(tensorboard, first_step, say)

    def step(self, record: dict[str, Any]) -> None:
        """One training step: every number goes to TensorBoard under train/, held-out ones under heldout/."""
        self._metrics.write(record)
        if self._board is None:
            return
        for name, value in record.items():
            if name == "heldout_bpb":
                for source, bits in value.items():
                    self._board.add_scalar(f"heldout/bits_per_byte/{source}", bits, record["step"])
            elif isinstance(value, (int, float)) and name not in CLOCKS:
                self._board.add_scalar(f"train/{name}", value, record["step"])

    def sample(self, step: int, prompt: str, text: str) -> None:
        """One sample text."""
        self._samples.write({"step": step, "prompt": prompt, "text": text})
        if self._board is not None:
            self._board.add_text(f"samples/{prompt.strip()[:40] or 'empty'}", f"```\n{prompt}{text}\n```", step)

    def event(self, kind: str, **details: Any) -> None:
        """Something that happened: start, resume, checkpoint, stop."""
        self._events.write({"event": kind, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **details})

    def saved(self, kind: str, details: dict[str, Any]) -> None:
        """A checkpoint that was written, or failed to be; its times go to TensorBoard under checkpoint/."""
        self.event(kind, **details)
        for name in ("stall_s", "seconds"):
            if self._board is not None and name in details:
                self._board.add_scalar(f"checkpoint/{name}", details[name], details["step"])

    def close(self) -> None:
        """Flush everything."""
        for log in (self._metrics, self._samples, self._events):
            log.close()
        if self._board is not None:
            self._board.close()


class ProgressLine:
    """`step 120/800 loss 3.112 lr 2.9e-03 tok/s 11,200 ETA 1 m 12 s`: live on a terminal, now and then elsewhere."""

    def __init__(self, steps: int, say: Callable[[str], None], plain_every_s: float = 10.0) -> None:
        self.steps, self._say, self._live = steps, say, sys.stdout.isatty()
        self._every_s = 0.2 if self._live else plain_every_s
        self._shown = 0.0

    def show(self, record: dict[str, Any], remaining_s: float) -> None:
        """Show a step's record, unless the last was shown a moment ago."""
        now, step = time.monotonic(), record["step"]
        if now - self._shown < self._every_s and step != self.steps:
            return
        self._shown = now
        mfu = f"  mfu {record['mfu']:.1%}" if record.get("mfu") else ""
        # A loss that is no number stands in the record as text.
        text = (f"step {step}/{self.steps}  loss {float(record['loss']):.4f}  lr {record['lr']:.2e}  "
                f"grad {float(record['grad_norm']):.2f}  tok/s {record['tokens_per_s']:,.0f}{mfu}  "
                f"ETA {duration(max(0.0, remaining_s))}")
        if self._live:
            print(f"\r\x1b[K{'train':<9} {text}", end="\n" if step == self.steps else "", flush=True)
        else:
            self._say(text)

    def interrupt(self) -> None:
        """Clear the live line, so that another line can be printed."""
        if self._live:
            print("\r\x1b[K", end="", flush=True)


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


def _tensorboard(folder: Path, first_step: int, say: Callable[[str], None]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        say("no TensorBoard logs: the package tensorboard is not installed; metrics.jsonl has everything")
        return None
    # Steps after the checkpoint that this start continues from are done again: TensorBoard drops its old ones.
    return SummaryWriter(str(folder), purge_step=first_step + 1)
