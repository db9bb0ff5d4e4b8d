"""How a run stands: its stages, the evaluations beside training, and what needs attention."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from launch.run_status.run_files import RunFiles
from launch.run_status.stage_status import FINISHED, LIVE, Jobs, Row, is_due, stage_row
from launch.slurm.scheduler import JobInfo

SILENT = "Slurm does not answer: the states are what the files say, and may be old"


@dataclass(frozen=True)
class RunStatus:
    """A run. outcome: `done`, `failed` (nothing goes on by itself any more), or None while it goes on."""

    files: RunFiles
    rows: list[Row]
    evaluations: str
    remarks: list[str]
    outcome: Literal["done", "failed"] | None

    @property
    def current(self) -> Row:
        """The stage that says most: one that runs, else the first that needs attention, waits, or is to do."""
        order = ("running", "failed", "stopped", "waiting", "to do", *FINISHED)
        targets = [row for row in self.rows if row.stage in targets_of(self.files)]
        return min(targets or self.rows, key=lambda row: order.index(row.state))


def wanted_ids(files: RunFiles) -> list[str]:
    """Jobs that Slurm has to be asked for; none for a run whose files say it all."""
    ids: list[str] = []
    for stage, found in files.stages.items():
        if is_due(files, stage):
            for job in files.jobs(stage):
                ids += [job.id, *(f"{job.id}_{element}" for element in job.elements or ())]
            ids += [found.state.job] if found.state else []
    ids += [entry.job.id for entry in files.evaluations if entry.job and not entry.done]
    return [id for id in dict.fromkeys(ids) if id]


def targets_of(files: RunFiles) -> list[str]:
    """The stages that were asked for: by the newest submission, else those that were begun."""
    return [stage for stage, found in files.stages.items()
            if (files.jobs(stage) if files.chain else found.begun or found.manifest)]


def judge(files: RunFiles, jobs: Jobs, now: float) -> RunStatus:
    """How the run stands at `now` (seconds since the epoch)."""
    rows: list[Row] = []
    targets = targets_of(files)
    for stage in files.stages:
        broken = any(row.state in ("failed", "stopped") for row in rows if row.stage in targets)
        rows.append(stage_row(files, stage, jobs, now, broken=broken))
    evaluations, beside = _evaluations(files, jobs)
    # What waits for something that failed waits in vain.
    live = LIVE[:1] if any(row.state == "failed" for row in rows) else LIVE
    outcome: Literal["done", "failed"] | None = None
    if targets and not beside and not any(row.state in live for row in rows):
        outcome = "done" if all(row.state in FINISHED for row in rows if row.stage in targets) else "failed"
    remarks = [SILENT] if jobs is None else []
    remarks += [remark for row in rows for remark in row.remarks]
    return RunStatus(files, rows, evaluations, [*remarks, *_general(files, rows, outcome)], outcome)


def go_on(files: RunFiles) -> str:
    """The command that continues the run: that of the submission, which must not force again what it has forced."""
    if files.chain and files.chain.command:
        return shlex.join(["python", *(word for word in files.chain.command if word != "--force")])
    return f"python launch/submit.py --stage all --config {shlex.quote(str(files.folder / 'config.yaml'))}"


def _evaluations(files: RunFiles, jobs: Jobs) -> tuple[str, bool]:
    """Evaluations beside training, in a line ("" if there are none), and whether some are in the queue."""
    groups: dict[str, list[int]] = {"done": [], "running": [], "queued": [], "owed": [], "failed": []}
    for entry in files.evaluations:
        info = (jobs or {}).get(entry.job.id if entry.job else "", JobInfo(""))
        word = "done" if entry.done else ("queued" if info.state == "PENDING" else "running") if info.queued else \
            "failed" if entry.failed else "owed"
        groups[word].append(entry.step)
    counts = [f"{len(steps)} {word}" + (
        "" if word == "done" else f" (step {', '.join(map(str, steps[:4]))}{' ...' * (len(steps) > 4)})")
        for word, steps in groups.items() if steps]
    last = f"; last: step {groups['done'][-1]}, {files.result}" if files.result else ""
    text = f"evaluations of checkpoints: {', '.join(counts)}{last}" if counts else ""
    return text, bool(groups["running"] or groups["queued"])


def _general(files: RunFiles, rows: list[Row], outcome: str | None) -> list[str]:
    """Remarks that belong to no one stage."""
    found = [f"the evaluation of step {entry.step} failed: {entry.failed}" for entry in files.evaluations
              if entry.failed]
    for node, strike in {str(strike.get("node")): strike for strike in files.strikes}.items():
        left_out = "; it is left out of the next submission" if node in files.excluded else ""
        found.append(f"node {node} failed at {str(strike.get('at'))[:16]}: {strike.get('reason')}{left_out}")
    if files.stop is not None and any(row.stage == "train" and row.state in LIVE for row in rows):
        found.append(f"training was asked to stop{': ' + files.stop if files.stop else ''}; it saves and leaves")
    return [*found, f"to go on: {go_on(files)}"] if outcome == "failed" else found
