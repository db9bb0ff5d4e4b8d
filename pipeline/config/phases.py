"""The phases of a training: their settings, the resulting plan of steps and tokens, and the batch of a step. Without
torch, so that the batch that is printed before a start is the batch that trains.

Phases end by steps, so a step's number determines its phase, whatever a rollback has left out. A training without
`train.phases` is one phase with train's settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from drover.pipeline.config.training import ParallelConfig, PhaseConfig, TrainConfig, tokens_text
from drover.pipeline.config.tree import Config
from drover.pipeline.core.console import counted


@dataclass(frozen=True)
class Phase:
    """One phase.

    Attributes:
        number: from 0.
        train: its settings; `steps` is the whole run's, `phases` is empty.
        first_step: steps done when it starts. steps: how many it has.
        first_token, first_sequence: tokens and sequences trained on when it starts, if nothing is left out.
        own: its section; None for a training without phases.
    """

    number: int
    train: TrainConfig
    first_step: int
    steps: int
    first_token: int
    first_sequence: int
    own: PhaseConfig | None = None

    @property
    def end_step(self) -> int:
        """Steps done when it ends."""
        return self.first_step + self.steps

    @property
    def tokens(self) -> int:
        """Tokens that it trains on."""
        return self.steps * self.train.batch_tokens

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.train.batch_tokens // self.train.sequence_length

    @property
    def name(self) -> str:
        """Its name in messages: the place of its settings."""
        return "train" if self.own is None else f"train.phases[{self.number}]"

    @property
    def prefix(self) -> str:
        """What stands before a problem of its settings, if there are phases."""
        return f"{self.name}: " if self.own else ""

    def __str__(self) -> str:
        return (f"phase {self.number + 1}: steps {self.first_step + 1:,} to {self.end_step:,}, "
                f"{tokens_text(self.tokens)} tokens, {self.sequences:,} sequences of "
                f"{self.train.sequence_length:,} a step")


@dataclass(frozen=True)
class PhasePlan:
    """All phases, in order; at least one."""

    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, train: TrainConfig) -> PhasePlan:
        """The plan of these settings. They may be senseless (`plan_problems`): a phase without tokens has no steps."""
        if not train.phases:
            return cls((Phase(0, train, 0, train.steps, 0, 0),))
        phases: list[Phase] = []
        step = token = sequence = 0
        for number, (own, steps) in enumerate(zip(train.phases, train.phase_steps(), strict=True)):
            settings = train.model_copy(update={**own.overlaid, "phases": []})
            phases.append(phase := Phase(number, settings, step, steps, token, sequence, own))
            step, token, sequence = phase.end_step, token + phase.tokens, sequence + phase.steps * phase.sequences
        return cls(tuple(phases))

    @property
    def declared(self) -> bool:
        """Whether the configuration has phases."""
        return self.phases[0].own is not None

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.phases[-1].end_step

    @property
    def tokens(self) -> int:
        """Tokens of the whole run, if nothing is left out."""
        return self.phases[-1].first_token + self.phases[-1].tokens

    def phase_of(self, step: int) -> Phase:
        """The phase of a step, counted from 1; after the end, the last one."""
        return next((phase for phase in reversed(self.phases) if phase.first_step < step), self.phases[0])

    def sequences_between(self, first: int, end: int) -> int:
        """Sequences of the steps after `first` steps, up to `end` steps done; both may be after the plan's end."""
        return self._sequences(end) - self._sequences(first)

    def _sequences(self, steps: int) -> int:
        phase = self.phase_of(steps)
        return phase.first_sequence + (steps - phase.first_step) * phase.sequences

    def step_of(self, sequence: int) -> int:
        """The step, from 1, that uses sequence number `sequence` of those that are not left out. It may be after the
        plan's end."""
        phase = next(phase for phase in reversed(self.phases) if phase.first_sequence <= sequence)
        return phase.first_step + (sequence - phase.first_sequence) // phase.sequences + 1

    def tokens_at(self, step: int) -> int:
        """Tokens trained on after `step` steps."""
        phase = self.phase_of(step)
        return phase.first_token + (step - phase.first_step) * phase.train.batch_tokens

    @property
    def grain(self) -> int:
        """Tokens per chunk into which sources are cut: as set, or the longest sequence of any phase. Packed documents
        have no chunks."""
        given = self.phases[0].train.grain_tokens
        return given or max(phase.train.sequence_length for phase in self.phases)


def in_phases(config: Config) -> Iterator[tuple[Phase, Config]]:
    """Each phase, with the configuration that holds in it."""
    for phase in PhasePlan.of(config.train).phases:
        yield phase, config.model_copy(update={"train": phase.train})


def plan_problems(train: TrainConfig) -> Iterator[str]:
    """Why the phases form no plan."""
    plan = PhasePlan.of(train)
    if train.grain_tokens is not None and not (plan.declared and train.packing == "concatenate"):
        yield ("train.grain_tokens is for train.phases with train.packing 'concatenate', whose phases share sources in "
               "chunks. Leave it out.")
    for phase, own in zip(plan.phases, train.phases, strict=False):
        if own.until <= phase.first_token:
            yield (f"{phase.name}.until {tokens_text(own.until)} is not after {tokens_text(phase.first_token)}, where "
                   f"the phase before ends (its own `until`, rounded up to a whole step).")
        if own.schedule == "constant" and own.lr_end is not None:
            yield f"{phase.name} has an lr_end, but its schedule is constant; take linear or cosine."
        if own.warmup_steps is not None and own.warmup_steps > phase.steps > 0:
            yield f"{phase.name}.warmup_steps {own.warmup_steps} is more than its {phase.steps} steps."
    if train.steps != plan.steps:
        yield (f"train.steps {train.steps} is not the number of steps in train.phases, {plan.steps}. Leave it out (or "
               f"write null if a base sets it): it follows from the phases.")


def only_phases_differ(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two identities of the train stage both have phases and differ in nothing else. Training then continues,
    and refuses by itself any change to phases that have started (pipeline/training/checkpoints.py)."""
    def without(identity: Mapping[str, Any]) -> Mapping[str, Any]:
        config = identity.get("config", {})
        train = {key: value for key, value in config.get("train", {}).items()
                 if key not in ("phases", "steps", "grain_tokens")}
        return {**identity, "config": {**config, "train": train}}
    return all(identity.get("config", {}).get("train", {}).get("phases") for identity in (old, new)) \
        and without(old) == without(new)


@dataclass(frozen=True)
class BatchPlan:
    """One global batch, divided over ranks.

    Attributes:
        sequences: of the global batch.
        sequence_length: tokens of each.
        data_ranks: groups of ranks that see different sequences.
        sample_ranks: ranks in each such group (pp x cp x tp); they see the same sequences.
        micro_batch: sequences that pass through the model at once: the most, up to `at_most`, that divide a rank's
            sequences and leave a pipeline its micro-batches. 1 where no number does (`batch_problems` says why).
        at_most: train.micro_batch.
    """

    sequences: int
    sequence_length: int
    data_ranks: int
    sample_ranks: int
    micro_batch: int
    at_most: int

    @classmethod
    def of(cls, train: TrainConfig, parallel: ParallelConfig, ranks: int) -> BatchPlan:
        """The configured batch on this many ranks. It may not divide evenly: `batch_problems` checks that."""
        grid = parallel.sizes(ranks)
        sequences = train.batch_tokens // train.sequence_length
        data_ranks = grid.replicate * grid.shard
        own = sequences // data_ranks
        micro_batch = next((size for size in range(min(train.micro_batch, own), 1, -1)
                            if own % size == 0 and _feeds(own // size, parallel)), 1)
        return cls(sequences, train.sequence_length, data_ranks, grid.pipeline * grid.context * grid.tensor,
                   micro_batch, train.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.sequences * self.sequence_length

    @property
    def rank_sequences(self) -> int:
        """Sequences of a rank in an optimizer step."""
        return self.sequences // self.data_ranks

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank in an optimizer step."""
        return self.rank_sequences // self.micro_batch

    def first(self, data_rank: int) -> int:
        """The number of a batch's sequences that come before those of a data rank."""
        return data_rank * self.rank_sequences

    def __str__(self) -> str:
        less = f" (at most {self.at_most})" if self.micro_batch < self.at_most else ""
        ranks = counted(self.data_ranks, "rank") if self.sample_ranks == 1 else \
            f"{counted(self.data_ranks, 'group')} of {self.sample_ranks} ranks"
        return (f"{self.tokens:,} tokens a step = {self.sequences:,} sequences of {self.sequence_length:,} = "
                f"{ranks} x micro-batch {self.micro_batch}{less} x {self.accumulation} accumulated")


def largest_phase(config: Config, ranks: int) -> Phase:
    """The phase that needs the most memory: with most tokens in a micro-batch, and of those with the longest sequences
    and the largest batch."""
    def size(phase: Phase) -> tuple[int, int, int]:
        batch = BatchPlan.of(phase.train, config.parallel, ranks)
        return batch.micro_batch * batch.sequence_length, batch.sequence_length, batch.tokens
    return max(PhasePlan.of(config.train).phases, key=size)


def with_largest(config: Config, ranks: int) -> Config:
    """The configuration as it is in the phase that needs the most memory."""
    return config.model_copy(update={"train": largest_phase(config, ranks).train}) if config.train.phases else config


def batch_problems(train: TrainConfig, parallel: ParallelConfig, ranks: int) -> list[str]:
    """Why the batch cannot be divided over this many ranks, which must fit `parallel`; empty if it can."""
    if train.batch_tokens % train.sequence_length:
        return []  # `checks.problems` reports that, for any number of ranks
    plan = BatchPlan.of(train, parallel, ranks)
    batch = (f"{plan.sequences} sequences (train.batch_tokens {train.batch_tokens} / train.sequence_length "
             f"{train.sequence_length})")
    if plan.sequences % plan.data_ranks:
        return [f"the global batch of {batch} is not divisible by {plan.data_ranks} data-parallel ranks, even one "
                f"sequence at a time. Take fewer nodes, a multiple of {plan.data_ranks * train.sequence_length} as "
                f"train.batch_tokens, or larger parallel.tp, parallel.cp or parallel.pp, whose ranks share sequences."]
    if not _feeds(plan.rank_sequences, parallel):
        return [f"a pipeline needs at least parallel.pp ({parallel.pp}) micro-batches in a step, and with "
                f"parallel.pp_schedule interleaved a multiple of it; each of {plan.data_ranks} data-parallel groups "
                f"has {plan.rank_sequences} of {batch}. Take fewer nodes, a larger train.batch_tokens, or a smaller "
                f"parallel.pp."]
    return []


def _feeds(micro_batches: int, parallel: ParallelConfig) -> bool:
    """Whether a pipeline of this size, if there is one, can take this many micro-batches in a step."""
    return micro_batches >= parallel.pp and (parallel.pp_schedule != "interleaved" or micro_batches % parallel.pp == 0)
