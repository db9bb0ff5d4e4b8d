"""The Llama network: `from model import Llama, ModelConfig, preset`.

Importing this package, `ModelConfig` or `preset` does not import torch; `Llama` does.
"""

from typing import TYPE_CHECKING, Any

from model.config import ModelConfig
from model.presets import preset

if TYPE_CHECKING:
    from model.llama import Llama

__all__ = ["Llama", "ModelConfig", "preset"]


def __getattr__(name: str) -> Any:
    if name == "Llama":
        from model.llama import Llama
        return Llama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
