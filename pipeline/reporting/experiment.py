"""The result of a sweep: which variant is better than the baseline, as lines, JSON and a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from drover.pipeline.contract.run import run_in
from drover.pipeline.core.console import counted
from drover.pipeline.evaluation.results import rounded
from drover.pipeline.evaluation.significance import (
    LEVEL,
    MORE_SEEDS,
    POWER,
    Losses,
    SeedPairs,
    bits_per_byte,
    judged,
    paired,
    read_losses,
)
from drover.pipeline.reporting.comparison import ComparedRun, loss_charts, runs_table
from drover.pipeline.reporting.document import (
    Block,
    Lines,
    Notice,
    ReportDocument,
    Series,
    Table,
    Tile,
    chapters_of,
    written,
)

FEW_DOCUMENTS = 30
METHOD = (
    "A difference is taken seed by seed and document by document: both models have the same seed, and read the same "
    "validation text. Below 0 the variant is better. ± is half of the interval that holds the true difference. It has "
    "two parts: the standard error over seeds, by Student's t distribution, and that over documents. "
    f"Together, chance calls any variant better or worse in at most {LEVEL:.0%} of sweeps in which none is. Holm's "
    f"method corrects for the number of variants: an interval excludes 0 exactly if its variant is called better or "
    f"worse. What {MORE_SEEDS} more seeds of each variant would show is seen in {POWER:.0%} of sweeps.")


@dataclass(frozen=True)
class SweepVariant:
    """A variant of a sweep.

    Attributes:
        overrides: of the base's settings.
        runs: the folders of finished runs, by seed. diverged: why others stopped, by seed. seeds: how many are planned.
    """

    name: str
    overrides: Sequence[str]
    runs: Mapping[int, Path]
    diverged: Mapping[int, str]
    seeds: int

    @cached_property
    def losses(self) -> dict[int, Losses]:
        """By seed, of its finished runs."""
        return {seed: read_losses(folder) for seed, folder in self.runs.items()}

    @cached_property
    def bits(self) -> list[float]:
        """Bits per byte of its finished runs."""
        return [bits_per_byte(losses) for losses in self.losses.values()]

    @cached_property
    def compared(self) -> list[ComparedRun]:
        """Its finished runs, with what their training recorded."""
        return [ComparedRun(folder.name, run_in(folder)) for folder in self.runs.values()]

    def mean_series(self, field: str, over: Callable[[Mapping[str, Any]], float]) -> Series:
        """The mean of a field over seeds, with their standard deviation as a band. over: the x of a line."""
        lines = [line for run in self.compared if (line := run.series(field, over)).x]
        places = lines[0].x if lines else ()
        # A run that skipped an update has other places.
        values = [*zip(*(np.interp(places, line.x, line.y).tolist() for line in lines), strict=True)]
        return Series(self.name, places, [*map(fmean, values)],
                      errors=[*map(stdev, values)] if len(lines) > 1 else ())


@dataclass(frozen=True)
class Experiment:
    """A sweep, as far as it is done. variants: those that are compared with the baseline."""

    name: str
    folder: Path
    baseline: SweepVariant
    variants: Sequence[SweepVariant]

    @property
    def every(self) -> list[SweepVariant]:
        """The baseline, and the others."""
        return [self.baseline, *self.variants]

    @cached_property
    def differences(self) -> dict[str, SeedPairs]:
        """By variant. One that has diverged with a seed is not compared: the seeds that are left are the lucky ones."""
        pairs = {one.name: paired(self.baseline.losses, one.losses) for one in self.variants if not one.diverged}
        return dict(zip(pairs, judged([*pairs.values()]), strict=True))

    @property
    def noise(self) -> float | None:
        """The standard deviation of the baseline's bits per byte over seeds; None for fewer than two."""
        return stdev(self.baseline.bits) if len(self.baseline.bits) > 1 else None

    def sentence(self, variant: SweepVariant) -> str:
        """What is known of a variant."""
        if variant.diverged:
            seeds = ", ".join(map(str, variant.diverged))
            return (f"diverged with {len(variant.diverged)} of {counted(variant.seeds, 'seed')} ({seeds}), so it is "
                    f"not compared")
        return str(self.differences[variant.name])

    @property
    def result(self) -> str:
        """The whole result in a sentence."""
        if not any(len(one.by_seed) > 1 for one in self.differences.values()):
            return "Nothing can be compared yet: that needs two seeds of the baseline and of a variant."
        seen = {name: one for name, one in self.differences.items() if one.is_seen}
        better = min(seen, key=lambda name: seen[name].value, default="")
        if better and seen[better].value < 0:
            return f"{better} is {seen[better]}, compared with {self.baseline.name}."
        return (f"No variant was seen to be better than {self.baseline.name}. Worse: {', '.join(seen) or 'none'}.")

    def rows(self) -> Iterator[dict[str, Any]]:
        """A record for each variant, with None for what is not known."""
        for one in self.every:
            apart = self.differences.get(one.name)
            known = apart if apart is not None and len(apart.by_seed) > 1 else None
            yield rounded({
                "variant": one.name, "seeds": f"{len(one.runs)} of {one.seeds}", "diverged": [*one.diverged],
                "bits_per_byte": fmean(one.bits) if one.bits else None,
                "spread": stdev(one.bits) if len(one.bits) > 1 else None,
                "difference": known and known.value, "uncertainty": known and known.uncertainty,
                "low": known and known.value - known.uncertainty, "high": known and known.value + known.uncertainty,
                "decision": "baseline" if one is self.baseline else self.sentence(one)})

    def record(self) -> dict[str, Any]:
        """All of it for programs."""
        return {"sweep": self.name, "folder": str(self.folder), "baseline": self.baseline.name, "level": LEVEL,
                "correction": "Holm", "noise": self.noise, "result": self.result, "variants": [*self.rows()],
                "runs": [rounded({"variant": one.name, "seed": seed, "folder": str(folder),
                                  "bits_per_byte": bits_per_byte(one.losses[seed])})
                         for one in self.every for seed, folder in one.runs.items()],
                "notes": [notice.text for notice in self.notices()]}

    @property
    def progress(self) -> str:
        """How many of its runs are done."""
        done = sum(len(one.runs) for one in self.every)
        diverged = sum(len(one.diverged) for one in self.every)
        return f"{done} of {counted(sum(one.seeds for one in self.every), 'run')} done, {diverged} diverged"

    def notices(self) -> Iterator[Notice]:
        """What makes the comparison weak."""
        if self.baseline.diverged:
            yield Notice("warning", f"The baseline {self.baseline.name} diverged with {len(self.baseline.diverged)} of "
                                    f"{counted(self.baseline.seeds, 'seed')}. Take another one.")
        counts = {len(losses) for one in self.every for losses in one.losses.values()}
        shared = min([one.documents for one in self.differences.values() if one.by_seed],
                     default=max(counts, default=0))
        if counts and shared < max(counts):
            yield Notice("note", f"The runs have different validation texts. Differences are taken on the {shared:,} "
                                 f"documents that they share.")
        if 0 < shared < FEW_DOCUMENTS:
            yield Notice("note", f"{shared} documents are few: raise shard.validation_share for intervals that hold "
                                 f"for other text.")

    def document(self) -> ReportDocument:
        """The page."""
        baseline = fmean(self.baseline.bits) if self.baseline.bits else None
        tiles = [Tile("Noise floor", written(self.noise, ".4f"), "bits per byte, standard deviation over seeds"),
                 Tile("Baseline", written(baseline, ".4f"), f"bits per byte, {self.baseline.name}"),
                 Tile("Seeds", f"{self.baseline.seeds}", "of each variant"),
                 Tile("Level", f"{LEVEL:.0%}", "for all comparisons together")]
        differences = Table("Differences from the baseline", {
            "variant": "{variant}", "seeds": "{seeds}", "bits per byte": "{bits_per_byte:.4f}",
            "difference": "{difference:+.4f}", "±": "{uncertainty:.4f}"}, [*self.rows()], METHOD)
        settings = Table("Settings of the variants", {"variant": "{name}", "settings": "{settings}"}, [
            {"name": one.name, "settings": ", ".join(one.overrides)} for one in self.every])
        diverged = (f"{one.name} with seed {seed} diverged. {reason.partition(';')[0]}."
                    for one in self.every for seed, reason in one.diverged.items())
        chapters: dict[str, Iterable[Block]] = {
            "Differences": [differences, *(f"{one.name}: {self.sentence(one)}." for one in self.variants)],
            "Curves": self._curves(),
            "Runs": [runs_table([run for one in self.every for run in one.compared]), *diverged],
            "Settings": [settings]}
        return ReportDocument(self.name, f"Sweep {self.folder}: {self.progress}", self.result, [*self.notices()], tiles,
                              chapters_of(chapters))

    def _curves(self) -> Iterator[Lines]:
        """Losses over tokens."""
        charts = loss_charts(chain.from_iterable(one.compared for one in self.every))
        for field, (title, unit) in charts.items():
            yield Lines(title, unit, [one.mean_series(field, itemgetter("tokens")) for one in self.every if one.runs],
                        "Means over seeds. Bands are standard deviations.", over="tokens")
