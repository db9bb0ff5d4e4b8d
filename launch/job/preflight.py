"""The preflight, a short test of every node before training: memory, GPUs, a product, network, run folder.

    srun ... python -m drover.launch.job.rank preflight RANKS GPUS \\
        python -m drover.launch.job.preflight RUN_FOLDER SECONDS GPUS

One task per rank, as in training. The first task of a node tests the node; all measure. Each prints its report as a
line of JSON twice: before it meets the others, and at the end. A node thus writes one file, its log.

The runner judges the nodes by these reports, and when the time is up by those that exist. A node that has not answered
yet is slow, not bad. A node is blamed only for what distinguishes it from the others, and never more than a few at once
(`nodes.few`). If more of them have a problem, or if it is in what they share, the cause is common to them.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from drover.launch.devices import for_amd, has_one_of, smi, visible_gpus
from drover.launch.job.host import Host, JobSpec
from drover.launch.job.rank import PREFLIGHT
from drover.launch.processes import Each, answer_of
from drover.launch.slurm.nodes import few, named
from drover.launch.slurm.start_logs import labelled, last_lines
from drover.pipeline.core.console import counted

BASE_S, PER_NODE_S, LONGEST_S = 180.0, 0.5, 1800.0
"""Time limit, which grows with the number of nodes: all ranks import from one file system at once."""
QUIET_S = 60.0
"""A missing node is stuck, not slow, if no other has reported for so long when the time is up."""
GRACE_S = 30.0
"""For how long a rank whose measurements failed stays, so that srun does not end the others before they fail too."""
FACTOR = 4.0
"""More than so many times the median is too slow."""
CPU_FLOOR_S, GPU_FLOOR_S = 0.1, 0.005
"""Less than this above the median is not slow, whatever the factor: on a shared CPU short times vary much."""
LEAST_DISK, LEAST_SHARED = 1 << 30, 64 << 20
"""The least free bytes in the run folder and in /dev/shm."""
PRODUCT = "a matrix product"
EXCHANGE = "an exchange with another node"
REPEATS = 5
ROUNDS = 3
"""Rounds of exchanges. With three or more nodes each node has two different partners, so that a slow partner does not
make it look slow."""


@dataclass
class RankReport:
    """What a rank reports.

    problem: the first one of the node, from its first rank. shared: it is in what all nodes share: the run folder, or
    the site's own test.
    times: seconds of each measurement, the best of several; empty before it has met the others.
    """

    rank: int
    node: str
    problem: str = ""
    shared: bool = False
    times: dict[str, float] = field(default_factory=dict)


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
    before: list[RankReport] | None = None  # those of QUIET_S before the time is up

    def has_time() -> bool:
        nonlocal before
        passed = time.monotonic() - began
        if before is None and passed >= limit_s - QUIET_S:
            before = read_reports(folder)
        return each() and passed < limit_s

    end = host.start(replace(spec, stage=PREFLIGHT), trial, environment, folder, has_time)
    seconds = time.monotonic() - began
    reports = read_reports(folder)
    result = judge(reports, rank_nodes, quiet=reports == before,
                   floor_s=GPU_FLOOR_S if spec.gpus_per_node else CPU_FLOOR_S)
    times = [report.times for report in reports if report.times]
    if not times and end.exit_code and seconds < limit_s:  # no rank could begin, or all failed
        lines = [line for rank in range(0, spec.ranks, spec.tasks_per_node)
                 for line in last_lines(folder, rank, spec.tasks_per_node, 1)]
        if len(lines) == spec.nodes and len({re.sub("[0-9]+", "#", line) for line in lines}) == 1:
            result.reason = result.reason or (
                f"{lines[0]} (the same on all nodes, so none is to blame. If it names a network interface, look at "
                f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in launch.environment)")
    if len(times) == spec.ranks:
        best = ", ".join(f"{what} {1000 * median(each[what] for each in times):.1f} ms" for what in times[0])
        result.lines.append(f"{counted(spec.nodes, 'node')} answered in {seconds:.0f} s ({best})")
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


def judge(reports: Sequence[RankReport], rank_nodes: Sequence[str], *, quiet: bool = True,
          floor_s: float = CPU_FLOOR_S) -> PreflightResult:
    """Decide which nodes are bad.

    Args:
        reports: of the ranks that sent one.
        rank_nodes: the node of each rank.
        quiet: whether no report came in the last QUIET_S.
        floor_s: what is above the median by less is not slow.
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

    def blame(causes: Mapping[str, str]) -> None:
        """Blame these nodes if they are less than half and, with those already blamed, few; else add a line."""
        if causes and (len({*causes, *bad}) > most or 2 * len(causes) >= count):
            result.lines.append(f"{named(causes)}: {next(iter(causes.values()))}. These are {len(causes)} {common}")
        else:
            bad.update({**causes, **bad})  # the first reason counts

    ranks = {report.rank for report in reports}
    silent = {node: "it did not report" for rank, node in enumerate(rank_nodes) if rank not in ranks}
    if silent and not quiet:
        result.lines.append(f"not all nodes have answered yet: {named(silent)} ({len(silent)} of {count}); slow is not "
                            f"bad, so none gets a failure record")
    else:
        blame(silent)
    for what in (PRODUCT, EXCHANGE) if count > 2 else (PRODUCT,):  # of two nodes nobody knows whose the link is
        times = [(report.node, report.times[what]) for report in reports
                 if what in report.times and report.node not in bad]
        middle = median([value for _, value in times] or [0])
        blame({node: f"{what} took {1000 * value:.0f} ms, {value / middle:.1f} times the others' {1000 * middle:.0f} ms"
               for node, value in times if value > FACTOR * middle and value - middle > floor_s})
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
        measure(report, limit_s, gpus)
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


def measure(report: RankReport, limit_s: float, gpus: int) -> None:
    """Time a matrix product and exchanges with single nodes, with the backend that training will use. If the node has
    `gpus` and torch cannot use them, that is a problem, and nothing is timed."""
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    local = report.rank % per_node  # the device's number is another one where a task sees its own GPU only
    if gpus and not gpu:
        if local == 0:
            report.problem = report.problem or (f"torch {torch.__version__} cannot use its GPUs: their driver may be "
                                                f"too old for it")
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    synchronize = partial(torch.cuda.synchronize, device) if gpu else lambda: None
    if gpu:
        torch.cuda.set_device(device)
    size, dtype = (4096, torch.bfloat16) if gpu else (384, torch.float32)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    total = torch.ones(1 << (24 if gpu else 20), device=device)
    received = torch.empty_like(total)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=limit_s),
                            device_id=device if gpu else None)
    dist.all_reduce(total)
    own = dist.get_rank() // per_node
    nodes = dist.get_world_size() // per_node

    def best(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(REPEATS):
            dist.all_reduce(total[:1])  # all ranks then measure at the same time
            synchronize()
            began = time.perf_counter()
            work()
            synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    def exchange(partner: int) -> None:
        if partner != own:
            other = partner * per_node + local
            for task in dist.batch_isend_irecv([dist.P2POp(dist.isend, total, other),
                                                dist.P2POp(dist.irecv, received, other)]):
                task.wait()

    report.times[PRODUCT] = best(partial(torch.mm, matrix, matrix))
    for number in range(ROUNDS):
        partner = partner_of(own, number, nodes)
        seconds = best(partial(exchange, partner))
        if partner != own:
            report.times[EXCHANGE] = min(seconds, report.times.get(EXCHANGE, seconds))
    dist.barrier()
    dist.destroy_process_group()


def partner_of(node: int, number: int, nodes: int) -> int:
    """The node that exchanges with `node` in round `number`; `node` itself if it pauses in this round."""
    return (number - node) % nodes


if __name__ == "__main__":
    try_node(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
