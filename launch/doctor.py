"""Ask a Slurm site what Drover needs to know, and write a profile to start from. Nothing is queued.

    drover doctor
    drover doctor --write configs/clusters/mine.yaml
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

from drover.launch.slurm.scheduler import NodeKind, Scheduler, seconds
from drover.pipeline.config.launching import LaunchConfig
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.console import Parser, Program, echo
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import write_text


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("--write", metavar="FILE", help="write a profile")


def work(options: argparse.Namespace) -> int:
    """Ask, print, write; the exit status."""
    if options.write and Path(options.write).exists():
        raise UserError(f"{options.write} exists already. Give another name, or remove it.")
    if shutil.which("sbatch") is None:
        raise UserError("There is no sbatch on PATH, so this is not a login node of a Slurm cluster. Log in to one, "
                        "load Slurm's module, or start a Slurm on this machine (docs/slurm.md).")
    scheduler = Scheduler()
    kinds = scheduler.node_kinds()
    if not kinds:
        raise UserError("sinfo shows no partition. Look at `sinfo`: the controller may be down.")
    settings = scheduler.site_settings()
    echo(f"Slurm {settings.get('SLURM_VERSION', 'unknown')}, MaxArraySize {settings.get('MaxArraySize', 'unknown')}",
         *map(str, kinds))
    if options.write:
        write_text(Path(options.write), profile(kinds, requeue=settings.get("JobRequeue") != "0"))
        echo(f"\nwrote {options.write}; use it with --cluster {options.write}")
    return 0


def profile(kinds: Sequence[NodeKind], *, requeue: bool) -> str:
    """A profile of these partitions, in YAML. kinds: at least one. requeue: whether the site allows it."""
    gpu = max(kinds, key=lambda kind: (kind.gpus, kind.usual, kind.nodes))
    cpu = next((kind for kind in kinds if not kind.gpus), None)
    cores = gpu.cpus // gpu.gpus if gpu.gpus else min(4, gpu.cpus) // 2
    ranks = "one for each GPU" if gpu.gpus else "as many as launch.processes says, 2 in the demo"
    lines = ["# Written by `drover doctor`. Review it, and add account, modules and time limits.",
             f"partition: {gpu.partition}", f"gpus_per_node: {gpu.gpus}",
             f"cpus: {max(1, cores)}  # of {gpu.cpus} cores a node, for each rank: {ranks}",
             'train: {mem: "0"}  # all memory of a node', 'evaluate: {mem: "0"}',
             "# mem: 32G  # of the other stages; without it what the site gives by default",
             "# account: my-project", "# setup: [module load cuda]",
             "# container: {image: /shared/images/drover.sif}", f"requeue: {str(requeue).lower()}"]
    if seconds(gpu.longest, inf) < 60 * LaunchConfig().time:
        lines.append(f"time: {gpu.longest}  # the partition allows no more")
    if gpu.gpus and cpu is not None:
        lines += [f"{stage}: {{partition: {cpu.partition}}}" for stage, its in STAGES.items() if not its.ranks]
    return "\n".join(lines) + "\n"


main = Program("python -m drover.launch.doctor", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
