"""What a job's script calls if something killed the runner, before it queues the job again.

    python -m drover.launch.job SPEC.json

A system that is out of memory kills processes. The runner's ranks end with it. The next start counts such ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from submitit import JobEnvironment

from drover.launch.job.spec import JobSpec
from drover.pipeline.contract.state import KILLED, log_attempt


def main(path: str) -> None:
    """Record that the runner of the job with this spec was killed."""
    spec = JobSpec.load(Path(path))
    print("the runner was killed (out of memory, perhaps): queueing the job again", flush=True)
    log_attempt(Path(spec.run), KILLED, job=JobEnvironment().job_id, stage=spec.stage, chain=spec.chain,
                restart=int(os.environ.get("SLURM_RESTART_COUNT") or 0), start=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
