"""The preflight, a short test of every node before training: memory, clock, GPUs, a product, network, run folder.

Each rank runs `drover.launch.job.node_trial`. Here the nodes are judged by the ranks' reports, and when the time
is up by those that exist. A node that has not answered yet is slow, not bad. A node is blamed only for what
distinguishes it from the others, and never more than a few at once (`nodes.few`). If more of them have a problem, or if
it is in the shared run folder, the cause is common to them.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from statistics import median

from drover.launch.job.host import Host
from drover.launch.job.node_trial import EXCHANGE, FOLDER, OWN, PRODUCT, SPACE, Report, read_reports
from drover.launch.job.rank import PREFLIGHT
from drover.launch.job.spec import JobSpec
from drover.launch.processes import Each
from drover.launch.slurm.nodes import few, named
from drover.launch.slurm.start_logs import last_lines
from drover.pipeline.core.console import counted

BASE_S, PER_NODE_S, LONGEST_S = 180.0, 0.5, 1800.0
"""Time limit, which grows with the number of nodes: all ranks import from one file system at once."""
QUIET_S = 60.0
"""A missing node is stuck, not slow, if no report has come for so long, and for as long as all others took."""
FACTOR = 4.0
"""More than so many times the median is too slow."""
CLOCK_S = 5.0
"""The most seconds that a node's clock may differ from the others'."""
FLOORS_S = {"cpu": 0.1, "cuda": 0.005}
"""Less than this above the median is not slow, whatever the factor: on a shared CPU short times vary much."""


@dataclass
class Found:
    """The result of a preflight.

    bad: nodes with their problems. lines: for the job's log. reason: why the job ends although no node is to blame: no
    node gets a strike, and other nodes would not help.
    """

    bad: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    reason: str = ""


def run_preflight(spec: JobSpec, here: Host, folder: Path, environment: dict[str, str], each: Each
                  ) -> Found:
    """Test the nodes of this job; the runner calls this before the first start."""
    limit_s = min(LONGEST_S, BASE_S + PER_NODE_S * spec.nodes)
    nodes = here.nodes
    places = [nodes[rank // spec.tasks_per_node] for rank in range(spec.ranks)]  # as Slurm distributes them (in blocks)
    trial = [*spec.wrap, spec.command[0], "-m", "drover.launch.job.node_trial", spec.run, f"{limit_s:.0f}",
             str(spec.gpus_per_node), *spec.health_check]
    reports, look_at = list[Report](), 0.0
    began = last = time.monotonic()  # last: when the newest report came

    def goes_on() -> bool:
        """False once the time is up, or once the few nodes without a report are stuck."""
        nonlocal reports, last, look_at
        now = time.monotonic()
        if now >= look_at:
            if (found := read_reports(folder)) != reports:
                reports, last = found, now
            look_at = now + 1 + len(reports) / 1000
        silent = _silent(reports, places)
        if len(reports) == len(places) and all(report.failed for report in reports):
            return False
        stuck = 0 < len(silent) <= few(len(nodes)) and now - last >= 2 * max(QUIET_S, last - began)
        return each() and now - began < limit_s and not (reports and stuck)

    end = here.start(replace(spec, stage=PREFLIGHT), trial, environment, folder, goes_on)
    look_at = 0.0
    goes_on()  # the last reports
    now = time.monotonic()
    found = judge(reports, places, last - began, now - last)
    if not reports and end.exit_code and now - began < limit_s:  # none could even begin
        lines = [line for rank in range(0, spec.ranks, spec.tasks_per_node)
                 for line in last_lines(folder, rank, spec.tasks_per_node, 1)]
        if len(lines) == spec.nodes and (reason := _common(lines)):
            found = Found(reason=reason)
    found.lines += conclusion(found, reports, places, now - began, end.cause)
    return found


def judge(reports: Sequence[Report], places: Sequence[str], lasted_s: float = 0.0, quiet_s: float = inf) -> Found:
    """Find the bad nodes.

    Args:
        reports: of the ranks that sent one.
        places: the node of each rank.
        lasted_s: for how long reports came. quiet_s: for how long none came, up to the end.
    """
    count, result = len({*places}), Found()
    bad, most = result.bad, few(count)
    common = f"of {count} nodes, more than {most} at once have a cause in common: no strikes"

    def share(some: Collection[str]) -> str:
        return f"{len(some)} of {counted(count, 'node')}"

    def blame(found: Mapping[str, str], what: str) -> None:
        """Blame these nodes if they are less than half and, with those already blamed, few; else add a line."""
        if found and (len({*found, *bad}) > most or 2 * len(found) >= count):
            result.lines.append(f"{share(found)} {what} ({named(found)}): {common}")
        else:
            bad.update({**found, **bad})  # the first reason counts

    sick = {report.node: report.problems for report in reports if report.problems}
    bad.update({node: next(iter(problems.values())) for node, problems in sick.items()})
    for kind, shared in ((SPACE, "the folder"), (FOLDER, "the folder"), (OWN, "launch.health_check")):
        found = [problems[kind] for problems in sick.values() if kind in problems]
        if found and (kind == SPACE or 2 * len(found) > count):
            result.reason = f"{found[0]} ({share(found)}; {shared} is shared, so no node is to blame)"
            return result
    errors = {report.node: report.failed for report in reports if report.failed}
    on_all_nodes = errors.keys() == {*places}
    if reason := _shared_gpu(reports) or (_common([*errors.values()]) if on_all_nodes else ""):
        result.reason = reason
        return result
    if errors:
        result.lines.append(f"{share(errors)} failed: {named(errors)}, with {next(iter(errors.values()))}")
    if len(bad) > most:
        result.reason = (f"{next(iter(bad.values()))} ({share(bad)}; {named(bad)}; {common}. Look at these nodes. If "
                         f"they are bad, exclude them (launch.exclude) and submit the same command again)")
        return result
    silent = _silent(reports, places)
    if quiet_s >= max(QUIET_S, lasted_s):
        blame(dict.fromkeys(silent, "it did not report"), "did not report")
        unfinished = {report.node for report in reports if not report.times}
        if 2 * sum(bool(report.times) for report in reports) > len(places):
            blame(dict.fromkeys(unfinished, "its ranks did not finish with the others"), "did not finish")
    elif silent:
        result.lines.append(f"not all nodes have answered yet: {named(silent)} ({share(silent)}); slow is not bad, "
                           f"so none gets a strike")
    clocks = {report.node: report.clock_at for report in reports if report.clock_at is not None}
    middle = median(clocks.values() or [0])
    apart = CLOCK_S / 2 if len(clocks) == 2 else CLOCK_S  # of two the middle is halfway between them
    blame({node: f"its clock is {abs(at - middle):.0f} s {'fast' if at > middle else 'slow'}"
           for node, at in clocks.items() if abs(at - middle) > apart}, "differ in their clocks")
    for what in (PRODUCT, EXCHANGE) if count > 2 else (PRODUCT,):  # of two nodes nobody knows whose the link is
        times = [(report, report.times[what]) for report in reports
                 if what in report.times and report.node not in bad]
        middle = median([value for _, value in times] or [0])
        blame({report.node: f"{what} took {1000 * value:.0f} ms, {value / middle:.1f} times the others' "
                            f"{1000 * middle:.0f} ms"
               for report, value in times if value > FACTOR * middle and value - middle > FLOORS_S[report.device]},
              f"took too long for {what}")
    return result


def conclusion(found: Found, reports: Sequence[Report], places: Sequence[str], seconds: float, cause: str) -> list[str]:
    """The result in words."""
    if found.reason:
        return [found.reason]
    if found.bad:
        return [f"{node} is bad: {text}" for node, text in sorted(found.bad.items())]
    if len([report for report in reports if report.times]) < len(places):
        return [f"after {seconds:.0f} s{f' ({cause})' if cause else ''} no node can be blamed; training starts"]
    times = ", ".join(f"{what} {1000 * median(report.times[what] for report in reports):.1f} ms"
                      for what in reports[0].times)
    return [f"{counted(len({*places}), 'node')} passed in {seconds:.0f} s ({times})"]


def _shared_gpu(reports: Sequence[Report]) -> str:
    """Names a GPU that several ranks have, with advice; empty if there is none."""
    ranks = Counter((report.node, report.own_gpu) for report in reports if report.own_gpu)
    return next((f"{count} ranks on {node} have one GPU ({gpu}). Each needs its own: look at gpu-bind and "
                 f"gpus-per-task in launch.extra and launch.srun_args, launch.environment, launch.setup, and the "
                 f"site's TaskProlog" for (node, gpu), count in ranks.items() if count > 1), "")


def _common(errors: Sequence[str]) -> str:
    """The error of all nodes, with advice; empty if they have several."""
    if len({re.sub(r"[0-9]+", "#", error) for error in errors}) > 1:
        return ""
    return (f"{errors[0]} (the same on all nodes, so none is to blame. If it names a network interface, look at "
            f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in launch.environment)")


def _silent(reports: Sequence[Report], places: Sequence[str]) -> list[str]:
    """Nodes with a rank that has not reported."""
    there = {report.rank for report in reports}
    return list(dict.fromkeys(node for rank, node in enumerate(places) if rank not in there))
