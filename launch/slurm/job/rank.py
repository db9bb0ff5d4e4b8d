"""What every task of a step runs first: it makes its process a rank of torch.distributed, and becomes the stage.

    python -m drover.launch.slurm.job.rank STAGE COMMAND...

`srun` starts it once per rank, without Slurm `drover.launch.on_host`, and it is gone a moment later: no signal has to
pass through it, and the exit status is the stage's own. It imports nothing heavy.
"""

from __future__ import annotations

import os
import platform
import signal
import sys

from drover.launch.devices import visible_gpus
from drover.launch.processes import Environment, end_with_parent
from drover.launch.slurm.trust import node_folder, private_folder
from drover.pipeline.core.errors import UserError

ASKING = (signal.SIGUSR1, signal.SIGUSR2)
"""Slurm's word that the time limit is near goes to all processes of a step; without a handler they would die of it."""
ENDING = (signal.SIGTERM, signal.SIGINT)
PREFLIGHT = "preflight"
"""In place of a stage's name: the trial of the nodes, which itself says what they lack."""
SAVES = ("train",)
"""Stages that catch every signal to stop, once they are ready, and unblock it then: those with checkpoints. Spelt here,
since every rank of a step begins with this module, and nothing heavy may be imported on the way."""
NAMES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID",
         "GROUP_RANK": "SLURM_NODEID", "MASTER_ADDR": "MASTER_ADDR", "MASTER_PORT": "MASTER_PORT"}
"""What torch.distributed reads, and which variable of a task of a step has it."""


def rank_environment(given: Environment, stage: str = "") -> dict[str, str]:
    """What torch.distributed reads, from what Slurm sets in each task of a step; the rest comes from the runner. On
    hosts without Slurm all of it is there already. Nothing for a stage without ranks.

    Raises:
        UserError: the step has not the ranks, or the node not the GPUs, that were planned.
    """
    if not (planned := int(given.get("DROVER_RANKS") or 0)):
        return {}
    node, found = given.get("SLURMD_NODENAME", "this node"), dict[str, str]()
    if "SLURM_PROCID" in given:
        world = int(given["SLURM_NTASKS"])
        nodes = int(given.get("SLURM_STEP_NUM_NODES") or given.get("SLURM_JOB_NUM_NODES") or 1)
        if world != planned:
            raise UserError(f"Slurm started {world} ranks, but {planned} were planned. Submit the run again.")
        found = {"LOCAL_WORLD_SIZE": str(world // nodes), **{name: given[theirs] for name, theirs in NAMES.items()}}
    gpus = int(given.get("DROVER_GPUS") or 0)
    if gpus and stage != PREFLIGHT and (seen := visible_gpus(given)) < gpus:
        raise UserError(f"{node} shows {seen} GPUs to this job, but {gpus} per node were asked for. Look at the node "
                        f"(`nvidia-smi`; with Slurm `scontrol show node {node}`), leave it out (launch.exclude={node}, "
                        f"or without Slurm --hosts), or ask for fewer.")
    return found


def defaults(environment: Environment) -> dict[str, str]:
    """Variables of torch and NCCL that are set where nobody set them: a record of the last collectives, which shows
    what hung, and folders for compilers, in one that is this user's alone.

    Raises:
        UserError: somebody else made that folder, or could write into it.
    """
    caches, node = node_folder(), environment.get("SLURMD_NODENAME", platform.node())
    # Of its own for every rank: compilers of several ranks wrote into one another's files on shared homes.
    folders = {"TRITON_CACHE_DIR": str(caches / f"triton-{node}-{environment['LOCAL_RANK']}"),
               "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    wanted = {"TORCH_FR_BUFFER_SIZE": "2000", "NCCL_DEBUG": "WARN", **folders}
    found = {name: value for name, value in wanted.items() if name not in environment}
    if inside := [name for name in folders if name in found]:
        try:
            private_folder(caches)
        except OSError as error:
            raise UserError(f"{error} (on {node}). Remove it there (`rm -r {caches}`), or set {' and '.join(inside)} "
                            f"in launch.environment to folders that only you can write.") from None
    return found


def main(stage: str, *command: str) -> int:
    """Become the command; an exit status only if that cannot be."""
    # A killed slurmstepd leaves its tasks running: they would write into the run beside those of the next start.
    end_with_parent(os.getppid())
    try:
        environment = {**os.environ, **rank_environment(os.environ, stage)}
        if "RANK" in environment:
            environment |= defaults(environment)
        # What would end the stage before its handlers stand. The mask survives exec; the stage unblocks.
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKING + (ENDING if stage in SAVES else ()))
        os.dup2(sys.stdout.fileno(), sys.stderr.fileno())  # through one pipe, so in order
        os.execvpe(command[0], command, environment)
    except UserError as error:
        rank = os.environ.get("SLURM_PROCID") or os.environ.get("RANK", "?")
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}.", file=sys.stderr, flush=True)
    return UserError.exit_status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
