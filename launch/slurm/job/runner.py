"""What a job does: it starts the stage where it runs, judges each end, and starts it again, queues itself again, or
leaves.

    python -m launch.slurm.job.runner SPEC.json [SHA256]

is a job of Slurm: it runs once, in the batch step on the first node. `launch.local` runs the same for stages on one
box. What it asks of either is `launch.host`. What it does goes to `launch/attempts/`. Slurm's signal before the time
limit does not concern it: that one reaches the ranks themselves. Told to end (SIGTERM), it starts nothing any more,
waits for what runs, and leaves.
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

from launch.host import Host
from launch.processes import stop_requests
from launch.slurm.chain import read_chain
from launch.slurm.evaluations import Evaluations
from launch.slurm.job.blame import Blame
from launch.slurm.job.decisions import (
    TERMINATED,
    Decision,
    Terms,
    after_unseen,
    decide,
    taken_away,
    too_late,
    unseen,
    without_bad_nodes,
    without_requeue,
)
from launch.slurm.job.joblock import JobLock
from launch.slurm.job.preflight import run_preflight
from launch.slurm.job.slurm_host import SlurmHost
from launch.slurm.job.start_records import is_committed, last_word, was_killed
from launch.slurm.job.starts import Starts
from launch.slurm.jobspec import JobSpec
from launch.slurm.nodes import STRIKES, lost
from launch.slurm.scheduler import Scheduler
from launch.slurm.start_logs import prune
from pipeline.contract.manifest import read_manifest
from pipeline.contract.state import STOP, log_attempt, read_attempts, read_state, write_state
from pipeline.errors import UserError

CONTROLLER_S = 120.0
"""For Slurm's controller to come back, before a requeue is given up."""
PAUSE_S, LONGEST_PAUSE_S = 3.0, 20.0
"""Before a start after several that brought nothing: longer with each."""
SLURM_EARLY_S = 60.0
"""How much earlier than asked Slurm may send a signal: the one before the time limit may have come by then."""
TAKEN_OVER = "another start of this job has taken the stage over"


class Runner:
    """One job's work.

    Attributes:
        asked: the signals that told the job to end. lock: None where the stage's own lock is enough, as for an element
            of an array.
        decision: how the job ended; None if it did nothing.
    """

    def __init__(self, spec: JobSpec, here: Host, asked: list[int], lock: JobLock | None = None) -> None:
        self.spec, self.here, self.asked, self.lock = spec, here, asked, lock if here.index is None else None
        self.run_folder, self.say, self.scheduler = Path(spec.run), here.say, here.scheduler
        self.decision: Decision | None = None
        self.blame = Blame(spec, here)
        self.starts = Starts(self, spec, here, self.blame)
        self.evaluations = Evaluations(spec, self.say) if spec.every_checkpoints and spec.stage == "train" else None
        self.terms = Terms(spec.requeue, spec.link < spec.links, spec.max_restarts)

    @property
    def stopping(self) -> bool:
        """Whether the job was told to end."""
        return bool(self.asked)

    def run(self) -> int:
        """Do the job; its exit status."""
        spec, here = self.spec, self.here
        which = f", job {spec.link} of {spec.links} for it" if spec.links > 1 else ""
        which += f", part {here.index} of {spec.parts} of {spec.phase or 'it'}" if here.index is not None else ""
        which += f", restart {here.restart}" if here.restart else ""
        self.say(f"{spec.stage} of {spec.run}: job {here.name} on {', '.join(here.nodes)}{which}", quiet=True)
        if (status := self._nothing_to_do()) is not None:
            return status
        if self.lock is not None:
            self.lock.acquire(self.say, lambda: self.stopping)
        try:
            if (decision := self._account_for_the_last()) is not None:
                return self._end(decision)
            self.starts.log("job", nodes=list(here.nodes), host=platform.node())
            if (status := self._preflight()) is not None:
                return status
            return self._starts()
        finally:
            if self.lock is not None:
                self.lock.release()

    # ---- before the first start

    def _nothing_to_do(self) -> int | None:
        """The exit status if an earlier job of this chain has done or given up the stage, or the run is to stand."""
        spec, again = self.spec, self.spec.link > 1 or self.here.restart > 0
        if self.here.index is not None:
            return None
        state, ours = read_state(spec.folder), self._chain_jobs()
        if again and state and state.job in ours:
            if state.status == "done" and read_manifest(spec.folder) is not None:
                self.say(f"{spec.stage} is done (by job {state.job}): nothing to do")
                return 0
            if state.status == "failed":
                self.say(f"job {state.job} of this chain gave {spec.stage} up, so this one does not try: "
                         f"{state.reason}")
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
        return {self.here.job, *(job.id for job in jobs if job.stage == self.spec.stage)}

    def _account_for_the_last(self) -> Decision | None:
        """A start of this job that nobody saw the end of: the job was taken from its nodes, one of them died, or the
        runner was killed. A decision if that goes on without bringing anything."""
        spec, here = self.spec, self.here
        last = here.unfinished(read_attempts(self.run_folder), spec.chain)
        if last is None:
            return None
        down = lost(last["nodes"], self.scheduler)
        self.blame.strike({node: f"went down ({how})" for node, how in down.items()}, last["restart"], last["start"],
                          len(last["nodes"]))
        state = last_word(spec, here, last["restart"], last["start"])
        # Without the stage's own word a manifest may be an older one; an element's record is of its own part.
        committed = (state is not None or here.index is not None) and is_committed(spec, here)
        status, reason = unseen(state, committed, down, was_killed(spec, here, last["restart"]))
        self.say(f"the start before this one ended without a word of its runner: {reason}")
        end = {**self.starts.names(last["start"]), "restart": last["restart"], "status": status, "reason": reason,
               "step": self.starts.newest_step()}
        attempts = [*read_attempts(self.run_folder), {**end, "event": "ended"}]
        decision = after_unseen(attempts, spec.stage, spec.chain, self.starts.apart, reason, self.terms)
        log_attempt(self.run_folder, "ended", **end, next=decision.action if decision else "requeue")
        return decision

    def _preflight(self) -> int | None:
        """Try the nodes; the exit status if one of them is bad and this job cannot go on with it."""
        spec = self.spec
        if not spec.preflight or not spec.ranks or self.stopping:
            return None
        here = self.here
        began, folder = time.monotonic(), self.run_folder / "launch" / "preflight" / f"{here.name}.{here.restart}"
        folder.mkdir(parents=True, exist_ok=True)
        prune(folder.parent, here.name, self.say)
        environment = self.starts.environment(self.starts.number + 5000)
        found = run_preflight(spec, folder, environment, self.tick, here.nodes)
        for line in found.told:
            self.say(f"preflight: {line}")
        self.starts.log("preflight", seconds=round(time.monotonic() - began, 1), bad=found.bad)
        if not found.bad or self.stopping:
            return TERMINATED if self.stopping else None
        if found.reason:
            decision = Decision("stop", "failed", f"preflight: {found.reason}", 1, final=True)
        else:
            counts = self.blame.strike({node: f"failed preflight: {reason}" for node, reason in found.bad.items()},
                                       here.restart, self.starts.number)
            self.blame.keep_off(list(counts))
            named = "; ".join(f"{node}: {reason}" for node, reason in found.bad.items())
            decision = without_bad_nodes(named, max(counts.values(), default=0) >= STRIKES, self.terms)
        return self._end(decision)

    # ---- starts

    def _starts(self) -> int:
        while not self.stopping:
            if changed := self.starts.changed_code():
                return self._end(Decision("stop", "failed", changed, 1, final=True))
            outcome = self.starts.start()
            decision = decide(outcome, self.terms)
            if decision.action == "restart" and self.spec.ranks and \
                    self.scheduler.seconds_left(self.here.job) < self.spec.signal_s + SLURM_EARLY_S:
                decision = too_late(decision, self.terms)
            if not self._beat(at_once=True):
                self.say(TAKEN_OVER)
                return 1
            if decision.action in ("restart", "requeue") and not self.here.is_current():
                decision = taken_away(decision)
            self.starts.log("ended", status=decision.status, reason=decision.reason, step=self.starts.newest_step(),
                            next=decision.action)
            if decision.action != "restart":
                return self._end(decision)
            self.starts.tell_last_words()
            self.say(f"{decision.status}: {decision.reason}; starting again")
            self.starts.number += 1
            self.pause(min(LONGEST_PAUSE_S, PAUSE_S * max(0, outcome.fruitless - 1)))
        self.say("told to end: nothing more is started")
        return TERMINATED

    # ---- the end

    def _end(self, decision: Decision) -> int:
        self.decision = decision
        if decision.action == "requeue":
            if self.stopping:
                return TERMINATED
            self.say(f"{decision.status}: {decision.reason}; queueing this job again")
            refusal = self.scheduler.requeue(self.here.name, patience_s=CONTROLLER_S)
            if refusal is None or self.stopping:  # Slurm ends a job that it requeues: perhaps before we have its answer
                return 0
            decision = without_requeue(decision, f"Slurm did not queue the job again ({refusal})", self.terms)
        # Without a lock of its own (on one box) a stage that refused may be one that somebody else is working on.
        if decision.final and self.here.index is None and (self.lock or decision.status != "failed"):
            os.environ.setdefault("DROVER_ATTEMPT", str(self.starts.number))
            with suppress(OSError):
                write_state(self.spec.folder, "failed", step=self.starts.newest_step(), reason=decision.reason)
        if decision.action == "stop":
            self.starts.tell_last_words()
        how = "is done" if decision.status == "done" else f"{decision.status}: {decision.reason}"
        self.say(f"{self.spec.stage} {how}", quiet=True)
        if self.evaluations is not None and not self.stopping:
            self.evaluations.finish()
        return decision.exit_status

    # ---- all along

    def tick(self) -> bool:
        """Called while something runs; False if it must end because the stage is another start's."""
        if self.evaluations is not None and not self.stopping:
            self.evaluations.look()
        if not self._beat():
            self.say(f"{TAKEN_OVER}: ending what runs here")
            return False
        return True

    def _beat(self, *, at_once: bool = False) -> bool:
        return self.lock is None or self.lock.beat(at_once=at_once)

    def pause(self, seconds: float) -> None:
        """Wait, but not when told to end."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stopping:
            self.tick()
            time.sleep(0.25)


def main(arguments: list[str]) -> int:
    """Run the job of the spec in the file that is named."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        here = SlurmHost.from_environment(os.environ, Scheduler())
        spec = JobSpec.load(Path(arguments[0]), *arguments[1:])
        with stop_requests() as asked:
            return Runner(spec, here, asked, here.lock(spec)).run()
    except (UserError, OSError) as error:
        print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
