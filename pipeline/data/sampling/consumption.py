"""Tokens and epochs of each source that a plan consumes in each phase, for the log before training and the report.

It needs no torch: the launcher prints it before a job queues.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drover.pipeline.config.phases import PhasePlan
from drover.pipeline.config.training import TrainConfig, tokens_text
from drover.pipeline.config.tree import Config
from drover.pipeline.data.sampling.order import PERIOD, TOGETHER, Order, Pool, is_one_pool

MANY = 4.0
"""Epochs of a source after which repeating it helps little (Muennighoff et al. 2023): a warning, no error."""
AS_IF = ("After step {reordered} the mixture, the seed or the tokens changed. Tokens and epochs of sources count the "
         "steps before that as if they had been drawn by the present settings, too.")
"""A warning of log and report after accepted changes of the order of samples."""


def as_if(steps: Sequence[int]) -> list[str]:
    """The warning about changes of the order after these steps; [] for none."""
    return [AS_IF.format(reordered=", ".join(f"{step:,}" for step in sorted(set(steps))))] * bool(steps)


@dataclass(frozen=True)
class Consumption:
    """Tokens of each source by phase.

    Attributes:
        phases: of each phase, tokens by source.
        available: tokens that there are, by source.
        left: by phase, tokens that the epoch had left when the length changed before it. Packed documents: the phase
            begins with them. Running text: the next epoch has them.
        padding: tokens of padding of each packed phase, which are in no source's count; empty for running text.
    """

    phases: tuple[Mapping[str, int], ...]
    available: Mapping[str, int]
    left: tuple[Mapping[str, int], ...] = ()
    padding: tuple[int, ...] = ()

    def tokens(self, source: str) -> int:
        """Of a source, in all phases."""
        return sum(phase.get(source, 0) for phase in self.phases)

    @property
    def epochs(self) -> dict[str, float]:
        """Passes over each source: tokens trained on, divided by its tokens."""
        return {source: self.tokens(source) / tokens if tokens else 0.0 for source, tokens in self.available.items()}


def train_tokens(config: Config, counts: Mapping[str, Any]) -> dict[str, int]:
    """Training tokens by source, in the configuration's order, from the counts of encode's manifest."""
    train = counts["splits"].get("train", {})
    return {name: int(train.get(name, {}).get("tokens", 0)) for name in config.source_names}


def planned(config: Config, available: Mapping[str, int]) -> Consumption:
    """What the whole training will consume of sources with so many training tokens, documents one after another.

    Raises:
        UserError: a source that is to be used holds less than a sequence, or its share is too small.
    """
    plan = PhasePlan.of(config.train)
    held = {TOGETHER: sum(available.values())} if is_one_pool(plan) else available
    return planned_by(Order([Pool(name, tokens) for name, tokens in held.items()], plan, config.order_seed))


def planned_by(order: Order) -> Consumption:
    """What the whole training will consume; samples that were left out so far are not counted."""
    consumed, _, padding = zip(*order.taken(order.end), strict=True)
    return Consumption(consumed, dict(order.pools), tuple(order.left_at()), padding if order.space.padded else ())


def _limits(train: TrainConfig, sources: Collection[str]) -> list[tuple[str, str, float]]:
    """What train.max_epochs limits: its name, the source whose epochs count, which are all where they are taken
    together, and the limit."""
    limits = train.max_epochs
    named = limits if isinstance(limits, dict) else dict.fromkeys(sources, limits)
    return [(name, name if name in sources else TOGETHER, most) for name, most in named.items() if most is not None]


def excesses(train: TrainConfig, consumption: Consumption) -> list[str]:
    """Sources that would be gone through more often than train.max_epochs allows."""
    return [f"train.max_epochs allows {most:g} of {name}, and the plan takes {consumption.epochs[source]:.2f} "
            f"({tokens_text(consumption.tokens(source))} of {tokens_text(consumption.available[source])} tokens"
            f"{' of ' + source if name != source else ''}): give more text, a smaller share, or fewer tokens."
            for name, source, most in _limits(train, consumption.available) if consumption.epochs[source] > most]


def plan_lines(train: TrainConfig, consumption: Consumption) -> list[str]:
    """What will be consumed, a line for each source of each phase that uses it, and then of all of them."""
    plan, result = PhasePlan.of(train), []
    seen = dict.fromkeys(consumption.available, 0)
    for number, (phase, taken) in enumerate(zip(plan.phases, consumption.phases, strict=True)):
        if plan.declared:
            result.append(str(phase))
        for source, tokens in taken.items():
            seen[source] += tokens
            if tokens:
                epochs, of = tokens / consumption.available[source], sum(taken.values())
                so_far = f", {seen[source] / consumption.available[source]:.2f} so far" if number else ""
                share = f" ({tokens / of:.0%})" if tokens < of else ""
                result.append(f"{'  ' * plan.declared}{source}: {tokens_text(tokens)} tokens{share} from "
                             f"{tokens_text(consumption.available[source])}, {epochs:.2f} epochs{so_far}")
        result += [f"  the epoch has {tokens_text(left)} tokens of {name} left where the length changes: they "
                  f"{'come first, packed again' if consumption.padding else 'are left to the next epoch'}"
                  for name, left in consumption.left[number].items() if left]
        if consumption.padding:
            result.append(f"  padding: {tokens_text(consumption.padding[number])} tokens "
                         f"({consumption.padding[number] / max(1, phase.tokens):.2%}), of which nothing is learned")
    counts = [phase.steps * phase.sequences for phase in plan.phases if phase.train.mixture]
    if counts and min(counts) < PERIOD:
        result.append(f"shares of a mixture are exact over every {PERIOD:,} sequences; here are {min(counts):,}"
                      + " in the shortest phase" * plan.declared)
    return result


def many_epochs(train: TrainConfig, epochs: Mapping[str, float]) -> dict[str, float]:
    """The epochs of the sources that are above `MANY` and have no limit, the highest first. A limit of one source holds
    for all that are taken together."""
    limited = {source for _, source, _ in _limits(train, epochs)}
    return {source: own for source, own in sorted(epochs.items(), key=lambda item: -item[1])
            if own > MANY and source not in limited}


def repetition(source: str, epochs: float) -> str:
    """A warning for a source of `many_epochs`, of plan, log and report."""
    return (f"{source}: {epochs:.1f} epochs. Beyond {MANY:g} epochs the same text helps little. Add text, or "
            f"train on fewer tokens. train.max_epochs sets another limit.")
