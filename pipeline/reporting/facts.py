"""Everything that the report tells, read from the run. What is optional and absent is empty, not an error."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drover.pipeline.config.loading import dump_config
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.files import read_lines, read_record
from drover.pipeline.records.checkpoints import named_after_steps, step_of
from drover.pipeline.records.goodput import Goodput, goodput
from drover.pipeline.records.metrics import Event, Line, read_metrics


@dataclass(frozen=True)
class Facts:
    """What is known of a run.

    Attributes:
        manifests: of the stages before the report, in order.
        metrics: one record a step; samples, events: as training wrote them.
        results: evaluate's results.json.
        goodput: where the time of training went; None where its records do not tell.
        evaluations: the results.json of checkpoints that were evaluated beside training, by step.
        tokenizer: the tokenizer stage's own report.
        changed_code: source files that changed since a stage ran, by stage.
        reused: the run that a stage was taken from, by stage.
    """

    config: Config
    config_text: str
    manifests: Mapping[str, Manifest]
    results: Mapping[str, Any] = field(default_factory=dict)
    goodput: Goodput | None = None
    evaluations: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    changed_code: Mapping[str, list[str]] = field(default_factory=dict)
    reused: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)

    @property
    def drift(self) -> list[dict[str, Any]]:
        """Every difference that --accept-drift let pass, once."""
        found: list[dict[str, Any]] = []
        for manifest in self.manifests.values():
            found += [entry for entry in manifest.drift if entry not in found]
        return found

    @property
    def updates(self) -> list[dict[str, Any]]:
        """The metrics of the steps whose update was applied: the others' loss may be text, for NaN."""
        return [record for record in self.metrics if "skipped" not in record]

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """What training logged of one kind."""
        return [event for event in self.events if event.get("event") == kind]

    @property
    def heldout(self) -> list[tuple[int, dict[str, float]]]:
        """(step, bits per byte by source) of each measurement while training."""
        return [(record["step"], record["heldout_bpb"]) for record in self.metrics if record.get("heldout_bpb")]


def collect(run: Run) -> Facts:
    """Read the run; UserError for a stage that is not done or a file that is damaged."""
    manifests = {name: run.finished(name) for name in STAGES["report"].needs}
    folder = {name: run.stage_folder(name) for name in manifests}
    return Facts(
        config=run.config, config_text=dump_config(run.config), manifests=manifests,
        results=_optional(folder["evaluate"] / "results.json"),
        # The launcher's records and these evaluations are no outputs of a stage before: they are told as they are
        # found, and a report does not become stale where they change.
        goodput=goodput(run.folder), evaluations=_evaluations(run.folder / "evaluations"),
        metrics=read_metrics(folder["train"] / "metrics.jsonl"),
        samples=[sample for sample in read_lines(folder["train"] / "samples.jsonl", Line)
                 if sample["step"] <= manifests["train"].counts["steps"]],  # a plan made shorter left others
        events=list(read_lines(folder["train"] / "events.jsonl", Event)),
        tokenizer=_optional(folder["tokenizer"] / "report.json"),
        changed_code={name: changed for name in manifests if (changed := run.changed_code(name))},
        reused={name: str(folder[name].parent) for name in manifests if run.is_reused(name)}, machine=machine())


def _evaluations(folder: Path) -> dict[int, dict[str, Any]]:
    """Results of checkpoints that were evaluated while training went on, each in a run folder of its own."""
    found = {step_of(path): _optional(path / "evaluate/results.json") for path in named_after_steps(folder)}
    return {step: results for step, results in found.items() if results}


def _optional(path: Path) -> dict[str, Any]:
    return read_record(path, dict[str, Any], "Rebuild its stage with --force.") or {}


def machine() -> dict[str, str]:
    """The machine that writes the report."""
    found = {"host": platform.node(), "system": f"{platform.system()} {platform.release()}",
             "processor": _processor(), "cores": str(os.cpu_count())}
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {**found, "memory": f"{pages * page / 1e9:.0f} GB"}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
