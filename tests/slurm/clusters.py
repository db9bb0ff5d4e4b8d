"""One interface to a real Slurm lab and to the fake one."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.slurm.fake_slurm import PROGRAMS
from tests.slurm.fake_state import marked, opened, signal_all
from tests.waiting import HANG_S, wait_for
from tools.slurm_lab import Lab, missing_programs

REPOSITORY = Path(__file__).resolve().parents[2]


ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def kinds() -> list[str]:
    """The kind of cluster for tests here: Slurm itself where it is, unless DROVER_FAKE_SLURM is set."""
    real = not missing_programs() and not os.environ.get("DROVER_FAKE_SLURM")
    return ["slurm"] if real else ["fake"]


class Cluster:
    """What tests may do with a cluster of either kind. Nodes are n1, n2 ... of four CPUs."""

    kind = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def nodes(self) -> list[str]:
        raise NotImplementedError

    def up(self, nodes: int = 4, *, accounting: bool = True, requeue: bool = True) -> None:
        raise NotImplementedError

    def down(self) -> None:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """What to lay over a process's environment so that Slurm's programs speak to this cluster."""
        raise NotImplementedError

    def kill_node(self, node: str) -> None:
        raise NotImplementedError

    def start_node(self, node: str) -> None:
        raise NotImplementedError

    def stop_controller(self) -> None:
        raise NotImplementedError

    def start_controller(self) -> None:
        raise NotImplementedError

    def stop_accounting(self) -> None:
        raise NotImplementedError

    def start_accounting(self) -> None:
        raise NotImplementedError

    def restart_controller(self) -> None:
        self.stop_controller()
        self.start_controller()

    def needs(self, kind: str, reason: str) -> None:
        """Skip the test on the other kind."""
        if self.kind != kind:
            pytest.skip(reason)

    def run(self, *command: str | Path, check: bool = True, cwd: Path | None = None,
            variables: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program against this cluster. A controller that is too busy to answer a question in time is asked
        again, where an answer is wanted (`check`)."""
        asks = command[0] in ("squeue", "sinfo") or (command[0] == "scontrol" and "show" in command)
        for _ in range(6):
            result = subprocess.run([str(word) for word in command], cwd=cwd, text=True, capture_output=True,
                                    env={**_clean(), **self.environment(), **(variables or {})},
                                    stdin=subprocess.DEVNULL, timeout=HANG_S)
            if not (check and asks and "Socket timed out" in result.stderr):
                break
        assert not check or result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}{result.stderr}"
        return result

    def submit(self, folder: Path, script: str, *options: str, **variables: str) -> str:
        """Submit a bash script from `folder`; its output goes to out.<job id> there. The job's id."""
        path = folder / f"script-{time.monotonic_ns()}.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        answer = self.run("sbatch", "--output=out.%j", "--open-mode=append", f"--chdir={folder}", *options, path,
                          cwd=folder, variables=variables)
        return answer.stdout.split()[-1]

    def state(self, job: str) -> str:
        """The state of a job, also after its end, with the reason where it waits: "PENDING Dependency"."""
        shown = dict(word.split("=", 1) for word in self.run("scontrol", "--oneliner", "show", "job", job
                                                             ).stdout.split() if "=" in word)
        return f"{shown['JobState']} {shown['Reason']}" if shown["JobState"] == "PENDING" else shown["JobState"]

    def wait(self, job: str, *states: str) -> str:
        """Wait until the state of a job begins with one of `states` (default: any end)."""
        wanted, ends = states or ENDS, set(ENDS) - set(states)

        def reached() -> str:
            state = self.state(job)
            assert state not in ends or state.startswith(wanted), f"job {job} is {state}, not {' or '.join(wanted)}"
            return state if state.startswith(wanted) else ""

        return wait_for(reached, lambda: f"job {job} is {self.state(job)}, not {' or '.join(wanted)}")


class RealCluster(Cluster):
    """Slurm itself."""

    kind = "slurm"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.lab = Lab(folder)
        self.guard: subprocess.Popen[bytes] | None = None

    @property
    def nodes(self) -> list[str]:
        return self.lab.nodes

    def up(self, nodes: int = 4, *, accounting: bool = True, requeue: bool = True) -> None:
        self.guard = guard(self.folder)
        self.lab.up(nodes, accounting=accounting, requeue=requeue)

    def environment(self) -> dict[str, str]:
        return self.lab.environment()

    def down(self) -> None:
        self.lab.down()
        if self.guard is not None:
            self.guard.kill()
            self.guard.wait()

    def kill_node(self, node: str) -> None:
        self.lab.kill_node(node)

    def start_node(self, node: str) -> None:
        self.lab.start_node(node)

    def stop_controller(self) -> None:
        self.lab.stop_controller()

    def start_controller(self) -> None:
        self.lab.start_controller()

    def stop_accounting(self) -> None:
        self.lab.stop_accounting()

    def start_accounting(self) -> None:
        self.lab.start_accounting()


class FakeCluster(Cluster):
    """The programs of tests/slurm/fake_slurm.py in a folder on PATH, and their scheduler.

    minute_s: how long a minute of a time limit lasts, so that tests need not wait for a real one.
    """

    kind = "fake"
    minute_s = 60.0

    @property
    def nodes(self) -> list[str]:
        with opened(self.folder, write=False) as state:
            return list(state["nodes"])

    def up(self, nodes: int = 4, *, accounting: bool = True, requeue: bool = True) -> None:
        for name in ("bin", "scripts", "environments"):
            (self.folder / name).mkdir(parents=True)
        machines = {f"n{number}": {"cpus": 4, "lost": 0.0, "drained": False} for number in range(1, nodes + 1)}
        (self.folder / "state.json").write_text(json.dumps(
            {"next": 1, "jobs": {}, "nodes": machines, "requeue": requeue, "minute_s": self.minute_s}))
        if not accounting:
            self.stop_accounting()
        code = (f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from tests.slurm.fake_slurm import main; "
                "sys.exit(main(sys.argv[1], sys.argv[2:]))")
        for program in PROGRAMS:
            path = self.folder / "bin" / program
            start = shlex.join([sys.executable, "-I", "-S", "-c", code, program])
            path.write_text(f'#!/bin/sh\nexec {start} "$@"\n')
            path.chmod(0o755)
        self.scheduler = subprocess.Popen(
            [sys.executable, "-m", "tests.slurm.fake_scheduler", str(self.folder), str(os.getpid())], cwd=REPOSITORY,
            env=_clean(), start_new_session=True, stdin=subprocess.DEVNULL)

    def down(self) -> None:
        if (self.folder / "state.json").exists():
            (self.folder / "stop").touch()
            self.scheduler.wait(HANG_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        return {"FAKE_SLURM": str(self.folder), "PATH": f"{self.folder}/bin:{os.environ['PATH']}"}

    def kill_node(self, node: str) -> None:
        with opened(self.folder) as state:
            state["nodes"][node]["lost"] = time.time()
            running = [job for job in state["jobs"].values() if node in job["hosts"] and job["state"] == "RUNNING"]
            for job in running:
                job["failed_node"] = node
        for job in running:
            while left := marked(self.folder, job["id"], node=node):
                signal_all(list(left), signal.SIGKILL)
                time.sleep(0.02)

    def start_node(self, node: str) -> None:
        with opened(self.folder) as state:
            state["nodes"][node].update(lost=0.0, drained=False)

    def stop_controller(self) -> None:
        (self.folder / "no_controller").touch()

    def start_controller(self) -> None:
        (self.folder / "no_controller").unlink(missing_ok=True)

    def stop_accounting(self) -> None:
        (self.folder / "no_accounting").touch()

    def start_accounting(self) -> None:
        (self.folder / "no_accounting").unlink(missing_ok=True)


def guard(folder: Path) -> subprocess.Popen[bytes]:
    """A process that takes the lab in `folder` down when this process is gone, killed before it could do so itself."""
    code = ("import os, sys, time\nfrom tools.slurm_lab import Lab\n"
            "while os.getppid() == int(sys.argv[2]):\n    time.sleep(0.5)\nLab(sys.argv[1]).down()")
    return subprocess.Popen([sys.executable, "-c", code, str(folder), str(os.getpid())], cwd=REPOSITORY, env=_clean(),
                            start_new_session=True, stdin=subprocess.DEVNULL)


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "FAKE_SLURM"))}
