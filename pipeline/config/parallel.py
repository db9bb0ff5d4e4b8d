"""How a model is spread over ranks. No choice here changes what is computed, beyond rounding."""

from __future__ import annotations

from typing import Literal

from pipeline.config.section import Section, execution


class ParallelConfig(Section):
    """How the model is spread over ranks. Results agree within rounding for every choice, and a run may change it at
    any checkpoint.

    fsdp2: ranks = dp_replicate x dp_shard x tp. deepspeed: all ranks share one copy by ZeRO.
    """

    engine: Literal["fsdp2", "deepspeed"] = execution("fsdp2")
    """`fsdp2` is torch's own sharding and composes with tensor parallelism; `deepspeed` is ZeRO, which can also keep
    optimizer states or weights in host memory (`offload`)."""
    dp_replicate: int = execution(1, gt=0)
    """Full copies of the sharded model (HSDP). With many nodes: one copy per group of nodes, so that weights are
    gathered inside the group and only gradients travel between groups."""
    dp_shard: int = execution(-1, ge=-1)
    """Ranks that share one copy of weights, gradients and moments; -1: all the rest."""
    tp: int = execution(1, gt=0)
    """Ranks that share each matrix product (tensor parallelism, with the sequence split between the products). Keep
    it within one node; it must divide heads, kv_heads, the sequence length and the vocabulary."""
    reshard: Literal["always", "never"] = execution("always")
    """Whether a block's weights are let go after its forward pass and gathered again for the backward pass. `never`
    saves that second gathering where the memory holds all weights in the computing precision."""
    reduce: Literal["each", "last"] = execution("each")
    """When gradients are added up over ranks: after `each` micro-batch, so that a rank holds only its part of them, or
    after the `last` of a step, which saves the others' communication where memory holds all gradients of the model (of
    a tensor-parallel rank's part) in float32."""
    zero_stage: Literal[1, 2, 3] = execution(2)
    """deepspeed: what is split over ranks: 1 moments and masters, 2 also gradients, 3 also weights."""
    offload: Literal["none", "optimizer", "params"] = execution("none")
    """deepspeed: keep moments and masters in host memory (`optimizer`), and with ZeRO 3 the weights too (`params`).
    Slower; for models that fit no other way."""

    def sizes(self, ranks: int) -> tuple[int, int, int]:
        """(copies, shards, tensor) that so many ranks make up; where they do not, `checks.grid_problems` says why."""
        shard = ranks // (self.dp_replicate * self.tp) if self.dp_shard == -1 else self.dp_shard
        return self.dp_replicate, shard, self.tp
