"""What is known of optimizers without torch: for checks, the plan and the memory estimate.

pipeline/training/optimizers.py shows how to add an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError, create_model

from drover.pipeline.config.kinds import OptimizerKind as OptimizerKind
from drover.pipeline.config.kinds import imported
from drover.pipeline.config.section import Section, sentences
from drover.pipeline.config.shipped import OPTIMIZERS as OPTIMIZERS
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.core.errors import UserError, meant


def optimizer_kind(name: str) -> OptimizerKind:
    """The optimizer that train.optimizer names: one of OPTIMIZERS, or "module:NAME" of an OptimizerKind.

    Raises:
        UserError: there is none; the message lists the known ones.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if ":" not in name:
        hint = meant(name, OPTIMIZERS, setting="train.optimizer=")
        raise UserError(f"train.optimizer '{name}' is not known{f'; {hint}' if hint else '.'} "
                        f"Take {', '.join(OPTIMIZERS)}, or write my_module:NAME for one of your own: "
                        f"docs/extending.md.")
    kind = imported(name, "train.optimizer")
    if not isinstance(kind, OptimizerKind):
        raise UserError(f"train.optimizer '{name}' does not say how it is used. In a module of your own write MINE = "
                        f"OptimizerKind('{name}'), and train.optimizer=my_module:MINE (docs/extending.md).")
    return kind


def optimizer_settings(train: TrainConfig) -> dict[str, Any]:
    """The optimizer's own settings: its defaults, overridden by train.optimizer_settings."""
    return {**optimizer_kind(train.optimizer).settings, **train.optimizer_settings}


def optimizer_problems(train: TrainConfig, engine: str) -> Iterator[str]:
    """Why the chosen optimizer cannot work, one sentence for each reason.

    engine: parallel.engine.
    """
    try:
        kind = optimizer_kind(train.optimizer)
    except UserError as error:
        yield str(error)
        return
    if engine not in kind.engines:
        able = [name for name, other in OPTIMIZERS.items() if engine in other.engines]
        yield (f"train.optimizer '{train.optimizer}' works under parallel.engine {' and '.join(kind.engines)}, not "
               f"'{engine}', which flattens the weights. Take parallel.engine={kind.engines[0]}, or train.optimizer="
               f"{' or '.join(able)}.")
    if train.mup_base_width is not None and train.optimizer not in OPTIMIZERS:
        yield f"train.mup_base_width works with {' and '.join(OPTIMIZERS)}: it is not known how others depend on width."
    types: dict[str, Any] = {name: (type(default), default) for name, default in kind.settings.items()}
    try:
        create_model("OptimizerSettings", __base__=Section, **types).model_validate(train.optimizer_settings)
    except ValidationError as error:
        yield from (f"train.optimizer '{train.optimizer}': {problem}" for problem in sentences(
            error, "train.optimizer_settings", types))
