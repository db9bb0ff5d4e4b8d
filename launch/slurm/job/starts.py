"""The starts of a stage by one job: numbered, recorded in `launch/attempts/`, run, and judged when they end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.host import Host
from launch.slurm.job.blame import Blame
from launch.slurm.job.decisions import Outcome, fruitless
from launch.slurm.job.srun import StepEnd, last_words
from launch.slurm.job.start_records import is_committed, last_word, point_latest
from launch.slurm.jobspec import JobSpec
from launch.slurm.start_logs import prune
from launch.slurm.trust import usable_code
from pipeline.contract.state import log_attempt, read_attempts, read_state
from pipeline.records.checkpoints import complete_checkpoints, step_of

if TYPE_CHECKING:
    from launch.slurm.job.runner import Runner

KEPT_FAILED = 5
"""Of the starts that failed so many, the newest ones, keep their logs, however old they are."""


class Starts:
    """One job's starts.

    Attributes:
        number: of the start that is made next, or runs.
        last: folder of the logs, and end, of the last one.
    """

    def __init__(self, job: Runner, spec: JobSpec, here: Host, blame: Blame) -> None:
        self.job, self.spec, self.here, self.blame = job, spec, here, blame
        self.run_folder = Path(spec.run)
        said = read_state(spec.folder)  # by a start that no launcher made, perhaps: it must not count as this one's
        self.number = max(self.here.next_start(read_attempts(self.run_folder), self.logs),
                          said.attempt + 1 if said and said.job == self.here.job else 0)
        self.last: tuple[Path, StepEnd] | None = None

    @property
    def logs(self) -> Path:
        """Where the stage's logs are, a folder per start."""
        return self.run_folder / "logs" / self.spec.stage

    def start(self) -> Outcome:
        """Start the stage once and wait for its end."""
        folder = self.logs / f"{self.here.name}.{self.number}"
        folder.mkdir(parents=True, exist_ok=True)
        point_latest(folder)
        self._prune()
        os.environ["DROVER_ATTEMPT"] = str(self.number)  # for `write_state`, and for the stage
        self.log("attempt", ranks=self.spec.ranks or 1, nodes=list(self.here.nodes), **{
            "from": self.newest_step()})
        self.here.say(f"start {self.number}: {self._count()}, output in {folder}", quiet=True)
        command = [*self.spec.wrap, *self.spec.command, *self.here.part(self.spec.parts, self.spec.phase)]
        end = self.here.start(self.spec, command, self.environment(self.number), folder, self.job)
        self.last = (folder, end)
        return self._judge(folder, end)

    def _prune(self) -> None:
        failed = [f"{event['job']}.{event['start']}" for event in read_attempts(self.run_folder)
                  if event["event"] == "ended" and event["stage"] == self.spec.stage
                  and event["status"] in ("crashed", "hung", "failed")]
        prune(self.logs, self.here.name, self.here.say, failed[-KEPT_FAILED:])

    def _judge(self, folder: Path, end: StepEnd) -> Outcome:
        here, events = self.here, read_attempts(self.run_folder)
        mine = {"event": "attempt", "stage": self.spec.stage, "job": here.name, "chain": self.spec.chain}.items()
        self.blame.strike(dict.fromkeys(end.lost, "went down"), here.restart, self.number)
        crash = {**self.names(self.number), "event": "ended", "status": "crashed", "step": self.newest_step()}
        return Outcome(
            state=last_word(self.spec, here, here.restart, self.number),
            committed=is_committed(self.spec, here), status=end.status, refused=end.refused,
            hang=self.blame.late(self.number),
            cause=self._cause(folder, end), lost=bool(end.lost), started=end.started, abandoned=end.abandoned,
            stopping=bool(self.job.asked), again=sum(mine <= event.items() for event in events) > 1,
            fruitless=fruitless([*events, crash], self.spec.stage, self.spec.chain, self.apart))

    def _cause(self, folder: Path, end: StepEnd) -> str:
        """What Slurm says of the end, and the rank's own last line where it ended by itself."""
        words = last_words(folder, end, self.spec.tasks_per_node, 1) if end.exited else []
        return "; ".join(filter(None, [end.cause, *(line.strip()[:200] for line in words)]))

    def changed_code(self) -> str:
        """Why the copy of the code must not be run (any more)."""
        spec = self.spec
        if not spec.code_sha256:
            return ""
        return " ".join(usable_code(Path(spec.code), spec.code_sha256, spec.trusted_group, owners=spec.check_owners,
                                    local=not spec.wrap)[1])

    @property
    def apart(self) -> str | None:
        """Whose starts are counted together: an array's element is on its own, links of a chain are not."""
        return None if self.here.index is None else self.here.name

    def tell_last_words(self) -> None:
        """The end of what the first failing rank wrote, so that the job's log tells the whole story."""
        for line in last_words(*self.last, self.spec.tasks_per_node, 25) if self.last else ():
            self.here.say(f"  {line}", quiet=True)

    def environment(self, number: int) -> dict[str, str]:
        """Of a stage's process in start `number`. What the submission says goes before what the job's shell happened to
        have."""
        return {**os.environ, **self.spec.environment, "DROVER_ATTEMPT": str(self.number),
                "DROVER_CHAIN": self.spec.chain,
                **(self.here.rendezvous(self.spec, number) if self.spec.ranks else {})}

    def newest_step(self) -> int | None:
        """Of the newest complete checkpoint; None if there is none."""
        return max(map(step_of, complete_checkpoints(self.spec.folder)), default=None)

    def names(self, start: int) -> dict[str, Any]:
        """What a record says of which start it is."""
        return {"stage": self.spec.stage, "job": self.here.name, "restart": self.here.restart,
                "start": start, "chain": self.spec.chain}

    def log(self, event: str, **details: Any) -> None:
        """Record something that happened in this start."""
        try:
            log_attempt(self.run_folder, event, **self.names(self.number), **details)
        except OSError as error:  # a full disk ends no run by the log of it
            self.here.say(f"`{event}` could not be logged: {error}")

    def _count(self) -> str:
        spec = self.spec
        nodes = f"{spec.nodes} node{'s' if spec.nodes > 1 else ''}"
        return f"{spec.ranks} ranks on {nodes}" if spec.ranks else "one process"
