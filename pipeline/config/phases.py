"""The phases of a training: their settings, and the resulting plan of steps and tokens. Without torch.

Phases end by steps, so a step's number determines its phase, whatever a rollback has left out. A training without
`train.phases` is one phase with train's settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drover.pipeline.config.mixture import tokens_text
from drover.pipeline.config.training import PhaseConfig, TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.files import Record


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


def only_phases_differ(old: Record, new: Record) -> bool:
    """Whether two identities of the train stage both have phases and differ in nothing else. Training then continues,
    and refuses by itself any change to phases that have started (pipeline/training/checkpoints.py)."""
    def without(identity: Record) -> Record:
        config = identity.get("config", {})
        train = {key: value for key, value in config.get("train", {}).items()
                 if key not in ("phases", "steps", "grain_tokens")}
        return {**identity, "config": {**config, "train": train}}
    return all(identity.get("config", {}).get("train", {}).get("phases") for identity in (old, new)) \
        and without(old) == without(new)
