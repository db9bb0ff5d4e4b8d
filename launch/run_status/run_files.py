"""What the files of a run say. Nothing is asked of Slurm here, and nothing is written.

Files may be replaced, cut or absent while they are read: what cannot be read now counts as not there.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from drover.launch.slurm.chain import Chain, ChainJob, read_chain
from drover.launch.slurm.evaluations import owed
from drover.launch.slurm.nodes import NODES, excluded
from drover.pipeline.config.loading import read_without_plugins
from drover.pipeline.contract.manifest import Manifest, read_manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.start_record import STARTED
from drover.pipeline.contract.state import PROGRESS, STATE, STOP, Progress, StageState, read_attempts
from drover.pipeline.contract.tasks import marked_parts
from drover.pipeline.errors import UserError
from drover.pipeline.files import read_lines, read_sealed
from drover.pipeline.records.checkpoints import named_after_steps, step_of
from drover.pipeline.records.pending_evaluations import EVALUATIONS, evaluation_folder

Value = TypeVar("Value")


@dataclass(frozen=True)
class StageFiles:
    """What a stage's folder says.

    Attributes:
        manifest: of the finished stage; `damaged`: why it cannot be read. reused: whether another run holds it.
        begun: whether there is a start record.
        alive: whether the process that last held the stage is there; None where that cannot be seen from here.
        shares: the elements whose share of the stage is done, by the id of an array.
        ended: the launcher's last word on a start in the newest submission, or on this box (`log_attempt`).
    """

    manifest: Manifest | None
    damaged: str
    reused: bool
    state: StageState | None
    progress: Progress | None
    begun: bool
    alive: bool | None
    shares: dict[str, set[int]]
    ended: dict[str, Any]


@dataclass(frozen=True)
class EvaluationFiles:
    """An evaluation of a checkpoint beside training. result: in words, if it is done. failed: why, if it did."""

    step: int
    result: str
    failed: str
    job: ChainJob | None


@dataclass(frozen=True)
class RunFiles:
    """A run folder as it was found.

    Attributes:
        strikes: of nodes, oldest first; `excluded`: nodes that the next submission leaves out.
        stop: the reason in the stop file, if there is one.
        train_nodes: how many its configuration asks for.
    """

    folder: Path
    chain: Chain | None
    stages: dict[str, StageFiles]
    evaluations: list[EvaluationFiles]
    strikes: list[dict[str, Any]]
    excluded: list[str]
    stop: str | None
    train_nodes: int

    def jobs(self, stage: str) -> list[ChainJob]:
        """The jobs of a stage in the newest submission, without evaluations of checkpoints."""
        jobs = self.chain.jobs if self.chain else ()
        return [job for job in jobs if job.stage == stage and job.kind != "evaluation"]


def read_run(folder: Path) -> RunFiles:
    """Everything that the files of a run say, at this moment."""
    run, chain = _quietly(lambda: _run(folder), None), _quietly(lambda: read_chain(folder), None)
    jobs, nodes = chain.jobs if chain else (), run.config.launch.train.nodes if run else 1
    events: list[dict[str, Any]] = _quietly(lambda: read_attempts(folder), [])
    newest = chain.id if chain else events[-1].get("chain") if events else None
    ended = {str(event.get("stage")): event for event in events
             if event.get("event") == "ended" and event.get("chain") == newest}
    # Of stages that plugins added, nothing is imported: they are known by what they left or were submitted as.
    added = [path.parent.name for path in sorted(folder.glob(f"*/{STARTED}"))]
    stages = {stage: _stage(run, folder / stage, [job for job in jobs if job.stage == stage and job.elements],
                            ended.get(stage, {}))
              for stage in dict.fromkeys([*STAGES, *added, *(job.stage for job in jobs)])}
    return RunFiles(
        folder, chain, stages, _quietly(lambda: _evaluations(folder, run, jobs), []),
        _quietly(lambda: list(read_lines(folder / NODES, appended=True)), []),
        _quietly(lambda: excluded(folder, nodes), []),
        _quietly(lambda: (folder / STOP).read_text(encoding="utf-8").strip(), None), nodes)


def when(text: str) -> float:
    """An ISO time in seconds since the epoch; 0 if it is none."""
    return _quietly(lambda: datetime.fromisoformat(text).timestamp(), 0.0)


def _run(folder: Path) -> Run:
    """The run in its folder, wherever that is now, with nothing imported and nothing said of plugins."""
    config = read_without_plugins(folder / "config.yaml")
    return Run(config.model_copy(update={"runs_dir": str(folder.parent), "name": folder.name}))


def _stage(run: Run | None, own: Path, arrays: list[ChainJob], ended: dict[str, Any]) -> StageFiles:
    place, manifest, damaged = own, None, ""
    try:
        if run is not None and own.name in STAGES:
            place = run.stage_folder(own.name)
        manifest = read_manifest(place)
    except (UserError, OSError, TypeError) as error:
        damaged = str(error)
    shares = {job.id: _quietly(partial(marked_parts, own, job.parts, job.phase), set[int]()) for job in arrays}
    return StageFiles(manifest, damaged, place != own, _record(StageState, own / STATE),
                      _record(Progress, own / PROGRESS), (own / STARTED).exists(), _alive(own), shares, ended)


def _record(kind: type[Value], path: Path) -> Value | None:
    """A record that a stage wrote; None if a value in it is not of its kind."""
    return _quietly(lambda: TypeAdapter(kind).validate_python(read_sealed(path)), None)


def _evaluations(folder: Path, run: Run | None, submitted: tuple[ChainJob, ...]) -> list[EvaluationFiles]:
    """Those that were made, begun or submitted, and those that are owed: every so many checkpoints that are there."""
    due = owed(folder, run.config) if run else []
    jobs: dict[int, ChainJob | None] = dict.fromkeys([*due, *map(step_of, named_after_steps(folder / EVALUATIONS))])
    jobs |= {int(job.name.rpartition("-")[2]): job for job in submitted if job.kind == "evaluation"}
    found = []
    for step, job in sorted(jobs.items()):
        place = evaluation_folder(folder, step)
        manifest = _quietly(partial(read_manifest, place / "evaluate"), None)
        states = [_record(StageState, place / stage / STATE) for stage in ("convert", "evaluate")]
        failed = [state.reason for state in states if state and state.status == "failed" and manifest is None]
        result = f"{manifest.counts['bits_per_byte']:.3f} bits per byte" if manifest else ""
        found.append(EvaluationFiles(step, result, "; ".join(failed), job))
    return found


def _alive(own: Path) -> bool | None:
    """Whether the process that wrote its name into the stage's lock still runs; the lock itself is not touched."""
    text = _quietly(lambda: (own.parent / ".locks" / own.name).read_text(encoding="utf-8"), "")
    match = re.match(r"process (\d+) on (\S+?),? ", text)
    if not match or match[2] != platform.node():
        return None if match else False
    command = _quietly(lambda: Path(f"/proc/{match[1]}/cmdline").read_bytes(), b"")
    return own.name.encode() in command  # else the number is another process's by now


def _quietly(read: Callable[[], Value], otherwise: Value) -> Value:
    """What cannot be read now counts as not there."""
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return otherwise
