"""A job's nodes as the runner sees them, steps of ranks there through srun, and what srun says of their end."""

from __future__ import annotations

import math
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from drover.launch.job.host import Host, JobSpec, StepEnd, process_end
from drover.launch.job.rank import PREFLIGHT
from drover.launch.processes import BROKEN_S, KILL_S, Each, Environment, ProcessGroup, Say, free_port, meeting, started
from drover.launch.slurm.scheduler import UNKNOWN, WITH_NODES, literal

STEP_TRIES = 4
"""Calls of srun until a step that cannot be made is given up."""
STEP_PAUSE_S = 5.0
CONTROLLER_S = 120.0
"""For Slurm's controller to come back, before a requeue is given up."""
REQUEUE_PAUSE_S = 3.0
WAIT_S = 30
"""Seconds that the other ranks get once one has ended well."""
MAKE_S = 30.0
"""Seconds after which a srun that has started no task is ended, to be called again: a controller that has just come
back may let it wait for room that is there."""
# One line about tasks that ended badly: `n3`, `2` or `0-1`, `Killed` or `Exited with exit code 7`.
_ENDED = re.compile(r"^(?:srun: error: )?(?P<node>\S+): tasks? (?P<tasks>[0-9,-]+): "
                    r"(?P<how>Exited with exit code (?P<code>\d+)|.+)$", re.MULTILINE)
_NODE = re.compile(r"^srun: error: (?:Node failure on (\S+)|Task launch for .* failed on node (\S+):)", re.MULTILINE)
_VANISHED = re.compile(r"missing step on node (?P<index>\d+)")
_NO_STEP = re.compile(r"^srun: error: (.*(?:Unable to (?:create step|resolve|confirm allocation)"
                      r"|Application launch failed|Job/step already completing).*)$", re.MULTILINE | re.IGNORECASE)


@dataclass
class SlurmHost(Host):
    """A job's nodes.

    Attributes:
        held: all nodes of the job, also those that the next start leaves out.
        addresses: of first nodes, as Slurm has them; the node's name until Slurm has answered.
        handler: submitit's handler of SIGUSR2.
    """

    held: tuple[str, ...] = ()
    addresses: dict[str, str] = field(default_factory=dict)
    handler: Any = signal.SIG_DFL

    def ready(self, spec: JobSpec) -> bool:
        """If the job has spare nodes, take its first ones, without those that failed."""
        if spec.spare_nodes:
            self.held = self.held or self.nodes
            self.nodes = tuple(node for node in self.held if node not in self.avoid)[:spec.nodes]
        return not spec.spare_nodes or len(self.nodes) == spec.nodes

    def has_others(self, spec: JobSpec) -> bool:
        """Whether enough of the job's nodes did not fail."""
        return bool(spec.spare_nodes) and len({*self.held} - self.avoid) >= spec.nodes

    def start(self, spec: JobSpec, command: Sequence[str], environment: Environment, folder: Path,
              each: Each) -> StepEnd:
        """Start it as a step of srun: only steps get Slurm's signal before the time limit."""
        srun = srun_command(spec, folder, command, self.nodes)
        if spec.ranks:
            environment = {**environment, **self._meeting()}
        for number in range(1, STEP_TRIES + 1):
            end = run_step(srun, environment, folder, each, self.say)
            final = end.started or end.abandoned or end.lost or number == STEP_TRIES
            if final or self.requests or not self.is_current():
                break
            self.say(f"there is no step: {end.cause}; trying again ({number} of {STEP_TRIES - 1})")
            self.pause(STEP_PAUSE_S * number, each)
        return end

    def requeue(self) -> str | None:
        """Let submitit's handler save the task, call `scontrol requeue`, and end this process. Submitit calls scontrol
        once; while the controller cannot be reached, this is repeated for CONTROLLER_S."""
        began = time.monotonic()
        signal.signal(signal.SIGUSR2, self.handler)
        while True:
            try:
                signal.raise_signal(signal.SIGUSR2)
            except Exception as error:  # noqa: BLE001 - the disk's, scontrol's or submitit's
                problem = str(error)
            job = self.info()
            # Slurm ends a job that it requeues, perhaps before scontrol has the answer.
            if self.requests or job.restarts > self.restart or job.state not in (UNKNOWN, *WITH_NODES):
                return None
            if job.state != UNKNOWN or time.monotonic() - began > CONTROLLER_S:
                return f"{problem} Its answer is in the job's log"
            time.sleep(REQUEUE_PAUSE_S)

    def say(self, text: str, *, quiet: bool = False) -> None:
        """All goes to the job's log."""
        print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}", flush=True)

    def _meeting(self) -> dict[str, str]:
        """Where the ranks of a start meet: on the first node. Each start gets its own port, because that of the
        previous start may still be closing."""
        node = self.nodes[0]
        if self.addresses.get(node, node) == node:  # else it is kept: the controller may be down now
            self.addresses[node] = self.scheduler.node_address(node)
        return meeting(self.addresses[node], free_port())


def srun_command(spec: JobSpec, folder: Path, command: Sequence[str], nodes: Sequence[str] = ()) -> list[str]:
    """srun's command line for one task per rank, or one for a stage without ranks; their output in `folder`, in a file
    for each node. nodes: those to use where the job may have others.

    `--label`: slurmstepd then writes each file, line by line. Ranks that shared one would cut one another's lines.
    `--overlap`: of a step whose slurmstepd died Slurm never hears the end, and would let the next one wait for ever.
    `--export`: the site may have set SBATCH_EXPORT or SLURM_EXPORT_ENV to NONE.
    """
    # With pyxis srun starts the task itself inside the container; elsewhere each rank becomes the container's program.
    inside = any(word.startswith("--container-image") for word in spec.srun_args)
    python = spec.command[0] if inside else sys.executable
    together = int(spec.stage != PREFLIGHT)  # there, what each node says counts
    return ["srun", f"--kill-on-bad-exit={together}", f"--wait={WAIT_S}", f"--nodes={spec.nodes}",
            f"--ntasks={spec.ranks or 1}",
            f"--ntasks-per-node={spec.tasks_per_node}", f"--cpus-per-task={spec.cpus_per_task}", "--export=ALL",
            *([f"--nodelist={','.join(nodes)}"] * bool(spec.spare_nodes)), "--distribution=block", "--overlap",
            "--label", f"--output={literal(folder)}/node%n.log",
            *spec.srun_args, python, "-m", "drover.launch.job.rank", spec.stage, str(spec.ranks),
            str(spec.gpus_per_node), *command]


def run_step(command: Sequence[str], environment: Environment, folder: Path, each: Each,
             say: Say) -> StepEnd:
    """Run srun to its end, and pass its messages to `say`. `each` is called meanwhile; if False, the step ends."""
    log = folder / "srun.err"
    messages = ""
    has_tasks = False
    given_up = False
    broken_at = math.inf  # when the first task had failed
    began = time.monotonic()
    with open(log, "wb") as written, open(log, errors="replace") as reader:
        def read() -> None:
            nonlocal messages
            new = reader.read()
            messages += new
            for line in filter(str.strip, new.splitlines()):
                say(line)

        def has_time() -> bool:
            nonlocal has_tasks, given_up, broken_at
            read()
            now = time.monotonic()
            if _ENDED.search(messages):
                broken_at = min(broken_at, now)
            has_tasks = has_tasks or any(folder.glob("node*.log"))
            given_up = given_up or (not has_tasks and now - began > MAKE_S)
            return each() and not given_up and now - broken_at <= BROKEN_S

        # srun answers SIGTERM by killing its tasks.
        srun = ProcessGroup({0: started(command, environment, written, written)})
        srun.run(has_time)
        read()
    return read_end(srun.status, messages, given_up=given_up, abandoned=srun.killed)


def read_end(status: int, messages: str, *, given_up: bool = False, abandoned: bool = False) -> StepEnd:
    """How a step ended.

    Args:
        status: of srun. messages: what it wrote to stderr.
        given_up: it had started no task for so long that it was ended.
        abandoned: it did not end itself and was killed: Slurm may still run its tasks.
    """
    ends = list(_ENDED.finditer(messages))
    own = [end for end in ends if end["how"] != "Terminated" and end["code"] != "143"]  # not ended for others' sake
    first = next(iter(own + ends), None)
    vanished = _VANISHED.search(messages)
    no_step = _NO_STEP.search(messages)
    lost = tuple(dict.fromkeys(match[1] or match[2] for match in _NODE.finditer(messages)))
    end = process_end(status)
    rank, code, cause = 0, end.exit_code, end.cause
    if first:
        rank = int(re.split("[,-]", first["tasks"])[0])
        code = int(first["code"]) if first["code"] and not vanished else None
    if lost:
        cause = f"lost {', '.join(lost)}"
    elif given_up:
        cause = f"srun started no task in {MAKE_S:.0f} s"
    elif abandoned:
        cause = f"srun did not end within {KILL_S:.0f} s of SIGTERM, and its tasks may still run"
    elif vanished:  # the others' complaints came first
        cause = f"Slurm lost the tasks of the step's node number {vanished['index']}, from 0 (slurmstepd died)"
    elif first:
        ranks = "rank" if first["tasks"].isdigit() else "ranks"
        cause = f"{ranks} {first['tasks']} on {first['node']}: {first['how'][0].lower()}{first['how'][1:]}"
    elif no_step:
        cause = no_step[1]
    return StepEnd(status, cause, rank, code, lost, not given_up and no_step is None, abandoned)
