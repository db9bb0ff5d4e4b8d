"""How a run stands: its stages, the evaluations beside training, and what needs attention."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from launch.run_status.run_files import RunFiles
from launch.run_status.stage_status import BAD, LIVE, Jobs, Row, StageStatus, is_to_rebuild
from launch.slurm.scheduler import JobInfo


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
        targets = [row for row in self.rows if row.stage in targets_of(self.files)] or self.rows
        for states in (("running", "running?", "starting"), {*BAD, "stopped"} - {"removed"}, LIVE):
            if found := [row for row in targets if row.state in states]:
                return found[0]
        return next((row for row in targets if row.state not in ("done", "reused")), targets[-1])


def wanted_ids(files: RunFiles) -> list[str]:
    """Jobs that Slurm has to be asked for; none for a run whose files say it all."""
    ids: list[str] = []
    for stage, found in files.stages.items():
        if found.manifest is None or is_to_rebuild(files, stage):
            for job in files.jobs(stage):
                ids += [job.id, *(f"{job.id}_{element}" for element in job.elements or ())]
            ids += [found.state.job] if found.state and found.state.job else []
    ids += [entry.job.id for entry in files.evaluations if entry.job and not entry.done]
    return list(dict.fromkeys(ids))


def targets_of(files: RunFiles) -> list[str]:
    """The stages that were asked for: by the newest submission, else those that were begun."""
    if files.chain:
        return [stage for stage in files.stages if files.jobs(stage)]
    return [stage for stage, found in files.stages.items() if found.begun or found.manifest]


def judge(files: RunFiles, jobs: Jobs, now: float) -> RunStatus:
    """How the run stands at `now` (seconds since the epoch)."""
    judged = [StageStatus(files, stage, jobs, now) for stage in files.stages]
    rows = [stage.row() for stage in judged]
    states = {row.stage: row.state for row in rows}
    rows = [_removed(row, files, states) for row in rows]
    remarks = [remark for stage, row in zip(judged, rows, strict=True) for remark in stage.remarks(row.state)]
    if gone := [row.stage for row in rows if row.state == "removed"]:
        remarks.append(f"{', '.join(gone)}: not in the queue any more, for a stage before ended badly or was cancelled")
    if jobs is None:
        remarks.insert(0, "Slurm does not answer: the states are what the files say, and may be old")
    targets, beside = targets_of(files), _evaluations_queued(files, jobs)
    bad = any(row.state in BAD for row in rows)  # what waits for something that ended badly waits in vain
    going = [row for row in rows if row.state in LIVE and not (bad and row.state == "waiting")] or beside
    finished = all(states[stage] in ("done", "reused") for stage in targets)
    outcome: Literal["done", "failed"] | None = None if going or not targets else "done" if finished else "failed"
    return RunStatus(files, rows, _evaluations(files, beside), [*remarks, *_general(files, states, outcome)], outcome)


def go_on(files: RunFiles) -> str:
    """The command that continues the run: that of the submission, which must not force again what it has forced."""
    if files.chain and files.chain.command:
        return shlex.join(["python", *(word for word in files.chain.command if word != "--force")])
    return f"python launch/submit.py --stage all --config {shlex.quote(str(files.folder / 'config.yaml'))}"


def _removed(row: Row, files: RunFiles, states: Mapping[str, str]) -> Row:
    """Slurm takes jobs out of the queue whose dependency cannot be met: nothing is wrong with them."""
    found = files.stages[row.stage]
    began = {job.partition("_")[0] for job in (*found.starts, found.state.job if found.state else "")}
    never_began = not began & {job.id for job in files.jobs(row.stage)}
    earlier = [stage for stage in targets_of(files) if list(states).index(stage) < list(states).index(row.stage)]
    if row.state in ("gone", "cancelled") and files.jobs(row.stage) and never_began and any(
            states[stage] not in ("done", "reused", *LIVE) for stage in earlier):
        return replace(row, state="removed", progress="")
    return row


def _evaluations_queued(files: RunFiles, jobs: Jobs) -> dict[int, str]:
    """By step, the state of the evaluations that are in the queue."""
    infos = {entry.step: (jobs or {}).get(entry.job.id, JobInfo("")) for entry in files.evaluations
             if entry.job and not entry.done}
    return {step: info.state for step, info in infos.items() if info.queued}


def _evaluations(files: RunFiles, queued: Mapping[int, str]) -> str:
    """Evaluations beside training, in a line; empty if there are none."""
    open_ = [entry for entry in files.evaluations if not entry.done and entry.step not in queued]
    groups = {"running": [step for step, state in queued.items() if state != "PENDING"],
              "queued": [step for step, state in queued.items() if state == "PENDING"],
              "owed": [entry.step for entry in open_ if not entry.failed],
              "failed": [entry.step for entry in open_ if entry.failed]}
    done = [entry for entry in files.evaluations if entry.done]
    counts = [f"{len(done)} done"] if done else []
    counts += [f"{len(steps)} {word} (step {', '.join(map(str, steps[:4]))}{' ...' * (len(steps) > 4)})"
               for word, steps in groups.items() if steps]
    last = f"; last: step {done[-1].step}, {done[-1].result}" if done and done[-1].result else ""
    return f"evaluations of checkpoints: {', '.join(counts)}{last}" if counts else ""


def _general(files: RunFiles, states: Mapping[str, str], outcome: str | None) -> list[str]:
    """Remarks that belong to no one stage."""
    found = [f"the evaluation of step {entry.step} failed: {entry.failed}" for entry in files.evaluations
             if entry.failed]
    latest = {str(strike.get("node")): strike for strike in files.strikes}
    for node, strike in latest.items():
        left_out = "; it is left out of the next submission" if node in files.excluded else ""
        found.append(f"node {node} failed at {str(strike.get('at'))[:16]}: {strike.get('reason')}{left_out}")
    if files.stop is not None and states["train"] in LIVE:
        found.append(f"training was asked to stop{': ' + files.stop if files.stop else ''}; it saves and leaves")
    if "stuck" in states.values():
        found.append(f"what is stuck has to go first: python launch/submit.py --cancel {files.folder}")
    if outcome == "failed":
        mended = ", once the cause is mended" if "failed" in states.values() else ""
        found.append(f"to go on{mended}: {go_on(files)}")
    return found
