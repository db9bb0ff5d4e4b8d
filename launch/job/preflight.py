"""The preflight, a short test of every node before training: memory, GPUs, run folder, and one all-reduce.

    srun ... python -m drover.launch.job.rank preflight RANKS GPUS \\
        python -m drover.launch.job.preflight RUN_FOLDER SECONDS GPUS

One task per rank, as in training. The first task of a node tests the node; all meet. Each prints its report as a line
of JSON twice: before it meets the others, and after. A node thus writes one file, its log.

The runner judges the nodes by these reports, and when the time is up by those that exist. A node is blamed only for
what distinguishes it from the others, and never more than a few at once (`nodes.few`). If more of them have a problem,
or if it is in what they share, the cause is common to them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from drover.launch.devices import for_amd, has_one_of, smi, visible_gpus
from drover.launch.job.host import Host, JobSpec
from drover.launch.job.rank import PREFLIGHT
from drover.launch.processes import Each, answer_of
from drover.launch.slurm.nodes import few, named
from drover.launch.slurm.start_logs import labelled, last_lines
from drover.pipeline.core.console import counted

BASE_S, PER_NODE_S, LONGEST_S = 180.0, 0.5, 1800.0
"""Time limit, which grows with the number of nodes: all ranks import from one file system at once."""
GRACE_S = 30.0
"""For how long a rank that met nobody stays, so that srun does not end the others before they fail too."""
LEAST_DISK, LEAST_SHARED = 1 << 30, 64 << 20
"""The least free bytes in the run folder and in /dev/shm."""


@dataclass
class RankReport:
    """What a rank reports.

    problem: the first one of the node, from its first rank. shared: it is in what all nodes share: the run folder, or
    the site's own test.
    met: it has met all others.
    """

    rank: int
    node: str
    problem: str = ""
    shared: bool = False
    met: bool = False


@dataclass
class PreflightResult:
    """The result of a preflight.

    bad: nodes with their problems. lines: for the job's log. reason: why the job ends although no node is to blame: no
    node gets a failure record, and other nodes would not help.
    """

    bad: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    reason: str = ""


# ---- the runner's part


def run_preflight(spec: JobSpec, host: Host, folder: Path, environment: dict[str, str], each: Each
                  ) -> PreflightResult:
    """Test the nodes of this job; the runner calls this before the first start."""
    limit_s = min(LONGEST_S, BASE_S + PER_NODE_S * spec.nodes)
    rank_nodes = [host.nodes[rank // spec.tasks_per_node] for rank in range(spec.ranks)]  # Slurm distributes in blocks
    trial = [*spec.wrap, spec.command[0], "-m", "drover.launch.job.preflight", spec.run, f"{limit_s:.0f}",
             str(spec.gpus_per_node), *spec.health_check]
    began = time.monotonic()
    end = host.start(replace(spec, stage=PREFLIGHT), trial, environment, folder,
                     lambda: each() and time.monotonic() - began < limit_s)
    seconds = time.monotonic() - began
    reports = read_reports(folder)
    result = judge(reports, rank_nodes)
    met = sum(report.met for report in reports)
    if not met and end.exit_code and seconds < limit_s:  # no rank could begin, or all failed
        lines = [line for rank in range(0, spec.ranks, spec.tasks_per_node)
                 for line in last_lines(folder, rank, spec.tasks_per_node, 1)]
        if len(lines) == spec.nodes and len({re.sub("[0-9]+", "#", line) for line in lines}) == 1:
            result.reason = result.reason or (
                f"{lines[0]} (the same on all nodes, so none is to blame. If it names a network interface, look at "
                f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in launch.environment)")
    if met == spec.ranks:
        result.lines.append(f"{counted(spec.nodes, 'node')} answered in {seconds:.0f} s")
    elif not result.reason and not result.bad:
        result.lines += [f"after {seconds:.0f} s{f' ({end.cause})' if end.cause else ''} no node can be blamed; "
                         f"training starts", *last_lines(folder, end.rank, spec.tasks_per_node, 1)]
    return result


def read_reports(folder: Path) -> list[RankReport]:
    """The newest report of each rank, from the nodes' logs. Other lines are skipped."""
    texts = defaultdict[int, bytes](bytes)
    reports = dict[int, RankReport]()
    for path in folder.glob("node*.log"):
        with suppress(OSError), open(path, "rb") as file:
            for rank, text in labelled(file):
                texts[rank] += text
    for rank, text in sorted(texts.items()):
        for line in text.splitlines():
            with suppress(ValueError, TypeError):
                reports[rank] = RankReport(**json.loads(line))
    return list(reports.values())


def judge(reports: Sequence[RankReport], rank_nodes: Sequence[str]) -> PreflightResult:
    """Decide which nodes are bad.

    Args:
        reports: of the ranks that sent one.
        rank_nodes: the node of each rank.
    """
    count = len({*rank_nodes})
    most = few(count)
    bad = {report.node: report.problem for report in reports if report.problem}
    result = PreflightResult(bad)
    common = f"of {counted(count, 'node')} at once, which has a cause in common: no node gets a failure record"
    if len(bad) > most or 2 * len({report.node for report in reports if report.shared}) > count:
        result.reason = (f"{next(iter(bad.values()))} ({named(bad)}: {len(bad)} {common}. If these nodes are bad, "
                         f"exclude them by launch.exclude and submit the same command again)")
        return result

    ranks = {report.rank for report in reports}
    silent = {node: "it did not report" for rank, node in enumerate(rank_nodes) if rank not in ranks}
    if len({*silent, *bad}) > most or 2 * len(silent) >= count:
        result.lines.append(f"{named(silent)}: did not report. These are {len(silent)} {common}")
    else:
        bad.update({**silent, **bad})  # the first reason counts
    return result


# ---- a rank's part


def try_node(run_folder: Path, limit_s: float, gpus: int, *health_check: str) -> None:
    """Do this rank's part. limit_s: how long to wait for the other ranks, at most. gpus: of a node."""
    report = RankReport(int(os.environ["RANK"]), os.environ.get("SLURMD_NODENAME") or platform.node())
    alone = has_one_of(gpus, os.environ)
    gpus = 1 if alone else gpus
    if report.rank % int(os.environ["LOCAL_WORLD_SIZE"]) == 0:
        report.problem, report.shared = next(node_problems(run_folder, gpus, limit_s, health_check), ("", False))
    elif alone:
        report.problem = gpu_problem(gpus)
    send(report)
    try:
        meet(report, limit_s, gpus)
    except Exception as error:  # noqa: BLE001 - whatever torch raises is a finding, and this rank's end
        text = str(error).partition("Exception raised from")[0]
        for pause_s in (min(GRACE_S, limit_s), 0.0):  # said again at the end: other threads may have had the last line
            print(f"{type(error).__name__}: {' '.join(text.split())}", flush=True)
            time.sleep(pause_s)
        os._exit(1)
    send(report)


def node_problems(run_folder: Path, gpus: int, limit_s: float, health_check: Sequence[str] = (),
                  shared_memory: Path = Path("/dev/shm")) -> Iterator[tuple[str, bool]]:
    """Problems of this node, each with whether it is in what all nodes share."""
    probe = run_folder / "launch" / f"probe-{platform.node()}-{os.getpid()}.tmp"
    try:
        probe.write_bytes(bytes(4096))
        probe.unlink()
        if (free := shutil.disk_usage(run_folder).free) < LEAST_DISK:
            yield f"only {free / 1e6:.0f} MB are free in {run_folder}", True
    except OSError as error:
        yield f"it cannot write into {run_folder}: {error.strerror}", True
    if not shared_memory.exists() or shutil.disk_usage(shared_memory).free < LEAST_SHARED:
        yield f"{shared_memory} does not exist or has less than {LEAST_SHARED >> 20} MB free", False
    if gpus and (problem := gpu_problem(gpus)):
        yield problem, False
    if health_check:
        try:
            status, output, errors = answer_of(health_check, os.environ, limit_s / 3)
        except (OSError, subprocess.TimeoutExpired) as error:
            yield f"launch.health_check did not run: {error}", True
            return
        if status:
            *_, last = ["", *(errors + output).strip().splitlines()]
            yield last or f"launch.health_check failed with exit status {status}", True


def gpu_problem(wanted: int) -> str:
    """What is wrong with the job's GPUs on this node; empty if nothing. Their health is for the site's own test."""
    if (seen := visible_gpus(os.environ)) < wanted:
        return f"{seen} GPUs instead of {wanted}"
    return "" if for_amd() or smi("--query-gpu=index") else "nvidia-smi does not answer"


def send(report: RankReport) -> None:
    """Print a report for `read_reports`."""
    print(json.dumps(asdict(report)) + "\n", end="", flush=True)  # one write, so that no other line can split it


def meet(report: RankReport, limit_s: float, gpus: int) -> None:
    """Sum a tensor over all ranks, with the backend that training will use. If the node has `gpus` and torch cannot use
    them, that is a problem, and this rank meets nobody."""
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    if gpus and not gpu:
        if report.rank % int(os.environ["LOCAL_WORLD_SIZE"]) == 0:
            report.problem = report.problem or (f"torch {torch.__version__} cannot use its GPUs: their driver may be "
                                                f"too old for it")
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=limit_s),
                            device_id=device if gpu else None)
    dist.all_reduce(torch.ones(1 << 20, device=device))
    dist.barrier()
    report.met = True
    dist.destroy_process_group()


if __name__ == "__main__":
    try_node(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
