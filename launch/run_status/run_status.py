"""Derives the status of a run from its files and Slurm's answers. This module reads nothing itself.

A stage's own files count first, then Slurm's answers about its jobs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from drover.launch.run_status.run_files import RunFiles, when
from drover.launch.slurm.scheduler import LAST, UNKNOWN, JobInfo
from drover.launch.slurm.wait_reasons import EXPECTED, is_stuck, meaning
from drover.pipeline.core.console import duration

Jobs = Mapping[str, JobInfo] | None
"""Slurm's answers by job id; None: it does not answer."""
State = Literal["running", "failed", "stopped", "waiting", "to do", "done", "reused"]
"""docs/slurm.md explains them. The current stage of a run is the one whose state comes first here."""
Outcome = Literal["done", "failed"] | None
FINISHED = ("done", "reused")
SILENT = "Slurm does not answer: the states come from the run's files and may be old"
RESTART_S = 120.0
"""A stage that is started again on this machine records that it runs within this time (in seconds)."""


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
    outcome: Outcome


def wanted_ids(run: RunFiles) -> list[str]:
    """Ids of the jobs whose states Slurm has to give; none if the run's files suffice."""
    due = [stage for stage in run.stages if _is_due(run, stage)]
    states = [run.stages[stage].state for stage in due]
    return [*(job.id for stage in due for job in run.jobs(stage)),
            *(state.job for state in states if state and state.job)]


def judge(run: RunFiles, jobs: Jobs, now: float) -> RunStatus:
    """The status of the run at `now` (seconds since the epoch)."""
    rows: list[StageRow] = []
    requested: list[StageRow] = []  # by the newest submission; without one, the stages that were started
    for stage, files in run.stages.items():
        broken = any(row.state in ("failed", "stopped") for row in requested)
        rows.append(_Stage(run, stage, jobs, now).row(broken))
        if run.jobs(stage) if run.chain else files.started or files.manifest:
            requested.append(rows[-1])
    current = min(requested or rows, key=lambda row: get_args(State).index(row.state))
    states = {row.state for row in rows}
    refused = run.chain.refused if run.chain else ""
    # A stage that waits for a failed one will never run.
    continues = "running" in states or ("waiting" in states and "failed" not in states)
    # The jobs that are missing may not be needed: the stages may have been made without Slurm since.
    partial = run.chain is not None and run.chain.partial and not states <= {*FINISHED}
    outcome: Outcome = None
    if not continues and (requested or refused):
        outcome = "done" if current.state in FINISHED and not partial else "failed"
    remarks = [SILENT] * (jobs is None) + [remark for row in rows for remark in row.remarks]
    if run.excluded:
        remarks.append(f"excluded from the next submission, since they failed twice within a day: "
                       f"{', '.join(run.excluded)}")
    if partial:
        remarks.append(f"not all jobs of the newest submission are queued: {refused or 'it is at work, or was killed'}")
    if outcome == "failed":
        remarks.append(f"to continue: {continue_command(run)}")
    return RunStatus(run, rows, requested[-1] if outcome == "done" else current, remarks, outcome)


def continue_command(run: RunFiles) -> str:
    """The command that continues the run: the one that submitted it, without --force."""
    if run.chain and run.chain.jobs:
        program, *words = run.chain.command
        began = ["drover"] if Path(program).name == "drover" else ["python", program]
        return shlex.join([*began, *(word for word in words if word != "--force")])
    return f"drover run --config {shlex.quote(str(run.folder / 'config.yaml'))} --cluster local"


def _is_due(run: RunFiles, stage: str) -> bool:
    """Whether the stage is not done, or was done before the newest submission that requests it."""
    manifest = run.stages[stage].manifest
    return manifest is None or bool(run.chain and run.jobs(stage)
                                    and when(manifest.finished) < when(run.chain.submitted))


class _Stage:
    """A stage's files and Slurm's answers about its jobs.

    Attributes:
        final: the stage's final status, if it still counts.
        info: Slurm's answer about the job that matters now: the one that runs, else the next in the queue, else the
            first that failed, else the last.
    """

    def __init__(self, run: RunFiles, stage: str, jobs: Jobs, now: float) -> None:
        self.run, self.stage, self.silent, self.now = run, stage, jobs is None, now
        self.files = run.stages[stage]
        own = run.jobs(stage)
        self.final = self.files.state
        if self.final and (self.final.status == "done" or (run.chain and own and self.final.at < run.chain.submitted)):
            self.final = None  # its manifest is gone, or the record is from an earlier submission
        ids = [job.id for job in own] or [self.final.job if self.final else ""]
        infos = [(jobs or {}).get(id, JobInfo(id)) for id in ids]
        first = min(infos, key=lambda info: info.rank)
        self.info = first if first.rank < LAST else infos[-1]

    def row(self, broken: bool) -> StageRow:
        """The stage's row. broken: an earlier stage has failed or was stopped."""
        stage, info, final, files = self.stage, self.info, self.final, self.files
        state, remark = self._state(broken)
        remarks = [remark] if remark else []
        ended = [start for start in files.starts if start.status in ("crashed", "hung")]
        elapsed = progress = left = ""
        figures = [f"nodes {info.nodes}"] if info.nodes else []
        if state in ("running", "waiting"):
            if ended:
                remarks.append(f"{stage} {ended[-1].status} before and was started again: {ended[-1].reason}")
            if stage == "train" and self.run.stop is not None:
                remarks.append(f"a request to stop training is pending ({self.run.stop or 'no reason given'}): it "
                               f"saves and ends")
        if state == "done" and files.manifest:  # over all starts of the submission that finished it
            elapsed = _time(max(files.manifest.wall_s, when(files.manifest.finished) - when(files.manifest.started)))
        elif state == "running":
            elapsed = _time(info.elapsed_s or (self.now - when(final.at) if final else 0.0))
        now = files.progress
        if now and not (now.phase and state in FINISHED):
            phase = f"{now.phase} " * (now.phase not in ("", stage))
            progress = f"{phase}{now.done}/{now.total} {now.unit} {now.done / max(1, now.total):.0%}"
            if now.loss is not None:
                figures += [f"loss {now.loss:.4f}", f"tokens/s {now.tokens_per_s or 0:,.0f}",
                            f"goodput {now.goodput or 0:.1%}"]
            if now.left_s and state == "running" and final and now.at > final.at:  # written by this start
                left = _time(now.left_s)
        if restarts := max(files.state.attempt if files.state else 0, info.restarts):
            figures.append(f"restarts {restarts}")
        return StageRow(stage, state, info.id, elapsed, progress, left, ", ".join(figures), remarks)

    def _state(self, broken: bool) -> tuple[State, str]:
        """The state, and a remark about it or ""."""
        name, files, final, info = self.stage, self.files, self.final, self.info
        if files.damaged:
            return "failed", f"{name}: {files.damaged}"
        if info.queued and _is_due(self.run, name):
            return self._queued()
        if files.manifest is not None:
            return "reused" if files.reused else "done", ""
        if final and final.status != "running":
            state: State = "failed" if final.status == "failed" else "stopped"
            step = "" if final.step is None else f" after step {final.step}"
            return state, f"{name} {state}{step}: {final.reason or 'it gave no reason'}{self._logs()}"
        if final.job if final else info.id:  # not if it was started by hand since
            if self.silent:
                return "running" if final else "waiting", ""
            if broken and not final and info.state in (UNKNOWN, "CANCELLED"):
                return "to do", ""  # Slurm removes jobs that wait for a failed one
            end = "is no longer known to Slurm: it crashed or was cancelled" if info.state == UNKNOWN else \
                f"ended {info.state} ({info.reason or 'no reason given'})"
            reasons = [start.reason for start in files.starts if start.job.partition("_")[0] == info.id]
            cause = f": {reasons[-1]}" if reasons and reasons[-1] else ""
            return "failed", f"{name} failed: job {info.id} {end}{cause}{self._logs()}"
        if not files.started:
            return "to do", ""
        if files.alive is None:
            last = files.progress or final
            age = f"; its last record is {_time(self.now - when(last.at))} old" if last else ""
            return "running", f"{name} runs on {final.host if final else 'another machine'}, not visible from here{age}"
        last_start = files.starts[-1] if files.starts else None
        if files.alive or (last_start and last_start.next == "restart"
                           and self.now - when(last_start.ended) < RESTART_S):
            return "running", ""
        if final:
            return "failed", f"{name} failed: its process on {final.host} no longer exists; it was killed{self._logs()}"
        return "stopped", f"{name} is not done, and no process works on it"

    def _queued(self) -> tuple[State, str]:
        """State and details of a stage whose job runs or waits."""
        name, info = self.stage, self.info
        if info.state != "PENDING":
            return "running", ""
        text = meaning(info.reason, info.id, several=name == "train" and self.run.train_nodes > 1)
        text = f"{name} (job {info.id}) {text} ({info.reason})"
        if is_stuck(info.reason):
            return "failed", f"{text}; remove it first: drover cancel {self.run.folder}"
        return "waiting", "" if info.reason in EXPECTED else text

    def _logs(self) -> str:
        """What shows the output."""
        return f". `drover why {self.run.folder}` shows the end of its output in {self.run.folder}/logs/{self.stage}"


def _time(seconds: float) -> str:
    return duration(min(max(0.0, seconds), 1e9))
