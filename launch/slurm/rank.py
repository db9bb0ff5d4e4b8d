"""What a task of a Slurm job runs: it prepares its process and becomes the stage."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

PORTS = range(20000, 30000)
"""Below the ports that the kernel hands out by itself (32768 and up)."""


@dataclass(frozen=True)
class RunStage:
    """A stage in a Slurm task. submitit pickles it; calling it replaces the process by the stage.

    Nothing of submitit stays: signals reach the stage itself, and the exit status is its own.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    ranks: bool

    def __call__(self) -> None:
        """Become the stage; does not return."""
        environment = {**self.environment, **os.environ}
        command = list(self.command)
        if self.ranks:
            environment.update(rank_environment(os.environ))
        if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and "--force" in command:
            command.remove("--force")  # a requeued job continues its own work instead of throwing it away
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvpe(command[0], command, environment)


def rank_environment(slurm: Mapping[str, str]) -> dict[str, str]:
    """What torch.distributed reads, from what Slurm sets in each task of a step."""
    from submitit.slurm.slurm import _parse_node_list

    return {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(int(slurm["SLURM_NTASKS"]) // int(slurm["SLURM_JOB_NUM_NODES"])),
        "GROUP_RANK": slurm["SLURM_NODEID"],
        "MASTER_ADDR": _parse_node_list(slurm["SLURM_JOB_NODELIST"])[0],
        "MASTER_PORT": str(PORTS[int(slurm["SLURM_JOB_ID"]) % len(PORTS)]),
    }
