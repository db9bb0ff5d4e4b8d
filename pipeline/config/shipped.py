"""What ships of the kinds that settings name, as "module:Class": nothing of it is imported before it is asked for.

How one adds a filter is told in pipeline/data/filters/base.py, a log sink in pipeline/training/sinks/base.py, a hook in
pipeline/training/hooks.py.
"""

from __future__ import annotations

from typing import Any

from drover.pipeline.config.kinds import Kind, Kinds

FILTERS: Kinds[Any] = Kinds("shard.filters", "filter", "drover.pipeline.data.filters.base:Filter", {
    "length": "drover.pipeline.data.filters.length:Length",
    "repetition": "drover.pipeline.data.filters.repetition:Repetition",
    "characters": "drover.pipeline.data.filters.characters:Characters",
    "masking": "drover.pipeline.data.filters.masking:Masking",
    "c4": "drover.pipeline.data.filters.c4:C4",
    "gopher_quality": "drover.pipeline.data.filters.gopher_quality:GopherQuality",
    "gopher_repetition": "drover.pipeline.data.filters.gopher_repetition:GopherRepetition",
    "fineweb_quality": "drover.pipeline.data.filters.fineweb_quality:FinewebQuality",
    "language": "drover.pipeline.data.filters.language:Language",
    "encoding_repair": "drover.pipeline.data.filters.encoding_repair:EncodingRepair",
    "normalization": "drover.pipeline.data.filters.normalization:Normalization",
    "decontamination": "drover.pipeline.data.filters.decontamination:Decontamination"})

SINKS: Kinds[Any] = Kinds("train.log_to", "log sink", "drover.pipeline.training.sinks.base:SinkSettings", {
    "tensorboard": "drover.pipeline.training.sinks.base:TensorBoard",
    "wandb": "drover.pipeline.training.sinks.network:WeightsAndBiases",
    "mlflow": "drover.pipeline.training.sinks.network:MLflow"})

HOOKS: Kinds[Any] = Kinds("train.hooks", "hook", "drover.pipeline.training.hooks:HookSettings", {})


def name_of(item: Kind) -> str:
    """The name under which the documents of a filter are counted."""
    return getattr(item, "name", None) or item.kind.rpartition(":")[2]
