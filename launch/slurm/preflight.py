"""A minute's trial of every node before training: disk, memory, clock, GPUs, a product, the network.

    srun ... python -m launch.slurm.rank -- python -m launch.slurm.preflight FOLDER

One task per rank, as training will have them. Each writes `FOLDER/rank-<r>.json` as soon as it has looked at its own
node, and again after each measurement with the others: who is missing, and where, is seen from what is there when the
time is up. `judge` names the bad nodes.

For tests, DROVER_PREFLIGHT_FAULT="n3:disk" makes a node fail: disk, shm, clock, gpu, slow, network (stays away from
the others), silent (writes nothing).
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from launch.slurm.jobspec import JobSpec
from launch.slurm.rank import visible_gpus
from launch.slurm.steps import run_step, srun_command
from pipeline.files import read_json, write_json

LIMIT_S = 60.0
"""For all of it; then the step is ended, and judged by what is there."""
LEAST_DISK = 1 << 30
LEAST_SHARED = 64 << 20
"""Bytes free that a node needs in the run folder and in /dev/shm."""
CLOCK_S = 5.0
"""How far a node's clock may be from the others'."""
FLOORS_S = {"cpu": 0.1, "cuda": 0.005}
"""Less than this above the median is not slow, whatever the factor says: on a shared CPU a small time doubles for no
reason."""
MEASURED = {"product_s": "a matrix product", "reduce_s": "an all-reduce"}
ROUNDS = 5


@dataclass
class Report:
    """What a rank found.

    problems: what is wrong with the node, in words. clock_at: its time, all ranks having met a moment before.
    product_s, reduce_s: best of several. joined: whether it met the others. finished: nothing is left to do.
    """

    rank: int
    node: str
    problems: list[str] = field(default_factory=list)
    device: str = "cpu"
    joined: bool = False
    clock_at: float | None = None
    product_s: float | None = None
    reduce_s: float | None = None
    finished: bool = False


@dataclass(frozen=True)
class Found:
    """What preflight found: bad nodes with the reason, lines to say, and whether all nodes fail alike, so that it is
    not the nodes."""

    bad: dict[str, str]
    told: list[str]
    everywhere: bool = False


def run_preflight(spec: JobSpec, folder: Path, environment: dict[str, str], each: Callable[[], bool],
                  nodes: Sequence[str], limit_s: float = LIMIT_S) -> Found:
    """Try the nodes of this job; for the runner, before the first start."""
    began, said = time.monotonic(), list[str]()
    command = srun_command(spec, folder, [*spec.wrap, sys.executable, "-m", "launch.slurm.preflight", str(folder),
                                          spec.run])
    end = run_step(command, environment, folder, lambda: each() and time.monotonic() - began < limit_s, said.append)
    reports = read_reports(folder)
    seconds = time.monotonic() - began
    if not reports:  # nothing ran: the start of training will tell why
        return Found({}, [*said, f"no rank reported in {seconds:.0f} s ({end.cause or 'srun said nothing'}); going on"])
    bad = judge(reports, spec.ranks, spec.preflight_factor, places(spec, nodes))
    everywhere = len({report.node for report in reports} - bad.keys()) == 0 and len(set(bad.values())) == 1 \
        and len(bad) > 1
    if bad:
        return Found(bad, [f"{node} is bad: {reason}" for node, reason in sorted(bad.items())], everywhere)
    if not all(report.finished for report in reports):
        return Found({}, [f"not done after {seconds:.0f} s, and no node can be blamed; going on"])
    count = len({report.node for report in reports})
    times = [f"{what} {1000 * median(getattr(report, name) for report in reports):.1f} ms"
             for name, what in MEASURED.items()]
    return Found({}, [f"{count} node{'s' if count > 1 else ''} sound in {seconds:.0f} s ({', '.join(times)})"])


def places(spec: JobSpec, nodes: Sequence[str]) -> list[str]:
    """The node of each rank, as Slurm distributes them (in blocks)."""
    return [nodes[min(rank // spec.tasks_per_node, len(nodes) - 1)] for rank in range(spec.ranks)] if nodes else []


def judge(reports: Sequence[Report], ranks: int, factor: float, nodes: Sequence[str] = ()) -> dict[str, str]:
    """Bad nodes, each with the reason.

    Args:
        reports: of the ranks that wrote one.
        nodes: of each rank, for those that wrote none.
    """
    bad: dict[str, str] = {}
    for report in reports:
        if report.problems:
            bad.setdefault(report.node, report.problems[0])
    for rank in sorted(set(range(ranks)) - {report.rank for report in reports}):
        bad.setdefault(nodes[rank] if rank < len(nodes) else f"the node of rank {rank}", "it did not report")
    sound = [report for report in reports if report.node not in bad]
    joined = [report for report in sound if report.joined]
    if 2 * len(joined) > len(sound):  # where most did not come, it is not the few
        for report in sound:
            if not report.joined:
                bad.setdefault(report.node, "its ranks did not meet the others over the network")
    _judge_clocks(joined, bad)
    for name, what in MEASURED.items():
        _judge_times(joined, name, what, factor, bad)
    return bad


def _judge_clocks(reports: Sequence[Report], bad: dict[str, str]) -> None:
    times = {report.node: report.clock_at for report in reports if report.clock_at is not None}
    if len(times) < 2:
        return
    middle = median(times.values())
    for node, at in times.items():
        if abs(at - middle) > CLOCK_S:
            bad.setdefault(node, f"its clock is {abs(at - middle):.0f} s {'fast' if at > middle else 'slow'}")


def _judge_times(reports: Sequence[Report], name: str, what: str, factor: float, bad: dict[str, str]) -> None:
    times = [(report.node, value) for report in reports if (value := getattr(report, name)) is not None]
    if len(times) < 2:
        return
    middle, floor = median(value for _, value in times), min(FLOORS_S[report.device] for report in reports)
    for node, value in times:
        if value > factor * middle and value - middle > floor:
            bad.setdefault(node, f"{what} took {1000 * value:.0f} ms, {value / middle:.1f} times the others' "
                                 f"{1000 * middle:.0f} ms")


def read_reports(folder: Path) -> list[Report]:
    """What the ranks wrote so far."""
    found = []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            found.append(Report(**read_json(path)))
        except (OSError, ValueError, TypeError):
            continue
    return found


# ---- in each rank


def check_node(run_folder: Path, gpus: int, shared: Path = Path("/dev/shm")) -> list[str]:
    """What is wrong here, in words."""
    found, probe = [], run_folder / "launch" / f"probe-{platform.node()}-{os.getpid()}.tmp"
    try:
        written = os.urandom(4096)
        probe.write_bytes(written)
        if probe.read_bytes() != written:
            found.append(f"a file in {run_folder} does not read back as it was written")
        drift = time.time() - probe.stat().st_mtime
        if abs(drift) > CLOCK_S:
            found.append(f"its clock is {abs(drift):.0f} s {'ahead of' if drift > 0 else 'behind'} the file system's")
        if (free := shutil.disk_usage(run_folder).free) < LEAST_DISK:
            found.append(f"only {free / 1e6:.0f} MB are free in {run_folder}")
    except OSError as error:
        found.append(f"it cannot write into {run_folder}: {error.strerror}")
    finally:
        probe.unlink(missing_ok=True)
    try:
        if (free := shutil.disk_usage(shared).free) < LEAST_SHARED:
            found.append(f"only {free / 1e6:.0f} MB are free in {shared}")
    except OSError:
        found.append(f"{shared} is not there")
    return found + (check_gpus(gpus) if gpus else [])


def check_gpus(wanted: int) -> list[str]:
    """What is wrong with the node's GPUs, as their driver sees it."""
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
    try:
        answer = subprocess.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True,
                                timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [[field.strip() for field in line.split(",")] for line in answer.splitlines() if line.strip()]


def _is_foreign(pid: str) -> bool:
    """Whether a process is not of this job. One that is not to be seen from here is not judged."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return True
    except OSError:
        return False
    return f"SLURM_JOB_ID={os.environ.get('SLURM_JOB_ID')}".encode() not in environment.split(b"\0")


def try_node(folder: Path, run_folder: Path) -> None:
    """This rank's part: look at the node, then measure with the others, writing down each finding at once."""
    node, rank = os.environ.get("SLURMD_NODENAME") or platform.node(), int(os.environ["RANK"])
    fault = _fault(node)
    if fault == "silent":
        return
    report = Report(rank, node, check_node(run_folder, int(os.environ.get("DROVER_GPUS") or 0)))
    if fault in ("disk", "shm", "gpu"):
        report.problems.append(f"made to fail: {fault}")

    def note(**found: Any) -> None:
        for name, value in found.items():
            setattr(report, name, value)
        write_json(folder / f"rank-{rank}.json", asdict(report))

    note()
    if fault == "network":
        time.sleep(LIMIT_S)
    measure(note, fault)
    note(finished=True)


def measure(note: Callable[..., None], fault: str = "") -> None:
    """A product alone, then all together: the clock, and an all-reduce with the backend that training will use."""
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    size, dtype = (4096, torch.bfloat16) if gpu else (384, torch.float32)
    matrix, total = torch.ones(size, size, device=device, dtype=dtype), torch.ones(1 << (24 if gpu else 18),
                                                                                  device=device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=LIMIT_S),
                            device_id=device if gpu else None)
    dist.all_reduce(total)
    note(joined=True, device=device.type, clock_at=time.time() + (60 if fault == "clock" else 0))

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(ROUNDS):
            dist.all_reduce(total[:1])  # so that all measure at the same time
            began = time.perf_counter()
            work()
            if gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    product = best(lambda: torch.mm(matrix, matrix))
    note(product_s=product + (1.0 if fault == "slow" else 0.0))
    note(reduce_s=best(lambda: dist.all_reduce(total)))
    dist.barrier()
    dist.destroy_process_group()


def _fault(node: str) -> str:
    faults = dict(entry.partition(":")[::2] for entry in os.environ.get("DROVER_PREFLIGHT_FAULT", "").split(","))
    return faults.get(node, "")


if __name__ == "__main__":
    try_node(Path(sys.argv[1]), Path(sys.argv[2]))
