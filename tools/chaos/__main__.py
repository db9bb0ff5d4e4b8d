"""A soak: one training on a Slurm lab under random faults, and the proof that they left no trace in it.

    python -m tools.chaos --minutes 2             a lab of its own, faults for two minutes, then the chain to its report
    python -m tools.chaos --minutes 60 --seed 7   an hour, with the faults in the order of seed 7
    python -m tools.chaos --lab /tmp/lab          on a lab of four nodes that is up

A tiny model is trained on four nodes of this machine while ranks are killed and stopped, the job's runner is killed,
Slurm's warning before the time limit comes, the job is queued again from outside, nodes lose power, slurmctld goes
away, a checkpoint turns bad, and training goes on with other numbers of nodes. Where the chain ends without being done,
the same command is given again, as a user would.

At the end the losses must be those of the same training that nobody disturbed, every sample must have been used
exactly once (tools.audit), and the report must state the goodput. Exit status: 0 only if all of that holds, 1 if not,
2 if there is no lab, 130 if it was stopped. Every fault is recorded with its time and step in chaos.jsonl. The order of
the faults, and what each does, are repeatable by --seed; the steps that they hit depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import inf, isnan
from pathlib import Path
from random import Random

from pipeline.console import duration
from pipeline.contract.state import read_attempts
from pipeline.errors import UserError
from pipeline.files import read_lines
from pipeline.records.goodput import goodput
from pipeline.records.metrics import read_metrics
from tools.audit import audit
from tools.chaos.faults import FAULTS, Missed, order
from tools.chaos.run import SoakRun, Stuck
from tools.slurm_lab import Lab, missing_programs

NODES = 4
BOUND = 1e-9
"""Largest relative difference of a loss or gradient norm from the undisturbed one's. All is computed in fp64; other
numbers of ranks add in another order."""
SHARE = 0.5
"""Of the time, what is expected to be left for steps."""
PROBE_STEPS = 20
CHECKPOINT_S = 2.0


@dataclass(frozen=True)
class Verdict:
    """What a soak found. `problems`: sentences; empty means that all holds."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]


def soak(run: SoakRun, minutes: float, seed: int) -> Verdict:
    """Train under faults for so many minutes, then to the end.

    Raises:
        Stuck: the run does not go on.
    """
    prepare(run, minutes)
    run.began = time.monotonic()
    run.submit()
    faults = disturb(run, 60 * minutes, seed)
    run.log("quiet", faults=sum(faults.values()))
    finish(run)
    wall = time.monotonic() - run.began
    print("the same training again, undisturbed ...", flush=True)
    run.local("train", "name=undisturbed", f"train.checkpoint.every_steps={10**6}")
    return judge(run, faults, wall)


def prepare(run: SoakRun, minutes: float) -> None:
    """Make the data, and choose a length of training that fills the time, by steps on this machine as it is now."""
    run.write(steps=PROBE_STEPS)
    run.local("shard,tokenizer,encode", "name=data", "reuse=null")
    run.local("train", "name=probe", f"launch.processes={NODES}")
    step_s = statistics.median(line["step_s"] for line in read_metrics(run.folder / "runs/probe/train/metrics.jsonl"))
    steps = max(2 * PROBE_STEPS, int(60 * minutes * SHARE / step_s))
    run.write(steps=steps, heldout_every=max(1, steps // 4), sample_every=steps,
              checkpoint={"every_steps": max(2, round(CHECKPOINT_S / step_s))})
    print(f"{steps} steps of about {step_s:.3f} s in {run.folder}", flush=True)


def disturb(run: SoakRun, seconds: float, seed: int) -> Counter[str]:
    """Let faults happen until the time is over or training is done; how many of each kind."""
    until, happened = time.monotonic() + seconds, Counter[str]()
    names = order(seed, 10_000)
    for number in count():
        dice = Random(f"{seed}/{number}")
        if not run.wait_for_steps() or time.monotonic() > until:
            return happened
        # Most often not before the next checkpoint, so that the run gets on.
        patient, pause, saved = dice.random() < 0.8, dice.uniform(0.2, 5.0), run.saved()[-1:]
        while patient and run.saved()[-1:] == saved and run.manifest("train") is None:
            run.go_on()
            time.sleep(0.1)
        time.sleep(pause)
        if run.manifest("train") is not None or time.monotonic() > until:
            return happened
        name, step = names[number], run.step()
        try:
            run.log("fault", kind=name, at_step=step, what=FAULTS[name](run, dice))
            happened[name] += 1
        except Missed as why:
            run.log("missed", kind=name, at_step=step, what=str(why))
    raise AssertionError("the faults have no end")


def finish(run: SoakRun) -> None:
    """Let the chain go on to its report."""
    while run.manifest("report") is None:
        run.go_on()
        time.sleep(0.2)
    run.wait(lambda: not run.queued(), "an empty queue")
    run.log("done", submissions=run.submissions)


def judge(run: SoakRun, faults: Counter[str], wall: float) -> Verdict:
    """Compare with the undisturbed training, prove the samples, and sum up."""
    ours, theirs = ({line["step"]: line for line in read_metrics(run.folder / "runs" / name / "train/metrics.jsonl")}
                    for name in ("soak", "undisturbed"))
    problems = [] if set(ours) == set(theirs) else [f"{len(ours)} steps were logged, {len(theirs)} undisturbed"]
    worst, where = max(((difference(ours[step][key], theirs[step][key]), step) for step in set(ours) & set(theirs)
                        for key in ("loss", "grad_norm")), default=(0.0, 0))
    if worst >= BOUND:
        problems.append(f"step {where} differs from the undisturbed one by {worst:.1e} (bound {BOUND:.0e})")
    found = audit(run.run)
    problems += found.faults
    spent = goodput(run.run)
    report = (run.run / "report.html").read_text() if (run.run / "report.html").is_file() else ""
    if spent is None or "goodput" not in report:
        problems.append("the report does not state the goodput")
    ends = [event for event in read_attempts(run.run) if event["event"] == "ended" and event["stage"] == "train"]
    restarts = Counter(event["next"] for event in ends)
    jobs = {(event["job"], event["restart"]) for event in read_attempts(run.run)
            if event["event"] == "job" and event["stage"] == "train"}
    kinds = ", ".join(f"{name} {number}" for name, number in sorted(faults.items()))
    lines = [
        f"faults       {sum(faults.values())}: {kinds}",
        f"train        {len(ours)} steps in {len(jobs)} allocations of {run.submissions} submissions: "
        f"{restarts['restart']} restarts inside one, {restarts['requeue']} requeues, {restarts['stop']} stops",
        f"losses       within {worst:.1e} of the undisturbed ones (bound {BOUND:.0e}), step by step",
        *(f"samples      {line}" for line in found.lines()),
        f"wall         {duration(wall)} from the first submission to the report"]
    if spent is not None:
        lost = ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in
                         sorted(spent.lost.items(), key=lambda item: -item[1]) if seconds >= 1)
        lines.append(f"goodput      {spent.share:.1%} of {duration(spent.wall_s)} of training; lost: {lost}")
    return Verdict(tuple(lines), tuple(problems))


def difference(one: float, other: float) -> float:
    """Relative; infinite where one of them is NaN."""
    found = abs(one / other - 1)
    return inf if isnan(found) else found


@contextmanager
def lab_of(folder: Path | None) -> Iterator[Lab]:
    """The lab in a folder, or a new one that ends with the block."""
    if folder is not None:
        lab = Lab(folder)
        if not lab.is_up or len(lab.nodes) < NODES:
            raise UserError(f"The lab in {folder} is not up with {NODES} nodes. Start one: python -m tools.slurm_lab "
                            f"up {NODES} --folder {folder}")
        yield lab
        return
    with tempfile.TemporaryDirectory(prefix="lab-", dir="/tmp", ignore_cleanup_errors=True) as own:  # a short path
        lab = Lab(own)
        lab.up(NODES, accounting=not missing_programs())
        try:
            yield lab
        finally:
            lab.down()


def given_lab() -> Path | None:
    """The lab that SLURM_CONF names, if that is one."""
    folder = Path(os.environ.get("SLURM_CONF", "/nowhere/slurm.conf")).parent
    return folder if (folder / "lab.json").is_file() else None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--minutes", type=float, default=2.0, help="how long faults happen (%(default)s)")
    result.add_argument("--seed", type=int, default=0, help="of the order of faults (%(default)s)")
    result.add_argument("--lab", type=Path, default=given_lab(), metavar="FOLDER",
                        help="a lab that is up (default: the one of SLURM_CONF, else one of its own)")
    result.add_argument("--folder", type=Path, help="where the run is made (default: a new one in /tmp)")
    result.add_argument("--keep", action="store_true", help="leave the folder; it stays anyway where something failed")
    return result


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit status."""
    options = parser().parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp")) if options.folder is None else options.folder
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if next(read_lines(folder / "chaos.jsonl"), None) is not None:
        print(f"{folder} holds a soak already; choose another --folder.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its lab must not outlive it
    try:
        with lab_of(options.lab) as lab:
            run = SoakRun(folder, lab, NODES)
            try:
                verdict = soak(run, options.minutes, options.seed)
            except Stuck as stuck:
                verdict = Verdict((), (str(stuck),))
            finally:
                for job in run.chain.jobs if run.chain and run.queued() else ():
                    run.scheduler.cancel(job.id)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"stopped; nothing of it runs any more. What it did is in {folder}", file=sys.stderr)
        return 130
    print("\n".join(verdict.lines))
    for problem in verdict.problems:
        print(f"WRONG        {problem}")
    print(f"all holds (seed {options.seed})" if not verdict.problems else f"see {folder}")
    if options.folder is None and not options.keep and not verdict.problems:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main())
