"""What every task of a step runs first: it makes its process a rank of torch.distributed, and becomes the stage.

    python -m launch.slurm.job.rank [--stage NAME] -- command...

`srun` starts it once per rank, and it is gone a moment later: no signal has to pass through it, and the exit status is
the stage's own. It imports nothing heavy. `RunJob` is what submitit is given for the job itself.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.processes import end_with_parent
from launch.slurm.trust import private_folder
from pipeline.errors import UserError

ASKING = (signal.SIGUSR1, signal.SIGUSR2)
"""Slurm's word that the time limit is near goes to all processes of a step; without a handler they would die of it."""
ENDING = (signal.SIGTERM, signal.SIGINT)
SAVES = ("train",)
"""Stages that catch every signal to stop, once they are ready, and unblock it then: those with checkpoints. Spelt here,
since every rank of a step begins with this module, and nothing heavy may be imported on the way."""


@dataclass(frozen=True)
class RunJob:
    """A job. submitit pickles it by its name; calling it replaces the process by the runner of the job's spec."""

    spec: str
    python: str

    def __call__(self) -> None:
        """Become the runner; does not return."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvp(self.python, [self.python, "-m", "launch.slurm.job.runner", self.spec])


def rank_environment(slurm: Mapping[str, str]) -> dict[str, str]:
    """What torch.distributed reads, from what Slurm sets in each task of a step; the rest comes from the runner.

    Raises:
        UserError: the step has not the ranks, or the node not the GPUs, that were planned.
    """
    for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "MASTER_ADDR", "MASTER_PORT"):
        if name not in slurm:
            raise UserError(f"{name} is not set: launch.slurm.job.rank is started by srun, from the runner.")
    world, node = int(slurm["SLURM_NTASKS"]), slurm.get("SLURMD_NODENAME", "this node")
    nodes = int(slurm.get("SLURM_STEP_NUM_NODES") or slurm.get("SLURM_JOB_NUM_NODES") or 1)
    planned, gpus = int(slurm.get("DROVER_RANKS") or world), int(slurm.get("DROVER_GPUS") or 0)
    if world != planned:
        raise UserError(f"Slurm started {world} ranks, but {planned} were planned. Submit the run again.")
    if gpus and (found := visible_gpus(slurm)) < gpus:
        raise UserError(f"{node} shows {found} GPUs to this job, but {gpus} per node were asked for. Look at "
                        f"`scontrol show node {node}`, leave the node out (launch.exclude={node}), or ask for fewer.")
    return {"RANK": slurm["SLURM_PROCID"], "WORLD_SIZE": str(world), "LOCAL_RANK": slurm["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(world // nodes), "GROUP_RANK": slurm["SLURM_NODEID"],
            "MASTER_ADDR": slurm["MASTER_ADDR"], "MASTER_PORT": slurm["MASTER_PORT"]}


def visible_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs that this process may use, without asking a driver."""
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
    return sum(path.name.removeprefix("nvidia").isdigit() for path in devices.glob("nvidia[0-9]*"))


def defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables of torch and NCCL that are set where nobody set them: a record of the last collectives, which
    shows what hung, and folders for compilers."""
    node = environment.get("SLURMD_NODENAME", "node")
    caches = caches_folder()
    triton = caches / f"triton-{node}-{environment['SLURM_LOCALID']}"
    wanted = {"TORCH_FR_BUFFER_SIZE": "2000", "NCCL_DEBUG": "WARN",
              # Of its own for every rank: compilers of several ranks wrote into one another's files on shared homes.
              "TRITON_CACHE_DIR": str(triton), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    return {name: value for name, value in wanted.items() if name not in environment}


def caches_folder() -> Path:
    """Where compilers keep what they made, on this node: they run it again."""
    return Path(tempfile.gettempdir()) / f"drover-{os.getuid()}"


def make_caches(environment: Mapping[str, str]) -> None:
    """Make the folder of the caches, for this user alone, if `defaults` has put one there.

    Raises:
        UserError: somebody else made it, or could write into it.
    """
    caches = caches_folder()
    inside = [name for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
              if caches in Path(environment.get(name, "")).parents]
    if not inside:
        return
    try:
        private_folder(caches)
    except OSError as error:
        node = environment.get("SLURMD_NODENAME", platform.node())
        raise UserError(f"{error} (on {node}). Remove it there (`rm -r {caches}`), or set {' and '.join(inside)} in "
                        f"launch.environment to folders that only you can write.") from None


def block_signals(stage: str) -> None:
    """Block what would end the stage before its handlers stand. The mask survives exec; the stage unblocks."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING + (ENDING if stage in SAVES else ()))


def main(arguments: list[str]) -> int:
    """Become the command; an exit status only if that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m launch.slurm.job.rank")
    parser.add_argument("--stage", default="", help="what the command is; train catches signals itself, later")
    own, command = arguments[:arguments.index("--")], arguments[arguments.index("--") + 1:]
    options = parser.parse_args(own)
    # A killed slurmstepd leaves its tasks running: they would write into the run beside those of the next start.
    end_with_parent(signal.SIGKILL, os.getppid())
    try:
        environment = {**os.environ, **rank_environment(os.environ), **defaults(os.environ)}
        make_caches(environment)
        block_signals(options.stage)
        os.dup2(sys.stdout.fileno(), sys.stderr.fileno())  # through one pipe, so in order
        os.execvpe(command[0], command, environment)
    except UserError as error:
        print(f"rank {os.environ.get('SLURM_PROCID', '?')}: {error}", file=sys.stderr, flush=True)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}.", file=sys.stderr, flush=True)
    return UserError.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
