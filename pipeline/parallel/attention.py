"""Which backend computes attention inside documents, from the settings and the rank's device."""

from __future__ import annotations

import torch

from model.attention.backend import Where
from model.attention.choosing import Choice, choose
from model.config import ModelConfig
from pipeline.errors import UserError


def choose_attention(name: str, config: ModelConfig, device: torch.device, precision: torch.dtype,
                     compiled: bool, segmented: bool = False) -> Choice:
    """What `train.attention` (name) means here. compiled: whether blocks are. segmented: under context parallelism.

    Raises:
        UserError: there is no such backend, or it cannot run here.
    """
    try:
        return choose(name, Where(device, precision, compiled, config.head_width, config.sliding_window is not None,
                                  segmented))
    except ValueError as error:
        raise UserError(f"train.attention cannot be had here: {error}") from error
