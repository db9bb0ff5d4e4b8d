"""The faults of a soak: each does its mischief at once and says what it did."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from random import Random

from pipeline.records.checkpoints import MARKER
from tools.chaos.run import SoakRun

Fault = Callable[[SoakRun, Random], str]
SIZES = (1, 2, 4)
"""Nodes that training may go on with."""


class Missed(Exception):  # noqa: N818 - nothing is wrong
    """A fault that found nothing to hit; says why."""


def kill_rank(run: SoakRun, dice: Random) -> str:
    """kill -9 one rank."""
    return _signal_rank(run, dice, signal.SIGKILL, "killed")


def freeze_rank(run: SoakRun, dice: Random) -> str:
    """SIGSTOP one rank: it hangs, and the others notice."""
    if len(run.ranks()) < 2:
        raise Missed("no other rank that could notice")
    return _signal_rank(run, dice, signal.SIGSTOP, "stopped")


def kill_runner(run: SoakRun, dice: Random) -> str:
    """kill -9 what leads the job."""
    if (pid := run.runner()) is None:
        raise Missed("no runner")
    os.kill(pid, signal.SIGKILL)
    return f"process {pid}"


def warn(run: SoakRun, dice: Random) -> str:
    """The signal that Slurm sends before the time limit."""
    return _said(run.scheduler.signal(run.job(), "USR2"), f"USR2 to job {run.job()}")


def requeue(run: SoakRun, dice: Random) -> str:
    """`scontrol requeue` from outside."""
    return _said(run.scheduler.requeue(run.job()), f"job {run.job()}")


def kill_node(run: SoakRun, dice: Random) -> str:
    """A node loses power, and comes back a while later; Slurm is told of it or not."""
    node, seconds, told = dice.choice(run.lab.nodes), round(dice.uniform(2, 15), 1), dice.random() < 0.5
    run.lab.kill_node(node, told)
    time.sleep(seconds)
    run.lab.start_node(node)
    return f"{node} for {seconds} s{'' if told else ', unnoticed'}"


def restart_controller(run: SoakRun, dice: Random) -> str:
    """slurmctld is away for a while."""
    seconds = round(dice.uniform(1, 8), 1)
    run.lab.stop_controller()
    time.sleep(seconds)
    run.lab.start_controller()
    return f"away for {seconds} s"


def damage_checkpoint(run: SoakRun, dice: Random) -> str:
    """Training is stopped, a byte of its newest checkpoint turns over, and training is submitted again."""
    run.stop()
    if len(saved := run.saved()) < 2:
        run.go_on()
        raise Missed("only one checkpoint, which is needed")
    path = max((path for path in saved[-1].iterdir() if path.name != MARKER),
               key=lambda path: path.stat().st_size)
    place = dice.randrange(path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))
    run.go_on()
    return f"byte {place} of {saved[-1].name}/{path.name}"


def resize(run: SoakRun, dice: Random) -> str:
    """Training is stopped, and submitted again with another number of nodes."""
    before = run.nodes
    run.stop()
    run.nodes = dice.choice([size for size in SIZES if size != before])
    run.go_on()
    return f"{before} -> {run.nodes} nodes"


FAULTS: dict[str, Fault] = {fault.__name__: fault for fault in (
    kill_rank, kill_runner, warn, requeue, kill_node, restart_controller, freeze_rank, damage_checkpoint, resize)}


def order(seed: int, count: int) -> list[str]:
    """The faults in the order of this seed: every kind comes once before any comes again."""
    dice, names = Random(seed), list(FAULTS)
    found: list[str] = []
    while len(found) < count:
        dice.shuffle(names)
        found += names
    return found[:count]


def _signal_rank(run: SoakRun, dice: Random, number: int, did: str) -> str:
    wanted = dice.randrange(max(SIZES))
    if not (ranks := run.ranks()):
        raise Missed("no ranks")
    rank = sorted(ranks)[wanted % len(ranks)]
    try:
        os.kill(ranks[rank], number)
    except ProcessLookupError:
        raise Missed(f"rank {rank} was gone") from None
    return f"{did} rank {rank} of {len(ranks)}"


def _said(problem: str | None, done: str) -> str:
    if problem is not None:
        raise Missed(problem)
    return done
