"""The batch of an optimizer step, as every part of Drover counts it: checks, the plan that is shown, training, tools.

Without torch, so that what is printed before anything starts is what trains.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.parallel import ParallelConfig
from pipeline.config.training import TrainConfig


@dataclass(frozen=True)
class BatchPlan:
    """One global batch, dealt out to ranks.

    Attributes:
        sequences: of the global batch.
        sequence_length: tokens of each.
        data_ranks: groups of ranks that see different sequences.
        sample_ranks: ranks in each such group (pp x cp x tp); they see the same sequences.
        micro_batch: sequences that go through the model at once.
    """

    sequences: int
    sequence_length: int
    data_ranks: int
    sample_ranks: int
    micro_batch: int

    @classmethod
    def of(cls, train: TrainConfig, parallel: ParallelConfig, ranks: int) -> BatchPlan:
        """The batch as configured, on so many ranks; only `batch_problems` tells whether it comes out even."""
        found = parallel.sizes(ranks)
        return cls(train.batch_tokens // train.sequence_length, train.sequence_length, found.replicate * found.shard,
                   found.pipeline * found.context * found.tensor, train.micro_batch)

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

    @property
    def remainder(self) -> int:
        """Sequences that no rank would take; a batch that is trained on leaves none."""
        return self.sequences - self.data_ranks * self.accumulation * self.micro_batch

    def first(self, data_rank: int) -> int:
        """Sequences of a batch that come before the ones of a data rank."""
        return data_rank * self.rank_sequences

    def __str__(self) -> str:
        return (f"{self.tokens:,} tokens a step = {self.sequences:,} sequences of {self.sequence_length:,} = "
                f"{self._takers()} x micro batch {self.micro_batch} x {self.accumulation} accumulated")

    def _takers(self) -> str:
        many = "" if self.data_ranks == 1 else "s"
        if self.sample_ranks == 1:
            return f"{self.data_ranks} rank{many}"
        return f"{self.data_ranks} group{many} of {self.sample_ranks} ranks"


def batch_problems(train: TrainConfig, parallel: ParallelConfig, ranks: int) -> list[str]:
    """Why the batch cannot be dealt out to so many ranks, which must fit `parallel`; empty where it can."""
    if train.batch_tokens % train.sequence_length:
        return []  # said by `checks.problems`, for any number of ranks
    plan = BatchPlan.of(train, parallel, ranks)
    if plan.remainder:
        return [f"the global batch of {plan.sequences} sequences (train.batch_tokens {train.batch_tokens} / "
                f"train.sequence_length {train.sequence_length}) is not divisible by "
                f"{plan.micro_batch * plan.data_ranks} (train.micro_batch {plan.micro_batch} x {plan.data_ranks} "
                f"data-parallel ranks)."]
    return pipeline_problems(plan, parallel)


def pipeline_problems(plan: BatchPlan, parallel: ParallelConfig) -> list[str]:
    """Why a pipeline cannot take the batch's micro-batches; empty where it can."""
    if parallel.pp == 1:
        return []
    if plan.accumulation < parallel.pp:
        return [f"a pipeline needs at least as many micro-batches in a step as it has ranks, parallel.pp "
                f"{parallel.pp}; there are {plan.accumulation} (train.batch_tokens {plan.tokens} / "
                f"{plan.sequence_length} = {plan.sequences} sequences over {plan.data_ranks} data-parallel groups, "
                f"train.micro_batch {plan.micro_batch})."]
    if parallel.pp_schedule == "interleaved" and plan.accumulation % parallel.pp:
        return [f"parallel.pp_schedule interleaved needs a number of micro-batches that parallel.pp ({parallel.pp}) "
                f"divides; there are {plan.accumulation} in a step."]
    return []
