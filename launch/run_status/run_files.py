"""Reads the files of a run. This module never calls Slurm and never writes.

Files may be replaced, truncated or missing while they are read: a file that cannot be read now counts as missing.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import psutil
from pydantic import TypeAdapter

from drover.launch.slurm.chain import ChainJob, JobChain, read_chain
from drover.launch.slurm.nodes import failing
from drover.pipeline.config.loading import OF_A_STAGE, read_without_plugins
from drover.pipeline.contract.manifest import STARTED, Manifest, read_manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import PROGRESS, STOP, Progress, StageState, read_state
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_bytes, read_sealed
from drover.pipeline.records.metrics import RunFacts, Start

Value = TypeVar("Value")


@dataclass(frozen=True)
class StageFiles:
    """The contents of a stage's folder.

    Attributes:
        manifest: of the finished stage; `damaged`: why it cannot be read. reused: it is in the folder of another run.
        started: whether there is a start record.
        alive: whether the process that last held the stage still runs; None if it is on another machine.
        starts: of the newest submission, or of the last command on this machine.
    """

    manifest: Manifest | None
    damaged: str
    reused: bool
    state: StageState | None
    progress: Progress | None
    started: bool
    alive: bool | None
    starts: list[Start]


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run folder.

    Attributes:
        excluded: nodes that failed twice within a day.
        stop: the reason in the stop file, if there is one.
        train_nodes: how many nodes the configuration requests for training.
    """

    folder: Path
    chain: JobChain | None
    stages: dict[str, StageFiles]
    excluded: list[str]
    stop: str | None
    train_nodes: int

    def jobs(self, stage: str) -> list[ChainJob]:
        """The jobs of a stage in the newest submission."""
        return [job for job in self.chain.jobs if job.stage == stage] if self.chain else []


def read_run(folder: Path) -> RunFiles:
    """Read the files of a run."""
    run = _quietly(lambda: _run(folder), None)
    chain = _quietly(lambda: read_chain(folder), None)
    nodes = run.config.launch.train.nodes if run else 1
    starts = newest_starts(folder, chain)
    # Plugins are not imported: the stages that they add are known by their records and jobs.
    added = sorted(path.parent.name for name in OF_A_STAGE for path in folder.glob(f"*/{name}"))
    names = dict.fromkeys([*STAGES, *added, *(job.stage for job in (chain.jobs if chain else ()))])
    return RunFiles(
        folder, chain,
        {name: _stage(run, folder / name, [start for start in starts if start.stage == name]) for name in names},
        _quietly(lambda: failing(folder, nodes)[0], list[str]()),
        _quietly(lambda: read_bytes(folder / STOP).decode().strip(), None), nodes)


def newest_starts(folder: Path, chain: JobChain | None) -> list[Start]:
    """The starts of the newest submission, or of the last command on this machine."""
    starts = _quietly(lambda: RunFacts(folder).starts, list[Start]())
    newest = chain.id if chain else starts[-1].chain if starts else ""
    return [start for start in starts if start.chain == newest]


def when(text: str) -> float:
    """An ISO time in seconds since the epoch; 0 if the text is no time."""
    return _quietly(lambda: datetime.fromisoformat(text).timestamp(), 0.0)


def _run(folder: Path) -> Run:
    """The run at the folder's present place, without importing plugins or printing a note about them."""
    config = read_without_plugins(folder / "config.yaml")
    return Run(config.model_copy(update={"runs_dir": str(folder.parent), "name": folder.name}))


def _stage(run: Run | None, own: Path, starts: list[Start]) -> StageFiles:
    place, manifest, damaged = own, None, ""
    try:
        if run is not None and own.name in STAGES:
            place = run.stage_folder(own.name)
        manifest = read_manifest(place)
    except (UserError, OSError, TypeError) as error:
        damaged = str(error)
    # Not by `read_record`: it has a loss of NaN as a text.
    progress = _quietly(lambda: TypeAdapter(Progress).validate_python(read_sealed(own / PROGRESS)), None)
    return StageFiles(manifest, damaged, place != own, read_state(own), progress, (own / STARTED).exists(), _alive(own),
                      starts)


def _alive(own: Path) -> bool | None:
    """Whether the process that the stage's lock names still runs. The lock itself is not touched."""
    text = _quietly(lambda: read_bytes(own.parent / ".locks" / own.name).decode(), "")
    match = re.match(r"process (\d+) on (\S+?),? ", text)
    if not match or match[2] != platform.node():
        return None if match else False
    command = _quietly(lambda: psutil.Process(int(match[1])).cmdline(), list[str]())
    return any(own.name in word for word in command)  # else another process has the number by now


def _quietly(read: Callable[[], Value], otherwise: Value) -> Value:
    """What `read` returns; `otherwise` if that cannot be read now."""
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError, psutil.Error):
        return otherwise
