"""Settings of the train stage: the run's length and batch, the optimizer, checkpoints, logging."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    model_validator,
)

from drover.pipeline.config.guarding import GuardConfig
from drover.pipeline.config.kinds import Kind
from drover.pipeline.config.mixture import Mixture, TokenCount
from drover.pipeline.config.section import Section, added, execution
from drover.pipeline.config.shipped import HOOKS, SINKS

Setting = bool | int | float | str
"""A value in train.optimizer_settings."""
LogSink = Annotated[SerializeAsAny[Kind], PlainValidator(SINKS.read)]
TrainingHook = Annotated[SerializeAsAny[Kind], PlainValidator(HOOKS.read)]

Activation = Literal["attention", "wq", "wk", "wv", "wo", "w1", "w3", "w2"]
"""The parts of a block whose results activation checkpointing can keep, in the order in which they are computed."""

KEPT_ACTIVATIONS: tuple[Activation, ...] = ("attention", "wq", "wk", "wv", "wo", "w1", "w3")


class CheckpointConfig(Section):
    """When to save, and what to keep. The last step is always saved, and so is the step of a request to stop."""

    every_steps: PositiveInt = 100
    """Save every so many optimizer steps."""
    every_minutes: PositiveFloat | None = None
    """Save also when so much time has passed since the last save; null: only by steps. For long runs: it bounds the
    work that a crash can cost, however fast the steps are."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep; two, so that a damaged newest one still leaves one to go back to."""
    permanent_every: PositiveInt | None = None
    """Checkpoints at multiples of this step are never deleted; null: none are permanent."""
    background: bool = True
    """Write while training goes on: the loop stops only for the copy to host memory, which must hold this rank's
    part of weights and moments once more. One save is in flight at a time; false: wait for each."""
    attempts: PositiveInt = 3
    """How often a save is tried before the run stops with the reason. Each failure is said and logged."""
    copy_to: str | None = None
    """Address in an object store (`s3://bucket/runs/mine`, `gs://`, `az://`, `file:///`) to which each checkpoint is
    copied while training goes on, for this run alone; null: nowhere. A start that finds a newer checkpoint there than
    in the run's folder, which may be gone, fetches it and goes on from it. `keep` and `permanent_every` hold there too.
    Credentials come from the environment. docs/checkpoints.md says more."""


class TokenCacheConfig(Section):
    """Where `train.tokens_from` keeps token shards on a node, for all of its ranks and for later starts."""

    folder: str | None = None
    """Folder on a disk of each node; null: $TMPDIR, or /tmp. Within it is a folder of the user's own."""
    gb: PositiveFloat = 50.0
    """GB that shards may have in it on a node; what is not needed soon is removed for what is."""
    read: Literal["auto", "shards", "parts"] = "auto"
    """`shards`: fetched whole and compared with their hashes. `parts`: only what samples need, straight from the store,
    which no hash tells to be right. `auto`: shards, where all that are trained and measured on fit into `gb`."""


class ProfileConfig(Section):
    """Looks closely at some steps: at what each operation takes of their time, and of a GPU's memory."""

    start: PositiveInt | None = None
    """The first step that is profiled, counted from the start of the process: 5, or later, since the first ones compile
    and take memory. null: none."""
    steps: PositiveInt = 3
    """How many steps are profiled, one after another."""
    ranks: list[NonNegativeInt] = [0]
    """Ranks that are profiled; each writes its files into train/profile."""


class PhaseConfig(Section):
    """A part of training with settings of its own; what it does not say is as `train` says it."""

    until: TokenCount = Field(gt=0)
    """Where it ends: tokens since the beginning of the run, as a number or as 250M, 10B. Rounded up to a whole step.
    The last phase's is the end of the run."""
    mixture: Mixture | None = None
    """Weights of the sources in it, as in train.mixture."""
    sequence_length: PositiveInt | None = None
    """Tokens per sequence in it."""
    batch_tokens: TokenCount | None = Field(None, gt=0)
    """Tokens per optimizer step in it."""
    micro_batch: PositiveInt | None = execution(None)
    """The most sequences that a rank takes through the model at once in it."""
    lr: NonNegativeFloat | None = None
    """A phase that says anything of its learning rate begins a curve of its own, which lasts until the next phase that
    does. This is where it begins (after `warmup_steps`); null: where the curve before had come to. Phases that say
    nothing go on along the curve they find; the first one's is train's own (lr, schedule, warmup_steps)."""
    lr_end: NonNegativeFloat | None = None
    """Where a curve that is not constant ends; null: at its begin times train.min_lr_share. 0 anneals."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """The form of the curve that begins here; null: linear if `lr_end` is given, else constant."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of linear growth from 0 at the beginning of the curve; null: none (in the first phase, train's)."""

    @property
    def overlaid(self) -> dict[str, Any]:
        """What it says in place of train."""
        return {name: value for name in ("mixture", "sequence_length", "batch_tokens", "micro_batch")
                if (value := getattr(self, name)) is not None}

    @property
    def begins_curve(self) -> bool:
        """Whether it says anything of its learning rate."""
        return (self.lr, self.lr_end, self.schedule, self.warmup_steps) != (None, None, None, None)


class TrainConfig(Section):
    """Stage 4: pretraining."""

    steps: PositiveInt = 1000
    """Optimizer steps."""
    sequence_length: PositiveInt = 256
    """Tokens per sequence; at most the model's context_length."""
    packing: Literal["concatenate", "best_fit"] = added("concatenate")
    """How documents become sequences. `concatenate`: one after another, cut wherever a sequence is full. `best_fit`:
    side by side so that none is cut unless it is longer than a sequence (Ding et al. 2024), with padding behind them
    that nothing is learned from; how much that is, is said at the start. Planned once, into train/packing, in phases
    for each length of sequences."""
    batch_tokens: PositiveInt = 16384
    """Tokens per optimizer step over all ranks; a multiple of sequence_length. Accumulation is derived."""
    micro_batch: PositiveInt = execution(8)
    """The most sequences that a rank takes through the model at once: as many as memory allows. Taken is the largest
    number up to this that divides a rank's sequences of a step; the plan shows it."""
    init_from: str | None = execution(None)
    """Folder with weights to start from, in place of random ones: a run (its newest checkpoint), a training checkpoint
    of any layout, or a Hugging Face folder. Optimizer, schedule and data begin anew. What is read, not where it lies,
    decides what is trained; it must stay until the run is done. docs/continue.md says what may differ."""
    optimizer: str = added("adamw")
    """`adamw`; `muon`: the blocks' matrices by Muon (Jordan et al. 2024), all else by AdamW; or `module:NAME` of an
    optimizer of your own (pipeline/training/optimizers/base.py says how)."""
    optimizer_settings: dict[str, Setting] = added({})
    """What the optimizer has beside lr, betas, eps and weight_decay. muon: `momentum` (0.95), `nesterov` (true),
    `iterations` (5, of Newton-Schulz)."""
    lr_factors: dict[str, float] = added({})
    """Learning rates of some parameters as a multiple of `lr`, by name or shell pattern: `{"tok_embeddings.*": 2}`. The
    first pattern that fits a name holds; the others have 1."""
    lr: PositiveFloat = 3e-3
    """Peak learning rate. Small models like 1e-3 to 5e-3; Llama 3 8B used 3e-4."""
    min_lr_share: float = Field(0.1, ge=0, le=1)
    """The schedule ends at lr times this."""
    warmup_steps: NonNegativeInt = 50
    """Steps of linear growth from 0 to lr."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """`cosine` decays from the end of warmup to the end; `wsd` stays at lr and decays over the last
    `decay_steps`, so a run can be prolonged without regret."""
    decay_steps: PositiveInt | None = None
    """For wsd: steps of the final linear decay; null: a fifth of the run."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the mean squared gradient."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of the weights; norms and embeddings are never decayed."""
    clip_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    z_loss: NonNegativeFloat = added(0.0)
    """This times the square of each token's log-sum-exp is added to its loss, which keeps logits from drifting (PaLM:
    1e-4). It is part of the training loss that is logged; held-out figures are without it."""
    across_documents: bool = False
    """Whether a token sees the documents before its own in the window. Llama 3 masks them, and so is the default. Plain
    causal attention (true) is what GPT-2 and 3 did. No document's end is ever trained to predict the next one's
    start."""
    attention: str = execution("auto")
    """How attention inside documents is computed; rounding apart, all are equal. `varlen`: flash kernels that know
    where documents begin, for bf16 on GPUs. `by_document`: each document alone, not with compile. `flex`: a kernel
    generated for the mask, for GPUs. `sdpa`: the dense mask, anywhere, slow at long sequences. `auto` takes the first
    of these that runs here; or give a backend of your own as module:class."""
    flash: Literal["auto", "fa2", "fa3", "fa4"] = execution("auto")
    """Which FlashAttention kernels `varlen` and plain causal attention use on GPUs. `fa2`: torch's own. `fa3`: for
    Hopper, where flash-attn 3 is installed (module flash_attn_interface). `fa4`: for Hopper and Blackwell (module
    flash_attn.cute; torch calls it a prototype). `auto`: fa3 where it can be had, else fa2."""
    precision: Literal["auto", "fp32", "bf16", "fp64", "fp8"] = "auto"
    """Arithmetic of the forward and backward pass; weights, moments and reductions stay fp32. `auto`: bf16 where
    the hardware has it (GPUs; CPUs with AMX or AVX512-BF16), else fp32. `fp8`: as bf16, but for the blocks' matrix
    products, which are in fp8 by torchao (docs/precision.md). `fp64` is for proofs of exactness."""
    fp8_recipe: Literal["rowwise", "rowwise_with_gw_hp", "tensorwise"] = added("rowwise")
    """For `fp8`: how factors are scaled. `rowwise`: each row by its largest value; `rowwise_with_gw_hp`: so too, but
    the weights' gradients are computed in bf16; `tensorwise`: the whole matrix by its largest value, fastest."""
    fp8_skip: list[str] = added([])
    """For `fp8`: linear layers that stay in bf16, by name or shell pattern: `["layers.0.*", "*.wk"]`; `small`
    names those whose products are faster in bf16. The output head stays so in any case, and so do layers whose
    dimensions are no multiples of 16."""
    fp8_watch_every: PositiveInt = execution(100)
    """For `fp8`: steps between two measurements of what it does to the values, layer by layer; also done at the first
    and the last step. One costs a pass over one sequence, not compiled; in a pipeline, over all of a rank's part of a
    step."""
    norms_every: PositiveInt | None = execution(None)
    """Steps between two measurements of the norms of each parameter's gradient (before clipping), weight and update;
    null: none. Also done at the first step of a start and the last step. By layer they are curves; events.jsonl has
    every parameter. In such a step a rank's part of the weights is in memory twice."""
    activation_checkpointing: Literal["none", "full", "selective"] = execution("none")
    """`full` keeps only each block's input and recomputes the rest; `selective` keeps what `kept_activations` names
    and recomputes norms, rotations and activations. Results are bit-equal; memory falls, time grows."""
    recomputed_blocks: PositiveInt = execution(1)
    """Apply activation checkpointing to every n-th block only: 1 to all, 2 to every second."""
    kept_activations: list[Activation] = execution([*KEPT_ACTIVATIONS])
    """For `selective`: the results that are kept, by name: `attention` and the matrix products. w2's is not in the
    default: the backward pass never needs it."""
    compile: bool | None = execution(None)
    """torch.compile for each block and for the loss; null: on GPUs only. Rounding changes a little; recompilations are
    counted."""
    deterministic: bool = execution(False)
    """On GPUs, the same bits at every start on the same ranks: deterministic kernels (attention's backward pass above
    all) and one order of sums. Slower, and for looking into a difference: a repeated step can then be compared bit by
    bit. CPUs are deterministic without it."""
    guards: GuardConfig = execution({}, validate_default=True)
    """What happens when the loss is NaN or leaps, and when replicas of the weights differ."""
    mixture: Mixture | None = None
    """Share of each source among the training tokens, by source name, relative to their sum, whatever that is: weights,
    or tokens as in {web: 8B, code: 2B}; null: in proportion to their tokens, every sequence exactly once an epoch. 0
    leaves a source out; otherwise at least 1 sequence in 131,072."""
    max_epochs: dict[str, float] | float | None = execution(None)
    """The most epochs of each source (a number for all, or by name) that the plan may train on: tokens trained on over
    tokens that there are. More is refused as soon as the tokens are counted. null: no limit, but more than 4 is
    said."""
    phases: list[PhaseConfig] = added([])
    """Parts of training with another mixture, sequence length, batch or learning rate, one after the other; each ends
    at its `until`, and `steps` follows from them. Those that have begun cannot be changed any more; later ones can, and
    more can be added. docs/phases.md."""
    grain_tokens: PositiveInt | None = added(None)
    """With phases: sources are cut into grains of so many tokens, of which each is used once before any is used again,
    by phases of whatever length divides it; null: the longest sequence_length of the phases. Not with packing, which
    needs none."""
    stop_after_minutes: PositiveFloat | None = execution(None)
    """Save and leave so many minutes after the start of the process; the same command goes on. For sites that stop a
    job without a warning signal; null: never."""
    tokens_from: str | None = execution(None)
    """URL of an object store (s3://bucket/prefix, gs://, az://, file://) that token shards are read from, as
    `encode.copy_to` or drover.tools.copy_tokens put them there; those in the encode stage's folder are then not needed.
    Keys and addresses come from the environment. null: that folder."""
    cache: TokenCacheConfig = execution({}, validate_default=True)
    """For `tokens_from`: what is kept on each node."""
    loader_threads: PositiveInt = execution(1)
    """Threads that read and pack batches ahead. They never change which samples a batch holds."""
    shard_checks: bool | Literal["all"] = execution(True)
    """Whether token shards are hashed beside training and compared with what encode committed: each when it is first
    used, by one rank, and held-out ones; a checkpoint waits until all that were used before the last one are. `all`:
    also those that no step has used. With false, what a disk or a hand changes in a shard is trained on."""
    log_every: PositiveInt = execution(1)
    """Steps between two lines of metrics.jsonl and of every log sink."""
    log_to: list[LogSink] = execution(["tensorboard"], validate_default=True)
    """Where metrics, sample texts and events go beside the JSON lines in the train folder, which are always written:
    any of tensorboard, wandb, mlflow, my_module:MySink, each with its settings, as in
    [tensorboard, {kind: wandb, project: ours}]. One that fails is switched off and stops nothing; docs/logging.md."""
    hooks: list[TrainingHook] = execution([])
    """What takes part in training beside the loop, of your own: guards, watchers. Each is my_module:MyHook, with its
    settings (pipeline/training/hooks.py says how to write one)."""
    heldout_every: PositiveInt = execution(100)
    """Steps between two measurements of held-out bits per byte; also done at the last step."""
    heldout_tokens: PositiveInt = execution(65536)
    """Held-out tokens per source to measure on (whole documents, always the same ones)."""
    sample_every: PositiveInt = execution(200)
    """Steps between two sets of sample texts; also done at the last step."""
    sample_tokens: PositiveInt = execution(64)
    """Length of a sample text in tokens."""
    prompts: list[str] = execution(["def main():", "import os\n", "class "])
    """Prompts of the sample texts."""
    checkpoint: CheckpointConfig = execution({}, validate_default=True)
    """When to save, and what to keep."""
    profile: ProfileConfig = execution({}, validate_default=True)
    """Where the time and the memory of some steps go: traces and tables in train/profile. docs/memory.md."""

    @model_validator(mode="before")
    @classmethod
    def _without_null_steps(cls, values: Any) -> Any:
        """With phases, `steps: null` means what they come to: for files whose base has a number."""
        if isinstance(values, dict) and values.get("phases") and "steps" in values and values["steps"] is None:
            return {name: value for name, value in values.items() if name != "steps"}
        return values

    @model_validator(mode="after")
    def _steps_of_phases(self) -> TrainConfig:
        if self.phases and "steps" not in self.model_fields_set:
            self.__dict__["steps"] = max(1, sum(self.phase_steps()))
        return self

    def phase_steps(self) -> list[int]:
        """Steps of each phase, however senseless: one without tokens has none."""
        found, token = list[int](), 0
        for phase in self.phases:
            batch = phase.batch_tokens or self.batch_tokens
            found.append(max(0, -(-(phase.until - token) // batch)))
            token += found[-1] * batch
        return found
