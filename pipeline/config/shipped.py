"""What ships of the kinds that settings name, as "module:Class": nothing of it is imported before it is asked for.

How one adds a filter is told in pipeline/data/filters/base.py, a log sink in pipeline/training/sinks/base.py, a hook in
pipeline/training/hooks.py.
"""

from __future__ import annotations

from typing import Any

from pipeline.config.kinds import Kind, Kinds

FILTERS: Kinds[Any] = Kinds("shard.filters", "filter", "pipeline.data.filters.base:Filter", {
    "length": "pipeline.data.filters.length:Length",
    "repetition": "pipeline.data.filters.repetition:Repetition",
    "characters": "pipeline.data.filters.characters:Characters",
    "masking": "pipeline.data.filters.masking:Masking",
    "c4": "pipeline.data.filters.c4:C4",
    "gopher_quality": "pipeline.data.filters.gopher_quality:GopherQuality",
    "gopher_repetition": "pipeline.data.filters.gopher_repetition:GopherRepetition",
    "fineweb_quality": "pipeline.data.filters.fineweb_quality:FinewebQuality",
    "language": "pipeline.data.filters.language:Language",
    "encoding_repair": "pipeline.data.filters.encoding_repair:EncodingRepair",
    "normalization": "pipeline.data.filters.normalization:Normalization",
    "decontamination": "pipeline.data.filters.decontamination:Decontamination"})

SINKS: Kinds[Any] = Kinds("train.log_to", "log sink", "pipeline.training.sinks.base:SinkSettings", {
    "tensorboard": "pipeline.training.sinks.base:TensorBoard",
    "wandb": "pipeline.training.sinks.network:WeightsAndBiases",
    "mlflow": "pipeline.training.sinks.network:MLflow"})

HOOKS: Kinds[Any] = Kinds("train.hooks", "hook", "pipeline.training.hooks:HookSettings", {})


def name_of(item: Kind) -> str:
    """The name under which the documents of a filter are counted."""
    return getattr(item, "name", None) or item.kind.rpartition(":")[2]
