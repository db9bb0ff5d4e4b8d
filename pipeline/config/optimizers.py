"""What is known of optimizers without torch: for checks, the plan and the forecast of memory.

How one adds an optimizer is told in pipeline/training/optimizers/base.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drover.pipeline.config.kinds import OptimizerKind as OptimizerKind
from drover.pipeline.config.kinds import imported
from drover.pipeline.config.shipped import OPTIMIZERS as OPTIMIZERS
from drover.pipeline.config.training import Setting, TrainConfig
from drover.pipeline.core.errors import UserError


def optimizer_kind(name: str) -> OptimizerKind:
    """The optimizer that train.optimizer names: one of OPTIMIZERS, or "module:NAME" of an OptimizerKind.

    Raises:
        UserError: there is none, with those that there are.
    """
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if ":" not in name:
        raise UserError(f"train.optimizer '{name}' is not known. There are {', '.join(OPTIMIZERS)}; one of your own is "
                        f"written as module:NAME of an OptimizerKind.")
    kind = imported(name, "train.optimizer")
    if not isinstance(kind, OptimizerKind):
        what = f"the class {kind.__name__}" if isinstance(kind, type) else f"a {type(kind).__name__}"
        raise UserError(f"train.optimizer '{name}' names {what}, not an OptimizerKind: name one that makes it, as "
                        f"OptimizerKind('{name}', matrix_bytes=..., other_bytes=...); pipeline/config/optimizers.py "
                        f"tells of it.")
    return kind


def optimizer_settings(train: TrainConfig) -> dict[str, Any]:
    """The optimizer's own settings: its defaults, and train.optimizer_settings over them."""
    return {**optimizer_kind(train.optimizer).settings, **train.optimizer_settings}


def optimizer_problems(train: TrainConfig, engine: str) -> Iterator[str]:
    """What of the chosen optimizer cannot work, each as a sentence.

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
               f"'{engine}', which lays weights out flat. Take parallel.engine={kind.engines[0]}, or train.optimizer="
               f"{' or '.join(able)}.")
    for name, value in train.optimizer_settings.items():
        if name not in kind.settings:
            yield (f"train.optimizer_settings has '{name}', which train.optimizer '{train.optimizer}' does not know; "
                   f"it knows {', '.join(kind.settings) or 'none'}.")
        elif not _fits(value, kind.settings[name]):
            yield (f"train.optimizer_settings.{name} is {value!r}; like its default {kind.settings[name]!r} of "
                   f"train.optimizer '{train.optimizer}' it is to be of type {type(kind.settings[name]).__name__}.")


def _fits(value: Setting, default: Setting) -> bool:
    wanted = (float, int) if isinstance(default, float) else (type(default),)
    return type(value) in wanted
