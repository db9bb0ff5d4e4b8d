"""Slurm's programs as far as a running job needs them, for a machine without Slurm: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.slurm.jobspec import JobSpec
from pipeline.contract.state import StageState, read_attempts, read_state
from tests.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]

SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
calls = os.path.join(os.environ["FAKE_SLURM"], "srun.calls")
with open(calls, "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
refuse = os.path.join(os.environ["FAKE_SLURM"], "no_step")
if os.path.exists(refuse):
    left = int(open(refuse).read())
    if left:
        open(refuse, "w").write(str(left - 1))
        sys.exit("srun: error: Unable to create step for job 12: Requested nodes are busy")
options = dict(word[2:].partition("=")[::2] for word in sys.argv[1:] if word.startswith("--"))
first = next(number for number, word in enumerate(sys.argv[1:], 1) if not word.startswith("--"))
tasks, per = int(options["ntasks"]), int(options["ntasks-per-node"])
running = {{}}
for task in range(tasks):
    environment = {{**os.environ, "SLURM_PROCID": str(task), "SLURM_NTASKS": str(tasks),
                   "SLURM_LOCALID": str(task % per), "SLURM_NODEID": str(task // per),
                   "SLURM_STEP_NUM_NODES": options["nodes"], "SLURMD_NODENAME": f"n{{1 + task // per}}"}}
    running[task] = subprocess.Popen(sys.argv[first:], env=environment,
                                     stdout=open(options["output"].replace("%t", str(task)), "wb"),
                                     stderr=open(options["error"].replace("%t", str(task)), "wb"))
def end(*_):
    for process in running.values():
        process.kill()
signal.signal(signal.SIGTERM, end)
worst = 0
while running:
    for task, process in list(running.items()):
        status = process.poll()
        if status is None:
            continue
        del running[task]
        if status:
            worst = worst or 143
            how = signal.strsignal(-status) if status < 0 else f"Exited with exit code {{status}}"
            print(f"srun: error: n{{1 + task // per}}: task {{task}}: {{how}}", file=sys.stderr, flush=True)
            end()
    time.sleep(0.02)
sys.exit(worst)
"""

SCONTROL = f"""#!{sys.executable}
import os, sys
folder, words = os.environ["FAKE_SLURM"], sys.argv[1:]
with open(os.path.join(folder, "scontrol.calls"), "a") as file:
    file.write(" ".join(words) + "\\n")
if words[:2] == ["show", "hostnames"]:
    from submitit.slurm.slurm import _parse_node_list
    print("\\n".join(_parse_node_list(words[2])))
elif words[0] == "requeue" and os.path.exists(os.path.join(folder, "no_requeue")):
    sys.exit("scontrol: error: Requested operation is presently disabled")
elif "job" in words:
    print(f"JobId={{words[-1]}} ExcNodeList=n9 JobName=x")
elif "node" in words:
    print(f"NodeName={{words[-1]}} NodeAddr=127.0.0.1")
"""

ANSWER = f"""#!{sys.executable}
import os, sys
path = os.path.join(os.environ["FAKE_SLURM"], os.path.basename(sys.argv[0]))
sys.stdout.write(open(path).read()) if os.path.exists(path) else sys.exit("Unable to contact slurm controller")
"""

QUICK = """
import os, sys
from launch.slurm.job import joblock
from launch.slurm.job import runner, starts
from launch.slurm.job.preflight import Found
if bad := dict(entry.split(":") for entry in os.environ.get("FAKE_BAD", "").split(",") if entry):
    both = len(bad) == 2
    runner.run_preflight = lambda *_: Found(bad, [], both, "no disk, on all nodes alike" if both else "")
runner.PAUSE_S = starts.STEP_PAUSE_S = 0.2
joblock.BEAT_S = {beat}
sys.exit(runner.main(sys.argv[1:]))
"""

STAGE = '''
"""A stage for tests: what each start does stands in a file, a letter per start."""
import os, signal, sys, time
from pathlib import Path
from pipeline.files import write_json, write_text
from pipeline.contract.state import read_state, write_state
folder, plan = Path(sys.argv[1]), Path(sys.argv[2]).read_text().split()
rank, attempt = int(os.environ.get("RANK", "0")), int(os.environ["DROVER_ATTEMPT"])
part = sys.argv[4] if "--part" in sys.argv else None
what = plan[min(attempt, len(plan) - 1)]
pids = folder.parent / "pids"
pids.mkdir(parents=True, exist_ok=True)
(pids / f"{attempt}-{rank}").write_text(str(os.getpid()))
print("rank", rank, "of", os.environ.get("WORLD_SIZE"), "at", os.environ.get("MASTER_PORT"), flush=True)
if what == "import":
    sys.exit("ImportError: no module named anything")
if what == "refuse":
    print("there is nothing to train on", file=sys.stderr)
    sys.exit(2)
if what == "silent":
    sys.exit(0)
def say(*words, **more):
    if rank == 0 and part is None:
        write_state(folder, *words, **more)
def save(step):
    marker = folder / "checkpoints" / f"step-{step:08d}" / "COMPLETE.json"
    if rank == 0:
        write_json(marker, {})
    while not marker.exists():  # a rank that crashes does so after the save, however slow the other one is
        time.sleep(0.02)
def wait_for_rank_0(what):
    while rank and not ((state := read_state(folder)) and state.attempt == attempt and what(state)):
        time.sleep(0.02)
say("running")
if what.startswith("save"):
    save(int(what[4:]))
    what = "crash"
if what == "crash" and rank == 1 or what == "crash" and "RANK" not in os.environ:
    print("this rank says why", file=sys.stderr, flush=True)
    wait_for_rank_0(lambda state: True)
    os.kill(os.getpid(), signal.SIGKILL)
if what == "failed":
    say("failed", reason="the third record is broken")
    wait_for_rank_0(lambda state: state.status == "failed")
    sys.exit(2)
if what in ("asked", "cancelled"):
    save(120)
    say("preempted", step=120, reason="time limit", again=what == "asked")
    sys.exit(0)
if what == "units":  # until the time limit is near
    from pipeline.contract.parts import PARTS, last_word_file
    from pipeline.contract.stopping import StopRequest
    from pipeline.contract.state import STATE
    with StopRequest() as stop:
        while not stop.heard:
            time.sleep(0.02)
    where = (folder, STATE) if part is None else (folder / PARTS, last_word_file("texts", *map(int, part.split("/"))))
    write_state(where[0], "preempted", reason=f"{stop.reason}: 3 of 4 units", again=stop.again, file=where[1])
    sys.exit(130)
if what in ("crash", "wait"):
    signal.signal(signal.SIGTERM, lambda *_: None if "RANK" in os.environ else sys.exit(1))
    time.sleep(3600)
if part is not None:
    write_json(folder / "units" / "parts" / f"texts.{part.replace('/', '-of-')}.json", {})
elif rank == 0:
    from pipeline.contract.manifest import Manifest
    Manifest(folder.name, {}, [], {"steps": 1}, "").write(folder)
    say("done")
'''


@dataclass
class Job:
    """A job in a folder of its own: its spec, what its starts do, and Slurm's answers."""

    folder: Path
    spec: JobSpec
    environment: dict[str, str] = field(default_factory=dict)
    beat_s: float = 30.0

    @property
    def run(self) -> Path:
        return Path(self.spec.run)

    @property
    def stage(self) -> Path:
        return self.spec.folder

    def plan(self, *starts: str, **changes: Any) -> Job:
        """The same job with other starts and another spec."""
        (self.folder / "plan").write_text(" ".join(starts))
        self.spec = replace(self.spec, **changes)
        return self

    def answer(self, program: str, text: str) -> None:
        """What squeue or sinfo says from now on."""
        (self.folder / program).write_text(text)

    def command(self) -> list[str]:
        self.spec.save(self.folder / "spec.json")
        return [sys.executable, "-c", QUICK.format(beat=self.beat_s), str(self.folder / "spec.json")]

    def environ(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "DROVER", "RANK"))}
        return {**kept, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "FAKE_SLURM": str(self.folder),
                "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]",
                **self.environment, **more}

    def start(self, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(), env=self.environ(**more), cwd=self.folder, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def run_it(self, **more: str) -> tuple[int, str]:
        """Run the job to its end; its exit status and log."""
        process = self.start(**more)
        try:
            out, _ = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
        return process.returncode, out

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_attempts(self.run) if event["event"] == kind]

    def ends(self) -> list[tuple[str, str]]:
        return [(event["status"], event["next"]) for event in self.events("ended")]

    def state(self) -> StageState:
        state = read_state(self.stage)
        assert state is not None
        return state

    def calls(self, program: str) -> list[str]:
        path = self.folder / f"{program}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def alive(self) -> list[str]:
        """Processes of stages that still run."""
        return [path.name for path in sorted((self.run / "pids").glob("*"))
                if Path(f"/proc/{path.read_text()}").exists()
                and " Z " not in Path(f"/proc/{path.read_text()}/stat").read_text()]

    def kill_all(self) -> None:
        for name in self.alive():
            os.kill(int((self.run / "pids" / name).read_text()), signal.SIGKILL)


def make_job(folder: Path, stage: str = "train", **changes: Any) -> Job:
    """A job of two ranks on two nodes, the second job (12) of the chain `c`."""
    (folder / "bin").mkdir(parents=True)
    programs = {"srun": SRUN, "scontrol": SCONTROL, "squeue": ANSWER, "sinfo": ANSWER, "sacct": ANSWER}
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "stage.py").write_text(STAGE)
    run = folder / "runs" / "trial"
    spec = JobSpec(run=str(run), name=f"trial-{stage}", stage=stage, chain="c", ranks=2, nodes=2, command=(
        sys.executable, str(folder / "stage.py"), str(run / stage), str(folder / "plan")))
    return Job(folder, replace(spec, **changes))


def chain_of(job: Job, *ids: str, kind: str = "link") -> None:
    """Record a chain of jobs for the job's stage."""
    path = job.run / "launch" / "chain.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "id": "c", "submitted": "", "command": [], "git": {}, "config": "", "config_sha256": "", "code": "",
        "cluster": None, "jobs": [{"name": job.spec.name, "stage": job.spec.stage, "kind": kind, "id": number,
                                   "elements": None, "dependencies": [], "log": "", "spec": ""} for number in ids]}))
