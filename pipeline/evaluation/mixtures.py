"""Laws of mixtures: the loss on each source over the shares that all sources have in training, and the best shares.

    L_i(w) = c_i + exp(sum over j of t_ij w_j)          Ye et al. 2024, "Data Mixing Laws"

w are the shares, which sum to 1. For a given constant c, the logarithm of what is above it is linear in them, so c is
searched among shares of the lowest loss, and the rest is a problem of least squares. A weighted sum of such losses is
convex, so that its minimum is the best mixture. Only numpy is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drover.pipeline.evaluation.scaling import LEVEL, NORMAL, Estimate, Floats
from drover.pipeline.evaluation.significance import student

CONSTANTS = np.linspace(0, 0.95, 20)
"""Constants that are tried, as shares of the lowest loss."""
REPLICATES = 300
DESCENTS = 3000
"""Steps of the search for the best mixture."""


def least_mixtures(sources: int) -> int:
    """How many mixtures determine the laws of so many sources, with two to spare."""
    return sources + 3


@dataclass(frozen=True)
class MixtureLaw:
    """The law of each source, and as many again for the residuals in other places.

    Attributes:
        weights: of the losses in the loss that is minimized, (losses,), with the sum 1.
        constants: (replicates, losses). slopes: (replicates, losses, sources).
        residuals: logarithms of what was measured over the law, of the weighted loss, (mixtures,).
    """

    weights: Floats
    constants: Floats
    slopes: Floats
    residuals: Floats

    def losses(self, shares: Floats) -> Floats:
        """The weighted loss by each replicate, (replicates,), at shares (sources,) or (replicates, sources)."""
        above = np.exp(np.einsum("rij,rj->ri", self.slopes, np.broadcast_to(shares, self._shape)))
        return (self.constants + above) @ self.weights

    @property
    def _shape(self) -> tuple[int, int]:
        """Of a table of shares: replicates, sources."""
        return self.slopes.shape[0], self.slopes.shape[2]

    def predict(self, shares: Floats) -> Estimate:
        """The weighted loss of a training on these shares, (sources,)."""
        losses = self.losses(shares)
        drawn = np.random.default_rng(1).choice(self.residuals, len(losses) - 1)
        return _estimate(losses[0], losses[1:] * np.exp(drawn))

    def best(self) -> list[Estimate]:
        """The share of each source in the best mixture, by exponentiated gradients (Kivinen and Warmuth 1997)."""
        shares = np.full(self._shape, 1 / self._shape[1])
        rate = 1 / np.abs(self.slopes).max(axis=(1, 2), keepdims=True)[:, 0] ** 2
        for _ in range(DESCENTS):
            above = self.weights * np.exp(np.einsum("rij,rj->ri", self.slopes, shares))
            shares = shares * np.exp(-rate * np.einsum("ri,rij->rj", above, self.slopes))
            shares /= shares.sum(axis=1, keepdims=True)
        return [_estimate(column[0], column[1:]) for column in shares.T]


def _estimate(value: float, replicates: Floats) -> Estimate:
    low, high = np.quantile(replicates, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(value), float(low), float(high))


def fit_mixtures(shares: Floats, losses: Floats, weights: Sequence[float]) -> MixtureLaw:
    """The law of trainings on mixtures.

    Args:
        shares: of each source in each mixture, (mixtures, sources). losses: on sources that count, (mixtures, losses),
            above 0.
        weights: of these losses.
    """
    freedom = len(shares) - shares.shape[1] - 1
    assert freedom > 0, "as many mixtures as least_mixtures() says"
    normed = np.array(weights) / math.fsum(weights)
    constants, slopes = _fitted(shares, losses[None])
    at_mixtures = constants[:, None] + np.exp(np.einsum("rij,nj->rni", slopes, shares))
    logs = np.log(losses / at_mixtures)[0]  # (mixtures, losses)
    wider = math.sqrt(len(shares) / freedom) * student(freedom, 1 - LEVEL) / NORMAL
    residuals = (logs - logs.mean(axis=0)) * wider
    drawn = residuals[np.random.default_rng(0).integers(len(shares), size=(REPLICATES, len(shares)))]
    more_constants, more_slopes = _fitted(shares, at_mixtures * np.exp(drawn))
    of_sum = np.log((losses @ normed) / (at_mixtures[0] @ normed))
    return MixtureLaw(normed, np.concatenate([constants, more_constants]), np.concatenate([slopes, more_slopes]),
                      (of_sum - of_sum.mean()) * wider)


def _fitted(shares: Floats, losses: Floats) -> tuple[Floats, Floats]:
    """c and t of each row of losses (rows, mixtures, losses): (rows, losses) and (rows, losses, sources)."""
    constants = CONSTANTS[:, None, None] * losses.min(axis=1)  # (tried, rows, losses)
    above = losses - constants[:, :, None]
    relative = above / losses  # residuals of the logarithm, times this, are shares of the loss
    normal = np.einsum("trni,nj,nk->trijk", relative**2, shares, shares)
    aims = np.einsum("trni,nj->trij", relative**2 * np.log(above), shares)
    slopes = np.linalg.solve(normal, aims[..., None])[..., 0]
    errors = ((relative * (np.log(above) - np.einsum("trij,nj->trni", slopes, shares)))**2).sum(axis=2)
    chosen = errors.argmin(axis=0)  # (rows, losses)
    rows, places = np.indices(chosen.shape)
    return constants[chosen, rows, places], slopes[chosen, rows, places]
