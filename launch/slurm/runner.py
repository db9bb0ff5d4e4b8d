"""What a Slurm job does: it starts the stage in its allocation, judges each end, and starts it again, queues itself
again, or leaves.

    python -m launch.slurm.runner SPEC.json

It runs once, in the batch step on the first node. Stages with ranks run as a step of srun, the others as its child.
What it says goes to the job's log; what it does, to `launch/attempts.jsonl`; a stage's output to
`logs/<stage>/<job>.<start>/rank<t>.out` and `.err`. Slurm's signal before the time limit does not concern it: that one
reaches the ranks themselves. Told to end (SIGTERM), it starts nothing any more, waits for what runs, and leaves.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from launch.slurm.allocation import Allocation
from launch.slurm.chain import read_chain
from launch.slurm.decisions import (
    TERMINATED,
    Decision,
    Outcome,
    Terms,
    after_unseen,
    decide,
    fruitless,
    taken_away,
    too_late,
    unseen,
    without_bad_nodes,
    without_requeue,
)
from launch.slurm.evaluations import Evaluations
from launch.slurm.joblock import JobLock
from launch.slurm.jobspec import JobSpec
from launch.slurm.nodes import STRIKES, add_strike, lost
from launch.slurm.preflight import run_preflight
from launch.slurm.scheduler import Scheduler
from launch.slurm.steps import StepEnd, last_words, run_child, run_step, srun_command
from launch.slurm.traces import hang_of, is_committed, last_word, newest_step, point_latest, was_killed
from pipeline.errors import UserError
from pipeline.manifest import read_manifest
from pipeline.state import STOP, log_attempt, read_attempts, read_state, write_state

STEP_TRIES = 4
"""Calls of srun until a step that cannot be made is given up."""
STEP_PAUSE_S = 5.0
CONTROLLER_S = 120.0
"""For Slurm's controller to come back, before a requeue is given up."""
PAUSE_S, LONGEST_PAUSE_S = 3.0, 20.0
"""Before a start after several that brought nothing: longer with each."""
SLURM_EARLY_S = 60.0
"""How much earlier than asked Slurm may send a signal."""
TAKEN_OVER = "another start of this job has taken the stage over"


class Runner:
    """One job's work."""

    def __init__(self, spec: JobSpec, allocation: Allocation, scheduler: Scheduler) -> None:
        self.spec, self.allocation, self.scheduler = spec, allocation, scheduler
        self.run_folder = Path(spec.run)
        self.stopping = False
        self.start_number = allocation.next_start(read_attempts(self.run_folder), self.logs)
        self.lock = JobLock(self.run_folder, spec.stage, allocation.job, allocation.restart, self._state_of,
                            spec.chain)
        self.locked = False
        self.last: tuple[Path, StepEnd] | None = None
        self.evaluations = Evaluations(spec, self.say) if spec.every_checkpoints and spec.stage == "train" else None
        self.terms = Terms(spec.requeue, spec.link < spec.links, spec.max_restarts)

    @property
    def logs(self) -> Path:
        """Where the stage's logs are, a folder per start."""
        return self.run_folder / "logs" / self.spec.stage

    def say(self, text: str) -> None:
        """One line of the job's log."""
        print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}", flush=True)

    def run(self) -> int:
        """Do the job; its exit status."""
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        spec, here = self.spec, self.allocation
        which = f", job {spec.link} of {spec.links} for it" if spec.links > 1 else ""
        which += f", part {here.index} of {spec.parts}" if here.index is not None else ""
        which += f", restart {here.restart}" if here.restart else ""
        self.say(f"{spec.stage} of {spec.run}: job {here.name} on {', '.join(here.nodes)}{which}")
        if (status := self._nothing_to_do()) is not None:
            return status
        if here.index is None:
            self.lock.acquire(self.say, lambda: self.stopping)
            self.locked = True
        try:
            if (decision := self._account_for_the_last()) is not None:
                return self._end(decision)
            self._log("job", nodes=list(here.nodes), host=platform.node())
            if (status := self._preflight()) is not None:
                return status
            return self._starts()
        finally:
            if self.locked:
                self.lock.release()

    # ---- before the first start

    def _nothing_to_do(self) -> int | None:
        """The exit status if an earlier job of this chain has done or given up the stage, or the run is to stand."""
        spec, again = self.spec, self.spec.link > 1 or self.allocation.restart > 0
        if self.allocation.index is not None:
            return None
        state, ours = read_state(spec.folder), self._chain_jobs()
        if again and state and state.job in ours and state.status == "done" and read_manifest(spec.folder) is not None:
            self.say(f"{spec.stage} is done (by job {state.job}): nothing to do")
            return 0
        if again and state and state.job in ours and state.status == "failed":
            self.say(f"job {state.job} of this chain gave {spec.stage} up, so this one does not try: {state.reason}")
            return 1
        if spec.stage == "train" and (self.run_folder / STOP).exists():
            self.say(f"{self.run_folder / STOP} is there: training is to stand. The same command goes on (it removes "
                     f"the file)")
            return 1
        return None

    def _chain_jobs(self) -> set[str]:
        """Ids of the jobs that this submission made for the stage, this one among them."""
        chain = read_chain(self.run_folder)
        jobs = chain.jobs if chain is not None and chain.id == self.spec.chain else ()
        return {self.allocation.job, *(job.id for job in jobs if job.stage == self.spec.stage)}

    def _account_for_the_last(self) -> Decision | None:
        """A start of this job that nobody saw the end of: the job was taken from its nodes, one of them died, or the
        runner was killed. A decision if that goes on without bringing anything."""
        spec, here = self.spec, self.allocation
        last = here.unfinished(read_attempts(self.run_folder))
        if last is None:
            return None
        down = lost(last["nodes"], self.scheduler)
        for node, how in down.items():
            self._strike(node, f"went down ({how})", last["restart"], last["start"])
        state = last_word(spec, here, last["restart"], last["start"])
        # Without the stage's own word a manifest may be an older one; an element's record is of its own part.
        committed = (state is not None or here.index is not None) and is_committed(spec, here)
        status, reason = unseen(state, committed, down, was_killed(spec, here, last["restart"]))
        self.say(f"the start before this one ended without a word of its runner: {reason}")
        end = {**self._names(last["start"]), "restart": last["restart"], "status": status, "reason": reason,
               "step": self._newest_step()}
        attempts = [*read_attempts(self.run_folder), {**end, "event": "ended"}]
        decision = after_unseen(attempts, spec.stage, spec.chain, self._apart, reason, self.terms)
        log_attempt(self.run_folder, "ended", **end, next=decision.action if decision else "requeue")
        return decision

    @property
    def _apart(self) -> str | None:
        """Whose starts are counted together: an array's element is on its own, links of a chain are not."""
        return None if self.allocation.index is None else self.allocation.name

    def _preflight(self) -> int | None:
        """Try the nodes; the exit status if one of them is bad and this job cannot go on with it."""
        spec = self.spec
        if not spec.preflight or not spec.ranks or self.stopping:
            return None
        here = self.allocation
        began, folder = time.monotonic(), self.run_folder / "launch" / "preflight" / f"{here.name}.{here.restart}"
        folder.mkdir(parents=True, exist_ok=True)
        environment = self._environment(rendezvous=self.start_number + 5000)
        found = run_preflight(spec, folder, environment, self._tick, self.allocation.nodes)
        for line in found.told:
            self.say(f"preflight: {line}")
        self._log("preflight", seconds=round(time.monotonic() - began, 1), bad=found.bad)
        if not found.bad or self.stopping:
            return TERMINATED if self.stopping else None
        if found.everywhere:
            decision = Decision("stop", "failed", f"preflight: {found.reason}", 1, final=True)
        else:
            worst = max([self._strike(node, f"failed preflight: {reason}") for node, reason in found.bad.items()])
            self._keep_off(list(found.bad))
            named = "; ".join(f"{node}: {reason}" for node, reason in found.bad.items())
            decision = without_bad_nodes(named, worst >= STRIKES, self.terms)
        return self._end(decision)

    # ---- starts

    def _starts(self) -> int:
        while not self.stopping:
            outcome = self._start()
            decision = decide(outcome, self.terms)
            if decision.action == "restart" and self.spec.ranks and \
                    self.scheduler.seconds_left(self.allocation.job) < self._warning_s:
                decision = too_late(decision, self.terms)
            if self.locked and not self.lock.beat(at_once=True):
                self.say(TAKEN_OVER)
                return 1
            if decision.action in ("restart", "requeue") and not self.allocation.is_current(self.scheduler):
                decision = taken_away(decision)
            self._log_end(decision)
            if decision.action != "restart":
                return self._end(decision)
            self._tell_last_words()
            self.say(f"{decision.status}: {decision.reason}; starting again in this allocation")
            self.start_number += 1
            self._pause(min(LONGEST_PAUSE_S, PAUSE_S * max(0, outcome.fruitless - 1)))
        self.say("told to end: nothing more is started")
        return TERMINATED

    @property
    def _warning_s(self) -> float:
        """Slurm's signal before the time limit may have come already when less than this is left."""
        return float(self.spec.signal_s) + SLURM_EARLY_S

    def _start(self) -> Outcome:
        """Start the stage once and wait for its end."""
        folder = self.logs / self._start_name()
        folder.mkdir(parents=True, exist_ok=True)
        point_latest(folder)
        os.environ["DROVER_ATTEMPT"] = str(self.start_number)  # for `write_state`, and for the stage
        self._log("attempt", ranks=self.spec.ranks or 1, nodes=list(self.allocation.nodes), **{
            "from": self._newest_step()})
        self.say(f"start {self.start_number}: {self._count()}, output in {folder}")
        command = [*self.spec.wrap, *self.spec.command, *self.allocation.part(self.spec.parts)]
        if not self.spec.ranks:
            end = run_child(command, self._environment(), folder, self._tick, lambda: self.stopping)
        else:
            end = self._step(folder, command)
        self.last = (folder, end)
        return self._judge(folder, end)

    def _step(self, folder: Path, command: list[str]) -> StepEnd:
        srun = srun_command(self.spec, folder, command, stage=self.spec.stage)
        for number in range(1, STEP_TRIES + 1):
            end = run_step(srun, self._environment(rendezvous=self.start_number), folder, self._tick, self.say)
            if end.started or end.abandoned or self.stopping or number == STEP_TRIES \
                    or not self.allocation.is_current(self.scheduler):
                break
            self.say(f"there is no step: {end.cause}; trying again ({number} of {STEP_TRIES - 1})")
            self._pause(STEP_PAUSE_S * number)
        return end

    def _judge(self, folder: Path, end: StepEnd) -> Outcome:
        here, events = self.allocation, read_attempts(self.run_folder)
        for node in end.lost:
            self._strike(node, "went down")
        crash = {**self._names(self.start_number), "event": "ended", "status": "crashed", "step": self._newest_step()}
        return Outcome(
            state=last_word(self.spec, here, here.restart, self.start_number),
            committed=is_committed(self.spec, here), status=end.status, refused=end.refused, hang=self._hang(),
            cause=self._cause(folder, end), lost=bool(end.lost), started=end.started, abandoned=end.abandoned,
            stopping=self.stopping, again=self.start_number > 0,
            fruitless=fruitless([*events, crash], self.spec.stage, self.spec.chain, self._apart))

    def _hang(self) -> str:
        """What is known of a hang; the late nodes get a strike."""
        hang = hang_of(self.spec, self.allocation, self.start_number)
        if hang is None:
            return ""
        late = sorted({node for _, node in hang.late if node is not None})
        if 2 * len(late) < len(self.allocation.nodes):  # where half of the nodes are late, it is not the nodes
            counts = {node: self._strike(node, "was late when training hung") for node in late}
            self._keep_off([node for node, count in counts.items() if count >= STRIKES])
        return hang.text

    def _cause(self, folder: Path, end: StepEnd) -> str:
        """What Slurm says of the end, and the rank's own last line where it ended by itself."""
        words = last_words(folder, end, 1) if end.exited else []
        return "; ".join(filter(None, [end.cause, *(line.strip()[:200] for line in words)]))

    # ---- the end

    def _end(self, decision: Decision) -> int:
        if decision.action == "requeue":
            if self.stopping:
                return TERMINATED
            self.say(f"{decision.status}: {decision.reason}; queueing this job again")
            refusal = self.scheduler.requeue(self.allocation.name, patience_s=CONTROLLER_S)
            if refusal is None or self.stopping:  # Slurm ends a job that it requeues: perhaps before we have its answer
                return 0
            decision = without_requeue(decision, f"Slurm did not queue the job again ({refusal})", self.terms)
        if decision.final and self.allocation.index is None:
            os.environ.setdefault("DROVER_ATTEMPT", str(self.start_number))
            with suppress(OSError):
                write_state(self.spec.folder, "failed", step=self._newest_step(), reason=decision.reason)
        if decision.action == "stop":
            self._tell_last_words()
        how = "is done" if decision.status == "done" else f"{decision.status}: {decision.reason}"
        self.say(f"{self.spec.stage} {how}")
        if self.evaluations is not None and not self.stopping:
            self.evaluations.finish()
        return decision.exit_status

    def _tell_last_words(self) -> None:
        """The end of the first failing rank's errors, so that the job's log tells the whole story."""
        for line in last_words(*self.last, 25) if self.last else ():
            print(f"  {line}", flush=True)

    # ---- all along

    def _tick(self) -> bool:
        """Called while something runs; False if it must end because the stage is another start's."""
        if self.evaluations is not None and not self.stopping:
            self.evaluations.look()
        if self.locked and not self.lock.beat():
            self.say(f"{TAKEN_OVER}: ending what runs here")
            return False
        return True

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stopping:
            self._tick()
            time.sleep(0.25)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _environment(self, rendezvous: int | None = None) -> dict[str, str]:
        """Of a stage's process. What the submission says goes before what the job's shell happened to have."""
        return {**os.environ, **self.spec.environment, "DROVER_ATTEMPT": str(self.start_number),
                "DROVER_CHAIN": self.spec.chain,
                **(self.allocation.rendezvous(self.spec, rendezvous, self.scheduler)
                   if rendezvous is not None else {})}

    def _strike(self, node: str, reason: str, restart: int | None = None, start: int | None = None) -> int:
        """Record that a node failed a start (this one); how often it did within a day."""
        here, count = self.allocation, 1
        which = (here.restart, self.start_number) if restart is None else (restart, start)
        with suppress(OSError):
            count = add_strike(self.run_folder, node, ".".join(map(str, (here.name, *which))), reason)
        self.say(f"{node} {reason} (strike {count} within a day)")
        return count

    def _keep_off(self, nodes: list[str]) -> None:
        """Tell the chain's waiting jobs for this stage to leave nodes out."""
        chain = read_chain(self.run_folder)
        waiting = [job.id for job in chain.jobs if (job.stage, job.kind) == (self.spec.stage, "link")] \
            if nodes and chain and chain.id == self.spec.chain and self.terms.later_links else []
        for job in waiting[self.spec.link:]:
            if problem := self.scheduler.leave_out(job, nodes):
                self.say(f"the waiting job {job} could not be told to leave out {', '.join(nodes)}: {problem}")

    def _state_of(self, job: str) -> str | None:
        found = self.scheduler.jobs([job])
        return None if found is None else found[job].state

    def _newest_step(self) -> int | None:
        return newest_step(self.spec.folder)

    def _names(self, start: int) -> dict[str, Any]:
        return {"stage": self.spec.stage, "job": self.allocation.name, "restart": self.allocation.restart,
                "start": start, "chain": self.spec.chain}

    def _log(self, event: str, **details: Any) -> None:
        try:
            log_attempt(self.run_folder, event, **self._names(self.start_number), **details)
        except OSError as error:  # a full disk ends no run by the log of it
            self.say(f"`{event}` could not be logged: {error}")

    def _log_end(self, decision: Decision) -> None:
        self._log("ended", status=decision.status, reason=decision.reason, step=self._newest_step(),
                  next=decision.action)

    def _start_name(self) -> str:
        return f"{self.allocation.name}.{self.start_number}"

    def _count(self) -> str:
        spec = self.spec
        nodes = f"{spec.nodes} node{'s' if spec.nodes > 1 else ''}"
        return f"{spec.ranks} ranks on {nodes}" if spec.ranks else "one process"


def main(arguments: list[str]) -> int:
    """Run the job of the spec in the file that is named."""
    try:
        scheduler = Scheduler()
        allocation = Allocation.from_environment(os.environ, scheduler)
        return Runner(JobSpec.load(Path(arguments[0])), allocation, scheduler).run()
    except (UserError, OSError) as error:
        print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
