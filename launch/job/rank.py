"""The first program of every task of a step: it makes its process a rank of torch.distributed, and becomes the stage.

    python -m drover.launch.job.rank STAGE RANKS GPUS COMMAND...

`srun` starts it once per rank. A moment later the stage has replaced it, so that no signal has to pass through it, and
the exit status is the stage's own. It imports nothing heavy.
"""

from __future__ import annotations

import os
import platform
import signal
import sys

from drover.launch.devices import has_one_of, masks_in, visible_gpus
from drover.launch.processes import Environment, end_with_parent
from drover.launch.slurm.trust import node_folder, private_folder
from drover.pipeline.core.console import echo
from drover.pipeline.core.errors import UserError

ASKING = (signal.SIGUSR1, signal.SIGUSR2)
"""Slurm signals all processes of a step when the time limit is near. Without a handler the signal would kill them."""
ENDING = (signal.SIGTERM, signal.SIGINT)
PREFLIGHT = "preflight"
"""In place of a stage's name: the preflight, which itself reports what the nodes lack."""
SAVES = ("train",)
"""Stages with checkpoints: once they are ready, they handle every signal to stop and unblock it. Named here, because
every rank of a step starts with this module, which must import nothing heavy."""
NAMES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID",
         "GROUP_RANK": "SLURM_NODEID", "MASTER_ADDR": "MASTER_ADDR", "MASTER_PORT": "MASTER_PORT"}
"""Variables that torch.distributed reads, and the variables of a step's task that have their values."""


def rank_environment(given: Environment, stage: str, planned: int, gpus: int) -> dict[str, str]:
    """Variables for torch.distributed, from those that Slurm sets in each task of a step; the runner sets the others.
    {} for a stage without ranks. A task that Slurm or the site gives one GPU of its node's has it as device 0, whatever
    its place on the node.

    planned: ranks of the step. gpus: of a node.

    Raises:
        UserError: the step has other ranks than planned, or the task sees neither one GPU nor all.
    """
    if not planned:
        return {}
    node, world = given.get("SLURMD_NODENAME", "this node"), int(given["SLURM_NTASKS"])
    nodes = int(given.get("SLURM_STEP_NUM_NODES") or given.get("SLURM_JOB_NUM_NODES") or 1)
    if world != planned:
        raise UserError(f"Slurm started {world} ranks, but {planned} were planned. Submit the run again.")
    variables = {"LOCAL_WORLD_SIZE": str(world // nodes), **{name: given[theirs] for name, theirs in NAMES.items()}}
    if has_one_of(gpus, given):
        return {**variables, "LOCAL_RANK": "0"}
    masks = masks_in(given)
    seen = visible_gpus(given) if gpus else 0
    if seen < gpus and (masks or stage != PREFLIGHT):
        raise UserError(f"{node} shows {seen} of {gpus} GPUs to this task ({masks or 'no variable hides any'}). A task "
                        f"needs one GPU of its own, or all of its node's. Look at what divides or hides them "
                        f"(gpus-per-task and gpu-bind in launch.extra and launch.srun_args, variables in "
                        f"launch.environment and launch.setup, a TaskProlog of the site), and at the node "
                        f"(`nvidia-smi`). Exclude it by launch.exclude={node}, or request fewer GPUs "
                        f"(launch.gpus_per_node).")
    return variables


def defaults(environment: Environment) -> dict[str, str]:
    """Variables of torch and NCCL that the user has not set: a record of the last collectives, which shows what hung,
    and folders for compilers, inside one that only this user can access.

    Raises:
        UserError: another user made that folder, or could write into it.
    """
    caches, node = node_folder(), environment.get("SLURMD_NODENAME", platform.node())
    # One for every rank: on shared homes, compilers of several ranks wrote into each other's files.
    local = environment.get("SLURM_LOCALID") or environment.get("LOCAL_RANK", "0")
    wanted = {"TORCH_FR_BUFFER_SIZE": "2000", "NCCL_DEBUG": "WARN",
              "TRITON_CACHE_DIR": str(caches / f"triton-{node}-{local}"),
              "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    missing = {name: value for name, value in wanted.items() if name not in environment}
    if str(caches) in str(missing):
        try:
            private_folder(caches)
        except OSError as error:
            raise UserError(f"{error} (on {node}). Remove it there (`rm -r {caches}`), or set TRITON_CACHE_DIR and "
                            f"TORCHINDUCTOR_CACHE_DIR in launch.environment to folders that only you can write."
                            ) from None
    return missing


def main(stage: str, ranks: str, gpus: str, *command: str) -> int:
    """Become the command; an exit status only if that fails. ranks: of the step. gpus: of a node."""
    # A killed slurmstepd leaves its tasks running. They would write into the run together with those of the next start.
    end_with_parent(os.getppid())
    try:
        environment = {**os.environ, **rank_environment(os.environ, stage, int(ranks), int(gpus))}
        if "RANK" in environment:
            environment |= defaults(environment)
        # These signals would end the stage before it has its handlers. The mask survives exec; the stage unblocks them.
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKING + (ENDING if stage in SAVES else ()))
        os.dup2(sys.stdout.fileno(), sys.stderr.fileno())  # one pipe keeps the order of lines
        os.execvpe(command[0], command, environment)
    except UserError as error:
        echo(f"error: {error}", file=sys.stderr)  # srun and the launcher put the rank before each line
    except OSError as error:
        echo(f"{command[0]} cannot be started: {error.strerror}.", file=sys.stderr)
    return UserError.exit_status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
