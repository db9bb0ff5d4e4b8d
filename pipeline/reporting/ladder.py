"""A ladder of small trainings: what was measured, the laws that were fitted, the prediction, and the page of all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import attrgetter
from statistics import fmean
from typing import Any

from drover.pipeline.config.training import tokens_text
from drover.pipeline.core.console import first
from drover.pipeline.core.errors import UserError
from drover.pipeline.evaluation.scaling import (
    LEVEL,
    BestRate,
    Cell,
    Estimate,
    RateLaw,
    ScalingLaw,
    best_rate,
    fit_law,
    fit_rates,
)
from drover.pipeline.reporting.document import Block, Lines, Notice, ReportDocument, Series, Table, Tile, chapters_of

UNIT = "bits per byte"
CURVE_POINTS = 50
FORMAT = 1


@dataclass(frozen=True)
class TrainedRung:
    """A size that was trained on a number of tokens at a learning rate. losses: bits per byte of validation text after
    export, by seed; None for a training that diverged."""

    parameters: int
    tokens: int
    lr: float
    losses: Mapping[int, float | None]

    @property
    def title(self) -> str:
        """What was trained, in words."""
        return f"{tokens_text(self.parameters)} on {tokens_text(self.tokens)} tokens at {self.lr:g}"

    @property
    def finite(self) -> list[float]:
        """The losses of the trainings that did not diverge."""
        return [loss for loss in self.losses.values() if loss is not None]

    @property
    def loss(self) -> float:
        """The mean over seeds; infinite if one diverged."""
        return math.inf if None in self.losses.values() else fmean(self.finite)


@dataclass(frozen=True)
class Ladder:
    """The trainings of the grid, and what follows from them. target: the parameters and tokens of the larger training;
    outcome: that training, once it is done."""

    rungs: Sequence[TrainedRung]
    target: tuple[int, int]
    outcome: TrainedRung | None = None

    @cached_property
    def best(self) -> list[TrainedRung]:
        """Of each size and number of tokens, the rate with the lowest loss."""
        lowest = dict[tuple[int, int], TrainedRung]()
        for rung in sorted(self.rungs, key=attrgetter("parameters", "tokens", "loss")):
            if math.isfinite(rung.loss):
                lowest.setdefault((rung.parameters, rung.tokens), rung)
        return [*lowest.values()]

    @cached_property
    def law(self) -> ScalingLaw:
        """The loss over parameters and tokens; UserError if what is left of the grid determines none."""
        try:
            return fit_law([Cell(rung.parameters, rung.tokens, rung.loss) for rung in self.best])
        except ValueError as error:
            raise UserError(f"No law can be fitted to the trainings that are left. {error} {''.join(self.diverged)} "
                            f"Add sizes, tokens or lower learning rates to the file. What is trained is kept."
                            ) from None

    @cached_property
    def rates(self) -> list[BestRate]:
        """The best learning rate of each size, at the most tokens on which it was trained. Empty if one was tried."""
        if len({rung.lr for rung in self.rungs}) == 1:
            return []
        return [best_rate(size, {rung.lr: rung.loss for rung in rungs}) for size, rungs in self.at_most_tokens.items()]

    @cached_property
    def at_most_tokens(self) -> dict[int, list[TrainedRung]]:
        """Of each size, the trainings on the most tokens that did not diverge, in the order of their rates."""
        most = {rung.parameters: rung.tokens for rung in self.best}  # in order: the last are the most
        return {size: sorted((rung for rung in self.rungs if (rung.parameters, rung.tokens) == (size, tokens)
                              and math.isfinite(rung.loss)), key=attrgetter("lr")) for size, tokens in most.items()}

    @cached_property
    def rate_law(self) -> RateLaw | None:
        """The best learning rate over parameters."""
        return fit_rates(self.rates)

    @cached_property
    def target_rate(self) -> float:
        """The learning rate for the larger training, to three digits."""
        size, _ = self.target
        rate = self.rates[-1].rate if self.rates else self.rungs[0].lr
        return float(f"{self.rate_law.rate(size) if self.rate_law else rate:.3g}")

    @cached_property
    def prediction(self) -> Estimate:
        """Its loss."""
        return self.law.predict(*self.target)

    @property
    def error(self) -> float | None:
        """By how much the prediction is above the loss that was measured, as a share of it; None before it is."""
        if self.outcome is None or not math.isfinite(self.outcome.loss):
            return None
        return self.prediction.value / self.outcome.loss - 1

    @property
    def diverged(self) -> list[str]:
        """The trainings that are left out, as a sentence."""
        names = [rung.title for rung in self.rungs if None in rung.losses.values()]
        return [f"Left out, because training diverged: {first(names)}."] * bool(names)

    @property
    def sentence(self) -> str:
        """What is predicted, and what was measured."""
        size, tokens = self.target
        made = self.prediction
        text = (f"Predicted for {tokens_text(size)} parameters after {tokens_text(tokens)} tokens: {made.value:.4f} "
                f"{UNIT}, {LEVEL:.0%} interval {made.low:.4f} to {made.high:.4f}.")
        if self.outcome is None:
            return text
        if self.error is None:
            return f"{text} That training diverged at the learning rate {self.outcome.lr:g}."
        place = "inside" if made.low <= self.outcome.loss <= made.high else "outside"
        return (f"{text} Measured: {self.outcome.loss:.4f}. The prediction is {abs(self.error):.2%} too "
                f"{'high' if self.error > 0 else 'low'}; the measured value is {place} the interval.")

    def notes(self) -> Iterator[str]:
        """What weakens the figures, as sentences."""
        yield from self.diverged
        yield from self.law.undecided()
        if not self.rates:
            yield "One learning rate was tried, so it is not known whether another one is better."
        if edges := [f"{tokens_text(one.parameters)} at {one.rate:g}" for one in self.rates if one.at_edge]:
            yield (f"The best learning rate is at the edge of those tried, for {first(edges)}. The best one may lie "
                   f"beyond. Add rates there.")
        if self.rates and self.rate_law is None:
            yield ("Fewer than two sizes have their best learning rate inside those tried, so no power law is fitted. "
                   "The larger training takes that of the largest size.")
        largest = max(rung.parameters for rung in self.rungs)
        if self.target[0] > 10 * largest:
            yield (f"The larger training has {self.target[0] / largest:.0f} times the parameters of the largest size. "
                   f"The interval assumes that the law holds so far.")

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "format": FORMAT, "unit": UNIT, "level": LEVEL,
            "rungs": [{**asdict(rung), "loss": rung.loss if math.isfinite(rung.loss) else None}
                      for rung in self.rungs],
            "law": {name: asdict(value) for name, value in self.law.constants().items()},
            "best": self.best_rows,
            "rates": [asdict(one) for one in self.rates],
            "rate_law": asdict(self.rate_law) if self.rate_law else None,
            "target": {"parameters": self.target[0], "tokens": self.target[1], "lr": self.target_rate,
                       "predicted": asdict(self.prediction),
                       "measured": None if self.error is None or self.outcome is None else self.outcome.loss,
                       "error": self.error},
            "sentence": self.sentence, "notes": [*self.notes()]}

    @property
    def best_rows(self) -> list[dict[str, Any]]:
        """A record for each size and number of tokens: the loss that was measured, and that of the law."""
        rows = ((rung, self.law.loss(rung.parameters, rung.tokens)) for rung in self.best)
        return [{"parameters": rung.parameters, "tokens": rung.tokens, "lr": rung.lr, "loss": rung.loss,
                 "seeds": len(rung.losses), "by_law": by_law, "error": by_law / rung.loss - 1} for rung, by_law in rows]

    def page(self, title: str) -> ReportDocument:
        """The page."""
        made = self.prediction
        tiles = [Tile("Predicted", f"{made.value:.4f}", f"{UNIT}, {made.low:.4f} to {made.high:.4f}")]
        if self.error is not None and self.outcome is not None:
            tiles += [Tile("Measured", f"{self.outcome.loss:.4f}", UNIT),
                      Tile("Error", f"{self.error:+.2%}", "of the prediction")]
        chapters: dict[str, Iterable[Block | None]] = {
            "Prediction": [self._prediction_chart(), self._constants()],
            "Loss": [self._loss_chart(), self._losses()], "Learning rate": [self._rates_chart(), self._rates()]}
        return ReportDocument(
            title, "L(N, D) = E + A / N^a + B / D^b, fitted to the best rate of each size N and number of tokens D",
            self.sentence, [Notice("warning", note) for note in self.notes()], tiles,
            chapters_of(chapters))

    def _prediction_chart(self) -> Lines:
        """The law at the target's tokens up to its parameters, and what was measured there."""
        size, tokens = self.target
        sizes = _between([*(rung.parameters for rung in self.rungs), size])
        made = [self.law.predict(x, tokens) for x in sizes]
        series = [Series("law", sizes, [one.value for one in made], errors=[(one.high - one.low) / 2 for one in made])]
        if self.outcome is not None and self.outcome.finite:
            series.append(Series("measured", [size] * len(self.outcome.finite), self.outcome.finite))
        return Lines(f"Loss after {tokens_text(tokens)} tokens", UNIT, series,
                     f"The band is the {LEVEL:.0%} interval.", over="parameters", log_x=True)

    def _loss_chart(self) -> Lines:
        """What was measured over tokens, a line for each size, and the law in grey."""
        lines = list[Series]()
        laws = list[Series]()
        for size in sorted({rung.parameters for rung in self.best}):
            rungs = [rung for rung in self.best if rung.parameters == size]
            tokens = [rung.tokens for rung in rungs]
            lines.append(Series(f"{tokens_text(size)} parameters", tokens, [rung.loss for rung in rungs]))
            xs = _between(tokens)
            laws.append(Series("" if laws else "law", xs, [self.law.loss(size, x) for x in xs], faint=True))
        return Lines("Loss over tokens", UNIT, [*lines, *laws], over="tokens", log_x=True)

    def _rates_chart(self) -> Lines | None:
        """The losses over learning rates of each size, at its most tokens."""
        if not self.rates:
            return None
        return Lines("Loss over learning rate, at most tokens", UNIT, [
            Series(f"{tokens_text(size)} parameters", [rung.lr for rung in rungs], [rung.loss for rung in rungs])
            for size, rungs in self.at_most_tokens.items()], over="learning rate", log_x=True)

    def _constants(self) -> Table:
        """The constants of the law."""
        return Table("The law", {"constant": "{name}", "value": "{value:.4g}", "from": "{low:.4g}", f"to ({LEVEL:.0%})":
                                 "{high:.4g}"},
                     [{"name": name, **asdict(value)} for name, value in self.law.constants().items()],
                     "The constants depend on each other, so each alone is known less well than the loss.")

    def _losses(self) -> Table:
        """Each size and number of tokens at its best rate."""
        return Table("At the best learning rate", {
            "parameters": "{parameters:k}", "tokens": "{tokens:k}", "learning rate": "{lr:g}", "seeds": "{seeds:d}",
            UNIT: "{loss:.4f}", "by the law": "{by_law:.4f}", "difference": "{error:+.2%}"}, self.best_rows)

    def _rates(self) -> Table:
        """The best rate of each size."""
        return Table("Best learning rate", {
            "parameters": "{parameters:k}", "learning rate": "{rate:.3g}", "": "{where}"}, [
                {**asdict(one), "where": "edge of those tried" if one.at_edge else ""} for one in self.rates],
            f"rate = {self.rate_law.coefficient:.3g} N^{self.rate_law.exponent:.3f}" if self.rate_law else "")


def _between(values: Sequence[float]) -> list[float]:
    """Points at equal ratios from the least value to the largest."""
    low, high = min(values), max(values)
    return [low * (high / low) ** (number / (CURVE_POINTS - 1)) for number in range(CURVE_POINTS)]
