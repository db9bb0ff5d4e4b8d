"""The whole configuration, with the settings of the stages after training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, JsonValue, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from drover.model.config import ModelConfig
from drover.pipeline.config.data import EncodeConfig, ShardConfig, TokenizerConfig
from drover.pipeline.config.launching import LaunchConfig
from drover.pipeline.config.section import LocalPath, Section, StoreUrl, added, execution, in_form, nested
from drover.pipeline.config.training import ParallelConfig, TrainConfig


class ConvertConfig(Section):
    """Stage 5: export the checkpoint as a Hugging Face folder."""

    average: list[PositiveInt] = added([])
    """Steps of checkpoints whose weights are averaged for the export, as in [9000, 9500, 10000]. Llama 3 averaged
    checkpoints from the end of its training. Training saves after these steps and keeps what it saves. []: export the
    last checkpoint."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the exported weights."""
    max_shard_mb: PositiveFloat = 4000.0
    """Largest safetensors file in MB."""
    copy_to: StoreUrl | None = execution(None)
    """URL in an object store (`s3://bucket/models/mine`) for an upload of the finished folder; null: no upload. Use the
    URL for this run's export alone. If you set it later, the folder is uploaded without a new conversion."""


class EvaluateConfig(Section):
    """Stage 6: validation bits per byte, tasks, continuations. If you change a setting, the same command measures again
    what depends on it, and keeps the other results."""

    validation_tokens: PositiveInt | None = 4_194_304
    """Validation tokens to measure per source; null: all. Whole documents are taken in the order of their keys, which
    are hashes. Runs on the same text shards and vocabulary therefore measure the same documents. Results state how many
    of how many were measured."""
    sequence_length: PositiveInt | None = None
    """Tokens per window of validation text; null: the model's context_length. Give the training length if that is
    shorter."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the model is evaluated. bfloat16 halves the memory; bits per byte change in about the fourth
    decimal."""
    compressed_mb: PositiveFloat = added(64.0)
    """Validation text in MB that gzip and xz compress for comparison, of all sources together. The first whole
    documents of each are taken. Before them they get as much training text, at most their windows: xz 64 MB from all
    shards, gzip 32 KB. A thread of rank 0 compresses while the ranks evaluate: about a minute for 64 MB of training
    text, and as long for 64 MB of validation text."""
    batch: PositiveInt = execution(16)
    """Sequences per forward pass."""
    dp_shard: PositiveInt | None = execution(None)
    """Neighbouring ranks that shard the weights (FSDP2) and all-gather one block at a time in every forward pass. null:
    1, all weights on each rank, if they take at most 60% of the free memory of the rank that has least (of its GPU, or
    its share of the host's); else as few ranks as hold them so. Results are bit-identical. Generation is slow with
    sharded weights: each new token all-gathers all of them once."""
    every: PositiveInt | None = execution(None)
    """Steps between two checkpoints that are scored while the run trains; null: none. A multiple of
    train.checkpoint.every_steps. Training pauses for each but the last, which the stage measures, unless `drover
    evaluate RUN --watch` scores them elsewhere. It keeps these checkpoints until they were scored."""
    tasks: list[str] = []
    """Names of lm-evaluation-harness tasks: your own under `task_folders`, or the harness's own tasks, groups and tags,
    whose data `drover tasks fetch` has downloaded into `task_data`. NAME_5shot puts five examples before each
    question."""
    task_folders: list[LocalPath] = execution(["configs/tasks"])
    """Folders with YAML files of tasks. Relative paths start at the repository."""
    task_data: LocalPath = execution("task_data")
    """Folder with the data sets of the harness's own tasks. A copy of it works on another machine."""
    task_limit: PositiveInt | None = None
    """Items per task; null: all."""
    contamination: bool = added(False)
    """Search the training text for every item of the tasks; the text is read once. The scores of clean and of
    contaminated items are reported next to those of all. See docs/evaluation.md."""
    bootstrap_iters: NonNegativeInt = 100_000
    """Bootstrap resamples for the standard errors of metrics without a formula (f1, perplexity, bleu ...). Accuracies
    need none. lm-evaluation-harness has the same setting and default. 0: no standard errors at all."""
    prompts: list[str] | None = None
    """Prompts to continue; null: the first words of some validation documents."""
    prompt_tokens: PositiveInt = 96
    """Length of a continuation in tokens."""
    temperature: NonNegativeFloat = 0.8
    """Sampling temperature of the continuations; 0: greedy decoding."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Probability mass of nucleus sampling. Prompt i is continued with seed i."""


class ReportConfig(Section):
    """Stage 7: write report.html and report.md."""

    title: str | None = None
    """Heading of the report; null: the run's name."""


Part = TypeVar("Part", bound=BaseModel)


def changed(config: Part, settings: Mapping[str, Any]) -> Part:
    """A configuration, or a section, with other values of settings such as `train.steps`. They are not checked."""
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        config = config.model_copy(update={name: changed(getattr(config, name), {rest: value}) if rest else value})
    return config


RunName = Annotated[str, in_form(
    "[A-Za-z0-9][A-Za-z0-9._-]*", "letters, digits, '.', - and _, and begin with a letter or a digit")]
"""A name that a folder and a job of Slurm can have."""


class Config(Section):
    """A run: one section per stage, and where and how it runs."""

    name: RunName = execution("run", max_length=200)
    """The run's name and folder. A new name starts a new run."""
    runs_dir: LocalPath = execution("runs")
    """Folder of all runs."""
    reuse: LocalPath | None = execution(None)
    """Folder of another run whose finished shard, tokenizer and encode stages this run uses without a copy."""
    seed: int = 0
    """Seed of the initial weights and, if `train.data_seed` is null, of the order of samples."""
    plugins: list[str] = execution([])
    """Python modules, or files relative to the one that names them, that hold your own attention backends,
    optimizers, filters, loggers, hooks or stages. Every process of the run imports them. See docs/extending.md."""
    stages: dict[str, dict[str, JsonValue]] = {}
    """Settings of stages that plugins add, by the stage's name."""
    shard: ShardConfig = nested()
    """Stage 1: filter, deduplicate and split the documents of the sources; write them as WebDataset tar shards."""
    tokenizer: TokenizerConfig = nested()
    """Stage 2: train a tokenizer, or take a ready one."""
    encode: EncodeConfig = nested()
    """Stage 3: tokenize the text shards into token shards."""
    model: ModelConfig = nested()
    """The network. The key `preset` takes the shape of a published Llama (llama3_8b, llama3.2_1b and others, see
    model/presets.py). It can also take the shape of the weights in a folder, or of a name on the Hugging Face
    Hub. The other keys here override it."""
    train: TrainConfig = nested()
    """Stage 4: pretraining."""
    parallel: ParallelConfig = nested(execution)
    """How the model is distributed over ranks."""
    convert: ConvertConfig = nested()
    """Stage 5: export the checkpoint as a Hugging Face folder."""
    evaluate: EvaluateConfig = nested()
    """Stage 6: validation bits per byte, tasks, continuations."""
    report: ReportConfig = nested()
    """Stage 7: write report.html and report.md."""
    launch: LaunchConfig = nested(execution)
    """Processes on one machine, and what jobs request from Slurm."""

    def part(self, name: str) -> Any:
        """A part of the configuration by its name: `train`, `seed`, `stages.statistics` ({} if that has no
        settings)."""
        section, _, key = name.partition(".")
        return getattr(self, section).get(key, {}) if section == "stages" and key else getattr(self, section)

    @property
    def order_seed(self) -> int:
        """Seed of the order of samples."""
        return self.seed if self.train.data_seed is None else self.train.data_seed

    @property
    def source_names(self) -> list[str]:
        """Names of the sources of text and of those of tokens, in their order."""
        return [*self.shard.source_names, *(source.name for source in self.encode.sources)]

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.runs_dir) / self.name
