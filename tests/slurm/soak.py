"""A soak: one training on a Slurm lab under random faults, and the proof that they left no trace in it.

    python -m tests.slurm.soak soaked                         faults for two minutes, then the chain to its report
    python -m tests.slurm.soak soaked --minutes 60 --seed 7   an hour, with the faults in the order of seed 7

A tiny model is trained on four nodes of this machine while ranks are killed and stopped, the job's runner is killed,
Slurm's warning before the time limit comes, the job is queued again from outside, nodes lose power, slurmctld goes
away, a checkpoint turns bad, and training goes on with other numbers of nodes. Where the chain ends without being done,
the same command is given again, as a user would.

At the end the losses must be those of the same training that nobody disturbed, every sample must have been used
exactly once (drover.tools.audit), and the report must state the goodput. Exit status: 0 only if all of that holds, 1 if
not, 2 if there is no lab, 130 if it was stopped. Every fault is recorded with its time and step in chaos.jsonl. The
order of the faults, and what each does, are repeatable by --seed; the steps that they hit depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from math import inf, isnan
from pathlib import Path
from random import Random
from typing import Any

import psutil
import yaml

from drover.launch.slurm.chain import read_chain
from drover.launch.slurm.nodes import NODES
from drover.launch.slurm.scheduler import Scheduler
from drover.pipeline.console import duration
from drover.pipeline.contract.command_line import Parser, Program
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.stages import REPOSITORY
from drover.pipeline.contract.state import ATTEMPTS, read_attempts
from drover.pipeline.errors import UserError
from drover.pipeline.files import append_line
from drover.pipeline.records.checkpoints import MARKER, complete_checkpoints
from drover.pipeline.records.goodput import goodput
from drover.pipeline.records.metrics import read_metrics
from drover.tools.audit import audit
from drover.tools.slurm_lab import Lab

SIZES = (1, 2, 4)
"""Nodes that training may go on with; it begins with the most."""
BOUND = 1e-9
"""Largest relative difference of a loss or gradient norm from the undisturbed one's. All is computed in fp64; other
numbers of ranks add in another order."""
SHARE = 0.5
"""Of the time, what is expected to be left for steps."""
PROBE_STEPS = 20
CHECKPOINT_S = 2.0
CORPUS_BYTES = 130_000
STALL_S = 1800.0
"""Without a step, a submission or a fault for so long, the soak gives up."""
SETTINGS: dict[str, Any] = {
    "name": "soak",
    "shard": {"shard_mb": 0.03, "heldout_share": 0.1},
    "tokenizer": {"vocab_size": 768, "train_mb": 1.0},
    "model": {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "context_length": 128},
    "train": {"sequence_length": 64, "batch_tokens": 1024, "micro_batch": 4, "lr": 0.003, "warmup_steps": 10,
              "precision": "fp64", "heldout_tokens": 2000, "sample_tokens": 8, "prompts": ["def "],
              "guards": {"hang_minutes": 0.3}},
    "convert": {"check_tokens": 64},
    "evaluate": {"heldout_tokens": 4000, "prompts": ["def "], "prompt_tokens": 8},
    "launch": {"processes": 1},
}


class Stuck(Exception):  # noqa: N818 - says that nothing goes on
    """The run does not go on by itself, and not by the user's command either."""


class Missed(Exception):  # noqa: N818 - nothing is wrong
    """A fault that found nothing to hit; says why."""


class SoakRun:
    """A tiny training on the cluster of `lab`, in `folder`. `nodes`: what the next submission asks for."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        self.folder, self.lab, self.nodes = folder, lab, max(SIZES)
        self.run = folder / "runs" / "soak"
        self.environment = {**os.environ, **lab.environment(), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
        self.scheduler = Scheduler(self.environment)
        self.began = self._moved = time.monotonic()
        self._trace: list[int] = []
        self.submissions = 0

    # ---- what a user does

    def write(self, **train: Any) -> None:
        """Write the text and the settings."""
        corpus, size = self.folder / "corpus", 0
        corpus.mkdir(exist_ok=True)
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if size < CORPUS_BYTES and len(text) < 9_000:
                (corpus / f"{path.stem}.txt").write_text(text, encoding="utf-8")
                size += len(text)
        sources = [{"kind": "files", "name": "code", "paths": [f"{corpus}/*.txt"]}]
        (self.folder / "soak.yaml").write_text(yaml.safe_dump({
            **SETTINGS, "runs_dir": str(self.folder / "runs"), "reuse": str(self.folder / "runs/data"),
            "shard": {**SETTINGS["shard"], "sources": sources}, "train": {**SETTINGS["train"], **train}}))

    def launcher(self, *arguments: str) -> None:
        """Call launch/submit.py in the folder. Stuck where it refuses."""
        answer = subprocess.run([sys.executable, str(REPOSITORY / "launch/submit.py"), *arguments], cwd=self.folder,
                                env=self.environment, stdin=subprocess.DEVNULL, text=True, capture_output=True)
        if answer.returncode:
            raise Stuck(f"submit.py {' '.join(arguments)} ended with {answer.returncode}:\n"
                        f"{answer.stdout[-2000:]}{answer.stderr}")

    def local(self, stages: str, *overrides: str) -> None:
        """Do stages on this machine, without Slurm."""
        self.launcher("--config", "soak.yaml", "--stage", stages, "--cluster", "local", *overrides)

    def submit(self) -> None:
        """Give the user's own command, which also goes on with what was begun.

        Nodes that failed are taken for mended: it was the soak that made them fail.
        """
        (self.run / NODES).unlink(missing_ok=True)
        self.launcher("--config", "soak.yaml", "--stage", "all", "--cluster", "lab", "--nodes", str(self.nodes))
        self.submissions += 1
        self.log("submitted", nodes=self.nodes)

    def stop(self) -> None:
        """`submit.py --stop`, and wait until training has left the queue."""
        self.launcher("--stop", str(self.run))
        self.wait(lambda: not self.queued(), "the end of training that was asked to stop")

    # ---- what can be seen

    def jobs(self, stage: str = "") -> list[str]:
        """Ids of the newest submission's jobs, of all stages or of one."""
        chain = read_chain(self.run)
        return [job.id for job in chain.jobs if stage in ("", job.stage)] if chain else []

    def queued(self) -> bool:
        """Whether anything of the chain is in the queue, or may be: Slurm does not answer."""
        found = self.scheduler.jobs(jobs) if (jobs := self.jobs()) else {}
        return found is None or any(job.queued for job in found.values())

    def done(self, stage: str) -> bool:
        """Whether a stage is finished."""
        return read_manifest(self.run / stage) is not None

    def step(self) -> int:
        """The step that was logged last; 0 before the first."""
        with suppress(OSError, ValueError, IndexError):
            return int(json.loads((self.run / "train/metrics.jsonl").read_bytes().split(b"\n")[-2])["step"])
        return 0

    def saved(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return complete_checkpoints(self.run / "train")

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that run, by rank."""
        return {int(variables["RANK"]): pid for pid, variables in self.processes("drover.pipeline.train")
                if "RANK" in variables}

    def processes(self, *words: str) -> Iterator[tuple[int, dict[str, str]]]:
        """Processes of this run's jobs with all the words in their command line, and their environments."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # it has ended, or is another user's
                command = process.cmdline()
                line = " ".join(command)
                if str(self.run) in line and all(word in line for word in words) and \
                        Path(command[0]).name != "srun" and process.status() != psutil.STATUS_ZOMBIE:
                    yield process.pid, process.environ()

    # ---- waiting

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition. Stuck where it is in vain."""
        until = time.monotonic() + STALL_S
        while not condition():
            if time.monotonic() > until:
                raise Stuck(f"waited {STALL_S:.0f} s in vain for {what}\n{self.story()}")
            time.sleep(0.2)

    def wait_for_steps(self) -> bool:
        """Wait until all ranks run and do steps, with the user's command where nothing is queued any more; False once
        training is done."""
        seen = self.step()
        while not self.done("train"):
            if self.step() != seen and len(self.ranks()) == self.nodes:
                return True
            self.go_on()
            time.sleep(0.2)
        return False

    def go_on(self) -> None:
        """Give the user's command again if the chain has ended. Stuck where the run has left no trace for long."""
        logs = [self.run / "train/metrics.jsonl", *(self.run / ATTEMPTS).glob("*.jsonl")]
        trace = [self.submissions, *(path.stat().st_size for path in logs if path.exists())]
        if trace != self._trace:
            self._trace, self._moved = trace, time.monotonic()
        if time.monotonic() - self._moved > STALL_S:
            raise Stuck(f"nothing has happened for {STALL_S:.0f} s\n{self.story()}")
        if not self.queued() and not self.done("report"):
            self.submit()

    def story(self) -> str:
        """What the queue, the nodes and the newest jobs say, for whoever looks into a soak that failed."""
        queue = subprocess.run(["squeue"], env=self.environment, text=True, capture_output=True)
        logs = sorted(self.run.glob("logs/slurm/*.log"), key=lambda path: path.stat().st_mtime)[-2:]
        return "\n".join([f"{queue.stdout}{queue.stderr}{self.lab.node_states()}", *(
            f"==> {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)])

    def log(self, event: str, **details: Any) -> None:
        """A line of chaos.jsonl, and of the terminal."""
        seconds, step = round(time.monotonic() - self.began, 1), self.step()
        append_line(self.folder / "chaos.jsonl", {"at": datetime.now(UTC).isoformat(timespec="milliseconds"),
                                                  "seconds": seconds, "event": event, "step": step, **details})
        words = ", ".join(f"{name} {value}" for name, value in details.items())
        print(f"{seconds:7.1f} s  step {step:>5}  {event}: {words}", flush=True)


# ---- faults: each does its mischief at once and says what it did

def kill_rank(run: SoakRun, dice: Random, number: int = signal.SIGKILL, others: int = 0) -> str:
    """kill -9 one rank."""
    wanted, ranks = dice.randrange(max(SIZES)), run.ranks()
    if len(ranks) <= others:
        raise Missed("no other rank that could notice" if ranks else "no ranks")
    rank = sorted(ranks)[wanted % len(ranks)]
    try:
        os.kill(ranks[rank], number)
    except ProcessLookupError:
        raise Missed(f"rank {rank} was gone") from None
    return f"{signal.Signals(number).name} for rank {rank} of {len(ranks)}"


def freeze_rank(run: SoakRun, dice: Random) -> str:
    """SIGSTOP one rank: it hangs, and the others notice."""
    return kill_rank(run, dice, signal.SIGSTOP, others=1)


def kill_runner(run: SoakRun, dice: Random) -> str:
    """kill -9 what leads the job."""
    for pid, _ in run.processes("drover.launch.slurm.job.runner", "-train.json"):
        os.kill(pid, signal.SIGKILL)
        return f"process {pid}"
    raise Missed("no runner")


def warn(run: SoakRun, dice: Random) -> str:
    """The signal that Slurm sends before the time limit."""
    return _asked(run, lambda job: run.scheduler.signal(job, "USR2"))


def requeue(run: SoakRun, dice: Random) -> str:
    """`scontrol requeue` from outside."""
    return _asked(run, run.scheduler.requeue)


def _asked(run: SoakRun, ask: Callable[[str], str | None]) -> str:
    job = (run.jobs("train") or [""])[-1]
    if (problem := ask(job)) is not None:
        raise Missed(problem)
    return f"job {job}"


def kill_node(run: SoakRun, dice: Random) -> str:
    """A node loses power, and comes back a while later; Slurm is told of it or not."""
    node, seconds, told = dice.choice(run.lab.nodes), round(dice.uniform(2, 15), 1), dice.random() < 0.5
    run.lab.kill_node(node, told)
    time.sleep(seconds)
    run.lab.start_node(node)
    return f"{node} for {seconds} s{'' if told else ', unnoticed'}"


def restart_controller(run: SoakRun, dice: Random) -> str:
    """slurmctld is away for a while."""
    seconds = round(dice.uniform(1, 8), 1)
    run.lab.stop_controller()
    time.sleep(seconds)
    run.lab.start_controller()
    return f"away for {seconds} s"


def damage_checkpoint(run: SoakRun, dice: Random) -> str:
    """Training is stopped, a byte of its newest checkpoint turns over, and training is submitted again."""
    run.stop()
    if len(saved := run.saved()) < 2:
        run.go_on()
        raise Missed("only one checkpoint, which is needed")
    path = max((path for path in saved[-1].iterdir() if path.name != MARKER), key=lambda path: path.stat().st_size)
    place = dice.randrange(path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))
    run.go_on()
    return f"byte {place} of {saved[-1].name}/{path.name}"


def resize(run: SoakRun, dice: Random) -> str:
    """Training is stopped, and submitted again with another number of nodes."""
    before = run.nodes
    run.stop()
    run.nodes = dice.choice([size for size in SIZES if size != before])
    run.go_on()
    return f"{before} -> {run.nodes} nodes"


FAULTS: dict[str, Callable[[SoakRun, Random], str]] = {fault.__name__: fault for fault in (
    kill_rank, kill_runner, warn, requeue, kill_node, restart_controller, freeze_rank, damage_checkpoint, resize)}


def order(seed: int) -> Iterator[str]:
    """The faults in the order of this seed: every kind comes once before any comes again."""
    dice, names = Random(seed), list(FAULTS)
    while True:
        dice.shuffle(names)
        yield from names


# ---- the soak

def soak(run: SoakRun, minutes: float, seed: int) -> tuple[list[str], list[str]]:
    """Train under faults for so many minutes, then to the end; see `judge`. Stuck where the run does not go on."""
    run.write(steps=PROBE_STEPS)
    run.local("shard,tokenizer,encode", "name=data", "reuse=null")
    run.local("train", "name=probe", f"launch.processes={run.nodes}")
    # A length of training that fills the time, by steps on this machine as it is now.
    step_s = statistics.median(line["step_s"] for line in read_metrics(run.folder / "runs/probe/train/metrics.jsonl"))
    steps = max(2 * PROBE_STEPS, int(60 * minutes * SHARE / step_s))
    run.write(steps=steps, heldout_every=max(1, steps // 4), sample_every=steps,
              checkpoint={"every_steps": max(2, round(CHECKPOINT_S / step_s))})
    print(f"{steps} steps of about {step_s:.3f} s in {run.folder}", flush=True)
    run.began = time.monotonic()
    run.submit()
    faults = disturb(run, 60 * minutes, seed)
    run.log("quiet", faults=sum(faults.values()))
    while not run.done("report"):
        run.go_on()
        time.sleep(0.2)
    run.wait(lambda: not run.queued(), "an empty queue")
    run.log("done", submissions=run.submissions)
    wall = time.monotonic() - run.began
    print("the same training again, undisturbed ...", flush=True)
    run.local("train", "name=undisturbed", f"train.checkpoint.every_steps={10**6}")
    return judge(run, faults, wall)


def disturb(run: SoakRun, seconds: float, seed: int) -> Counter[str]:
    """Let faults happen until the time is over or training is done; how many of each kind."""
    until, happened = time.monotonic() + seconds, Counter[str]()
    for number, name in enumerate(order(seed)):
        dice = Random(f"{seed}/{number}")
        if not run.wait_for_steps() or time.monotonic() > until:
            break
        # Most often not before the next checkpoint, so that the run gets on.
        patient, pause, saved = dice.random() < 0.8, dice.uniform(0.2, 5.0), run.saved()[-1:]
        while patient and run.saved()[-1:] == saved and not run.done("train"):
            run.go_on()
            time.sleep(0.1)
        time.sleep(pause)
        if run.done("train") or time.monotonic() > until:
            break
        step = run.step()
        try:
            run.log("fault", kind=name, at_step=step, what=FAULTS[name](run, dice))
            happened[name] += 1
        except Missed as why:
            run.log("missed", kind=name, at_step=step, what=str(why))
    return happened


def judge(run: SoakRun, faults: Counter[str], wall: float) -> tuple[list[str], list[str]]:
    """Compare with the undisturbed training, prove the samples, and sum up: lines to print, and what is wrong."""
    ours, theirs = ({line["step"]: line for line in read_metrics(run.folder / "runs" / name / "train/metrics.jsonl")}
                    for name in ("soak", "undisturbed"))
    problems = [] if set(ours) == set(theirs) else [f"{len(ours)} steps were logged, {len(theirs)} undisturbed"]
    worst, where = max(((difference(ours[step][key], theirs[step][key]), step) for step in set(ours) & set(theirs)
                        for key in ("loss", "grad_norm")), default=(0.0, 0))
    if worst >= BOUND:
        problems.append(f"step {where} differs from the undisturbed one by {worst:.1e} (bound {BOUND:.0e})")
    found, spent, report = audit(run.run), goodput(run.run), run.run / "report.html"
    problems += found.faults
    if spent is None or not report.is_file() or "goodput" not in report.read_text():
        problems.append("the report does not state the goodput")
    nexts = Counter(event["next"] for event in read_attempts(run.run)
                    if event["event"] == "ended" and event["stage"] == "train")
    kinds = ", ".join(f"{name} {number}" for name, number in sorted(faults.items()))
    lines = [
        f"faults       {sum(faults.values())}: {kinds}",
        f"train        {len(ours)} steps in {run.submissions} submissions: {nexts['restart']} restarts inside a job, "
        f"{nexts['requeue']} requeues, {nexts['stop']} stops",
        f"losses       within {worst:.1e} of the undisturbed ones (bound {BOUND:.0e}), step by step",
        *(f"samples      {line}" for line in found.lines()),
        f"wall         {duration(wall)} from the first submission to the report"]
    if spent is not None:
        lost = ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in
                         sorted(spent.lost.items(), key=lambda item: -item[1]) if seconds >= 1)
        lines.append(f"goodput      {spent.share:.1%} of {duration(spent.wall_s)} of training; lost: {lost}")
    return lines, problems


def difference(one: float, other: float) -> float:
    """Relative; infinite where one of them is NaN."""
    found = abs(one / other - 1)
    return inf if isnan(found) else found


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("--minutes", type=float, default=2.0, help="how long faults happen (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of faults (%(default)s)")
    parser.add_argument("folder", type=Path, help="an empty folder for the run")


def work(options: argparse.Namespace) -> int:
    """Soak and print; 1 where something does not hold."""
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose another.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its lab must not outlive it
    with tempfile.TemporaryDirectory(prefix="lab-", dir="/tmp", ignore_cleanup_errors=True) as own:  # a short path
        lab = Lab(own)
        lab.up(max(SIZES))
        try:
            lines, problems = soak(SoakRun(folder, lab), options.minutes, options.seed)
        except Stuck as stuck:
            lines, problems = [], [str(stuck)]
        finally:
            lab.down()
    print("\n".join([*lines, *(f"WRONG        {problem}" for problem in problems),
                     f"see {folder}" if problems else f"all holds (seed {options.seed})"]))
    return int(bool(problems))


main = Program("python -m tests.slurm.soak", __doc__, add_options, work, interrupted="stopped; nothing of it runs")

if __name__ == "__main__":
    sys.exit(main())
