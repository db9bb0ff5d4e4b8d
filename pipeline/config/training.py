"""Settings of the train stage: the run's length and batch, the optimizer, checkpoints, logging, parallelism."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.section import Section, execution


class CheckpointConfig(Section):
    """When to save, and what to keep. The last step is always saved."""

    every_steps: int = execution(100, gt=0)
    """Save every so many optimizer steps."""
    keep: int = execution(2, gt=0)
    """Newest checkpoints to keep; two, so that a damaged newest one still leaves one to go back to."""
    permanent_every: int | None = execution(None, gt=0)
    """Checkpoints at multiples of this step are never deleted; null: none are permanent."""


class TrainConfig(Section):
    """Stage 4: pretraining."""

    steps: int = Field(1000, gt=0)
    """Optimizer steps."""
    sequence_length: int = Field(256, gt=0)
    """Tokens per sequence; at most the model's context_length."""
    batch_tokens: int = Field(16384, gt=0)
    """Tokens per optimizer step over all ranks; a multiple of sequence_length. Accumulation is derived."""
    micro_batch: int = execution(8, gt=0)
    """Sequences that a rank takes through the model at once: as many as memory allows."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate. Small models like 1e-3 to 5e-3; Llama 3 8B used 3e-4."""
    min_lr_share: float = Field(0.1, ge=0, le=1)
    """The schedule ends at lr times this."""
    warmup_steps: int = Field(50, ge=0)
    """Steps of linear growth from 0 to lr."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """`cosine` decays from the end of warmup to the end; `wsd` stays at lr and decays over the last
    `decay_steps`, so a run can be prolonged without regret."""
    decay_steps: int | None = Field(None, gt=0)
    """For wsd: steps of the final linear decay; null: a fifth of the run."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the mean squared gradient."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.1, ge=0)
    """AdamW's decoupled decay; norms and embeddings are never decayed."""
    clip_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Arithmetic of the forward and backward pass; weights, moments and reductions stay fp32. `auto`: bf16 where
    the hardware has it (GPUs; CPUs with AMX or AVX512-BF16), else fp32. `fp64` is for proofs of exactness."""
    activation_checkpointing: Literal["none", "full", "selective"] = execution("none")
    """`full` keeps only each block's input and recomputes the rest; `selective` keeps the matrix products and the
    attention output and recomputes norms and activations. Results are bit-equal; memory falls, time grows."""
    mixture: dict[str, float] | None = None
    """Share of each source among the training sequences, by source name; null: in proportion to their tokens,
    every sequence exactly once an epoch."""
    loader_threads: int = execution(1, gt=0)
    """Threads that read and pack batches ahead. They never change which samples a batch holds."""
    log_every: int = execution(1, gt=0)
    """Steps between two lines of metrics.jsonl and TensorBoard."""
    heldout_every: int = execution(100, gt=0)
    """Steps between two measurements of held-out bits per byte; also done at the last step."""
    heldout_tokens: int = execution(65536, gt=0)
    """Held-out tokens per source to measure on (whole documents, always the same ones)."""
    sample_every: int = execution(200, gt=0)
    """Steps between two sets of sample texts; also done at the last step."""
    sample_tokens: int = execution(64, gt=0)
    """Length of a sample text in tokens."""
    prompts: list[str] = execution(default_factory=lambda: ["def main():", "import os\n", "class "])
    """Prompts of the sample texts."""
    checkpoint: CheckpointConfig = execution(default_factory=CheckpointConfig)
    """When to save, and what to keep."""


class ParallelConfig(Section):
    """How the model is spread over ranks. Results agree within rounding for every choice."""

    dp_replicate: int = execution(1, gt=0)
    """Full copies of the sharded model (HSDP); ranks = dp_replicate x dp_shard."""
    dp_shard: int = execution(-1, ge=-1)
    """Ranks that share one copy of weights, gradients and moments; -1: all the rest."""
