"""The program of `drover doctor` on a cluster's nodes: one task per node, which prints its findings as a line of JSON.

    srun --ntasks-per-node=1 ... python -m drover.launch.slurm.job.site_trial FOLDER SECONDS
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from drover.launch.devices import smi, visible_gpus
from drover.launch.slurm.job.node_trial import Report, check_node, measure, send
from drover.pipeline.contract.locks import lock
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import write_text

POLL_S = 0.01
LOCK = "trial"
"""Name of the lock that the first node holds."""
RUNTIMES = ("apptainer", "singularity", "podman", "enroot")


@dataclass
class NodeFacts(Report):
    """A preflight's report of one node, and more about the node.

    Attributes:
        import_s: seconds to import torch; `torch`: its version. Without torch None and "".
        gpus: number that the task may use; `gpu`: name of the first, empty if the driver does not answer.
        visible_s: seconds from the renaming of a file on the first node until it was seen here; None on the first node.
            It includes the difference of the clocks, which `clock_at` shows.
        locked_out: whether this node could not take a lock that the first node held.
    """

    python: str = platform.python_version()
    torch: str = ""
    import_s: float | None = None
    cpus: int = 0
    gpus: int = 0
    gpu: str = ""
    runtimes: list[str] = field(default_factory=list)
    visible_s: float | None = None
    locked_out: bool | None = None


def try_site(folder: Path, limit_s: float) -> None:
    """Do this task's part and print it."""
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    facts = NodeFacts(rank, os.environ.get("SLURMD_NODENAME") or platform.node())
    facts.cpus, facts.gpus = os.cpu_count() or 0, visible_gpus(os.environ)
    if facts.gpus:
        facts.gpu = next(iter(smi("--query-gpu=name") or [[""]]))[0]
    facts.runtimes = [name for name in RUNTIMES if shutil.which(name)]
    facts.problems = check_node(folder, facts.gpus)
    began = time.monotonic()
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - any failure of the site's torch is a finding
        facts.problems["torch"] = f"torch cannot be imported: {type(error).__name__}: {error}"
    else:
        facts.torch, facts.import_s = torch.__version__, time.monotonic() - began
    if world > 1:
        share(folder, facts, world, limit_s)
    if facts.torch:
        exchange(facts, world, limit_s)
    print()  # after what torch may have printed
    send(facts)


def share(folder: Path, facts: NodeFacts, world: int, limit_s: float) -> None:
    """On the first node, rename a file and hold a lock; on the others, measure when the file appears, and try the lock.

    Every node looks for the file before it exists, to find file systems that cache missing names.
    """
    flag, until = folder / "flag", time.monotonic() + limit_s

    def waited(done: Callable[[], bool]) -> bool:
        while not done():
            if time.monotonic() > until:
                facts.problems["shared"] = f"files of other nodes did not appear in {folder} within {limit_s:.0f} s"
                return False
            time.sleep(POLL_S)
        return True

    if facts.rank == 0:
        if not waited(lambda: len(list(folder.glob("ready-*"))) == world - 1):
            return
        with lock(folder, LOCK):
            write_text(flag, repr(time.time()))
            waited(lambda: len(list(folder.glob("tried-*"))) == world - 1)
        return
    flag.exists()
    (folder / f"ready-{facts.rank}").touch()
    if waited(flag.exists):
        facts.visible_s = time.time() - float(flag.read_text())
        try:
            with lock(folder, LOCK):
                facts.locked_out = False
        except UserError:
            facts.locked_out = True
        (folder / f"tried-{facts.rank}").touch()


def exchange(facts: NodeFacts, world: int, limit_s: float) -> None:
    """Measure a product, exchanges between nodes and an all-reduce, as a preflight does."""
    os.environ |= {"RANK": str(facts.rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    try:
        measure(facts, limit_s, facts.gpus)
    except Exception as error:  # noqa: BLE001 - a failing network is a finding
        why = (str(error) or "?").splitlines()[0]
        facts.problems["network"] = f"an all-reduce failed: {type(error).__name__}: {why}"


if __name__ == "__main__":
    try_site(Path(sys.argv[1]), float(sys.argv[2]))
