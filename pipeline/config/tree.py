"""The whole configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, JsonValue

from drover.model.config import ModelConfig
from drover.pipeline.config.data import EncodeConfig, ShardConfig, TokenizerConfig
from drover.pipeline.config.evaluation import ConvertConfig, EvaluateConfig, ReportConfig
from drover.pipeline.config.launching import LaunchConfig
from drover.pipeline.config.parallel import ParallelConfig
from drover.pipeline.config.section import LocalPath, Section, execution, in_form, nested
from drover.pipeline.config.training import TrainConfig

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
    """Seed of the initial weights and of the order of samples."""
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
    model/presets.py). It can also take the shape of the weights in a folder. The other keys here override it."""
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
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.runs_dir) / self.name
