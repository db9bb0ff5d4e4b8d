"""What a job does about nodes that failed it: strikes, and word to the jobs that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launch.host import Host
from launch.slurm.chain import read_chain
from launch.slurm.job.start_records import hang_of
from launch.slurm.jobspec import JobSpec
from launch.slurm.nodes import STRIKES, add_strike, few, named


class Blame:
    """The nodes that failed starts of one job."""

    def __init__(self, spec: JobSpec, here: Host) -> None:
        self._spec, self._here, self._say = spec, here, here.say

    def strike(self, found: Mapping[str, str], restart: int, start: int, nodes: int | None = None) -> dict[str, int]:
        """Record that nodes failed a start, each with the reason; how often each did within a day.

        More than a few at once get none: what they have in common (a switch, a file system) failed. nodes: how many
        the start had; None: as many as the job.
        """
        of, counts = nodes or len(self._here.nodes), dict[str, int]()
        if len(found) > few(of):
            self._say(f"{named(found)}: {next(iter(found.values()))}. These are {len(found)} of {of} nodes at once, "
                      f"which has a cause in common: none of them gets a strike")
            return counts
        for node, reason in found.items():
            counts[node] = 1
            with suppress(OSError):
                counts[node] = add_strike(Path(self._spec.run), node,
                                          ".".join(map(str, (self._here.name, restart, start))), reason)
            self._say(f"{node} {reason} (strike {counts[node]} within a day)")
        return counts

    def late(self, start: int) -> str:
        """What is known of a hang; the late nodes get a strike. Empty if nothing hung."""
        hang = hang_of(self._spec, self._here, start)
        if hang is None:
            return ""
        late = sorted({node for _, node in hang.late if node is not None})
        if 2 * len(late) < len(self._here.nodes):  # where half of the nodes are late, it is not the nodes
            counts = self.strike(dict.fromkeys(late, "was late when training hung"), self._here.restart, start)
            self.keep_off([node for node, count in counts.items() if count >= STRIKES])
        return hang.text

    def keep_off(self, nodes: Sequence[str]) -> None:
        """Tell the chain's waiting jobs for this stage to leave nodes out."""
        spec, chain = self._spec, read_chain(Path(self._spec.run))
        mine = chain.jobs if nodes and chain and chain.id == spec.chain else ()
        for job in [job.id for job in mine if (job.stage, job.kind) == (spec.stage, "link")][spec.link:]:
            if problem := self._here.scheduler.leave_out(job, nodes):
                self._say(f"the waiting job {job} could not be told to leave out {', '.join(nodes)}: {problem}")
