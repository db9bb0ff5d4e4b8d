"""Faults on purpose: a hook that makes one rank fail at one step, in one of the ways that ranks fail.

    DROVER_FAULTS="kill:rank=1,step=5; nan:rank=0,step=7; slow:rank=1,step=3,seconds=2"

It is given by `train.hooks` (HOOKS). Each fault happens once in a run, restarts included: before it does, a file in
`train/faults/` says so, durably. With `again=1` it happens whenever its step is done. A rank that waits goes on when a
file `<name of the fault's file>.go` appears beside it, or when it is asked to end.

As a plugin it is imported by the launcher and by every stage: what imports torch is imported where a fault needs it.
"""

import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from drover.pipeline.core.files import write_text
from drover.pipeline.training.hooks import Hook, HookSettings

SWITCH = "DROVER_FAULTS"
LATE = "DROVER_READS_LATE"
"""If it is set, a step's result is read in the next one, as on a GPU."""
HOOKS = ["tests.faulty:Faulty"]
PLUGIN = {"plugins": [str(Path(__file__).resolve())], "train": {"hooks": ["faulty:Faulty"]}}
"""Settings for processes that do not find this package."""
GO = ".go"
OPTIONS = {"rank": int, "step": int, "seconds": float, "factor": float, "again": int}
MANTISSA = {"torch.float64": 51, "torch.float32": 22, "torch.float16": 9, "torch.bfloat16": 6}
"""The highest bit of the mantissa: flipped, a weight changes by up to half, and nothing blows up at once."""


@dataclass(frozen=True)
class Fault:
    """One fault: `kind` on `rank` at `step`, counted from 1.

    exit: the process ends with status 13. kill: SIGKILL. hang: it sleeps for ever and ignores every request to end.
    nan: the rank's loss is NaN. spike: loss and gradients are `factor` times theirs. flip: one bit of one weight of the
    rank's own is flipped. slow: the step begins `seconds` late. memory: the device has not enough. wait: see above.
    """

    kind: str
    rank: int
    step: int
    seconds: float = 2.0
    factor: float = 1000.0
    again: int = 0

    @property
    def name(self):
        return f"{self.kind}-rank{self.rank}-step{self.step}"

    def __str__(self):
        return f"{self.kind} on rank {self.rank} at step {self.step}{' every time' if self.again else ''}"


def parse_faults(text):
    actual = []
    for part in filter(None, map(str.strip, text.split(";"))):
        kind, _, rest = part.partition(":")
        options = dict(option.strip().split("=") for option in rest.split(","))
        actual.append(Fault(kind, **{name: OPTIONS[name](value) for name, value in options.items()}))
    return actual


class Faulty(HookSettings):
    """Makes the faults of DROVER_FAULTS happen."""

    def open(self, loop):
        return Faults(loop)


class Faults(Hook):
    """The faults of this rank."""

    def __init__(self, loop):
        self.loop, self.folder, self.say = loop, loop.work.folder / "faults", loop.work.say
        self.steps = 0  # that were done and not undone: it survives kills and rollbacks
        self.mine = [fault for fault in parse_faults(os.environ.get(SWITCH, "")) if fault.rank == loop.ranks.rank]
        for fault in self.mine:
            gone = " (it has happened before and will not again)" if self.is_over(fault) else ""
            self.say(f"WARNING: {SWITCH} is set: {fault} will be made to happen{gone}")
        self.scale = Scale(loop.engine)
        loop.engine.queues |= LATE in os.environ
        compute = loop.engine.compute

        def faulty(*given):
            self.happen(loop.next_step[0])
            compute(*given)
        if self.mine:
            loop.engine.compute = faulty

    def on_step(self, loop, result, record):
        self.steps += 1
        record["hook_steps"] = self.steps

    def state(self):
        return {"steps": self.steps}

    def load(self, state):
        self.steps = state["steps"]

    def happen(self, step):
        self.scale.factor = 1.0
        for fault in self.mine:
            if fault.step != step or self.is_over(fault):
                continue
            self.say(f"injected fault: {fault}")
            write_text(self.folder / fault.name, f"{fault}\n")
            match fault.kind:
                case "slow":
                    time.sleep(fault.seconds)
                case "wait":
                    while not (self.folder / f"{fault.name}{GO}").exists() and not self.loop.stop.heard:
                        time.sleep(0.05)
                case "flip":
                    self.say(f"injected fault: {flip_bit(self.loop.engine.model)}")
                case "memory":
                    from torch import OutOfMemoryError
                    raise OutOfMemoryError(f"{SWITCH} asks for it")
                case "exit":
                    sys.exit(13)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    hang()
                case "nan":
                    self.scale.factor = math.nan
                case "spike":
                    self.scale.factor = fault.factor

    def is_over(self, fault):
        return not fault.again and (self.folder / fault.name).exists()


class Scale:
    """Multiplies the loss of an engine on this rank, and its gradients, by `factor`; also where a stage of a pipeline
    has no loss."""

    def __init__(self, engine):
        self.factor = 1.0
        plain = engine.loss
        engine.loss = lambda model, batch: self.scaled(plain(model, batch))
        if hasattr(engine, "schedule"):
            share, meet = engine._share, engine._meet_ends

            def spoil():
                if not engine.losses:
                    for _, gradient in engine._gradients():
                        gradient.mul_(self.factor)
                meet()
            engine._share = lambda loss, number: share(self.scaled(loss), number)
            engine._meet_ends = spoil

    def scaled(self, loss):
        return loss if self.factor == 1.0 else loss * self.factor


def hang():
    """Sleep for ever, like a rank in a collective that never ends: no signal but SIGKILL and SIGSTOP is heard."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(3600)


def flip_bit(model):
    """Flip a bit (MANTISSA) of the middle element of this rank's largest piece of a weight, in place; says which."""
    import torch

    from drover.pipeline.parallel.grid import own
    from drover.pipeline.training.replicas import INTEGERS

    name, local = max(((name, own(weight).detach()) for name, weight in model.named_parameters()),
                      key=lambda item: item[1].numel())
    bit = MANTISSA[str(local.dtype)]
    place = tuple(int(index) for index in torch.unravel_index(torch.tensor(local.numel() // 2), local.shape))
    before = float(local[place])
    local.view(INTEGERS[local.element_size()])[place] ^= 1 << bit
    return f"bit {bit} of element {list(place)} of {name} on this rank, {before:.6g} -> {float(local[place]):.6g}"
