"""What the files of a run say. Nothing is asked of Slurm here, and nothing is written.

Files may be replaced, cut or absent while they are read: what cannot be read now counts as not there.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter

from launch.slurm.chain import Chain, ChainJob, read_chain
from launch.slurm.evaluations import owed
from launch.slurm.jobspec import JobSpec
from launch.slurm.nodes import NODES, excluded
from pipeline.config.yaml_source import load_bounded
from pipeline.contract.manifest import MANIFEST, Manifest, read_manifest
from pipeline.contract.parts import marked_parts
from pipeline.contract.run import reused_folder
from pipeline.contract.stages import STAGES
from pipeline.contract.start_record import STARTED
from pipeline.contract.state import PROGRESS, STATE, STOP, Progress, StageState, read_attempts
from pipeline.errors import UserError
from pipeline.files import read_lines, read_sealed
from pipeline.records.checkpoints import named_after_steps, step_of
from pipeline.records.pending_evaluations import EVALUATIONS, evaluation_folder

Value = TypeVar("Value")


@dataclass(frozen=True)
class Share:
    """An array's elements whose share of the stage is done, `of` how many in all."""

    done: frozenset[int]
    of: int


@dataclass(frozen=True)
class StageFiles:
    """What a stage's folder says.

    Attributes:
        manifest: of the finished stage; `damaged`: why it cannot be read.
        reused: the run that it is taken from.
        begun: whether there is a start record.
        alive: whether the process that last held the stage is there; None where that cannot be seen from here.
        shares: by the id of an array.
        ended: the launcher's last word on a start in the newest submission, or on this box (`log_attempt`).
    """

    manifest: Manifest | None
    damaged: str
    reused: Path | None
    state: StageState | None
    progress: Progress | None
    begun: bool
    alive: bool | None
    shares: dict[str, Share]
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
    settings, chain = _settings(folder), _quietly(lambda: read_chain(folder), None)
    jobs, nodes = chain.jobs if chain else (), _number(settings, "launch.train.nodes") or 1
    events: list[dict[str, Any]] = _quietly(lambda: read_attempts(folder), [])
    newest = chain.id if chain else events[-1].get("chain") if events else None
    ended = {str(event.get("stage")): event for event in events
             if event.get("event") == "ended" and event.get("chain") == newest}
    # Of stages that plugins added, nothing is imported: they are known by what they left or were submitted as.
    added = [path.parent.name for path in sorted(folder.glob(f"*/{STARTED}"))]
    stages = {stage: _stage(folder, stage, settings, [job for job in jobs if job.stage == stage and job.elements],
                            ended.get(stage, {}))
              for stage in dict.fromkeys([*STAGES, *added, *(job.stage for job in jobs)])}
    return RunFiles(
        folder, chain, stages, _quietly(lambda: _evaluations(folder, settings, jobs), []),
        _quietly(lambda: list(read_lines(folder / NODES, appended=True)), []),
        _quietly(lambda: excluded(folder, nodes), []),
        _quietly(lambda: (folder / STOP).read_text(encoding="utf-8").strip(), None), nodes)


def when(text: str) -> float:
    """An ISO time in seconds since the epoch; 0 if it is none."""
    return _quietly(lambda: datetime.fromisoformat(text).timestamp(), 0.0)


def _stage(folder: Path, stage: str, settings: dict[str, Any], arrays: list[ChainJob],
           ended: dict[str, Any]) -> StageFiles:
    own, manifest, damaged = folder / stage, None, ""
    begun = (own / STARTED).exists()
    mine = begun or stage not in STAGES or not STAGES[stage].reusable
    origin = None if mine else _origin(folder, settings, stage)
    try:
        manifest = read_manifest((origin or folder) / stage)
    except (UserError, OSError, TypeError) as error:
        damaged = str(error)
    return StageFiles(
        manifest, damaged, None if origin == folder else origin, _record(StageState, own / STATE),
        _record(Progress, own / PROGRESS), begun, _alive(folder, stage), {job.id: _share(own, job) for job in arrays},
        ended)


def _record(kind: type[Value], path: Path) -> Value | None:
    """A record that a stage wrote; None if a value in it is not of its kind."""
    return _quietly(lambda: TypeAdapter(kind).validate_python(read_sealed(path)), None)


def _settings(folder: Path) -> dict[str, Any]:
    """The resolved configuration as it stands in the run folder, not checked: it may be of another version."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    file = folder / "config.yaml"
    found = _quietly(lambda: load_bounded(file.read_bytes(), loader, str(file)), None)
    return found if isinstance(found, dict) else {}


def _number(settings: Any, name: str) -> int:
    """A whole number of the configuration; 0 if there is none."""
    for key in name.split("."):
        settings = settings.get(key) if isinstance(settings, dict) else None
    return settings if isinstance(settings, int) else 0


def _origin(folder: Path, settings: dict[str, Any], stage: str, seen: tuple[Path, ...] = ()) -> Path | None:
    """The run that holds the finished stage: this one, or one of those that `reuse:` names."""
    if (folder / stage / MANIFEST).is_file():
        return folder
    reuse = settings.get("reuse")
    if not isinstance(reuse, str) or folder.resolve() in seen:
        return None
    other = reused_folder(folder, reuse)
    return _origin(other, _settings(other), stage, (*seen, folder.resolve()))


def _share(folder: Path, job: ChainJob) -> Share:
    parts: int = _quietly(lambda: JobSpec.load(Path(job.spec)).parts, 0)
    return Share(frozenset(_quietly(lambda: marked_parts(folder, parts, job.phase), set[int]())), parts)


def _evaluations(folder: Path, settings: dict[str, Any], submitted: Iterable[ChainJob]) -> list[EvaluationFiles]:
    """Those that were made, begun or submitted, and those that are owed: every so many checkpoints that are there."""
    every = _number(settings, "launch.evaluate.every_checkpoints") * _number(settings, "train.checkpoint.every_steps")
    due = owed(folder, every, _number(settings, "train.steps")) if every > 0 else []
    jobs: dict[int, ChainJob | None] = dict.fromkeys([*due, *map(step_of, named_after_steps(folder / EVALUATIONS))])
    jobs |= {int(job.name.rpartition("-")[2]): job for job in submitted if job.kind == "evaluation"}
    return [_evaluation(evaluation_folder(folder, step), step, job) for step, job in sorted(jobs.items())]


def _evaluation(folder: Path, step: int, job: ChainJob | None) -> EvaluationFiles:
    manifest = _quietly(lambda: read_manifest(folder / "evaluate"), None)
    states = [_record(StageState, folder / stage / STATE) for stage in ("convert", "evaluate")]
    failed = [state.reason for state in states if state and state.status == "failed" and manifest is None]
    return EvaluationFiles(step, f"{manifest.counts['bits_per_byte']:.3f} bits per byte" if manifest else "",
                           "; ".join(failed), job)


def _alive(folder: Path, stage: str) -> bool | None:
    """Whether the process that wrote its name into the stage's lock still runs; the lock itself is not touched."""
    text = _quietly(lambda: (folder / ".locks" / stage).read_text(encoding="utf-8"), "")
    match = re.match(r"process (\d+) on (\S+?),? ", text)
    if not match or match[2] != platform.node():
        return None if match else False
    command = _quietly(lambda: Path(f"/proc/{match[1]}/cmdline").read_bytes(), b"")
    return stage.encode() in command  # else the number is another process's by now


def _quietly(read: Callable[[], Value], otherwise: Value) -> Value:
    """What cannot be read now counts as not there."""
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, UserError):
        return otherwise
