"""How a model is distributed over ranks. No choice here changes what is computed, beyond rounding."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt

from drover.pipeline.config.section import Section


class GridSizes(NamedTuple):
    """The sizes of the device mesh; their product is the number of ranks."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


class ParallelConfig(Section):
    """How the model is distributed over ranks. Results agree within rounding for every choice, and a run may change it
    at any checkpoint.

    fsdp2: ranks = pp x dp_replicate x dp_shard x cp x tp. deepspeed: all ranks shard one replica by ZeRO.
    """

    engine: Literal["fsdp2", "deepspeed"] = "fsdp2"
    """`fsdp2` is torch's own sharding and composes with tensor, context and pipeline parallelism. `deepspeed` is ZeRO,
    which can also keep optimizer state or weights in host memory (`offload`)."""
    dp_replicate: PositiveInt | Literal[-1] = 1
    """Replicas of the sharded model (HSDP). With many nodes, use one replica per group of nodes: only gradients then
    travel between groups. -1: as many as there are ranks for. For example, `dp_replicate: -1` with `dp_shard: 8` is a
    replica per node of eight GPUs, on any number of nodes."""
    dp_shard: PositiveInt | Literal[-1] = -1
    """Ranks that shard one replica of weights, gradients and optimizer state; -1: all remaining ranks."""
    tp: PositiveInt = 1
    """Tensor parallelism: ranks that share each matrix product. Between the products they split the sequence. Keep them
    within one node. tp must divide heads, kv_heads, the sequence length and the vocabulary."""
    cp: PositiveInt = 1
    """Context parallelism: ranks that share each sequence. Each holds a part of every document and all-gathers keys and
    values for attention. Use it for sequences that fit no other way. cp x tp must divide the sequence length. These
    ranks also shard the weights, as those of dp_shard do."""
    pp: PositiveInt = 1
    """Pipeline parallelism: groups of ranks that hold neighbouring layers and pass activations on. Every step needs at
    least as many micro-batches as there are groups. Gradients are reduced once a step."""
    pp_schedule: Literal["1f1b", "interleaved", "zbv"] = "1f1b"
    """Order in which a pipeline's ranks compute. `1f1b`: one forward and one backward pass in turn, with one stage per
    rank. `interleaved`: the same with `pp_stages` stages per rank, for smaller bubbles and more communication. `zbv`
    (experimental): two stages per rank, laid out as a V; weight gradients are computed in the bubbles."""
    pp_stages: int = Field(2, gt=1)
    """Stages per rank for `pp_schedule: interleaved`."""
    async_tp: bool = False
    """Overlap communication and computation in tensor parallelism (torch's asynchronous tensor parallelism). It needs
    compiled blocks and GPUs that reach each other's memory (NVLink). Not tried on GPUs yet: compare a few steps with
    and without."""
    timeout_minutes: PositiveFloat | None = None
    """Minutes that a rank waits for others in a collective before torch aborts it and names their group. Groups are
    `mesh_replicate`, `mesh_shard`, `mesh_tensor` and so on; `default_pg` is all ranks. null: 30, or 10 more than the
    watchdog (`train.guards.hang_minutes`) waits in a first step, if that is longer. The watchdog should come first,
    since it records what each rank was doing. Raise it if hashing a checkpoint or compiling takes longer."""
    reshard: Literal["always", "never"] = "always"
    """`always`: reshard a block's weights after its forward pass and all-gather them again for the backward pass.
    `never` saves the second all-gather if memory holds all weights in the computing precision."""
    reduce: Literal["each", "last"] = "each"
    """When gradients are reduced over ranks. `each`: after every micro-batch, so that a rank holds only its shard of
    them. `last`: after the last micro-batch of a step, which saves communication. Memory must then hold all gradients
    (of a tensor-parallel rank's part) in float32."""
    zero_stage: Literal[1, 2, 3] = 2
    """For deepspeed: what is sharded over ranks. 1: optimizer state and master weights; 2: gradients too; 3: weights
    too."""
    offload: Literal["none", "optimizer", "params"] = "none"
    """For deepspeed: what is kept in host memory. `optimizer`: optimizer state and master weights; `params`: with ZeRO
    3, weights too. Slower; for models that fit no other way."""

    def sizes(self, ranks: int) -> GridSizes:
        """The mesh for this many ranks. If they do not fit, `checks.grid_problems` says why."""
        each = self.pp * self.cp * self.tp
        copies = max(1, ranks // (each * self.dp_shard)) if self.dp_replicate == -1 else self.dp_replicate
        shard = ranks // (each * copies) if self.dp_shard == -1 else self.dp_shard
        return GridSizes(self.pp, copies, shard, self.cp, self.tp)

    @property
    def stages(self) -> int:
        """Number of parts into which the layers are cut, over all ranks of a pipeline."""
        each = {"1f1b": 1, "interleaved": self.pp_stages, "zbv": 2}[self.pp_schedule]
        return self.pp * each if self.pp > 1 else 1

    def stage_rank(self, stage: int) -> int:
        """The pipeline rank that has a stage: in turn from first to last, or there and back in a V."""
        turn, rank = divmod(stage, self.pp)
        return self.pp - 1 - rank if self.pp_schedule == "zbv" and turn % 2 else rank

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank, in order."""
        return [stage for stage in range(self.stages) if self.stage_rank(stage) == rank]
