"""AdamW with weight decay on the inner matrices only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeline.config.training import TrainConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments, by torch's names; in a checkpoint `exp_avg.<parameter>` beside `model.<parameter>`."""


def decays(name: str, tied: bool) -> bool:
    """Whether weight decay applies: never to norms and embeddings, nor to an output matrix that is the embedding."""
    return not (name.endswith("norm.weight") or name.startswith("tok_embeddings.")
                or (tied and name.startswith("output.")))


def build_optimizer(model: nn.Module, train: TrainConfig, tied: bool) -> torch.optim.AdamW:
    """Fused AdamW over two groups of parameters; the loop sets the learning rate before each step."""
    return torch.optim.AdamW(**optimizer_arguments(model, train, tied), fused=True)


def moments_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """AdamW's state of a parameter: its two moments, and `step`. torch makes it in the first step only; here it is
    there from the start, as zeros, so that it can be saved and filled in."""
    state: dict[str, torch.Tensor] = optimizer.state[parameter]
    if not state:
        # The fused kernel wants the count beside the parameter, the others on the host.
        state["step"] = torch.zeros((), dtype=torch.float32,
                                    device=parameter.device if optimizer.defaults["fused"] else "cpu")
        state.update({moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS})
    return state


def optimizer_arguments(model: nn.Module, train: TrainConfig, tied: bool) -> dict[str, Any]:
    """AdamW's arguments: two groups, of which the first decays, and what the configuration says."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[decays(name, tied)].append(parameter)
    return {
        "params": [{"params": groups[True], "weight_decay": train.weight_decay},
                   {"params": groups[False], "weight_decay": 0.0}],
        "lr": train.lr, "betas": (train.beta1, train.beta2), "eps": train.eps}
