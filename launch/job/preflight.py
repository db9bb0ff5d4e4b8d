"""The preflight, a short test of every node before training: memory, GPUs, a product, network, run folder.

Each rank runs `drover.launch.job.node_trial`. Here the nodes are judged by the ranks' reports, and when the time
is up by those that exist. A node that has not answered yet is slow, not bad. A node is blamed only for what
distinguishes it from the others, and never more than a few at once (`nodes.few`). If more of them have a problem, or if
it is in the shared run folder, the cause is common to them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median

from drover.launch.job.host import Host
from drover.launch.job.node_trial import EXCHANGE, FOLDER, OWN, PRODUCT, RankReport, read_reports
from drover.launch.job.rank import PREFLIGHT
from drover.launch.job.spec import JobSpec
from drover.launch.processes import Each
from drover.launch.slurm.nodes import few, named
from drover.launch.slurm.start_logs import last_lines
from drover.pipeline.core.console import counted

BASE_S, PER_NODE_S, LONGEST_S = 180.0, 0.5, 1800.0
"""Time limit, which grows with the number of nodes: all ranks import from one file system at once."""
QUIET_S = 60.0
"""A missing node is stuck, not slow, if no other has reported for so long when the time is up."""
FACTOR = 4.0
"""More than so many times the median is too slow."""
FLOORS_S = {"cpu": 0.1, "cuda": 0.005}
"""Less than this above the median is not slow, whatever the factor: on a shared CPU short times vary much."""


@dataclass
class PreflightResult:
    """The result of a preflight.

    bad: nodes with their problems. lines: for the job's log. reason: why the job ends although no node is to blame: no
    node gets a failure record, and other nodes would not help.
    """

    bad: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    reason: str = ""


def run_preflight(spec: JobSpec, host: Host, folder: Path, environment: dict[str, str], each: Each
                  ) -> PreflightResult:
    """Test the nodes of this job; the runner calls this before the first start."""
    limit_s = min(LONGEST_S, BASE_S + PER_NODE_S * spec.nodes)
    rank_nodes = [host.nodes[rank // spec.tasks_per_node] for rank in range(spec.ranks)]  # Slurm distributes in blocks
    trial = [*spec.wrap, spec.command[0], "-m", "drover.launch.job.node_trial", spec.run, f"{limit_s:.0f}",
             str(spec.gpus_per_node), *spec.health_check]
    reports = list[RankReport]()
    began = newest_at = time.monotonic()
    next_read = 0.0

    def has_time() -> bool:
        nonlocal reports, newest_at, next_read
        now = time.monotonic()
        if now >= next_read:
            current = read_reports(folder)
            newest_at = now if current != reports else newest_at
            reports = current
            next_read = now + 1 + len(reports) / 1000
        return each() and now - began < limit_s

    end = host.start(replace(spec, stage=PREFLIGHT), trial, environment, folder, has_time)
    next_read = 0.0
    in_time = has_time()
    seconds = time.monotonic() - began
    result = judge(reports, rank_nodes, began + seconds - newest_at)
    if not reports and end.exit_code and in_time:  # no rank could even begin
        lines = [line for rank in range(0, spec.ranks, spec.tasks_per_node)
                 for line in last_lines(folder, rank, spec.tasks_per_node, 1)]
        if len(lines) == spec.nodes:
            result.reason = _common_error(lines)
    result.lines += conclusion(result, reports, rank_nodes, seconds, end.cause)
    return result


def judge(reports: Sequence[RankReport], rank_nodes: Sequence[str], quiet_s: float = inf) -> PreflightResult:
    """Decide which nodes are bad.

    Args:
        reports: of the ranks that sent one.
        rank_nodes: the node of each rank.
        quiet_s: for how long no report had come at the end.
    """
    count = len({*rank_nodes})
    most = few(count)
    result = PreflightResult()
    bad = result.bad
    common = f"of {count} nodes, more than {most} at once have a cause in common: no failure records"

    def share(some: Collection[str]) -> str:
        return f"{len(some)} of {counted(count, 'node')}"

    def blame(causes: Mapping[str, str], what: str) -> None:
        """Blame these nodes if they are less than half and, with those already blamed, few; else add a line."""
        if causes and (len({*causes, *bad}) > most or 2 * len(causes) >= count):
            result.lines.append(f"{share(causes)} {what} ({named(causes)}): {common}")
        else:
            bad.update({**causes, **bad})  # the first reason counts

    sick = {report.node: report.problems for report in reports if report.problems}
    bad.update({node: next(iter(problems.values())) for node, problems in sick.items()})
    for kind, shared in ((FOLDER, "the folder"), (OWN, "launch.health_check")):
        texts = [problems[kind] for problems in sick.values() if kind in problems]
        if 2 * len(texts) > count:
            result.reason = f"{texts[0]} ({share(texts)}; {shared} is shared, so no node is to blame)"
            return result
    errors = {report.node: report.failed for report in reports if report.failed}
    if len(errors) == count and (reason := _common_error([*errors.values()])):
        result.reason = reason
        return result
    if errors:
        result.lines.append(f"{share(errors)} failed: {named(errors)}, with {next(iter(errors.values()))}")
    if len(bad) > most:
        result.reason = (f"{next(iter(bad.values()))} ({share(bad)}; {named(bad)}; {common}. Look at these nodes. If "
                         f"they are bad, exclude them (launch.exclude) and submit the same command again)")
        return result
    ranks = {report.rank for report in reports}
    silent = {node: "it did not report" for rank, node in enumerate(rank_nodes) if rank not in ranks}
    if quiet_s >= QUIET_S:
        blame(silent, "did not report")
        unfinished = {report.node: "its ranks did not finish with the others" for report in reports
                      if not report.times}
        if 2 * sum(bool(report.times) for report in reports) > len(rank_nodes):
            blame(unfinished, "did not finish")
    elif silent:
        result.lines.append(f"not all nodes have answered yet: {named(silent)} ({share(silent)}); slow is not bad, "
                            f"so none gets a failure record")
    for what in (PRODUCT, EXCHANGE) if count > 2 else (PRODUCT,):  # of two nodes nobody knows whose the link is
        times = [(report, report.times[what]) for report in reports
                 if what in report.times and report.node not in bad]
        middle = median([value for _, value in times] or [0])
        blame({report.node: f"{what} took {1000 * value:.0f} ms, {value / middle:.1f} times the others' "
                            f"{1000 * middle:.0f} ms"
               for report, value in times if value > FACTOR * middle and value - middle > FLOORS_S[report.device]},
              f"took too long for {what}")
    return result


def conclusion(result: PreflightResult, reports: Sequence[RankReport], rank_nodes: Sequence[str], seconds: float,
               cause: str) -> list[str]:
    """The result in words."""
    if result.reason:
        return [result.reason]
    if result.bad:
        return [f"{node} is bad: {text}" for node, text in sorted(result.bad.items())]
    if len([report for report in reports if report.times]) < len(rank_nodes):
        return [f"after {seconds:.0f} s{f' ({cause})' if cause else ''} no node can be blamed; training starts"]
    times = ", ".join(f"{what} {1000 * median(report.times[what] for report in reports):.1f} ms"
                      for what in reports[0].times)
    return [f"{counted(len({*rank_nodes}), 'node')} passed in {seconds:.0f} s ({times})"]


def _common_error(errors: Sequence[str]) -> str:
    """The error of all nodes, with advice; empty if they have several."""
    if len({re.sub(r"[0-9]+", "#", error) for error in errors}) > 1:
        return ""
    return (f"{errors[0]} (the same on all nodes, so none is to blame. If it names a network interface, look at "
            f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in launch.environment)")
