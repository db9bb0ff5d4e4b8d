"""All data of the report, read from the run. Optional data that is absent is empty, not an error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from drover.pipeline.config.tree import Config
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.files import Record, read_record
from drover.pipeline.records.checkpoint_scores import CheckpointScores, read_scores
from drover.pipeline.records.goodput import Goodput, goodput
from drover.pipeline.records.metrics import Event, Line, LoggedSample, RunFacts
from drover.pipeline.reporting.document import value

ABSOLUTE = re.compile(r"""(?<![\w./:~…*?)\]}])/(?:(?:home|Users)/[^\s/"']+/)?(?:[^\s/"',:\]]+/)*?"""
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
        metrics: one record per step.
        samples, events: as training wrote them.
        scores: of checkpoints, in the order of steps.
        tokenizer: the tokenizer stage's own report.
        changed_code: source files that changed since a stage ran, by stage.
        reused: the run from which a stage was reused, by stage.
    """

    config: Config
    manifests: Mapping[str, Manifest]
    results: Record = field(default_factory=dict)
    goodput: Goodput | None = None
    metrics: Sequence[Line] = ()
    samples: Sequence[LoggedSample] = ()
    events: Sequence[Event] = ()
    scores: Sequence[CheckpointScores] = ()
    tokenizer: Record = field(default_factory=dict)
    changed_code: Mapping[str, list[str]] = field(default_factory=dict)
    reused: Mapping[str, str] = field(default_factory=dict)

    def counts(self, stage: str) -> Record:
        """The counts of a stage's manifest."""
        return self.manifests[stage].counts

    @property
    def validation(self) -> Record:
        """The results of evaluate on validation text; empty if there is none."""
        return self.results.get("validation", {})

    @property
    def updates(self) -> list[Line]:
        """The metrics of steps whose update was applied. The loss of other steps may be NaN, as text."""
        return [record for record in self.metrics if "skipped" not in record]

    @cached_property
    def flops_per_token(self) -> float:
        """Floating-point operations of training on one token, as MFU counts them."""
        shape = self.config.model.with_vocabulary(self.counts("tokenizer")["vocab_size"])
        return shape.flops_per_token(self.config.train.sequence_length, causal=False)

    @property
    def measures(self) -> dict[str, Callable[[Mapping[str, Any]], float]]:
        """By the name of its axis, what training has used until a record that has `tokens`."""
        return {"tokens": itemgetter("tokens"), "FLOPs": lambda record: record["tokens"] * self.flops_per_token}

    def over(self, measure: Callable[[Mapping[str, Any]], float], field: str) -> dict[float, float]:
        """The finite values of a field by a measure, of steps whose update was applied."""
        used = {record["step"]: measure(record) for record in self.metrics}
        return {used[step]: number for step, number in self.series(field, self.updates).items()}

    def series(self, field: str, of: Sequence[Line] | None = None) -> dict[int, float]:
        """The finite values of a field by step, of all steps or of these records."""
        result = {record["step"]: value(field, record) for record in (self.metrics if of is None else of)}
        return {step: float(number) for step, number in result.items()
                if number is not None and math.isfinite(float(number))}


def collect(run: Run) -> Facts:
    """Read the run; UserError for a stage that is not done or a file that is damaged."""
    manifests = {name: run.finished(name) for name in STAGES["report"].needs}
    folder = {name: run.stage_folder(name) for name in manifests}
    training = RunFacts(folder["train"].parent)
    return Facts(
        config=run.config, manifests=manifests, results=_optional(folder["evaluate"] / "results.json"),
        # The launcher's records are not outputs of a stage: a report does not become stale if they change.
        goodput=goodput(training), metrics=training.steps, events=training.events,
        samples=[sample for sample in training.samples
                 if sample["step"] <= manifests["train"].counts["steps"]],  # a plan that was shortened left others
        scores=[scores for scores in read_scores(training.train) if scores.step <= manifests["train"].counts["steps"]],
        tokenizer=_optional(folder["tokenizer"] / "report.json"),
        changed_code={name: changed for name in manifests if (changed := run.changed_code(name))},
        reused={name: folder[name].parent.name for name in manifests if run.is_reused(name)})


def shareable(text: str) -> str:
    """`text` with absolute paths shortened to their last two names and without user names: reports are shared."""
    return HOME.sub("…", ABSOLUTE.sub(r"…/\1", text))


def _optional(path: Path) -> Record:
    return read_record(path, Record, "Rebuild its stage with --force.") or {}
