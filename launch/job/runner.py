"""What a job does: it starts the stage where it runs, judges each end, and starts it again, queues itself again, or
leaves.

A job of Slurm runs it once, in the batch step on the first node (`drover.launch.job.task`). `drover.launch.local` runs
the same for stages on one machine. `drover.launch.job.host` is what it needs of either. It records its actions in
`launch/attempts/`. Slurm's signal before the time limit goes to the ranks, not to the runner. After a request to end
(SIGTERM) it starts nothing more, waits for what runs, and ends.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from drover.launch.job.decisions import (
    REQUEUED,
    STOPPED,
    Decision,
    Outcome,
    decide,
    fruitless,
    given_up,
    requeue,
    without_bad_nodes,
    without_requeue,
)
from drover.launch.job.host import Host, JobSpec, StepEnd
from drover.launch.job.preflight import run_preflight
from drover.launch.slurm.nodes import EXCLUDED_AFTER, clear_failures, few, lost, named, record_failure
from drover.launch.slurm.scheduler import OUT_OF_MEMORY, WITH_NODES
from drover.launch.slurm.start_logs import last_lines, last_word, prune
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.state import (
    KILLED,
    RANK_VARIABLES,
    STATE,
    STOP,
    Attempt,
    StageJob,
    StageState,
    log_attempt,
    read_attempts,
    read_state,
    write_state,
)
from drover.pipeline.contract.workers import CLAIMS
from drover.pipeline.core.console import counted
from drover.pipeline.core.errors import UserError
from drover.pipeline.records.checkpoints import complete_checkpoints, step_of
from drover.pipeline.records.hangs import hang_folder, judge_hang, read_hang

RECORD_S = 30.0
"""For the run folder to take a record, before the job ends."""
RECORD_PAUSE_S = 2.0
"""Between two tries."""
LOOK_S = 60.0
"""Between two looks whether the job still has its nodes."""
PAUSE_S = 3.0
"""Before the stage is started again."""
LAST_LINES = 25
"""How many last lines of a failed rank's output the job's log shows."""
SLURM_EARLY_S = 60.0
"""How much earlier than requested Slurm may send a signal: the one before the time limit may have come by then."""

T = TypeVar("T")


class Runner:
    """One job's work.

    Attributes:
        number: of the start that is made next, or runs.
        last: folder of the logs, and end, of the last start. lines: the last ones of its first rank that failed.
    """

    def __init__(self, spec: JobSpec, host: Host) -> None:
        self.spec = spec
        self.host = host
        self.say = host.say
        self.run_folder = Path(spec.run)
        self.in_array = host.index is not None  # the stage is shared with the array's other elements
        self.logs = self.run_folder / "logs" / spec.stage
        self.last: tuple[Path, StepEnd] | None = None
        self.lines = list[str]()
        self.tested = False
        self._next_look = time.monotonic() + LOOK_S
        # Over all restarts of the job. A start that no launcher made may have left its status: it must not count as
        # that of ours.
        state = read_state(spec.folder)
        starts = [int(path.suffix[1:]) for path in self.logs.glob(f"{host.name}.*") if path.suffix[1:].isdigit()]
        self.number = 1 + max([*starts, state.attempt if state and state.job == host.job else -1, -1])

    @property
    def stopping(self) -> bool:
        """Whether a request to end has come."""
        return bool(self.host.requests)

    def run(self) -> Decision:
        """Do the job; how it ended, or that it is about to be queued again."""
        spec, host = self.spec, self.host
        self.say(f"{spec.stage} of {spec.run}: job {host.name} (restart {host.restart}) on {', '.join(host.nodes)}",
                 quiet=True)
        stop = self.run_folder / STOP
        if spec.stage == "train" and stop.exists():
            reason = f"{stop} exists, so training does not start. The same command continues (it removes the file)"
            self.say(reason)
            return Decision("stop", "preempted", reason)
        decision = self._account_for_the_last() or self._work()
        while decision.action == "restart":
            self.number += 1
            decision = self._work()
        return self._end(decision)

    def _work(self) -> Decision:
        """Test the nodes, unless they have passed, and start the stage once; what follows."""
        ready = self.host.ready(self.spec)
        if self.stopping:
            return STOPPED
        if not ready:
            return requeue("crashed", "too few of the job's nodes are left", self.spec)
        if not self.tested:
            self._log("job", nodes=self.host.nodes, host=platform.node())
            if (decision := self._preflight()) is not None:
                return decision
            self.tested = True
        return self._start()

    # ---- before the first start

    def _account_for_the_last(self) -> Decision | None:
        """Record a start of this job whose end no runner saw: the job lost its nodes, one of them died, or the runner
        was killed. A decision if that happens again and again without a new checkpoint."""
        events = self._events(own=True)
        killed = bool(events) and events[-1]["event"] == KILLED
        last = next(iter(events[-2:-1] if killed else events[-1:]), None)
        if last is None or last["event"] not in ("job", "attempt"):
            return None
        down = lost(last["nodes"], self.host.scheduler)
        self._record_failures({node: f"went down ({state})" for node, state in down.items()}, last)
        cause = "its runner was killed (out of memory, perhaps)" if killed else ""
        if down:
            cause = f"lost {', '.join(f'{node} ({state})' for node, state in down.items())}"
        state = self._final_state(last["start"])
        # Of a stage that is done an upload may be left.
        status = state.status if state and state.status in ("done", "preempted") else "crashed" if cause else REQUEUED
        decision = Decision("requeue", status, cause or "Slurm took the job from its nodes and queued it again")
        if status == "crashed" and (count := self._fruitless()) > self.spec.max_restarts:
            decision = given_up(decision, count, self.spec)
        self.say(f"the start before this one ended without a word of its runner: {decision.reason}")
        self._log("ended", restart=last["restart"], start=last["start"], status=status, reason=decision.reason,
                  step=self._newest_step(), next=decision.action)
        return decision if decision.final else None

    def _preflight(self) -> Decision | None:
        """Test the nodes.

        Returns:
            None: start the stage. Otherwise what follows: a restart on other nodes, a requeue, or a stop.
        """
        spec, host = self.spec, self.host
        if not spec.preflight or not spec.ranks:
            return None
        self.say(f"preflight: testing {counted(len(host.nodes), 'node')}")
        began = time.monotonic()
        folders = self.run_folder / "launch" / "preflight"
        folder = folders / f"{host.name}.{host.restart}.{self.number}"
        folder.mkdir(parents=True, exist_ok=True)
        prune(folders, host.name, self.say)
        result = run_preflight(spec, host, folder, self._environment(), self.tick)
        for line in result.lines:
            self.say(f"preflight: {line}")
        self._log("preflight", seconds=round(time.monotonic() - began, 1), bad=result.bad)
        if self.stopping:
            return STOPPED
        if result.reason:
            return Decision("stop", "failed", f"preflight: {result.reason}", final=True)
        if not result.bad:
            return None
        counts = self._record_failures({node: f"failed preflight: {cause}" for node, cause in result.bad.items()})
        host.avoid.update(result.bad)
        decision = without_bad_nodes(result.bad, spec, left_out=max(counts.values(), default=0) >= EXCLUDED_AFTER,
                                     others=host.has_others(spec))
        if decision.action == "restart":
            self.say(decision.reason)
        return decision

    # ---- starts

    def _start(self) -> Decision:
        """Start the stage once, wait for its end, and decide what follows.

        Raises:
            UserError: another start of this job has taken the stage over.
        """
        spec, host = self.spec, self.host
        before = self._newest_step()
        folder = self.logs / f"{host.name}.{self.number}"
        self._recorded(partial(folder.mkdir, parents=True, exist_ok=True))
        self._log("attempt", ranks=spec.ranks or 1, nodes=host.nodes, **{"from": before})
        prune(self.logs, host.name, self.say)
        processes = f"{spec.ranks} ranks on {counted(spec.nodes, 'node')}" if spec.ranks else "one process"
        self.say(f"start {self.number}: {processes}, output in {folder}", quiet=True)
        job = StageJob(spec.chain, self.number, spec.ranks)
        element = ["--element", host.name] if self.in_array else []
        end = host.start(spec, [*spec.wrap, *spec.command, "--job", str(job), *element], self._environment(), folder,
                         self.tick)
        self.last = folder, end
        self._record_failures(dict.fromkeys(end.lost, "went down"))
        host.avoid.update(end.lost)
        self.lines = last_lines(folder, end.rank, spec.tasks_per_node, LAST_LINES)
        known = host.info()
        if known.restarts > host.restart and known.state in WITH_NODES:
            raise UserError("Another start of this job has taken the stage over.")
        decision = decide(self._outcome(self._with_cause(end)), spec)
        step = self._newest_step()
        if decision.status in ("done", "preempted") and (step or 0) > (before or 0):
            with suppress(OSError):
                clear_failures(self.run_folder, host.nodes)
        if decision.action == "restart" and known.left_s < spec.signal_s + SLURM_EARLY_S:
            # Slurm warns of the limit once, and only processes that run then.
            decision = requeue(decision.status, f"{decision.reason}; the time limit is too near to start again here",
                               spec)
        then = decision.action
        if then in ("restart", "requeue") and not host.is_current():
            then = "requeue"  # which Slurm has done: it is for the job's next start
            decision = replace(decision, action="stop", reason=f"{decision.reason}; Slurm has taken the job from its "
                                                               f"nodes")
        self._log("ended", status=decision.status, reason=decision.reason, step=step, next=then)
        if decision.action == "restart":
            self._say_last_lines()
            self.say(f"{decision.status}: {decision.reason}; starting again")
            host.pause(PAUSE_S, self.tick)
        return decision

    def _outcome(self, end: StepEnd) -> Outcome:
        """What this start left."""
        return Outcome(
            state=self._final_state(self.number), committed=read_manifest(self.spec.folder) is not None, end=end,
            hang=self._hang(), stopping=self.stopping,
            again=[event["event"] for event in self._events(own=True)].count("attempt") > 1,
            fruitless=self._fruitless(), others=bool(end.lost) and self.host.has_others(self.spec))

    def _fruitless(self) -> int:
        """How many starts in a row, with the last one, brought no new checkpoint, if the last one failed."""
        return fruitless([*self._events(), {"event": "ended", "status": "crashed", "step": self._newest_step()}])

    def _with_cause(self, end: StepEnd) -> StepEnd:
        """The end with what the first rank that failed said last if it exited by itself, or that it used up the
        memory if Slurm says so."""
        detail = ""
        if end.exit_code is not None:
            detail = last_word(self.lines)
        elif end.status and re.search(OUT_OF_MEMORY, str([end.cause, *self.lines])):
            detail = "it used more memory than the job requested (launch.mem, launch.<stage>.mem)"
        return replace(end, cause="; ".join(filter(None, [end.cause, detail])))

    def _say_last_lines(self) -> None:
        """Copy the last lines of the first failing rank into the job's log."""
        for line in self.lines:
            self.say(f"  {line}", quiet=True)

    def _environment(self) -> dict[str, str]:
        """Of a stage's process. What the submission says goes before what the job's shell happened to have."""
        return {name: value for name, value in {**os.environ, **self.spec.environment}.items()
                if name not in RANK_VARIABLES and not name.startswith("TORCHELASTIC_")}  # left over in a shell

    # ---- what a start left

    def _final_state(self, start: int) -> StageState | None:
        """The stage's final status, if it is of that start of this job; of an array's element, if it was stopped."""
        file = f"{CLAIMS}/{self.host.name}.json" if self.in_array else STATE
        state = read_state(self.spec.folder, file)
        return state if state and (state.job, state.attempt) == (self.host.job, start) else None

    def _newest_step(self) -> int | None:
        """Of the newest complete checkpoint; None if there is none."""
        return max(map(step_of, complete_checkpoints(self.spec.folder)), default=None)

    def _hang(self) -> str:
        """What is known of a hang; that the late nodes failed is recorded. Empty if nothing hung."""
        host = self.host
        folder = hang_folder(self.spec.folder, f"{host.job or 'local'}.{host.restart}.{self.number}")
        if not read_hang(folder):
            return ""
        hang = judge_hang(folder, self.spec.ranks)
        late = sorted({node for _, node in hang.late if node is not None})
        if 2 * len(late) < len(host.nodes):  # where half of the nodes are late, it is not the nodes
            counts = self._record_failures(dict.fromkeys(late, "was late when training hung"))
            host.avoid.update(node for node, count in counts.items() if count >= EXCLUDED_AFTER)
        return hang.text

    # ---- nodes that failed a start

    def _record_failures(self, causes: Mapping[str, str], start: Mapping[str, Any] | None = None) -> dict[str, int]:
        """Record that nodes failed a start, each with its cause; how often each did within a day.

        Of more than a few at once nothing is recorded: what they have in common (a switch, a file system) failed.
        start: its record, if it is not this one.
        """
        start = start or {"restart": self.host.restart, "start": self.number, "nodes": self.host.nodes}
        total = len(start["nodes"])
        job = f"{self.host.name}.{start['restart']}.{start['start']}"
        counts = dict[str, int]()
        if len(causes) > few(total):
            self.say(f"{named(causes)}: {next(iter(causes.values()))}. These are {len(causes)} of {total} nodes at "
                     f"once, which has a cause in common: none of them gets a failure record")
            return counts
        for node, cause in causes.items():
            counts[node] = self._recorded(partial(record_failure, self.run_folder, node, job, cause))
            self.say(f"{node} {cause} (failure {counts[node]} within a day)")
        return counts

    # ---- the end

    def _end(self, decision: Decision) -> Decision:
        """Do what ends the job; how it ended."""
        if decision.action == "requeue":
            if self.stopping:
                return STOPPED
            self.say(f"{decision.status}: {decision.reason}; queueing this job again")
            if (refusal := self.host.requeue()) is None:
                return decision
            decision = without_requeue(decision, f"Slurm did not queue the job again ({refusal})")
        if decision.final and not self.in_array and (self.host.tells_refusals or decision.status != "failed"):
            with suppress(OSError):
                write_state(self.spec.folder, "failed", step=self._newest_step(), reason=decision.reason,
                            attempt=self.number)
        if decision.action == "stop":
            self._say_last_lines()
        how = f"{decision.status.replace('preempted', 'stopped')}: {decision.reason}"
        self.say(f"{self.spec.stage} {'is done' if decision.status == 'done' else how}", quiet=True)
        return decision

    def tick(self) -> bool:
        """Called while something runs; False if it must end because Slurm has taken the job from its nodes: one that it
        has given up may still run."""
        if self.in_array or time.monotonic() < self._next_look:
            return True
        self._next_look = time.monotonic() + LOOK_S
        return self.host.is_current()

    # ---- records

    def _events(self, *, own: bool = False) -> list[Attempt]:
        """What was logged of this submission's starts of the stage, over all restarts; `own`, and for an element of an
        array, of this job's alone: elements do not follow each other."""
        alike = {"stage": self.spec.stage, "chain": self.spec.chain}
        if own or self.in_array:
            alike["job"] = self.host.name
        return [event for event in self._recorded(partial(read_attempts, self.run_folder))
                if alike.items() <= event.items()]

    def _log(self, event: str, **details: Any) -> None:
        """Record something that happened in this start, or in the one that `details` name."""
        start = {"stage": self.spec.stage, "job": self.host.name, "restart": self.host.restart, "start": self.number,
                 "chain": self.spec.chain}
        self._recorded(partial(log_attempt, self.run_folder, event, **{**start, **details}))

    def _recorded(self, action: Callable[[], T]) -> T:
        """Read or write a record. A store that fails for a moment is tried again, until a request to end comes. Without
        records the job ends: by them alone its later starts know how many there were, or they would never end."""
        last_try = time.monotonic() + RECORD_S
        while True:
            try:
                return action()
            except OSError as error:
                if self.stopping or time.monotonic() > last_try:
                    raise UserError(f"Starts cannot be recorded ({error}), so the job ends. Make the folder writable "
                                    f"(permissions, chattr, free space), and submit the same command again.") from None
                self.say(f"starts cannot be recorded now ({error}); trying again")
            self.host.pause(RECORD_PAUSE_S, self.tick)
