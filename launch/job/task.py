"""What submitit runs in a job of Slurm: the runner, once, in the batch step on the first node.

    python -m drover.launch.job.task RUN STAGE CHAIN

is what the job's script calls if something killed the runner, before it queues the job again. A system that is out of
memory kills processes. The runner's ranks end with it. The next start counts such ends.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from submitit import JobEnvironment
from submitit.helpers import Checkpointable

from drover.launch.job.host import JobSpec
from drover.launch.job.runner import Runner
from drover.launch.job.srun import SlurmHost
from drover.launch.processes import stop_requests
from drover.launch.slurm.scheduler import Scheduler
from drover.launch.slurm.trust import refuse_foreign_files
from drover.pipeline.contract.state import KILLED, log_attempt, this_start
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import sha256_file


@dataclass(frozen=True)
class StageTask(Checkpointable):
    """The callable of a job: plain data, so that its pickle holds the names of two classes, and values.

    Submitit's handler of SIGUSR2 saves the task (`checkpoint`, here that of `Checkpointable`) and queues the job again.
    The runner raises that signal itself, once the ranks have saved and ended.
    """

    spec: JobSpec

    def __call__(self, index: int | None = None) -> None:
        """Do the job. index: of an array's element.

        Raises:
            UserError: the stage is not done; submitit writes the reason into the job's result.
        """
        job = JobEnvironment()
        Path(f"{job.paths.submitted_pickle}.save_tmp").unlink(missing_ok=True)  # of a save that a kill cut off
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # srun passes signals on to the ranks
        sys.tracebacklimit = 0  # what is raised here has its reason
        try:
            with stop_requests() as requests:
                host = SlurmHost(job.raw_job_id, job.job_id, this_start()["restart"], tuple(job.hostnames), index,
                                 Scheduler(), requests, handler=handler)
                refuse_changed_files(self.spec)
                decision = Runner(self.spec, host).run()
        except (UserError, OSError) as error:
            print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {error}", flush=True)
            raise UserError(str(error)) from None
        if decision.action == "stop":
            raise UserError(f"{self.spec.stage} is not done: {decision.reason}")


def refuse_changed_files(spec: JobSpec) -> None:
    """UserError if a file that decides what the job does has changed since the submission, or if others could change
    what it executes."""
    if spec.check_owners:
        refuse_foreign_files(Path(spec.run), map(Path, spec.files))
    for name, sha256 in spec.files.items():
        if not Path(name).is_file() or sha256_file(Path(name)) != sha256:
            raise UserError(f"{name} changed after the submission. Nothing was started. Submit the same command again "
                            f"to run what there is now.")


def main(run: str, stage: str, chain: str) -> None:
    """Record that the runner of a job of this submission was killed."""
    print("the runner was killed (out of memory, perhaps): queueing the job again", flush=True)
    log_attempt(Path(run), KILLED, job=JobEnvironment().job_id, stage=stage, chain=chain,
                restart=this_start()["restart"], start=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
