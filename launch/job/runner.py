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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from drover.launch.job.decisions import (
    TERMINATED,
    Decision,
    Outcome,
    decide,
    fruitless,
    taken_away,
    too_few_nodes,
    too_late,
    unseen,
    without_bad_nodes,
    without_requeue,
)
from drover.launch.job.host import Host, StepEnd
from drover.launch.job.preflight import run_preflight
from drover.launch.job.spec import JobSpec
from drover.launch.slurm.chain import ChainJob, read_chain
from drover.launch.slurm.nodes import STRIKES, add_strike, few, lift_strikes, lost, named
from drover.launch.slurm.start_logs import last_lines, last_word, prune
from drover.launch.slurm.wait_reasons import OUT_OF_MEMORY
from drover.pipeline.contract.job import RANK_VARIABLES, StageJob
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.state import (
    KILLED,
    STATE,
    STOP,
    StageState,
    log_attempt,
    read_attempts,
    read_state,
    write_state,
)
from drover.pipeline.contract.tasks import CLAIMS
from drover.pipeline.core.console import counted
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import Record, renamed
from drover.pipeline.records.checkpoints import complete_checkpoints, step_of
from drover.pipeline.records.hangs import hang_folder, judge_hang, read_hang

RECORD_S, RECORD_PAUSE_S = 30.0, 2.0
"""For the run folder to take a record, before the job ends; and between two tries."""
PAUSE_S, LONGEST_PAUSE_S = 3.0, 20.0
"""Before a start after several that brought nothing: longer with each."""
SLURM_EARLY_S = 60.0
"""How much earlier than asked Slurm may send a signal: the one before the time limit may have come by then."""
TAKEN_OVER = "another start of this job has taken the stage over"

T = TypeVar("T")


class Runner:
    """One job's work.

    Attributes:
        number: of the start that is made next, or runs. last: folder of the logs, and end, of the last one.
        begun_from: step of the newest checkpoint at that start.
        decision: how the job ended; None if it did nothing.
    """

    def __init__(self, spec: JobSpec, here: Host) -> None:
        self.spec, self.here, self.say, self.scheduler = spec, here, here.say, here.scheduler
        self.run_folder, self.lock = Path(spec.run), here.lock(spec)
        self.shares = here.index is not None  # the stage with the other elements of an array
        self.logs = self.run_folder / "logs" / spec.stage
        self.decision: Decision | None = None
        self.last: tuple[Path, StepEnd] | None = None
        self.begun_from: int | None = None
        # Over all restarts of the job. A start that no launcher made may have left its word: it must not count as ours.
        said = read_state(spec.folder)
        starts = [int(path.suffix[1:]) for path in self.logs.glob(f"{here.name}.*") if path.suffix[1:].isdigit()]
        self.number = 1 + max([*starts, said.attempt if said and said.job == here.job else -1, -1])

    @property
    def stopping(self) -> bool:
        """Whether a request to end has come."""
        return bool(self.here.asked)

    def run(self) -> int:
        """Do the job; its exit status."""
        spec, here = self.spec, self.here
        which = f", job {spec.link} of {spec.links} for it" if spec.links > 1 else ""
        which += ", an element of an array" if self.shares else ""
        which += f", restart {here.restart}" if here.restart else ""
        self.say(f"{spec.stage} of {spec.run}: job {here.name} on {', '.join(here.nodes)}{which}", quiet=True)
        if (status := self._nothing_to_do()) is not None:
            return status
        if self.lock is not None:
            self.lock.acquire(self.say, here.asked)
        try:
            if decision := self._account_for_the_last():
                return self._end(decision)
            while True:
                self.last = None
                if (decision := self._ready()) is None:
                    self._log("job", nodes=here.nodes, host=platform.node())
                    decision = self._preflight()
                if decision and decision.action == "restart":
                    self.say(decision.reason)
                    self.number += 1
                else:
                    return self._end(decision) if decision else self._starts()
        finally:
            if self.lock is not None:
                self.lock.release()

    # ---- before the first start

    def _nothing_to_do(self) -> int | None:
        """The exit status if an earlier job of this chain has done or given up the stage, or the run is to stand."""
        spec, here = self.spec, self.here
        if self.shares:
            return None
        state = read_state(spec.folder)
        ours = [here.job, *(job.id for job in self._chain())]
        if state and state.job in ours and (spec.link > 1 or here.restart):
            if state.status == "done" and read_manifest(spec.folder) is not None:
                self.say(f"{spec.stage} is done (by job {state.job}): nothing to do")
                return 0
            if state.status == "failed":
                self.say(f"job {state.job} of this chain gave {spec.stage} up, so this one does not try: "
                         f"{state.reason}")
                return 1
        if spec.stage == "train" and (self.run_folder / STOP).exists():
            self.say(f"{self.run_folder / STOP} exists, so training does not start. The same command continues (it "
                     f"removes the file)")
            return 1
        return None

    def _account_for_the_last(self) -> Decision | None:
        """Record a start of this job whose end no runner saw: the job lost its nodes, one of them died, or the runner
        was killed. A decision if that happens again and again without a new checkpoint."""
        spec, events = self.spec, self._events(own=True)
        killed = bool(events) and events[-1]["event"] == KILLED
        events = events[:-1] if killed else events
        if not events or events[-1]["event"] not in ("job", "attempt"):
            return None
        nodes, restart, start = (events[-1][name] for name in ("nodes", "restart", "start"))
        down = lost(nodes, self.scheduler)
        self._strike({node: f"went down ({how})" for node, how in down.items()}, f"{restart}.{start}",
                     nodes)
        state = self._last_word(start)
        committed = state is not None and self._is_committed()  # else the manifest may be an older one
        step = self._newest_step()
        decision = unseen(state, committed, down, killed, step, self._events(), spec)
        self.say(f"the start before this one ended without a word of its runner: {decision.reason}")
        self._log("ended", restart=restart, start=start, status=decision.status, reason=decision.reason, step=step,
                  next=decision.action)
        return decision if decision.action == "stop" else None

    def _ready(self) -> Decision | None:
        """Find the nodes of the next start; a decision if too few are left."""
        ready = self.here.ready(self.spec)
        if ready is None:
            return too_few_nodes(self.spec)
        self.spec = ready
        return None

    def _preflight(self) -> Decision | None:
        """Test the nodes; a decision if one of them is bad and this job cannot continue with it."""
        spec, here = self.spec, self.here
        if not spec.preflight or not spec.ranks or self.stopping:
            return None
        began, folders = time.monotonic(), self.run_folder / "launch" / "preflight"
        folder = folders / f"{here.name}.{here.restart}.{self.number}"
        folder.mkdir(parents=True, exist_ok=True)
        prune(folders, here.name, self.say)
        result = run_preflight(spec, here, folder, self._environment(), self.tick)
        for line in result.lines:
            self.say(f"preflight: {line}")
        self._log("preflight", seconds=round(time.monotonic() - began, 1), bad=result.bad)
        if self.stopping or not (result.bad or result.reason):
            return None
        if result.reason:
            return Decision("stop", "failed", f"preflight: {result.reason}", 1, final=True)
        counts = self._strike({node: f"failed preflight: {reason}" for node, reason in result.bad.items()})
        self._keep_off(counts)
        here.avoid.update(result.bad)
        left_out = max(counts.values(), default=0) >= STRIKES
        return without_bad_nodes("; ".join(f"{node}: {reason}" for node, reason in result.bad.items()), spec,
                                 left_out=left_out, others=here.has_others(spec))

    # ---- starts

    def _starts(self) -> int:
        here = self.here
        while not self.stopping:
            spec = self.spec
            self.begun_from = self._newest_step()
            folder = self._recorded(self._make_folder)
            self._log("attempt", ranks=spec.ranks or 1, nodes=here.nodes, **{"from": self.begun_from})
            outcome = self._start(folder)
            decision = decide(outcome, spec)
            if decision.status in ("done", "preempted") and (self._newest_step() or 0) > (self.begun_from or 0):
                with suppress(OSError):
                    lift_strikes(self.run_folder, here.nodes)
            if decision.action == "restart" and here.seen().left_s < spec.signal_s + SLURM_EARLY_S:
                decision = too_late(decision, spec)
            if not self._beat(at_once=True):
                self.say(TAKEN_OVER)
                return 1
            if decision.action in ("restart", "requeue") and not here.is_current():
                decision = taken_away(decision)
            self._log("ended", status=decision.status, reason=decision.reason, step=self._newest_step(),
                      next=decision.action)
            if decision.action != "restart":
                return self._end(decision)
            self._tell_last_words()
            self.say(f"{decision.status}: {decision.reason}; starting again")
            self.number += 1
            here.pause(min(LONGEST_PAUSE_S, PAUSE_S * max(0, outcome.fruitless - 1)), self.tick)
            if too_few := self._ready():
                return self._end(too_few)
        self.say("asked to end: nothing more is started")
        return TERMINATED

    def _make_folder(self) -> Path:
        """The folder of the next start's logs, to which `latest` points."""
        folder = self.logs / f"{self.here.name}.{self.number}"
        folder.mkdir(parents=True, exist_ok=True)
        latest = folder.with_name(f"latest.{folder.name}.tmp")
        latest.unlink(missing_ok=True)
        latest.symlink_to(folder.name)
        named = folder.with_name("latest")
        if named.is_dir() and not named.is_symlink():  # as `cp -rL` copies it
            renamed(named, "latest.copied")  # which `prune` removes in time
        latest.replace(named)
        return folder

    def _start(self, folder: Path) -> Outcome:
        """Start the stage once and wait for its end. folder: for its logs."""
        spec, here = self.spec, self.here
        prune(self.logs, here.name, self.say)
        what = f"{spec.ranks} ranks on {counted(spec.nodes, 'node')}" if spec.ranks else \
            "one process"
        self.say(f"start {self.number}: {what}, output in {folder}", quiet=True)
        element = ["--element", here.name] if self.shares else []
        job = StageJob(spec.chain, self.number, spec.ranks)
        command = [*spec.wrap, *spec.command, "--job", str(job), *element]
        end = here.start(spec, command, self._environment(), folder, self.tick)
        self.last = (folder, end)
        return self._judge(folder, end)

    def _judge(self, folder: Path, end: StepEnd) -> Outcome:
        self._strike(dict.fromkeys(end.lost, "went down"))
        self.here.avoid.update(end.lost)
        crash = {"event": "ended", "status": "crashed", "step": self._newest_step()}
        # What the first rank that failed said last, where it ended by itself, and Slurm, where it killed the rank.
        failed = end.status or end.cause
        words = last_lines(folder, end.rank, self.spec.tasks_per_node, 25) if failed else []
        if end.exit_code is None:
            words = ["it used more memory than the job requested (launch.mem, launch.<stage>.mem)"] * bool(
                re.search(OUT_OF_MEMORY, str([end.cause, *words])))
        end = replace(end, cause="; ".join(filter(None, [end.cause, last_word(words)])))
        return Outcome(
            state=self._last_word(self.number), committed=self._is_committed(), end=end,
            hang=self._hang(), stopping=self.stopping,
            again=[event["event"] for event in self._events(own=True)].count("attempt") > 1,
            fruitless=fruitless([*self._events(), crash]),
            others=bool(end.lost) and self.here.has_others(self.spec))

    def _tell_last_words(self) -> None:
        """Copy the last lines of the first failing rank into the job's log."""
        if self.last:
            for line in last_lines(self.last[0], self.last[1].rank, self.spec.tasks_per_node, 25):
                self.say(f"  {line}", quiet=True)

    def _environment(self) -> dict[str, str]:
        """Of a stage's process. What the submission says goes before what the job's shell happened to have."""
        spec = self.spec
        given = {name: value for name, value in {**os.environ, **spec.environment}.items()
                 if name not in RANK_VARIABLES and not name.startswith("TORCHELASTIC_")}  # left over in a shell
        return {**given, **(self.here.rendezvous(spec) if spec.ranks else {})}

    # ---- what a start left

    def _last_word(self, start: int) -> StageState | None:
        """The stage's final status, if it is of that start of this job; of an array's element, if it was stopped."""
        file = f"{CLAIMS}/{self.here.name}.json" if self.shares else STATE
        state = read_state(self.spec.folder, file)
        return state if state and (state.job, state.attempt) == (self.here.job, start) else None

    def _is_committed(self) -> bool:
        """Whether the manifest is there."""
        return read_manifest(self.spec.folder) is not None

    def _newest_step(self) -> int | None:
        """Of the newest complete checkpoint; None if there is none."""
        return max(map(step_of, complete_checkpoints(self.spec.folder)), default=None)

    def _hang(self) -> str:
        """What is known of a hang; the late nodes get a strike. Empty if nothing hung."""
        folder = hang_folder(self.spec.folder, f"{self.here.job or 'local'}.{self.here.restart}.{self.number}")
        if not read_hang(folder):
            return ""
        hang = judge_hang(folder, self.spec.ranks)
        late = sorted({node for _, node in hang.late if node is not None})
        if 2 * len(late) < len(self.here.nodes):  # where half of the nodes are late, it is not the nodes
            counts = self._strike(dict.fromkeys(late, "was late when training hung"))
            bad = [node for node, count in counts.items() if count >= STRIKES]
            self._keep_off(bad)
            self.here.avoid.update(bad)
        return hang.text

    # ---- nodes that failed a start

    def _strike(self, found: Mapping[str, str], start: str = "", nodes: Sequence[str] = ()) -> dict[str, int]:
        """Record that nodes failed a start, each with the reason; how often each did within a day.

        More than a few at once get none: what they have in common (a switch, a file system) failed. start: its restart
        and number, if not this one. nodes: those that it had.
        """
        of, counts = len(nodes or self.here.nodes), dict[str, int]()
        job = f"{self.here.name}.{start or f'{self.here.restart}.{self.number}'}"
        if len(found) > few(of):
            self.say(f"{named(found)}: {next(iter(found.values()))}. These are {len(found)} of {of} nodes at once, "
                     f"which has a cause in common: none of them gets a strike")
            return counts
        for node, reason in found.items():
            counts[node] = self._recorded(partial(add_strike, self.run_folder, node, job, reason))
            self.say(f"{node} {reason} (strike {counts[node]} within a day)")
        return counts

    def _keep_off(self, nodes: Collection[str]) -> None:
        """Exclude nodes from the chain's waiting jobs for this stage."""
        for job in self._later_links() if nodes else ():
            if problem := self.scheduler.leave_out(job, nodes):
                self.say(f"{', '.join(nodes)} could not be excluded from the waiting job {job}: {problem}")

    def _remove_later_links(self, *, done: bool) -> None:
        """Cancel the jobs that wait to continue a stage that is done or has failed for good: they would wait for all
        their nodes to do nothing. If it is done, what comes after them waits for this job instead. They stay while the
        submission is not complete, or if Slurm refuses."""
        later, chain = self._later_links(), read_chain(self.run_folder)
        if self.shares or not later or chain is None or chain.partial:
            return
        waiting = [job.id for job in chain.jobs if done and later[-1] in job.dependencies]
        problems = [self.scheduler.wait_for_another(job, later[-1], self.here.name) for job in waiting]
        if not any(problems):
            problems = [self.scheduler.cancel(job) for job in reversed(later)]
        problem = next(filter(None, problems), "")
        self.say(f"the jobs {', '.join(later)}, which would continue {self.spec.stage}, "
                 f"{f'stay: {problem}' if problem else 'are cancelled'}")

    def _later_links(self) -> list[str]:
        """Jobs that wait to continue the stage, as far as they are recorded."""
        return [job.id for job in self._chain() if job.name == self.spec.name][self.spec.link:]

    # ---- the end

    def _end(self, decision: Decision) -> int:
        if decision.action == "requeue":
            if self.stopping:
                return TERMINATED
            self.say(f"{decision.status}: {decision.reason}; queueing this job again")
            if (refusal := self.here.requeue()) is None:
                return 0
            decision = without_requeue(decision, f"Slurm did not queue the job again ({refusal})", self.spec)
        self.decision = decision
        # Without a job lock (on one machine) a stage that refused may be running in another process.
        if decision.final and not self.shares and (self.lock or decision.status != "failed"):
            with suppress(OSError):
                write_state(self.spec.folder, "failed", step=self._newest_step(), reason=decision.reason,
                            attempt=self.number)
        if decision.action == "stop":
            self._tell_last_words()
        how = "is done" if decision.status == "done" else f"{decision.status}: {decision.reason}"
        self.say(f"{self.spec.stage} {how}", quiet=True)
        if (decision.status == "done" or decision.final) and not self.stopping:
            self._remove_later_links(done=decision.status == "done")
        return decision.exit_status

    # ---- all along

    def tick(self) -> bool:
        """Called while something runs; False if it must end because the stage is another start's."""
        if not self._beat():
            self.say(f"{TAKEN_OVER}: ending what runs here")
            return False
        return True

    def _beat(self, *, at_once: bool = False) -> bool:
        return self.lock is None or self.lock.beat(at_once=at_once)

    # ---- records

    def _chain(self) -> list[ChainJob]:
        """The jobs that this submission made for the stage, as far as they are recorded."""
        chain = read_chain(self.run_folder)
        return [job for job in chain.jobs if job.stage == self.spec.stage] \
            if chain is not None and chain.id == self.spec.chain else []

    def _events(self, *, own: bool = False) -> list[Record]:
        """What was logged of this submission's starts of the stage, over all restarts; `own`, and for an element of an
        array, of this job's alone: elements do not follow each other, as links of a chain do."""
        alike = ("stage", "chain", "job") if own or self.shares else ("stage", "chain")
        names = self._names()
        events = self._recorded(partial(read_attempts, self.run_folder))
        return [event for event in events if all(event.get(name) == names[name] for name in alike)]

    def _names(self) -> Record:
        """What a record says of which start it is."""
        return {"stage": self.spec.stage, "job": self.here.name, "restart": self.here.restart, "start": self.number,
                "chain": self.spec.chain}

    def _log(self, event: str, **details: Any) -> None:
        """Record something that happened in this start, or in the one that `details` name."""
        self._recorded(partial(log_attempt, self.run_folder, event, **{**self._names(), **details}))

    def _recorded(self, action: Callable[[], T]) -> T:
        """Read or write a record. A store that fails for a moment is tried again. Without records the job ends: by them
        alone its later starts know how many there were, or they would never end."""
        last_try = time.monotonic() + RECORD_S
        while True:
            try:
                return action()
            except OSError as error:
                if time.monotonic() > last_try:
                    raise UserError(f"Starts cannot be recorded ({error}), so the job ends. Make the folder writable "
                                    f"(permissions, chattr, free space), and submit the same command again.") from None
                self.say(f"starts cannot be recorded now ({error}); trying again")
            time.sleep(RECORD_PAUSE_S)
