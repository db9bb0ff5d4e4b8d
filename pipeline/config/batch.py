"""The batch of an optimizer step. Checks, the printed plan, training and tools all compute it here.

Without torch, so that the batch that is printed before a start is the batch that trains.
"""

from __future__ import annotations

from dataclasses import dataclass

from drover.pipeline.config.parallel import ParallelConfig
from drover.pipeline.config.phases import Phase, PhasePlan
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.console import counted


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
        fewer = next(many for many in range(min(plan.data_ranks, 1 << 20), 0, -1) if plan.sequences % many == 0)
        return [f"the global batch of {batch} is not divisible by {plan.data_ranks} data-parallel ranks, even one "
                f"sequence at a time. Take fewer nodes (at most {fewer} data-parallel ranks), a multiple of "
                f"{plan.data_ranks * train.sequence_length} as train.batch_tokens, or larger parallel.tp, parallel.cp "
                f"or parallel.pp, whose ranks share sequences."]
    if not _feeds(plan.rank_sequences, parallel):
        multiple = ", and with parallel.pp_schedule interleaved a multiple of it"
        return [f"a pipeline needs at least parallel.pp ({parallel.pp}) micro-batches in a step"
                f"{multiple if parallel.pp_schedule == 'interleaved' else ''}; each of {plan.data_ranks} data-parallel "
                f"groups has {plan.rank_sequences} of {batch}. Take fewer nodes, a larger train.batch_tokens, or a "
                f"smaller parallel.pp."]
    return []


def _feeds(micro_batches: int, parallel: ParallelConfig) -> bool:
    """Whether a pipeline of this size, if there is one, can take this many micro-batches in a step."""
    return micro_batches >= parallel.pp and (parallel.pp_schedule != "interleaved" or micro_batches % parallel.pp == 0)
