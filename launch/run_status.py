"""The status of a run, from its files and from Slurm's answers about its jobs. A stage's own files count first.

Nothing is written. Files may be replaced, truncated or missing while they are read: one that cannot be read now counts
as missing.
"""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar, get_args

import psutil
from pydantic import TypeAdapter

from drover.launch.slurm.chain import JobChain, read_chain
from drover.launch.slurm.scheduler import EXPECTED, NEVER, UNKNOWN, JobInfo
from drover.pipeline.config.loading import read_without_plugins, recorded_stages
from drover.pipeline.contract.manifest import STARTED, Manifest, read_manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES, WATCH
from drover.pipeline.contract.state import PROGRESS, STOP, Progress, read_state
from drover.pipeline.core.console import counted, duration
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_bytes, read_sealed
from drover.pipeline.records.checkpoint_scores import all_scored
from drover.pipeline.records.checkpoints import SCORES
from drover.pipeline.records.metrics import RunFacts, Start

Value = TypeVar("Value")
Jobs = Mapping[str, JobInfo] | None
"""Slurm's answers by job id; None: it does not answer."""
State = Literal["running", "ending", "failed", "cancelled", "stopped", "waiting", "to do", "done", "reused"]
"""docs/slurm.md explains them. The current stage of a run is the one whose state comes first here."""
FINISHED = ("done", "reused")
ENDED = ("failed", "cancelled")
SILENT = "Slurm does not answer: the states come from the run's files and may be old"
ENDS = {UNKNOWN: "is no longer known to Slurm: it crashed or was cancelled",
        "CANCELLED": "was ended by scancel",  # squeue keeps the reason that it waited for
        "TIMEOUT": "reached its time limit: raise launch.<stage>.time, or launch.signal_s, the time left to end in "
                   "order"}
RESTART_S = 120.0
"""A stage that is started again on this machine records that it runs within this time (in seconds)."""


class StageFiles:
    """What the files of a run say of a stage.

    Attributes:
        job: its job in the newest submission. id: in Slurm, of that or of its last start.
        starts: of the newest submission, or of the last command on this machine.
        manifest: of the finished stage; `damaged`: why it cannot be read. reused: it is in the folder of another run.
        last: the status of its last start; None if it is done, or if that start is older than the newest submission.
        due: whether it is not done, or was done before the newest submission that requests it.
        started: whether there is a start record.
        scored: checkpoints that were scored while training. all_scored: of the job that scores them, whether training
            is done and all checkpoints that are due have scores.
        alive: whether the process that last held the stage still runs; None if it is on another machine.
    """

    def __init__(self, run: Run | None, chain: JobChain | None, own: Path, starts: list[Start]) -> None:
        self.name = own.name
        self.job = next((job for job in (chain.jobs if chain else ()) if job.stage == own.name), None)
        self.starts = [start for start in starts if start.stage == own.name]
        self.manifest: Manifest | None = None
        self.damaged = ""
        self.reused = False
        try:
            folder = run.stage_folder(own.name) if run and own.name in STAGES else own
            self.reused = folder != own
            self.manifest = read_manifest(folder)
        except (UserError, OSError, TypeError) as error:
            self.damaged = str(error)
        submitted = chain.submitted if chain and self.job else ""
        state = read_state(own)
        self.last = state if state and state.status != "done" and state.at >= submitted else None
        self.id = self.job.id if self.job else self.last.job if self.last else ""
        self.due = self.manifest is None or _when(self.manifest.finished) < _when(submitted)
        # Not by `read_record`: it has a loss of NaN as a text.
        self.progress = _quietly(lambda: TypeAdapter(Progress).validate_python(read_sealed(own / PROGRESS)), None)
        self.started = (own / STARTED).exists()
        self.scored = len([*(own / SCORES).glob("step-*.json")])
        self.all_scored = own.name == WATCH and _quietly(lambda: all_scored(run), False)
        self.alive = _alive(own)


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run folder.

    Attributes:
        chain: the newest submission; None if nothing of it was queued and the run was started here since.
        stop: the reason in the stop file, if there is one.
    """

    folder: Path
    chain: JobChain | None
    stages: dict[str, StageFiles]
    stop: str | None

    @property
    def wanted_ids(self) -> list[str]:
        """Ids of the jobs whose states Slurm has to give; none if the files suffice."""
        return [stage.id for stage in self.stages.values() if stage.due and stage.id]


@dataclass(frozen=True)
class StageRow:
    """A stage in the table; "" for what is unknown or does not apply.

    figures: more about its work. remarks: what a person should know or do.
    """

    stage: str
    state: State
    job: str
    elapsed: str
    progress: str
    left: str
    figures: str
    remarks: list[str]


@dataclass(frozen=True)
class RunStatus:
    """A run.

    Attributes:
        current: of the requested stages, the one to look at first.
        outcome: `done`, `failed` (nothing will continue by itself), or None while the run continues.
    """

    files: RunFiles
    rows: list[StageRow]
    current: StageRow
    remarks: list[str]
    outcome: Literal["done", "failed"] | None


def read_run(folder: Path) -> RunFiles:
    """Read the files of a run. Plugins are not imported: the stages that they add are known by their records and jobs.
    """
    chain = _quietly(lambda: read_chain(folder), None)
    starts = _quietly(lambda: RunFacts(folder).starts, list[Start]())
    if chain and not chain.jobs and starts and starts[-1].at > chain.submitted:
        chain = None  # Slurm accepted no job of it, and the run was started on this machine since
    own = folder / "config.yaml"  # the first start writes it
    config = own if chain is None or own.is_file() else folder / "launch" / Path(chain.config).name
    run = _quietly(lambda: Run(read_without_plugins(config).model_copy(
        update={"runs_dir": str(folder.parent), "name": folder.name})), None)
    newest = chain.id if chain else starts[-1].chain if starts else ""
    starts = [start for start in starts if start.chain == newest]
    names = dict.fromkeys([*STAGES, *recorded_stages(folder), *(job.stage for job in (chain.jobs if chain else ()))])
    return RunFiles(folder, chain, {name: StageFiles(run, chain, folder / name, starts) for name in names},
                    _quietly(lambda: read_bytes(folder / STOP).decode().strip(), None))


def judge(run: RunFiles, jobs: Jobs, now: float) -> RunStatus:
    """The status of the run at `now` (seconds since the epoch)."""
    rows = list[StageRow]()
    requested = list[StageRow]()  # by the newest submission; without one, the stages that were started
    for stage in run.stages.values():
        broken = any(row.state in ("ending", *ENDED, "stopped") for row in requested)
        rows.append(_row(run, stage, jobs, now, broken=broken))
        if stage.job if run.chain else stage.started or stage.manifest:
            requested.append(rows[-1])
    current = min(requested or rows, key=lambda row: get_args(State).index(row.state))
    states = {row.state for row in rows}
    refused = run.chain.refused if run.chain else ""
    # The jobs that are missing may not be needed: the stages may have been made without Slurm since.
    partial = run.chain is not None and run.chain.partial and not states <= {*FINISHED}
    remarks = [SILENT] * (jobs is None) + [remark for row in rows for remark in row.remarks]
    if partial:
        remarks.append(f"not all jobs of the newest submission are queued: {refused or 'it is at work, or was killed'}")
    # A stage that waits for a failed one will never run.
    continues = bool({"running", "ending"} & states) or ("waiting" in states and states.isdisjoint(ENDED))
    if continues or not (requested or refused):
        return RunStatus(run, rows, current, remarks, None)
    if current.state in FINISHED and not partial:
        return RunStatus(run, rows, (requested or rows)[-1], remarks, "done")
    mended = "once the cause is fixed, " * (current.state == "failed" or bool(refused))
    # On this machine the cause may be in the user's own file, of which the run folder has a copy.
    how = "the same command continues" if mended and not run.chain else f"to continue: {continue_command(run)}"
    return RunStatus(run, rows, current, [*remarks, mended + how], "failed")


def continue_command(run: RunFiles) -> str:
    """The command that continues the run: the one that submitted it, without --force."""
    if run.chain:
        program, *words = run.chain.command
        began = ["drover"] if Path(program).name == "drover" else ["python", program]
        return shlex.join([*began, *(word for word in words if word != "--force")])
    return f"drover run {shlex.quote(str(run.folder / 'config.yaml'))} --cluster local"


def _row(run: RunFiles, stage: StageFiles, jobs: Jobs, now: float, *, broken: bool) -> StageRow:
    """The stage's row. broken: an earlier stage has failed, was stopped or is ending."""
    info = (jobs or {}).get(stage.id, JobInfo(stage.id))
    state, remark = _state(run, stage, info, now, silent=jobs is None, broken=broken)
    remarks = [remark] * bool(remark)
    failures = [start for start in stage.starts if start.status in ("crashed", "hung")]
    if failures and state in ("running", "waiting"):
        remarks.append(f"{stage.name} {failures[-1].status} before and was started again: {failures[-1].reason}")
    if stage.name == "train" and run.stop is not None and state in ("running", "waiting"):
        remarks.append(f"a request to stop training is pending ({run.stop or 'no reason given'}): it saves and ends")
    elapsed = progress = left = ""
    last, done, finished = stage.last, stage.progress, stage.manifest
    if state == "done" and finished:  # over all starts of training; of other stages, those of the submission
        elapsed = _time(max(finished.run_s, _when(finished.finished) - _when(finished.started)))
    elif state == "running":
        elapsed = _time(info.elapsed_s or (now - _when(last.at) if last else 0))
    figures = [f"nodes {info.nodes}"] * bool(info.nodes)
    if done and not (done.phase and state in FINISHED):
        phase = f"{done.phase} " * (done.phase not in ("", stage.name))
        progress = f"{phase}{done.done}/{done.total} {done.unit} {done.done / max(1, done.total):.0%}"
        if done.loss is not None:
            figures.append(f"loss {done.loss:.4f}, tokens/s {done.tokens_per_s or 0:,.0f}, "
                           f"goodput {done.goodput or 0:.1%}")
        if done.left_s and state == "running" and last and done.at > last.at:  # written by this start
            left = _time(done.left_s)
    if restarts := info.restarts if done is None or done.restarts is None else done.restarts:
        figures.append(f"restarts {restarts}")
    if stage.scored:
        figures.append(f"scored {counted(stage.scored, 'checkpoint')}")
    return StageRow(stage.name, state, info.id, elapsed, progress, left, ", ".join(figures), remarks)


def _state(run: RunFiles, stage: StageFiles, info: JobInfo, now: float, *, silent: bool, broken: bool
           ) -> tuple[State, str]:
    """The state of a stage, and a remark about it or ""."""
    name, last = stage.name, stage.last
    logs = f". `drover why {run.folder}` shows the end of its output"
    if stage.damaged:
        return "failed", f"{name}: {stage.damaged}"
    if info.queued and stage.due:
        if info.state == "COMPLETING":
            return "ending", (f"{name} (job {info.id}) is ending or being cancelled: Slurm waits until its processes "
                              f"are gone")
        if info.state != "PENDING":
            return "running", ""
        if info.reason in NEVER:
            return "failed", (f"{name} (job {info.id}) will never start ({info.reason}): look at {NEVER[info.reason]}. "
                              f"Remove it first: drover cancel {run.folder}")
        return "waiting", "" if info.reason in EXPECTED else f"{name} (job {info.id}) waits: {info.reason}"
    if stage.manifest is not None or stage.all_scored:
        return "reused" if stage.reused else "done", ""
    if last and last.status != "running":
        state: State = "failed" if last.status == "failed" else "stopped"
        step = "" if last.step is None else f" after step {last.step}"
        return state, f"{name} {state}{step}: {last.reason.rstrip('.') or 'it gave no reason'}{logs}"
    if last.job if last else info.id:  # not if it was started by hand since
        if silent:
            return "running" if last else "waiting", ""
        if broken and not last and info.state in (UNKNOWN, "CANCELLED"):
            return "to do", ""  # Slurm removes jobs that wait for a failed one
        end = ENDS.get(info.state, f"ended {info.state} ({info.reason or 'no reason given'})")
        if info.reason in NEVER:
            end = f"would never have started ({info.reason}: look at {NEVER[info.reason]}), so Slurm removed it"
        reasons = ["", *(f": {start.reason.rstrip('.')}" for start in stage.starts
                         if start.job.partition("_")[0] == info.id and start.reason)]
        kind: State = "cancelled" if info.state == "CANCELLED" and info.reason not in NEVER else "failed"
        return kind, f"{name} {kind}: job {info.id} {end}{reasons[-1]}{logs}"
    if not stage.started:
        return "to do", ""
    if stage.alive is None:
        latest = stage.progress or last
        age = f"; its last record is {_time(now - _when(latest.at))} old" if latest else ""
        return "running", f"{name} runs on {last.host if last else 'another machine'}, not visible from here{age}"
    restarts = any(start.next == "restart" and now - _when(start.ended) < RESTART_S for start in stage.starts[-1:])
    if stage.alive or restarts:
        return "running", ""
    if last:
        if stage.starts and (start := stage.starts[-1]).status == "preempted" and _when(last.at) <= _when(start.ended):
            return "stopped", f"{name} stopped: {start.reason}{logs}"
        return "failed", f"{name} failed: its process on {last.host} no longer exists; it was killed{logs}"
    return "stopped", f"{name} is not done, and no process works on it"


def _alive(own: Path) -> bool | None:
    """Whether the process that the stage's lock names still runs. The lock itself is not touched."""
    text = _quietly(lambda: read_bytes(own.parent / ".locks" / own.name).decode(), "")
    match = re.match(r"process (\d+) on (\S+?),? ", text)
    if not match or match[2] != platform.node():
        return None if match else False
    command = _quietly(lambda: psutil.Process(int(match[1])).cmdline(), list[str]())
    return any(own.name in word for word in command)  # else another process has the number by now


def _when(text: str) -> float:
    """An ISO time in seconds since the epoch; 0 if the text is no time."""
    return _quietly(lambda: datetime.fromisoformat(text).timestamp(), 0.0)


def _time(seconds: float) -> str:
    return duration(min(max(0.0, seconds), 1e9))


def _quietly(read: Callable[[], Value], otherwise: Value) -> Value:
    """What `read` returns; `otherwise` if that cannot be read now."""
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError, psutil.Error):
        return otherwise
