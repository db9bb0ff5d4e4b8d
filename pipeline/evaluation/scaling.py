"""Scaling laws of small trainings: loss over parameters and tokens, and the best learning rate over parameters.

    L(N, D) = E + A / N^a + B / D^b                  Hoffmann et al. 2022, approach 3
    rate(N) = coefficient N^exponent                 the bottom of a parabola in log rate, for each N

Hoffmann et al. minimize a Huber loss of log residuals over hundreds of trainings. A ladder has a dozen, whose noise is
a share of their loss, so squares of relative residuals are minimized. For given exponents that is a linear problem in
E, A and B, which are not negative here. The exponents are then searched on a grid that narrows, so the same trainings
always give the same law. Only numpy is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drover.pipeline.evaluation.significance import student

Floats = NDArray[np.float64]
EXPONENTS = (0.02, 2.0)
"""The range of a and b. At an end the trainings do not decide the exponent."""
WIDE, NARROW, HALVINGS = 25, 9, 16
"""Exponents that are tried at first, then at each of so many times, on half the range of the time before."""
LAW_PARAMETERS = 5
REPLICATES = 1000
LEVEL, NORMAL = 0.95, 1.959964
"""Of intervals, and the normal distribution's quantile for it."""
LEAST_SIZES = LEAST_TOKENS = 3
LEAST_CELLS = LAW_PARAMETERS + 1
"""Sizes, token counts and pairs of both from which on the five numbers of the law can be determined."""


@dataclass(frozen=True)
class Cell:
    """A size and a number of training tokens, with the loss that was reached, in any unit above 0."""

    parameters: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class Estimate:
    """A number with its interval, which holds it in 95 of 100 cases if the law holds."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ScalingLaw:
    """The law that was fitted, and as many again for the residuals in other places. Each array: (replicates,)."""

    replicates: Mapping[str, Floats]
    residuals: Floats

    def loss(self, parameters: float, tokens: float) -> float:
        """The loss of a model of that size after so many tokens."""
        return float(self._losses(parameters, tokens)[0])

    def _losses(self, parameters: float, tokens: float) -> Floats:
        law = self.replicates
        return law["E"] + law["A"] * parameters ** -law["a"] + law["B"] * tokens ** -law["b"]

    def predict(self, parameters: float, tokens: float) -> Estimate:
        """The loss of a training that is not among the cells. The interval has two parts: the law that is not known
        exactly, and a residual like those of the cells."""
        losses = self._losses(parameters, tokens)
        drawn = np.random.default_rng(1).choice(self.residuals, len(losses) - 1)
        low, high = np.quantile(losses[1:] * np.exp(drawn), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Estimate(float(losses[0]), float(low), float(high))

    def constants(self) -> dict[str, Estimate]:
        """E, A, B, a and b with their intervals."""
        quantiles = {name: np.quantile(values[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
                     for name, values in self.replicates.items()}
        return {name: Estimate(float(self.replicates[name][0]), float(low), float(high))
                for name, (low, high) in quantiles.items()}

    def undecided(self) -> Iterator[str]:
        """What the cells do not decide, as sentences."""
        for name, of, coefficient in (("a", "parameters", "A"), ("b", "tokens", "B")):
            exponent = self.replicates[name][0]
            if self.replicates[coefficient][0] == 0:
                yield f"The loss does not fall with the {of}. Train on a wider range of them."
            elif min(abs(math.log(exponent / end)) for end in EXPONENTS) < 0.01:
                yield (f"The exponent {name} of the {of} is at the end of its range, {exponent:.3g}: the runs do not "
                       f"determine it. Train on a wider range of {of}.")


def design_problems(cells: Sequence[tuple[int, int]]) -> list[str]:
    """Why trainings of these parameters and tokens cannot determine a law, as sentences."""
    sizes, tokens = ({cell[place] for cell in cells} for place in (0, 1))
    problems = [f"{count} different {what}, but the law needs {least}." for count, what, least in (
        (len(sizes), "sizes", LEAST_SIZES), (len(tokens), "token counts", LEAST_TOKENS),
        (len(set(cells)), "pairs of size and tokens", LEAST_CELLS)) if count < least]
    if len(sizes) >= LEAST_SIZES and len(tokens) >= LEAST_TOKENS:
        logs = np.log(np.array(cells, dtype=np.float64))
        spread = np.linalg.svd(logs - logs.mean(axis=0), compute_uv=False)
        if spread[1] < 0.05 * spread[0]:
            problems.append("Tokens grow in proportion to the size, so the effects of the two cannot be separated. "
                            "Train each size on several numbers of tokens for each parameter.")
    return problems


def fit_law(cells: Sequence[Cell]) -> ScalingLaw:
    """The law of these cells, and of replicates whose residuals are drawn from those of the fit.

    Residuals are drawn, not cells: without some of its corners a small grid determines no law. They are enlarged to
    what they would be without the five numbers that were fitted to them, and, since few cells show little of how much
    losses vary, by Student's distribution.

    Raises:
        ValueError: the cells determine no law; the message is `design_problems`.
    """
    if problems := design_problems([(cell.parameters, cell.tokens) for cell in cells]):
        raise ValueError(" ".join(problems))
    parameters, tokens, losses = (np.array([getattr(cell, name) for cell in cells], dtype=np.float64)
                                  for name in ("parameters", "tokens", "loss"))
    law = _fitted(losses[None], parameters, tokens)
    at_cells = law["E"] + law["A"] * parameters ** -law["a"] + law["B"] * tokens ** -law["b"]
    logs = np.log(losses / at_cells)
    freedom = len(cells) - LAW_PARAMETERS
    residuals = (logs - logs.mean()) * math.sqrt(len(cells) / freedom) * student(freedom, 1 - LEVEL) / NORMAL
    drawn = np.random.default_rng(0).choice(residuals, (REPLICATES, len(cells)))
    replicates = _fitted(at_cells * np.exp(drawn), parameters, tokens)
    return ScalingLaw({name: np.concatenate([law[name], replicates[name]]) for name in law}, residuals)


def _fitted(losses: Floats, parameters: Floats, tokens: Floats) -> dict[str, Floats]:
    """E, A, B, a and b of each row of losses (rows, cells); each (rows,)."""
    middle_n, middle_d = (np.exp(np.log(values).mean()) for values in (parameters, tokens))
    n, d = parameters / middle_n, tokens / middle_d
    rows = np.arange(len(losses))
    centre = np.full((2, len(losses)), 0.5 * np.log(EXPONENTS).sum())
    offsets = np.linspace(-0.5, 0.5, WIDE) * (math.log(EXPONENTS[1]) - math.log(EXPONENTS[0]))
    for _ in range(HALVINGS):
        tried = np.clip(centre[:, :, None] + offsets, *np.log(EXPONENTS))
        errors, solved = _solved(losses, n, d, *np.exp(tried))
        place_a, place_b = np.unravel_index(errors.reshape(len(losses), -1).argmin(axis=1), errors.shape[1:])
        centre = np.stack([tried[0, rows, place_a], tried[1, rows, place_b]])
        offsets = np.linspace(-1, 1, NARROW) * (offsets[1] - offsets[0]) * 2
    a, b = np.exp(centre)
    constant, of_n, of_d = (values[rows, place_a, place_b] for values in solved)
    return {"E": constant, "A": of_n * middle_n**a, "B": of_d * middle_d**b, "a": a, "b": b}


def _solved(losses: Floats, n: Floats, d: Floats, a: Floats, b: Floats) -> tuple[Floats, tuple[Floats, ...]]:
    """For each row of losses and each pair of its exponents a and b (rows, tried): the sum of squared relative
    residuals, and E, A and B, none negative, with which it is least; each (rows, tried a, tried b).

    A problem of least squares with such bounds has the solution of the problem without them on the columns that are not
    0 (Lawson and Hanson 1974).
    """
    ones = 1 / losses  # the column of E, divided by the losses like the others, so that all residuals are relative
    of_n, of_d = (base ** -exponents[:, :, None] * ones[:, None] for base, exponents in ((n, a), (d, b)))
    aim = np.ones_like(losses)
    scale = (ones * ones).sum(axis=1)

    def without_constant(columns: Floats) -> Floats:
        """What is left of columns (rows, ..., cells) if E may be any number."""
        share = np.einsum("r...c,rc->r...", columns, ones) / scale.reshape(-1, *[1] * (columns.ndim - 2))
        return columns - share[..., None] * ones.reshape(len(ones), *[1] * (columns.ndim - 2), -1)

    errors, first, second = _pairs(*map(without_constant, (of_n, of_d, aim)))
    through_n, through_d = (np.einsum("rtc,rc->rt", columns, ones) for columns in (of_n, of_d))
    constant = (ones.sum(axis=1)[:, None, None] - first * through_n[:, :, None] - second * through_d[:, None]
                ) / scale[:, None, None]
    errors_0, first_0, second_0 = _pairs(of_n, of_d, aim)
    free = constant >= 0
    return np.where(free, errors, errors_0), (np.where(free, constant, 0.0), np.where(free, first, first_0),
                                              np.where(free, second, second_0))


def _pairs(left: Floats, right: Floats, aim: Floats) -> tuple[Floats, Floats, Floats]:
    """Least squares of aim (rows, cells) by a column of left (rows, i, cells) and one of right (rows, j, cells), with
    coefficients that are not negative: the error and both coefficients, each (rows, i, j)."""
    left_left, left_aim = ((left * other).sum(axis=2)[:, :, None] for other in (left, aim[:, None]))
    right_right, right_aim = ((right * other).sum(axis=2)[:, None] for other in (right, aim[:, None]))
    left_right = left @ right.transpose(0, 2, 1)
    tiny = np.finfo(np.float64).tiny
    determinant = np.maximum(left_left * right_right - left_right**2, tiny)
    first = (right_right * left_aim - left_right * right_aim) / determinant
    second = (left_left * right_aim - left_right * left_aim) / determinant
    alone = (np.maximum(aim_of, 0) / np.maximum(own, tiny) for aim_of, own in (
        (left_aim, left_left), (right_aim, right_right)))
    only_left, only_right = alone
    is_both = (first >= 0) & (second >= 0)
    is_left = only_left * left_aim >= only_right * right_aim
    first, second = (np.where(is_both, both, np.where(chosen, single, 0.0)) for both, chosen, single in (
        (first, is_left, only_left), (second, ~is_left, only_right)))
    error = (aim * aim).sum(axis=1)[:, None, None] - first * left_aim - second * right_aim
    return error, first, second


@dataclass(frozen=True)
class BestRate:
    """The learning rate at which a size had, or would have, the lowest loss. at_edge: it is the lowest or highest that
    was tried, so the best one may lie beyond it."""

    parameters: int
    rate: float
    at_edge: bool


def best_rate(parameters: int, losses: Mapping[float, float]) -> BestRate:
    """The bottom of the parabola in log rate through the lowest loss and its two neighbours. losses: by rate."""
    rates = sorted(losses)
    place = min(range(len(rates)), key=lambda number: losses[rates[number]])
    if not 0 < place < len(rates) - 1:
        return BestRate(parameters, rates[place], at_edge=True)
    logs = np.log(rates[place - 1:place + 2])
    curve, slope, _ = np.polyfit(logs - logs[1], [losses[rate] for rate in rates[place - 1:place + 2]], 2)
    return BestRate(parameters, float(rates[place] * math.exp(-slope / (2 * curve))) if curve > 0 else rates[place],
                    at_edge=False)


@dataclass(frozen=True)
class RateLaw:
    """The best learning rate over parameters: coefficient N^exponent."""

    coefficient: float
    exponent: float

    def rate(self, parameters: float) -> float:
        """The rate for a size."""
        return self.coefficient * parameters**self.exponent


def fit_rates(rates: Sequence[BestRate]) -> RateLaw | None:
    """The power law through the best rates that are not at an edge; None if there are fewer than two."""
    inner = [one for one in rates if not one.at_edge]
    if len(inner) < 2:
        return None
    exponent, log_coefficient = np.polyfit(np.log([one.parameters for one in inner]),
                                           np.log([one.rate for one in inner]), 1)
    return RateLaw(math.exp(log_coefficient), float(exponent))
