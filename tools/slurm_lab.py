"""A real Slurm cluster on this one machine, to try the chain on: as many nodes as you like, and faults at will.

    eval "$(python -m tools.slurm_lab up 4)"     start four nodes; sbatch, squeue ... then speak to them
    python -m tools.slurm_lab kill-node n2       n2 loses power; start-node n2 brings it back
    python -m tools.slurm_lab down               stop all of it and remove its folder

Everything is inside one folder (--folder), so several labs live beside each other. Root is not needed; an ordinary
user gets a cluster that runs jobs of that user.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from pipeline.errors import UserError
from tools.slurm_processes import Daemons
from tools.slurm_settings import NO_REQUEUE, STEP_DAEMON, LabSettings, check_folder, default_folder, free_ports, is_open

PACKAGES = ["slurm-wlm", "slurmdbd", "munge", "mariadb-server"]
PROGRAMS = ["slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "scontrol", "munged"]
ACCOUNTING_PROGRAMS = ["slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db"]
PATIENCE_S = 600.0
"""For whatever is waited for, lest it be for ever: an idle machine needs seconds, a busy one minutes."""
TAIL = 8
"""Lines of each log that are told when the lab fails."""
USABLE = {"idle", "mixed", "allocated", "completing"}


def missing_programs(accounting: bool = True) -> list[str]:
    """The programs that a lab needs and this machine lacks."""
    return [name for name in PROGRAMS + ACCOUNTING_PROGRAMS * accounting if _which(name) is None]


class Lab:
    """The lab in a folder, running or not; several objects and processes may speak for the same one."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path(folder or default_folder()).resolve()
        self.daemons = Daemons(self.folder)

    @property
    def settings(self) -> LabSettings:
        """What the lab was started with.

        Raises:
            UserError: there is no lab in this folder.
        """
        try:
            return LabSettings(**json.loads((self.folder / "lab.json").read_text()))
        except FileNotFoundError:
            raise UserError(f"There is no Slurm lab in {self.folder}. Start one: python -m tools.slurm_lab up "
                            f"--folder {self.folder}") from None

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes: n1, n2 ..."""
        return [f"n{number}" for number in range(1, self.settings.nodes + 1)]

    @property
    def is_up(self) -> bool:
        """Whether any of its Slurm daemons lives: the controller, or a node while that is stopped."""
        return any(name.startswith("slurm") and self.daemons.running(name) for name in self.daemons.names())

    def environment(self) -> dict[str, str]:
        """What to add to a process's environment so that Slurm's programs speak to this lab."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def up(self, nodes: int = 4, *, accounting: bool = True, cpus: int = 4, memory_mb: int = 6000,
           requeue: bool = True) -> None:
        """Start the lab and return when every node is idle; one that does not come up is tried once more.

        requeue=False: a site that lets no job be requeued.

        Raises:
            UserError: programs are missing, the folder does not do, or it did not come up; with the ends of its logs.
        """
        if missing := missing_programs(accounting):
            raise UserError(f"Slurm is not (all) here: no {', '.join(missing)}. On Debian or Ubuntu "
                            f"`python -m tools.slurm_lab install` brings it, as root.")
        if self.is_up:
            raise UserError(f"The lab in {self.folder} is running already.")
        check_folder(self.folder)
        self.down()
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(f"{self.folder} holds something that is not a Slurm lab; choose another with --folder.")
        settings = LabSettings(str(self.folder), nodes, cpus, memory_mb, accounting, requeue)
        try:
            return self._bring_up(settings)
        except UserError as first:
            print(f"{str(first).partition(chr(10))[0]} Trying once more.", file=sys.stderr, flush=True)
        self.down()
        self._bring_up(settings)

    def _bring_up(self, settings: LabSettings) -> None:
        with free_ports(settings.nodes + 2) as port:
            try:
                self._write(replace(settings, port=port))
                self._start_munge()
                if settings.accounting:
                    self._make_database()
                    self.start_accounting()
                self._start_controller()
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
        grace_s = 5.0 if keep else 0.0
        names = self.daemons.names()
        for prefix in ("slurmd-", "slurmctld", "slurmdbd", "mariadbd", "munged"):
            for name in names:
                if name.startswith(prefix):
                    self.daemons.stop(name, grace_s)
            if prefix == "slurmd-":
                self.daemons.kill_jobs(self.nodes)
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.rmtree(self.folder, ignore_errors=True) if self.folder.exists() else None

    def kill_node(self, node: str, told: bool = True) -> None:
        """The node loses power: its daemon, and everything that runs on it, is gone at once.

        told: the controller hears of it at once, as from a site's health check; else it finds out by itself, after
        SlurmdTimeout.
        """
        self._check(node)
        self.daemons.stop(f"slurmd-{node}")
        self.daemons.kill_jobs([node])
        if told:
            self.tell_of_loss(node)

    def tell_of_loss(self, node: str) -> None:
        """Have the controller, if there is one, take a node for lost without waiting for SlurmdTimeout."""
        if self.daemons.running("slurmctld") is not None:
            self._ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def start_node(self, node: str) -> None:
        """The node comes back; returns when the controller will give it jobs."""
        self._check(node)
        if self.daemons.running(f"slurmd-{node}") is None:
            self._start_slurmd(node)
        port = self.settings.port + 2 + self.nodes.index(node)
        self._wait(f"{node} listening", lambda: is_open(port))
        if self.daemons.running("slurmctld") is None or self._until(lambda: self._is_usable(node), 5.0):
            return

        self._run("scontrol", "update", f"NodeName={node}", "State=RESUME")  # refused where it needs none
        self._wait(f"{node} usable", lambda: self._is_usable(node))

    def _is_usable(self, node: str) -> bool:
        return self.node_states().get(node) in USABLE

    def stop_controller(self) -> None:
        """slurmctld ends in good order: jobs go on, and no command of Slurm's is answered."""
        self.daemons.stop("slurmctld", grace_s=PATIENCE_S)

    def start_controller(self) -> None:
        """slurmctld takes over what the last one left; returns when it has heard from every living node."""
        self._start_controller()
        living = [node for node in self.nodes if self.daemons.running(f"slurmd-{node}")]
        self._wait("slurmctld answering", lambda: all(
            not state.endswith("*") and state not in ("unknown", "down") for state in self.states_of(living)))

    def restart_controller(self) -> None:
        """slurmctld goes and comes."""
        self.stop_controller()
        self.start_controller()

    def stop_accounting(self) -> None:
        """sacct is no longer answered; everything else is."""
        self.daemons.stop("slurmdbd", grace_s=PATIENCE_S)
        self.daemons.stop("mariadbd", grace_s=PATIENCE_S)

    def start_accounting(self) -> None:
        """sacct is answered (again); does nothing in a lab without accounting."""
        data, settings = self.folder / "database", self.settings
        if not settings.accounting or self.daemons.running("slurmdbd") is not None:
            return
        self._start("mariadbd", "mariadbd", "--no-defaults", *_as_user(), f"--datadir={data}",
                    f"--socket={data}/socket", f"--pid-file={data}/pid", "--skip-networking",
                    "--innodb-flush-log-at-trx-commit=0")
        self._wait("mariadbd", lambda: is_open(data / "socket"))
        self._start("slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=f"{data}/socket")
        self._wait("slurmdbd listening", lambda: is_open(settings.port + 1))
        ask = ["sacct"] if self.daemons.running("slurmctld") else ["sacctmgr", "--immediate", "add", "cluster", "lab"]
        self._wait("slurmdbd", lambda: self._run(*ask).returncode == 0)

    def node_states(self) -> dict[str, str]:
        """The state of each node as sinfo says it, such as idle, mixed, allocated*, down*; empty if nobody answers."""
        answer = self._run("sinfo", "--noheader", "--Node", "--format=%N %T")
        return dict(line.split() for line in answer.stdout.splitlines()) if answer.returncode == 0 else {}

    def states_of(self, nodes: list[str]) -> list[str]:
        """The states of some nodes; unknown where nobody answers."""
        states = self.node_states()
        return [states.get(node, "unknown") for node in nodes] if nodes else ["up"] if states else ["unknown"]

    def _write(self, settings: LabSettings) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        for name in ("pids", "log", "state"):
            (self.folder / name).mkdir()
        for number in range(1, settings.nodes + 1):
            (self.folder / "spool" / f"n{number}").mkdir(parents=True)
        (self.folder / "lab.json").write_text(json.dumps(asdict(settings)))
        (self.folder / "slurm.conf").write_text(settings.slurm_conf())
        if settings.accounting:
            (self.folder / "slurmdbd.conf").touch(0o600)
            (self.folder / "slurmdbd.conf").write_text(settings.slurmdbd_conf())
        if not settings.requeue:
            (self.folder / "job_submit.lua").write_text(NO_REQUEUE)
        (self.folder / "slurmstepd").write_text(STEP_DAEMON.format(
            python=shlex.quote(sys.executable), program=shlex.quote(str(_which("slurmstepd")))))
        (self.folder / "slurmstepd").chmod(0o755)
        (self.folder / "munge.key").touch(0o600)
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))

    def _start_munge(self) -> None:
        paths = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munge.seed",
                 "log-file": "log/munged.log"}
        self._start("munged", "munged", "--foreground", "--force",  # --force: whatever the rights of the folders above
                    *(f"--{option}={self.folder / path}" for option, path in paths.items()))
        self._wait("munged", lambda: (self.folder / "munge.sock").exists())

    def _make_database(self) -> None:
        data = self.folder / "database"
        data.mkdir(mode=0o700)
        self._ask("mariadb-install-db", "--no-defaults", *_as_user(), f"--datadir={data}", "--skip-test-db",
                  "--auth-root-authentication-method=normal")

    def _start_controller(self) -> None:
        if self.daemons.running("slurmctld") is None:
            self._start("slurmctld", "slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))

    def _start_slurmd(self, node: str) -> None:
        self._start(f"slurmd-{node}", "slurmd", "-D", "-f", str(self.folder / "slurm.conf"), "-N", node,
                    "-d", str(self.folder / "slurmstepd"))

    def _start(self, daemon: str, program: str, *arguments: str, **variables: str) -> None:
        self.daemons.start(daemon, [str(_which(program)), *arguments], {**self._environment(), **variables})

    def _environment(self) -> dict[str, str]:
        """Ours without the traces of a job that we may be part of."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        return {**kept, **self.environment()}

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(_which(program)), *arguments]
        try:
            return subprocess.run(command, env=self._environment(), text=True, stdin=subprocess.DEVNULL,
                                  capture_output=True, timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"no answer in {PATIENCE_S:.0f} s")

    def _ask(self, program: str, *arguments: str) -> None:
        answer = self._run(program, *arguments)
        if answer.returncode != 0:
            raise UserError(f"{program} {shlex.join(arguments)} failed: {(answer.stderr or answer.stdout).strip()}"
                            f"{self.log_ends()}")

    def _check(self, node: str) -> None:
        if node not in self.nodes:
            raise UserError(f"The lab has no node {node}; it has {', '.join(self.nodes)}.")

    def _until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while not (met := condition()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return met

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for something that daemons bring about, but not when one of them has died meanwhile."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            dead = [name for name in self.daemons.names() if self.daemons.running(name) is None]
            if dead or time.monotonic() > deadline:
                why = f"{' and '.join(dead)} died" if dead else f"not so after {PATIENCE_S:.0f} s"
                raise UserError(f"The Slurm lab waited for {what}: {why}. Its logs are in {self.folder}/log."
                                f"{self.log_ends()}")
            time.sleep(0.05)

    def log_ends(self) -> str:
        """The last lines of what each daemon said, or logged where it says nothing, for the account of a failure."""
        said = {path.stem: path for ending in ("log", "out")
                for path in sorted((self.folder / "log").glob(f"*.{ending}")) if path.stat().st_size}
        return "".join(f"\n==> {name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-TAIL:])
                       for name, path in said.items())


def install() -> None:
    """Install the packages as root, else say how.

    Raises:
        UserError: not root, no apt-get, or it failed.
    """
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *PACKAGES]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise UserError(f"Installing needs root on Debian or Ubuntu: sudo {shlex.join(command)}")
    for step in (["apt-get", "update"], command):
        if subprocess.run(step, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, stdout=sys.stderr).returncode:
            raise UserError(f"`{shlex.join(step)}` failed; its words are above.")


def _as_user() -> list[str]:
    """MariaDB's programs refuse to be root's unless told to."""
    return ["--user=root"] if os.geteuid() == 0 else []


def _which(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.slurm_lab", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="the Debian packages (root)")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--folder", type=Path, default=default_folder(), help="where it lives (%(default)s)")
    up = commands.add_parser("up", parents=[shared], help="start; prints the line for eval")
    up.add_argument("nodes", type=int, nargs="?", default=4)
    up.add_argument("--no-accounting", action="store_true", help="no slurmdbd: sacct is not answered")
    up.add_argument("--no-requeue", action="store_true", help="a site that lets no job be requeued")
    up.add_argument("--cpus", type=int, default=4, help="of each node; the machine may have fewer (%(default)s)")
    up.add_argument("--mem", type=int, default=6000, help="MB of each node; not enforced (%(default)s)")
    for name, text in [("kill-node", "a node loses power"), ("start-node", "it comes back")]:
        commands.add_parser(name, parents=[shared], help=text).add_argument("node")
    for name, text in [("status", "daemons, nodes and jobs"), ("restart-controller", "stop and start slurmctld"),
                       ("stop-controller", "no command is answered"), ("start-controller", "answered again"),
                       ("stop-accounting", "sacct stops answering"), ("start-accounting", "answers again")]:
        commands.add_parser(name, parents=[shared], help=text)
    down = commands.add_parser("down", parents=[shared], help="stop everything that `up` started")
    down.add_argument("--keep", action="store_true", help="leave the folder, for its logs")
    return parser


def _up(lab: Lab, options: argparse.Namespace) -> None:
    if lab.is_up:
        print(f"The lab in {lab.folder} is running already, with {len(lab.nodes)} nodes.", file=sys.stderr)
    else:
        begun = time.monotonic()
        lab.up(options.nodes, accounting=not options.no_accounting, cpus=options.cpus, memory_mb=options.mem,
               requeue=not options.no_requeue)
        print(f"{options.nodes} nodes in {time.monotonic() - begun:.1f} s; folder {lab.folder}", file=sys.stderr)
    for name, value in lab.environment().items():
        print(f"export {name}={shlex.quote(value)}")


def _status(lab: Lab) -> None:
    settings = lab.settings
    for name in lab.daemons.names():
        print(f"{name:<14} {lab.daemons.running(name) or 'dead'}")
    states = lab.node_states()
    print("\n".join(f"{node:<14} {states.get(node, 'no answer')}, {settings.cpus} CPUs" for node in lab.nodes))
    print(lab._run("squeue").stdout, end="")


def main(arguments: list[str] | None = None) -> int:
    """The command line: 0, or 2 with a sentence."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "install":
            install()
            return 0
        lab = Lab(options.folder)
        node = getattr(options, "node", "")
        actions: dict[str, Callable[[], None]] = {
            "up": lambda: _up(lab, options), "status": lambda: _status(lab),
            "kill-node": lambda: lab.kill_node(node), "start-node": lambda: lab.start_node(node),
            "restart-controller": lab.restart_controller, "stop-controller": lab.stop_controller,
            "start-controller": lab.start_controller, "stop-accounting": lab.stop_accounting,
            "start-accounting": lab.start_accounting,
            "down": lambda: lab.down(keep=getattr(options, "keep", False))}
        actions[options.command]()
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
