"""The time that a rehearsed step loses, estimated from counted FLOPs and bytes at the rates below.

The estimate ranks layouts of one model on the same GPUs. It does not predict tokens per second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from drover.model.config import ModelConfig
from drover.pipeline.config.batch import BatchPlan, with_largest
from drover.pipeline.config.checks import network
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.parallel.stages import bubble
from drover.pipeline.rehearsal.report import Rehearsal

FLOPS = 0.5 * 989e12
"""FLOP/s of products: half of an H100's dense bf16 peak."""
NODE_BYTES, NETWORK_BYTES = 0.8 * 450e9, 0.8 * 50e9
"""Bytes/s that a GPU sends: four fifths of an H100's NVLink, and of a network adapter of 400 Gb/s."""
GAIN = 0.005
"""A setting must save at least this share of the products' time; smaller differences are below the estimate's
accuracy."""


@dataclass(frozen=True)
class Lost:
    """Time that a step loses, as shares of the time of the model's own products.

    waiting: for other stages of a pipeline. recomputing: activations that were not kept. exchanging: collectives that
    no computation hides.
    """

    waiting: float
    recomputing: float
    exchanging: float

    @property
    def time(self) -> float:
        """Time of the step, in units of the products' time."""
        return (1 + self.recomputing + self.exchanging) * (1 + self.waiting)

    def __str__(self) -> str:
        return (f"{self.waiting:.1%} waiting, {self.recomputing:.1%} recomputing, {self.exchanging:.1%} exchanging; "
                f"a step takes {self.time:.3f} x its products")


def before_exchanges(config: Config, ranks: int) -> Lost:
    """The loss that is known without a rehearsal: the least that a step can lose."""
    train, shape = with_largest(config, ranks).train, network(config)
    products = shape.flops_per_token(train.sequence_length, causal=True)
    return Lost(bubble(shape, config.parallel, BatchPlan.of(train, config.parallel, ranks).accumulation) or 0.0,
                recomputed_flops(train, shape) / products, 0.0)


def lost(config: Config, found: Rehearsal) -> Lost:
    """The loss of a rehearsed step, on nodes with as many GPUs as train requests, or with 8."""
    known, launch = before_exchanges(config, found.ranks), config.launch
    gpus_per_node = launch.train.gpus_per_node or launch.gpus_per_node or 8
    train, parallel = with_largest(config, found.ranks).train, config.parallel
    plan = BatchPlan.of(train, parallel, found.ranks)
    products_s = (plan.tokens / found.ranks * network(config).flops_per_token(train.sequence_length, causal=True)
                  / FLOPS)
    sizes = parallel.sizes(found.ranks)
    neighbours = sizes.tensor * sizes.context  # ranks of a tensor group are neighbours, then those of a context group
    span = {"tensor": sizes.tensor, "context": neighbours, "shard": neighbours * sizes.shard,
            "weights": neighbours * sizes.shard}
    # FSDP2 exchanges weights and gradients while products run. In a pipeline it all-gathers before them, and reduces
    # during the last micro-batch's backward pass. A group of all ranks counts as FSDP2's if FSDP2 has more than one
    # rank.
    beside = sizes.replicate * sizes.shard * sizes.context > 1
    at_once_s = hidden_s = summed_s = 0.0
    # The share of a group's reduce-scatters during which compiled blocks compute gradients of weights: those of the
    # backward pass. Under context parallelism with checkpointing these products run earlier, during the second gather.
    backward: dict[str, float] = {}
    if train.compile is not False and not parallel.async_tp:
        backward = {"tensor": 0.5, "context": 1.0 if train.activation_checkpointing == "none" else 0.0}
    for channel, size in found.traffic.bytes.items():
        if channel.operation == "receive":
            continue  # counted where it is sent
        share = 1.0 if channel.operation == "send" else (channel.ranks - 1) / channel.ranks
        rate = NODE_BYTES if span.get(channel.group, found.ranks) <= gpus_per_node else NETWORK_BYTES
        seconds = share * size / rate * (2 if channel.operation == "all-reduce" else 1)
        gathers = sizes.pipeline > 1 and channel.operation == "all-gather"
        if channel.operation == "reduce-scatter" and channel.group in backward:
            summed_s += seconds * backward[channel.group]
            seconds *= 1 - backward[channel.group]
        if channel.group in ("tensor", "context", "pipeline") or gathers or not beside:
            at_once_s += seconds
        else:
            hidden_s += seconds
    computing_s = products_s * (1 + known.recomputing)
    if sizes.pipeline > 1:
        computing_s *= 2 / 3 / plan.accumulation
    exchanged_s = at_once_s + max(0.0, hidden_s - computing_s) + max(0.0, summed_s - products_s / 3)
    return replace(known, exchanging=exchanged_s / products_s)


def recomputed_flops(train: TrainConfig, shape: ModelConfig) -> float:
    """FLOPs per token that are recomputed for the backward pass, which never needs w2's result."""
    if train.activation_checkpointing == "none":
        return 0.0
    key_value = shape.kv_heads * shape.head_width
    queries = shape.dim * shape.heads * shape.head_width
    layer = {"wq": queries, "wk": shape.dim * key_value, "wv": shape.dim * key_value,
             "wo": queries, "w1": shape.dim * shape.hidden, "w3": shape.dim * shape.hidden}
    forward = {name: 2.0 * size * shape.layers for name, size in layer.items()}
    forward["attention"] = (shape.flops_per_token(train.sequence_length, causal=True)
                            - 6.0 * shape.matmul_parameter_count) / 3
    kept = train.kept_activations if train.activation_checkpointing == "selective" else []
    return sum(flops for name, flops in forward.items() if name not in kept) / train.recomputed_blocks
