"""What a job's script starts, in the batch step on the first node: the runner. If something kills the runner, the job
is queued again, where that is allowed.

    python -m drover.launch.job SPEC.json

A system that is out of memory kills processes. The runner's ranks end with it; this process needs next to nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Run the runner with these arguments; its exit status, as a shell gives it."""
    stopped: list[int] = []
    # Slurm sends signals to all processes of the step: the runner acts on them. A handler is not inherited.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    status = subprocess.run([sys.executable, "-m", "drover.launch.job.runner", *arguments]).returncode
    if status == -signal.SIGKILL and not stopped:
        _queue_again(Path(arguments[0]))
    return status if status >= 0 else 128 - status


def _queue_again(path: Path) -> None:
    """Record that the runner was killed, for the next start, which counts such ends; queue this job, or this element of
    an array, again."""
    from drover.launch.job.runner import CONTROLLER_S
    from drover.launch.job.spec import JobSpec
    from drover.launch.job.srun import SlurmHost
    from drover.launch.slurm.scheduler import Scheduler
    from drover.pipeline.contract.state import KILLED, log_attempt

    spec = JobSpec.load(path)
    if not spec.requeue:
        print("the runner was killed (out of memory, perhaps), and jobs may not requeue themselves here", flush=True)
        return
    scheduler = Scheduler()
    here = SlurmHost.from_environment(os.environ, scheduler, [])
    print("the runner was killed (out of memory, perhaps): queueing the job again", flush=True)
    try:
        log_attempt(Path(spec.run), KILLED, job=here.name, stage=spec.stage, chain=spec.chain, restart=here.restart,
                    start=0)
    except OSError as error:  # the next start then counts this one as ended from outside
        print(f"that the runner was killed could not be recorded: {error}", flush=True)
    if refusal := scheduler.requeue(here.name, patience_s=CONTROLLER_S):
        print(f"Slurm did not queue it again ({refusal}). Submit the same command again.", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
