"""The only registry of objects that are named as "module:name" and imported on first use: filters, loggers, hooks,
optimizers, and functions of stages. (The network is a layer below and names its attention backends itself.)

These files show how to add one: pipeline/data/filters/base.py (filter), pipeline/training/sinks.py (logger),
pipeline/training/hooks.py (hook), pipeline/training/optimizers.py (optimizer), pipeline/contract/__init__.py
(stage).
"""

from __future__ import annotations

from drover.pipeline.config.kinds import Kind, Kinds, OptimizerKind

FILTERS = Kinds("shard.filters", "filter", "drover.pipeline.data.filters.base:Filter", {
    "length": "drover.pipeline.data.filters.length:Length",
    "repetition": "drover.pipeline.data.filters.repetition:Repetition",
    "characters": "drover.pipeline.data.filters.length:Characters",
    "masking": "drover.pipeline.data.filters.rewriting:Masking",
    "c4": "drover.pipeline.data.filters.quality:C4",
    "gopher_quality": "drover.pipeline.data.filters.quality:GopherQuality",
    "gopher_repetition": "drover.pipeline.data.filters.repetition:GopherRepetition",
    "fineweb_quality": "drover.pipeline.data.filters.quality:FinewebQuality",
    "site": "drover.pipeline.data.filters.sites:Site",
    "language": "drover.pipeline.data.filters.language:Language",
    "classifier": "drover.pipeline.data.filters.classifier:Classifier",
    "encoding_repair": "drover.pipeline.data.filters.rewriting:EncodingRepair",
    "normalization": "drover.pipeline.data.filters.rewriting:Normalization",
    "duplicate_lines": "drover.pipeline.data.filters.duplicate_lines:DuplicateLines",
    "decontamination": "drover.pipeline.data.filters.decontamination:Decontamination"})

SINKS = Kinds("train.log_to", "log sink", "drover.pipeline.training.sinks:SinkSettings", {
    "tensorboard": "drover.pipeline.training.sinks:TensorBoard",
    "wandb": "drover.pipeline.training.sinks:WeightsAndBiases",
    "mlflow": "drover.pipeline.training.sinks:MLflow"})

HOOKS = Kinds("train.hooks", "hook", "drover.pipeline.training.hooks:HookSettings", {})

OPTIMIZERS = {
    "adamw": OptimizerKind("drover.pipeline.training.optimizers:AdamW", engines=("fsdp2", "deepspeed")),
    "muon": OptimizerKind("drover.pipeline.training.muon:Muon",
                          settings={"momentum": 0.95, "nesterov": True, "iterations": 5})}
"""By the name in train.optimizer."""

STAGE_FUNCTIONS: dict[str, dict[str, str]] = {
    "shard": {"files": "drover.pipeline.data.sources:filter_files",
              "task_files": "drover.pipeline.data.sources:input_files",
              "problems": "drover.pipeline.data.sources:label_problems",
              "external_code": "drover.pipeline.data.filters.base:external_code"},
    "tokenizer": {"files": "drover.pipeline.tokenization.files:input_files",
                  "problems": "drover.pipeline.tokenization.conversion:ready_problems"},
    "encode": {"task_files": "drover.pipeline.data.sources:token_files",
               "problems": "drover.pipeline.data.sources:token_problems"},
    "train": {"files": "drover.pipeline.records.weight_files:input_files",
              "renews": "drover.pipeline.config.phases:only_phases_differ",
              "saved": "drover.pipeline.records.checkpoints:saved",
              "external_code": "drover.pipeline.records.weight_files:training_code"},
    "convert": {"due": "drover.pipeline.storage.mirror:due", "problems": "drover.pipeline.convert:problems"},
    "evaluate": {"files": "drover.pipeline.evaluation.selection:input_files",
                 "problems": "drover.pipeline.evaluation.selection:problems",
                 "renews": "drover.pipeline.evaluation.tasks:only_kept_differs"}}
"""Functions of stages that the contract calls (`drover.pipeline.contract.stages.Stage.functions`)."""

EVALUATOR = "drover.pipeline.watch:main"
"""Scores the checkpoints of a run."""


def name_of(item: Kind) -> str:
    """The name of a filter in the counts."""
    return getattr(item, "name", None) or item.kind.rpartition(":")[2]
