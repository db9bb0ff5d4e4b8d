"""What a Slurm lab consists of: its settings, its ports, and the configuration files that follow from them."""

from __future__ import annotations

import os
import pwd
import random
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UserError

PORTS = range(10000, 20000, 64)
"""Where labs find their blocks: below the ports that the kernel hands out and those that training ranks meet at."""
LONGEST_FOLDER = 108 - len("/spool/n99/n99_1234567.4294967291") - 1
"""The path of a local socket has room for 108 characters, its end included; Slurm's longest is that of a step."""


@dataclass(frozen=True)
class LabSettings:
    """A lab as it was asked for. Ports from `port` on: the controller, the accounting daemon, the nodes."""

    folder: str
    nodes: int
    cpus: int
    memory_mb: int
    accounting: bool
    requeue: bool
    port: int = 0

    def slurm_conf(self) -> str:
        """The text of slurm.conf."""
        user, host = user_name(), socket.gethostname().split(".")[0]
        lines = [
            "ClusterName=lab", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmUser={user}", f"SlurmdUser={user}",
            # A requeued job is held back until its old credential has expired: 120 s if this were left out.
            "AuthType=auth/munge", "CredType=cred/munge", f"AuthInfo=socket={self.folder}/munge.sock,cred_expire=5",
            f"SlurmctldPort={self.port}", f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid", f"SlurmdSpoolDir={self.folder}/spool/%n",
            f"StateSaveLocation={self.folder}/state",
            f"SlurmctldLogFile={self.folder}/log/slurmctld.log", f"SlurmdLogFile={self.folder}/log/slurmd-%n.log",
            # No control groups, no systemd, no MPI: a container without rights has to do.
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none",
            "MpiDefault=none", "MailProg=/bin/true",
            # The nodes have more CPUs and memory together than the machine.
            "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "SlurmdParameters=config_overrides",
            # Quick decisions: tests wait for them.
            "SchedulerType=sched/backfill",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1",
            # But patience with whatever is only slow: these decide only where something is gone for good.
            "SlurmdTimeout=60", "KillWait=30", "ReturnToService=2",
            # An srun that looks for a controller that is away in vain gives up after a few of these.
            "MessageTimeout=5", "TCPTimeout=1",
            "InactiveLimit=0", "MinJobAge=600", "JobRequeue=1", "MaxJobCount=10000",
            f"NodeName=n[1-{self.nodes}] NodeHostname={host} NodeAddr=127.0.0.1 "
            f"Port=[{self.port + 2}-{self.port + 1 + self.nodes}] CPUs={self.cpus} RealMemory={self.memory_mb} "
            "State=UNKNOWN",
            "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        ]
        if self.nodes == 1:  # Slurm takes no range of one
            lines[-2] = lines[-2].replace("n[1-1]", "n1").replace(f"[{self.port + 2}-{self.port + 2}]",
                                                                  str(self.port + 2))
        if self.accounting:
            lines += ["AccountingStorageType=accounting_storage/slurmdbd", "AccountingStorageHost=127.0.0.1",
                      f"AccountingStoragePort={self.port + 1}", f"AccountingStoragePass={self.folder}/munge.sock"]
        if not self.requeue:
            lines += ["JobSubmitPlugins=lua"]
        return "\n".join(lines) + "\n"

    def slurmdbd_conf(self) -> str:
        """The text of slurmdbd.conf. The database listens on a socket only, in a folder closed to others."""
        return "\n".join([
            "AuthType=auth/munge", f"AuthInfo=socket={self.folder}/munge.sock", "DbdHost=localhost",
            "DbdAddr=127.0.0.1", f"DbdPort={self.port + 1}", f"SlurmUser={user_name()}",
            "StorageType=accounting_storage/mysql", "StorageHost=localhost", "StorageUser=root",
            "StorageLoc=slurm_accounting", f"LogFile={self.folder}/log/slurmdbd.log",
            f"PidFile={self.folder}/slurmdbd.pid"]) + "\n"


NO_REQUEUE = """\
-- A site where no job may be requeued, whatever it asks for: slurm.conf's JobRequeue is only a default.
function slurm_job_submit(job, partitions, user)
  job.requeue = 0
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, user)
  return slurm.SUCCESS
end
"""


STEP_DAEMON = """\
#!/bin/sh
# Becomes Slurm's step daemon as a sub-reaper (prctl 36): it then inherits, and finds to kill, what a task's death
# leaves behind. On a real cluster control groups see to that; without them such a process keeps a job COMPLETING.
exec {python} -I -S -c 'import ctypes, os, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
os.execv(sys.argv[1], ["slurmstepd", *sys.argv[2:]])' {program} "$@"
"""


def check_folder(folder: Path) -> None:
    """Whether Slurm can live in a folder of this name.

    Raises:
        UserError: it cannot; says why.
    """
    if not re.fullmatch(r"[A-Za-z0-9._/+@~-]+", str(folder)):
        raise UserError(f"slurm.conf cannot hold the path {folder}: choose a folder of letters, digits and ._+@~- "
                        f"with --folder.")
    if len(str(folder)) > LONGEST_FOLDER:
        raise UserError(f"The path {folder} has {len(str(folder))} characters; the sockets that Slurm makes inside "
                        f"leave room for {LONGEST_FOLDER}. Choose a shorter one with --folder, such as /tmp/lab.")


@contextmanager
def free_ports(count: int) -> Iterator[int]:
    """The first of `count` ports in a row that nobody listens at. No other lab gets them while the block lasts.

    Raises:
        UserError: no such block is left.
    """
    blocks = list(PORTS)
    random.SystemRandom().shuffle(blocks)
    for first in blocks:
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0slurm_lab:{first}")  # a name without a file: it goes with this process
            except OSError:
                continue
            if all(_is_free(port) for port in range(first, first + count)):
                yield first
                return
    raise UserError(f"There are no {count} free ports in a row between {PORTS.start} and {PORTS.stop}.")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def is_open(place: int | Path) -> bool:
    """Whether something listens at a port, or a local socket, of this machine."""
    local = isinstance(place, Path)
    with socket.socket(socket.AF_UNIX if local else socket.AF_INET) as probe:
        probe.settimeout(10.0)
        return probe.connect_ex(str(place) if local else ("127.0.0.1", place)) == 0


def user_name() -> str:
    """The user whose processes these are."""
    return pwd.getpwuid(os.geteuid()).pw_name


def default_folder() -> Path:
    """Where a lab lives unless told otherwise."""
    return Path(os.environ.get("TMPDIR", "/tmp")) / f"slurm_lab-{user_name()}"
