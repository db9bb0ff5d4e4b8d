"""The fake srun: a step of a job, its tasks spread over the job's nodes, which are all this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.slurm.fake_options import exported, parse
from tests.slurm.fake_scheduler import counted
from tests.slurm.fake_state import (
    MARK,
    Job,
    SlurmError,
    file_name,
    folder,
    host_list,
    hosts,
    marked,
    opened,
    signal_all,
)

KILL_WAIT_S = 3.0
FORWARDED = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class Task:
    """One task of the step."""

    number: int
    node: str
    process: subprocess.Popen[bytes]
    status: int | None = None


def layout(options: dict[str, str], job: Job) -> dict[str, int]:
    """How many tasks each node of the step gets."""
    names = [node for node in job["hosts"] if node not in hosts(options.get("exclude", ""))]
    listed = hosts(options.get("nodelist", ""))
    if listed:
        if set(listed) - set(names):
            raise SlurmError("Unable to create step for job: Requested nodes are not in the job's allocation")
        names = listed
    per_node = int(options.get("ntasks-per-node", 0))
    nodes = int(options["nodes"].split("-")[0]) if "nodes" in options else len(names)
    if nodes > len(names):
        raise SlurmError("Unable to create step for job: More processors requested than permitted")
    if "ntasks" in options:
        tasks = int(options["ntasks"])
    else:
        tasks = nodes * per_node if per_node else int(os.environ.get("SLURM_NTASKS", nodes))
    nodes = min(nodes, tasks)
    base, extra = divmod(tasks, nodes)
    spread = {node: base + (rank < extra) for rank, node in enumerate(names[:nodes])}
    cpus = {node: count * job["cpus"] for node, count in zip(job["hosts"], job["tasks"], strict=True)}
    each = int(options.get("cpus-per-task", 1))
    if "overcommit" not in options and any(count * each > cpus[node] for node, count in spread.items()):
        raise SlurmError("Unable to create step for job: More processors requested than permitted")
    return spread


def environments(options: dict[str, str], job: Job, step: int,
                 tasks: dict[str, int]) -> Iterator[tuple[str, dict[str, str]]]:
    """The node and the environment of each task, in the order of their numbers."""
    number, total, names = 0, sum(tasks.values()), host_list(list(tasks))
    for node_number, (node, count) in enumerate(tasks.items()):
        first = number
        for local in range(count):
            found: dict[str, Any] = {
                "SLURM_PROCID": number, "SLURM_LOCALID": local, "SLURM_NODEID": node_number, "SLURM_NTASKS": total,
                "SLURM_NPROCS": total, "SLURM_NNODES": len(tasks), "SLURM_STEP_ID": step, "SLURM_STEPID": step,
                "SLURM_STEP_NODELIST": names, "SLURM_STEP_NUM_NODES": len(tasks), "SLURM_STEP_NUM_TASKS": total,
                "SLURM_TASKS_PER_NODE": counted(list(tasks.values())), "SLURMD_NODENAME": node,
                "SLURM_STEP_TASKS_PER_NODE": counted(list(tasks.values())),
                "SLURM_GTIDS": ",".join(map(str, range(first, first + count))), MARK: f"{job['id']}.{step}.{node}"}
            if "cpus-per-task" in options:
                found["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
            yield node, {**exported(options.get("export", "")), **{name: str(value) for name, value in found.items()}}
            number += 1


class Step:
    """The running step: its tasks, and the signals that srun itself gets."""

    def __init__(self, options: dict[str, str], job: Job, number: int) -> None:
        self.options, self.job, self.number = options, job, number
        self.tasks: list[Task] = []
        self.stopping: float | None = None
        for one in (*FORWARDED, signal.SIGTERM, signal.SIGINT):
            signal.signal(one, self._on_signal)

    def launch(self, command: list[str], tasks: dict[str, int]) -> None:
        """Start the tasks, their output where --output and --error say, else where srun's own goes."""
        with ExitStack() as stack:
            files: dict[str, IO[bytes]] = {}
            for number, (node, variables) in enumerate(environments(self.options, self.job, self.number, tasks)):
                out, error = (self._file(name, number, node, files, stack) for name in ("output", "error"))
                label = "label" in self.options and out is None
                try:
                    process = subprocess.Popen(
                        command, env=variables, cwd=self.options.get("chdir"), start_new_session=True,
                        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if label else out,
                        stderr=subprocess.STDOUT if label else error or out)
                except OSError as problem:
                    print(f"slurmstepd-{node}: error: execve(): {command[0]}: {problem.strerror}", file=sys.stderr)
                    process = subprocess.Popen(["/bin/sh", "-c", "exit 2"], env=variables, start_new_session=True)
                if label and process.stdout:
                    threading.Thread(target=_labelled, args=(number, process.stdout), daemon=True).start()
                self.tasks.append(Task(number, node, process))

    def wait(self) -> int:
        """Until all tasks have ended; the highest of their exit statuses, as a shell would give them."""
        bad_exit = self.options.get("kill-on-bad-exit", "0") != "0"
        patience = float(self.options.get("wait", 0)) or None
        first_end: float | None = None
        while any(task.status is None for task in self.tasks):
            for task in [task for task in self.tasks if task.status is None]:
                status = task.process.poll()
                if status is None or (status < 0 and self._lost(task.node)):
                    continue
                task.status = status if status >= 0 else 128 - status
                first_end = first_end or time.monotonic()
                if status:
                    how = f"Exited with exit code {status}" if status > 0 else signal.strsignal(-status)
                    print(f"srun: error: {task.node}: task {task.number}: {how}", file=sys.stderr)
                    if bad_exit and self.stopping is None:
                        self.stop()
            if patience and first_end and self.stopping is None and time.monotonic() > first_end + patience:
                self.stop()
            if self.stopping is not None and time.monotonic() > self.stopping + KILL_WAIT_S:
                self.send(signal.SIGKILL)
            time.sleep(0.02)
        self.send(signal.SIGKILL)  # what the tasks have left behind
        return max(task.status or 0 for task in self.tasks)

    def stop(self) -> None:
        """Ask the tasks that are left to end; `wait` kills them when they have not."""
        self.stopping = time.monotonic()
        self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        """A signal to every process of the step."""
        signal_all(list(marked(folder(), self.job["id"], step=str(self.number))), number)

    def _on_signal(self, number: int, frame: object) -> None:
        if number in FORWARDED:
            self.send(number)
        elif self.stopping is None:
            self.stop()

    def _lost(self, node: str) -> bool:
        with opened(write=False) as state:
            return bool(state["nodes"][node]["lost"])

    def _file(self, which: str, task: int, node: str, files: dict[str, IO[bytes]],
              stack: ExitStack) -> IO[bytes] | None:
        pattern = self.options.get(which)
        if pattern is None:
            return None
        name = "/dev/null" if pattern == "none" else str(
            file_name(pattern, {**self.job, "workdir": str(Path.cwd())}, task, node, str(self.number)))
        if name not in files:
            append = self.options.get("open-mode", "").startswith("a")
            files[name] = stack.enter_context(open(name, "ab" if append else "wb"))  # noqa: SIM115 (the stack closes it)
        return files[name]


def _labelled(number: int, lines: IO[bytes]) -> None:
    for line in lines:
        sys.stdout.buffer.write(b"%d: %s" % (number, line))
        sys.stdout.buffer.flush()


def srun(arguments: list[str]) -> int:
    """Run a command as a step of the job that we are in."""
    options, command = parse("srun", arguments)
    if "SLURM_JOB_ID" not in os.environ:
        raise SlurmError("the fake srun works inside a job only")
    with opened() as state:
        job = state["jobs"].get(os.environ["SLURM_JOB_ID"])
        if job is None or job["state"] != "RUNNING":
            raise SlurmError(f"Unable to confirm allocation for job {os.environ['SLURM_JOB_ID']}: Invalid job id "
                             "specified")
        number = job["steps"]
        tasks = layout(options, job)
        if any(state["nodes"][node]["lost"] for node in tasks):
            raise SlurmError("Unable to create step for job: Required node not available (down, drained or reserved)")
        job["steps"] += 1
    step = Step(options, job, number)
    step.launch(command, tasks)
    return step.wait()
