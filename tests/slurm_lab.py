"""Start a real Slurm cluster on this machine, to try runs on: any number of nodes, and faults on request.

    eval "$(python -m tests.slurm_lab up 4)"    start four nodes; sbatch, squeue ... then use them
    python -m tests.slurm_lab kill-node n2      n2 loses power; start-node n2 brings it back
    python -m tests.slurm_lab down              stop all of it and remove its folder

Everything is inside one folder (--folder), so there may be several labs. Root is not needed: without it, the cluster
runs jobs of the user who started it.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from drover.launch.processes import answer_of
from drover.pipeline.core.console import Parser, Program
from drover.pipeline.core.errors import UserError

PACKAGES = ["slurm-wlm", "slurmdbd", "munge", "mariadb-server"]
PROGRAMS = ["slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "scontrol", "munged", "slurmdbd",
            "sacctmgr", "mariadbd", "mariadb-install-db"]
PATIENCE_S = 600.0
"""Time limit of every wait: an idle machine needs seconds, a busy one minutes."""
TAIL = 8
"""Last lines of each log to show if the lab fails."""
USABLE = {"idle", "mixed", "allocated", "completing"}
PORTS = range(10000, 20000, 64)
"""First ports of the labs: below those that the kernel hands out, and those of training ranks."""

SLURM_CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
# A requeued job waits until its old credential has expired, by default 120 s.
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
# No control groups, no systemd, no MPI: it has to run in a container without privileges.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
# The nodes have more CPUs and memory together than the machine.
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
# Quick decisions: tests wait for them.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
# Long limits for what is only slow: they matter only if something is lost.
SlurmdTimeout=60
KillWait=30
ReturnToService=2
# Without a controller, srun gives up after a few of these.
MessageTimeout=5
TCPTimeout=1
InactiveLimit=0
MinJobAge=600
JobRequeue=1
MaxJobCount=10000
NodeName={names} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=4 RealMemory=6000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={database_port}
AccountingStoragePass={folder}/munge.sock
"""
# The database listens on a socket only, in a folder that others cannot enter.
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={database_port}
SlurmUser={user}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_accounting
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""
STEP_DAEMON = """\
#!/bin/sh
# Becomes Slurm's step daemon as a sub-reaper (prctl 36): it then inherits, and can kill, the orphans of a dead task.
# On a real cluster control groups do that. Without them an orphan keeps its job COMPLETING.
exec {python} -I -S -c 'import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
os.execv(sys.argv[1], ["slurmstepd", *sys.argv[2:]])' {program} "$@"
"""


@dataclass(frozen=True)
class LabSettings:
    """Settings of a lab. Ports from `port` on: the controller, the accounting daemon, the nodes."""

    folder: str
    nodes: int
    port: int

    def filled(self, template: str) -> str:
        """Fill in the template of a configuration file."""
        first, last = self.port + 2, self.port + 1 + self.nodes
        several = self.nodes > 1  # Slurm does not accept a range of one
        return template.format(**asdict(self), host=socket.gethostname().split(".")[0], user=user_name(),
                               database_port=self.port + 1, ports=f"[{first}-{last}]" if several else first,
                               names=f"n[1-{self.nodes}]" if several else "n1")


def missing_programs() -> list[str]:
    """Programs that a lab needs and this machine does not have."""
    return [name for name in PROGRAMS if _which(name) is None]


class Lab:
    """The lab in a folder, running or not. Several objects and processes may control the same lab."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder or default_folder()).resolve()

    @property
    def settings(self) -> LabSettings:
        """The settings with which the lab was started. UserError if there is no lab in this folder."""
        try:
            return LabSettings(**json.loads((self.folder / "lab.json").read_text()))
        except FileNotFoundError:
            raise UserError(f"There is no Slurm lab in {self.folder}. Start one: python -m tests.slurm_lab up "
                            f"--folder {self.folder}") from None

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes: n1, n2 ..."""
        return [f"n{number}" for number in range(1, self.settings.nodes + 1)]

    @property
    def is_up(self) -> bool:
        """Whether any of its Slurm daemons runs, the controller or a node's."""
        return any(name.startswith("slurm") and self.daemon(name) for name in self.daemons())

    def environment(self) -> dict[str, str]:
        """Environment variables with which Slurm's programs use this lab."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def up(self, nodes: int = 4) -> None:
        """Start the lab and return when every node is idle. If it fails, try once more.

        Raises:
            UserError: programs are missing, the folder cannot be used, or the lab did not start; with the ends of its
                logs.
        """
        if missing := missing_programs():
            raise UserError(f"Programs of Slurm are missing: no {', '.join(missing)}. On Debian or Ubuntu "
                            f"`python -m tests.slurm_lab install` installs them, as root.")
        if self.is_up:
            raise UserError(f"The lab in {self.folder} is running already.")
        self.down()
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(f"{self.folder} holds something that is not a Slurm lab; choose another with --folder.")
        try:
            self._bring_up(nodes)
        except UserError as first:
            print(f"{str(first).partition(chr(10))[0]} Trying once more.", file=sys.stderr, flush=True)
            self.down()
            self._bring_up(nodes)

    def _bring_up(self, nodes: int) -> None:
        with free_ports(nodes + 2) as port:
            try:
                self._write(LabSettings(str(self.folder), nodes, port))
                self._start_munge()
                self._make_database()
                self.start_accounting()
                self._start_slurm("slurmctld")
                for node in self.nodes:
                    self._start_slurmd(node)
                self._wait("all nodes idle", lambda: set(self.node_states().values()) == {"idle"})
            except BaseException:
                self.down(keep=True)
                raise

    def down(self, keep: bool = False) -> None:
        """Stop every process of the lab and of its jobs, and remove its folder (`keep`: leave it, with the logs)."""
        if not (self.folder / "lab.json").exists():
            return
        for prefix in ("slurmd-", "slurmctld", "slurmdbd", "mariadbd", "munged"):
            for name in self.daemons():
                if name.startswith(prefix):
                    self.stop_daemon(name, grace_s=5.0 if keep else 0.0)
            if prefix == "slurmd-":
                self._kill_jobs(self.nodes)
        for _ in range(0 if keep else 2):  # a killed process may have written meanwhile
            shutil.rmtree(self.folder, ignore_errors=True)

    # ---- faults

    def kill_node(self, node: str, reported: bool = True) -> None:
        """Simulate a power loss of a node: kill its daemon, and everything that runs on it, at once.

        reported: set the node to DOWN, as a site's health check would; else the controller notices after SlurmdTimeout.
        """
        self.stop_daemon(f"slurmd-{node}")
        self._kill_jobs([node])
        if reported:
            self.report_loss(node)

    def report_loss(self, node: str) -> None:
        """Set a node to DOWN, if the controller runs, without waiting for SlurmdTimeout."""
        if self.daemon("slurmctld"):
            self._ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def start_node(self, node: str) -> None:
        """Start a node again. Returns when the controller can give it jobs."""
        port = self.settings.port + 2 + self.nodes.index(node)
        self._start_slurmd(node)
        self._wait(f"{node} listening", lambda: is_open(port))
        patient_until = time.monotonic() + 5
        while self.daemon("slurmctld") and self.node_states().get(node) not in USABLE:
            if time.monotonic() > patient_until:
                self._run("scontrol", "update", f"NodeName={node}", "State=RESUME")  # fails if the node needs none
                self._wait(f"{node} usable", lambda: self.node_states().get(node) in USABLE)
            time.sleep(0.05)

    def stop_controller(self) -> None:
        """Stop slurmctld in an orderly way: jobs continue, and Slurm's commands get no answer."""
        self.stop_daemon("slurmctld", PATIENCE_S)

    def start_controller(self) -> None:
        """Start slurmctld from its saved state. Returns when every running node has registered."""
        self._start_slurm("slurmctld")
        living = [node for node in self.nodes if self.daemon(f"slurmd-{node}")]

        def heard() -> bool:
            states = self.node_states()
            return bool(states) and all(not state.endswith("*") and state not in ("unknown", "down")
                                        for state in (states.get(node, "unknown") for node in living))
        self._wait("slurmctld answering", heard)

    def restart_controller(self) -> None:
        """Stop slurmctld and start it again."""
        self.stop_controller()
        self.start_controller()

    def stop_accounting(self) -> None:
        """Stop the accounting: sacct gets no answer; everything else works."""
        self.stop_daemon("slurmdbd", PATIENCE_S)
        self.stop_daemon("mariadbd", PATIENCE_S)

    def start_accounting(self) -> None:
        """Start the accounting, so that sacct works."""
        data = self.folder / "database"
        if self.daemon("slurmdbd"):
            return
        self.start_daemon("mariadbd", "mariadbd", "--no-defaults", *_as_user(), f"--datadir={data}",
                          f"--socket={data}/socket", f"--pid-file={data}/pid", "--skip-networking",
                          "--innodb-flush-log-at-trx-commit=0")
        self._wait("mariadbd", lambda: is_open(data / "socket"))
        self.start_daemon("slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=f"{data}/socket")
        self._wait("slurmdbd listening", lambda: is_open(self.settings.port + 1))
        ask = ["sacct"] if self.daemon("slurmctld") else ["sacctmgr", "--immediate", "add", "cluster", "lab"]
        self._wait("slurmdbd", lambda: self._run(*ask)[0] == 0)

    # ---- daemons: `pids/<name>` holds the id and the starting time of each

    def daemons(self) -> list[str]:
        """Names of the daemons that were started and not stopped, running or dead."""
        return sorted(path.name for path in self.folder.glob("pids/*"))

    def daemon(self, name: str) -> psutil.Process | None:
        """A daemon's process; None if it is not running."""
        with suppress(FileNotFoundError, ValueError, psutil.Error):
            identity, started = (self.folder / "pids" / name).read_text().split()
            process = psutil.Process(int(identity))
            if abs(process.create_time() - float(started)) < 2 and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def start_daemon(self, name: str, program: str, *arguments: str, **variables: str) -> None:
        """Start a daemon in its own session. Its output, before its log opens, goes to log/<name>.out."""
        with open(self.folder / "log" / f"{name}.out", "ab") as out:
            child = psutil.Popen([str(_which(program)), *arguments], stdin=subprocess.DEVNULL, stdout=out,
                                 stderr=out, cwd=self.folder, env={**self._environment(), **variables},
                                 start_new_session=True)
        (self.folder / "pids" / name).write_text(f"{child.pid} {child.create_time()}\n")

    def stop_daemon(self, name: str, grace_s: float = 0.0) -> None:
        """Send SIGTERM to a daemon, and SIGKILL after `grace_s` seconds (0: SIGKILL at once)."""
        until = time.monotonic() + grace_s
        if (process := self.daemon(name)) is not None and grace_s:
            _signal(process, signal.SIGTERM)
        while (process := self.daemon(name)) is not None:
            if time.monotonic() >= until:
                _signal(process, signal.SIGKILL)
            time.sleep(0.02)
        (self.folder / "pids" / name).unlink(missing_ok=True)

    def job_processes(self, nodes: Iterable[str]) -> set[psutil.Process]:
        """Processes of jobs on the given nodes: Slurm's step daemons, their descendants, and orphans of those.

        A step daemon overwrites its command line and environment, but keeps the log of its node open. Processes of a
        job have the name of their node and our slurm.conf in their environment.
        """
        nodes, result = set(nodes), set[psutil.Process]()
        logs = {str(self.folder / "log" / f"slurmd-{node}.log") for node in nodes}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if Path(process.exe()).name.startswith("slurmstepd"):
                    mine = any(file.path in logs for file in process.open_files())
                else:
                    variables = process.environ()
                    mine = self.environment().items() <= variables.items() and variables.get("SLURMD_NODENAME") in nodes
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    result |= {process, *process.children(recursive=True)}
        return result - {psutil.Process()}

    def _kill_jobs(self, nodes: Iterable[str], limit_s: float = 300.0) -> None:
        """SIGKILL the processes of jobs on the nodes, until none is left. TimeoutError if some cannot be killed.

        All are stopped before the first is killed, as in a power loss: a step daemon that sees its script die would
        report the job as failed.
        """
        nodes, until = list(nodes), time.monotonic() + limit_s
        while result := self.job_processes(nodes):
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for process in sorted(result, key=lambda process: process.pid):  # step daemons first, as a rule
                    _signal(process, number)
            if time.monotonic() > until:
                raise TimeoutError(f"processes {sorted(process.pid for process in result)} of {self.folder} do not die")
            time.sleep(0.02)

    def _write(self, settings: LabSettings) -> None:
        spools = [f"spool/n{number}" for number in range(1, settings.nodes + 1)]
        for name in (".", "pids", "log", "state", *spools):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        step_daemon = STEP_DAEMON.format(python=shlex.quote(sys.executable),
                                         program=shlex.quote(str(_which("slurmstepd"))))
        for name, text, mode in (
                ("lab.json", json.dumps(asdict(settings)), 0o644), ("slurm.conf", settings.filled(SLURM_CONF), 0o644),
                ("slurmdbd.conf", settings.filled(SLURMDBD_CONF), 0o600), ("slurmstepd", step_daemon, 0o755),
                ("munge.key", secrets.token_hex(64), 0o600)):
            (self.folder / name).touch(mode)
            (self.folder / name).chmod(mode)
            (self.folder / name).write_text(text)

    def _start_munge(self) -> None:
        paths = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munge.seed",
                 "log-file": "log/munged.log"}
        # --force: whatever the rights of the folders above
        self.start_daemon("munged", "munged", "--foreground", "--force",
                          *(f"--{option}={self.folder / path}" for option, path in paths.items()))
        self._wait("munged", lambda: (self.folder / "munge.sock").exists())

    def _make_database(self) -> None:
        data = self.folder / "database"
        data.mkdir(mode=0o700)
        self._ask("mariadb-install-db", "--no-defaults", *_as_user(), f"--datadir={data}", "--skip-test-db",
                  "--auth-root-authentication-method=normal")

    def _start_slurmd(self, node: str) -> None:
        self._start_slurm(f"slurmd-{node}", "-N", node, "-d", str(self.folder / "slurmstepd"))

    def _start_slurm(self, name: str, *arguments: str) -> None:
        if not self.daemon(name):
            self.start_daemon(name, name.partition("-")[0], "-D", "-f", str(self.folder / "slurm.conf"), *arguments)

    def _environment(self) -> dict[str, str]:
        """Our environment without the variables of a Slurm job that we may be part of."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        return {**kept, **self.environment()}

    def node_states(self) -> dict[str, str]:
        """The state of each node from sinfo, such as idle, mixed, allocated*, down*; empty without a controller."""
        status, output, _ = self._run("sinfo", "--noheader", "--Node", "--format=%N %T")
        return {} if status else dict(line.split() for line in output.splitlines())

    def _run(self, program: str, *arguments: str) -> tuple[int, str, str]:
        """Its exit status, output and errors."""
        try:
            return answer_of([str(_which(program)), *arguments], self._environment(), PATIENCE_S)
        except subprocess.TimeoutExpired:
            return 124, "", f"no answer in {PATIENCE_S:.0f} s"

    def _ask(self, program: str, *arguments: str) -> None:
        status, output, errors = self._run(program, *arguments)
        if status:
            raise UserError(f"{program} {shlex.join(arguments)} failed: {(errors or output).strip()}"
                            f"{self._log_ends()}")

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. UserError if a daemon dies, or after PATIENCE_S."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            dead = [name for name in self.daemons() if self.daemon(name) is None]
            if dead or time.monotonic() > until:
                why = f"{' and '.join(dead)} died" if dead else f"not so after {PATIENCE_S:.0f} s"
                raise UserError(f"The Slurm lab waited for {what}: {why}. Its logs are in {self.folder}/log."
                                f"{self._log_ends()}")
            time.sleep(0.05)

    def _log_ends(self) -> str:
        """The last lines of each daemon's output, or of its log if there is no output."""
        message = {path.stem: path for ending in ("log", "out")
                for path in sorted((self.folder / "log").glob(f"*.{ending}")) if path.stat().st_size}
        return "".join(f"\n==> {name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-TAIL:])
                       for name, path in message.items())

@contextmanager
def free_ports(count: int) -> Iterator[int]:
    """The first of `count` free ports in a row, reserved for this lab while the block runs. UserError if there are
    none."""
    for first in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0slurm_lab:{first}")  # an abstract name: it vanishes with this process
                for port in range(first, first + count):
                    socket.create_server(("", port)).close()
            except OSError:
                continue
            yield first
            return
    raise UserError(f"There are no {count} free ports in a row between {PORTS.start} and {PORTS.stop}.")


def is_open(place: int | Path) -> bool:
    """Whether something listens on a port, or on a local socket, of this machine."""
    local = isinstance(place, Path)
    with socket.socket(socket.AF_UNIX if local else socket.AF_INET) as probe:
        probe.settimeout(10.0)
        return probe.connect_ex(str(place) if local else ("127.0.0.1", place)) == 0


def user_name() -> str:
    """The name of the user of this process."""
    return pwd.getpwuid(os.geteuid()).pw_name


def default_folder() -> Path:
    """The default folder of a lab."""
    return Path(os.environ.get("TMPDIR", "/tmp")) / f"slurm_lab-{user_name()}"


def install() -> None:
    """Install the packages as root. UserError, with the command to run, without root or apt-get, or if it fails."""
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *PACKAGES]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise UserError(f"Installing needs root on Debian or Ubuntu: sudo {shlex.join(command)}")
    for step in (["apt-get", "update"], command):
        if subprocess.run(step, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, stdout=sys.stderr).returncode:
            raise UserError(f"`{shlex.join(step)}` failed; its output is above.")


def _as_user() -> list[str]:
    """MariaDB's programs run as root only with this option."""
    return ["--user=root"] if os.geteuid() == 0 else []


def _which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.Error):  # it may have ended meanwhile
        process.send_signal(number)


def add_options(parser: Parser) -> None:
    """The commands and their options."""
    parser.add_argument("command", choices=("install", "up", "kill-node", "start-node", "down"),
                        help="install: Slurm's Debian packages, as root; up: start it, and print the line for eval")
    parser.add_argument("argument", nargs="?", help="of up: how many nodes (4); of kill-node and start-node: the node")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="the lab's folder (%(default)s)")


def _up(lab: Lab, nodes: int) -> None:
    if lab.is_up:
        print(f"The lab in {lab.folder} is running already, with {len(lab.nodes)} nodes.", file=sys.stderr)
    else:
        lab.up(nodes)
    for name, value in lab.environment().items():
        print(f"export {name}={shlex.quote(value)}")


def work(options: argparse.Namespace) -> None:
    """Run a command."""
    lab = Lab(options.folder)
    match options.command:
        case "install":
            install()
        case "up":
            _up(lab, int(options.argument or 4))
        case "kill-node":
            lab.kill_node(str(options.argument))
        case "start-node":
            lab.start_node(str(options.argument))
        case "down":
            lab.down()


main = Program("python -m tests.slurm_lab", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
