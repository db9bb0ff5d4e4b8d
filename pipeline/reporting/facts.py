"""All data of the report, read from the run. Optional data that is absent is empty, not an error."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.contract.state import read_attempts
from drover.pipeline.core.files import read_lines, read_record
from drover.pipeline.records.checkpoints import named_after_steps, step_of
from drover.pipeline.records.goodput import Goodput, goodput
from drover.pipeline.records.metrics import Event, Line, read_metrics
from drover.pipeline.reporting.document import Record

ABSOLUTE = re.compile(r"""(?<![\w./:~…])/(?:(?:home|Users)/[^\s/"']+/)?(?:[^\s/"',:\]]+/)*?"""
                      r"""((?:[^\s/"',:\]]+/)?[^\s/"',:\]]+)(?=[\s"',:\]]|$)""")
"""An absolute path; the group has its last two names, below any home folder."""
HOME = re.compile(r"""(?:…|/)/?(?:home|Users)/[^\s/"',:\]]+""")
"""A remaining home folder: in an address, or at the end of a path."""


@dataclass(frozen=True)
class Facts:
    """The data of a run.

    Attributes:
        manifests: of the stages before the report, in order.
        results: evaluate's results.json.
        goodput: how the time of training was used; None if its records do not suffice.
        evaluations: the results.json of checkpoints that were evaluated during training, by step.
        metrics: one record per step.
        samples, events: as training wrote them.
        tokenizer: the tokenizer stage's own report.
        changed_code: source files that changed since a stage ran, by stage.
        reused: the run from which a stage was reused, by stage.
        earlier: seconds of each start of a stage before the one that finished it, by stage.
        machine: the one that writes the report.
    """

    config: Config
    manifests: Mapping[str, Manifest]
    results: Record = field(default_factory=dict)
    goodput: Goodput | None = None
    evaluations: Mapping[int, Record] = field(default_factory=dict)
    metrics: Sequence[Record] = ()
    samples: Sequence[Record] = ()
    events: Sequence[Record] = ()
    tokenizer: Record = field(default_factory=dict)
    changed_code: Mapping[str, list[str]] = field(default_factory=dict)
    reused: Mapping[str, str] = field(default_factory=dict)
    earlier: Mapping[str, list[float]] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)

    def counts(self, stage: str) -> dict[str, Any]:
        """The counts of a stage's manifest."""
        return self.manifests[stage].counts

    def wall_s(self, stage: str) -> float:
        """The seconds of all starts of a stage."""
        return self.manifests[stage].wall_s + sum(self.earlier.get(stage, ()))

    @property
    def validation(self) -> Record:
        """The results of evaluate on validation text; empty if there is none."""
        return self.results.get("validation", {})

    @property
    def updates(self) -> list[Record]:
        """The metrics of steps whose update was applied. The loss of other steps may be NaN, as text."""
        return [record for record in self.metrics if "skipped" not in record]

    def events_of(self, kind: str) -> list[Record]:
        """The events of one kind."""
        return [event for event in self.events if event.get("event") == kind]


def collect(run: Run) -> Facts:
    """Read the run; UserError for a stage that is not done or a file that is damaged."""
    manifests = {name: run.finished(name) for name in STAGES["report"].needs}
    folder = {name: run.stage_folder(name) for name in manifests}
    # The launcher's records and the evaluations of checkpoints are not outputs of an earlier stage. They are reported
    # as found, and a report does not become stale if they change.
    spent, attempts = goodput(run.folder), read_attempts(run.folder)
    return Facts(
        config=run.config, manifests=manifests, results=_optional(folder["evaluate"] / "results.json"), goodput=spent,
        evaluations={step_of(path): found for path in named_after_steps(run.folder / "evaluations")
                     if step_of(path) < manifests["train"].counts["steps"]
                     and (found := _optional(path / "evaluate/results.json"))},
        metrics=read_metrics(folder["train"] / "metrics.jsonl"),
        samples=[sample for sample in read_lines(folder["train"] / "samples.jsonl", Line)
                 if sample["step"] <= manifests["train"].counts["steps"]],  # a plan that was shortened left others
        events=list(read_lines(folder["train"] / "events.jsonl", Event)),
        tokenizer=_optional(folder["tokenizer"] / "report.json"),
        changed_code={name: changed for name in manifests if (changed := run.changed_code(name))},
        reused={name: folder[name].parent.name for name in manifests if run.is_reused(name)},
        earlier={name: earlier(name, manifest, attempts, spent) for name, manifest in manifests.items()},
        machine=machine())


def earlier(stage: str, manifest: Manifest, attempts: Iterable[Record], spent: Goodput | None) -> list[float]:
    """The seconds of each start of a stage before the one that finished it. Training's are from its own records, other
    stages' from the launcher's records since the stage was last done. Overlapping time counts once."""
    last = _at(manifest.finished) - manifest.wall_s
    times: dict[tuple[Any, ...], list[float]] = {}
    if stage == "train" and spent is not None:
        times = {(start.began,): [start.began, start.end] for start in spent.starts}
        attempts = []
    for record in attempts:
        if record["stage"] == stage and record["event"] in ("attempt", "ended") and _at(record["at"]) <= last:
            start = record["job"], record.get("restart"), record["start"], record.get("chain")
            times.setdefault(start, []).append(_at(record["at"]))
            # An element of a job array, named ID_ELEMENT, finishes its share only, not the stage.
            if record.get("status") == "done" and "_" not in record["job"]:
                times.clear()
    found, until = [], 0.0
    for began, *ends in sorted(times.values()):
        if ends and until < ends[0] <= last:
            found.append(ends[0] - max(began, until))
            until = ends[0]
    return found


def _at(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def shareable(text: str) -> str:
    """`text` with absolute paths shortened to their last two names and without user names: reports are shared."""
    return HOME.sub("…", ABSOLUTE.sub(r"…/\1", text))


def _optional(path: Path) -> dict[str, Any]:
    return read_record(path, dict[str, Any], "Rebuild its stage with --force.") or {}


def machine() -> dict[str, str]:
    """The machine that writes the report."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"host": platform.node(), "system": f"{platform.system()} {platform.release()}",
            "processor": processor(), "cores": str(os.cpu_count()), "memory": f"{memory / 1e9:.0f} GB"}


def processor() -> str:
    """The processor's name, as far as the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
