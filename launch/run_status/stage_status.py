"""How one stage of a run stands: what its files say counts first, then what Slurm says of its jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from launch.run_status.run_files import RunFiles, when
from launch.slurm.chain import ChainJob
from launch.slurm.scheduler import ENDED, UNKNOWN, JobInfo
from launch.slurm.wait_reasons import EXPECTED, is_stuck, meaning
from pipeline.console import duration

Jobs = Mapping[str, JobInfo] | None
"""What Slurm says by job id; None: it does not answer."""
State = Literal["to do", "waiting", "running", "stopped", "failed", "done", "reused"]
"""docs/slurm.md says what each means."""
LIVE: tuple[State, ...] = ("running", "waiting")
"""States in which a stage goes on, or will, without anybody doing something."""
FINISHED: tuple[State, ...] = ("done", "reused")


@dataclass(frozen=True)
class Row:
    """A stage, as the table shows it; "" for what is not known, or means nothing here.

    figures: what else there is to know of its work. remarks: what a person should know or do about it.
    """

    stage: str
    state: State
    job: str
    elapsed: str
    progress: str
    left: str
    figures: str
    remarks: list[str]


def stage_row(run: RunFiles, stage: str, jobs: Jobs, now: float, *, broken: bool) -> Row:
    """How a stage stands at `now`. broken: a stage before it has failed or was stopped."""
    seen = _Stage(run, stage, jobs, now)
    state, remark = seen.verdict(broken)
    found, remarks, ended = seen.files.progress, [remark] if remark else [], seen.ended
    if state in LIVE and ended.get("status") in ("crashed", "hung"):
        remarks.append(f"{stage} {ended['status']} before and was started again: {ended.get('reason')}")
    left = duration(min(max(0.0, found.left_s), 1e9)) if found and found.left_s is not None and state == "running" else ""
    return Row(stage, state, seen.job_text(), seen.elapsed(state), seen.progress(state), left,
               ", ".join(seen.figures(state)), remarks)


def is_due(run: RunFiles, stage: str) -> bool:
    """Whether the stage is not done, or was done before the submission that asks for it (again)."""
    manifest = run.stages[stage].manifest
    return manifest is None or bool(run.chain and run.jobs(stage)
                                    and when(manifest.finished) < when(run.chain.submitted) - 1)


class _Stage:
    """A stage's files and what Slurm says of its jobs.

    Attributes:
        job: of its jobs, the one that matters now. info: what Slurm says of that.
        said: the stage's last word, if it still counts.
        events, ended: what the launcher did for it in the newest submission, and the last end of a start.
        failed: elements of arrays that ended without their share done, as (job, element, state). Unknown ones may have
            been cancelled.
    """

    def __init__(self, run: RunFiles, stage: str, jobs: Jobs, now: float) -> None:
        self.run, self.stage, self.jobs, self.now = run, stage, jobs, now
        self.files, self.own, said = run.stages[stage], run.jobs(stage), run.stages[stage].state
        chain, ids = run.chain, [job.id for job in self.own]
        earlier = chain and said and ids and said.job not in ids and when(said.at) < when(chain.submitted)
        # `done` without a manifest: it was withdrawn.
        self.said = None if said is None or earlier or said.status == "done" else said
        self.job = min(self.own, key=self._rank, default=None)
        self.info = self._info(self.job.id if self.job else self.said.job if self.said else "")
        self.events = [event for event in self.files.events if chain and event.get("chain") == chain.id]
        self.ended = next((event for event in reversed(self.events) if event.get("event") == "ended"), {})
        self.failed = [(job, element, state) for job in self.own for element in job.elements or ()
                       if element not in self.files.shares[job.id].done
                       and (state := self._info(f"{job.id}_{element}").state) in ENDED - {UNKNOWN, "CANCELLED"}]

    def _info(self, id: str) -> JobInfo:
        return (self.jobs or {}).get(id, JobInfo(id))

    def _rank(self, job: ChainJob) -> tuple[int, int]:
        """The job that runs comes first, then the next in the queue, then the last that did something."""
        info, number = self._info(job.id), self.own.index(job)
        if info.queued:
            return (info.state == "PENDING"), number
        if self.said and self.said.job == job.id:
            return 2, 0
        return (4, -number) if info.state in (UNKNOWN, "COMPLETED") else (3, number)

    def verdict(self, broken: bool) -> tuple[State, str]:
        """The state, and what is to be said of it."""
        name, files, said, info = self.stage, self.files, self.said, self.info
        step = f" after step {said.step}" if said and said.step is not None else ""
        if files.damaged:
            return "failed", f"{name}: {files.damaged}"
        if info.queued and is_due(self.run, name):
            if info.state != "PENDING":
                return "running", ""
            text = meaning(info.reason, info.id, several=name == "train" and self.run.train_nodes > 1)
            text = "" if info.reason in EXPECTED else f"{name} (job {info.id}) {text} ({info.reason})"
            first = f"; it has to go first: python launch/submit.py --cancel {self.run.folder}"
            return ("failed", text + first) if is_stuck(info.reason) else ("waiting", text)
        if files.manifest is not None:
            return "reused" if files.reused else "done", ""
        if said and said.status != "running":
            state: State = "failed" if said.status == "failed" else "stopped"
            logs = self._logs() if state == "failed" else ""
            return state, f"{name} {state}{step}: {said.reason or 'it gave no reason'}{logs}"
        if info.id:
            return self._ended(broken) if self.jobs is not None else ("running" if said else "waiting", "")
        if not files.begun:
            return "to do", ""
        if files.alive:
            return "running", ""
        if files.alive is None:
            last = files.progress or said
            age = f"; its last record is {duration(max(0.0, self.now - when(last.at)))} old" if last else ""
            return "running", f"{name} runs on {said.host if said else 'another machine'}, unseen from here{age}"
        if said:
            return "failed", f"{name} failed: its process on {said.host} is gone; it was killed{self._logs()}"
        return "stopped", f"{name} is not done, and nobody works on it"

    def _ended(self, broken: bool) -> tuple[State, str]:
        """Of a stage whose jobs have left the queue, and that left no word of its end."""
        info, name, began = self.info, self.stage, self.said or self.events
        if broken and not began and info.state in (UNKNOWN, "CANCELLED"):
            return "to do", ""  # Slurm takes jobs out of the queue that wait for one that ended badly
        words = {UNKNOWN: "is not known to Slurm any more: it crashed, or was cancelled",
                 "COMPLETED": "has ended, but the stage is not done", "CANCELLED": "was cancelled"}
        text = f"{'' if began else 'before it began, '}job {info.id} " + words.get(
            info.state, f"ended {info.state} ({info.reason or 'no reason given'})")
        if self.failed:
            text = "; ".join(f"element {element}{self._phase(job, ' of {}')} ended {state}"
                             for job, element, state in self.failed)
        return "failed", f"{name} failed: {text}{self._logs()}"

    def job_text(self) -> str:
        """The job's id, and which of how many links it is, or how many elements it has."""
        links = [job for job in self.own if job.kind == "link"]
        if self.job in links and len(links) > 1:
            return f"{self.info.id} ({links.index(self.job) + 1}/{len(links)})"
        return self.info.id + (f" x{len(self.job.elements)}" if self.job and self.job.elements else "")

    def elapsed(self, state: State) -> str:
        """Of a stage that is done, over all starts of the submission that finished it; of one that runs, this start."""
        manifest, events, seconds = self.files.manifest, self.files.events, 0.0
        if state == "done" and manifest:
            began = [when(str(event.get("at"))) for event in events if event.get("chain") == events[-1].get("chain")]
            seconds = max([manifest.wall_s, *(when(manifest.finished) - at for at in began[:1])])
        elif state == "running":
            seconds = self.info.elapsed_s or (self.now - when(self.said.at) if self.said else 0.0)
        return duration(seconds) if seconds > 0 else ""

    def progress(self, state: State) -> str:
        """How much is done: of arrays the elements, else what the stage recorded."""
        found, shares = self.files.progress, self.files.shares
        arrays = [job for job in self.own if job.elements and (shares[job.id].done or job == self.job)]
        if arrays and state not in FINISHED and (arrays[-1] == self.job or not found):
            share, failed = shares[arrays[-1].id], ", ".join(str(element) for _, element, _ in self.failed)
            return f"{self._phase(arrays[-1], '{} ')}{len(share.done)}/{share.of} done" + (
                f", {len(self.failed)} failed ({failed})" if failed else "")
        if found is None or (found.phase and state in FINISHED):
            return ""
        phase = f"{found.phase} " if found.phase not in ("", self.stage) else ""
        return f"{phase}{found.done}/{found.total} {found.unit} {found.done / max(1, found.total):.0%}"

    def figures(self, state: State) -> list[str]:
        """What else there is to know of its work."""
        found, last, info = self.files.progress, self.files.state, self.info
        figures = [f"nodes {info.nodes}"] if info.nodes and state not in FINISHED else []
        if found and found.loss is not None:
            figures += [f"loss {found.loss:.4f}", f"tokens/s {found.tokens_per_s or 0:,.0f}",
                        f"goodput {found.goodput or 0:.1%}"]
        restarts = max(last.attempt if last else 0, info.restarts)
        return figures + ([f"restarts {restarts}"] if restarts else [])

    def _phase(self, array: ChainJob, words: str) -> str:
        """The phase of an array, where the stage has several."""
        return words.format(array.phase) if len(self.files.shares) > 1 else ""

    def _logs(self) -> str:
        """Where to read more: the stage's own log, and that of its job."""
        paths = [str(self.files.log)] if self.files.log else []
        for job, element, _ in self.failed[:3]:
            paths = [*paths, f"{self.run.folder}/logs/{self.stage}/{job.id}_{element}.*"]
        if self.job:
            paths.append(self.job.log.replace("%a", str(self.failed[0][1] if self.failed else 0)))
        return f". Logs: {', '.join(paths)}" if paths else ""
