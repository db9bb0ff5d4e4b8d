"""How each stage of a run stands: what its files say counts first, then what Slurm says of its jobs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from launch.slurm.chain import ChainJob
from launch.slurm.progress import RunFiles, StageFiles, when
from launch.slurm.scheduler import ENDED, UNKNOWN, JobInfo
from pipeline.state import StageState

Jobs = Mapping[str, JobInfo] | None
"""What Slurm says by job id; None: it does not answer."""
LIVE = ("running", "starting", "ending", "queued", "waiting", "requeued", "held", "running?", "submitted?")
"""States in which a stage goes on, or will, without anybody doing something."""
BAD = ("failed", "gone", "cancelled", "removed", "stuck", "damaged")
REASONS = {
    "BeginTime": "was queued again; Slurm starts such a job after about two minutes",
    "DependencyNeverSatisfied": "will never run: a job that it waits for ended badly",
    "Resources": "waits for free nodes",
    "Priority": "waits: other jobs are ahead of it",
    "JobHeldUser": "is held; `scontrol release {job}` lets it go",
    "JobHeldAdmin": "is held by the administrators",
    "PartitionNodeLimit": "will never run: it asks for more nodes than the partition allows",
    "PartitionTimeLimit": "will never run: it asks for more time than the partition allows",
    "ReqNodeNotAvail": "waits for nodes that are down or reserved",
    "NodeDown": "waits for a node that is down",
    "launch failed requeued held": "could not be started and is held; `scontrol release {job}` lets it try again",
}
"""What Slurm's reasons mean to a user; Dependency and limits of arrays are as they should be."""
NEVER = ("DependencyNeverSatisfied", "PartitionNodeLimit", "PartitionTimeLimit")
EXPECTED = ("", "None", "Dependency", "JobArrayTaskLimit", "Singleton")


@dataclass(frozen=True)
class Row:
    """A stage, as the table shows it. Times in seconds; None: not known, or means nothing here."""

    stage: str
    state: str
    job: str = ""
    nodes: str = ""
    elapsed_s: float | None = None
    progress: str = ""
    eta_s: float | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    restarts: int = 0
    goodput: float | None = None


@dataclass(frozen=True)
class Standing:
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
        if found.manifest is None or _to_rebuild(files, stage):
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


def judge(files: RunFiles, jobs: Jobs, now: float) -> Standing:
    """How the run stands at `now` (seconds since the epoch)."""
    judged = [_Stage(files, stage, jobs, now) for stage in files.stages]
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
    return Standing(files, rows, _evaluations(files, beside), [*remarks, *_general(files, states, outcome)], outcome)


def go_on(files: RunFiles) -> str:
    """The command that continues the run: that of the submission, which must not force again what it has forced."""
    if files.chain and files.chain.command:
        return shlex.join(["python", *(word for word in files.chain.command if word != "--force")])
    return f"python launch/submit.py --stage all --config {shlex.quote(str(files.folder / 'config.yaml'))}"


class _Stage:
    """One stage's files beside what Slurm says of its jobs."""

    def __init__(self, files: RunFiles, stage: str, jobs: Jobs, now: float) -> None:
        self.run, self.stage, self.jobs, self.now = files, stage, jobs, now
        self.files: StageFiles = files.stages[stage]
        self.own = files.jobs(stage)
        self.state: StageState | None = self.files.state
        ids = {job.id for job in self.own}
        if self.own and self.state and files.chain and self.state.job not in ids and \
                when(self.state.at) < when(files.chain.submitted):
            self.state = None  # of an attempt before this submission
        self.job = self._job()
        self.info = self._info(self.job.id) if self.job else \
            self._info(self.state.job) if self.state and self.state.job else JobInfo("")

    def row(self) -> Row:
        """The stage's row."""
        state, training = self._state(), self.files.training
        row = Row(self.stage, state, self._job_text(), self._nodes(state), self._elapsed(state), self._progress(state))
        if state in ("to do", "waiting", "removed") and not self.files.begun:
            return row
        starts = sum(count - 1 for count in self.files.starts.values())
        row = replace(row, restarts=max(starts, self.info.restarts))
        if training is None:
            return row
        left = None
        if state in ("running", "running?") and training.steps and training.rate_s:
            left = max(0, training.steps - training.step) * training.rate_s
        return replace(row, eta_s=left, loss=training.loss, tokens_per_s=training.tokens_per_s,
                       goodput=training.goodput)

    def remarks(self, state: str) -> list[str]:
        """What a person should know or do about it, in words."""
        found, stage, said = [], self.stage, self.state
        if state == "damaged":
            found.append(f"{stage}: {self.files.damaged}")
        elif state == "failed":
            found.append(f"{stage} failed: {self._failure()}{self._log()}")
        elif state == "gone":
            found.append(f"{stage} is gone: {self._gone()}{self._log()}")
        elif state == "cancelled":
            found.append(f"{stage} was cancelled{' by ' + said.reason if said and said.reason else ''} "
                         f"(job {self.info.id})")
        elif state == "stopped" and said:
            step = f" after step {said.step}" if said.step is not None else ""
            found.append(f"{stage} was stopped{step}{': ' + said.reason if said.reason else ''}")
        elif state == "running?" and self.jobs is not None:
            where = said.host if said else "another machine"
            found.append(f"{stage} runs on {where}, which cannot be seen from here; it last wrote "
                         f"{_ago(self.now - self.files.touched)}")
        elif state in ("queued", "requeued", "held", "stuck") and self.info.reason not in EXPECTED:
            key = next((key for key in REASONS if self.info.reason.startswith(key)), "")
            text = REASONS[key].format(job=self.info.id) if key else "see `man squeue`, JOB REASON CODES"
            found.append(f"{stage} (job {self.info.id}) {text} ({self.info.reason})")
        ended = self.files.ended
        if state in LIVE and ended.get("status") in ("crashed", "hung") and str(ended.get("job")).partition("_")[0] in {
                job.id for job in self.own}:
            found.append(f"{stage} {ended['status']} before and was started again: {ended.get('reason')}")
        return found

    def _job(self) -> ChainJob | None:
        """The job that matters now: one that runs, else the next in the queue, else the last that did something."""
        infos = [(job, self._info(job.id)) for job in self.own]
        for states in (("RUNNING", "COMPLETING", "CONFIGURING"), None):
            for job, info in infos:
                if info.queued and (states is None or info.state in states):
                    return job
        known = [job for job, info in infos if info.state not in (UNKNOWN, "COMPLETED")]
        named = [job for job in self.own if self.state and job.id == self.state.job]
        return (named or known or self.own[-1:] or [None])[0]  # type: ignore[list-item]

    def _info(self, id: str) -> JobInfo:
        return (self.jobs or {}).get(id, JobInfo(id))

    def _state(self) -> str:
        files = self.files
        if files.damaged:
            return "damaged"
        if self.info.queued and (files.manifest is None or _to_rebuild(self.run, self.stage)):
            return self._in_queue()
        if files.manifest is not None:
            return "reused" if files.reused else "done"
        if self.jobs is None and (self.own or (self.state and self.state.job)):
            said = self.state.status if self.state else None
            return {"running": "running?", "preempted": "stopped", "failed": "failed"}.get(said or "", "submitted?")
        if self.state is None or self.state.status == "done":  # done without a manifest: it was withdrawn
            return self._without_word()
        if self.state.status == "running":
            if not self.state.job:
                return {True: "running", None: "running?", False: "gone"}[files.alive]
            return "cancelled" if self.info.state == "CANCELLED" else "gone"
        return "failed" if self.state.status == "failed" else "stopped"

    def _in_queue(self) -> str:
        info, said = self.info, self.state
        if info.state != "PENDING":
            if self.job and self.job.elements:
                return "running"
            if info.state == "COMPLETING":
                return "ending"
            if said is None or (said.job, said.restart) != (info.id, info.restarts):
                return "starting"
            return "running" if said.status in ("running", "done") else "ending"
        if info.reason.startswith(NEVER):
            return "stuck"
        if "held" in info.reason.lower():
            return "held"
        if info.restarts or (said and said.job == info.id):
            return "requeued"
        return "waiting" if info.reason in ("Dependency", "Singleton") else "queued"

    def _without_word(self) -> str:
        """Of a stage that left no word of its own."""
        files, word = self.files, self.info.state
        if self.own:
            if self._failed_elements():
                return "failed"
            if word == "CANCELLED":
                return "cancelled"
            return "gone" if word == UNKNOWN else "failed"
        if files.begun:
            return {True: "running", None: "running?", False: "stopped"}[files.alive]
        return "to do"

    def _job_text(self) -> str:
        if self.job is None:
            return self.state.job if self.state else ""
        links = [job for job in self.own if job.kind == "link"]
        if len(links) > 1 and self.job in links:
            return f"{self.job.id} ({links.index(self.job) + 1}/{len(links)})"
        return f"{self.job.id} x{len(self.job.elements)}" if self.job.elements else self.job.id

    def _nodes(self, state: str) -> str:
        return self.info.nodes if state not in ("done", "reused") else ""

    def _elapsed(self, state: str) -> float | None:
        if state == "reused":
            return None
        if state == "done" and self.files.manifest:
            whole = when(self.files.manifest.finished) - self.files.first  # over all starts
            return whole if self.files.first and whole > 0 else self.files.manifest.wall_s
        if state in ("running", "starting") and self.info.queued:
            return float(self.info.elapsed_s)
        if state in ("running", "running?") and self.state and self.state.at:
            return max(0.0, self.now - when(self.state.at))
        return None

    def _progress(self, state: str) -> str:
        files, training = self.files, self.files.training
        if training and (files.begun or files.manifest):
            share = f"/{training.steps} {training.step / training.steps:.0%}" if training.steps else ""
            return f"{training.step}{share}"
        if state in ("done", "reused"):
            return ""
        array = next((job for job in self.own if job.kind == "array"), None)
        if (array or files.parts) and (files.parts or files.begun or state not in ("waiting", "removed")):
            failed = self._failed_elements()
            text = f"{len(files.parts)}/{files.of_parts} done"
            return text + (f", {len(failed)} failed (element{'s' * (len(failed) > 1)} {', '.join(map(str, failed))})"
                           if failed else "")
        if self.stage in ("shard", "encode") and files.units:
            count, total = max(files.units.values()), files.expected
            return f"{count}/{total} shards" if total else f"{count} units"
        return ""

    def _failed_elements(self) -> list[int]:
        """Elements of the array that ended without their share done. Unknown ones may have been cancelled."""
        return [element for job in self.own for element in job.elements or ()
                if element not in self.files.parts
                and self._info(f"{job.id}_{element}").state in ENDED - {UNKNOWN, "CANCELLED"}]

    def _failure(self) -> str:
        if self.state and self.state.status == "failed":
            step = f" (after step {self.state.step})" if self.state.step is not None else ""
            return (self.state.reason or "it gave no reason") + step
        if failed := self._failed_elements():
            job = next(job for job in self.own if job.elements)
            return "; ".join(f"element {element} ended {self._info(f'{job.id}_{element}').state}" for element in failed)
        if self.info.state == "COMPLETED":
            return f"Slurm's job {self.info.id} has ended, but the stage has no manifest"
        return f"Slurm's job {self.info.id} ended {self.info.state} ({self.info.reason or 'no reason given'})"

    def _gone(self) -> str:
        if self.state and not self.state.job:
            return f"STATE.json says running (on {self.state.host}), but the process is not there; it was killed"
        word = "is not known to Slurm any more" if self.info.state == UNKNOWN else f"ended {self.info.state}"
        began = "it said last that it runs" if self.state else "it never began"
        return f"{began}, but its job {self.info.id} {word} (crashed, or cancelled)"

    def _log(self) -> str:
        """Where to read more: the stage's own log, and what its job said."""
        paths = [str(self.files.log)] if self.files.log else []
        job = next((job for job in self.own if job.elements), self.job)
        if job and (failed := self._failed_elements()):
            paths = [f"{self.run.folder}/logs/{self.stage}/{job.id}_{element}.*" for element in failed[:3]]
            paths += [job.log.replace("%a", str(failed[0]))]
        elif self.job and Path(self.job.log).is_file():
            paths.append(self.job.log)
        return f". Logs: {', '.join(paths)}" if paths else ""


def _to_rebuild(files: RunFiles, stage: str) -> bool:
    """Whether the stage was done before the submission that asks for it (again)."""
    manifest = files.stages[stage].manifest
    return bool(files.chain and manifest and files.jobs(stage)
                and when(manifest.finished) < when(files.chain.submitted) - 1)


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


def _ago(seconds: float) -> str:
    from pipeline.console import duration

    return f"{duration(max(0.0, seconds))} ago"
