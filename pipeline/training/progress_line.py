"""The line of a step that a person sees."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from drover.pipeline.core.console import duration


class ProgressLine:
    """`step 120/800 loss 3.112 lr 2.9e-03 tok/s 11,200 ETA 1 m 12 s`: live on a terminal, now and then elsewhere."""

    def __init__(self, steps: int, say: Callable[[str], None]) -> None:
        self.steps, self._say, self._live = steps, say, sys.stdout.isatty()
        self._every_s = 0.2 if self._live else 10.0
        self._shown = 0.0

    def show(self, record: dict[str, Any], remaining_s: float) -> None:
        """Show a step's record, unless the last was shown a moment ago."""
        now, step = time.monotonic(), record["step"]
        if now - self._shown < self._every_s and step != self.steps:
            return
        self._shown = now
        mfu = f"  mfu {record['mfu']:.1%}" if record.get("mfu") else ""
        # A loss that is NaN stands in the record as text.
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
