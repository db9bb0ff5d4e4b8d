"""The Slurm lab that tests share, with what they ask of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.slurm_lab import Lab, user_name
from tests.waiting import HANG_S


class Cluster(Lab):
    """A real Slurm on this machine. Its nodes are n1, n2 ... of four CPUs."""

    def run(self, *command: str | Path, check: bool = True, cwd: Path | None = None,
            variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program against this cluster. A question that the controller is too busy to answer in time is asked
        again, where an answer is wanted (`check`)."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        for _ in range(6):
            result = subprocess.run([str(word) for word in command], cwd=cwd, text=True, capture_output=True,
                                    env={**kept, **self.environment(), **(variables or {})},
                                    stdin=subprocess.DEVNULL, timeout=HANG_S)
            if not (check and (command[0] == "squeue" or "show" in command) and "Socket timed out" in result.stderr):
                break
        assert not check or result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}{result.stderr}"
        return result

    def is_idle(self) -> bool:
        """Whether Slurm says that the queue is empty. It is asked twice a second at most: who waits leaves the
        processors to the jobs."""
        time.sleep(0.5)
        answer = self.run("squeue", "--noheader", check=False)
        return answer.returncode == 0 and not answer.stdout.strip()

    def cancel_all(self) -> None:
        """Cancel whatever is in the queue."""
        self.run("scancel", "--user", user_name())

    def state(self, job: str) -> str:
        """The state of a job, also after its end, with the reason where it waits: "PENDING Dependency"."""
        shown = dict(word.split("=", 1) for word in self.run("scontrol", "--oneliner", "show", "job", job
                                                             ).stdout.split() if "=" in word)
        return f"{shown['JobState']} {shown['Reason']}" if shown["JobState"] == "PENDING" else shown["JobState"]


def guard(folder: Path) -> subprocess.Popen[bytes]:
    """A process that takes the lab in `folder` down when this process is gone, killed before it could do so itself."""
    code = ("import os, sys, time\nfrom tests.slurm_lab import Lab\n"
            "while os.getppid() == int(sys.argv[2]):\n    time.sleep(0.5)\nLab(sys.argv[1]).down()")
    return subprocess.Popen([sys.executable, "-c", code, str(folder), str(os.getpid())], cwd=REPOSITORY,
                            start_new_session=True, stdin=subprocess.DEVNULL)
