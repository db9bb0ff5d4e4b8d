"""Trainings on mixtures of the sources: what was measured, the best mixture by the laws, and the page of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from drover.pipeline.evaluation.mixtures import MixtureLaw, fit_mixtures
from drover.pipeline.evaluation.scaling import LEVEL, Estimate
from drover.pipeline.reporting.document import Bars, Block, Chapter, Notice, ReportDocument, Table, Tile, written

UNIT = "bits per byte"
FORMAT = 1


@dataclass(frozen=True)
class TrainedMixture:
    """A training on a mixture. shares: by source, with the sum 1; empty for that of the base. losses: bits per byte of
    each source's validation text, the mean over seeds."""

    name: str
    shares: Mapping[str, float]
    losses: Mapping[str, float]


@dataclass(frozen=True)
class MixtureSearch:
    """What was trained, and what follows from it.

    Attributes:
        weights: by source, of its loss in the loss that is minimized. Others do not count.
        base: the training on the base's own mixture. outcome: that on the best mixture, once it is done.
        left_out: trainings that diverged. has_diverged: that on the best mixture did.
    """

    mixtures: Sequence[TrainedMixture]
    weights: Mapping[str, float]
    base: TrainedMixture
    left_out: Sequence[str] = ()
    outcome: TrainedMixture | None = None
    has_diverged: bool = False

    def loss(self, mixture: TrainedMixture) -> float:
        """The weighted mean of the losses of its sources."""
        return float(np.average([mixture.losses[name] for name in self.weights], weights=[*self.weights.values()]))

    @cached_property
    def law(self) -> MixtureLaw:
        """The losses over the shares."""
        shares = np.array([[*mixture.shares.values()] for mixture in self.mixtures])
        losses = np.array([[mixture.losses[name] for name in self.weights] for mixture in self.mixtures])
        return fit_mixtures(shares, losses, [*self.weights.values()])

    @cached_property
    def best(self) -> dict[str, Estimate]:
        """The share of each source in the best mixture."""
        return dict(zip(self.mixtures[0].shares, self.law.best(), strict=True))

    @cached_property
    def best_shares(self) -> dict[str, float]:
        """The same to two digits, as it is trained."""
        return {name: round(one.value, 2) for name, one in self.best.items()}

    @cached_property
    def prediction(self) -> Estimate:
        """The loss of the best mixture."""
        return self._predicted(self.best_shares)

    def _predicted(self, shares: Mapping[str, float]) -> Estimate:
        values = np.array([*shares.values()])
        return self.law.predict(values / values.sum())

    @property
    def sentence(self) -> str:
        """The best mixture, what is predicted for it, and what was measured."""
        shares = ", ".join(f"{name} {share:.2f}" for name, share in self.best_shares.items())
        made, tried = self.prediction, min(map(self.loss, self.mixtures))
        text = (f"Best mixture: {shares}. Predicted: {made.value:.4f} {UNIT}, {LEVEL:.0%} interval {made.low:.4f} to "
                f"{made.high:.4f}.")
        if self.outcome is not None:
            measured = self.loss(self.outcome)
            text += f" Measured: {measured:.4f}, {abs(made.value / measured - 1):.2%} away."
        elif self.has_diverged:
            text += " Training on it diverged."
        return (f"{text} The base's mixture reached {self.loss(self.base):.4f}, the best of "
                f"{len(self.mixtures)} random ones {tried:.4f}.")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A record for each training: shares, losses, and the loss by the law."""
        every = [self.base, *self.mixtures, *([self.outcome] if self.outcome else [])]
        return [{**asdict(one), "loss": self.loss(one), "by_law": self._predicted(one.shares).value if one.shares else
                 None} for one in every]

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {"format": FORMAT, "unit": UNIT, "level": LEVEL, "weights": dict(self.weights), "trainings": self.rows,
                "best": {name: asdict(one) for name, one in self.best.items()}, "mixture": self.best_shares,
                "predicted": asdict(self.prediction), "left_out": [*self.left_out],
                "measured": self.loss(self.outcome) if self.outcome else None, "sentence": self.sentence}

    def page(self, title: str) -> ReportDocument:
        """The page."""
        made = self.prediction
        measured = self.loss(self.outcome) if self.outcome else None
        tiles = [Tile("Predicted", f"{made.value:.4f}", f"{UNIT}, {made.low:.4f} to {made.high:.4f}"),
                 Tile("Measured", written(measured, ".4f"), UNIT),
                 Tile("Base", f"{self.loss(self.base):.4f}", UNIT)]
        best: list[Block] = [Bars("Shares of the best mixture", self.best_shares, ""), Table("Best mixture", {
            "source": "{name}", "share": "{value:.3f}", "from": "{low:.3f}", f"to ({LEVEL:.0%})": "{high:.3f}"},
            [{"name": name, **asdict(one)} for name, one in self.best.items()])]
        trained = Table("Trainings", {
            "mixture": "{name}", **{f"share of {name}": f"{{shares[{name}]:.2f}}" for name in self.best},
            **{name: f"{{losses[{name}]:.4f}}" for name in self.weights}, "loss": "{loss:.4f}",
            "by the law": "{by_law:.4f}"}, sorted(self.rows, key=itemgetter("loss")),
            f"In {UNIT} of each source's validation text; `loss` is their weighted mean.")
        return ReportDocument(
            title, "A law of the loss on each source over the shares of all, fitted to random mixtures", self.sentence,
            [Notice("warning", f"Left out, because training diverged: {', '.join(self.left_out)}.")] * bool(
                self.left_out), tiles, [Chapter("Best mixture", best), Chapter("Trainings", [trained])])
