"""A short trial of every node before training: memory, clock, GPUs, a product, the network, and the run folder.

`launch.slurm.job.node_trial` is what each rank does; here the nodes are judged by what the ranks report, and when
the time is up by what is there. Failed a check and not answered yet are two results: slow is not sick. Blamed is a
node only for what sets it apart, and never more than a few at once (`nodes.few`): what more of them have has a cause
that they share, and so has what they see in the shared run folder.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from statistics import median

from launch.slurm.job.node_trial import CLOCK, CLOCK_S, FOLDER, SPACE, Problem, Report
from launch.slurm.job.srun import run_step, srun_command
from launch.slurm.jobspec import JobSpec
from launch.slurm.nodes import few, named
from launch.slurm.start_logs import labelled

BASE_S, PER_NODE_S, LONGEST_S = 180.0, 0.5, 1800.0
"""Time for the trial where `launch.preflight_s` says nothing: all ranks import from one file system at once."""
QUIET_S = 60.0
"""Who is missing is stuck, not slow, once nothing has come for so long and for as long as everything else took to come.
"""
FLOORS_S = {"cpu": 0.1, "cuda": 0.005}
"""Less than this above the median is not slow, whatever the factor says: on a shared CPU a small time doubles for no
reason."""
MEASURED = {"product_s": "a matrix product", "pair_s": "an exchange with another node"}
TOLD = {**MEASURED, "reduce_s": "an all-reduce"}
"""What nodes are judged by, and what is told besides: in an all-reduce everyone takes as long as the slowest."""


@dataclass
class Found:
    """What preflight found.

    bad: nodes with what is wrong there. told: lines to say. reason: why the job ends although no node is to blame: no
    strikes, and no other nodes would help.
    """

    bad: dict[str, str] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    reason: str = ""


def allowed_s(nodes: int) -> float:
    """Seconds that the trial of so many nodes may take where nothing is set."""
    return min(LONGEST_S, BASE_S + PER_NODE_S * nodes)


def run_preflight(spec: JobSpec, folder: Path, environment: dict[str, str], each: Callable[[], bool],
                  nodes: Sequence[str]) -> Found:
    """Try the nodes of this job; for the runner, before the first start."""
    limit_s = spec.preflight_s or allowed_s(spec.nodes)
    began, said, ranks = time.monotonic(), list[str](), places(spec, nodes)
    arrivals = Arrivals(folder, ranks)
    command = srun_command(spec, folder, [*spec.wrap, spec.command[0], "-m", "launch.slurm.job.node_trial", spec.run,
                                          f"{limit_s:.0f}"])

    def goes_on() -> bool:
        arrivals.look()
        return each() and time.monotonic() - began < limit_s and not arrivals.are_over

    end = run_step(command, environment, folder, goes_on, said.append)
    reports = read_reports(folder)
    seconds = time.monotonic() - began
    if not reports:  # nothing ran: the start of training will tell why
        return Found({}, [*said, f"no rank reported in {seconds:.0f} s ({end.cause or 'srun said nothing'}); going on"])
    found = judge(reports, spec.ranks, spec.preflight_factor, ranks, arrivals.lasted_s, arrivals.quiet_s)
    found.told += _lines(found, reports, nodes, seconds, end.cause)
    return found


def _lines(found: Found, reports: Sequence[Report], nodes: Sequence[str], seconds: float, cause: str) -> list[str]:
    """What comes of it, in words."""
    there = {*nodes, *(report.node for report in reports)}
    if found.reason:
        return [found.reason]
    if found.bad:
        return [f"{node} is bad: {text}" for node, text in sorted(found.bad.items())]
    if not all(report.finished for report in reports) or len({report.node for report in reports}) < len(there):
        because = f" ({cause})" if cause else ""
        return [f"after {seconds:.0f} s{because} no node can be blamed; going on"]
    values = {what: [value for report in reports if (value := getattr(report, name)) is not None]
              for name, what in TOLD.items()}
    times = [f"{what} {1000 * median(found):.1f} ms" for what, found in values.items() if found]
    return [f"{len(there)} node{'s' if len(there) > 1 else ''} sound in {seconds:.0f} s ({', '.join(times)})"]


def places(spec: JobSpec, nodes: Sequence[str]) -> list[str]:
    """The node of each rank, as Slurm distributes them (in blocks)."""
    return [nodes[min(rank // spec.tasks_per_node, len(nodes) - 1)] for rank in range(spec.ranks)] if nodes else []


def judge(reports: Sequence[Report], ranks: int, factor: float, nodes: Sequence[str] = (), lasted_s: float = 0.0,
          quiet_s: float = inf) -> Found:
    """Which nodes are bad.

    Args:
        reports: of the ranks that sent one.
        factor: how much longer than the median is too slow.
        nodes: the node of each rank, as far as it is known.
        lasted_s: for how long reports came. quiet_s: for how long none came, up to the end.
    """
    there, result = {*nodes, *(report.node for report in reports)}, Found()
    _judge_problems(reports, len(there), result)
    if result.reason:
        return result
    missing = sorted(set(range(ranks)) - {report.rank for report in reports})
    silent = dict.fromkeys((nodes[rank] for rank in missing if rank < len(nodes)), "it did not report")
    finished = [report for report in reports if report.finished]
    unfinished = dict.fromkeys((report.node for report in reports if not report.finished),
                               "its ranks did not come to the end with the others")
    if quiet_s < max(QUIET_S, lasted_s):
        if missing:
            result.told.append(f"not all nodes have answered yet: {named(silent) or f'{len(missing)} ranks'} "
                               f"({_counted(len(silent), len(there))}); slow is not sick, so none gets a strike "
                               f"(launch.preflight_s gives them more time)")
    else:
        _blame_few(silent, there, "did not report", result)
        if 2 * len(finished) > ranks:  # where most are not done it is not the few
            _blame_few(unfinished, there, "did not come to the end", result)
    _blame_few(_off_clocks(finished), there, "differ in their clocks", result)
    for name, what in MEASURED.items():
        if name == "product_s" or len(there) > 2:  # of two nodes nobody knows whose the link is
            slow = _slow([report for report in finished if report.node not in result.bad], name, what, factor)
            _blame_few(slow, there, f"took too long for {what}", result)
    return result


def _judge_problems(reports: Sequence[Report], count: int, result: Found) -> None:
    """What the nodes found of themselves, and whether it is the run folder's fault, or too many nodes'."""
    seen: dict[str, dict[str, str]] = {}
    for report in reports:
        for kind, text in report.problems:
            seen.setdefault(kind, {}).setdefault(report.node, text)
    for kind, found in seen.items():
        many = len(found) > few(count) or 2 * len(found) > count
        if kind == SPACE or (kind == FOLDER and many):
            result.bad, result.reason = found, _shared(found, count, "the folder is shared, so no node is to blame")
            return
        if kind == CLOCK and many:
            result.told.append(f"the clock of the run folder's file system is off: {next(iter(found.values()))} "
                               f"({_counted(len(found), count)})")
        else:
            result.bad = result.bad | found | result.bad  # the first reason counts
    if len(result.bad) > few(count):
        result.reason = _shared(result.bad, count, (
            f"{named(result.bad)}; {_common(count)}. Look at these nodes; if it is they after all, leave "
            f"them out with launch.exclude and submit the same command again"))


def _shared(found: dict[str, str], count: int, because: str) -> str:
    return f"{next(iter(found.values()))} ({_counted(len(found), count)}; {because})"


def _off_clocks(reports: Sequence[Report]) -> dict[str, str]:
    times = {report.node: report.clock_at for report in reports if report.clock_at is not None}
    middle = median(times.values() or [0])
    return {node: f"its clock is {abs(at - middle):.0f} s {'fast' if at > middle else 'slow'}"
            for node, at in times.items() if abs(at - middle) > CLOCK_S}


def _slow(reports: Sequence[Report], name: str, what: str, factor: float) -> dict[str, str]:
    times = [(report.node, value) for report in reports if (value := getattr(report, name)) is not None]
    middle = median([value for _, value in times] or [0])
    floor = min((FLOORS_S[report.device] for report in reports), default=0)
    return {node: f"{what} took {1000 * value:.0f} ms, {value / middle:.1f} times the others' {1000 * middle:.0f} ms"
            for node, value in times if value > factor * middle and value - middle > floor}


def _blame_few(found: dict[str, str], there: set[str], what: str, result: Found) -> None:
    """Blame these nodes if they are few, with those that are blamed already, and less than half; else say so."""
    together = {*found, *result.bad}
    if found and (len(together) > few(len(there)) or 2 * len(found) >= len(there)):
        result.told.append(f"{_counted(len(found), len(there))} {what} ({named(found)}): "
                           f"{_common(len(there))}")
        return
    result.bad = result.bad | found | result.bad  # the first reason counts


def _common(count: int) -> str:
    return f"of {count} nodes at most {few(count)} can be at fault at once, more have a cause in common: no strikes"


def _counted(some: int, count: int) -> str:
    return f"{some} of {count} node{'s' if count > 1 else ''}"


class Arrivals:
    """When the ranks' reports came.

    Args:
        folder: of the nodes' logs.
        nodes: the node of each rank.
    """

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self._folder, self._nodes = folder, nodes
        self._began = self._last = time.monotonic()
        self._next = 0.0
        self._reports: list[Report] = []

    def look(self) -> None:
        """Note what has come, not more often than once a second; of thousands of ranks, less often."""
        now = time.monotonic()
        if now < self._next:
            return
        if (found := read_reports(self._folder)) != self._reports:
            self._reports, self._last = found, now
        self._next = now + 1 + len(found) / 1000

    @property
    def lasted_s(self) -> float:
        """Seconds from the start to the last report."""
        return self._last - self._began

    @property
    def quiet_s(self) -> float:
        """Seconds since the last report."""
        return max(0.0, time.monotonic() - self._last)

    @property
    def are_over(self) -> bool:
        """Whether it is of no use to wait for the few nodes that have reported nothing."""
        ranks = {report.rank for report in self._reports}
        silent = {node for rank, node in enumerate(self._nodes) if rank not in ranks}
        return bool(ranks and silent) and len(silent) <= few(len(set(self._nodes))) \
            and self.quiet_s >= 2 * max(QUIET_S, self.lasted_s)


def read_reports(folder: Path) -> list[Report]:
    """The newest report of each rank, from the nodes' logs. All other lines are passed over."""
    texts, found = defaultdict[int, bytes](bytes), dict[int, Report]()
    for path in folder.glob("node*.log"):
        with suppress(OSError), open(path, "rb") as file:
            for rank, text in labelled(file):
                texts[rank] += text
    for rank, text in sorted(texts.items()):
        for line in text.splitlines():
            try:
                record = json.loads(line)
                found[rank] = Report(**{**record, "problems": [Problem(*problem) for problem in record["problems"]]})
            except (ValueError, TypeError, KeyError):
                continue
    return list(found.values())
