"""How one stage of a run stands: what its files say counts first, then what Slurm says of its jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launch.run_status.run_files import RunFiles, StageFiles, when
from launch.slurm.chain import ChainJob
from launch.slurm.scheduler import ENDED, UNKNOWN, JobInfo
from launch.slurm.wait_reasons import EXPECTED, is_stuck, meaning
from pipeline.console import duration
from pipeline.contract.state import StageState

Jobs = Mapping[str, JobInfo] | None
"""What Slurm says by job id; None: it does not answer."""
LIVE = ("running", "starting", "ending", "queued", "waiting", "requeued", "held", "running?", "submitted?")
"""States in which a stage goes on, or will, without anybody doing something."""
BAD = ("failed", "gone", "cancelled", "removed", "stuck", "damaged")


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


class StageStatus:
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
            text = meaning(self.info.reason, self.info.id, several=stage == "train" and self.run.train_nodes > 1)
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
        if self.info.queued and (files.manifest is None or is_to_rebuild(self.run, self.stage)):
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
        if is_stuck(info.reason):
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
        array = self._array()
        if (array or files.parts) and (files.parts or files.begun or state not in ("waiting", "removed")):
            failed = [element for job, element in self._failed_elements()]
            phase = f"{array.phase} " if array and self._in_phases else ""
            text = f"{phase}{len(self._done(array))}/{files.of_parts} done"
            return text + (f", {len(failed)} failed (element{'s' * (len(failed) > 1)} {', '.join(map(str, failed))})"
                           if failed else "")
        if self.stage in ("shard", "encode") and files.units:
            count, total = max(files.units.values()), files.expected
            return f"{count}/{total} shards" if total else f"{count} units"
        return ""

    def _array(self) -> ChainJob | None:
        """The array that is spoken of: the job that matters now if it is one, else the last that came to anything."""
        arrays = [job for job in self.own if job.kind == "array"]
        if self.job in arrays or not arrays:
            return self.job if arrays else None
        return next((job for job in reversed(arrays) if self._done(job)), arrays[0])

    def _failed_elements(self) -> list[tuple[ChainJob, int]]:
        """Elements of arrays that ended without their share done. Unknown ones may have been cancelled."""
        return [(job, element) for job in self.own for element in job.elements or ()
                if element not in self._done(job)
                and self._info(f"{job.id}_{element}").state in ENDED - {UNKNOWN, "CANCELLED"}]

    @property
    def _in_phases(self) -> bool:
        """Whether there are arrays for several phases of the stage."""
        return sum(job.kind == "array" for job in self.own) > 1

    def _done(self, array: ChainJob | None) -> frozenset[int]:
        """Elements of an array whose share is done."""
        parts = self.files.parts
        if array is not None and array.phase:
            return parts.get(array.phase, frozenset())
        return frozenset.intersection(*parts.values()) if parts else frozenset()  # of a submission that knew no phases

    def _failure(self) -> str:
        if self.state and self.state.status == "failed":
            step = f" (after step {self.state.step})" if self.state.step is not None else ""
            return (self.state.reason or "it gave no reason") + step
        if failed := self._failed_elements():
            return "; ".join(f"element {element}{f' of {job.phase}' if self._in_phases else ''} ended "
                             f"{self._info(f'{job.id}_{element}').state}" for job, element in failed)
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
        if failed := self._failed_elements():
            paths = [f"{self.run.folder}/logs/{self.stage}/{job.id}_{element}.*" for job, element in failed[:3]]
            paths += [failed[0][0].log.replace("%a", str(failed[0][1]))]
        elif self.job and Path(self.job.log).is_file():
            paths.append(self.job.log)
        return f". Logs: {', '.join(paths)}" if paths else ""


def is_to_rebuild(files: RunFiles, stage: str) -> bool:
    """Whether the stage was done before the submission that asks for it (again)."""
    manifest = files.stages[stage].manifest
    return bool(files.chain and manifest and files.jobs(stage)
                and when(manifest.finished) < when(files.chain.submitted) - 1)


def _ago(seconds: float) -> str:
    return f"{duration(max(0.0, seconds))} ago"
