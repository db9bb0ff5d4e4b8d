"""A rank's part of the preflight: test its node, measure with the others, and print a report.

    srun ... python -m drover.launch.job.rank preflight RANKS GPUS \\
        python -m drover.launch.job.node_trial RUN_FOLDER SECONDS GPUS

One task per rank, as in training. The first task of a node tests the node; all measure. Each prints its report as a
line of JSON twice: before it meets the others, and at the end. A node thus writes one file, its log.
`drover.launch.job.preflight` judges the reports.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from drover.launch.devices import for_amd, has_one_of, smi, visible_gpus
from drover.launch.processes import answer_of
from drover.launch.slurm.start_logs import labelled

LEAST_DISK = 1 << 30
LEAST_SHARED = 64 << 20
"""The least free bytes in the run folder and in /dev/shm."""
FOLDER = "folder"
SHARED_MEMORY = "shm"
GPU = "gpu"
OWN = "own"
"""Kinds of problems: of the shared run folder, of the node's own, and what the site's own test says."""
GRACE_S = 30.0
"""For how long a rank whose measurements failed stays, so that srun does not end the others before they fail too."""
PRODUCT = "a matrix product"
EXCHANGE = "an exchange with another node"
REPEATS = 5
ROUNDS = 3
"""Rounds of exchanges. With three or more nodes each node has two different partners, so that a slow partner does not
make it look slow."""


@dataclass
class RankReport:
    """What a rank reports.

    problems: of the node, by kind; from its first rank.
    times: seconds of each measurement, the best of several; empty before it has met the others.
    failed: the error that ended the measurements.
    """

    rank: int
    node: str
    problems: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    times: dict[str, float] = field(default_factory=dict)
    failed: str = ""


def check_node(run_folder: Path, gpus: int, shared: Path = Path("/dev/shm")) -> dict[str, str]:
    """Problems of this node, by kind."""
    problems = dict[str, str]()
    probe = run_folder / "launch" / f"probe-{platform.node()}-{os.getpid()}.tmp"
    try:
        probe.write_bytes(bytes(4096))
        probe.unlink()
        if (free := shutil.disk_usage(run_folder).free) < LEAST_DISK:
            problems[FOLDER] = f"only {free / 1e6:.0f} MB are free in {run_folder}"
    except OSError as error:
        problems[FOLDER] = f"it cannot write into {run_folder}: {error.strerror}"
    try:
        if (free := shutil.disk_usage(shared).free) < LEAST_SHARED:
            problems[SHARED_MEMORY] = f"only {free / 1e6:.0f} MB are free in {shared}"
    except OSError:
        problems[SHARED_MEMORY] = f"{shared} does not exist"
    if gpus and (problem := check_gpus(gpus)):
        problems[GPU] = problem
    return problems


def check_gpus(wanted: int) -> str:
    """What is wrong with the job's GPUs on this node; empty if nothing. Their health is for the site's own test."""
    if (seen := visible_gpus(os.environ)) < wanted:
        return f"{seen} GPUs instead of {wanted}"
    return "" if for_amd() or smi("--query-gpu=index") else "nvidia-smi does not answer"


def failed(command: Sequence[str], limit_s: float) -> str:
    """Why the site's own test fails; empty if it passes."""
    try:
        status, output, errors = answer_of(command, os.environ, limit_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"launch.health_check did not run: {error}"
    lines = (errors + output).strip().splitlines()
    return (lines[-1] if lines else f"launch.health_check failed with exit status {status}") if status else ""


def partner_of(node: int, number: int, nodes: int) -> int:
    """The node that exchanges with `node` in round `number`; `node` itself if it pauses in this round."""
    return (number - node) % nodes


def try_node(run_folder: Path, limit_s: float, gpus: int, *health_check: str) -> None:
    """Do this rank's part. limit_s: how long to wait for the other ranks, at most. gpus: of a node."""
    report = RankReport(int(os.environ["RANK"]), os.environ.get("SLURMD_NODENAME") or platform.node())
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    alone = has_one_of(gpus, os.environ)
    if alone:
        gpus = 1
    if report.rank % per_node == 0:
        report.problems = check_node(run_folder, gpus)
        if health_check and (problem := failed(health_check, limit_s / 3)):
            report.problems[OWN] = problem
    elif alone and (problem := check_gpus(gpus)):
        report.problems[GPU] = problem
    send(report)
    try:
        measure(report, limit_s, gpus)
    except Exception as error:  # whatever torch raises is a finding, and this rank's end
        text = str(error).partition("Exception raised from")[0]
        report.failed = f"{type(error).__name__}: {' '.join(text.split())}"
        send(report)
        time.sleep(min(GRACE_S, limit_s))
        raise
    send(report)


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
            report.problems.setdefault(GPU, f"torch {torch.__version__} cannot use its GPUs: their driver may be too "
                                            f"old for it")
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
    report.device = device.type
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


if __name__ == "__main__":
    try_node(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
