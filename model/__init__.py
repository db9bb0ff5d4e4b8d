"""The Llama network: `from drover.model import Llama, ModelConfig, preset`.

Importing this package imports nothing else: `ModelConfig` imports pydantic, `preset` builds the published shapes, and
`Llama` imports torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "drover.model":
    raise ImportError("Drover's model is imported as drover.model: as model it would be a second copy.")
if TYPE_CHECKING:
    from drover.model.config import ModelConfig
    from drover.model.llama import Llama
    from drover.model.presets import preset

__all__ = ["Llama", "ModelConfig", "preset"]

_MODULES = {"Llama": "drover.model.llama", "ModelConfig": "drover.model.config", "preset": "drover.model.presets"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
