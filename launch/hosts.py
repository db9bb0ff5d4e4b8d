"""Several hosts without Slurm, over ssh: which of them answer, and the ranks of a stage there.

The runner is the one of Slurm's jobs and of one machine (`drover.launch.slurm.job.runner`). On each host
`drover.launch.on_host` starts the ranks, and ends them when its ssh ends. Where Slurm would queue a job again, the
runner waits here until enough hosts answer.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from signal import SIGTERM

from drover.launch.host import Host, StepEnd, process_end
from drover.launch.local import WORDS, LocalHost, run_jobs
from drover.launch.on_host import MARK, Work, answers, code_hash, line_of
from drover.launch.plan import Job, Options
from drover.launch.processes import BROKEN_S, SHUTDOWN_S, Each, Environment, Group, answer_of, meeting, started
from drover.launch.slurm.job.decisions import TERMINATED
from drover.launch.slurm.job.rank import PREFLIGHT, SAVES
from drover.launch.slurm.jobspec import JobSpec
from drover.launch.slurm.nodes import failing
from drover.launch.slurm.scheduler import NoScheduler
from drover.launch.slurm.submit.options import setup_lines
from drover.pipeline.config.launching import LaunchConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import IMPORTED_FROM
from drover.pipeline.contract.state import CANCEL, LAUNCHER
from drover.pipeline.core.errors import UserError

SSH = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15",
       "-o", "ServerAliveCountMax=3", "-o", "ControlPath=none")
"""Options of ssh, after the user's, which count first. It asks nothing, and gives up a host that is silent for 45 s."""
KILLED = 128
"""Exit statuses above are of processes that a signal ended."""
LOST = 255
"""Exit status of an ssh whose connection failed or broke."""
PROBE_S = 120.0
"""For a host to answer: Python may come from a slow file system."""
BEAT_S = 5.0
"""Between two words to each host, and two looks for a request to cancel."""
READ_S = 1.0
"""Between two looks for answers of the hosts, which are in the shared folder."""
WAIT_S = 15.0
"""Between two looks whether enough hosts answer."""
LOOK_S = 60.0
"""Between two looks, while training runs on fewer hosts, whether another one answers."""


Meeting = tuple[str, list[int]]
"""An address of a host, at which ranks can meet, and free ports there."""


@dataclass(frozen=True)
class Found:
    """What a look at the hosts found. there: those that can be used. problems: why the others cannot."""

    there: Mapping[str, Meeting]
    problems: Mapping[str, str]

    def __str__(self) -> str:
        return "; ".join(f"{host}: {problem}" for host, problem in self.problems.items())


def look_at(launch: LaunchConfig, run_folder: Path) -> Found:
    """Look which hosts can be reached, start Python, and share the run folder and Drover's code with this machine."""
    hosts, code = launch.hosts, code_hash()
    token = run_folder / "launch" / f"{token_hex(4)}.host"

    def ask(number: int) -> tuple[Meeting | None, str]:
        host, mark = hosts[number], token.with_suffix(f".{number}")
        try:
            status, _, said = answer_of(ssh_command(host, launch), os.environ, PROBE_S,
                                        json.dumps({"token": str(token.absolute()), "number": number}) + "\n")
        except OSError as error:
            return None, f"{launch.ssh[0]} cannot be started: {error.strerror}"
        except subprocess.TimeoutExpired:
            return None, f"no answer in {PROBE_S:.0f} s"
        answer = next(answers(said), None)
        if answer is None:
            return None, last_words(said) or f"ended with exit status {status}"
        if not answer["seen"] or not mark.exists():
            return None, f"does not see {token.parent.parent} as this machine does; the folder must be shared"
        mark.unlink()
        if answer["code"] != code:
            return None, f"has other code of Drover in {IMPORTED_FROM} than this machine"
        # A name that means the host itself there, as on the host that this runs on, is of no use to the others.
        own = answer["address"].startswith(("127.", "::1")) or not answer["address"]
        return (host.rpartition("@")[2] if own else answer["address"], answer["ports"]), ""

    try:
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch()
        with ThreadPoolExecutor(len(hosts)) as pool:
            results = dict(zip(hosts, pool.map(ask, range(len(hosts))), strict=True))
    except OSError as error:
        return Found({}, dict.fromkeys(hosts, f"this machine cannot use {token.parent}: {error.strerror}"))
    finally:
        with suppress(OSError):
            token.unlink(missing_ok=True)
    return Found({host: place for host, (place, _) in results.items() if place},
                 {host: problem for host, (place, problem) in results.items() if not place})


def ssh_command(host: str, launch: LaunchConfig) -> list[str]:
    """How `drover.launch.on_host` is started on a host.

    bash runs the lines of launch.setup, as in a Slurm job. They get no input, which is the task. The login shell may be
    another one, such as csh, so it gets one line without anything that it could read differently.
    """
    python = launch.runner_python or (None if launch.wrap or launch.container.image else launch.python)
    script = "\n".join([
        f"cd {shlex.quote(str(Path.cwd()))} || exit", "{ :", *setup_lines(launch), "} </dev/null",
        f"exec env PYTHONPATH={shlex.quote(str(IMPORTED_FROM))} PYTHONSAFEPATH=1 "
        f"{shlex.quote(python or sys.executable)} -m drover.launch.on_host"])
    encoded = base64.b64encode(script.encode()).decode()
    return [*launch.ssh, *SSH, host, f"exec bash -c 'eval \"$(echo {encoded} | base64 -d)\"'"]


def text_of(log: Path) -> str:
    """What a log holds; nothing while its file system fails."""
    with suppress(OSError):
        return log.read_text(errors="replace")
    return ""


def last_words(said: str) -> str:
    """The last line that ssh or the host wrote of itself."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith(MARK)]
    return lines[-1] if lines else ""


def run_on_hosts(config: Config, jobs: list[Job], options: Options) -> int:
    """Do the jobs on the hosts of the configuration; the exit status, as of `run_jobs`.

    Raises:
        UserError: too few hosts answer, all that do not are named; or another launcher works on the run.
    """
    launch, run = config.launch, Run(config)
    held = lock(run.folder, LAUNCHER, "launcher on hosts")
    (run.folder / CANCEL).unlink(missing_ok=True)
    found = look_at(launch, run.folder)
    if not all(job.on(len(found.there)) for job in jobs if job.to_run):
        raise UserError(
            f"{len(found.problems)} of {len(launch.hosts)} hosts cannot be used. {found}. Every host must let you in "
            f"without a question (`{launch.ssh[0]} -o BatchMode=yes HOST true`), and must have {run.folder.absolute()},"
            f" {Path.cwd()} and {sys.executable} in the same places, in a shared folder. Fix them, remove them from "
            f"launch.hosts, or let training do with fewer (launch.train.min_nodes).")
    try:
        return run_jobs(config, jobs, options, hosts_place)
    finally:
        held.close()


class _Link(subprocess.Popen[bytes]):
    """An ssh to a host. The request to end is passed on; killed, it takes the ranks with it."""

    def terminate(self) -> None:
        self.say(b"end\n")

    def say(self, words: bytes) -> None:
        """Send something to the host, if it is still there."""
        with suppress(OSError):
            os.write(self.stdin.fileno(), words)  # type: ignore[union-attr]


def _beat(links: Sequence[_Link], over: threading.Event) -> None:
    """Write to the hosts now and then, by which they know that the launcher is there, until it is over."""
    while not over.wait(BEAT_S):
        for link in links:
            link.say(b"\n")


@dataclass(kw_only=True)
class SshHost(LocalHost):
    """Hosts that are reached by ssh, for one stage.

    Attributes:
        planned: the stage as it runs on all hosts that it wants. config: of the run.
        nodes: the hosts of this start, the first of which has rank 0.
    """

    planned: JobSpec
    config: Config
    in_place = True
    _meeting: Meeting = ("", [])
    _said: str = ""
    _next: float = 0.0

    def ready(self, spec: JobSpec, each: Each) -> JobSpec:
        """Wait until enough hosts answer; the stage as it runs on those."""
        launch, planned, run = self.config.launch, self.planned, Path(self.planned.run)
        while not self.asked:
            found = look_at(launch, run)
            there, ready = self._usable(found)
            if ready:
                count = ready.nodes
                self.nodes, self._meeting = tuple(there[:count]), found.there[there[0]]
                fewer = f"continues with {count} of {planned.nodes} hosts ({found})" if count < planned.nodes else ""
                self._say_once(fewer)
                return ready
            self._say_once(f"waits for more hosts: {len(there)} of {planned.nodes} can be used ({found})")
            self.pause(WAIT_S, lambda: self._attend(each))
        return spec

    def does_without(self, nodes: Collection[str]) -> bool:
        """Those that failed twice are left out where enough others are named."""
        return bool(nodes) and not {*nodes} & {*self._candidates()}

    def rendezvous(self, spec: JobSpec) -> dict[str, str]:
        """On the first host."""
        address, ports = self._meeting
        return meeting(spec.ranks, address, ports.pop())  # one for the preflight, one for the start

    def start(self, spec: JobSpec, command: Sequence[str], environment: Environment, folder: Path,
              each: Each) -> StepEnd:
        """Over an ssh to each host. What rank 0 writes is shown on the terminal as well."""
        launch, logs = self.config.launch, [folder / f"ssh{number}.err" for number in range(len(self.nodes))]
        with ExitStack() as opened:
            links = [started(ssh_command(host, launch), os.environ,
                             subprocess.DEVNULL if number or spec.stage == PREFLIGHT else None,
                             opened.enter_context(open(log, "wb")), subprocess.PIPE, _Link)
                     for number, (host, log) in enumerate(zip(self.nodes, logs, strict=True))]
            for number, link in enumerate(links):
                link.say(line_of(self._work(spec, command, environment, folder, number)))
            group, ends = Group(links, spec.stage, self.asked), list[tuple[int, int]]()
            over, read = threading.Event(), 0.0
            # In a thread: hosts whose launcher waits for the shared folder must not think that it is gone.
            beats = threading.Thread(daemon=True, target=_beat, args=(links, over))
            beats.start()
            opened.callback(beats.join)
            opened.callback(over.set)
            grows = self._growth(opened.enter_context(ThreadPoolExecutor(1))) if spec.stage in SAVES else iter(())

            def hear() -> None:
                new = {(answer["rank"], answer["status"]) for log in logs
                       for answer in answers(text_of(log))}.difference(ends)
                # What was killed made others fail, except by SIGTERM: that came because another one had failed.
                ends.extend(sorted(new, key=lambda end: (end[1] == TERMINATED, end[1] < KILLED, end)))

            def proceeds() -> bool:
                nonlocal read
                if time.monotonic() >= read:
                    read = time.monotonic() + READ_S
                    hear()
                if ends or group.failed:
                    group.end_within(BROKEN_S)
                elif next(grows, False):
                    group.end_within(SHUTDOWN_S)
                return self._attend(each)

            group.run(proceeds)
            hear()  # what the hosts answered last
        return self._end_of(spec, group, ends, logs)

    def _work(self, spec: JobSpec, command: Sequence[str], environment: Environment, folder: Path, number: int) -> Work:
        """What one host does. Of the launcher's environment it gets what the stage was planned with, and secrets."""
        names = {*spec.environment, *self.config.launch.secrets}
        sent = {name: value for name, value in environment.items()
                if name in names or name.startswith(("DROVER_", "MASTER_"))}
        # By Slurm's variable ranks, preflight and accounts of hangs name their node: here, the host as it was given.
        return Work(spec.stage, tuple(command), {**sent, "SLURMD_NODENAME": self.nodes[number]},
                    str(folder.absolute() / f"node{number}.log"), spec.ranks, spec.tasks_per_node, number)

    def _end_of(self, spec: JobSpec, group: Group, ends: Sequence[tuple[int, int]], logs: Sequence[Path]) -> StepEnd:
        """How a start ended. ends: ranks that failed, with their exit statuses, the first first."""
        lost = {self.nodes[number]: last_words(text_of(logs[number]))
                for number, status in group.failed if status == LOST}
        number, status = group.failed[0] if group.failed else (0, 0)
        rank, status = ends[0] if ends else (number * spec.tasks_per_node, status)
        end = process_end(status)
        cause = end.cause or (f"exited with exit code {status}" if status else "")
        if lost:
            cause = f"lost {', '.join(lost)} ({next(iter(lost.values())) or 'its ssh ended'})"
        elif ends:
            host = self.nodes[rank // spec.tasks_per_node]
            cause = f"rank {rank} on {host}: {cause}" if spec.ranks else f"{cause} on {host}"
        elif status:
            cause = f"{self.nodes[number]}: {last_words(text_of(logs[number])) or cause}"
        # Without it, ranks that miss a lost host count as crashed, not as ranks that refused to start.
        code = end.exit_code if ends and not lost else None
        return replace(end, cause=cause, rank=rank, exit_code=code, lost=tuple(lost),
                       abandoned=group.killed or bool(lost))

    def _growth(self, pool: ThreadPoolExecutor) -> Iterator[bool]:
        """While a stage runs on fewer hosts than planned: whether more answer now, so that it is to begin again."""
        looked, look = time.monotonic(), None
        while len(self.nodes) < self.planned.nodes and not self.asked:
            if look is not None and look.done():
                there, more = self._usable(look.result())
                look = None
                if more and more.nodes > len(self.nodes):
                    self.say(f"{', '.join(host for host in there if host not in self.nodes)} can be used again; "
                             f"{self.planned.stage} saves and begins again with more hosts")
                    yield True
                    return
            elif look is None and time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                look = pool.submit(look_at, self.config.launch, Path(self.planned.run))
            yield False

    def _usable(self, found: Found) -> tuple[list[str], JobSpec | None]:
        """The candidates that were found, and the stage as it runs on them; None: they are too few."""
        there = [host for host in self._candidates() if host in found.there]
        return there, self.planned.on(len(there))

    def _candidates(self) -> list[str]:
        """The hosts, without those that failed twice within a day where enough others are named."""
        hosts, planned = self.config.launch.hosts, self.planned
        bad, _ = failing(Path(planned.run), planned.nodes)
        kept = [host for host in hosts if host not in bad]
        return kept if planned.on(len(kept)) else hosts

    def _attend(self, each: Each) -> bool:
        """Look now and then whether `drover cancel` asks for the end."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + BEAT_S
            with suppress(OSError):
                (Path(self.planned.run) / CANCEL).unlink()
                if not self.asked:  # a second request would kill what is being saved
                    self.say("asked to end by `drover cancel`")
                    self.asked.append(SIGTERM)
        return each()

    def _say_once(self, text: str) -> None:
        if text and text != self._said:
            self.say(text)
        self._said = text


def hosts_place(run: Run, spec: JobSpec, asked: list[int]) -> Host:
    """The hosts of a configuration, for one stage."""
    return SshHost("", "hosts", 0, tuple(run.config.launch.hosts), None, NoScheduler(), asked, log=run.folder / WORDS,
                   planned=spec, config=run.config)
