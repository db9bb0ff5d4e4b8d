"""A rank's part of the preflight: it looks at its node, measures with the others, and writes down what it found.

    srun ... python -m launch.slurm.job.rank -- python -m launch.slurm.job.node_trial RUN_FOLDER SECONDS

One task per rank, as training will have them. The first task of a node looks at the node; all measure. Each prints its
report twice, as a line of JSON: before it meets the others, and at the end. So the log of a node is its one file.
`launch.slurm.job.preflight` judges.

For tests, DROVER_PREFLIGHT_FAULT="n3:disk" makes a node fail: disk, shm, gpu (its own), space, folder (of the run
folder), clock, slow, link (late in every exchange), network (stays away from the others), silent (reports nothing).
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from launch.slurm.job.rank import visible_gpus

SMI_S = 15.0
"""For an answer of nvidia-smi, which loads the driver first where nothing keeps it loaded; a node whose driver does not
answer needs twice as long to say so."""
LEAST_DISK = 1 << 30
LEAST_SHARED = 64 << 20
"""Bytes free that a node needs in the run folder and in /dev/shm."""
CLOCK_S = 5.0
"""How far a node's clock may be from the file system's and from the others'."""
SPACE, FOLDER, CLOCK, SHARED_MEMORY, GPU = "space", "folder", "clock", "shm", "gpu"
"""Kinds of problems; the first three may be the shared run folder's."""
REPEATS = 5


class Problem(NamedTuple):
    """What is wrong: its kind, by which nodes are compared, and in words."""

    kind: str
    text: str


@dataclass
class Report:
    """What a rank found.

    problems: what is wrong with the node, from its first rank. clock_at: its time, all ranks having met a moment
    before; from its first rank. product_s, reduce_s: best of several. pair_s: best over all partners on other nodes,
    so that a slow partner does not show. finished: it met the others and nothing is left to do.
    """

    rank: int
    node: str
    problems: list[Problem] = field(default_factory=list)
    device: str = "cpu"
    clock_at: float | None = None
    product_s: float | None = None
    pair_s: float | None = None
    reduce_s: float | None = None
    finished: bool = False


def check_node(run_folder: Path, gpus: int, shared: Path = Path("/dev/shm")) -> list[Problem]:
    """What is wrong here."""
    found, probe = [], run_folder / "launch" / f"probe-{platform.node()}-{os.getpid()}.tmp"
    try:
        written = os.urandom(4096)
        probe.write_bytes(written)
        if probe.read_bytes() != written:
            found.append(Problem(FOLDER, f"a file in {run_folder} does not read back as it was written"))
        drift = time.time() - probe.stat().st_mtime
        if abs(drift) > CLOCK_S:
            way = "ahead of" if drift > 0 else "behind"
            found.append(Problem(CLOCK, f"its clock is {abs(drift):.0f} s {way} the file system's"))
        if (free := shutil.disk_usage(run_folder).free) < LEAST_DISK:
            found.append(Problem(SPACE, f"only {free / 1e6:.0f} MB are free in {run_folder}"))
        probe.unlink()
    except OSError as error:
        found.append(Problem(FOLDER, f"it cannot write into {run_folder}: {error.strerror}"))
    try:
        if (free := shutil.disk_usage(shared).free) < LEAST_SHARED:
            found.append(Problem(SHARED_MEMORY, f"only {free / 1e6:.0f} MB are free in {shared}"))
    except OSError:
        found.append(Problem(SHARED_MEMORY, f"{shared} is not there"))
    return found + ([Problem(GPU, text) for text in check_gpus(gpus)] if gpus else [])


def check_gpus(wanted: int) -> list[str]:
    """What is wrong with the job's GPUs of this node, as their driver sees it."""
    if (seen := visible_gpus(os.environ)) < wanted:
        return [f"{seen} GPUs instead of {wanted}"]
    names = ("index", "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.hw_slowdown",
             "clocks_throttle_reasons.hw_thermal_slowdown")
    found = []
    rows = _smi("--query-gpu=" + ",".join(names))
    if rows is None:
        return ["nvidia-smi does not answer"]
    for index, errors, slowdown, thermal in rows:
        if errors.isdigit() and int(errors):
            found.append(f"GPU {index} has {errors} uncorrected memory errors")
        if "Active" in (slowdown, thermal):
            found.append(f"GPU {index} is throttled by its hardware ({'heat' if thermal == 'Active' else 'power'})")
    foreign = [pid for pid, *_ in _smi("--query-compute-apps=pid,used_memory") or [] if _is_foreign(pid)]
    return found + ([f"other processes compute on its GPUs (process {', '.join(foreign[:3])})"] if foreign else [])


def _smi(query: str) -> list[list[str]] | None:
    """Rows about the job's GPUs; None: no answer, twice."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "")
    only = [f"--id={visible}"] if visible and "MIG" not in visible else []
    for _ in range(2):
        try:
            answer = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits", *only], capture_output=True,
                                    text=True, timeout=SMI_S, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        return [[field.strip() for field in line.split(",")] for line in answer.splitlines() if line.strip()]
    return None


def _is_foreign(pid: str) -> bool:
    """Whether a process is not of this job. One that is not to be seen from here is not judged."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return True
    except OSError:
        return False
    return f"SLURM_JOB_ID={os.environ.get('SLURM_JOB_ID')}".encode() not in environment.split(b"\0")


def pairings(count: int) -> list[list[int | None]]:
    """The partner of each node in each round, None for one that sits out: the first rounds of a tournament.

    From three nodes on each has at least two different partners.
    """
    even = count + count % 2

    def partner(node: int, number: int) -> int | None:
        other = (number - node) % (even - 1)  # of two whose sum is the round's number; the last node meets who is left
        if node == even - 1:
            other = number * even // 2 % (even - 1)
        elif other == node:
            other = even - 1
        return other if other < count else None

    return [[partner(node, number) for node in range(count)] for number in range(min(3, even - 1))]


def try_node(run_folder: Path, limit_s: float) -> None:
    """This rank's part. limit_s: how long the others are waited for at most."""
    node, rank = os.environ.get("SLURMD_NODENAME") or platform.node(), int(os.environ["RANK"])
    fault = _fault(node)
    if fault == "silent":
        return
    report = Report(rank, node)
    if int(os.environ["LOCAL_RANK"]) == 0:
        report.problems = check_node(run_folder, int(os.environ.get("DROVER_GPUS") or 0))
        if fault in ("disk", SPACE, FOLDER, SHARED_MEMORY, GPU):
            report.problems.append(Problem(fault, f"made to fail: {fault}"))
    print(json.dumps(asdict(report)) + "\n", end="", flush=True)  # in one write, which nothing can cut
    if fault == "network":
        time.sleep(limit_s)
    measure(report, limit_s, fault)
    report.finished = True
    print(json.dumps(asdict(report)) + "\n", end="", flush=True)


def measure(report: Report, limit_s: float, fault: str = "") -> None:
    """A product alone, exchanges with single nodes, then an all-reduce, with the backend that training will use."""
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    local, per_node = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
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
    if local == 0:
        report.clock_at = time.time() + (60 if fault == "clock" else 0)

    def best(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(REPEATS):
            dist.all_reduce(total[:1])  # so that all measure at the same time
            if gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            if gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    def exchange(partner: int | None) -> None:
        if partner is None:
            return
        if fault == "link":
            time.sleep(0.4)
        other = partner * per_node + local
        for task in dist.batch_isend_irecv([dist.P2POp(dist.isend, total, other),
                                            dist.P2POp(dist.irecv, received, other)]):
            task.wait()

    report.product_s = best(lambda: torch.mm(matrix, matrix)) + (1.0 if fault == "slow" else 0.0)
    own, nodes = dist.get_rank() // per_node, dist.get_world_size() // per_node
    met = [(partners[own], best(partial(exchange, partners[own]))) for partners in pairings(nodes)]
    report.pair_s = min((seconds for partner, seconds in met if partner is not None), default=None)
    report.reduce_s = best(lambda: dist.all_reduce(total))
    dist.barrier()
    dist.destroy_process_group()


def _fault(node: str) -> str:
    faults = dict(entry.partition(":")[::2] for entry in os.environ.get("DROVER_PREFLIGHT_FAULT", "").split(","))
    return faults.get(node, "")


if __name__ == "__main__":
    try_node(Path(sys.argv[1]), float(sys.argv[2]))
