"""A short trial of every node before training: memory, clock, GPUs, a product, the network, and the run folder.

`launch.slurm.node_trial` is what each rank does; here the nodes are judged by what the ranks wrote, and when the time
is up by what is there. Blamed is a node only for what sets it apart: what most nodes see in the shared run folder is
the folder's fault, and of nodes that are silent or late less than half can be at fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median

from launch.slurm.jobspec import JobSpec
from launch.slurm.node_trial import CLOCK, CLOCK_S, FOLDER, LIMIT_S, SPACE, Problem, Report
from launch.slurm.steps import run_step, srun_command
from pipeline.files import read_json

EARLY_S = 15.0
"""So long before the end most ranks must have reported, if one that has not is to be blamed."""
FLOORS_S = {"cpu": 0.1, "cuda": 0.005}
"""Less than this above the median is not slow, whatever the factor says: on a shared CPU a small time doubles for no
reason."""
MEASURED = {"product_s": "a matrix product", "pair_s": "an exchange with another node"}
TOLD = {**MEASURED, "reduce_s": "an all-reduce"}
"""What nodes are judged by, and what is told besides: in an all-reduce everyone takes as long as the slowest."""


@dataclass(frozen=True)
class Found:
    """What preflight found.

    bad: nodes with the reason. told: lines to say. everywhere: it is not the nodes: no strikes, and no other nodes
    would help; `reason` is the whole sentence then.
    """

    bad: dict[str, str]
    told: list[str]
    everywhere: bool = False
    reason: str = ""


@dataclass
class Judgement:
    """bad: nodes to blame. shared: what ends the job although no node is to blame, as the nodes that saw it found it.
    told: what else there is to say."""

    bad: dict[str, Problem] = field(default_factory=dict)
    shared: dict[str, Problem] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)


def run_preflight(spec: JobSpec, folder: Path, environment: dict[str, str], each: Callable[[], bool],
                  nodes: Sequence[str], limit_s: float = LIMIT_S) -> Found:
    """Try the nodes of this job; for the runner, before the first start."""
    began, said, reporting = time.monotonic(), list[str](), _Majority(folder, spec.ranks)
    command = srun_command(spec, folder, [*spec.wrap, spec.command[0], "-m", "launch.slurm.node_trial", str(folder),
                                          spec.run])

    def goes_on() -> bool:
        reporting.look()
        return each() and time.monotonic() - began < limit_s

    end = run_step(command, environment, folder, goes_on, said.append)
    reports = read_reports(folder)
    seconds = time.monotonic() - began
    if not reports:  # nothing ran: the start of training will tell why
        return Found({}, [*said, f"no rank reported in {seconds:.0f} s ({end.cause or 'srun said nothing'}); going on"])
    found = judge(reports, spec.ranks, spec.preflight_factor, places(spec, nodes), reporting.since_s)
    return _told(found, reports, nodes, seconds, end.cause)


def _told(found: Judgement, reports: Sequence[Report], nodes: Sequence[str], seconds: float, cause: str) -> Found:
    there = {*nodes, *(report.node for report in reports)}
    if found.shared:
        reason = (f"{next(iter(found.shared.values())).text} ({_counted(len(found.shared), len(there))}; the folder is "
                  f"shared, so no node is to blame)")
        return Found(_texts(found.shared), [*found.told, reason], True, reason)
    if found.bad:
        lines = [*found.told, *(f"{node} is bad: {problem.text}" for node, problem in sorted(found.bad.items()))]
        if len(there) > 1 and found.bad.keys() == there and len({problem.kind for problem in found.bad.values()}) == 1:
            reason = f"{next(iter(found.bad.values())).text} (on all {len(there)} nodes alike: it is not the nodes)"
            return Found(_texts(found.bad), lines, True, reason)
        return Found(_texts(found.bad), lines)
    if not all(report.finished for report in reports):
        because = f" ({cause})" if cause else ""
        return Found({}, [*found.told, f"not done after {seconds:.0f} s{because}, and no node can be blamed; going on"])
    values = {what: [value for report in reports if (value := getattr(report, name)) is not None]
              for name, what in TOLD.items()}
    times = [f"{what} {1000 * median(found):.1f} ms" for what, found in values.items() if found]
    return Found({}, [*found.told, f"{len(there)} node{'s' if len(there) > 1 else ''} sound in {seconds:.0f} s "
                                   f"({', '.join(times)})"])


def places(spec: JobSpec, nodes: Sequence[str]) -> list[str]:
    """The node of each rank, as Slurm distributes them (in blocks)."""
    return [nodes[min(rank // spec.tasks_per_node, len(nodes) - 1)] for rank in range(spec.ranks)] if nodes else []


def judge(reports: Sequence[Report], ranks: int, factor: float, nodes: Sequence[str] = (),
          since_s: float = inf) -> Judgement:
    """Which nodes are bad.

    Args:
        reports: of the ranks that wrote one.
        factor: how much longer than the median is too slow.
        nodes: the node of each rank, as far as it is known.
        since_s: how long before the end most ranks had reported.
    """
    there, result = {*nodes, *(report.node for report in reports)}, Judgement()
    _judge_problems(reports, len(there), result)
    missing = sorted(set(range(ranks)) - {report.rank for report in reports})
    silent = {nodes[rank]: Problem("silent", "it did not report") for rank in missing if rank < len(nodes)}
    if missing and since_s < EARLY_S:
        result.told.append(f"{len(missing)} of {ranks} ranks had not reported yet when the trial ended")
    else:
        _blame_few(silent, there, "did not report", result)
    finished = [report for report in reports if report.finished]
    if 2 * len(finished) > ranks:  # where most are not done it is not the few
        _blame_few({report.node: Problem("network", "its ranks did not come to the end with the others")
                    for report in reports if not report.finished}, there, "did not come to the end", result)
    _judge_clocks(finished, there, result)
    for name, what in MEASURED.items():
        if name == "product_s" or len(there) > 2:  # of two nodes nobody knows whose the link is
            _judge_times([report for report in finished if report.node not in result.bad], name, what, factor, result)
    return result


def _judge_problems(reports: Sequence[Report], count: int, result: Judgement) -> None:
    """What the nodes found of themselves; of the run folder's faults, those that are the folder's are set apart."""
    seen: dict[str, dict[str, Problem]] = {}
    for report in reports:
        for problem in report.problems:
            seen.setdefault(problem.kind, {}).setdefault(report.node, problem)
    for kind, found in seen.items():
        most = 2 * len(found) > count
        if kind == SPACE or (kind == FOLDER and most):
            result.shared = result.shared or found
        elif kind == CLOCK and most:
            result.told.append(f"the clock of the run folder's file system is off: {next(iter(found.values())).text} "
                               f"({_counted(len(found), count)})")
        else:
            for node, problem in found.items():
                result.bad.setdefault(node, problem)


def _judge_clocks(reports: Sequence[Report], there: set[str], result: Judgement) -> None:
    times = {report.node: report.clock_at for report in reports if report.clock_at is not None}
    if len(times) < 2:
        return
    middle = median(times.values())
    off = {node: Problem(CLOCK, f"its clock is {abs(at - middle):.0f} s {'fast' if at > middle else 'slow'}")
           for node, at in times.items() if abs(at - middle) > CLOCK_S}
    _blame_few(off, there, "differ in their clocks", result)


def _judge_times(reports: Sequence[Report], name: str, what: str, factor: float, result: Judgement) -> None:
    times = [(report.node, value) for report in reports if (value := getattr(report, name)) is not None]
    if len(times) < 2:
        return
    middle, floor = median(value for _, value in times), min(FLOORS_S[report.device] for report in reports)
    for node, value in times:
        if value > factor * middle and value - middle > floor:
            result.bad.setdefault(node, Problem("slow", (
                f"{what} took {1000 * value:.0f} ms, {value / middle:.1f} times the others' {1000 * middle:.0f} ms")))


def _blame_few(found: Mapping[str, Problem], there: set[str], what: str, result: Judgement) -> None:
    """Blame these nodes if they are less than half; else say so."""
    if 2 * len(found) < len(there):
        for node, problem in found.items():
            result.bad.setdefault(node, problem)
    elif found:
        result.told.append(f"{_counted(len(found), len(there))} {what}: too many to blame them")


def _counted(some: int, count: int) -> str:
    return f"{some} of {count} node{'s' if count > 1 else ''}"


def _texts(problems: Mapping[str, Problem]) -> dict[str, str]:
    return {node: problem.text for node, problem in problems.items()}


class _Majority:
    """Notes when most of the ranks have reported."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._folder, self._ranks, self._looked, self._at = folder, ranks, 0.0, inf

    def look(self) -> None:
        """Count the reports, not more often than once a second."""
        now = time.monotonic()
        if self._at == inf and now - self._looked >= 1:
            self._looked = now
            if 2 * sum(1 for _ in self._folder.glob("rank-*.json")) > self._ranks:
                self._at = now

    @property
    def since_s(self) -> float:
        """Seconds since then; 0 if it has not been so yet."""
        return max(0.0, time.monotonic() - self._at)


def read_reports(folder: Path) -> list[Report]:
    """What the ranks wrote so far."""
    found = []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            record = read_json(path)
            found.append(Report(**{**record, "problems": [Problem(*problem) for problem in record["problems"]]}))
        except (OSError, ValueError, TypeError, KeyError):
            continue
    return found
