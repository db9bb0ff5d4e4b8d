"""Several runs on one page: their curves over tokens, steps, FLOPs and time, the settings in which they differ, the
scores that were measured together, and those of checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from drover.pipeline.config.section import by_kind, flatten
from drover.pipeline.contract.run import Run, run_in
from drover.pipeline.core.console import counted, first
from drover.pipeline.core.errors import UserError, listed
from drover.pipeline.core.files import Record, read_lines, read_record
from drover.pipeline.data.counts import EXAMPLE_CHARACTERS, dropped_by_reason
from drover.pipeline.data.filters.base import DROPPED
from drover.pipeline.data.text_shards import SPLITS
from drover.pipeline.records.checkpoint_scores import read_scores
from drover.pipeline.records.metrics import RunFacts
from drover.pipeline.reporting.chapters.results import score_charts
from drover.pipeline.reporting.chapters.training import curve
from drover.pipeline.reporting.document import (
    Block,
    Lines,
    Notice,
    ReportDocument,
    Series,
    Table,
    chapters_of,
    value,
    written,
)
from drover.pipeline.reporting.facts import Facts

OF_THE_RUN = ("name", "runs_dir", "reuse")
"""Settings that say where a run is."""
TIME = "minutes of training"
FEW = 5
"""Documents that are shown which the filters of one run drop, and those of the other do not."""


@dataclass(frozen=True)
class ComparedRun:
    """A run with what its training recorded."""

    name: str
    run: Run

    @cached_property
    def facts(self) -> Facts:
        """The metrics of its training. UserError if it has none, or if they are damaged."""
        metrics = RunFacts(self.run.stage_folder("train").parent).steps
        if not metrics:
            raise UserError(f"{self.run.folder} has no step of training. Leave it out, or train it first.")
        scores = [one for one in read_scores(self.run.stage_folder("train")) if one.step <= metrics[-1]["step"]]
        return Facts(self.run.config, {"tokenizer": self.run.finished("tokenizer")}, metrics=metrics, scores=scores)

    @cached_property
    def settings(self) -> dict[str, object]:
        """Its settings by dotted name, without those that say where it is."""
        every = flatten(by_kind(self.run.config.model_dump(mode="json")))
        return {key: setting for key, setting in every.items() if key not in OF_THE_RUN}

    @cached_property
    def tokenizer(self) -> str:
        """The hash of its tokenizer."""
        return self.run.finished("tokenizer").digest

    @cached_property
    def validation_text(self) -> list[str]:
        """The hashes of the shards of its validation text."""
        made = self.run.finished("encode")
        return sorted(record["sha256"] for record in made.outputs if record.get("split") == "validation")

    @cached_property
    def outcomes(self) -> Counter[tuple[str, str]]:
        """How many documents of each source became what, and its tokens; empty without text."""
        shard, encoded = self.run.manifest("shard"), self.run.manifest("encode")
        sources = shard.counts.get("sources", {}) if shard else {}
        tokens = encoded.counts.get("splits", {}).get("train", {}) if encoded else {}
        return Counter({(source, outcome): count for source, own in sources.items() for outcome, count in {
            "came in": own["documents_in"], **{f"kept, {split}": own[split] for split in SPLITS},
            "kept, training tokens": tokens.get(source, {}).get("tokens", 0), "unreadable": own["rejected"],
            **{f"dropped, {reason}": count for reason, count in dropped_by_reason(own).items()}}.items()})

    def dropped(self) -> Iterator[Record]:
        """The documents that its filters dropped, where they are kept."""
        folder = self.run.stage_folder("shard")
        return chain.from_iterable(read_lines(path) for path in sorted((folder / DROPPED).glob("*.jsonl")))

    def series(self, field: str, measure: Callable[[Mapping[str, Any]], float]) -> Series:
        """The values of a field over a measure, where there are many their means over windows."""
        return replace(curve(self.facts.over(measure, field))[-1], name=self.name)

    @cached_property
    def row(self) -> Record:
        """Its figures: those of its newest step, and of its evaluation if that is done."""
        last = self.facts.metrics[-1]
        results = read_record(self.run.stage_folder("evaluate") / "results.json", Record, "Evaluate the run again.")
        losses = self.series("loss", itemgetter("step"))
        return {"name": self.name, "steps": last["step"], "of": self.run.config.train.steps, "tokens": last["tokens"],
                "flops": self.facts.measures["FLOPs"](last), "train_s": last["train_s"], "loss": losses.y[-1],
                "exported": value("validation[overall][bits_per_byte]", results or {})}


def compare_runs(folders: Sequence[Path], scores: Sequence[Block] = ()) -> ReportDocument:
    """The page. scores: what was measured on the runs' models.

    Raises:
        UserError: a folder has no run, or no step of training; all of them are named.
    """
    names = [folder.name for folder in folders]
    runs = list[ComparedRun]()
    wrong = list[str]()
    for folder, name in zip(folders, names, strict=True):
        try:
            runs.append(ComparedRun(name if names.count(name) == 1 else str(folder), run_in(folder)))
            _ = runs[-1].facts, runs[-1].validation_text
        except UserError as error:
            wrong.append(str(error))
    if wrong:
        raise UserError(listed(wrong))
    while_training = [*score_charts({run.name: run.facts for run in runs})]
    chapters: dict[str, Iterable[Block]] = {
        "Runs": [runs_table(runs)], "Data": data_tables(runs), "Scores": scores,
        "Scores while training": while_training, **curves(runs), "Settings": [settings_table(runs)]}
    return ReportDocument(
        f"{counted(len(runs), 'run')} compared", first([run.name for run in runs]), best(runs), list(notices(runs)),
        [], chapters_of(chapters))


def best(runs: Sequence[ComparedRun]) -> str:
    """In a sentence, which run ended with the lowest bits per byte of validation text. Training losses rank nothing:
    each is that of other text."""
    rows = [run.row for run in runs]
    if training := [f"{row['name']} is at step {row['steps']:,} of {row['of']:,}" for row in rows
                    if row["steps"] < row["of"]]:
        return f"Not all runs are at the end of their training: {first(training)}."
    if unknown := [row["name"] for row in rows if row["exported"] is None]:
        return f"Not all runs are evaluated: {first(unknown)}. Evaluate them to see which is best."
    low, *others = sorted(rows, key=itemgetter("exported"))
    next_best = f"; next is {others[0]['name']} with {others[0]['exported']:.4f}" if others else ""
    return (f"{low['name']} has the lowest bits per byte of validation text, after export: {low['exported']:.4f}"
            f"{next_best}. Runs that differ only in their seed differ, too: `drover sweep` says by how much.")


def notices(runs: Sequence[ComparedRun]) -> Iterator[Notice]:
    """What makes the curves of the runs no measure of each other."""
    if any(run.tokenizer != runs[0].tokenizer for run in runs):
        yield Notice("warning", "The runs have different tokenizers. A loss is per token, so compare bits per byte.")
    if any(run.validation_text != runs[0].validation_text for run in runs):
        yield Notice("warning", "The runs have different validation texts or tokens. Measure all on the same text: "
                                "drover compare RUN RUN --validation RUN.")


def data_tables(runs: Sequence[ComparedRun]) -> Iterator[Block]:
    """What became of the documents of each source, by reason, and its tokens; and the first documents that
    the filters of the last run dropped, and those of the first did not, if both keep such. Nothing unless each run has
    read text."""
    outcomes = {run.name: run.outcomes for run in runs}
    if not all(outcomes.values()):
        return
    yield Table("What became of the documents", {
        "source": "{source}", "documents": "{outcome}", **{name: f"{{{name}:,}}" for name in outcomes}}, [
        {"source": key[0], "outcome": key[1], **{name: own[key] for name, own in outcomes.items()}}
        for key in sorted({*chain(*outcomes.values())}) if any(own[key] for own in outcomes.values())])
    before, after = runs[0], runs[-1]
    if not (before.run.config.shard.keep_dropped and after.run.config.shard.keep_dropped):
        return
    known = {(line["source"], line["id"]) for line in before.dropped()}
    new = (line for line in after.dropped() if (line["source"], line["id"]) not in known)
    yield Table(f"The first {FEW} that filters of {after.name} drop, and those of {before.name} do not", {
        "document": "{source}/{id}", "dropped as": "{filter}, {reason}", "text": "{text}"},
        [{**line, "text": " ".join(line["text"][:EXAMPLE_CHARACTERS].split())} for line in islice(new, FEW)])


def runs_table(runs: Sequence[ComparedRun]) -> Table:
    """A row for each run."""
    return Table("Runs", {
        "run": "{name}", "steps": "{steps:,} of {of:,}", "tokens": "{tokens:k}", "FLOPs": "{flops:.3g}",
        "training": "{train_s:s}", "training loss (nats per token)": "{loss:.4f}",
        "bits per byte, exported model": "{exported:.4f}"}, [run.row for run in runs])


def loss_charts(runs: Iterable[ComparedRun]) -> dict[str, tuple[str, str]]:
    """The title and unit of each chart of losses, by the field of metrics.jsonl that it draws."""
    sources = dict.fromkeys(source for run in runs for source in run.run.config.source_names)
    return {"loss": ("Training loss", "nats per token"), **{
        f"validation_sample_bpb[{source}]": (f"Validation sample, {source}", "bits per byte") for source in sources}}


def curves(runs: Sequence[ComparedRun]) -> dict[str, list[Block]]:
    """The charts by chapter: losses over each measure of what training has used."""
    measures: dict[str, Callable[[ComparedRun], Callable[[Mapping[str, Any]], float]]] = {
        "tokens": lambda run: run.facts.measures["tokens"], "steps": lambda _: itemgetter("step"),
        "FLOPs": lambda run: run.facts.measures["FLOPs"], TIME: lambda _: lambda line: line["train_s"] / 60}
    charts = loss_charts(runs)
    return {f"Over {'time' if measure == TIME else measure}": [
        Lines(f"{title} over {measure}", unit, [run.series(field, over(run)) for run in runs], over=measure)
        for field, (title, unit) in charts.items()] for measure, over in measures.items()}


def settings_table(runs: Sequence[ComparedRun]) -> Table:
    """The settings in which the runs differ, with a row for each value."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    differing = {name: [written(run.settings.get(name)) for run in runs] for name in names}
    differing = {name: texts for name, texts in differing.items() if len(set(texts)) > 1}
    return Table("Settings that differ", {"setting": "{setting}", "value": "{value}", "runs": "{runs}"}, [
        {"setting": name, "value": text, "runs": [run.name for run in runs if written(run.settings.get(name)) == text]}
        for name, texts in differing.items() for text in dict.fromkeys(texts)])


def score_table(rows: Sequence[Record]) -> Table:
    """What `drover compare` measured: a row for each task, metric and model."""
    return Table("Scores", {
        "task": "{task}", "metric": "{metric}", "items": "{n:,}", "model": "{model}", "score": "{value:.4f}",
        "std. error": "{stderr:.4f}", "chance": "{chance:.4f}", "difference": "{difference:+.4f}", "from": "{low:+.4f}",
        "to (95%)": "{high:+.4f}"}, rows)
