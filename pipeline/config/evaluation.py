"""Settings of the stages after training: convert, evaluate, report."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from drover.pipeline.config.section import Section, added, execution


class ConvertConfig(Section):
    """Stage 5: the checkpoint as a Hugging Face folder."""

    average: list[PositiveInt] = added([])
    """Steps of checkpoints of which the mean of the weights is exported, as in [9000, 9500, 10000]: Llama 3 was
    averaged so over the end of its training. Training saves after these steps and keeps what it saves. []: the last
    checkpoint's own weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the exported weights."""
    max_shard_mb: PositiveFloat = 4000.0
    """Largest safetensors file."""
    copy_to: str | None = execution(None)
    """Address in an object store (`s3://bucket/models/mine`) to which the folder is copied once it is done, for this
    run's export alone; null: nowhere. Set later, it copies without converting again."""


class EvaluateConfig(Section):
    """Stage 6: held-out bits per byte, tasks, continuations."""

    heldout_tokens: PositiveInt | None = 4_194_304
    """Held-out tokens per source to measure on: whole documents in the order of their keys, which are hashes, so that
    every run on the same text shards and vocabulary takes the same; null: all of them. How many of how many were
    measured stands beside the result. Another number measures this part again, and nothing else."""
    sequence_length: PositiveInt | None = None
    """Tokens per window of held-out text; null: the model's context_length. Give the length it was trained with,
    where that is shorter."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic that the model is measured in. bfloat16 halves the memory and rounds: bits per byte move in the fourth
    decimal or so, which is why it belongs to the identity of the results."""
    compressed_mb: PositiveFloat = added(64.0)
    """Held-out text in MB that gzip and xz are given, of each source and of all together: whole documents, the first
    ones. A process of its own compresses them, beside the ranks' work."""
    batch: PositiveInt = execution(16)
    """Sequences per forward pass."""
    dp_shard: PositiveInt | None = execution(None)
    """Over how many neighbouring ranks the weights are sharded (FSDP2), which then gather one block at a time for every
    forward pass; null: 1, each rank the whole, where that fits `memory_gb`, else as few as do. Results are the same to
    the last bit. Texts are slow that way: each new token gathers all weights once."""
    memory_gb: PositiveFloat | None = execution(None)
    """Memory in GB that weights may take on one rank; null: 60% of what is free on the rank that has least, of its GPU,
    or of its share of the host."""
    tasks: list[str] = []
    """lm-evaluation-harness tasks by name, found under `task_folders`."""
    task_folders: list[str] = execution(["configs/tasks"])
    """Folders with task YAML files; relative paths are from the repository."""
    task_limit: PositiveInt | None = None
    """Items per task; null: all."""
    contamination: bool = added(False)
    """Look for every item of the tasks in the training text, which is read once, and give the scores of the clean and
    the dirty items beside those of all (docs/evaluation.md)."""
    bootstrap_iters: NonNegativeInt = 100_000
    """Draws for the standard errors of metrics that have no formula for it (f1, perplexity, bleu ...), as
    lm-evaluation-harness means it and by its own default; accuracies need none. 0: no standard errors at all."""
    prompts: list[str] = ["def main():\n", "import os\n", "class Node:\n    def __init__(self"]
    """Prompts to continue."""
    prompt_tokens: PositiveInt = 96
    """Length of a continuation in tokens."""
    temperature: NonNegativeFloat = 0.8
    """Sampling temperature of the continuations; 0: always the likeliest token."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus of the sampling. Prompt i draws with seed i."""


class ReportConfig(Section):
    """Stage 7: report.html and report.md."""

    title: str | None = None
    """Heading of the report; null: the run's name."""
