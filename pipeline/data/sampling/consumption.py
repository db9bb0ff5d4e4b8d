"""What a plan consumes: tokens and epochs of each source in each phase, told before it begins and beside what it did.

Without torch: the launcher says it before a job queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.config.mixture import tokens_text
from pipeline.config.phases import PhasePlan
from pipeline.config.training import TrainConfig
from pipeline.config.tree import Config
from pipeline.data.exclusion import Excluded, sample_numbers
from pipeline.data.sampling.order import Pool, SampleOrder
from pipeline.data.sampling.packed_phases import PackedOrder
from pipeline.data.sampling.phases import PhasedOrder

TOGETHER = "all sources"
"""Stands for the sources where there is neither a mixture nor phases: they are one pool."""
MANY = 4.0
"""Epochs of a source beyond which more of the same helps little (Muennighoff et al. 2023): said, not refused."""


@dataclass(frozen=True)
class Consumption:
    """Tokens of each source by phase.

    Attributes:
        phases: of each phase, tokens by source.
        available: tokens that there are, by source.
        passed_over: of each phase, tokens that it leaves to the next epoch, since the length changes after it.
        carried: of each phase that is packed, tokens that the epoch had left when the length changed before it.
        padding: of each phase that is packed, tokens of padding beside those of the sources.
    """

    phases: tuple[Mapping[str, int], ...]
    available: Mapping[str, int]
    passed_over: tuple[Mapping[str, int], ...] = field(default=())
    carried: tuple[Mapping[str, int], ...] = field(default=())
    padding: tuple[int, ...] = field(default=())

    def tokens(self, source: str) -> int:
        """Of a source, in all phases."""
        return sum(phase.get(source, 0) for phase in self.phases)

    def epochs(self, source: str) -> float:
        """How often a source is gone through: tokens trained on over tokens that there are."""
        return self.tokens(source) / self.available[source] if self.available[source] else 0.0


def train_tokens(config: Config, counts: Mapping[str, Any]) -> dict[str, int]:
    """Training tokens by source, in the configuration's order, from the counts of encode's manifest."""
    train = counts["splits"].get("train", {})
    return {source.name: int(train.get(source.name, {}).get("tokens", 0)) for source in config.shard.sources}


def planned(config: Config, available: Mapping[str, int]) -> Consumption:
    """What the whole training will consume of sources with so many training tokens.

    Raises:
        UserError: a source that is to be used holds less than a sequence, or its share is too small.
    """
    train, plan = config.train, PhasePlan.of(config.train)
    if plan.declared:
        order = PhasedOrder([Pool(name, tokens) for name, tokens in available.items()], plan, config.seed)
        return Consumption(tuple(order.consumed(order.end)), dict(available), tuple(order.passed_over()))
    shares = None if train.mixture is None else [train.mixture[name] for name in available]
    pools = {TOGETHER: sum(available.values())} if shares is None else dict(available)
    simple = SampleOrder([Pool(name, tokens) for name, tokens in pools.items()], train.sequence_length, config.seed,
                         shares)
    return Consumption((consumed_by(simple, plan.sequences_between(0, plan.steps)),), pools)


def planned_by(order: PackedOrder) -> Consumption:
    """What the whole training will consume, documents packed, with what was left out so far beside it."""
    return Consumption(tuple(order.consumed(order.end)), {pool.name: pool.tokens for pool in order.pools},
                       carried=tuple(order.carried()), padding=tuple(order.padding(order.end)))


def consumed_by(order: SampleOrder, samples: int) -> dict[str, int]:
    """Tokens of each pool among the first `samples` samples; of a packed one as many as its sequences have on average,
    without padding."""
    epochs = order.epochs(samples)
    return {pool.name: round(epochs[pool.name] * int(count)) * order.length if pool.packed is None
            else round(epochs[pool.name] * pool.tokens) for pool, count in zip(order.pools, order.counts, strict=True)}


def trained_on(order: SampleOrder, samples: int, excluded: Excluded) -> dict[str, Any]:
    """Counts for train's manifest, of a training without phases: how often each pool was gone through in the first
    `samples` samples without those left out, and the tokens of these by pool, where there are any."""
    epochs, numbers = order.epochs(samples), sample_numbers(excluded.within(0, samples))
    if not len(numbers):
        return {"epochs": epochs}
    counts = np.bincount(order.locate(numbers)[0], minlength=len(order.pools)).tolist()
    shares = {pool.name: count / int(size) if size else 0.0
              for pool, count, size in zip(order.pools, counts, order.counts, strict=True)}
    left_out = {pool.name: count * order.length if pool.packed is None else round(shares[pool.name] * pool.tokens)
                for pool, count in zip(order.pools, counts, strict=True)}
    return {"epochs": {name: epochs[name] - share for name, share in shares.items()}, "left_out": left_out}


def excesses(train: TrainConfig, consumption: Consumption) -> list[str]:
    """Sources that would be gone through more often than train.max_epochs allows."""
    limits = train.max_epochs
    found = []
    for source in consumption.available:
        named = limits if isinstance(limits, dict) else {source: limits}
        held = {name: most for name, most in named.items() if most is not None and source in (name, TOGETHER)}
        epochs = consumption.epochs(source)
        found += [f"train.max_epochs allows {most:g} of {name}, and the plan takes {epochs:.2f} "
                  f"({tokens_text(consumption.tokens(source))} of {tokens_text(consumption.available[source])} "
                  f"tokens{' of ' + source if name != source else ''}): give more text, a smaller share, or fewer "
                  f"tokens." for name, most in held.items() if epochs > most]
    return found


def plan_lines(train: TrainConfig, consumption: Consumption) -> list[str]:
    """What will be consumed, a line for each source of each phase that uses it, and then of all of them."""
    plan, found = PhasePlan.of(train), []
    seen = dict.fromkeys(consumption.available, 0)
    for number, (phase, taken) in enumerate(zip(plan.phases, consumption.phases, strict=True)):
        if plan.declared:
            found.append(str(phase))
        for source, tokens in taken.items():
            seen[source] += tokens
            if tokens:
                epochs, of = tokens / consumption.available[source], sum(taken.values())
                so_far = f", {seen[source] / consumption.available[source]:.2f} so far" if number else ""
                found.append(f"  {source}: {tokens_text(tokens)} tokens ({tokens / of:.0%}) of "
                             f"{tokens_text(consumption.available[source])}, {epochs:.2f} epochs{so_far}")
        carried = {name: left for name, left in (consumption.carried or ({},) * (number + 1))[number].items() if left}
        found += [f"  of {name} the epoch has {tokens_text(left)} tokens left where the length changes: they come "
                  f"first, packed anew" for name, left in carried.items()]
        if consumption.padding:
            found.append(f"  padding: {tokens_text(consumption.padding[number])} tokens "
                         f"({consumption.padding[number] / max(1, phase.tokens):.2%}), of which nothing is learned")
        over = {name: left for name, left in (consumption.passed_over or ({},) * (number + 1))[number].items() if left}
        found += [f"  left to the next epoch where the length changes: {tokens_text(left)} of {name}"
                  for name, left in over.items()]
    if train.max_epochs is None:
        found += [f"  {source} is gone through {consumption.epochs(source):.1f} times, and beyond {MANY:g} the same "
                  f"text helps little; train.max_epochs refuses more than it says"
                  for source in consumption.available if consumption.epochs(source) > MANY]
    return found
