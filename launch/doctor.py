"""Test a Slurm site, and write a profile to start from.

    drover doctor                                 asks Slurm, then runs a small job in the default partition
    drover doctor --partition gpu --partition cpu a job in each of these
    drover doctor --cluster mine                  with the settings of a profile
    drover doctor --no-jobs                       asks only, and queues nothing
    drover doctor --write configs/clusters/mine.yaml

The job takes a minute on two nodes: Python and packages, GPUs, the shared folder (locks, renames, clocks), and an
all-reduce. Nothing stays behind but the profile.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

import drover
from drover.launch.plan import in_container
from drover.launch.slurm.job.node_trial import EXCHANGE, GPU, REDUCE, read_reports
from drover.launch.slurm.job.site_trial import RUNTIMES, NodeFacts
from drover.launch.slurm.scheduler import NodeKind, Scheduler, has_accounting, literal, most_elements, seconds
from drover.launch.slurm.submit.options import GPUS, directives, long_options, outer_python, preamble
from drover.launch.slurm.submit.sbatch import uninterrupted
from drover.launch.slurm.submit.snapshot import planned_snapshot, take_snapshot
from drover.launch.slurm.wait_reasons import is_stuck, meaning, refusal
from drover.pipeline.config.launching import LaunchConfig, minutes
from drover.pipeline.config.loading import load_config
from drover.pipeline.core.command_line import Parser, Program, add_json, refuse_low
from drover.pipeline.core.console import aligned, counted, echo
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import write_text

PACKAGE = Path(drover.__file__).parent
JOB = "drover"
OK, NOTE, PROBLEM = "ok", "note", "problem"
CLOCK_S = 1.0
"""Clocks that are further apart confuse logs. The preflight of a job refuses 5 s."""
SLOW_IMPORT_S = 20.0
SLOW_FOLDER_S = 3.0
TRIAL_S = 120
"""How long a node waits for the others."""
REPORT = re.compile(r"\s*(\d+: *)?(\{.*)?")
"""A report in a node's log, with srun's label, or an empty line."""
MINUTES = 10
"""Time limit of a job."""


@dataclass(frozen=True)
class Finding:
    """A row of the table. state: `ok`, `note` or `problem`; advice: what to do or to set, if anything."""

    what: str
    state: str
    found: str
    advice: str = ""


def judged(what: str, found: str, advice: str, *, bad: bool, state: str = PROBLEM) -> Finding:
    """A finding that is fine unless it is `bad`; only then it has this state and advice."""
    return Finding(what, state, found, advice) if bad else Finding(what, OK, found)


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("--cluster", metavar="PROFILE", help="use this profile's partition, account, QOS, memory, "
                                                             "setup, environment, Python, container and options")
    parser.add_argument("--partition", action="append", default=[], metavar="NAME",
                        help="test this partition; can be repeated")
    parser.add_argument("--runs-dir", default="runs", metavar="FOLDER", help="shared folder to test (default: runs)")
    parser.add_argument("--no-jobs", action="store_true", help="only ask Slurm, and queue nothing")
    parser.add_argument("--wait", type=float, default=10, metavar="MINUTES",
                        help="how long a job may wait in the queue (default 10)")
    parser.add_argument("--write", metavar="FILE", help="write a profile of the partitions named, or of all")
    add_json(parser)


def work(options: argparse.Namespace) -> int:
    """Ask, test, print; 1 if there is a problem."""
    refuse_low(options, "wait")
    if options.write and Path(options.write).exists():
        raise UserError(f"{options.write} exists already. Give another name, or remove it.")
    if shutil.which("sbatch") is None:
        raise UserError("There is no sbatch on PATH, so this is not a login node of a Slurm cluster. Log in to one, "
                        "load Slurm's module, or start a Slurm on this machine (docs/slurm.md).")
    chosen = [f"launch.cluster={options.cluster}"] if options.cluster else []
    launch = load_config(PACKAGE / "configs/demo.yaml", chosen, check=False).launch
    scheduler = Scheduler()
    kinds, settings = scheduler.node_kinds(), scheduler.site_settings()
    names = (options.partition or _usual_partitions(launch, kinds)) if kinds else []
    if unknown := set(names) - {kind.partition for kind in kinds}:
        raise UserError(f"There is no partition {', '.join(sorted(unknown))}. `sinfo` lists them.")
    findings = [*ask_slurm(scheduler, kinds, settings), *ask_here(Path(options.runs_dir))]
    facts = dict[str, list[NodeFacts]]()
    for name in [] if options.no_jobs else names:
        if not options.json:
            echo(f"testing partition {name} ...", file=sys.stderr)
        findings += try_partition(name, kinds, launch, Path(options.runs_dir), options.wait, facts)
    if options.write:
        Path(options.write).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(options.write), profile(kinds, settings, facts, options.partition))
    if options.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings],
                          "nodes": [asdict(node) for nodes in facts.values() for node in nodes]}, indent=1))
    else:
        echo("\n".join(aligned([("what", "", "found", "advice"), *((finding.what, finding.state, finding.found,
                                                                   finding.advice) for finding in findings)])))
        if options.write:
            echo(f"\nwrote {options.write}; use it with --cluster {options.write}")
    return any(finding.state == PROBLEM for finding in findings)


def ask_slurm(scheduler: Scheduler, kinds: Sequence[NodeKind], settings: dict[str, str]) -> Iterator[Finding]:
    """What Slurm answers without running a job."""
    if not kinds:
        yield Finding("Slurm", PROBLEM, "sinfo shows no partition", "look at `sinfo`; the controller may be down")
        return
    yield Finding("Slurm", OK, f"version {settings.get('SLURM_VERSION', 'unknown')}")
    for kind in kinds:
        yield Finding(f"partition {kind.partition}{'*' * kind.usual}", OK, _described(kind))
    if most := most_elements(settings):
        yield Finding("arrays", OK, f"at most {most:,} elements")
    if settings.get("JobRequeue") == "0":
        yield Finding("requeue", NOTE, "off by default", "if the site forbids it, requeue: false and train.links")
    else:
        yield Finding("requeue", OK, "allowed")
    if not has_accounting(settings):
        yield Finding("accounting", NOTE, "none; Drover relies on the run's own records")
    else:
        rows = scheduler.associations(getpass.getuser())
        found = "; ".join(" ".join(filter(None, row)) for row in rows) or "no association for you"
        yield Finding("account, QOS", OK if rows else NOTE, found, "set account: and qos: unless you use the defaults")


def ask_here(runs: Path) -> Iterator[Finding]:
    """What this login node shows."""
    yield Finding("Python here", OK, f"{sys.version.split()[0]} at {sys.executable}")
    if found := [name for name in RUNTIMES if shutil.which(name)]:
        yield Finding("containers here", OK, ", ".join(found), "container: {image: ...} runs the stages in one")
    if os.environ.get("MODULEPATH"):
        yield Finding("modules", OK, "this site has modules", "setup: [module load ...]")
    place = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(place).free / 1e9
    if os.access(place, os.W_OK):
        yield Finding("run folder", OK, f"{free:,.0f} GB free in {place}")
    else:
        yield Finding("run folder", PROBLEM, f"{place} is not writable",
                      "give a shared folder of yours with --runs-dir")


def try_partition(name: str, kinds: Sequence[NodeKind], launch: LaunchConfig, runs: Path, wait: float,
                  facts: dict[str, list[NodeFacts]]) -> Iterator[Finding]:
    """Run the job in a partition and judge what its nodes report. The reports are added to `facts`."""
    here = [kind for kind in kinds if kind.partition == name]
    new = not runs.exists()
    runs.mkdir(parents=True, exist_ok=True)
    folder, scheduler = Path(mkdtemp(prefix=".doctor-", dir=runs)).absolute(), Scheduler()
    (folder / "launch").mkdir()  # `check_node` writes there
    for ending in (signal.SIGTERM, signal.SIGHUP):  # then `finally` cancels the job
        if signal.getsignal(ending) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(ending, signal.default_int_handler)
    try:
        nodes = 2 if sum(kind.nodes for kind in here) > 1 else 1
        gpus = any(kind.gpus for kind in here)
        code, content = planned_snapshot(folder)
        take_snapshot(code, content)
        script = _script(name, nodes, gpus, launch, folder, code)
        with uninterrupted():
            number, problem = scheduler.submit(script)
        if problem is not None:
            said, advice = refusal(problem, "the profile may lack account, qos or constraint")
            yield Finding(f"job in {name}", PROBLEM, f"sbatch refused it: {said}", advice)
            return
        reason = _wait(scheduler, number, wait)
        facts[name] = read_reports(folder, NodeFacts)
        lines = [line for path in sorted(folder.glob("*.log")) for line in path.read_text(errors="replace").splitlines()
                 if not REPORT.fullmatch(line)]
        yield from judge(name, nodes, gpus, facts[name], reason, "\n".join(lines))
    finally:
        scheduler.cancel(f"--name={JOB}{folder.name}")  # by name, in case sbatch's answer was lost
        shutil.rmtree(folder, ignore_errors=True)
        if new:
            with suppress(OSError):
                runs.rmdir()


def judge(name: str, nodes: int, gpus: bool, facts: Sequence[NodeFacts], reason: str, log: str) -> Iterator[Finding]:
    """What the nodes' reports mean.

    gpus: a GPU was requested on each node. reason: why the job did not end, if it did not. log: what it printed outside
    of reports.
    """
    lines = log.splitlines()
    # The first error: what comes after follows from it.
    first = [*(line for line in lines if "error:" in line), *lines[-1:], "no node reported"][0]
    if not facts:
        yield Finding(f"job in {name}", PROBLEM, reason or first, "" if reason else refusal(
            first, "python: must exist on the nodes too; a venv on a login node's own disk does not")[1])
        return
    yield judged(f"job in {name}", f"{len(facts)} of {nodes} nodes reported: {', '.join(node.node for node in facts)}",
                 first if log else "", bad=len(facts) < nodes)
    for node in facts:
        for what, problem in node.problems.items():
            if what != "network" or all(GPU not in other.problems for other in facts):  # it has left the others alone
                yield Finding(f"  {node.node}", PROBLEM, problem)
    imports = [node.import_s for node in facts if node.import_s is not None]
    if imports:
        yield judged("  Python", f"{facts[0].python}, torch {facts[0].torch}, imported in {max(imports):.1f} s",
                     "put the environment on a local disk or into a container", bad=max(imports) > SLOW_IMPORT_S,
                     state=NOTE)
    kinds = sorted({node.gpu or "a GPU of unknown name" for node in facts if node.gpus})
    yield judged("  devices", f"{', '.join(kinds) or 'no GPU'}; {facts[0].cpus} cores a node",
                 "a GPU was requested; look at the partition's GRES and at launch.gpu_type",
                 bad=gpus and not all(node.gpus for node in facts))
    if runtimes := sorted({name for node in facts for name in node.runtimes}):
        yield Finding("  containers", OK, ", ".join(runtimes), "container: {image: ...} runs the stages in one")
    if len(facts) > 1:
        yield from _judge_together(facts)


def _judge_together(facts: Sequence[NodeFacts]) -> Iterator[Finding]:
    """What takes several nodes to see: clocks, the shared folder, the network."""
    clocks = [node.clock_at for node in facts if node.clock_at is not None]
    apart = max(clocks) - min(clocks) if clocks else 0.0
    if len(clocks) > 1:
        yield judged("  clocks", f"{apart:.2f} s apart", "ask the site to synchronize them", bad=apart > CLOCK_S)
    others = [node for node in facts if node.visible_s is not None]
    if others:
        seen = max(node.visible_s or 0.0 for node in others)
        yield judged("  shared folder", f"a renamed file shows after {max(0.0, seen):.2f} s",
                     "the file system caches missing names; status may lag behind", bad=seen > SLOW_FOLDER_S + apart,
                     state=NOTE)
        if all(node.locked_out for node in others):
            yield Finding("  locks between nodes", OK, "they exclude each other")
        else:
            yield Finding("  locks between nodes", PROBLEM, "two nodes held one lock",
                          "mount the run folder with flock (Lustre: -o flock)")
    times = {what: [node.times[what] for node in facts if what in node.times] for what in (EXCHANGE, REDUCE)}
    if all(times.values()):
        yield Finding("  network", OK, ", ".join(f"{what} {1000 * median(found):.1f} ms"
                                                for what, found in times.items()), "environment: NCCL_SOCKET_IFNAME")


def profile(kinds: Sequence[NodeKind], settings: dict[str, str], facts: dict[str, list[NodeFacts]],
            partitions: Sequence[str] = ()) -> str:
    """A profile of the site, or of some of its partitions, in YAML, with the reason for each value."""
    kinds = [kind for kind in kinds if not partitions or kind.partition in partitions]
    gpu = max(kinds, key=lambda kind: (kind.gpus, kind.usual, kind.nodes), default=None)
    cpu = next((kind for kind in kinds if not kind.gpus), None)
    lines = ["# Written by `drover doctor`. Review it, and add account, modules and time limits."]
    if gpu is not None:
        per = gpu.cpus // gpu.gpus if gpu.gpus else min(4, gpu.cpus)
        lines += [f"partition: {gpu.partition}", f"gpus_per_node: {gpu.gpus}",
                  f"cpus: {max(1, per)}  # {gpu.cpus} cores a node" + f", {gpu.gpus} GPUs" * bool(gpu.gpus),
                  'train: {mem: "0"}  # all memory of a node', 'evaluate: {mem: "0"}',
                  "# mem: 32G  # of the other stages; without it what the site gives by default",
                  "# account: my-project", "# setup: [module load cuda]"]
    if any(node.runtimes for nodes in facts.values() for node in nodes):
        lines.append("# container: {image: /shared/images/drover.sif}")
    lines.append(f"requeue: {str(settings.get('JobRequeue') != '0').lower()}")
    if gpu is not None:
        there, longest = sum(kind.nodes for kind in kinds if kind.partition == gpu.partition), seconds(gpu.longest, inf)
        lines += ["limits:", f"  nodes: {min(there, gpu.most)}", *[f"  time: {gpu.longest}"] * (longest < inf)]
        if longest < 60 * minutes(LaunchConfig().time):
            lines.append(f"time: {gpu.longest}  # the partition allows no more")
        if gpu.gpus and cpu is not None:
            lines += [f"{stage}: {{partition: {cpu.partition}}}" for stage in ("shard", "tokenizer", "encode",
                                                                               "convert", "report")]
    return "\n".join(lines) + "\n"


def _described(kind: NodeKind) -> str:
    gpus = f", {kind.gpus} GPUs" if kind.gpus else ""
    return (f"{counted(kind.nodes, 'node')} with {kind.cpus} cores, {kind.memory_mb / 1000:,.0f} GB"
            f"{gpus}; time limit {kind.longest or 'unknown'}, node limit {kind.most}")


def _usual_partitions(launch: LaunchConfig, kinds: Sequence[NodeKind]) -> list[str]:
    """The partitions of the profile, else the site's default, else its first."""
    usual = [kind.partition for kind in kinds if kind.usual] or [kinds[0].partition]
    return launch.partition.split(",") if launch.partition else usual[:1]


def _script(partition: str, nodes: int, gpus: bool, launch: LaunchConfig, folder: Path, code: Path) -> str:
    """The job's script: the environment of the profile, and one task on each node, from a copy of the code."""
    extra, one = long_options(launch.extra), f"{launch.gpu_type}:1" if launch.gpu_type else "1"
    asked = {"account": launch.account, "qos": launch.qos, "constraint": launch.constraint,
             "gpus-per-node": one if gpus and extra.keys().isdisjoint(GPUS) else None, **extra,
             "job-name": f"{JOB}{folder.name}", "mem": launch.mem, "partition": partition, "nodes": nodes,
             "ntasks-per-node": 1, "propagate": "NONE", "time": MINUTES, "output": literal(folder / "job.log"),
             "chdir": Path.cwd()}
    wrap, srun_args = in_container(launch.container, [folder, Path.cwd()], int(gpus),
                                   ["PYTHONPATH", *launch.environment])
    command = shlex.join([*wrap, *launch.wrap, launch.python or sys.executable, "-m",
                          "drover.launch.slurm.job.site_trial", str(folder), str(TRIAL_S)])
    srun = shlex.join(["srun", "--export=ALL", "--label", f"--output={literal(folder)}/node%n.log",
                       *srun_args, *launch.srun_args])
    python, source = outer_python(launch, bool(wrap or srun_args or launch.wrap)), shlex.quote(str(code))
    return "\n".join(["#!/bin/bash", *directives(asked), *preamble(launch),
                      f"export PYTHONPATH={source}${{PYTHONPATH:+:$PYTHONPATH}} MASTER_ADDR=$(hostname) "
                      f"MASTER_PORT=$({python} -c 'import socket; s = socket.create_server((\"\", 0)); "
                      f"print(s.getsockname()[1])')",
                      f"{srun} {command}", ""])


def _wait(scheduler: Scheduler, number: str, minutes: float) -> str:
    """Wait for the end of the job; "", or why it did not end. The caller cancels it then."""
    until, job = time.monotonic() + 60 * minutes, None
    while time.monotonic() < until or (job is not None and job.state == "RUNNING"):
        job = (scheduler.jobs([number]) or {}).get(number)
        if job is not None and (not job.queued or is_stuck(job.reason)):
            return f"{meaning(job.reason, number)} ({job.reason}); the job was cancelled" if job.queued else ""
        time.sleep(1)
    waits = f"still {job.state} ({job.reason})" if job is not None else "Slurm did not answer"
    return f"{waits} after {minutes:g} minutes; the job was cancelled"


main = Program("python -m drover.launch.doctor", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
