"""How a model is spread over ranks. No choice here changes what is computed, beyond rounding."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt

from drover.pipeline.config.section import Section


class GridSizes(NamedTuple):
    """The lengths of the axes along which ranks are laid out; their product is the number of ranks."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


class ParallelConfig(Section):
    """How the model is spread over ranks. Results agree within rounding for every choice, and a run may change it at
    any checkpoint.

    fsdp2: ranks = pp x dp_replicate x dp_shard x cp x tp. deepspeed: all ranks share one copy by ZeRO.
    """

    engine: Literal["fsdp2", "deepspeed"] = "fsdp2"
    """`fsdp2` is torch's own sharding and composes with tensor, context and pipeline parallelism; `deepspeed` is
    ZeRO, which can also keep optimizer states or weights in host memory (`offload`)."""
    dp_replicate: int = Field(1, ge=-1)
    """Full copies of the sharded model (HSDP). With many nodes: one copy per group of nodes, so that weights are
    gathered inside the group and only gradients travel between groups. -1: as many as the ranks make, so that
    `dp_replicate: -1` with `dp_shard: 8` is a copy on each node of eight GPUs, on any number of nodes."""
    dp_shard: int = Field(-1, ge=-1)
    """Ranks that share one copy of weights, gradients and moments; -1: all the rest."""
    tp: PositiveInt = 1
    """Ranks that share each matrix product (tensor parallelism, with the sequence split between the products). Keep
    it within one node; it must divide heads, kv_heads, the sequence length and the vocabulary."""
    cp: PositiveInt = 1
    """Ranks that share each sequence (context parallelism): each holds a part of every document, and keys and values
    are gathered for attention. For sequences that fit no other way; cp x tp must divide the sequence length. These
    ranks share weights as those of dp_shard do."""
    pp: PositiveInt = 1
    """Groups of ranks that hold neighbouring layers and pass activations on (pipeline parallelism). Every step needs at
    least as many micro-batches as there are groups; gradients meet once a step."""
    pp_schedule: Literal["1f1b", "interleaved", "zbv"] = "1f1b"
    """In which order a pipeline's ranks compute: `1f1b` one forward and one backward pass in turn, with one stage on a
    rank; `interleaved` the same with `pp_stages` of them, which waits less and sends more; `zbv` (experimental) with
    two, laid out as a V, and gradients of weights computed while others would wait."""
    pp_stages: int = Field(2, gt=1)
    """Stages on each rank where pp_schedule is `interleaved`."""
    async_tp: bool = False
    """Cut the products of tensor parallelism, so that a part is exchanged while another is computed (torch's
    asynchronous tensor parallelism). It needs compiled blocks and GPUs that reach each other's memory (NVLink). Not
    tried on GPUs yet: compare a few steps with and without."""
    timeout_minutes: PositiveFloat | None = None
    """How long a rank waits for others in a collective before torch ends it and names their group: `mesh_replicate`,
    `mesh_shard`, `mesh_tensor` and so on, `default_pg` (all ranks). null: 30, or 10 more than the watchdog
    (`train.guards.hang_minutes`) waits in a first step, if that is longer: it is to come first, since it writes down
    what each rank was doing. More where hashing a checkpoint or compiling takes longer."""
    reshard: Literal["always", "never"] = "always"
    """Whether a block's weights are let go after its forward pass and gathered again for the backward pass. `never`
    saves that second gathering where the memory holds all weights in the computing precision."""
    reduce: Literal["each", "last"] = "each"
    """When gradients are added up over ranks: after `each` micro-batch, so that a rank holds only its part of them, or
    after the `last` of a step, which saves the others' communication where memory holds all gradients of the model (of
    a tensor-parallel rank's part) in float32."""
    zero_stage: Literal[1, 2, 3] = 2
    """deepspeed: what is split over ranks: 1 moments and masters, 2 also gradients, 3 also weights."""
    offload: Literal["none", "optimizer", "params"] = "none"
    """deepspeed: keep moments and masters in host memory (`optimizer`), and with ZeRO 3 the weights too (`params`).
    Slower; for models that fit no other way."""

    def sizes(self, ranks: int) -> GridSizes:
        """The axes that so many ranks make up; where they do not, `checks.grid_problems` says why."""
        each = self.pp * self.cp * self.tp
        copies = max(1, ranks // (each * self.dp_shard)) if self.dp_replicate == -1 else self.dp_replicate
        shard = ranks // (each * copies) if self.dp_shard == -1 else self.dp_shard
        return GridSizes(self.pp, copies, shard, self.cp, self.tp)

    @property
    def stages(self) -> int:
        """Parts into which the layers are cut, over all ranks of a pipeline."""
        each = {"1f1b": 1, "interleaved": self.pp_stages, "zbv": 2}[self.pp_schedule]
        return self.pp * each if self.pp > 1 else 1

    def stage_rank(self, stage: int) -> int:
        """The pipeline rank that has a stage: from the first to the last rank in turn, or there and back in a V."""
        turn, rank = divmod(stage, self.pp)
        return self.pp - 1 - rank if self.pp_schedule == "zbv" and turn % 2 else rank

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank, in order."""
        return [stage for stage in range(self.stages) if self.stage_rank(stage) == rank]
