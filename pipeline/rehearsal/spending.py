"""What spare memory buys: settings that lose less time and still fit, each of them rehearsed.

Time is estimated, not measured: from counted FLOPs and bytes at the rates below. It ranks layouts of one model on the
same GPUs; it does not predict tokens per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from model.config import ModelConfig
from pipeline.config.batch import BatchPlan, with_largest
from pipeline.config.training import KEPT_ACTIVATIONS, TrainConfig
from pipeline.config.tree import Config
from pipeline.console import readable
from pipeline.errors import NotRehearsedError, UserError
from pipeline.parallel.stages import bubble
from pipeline.rehearsal.apart import rehearse_apart
from pipeline.rehearsal.fitting import TIGHT, changed, named, possible
from pipeline.rehearsal.report import Rehearsal, ends_and_middle, fullest

FLOPS = 0.5 * 989e12
"""FLOP/s of products: half of an H100's dense bf16 peak."""
NODE_BYTES, NETWORK_BYTES = 0.8 * 450e9, 0.8 * 50e9
"""Bytes/s that a GPU sends: four fifths of an H100's NVLink, and of a network adapter of 400 Gb/s."""
KEPT = (("attention",), ("wo",), ("wq", "wk", "wv"), ("w1", "w3"))
"""`train.kept_activations` that are kept together."""
GAIN = 0.005
"""A setting has to save at least this share of the products' time; less is finer than the estimate."""


@dataclass(frozen=True)
class Lost:
    """Time that a step loses, each as a share of the time of the model's own products.

    waiting: in a pipeline, for other stages. recomputing: activations that were not kept. exchanging: collectives that
    no computation hides.
    """

    waiting: float
    recomputing: float
    exchanging: float

    @property
    def time(self) -> float:
        """Of the step, where products alone take 1."""
        return (1 + self.recomputing + self.exchanging) * (1 + self.waiting)

    def __str__(self) -> str:
        return (f"{self.waiting:.1%} waiting, {self.recomputing:.1%} recomputing, {self.exchanging:.1%} exchanging; "
                f"a step takes {self.time:.3f} x its products")


@dataclass(frozen=True)
class Layout:
    """Settings that were rehearsed, by `section.key`; none: the configuration as it is."""

    settings: dict[str, object]
    peak: int
    lost: Lost

    def __str__(self) -> str:
        return f"{named(self.settings) or 'as configured'}: {readable(self.peak)}, {self.lost}"


def spend(config: Config, ranks: int, memory: float, shape: ModelConfig, *, gpus_per_node: int = 8,
          tell: Callable[[str], None] = lambda _: None) -> list[Layout]:
    """The configuration's layout, then each layout that the search moved to.

    The search rehearses every single change (`changes`) that takes memory and may save time. It moves to the one that
    saves most and fits, of equal ones to the smallest. It ends where none saves time.

    Args:
        memory: bytes of a GPU, of which TIGHT may be used.
        shape: the network with its vocabulary.
        tell: called with a line on every layout.

    Raises:
        UserError: the configuration cannot be rehearsed, or its pipeline is zbv, whose waiting is not known.
    """
    if config.parallel.pp > 1 and config.parallel.pp_schedule == "zbv":
        raise UserError("What spare memory buys is not searched with parallel.pp_schedule zbv, whose waiting time is "
                        "not known. Take 1f1b or interleaved.")

    def rehearsed(settings: dict[str, object]) -> Layout:
        other = changed(config, settings)
        most = fullest(rehearse_apart(other, ranks, ends_and_middle(other, ranks)))
        layout = Layout(settings, most.peak.bytes, lost(other, shape, most, gpus_per_node))
        tell(str(layout))
        return layout

    def tried(settings: dict[str, object]) -> Iterator[Layout]:
        try:
            yield rehearsed(settings)
        except (NotRehearsedError, UserError) as error:
            tell(f"{named(settings)}: not rehearsed: {error}")

    path = [rehearsed({})]
    while True:
        before = path[-1]
        candidates = [{**before.settings, **change} for change in changes(changed(config, before.settings), ranks)]
        better = [layout for settings in candidates if possible(config, settings, ranks) for layout in tried(settings)
                  if layout.peak <= TIGHT * memory and layout.lost.time < before.lost.time - GAIN]
        if not better:
            return path
        path.append(min(better, key=lambda layout: (round(layout.lost.time / GAIN), layout.peak)))


def changes(config: Config, ranks: int) -> Iterator[dict[str, object]]:
    """Single changes that take memory and may save time."""
    train, parallel = config.train, config.parallel
    if train.activation_checkpointing == "full":
        for kept in (["attention"], [*KEPT_ACTIVATIONS]):
            yield {"train.activation_checkpointing": "selective", "train.recomputed_blocks": 1,
                   "train.kept_activations": kept}
    if train.activation_checkpointing == "selective":
        for group in KEPT:
            if more := [name for name in group if name not in train.kept_activations]:
                yield {"train.kept_activations": [*train.kept_activations, *more]}
    if train.activation_checkpointing != "none":
        yield {"train.activation_checkpointing": "none", "train.recomputed_blocks": 1}
        if 2 * train.recomputed_blocks <= config.model.layers:
            yield {"train.recomputed_blocks": 2 * train.recomputed_blocks}
    micro_batch = BatchPlan.of(train, parallel, ranks).micro_batch
    larger: dict[str, object] = {"train.micro_batch": 2 * micro_batch}
    if BatchPlan.of(changed(config, larger).train, parallel, ranks).micro_batch > micro_batch:
        yield larger
    if parallel.reshard == "always":
        yield {"parallel.reshard": "never"}
    if parallel.pp == 1 and parallel.reduce == "each":
        yield {"parallel.reduce": "last"}
    if parallel.dp_replicate > 0:
        yield {"parallel.dp_replicate": 2 * parallel.dp_replicate}
    if parallel.pp > 1 and parallel.pp_schedule == "interleaved":
        most = config.model.layers // parallel.pp
        for stages in sorted({parallel.pp_stages + 1, min(2 * parallel.pp_stages, most), most}):
            if parallel.pp_stages < stages <= most:
                yield {"parallel.pp_stages": stages}


def lost(config: Config, shape: ModelConfig, found: Rehearsal, gpus_per_node: int = 8) -> Lost:
    """What a rehearsed step of the configuration loses. shape: the network with its vocabulary."""
    config = with_largest(config, found.ranks)
    train, parallel = config.train, config.parallel
    plan = BatchPlan.of(train, parallel, found.ranks)
    tokens = plan.tokens / found.ranks
    products_s = tokens * shape.flops_per_token(train.sequence_length, causal=True) / FLOPS
    recomputed_s = tokens * recomputed_flops(train, shape) / FLOPS
    sizes = parallel.sizes(found.ranks)
    neighbours = sizes.tensor * sizes.context  # the ranks of a tensor group follow each other, then those of a context
    span = {"tensor": sizes.tensor, "context": neighbours, "shard": neighbours * sizes.shard,
            "weights": neighbours * sizes.shard}
    # FSDP2 exchanges weights and gradients beside the products; in a pipeline it gathers before all of them, and
    # reduces beside the last micro-batch's backward pass. A group of all ranks counts as FSDP2's wherever FSDP2 has
    # more than one rank.
    beside = sizes.replicate * sizes.shard * sizes.context > 1
    at_once_s = hidden_s = summed_s = 0.0
    # The share of a group's reduce-scatters beside which compiled blocks compute gradients of weights: those of the
    # backward pass. Under context parallelism with checkpointing, these products run before, beside the second gather.
    backward: dict[str, float] = {}
    if train.compile is not False and not parallel.async_tp:
        backward = {"tensor": 0.5, "context": 1.0 if train.activation_checkpointing == "none" else 0.0}
    for channel, size in found.traffic.bytes.items():
        if channel.operation == "receive":
            continue  # another rank sends it meanwhile
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
    computing_s = products_s + recomputed_s
    if sizes.pipeline > 1:
        computing_s *= 2 / 3 / plan.accumulation
    exchanged_s = at_once_s + max(0.0, hidden_s - computing_s) + max(0.0, summed_s - products_s / 3)
    return Lost(bubble(shape, parallel, plan.accumulation) or 0.0, recomputed_s / products_s, exchanged_s / products_s)


def recomputed_flops(train: TrainConfig, shape: ModelConfig) -> float:
    """FLOPs a token that are computed again for the backward pass, which never needs w2's result."""
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
