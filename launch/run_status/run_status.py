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
from drover.launch.slurm.scheduler import ENDED, LAST, UNKNOWN, JobInfo
from drover.launch.slurm.wait_reasons import EXPECTED, is_stuck, meaning
from drover.pipeline.contract.state import Progress
from drover.pipeline.core.console import duration, spelled

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
class Row:
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
    rows: list[Row]
    current: Row
    remarks: list[str]
    outcome: Outcome


def wanted_ids(run: RunFiles) -> list[str]:
    """Ids of the jobs whose states Slurm has to give; none if the run's files suffice."""
    ids: list[str] = []
    for stage, files in run.stages.items():
        if _is_due(run, stage):
            ids += [id for job in run.jobs(stage)
                    for id in (job.id, *(f"{job.id}_{element}" for element in job.elements or ()))]
            ids += [files.state.job] if files.state and files.state.job else []
    return ids


def judge(run: RunFiles, jobs: Jobs, now: float) -> RunStatus:
    """The status of the run at `now` (seconds since the epoch)."""
    rows: list[Row] = []
    asked: list[Row] = []  # requested by the newest submission; without one, the stages that were started
    for stage, files in run.stages.items():
        broken = any(row.state in ("failed", "stopped") for row in asked)
        rows.append(_Stage(run, stage, jobs, now).row(broken))
        asked += rows[-1:] if (run.jobs(stage) if run.chain else files.begun or files.manifest) else []
    current = min(asked or rows, key=lambda row: get_args(State).index(row.state))
    states = {row.state for row in rows}
    refused = run.chain.refused if run.chain else ""
    # A stage that waits for a failed one will never run.
    waits = "waiting" in states and "failed" not in states
    goes_on = not (asked or refused) or "running" in states or waits
    # What the newest submission lacks may have been made without Slurm since.
    partial = run.chain is not None and run.chain.partial and not states <= {*FINISHED}
    outcome: Outcome = None if goes_on else "done" if current.state in FINISHED and not partial else "failed"
    remarks = [SILENT] * (jobs is None) + [remark for row in rows for remark in row.remarks] + run.remarks
    if partial:
        remarks.append(f"not all jobs of the newest submission are queued: {refused or 'it is at work, or was killed'}")
    if outcome == "failed":
        remarks.append(f"to continue: {go_on(run)}")
    return RunStatus(run, rows, asked[-1] if outcome == "done" else current, remarks, outcome)


def go_on(run: RunFiles) -> str:
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
        said: the stage's final status, if it still counts.
        job: the job that matters now: the one that runs, else the next in the queue, else the first that failed, else
            the last. info: Slurm's answer about it.
        failed: array elements that ended without finishing their share, as (job, element, state). Unknown ones do not
            count: they may have been cancelled.
    """

    def __init__(self, run: RunFiles, stage: str, jobs: Jobs, now: float) -> None:
        self.run, self.stage, self.silent, self.now = run, stage, jobs is None, now
        self.files, self.own, chain = run.stages[stage], run.jobs(stage), run.chain
        known = jobs or {}
        self.said = said = self.files.state
        if said and (said.status == "done" or (chain and self.own and said.at < chain.submitted)):
            self.said = None  # its manifest is gone, or the record is from an earlier submission
        ids = [job.id for job in self.own] or [self.said.job if self.said else ""]
        infos = [known.get(id, JobInfo(id)) for id in ids]
        first = min(infos, key=lambda info: info.rank)
        self.info = first if first.rank < LAST else infos[-1]
        self.job = next((job for job in self.own if job.id == self.info.id), None)
        # Another array of the same phase continues what these elements left.
        continued = {job.phase for job in self.own if job.elements and job != self.job and job.id in known
                     and known[job.id].queued}
        self.failed = [(job, element, info.state) for job in self.own if job.phase not in continued
                       for element in job.elements or () if element not in self.files.shares[job.id]
                       and (info := known.get(f"{job.id}_{element}")) and info.state in ENDED - {UNKNOWN, "CANCELLED"}]

    def row(self, broken: bool) -> Row:
        """The stage's row. broken: an earlier stage has failed or was stopped."""
        stage, info, said, manifest = self.stage, self.info, self.said, self.files.manifest
        state, remark = self._verdict(broken)
        remarks, elapsed = [remark] if remark else [], ""
        if state in ("running", "waiting"):
            if (ended := self.files.ended).get("status") in ("crashed", "hung"):
                remarks.append(f"{stage} {ended['status']} before and was started again: {ended.get('reason')}")
            if stage == "train" and self.run.stop is not None:
                remarks.append(f"a request to stop training is pending ({self.run.stop or 'no reason given'}): it "
                               f"saves and ends")
        if state == "done" and manifest:  # over all starts of the submission that finished it
            elapsed = _time(max(manifest.wall_s, when(manifest.finished) - when(manifest.started)))
        elif state == "running":
            elapsed = _time(info.elapsed_s or (self.now - when(said.at) if said else 0.0))
        found, work, left = self._progress(state), "", ""
        figures = [f"nodes {info.nodes}"] if info.nodes else []
        if found:
            phase = f"{found.phase} " * (found.phase not in ("", stage))
            failed = ", failed: " * bool(self.failed) + ", ".join(str(element) for _, element, _ in self.failed)
            work = f"{phase}{found.done}/{found.total} {found.unit} {found.done / max(1, found.total):.0%}{failed}"
            if found.loss is not None:
                figures += [f"loss {found.loss:.4f}", f"tokens/s {found.tokens_per_s or 0:,.0f}",
                            f"goodput {found.goodput or 0:.1%}"]
            if found.left_s and state == "running" and said and found.at > said.at:  # written by this start
                left = _time(found.left_s)
        if restarts := max(self.files.state.attempt if self.files.state else 0, info.restarts):
            figures.append(f"restarts {restarts}")
        links = [job.id for job in self.own if job.kind == "link"]
        link = f" ({links.index(info.id) + 1}/{len(links)})" if info.id in links else ""
        return Row(stage, state, info.id + link, elapsed, work, left, ", ".join(figures), remarks)

    def _verdict(self, broken: bool) -> tuple[State, str]:
        """The state, and a remark about it or ""."""
        name, files, said, info = self.stage, self.files, self.said, self.info
        if files.damaged:
            return "failed", f"{name}: {files.damaged}"
        if info.queued and _is_due(self.run, name):
            if info.state != "PENDING":
                return "running", ""
            text = meaning(info.reason, info.id, several=name == "train" and self.run.train_nodes > 1)
            text = f"{name} (job {info.id}) {text} ({info.reason})"
            if is_stuck(info.reason):
                return "failed", f"{text}; remove it first: drover cancel {self.run.folder}"
            return "waiting", "" if info.reason in EXPECTED else text
        if files.manifest is not None:
            return "reused" if files.reused else "done", ""
        if said and said.status != "running":
            state: State = "failed" if said.status == "failed" else "stopped"
            step = "" if said.step is None else f" after step {said.step}"
            return state, f"{name} {state}{step}: {said.reason or 'it gave no reason'}{self._logs()}"
        if said.job if said else info.id:  # not if it was started by hand since
            if self.silent:
                return "running" if said else "waiting", ""
            if broken and not said and info.state in (UNKNOWN, "CANCELLED"):
                return "to do", ""  # Slurm removes jobs that wait for a failed one
            return "failed", f"{name} failed: {self._failure(info)}{self._logs()}"
        if not files.begun:
            return "to do", ""
        if files.alive is None:
            last = files.progress or said
            age = f"; its last record is {_time(self.now - when(last.at))} old" if last else ""
            return "running", f"{name} runs on {said.host if said else 'another machine'}, not visible from here{age}"
        restarted = files.ended.get("next") == "restart" and self.now - when(files.ended["at"]) < RESTART_S
        if files.alive or restarted:
            return "running", ""
        if said:
            return "failed", f"{name} failed: its process on {said.host} no longer exists; it was killed{self._logs()}"
        return "stopped", f"{name} is not done, and no process works on it"

    def _progress(self, state: State) -> Progress | None:
        """Finished elements of an array; otherwise the stage's own progress record."""
        found = self.files.progress
        for job in self.own:
            done = self.files.shares.get(job.id)
            if done is not None and (job == self.job or (done and not self.files.progress)):
                found = Progress(len(done), job.parts, "parts", job.phase)
        return None if found and found.phase and state in FINISHED else found

    def _failure(self, info: JobInfo) -> str:
        """Why elements of the stage's arrays failed, those that failed alike once, or its job."""
        causes = self.files.causes
        alike: dict[tuple[str, str], list[int]] = {}
        for job, element, how in self.failed:
            cause = causes.get(f"{job.id}_{element}", "")
            alike.setdefault((job.phase, f"{how}{cause and f': {cause}'}"), []).append(element)
        if alike:
            return "; ".join(f"{'element' if len(elements) == 1 else 'elements'} {spelled(elements)} of {phase} ended "
                             f"{how}" for (phase, how), elements in alike.items())
        end = "is no longer known to Slurm: it crashed or was cancelled" if info.state == UNKNOWN else \
            f"ended {info.state} ({info.reason or 'no reason given'})"
        cause = causes.get(info.id, "")
        return f"job {info.id} {end}{cause and f': {cause}'}"

    def _logs(self) -> str:
        """Paths of the stage's own log and of its job's log."""
        ids = [f"{job.id}_{element}" for job, element, _ in self.failed] or [self.info.id]
        logs = f"{self.run.folder}/logs"
        return f". Logs: {logs}/{self.stage}" + (f"/{ids[0]}.*, {logs}/slurm/{ids[0]}.log" if ids[0] else "/latest")


def _time(seconds: float) -> str:
    return duration(min(max(0.0, seconds), 1e9))
