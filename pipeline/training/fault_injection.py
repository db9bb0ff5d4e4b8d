"""Faults on purpose: a switch for tests that makes one rank fail at one step, in one of the ways that ranks fail.

    DROVER_FAULTS="kill:rank=1,step=5; nan:rank=0,step=7; slow:rank=1,step=3,seconds=2"

Each fault happens once in a run, restarts included: before it does, a file in `train/faults/` says so, durably. With
`again=1` it happens whenever its step is done, so that a run that is killed meets it again. A rank that waits goes on
when a file `<name of the fault's file>.go` appears beside it: whatever else is to happen at that step has all the time
it takes.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from pipeline.errors import UserError
from pipeline.files import write_text
from pipeline.parallel.grid import own
from pipeline.training.replicas import INTEGERS

SWITCH = "DROVER_FAULTS"
EXIT_STATUS = 13
KINDS = {
    "exit": "the process ends with status 13, without a word to the other ranks",
    "kill": "the process is killed (SIGKILL)",
    "hang": "the process sleeps for ever and ignores every request to end but SIGKILL",
    "nan": "the rank's loss is NaN",
    "spike": "the rank's loss and gradients are `factor` times theirs (1000)",
    "flip": "one bit of one weight of the rank's own is flipped (`bit`; by default the mantissa's highest)",
    "slow": "the step begins `seconds` late (2)",
    "memory": "the step asks for more memory than the device has",
    "wait": "the step begins once its `.go` file is there or a request to end comes",
}
GO = ".go"
OPTIONS = {"rank": int, "step": int, "seconds": float, "factor": float, "bit": int, "again": int}
MANTISSA = {torch.float64: 51, torch.float32: 22, torch.float16: 9, torch.bfloat16: 6}
"""The highest bit of the mantissa: flipped, a weight changes by up to half, and nothing blows up at once."""


@dataclass(frozen=True)
class Fault:
    """One fault: `kind` on `rank` at `step`, counted from 1."""

    kind: str
    rank: int
    step: int
    seconds: float = 2.0
    factor: float = 1000.0
    bit: int | None = None
    again: int = 0

    @property
    def name(self) -> str:
        """What its file in `train/faults/` is called."""
        return f"{self.kind}-rank{self.rank}-step{self.step}"

    def __str__(self) -> str:
        return f"{self.kind} on rank {self.rank} at step {self.step}{' every time' if self.again else ''}"


def parse_faults(text: str) -> list[Fault]:
    """The faults that the switch names.

    Raises:
        UserError: it cannot be read; says what can be written.
    """
    return [_parse(part.strip()) for part in text.split(";") if part.strip()]


class Faults:
    """The faults of this rank. Without the switch there are none, and every method does nothing.

    Args:
        faults: of all ranks.
        rank: this rank.
        folder: the train stage's.
        say: where a fault is announced before it happens.
    """

    def __init__(self, faults: list[Fault], rank: int, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self._say = folder / "faults", say
        self._mine = [fault for fault in faults if fault.rank == rank]

    @classmethod
    def from_environment(cls, rank: int, folder: Path, say: Callable[[str], None]) -> Faults:
        """As DROVER_FAULTS says; every rank says at once what will happen to it."""
        found = cls(parse_faults(os.environ.get(SWITCH, "")), rank, folder, say)
        for fault in found._mine:
            gone = " (it has happened before and will not again)" if found._is_over(fault) else ""
            say(f"WARNING: {SWITCH} is set: {fault} will be made to happen{gone}")
        return found

    def before_step(self, step: int, model: nn.Module, asked: Callable[[], bool]) -> None:
        """Let happen what befalls the process or its weights at the start of `step`, counted from 1.

        asked: whether this process has been asked to end.
        """
        for fault in self._due(step, "slow", "wait", "flip", "memory", "exit", "kill", "hang"):
            if fault.kind == "slow":
                time.sleep(fault.seconds)
            elif fault.kind == "wait":
                wait_for(self.folder / f"{fault.name}{GO}", asked)
            elif fault.kind == "flip":
                self._say(f"injected fault: {flip_bit(model, fault.bit)}")
            elif fault.kind == "memory":
                raise torch.OutOfMemoryError(f"{SWITCH} asks for it")
            elif fault.kind == "exit":
                sys.exit(EXIT_STATUS)
            elif fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                hang()

    def loss_factor(self, step: int) -> float:
        """What this rank's loss is to be multiplied by before backward in `step`: 1, or NaN, or a spike's factor."""
        return math.prod(math.nan if fault.kind == "nan" else fault.factor for fault in self._due(step, "nan", "spike"))

    def _due(self, step: int, *kinds: str) -> list[Fault]:
        due = [fault for fault in self._mine if fault.step == step and fault.kind in kinds and not self._is_over(fault)]
        for fault in due:
            self._say(f"injected fault: {fault}")
            write_text(self.folder / fault.name, f"{fault}\n")
        return due

    def _is_over(self, fault: Fault) -> bool:
        return not fault.again and (self.folder / fault.name).exists()


def wait_for(path: Path, asked: Callable[[], bool]) -> None:
    """Wait for a file, or until this process has been asked to end, before or by then."""
    while not path.exists() and not asked():
        time.sleep(0.05)


def hang() -> NoReturn:
    """Sleep for ever, like a rank in a collective that never ends: no signal but SIGKILL and SIGSTOP is heard."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(3600)


@torch.no_grad()
def flip_bit(model: nn.Module, bit: int | None = None) -> str:
    """Flip a bit of the middle element of this rank's largest piece of a weight, in place; says which.

    Raises:
        UserError: the rank holds no weights, or they have no such bit.
    """
    name, local = max(((name, own(weight)) for name, weight in model.named_parameters()),
                      key=lambda item: item[1].numel(), default=("", torch.empty(0)))
    if local.numel() == 0:
        raise UserError(f"{SWITCH} asks for a flipped bit, but this rank holds no weights of its own.")
    size = local.element_size()
    bit = MANTISSA[local.dtype] if bit is None else bit
    if not 0 <= bit < 8 * size:
        raise UserError(f"{SWITCH} asks to flip bit {bit} of weights in {local.dtype}; they have bits 0 to "
                        f"{8 * size - 1}.")
    place = tuple(int(index) for index in torch.unravel_index(torch.tensor(local.numel() // 2), local.shape))
    before = float(local[place])
    local.view(INTEGERS[size])[place] ^= 1 << bit
    return f"bit {bit} of element {list(place)} of {name} on this rank, {before:.6g} -> {float(local[place]):.6g}"


def _parse(part: str) -> Fault:
    kind, _, rest = part.partition(":")
    problem = None if kind in KINDS else f"{kind!r} is no kind of fault"
    values: dict[str, int | float] = {}
    for item in filter(None, rest.split(",")):
        name, _, value = (text.strip() for text in item.partition("="))
        try:
            values[name] = OPTIONS[name](value)
        except KeyError:
            problem = problem or f"{name!r} is no option"
        except ValueError:
            problem = problem or f"{name} must be a number, not {value!r}"
    if missing := [name for name in ("rank", "step") if name not in values]:
        problem = problem or f"{' and '.join(missing)} must be given"
    if problem:
        kinds = "; ".join(f"{name}: {meaning}" for name, meaning in KINDS.items())
        raise UserError(f"{SWITCH} cannot be read at {part!r}: {problem}. Write kind:rank=R,step=S with options "
                        f"{', '.join(list(OPTIONS)[2:])}, several apart by ';'. Kinds: {kinds}.")
    return Fault(kind, **values)  # type: ignore[arg-type]
