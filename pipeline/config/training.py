"""Settings of the train stage: the run's length and batch, the optimizer, checkpoints, logging, and the layout."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from drover.pipeline.config.kinds import Kind
from drover.pipeline.config.section import LocalPath, Section, StoreUrl, added, execution, nested
from drover.pipeline.config.shipped import HOOKS, SINKS

UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
SMALLEST_SHARE = 2.0**-17
"""Smallest share of all training sequences. The order of samples repeats a table, in which each source needs several
sequences: this share gives 8 in a million."""


def mixture_problems(mixture: Mapping[str, float]) -> list[str]:
    """Shares of 0 or more that are too small to be sampled."""
    total = math.fsum(mixture.values())
    return [f"train.mixture gives the source {name} {share / total:.3g} of the training sequences; the smallest share "
            f"that is sampled is {SMALLEST_SHARE:.3g} (1 in {round(1 / SMALLEST_SHARE):,}). Raise it, or write 0 to "
            f"leave the source out." for name, share in mixture.items() if 0 < share / total < SMALLEST_SHARE]


def read_tokens(value: Any) -> Any:
    """A number of tokens in any notation: 250M, 2.5k, 10B or 15T as text, or a whole number with a point or an
    exponent. Other values are returned unchanged, for pydantic to refuse."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([kKMBT]?)\s*", value)):
        number = Decimal(match[1].replace("_", "")) * UNITS[match[2].replace("K", "k")]
        return int(number) if number == int(number) and number < 2**63 else float(number)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


def _share(value: Any) -> Any:
    number = read_tokens(value)
    return float(number) if isinstance(number, int) and not isinstance(number, bool) else number


TokenCount = Annotated[int, BeforeValidator(read_tokens)]
"""Tokens: a whole number, or a text such as 250M."""
Mixture = dict[str, Annotated[float, BeforeValidator(_share), Field(ge=0, lt=2**63)]]
"""Weights by source: numbers, or tokens as texts (8B)."""


def tokens_text(tokens: float) -> str:
    """A number of tokens in short: 250M, 1.5k, 10B."""
    for unit in ("T", "B", "M", "k"):
        if abs(tokens) >= UNITS[unit]:
            return f"{float(Decimal(tokens) / UNITS[unit]):.4g}{unit}"  # of any size
    return f"{tokens:.4g}"


FIRST = 3
"""The watchdog waits this many times `hang_minutes` for a first step, which may compile."""


class GuardConfig(Section):
    """What training does when a step goes wrong.

    All of it is execution: these settings change nothing in a run in which nothing goes wrong. If something does, the
    manifest counts it (`skipped`, `spikes`, `rollbacks`). So you may change them in a stopped run, and a finished run
    does not become stale.
    """

    max_skipped: NonNegativeInt = 8
    """Most updates that may be skipped in a row; one more, and training stops with an explanation. A loss or gradient
    norm that is not finite always skips the update. A spike skips it under `spike: skip`."""
    spike: Literal["log", "skip", "rollback"] = "log"
    """What to do when the loss or gradient norm is far above recent steps. `log`: log it and continue. `skip`: skip the
    update. `rollback`: return to the last checkpoint and leave this step's samples out for good."""
    spike_deviations: PositiveFloat = 8.0
    """A spike exceeds the running median by more than this many running deviations. The deviation is the median
    absolute deviation, scaled to the standard deviation of normal noise. Gradient norms have long tails: if this is too
    low, good steps count as spikes."""
    spike_window: int = Field(128, gt=1)
    """Updates over which the running median and deviation are computed. A lasting higher level counts as normal once it
    fills half the window."""
    spike_min_history: int = Field(32, gt=1)
    """Updates before anything counts as a spike. The window is never shorter than this."""
    max_rollbacks: NonNegativeInt = 5
    """Most rollbacks in the whole run, with all its restarts; one more, and training stops with an explanation. If data
    spikes again and again, leaving out more of it does not help."""
    replica_hash_every: PositiveInt | None = 200
    """Steps between two comparisons of the weights of replicas, which must be bit-identical; null: never. The
    comparison finds hardware that computes wrong numbers silently. It has nothing to compare without replicas."""
    hang_minutes: PositiveFloat | None = 10.0
    """Minutes without a sign of life after which a rank counts as hung; never less than 10 median steps. null: never.
    All ranks then write their stacks and exit, and a launcher restarts from the last checkpoint. Signs of life are a
    step, a validation batch and each token of a sample text. Saving and loading are not watched. The first step and the
    first validation batches may compile, so they have three times as long. In later steps, once all ranks have their
    batch (on GPUs: while a step's result is read), the limit is 100 seconds (300 with compiled blocks). If 10 median
    steps are longer, they are the limit."""


Setting = bool | int | float | str
"""A value in train.optimizer_settings."""
LogSink = Annotated[SerializeAsAny[Kind], PlainValidator(SINKS.read)]
TrainingHook = Annotated[SerializeAsAny[Kind], PlainValidator(HOOKS.read)]

Activation = Literal["attention", "wq", "wk", "wv", "wo", "w1", "w3", "w2"]
"""The parts of a block whose results activation checkpointing can keep, in the order of computation."""

KEPT_ACTIVATIONS: tuple[Activation, ...] = ("attention", "wq", "wk", "wv", "wo", "w1", "w3")


class CheckpointConfig(Section):
    """When to save, and what to keep. The last step is always saved, and so is the step of a stop request."""

    every_steps: PositiveInt | None = 100
    """Optimizer steps between two saves; null: only by minutes, and at the end."""
    every_minutes: PositiveFloat | None = None
    """Save also when this many minutes have passed since the last save; null: only by steps. For long runs it bounds
    the work that a crash can cost, however fast the steps are."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep. With two, one is left to return to if the newest is corrupted."""
    permanent_every: PositiveInt | None = None
    """Checkpoints at multiples of this step are never deleted; null: none is permanent."""
    background: bool = True
    """Write while training continues. The loop stops only for the copy to host memory, which needs room for this rank's
    weights and optimizer state. One save is in progress at a time. false: wait for each."""
    attempts: PositiveInt = 3
    """How often a save is tried before the run stops with the reason. Each failure is logged."""
    copy_to: StoreUrl | None = None
    """URL in an object store (`s3://bucket/runs/mine`, `gs://`, `az://`, `file:///`) for uploads of the checkpoints;
    null: no uploads. Training continues during an upload. Use the URL for this run alone. A start downloads a
    checkpoint from there if the run folder has none as new, or is gone. Training then continues from it. `keep` and
    `permanent_every` hold there too. Credentials come from the environment. See docs/checkpoints.md."""


class ProfileConfig(Section):
    """Profiles some steps: the time that each operation takes, and the GPU memory."""

    start: PositiveInt | None = None
    """First step to profile, counted from the start of the process; null: none. Use 5 or later, since the first steps
    compile and allocate memory."""
    steps: PositiveInt = 3
    """Number of steps to profile, one after another."""
    ranks: list[NonNegativeInt] = [0]
    """Ranks to profile. Each writes its files into train/profile."""


class PhaseConfig(Section):
    """A part of training with settings of its own. Settings that it leaves out are those of `train`."""

    until: TokenCount = Field(gt=0)
    """End of the phase: tokens since the start of the run, padding included, as a number or as 250M, 10B. It is rounded
    up to a whole step. The last phase ends the run."""
    mixture: Mixture | None = None
    """Weights of the sources in this phase, as in train.mixture."""
    sequence_length: PositiveInt | None = None
    """Tokens per sequence in this phase."""
    batch_tokens: TokenCount | None = Field(None, gt=0)
    """Tokens per optimizer step in this phase."""
    micro_batch: PositiveInt | None = execution(None)
    """Upper limit of sequences that a rank processes at once in this phase."""
    lr: NonNegativeFloat | None = None
    """Learning rate with which this phase starts a new curve, after `warmup_steps`; null: where the curve before ended.
    Any of lr, lr_end, schedule and warmup_steps starts a new curve, which lasts until the next one. A phase without
    them continues the curve before it. If the first phase has none, it follows train's own curve (lr, schedule,
    warmup_steps)."""
    lr_end: NonNegativeFloat | None = None
    """Learning rate at the end of a curve that is not constant; null: its start times train.min_lr_share. 0 anneals."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """Form of the curve that starts here; null: linear if `lr_end` is given, else constant."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear warmup from 0 at the start of the curve; null: none (in the first phase, train's)."""

    @property
    def overlaid(self) -> dict[str, object]:
        """The settings that override train's."""
        return {name: value for name in ("mixture", "sequence_length", "batch_tokens", "micro_batch")
                if (value := getattr(self, name)) is not None}

    @property
    def begins_curve(self) -> bool:
        """Whether it sets anything of its learning rate."""
        return (self.lr, self.lr_end, self.schedule, self.warmup_steps) != (None, None, None, None)


class ParamGroup(Section):
    """What is different for the parameters of a group; null: as for all others."""

    lr: NonNegativeFloat | None = None
    """Peak learning rate; it follows the same schedule as train.lr, and phases scale both alike. Under muP the width
    scales it like train.lr."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay, also of norms and embeddings."""


class TrainConfig(Section):
    """Stage 4: pretraining."""

    steps: PositiveInt = 1000
    """Optimizer steps of the run. With `phases` they follow from the phases: leave `steps` out, or write null if a base
    sets it."""
    sequence_length: PositiveInt = 256
    """Tokens per sequence, counted as inputs: labels are the same tokens shifted by one. At most the model's
    context_length."""
    data_seed: int | None = added(None)
    """Seed of the order of samples; null: `seed`, which also decides the initial weights. With two seeds you can change
    one and keep the other."""
    packing: Literal["concatenate", "best_fit"] = added("concatenate")
    """How documents become sequences. `concatenate`: one after another, cut wherever a sequence is full. `best_fit`:
    packed so that only documents longer than a sequence are cut (Ding et al. 2024). The rest of a sequence is padding
    without loss; the start logs how much that is. The packing is planned once, into train/packing; with phases, once
    for each sequence length."""
    batch_tokens: PositiveInt = 16384
    """Tokens per optimizer step over all ranks; a multiple of sequence_length. Gradient accumulation follows from
    it."""
    micro_batch: PositiveInt = execution(8)
    """Upper limit of sequences that a rank processes at once. Drover takes the largest number up to it that divides the
    rank's share of the batch. The plan shows it. Set it as large as memory allows."""
    init_from: LocalPath | None = execution(None)
    """Folder with weights to start from, instead of random ones. It is a run (its newest checkpoint), a training
    checkpoint of any layout, or a Hugging Face folder. Or it is a name on the Hugging Face Hub
    (owner/name, or owner/name@revision). Optimizer state, schedule and data position start from scratch. The weights'
    content is part of what the run is, not their path. Keep the folder until the run is done. docs/continue.md says
    what may differ."""
    optimizer: str = added("adamw")
    """`adamw`; `muon`: Muon (Jordan et al. 2024) for the blocks' matrices, AdamW for all else; or `module:NAME` of your
    own. pipeline/training/optimizers.py shows how to write one."""
    optimizer_settings: dict[str, Setting] = added({})
    """Settings of the optimizer other than lr, betas, eps and weight_decay. muon: `momentum` (0.95), `nesterov` (true),
    `iterations` (5, of Newton-Schulz)."""
    param_groups: dict[str, ParamGroup] = added({})
    """Parameters that are treated differently, by name or shell pattern: `{"tok_embeddings.*": {lr: 6e-3}}`. The first
    pattern that matches a name holds."""
    lr: PositiveFloat = 3e-3
    """Peak learning rate. 1e-3 to 5e-3 suits small models with AdamW; Llama 3 8B used 3e-4. The demo's model of 3M
    parameters learned most with 1e-2 to 2e-2 under Muon."""
    mup_base_width: PositiveInt | None = added(None)
    """muP (Yang et al. 2022): `model.dim` of the small model for which lr was chosen. Initial values and rates then
    follow the width, so that about the same lr is best for every width. null: they do not."""
    min_lr_share: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end of the schedule, as a share of lr."""
    warmup_steps: NonNegativeInt = 50
    """Steps of linear warmup from 0 to lr."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """`cosine` decays from the end of the warmup to the end of the run. `wsd` stays at lr and decays over the last
    `decay_steps`, so that you can extend a run later."""
    decay_steps: PositiveInt | None = None
    """For wsd: steps of the final linear decay; null: a fifth of the run."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay rate for the running mean of gradients."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay rate for the running mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, multiplied by the learning rate. Norms and embeddings (also a
    tied output matrix) are decayed only where `param_groups` says so."""
    clip_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""
    z_loss: NonNegativeFloat = added(0.0)
    """Coefficient of the z-loss: the square of each token's log-sum-exp, added to its loss. It keeps logits from
    drifting (PaLM: 1e-4). The logged training loss includes it; validation results do not."""
    across_documents: bool = False
    """Whether a token attends to earlier documents in its sequence. false masks them, as Llama 3 does, and rotary
    positions restart at each document. true is plain causal attention, as in GPT-2 and GPT-3. No document's end is ever
    trained to predict the next document's start."""
    attention: str = execution("auto")
    """Implementation of attention within documents; results agree within rounding. `varlen`: flash kernels that know
    where documents begin, for bf16 on GPUs. `by_document`: each document alone, not with compile. `flex`: a kernel
    generated for the mask, for GPUs. `sdpa`: the dense mask, on any device, slow for long sequences. `auto`: the first
    of these that runs here. Write module:class for a backend of your own."""
    flash: Literal["auto", "fa2", "fa3", "fa4"] = execution("auto")
    """FlashAttention kernels of `varlen` and plain causal attention on GPUs. `fa2`: torch's own. `fa3`: for Hopper, if
    flash-attn 3 is installed (module flash_attn_interface). `fa4`: for Hopper and Blackwell (module flash_attn.cute;
    torch calls it a prototype). `auto`: fa3 if it is available, else fa2."""
    precision: Literal["auto", "fp32", "bf16", "fp64", "fp8"] = "auto"
    """Precision of the forward and backward pass. Weights, optimizer state and reductions stay fp32 (mixed precision).
    `auto`: bf16 if the hardware multiplies it fast (GPUs, CPUs with AMX, AMD's with AVX512-BF16), else fp32. `fp8`:
    bf16, with the blocks' matrix products in fp8 by torchao (docs/precision.md). `fp64` is for proofs of exactness."""
    fp8_recipe: Literal["rowwise", "rowwise_with_gw_hp", "tensorwise"] = added("rowwise")
    """For `fp8`: how values are scaled. `rowwise`: each row by its largest value. `rowwise_with_gw_hp`: the same, with
    weight gradients in bf16. `tensorwise`: the whole matrix by its largest value; fastest."""
    fp8_skip: list[str] = added([])
    """For `fp8`: linear layers that stay in bf16, by name or shell pattern: `["layers.0.*", "*.wk"]`. `small` names
    those whose products are faster in bf16. The output head always stays in bf16. So do layers with dimensions that are
    no multiples of 16."""
    activation_checkpointing: Literal["none", "full", "selective"] = execution("none")
    """`full` keeps only each block's input and recomputes the rest. `selective` keeps `kept_activations` and recomputes
    norms, rotations and activation functions. Results are bit-identical; memory falls and time grows."""
    recomputed_blocks: PositiveInt = execution(1)
    """Apply activation checkpointing to every n-th block only: 1 to all, 2 to every second."""
    kept_activations: list[Activation] = execution([*KEPT_ACTIVATIONS], min_length=1)
    """For `selective`: the results to keep, by name: `attention` and the matrix products. The default lacks w2's, which
    the backward pass never needs."""
    compile: bool | None = execution(None)
    """Use torch.compile for each block and for the loss; null: on GPUs only. It changes rounding a little.
    Recompilations are counted."""
    deterministic: bool = execution(False)
    """On GPUs, compute the same bits at every start on the same ranks. Kernels are then deterministic (above all
    attention's backward pass), and sums have one order. It is slower: use it to compare a repeated step bit by bit.
    CPUs are always deterministic."""
    guards: GuardConfig = nested(execution)
    """Anomaly detection: what happens when the loss is NaN or spikes, or when replicas of the weights differ."""
    mixture: Mixture | None = None
    """Share of each source among the training tokens, by name. Give weights of any sum, or tokens as in {web: 8B, code:
    2B}. null: in proportion to their tokens, every sequence exactly once an epoch. 0 leaves a source out. The smallest
    other share is 1 sequence in 131,072."""
    max_epochs: dict[str, PositiveFloat] | PositiveFloat | None = execution(None)
    """Most epochs of each source that the plan may train on: one number for all, or one by name. Epochs are tokens
    trained on, divided by tokens of the source. More is refused as soon as the tokens are counted. null: no limit, but
    a warning of more than 4 epochs."""
    phases: list[PhaseConfig] = added([])
    """Parts of training with another mixture, sequence length, batch or learning rate, one after the other. Each ends
    at its `until`, and `steps` follows from them. Its other keys: mixture, sequence_length, batch_tokens, micro_batch,
    lr, lr_end, schedule, warmup_steps. Phases that have started cannot be changed. You can change later ones and add
    more. See docs/phases.md."""
    grain_tokens: PositiveInt | None = added(None)
    """With phases: tokens per chunk into which sources are cut; null: the longest sequence_length of the phases. Each
    chunk is used once before any is used again, by phases of every sequence length that divides it. Not with
    `packing: best_fit`, which needs none."""
    stop_after_minutes: PositiveFloat | None = execution(None)
    """Save and exit this many minutes after the start of the process; null: never. The same command continues. For
    sites that stop a job without a warning signal."""
    tokens_from: StoreUrl | None = execution(None)
    """URL in an object store (s3://bucket/prefix, gs://, az://, file://) with token shards. Each node downloads them
    before the first step. `encode.copy_to` or `drover copy-tokens` uploads them. Of the encode stage's folder, training
    then needs the manifest and no `.arrow` file. Keys and addresses come from the environment. null: read that
    folder."""
    tokens_folder: LocalPath | None = execution(None)
    """For `tokens_from`: folder on a disk of each node, with room for all token shards; null: $TMPDIR, or /tmp. Later
    starts on the node download only what is missing there."""
    loader_threads: PositiveInt = execution(1)
    """Threads that read and pack batches ahead. They never change which samples a batch holds."""
    shard_checks: bool = execution(True)
    """Hash each token shard in the background when a step first reads it, and compare it with what encode recorded. A
    checkpoint appears when all shards read before it are compared. A difference stops training. false: training does
    not notice changed or corrupted shards."""
    log_every: PositiveInt = execution(1)
    """Steps between two lines of metrics.jsonl and of every logger."""
    log_to: list[LogSink] = execution(["tensorboard"], validate_default=True)
    """Loggers of metrics, sample texts and events. JSON lines in the train folder are always written. Any of
    tensorboard, wandb, mlflow, my_module:MySink, each with its settings, as in [tensorboard, {kind: wandb, project:
    ours}]. A logger that fails is switched off and stops nothing. See docs/logging.md."""
    hooks: list[TrainingHook] = execution([])
    """Your own hooks of the training loop, for example guards. Each is my_module:MyHook, with its settings.
    pipeline/training/hooks.py shows how to write one."""
    validation_every: PositiveInt | None = execution(100)
    """Steps between two measurements of the validation sample, its loss and its bits per byte; null: none. The last
    step is measured too."""
    validation_tokens: PositiveInt = execution(65536)
    """Tokens of the validation sample per source. Whole documents are taken, always the same ones: the first of those
    that the stage evaluate measures."""
    sample_every: PositiveInt | None = execution(200)
    """Steps between two sets of sample texts; null: none. The last step writes one too."""
    sample_tokens: PositiveInt = execution(64)
    """Length of a sample text in tokens."""
    prompts: list[str] | None = execution(None)
    """Prompts of the sample texts; null: the first words of some validation documents."""
    checkpoint: CheckpointConfig = nested(execution)
    """When to save, and what to keep."""
    profile: ProfileConfig = nested(execution)
    """Profiles the time and memory of some steps: traces and tables in train/profile. See docs/memory.md."""

    @model_validator(mode="before")
    @classmethod
    def _without_null_steps(cls, values: Any) -> Any:
        """With phases, `steps: null` means their sum: for files whose base has a number."""
        if isinstance(values, dict) and values.get("phases") and "steps" in values and values["steps"] is None:
            return {name: value for name, value in values.items() if name != "steps"}
        return values

    @model_validator(mode="after")
    def _steps_of_phases(self) -> TrainConfig:
        if self.phases and "steps" not in self.model_fields_set:
            self.__dict__["steps"] = max(1, sum(self.phase_steps()))
        return self

    def phase_steps(self) -> list[int]:
        """Steps of each phase. Settings may be senseless: a phase without tokens has no steps."""
        steps: list[int] = []
        token = 0
        for phase in self.phases:
            batch = phase.batch_tokens or self.batch_tokens
            steps.append(max(0, -(-(phase.until - token) // batch)))
            token += steps[-1] * batch
        return steps


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
    pp_schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """Order in which a pipeline's ranks compute. `1f1b`: one forward and one backward pass in turn, with one stage per
    rank. `interleaved`: the same with `pp_stages` stages per rank, for smaller bubbles and more communication."""
    pp_stages: int = Field(2, gt=1)
    """Stages per rank for `pp_schedule: interleaved`."""
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
        each = self.pp_stages if self.pp_schedule == "interleaved" else 1
        return self.pp * each if self.pp > 1 else 1

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a pipeline rank: in turn, from the first rank to the last."""
        return list(range(rank, self.stages, self.pp))
